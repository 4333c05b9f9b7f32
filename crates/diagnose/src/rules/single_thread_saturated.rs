//! One thread does the tunnel's work, uses all the time of a processor, and that is not enough.
//!
//! This excludes a thread with the same demand that has to wait (contention, quota). It also excludes
//! a program with all its threads busy.

use super::prelude::*;
use super::scheduling::runs_when_ready;

/// Demand below which a thread sleeps now and then and could do more.
const BUSY: f64 = 0.85;
/// Demand of a thread that never sleeps, within the accuracy of the measurement.
const FULL: f64 = 0.97;
/// Ratio of the second thread's demand to the first up to which the first does the work alone.
const ALONE: f64 = 0.6;
/// Ratio from which both share the work evenly.
const SHARED: f64 = 0.9;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::SingleThreadSaturated,
    PathStep::Program,
    "One thread of the tunnel's program uses a whole processor while other processors are idle.",
    evaluate,
)
.effects(effects::LATE)
.counted(Source::Threads, &[metric::RUN_NS], Per::Second, 0.8e9);

fn evaluate(evidence: &Evidence) -> Judgement {
    let program = program(evidence)?;
    let mut threads = evidence.threads();
    threads.sort_by(|a, b| b.demand().total_cmp(&a.demand()));
    let first = threads
        .first()
        .ok_or_else(|| format!("the threads of {} are not readable", program.name))?;
    let second = threads.get(1).map_or(0.0, |thread| thread.demand());
    let mut facts = Vec::new()
        .and(
            format!(
                "share of the time in which thread {} ran or was ready to run",
                first.name
            ),
            first.demand(),
            "below 0.85",
            "schedstat",
        )
        .and(
            "share of that time waiting for a processor",
            first.kept_waiting(),
            "below 0.3; more is contention",
            "schedstat run delay",
        )
        .and(
            "share of the time in which the next thread ran or was ready to run",
            second,
            "the same, if the work were shared",
            "schedstat",
        );
    let idle = evidence.idle();
    facts = facts.and(
        "share of the time in which the least busy processor was idle",
        idle.iter().map(|(_, idle)| *idle).max_by(f64::total_cmp),
        "0, if another thread could not help",
        "/proc/stat",
    );
    let weight = Ramp::new(BUSY, FULL).at(first.demand())
        * runs_when_ready(evidence)
        * (1.0 - Ramp::new(ALONE, SHARED).at(second / first.demand().max(1e-9)));
    weighted(0.9 * weight, facts, remedies(&program.name))
}

fn remedies(name: &str) -> Vec<Remedy> {
    vec![
        Remedy::ask(
            Location::Tunnel,
            format!(
                "let {name} use several threads and queues (a multi-queue tun device), if it can"
            ),
            Vec::new(),
            "a factor of up to the number of idle processors, with several connections",
        ),
        Remedy::ask(
            Location::Tunnel,
            "use several tunnels that share the connections, or a tunnel with less work per packet (offloads, the \
             kernel's data path)",
            Vec::new(),
            "up to the next bottleneck",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn of(first: (f64, f64), second: (f64, f64)) -> Judgement {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, first.0, first.1);
        thread(&mut evidence, 101, second.0, second.1);
        evaluate(&evidence)
    }

    #[test]
    fn a_thread_that_never_sleeps_is_it() {
        assert!(present(of((0.98, 0.01), (0.05, 0.0))).weight > 0.85);
        // Some waiting is normal on few processors.
        assert!(present(of((0.82, 0.16), (0.05, 0.0))).weight > 0.7);
    }

    #[test]
    fn one_that_sleeps_is_not() {
        assert!(absent(of((0.7, 0.05), (0.05, 0.0))));
    }

    #[test]
    fn one_that_waits_for_its_turn_is_not() {
        assert!(absent(of((0.55, 0.42), (0.05, 0.0))));
    }

    #[test]
    fn work_that_is_shared_is_not() {
        assert!(absent(of((0.98, 0.01), (0.97, 0.01))));
    }

    #[test]
    fn without_a_program_nothing_is_said() {
        let mut evidence = tunnel();
        evidence.map.program = None;
        assert!(unseen(evaluate(&evidence)));
    }
}
