//! Packets of one flow on several processors arrive out of order, which the source names as the
//! reason why a kernel keeps them on one.
//!
//! The naive encapsulator runs at two hosts, without a gateway. Receive packet steering (RPS)
//! chooses a processor by the addresses and ports of a packet, so the packets of a connection stay
//! on one. Then the encapsulator sends each packet from the next one of many ports: the processor
//! changes from packet to packet, as if each interrupt went to any of them.

use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::counters::segments_out_of_order;
use seikan_load::{LiveOptions, TcpOptions, tcp_bulk};
use seikan_sys::ethtool::Feature;

use super::figures::interleaved;
use super::look::Looker;
use super::{Bench, Figures, Found, Row, plain};
use crate::error::Result;
use crate::host::all_cpus;
use crate::tunnel::middle::{NAIVE_HOSTS, NAIVE_SPREAD};
use crate::tunnel::{self, Running, inner_device};

/// Rows.
const BY_FLOW: &str = "one port: RPS keeps the flow on one processor";
const BY_TURNS: &str = "ports by turns: RPS spreads the flow";

/// How many steps [`reordering`] has for each round, and besides.
pub(super) const STEPS: (usize, usize) = (2, 1);

/// Measures one connection with each way of sending, and has the doctor look at the second.
pub(super) fn reordering(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let measured = interleaved(
        bench,
        &[BY_FLOW, BY_TURNS],
        &mut found.problems,
        &mut |bench, name| {
            let mut running = start(bench, name)?;
            let load = TcpOptions {
                warmup: Duration::ZERO,
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let ends = running.hosts.through_tunnel();
            let before = running.hosts.b.run(segments_out_of_order)?;
            let report = tcp_bulk(&ends, &load, bench.interrupt)?;
            let late = running.hosts.b.run(segments_out_of_order)?;
            running.check_alive()?;
            let gbit = report.gbit_per_second * report.seconds;
            let per_gbit = |count: u64| count as f64 / gbit.max(1e-6);
            Ok([
                report.gbit_per_second * 1e3,
                per_gbit(late.saturating_sub(before)),
                per_gbit(report.retransmitted_segments),
            ])
        },
    )?;
    let quantity = |title: &str, unit: &str, index: usize| Figures {
        title: format!("naive, host to host, 1 connection: {title}"),
        unit: unit.to_owned(),
        base: BY_FLOW.to_owned(),
        rows: [BY_FLOW, BY_TURNS]
            .iter()
            .zip(&measured)
            .map(|(name, rounds)| Row {
                rounds: rounds.iter().map(|v| v.map(|v| v[index])).collect(),
                ..Row::new(*name, None)
            })
            .collect(),
    };
    let rate = quantity("throughput", "Mbit/s", 0);
    let late = quantity("segments that arrive out of order", "per Gbit", 1);
    let again = quantity("segments sent again", "per Gbit", 2);
    found.claims.push(late.claim_of_counts(BY_TURNS, BY_FLOW));
    let expected = rate.row(BY_FLOW).and_then(Row::spread);
    found.figures.extend([rate, late, again]);

    bench.step(format!("the doctor on {BY_TURNS}"))?;
    let running = start(bench, BY_TURNS)?;
    let host = &running.hosts.a;
    let interface = inner_device(NAIVE_SPREAD, host);
    let looker = Looker {
        expected: expected.map_or(1e3, |spread| spread.median),
        right: &[Cause::Reordering],
        ..Looker::new(BY_TURNS, host, &interface)
    };
    let ends = running.hosts.through_tunnel();
    let load = LiveOptions::default();
    let verdict = looker.look_under(&load, &ends, bench.desk(), |_| Vec::new())?;
    found.looks.push(verdict);
    Ok(())
}

/// Starts a row's encapsulator between two hosts; RPS steers the packets that host B receives.
fn start(bench: &Bench<'_>, name: &str) -> Result<Running> {
    let tunnel = plain(if name == BY_TURNS {
        NAIVE_SPREAD
    } else {
        NAIVE_HOSTS
    })?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let host = &running.hosts.b;
    // Packets are steered as they arrive.
    host.set_features(&host.device, &[(Feature::Gro, false)])?;
    host.steer(&host.device, &all_cpus())?;
    Ok(running)
}
