//! A network card or driver damages or loses packets that it has to checksum or segment.
//!
//! The receiving end counts wrong checksums. At the sending end, connections stall although single
//! packets of every size pass: only super-packets are lost.

use seikan_observe::path::LinkFacts;

use super::prelude::*;

/// Share of packets with a wrong checksum that is not noise: cables and radios have their own
/// checks, and less than one damaged packet in a hundred thousand gets past them (Stone and
/// Partridge 2000).
const DAMAGED: f64 = 0.000_5;
/// Share that stops TCP, as any loss.
const FULL_DAMAGED: f64 = 0.01;
/// Weight of a stall if single packets of every size pass: only segmentation is left.
const STALLED: f64 = 0.7;
/// Weight if some segments are acknowledged; heavy loss has the same effect, but a probe of every
/// size would lose some.
const HALTED: f64 = 0.6;
/// Weight without a probe: a size limit of single packets is more likely.
const UNPROBED: f64 = 0.25;
/// Share of retransmissions if only the first segment after each timeout passes: a third and more.
/// A random loss of this size is rare.
const HALTING: f64 = 0.15;
/// Number of timeouts that is no accident.
const SEVERAL: f64 = 3.0;
/// Largest weight of checksum drops of the whole machine, and only if connections through the
/// tunnel lose packets: they may belong to other traffic.
const MACHINE: f64 = 0.49;
/// Reasons of the kernel for drops of damaged packets.
const REASONS: &[&str] = &["TCP_CSUM", "UDP_CSUM", "IP_CSUM", "SKB_CSUM", "ICMP_CSUM"];

pub(super) const SPEC: Spec = Spec::fault(
    Cause::OffloadBroken,
    PathStep::OuterLink,
    "A network card or driver damages or loses packets that it has to segment or checksum.",
    evaluate,
)
// Damaged packets are retransmitted.
.effects(&[Cause::PathLoss])
.drops_packets()
.counted(
    Source::Host,
    &[
        "Tcp.InCsumErrors",
        "Udp.InCsumErrors",
        "Udp6.InCsumErrors",
        "Icmp.InCsumErrors",
    ],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (damaged, all) = evidence
        .damaged()
        .ok_or("the checksum counters of the host are not readable")?;
    let headers = evidence.host("IpExt.InCsumErrors").unwrap_or(0.0);
    let share = (damaged + headers) / (all + headers).max(1.0);
    let fact = Fact::new(
        "share of received packets with a wrong checksum",
        share,
        "0",
        "Tcp.InCsumErrors, Udp.InCsumErrors, IpExt.InCsumErrors",
    );
    if share >= DAMAGED {
        return receiving(evidence, fact, share);
    }
    if let Some(finding) = on_this_machine(evidence, &fact) {
        return finding;
    }
    sending(evidence).unwrap_or(fact.excludes())
}

/// Returns the finding of the sending end.
fn sending(evidence: &Evidence) -> Option<Judgement> {
    let cutters = links_with(evidence, &["tx-tcp-segmentation"]);
    if cutters.is_empty() || !evidence.sends_tcp() {
        return None;
    }
    let stalled = evidence.stalled().is_some();
    let again = evidence.retransmitted()?;
    // After each timeout single segments pass until two are in flight: so some are acknowledged.
    let timeouts = evidence.flows(metric::TCP_TIMEOUTS).unwrap_or(0.0);
    let halting = again >= HALTING && timeouts >= SEVERAL;
    let weight = match evidence.probes.mtu {
        Some(probe) if probe.passed.is_none() || probe.lost.is_some() => return None,
        Some(_) if stalled => STALLED,
        Some(_) if halting => HALTED,
        None if stalled || halting => UNPROBED,
        _ => return None,
    };
    let facts = Vec::new()
        .and(
            "share of segments retransmitted",
            again,
            "below 0.001",
            "tcp_info total_retrans",
        )
        .and("timeouts", timeouts, "0", "tcp_info total_rto")
        .and(
            "interfaces that segment super-packets in hardware",
            cutters.len() as f64,
            "0, as a test",
            "ethtool features",
        );
    Some(finding(weight, facts, vec![off(&cutters, "tso")]))
}

fn receiving(evidence: &Evidence, fact: Fact, share: f64) -> Judgement {
    let counted = |name: &str, value: Option<f64>| {
        Some(Fact::new(
            format!("of these, {name}"),
            value?,
            "0",
            format!("{name}.InCsumErrors"),
        ))
    };
    let tcp = evidence.host("Tcp.InCsumErrors");
    let udp = evidence.both("Udp", "InCsumErrors");
    let mut facts = vec![fact];
    facts.extend(counted("Tcp", tcp));
    facts.extend(counted("Udp", udp));
    // The tunnel's own packets are damaged outside of the tunnel, packets of inner connections
    // behind it.
    let outside = udp.unwrap_or(0.0) > tcp.unwrap_or(0.0) || evidence.outer_tcp();
    let device = if outside {
        "the outer network card of the far end"
    } else {
        "the far end's tunnel interface, or the guest that sends behind it"
    };
    let remedies = vec![
        Remedy::ask(
            Location::FarEnd,
            format!("turn off checksum and segmentation offload at {device}"),
            vec!["ethtool -K DEVICE tx off tso off".into()],
            "no packets are damaged, for more processor time",
        ),
        Remedy::ask(
            Location::Provider,
            "update the driver or firmware of that card",
            vec!["ethtool -i DEVICE".into()],
            "the offload can stay on",
        ),
    ];
    finding(0.95 * (share / FULL_DAMAGED).min(1.0), facts, remedies)
}

/// Returns the finding by damaged packets dropped in any namespace of this machine, as of a guest
/// or container.
fn on_this_machine(evidence: &Evidence, received: &Fact) -> Option<Judgement> {
    let reasons = REASONS.iter();
    let dropped: f64 = reasons.filter_map(|reason| evidence.dropped(reason)).sum();
    let sent = evidence.inner(metric::TX_PACKETS)?;
    let share = dropped / (dropped + sent).max(1.0);
    if share < DAMAGED || !evidence.suffers() {
        return None;
    }
    let facts = vec![
        Fact::new(
            "share of sent packets dropped on this machine for their checksum",
            share,
            "0",
            "skb:kfree_skb TCP_CSUM, UDP_CSUM, IP_CSUM, SKB_CSUM",
        ),
        Fact::new(
            "share of segments retransmitted",
            evidence.retransmitted().unwrap_or(0.0),
            "below 0.001",
            "tcp_info total_retrans",
        ),
        received.clone(),
    ];
    let summing = links_with(evidence, &["tx-checksum-ip-generic", "tx-checksum-ipv4"]);
    let weight = MACHINE * (share / FULL_DAMAGED).min(1.0);
    Some(finding(weight, facts, vec![off(&summing, "tx")]))
}

fn finding(weight: f64, facts: Vec<Fact>, remedies: Vec<Remedy>) -> Judgement {
    let some = |remedy: &Remedy| !remedy.commands.is_empty();
    Ok(Finding::new(
        weight,
        facts,
        remedies.into_iter().filter(some).collect(),
    ))
}

/// Returns the interfaces with one of these features on that can be turned off.
fn links_with<'a>(evidence: &'a Evidence, features: &[&str]) -> Vec<&'a LinkFacts> {
    let on = |link: &&LinkFacts| features.iter().any(|name| can_turn(link, name, false));
    evidence.map.links.iter().filter(on).collect()
}

fn off(links: &[&LinkFacts], word: &str) -> Remedy {
    let off = |link: &&LinkFacts| Action::Offload {
        link: link.name.clone(),
        feature: word.to_owned(),
        on: false,
    };
    Remedy::here(
        "let the kernel segment or checksum instead of the network card",
        links.iter().map(off).collect(),
        "no packets are damaged, for more processor time",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MtuProbe;
    use crate::losses::made::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn damaged(mut evidence: Evidence, packets: u64) -> Evidence {
        count(&mut evidence, Subject::Host, "Tcp.InSegs", 10_000);
        count(&mut evidence, Subject::Host, "Tcp.InCsumErrors", packets);
        evidence
    }

    fn stalled_sender(lost: Option<u32>) -> Evidence {
        let mut evidence = damaged(sender(20, 12, 0), 0);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 8);
        count(&mut evidence, flow(), metric::TCP_BYTES_ACKED, 100);
        let link = &mut evidence.map.links[1];
        link.features.insert("tx-tcp-segmentation".into(), true);
        link.changeable = vec!["tx-tcp-segmentation".into()];
        evidence.probes.mtu = Some(MtuProbe {
            passed: Some(lost.map_or(1500, |lost| lost - 1)),
            lost,
            reported: false,
        });
        evidence
    }

    #[test]
    fn wrong_checksums_are_it() {
        assert_eq!(present(evaluate(&damaged(tunnel(), 500))).weight, 0.95);
        assert!(present(evaluate(&damaged(tunnel(), 20))).weight < 0.3);
    }

    #[test]
    fn a_single_wrong_checksum_is_not() {
        assert!(absent(evaluate(&damaged(tunnel(), 2))));
    }

    #[test]
    fn super_packets_that_vanish_while_single_ones_pass_are_it() {
        let finding = present(evaluate(&stalled_sender(None)));
        assert_eq!(finding.weight, STALLED);
        assert_eq!(finding.remedies[0].commands, ["ethtool -K eth0 tso off"]);
    }

    #[test]
    fn connections_that_halt_again_and_again_suggest_it() {
        let mut evidence = stalled_sender(None);
        count(&mut evidence, flow(), metric::TCP_BYTES_ACKED, 12_000);
        assert_eq!(present(evaluate(&evidence)).weight, HALTED);
        evidence.probes.mtu = None;
        assert_eq!(present(evaluate(&evidence)).weight, UNPROBED);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 0);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn if_single_large_ones_vanish_too_it_is_not() {
        assert!(absent(evaluate(&stalled_sender(Some(1301)))));
    }

    #[test]
    fn damage_found_elsewhere_on_the_machine_is_it_when_sending() {
        let mut evidence = damaged(sender(10_000, 200, 0), 0);
        count(&mut evidence, Subject::Host, "drop.TCP_CSUM", 200);
        let link = &mut evidence.map.links[0];
        link.features.insert("tx-checksum-ip-generic".into(), true);
        link.changeable = vec!["tx-checksum-ip-generic".into()];
        let finding = present(evaluate(&evidence));
        assert_eq!(finding.weight, MACHINE);
        assert_eq!(finding.remedies[0].commands, ["ethtool -K tun0 tx off"]);
    }
}
