//! A queueing discipline on this host limits the rate: it delays or drops packets.

use seikan_observe::path::LinkFacts;

use super::prelude::*;
use crate::Excluded;

/// Disciplines that limit a rate; others drop only because the next device is slow.
const LIMITING: &[&str] = &["tbf", "htb", "hfsc", "cake", "netem"];
/// Delayed packets per packet from which the limit matters.
const OFTEN: f64 = 0.05;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::Shaper,
    PathStep::OuterLink,
    "A queueing discipline on this host limits the rate.",
    evaluate,
)
.effects(&[
    Cause::TunQueueOverflow,
    Cause::Bufferbloat,
    Cause::UdpSendBuffer,
])
.drops_packets()
.counted(
    Source::Qdiscs,
    &[metric::QDISC_OVERLIMITS],
    Per::Packet,
    0.01,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let links = evidence.map.links.iter();
    let limited = links.filter(|link| LIMITING.contains(&&*link.qdisc));
    let mut seen = None;
    for link in limited {
        match evaluate_link(evidence, link) {
            Some(Err(Excluded::Absent(fact))) => seen = Some(fact),
            Some(present) => return present,
            None => {}
        }
    }
    seen.unwrap_or_else(|| {
        Fact::new(
            "queueing disciplines on the path that limit a rate",
            0.0,
            "0",
            "rtnetlink qdiscs",
        )
    })
    .excludes()
}

fn evaluate_link(evidence: &Evidence, link: &LinkFacts) -> Option<Judgement> {
    let of = |name| evidence.qdisc(&link.name, name);
    let packets = of(metric::QDISC_PACKETS)?;
    let (delayed, dropped) = (of(metric::QDISC_OVERLIMITS)?, of(metric::QDISC_DROPS)?);
    let share = delayed / packets.max(1.0);
    let fact = Fact::new(
        format!(
            "packets delayed by {} on {}, per packet",
            link.qdisc, link.name
        ),
        share,
        "below 0.05",
        "qdisc overlimits",
    );
    if share < OFTEN && dropped == 0.0 {
        return Some(fact.excludes());
    }
    let rate = of(metric::QDISC_BYTES)? * 8.0 / evidence.seconds();
    let mut facts = vec![fact]
        .and(
            "rate through the discipline, Mbit/s",
            rate / 1e6,
            "below its limit",
            "qdisc bytes",
        )
        .and(
            "packets dropped by the discipline",
            dropped,
            "0",
            "qdisc drops",
        );
    facts = facts.and(
        "limit of the discipline, Mbit/s",
        link.qdisc_rate.map(|limit| limit as f64 / 1e6),
        "above what is needed",
        "qdisc options",
    );
    let near = link
        .qdisc_rate
        .is_none_or(|limit| rate > 0.7 * limit as f64);
    Some(Ok(Finding::new(
        if near { 0.95 } else { 0.3 },
        facts,
        vec![Remedy::here(
            format!(
                "remove the rate limit of {}, if it is not needed",
                link.name
            ),
            vec![Action::RemoveQdisc {
                link: link.name.clone(),
            }],
            "up to the next bottleneck",
        )],
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn shaped(overlimits: u64, rate: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[1].qdisc = "tbf".into();
        evidence.map.links[1].qdisc_rate = Some(rate);
        let qdisc = || Subject::Qdisc("eth0".into());
        count(&mut evidence, qdisc(), metric::QDISC_PACKETS, 10_000);
        count(&mut evidence, qdisc(), metric::QDISC_OVERLIMITS, overlimits);
        count(&mut evidence, qdisc(), metric::QDISC_DROPS, 0);
        // 100 Mbit/s over the 10 seconds of the evidence.
        count(&mut evidence, qdisc(), metric::QDISC_BYTES, 125_000_000);
        evidence
    }

    #[test]
    fn a_full_token_bucket_is_it() {
        assert_eq!(present(evaluate(&shaped(9_000, 100_000_000))).weight, 0.95);
    }

    #[test]
    fn one_with_spare_rate_is_not() {
        assert!(absent(evaluate(&shaped(0, 1_000_000_000))));
        assert!(absent(evaluate(&tunnel())));
    }
}
