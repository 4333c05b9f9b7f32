//! The report of a comparison.

use seikan_load::stats::ratio;

use crate::bench::{BenchReport, Load, LoadSummary, TunnelReport};
use crate::report::{
    Bar, Kind, Panel, Report, Row, Table, hundredths, machine_facts, mebibytes, or_none, range,
};

pub(super) fn to_report(report: &BenchReport) -> Report {
    let options = &report.options;
    let mut facts = machine_facts(&report.machine);
    let versions = report
        .tunnels
        .iter()
        .filter_map(|t| Some((t.name.clone(), t.version.clone()?)));
    facts.extend(versions);
    Report {
        title: "Tunnels side by side".to_owned(),
        subtitle: format!(
            "{} UTC, {}, {}",
            report.date,
            counted(u64::from(options.rounds), "round"),
            if options.offload {
                "link with its offloads"
            } else {
                "link without offloads"
            },
        ),
        headlines: headlines(report),
        panels: options
            .loads
            .iter()
            .filter_map(|load| panel(report, *load))
            .collect(),
        tables: tables(report),
        problems: report
            .tunnels
            .iter()
            .flat_map(|t| t.errors.iter().map(move |e| format!("{}: {e}", t.name)))
            .collect(),
        facts,
        method: method(report),
    }
}

pub(super) fn counted(count: u64, noun: &str) -> String {
    if count == 1 {
        format!("1 {noun}")
    } else {
        format!("{count} {noun}s")
    }
}

/// Our best single stream against the raw link and the best of the others.
fn headlines(report: &BenchReport) -> Vec<String> {
    let Some(&load) = report.options.loads.first() else {
        return Vec::new();
    };
    let best = |wanted: Kind| -> Option<(&TunnelReport, &LoadSummary)> {
        let tunnels = report
            .tunnels
            .iter()
            .filter(|t| Kind::of(&t.name, t.own) == wanted);
        tunnels
            .filter_map(|t| Some((t, t.load(load)?)))
            .max_by(|a, b| {
                a.1.gbit_per_second
                    .median
                    .total_cmp(&b.1.gbit_per_second.median)
            })
    };
    let Some((own, figure)) = best(Kind::Own) else {
        return Vec::new();
    };
    let speed = figure.gbit_per_second.median;
    let mut text = format!("{}: {} carries {speed:.2} Gbit/s", load.title(), own.name);
    if let Some(share) = figure.ratio_to_raw {
        text += &format!(", {share:.2} of the raw link");
    }
    if let Some((other, theirs)) = best(Kind::Other)
        && let Some(times) = ratio(speed, theirs.gbit_per_second.median)
    {
        text += &format!(
            " and {times:.1} times the fastest other tunnel, {}",
            other.name
        );
    }
    vec![text + "."]
}

fn panel(report: &BenchReport, load: Load) -> Option<Panel> {
    let several = report.options.rounds > 1;
    let has_raw = report
        .tunnels
        .iter()
        .any(|t| t.load(load).is_some_and(|l| l.ratio_to_raw.is_some()));
    let bars: Vec<Bar> = report
        .tunnels
        .iter()
        .map(|tunnel| {
            let figure = tunnel.load(load);
            let mut cells = Vec::new();
            if has_raw {
                cells.push(or_none(figure.and_then(|f| f.ratio_to_raw), 2));
            }
            let cpu = figure.and_then(|f| f.cpu_seconds_per_gbit);
            cells.push(or_none(cpu.map(|c| c.median), 3));
            let value = figure.map(|f| f.gbit_per_second);
            if several {
                cells.push(range(value, hundredths));
            }
            Bar {
                label: tunnel.name.clone(),
                kind: Kind::of(&tunnel.name, tunnel.own),
                value,
                cells,
            }
        })
        .collect();
    let columns = has_raw
        .then_some("× raw")
        .into_iter()
        .chain(["CPU s/Gbit"])
        .chain(several.then_some("range"));
    Panel::new(load.title(), "Gbit/s", columns, bars).if_any()
}

fn tables(report: &BenchReport) -> Vec<Table> {
    let rows = report.tunnels.iter().map(|t| {
        let cells = [
            t.name.clone(),
            or_none(t.ping_us.map(|p| p.median), 0),
            mebibytes(t.peak_rss),
        ];
        Row::new(Kind::of(&t.name, t.own), cells)
    });
    let columns = ["tunnel", "ping µs", "MiB"];
    let absent = Table::not_measured("tunnel", &report.absent);
    std::iter::once(Table::new("Idle latency and memory", columns, rows))
        .chain(absent)
        .collect()
}

fn method(report: &BenchReport) -> Vec<String> {
    let o = &report.options;
    let offload = if o.offload {
        "with all of its offloads, which hand 64 KiB packets over whole and flatter every figure"
    } else {
        "without segmentation, receive and checksum offload, nearer to a plain network card"
    };
    vec![
        format!("Hosts A and B are network namespaces of one machine, joined by a veth pair with an MTU of {} bytes, {offload}.", o.mtu),
        format!(
            "Every tunnel runs once per round in new hosts, rounds interleaved: {}, {} s per load. Figures are medians over rounds, ranges their smallest and largest.",
            counted(u64::from(o.rounds), "round"),
            o.seconds
        ),
        "TCP: 128 KiB writes for a warm-up of 1 s and the measured time; bytes read by the receiving program. UDP: one system call per datagram, as fast as the sender can; datagrams received once.".to_owned(),
        "CPU s/Gbit: busy CPU seconds of the whole machine, load generator included, per Gbit received. Memory: largest resident size of a process of the tunnel. Ping: mean of 200 ICMP echoes, 2 ms apart, from program to program as `ping -U`, median over rounds.".to_owned(),
    ]
}
