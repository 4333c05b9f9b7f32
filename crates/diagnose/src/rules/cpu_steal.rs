//! The hypervisor runs other guests while processors of this machine have work.

use super::prelude::*;

/// Stolen share of the busy time: one part in twenty is usual on shared hosts; a quarter is a limit.
const STOLEN: Ramp = Ramp::new(0.05, 0.25);
/// Busy share below which a processor has spare time to catch up.
const BUSY: Ramp = Ramp::new(0.5, 0.9);

const WORK: &[&str] = &[
    metric::USER_NS,
    metric::SYSTEM_NS,
    metric::SOFTIRQ_NS,
    metric::STEAL_NS,
];

pub(super) const SPEC: Spec = Spec::fault(
    Cause::CpuSteal,
    PathStep::Host,
    "The host of this virtual machine gives the processor to other guests.",
    evaluate,
)
.effects(&[
    Cause::SingleThreadSaturated,
    Cause::CpuContention,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
    Cause::BacklogFull,
])
.counted(Source::Cpus, &[metric::STEAL_NS], Per::Second, 0.05e9);

fn evaluate(evidence: &Evidence) -> Judgement {
    let allowed = evidence.map.program.as_ref().map(|program| &program.cpus);
    let allowed = allowed.filter(|cpus| !cpus.is_empty());
    let cpus = allowed.unwrap_or(&evidence.map.host.cpus);
    let on = cpus.iter().filter_map(|cpu| {
        let stolen = evidence.cpu_share(*cpu, &[metric::STEAL_NS])?;
        let work = evidence.cpu_share(*cpu, WORK)?;
        Some((*cpu, stolen, work))
    });
    let (cpu, stolen, work) = on
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .ok_or("/proc/stat is not readable")?;
    let lost = stolen / work.max(1e-9);
    let facts = Vec::new()
        .and(
            format!("share of the busy time of processor {cpu} taken by the hypervisor"),
            lost,
            "below 0.05",
            "/proc/stat steal",
        )
        .and(
            "share of the time in which it was busy",
            work,
            "below 0.9",
            "/proc/stat",
        )
        .and(
            "share of all time taken by the hypervisor",
            stolen,
            "below 0.02",
            "/proc/stat steal",
        );
    let weight = 0.9 * STOLEN.at(lost) * BUSY.at(work);
    let remedy = Remedy::ask(
        Location::Provider,
        "use a machine with dedicated processors, or ask for another host; show the share of stolen time",
        Vec::new(),
        "the stolen time",
    );
    weighted(weight, facts, vec![remedy])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn stolen(busy: f64, stolen: f64) -> Evidence {
        let mut evidence = tunnel();
        processor(&mut evidence, 0, busy, 0.0);
        let cpu = || Subject::Cpu(0);
        let ns = |share: f64| (share * 1e10) as u64;
        count(&mut evidence, cpu(), metric::STEAL_NS, ns(stolen));
        let idle = ns(1.0 - busy - stolen);
        count(&mut evidence, cpu(), metric::IDLE_NS, idle);
        evidence
    }

    #[test]
    fn a_third_stolen_is_it() {
        assert!(present(evaluate(&stolen(0.65, 0.33))).weight > 0.8);
    }

    #[test]
    fn a_trace_is_not() {
        assert!(absent(evaluate(&stolen(0.95, 0.04))));
    }

    #[test]
    fn an_idle_machine_does_not_miss_it() {
        assert!(absent(evaluate(&stolen(0.1, 0.1))));
    }

    #[test]
    fn a_processor_that_is_half_idle_catches_up() {
        assert!(absent(evaluate(&stolen(0.35, 0.12))));
    }

    #[test]
    fn a_full_processor_is_not_a_stolen_one() {
        assert!(absent(evaluate(&stolen(1.0, 0.0))));
    }
}
