//! Segmentation of super-packets: the packets that the kernel's own segmentation would have put on
//! the wire.
//!
//! The TUN device delivers TCP and UDP super-packets with a virtio-net header (TSO, USO). A
//! [`SuperPacket`] is such a read after validation. [`SuperPacket::segment`] writes any one of its
//! packets. Rules: Linux `net/ipv4/tcp_offload.c` (`tcp_gso_segment`) and `net/ipv4/udp_offload.c`
//! (`__udp_gso_segment`).

use seikan_observe::DropReason;
use seikan_wire::ip::{self, IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr, checksum, tcp, udp};

/// A validated read from the TUN device: one packet, or the segments of a super-packet.
#[derive(Clone, Copy, Debug)]
pub struct SuperPacket<'a> {
    /// The packet, trimmed to the length field of IP. In Ethernet mode it begins with the Ethernet
    /// header.
    pub bytes: &'a [u8],
    /// Offset of the IP header in `bytes`: 0, or the length of the Ethernet header.
    pub ip_at: usize,
    /// Its parsed header.
    pub ip: IpPacket,
    /// The transport checksum covers only the pseudo-header.
    pub partial: bool,
    /// TCP or UDP super-packet, or `None` for an ordinary packet.
    pub kind: Option<Transport>,
    /// The super-packet has CWR set (`VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
    /// Length of all headers in bytes, up to and including the transport header.
    pub header_len: usize,
    /// Payload bytes per segment; for an ordinary packet, all payload bytes.
    pub gso_size: usize,
}

/// The transports that have super-packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TSO.
    Tcp,
    /// USO.
    Udp,
}

impl Transport {
    /// Offset of the checksum field in the transport header.
    pub fn checksum_at(self) -> usize {
        match self {
            Transport::Tcp => tcp::CHECKSUM_AT,
            Transport::Udp => udp::CHECKSUM_AT,
        }
    }
}

impl<'a> SuperPacket<'a> {
    /// Validates a read of the TUN device: virtio-net header, then packet.
    ///
    /// The kernel's header fields are not relied on: `hdr_len` is not always filled in, so the
    /// headers themselves are parsed.
    pub fn parse(read: &'a [u8]) -> Result<SuperPacket<'a>, DropReason> {
        SuperPacket::parse_at(read, 0)
    }

    /// Parses a read of a TAP device likewise. The IP header is at `ip_at` in the Ethernet frame.
    #[inline]
    pub fn parse_at(read: &'a [u8], ip_at: usize) -> Result<SuperPacket<'a>, DropReason> {
        let vnet = VnetHdr::read(read).map_err(|_| DropReason::BadOffload)?;
        let bytes = &read[VNET_HDR_LEN..];
        let ip = bytes.get(ip_at..).ok_or(DropReason::NotIp)?;
        let ip = IpPacket::parse(ip).map_err(|_| DropReason::NotIp)?;
        let bytes = &bytes[..ip_at + ip.total_len];
        let transport_at = ip_at + ip.header_len;
        let kind = match vnet.gso_type {
            GsoType::None => None,
            GsoType::Tcp4 if ip.protocol == PROTO_TCP && !ip.is_v6() => Some(Transport::Tcp),
            GsoType::Tcp6 if ip.protocol == PROTO_TCP && ip.is_v6() => Some(Transport::Tcp),
            GsoType::UdpL4 if ip.protocol == PROTO_UDP => Some(Transport::Udp),
            _ => return Err(DropReason::BadOffload),
        };
        let mut packet = SuperPacket {
            bytes,
            ip_at,
            ip,
            partial: vnet.needs_csum,
            kind: None,
            ecn: vnet.gso_ecn,
            header_len: transport_at,
            gso_size: bytes.len() - transport_at,
        };
        if vnet.needs_csum {
            // A partial checksum must be at the transport's own offset, because segments and slices
            // derive the offset from the headers.
            let at = match ip.protocol {
                PROTO_TCP => tcp::CHECKSUM_AT,
                PROTO_UDP => udp::CHECKSUM_AT,
                _ => return Err(DropReason::BadOffload),
            };
            let start = usize::from(vnet.csum_start);
            if start != transport_at
                || usize::from(vnet.csum_offset) != at
                || start + at + 2 > bytes.len()
            {
                return Err(DropReason::BadOffload);
            }
        }
        let Some(kind) = kind else {
            return Ok(packet);
        };
        let transport = match kind {
            Transport::Tcp => tcp::header_len(&bytes[transport_at..]),
            Transport::Udp => {
                (bytes.len() - transport_at > udp::HEADER_LEN).then_some(udp::HEADER_LEN)
            }
        };
        packet.header_len += transport.ok_or(DropReason::BadOffload)?;
        let payload = bytes.len() - packet.header_len;
        let gso_size = usize::from(vnet.gso_size);
        if gso_size == 0 || ip.fragment || !vnet.needs_csum {
            return Err(DropReason::BadOffload);
        }
        if payload > gso_size {
            packet.kind = Some(kind);
            packet.gso_size = gso_size;
        } else {
            packet.header_len = transport_at;
        }
        Ok(packet)
    }

    /// The payload after the headers.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.header_len..]
    }

    /// Number of packets in this read.
    pub fn segments(&self) -> usize {
        match self.kind {
            None => 1,
            Some(_) => self.payload().len().div_ceil(self.gso_size),
        }
    }

    /// Length in bytes of segment `i`.
    pub fn segment_len(&self, i: usize) -> usize {
        match self.kind {
            None => self.bytes.len(),
            Some(_) => {
                self.header_len + self.gso_size.min(self.payload().len() - i * self.gso_size)
            }
        }
    }

    /// Writes segment `i` to `out[..segment_len(i)]`. Its transport checksum is complete or, with
    /// `partial`, covers the pseudo-header only.
    pub fn segment(&self, i: usize, partial: bool, out: &mut [u8]) {
        let length = self.segment_len(i);
        let out = &mut out[..length];
        let Some(kind) = self.kind else {
            out.copy_from_slice(self.bytes);
            if self.partial && !partial {
                complete_checksum(&mut out[self.ip_at..], &self.ip);
            }
            return;
        };
        let from = i * self.gso_size;
        let payload = &self.payload()[from..from + length - self.header_len];
        out[self.header_len..].copy_from_slice(payload);
        let header = &mut out[..self.header_len];
        header.copy_from_slice(&self.bytes[..self.header_len]);
        let last = i + 1 == self.segments();
        rewrite_header(
            &mut header[self.ip_at..],
            &self.ip,
            kind,
            SegmentPosition {
                offset: from,
                index: i as u16,
                length: length - self.ip_at,
                last,
            },
        );
        if !partial {
            complete_checksum(&mut out[self.ip_at..], &self.ip);
        }
    }
}

/// Position of a segment, or of a run of segments, in its super-packet.
#[derive(Clone, Copy, Debug)]
pub struct SegmentPosition {
    /// Payload bytes before it.
    pub offset: usize,
    /// Number of segments before it.
    pub index: u16,
    /// Its own length, from the IP header on.
    pub length: usize,
    /// Whether it contains the last byte of the super-packet.
    pub last: bool,
}

/// Turns the headers of a super-packet, from the IP header on, into the headers of one part of it.
/// The checksum field covers the pseudo-header only.
///
/// FIN and PSH belong to the last segment, CWR to the first (RFC 3168 section 6.1.2). The IPv4
/// identification is consecutive, as in the kernel's segmentation.
pub fn rewrite_header(
    header: &mut [u8],
    packet: &IpPacket,
    kind: Transport,
    position: SegmentPosition,
) {
    let id = u16::from_be_bytes([header[4], header[5]]).wrapping_add(position.index);
    ip::set_length(
        header,
        packet.header_len,
        position.length,
        Some(id).filter(|_| !packet.is_v6()),
    );
    let (_, transport) = header.split_at_mut(packet.header_len);
    let protocol = match kind {
        Transport::Tcp => {
            tcp::set_seq(
                transport,
                tcp::seq(transport).wrapping_add(position.offset as u32),
            );
            if position.offset != 0 {
                transport[13] &= !tcp::CWR;
            }
            if !position.last {
                transport[13] &= !(tcp::FIN | tcp::PSH);
            }
            PROTO_TCP
        }
        Transport::Udp => {
            let length = (position.length - packet.header_len) as u16;
            transport[4..6].copy_from_slice(&length.to_be_bytes());
            PROTO_UDP
        }
    };
    let length = position.length - packet.header_len;
    let pseudo = checksum::pseudo_header(packet.src, packet.dst, protocol, length);
    let at = kind.checksum_at();
    transport[at..at + 2].copy_from_slice(&checksum::add_carries(pseudo).to_be_bytes());
}

/// Number of packets in a read, in either mode; one if it cannot be parsed.
pub fn packets_in(read: &[u8]) -> u64 {
    let Ok(vnet) = VnetHdr::read(read) else {
        return 1;
    };
    let transport = read.get(VNET_HDR_LEN + usize::from(vnet.csum_start)..);
    let (Some(transport), gso_size @ 1..) = (transport, usize::from(vnet.gso_size)) else {
        return 1;
    };
    // The kernel does not always fill in the length of the headers.
    let header_len = match vnet.gso_type {
        GsoType::Tcp4 | GsoType::Tcp6 => tcp::header_len(transport),
        GsoType::UdpL4 => Some(udp::HEADER_LEN),
        _ => None,
    };
    let payload = header_len.and_then(|length| transport.len().checked_sub(length));
    payload.map_or(1, |payload| payload.div_ceil(gso_size).max(1) as u64)
}

/// Completes the checksum that the virtio-net header of a read asks for, in a frame of whatever
/// protocol, and clears the request: several peers may get the same frame. Super-packets cannot be
/// completed.
pub fn complete_any_checksum(read: &mut [u8]) -> Result<(), DropReason> {
    let vnet = VnetHdr::read(read).map_err(|_| DropReason::BadOffload)?;
    if vnet.gso_type != GsoType::None {
        return Err(DropReason::BadOffload);
    }
    if !vnet.needs_csum {
        return Ok(());
    }
    let start = VNET_HDR_LEN + usize::from(vnet.csum_start);
    let at = usize::from(vnet.csum_offset);
    let covered = read.get_mut(start..).ok_or(DropReason::BadOffload)?;
    let check = checksum::fold(checksum::sum(covered)).to_be_bytes();
    let field = covered.get_mut(at..at + 2).ok_or(DropReason::BadOffload)?;
    field.copy_from_slice(&check);
    read[..VNET_HDR_LEN].copy_from_slice(&VnetHdr::default().to_bytes());
    Ok(())
}

/// Completes a transport checksum that covers the pseudo-header only.
///
/// The packet ends where `packet` ends. Packets of other protocols than TCP and UDP stay unchanged.
pub fn complete_checksum(packet: &mut [u8], ip: &IpPacket) {
    let at = match ip.protocol {
        PROTO_TCP => tcp::CHECKSUM_AT,
        PROTO_UDP => udp::CHECKSUM_AT,
        _ => return,
    };
    let Some(transport) = packet.get_mut(ip.header_len..) else {
        return;
    };
    if transport.len() < at + 2 {
        return;
    }
    let mut check = checksum::fold(checksum::sum(transport));
    if ip.protocol == PROTO_UDP {
        check = udp::on_wire(check);
    }
    transport[at..at + 2].copy_from_slice(&check.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TCP/IPv4 super-packet as the kernel delivers it: FIN|PSH|ACK|CWR, checksum of the
    /// pseudo-header only.
    pub(crate) fn tso4(payload: usize, gso_size: u16) -> Vec<u8> {
        let mut p = vec![0; 40 + payload];
        p[0] = 0x45;
        p[4..6].copy_from_slice(&100u16.to_be_bytes());
        p[6] = 0x40;
        p[8] = 64;
        p[9] = 6;
        p[12..20].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        p[20..24].copy_from_slice(&[0x1f, 0x90, 0x00, 0x50]);
        tcp::set_seq(&mut p[20..], u32::MAX - 999);
        p[32] = 0x50;
        p[33] = tcp::FIN | tcp::PSH | tcp::ACK | tcp::CWR;
        for (i, b) in p[40..].iter_mut().enumerate() {
            *b = (i * 7) as u8;
        }
        ip::set_length(&mut p, 20, 40 + payload, None);
        let vnet = VnetHdr {
            needs_csum: true,
            gso_type: GsoType::Tcp4,
            gso_ecn: true,
            hdr_len: 40,
            gso_size,
            csum_start: 20,
            csum_offset: 16,
        };
        [vnet.to_bytes().to_vec(), p].concat()
    }

    fn tcp_checksum_ok(packet: &[u8]) -> bool {
        let ip = IpPacket::parse(packet).unwrap();
        let pseudo =
            checksum::pseudo_header(ip.src, ip.dst, ip.protocol, ip.total_len - ip.header_len);
        checksum::fold(pseudo + checksum::sum(&packet[ip.header_len..])) == 0
    }

    #[test]
    fn tcp_segments_are_those_that_the_kernel_would_send() {
        let read = tso4(2500, 1000);
        let sp = SuperPacket::parse(&read).unwrap();
        assert_eq!(sp.segments(), 3);
        let mut flags = Vec::new();
        for i in 0..3 {
            let mut out = vec![0; sp.segment_len(i)];
            sp.segment(i, false, &mut out);
            let ip = IpPacket::parse(&out).unwrap();
            assert_eq!(ip.total_len, [1040, 1040, 540][i]);
            assert_eq!(out[4..6], (100 + i as u16).to_be_bytes());
            assert_eq!(
                tcp::seq(&out[20..]),
                (u32::MAX - 999).wrapping_add(1000 * i as u32)
            );
            assert_eq!(
                out[40..],
                read[10 + 40 + 1000 * i..10 + ip.total_len + 1000 * i]
            );
            assert_eq!(checksum::fold(checksum::sum(&out[..20])), 0);
            assert!(tcp_checksum_ok(&out));
            flags.push(tcp::flags(&out[20..]));
        }
        let ack = tcp::ACK;
        assert_eq!(flags, [ack | tcp::CWR, ack, ack | tcp::FIN | tcp::PSH]);
    }

    #[test]
    fn an_ordinary_packet_gets_its_checksum_completed() {
        let mut read = tso4(700, 1000);
        let sp = SuperPacket::parse(&read).unwrap();
        assert_eq!((sp.segments(), sp.kind), (1, None));
        let pseudo = checksum::pseudo_header(sp.ip.src, sp.ip.dst, 6, 720);
        read[10 + 36..10 + 38].copy_from_slice(&checksum::add_carries(pseudo).to_be_bytes());
        let mut out = vec![0; 740];
        SuperPacket::parse(&read)
            .unwrap()
            .segment(0, false, &mut out);
        assert!(tcp_checksum_ok(&out));
    }

    #[test]
    fn headers_that_contradict_the_packet_are_refused() {
        let good = tso4(2500, 1000);
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut read = good.clone();
            change(&mut read);
            SuperPacket::parse(&read).err()
        };
        assert_eq!(refused(|r| r[4..6].fill(0)), Some(DropReason::BadOffload)); // gso_size 0
        assert_eq!(refused(|r| r[1] = 4), Some(DropReason::BadOffload)); // TCPv6 over IPv4
        assert_eq!(refused(|r| r[6] = 21), Some(DropReason::BadOffload)); // csum_start
        assert_eq!(refused(|r| r[10 + 32] = 0xf0), None); // 60-byte TCP header: fits
        assert_eq!(refused(|r| r[10 + 32] = 0x40), Some(DropReason::BadOffload));
        assert_eq!(refused(|r| r[10] = 0x00), Some(DropReason::NotIp));
        assert_eq!(refused(|r| r.truncate(9)), Some(DropReason::BadOffload));
    }

    #[test]
    fn a_checksum_is_completed_once_for_all_peers() {
        let vnet = VnetHdr {
            needs_csum: true,
            csum_start: 20,
            csum_offset: 6,
            ..VnetHdr::default()
        };
        let mut read = vec![7; VNET_HDR_LEN + 40];
        read[..VNET_HDR_LEN].copy_from_slice(&vnet.to_bytes());
        complete_any_checksum(&mut read).unwrap();
        let once = read.clone();
        assert_ne!(once[VNET_HDR_LEN + 26..][..2], [7, 7]);
        complete_any_checksum(&mut read).unwrap();
        assert_eq!(read, once);
    }
}
