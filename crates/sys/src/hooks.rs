//! Run a configuration's shell hooks with the privileges that the daemon itself has given up.
//!
//! [`HookRunner::start`] forks a process before the daemon drops its privileges and opens its
//! sockets. All it ever takes from the daemon is the number of one of the commands it was given at
//! the start; so whoever takes over the daemon gains no new command to run. It ends when the daemon
//! does. Ctrl-C and SIGTERM do not reach it, as the hooks at the end are run because of them.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

/// A process that runs commands fixed in advance.
#[derive(Debug)]
pub struct HookRunner {
    socket: Option<UnixStream>,
    process: Pid,
    count: usize,
}

impl HookRunner {
    /// Fork the process; `commands` are lines for `/bin/sh -c`, run with the environment of now. The
    /// process must still have one thread only. The child keeps none of its open files but the
    /// standard ones.
    pub fn start(commands: Vec<String>) -> io::Result<Self> {
        Self::start_with(commands, || ())
    }

    /// As [`HookRunner::start`]; `epilogue` runs in the child once this process has dropped the
    /// runner or is gone, however it ended: with the privileges of now, to clean up after a daemon
    /// that was killed.
    pub fn start_with(commands: Vec<String>, epilogue: impl FnOnce()) -> io::Result<Self> {
        let threads = std::fs::read_dir("/proc/self/task")?.count();
        if threads != 1 {
            return Err(io::Error::other(format!(
                "{threads} threads are running: the hook runner must be started before the second"
            )));
        }
        Self::fork(commands, epilogue)
    }

    fn fork(commands: Vec<String>, epilogue: impl FnOnce()) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        // SAFETY: the process has one thread (checked by `start`), so no lock is held by another
        // and the child may go on as usual; it never returns from this function.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self {
                socket: Some(ours),
                process: child,
                count: commands.len(),
            }),
            ForkResult::Child => {
                drop(ours);
                let code = i32::from(serve(theirs, &commands).is_err());
                epilogue();
                // SAFETY: ends the child without running the parent's destructors and exit hooks.
                unsafe { libc::_exit(code) }
            }
        }
    }

    /// Run the command of that number, counted from 0, and wait for it.
    pub fn run(&mut self, number: usize) -> io::Result<ExitStatus> {
        let index = u32::try_from(number).ok().filter(|_| number < self.count);
        let index = index.ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("there is no hook {number}"),
            )
        })?;
        let Some(socket) = &mut self.socket else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        socket.write_all(&index.to_ne_bytes())?;
        let mut answer = [0; 4];
        socket.read_exact(&mut answer).map_err(|error| {
            io::Error::new(error.kind(), "the process that runs the hooks is gone")
        })?;
        Ok(ExitStatus::from_raw(i32::from_ne_bytes(answer)))
    }
}

impl Drop for HookRunner {
    fn drop(&mut self) {
        drop(self.socket.take()); // the child reads the end of the stream and leaves
        let _ = waitpid(self.process, None);
    }
}

/// The child's life.
fn serve(mut socket: UnixStream, commands: &[String]) -> io::Result<()> {
    close_all_but(&socket);
    // Blocked, not ignored: std gives programs it starts an empty mask, but not default actions.
    let mut signals = SigSet::empty();
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        signals.add(signal);
    }
    signals.thread_block()?;
    let mut number = [0; 4];
    while socket.read_exact(&mut number).is_ok() {
        let status = commands
            .get(u32::from_ne_bytes(number) as usize)
            .map(|command| {
                Command::new("/bin/sh")
                    .arg("-c")
                    .arg(command)
                    .stdin(Stdio::null())
                    .status()
            })
            // As a shell reports a program that it cannot start.
            .map_or(127 << 8, |status| {
                status.map_or(127 << 8, ExitStatus::into_raw)
            });
        socket.write_all(&status.to_ne_bytes())?;
    }
    Ok(())
}

/// Close the parent's files, so that a tunnel's interface does not live as long as this process.
fn close_all_but(socket: &UnixStream) {
    let kept = socket.as_raw_fd().cast_unsigned();
    for (first, last) in [(3, kept.saturating_sub(1)), (kept + 1, u32::MAX)] {
        if first <= last {
            // SAFETY: the forked child uses no descriptor but the socket and the standard three,
            // and leaves by _exit, so that no owner of a closed one ever acts again. Before Linux
            // 5.9 the call fails and they stay open.
            unsafe { libc::close_range(first, last, 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::tests::{in_child, namespace};

    fn code(status: ExitStatus) -> Option<i32> {
        status.code()
    }

    #[test]
    fn it_runs_the_command_of_that_number() {
        in_child(|| {
            let commands = vec!["exit 3".into(), "exit 4".into()];
            let mut runner = HookRunner::start(commands).map_err(|e| e.to_string())?;
            let codes = [runner.run(1), runner.run(0)].map(|status| code(status.unwrap()));
            if codes == [Some(4), Some(3)] {
                Ok(())
            } else {
                Err(format!("{codes:?}"))
            }
        });
    }

    #[test]
    fn it_keeps_what_the_caller_gives_up() {
        if namespace().is_none() {
            return;
        }
        in_child(|| {
            // CAP_SYS_ADMIN is bit 21.
            let check = "test $(( 0x$(sed -n 's/CapEff:.//p' /proc/self/status) >> 21 & 1 )) = 1";
            let mut runner = HookRunner::start(vec![check.into()]).map_err(|e| e.to_string())?;
            crate::privilege::drop_to(&[]).map_err(|e| e.to_string())?;
            let before = Command::new("sh")
                .args(["-c", check])
                .status()
                .map_err(|e| e.to_string())?;
            let status = runner.run(0).map_err(|e| e.to_string())?;
            if status.success() && !before.success() {
                Ok(())
            } else {
                Err(format!("{status}"))
            }
        });
    }

    #[test]
    fn a_number_without_a_command_is_refused() {
        in_child(|| {
            let mut runner = HookRunner::start(vec!["true".into()]).map_err(|e| e.to_string())?;
            match runner.run(1) {
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn it_keeps_no_file_of_the_caller_open() {
        in_child(|| {
            let (mut reader, writer) = io::pipe().map_err(|e| e.to_string())?;
            let mut runner = HookRunner::start(vec!["true".into()]).map_err(|e| e.to_string())?;
            runner.run(0).map_err(|e| e.to_string())?;
            drop(writer);
            // Would block for ever if the other process still held the writing end.
            let length = reader.read(&mut [0]).map_err(|e| e.to_string())?;
            if length == 0 {
                Ok(())
            } else {
                Err("data from nowhere".into())
            }
        });
    }

    #[test]
    fn signals_of_the_terminal_do_not_end_it() {
        in_child(|| {
            let mut runner = HookRunner::start(vec!["exit 5".into()]).map_err(|e| e.to_string())?;
            runner.run(0).map_err(|e| e.to_string())?; // it has blocked them by now
            for signal in [Signal::SIGINT, Signal::SIGTERM] {
                nix::sys::signal::kill(runner.process, signal).map_err(|e| e.to_string())?;
            }
            let status = runner.run(0).map_err(|e| e.to_string())?;
            if code(status) == Some(5) {
                Ok(())
            } else {
                Err(format!("{status}"))
            }
        });
    }

    #[test]
    fn a_hook_is_not_deaf_to_signals() {
        in_child(|| {
            let commands = vec!["kill -TERM $$; sleep 5".into()];
            let mut runner = HookRunner::start(commands).map_err(|e| e.to_string())?;
            let status = runner.run(0).map_err(|e| e.to_string())?;
            if status.signal() == Some(libc::SIGTERM) {
                Ok(())
            } else {
                Err(format!("{status}"))
            }
        });
    }

    #[test]
    fn it_is_gone_after_the_drop() {
        in_child(|| {
            let runner = HookRunner::start(vec![]).map_err(|e| e.to_string())?;
            let process = runner.process;
            drop(runner);
            match nix::sys::signal::kill(process, None) {
                Err(nix::errno::Errno::ESRCH) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn the_epilogue_runs_when_the_caller_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().join("mark");
        // SAFETY: the child only forks, waits in a system call and is killed; it never returns.
        let ForkResult::Parent { child } = unsafe { fork() }.unwrap() else {
            let runner = HookRunner::fork(vec!["true".into()], || {
                let _ = std::fs::write(&mark, "");
            });
            let _ = runner.and_then(|mut runner| {
                runner.run(0)?; // it is there now
                nix::sys::signal::raise(Signal::SIGKILL)?;
                Ok(())
            });
            // SAFETY: as above; not reached unless something failed.
            unsafe { libc::_exit(1) }
        };
        waitpid(child, None).unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while !mark.exists() {
            assert!(std::time::Instant::now() < until, "no epilogue");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn a_process_with_threads_is_refused() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(HookRunner::start(vec![]).is_err());
        drop(stop);
        let _ = other.join();
    }
}
