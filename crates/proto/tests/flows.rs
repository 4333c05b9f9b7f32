//! Packets of all kinds, with and without offload at either end, whole and fragmented.

use crate::paths::{delivered_mss, syn};
use crate::sim::network::{Parcel, Path};
use crate::sim::packets::{Flow, packets_of};
use crate::sim::{Setup, World, address};
use seikan_observe::DropReason;
use seikan_proto::noise::Protocol;
use seikan_proto::outbox::{Destination, Outbox, Payload, Run};
use seikan_wire::ip::{self, ECN_CE, ECN_ECT0, ECN_NOT_ECT};
use seikan_wire::{GsoType, IpPacket, VNET_HDR_LEN, VnetHdr, tcp};
use std::time::Duration;

const NATIVE: Protocol = Protocol::Native;
const BOTH: [Protocol; 2] = [Protocol::WireGuard, NATIVE];
const FAMILIES: [bool; 2] = [false, true];

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn flow(v6: bool, tcp: bool) -> Flow {
    Flow {
        v6,
        tcp,
        ..Flow::udp(0)
    }
}

/// The datagrams of side 0 for `reads`, undelivered.
fn datagrams_for(world: &mut World, reads: &[Vec<u8>]) -> Vec<Parcel> {
    world.take_sent(0);
    world.links[0].path.down = true;
    world.send(0, reads);
    world.links[0].path.down = false;
    world.take_sent(0)
}

fn vnet(write: &[u8]) -> VnetHdr {
    VnetHdr::read(write).expect("a header")
}

#[test]
fn every_kind_of_read_arrives_whatever_the_ends_can_do() {
    for protocol in BOTH {
        for (sender, receiver) in [(true, true), (true, false), (false, true), (false, false)] {
            let mut setups = [Setup::new(protocol), Setup::new(protocol)];
            setups[0].offload = sender;
            setups[1].offload = receiver;
            let mut world = World::with(setups, [Path::default(), Path::default()], 1);
            world.establish();
            for v6 in FAMILIES {
                let (t, u) = (flow(v6, true), flow(v6, false));
                let mut reads = vec![
                    u.datagrams(0, &[1200], false, ECN_NOT_ECT),
                    t.segments_with(0, 1300, 1300, tcp::ACK, ECN_NOT_ECT, false),
                    t.segments_with(1300, 200, 1300, tcp::ACK | tcp::PSH, ECN_NOT_ECT, false),
                ];
                if sender {
                    reads.extend([
                        t.segments(1500, 50_000, 1300),
                        u.datagrams(1, &[1000; 20], true, ECN_NOT_ECT),
                        u.datagrams(21, &[1000, 1000, 7], true, ECN_NOT_ECT),
                        u.datagrams(24, &[6], true, ECN_NOT_ECT),
                    ]);
                }
                let counted = world.totals(0).outbound.packets_in;
                world.send(0, &reads);
                let packets = world.totals(0).outbound.packets_in - counted;
                assert_eq!(packets, if sender { 3 + 39 + 24 } else { 3 });
                world.run(seconds(1));
                let bytes = if sender { 51_500 } else { 1500 };
                let datagrams = if sender { 25 } else { 1 };
                assert_eq!(world.checkers[1].bytes(t), bytes, "{protocol:?}");
                assert_eq!(world.checkers[1].datagrams(u), datagrams, "{protocol:?}");
            }
            // Both ends have the same counts.
            let (out, inn) = (world.totals(0).outbound, world.totals(1).inbound);
            assert_eq!(
                out.packets_out, inn.packets_out,
                "{protocol:?} {sender} {receiver}"
            );
            world.check_nothing_pending();
        }
    }
}

#[test]
fn segments_of_a_flow_leave_as_one_super_packet() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            let mut setups = [Setup::new(protocol), Setup::new(protocol)];
            setups[0].offload = false;
            let mut world = World::with(setups, [Path::default(), Path::default()], 1);
            world.establish();
            let (t, u) = (flow(v6, true), flow(v6, false));
            let mut reads: Vec<_> = (0..20)
                .map(|n| t.segments_with(n * 1000, 1000, 1000, tcp::ACK, ECN_NOT_ECT, false))
                .collect();
            reads.extend((0..20).map(|n| u.datagrams(n, &[1000], false, ECN_NOT_ECT)));
            world.send(0, &reads);
            world.run(seconds(1));
            let kinds: Vec<_> = world
                .take_delivered(1)
                .iter()
                .map(|w| (vnet(w).gso_type, vnet(w).gso_size))
                .collect();
            let of_tcp = if v6 { GsoType::Tcp6 } else { GsoType::Tcp4 };
            assert_eq!(
                kinds,
                [(of_tcp, 1000), (GsoType::UdpL4, 1000)],
                "{protocol:?}"
            );
        }
    }
}

#[test]
fn flows_that_alternate_are_merged_each_and_keep_their_order() {
    for protocol in BOTH {
        let mut setups = [Setup::new(protocol), Setup::new(protocol)];
        setups[0].offload = false;
        let mut world = World::with(setups, [Path::default(), Path::default()], 1);
        world.establish();
        let flows = [0, 1, 2].map(|number| Flow {
            number,
            ..Flow::tcp(0)
        });
        let reads: Vec<_> = (0..30u64)
            .map(|n| {
                let f = flows[n as usize % 3];
                f.segments_with(n / 3 * 500, 500, 500, tcp::ACK, ECN_NOT_ECT, false)
            })
            .collect();
        world.send(0, &reads);
        world.run(seconds(1));
        assert_eq!(world.take_delivered(1).len(), 3, "{protocol:?}");
        assert!(flows.iter().all(|f| world.checkers[1].bytes(*f) == 5000));
    }
}

#[test]
fn a_push_ends_a_merged_packet_and_is_kept() {
    let mut setups = [Setup::new(NATIVE), Setup::new(NATIVE)];
    setups[0].offload = false;
    let mut world = World::with(setups, [Path::default(), Path::default()], 1);
    world.establish();
    let t = Flow::tcp(0);
    let reads: Vec<_> = (0..4u64)
        .map(|n| {
            let flags = if n == 1 {
                tcp::ACK | tcp::PSH
            } else {
                tcp::ACK
            };
            t.segments_with(n * 500, 500, 500, flags, ECN_NOT_ECT, false)
        })
        .collect();
    world.send(0, &reads);
    world.run(seconds(1));
    let pushes: Vec<Vec<bool>> = world
        .take_delivered(1)
        .iter()
        .map(|w| {
            packets_of(w)
                .iter()
                .map(|p| tcp::flags(&p[20..]) & tcp::PSH != 0)
                .collect()
        })
        .collect();
    assert_eq!(pushes, [[false, true], [false, false]]);
}

/// Losing any one datagram of a super-packet costs its bytes and no other.
#[test]
fn the_runs_around_a_lost_slice_arrive() {
    for v6 in FAMILIES {
        let t = flow(v6, true);
        let flags = tcp::ACK | tcp::CWR | tcp::PSH | tcp::FIN;
        let read = t.segments_with(0, 20_000, 1300, flags, ECN_ECT0, true);
        let count = {
            let mut world = World::new(NATIVE, 1);
            world.establish();
            datagrams_for(&mut world, std::slice::from_ref(&read)).len()
        };
        assert!(count > 12);
        for lost in 0..count {
            let mut world = World::new(NATIVE, 1);
            world.establish();
            let mut sent = datagrams_for(&mut world, std::slice::from_ref(&read));
            sent.remove(lost);
            world.receive(1, &sent);
            let writes = world.take_delivered(1);
            let runs = if lost == 0 || lost + 1 == count { 1 } else { 2 };
            assert_eq!(writes.len(), runs, "without slice {lost}");
            let came = world.checkers[1].bytes(t);
            assert!(
                (17_500..20_000).contains(&came),
                "{came} without slice {lost}"
            );
            let has = |flag: u8| -> Vec<bool> {
                let packets = writes.iter().flat_map(|w| packets_of(w));
                packets
                    .map(|p| tcp::flags(&p[t.ip_len()..]) & flag != 0)
                    .collect()
            };
            let (cwr, fin, psh) = (has(tcp::CWR), has(tcp::FIN), has(tcp::PSH));
            assert_eq!(cwr.iter().filter(|c| **c).count(), usize::from(lost != 0));
            assert_eq!(cwr[0], lost != 0, "CWR is the first segment's");
            let ends = usize::from(lost + 1 != count);
            assert_eq!(fin.iter().filter(|f| **f).count(), ends);
            assert_eq!(fin.last(), Some(&(ends == 1)), "FIN is the last segment's");
            assert_eq!(psh, fin);
            world.check_nothing_pending();
        }
    }
}

/// Once the size of the path is known, segments fit records and slices end where segments end.
#[test]
fn a_lost_datagram_costs_one_segment() {
    for (outer_v6, mtu) in [(false, 1500), (true, 1500), (false, 1492), (true, 1400)] {
        for v6 in FAMILIES {
            let setup = Setup {
                v6: outer_v6,
                ..Setup::new(NATIVE)
            };
            let path = Path {
                mtu,
                local: true,
                ..Path::default()
            };
            let mut world = World::with([setup.clone(), setup], [path.clone(), path], 1);
            world.establish();
            world.send(0, &[Flow::udp(0).datagram(0, 10)]);
            world.run(seconds(10));
            world.take_delivered(1);
            world.send(0, &[syn(v6, 9000, true)]);
            world.run(seconds(1));
            let segment = usize::from(delivered_mss(&mut world, v6)) - 12;
            let t = flow(v6, true);
            let mut position = 0;
            for lost in 0..10 {
                let read = t.segments(position, 10 * segment, segment);
                let mut sent = datagrams_for(&mut world, &[read]);
                assert_eq!(sent.len(), 10, "{outer_v6} {mtu} {v6}");
                sent.remove(lost);
                let before = world.checkers[1].bytes(t);
                world.receive(1, &sent);
                let arrived = world.checkers[1].bytes(t) - before;
                assert_eq!(arrived as usize, 9 * segment, "{outer_v6} {mtu} {v6}");
                position += 10 * segment as u64;
            }
        }
    }
}

#[test]
fn slices_in_several_receives_are_written_as_they_come() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    let t = Flow::tcp(0);
    let sent = datagrams_for(&mut world, &[t.segments(0, 30_000, 1300)]);
    let (first, second) = sent.split_at(7);
    world.receive(1, first);
    assert_eq!(world.take_delivered(1).len(), 1);
    world.receive(1, second);
    assert_eq!(world.take_delivered(1).len(), 1);
    assert_eq!(world.checkers[1].bytes(t), 30_000);
    let (out, inn) = (world.totals(0).outbound, world.totals(1).inbound);
    assert_eq!(
        inn.packets_out, out.packets_out,
        "a super-packet counts as its segments"
    );
}

#[test]
fn reordered_slices_arrive_all_the_same() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.checkers[1].in_order = false;
    let t = Flow::tcp(0);
    let mut sent = datagrams_for(&mut world, &[t.segments(0, 30_000, 1300)]);
    sent.reverse();
    world.receive(1, &sent);
    assert_eq!(world.checkers[1].bytes(t), 30_000);
    world.check();
}

#[test]
fn large_packets_cross_a_narrow_path_in_fragments() {
    for (offload, v6) in [(true, false), (true, true), (false, false), (false, true)] {
        let setup = Setup {
            inner_mtu: 65_535,
            offload,
            ..Setup::new(NATIVE)
        };
        let mut world = World::with(
            [setup.clone(), setup],
            [Path::default(), Path::default()],
            1,
        );
        world.establish();
        let (t, u) = (flow(v6, true), flow(v6, false));
        let sizes = [1400, 3000, 9000, 65_000];
        for (seq, size) in sizes.iter().enumerate() {
            world.send(
                0,
                &[u.datagrams(seq as u32, &[*size], offload, ECN_NOT_ECT)],
            );
            let position = world.checkers[1].bytes(t);
            world.send(
                0,
                &[t.segments_with(position, *size, *size, tcp::ACK, 0, offload)],
            );
            world.run(seconds(1));
        }
        assert_eq!(world.checkers[1].datagrams(u), 4);
        assert_eq!(
            world.checkers[1].bytes(t),
            sizes.iter().sum::<usize>() as u64
        );
        world.check_nothing_pending();
    }
}

#[test]
fn a_lost_fragment_costs_its_packet_after_a_while() {
    let setup = Setup {
        inner_mtu: 9000,
        ..Setup::new(NATIVE)
    };
    let mut world = World::with(
        [setup.clone(), setup],
        [Path::default(), Path::default()],
        1,
    );
    world.establish();
    let mut sent = datagrams_for(&mut world, &[Flow::udp(0).datagram(1, 6000)]);
    sent.remove(1);
    world.receive(1, &sent);
    let inbound = world.totals(1).inbound;
    assert_eq!(inbound.pending, 1);
    world.run(seconds(2));
    let inbound = world.totals(1).inbound;
    assert_eq!(
        (
            inbound.pending,
            inbound.drops.get(DropReason::ReassemblyTimeout)
        ),
        (0, 1)
    );
    world.check();
}

/// Fragments, slices and small packets of one flow mixed: the checker asserts the order.
#[test]
fn a_flow_of_mixed_sizes_keeps_its_order() {
    let setup = Setup {
        inner_mtu: 9000,
        ..Setup::new(NATIVE)
    };
    let mut world = World::with(
        [setup.clone(), setup],
        [Path::default(), Path::default()],
        1,
    );
    world.establish();
    let (t, u) = (Flow::tcp(0), Flow::udp(0));
    for round in 0..10 {
        let mut reads = Vec::new();
        for (n, size) in [500, 500, 5000, 500, 3000, 500].into_iter().enumerate() {
            let position = round * 30_000 + n as u64 * 5000;
            reads.push(u.datagrams(round as u32 * 6 + n as u32, &[size], true, ECN_NOT_ECT));
            reads.push(t.segments(position, size, 700));
        }
        world.send(0, &reads);
        world.run(Duration::from_millis(100));
    }
    assert_eq!(world.checkers[1].datagrams(u), 60);
    assert_eq!(world.checkers[1].bytes(t), 100_000);
}

#[test]
fn a_full_outbox_drops_with_a_count_and_nothing_twice() {
    for protocol in BOTH {
        for offload in [true, false] {
            for room in [0, 100, 1500, 5000, 20_000, 70_000] {
                let mut setups = [Setup::new(protocol), Setup::new(protocol)];
                setups[1].offload = offload;
                let mut world = World::with(setups, [Path::default(), Path::default()], 1);
                world.establish();
                world.sides[0].outbox = Outbox::new(room);
                let (t, u) = (Flow::tcp(0), Flow::udp(0));
                let reads: Vec<_> = (0..6)
                    .flat_map(|n| {
                        [
                            t.segments(n * 20_000, 20_000, 1300),
                            u.datagrams(n as u32 * 15, &[1000; 15], true, ECN_NOT_ECT),
                        ]
                    })
                    .collect();
                world.send(0, &reads);
                world.check();
                let out = world.totals(0).outbound;
                let full = out.drops.get(DropReason::OutboxFull);
                assert_eq!(
                    out.packets_out + full,
                    1 + 6 * (16 + 15),
                    "{protocol:?} {room}"
                );
                assert!(full > 0);
                world.sides[0].outbox = Outbox::new(4 << 20);
                world.run(seconds(1));
                world.check_nothing_pending();
            }
        }
    }
}

#[test]
fn packets_that_waited_too_long_are_marked_or_dropped() {
    for protocol in BOTH {
        for v6 in FAMILIES {
            for (ecn, marked) in [
                (ECN_NOT_ECT, None),
                (ECN_ECT0, Some(ECN_CE)),
                (ECN_CE, Some(ECN_CE)),
            ] {
                let mut world = World::new(protocol, 1);
                world.establish();
                world.take_delivered(1);
                let t = flow(v6, true);
                let reads =
                    [0, 3900].map(|at| t.segments_with(at, 3900, 1300, tcp::ACK, ecn, true));
                world.send_batch(0, &reads, true);
                world.run(Duration::from_millis(100));
                let marks: Vec<u8> = world
                    .take_delivered(1)
                    .iter()
                    .flat_map(|write| packets_of(write))
                    .map(|packet| ip::ecn(&packet))
                    .collect();
                let expected = [marked; 3].into_iter().flatten().chain([ecn; 3]);
                assert!(
                    marks.iter().copied().eq(expected),
                    "{protocol:?} {ecn}: {marks:?}"
                );
                let dropped = world.totals(0).outbound.drops.get(DropReason::QueueDelay);
                assert_eq!(dropped, if marked.is_none() { 3 } else { 0 });
                world.check();
            }
        }
    }
}

#[test]
fn a_source_that_is_not_the_peers_is_dropped() {
    for protocol in BOTH {
        // Native packets that are too large for the path come in fragments.
        let large = if protocol == NATIVE { 8000 } else { 1300 };
        for read in [
            Flow::udp(0).datagrams(0, &[large], true, ECN_NOT_ECT),
            Flow::udp(0).datagram(1, 100),
            Flow::udp(0).v6().datagram(1, 100),
            Flow::tcp(0).segments(0, 10_000, 1300),
            Flow::udp(0).datagrams(0, &[1350], true, ECN_NOT_ECT),
        ] {
            let setup = Setup {
                inner_mtu: 9000,
                ..Setup::new(protocol)
            };
            let paths = [Path::default(), Path::default()];
            let mut world = World::with([setup.clone(), setup], paths, 1);
            world.establish();
            let side = &mut world.sides[1];
            side.tunnel.clear_allowed_ips(side.peer);
            let before = world
                .totals(1)
                .inbound
                .drops
                .get(DropReason::SourceNotAllowed);
            world.send(0, &[read]);
            world.run(seconds(1));
            assert!(world.take_delivered(1).is_empty(), "{protocol:?}");
            let after = world
                .totals(1)
                .inbound
                .drops
                .get(DropReason::SourceNotAllowed);
            assert!(after > before, "{protocol:?}");
            world.check_nothing_pending();
        }
    }
}

#[test]
fn udp_without_a_checksum_stays_without_one() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        let mut reads: Vec<_> = (0..3).map(|n| Flow::udp(0).datagram(n, 100)).collect();
        for read in &mut reads {
            read[VNET_HDR_LEN + 26..VNET_HDR_LEN + 28].fill(0);
        }
        let sent = datagrams_for(&mut world, &reads);
        // The checker would reject the missing checksum, so it is checked here.
        let inbound = world.totals(1).inbound.packets_in;
        let refuse = world.sides[1].refuse_every;
        world.sides[1].refuse_every = 1;
        world.receive(1, &sent);
        world.sides[1].refuse_every = refuse;
        let refused = world
            .totals(1)
            .inbound
            .drops
            .get(DropReason::TunWriteRefused);
        assert_eq!(
            (world.totals(1).inbound.packets_in - inbound, refused),
            (3, 3)
        );
    }
}

#[test]
fn wireguard_packets_are_padded_to_sixteen_but_not_beyond_the_mtu() {
    let mut world = World::new(Protocol::WireGuard, 1);
    world.establish();
    world.checkers[1].in_order = false;
    for (payload, sealed) in [(10, 48), (20, 48), (21, 64), (1392, 1420), (1380, 1408)] {
        let sent = datagrams_for(
            &mut world,
            &[Flow::udp(0).datagram(payload, payload as usize)],
        );
        assert_eq!(sent[0].bytes.len(), 32 + sealed, "payload {payload}");
        world.receive(1, &sent);
        let delivered = world.take_delivered(1);
        let packet = &delivered[0][VNET_HDR_LEN..];
        assert_eq!(packet.len(), payload as usize + 28, "the padding is gone");
        assert!(IpPacket::parse(packet).is_ok());
    }
}

#[test]
fn small_packets_share_records_and_records_share_runs() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.run(seconds(20));
    let reads: Vec<_> = (0..140).map(|n| Flow::udp(0).datagram(n, 100)).collect();
    let sent = datagrams_for(&mut world, &reads);
    assert!(
        sent.len() <= 14,
        "{} datagrams for 140 small packets",
        sent.len()
    );
    world.receive(1, &sent);
    assert_eq!(world.checkers[1].datagrams(Flow::udp(0)), 140);
}

#[test]
fn unattributed_packets_are_counted() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    let mut unrouted = Flow::udp(0).datagram(0, 100);
    unrouted[VNET_HDR_LEN + 16..VNET_HDR_LEN + 20].copy_from_slice(&[8, 8, 8, 8]);
    world.send(0, &[unrouted, vec![0; 10], vec![0xff; 60]]);
    let drops = world.totals(0).outbound.drops;
    assert_eq!(
        (drops.get(DropReason::NoRoute), drops.get(DropReason::NotIp)),
        (1, 2)
    );
    let from = std::net::SocketAddr::from(([198, 18, 0, 1], 9));
    let garbage = |bytes: &[u8]| Parcel {
        from,
        to: crate::sim::address(1, false),
        traffic_class: 0,
        is_opener: false,
        bytes: bytes.to_vec(),
    };
    let data = [0x14, 0, 0, 0, 1, 2, 3, 4].repeat(8);
    world.receive(
        1,
        &[
            garbage(&[]),
            garbage(&[0x14; 20]),
            garbage(&data),
            garbage(&[7; 100]),
        ],
    );
    let drops = world.totals(1).inbound.drops;
    assert_eq!(drops.get(DropReason::Truncated), 2);
    assert_eq!(drops.get(DropReason::UnknownIndex), 1);
    assert_eq!(drops.get(DropReason::UnknownType), 1);
    world.check();
}

#[test]
fn removing_a_peer_with_waiting_packets_keeps_the_counters_balanced() {
    let mut world = World::new(NATIVE, 1);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    let side = &mut world.sides[0];
    side.tunnel.remove_peer(side.peer);
    world.check();
    let totals = world.totals(0);
    assert_eq!(totals.outbound.drops.get(DropReason::PeerRemoved), 1);
    assert_eq!(world.sides[0].tunnel.next_wakeup(), None);
    assert_eq!(world.sides[0].tunnel.indices_in_use(), 0);
}

#[test]
fn packets_in_the_queue_of_the_driver_end_with_their_peer() {
    let mut world = World::new(NATIVE, 1);
    let side = &mut world.sides[0];
    let payload = Payload {
        packets: 3,
        bytes: 300,
    };
    let run = Run {
        destination: Destination {
            address: address(1, false),
            source: None,
            traffic_class: 0,
            hop_limit: None,
        },
        peer: Some(side.peer),
        segment_size: 150,
        segments: 3,
        first: 0,
        payload,
        range: 0..450,
    };
    side.tunnel.queued(&run);
    side.tunnel.remove_peer(side.peer);
    assert_eq!(side.tunnel.take_removed_peers(), [side.peer]);
    assert_eq!(side.tunnel.take_removed_peers(), []);
    let totals = world.totals(0).outbound;
    assert_eq!(totals.pending, 0);
    assert_eq!(totals.drops.get(DropReason::PeerRemoved), 3);
}

/// A packet joins the newest write of its flow or none: not one that a super-packet came after.
#[test]
fn a_segment_does_not_pass_a_super_packet_of_its_flow() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.checkers[1].in_order = false;
    let t = Flow::tcp(0);
    let reads = [
        t.segments(0, 500, 500),
        t.segments(1000, 20_000, 1300),
        t.segments(500, 500, 500),
    ];
    world.send(0, &reads);
    world.run(seconds(1));
    let starts: Vec<u32> = world
        .take_delivered(1)
        .iter()
        .map(|w| tcp::seq(&w[VNET_HDR_LEN + 20..]).wrapping_sub(crate::sim::packets::ISN))
        .collect();
    assert_eq!(starts, [0, 1000, 500]);
}
