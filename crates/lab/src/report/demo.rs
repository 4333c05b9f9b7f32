//! The report of the demonstration.

use std::collections::BTreeMap;

use seikan_load::UdpReport;
use seikan_load::stats::Spread;
use seikan_ui::screen;
use serde_json::Value;

use crate::demo::{Chapter, DemoReport, DemoRow, GATEWAY};
use crate::report::{Bar, Kind, Panel, Report, Row, Table, machine_facts, mebibytes, or_none};

impl From<&DemoReport> for Report {
    fn from(report: &DemoReport) -> Self {
        let rows = &report.rows;
        Report {
            title: "Seikan between two hosts".to_owned(),
            subtitle: format!("{} UTC, one machine, two network namespaces", report.date),
            headlines: rows.iter().filter_map(headline).collect(),
            panels: [
                Some(panel(
                    "TCP, 1 stream, A to B",
                    &["× raw"],
                    rows,
                    |r| r.forward_gbit_per_second,
                    |r| vec![or_none(r.ratio_to_raw, 2)],
                )),
                Some(panel(
                    "TCP, 1 stream, B to A",
                    &["CPU s/Gbit"],
                    rows,
                    |r| r.reverse_gbit_per_second,
                    |r| vec![or_none(r.cpu_seconds_per_gbit, 3)],
                )),
                Some(panel(
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
                )),
                report.doctor.as_ref().map(stream),
            ]
            .into_iter()
            .flatten()
            .collect(),
            tables: [
                Some(latency(rows)),
                ledger(rows),
                report.doctor.as_ref().map(doctor),
            ]
            .into_iter()
            .flatten()
            .collect(),
            problems: rows
                .iter()
                .filter_map(|r| Some(format!("{}: {}", label(r), r.error.as_ref()?)))
                .chain(
                    report
                        .doctor_error
                        .iter()
                        .map(|error| format!("the doctor: {error}")),
                )
                .collect(),
            facts: machine_facts(&report.machine),
            method: method(report),
        }
    }
}

/// Returns the label of a row.
fn label(row: &DemoRow) -> &str {
    match row.name.as_str() {
        "raw" => "raw link",
        "seikan-native" => "native",
        "seikan-wireguard" => "wireguard",
        GATEWAY => "behind a gateway",
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
    if row.name == GATEWAY {
        return Some(format!(
            "From a device without Seikan, through a gateway: {speed:.2} Gbit/s{share}."
        ));
    }
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
    Panel::new(title, "Gbit/s", columns.iter().copied(), bars)
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
        Row::new(kind(row), cells)
    });
    Table::new("Latency and memory", columns, rows)
}

/// Where every packet went: the sum over both ends and both directions.
fn ledger(rows: &[DemoRow]) -> Option<Table> {
    let rows = rows.iter().filter(|row| !row.status.is_empty()).map(|row| {
        let cells = [label(row).to_owned(), ledger_line(&row.status)];
        Row::new(kind(row), cells)
    });
    let title = "Packet counts of the tunnel, both ends";
    Table::new(title, ["protocol", "packets"], rows).if_any()
}

fn ledger_line(status: &[Value]) -> String {
    let directions = || {
        let totals = status.iter().filter_map(|s| s.get("totals"));
        totals.flat_map(|t| ["outbound", "inbound"].map(|direction| &t[direction]))
    };
    let sum = |name: &str| directions().filter_map(|w| w[name].as_i64()).sum::<i64>();
    let mut drops: BTreeMap<&str, u64> = BTreeMap::new();
    for (reason, count) in directions()
        .filter_map(|w| w["drops"].as_object())
        .flatten()
    {
        *drops.entry(reason).or_default() += count.as_u64().unwrap_or(0);
    }
    let at_device: u64 = status
        .iter()
        .filter_map(|s| s["device"]["kernel"]["tx_dropped"].as_u64())
        .sum();
    let at_socket: u64 = status
        .iter()
        .filter_map(|s| s["receive_queue_drops"].as_u64())
        .sum();
    let mut text = format!(
        "{} in, {} out, {} consumed, {} dropped",
        grouped(sum("packets_in")),
        grouped(sum("packets_out")),
        grouped(sum("consumed")),
        grouped(drops.values().map(|&n| n as i64).sum()),
    );
    if !drops.is_empty() {
        let reasons: Vec<String> = drops
            .iter()
            .map(|(r, n)| format!("{r} {}", grouped(*n as i64)))
            .collect();
        text += &format!(" ({})", reasons.join(", "));
    }
    text += &format!(
        ", {} unaccounted; before it, the kernel dropped {} at the full device queue and {} at the full socket",
        grouped(sum("unaccounted")),
        grouped(at_device as i64),
        grouped(at_socket as i64),
    );
    text
}

/// The stream before, with the fault, and after the fix.
fn stream(chapter: &Chapter) -> Panel {
    let share = |value: f64| vec![format!("{:.0}", 100.0 * value / chapter.healthy.max(1e-9))];
    let bar = |label: &str, kind, value: f64| Bar {
        label: label.to_owned(),
        kind,
        value: Spread::of(&[value]),
        cells: share(value),
    };
    let title = format!(
        "A video stream of {:.0} Mbit/s through the native tunnel",
        chapter.offered
    );
    let bars = [
        bar("as it was", Kind::Raw, chapter.healthy),
        bar("broken", Kind::Other, chapter.broken),
        bar("repaired", Kind::Own, chapter.mended),
    ];
    Panel::new(title, "Mbit/s", ["%"], bars)
}

/// Returns the table of the doctor's findings.
fn doctor(chapter: &Chapter) -> Table {
    let mut rows = Vec::new();
    let mut say = |kind, label: &str, text: String| {
        rows.push(Row::new(kind, [label.to_owned(), text]));
    };
    say(
        Kind::Other,
        "the fault",
        format!(
            "its queue has {} {}; the stream has bursts of {} packets: {:.1} of {:.1} Mbit/s remain",
            chapter.queue,
            if chapter.queue == 1 {
                "packet"
            } else {
                "packets"
            },
            chapter.burst,
            chapter.broken,
            chapter.healthy,
        ),
    );
    if let Some(diagnosis) = &chapter.diagnosis {
        let named = format!("{} ({})", diagnosis.cause, diagnosis.level);
        say(Kind::Own, "the cause", named);
        say(Kind::Own, "", chapter.sentence.clone());
    }
    for (number, fact) in chapter.evidence.iter().take(2).enumerate() {
        let label = if number == 0 { "its figures" } else { "" };
        let text = format!(
            "{}: {} (normal: {})",
            fact.name,
            screen::rounded(fact.value),
            fact.expected
        );
        say(Kind::Own, label, text);
    }
    say(Kind::Own, "the fix", chapter.commands.join("; "));
    if let (Some((without, with)), Some(gain)) = (chapter.turns, chapter.gain) {
        let percent = |share: f64| 100.0 * share;
        let text = format!(
            "{without:.1} Mbit/s without, {with:.1} with, in turns: {:+.0} % ({:+.0} to {:+.0})",
            percent(gain.value),
            percent(gain.low),
            percent(gain.high),
        );
        say(Kind::Own, "tried", text);
    }
    let kept = if chapter.kept {
        "; the fix is kept"
    } else {
        ""
    };
    let repaired = format!(
        "{:.1} of {:.1} Mbit/s{kept}",
        chapter.mended, chapter.healthy
    );
    say(Kind::Own, "repaired", repaired);
    let title = "The tunnel was broken on purpose, then: `seikan doctor --fix`";
    Table::new(title, ["", "rate at the receiving application"], rows)
}

/// Formats a number with thousands separators.
fn grouped(number: i64) -> String {
    let sign = if number < 0 { "-" } else { "" };
    format!("{sign}{}", screen::number(number.unsigned_abs()))
}

fn method(report: &DemoReport) -> Vec<String> {
    vec![
        "Hosts A and B are network namespaces of this machine, joined by a veth pair with an MTU of 1500 bytes and all of its offloads; both ends of the tunnel and of the load share its cores.".to_owned(),
        format!("TCP: one stream for {} s after 0.5 s of warm-up, bytes read by the receiving program. UDP: half that time. Latency: ICMP echo, idle and during the transfer from A to B.", report.options.seconds),
        "The device is behind a gateway, one link further, and only its address is configured; the gateway uses the native protocol.".to_owned(),
        "The broken tunnel: one continuous stream of datagrams from A to B, bytes read by the receiving program; the queue is shortened until a third is lost. The doctor gets the interface and the expected rate; its changes are reverted afterwards.".to_owned(),
        "One run only: `seikan lab bench` repeats, interleaves and compares with other tunnels.".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_stand_apart() {
        let numbers = [0, 999, 1000, -1_234_567].map(grouped);
        assert_eq!(numbers, ["0", "999", "1,000", "-1,234,567"]);
    }

    #[test]
    fn the_ledger_adds_both_ends_and_both_directions() {
        let end = serde_json::json!({
            "receive_queue_drops": 2,
            "device": {"kernel": {"tx_dropped": 1}},
            "totals": {
                "outbound": {"packets_in": 100, "packets_out": 90, "consumed": 1, "unaccounted": 0, "drops": {"no_route": 9}},
                "inbound": {"packets_in": 10, "packets_out": 10, "consumed": 0, "unaccounted": 0, "drops": {}},
            },
        });
        assert_eq!(
            ledger_line(&[end.clone(), end]),
            "220 in, 200 out, 2 consumed, 18 dropped (no_route 18), 0 unaccounted; before it, the kernel dropped 2 at \
             the full device queue and 4 at the full socket"
        );
    }

    #[test]
    fn a_status_without_these_fields_does_no_harm() {
        assert!(ledger_line(&[serde_json::json!({}), serde_json::json!(7)]).starts_with("0 in"));
    }
}
