//! The tunnel runs over a TCP connection whose buffers are too small for its round-trip time: rate
//! = buffer / round trip.
//!
//! A small buffer is also full before a slow bottleneck; then packets wait, and the round trip is
//! longer than the shortest. The buffer is the limit only if data in flight takes about the
//! shortest round trip.

use seikan_observe::Subject;
use seikan_observe::path::SocketFacts;

use super::prelude::*;
use crate::Excluded;

/// Share of its busy time limited by a buffer from which it is a cause.
const LIMITED: f64 = 0.25;
/// Ratio of the rate to window / shortest round trip from which the path, not a queue, takes the time.
const FILLED: f64 = 0.4;
/// The same ratio from which no queue takes any time.
const FULLY_FILLED: f64 = 0.7;
/// Ratio of data in flight to the offered window from which the window is the limit.
const FULL: Ramp = Ramp::new(0.6, 0.8);
/// Receive buffer up to which the program fixed it, or it never grew, bytes; the kernel grows its
/// own to 6 MiB.
const FIXED: u32 = 262_144;
/// Share of a receive buffer that the kernel offers as window (`tcp_adv_win_scale` 1).
const OFFERED: f64 = 0.5;
/// Load from which a thread itself is the limit.
const BUSY: f64 = 0.9;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::TcpOuterBuffer,
    PathStep::Sockets,
    "The tunnel runs over a TCP connection whose buffers are too small for this round-trip \
     time.",
    evaluate,
)
.effects(&[Cause::TunQueueOverflow, Cause::Bufferbloat])
.counted(
    Source::Outer,
    &[metric::TCP_SNDBUF_LIMITED_US, metric::TCP_RWND_LIMITED_US],
    Per::Second,
    0.1e6,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let carried = |socket: &&SocketFacts| {
        let of = |name| evidence.tcp(socket, name).unwrap_or(0.0);
        (of(metric::TCP_BYTES_ACKED) + of(metric::TCP_BYTES_RECEIVED)) as u64
    };
    let Some(socket) = evidence.outer_connections().max_by_key(carried) else {
        return Fact::new(
            "TCP connections that carry the tunnel",
            0.0,
            "0",
            "sockets of the program",
        )
        .excludes();
    };
    let (weight, mut facts) = if evidence.sends() {
        evaluate_sender(evidence, socket)?
    } else {
        evaluate_receiver(evidence, socket)?
    };
    let busiest = evidence.busy();
    facts = facts.and(
        "share of the time in which the busiest thread ran or waited for a processor",
        busiest,
        "near 1, if the processor were the limit",
        "schedstat",
    );
    let weight = match busiest {
        Some(busiest) if busiest > BUSY => 0.3 * weight,
        _ => weight,
    };
    Ok(Finding::new(
        weight,
        facts,
        vec![
            Remedy::ask(
                Location::Tunnel,
                "remove fixed socket buffers at both ends, so that the kernel grows them (OpenVPN: `sndbuf 0`, `rcvbuf 0`)",
                vec![],
                "up to the next bottleneck",
            ),
            Remedy::ask(
                Location::Tunnel,
                "use UDP as the tunnel's transport, at both ends",
                vec![],
                "no outer window",
            ),
        ],
    ))
}

fn evaluate_sender(
    evidence: &Evidence,
    socket: &SocketFacts,
) -> Result<(f64, Vec<Fact>), Excluded> {
    let growth = |name| evidence.tcp(socket, name);
    let busy =
        growth(metric::TCP_BUSY_US).ok_or("the tunnel's own TCP connection is not readable")?;
    let of_busy = |name| growth(name).unwrap_or(0.0) / busy.max(1.0);
    let here = of_busy(metric::TCP_SNDBUF_LIMITED_US);
    let there = of_busy(metric::TCP_RWND_LIMITED_US);
    let mean = |name| evidence.tcp_mean(socket, name).unwrap_or(0.0);
    let window = mean(metric::TCP_UNACKED) * mean(metric::TCP_MSS);
    let rate = growth(metric::TCP_BYTES_ACKED).unwrap_or(0.0) / evidence.seconds();
    let (filled, mut facts) = fill(evidence, socket, window, rate);
    // A window that is always full is not always counted as the limit: the sender waits before the
    // kernel does.
    let offered = mean(metric::TCP_SND_WND);
    let full = filled.filter(|_| offered > 0.0).map_or(0.0, |filled| {
        FULL.at(window / offered) * Ramp::new(FILLED, FULLY_FILLED).at(filled)
    });
    let limited = (here + there).clamp(full, 1.0);
    let fact = Fact::new(
        "share of the busy time in which buffers limited the tunnel's own connection",
        limited,
        "below 0.25",
        "tcp_info sndbuf_limited, rwnd_limited, unacked over snd_wnd",
    );
    if limited < LIMITED {
        return Err(Excluded::Absent(fact));
    }
    facts.insert(0, fact);
    if filled.is_some_and(|filled| filled < FILLED) {
        return Err(Excluded::Absent(facts.swap_remove(1)));
    }
    // Without a round-trip time the reason for the full buffer is not known.
    let sure = if filled.is_some() { 0.95 } else { 0.4 };
    Ok((sure * limited, facts))
}

fn evaluate_receiver(
    evidence: &Evidence,
    socket: &SocketFacts,
) -> Result<(f64, Vec<Fact>), Excluded> {
    let fact = Fact::new(
        "receive buffer of the tunnel's own connection, KiB",
        f64::from(socket.receive_buffer) / 1024.0,
        "above 256, or not fixed",
        "SO_RCVBUF",
    );
    if socket.receive_buffer > FIXED {
        return Err(Excluded::Absent(fact));
    }
    let received = evidence.tcp(socket, metric::TCP_BYTES_RECEIVED);
    let received = received.ok_or("the tunnel's own TCP connection is not readable")?;
    let window = OFFERED * f64::from(socket.receive_buffer);
    let (filled, mut facts) = fill(evidence, socket, window, received / evidence.seconds());
    facts.insert(0, fact);
    match filled {
        Some(filled) if filled < FILLED => Err(Excluded::Absent(facts.swap_remove(1))),
        Some(_) => Ok((0.75, facts)),
        None => Err("no round-trip time of the tunnel's own connection is known".into()),
    }
}

/// Returns the ratio of the rate (bytes per second) to the window (bytes) over the shortest round trip.
fn fill(
    evidence: &Evidence,
    socket: &SocketFacts,
    window: f64,
    rate: f64,
) -> (Option<f64>, Vec<Fact>) {
    let probed = evidence.column(&Subject::Probe, metric::PROBE_OUTER_RTT_US);
    let probed = probed.and_then(|column| column.points.iter().map(|(_, value)| *value).min());
    let shortest = evidence
        .min_rtt_us(socket)
        .or(probed.map(|value| value as f64));
    let allowed = shortest.map(|shortest| window / (shortest / 1e6));
    let filled = allowed.filter(|allowed| *allowed > 0.0);
    let filled = filled.map(|allowed| rate / allowed);
    let facts = Vec::new()
        .and(
            "ratio of the tunnel's rate to its window per round trip",
            filled,
            "below 0.4, if something else were the limit",
            "tcp_info bytes_acked, unacked, min_rtt",
        )
        .and(
            "data in flight, KiB",
            window / 1024.0,
            "the wanted rate times the round-trip time",
            "tcp_info unacked, or half of SO_RCVBUF",
        )
        .and(
            "shortest outer round-trip time, ms",
            shortest.map(|shortest| shortest / 1e3),
            "0.1 to 200",
            "tcp_info min_rtt",
        );
    (filled, facts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::sender;
    use crate::rules::testing::*;
    use seikan_observe::path::Transport;

    /// 64 KiB in flight (45 segments) and 10 MB/s or so sent.
    fn buffered(min_rtt_us: u64, limited_us: u64) -> Evidence {
        let mut evidence = sender(70_000, 0, 0);
        evidence.map.sockets = vec![socket(3, Transport::Tcp)];
        let outer = || Subject::Tcp(3);
        count(&mut evidence, outer(), metric::TCP_BUSY_US, 10_000_000);
        let limited = metric::TCP_SNDBUF_LIMITED_US;
        count(&mut evidence, outer(), limited, limited_us);
        count(&mut evidence, outer(), metric::TCP_BYTES_ACKED, 100_000_000);
        gauge(&mut evidence, outer(), metric::TCP_UNACKED, 45);
        gauge(&mut evidence, outer(), metric::TCP_MSS, 1448);
        gauge(&mut evidence, outer(), metric::TCP_MIN_RTT_US, min_rtt_us);
        evidence
    }

    #[test]
    fn a_full_buffer_over_a_distance_is_it() {
        // 65 kB / 6 ms = 10.9 MB/s.
        let finding = present(evaluate(&buffered(6_000, 9_000_000)));
        assert!(finding.weight > 0.8);
    }

    #[test]
    fn a_window_that_is_full_is_it_whatever_the_kernel_calls_it() {
        let mut evidence = buffered(6_000, 0);
        gauge(&mut evidence, Subject::Tcp(3), metric::TCP_SND_WND, 70_000);
        assert!(present(evaluate(&evidence)).weight > 0.8);
        gauge(&mut evidence, Subject::Tcp(3), metric::TCP_SND_WND, 700_000);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_full_buffer_before_something_slow_is_not() {
        // Over 0.2 ms it would allow 326 MB/s.
        assert!(absent(evaluate(&buffered(200, 9_000_000))));
    }

    #[test]
    fn a_large_buffer_is_not_nor_a_tunnel_over_udp() {
        assert!(absent(evaluate(&buffered(6_000, 100_000))));
        assert!(absent(evaluate(&sender(10_000, 0, 0))));
    }

    #[test]
    fn a_busy_thread_is_more_likely() {
        let mut evidence = buffered(6_000, 9_000_000);
        let thread = Subject::Thread { pid: 100, tid: 101 };
        count(&mut evidence, thread, metric::RUN_NS, 9_900_000_000);
        assert!(present(evaluate(&evidence)).weight < 0.3);
    }

    #[test]
    fn a_receiver_compares_its_own_buffer() {
        let mut evidence = buffered(6_000, 0);
        count(&mut evidence, inner(), metric::RX_BYTES, 200_000_000);
        let received = metric::TCP_BYTES_RECEIVED;
        count(&mut evidence, Subject::Tcp(3), received, 100_000_000);
        assert_eq!(present(evaluate(&evidence)).weight, 0.75);
        evidence.map.sockets[0].receive_buffer = 6_000_000;
        assert!(absent(evaluate(&evidence)));
    }
}
