//! A queue of three packets in front of the tunnel's program, as a driver for Solaris had it (5,120
//! bytes), and one of 1 MiB (about 720 segments).
//!
//! The queue of a TUN device is `txqueuelen` packets long. It is set on host A, which sends; then
//! it is swept, too short to far too long, with the latency that the load has meanwhile.

use std::time::Duration;

use seikan_diagnose::{Cause, Recording};
use seikan_load::stats::Spread;
use seikan_load::{LiveOptions, TcpOptions, loaded_latency, paced, tcp_bulk};
use seikan_observe::metric;

use super::figures::interleaved;
use super::look::Looker;
use super::{Bench, Claim, Curve, Curves, Figures, Found, Row, plain, set_link, titled};
use crate::error::Result;
use crate::tunnel::{self, inner_device};

/// The queue that the driver had, and the one it got, in packets.
const SHORT: u32 = 3;
const LONG: u32 = 720;
/// The sweep, in packets.
const SWEEP: [u32; 8] = [3, 10, 30, 100, 300, 1_000, 3_000, 10_000];
/// Name of a row, its tunnel and the length of the queue in packets, and the published figure in
/// Mbit/s.
type QueueRow = (&'static str, Option<(&'static str, u32)>, Option<f64>);
/// Names of rows, and their published figures in Mbit/s.
const RAW: &str = "no tunnel";
const ROWS: [QueueRow; 5] = [
    (RAW, None, Some(1_028.79)),
    ("OpenVPN, 3 packets", Some(("openvpn", SHORT)), Some(22.88)),
    (
        "OpenVPN, 720 packets",
        Some(("openvpn", LONG)),
        Some(214.29),
    ),
    ("Seikan, 3 packets", Some(("seikan-native", SHORT)), None),
    ("Seikan, 720 packets", Some(("seikan-native", LONG)), None),
];
/// A datagram of the flow that waits for answers is sent so often.
const PACE: Duration = Duration::from_millis(10);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    bench.expect(2 * ROWS.len() * rounds + 2 * SWEEP.len() + 1);
    let mut found = Found::default();
    for name in ["openvpn", "seikan-native"] {
        plain(name)?;
    }
    for rate in bench.rates() {
        rows(bench, rate, &mut found)?;
    }
    for part in [sweep, diagnosis] {
        let done = part(bench, &mut found);
        found.note_failure(done)?;
    }
    Ok(found)
}

/// Measures throughput and retransmissions over a link of this rate.
fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let names = ROWS.map(|(name, ..)| name);
    let measured = interleaved(bench, &names, &mut found.problems, &mut |bench, name| {
        let (_, way, _) = ROWS
            .into_iter()
            .find(|row| row.0 == name)
            .unwrap_or(ROWS[0]);
        let tunnel = plain(way.map_or("raw", |(tunnel, _)| tunnel))?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        if let Some((tunnel, packets)) = way {
            set_link(&running.hosts.a, tunnel, &queue(packets))?;
        }
        let options = TcpOptions {
            // Retransmissions count from the beginning on.
            warmup: Duration::ZERO,
            duration: bench.time(),
            ..TcpOptions::default()
        };
        let report = tcp_bulk(&tunnel.ends(&running.hosts), &options, bench.interrupt)?;
        running.check_alive()?;
        Ok([
            report.gbit_per_second * 1e3,
            report.retransmitted_segments as f64
                / (report.gbit_per_second * report.seconds).max(1e-6),
        ])
    })?;
    let quantity = |title: &str, unit: &str, index: usize, published: bool| Figures {
        title: titled(title, rate),
        unit: unit.to_owned(),
        base: RAW.to_owned(),
        rows: ROWS
            .into_iter()
            .zip(&measured)
            .map(|((name, way, there), rounds)| Row {
                own: way.is_some_and(|(tunnel, _)| tunnel != "openvpn"),
                rounds: rounds.iter().map(|v| v.map(|v| v[index])).collect(),
                ..Row::new(name, there.filter(|_| published))
            })
            .collect(),
    };
    let throughput = quantity("TCP, 1 stream", "Mbit/s", 0, true);
    // At the rate of the link Seikan has no need of a long queue.
    let own = rate.is_none().then_some([4, 3]);
    for pair in [[2, 1], [0, 2]].into_iter().chain(own) {
        let [better, worse] = pair.map(|row| ROWS[row].0);
        found.claims.push(throughput.claim(better, worse));
    }
    let again = quantity(
        "segments sent again (fewer are better)",
        "per Gbit",
        1,
        false,
    );
    found.claims.push(Claim {
        published: None,
        ..again.claim_of_counts(ROWS[1].0, ROWS[2].0)
    });
    found.figures.extend([throughput, again]);
    Ok(())
}

/// Throughput and loaded latency over the length of the queue.
fn sweep(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let mut throughput = Vec::new();
    let mut latency = Vec::new();
    for (name, own) in [("openvpn", false), ("seikan-native", true)] {
        let tunnel = plain(name)?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
        let (mut rates, mut middle, mut worst) = (Vec::new(), Vec::new(), Vec::new());
        for packets in SWEEP {
            bench.step(format!("{name}, queue of {packets} packets"))?;
            set_link(&running.hosts.a, name, &queue(packets))?;
            let options = TcpOptions {
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let ends = tunnel.ends(&running.hosts);
            let loaded = loaded_latency(&ends, &options, paced, PACE, bench.interrupt)?;
            running.check_alive()?;
            let x = f64::from(packets);
            rates.push([x, loaded.gbit_per_second * 1e3]);
            if loaded.latency.received > 0 {
                middle.push([x, loaded.latency.p50_us / 1e3]);
                worst.push([x, loaded.latency.p99_us / 1e3]);
            }
        }
        let label = if own { "Seikan" } else { "OpenVPN" };
        let curve = |name: String, points| Curve {
            name,
            own,
            published: false,
            points,
        };
        throughput.push(curve(label.to_owned(), rates));
        latency.push(curve(format!("{label}, half of the answers"), middle));
        latency.push(curve(format!("{label}, 99 % of the answers"), worst));
    }
    let curves = |name: &str, title: &str, y: &str, curves| Curves {
        name: name.to_owned(),
        title: title.to_owned(),
        x: "queue, packets".to_owned(),
        y: y.to_owned(),
        logarithmic: [true, true],
        curves,
    };
    found.curves.push(curves(
        "queue-throughput",
        "throughput of one TCP stream",
        "Mbit/s",
        throughput,
    ));
    found.curves.push(curves(
        "queue-latency",
        "answers to a UDP flow under that load come within",
        "ms",
        latency,
    ));
    Ok(())
}

/// Diagnoses OpenVPN with the short queue. Ours takes super-packets and is hardly slower with one.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let (name, way, _) = ROWS[1];
    bench.step(format!("the doctor on {name}"))?;
    let Some((tunnel_name, packets)) = way else {
        return Ok(());
    };
    let tunnel = plain(tunnel_name)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    set_link(&running.hosts.a, tunnel_name, &queue(packets))?;
    let good = found.figures[0].rows[2].spread();
    let host = &running.hosts.a;
    let interface = inner_device(tunnel_name, host);
    let looker = Looker {
        expected: good.map_or(1e3, |good: Spread| good.median),
        right: &[Cause::TunQueueOverflow],
        ..Looker::new(name, host, &interface)
    };
    let ends = tunnel.ends(&running.hosts);
    let verdict = looker.look_under(&LiveOptions::default(), &ends, bench.desk(), facts)?;
    found.looks.push(verdict);
    Ok(())
}

/// Returns the source's quantities: drops at the queue while the queueing discipline has none, and
/// a waiting process.
fn facts(recording: &Recording) -> Vec<(String, f64)> {
    let evidence = &recording.evidence;
    let mut facts = Vec::new();
    let mut add = |name: &str, value: Option<f64>| {
        facts.extend(value.map(|value| (name.to_owned(), value)));
    };
    add(
        "packets lost in the queue",
        evidence.inner(metric::TX_DROPPED),
    );
    let inner = evidence.map.inner.as_deref().unwrap_or_default();
    add(
        "packets lost in the queueing discipline before it",
        evidence.qdisc(inner, metric::QDISC_DROPS),
    );
    // The busiest first. OpenVPN sleeps nowhere but in poll.
    let threads = evidence.threads();
    let busiest = threads.first();
    add(
        "share of the time in which the program sleeps in poll, %",
        busiest.map(|thread| 100.0 * (1.0 - thread.running - thread.waiting)),
    );
    add(
        "share of the time in which it waits for a processor, %",
        busiest.map(|thread| 100.0 * thread.waiting),
    );
    facts
}

fn queue(packets: u32) -> String {
    format!("txqueuelen {packets}")
}
