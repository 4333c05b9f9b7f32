//! The program's control group has used up its processor time of the period (`cpu.max`), and all
//! its threads stop until the next period.
//!
//! The scheduler counts that as waiting too, so only the counters of the group tell it from contention.

use seikan_observe::Subject;

use super::prelude::*;

/// Share of throttled periods: one in twenty is a burst, half of them are the rule.
const PERIODS: Ramp = Ramp::new(0.05, 0.5);
/// Throttled share of the demand: from a tenth on, throughput falls by as much.
const LOST: Ramp = Ramp::new(0.02, 0.1);

pub(super) const SPEC: Spec = Spec::fault(
    Cause::CpuQuota,
    PathStep::Program,
    "The control group of the tunnel's program stops it repeatedly, because its processor time \
     is used up.",
    evaluate,
)
.effects(&[
    Cause::SingleThreadSaturated,
    Cause::CpuContention,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
])
.counted(
    Source::Group,
    &[metric::GROUP_THROTTLED_US],
    Per::Second,
    0.01e6,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let program = program(evidence)?;
    let Some(group) = &program.group else {
        return Fact::new(
            "control groups that limit the processor time of the program",
            0.0,
            "0",
            "cpu.max",
        )
        .excludes();
    };
    let of = |name| evidence.growth(&Subject::Group(group.clone()), name);
    let (periods, throttled) = of(metric::GROUP_PERIODS)
        .zip(of(metric::GROUP_THROTTLED))
        .ok_or_else(|| format!("{group}/cpu.stat is not readable"))?;
    let share = throttled / periods.max(1.0);
    let mut facts = Vec::new().and(
        "share of periods in which the control group was throttled",
        share,
        "below 0.05",
        format!("{group}/cpu.stat nr_throttled"),
    );
    let stopped = evidence.throttled();
    facts = facts
        .and(
            "processors lost to throttling",
            stopped,
            "0",
            format!("{group}/cpu.stat throttled_usec"),
        )
        .and(
            "limit of the control group, processors",
            program.cpu_limit,
            "more than the program needs",
            format!("{group}/cpu.max"),
        );
    let running = evidence.running();
    facts = facts.and(
        "processors used by the program",
        running,
        "well below the limit",
        "schedstat",
    );
    let lost = stopped.map_or(1.0, |stopped| {
        LOST.at(stopped / (stopped + running).max(1e-9))
    });
    let weight = 0.95 * PERIODS.at(share) * lost;
    let remedy = Remedy::here(
        "remove the limit of the control group, or raise it above the program's need",
        vec![Action::CpuLimit {
            group: group.clone(),
            cpus: None,
        }],
        "the throttled time",
    );
    weighted(weight, facts, vec![remedy])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn limited(periods: u64, throttled: u64, stopped_us: u64) -> Evidence {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.5, 0.48);
        let program = evidence.map.program.as_mut().expect("program");
        program.group = Some("/sys/fs/cgroup/vpn".into());
        program.cpu_limit = Some(0.5);
        let group = || Subject::Group("/sys/fs/cgroup/vpn".into());
        count(&mut evidence, group(), metric::GROUP_PERIODS, periods);
        count(&mut evidence, group(), metric::GROUP_THROTTLED, throttled);
        count(
            &mut evidence,
            group(),
            metric::GROUP_THROTTLED_US,
            stopped_us,
        );
        evidence
    }

    #[test]
    fn a_group_stopped_in_every_period_is_it() {
        let finding = present(evaluate(&limited(100, 99, 4_800_000)));
        assert!(finding.weight > 0.9);
        assert_eq!(
            finding.remedies[0].commands,
            [
                "echo max > /sys/fs/cgroup/vpn/cpu.max || echo -1 > /sys/fs/cgroup/vpn/cpu.cfs_quota_us"
            ]
        );
    }

    #[test]
    fn a_limit_that_is_not_reached_is_not() {
        assert!(absent(evaluate(&limited(100, 2, 10_000))));
    }

    #[test]
    fn stops_that_cost_no_time_are_not() {
        assert!(absent(evaluate(&limited(100, 60, 50_000))));
    }

    #[test]
    fn contention_without_a_limit_is_not() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.5, 0.48);
        assert!(absent(evaluate(&evidence)));
    }
}
