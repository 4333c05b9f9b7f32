//! Sockets: the program's UDP sockets, its TCP connections, TCP connections through the inner
//! interface, and new ones between the addresses that are followed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use seikan_observe::Subject;
use seikan_observe::metric;
use seikan_observe::path::{PathMap, SocketFacts, Transport};

use super::file::Counters;
use super::{Again, Output};
use crate::netlink::diag::{Diag, SocketId, TcpConnection};

/// Maximum number of TCP connections that are sampled, and of flows that are kept: those with the
/// most bytes.
const CONNECTIONS_MAX: usize = 1000;
/// Interval between two searches for new connections, once there are some.
const RESCAN: Duration = Duration::from_millis(250);
/// Approximate costs in microseconds: to walk the kernel's tables of both IP versions, to receive a
/// connection during the walk, and to query one connection.
const WALK_COST: usize = 300;
const RECEIVE_COST: usize = 2;
const QUERY_COST: usize = 5;
const TCP: &str = "TCP connections";
const UDP: &str = "UDP sockets";

/// The sockets.
#[derive(Debug)]
pub(super) struct Sockets {
    udp: BTreeSet<u64>,
    udp_files: Vec<Counters>,
    diag: Option<Diag>,
    /// The program's own connections, by inode.
    program: BTreeSet<u64>,
    followed: Vec<IpNet>,
    flows: BTreeMap<u64, Flow>,
    /// The connections of the last sample, to be queried one by one.
    sampled: Vec<SocketId>,
    /// Number of other connections in the last listing.
    others: usize,
    again: Again,
}

#[derive(Debug)]
struct Flow {
    facts: SocketFacts,
    bytes: u64,
}

impl Sockets {
    /// Opens the files and sockets for the sockets of the path.
    pub(super) fn open(map: &PathMap, output: &mut Output) -> Self {
        let of = |transport| {
            let sockets = map.sockets.iter();
            let of = sockets.filter(move |socket| socket.transport == transport);
            of.map(|socket| socket.inode).collect::<BTreeSet<u64>>()
        };
        let udp = of(Transport::Udp);
        let mut udp_files = Vec::new();
        if !udp.is_empty() {
            for path in ["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"] {
                udp_files.extend(output.keep(UDP, Counters::open(path)));
            }
        }
        let flow = |facts: &SocketFacts| Flow {
            facts: facts.clone(),
            bytes: 0,
        };
        let flows = map.flows.iter().take(CONNECTIONS_MAX);
        Sockets {
            udp,
            udp_files,
            diag: output.keep(TCP, Diag::open()),
            program: of(Transport::Tcp),
            followed: Vec::new(),
            flows: flows.map(|facts| (facts.inode, flow(facts))).collect(),
            sampled: Vec::new(),
            others: 0,
            again: Again::every(RESCAN),
        }
    }

    /// Also samples connections from or to these networks.
    pub(super) fn follow(&mut self, networks: impl Iterator<Item = IpNet>) {
        self.followed.extend(networks);
        self.again = Again::every(RESCAN);
    }

    /// Returns the connections through the inner interface seen so far.
    pub(super) fn flows(&self) -> Vec<SocketFacts> {
        let flows = self.flows.values();
        flows.map(|flow| flow.facts.clone()).collect()
    }

    /// Samples the sockets.
    pub(super) fn sample(&mut self, now: Instant, output: &mut Output) {
        for file in &mut self.udp_files {
            let Some(text) = output.keep(UDP, file.read()) else {
                continue;
            };
            for socket in text.lines().filter_map(parse_udp) {
                if self.udp.contains(&socket.inode) {
                    let subject = Subject::Udp(socket.inode);
                    output.gauge(&subject, metric::UDP_RX_QUEUE, socket.rx_queue);
                    output.gauge(&subject, metric::UDP_TX_QUEUE, socket.tx_queue);
                    if let Some(drops) = socket.drops {
                        output.counter(&subject, metric::UDP_DROPS, drops);
                    }
                }
            }
        }
        if !(self.program.is_empty() && self.flows.is_empty() && self.followed.is_empty()) {
            self.sample_tcp(now, output);
        }
    }

    fn sample_tcp(&mut self, now: Instant, output: &mut Output) {
        let sampled = self.sampled.len();
        let walk = WALK_COST + RECEIVE_COST * (sampled + self.others);
        let whole = self.again.due(now) || sampled == 0 || QUERY_COST * sampled > walk;
        let mut connections = if whole {
            self.list(output)
        } else {
            self.look_up(output)
        };
        if connections.len() > CONNECTIONS_MAX {
            connections.sort_by_key(|connection| std::cmp::Reverse(bytes(connection)));
            connections.truncate(CONNECTIONS_MAX);
            let why = format!("only the {CONNECTIONS_MAX} with the most bytes are sampled");
            output.missing("more TCP connections", why);
        }
        self.sampled.clear();
        for connection in &connections {
            self.sampled.push(connection.id);
            push(output, connection);
            if !self.program.contains(&connection.inode) {
                self.keep_flow(connection);
            }
        }
        self.forget_flows();
    }

    /// Returns the wanted connections from the whole table.
    fn list(&mut self, output: &mut Output) -> Vec<TcpConnection> {
        let Some(mut diag) = self.diag.take() else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let mut others = 0;
        let outcome = diag.tcp(|connection| {
            if self.is_wanted(&connection) {
                found.push(connection)
            } else {
                others += 1
            }
        });
        // A kernel that refuses once refuses always.
        self.diag = output.keep(TCP, outcome).map(|()| diag);
        self.others = others;
        found
    }

    /// Queries the connections of the last sample one by one.
    fn look_up(&mut self, output: &mut Output) -> Vec<TcpConnection> {
        let Some(mut diag) = self.diag.take() else {
            return Vec::new();
        };
        let found = self.sampled.iter().filter_map(|id| {
            let connection = output.keep(TCP, diag.connection(id)).flatten()?;
            self.is_wanted(&connection).then_some(connection)
        });
        let found = found.collect();
        self.diag = Some(diag);
        found
    }

    fn is_wanted(&self, connection: &TcpConnection) -> bool {
        let inode = connection.inode;
        // A connection without a process has no inode to identify it.
        let ends = [connection.local.ip(), connection.remote.ip()];
        inode != 0
            && (self.program.contains(&inode)
                || self.flows.contains_key(&inode)
                || ends
                    .iter()
                    .any(|ip| self.followed.iter().any(|net| net.contains(ip))))
    }

    fn keep_flow(&mut self, connection: &TcpConnection) {
        let facts = |connection: &TcpConnection| SocketFacts {
            inode: connection.inode,
            transport: Transport::Tcp,
            local: connection.local,
            remote: Some(connection.remote),
            receive_buffer: connection.memory.map_or(0, |memory| memory.receive_buffer),
            send_buffer: connection.memory.map_or(0, |memory| memory.send_buffer),
            congestion: connection.congestion.clone(),
            vnet_hdr: None,
        };
        let flow = self.flows.entry(connection.inode).or_insert_with(|| Flow {
            facts: facts(connection),
            bytes: 0,
        });
        flow.bytes = bytes(connection);
        // The kernel enlarges buffers over time.
        if let Some(memory) = connection.memory {
            flow.facts.receive_buffer = memory.receive_buffer;
            flow.facts.send_buffer = memory.send_buffer;
        }
    }

    /// Keeps the flows with the most bytes if there are too many.
    fn forget_flows(&mut self) {
        if self.flows.len() > CONNECTIONS_MAX {
            let mut sizes: Vec<(u64, u64)> = self
                .flows
                .iter()
                .map(|(inode, flow)| (flow.bytes, *inode))
                .collect();
            sizes.sort_unstable();
            for (_, inode) in &sizes[..sizes.len() - CONNECTIONS_MAX] {
                self.flows.remove(inode);
            }
        }
    }
}

/// Bytes in both directions since its start.
fn bytes(connection: &TcpConnection) -> u64 {
    let info = &connection.info;
    let sent = info.bytes_acked().unwrap_or(0);
    sent.saturating_add(info.bytes_received().unwrap_or(0))
}

fn push(output: &mut Output, connection: &TcpConnection) {
    let subject = Subject::Tcp(connection.inode);
    let info = &connection.info;
    let long = |value: Option<u32>| value.map(u64::from);
    for (name, value) in [
        (metric::TCP_RTT_US, long(info.rtt())),
        (
            metric::TCP_MIN_RTT_US,
            long(info.min_rtt().filter(|rtt| *rtt != u32::MAX)),
        ),
        (metric::TCP_CWND, long(info.snd_cwnd())),
        (metric::TCP_UNACKED, long(info.unacked())),
        (metric::TCP_MSS, long(info.snd_mss())),
        (metric::TCP_SND_WND, long(info.snd_wnd())),
        (metric::TCP_NOTSENT_BYTES, long(info.notsent_bytes())),
        (metric::TCP_DELIVERY_RATE, info.delivery_rate()),
        (
            metric::TCP_APP_LIMITED,
            info.delivery_rate_app_limited().map(u64::from),
        ),
    ] {
        if let Some(value) = value {
            output.gauge(&subject, name, value);
        }
    }
    for (name, value) in [
        (metric::TCP_RETRANS, long(info.total_retrans())),
        (metric::TCP_SEGS_OUT, long(info.segs_out())),
        (metric::TCP_BYTES_SENT, info.bytes_sent()),
        (metric::TCP_BYTES_ACKED, info.bytes_acked()),
        (metric::TCP_BYTES_RECEIVED, info.bytes_received()),
        (metric::TCP_BUSY_US, info.busy_time()),
        (metric::TCP_RWND_LIMITED_US, info.rwnd_limited()),
        (metric::TCP_SNDBUF_LIMITED_US, info.sndbuf_limited()),
        (metric::TCP_REORD_SEEN, long(info.reord_seen())),
        (metric::TCP_DSACK_DUPS, long(info.dsack_dups())),
        (metric::TCP_TIMEOUTS, info.total_rto().map(u64::from)),
    ] {
        if let Some(value) = value {
            output.counter(&subject, name, value);
        }
    }
}

/// A line of `/proc/net/udp` or `udp6`.
#[derive(Debug, PartialEq, Eq)]
struct UdpLine {
    inode: u64,
    rx_queue: u64,
    tx_queue: u64,
    drops: Option<u64>,
}

/// Parses `sl local remote st tx:rx tr:when retrnsmt uid timeout inode ref pointer drops`
/// (`udp4_format_sock()`, net/ipv4/udp.c); the queues are hexadecimal.
fn parse_udp(line: &str) -> Option<UdpLine> {
    let mut words = line.split_ascii_whitespace().skip(4);
    let (tx, rx) = words.next()?.split_once(':')?;
    Some(UdpLine {
        tx_queue: u64::from_str_radix(tx, 16).ok()?,
        rx_queue: u64::from_str_radix(rx, 16).ok()?,
        inode: words.nth(4)?.parse().ok()?,
        drops: words.nth(2).and_then(|drops| drops.parse().ok()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_udp_line_has_queues_and_drops() {
        let line = "  426: 0100007F:0035 00000000:0000 07 00000A00:00000300 00:00000000 00000000   101        0 18446 2 00000000b0d3f2e6 12 ";
        let expected = UdpLine {
            inode: 18446,
            rx_queue: 0x300,
            tx_queue: 0xa00,
            drops: Some(12),
        };
        assert_eq!(parse_udp(line), Some(expected));
    }

    #[test]
    fn a_udp_line_of_a_kernel_without_drops_has_none() {
        // Before Linux 2.6.27.
        let line = "  35: 00000000:0035 00000000:0000 07 00000000:00000001 00:00000000 00000000     0        0 4711 2 ffff8100";
        let found = parse_udp(line).unwrap();
        assert_eq!((found.inode, found.rx_queue, found.drops), (4711, 1, None));
    }

    #[test]
    fn other_lines_are_none() {
        let header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops";
        for line in [
            header,
            "",
            "1 2 3 4 5",
            "1 2 3 4 z:z 6 7 8 9 10 11",
            "1: 2 3 4 0:0 6 7 8 9",
        ] {
            assert_eq!(parse_udp(line), None, "{line}");
        }
    }
}
