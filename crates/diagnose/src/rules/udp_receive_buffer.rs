//! The receive buffer of the tunnel's socket is full, and datagrams are dropped.
//!
//! A small buffer is a cause of its own; a large one fills because its reader is late.

use seikan_observe::path::{SocketFacts, Transport};

use super::prelude::*;

/// Share of dropped datagrams from which inner TCP suffers, and at which most connections stop.
const LOSS: Ramp = Ramp::new(0.0005, 0.01);
/// Size up to which the buffer is the cause, bytes with the kernel's overhead: the kernel's default
/// of 212,992 holds a millisecond of a gigabit. From 1 MiB on, its reader is the cause. Below half
/// of the default no other cause is needed.
const LENGTH: Ramp = Ramp::new(212_992.0, 1_048_576.0);
/// Weight if the reader is the cause.
const CONSEQUENCE: f64 = 0.4;
/// Recommended size, bytes.
const GOOD_LENGTH: u32 = 4 << 20;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::UdpReceiveBuffer,
    PathStep::Sockets,
    "The receive buffer of the tunnel's socket is full and drops packets.",
    evaluate,
)
.drops_packets()
.counted(
    Source::Host,
    &["Udp.RcvbufErrors", "Udp6.RcvbufErrors"],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let sockets = evidence.map.sockets.iter();
    let udp: Vec<&SocketFacts> = sockets
        .filter(|socket| socket.transport == Transport::Udp)
        .collect();
    let at_socket = evidence.program_sockets(Transport::Udp, metric::UDP_DROPS);
    let in_host = evidence.both("Udp", "RcvbufErrors");
    if udp.is_empty() && !evidence.map.sockets.is_empty() {
        return Fact::new(
            "UDP sockets of the tunnel",
            0.0,
            "1 or more, if this were the cause",
            "the program's sockets",
        )
        .excludes();
    }
    // The count of a socket belongs to the tunnel. That of the namespace may include other sockets,
    // but no drops for another reason, such as a filter.
    let (dropped, source) = match (at_socket, in_host) {
        (Some(dropped), Some(full)) if full < dropped => (full, "/proc/net/snmp RcvbufErrors"),
        (Some(dropped), _) => (dropped, "drops of its socket"),
        (None, Some(dropped)) => (dropped, "/proc/net/snmp RcvbufErrors"),
        (None, None) => return Err("the UDP counters are not readable".into()),
    };
    let taken = evidence.both("Udp", "InDatagrams");
    let taken = taken.or(evidence.egress(metric::RX_PACKETS)).unwrap_or(0.0);
    let share = dropped / (dropped + taken).max(1.0);
    let mut facts = Vec::new().and(
        "share of received datagrams dropped at the tunnel's receive buffer",
        share,
        "below 0.0005",
        source,
    );
    let buffer = udp.iter().map(|socket| socket.receive_buffer).min();
    let buffer = buffer.filter(|bytes| *bytes > 0);
    facts = facts
        .and(
            "size of the buffer, bytes",
            buffer.map(f64::from),
            "1048576 or more",
            "SO_RCVBUF",
        )
        .and(
            "datagrams dropped there per second",
            dropped / evidence.seconds(),
            "0",
            source,
        )
        .and(
            "share of the time in which the program ran or was ready to run",
            evidence.busy(),
            "below 0.85; above, the program is late",
            "schedstat",
        );
    let bytes = f64::from(buffer.unwrap_or(GOOD_LENGTH));
    let large = LENGTH.at(bytes);
    // At the default size the buffer is as much a cause as its reader; below, it is the cause.
    let small = if bytes < LENGTH.from { 1.0 } else { 0.8 };
    let weight = LOSS.at(share) * (small + (CONSEQUENCE - small) * large);
    let judgement = weighted(weight, facts, vec![remedy()]);
    settled(judgement, bytes < LENGTH.from / 2.0)
}

fn remedy() -> Remedy {
    Remedy::ask(
        Location::Tunnel,
        format!(
            "set a receive buffer of {GOOD_LENGTH} bytes in the tunnel's settings (OpenVPN: `rcvbuf`), or as the \
             default of new sockets, and restart it; find out why the program is late"
        ),
        vec![
            format!("sysctl -w net.core.rmem_max={GOOD_LENGTH}"),
            format!("sysctl -w net.core.rmem_default={GOOD_LENGTH}"),
        ],
        "these packets arrive, unless the program is always late",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use seikan_observe::Subject;

    fn receiving(buffer: u32, dropped: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.sockets[0].receive_buffer = buffer;
        count(&mut evidence, Subject::Udp(1), metric::UDP_DROPS, dropped);
        count(&mut evidence, Subject::Host, "Udp.InDatagrams", 100_000);
        evidence
    }

    #[test]
    fn drops_of_a_filter_are_not() {
        let mut evidence = receiving(4608, 5_000);
        count(&mut evidence, Subject::Host, "Udp.RcvbufErrors", 0);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn drops_at_a_small_buffer_are_it() {
        let finding = present(evaluate(&receiving(8192, 3_000)));
        assert_eq!((finding.weight, finding.settled), (1.0, true));
        assert!(!present(evaluate(&receiving(212_992, 3_000))).settled);
    }

    #[test]
    fn a_large_buffer_fills_because_of_its_reader() {
        assert!(present(evaluate(&receiving(4 << 20, 3_000))).weight <= CONSEQUENCE);
    }

    #[test]
    fn without_drops_it_is_not() {
        assert!(absent(evaluate(&receiving(8192, 10))));
    }

    #[test]
    fn drops_of_somebody_else_are_not() {
        let mut evidence = receiving(8192, 0);
        count(&mut evidence, Subject::Host, "Udp.RcvbufErrors", 5_000);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn the_namespace_counts_if_the_socket_does_not() {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "Udp.RcvbufErrors", 5_000);
        count(&mut evidence, egress(), metric::RX_PACKETS, 95_000);
        let finding = present(evaluate(&evidence));
        assert!((finding.facts[0].value - 0.05).abs() < 1e-9);
    }

    #[test]
    fn a_tunnel_over_tcp_has_none() {
        let mut evidence = receiving(8192, 0);
        evidence.map.sockets[0].transport = Transport::Tcp;
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn without_counters_nothing_is_said() {
        assert!(unseen(evaluate(&tunnel())));
    }
}
