//! Packets pass from thread to thread one at a time, and a thread sleeps and wakes up for each of them.
//!
//! An idle thread also sleeps. Therefore several threads must share the work and together use
//! nearly one processor; their sleeps are then waits for each other.

use super::calls;
use super::prelude::*;
use super::scheduling::runs_when_ready;
use crate::Stage;

/// Sleeps per packet, all threads together: below a third with batches of a few packets, one for
/// each in the full pattern.
const SLEEPS: Ramp = Ramp::new(0.3, 0.9);
/// Demand of the threads, processors. A pipeline of waiting threads is limited to about one, with
/// any number of threads.
const DEMAND: Ramp = Ramp::new(0.6, 1.0);
/// Idle share of its processors with which the program waits for something else.
const IDLE_SHARE: Ramp = Ramp::new(0.15, 0.4);
/// Share of the demand of all threads from which a thread shares the work.
const PART: f64 = 0.1;
/// Share of the program's processor time in wake-ups, locks and the scheduler, if it was sampled.
const SCHEDULE: Ramp = Ramp::new(0.08, 0.25);

pub(super) const SPEC: Spec = Spec::fault(
    Cause::HandoffOverhead,
    PathStep::Program,
    "The tunnel's program passes every packet from thread to thread, and the wake-ups cost \
     more than the work.",
    evaluate,
)
// A program that passes packets one at a time also reads them one at a time.
.effects(&[
    Cause::FramePerSyscall,
    Cause::SingleThreadSaturated,
    Cause::TunQueueOverflow,
    Cause::UdpReceiveBuffer,
    Cause::Bufferbloat,
])
.counted(
    Source::Threads,
    &[metric::VOLUNTARY_SWITCHES],
    Per::Packet,
    0.5,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let program = program(evidence)?;
    let threads = evidence.threads();
    let packets = evidence.packets();
    if threads.is_empty() || packets == 0.0 {
        return Err(format!(
            "the threads or packets of {} are not readable",
            program.name
        )
        .into());
    }
    let demand: f64 = threads.iter().map(|thread| thread.demand()).sum();
    let working = threads
        .iter()
        .filter(|thread| thread.demand() >= PART * demand);
    let working = working.count();
    let sleeps: f64 = threads.iter().map(|thread| thread.sleeps).sum();
    let per_packet = sleeps / packets;
    let mut facts = Vec::new()
        .and(
            "sleeps of the program's threads per packet",
            per_packet,
            "below 0.3",
            "voluntary context switches",
        )
        .and(
            "threads that share the work",
            working as f64,
            "1, or each with its own packets",
            "schedstat",
        )
        .and(
            "processors that they need",
            demand,
            "below 0.6",
            "schedstat",
        );
    facts.extend(calls::per_packet(
        evidence,
        "wake-ups of waiting threads per packet",
        &["futex_wake"],
        Some(packets * evidence.seconds()),
        "below 0.3",
    ));
    let schedule = evidence.work(Stage::Schedule);
    facts = facts.and(
        "share of the program's time in wake-ups, locks and the scheduler",
        schedule,
        "below 0.08",
        "processor profile",
    );
    let weight = 0.9
        * f64::from(working > 1)
        * SLEEPS.at(per_packet)
        * DEMAND.at(demand)
        * runs_when_ready(evidence)
        * (1.0 - IDLE_SHARE.at(evidence.idle_share().unwrap_or(0.0)))
        * schedule.map_or(0.8, |share| SCHEDULE.at(share));
    let remedy = Remedy::ask(
        Location::Tunnel,
        format!(
            "use fewer threads (for a program in Go: GOMAXPROCS=1), or a version of {} that passes packets in batches",
            program.name
        ),
        Vec::new(),
        "the time of wake-ups and of waits between threads",
    );
    weighted(weight, facts, vec![remedy])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::{Subject, metric};

    fn pipeline(running: [f64; 2], sleeps: u64) -> Evidence {
        let mut evidence = tunnel();
        count(&mut evidence, inner(), metric::TX_PACKETS, 80_000);
        count(&mut evidence, inner(), metric::RX_PACKETS, 20_000);
        for (tid, share) in [(100, running[0]), (101, running[1])] {
            thread(&mut evidence, tid, share, 0.02);
            let subject = Subject::Thread { pid: 100, tid };
            count(
                &mut evidence,
                subject,
                metric::VOLUNTARY_SWITCHES,
                sleeps / 2,
            );
        }
        evidence
    }

    #[test]
    fn a_sleep_for_each_packet_in_a_full_pipeline_is_it() {
        let mut evidence = pipeline([0.6, 0.5], 110_000);
        assert!(present(evaluate(&evidence)).weight > 0.7);
        profile(&mut evidence, &[(Stage::Schedule, 0.3)]);
        assert!(present(evaluate(&evidence)).weight > 0.85);
    }

    #[test]
    fn wake_ups_are_shown_if_they_were_counted() {
        let mut evidence = pipeline([0.6, 0.5], 110_000);
        let sleeps = present(evaluate(&evidence)).facts.len();
        count(&mut evidence, Subject::Host, "call.futex_wake", 120_000);
        let facts = present(evaluate(&evidence)).facts;
        assert_eq!(facts.len(), sleeps + 1);
        assert!(facts.iter().any(|fact| fact.value == 1.2));
    }

    #[test]
    fn a_profile_without_wake_ups_speaks_against_it() {
        let mut evidence = pipeline([0.6, 0.5], 110_000);
        profile(
            &mut evidence,
            &[(Stage::Schedule, 0.03), (Stage::Crypto, 0.7)],
        );
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn batches_are_not() {
        assert!(absent(evaluate(&pipeline([0.6, 0.5], 10_000))));
    }

    #[test]
    fn one_thread_that_sleeps_for_want_of_work_is_not() {
        assert!(absent(evaluate(&pipeline([0.65, 0.0], 110_000))));
    }

    #[test]
    fn a_pipeline_with_little_to_do_is_not() {
        assert!(absent(evaluate(&pipeline([0.2, 0.2], 110_000))));
    }
}
