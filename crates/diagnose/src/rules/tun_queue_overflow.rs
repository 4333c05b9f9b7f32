//! The ring between the kernel and the program behind a tun device is full when packets come, so they are dropped
//! there, and the qdisc above it knows nothing of it.

use seikan_observe::metric;

use crate::{Action, Cause, Evidence, Fact, Finding, Judgement, Remedy};

/// Lost packets per packet sent from which TCP suffers: at 1 in 1,000 one connection over 1 ms of round trip is still
/// fast (Mathis et al. 1997).
const LOSS: f64 = 0.001;
/// Packets that the ring should hold: the kernel's own default is 500 (drivers/net/tun.c).
const GOOD_LENGTH: u32 = 1000;

pub(super) fn judge(evidence: &Evidence) -> Judgement {
    let Some(link) = evidence
        .map
        .inner_link()
        .filter(|link| matches!(&*link.kind, "tun" | "tap"))
    else {
        return Judgement::Unseen("the inner interface is not a tun device".into());
    };
    let (Some(dropped), Some(sent)) = (
        evidence.inner(metric::TX_DROPPED),
        evidence.inner(metric::TX_PACKETS),
    ) else {
        return Judgement::Unseen(format!("the counters of {} could not be read", link.name));
    };
    let share = dropped / (dropped + sent).max(1.0);
    let fact = Fact::new(
        format!("packets lost in the queue of {}, of those sent", link.name),
        share,
        "below 0.001",
        format!("rtnetlink tx_dropped of {}", link.name),
    );
    if share < LOSS {
        return Judgement::Absent(fact);
    }
    let mut facts = vec![
        fact,
        Fact::new(
            "packets lost per second",
            dropped / evidence.seconds(),
            "0",
            format!("rtnetlink tx_dropped of {}", link.name),
        ),
        Fact::new(
            "packets that fit in it",
            f64::from(link.queue_length),
            "500 or more",
            "txqueuelen",
        ),
    ];
    if let Some(qdisc) = evidence.qdisc(&link.name, metric::QDISC_DROPS) {
        facts.push(Fact::new(
            "packets lost in its queueing discipline",
            qdisc,
            "as many, if it were the reason",
            "qdisc statistics",
        ));
    }
    let longer = Action::QueueLength {
        link: link.name.clone(),
        packets: GOOD_LENGTH.max(link.queue_length.saturating_mul(2)),
    };
    let remedies = match link.queue_length < GOOD_LENGTH {
        true => vec![Remedy::here(
            "a longer queue",
            vec![longer],
            "all that is lost there arrives",
        )],
        false => vec![],
    };
    Judgement::Present(Finding {
        cause: Cause::TunQueueOverflow,
        // Loss of a percent stops most connections; a short ring is the reason, a late reader another one.
        weight: (share / 0.01).clamp(0.3, 1.0) * if link.queue_length < 200 { 1.0 } else { 0.5 },
        facts,
        remedies,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn tun(queue_length: u32, dropped: u64, sent: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[0].queue_length = queue_length;
        count(&mut evidence, inner(), metric::TX_DROPPED, dropped);
        count(&mut evidence, inner(), metric::TX_PACKETS, sent);
        evidence
    }

    #[test]
    fn drops_at_a_short_ring_are_it() {
        let finding = present(judge(&tun(3, 500, 10_000)));
        assert_eq!(finding.weight, 1.0);
        assert_eq!(
            finding.remedies[0].commands,
            ["ip link set dev tun0 txqueuelen 1000"]
        );
    }

    #[test]
    fn a_lossless_ring_is_not() {
        assert!(absent(judge(&tun(3, 0, 10_000))));
        assert!(absent(judge(&tun(3, 9, 10_000))));
    }
}
