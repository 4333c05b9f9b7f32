//! The tunnel runs over TCP, which repairs losses late, and the connections inside retransmit the same data.
//!
//! The loss or the stacking may be the deeper cause. Paths lose packets now and then, and over UDP
//! each loss affects one connection. Over TCP everything waits for the repair. So if the inner
//! connections suffer, the stacking is named and the loss is a weaker rival; otherwise the loss is
//! named and the stacking is weaker. A full ring in front of a program that may not send is an
//! effect.

use super::prelude::*;

/// Share of the tunnel's own segments lost from which repairs matter.
const LOSS: f64 = 0.001;
/// Share at which the repairs stop all connections.
const FULL_LOSS: f64 = 0.005;
/// Share of segments that inner connections retransmit, although no segment is lost between their ends.
const INNER: f64 = 0.002;
/// Share of segments received out of order with which a receiver sees the repairs.
const EARLY: f64 = 0.01;
/// See [`EARLY`].
const FULL_EARLY: f64 = 0.1;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::TcpOverTcp,
    PathStep::Sockets,
    "The tunnel runs over TCP: the connections inside it retransmit the data that the tunnel \
     itself retransmits late.",
    evaluate,
)
.effects(&[Cause::TunQueueOverflow, Cause::Bufferbloat])
.counted(Source::Outer, &[metric::TCP_RETRANS], Per::Packet, FEW);

fn evaluate(evidence: &Evidence) -> Judgement {
    let connections = evidence.outer_connections().count();
    if connections == 0 {
        return Fact::new(
            "TCP connections that carry the tunnel",
            0.0,
            "0",
            "sockets of the program",
        )
        .excludes();
    }
    let suffers = inner_suffers(evidence);
    let (fact, signature) = match (evidence.outer_losses(), evidence.arrivals()) {
        (Some(losses), _) if evidence.sends() => (
            Fact::new(
                "share of segments of the tunnel's own connection lost on the path",
                losses.elsewhere(),
                "below 0.001",
                "tcp_info total_retrans of the program's socket",
            ),
            strength(losses.elsewhere(), LOSS, FULL_LOSS),
        ),
        (_, Some(arrivals)) => (
            Fact::new(
                "share of segments received out of order",
                arrivals.early / arrivals.segments,
                "below 0.01",
                "TcpExt.TCPOFOQueue over Tcp.InSegs",
            ),
            // Inner and outer segments are counted together.
            0.7 * strength(arrivals.early / arrivals.segments, EARLY, FULL_EARLY),
        ),
        _ => {
            return Err("the tunnel's own TCP connection carried too little data".into());
        }
    };
    if signature == 0.0 {
        return fact.excludes();
    }
    let mut facts = vec![fact];
    let counters = [
        (
            "timeouts of connections in the tunnel",
            evidence.flows(metric::TCP_TIMEOUTS),
            "tcp_info total_rto",
        ),
        (
            "unnecessary timeouts",
            evidence.host("TcpExt.TCPSpuriousRTOs"),
            "TcpExt.TCPSpuriousRTOs",
        ),
        (
            "segments retransmitted by connections in the tunnel",
            evidence.flows(metric::TCP_RETRANS),
            "tcp_info total_retrans",
        ),
    ];
    for (name, value, source) in counters {
        facts = facts.and(name, value, "0", source);
    }
    Ok(Finding::new(
        signature * if suffers { 0.9 } else { 0.29 },
        facts,
        vec![Remedy::ask(
            Location::Tunnel,
            "use UDP as the tunnel's transport, at both ends (OpenVPN: `proto udp`)",
            vec![],
            "a loss then slows one connection and stops none",
        )],
    ))
}

/// Whether the inner connections react to the outer repairs.
pub(super) fn inner_suffers(evidence: &Evidence) -> bool {
    let any = |value: Option<f64>| value.is_some_and(|value| value > 0.0);
    let again = evidence
        .inner_losses()
        .map(|losses| losses.again / losses.segments);
    let twice = evidence
        .arrivals()
        .map(|arrivals| arrivals.twice / arrivals.segments);
    any(evidence.flows(metric::TCP_TIMEOUTS))
        || any(evidence.host("TcpExt.TCPSpuriousRTOs"))
        || again.is_some_and(|share| share >= INNER)
        || twice.is_some_and(|share| share >= INNER)
}

fn strength(value: f64, from: f64, full: f64) -> f64 {
    if value < from {
        return 0.0;
    }
    (value / full).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;
    use seikan_observe::path::Transport;

    fn over_tcp(lost: u64, timeouts: u64) -> Evidence {
        let mut evidence = sender(10_000, timeouts, 0);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        count(&mut evidence, Subject::Tcp(3), metric::TCP_SEGS_OUT, 10_000);
        count(&mut evidence, Subject::Tcp(3), metric::TCP_RETRANS, lost);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, timeouts);
        evidence
    }

    #[test]
    fn losses_outside_and_timeouts_inside_are_it() {
        assert_eq!(present(evaluate(&over_tcp(100, 5))).weight, 0.9);
    }

    #[test]
    fn losses_that_the_inner_connections_do_not_feel_weigh_little() {
        assert!(present(evaluate(&over_tcp(100, 0))).weight < 0.3);
    }

    #[test]
    fn without_losses_or_without_tcp_outside_it_is_not() {
        assert!(absent(evaluate(&over_tcp(0, 5))));
        assert!(absent(evaluate(&sender(10_000, 100, 0))));
    }

    #[test]
    fn drops_of_this_hosts_queue_are_not_the_path() {
        let mut evidence = over_tcp(100, 5);
        let qdisc = Subject::Qdisc("eth0".into());
        count(&mut evidence, qdisc, metric::QDISC_DROPS, 100);
        assert!(absent(evaluate(&evidence)));
    }
}
