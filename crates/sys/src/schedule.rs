//! Processor affinity and nice value of a process, for all of its threads, and real-time priority of
//! one thread.
//!
//! In Linux both are attributes of a thread (sched(7)), so a process is changed thread by thread. A
//! thread that starts in between inherits from its creator.

use std::fs;
use std::io;
use std::str::FromStr;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Returns the processors on which a process (its first thread) may run, in ascending order.
///
/// # Errors
/// The process does not exist.
pub fn affinity(pid: u32) -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(thread(pid))?;
    let all = 0..CpuSet::count();
    Ok(all
        .filter(|cpu| set.is_set(*cpu).unwrap_or(false))
        .map(|cpu| cpu as u32)
        .collect())
}

/// Restricts every thread of a process to these processors.
///
/// # Errors
/// None of them is online or allowed, the process does not exist, or it belongs to another user.
pub fn set_affinity(pid: u32, cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu as usize)?;
    }
    for_each_thread(pid, |tid| Ok(sched_setaffinity(thread(tid), &set)?))
}

/// Returns the nice value of a process (its first thread): -20 to 19.
///
/// # Errors
/// The process does not exist.
pub fn nice(pid: u32) -> io::Result<i32> {
    field(pid, 19)
}

/// Returns the start of a process, in clock ticks since the boot. Of two processes with the same
/// number, the later one has a later start.
///
/// # Errors
/// The process does not exist.
pub fn start_time(pid: u32) -> io::Result<u64> {
    field(pid, 22)
}

/// Returns a field of `/proc/PID/stat`, by its number in proc_pid_stat(5).
fn field<T: FromStr>(pid: u32, number: usize) -> io::Result<T> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // After the name, which may contain anything, comes field 3.
    let behind = text.rsplit_once(')').map(|(_, behind)| behind);
    let field = behind.and_then(|fields| fields.split_whitespace().nth(number - 3)?.parse().ok());
    field.ok_or_else(|| {
        let message = format!("/proc/{pid}/stat has no field {number}");
        io::Error::new(io::ErrorKind::InvalidData, message)
    })
}

/// Sets the nice value of every thread of a process.
///
/// # Errors
/// A lower value than the current one needs `CAP_SYS_NICE`; the process does not exist, or belongs
/// to another user.
pub fn set_nice(pid: u32, nice: i32) -> io::Result<()> {
    for_each_thread(pid, |tid| {
        // SAFETY: the call takes three numbers and touches no memory of ours.
        let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, tid, nice) };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    })
}

/// Gives the calling thread the lowest real-time priority (`SCHED_FIFO`, sched(7)): it runs before
/// every ordinary thread as soon as it has something to do.
///
/// # Errors
/// It needs `CAP_SYS_NICE` or a limit of `RLIMIT_RTPRIO` above 0.
pub fn set_real_time() -> io::Result<()> {
    // The kernel's `struct sched_param` is this number alone.
    let priority: libc::c_int = 1;
    // SAFETY: 0 is the calling thread, and the pointer is to a live number, which is only read. By number: musl's function of
    // this name only fails.
    let done = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            0,
            libc::SCHED_FIFO,
            &raw const priority,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn thread(tid: u32) -> Pid {
    Pid::from_raw(tid as i32)
}

/// Skips threads that end meanwhile. A process without threads is an error.
fn for_each_thread(pid: u32, change: impl Fn(u32) -> io::Result<()>) -> io::Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let Some(tid) = entry?
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        match change(tid) {
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            other => other?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Sleeper(Command::new("sleep").arg("30").spawn().expect("sleep"))
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_is_moved_and_back() {
        let sleeper = Sleeper::start();
        let pid = sleeper.0.id();
        let before = affinity(pid).expect("affinity");
        set_affinity(pid, &before[..1]).expect("move");
        assert_eq!(affinity(pid).expect("affinity"), before[..1]);
        set_affinity(pid, &before).expect("back");
        assert_eq!(affinity(pid).expect("affinity"), before);
    }

    #[test]
    fn a_process_may_be_made_less_eager() {
        let sleeper = Sleeper::start();
        let pid = sleeper.0.id();
        let before = nice(pid).expect("nice");
        set_nice(pid, before + 1).expect("renice");
        assert_eq!(nice(pid).expect("nice"), before + 1);
    }

    #[test]
    fn a_thread_with_real_time_priority_says_so_in_procfs() {
        let policy = std::thread::spawn(|| {
            set_real_time().map(|()| {
                let stat = fs::read_to_string("/proc/thread-self/stat").expect("procfs");
                let (_, fields) = stat.rsplit_once(')').expect("a name");
                // Field 41, `policy`; the state is field 3 (proc_pid_stat(5)).
                fields.split_whitespace().nth(38).map(str::to_owned)
            })
        });
        match policy.join().expect("thread") {
            Ok(policy) => assert_eq!(policy.as_deref(), Some("1")),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
        }
    }

    #[test]
    fn a_missing_process_is_an_error() {
        // Above the largest process id (proc_sys_kernel(5)).
        assert!(set_nice(5_000_000, 0).is_err() && affinity(5_000_000).is_err());
    }
}
