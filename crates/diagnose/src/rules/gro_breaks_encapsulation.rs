//! The kernel merges received packets, and a program that reads them from a raw socket encapsulates
//! each as a whole. The result is too long for the path: it is fragmented, and the far end cannot
//! reassemble it, or it is refused.
//!
//! Plain fragmentation by an MTU that is a little too large makes two fragments of each packet;
//! merged packets make many. Once TCP has a very small window, only two packets are merged at a
//! time: then there are as many additional fragments as merged frames.

use seikan_observe::path::LinkFacts;

use super::prelude::*;

/// Frames per packet from which packets are merged.
const MERGED: f64 = 1.2;
/// Share of fragments in outer packets from which there is harm.
const HARM: f64 = 0.01;
/// Share of fragments that stops TCP: merged packets carry much of the bytes.
const FULL_HARM: f64 = 0.1;
/// Packets refused as too big, per outer packet, with the same effect.
const REFUSED: f64 = 0.001;
/// Fragments per packet that are more than the two of an MTU that is a little too large.
const MANY: f64 = 2.5;
/// Merged frames per additional fragment of a packet: 1 if the merging causes the fragments.
const ACCOUNTS: std::ops::Range<f64> = 0.5..2.0;
/// Frame header in addition to the MTU, with two VLAN tags, bytes.
const FRAME: f64 = 22.0;
/// Weight if the program reads no raw socket.
const NOT_RAW: f64 = 0.5;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::GroBreaksEncapsulation,
    PathStep::OuterLink,
    "The kernel merges received packets, and a program that expects single packets \
     encapsulates the merged ones, which are then fragmented or lost.",
    evaluate,
)
.effects(&[Cause::OuterFragmentation, Cause::MtuBlackHole])
.counted(
    Source::Host,
    &["drop.PKT_TOO_BIG", "Ip.FragFails", "Ip6.FragFails"],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let raw = evidence.raw_sockets();
    let created = evidence
        .fragments_created()
        .ok_or("the IP counters of the host are not readable")?;
    let outside = evidence.egress(metric::TX_PACKETS).unwrap_or(0.0).max(1.0);
    let fragments = (created / outside).min(1.0);
    // The doctor's own long packets may be refused, too; drops by reason are those of the whole machine.
    let own = evidence.probes.own.packets_out as f64;
    let machine = if evidence.suffers() {
        evidence.dropped("PKT_TOO_BIG").unwrap_or(0.0)
    } else {
        0.0
    };
    let refused = (evidence.both("Ip", "FragFails").unwrap_or(0.0) + machine - own).max(0.0);
    let harm = (fragments / FULL_HARM).max(refused / outside / (10.0 * REFUSED));
    let harmed = fragments >= HARM || refused / outside >= REFUSED;
    let fragments = Fact::new(
        "share of outer packets that are fragments",
        fragments,
        "0",
        "Ip.FragCreates over tx_packets",
    );
    if !harmed {
        return fragments.excludes();
    }
    let long = long_packets(evidence);
    let factor = evidence.gro_factor().unwrap_or(1.0);
    let merged = Fact::new(
        "received frames per packet after merging",
        factor,
        "1 for a program that expects single packets",
        "IpExt.InNoECTPkts and InECT* over Ip.InReceives",
    );
    let datagrams = evidence.both("Ip", "FragOKs").filter(|n| *n > 0.0);
    let further = datagrams.map(|datagrams| created - datagrams);
    let away = (factor - 1.0) * evidence.both("Ip", "InReceives").unwrap_or(0.0);
    let accounts = raw > 0 && further.is_some_and(|n| ACCOUNTS.contains(&(away / n.max(1.0))));
    if factor < MERGED && long.is_none() && !accounts {
        return merged.excludes();
    }
    let each = datagrams.map(|datagrams| created / datagrams);
    let many = each.map(|each| {
        Fact::new(
            "fragments per fragmented packet",
            each,
            "2, if the MTU were the reason",
            "Ip.FragCreates over Ip.FragOKs",
        )
    });
    let sure = match each {
        Some(each) if accounts || each >= MANY && raw > 0 => 0.95,
        Some(each) if each >= MANY => NOT_RAW,
        // Two fragments each: the fragmented packets were not merged.
        Some(_) => return many.unwrap_or(merged).excludes(),
        // All were refused, none was fragmented.
        None if raw > 0 => 0.8,
        None => return merged.excludes(),
    };
    let mut facts = vec![merged];
    facts.extend(long.map(|(link, mean)| {
        Fact::new(
            format!("mean length of packets received on {}, bytes", link.name),
            mean,
            format!("at most {}", link.mtu),
            "rtnetlink rx_bytes over rx_packets",
        )
    }));
    facts.push(fragments);
    facts.extend(many);
    facts = facts.and(
        "raw and packet sockets of the program that do not report merged packets",
        raw as f64,
        "0",
        "/proc/net/packet, /proc/net/raw, packet_diag",
    );
    Ok(Finding::new(
        harm.min(1.0) * sure,
        facts,
        remedies(evidence),
    ))
}

/// Returns an interface that receives packets longer than its MTU: its sender does not segment them.
fn long_packets(evidence: &Evidence) -> Option<(&LinkFacts, f64)> {
    let mut links = evidence.map.links.iter().filter(|link| !is_tun(link));
    links.find_map(|link| {
        let of = |name| evidence.link(&link.name, name);
        let packets = of(metric::RX_PACKETS).filter(|packets| *packets > 0.0)?;
        let mean = of(metric::RX_BYTES)? / packets;
        (mean > f64::from(link.mtu) + FRAME).then_some((link, mean))
    })
}

/// Packets of a tun device were merged by the program that writes to it, if at all.
fn is_tun(link: &LinkFacts) -> bool {
    matches!(&*link.kind, "tun" | "tap")
}

fn remedies(evidence: &Evidence) -> Vec<Remedy> {
    let mut off = Vec::new();
    let mut spread = Vec::new();
    let cpus = &evidence.map.host.cpus;
    for link in &evidence.map.links {
        if !is_tun(link) && can_turn(link, "rx-gro", false) {
            off.push(Action::Offload {
                link: link.name.clone(),
                feature: "gro".into(),
                on: false,
            });
            if cpus.len() > 1 && link.rps.iter().all(Vec::is_empty) {
                spread.extend(super::receive::spread(evidence, link));
            }
        }
    }
    let mut remedies = Vec::new();
    if !off.is_empty() {
        // Spreading may cost more than it gains on busy processors: it comes second, together with
        // the first remedy.
        let both: Vec<Action> = off.iter().cloned().chain(spread.iter().cloned()).collect();
        remedies.push(Remedy::here(
            "turn off merging of received packets (GRO)",
            off,
            "a factor of 20 in a measured case",
        ));
        if !spread.is_empty() {
            remedies.push(Remedy::here(
                "turn off merging (GRO), and spread received packets over the processors",
                both,
                "more, if one processor is fully used by them",
            ));
        }
    }
    remedies.push(Remedy::ask(
        Location::Tunnel,
        "use a program that segments merged packets before it encapsulates them",
        vec![],
        "the same rate with less processor time",
    ));
    if let Some((link, _)) = long_packets(evidence) {
        remedies.push(Remedy::ask(
            Location::Here,
            format!(
                "turn off segmentation offload at the sender into {} (a guest, the other end of a veth pair)",
                link.name
            ),
            vec!["ethtool -K DEVICE tso off gso off".into()],
            "the same",
        ));
    }
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;
    use seikan_observe::path::Transport;

    /// Sets frames per packet, and fragments per fragmented packet.
    fn gateway(merged: u64, each: u64, transport: Transport) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.sockets = vec![socket(1, transport)];
        evidence.map.links[1].features.insert("rx-gro".into(), true);
        evidence.map.links[1].changeable = vec!["rx-gro".into()];
        for (name, growth) in [
            ("Ip.InReceives", 1_000),
            ("IpExt.InNoECTPkts", 1_000 * merged),
            ("Ip.FragCreates", 1_000 * (each - 1)),
            ("Ip.FragOKs", 1_000 * (each - 1) / each.max(1)),
        ] {
            count(&mut evidence, Subject::Host, name, growth);
        }
        count(&mut evidence, egress(), metric::TX_PACKETS, 10_000);
        evidence
    }

    #[test]
    fn merged_packets_cut_to_pieces_are_it() {
        let finding = present(evaluate(&gateway(8, 10, Transport::Raw)));
        assert_eq!(finding.weight, 0.95);
        let off = "ethtool -K eth0 gro off";
        let spread = "echo 3 > /sys/class/net/eth0/queues/rx-0/rps_cpus";
        assert_eq!(finding.remedies[0].commands, [off]);
        assert_eq!(finding.remedies[1].commands, [off, spread]);
    }

    #[test]
    fn pairs_that_are_cut_apart_again_are_it() {
        let mut evidence = gateway(1, 2, Transport::Raw);
        // 500 more fragments than fragmented packets, and 490 merged frames.
        count(&mut evidence, Subject::Host, "IpExt.InNoECTPkts", 1_490);
        assert_eq!(present(evaluate(&evidence)).weight, 0.95);
        evidence.map.sockets[0].transport = Transport::Udp;
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn long_packets_from_a_guest_are_it_without_gro() {
        let mut evidence = gateway(1, 10, Transport::Raw);
        assert!(absent(evaluate(&evidence)));
        count(&mut evidence, egress(), metric::RX_PACKETS, 1_000);
        count(&mut evidence, egress(), metric::RX_BYTES, 20_000_000);
        assert_eq!(present(evaluate(&evidence)).weight, 0.95);
    }

    #[test]
    fn an_mtu_a_little_too_large_is_not() {
        assert!(absent(evaluate(&gateway(8, 2, Transport::Udp))));
        assert!(absent(evaluate(&gateway(8, 2, Transport::Raw))));
    }

    #[test]
    fn it_is_behind_the_fragments() {
        let verdict = crate::diagnose(&gateway(8, 10, Transport::Raw));
        assert_eq!(verdict.cause, Cause::GroBreaksEncapsulation);
        assert_eq!(verdict.level, crate::Level::Supported);
    }

    #[test]
    fn merging_without_harm_is_not() {
        assert!(absent(evaluate(&gateway(8, 1, Transport::Raw))));
    }
}
