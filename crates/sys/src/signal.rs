//! Signals as events of the poll loop instead of handlers: they are blocked and read from a
//! signalfd.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::signal::{SigSet, Signal as Number};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// A request of the operator or of the service manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: the service manager stops this process.
    Terminate,
    /// SIGHUP: the terminal was closed, or the configuration should be read again.
    Hangup,
}

/// SIGINT, SIGTERM and SIGHUP, blocked in the calling thread and delivered to a file descriptor.
///
/// Create it before starting threads, which inherit the mask. Child processes of
/// `std::process::Command` get an empty mask from the standard library. Dropping it restores the
/// previous mask in the thread that drops it.
#[derive(Debug)]
pub struct Signals {
    fd: SignalFd,
    before: SigSet,
}

impl Signals {
    /// Blocks the three signals and opens the descriptor (non-blocking, close-on-exec).
    ///
    /// # Errors
    /// Those of signalfd(2): out of descriptors or memory.
    pub fn block() -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Number::SIGINT);
        mask.add(Number::SIGTERM);
        mask.add(Number::SIGHUP);
        let before = SigSet::thread_get_mask()?;
        mask.thread_block()?;
        match SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC) {
            Ok(fd) => Ok(Signals { fd, before }),
            Err(errno) => {
                before.thread_set_mask()?;
                Err(errno.into())
            }
        }
    }

    /// Returns the next pending signal; `None` if there is none.
    ///
    /// # Errors
    /// Those of read(2).
    pub fn next(&self) -> io::Result<Option<Signal>> {
        while let Some(info) = self.fd.read_signal()? {
            match Number::try_from(info.ssi_signo.cast_signed()) {
                Ok(Number::SIGINT) => return Ok(Some(Signal::Interrupt)),
                Ok(Number::SIGTERM) => return Ok(Some(Signal::Terminate)),
                Ok(Number::SIGHUP) => return Ok(Some(Signal::Hangup)),
                // Other signals are not in the mask, so the kernel does not deliver them here.
                _ => {}
            }
        }
        Ok(None)
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // This cannot fail, because the mask came from the kernel.
        let _ = self.before.thread_set_mask();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a signal to this thread only, so that tests in other threads are not affected.
    fn raise(number: Number) {
        // SAFETY: pthread_self is always valid for the calling thread.
        let error = unsafe { libc::pthread_kill(libc::pthread_self(), number as i32) };
        assert_eq!(error, 0);
    }

    #[test]
    fn a_blocked_signal_is_read_once() {
        let signals = Signals::block().expect("signalfd");
        assert_eq!(signals.next().expect("read"), None);
        raise(Number::SIGTERM);
        assert_eq!(signals.next().expect("read"), Some(Signal::Terminate));
        assert_eq!(signals.next().expect("read"), None);
    }

    #[test]
    fn hangup_and_interrupt_are_distinct() {
        let signals = Signals::block().expect("signalfd");
        raise(Number::SIGHUP);
        assert_eq!(signals.next().expect("read"), Some(Signal::Hangup));
        raise(Number::SIGINT);
        assert_eq!(signals.next().expect("read"), Some(Signal::Interrupt));
    }

    #[test]
    fn dropping_restores_the_mask() {
        drop(Signals::block().expect("signalfd"));
        let mask = SigSet::thread_get_mask().expect("mask");
        assert!(!mask.contains(Number::SIGTERM));
    }
}
