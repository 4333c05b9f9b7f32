//! A virtual switch (Open vSwitch) has no flow entries for packets in its fast path and uses its slow path.
//!
//! From outside, the upcall threads (`handlerN`; with the datapath in user space the main thread of
//! the switch) are busy; the counters of the datapath, if they are readable, prove it.

use super::prelude::*;

/// Share of missed packets: with one for each new connection a few in a thousand; at one in ten the
/// slow path exceeds a processor.
const MISSED: Ramp = Ramp::new(0.01, 0.1);
/// Share of packets without a new flow entry: one in a thousand of them is lost or takes the slow path again.
const LOSS: Ramp = Ramp::new(0.0005, 0.01);
/// Demand of the upcall threads: in a switch with flow entries they sleep.
const BUSY: Ramp = Ramp::new(0.3, 0.9);
/// Weight of busy threads without the counters of the datapath: they may have other work.
const BUSY_ALONE: f64 = 0.6;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::VirtualSwitchUpcalls,
    PathStep::Program,
    "The virtual switch has no flow entries for the packets and uses its slow path for each.",
    evaluate,
)
.effects(&[Cause::SingleThreadSaturated, Cause::TunQueueOverflow]);

fn evaluate(evidence: &Evidence) -> Judgement {
    let program = evidence.map.program.as_ref();
    let switch = program.filter(|program| program.name.starts_with("ovs-vswitch"));
    let counts = (
        evidence.host(metric::SWITCH_MISSES),
        evidence.host(metric::SWITCH_HITS),
    );
    if switch.is_none() && counts.0.is_none() {
        return Fact::new(
            "virtual switches on the path with a known slow path",
            0.0,
            "0",
            "the path on this host",
        )
        .excludes();
    }
    let answering = switch.and_then(|_| answering(evidence));
    let mut facts = Vec::new();
    let mut weight = None;
    if let (Some(misses), Some(hits)) = counts {
        let lost = evidence.host(metric::SWITCH_LOST).unwrap_or(0.0);
        // With a datapath in user space, lost packets are not among the misses.
        let missed = misses.max(lost);
        let all = (missed + hits).max(1.0);
        facts = facts
            .and(
                "share of packets without a flow entry",
                missed / all,
                "below 0.01",
                "datapath misses and lost",
            )
            .and(
                "share of packets for which no flow entry could be made",
                lost / all,
                "below 0.0005",
                "datapath lost",
            );
        weight = Some(MISSED.at(missed / all).max(LOSS.at(lost / all)));
    }
    if let Some((threads, most)) = answering {
        facts = facts
            .and(
                "share of the time in which its busiest upcall thread ran or was ready to run",
                most,
                "below 0.3",
                "schedstat",
            )
            .and(
                "upcall threads",
                threads as f64,
                "as many as processors",
                "the switch's threads",
            );
        weight = weight.or(Some(BUSY_ALONE * BUSY.at(most)));
    }
    let weight = weight
        .ok_or("neither the threads of the switch nor the counters of its datapath are readable")?;
    weighted(0.9 * weight, facts, vec![remedy()])
}

/// Returns the number of upcall threads and the largest demand.
fn answering(evidence: &Evidence) -> Option<(usize, f64)> {
    let threads = evidence.threads();
    let handler = |name: &str| name.starts_with("handler") || name.starts_with("upcall");
    let mut demands: Vec<f64> = threads
        .iter()
        .filter(|thread| handler(&thread.name))
        .map(|thread| thread.demand())
        .collect();
    // A datapath in user space has no busy handlers; its polling threads handle upcalls.
    let polls = |name: &str| name.starts_with("pmd") || name.starts_with("ovs-vswitch");
    if demands.iter().all(|demand| *demand < 0.01)
        && !threads.iter().any(|thread| thread.name.starts_with("pmd"))
    {
        let polling = threads.iter().filter(|thread| polls(&thread.name));
        demands = polling.map(|thread| thread.demand()).collect();
    }
    let most = demands.iter().copied().max_by(f64::total_cmp)?;
    Some((demands.len(), most))
}

fn remedy() -> Remedy {
    Remedy::ask(
        Location::Here,
        "use flow rules that match fewer fields, a larger flow table, or more upcall threads",
        vec![
            "ovs-appctl dpctl/show".to_owned(),
            "ovs-appctl upcall/show".to_owned(),
            "ovs-vsctl set Open_vSwitch . other_config:flow-limit=500000".to_owned(),
            "ovs-vsctl set Open_vSwitch . other_config:n-handler-threads=$(nproc)".to_owned(),
        ],
        "the packets lost or delayed on the slow path",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn switch(handler: f64) -> Evidence {
        let mut evidence = tunnel();
        let program = evidence.map.program.as_mut().expect("program");
        program.name = "ovs-vswitchd".into();
        program.threads = vec![(100, "ovs-vswitchd".into()), (101, "handler7".into())];
        thread(&mut evidence, 100, 0.05, 0.0);
        thread(&mut evidence, 101, handler, 0.0);
        evidence
    }

    fn datapath(evidence: &mut Evidence, hits: u64, misses: u64, lost: u64) {
        for (name, value) in [
            (metric::SWITCH_HITS, hits),
            (metric::SWITCH_MISSES, misses),
            (metric::SWITCH_LOST, lost),
        ] {
            count(evidence, Subject::Host, name, value);
        }
    }

    #[test]
    fn many_misses_are_it() {
        let mut evidence = switch(0.8);
        datapath(&mut evidence, 80_000, 20_000, 500);
        assert!(present(evaluate(&evidence)).weight > 0.85);
    }

    #[test]
    fn a_table_that_is_full_in_user_space_is_it() {
        let mut evidence = switch(0.0);
        datapath(&mut evidence, 0, 2, 70_000);
        let finding = present(evaluate(&evidence));
        assert!(finding.weight > 0.85);
        assert!(finding.facts[0].value > 0.99 && finding.facts[0].value <= 1.0);
    }

    #[test]
    fn busy_threads_alone_make_it_likely() {
        let weight = present(evaluate(&switch(0.95))).weight;
        assert!((0.3..0.7).contains(&weight));
    }

    #[test]
    fn a_datapath_that_knows_its_flows_speaks_against_it() {
        let mut evidence = switch(0.95);
        datapath(&mut evidence, 1_000_000, 100, 0);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn threads_that_sleep_are_not_it() {
        assert!(absent(evaluate(&switch(0.1))));
    }

    #[test]
    fn another_program_has_no_slow_path() {
        let mut evidence = tunnel();
        thread(&mut evidence, 100, 0.98, 0.0);
        assert!(absent(evaluate(&evidence)));
    }
}
