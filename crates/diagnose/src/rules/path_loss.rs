//! Packets are lost outside of this host: connections retransmit, and no counter of this host explains it.

use seikan_observe::path::SocketFacts;

use super::prelude::*;
use super::scheduling::limited_by_work;
use crate::evidence::is_tolerated;
use crate::losses::{Arrivals, Losses};

/// Share of lost segments from which TCP suffers (Mathis et al. 1997: at 1 in 1,000 and 20 ms, 20 Mbit/s).
const LOSS: f64 = 0.001;
/// Fewer losses that matter on a long path or at a high rate: the ratio of TCP's rate to the rate
/// that the model allows for this loss, if it is below the expected throughput.
const BY_RATE: Ramp = Ramp::new(0.5, 0.8);
/// The same ratio from which losses are not random but come in bursts from a full queue. The limit
/// is then the bottleneck of that queue.
const AT_ONCE: Ramp = Ramp::new(2.0, 4.0);
/// Constant of the model, for one acknowledgement per segment (Mathis et al. 1997, table 1).
const MATHIS: f64 = 1.22;
/// Fewest losses for the model.
const LEAST_LOST: f64 = 8.0;
/// Maximum weight by the model, relative to the weight by the plain share.
const MOST_BY_RATE: f64 = 0.7;
/// Share of loss at which nothing else matters: one connection over 10 ms is down to 14 Mbit/s.
const FULL_LOSS: f64 = 0.01;
/// Share of segments received out of order: each lost one causes as many as are in flight, at least ten.
const EARLY: f64 = 0.01;
/// See [`EARLY`].
const FULL_EARLY: f64 = 0.1;
/// Largest weight at the sender: queues of the far end look the same from here.
const MOST_SENDING: f64 = 0.9;
/// Largest weight at a receiver: it does not know losses of the sender's host, nor late packets.
const MOST_RECEIVING: f64 = 0.6;

/// Share of the weight that a program at its limit takes away.
const MOST_BY_WORK: f64 = 0.8;
/// Share of unnecessary retransmissions from which packets were late rather than lost.
const NOTHING: Ramp = Ramp::new(0.3, 0.5);

pub(super) const SPEC: Spec = Spec::fault(
    Cause::PathLoss,
    PathStep::Network,
    "Packets are lost on the path, outside of this host.",
    evaluate,
)
.inferred()
.counted(Source::Flows, &[metric::TCP_RETRANS], Per::Packet, FEW);

fn evaluate(evidence: &Evidence) -> Judgement {
    // Loss of large packets only has a rule of its own.
    if let Some((lost, false)) = evidence
        .probes
        .mtu
        .and_then(|probe| Some((probe.lost?, probe.reported)))
    {
        return Fact::new(
            "size from which all packets are lost, bytes",
            f64::from(lost),
            "losses of every size",
            "probes that may not be fragmented",
        )
        .excludes();
    }
    if let Some(stall) = evidence.stalled() {
        return Fact::new(
            "share of bytes acknowledged on connections that time out",
            stall.acknowledged / stall.sent,
            "1 minus the loss",
            "tcp_info bytes_acked",
        )
        .excludes();
    }
    // A tunnel over TCP repairs losses; its inner connections only see delay.
    match (evidence.outer_losses(), evidence.inner_losses()) {
        (Some(outer), _) if evidence.sends() => evaluate_sender(evidence, outer, true),
        (None, Some(inner)) if !evidence.outer_tcp() => evaluate_sender(evidence, inner, false),
        _ => match evidence.arrivals() {
            Some(arrivals) => evaluate_receiver(evidence, arrivals),
            None => Err("this host sends and receives little TCP through the tunnel".into()),
        },
    }
}

fn evaluate_sender(evidence: &Evidence, losses: Losses, outer: bool) -> Judgement {
    let connections = if outer {
        "the tunnel's own connection"
    } else {
        "connections in the tunnel"
    };
    let share = losses.elsewhere();
    let by_rate = if outer {
        0.0
    } else {
        by_rate(evidence, losses)
    };
    let fact = Fact::new(
        format!("share of segments of {connections} lost outside of this host"),
        share,
        "below 0.001",
        "tcp_info total_retrans less dsack_dups and local drops",
    );
    if share < LOSS && by_rate == 0.0 {
        return fact.excludes();
    }
    let unexplained = share / losses.lost();
    // If the tunnel runs over TCP and inner connections suffer from its retransmissions, TCP over
    // TCP is the cause: over UDP they would tolerate the same loss. The loss is then the weaker
    // rival.
    let stacked = outer && super::tcp_over_tcp::inner_suffers(evidence);
    // An acknowledgement reports one duplicate: if most retransmissions were unnecessary, more of them were.
    let for_nothing = NOTHING.at(losses.spurious / losses.again);
    let weight = MOST_SENDING
        * (share / FULL_LOSS).min(1.0).max(MOST_BY_RATE * by_rate)
        * unexplained
        * if stacked { 0.3 } else { 1.0 }
        * (1.0 - 0.7 * for_nothing)
        // TCP fills its bottleneck until packets are lost there: with a program at its limit, that
        // is likely to be at the far end.
        * (1.0 - MOST_BY_WORK * limited_by_work(evidence).unwrap_or(0.0));
    let facts = vec![fact]
        .and(
            "share of segments retransmitted",
            losses.again / losses.segments,
            "below 0.001",
            "tcp_info total_retrans",
        )
        .and(
            "share of these that were unnecessary",
            losses.spurious / losses.again,
            "near 1, if packets were only late",
            "tcp_info dsack_dups",
        )
        .and(
            "segments dropped by this host",
            losses.here,
            "as many as retransmitted, if this host dropped them",
            "tx_dropped, qdisc drops, SndbufErrors",
        );
    finding(evidence, weight, facts)
}

/// Returns how near the connections are to the rate of the model, 0 to 1; 0 with the expected
/// throughput, and for a congestion control that does not react to losses.
fn by_rate(evidence: &Evidence, losses: Losses) -> f64 {
    let share = losses.elsewhere();
    let enough = share * losses.segments >= LEAST_LOST;
    if !enough || evidence.shortfall().is_none_or(is_tolerated) {
        return 0.0;
    }
    let rate = |flow: &SocketFacts| {
        let by_loss = matches!(flow.congestion.as_deref(), Some("cubic" | "reno"));
        let bits = 8.0
            * evidence
                .tcp_mean(flow, metric::TCP_MSS)
                .filter(|_| by_loss)?;
        let seconds = evidence.tcp_mean(flow, metric::TCP_RTT_US)? / 1e6;
        Some(MATHIS * bits / seconds.max(1e-6) / share.sqrt())
    };
    let rates: Option<Vec<f64>> = evidence.map.flows.iter().map(rate).collect();
    let reachable: f64 = rates.unwrap_or_default().iter().sum();
    if reachable <= 0.0 {
        return 0.0;
    }
    let times = evidence.throughput() / reachable;
    BY_RATE.at(times) * (1.0 - AT_ONCE.at(times))
}

fn evaluate_receiver(evidence: &Evidence, arrivals: Arrivals) -> Judgement {
    let share = arrivals.early / arrivals.segments;
    let fact = Fact::new(
        "share of segments received out of order",
        share,
        "below 0.01",
        "TcpExt.TCPOFOQueue over Tcp.InSegs",
    );
    if share < EARLY {
        return fact.excludes();
    }
    let here = arrivals.here / arrivals.segments;
    let twice = arrivals.twice / arrivals.segments;
    // A local loss of this size, or as many unnecessary retransmissions, explain it alone.
    let explained = (here / LOSS).min(1.0).max((twice / LOSS).min(1.0));
    let weight = MOST_RECEIVING * (share / FULL_EARLY).min(1.0) * (1.0 - 0.9 * explained);
    let facts = vec![fact]
        .and(
            "share of packets dropped by this host",
            here,
            "above 0.001, if this host dropped them",
            "drops of UDP sockets and interfaces; checksums",
        )
        .and(
            "share of segments received twice",
            twice,
            "above 0.001, if packets were only late",
            "TcpExt.TCPDSACKOldSent",
        );
    finding(evidence, weight, facts)
}

fn finding(evidence: &Evidence, weight: f64, facts: Vec<Fact>) -> Judgement {
    let mut remedies = vec![
        Remedy::ask(
            Location::FarEnd,
            "diagnose the far end as well: drops in its queues and sockets look the same from here",
            vec!["seikan doctor".into()],
            "finds the cause, if it is there",
        ),
        Remedy::ask(
            Location::Provider,
            "ask where packets are lost on the path, with the output of this command",
            outer_host(evidence)
                .map(|host| vec![format!("mtr --report --report-cycles 100 {host}")])
                .unwrap_or_default(),
            "these packets arrive",
        ),
    ];
    remedies.extend(patient(evidence));
    Ok(Finding::new(weight, facts, remedies))
}

/// Returns the remedy of a congestion control that does not take each loss for congestion, if this
/// host sends with one that does.
fn patient(evidence: &Evidence) -> Option<Remedy> {
    let name = evidence.main_flow()?.congestion.as_deref()?;
    let change =
        "use a congestion control that does not take each loss for congestion, for new connections";
    let gain = "several times the rate, if the loss is not congestion";
    let setting = Action::Sysctl {
        name: "net.ipv4.tcp_congestion_control".into(),
        value: "bbr".into(),
    };
    let sysctls = &evidence.map.host.sysctls;
    let available = sysctls.get("net.ipv4.tcp_available_congestion_control");
    let there = available.is_some_and(|names| names.split_whitespace().any(|name| name == "bbr"));
    match name {
        "cubic" | "reno" if there => Some(Remedy::here(change, vec![setting], gain)),
        "cubic" | "reno" => {
            let commands = vec!["modprobe tcp_bbr".into(), setting.command()];
            Some(Remedy::ask(Location::Here, change, commands, gain))
        }
        _ => None,
    }
}

fn outer_host(evidence: &Evidence) -> Option<String> {
    let remotes = evidence.map.sockets.iter();
    let mut remotes = remotes.filter_map(|socket| socket.remote);
    remotes.next().map(|remote| remote.ip().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;
    use crate::{MtuProbe, Probes};
    use seikan_observe::path::Transport;
    use seikan_observe::{Subject, metric};

    #[test]
    fn loss_that_nothing_here_explains_is_it() {
        assert_eq!(present(evaluate(&sender(10_000, 100, 0))).weight, 0.9);
    }

    #[test]
    fn few_losses_matter_on_a_long_path() {
        // 10 of 20,000 segments are lost in 10 s.
        let mut evidence = sender(20_000, 10, 0);
        evidence.map.flows[0].congestion = Some("cubic".into());
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, 22_000);
        // 1,448 bytes x 1.22 / 22 ms / sqrt(1 / 2,000): 29 Mbit/s, of which it has 24.
        evidence.expected = Some(60e6);
        let weight = present(evaluate(&evidence)).weight;
        assert!((0.55..0.65).contains(&weight), "{weight}");
        // A connection with the expected throughput does not suffer.
        evidence.expected = Some(24e6);
        assert!(absent(evaluate(&evidence)));
        // Over a short path the model allows 40 times as much.
        evidence.expected = Some(60e6);
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, 500);
        assert!(absent(evaluate(&evidence)));
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, 22_000);
        evidence.map.flows[0].congestion = Some("bbr".into());
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn few_losses_of_a_full_queue_are_not() {
        // As above, with a queue that adds 100 ms: 5 Mbit/s by the model, a fifth of the rate.
        let mut evidence = sender(20_000, 10, 0);
        evidence.map.flows[0].congestion = Some("cubic".into());
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, 122_000);
        evidence.expected = Some(60e6);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn another_congestion_control_is_set_where_the_kernel_has_it() {
        let mut evidence = sender(10_000, 100, 0);
        let last = |evidence: &Evidence| {
            let remedies = present(evaluate(evidence)).remedies;
            remedies.last().expect("remedies").clone()
        };
        assert_eq!(last(&evidence).actions, []);
        let name = "net.ipv4.tcp_available_congestion_control";
        let sysctls = &mut evidence.map.host.sysctls;
        sysctls.insert(name.into(), "reno cubic bbr".into());
        assert_eq!(
            last(&evidence).commands,
            ["sysctl -w net.ipv4.tcp_congestion_control=\"bbr\""]
        );
    }

    #[test]
    fn a_trace_weighs_little() {
        assert!(present(evaluate(&sender(10_000, 20, 0))).weight < 0.3);
        assert!(absent(evaluate(&sender(10_000, 5, 0))));
    }

    #[test]
    fn drops_of_the_inner_queue_are_not() {
        let mut evidence = sender(10_000, 500, 0);
        count(&mut evidence, inner(), metric::TX_DROPPED, 495);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn unnecessary_retransmissions_are_not() {
        assert!(absent(evaluate(&sender(10_000, 500, 495))));
    }

    #[test]
    fn loss_of_large_packets_only_is_not() {
        let mut evidence = sender(10_000, 500, 0);
        evidence.probes = Probes {
            mtu: Some(MtuProbe {
                passed: Some(1300),
                lost: Some(1301),
                reported: false,
            }),
            ..Probes::default()
        };
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_receiver_sees_segments_out_of_order() {
        assert_eq!(present(evaluate(&receiver(10_000, 1_000, 0))).weight, 0.6);
        assert!(absent(evaluate(&receiver(10_000, 10, 0))));
    }

    #[test]
    fn an_overflow_of_the_receiving_socket_is_not() {
        let mut evidence = receiver(10_000, 1_000, 0);
        count(&mut evidence, Subject::Udp(1), metric::UDP_DROPS, 100);
        assert!(present(evaluate(&evidence)).weight < 0.1);
    }

    #[test]
    fn a_tunnel_over_tcp_counts_its_own_losses() {
        let mut evidence = sender(10_000, 0, 0);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        count(&mut evidence, Subject::Tcp(3), metric::TCP_SEGS_OUT, 10_000);
        count(&mut evidence, Subject::Tcp(3), metric::TCP_RETRANS, 200);
        assert_eq!(present(evaluate(&evidence)).weight, 0.9);
        // If the inner connections suffer as well, TCP over TCP is the cause.
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 5);
        assert!(present(evaluate(&evidence)).weight < 0.3);
    }
}
