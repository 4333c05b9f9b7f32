//! Packets are built from descriptions: a packet built with one set of addresses and then
//! translated must equal, byte for byte, the packet built with the other set. The builder computes
//! each checksum over everything it covers, by the RFCs' definition, a byte at a time.

use super::*;
use proptest::prelude::*;

const PROTO_SCTP: u8 = 132;

/// The end-around carry sum of RFC 1071, section 1, of all pieces; each except the last has an even
/// length.
fn ones_complement_sum(pieces: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for (i, byte) in pieces.concat().into_iter().enumerate() {
        sum += u32::from(byte) << (8 * ((i + 1) % 2));
        if sum > 0xffff {
            sum -= 0xffff;
        }
    }
    sum as u16
}

fn bytes_of(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The hosts.
#[derive(Clone, Copy, Debug)]
struct People {
    host: IpAddr,
    peer: IpAddr,
    router: IpAddr,
}

#[derive(Clone, Debug)]
enum Fragment {
    Whole,
    /// Payload of the datagram in units of eight bytes.
    First(usize),
    Later,
}

#[derive(Clone, Debug)]
enum Body {
    Tcp(Vec<u8>),
    Udp {
        payload: Vec<u8>,
        checksum: bool,
    },
    UdpLite(Vec<u8>),
    Dccp(Vec<u8>),
    Sctp(Vec<u8>),
    Echo(Vec<u8>),
    Error {
        kind: u8,
        by_router: bool,
        /// The host's packet that the error quotes.
        about: Box<Packet>,
        /// Quoted bytes beyond its IP headers.
        quoted: usize,
        /// Extensions after a whole quote (RFC 4884).
        behind: Vec<u8>,
    },
}

#[derive(Clone, Debug)]
struct Packet {
    v6: bool,
    /// Units of IPv4 options (4 bytes) or IPv6 extension headers (8 bytes).
    options: usize,
    fragment: Fragment,
    body: Body,
    /// From the host to the peer; otherwise from the peer to the host.
    outward: bool,
    /// The transport checksum covers only the pseudo-header.
    partial: bool,
}

impl Packet {
    fn tcp(v6: bool) -> Packet {
        Packet {
            v6,
            options: 0,
            fragment: Fragment::Whole,
            body: Body::Tcp(b"odd".to_vec()),
            outward: true,
            partial: false,
        }
    }

    fn build(&self, people: &People) -> Vec<u8> {
        let (mut src, mut dst) = (people.peer, people.host);
        if self.outward {
            (src, dst) = (dst, src);
        }
        if let Body::Error {
            by_router: true, ..
        } = self.body
        {
            src = people.router;
        }
        let (protocol, transport) = self.transport(src, dst, people);
        let (offset, more, payload) = match self.fragment {
            Fragment::Whole => (0, 0, &transport[..]),
            Fragment::First(units) => (0, 1, &transport[..(units * 8).min(transport.len())]),
            Fragment::Later => (24, 0, &transport[24.min(transport.len())..]),
        };
        let fragment = !matches!(self.fragment, Fragment::Whole);
        let mut packet;
        if self.v6 {
            let mut extensions = vec![];
            let mut kinds = vec![0, 60, 43, 60][..self.options].to_vec();
            kinds.extend(fragment.then_some(44));
            kinds.push(protocol);
            for pair in kinds.windows(2) {
                match pair[0] {
                    44 => {
                        extensions.extend([pair[1], 0]);
                        extensions.extend((offset as u16 | more).to_be_bytes());
                        extensions.extend([1, 2, 3, 4]);
                    }
                    // Routing: no segments left. Options: padding of six bytes.
                    43 => extensions.extend([pair[1], 0, 4, 0, 0, 0, 0, 0]),
                    _ => extensions.extend([pair[1], 0, 1, 4, 0, 0, 0, 0]),
                }
            }
            let length = (extensions.len() + payload.len()) as u16;
            packet = vec![0x60, 0, 0, 0];
            packet.extend(length.to_be_bytes());
            packet.extend([kinds[0], 64]);
            packet.extend(bytes_of(src));
            packet.extend(bytes_of(dst));
            packet.extend(extensions);
        } else {
            let header_len = 20 + 4 * self.options;
            packet = vec![0x40 | (header_len / 4) as u8, 0];
            packet.extend(((header_len + payload.len()) as u16).to_be_bytes());
            packet.extend([0x12, 0x34]);
            packet.extend(((offset as u16 / 8) | (more << 13)).to_be_bytes());
            packet.extend([64, protocol, 0, 0]);
            packet.extend(bytes_of(src));
            packet.extend(bytes_of(dst));
            packet.resize(header_len, 1);
            let check = !ones_complement_sum(&[&packet]);
            packet[10..12].copy_from_slice(&check.to_be_bytes());
        }
        packet.extend(payload);
        packet
    }

    /// Protocol, and the transport header and payload of the whole datagram.
    fn transport(&self, src: IpAddr, dst: IpAddr, people: &People) -> (u8, Vec<u8>) {
        let icmp = if self.v6 { PROTO_ICMPV6 } else { PROTO_ICMP };
        let header = [0xc0, 0x01, 0x00, 0x35];
        let (protocol, checksum_at, mut bytes) = match &self.body {
            Body::Tcp(payload) => {
                let fixed = [1, 2, 3, 4, 5, 6, 7, 8, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0];
                (PROTO_TCP, Some(16), [&header, &fixed[..], payload].concat())
            }
            Body::Udp { payload, checksum } => {
                let length = (payload.len() as u16 + 8).to_be_bytes();
                let bytes = [&header, &length[..], &[0, 0], payload].concat();
                (PROTO_UDP, checksum.then_some(6), bytes)
            }
            Body::UdpLite(payload) => {
                let bytes = [&header, &[0; 4][..], payload].concat();
                (PROTO_UDP_LITE, Some(6), bytes)
            }
            Body::Dccp(payload) => {
                let fixed = [3, 0, 0, 0, 0x04, 0, 0, 9];
                (PROTO_DCCP, Some(6), [&header, &fixed[..], payload].concat())
            }
            Body::Sctp(payload) => {
                let bytes = [&header, &[7; 8][..], payload].concat();
                (PROTO_SCTP, None, bytes)
            }
            Body::Echo(payload) => {
                let kind = if self.v6 { 128 } else { 8 };
                let bytes = [&[kind, 0, 0, 0, 0, 1, 0, 2][..], payload].concat();
                (icmp, Some(2), bytes)
            }
            Body::Error {
                kind,
                about,
                quoted,
                behind,
                ..
            } => {
                let mut about = (**about).clone();
                about.outward = !self.outward;
                let mut quote = about.build(people);
                let cut = IpPacket::parse(&quote).unwrap().header_len + quoted;
                if cut < quote.len() {
                    quote.truncate(cut);
                } else {
                    quote.extend(behind);
                }
                let bytes = [&[*kind, 0, 0, 0, 0, 0, 5, 0xdc][..], &quote].concat();
                (icmp, Some(2), bytes)
            }
        };
        if let Some(at) = checksum_at {
            let mut pseudo = [bytes_of(src), bytes_of(dst)].concat();
            pseudo.extend((bytes.len() as u32).to_be_bytes());
            pseudo.extend([0, 0, 0, protocol]);
            if protocol == PROTO_ICMP {
                pseudo.clear();
            }
            let mut check = if self.partial {
                ones_complement_sum(&[&pseudo])
            } else {
                !ones_complement_sum(&[&pseudo, &bytes])
            };
            if check == 0 && matches!(protocol, PROTO_UDP | PROTO_UDP_LITE) {
                check = 0xffff;
            }
            bytes[at..at + 2].copy_from_slice(&check.to_be_bytes());
        }
        (protocol, bytes)
    }
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..80)
}

/// A body that is no error, with at least `least` bytes of payload.
fn plain_body(least: usize) -> impl Strategy<Value = Body> {
    let payload = payload().prop_map(move |mut payload| {
        payload.resize(payload.len().max(least), 0x55);
        payload
    });
    (0..7, payload).prop_map(|(which, payload)| match which {
        0 | 1 => Body::Tcp(payload),
        2 => Body::Udp {
            payload,
            checksum: true,
        },
        3 => Body::UdpLite(payload),
        4 => Body::Dccp(payload),
        5 => Body::Sctp(payload),
        _ => Body::Echo(payload),
    })
}

/// A packet that is no error. A first fragment has at least `units` units of eight bytes.
fn plain_packet(v6: bool, units: usize) -> impl Strategy<Value = Packet> {
    let fragment = prop_oneof![
        3 => Just(Fragment::Whole),
        1 => (units..6).prop_map(Fragment::First),
        1 => Just(Fragment::Later),
    ];
    let body = (plain_body(40), any::<bool>()).prop_map(move |(body, checksum)| match body {
        Body::Udp { payload, .. } => Body::Udp {
            payload,
            checksum: checksum || v6,
        },
        body => body,
    });
    (0usize..=4, fragment, body, any::<bool>()).prop_map(
        move |(options, fragment, body, outward)| Packet {
            v6,
            options,
            fragment,
            body,
            outward,
            partial: false,
        },
    )
}

fn error_packet(v6: bool) -> impl Strategy<Value = Packet> {
    let kinds = if v6 { [1, 2, 3, 4] } else { [3, 11, 12, 4] };
    let kind = proptest::sample::select(kinds.to_vec());
    let behind = proptest::collection::vec(any::<u8>(), 0..24);
    let quote = (
        plain_packet(v6, 1),
        (0usize..60).prop_map(|words| words * 2),
    );
    let all = (
        kind,
        any::<bool>(),
        quote,
        behind,
        0usize..=4,
        any::<bool>(),
    );
    all.prop_map(
        move |(kind, by_router, (about, quoted), behind, options, outward)| Packet {
            v6,
            options,
            fragment: Fragment::Whole,
            body: Body::Error {
                kind,
                by_router,
                about: Box::new(about),
                quoted,
                behind,
            },
            outward,
            partial: false,
        },
    )
}

fn any_packet() -> impl Strategy<Value = Packet> {
    any::<bool>().prop_flat_map(|v6| {
        let partial =
            (plain_body(0), 0usize..=4, any::<bool>()).prop_map(move |(body, options, outward)| {
                Packet {
                    v6,
                    options,
                    fragment: Fragment::Whole,
                    partial: matches!(body, Body::Tcp(_) | Body::Udp { .. }),
                    body,
                    outward,
                }
            });
        prop_oneof![plain_packet(v6, 3), error_packet(v6), partial]
    })
}

fn address(v6: bool) -> impl Strategy<Value = IpAddr> {
    any::<(u32, u128)>().prop_map(move |(four, six)| {
        if v6 {
            IpAddr::V6(six.into())
        } else {
            IpAddr::V4(four.into())
        }
    })
}

/// A packet, its addresses, and the translated addresses; each of host and peer may stay.
fn case() -> impl Strategy<Value = (Packet, People, People)> {
    any_packet().prop_flat_map(|packet| {
        let v6 = packet.v6;
        let addresses = proptest::collection::btree_set(address(v6), 5);
        (addresses, any::<(bool, bool)>()).prop_map(move |(addresses, (host, peer))| {
            let addresses: Vec<_> = addresses.into_iter().collect();
            let before = People {
                host: addresses[0],
                peer: addresses[1],
                router: addresses[2],
            };
            let after = People {
                host: addresses[if host { 3 } else { 0 }],
                peer: addresses[if peer { 4 } else { 1 }],
                ..before
            };
            (packet.clone(), before, after)
        })
    })
}

fn pairs(from: &People, to: &People) -> [(IpAddr, IpAddr); 2] {
    [(from.host, to.host), (from.peer, to.peer)]
}

fn translated(bytes: &[u8], mapping: &[(IpAddr, IpAddr)]) -> Result<Vec<u8>, DropReason> {
    let ip = IpPacket::parse(bytes).unwrap();
    let mut out = bytes.to_vec();
    let result = translate(&mut out, &ip, mapping, false);
    assert!(result.is_ok() || out == bytes, "changed though refused");
    result.map(|()| out)
}

const BEFORE: People = People {
    host: IpAddr::V4(std::net::Ipv4Addr::new(192, 168, 1, 10)),
    peer: IpAddr::V4(std::net::Ipv4Addr::new(100, 64, 0, 2)),
    router: IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 1)),
};
const AFTER: People = People {
    host: IpAddr::V4(std::net::Ipv4Addr::new(100, 64, 0, 1)),
    ..BEFORE
};

fn v6_people() -> (People, People) {
    let before = People {
        host: "fd00:1::10".parse().unwrap(),
        peer: "fd00:2::2".parse().unwrap(),
        router: "2001:db8::1".parse().unwrap(),
    };
    let host = "fd00:2::1".parse().unwrap();
    (before, People { host, ..before })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn translation_equals_a_packet_built_with_the_new_addresses((packet, before, after) in case()) {
        let from = packet.build(&before);
        let to = packet.build(&after);
        let ip = IpPacket::parse(&from).unwrap();
        let mut bytes = from.clone();
        translate(&mut bytes, &ip, &pairs(&before, &after), packet.partial).unwrap();
        prop_assert_eq!(&bytes, &to);
        let ip = IpPacket::parse(&bytes).unwrap();
        translate(&mut bytes, &ip, &pairs(&after, &before), packet.partial).unwrap();
        prop_assert_eq!(bytes, from);
    }

    #[test]
    fn the_headers_of_a_super_packet_suffice((mut packet, before, after) in case()) {
        packet.body = Body::Tcp(vec![9; 300]);
        packet.fragment = Fragment::Whole;
        packet.partial = true;
        let mut bytes = packet.build(&before);
        let ip = IpPacket::parse(&bytes).unwrap();
        bytes.truncate(ip.header_len + 20);
        translate(&mut bytes, &ip, &pairs(&before, &after), true).unwrap();
        prop_assert_eq!(&bytes, &packet.build(&after)[..bytes.len()]);
    }

    #[test]
    fn nothing_panics(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
        version in 4u8..=6,
        protocol in proptest::sample::select(vec![0u8, 1, 6, 17, 33, 43, 44, 58, 60, 136]),
        kind in 0u8..6,
        partial: bool,
    ) {
        // Biased towards valid input: a plausible first byte, length, protocol and ICMP type.
        let length = bytes.len() as u16;
        for (at, value) in [(0, version << 4 | 5), (6, protocol), (9, protocol), (20, kind), (40, kind)] {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        if bytes.len() >= 40 {
            let (at, length) = if version == 4 { (2, length) } else { (4, length - 40) };
            bytes[at..at + 2].copy_from_slice(&length.to_be_bytes());
        }
        if let Ok(ip) = IpPacket::parse(&bytes) {
            let to = if ip.is_v6() { "::1" } else { "127.0.0.1" }.parse().unwrap();
            let _ = translate(&mut bytes, &ip, &[(ip.src, to), (ip.dst, to)], partial);
        }
    }
}

/// RFC 1071, section 3.
#[test]
fn the_reference_sums_as_in_the_rfc() {
    let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(ones_complement_sum(&[&bytes]), 0xddf2);
}

/// UDP's zero means "no checksum"; a computed zero is sent as all ones (RFC 768).
#[test]
fn a_computed_udp_checksum_of_zero_is_sent_as_all_ones() {
    let packet = |payload: u16| Packet {
        body: Body::Udp {
            payload: payload.to_be_bytes().to_vec(),
            checksum: true,
        },
        ..Packet::tcp(false)
    };
    let field = |bytes: &[u8]| u16::from_be_bytes([bytes[26], bytes[27]]);
    // With its own checksum as payload, the checksum becomes zero.
    let payload = field(&packet(0).build(&AFTER));
    let to = packet(payload).build(&AFTER);
    assert_eq!(field(&to), 0xffff);
    let from = packet(payload).build(&BEFORE);
    assert_eq!(translated(&from, &pairs(&BEFORE, &AFTER)), Ok(to.clone()));
    assert_eq!(translated(&to, &pairs(&AFTER, &BEFORE)), Ok(from));
}

/// RFC 6936 lets tunnels send UDP over IPv6 without a checksum.
#[test]
fn no_udp_checksum_stays_none() {
    let (before, after) = v6_people();
    for (v6, before, after) in [(false, BEFORE, AFTER), (true, before, after)] {
        let packet = Packet {
            body: Body::Udp {
                payload: vec![1, 2, 3],
                checksum: false,
            },
            ..Packet::tcp(v6)
        };
        let to = translated(&packet.build(&before), &pairs(&before, &after));
        assert_eq!(to, Ok(packet.build(&after)));
    }
}

#[test]
fn a_wrong_checksum_stays_wrong() {
    let mut from = Packet::tcp(false).build(&BEFORE);
    from[40] ^= 1;
    let mut to = Packet::tcp(false).build(&AFTER);
    to[40] ^= 1;
    assert_eq!(translated(&from, &pairs(&BEFORE, &AFTER)), Ok(to));
}

#[test]
fn a_pair_of_two_families_is_ignored() {
    let from = Packet::tcp(false).build(&BEFORE);
    let pair = (BEFORE.host, v6_people().0.host);
    assert_eq!(translated(&from, &[pair]), Ok(from));
}

/// RFC 791 allows fragments of eight bytes, without TCP's checksum.
#[test]
fn a_first_fragment_without_its_checksum_is_refused() {
    for (v6, (before, after)) in [(false, (BEFORE, AFTER)), (true, v6_people())] {
        let packet = Packet {
            fragment: Fragment::First(2),
            ..Packet::tcp(v6)
        };
        let from = packet.build(&before);
        let refused = Err(DropReason::TransportTruncated);
        assert_eq!(translated(&from, &pairs(&before, &after)), refused);
        assert_eq!(translated(&from, &[]), Ok(from));
    }
}

#[test]
fn a_segment_left_in_a_routing_header_is_refused() {
    let (before, after) = v6_people();
    let packet = Packet {
        options: 3,
        ..Packet::tcp(true)
    };
    let mut from = packet.build(&before);
    from[40 + 16 + 3] = 1;
    let refused = Err(DropReason::SourceRouted);
    assert_eq!(translated(&from, &pairs(&before, &after)), refused);
    assert_eq!(translated(&from, &[]), Ok(from));
}

#[test]
fn an_ipv4_source_route_is_refused() {
    let packet = Packet {
        options: 2,
        ..Packet::tcp(false)
    };
    let mut from = packet.build(&BEFORE);
    from[20..23].copy_from_slice(&[131, 7, 4]);
    let refused = Err(DropReason::SourceRouted);
    assert_eq!(translated(&from, &pairs(&BEFORE, &AFTER)), refused);
}

#[test]
fn redirects_are_refused() {
    for (v6, kind, people) in [(false, 5, (BEFORE, AFTER)), (true, 137, v6_people())] {
        let packet = Packet {
            body: Body::Error {
                kind,
                by_router: true,
                about: Box::new(Packet::tcp(v6)),
                quoted: 100,
                behind: vec![],
            },
            outward: false,
            ..Packet::tcp(v6)
        };
        let from = packet.build(&people.0);
        let refused = Err(DropReason::IcmpRedirect);
        assert_eq!(translated(&from, &pairs(&people.0, &people.1)), refused);
    }
}

#[test]
fn headers_of_another_packet_are_refused() {
    let mut bytes = Packet::tcp(true).build(&v6_people().0);
    let ip = IpPacket::parse(&bytes).unwrap();
    let result = translate(&mut bytes[..30], &ip, &[(ip.src, ip.dst)], false);
    assert_eq!(result, Err(DropReason::NotIp));
}
