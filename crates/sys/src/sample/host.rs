//! The network namespace: protocol counters, pressure on processors, connection tracking.

use std::borrow::Cow;
use std::io;

use seikan_observe::metric;
use seikan_observe::{Kind, Subject};

use super::file::Counters;
use super::{Output, SampleError};

/// Fields of `/proc/net/snmp` (RFC 4293, RFC 4022) that are settings or states, not counters.
const GAUGES: [&str; 7] = [
    "Ip.Forwarding",
    "Ip.DefaultTTL",
    "Tcp.RtoAlgorithm",
    "Tcp.RtoMin",
    "Tcp.RtoMax",
    "Tcp.MaxConn",
    "Tcp.CurrEstab",
];
/// Protocols of `/proc/net/snmp6`. A longer name comes before its prefix.
const PROTOCOLS_6: [&str; 4] = ["UdpLite6", "Udp6", "Icmp6", "Ip6"];

/// The files.
#[derive(Debug)]
pub(super) struct Host {
    snmp: Counters,
    netstat: Option<Counters>,
    snmp6: Option<Counters>,
    pressure: Option<Counters>,
    tracked: Option<Counters>,
    tracked_max: Option<Counters>,
    tracking: Option<Counters>,
}

impl Host {
    /// Opens the files that exist.
    pub(super) fn open(output: &mut Output) -> Result<Self, SampleError> {
        let path = "/proc/thread-self/net/snmp";
        let snmp = Counters::open_readable(path).map_err(|source| SampleError::Proc {
            path: path.to_owned(),
            source,
        })?;
        let mut open = |what: &str, path: &str| {
            let opened = Counters::open_readable(path);
            output.keep(what, opened)
        };
        let tracking = "connection tracking";
        Ok(Host {
            snmp,
            netstat: open(
                "extended protocol counters",
                "/proc/thread-self/net/netstat",
            ),
            snmp6: open("IPv6 counters", "/proc/thread-self/net/snmp6"),
            pressure: open("pressure on processors", "/proc/pressure/cpu"),
            tracked: open(tracking, "/proc/sys/net/netfilter/nf_conntrack_count"),
            tracked_max: open(tracking, "/proc/sys/net/netfilter/nf_conntrack_max"),
            tracking: open(tracking, "/proc/thread-self/net/stat/nf_conntrack"),
        })
    }

    /// Samples the host's counters.
    pub(super) fn sample(&mut self, output: &mut Output) {
        let host = Subject::Host;
        let text = self.snmp.read();
        if let Some(text) = output.keep("protocol counters", text) {
            parse_pairs(&text, |protocol, field, value| {
                push(output, protocol, field, value);
            });
        }
        if let Some(text) = read(&mut self.netstat, "extended protocol counters", output) {
            parse_pairs(&text, |protocol, field, value| {
                if matches!(protocol, "TcpExt" | "IpExt") {
                    push(output, protocol, field, value);
                }
            });
        }
        if let Some(text) = read(&mut self.snmp6, "IPv6 counters", output) {
            parse_snmp6(&text, |protocol, field, value| {
                push(output, protocol, field, value);
            });
        }
        if let Some(text) = read(&mut self.pressure, "pressure on processors", output)
            && let Some(value) = parse_pressure(&text)
        {
            output.counter(&host, metric::PRESSURE_CPU_US, value);
        }
        let tracked = read(&mut self.tracked, "connection tracking", output);
        if let Some(value) = tracked.and_then(|text| text.trim().parse::<u64>().ok()) {
            output.gauge(&host, metric::CONNTRACK_COUNT, value);
        }
        let most = read(&mut self.tracked_max, "connection tracking", output);
        if let Some(value) = most.and_then(|text| text.trim().parse::<u64>().ok()) {
            output.gauge(&host, metric::CONNTRACK_MAX, value);
        }
        if let Some(text) = read(&mut self.tracking, "connection tracking", output) {
            for (column, name) in [
                ("insert_failed", metric::CONNTRACK_INSERT_FAILED),
                ("drop", metric::CONNTRACK_DROP),
            ] {
                if let Some(value) = parse_tracking(&text, column) {
                    output.counter(&host, name, value);
                }
            }
        }
    }
}

fn read<'a>(
    file: &'a mut Option<Counters>,
    name: &str,
    output: &mut Output,
) -> Option<Cow<'a, str>> {
    let text: io::Result<Cow<'a, str>> = file.as_mut()?.read();
    output.keep(name, text)
}

fn push(output: &mut Output, protocol: &str, field: &str, value: u64) {
    let mut name = String::with_capacity(protocol.len() + 1 + field.len());
    name.push_str(protocol);
    name.push('.');
    name.push_str(field);
    let kind = if GAUGES.contains(&name.as_str()) {
        Kind::Gauge
    } else {
        Kind::Counter
    };
    output.push(&Subject::Host, name, kind, value);
}

/// Parses pairs of lines, `Protocol: Field ...` and `Protocol: value ...`. Values that are no
/// counts, such as the -1 of an unlimited `MaxConn`, are skipped.
fn parse_pairs(text: &str, mut each: impl FnMut(&str, &str, u64)) {
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let Some((protocol, names)) = names.split_once(':') else {
            return;
        };
        let Some(values) = values
            .strip_prefix(protocol)
            .and_then(|v| v.strip_prefix(':'))
        else {
            return;
        };
        for (name, value) in names
            .split_ascii_whitespace()
            .zip(values.split_ascii_whitespace())
        {
            if let Ok(value) = value.parse() {
                each(protocol, name, value);
            }
        }
    }
}

/// Parses lines such as `Ip6InReceives  4`.
fn parse_snmp6(text: &str, mut each: impl FnMut(&str, &str, u64)) {
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(name), Some(Ok(value))) = (words.next(), words.next().map(str::parse)) else {
            continue;
        };
        let protocol = PROTOCOLS_6.iter().find(|p| name.starts_with(**p));
        if let Some(protocol) = protocol {
            each(protocol, &name[protocol.len()..], value);
        }
    }
}

/// Returns the total of the line `some` in microseconds (Documentation/accounting/psi.rst).
fn parse_pressure(text: &str) -> Option<u64> {
    let mut lines = text.lines();
    let some = lines.find_map(|line| line.strip_prefix("some "))?;
    let mut words = some.split_ascii_whitespace();
    words
        .find_map(|word| word.strip_prefix("total="))?
        .parse()
        .ok()
}

/// Returns the sum of a column over all processors. The first line has the names of the columns;
/// the values are hexadecimal.
fn parse_tracking(text: &str, column: &str) -> Option<u64> {
    let mut lines = text.lines();
    let mut names = lines.next()?.split_ascii_whitespace();
    let index = names.position(|name| name == column)?;
    let mut values = lines.map(|line| {
        let value = line.split_ascii_whitespace().nth(index)?;
        u64::from_str_radix(value, 16).ok()
    });
    values.try_fold(0u64, |sum, value| Some(sum.saturating_add(value?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format of `/proc/net/snmp` and `/proc/net/netstat`, shortened.
    const SNMP: &str = "Ip: Forwarding DefaultTTL InReceives\nIp: 1 64 40211\n\
         Tcp: RtoAlgorithm MaxConn CurrEstab RetransSegs\nTcp: 1 -1 3 17\n\
         Udp: InDatagrams NoPorts RcvbufErrors\nUdp: 5 6 7\n";

    fn pairs(text: &str) -> Vec<(String, u64)> {
        let mut found = Vec::new();
        parse_pairs(text, |p, f, v| found.push((format!("{p}.{f}"), v)));
        found
    }

    #[test]
    fn fields_carry_their_protocol() {
        let found = pairs(SNMP);
        assert!(found.contains(&("Udp.RcvbufErrors".into(), 7)));
        assert!(found.contains(&("Ip.InReceives".into(), 40211)));
        assert!(found.contains(&("Tcp.RetransSegs".into(), 17)));
    }

    #[test]
    fn values_that_are_no_counts_are_skipped() {
        assert!(pairs(SNMP).iter().all(|(name, _)| name != "Tcp.MaxConn"));
        assert_eq!(pairs("Ip: A B\nTcp: 1 2\n"), []);
        assert_eq!(pairs("Ip: A B\nIp: 1\n"), [("Ip.A".into(), 1)]);
        assert_eq!(pairs("Ip: A B\n"), []);
    }

    #[test]
    fn states_are_gauges() {
        let mut output = Output::default();
        push(&mut output, "Tcp", "CurrEstab", 3);
        push(&mut output, "Tcp", "RetransSegs", 17);
        let kinds: Vec<Kind> = output.values.iter().map(|(_, kind, _)| *kind).collect();
        assert_eq!(kinds, [Kind::Gauge, Kind::Counter]);
    }

    #[test]
    fn ipv6_names_are_split_after_the_protocol() {
        let text = "Ip6InReceives                   \t4\nIcmp6InErrors\t2\nUdp6RcvbufErrors 9\n\
                    UdpLite6InDatagrams 1\nUdp6X\nOther6X 5\nIp6Y z\n";
        let mut found = Vec::new();
        parse_snmp6(text, |p, f, v| found.push((format!("{p}.{f}"), v)));
        let expected = [
            ("Ip6.InReceives", 4),
            ("Icmp6.InErrors", 2),
            ("Udp6.RcvbufErrors", 9),
            ("UdpLite6.InDatagrams", 1),
        ];
        assert_eq!(
            found,
            expected.map(|(name, value)| (name.to_owned(), value))
        );
    }

    #[test]
    fn pressure_is_the_total_of_some() {
        let text = "some avg10=12.56 avg60=9.93 avg300=5.56 total=15442664173\n\
                    full avg10=0.00 avg60=0.00 avg300=0.00 total=8\n";
        assert_eq!(parse_pressure(text), Some(15_442_664_173));
        assert_eq!(parse_pressure("full total=8\n"), None);
        assert_eq!(parse_pressure("some total=\n"), None);
    }

    #[test]
    fn tracking_is_hexadecimal_and_summed_over_processors() {
        // Columns before and after Linux 5.10 ("searched" and "ignore" were removed, "clashres" was
        // added).
        let old = "entries  searched found insert insert_failed drop early_drop\n\
                   00000003  00000000 00000000 00000000 0000000a 00000001 00000000\n\
                   00000003  00000000 00000000 00000000 00000010 00000002 00000000\n";
        let new = "entries  clashres found insert insert_failed drop early_drop\n\
                   00000003  00000000 00000000 00000000 000000ff 00000000 00000000\n";
        assert_eq!(parse_tracking(old, "insert_failed"), Some(26));
        assert_eq!(parse_tracking(old, "drop"), Some(3));
        assert_eq!(parse_tracking(new, "insert_failed"), Some(255));
        assert_eq!(parse_tracking("entries\n0001\n", "drop"), None);
        assert_eq!(parse_tracking("drop\nxyz\n", "drop"), None);
    }
}
