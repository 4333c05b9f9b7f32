//! The path drops large packets without an error message. Small ones pass, so connections open and
//! then stall.
//!
//! A probe of sizes proves it. Without a probe there are only symptoms of TCP: timeouts, and hardly
//! any acknowledged data, which no random loss causes.

use super::prelude::*;
use crate::MtuProbe;

/// Size that every IPv6 path carries unfragmented (RFC 8200 section 5), and nearly every IPv4 path.
const ALWAYS_PASSES: u32 = 1280;
/// Segment size that passes everywhere (RFC 9293 section 3.7.1), bytes: if such segments are lost,
/// size is not the cause.
const SMALL_SEGMENT: f64 = 536.0;
/// Weight of the symptoms of TCP alone: a dead tunnel has the same.
const UNPROBED: f64 = 0.6;
/// Weight of these symptoms if nothing is received.
const SILENT: f64 = 0.35;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::MtuBlackHole,
    PathStep::Network,
    "The path drops large packets without an error message; small ones arrive.",
    evaluate,
)
.inferred()
.counted(Source::Flows, &[metric::TCP_TIMEOUTS], Per::Second, 0.1);

fn evaluate(evidence: &Evidence) -> Judgement {
    match evidence.probes.mtu {
        Some(probe) => evaluate_probe(evidence, probe),
        None => evaluate_stall(evidence),
    }
}

fn evaluate_probe(evidence: &Evidence, probe: MtuProbe) -> Judgement {
    let passed = probe.passed.ok_or("no probe was answered")?;
    let mtu = evidence.map.inner_link().map_or(0, |link| link.mtu);
    let fact = Fact::new(
        "largest packet that passes, bytes",
        f64::from(passed),
        format!("{mtu}, the MTU of the interface"),
        "probes that may not be fragmented",
    );
    let Some(lost) = probe.lost.filter(|_| !probe.reported) else {
        return fact.excludes();
    };
    let mut facts = vec![fact].and(
        "smallest packet lost without an error message, bytes",
        f64::from(lost),
        "none",
        "probes that may not be fragmented",
    );
    let again = evidence.retransmitted();
    facts = facts.and(
        "share of segments retransmitted",
        again,
        "below 0.001",
        "tcp_info total_retrans",
    );
    facts.extend(felt(evidence));
    // Connections with smaller segments are not affected.
    let segment = evidence
        .main_flow()
        .and_then(|flow| evidence.tcp_mean(flow, metric::TCP_MSS));
    let unaffected =
        evidence.sends_tcp() && segment.is_some_and(|mss| mss + 40.0 <= f64::from(passed));
    finding(
        evidence,
        if unaffected { 0.2 } else { 0.95 },
        facts,
        Some(passed),
    )
}

fn evaluate_stall(evidence: &Evidence) -> Judgement {
    let Some(stall) = evidence.stalled() else {
        return match evidence.retransmitted() {
            Some(share) if evidence.sends_tcp() => Fact::new(
                "share of segments retransmitted while others are acknowledged",
                share,
                "near 1 with nothing acknowledged",
                "tcp_info total_retrans, bytes_acked",
            )
            .excludes(),
            _ => Err("sizes were not probed, and this host sends no TCP".into()),
        };
    };
    let stalled = Fact::new(
        "share of bytes acknowledged on connections that time out",
        stall.acknowledged / stall.sent,
        "above 0.9",
        "tcp_info bytes_acked over bytes_sent",
    );
    let segments = evidence.map.flows.iter();
    let segments = segments.filter_map(|flow| evidence.tcp_mean(flow, metric::TCP_MSS));
    if segments
        .reduce(f64::max)
        .is_some_and(|mss| mss <= SMALL_SEGMENT)
    {
        return stalled.excludes();
    }
    let back = evidence.inner(metric::RX_PACKETS).unwrap_or(0.0);
    let mut facts = vec![stalled]
        .and("timeouts", stall.timeouts, "0", "tcp_info total_rto")
        .and(
            "packets received in that time",
            back,
            "0, if the tunnel carried nothing",
            "rtnetlink rx_packets",
        );
    facts.extend(felt(evidence));
    let weight = if back > 0.0 { UNPROBED } else { SILENT };
    finding(evidence, weight, facts, None)
}

/// Returns the failures of the kernel's path MTU probing, if it is on.
fn felt(evidence: &Evidence) -> Option<Fact> {
    let failed = evidence.host("TcpExt.TCPMTUPFail")?;
    Some(Fact::new(
        "sizes that the kernel's path MTU probing gave up",
        failed,
        "0",
        "TcpExt.TCPMTUPFail",
    ))
}

fn finding(
    evidence: &Evidence,
    weight: f64,
    mut facts: Vec<Fact>,
    passed: Option<u32>,
) -> Judgement {
    facts.truncate(5);
    Ok(Finding::new(weight, facts, smaller(evidence, passed)))
}

/// Returns remedies that limit packets, by the MTU of the interface or the segment size of TCP.
pub(super) fn smaller(evidence: &Evidence, passed: Option<u32>) -> Vec<Remedy> {
    let mut remedies = Vec::new();
    let size = passed.unwrap_or(ALWAYS_PASSES);
    if let Some(link) = evidence.map.inner_link().filter(|link| link.mtu > size) {
        let six = evidence.map.flows.iter().any(|flow| flow.local.is_ipv6());
        let headers = if six { 60 } else { 40 };
        remedies.push(Remedy::here(
            format!("limit packets in the tunnel to {size} bytes"),
            vec![Action::Mtu {
                link: link.name.clone(),
                bytes: size,
            }],
            "connections no longer stall",
        ));
        remedies.push(Remedy::here(
            "limit the segment size of new connections",
            vec![Action::ClampMss {
                link: link.name.clone(),
                bytes: size.saturating_sub(headers),
            }],
            "connections no longer stall",
        ));
    }
    remedies.push(Remedy::here(
        "turn on TCP path MTU probing",
        vec![Action::Sysctl {
            name: "net.ipv4.tcp_mtu_probing".into(),
            value: "1".into(),
        }],
        "connections continue after some timeouts",
    ));
    remedies.push(Remedy::ask(
        Location::Provider,
        "let firewalls on the path pass `fragmentation needed` and `packet too big` (ICMP type 3 code 4, ICMPv6 type 2)",
        vec![],
        "every sender finds the right size",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;

    fn probed(mut evidence: Evidence, lost: Option<u32>, reported: bool) -> Evidence {
        evidence.probes.mtu = Some(MtuProbe {
            passed: Some(lost.map_or(1500, |lost| lost - 1)),
            lost,
            reported,
        });
        evidence
    }

    fn stalled() -> Evidence {
        let mut evidence = sender(20, 12, 0);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 8);
        count(&mut evidence, flow(), metric::TCP_BYTES_ACKED, 100);
        evidence
    }

    #[test]
    fn sizes_that_vanish_are_it() {
        let finding = present(evaluate(&probed(stalled(), Some(1301), false)));
        assert_eq!(finding.weight, 0.95);
        let commands = finding.remedies[0].commands.clone();
        assert_eq!(commands, ["ip link set dev tun0 mtu 1300"]);
    }

    #[test]
    fn sizes_that_are_reported_or_pass_are_not() {
        assert!(absent(evaluate(&probed(tunnel(), Some(1301), true))));
        assert!(absent(evaluate(&probed(tunnel(), None, false))));
        // Connections stall although every size passes: another cause.
        assert!(absent(evaluate(&probed(stalled(), None, false))));
    }

    #[test]
    fn connections_that_keep_below_do_not_feel_it() {
        let mut evidence = probed(sender(10_000, 0, 0), Some(1301), false);
        gauge(&mut evidence, flow(), metric::TCP_MSS, 1240);
        assert!(present(evaluate(&evidence)).weight < 0.3);
    }

    #[test]
    fn a_stall_without_a_probe_suggests_it() {
        assert_eq!(present(evaluate(&stalled())).weight, 0.6);
    }

    #[test]
    fn loss_by_chance_is_not() {
        let mut evidence = sender(10_000, 1_000, 0);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 8);
        assert!(absent(evaluate(&evidence)));
    }
}
