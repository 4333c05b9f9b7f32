//! Tests over loopback in a namespace. Refusals come from the kernel.

use super::send::{refuses_gso, unit_lengths};
use super::*;
use crate::netlink::AddressOptions;
use crate::testing::{in_namespace, set_address, set_mtu, set_up, skip};
use crate::tun::ioctl;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use seikan_observe::DropReason;
use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::num::NonZeroU8;

const LOOPBACKS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

fn socket(ip: IpAddr) -> UdpSocket {
    socket_with(ip, &UdpOptions::default())
}

fn socket_with(ip: IpAddr, options: &UdpOptions) -> UdpSocket {
    UdpSocket::bind((ip, 0).into(), options).expect("UDP socket")
}

fn plain() -> UdpOptions {
    UdpOptions {
        gso: false,
        gro: false,
        ..UdpOptions::default()
    }
}

fn to<'a>(socket: &UdpSocket, segment_size: Option<u16>, payload: &'a [u8]) -> Transmit<'a> {
    let destination = socket.local_addr().expect("address");
    Transmit {
        destination,
        source: None,
        traffic_class: 0,
        hop_limit: None,
        segment_size,
        payload,
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn readable(socket: &UdpSocket, milliseconds: u16) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::from(milliseconds)).expect("poll") == 1
}

/// Returns all waiting buffers, each with its datagrams.
fn receive_buffers(socket: &UdpSocket) -> Vec<(ReceiveMeta, Vec<Vec<u8>>)> {
    let mut batch = ReceiveBatch::new(32, 65536);
    let mut buffers = Vec::new();
    let mut wait = 2000;
    while readable(socket, wait) {
        wait = 0;
        socket.receive(&mut batch).expect("receive");
        let (metas, arena) = batch.parts_mut();
        for meta in metas {
            let datagrams = meta.segments().map(|range| arena[range].to_vec()).collect();
            buffers.push((*meta, datagrams));
        }
    }
    buffers
}

fn receive_datagrams(socket: &UdpSocket) -> Vec<Vec<u8>> {
    receive_buffers(socket)
        .into_iter()
        .flat_map(|(_, datagrams)| datagrams)
        .collect()
}

fn chunks(bytes: &[u8], size: usize) -> Vec<Vec<u8>> {
    bytes.chunks(size).map(<[u8]>::to_vec).collect()
}

/// Makes the kernel refuse UDP_SEGMENT on this socket with EINVAL, because it cannot segment
/// datagrams without checksum (`udp_send_skb`, `sk_no_check_tx`).
fn refuse_gso(socket: &UdpSocket) {
    control::set_int(socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).expect("SO_NO_CHECK");
}

#[test]
fn one_send_arrives_as_one_buffer_of_many_datagrams() {
    in_namespace(|| {
        for ip in LOOPBACKS {
            let (sender, receiver) = (socket(ip), socket(ip));
            if !sender.gso() || !receiver.capabilities().gro.is_present() {
                return skip("no UDP_SEGMENT or no UDP_GRO");
            }
            let payload = pattern(10_300);
            sender
                .send(&to(&receiver, Some(1000), &payload))
                .expect("send");
            let buffers = receive_buffers(&receiver);
            assert_eq!(buffers.len(), 1, "{ip}");
            let (meta, datagrams) = &buffers[0];
            assert_eq!(
                (meta.segment_size, meta.length, meta.truncated),
                (1000, 10_300, false)
            );
            assert_eq!(datagrams, &chunks(&payload, 1000));
            assert_eq!(sender.gso_fallbacks(), 0);
        }
    });
}

#[test]
fn limits_of_one_call_are_kept_by_several() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        for (length, size) in [
            (20_050, 100),
            (300_000, 1400),
            (200_000, 40_000),
            (65_487 * 2, 1),
        ] {
            let payload = pattern(length);
            sender
                .send(&to(&receiver, Some(size), &payload))
                .expect("send");
            let received = receive_datagrams(&receiver);
            assert!(
                received == chunks(&payload, size.into()),
                "{length} bytes by {size}"
            );
        }
        assert_eq!(
            (sender.gso_fallbacks(), receiver.receive_queue_drops()),
            (0, 0)
        );
    });
}

#[test]
fn units_tile_every_load_within_the_limits() {
    for gso in [false, true] {
        for size in [
            1u16, 2, 9, 1000, 1023, 1024, 1400, 9000, 32_743, 32_744, 65_487, 65_535,
        ] {
            for length in [0usize, 1, 999, 1000, 1001, 64_000, 65_487, 65_488, 1 << 20] {
                let lengths = unit_lengths(length, Some(size), gso);
                assert_eq!(lengths.iter().sum::<usize>(), length);
                let (last, others) = lengths.split_last().expect("at least one unit");
                let whole = |unit: &usize| unit.is_multiple_of(usize::from(size));
                assert!(others.iter().all(whole), "{length} by {size}");
                for unit in others.iter().chain([last]) {
                    let segments = unit.div_ceil(size.into());
                    assert!(segments <= if gso { MAX_GSO_SEGMENTS } else { 1 });
                    assert!(segments <= 1 || *unit <= MAX_GSO_BYTES);
                }
            }
        }
    }
}

#[test]
fn without_offload_every_datagram_arrives_by_itself() {
    in_namespace(|| {
        for ip in LOOPBACKS {
            let (sender, receiver) = (socket_with(ip, &plain()), socket_with(ip, &plain()));
            assert_eq!(sender.capabilities().gso, Ability::turned_off());
            let payload = pattern(100_500);
            sender
                .send(&to(&receiver, Some(1000), &payload))
                .expect("send");
            let buffers = receive_buffers(&receiver);
            assert_eq!(buffers.len(), 101);
            assert!(
                buffers
                    .iter()
                    .all(|(meta, _)| meta.segment_size == meta.length)
            );
            let received: Vec<u8> = buffers.into_iter().flat_map(|(_, d)| d.concat()).collect();
            assert!(received == payload);
        }
    });
}

#[test]
fn a_refused_batch_is_replayed_in_order_and_whole() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        if !sender.gso() {
            return skip("no UDP_SEGMENT");
        }
        refuse_gso(&sender);
        let payload = pattern(150_500);
        let batch = [
            to(&receiver, None, &payload[..900]),
            to(&receiver, Some(1000), &payload[900..140_400]),
            to(&receiver, Some(500), &payload[140_400..150_000]),
            to(&receiver, None, &payload[150_000..]),
        ];
        sender.send_batch(&batch).expect("send");
        let received = receive_datagrams(&receiver);
        let mut expected = chunks(batch[0].payload, 900);
        expected.extend(chunks(batch[1].payload, 1000));
        expected.extend(chunks(batch[2].payload, 500));
        expected.extend(chunks(batch[3].payload, 500));
        assert!(received == expected);
        assert_eq!(sender.gso_fallbacks(), 1, "asked once, then remembered");
        assert!(sender.gso(), "other destinations keep it");
    });
}

#[test]
fn a_refusal_is_forgotten_on_request() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        if !sender.gso() {
            return skip("no UDP_SEGMENT");
        }
        refuse_gso(&sender);
        let payload = pattern(3000);
        for fallbacks in [1, 2] {
            sender
                .send(&to(&receiver, Some(1000), &payload))
                .expect("send");
            assert_eq!(sender.gso_fallbacks(), fallbacks);
            sender.set_gso(true);
        }
        sender.set_gso(false);
        sender
            .send(&to(&receiver, Some(1000), &payload))
            .expect("send");
        assert_eq!(sender.gso_fallbacks(), 2);
        assert_eq!(receive_datagrams(&receiver).len(), 9);
    });
}

#[test]
fn refusals_are_kept_by_destination_up_to_a_limit() {
    let gso = GsoState {
        on: AtomicBool::new(true),
        refused: Mutex::new(Vec::new()),
        refused_count: AtomicUsize::new(0),
        fallbacks: AtomicU64::new(0),
    };
    let address = |i: usize| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + i as u32));
    for i in 0..MAX_REFUSED {
        gso.refuse(address(i));
        gso.refuse(address(i));
    }
    assert!(!gso.allowed(address(0)) && gso.allowed(address(MAX_REFUSED)));
    gso.refuse(address(MAX_REFUSED));
    assert!(!gso.allowed(address(MAX_REFUSED + 1)));
}

#[test]
fn eio_of_an_egress_without_checksum_offload_is_a_refusal() {
    // Linux before 6.11 returns this for a device without checksum offload, later ones for IPsec
    // only. The test of the replay above uses EINVAL.
    assert!(refuses_gso(Errno::EIO));
    assert!(!refuses_gso(Errno::EAGAIN) && !refuses_gso(Errno::EMSGSIZE));
}

#[test]
fn a_datagram_over_the_mtu_is_emsgsize_and_not_fragmented() {
    in_namespace(|| {
        set_mtu("lo", 1500);
        for (ip, headers) in [(LOOPBACKS[0], 28), (LOOPBACKS[1], 48)] {
            let (sender, receiver) = (socket(ip), socket(ip));
            let payload = pattern(1501 - headers);
            sender
                .send(&to(&receiver, None, &payload[1..]))
                .expect("exactly the MTU");
            let error = sender
                .send(&to(&receiver, None, &payload))
                .expect_err("one byte more");
            assert_eq!(error.error.raw_os_error(), Some(libc::EMSGSIZE), "{ip}");
        }
    });
}

#[test]
fn emsgsize_names_the_transmit_and_does_not_cost_the_offload() {
    in_namespace(|| {
        set_mtu("lo", 1500);
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        let payload = pattern(6000);
        let batch = [
            to(&receiver, Some(1000), &payload),
            to(&receiver, Some(1473), &payload),
            to(&receiver, Some(1000), &payload),
        ];
        let error = sender
            .send_batch(&batch)
            .expect_err("segments over the MTU");
        assert_eq!(error.error.raw_os_error(), Some(libc::EMSGSIZE));
        assert_eq!((error.transmits, error.bytes), (1, 0));
        assert_eq!(sender.gso_fallbacks(), 0);
        sender.send_batch(&batch[2..]).expect("going on behind it");
        assert_eq!(
            receive_datagrams(&receiver).concat(),
            [&payload[..], &payload[..]].concat()
        );
    });
}

/// Creates a TAP interface with 10.78.0.1/24: an Ethernet on which only the test answers ARP, so
/// that sent packets wait and stay charged to their socket. (A TUN does not do that.)
fn silent_ethernet() -> std::fs::File {
    let tap = ioctl::open().expect("/dev/net/tun");
    ioctl::attach(&tap, "tap-u", libc::IFF_TAP | libc::IFF_NO_PI).expect("TAP device");
    set_address(
        "tap-u",
        Ipv4Addr::new(10, 78, 0, 1),
        Ipv4Addr::new(255, 255, 255, 0),
    );
    set_up("tap-u");
    tap
}

/// Answers the waiting ARP request (RFC 826) with a made-up address. Returns all UDP payloads that
/// follow.
fn answer_and_collect(mut tap: &std::fs::File) -> Vec<u8> {
    let mut payloads = Vec::new();
    let mut frame = [0; 2000];
    let mut fds = [PollFd::new(tap.as_fd(), PollFlags::POLLIN)];
    while poll(&mut fds, PollTimeout::from(500u16)).expect("poll") == 1 {
        let length = tap.read(&mut frame).expect("read");
        if frame[12..14] == [0x08, 0x06] {
            let (sender, target) = (frame[22..32].to_vec(), frame[38..42].to_vec());
            let mut reply = [&sender[..6], &[2, 0, 0, 0, 0, 2], &frame[12..20], &[0, 2]].concat();
            reply.extend([&[2, 0, 0, 0, 0, 2], &target[..], &sender[..]].concat());
            tap.write_all(&reply).expect("write");
        } else if frame[12..14] == [0x08, 0x00] {
            payloads.extend_from_slice(&frame[14 + 28..length]);
        }
    }
    payloads
}

#[test]
fn a_full_send_buffer_says_how_far_it_came() {
    in_namespace(|| {
        let tap = silent_ethernet();
        let small = UdpOptions {
            send_buffer: 20_000,
            ..plain()
        };
        let sender = socket_with(Ipv4Addr::UNSPECIFIED.into(), &small);
        let payload = pattern(102_000);
        let transmit = Transmit {
            destination: (Ipv4Addr::new(10, 78, 0, 2), 9).into(),
            source: None,
            traffic_class: 0,
            hop_limit: None,
            segment_size: Some(1000),
            payload: &payload[2000..],
        };
        let batch = [
            Transmit {
                payload: &payload[..2000],
                ..transmit
            },
            transmit,
        ];
        let error = sender.send_batch(&batch).expect_err("a full buffer");
        assert_eq!(error.error.kind(), io::ErrorKind::WouldBlock);
        assert_eq!((error.transmits, error.bytes % 1000), (1, 0));
        assert!(error.bytes > 0, "no datagram of the second transmit");
        assert!(answer_and_collect(&tap) == payload[..2000 + error.bytes]);
    });
}

#[test]
fn pieces_need_not_end_where_datagrams_do() {
    in_namespace(|| {
        for options in [UdpOptions::default(), plain()] {
            let sender = socket_with(LOOPBACKS[0], &options);
            let receiver = socket_with(
                LOOPBACKS[0],
                &UdpOptions {
                    gso: true,
                    ..options
                },
            );
            let payload = pattern(30_000);
            // 3000 pieces are too many for one message; 37 and 500 bytes do not align.
            for (piece, size) in [
                (37, 1000),
                (500, 1472),
                (10, 1000),
                (30_000, 999),
                (1000, 1000),
            ] {
                let pieces: Vec<IoSlice<'_>> = payload.chunks(piece).map(IoSlice::new).collect();
                let envelope = Envelope {
                    destination: receiver.local_addr().expect("address"),
                    source: None,
                    traffic_class: 0,
                    hop_limit: None,
                    segment_size: Some(size),
                };
                sender.send_vectored(&envelope, &pieces).expect("send");
                let received = receive_datagrams(&receiver);
                assert!(
                    received == chunks(&payload, size.into()),
                    "{piece} by {size}"
                );
            }
        }
    });
}

#[test]
fn a_datagram_of_too_many_pieces_is_an_error() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        let payload = pattern(1025);
        let pieces: Vec<IoSlice<'_>> = payload.chunks(1).map(IoSlice::new).collect();
        let destination = receiver.local_addr().expect("address");
        let envelope = Envelope {
            destination,
            source: None,
            traffic_class: 0,
            hop_limit: None,
            segment_size: None,
        };
        let error = sender
            .send_vectored(&envelope, &pieces)
            .expect_err("1025 pieces");
        assert_eq!(error.error.kind(), io::ErrorKind::InvalidInput);
        sender
            .send_vectored(&envelope, &pieces[1..])
            .expect("1024 pieces");
    });
}

#[test]
fn an_empty_datagram_is_sent_and_received() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        sender
            .send_batch(&[to(&receiver, Some(10), b""), to(&receiver, None, b"x")])
            .expect("send");
        let buffers = receive_buffers(&receiver);
        let counts: Vec<_> = buffers
            .iter()
            .map(|(meta, _)| (meta.length, meta.datagrams()))
            .collect();
        assert_eq!(counts, [(0, 1), (1, 1)]);
    });
}

#[test]
fn a_connected_socket_receives_only_from_its_peer() {
    in_namespace(|| {
        let [peer, stranger, mut receiver] = [(); 3].map(|()| socket(LOOPBACKS[0]));
        let at = peer.local_addr().expect("an address");
        receiver.connect(at).expect("connected");
        for sender in [&stranger, &peer, &stranger] {
            sender.send(&to(&receiver, None, b"hi")).expect("sent");
        }
        let received = receive_buffers(&receiver);
        let sources: Vec<_> = received.iter().map(|(meta, _)| meta.source).collect();
        assert_eq!(sources, [at]);
    });
}

#[test]
fn an_icmp_error_costs_a_connected_socket_no_further_datagram() {
    in_namespace(|| {
        let [closed, mut sender] = [(); 2].map(|()| socket(LOOPBACKS[0]));
        let at = closed.local_addr().expect("an address");
        sender.connect(at).expect("connected");
        let transmit = to(&closed, None, b"hi");
        drop(closed);
        sender.send(&transmit).expect("sent");
        let opened = UdpSocket::bind(at, &plain()).expect("bind");
        sender.send(&transmit).expect("sent");
        assert_eq!(receive_datagrams(&opened), [b"hi"]);
    });
}

#[test]
fn traffic_class_and_addresses_pass_with_every_segment() {
    in_namespace(|| {
        let cases: [(IpAddr, IpAddr); 2] = [
            (
                Ipv4Addr::new(127, 0, 0, 5).into(),
                Ipv4Addr::new(127, 0, 0, 6).into(),
            ),
            (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()),
        ];
        for (here, there) in cases {
            let any: IpAddr = match here {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            let (sender, receiver) = (socket(any), socket(any));
            let payload = pattern(3000);
            let port = receiver.local_addr().expect("address").port();
            for (class, segment_size) in [(0xb9, Some(1000)), (0x02, None), (0, Some(1000))] {
                let transmit = Transmit {
                    destination: (there, port).into(),
                    source: Some(here),
                    traffic_class: class,
                    hop_limit: None,
                    segment_size,
                    payload: &payload,
                };
                sender.send(&transmit).expect("send");
                for (meta, _) in receive_buffers(&receiver) {
                    assert_eq!(meta.traffic_class, class);
                    assert_eq!(meta.destination, Some(there));
                    assert_eq!(meta.source.ip(), here);
                    assert_eq!(
                        meta.source.port(),
                        sender.local_addr().expect("address").port()
                    );
                    assert_eq!(Ok(meta.interface), nix::net::if_::if_nametoindex("lo"));
                }
            }
        }
    });
}

#[test]
fn a_datagram_has_the_hop_limit_of_its_envelope() {
    in_namespace(|| {
        let rules = "add table inet hops
            add chain inet hops input { type filter hook input priority 0; }
            add rule inet hops input ip ttl 2 drop
            add rule inet hops input ip6 hoplimit 2 drop";
        let added = std::process::Command::new("nft").arg(rules).status();
        assert!(added.expect("nft").success());
        for ip in LOOPBACKS {
            let (sender, receiver) = (socket(ip), socket(ip));
            for (hops, arrives) in [(Some(2), false), (Some(3), true), (None, true)] {
                let transmit = Transmit {
                    hop_limit: hops.and_then(NonZeroU8::new),
                    ..to(&receiver, Some(1000), &[7; 2000])
                };
                sender.send(&transmit).expect("send");
                let received = readable(&receiver, 100);
                assert_eq!(received, arrives, "{ip}, hop limit {hops:?}");
                if arrives {
                    receive_buffers(&receiver);
                }
            }
        }
    });
}

#[test]
fn a_foreign_source_is_an_error_and_does_not_cost_the_offload() {
    in_namespace(|| {
        let foreign: [(IpAddr, i32); 2] = [
            (Ipv4Addr::new(192, 0, 2, 1).into(), libc::ENETUNREACH),
            // The same errno as from a kernel without UDP_SEGMENT.
            (
                Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into(),
                libc::EINVAL,
            ),
        ];
        for (ip, (source, errno)) in LOOPBACKS.into_iter().zip(foreign) {
            let (sender, receiver) = (socket(ip), socket(ip));
            let payload = pattern(3000);
            let transmit = Transmit {
                source: Some(source),
                ..to(&receiver, Some(1000), &payload)
            };
            let error = sender.send(&transmit).expect_err("not our address");
            assert_eq!(error.error.raw_os_error(), Some(errno));
            assert_eq!(sender.gso_fallbacks(), 0);
        }
    });
}

#[test]
fn an_oversized_datagram_does_not_drop_the_next_ones() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        // UDP over IPv4 carries at most 65,507 bytes.
        let payload = pattern(65_520 + 100);
        let mut dropped = Vec::new();
        let transmit = to(&receiver, Some(65_520), &payload);
        let sent = sender.send_or_drop(&transmit, |reason, bytes| dropped.push((reason, bytes)));
        assert_eq!(sent, 100);
        assert_eq!(dropped, [(DropReason::SendTooLarge, 65_520)]);
        assert_eq!(receive_datagrams(&receiver), [&payload[65_520..]]);
    });
}

#[test]
fn datagrams_above_the_receive_buffer_are_counted() {
    in_namespace(|| {
        let small = UdpOptions {
            receive_buffer: 20_000,
            ..plain()
        };
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket_with(LOOPBACKS[0], &small));
        let payload = pattern(300_000);
        sender
            .send(&to(&receiver, Some(1000), &payload))
            .expect("send");
        let first = receive_datagrams(&receiver).len();
        assert!(first < 300, "nothing overflowed");
        // The counter in the next datagram must be enough.
        sender.send(&to(&receiver, None, b"next")).expect("send");
        assert_eq!(receive_datagrams(&receiver).len(), 1);
        assert_eq!(receiver.drops.load(Ordering::Relaxed), 300 - first as u64);
        sender
            .send(&to(&receiver, Some(1000), &payload))
            .expect("send");
        let second = receive_datagrams(&receiver).len();
        assert_eq!(
            receiver.receive_queue_drops(),
            600 - (first + second) as u64
        );
    });
}

#[test]
fn the_drop_counter_goes_on_where_32_bits_wrap() {
    in_namespace(|| {
        let socket = socket(LOOPBACKS[0]);
        for counter in [5, 0x7000_0000, 0xd000_0000, 0xffff_ffff, 3] {
            socket.note_drops(counter);
        }
        // An older counter changes nothing.
        socket.note_drops(0xffff_fff0);
        assert_eq!(socket.drops.load(Ordering::Relaxed), 0x1_0000_0003);
    });
}

#[test]
fn truncated_datagrams_are_marked() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        let payload = pattern(101);
        sender.send(&to(&receiver, None, &payload)).expect("send");
        sender
            .send(&to(&receiver, None, &payload[..100]))
            .expect("send");
        let mut batch = ReceiveBatch::new(4, 100);
        assert!(readable(&receiver, 2000));
        assert_eq!(receiver.receive(&mut batch).expect("receive"), 2);
        let seen = |index: usize| (batch.meta(index).truncated, batch.meta(index).length);
        assert_eq!([seen(0), seen(1)], [(true, 100), (false, 100)]);
        assert_eq!(batch.meta(1).offset, 100);
        assert_eq!(batch.parts_mut().1[100..200], payload[..100]);
    });
}

#[test]
fn a_batch_is_reusable_and_forgets_the_last_receive() {
    in_namespace(|| {
        let (sender, receiver) = (socket(LOOPBACKS[0]), socket(LOOPBACKS[0]));
        let mut batch = ReceiveBatch::new(3, 2000);
        for round in 0..5u8 {
            let payloads = [[round; 10], [round + 100; 10]];
            let transmits = payloads
                .each_ref()
                .map(|payload| to(&receiver, None, payload));
            sender.send_batch(&transmits).expect("send");
            assert!(readable(&receiver, 2000));
            assert_eq!(receiver.receive(&mut batch).expect("receive"), 2);
            let (metas, arena) = batch.parts_mut();
            let bytes = |meta: &ReceiveMeta| arena[meta.segments().next().expect("one")].to_vec();
            assert_eq!(metas.iter().map(bytes).collect::<Vec<_>>(), payloads);
        }
        let error = receiver.receive(&mut batch).expect_err("nothing more");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(batch.is_empty());
    });
}

#[test]
fn a_port_in_use_is_an_error_of_its_own() {
    in_namespace(|| {
        let first = socket(LOOPBACKS[0]);
        let address = first.local_addr().expect("address");
        let outcome = UdpSocket::bind(address, &UdpOptions::default());
        assert!(matches!(outcome, Err(UdpError::PortInUse { address: a }) if a == address));
    });
}

#[test]
fn both_families_bind_the_same_port() {
    in_namespace(|| {
        let v6 = socket(Ipv6Addr::UNSPECIFIED.into());
        let port = v6.local_addr().expect("address").port();
        let address = (Ipv4Addr::UNSPECIFIED, port).into();
        UdpSocket::bind(address, &UdpOptions::default()).expect("the IPv4 socket beside it");
    });
}

#[test]
fn a_foreign_address_is_an_error_of_its_own() {
    in_namespace(|| {
        let outcome = UdpSocket::bind(([192, 0, 2, 1], 0).into(), &UdpOptions::default());
        assert!(
            matches!(outcome, Err(UdpError::AddressNotAvailable { .. })),
            "{outcome:?}"
        );
    });
}

#[test]
fn privilege_grants_the_requested_buffers() {
    in_namespace(|| {
        let socket = socket(LOOPBACKS[0]);
        assert_eq!(socket.buffers().expect("sizes"), (7 << 20, 7 << 20));
        assert_eq!(socket.capabilities().receive_buffer, Ability::Present);
    });
}

#[test]
fn without_privilege_the_buffers_are_smaller_with_a_reason_and_a_mark_is_an_error() {
    in_namespace(|| {
        for capability in [
            caps::Capability::CAP_NET_ADMIN,
            caps::Capability::CAP_NET_RAW,
        ] {
            caps::drop(None, caps::CapSet::Effective, capability).expect("drop");
        }
        let huge = UdpOptions {
            receive_buffer: 1 << 30,
            ..UdpOptions::default()
        };
        let socket = socket_with(LOOPBACKS[0], &huge);
        let reason = socket
            .capabilities()
            .receive_buffer
            .reason()
            .expect("a reason");
        assert!(reason.contains("net.core.rmem_max"), "{reason}");
        let marked = UdpOptions {
            fwmark: Some(7),
            ..UdpOptions::default()
        };
        let outcome = UdpSocket::bind((LOOPBACKS[0], 0).into(), &marked);
        assert!(
            matches!(outcome, Err(UdpError::Mark { mark: 7, .. })),
            "{outcome:?}"
        );
    });
}

#[test]
fn the_firewall_mark_is_set() {
    in_namespace(|| {
        let marked = UdpOptions {
            fwmark: Some(0xca6c),
            ..UdpOptions::default()
        };
        let socket = socket_with(LOOPBACKS[0], &marked);
        assert_eq!(sockopt::Mark.get(&socket), Ok(0xca6c));
        socket.set_fwmark(0).expect("mark");
        assert_eq!(sockopt::Mark.get(&socket), Ok(0));
    });
}

/// Two namespaces with a link, and a filter without limits.
struct Linked {
    here: crate::netns::NetNs,
    there: crate::netns::NetNs,
    filter: std::sync::Arc<DatagramFilter>,
}

impl Linked {
    /// `None` if the host has no namespaces or no eBPF. The near end has several addresses of each
    /// family, those of IPv6 in several networks.
    fn create() -> Option<Linked> {
        let (here, there) = match (crate::netns::NetNs::create(), crate::netns::NetNs::create()) {
            (Ok(here), Ok(there)) => (here, there),
            _ => {
                skip("no namespaces");
                return None;
            }
        };
        let filter = match DatagramFilter::load() {
            Ok(filter) => std::sync::Arc::new(filter),
            Err(error) => {
                skip(&format!("no eBPF: {error}"));
                return None;
            }
        };
        let (left, right) = (
            here.netlink().expect("netlink"),
            there.netlink().expect("netlink"),
        );
        left.create_veth("a", "b", Some(there.as_fd()))
            .expect("veth");
        let near = [
            "10.9.9.1/24",
            "10.9.9.3/24",
            "10.9.9.4/24",
            "10.9.9.5/24",
            "fd09::1/48",
            "fd09::3/48",
            "fd09:0:0:1::1/48",
            "fd09:0:0:2::1/48",
            "fd09:0:0:3::1/48",
        ];
        for (netlink, name, addresses) in [
            (&left, "a", &near[..]),
            (&right, "b", &["10.9.9.2/24", "fd09::2/48"]),
        ] {
            let index = netlink.link(name).expect("link").index;
            for address in addresses {
                let options = AddressOptions {
                    no_dad: true,
                    ..AddressOptions::default()
                };
                netlink
                    .add_address_with(index, address.parse().expect("net"), options)
                    .expect("address");
            }
            netlink.set_up(index).expect("up");
        }
        // Neighbour discovery fails until the kernel has noticed the carrier.
        for [from, to] in [
            ["10.9.9.1:0", "10.9.9.2:7999"],
            ["[fd09::1]:0", "[fd09::2]:7999"],
        ] {
            let bind = |address| std::net::UdpSocket::bind(address).expect("bind");
            let sender = here.run(|| bind(from)).expect("namespace");
            let receiver = there.run(|| bind(to)).expect("namespace");
            let wait = std::time::Duration::from_millis(100);
            receiver.set_read_timeout(Some(wait)).expect("a timeout");
            let passes = || sender.send_to(&[0], to).is_ok() && receiver.recv(&mut [0]).is_ok();
            assert!((0..100).any(|_| passes()), "{to}");
        }
        Some(Linked {
            here,
            there,
            filter,
        })
    }

    fn sender(&self, address: &str) -> UdpSocket {
        let bind = || UdpSocket::bind(address.parse().expect("address"), &UdpOptions::default());
        self.here.run(bind).expect("namespace").expect("bind")
    }

    fn receiver(&self, address: &str) -> UdpSocket {
        let options = UdpOptions {
            datagram_filter: Ok(self.filter.clone()),
            ..UdpOptions::default()
        };
        let bind = || UdpSocket::bind(address.parse().expect("address"), &options);
        self.there.run(bind).expect("namespace").expect("bind")
    }
}

/// Runs a test with a sender, and a receiver that accepts datagrams up to `limit` bytes.
fn limited(limit: u32, test: impl FnOnce(&DatagramFilter, &UdpSocket, &UdpSocket)) {
    let Some(linked) = Linked::create() else {
        return;
    };
    linked.filter.set_maximum(limit);
    let sender = linked.sender("10.9.9.1:7000");
    let receiver = linked.receiver("10.9.9.2:7000");
    assert_eq!(receiver.capabilities().datagram_filter, Ability::Present);
    test(&linked.filter, &sender, &receiver);
}

/// Returns the lengths that arrive. Each element of `sent` is sent as datagrams of this size,
/// fragmented where they exceed the MTU.
fn that_arrive(sender: &UdpSocket, receiver: &UdpSocket, sent: &[(usize, usize)]) -> Vec<usize> {
    // A hostile sender may fragment.
    set_int_for_tests(
        sender,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_DONT,
    );
    for (bytes, size) in sent {
        let payload = pattern(*bytes);
        let joined = (*size < *bytes).then_some(*size as u16);
        sender.send(&to(receiver, joined, &payload)).expect("send");
    }
    let buffers = receive_buffers(receiver);
    buffers
        .iter()
        .flat_map(|(_, datagrams)| datagrams.iter().map(Vec::len))
        .collect()
}

fn set_int_for_tests(socket: &UdpSocket, level: i32, name: i32, value: i32) {
    control::set_int(socket.as_fd(), level, name, value).expect("option");
}

#[test]
fn a_datagram_longer_than_the_limit_is_refused_and_counted() {
    limited(2048, |filter, sender, receiver| {
        let lengths = that_arrive(
            sender,
            receiver,
            &[(2048, 2048), (2049, 2049), (60_000, 60_000), (0, 0)],
        );
        assert_eq!(lengths, [2048]);
        let filtered = Filtered {
            buffers: 3,
            oversized: 2,
            malformed: 1, // the empty one
            limited: 0,
        };
        assert_eq!(filter.filtered(), filtered);
        assert_eq!(receiver.receive_queue_drops(), 3);
        // The maximum can change while the program runs.
        filter.set_maximum(9000);
        assert_eq!(
            that_arrive(sender, receiver, &[(9000, 9000), (9001, 9001)]),
            [9000]
        );
        assert_eq!(filter.filtered().oversized, 3);
    });
}

#[test]
fn joined_datagrams_are_as_long_as_each_of_them() {
    limited(1000, |filter, sender, receiver| {
        let lengths = that_arrive(sender, receiver, &[(30_000, 1000), (30_000, 1200)]);
        assert_eq!(lengths, [1000; 30]);
        assert_eq!(
            filter.filtered(),
            Filtered {
                buffers: 1,
                oversized: 25,
                malformed: 0,
                limited: 0,
            }
        );
    });
}

#[test]
fn a_datagram_of_no_type_or_shorter_than_its_type_is_dropped_and_counted() {
    limited(u32::MAX, |filter, sender, receiver| {
        let begins = pattern(1)[0];
        filter.set_types(&[(begins, 32), (begins ^ 1, 0)]);
        let lengths = that_arrive(sender, receiver, &[(31, 31), (32, 32), (900, 300)]);
        assert_eq!(lengths, [32, 300, 300, 300]);
        assert_eq!(filter.filtered().malformed, 1);
        filter.set_types(&[(begins ^ 1, 0), (255, 0)]);
        let lengths = that_arrive(sender, receiver, &[(32, 32), (900, 300)]);
        assert_eq!(lengths, [0; 0]);
        let filtered = Filtered {
            buffers: 3,
            oversized: 0,
            malformed: 5,
            limited: 0,
        };
        assert_eq!(filter.filtered(), filtered);
    });
}

/// Sends this many datagrams, and returns the number that arrives.
fn arrive(sender: &UdpSocket, receiver: &UdpSocket, count: usize) -> usize {
    that_arrive(sender, receiver, &vec![(100, 100); count]).len()
}

#[test]
fn sources_that_are_not_known_have_an_allowance_for_each_address() {
    let Some(linked) = Linked::create() else {
        return;
    };
    let receiver = linked.receiver("10.9.9.2:7000");
    let [known, same_address] =
        ["10.9.9.1:7000", "10.9.9.1:7001"].map(|address| linked.sender(address));
    let known_address = known.local_addr().expect("address");
    linked.filter.limit_sources([known_address].into_iter(), 4);
    assert_eq!(arrive(&known, &receiver, 20), 20);
    assert_eq!(arrive(&same_address, &receiver, 20), 4);
    assert_eq!(linked.filter.filtered().limited, 16);
    assert_eq!(linked.filter.filtered().buffers, 16);
    // Two addresses share a counter with a probability of 1/1024; all three with the first: one in a billion.
    let others = [3, 4, 5].map(|host| {
        let sender = linked.sender(&format!("10.9.9.{host}:7000"));
        arrive(&sender, &receiver, 20)
    });
    assert_eq!(others.iter().max(), Some(&4));
    // The allowance is renewed, and nobody is known any more.
    linked.filter.limit_sources(std::iter::empty(), 4);
    assert_eq!(arrive(&known, &receiver, 3), 3);
    assert_eq!(arrive(&same_address, &receiver, 3), 1);
    // Joined datagrams may exceed it.
    linked.filter.limit_sources(std::iter::empty(), 4);
    let joined = that_arrive(&known, &receiver, &[(1000, 100), (1000, 100)]);
    assert_eq!(joined.len(), 10);
    // Another type of message has an allowance of its own.
    let types = [1, 2, 3].map(|first| {
        let payload = [pattern(1)[0] ^ first; 100];
        for _ in 0..20 {
            known.send(&to(&receiver, None, &payload)).expect("send");
        }
        receive_buffers(&receiver).len()
    });
    assert_eq!(types.iter().max(), Some(&4));
    linked.filter.lift_limit();
    assert_eq!(arrive(&same_address, &receiver, 20), 20);
}

#[test]
fn sources_of_an_ipv6_slash_64_share_an_allowance() {
    let Some(linked) = Linked::create() else {
        return;
    };
    let receiver = linked.receiver("[fd09::2]:7000");
    let [first, same_network] =
        ["[fd09::1]:7000", "[fd09::3]:7000"].map(|address| linked.sender(address));
    linked.filter.limit_sources(std::iter::empty(), 4);
    assert_eq!(arrive(&first, &receiver, 3), 3);
    assert_eq!(arrive(&same_network, &receiver, 3), 1);
    // As with IPv4.
    let others = [1, 2, 3].map(|network| {
        let sender = linked.sender(&format!("[fd09:0:0:{network}::1]:7000"));
        arrive(&sender, &receiver, 20)
    });
    assert_eq!(others.iter().max(), Some(&4));
    let known_address = first.local_addr().expect("address");
    linked.filter.limit_sources([known_address].into_iter(), 4);
    assert_eq!(arrive(&first, &receiver, 20), 20);
    assert_eq!(arrive(&same_network, &receiver, 20), 4);
}

#[test]
fn the_loopback_interface_has_no_limit() {
    in_namespace(|| {
        let Ok(filter) = DatagramFilter::load() else {
            return skip("no eBPF");
        };
        filter.set_maximum(100);
        let options = UdpOptions {
            datagram_filter: Ok(std::sync::Arc::new(filter)),
            ..UdpOptions::default()
        };
        let receiver = socket_with(LOOPBACKS[0], &options);
        let sender = socket(LOOPBACKS[0]);
        assert_eq!(that_arrive(&sender, &receiver, &[(5000, 5000)]), [5000]);
    });
}
