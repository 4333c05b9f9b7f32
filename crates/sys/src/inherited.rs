//! Open descriptors that the program which started this one passes by number, in an environment variable.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt};

/// Why a descriptor cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InheritedError {
    /// The value of the variable is not the number of a descriptor that may be taken.
    #[error(
        "cannot use {variable}={value}: {reason}; pass the number of an open descriptor above 2"
    )]
    Number {
        /// The environment variable.
        variable: String,
        /// Its value.
        value: String,
        /// Its fault.
        reason: String,
    },
    /// The descriptor is not a listening UNIX socket.
    #[error(
        "cannot use the descriptor of {variable}: {reason}; pass a listening UNIX stream socket"
    )]
    NotListening {
        /// The environment variable.
        variable: String,
        /// Its kind, or why that is not known.
        reason: String,
    },
}

/// Takes the descriptor whose number is in an environment variable; `None` if the variable is not
/// set or empty. Programs that this process starts do not inherit it further.
///
/// # Errors
/// [`InheritedError::Number`], also for a descriptor that this process has taken or opened itself.
pub fn take(variable: &str) -> Result<Option<OwnedFd>, InheritedError> {
    let Some(value) = std::env::var_os(variable).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let value = value.to_string_lossy().into_owned();
    take_number(&value)
        .map(Some)
        .map_err(|reason| InheritedError::Number {
            variable: variable.to_owned(),
            value,
            reason,
        })
}

fn take_number(value: &str) -> Result<OwnedFd, String> {
    let number: RawFd = value.parse().map_err(|_| "not a number".to_owned())?;
    if number <= libc::STDERR_FILENO {
        return Err("negative, or a standard stream".to_owned());
    }
    // SAFETY: F_GETFD takes no argument, and fails if no such descriptor is open.
    let flags = Errno::result(unsafe { libc::fcntl(number, libc::F_GETFD) });
    let flags = flags.map_err(|errno| io::Error::from(errno).to_string())?;
    if flags & libc::FD_CLOEXEC != 0 {
        return Err("not inherited".to_owned());
    }
    // SAFETY: F_SETFD takes an integer.
    let set = unsafe { libc::fcntl(number, libc::F_SETFD, flags | libc::FD_CLOEXEC) };
    Errno::result(set).map_err(|errno| io::Error::from(errno).to_string())?;
    // SAFETY: the descriptor is open. It has no other owner: this process opens descriptors with
    // FD_CLOEXEC, as the standard library does, so one without it was inherited, and it has
    // FD_CLOEXEC from now on, so it is taken once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Takes the listening UNIX stream socket whose descriptor is in an environment variable, like
/// [`take`].
///
/// # Errors
/// [`InheritedError`].
pub fn take_listener(variable: &str) -> Result<Option<UnixListener>, InheritedError> {
    let Some(descriptor) = take(variable)? else {
        return Ok(None);
    };
    listener(descriptor)
        .map(Some)
        .map_err(|error| InheritedError::NotListening {
            variable: variable.to_owned(),
            reason: error.to_string(),
        })
}

fn listener(descriptor: OwnedFd) -> io::Result<UnixListener> {
    if !getsockopt(&descriptor, sockopt::AcceptConn)? {
        return Err(io::Error::other("a socket that does not listen"));
    }
    let listener = UnixListener::from(descriptor);
    // Fails for another family.
    listener.local_addr()?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::{AsRawFd, IntoRawFd};

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::*;
    use crate::testing::in_child;

    /// Returns the number of `descriptor`, as if it had been inherited.
    fn inherited(descriptor: OwnedFd) -> Result<RawFd, String> {
        let set = fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::empty()));
        set.map_err(|errno| errno.to_string())?;
        Ok(descriptor.into_raw_fd())
    }

    #[test]
    fn an_inherited_descriptor_is_taken_once_and_not_passed_on() {
        in_child(|| {
            let (reader, _writer) = io::pipe().map_err(|e| e.to_string())?;
            let number = inherited(reader.into())?;
            let taken = take_number(&number.to_string())?;
            let flags = fcntl(&taken, FcntlArg::F_GETFD).map_err(|e| e.to_string())?;
            let again = take_number(&number.to_string()).err();
            match (taken.as_raw_fd() == number, flags, again.as_deref()) {
                (true, libc::FD_CLOEXEC, Some("not inherited")) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn numbers_of_nothing_are_refused() {
        for (value, reason) in [
            ("seven", "not a number"),
            ("-1", "negative, or a standard stream"),
            ("2", "negative, or a standard stream"),
            ("1000000", "Bad file descriptor (os error 9)"),
        ] {
            assert_eq!(take_number(value).err().as_deref(), Some(reason));
        }
    }

    #[test]
    fn only_a_listening_unix_socket_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("sock")).unwrap();
        assert!(listener(unix.into()).is_ok());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(listener(tcp.into()).is_err());
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(listener(end.into()).is_err());
        let (reader, _writer) = io::pipe().unwrap();
        assert!(listener(reader.into()).is_err());
    }
}
