//! Polling of received packets repeatedly ends for lack of budget, with packets left.
//!
//! The kernel then polls again. With the usual budget this shows a busy processor and costs little;
//! with a small one, the repetition is the cost.

use super::prelude::*;
use super::receive::concerned;

/// Share of runs that end early: one in twenty is normal under load, half of them are the rule.
const SQUEEZED: Ramp = Ramp::new(0.05, 0.4);
/// The kernel's defaults (net/core/hotdata.c): packets, and microseconds (two ticks; 2,000 at 1000 Hz).
const BUDGET: f64 = 300.0;
const BUDGET_US: f64 = 2000.0;
/// Weight with the usual budget.
const CONSEQUENCE: f64 = 0.25;
const SYSCTL: &str = "net.core.netdev_budget";
const SYSCTL_US: &str = "net.core.netdev_budget_usecs";

pub(super) const SPEC: Spec = Spec::fault(
    Cause::NapiBudget,
    PathStep::Host,
    "The kernel repeatedly stops handling received packets before it has finished.",
    evaluate,
)
.effects(&[Cause::BacklogFull])
.counted(
    Source::Cpus,
    &[metric::SOFTNET_TIME_SQUEEZE],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (squeezed, processed) = evidence
        .all_cpus(metric::SOFTNET_TIME_SQUEEZE)
        .zip(evidence.all_cpus(metric::SOFTNET_PROCESSED))
        .ok_or("/proc/net/softnet_stat is not readable")?;
    // If runs are not counted, each is assumed to handle a full budget.
    let runs = evidence.all_cpus(metric::NET_RX);
    let runs = runs.unwrap_or(processed / BUDGET).max(squeezed).max(1.0);
    let share = squeezed / runs;
    let mut facts = Vec::new()
        .and(
            "share of receive softirq runs that ended with packets left",
            share,
            "below 0.05",
            "/proc/net/softnet_stat time_squeeze",
        )
        .and(
            "such runs per second",
            squeezed / evidence.seconds(),
            "below 10",
            "/proc/net/softnet_stat time_squeeze",
        )
        .and(
            "packets handled per run",
            processed / runs,
            "up to 300",
            "/proc/net/softnet_stat, /proc/softirqs",
        );
    let (budget, time) = (evidence.sysctl(SYSCTL), evidence.sysctl(SYSCTL_US));
    for (value, name, good) in [(budget, SYSCTL, "300"), (time, SYSCTL_US, "2000")] {
        facts = facts.and(
            format!("budget ({name})"),
            value,
            format!("{good} or more"),
            name,
        );
    }
    // Ratio of the smaller budget to its default: a third has the full weight.
    let of_usual = (budget.unwrap_or(BUDGET) / BUDGET).min(time.unwrap_or(BUDGET_US) / BUDGET_US);
    let small = 1.0 - Ramp::new(0.33, 1.0).at(of_usual);
    let weight =
        SQUEEZED.at(share) * (CONSEQUENCE + (0.9 - CONSEQUENCE) * small) * concerned(evidence);
    let larger = |value: Option<f64>, good: f64| {
        format!("{:.0}", (2.0 * value.unwrap_or(0.0)).max(2.0 * good))
    };
    let actions = [
        (SYSCTL, larger(budget, BUDGET)),
        (SYSCTL_US, larger(time, 2.0 * BUDGET_US)),
    ];
    let remedy = Remedy::here(
        "enlarge the budget",
        actions
            .map(|(name, value)| Action::Sysctl {
                name: name.into(),
                value,
            })
            .into(),
        "the time between two runs",
    );
    weighted(weight, facts, vec![remedy])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn budget(packets: &str, squeezed: u64) -> Evidence {
        let mut evidence = tunnel();
        let sysctls = &mut evidence.map.host.sysctls;
        sysctls.insert(SYSCTL.into(), packets.into());
        let cpu = || Subject::Cpu(0);
        count(&mut evidence, cpu(), metric::SOFTNET_PROCESSED, 1_000_000);
        count(&mut evidence, cpu(), metric::NET_RX, 20_000);
        count(&mut evidence, cpu(), metric::SOFTNET_TIME_SQUEEZE, squeezed);
        evidence
    }

    #[test]
    fn a_small_budget_that_runs_out_is_it() {
        let finding = present(evaluate(&budget("4", 15_000)));
        assert!(finding.weight > 0.85);
        assert_eq!(
            finding.remedies[0].commands[0],
            "sysctl -w net.core.netdev_budget=\"600\""
        );
    }

    #[test]
    fn an_exhausted_usual_budget_means_a_busy_processor() {
        assert!(present(evaluate(&budget("300", 15_000))).weight < 0.3);
    }

    #[test]
    fn a_budget_that_others_packets_use_up_is_not() {
        let mut evidence = budget("4", 15_000);
        count(&mut evidence, egress(), metric::RX_PACKETS, 500_000);
        assert!(present(evaluate(&evidence)).weight > 0.85);
        count(&mut evidence, egress(), metric::RX_PACKETS, 500);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn one_that_seldom_runs_out_is_not() {
        assert!(absent(evaluate(&budget("4", 200))));
        assert!(unseen(evaluate(&tunnel())));
    }
}
