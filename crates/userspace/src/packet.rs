//! Packets of the device: classifies and checks received packets, builds and completes packets to
//! send.

use crate::sender::{Range, Sent};
use seikan_observe::DropReason;
use seikan_wire::ip::{PROTO_TCP, PROTO_UDP};
use seikan_wire::{GsoType, IpPacket, VNET_HDR_LEN, VnetHdr, checksum, icmp, tcp, udp};
use std::net::{IpAddr, SocketAddr};

/// Hop limit of packets that are built here; smoltcp uses the same.
const HOP_LIMIT: u8 = 64;

/// Both ends of a flow, as seen from the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlowKey {
    /// Address and port of this host inside the tunnel.
    pub local: SocketAddr,
    /// Address and port of the far end.
    pub remote: SocketAddr,
}

/// A packet from the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Inbound {
    /// Start of the transport header, from the first byte of the IP packet.
    pub transport_at: usize,
    /// End of the IP packet.
    pub end: usize,
    /// Kind of the packet.
    pub kind: Kind,
}

/// Kinds of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A TCP segment.
    Tcp {
        /// Its flow.
        flow: FlowKey,
        /// Whether it opens a connection: SYN without ACK.
        opens: bool,
    },
    /// UDP datagrams of one flow.
    Udp {
        /// Their flow.
        flow: FlowKey,
        /// Payload bytes of each datagram but the last.
        size: usize,
    },
    /// An ICMP error about a packet of this host.
    Error {
        /// Its transport protocol.
        protocol: u8,
        /// Its flow.
        flow: FlowKey,
        /// Its sequence number, if it is a TCP segment.
        seq: u32,
        /// Whether a port is unreachable, not a host or network.
        is_port: bool,
    },
    /// Anything else, such as a ping.
    Other,
}

/// Classifies `packet`, an IP packet with the virtio-net header `vnet`. `is_local` returns whether
/// an address is one of this host.
///
/// # Errors
/// The reason for which the packet must be dropped.
pub(crate) fn classify(
    vnet: &VnetHdr,
    packet: &[u8],
    is_local: impl Fn(IpAddr) -> bool,
) -> Result<Inbound, DropReason> {
    let ip = IpPacket::parse(packet).map_err(|_| DropReason::NotIp)?;
    let packet = &packet[..ip.total_len];
    if !is_local(ip.dst) {
        return Err(DropReason::NotAddressed);
    }
    if ip.fragment {
        return Err(DropReason::Fragment);
    }
    let (protocol, at) = ip
        .transport(packet)
        .ok()
        .flatten()
        .ok_or(DropReason::TransportTruncated)?;
    let segment = &packet[at..];
    let kind = match protocol {
        PROTO_TCP | PROTO_UDP => {
            let flow = flow(&ip, segment).ok_or(DropReason::TransportTruncated)?;
            if !vnet.needs_csum {
                verify(&ip, protocol, segment)?;
            }
            if protocol == PROTO_TCP {
                tcp_kind(flow, segment)?
            } else {
                udp_kind(flow, segment, vnet)?
            }
        }
        _ => error_kind(&ip, packet).unwrap_or(Kind::Other),
    };
    Ok(Inbound {
        transport_at: at,
        end: ip.total_len,
        kind,
    })
}

fn flow(ip: &IpPacket, segment: &[u8]) -> Option<FlowKey> {
    let &[s0, s1, d0, d1, ..] = segment else {
        return None;
    };
    Some(FlowKey {
        local: SocketAddr::new(ip.dst, u16::from_be_bytes([d0, d1])),
        remote: SocketAddr::new(ip.src, u16::from_be_bytes([s0, s1])),
    })
}

/// Checks the transport checksum. The worker has verified only the packets that it passes on with a
/// partial checksum.
fn verify(ip: &IpPacket, protocol: u8, segment: &[u8]) -> Result<(), DropReason> {
    if protocol == PROTO_UDP && segment.len() >= udp::HEADER_LEN && udp::checksum(segment) == 0 {
        // A checksum of 0 means "none" over IPv4. It is not permitted over IPv6 (RFC 8200 section
        // 8.1).
        return if ip.is_v6() {
            Err(DropReason::BadChecksum)
        } else {
            Ok(())
        };
    }
    let sum = checksum::pseudo_header(ip.src, ip.dst, protocol, segment.len());
    match checksum::fold(sum + checksum::sum(segment)) {
        0 => Ok(()),
        _ => Err(DropReason::BadChecksum),
    }
}

fn tcp_kind(flow: FlowKey, segment: &[u8]) -> Result<Kind, DropReason> {
    tcp::header_len(segment).ok_or(DropReason::TransportTruncated)?;
    Ok(Kind::Tcp {
        flow,
        opens: tcp::flags(segment) & (tcp::SYN | tcp::ACK | tcp::RST) == tcp::SYN,
    })
}

fn udp_kind(flow: FlowKey, segment: &[u8], vnet: &VnetHdr) -> Result<Kind, DropReason> {
    if segment.len() < udp::HEADER_LEN {
        return Err(DropReason::TransportTruncated);
    }
    let size = match vnet.gso_type {
        GsoType::UdpL4 if vnet.gso_size > 0 => vnet.gso_size.into(),
        GsoType::None => usize::MAX,
        _ => return Err(DropReason::BadOffload),
    };
    Ok(Kind::Udp { flow, size })
}

fn error_kind(ip: &IpPacket, packet: &[u8]) -> Option<Kind> {
    let at = icmp::quote(ip, packet)?;
    let &[kind, code, ..] = packet.get(at - icmp::HEADER_LEN..)? else {
        return None;
    };
    let quoted = packet.get(at..)?;
    let sent = IpPacket::parse_headers(quoted).ok()?;
    let (protocol, transport_at) = sent.transport(quoted).ok().flatten()?;
    let unreachable = if ip.is_v6() { 1 } else { 3 };
    let too_big = !ip.is_v6() && code == 4;
    if sent.src != ip.dst || kind != unreachable || too_big {
        return None;
    }
    // At least eight bytes are quoted (RFC 792).
    let &[s0, s1, d0, d1, q0, q1, q2, q3, ..] = quoted.get(transport_at..)? else {
        return None;
    };
    Some(Kind::Error {
        protocol,
        flow: FlowKey {
            local: SocketAddr::new(sent.src, u16::from_be_bytes([s0, s1])),
            remote: SocketAddr::new(sent.dst, u16::from_be_bytes([d0, d1])),
        },
        seq: u32::from_be_bytes([q0, q1, q2, q3]),
        is_port: code == if ip.is_v6() { 4 } else { 3 },
    })
}

/// Returns the ranges of the datagrams in a UDP payload of `length` bytes, `size` bytes each except
/// the last.
pub(crate) fn datagrams(
    length: usize,
    size: usize,
) -> impl Iterator<Item = std::ops::Range<usize>> {
    let size = size.max(1);
    let count = length.div_ceil(size).max(1);
    (0..count).map(move |i| i * size..length.min((i + 1).saturating_mul(size)))
}

/// Writes a virtio-net header and the IP packet of a UDP datagram to `out`, with a partial
/// checksum, as the kernel does.
///
/// # Errors
/// [`DropReason::TooBig`] if it exceeds `mtu`: the stack does not fragment.
pub(crate) fn build_udp(
    flow: &FlowKey,
    payload: &[u8],
    mtu: usize,
    out: &mut Vec<u8>,
) -> Result<(), DropReason> {
    let ip_len = if flow.local.is_ipv6() { 40 } else { 20 };
    let udp_len = udp::HEADER_LEN + payload.len();
    if ip_len + udp_len > mtu {
        return Err(DropReason::TooBig);
    }
    let vnet = VnetHdr {
        needs_csum: true,
        csum_start: ip_len as u16,
        csum_offset: udp::CHECKSUM_AT as u16,
        ..VnetHdr::default()
    };
    out.clear();
    out.extend(vnet.to_bytes());
    out.extend(ip_header(
        flow.local.ip(),
        flow.remote.ip(),
        PROTO_UDP,
        udp_len,
    ));
    let (local, remote) = (flow.local, flow.remote);
    let pseudo = checksum::pseudo_header(local.ip(), remote.ip(), PROTO_UDP, udp_len);
    out.extend(local.port().to_be_bytes());
    out.extend(remote.port().to_be_bytes());
    out.extend((udp_len as u16).to_be_bytes());
    out.extend(checksum::add_carries(pseudo).to_be_bytes());
    out.extend(payload);
    Ok(())
}

/// Returns the IP header of a packet from the far end of a flow, with `length` bytes after it.
pub(crate) fn inbound_header(flow: &FlowKey, protocol: u8, length: usize) -> Vec<u8> {
    ip_header(flow.remote.ip(), flow.local.ip(), protocol, length)
}

/// Returns a TCP segment without payload to the far end of a flow, preceded by space for the
/// device's header.
pub(crate) fn empty_segment(flow: &FlowKey, seq: u32, ack: u32, window: u16) -> Vec<u8> {
    const LEN: usize = 20;
    let mut packet = vec![0; VNET_HDR_LEN];
    let (local, remote) = (flow.local, flow.remote);
    packet.extend(ip_header(local.ip(), remote.ip(), PROTO_TCP, LEN));
    packet.extend(local.port().to_be_bytes());
    packet.extend(remote.port().to_be_bytes());
    packet.extend(seq.to_be_bytes());
    packet.extend(ack.to_be_bytes());
    packet.extend([5 << 4, tcp::ACK]);
    packet.extend(window.to_be_bytes());
    packet.extend([0; 4]);
    packet
}

fn ip_header(from: IpAddr, to: IpAddr, protocol: u8, length: usize) -> Vec<u8> {
    let mut header = Vec::with_capacity(40);
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            // With Don't Fragment set, an identification of 0 is permitted (RFC 6864).
            header.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, HOP_LIMIT, protocol, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
        }
        (from, to) => {
            let octets = |address| match address {
                IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                IpAddr::V6(address) => address.octets(),
            };
            header.extend([0x60, 0, 0, 0, 0, 0, protocol, HOP_LIMIT]);
            header.extend(octets(from));
            header.extend(octets(to));
        }
    }
    let header_len = header.len();
    seikan_wire::ip::set_length(&mut header, header_len, header_len + length, None);
    header
}

/// Completes a packet that smoltcp has written behind [`VNET_HDR_LEN`] bytes of `buf`: lowers the
/// MSS of a SYN to what fits `mtu`, writes the partial checksum of TCP, and describes a segment of
/// more than `mss` bytes as a super-packet. Returns the sequence numbers of the segment; `None` if
/// the packet is not TCP.
pub(crate) fn complete(buf: &mut [u8], mtu: usize, mss: u16) -> Option<Sent> {
    let completed = complete_tcp(&mut buf[VNET_HDR_LEN..], mtu, mss);
    let (vnet, sent) = match completed {
        Some(completed) => (completed.vnet, Some(completed.sent)),
        None => (VnetHdr::default(), None),
    };
    buf[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
    sent
}

/// Returns a copy of a packet with its header, in which the TCP segment is reduced to the sequence
/// numbers `piece`.
pub(crate) fn cut(packet: &[u8], piece: Range) -> Vec<u8> {
    let whole = &packet[VNET_HDR_LEN..];
    let (Ok(ip), (start, end)) = (IpPacket::parse(whole), piece) else {
        return packet.to_vec();
    };
    let segment = &whole[ip.header_len..ip.total_len];
    let header_len = tcp::header_len(segment).unwrap_or(segment.len());
    let payload = &segment[header_len..];
    let first = tcp::seq(segment);
    let from = (start.wrapping_sub(first) as usize).min(payload.len());
    let to = (end.wrapping_sub(first) as usize).min(payload.len());
    let mut cut = packet[..VNET_HDR_LEN + ip.header_len + header_len].to_vec();
    cut.extend(&payload[from..to]);
    let header = &mut cut[VNET_HDR_LEN + ip.header_len..];
    tcp::set_seq(header, start);
    // FIN occupies the sequence number after the payload.
    if end.wrapping_sub(first) as usize <= payload.len() {
        header[13] &= !tcp::FIN;
    }
    let total_len = cut.len() - VNET_HDR_LEN;
    seikan_wire::ip::set_length(&mut cut[VNET_HDR_LEN..], ip.header_len, total_len, None);
    cut
}

struct Completed {
    vnet: VnetHdr,
    sent: Sent,
}

fn complete_tcp(packet: &mut [u8], mtu: usize, mss: u16) -> Option<Completed> {
    let ip = IpPacket::parse(packet).ok()?;
    let at = ip.header_len;
    if ip.protocol != PROTO_TCP {
        return None;
    }
    let segment = &mut packet[at..ip.total_len];
    tcp::clamp_mss(segment, max_segment(mtu, ip.is_v6()), true);
    let pseudo = checksum::pseudo_header(ip.src, ip.dst, PROTO_TCP, segment.len());
    let field = tcp::CHECKSUM_AT..tcp::CHECKSUM_AT + 2;
    segment[field].copy_from_slice(&checksum::add_carries(pseudo).to_be_bytes());
    let header_len = tcp::header_len(segment)?;
    let mut vnet = VnetHdr {
        needs_csum: true,
        csum_start: at as u16,
        csum_offset: tcp::CHECKSUM_AT as u16,
        ..VnetHdr::default()
    };
    let payload = segment.len() - header_len;
    if payload > usize::from(mss) {
        vnet.gso_type = if ip.is_v6() {
            GsoType::Tcp6
        } else {
            GsoType::Tcp4
        };
        vnet.gso_size = mss;
        vnet.hdr_len = (at + header_len) as u16;
    }
    let flag = |flag: u8| u32::from(tcp::flags(segment) & flag != 0);
    let sent = Sent {
        seq: tcp::seq(segment),
        length: payload as u32 + flag(tcp::SYN) + flag(tcp::FIN),
        is_syn: flag(tcp::SYN) == 1,
    };
    Some(Completed { vnet, sent })
}

/// Returns the maximum TCP payload of a packet of `mtu` bytes without options (RFC 9293 section
/// 3.7.1).
pub(crate) fn max_segment(mtu: usize, is_v6: bool) -> u16 {
    let headers = if is_v6 { 60 } else { 40 };
    u16::try_from(mtu.saturating_sub(headers)).unwrap_or(u16::MAX)
}

/// Returns the MSS option of a SYN; without one, 536 bytes for IPv4 or 1220 for IPv6 (RFC 9293
/// section 3.7.1).
pub(crate) fn announced_mss(segment: &[u8], is_v6: bool) -> u16 {
    let default = if is_v6 { 1220 } else { 536 };
    let Some(length) = tcp::header_len(segment) else {
        return default;
    };
    let mut at = 20;
    while at + 1 < length {
        match segment[at] {
            0 => break,
            1 => at += 1,
            2 if segment[at + 1] == 4 && at + 4 <= length => {
                return u16::from_be_bytes([segment[at + 2], segment[at + 3]]);
            }
            _ if segment[at + 1] >= 2 => at += usize::from(segment[at + 1]),
            _ => break,
        }
    }
    default
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A datagram as it arrives: from the far end of the flow, with a whole checksum.
    fn arrived(payload: &[u8]) -> Vec<u8> {
        let flow = FlowKey {
            local: "10.9.0.2:53".parse().unwrap(),
            remote: "10.9.0.1:4000".parse().unwrap(),
        };
        let mut packet = Vec::new();
        build_udp(&flow, payload, 1420, &mut packet).unwrap();
        let segment = &mut packet[VNET_HDR_LEN + 20..];
        let check = udp::on_wire(checksum::fold(checksum::sum(segment)));
        segment[6..8].copy_from_slice(&check.to_be_bytes());
        packet.split_off(VNET_HDR_LEN)
    }

    fn kind(packet: &[u8], vnet: &VnetHdr) -> Result<Kind, DropReason> {
        let local: IpAddr = "10.9.0.1".parse().unwrap();
        classify(vnet, packet, |address| address == local).map(|inbound| inbound.kind)
    }

    fn plain(packet: &[u8]) -> Result<Kind, DropReason> {
        kind(packet, &VnetHdr::default())
    }

    #[test]
    fn datagrams_have_their_flow() {
        let flow = FlowKey {
            local: "10.9.0.1:4000".parse().unwrap(),
            remote: "10.9.0.2:53".parse().unwrap(),
        };
        let size = usize::MAX;
        assert_eq!(plain(&arrived(b"abc")), Ok(Kind::Udp { flow, size }));
        let merged = VnetHdr {
            needs_csum: true,
            gso_type: GsoType::UdpL4,
            gso_size: 2,
            ..VnetHdr::default()
        };
        let size = 2;
        assert_eq!(
            kind(&arrived(b"abc"), &merged),
            Ok(Kind::Udp { flow, size })
        );
        let ranges: Vec<_> = datagrams(5, 2).collect();
        assert_eq!(ranges, [0..2, 2..4, 4..5]);
    }

    #[test]
    fn an_error_message_of_one_byte_is_none() {
        let mut v4 = vec![0x45, 0, 0, 21, 0, 0, 0, 0, 64, 1, 0, 0];
        v4.extend([10, 9, 0, 2, 10, 9, 0, 1, 3]);
        let check = checksum::fold(checksum::sum(&v4[..20]));
        v4[10..12].copy_from_slice(&(!check).to_be_bytes());
        assert!(!matches!(plain(&v4), Ok(Kind::Error { .. })));
        let mut v6 = vec![0x60, 0, 0, 0, 0, 1, 58, 64];
        v6.extend("fd00::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
        v6.extend("fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        v6.push(1);
        let found = classify(&VnetHdr::default(), &v6, |_| true).map(|inbound| inbound.kind);
        assert!(!matches!(found, Ok(Kind::Error { .. })));
    }

    #[test]
    fn every_changed_byte_is_found_unless_the_worker_has_checked() {
        let good = arrived(b"abc");
        for at in 20..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            let checked = VnetHdr {
                needs_csum: true,
                ..VnetHdr::default()
            };
            assert_eq!(plain(&bad), Err(DropReason::BadChecksum), "{at}");
            assert!(kind(&bad, &checked).is_ok(), "{at}");
        }
    }

    #[test]
    fn packets_for_others_fragments_and_stumps_are_dropped() {
        let mut other = arrived(b"abc");
        other[19] = 9;
        assert_eq!(plain(&other), Err(DropReason::NotAddressed));
        let mut fragment = arrived(b"abc");
        fragment[6] = 0x20;
        assert_eq!(plain(&fragment), Err(DropReason::Fragment));
        let mut stump = arrived(b"")[..24].to_vec();
        stump[3] = 24;
        let checked = VnetHdr {
            needs_csum: true,
            ..VnetHdr::default()
        };
        assert_eq!(kind(&stump, &checked), Err(DropReason::TransportTruncated));
        assert_eq!(plain(&[0; 3]), Err(DropReason::NotIp));
    }

    /// A part of a segment has its own numbers and length, and FIN only at the end.
    #[test]
    fn a_part_is_cut_out_of_a_segment() {
        let flow = FlowKey {
            local: "10.9.0.1:4000".parse().unwrap(),
            remote: "10.9.0.2:53".parse().unwrap(),
        };
        let mut segment = vec![0; 20];
        segment[4..8].copy_from_slice(&100u32.to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = tcp::ACK | tcp::FIN;
        segment.extend(b"abcdef");
        let mut whole = vec![0; VNET_HDR_LEN];
        whole.extend(inbound_header(&flow, PROTO_TCP, segment.len()));
        whole.extend(&segment);
        for (piece, payload, fin) in [
            ((101, 103), &b"bc"[..], 0),
            ((104, 107), b"ef", tcp::FIN),
            ((106, 107), b"", tcp::FIN),
        ] {
            let mut part = cut(&whole, piece);
            let sent = complete(&mut part, 1420, 1380).unwrap();
            assert_eq!((sent.seq, sent.length), (piece.0, piece.1 - piece.0));
            let ip = IpPacket::parse(&part[VNET_HDR_LEN..]).unwrap();
            assert_eq!(VNET_HDR_LEN + ip.total_len, part.len());
            assert_eq!(&part[VNET_HDR_LEN + 40..], payload);
            assert_eq!(part[VNET_HDR_LEN + 33] & tcp::FIN, fin);
        }
    }

    proptest! {
        #[test]
        fn no_packet_panics(
            rest in prop::collection::vec(any::<u8>(), 0..120),
            protocol in prop::sample::select(vec![1, 6, 17, 58, 44]),
            is_v6 in any::<bool>(),
        ) {
            let mut packet = if is_v6 {
                let mut head = vec![0x60, 0, 0, 0, 0, rest.len() as u8, protocol, 64];
                head.extend([0xfd; 32]);
                head
            } else {
                let mut head = vec![0x45, 0, 0, 20 + rest.len() as u8, 0, 0, 0, 0, 64, protocol, 0, 0];
                head.extend([10, 9, 0, 2, 10, 9, 0, 1]);
                let check = !checksum::fold(checksum::sum(&head));
                head[10..12].copy_from_slice(&check.to_be_bytes());
                head
            };
            packet.extend(&rest);
            // The worker has verified the checksums.
            let checked = VnetHdr { needs_csum: true, ..VnetHdr::default() };
            for vnet in [VnetHdr::default(), checked] {
                let _ = classify(&vnet, &packet, |_| true);
            }
        }
    }
}
