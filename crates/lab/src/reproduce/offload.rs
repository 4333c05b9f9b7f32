//! A gateway that wraps whatever its packet socket hands it, with receive offload (GRO) on its card and without, with
//! packets steered to all processors (RPS), and ours, which wants GRO.

use seikan_diagnose::{Cause, Recording};
use seikan_observe::metric;
use seikan_sys::ethtool::Feature;

use super::look::Looker;
use super::{Bench, Figures, Found, Row};
use crate::Progress;
use crate::bench::{Load, Measured};
use crate::error::{LabError, Result};
use crate::gateway::{GatewayOptions, GatewayReport, GatewayRound, gateway};
use crate::link::Link;
use crate::load::LiveOptions;
use crate::scenario::lookup;
use crate::tunnel::{self, Changes, inner_device};

/// Rows of the comparison of gateways, as they are called here.
const ROWS: [(&str, &str); 4] = [
    (NAIVE, "naive, GRO on"),
    ("naive-no-gro", "naive, GRO off"),
    ("naive-no-gro-rps", "naive, GRO off, RPS"),
    ("seikan-transparent", "Seikan, GRO on"),
];
const NAIVE: &str = "naive-gro";
/// The naive gateway as the doctor's subject.
const TUNNEL: &str = "naive";
/// Published, in Mbit/s, out of the device: GRO on, then GRO off with RPS. UDP with GRO on made about 30.
const PUBLISHED: [(usize, f64); 2] = [(0, 1.56), (2, 32.6)];
const PUBLISHED_UDP: f64 = 30.0;
/// Published: segments sent again, and congestion window in KB.
const PUBLISHED_AGAIN: [(usize, f64); 2] = [(0, 612.0), (2, 9.0)];
const PUBLISHED_WINDOW: [(usize, f64); 2] = [(0, 2.57), (2, 266.0)];

type Figure = fn(&Measured) -> Option<f64>;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let mut found = Found::default();
    let report = compare(bench)?;
    for row in &report.rows {
        let errors = row.errors.iter();
        found
            .problems
            .extend(errors.map(|error| format!("{}: {error}", row.name)));
    }
    let absent = report.absent.iter();
    found
        .problems
        .extend(absent.map(|absent| format!("{}: {}", absent.name, absent.reason)));
    found.figures = figures(&report);
    let [out, into, udp, again, window] = &found.figures[..] else {
        return Err(LabError::Setup(
            "five quantities are measured: this is a bug".into(),
        ));
    };
    let [naive, no_gro, rps, own] = ROWS.map(|(_, name)| name);
    found.claims = vec![
        out.claim(no_gro, naive),
        out.claim(rps, naive),
        out.claim(own, rps),
        into.claim(own, naive),
        udp.claim(own, rps),
        again.claim_of_counts(naive, no_gro),
        window.claim(no_gro, naive),
    ];
    bench.steps = (9.0, 10.0);
    let done = diagnosis(bench, &mut found);
    found.bear(done)?;
    Ok(found)
}

/// Every row and load, in rounds, by the comparison of gateways.
fn compare(bench: &mut Bench<'_>) -> Result<GatewayReport> {
    let options = GatewayOptions {
        seconds: bench.options.seconds,
        rounds: bench.options.rounds,
        only: Some(ROWS.map(|(way, _)| way.to_owned()).to_vec()),
        loads: vec![Load::Tcp1, Load::Rev, Load::Udp],
        ..GatewayOptions::default()
    };
    let (source, progress) = (bench.source, &mut *bench.progress);
    gateway(&options, bench.interrupt, &mut |step| {
        progress(Progress {
            // The doctor comes afterwards.
            fraction: step.fraction * 0.9,
            what: format!("{source}: {}", step.what),
        });
    })
}

fn figures(report: &GatewayReport) -> Vec<Figures> {
    let quantity = |title: &str, unit: &str, load, figure: Figure, there: &[(usize, f64)]| {
        let rows = ROWS.iter().enumerate().map(|(index, (way, name))| {
            let published = there.iter().find(|(row, _)| *row == index);
            let rounds = report.row(way).map_or(&[][..], |row| &row.rounds);
            Row {
                own: way.starts_with("seikan"),
                rounds: rounds.iter().map(|r| of_round(r, load, figure)).collect(),
                ..Row::new(*name, published.map(|(_, value)| *value))
            }
        });
        Figures {
            title: title.to_owned(),
            unit: unit.to_owned(),
            base: ROWS[0].1.to_owned(),
            rows: rows.collect(),
        }
    };
    let megabits: Figure = |load| load.gbit_per_second().map(|rate| rate * 1e3);
    let again: Figure = |load| match load {
        Measured::Tcp(report) => Some(report.retransmitted_segments as f64),
        _ => None,
    };
    let window: Figure = |load| match load {
        Measured::Tcp(report) => report.congestion_window.map(|bytes| bytes as f64 / 1e3),
        _ => None,
    };
    let (rate, out) = ("Mbit/s", Load::Tcp1);
    vec![
        quantity("TCP out of the device", rate, out, megabits, &PUBLISHED),
        quantity("TCP into the device", rate, Load::Rev, megabits, &[]),
        quantity(
            "UDP out of the device",
            rate,
            Load::Udp,
            megabits,
            &[(0, PUBLISHED_UDP)],
        ),
        quantity(
            "segments sent again, TCP out (fewer are better)",
            "a run",
            out,
            again,
            &PUBLISHED_AGAIN,
        ),
        quantity(
            "congestion window at the end, TCP out",
            "KB",
            out,
            window,
            &PUBLISHED_WINDOW,
        ),
    ]
}

fn of_round(round: &GatewayRound, load: Load, figure: Figure) -> Option<f64> {
    let mut loads = round.figures.loads.iter();
    figure(&loads.find(|of| of.load == load)?.measured)
}

/// What the doctor, at the naive gateway, says of it with GRO on.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    bench.step("the doctor on the naive gateway with GRO on")?;
    let tunnel = lookup(TUNNEL, &Changes::default())?;
    let running = tunnel::start(tunnel.as_ref(), Link::default(), bench.interrupt)?;
    let Some(gateway) = &running.hosts.middle else {
        return Err(LabError::Setup(
            "there is no host in the middle: this is a bug".into(),
        ));
    };
    let card = inner_device(TUNNEL, gateway);
    gateway.set_features(&card, &[(Feature::Gro, true)])?;
    let good = found.figures[0].rows[1].spread();
    let looker = Looker {
        expected: good.map_or(1e3, |good| good.median),
        right: &[Cause::GroBreaksEncapsulation],
        ..Looker::new(ROWS[0].1, gateway, &card)
    };
    let ends = tunnel.ends(&running.hosts);
    let told = looker.look_under(&LiveOptions::default(), &ends, bench.desk(), facts)?;
    found.looks.push(told);
    Ok(())
}

/// What the source looked at: how the work of receiving is spread.
fn facts(recording: &Recording) -> Vec<(String, f64)> {
    let evidence = &recording.evidence;
    let handled = evidence.per_cpu(metric::SOFTNET_PROCESSED);
    let all: f64 = handled.iter().map(|(_, packets)| packets).sum();
    let share = |(cpu, packets): (u32, f64)| {
        let name = format!("packets that processor {cpu} received, % of all");
        (name, 100.0 * packets / all.max(1.0))
    };
    handled.into_iter().map(share).collect()
}
