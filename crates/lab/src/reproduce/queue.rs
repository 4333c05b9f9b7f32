//! A queue of three packets in front of the tunnel's program, as a driver for Solaris had it (5,120
//! bytes), and one of 1 MiB (about 720 segments).
//!
//! The queue of a TUN or TAP device is `txqueuelen` packets long. It is set on host A, which sends;
//! then it is swept, too short to far too long, with the latency that the load has meanwhile. The
//! doctor looks at the short queue while the packets of the same connection are captured.

use std::path::{Path, PathBuf};
use std::time::Duration;

use seikan_diagnose::{Cause, Recording};
use seikan_load::stats::Spread;
use seikan_load::{LiveOptions, TcpOptions, loaded_latency, paced, tcp_bulk};
use seikan_observe::metric;

use super::figures::interleaved;
use super::functions::traced;
use super::look::{Looker, file_stem};
use super::segments::Connection;
use super::{Bench, Claim, Curve, Curves, Figures, Found, List, Row, plain, set_link, titled};
use crate::capture::{Capture, Captured};
use crate::cleanup::private_directory;
use crate::error::{LabError, Result};
use crate::tunnel::{self, Running, inner_device};

/// The queue that the driver had, and the one it got, in packets.
const SHORT: u32 = 3;
const LONG: u32 = 720;
/// The sweep, in packets.
const SWEEP: [u32; 8] = [3, 10, 30, 100, 300, 1_000, 3_000, 10_000];
/// Name of a row, its tunnel and the length of the queue in packets, and the published figure in
/// Mbit/s.
type QueueRow = (&'static str, Option<(&'static str, u32)>, Option<f64>);
/// Names of rows, and their published figures in Mbit/s. The source used TAP.
const RAW: &str = "no tunnel";
const TAP: &str = "openvpn-tap";
const ROWS: [QueueRow; 8] = [
    (RAW, None, Some(1_028.79)),
    (
        "OpenVPN over TAP, 3 packets",
        Some((TAP, SHORT)),
        Some(22.88),
    ),
    (
        "OpenVPN over TAP, 720 packets",
        Some((TAP, LONG)),
        Some(214.29),
    ),
    (
        "OpenVPN over TUN, 3 packets",
        Some(("openvpn", SHORT)),
        None,
    ),
    (
        "OpenVPN over TUN, 720 packets",
        Some(("openvpn", LONG)),
        None,
    ),
    ("Seikan, 3 packets", Some(("seikan-native", SHORT)), None),
    ("Seikan, 720 packets", Some(("seikan-native", LONG)), None),
    (BUFFERS, Some((TAP, LONG)), None),
];
/// The buffers of netperf's sockets in the source, of the sender and of the receiver, in bytes; the
/// others are sized by the kernel.
const BUFFERS: &str = "OpenVPN over TAP, 720 packets, socket buffers of the source";
const BUFFER_SIZES: [usize; 2] = [49_152, 128_000];
/// Rows that the doctor looks at, each with the row that has the good rate.
const LOOKS: [[usize; 2]; 2] = [[1, 2], [3, 4]];
/// Rows at the beginning of a connection that are listed.
const FIRST: usize = 12;
/// A datagram of the flow that waits for answers is sent so often.
const PACE: Duration = Duration::from_millis(10);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    bench.expect(2 * ROWS.len() * rounds + 2 * SWEEP.len() + LOOKS.len() + 2);
    let mut found = Found::default();
    for name in [TAP, "openvpn", "seikan-native"] {
        plain(name)?;
    }
    for rate in bench.rates() {
        rows(bench, rate, &mut found)?;
    }
    for part in [sweep, diagnosis, packets, functions] {
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
        set_queue(&running, way)?;
        let options = TcpOptions {
            // Retransmissions count from the beginning on.
            warmup: Duration::ZERO,
            duration: bench.time(),
            buffers: (name == BUFFERS).then_some(BUFFER_SIZES),
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
                own: way.is_some_and(|(tunnel, _)| tunnel.starts_with("seikan")),
                rounds: rounds.iter().map(|v| v.map(|v| v[index])).collect(),
                ..Row::new(name, there.filter(|_| published))
            })
            .collect(),
    };
    let throughput = quantity("TCP, 1 stream", "Mbit/s", 0, true);
    // At the rate of the link Seikan has no need of a long queue.
    let own = rate.is_none().then_some([6, 5]);
    for pair in [[2, 1], [0, 2], [4, 3]].into_iter().chain(own) {
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

/// A row that the source has, started: its tunnel's name, and the hosts.
fn start(bench: &Bench<'_>, row: usize) -> Result<(&'static str, Running)> {
    let (name, way, _) = ROWS[row];
    let none = || LabError::Setup(format!("{name} is no tunnel: this is a bug"));
    let (tunnel, _) = way.ok_or_else(none)?;
    let running = tunnel::start(plain(tunnel)?.as_ref(), bench.link(None), bench.interrupt)?;
    set_queue(&running, way)?;
    Ok((tunnel, running))
}

/// Diagnoses OpenVPN with the short queue, over TAP and TUN, while its packets are captured. Ours
/// takes super-packets and is hardly slower with one.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    for [slow, good] in LOOKS {
        let name = ROWS[slow].0;
        bench.step(format!("the doctor on {name}"))?;
        let (tunnel, running) = start(bench, slow)?;
        let good = found.figures[0].rows[good].spread();
        let host = &running.hosts.a;
        let interface = inner_device(tunnel, host);
        let looker = Looker {
            expected: good.map_or(1e3, |good: Spread| good.median),
            right: &[Cause::TunQueueOverflow],
            ..Looker::new(name, host, &interface)
        };
        let (mut verdict, captured) = captured(bench, tunnel, &running, name, || {
            let ends = running.hosts.through_tunnel();
            looker.look_under(&LiveOptions::default(), &ends, bench.desk(), facts)
        })?;
        let packets = Connection::largest(&captured.packets);
        verdict.facts.extend(packets.map(|of| {
            let name = "segments in the capture of the whole connection".to_owned();
            (name, of.segments() as f64)
        }));
        found.looks.push(verdict);
    }
    Ok(())
}

/// The segments of a connection from its beginning, with each queue: the source reads these figures
/// from its time-sequence graphs.
fn packets(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    bench.step("the packets of a connection")?;
    let mut columns = vec![String::new()];
    let mut rows: Vec<Vec<String>> = Vec::new();
    for row in LOOKS[0] {
        let (tunnel, running) = start(bench, row)?;
        let options = TcpOptions {
            warmup: Duration::ZERO,
            duration: bench.time(),
            ..TcpOptions::default()
        };
        let name = format!("{}, packets", ROWS[row].0);
        let (_, captured) = captured(bench, tunnel, &running, &name, || {
            let ends = running.hosts.through_tunnel();
            Ok(tcp_bulk(&ends, &options, bench.interrupt)?)
        })?;
        if captured.lost > 0 {
            found
                .notes
                .push(format!("{name}: {} were not captured.", captured.lost));
        }
        let Some(connection) = Connection::largest(&captured.packets) else {
            continue;
        };
        columns.push(ROWS[row].0.to_owned());
        for (index, (name, value)) in connection.figures(FIRST).into_iter().enumerate() {
            if index == rows.len() {
                rows.push(vec![name.to_owned()]);
            }
            rows[index].push(value);
        }
    }
    found.lists.push(List {
        title: format!(
            "the segments of one connection of {:.0} s, in a capture at the sender",
            bench.options.seconds
        ),
        columns,
        rows,
    });
    Ok(())
}

/// Traces functions of driver and program with the short queue.
fn functions(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    let [slow, _] = LOOKS[0];
    bench.step("functions of driver and program")?;
    let (tunnel, mut running) = start(bench, slow)?;
    traced(bench, tunnel, &mut running, ROWS[slow].0, found)
}

/// Runs `work` while the packets of the tunnel's device in host A are captured, into the file of a
/// row beside its recording.
fn captured<T>(
    bench: &Bench<'_>,
    tunnel: &str,
    running: &Running,
    name: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Captured)> {
    let scratch = private_directory()?;
    let kept = bench.options.recordings.as_deref();
    let directory: &Path = kept.unwrap_or(scratch.path());
    std::fs::create_dir_all(directory)
        .map_err(LabError::io(format!("make {}", directory.display())))?;
    let file: PathBuf = directory
        .join(file_stem(bench.source, name))
        .with_extension("pcap");
    let host = &running.hosts.a;
    let capture = Capture::start(host, &inner_device(tunnel, host), &file)?;
    let outcome = work()?;
    Ok((outcome, capture.finish()?))
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

fn set_queue(running: &Running, way: Option<(&str, u32)>) -> Result<()> {
    way.map_or(Ok(()), |(tunnel, packets)| {
        set_link(&running.hosts.a, tunnel, &queue(packets))
    })
}

fn queue(packets: u32) -> String {
    format!("txqueuelen {packets}")
}
