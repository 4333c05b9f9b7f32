use super::conntrack::GENERATION_FLOWS;
use super::*;
use std::time::Duration;
use tcp::{ACK, FIN, PSH, RST, SYN};

const HERE: u8 = 1;
const PEER: u8 = 2;

fn at(seconds: u64) -> Instant {
    Instant::from_nanos(1 << 40) + Duration::from_secs(seconds)
}

fn filter(open: Open) -> StatefulFilter {
    *StatefulFilter::set(None, Filters::Same(Filter::Only(open), Destinations::Any))
        .expect("not everything is open")
}

/// TCP 443 and 8000 to 8010, UDP 53, and no ICMP.
fn some() -> StatefulFilter {
    filter(Open {
        icmp: false,
        tcp: [443..=443, 8000..=8010].into_iter().collect(),
        udp: std::iter::once(53..=53).collect(),
    })
}

/// A packet between hosts whose addresses end in these numbers.
fn packet(v6: bool, [from, to]: [u8; 2], protocol: u8, transport: &[u8]) -> Vec<u8> {
    let mut p = vec![0; if v6 { 40 } else { 20 }];
    if v6 {
        (p[0], p[6], p[8], p[23], p[24], p[39]) = (0x60, protocol, 0xfd, from, 0xfd, to);
    } else {
        (p[0], p[9], p[12], p[15], p[16], p[19]) = (0x45, protocol, 10, from, 10, to);
    }
    p.extend(transport);
    let (header, length) = (if v6 { 40 } else { 20 }, p.len());
    seikan_wire::ip::set_length(&mut p, header, length, None);
    p
}

fn admits(filter: &mut StatefulFilter, packet: &[u8], now: Instant) -> bool {
    let ip = IpPacket::parse(packet).expect("a packet");
    let passes = filter.check(&ip, packet, now);
    assert!(matches!(passes, Ok(()) | Err(DropReason::PolicyDenied)));
    passes.is_ok()
}

fn sends(filter: &mut StatefulFilter, packet: &[u8], now: Instant) {
    let ip = IpPacket::parse(packet).expect("a packet");
    filter.note(&ip, packet, now);
}

fn ports(from: u16, to: u16) -> Vec<u8> {
    [from.to_be_bytes(), to.to_be_bytes()].concat()
}

fn tcp_to(v6: bool, port: u16, flags: u8) -> Vec<u8> {
    let mut segment = ports(40_000, port);
    segment.resize(20, 0);
    (segment[12], segment[13]) = (0x50, flags);
    packet(v6, [PEER, HERE], PROTO_TCP, &segment)
}

fn udp(v6: bool, pair: [u8; 2], from: u16, to: u16) -> Vec<u8> {
    let datagram = [ports(from, to), vec![0, 12, 0, 0, 1, 2, 3, 4]].concat();
    packet(v6, pair, PROTO_UDP, &datagram)
}

fn echo(v6: bool, pair: [u8; 2], kind: [u8; 2], id: u8) -> Vec<u8> {
    let protocol = if v6 { PROTO_ICMPV6 } else { PROTO_ICMP };
    let kind = kind[usize::from(v6)];
    packet(v6, pair, protocol, &[kind, 0, 0, 0, 0, id, 0, 1])
}
const REQUEST: [u8; 2] = [8, 128];
const REPLY: [u8; 2] = [0, 129];
const UNREACHABLE: [u8; 2] = [3, 1];

/// An error that quotes a packet.
fn error(v6: bool, pair: [u8; 2], about: &[u8]) -> Vec<u8> {
    let protocol = if v6 { PROTO_ICMPV6 } else { PROTO_ICMP };
    let mut message = vec![UNREACHABLE[usize::from(v6)], 0, 0, 0, 0, 0, 0, 0];
    message.extend(about);
    packet(v6, pair, protocol, &message)
}

/// The address of this host in these packets.
fn here(v6: bool) -> IpAddr {
    let ip = IpPacket::parse(&tcp_to(v6, 1, SYN)).expect("a packet");
    ip.dst
}

/// The same packet to another destination; checksums are not checked here.
fn readdressed(mut packet: Vec<u8>, to: IpAddr) -> Vec<u8> {
    match to {
        IpAddr::V4(to) => packet[16..20].copy_from_slice(&to.octets()),
        IpAddr::V6(to) => packet[24..40].copy_from_slice(&to.octets()),
    }
    packet
}

/// Networks behind this host, groups, broadcast addresses, and addresses that hosts treat as their
/// own.
const ELSEWHERE: [(bool, &str); 12] = [
    (false, "192.168.1.7"),
    (false, "10.0.0.3"),
    (false, "10.255.255.255"),
    (false, "255.255.255.255"),
    (false, "224.0.0.1"),
    (false, "0.0.0.0"),
    (false, "127.0.0.1"),
    (true, "fd00::3"),
    (true, "2001:db8::1"),
    (true, "ff02::1"),
    (true, "fe80::1"),
    (true, "::1"),
];

#[test]
fn packets_to_other_destinations_are_denied_whatever_is_open() {
    let own = Destinations::Only(vec![here(false), here(true)]);
    let open = Open {
        icmp: true,
        tcp: std::iter::once(0..=65_535).collect(),
        udp: std::iter::once(0..=65_535).collect(),
    };
    for filter in [Filter::All, Filter::Only(open)] {
        let mut filter =
            *StatefulFilter::set(None, Filters::Same(filter, own.clone())).expect("a filter");
        for v6 in [false, true] {
            let packets = [
                tcp_to(v6, 443, SYN),
                tcp_to(v6, 443, ACK),
                udp(v6, [PEER, HERE], 40_000, 53),
                echo(v6, [PEER, HERE], REQUEST, 1),
            ];
            for packet in packets {
                assert!(admits(&mut filter, &packet, at(0)));
                for (_, to) in ELSEWHERE.iter().filter(|(family, _)| *family == v6) {
                    let packet = readdressed(packet.clone(), to.parse().expect(to));
                    assert!(!admits(&mut filter, &packet, at(0)), "{to}");
                }
            }
        }
    }
}

#[test]
fn each_sender_behind_a_peer_has_its_own_filter() {
    for v6 in [false, true] {
        let web = Filter::Only(Open {
            tcp: std::iter::once(443..=443).collect(),
            ..Open::default()
        });
        // A second device, to which a device of the peer may only reply.
        let second: IpAddr = if v6 { "fd00::77" } else { "10.0.0.77" }
            .parse()
            .expect("an address");
        let peer = IpPacket::parse(&tcp_to(v6, 1, SYN)).expect("a packet").src;
        let pairs = Pairs {
            senders: [(peer, 0)].into(),
            receivers: Arc::new([(here(v6), 0), (second, 1)].into()),
            receiver_groups: 2,
            indices: vec![Some(0), Some(1)],
            filters: vec![web.clone(), Filter::Only(Open::default())],
        };
        let mut filter = *StatefulFilter::set(None, Filters::Pairs(pairs)).expect("a filter");
        assert!(admits(&mut filter, &tcp_to(v6, 443, SYN), at(0)));
        assert!(!admits(&mut filter, &tcp_to(v6, 80, SYN), at(0)));
        let to_second = |packet| readdressed(packet, second);
        assert!(!admits(
            &mut filter,
            &to_second(tcp_to(v6, 443, SYN)),
            at(0)
        ));
        assert!(admits(&mut filter, &to_second(tcp_to(v6, 443, ACK)), at(0)));
        // Another sender behind the same peer, and another destination.
        let mut other = tcp_to(v6, 443, ACK);
        other[if v6 { 23 } else { 15 }] = 3;
        assert!(!admits(&mut filter, &other, at(0)));
        let stranger = if v6 { "fd00::3" } else { "10.0.0.3" }
            .parse()
            .expect("an address");
        let elsewhere = readdressed(tcp_to(v6, 443, ACK), stranger);
        assert!(!admits(&mut filter, &elsewhere, at(0)));
        // Replies to datagrams of this end pass.
        let reply = udp(v6, [PEER, HERE], 53, 5000);
        assert!(!admits(&mut filter, &reply, at(0)));
        sends(&mut filter, &udp(v6, [HERE, PEER], 5000, 53), at(0));
        assert!(admits(&mut filter, &reply, at(0)));
    }
}

/// Such a packet would be forwarded to the address at its pointer.
#[test]
fn a_source_route_does_not_pass_for_this_hosts_address() {
    let own = Destinations::Only(vec![here(false)]);
    let mut filter = *StatefulFilter::set(None, Filters::Same(Filter::All, own)).expect("a filter");
    for (pointer, passes) in [(4, false), (8, true)] {
        let datagram = udp(false, [PEER, HERE], 40_000, 53);
        let mut packet = datagram[..20].to_vec();
        // No operation, then a loose source route with one address (RFC 791, section 3.1).
        packet.extend([1, 131, 7, pointer, 10, 9, 9, 9]);
        packet.extend(&datagram[20..]);
        packet[0] = 0x47;
        let length = packet.len();
        seikan_wire::ip::set_length(&mut packet, 28, length, None);
        assert_eq!(admits(&mut filter, &packet, at(0)), passes, "{pointer}");
    }
}

#[test]
fn answers_are_denied_too_where_they_do_not_go_to_this_host() {
    let own = Destinations::Only(vec![here(false)]);
    let mut filter = *StatefulFilter::set(None, Filters::Same(Filter::Only(Open::default()), own))
        .expect("a filter");
    // The host has forwarded a datagram of a network behind it.
    let behind: IpAddr = [192, 168, 1, 7].into();
    let IpAddr::V4(source) = behind else {
        unreachable!()
    };
    let mut sent = udp(false, [HERE, PEER], 5000, 53);
    sent[12..16].copy_from_slice(&source.octets());
    sends(&mut filter, &sent, at(0));
    let answer = readdressed(udp(false, [PEER, HERE], 53, 5000), behind);
    assert!(!admits(&mut filter, &answer, at(0)));
}

#[test]
fn a_filter_is_within_another_that_opens_as_much() {
    let ports = |ranges: &[RangeInclusive<u16>]| ranges.iter().cloned().collect::<Ports>();
    let open = |icmp, tcp: &[_], udp: &[_]| {
        Filter::Only(Open {
            icmp,
            tcp: ports(tcp),
            udp: ports(udp),
        })
    };
    let wide = open(true, &[1..=9, 20..=29], &[53..=53]);
    for (narrow, within) in [
        (open(false, &[], &[]), true),
        (open(true, &[2..=9, 29..=29], &[53..=53]), true),
        (open(true, &[2..=10], &[]), false),
        (open(true, &[5..=21], &[]), false),
        (open(false, &[], &[52..=53]), false),
        (Filter::All, false),
    ] {
        assert_eq!(narrow.is_within(&wide), within, "{narrow:?}");
        assert!(narrow.is_within(&Filter::All));
    }
    assert!(!open(true, &[], &[]).is_within(&open(false, &[1..=9], &[])));
    assert!(open(false, &[], &[]).is_closed());
    assert!(!wide.is_closed() && !Filter::All.is_closed());
}

#[test]
fn connections_start_at_open_ports_only() {
    for v6 in [false, true] {
        for (port, open) in [
            (443, true),
            (442, false),
            (444, false),
            (7999, false),
            (8000, true),
            (8010, true),
            (8011, false),
            (53, false),
        ] {
            let syn = tcp_to(v6, port, SYN);
            assert_eq!(admits(&mut some(), &syn, at(0)), open, "{port}");
        }
    }
}

#[test]
fn segments_that_start_no_connection_pass_at_every_port() {
    for (flags, passes) in [
        (ACK, true),
        (ACK | PSH, true),
        (SYN | ACK, true),
        (FIN | ACK, true),
        (RST, true),
        (RST | ACK, true),
        (SYN, false),
        (SYN | FIN, false),
        (SYN | RST, false),
        // Only port scanners send these.
        (0, false),
        (FIN, false),
        (FIN | PSH | tcp::URG, false),
    ] {
        let segment = tcp_to(false, 22, flags);
        assert_eq!(admits(&mut some(), &segment, at(0)), passes, "{flags:#x}");
    }
}

#[test]
fn datagrams_pass_to_open_ports_and_as_answers() {
    for v6 in [false, true] {
        let mut filter = some();
        assert!(admits(&mut filter, &udp(v6, [PEER, HERE], 999, 53), at(0)));
        let answer = udp(v6, [PEER, HERE], 123, 5000);
        assert!(!admits(&mut filter, &answer, at(0)));
        sends(&mut filter, &udp(v6, [HERE, PEER], 5000, 123), at(0));
        assert!(admits(&mut filter, &answer, at(1)));
        // From another port, and to another port.
        for (from, to) in [(124, 5000), (123, 5001), (5000, 123)] {
            let other = udp(v6, [PEER, HERE], from, to);
            assert!(!admits(&mut filter, &other, at(1)), "{from} {to}");
        }
    }
}

#[test]
fn replies_pass_for_two_to_four_minutes() {
    for began in [0, 60, 119] {
        let mut filter = some();
        // Starts the first generation.
        sends(&mut filter, &udp(false, [HERE, PEER], 1, 1), at(0));
        sends(&mut filter, &udp(false, [HERE, PEER], 5000, 123), at(began));
        let answer = udp(false, [PEER, HERE], 123, 5000);
        // Packets from the peer do not extend the flow.
        for second in (began..began + 120).step_by(10) {
            assert!(admits(&mut filter, &answer, at(second)), "{began} {second}");
        }
        assert!(!admits(&mut filter, &answer, at(began + 240)));
    }
    let mut filter = some();
    sends(&mut filter, &udp(false, [HERE, PEER], 5000, 123), at(0));
    let answer = udp(false, [PEER, HERE], 123, 5000);
    assert!(
        !admits(&mut filter, &answer, at(3600)),
        "silent for an hour"
    );
}

#[test]
fn flows_are_bounded_and_the_newest_are_kept() {
    let mut filter = some();
    for port in 1000..1000 + 10 * GENERATION_FLOWS as u16 {
        sends(&mut filter, &udp(false, [HERE, PEER], port, 123), at(0));
    }
    let kept = filter.conntrack.young.len() + filter.conntrack.old.len();
    assert!(kept <= 2 * GENERATION_FLOWS, "{kept}");
    let newest = 1000 + 10 * GENERATION_FLOWS as u16 - 1;
    for (port, known) in [(newest, true), (1000, false)] {
        let answer = udp(false, [PEER, HERE], 123, port);
        assert_eq!(admits(&mut filter, &answer, at(0)), known, "{port}");
    }
}

#[test]
fn echo_replies_pass_and_echo_requests_do_not() {
    for v6 in [false, true] {
        let mut filter = some();
        let request = echo(v6, [PEER, HERE], REQUEST, 7);
        let reply = echo(v6, [PEER, HERE], REPLY, 7);
        assert!(!admits(&mut filter, &request, at(0)));
        assert!(!admits(&mut filter, &reply, at(0)));
        sends(&mut filter, &echo(v6, [HERE, PEER], REQUEST, 7), at(0));
        assert!(admits(&mut filter, &reply, at(0)));
        assert!(!admits(&mut filter, &request, at(0)));
        assert!(!admits(
            &mut filter,
            &echo(v6, [PEER, HERE], REPLY, 8),
            at(0)
        ));
        let mut open = self::filter(Open {
            icmp: true,
            ..Open::default()
        });
        assert!(admits(&mut open, &request, at(0)));
    }
}

#[test]
fn errors_that_quote_packets_to_the_peer_pass() {
    for v6 in [false, true] {
        let mut filter = some();
        let outgoing = udp(v6, [HERE, PEER], 5000, 123);
        sends(&mut filter, &outgoing, at(0));
        sends(&mut filter, &echo(v6, [HERE, PEER], REQUEST, 7), at(0));
        let segment = packet(
            v6,
            [HERE, PEER],
            PROTO_TCP,
            &[ports(443, 40_000), vec![0; 16]].concat(),
        );
        for (about, passes) in [
            (&outgoing, true),
            (&echo(v6, [HERE, PEER], REQUEST, 7), true),
            (&segment, true),
            // A reply from an open port.
            (&udp(v6, [HERE, PEER], 53, 999), true),
            // Not sent, sent to another host, not sent by this host, incomplete.
            (&udp(v6, [HERE, PEER], 5001, 123), false),
            (&echo(v6, [HERE, PEER], REQUEST, 8), false),
            (&udp(v6, [HERE, 3], 5000, 123), false),
            (
                &packet(
                    v6,
                    [HERE, 3],
                    PROTO_TCP,
                    &segment[if v6 { 40 } else { 20 }..],
                ),
                false,
            ),
            (&udp(v6, [PEER, HERE], 5000, 123), false),
            (&outgoing[..10].to_vec(), false),
        ] {
            let error = error(v6, [PEER, HERE], about);
            assert_eq!(admits(&mut filter, &error, at(0)), passes, "{about:?}");
        }
    }
}

/// A fragment at `offset` bytes; `more` fragments follow or not.
fn fragment(v6: bool, protocol: u8, offset: u16, more: bool, id: u8, payload: &[u8]) -> Vec<u8> {
    if v6 {
        let [high, low] = (offset | u16::from(more)).to_be_bytes();
        let header = [protocol, 0, high, low, 0, 0, 0, id];
        return packet(true, [PEER, HERE], 44, &[&header, payload].concat());
    }
    let mut p = packet(false, [PEER, HERE], protocol, payload);
    let field = (offset / 8) | if more { 0x2000 } else { 0 };
    p[4..6].copy_from_slice(&[0, id]);
    p[6..8].copy_from_slice(&field.to_be_bytes());
    p
}

#[test]
fn later_fragments_pass_if_the_first_did() {
    let datagram = |port| [ports(999, port), vec![0; 12]].concat();
    for v6 in [false, true] {
        let mut filter = some();
        let later = |id| fragment(v6, PROTO_UDP, 16, false, id, &[0; 8]);
        assert!(!admits(&mut filter, &later(1), at(0)), "before the first");
        let first = fragment(v6, PROTO_UDP, 0, true, 1, &datagram(53));
        assert!(admits(&mut filter, &first, at(0)));
        assert!(admits(&mut filter, &later(1), at(0)));
        assert!(!admits(&mut filter, &later(2), at(0)), "of another packet");
        let closed = fragment(v6, PROTO_UDP, 0, true, 3, &datagram(54));
        assert!(!admits(&mut filter, &closed, at(0)));
        assert!(!admits(&mut filter, &later(3), at(0)));
    }
}

#[test]
fn tcp_in_fragments_does_not_pass() {
    for v6 in [false, true] {
        let mut filter = some();
        let segment = &tcp_to(false, 443, ACK)[20..];
        let first = fragment(v6, PROTO_TCP, 0, true, 1, segment);
        assert!(!admits(&mut filter, &first, at(0)));
        let flags = fragment(v6, PROTO_TCP, 8, false, 1, &segment[8..]);
        assert!(!admits(&mut filter, &flags, at(0)));
    }
}

#[test]
fn packets_with_incomplete_headers_do_not_pass() {
    for v6 in [false, true] {
        for (protocol, most) in [
            (PROTO_TCP, 13),
            (PROTO_UDP, 3),
            (PROTO_ICMP, 5),
            (PROTO_ICMPV6, 5),
        ] {
            for length in 0..=most {
                // Open ports, and padding after the packet that would complete the header.
                let transport = &[0, 53, 0, 53, 0, 7, 0, 0, 0, 0, 0, 0, 0x50, ACK][..length];
                let mut packet = packet(v6, [PEER, HERE], protocol, transport);
                packet.extend([0xff; 32]);
                assert!(!admits(&mut some(), &packet, at(0)), "{protocol} {length}");
            }
        }
    }
}

#[test]
fn other_protocols_do_not_pass() {
    for protocol in [2, 4, 41, 47, 50, 51, 132, 255] {
        for v6 in [false, true] {
            let packet = packet(v6, [PEER, HERE], protocol, &[0; 40]);
            assert!(!admits(&mut some(), &packet, at(0)), "{protocol}");
        }
    }
}

#[test]
fn ports_are_found_behind_extension_headers() {
    let mut rest = vec![PROTO_TCP, 0, 1, 4, 0, 0, 0, 0];
    rest.extend(&tcp_to(true, 22, SYN)[40..]);
    let closed = packet(true, [PEER, HERE], 60, &rest);
    assert!(!admits(&mut some(), &closed, at(0)));
    rest[10..12].copy_from_slice(&443u16.to_be_bytes());
    let open = packet(true, [PEER, HERE], 60, &rest);
    assert!(admits(&mut some(), &open, at(0)));
}

#[test]
fn a_new_filter_keeps_tracked_flows() {
    let mut filter = some();
    sends(&mut filter, &udp(false, [HERE, PEER], 5000, 123), at(0));
    let changed = StatefulFilter::set(
        Some(Box::new(filter)),
        Filters::Same(Filter::Only(Open::default()), Destinations::Any),
    );
    let mut filter = changed.expect("a filter");
    assert!(admits(
        &mut filter,
        &udp(false, [PEER, HERE], 123, 5000),
        at(1)
    ));
    assert!(!admits(&mut filter, &tcp_to(false, 443, SYN), at(1)));
    assert!(
        StatefulFilter::set(Some(filter), Filters::Same(Filter::All, Destinations::Any)).is_none()
    );
}

#[test]
fn after_lifting_all_limits_only_new_flows_are_answered() {
    let open = Open {
        tcp: std::iter::once(443..=443).collect(),
        ..Open::default()
    };
    let mut filter =
        StatefulFilter::set(None, Filters::Same(Filter::Only(open), Destinations::Any))
            .expect("a filter");
    let answer = udp(false, [PEER, HERE], 123, 5000);
    assert!(!admits(&mut filter, &answer, at(0)));
    // A connection continues, whichever end started it.
    assert!(admits(&mut filter, &tcp_to(false, 22, tcp::ACK), at(0)));
    sends(&mut filter, &udp(false, [HERE, PEER], 5000, 123), at(1));
    assert!(admits(&mut filter, &answer, at(1)));
}

#[test]
fn adjacent_port_ranges_are_merged() {
    let ports = |ranges: &[(u16, u16)]| -> Ports {
        ranges.iter().map(|(first, last)| *first..=*last).collect()
    };
    let joined = ports(&[
        (20, 30),
        (1, 5),
        (6, 6),
        (25, 40),
        (65_535, 65_535),
        (0, 0),
        (9, 8),
    ]);
    assert_eq!(joined, Ports(vec![(0, 6), (20, 40), (65_535, 65_535)]));
    let all = ports(&[(0, 65_535), (7, 7)]);
    assert_eq!(all, Ports(vec![(0, 65_535)]));
    for (port, inside) in [
        (0, true),
        (6, true),
        (7, false),
        (19, false),
        (20, true),
        (40, true),
        (41, false),
    ] {
        assert_eq!(joined.contains(port), inside, "{port}");
    }
    assert!(!Ports::default().contains(0));
}

/// Prints the cost of filtering a packet: `CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo test -p seikan-proto
/// --lib filter_cost -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
#[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
fn filter_cost_with_64_rules() {
    use std::hint::black_box;
    const ROUNDS: u32 = 10_000_000;
    // 32 TCP and 32 UDP ranges, none adjacent to another.
    let ranges = || (0..32u16).map(|n| 1000 * n + 100..=1000 * n + 200);
    let open = Open {
        icmp: false,
        tcp: ranges().collect(),
        udp: ranges().collect(),
    };
    let time = |name: &str, bytes: &[u8], filter: &mut Option<Box<StatefulFilter>>| {
        let ip = IpPacket::parse(bytes).expect("a packet");
        let best = (0..5).map(|_| {
            let start = std::time::Instant::now();
            for _ in 0..ROUNDS {
                let (ip, bytes) = (black_box(&ip), black_box(bytes));
                let passes = match black_box(&mut *filter) {
                    None => Ok(()),
                    Some(filter) => filter.check(ip, bytes, at(1)),
                };
                black_box(passes.is_ok());
            }
            start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
        });
        eprintln!("{name}: {:.1} ns", best.fold(f64::INFINITY, f64::min));
    };
    for v6 in [false, true] {
        let (data, syn) = (tcp_to(v6, 15_150, ACK), tcp_to(v6, 15_150, SYN));
        let own = Destinations::Only(vec![here(false), here(true)]);
        let probe = udp(v6, [PEER, HERE], 999, 15_150);
        let answer = udp(v6, [PEER, HERE], 53, 5000);
        let outgoing = udp(v6, [HERE, PEER], 5000, 53);
        let mut filter =
            StatefulFilter::set(None, Filters::Same(Filter::Only(open.clone()), own.clone()));
        // The maximum number of flows.
        for port in 0..2 * GENERATION_FLOWS as u16 {
            let filter = filter.as_mut().expect("a filter");
            sends(filter, &udp(v6, [HERE, PEER], 5000 + port, 53), at(0));
        }
        sends(filter.as_mut().expect("a filter"), &outgoing, at(0));
        let family = if v6 { "IPv6" } else { "IPv4" };
        time(&format!("{family}, no filter"), &data, &mut None);
        let mut all = StatefulFilter::set(None, Filters::Same(Filter::All, own.clone()));
        time(&format!("{family}, everything open"), &data, &mut all);
        time(&format!("{family}, TCP data"), &data, &mut filter);
        time(
            &format!("{family}, TCP SYN to an open port"),
            &syn,
            &mut filter,
        );
        time(
            &format!("{family}, UDP to an open port"),
            &probe,
            &mut filter,
        );
        let name = format!("{family}, UDP, an answer");
        time(
            &format!("{name}, same flow as before"),
            &answer,
            &mut filter,
        );
        let other = udp(v6, [HERE, PEER], 5001, 53);
        sends(filter.as_mut().expect("a filter"), &other, at(1));
        time(&format!("{name}, another flow"), &answer, &mut filter);
        let filter = filter.as_mut().expect("a filter");
        let both =
            [&outgoing, &other].map(|bytes| (IpPacket::parse(bytes).expect("a packet"), bytes));
        for (name, step) in [("the same flow", 0), ("two flows in turns", 1)] {
            let best = (0..5).map(|_| {
                let start = std::time::Instant::now();
                for round in 0..ROUNDS as usize {
                    let (ip, bytes) = black_box(&both[(round & 1) * step]);
                    filter.note(ip, bytes, at(1));
                }
                start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
            });
            let best = best.fold(f64::INFINITY, f64::min);
            eprintln!("{family}, UDP, noting what is sent, {name}: {best:.1} ns");
        }
    }
}
