//! What was measured on a host, and the questions that rules ask of it.
//!
//! Questions answer `None` where it was not measured: that is not zero.

use seikan_observe::path::{PathMap, SocketFacts, Transport};
use seikan_observe::profile::{Profile, Stage};
use seikan_observe::{Column, Series, Subject, metric};
use serde::{Deserialize, Serialize};

/// Everything a diagnosis knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// The path on this host.
    pub map: PathMap,
    /// What was sampled over some seconds.
    pub series: Series,
    /// Bits per second that should go through, where somebody said so or load of that rate was offered.
    pub expected: Option<f64>,
    /// Where the processors' time went, if that was sampled.
    pub profile: Option<Profile>,
    /// What was found out by sending something.
    pub probes: Probes,
}

/// What was found out by sending something.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probes {
    /// Sizes that pass, by packets that must not be cut up.
    pub mtu: Option<MtuProbe>,
    /// Round-trip time through the tunnel without load and under it, microseconds, medians.
    pub idle_rtt_us: Option<f64>,
    /// See [`Probes::idle_rtt_us`].
    pub loaded_rtt_us: Option<f64>,
}

/// Which sizes of inner IP packets pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MtuProbe {
    /// The largest that was answered, bytes.
    pub passed: Option<u32>,
    /// The smallest that was not, although the interface takes it; `None`: all were.
    pub lost: Option<u32>,
    /// Whether somebody said that it was too big.
    pub reported: bool,
}

/// What a thread of the program did.
#[derive(Clone, Debug, PartialEq)]
pub struct ThreadUse {
    /// Its id.
    pub tid: u32,
    /// Its name.
    pub name: String,
    /// Share of the time on a processor, 0 to 1.
    pub running: f64,
    /// Share of the time ready but waiting for a processor.
    pub waiting: f64,
    /// Times per second that it went to sleep.
    pub sleeps: f64,
    /// Times per second that it was made to give way.
    pub preempted: f64,
}

impl Evidence {
    /// The measured time, seconds; never 0, so that rates can be divided by it.
    pub fn seconds(&self) -> f64 {
        self.series.length().as_secs_f64().max(1e-3)
    }

    /// The column of a value.
    pub fn column(&self, subject: &Subject, name: &str) -> Option<&Column> {
        self.series.column(subject, name)
    }

    /// By how much a counter grew.
    pub fn growth(&self, subject: &Subject, name: &str) -> Option<f64> {
        Some(self.column(subject, name)?.growth() as f64)
    }

    /// By how much a counter of the namespace grew: `Udp.RcvbufErrors`, or a name of [`metric`].
    pub fn host(&self, name: &str) -> Option<f64> {
        self.growth(&Subject::Host, name)
    }

    /// The sum of the same counter of both IP versions: `both("Udp", "RcvbufErrors")` adds `Udp6.RcvbufErrors`.
    pub fn both(&self, protocol: &str, field: &str) -> Option<f64> {
        let four = self.host(&format!("{protocol}.{field}"));
        let six = self.host(&format!("{protocol}6.{field}"));
        match (four, six) {
            (None, None) => None,
            (four, six) => Some(four.unwrap_or(0.0) + six.unwrap_or(0.0)),
        }
    }

    /// Packets that the kernel dropped for a reason of `skb:kfree_skb`; `None` if that was not counted at all.
    pub fn dropped(&self, reason: &str) -> Option<f64> {
        let counted = self.series.columns.keys();
        let mut counted = counted.filter(|key| key.name.starts_with(metric::DROP_PREFIX));
        counted.next()?;
        let name = format!("{}{reason}", metric::DROP_PREFIX);
        Some(self.host(&name).unwrap_or(0.0))
    }

    /// Calls of a function of the kernel, by the whole machine; `None` if they were not counted.
    pub fn calls(&self, function: &str) -> Option<f64> {
        self.host(&format!("{}{function}", metric::CALL_PREFIX))
    }

    /// Every function whose calls were counted, with their number.
    pub fn all_calls(&self) -> Vec<(&str, f64)> {
        let columns = self.series.columns.iter();
        let calls = columns.filter_map(|(key, column)| {
            let function = key.name.strip_prefix(metric::CALL_PREFIX)?;
            (key.subject == Subject::Host).then(|| (function, column.growth() as f64))
        });
        calls.collect()
    }

    /// Forgets what only levels above `level` measure: a diagnosis of less is tried without measuring again.
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

    /// By how much a counter of an interface grew.
    pub fn link(&self, link: &str, name: &str) -> Option<f64> {
        self.growth(&Subject::Link(link.to_owned()), name)
    }

    /// By how much a counter of the inner interface grew. A bridge itself counts only what is for this host: what it
    /// passes on, its ports count, those packets come in by and those they leave by.
    pub fn inner(&self, name: &str) -> Option<f64> {
        let inner = self.map.inner.as_deref()?;
        let ports = self.map.links.iter();
        let ports = ports.filter(|link| link.master.as_deref() == Some(inner));
        let counts: Vec<f64> = ports
            .filter_map(|port| self.link(&port.name, name))
            .collect();
        match counts.is_empty() {
            true => self.link(inner, name),
            false => Some(counts.iter().sum()),
        }
    }

    /// By how much a counter of the interface to the outside grew.
    pub fn egress(&self, name: &str) -> Option<f64> {
        self.link(self.map.egress.as_deref()?, name)
    }

    /// By how much a counter of an interface's queueing disciplines grew.
    pub fn qdisc(&self, link: &str, name: &str) -> Option<f64> {
        self.growth(&Subject::Qdisc(link.to_owned()), name)
    }

    /// Whether this host mainly sends into the tunnel (bytes); otherwise it mainly receives.
    pub fn sends(&self) -> bool {
        let bytes = |name| self.inner(name).unwrap_or(0.0);
        bytes(metric::TX_BYTES) >= bytes(metric::RX_BYTES)
    }

    /// Bits per second through the inner interface, in the direction in which more goes; packets that arrive cut short
    /// carry nothing.
    pub fn throughput(&self) -> f64 {
        let bytes = |name| self.inner(name).unwrap_or(0.0);
        let received = self.inner(metric::RX_PACKETS).unwrap_or(0.0);
        let short = self.host("IpExt.InTruncatedPkts").unwrap_or(0.0);
        let whole = 1.0 - (short / received.max(1.0)).min(1.0);
        bytes(metric::TX_BYTES).max(bytes(metric::RX_BYTES) * whole) * 8.0 / self.seconds()
    }

    /// What should go through but does not, 0 to 1; `None` if nobody said what should.
    pub fn shortfall(&self) -> Option<f64> {
        let expected = self.expected?;
        Some((1.0 - self.throughput() / expected).clamp(0.0, 1.0))
    }

    /// Packets per second through the inner interface, both directions.
    pub fn packets(&self) -> f64 {
        let packets = |name| self.inner(name).unwrap_or(0.0);
        (packets(metric::TX_PACKETS) + packets(metric::RX_PACKETS)) / self.seconds()
    }

    /// Mean bytes per packet through the inner interface, in the direction in which more goes.
    pub fn bytes_per_packet(&self) -> Option<f64> {
        let (bytes, packets) = match self.sends() {
            true => (metric::TX_BYTES, metric::TX_PACKETS),
            false => (metric::RX_BYTES, metric::RX_PACKETS),
        };
        let packets = self.inner(packets).filter(|packets| *packets > 0.0)?;
        Some(self.inner(bytes)? / packets)
    }

    /// The threads of the program, the busiest first.
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

    /// The share of time that a processor spent in the states named, 0 to 1.
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

    /// The share of time that each processor was idle, by its number.
    pub fn idle(&self) -> Vec<(u32, f64)> {
        let cpus = self.map.host.cpus.iter();
        cpus.filter_map(|cpu| Some((*cpu, self.cpu_share(*cpu, &[metric::IDLE_NS])?)))
            .collect()
    }

    /// Growth of a counter of a processor, for each.
    pub fn per_cpu(&self, name: &str) -> Vec<(u32, f64)> {
        let cpus = self.map.host.cpus.iter();
        cpus.filter_map(|cpu| Some((*cpu, self.growth(&Subject::Cpu(*cpu), name)?)))
            .collect()
    }

    /// The sum of a counter over all processors.
    pub fn all_cpus(&self, name: &str) -> Option<f64> {
        let values = self.per_cpu(name);
        (!values.is_empty()).then(|| values.iter().map(|(_, value)| value).sum())
    }

    /// Sockets from which the program reads packets whole and one by one, whatever their length, without being told of
    /// merged ones: raw and packet sockets without `PACKET_VNET_HDR`.
    pub fn raw_sockets(&self) -> usize {
        let raw = self.map.sockets.iter();
        let raw = raw.filter(|socket| socket.transport == Transport::Raw);
        raw.filter(|socket| socket.vnet_hdr != Some(true)).count()
    }

    /// Sums a counter over the program's sockets of a transport.
    pub fn program_sockets(&self, transport: Transport, name: &str) -> Option<f64> {
        let sockets = self.map.sockets.iter();
        let of = sockets.filter(|socket| socket.transport == transport);
        let values: Vec<f64> = of
            .filter_map(|socket| self.growth(&subject(socket)?, name))
            .collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// Sums a counter over the TCP connections of this host through the inner interface.
    pub fn flows(&self, name: &str) -> Option<f64> {
        let flows = self.map.flows.iter();
        let values: Vec<f64> = flows
            .filter_map(|flow| self.growth(&subject(flow)?, name))
            .collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    /// The connection through the inner interface that has sent most, if any has.
    pub fn main_flow(&self) -> Option<&SocketFacts> {
        let sent = |flow: &&SocketFacts| {
            let sent = self.growth(&Subject::Tcp(flow.inode), metric::TCP_BYTES_ACKED);
            sent.unwrap_or(0.0) as u64
        };
        let flows = self.map.flows.iter();
        flows.max_by_key(sent).filter(|flow| sent(flow) > 0)
    }

    /// The mean of a gauge of a connection.
    pub fn tcp_mean(&self, flow: &SocketFacts, name: &str) -> Option<f64> {
        Some(self.column(&Subject::Tcp(flow.inode), name)?.mean())
    }

    /// The growth of a counter of a connection.
    pub fn tcp(&self, flow: &SocketFacts, name: &str) -> Option<f64> {
        self.growth(&Subject::Tcp(flow.inode), name)
    }

    /// Segments sent again, of those sent, over all connections through the inner interface: 0 to 1.
    pub fn retransmitted(&self) -> Option<f64> {
        let sent = self
            .flows(metric::TCP_SEGS_OUT)
            .filter(|sent| *sent > 0.0)?;
        Some(self.flows(metric::TCP_RETRANS)? / sent)
    }

    /// The share of the program's processor time in a stage, if that was sampled.
    pub fn stage(&self, stage: Stage) -> Option<f64> {
        let shares = &self.profile.as_ref()?.program;
        let of = shares.iter().filter(|share| share.stage == stage);
        Some(of.map(|share| share.share).sum())
    }
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
    fn what_a_bridge_passes_on_is_what_its_ports_count() {
        let mut evidence = tunnel();
        evidence.map.links[0].kind = "bridge".into();
        count(&mut evidence, inner(), metric::RX_BYTES, 1);
        count(&mut evidence, egress(), metric::RX_BYTES, 100);
        assert_eq!(evidence.inner(metric::RX_BYTES), Some(1.0));
        evidence.map.links[1].master = Some("tun0".into());
        assert_eq!(evidence.inner(metric::RX_BYTES), Some(100.0));
        assert_eq!(evidence.inner(metric::TX_BYTES), None);
    }

    #[test]
    fn limited_evidence_is_what_a_lower_level_measures() {
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
