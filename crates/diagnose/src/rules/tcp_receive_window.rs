//! The receive window is too small: the receiving program reads too slowly, or its buffer is too
//! small for the round-trip time.
//!
//! A large window is also used up by a queue at a bottleneck; then the round trip is several times
//! the shortest, and the window only limits the queue.

use seikan_observe::path::SocketFacts;

use super::prelude::*;

/// Share of the busy time limited by the receiver's window from which it is a cause.
const LIMITED: f64 = 0.25;
/// Window up to which it is small for a bulk transfer, bytes: the kernel starts at 64 KiB and grows
/// it to 3 MiB.
const SMALL: f64 = 262_144.0;
/// Ratio of the round-trip time to the shortest from which the path has a queue.
const QUEUE: f64 = 2.0;
/// Round-trip time from which a large window is a matter of path-delay, microseconds.
const LONG_US: f64 = 20_000.0;
/// Zero windows per second from which the programs of this host read too slowly.
const CLOSED: f64 = 0.5;
/// Ratio of the rate to buffer / round trip from which the buffer is the limit; half of it is
/// window, and half of that used.
const FILLED: f64 = 0.25;
/// Largest receive buffer by default (net/ipv4/tcp.c), bytes.
const NORMAL_MOST: u64 = 6_291_456;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::TcpReceiveWindow,
    PathStep::Applications,
    "The receiving program reads its data too slowly, or its receive window is too small.",
    evaluate,
)
.inferred()
.counted(
    Source::Flows,
    &[metric::TCP_RWND_LIMITED_US],
    Per::Second,
    0.1e6,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    if evidence.sends_tcp() {
        return match evidence.main_flow() {
            Some(flow) => evaluate_sender(evidence, flow),
            None => Err("no connection transfers data through the tunnel".into()),
        };
    }
    match evidence.flows(metric::TCP_BYTES_RECEIVED) {
        Some(received) if received > 0.0 => evaluate_receiver(evidence, received),
        _ => Err("this host has no TCP connection through the tunnel".into()),
    }
}

fn evaluate_sender(evidence: &Evidence, flow: &SocketFacts) -> Judgement {
    let growth = |name| evidence.tcp(flow, name);
    let (busy, limited) = growth(metric::TCP_BUSY_US)
        .zip(growth(metric::TCP_RWND_LIMITED_US))
        .ok_or("the kernel does not report the limits of connections")?;
    let share = (limited / busy.max(1.0)).min(1.0);
    let fact = Fact::new(
        "share of the busy time limited by the receiver's window",
        share,
        "below 0.25",
        "tcp_info rwnd_limited over busy",
    );
    if share < LIMITED {
        return fact.excludes();
    }
    let mut facts = vec![fact];
    let window = evidence.tcp_mean(flow, metric::TCP_SND_WND);
    facts = facts.and(
        "the receiver's window, KiB",
        window.map(|window| window / 1024.0),
        "above 256, and the wanted rate times the round-trip time",
        "tcp_info snd_wnd",
    );
    let small = window.is_none_or(|window| window <= SMALL);
    let shortest = evidence.min_rtt_us(flow);
    let mean = evidence.tcp_mean(flow, metric::TCP_RTT_US);
    let queue = shortest.zip(mean).map(|(shortest, mean)| mean / shortest);
    facts = facts.and(
        "ratio of the round-trip time to the shortest",
        queue,
        "above 2, if a bottleneck had a queue",
        "tcp_info rtt over min_rtt",
    );
    let mut weight = 0.95 * share;
    if !small && queue.is_some_and(|queue| queue > QUEUE) {
        weight *= 0.25;
    } else if !small && shortest.is_some_and(|shortest| shortest > LONG_US) {
        weight *= 0.5;
    }
    let remedies = vec![
        Remedy::ask(
            Location::FarEnd,
            "enlarge the receive buffer on the receiving host, and let the program not fix it (SO_RCVBUF)",
            vec![format!(
                "sysctl -w net.ipv4.tcp_rmem=\"4096 131072 {}\"",
                4 * NORMAL_MOST
            )],
            "up to the next bottleneck, if the buffer is the limit",
        ),
        Remedy::ask(
            Location::Application,
            "make the receiving program read faster: find out why it waits (disk, processor)",
            vec!["ss -tmi".into()],
            "up to the next bottleneck, if the program is the limit",
        ),
    ];
    Ok(Finding::new(weight, facts, remedies))
}

fn evaluate_receiver(evidence: &Evidence, received: f64) -> Judgement {
    let closed = evidence.host("TcpExt.TCPToZeroWindowAdv");
    let closed = closed.map(|times| times / evidence.seconds());
    let flows = evidence.map.flows.iter();
    let buffers: f64 = flows.map(|flow| f64::from(flow.receive_buffer)).sum();
    let count = evidence.map.flows.len().max(1) as f64;
    let round_trip = evidence
        .probes
        .loaded_rtt_us
        .or_else(|| evidence.shortest_rtt_us());
    let filled = round_trip
        .filter(|_| buffers > 0.0)
        .map(|us| received / evidence.seconds() * (us / 1e6) / buffers);
    let closed_fact = closed.map(|times| {
        Fact::new(
            "zero windows advertised by this host, per second",
            times,
            "0",
            "TcpExt.TCPToZeroWindowAdv",
        )
    });
    let buffer_fact = Fact::new(
        "receive buffer of a connection, KiB",
        buffers / count / 1024.0,
        "above 256, and growing",
        "SO_RCVBUF",
    );
    let reads_late = closed.is_some_and(|times| times >= CLOSED);
    let small = buffers > 0.0 && buffers / count <= SMALL;
    let limited = small && filled.is_some_and(|filled| filled >= FILLED);
    if !reads_late && !limited {
        return closed_fact.unwrap_or(buffer_fact).excludes();
    }
    let mut facts = vec![buffer_fact].and(
        "ratio of the rate to the buffer per round trip",
        filled,
        "below 0.25",
        "tcp_info bytes_received, min_rtt",
    );
    if let Some(fact) = closed_fact {
        facts.insert(if reads_late { 0 } else { facts.len() }, fact);
    }
    let mut remedies = Vec::new();
    let setting = evidence.map.host.sysctls.get("net.ipv4.tcp_rmem");
    let most = setting.and_then(|value| value.split_whitespace().last()?.parse::<u64>().ok());
    if most.is_some_and(|most| most < NORMAL_MOST) {
        remedies.push(Remedy::here(
            "let receive buffers grow",
            vec![Action::Sysctl {
                name: "net.ipv4.tcp_rmem".into(),
                value: format!("4096 131072 {}", 4 * NORMAL_MOST),
            }],
            "up to the next bottleneck, if the buffer is the limit",
        ));
    }
    remedies.push(Remedy::ask(
        Location::Application,
        "use a program that reads faster and does not set its receive buffer (SO_RCVBUF)",
        vec!["ss -tmi".into()],
        "up to the next bottleneck, if the program is the limit",
    ));
    let weight = if limited { 0.8 } else { 0.6 };
    Ok(Finding::new(weight, facts, remedies))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn limited(us: u64, window: u64, rtt_us: u64) -> Evidence {
        let mut evidence = sender(10_000, 0, 0);
        count(&mut evidence, flow(), metric::TCP_RWND_LIMITED_US, us);
        gauge(&mut evidence, flow(), metric::TCP_SND_WND, window);
        gauge(&mut evidence, flow(), metric::TCP_MIN_RTT_US, 1_000);
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, rtt_us);
        evidence
    }

    #[test]
    fn a_small_window_most_of_the_time_is_it() {
        let finding = present(evaluate(&limited(9_500_000, 65_536, 1_200)));
        assert!(finding.weight > 0.85);
    }

    #[test]
    fn an_open_window_is_not() {
        assert!(absent(evaluate(&limited(500_000, 3_000_000, 1_200))));
    }

    #[test]
    fn a_large_window_full_of_a_queue_is_the_queues_matter() {
        let finding = present(evaluate(&limited(9_500_000, 3_000_000, 30_000)));
        assert!(finding.weight < 0.3);
    }

    #[test]
    fn a_receiver_that_closes_its_window_is_it() {
        let mut evidence = receiver(10_000, 0, 0);
        let closed = "TcpExt.TCPToZeroWindowAdv";
        count(&mut evidence, Subject::Host, closed, 40);
        assert_eq!(present(evaluate(&evidence)).weight, 0.6);
        count(&mut evidence, Subject::Host, closed, 0);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_receiver_with_a_small_buffer_for_the_distance_is_it() {
        // 1.4 MB/s over 100 ms are 145 kB: two thirds of 208 KiB.
        let mut evidence = receiver(10_000, 0, 0);
        gauge(&mut evidence, flow(), metric::TCP_MIN_RTT_US, 100_000);
        evidence
            .map
            .host
            .sysctls
            .insert("net.ipv4.tcp_rmem".into(), "4096\t65536\t65536".into());
        let finding = present(evaluate(&evidence));
        assert_eq!(finding.weight, 0.8);
        assert_eq!(
            finding.remedies[0].commands,
            ["sysctl -w net.ipv4.tcp_rmem=\"4096 131072 25165824\""]
        );
    }
}
