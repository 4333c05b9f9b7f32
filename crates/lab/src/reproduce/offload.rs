//! A gateway that encapsulates whatever its packet socket receives, with receive offload (GRO) on
//! its NIC and without, with packets distributed to all processors (RPS), and Seikan, which
//! requires GRO. The same encapsulation between two hosts, without a gateway, is row (A) of the
//! source.

use std::time::{Duration, Instant};

use seikan_diagnose::{Cause, Recording};
use seikan_load::{Ends, LiveOptions};
use seikan_observe::metric;
use seikan_sys::netlink::diag::{Diag, TcpConnection};
use seikan_sys::softirq;
use seikan_ui::Progress;

use super::figures::named;
use super::look::Looker;
use super::steering::{gateway, naive};
use super::{Bench, Curve, Curves, Experiment, Figures, List, Row, reordering, steering, titled};
use crate::bench::{Load, Measured, Round};
use crate::error::{Doing, Result, setup};
use crate::gateway::site::Nic;
use crate::gateway::{self, GatewayOptions, GatewayReport, behind};
use crate::load::live;
use crate::tunnel::middle::NAIVE_HOSTS;

/// Rows of the comparison of gateways, as they are called here.
const ROWS: [(&str, &str); 5] = [
    (NAIVE, "naive, GRO on"),
    ("naive-no-gro", "naive, GRO off"),
    ("naive-no-gro-rps", "naive, GRO off, RPS"),
    ("seikan-transparent", "Seikan, GRO on"),
    (NAIVE_HOSTS, "naive, host to host, no gateway"),
];
/// Position of the last row.
const HOSTS: usize = 4;
const NAIVE: &str = "naive-gro";
/// Approximate share of the whole time that the comparison of gateways takes.
const COMPARED: f64 = 0.6;
/// Interval of samples of a connection, and their duration as a multiple of a load.
const EVERY: Duration = Duration::from_millis(100);
const FOLLOWED: f64 = 3.0;
/// Interval of the connection's throughput, in seconds.
const RATE_EVERY: f64 = 0.5;
/// Published, in Mbit/s, out of the device: GRO on, then GRO off with RPS; host to host it was
/// "above 30". UDP made about 30 in both.
const PUBLISHED: [(usize, f64); 3] = [(0, 1.56), (2, 32.6), (HOSTS, 30.0)];
const PUBLISHED_UDP: [(usize, f64); 2] = [(0, 30.0), (HOSTS, 30.0)];
/// Published: segments sent again, and congestion window in KB.
const PUBLISHED_AGAIN: [(usize, f64); 2] = [(0, 612.0), (2, 9.0)];
const PUBLISHED_WINDOW: [(usize, f64); 2] = [(0, 2.57), (2, 266.0)];

type Figure = fn(&Measured) -> Option<f64>;

pub(super) fn run(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    for rate in bench.rates() {
        found.attempt(|found| rows(bench, rate, found))?;
        bench.steps.0 += bench.steps.1 * COMPARED / 2.0;
    }
    found.attempt_all(
        bench,
        &[
            over_time,
            diagnosis,
            steering::steering,
            steering::small_packets,
            reordering::reordering,
        ],
    )
}

/// Measures every row over NICs of this rate.
fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<()> {
    let report = compare(bench, rate)?;
    let problem = |name: &str, reason: &str| format!("{name}: {reason}");
    for row in &report.rows {
        let errors = row.errors.iter().map(|error| problem(&row.name, error));
        found.problems.extend(errors);
    }
    let absent = report.absent.iter().map(|of| problem(&of.name, &of.reason));
    found.problems.extend(absent);
    let figures = figures(&report, rate);
    let (outwards, inwards) = figures.split_at(OUTWARDS);
    let [out, udp, again, window] = outwards else {
        return Err(setup("four quantities are measured: this is a bug"));
    };
    let [naive, no_gro, rps, own, hosts] = ROWS.map(|(_, name)| name);
    found.claims.extend([
        out.claim(hosts, naive),
        out.claim(no_gro, naive),
        out.claim(rps, naive),
        out.claim(own, rps),
        udp.claim(own, rps),
        again.claim_of_counts(naive, rps),
        window.claim(rps, naive),
    ]);
    if let [into, udp_in] = inwards {
        let claims = [into.claim(own, naive), udp_in.claim(own, rps)];
        found.claims.extend(claims);
    }
    found.figures.extend(figures);
    found.lists.push(counts(&report, rate));
    Ok(())
}

/// Lists the naive encapsulator's packets in the first round: at the gateway, with the sizes that
/// its packet socket returned, and at the remote, with the packets that it could not read.
fn counts(report: &GatewayReport, limit: Option<u64>) -> List {
    let rows = ROWS.iter().filter_map(|(way, name)| {
        let ends = &report.row(way)?.rounds.first()?.said;
        let [gateway, remote] = &ends[..] else {
            return None;
        };
        let counts = [
            (gateway, "out"),
            (gateway, "merged"),
            (gateway, "largest"),
            (gateway, "oversized"),
            (remote, "cut"),
            (remote, "headless"),
            (remote, "arrived"),
        ];
        let cells = counts.map(|(end, count)| Some(end.get(count)?.as_u64()?.to_string()));
        let cells: Option<Vec<String>> = cells.into_iter().collect();
        Some(named(*name, cells?))
    });
    let columns = [
        "",
        "sent by the gateway",
        "above 1500 bytes",
        "largest, bytes",
        "above 64 KiB",
        "first fragments",
        "fragments without header",
        "taken by the remote",
    ];
    let title = "packets at both ends of the naive encapsulator, first round, all loads";
    List::new(titled(title, limit), &columns, rows)
}

/// Measures every row and load in rounds, by the comparison of gateways.
fn compare(bench: &mut Bench<'_>, rate: Option<u64>) -> Result<GatewayReport> {
    let options = GatewayOptions {
        seconds: bench.options.seconds,
        rounds: bench.options.rounds,
        only: Some(ROWS.map(|(way, _)| way.to_owned()).to_vec()),
        loads: loads(rate).to_vec(),
        rate,
        congestion: bench.options.congestion,
        ..GatewayOptions::default()
    };
    let (source, interrupt, (done, all)) = (bench.source, bench.interrupt, bench.steps);
    let progress = &mut *bench.progress;
    gateway::gateway(&options, interrupt, &mut |step| {
        progress(Progress {
            fraction: done / all + step.fraction * COMPARED / 2.0,
            step: format!("{source}: {}", step.step),
        });
    })
}

/// Returns the loads: first the loads out of the device, which are all on a limited link, as in the
/// source.
fn loads(limit: Option<u64>) -> &'static [Load] {
    let all = &[Load::Tcp1, Load::Udp, Load::Rev, Load::UdpRev];
    if limit.is_none() { all } else { &all[..2] }
}

/// Quantities of loads out of the device.
const OUTWARDS: usize = 4;

/// Returns the figures of loads from the device, then of loads to it, if they were measured.
fn figures(report: &GatewayReport, limit: Option<u64>) -> Vec<Figures> {
    let quantity = |title: &str, unit: &str, load, figure: Figure, there: &[(usize, f64)]| {
        let rows = ROWS.iter().enumerate().map(|(index, (way, name))| {
            let published = there.iter().find(|(row, _)| *row == index);
            let rounds = report.row(way).map_or(&[][..], |row| &row.rounds);
            let row = Row::new(*name, published.map(|(_, value)| *value));
            let row = row.own(way.starts_with("seikan"));
            row.with(rounds.iter().map(|r| of_round(r, load, figure)))
        });
        Figures::new(titled(title, limit), unit, rows)
    };
    let megabits: Figure = |load| load.gbit_per_second().map(|rate| rate * 1e3);
    let window: Figure = |load| load.congestion_window().map(|bytes| bytes / 1e3);
    let (rate, out, udp) = ("Mbit/s", Load::Tcp1, Load::Udp);
    let again_title = "segments sent again, TCP out (fewer are better)";
    let window_title = "congestion window at the end, TCP out";
    let mut all = vec![
        quantity("TCP out of the device", rate, out, megabits, &PUBLISHED),
        quantity("UDP out of the device", rate, udp, megabits, &PUBLISHED_UDP),
        quantity(
            again_title,
            "a run",
            out,
            Measured::retransmitted,
            &PUBLISHED_AGAIN,
        ),
        quantity(window_title, "KB", out, window, &PUBLISHED_WINDOW),
    ];
    if limit.is_none() {
        let into = [
            ("TCP into the device", Load::Rev),
            ("UDP into the device", Load::UdpRev),
        ];
        all.extend(into.map(|(title, load)| quantity(title, rate, load, megabits, &[])));
    }
    all
}

fn of_round(round: &Round, load: Load, figure: Figure) -> Option<f64> {
    let mut loads = round.loads.iter();
    figure(&loads.find(|of| of.load == load)?.measured)
}

/// The rows whose connection is sampled.
const FOLLOWED_ROWS: [&str; 3] = [ROWS[0].1, ROWS[1].1, ROWS[3].1];

/// One connection over time in seconds: its rate in Mbit/s, its congestion window in KB, and the
/// number of retransmitted segments so far.
#[derive(Default)]
struct Trail {
    rate: Vec<[f64; 2]>,
    window: Vec<[f64; 2]>,
    again: Vec<[f64; 2]>,
    /// Packets that the kernel received, of all hosts, and runs of the softirq for them.
    received: Received,
}

#[derive(Clone, Copy, Default)]
struct Received {
    packets: u64,
    runs: u64,
    seconds: f64,
}

/// Reads the state of a connection out of the device from the sender's kernel, over time.
fn over_time(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    let mut trails = Vec::new();
    for name in FOLLOWED_ROWS {
        bench.step(format!("a connection over time: {name}"))?;
        let mut trail = Trail::default();
        if name == FOLLOWED_ROWS[2] {
            behind(Nic::Plain, bench.interrupt, &mut |ends, _| {
                trail = follow(bench, ends)?;
                Ok(())
            })?;
        } else {
            let mut running = naive(bench, name == FOLLOWED_ROWS[0])?;
            trail = follow(bench, &running.ends())?;
            running.check_alive()?;
        }
        trails.push((name, trail));
    }
    let picture = |name: &str, title: &str, y: &str, of: fn(&Trail) -> &Vec<[f64; 2]>| {
        let curves = trails.iter().map(|(name, trail)| {
            Curve::new(*name, of(trail).clone()).own(name.starts_with("Seikan"))
        });
        Curves::new(format!("offload-{name}"), title, ["seconds", y], curves)
            .logarithmic([false, name != "sent-again"])
    };
    let window = "congestion window of a connection out of the device";
    let again = "segments that it has sent again";
    let rate = "throughput of a connection out of the device, in half seconds";
    found.lists.push(softirqs(&trails));
    found.curves.extend([
        picture("over-time", rate, "Mbit/s", |trail| &trail.rate),
        picture("window", window, "KB", |trail| &trail.window),
        picture("sent-again", again, "segments", |trail| &trail.again),
    ]);
    Ok(())
}

/// Lists the number of packets that the kernel receives at a time.
fn softirqs(trails: &[(&str, Trail)]) -> List {
    let rows = trails.iter().map(|(name, trail)| {
        let Received {
            packets,
            runs,
            seconds,
        } = trail.received;
        let per_second = |count: u64| format!("{:.0}", count as f64 / seconds.max(1e-9));
        let of_each = format!("{:.1}", packets as f64 / runs.max(1) as f64);
        named(*name, [per_second(packets), per_second(runs), of_each])
    });
    let columns = [
        "",
        "packets per second",
        "softirqs per second",
        "packets a softirq",
    ];
    let title = "receive softirqs of all hosts during one connection out of the device";
    List::new(title, &columns, rows)
}

/// Packets that all processors have received, and runs of the softirq.
fn received() -> Result<[u64; 2]> {
    let packets = steering::received()?.into_iter().sum();
    let runs = softirq::net_rx().doing("read /proc/softirqs")?;
    Ok([packets, runs.iter().map(|of| of.runs).sum()])
}

/// Follows a connection from its beginning.
fn follow(bench: &Bench<'_>, ends: &Ends<'_>) -> Result<Trail> {
    let mut diag = ends.client.run(Diag::open)??;
    live(ends, &LiveOptions::default(), bench.interrupt, |meter| {
        let (begin, mut trail) = (Instant::now(), Trail::default());
        let before = received()?;
        let (mut read, mut read_at) = (meter.bytes(), 0.0);
        while begin.elapsed() < bench.time().mul_f64(FOLLOWED) {
            let seconds = begin.elapsed().as_secs_f64();
            let mut busiest: Option<TcpConnection> = None;
            let sent = |of: &TcpConnection| of.info.segs_out().unwrap_or(0);
            diag.tcp(|connection| {
                if busiest
                    .as_ref()
                    .is_none_or(|best| sent(best) < sent(&connection))
                {
                    busiest = Some(connection);
                }
            })?;
            if let Some(info) = busiest.map(|connection| connection.info)
                && let (Some(window), Some(segment)) = (info.snd_cwnd(), info.snd_mss())
            {
                let kb = f64::from(window) * f64::from(segment) / 1e3;
                trail.window.push([seconds, kb]);
                let again = info.total_retrans().unwrap_or(0);
                trail.again.push([seconds, f64::from(again)]);
            }
            if seconds - read_at >= RATE_EVERY {
                let bytes = meter.bytes();
                let bits = (bytes - read) as f64 * 8.0;
                trail.rate.push([seconds, bits / 1e6 / (seconds - read_at)]);
                (read, read_at) = (bytes, seconds);
            }
            bench.interrupt.sleep(EVERY)?;
        }
        let after = received()?;
        trail.received = Received {
            packets: after[0].saturating_sub(before[0]),
            runs: after[1].saturating_sub(before[1]),
            seconds: begin.elapsed().as_secs_f64(),
        };
        Ok(trail)
    })
}

/// Diagnoses the naive gateway with GRO on.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Experiment) -> Result<()> {
    bench.step("the doctor on the naive gateway with GRO on")?;
    let running = naive(bench, true)?;
    let (gateway, _) = gateway(&running)?;
    let looker = Looker {
        expected: found.figures[0].rows[1].median(),
        facts,
        ..Looker::at(ROWS[0].1, &running, gateway, Cause::GroBreaksEncapsulation)
    };
    looker.note(&LiveOptions::default(), &running, bench.desk, found)
}

/// Returns the source's quantity: the distribution of receive work over processors, of all hosts
/// together.
fn facts(recording: &Recording) -> Vec<(String, f64)> {
    let evidence = &recording.evidence;
    let handled = evidence.per_cpu(metric::SOFTNET_PROCESSED);
    let all: f64 = handled.iter().map(|(_, packets)| packets).sum();
    let share = |(cpu, packets): (u32, f64)| {
        let name = format!("packets of all hosts that processor {cpu} received, %");
        (name, 100.0 * packets / all.max(1.0))
    };
    handled.into_iter().map(share).collect()
}
