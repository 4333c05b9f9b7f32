//! Results of a comparison: figures per round, and their summary over rounds.

use clap::ValueEnum;
use seikan_load::stats::{Spread, ratio};
use seikan_load::{LatencyReport, TcpReport, UdpReport};
use serde::{Deserialize, Serialize};

use crate::bench::{BenchOptions, Load};
use crate::machine::Machine;
use crate::tunnel::Tunnel;

/// Name of the tunnel that ratios refer to.
pub(crate) const YARDSTICK: &str = "raw";

/// One figure of one load.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measured {
    /// A TCP load.
    Tcp(TcpReport),
    /// The UDP flood.
    Udp(UdpReport),
    /// It failed, and why.
    Failed(String),
}

impl Measured {
    /// Received, in Gbit/s.
    pub fn gbit_per_second(&self) -> Option<f64> {
        match self {
            Self::Tcp(r) => Some(r.gbit_per_second),
            Self::Udp(r) => Some(r.gbit_per_second),
            Self::Failed(_) => None,
        }
    }

    /// Busy CPU seconds of the whole machine per Gbit.
    pub fn cpu_seconds_per_gbit(&self) -> Option<f64> {
        match self {
            Self::Tcp(r) => r.cpu_seconds_per_gbit,
            Self::Udp(r) => r.cpu_seconds_per_gbit,
            Self::Failed(_) => None,
        }
    }
}

/// A load's figure in a round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RoundLoad {
    /// Which load.
    pub load: Load,
    /// Result of the measurement.
    pub measured: Measured,
}

/// One tunnel in one round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Round {
    /// Idle round trips.
    pub latency: Option<LatencyReport>,
    /// Its loads, in order.
    pub loads: Vec<RoundLoad>,
    /// Largest resident memory of a process of the tunnel, in bytes.
    pub peak_rss: Option<u64>,
    /// Why the tunnel did not start, or broke.
    pub error: Option<String>,
}

/// A load over all rounds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LoadSummary {
    /// Which load.
    pub load: Load,
    /// Received, in Gbit/s.
    pub gbit_per_second: Spread,
    /// Busy CPU seconds of the whole machine per Gbit.
    pub cpu_seconds_per_gbit: Option<Spread>,
    /// Median throughput divided by the raw link's.
    pub ratio_to_raw: Option<f64>,
}

/// One tunnel over all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TunnelReport {
    /// Its name.
    pub name: String,
    /// Whether it is Seikan.
    pub own: bool,
    /// Version, as the program prints it.
    pub version: Option<String>,
    /// Per load; loads that failed in every round are absent.
    pub loads: Vec<LoadSummary>,
    /// Mean idle round trip, in microseconds.
    pub ping_us: Option<Spread>,
    /// Largest resident memory of a process of the tunnel, in bytes.
    pub peak_rss: Option<u64>,
    /// Errors, one line each.
    pub errors: Vec<String>,
    /// Everything measured.
    pub rounds: Vec<Round>,
}

impl TunnelReport {
    /// The summary of `load`.
    pub fn load(&self, load: Load) -> Option<&LoadSummary> {
        self.loads.iter().find(|l| l.load == load)
    }
}

/// A tunnel that cannot run here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// Its name.
    pub name: String,
    /// The reason.
    pub reason: String,
}

/// The whole comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchReport {
    /// When it ended, UTC.
    pub date: String,
    /// Where it ran.
    pub machine: Machine,
    /// Options of the run.
    pub options: BenchOptions,
    /// The tunnels that ran.
    pub tunnels: Vec<TunnelReport>,
    /// The tunnels that could not.
    pub absent: Vec<Absent>,
}

impl BenchReport {
    /// Whether the raw link or a Seikan tunnel failed. A failure of another tunnel is a finding,
    /// and in the report.
    pub fn failed(&self) -> bool {
        self.tunnels
            .iter()
            .any(|t| (t.own || t.name == YARDSTICK) && !t.errors.is_empty())
    }
}

/// A tunnel's rounds in one report.
pub(super) fn summarise(tunnel: &dyn Tunnel, rounds: Vec<Round>) -> TunnelReport {
    let figures = |load: Load, figure: fn(&Measured) -> Option<f64>| -> Vec<f64> {
        let all = rounds
            .iter()
            .flat_map(|r| &r.loads)
            .filter(|l| l.load == load);
        all.filter_map(|l| figure(&l.measured)).collect()
    };
    let loads = Load::value_variants().iter().filter_map(|&load| {
        Some(LoadSummary {
            load,
            gbit_per_second: Spread::of(&figures(load, Measured::gbit_per_second))?,
            cpu_seconds_per_gbit: Spread::of(&figures(load, Measured::cpu_seconds_per_gbit)),
            ratio_to_raw: None,
        })
    });
    let answered = rounds
        .iter()
        .filter_map(|r| r.latency)
        .filter(|l| l.received > 0);
    let pings: Vec<f64> = answered.map(|l| l.mean_us).collect();
    let mut errors = Vec::new();
    for (number, round) in (1..).zip(&rounds) {
        errors.extend(round.error.iter().map(|e| format!("round {number}: {e}")));
        errors.extend(round.loads.iter().filter_map(|l| match &l.measured {
            Measured::Failed(e) => Some(format!("round {number}, {}: {e}", l.load)),
            _ => None,
        }));
    }
    TunnelReport {
        name: tunnel.name().to_owned(),
        own: tunnel.is_own(),
        version: tunnel.version(),
        loads: loads.collect(),
        ping_us: Spread::of(&pings),
        peak_rss: rounds.iter().filter_map(|r| r.peak_rss).max(),
        errors,
        rounds,
    }
}

/// Fills in the ratios, when the raw link was measured.
pub(super) fn with_ratios(mut tunnels: Vec<TunnelReport>) -> Vec<TunnelReport> {
    let raw: Vec<LoadSummary> = tunnels
        .iter()
        .find(|t| t.name == YARDSTICK)
        .map(|t| t.loads.clone())
        .unwrap_or_default();
    for load in tunnels.iter_mut().flat_map(|t| &mut t.loads) {
        let base = raw.iter().find(|r| r.load == load.load);
        load.ratio_to_raw =
            base.and_then(|b| ratio(load.gbit_per_second.median, b.gbit_per_second.median));
    }
    tunnels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tunnel(name: &str, gbit: &[f64]) -> TunnelReport {
        let gbit_per_second = Spread::of(gbit).expect("values");
        let load = LoadSummary {
            load: Load::Tcp1,
            gbit_per_second,
            cpu_seconds_per_gbit: None,
            ratio_to_raw: None,
        };
        TunnelReport {
            name: name.to_owned(),
            own: false,
            version: None,
            loads: vec![load],
            ping_us: None,
            peak_rss: None,
            errors: Vec::new(),
            rounds: Vec::new(),
        }
    }

    #[test]
    fn ratios_are_of_medians_to_the_raw_link() {
        let tunnels = with_ratios(vec![
            tunnel("raw", &[10.0, 30.0, 20.0]),
            tunnel("slow", &[1.0, 5.0, 9.0]),
        ]);
        let ratios: Vec<Option<f64>> = tunnels.iter().map(|t| t.loads[0].ratio_to_raw).collect();
        assert_eq!(ratios, [Some(1.0), Some(0.25)]);
    }

    #[test]
    fn without_the_raw_link_there_are_no_ratios() {
        let tunnels = with_ratios(vec![tunnel("slow", &[1.0])]);
        assert_eq!(tunnels[0].loads[0].ratio_to_raw, None);
    }
}
