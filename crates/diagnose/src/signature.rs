//! The counter that shows a cause, and its correlation with the throughput.
//!
//! A correlation supports a cause that rules found. It is no proof: both may have a third reason.
//! Causes without a sampled counter of their own have no signature.

use seikan_observe::path::{SocketFacts, Transport};
use seikan_observe::{Key, Subject, metric};
use serde::{Deserialize, Serialize};

use crate::Evidence;
use crate::stats::{Interval, correlate, differences};

/// Largest lag of a correlation, samples: half a second at ten a second.
pub(crate) const MOST_LAG: usize = 5;
/// Samples of a block that is resampled as a whole: neighbours in time are similar for about so long.
const BLOCK: usize = 5;

/// Correlation of a counter with the throughput.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Moves {
    /// Name of the counter in recordings.
    pub counter: String,
    /// Lag of the throughput behind the counter, seconds; negative: it comes first.
    pub lag: f64,
    /// Pearson's r of the changes of both from sample to sample, at that lag.
    pub r: Interval,
}

/// Returns the correlation of a counter with the throughput while there was data to send; `None` if
/// it may be chance.
pub(crate) fn moves(evidence: &Evidence, signature: &Signature) -> Option<Moves> {
    let steps = Steps::of(evidence)?;
    let offered = steps.offered();
    let values = steps.values(signature)?;
    let throughput = steps.throughput();
    let [values, throughput] =
        [values, throughput].map(|all| differences(all.get(offered.clone()).unwrap_or(&[])));
    let found = correlate(&values, &throughput, MOST_LAG, BLOCK)?;
    let step = evidence.seconds() / steps.seconds.len() as f64;
    // An interval that holds 0 may be chance.
    (found.r.low * found.r.high > 0.0).then(|| Moves {
        counter: signature.names[0].to_owned(),
        lag: f64::from(found.lag) * step,
        r: found.r,
    })
}

/// Objects that have the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Host,
    Cpus,
    Inner,
    Qdiscs,
    Program,
    Threads,
    Group,
    /// Connections through the tunnel.
    Flows,
    /// The TCP connections that the tunnel itself runs over.
    Outer,
}

/// Divisor of a counter's growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Per {
    Packet,
    Byte,
    Second,
    /// The gauge itself; the largest of its subjects.
    Value,
}

/// The counter of a cause.
#[derive(Debug)]
pub(crate) struct Signature {
    pub source: Source,
    /// Names of counters, which are added up.
    pub names: &'static [&'static str],
    pub per: Per,
    /// Largest normal value.
    pub normal: f64,
}

/// Packets lost or retransmitted, of all, that the rules ignore.
pub(crate) const FEW: f64 = 0.001;
/// Bytes of a full packet.
pub(crate) const FULL_PACKET: f64 = 1_400.0;

/// Growth from each sample to the next.
pub(crate) struct Steps<'a> {
    evidence: &'a Evidence,
    pub seconds: Vec<f64>,
    /// Bytes of the inner interface in the direction with more traffic.
    pub bytes: Vec<f64>,
    /// Packets in both directions.
    packets: Vec<f64>,
}

impl Signature {
    pub const fn new(
        source: Source,
        names: &'static [&'static str],
        per: Per,
        normal: f64,
    ) -> Self {
        Signature {
            source,
            names,
            per,
            normal,
        }
    }
}

impl<'a> Steps<'a> {
    /// Returns `None` with fewer than two samples, or without an inner interface.
    pub fn of(evidence: &'a Evidence) -> Option<Self> {
        let times = &evidence.series.times;
        let seconds: Vec<f64> = times
            .windows(2)
            .map(|pair| pair[1].saturating_sub(pair[0]).as_secs_f64().max(1e-3))
            .collect();
        if seconds.is_empty() {
            return None;
        }
        let inner = Subject::Link(evidence.map.inner.clone()?);
        let empty = Self {
            evidence,
            seconds,
            bytes: Vec::new(),
            packets: Vec::new(),
        };
        let grown = |name| empty.grown(&inner, name);
        let bytes = if evidence.sends() {
            grown(metric::TX_BYTES)?
        } else {
            grown(metric::RX_BYTES)?
        };
        let mut packets = grown(metric::TX_PACKETS)?;
        add(&mut packets, &grown(metric::RX_PACKETS)?);
        Some(Self {
            bytes,
            packets,
            ..empty
        })
    }

    /// Returns the longest range of steps in which the main connection had data to send: a pause of
    /// the application says nothing about the tunnel. All steps if that is not known.
    fn offered(&self) -> std::ops::Range<usize> {
        let all = 0..self.seconds.len();
        let flow = self.evidence.main_flow();
        let paused =
            flow.and_then(|flow| self.gauge(&Subject::Tcp(flow.inode), metric::TCP_APP_LIMITED));
        let Some(paused) = paused else {
            return all;
        };
        let mut begin = 0;
        let mut longest = 0..0;
        for (index, paused) in paused.iter().enumerate() {
            if *paused > 0.0 {
                begin = index + 1;
            } else if index + 1 - begin > longest.len() {
                longest = begin..index + 1;
            }
        }
        longest
    }

    /// Returns the bits per second of each step.
    pub fn throughput(&self) -> Vec<f64> {
        let pairs = self.bytes.iter().zip(&self.seconds);
        pairs
            .map(|(bytes, seconds)| bytes * 8.0 / seconds)
            .collect()
    }

    /// Returns the growth of a counter in each step; `None` if there is no such counter.
    fn grown(&self, subject: &Subject, name: &'static str) -> Option<Vec<f64>> {
        let columns = &self.evidence.series.columns;
        let column = columns.get(&Key::new(subject.clone(), name))?;
        let mut grown = vec![0.0; self.seconds.len()];
        for pair in column.points.windows(2) {
            let ((_, before), (index, now)) = (pair[0], pair[1]);
            if let Some(step) = (index as usize)
                .checked_sub(1)
                .and_then(|i| grown.get_mut(i))
            {
                *step += now.saturating_sub(before) as f64;
            }
        }
        Some(grown)
    }

    /// Returns a gauge at the end of each step.
    fn gauge(&self, subject: &Subject, name: &'static str) -> Option<Vec<f64>> {
        let columns = &self.evidence.series.columns;
        let column = columns.get(&Key::new(subject.clone(), name))?;
        let mut points = column.points.iter().peekable();
        let mut value = 0.0;
        Some(
            (1..=self.seconds.len() as u32)
                .map(|index| {
                    while let Some((_, next)) = points.next_if(|(at, _)| *at <= index) {
                        value = *next as f64;
                    }
                    value
                })
                .collect(),
        )
    }

    /// Returns the counter of a signature in each step: growth summed over names, and over subjects
    /// too if it is per packet or byte; otherwise the largest subject.
    fn raw(&self, signature: &Signature) -> Option<Vec<f64>> {
        let is_sum = matches!(signature.per, Per::Packet | Per::Byte);
        let subjects = self.subjects(signature.source).into_iter();
        let each = subjects.filter_map(|subject| {
            let of = |name: &&'static str| match signature.per {
                Per::Value => self.gauge(&subject, name),
                _ => self.grown(&subject, name),
            };
            signature.names.iter().filter_map(of).reduce(added)
        });
        if is_sum {
            each.reduce(added)
        } else {
            each.max_by(|a, b| a.iter().sum::<f64>().total_cmp(&b.iter().sum()))
        }
    }

    /// Returns the divisor of each step.
    fn divisor(&self, per: Per) -> Option<&[f64]> {
        match per {
            Per::Packet => Some(&self.packets),
            Per::Byte => Some(&self.bytes),
            Per::Second => Some(&self.seconds),
            Per::Value => None,
        }
    }

    /// Returns the signature in each step.
    pub fn values(&self, signature: &Signature) -> Option<Vec<f64>> {
        let raw = self.raw(signature)?;
        let Some(divisor) = self.divisor(signature.per) else {
            return Some(raw);
        };
        let pairs = raw.iter().zip(divisor);
        Some(pairs.map(|(grown, by)| grown / by.max(1e-3)).collect())
    }

    /// Returns the signature over the whole time.
    pub fn overall(&self, signature: &Signature) -> Option<f64> {
        let raw = self.raw(signature)?;
        let sum: f64 = raw.iter().sum();
        Some(match self.divisor(signature.per) {
            Some(divisor) => sum / divisor.iter().sum::<f64>().max(1.0),
            None => sum / raw.len().max(1) as f64,
        })
    }

    fn subjects(&self, source: Source) -> Vec<Subject> {
        let map = &self.evidence.map;
        let program = map.program.as_ref();
        let names = |link: &Option<String>| link.clone().into_iter();
        let tcp = |sockets: &[SocketFacts]| -> Vec<Subject> {
            let tcp = sockets.iter().filter(|s| s.transport == Transport::Tcp);
            tcp.map(|s| Subject::Tcp(s.inode)).collect()
        };
        match source {
            Source::Host => vec![Subject::Host],
            Source::Cpus => map.host.cpus.iter().copied().map(Subject::Cpu).collect(),
            Source::Inner => names(&map.inner).map(Subject::Link).collect(),
            Source::Qdiscs => names(&map.inner)
                .chain(names(&map.egress))
                .map(Subject::Qdisc)
                .collect(),
            Source::Program => program
                .map(|p| Subject::Process(p.pid))
                .into_iter()
                .collect(),
            Source::Threads => program
                .iter()
                .flat_map(|p| {
                    let pid = p.pid;
                    p.threads
                        .iter()
                        .map(move |(tid, _)| Subject::Thread { pid, tid: *tid })
                })
                .collect(),
            Source::Group => program
                .and_then(|p| p.group.clone())
                .map(Subject::Group)
                .into_iter()
                .collect(),
            Source::Flows => tcp(&map.flows),
            Source::Outer => tcp(&map.sockets),
        }
    }
}

fn add(sum: &mut [f64], other: &[f64]) {
    for (sum, other) in sum.iter_mut().zip(other) {
        *sum += other;
    }
}

fn added(mut sum: Vec<f64>, other: Vec<f64>) -> Vec<f64> {
    add(&mut sum, &other);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baseline::testing::{dips, evidence};

    const RECEIVE_ERRORS: Signature =
        Signature::new(Source::Host, &["Udp.RcvbufErrors"], Per::Packet, FEW);

    #[test]
    fn drops_move_with_the_dips() {
        let lost = |step: u32| 100 - dips(step);
        let lossy = evidence(&[(Subject::Host, "Udp.RcvbufErrors", &lost)]);
        let found = moves(&lossy, &RECEIVE_ERRORS).expect("a correlation");
        assert_eq!((&*found.counter, found.lag), ("Udp.RcvbufErrors", 0.0));
        assert!(found.r.high < -0.9, "{found:?}");
        // A missing or constant counter has no correlation.
        const STOLEN: Signature =
            Signature::new(Source::Cpus, &[metric::STEAL_NS], Per::Second, 0.05e9);
        assert_eq!(moves(&lossy, &STOLEN), None);
        let steady = evidence(&[(Subject::Cpu(0), metric::STEAL_NS, &|_| 7)]);
        assert_eq!(moves(&steady, &STOLEN), None);
    }

    #[test]
    fn pauses_of_an_application_are_not_counted() {
        let mut made = evidence(&[(Subject::Tcp(9), metric::TCP_BYTES_ACKED, &|_| 1)]);
        made.map.flows = vec![crate::rules::testing::socket(9, Transport::Tcp)];
        // Steps 1 to 40 end with samples 1 to 40; it paused in samples 11 to 13.
        let points = (1..=40).map(|at| (at, u64::from((11..=13).contains(&at))));
        let column = seikan_observe::Column {
            kind: seikan_observe::Kind::Gauge,
            points: points.collect(),
        };
        let key = Key::new(Subject::Tcp(9), metric::TCP_APP_LIMITED);
        made.series.columns.insert(key, column);
        let steps = Steps::of(&made).expect("steps");
        assert_eq!(steps.offered(), 13..40);
    }
}
