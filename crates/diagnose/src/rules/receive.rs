//! Whether one processor handles what this host receives: the question that two causes share.

use seikan_observe::path::LinkFacts;
use seikan_observe::{Subject, metric};

use super::weigh::Ramp;
use crate::{Evidence, Fact};

/// Share of its time that the processor handles softirqs: half may be the softirq part of a sender's own calls (a veth
/// delivers within them); nearly all of it is a processor that does nothing else.
const SOFTIRQ: Ramp = Ramp::new(0.5, 0.85);
/// Its part of all time for softirqs. On two processors half each is even. Not of packets: those that a sender's own calls
/// deliver are counted, too, and cost little.
const PART: Ramp = Ramp::new(0.6, 0.85);
/// A processor that is idle for more than this has room.
const ROOM: Ramp = Ramp::new(0.05, 0.2);

/// Packets of this path, of all that the machine received, up to which it is others' packets that keep a processor busy, and from
/// which they are its own: acknowledgements alone are one in ten.
const OWN: Ramp = Ramp::new(0.01, 0.05);

/// How far it is this path's packets that processors receive, 0 to 1: they are counted for all namespaces of the machine. 1 where
/// that is not known.
pub(super) fn concerned(evidence: &Evidence) -> f64 {
    let share = evidence.share_of_received();
    share.map_or(1.0, |share| OWN.at(share))
}

/// How far one processor alone handles received packets.
pub(super) struct OneCore {
    /// 0 to 1: fully.
    pub strength: f64,
    /// The numbers.
    pub facts: Vec<Fact>,
}

/// Looks for the processor that spends most time in softirqs; `Err` tells what could not be seen.
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
    let strength =
        several * concerned(evidence) * SOFTIRQ.at(softirq) * PART.at(part) * (1.0 - ROOM.at(idle));
    let facts = vec![
        Fact::new(
            format!("share of the time in which processor {hot} handled softirqs"),
            softirq,
            "below 0.5",
            "/proc/stat softirq",
        ),
        Fact::new(
            "its share of the softirq time of all processors",
            part,
            format!("{:.2}", 1.0 / cpus.len().max(1) as f64),
            "/proc/stat softirq",
        ),
        Fact::new(
            "share of the time in which it was idle",
            idle,
            "above 0.2",
            "/proc/stat",
        ),
        Fact::new(
            "share of the time in which the next processor handled softirqs",
            next,
            "about the same",
            "/proc/stat softirq",
        ),
    ];
    Ok(OneCore { strength, facts })
}

/// Whether packets that come in by an interface are spread over processors: by RPS, or by the card's own queues.
pub(super) fn is_spread(link: &LinkFacts) -> bool {
    let rps = link.rps.iter().any(|cpus| cpus.len() > 1);
    // A virtual interface's queues all end on the processor that sent.
    rps || (link.kind.is_empty() && link.rx_queues > 1)
}
