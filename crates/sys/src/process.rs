//! Resource usage of processes and of the machine: processor time and memory, from procfs.
//!
//! [`CpuClock`] measures a span: start it, run the load, and read the time used by the processes
//! and by the whole machine. The kernel's counters tick at `USER_HZ` (usually 100 Hz), so a span
//! should last a second or more. The time of the machine includes time that no process is charged
//! for, such as the soft interrupts of the network stack.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Why a value could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}{}", gone(source))]
    Read {
        /// The file.
        path: String,
        /// The cause.
        source: io::Error,
    },
    /// The file does not have the format of proc(5).
    #[error("cannot understand {path}: no {field} in it")]
    Format {
        /// The file.
        path: String,
        /// The missing field.
        field: &'static str,
    },
}

fn gone(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; the process has ended, or /proc is not mounted",
        _ => "",
    }
}

/// Raises the limit of open files of this process to its hard limit (setrlimit(2),
/// `RLIMIT_NOFILE`). Returns the limit.
///
/// # Errors
/// Those of getrlimit(2) and setrlimit(2).
pub fn allow_more_files() -> io::Result<u64> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    Ok(most)
}

/// Becomes the leader of a session without a terminal (setsid(2)), so that neither keys nor a
/// hang-up of the terminal reach this process. Fails for the leader of a process group.
pub fn new_session() -> io::Result<()> {
    nix::unistd::setsid()?;
    Ok(())
}

/// Returns the process that listens at the socket to which this one is connected (unix(7), `SO_PEERCRED`).
///
/// # Errors
/// Those of getsockopt(2), or the process is in a PID namespace that this one does not see.
pub fn peer_pid(stream: &UnixStream) -> io::Result<u32> {
    match getsockopt(stream, PeerCredentials)?.pid() {
        0 => Err(io::Error::other("it runs in another PID namespace")),
        pid => Ok(pid.unsigned_abs()),
    }
}

/// Processor time of a process, of all its threads together but not of its children.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// Processor time in user space.
    pub user: Duration,
    /// Processor time in the kernel on behalf of the process.
    pub system: Duration,
}

impl CpuTime {
    /// Returns the sum of both.
    pub fn total(self) -> Duration {
        self.user + self.system
    }
}

/// Memory of a process in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Resident now (`VmRSS`).
    pub resident: u64,
    /// Maximum resident size so far (`VmHWM`).
    pub peak: u64,
}

/// Time of all processors together since boot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineTime {
    /// Time that is neither idle nor waiting for a disk: user, system, interrupts, stolen.
    pub busy: Duration,
    /// The part of it in soft interrupts, where most of the network stack runs.
    pub softirq: Duration,
    /// Idle or waiting for a disk.
    pub idle: Duration,
}

/// Returns the processor time of a process so far.
pub fn cpu_time(pid: u32) -> Result<CpuTime, ProcessError> {
    let path = format!("/proc/{pid}/stat");
    parse_stat(&read(&path)?).ok_or(ProcessError::Format {
        path,
        field: "utime and stime",
    })
}

/// Returns the processor time of this process so far.
pub fn own_cpu_time() -> Result<CpuTime, ProcessError> {
    cpu_time(std::process::id())
}

/// Returns the memory of a process.
pub fn memory(pid: u32) -> Result<Memory, ProcessError> {
    let path = format!("/proc/{pid}/status");
    parse_status(&read(&path)?).ok_or(ProcessError::Format {
        path,
        field: "VmRSS and VmHWM",
    })
}

/// Returns the memory of this process.
pub fn own_memory() -> Result<Memory, ProcessError> {
    memory(std::process::id())
}

/// Returns the time of the whole machine so far.
pub fn machine_time() -> Result<MachineTime, ProcessError> {
    let path = "/proc/stat".to_owned();
    let text = read(&path)?;
    let line = text.lines().next().unwrap_or_default();
    parse_cpu_line(line).ok_or(ProcessError::Format {
        path,
        field: "line `cpu`",
    })
}

/// Processor time used during a span.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuUsage {
    /// Length of the span.
    pub wall: Duration,
    /// Used by the watched processes. A process that ends during the span counts nothing.
    pub processes: CpuTime,
    /// Used by the whole machine.
    pub machine: MachineTime,
}

/// A stopwatch for processor time.
#[derive(Debug, Clone)]
pub struct CpuClock {
    started: Instant,
    processes: Vec<(u32, CpuTime)>,
    machine: MachineTime,
}

impl CpuClock {
    /// Starts to watch processes.
    pub fn start(pids: impl IntoIterator<Item = u32>) -> Result<Self, ProcessError> {
        let processes = pids
            .into_iter()
            .map(|pid| Ok((pid, cpu_time(pid)?)))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            processes,
            machine: machine_time()?,
            started: Instant::now(),
        })
    }

    /// Returns the processor time used since the start.
    pub fn elapsed(&self) -> Result<CpuUsage, ProcessError> {
        let mut processes = CpuTime::default();
        for &(pid, before) in &self.processes {
            let now = match cpu_time(pid) {
                Err(ProcessError::Read { .. }) => continue, // ended
                other => other?,
            };
            processes.user += now.user.saturating_sub(before.user);
            processes.system += now.system.saturating_sub(before.system);
        }
        let machine = machine_time()?;
        Ok(CpuUsage {
            wall: self.started.elapsed(),
            processes,
            machine: MachineTime {
                busy: machine.busy.saturating_sub(self.machine.busy),
                softirq: machine.softirq.saturating_sub(self.machine.softirq),
                idle: machine.idle.saturating_sub(self.machine.idle),
            },
        })
    }
}

fn read(path: &str) -> Result<String, ProcessError> {
    // Not read_to_string: a process name may not be UTF-8.
    fs::read(path)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .map_err(|source| ProcessError::Read {
            path: path.into(),
            source,
        })
}

fn ticks(count: u64) -> Duration {
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
        .ok()
        .flatten()
        .and_then(|hz| u64::try_from(hz).ok())
        .filter(|&hz| hz > 0)
        .unwrap_or(100);
    Duration::from_secs(count / per_second)
        + Duration::from_nanos(count % per_second * (1_000_000_000 / per_second))
}

/// proc_pid_stat(5): fields 14 and 15. The name before them may contain spaces and brackets.
fn parse_stat(text: &str) -> Option<CpuTime> {
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse().ok().map(ticks);
    Some(CpuTime {
        user: next()?,
        system: next()?,
    })
}

/// proc_pid_status(5).
fn parse_status(text: &str) -> Option<Memory> {
    let kibibytes = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()?
            .checked_mul(1024)
    };
    Some(Memory {
        resident: kibibytes("VmRSS:")?,
        peak: kibibytes("VmHWM:")?,
    })
}

/// proc_stat(5): user nice system idle iowait irq softirq steal guest guest_nice. The last two are
/// included in the first two.
fn parse_cpu_line(line: &str) -> Option<MachineTime> {
    let mut fields = line.split_whitespace();
    if !fields.next()?.starts_with("cpu") {
        return None;
    }
    let values: Vec<u64> = fields.map_while(|field| field.parse().ok()).collect();
    let &[user, nice, system, idle, iowait, irq, softirq, steal, ..] = values.as_slice() else {
        return None;
    };
    Some(MachineTime {
        busy: ticks(user + nice + system + irq + softirq + steal),
        softirq: ticks(softirq),
        idle: ticks(idle + iowait),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_child, skip};
    use nix::sched::{CloneFlags, unshare};
    use std::os::unix::net::UnixListener;

    /// The processor time of getrusage(2).
    fn by_getrusage() -> Duration {
        let usage =
            nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).unwrap();
        let duration = |time: nix::sys::time::TimeVal| {
            Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000)
        };
        duration(usage.user_time()) + duration(usage.system_time())
    }

    fn spin(length: Duration) {
        let start = Instant::now();
        while start.elapsed() < length {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn own_time_is_that_of_getrusage() {
        spin(Duration::from_millis(50));
        let before = by_getrusage();
        let own = own_cpu_time().unwrap().total();
        let after = by_getrusage();
        let tick = Duration::from_millis(20); // each of two counters is cut to 10 ms
        assert!(
            own + tick >= before && own <= after + tick,
            "{before:?} {own:?} {after:?}"
        );
    }

    #[test]
    fn the_clock_sees_a_spinning_process() {
        let clock = CpuClock::start([std::process::id()]).unwrap();
        let rusage = by_getrusage();
        spin(Duration::from_millis(300));
        let usage = clock.elapsed().unwrap();
        let spent = by_getrusage() - rusage;
        let difference = usage.processes.total().abs_diff(spent);
        assert!(
            difference <= Duration::from_millis(60),
            "{usage:?} {spent:?}"
        );
        assert!(usage.wall >= Duration::from_millis(300));
        // Twice one tick of 10 ms, because the two readings are not simultaneous.
        assert!(usage.machine.busy + Duration::from_millis(60) >= usage.processes.total());
    }

    #[test]
    fn machine_time_is_the_uptime_of_all_processors() {
        let uptime = fs::read_to_string("/proc/uptime").unwrap();
        let seconds: f64 = uptime.split_whitespace().next().unwrap().parse().unwrap();
        let machine = machine_time().unwrap();
        let sum = (machine.busy + machine.idle).as_secs_f64();
        let stat = fs::read_to_string("/proc/stat").unwrap();
        let processors = stat.matches("\ncpu").count();
        let expected = seconds * processors as f64;
        // The idle clock of a virtual machine drifts somewhat.
        assert!((sum / expected - 1.0).abs() < 0.1, "{sum} of {expected}");
    }

    #[test]
    fn memory_grows_with_touched_pages() {
        let before = own_memory().unwrap();
        let block = std::hint::black_box(vec![1u8; 32 << 20]);
        let after = own_memory().unwrap();
        drop(block);
        assert!(
            after.resident >= before.resident + (24 << 20),
            "{before:?} {after:?}"
        );
        assert!(after.peak >= after.resident);
    }

    #[test]
    fn a_name_with_brackets_and_spaces_is_passed_over() {
        let line = "7 (a) b 1 2 (c)) S 1 7 7 0 -1 4194304 90 0 0 0 250 130 0 0 20 0 1 0 5 0 0";
        let time = parse_stat(line).unwrap();
        assert_eq!(time.user, Duration::from_millis(2500));
        assert_eq!(time.system, Duration::from_millis(1300));
    }

    #[test]
    fn busy_is_all_but_idle_and_iowait() {
        let time = parse_cpu_line("cpu 100 200 300 4000 500 60 70 80 90 10").unwrap();
        assert_eq!(time.busy, Duration::from_millis(8100));
        assert_eq!(time.softirq, Duration::from_millis(700));
        assert_eq!(time.idle, Duration::from_millis(45_000));
    }

    #[test]
    fn a_listener_of_another_pid_namespace_has_no_number() {
        if !nix::unistd::geteuid().is_root() {
            return skip("a PID namespace needs root");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let ask = || peer_pid(&UnixStream::connect(&path)?);
        assert_eq!(ask().unwrap(), std::process::id());
        in_child(|| {
            unshare(CloneFlags::CLONE_NEWPID).map_err(|errno| errno.to_string())?;
            // The first process there.
            in_child(|| match ask() {
                Err(error) if error.to_string().contains("another PID namespace") => Ok(()),
                other => Err(format!("{other:?}")),
            });
            Ok(())
        });
    }

    #[test]
    fn a_process_that_is_gone_says_so() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let error = cpu_time(child.id()).unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
    }

    #[test]
    fn files_of_another_shape_are_refused() {
        assert_eq!(parse_stat("7 (x) S 1"), None);
        assert_eq!(parse_status("VmRSS: many kB\nVmHWM: 1 kB"), None);
        assert_eq!(parse_cpu_line("intr 1 2 3 4 5 6 7 8 9"), None);
    }
}
