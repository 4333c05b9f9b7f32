//! Scenarios: tunnels that are made slow on purpose, to test whether the doctor finds the cause.
//!
//! A [`Scenario`] is a file of `scenarios/`: a tunnel, a load, a [`Fault`], and the expected
//! diagnosis. [`run`] plays it once: load without the fault, then load with it. Meanwhile the
//! doctor runs, which knows only the interface and the expected rate. [`mod@score`] plays many with
//! random severities and counts.

mod again;
mod cost;
mod counts;
pub(crate) mod doctor;
mod embedded;
mod fault;
mod play;
mod repair;
mod score;

use std::fmt;

use clap::ValueEnum;
use seikan_diagnose::Cause;
use serde::{Deserialize, Serialize};

pub(crate) use again::load as load_recording;
pub use again::{Guesses, recording_file};
pub use cost::{COST_TUNNELS, CostOptions, CostRow, cost};
pub use counts::{Baseline, Counts, Doubles, Fixes, Interval, PerClass};
pub use doctor::Diagnosis;
pub use embedded::FILES;
pub(crate) use fault::cpu::Hog;
pub(crate) use fault::long_ruleset;
pub use fault::{Applied, Fault, FaultKind, Location, Site};
pub(crate) use play::lookup;
pub use play::{Outcome, RunOptions, run};
pub use repair::{RESTORED, Repair};
pub use score::{Case, Progressed, ScoreOptions, score, score_again};

use crate::arguments;
use crate::error::{Result, usage};
use crate::site::{Congestion, Link, LinkKind};
use crate::tunnel::{self, Changes};
use crate::wire::{Faults, WireFaults};
use seikan_load::{LiveKind, LiveOptions, Pattern};

/// The tunnel that no rule is ever tuned on.
pub const UNTUNED_TUNNEL: &str = "boringtun";
/// Number of bands of the range of severities; the odd ones are held out.
const BANDS: u32 = 10;

/// The half of the cases that is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Severities and tunnels that rules may be tuned on
    #[default]
    Train,
    /// Severities and a tunnel that rules were never tuned on
    HeldOut,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&arguments::name(self))
    }
}

/// A host: A sends, B receives, and some tunnels have a host in the middle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// Host A.
    #[default]
    Sender,
    /// Host B.
    Receiver,
    /// The host in the middle.
    Middle,
}

/// The link under the tunnel.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct LinkSpec {
    /// MTU in bytes.
    pub mtu: u32,
    /// Whether the cards keep their offloads.
    pub offload: bool,
    /// Delay of each direction, in milliseconds; needs a wire.
    pub delay: Option<f64>,
    /// Time in microseconds for which a NIC waits for more packets before it passes them on; see
    /// [`Link::moderation`].
    pub moderation: u32,
}

impl Default for LinkSpec {
    fn default() -> Self {
        let link = Link::default();
        Self {
            mtu: link.mtu,
            offload: true,
            delay: None,
            moderation: link.moderation,
        }
    }
}

/// Traffic of the application, from host A to host B.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoadSpec {
    /// Kind of traffic.
    pub kind: LiveKind,
    /// TCP streams.
    #[serde(default = "one")]
    pub streams: usize,
    /// Offered rate in Mbit/s; if left out, unlimited.
    pub rate: Option<f64>,
    /// UDP payload, or data of each short connection, in bytes.
    pub size: Option<usize>,
    /// Congestion control of the hosts.
    #[serde(default)]
    pub congestion: Congestion,
}

fn one() -> usize {
    1
}

impl LoadSpec {
    /// Returns the options of the load generator.
    pub fn options(&self) -> LiveOptions {
        let size = match self.kind {
            LiveKind::Connections => 65_536,
            _ => LiveOptions::default().size,
        };
        LiveOptions {
            kind: self.kind,
            streams: self.streams,
            rate: self.rate,
            size: self.size.unwrap_or(size),
            ..LiveOptions::default()
        }
    }
}

/// A tunnel that is slow for a known reason, or not slow at all.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Scenario {
    /// Name of the scenario, which is also the name of its file.
    pub name: String,
    /// Description, in a sentence.
    pub about: String,
    /// The cause to be found.
    pub cause: Cause,
    /// Other causes that are equally correct.
    #[serde(default)]
    pub also: Vec<Cause>,
    /// Causes that the verdict's chain should contain, the symptom first.
    #[serde(default)]
    pub chain: Vec<Cause>,
    /// Tunnels with which the scenario can be played. Tunnels that are not installed are left out.
    pub tunnels: Vec<String>,
    /// Whether the remedy is a setting of the doctor's host only, and not of a program.
    #[serde(default)]
    pub fixable: bool,
    /// The host on which the doctor runs.
    #[serde(default)]
    pub doctor: End,
    /// The link.
    #[serde(default)]
    pub link: LinkSpec,
    /// The load.
    pub load: LoadSpec,
    /// The fault.
    pub fault: Fault,
    /// A second fault at the same time.
    pub second: Option<Second>,
}

/// A second fault in addition to the first.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Second {
    /// The cause to be found.
    pub cause: Cause,
    /// The fault, which must apply to a running tunnel.
    pub fault: Fault,
}

impl Scenario {
    /// Reads and checks a file called `name`.
    ///
    /// # Errors
    /// The mistake in the file, and its position.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let wrong = |what: String| usage(format!("scenario {name}: {what}"));
        let scenario: Self = toml::from_str(text).map_err(|e| wrong(e.to_string()))?;
        scenario.check(name).map_err(wrong)?;
        Ok(scenario)
    }

    fn check(&self, name: &str) -> std::result::Result<(), String> {
        if self.name != name {
            return Err(format!("its name is `{}`", self.name));
        }
        if self.tunnels.is_empty() {
            return Err("no tunnels".into());
        }
        if self.fault.is_none() != (self.cause == Cause::Healthy) {
            return Err("without a fault the cause is `healthy`, and with one it is not".into());
        }
        if !(1..=256).contains(&self.load.streams) {
            return Err(format!(
                "{} streams are out of range: use 1 to 256",
                self.load.streams
            ));
        }
        if self
            .load
            .rate
            .is_some_and(|r| !(0.1..=100_000.0).contains(&r))
        {
            return Err("rate: 0.1 to 100000 Mbit/s".into());
        }
        if self.load.size.is_some_and(|s| !(1..=65_536).contains(&s)) {
            return Err("size: 1 to 65536 bytes".into());
        }
        if self
            .link
            .delay
            .is_some_and(|d| !(0.0..=5_000.0).contains(&d))
        {
            return Err("delay: 0 to 5000 ms".into());
        }
        if self.link.moderation > 10_000 {
            return Err("moderation: 0 to 10000 µs".into());
        }
        if let Some(other) = self.tunnels.iter().find(|t| !self.fault.can_be_in(t)) {
            return Err(format!("the fault is impossible in the tunnel {other}"));
        }
        if let Some(second) = &self.second {
            if self.fault.is_none() || !second.fault.is_of_a_running_tunnel() {
                return Err(
                    "a second fault must apply to a running tunnel that has a first fault".into(),
                );
            }
            if second.cause == self.cause || second.fault.kind == self.fault.kind {
                return Err("the second fault is the first".into());
            }
            if let Some(other) = self.tunnels.iter().find(|t| !second.fault.can_be_in(t)) {
                return Err(format!(
                    "the second fault is impossible in the tunnel {other}"
                ));
            }
            second.fault.check(&self.load)?;
        }
        let middle = self.doctor == End::Middle || self.fault.at == Location::Middle;
        if middle && let Some(other) = self.tunnels.iter().find(|t| !tunnel::has_middle(t)) {
            return Err(format!("the tunnel {other} has no host in the middle"));
        }
        self.fault.check(&self.load)
    }

    /// Returns the link without the fault: an emulated link if a delay or a fault of the link needs
    /// one.
    pub fn link(&self) -> Link {
        let delay = self.link.delay.unwrap_or_default();
        let wire = WireFaults::both(Faults {
            delay_us: (delay * 1e3) as u64,
            ..Faults::default()
        });
        let is_wire = self.link.delay.is_some() || self.fault.kind.is_of_a_wire();
        let link = Link {
            kind: if is_wire {
                LinkKind::Wire(wire)
            } else {
                LinkKind::Veth
            },
            mtu: self.link.mtu,
            moderation: self.link.moderation,
            congestion: self.load.congestion,
            ..Link::default()
        };
        link.offload(self.link.offload)
    }

    /// Every scenario, in the order of the catalogue of causes.
    ///
    /// # Errors
    /// A file is invalid, which is a bug.
    pub fn all() -> Result<Vec<Self>> {
        let mut all = FILES
            .iter()
            .map(|(name, text)| Self::parse(name, text))
            .collect::<Result<Vec<_>>>()?;
        all.sort_by(|a, b| (a.cause, &a.name).cmp(&(b.cause, &b.name)));
        Ok(all)
    }

    /// The scenario called `name`.
    ///
    /// # Errors
    /// There is no such scenario; the text lists all scenarios.
    pub fn find(name: &str) -> Result<Self> {
        let all = Self::all()?;
        let names: Vec<String> = all.iter().map(|s| s.name.clone()).collect();
        all.into_iter().find(|s| s.name == name).ok_or_else(|| {
            usage(format!(
                "no scenario is called `{name}`; there are {}",
                names.join(", ")
            ))
        })
    }

    /// Returns the scenario's tunnels that can run here and belong to `split`.
    pub fn available_tunnels(&self, split: Split) -> Vec<String> {
        let here = |name: &&String| {
            let tunnel = tunnel::named(name, &Changes::default());
            tunnel.is_some_and(|t| t.availability().is_ok())
        };
        let all = self.tunnels.iter().filter(here);
        match split {
            Split::Train => all.filter(|t| *t != UNTUNED_TUNNEL).cloned().collect(),
            // Use the held-out tunnel in every other case.
            Split::HeldOut => {
                let (held, others): (Vec<&String>, Vec<&String>) =
                    all.partition(|t| *t == UNTUNED_TUNNEL);
                match held.first() {
                    Some(held) if !others.is_empty() => others
                        .into_iter()
                        .flat_map(|other| [(*held).clone(), other.clone()])
                        .collect(),
                    Some(held) => vec![(*held).clone()],
                    None => others.into_iter().cloned().collect(),
                }
            }
        }
    }
}

/// A case to be played: everything that chance decides is decided by the seed.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The tunnel.
    pub tunnel: String,
    /// Severity of the fault, in its unit; `None` without a fault.
    pub severity: Option<f64>,
    /// Severity of the second fault; `None` without one.
    pub second: Option<f64>,
}

impl Draw {
    /// Draws case `number` of a scenario; `None` if none of its tunnels can run here.
    pub fn new(scenario: &Scenario, split: Split, seed: u64, number: u32) -> Option<Self> {
        let tunnels = scenario.available_tunnels(split);
        // Use the tunnels one after the other, so that few cases cover many tunnels.
        let turn = (seed as usize).wrapping_add(number as usize);
        let tunnel = tunnels.get(turn % tunnels.len().max(1))?.clone();
        let stream = scenario.name.bytes().fold(seed, |hash, byte| {
            // FNV-1a, so that scenarios do not draw alike.
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let drawn = |fault: &Fault, stream: u64| {
            let fraction = Pattern::new(stream).share(number.into());
            let range = fault.severity?;
            Some(fault.kind.round(in_band(range, fraction, split)))
        };
        let second = scenario.second.as_ref();
        Some(Self {
            tunnel,
            severity: drawn(&scenario.fault, stream),
            second: second.and_then(|second| drawn(&second.fault, !stream)),
        })
    }
}

/// Returns a log-uniform value over the bands of `range` that belong to `split`.
fn in_band([from, to]: [f64; 2], fraction: f64, split: Split) -> f64 {
    let position = fraction * f64::from(BANDS / 2);
    let band = 2.0 * position.floor() + f64::from(u8::from(split == Split::HeldOut));
    let exponent = (band + position.fract()) / f64::from(BANDS);
    from * (to / from).powf(exponent)
}

#[cfg(test)]
mod tests;
