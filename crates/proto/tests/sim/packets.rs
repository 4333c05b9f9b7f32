//! Packets that can be verified at the far end, however they were segmented, merged or rewritten.
//!
//! A UDP payload is `seq u32 | length u16 | pattern`. The byte of a TCP stream at position `p` is a
//! function of flow and `p`. A flow is identified by its source port.

use seikan_proto::segment::SuperPacket;
use seikan_wire::ip::{self, PROTO_TCP, PROTO_UDP};
use seikan_wire::{GsoType, IpPacket, VNET_HDR_LEN, VnetHdr, checksum, tcp, udp};
use std::collections::{BTreeMap, BTreeSet};

/// Sequence number of a stream's first byte; it wraps soon.
pub const ISN: u32 = 0xffff_f000;

/// One flow, from side to side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    pub from: usize,
    pub v6: bool,
    pub tcp: bool,
    pub number: u8,
}

impl Flow {
    pub fn udp(from: usize) -> Flow {
        Flow {
            from,
            v6: false,
            tcp: false,
            number: 0,
        }
    }

    pub fn tcp(from: usize) -> Flow {
        Flow {
            tcp: true,
            ..Flow::udp(from)
        }
    }

    pub fn v6(self) -> Flow {
        Flow { v6: true, ..self }
    }

    fn port(self) -> u16 {
        2000 + u16::from(self.number)
    }

    fn byte(self, position: u64) -> u8 {
        let x = position
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(u64::from(self.number) * 77 + self.from as u64 * 13 + 1);
        (x >> 29) as u8
    }

    /// IP header length of this flow's packets.
    pub fn ip_len(self) -> usize {
        if self.v6 { 40 } else { 20 }
    }

    fn ip_header(self, length: usize, class: u8) -> Vec<u8> {
        let (from, to) = (self.from as u8 + 1, 2 - self.from as u8);
        let protocol = if self.tcp { PROTO_TCP } else { PROTO_UDP };
        let mut p = vec![0; self.ip_len()];
        if self.v6 {
            p[0] = 0x60 | class >> 4;
            p[1] = class << 4;
            p[6] = protocol;
            p[7] = 64;
            p[8..10].copy_from_slice(&[0xfd, 0]);
            p[23] = from;
            p[24..26].copy_from_slice(&[0xfd, 0]);
            p[39] = to;
        } else {
            p[0] = 0x45;
            p[1] = class;
            p[6] = 0x40;
            p[8] = 64;
            p[9] = protocol;
            p[12..20].copy_from_slice(&[10, 0, 0, from, 10, 0, 0, to]);
        }
        let header_len = p.len();
        ip::set_length(&mut p, header_len, header_len + length, None);
        p
    }

    /// The payload of datagram `seq`, of `length` bytes.
    pub fn udp_payload(self, seq: u32, length: usize) -> Vec<u8> {
        let mut payload = seq.to_be_bytes().to_vec();
        payload.extend((length as u16).to_be_bytes());
        payload.extend((payload.len()..length).map(|i| self.byte(u64::from(seq) << 16 | i as u64)));
        payload
    }

    /// A read of the TUN device: a complete UDP packet.
    pub fn datagram(self, seq: u32, length: usize) -> Vec<u8> {
        self.datagrams(seq, &[length], false, ip::ECN_NOT_ECT)
    }

    /// A read: datagrams of which all except the last have the same length, as a super-packet if
    /// there are several. `partial` leaves the checksum incomplete. `class` is the DSCP and ECN
    /// byte.
    pub fn datagrams(self, seq: u32, lengths: &[usize], partial: bool, class: u8) -> Vec<u8> {
        let payload: Vec<u8> = (seq..)
            .zip(lengths)
            .flat_map(|(seq, length)| self.udp_payload(seq, *length))
            .collect();
        let mut u = vec![0; 8];
        u[0..2].copy_from_slice(&self.port().to_be_bytes());
        u[2..4].copy_from_slice(&53u16.to_be_bytes());
        u[4..6].copy_from_slice(&((8 + payload.len()) as u16).to_be_bytes());
        u.extend(payload);
        let gso = (lengths.len() > 1).then(|| (GsoType::UdpL4, lengths[0] as u16));
        self.read(u, udp::CHECKSUM_AT, gso, partial || gso.is_some(), class, 8)
    }

    /// A read: `length` bytes of the stream from `position` on, in segments of `gso_size`.
    pub fn segments(self, position: u64, length: usize, gso_size: usize) -> Vec<u8> {
        self.segments_with(position, length, gso_size, tcp::ACK, ip::ECN_NOT_ECT, true)
    }

    /// The same with flags and marking. Without `partial` the checksum is complete, and `gso_size`
    /// must cover everything.
    pub fn segments_with(
        self,
        position: u64,
        length: usize,
        gso_size: usize,
        flags: u8,
        ecn: u8,
        partial: bool,
    ) -> Vec<u8> {
        let mut t = vec![0; 32];
        t[0..2].copy_from_slice(&self.port().to_be_bytes());
        t[2..4].copy_from_slice(&80u16.to_be_bytes());
        tcp::set_seq(&mut t, ISN.wrapping_add(position as u32));
        t[12] = 0x80;
        t[13] = flags;
        t[14..16].copy_from_slice(&500u16.to_be_bytes());
        t[20..24].copy_from_slice(&[1, 1, 8, 10]); // time stamps
        t.extend((position..position + length as u64).map(|p| self.byte(p)));
        let kind = if self.v6 {
            GsoType::Tcp6
        } else {
            GsoType::Tcp4
        };
        let gso = (length > gso_size).then_some((kind, gso_size as u16));
        assert!(partial || gso.is_none());
        self.read(t, tcp::CHECKSUM_AT, gso, partial, ecn, 32)
    }

    fn read(
        self,
        mut transport: Vec<u8>,
        at: usize,
        gso: Option<(GsoType, u16)>,
        partial: bool,
        class: u8,
        transport_len: usize,
    ) -> Vec<u8> {
        let mut p = self.ip_header(transport.len(), class);
        let parsed = header_of(&p);
        let pseudo =
            checksum::pseudo_header(parsed.src, parsed.dst, parsed.protocol, transport.len());
        let check = if partial {
            checksum::add_carries(pseudo)
        } else {
            udp::on_wire(checksum::fold(pseudo + checksum::sum(&transport)))
        };
        transport[at..at + 2].copy_from_slice(&check.to_be_bytes());
        let vnet = VnetHdr {
            needs_csum: partial,
            gso_type: gso.map_or(GsoType::None, |g| g.0),
            gso_ecn: gso.is_some() && self.tcp && transport[13] & tcp::CWR != 0,
            hdr_len: if partial || gso.is_some() {
                (p.len() + transport_len) as u16
            } else {
                0
            },
            gso_size: gso.map_or(0, |g| g.1),
            csum_start: if partial { p.len() as u16 } else { 0 },
            csum_offset: if partial { at as u16 } else { 0 },
        };
        p.extend(transport);
        [vnet.to_bytes().to_vec(), p].concat()
    }
}

/// A read: a packet that belongs to no flow. `transport` begins with its header; the checksum of
/// TCP or UDP is completed.
pub fn raw(from: usize, v6: bool, protocol: u8, mut transport: Vec<u8>) -> Vec<u8> {
    let flow = Flow {
        v6,
        ..Flow::udp(from)
    };
    let mut p = flow.ip_header(transport.len(), 0);
    p[if v6 { 6 } else { 9 }] = protocol;
    let header_len = p.len();
    ip::set_length(&mut p, header_len, header_len + transport.len(), None);
    let parsed = header_of(&p);
    let at = match protocol {
        PROTO_TCP => Some(tcp::CHECKSUM_AT),
        PROTO_UDP => Some(udp::CHECKSUM_AT),
        _ => None,
    };
    if let Some(at) = at {
        let pseudo = checksum::pseudo_header(parsed.src, parsed.dst, protocol, transport.len());
        let check = udp::on_wire(checksum::fold(pseudo + checksum::sum(&transport)));
        transport[at..at + 2].copy_from_slice(&check.to_be_bytes());
    }
    p.extend(transport);
    [VnetHdr::default().to_bytes().to_vec(), p].concat()
}

/// Parses a header without its payload.
fn header_of(header: &[u8]) -> IpPacket {
    let mut whole = header.to_vec();
    let n = whole.len();
    ip::set_length(&mut whole, n, n, None);
    IpPacket::parse(&whole).expect("a header made here")
}

/// The packets that a write to the TUN device stands for, each with a complete checksum. Asserts
/// that the kernel would accept the write.
pub fn packets_of(write: &[u8]) -> Vec<Vec<u8>> {
    let vnet = VnetHdr::read(write).expect("a virtio-net header");
    let packet = SuperPacket::parse(write).unwrap_or_else(|e| panic!("{e:?} in {vnet:?}"));
    assert_eq!(packet.bytes.len(), write.len() - VNET_HDR_LEN, "length");
    if vnet.gso_type != GsoType::None {
        assert!(packet.kind.is_some(), "GSO for what fits one segment");
        assert_eq!(usize::from(vnet.hdr_len), packet.header_len, "hdr_len");
    }
    if !packet.ip.is_v6() {
        let header = &packet.bytes[..packet.ip.header_len];
        assert_eq!(checksum::fold(checksum::sum(header)), 0, "IPv4 checksum");
    }
    (0..packet.segments())
        .map(|i| {
            let mut out = vec![0; packet.segment_len(i)];
            packet.segment(i, false, &mut out);
            let parsed = IpPacket::parse(&out).expect("a segment is a packet");
            if matches!(parsed.protocol, PROTO_TCP | PROTO_UDP) {
                let pseudo = checksum::pseudo_header(
                    parsed.src,
                    parsed.dst,
                    parsed.protocol,
                    out.len() - parsed.header_len,
                );
                let sum = checksum::sum(&out[parsed.header_len..]);
                assert_eq!(checksum::fold(pseudo + sum), 0, "transport checksum");
            }
            out
        })
        .collect()
}

/// Packets received by a side, verified on arrival.
#[derive(Clone, Debug, Default)]
pub struct Checker {
    /// Whether the network keeps the order of datagrams.
    pub in_order: bool,
    datagrams: BTreeMap<Flow, BTreeSet<u32>>,
    /// Start and end of the received parts of each stream.
    streams: BTreeMap<Flow, BTreeMap<u64, u64>>,
    last_start: BTreeMap<Flow, u64>,
}

impl Checker {
    pub fn new(in_order: bool) -> Checker {
        Checker {
            in_order,
            ..Checker::default()
        }
    }

    /// Verifies a write to the TUN device of side `to`: genuine, new, in order.
    pub fn write(&mut self, to: usize, write: &[u8]) {
        for packet in packets_of(write) {
            self.packet(to, &packet);
        }
    }

    fn packet(&mut self, to: usize, packet: &[u8]) {
        let parsed = IpPacket::parse(packet).expect("checked before");
        let transport = &packet[parsed.header_len..];
        if !matches!(parsed.protocol, PROTO_TCP | PROTO_UDP) {
            return;
        }
        let port = u16::from_be_bytes([transport[0], transport[1]]);
        // Belongs to no flow; the test checks it.
        let Some(number) = port.checked_sub(2000) else {
            return;
        };
        let flow = Flow {
            from: 1 - to,
            v6: parsed.is_v6(),
            tcp: parsed.protocol == PROTO_TCP,
            number: u8::try_from(number).expect("a port used here"),
        };
        let expected = header_of(&flow.ip_header(0, 0));
        assert_eq!((parsed.src, parsed.dst), (expected.src, expected.dst));
        let position = if flow.tcp {
            self.stream(flow, transport)
        } else {
            self.datagram(flow, &transport[8..])
        };
        let last = self.last_start.insert(flow, position);
        if self.in_order {
            assert!(
                last.is_none_or(|l| l < position),
                "{flow:?}: {position} after {last:?}"
            );
        }
    }

    fn datagram(&mut self, flow: Flow, payload: &[u8]) -> u64 {
        let seq = u32::from_be_bytes(*payload.first_chunk().expect("a tag"));
        assert!(
            payload == flow.udp_payload(seq, payload.len()),
            "{flow:?} {seq}: altered"
        );
        let fresh = self.datagrams.entry(flow).or_default().insert(seq);
        assert!(fresh, "{flow:?}: datagram {seq} twice");
        u64::from(seq)
    }

    fn stream(&mut self, flow: Flow, transport: &[u8]) -> u64 {
        let data = &transport[tcp::header_len(transport).expect("a header")..];
        let start = u64::from(tcp::seq(transport).wrapping_sub(ISN));
        let end = start + data.len() as u64;
        let genuine = (start..).zip(data).all(|(p, b)| flow.byte(p) == *b);
        assert!(genuine, "{flow:?} {start}..{end}: altered");
        let spans = self.streams.entry(flow).or_default();
        let before = spans.range(..end).next_back().map(|(_, end)| *end);
        assert!(
            before.is_none_or(|b| b <= start),
            "{flow:?} {start}..{end}: bytes twice"
        );
        spans.insert(start, end);
        start
    }

    /// Number of received datagrams of a flow.
    pub fn datagrams(&self, flow: Flow) -> usize {
        self.datagrams.get(&flow).map_or(0, BTreeSet::len)
    }

    /// The highest received datagram number of a flow.
    pub fn newest(&self, flow: Flow) -> Option<u32> {
        self.datagrams.get(&flow)?.last().copied()
    }

    /// Received bytes of a stream.
    pub fn bytes(&self, flow: Flow) -> u64 {
        let spans = self.streams.get(&flow);
        spans.map_or(0, |s| s.iter().map(|(from, to)| to - from).sum())
    }
}
