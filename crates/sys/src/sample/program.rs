//! The program of the inner interface: its process, its threads, its control group.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::unistd::{SysconfVar, sysconf};
use seikan_observe::metric;
use seikan_observe::path::PathMap;
use seikan_observe::{Kind, Subject};

use super::file::Counters;
use super::{Again, Output};

/// Maximum number of sampled threads: each uses three descriptors.
const THREADS_MAX: usize = 128;
/// Maximum number of threads whose names are kept.
const NAMES_MAX: usize = 4096;
const SECOND_NS: u64 = 1_000_000_000;

/// The program.
#[derive(Debug)]
pub(super) struct Program {
    pid: u32,
    io: Option<Counters>,
    threads: BTreeMap<u32, Thread>,
    names: BTreeMap<u32, String>,
    group: Option<(Subject, Counters)>,
    again: Again,
    tick_ns: u64,
}

#[derive(Debug)]
struct Thread {
    /// Scheduler statistics, which not every kernel has (`CONFIG_SCHED_INFO`).
    schedstat: Option<Counters>,
    status: Counters,
    stat: Counters,
    ran: Option<Schedstat>,
    /// The content of the two other files at this run time.
    rest: Vec<(&'static str, Kind, u64)>,
}

impl Program {
    /// Opens the available files of the path's program; `None` if it has none.
    pub(super) fn open(map: &PathMap, output: &mut Output) -> Option<Self> {
        let facts = map.program.as_ref()?;
        let pid = facts.pid;
        let io = Counters::open_readable(&format!("/proc/{pid}/io"));
        let group = facts.group.as_ref().and_then(|group| {
            let file = open_group(group);
            let file = output.keep(&format!("control group {group}"), file)?;
            Some((Subject::Group(group.clone()), file))
        });
        Some(Program {
            pid,
            io: output.keep(&format!("reads and writes of process {pid}"), io),
            threads: BTreeMap::new(),
            names: facts.threads.iter().take(NAMES_MAX).cloned().collect(),
            group,
            again: Again::every(Again::SECOND),
            tick_ns: tick_ns(),
        })
    }

    /// Returns every thread seen so far.
    pub(super) fn threads(&self) -> Vec<(u32, String)> {
        let names = self.names.iter();
        names.map(|(tid, name)| (*tid, name.clone())).collect()
    }

    /// Samples everything.
    pub(super) fn sample(&mut self, now: Instant, output: &mut Output) {
        if self.again.due(now) {
            self.find_threads(output);
        }
        self.sample_process(output);
        let (pid, tick_ns) = (self.pid, self.tick_ns);
        // The files of a thread that has ended cannot be read any more (`ESRCH`).
        self.threads
            .retain(|tid, thread| thread.sample(pid, *tid, tick_ns, output).is_ok());
        if let Some((subject, file)) = &mut self.group
            && let Some(text) = output.keep("control group", file.read())
        {
            for (name, value) in parse_group(&text) {
                output.counter(subject, name, value);
            }
        }
    }

    fn sample_process(&mut self, output: &mut Output) {
        let subject = Subject::Process(self.pid);
        let Some(file) = &mut self.io else { return };
        let name = "reads and writes of the process";
        if let Some(text) = output.keep(name, file.read()) {
            for (label, name) in [
                ("syscr:", metric::IO_READS),
                ("syscw:", metric::IO_WRITES),
                ("rchar:", metric::IO_READ_BYTES),
                ("wchar:", metric::IO_WRITTEN_BYTES),
            ] {
                if let Some(value) = labelled(&text, label) {
                    output.counter(&subject, name, value);
                }
            }
        }
    }

    fn find_threads(&mut self, output: &mut Output) {
        let pid = self.pid;
        let directory = format!("/proc/{pid}/task");
        let name = format!("threads of process {pid}");
        let Some(entries) = output.keep(&name, fs::read_dir(&directory)) else {
            return;
        };
        for entry in entries.flatten() {
            let tid = entry.file_name().to_string_lossy().parse::<u32>();
            let Ok(tid) = tid else { continue };
            if self.threads.contains_key(&tid) {
                continue;
            }
            if self.threads.len() >= THREADS_MAX {
                let why = format!("only the first {THREADS_MAX} are sampled");
                output.missing(&format!("more threads of process {pid}"), why);
                return;
            }
            match Thread::open(&format!("{directory}/{tid}"), output) {
                Ok(thread) => {
                    self.threads.insert(tid, thread);
                }
                // The thread has ended meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    output.missing(&name, error);
                    continue;
                }
            }
            let name = fs::read(format!("{directory}/{tid}/comm")).unwrap_or_default();
            if self.names.len() < NAMES_MAX {
                let name = String::from_utf8_lossy(&name).trim_end().to_owned();
                self.names.entry(tid).or_insert(name);
            }
        }
    }
}

impl Thread {
    fn open(directory: &str, output: &mut Output) -> io::Result<Self> {
        let schedstat = Counters::open(&format!("{directory}/schedstat"));
        Ok(Thread {
            status: Counters::open(&format!("{directory}/status"))?,
            stat: Counters::open(&format!("{directory}/stat"))?,
            schedstat: output.keep("waiting times of threads", schedstat),
            ran: None,
            rest: Vec::new(),
        })
    }

    fn sample(&mut self, pid: u32, tid: u32, tick_ns: u64, output: &mut Output) -> io::Result<()> {
        let subject = Subject::Thread { pid, tid };
        let ran = match &mut self.schedstat {
            Some(file) => parse_schedstat(&file.read()?),
            None => None,
        };
        if let Some(ran) = &ran {
            output.counter(&subject, metric::RUN_NS, ran.run_ns);
            output.counter(&subject, metric::RUN_DELAY_NS, ran.delay_ns);
        }
        // If a thread has not run since, its other values are unchanged; most threads of a large
        // program sleep.
        if ran.is_none() || ran != self.ran {
            self.ran = ran;
            self.read_rest(tick_ns)?;
        }
        for (name, kind, value) in &self.rest {
            output.push(&subject, *name, *kind, *value);
        }
        Ok(())
    }

    fn read_rest(&mut self, tick_ns: u64) -> io::Result<()> {
        self.rest.clear();
        let status = self.status.read()?;
        for (label, name) in [
            ("voluntary_ctxt_switches:", metric::VOLUNTARY_SWITCHES),
            ("nonvoluntary_ctxt_switches:", metric::INVOLUNTARY_SWITCHES),
        ] {
            let value = labelled(&status, label);
            self.rest
                .extend(value.map(|value| (name, Kind::Counter, value)));
        }
        if let Some(stat) = parse_stat(&self.stat.read()?) {
            let ns = |ticks: u64| ticks.saturating_mul(tick_ns);
            self.rest.extend([
                (metric::THREAD_USER_NS, Kind::Counter, ns(stat.user)),
                (metric::THREAD_SYSTEM_NS, Kind::Counter, ns(stat.system)),
                (metric::THREAD_CPU, Kind::Gauge, stat.cpu),
            ]);
        }
        Ok(())
    }
}

/// Returns the nanoseconds of one tick of the kernel's statistics (`USER_HZ`).
pub(super) fn tick_ns() -> u64 {
    let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    SECOND_NS / u64::try_from(ticks).unwrap_or(100).max(1)
}

/// Returns the number in the line that starts with `label`.
fn labelled(text: &str, label: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(label))?;
    value.trim().parse().ok()
}

/// A thread's `schedstat` (Documentation/scheduler/sched-stats.rst).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Schedstat {
    run_ns: u64,
    delay_ns: u64,
    /// Number of times that it was scheduled.
    slices: u64,
}

fn parse_schedstat(text: &str) -> Option<Schedstat> {
    let mut words = text.split_ascii_whitespace();
    let mut next = || words.next()?.parse().ok();
    Some(Schedstat {
        run_ns: next()?,
        delay_ns: next()?,
        slices: next()?,
    })
}

/// Fields of a thread's `stat` (proc(5)).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    user: u64,
    system: u64,
    cpu: u64,
}

/// Parses fields 14, 15 and 39. The second field, the name in brackets, may contain spaces and
/// brackets.
fn parse_stat(text: &str) -> Option<Stat> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut words = rest.split_ascii_whitespace();
    Some(Stat {
        user: words.nth(14 - 3)?.parse().ok()?,
        system: words.next()?.parse().ok()?,
        cpu: words.nth(39 - 16)?.parse().ok()?,
    })
}

/// Parses the counters of `cpu.stat`: of version 2 in microseconds, of version 1 in nanoseconds
/// (Documentation/scheduler/sched-bwc.rst).
fn parse_group(text: &str) -> Vec<(&'static str, u64)> {
    let throttled = labelled(text, "throttled_usec ");
    let throttled = throttled.or_else(|| Some(labelled(text, "throttled_time ")? / 1000));
    [
        (metric::GROUP_PERIODS, labelled(text, "nr_periods ")),
        (metric::GROUP_THROTTLED, labelled(text, "nr_throttled ")),
        (metric::GROUP_THROTTLED_US, throttled),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name, value?)))
    .collect()
}

/// Opens `cpu.stat` of a control group, in the hierarchy that counts its periods.
fn open_group(group: &str) -> io::Result<Counters> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
    let mut directories = parse_mounts(&mounts, group);
    // If the caller passed a directory, use it as it is.
    directories.push(PathBuf::from(group));
    for directory in directories {
        let path = directory.join("cpu.stat");
        let Ok(mut file) = Counters::open_readable(&path.to_string_lossy()) else {
            continue;
        };
        if file.read()?.contains("nr_periods") {
            return Ok(file);
        }
    }
    let text =
        format!("no cpu.stat with periods for {group}: is the processor controller mounted?");
    Err(io::Error::new(io::ErrorKind::NotFound, text))
}

/// Returns the possible directories of a control group: below mounts of version 2, and of version 1
/// with the processor controller (`/proc/PID/mountinfo`, proc(5)).
fn parse_mounts(mounts: &str, group: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in mounts.lines() {
        let Some((fields, after)) = line.split_once(" - ") else {
            continue;
        };
        let mut after = after.split(' ');
        let controls = match (after.next(), after.next(), after.next()) {
            (Some("cgroup2"), ..) => true,
            (Some("cgroup"), _, Some(options)) => options.split(',').any(|option| option == "cpu"),
            _ => false,
        };
        let mut fields = fields.split(' ').skip(3);
        let (Some(root), Some(mount)) = (fields.next(), fields.next()) else {
            continue;
        };
        // A container sees only the part of the hierarchy below `root`.
        let below = Path::new(group).strip_prefix(root);
        let below = below.or_else(|_| Path::new(group).strip_prefix("/"));
        if let (true, Ok(below)) = (controls, below) {
            found.push(Path::new(mount).join(below));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_have_brackets() {
        let mut fields: Vec<String> = (3..=52).map(|field| field.to_string()).collect();
        fields[0] = "S".into();
        let text = format!("1 (a) b (c)) {}", fields.join(" "));
        let expected = Stat {
            user: 14,
            system: 15,
            cpu: 39,
        };
        assert_eq!(parse_stat(&text), Some(expected));
        for length in 0..text.len() - 60 {
            let _ = parse_stat(&text[..length]);
        }
    }

    #[test]
    fn voluntary_and_involuntary_switches_are_separate() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(labelled(text, "voluntary_ctxt_switches:"), Some(150));
        assert_eq!(labelled(text, "nonvoluntary_ctxt_switches:"), Some(545));
        assert_eq!(labelled("Name:\tx\n", "voluntary_ctxt_switches:"), None);
    }

    #[test]
    fn schedstat_is_running_and_waiting() {
        let expected = Schedstat {
            run_ns: 211_421_476,
            delay_ns: 50_063_619,
            slices: 998,
        };
        assert_eq!(parse_schedstat("211421476 50063619 998\n"), Some(expected));
        assert_eq!(parse_schedstat("1 2"), None);
        assert_eq!(parse_schedstat("a b c"), None);
    }

    #[test]
    fn both_versions_of_a_group_are_in_microseconds() {
        let expected = [
            (metric::GROUP_PERIODS, 100),
            (metric::GROUP_THROTTLED, 7),
            (metric::GROUP_THROTTLED_US, 5000),
        ];
        let two =
            "usage_usec 1\nnr_periods 100\nnr_throttled 7\nthrottled_usec 5000\nnr_bursts 0\n";
        let one = "nr_periods 100\nnr_throttled 7\nthrottled_time 5000000\n";
        assert_eq!(parse_group(two), expected);
        assert_eq!(parse_group(one), expected);
        assert_eq!(parse_group("usage_usec 1\n"), []);
    }

    #[test]
    fn a_group_is_looked_for_where_processors_are_limited() {
        let mounts = "34 29 0:30 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
                      35 29 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                      36 29 0:32 /box /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      22 1 8:1 / / rw - ext4 /dev/sda1 rw\nnonsense\n";
        let found = parse_mounts(mounts, "/box/vpn");
        let expected = ["/sys/fs/cgroup/cpu/box/vpn", "/sys/fs/cgroup/unified/vpn"];
        assert_eq!(found, expected.map(PathBuf::from));
    }
}
