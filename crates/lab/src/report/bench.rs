//! The report of a comparison.

use seikan_load::stats::ratio;
use seikan_ui::output::counted;

use crate::bench::{self, BenchReport, Load};
use crate::report::{
    Bar, Kind, Panel, Report, Row, Table, compared, fastest, hundredths, mebibytes, or_none, range,
};

impl From<&BenchReport> for Report {
    fn from(report: &BenchReport) -> Self {
        let options = &report.options;
        Report {
            title: "Tunnels side by side".to_owned(),
            subtitle: format!(
                "{} UTC, {}, {}",
                report.date,
                counted(options.rounds as usize, "round"),
                if options.offload {
                    "link with its offloads"
                } else {
                    "link without offloads"
                },
            ),
            headlines: headlines(report).into_iter().collect(),
            tables: tables(report),
            method: method(report),
            ..compared(report, &options.loads, |load| panel(report, load))
        }
    }
}

/// Our best single stream against the raw link and the best of the others.
fn headlines(report: &BenchReport) -> Option<String> {
    let load = *report.options.loads.first()?;
    let best = |wanted: Kind| {
        let rows = report.rows.iter();
        fastest(rows.filter(|row| kind(row) == wanted), load)
    };
    let (own, figure) = best(Kind::Own)?;
    let speed = figure.gbit_per_second.median;
    let mut text = format!("{}: {} carries {speed:.2} Gbit/s", load.title(), own.name);
    if let Some(share) = figure.ratio {
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
    Some(text + ".")
}

fn kind(row: &bench::Row) -> Kind {
    Kind::of(&row.name, row.own)
}

fn panel(report: &BenchReport, load: Load) -> Option<Panel> {
    let several = report.options.rounds > 1;
    let figures = report.rows.iter().filter_map(|row| row.load(load));
    let has_raw = figures.into_iter().any(|figure| figure.ratio.is_some());
    let bars = report.rows.iter().map(|row| {
        let figure = row.load(load);
        let value = figure.map(|f| f.gbit_per_second);
        let cpu = figure.and_then(|f| f.cpu_seconds_per_gbit);
        let raw = has_raw.then(|| or_none(figure.and_then(|f| f.ratio), 2));
        let cells = raw.into_iter().chain([or_none(cpu.map(|c| c.median), 3)]);
        let cells = cells.chain(several.then(|| range(value, hundredths)));
        Bar {
            label: row.name.clone(),
            kind: kind(row),
            value,
            cells: cells.collect(),
        }
    });
    let columns = has_raw
        .then_some("× raw")
        .into_iter()
        .chain(["CPU s/Gbit"])
        .chain(several.then_some("range"));
    Panel::new(load.title(), "Gbit/s", columns, bars).if_any()
}

fn tables(report: &BenchReport) -> Vec<Table> {
    let rows = report.rows.iter().map(|t| {
        let cells = [
            t.name.clone(),
            or_none(t.ping_us.map(|p| p.median), 0),
            mebibytes(t.peak_rss),
        ];
        Row::new(kind(t), cells)
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
        format!("Hosts A and B are network namespaces of one machine, joined by a veth pair with an MTU of 1500 bytes, {offload}."),
        format!(
            "Every tunnel runs once per round in new hosts, rounds interleaved: {}, {} s per load. Figures are medians over rounds, ranges their smallest and largest.",
            counted(o.rounds as usize, "round"),
            o.seconds
        ),
        "TCP: 128 KiB writes for a warm-up of 1 s and the measured time; bytes read by the receiving program. UDP: one system call per datagram, as fast as the sender can; datagrams received once.".to_owned(),
        "CPU s/Gbit: busy CPU seconds of the whole machine, load generator included, per Gbit received. Memory: largest resident size of a process of the tunnel. Ping: mean of 200 ICMP echoes, 2 ms apart, from program to program as `ping -U`, median over rounds.".to_owned(),
    ]
}
