//! The second half of the source of [`offload`](super::offload): with receive offload off there are many packets, and one
//! processor receives them all until they are steered to others (RPS).
//!
//! A veth pair has no interrupts, and to receive a packet costs a processor of today too little to fill it at the rates of the
//! naive gateway. So a firewall makes it dear, as one with many rules does.

use std::time::Duration;

use seikan_diagnose::{Cause, Recording};
use seikan_load::{LiveOptions, TcpOptions, tcp_bulk};
use seikan_observe::metric;
use seikan_sys::ethtool::Feature;
use seikan_sys::softirq::mask;

use super::figures::interleaved;
use super::look::Looker;
use super::offload::{TUNNEL, in_the_middle};
use super::{Bench, Figures, Found, Row, plain};
use crate::error::Result;
use crate::host::Host;
use crate::scenario::long_ruleset;
use crate::tunnel::{self, Running, inner_device};

/// Rows.
const ONE: &str = "received by one processor";
const ALL: &str = "steered to all (RPS)";
/// Rules that no packet matches.
const RULES: u32 = 10_000;
/// Connections: packets of one stay on one processor.
const STREAMS: usize = 16;

/// How many steps [`steering`] has for each round, and besides.
pub(super) const STEPS: (usize, usize) = (2, 1);

pub(super) fn steering(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let measured = interleaved(
        bench,
        &[ONE, ALL],
        &mut found.problems,
        &mut |bench, name| {
            let mut running = start(bench, name == ALL)?;
            let load = TcpOptions {
                streams: STREAMS,
                warmup: Duration::from_secs(1),
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let tunnel = plain(TUNNEL)?;
            let ends = tunnel.ends(&running.hosts);
            let report = tcp_bulk(&ends, &load, bench.interrupt)?;
            running.check_alive()?;
            Ok(report.gbit_per_second * 1e3)
        },
    )?;
    let rows = [ONE, ALL].iter().zip(measured);
    let figures = Figures {
        title: format!("naive, GRO off, behind a firewall of {RULES} rules, {STREAMS} connections"),
        unit: "Mbit/s".to_owned(),
        base: ONE.to_owned(),
        rows: rows
            .map(|(name, rounds)| Row {
                rounds,
                ..Row::new(*name, None)
            })
            .collect(),
    };
    found.claims.push(figures.claim(ALL, ONE));
    let expected = figures.row(ALL).and_then(Row::spread);
    found.figures.push(figures);

    bench.step(format!("the doctor on {ONE}"))?;
    let tunnel = plain(TUNNEL)?;
    let running = start(bench, false)?;
    let (gateway, nic) = gateway(&running)?;
    let looker = Looker {
        expected: expected.map_or(1e3, |spread| spread.median),
        right: &[Cause::SoftirqOneCore],
        ..Looker::new(ONE, gateway, &nic)
    };
    let load = LiveOptions {
        streams: STREAMS,
        ..LiveOptions::default()
    };
    let ends = tunnel.ends(&running.hosts);
    let verdict = looker.look_under(&load, &ends, bench.desk(), processor_time)?;
    found.looks.push(verdict);
    Ok(())
}

/// The source's table of `mpstat`: in which state each processor spends its time.
fn processor_time(recording: &Recording) -> Vec<(String, f64)> {
    let evidence = &recording.evidence;
    let states = [
        ("user mode", metric::USER_NS),
        ("system", metric::SYSTEM_NS),
        ("softirqs", metric::SOFTIRQ_NS),
        ("idle", metric::IDLE_NS),
    ];
    let cpus = evidence.per_cpu(metric::SOFTIRQ_NS).into_iter();
    cpus.flat_map(|(cpu, _)| states.map(|(state, counter)| (cpu, state, counter)))
        .filter_map(|(cpu, state, counter)| {
            let share = evidence.cpu_share(cpu, &[counter])?;
            Some((format!("processor {cpu}, {state}, %"), 100.0 * share))
        })
        .collect()
}

/// Starts the naive gateway without receive offload, behind its firewall; its NIC's packets go to
/// one processor or to all.
fn start(bench: &Bench<'_>, spread: bool) -> Result<Running> {
    let tunnel = plain(TUNNEL)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let (gateway, nic) = gateway(&running)?;
    gateway.set_features(&nic, &[(Feature::Gro, false)])?;
    long_ruleset(gateway, &nic, RULES)?;
    let all = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let cpus: Vec<u32> = (0..if spread { all } else { 1 }).collect();
    gateway.set_attribute(&format!("{nic}/queues/rx-0/rps_cpus"), &mask(&cpus))?;
    Ok(running)
}

/// The host in the middle, and its nic towards the device.
fn gateway(running: &Running) -> Result<(&Host, String)> {
    let gateway = in_the_middle(running)?;
    Ok((gateway, inner_device(TUNNEL, gateway)))
}
