//! Baselines for the score of the lab: one counter per cause, and the cause of the most conspicuous
//! counter is named.
//!
//! The rules have to be better than these. Counters that grow with traffic are taken per packet,
//! and a tunnel with the expected throughput is healthy, as for the rules.

use crate::evidence::is_tolerated;
use crate::signature::{MOST_LAG, Signature, Steps};
use crate::stats::strongest;
use crate::{Cause, Evidence, rules};

/// Fewest samples of a correlation.
const LEAST_SAMPLES: usize = 10;

/// Returns the cause whose counter correlates most with the throughput, in either direction, at the best lag.
pub fn highest_correlation(evidence: &Evidence) -> Cause {
    let Some(steps) = Steps::of(evidence) else {
        return nothing(evidence);
    };
    let throughput = steps.throughput();
    most(evidence, |signature| {
        let values = steps.values(signature)?;
        let lag = MOST_LAG.min(values.len().saturating_sub(LEAST_SAMPLES));
        (values.len() >= LEAST_SAMPLES)
            .then(|| strongest(&values, &throughput, lag))?
            .map(|(_, r)| r.abs())
    })
}

/// Returns the cause whose counter is the largest multiple of its normal value.
pub fn largest_jump(evidence: &Evidence) -> Cause {
    let Some(steps) = Steps::of(evidence) else {
        return nothing(evidence);
    };
    most(evidence, |signature| {
        let ratio = steps.overall(signature)? / signature.normal;
        (ratio > 1.0).then_some(ratio)
    })
}

/// Returns the cause of the signature with the largest value of `weigh`; the first one of equals.
fn most(evidence: &Evidence, weigh: impl Fn(&Signature) -> Option<f64>) -> Cause {
    if carries_enough(evidence) {
        return Cause::Healthy;
    }
    let weighed = rules::ALL
        .iter()
        .filter_map(|spec| Some((spec.cause, weigh(spec.signature.as_ref()?)?)));
    let best = weighed.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or_else(|| nothing(evidence), |(cause, _)| cause)
}

fn carries_enough(evidence: &Evidence) -> bool {
    let shortfall = evidence.shortfall();
    shortfall.is_some_and(is_tolerated)
}

fn nothing(evidence: &Evidence) -> Cause {
    if evidence.expected.is_none() || carries_enough(evidence) {
        Cause::Healthy
    } else {
        Cause::Unknown
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::time::Duration;

    use seikan_observe::path::{HostFacts, PathMap};
    use seikan_observe::{Column, Key, Kind, Series, Subject, metric};

    use crate::Evidence;

    const STEPS: u32 = 40;

    /// Throughput of a step: 100 packets of 1,000 bytes in most steps, and 50 in every fourth.
    pub fn dips(step: u32) -> u64 {
        if step.is_multiple_of(4) { 50 } else { 100 }
    }

    /// A counter, and its growth in each step.
    pub type Counter<'a> = (Subject, &'static str, &'a dyn Fn(u32) -> u64);

    pub fn evidence(counters: &[Counter<'_>]) -> Evidence {
        let inner = Subject::Link("tun0".to_owned());
        let (packets, bytes): (&dyn Fn(u32) -> u64, &dyn Fn(u32) -> u64) =
            (&dips, &|step| dips(step) * 1_000);
        let traffic = [
            (inner.clone(), metric::TX_PACKETS, packets),
            (inner.clone(), metric::TX_BYTES, bytes),
            (inner, metric::RX_PACKETS, &|_| 0),
        ];
        let columns = traffic
            .iter()
            .chain(counters)
            .map(|(subject, name, grown)| {
                let mut value = 0;
                let points = (0..=STEPS).map(|step| {
                    value += if step == 0 { 0 } else { grown(step) };
                    (step, value)
                });
                let column = Column {
                    kind: Kind::Counter,
                    points: points.collect(),
                };
                (Key::new(subject.clone(), *name), column)
            });
        Evidence {
            map: PathMap {
                inner: Some("tun0".to_owned()),
                host: HostFacts {
                    cpus: vec![0],
                    ..HostFacts::default()
                },
                ..PathMap::default()
            },
            series: Series {
                times: (0..=STEPS)
                    .map(|step| Duration::from_millis(100) * step)
                    .collect(),
                columns: columns.collect(),
            },
            expected: Some(100e6),
            ..Evidence::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use seikan_observe::{Subject, metric};

    use super::testing::*;
    use super::*;

    #[test]
    fn the_counter_that_moves_with_the_dips_is_named_by_correlation() {
        let lost = |step: u32| 100 - dips(step);
        let many = |step: u32| (step * 7919) % 11 * 100;
        let evidence = evidence(&[
            (Subject::Host, "Udp.RcvbufErrors", &lost),
            // Far more, but not in step with the throughput.
            (Subject::Cpu(0), metric::SOFTNET_DROPPED, &|s| {
                u64::from(many(s))
            }),
        ]);
        assert_eq!(highest_correlation(&evidence), Cause::UdpReceiveBuffer);
        assert_eq!(largest_jump(&evidence), Cause::BacklogFull);
    }

    #[test]
    fn a_tunnel_with_the_expected_throughput_is_healthy() {
        let mut evidence = evidence(&[(Subject::Host, "Udp.RcvbufErrors", &|_| 5)]);
        evidence.expected = Some(6e6);
        assert_eq!(highest_correlation(&evidence), Cause::Healthy);
        assert_eq!(largest_jump(&evidence), Cause::Healthy);
    }

    #[test]
    fn where_nothing_moves_it_is_unknown() {
        let evidence = evidence(&[]);
        assert_eq!(largest_jump(&evidence), Cause::Unknown);
        assert_eq!(largest_jump(&Evidence::default()), Cause::Healthy);
    }
}
