//! A queue of three packets in front of the tunnel's program, as a driver for Solaris had it (5,120
//! bytes), and one of 1 MiB (about 720 segments).
//!
//! The queue of a TUN or TAP device is `txqueuelen` packets long. It is set on host A, which sends;
//! then it is swept, too short to far too long, with the latency that the load has meanwhile. The
//! doctor looks at the short queue while the packets of the same connection are captured.

use std::time::Duration;

use seikan_diagnose::{Cause, Recording};
use seikan_load::{LiveOptions, TcpOptions, loaded_latency, paced, tcp_bulk};
use seikan_observe::metric;

use super::functions::traced;
use super::look::{Looker, file_stem};
use super::segments::Connection;
use super::{Bench, Claim, Curve, Curves, Experiment, Figures, List, Row, plain, titled};
use crate::capture::{Capture, Captured};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::tunnel::Running;

/// Length of the driver's queue before and after the change, in packets.
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
/// Number of segments at the beginning of a connection that are listed.
const FIRST: usize = 12;
/// Interval between datagrams of the flow that waits for answers.
const PACE: Duration = Duration::from_millis(10);

pub(super) fn run(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    for name in [TAP, "openvpn", "seikan-native"] {
        plain(name)?;
    }
    for rate in bench.rates() {
        rows(bench, rate, found)?;
    }
    found.attempt_all(bench, &[sweep, diagnosis, packets, functions])
}

/// Measures throughput and retransmissions over a link of this rate.
fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<()> {
    let measured = bench.rounds(
        &ROWS,
        |row| row.0,
        found,
        |bench, row| {
            let mut running = start(bench, row, rate)?;
            let options = TcpOptions {
                // Retransmissions count from the beginning on.
                warmup: Duration::ZERO,
                duration: bench.time(),
                buffers: (row.0 == BUFFERS).then_some(BUFFER_SIZES),
                ..TcpOptions::default()
            };
            let report = tcp_bulk(&running.ends(), &options, bench.interrupt)?;
            running.check_alive()?;
            Ok([
                report.gbit_per_second * 1e3,
                report.retransmitted_segments as f64
                    / (report.gbit_per_second * report.seconds).max(1e-6),
            ])
        },
    )?;
    let quantity = |title: &str, unit: &str, index: usize, published: bool| {
        let row = |(name, way, there): &QueueRow| {
            let own = way.is_some_and(|(tunnel, _)| tunnel.starts_with("seikan"));
            Row::new(*name, there.filter(|_| published)).own(own)
        };
        let rows = measured.rows(row, |values| Some(values[index]));
        Figures::new(titled(title, rate), unit, rows)
    };
    let throughput = quantity("TCP, 1 stream", "Mbit/s", 0, true);
    // Over a rate-limited link, Seikan does not need a long queue.
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
fn sweep(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let mut throughput = Vec::new();
    let mut latency = Vec::new();
    for (name, own) in [("openvpn", false), ("seikan-native", true)] {
        let mut running = bench.start(name, None)?;
        let (mut rates, mut middle, mut worst) = (Vec::new(), Vec::new(), Vec::new());
        for packets in SWEEP {
            bench.step(format!("{name}, queue of {packets} packets"))?;
            set_queue(&running, packets)?;
            let options = TcpOptions {
                duration: bench.time(),
                ..TcpOptions::default()
            };
            let loaded = loaded_latency(&running.ends(), &options, paced, PACE, bench.interrupt)?;
            running.check_alive()?;
            let x = f64::from(packets);
            rates.push([x, loaded.gbit_per_second * 1e3]);
            if loaded.latency.received > 0 {
                middle.push([x, loaded.latency.p50_us / 1e3]);
                worst.push([x, loaded.latency.p99_us / 1e3]);
            }
        }
        let label = if own { "Seikan" } else { "OpenVPN" };
        let curve = |name: String, points| Curve::new(name, points).own(own);
        throughput.push(curve(label.to_owned(), rates));
        latency.push(curve(format!("{label}, half of the answers"), middle));
        latency.push(curve(format!("{label}, 99 % of the answers"), worst));
    }
    let curves = |name: &str, title: &str, y: &str, curves: Vec<Curve>| {
        Curves::new(name, title, ["queue, packets", y], curves).logarithmic([true; 2])
    };
    let waits = "answers to a UDP flow under that load come within";
    found.curves.extend([
        curves(
            "queue-throughput",
            "throughput of one TCP stream",
            "Mbit/s",
            throughput,
        ),
        curves("queue-latency", waits, "ms", latency),
    ]);
    Ok(())
}

/// Starts a row over a link of this rate.
fn start(bench: &Bench<'_>, (_, way, _): &QueueRow, rate: Option<u64>) -> Result<Running> {
    let Some((tunnel, packets)) = *way else {
        return bench.start("raw", rate);
    };
    let running = bench.start(tunnel, rate)?;
    set_queue(&running, packets)?;
    Ok(running)
}

/// Diagnoses OpenVPN with the short queue, over TAP and TUN, while its packets are captured. Seikan
/// is left out: it takes super-packets, and is hardly slower with a short queue.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    for [slow, good] in LOOKS {
        let name = ROWS[slow].0;
        bench.step(format!("the doctor on {name}"))?;
        let running = start(bench, &ROWS[slow], None)?;
        let looker = Looker {
            expected: found.figures[0].rows[good].median(),
            facts,
            ..Looker::at(name, &running, &running.hosts.a, Cause::TunQueueOverflow)
        };
        let (mut verdict, captured) = captured(bench, &running, name, || {
            looker.look_under(&LiveOptions::default(), &running.ends(), bench.desk)
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
fn packets(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    bench.step("the packets of a connection")?;
    let mut columns = vec![String::new()];
    let mut rows: Vec<Vec<String>> = Vec::new();
    for row in LOOKS[0] {
        let running = start(bench, &ROWS[row], None)?;
        let options = TcpOptions {
            warmup: Duration::ZERO,
            duration: bench.time(),
            ..TcpOptions::default()
        };
        let name = format!("{}, packets", ROWS[row].0);
        let (_, captured) = captured(bench, &running, &name, || {
            Ok(tcp_bulk(&running.ends(), &options, bench.interrupt)?)
        })?;
        if captured.lost > 0 {
            let lost = format!("{name}: {} were not captured.", captured.lost);
            found.notes.push(lost);
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
fn functions(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let [slow, _] = LOOKS[0];
    bench.step("functions of driver and program")?;
    let running = start(bench, &ROWS[slow], None)?;
    traced(bench, &running, ROWS[slow].0, found)
}

/// Runs `work` while the packets of the tunnel's device in host A are captured, into the file of a
/// row beside its recording.
fn captured<T>(
    bench: &Bench<'_>,
    running: &Running,
    name: &str,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Captured)> {
    let scratch = private_directory()?;
    let file = bench
        .directory(scratch.path())?
        .join(file_stem(bench.source, name));
    let host = &running.hosts.a;
    let capture = Capture::start(host, &running.device(host), &file.with_extension("pcap"))?;
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
    // The busiest thread comes first. OpenVPN sleeps only in poll.
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

fn set_queue(running: &Running, packets: u32) -> Result<()> {
    let host = &running.hosts.a;
    host.set_link(&running.device(host), &format!("txqueuelen {packets}"))
}
