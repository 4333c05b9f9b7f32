//! Under load all packets wait in a queue: the round trip through the tunnel is much longer than
//! without load.
//!
//! The delay is attributed to queues by Little's law (delay = queue length / rate); the rest is in
//! a queue that this host does not see.

use seikan_observe::Subject;
use seikan_observe::path::LinkFacts;

use super::prelude::*;

/// Added delay under load, milliseconds: a default queue in front of a user-space tunnel adds up to
/// 30; from 200 on, calls break and TCP takes long to find its rate.
const ADDED_MS: Ramp = Ramp::new(30.0, 200.0);
/// Ratio to the delay without load: on a long path a small addition does not matter.
const TIMES: Ramp = Ramp::new(1.5, 3.0);
/// Share of lost segments of the tunnel's own connection from which retransmissions delay packets,
/// and the factor by which the weight of a queue is then reduced.
const REPAIRS: f64 = 0.001;
const BY_REPAIRS: f64 = 0.3;
/// Delay of a queue that is long enough for a burst, milliseconds: several times the target of
/// CoDel (5, RFC 8289).
const GOOD_MS: f64 = 20.0;
/// Shortest recommended queue, packets: shorter ones drop packets of every burst.
const LEAST_LENGTH: f64 = 100.0;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::Bufferbloat,
    PathStep::OuterLink,
    "A long queue has built up in front of a bottleneck, and every packet waits in it.",
    evaluate,
)
.inferred()
.counted(
    Source::Qdiscs,
    &[metric::QDISC_BACKLOG_BYTES],
    Per::Value,
    60_000.0,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let (idle, loaded, source) = round_trips(evidence).ok_or("no round-trip time: no probe was answered, and this host has no TCP connection through the tunnel")?;
    let added = loaded - idle;
    let mut facts = Vec::new()
        .and(
            "added round-trip time under load, ms",
            added,
            "below 30",
            source,
        )
        .and(
            "round-trip time without load, ms",
            idle,
            "depends on the path",
            source,
        )
        .and(
            "round-trip time under load, ms",
            loaded,
            "about the same",
            source,
        );
    let links = evidence.map.links.iter();
    let queues = links.filter_map(|link| Some((link, queue_delay(evidence, link)?)));
    let longest = queues.max_by(|a, b| a.1.total_cmp(&b.1));
    let longest = longest.filter(|(_, delay)| *delay > 1.0);
    if let Some((link, delay)) = longest {
        facts = facts.and(
            format!("delay in the {} of {}, ms", link.qdisc, link.name),
            delay,
            "below 20",
            "qdisc backlog / rate",
        );
    }
    let ring = ring(evidence);
    facts = facts.and(
        "delay of the tunnel's full queue, ms",
        ring,
        "20 to 50",
        "txqueuelen x mean packet / rate",
    );
    // A tunnel over TCP stalls while it retransmits: waiting packets wait for that.
    let repairs = evidence.outer_losses();
    let repairs = repairs.is_some_and(|losses| losses.elsewhere() >= REPAIRS);
    let weight = 0.9
        * ADDED_MS.at(added)
        * TIMES.at(loaded / idle.max(0.01))
        * if repairs { BY_REPAIRS } else { 1.0 };
    let mut remedies = Vec::new();
    if let Some((link, _)) = longest.filter(|(_, delay)| *delay > added / 4.0) {
        remedies.push(Remedy::ask(
            Location::Here,
            format!(
                "use fq_codel on {}, inside its rate limit if it has one",
                link.name
            ),
            vec![format!("tc qdisc replace dev {} root fq_codel", link.name)],
            "the delay disappears; the throughput stays",
        ));
    }
    // A ring explains the delay only if its own delay is long enough; otherwise the queue is
    // elsewhere.
    if ring.is_some_and(|delay| delay > added / 2.0 && delay > 2.0 * GOOD_MS) {
        remedies.extend(shorter_ring(evidence));
    }
    remedies.push(Remedy::ask(
        Location::Provider,
        "use active queue management (fq_codel, CAKE) on the router before the slow link, or shape on this host a \
         little below the rate of that link",
        vec!["tc qdisc replace dev EGRESS root cake bandwidth 95%-OF-THE-RATE".to_owned()],
        "the delay disappears for 5 % of the rate",
    ));
    weighted(weight, facts, remedies)
}

/// Returns the round-trip times without and under load, milliseconds, and their source.
fn round_trips(evidence: &Evidence) -> Option<(f64, f64, &'static str)> {
    let probes = &evidence.probes;
    if let (Some(idle), Some(loaded)) = (probes.idle_rtt_us, probes.loaded_rtt_us) {
        return Some((idle / 1e3, loaded / 1e3, "probes through the tunnel"));
    }
    let flow = evidence.main_flow()?;
    let least = evidence.tcp_mean(flow, metric::TCP_MIN_RTT_US)?;
    let mean = evidence.tcp_mean(flow, metric::TCP_RTT_US)?;
    (least > 0.0).then_some((least / 1e3, mean / 1e3, "tcp_info min_rtt, rtt"))
}

/// Returns the delay of an interface's queueing disciplines, milliseconds.
fn queue_delay(evidence: &Evidence, link: &LinkFacts) -> Option<f64> {
    let qdisc = Subject::Qdisc(link.name.clone());
    let backlog = evidence.column(&qdisc, metric::QDISC_BACKLOG_BYTES)?.mean();
    let rate = evidence.qdisc(&link.name, metric::QDISC_BYTES)? / evidence.seconds();
    (rate > 0.0).then(|| backlog / rate * 1e3)
}

/// Returns the delay of the tun device's ring if it were full, milliseconds; its fill level is not known.
fn ring(evidence: &Evidence) -> Option<f64> {
    let link = evidence.map.inner_link()?;
    let throughput = evidence.throughput();
    if !matches!(&*link.kind, "tun" | "tap") || throughput == 0.0 || !evidence.sends() {
        return None;
    }
    let bits = f64::from(link.queue_length) * evidence.bytes_per_packet()? * 8.0;
    Some(bits / throughput * 1e3)
}

fn shorter_ring(evidence: &Evidence) -> Option<Remedy> {
    let link = evidence.map.inner_link()?;
    let per_ms = evidence.throughput() / 8.0 / evidence.bytes_per_packet()? / 1e3;
    let packets = (GOOD_MS * per_ms).max(LEAST_LENGTH).ceil();
    let shorter = packets < f64::from(link.queue_length);
    shorter.then(|| {
        Remedy::here(
            "shorten the queue of the tunnel's interface",
            vec![Action::QueueLength {
                link: link.name.clone(),
                packets: packets as u32,
            }],
            "most of the delay disappears; if the throughput falls, the queue is too short",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::path::Transport;

    fn probed(idle_us: f64, loaded_us: f64) -> Evidence {
        let mut evidence = tunnel();
        evidence.probes.idle_rtt_us = Some(idle_us);
        evidence.probes.loaded_rtt_us = Some(loaded_us);
        evidence
    }

    #[test]
    fn a_round_trip_that_swells_is_it() {
        assert!(present(evaluate(&probed(1_000.0, 300_000.0))).weight > 0.85);
    }

    #[test]
    fn a_default_queue_is_not() {
        assert!(absent(evaluate(&probed(200.0, 20_000.0))));
    }

    #[test]
    fn a_long_path_is_not_a_long_queue() {
        assert!(absent(evaluate(&probed(200_000.0, 240_000.0))));
        assert!(unseen(evaluate(&tunnel())));
    }

    #[test]
    fn without_probes_a_connection_shows_it() {
        let mut evidence = tunnel();
        let flow = || Subject::Tcp(2);
        count(&mut evidence, flow(), metric::TCP_BYTES_ACKED, 1_000_000);
        gauge(&mut evidence, flow(), metric::TCP_MIN_RTT_US, 1_000);
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, 300_000);
        present(evaluate(&evidence));
    }

    #[test]
    fn retransmissions_of_a_tunnel_over_tcp_are_no_long_queue() {
        let mut evidence = probed(1_000.0, 300_000.0);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        let outer = || Subject::Tcp(3);
        count(&mut evidence, outer(), metric::TCP_SEGS_OUT, 10_000);
        count(&mut evidence, outer(), metric::TCP_RETRANS, 0);
        let long = present(evaluate(&evidence)).weight;
        count(&mut evidence, outer(), metric::TCP_RETRANS, 80);
        let repaired = present(evaluate(&evidence)).weight;
        assert!(long > 0.85 && repaired < 0.3, "{long} {repaired}");
    }

    #[test]
    fn the_longest_queue_is_named() {
        let mut evidence = probed(1_000.0, 300_000.0);
        let qdisc = || Subject::Qdisc("eth0".into());
        // 1 MB/s and a queue of 290 kB: 290 ms.
        count(&mut evidence, qdisc(), metric::QDISC_BYTES, 10_000_000);
        gauge(&mut evidence, qdisc(), metric::QDISC_BACKLOG_BYTES, 290_000);
        let finding = present(evaluate(&evidence));
        assert!((finding.facts[3].value - 290.0).abs() < 1.0);
        assert_eq!(
            finding.remedies[0].commands,
            ["tc qdisc replace dev eth0 root fq_codel"]
        );
    }

    #[test]
    fn a_ring_that_is_too_long_is_cut_but_not_too_short() {
        let mut evidence = probed(1_000.0, 300_000.0);
        evidence.map.links[0].queue_length = 10_000;
        // 10,000 packets of 1,000 bytes a second: a full ring lasts a second, 20 ms are 200 packets.
        count(&mut evidence, inner(), metric::TX_PACKETS, 100_000);
        count(&mut evidence, inner(), metric::TX_BYTES, 100_000_000);
        let finding = present(evaluate(&evidence));
        assert_eq!(
            finding.remedies[0].commands,
            ["ip link set dev tun0 txqueuelen 200"]
        );
    }
}
