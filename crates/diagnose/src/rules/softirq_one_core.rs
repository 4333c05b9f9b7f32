//! One processor handles all received packets and has no time left, and nothing spreads them.

use super::prelude::*;
use super::receive::{is_spread, one_core, spread};

pub(super) const SPEC: Spec = Spec::fault(
    Cause::SoftirqOneCore,
    PathStep::OuterLink,
    "One processor handles all received packets, and it has no time left.",
    evaluate,
)
.effects(&[
    Cause::BacklogFull,
    Cause::NapiBudget,
    Cause::CpuContention,
    Cause::UdpReceiveBuffer,
])
.counted(Source::Cpus, &[metric::SOFTIRQ_NS], Per::Second, 0.5e9);

fn evaluate(evidence: &Evidence) -> Judgement {
    let link = evidence
        .map
        .egress_link()
        .ok_or("the outer interface is not known")?;
    let found = one_core(evidence)?;
    if is_spread(link) {
        let most = link.rps.iter().map(Vec::len).max().unwrap_or(0);
        return Fact::new(
            format!(
                "processors that share the packets received on {}",
                link.name
            ),
            most.max(link.rx_queues as usize) as f64,
            "2 or more",
            "rps_cpus and receive queues",
        )
        .excludes();
    }
    let remedies = vec![
        Remedy::here(
            format!(
                "spread the packets received on {} over all processors",
                link.name
            ),
            spread(evidence, link),
            "a factor of up to the number of processors, with several outer flows",
        ),
        Remedy::ask(
            Location::Here,
            "poll in a thread, which the scheduler can move away from the tunnel's program",
            vec![format!("echo 1 > /sys/class/net/{}/threaded", link.name)],
            "the time that the tunnel's program loses to softirqs",
        ),
    ];
    weighted(0.9 * found.strength, found.facts, remedies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::{Subject, metric};

    fn receiving(softirq: [f64; 2], packets: [u64; 2]) -> Evidence {
        let mut evidence = tunnel();
        for cpu in 0..2 {
            let share = softirq[cpu as usize];
            processor(&mut evidence, cpu, (share + 0.1).min(1.0), share);
            let packets = packets[cpu as usize];
            count(
                &mut evidence,
                Subject::Cpu(cpu),
                metric::SOFTNET_PROCESSED,
                packets,
            );
        }
        evidence
    }

    #[test]
    fn one_full_processor_with_an_idle_one_is_it() {
        let finding = present(evaluate(&receiving([0.95, 0.02], [99_000, 1_000])));
        assert!(finding.weight > 0.85);
        assert_eq!(
            finding.remedies[0].commands,
            ["echo 3 > /sys/class/net/eth0/queues/rx-0/rps_cpus"]
        );
    }

    #[test]
    fn spread_work_is_not() {
        assert!(absent(evaluate(&receiving([0.9, 0.88], [50_000, 50_000]))));
        assert!(absent(evaluate(&receiving([0.3, 0.0], [99_000, 1_000]))));
    }

    #[test]
    fn one_flow_that_rps_cannot_spread_is_another_cause() {
        let mut evidence = receiving([0.95, 0.02], [99_000, 1_000]);
        evidence.map.links[1].rps = vec![vec![0, 1]];
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn steering_to_one_processor_does_not_spread() {
        let mut evidence = receiving([0.95, 0.02], [99_000, 1_000]);
        evidence.map.links[1].rps = vec![vec![0]];
        present(evaluate(&evidence));
    }

    #[test]
    fn without_counters_nothing_is_said() {
        assert!(unseen(evaluate(&tunnel())));
    }
}
