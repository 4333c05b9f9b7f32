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

use std::sync::Arc;

use seikan_ui::time::utc_now;
use seikan_ui::{Interrupt, Progress};

use super::{BenchOptions, Load, Rounds, START_SECONDS, check_length, tunnels};
use crate::error::{Result, usage};
use crate::machine::Machine;
use crate::tunnel::Tunnel;
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

/// Compares tunnels over emulated paths, and calls `progress` before every step.
///
/// # Errors
/// Invalid options; [`Interrupted`](crate::error::LabError::Interrupted); no emulator. Failures of a tunnel are in the report.
pub fn bench_paths(
    options: &BenchOptions,
    paths: &PathOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathReport> {
    check_length(options.rounds, &options.loads, options.seconds)?;
    let floods = [Load::Udp, Load::UdpRev];
    if let Some(flood) = options.loads.iter().find(|load| floods.contains(load)) {
        return Err(usage(format!(
            "the load {flood} only fills a queue: use other loads with --path"
        )));
    }
    let cells = paths.cells(options.congestion)?;
    Wire::availability()?;
    let usual = USUAL.map(str::to_owned);
    let only = options.only.as_deref().unwrap_or(&usual);
    let (present, absent) = tunnels(options, Some(only))?;
    let plan = Plan {
        loads: &options.loads,
        seconds: options.seconds,
        offload: options.offload,
        interrupt,
    };
    let rounds = Rounds {
        count: options.rounds,
        each: START_SECONDS + options.loads.len() as f64 * (options.seconds + OVERHEAD_SECONDS),
    };
    let rows = cells
        .iter()
        .flat_map(|cell| present.iter().map(move |tunnel| (cell, tunnel)));
    let rows: Vec<(&Cell, &Arc<dyn Tunnel>)> = rows.collect();
    let name = |(cell, tunnel): &(&Cell, &Arc<dyn Tunnel>)| format!("{cell}  {}", tunnel.name());
    let measured = rounds.interleave(&rows, name, progress, |(cell, tunnel), round, step| {
        // The seed is the number of the round, so that all tunnels of a round have the same losses.
        measure(tunnel, cell, round.into(), plan, &mut |event| {
            step(0.0, event)
        })
    })?;
    let mut measured = rows.iter().zip(measured);
    let cells = cells.iter().map(|cell| {
        let all = measured.by_ref().take(present.len());
        with_ratios(CellReport {
            cell: *cell,
            predicted_mbit: cell.predicted_mbit(),
            tunnels: all
                .map(|((_, tunnel), rounds)| summarise(tunnel.as_ref(), &options.loads, rounds))
                .collect(),
        })
    });
    let cells = cells.collect();
    let versions = present.iter();
    Ok(PathReport {
        date: utc_now(),
        machine: Machine::this(),
        options: options.clone(),
        paths: paths.clone(),
        cells,
        versions: versions
            .filter_map(|t| Some((t.name().to_owned(), t.version()?)))
            .collect(),
        absent,
    })
}
