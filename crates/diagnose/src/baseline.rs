//! What naive tools do: one counter for each cause, and the cause of the most conspicuous counter named.
//!
//! The rules have to be better than this to be worth having, so the lab counts these on the same samples. Nothing else uses
//! them. They are as good as the idea allows: counters that grow with traffic are taken per packet, and a tunnel that carries
//! what it should is called healthy, as the rules do.
//!
//! Causes without a counter of their own in what is sampled (`outer-flow-cannot-spread`, `virtual-switch-upcalls`,
//! `vhost-starved`) cannot be named.

use seikan_observe::path::{SocketFacts, Transport};
use seikan_observe::{Key, Subject, metric};

use crate::stats::strongest;
use crate::verdict::TOLERATED_SHORTFALL;
use crate::{Cause, Evidence};

/// By how many samples a counter may come before or after what it explains: half a second at ten a second.
const MOST_LAG: usize = 5;
/// Samples below which a correlation is chance.
const LEAST_SAMPLES: usize = 10;

/// Whose counter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
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

/// What a counter's growth is divided by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Per {
    Packet,
    Byte,
    Second,
    /// A gauge as it is; the largest of its subjects.
    Value,
}

/// The counter of a cause.
struct Signature {
    cause: Cause,
    of: Of,
    /// They are added up.
    names: &'static [&'static str],
    per: Per,
    /// What it is at most where nothing is wrong.
    normal: f64,
}

/// Packets lost or sent again, of all: what the rules take for none.
const FEW: f64 = 0.001;
/// Bytes of a full packet.
const PACKET: f64 = 1_400.0;

const fn row(
    cause: Cause,
    of: Of,
    names: &'static [&'static str],
    per: Per,
    normal: f64,
) -> Signature {
    Signature {
        cause,
        of,
        names,
        per,
        normal,
    }
}

/// One row for each cause; the catalogue's cheap signatures.
#[rustfmt::skip]
const SIGNATURES: &[Signature] = &[
    row(Cause::TunQueueOverflow, Of::Inner, &[metric::TX_DROPPED], Per::Packet, FEW),
    row(Cause::FramePerSyscall, Of::Program, &[metric::IO_READS, metric::IO_WRITES], Per::Packet, 1.0),
    row(Cause::SingleThreadSaturated, Of::Threads, &[metric::RUN_NS], Per::Second, 0.8e9),
    row(Cause::CpuContention, Of::Threads, &[metric::RUN_DELAY_NS], Per::Second, 0.1e9),
    row(Cause::CpuQuota, Of::Group, &[metric::GROUP_THROTTLED_US], Per::Second, 0.01e6),
    row(Cause::CpuSteal, Of::Cpus, &[metric::STEAL_NS], Per::Second, 0.05e9),
    row(Cause::SoftirqOneCore, Of::Cpus, &[metric::SOFTIRQ_NS], Per::Second, 0.5e9),
    row(Cause::BacklogFull, Of::Cpus, &[metric::SOFTNET_DROPPED], Per::Packet, FEW),
    row(Cause::NapiBudget, Of::Cpus, &[metric::SOFTNET_TIME_SQUEEZE], Per::Packet, FEW),
    row(Cause::UdpReceiveBuffer, Of::Host, &["Udp.RcvbufErrors", "Udp6.RcvbufErrors"], Per::Packet, FEW),
    row(Cause::UdpSendBuffer, Of::Host, &["Udp.SndbufErrors", "Udp6.SndbufErrors"], Per::Packet, FEW),
    row(Cause::TcpOuterBuffer, Of::Outer, &[metric::TCP_SNDBUF_LIMITED_US, metric::TCP_RWND_LIMITED_US], Per::Second, 0.1e6),
    row(Cause::TcpReceiveWindow, Of::Flows, &[metric::TCP_RWND_LIMITED_US], Per::Second, 0.1e6),
    row(Cause::ApplicationLimited, Of::Flows, &[metric::TCP_APP_LIMITED], Per::Value, 0.5),
    row(Cause::PathLoss, Of::Flows, &[metric::TCP_RETRANS], Per::Packet, FEW),
    row(Cause::PathDelay, Of::Flows, &[metric::TCP_MIN_RTT_US], Per::Value, 20_000.0),
    row(Cause::Reordering, Of::Flows, &[metric::TCP_REORD_SEEN], Per::Packet, FEW),
    row(Cause::TcpOverTcp, Of::Outer, &[metric::TCP_RETRANS], Per::Packet, FEW),
    row(Cause::MtuBlackHole, Of::Flows, &[metric::TCP_TIMEOUTS], Per::Second, 0.1),
    row(Cause::OuterFragmentation, Of::Host, &["Ip.FragCreates", "Ip.ReasmReqds", "Ip6.FragCreates", "Ip6.ReasmReqds"], Per::Packet, FEW),
    row(Cause::MtuMismatch, Of::Inner, &[metric::RX_LENGTH_ERRORS, metric::RX_ERRORS, metric::TX_ERRORS], Per::Packet, FEW),
    row(Cause::PacketsTooSmall, Of::Inner, &[metric::TX_PACKETS, metric::RX_PACKETS], Per::Byte, 1.5 / PACKET),
    row(Cause::GroBreaksEncapsulation, Of::Host, &["drop.PKT_TOO_BIG", "Ip.FragFails", "Ip6.FragFails"], Per::Packet, FEW),
    row(Cause::OffloadMissing, Of::Cpus, &[metric::SOFTNET_PROCESSED], Per::Byte, 4.0 / PACKET),
    row(Cause::OffloadBroken, Of::Host, &["Tcp.InCsumErrors", "Udp.InCsumErrors", "Udp6.InCsumErrors", "Icmp.InCsumErrors"], Per::Packet, FEW),
    row(Cause::CipherBound, Of::Threads, &[metric::THREAD_USER_NS], Per::Second, 0.6e9),
    row(Cause::CopyOrChecksumBound, Of::Threads, &[metric::THREAD_SYSTEM_NS], Per::Second, 0.6e9),
    row(Cause::HandoffOverhead, Of::Threads, &[metric::VOLUNTARY_SWITCHES], Per::Packet, 0.5),
    row(Cause::Shaper, Of::Qdiscs, &[metric::QDISC_OVERLIMITS], Per::Packet, 0.01),
    row(Cause::Bufferbloat, Of::Qdiscs, &[metric::QDISC_BACKLOG_BYTES], Per::Value, 60_000.0),
    row(Cause::ConntrackFull, Of::Host, &[metric::CONNTRACK_INSERT_FAILED, metric::CONNTRACK_DROP], Per::Packet, FEW),
];

/// The cause whose counter moves most with the throughput, in either direction, at the best lag.
pub fn highest_correlation(evidence: &Evidence) -> Cause {
    let Some(steps) = Steps::of(evidence) else {
        return nothing(evidence);
    };
    let rate = |of: &[f64]| -> Vec<f64> {
        let pairs = of.iter().zip(&steps.seconds);
        pairs.map(|(grown, seconds)| grown / seconds).collect()
    };
    let throughput = rate(&steps.bytes);
    most(evidence, |signature| {
        let values = steps.values(signature)?;
        let lag = MOST_LAG.min(values.len().saturating_sub(LEAST_SAMPLES));
        (values.len() >= LEAST_SAMPLES)
            .then(|| strongest(&values, &throughput, lag))?
            .map(|(_, r)| r.abs())
    })
}

/// The cause whose counter is the largest multiple of what is normal.
pub fn largest_jump(evidence: &Evidence) -> Cause {
    let Some(steps) = Steps::of(evidence) else {
        return nothing(evidence);
    };
    most(evidence, |signature| {
        let ratio = steps.overall(signature)? / signature.normal;
        (ratio > 1.0).then_some(ratio)
    })
}

/// The cause of the signature that `weigh` gives most; the first of those with the same.
fn most(evidence: &Evidence, weigh: impl Fn(&Signature) -> Option<f64>) -> Cause {
    if carries_enough(evidence) {
        return Cause::Healthy;
    }
    let weighed = SIGNATURES
        .iter()
        .filter_map(|signature| Some((signature.cause, weigh(signature)?)));
    let best = weighed.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or_else(|| nothing(evidence), |(cause, _)| cause)
}

fn carries_enough(evidence: &Evidence) -> bool {
    let shortfall = evidence.shortfall();
    shortfall.is_some_and(|shortfall| shortfall < TOLERATED_SHORTFALL)
}

fn nothing(evidence: &Evidence) -> Cause {
    match evidence.expected.is_none() || carries_enough(evidence) {
        true => Cause::Healthy,
        false => Cause::Unknown,
    }
}

/// What happened from each sample to the next.
struct Steps<'a> {
    evidence: &'a Evidence,
    seconds: Vec<f64>,
    /// Through the inner interface, in the direction in which more goes.
    bytes: Vec<f64>,
    /// Both directions.
    packets: Vec<f64>,
}

impl<'a> Steps<'a> {
    /// `None` with fewer than two samples, or without an inner interface.
    fn of(evidence: &'a Evidence) -> Option<Self> {
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
        let bytes = match evidence.sends() {
            true => grown(metric::TX_BYTES)?,
            false => grown(metric::RX_BYTES)?,
        };
        let mut packets = grown(metric::TX_PACKETS)?;
        add(&mut packets, &grown(metric::RX_PACKETS)?);
        Some(Self {
            bytes,
            packets,
            ..empty
        })
    }

    /// Growth of a counter in each step; `None` if there is no such counter.
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

    /// A gauge at the end of each step.
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

    /// A signature's counter in each step: growth summed over names, and over subjects too where they are counted per
    /// packet or byte; otherwise of the subject at which it is largest.
    fn raw(&self, signature: &Signature) -> Option<Vec<f64>> {
        let is_sum = matches!(signature.per, Per::Packet | Per::Byte);
        let subjects = self.subjects(signature.of).into_iter();
        let each = subjects.filter_map(|subject| {
            let of = |name: &&'static str| match signature.per {
                Per::Value => self.gauge(&subject, name),
                _ => self.grown(&subject, name),
            };
            signature.names.iter().filter_map(of).reduce(added)
        });
        match is_sum {
            true => each.reduce(added),
            false => each.max_by(|a, b| a.iter().sum::<f64>().total_cmp(&b.iter().sum())),
        }
    }

    /// What each step's counter is divided by.
    fn divisor(&self, per: Per) -> Option<&[f64]> {
        match per {
            Per::Packet => Some(&self.packets),
            Per::Byte => Some(&self.bytes),
            Per::Second => Some(&self.seconds),
            Per::Value => None,
        }
    }

    /// The signature in each step.
    fn values(&self, signature: &Signature) -> Option<Vec<f64>> {
        let raw = self.raw(signature)?;
        let Some(divisor) = self.divisor(signature.per) else {
            return Some(raw);
        };
        let pairs = raw.iter().zip(divisor);
        Some(pairs.map(|(grown, by)| grown / by.max(1e-3)).collect())
    }

    /// The signature over all the time.
    fn overall(&self, signature: &Signature) -> Option<f64> {
        let raw = self.raw(signature)?;
        let sum: f64 = raw.iter().sum();
        Some(match self.divisor(signature.per) {
            Some(divisor) => sum / divisor.iter().sum::<f64>().max(1.0),
            None => sum / raw.len().max(1) as f64,
        })
    }

    fn subjects(&self, of: Of) -> Vec<Subject> {
        let map = &self.evidence.map;
        let program = map.program.as_ref();
        let names = |link: &Option<String>| link.clone().into_iter();
        let tcp = |sockets: &[SocketFacts]| -> Vec<Subject> {
            let tcp = sockets.iter().filter(|s| s.transport == Transport::Tcp);
            tcp.map(|s| Subject::Tcp(s.inode)).collect()
        };
        match of {
            Of::Host => vec![Subject::Host],
            Of::Cpus => map.host.cpus.iter().copied().map(Subject::Cpu).collect(),
            Of::Inner => names(&map.inner).map(Subject::Link).collect(),
            Of::Qdiscs => names(&map.inner)
                .chain(names(&map.egress))
                .map(Subject::Qdisc)
                .collect(),
            Of::Program => program
                .map(|p| Subject::Process(p.pid))
                .into_iter()
                .collect(),
            Of::Threads => program
                .iter()
                .flat_map(|p| {
                    let pid = p.pid;
                    p.threads
                        .iter()
                        .map(move |(tid, _)| Subject::Thread { pid, tid: *tid })
                })
                .collect(),
            Of::Group => program
                .and_then(|p| p.group.clone())
                .map(Subject::Group)
                .into_iter()
                .collect(),
            Of::Flows => tcp(&map.flows),
            Of::Outer => tcp(&map.sockets),
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
    use std::time::Duration;

    use seikan_observe::path::{HostFacts, PathMap};
    use seikan_observe::{Column, Kind, Series};

    use super::*;

    const STEPS: u32 = 40;

    /// A tunnel through which 100 packets of 1,000 bytes go in most steps, and 50 in every fourth.
    fn dips(step: u32) -> u64 {
        if step.is_multiple_of(4) { 50 } else { 100 }
    }

    /// A counter, and by how much it grows in each step.
    type Counter<'a> = (Subject, &'static str, &'a dyn Fn(u32) -> u64);

    fn evidence(counters: &[Counter<'_>]) -> Evidence {
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

    #[test]
    fn the_counter_that_moves_with_the_dips_is_named_by_correlation() {
        let lost = |step: u32| 100 - dips(step);
        let many = |step: u32| (step * 7919) % 11 * 100;
        let evidence = evidence(&[
            (Subject::Host, "Udp.RcvbufErrors", &lost),
            // Far more, but of its own accord.
            (Subject::Cpu(0), metric::SOFTNET_DROPPED, &|s| {
                u64::from(many(s))
            }),
        ]);
        assert_eq!(highest_correlation(&evidence), Cause::UdpReceiveBuffer);
        assert_eq!(largest_jump(&evidence), Cause::BacklogFull);
    }

    #[test]
    fn a_tunnel_that_carries_what_it_should_is_healthy() {
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

    #[test]
    fn no_cause_has_two_signatures() {
        for (i, signature) in SIGNATURES.iter().enumerate() {
            let twice = SIGNATURES[..i].iter().any(|s| s.cause == signature.cause);
            assert!(!twice, "{}", signature.cause);
            assert!(signature.normal > 0.0);
        }
    }
}
