//! Profiles of processor time by sampling: some hundred times a second, the function that runs on
//! each processor is recorded.
//!
//! [`Profiler::start`] opens one clock (`event`) with one ring (`ring`) for each processor: for
//! everything that runs there, or, if the kernel refuses that, for the threads of the program.
//! [`Profiler::drain`] counts the records in the rings (`record`), [`Profiler::stop`] ends it, and
//! [`RawProfile::functions`] resolves addresses to functions: those of the kernel (`kallsyms`) and
//! of programs (`maps`, `elf`, `go`, `symbols`).
//!
//! The clock is a timer interrupt. Time that the kernel spends with interrupts off is attributed to
//! the function that enables them again (`_raw_spin_unlock_irqrestore`, `finish_task_switch`,
//! `handle_softirqs`). Idle processors are sampled as well, because packets are received there in
//! interrupts; the function tells whether a processor is idle.

mod elf;
mod event;
mod go;
mod kallsyms;
mod maps;
mod record;
mod resolve;
pub(crate) mod ring;
mod symbols;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::time::Duration;

use nix::errno::Errno;
use seikan_observe::path::Unseen;

pub use self::record::Mode;

use self::event::{Clock, Event};
use self::record::{Record, Records};
use self::ring::Ring;

/// Number of pages of a ring: 256 KiB hold 50 seconds of plain samples at 199 Hz, or 4 with full
/// call stacks. Without privileges a user may have 512 KiB for each processor
/// (`kernel.perf_event_mlock_kb`).
const RING_PAGES: usize = 64;
/// Maximum number of clocks, if each thread needs one on each processor: each uses a descriptor.
const CLOCKS_MAX: usize = 512;
/// Maximum number of different locations and stacks that are kept.
const LOCATIONS_MAX: usize = 1 << 20;

/// Options of sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Samples per second and processor, 1 to `kernel.perf_event_max_sample_rate`. Choose a number
    /// that is no divisor or multiple of a system timer, so that both do not run in step.
    pub hz: u32,
    /// Record call stacks (up to 32 functions, by frame pointers) for flame graphs. This costs
    /// about twice as much.
    pub stacks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            hz: 199,
            stacks: false,
        }
    }
}

/// Why sampling is not possible.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The kernel does not permit it for this user.
    #[error(
        "not permitted to sample processors: {errno}; run as root, give CAP_PERFMON, or set the sysctl \
         kernel.perf_event_paranoid (now {paranoid}) to 0 for the machine or 1 for your own programs"
    )]
    NotPermitted {
        /// The kernel's error number.
        errno: Errno,
        /// The value of the setting, or a question mark.
        paranoid: String,
    },
    /// Any other error.
    #[error("cannot sample processor {cpu} ({step}): {source}")]
    Refused {
        /// The processor.
        cpu: u32,
        /// The failed step.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The program does not exist or has ended.
    #[error("process {pid} has no threads: it has ended, or is in another PID namespace")]
    NoProgram {
        /// The process id.
        pid: u32,
    },
    /// There is no processor to sample.
    #[error("no processor to sample: /sys/devices/system/cpu/online cannot be read")]
    NoProcessor,
}

/// The extent of sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Everything that runs.
    Machine,
    /// The threads of the program, in its own code and in the kernel.
    Program,
    /// The threads of the program in its own code only.
    ProgramOnly,
}

/// A running profiler.
#[derive(Debug)]
pub struct Profiler {
    /// Declared before the rings, so that the events stop before the rings that they write to are
    /// unmapped.
    events: Vec<Event>,
    rings: Vec<Ring>,
    buffer: Vec<u8>,
    stacks: bool,
    hz: u32,
    profile: RawProfile,
}

/// The samples, as addresses.
#[derive(Debug, Clone, PartialEq)]
pub struct RawProfile {
    /// The process id of the program.
    pub program: Option<u32>,
    /// The extent of sampling.
    pub scope: Scope,
    /// Samples by location.
    pub locations: HashMap<Location, u64>,
    /// Samples by process and call stack, innermost function first; empty unless requested.
    pub stacks: HashMap<(u32, Vec<(Mode, u64)>), u64>,
    /// Samples that did not fit into a ring.
    pub lost: u64,
    /// Names of processes (`comm`) when they were first seen.
    pub names: HashMap<u32, String>,
    /// Information that is missing, with reasons.
    pub unseen: Vec<Unseen>,
}

/// A sampled location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location {
    /// Process id; 0 for an idle processor and interrupts on it.
    pub pid: u32,
    /// The owner of the code.
    pub mode: Mode,
    /// The address.
    pub address: u64,
}

impl Profiler {
    /// Starts to sample the machine, or, if the kernel refuses that, only the program (a process
    /// id). [`RawProfile::unseen`] tells what was refused.
    ///
    /// # Errors
    /// Neither is permitted, or the program does not exist.
    pub fn start(program: Option<u32>, options: Options) -> Result<Self, ProfileError> {
        let cpus = online().ok_or(ProfileError::NoProcessor)?;
        let mut clock = Clock {
            hz: options.hz.max(1),
            stacks: options.stacks,
            user_only: false,
        };
        let mut unseen = Vec::new();
        let machine = open(clock, &cpus, &[None]);
        let (scope, (events, rings)) = match (machine, program) {
            (Ok(opened), _) => (Scope::Machine, opened),
            (Err(error), None) => return Err(error),
            (Err(error), Some(pid)) => {
                unseen.push(absent("processor time of the whole machine", &error));
                let tasks = threads(pid, cpus.len(), &mut unseen)?;
                match open(clock, &cpus, &tasks) {
                    Ok(opened) => (Scope::Program, opened),
                    Err(error) => {
                        unseen.push(absent("processor time of the kernel", &error));
                        clock.user_only = true;
                        (Scope::ProgramOnly, open(clock, &cpus, &tasks)?)
                    }
                }
            }
        };
        for event in &events {
            // A thread may have ended meanwhile.
            _ = event.enable();
        }
        Ok(Profiler {
            events,
            rings,
            buffer: Vec::new(),
            stacks: options.stacks,
            hz: clock.hz,
            profile: RawProfile::new(program, scope, unseen),
        })
    }

    /// Returns the extent of sampling.
    pub fn scope(&self) -> Scope {
        self.profile.scope
    }

    /// Counts the samples since the last call. Call it every half minute, or with call stacks every
    /// second or two; otherwise samples are lost.
    pub fn drain(&mut self) {
        self.count();
    }

    /// Stops sampling.
    pub fn stop(mut self) -> RawProfile {
        let full = self.count();
        if full {
            // The kernel reports lost samples when it next has space.
            std::thread::sleep(4 * Duration::from_secs(1) / self.hz);
        }
        for event in &self.events {
            _ = event.disable();
        }
        self.count();
        if full {
            self.profile.lost = self.profile.lost.max(1);
        }
        self.profile
    }

    /// Counts the samples in the rings. Returns whether a ring was full.
    fn count(&mut self) -> bool {
        let mut full = false;
        for ring in &mut self.rings {
            self.buffer.clear();
            full |= ring.take(&mut self.buffer);
            self.profile.count(&self.buffer, self.stacks);
        }
        full
    }
}

impl RawProfile {
    fn new(program: Option<u32>, scope: Scope, unseen: Vec<Unseen>) -> Self {
        RawProfile {
            program,
            scope,
            locations: HashMap::new(),
            stacks: HashMap::new(),
            lost: 0,
            names: HashMap::new(),
            unseen,
        }
    }

    fn count(&mut self, bytes: &[u8], stacks: bool) {
        let mut records = Records::new(bytes, stacks);
        for record in records.by_ref() {
            match record {
                Record::Lost(samples) => self.lost = self.lost.saturating_add(samples),
                Record::Sample {
                    pid,
                    address,
                    mode,
                    stack,
                } => {
                    let location = Location { pid, mode, address };
                    if self.locations.len() >= LOCATIONS_MAX
                        && !self.locations.contains_key(&location)
                    {
                        self.lost += 1;
                        continue;
                    }
                    *self.locations.entry(location).or_default() += 1;
                    if stacks && self.stacks.len() < LOCATIONS_MAX {
                        *self.stacks.entry((pid, stack)).or_default() += 1;
                    }
                    self.names.entry(pid).or_insert_with(|| name(pid));
                }
            }
        }
        if records.left() > 0 {
            // This cannot happen, because the kernel writes whole records. At least one was not
            // understood.
            self.lost += 1;
        }
    }
}

/// Returns the name of a process, which may have ended already.
fn name(pid: u32) -> String {
    match fs::read(format!("/proc/{pid}/comm")) {
        Ok(name) => String::from_utf8_lossy(name.trim_ascii_end()).replace(char::is_control, "?"),
        Err(_) => "ended".to_owned(),
    }
}

/// Opens clocks for these threads (`None`: for everything) on each processor, and a ring for each
/// processor.
fn open(
    clock: Clock,
    cpus: &[u32],
    tasks: &[Option<u32>],
) -> Result<(Vec<Event>, Vec<Ring>), ProfileError> {
    let (mut events, mut rings) = (Vec::new(), Vec::new());
    for &cpu in cpus {
        let refused = |step, source| ProfileError::Refused { cpu, step, source };
        let mut leader: Option<usize> = None;
        for &task in tasks {
            let event = match Event::open(clock, cpu, task) {
                Ok(event) => event,
                // The processor or the thread no longer exists.
                Err(Errno::ENODEV | Errno::ESRCH) => continue,
                Err(errno @ (Errno::EACCES | Errno::EPERM)) => {
                    return Err(not_permitted(errno));
                }
                Err(errno) => return Err(refused("perf_event_open", errno.into())),
            };
            match leader {
                Some(leader) => {
                    let to: &Event = &events[leader];
                    let joined = event.redirect(to);
                    joined.map_err(|errno| refused("joining rings", errno.into()))?;
                }
                None => {
                    let ring = Ring::map(event.fd(), RING_PAGES);
                    let ring = ring.map_err(|error| match error.raw_os_error() {
                        Some(libc::EPERM) => not_permitted(Errno::EPERM),
                        _ => refused("mapping the ring", error),
                    })?;
                    rings.push(ring);
                    leader = Some(events.len());
                }
            }
            events.push(event);
        }
    }
    match (events.is_empty(), tasks.first()) {
        (false, _) => Ok((events, rings)),
        (true, Some(Some(pid))) => Err(ProfileError::NoProgram { pid: *pid }),
        (true, _) => Err(ProfileError::NoProcessor),
    }
}

fn not_permitted(errno: Errno) -> ProfileError {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid");
    ProfileError::NotPermitted {
        errno,
        paranoid: paranoid.map_or_else(|_| "?".into(), |level| level.trim().to_owned()),
    }
}

fn absent(what: &str, error: &ProfileError) -> Unseen {
    Unseen {
        what: what.to_owned(),
        why: error.to_string(),
    }
}

/// Returns the threads of a process, or the first ones if there are too many.
fn threads(
    pid: u32,
    cpus: usize,
    unseen: &mut Vec<Unseen>,
) -> Result<Vec<Option<u32>>, ProfileError> {
    let none = |_| ProfileError::NoProgram { pid };
    let entries = fs::read_dir(format!("/proc/{pid}/task")).map_err(none)?;
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mut ids: Vec<u32> = ids.collect();
    ids.sort_unstable();
    let most = (CLOCKS_MAX / cpus.max(1)).max(1);
    if ids.len() > most {
        unseen.push(Unseen {
            what: format!(
                "processor time of {} threads of the program",
                ids.len() - most
            ),
            why: format!("there are too many: each needs a clock on each of {cpus} processors"),
        });
        ids.truncate(most);
    }
    if ids.is_empty() {
        Err(ProfileError::NoProgram { pid })
    } else {
        Ok(ids.into_iter().map(Some).collect())
    }
}

/// Returns the processors that are online.
fn online() -> Option<Vec<u32>> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    Some(parse_list(list.trim())).filter(|cpus| !cpus.is_empty())
}

/// `0-2,5` (cpumap_print_to_pagebuf).
fn parse_list(list: &str) -> Vec<u32> {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse::<u32>().ok()?.min(65_535))
    });
    ranges.flatten().collect()
}
