//! The thread that moves a virtual machine's packets (vhost), or its virtual processor, is ready to
//! run, but other programs use the processor.

use super::prelude::*;

/// Waiting share of the demand that is normal with guests on shared processors, and at which
/// throughput varies, as for a tunnel's program.
const WAIT: Ramp = Ramp::new(0.2, 0.45);
/// Demand below which a thread has time to catch up.
const DEMAND: Ramp = Ramp::new(0.15, 0.4);
/// Recommended nice value.
const NICE: i32 = -10;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::VhostStarved,
    PathStep::Program,
    "The thread that moves a virtual machine's packets does not get a processor.",
    evaluate,
)
.effects(&[Cause::CpuContention, Cause::TunQueueOverflow]);

fn evaluate(evidence: &Evidence) -> Judgement {
    let Some(program) = &evidence.map.program else {
        return none().excludes();
    };
    let machine = program.name.starts_with("qemu") || program.name == "kvm";
    let threads = evidence.threads();
    let serving: Vec<_> = threads
        .iter()
        .filter(|thread| machine || thread.serves_guest())
        .collect();
    if serving.is_empty() {
        return if machine {
            Err(format!("the threads of {} are not readable", program.name).into())
        } else {
            none().excludes()
        };
    }
    let strength = |demand: f64, kept: f64| WAIT.at(kept) * DEMAND.at(demand);
    let of = serving
        .iter()
        .map(|thread| (strength(thread.demand(), thread.kept_waiting()), thread));
    let worst = of.max_by(|a, b| {
        let (left, right) = (a.1.waiting, b.1.waiting);
        a.0.total_cmp(&b.0).then(left.total_cmp(&right))
    });
    let Some((strength, thread)) = worst else {
        return none().excludes();
    };
    let facts = Vec::new()
        .and(
            format!(
                "share of its runnable time in which thread {} waited for a processor",
                thread.name
            ),
            thread.kept_waiting(),
            "below 0.2",
            "schedstat run delay",
        )
        .and(
            "share of the time in which it ran",
            thread.running,
            "as much as it is runnable",
            "schedstat",
        )
        .and(
            "packets dropped per second in front of it",
            evidence
                .inner(metric::TX_DROPPED)
                .map(|dropped| dropped / evidence.seconds()),
            "0",
            "rtnetlink tx_dropped of the guest's tap",
        )
        .and(
            "processors used by other programs",
            evidence.used_by_others(),
            "fewer than the processors",
            "/proc/stat without the machine's threads",
        );
    let mut remedies = Vec::new();
    if program.nice > NICE {
        remedies.push(Remedy::here(
            "raise the priority of the machine's threads",
            vec![Action::Nice {
                pid: program.pid,
                nice: NICE,
            }],
            "most of the waiting time",
        ));
    }
    remedies.push(Remedy::ask(
        Location::Here,
        "reserve a processor for that thread, without guests' processors",
        vec![format!("taskset -p -c CPU {}", thread.tid)],
        "the waiting time, and a steadier throughput",
    ));
    weighted(0.95 * strength, facts, remedies)
}

fn none() -> Fact {
    Fact::new(
        "threads on the path that move a virtual machine's packets",
        0.0,
        "0",
        "the program's threads",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn guest(running: f64, waiting: f64) -> Evidence {
        let mut evidence = tunnel();
        let program = evidence.map.program.as_mut().expect("program");
        program.threads = vec![(100, "machine".into()), (101, "vhost-100".into())];
        thread(&mut evidence, 100, 0.01, 0.0);
        thread(&mut evidence, 101, running, waiting);
        evidence
    }

    #[test]
    fn a_vhost_thread_that_waits_is_it() {
        let finding = present(evaluate(&guest(0.45, 0.5)));
        assert!(finding.weight > 0.9);
        assert!(finding.facts[0].name.contains("vhost-100"));
    }

    #[test]
    fn one_that_is_merely_busy_is_not() {
        assert!(absent(evaluate(&guest(0.95, 0.04))));
    }

    #[test]
    fn every_thread_of_a_machine_counts() {
        let mut evidence = guest(0.0, 0.0);
        evidence.map.program.as_mut().expect("program").name = "qemu-system-x86".into();
        thread(&mut evidence, 100, 0.4, 0.5);
        present(evaluate(&evidence));
    }

    #[test]
    fn a_tunnel_that_waits_is_another_cause() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.45, 0.5);
        assert!(absent(evaluate(&evidence)));
    }
}
