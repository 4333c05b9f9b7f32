//! One processor handles all received packets although several could: the tunnel's packets are one
//! flow, and the kernel keeps a flow on one processor.

use seikan_observe::path::SocketFacts;
use std::collections::BTreeSet;

use super::prelude::*;
use super::receive::{is_spread, one_core, spread};

pub(super) const SPEC: Spec = Spec::fault(
    Cause::OuterFlowCannotSpread,
    PathStep::OuterLink,
    "All packets of the tunnel are one flow for the kernel, so one processor has to receive \
     them all.",
    evaluate,
)
.effects(&[
    Cause::BacklogFull,
    Cause::NapiBudget,
    Cause::CpuContention,
    Cause::UdpReceiveBuffer,
]);

fn evaluate(evidence: &Evidence) -> Judgement {
    let link = evidence
        .map
        .egress_link()
        .ok_or("the outer interface is not known")?;
    let found = one_core(evidence)?;
    if !is_spread(link) {
        return Fact::new(
            format!(
                "processors that share the packets received on {}",
                link.name
            ),
            1.0,
            "2 or more, if flows were the limit",
            "rps_cpus and receive queues",
        )
        .excludes();
    }
    let flows = outer_flows(&evidence.map.sockets);
    let mut facts = found.facts;
    let flow_fact = Fact::new(
        "outer flows of the tunnel",
        flows as f64,
        "at least as many as processors",
        "the program's sockets",
    );
    if flows > 1 {
        return flow_fact.excludes();
    }
    facts.insert(1, flow_fact);
    let mut remedies = vec![Remedy::ask(
        Location::Tunnel,
        "use more outer flows: several ports or lanes, or several tunnels that share the connections",
        Vec::new(),
        "a factor of up to the number of processors",
    )];
    if let Some(inner) = evidence.map.inner_link().filter(|inner| !is_spread(inner)) {
        remedies.push(Remedy::here(
            "spread the packets again after decapsulation",
            spread(evidence, inner),
            "the work after the tunnel, if there are several inner connections",
        ));
    }
    weighted(0.9 * found.strength, facts, remedies)
}

/// Returns the number of pairs of addresses and ports of the sockets: an unconnected socket counts
/// as one. A tunnel of the kernel has no sockets of a program and is one flow.
fn outer_flows(sockets: &[SocketFacts]) -> usize {
    let flows: BTreeSet<_> = sockets
        .iter()
        .map(|socket| (socket.local, socket.remote))
        .collect();
    flows.len().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::path::Transport;
    use seikan_observe::{Subject, metric};

    fn spread() -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[1].rps = vec![vec![0, 1]];
        processor(&mut evidence, 0, 1.0, 0.93);
        processor(&mut evidence, 1, 0.3, 0.05);
        for (cpu, packets) in [(0, 98_000), (1, 2_000)] {
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
    fn one_flow_on_one_processor_is_it() {
        let finding = present(evaluate(&spread()));
        assert!(finding.weight > 0.85);
        assert_eq!(finding.remedies[0].location, Location::Tunnel);
    }

    #[test]
    fn several_flows_are_not() {
        let mut evidence = spread();
        let mut second = socket(3, Transport::Udp);
        second.local.set_port(1001);
        evidence.map.sockets.push(second);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn nothing_to_spread_them_is_another_cause() {
        let mut evidence = spread();
        evidence.map.links[1].rps.clear();
        assert!(absent(evaluate(&evidence)));
    }
}
