//! The queue of received packets of a processor (`netdev_max_backlog`) is full and drops packets.
//!
//! A short queue is a cause of its own; one of the usual length fills because its processor is overloaded.
//!
//! `/proc/net/softnet_stat` counts for the whole machine. A drop belongs to this tunnel only if an
//! interface of its path counts it.

use super::prelude::*;

/// Share of dropped packets, of those received by the interfaces of the path, from which TCP
/// suffers. A packet counts at each interface, so the loss of a flow is a few times this.
const LOSS: Ramp = Ramp::new(0.0003, 0.005);
/// Queue lengths: up to the lower one the short queue is the cause; from the upper one on, the
/// kernel's default (net/core/hotdata.c), an overloaded processor is the cause.
const LENGTH: Ramp = Ramp::new(300.0, 1000.0);
/// Weight if the processor is the cause.
const CONSEQUENCE: f64 = 0.5;
/// Recommended length, packets.
const GOOD_LENGTH: f64 = 4000.0;
const SYSCTL: &str = "net.core.netdev_max_backlog";

pub(super) const SPEC: Spec = Spec::fault(
    Cause::BacklogFull,
    PathStep::Host,
    "The kernel's queue of received packets is full and drops packets.",
    evaluate,
)
.drops_packets()
.counted(Source::Cpus, &[metric::SOFTNET_DROPPED], Per::Packet, FEW);

fn evaluate(evidence: &Evidence) -> Judgement {
    let machine = evidence
        .all_cpus(metric::SOFTNET_DROPPED)
        .ok_or("/proc/net/softnet_stat is not readable")?;
    let (dropped, received) = evidence
        .backlog_drops()
        .zip(evidence.links(metric::RX_PACKETS))
        .ok_or("the counters of the interfaces are not readable")?;
    let share = dropped / (dropped + received).max(1.0);
    let mut facts = Vec::new()
        .and(
            "share of packets received on this path that the receive queue dropped",
            share,
            "0",
            "rtnetlink rx_dropped, up to /proc/net/softnet_stat dropped",
        )
        .and(
            "packets dropped there per second",
            dropped / evidence.seconds(),
            "0",
            "rtnetlink rx_dropped, up to /proc/net/softnet_stat dropped",
        )
        .and(
            "the same for the whole machine, per second",
            machine / evidence.seconds(),
            "the same, if only this path drops",
            "/proc/net/softnet_stat dropped",
        );
    let length = evidence.sysctl(SYSCTL);
    facts = facts.and(
        "capacity of the queue, packets",
        length,
        "1000 or more",
        SYSCTL,
    );
    let usual = LENGTH.at(length.unwrap_or(LENGTH.to));
    let weight = LOSS.at(share) * (1.0 - (1.0 - CONSEQUENCE) * usual);
    let longer = GOOD_LENGTH.max(2.0 * length.unwrap_or(0.0));
    let remedy = Remedy::here(
        "lengthen the receive queue",
        vec![Action::Sysctl {
            name: SYSCTL.into(),
            value: format!("{longer:.0}"),
        }],
        "these packets arrive, unless the processor has no time at all",
    );
    weighted(weight, facts, vec![remedy])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn backlog(length: &str, dropped: u64) -> Evidence {
        let mut evidence = tunnel();
        let sysctls = &mut evidence.map.host.sysctls;
        sysctls.insert(SYSCTL.into(), length.into());
        count(
            &mut evidence,
            Subject::Cpu(0),
            metric::SOFTNET_PROCESSED,
            100_000,
        );
        count(
            &mut evidence,
            Subject::Cpu(0),
            metric::SOFTNET_DROPPED,
            dropped,
        );
        count(&mut evidence, egress(), metric::RX_PACKETS, 100_000);
        count(&mut evidence, egress(), metric::RX_DROPPED, dropped);
        evidence
    }

    #[test]
    fn drops_at_a_short_queue_are_it() {
        let finding = present(evaluate(&backlog("10", 2_000)));
        assert_eq!(finding.weight, 1.0);
        assert_eq!(
            finding.remedies[0].commands,
            ["sysctl -w net.core.netdev_max_backlog=\"4000\""]
        );
    }

    #[test]
    fn a_long_queue_fills_because_of_its_processor() {
        assert_eq!(
            present(evaluate(&backlog("1000", 2_000))).weight,
            CONSEQUENCE
        );
    }

    #[test]
    fn drops_of_another_namespace_are_not() {
        let mut evidence = backlog("10", 2_000);
        count(&mut evidence, egress(), metric::RX_DROPPED, 0);
        assert!(absent(evaluate(&evidence)));
        // A few packets that this tunnel's interfaces drop for another reason change nothing: the
        // drops of the backlog are still not the tunnel's.
        count(&mut evidence, egress(), metric::RX_DROPPED, 5);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn drops_that_no_interface_counts_are_unseen() {
        let mut evidence = backlog("10", 2_000);
        let columns = &mut evidence.series.columns;
        columns.retain(|key, _| key.name != metric::RX_DROPPED);
        assert!(unseen(evaluate(&evidence)));
    }

    #[test]
    fn without_drops_it_is_not() {
        assert!(absent(evaluate(&backlog("10", 0))));
        assert!(unseen(evaluate(&tunnel())));
    }
}
