//! The application has no more data to send: the tunnel is not the limit.
//!
//! The kernel also calls a connection limited by its application when its whole send buffer is in
//! flight, so the time limited by buffers is examined first.

use seikan_observe::path::SocketFacts;

use super::prelude::*;
use crate::evidence::is_tolerated;

/// Share of samples limited by the application from which it is a cause.
const SOMETIMES: f64 = 0.5;
/// Unsent bytes below which no data waits: less than a full segment is always about to be sent.
const NOTHING: f64 = 1_448.0;
/// Share of the send buffer in flight from which the buffer is full: the kernel sizes it for twice
/// the congestion window (`tcp_sndbuf_expand()`, net/ipv4/tcp_input.c), of which an application
/// with pauses uses half at most.
const FULL: f64 = 0.5;
/// Share of the time with data in flight below which connections are idle.
const IDLE: f64 = 0.3;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::ApplicationLimited,
    PathStep::Applications,
    "The application sends no more than this; the tunnel could carry more.",
    evaluate,
)
.counted(Source::Flows, &[metric::TCP_APP_LIMITED], Per::Value, 0.5);

fn evaluate(evidence: &Evidence) -> Judgement {
    if !evidence.sends_tcp() {
        return Err("this host sends no TCP into the tunnel".into());
    }
    let flow = evidence
        .main_flow()
        .ok_or("no connection transfers data through the tunnel")?;
    let limited = evidence
        .tcp_mean(flow, metric::TCP_APP_LIMITED)
        .ok_or("the kernel does not report the limits of connections")?;
    let growth = |name| evidence.tcp(flow, name).unwrap_or(0.0);
    let busy = growth(metric::TCP_BUSY_US);
    let limited_by_buffer =
        growth(metric::TCP_RWND_LIMITED_US) + growth(metric::TCP_SNDBUF_LIMITED_US);
    let limited_by_buffer = (limited_by_buffer / busy.max(1.0)).min(1.0);
    let busy = (busy / 1e6 / evidence.seconds()).min(1.0);
    let unsent = evidence.tcp_mean(flow, metric::TCP_NOTSENT_BYTES);
    let fact = Fact::new(
        "share of samples in which the application had no more data to send",
        limited,
        "below 0.5",
        "tcp_info delivery_rate_app_limited",
    );
    let idle = limited.max(if busy < IDLE { 1.0 - busy } else { 0.0 });
    let waiting = unsent.is_some_and(|unsent| unsent > NOTHING) || fills_its_buffer(evidence, flow);
    // A shortfall needs an expected throughput.
    let short = evidence.shortfall().is_some_and(|it| !is_tolerated(it));
    if idle < SOMETIMES || waiting || !short {
        return fact.excludes();
    }
    let facts = vec![fact]
        .and(
            "bytes waiting to be sent",
            unsent,
            "above 1448, if the tunnel were the limit",
            "tcp_info notsent_bytes",
        )
        .and(
            "share of the time with data in flight",
            busy,
            "near 1, if the tunnel were the limit",
            "tcp_info busy_time",
        )
        .and(
            "share of that time limited by a buffer at either end",
            limited_by_buffer,
            "above 0.25, if a buffer were the limit",
            "tcp_info rwnd_limited, sndbuf_limited",
        );
    Ok(Finding::new(
        0.9 * idle * (1.0 - limited_by_buffer),
        facts,
        vec![Remedy::ask(
            Location::Application,
            "find out why the sending program waits: disk, processor, answers of the other side, or its own rate limit",
            vec!["ss -tip".into()],
            "the tunnel can carry more",
        )],
    ))
}

/// Whether the whole send buffer is in flight: the application could not add data.
fn fills_its_buffer(evidence: &Evidence, flow: &SocketFacts) -> bool {
    let mean = |name| evidence.tcp_mean(flow, name).unwrap_or(0.0);
    let in_flight = mean(metric::TCP_UNACKED) * mean(metric::TCP_MSS);
    flow.send_buffer > 0 && in_flight >= FULL * f64::from(flow.send_buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;

    fn idle(app_limited: u64, busy_us: u64) -> Evidence {
        let mut evidence = sender(10_000, 0, 0);
        gauge(&mut evidence, flow(), metric::TCP_APP_LIMITED, app_limited);
        gauge(&mut evidence, flow(), metric::TCP_NOTSENT_BYTES, 0);
        count(&mut evidence, flow(), metric::TCP_BUSY_US, busy_us);
        evidence.expected = Some(100e6);
        evidence
    }

    #[test]
    fn nothing_to_send_is_it() {
        assert_eq!(present(evaluate(&idle(1, 2_000_000))).weight, 0.9);
    }

    #[test]
    fn a_send_buffer_full_of_data_in_flight_is_not() {
        let mut evidence = idle(1, 10_000_000);
        gauge(&mut evidence, flow(), metric::TCP_MSS, 1_000);
        evidence.map.flows[0].send_buffer = 1_000_000;
        gauge(&mut evidence, flow(), metric::TCP_UNACKED, 400);
        present(evaluate(&evidence));
        gauge(&mut evidence, flow(), metric::TCP_UNACKED, 600);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_sender_with_more_to_send_is_not() {
        assert!(absent(evaluate(&idle(0, 10_000_000))));
        let mut evidence = idle(1, 10_000_000);
        gauge(&mut evidence, flow(), metric::TCP_NOTSENT_BYTES, 100_000);
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn without_an_expectation_nothing_is_missing() {
        let mut evidence = idle(1, 2_000_000);
        evidence.expected = None;
        assert!(absent(evaluate(&evidence)));
        evidence.expected = Some(evidence.throughput());
        assert!(absent(evaluate(&evidence)));
    }

    #[test]
    fn a_full_send_buffer_is_not() {
        let mut evidence = idle(1, 10_000_000);
        let limited = metric::TCP_SNDBUF_LIMITED_US;
        count(&mut evidence, flow(), limited, 9_500_000);
        assert!(present(evaluate(&evidence)).weight < 0.1);
    }
}
