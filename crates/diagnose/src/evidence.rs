//! Measurements of a host, and the quantities that rules derive from them.
//!
//! A quantity is `None` if it was not measured, which is not zero.

use std::ops::Add;

use seikan_observe::path::{PathMap, SocketFacts, Transport};
use seikan_observe::profile::Profile;
use seikan_observe::{Column, Series, Subject, metric};
use serde::{Deserialize, Serialize};

/// Throughput below which a tunnel is idle, bits per second: keepalives, or somebody typing in a shell.
pub const IDLE: f64 = 100e3;
/// Packets per second of both directions below which a tunnel is idle: a call sends more, but small
/// packets.
const IDLE_PACKETS: f64 = 100.0;
/// Smallest shortfall that counts: a tenth.
const TOLERATED_SHORTFALL: f64 = 0.1;
/// Share of the time with data in flight from which a connection is waiting.
const WAITING: f64 = 0.5;
/// Packets lost at the inner interface from which traffic was offered.
const IDLE_LOST: f64 = 10.0;

/// Share of segments that are retransmitted, or received early or twice, from which packets are lost.
const LOSSY: f64 = 0.001;

/// All data of a diagnosis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// The path on this host.
    pub map: PathMap,
    /// Samples of some seconds.
    pub series: Series,
    /// Expected throughput, bits per second: of the user, or the rate of the offered load.
    pub expected: Option<f64>,
    /// Processor time by function, if it was sampled.
    pub profile: Option<Profile>,
    /// Results of probes.
    pub probes: Probes,
}

/// Results of probes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probes {
    /// Sizes that pass, from probes that may not be fragmented.
    pub mtu: Option<MtuProbe>,
    /// Median round-trip time through the tunnel without load, microseconds.
    pub idle_rtt_us: Option<f64>,
    /// The same round trip under load.
    pub loaded_rtt_us: Option<f64>,
    /// Packets of the probes.
    #[serde(default)]
    pub own: OwnTraffic,
}

/// IP packets that the doctor itself sent through the tunnel, and the answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnTraffic {
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes sent.
    pub bytes_out: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Bytes received.
    pub bytes_in: u64,
}

impl OwnTraffic {
    /// Returns the part of an interface's counter; 0 for counters of neither packets nor bytes.
    fn of(self, name: &str) -> f64 {
        let added = match name {
            metric::TX_PACKETS => self.packets_out,
            metric::TX_BYTES => self.bytes_out,
            metric::RX_PACKETS => self.packets_in,
            metric::RX_BYTES => self.bytes_in,
            _ => 0,
        };
        added as f64
    }
}

impl std::ops::AddAssign for OwnTraffic {
    fn add_assign(&mut self, other: Self) {
        self.packets_out += other.packets_out;
        self.bytes_out += other.bytes_out;
        self.packets_in += other.packets_in;
        self.bytes_in += other.bytes_in;
    }
}

impl MtuProbe {
    /// Whether long packets are lost without an error message, while short ones pass.
    pub fn is_black_hole(&self) -> bool {
        self.passed.is_some() && self.lost.is_some() && !self.reported
    }
}

/// Sizes of inner IP packets that pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MtuProbe {
    /// Largest answered size, bytes.
    pub passed: Option<u32>,
    /// Smallest lost size that fits the interface, bytes; `None`: every size passed.
    pub lost: Option<u32>,
    /// Whether an error message reported the size.
    pub reported: bool,
}

/// Activity of a thread of the program.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadUse {
    /// Its id.
    pub tid: u32,
    /// Its name.
    pub name: String,
    /// Share of the time on a processor, 0 to 1.
    pub running: f64,
    /// Share of the time ready to run but waiting for a processor.
    pub waiting: f64,
    /// Sleeps per second.
    pub sleeps: f64,
    /// Preemptions per second.
    pub preempted: f64,
}

impl Evidence {
    /// Returns the measured time, seconds; never 0, so that rates can be divided by it.
    pub fn seconds(&self) -> f64 {
        self.series.length().as_secs_f64().max(1e-3)
    }

    /// Returns the column of a counter or gauge.
    pub fn column(&self, subject: &Subject, name: &str) -> Option<&Column> {
        self.series.column(subject, name)
    }

    /// Returns the growth of a counter.
    pub fn growth(&self, subject: &Subject, name: &str) -> Option<f64> {
        Some(self.column(subject, name)?.growth() as f64)
    }

    /// Returns the growth of a counter of the namespace: `Udp.RcvbufErrors`, or a name of [`metric`].
    pub fn host(&self, name: &str) -> Option<f64> {
        self.growth(&Subject::Host, name)
    }

    /// Returns the sum of a counter of both IP versions: `both("Udp", "RcvbufErrors")` adds
    /// `Udp6.RcvbufErrors`.
    pub fn both(&self, protocol: &str, field: &str) -> Option<f64> {
        let four = self.host(&format!("{protocol}.{field}"));
        let six = self.host(&format!("{protocol}6.{field}"));
        four.into_iter().chain(six).reduce(f64::add)
    }

    /// Returns the packets that the kernel dropped for a reason of `skb:kfree_skb`; `None` if drops
    /// were not counted.
    pub fn dropped(&self, reason: &str) -> Option<f64> {
        let counted = self.series.columns.keys();
        let mut counted = counted.filter(|key| key.name.starts_with(metric::DROP_PREFIX));
        counted.next()?;
        let name = format!("{}{reason}", metric::DROP_PREFIX);
        Some(self.host(&name).unwrap_or(0.0))
    }

    /// Returns the calls of a kernel function on the whole machine; `None` if they were not counted.
    pub fn calls(&self, function: &str) -> Option<f64> {
        self.host(&format!("{}{function}", metric::CALL_PREFIX))
    }

    /// Returns every function whose calls were counted, with their number.
    pub fn all_calls(&self) -> Vec<(&str, f64)> {
        let columns = self.series.columns.iter();
        let calls = columns.filter_map(|(key, column)| {
            let function = key.name.strip_prefix(metric::CALL_PREFIX)?;
            (key.subject == Subject::Host).then(|| (function, column.growth() as f64))
        });
        calls.collect()
    }

    /// Removes data of levels above `level`, to diagnose with less data.
    pub fn limit(&mut self, level: u32) {
        self.series.columns.retain(|key, _| {
            let deeper = match key.name.as_ref() {
                name if name.starts_with(metric::DROP_PREFIX) => 1,
                name if name.starts_with(metric::CALL_PREFIX) => 3,
                _ => 0,
            };
            deeper <= level
        });
        if level < 2 {
            self.profile = None;
        }
    }

    /// Returns the growth of a counter of an interface.
    pub fn link(&self, link: &str, name: &str) -> Option<f64> {
        self.growth(&Subject::Link(link.to_owned()), name)
    }

    /// Returns the growth of a counter of the inner interface without the doctor's own packets. A
    /// bridge counts only packets for this host; its ports count forwarded packets.
    pub fn inner(&self, name: &str) -> Option<f64> {
        let inner = self.map.inner.as_deref()?;
        let ports = self.map.links.iter();
        let ports = ports.filter(|link| link.master.as_deref() == Some(inner));
        let counts = ports.filter_map(|port| self.link(&port.name, name));
        let all = counts.reduce(f64::add).or_else(|| self.link(inner, name))?;
        Some((all - self.probes.own.of(name)).max(0.0))
    }

    /// Returns the growth of a counter of the outer interface, without the packets that carried the
    /// doctor's own packets.
    pub fn egress(&self, name: &str) -> Option<f64> {
        let all = self.link(self.map.egress.as_deref()?, name)?;
        Some((all - self.probes.own.of(name)).max(0.0))
    }

    /// Returns the created fragments of both IP versions, without two for each packet of the doctor.
    pub fn fragments_created(&self) -> Option<f64> {
        let own = 2.0 * self.probes.own.packets_out as f64;
        Some((self.both("Ip", "FragCreates")? - own).max(0.0))
    }

    /// Returns the received fragments of both IP versions, without two for each packet of the doctor.
    pub fn fragments_received(&self) -> Option<f64> {
        let own = 2.0 * self.probes.own.packets_in as f64;
        Some((self.both("Ip", "ReasmReqds")? - own).max(0.0))
    }

    /// Returns the growth of a counter of an interface's queueing disciplines.
    pub fn qdisc(&self, link: &str, name: &str) -> Option<f64> {
        self.growth(&Subject::Qdisc(link.to_owned()), name)
    }

    /// Whether this host mainly sends into the tunnel, in bytes; otherwise it mainly receives.
    pub fn sends(&self) -> bool {
        let bytes = |name| self.inner(name).unwrap_or(0.0);
        bytes(metric::TX_BYTES) >= bytes(metric::RX_BYTES)
    }

    /// Returns the throughput of the inner interface in the direction with more traffic, bits per
    /// second; truncated packets do not count.
    pub fn throughput(&self) -> f64 {
        let bytes = |name| self.inner(name).unwrap_or(0.0);
        let received = self.inner(metric::RX_PACKETS).unwrap_or(0.0);
        let short = self.host("IpExt.InTruncatedPkts").unwrap_or(0.0);
        let whole = 1.0 - (short / received.max(1.0)).min(1.0);
        bytes(metric::TX_BYTES).max(bytes(metric::RX_BYTES) * whole) * 8.0 / self.seconds()
    }

    /// Whether the traffic is too little to show a cause: no throughput is expected, there are
    /// hardly any packets but the doctor's own, and no connection waits. Not if connections stall,
    /// packets are lost at the inner interface, or probes found a black hole.
    pub fn is_idle(&self) -> bool {
        if self.expected.is_some() || self.inner(metric::TX_BYTES).is_none() {
            return false;
        }
        let black_hole = self.probes.mtu.is_some_and(|probe| probe.is_black_hole());
        let waits = |flow: &SocketFacts| {
            let busy = self.tcp(flow, metric::TCP_BUSY_US).unwrap_or(0.0) / 1e6;
            busy / self.seconds() >= WAITING
        };
        let lost = self.inner(metric::TX_DROPPED).unwrap_or(0.0);
        let lost = lost + self.inner(metric::RX_ERRORS).unwrap_or(0.0);
        self.throughput() < IDLE
            && self.packets() < IDLE_PACKETS
            && !black_hole
            && !self.map.flows.iter().any(waits)
            && lost < IDLE_LOST
    }

    /// Returns the missing share of the expected throughput, 0 to 1; `None` without an expected one.
    pub fn shortfall(&self) -> Option<f64> {
        let expected = self.expected?;
        Some((1.0 - self.throughput() / expected).clamp(0.0, 1.0))
    }

    /// Returns the packets per second of the inner interface, both directions.
    pub fn packets(&self) -> f64 {
        let packets = |name| self.inner(name).unwrap_or(0.0);
        (packets(metric::TX_PACKETS) + packets(metric::RX_PACKETS)) / self.seconds()
    }

    /// Returns the mean bytes per packet of the inner interface in the direction with more traffic.
    pub fn bytes_per_packet(&self) -> Option<f64> {
        let (bytes, packets) = if self.sends() {
            (metric::TX_BYTES, metric::TX_PACKETS)
        } else {
            (metric::RX_BYTES, metric::RX_PACKETS)
        };
        let packets = self.inner(packets).filter(|packets| *packets > 0.0)?;
        Some(self.inner(bytes)? / packets)
    }

    /// Returns the threads of the program, the busiest first.
    pub fn threads(&self) -> Vec<ThreadUse> {
        let Some(program) = &self.map.program else {
            return Vec::new();
        };
        let pid = program.pid;
        let mut threads: Vec<ThreadUse> = program
            .threads
            .iter()
            .filter_map(|(tid, name)| {
                let subject = Subject::Thread { pid, tid: *tid };
                let rate = |name| {
                    self.growth(&subject, name)
                        .map(|value| value / self.seconds())
                };
                Some(ThreadUse {
                    tid: *tid,
                    name: name.clone(),
                    running: rate(metric::RUN_NS)? / 1e9,
                    waiting: rate(metric::RUN_DELAY_NS).unwrap_or(0.0) / 1e9,
                    sleeps: rate(metric::VOLUNTARY_SWITCHES).unwrap_or(0.0),
                    preempted: rate(metric::INVOLUNTARY_SWITCHES).unwrap_or(0.0),
                })
            })
            .collect();
        threads.sort_by(|a, b| b.running.total_cmp(&a.running));
        threads
    }

    /// Returns the share of time that a processor spent in these states, 0 to 1.
    pub fn cpu_share(&self, cpu: u32, states: &[&str]) -> Option<f64> {
        let of = |name: &str| self.growth(&Subject::Cpu(cpu), name);
        let all = [
            metric::USER_NS,
            metric::SYSTEM_NS,
            metric::IDLE_NS,
            metric::SOFTIRQ_NS,
            metric::STEAL_NS,
        ];
        let total: f64 = all.iter().filter_map(|name| of(name)).sum();
        let part: f64 = states.iter().filter_map(|name| of(name)).sum();
        (total > 0.0).then(|| part / total)
    }

    /// Returns the idle share of each processor, with its number.
    pub fn idle(&self) -> Vec<(u32, f64)> {
        let cpus = self.map.host.cpus.iter();
        cpus.filter_map(|cpu| Some((*cpu, self.cpu_share(*cpu, &[metric::IDLE_NS])?)))
            .collect()
    }

    /// Returns the growth of a counter for each processor.
    pub fn per_cpu(&self, name: &str) -> Vec<(u32, f64)> {
        let cpus = self.map.host.cpus.iter();
        cpus.filter_map(|cpu| Some((*cpu, self.growth(&Subject::Cpu(*cpu), name)?)))
            .collect()
    }

    /// Returns the sum of a counter over all processors.
    pub fn all_cpus(&self, name: &str) -> Option<f64> {
        let values = self.per_cpu(name).into_iter();
        values.map(|(_, value)| value).reduce(f64::add)
    }

    /// Returns the packets of this path that were dropped because a processor's queue of received
    /// packets was full. The queue counts for the whole machine; the interface of a packet counts
    /// it among other drops (`enqueue_to_backlog()`, net/core/dev.c). So the drops are no more than
    /// either. `None` if one of them is not readable.
    pub fn backlog_drops(&self) -> Option<f64> {
        let machine = self.all_cpus(metric::SOFTNET_DROPPED)?;
        Some(machine.min(self.links(metric::RX_DROPPED)?))
    }

    /// Returns the sum of a counter over the interfaces of the path.
    pub fn links(&self, name: &str) -> Option<f64> {
        let links = self.map.links.iter();
        let counts = links.filter_map(|link| self.link(&link.name, name));
        counts.reduce(f64::add)
    }

    /// Returns the share of the packets received by the machine, in any namespace, that the
    /// interfaces of the path received, 0 to 1. A processor that is busy with other packets proves
    /// nothing about this tunnel. `None` if they were not counted.
    pub fn share_of_received(&self) -> Option<f64> {
        let all = self
            .all_cpus(metric::SOFTNET_PROCESSED)
            .filter(|n| *n > 0.0)?;
        Some((self.links(metric::RX_PACKETS)? / all).min(1.0))
    }

    /// Whether the tunnel itself has a problem: less than the expected throughput, or connections
    /// that lose packets. Counters of the whole machine name a cause only in this case.
    pub fn suffers(&self) -> bool {
        let short = self.shortfall().is_some_and(|it| !is_tolerated(it));
        let again = self.retransmitted().is_some_and(|share| share >= LOSSY);
        let early = self
            .arrivals()
            .is_some_and(|it| (it.early + it.twice) / it.segments >= LOSSY);
        short || again || early || self.stalled().is_some()
    }

    /// Returns the number of sockets from which the program reads whole packets of any length
    /// without a report of merging: raw and packet sockets without `PACKET_VNET_HDR`.
    pub fn raw_sockets(&self) -> usize {
        let raw = self.map.sockets.iter();
        let raw = raw.filter(|socket| socket.transport == Transport::Raw);
        raw.filter(|socket| socket.vnet_hdr != Some(true)).count()
    }

    /// Sums a counter over the program's sockets of a transport.
    pub fn program_sockets(&self, transport: Transport, name: &str) -> Option<f64> {
        let sockets = self.map.sockets.iter();
        let of = sockets.filter(|socket| socket.transport == transport);
        let values = of.filter_map(|socket| self.growth(&subject(socket)?, name));
        values.reduce(f64::add)
    }

    /// Sums a counter over the TCP connections of this host through the inner interface.
    pub fn flows(&self, name: &str) -> Option<f64> {
        let flows = self.map.flows.iter();
        let values = flows.filter_map(|flow| self.growth(&subject(flow)?, name));
        values.reduce(f64::add)
    }

    /// Returns the connection through the inner interface that has sent most, if any has.
    pub fn main_flow(&self) -> Option<&SocketFacts> {
        let sent = |flow: &&SocketFacts| {
            let sent = self.growth(&Subject::Tcp(flow.inode), metric::TCP_BYTES_ACKED);
            sent.unwrap_or(0.0) as u64
        };
        let flows = self.map.flows.iter();
        flows.max_by_key(sent).filter(|flow| sent(flow) > 0)
    }

    /// Returns the mean of a gauge of a connection.
    pub fn tcp_mean(&self, flow: &SocketFacts, name: &str) -> Option<f64> {
        Some(self.column(&Subject::Tcp(flow.inode), name)?.mean())
    }

    /// Returns the growth of a counter of a connection.
    pub fn tcp(&self, flow: &SocketFacts, name: &str) -> Option<f64> {
        self.growth(&Subject::Tcp(flow.inode), name)
    }

    /// Returns the share of segments that connections through the inner interface retransmitted, 0 to 1.
    pub fn retransmitted(&self) -> Option<f64> {
        let sent = self
            .flows(metric::TCP_SEGS_OUT)
            .filter(|sent| *sent > 0.0)?;
        Some(self.flows(metric::TCP_RETRANS)? / sent)
    }
}

/// Whether a shortfall is too small to count.
pub(crate) fn is_tolerated(shortfall: f64) -> bool {
    shortfall < TOLERATED_SHORTFALL
}

fn subject(socket: &SocketFacts) -> Option<Subject> {
    match socket.transport {
        Transport::Udp => Some(Subject::Udp(socket.inode)),
        Transport::Tcp => Some(Subject::Tcp(socket.inode)),
        Transport::Raw => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::*;

    #[test]
    fn traffic_of_a_bridge_is_that_of_its_ports() {
        let mut evidence = tunnel();
        evidence.map.links[0].kind = "bridge".into();
        count(&mut evidence, inner(), metric::RX_BYTES, 1);
        count(&mut evidence, egress(), metric::RX_BYTES, 100);
        assert_eq!(evidence.inner(metric::RX_BYTES), Some(1.0));
        evidence.map.links[1].master = Some("tun0".into());
        assert_eq!(evidence.inner(metric::RX_BYTES), Some(100.0));
        assert_eq!(evidence.inner(metric::TX_BYTES), None);
    }

    /// A tunnel that carries only packets of the doctor, 1,400 bytes each, all answered.
    fn only_probed(packets: u64) -> Evidence {
        let mut evidence = tunnel();
        let bytes = 1_400 * packets;
        for (name, value) in [
            (metric::TX_PACKETS, packets),
            (metric::TX_BYTES, bytes),
            (metric::RX_PACKETS, packets),
            (metric::RX_BYTES, bytes),
        ] {
            count(&mut evidence, inner(), name, value);
            count(&mut evidence, egress(), name, 2 * value);
        }
        count(&mut evidence, Subject::Host, "Ip.FragCreates", 2 * packets);
        count(&mut evidence, Subject::Host, "Ip.ReasmReqds", 2 * packets);
        evidence.probes.own = OwnTraffic {
            packets_out: packets,
            bytes_out: bytes,
            packets_in: packets,
            bytes_in: bytes,
        };
        evidence
    }

    #[test]
    fn the_doctors_own_packets_are_not_counted() {
        let mut evidence = only_probed(300);
        assert_eq!(evidence.throughput(), 0.0);
        assert_eq!(evidence.fragments_created(), Some(0.0));
        assert_eq!(evidence.fragments_received(), Some(0.0));
        assert_eq!(evidence.inner(metric::RX_PACKETS), Some(0.0));
        assert_eq!(crate::diagnose(&evidence).cause, crate::Cause::Idle);
        count(
            &mut evidence,
            inner(),
            metric::TX_BYTES,
            12_500_000 + 300 * 1_400,
        );
        assert_eq!(evidence.throughput(), 10e6);
        assert_eq!(crate::diagnose(&evidence).cause, crate::Cause::Healthy);
    }

    #[test]
    fn a_tunnel_through_which_something_wants_to_go_is_not_idle() {
        assert!(only_probed(300).is_idle());
        let mut expected = only_probed(300);
        expected.expected = Some(1e6);
        assert!(!expected.is_idle());
        let mut waiting = only_probed(300);
        count(
            &mut waiting,
            Subject::Tcp(2),
            metric::TCP_BUSY_US,
            9_000_000,
        );
        assert!(!waiting.is_idle());
        let mut lossy = only_probed(300);
        count(&mut lossy, inner(), metric::TX_DROPPED, 100);
        assert!(!lossy.is_idle());
        let mut small = only_probed(0);
        count(&mut small, inner(), metric::TX_PACKETS, 2_000);
        assert!(!small.is_idle());
        let mut black_hole = only_probed(300);
        black_hole.probes.mtu = Some(MtuProbe {
            passed: Some(1_200),
            lost: Some(1_201),
            reported: false,
        });
        assert!(!black_hole.is_idle());
    }

    #[test]
    fn an_idle_tunnel_has_a_remedy_and_no_cause() {
        let mut evidence = only_probed(20);
        // The machine drops, waits and loses time for other traffic.
        for (name, value) in [
            (metric::SOFTNET_PROCESSED, 1_000_000),
            (metric::SOFTNET_DROPPED, 100_000),
            (metric::SOFTNET_TIME_SQUEEZE, 100_000),
        ] {
            count(&mut evidence, Subject::Cpu(0), name, value);
        }
        let verdict = crate::diagnose(&evidence);
        assert_eq!(verdict.cause, crate::Cause::Idle);
        assert!(
            verdict.alternatives.is_empty(),
            "{:?}",
            verdict.alternatives
        );
        assert!(verdict.remedies[0].commands[0].contains("--load"));
    }

    #[test]
    fn drops_of_the_queue_of_received_packets_are_this_paths_as_far_as_its_interfaces_count_them() {
        let mut evidence = tunnel();
        assert_eq!(evidence.backlog_drops(), None);
        count(&mut evidence, Subject::Cpu(0), metric::SOFTNET_DROPPED, 500);
        assert_eq!(evidence.backlog_drops(), None);
        count(&mut evidence, egress(), metric::RX_DROPPED, 20);
        assert_eq!(evidence.backlog_drops(), Some(20.0));
        count(&mut evidence, inner(), metric::RX_DROPPED, 2_000);
        assert_eq!(evidence.backlog_drops(), Some(500.0));
    }

    #[test]
    fn limited_evidence_is_that_of_a_lower_level() {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "drop.NOT_SPECIFIED", 7);
        count(&mut evidence, Subject::Host, "call.udp_sendmsg", 8);
        count(&mut evidence, Subject::Host, "Udp.RcvbufErrors", 9);
        evidence.profile = Some(Profile::default());
        let seen = |level| {
            let mut evidence = evidence.clone();
            evidence.limit(level);
            let drops = evidence.dropped("NOT_SPECIFIED");
            let calls = evidence.calls("udp_sendmsg");
            let errors = evidence.host("Udp.RcvbufErrors");
            (errors, drops, evidence.profile.is_some(), calls)
        };
        assert_eq!(seen(0), (Some(9.0), None, false, None));
        assert_eq!(seen(1), (Some(9.0), Some(7.0), false, None));
        assert_eq!(seen(2), (Some(9.0), Some(7.0), true, None));
        assert_eq!(seen(3), (Some(9.0), Some(7.0), true, Some(8.0)));
    }
}
