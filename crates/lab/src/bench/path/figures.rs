//! Results of a comparison over emulated paths: figures per round, and their summary.

use std::collections::BTreeMap;

use seikan_load::stats::{Spread, ratio};
use serde::{Deserialize, Serialize};

use super::cell::{Cell, PathOptions};
use crate::bench::{Absent, BenchOptions, Load, RAW};
use crate::machine::Machine;
use crate::tunnel::Tunnel;

/// A measured quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// Payload received, in Mbit/s.
    GoodputMbit,
    /// Payload received through the tunnel, in Mbit/s, if the goodput is that of a stream beside
    /// the tunnel.
    InsideMbit,
    /// Median round trip of voice beside the load, in milliseconds.
    RttMs,
    /// 99th percentile of the round trips of voice that were answered, in milliseconds.
    RttP99Ms,
    /// Datagrams of voice without an answer, in percent. Losses of both directions count.
    VoiceLostPercent,
    /// TCP segments sent again, in percent of all with data, warm-up included.
    ResentPercent,
    /// Bytes of Ethernet frames that both hosts sent per byte of payload received.
    WireBytesPerByte,
    /// Processor seconds of the tunnel's programs at both ends per Gbit received.
    CpuSecondsPerGbit,
    /// Median time of a web page, in milliseconds.
    PageMs,
    /// 99th percentile of the time of a web page, in milliseconds.
    PageP99Ms,
    /// Time from the end of an outage until voice has arrived at both ends, in seconds.
    VoiceBackS,
    /// Time from the end of an outage until a TCP stream continues, in seconds.
    TcpBackS,
    /// Frames that found the path's queue full, in percent of those sent.
    QueueDropsPercent,
    /// Frames that the emulator lost on purpose, in percent of those sent.
    PathLossPercent,
    /// Frames that the emulator delivered late because this machine was busy, in percent.
    LatePercent,
    /// Frames that never reached the emulator, because it was too slow.
    Missed,
}

/// Figures of one load in one round.
pub type Figures = BTreeMap<Figure, f64>;

/// A load in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathRoundLoad {
    /// The load.
    pub load: Load,
    /// Figures of the load; empty if it failed or does not apply to the tunnel.
    pub figures: Figures,
    /// Why it failed.
    pub error: Option<String>,
}

/// A tunnel over a path in one round.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PathRound {
    /// Shortest round trip of voice without other load, in milliseconds.
    pub idle_ms: Option<f64>,
    /// Its loads, in order.
    pub loads: Vec<PathRoundLoad>,
    /// Why the tunnel did not start, or failed.
    pub error: Option<String>,
}

/// A load over all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathLoadSummary {
    /// The load.
    pub load: Load,
    /// Spread of each figure over the rounds that have it.
    pub figures: BTreeMap<Figure, Spread>,
    /// Median goodput divided by the raw path's.
    pub ratio_to_raw: Option<f64>,
}

impl PathLoadSummary {
    /// Returns the median of a figure.
    pub fn median(&self, figure: Figure) -> Option<f64> {
        self.figures.get(&figure).map(|spread| spread.median)
    }
}

/// A tunnel over a path, all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathTunnel {
    /// Its name.
    pub name: String,
    /// Whether it is Seikan.
    pub own: bool,
    /// Shortest round trip of voice without other load, in milliseconds.
    pub idle_ms: Option<Spread>,
    /// Summary of each load.
    pub loads: Vec<PathLoadSummary>,
    /// Errors, one line each.
    pub errors: Vec<String>,
    /// Everything measured.
    pub rounds: Vec<PathRound>,
}

impl PathTunnel {
    /// The summary of `load`.
    pub fn load(&self, load: Load) -> Option<&PathLoadSummary> {
        self.loads.iter().find(|l| l.load == load)
    }
}

/// All tunnels over one path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CellReport {
    /// The path.
    pub cell: Cell,
    /// The goodput that RFC 9438 predicts for one flow without a tunnel, in Mbit/s, where it does.
    pub predicted_mbit: Option<f64>,
    /// The tunnels.
    pub tunnels: Vec<PathTunnel>,
}

impl CellReport {
    /// The path without a tunnel, if it was measured.
    pub fn raw(&self) -> Option<&PathTunnel> {
        self.tunnels.iter().find(|t| t.name == RAW)
    }
}

/// The whole comparison.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PathReport {
    /// Time at which the comparison ended, UTC.
    pub date: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// Options of the run.
    pub options: BenchOptions,
    /// Options that describe the paths.
    pub paths: PathOptions,
    /// Every path.
    pub cells: Vec<CellReport>,
    /// Versions of the programs: name and version.
    pub versions: Vec<(String, String)>,
    /// Tunnels that could not run.
    pub absent: Vec<Absent>,
}

impl PathReport {
    /// Whether the raw path or a Seikan tunnel failed. A failure of another tunnel is a finding.
    pub fn failed(&self) -> bool {
        self.cells
            .iter()
            .flat_map(|cell| &cell.tunnels)
            .any(|t| (t.own || t.name == RAW) && !t.errors.is_empty())
    }
}

/// Summarises the rounds of a tunnel over a path.
pub(super) fn summarise(tunnel: &dyn Tunnel, loads: &[Load], rounds: Vec<PathRound>) -> PathTunnel {
    let summary = |load: Load| {
        let mut values: BTreeMap<Figure, Vec<f64>> = BTreeMap::new();
        let measured = rounds.iter().flat_map(|round| &round.loads);
        for (figure, value) in measured.filter(|l| l.load == load).flat_map(|l| &l.figures) {
            values.entry(*figure).or_default().push(*value);
        }
        PathLoadSummary {
            load,
            figures: values
                .into_iter()
                .filter_map(|(figure, values)| Some((figure, Spread::of(&values)?)))
                .collect(),
            ratio_to_raw: None,
        }
    };
    let idle: Vec<f64> = rounds.iter().filter_map(|round| round.idle_ms).collect();
    let mut errors = Vec::new();
    for (number, round) in (1..).zip(&rounds) {
        errors.extend(round.error.iter().map(|e| format!("round {number}: {e}")));
        errors.extend(round.loads.iter().filter_map(|l| {
            let error = l.error.as_ref()?;
            Some(format!("round {number}, {}: {error}", l.load))
        }));
    }
    PathTunnel {
        name: tunnel.name().to_owned(),
        own: tunnel.is_own(),
        idle_ms: Spread::of(&idle),
        loads: loads.iter().map(|load| summary(*load)).collect(),
        errors,
        rounds,
    }
}

/// Fills in the ratios, when the raw path was measured.
pub(super) fn with_ratios(mut cell: CellReport) -> CellReport {
    let raw = cell.raw().map(|raw| raw.loads.clone()).unwrap_or_default();
    for load in cell.tunnels.iter_mut().flat_map(|t| &mut t.loads) {
        let base = raw.iter().find(|r| r.load == load.load);
        let base = base.and_then(|base| base.median(Figure::GoodputMbit));
        let own = load.median(Figure::GoodputMbit);
        load.ratio_to_raw = own.zip(base).and_then(|(own, base)| ratio(own, base));
    }
    cell
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel;

    fn round(goodput: f64) -> PathRound {
        PathRound {
            idle_ms: Some(40.0),
            loads: vec![PathRoundLoad {
                load: Load::Tcp1,
                figures: Figures::from([(Figure::GoodputMbit, goodput)]),
                error: None,
            }],
            error: None,
        }
    }

    #[test]
    fn ratios_are_of_medians_to_the_raw_path() {
        let all = tunnel::all(0, None);
        let [raw, native] = ["raw", "seikan-native"].map(|name| {
            let found = all.iter().find(|tunnel| tunnel.name() == name);
            found.expect("a tunnel").as_ref()
        });
        let cell = with_ratios(CellReport {
            cell: Cell::default(),
            predicted_mbit: None,
            tunnels: vec![
                summarise(
                    raw,
                    &[Load::Tcp1],
                    vec![round(100.0), round(300.0), round(200.0)],
                ),
                summarise(native, &[Load::Tcp1], vec![round(50.0), round(150.0)]),
            ],
        });
        let ratios: Vec<Option<f64>> = cell
            .tunnels
            .iter()
            .map(|t| t.load(Load::Tcp1)?.ratio_to_raw)
            .collect();
        assert_eq!(ratios, [Some(1.0), Some(0.5)]);
    }

    #[test]
    fn figures_are_named_in_json() {
        let text = serde_json::to_string(&round(1.5).loads[0].figures).expect("JSON");
        assert_eq!(text, r#"{"goodput-mbit":1.5}"#);
    }
}
