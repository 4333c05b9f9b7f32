//! Diagnosis of both ends of a tunnel, measured at the same time.
//!
//! The same rules examine each end. An end only infers some causes: loss, delay or a closed window
//! may come from the path or from the other end. If the other end has a cause that explains these
//! symptoms, the verdict names that cause. Counters of both ends tell loss on the path from loss at
//! an end.

use seikan_observe::metric;
use seikan_observe::path::PathMap;
use serde::{Deserialize, Serialize};

use crate::evidence::is_tolerated;
use crate::finding::LEAST_WEIGHT;
use crate::rules::Spec;
use crate::verdict::{
    CLEAR, Found, TRACE, conclude, diagnose, evaluate, measure_longer, name, named,
};
use crate::{Cause, Evidence, Fact, Finding, Level, Location, PathStep, Remedy, RuledOut, Verdict};

/// Minimum ratio of the far end's weight to this end's at which the far end's cause is named
/// instead, so that a shared machine or load does not change the end by chance.
const HEAVIER: f64 = 1.2;
/// Minimum share of the losses that the far end's own drops must account for to explain them.
const MOSTLY: f64 = 0.5;
/// Smallest relevant difference between the counts of both ends, as a share: their measurements
/// last some seconds, and start and stop about a tenth of a second apart.
const SKEW: f64 = 0.02;
/// Additional difference for bytes of super-packets, which lack the headers of their segments: 40
/// of 1,400 bytes.
const HEADERS: f64 = 0.03;
/// Largest overhead of a tunnel per packet, in bytes. More than this is other traffic on the link.
const OVERHEAD: f64 = 150.0;
/// Length in bytes of an Ethernet header with two VLAN tags, which links include in their byte
/// counts.
const FRAME: f64 = 22.0;
/// Share of lost outer packets from which no other cause matters, as for path-loss.
const FULL_LOSS: f64 = 0.05;

/// The end where a cause is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// This host.
    Here,
    /// The other host.
    FarEnd,
    /// The path between them.
    Between,
}

/// Results of the far end's measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Far {
    /// The end where the named cause is; `None` for `healthy`, `idle` and `unknown`.
    pub at: Option<End>,
    /// The path on the far host, with the data that is unavailable there.
    pub path: PathMap,
    /// Throughput of the far end's inner interface in the direction with more traffic, in bits per
    /// second.
    pub throughput: f64,
    /// The far end's verdict from its own data alone.
    pub cause: Cause,
    /// Packets that crossed between the outer interfaces, if they can be compared.
    pub crossing: Option<Crossing>,
}

/// The tunnel's own packets between the sending and the receiving end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Crossing {
    /// Packets or bytes per second at the sending end.
    pub sent: f64,
    /// Packets or bytes per second at the receiving end.
    pub received: f64,
    /// Whether the rates count packets; if not, they count bytes.
    pub packets: bool,
}

impl Crossing {
    /// Share of the packets lost on the path, 0 to 1.
    pub fn lost(&self) -> f64 {
        (1.0 - self.received / self.sent.max(1.0)).clamp(0.0, 1.0)
    }

    /// Largest loss that the method of counting can explain.
    pub fn uncertainty(&self) -> f64 {
        if self.packets { SKEW } else { SKEW + HEADERS }
    }

    /// Whether no relevant share was lost on the path.
    fn is_whole(&self) -> bool {
        self.lost() < self.uncertainty() / 2.0
    }

    fn fact(&self) -> Fact {
        let unit = if self.packets { "packets" } else { "bytes" };
        Fact::new(
            format!("share of the tunnel's {unit} lost between the two ends"),
            self.lost(),
            format!("below {}", self.uncertainty()),
            "rtnetlink of the outer interfaces of both ends",
        )
    }
}

/// Names the cause from simultaneous measurements of both ends.
pub fn both(near: &Evidence, far: &Evidence) -> Verdict {
    let far = &Evidence {
        expected: near.expected,
        ..far.clone()
    };
    let alone = diagnose(far);
    let sends = near.sends();
    let (sender, receiver) = if sends { (near, far) } else { (far, near) };
    let crossing = crossing(sender, receiver);
    // The lower rate is the received one. A sender of datagrams does not notice losses.
    let throughput = near.throughput().min(far.throughput());
    let shortfall = near.expected.map(|expected| 1.0 - throughput / expected);
    let satisfied = shortfall.is_some_and(is_tolerated);
    let (mut here, ruled_out) = evaluate(near, &[]);
    let (mut there, far_ruled_out) = evaluate(far, &[]);
    if satisfied || near.is_idle() && far.is_idle() {
        here.clear();
        there.clear();
    }
    let mut ruled_out = fill(ruled_out, far_ruled_out);
    let felt = here.first().cloned();
    let dropped = account(sender, receiver);
    let (sending, receiving) = if sends {
        (&mut here, &mut there)
    } else {
        (&mut there, &mut here)
    };
    ruled_out.extend(settle_loss(
        sending, receiving, dropped, crossing, satisfied,
    ));
    let end = bad_end(&here, &there, sends);
    let mut verdict = match end {
        None => nothing_found(near, shortfall),
        Some(End::FarEnd) => at_the_far_end(&here, &there, felt, dropped),
        Some(_) => conclude(near, &here, Vec::new()),
    };
    let inside =
        dropped.is_some_and(|share| share >= MOSTLY) || arrives_and_is_lost(sender, crossing);
    let at = end.map(|end| located_end(&verdict, end, sends, inside));
    let others = here.iter().chain(&there).map(|(rule, _)| rule.cause);
    let others: Vec<Cause> = others.collect();
    for cause in others {
        if !verdict.chain.contains(&cause) && !verdict.alternatives.contains(&cause) {
            verdict.alternatives.push(cause);
        }
    }
    ruled_out.retain(|out| {
        !verdict.chain.contains(&out.cause) && !verdict.alternatives.contains(&out.cause)
    });
    verdict.ruled_out = ruled_out;
    verdict.path = near.map.clone();
    verdict.expected = near.expected;
    verdict.throughput = throughput;
    verdict.far = Some(Far {
        at,
        path: far.map.clone(),
        throughput: far.throughput(),
        cause: alone.cause,
        crossing,
    });
    verdict
}

/// Returns the end whose findings name the cause; `None` if neither end has a finding.
fn bad_end(here: &Found, there: &Found, sends: bool) -> Option<End> {
    let Some((near_rule, near)) = here.first() else {
        return there.first().map(|_| End::FarEnd);
    };
    let outside = near_rule.is_inferred;
    let explains = |(rule, finding): &(&Spec, Finding)| {
        // The receiver knows best why its window is small.
        let window = sends && rule.cause == Cause::TcpReceiveWindow;
        let makes = rule.effects.contains(&near_rule.cause);
        let makes = makes || (window && rule.cause == near_rule.cause);
        outside && makes && finding.weight >= TRACE.min(near.weight)
    };
    let outweighs = |(rule, finding): &(&Spec, Finding)| {
        // Evidence at an end outweighs an inference at the other.
        let own = outside && !rule.is_inferred;
        finding.weight >= near.weight * if own { 1.0 } else { HEAVIER }
    };
    let far = there
        .iter()
        .any(|found| explains(found) || outweighs(found));
    Some(if far { End::FarEnd } else { End::Here })
}

fn nothing_found(near: &Evidence, shortfall: Option<f64>) -> Verdict {
    let mut verdict = conclude(near, &Found::new(), Vec::new());
    // Traffic that was sent may not have arrived.
    if shortfall.is_some_and(|shortfall| !is_tolerated(shortfall)) {
        verdict.cause = Cause::Unknown;
        verdict.sentence = Cause::Unknown.sentence().to_owned();
        verdict.chain = vec![Cause::Unknown];
        verdict.remedies = vec![measure_longer()];
    }
    verdict
}

/// Returns the verdict about a cause of the far end, with its effect at this end.
fn at_the_far_end(
    here: &Found,
    there: &Found,
    felt: Option<(&'static Spec, Finding)>,
    dropped: Option<f64>,
) -> Verdict {
    // The far end has a finding; otherwise this end would have been named.
    let (chain, level) = name(there).unwrap_or((vec![Cause::Unknown], Level::Consistent));
    let weight = there.first().map_or(0.0, |(_, finding)| finding.weight);
    let mut verdict = named(there, chain, level);
    turn(&mut verdict);
    let felt = felt.filter(|(rule, _)| rule.is_inferred);
    if let Some((rule, finding)) = felt {
        let lost = rule.cause == Cause::PathLoss;
        let by_count = lost && dropped.is_some_and(|share| share >= MOSTLY);
        let made = verdict.chain.iter().any(|cause| cause.explains(rule.cause));
        if by_count || made {
            verdict.evidence.truncate(3);
            verdict
                .evidence
                .extend(dropped.filter(|_| by_count).map(explained));
            verdict.evidence.extend(finding.facts.into_iter().next());
            verdict.chain.push(rule.cause);
        }
    }
    // A rival at this end lowers the confidence.
    let rival = here
        .iter()
        .find(|(rule, _)| !verdict.chain.contains(&rule.cause));
    if rival.is_some_and(|(_, rival)| weight < CLEAR * rival.weight) {
        verdict.level = Level::Consistent;
    }
    verdict
}

/// Rewrites a verdict of the far end from this end's point of view. This end cannot change the far
/// host, so its remedies lose their actions.
fn turn(verdict: &mut Verdict) {
    for fact in &mut verdict.evidence {
        fact.name.insert_str(0, "far end: ");
    }
    for Remedy {
        location, actions, ..
    } in &mut verdict.remedies
    {
        actions.clear();
        *location = match location {
            Location::Here | Location::Tunnel => Location::FarEnd,
            Location::FarEnd => Location::Here,
            Location::Provider => Location::Provider,
            Location::Application => Location::Application,
        };
    }
}

/// Returns the end of the named cause, if the findings of `end` name it; `inside`: packets are lost
/// in the receiver's host.
fn located_end(verdict: &Verdict, end: End, sends: bool, inside: bool) -> End {
    let first = verdict.remedies.first().map(|remedy| remedy.location);
    let receiver = if sends { End::FarEnd } else { End::Here };
    match verdict.cause {
        // The receiver's counters show the loss, although no rule finds it.
        Cause::PathLoss if inside => receiver,
        cause if cause.spec().step == Some(PathStep::Network) => End::Between,
        // The receiver's buffer is too small.
        Cause::TcpReceiveWindow => receiver,
        // The queue may be where neither end sees it.
        Cause::Bufferbloat if !matches!(first, Some(Location::Here | Location::FarEnd)) => {
            End::Between
        }
        _ => end,
    }
}

/// Returns the causes that this end excludes, and for those that it cannot examine, the result of
/// the far end.
fn fill(here: Vec<RuledOut>, there: Vec<RuledOut>) -> Vec<RuledOut> {
    let all = here.into_iter().map(|out| {
        let other = there.iter().find(|other| other.cause == out.cause);
        match other.and_then(|other| other.fact.clone()) {
            Some(mut fact) if out.fact.is_none() => {
                fact.name.insert_str(0, "far end: ");
                RuledOut {
                    cause: out.cause,
                    fact: Some(fact),
                    unseen: None,
                }
            }
            _ => out,
        }
    });
    all.collect()
}

/// Returns the share of the sender's losses outside of its host that the receiver's host dropped;
/// `None` without losses or without counters.
fn account(sender: &Evidence, receiver: &Evidence) -> Option<f64> {
    let losses = sender.inner_losses()?;
    let lost = losses.elsewhere() * losses.segments / sender.seconds();
    let dropped = receiver.dropped_receiving() / receiver.seconds();
    (lost > 0.0).then(|| (dropped / lost).min(1.0))
}

/// Whether so many packets are lost that a loss between the two ends would show in the counters,
/// but does not.
fn arrives_and_is_lost(sender: &Evidence, crossing: Option<Crossing>) -> bool {
    let lost = sender.inner_losses().map(|losses| losses.elsewhere());
    lost.zip(crossing)
        .is_some_and(|(lost, crossing)| crossing.is_whole() && lost > 2.0 * crossing.uncertainty())
}

fn explained(share: f64) -> Fact {
    Fact::new(
        "share of segments lost outside of the sender's host that the receiver's host dropped",
        share,
        "near 0, if they were lost on the path",
        "tcp_info of the one end, drops of the other",
    )
}

/// Adjusts the weight of path-loss by the counters of both ends: less for drops in the receiver's
/// host, more for packets that did not cross, none if all packets crossed and another cause
/// explains the loss.
fn settle_loss(
    sending: &mut Found,
    receiving: &mut Found,
    dropped: Option<f64>,
    crossing: Option<Crossing>,
    satisfied: bool,
) -> Option<RuledOut> {
    let of = |found: &Found| {
        found
            .iter()
            .position(|(rule, _)| rule.cause == Cause::PathLoss)
    };
    let loses = |found: &Found| {
        let mut causes = found.iter().map(|(rule, _)| rule);
        causes
            .any(|rule| rule.drops_packets || rule.effects.iter().any(|it| it.spec().drops_packets))
    };
    let lost = crossing.filter(|crossing| crossing.lost() > crossing.uncertainty());
    let others = sending
        .iter()
        .chain(&*receiving)
        .any(|(rule, _)| rule.cause != Cause::PathLoss);
    let mut out = None;
    let mut rule_out = |fact| {
        out = Some(RuledOut {
            cause: Cause::PathLoss,
            fact: Some(fact),
            unseen: None,
        });
    };
    // A receiver sees only that packets are late; a sender counts its losses.
    if let Some(index) = of(receiving)
        && (dropped.is_some() || loses(sending))
        && lost.is_none()
    {
        let (_, finding) = receiving.remove(index);
        finding
            .facts
            .into_iter()
            .next()
            .into_iter()
            .for_each(&mut rule_out);
    }
    match (of(sending), lost) {
        (Some(index), lost) => {
            let (_, finding) = &mut sending[index];
            let share = dropped.filter(|_| loses(receiving)).unwrap_or(0.0);
            finding.weight *= 1.0 - share;
            // The losses would show in both counters. If nothing else explains them, they happen in a host.
            let plain = finding.facts.first().map_or(0.0, |fact| fact.value);
            let much = |crossing: &Crossing| plain > 2.0 * crossing.uncertainty();
            if let Some(crossing) = crossing.filter(Crossing::is_whole).filter(much) {
                finding.facts.insert(1, crossing.fact());
                if others {
                    finding.weight = 0.0;
                    rule_out(crossing.fact());
                }
            } else if finding.weight < LEAST_WEIGHT {
                rule_out(explained(share));
            }
            if let Some(crossing) = lost {
                finding.facts.insert(0, crossing.fact());
            }
        }
        (None, Some(crossing)) if !satisfied => {
            let weight = 0.9 * (crossing.lost() / FULL_LOSS).min(1.0);
            sending.push(path_loss(weight, crossing));
        }
        (None, _) => {}
    }
    for found in [sending, receiving] {
        found.retain(|(_, finding)| finding.weight >= LEAST_WEIGHT);
        found.sort_by(|a, b| b.1.weight.total_cmp(&a.1.weight));
    }
    out
}

fn path_loss(weight: f64, crossing: Crossing) -> (&'static Spec, Finding) {
    let remedy = Remedy::ask(
        Location::Provider,
        "find the hop between the two hosts that loses packets, with the counters of both",
        Vec::new(),
        "these packets arrive",
    );
    let finding = Finding {
        weight,
        settled: false,
        facts: vec![crossing.fact()],
        remedies: vec![remedy],
    };
    (Cause::PathLoss.spec(), finding)
}

/// Returns the packets that left the sender's outer interface and reached the receiver's; `None`
/// with other traffic on the link, or without comparable counters.
fn crossing(sender: &Evidence, receiver: &Evidence) -> Option<Crossing> {
    for end in [sender, receiver] {
        (end.map.egress.is_some() && end.map.egress != end.map.inner).then_some(())?;
    }
    let rate = |value: Option<f64>, end: &Evidence| Some(value? / end.seconds());
    let sent = rate(sender.egress(metric::TX_PACKETS), sender)?;
    let sent_bytes = rate(sender.egress(metric::TX_BYTES), sender)?;
    let received = rate(receiver.egress(metric::RX_PACKETS), receiver)?;
    let received_bytes = rate(receiver.egress(metric::RX_BYTES), receiver)?;
    let inner = rate(sender.inner(metric::TX_PACKETS), sender)?;
    let inner_bytes = rate(sender.inner(metric::TX_BYTES), sender)?;
    // A hundred packets a second are enough for shares of a few per cent.
    (sent.min(inner) >= 100.0 || inner_bytes >= 1e6).then_some(())?;
    let overhead = (OVERHEAD * inner).max(0.1 * inner_bytes);
    (sent_bytes <= inner_bytes + overhead).then_some(())?;
    let mtu = |end: &Evidence| Some(f64::from(end.map.egress_link()?.mtu) + FRAME);
    let single = sent_bytes <= sent * mtu(sender)? && received_bytes <= received * mtu(receiver)?;
    let packets = Crossing {
        sent,
        received,
        packets: true,
    };
    let bytes = Crossing {
        sent: sent_bytes,
        received: received_bytes,
        packets: false,
    };
    let agree = (packets.lost() - bytes.lost()).abs() <= SKEW;
    let crossing = if single && agree { packets } else { bytes };
    // If more is received than sent, there are other senders.
    let more = crossing.received / crossing.sent - 1.0;
    (more <= crossing.uncertainty()).then_some(crossing)
}

#[cfg(test)]
mod tests;
