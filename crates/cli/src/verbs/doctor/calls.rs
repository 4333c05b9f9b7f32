//! Table of the calls of kernel functions per packet, for `--verbose` with level 3.

use seikan_diagnose::Evidence;

use crate::screen::rounded;
use crate::screen::{Align, BOLD, RESET, Screen, Table, number};

/// Returns the table, the most frequent function first; empty if no calls were counted.
pub fn render(evidence: &Evidence) -> String {
    let mut calls = evidence.all_calls();
    if calls.is_empty() {
        return String::new();
    }
    calls.sort_by(|a, b| b.1.total_cmp(&a.1));
    let packets = evidence.packets() * evidence.seconds();
    let mut table = Table::new(&[
        ("kernel function", Align::Left),
        ("calls", Align::Right),
        ("per packet", Align::Right),
    ]);
    for (function, calls) in calls {
        let per_packet = if packets > 0.0 {
            rounded(calls / packets)
        } else {
            String::new()
        };
        table.row(vec![function.into(), number(calls as u64), per_packet]);
    }
    let title = match &evidence.map.inner {
        Some(inner) => format!("calls of the whole machine, and per packet through {inner}"),
        None => "calls of the whole machine".into(),
    };
    let mut screen = Screen(format!("\n{BOLD}{title}{RESET}\n"));
    table.write(&mut screen);
    screen.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::screen::plain;
    use seikan_observe::{Key, Kind, Sample, Subject, metric};
    use std::time::Duration;

    #[test]
    fn calls_are_shown_per_packet_of_both_directions() {
        let mut evidence = Evidence::default();
        assert_eq!(render(&evidence), "");
        evidence.map.inner = Some("tun0".into());
        let link = || Subject::Link("tun0".into());
        for (second, grown) in [(0, 0), (2, 1)] {
            let counters = [
                (link(), metric::TX_PACKETS.to_owned(), 3000),
                (link(), metric::RX_PACKETS.to_owned(), 1000),
                (Subject::Host, "call.futex_wake".to_owned(), 50),
                (Subject::Host, "call.udp_sendmsg".to_owned(), 3000),
            ];
            let values = counters.map(|(subject, name, value)| {
                (Key::new(subject, name), Kind::Counter, value * grown)
            });
            evidence.series.push(Sample {
                at: Duration::from_secs(second),
                values: values.into(),
            });
        }
        let expected = "
calls of the whole machine, and per packet through tun0
  kernel function  calls  per packet
  udp_sendmsg      3,000        0.75
  futex_wake          50      0.0125
";
        assert_eq!(plain(&render(&evidence)), expected);
    }
}
