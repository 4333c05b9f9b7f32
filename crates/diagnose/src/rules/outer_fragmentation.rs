//! The tunnel's packets are larger than the path allows and are fragmented: twice the packets, and
//! one lost fragment loses the whole packet.

use super::calls::per_packet;
use super::prelude::*;

/// Share of fragments in outer packets from which it is not an accident.
const FRAGMENTS: f64 = 0.01;
/// Share in a one-way transfer whose every packet has two fragments, with acknowledgements counted.
const FULL: f64 = 0.5;
/// Outer packets per inner packet below which outer packets are not fragmented: the fragments are
/// those of large datagrams inside the tunnel.
const CUT: f64 = 1.15;
/// Largest overhead of a tunnel, bytes (an overlay with headers of its own and an HMAC: 92).
const OVERHEAD: u32 = 100;
/// Smallest MTU of an IPv6 path (RFC 8200 section 5), bytes.
const LEAST: u32 = 1280;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::OuterFragmentation,
    PathStep::OuterLink,
    "The tunnel's packets are larger than the path allows and are fragmented.",
    evaluate,
)
// A lost fragment loses the whole packet. Each fragment costs as much work as a packet, most of
// it within the program's calls.
.effects(&[
    Cause::PathLoss,
    Cause::FramePerSyscall,
    Cause::SingleThreadSaturated,
])
.counted(
    Source::Host,
    &[
        "Ip.FragCreates",
        "Ip.ReasmReqds",
        "Ip6.FragCreates",
        "Ip6.ReasmReqds",
    ],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (created, arrived) = evidence
        .fragments_created()
        .zip(evidence.fragments_received())
        .ok_or("the IP counters of the host are not readable")?;
    let share = |fragments: f64, name| match evidence.egress(name) {
        Some(packets) if packets > 0.0 => (fragments / packets).min(1.0),
        // Without an interface to compare with, any number of fragments counts.
        _ => f64::from(u8::from(fragments / evidence.seconds() > 1.0)) * FULL / 2.0,
    };
    let (sent, received) = (
        share(created, metric::TX_PACKETS),
        share(arrived, metric::RX_PACKETS),
    );
    let largest = sent.max(received);
    let fact = Fact::new(
        "share of outer packets that are fragments",
        largest,
        "0",
        "Ip.FragCreates and Ip.ReasmReqds, both IP versions",
    );
    if largest < FRAGMENTS {
        return fact.excludes();
    }
    let cut = packets_outside(evidence, sent >= received);
    let mut facts = vec![fact].and(
        "outer packets per inner packet",
        cut,
        "about 1",
        "rtnetlink packets of both interfaces",
    );
    facts.extend(counted(evidence, sent >= received));
    facts = facts.and(
        "packets that could not be reassembled",
        evidence.both("Ip", "ReasmFails"),
        "0",
        "Ip.ReasmFails",
    );
    let inside = cut.is_some_and(|cut| cut < CUT);
    Ok(Finding::new(
        0.9 * (largest / FULL).min(1.0) * if inside { 0.25 } else { 1.0 },
        facts,
        remedies(evidence),
    ))
}

/// Returns the fragmented packets, or the fragments received, in any namespace of the tunnel's outside.
fn counted(evidence: &Evidence, sends: bool) -> Option<Fact> {
    let (name, functions, packets): (_, &[_], _) = if sends {
        (
            "packets fragmented by the kernel, per inner packet",
            &["ip_do_fragment", "ip6_fragment"],
            metric::TX_PACKETS,
        )
    } else {
        (
            "fragments received by the kernel, per inner packet",
            &["ip_defrag"],
            metric::RX_PACKETS,
        )
    };
    per_packet(evidence, name, functions, evidence.inner(packets), "0")
}

fn packets_outside(evidence: &Evidence, sends: bool) -> Option<f64> {
    let name = if sends {
        metric::TX_PACKETS
    } else {
        metric::RX_PACKETS
    };
    let inner = evidence.inner(name).filter(|packets| *packets > 0.0)?;
    Some(evidence.egress(name)? / inner)
}

fn remedies(evidence: &Evidence) -> Vec<Remedy> {
    let mut remedies = Vec::new();
    if let (Some(inner), Some(egress)) = (evidence.map.inner_link(), evidence.map.egress_link()) {
        let fits = egress.mtu.saturating_sub(OVERHEAD).max(LEAST);
        // If the packets fit the interface, a later hop is smaller.
        let fits = if inner.mtu > fits { fits } else { LEAST };
        if inner.mtu > fits {
            remedies.push(Remedy::here(
                format!("limit packets in the tunnel to {fits} bytes"),
                vec![Action::Mtu {
                    link: inner.name.clone(),
                    bytes: fits,
                }],
                "half the outer packets, and no loss of a packet by one lost fragment",
            ));
        }
    }
    remedies.push(Remedy::ask(
        Location::FarEnd,
        "set the same MTU of the tunnel's interface there",
        vec![],
        "the same for the other direction",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn fragments(created: u64, inside: u64, outside: u64) -> Evidence {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "Ip.FragCreates", created);
        count(&mut evidence, Subject::Host, "Ip.ReasmReqds", 0);
        count(&mut evidence, inner(), metric::TX_PACKETS, inside);
        count(&mut evidence, egress(), metric::TX_PACKETS, outside);
        evidence
    }

    #[test]
    fn packets_cut_in_two_are_it() {
        let finding = present(evaluate(&fragments(20_000, 10_000, 20_000)));
        assert_eq!(finding.weight, 0.9);
        assert_eq!(
            finding.remedies[0].commands,
            ["ip link set dev tun0 mtu 1400"]
        );
    }

    #[test]
    fn fragmented_packets_are_shown_if_they_were_counted() {
        let mut evidence = fragments(20_000, 10_000, 20_000);
        count(&mut evidence, Subject::Host, "call.ip_do_fragment", 10_000);
        count(&mut evidence, Subject::Host, "call.ip_defrag", 50);
        let facts = present(evaluate(&evidence)).facts;
        let cut = facts
            .iter()
            .find(|fact| fact.name.contains("fragmented by the kernel"));
        assert_eq!(cut.map(|fact| fact.value), Some(1.0));
    }

    #[test]
    fn received_fragments_count_in_both_versions() {
        let mut evidence = fragments(0, 10_000, 10_000);
        count(&mut evidence, Subject::Host, "Ip6.ReasmReqds", 20_000);
        count(&mut evidence, inner(), metric::RX_PACKETS, 10_000);
        count(&mut evidence, egress(), metric::RX_PACKETS, 20_000);
        assert_eq!(present(evaluate(&evidence)).weight, 0.9);
    }

    #[test]
    fn no_fragments_are_not() {
        assert!(absent(evaluate(&fragments(10, 10_000, 10_000))));
    }

    #[test]
    fn fragments_inside_the_tunnel_are_not() {
        let finding = present(evaluate(&fragments(10_000, 10_000, 10_000)));
        assert!(finding.weight < 0.3);
    }
}
