//! Detects that one processor handles all received packets. Two rules use it.

use seikan_observe::path::LinkFacts;
use seikan_observe::{Subject, metric};

use super::weigh::{Facts, Ramp};
use crate::{Action, Evidence, Fact};

/// Share of a processor's time in softirqs. Half may belong to a sender's own calls, within which a
/// veth delivers; with nearly all of it, the processor does nothing else.
const SOFTIRQ: Ramp = Ramp::new(0.5, 0.85);
/// The processor's share of the softirq time of all processors; on two processors, half each is
/// even. Time is compared because packets delivered within a sender's calls are counted too, but
/// cost little.
const PART: Ramp = Ramp::new(0.6, 0.85);
/// Idle share from which a processor has spare time.
const IDLE_SHARE: Ramp = Ramp::new(0.05, 0.2);

/// Share of this path in all packets that the machine receives. Below the lower bound, other
/// packets keep the processor busy; above the upper one, packets of this path do (acknowledgements
/// alone are one in ten).
const OWN: Ramp = Ramp::new(0.01, 0.05);

/// Returns how far the packets that processors receive belong to this path, 0 to 1; 1 if unknown.
/// The kernel counts received packets for all namespaces of the machine together.
pub(super) fn concerned(evidence: &Evidence) -> f64 {
    let share = evidence.share_of_received();
    share.map_or(1.0, |share| OWN.at(share))
}

/// How far one processor alone handles received packets.
pub(super) struct OneCore {
    /// Strength of the finding, 0 to 1.
    pub strength: f64,
    /// Figures that support it.
    pub facts: Vec<Fact>,
}

/// Examines the processor with the most softirq time; `Err`: the unavailable data.
pub(super) fn one_core(evidence: &Evidence) -> Result<OneCore, String> {
    let cpus = &evidence.map.host.cpus;
    let share = |cpu: u32| evidence.cpu_share(cpu, &[metric::SOFTIRQ_NS]);
    let shares = cpus.iter().filter_map(|cpu| Some((*cpu, share(*cpu)?)));
    let hottest = shares.max_by(|a, b| a.1.total_cmp(&b.1));
    let (hot, softirq) = hottest.ok_or("/proc/stat is not readable")?;
    let grown = |cpu: &u32| evidence.growth(&Subject::Cpu(*cpu), metric::SOFTIRQ_NS);
    let all: f64 = cpus.iter().filter_map(grown).sum();
    let part = grown(&hot).unwrap_or(0.0) / all.max(1.0);
    let idle = evidence.cpu_share(hot, &[metric::IDLE_NS]).unwrap_or(0.0);
    let others = cpus.iter().filter(|cpu| **cpu != hot);
    let next = others.filter_map(|cpu| share(*cpu)).fold(0.0, f64::max);
    let several = f64::from(cpus.len() > 1);
    let strength = several
        * concerned(evidence)
        * SOFTIRQ.at(softirq)
        * PART.at(part)
        * (1.0 - IDLE_SHARE.at(idle));
    let facts = Vec::new()
        .and(
            format!("share of the time in which processor {hot} handled softirqs"),
            softirq,
            "below 0.5",
            "/proc/stat softirq",
        )
        .and(
            "its share of the softirq time of all processors",
            part,
            format!("{:.2}", 1.0 / cpus.len().max(1) as f64),
            "/proc/stat softirq",
        )
        .and(
            "share of the time in which it was idle",
            idle,
            "above 0.2",
            "/proc/stat",
        )
        .and(
            "share of the time in which the next processor handled softirqs",
            next,
            "about the same",
            "/proc/stat softirq",
        );
    Ok(OneCore { strength, facts })
}

/// Whether packets received on an interface are spread over processors, by RPS or by the queues of the card.
pub(super) fn is_spread(link: &LinkFacts) -> bool {
    let rps = link.rps.iter().any(|cpus| cpus.len() > 1);
    // All queues of a virtual interface end on the sending processor.
    rps || (link.kind.is_empty() && link.rx_queues > 1)
}

/// Returns the changes that let all processors handle the packets received on an interface.
pub(super) fn spread(evidence: &Evidence, link: &LinkFacts) -> Vec<Action> {
    let queues = 0..link.rx_queues.max(1);
    let spread = queues.map(|queue| Action::Rps {
        link: link.name.clone(),
        queue,
        cpus: evidence.map.host.cpus.clone(),
    });
    spread.collect()
}
