//! The two ends of the tunnel have different MTUs: one sends packets that the other truncates or refuses.
//!
//! At the end that truncates, the program reads long packets and sends less or nothing; at the
//! other end, packets are shorter than their header says. For connections both look like a black
//! hole.

use super::prelude::*;

/// Share of received packets with a wrong length from which it is not an accident.
const WRONG: f64 = 0.001;
/// Share with the full weight: if every long packet is wrong, connections stall, and even a few
/// wrong packets are a large share.
const FULL_WRONG: f64 = 0.02;
/// Fewest such packets.
const LEAST: f64 = 3.0;
/// Outer bytes per inner byte: a tunnel adds to each packet, and one below this ratio loses packets inside.
const SENT_ON: f64 = 0.9;
/// Largest overhead of a tunnel, bytes (an overlay with headers of its own and an HMAC: 92). A
/// packet that fits the outer interface with it is not refused there for its size.
const OVERHEAD: u32 = 100;
/// Weight of losses inside the program, and of drops by reason on the whole machine.
const SWALLOWED: f64 = 0.85;
/// See [`SWALLOWED`].
const MACHINE: f64 = 0.49;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::MtuMismatch,
    PathStep::InnerLink,
    "The two ends of the tunnel have different MTUs, and long packets are lost.",
    evaluate,
)
.effects(&[Cause::MtuBlackHole])
.drops_packets()
.counted(
    Source::Inner,
    &[
        metric::RX_LENGTH_ERRORS,
        metric::RX_ERRORS,
        metric::TX_ERRORS,
    ],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let host = |name| evidence.host(name).unwrap_or(0.0);
    let truncated = host("IpExt.InTruncatedPkts") + host("Ip6.InTruncatedPkts");
    let received = evidence
        .inner(metric::RX_PACKETS)
        .ok_or("the counters of the inner interface are not readable")?;
    let errors = [metric::RX_LENGTH_ERRORS, metric::RX_FRAME_ERRORS];
    let errors: f64 = errors.iter().filter_map(|name| evidence.inner(name)).sum();
    let wrong = truncated + errors;
    let share = wrong / (wrong + received).max(1.0);
    let fact = Fact::new(
        "share of received packets with a wrong length",
        share,
        "0",
        "rtnetlink rx_length_errors, rx_frame_errors; IpExt.InTruncatedPkts",
    );
    if wrong >= LEAST && share >= WRONG {
        let facts = vec![fact]
            .and(
                "packets shorter than their header says",
                truncated,
                "0",
                "IpExt.InTruncatedPkts",
            )
            .and(
                "packets refused by the interface for their length",
                errors,
                "0",
                "rtnetlink rx_length_errors, rx_frame_errors",
            );
        return finding(evidence, 0.95 * (share / FULL_WRONG).min(1.0), facts);
    }
    if !vanish(evidence) {
        return fact.excludes();
    }
    match swallowed(evidence) {
        Some(facts) => finding(evidence, SWALLOWED, facts),
        None => match evidence.dropped("PKT_TOO_SMALL") {
            Some(dropped) if dropped >= LEAST => {
                let name = "packets on this machine shorter than their header says";
                let found = Fact::new(name, dropped, "0", "skb:kfree_skb PKT_TOO_SMALL");
                finding(evidence, MACHINE, vec![found, fact])
            }
            _ => fact.excludes(),
        },
    }
}

/// Whether long packets are lost without an error message.
fn vanish(evidence: &Evidence) -> bool {
    match evidence.probes.mtu {
        Some(probe) => probe.is_black_hole(),
        None => evidence.stalled().is_some(),
    }
}

/// Returns the figures of a program that reads more than it sends, although it would fit.
fn swallowed(evidence: &Evidence) -> Option<Vec<Fact>> {
    let (inner, egress) = (evidence.map.inner_link()?, evidence.map.egress_link()?);
    let lost = evidence.probes.mtu.and_then(|probe| probe.lost);
    if lost.unwrap_or(inner.mtu) + OVERHEAD > egress.mtu {
        return None;
    }
    let taken = evidence
        .inner(metric::TX_BYTES)
        .filter(|taken| *taken > 0.0)?;
    let sent = evidence.egress(metric::TX_BYTES)? / taken;
    (sent < SENT_ON).then(|| {
        Vec::new()
            .and(
                "outer bytes sent per inner byte",
                sent,
                "above 1",
                "rtnetlink tx_bytes of both interfaces",
            )
            .and(
                "smallest packet that is lost, bytes",
                lost.map(f64::from),
                "none",
                "probes that may not be fragmented",
            )
            .and(
                "MTU of the outer interface, bytes",
                f64::from(egress.mtu),
                format!("that size and {OVERHEAD} more"),
                "rtnetlink",
            )
    })
}

fn finding(evidence: &Evidence, weight: f64, facts: Vec<Fact>) -> Judgement {
    let passed = evidence.probes.mtu.and_then(|probe| probe.passed);
    let mut remedies = vec![Remedy::ask(
        Location::Tunnel,
        "set the same MTU in the tunnel's settings and on its interface, at both ends (OpenVPN: `tun-mtu`)",
        evidence
            .map
            .inner
            .iter()
            .map(|inner| format!("ip link show dev {inner}"))
            .collect(),
        "long packets arrive",
    )];
    let smaller = super::mtu_black_hole::smaller(evidence, passed);
    remedies.extend(
        smaller
            .into_iter()
            .filter(|remedy| !remedy.actions.is_empty()),
    );
    Ok(Finding::new(weight, facts, remedies))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MtuProbe;
    use crate::losses::made::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn vanishing(sent_on: u64) -> Evidence {
        let mut evidence = sender(20, 12, 0);
        evidence.map.links[0].mtu = 1400;
        evidence.probes.mtu = Some(MtuProbe {
            passed: Some(1280),
            lost: Some(1281),
            reported: false,
        });
        count(&mut evidence, egress(), metric::TX_BYTES, sent_on);
        evidence
    }

    #[test]
    fn packets_cut_short_are_it() {
        let mut evidence = receiver(10_000, 0, 0);
        let truncated = "IpExt.InTruncatedPkts";
        count(&mut evidence, Subject::Host, truncated, 500);
        assert_eq!(present(evaluate(&evidence)).weight, 0.95);
        count(&mut evidence, Subject::Host, truncated, 2);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn length_errors_of_the_interface_are_it() {
        let mut evidence = receiver(10_000, 0, 0);
        count(&mut evidence, inner(), metric::RX_LENGTH_ERRORS, 500);
        assert_eq!(present(evaluate(&evidence)).weight, 0.95);
    }

    #[test]
    fn a_program_that_loses_packets_that_fit_is_it() {
        // 20 packets of 1500 bytes are read.
        let finding = present(evaluate(&vanishing(3_000)));
        assert_eq!(finding.weight, 0.85);
        assert_eq!(
            finding.remedies[1].commands,
            ["ip link set dev tun0 mtu 1280"]
        );
    }

    #[test]
    fn it_is_behind_the_black_hole() {
        let verdict = crate::diagnose(&vanishing(3_000));
        assert_eq!(verdict.chain, [Cause::MtuMismatch, Cause::MtuBlackHole]);
    }

    #[test]
    fn packets_lost_after_the_program_are_the_path() {
        assert!(absent(evaluate(&vanishing(32_000))));
    }

    #[test]
    fn packets_that_do_not_fit_are_refused_outside() {
        let mut evidence = vanishing(3_000);
        evidence.probes.mtu = Some(MtuProbe {
            passed: Some(1440),
            lost: Some(1441),
            reported: false,
        });
        assert!(absent(evaluate(&evidence)));
    }
}
