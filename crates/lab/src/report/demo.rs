//! The sheet of the demonstration.

use crate::demo::{DemoReport, DemoRow};
use crate::load::UdpReport;
use crate::report::{Bar, Kind, Panel, Row, Sheet, Table, machine_facts, mebibytes, or_none};
use crate::stats::Spread;

pub(super) fn sheet(report: &DemoReport) -> Sheet {
    let rows = &report.rows;
    Sheet {
        title: "Seikan between two hosts".to_owned(),
        subtitle: format!("{} UTC, one machine, two network namespaces", report.date),
        headlines: rows.iter().filter_map(headline).collect(),
        panels: vec![
            panel(
                "TCP, 1 stream, A to B",
                &["× raw"],
                rows,
                |r| r.forward_gbit_per_second,
                |r| vec![or_none(r.ratio_to_raw, 2)],
            ),
            panel(
                "TCP, 1 stream, B to A",
                &["CPU s/Gbit"],
                rows,
                |r| r.reverse_gbit_per_second,
                |r| vec![or_none(r.cpu_seconds_per_gbit, 3)],
            ),
            panel(
                "UDP flood of 1200 byte datagrams, received",
                &["lost %"],
                rows,
                |r| r.udp.map(|u| u.gbit_per_second),
                |r| {
                    vec![or_none(
                        r.udp.as_ref().map(UdpReport::loss).map(|l| l * 100.0),
                        1,
                    )]
                },
            ),
        ],
        tables: vec![latency(rows)],
        problems: rows
            .iter()
            .filter_map(|r| Some(format!("{}: {}", label(r), r.error.as_ref()?)))
            .collect(),
        facts: machine_facts(&report.machine),
        method: method(report),
    }
}

/// What a row is called here.
fn label(row: &DemoRow) -> &str {
    match row.name.as_str() {
        "raw" => "raw link",
        "seikan-native" => "native",
        "seikan-wireguard" => "wireguard",
        other => other,
    }
}

fn kind(row: &DemoRow) -> Kind {
    Kind::of(&row.name, row.name != "raw")
}

fn headline(row: &DemoRow) -> Option<String> {
    if row.name == "raw" {
        return None;
    }
    let speed = row.forward_gbit_per_second?;
    let share = row
        .ratio_to_raw
        .map(|r| format!(", {:.0} % of the raw link", r * 100.0))
        .unwrap_or_default();
    let ready = row
        .ready_ms
        .map(|ms| format!("; up after {ms:.0} ms"))
        .unwrap_or_default();
    Some(format!(
        "{} protocol: {speed:.2} Gbit/s over one encrypted TCP stream{share}{ready}.",
        label(row)
    ))
}

fn panel(
    title: &str,
    columns: &[&str],
    rows: &[DemoRow],
    value: impl Fn(&DemoRow) -> Option<f64>,
    cells: impl Fn(&DemoRow) -> Vec<String>,
) -> Panel {
    let bars = rows.iter().map(|row| Bar {
        label: label(row).to_owned(),
        kind: kind(row),
        value: value(row).and_then(|v| Spread::of(&[v])),
        cells: cells(row),
    });
    Panel {
        title: title.to_owned(),
        unit: "Gbit/s".to_owned(),
        columns: columns.iter().map(|&c| c.to_owned()).collect(),
        bars: bars.collect(),
    }
}

fn latency(rows: &[DemoRow]) -> Table {
    let columns = [
        "round trips, µs",
        "idle p50",
        "idle p99",
        "loaded p50",
        "loaded p99",
        "MiB",
    ];
    let rows = rows.iter().map(|row| {
        let mut cells = vec![label(row).to_owned()];
        for latency in [row.idle, row.loaded] {
            let answered = latency.filter(|l| l.received > 0);
            cells.push(or_none(answered.map(|l| l.p50_us), 0));
            cells.push(or_none(answered.map(|l| l.p99_us), 0));
        }
        cells.push(mebibytes(row.peak_rss));
        Row {
            kind: kind(row),
            cells,
        }
    });
    Table {
        title: "Latency and memory".to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows: rows.collect(),
    }
}

fn method(report: &DemoReport) -> Vec<String> {
    vec![
        "Hosts A and B are network namespaces of this machine, joined by a veth pair with an MTU of 1500 bytes and all of its offloads; both ends of the tunnel and of the load share its cores.".to_owned(),
        format!("TCP: one stream for {} s after 0.5 s of warm-up, bytes read by the receiving program. UDP: half that time. Latency: ICMP echo, idle and during the transfer from A to B.", report.options.seconds),
        "One run only: `seikan lab bench` repeats, interleaves and compares with other tunnels.".to_owned(),
    ]
}
