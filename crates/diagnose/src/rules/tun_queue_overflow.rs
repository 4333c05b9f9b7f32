//! The ring between the kernel and the program of a tun device is full, so packets are dropped
//! there. The queueing discipline above it does not count these drops.
//!
//! A short ring is a cause of its own: a few packets fill it, with any reader. A ring of the usual
//! length is full because its reader is late; then the overflow is an effect and weighs less.

use seikan_observe::path::LinkFacts;

use super::prelude::*;

/// Share of dropped packets from which TCP suffers: at 1 in 1,000, one connection over 1 ms of
/// round trip is still fast (Mathis et al. 1997).
const LOSS: f64 = 0.001;
/// Loss that stops most connections: one in a hundred.
const HEAVY_LOSS: f64 = 0.01;
/// Recommended length, packets.
const GOOD_LENGTH: u32 = 1000;
/// Length up to which a ring (the former default of OpenVPN) holds a millisecond or two of a
/// gigabit: too short for a reader that sleeps occasionally. Below half of this length, no other
/// cause is needed.
const SHORT: f64 = 100.0;
/// The kernel's default (drivers/net/tun.c): an overflow of such a ring means a late reader.
const USUAL: f64 = 500.0;
/// Weight of an overflow that is the effect of a late reader.
const CONSEQUENCE: f64 = 0.4;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::TunQueueOverflow,
    PathStep::InnerLink,
    "The queue of the tunnel's interface is too short: packets are dropped before the tunnel's \
     program reads them.",
    evaluate,
)
.drops_packets()
.counted(Source::Inner, &[metric::TX_DROPPED], Per::Packet, FEW);

fn evaluate(evidence: &Evidence) -> Judgement {
    let link = evidence
        .map
        .inner_link()
        .filter(|link| matches!(&*link.kind, "tun" | "tap"))
        .ok_or("the inner interface is not a tun device")?;
    let (dropped, sent) = evidence
        .inner(metric::TX_DROPPED)
        .zip(evidence.inner(metric::TX_PACKETS))
        .ok_or_else(|| format!("the counters of {} are not readable", link.name))?;
    let share = dropped / (dropped + sent).max(1.0);
    let facts = facts(evidence, link, share, dropped);
    if share < LOSS {
        return weighted(0.0, facts, Vec::new());
    }
    let usual = Ramp::new(SHORT, USUAL).at(f64::from(link.queue_length));
    // A tun device also drops without a reader or by a filter.
    let at_ring = match evidence.dropped("FULL_RING") {
        Some(full) if full < dropped / 2.0 => CONSEQUENCE,
        _ => 1.0,
    };
    let weight = (share / HEAVY_LOSS).clamp(0.1, 1.0) * (1.0 - (1.0 - CONSEQUENCE) * usual);
    let judgement = weighted(weight * at_ring, facts, remedies(link));
    settled(judgement, f64::from(link.queue_length) < SHORT / 2.0)
}

fn facts(evidence: &Evidence, link: &LinkFacts, share: f64, dropped: f64) -> Vec<Fact> {
    Vec::new()
        .and(
            format!("share of packets dropped in the queue of {}", link.name),
            share,
            "below 0.001",
            format!("rtnetlink tx_dropped of {}", link.name),
        )
        .and(
            "capacity of the queue, packets",
            f64::from(link.queue_length),
            "500 or more",
            "txqueuelen",
        )
        .and(
            "packets dropped per second",
            dropped / evidence.seconds(),
            "0",
            format!("rtnetlink tx_dropped of {}", link.name),
        )
        .and(
            "share of the time in which the program ran or was ready to run",
            evidence.busy(),
            "below 0.85; above, the program is late",
            "schedstat",
        )
        .and(
            "packets dropped in its queueing discipline",
            evidence.qdisc(&link.name, metric::QDISC_DROPS),
            "as many, if it were the cause",
            "qdisc statistics",
        )
}

fn remedies(link: &LinkFacts) -> Vec<Remedy> {
    if link.queue_length >= GOOD_LENGTH {
        return vec![Remedy::ask(
            crate::Location::Tunnel,
            "let the program read in time; the queue is long enough",
            Vec::new(),
            "up to the capacity of the program",
        )];
    }
    let longer = Action::QueueLength {
        link: link.name.clone(),
        packets: GOOD_LENGTH,
    };
    vec![Remedy::here(
        "lengthen the queue",
        vec![longer],
        "these packets arrive",
    )]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn tun(queue_length: u32, dropped: u64, sent: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[0].queue_length = queue_length;
        count(&mut evidence, inner(), metric::TX_DROPPED, dropped);
        count(&mut evidence, inner(), metric::TX_PACKETS, sent);
        evidence
    }

    #[test]
    fn drops_at_a_short_ring_are_it() {
        let finding = present(evaluate(&tun(3, 500, 10_000)));
        assert_eq!(finding.weight, 1.0);
        assert_eq!(
            finding.remedies[0].commands,
            ["ip link set dev tun0 txqueuelen 1000"]
        );
    }

    #[test]
    fn a_lossless_ring_is_not() {
        assert!(absent(evaluate(&tun(3, 0, 10_000))));
        assert!(absent(evaluate(&tun(3, 9, 10_000))));
    }

    #[test]
    fn a_long_ring_overflows_because_of_its_reader() {
        assert!(present(evaluate(&tun(500, 500, 10_000))).weight < 0.5);
    }

    #[test]
    fn drops_for_another_reason_weigh_little() {
        let mut evidence = tun(3, 500, 10_000);
        count(&mut evidence, Subject::Host, "drop.NOT_SPECIFIED", 500);
        assert!(present(evaluate(&evidence)).weight < 0.5);
        count(&mut evidence, Subject::Host, "drop.FULL_RING", 500);
        assert_eq!(present(evaluate(&evidence)).weight, 1.0);
    }
}
