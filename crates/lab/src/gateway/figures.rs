//! Results of a comparison of gateways: figures per round, and their summary over rounds.

use clap::ValueEnum;
use seikan_load::stats::{Spread, ratio};
use serde::{Deserialize, Serialize};

use crate::bench::{Absent, Load, Measured, Round};
use crate::gateway::{FORWARDING, GatewayOptions, YARDSTICK};
use crate::machine::Machine;

/// One row in one round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct GatewayRound {
    /// Result of the measurement.
    #[serde(flatten)]
    pub figures: Round,
    /// Status of both ends after the measurement, the gateway first.
    pub said: Vec<serde_json::Value>,
}

/// A load over all rounds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RowLoad {
    /// Which load.
    pub load: Load,
    /// Received, in Gbit/s.
    pub gbit_per_second: Spread,
    /// Busy CPU seconds of the whole machine per Gbit.
    pub cpu_seconds_per_gbit: Option<Spread>,
    /// TCP segments sent again, warm-up included.
    pub retransmitted: Option<Spread>,
    /// The first TCP stream's congestion window at the end, in bytes.
    pub congestion_window: Option<Spread>,
    /// Median throughput divided by that of the yardstick.
    pub ratio: Option<f64>,
}

/// One row over all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GatewayRow {
    /// Its name.
    pub name: String,
    /// Whether it is Seikan.
    pub own: bool,
    /// Version, as the program prints it.
    pub version: Option<String>,
    /// Per load; loads that failed in every round are absent.
    pub loads: Vec<RowLoad>,
    /// Median idle round trip, in microseconds.
    pub ping_us: Option<Spread>,
    /// Latency added to the kernel's forwarding in each direction, in microseconds: half the
    /// difference of the round trips.
    pub added_us: Option<f64>,
    /// Errors, one line each.
    pub errors: Vec<String>,
    /// Everything measured.
    pub rounds: Vec<GatewayRound>,
}

impl GatewayRow {
    /// The summary of `load`.
    pub fn load(&self, load: Load) -> Option<&RowLoad> {
        self.loads.iter().find(|l| l.load == load)
    }
}

/// The whole comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GatewayReport {
    /// When it ended, UTC.
    pub date: String,
    /// Where it ran.
    pub machine: Machine,
    /// Options of the run.
    pub options: GatewayOptions,
    /// The rows that ran.
    pub rows: Vec<GatewayRow>,
    /// The rows that could not.
    pub absent: Vec<Absent>,
}

impl GatewayReport {
    /// The row of that name.
    pub fn row(&self, name: &str) -> Option<&GatewayRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Whether a Seikan row or plain forwarding failed. A failure of another tunnel is a finding,
    /// and in the report.
    pub fn failed(&self) -> bool {
        self.rows
            .iter()
            .any(|row| (row.own || row.name == FORWARDING) && !row.errors.is_empty())
    }
}

/// A row's rounds in one summary.
pub(super) fn summarise(
    name: &str,
    own: bool,
    version: Option<String>,
    rounds: Vec<GatewayRound>,
) -> GatewayRow {
    let loads = Load::value_variants()
        .iter()
        .filter_map(|load| summarise_load(*load, &rounds));
    let answered = rounds
        .iter()
        .filter_map(|round| round.figures.latency)
        .filter(|latency| latency.received > 0);
    let pings: Vec<f64> = answered.map(|latency| latency.p50_us).collect();
    let mut errors = Vec::new();
    for (number, GatewayRound { figures, .. }) in (1..).zip(&rounds) {
        errors.extend(figures.error.iter().map(|e| format!("round {number}: {e}")));
        errors.extend(figures.loads.iter().filter_map(|l| match &l.measured {
            Measured::Failed(e) => Some(format!("round {number}, {}: {e}", l.load)),
            _ => None,
        }));
    }
    GatewayRow {
        name: name.to_owned(),
        own,
        version,
        loads: loads.collect(),
        ping_us: Spread::of(&pings),
        added_us: None,
        errors,
        rounds,
    }
}

fn summarise_load(load: Load, rounds: &[GatewayRound]) -> Option<RowLoad> {
    let figures = |figure: fn(&Measured) -> Option<f64>| {
        let all = rounds.iter().flat_map(|round| &round.figures.loads);
        let values: Vec<f64> = all
            .filter(|l| l.load == load)
            .filter_map(|l| figure(&l.measured))
            .collect();
        Spread::of(&values)
    };
    Some(RowLoad {
        load,
        gbit_per_second: figures(Measured::gbit_per_second)?,
        cpu_seconds_per_gbit: figures(Measured::cpu_seconds_per_gbit),
        retransmitted: figures(|measured| match measured {
            Measured::Tcp(report) => Some(report.retransmitted_segments as f64),
            _ => None,
        }),
        congestion_window: figures(|measured| match measured {
            Measured::Tcp(report) => report.congestion_window.map(|bytes| bytes as f64),
            _ => None,
        }),
        ratio: None,
    })
}

/// Fills in what refers to another row, where that was measured.
pub(super) fn with_ratios(mut rows: Vec<GatewayRow>) -> Vec<GatewayRow> {
    let find = |name: &str| rows.iter().find(|row| row.name == name);
    let yardstick: Vec<RowLoad> = find(YARDSTICK).map_or_else(Vec::new, |row| row.loads.clone());
    let forwarding = find(FORWARDING).and_then(|row| row.ping_us);
    for row in &mut rows {
        for load in &mut row.loads {
            let base = yardstick.iter().find(|base| base.load == load.load);
            load.ratio =
                base.and_then(|b| ratio(load.gbit_per_second.median, b.gbit_per_second.median));
        }
        // The yardstick has one hop less: nothing to compare with.
        if row.name != YARDSTICK {
            let both = row.ping_us.zip(forwarding);
            row.added_us = both.map(|(ping, base)| (ping.median - base.median) / 2.0);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, gbit: f64, ping: f64) -> GatewayRow {
        GatewayRow {
            name: name.to_owned(),
            own: false,
            version: None,
            loads: vec![RowLoad {
                load: Load::Tcp1,
                gbit_per_second: Spread::of(&[gbit]).expect("a value"),
                cpu_seconds_per_gbit: None,
                retransmitted: None,
                congestion_window: None,
                ratio: None,
            }],
            ping_us: Spread::of(&[ping]),
            added_us: None,
            errors: Vec::new(),
            rounds: Vec::new(),
        }
    }

    #[test]
    fn ratios_are_to_host_to_host_and_latency_is_beyond_forwarding() {
        let rows = with_ratios(vec![
            row(YARDSTICK, 4.0, 70.0),
            row(FORWARDING, 10.0, 40.0),
            row("ours", 3.0, 100.0),
        ]);
        let ratios: Vec<_> = rows.iter().map(|row| row.loads[0].ratio).collect();
        assert_eq!(ratios, [Some(1.0), Some(2.5), Some(0.75)]);
        let added: Vec<_> = rows.iter().map(|row| row.added_us).collect();
        assert_eq!(added, [None, Some(0.0), Some(30.0)]);
    }
}
