//! The send buffer of the tunnel's socket is full: sends fail or the program waits.
//!
//! A small buffer is a cause of its own; one of the usual size fills because the next device is
//! slow (a shaper, a slow link).

use seikan_observe::Subject;
use seikan_observe::path::{SocketFacts, Transport};

use super::prelude::*;

/// Share of failed sends from which inner TCP suffers, and at which most connections stop.
const FAILED: Ramp = Ramp::new(0.0005, 0.01);
/// Mean fill level of the buffer. A program that waits with poll(2) is woken only while half of the
/// buffer is free (`sock_writeable()`, include/net/sock.h), so half full is full.
const FILL: Ramp = Ramp::new(0.3, 0.5);
/// A waiting program is not busy.
const BUSY: Ramp = Ramp::new(0.7, 0.9);
/// Sizes in bytes, with the kernel's overhead: up to half of the kernel's default the buffer is the
/// cause; from the default on, the next device is.
const LENGTH: Ramp = Ramp::new(106_496.0, 212_992.0);
/// Weight if the next device is the cause.
const CONSEQUENCE: f64 = 0.4;
/// Recommended size, bytes.
const GOOD_LENGTH: u32 = 1 << 20;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::UdpSendBuffer,
    PathStep::Sockets,
    "The send buffer of the tunnel's socket is too small: the program waits for space or loses \
     packets.",
    evaluate,
)
.effects(&[Cause::TunQueueOverflow, Cause::Bufferbloat])
.counted(
    Source::Host,
    &["Udp.SndbufErrors", "Udp6.SndbufErrors"],
    Per::Packet,
    FEW,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let sockets = evidence.map.sockets.iter();
    let udp = sockets.filter(|socket| socket.transport == Transport::Udp);
    let fills = udp.clone().filter_map(|socket| fill(evidence, socket));
    let fill = fills.max_by(f64::total_cmp);
    let errors = evidence.both("Udp", "SndbufErrors");
    if fill.is_none() && errors.is_none() {
        return Err("neither UDP counters nor sockets are readable".into());
    }
    let sent = evidence.both("Udp", "OutDatagrams").unwrap_or(0.0);
    let errors = errors.unwrap_or(0.0);
    let failed = errors / (errors + sent).max(1.0);
    let mut facts = Vec::new()
        .and(
            "share of sends that failed because the buffer was full",
            failed,
            "below 0.0005",
            "/proc/net/snmp SndbufErrors",
        )
        .and(
            "mean fill level of the send buffer",
            fill,
            "below 0.3",
            "tx_queue of the tunnel's socket",
        );
    let buffer = udp.map(|socket| socket.send_buffer).min();
    let buffer = buffer.filter(|bytes| *bytes > 0);
    facts = facts.and(
        "size of the buffer, bytes",
        buffer.map(f64::from),
        "212992 or more",
        "SO_SNDBUF",
    );
    let busy = evidence.busy().unwrap_or(0.0);
    facts = facts.and(
        "share of the time in which the program ran or was ready to run",
        busy,
        "near 1, if it did not wait for space",
        "schedstat",
    );
    let blocked = FILL.at(fill.unwrap_or(0.0)) * (1.0 - BUSY.at(busy));
    let large = LENGTH.at(f64::from(buffer.unwrap_or(GOOD_LENGTH)));
    let weight = FAILED.at(failed).max(blocked) * (1.0 - (1.0 - CONSEQUENCE) * large);
    if blocked > 0.0 && failed < FAILED.from {
        // The fill level is the main figure.
        facts.swap(0, 1);
    }
    weighted(0.95 * weight, facts, vec![remedy()])
}

/// Returns the fill level of a socket's send buffer.
fn fill(evidence: &Evidence, socket: &SocketFacts) -> Option<f64> {
    let queued = evidence.column(&Subject::Udp(socket.inode), metric::UDP_TX_QUEUE)?;
    (socket.send_buffer > 0).then(|| queued.mean() / f64::from(socket.send_buffer))
}

fn remedy() -> Remedy {
    Remedy::ask(
        Location::Tunnel,
        format!(
            "set a send buffer of {GOOD_LENGTH} bytes in the tunnel's settings (OpenVPN: `sndbuf`), or as the \
             default of new sockets, and restart it"
        ),
        vec![
            format!("sysctl -w net.core.wmem_max={GOOD_LENGTH}"),
            format!("sysctl -w net.core.wmem_default={GOOD_LENGTH}"),
        ],
        "up to the capacity of the interface",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    fn sending(buffer: u32, queued: u64, errors: u64) -> Evidence {
        let mut evidence = tunnel();
        evidence.map.sockets[0].send_buffer = buffer;
        thread(&mut evidence, 100, 0.3, 0.02);
        gauge(&mut evidence, Subject::Udp(1), metric::UDP_TX_QUEUE, queued);
        count(&mut evidence, Subject::Host, "Udp.OutDatagrams", 100_000);
        count(&mut evidence, Subject::Host, "Udp.SndbufErrors", errors);
        evidence
    }

    #[test]
    fn sends_that_fail_at_a_small_buffer_are_it() {
        assert!(present(evaluate(&sending(4608, 0, 5_000))).weight > 0.9);
    }

    #[test]
    fn a_small_full_buffer_is_it() {
        let finding = present(evaluate(&sending(4608, 4500, 0)));
        assert!(finding.weight > 0.9);
        assert_eq!(finding.facts[0].source, "tx_queue of the tunnel's socket");
    }

    #[test]
    fn half_full_is_full_for_poll() {
        assert!(present(evaluate(&sending(9216, 4608, 0))).weight > 0.9);
    }

    #[test]
    fn a_usual_buffer_fills_because_of_the_next_device() {
        assert!(present(evaluate(&sending(212_992, 205_000, 0))).weight < 0.5);
    }

    #[test]
    fn an_empty_one_is_not() {
        assert!(absent(evaluate(&sending(4608, 1000, 3))));
    }

    #[test]
    fn a_busy_program_does_not_wait_for_space() {
        let mut evidence = sending(4608, 4500, 0);
        thread(&mut evidence, 100, 0.95, 0.02);
        assert!(absent(evaluate(&evidence)));
    }
}
