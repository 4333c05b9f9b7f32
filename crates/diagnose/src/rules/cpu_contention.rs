//! The program is ready to run, but other programs use the processor.
//!
//! The relevant quantity is the waiting share of the program's demand, not the load of the machine.
//! It excludes waits for the program's own threads (more busy threads than processors), and
//! throttled time of its control group, which the scheduler counts as waiting as well.

use seikan_observe::path::ProgramFacts;

use super::prelude::*;
use super::scheduling::{Scheduling, scheduling};

/// Waiting share of the demand that is normal with a load on few processors.
const NORMAL_WAIT: f64 = 0.3;
/// Waiting share at which the program gets little more than half of its demand, as with one
/// competitor of the same weight.
const MUCH_WAIT: f64 = 0.45;
/// Demand from which waiting matters: below a fifth of a processor a thread catches up; above half
/// it does not.
const DEMAND: Ramp = Ramp::new(0.2, 0.5);
/// Recommended nice value: ten times the weight of a normal program (kernel/sched/core.c,
/// `sched_prio_to_weight`).
const NICE: i32 = -10;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::CpuContention,
    PathStep::Program,
    "The tunnel's program has to wait for a processor that other programs use.",
    evaluate,
)
.effects(&[
    Cause::SingleThreadSaturated,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
    Cause::BacklogFull,
])
.counted(Source::Threads, &[metric::RUN_DELAY_NS], Per::Second, 0.1e9);

fn evaluate(evidence: &Evidence) -> Judgement {
    let program = program(evidence)?;
    let scheduling = scheduling(evidence)
        .ok_or_else(|| format!("the threads of {} are not readable", program.name))?;
    let weight = 0.95
        * Ramp::new(NORMAL_WAIT, MUCH_WAIT).at(scheduling.waiting)
        * DEMAND.at(scheduling.thread.demand());
    let facts = facts(evidence, &scheduling);
    weighted(weight, facts, remedies(evidence, program))
}

fn facts(evidence: &Evidence, scheduling: &Scheduling) -> Vec<Fact> {
    let thread = &scheduling.thread;
    Vec::new()
        .and(
            format!(
                "share of its runnable time in which thread {} waited for a processor",
                thread.name
            ),
            scheduling.waiting,
            "below 0.3",
            "schedstat run delay",
        )
        .and(
            "share of the time in which it ran",
            thread.running,
            "as much as it is runnable",
            "schedstat",
        )
        .and(
            "preemptions per second",
            thread.preempted,
            "below 50",
            "involuntary context switches",
        )
        .and(
            "processors used by other programs",
            scheduling.others,
            "fewer than the processors",
            "/proc/stat without the program",
        )
        .and(
            "share of the time in which any task of the machine waited for a processor",
            evidence
                .host(metric::PRESSURE_CPU_US)
                .map(|pressure| pressure / 1e6 / evidence.seconds()),
            "below 0.3",
            "/proc/pressure/cpu",
        )
}

fn remedies(evidence: &Evidence, program: &ProgramFacts) -> Vec<Remedy> {
    let mut remedies = Vec::new();
    let everywhere = &evidence.map.host.cpus;
    if !program.cpus.is_empty() && program.cpus.len() < everywhere.len() {
        remedies.push(Remedy::here(
            format!("let {} run on every processor", program.name),
            vec![Action::Affinity {
                pid: program.pid,
                cpus: everywhere.clone(),
            }],
            "the waiting time, if other processors are less busy",
        ));
    }
    if program.nice > NICE {
        remedies.push(Remedy::here(
            format!("raise the priority of {}", program.name),
            vec![Action::Nice {
                pid: program.pid,
                nice: NICE,
            }],
            "most of the waiting time, if the others are in the same control group and session",
        ));
    }
    let group = program.group.as_deref().unwrap_or("GROUP-OF-THE-TUNNEL");
    remedies.push(Remedy::ask(
        Location::Here,
        "give the tunnel's control group a larger weight, or reserve a processor for it",
        vec![
            format!("echo 1000 > {group}/cpu.weight"),
            "ps -eLo pid,tid,psr,pcpu,comm --sort=-pcpu | head".to_owned(),
        ],
        "the waiting time",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn contended(running: f64, waiting: f64, busy: f64) -> Evidence {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, running, waiting);
        processor(&mut evidence, 0, busy, 0.0);
        processor(&mut evidence, 1, busy, 0.0);
        evidence
    }

    #[test]
    fn a_program_that_waits_for_others_has_it() {
        let finding = present(evaluate(&contended(0.55, 0.42, 1.0)));
        assert!(finding.weight > 0.5, "{finding:?}");
        assert_eq!(
            finding.remedies[0].commands,
            ["renice -n -10 -p $(ls /proc/100/task)"]
        );
    }

    #[test]
    fn some_waiting_is_normal() {
        assert!(absent(evaluate(&contended(0.8, 0.15, 1.0))));
    }

    #[test]
    fn a_program_with_little_demand_does_not_wait() {
        assert!(absent(evaluate(&contended(0.1, 0.08, 1.0))));
    }

    #[test]
    fn time_stopped_for_a_limit_is_not_it() {
        let mut evidence = contended(0.5, 0.48, 0.9);
        evidence.map.program.as_mut().expect("program").group = Some("/g".into());
        let group = Subject::Group("/g".into());
        count(&mut evidence, group, metric::GROUP_THROTTLED_US, 4_700_000);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn waiting_for_its_own_threads_is_not_it() {
        let mut evidence = contended(0.6, 0.38, 0.62);
        thread(&mut evidence, 101, 0.58, 0.4);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_program_on_one_processor_gets_all() {
        let mut evidence = contended(0.4, 0.55, 0.9);
        evidence.map.program.as_mut().expect("program").cpus = vec![0];
        let finding = present(evaluate(&evidence));
        assert_eq!(finding.remedies[0].commands, ["taskset -a -p -c 0,1 100"]);
    }
}
