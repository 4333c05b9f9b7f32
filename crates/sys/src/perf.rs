//! Counts of kernel tracepoints with perf_event_open(2): how often a tracepoint fired with certain
//! arguments, on all processors, without a record of each.
//!
//! [`Tracepoint::find`] reads the description of the tracepoint from tracefs.
//! [`TracepointCounters::open`] opens one counter for each filter on each processor, grouped so
//! that one read returns all of a processor. [`TracepointCounters::read`] returns the sums. The
//! kernel counts by itself: this costs time when the tracepoint fires, and none otherwise. It needs
//! `CAP_PERFMON`, or `kernel.perf_event_paranoid` of 0 or less, and a readable tracefs.

use std::ffi::{CString, c_char};
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;

/// Mount points of tracefs, newer and older (Documentation/trace/ftrace.rst).
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// `PERF_TYPE_TRACEPOINT`, `PERF_FORMAT_GROUP`, `PERF_FLAG_FD_CLOEXEC` (include/uapi/linux/perf_event.h).
const TYPE_TRACEPOINT: u32 = 2;
pub(crate) const FORMAT_GROUP: u64 = 1 << 3;
const FD_CLOEXEC: libc::c_ulong = 1 << 3;
/// `PERF_EVENT_IOC_SET_FILTER`, `_IOW('$', 6, char *)`.
const SET_FILTER: libc::Ioctl =
    nix::request_code_write!(b'$', 6, size_of::<*mut c_char>()) as libc::Ioctl;
/// Number of words in the reply of a group before the counts.
const GROUP_HEADER: usize = 1;

/// Why tracepoints cannot be counted.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    /// The tracepoint's description cannot be read.
    #[error(
        "cannot read the tracepoint {name}: {source}; run as root, and if there is no {}: mount -t tracefs tracefs {}",
        TRACEFS[0], TRACEFS[0]
    )]
    Tracepoint {
        /// Its system and name.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The description lacks an expected part.
    #[error(
        "the description of the tracepoint {name} has no {part}: this kernel is too old or too new for it"
    )]
    Format {
        /// Its system and name.
        name: String,
        /// The missing part.
        part: &'static str,
    },
    /// `EACCES`, `EPERM`.
    #[error(
        "not permitted to count tracepoints: {errno}; run as root, give CAP_PERFMON, or set the sysctl \
         kernel.perf_event_paranoid to 0 (where it is 3 or more, or the kernel is locked down, that does not help)"
    )]
    NotPermitted {
        /// The kernel's error number.
        errno: Errno,
    },
    /// Any other error.
    #[error("cannot count a tracepoint on processor {cpu} ({step}): {errno}")]
    Refused {
        /// The processor.
        cpu: u32,
        /// perf_event_open, or the filter.
        step: String,
        /// The kernel's error number.
        errno: Errno,
    },
    /// There is no processor to count on.
    #[error("no processor to count on")]
    NoProcessor,
}

/// A tracepoint of the running kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracepoint {
    name: String,
    id: u64,
    format: String,
}

impl Tracepoint {
    /// Looks up a tracepoint, such as `kfree_skb` of the system `skb`.
    pub fn find(system: &str, event: &str) -> Result<Self, PerfError> {
        let name = format!("{system}:{event}");
        let mut newest = None;
        for root in TRACEFS {
            match fs::read_to_string(format!("{root}/events/{system}/{event}/format")) {
                Ok(format) => return Self::parse(name, format),
                // The error of the newer mount point is reported, unless only the older one exists.
                Err(source) => _ = newest.get_or_insert(source),
            }
        }
        let source = newest.unwrap_or_else(|| io::ErrorKind::NotFound.into());
        Err(PerfError::Tracepoint { name, source })
    }

    fn parse(name: String, format: String) -> Result<Self, PerfError> {
        let mut lines = format.lines();
        let id = lines.find_map(|line| line.strip_prefix("ID:")?.trim().parse().ok());
        match id {
            Some(id) => Ok(Tracepoint { name, id, format }),
            None => Err(PerfError::Format { name, part: "ID" }),
        }
    }

    /// Its system and name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whether the tracepoint has an argument with this name, which a filter may use.
    pub fn has_field(&self, field: &str) -> bool {
        self.declaration(field).is_some()
    }

    /// Returns where a record has the argument with this name, in bytes.
    pub fn field(&self, field: &str) -> Option<Range<usize>> {
        let mut numbers = self.declaration(field)?.split(';').filter_map(|part| {
            let (_, number) = part.trim().split_once(':')?;
            number.parse::<usize>().ok()
        });
        let (offset, size) = (numbers.next()?, numbers.next()?);
        Some(offset..offset.checked_add(size)?)
    }

    /// Returns the description of an argument after its name: `offset:8; size:4; signed:0;`.
    fn declaration(&self, field: &str) -> Option<&str> {
        self.format.lines().find_map(|line| {
            let (declaration, rest) = line.trim_start().strip_prefix("field:")?.split_once(';')?;
            let name = declaration.split_ascii_whitespace().last();
            (name == Some(field)).then_some(rest)
        })
    }

    /// Returns the number that this kernel prints as `symbol`: `{ 80, "FULL_RING" }` in the print
    /// format.
    pub fn symbol(&self, symbol: &str) -> Option<u64> {
        let (before, _) = self.format.split_once(&format!(", \"{symbol}\" }}"))?;
        let (_, number) = before.rsplit_once('{')?;
        let number = number.trim();
        match number.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => number.parse().ok(),
        }
    }

    /// Returns the error that this kernel's tracepoint lacks `part`.
    pub fn lacks(&self, part: &'static str) -> PerfError {
        PerfError::Format {
            name: self.name.clone(),
            part,
        }
    }
}

/// Counters of a tracepoint or kprobe, one for each filter, over all processors of the machine and therefore
/// all its network namespaces.
#[derive(Debug)]
pub struct TracepointCounters {
    groups: Vec<CpuGroup>,
    /// Number of counters in each group.
    counters: usize,
    buffer: Vec<u8>,
}

/// The counters of one processor. The first one is the group leader, which is read.
#[derive(Debug)]
pub(crate) struct CpuGroup {
    leader: File,
    /// The events count as long as they are open.
    _members: Vec<OwnedFd>,
}

impl CpuGroup {
    /// Groups events that were opened with the first of them as their leader; `None` without
    /// events.
    pub(crate) fn of(opened: Vec<OwnedFd>) -> Option<Self> {
        let mut opened = opened.into_iter();
        Some(CpuGroup {
            leader: opened.next()?.into(),
            _members: opened.collect(),
        })
    }
}

impl TracepointCounters {
    /// Combines groups of `counters` counters each, in the same order.
    pub(crate) fn of(groups: Vec<CpuGroup>, counters: usize) -> Self {
        TracepointCounters {
            groups,
            counters,
            buffer: vec![0; (GROUP_HEADER + counters) * size_of::<u64>()],
        }
    }

    /// Starts to count the events that pass each filter (Documentation/trace/events.rst, "Event
    /// filtering"), such as `reason == 80`. Uses a descriptor for each filter and processor. Skips
    /// processors that have gone offline.
    pub fn open(
        tracepoint: &Tracepoint,
        filters: &[String],
        cpus: &[u32],
    ) -> Result<Self, PerfError> {
        let mut groups = Vec::new();
        for &cpu in cpus {
            groups.extend(open_cpu(tracepoint.id, filters, cpu)?);
        }
        if groups.is_empty() {
            return Err(PerfError::NoProcessor);
        }
        Ok(TracepointCounters::of(groups, filters.len()))
    }

    /// Returns the number of events that passed each filter since [`TracepointCounters::open`], in
    /// the order of the filters.
    pub fn read(&mut self) -> io::Result<Vec<u64>> {
        let mut sums = vec![0u64; self.counters];
        for group in &mut self.groups {
            let length = group.leader.read(&mut self.buffer)?;
            let counts = self.buffer[..length].chunks_exact(size_of::<u64>());
            for (sum, count) in sums.iter_mut().zip(counts.skip(GROUP_HEADER)) {
                let count = count.try_into().map(u64::from_ne_bytes).unwrap_or(0);
                *sum = sum.saturating_add(count);
            }
        }
        Ok(sums)
    }
}

/// Opens a counter for each filter on a processor. Returns `None` if the processor is offline.
fn open_cpu(id: u64, filters: &[String], cpu: u32) -> Result<Option<CpuGroup>, PerfError> {
    let mut opened: Vec<OwnedFd> = Vec::new();
    for filter in filters {
        let leader = opened.first().map(AsRawFd::as_raw_fd);
        match open_event(id, cpu, leader) {
            Ok(event) => {
                set_filter(&event, filter).map_err(|errno| refused(errno, cpu, filter))?;
                opened.push(event);
            }
            Err(Errno::ENODEV) => return Ok(None),
            Err(errno) => return Err(refused(errno, cpu, "perf_event_open")),
        }
    }
    Ok(CpuGroup::of(opened))
}

fn refused(errno: Errno, cpu: u32, step: &str) -> PerfError {
    match errno {
        Errno::EACCES | Errno::EPERM => PerfError::NotPermitted { errno },
        _ => PerfError::Refused {
            cpu,
            step: step.to_owned(),
            errno,
        },
    }
}

/// `struct perf_event_attr` as of `PERF_ATTR_SIZE_VER5`, which has the limit for call stacks. A
/// kernel before 4.8 accepts it if the fields that it does not know are zero.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Attributes {
    pub kind: u32,
    pub size: u32,
    pub config: u64,
    /// Sampling period, or samples per second, depending on the flags.
    pub sample_period: u64,
    pub sample_type: u64,
    pub read_format: u64,
    pub flags: u64,
    pub wakeup_events: u32,
    pub breakpoint_type: u32,
    pub config1: u64,
    pub config2: u64,
    pub branch_sample_type: u64,
    pub sample_registers_user: u64,
    pub sample_stack_user: u32,
    pub clock_id: i32,
    pub sample_registers_interrupt: u64,
    pub auxiliary_watermark: u32,
    pub sample_max_stack: u16,
    pub reserved: u16,
}

/// Opens a counter of a tracepoint on one processor, for all tasks. It starts at once.
fn open_event(id: u64, cpu: u32, leader: Option<RawFd>) -> nix::Result<OwnedFd> {
    let attributes = Attributes {
        kind: TYPE_TRACEPOINT,
        config: id,
        read_format: FORMAT_GROUP,
        ..Attributes::default()
    };
    open(attributes, cpu, None, leader)
}

/// perf_event_open(2): opens an event on one processor, of one thread or of all, in the group of
/// another event or in its own.
pub(crate) fn open(
    mut attributes: Attributes,
    cpu: u32,
    tid: Option<u32>,
    leader: Option<RawFd>,
) -> nix::Result<OwnedFd> {
    attributes.size = size_of::<Attributes>() as u32;
    // SAFETY: perf_event_open reads `size` bytes of the attributes, which outlive the call, and a
    // string that `config1` may point to, which callers let outlive it as well (the kernel only
    // reads there, and refuses an address that is not this process's); the other arguments are
    // plain numbers.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            std::ptr::from_ref(&attributes),
            tid.map_or(-1, |tid| tid as libc::pid_t),
            cpu as libc::c_int,
            leader.unwrap_or(-1) as libc::c_int,
            FD_CLOEXEC,
        )
    };
    let fd = Errno::result(outcome)?;
    // SAFETY: the kernel has just given this descriptor to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

pub(crate) fn set_filter(event: &OwnedFd, filter: &str) -> nix::Result<()> {
    let filter = CString::new(filter).map_err(|_| Errno::EINVAL)?;
    // SAFETY: the operation reads a string that ends with a zero byte, and `filter` outlives the call.
    let outcome = unsafe { libc::ioctl(event.as_raw_fd(), SET_FILTER, filter.as_ptr()) };
    Errno::result(outcome).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The description of `skb:kfree_skb` in Linux 6.x, shortened.
    const FORMAT: &str = "name: kfree_skb\nID: 2310\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:enum skb_drop_reason reason;\toffset:36;\tsize:4;\tsigned:0;\n\n\
        print fmt: \"reason: %s\", __print_symbolic(REC->reason, { 2, \"NOT_SPECIFIED\" }, \
        { 79, \"DEV_READY\" }, { 80, \"FULL_RING\" }, { 0x5d, \"PKT_TOO_BIG\" })\n";

    fn tracepoint(format: &str) -> Tracepoint {
        Tracepoint::parse("skb:kfree_skb".into(), format.into()).unwrap()
    }

    #[test]
    fn symbols_are_resolved_to_this_kernels_numbers() {
        let tracepoint = tracepoint(FORMAT);
        assert_eq!(tracepoint.id, 2310);
        assert_eq!(tracepoint.symbol("FULL_RING"), Some(80));
        assert_eq!(tracepoint.symbol("PKT_TOO_BIG"), Some(0x5d));
        assert_eq!(tracepoint.symbol("RING"), None);
        assert_eq!(tracepoint.symbol("QDISC_DROP"), None);
    }

    #[test]
    fn fields_are_found_by_their_name() {
        let tracepoint = tracepoint(FORMAT);
        assert!(tracepoint.has_field("reason") && tracepoint.has_field("common_type"));
        assert!(!tracepoint.has_field("rx_sk") && !tracepoint.has_field("skb_drop_reason"));
        assert_eq!(tracepoint.field("reason"), Some(36..40));
        assert_eq!(tracepoint.field("rx_sk"), None);
    }

    #[test]
    fn a_description_without_its_number_is_refused() {
        for format in ["", "name: x\n", "ID: x\n"] {
            let outcome = Tracepoint::parse("a:b".into(), format.into());
            assert!(matches!(outcome, Err(PerfError::Format { .. })), "{format}");
        }
        for length in 0..FORMAT.len() {
            if let Ok(tracepoint) = Tracepoint::parse("a:b".into(), FORMAT[..length].into()) {
                tracepoint.symbol("FULL_RING");
                tracepoint.field("reason");
            }
        }
    }

    #[test]
    fn a_tracepoint_that_does_not_exist_says_so() {
        let error = Tracepoint::find("skb", "no_such_event").unwrap_err();
        assert!(error.to_string().contains("skb:no_such_event"), "{error}");
    }
}
