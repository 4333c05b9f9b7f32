//! Results of a comparison: figures per round, and their summary over rounds.

use clap::ValueEnum;
use seikan_load::stats::{Spread, ratio};
use seikan_load::{LatencyReport, TcpReport, UdpReport};
use seikan_ui::time::utc_now;
use serde::{Deserialize, Serialize};

use crate::bench::Load;
use crate::machine::Machine;
use crate::tunnel::Tunnel;

/// Name of the tunnel that ratios refer to.
pub(crate) const RAW: &str = "raw";
/// Name of the row without a tunnel through a gateway, that added latency refers to.
pub const FORWARDING: &str = "forwarding";

/// Result of one load.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measured {
    /// A TCP load.
    Tcp(TcpReport),
    /// The UDP flood.
    Udp(UdpReport),
    /// The reason why the load failed.
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

    /// TCP segments sent again, warm-up included.
    pub fn retransmitted(&self) -> Option<f64> {
        match self {
            Self::Tcp(r) => Some(r.retransmitted_segments as f64),
            _ => None,
        }
    }

    /// The first TCP stream's congestion window at the end, in bytes.
    pub fn congestion_window(&self) -> Option<f64> {
        match self {
            Self::Tcp(r) => r.congestion_window.map(|bytes| bytes as f64),
            _ => None,
        }
    }
}

/// A load's figure in a round.
#[derive(Clone, Debug, Serialize)]
pub struct RoundLoad {
    /// The load.
    pub load: Load,
    /// Result of the measurement.
    pub measured: Measured,
}

/// Results of one row in one round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Round {
    /// Idle round trips.
    pub latency: Option<LatencyReport>,
    /// Its loads, in order.
    pub loads: Vec<RoundLoad>,
    /// Largest resident memory of a process of the tunnel, in bytes.
    pub peak_rss: Option<u64>,
    /// Why the tunnel did not start, or broke.
    pub error: Option<String>,
    /// Status of both ends of a gateway's tunnel after the measurement, the gateway first.
    pub said: Vec<serde_json::Value>,
}

/// A load over all rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LoadSummary {
    /// The load.
    pub load: Load,
    /// Received, in Gbit/s.
    pub gbit_per_second: Spread,
    /// Busy CPU seconds of the whole machine per Gbit.
    pub cpu_seconds_per_gbit: Option<Spread>,
    /// TCP segments sent again, warm-up included.
    pub retransmitted: Option<Spread>,
    /// The first TCP stream's congestion window at the end, in bytes.
    pub congestion_window: Option<Spread>,
    /// Median throughput divided by that of the reference row.
    pub ratio: Option<f64>,
}

/// A tunnel, or a way through a gateway, over all rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Whether it is Seikan.
    pub own: bool,
    /// Version, as the program prints it.
    pub version: Option<String>,
    /// Per load; loads that failed in every round are absent.
    pub loads: Vec<LoadSummary>,
    /// Idle round trip, in microseconds: the mean, of gateways the median.
    pub ping_us: Option<Spread>,
    /// Latency that a gateway adds to the kernel's forwarding in each direction, in microseconds: half
    /// the difference of the round trips.
    pub added_us: Option<f64>,
    /// Largest resident memory of a process of the tunnel, in bytes.
    pub peak_rss: Option<u64>,
    /// Errors, one line each.
    pub errors: Vec<String>,
    /// Everything measured.
    pub rounds: Vec<Round>,
}

impl Row {
    /// The summary of `load`.
    pub fn load(&self, load: Load) -> Option<&LoadSummary> {
        self.loads.iter().find(|l| l.load == load)
    }
}

/// A row that cannot be measured here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absent {
    /// Its name.
    pub name: String,
    /// The reason.
    pub reason: String,
}

/// The whole comparison, with its options.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison<O> {
    /// Time at which the comparison ended, UTC.
    pub date: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// Options of the run.
    pub options: O,
    /// The rows that ran.
    pub rows: Vec<Row>,
    /// The rows that could not run.
    pub absent: Vec<Absent>,
}

impl<O> Comparison<O> {
    /// Creates the report of a run that ends now.
    pub(crate) fn of(options: O, rows: Vec<Row>, absent: Vec<Absent>) -> Self {
        Self {
            date: utc_now(),
            machine: Machine::this(),
            options,
            rows,
            absent,
        }
    }

    /// Returns the row with this name.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Returns whether a Seikan row, the raw link or plain forwarding failed. A failure of another
    /// tunnel is a finding, which the report contains.
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|row| {
            (row.own || [RAW, FORWARDING].contains(&&*row.name)) && !row.errors.is_empty()
        })
    }
}

/// Rounds of a row in one summary, with a figure of its round trips.
pub(crate) fn summarise(
    name: &str,
    tunnel: &dyn Tunnel,
    rounds: Vec<Round>,
    ping: fn(&LatencyReport) -> f64,
) -> Row {
    let loads = Load::value_variants().iter().filter_map(|&load| {
        let figures = |figure: fn(&Measured) -> Option<f64>| {
            let all = rounds.iter().flat_map(|round| &round.loads);
            let of_load = all.filter(|l| l.load == load);
            let values: Vec<f64> = of_load.filter_map(|l| figure(&l.measured)).collect();
            Spread::of(&values)
        };
        Some(LoadSummary {
            load,
            gbit_per_second: figures(Measured::gbit_per_second)?,
            cpu_seconds_per_gbit: figures(Measured::cpu_seconds_per_gbit),
            retransmitted: figures(Measured::retransmitted),
            congestion_window: figures(Measured::congestion_window),
            ratio: None,
        })
    });
    let latencies = rounds.iter().filter_map(|round| round.latency.as_ref());
    let answered = latencies.filter(|latency| latency.received > 0);
    let mut errors = Vec::new();
    for (number, round) in (1..).zip(&rounds) {
        errors.extend(round.error.iter().map(|e| format!("round {number}: {e}")));
        errors.extend(round.loads.iter().filter_map(|l| match &l.measured {
            Measured::Failed(e) => Some(format!("round {number}, {}: {e}", l.load)),
            _ => None,
        }));
    }
    Row {
        name: name.to_owned(),
        own: tunnel.is_own(),
        version: tunnel.version(),
        loads: loads.collect(),
        ping_us: Spread::of(&answered.map(ping).collect::<Vec<_>>()),
        added_us: None,
        peak_rss: rounds.iter().filter_map(|round| round.peak_rss).max(),
        errors,
        rounds,
    }
}

/// Fills in the ratios to the row `yardstick`, if it was measured.
pub(crate) fn with_ratios(mut rows: Vec<Row>, yardstick: &str) -> Vec<Row> {
    let base = rows.iter().find(|row| row.name == yardstick);
    let base: Vec<LoadSummary> = base.map_or_else(Vec::new, |row| row.loads.clone());
    for load in rows.iter_mut().flat_map(|row| &mut row.loads) {
        let base = base.iter().find(|base| base.load == load.load);
        load.ratio =
            base.and_then(|b| ratio(load.gbit_per_second.median, b.gbit_per_second.median));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel::raw::RAW_LINK;

    fn row(name: &str, gbit: &[f64]) -> Row {
        let gbit_per_second = Spread::of(gbit).expect("values");
        let load = LoadSummary {
            load: Load::Tcp1,
            gbit_per_second,
            cpu_seconds_per_gbit: None,
            retransmitted: None,
            congestion_window: None,
            ratio: None,
        };
        Row {
            loads: vec![load],
            ..summarise(name, &RAW_LINK, Vec::new(), |latency| latency.mean_us)
        }
    }

    #[test]
    fn ratios_are_of_medians_to_the_raw_link() {
        let rows = [
            row("raw", &[10.0, 30.0, 20.0]),
            row("slow", &[1.0, 5.0, 9.0]),
        ];
        let rows = with_ratios(rows.into(), RAW);
        let ratios: Vec<Option<f64>> = rows.iter().map(|row| row.loads[0].ratio).collect();
        assert_eq!(ratios, [Some(1.0), Some(0.25)]);
    }

    #[test]
    fn without_the_raw_link_there_are_no_ratios() {
        let rows = with_ratios(vec![row("slow", &[1.0])], RAW);
        assert_eq!(rows[0].loads[0].ratio, None);
    }
}
