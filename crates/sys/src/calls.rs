//! Counts of calls of kernel functions, by their names: counting events of the `kprobe` PMU, one
//! for each function and processor, for the whole machine.
//!
//! The kernel puts a breakpoint (or a call, where it can) at the start of the function while the
//! event is open. It removes it when the descriptor is closed, also when the process is killed, so
//! nothing is left behind. Probes written to tracefs would stay until somebody removes them, and
//! would only add support for kernels before 4.17: both need `CONFIG_KPROBE_EVENTS`.
//!
//! Counting adds a cost to each call, and opens one probe per processor: `docs/reference/doctor.md`
//! has figures. It needs `CAP_PERFMON`, whatever `kernel.perf_event_paranoid` is.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;

use crate::perf::{self, Attributes, CpuGroup, TracepointCounters};

/// File with the number of the PMU, which differs between kernels
/// (Documentation/ABI/testing/sysfs-bus-event_source-devices-format).
const TYPE: &str = "/sys/bus/event_source/devices/kprobe/type";

/// Whether this kernel can count calls. Whether this process may count them is known only after
/// [`Calls::open`].
pub fn can_be_counted() -> bool {
    fs::metadata(TYPE).is_ok()
}

/// Why calls cannot be counted.
#[derive(Debug, thiserror::Error)]
pub enum CallsError {
    /// The kernel has no such PMU.
    #[error("this kernel cannot count calls: {TYPE}: {source} (CONFIG_KPROBE_EVENTS, Linux 4.17)")]
    NoKprobes {
        /// The error of reading its number.
        source: io::Error,
    },
    /// `EACCES`, `EPERM`.
    #[error(
        "not permitted to count calls: {errno}; run as root or give CAP_PERFMON (where the kernel is locked down, that does not help)"
    )]
    NotPermitted {
        /// The kernel's error number.
        errno: Errno,
    },
    /// Any other error.
    #[error("cannot count calls of {function} on processor {cpu}: {errno}")]
    Refused {
        /// The function.
        function: String,
        /// The processor.
        cpu: u32,
        /// The kernel's error number.
        errno: Errno,
    },
    /// None of the functions exists, or there is no processor.
    #[error("nothing to count: none of the functions exists")]
    Nothing,
}

/// Why one function is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// The function was inlined, is in a module that is not loaded, or does not exist in this
    /// kernel.
    NoSuchFunction,
    /// Several functions have this name.
    Ambiguous,
    /// The kernel does not allow a probe on it.
    NotProbeable,
}

impl std::fmt::Display for Absence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Absence::NoSuchFunction => {
                "this kernel has no such function (it is inlined, in a module that is not loaded, or from another version)"
            }
            Absence::Ambiguous => "this kernel has several functions of that name",
            Absence::NotProbeable => "this kernel does not allow a probe on it",
        })
    }
}

/// Counters of calls.
#[derive(Debug)]
pub struct Calls {
    counters: TracepointCounters,
    counted: Vec<&'static CStr>,
    absent: Vec<(&'static CStr, Absence)>,
}

impl Calls {
    /// Starts to count calls of each function on these processors. Uses one descriptor for each
    /// function and processor. Skips functions that do not exist, see [`Calls::absent`], and
    /// processors that have gone offline.
    ///
    /// # Errors
    /// No call can be counted at all.
    pub fn open(functions: &[&'static CStr], cpus: &[u32]) -> Result<Self, CallsError> {
        let kind = pmu().map_err(|source| CallsError::NoKprobes { source })?;
        let mut counted = functions.to_vec();
        let mut absent = Vec::new();
        let mut groups = Vec::new();
        for &cpu in cpus {
            // The first processor shows which functions exist.
            let group = open_cpu(kind, &mut counted, &mut absent, cpu, groups.is_empty())?;
            groups.extend(group);
        }
        if groups.is_empty() {
            return Err(CallsError::Nothing);
        }
        Ok(Calls {
            counters: TracepointCounters::of(groups, counted.len()),
            counted,
            absent,
        })
    }

    /// Returns the functions whose calls are counted.
    pub fn functions(&self) -> &[&'static CStr] {
        &self.counted
    }

    /// Returns the functions that are not counted, with the reasons.
    pub fn absent(&self) -> &[(&'static CStr, Absence)] {
        &self.absent
    }

    /// Returns the number of calls since [`Calls::open`], in the order of [`Calls::functions`].
    ///
    /// # Errors
    /// Those of read(2).
    pub fn read(&mut self) -> io::Result<Vec<u64>> {
        self.counters.read()
    }
}

fn pmu() -> io::Result<u32> {
    let number = fs::read_to_string(TYPE)?;
    let number = number.trim().parse();
    number.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Opens a counter for each function on a processor. Returns `None` if the processor is offline.
/// Removes functions from the list that do not exist on the first processor.
fn open_cpu(
    kind: u32,
    functions: &mut Vec<&'static CStr>,
    absent: &mut Vec<(&'static CStr, Absence)>,
    cpu: u32,
    first: bool,
) -> Result<Option<CpuGroup>, CallsError> {
    let mut opened: Vec<OwnedFd> = Vec::new();
    let mut there = Vec::new();
    for &function in functions.iter() {
        match open_event(kind, function, cpu, opened.first()) {
            Ok(event) => {
                opened.push(event);
                there.push(function);
            }
            Err(Errno::ENODEV) => return Ok(None),
            Err(errno) => match absence(errno).filter(|_| first) {
                Some(absence) => absent.push((function, absence)),
                None => return Err(refused(errno, function, cpu)),
            },
        }
    }
    *functions = there;
    Ok(CpuGroup::of(opened))
}

/// Interprets the error of `register_kprobe` and, in newer kernels, of the check for ambiguous
/// symbols before it (kernel/kprobes.c, kernel/trace/trace_kprobe.c).
fn absence(errno: Errno) -> Option<Absence> {
    match errno {
        Errno::ENOENT => Some(Absence::NoSuchFunction),
        Errno::EADDRNOTAVAIL => Some(Absence::Ambiguous),
        Errno::EINVAL | Errno::EILSEQ | Errno::EOPNOTSUPP => Some(Absence::NotProbeable),
        _ => None,
    }
}

fn refused(errno: Errno, function: &CStr, cpu: u32) -> CallsError {
    match errno {
        Errno::EACCES | Errno::EPERM => CallsError::NotPermitted { errno },
        _ => CallsError::Refused {
            function: function.to_string_lossy().into_owned(),
            cpu,
            errno,
        },
    }
}

/// Opens a counter of a function's calls by all tasks on one processor. It starts at once.
fn open_event(
    kind: u32,
    function: &'static CStr,
    cpu: u32,
    leader: Option<&OwnedFd>,
) -> nix::Result<OwnedFd> {
    let attributes = Attributes {
        kind,
        read_format: perf::FORMAT_GROUP,
        // `kprobe_func` and `probe_offset`: the name, which the kernel copies, and the first
        // instruction of the function. `config` is 0 for the call; its lowest bit would select the
        // return (format/retprobe).
        config1: function.as_ptr() as u64,
        ..Attributes::default()
    };
    perf::open(attributes, cpu, None, leader.map(AsRawFd::as_raw_fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::skip;
    use std::path::Path;

    #[test]
    fn errors_of_one_function_differ_from_those_of_all() {
        assert_eq!(absence(Errno::ENOENT), Some(Absence::NoSuchFunction));
        assert_eq!(absence(Errno::EADDRNOTAVAIL), Some(Absence::Ambiguous));
        for errno in [Errno::EACCES, Errno::EPERM, Errno::EMFILE] {
            assert_eq!(absence(errno), None);
        }
    }

    /// Runs only where the kernel can count calls, as in the machine of `scripts/doctor-kernel.sh`.
    #[test]
    fn calls_are_counted_and_missing_functions_are_listed() {
        let functions = [c"udp_sendmsg", c"no_such_function_here"];
        let cpus: Vec<u32> = crate::softirq::net_rx()
            .unwrap()
            .iter()
            .map(|count| count.cpu)
            .collect();
        let mut calls = match Calls::open(&functions, &cpus) {
            Ok(calls) => calls,
            // A kernel without kprobes is no failure, but must report it.
            Err(error @ CallsError::NoKprobes { .. }) if !Path::new(TYPE).exists() => {
                return assert!(error.to_string().contains("CONFIG_KPROBE_EVENTS"));
            }
            Err(error @ CallsError::NotPermitted { .. }) => return skip(&error.to_string()),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(calls.functions(), [c"udp_sendmsg"]);
        assert_eq!(calls.absent(), [(functions[1], Absence::NoSuchFunction)]);
        let before = calls.read().unwrap()[0];
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        for _ in 0..1000 {
            socket.send_to(b"x", to).unwrap();
        }
        let sent = calls.read().unwrap()[0] - before;
        assert!((1000..1500).contains(&sent), "{sent}");
    }
}
