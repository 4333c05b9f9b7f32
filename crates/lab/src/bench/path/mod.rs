//! `seikan lab bench --path`: tunnels side by side over emulated paths.
//!
//! A [`Cell`] is a path: round trip, rate, queue, loss, reordering, and the congestion control of
//! its hosts. Every round measures every tunnel over every path in new hosts, the tunnels of one
//! path one after the other. Beside each load runs voice, 50 small datagrams a second to the server
//! and back, which shows round trip and loss as an application sees them. The emulator counts every
//! frame ([`crate::wire`]).

mod cell;
mod figures;
mod measure;

use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};

use super::{Absent, BenchOptions, Load, START_SECONDS, Tunnels, check_length, choose};
use crate::error::{LabError, Result};
use crate::machine::Machine;
use crate::tunnel;
use crate::wire::Wire;

pub use cell::{Cell, PathOptions, Queue};
pub use figures::{
    CellReport, Figure, Figures, PathLoadSummary, PathReport, PathRound, PathRoundLoad, PathTunnel,
};
use figures::{summarise, with_ratios};
use measure::{Plan, measure};

/// Tunnels that are compared when none is named.
const USUAL: [&str; 5] = ["raw", "native", "unrepaired", "wireguard", "wireguard-go"];
/// Rough time beside each measured load: start, idle voice, warm-up, and rest, for the progress bar
/// only, in seconds.
const OVERHEAD_SECONDS: f64 = 5.0;

/// Compares tunnels over emulated paths; calls `progress` before every step.
///
/// # Errors
/// Options without meaning; [`LabError::Interrupted`]; no emulator. A tunnel's own failure is in
/// the report.
pub fn bench_paths(
    options: &BenchOptions,
    paths: &PathOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathReport> {
    check_length(options.rounds, &options.loads, options.seconds)?;
    let floods = [Load::Udp, Load::UdpRev];
    if let Some(flood) = options.loads.iter().find(|load| floods.contains(load)) {
        return Err(LabError::Usage(format!(
            "the load {flood} only fills a queue: use other loads with --path"
        )));
    }
    let cells = paths.cells(options.congestion)?;
    Wire::availability().map_err(LabError::Setup)?;
    let (present, absent) = tunnels(options)?;
    let per_tunnel =
        START_SECONDS + options.loads.len() as f64 * (options.seconds + OVERHEAD_SECONDS);
    let total = per_tunnel * (present.len() * cells.len()) as f64 * f64::from(options.rounds);
    let mut done = 0.0;
    let mut rounds: Vec<Vec<Vec<PathRound>>> =
        vec![present.iter().map(|_| Vec::new()).collect(); cells.len()];
    for round in 1..=options.rounds {
        for (cell, rounds) in cells.iter().zip(&mut rounds) {
            for (tunnel, rounds) in present.iter().zip(rounds) {
                let mut step = |event: &str| {
                    progress(Progress {
                        fraction: f64::min(done / total, 1.0),
                        step: format!(
                            "round {round}/{}  {cell}  {}  {event}",
                            options.rounds,
                            tunnel.name()
                        ),
                    });
                };
                let plan = Plan {
                    loads: &options.loads,
                    seconds: options.seconds,
                    offload: options.offload,
                    interrupt,
                };
                // The same losses for every tunnel of a round.
                let seed = u64::from(round);
                rounds.push(measure(tunnel, cell, seed, plan, &mut step)?);
                done += per_tunnel;
            }
        }
    }
    let cells = cells.iter().zip(rounds).map(|(cell, rounds)| {
        let all = present.iter().zip(rounds);
        with_ratios(CellReport {
            cell: *cell,
            predicted_mbit: cell.predicted_mbit(),
            tunnels: all
                .map(|(t, rounds)| summarise(t.as_ref(), &options.loads, rounds))
                .collect(),
        })
    });
    let versions = present.iter();
    Ok(PathReport {
        date: utc_now(),
        machine: Machine::this(),
        options: options.clone(),
        paths: paths.clone(),
        cells: cells.collect(),
        versions: versions
            .filter_map(|t| Some((t.name().to_owned(), t.version()?)))
            .collect(),
        absent,
    })
}

fn tunnels(options: &BenchOptions) -> Result<(Tunnels, Vec<Absent>)> {
    let usual = USUAL.map(str::to_owned);
    let only = options.only.as_deref().unwrap_or(&usual);
    choose(tunnel::all(options.idle_peers), Some(only))
}
