//! Samples of a host, taken about 10 times a second: values by subject and name.
//!
//! A [`Sample`] is one reading of everything; a [`Series`] keeps readings as columns. Probes write
//! them; rules, reports and record files read them. Live and recorded samples have the same form.
//! Values are named as in the [`metric`] module or, for the host's protocol counters, as in the
//! kernel (`Udp.RcvbufErrors`).

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The owner of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// The network namespace: protocol counters of `/proc/net/{snmp,snmp6,netstat}` as
    /// `Protocol.Field`, and pressure, connection tracking, counts of drops by reason and of calls.
    Host,
    /// A processor, by its number.
    Cpu(u32),
    /// A network interface, by its name.
    Link(String),
    /// The queueing disciplines of an interface, summed at the root, by the interface's name.
    Qdisc(String),
    /// A process, by its id.
    Process(u32),
    /// A thread.
    Thread {
        /// Its process.
        pid: u32,
        /// Its own id.
        tid: u32,
    },
    /// A UDP socket, by its inode.
    Udp(u64),
    /// A TCP connection, by its inode.
    Tcp(u64),
    /// A control group, by its path.
    Group(String),
    /// Packets and measurements of the diagnosis itself.
    Probe,
}

/// Writes a subject as in recordings: `host`, `cpu:1`, `link:tun0`, `thread:4711/4712`.
impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Subject::Host => f.write_str("host"),
            Subject::Cpu(number) => write!(f, "cpu:{number}"),
            Subject::Link(name) => write!(f, "link:{name}"),
            Subject::Qdisc(name) => write!(f, "qdisc:{name}"),
            Subject::Process(pid) => write!(f, "process:{pid}"),
            Subject::Thread { pid, tid } => write!(f, "thread:{pid}/{tid}"),
            Subject::Udp(inode) => write!(f, "udp:{inode}"),
            Subject::Tcp(inode) => write!(f, "tcp:{inode}"),
            Subject::Group(path) => write!(f, "group:{path}"),
            Subject::Probe => f.write_str("probe"),
        }
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        fn number<T: FromStr>(text: &str) -> Option<T> {
            text.parse().ok()
        }
        let parse = || match text.split_once(':') {
            None if text == "host" => Some(Subject::Host),
            None if text == "probe" => Some(Subject::Probe),
            None => None,
            Some((kind, name)) => Some(match kind {
                "cpu" => Subject::Cpu(number(name)?),
                "link" => Subject::Link(name.to_owned()),
                "qdisc" => Subject::Qdisc(name.to_owned()),
                "process" => Subject::Process(number(name)?),
                "thread" => {
                    let (pid, tid) = name.split_once('/')?;
                    let (pid, tid) = (number(pid)?, number(tid)?);
                    Subject::Thread { pid, tid }
                }
                "udp" => Subject::Udp(number(name)?),
                "tcp" => Subject::Tcp(number(name)?),
                "group" => Subject::Group(name.to_owned()),
                _ => return None,
            }),
        };
        parse().ok_or_else(|| {
            format!("`{text}` is no subject, such as `host`, `link:tun0`, `thread:4711/4712`")
        })
    }
}

/// The name of one series of values.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The owner of the value.
    pub subject: Subject,
    /// The name: one of [`metric`], or the kernel's `Protocol.Field`.
    pub name: Cow<'static, str>,
}

impl Key {
    /// Creates the key of a value of `subject`.
    pub fn new(subject: Subject, name: impl Into<Cow<'static, str>>) -> Self {
        Key {
            subject,
            name: name.into(),
        }
    }
}

/// Whether a value is a counter or a gauge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The value only grows; its increase is the information.
    Counter,
    /// The current value counts.
    Gauge,
}

/// One reading.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time since the first reading.
    pub at: Duration,
    /// All values that could be read.
    pub values: Vec<(Key, Kind, u64)>,
}

/// The readings of one key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Column {
    /// Whether the value is a counter or a gauge.
    pub kind: Kind,
    /// Index of the sample, and the value; ascending. A subject may appear late and disappear
    /// early.
    pub points: Vec<(u32, u64)>,
}

impl Column {
    /// Increase of a counter from its first to its last point. A counter that restarts counts from
    /// zero.
    pub fn growth(&self) -> u64 {
        let steps = self.points.windows(2);
        steps.map(|pair| pair[1].1.saturating_sub(pair[0].1)).sum()
    }

    /// The mean of all points, 0 without any.
    pub fn mean(&self) -> f64 {
        let sum: f64 = self.points.iter().map(|(_, value)| *value as f64).sum();
        sum / self.points.len().max(1) as f64
    }

    /// The largest point, 0 without any.
    pub fn max(&self) -> u64 {
        let values = self.points.iter().map(|(_, value)| *value);
        values.max().unwrap_or(0)
    }

    /// The last point.
    pub fn last(&self) -> Option<u64> {
        self.points.last().map(|(_, value)| *value)
    }
}

/// Readings over time, one column for each key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Time of each sample since the first.
    pub times: Vec<Duration>,
    /// The columns.
    pub columns: BTreeMap<Key, Column>,
}

impl Series {
    /// Appends a reading.
    pub fn push(&mut self, sample: Sample) {
        let index = self.times.len() as u32;
        self.times.push(sample.at);
        for (key, kind, value) in sample.values {
            let column = self.columns.entry(key).or_insert(Column {
                kind,
                points: Vec::new(),
            });
            column.points.push((index, value));
        }
    }

    /// Time from the first sample to the last.
    pub fn length(&self) -> Duration {
        match (self.times.first(), self.times.last()) {
            (Some(first), Some(last)) => last.saturating_sub(*first),
            _ => Duration::ZERO,
        }
    }

    /// The column of a key.
    pub fn column(&self, subject: &Subject, name: &str) -> Option<&Column> {
        let key = Key::new(subject.clone(), name.to_owned());
        self.columns.get(&key)
    }
}

/// Names of values, by subject. The end of a name tells the unit of a time. Sizes are in bytes.
/// Counts are in packets as the kernel counts them (a merged packet counts once), unless said
/// otherwise.
pub mod metric {
    /// Cpu, counters: nanoseconds (of ticks) in user mode, system mode, idle, handling softirqs,
    /// stolen by the hypervisor.
    pub const USER_NS: &str = "user_ns";
    /// See [`USER_NS`].
    pub const SYSTEM_NS: &str = "system_ns";
    /// See [`USER_NS`].
    pub const IDLE_NS: &str = "idle_ns";
    /// See [`USER_NS`].
    pub const SOFTIRQ_NS: &str = "softirq_ns";
    /// See [`USER_NS`].
    pub const STEAL_NS: &str = "steal_ns";
    /// Cpu, counter: packets handled by the backlog and NAPI polls (`/proc/net/softnet_stat`,
    /// machine-wide).
    pub const SOFTNET_PROCESSED: &str = "softnet.processed";
    /// Cpu, counter: packets dropped because the backlog was full.
    pub const SOFTNET_DROPPED: &str = "softnet.dropped";
    /// Cpu, counter: times that a poll used up its budget while packets were left.
    pub const SOFTNET_TIME_SQUEEZE: &str = "softnet.time_squeeze";
    /// Cpu, counter: packets handed here by another processor (receive packet steering).
    pub const SOFTNET_RECEIVED_RPS: &str = "softnet.received_rps";
    /// Cpu, counter: runs of the receive softirq.
    pub const NET_RX: &str = "net_rx";

    /// Host, counter: microseconds in which some task waited for a processor
    /// (`/proc/pressure/cpu`).
    pub const PRESSURE_CPU_US: &str = "pressure.cpu_some_us";
    /// Host, gauges: tracked connections of this namespace, and how many the machine allows.
    pub const CONNTRACK_COUNT: &str = "conntrack.count";
    /// See [`CONNTRACK_COUNT`].
    pub const CONNTRACK_MAX: &str = "conntrack.max";
    /// Host, counters: connections that could not be tracked, and packets dropped for it.
    pub const CONNTRACK_INSERT_FAILED: &str = "conntrack.insert_failed";
    /// See [`CONNTRACK_INSERT_FAILED`].
    pub const CONNTRACK_DROP: &str = "conntrack.drop";
    /// Host, counters: packets for which a virtual switch's datapath knew a flow (`ovs.hits`) or
    /// did not (`ovs.misses`), and packets that were lost because no flow could be made for them
    /// (`ovs.lost`: a full table, a slow path too busy). The kernel's datapath also counts lost
    /// packets as misses; the datapath in user space does not.
    pub const SWITCH_HITS: &str = "ovs.hits";
    /// See [`SWITCH_HITS`].
    pub const SWITCH_MISSES: &str = "ovs.misses";
    /// See [`SWITCH_HITS`].
    pub const SWITCH_LOST: &str = "ovs.lost";
    /// Prefix of host counters: packets that the kernel dropped, by its reason (`skb:kfree_skb`),
    /// such as `drop.FULL_RING`.
    pub const DROP_PREFIX: &str = "drop.";
    /// Prefix of host counters: calls of a function of the kernel, machine-wide, such as
    /// `call.udp_sendmsg`.
    pub const CALL_PREFIX: &str = "call.";

    /// Link, counters (rtnetlink `IFLA_STATS64`).
    pub const RX_PACKETS: &str = "rx_packets";
    /// See [`RX_PACKETS`].
    pub const TX_PACKETS: &str = "tx_packets";
    /// See [`RX_PACKETS`].
    pub const RX_BYTES: &str = "rx_bytes";
    /// See [`RX_PACKETS`].
    pub const TX_BYTES: &str = "tx_bytes";
    /// See [`RX_PACKETS`].
    pub const RX_DROPPED: &str = "rx_dropped";
    /// See [`RX_PACKETS`].
    pub const TX_DROPPED: &str = "tx_dropped";
    /// See [`RX_PACKETS`].
    pub const RX_ERRORS: &str = "rx_errors";
    /// See [`RX_PACKETS`].
    pub const TX_ERRORS: &str = "tx_errors";
    /// See [`RX_PACKETS`].
    pub const RX_LENGTH_ERRORS: &str = "rx_length_errors";
    /// See [`RX_PACKETS`].
    pub const RX_FRAME_ERRORS: &str = "rx_frame_errors";

    /// Qdisc, counters: packets and bytes sent; packets dropped, delayed to keep the rate, and
    /// queued again because the device did not take them.
    pub const QDISC_PACKETS: &str = "packets";
    /// See [`QDISC_PACKETS`].
    pub const QDISC_BYTES: &str = "bytes";
    /// See [`QDISC_PACKETS`].
    pub const QDISC_DROPS: &str = "drops";
    /// See [`QDISC_PACKETS`].
    pub const QDISC_OVERLIMITS: &str = "overlimits";
    /// See [`QDISC_PACKETS`].
    pub const QDISC_REQUEUES: &str = "requeues";
    /// Qdisc, gauges: bytes and packets queued.
    pub const QDISC_BACKLOG_BYTES: &str = "backlog_bytes";
    /// See [`QDISC_BACKLOG_BYTES`].
    pub const QDISC_LENGTH: &str = "qlen";

    /// Process, counters (`/proc/PID/io`): calls that read and that write (`recv` and `send` are
    /// not counted), and the bytes of these calls.
    pub const IO_READS: &str = "io.syscr";
    /// See [`IO_READS`].
    pub const IO_WRITES: &str = "io.syscw";
    /// See [`IO_READS`].
    pub const IO_READ_BYTES: &str = "io.rchar";
    /// See [`IO_READS`].
    pub const IO_WRITTEN_BYTES: &str = "io.wchar";

    /// Thread, counters (`schedstat`): nanoseconds on a processor, and runnable but waiting for
    /// one.
    pub const RUN_NS: &str = "run_ns";
    /// See [`RUN_NS`].
    pub const RUN_DELAY_NS: &str = "run_delay_ns";
    /// Thread, counters (`status`): context switches because the thread waited for something, and
    /// because the kernel preempted it.
    pub const VOLUNTARY_SWITCHES: &str = "voluntary_switches";
    /// See [`VOLUNTARY_SWITCHES`].
    pub const INVOLUNTARY_SWITCHES: &str = "involuntary_switches";
    /// Thread, counters: nanoseconds (of ticks) in user mode and in system mode.
    pub const THREAD_USER_NS: &str = "thread.user_ns";
    /// See [`THREAD_USER_NS`].
    pub const THREAD_SYSTEM_NS: &str = "thread.system_ns";
    /// Thread, gauge: the processor it last ran on.
    pub const THREAD_CPU: &str = "thread.cpu";

    /// Udp, gauges: bytes in its receive and send queue (with the kernel's overhead).
    pub const UDP_RX_QUEUE: &str = "rx_queue";
    /// See [`UDP_RX_QUEUE`].
    pub const UDP_TX_QUEUE: &str = "tx_queue";
    /// Udp, counter: datagrams that the kernel dropped at the socket.
    pub const UDP_DROPS: &str = "drops";

    /// Tcp, gauges (`tcp_info`): smoothed and smallest round-trip time, microseconds.
    pub const TCP_RTT_US: &str = "rtt_us";
    /// See [`TCP_RTT_US`].
    pub const TCP_MIN_RTT_US: &str = "min_rtt_us";
    /// Tcp, gauges: congestion window and segments in flight, in segments; segment size, send
    /// window, unsent bytes.
    pub const TCP_CWND: &str = "cwnd";
    /// See [`TCP_CWND`].
    pub const TCP_UNACKED: &str = "unacked";
    /// See [`TCP_CWND`].
    pub const TCP_MSS: &str = "mss";
    /// See [`TCP_CWND`].
    pub const TCP_SND_WND: &str = "snd_wnd";
    /// See [`TCP_CWND`].
    pub const TCP_NOTSENT_BYTES: &str = "notsent_bytes";
    /// Tcp, gauges: the delivery rate that the kernel measured last, in bytes per second, and
    /// whether the application limited it (0 or 1).
    pub const TCP_DELIVERY_RATE: &str = "delivery_rate";
    /// See [`TCP_DELIVERY_RATE`].
    pub const TCP_APP_LIMITED: &str = "app_limited";
    /// Tcp, counters: segments retransmitted; all segments sent; bytes sent (retransmissions
    /// included), acknowledged and received.
    pub const TCP_RETRANS: &str = "retrans";
    /// See [`TCP_RETRANS`].
    pub const TCP_SEGS_OUT: &str = "segs_out";
    /// See [`TCP_RETRANS`].
    pub const TCP_BYTES_SENT: &str = "bytes_sent";
    /// See [`TCP_RETRANS`].
    pub const TCP_BYTES_ACKED: &str = "bytes_acked";
    /// See [`TCP_RETRANS`].
    pub const TCP_BYTES_RECEIVED: &str = "bytes_received";
    /// Tcp, counters: microseconds with data to send; the part of them in which the receiver's
    /// window, or the send buffer, held up sending.
    pub const TCP_BUSY_US: &str = "busy_us";
    /// See [`TCP_BUSY_US`].
    pub const TCP_RWND_LIMITED_US: &str = "rwnd_limited_us";
    /// See [`TCP_BUSY_US`].
    pub const TCP_SNDBUF_LIMITED_US: &str = "sndbuf_limited_us";
    /// Tcp, counters: times that the kernel detected reordering; duplicates that the receiver
    /// reported (DSACK); retransmission timeouts.
    pub const TCP_REORD_SEEN: &str = "reord_seen";
    /// See [`TCP_REORD_SEEN`].
    pub const TCP_DSACK_DUPS: &str = "dsack_dups";
    /// See [`TCP_REORD_SEEN`].
    pub const TCP_TIMEOUTS: &str = "timeouts";

    /// Group, counters (`cpu.stat`): quota periods; periods in which the group was throttled;
    /// microseconds for which it was throttled.
    pub const GROUP_PERIODS: &str = "nr_periods";
    /// See [`GROUP_PERIODS`].
    pub const GROUP_THROTTLED: &str = "nr_throttled";
    /// See [`GROUP_PERIODS`].
    pub const GROUP_THROTTLED_US: &str = "throttled_us";

    /// Probe, gauges: round-trip time of a small packet through the tunnel and over the outer path,
    /// microseconds.
    pub const PROBE_INNER_RTT_US: &str = "inner_rtt_us";
    /// See [`PROBE_INNER_RTT_US`].
    pub const PROBE_OUTER_RTT_US: &str = "outer_rtt_us";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restarted_counter_counts_from_zero() {
        let column = Column {
            kind: Kind::Counter,
            points: vec![(0, 10), (1, 15), (2, 3), (3, 5)],
        };
        assert_eq!(column.growth(), 7);
    }

    #[test]
    fn subjects_have_a_text_that_is_read_back() {
        for (subject, text) in [
            (Subject::Host, "host"),
            (Subject::Cpu(1), "cpu:1"),
            (Subject::Link("tun0".into()), "link:tun0"),
            (Subject::Qdisc("a:b/c".into()), "qdisc:a:b/c"),
            (Subject::Process(4711), "process:4711"),
            (Subject::Thread { pid: 1, tid: 2 }, "thread:1/2"),
            (Subject::Udp(u64::MAX), "udp:18446744073709551615"),
            (Subject::Tcp(0), "tcp:0"),
            (Subject::Group("/a.slice".into()), "group:/a.slice"),
            (Subject::Probe, "probe"),
        ] {
            assert_eq!(subject.to_string(), text);
            assert_eq!(text.parse(), Ok(subject));
        }
        for text in ["", "hosts", "cpu:", "cpu:x", "thread:1", "disk:sda"] {
            assert!(text.parse::<Subject>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_subject_may_appear_late() {
        let mut series = Series::default();
        series.push(Sample::default());
        let key = Key::new(Subject::Cpu(1), metric::NET_RX);
        series.push(Sample {
            at: Duration::from_millis(100),
            values: vec![(key, Kind::Counter, 5)],
        });
        let column = series.column(&Subject::Cpu(1), "net_rx").expect("column");
        assert_eq!(column.points, [(1, 5)]);
        assert_eq!(series.length(), Duration::from_millis(100));
    }
}
