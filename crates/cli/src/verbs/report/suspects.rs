//! Counters that may indicate causes.

use std::collections::BTreeSet;

use seikan_diagnose::{Cause, Evidence};
use seikan_observe::path::{SocketFacts, Transport};
use seikan_observe::{Column, Subject, metric};

use super::trace::{Trace, gauge, rate};

/// Maximum number of interfaces, sockets and reasons to examine.
const MAX_SUBJECTS: usize = 32;
/// Number of drop reasons shown, the most frequent.
const REASONS: usize = 4;
/// Microseconds per second as per cent, and nanoseconds.
const PER_CENT_OF_US: f64 = 1e-4;
const PER_CENT_OF_NS: f64 = 1e-7;

/// Returns all counters that changed, the most relevant for tunnels first.
pub fn suspects(evidence: &Evidence) -> Vec<Trace> {
    let mut all = Collection {
        evidence,
        traces: Vec::new(),
        is_work: false,
    };
    connections(&mut all);
    interfaces(&mut all);
    sockets(&mut all);
    program(&mut all);
    processors(&mut all);
    host(&mut all);
    waiting(&mut all);
    all.traces
}

struct Collection<'a> {
    evidence: &'a Evidence,
    traces: Vec<Trace>,
    /// Whether the counters that are being added measure work.
    is_work: bool,
}

impl Collection<'_> {
    /// Adds a counter, summed over subjects.
    fn count(
        &mut self,
        subjects: impl IntoIterator<Item = Subject>,
        name: &str,
        title: impl Into<String>,
        (unit, scale): (&'static str, f64),
        causes: &'static [Cause],
    ) {
        let points = rate(
            self.evidence,
            &columns(self.evidence, subjects, name),
            scale,
        );
        self.push(title, unit, points, causes);
    }

    /// Adds a gauge, summed over subjects, if it changed.
    fn level(
        &mut self,
        subjects: impl IntoIterator<Item = Subject>,
        name: &str,
        title: impl Into<String>,
        (unit, scale): (&'static str, f64),
        causes: &'static [Cause],
    ) {
        let points = gauge(
            self.evidence,
            &columns(self.evidence, subjects, name),
            scale,
        );
        let first = points.first().map(|(_, value)| *value);
        if points.iter().any(|(_, value)| Some(*value) != first) {
            self.push(title, unit, points, causes);
        }
    }

    /// Adds a quantity unless it is always 0.
    fn push(
        &mut self,
        title: impl Into<String>,
        unit: &'static str,
        points: Vec<(f64, f64)>,
        causes: &'static [Cause],
    ) {
        if points.iter().any(|(_, value)| *value > 0.0) {
            self.traces.push(Trace {
                title: title.into(),
                unit,
                points,
                causes,
                is_work: self.is_work,
            });
        }
    }
}

const EACH: (&str, f64) = ("per second", 1.0);
const KILOBYTES: (&str, f64) = ("kB", 1e-3);
const MILLISECONDS: (&str, f64) = ("ms", 1e-3);
const SHARE_OF_US: (&str, f64) = ("% of the time", PER_CENT_OF_US);
/// Unit and scale of a sum over several objects, each of which may reach 100 %.
const SUM_OF_SHARES: (&str, f64) = ("% of the time, summed", PER_CENT_OF_US);
const SHARE_OF_NS: (&str, f64) = ("% of a processor", PER_CENT_OF_NS);

/// Returns the columns of a value of several subjects.
fn columns<'a>(
    evidence: &'a Evidence,
    subjects: impl IntoIterator<Item = Subject>,
    name: &str,
) -> Vec<&'a Column> {
    let subjects = subjects.into_iter();
    subjects
        .filter_map(|subject| evidence.column(&subject, name))
        .collect()
}

fn tcp(sockets: &[SocketFacts]) -> Vec<Subject> {
    let of = sockets
        .iter()
        .filter(|socket| socket.transport == Transport::Tcp);
    // A set, because an untrusted file may list a socket twice.
    let inodes: BTreeSet<u64> = of.map(|socket| socket.inode).collect();
    inodes.into_iter().map(Subject::Tcp).collect()
}

fn udp(sockets: &[SocketFacts]) -> impl Iterator<Item = Subject> {
    let of = sockets
        .iter()
        .filter(|socket| socket.transport == Transport::Udp);
    let inodes: BTreeSet<u64> = of.map(|socket| socket.inode).collect();
    inodes.into_iter().map(Subject::Udp)
}

fn connections(all: &mut Collection<'_>) {
    use Cause::*;
    let map = &all.evidence.map;
    let flows = tcp(&map.flows);
    let title = "segments retransmitted by connections through the tunnel";
    let causes = &[PathLoss, MtuBlackHole, Reordering, TcpOverTcp];
    all.count(flows.clone(), metric::TCP_RETRANS, title, EACH, causes);
    let main = all.evidence.main_flow();
    let main: Vec<_> = main
        .map(|flow| Subject::Tcp(flow.inode))
        .into_iter()
        .collect();
    let title = "round trip of the main connection";
    let causes = &[Bufferbloat, PathDelay, TcpOuterBuffer];
    all.level(main, metric::TCP_RTT_US, title, MILLISECONDS, causes);
    let title = "round trip of probes through the tunnel";
    let causes = &[Bufferbloat, PathDelay];
    let name = metric::PROBE_INNER_RTT_US;
    all.level([Subject::Probe], name, title, MILLISECONDS, causes);
    let title = "timeouts of connections through the tunnel";
    let causes = &[MtuBlackHole, TcpOverTcp];
    all.count(flows.clone(), metric::TCP_TIMEOUTS, title, EACH, causes);
    let title = "reordering seen by connections through the tunnel";
    all.count(
        flows.clone(),
        metric::TCP_REORD_SEEN,
        title,
        EACH,
        &[Reordering],
    );
    let title = "duplicates reported by the far end";
    let causes = &[Reordering, TcpOverTcp];
    all.count(flows.clone(), metric::TCP_DSACK_DUPS, title, EACH, causes);
    let title = "connections limited by the receiver's window";
    let causes = &[TcpReceiveWindow];
    all.count(
        flows.clone(),
        metric::TCP_RWND_LIMITED_US,
        title,
        SUM_OF_SHARES,
        causes,
    );
    let title = "connections limited by their send buffer";
    all.count(
        flows,
        metric::TCP_SNDBUF_LIMITED_US,
        title,
        SUM_OF_SHARES,
        &[],
    );
    let title = "segments received out of order";
    let causes = &[Reordering, PathLoss];
    all.count([Subject::Host], "TcpExt.TCPOFOQueue", title, EACH, causes);
}

fn interfaces(all: &mut Collection<'_>) {
    use Cause::*;
    let map = &all.evidence.map;
    for link in map.links.iter().take(MAX_SUBJECTS) {
        let name = &link.name;
        let is_inner = Some(name) == map.inner.as_ref();
        let device = || [Subject::Link(name.clone())];
        let queue = || [Subject::Qdisc(name.clone())];
        let causes: &[Cause] = if is_inner {
            &[TunQueueOverflow, VhostStarved]
        } else {
            &[OffloadBroken]
        };
        let title = format!("packets dropped while sending by {name}");
        all.count(device(), metric::TX_DROPPED, title, EACH, causes);
        let title = format!("packets dropped by the queueing discipline of {name}");
        let causes = &[Shaper, Bufferbloat, TunQueueOverflow];
        all.count(queue(), metric::QDISC_DROPS, title, EACH, causes);
        let title = format!("backlog of the queue of {name}");
        let causes = &[Bufferbloat, Shaper];
        all.level(
            queue(),
            metric::QDISC_BACKLOG_BYTES,
            title,
            KILOBYTES,
            causes,
        );
        let title = format!("packets delayed by the rate limit of {name}");
        all.count(queue(), metric::QDISC_OVERLIMITS, title, EACH, &[Shaper]);
        let title = format!("packets requeued by {name}");
        all.count(queue(), metric::QDISC_REQUEUES, title, EACH, &[]);
        for (metric, description, causes) in [
            (metric::RX_DROPPED, "dropped while receiving by", &[][..]),
            (
                metric::RX_ERRORS,
                "received in error by",
                &[MtuMismatch, OffloadBroken],
            ),
            (
                metric::RX_LENGTH_ERRORS,
                "of invalid length received by",
                &[MtuMismatch],
            ),
            (
                metric::RX_FRAME_ERRORS,
                "with frame errors received by",
                &[MtuMismatch],
            ),
            (
                metric::TX_ERRORS,
                "failed to send by",
                &[MtuMismatch, OffloadBroken],
            ),
        ] {
            all.count(
                device(),
                metric,
                format!("packets {description} {name}"),
                EACH,
                causes,
            );
        }
    }
}

fn sockets(all: &mut Collection<'_>) {
    use Cause::*;
    let map = &all.evidence.map;
    let outer = tcp(&map.sockets);
    let title = "datagrams dropped at the tunnel's sockets";
    let udp = udp(&map.sockets);
    all.count(udp, metric::UDP_DROPS, title, EACH, &[UdpReceiveBuffer]);
    let title = "segments retransmitted by the tunnel's own connection";
    all.count(
        outer.clone(),
        metric::TCP_RETRANS,
        title,
        EACH,
        &[TcpOverTcp],
    );
    let title = "the tunnel's own connection limited by its send buffer";
    let causes = &[TcpOuterBuffer];
    all.count(
        outer.clone(),
        metric::TCP_SNDBUF_LIMITED_US,
        title,
        SUM_OF_SHARES,
        causes,
    );
    let title = "the tunnel's own connection limited by the far end's window";
    all.count(
        outer,
        metric::TCP_RWND_LIMITED_US,
        title,
        SUM_OF_SHARES,
        causes,
    );
}

fn processors(all: &mut Collection<'_>) {
    use Cause::*;
    let cpus: BTreeSet<u32> = all.evidence.map.host.cpus.iter().copied().collect();
    let every = || cpus.iter().copied().map(Subject::Cpu);
    let title = "processor time stolen by the hypervisor";
    all.count(every(), metric::STEAL_NS, title, SHARE_OF_NS, &[CpuSteal]);
    let title = "packets dropped on the machine by a full backlog";
    all.count(
        every(),
        metric::SOFTNET_DROPPED,
        title,
        EACH,
        &[BacklogFull],
    );
    let title = "receive rounds ended by an exhausted budget";
    all.count(
        every(),
        metric::SOFTNET_TIME_SQUEEZE,
        title,
        EACH,
        &[NapiBudget],
    );
    let softirq = all.evidence.per_cpu(metric::SOFTIRQ_NS).into_iter();
    let busiest = softirq.max_by(|a, b| a.1.total_cmp(&b.1));
    all.is_work = true;
    if let Some((cpu, _)) = busiest {
        let title = format!("softirqs on processor {cpu}");
        let causes = &[SoftirqOneCore, OuterFlowCannotSpread];
        all.count(
            [Subject::Cpu(cpu)],
            metric::SOFTIRQ_NS,
            title,
            SHARE_OF_NS,
            causes,
        );
    }
    all.is_work = false;
}

fn program(all: &mut Collection<'_>) {
    use Cause::*;
    let Some(program) = &all.evidence.map.program else {
        return;
    };
    let pid = program.pid;
    let thread = move |tid: u32| Subject::Thread { pid, tid };
    let threads: BTreeSet<u32> = program.threads.iter().map(|(tid, _)| *tid).collect();
    let every = || threads.iter().map(|tid| thread(*tid));
    let name = &program.name;
    let title = format!("{name} waited for a processor");
    let causes = &[CpuContention, VhostStarved];
    all.count(every(), metric::RUN_DELAY_NS, title, SHARE_OF_NS, causes);
    if let Some(group) = &program.group {
        let title = format!("{name} throttled by its CPU quota");
        let group = [Subject::Group(group.clone())];
        all.count(
            group,
            metric::GROUP_THROTTLED_US,
            title,
            SHARE_OF_US,
            &[CpuQuota],
        );
    }
    all.is_work = true;
    if let Some(busiest) = all.evidence.threads().first() {
        let title = format!("processor time of {name}, thread {}", busiest.name);
        let causes = &[
            SingleThreadSaturated,
            CipherBound,
            CopyOrChecksumBound,
            FramePerSyscall,
            PacketsTooSmall,
        ];
        all.count(
            [thread(busiest.tid)],
            metric::RUN_NS,
            title,
            SHARE_OF_NS,
            causes,
        );
    }
    let title = format!("reads and writes of {name}");
    let process = [Subject::Process(pid)];
    let mut calls = columns(all.evidence, process.clone(), metric::IO_READS);
    calls.extend(columns(all.evidence, process, metric::IO_WRITES));
    let points = rate(all.evidence, &calls, 1.0);
    all.push(title, EACH.0, points, &[FramePerSyscall, PacketsTooSmall]);
    let title = format!("voluntary sleeps of {name}");
    all.count(
        every(),
        metric::VOLUNTARY_SWITCHES,
        title,
        EACH,
        &[HandoffOverhead],
    );
    all.is_work = false;
}

fn host(all: &mut Collection<'_>) {
    use Cause::*;
    const COUNTERS: [(&[&str], &str, &[Cause]); 7] = [
        (
            &["Udp.RcvbufErrors", "Udp6.RcvbufErrors"],
            "datagrams dropped by full receive buffers",
            &[UdpReceiveBuffer],
        ),
        (
            &["Udp.SndbufErrors", "Udp6.SndbufErrors"],
            "datagrams not sent because of full send buffers",
            &[UdpSendBuffer],
        ),
        (
            &["Ip.FragCreates", "Ip6.FragCreates"],
            "fragments created",
            &[OuterFragmentation, GroBreaksEncapsulation],
        ),
        (
            &["Ip.ReasmFails", "Ip6.ReasmFails"],
            "packets that failed to reassemble",
            &[OuterFragmentation],
        ),
        (
            &["Tcp.InCsumErrors", "Udp.InCsumErrors", "Udp6.InCsumErrors"],
            "packets with a wrong checksum",
            &[OffloadBroken],
        ),
        (
            &[metric::CONNTRACK_INSERT_FAILED],
            "connections that could not be tracked",
            &[ConntrackFull],
        ),
        (
            &[metric::CONNTRACK_DROP],
            "packets dropped because they could not be tracked",
            &[ConntrackFull],
        ),
    ];
    let host = || [Subject::Host];
    for (names, title, causes) in COUNTERS {
        let names = names.iter();
        let columns: Vec<_> = names
            .flat_map(|name| columns(all.evidence, host(), name))
            .collect();
        let points = rate(all.evidence, &columns, 1.0);
        all.push(title, EACH.0, points, causes);
    }
    let title = "tracked connections";
    let name = metric::CONNTRACK_COUNT;
    all.level(host(), name, title, ("connections", 1.0), &[ConntrackFull]);
    let title = "time in which a task waited for a processor";
    let name = metric::PRESSURE_CPU_US;
    all.count(host(), name, title, SHARE_OF_US, &[CpuContention]);
    reasons(all);
}

/// Adds backlogs of sockets, which the picture of queues also shows.
fn waiting(all: &mut Collection<'_>) {
    use Cause::*;
    let udp: Vec<_> = udp(&all.evidence.map.sockets).collect();
    let title = "receive backlog of the tunnel's sockets";
    let causes = &[UdpReceiveBuffer];
    all.level(udp.clone(), metric::UDP_RX_QUEUE, title, KILOBYTES, causes);
    let title = "send backlog of the tunnel's sockets";
    all.level(
        udp,
        metric::UDP_TX_QUEUE,
        title,
        KILOBYTES,
        &[UdpSendBuffer],
    );
    let main = all.evidence.main_flow();
    let main = main.map(|flow| Subject::Tcp(flow.inode));
    let title = "unsent data of the main connection";
    all.level(main, metric::TCP_NOTSENT_BYTES, title, KILOBYTES, &[]);
}

/// Adds drops by the kernel's reasons.
fn reasons(all: &mut Collection<'_>) {
    let columns = all.evidence.series.columns.iter();
    let mut reasons: Vec<(&str, u64)> = columns
        .filter(|(key, _)| key.subject == Subject::Host)
        .filter_map(|(key, column)| {
            let reason = key.name.strip_prefix(metric::DROP_PREFIX)?;
            Some((reason, column.growth()))
        })
        .collect();
    reasons.sort_by_key(|(_, growth)| std::cmp::Reverse(*growth));
    for (reason, _) in reasons.into_iter().take(REASONS) {
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
        all.count([Subject::Host], &name, title, EACH, causes);
    }
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
