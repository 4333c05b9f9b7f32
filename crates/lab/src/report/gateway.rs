//! The report of a comparison of gateways.

use seikan_load::stats::{Spread, ratio};
use seikan_ui::output::counted;

use crate::bench::{self, Load, LoadSummary};
use crate::gateway::site::Nic;
use crate::gateway::{FORWARDING, GatewayReport, YARDSTICK};
use crate::report::{
    Bar, Kind, Panel, Report, Row, Table, compared, fastest, hundredths, or_none, range,
};

/// Figures of the article that this comparison repeats: row, Mbit/s, segments sent again,
/// congestion window in KB. It gives no figures for GRO off alone.
const SOURCE: [(&str, [Option<f64>; 3]); 3] = [
    ("naive-gro", [Some(1.56), Some(612.0), Some(2.57)]),
    ("naive-no-gro", [None; 3]),
    ("naive-no-gro-rps", [Some(32.6), Some(9.0), Some(266.0)]),
];

impl From<&GatewayReport> for Report {
    fn from(report: &GatewayReport) -> Self {
        let options = &report.options;
        Report {
            title: "From a device through a gateway".to_owned(),
            subtitle: format!(
                "{} UTC, {}, {}, {}",
                report.date,
                counted(options.rounds as usize, "round"),
                if options.ipv6 { "IPv6" } else { "IPv4" },
                match options.nic {
                    Nic::Plain => "a LAN of plain NICs",
                    Nic::Whole => "a LAN that hands super-packets over whole",
                },
            ),
            headlines: headlines(report),
            tables: tables(report),
            method: method(report),
            ..compared(report, &options.loads, |load| panel(report, load))
        }
    }
}

fn title(load: Load) -> String {
    match load {
        Load::Tcp1 => "TCP out of the device, 1 stream".to_owned(),
        Load::Rev => "TCP into the device, 1 stream".to_owned(),
        other => other.title().to_owned(),
    }
}

/// Ours against host-to-host and the best WireGuard, for the first load.
fn headlines(report: &GatewayReport) -> Vec<String> {
    let Some(&load) = report.options.loads.first() else {
        return Vec::new();
    };
    let rows = report.rows.iter();
    let best = fastest(
        rows.filter(|row| kind(row) == Kind::Other && !is_naive(row)),
        load,
    );
    let ours = report
        .rows
        .iter()
        .filter(|row| row.own && row.name != YARDSTICK);
    ours.filter_map(|row| {
        let figure = row.load(load)?;
        let own = figure.gbit_per_second.median;
        let mut text = format!("{}: {} carries {own:.2} Gbit/s", title(load), row.name);
        if let Some(share) = figure.ratio {
            text += &format!(", {share:.2} of host-to-host");
        }
        if let Some((other, theirs)) = best
            && let Some(times) = ratio(own, theirs.gbit_per_second.median)
        {
            text += &format!(" and {times:.1} times {}", other.name);
        }
        Some(text + ".")
    })
    .collect()
}

fn is_naive(row: &bench::Row) -> bool {
    row.name.starts_with("naive")
}

fn kind(row: &bench::Row) -> Kind {
    match row.name.as_str() {
        FORWARDING | YARDSTICK => Kind::Raw,
        _ if row.own => Kind::Own,
        _ => Kind::Other,
    }
}

fn panel(report: &GatewayReport, load: Load) -> Option<Panel> {
    let bars = report.rows.iter().map(|row| bar(row, load));
    let columns = ["× host", "retr.", "CPU s/Gbit", "range"];
    Panel::new(title(load), "Gbit/s", columns, bars).if_any()
}

fn bar(row: &bench::Row, load: Load) -> Bar {
    let figure = row.load(load);
    let median = |of: fn(&LoadSummary) -> Option<Spread>| figure.and_then(of).map(|s| s.median);
    let value = figure.map(|f| f.gbit_per_second);
    Bar {
        label: row.name.clone(),
        kind: kind(row),
        value,
        cells: vec![
            or_none(figure.and_then(|f| f.ratio), 2),
            or_none(median(|f| f.retransmitted), 0),
            or_none(median(|f| f.cpu_seconds_per_gbit), 3),
            range(value, hundredths),
        ],
    }
}

fn tables(report: &GatewayReport) -> Vec<Table> {
    let rows = report.rows.iter().map(|row| {
        let cells = [
            row.name.clone(),
            or_none(row.ping_us.map(|p| p.median), 0),
            or_none(row.added_us, 0),
        ];
        Row::new(kind(row), cells)
    });
    let columns = ["way", "ping µs", "added µs per direction"];
    let latency = Table::new("Idle latency", columns, rows);
    let naive = Table::new(
        "The naive encapsulator, out of the device, and the article's figures",
        [
            "way", "Mbit/s", "retr.", "cwnd KB", "there", "retr.", "cwnd KB",
        ],
        SOURCE.iter().filter_map(|s| with_source(report, s)),
    );
    std::iter::once(latency)
        .chain(naive.if_any())
        .chain(Table::not_measured("way", &report.absent))
        .collect()
}

fn with_source(report: &GatewayReport, (name, source): &(&str, [Option<f64>; 3])) -> Option<Row> {
    let row = report.row(name)?;
    let load = row.load(Load::Tcp1)?;
    let thousands = |spread: Option<Spread>| spread.map(|s| s.median / 1000.0);
    let here = [
        Some(load.gbit_per_second.median * 1000.0),
        load.retransmitted.map(|s| s.median),
        thousands(load.congestion_window),
    ];
    let mut cells = vec![(*name).to_owned()];
    for figures in [&here, source] {
        cells.extend(
            figures
                .iter()
                .zip([2, 0, 1])
                .map(|(&f, digits)| or_none(f, digits)),
        );
    }
    Some(Row::new(kind(row), cells))
}

fn method(report: &GatewayReport) -> Vec<String> {
    let o = &report.options;
    let lan = match o.nic {
        Nic::Plain => {
            "Device and gateway are joined by NICs (veth) without segmentation and checksum offload, so that packets of 1500 bytes cross, which the receiver's kernel merges (GRO) except in the naive rows that say otherwise."
        }
        Nic::Whole => {
            "Device and gateway are joined by a veth with all offloads, which hands super-packets over whole; the naive rows have plain NICs, across which packets of 1500 bytes go."
        }
    };
    let devices = match o.devices {
        1 => String::new(),
        n => format!(" A switch joins {n} devices, all but one idle."),
    };
    vec![
        format!(
            "Device, gateway and remote are network namespaces of one machine. {lan}{devices} Gateway and remote are joined by a veth with all offloads."
        ),
        format!(
            "Every row runs once per round in new hosts, rounds interleaved: {}, {} s per load after a warm-up of 1 s. Figures are medians over rounds, ranges their smallest and largest.",
            counted(o.rounds as usize, "round"),
            o.seconds
        ),
        format!(
            "{YARDSTICK}: two hosts that run ours themselves, on a veth with all offloads. {FORWARDING}: the kernel alone, no tunnel. retr.: TCP segments sent again, warm-up included. CPU s/Gbit: busy CPU seconds of the whole machine. Ping: median of 200 ICMP echoes, 2 ms apart; added: half the difference to {FORWARDING}."
        ),
    ]
}
