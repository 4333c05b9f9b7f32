//! Cost of a measurement: a tunnel's throughput with and without the doctor, alternating.
//!
//! Each round gives each level of the doctor one pair of neighbouring blocks, without and with it.
//! The order alternates from round to round, so that a drift affects both alike. The doctor is
//! started before a block and ended after it.

use std::process::Command;
use std::time::Duration;

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seikan_diagnose::stats::{Interval, paired_gain};
use seikan_load::{LiveOptions, Meter};
use seikan_ui::{Interrupt, Progress};
use serde::Serialize;

use super::{doctor, lookup};
use crate::arguments::{seconds, whole};
use crate::error::{Doing, Result, setup};
use crate::load::live;
use crate::process::{Killed, silent};
use crate::site::{Host, Link};
use crate::tunnel::{self, Changes};

/// Levels that are compared with no doctor at all, each with its maximum acceptable cost, as a
/// share.
const LEVELS: [(u32, f64); 2] = [(1, 0.01), (2, 0.03)];
/// Tunnels that are measured if none is named.
pub const COST_TUNNELS: [&str; 3] = ["seikan-native", "seikan-wireguard", "openvpn"];
/// Time after each switch that is not measured: the doctor finds the path, streams their rate.
const SETTLE: Duration = Duration::from_millis(800);
/// Maximum duration of the doctor's measurement in seconds; it is interrupted earlier.
const LONG: &str = "3600";
/// Maximum time until the doctor ends.
const PATIENCE: Duration = Duration::from_secs(15);

/// Options of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Args)]
pub struct CostOptions {
    /// Tunnel to measure (repeatable)
    #[arg(long = "tunnel", value_name = "NAME", default_values_t = COST_TUNNELS.map(str::to_owned))]
    pub tunnels: Vec<String>,
    /// Pairs of blocks for each level
    #[arg(long, value_name = "ROUNDS", default_value_t = 10, value_parser = whole(4..=1000))]
    pub rounds: u32,
    /// Length of a block
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
}

/// Cost of one level in one tunnel.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostRow {
    /// The tunnel.
    pub tunnel: String,
    /// The level.
    pub level: u32,
    /// Throughput without and with the doctor in Mbit/s, in pairs of consecutive measurements.
    pub pairs: Vec<(f64, f64)>,
    /// Share of the throughput that the doctor costs, with its interval; negative if the throughput
    /// rose. `None` if nothing was received.
    pub cost: Option<Interval>,
    /// Maximum acceptable share.
    pub bar: f64,
}

/// Runs the measurements.
///
/// # Errors
/// A tunnel does not exist or does not start, or there is no doctor; [`Interrupted`](crate::error::LabError::Interrupted).
pub fn cost(
    options: &CostOptions,
    interrupt: &Interrupt,
    step: &mut dyn FnMut(Progress),
) -> Result<Vec<CostRow>> {
    let mut rows = Vec::new();
    let count = options.tunnels.len() as f64;
    for (number, name) in options.tunnels.iter().enumerate() {
        let tunnel = lookup(name, &Changes::default())?;
        let mut running = tunnel::start(&tunnel, Link::default(), interrupt)?;
        let load = LiveOptions {
            streams: 2,
            ..LiveOptions::default()
        };
        let pairs = live(&running.ends(), &load, interrupt, |meter| {
            let host = &running.hosts.a;
            let turns = Turns {
                host,
                interface: running.device(host),
                meter,
                seconds: options.seconds,
                interrupt,
            };
            turns.take(options.rounds, &mut |share, what| {
                step(Progress {
                    fraction: (number as f64 + share) / count,
                    step: format!("{name}: {what}"),
                });
            })
        })?;
        running.check_alive()?;
        let levels = LEVELS.into_iter().zip(pairs);
        rows.extend(levels.map(|((level, bar), pairs)| CostRow {
            tunnel: name.clone(),
            level,
            cost: paired_gain(&pairs).map(lost),
            pairs,
            bar,
        }));
    }
    Ok(rows)
}

/// Converts a gain into a loss.
fn lost(gain: Interval) -> Interval {
    Interval {
        value: -gain.value,
        low: -gain.high,
        high: -gain.low,
    }
}

/// Blocks in one tunnel.
struct Turns<'a> {
    host: &'a Host,
    interface: String,
    meter: &'a Meter,
    seconds: f64,
    interrupt: &'a Interrupt,
}

impl Turns<'_> {
    /// Pairs of rates without and with each level.
    fn take(
        &self,
        rounds: u32,
        step: &mut dyn FnMut(f64, &str),
    ) -> Result<[Vec<(f64, f64)>; LEVELS.len()]> {
        let mut pairs: [Vec<(f64, f64)>; LEVELS.len()] = Default::default();
        for round in 0..rounds {
            let share = f64::from(round) / f64::from(rounds);
            // Levels take turns as well: 1, 2, then 2, 1.
            let mut order: Vec<usize> = (0..LEVELS.len()).collect();
            order.rotate_left(round as usize % LEVELS.len());
            for (place, index) in order.into_iter().enumerate() {
                let level = LEVELS[index].0;
                step(
                    share,
                    &format!("with and without level {level}, round {}", round + 1),
                );
                let without_first = (round as usize + place).is_multiple_of(2);
                let pair = if without_first {
                    let without = self.block(None)?;
                    (without, self.block(Some(level))?)
                } else {
                    let with = self.block(Some(level))?;
                    (self.block(None)?, with)
                };
                pairs[index].push(pair);
            }
        }
        Ok(pairs)
    }

    /// Measures the rate in a block, with a running doctor or without.
    fn block(&self, level: Option<u32>) -> Result<f64> {
        let mut looking = level
            .map(|level| Looking::start(self.host, &self.interface, level))
            .transpose()?;
        self.interrupt.sleep(SETTLE)?;
        let time = Duration::from_secs_f64(self.seconds);
        let rate = self.meter.rate_over(time, self.interrupt)?;
        if let Some(looking) = &mut looking {
            looking.end(self.interrupt)?;
        }
        Ok(rate)
    }
}

/// A running doctor.
struct Looking(Killed);

impl Looking {
    fn start(host: &Host, interface: &str, level: u32) -> Result<Self> {
        let mut command: Command = doctor::command()?;
        command
            .args(["--iface", interface, "--seconds", LONG, "--json"])
            .args(["--level", &level.to_string()]);
        Killed::start(host, silent(&mut command)).map(Self)
    }

    /// Ends the doctor as Ctrl-C does, and waits.
    fn end(&mut self, interrupt: &Interrupt) -> Result<()> {
        const NAME: &str = "`seikan doctor`";
        let child = &mut self.0.0;
        let early = child.try_wait();
        if let Some(status) = early.doing(format!("wait for {NAME}"))? {
            return Err(setup(format!("{NAME} ended by itself, with {status}")));
        }
        // Fails only if it has ended already, which is reported below.
        let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGINT);
        match self.0.wait(NAME, PATIENCE, interrupt)? {
            status if status.success() => Ok(()),
            status => Err(setup(format!("{NAME} failed, with {status}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_loss_has_its_ends_in_order() {
        // 100 without, 97 and 99 with.
        let cost = paired_gain(&[(100.0, 97.0), (100.0, 99.0)]).map(lost);
        let cost = cost.expect("an interval");
        assert!((cost.value - 0.02).abs() < 1e-9, "{cost:?}");
        assert!(
            cost.low <= cost.value && cost.value <= cost.high,
            "{cost:?}"
        );
        assert!(cost.low > 0.0);
    }
}
