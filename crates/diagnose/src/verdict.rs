//! The verdict: one cause out of the results of all rules.
//!
//! Findings are ordered by their weight. If one cause brings about another ([`Spec::effects`]), the
//! deeper one is named and the other is part of its chain. Without a finding, the verdict is
//! `healthy` if the expected throughput passes or none was given, `idle` with hardly any traffic,
//! and otherwise `unknown`. Without an expected throughput, a weak finding does not count: good
//! tunnels show traces of many causes.

use seikan_observe::path::PathMap;
use serde::{Deserialize, Serialize};

use crate::evidence::{IDLE, is_tolerated};
use crate::finding::LEAST_WEIGHT;
use crate::rules::{self, Spec};
use crate::signature::{Moves, moves};
use crate::trial::Attempt;
use crate::{Cause, Evidence, Excluded, Fact, Far, Finding, Location, Remedy};

/// Weight up to which a deeper cause is only a trace, which does not explain a heavier one.
pub(crate) const TRACE: f64 = 0.3;
/// Weight from which a cause may be supported, and from which it is named without an expected throughput.
const WEIGHTY: f64 = 0.5;
/// Ratio to the weight of its rivals from which a cause is supported.
pub(crate) const CLEAR: f64 = 1.5;

/// Confidence of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// The signature of the cause is present.
    Consistent,
    /// The signature of the cause is present, and those of its rivals are not.
    Supported,
    /// A change moved the throughput as predicted.
    Confirmed,
}

/// A cause that was excluded or not examined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RuledOut {
    /// The cause.
    pub cause: Cause,
    /// The figure that excludes it; `None` if it was not examined.
    pub fact: Option<Fact>,
    /// Why it was not examined.
    pub unseen: Option<String>,
}

/// Cost of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Cost {
    /// Duration, seconds.
    pub seconds: f64,
    /// Processor time, seconds.
    pub cpu_seconds: f64,
    /// Number of samples.
    pub samples: u32,
}

/// The diagnosis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Verdict {
    /// Version of this format.
    pub version: u32,
    /// The deepest cause with evidence.
    pub cause: Cause,
    /// Explanation in one sentence.
    pub sentence: String,
    /// Confidence.
    pub level: Level,
    /// Chain from the cause to the symptom; begins with the cause.
    pub chain: Vec<Cause>,
    /// Figures that show the cause.
    pub evidence: Vec<Fact>,
    /// Remedies, the best first.
    pub remedies: Vec<Remedy>,
    /// Correlation of the cause's counter with the throughput, if there is one.
    #[serde(default)]
    pub moves: Option<Moves>,
    /// Other causes with evidence, the heaviest first.
    pub alternatives: Vec<Cause>,
    /// Causes that were excluded or not examined.
    pub ruled_out: Vec<RuledOut>,
    /// Throughput of the inner interface, bits per second.
    pub throughput: f64,
    /// Expected throughput, bits per second.
    pub expected: Option<f64>,
    /// The path of packets on this host.
    pub path: PathMap,
    /// Cost of the measurement.
    pub cost: Cost,
    /// The far end, if it was measured at the same time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub far: Option<Far>,
}

/// Findings of an end.
pub(crate) type Found = Vec<(&'static Spec, Finding)>;

/// Names the cause.
pub fn diagnose(evidence: &Evidence) -> Verdict {
    diagnose_without(evidence, &[])
}

/// Returns the verdict without the causes of a verdict's chain; `None` if no other cause shows.
pub fn rival(evidence: &Evidence, verdict: &Verdict) -> Option<Verdict> {
    verdict.alternatives.first()?;
    let rival = diagnose_without(evidence, &verdict.chain);
    rival.cause.is_fault().then_some(rival)
}

/// Returns the verdict after tests of remedies: a certain gain confirms its cause, which becomes the verdict.
pub fn concluded(verdict: Verdict, evidence: &Evidence, attempts: &[Attempt]) -> Verdict {
    let Some(proof) = attempts.iter().find(|attempt| attempt.trial.helps()) else {
        return verdict;
    };
    let mut proven = match rival(evidence, &verdict) {
        Some(rival) if rival.cause == proof.cause => {
            let others = std::iter::once(verdict.cause).chain(rival.alternatives);
            Verdict {
                alternatives: others.collect(),
                cost: verdict.cost,
                far: verdict.far,
                ..rival
            }
        }
        // The test was for a cause that the rules no longer name.
        _ if verdict.cause != proof.cause => return verdict,
        _ => verdict,
    };
    proven.level = Level::Confirmed;
    proven
}

fn diagnose_without(evidence: &Evidence, left_out: &[Cause]) -> Verdict {
    let (mut found, ruled_out) = evaluate(evidence, left_out);
    // With the expected throughput, nothing is wrong; an idle tunnel has no cause.
    if evidence.shortfall().is_some_and(is_tolerated) || evidence.is_idle() {
        found.clear();
    }
    let faint = found.first().is_some_and(|(_, f)| f.weight < WEIGHTY);
    if evidence.expected.is_none() && faint {
        let traces = std::mem::take(&mut found);
        let verdict = conclude(evidence, &found, ruled_out);
        return Verdict {
            alternatives: traces.iter().map(|(rule, _)| rule.cause).collect(),
            ..verdict
        };
    }
    conclude(evidence, &found, ruled_out)
}

/// Returns the results of all rules but some: findings worth naming, the heaviest first, and excluded causes.
pub(crate) fn evaluate(evidence: &Evidence, left_out: &[Cause]) -> (Found, Vec<RuledOut>) {
    let mut found: Found = Vec::new();
    let mut ruled_out = Vec::new();
    let specs = rules::ALL.iter();
    let rules = specs.filter(|spec| !left_out.contains(&spec.cause));
    for (spec, rule) in rules.filter_map(|spec| Some((spec, spec.rule?))) {
        let (fact, unseen) = match rule(evidence) {
            Ok(finding) if finding.weight >= LEAST_WEIGHT => {
                found.push((spec, finding));
                continue;
            }
            Ok(finding) => (finding.facts.into_iter().next(), None),
            Err(Excluded::Absent(fact)) => (Some(fact), None),
            Err(Excluded::Unseen(reason)) => (None, Some(reason)),
        };
        ruled_out.push(RuledOut {
            cause: spec.cause,
            fact,
            unseen,
        });
    }
    found.sort_by(|a, b| b.1.weight.total_cmp(&a.1.weight));
    (found, ruled_out)
}

/// Returns the verdict of the findings.
pub(crate) fn conclude(evidence: &Evidence, found: &Found, ruled_out: Vec<RuledOut>) -> Verdict {
    let mut verdict = match name(found) {
        Some((chain, level)) => named(found, chain, level),
        None => nothing(evidence),
    };
    let signature = verdict.cause.spec().signature.as_ref();
    verdict.moves = signature.and_then(|signature| moves(evidence, signature));
    verdict.ruled_out = ruled_out;
    verdict.throughput = evidence.throughput();
    verdict.expected = evidence.expected;
    verdict.path = evidence.map.clone();
    verdict
}

/// Returns the chain from the deepest cause to the heaviest, and the confidence.
pub(crate) fn name(found: &[(&Spec, Finding)]) -> Option<(Vec<Cause>, Level)> {
    let (mut rule, finding) = found.first().map(|(rule, finding)| (*rule, finding))?;
    let mut chain = vec![rule.cause];
    let mut settled = finding.settled;
    // Takes the heaviest cause of the present one; each cause is in the chain once, so this ends.
    while let Some((deeper, of)) = found
        .iter()
        .filter(|(_, deeper)| !settled && deeper.weight >= TRACE.min(finding.weight))
        .find(|(other, _)| other.effects.contains(&rule.cause) && !chain.contains(&other.cause))
    {
        rule = deeper;
        settled = of.settled;
        chain.insert(0, rule.cause);
    }
    let explained =
        |cause: &Cause| chain.contains(cause) || chain.iter().any(|link| link.explains(*cause));
    let rival = found.iter().find(|(other, _)| !explained(&other.cause));
    let clear = rival.is_none_or(|(_, other)| finding.weight >= CLEAR * other.weight);
    let level = if clear && finding.weight >= WEIGHTY {
        Level::Supported
    } else {
        Level::Consistent
    };
    Some((chain, level))
}

pub(crate) fn named(found: &[(&Spec, Finding)], chain: Vec<Cause>, level: Level) -> Verdict {
    let of = |cause: Cause| found.iter().find(|(rule, _)| rule.cause == cause);
    let cause = chain[0];
    let findings: Vec<&Finding> = chain
        .iter()
        .filter_map(|cause| of(*cause).map(|(_, finding)| finding))
        .collect();
    let alternatives = found.iter().map(|(rule, _)| rule.cause);
    Verdict {
        evidence: findings
            .iter()
            .flat_map(|finding| finding.facts.iter().cloned())
            .take(5)
            .collect(),
        remedies: findings
            .iter()
            .flat_map(|finding| finding.remedies.iter().cloned())
            .collect(),
        alternatives: alternatives
            .filter(|cause| !chain.contains(cause))
            .collect(),
        ..empty(cause, level, chain)
    }
}

fn nothing(evidence: &Evidence) -> Verdict {
    let (cause, value, expected) = match evidence.shortfall() {
        Some(shortfall) if !is_tolerated(shortfall) => {
            (Cause::Unknown, evidence.throughput(), evidence.expected)
        }
        _ if evidence.is_idle() => (Cause::Idle, evidence.throughput(), None),
        _ => (Cause::Healthy, evidence.throughput(), evidence.expected),
    };
    let expected = match expected {
        Some(bits) => format!("{:.0}", bits / 1e6),
        None if cause == Cause::Idle => format!("{} or more", IDLE / 1e6),
        None => "not given (--expect)".to_owned(),
    };
    let remedies = match cause {
        Cause::Idle => vec![under_load()],
        Cause::Unknown => vec![measure_longer()],
        _ => Vec::new(),
    };
    let level = Level::Supported;
    Verdict {
        evidence: vec![Fact::new(
            "throughput, Mbit/s",
            value / 1e6,
            expected,
            "rtnetlink bytes of the inner interface",
        )],
        remedies,
        ..empty(cause, level, vec![cause])
    }
}

/// Returns the remedy for an idle tunnel: traffic during the measurement.
fn under_load() -> Remedy {
    Remedy::ask(
        Location::Application,
        "run it again during a large transfer, or let two doctors make the load: first start `seikan doctor --listen \
         --key FILE --allow-load` at the far end",
        vec!["seikan doctor --peer ADDRESS --key FILE --load".into()],
        "causes show only under load",
    )
}

/// Returns the remedy for an unknown cause.
pub(crate) fn measure_longer() -> Remedy {
    Remedy::ask(
        Location::Here,
        "measure longer, as root, and at the far end as well (`--peer`)",
        vec!["sudo seikan doctor --seconds 30".into()],
        "more causes show",
    )
}

fn empty(cause: Cause, level: Level, chain: Vec<Cause>) -> Verdict {
    Verdict {
        version: 1,
        cause,
        sentence: cause.sentence().to_owned(),
        level,
        chain,
        evidence: Vec::new(),
        remedies: Vec::new(),
        moves: None,
        alternatives: Vec::new(),
        ruled_out: Vec::new(),
        throughput: 0.0,
        expected: None,
        path: PathMap::default(),
        cost: Cost::default(),
        far: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;
    use crate::trial::{Block, Decision, Trial};
    use seikan_observe::{Subject, metric};

    fn dropping() -> Evidence {
        let mut evidence = tunnel();
        evidence.map.links[0].queue_length = 3;
        count(&mut evidence, inner(), metric::TX_DROPPED, 500);
        count(&mut evidence, inner(), metric::TX_PACKETS, 10_000);
        evidence
    }

    fn shaped(evidence: &mut Evidence) {
        evidence.map.links[1].qdisc = "tbf".into();
        let qdisc = || Subject::Qdisc("eth0".into());
        count(evidence, qdisc(), metric::QDISC_PACKETS, 10_000);
        count(evidence, qdisc(), metric::QDISC_OVERLIMITS, 9_000);
        count(evidence, qdisc(), metric::QDISC_DROPS, 10);
        count(evidence, qdisc(), metric::QDISC_BYTES, 125_000_000);
    }

    #[test]
    fn a_trace_of_a_cause_is_named_only_if_something_is_missing() {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "Ip.FragCreates", 1_000);
        count(&mut evidence, Subject::Host, "Ip.ReasmReqds", 0);
        count(&mut evidence, inner(), metric::TX_PACKETS, 10_000);
        count(&mut evidence, egress(), metric::TX_PACKETS, 11_800);
        let untold = diagnose(&evidence);
        assert_eq!(untold.cause, Cause::Healthy);
        assert_eq!(untold.alternatives, [Cause::OuterFragmentation]);
        evidence.expected = Some(2.0 * evidence.throughput().max(1e6));
        assert_eq!(diagnose(&evidence).cause, Cause::OuterFragmentation);
    }

    #[test]
    fn one_cause_alone_is_supported() {
        let verdict = diagnose(&dropping());
        assert_eq!(verdict.cause, Cause::TunQueueOverflow);
        assert_eq!(verdict.level, Level::Supported);
        assert!(
            verdict
                .ruled_out
                .iter()
                .any(|out| out.cause == Cause::Shaper)
        );
    }

    #[test]
    fn the_deeper_cause_is_named_and_the_other_is_in_the_chain() {
        let mut evidence = dropping();
        // Short, but not so short that no other cause can be behind it.
        evidence.map.links[0].queue_length = 60;
        shaped(&mut evidence);
        let verdict = diagnose(&evidence);
        assert_eq!(verdict.cause, Cause::Shaper);
        assert_eq!(verdict.chain, [Cause::Shaper, Cause::TunQueueOverflow]);
        assert_eq!(verdict.alternatives, []);
    }

    #[test]
    fn a_setting_that_explains_it_is_the_deepest() {
        let mut evidence = dropping();
        shaped(&mut evidence);
        let verdict = diagnose(&evidence);
        assert_eq!(verdict.chain, [Cause::TunQueueOverflow]);
        assert_eq!(verdict.alternatives, [Cause::Shaper]);
    }

    #[test]
    fn the_rival_is_outside_the_chain() {
        let mut evidence = dropping();
        let alone = diagnose(&evidence);
        assert_eq!(rival(&evidence, &alone), None);
        evidence.probes.idle_rtt_us = Some(1_000.0);
        evidence.probes.loaded_rtt_us = Some(300_000.0);
        let verdict = diagnose(&evidence);
        let rival = rival(&evidence, &verdict).expect("another cause");
        assert_eq!(verdict.alternatives, [rival.cause]);
        assert!(!rival.remedies.is_empty());
    }

    /// A test of a change that doubled the throughput.
    fn proof(cause: Cause) -> Attempt {
        let block = |throughput| Block {
            throughput,
            ..Block::default()
        };
        let pairs = vec![(block(1e8), block(2e8)); 4];
        let rates: Vec<(f64, f64)> = pairs
            .iter()
            .map(|(a, b)| (a.throughput, b.throughput))
            .collect();
        Attempt {
            cause,
            remedy: Remedy::here("change", vec![], "all"),
            trial: Trial {
                pairs,
                gain: crate::stats::paired_gain(&rates),
                decision: Decision::Keep,
            },
        }
    }

    #[test]
    fn the_confirmed_cause_is_the_verdict() {
        let mut evidence = dropping();
        evidence.probes.idle_rtt_us = Some(1_000.0);
        evidence.probes.loaded_rtt_us = Some(300_000.0);
        let verdict = diagnose(&evidence);
        let concluded = |attempts: &[Attempt]| concluded(verdict.clone(), &evidence, attempts);
        assert_eq!(concluded(&[]), verdict);
        let same = concluded(&[proof(verdict.cause)]);
        assert_eq!((same.cause, same.level), (verdict.cause, Level::Confirmed));
        let other = concluded(&[proof(verdict.alternatives[0])]);
        assert_eq!(
            (other.cause, other.level),
            (verdict.alternatives[0], Level::Confirmed)
        );
        assert_eq!(other.alternatives, [verdict.cause]);
        // Tests for a cause that the rules do not name are ignored.
        assert_eq!(concluded(&[proof(Cause::CpuQuota)]), verdict);
    }

    #[test]
    fn a_tunnel_with_the_expected_throughput_is_healthy() {
        let mut evidence = dropping();
        count(&mut evidence, inner(), metric::TX_BYTES, 125_000_000);
        evidence.expected = Some(105e6);
        assert_eq!(diagnose(&evidence).cause, Cause::Healthy);
    }

    #[test]
    fn slow_without_a_cause_is_unknown() {
        let mut evidence = tunnel();
        evidence.expected = Some(100e6);
        assert_eq!(diagnose(&evidence).cause, Cause::Unknown);
        evidence.expected = None;
        assert_eq!(diagnose(&evidence).cause, Cause::Healthy);
    }
}
