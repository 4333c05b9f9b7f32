//! The path delivers packets out of order: the sender takes late packets for lost and slows down.

use super::prelude::*;
use crate::losses::{Arrivals, Losses};

/// Share of unnecessary retransmissions that matters: each one stops the growth of the window.
const SPURIOUS: f64 = 0.001;
/// Share at which nothing else matters, as with losses.
const FULL_SPURIOUS: f64 = 0.01;
/// Reordering events per segment sent. A sender that has adapted retransmits little, but waits and
/// merges less.
const OVERTAKEN: f64 = 0.002;
/// See [`OVERTAKEN`].
const FULL_OVERTAKEN: f64 = 0.02;
/// Largest weight of reordering events alone.
const MOST_OVERTAKEN: f64 = 0.6;
/// Ratio of timeouts to unnecessary retransmissions from which timeouts explain these.
const EARLY: f64 = 0.1;
/// Weight of duplicates that the receiver reports without timeouts.
const REPORTED: f64 = 0.85;
/// Share of unnecessary retransmissions below which real loss leads.
const MOSTLY: f64 = 0.5;
/// Segments that may arrive out of order before they count as lost; the kernel's default is 3, its
/// maximum 300.
const PATIENT: &str = "30";

pub(super) const SPEC: Spec = Spec::fault(
    Cause::Reordering,
    PathStep::Network,
    "The path delivers packets out of order, which TCP takes for loss.",
    evaluate,
)
.inferred()
.counted(Source::Flows, &[metric::TCP_REORD_SEEN], Per::Packet, FEW);

fn evaluate(evidence: &Evidence) -> Judgement {
    if let Some(losses) = evidence.inner_losses() {
        return evaluate_sender(evidence, losses);
    }
    match evidence.arrivals() {
        Some(arrivals) => evaluate_receiver(arrivals),
        None => Err("this host sends and receives little TCP through the tunnel".into()),
    }
}

fn evaluate_sender(evidence: &Evidence, losses: Losses) -> Judgement {
    let seen = evidence.flows(metric::TCP_REORD_SEEN).unwrap_or(0.0);
    let spurious = losses.spurious / losses.segments;
    let overtaken = seen / losses.segments;
    let fact = Fact::new(
        "reordering events per segment sent",
        overtaken,
        "below 0.002",
        "tcp_info reord_seen",
    );
    // Duplicates alone also come from early timeouts.
    let mostly = losses.again == 0.0 || losses.spurious / losses.again >= MOSTLY;
    // The kernel does not always detect reordering; then there must be hardly any timeouts.
    let timeouts = evidence.flows(metric::TCP_TIMEOUTS);
    let reported = match timeouts {
        _ if seen > 0.0 => 1.0,
        Some(timeouts) if timeouts < EARLY * losses.spurious => REPORTED,
        _ => 0.0,
    };
    let by_spurious = if mostly && spurious >= SPURIOUS {
        reported * (spurious / FULL_SPURIOUS).min(1.0)
    } else {
        0.0
    };
    let by_overtaken = if overtaken >= OVERTAKEN && overtaken > losses.lost() {
        MOST_OVERTAKEN * (overtaken / FULL_OVERTAKEN).min(1.0)
    } else {
        0.0
    };
    let weight = 0.9 * by_spurious.max(by_overtaken);
    if weight == 0.0 {
        return fact.excludes();
    }
    let facts = vec![fact]
        .and(
            "share of segments retransmitted unnecessarily",
            spurious,
            "below 0.001",
            "tcp_info dsack_dups",
        )
        .and(
            "share of segments lost",
            losses.lost(),
            "larger than the reordering, if it were loss",
            "tcp_info total_retrans less dsack_dups",
        );
    let mut remedies = remedies();
    let setting = evidence.map.host.sysctls.get("net.ipv4.tcp_reordering");
    let patient = setting.and_then(|value| value.trim().parse::<u32>().ok());
    if patient.is_none_or(|packets| packets < 30) {
        let action = Action::Sysctl {
            name: "net.ipv4.tcp_reordering".into(),
            value: PATIENT.into(),
        };
        remedies.push(Remedy::here(
            "let new connections of this host tolerate more reordering",
            vec![action],
            "fewer unnecessary retransmissions; packets still arrive late",
        ));
    }
    Ok(Finding::new(weight, facts, remedies))
}

fn evaluate_receiver(arrivals: Arrivals) -> Judgement {
    let twice = arrivals.twice / arrivals.segments;
    let fact = Fact::new(
        "share of segments received twice",
        twice,
        "below 0.001",
        "TcpExt.TCPDSACKOldSent over Tcp.InSegs",
    );
    let early = arrivals.early / arrivals.segments;
    if twice < SPURIOUS || early < SPURIOUS {
        return fact.excludes();
    }
    let facts = vec![fact]
        .and(
            "share of segments received out of order",
            early,
            "below 0.01",
            "TcpExt.TCPOFOQueue over Tcp.InSegs",
        )
        .and(
            "packets dropped by this host",
            arrivals.here,
            "many, if this host dropped them",
            "drops of UDP sockets and interfaces; checksums",
        );
    let weight = 0.7 * (twice / FULL_SPURIOUS).min(1.0);
    Ok(Finding::new(weight, facts, remedies()))
}

fn remedies() -> Vec<Remedy> {
    vec![
        Remedy::ask(
            Location::Tunnel,
            "use one queue and one thread per connection, at both ends",
            vec![],
            "packets stay in order",
        ),
        Remedy::ask(
            Location::Provider,
            "balance by flow instead of by packet on every bonded or multipath link of the path",
            vec![],
            "packets stay in order",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses::made::*;
    use crate::rules::testing;
    use crate::rules::testing::{absent, count};

    fn overtaken(times: u64, again: u64, spurious: u64) -> Evidence {
        let mut evidence = sender(10_000, again, spurious);
        count(&mut evidence, flow(), metric::TCP_REORD_SEEN, times);
        evidence
    }

    #[test]
    fn retransmissions_for_nothing_are_it() {
        let finding = testing::present(evaluate(&overtaken(80, 110, 100)));
        assert_eq!(finding.weight, 0.9);
    }

    #[test]
    fn a_sender_that_got_used_to_it_still_shows() {
        let finding = testing::present(evaluate(&overtaken(300, 5, 5)));
        assert!((0.3..0.9).contains(&finding.weight));
    }

    #[test]
    fn duplicates_that_no_timeout_made_are_it() {
        let mut evidence = overtaken(0, 110, 100);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 1);
        let weight = testing::present(evaluate(&evidence)).weight;
        assert!((weight - 0.9 * REPORTED).abs() < 1e-9);
    }

    #[test]
    fn loss_is_not_nor_early_timeouts() {
        assert!(absent(evaluate(&overtaken(0, 100, 0))));
        let mut early = overtaken(0, 100, 100);
        assert!(absent(evaluate(&early)));
        count(&mut early, flow(), metric::TCP_TIMEOUTS, 50);
        assert!(absent(evaluate(&early)));
        assert!(absent(evaluate(&overtaken(5, 500, 20))));
    }

    #[test]
    fn a_receiver_gets_segments_twice() {
        let finding = testing::present(evaluate(&receiver(10_000, 2_000, 100)));
        assert_eq!(finding.weight, 0.7);
        assert!(absent(evaluate(&receiver(10_000, 2_000, 0))));
    }
}
