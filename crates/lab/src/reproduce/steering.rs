//! The second half of the source of [`offload`](super::offload): with receive offload off there are
//! many packets, and one processor receives them all until they are steered to others (RPS).
//!
//! A veth pair has no interrupts, and to receive a packet costs a processor of today too little to
//! fill it at the rates of the naive gateway. So a firewall with many rules makes each packet
//! expensive.

use std::time::{Duration, Instant};

use seikan_diagnose::{Cause, Recording};
use seikan_load::{LiveOptions, TcpOptions, UdpOptions, join, tcp_bulk, udp_flood};
use seikan_observe::metric;
use seikan_sys::ethtool::Feature;

use super::figures::named;
use super::look::Looker;
use super::{Bench, Experiment, Figures, List, Row};
use crate::error::{Doing, Result};
use crate::scenario::long_ruleset;
use crate::site::{Host, all_cpus};
use crate::tunnel::Running;

/// Rows.
const ONE: &str = "received by one processor";
const ALL: &str = "steered to all (RPS)";
/// Rules that no packet matches.
const RULES: u32 = 10_000;
/// Connections: packets of one stay on one processor.
const STREAMS: usize = 16;

/// Payload of a datagram in the smallest frame of Ethernet: 64 bytes with its headers and checksum
/// (18 and 28 bytes).
const SMALLEST: usize = 18;
/// Flows of small datagrams: packets of one stay on one processor.
const FLOWS: usize = 4;
/// Columns of mpstat(1), and of `/proc/stat` (proc_stat(5)) in the same order.
const STATES: [(&str, usize); 9] = [
    ("%usr", 0),
    ("%nice", 1),
    ("%sys", 2),
    ("%iowait", 4),
    ("%irq", 5),
    ("%soft", 6),
    ("%steal", 7),
    ("%guest", 8),
    ("%idle", 3),
];

pub(super) fn steering(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let measured = bench.rounds(
        &[ONE, ALL],
        |name| *name,
        found,
        |bench, name| {
            let mut running = start(bench, *name == ALL, true)?;
            let load = TcpOptions {
                streams: STREAMS,
                warmup: Duration::from_secs(1),
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let report = tcp_bulk(&running.ends(), &load, bench.interrupt)?;
            running.check_alive()?;
            Ok(report.gbit_per_second * 1e3)
        },
    )?;
    let title =
        format!("naive, GRO off, behind a firewall of {RULES} rules, {STREAMS} connections");
    let rows = measured.rows(|name| Row::new(*name, None), |rate| Some(*rate));
    let figures = Figures::new(title, "Mbit/s", rows);
    found.claims.push(figures.claim(ALL, ONE));
    let expected = figures.median(ALL);
    found.figures.push(figures);

    bench.step(format!("the doctor on {ONE}"))?;
    let running = start(bench, false, true)?;
    let (gateway, _) = gateway(&running)?;
    let looker = Looker {
        expected,
        facts: processor_time,
        ..Looker::at(ONE, &running, gateway, Cause::SoftirqOneCore)
    };
    let load = LiveOptions {
        streams: STREAMS,
        ..LiveOptions::default()
    };
    looker.note(&load, &running, bench.desk, found)
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

/// The source's table of `mpstat` without a firewall: small datagrams, as fast as the device sends
/// them, received by one processor and by all.
pub(super) fn small_packets(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let mut rows = Vec::new();
    for (name, spread) in [(ONE, false), (ALL, true)] {
        bench.step(format!("small datagrams, {name}"))?;
        let mut running = start(bench, spread, false)?;
        let options = UdpOptions {
            datagram: SMALLEST,
            duration: bench.time(),
            ..UdpOptions::default()
        };
        let (ends, interrupt) = (running.ends(), bench.interrupt);
        let before = (processors()?, received()?);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let flows: Vec<_> = (0..FLOWS)
                .map(|_| scope.spawn(|| udp_flood(&ends, &options, interrupt)))
                .collect();
            flows.into_iter().try_for_each(|flow| join(flow)?.map(drop))
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        let after = (processors()?, received()?);
        running.check_alive()?;
        let shares = shares(&before.0, &after.0);
        for ((cpu, shares), packets) in shares.into_iter().zip(differences(&before.1, &after.1)) {
            let shares = shares.iter().map(|share| format!("{share:.2}"));
            let rate = format!("{:.0}", packets as f64 / seconds);
            rows.push(named(
                format!("{name}: processor {cpu}"),
                shares.chain([rate]),
            ));
        }
    }
    let mut columns = vec![""];
    columns.extend(STATES.map(|(name, _)| name));
    columns.push("received packets per second");
    let title = format!(
        "processors while a device floods the naive gateway (GRO off, no firewall) with {FLOWS} flows of frames of 64 bytes"
    );
    found.lists.push(List::new(title, &columns, rows));
    Ok(())
}

/// Ticks of a processor in each state, as `/proc/stat` lists them.
type Ticks = (u32, Vec<u64>);

fn processors() -> Result<Vec<Ticks>> {
    Ok(ticks(&read("/proc/stat")?))
}

pub(super) fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(file).doing(format!("read {file}"))
}

/// The processors of `/proc/stat`: `cpu0 1393280 32966 572056 13343292 6130 0 17875 0 23933 0`.
fn ticks(text: &str) -> Vec<Ticks> {
    let lines = text.lines().filter_map(|line| {
        let (cpu, ticks) = line.strip_prefix("cpu")?.split_once(' ')?;
        let ticks = ticks
            .split_whitespace()
            .filter_map(|word| word.parse().ok());
        Some((cpu.parse().ok()?, ticks.collect()))
    });
    lines.collect()
}

/// The share of each state in a processor's time, in percent, in the order of [`STATES`].
fn shares(before: &[Ticks], after: &[Ticks]) -> Vec<(u32, Vec<f64>)> {
    let of = |(before, after): (&Ticks, &Ticks)| {
        // Time of guests counts as user time as well.
        let states = after.1.iter().zip(&before.1);
        let mut grown: Vec<f64> = states.map(|(a, b)| a.saturating_sub(*b) as f64).collect();
        grown.resize(10, 0.0);
        grown[0] -= grown[8];
        grown[1] -= grown[9];
        let all: f64 = grown.iter().take(9).sum();
        let share = |(_, column): &(&str, usize)| 100.0 * grown[*column] / all.max(1.0);
        (after.0, STATES.iter().map(share).collect())
    };
    before.iter().zip(after).map(of).collect()
}

/// Packets that each processor has received: the first column of `softnet_stat`, in hexadecimal
/// (Documentation/networking/scaling.rst, net-procfs.c). A merged packet counts as often as it has
/// parts.
pub(super) fn received() -> Result<Vec<u64>> {
    let text = read("/proc/net/softnet_stat")?;
    let first = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let packets = first.filter_map(|word| u64::from_str_radix(word, 16).ok());
    Ok(packets.collect())
}

fn differences(before: &[u64], after: &[u64]) -> Vec<u64> {
    let pairs = before.iter().zip(after);
    pairs
        .map(|(before, after)| after.saturating_sub(*before))
        .collect()
}

/// Starts the naive gateway, with receive offload or without.
pub(super) fn naive(bench: &Bench<'_>, gro: bool) -> Result<Running> {
    let running = bench.start("naive", None)?;
    let (gateway, nic) = gateway(&running)?;
    gateway.set_features(&nic, &[(Feature::Gro, gro)])?;
    Ok(running)
}

/// Starts the naive gateway without receive offload, behind its firewall if it has one; its NIC's
/// packets go to one processor or to all.
fn start(bench: &Bench<'_>, spread: bool, firewall: bool) -> Result<Running> {
    let running = naive(bench, false)?;
    let (gateway, nic) = gateway(&running)?;
    if firewall {
        long_ruleset(gateway, &nic, RULES)?;
    }
    let mut cpus = all_cpus();
    cpus.truncate(if spread { cpus.len() } else { 1 });
    gateway.steer(&nic, &cpus)?;
    Ok(running)
}

/// The host in the middle, and its nic towards the device.
pub(super) fn gateway(running: &Running) -> Result<(&Host, String)> {
    let gateway = running.hosts.middle()?;
    Ok((gateway, running.device(gateway)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_those_of_the_time_between() {
        // user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; the summary of all
        // and other lines are left out.
        let before = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 0 50 1000 0 0 10 0 0 0\nintr 5\n";
        let after = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 150 0 60 1020 0 0 30 0 25 0\nintr 6\n";
        let shares = shares(&ticks(before), &ticks(after));
        // 25 user, 25 guest, 10 system, 20 idle and 20 softirq of 100.
        let expected = [25.0, 0.0, 10.0, 0.0, 0.0, 20.0, 0.0, 25.0, 20.0];
        assert_eq!(shares, [(0, expected.to_vec())]);
    }

    #[test]
    fn the_smallest_frame_has_64_bytes() {
        // Ethernet header and checksum (IEEE 802.3), IPv4 and UDP headers.
        assert_eq!(14 + 4 + 20 + 8 + SMALLEST, 64);
    }
}
