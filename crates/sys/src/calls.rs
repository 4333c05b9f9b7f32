//! How often functions of the kernel are called, by their names: counting events of the `kprobe` PMU, one for each
//! function and processor, on the machine as a whole.
//!
//! The kernel puts a breakpoint (where it can, a call) at the beginning of the function for as long as the event is open,
//! and takes it away when the descriptor is closed, also by the end of a process that was killed: nothing is left behind.
//! That is why the probes that are written into tracefs are not used: they stay until somebody removes them. Nor would
//! they reach further but to kernels before 4.17, for both are built by `CONFIG_KPROBE_EVENTS`.
//!
//! Counting adds a cost to each call, and one probe per processor: `docs/reference/doctor.md` has figures.
//! Needs `CAP_PERFMON`, whatever `kernel.perf_event_paranoid` says.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;

use crate::perf::{self, Attributes, CpuGroup, Tally};

/// The PMU's number, which differs from kernel to kernel (Documentation/ABI/testing/sysfs-bus-event_source-devices-format).
const TYPE: &str = "/sys/bus/event_source/devices/kprobe/type";

/// Whether this kernel has what counts calls; whether this process may is only told by trying.
pub fn can_be_counted() -> bool {
    fs::metadata(TYPE).is_ok()
}

/// Why calls cannot be counted.
#[derive(Debug, thiserror::Error)]
pub enum CallsError {
    /// The kernel has no such PMU.
    #[error("this kernel cannot count calls: {TYPE}: {source} (CONFIG_KPROBE_EVENTS, Linux 4.17)")]
    NoKprobes {
        /// What came of reading its number.
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
    /// Anything else.
    #[error("cannot count calls of {function} on processor {cpu}: {errno}")]
    Refused {
        /// Which function.
        function: String,
        /// Which processor.
        cpu: u32,
        /// The kernel's error number.
        errno: Errno,
    },
    /// There was none of the functions, or no processor.
    #[error("nothing to count: none of the functions is there")]
    Nothing,
}

/// Why one function is not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// It was inlined, is in a module that is not loaded, or this kernel never had it.
    NoSuchFunction,
    /// Several have that name.
    Ambiguous,
    /// It may not be probed.
    NotProbeable,
}

impl std::fmt::Display for Absence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Absence::NoSuchFunction => {
                "this kernel has no such function now (inlined, in a module that is not loaded, or of another version)"
            }
            Absence::Ambiguous => "this kernel has several functions of that name",
            Absence::NotProbeable => "this kernel does not let it be probed",
        })
    }
}

/// Counters of calls.
#[derive(Debug)]
pub struct Calls {
    tally: Tally,
    counted: Vec<&'static CStr>,
    absent: Vec<(&'static CStr, Absence)>,
}

impl Calls {
    /// Starts to count calls of each function on these processors. A descriptor is taken for each function and processor.
    /// Functions that are not there are passed over, see [`Calls::absent`], and so are processors that have gone meanwhile.
    ///
    /// # Errors
    /// Nothing can be counted at all.
    pub fn open(functions: &[&'static CStr], cpus: &[u32]) -> Result<Self, CallsError> {
        let kind = pmu().map_err(|source| CallsError::NoKprobes { source })?;
        let mut counted = functions.to_vec();
        let mut absent = Vec::new();
        let mut groups = Vec::new();
        for &cpu in cpus {
            // The first processor shows which functions there are.
            let group = open_cpu(kind, &mut counted, &mut absent, cpu, groups.is_empty())?;
            groups.extend(group);
        }
        if groups.is_empty() {
            return Err(CallsError::Nothing);
        }
        Ok(Calls {
            tally: Tally::of(groups, counted.len()),
            counted,
            absent,
        })
    }

    /// The functions whose calls are counted.
    pub fn functions(&self) -> &[&'static CStr] {
        &self.counted
    }

    /// Those that are not, and why.
    pub fn absent(&self) -> &[(&'static CStr, Absence)] {
        &self.absent
    }

    /// Calls since [`Calls::open`], in the order of [`Calls::functions`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&mut self) -> io::Result<Vec<u64>> {
        self.tally.read()
    }
}

fn pmu() -> io::Result<u32> {
    let number = fs::read_to_string(TYPE)?;
    let number = number.trim().parse();
    number.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Opens a counter for each function on a processor; `None` if it is not online. Functions that turn out to be absent on
/// the first one are taken off the list.
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

/// What `register_kprobe` and, in newer kernels, the count of equal symbols before it say (kernel/kprobes.c,
/// kernel/trace/trace_kprobe.c).
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

/// A counter of a function's calls on one processor, by all tasks; it counts at once.
fn open_event(
    kind: u32,
    function: &'static CStr,
    cpu: u32,
    leader: Option<&OwnedFd>,
) -> nix::Result<OwnedFd> {
    let attributes = Attributes {
        kind,
        read_format: perf::FORMAT_GROUP,
        // `kprobe_func` and `probe_offset`: the name, which the kernel copies, and the function's first instruction.
        // `config` of 0 is the call; its lowest bit would make it the return (format/retprobe).
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
    fn errors_of_one_function_are_told_from_those_of_all() {
        assert_eq!(absence(Errno::ENOENT), Some(Absence::NoSuchFunction));
        assert_eq!(absence(Errno::EADDRNOTAVAIL), Some(Absence::Ambiguous));
        for errno in [Errno::EACCES, Errno::EPERM, Errno::EMFILE] {
            assert_eq!(absence(errno), None);
        }
    }

    /// Where the kernel can; `scripts/doctor-kernel.sh` runs it in a machine that can.
    #[test]
    fn calls_are_counted_and_a_function_that_is_not_there_is_told() {
        let functions = [c"udp_sendmsg", c"no_such_function_here"];
        let cpus: Vec<u32> = crate::softirq::net_rx()
            .unwrap()
            .iter()
            .map(|count| count.cpu)
            .collect();
        let mut calls = match Calls::open(&functions, &cpus) {
            Ok(calls) => calls,
            // A kernel without them is no failure; it has to say so.
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
