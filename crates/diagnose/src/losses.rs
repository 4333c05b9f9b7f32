//! Losses by TCP's counters: their number, whether they were real, and whether they happened on this host.
//!
//! A sender knows its retransmissions and, from duplicates that the receiver reports (DSACK, RFC
//! 2883), how many were unnecessary. A receiver knows how many segments came out of order or twice.
//! Counters of this host tell its own drops.
//!
//! These exclude drops by reason (`drop.*`), and drops of the processors' queues unless an
//! interface of the path counts them: the kernel counts both for all namespaces of the machine.

use seikan_observe::path::{SocketFacts, Transport};
use seikan_observe::{Subject, metric};

use crate::Evidence;

/// Fewest segments for a share: 1 % shows in a hundred.
const LEAST_SEGMENTS: f64 = 100.0;
/// Share of the sent bytes that are acknowledged, below which losses are not random: a random loss
/// gets 1 - loss acknowledged, and no connection survives a loss of three quarters.
const STALLED: f64 = 0.25;
/// `tcpi_min_rtt` without a measurement: all ones (net/ipv4/tcp.c).
const NO_RTT_US: f64 = 4e9;

/// Retransmissions of connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Losses {
    /// Segments sent, with retransmissions.
    pub segments: f64,
    /// Segments retransmitted.
    pub again: f64,
    /// Unnecessary retransmissions: the receiver had the segment.
    pub spurious: f64,
    /// Segments that this host dropped after TCP had sent them.
    pub here: f64,
}

impl Losses {
    /// Share of the sent segments that were really lost, 0 to 1.
    pub fn lost(&self) -> f64 {
        (self.again - self.spurious).max(0.0) / self.segments
    }

    /// Share of the sent segments that were lost outside of this host, 0 to 1.
    pub fn elsewhere(&self) -> f64 {
        (self.again - self.spurious - self.here).max(0.0) / self.segments
    }
}

/// Received segments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrivals {
    /// Segments; merged ones count once.
    pub segments: f64,
    /// Segments received out of order.
    pub early: f64,
    /// Segments received twice.
    pub twice: f64,
    /// Packets that this host dropped before TCP.
    pub here: f64,
}

/// Connections that send without success.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stall {
    /// Bytes sent, with retransmissions.
    pub sent: f64,
    /// Bytes acknowledged.
    pub acknowledged: f64,
    /// Retransmission timeouts.
    pub timeouts: f64,
}

impl Evidence {
    /// Whether connections of this host send more into the tunnel than they receive from it.
    pub fn sends_tcp(&self) -> bool {
        let bytes = |name| self.flows(name).unwrap_or(0.0);
        let sent = bytes(metric::TCP_BYTES_SENT).max(bytes(metric::TCP_BYTES_ACKED));
        let sends = sent > bytes(metric::TCP_BYTES_RECEIVED);
        sends
            && self
                .flows(metric::TCP_SEGS_OUT)
                .is_some_and(|sent| sent > 0.0)
    }

    /// Whether the tunnel runs over TCP.
    pub fn outer_tcp(&self) -> bool {
        self.outer_connections().next().is_some()
    }

    /// Returns the program's own TCP connections to the outside.
    pub fn outer_connections(&self) -> impl Iterator<Item = &SocketFacts> {
        let sockets = self.map.sockets.iter();
        sockets.filter(|socket| socket.transport == Transport::Tcp)
    }

    /// Returns the losses of connections through the tunnel; `None` if this host sends little or no
    /// TCP into it.
    pub fn inner_losses(&self) -> Option<Losses> {
        let sends = self.sends_tcp();
        sends.then(|| self.losses(|name| self.flows(name), true))?
    }

    /// Returns the losses of the tunnel's own TCP connections.
    pub fn outer_losses(&self) -> Option<Losses> {
        self.losses(|name| self.program_sockets(Transport::Tcp, name), false)
    }

    fn losses(&self, of: impl Fn(&str) -> Option<f64>, inner: bool) -> Option<Losses> {
        let segments = of(metric::TCP_SEGS_OUT).filter(|sent| *sent >= LEAST_SEGMENTS)?;
        Some(Losses {
            segments,
            again: of(metric::TCP_RETRANS)?,
            spurious: of(metric::TCP_DSACK_DUPS).unwrap_or(0.0),
            here: self.dropped_sending(inner),
        })
    }

    /// Returns the segments that the host received; `None` unless connections through the tunnel
    /// mainly receive.
    pub fn arrivals(&self) -> Option<Arrivals> {
        let received = self.flows(metric::TCP_BYTES_RECEIVED)?;
        if received <= 0.0 || self.sends_tcp() {
            return None;
        }
        let segments = self.host("Tcp.InSegs")?;
        (segments >= LEAST_SEGMENTS).then_some(())?;
        Some(Arrivals {
            segments,
            early: self.host("TcpExt.TCPOFOQueue")?,
            twice: self.host("TcpExt.TCPDSACKOldSent").unwrap_or(0.0),
            here: self.dropped_receiving(),
        })
    }

    /// Returns the connections through the tunnel that time out and get next to nothing
    /// acknowledged, if there are any.
    pub fn stalled(&self) -> Option<Stall> {
        let mut stall = Stall {
            sent: 0.0,
            acknowledged: 0.0,
            timeouts: 0.0,
        };
        // Kernels before 6.7 do not count timeouts by connection.
        let anywhere = self.host("TcpExt.TCPTimeouts").unwrap_or(0.0);
        for flow in &self.map.flows {
            let of = |name| self.tcp(flow, name);
            let timeouts = of(metric::TCP_TIMEOUTS).unwrap_or(anywhere);
            if timeouts < 1.0 || of(metric::TCP_RETRANS).unwrap_or(0.0) < 1.0 {
                continue;
            }
            stall.sent += of(metric::TCP_BYTES_SENT).unwrap_or(0.0);
            stall.acknowledged += of(metric::TCP_BYTES_ACKED).unwrap_or(0.0);
            stall.timeouts += timeouts;
        }
        let nothing = stall.acknowledged < STALLED * stall.sent;
        (stall.sent > 0.0 && nothing).then_some(stall)
    }

    /// Returns the packets received with a wrong checksum, and all checked packets (TCP and UDP,
    /// both IP versions).
    pub fn damaged(&self) -> Option<(f64, f64)> {
        let tcp = self.host("Tcp.InCsumErrors");
        let udp = self.both("Udp", "InCsumErrors");
        if tcp.is_none() && udp.is_none() {
            return None;
        }
        let damaged = tcp.unwrap_or(0.0) + udp.unwrap_or(0.0);
        let good =
            self.host("Tcp.InSegs").unwrap_or(0.0) + self.both("Udp", "InDatagrams").unwrap_or(0.0);
        Some((damaged, damaged + good))
    }

    /// Returns the received frames per packet of IP: above 1 if receive offloads merge.
    pub fn gro_factor(&self) -> Option<f64> {
        let packets = self.both("Ip", "InReceives").filter(|n| *n > 0.0)?;
        let four = ["InNoECTPkts", "InECT0Pkts", "InECT1Pkts", "InCEPkts"];
        let of = |protocol: &str| -> f64 {
            let names = four.iter().map(|field| format!("{protocol}.{field}"));
            names.filter_map(|name| self.host(&name)).sum()
        };
        let frames = of("IpExt") + of("Ip6");
        (frames > 0.0).then(|| frames / packets)
    }

    /// Returns the shortest round-trip time through the tunnel, microseconds: of a probe without
    /// load, or the minimum of all connections.
    pub fn shortest_rtt_us(&self) -> Option<f64> {
        let flows = self.map.flows.iter();
        let seen = flows.filter_map(|flow| self.min_rtt_us(flow));
        self.probes.idle_rtt_us.or_else(|| seen.reduce(f64::min))
    }

    /// Returns the shortest round-trip time of a connection, microseconds.
    pub fn min_rtt_us(&self, flow: &SocketFacts) -> Option<f64> {
        let column = self.column(&Subject::Tcp(flow.inode), metric::TCP_MIN_RTT_US)?;
        let least = column.points.iter().map(|(_, value)| *value).min()? as f64;
        (least > 0.0 && least < NO_RTT_US).then_some(least)
    }

    /// Returns the segments that this host dropped between TCP and the wire: of the tunnel's own
    /// packets only, or also of those inside it.
    pub(crate) fn dropped_sending(&self, inner_too: bool) -> f64 {
        let inner = self.map.inner.as_deref();
        let links = self.map.links.iter();
        let links = links.filter(|link| inner_too || Some(&*link.name) != inner);
        let at_links: f64 = links
            .map(|link| {
                let lost = self.link(&link.name, metric::TX_DROPPED).unwrap_or(0.0);
                let lost = lost + self.qdisc(&link.name, metric::QDISC_DROPS).unwrap_or(0.0);
                lost * self.segments_per_packet(&link.name, link.mtu)
            })
            .sum();
        let udp = self.both("Udp", "SndbufErrors").unwrap_or(0.0);
        at_links + udp
    }

    /// Returns the packets that this host dropped between the wire and TCP.
    pub(crate) fn dropped_receiving(&self) -> f64 {
        let sockets = self.program_sockets(Transport::Udp, metric::UDP_DROPS);
        let errors = self.both("Udp", "RcvbufErrors");
        // Both count the same datagrams.
        let udp = sockets.unwrap_or(0.0).max(errors.unwrap_or(0.0));
        // Interfaces also count drops of the queue of received packets.
        let counted = |name| self.inner(name).unwrap_or(0.0);
        let dropped = counted(metric::RX_DROPPED).max(self.backlog_drops().unwrap_or(0.0));
        let inner = dropped + counted(metric::RX_ERRORS);
        let damaged = self.damaged().map_or(0.0, |(damaged, _)| damaged);
        udp + inner + damaged
    }

    /// A dropped super-packet loses all its segments.
    fn segments_per_packet(&self, link: &str, mtu: u32) -> f64 {
        let of = |name| self.link(link, name).unwrap_or(0.0);
        let mean = of(metric::TX_BYTES) / of(metric::TX_PACKETS).max(1.0);
        (mean / f64::from(mtu.max(1))).max(1.0)
    }
}

#[cfg(test)]
pub(crate) mod made {
    //! Hosts that send or receive over TCP.

    use super::*;
    use crate::rules::testing::*;

    /// The connection through the tunnel.
    pub fn flow() -> Subject {
        Subject::Tcp(2)
    }

    /// Returns the evidence of a sender of this many segments in ten seconds, with this many
    /// retransmissions, some of them unnecessary.
    pub fn sender(segments: u64, again: u64, spurious: u64) -> Evidence {
        let mut evidence = tunnel();
        let bytes = 1448 * segments;
        for (name, growth) in [
            (metric::TCP_SEGS_OUT, segments),
            (metric::TCP_RETRANS, again),
            (metric::TCP_DSACK_DUPS, spurious),
            (metric::TCP_BYTES_SENT, bytes),
            (metric::TCP_BYTES_ACKED, bytes - 1448 * again),
            (metric::TCP_BYTES_RECEIVED, 0),
            (metric::TCP_BUSY_US, 10_000_000),
        ] {
            count(&mut evidence, flow(), name, growth);
        }
        gauge(&mut evidence, flow(), metric::TCP_MSS, 1448);
        count(&mut evidence, inner(), metric::TX_PACKETS, segments);
        count(&mut evidence, inner(), metric::TX_BYTES, 1500 * segments);
        count(&mut evidence, inner(), metric::RX_PACKETS, segments / 2);
        count(&mut evidence, inner(), metric::RX_BYTES, 26 * segments);
        evidence
    }

    /// Returns the evidence of a receiver of this many segments, of which some came out of order
    /// and some twice.
    pub fn receiver(segments: u64, early: u64, twice: u64) -> Evidence {
        let mut evidence = tunnel();
        for (name, growth) in [
            (metric::TCP_SEGS_OUT, segments / 2),
            (metric::TCP_RETRANS, 0),
            (metric::TCP_BYTES_SENT, 0),
            (metric::TCP_BYTES_RECEIVED, 1448 * segments),
        ] {
            count(&mut evidence, flow(), name, growth);
        }
        for (name, growth) in [
            ("Tcp.InSegs", segments),
            ("TcpExt.TCPOFOQueue", early),
            ("TcpExt.TCPDSACKOldSent", twice),
        ] {
            count(&mut evidence, Subject::Host, name, growth);
        }
        count(&mut evidence, inner(), metric::RX_PACKETS, segments);
        count(&mut evidence, inner(), metric::RX_BYTES, 1500 * segments);
        evidence
    }

    #[test]
    fn a_transfer_without_trouble_finds_no_cause() {
        for evidence in [sender(100_000, 5, 0), receiver(100_000, 20, 0)] {
            let verdict = crate::diagnose(&evidence);
            assert_eq!(
                (verdict.cause, verdict.alternatives),
                (crate::Cause::Healthy, vec![])
            );
        }
    }

    #[test]
    fn local_drops_are_not_lost_elsewhere() {
        let mut evidence = sender(10_000, 500, 100);
        count(&mut evidence, inner(), metric::TX_DROPPED, 300);
        let losses = evidence.inner_losses().expect("a sender");
        assert_eq!((losses.lost(), losses.elsewhere()), (0.04, 0.01));
    }

    #[test]
    fn drops_of_another_namespace_are_no_loss_of_this_host() {
        let mut evidence = receiver(10_000, 0, 0);
        count(
            &mut evidence,
            Subject::Cpu(0),
            metric::SOFTNET_DROPPED,
            5_000,
        );
        assert_eq!(evidence.dropped_receiving(), 0.0);
        let mut evidence = sender(10_000, 500, 0);
        count(
            &mut evidence,
            Subject::Cpu(0),
            metric::SOFTNET_DROPPED,
            5_000,
        );
        assert_eq!(evidence.inner_losses().expect("a sender").elsewhere(), 0.05);
    }

    #[test]
    fn a_dropped_super_packet_counts_for_all_its_segments() {
        let mut evidence = sender(10_000, 500, 0);
        count(&mut evidence, inner(), metric::TX_PACKETS, 250);
        count(&mut evidence, inner(), metric::TX_DROPPED, 10);
        let losses = evidence.inner_losses().expect("a sender");
        assert_eq!(losses.here, 400.0);
    }

    #[test]
    fn a_receiver_has_no_losses() {
        assert_eq!(receiver(10_000, 0, 0).inner_losses(), None);
        assert!(receiver(10_000, 0, 0).arrivals().is_some());
        assert_eq!(sender(10_000, 0, 0).arrivals(), None);
    }

    #[test]
    fn a_lossy_connection_is_not_stalled() {
        let mut evidence = sender(1_000, 300, 0);
        count(&mut evidence, flow(), metric::TCP_TIMEOUTS, 5);
        assert_eq!(evidence.stalled(), None);
        count(&mut evidence, flow(), metric::TCP_BYTES_ACKED, 1_000);
        assert_eq!(evidence.stalled().map(|stall| stall.timeouts), Some(5.0));
    }

    #[test]
    fn merged_frames_are_counted_once_by_ip() {
        let mut evidence = tunnel();
        count(&mut evidence, Subject::Host, "Ip.InReceives", 100);
        count(&mut evidence, Subject::Host, "IpExt.InNoECTPkts", 1_000);
        count(&mut evidence, Subject::Host, "IpExt.InECT0Pkts", 200);
        assert_eq!(evidence.gro_factor(), Some(12.0));
    }
}
