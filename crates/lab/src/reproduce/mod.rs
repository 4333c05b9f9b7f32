//! `seikan lab reproduce`: published experiments on slow tunnels, repeated on one machine.
//!
//! Each [`Source`] has a slow and a fast setup in interleaved rounds, and its published figures.
//! [`Claim`]s state the faster setup and whether that holds in every round. The doctor diagnoses
//! the slow setup without any hint. Figures of another machine are compared as ratios only.

mod batch;
mod counters;
mod crossings;
mod delay;
mod figures;
mod forwarding;
mod functions;
mod guests;
mod library;
mod limit;
mod look;
mod mtu_cipher;
mod noise;
mod null;
mod offload;
mod pages;
mod patterns;
mod profile;
mod queue;
mod reordering;
mod segments;
mod steering;
mod steps;
mod surface;
#[cfg(test)]
mod testing;
mod tracepoints;

use std::fmt;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::host::{Congestion, Host};
use crate::link::Link;
use crate::machine::Machine;
use crate::scenario::{lookup, tool};
use crate::tunnel::{self, Changes, Running, Tunnel};

pub use figures::{Bars, Claim, Curve, Curves, Figures, Grid, Layer, List, Part, Row, Surface};
pub use look::Look;

/// A published experiment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A queue of three packets in front of the tunnel's program.
    #[default]
    Queue,
    /// A gateway that wraps what receive offload has merged.
    Offload,
    /// N frames for each crossing between kernel and program.
    Batch,
    /// Guests behind a virtual switch, some of them busy.
    Profile,
    /// The tunnel's MTU and its cipher.
    MtuCipher,
}

impl Source {
    /// All, in their order.
    pub const ALL: [Self; 5] = [
        Self::Queue,
        Self::Offload,
        Self::Batch,
        Self::Profile,
        Self::MtuCipher,
    ];

    /// Its name on the command line and of its files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Offload => "offload",
            Self::Batch => "batch",
            Self::Profile => "profile",
            Self::MtuCipher => "mtu-cipher",
        }
    }

    /// Returns its title.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Queue => "A tunnel with a queue of three packets",
            Self::Offload => "A gateway that encapsulates merged packets",
            Self::Batch => "Many frames per system call",
            Self::Profile => "Guests behind a virtual switch, some of them busy",
            Self::MtuCipher => "The MTU of a tunnel and its cipher",
        }
    }

    /// Where it was published, and how.
    pub const fn published(self) -> &'static str {
        match self {
            Self::Queue => {
                "A history of debugging the TUN/TAP driver of Solaris: OpenVPN over TAP between two guests of one \
                 hypervisor, netperf, gigabit."
            }
            Self::Offload => {
                "TCP over an overlay protocol of its own: a gateway in Go with a packet socket, between a device and a \
                 remote host, gigabit cards, iperf3."
            }
            Self::Batch => {
                "OpenVPN performance: its first bottleneck is the tun driver. A driver of Linux 2.6.32 changed so that a read \
                 returns as many packets as a buffer of 4 x 1,500 bytes holds; a program that only passes on, over TCP, \
                 gigabit cards, ApacheBench."
            }
            Self::Profile => {
                "Diagnosing a virtual network by profiling: two hosts on 10 Gbit/s, Open vSwitch, eight virtual machines that \
                 send (iperf3) or spin (yes); perf and ftrace."
            }
            Self::MtuCipher => {
                "Jan Just Keijser, Optimizing performance on gigabit networks (OpenVPN 2.1, two machines, iperf)."
            }
        }
    }

    /// Returns the differences of this machine's setup from the source's.
    pub const fn differs(self) -> &'static str {
        match self {
            Self::Queue => {
                "Here: Linux instead of Solaris, two network namespaces joined by a veth pair instead of two guests, so the \
                 link itself is far faster than a gigabit; both ends share the processors. Published figures are compared with \
                 OpenVPN over TAP; the rows over TUN are ours."
            }
            Self::Offload => {
                "Here: three network namespaces joined by veth pairs whose cards send packets of the MTU, as physical \
                 ones do; the naive gateway is ours, in Rust; all three hosts share the processors."
            }
            Self::Batch => {
                "Here: the driver is as it is, and N is how many segments the kernel puts at most into the super-packets that it hands \
                 out (44 of an MTU of 1,420 fill one). Only segments of one stream form one. The three hosts in a row are \
                 namespaces and share the processors; a token bucket stands for the gigabit NICs."
            }
            Self::Profile => {
                "Here: guests are network namespaces, not virtual machines, so there is no vhost thread and no handle_tx to \
                 count; Open vSwitch forwards in user space; who receives shares the processors, and they are two."
            }
            Self::MtuCipher => {
                "Here: two network namespaces joined by a veth pair instead of two machines with gigabit cards; OpenVPN \
                 of today; both ends share the processors, so encryption and decryption compete."
            }
        }
    }

    /// Returns the number of slow setups that the doctor diagnoses.
    pub const fn looks(self) -> usize {
        match self {
            Self::Batch | Self::Profile => 1,
            Self::Queue => 2,
            Self::Offload | Self::MtuCipher => 3,
        }
    }

    /// Rate of the published links, in bit/s. [`Source::MtuCipher`] has one of 10 Gbit/s as well.
    const fn rate(self) -> u64 {
        match self {
            Self::Profile => 10 * GIGABIT,
            _ => GIGABIT,
        }
    }

    const fn run(self) -> Step {
        match self {
            Self::Queue => queue::run,
            Self::Offload => offload::run,
            Self::Batch => batch::run,
            Self::Profile => profile::run,
            Self::MtuCipher => mtu_cipher::run,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Length and number of measurements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReproduceOptions {
    /// Measured seconds of each load.
    pub seconds: f64,
    /// Repetitions of each measurement, interleaved.
    pub rounds: u32,
    /// Congestion control of all hosts.
    pub congestion: Congestion,
    /// Where recordings of the doctor's looks are kept; nowhere if `None`.
    pub recordings: Option<PathBuf>,
}

impl Default for ReproduceOptions {
    fn default() -> Self {
        Self {
            seconds: 3.0,
            rounds: 3,
            congestion: Congestion::default(),
            recordings: None,
        }
    }
}

/// Result of an experiment, as far as it has got.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Experiment {
    /// Which one.
    pub source: Source,
    /// When it ended, UTC.
    pub date: String,
    /// Where.
    pub machine: Machine,
    /// How.
    pub options: ReproduceOptions,
    /// How long it took, in seconds.
    pub took: f64,
    /// Measured and published figures.
    pub figures: Vec<Figures>,
    /// The same for many ways at once.
    pub grids: Vec<Grid>,
    /// Other results.
    pub lists: Vec<List>,
    /// One quantity over another.
    pub curves: Vec<Curves>,
    /// Quantities by kind.
    #[serde(default)]
    pub bars: Vec<Bars>,
    /// Several quantities over two others.
    pub surfaces: Vec<Surface>,
    /// Claims of higher speed.
    pub claims: Vec<Claim>,
    /// Verdicts of the doctor.
    pub looks: Vec<Look>,
    /// Notes.
    pub notes: Vec<String>,
    /// Measurements that failed, with the reason.
    pub problems: Vec<String>,
}

impl Experiment {
    /// Returns whether every claim holds and every diagnosis was correct.
    pub fn reproduced(&self) -> bool {
        let claims = !self.claims.is_empty() && self.claims.iter().all(Claim::holds);
        let right = self.looks.iter().filter(|look| look.is_right()).count();
        claims && right == self.source.looks()
    }
}

/// A part of an experiment.
type Step = fn(&mut Bench<'_>, &mut Experiment) -> Result<()>;

impl Experiment {
    /// Runs a part. Its failure is noted, and the others go on; only an interruption ends the
    /// experiment.
    fn attempt(&mut self, part: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        match part(self) {
            Err(LabError::Interrupted) => Err(LabError::Interrupted),
            Err(error) => {
                self.problems.push(error.to_string());
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// The value, if there is one; its failure is noted with this context.
    fn unless_failed<T>(&mut self, context: &str, value: Result<T>) -> Result<Option<T>> {
        match value {
            Err(LabError::Interrupted) => Err(LabError::Interrupted),
            Err(error) => {
                self.problems.push(format!("{context}: {error}"));
                Ok(None)
            }
            Ok(value) => Ok(Some(value)),
        }
    }

    /// Runs parts one after the other.
    fn attempt_all(&mut self, bench: &mut Bench<'_>, parts: &[Step]) -> Result<()> {
        let mut parts = parts.iter();
        parts.try_for_each(|part| self.attempt(|found| part(bench, found)))
    }
}

/// Gigabit Ethernet, in bit/s.
const GIGABIT: u64 = 1_000_000_000;

/// Common parts of the experiments.
struct Bench<'a> {
    desk: Desk<'a>,
    progress: &'a mut dyn FnMut(Progress),
    /// Steps so far, and how many there will be, about.
    steps: (f64, f64),
}

/// Parts that a diagnosis needs; other threads may have them.
#[derive(Clone, Copy)]
struct Desk<'a> {
    options: &'a ReproduceOptions,
    interrupt: &'a Interrupt,
    source: Source,
}

impl<'a> Deref for Bench<'a> {
    type Target = Desk<'a>;

    fn deref(&self) -> &Desk<'a> {
        &self.desk
    }
}

impl Bench<'_> {
    /// How long a load is measured.
    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.options.seconds)
    }

    /// A link of this rate.
    fn link(&self, rate: Option<u64>) -> Link {
        Link {
            rate,
            congestion: self.options.congestion,
            ..Link::default()
        }
    }

    /// The rates of the links of the main rows: without a limit, and as fast as the published one.
    fn rates(&self) -> [Option<u64>; 2] {
        [None, Some(self.source.rate())]
    }

    /// Starts a tunnel as it is, over a link of this rate.
    fn start(&self, tunnel: &str, rate: Option<u64>) -> Result<Running> {
        self.start_over(&plain(tunnel)?, self.link(rate))
    }

    /// Starts a tunnel over a link.
    fn start_over(&self, tunnel: &Arc<dyn Tunnel>, link: Link) -> Result<Running> {
        tunnel::start(tunnel, link, self.interrupt)
    }

    /// Says how many steps there will be.
    fn expect(&mut self, steps: usize) {
        self.steps.1 = steps as f64;
    }

    /// A step begins.
    fn step(&mut self, what: impl fmt::Display) -> Result<()> {
        self.interrupt.check()?;
        let (done, all) = self.steps;
        let step = format!("{}: {what}", self.source);
        (self.progress)(Progress {
            fraction: (done / all.max(1.0)).min(1.0),
            step,
        });
        self.steps.0 += 1.0;
        Ok(())
    }
}

/// A title with the rate of the link, if it is limited.
fn titled(title: &str, rate: Option<u64>) -> String {
    match rate {
        Some(rate) => format!("{title}, link of {} Gbit/s", rate / GIGABIT),
        None => title.to_owned(),
    }
}

/// The tunnel called so, as it is.
fn plain(name: &str) -> Result<Arc<dyn Tunnel>> {
    lookup(name, &Changes::default())
}

/// Sets a device of a host, in the words of `ip link`.
fn set_link(host: &Host, device: &str, words: &str) -> Result<()> {
    tool(host, &format!("ip link set dev {device} {words}"))
}

/// Sets the tunnel's interface in both hosts.
fn set_both(running: &Running, words: &str) -> Result<()> {
    let mut hosts = running.hosts.both().into_iter();
    hosts.try_for_each(|host| set_link(host, &running.device(host), words))
}

/// Runs an experiment; calls `progress` before every step.
///
/// # Errors
/// Options without meaning; [`LabError::Interrupted`]; hosts that cannot be made. The result has
/// the failures of single rows.
pub fn reproduce(
    source: Source,
    options: &ReproduceOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<Experiment> {
    if options.rounds == 0 || !(0.1..=600.0).contains(&options.seconds) {
        return Err(LabError::Usage(
            "at least one round, and 0.1 to 600 s for each load".into(),
        ));
    }
    let begin = Instant::now();
    let desk = Desk {
        options,
        interrupt,
        source,
    };
    let mut bench = Bench {
        desk,
        progress,
        steps: (0.0, 1.0),
    };
    let mut found = Experiment {
        source,
        machine: Machine::this(),
        options: options.clone(),
        ..Experiment::default()
    };
    source.run()(&mut bench, &mut found)?;
    found.date = utc_now();
    found.took = begin.elapsed().as_secs_f64();
    Ok(found)
}
