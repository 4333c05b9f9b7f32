//! A child process that keeps the privileges which its parent drops.
//!
//! [`Monitor::start`] forks it before the parent drops its privileges and faces the network. The
//! two share only a stream of bytes. The function given to `start` interprets the messages and must
//! treat each as forged. The monitor outlives the parent, however that ended, so that it can clean
//! up. It catches Ctrl-C and SIGTERM and does nothing: they are for the parent, which tells it what to do.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

/// The parent's handle on the process. Dropping it closes the stream and waits until the process
/// has ended.
#[derive(Debug)]
pub struct Monitor {
    socket: Option<UnixStream>,
    process: Pid,
}

impl Monitor {
    /// Forks the process, which runs `main` with its end of the stream and then exits. Of the open
    /// files it keeps the standard three and the descriptors in `files`.
    ///
    /// # Errors
    /// This process has a second thread, or the system is out of processes or sockets.
    pub fn start(files: &[RawFd], main: impl FnOnce(UnixStream)) -> io::Result<Monitor> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        if threads != 1 {
            return Err(io::Error::other(format!(
                "{threads} threads are running: the monitor must be started before the second"
            )));
        }
        Self::fork(files, main)
    }

    fn fork(files: &[RawFd], main: impl FnOnce(UnixStream)) -> io::Result<Monitor> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut kept = files.to_vec();
        kept.push(theirs.as_raw_fd());
        // SAFETY: the process has one thread (checked by `start`), so no lock is held by another
        // and the child may go on as usual; it never returns from this function.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Monitor {
                socket: Some(ours),
                process: child,
            }),
            ForkResult::Child => {
                let _ = ours;
                close_all_but(kept);
                let code = i32::from(prepare().is_err());
                if code == 0 {
                    main(theirs);
                }
                // SAFETY: ends the child without running the parent's destructors and exit hooks.
                unsafe { libc::_exit(code) }
            }
        }
    }

    /// Returns the parent's end of the stream.
    ///
    /// # Panics
    /// Never: the stream exists until the drop.
    pub fn socket(&self) -> &UnixStream {
        self.socket.as_ref().expect("open until the drop")
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        drop(self.socket.take()); // the child reads the end of the stream and leaves
        let _ = waitpid(self.process, None);
    }
}

/// Waits until the other end of the stream is closed. Received data is discarded.
pub fn wait_for_the_end(mut socket: &UnixStream) {
    let mut nothing = [0; 64];
    while matches!(socket.read(&mut nothing), Ok(length) if length > 0) {}
}

/// Makes the child survive signals of the terminal, and its memory, which may hold keys, unreadable
/// for others.
fn prepare() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    // The signals are caught, neither blocked nor ignored: a program that is executed inherits the
    // mask and ignored signals, but no handlers (execve(2)), and signals must end a hook.
    let caught = SigAction::new(
        SigHandler::Handler(nothing),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    let mut signals = SigSet::empty();
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        // SAFETY: the handler does nothing.
        unsafe { sigaction(signal, &caught) }?;
        signals.add(signal);
    }
    // The process that started this one may have blocked them.
    signals.thread_unblock()?;
    crate::privilege::forbid_core_dumps().map_err(io::Error::other)
}

/// Closes the parent's files, so that a tunnel's interface does not live as long as this process.
fn close_all_but(mut kept: Vec<RawFd>) {
    kept.sort_unstable();
    let mut first = 3;
    for end in kept.into_iter().map(i32::cast_unsigned).chain([u32::MAX]) {
        if end > first {
            // SAFETY: the forked child uses no descriptor but those kept and the standard three, and leaves by _exit, so that
            // no owner of a closed one ever acts again. Before Linux 5.9 the call fails and they stay open.
            // By number: musl has no function for it.
            unsafe { libc::syscall(libc::SYS_close_range, first, end - 1, 0) };
        }
        first = first.max(end.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::test_namespace::namespace;
    use crate::testing::in_child;

    /// Answers each byte with the result of `answer`, until the other end is closed.
    fn echo(mut socket: UnixStream, answer: impl Fn(u8) -> u8) {
        let mut byte = [0];
        while socket.read_exact(&mut byte).is_ok() {
            let _ = socket.write_all(&[answer(byte[0])]);
        }
    }

    fn query(monitor: &Monitor, byte: u8) -> Result<u8, String> {
        let mut answer = [0];
        let sent = monitor.socket().write_all(&[byte]);
        sent.and_then(|()| monitor.socket().read_exact(&mut answer))
            .map_err(|e| e.to_string())?;
        Ok(answer[0])
    }

    fn expect<T: PartialEq + std::fmt::Debug>(found: T, wanted: T) -> Result<(), String> {
        if found == wanted {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    }

    /// Returns whether the calling thread has CAP_SYS_ADMIN, which is bit 21.
    fn is_admin() -> u8 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = u64::from_str_radix(line.unwrap().trim(), 16).unwrap();
        (set >> 21 & 1) as u8
    }

    #[test]
    fn it_keeps_the_privileges_that_the_parent_drops() {
        if namespace().is_none() {
            return;
        }
        in_child(|| {
            let monitor = Monitor::start(&[], |socket| echo(socket, |_| is_admin()));
            let monitor = monitor.map_err(|e| e.to_string())?;
            crate::privilege::drop_to(&[], None).map_err(|e| e.to_string())?;
            expect((is_admin(), query(&monitor, 0)?), (0, 1))
        });
    }

    #[test]
    fn it_keeps_no_file_of_the_caller_open_but_those_it_was_given() {
        in_child(|| {
            let pipe = || io::pipe().map_err(|e| e.to_string());
            let (mut reader, writer) = pipe()?;
            let (mut kept_reader, kept_writer) = pipe()?;
            let monitor = Monitor::start(&[kept_writer.as_raw_fd()], |socket| {
                let mut file = &kept_writer;
                let _ = file.write_all(&[7]);
                echo(socket, |byte| byte);
            });
            let monitor = monitor.map_err(|e| e.to_string())?;
            query(&monitor, 0)?;
            drop(writer);
            let mut byte = [0];
            // This would block forever if the other process still held the writing end.
            let length = reader.read(&mut byte).map_err(|e| e.to_string())?;
            kept_reader
                .read_exact(&mut byte)
                .map_err(|e| e.to_string())?;
            expect((length, byte[0]), (0, 7))
        });
    }

    #[test]
    fn signals_of_the_terminal_do_not_end_it() {
        in_child(|| {
            let monitor = Monitor::start(&[], |socket| echo(socket, |byte| byte + 1));
            let monitor = monitor.map_err(|e| e.to_string())?;
            query(&monitor, 0)?; // it has blocked them by now
            for signal in [Signal::SIGINT, Signal::SIGTERM] {
                nix::sys::signal::kill(monitor.process, signal).map_err(|e| e.to_string())?;
            }
            expect(query(&monitor, 4)?, 5)
        });
    }

    #[test]
    fn a_program_that_it_starts_is_not_deaf_to_signals() {
        in_child(|| {
            let monitor = Monitor::start(&[], |socket| {
                echo(socket, |_| {
                    use std::os::unix::process::ExitStatusExt;
                    let mut shell = std::process::Command::new("sh");
                    let status = shell.args(["-c", "kill -TERM $$; exec sleep 5"]).status();
                    status.ok().and_then(|status| status.signal()).unwrap_or(0) as u8
                });
            });
            let monitor = monitor.map_err(|e| e.to_string())?;
            expect(i32::from(query(&monitor, 0)?), libc::SIGTERM)
        });
    }

    #[test]
    fn it_is_gone_after_the_drop() {
        in_child(|| {
            let monitor = Monitor::start(&[], |socket| wait_for_the_end(&socket));
            let monitor = monitor.map_err(|e| e.to_string())?;
            let process = monitor.process;
            drop(monitor);
            expect(
                nix::sys::signal::kill(process, None),
                Err(nix::errno::Errno::ESRCH),
            )
        });
    }

    #[test]
    fn it_outlives_a_caller_that_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        // SAFETY: the child only forks, waits in a system call and is killed; it never returns.
        let ForkResult::Parent { child } = unsafe { fork() }.unwrap() else {
            let monitor = Monitor::fork(&[], |socket| {
                let _ = (&socket).write_all(&[0]);
                wait_for_the_end(&socket);
                let _ = std::fs::write(&mark, "");
            });
            let _ = monitor.and_then(|monitor| {
                monitor.socket().read_exact(&mut [0])?; // it is there now
                nix::sys::signal::raise(Signal::SIGKILL)?;
                Ok(())
            });
            // SAFETY: as above; not reached unless something failed.
            unsafe { libc::_exit(1) }
        };
        waitpid(child, None).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while !mark.exists() {
            assert!(std::time::Instant::now() < until, "it did not clean up");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_process_with_threads_is_refused() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(Monitor::start(&[], drop).is_err());
        drop(stop);
        let _ = other.join();
    }
}
