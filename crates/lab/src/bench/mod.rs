//! `seikan lab bench`: Seikan and other tunnels, in one run.
//!
//! Rounds are interleaved (every tunnel once per round, in new hosts), so that a drift of the
//! machine's speed touches all of them. Figures are medians over rounds; ratios are to the raw link
//! of the same run. A tunnel that fails in a round is reported with the reason and does not stop
//! the others.

mod figures;
pub mod path;

use std::sync::Arc;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{ArgAction, Args, ValueEnum};
use seikan_config::{BitRate, UnknownValue};
use seikan_load::{
    Direction, Ends, LatencyOptions, LatencyReport, TcpOptions, UdpOptions, ping, tcp_bulk,
    udp_flood,
};
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use crate::arguments::{self, defaults, seconds, whole};
use crate::error::{Result, in_words, setup, usage};
use crate::site::{Congestion, Link};
use crate::tunnel::{self, Running, Started, Tunnel};

pub use figures::{Absent, Comparison, FORWARDING, LoadSummary, Measured, Round, RoundLoad, Row};
pub(crate) use figures::{RAW, summarise, with_ratios};

/// Pause between the first answer of a tunnel and its measurement, and between loads.
const SETTLE: Duration = Duration::from_millis(300);
/// Rough time that starting and stopping a tunnel takes, for the progress bar only, in seconds.
pub(crate) const START_SECONDS: f64 = 1.5;

/// A kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// One TCP stream
    Tcp1,
    /// Four TCP streams
    Tcp4,
    /// Eight TCP streams
    Tcp8,
    /// 128 TCP streams
    Tcp128,
    /// 200 TCP streams
    Tcp200,
    /// One TCP stream in the other direction
    Rev,
    /// One TCP stream in each direction at once; the sum
    Bidir,
    /// UDP datagrams of 1200 bytes without a limit; the rate received
    Udp,
    /// The same as udp in the other direction
    UdpRev,
    /// Rate of one TCP stream beside the tunnel, while another goes through it; only for
    /// `bench --path`, as all loads below
    Beside,
    /// Web pages from the server
    Web,
    /// 50 small datagrams a second to the server and back, as in a call
    Voice,
    /// Five seconds without a path
    Outage5,
    /// A minute without a path
    Outage60,
    /// A new address of the client, after half a second without a path
    Roam,
}

impl std::fmt::Display for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&arguments::name(self))
    }
}

impl Load {
    /// Returns a readable name of the load.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Tcp1 => "TCP, 1 stream",
            Self::Tcp4 => "TCP, 4 streams",
            Self::Tcp8 => "TCP, 8 streams",
            Self::Tcp128 => "TCP, 128 streams",
            Self::Tcp200 => "TCP, 200 streams",
            Self::Rev => "TCP, 1 stream, the other way",
            Self::Bidir => "TCP, both ways at once, sum",
            Self::Udp => "UDP flood of 1200 byte datagrams, received",
            Self::UdpRev => "UDP flood of 1200 byte datagrams, the other way",
            Self::Beside => "TCP, 1 stream outside of the tunnel, beside one inside",
            Self::Web => "web pages, time of each",
            Self::Voice => "voice alone, round trip of the slowest 1 %",
            Self::Outage5 => "time to come back after 5 s of outage",
            Self::Outage60 => "time to come back after 60 s of outage",
            Self::Roam => "time to come back after a change of address",
        }
    }

    /// Whether only a comparison over emulated paths can run it.
    const fn needs_path(self) -> bool {
        matches!(
            self,
            Self::Beside | Self::Web | Self::Voice | Self::Outage5 | Self::Outage60 | Self::Roam
        )
    }

    fn tcp(self, seconds: f64) -> Option<TcpOptions> {
        let (streams, direction) = match self {
            Self::Tcp1 => (1, Direction::Forward),
            Self::Tcp4 => (4, Direction::Forward),
            Self::Tcp8 => (8, Direction::Forward),
            Self::Tcp128 => (128, Direction::Forward),
            Self::Tcp200 => (200, Direction::Forward),
            Self::Rev => (1, Direction::Reverse),
            Self::Bidir => (1, Direction::Both),
            _ => return None,
        };
        let duration = Duration::from_secs_f64(seconds);
        Some(TcpOptions {
            streams,
            direction,
            duration,
            ..TcpOptions::default()
        })
    }
}

/// Options of a comparison of tunnels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Args)]
pub struct BenchOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement; with --path 2 by default
    #[arg(long, value_name = "ROUNDS", default_value_t = 5, default_value_if("path", ArgPredicate::IsPresent, "2"), value_parser = whole(1..=100))]
    pub rounds: u32,
    /// Tunnels to measure [default: all that are installed]; Seikan with another implementation at
    /// the far end (seikan+wireguard-go), and tunnels without an interface (native-userspace,
    /// wireguard-userspace, wireproxy; TCP only), run only if named
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Option<Vec<String>>,
    /// Loads to run; with --path only tcp1 by default
    #[arg(long, alias = "load", value_name = "LOAD,...", value_delimiter = ',', default_value_if("path", ArgPredicate::IsPresent, "tcp1"), default_values_t = [Load::Tcp1, Load::Tcp4, Load::Rev, Load::Udp])]
    pub loads: Vec<Load>,
    /// Disable the offloads of the link, as on a plain NIC
    #[arg(long = "no-offload", action = ArgAction::SetFalse)]
    pub offload: bool,
    /// Measure Seikan also with this many idle peers
    #[arg(long, value_name = "PEERS", default_value_t = 0, value_parser = whole(0..=1_000_000))]
    pub idle_peers: u32,
    /// Measure Seikan also with this `uplink-rate`, such as 285M
    #[arg(long, value_name = "RATE", value_parser = rate)]
    pub uplink_rate: Option<String>,
    /// Congestion control of all hosts, whatever this machine's default is [default: cubic]
    #[arg(long, value_name = "NAME", value_enum)]
    pub congestion: Option<Congestion>,
}

/// Checks a value of `uplink-rate`.
fn rate(text: &str) -> std::result::Result<String, UnknownValue> {
    text.parse::<BitRate>().map(|_| text.to_owned())
}

impl Default for BenchOptions {
    fn default() -> Self {
        defaults()
    }
}

/// A comparison of tunnels.
pub type BenchReport = Comparison<BenchOptions>;

/// Compares tunnels; calls `progress` before every step.
///
/// # Errors
/// Invalid options; [`Interrupted`](crate::error::LabError::Interrupted); hosts cannot be created. Failures of a tunnel are in
/// the report.
pub fn bench(
    options: &BenchOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<BenchReport> {
    check(options)?;
    let (present, absent) = tunnels(options, options.only.as_deref())?;
    let plan = Plan {
        loads: &options.loads,
        seconds: options.seconds,
    };
    let rounds = Rounds {
        count: options.rounds,
        each: plan.time(),
    };
    let name = |tunnel: &Arc<dyn Tunnel>| tunnel.name().to_owned();
    let measured = rounds.interleave(&present, name, progress, |tunnel, _, step| {
        measure(tunnel, options, plan, interrupt, step)
    })?;
    let rows = present.iter().zip(measured).map(|(tunnel, rounds)| {
        let mean = |latency: &LatencyReport| latency.mean_us;
        summarise(tunnel.name(), &**tunnel, rounds, mean)
    });
    let rows = with_ratios(rows.collect(), RAW);
    Ok(Comparison::of(options.clone(), rows, absent))
}

/// Number of measurements of every row, and approximate duration of each, in seconds.
pub(crate) struct Rounds {
    pub(crate) count: u32,
    pub(crate) each: f64,
}

impl Rounds {
    /// Measures rows in interleaved rounds; returns the results of each row. `measure` gets the number of
    /// the round, and reports its steps with the seconds that have passed.
    pub(crate) fn interleave<T, R>(
        &self,
        rows: &[T],
        name: impl Fn(&T) -> String,
        progress: &mut dyn FnMut(Progress),
        mut measure: impl FnMut(&T, u32, &mut dyn FnMut(f64, &str)) -> Result<R>,
    ) -> Result<Vec<Vec<R>>> {
        let mut results: Vec<Vec<R>> = rows.iter().map(|_| Vec::new()).collect();
        let total = self.each * rows.len() as f64 * f64::from(self.count);
        let mut done = 0.0;
        for round in 1..=self.count {
            for (row, results) in rows.iter().zip(&mut results) {
                let mut step = |within: f64, what: &str| {
                    progress(Progress {
                        fraction: ((done + within) / total).min(1.0),
                        step: format!("round {round}/{}  {}  {what}", self.count, name(row)),
                    });
                };
                results.push(measure(row, round, &mut step)?);
                done += self.each;
            }
        }
        Ok(results)
    }
}

fn check(options: &BenchOptions) -> Result<()> {
    check_length(options.rounds, &options.loads, options.seconds)?;
    refuse_path_loads(&options.loads)
}

/// Refuses options that would measure nothing, or without end.
pub(crate) fn check_length(rounds: u32, loads: &[Load], seconds: f64) -> Result<()> {
    if rounds == 0 || loads.is_empty() {
        return Err(usage(
            "nothing to measure: give at least one round and one load",
        ));
    }
    if !seconds.is_finite() || !(0.1..=3600.0).contains(&seconds) {
        return Err(usage(format!(
            "cannot measure for {seconds} s per load: use 0.1 to 3600 s"
        )));
    }
    Ok(())
}

/// Refuses loads that only a comparison over emulated paths can run.
pub(crate) fn refuse_path_loads(loads: &[Load]) -> Result<()> {
    match loads.iter().find(|load| load.needs_path()) {
        Some(load) => Err(usage(format!(
            "the load {load} needs an emulated path: use `seikan lab bench --path`"
        ))),
        None => Ok(()),
    }
}

type Tunnels = Vec<Arc<dyn Tunnel>>;

/// Returns the selected tunnels that can run, and the ones that cannot.
fn tunnels(options: &BenchOptions, only: Option<&[String]>) -> Result<(Tunnels, Vec<Absent>)> {
    let (present, absent) = choose(
        tunnel::all(options.idle_peers, options.uplink_rate.as_deref()),
        only,
        |tunnel| tunnel.name(),
        |tunnel| tunnel.by_default(),
        |tunnel| tunnel.availability(),
    )?;
    if present.is_empty() {
        let reasons: Vec<String> = absent
            .iter()
            .map(|a| format!("{}: {}", a.name, a.reason))
            .collect();
        return Err(setup(format!(
            "no tunnel can run here: {}",
            reasons.join("; ")
        )));
    }
    Ok((present, absent))
}

/// Returns the selected rows that can run, and those that cannot.
pub(crate) fn choose<T>(
    all: Vec<T>,
    only: Option<&[String]>,
    name: fn(&T) -> &str,
    by_default: impl Fn(&T) -> bool,
    availability: impl Fn(&T) -> Result<()>,
) -> Result<(Vec<T>, Vec<Absent>)> {
    let names = || all.iter().map(name);
    let is_known = |said: &&String| names().any(|name| means(said, name));
    if let Some(unknown) = only.unwrap_or_default().iter().find(|said| !is_known(said)) {
        return Err(usage(format!(
            "unknown row `{unknown}`; known: {}",
            names().collect::<Vec<_>>().join(", ")
        )));
    }
    let wanted = |row: &T| match only {
        Some(names) => names.iter().any(|said| means(said, name(row))),
        None => by_default(row),
    };
    let (mut present, mut absent) = (Vec::new(), Vec::new());
    for row in all.into_iter().filter(wanted) {
        match availability(&row) {
            Ok(()) => present.push(row),
            Err(reason) => absent.push(Absent {
                name: name(&row).to_owned(),
                reason: reason.to_string(),
            }),
        }
    }
    Ok((present, absent))
}

/// Returns whether `said` names the tunnel `name`: Seikan may be named by its protocol alone.
fn means(said: &str, name: &str) -> bool {
    said == name || name.strip_prefix("seikan-") == Some(said)
}

/// Measures one tunnel in one round. Only an interruption ends the run.
fn measure(
    tunnel: &Arc<dyn Tunnel>,
    options: &BenchOptions,
    plan: Plan<'_>,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<Round> {
    step(0.0, "starting");
    let mut round = Round::default();
    let link = Link {
        congestion: options.congestion.unwrap_or_default(),
        ..Link::default().offload(options.offload)
    };
    let outcome = tunnel::start(tunnel, link, interrupt).and_then(|running| {
        let Running {
            hosts, mut started, ..
        } = running;
        run_loads(
            &tunnel.ends(&hosts),
            &mut started,
            &mut round,
            plan,
            interrupt,
            step,
        )
    });
    round.error = in_words(outcome)?.err();
    Ok(round)
}

/// The loads to run, and the duration of each.
#[derive(Clone, Copy)]
pub(crate) struct Plan<'a> {
    pub(crate) loads: &'a [Load],
    /// Measured seconds of each.
    pub(crate) seconds: f64,
}

impl Plan<'_> {
    /// Returns the approximate duration of a row, in seconds.
    pub(crate) fn time(&self) -> f64 {
        START_SECONDS + self.loads.len() as f64 * (self.seconds + 1.0)
    }
}

/// Measures latency and then every load, from end to end. Calls `step` before each, with the
/// seconds that have passed.
pub(crate) fn run_loads(
    ends: &Ends<'_>,
    started: &mut Started,
    round: &mut Round,
    plan: Plan<'_>,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(f64, &str),
) -> Result<()> {
    interrupt.sleep(SETTLE)?;
    step(START_SECONDS / 2.0, "ping");
    // A forwarded port carries no echo requests.
    if ends.forward.is_none() {
        round.latency = Some(ping(ends, &LatencyOptions::default(), interrupt)?);
    }
    for (index, &load) in plan.loads.iter().enumerate() {
        step(
            START_SECONDS + index as f64 * (plan.seconds + 1.0),
            load.title(),
        );
        let measured = run_load(ends, load, plan.seconds, interrupt);
        let measured = in_words(measured)?.unwrap_or_else(Measured::Failed);
        round.loads.push(RoundLoad { load, measured });
        round.peak_rss = started.peak_rss();
        started.check_alive()?;
        interrupt.sleep(SETTLE)?;
    }
    Ok(())
}

fn run_load(ends: &Ends<'_>, load: Load, seconds: f64, interrupt: &Interrupt) -> Result<Measured> {
    match load.tcp(seconds) {
        Some(tcp) => Ok(Measured::Tcp(tcp_bulk(ends, &tcp, interrupt)?)),
        None => {
            let udp = UdpOptions {
                direction: match load {
                    Load::UdpRev => Direction::Reverse,
                    _ => Direction::Forward,
                },
                duration: Duration::from_secs_f64(seconds),
                ..UdpOptions::default()
            };
            Ok(Measured::Udp(udp_flood(ends, &udp, interrupt)?))
        }
    }
}

#[cfg(test)]
mod tests;
