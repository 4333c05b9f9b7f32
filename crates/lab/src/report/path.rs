//! The report of a comparison over emulated paths.

use seikan_ui::output::counted;

use crate::bench::Load;
use crate::bench::path::{CellReport, Figure, PathLoadSummary, PathReport, PathTunnel};
use crate::report::{Bar, Kind, Panel, Report, Row, Table, machine_facts, or_none};

/// A column of a panel: its heading, figure, and digits after the point.
type Column = (&'static str, Figure, usize);

/// Columns of every load with voice beside it.
const VOICE_COLUMNS: [Column; 5] = [
    ("RTT ms", Figure::RttMs, 1),
    ("p99", Figure::RttP99Ms, 1),
    ("lost %", Figure::VoiceLostPercent, 1),
    ("wire B/B", Figure::WireBytesPerByte, 3),
    ("CPU s/Gbit", Figure::CpuSecondsPerGbit, 2),
];
/// Share of late frames, in percent, above which a run is not to be trusted.
const LATE_PERCENT: f64 = 1.0;

impl From<&PathReport> for Report {
    fn from(report: &PathReport) -> Self {
        let options = &report.options;
        let mut facts = machine_facts(&report.machine);
        facts.extend(report.versions.iter().cloned());
        let panels = report.cells.iter().flat_map(|cell| {
            let loads = options.loads.iter();
            loads.filter_map(move |load| panel(cell, *load))
        });
        Report {
            title: "Tunnels over emulated paths".to_owned(),
            subtitle: format!(
                "{} UTC, {}, {} of {} s",
                report.date,
                counted(report.cells.len(), "path"),
                counted(options.rounds as usize, "round"),
                options.seconds
            ),
            headlines: headlines(report),
            panels: panels.collect(),
            tables: tables(report),
            problems: problems(report),
            facts,
            method: method(report),
        }
    }
}

/// Our tunnels' goodput against the raw path, over all paths.
fn headlines(report: &PathReport) -> Vec<String> {
    let streams = [Load::Tcp1, Load::Tcp8];
    let own = |name: &str| -> Vec<f64> {
        let tunnels = report.cells.iter().flat_map(|cell| &cell.tunnels);
        let loads = tunnels.filter(|t| t.name == name).flat_map(|t| &t.loads);
        loads
            .filter(|l| streams.contains(&l.load))
            .filter_map(|l| l.ratio_to_raw)
            .collect()
    };
    let names = report.cells.first().map(|cell| &cell.tunnels);
    let names = names.into_iter().flatten().filter(|t| t.own);
    names
        .filter_map(|tunnel| {
            let ratios = own(&tunnel.name);
            let least = ratios.iter().copied().reduce(f64::min)?;
            let most = ratios.iter().copied().reduce(f64::max)?;
            Some(format!(
                "{}: {least:.2} to {most:.2} of the raw path.",
                tunnel.name
            ))
        })
        .collect()
}

/// The figure of a load that its bars show, and its unit.
fn main_figure(load: Load) -> (Figure, &'static str) {
    match load {
        Load::Web => (Figure::PageMs, "ms"),
        Load::Voice => (Figure::RttP99Ms, "ms"),
        Load::Outage5 | Load::Outage60 | Load::Roam => (Figure::VoiceBackS, "s"),
        _ => (Figure::GoodputMbit, "Mbit/s"),
    }
}

/// Further columns of a load.
fn columns(load: Load) -> Vec<Column> {
    match load {
        Load::Web => [
            ("p99 ms", Figure::PageP99Ms, 0),
            ("Mbit/s", Figure::GoodputMbit, 1),
        ]
        .into_iter()
        .chain(VOICE_COLUMNS)
        .collect(),
        Load::Voice => vec![
            ("median", Figure::RttMs, 2),
            ("lost %", Figure::VoiceLostPercent, 2),
        ],
        Load::Outage5 | Load::Outage60 | Load::Roam => vec![("TCP s", Figure::TcpBackS, 2)],
        Load::Beside => vec![
            ("inside", Figure::InsideMbit, 1),
            ("RTT ms", Figure::RttMs, 1),
            ("queue %", Figure::QueueDropsPercent, 2),
        ],
        _ => std::iter::once(("again %", Figure::ResentPercent, 2))
            .chain(VOICE_COLUMNS)
            .collect(),
    }
}

fn panel(cell: &CellReport, load: Load) -> Option<Panel> {
    let (main, unit) = main_figure(load);
    let further = columns(load);
    let goodput = main == Figure::GoodputMbit;
    let bars = cell.tunnels.iter().map(|tunnel| {
        let summary = tunnel.load(load);
        let ratio = summary.and_then(|s| s.ratio_to_raw);
        let median = |figure| summary.and_then(|s: &PathLoadSummary| s.median(figure));
        let cells = further
            .iter()
            .map(|(_, figure, digits)| or_none(median(*figure), *digits));
        Bar {
            label: tunnel.name.clone(),
            kind: Kind::of(&tunnel.name, tunnel.own),
            value: summary.and_then(|s| s.figures.get(&main)).copied(),
            cells: goodput
                .then(|| or_none(ratio, 2))
                .into_iter()
                .chain(cells)
                .collect(),
        }
    });
    let headings = further.iter().map(|(heading, ..)| *heading);
    let columns = goodput.then_some("× raw").into_iter().chain(headings);
    let title = format!("{}: {}", cell.cell, load.title());
    Panel::new(title, unit, columns, bars).if_any()
}

/// The emulator's own accuracy, from the rounds without a tunnel.
fn tables(report: &PathReport) -> Vec<Table> {
    let rows = report
        .cells
        .iter()
        .filter_map(|cell| Some((cell, cell.raw()?)))
        .map(|(cell, raw)| {
            let load = raw.load(Load::Tcp1);
            let of = |figure| load.and_then(|load| load.median(figure));
            let cells = [
                cell.cell.to_string(),
                or_none(raw.idle_ms.map(|idle| idle.median), 2),
                or_none(of(Figure::PathLossPercent), 2),
                or_none(of(Figure::QueueDropsPercent), 2),
                or_none(worst_late(raw), 2),
                or_none(of(Figure::GoodputMbit), 1),
                or_none(cell.predicted_mbit, 1),
            ];
            Row::new(Kind::Raw, cells)
        });
    let headings = [
        "path", "idle ms", "lost %", "queue %", "late %", "Mbit/s", "RFC 9438",
    ];
    Table::new("The emulated paths, without a tunnel", headings, rows)
        .if_any()
        .into_iter()
        .chain(Table::not_measured("tunnel", &report.absent))
        .collect()
}

/// The largest share of late frames of any load and round, in percent.
fn worst_late(tunnel: &PathTunnel) -> Option<f64> {
    let loads = tunnel.loads.iter();
    loads
        .filter_map(|load| load.figures.get(&Figure::LatePercent))
        .map(|late| late.max)
        .reduce(f64::max)
}

fn problems(report: &PathReport) -> Vec<String> {
    let mut problems = Vec::new();
    for cell in &report.cells {
        for tunnel in &cell.tunnels {
            let name = format!("{}, {}", cell.cell, tunnel.name);
            problems.extend(tunnel.errors.iter().map(|error| format!("{name}: {error}")));
            if let Some(late) = worst_late(tunnel).filter(|late| *late > LATE_PERCENT) {
                problems.push(format!(
                    "{name}: the emulator delivered {late:.1} % of the frames late; repeat it on an idle machine"
                ));
            }
            let missed = tunnel
                .loads
                .iter()
                .filter_map(|load| load.figures.get(&Figure::Missed));
            if missed.clone().any(|missed| missed.max > 0.0) {
                problems.push(format!(
                    "{name}: packets never reached the emulator, which was too slow"
                ));
            }
        }
    }
    problems
}

fn method(report: &PathReport) -> Vec<String> {
    let o = &report.options;
    vec![
        "Hosts A and B are network namespaces of one machine. Between them a program with real-time priority takes super-packets apart into frames, as a NIC does, and drops, queues, delays and counts frames one by one, in both directions alike. NICs send at 10 Gbit/s.".to_owned(),
        format!(
            "Every tunnel runs once per round over every path in new hosts: {}, {} s per load after 2 s of warm-up. Figures are medians over rounds. The tunnels of a round meet the same random numbers.",
            counted(o.rounds as usize, "round"),
            o.seconds
        ),
        "RTT, p99 and lost %: voice beside the load, 50 datagrams of 172 bytes a second to the server and back, from program to program. again %: TCP segments sent again. wire B/B: bytes of Ethernet frames that both hosts sent per byte of payload received. CPU: processor time of the tunnel's programs at both ends.".to_owned(),
        "idle ms: shortest round trip without load. late %: frames that the emulator delivered more than 0.2 ms after their time. RFC 9438: goodput that its formula predicts for one flow of CUBIC, where losses are single and random, in Mbit/s.".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use seikan_load::stats::Spread;

    use super::*;
    use crate::bench::BenchOptions;
    use crate::bench::path::{Cell, PathOptions};
    use crate::machine::Machine;

    fn tunnel(name: &str, own: bool, ratio: f64, figures: &[(Figure, f64)]) -> PathTunnel {
        let spread = |value: f64| Spread::of(&[value]).expect("a value");
        PathTunnel {
            name: name.to_owned(),
            own,
            idle_ms: Some(spread(40.1)),
            loads: vec![PathLoadSummary {
                load: Load::Tcp1,
                figures: figures.iter().map(|(f, v)| (*f, spread(*v))).collect(),
                ratio_to_raw: Some(ratio),
            }],
            errors: Vec::new(),
            rounds: Vec::new(),
        }
    }

    fn sample(late: f64) -> PathReport {
        let raw = [(Figure::GoodputMbit, 200.0), (Figure::LatePercent, late)];
        let own = [(Figure::GoodputMbit, 150.0), (Figure::RttMs, 41.26)];
        PathReport {
            date: "today".to_owned(),
            machine: Machine::default(),
            options: BenchOptions {
                loads: vec![Load::Tcp1],
                ..BenchOptions::default()
            },
            paths: PathOptions::default(),
            cells: vec![CellReport {
                cell: Cell::default(),
                predicted_mbit: None,
                tunnels: vec![
                    tunnel("raw", false, 1.0, &raw),
                    tunnel("seikan-native", true, 0.75, &own),
                ],
            }],
            versions: Vec::new(),
            absent: Vec::new(),
        }
    }

    #[test]
    fn a_path_is_a_panel_with_a_bar_for_each_tunnel() {
        let report = Report::from(&sample(0.0));
        let [panel] = &report.panels[..] else {
            panic!("{report:?}");
        };
        assert_eq!(
            panel.title,
            "40 ms, 300 Mbit/s, queue of 1 BDP, CUBIC: TCP, 1 stream"
        );
        assert_eq!(panel.columns[..3], ["× raw", "again %", "RTT ms"]);
        assert_eq!(panel.bars[1].cells[..3], ["0.75", "–", "41.3"]);
        assert_eq!(
            report.headlines,
            ["seikan-native: 0.75 to 0.75 of the raw path."]
        );
        assert_eq!(report.problems, Vec::<String>::new());
    }

    #[test]
    fn a_machine_too_busy_to_be_on_time_is_a_problem() {
        let report = Report::from(&sample(3.2));
        let [problem] = &report.problems[..] else {
            panic!("{report:?}");
        };
        assert!(problem.contains("3.2 % of the frames late"), "{problem}");
    }
}
