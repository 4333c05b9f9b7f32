//! The path is long: no queue on it is full, no packet is lost, and the sender's data in flight
//! does not fill it.
//!
//! A fully used bottleneck shows as a queue (longer round trips than the shortest) or as loss. If
//! neither shows and the application has more to send, the window is the limit, and its rate is
//! window / round trip. A window limited by a small buffer has rules of its own.

use seikan_observe::path::SocketFacts;

use super::prelude::*;

/// Round-trip time from which windows matter, microseconds: the kernel's largest default receive
/// window (6 MiB, 32 MiB from 6.16 on; net/ipv4/tcp.c) then allows some Gbit/s, but one that grows
/// from ten segments needs a second.
const LONG_US: f64 = 20_000.0;
/// Round-trip time from which the delay alone decides, microseconds.
const FULL_LONG_US: f64 = 50_000.0;
/// Ratio of the round-trip time under load to the shortest, up to which the path has no queue.
const QUEUE: f64 = 1.5;
/// Loss from which loss keeps the window small.
const LOSS: f64 = 0.005;
/// Window below which the delay is not the limit, bytes: the kernel's defaults allow several times as much.
const SMALL_WINDOW: f64 = 524_288.0;
/// Share of the busy time from which a buffer is the limit.
const LIMITED: f64 = 0.5;
/// Recommended window, bytes: 64 MiB are 5 Gbit/s over 100 ms.
const LARGE_WINDOW: u64 = 67_108_864;

pub(super) const SPEC: Spec = Spec::fault(
    Cause::PathDelay,
    PathStep::Network,
    "The path has a long round-trip time, and the sender may have too little data in flight \
     for it.",
    evaluate,
)
.inferred()
.counted(
    Source::Flows,
    &[metric::TCP_MIN_RTT_US],
    Per::Value,
    20_000.0,
);

fn evaluate(evidence: &Evidence) -> Judgement {
    let shortest = evidence
        .shortest_rtt_us()
        .ok_or("no round-trip time through the tunnel is known")?;
    let fact = Fact::new(
        "shortest round-trip time through the tunnel, ms",
        shortest / 1e3,
        "below 20",
        "tcp_info min_rtt, or a probe",
    );
    if shortest < LONG_US {
        return fact.excludes();
    }
    let flow = evidence.main_flow().filter(|_| evidence.sends_tcp());
    let loaded = match flow {
        Some(flow) => evidence.tcp_mean(flow, metric::TCP_RTT_US),
        None => evidence.probes.loaded_rtt_us,
    };
    let queue = loaded.map(|loaded| {
        Fact::new(
            "ratio of the round-trip time under load to the shortest",
            loaded / shortest,
            "above 1.5, if a queue on the path were full",
            "tcp_info rtt",
        )
    });
    if let Some(queue) = queue.clone().filter(|queue| queue.value > QUEUE) {
        return queue.excludes();
    }
    let losses = evidence.inner_losses();
    let lost = losses.map_or(0.0, |losses| losses.lost());
    let mut facts = vec![fact];
    facts.extend(queue);
    // A receiver does not know the sender's limit.
    let mut weight = if flow.is_some() { 0.85 } else { 0.45 };
    weight *= (1.0 - lost / LOSS).max(0.0);
    weight *= 0.5 + 0.5 * ((shortest - LONG_US) / (FULL_LONG_US - LONG_US)).clamp(0.0, 1.0);
    if let Some(flow) = flow {
        let (window, limited_by_buffer) = window(evidence, flow);
        facts = facts.and(
            "bytes in flight",
            window,
            "the wanted rate times the round-trip time",
            "tcp_info unacked, mss",
        );
        let idle = evidence.tcp_mean(flow, metric::TCP_APP_LIMITED);
        weight *=
            1.0 - idle.unwrap_or(0.0).clamp(0.0, 1.0) * if limited_by_buffer { 0.0 } else { 0.8 };
        if limited_by_buffer && window < SMALL_WINDOW {
            weight *= 0.25;
        }
    }
    facts = facts.and(
        "share of segments lost",
        lost,
        "above 0.005, if loss were the limit",
        "tcp_info total_retrans less dsack_dups",
    );
    if weight < 0.05 {
        return facts.swap_remove(facts.len() - 1).excludes();
    }
    Ok(Finding::new(weight, facts, remedies(evidence)))
}

/// Returns the bytes in flight, and whether a buffer at one of the ends limits them.
fn window(evidence: &Evidence, flow: &SocketFacts) -> (f64, bool) {
    let mean = |name| evidence.tcp_mean(flow, name).unwrap_or(0.0);
    let growth = |name| evidence.tcp(flow, name).unwrap_or(0.0);
    let limited_by_buffer =
        growth(metric::TCP_RWND_LIMITED_US) + growth(metric::TCP_SNDBUF_LIMITED_US);
    let busy = growth(metric::TCP_BUSY_US).max(1.0);
    let window = mean(metric::TCP_UNACKED) * mean(metric::TCP_MSS);
    (window, limited_by_buffer / busy >= LIMITED)
}

fn remedies(evidence: &Evidence) -> Vec<Remedy> {
    let most = |name: &str| {
        let value = evidence.map.host.sysctls.get(name)?;
        value.split_whitespace().last()?.parse::<u64>().ok()
    };
    let mut actions = Vec::new();
    for (name, value) in [
        ("net.ipv4.tcp_wmem", "4096 65536"),
        ("net.ipv4.tcp_rmem", "4096 131072"),
    ] {
        if most(name).is_some_and(|most| most < LARGE_WINDOW) {
            actions.push(Action::Sysctl {
                name: name.into(),
                value: format!("{value} {LARGE_WINDOW}"),
            });
        }
    }
    let mut remedies = vec![Remedy::ask(
        Location::Application,
        "use several connections at once",
        vec![],
        "each has its own window",
    )];
    if !actions.is_empty() {
        remedies.push(Remedy::here(
            "enlarge the windows of this host; the far end needs the same",
            actions,
            "in proportion to the window, if it is the limit",
        ));
    }
    remedies.push(Remedy::ask(
        Location::FarEnd,
        "enlarge the windows there",
        vec![
            format!("sysctl -w net.ipv4.tcp_rmem=\"4096 131072 {LARGE_WINDOW}\""),
            format!("sysctl -w net.ipv4.tcp_wmem=\"4096 65536 {LARGE_WINDOW}\""),
        ],
        "in proportion to the window, if it is the limit",
    ));
    remedies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing::*;

    fn far(min_ms: u64, ms: u64, lost: u64) -> Evidence {
        let mut evidence = sender(10_000, lost, 0);
        gauge(
            &mut evidence,
            flow(),
            metric::TCP_MIN_RTT_US,
            min_ms * 1_000,
        );
        gauge(&mut evidence, flow(), metric::TCP_RTT_US, ms * 1_000);
        gauge(&mut evidence, flow(), metric::TCP_UNACKED, 700);
        gauge(&mut evidence, flow(), metric::TCP_APP_LIMITED, 0);
        evidence
    }

    #[test]
    fn a_long_path_without_queue_or_loss_is_it() {
        assert_eq!(present(evaluate(&far(100, 105, 0))).weight, 0.85);
    }

    #[test]
    fn a_short_path_is_not_nor_a_full_queue_nor_loss() {
        assert!(absent(evaluate(&far(2, 2, 0))));
        assert!(absent(evaluate(&far(30, 200, 0))));
        assert!(absent(evaluate(&far(100, 105, 100))));
    }

    #[test]
    fn a_small_buffer_is_the_buffers_doing() {
        let mut evidence = far(100, 105, 0);
        gauge(&mut evidence, flow(), metric::TCP_UNACKED, 45);
        let limited = metric::TCP_RWND_LIMITED_US;
        count(&mut evidence, flow(), limited, 9_000_000);
        assert!(present(evaluate(&evidence)).weight < 0.3);
    }

    #[test]
    fn an_idle_application_is_not() {
        let mut evidence = far(100, 105, 0);
        gauge(&mut evidence, flow(), metric::TCP_APP_LIMITED, 1);
        assert!(present(evaluate(&evidence)).weight < 0.3);
    }
}
