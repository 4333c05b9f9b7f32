//! Records of events with their times: calls of functions of a program (uprobes), their returns,
//! and tracepoints of the kernel.
//!
//! [`exported`] finds functions by name in the file of a library. [`Trace::start`] opens a
//! perf_event_open(2) event for each [`Probe`] and processor; all events of a processor write into
//! one ring. [`Trace::take`] returns the records since the last call. The kernel removes the probes
//! with the descriptors, also when this process is killed.
//!
//! A record costs a microsecond or two, a probe in a program a breakpoint more: traced programs are
//! slower. It needs `CAP_PERFMON`, a kernel with `CONFIG_UPROBE_EVENTS` for functions of programs,
//! and a readable tracefs for tracepoints.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use object::read::elf::ElfFile64;
use object::read::{Object, ObjectSegment, ObjectSymbol, ReadCache};
use object::{Endianness, SymbolFlags, elf};

use crate::perf::{self, Attributes, Tracepoint};
use crate::profile::ring::Ring;

/// Number of the PMU of uprobes (Documentation/ABI/testing/sysfs-bus-event_source-devices-format).
const UPROBE: &str = "/sys/bus/event_source/devices/uprobe/type";
/// Bit of `config` that selects the return instead of the call (`format/retprobe` there).
const RETURN: u64 = 1;
/// `PERF_TYPE_TRACEPOINT`, and from there `PERF_SAMPLE_TID`, `_TIME`, `_RAW` and `_IDENTIFIER`,
/// `PERF_RECORD_LOST` and `PERF_RECORD_SAMPLE` (include/uapi/linux/perf_event.h).
const TYPE_TRACEPOINT: u32 = 2;
const SAMPLE_TYPE: u64 = 1 << 1 | 1 << 2 | 1 << 10 | 1 << 16;
const LOST: u32 = 2;
const SAMPLE: u32 = 9;
/// `PERF_EVENT_IOC_SET_OUTPUT` and `PERF_EVENT_IOC_ID`.
const SET_OUTPUT: libc::Ioctl = 0x2405;
const ID: libc::Ioctl = nix::request_code_read!(b'$', 7, size_of::<*mut u64>()) as libc::Ioctl;
/// Pages of a ring: 4 MiB, some 50,000 records.
const RING_PAGES: usize = 1 << 10;

/// A function of a program or library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    file: CString,
    offset: u64,
}

/// Finds functions that a library exports; those it does not have, or chooses at run time (such as
/// `memcpy` of the GNU C library), are left out.
///
/// # Errors
/// The file cannot be read, or is no ELF file of 64 bits.
pub fn exported(path: &Path, names: &[&str]) -> io::Result<Vec<Function>> {
    let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    let cache = ReadCache::new(File::open(path)?);
    let file: ElfFile64<'_, Endianness, _> = ElfFile64::parse(&cache).map_err(invalid)?;
    let name_of_file = CString::new(path.as_os_str().as_bytes())?;
    let mut found: Vec<Function> = Vec::new();
    for symbol in file.dynamic_symbols() {
        // Functions that are chosen at run time (STT_GNU_IFUNC) do not count.
        let is_function = matches!(
            symbol.flags(),
            SymbolFlags::Elf { st_info, .. } if st_info.st_type() == elf::STT_FUNC
        );
        let (true, true, Ok(name)) = (is_function, symbol.is_definition(), symbol.name()) else {
            continue;
        };
        // Older versions of a function have its name as well.
        if !names.contains(&name) || found.iter().any(|known| known.name == name) {
            continue;
        }
        let address = symbol.address();
        let offset = file.segments().find_map(|segment| {
            let within = address.checked_sub(segment.address())?;
            let (start, size) = segment.file_range();
            (within < size).then_some(start + within)
        });
        found.extend(offset.map(|offset| Function {
            name: name.to_owned(),
            file: name_of_file.clone(),
            offset,
        }));
    }
    Ok(found)
}

/// An event to record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// A call of a function.
    Call(Function),
    /// The return from a function.
    Return(Function),
    /// A tracepoint, if its arguments pass the filter (empty: always).
    Tracepoint(Tracepoint, String),
}

/// Why nothing can be recorded.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The kernel has no uprobes.
    #[error(
        "this kernel cannot trace functions of programs: {UPROBE}: {source} (CONFIG_UPROBE_EVENTS)"
    )]
    NoUprobes {
        /// The error of reading its number.
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot record {event} on processor {cpu}: {step}: {errno}")]
    Refused {
        /// The function or tracepoint.
        event: String,
        /// The processor.
        cpu: u32,
        /// The system call.
        step: &'static str,
        /// The kernel's error number.
        errno: Errno,
    },
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Time of the kernel's clock for events, in nanoseconds.
    pub nanoseconds: u64,
    /// The thread.
    pub tid: u32,
    /// Position of the probe in the list.
    pub probe: usize,
    /// The arguments of a tracepoint; see [`Tracepoint::field`].
    pub data: Vec<u8>,
}

impl Hit {
    /// Returns an argument of 4 bytes.
    pub fn u32(&self, field: &Range<usize>) -> Option<u32> {
        let bytes = self.data.get(field.clone())?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }
}

/// Running records.
#[derive(Debug)]
pub struct Trace {
    // Closed before the rings that they write to are unmapped.
    events: Vec<OwnedFd>,
    rings: Vec<Ring>,
    probes: HashMap<u64, usize>,
    buffer: Vec<u8>,
    lost: u64,
}

impl Trace {
    /// Starts to record events of these probes, each of one thread or of all, on these processors.
    ///
    /// # Errors
    /// See [`TraceError`].
    pub fn start(probes: &[(Probe, Option<u32>)], cpus: &[u32]) -> Result<Self, TraceError> {
        let mut trace = Trace {
            events: Vec::new(),
            rings: Vec::new(),
            probes: HashMap::new(),
            buffer: Vec::new(),
            lost: 0,
        };
        for &cpu in cpus {
            let mut first: Option<RawFd> = None;
            for (index, (probe, tid)) in probes.iter().enumerate() {
                let refused = |step| {
                    move |errno| TraceError::Refused {
                        event: name(probe).to_owned(),
                        cpu,
                        step,
                        errno,
                    }
                };
                let event = match perf::open(attributes(probe)?, cpu, *tid, None) {
                    // The processor has gone offline.
                    Err(Errno::ENODEV) if first.is_none() => break,
                    event => event.map_err(refused("perf_event_open"))?,
                };
                match first {
                    None => {
                        let ring = Ring::map(event.as_raw_fd(), RING_PAGES);
                        let errno = |e: io::Error| Errno::from_raw(e.raw_os_error().unwrap_or(0));
                        trace
                            .rings
                            .push(ring.map_err(errno).map_err(refused("mmap"))?);
                        first = Some(event.as_raw_fd());
                    }
                    Some(first) => redirect(&event, first).map_err(refused("SET_OUTPUT"))?,
                }
                if let Probe::Tracepoint(_, filter) = probe
                    && !filter.is_empty()
                {
                    perf::set_filter(&event, filter).map_err(refused("SET_FILTER"))?;
                }
                let id = id(&event).map_err(refused("ID"))?;
                trace.probes.insert(id, index);
                trace.events.push(event);
            }
        }
        Ok(trace)
    }

    /// Appends the records since the last call, those of one processor after those of another.
    pub fn take(&mut self, into: &mut Vec<Hit>) {
        for ring in &mut self.rings {
            self.buffer.clear();
            ring.take(&mut self.buffer);
            self.lost += parse(&self.buffer, &self.probes, into);
        }
    }

    /// Returns the number of records for which a ring had no room.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

fn name(probe: &Probe) -> &str {
    match probe {
        Probe::Call(function) | Probe::Return(function) => &function.name,
        Probe::Tracepoint(tracepoint, _) => tracepoint.name(),
    }
}

fn attributes(probe: &Probe) -> Result<Attributes, TraceError> {
    let sampled = || Attributes {
        sample_period: 1,
        sample_type: SAMPLE_TYPE,
        ..Attributes::default()
    };
    let function = |function: &Function, config| {
        let number = fs::read_to_string(UPROBE).and_then(|text| {
            let number = text.trim().parse();
            number.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        });
        Ok(Attributes {
            kind: number.map_err(|source| TraceError::NoUprobes { source })?,
            config,
            // `uprobe_path` and `probe_offset`; the kernel copies the path.
            config1: function.file.as_ptr() as u64,
            config2: function.offset,
            ..sampled()
        })
    };
    match probe {
        Probe::Call(of) => function(of, 0),
        Probe::Return(of) => function(of, RETURN),
        Probe::Tracepoint(tracepoint, _) => Ok(Attributes {
            kind: TYPE_TRACEPOINT,
            config: tracepoint.id(),
            ..sampled()
        }),
    }
}

/// Writes the records of an event into the ring of another event of the same processor.
fn redirect(event: &OwnedFd, to: RawFd) -> nix::Result<()> {
    // SAFETY: the operation takes a number and touches no memory of the caller.
    Errno::result(unsafe { libc::ioctl(event.as_raw_fd(), SET_OUTPUT, to) }).map(drop)
}

/// Returns the number that records of an event have.
fn id(event: &OwnedFd) -> nix::Result<u64> {
    let mut id = 0_u64;
    // SAFETY: the operation writes a u64 to `id`, which outlives the call.
    Errno::result(unsafe { libc::ioctl(event.as_raw_fd(), ID, &raw mut id) })?;
    Ok(id)
}

/// Appends the samples in `bytes`, and returns how many the kernel reports as lost. Ends at a
/// malformed record, because the next one cannot be found.
fn parse(bytes: &[u8], probes: &HashMap<u64, usize>, into: &mut Vec<Hit>) -> u64 {
    let (mut rest, mut lost) = (bytes, 0);
    let u32_at = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_ne_bytes(word))
    };
    let u64_at = |bytes: &[u8], at: usize| {
        let word = bytes.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(word))
    };
    // `struct perf_event_header`: type, misc (2 bytes), size (2 bytes).
    while let (Some(kind), Some(word)) = (u32_at(rest, 0), u32_at(rest, 4)) {
        let size = word.to_ne_bytes();
        let size = usize::from(u16::from_ne_bytes([size[2], size[3]]));
        let Some(body) = rest.get(8..size) else {
            break;
        };
        match kind {
            // Identifier, process, thread, time, length of the arguments, arguments.
            SAMPLE => into.extend(u64_at(body, 0).and_then(|id| {
                let length = u32_at(body, 24)? as usize;
                Some(Hit {
                    probe: *probes.get(&id)?,
                    tid: u32_at(body, 12)?,
                    nanoseconds: u64_at(body, 16)?,
                    data: body.get(28..28 + length)?.to_vec(),
                })
            })),
            LOST => lost += u64_at(body, 8).unwrap_or(0),
            _ => {}
        }
        rest = &rest[size..];
    }
    lost
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::testing::skip;

    /// The C library of this process.
    fn library() -> std::path::PathBuf {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let libraries = maps.split_whitespace();
        let mut libraries = libraries.filter(|word| word.contains("/libc.so"));
        libraries.next().expect("the C library").into()
    }

    #[test]
    fn records_are_read_until_a_malformed_one() {
        let record = |kind: u32, body: &[u8]| {
            let size = (8 + body.len() as u16).to_ne_bytes();
            [&kind.to_ne_bytes()[..], &[0, 0], &size, body].concat()
        };
        let sample = |id: u64, time: u64, data: &[u8]| {
            let ids = [
                &id.to_ne_bytes()[..],
                &1_u32.to_ne_bytes(),
                &2_u32.to_ne_bytes(),
            ]
            .concat();
            let length = (data.len() as u32).to_ne_bytes();
            record(
                SAMPLE,
                &[&ids[..], &time.to_ne_bytes(), &length, data].concat(),
            )
        };
        let lost = record(LOST, &[7_u64.to_ne_bytes(), 5_u64.to_ne_bytes()].concat());
        let mut bytes = [
            sample(40, 9, &[1, 2, 3, 4]),
            lost,
            sample(99, 1, &[]),
            sample(41, 10, &[]),
        ]
        .concat();
        // The length of the last one is wrong.
        bytes.extend(SAMPLE.to_ne_bytes());
        bytes.extend([0, 0, 200, 0]);
        let mut hits = Vec::new();
        let probes = HashMap::from([(40, 0), (41, 1)]);
        assert_eq!(parse(&bytes, &probes, &mut hits), 5);
        let hit = |nanoseconds, probe, data: &[u8]| Hit {
            nanoseconds,
            tid: 2,
            probe,
            data: data.to_vec(),
        };
        assert_eq!(hits, [hit(9, 0, &[1, 2, 3, 4]), hit(10, 1, &[])]);
        let word = u32::from_ne_bytes([1, 2, 3, 4]);
        assert_eq!(
            (hits[0].u32(&(0..4)), hits[1].u32(&(0..4))),
            (Some(word), None)
        );
        for length in 0..bytes.len() {
            parse(&bytes[..length], &probes, &mut Vec::new());
        }
    }

    #[test]
    fn functions_chosen_at_run_time_are_left_out() {
        let found = exported(&library(), &["sendto", "memcpy", "no_such_function"]).unwrap();
        let names: Vec<&str> = found.iter().map(|of| of.name.as_str()).collect();
        assert!(names.contains(&"sendto") && !names.contains(&"no_such_function"));
        assert!(exported(Path::new("/proc/self/maps"), &[]).is_err());
    }

    #[test]
    fn calls_returns_and_tracepoints_of_a_thread_are_recorded() {
        let Some(sendto) = exported(&library(), &["sendto"]).unwrap().pop() else {
            return skip("this C library has no sendto");
        };
        let enter = match Tracepoint::find("syscalls", "sys_enter_sendto") {
            Ok(enter) => enter,
            Err(error) => return skip(&error.to_string()),
        };
        let size = enter.field("len").unwrap();
        let own = Some(nix::unistd::gettid().as_raw() as u32);
        let probes = [
            (Probe::Call(sendto.clone()), own),
            (Probe::Tracepoint(enter, "len == 3".into()), own),
            (Probe::Return(sendto), own),
        ];
        let cpus: Vec<u32> = crate::softirq::net_rx()
            .unwrap()
            .iter()
            .map(|of| of.cpu)
            .collect();
        let mut trace = match Trace::start(&probes, &cpus) {
            Ok(trace) => trace,
            Err(error) => return skip(&error.to_string()),
        };
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        for payload in ["one", "three"] {
            socket.send_to(payload.as_bytes(), to).unwrap();
        }
        let mut hits = Vec::new();
        trace.take(&mut hits);
        // The thread may have moved to another processor.
        hits.sort_by_key(|hit| hit.nanoseconds);
        let order: Vec<usize> = hits.iter().map(|hit| hit.probe).collect();
        assert_eq!(order, [0, 1, 2, 0, 2]);
        let length = hits[1].data.get(size).map(|bytes| bytes[0]);
        assert_eq!((length, trace.lost()), (Some(3), 0));
    }
}
