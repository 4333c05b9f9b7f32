//! Counters that may indicate causes.

use std::collections::BTreeSet;

use seikan_diagnose::{Cause, Evidence};
use seikan_observe::path::{SocketFacts, Transport};
use seikan_observe::{Column, Kind, Subject, metric};

use super::trace::{Trace, gauge, rate};

/// Maximum number of interfaces to examine.
const MAX_LINKS: usize = 32;
/// Number of drop reasons shown, the most frequent.
const REASONS: usize = 4;

/// Objects whose counters are added up. Each of the last four is an interface or its queue; the
/// table with them is applied to one interface after the other.
#[derive(Clone, Copy)]
enum Of {
    Host,
    Cpus,
    BusiestCpu,
    Program,
    Group,
    Threads,
    BusiestThread,
    /// Connections through the tunnel.
    Flows,
    MainFlow,
    Probes,
    /// TCP connections that the tunnel itself runs over.
    Outer,
    OuterUdp,
    Link,
    /// The interface if it is the inner one.
    Inner,
    /// The interface if it is not the inner one.
    Outside,
    Queue,
}

/// Names of counters or gauges, which are added up; the title, in which `{}` is the object's name;
/// the unit and its scale; causes that the quantity indicates.
type Row<'a> = (
    Of,
    &'a [&'a str],
    &'a str,
    (&'static str, f64),
    &'static [Cause],
);

const EACH: (&str, f64) = ("per second", 1.0);
const KILOBYTES: (&str, f64) = ("kB", 1e-3);
const MILLISECONDS: (&str, f64) = ("ms", 1e-3);
const SHARE_OF_US: (&str, f64) = ("% of the time", 1e-4);
/// Unit and scale of a sum over several objects, each of which may reach 100 %.
const SUM_OF_SHARES: (&str, f64) = ("% of the time, summed", 1e-4);
const SHARE_OF_NS: (&str, f64) = ("% of a processor", 1e-7);

/// Counters of work, which correlate with throughput in any case.
const WORK: [&str; 4] = [
    metric::SOFTIRQ_NS,
    metric::RUN_NS,
    metric::IO_READS,
    metric::VOLUNTARY_SWITCHES,
];

const CONNECTIONS: [Row; 9] = {
    use Cause::*;
    use Of::*;
    use metric::*;
    [
        (
            Flows,
            &[TCP_RETRANS],
            "segments retransmitted by connections through the tunnel",
            EACH,
            &[PathLoss, MtuBlackHole, Reordering, TcpOverTcp],
        ),
        (
            MainFlow,
            &[TCP_RTT_US],
            "round trip of the main connection",
            MILLISECONDS,
            &[Bufferbloat, PathDelay, TcpOuterBuffer],
        ),
        (
            Probes,
            &[PROBE_INNER_RTT_US],
            "round trip of probes through the tunnel",
            MILLISECONDS,
            &[Bufferbloat, PathDelay],
        ),
        (
            Flows,
            &[TCP_TIMEOUTS],
            "timeouts of connections through the tunnel",
            EACH,
            &[MtuBlackHole, TcpOverTcp],
        ),
        (
            Flows,
            &[TCP_REORD_SEEN],
            "reordering seen by connections through the tunnel",
            EACH,
            &[Reordering],
        ),
        (
            Flows,
            &[TCP_DSACK_DUPS],
            "duplicates reported by the far end",
            EACH,
            &[Reordering, TcpOverTcp],
        ),
        (
            Flows,
            &[TCP_RWND_LIMITED_US],
            "connections limited by the receiver's window",
            SUM_OF_SHARES,
            &[TcpReceiveWindow],
        ),
        (
            Flows,
            &[TCP_SNDBUF_LIMITED_US],
            "connections limited by their send buffer",
            SUM_OF_SHARES,
            &[],
        ),
        (
            Host,
            &["TcpExt.TCPOFOQueue"],
            "segments received out of order",
            EACH,
            &[Reordering, PathLoss],
        ),
    ]
};

const INTERFACE: [Row; 11] = {
    use Cause::*;
    use Of::*;
    use metric::*;
    [
        (
            Inner,
            &[TX_DROPPED],
            "packets dropped while sending by {}",
            EACH,
            &[TunQueueOverflow, VhostStarved],
        ),
        (
            Outside,
            &[TX_DROPPED],
            "packets dropped while sending by {}",
            EACH,
            &[OffloadBroken],
        ),
        (
            Queue,
            &[QDISC_DROPS],
            "packets dropped by the queueing discipline of {}",
            EACH,
            &[Shaper, Bufferbloat, TunQueueOverflow],
        ),
        (
            Queue,
            &[QDISC_BACKLOG_BYTES],
            "backlog of the queue of {}",
            KILOBYTES,
            &[Bufferbloat, Shaper],
        ),
        (
            Queue,
            &[QDISC_OVERLIMITS],
            "packets delayed by the rate limit of {}",
            EACH,
            &[Shaper],
        ),
        (
            Queue,
            &[QDISC_REQUEUES],
            "packets requeued by {}",
            EACH,
            &[],
        ),
        (
            Link,
            &[RX_DROPPED],
            "packets dropped while receiving by {}",
            EACH,
            &[],
        ),
        (
            Link,
            &[RX_ERRORS],
            "packets received in error by {}",
            EACH,
            &[MtuMismatch, OffloadBroken],
        ),
        (
            Link,
            &[RX_LENGTH_ERRORS],
            "packets of invalid length received by {}",
            EACH,
            &[MtuMismatch],
        ),
        (
            Link,
            &[RX_FRAME_ERRORS],
            "packets with frame errors received by {}",
            EACH,
            &[MtuMismatch],
        ),
        (
            Link,
            &[TX_ERRORS],
            "packets failed to send by {}",
            EACH,
            &[MtuMismatch, OffloadBroken],
        ),
    ]
};

/// Counters of the tunnel's sockets, of the program, and of the machine.
const HOST: [Row; 22] = {
    use Cause::*;
    use Of::*;
    use metric::*;
    [
        (
            OuterUdp,
            &[UDP_DROPS],
            "datagrams dropped at the tunnel's sockets",
            EACH,
            &[UdpReceiveBuffer],
        ),
        (
            Outer,
            &[TCP_RETRANS],
            "segments retransmitted by the tunnel's own connection",
            EACH,
            &[TcpOverTcp],
        ),
        (
            Outer,
            &[TCP_SNDBUF_LIMITED_US],
            "the tunnel's own connection limited by its send buffer",
            SUM_OF_SHARES,
            &[TcpOuterBuffer],
        ),
        (
            Outer,
            &[TCP_RWND_LIMITED_US],
            "the tunnel's own connection limited by the far end's window",
            SUM_OF_SHARES,
            &[TcpOuterBuffer],
        ),
        (
            Threads,
            &[RUN_DELAY_NS],
            "{} waited for a processor",
            SHARE_OF_NS,
            &[CpuContention, VhostStarved],
        ),
        (
            Group,
            &[GROUP_THROTTLED_US],
            "{} throttled by its CPU quota",
            SHARE_OF_US,
            &[CpuQuota],
        ),
        (
            BusiestThread,
            &[RUN_NS],
            "processor time of {}",
            SHARE_OF_NS,
            &[
                SingleThreadSaturated,
                CipherBound,
                CopyOrChecksumBound,
                FramePerSyscall,
                PacketsTooSmall,
            ],
        ),
        (
            Program,
            &[IO_READS, IO_WRITES],
            "reads and writes of {}",
            EACH,
            &[FramePerSyscall, PacketsTooSmall],
        ),
        (
            Threads,
            &[VOLUNTARY_SWITCHES],
            "voluntary sleeps of {}",
            EACH,
            &[HandoffOverhead],
        ),
        (
            Cpus,
            &[STEAL_NS],
            "processor time stolen by the hypervisor",
            SHARE_OF_NS,
            &[CpuSteal],
        ),
        (
            Cpus,
            &[SOFTNET_DROPPED],
            "packets dropped on the machine by a full backlog",
            EACH,
            &[BacklogFull],
        ),
        (
            Cpus,
            &[SOFTNET_TIME_SQUEEZE],
            "receive rounds ended by an exhausted budget",
            EACH,
            &[NapiBudget],
        ),
        (
            BusiestCpu,
            &[SOFTIRQ_NS],
            "softirqs on processor {}",
            SHARE_OF_NS,
            &[SoftirqOneCore, OuterFlowCannotSpread],
        ),
        (
            Host,
            &["Udp.RcvbufErrors", "Udp6.RcvbufErrors"],
            "datagrams dropped by full receive buffers",
            EACH,
            &[UdpReceiveBuffer],
        ),
        (
            Host,
            &["Udp.SndbufErrors", "Udp6.SndbufErrors"],
            "datagrams not sent because of full send buffers",
            EACH,
            &[UdpSendBuffer],
        ),
        (
            Host,
            &["Ip.FragCreates", "Ip6.FragCreates"],
            "fragments created",
            EACH,
            &[OuterFragmentation, GroBreaksEncapsulation],
        ),
        (
            Host,
            &["Ip.ReasmFails", "Ip6.ReasmFails"],
            "packets that failed to reassemble",
            EACH,
            &[OuterFragmentation],
        ),
        (
            Host,
            &["Tcp.InCsumErrors", "Udp.InCsumErrors", "Udp6.InCsumErrors"],
            "packets with a wrong checksum",
            EACH,
            &[OffloadBroken],
        ),
        (
            Host,
            &[CONNTRACK_INSERT_FAILED],
            "connections that could not be tracked",
            EACH,
            &[ConntrackFull],
        ),
        (
            Host,
            &[CONNTRACK_DROP],
            "packets dropped because they could not be tracked",
            EACH,
            &[ConntrackFull],
        ),
        (
            Host,
            &[CONNTRACK_COUNT],
            "tracked connections",
            ("connections", 1.0),
            &[ConntrackFull],
        ),
        (
            Host,
            &[PRESSURE_CPU_US],
            "time in which a task waited for a processor",
            SHARE_OF_US,
            &[CpuContention],
        ),
    ]
};

/// Backlogs of sockets, which the picture of queues also shows.
const WAITING: [Row; 3] = {
    use Cause::*;
    use Of::*;
    use metric::*;
    [
        (
            OuterUdp,
            &[UDP_RX_QUEUE],
            "receive backlog of the tunnel's sockets",
            KILOBYTES,
            &[UdpReceiveBuffer],
        ),
        (
            OuterUdp,
            &[UDP_TX_QUEUE],
            "send backlog of the tunnel's sockets",
            KILOBYTES,
            &[UdpSendBuffer],
        ),
        (
            MainFlow,
            &[TCP_NOTSENT_BYTES],
            "unsent data of the main connection",
            KILOBYTES,
            &[],
        ),
    ]
};

/// Returns all counters that changed, the most relevant for tunnels first.
pub fn suspects(evidence: &Evidence) -> Vec<Trace> {
    let all = |rows: &[Row], link| -> Vec<Trace> {
        let found = rows.iter().filter_map(|row| quantity(evidence, row, link));
        found.collect()
    };
    let mut traces = all(&CONNECTIONS, None);
    for link in evidence.map.links.iter().take(MAX_LINKS) {
        traces.extend(all(&INTERFACE, Some(&*link.name)));
    }
    traces.extend(all(&HOST, None));
    traces.extend(reasons(evidence));
    traces.extend(all(&WAITING, None));
    traces
}

/// Returns the quantity of a row unless it is always 0 or is a gauge that did not change.
fn quantity(
    evidence: &Evidence,
    (of, names, title, (unit, scale), causes): &Row,
    link: Option<&str>,
) -> Option<Trace> {
    let (object, subjects) = objects(*of, evidence, link)?;
    let columns: Vec<&Column> = subjects
        .iter()
        .flat_map(|subject| {
            names
                .iter()
                .filter_map(|name| evidence.column(subject, name))
        })
        .collect();
    let is_gauge = columns.first()?.kind == Kind::Gauge;
    let over_time = if is_gauge { gauge } else { rate };
    let points = over_time(evidence, &columns, *scale);
    let first = points.first()?.1;
    let is_constant = points.iter().all(|(_, value)| *value == first);
    let is_zero = points.iter().all(|(_, value)| *value <= 0.0);
    let is_still = is_zero || is_gauge && is_constant;
    (!is_still).then(|| Trace {
        title: title.replace("{}", &object),
        unit,
        points,
        causes,
        is_work: WORK.contains(&names[0]),
    })
}

/// Returns the name of the objects that a row is about, and the objects: a set, because an untrusted
/// file may list one twice. The name is empty if no title contains it.
fn objects(of: Of, evidence: &Evidence, link: Option<&str>) -> Option<(String, BTreeSet<Subject>)> {
    let map = &evidence.map;
    let program = map.program.as_ref();
    let thread = |tid| {
        let pid = program.map_or(0, |program| program.pid);
        Subject::Thread { pid, tid }
    };
    let sockets = |sockets: &[SocketFacts], transport, subject: fn(u64) -> Subject| {
        let of = sockets.iter().filter(|it| it.transport == transport);
        of.map(|socket| subject(socket.inode)).collect()
    };
    let one = |subject| BTreeSet::from([subject]);
    let named = |subject: fn(String) -> Subject| {
        let link = link?.to_owned();
        Some((link.clone(), one(subject(link))))
    };
    let is_inner = link == map.inner.as_deref();
    let subjects = match of {
        Of::Link => return named(Subject::Link),
        Of::Inner if is_inner => return named(Subject::Link),
        Of::Outside if !is_inner => return named(Subject::Link),
        Of::Inner | Of::Outside => return None,
        Of::Queue => return named(Subject::Qdisc),
        Of::BusiestCpu => {
            let softirq = evidence.per_cpu(metric::SOFTIRQ_NS).into_iter();
            let (cpu, _) = softirq.max_by(|a, b| a.1.total_cmp(&b.1))?;
            return Some((cpu.to_string(), one(Subject::Cpu(cpu))));
        }
        Of::BusiestThread => {
            let busiest = evidence.threads().into_iter().next()?;
            let name = format!("{}, thread {}", program?.name, busiest.name);
            return Some((name, one(thread(busiest.tid))));
        }
        Of::Host => one(Subject::Host),
        Of::Cpus => map.host.cpus.iter().copied().map(Subject::Cpu).collect(),
        Of::Program => one(Subject::Process(program?.pid)),
        Of::Group => one(Subject::Group(program?.group.clone()?)),
        Of::Threads => program?
            .threads
            .iter()
            .map(|(tid, _)| thread(*tid))
            .collect(),
        Of::Flows => sockets(&map.flows, Transport::Tcp, Subject::Tcp),
        Of::MainFlow => one(Subject::Tcp(evidence.main_flow()?.inode)),
        Of::Probes => one(Subject::Probe),
        Of::Outer => sockets(&map.sockets, Transport::Tcp, Subject::Tcp),
        Of::OuterUdp => sockets(&map.sockets, Transport::Udp, Subject::Udp),
    };
    let name = program.map(|program| program.name.clone());
    Some((name.unwrap_or_default(), subjects))
}

/// Returns drops by the kernel's reasons.
fn reasons(evidence: &Evidence) -> Vec<Trace> {
    let columns = evidence.series.columns.iter();
    let mut reasons: Vec<(&str, u64)> = columns
        .filter(|(key, _)| key.subject == Subject::Host)
        .filter_map(|(key, column)| {
            let reason = key.name.strip_prefix(metric::DROP_PREFIX)?;
            Some((reason, column.growth()))
        })
        .collect();
    reasons.sort_by_key(|(_, growth)| std::cmp::Reverse(*growth));
    let found = reasons.into_iter().take(REASONS).filter_map(|(reason, _)| {
        let causes: &[Cause] = match reason {
            "FULL_RING" => &[Cause::TunQueueOverflow, Cause::VhostStarved],
            "SOCKET_RCVBUFF" => &[Cause::UdpReceiveBuffer],
            "CPU_BACKLOG" => &[Cause::BacklogFull],
            "QDISC_DROP" | "QDISC_OVERLIMIT" => &[Cause::Shaper, Cause::Bufferbloat],
            "PKT_TOO_BIG" => &[Cause::GroBreaksEncapsulation, Cause::MtuMismatch],
            "TCP_OFOMERGE" | "TCP_OLD_DATA" => &[Cause::Reordering],
            _ => &[],
        };
        let title = format!("packets dropped anywhere on the machine: {reason}");
        let name = format!("{}{reason}", metric::DROP_PREFIX);
        quantity(evidence, &(Of::Host, &[&name], &title, EACH, causes), None)
    });
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::report::testing::*;

    #[test]
    fn only_changed_counters_are_returned() {
        let mut evidence = sampled(&[0.0, 1.0, 2.0]);
        evidence.map.inner = Some("tun0".into());
        evidence.map.links = vec![link("tun0")];
        let tun = || Subject::Link("tun0".into());
        count(&mut evidence, tun(), metric::TX_DROPPED, &[5, 5, 5]);
        assert_eq!(suspects(&evidence), []);
        count(&mut evidence, tun(), metric::TX_DROPPED, &[5, 5, 9]);
        let found = suspects(&evidence);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].points, [(0.5, 0.0), (1.5, 4.0)]);
        assert!(found[0].causes.contains(&Cause::TunQueueOverflow));
    }
}
