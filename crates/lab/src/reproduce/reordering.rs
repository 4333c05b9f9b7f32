//! Packets of one flow on several processors arrive out of order, which the source names as the
//! reason why a kernel keeps them on one.
//!
//! The naive encapsulator runs at two hosts, without a gateway. Receive packet steering (RPS)
//! chooses a processor by the addresses and ports of a packet, so a flow stays in order. Then the
//! choice changes from one processor to the next thousands of times a second, as if each interrupt
//! went to any of them.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use seikan_diagnose::Cause;
use seikan_load::counters::segments_out_of_order;
use seikan_load::{LiveOptions, Stop, TcpOptions, join, tcp_bulk};
use seikan_sys::ethtool::Feature;
use seikan_sys::softirq::mask;

use super::figures::interleaved;
use super::look::Looker;
use super::{Bench, Figures, Found, Row, plain};
use crate::error::{LabError, Result};
use crate::host::{Host, all_cpus, steering_file};
use crate::tunnel::middle::NAIVE_HOSTS;
use crate::tunnel::{self, Running, inner_device};

/// Rows.
const BY_FLOW: &str = "steered by flow (RPS)";
const BY_TURNS: &str = "steered to each processor by turns";
/// How long a processor is chosen.
const TURN: Duration = Duration::from_micros(100);

/// How many steps [`reordering`] has for each round, and besides.
pub(super) const STEPS: (usize, usize) = (2, 1);

/// Measures one connection with each steering, and has the doctor look at the second.
pub(super) fn reordering(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let measured = interleaved(
        bench,
        &[BY_FLOW, BY_TURNS],
        &mut found.problems,
        &mut |bench, name| {
            let mut running = start(bench)?;
            let load = TcpOptions {
                warmup: Duration::ZERO,
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let ends = running.hosts.through_tunnel();
            let before = running.hosts.b.run(segments_out_of_order)?;
            let bulk = || Ok(tcp_bulk(&ends, &load, bench.interrupt)?);
            let report = if name == BY_TURNS {
                by_turns(&running.hosts.b, bulk)?
            } else {
                bulk()?
            };
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
    let running = start(bench)?;
    let host = &running.hosts.a;
    let interface = inner_device(NAIVE_HOSTS, host);
    let looker = Looker {
        expected: expected.map_or(1e3, |spread| spread.median),
        right: &[Cause::Reordering],
        ..Looker::new(BY_TURNS, host, &interface)
    };
    let ends = running.hosts.through_tunnel();
    let verdict = by_turns(&running.hosts.b, || {
        looker.look_under(&LiveOptions::default(), &ends, bench.desk(), |_| Vec::new())
    })?;
    found.looks.push(verdict);
    Ok(())
}

/// Starts the encapsulator between two hosts; the packets that host B receives are steered by flow.
fn start(bench: &Bench<'_>) -> Result<Running> {
    let tunnel = plain(NAIVE_HOSTS)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let host = &running.hosts.b;
    // Received packets are steered where they are not merged.
    host.set_features(&host.device, &[(Feature::Gro, false)])?;
    host.steer(&host.device, &all_cpus())?;
    Ok(running)
}

/// Runs `work` while the packets that `host` receives go to one processor after the other.
fn by_turns<T>(host: &Host, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let file = host.open_attribute(&steering_file(&host.device))?;
    let masks: Vec<String> = all_cpus().iter().map(|cpu| mask(&[*cpu])).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let turns = scope.spawn(move || {
            for mask in masks.iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(mask.as_bytes(), 0)?;
                std::thread::sleep(TURN);
            }
            Ok(())
        });
        let outcome = {
            let _stop = Stop(stop);
            work()
        };
        join(turns)?.map_err(LabError::io("steer received packets"))?;
        outcome
    })
}
