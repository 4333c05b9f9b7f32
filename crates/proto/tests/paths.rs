//! Properties of the path between the two sides: MTU, ECN marks, losses, and the reports about
//! them.

use crate::sim::network::{Parcel, Path};
use crate::sim::packets::{Flow, packets_of};
use crate::sim::{Setup, World};
use seikan_observe::DropReason;
use seikan_proto::native::health::Report;
use seikan_proto::noise::Protocol;
use seikan_wire::ip::{ECN_CE, ECN_ECT0, ECN_ECT1, ECN_NOT_ECT, traffic_class};
use seikan_wire::{IpPacket, VNET_HDR_LEN, VnetHdr, checksum, tcp};
use std::ops::Range;
use std::time::Duration;

const NATIVE: Protocol = Protocol::Native;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn with_path(path: Path) -> World {
    World::with(
        [Setup::new(NATIVE), Setup::new(NATIVE)],
        [path.clone(), path],
        1,
    )
}

/// Sends one full-sized datagram of a flow each `every`, from `seq` on. Returns the next number.
fn load(world: &mut World, flow: Flow, mut seq: u32, time: Duration, every: Duration) -> u32 {
    let end = world.time + time.as_nanos() as u64;
    while world.time < end {
        world.send(flow.from, &[flow.datagram(seq, 1392)]);
        seq += 1;
        world.run(every);
    }
    seq
}

#[test]
fn the_mtu_of_the_path_is_found_in_both_directions() {
    for mtu in [1280, 1320, 1400, 1492, 1500, 4096, 8000, 9001] {
        for v6 in [false, true] {
            let setup = Setup {
                v6,
                ..Setup::new(NATIVE)
            };
            let path = Path {
                mtu,
                ..Path::default()
            };
            let mut world = World::with([setup.clone(), setup], [path.clone(), path], 1);
            let flow = Flow::udp(0);
            for seq in 0..600 {
                world.send(0, &[flow.datagram(seq, 100)]);
                world.send(1, &[Flow::udp(1).datagram(seq, 100)]);
                world.run(Duration::from_millis(100));
            }
            for i in [0, 1] {
                let found = world.peer(i).path.mtu.mtu();
                assert!(
                    found <= mtu && found + 8 > mtu,
                    "side {i}, IPv6 {v6}: {found} of {mtu}"
                );
            }
        }
    }
}

#[test]
fn a_link_that_refuses_large_datagrams_is_learnt_at_once() {
    let mut world = with_path(Path {
        mtu: 1400,
        local: true,
        ..Path::default()
    });
    world.establish();
    world.run(seconds(1));
    assert!(
        world.peer(0).path.mtu.mtu() > 1392,
        "{}",
        world.peer(0).path.mtu.mtu()
    );
    world.check();
}

#[test]
fn a_black_hole_is_left_within_ten_seconds_in_either_direction() {
    for shrunk in [0, 1] {
        let mut world = World::new(NATIVE, 1);
        // Only side 0 sends; side 1 returns reports and acknowledgements.
        let flow = Flow::udp(0);
        let seq = load(&mut world, flow, 0, seconds(20), Duration::from_millis(20));
        assert_eq!(world.peer(0).path.mtu.mtu(), 1500);
        world.links[shrunk].path.mtu = 1300;
        let seq = load(
            &mut world,
            flow,
            seq,
            seconds(10),
            Duration::from_millis(20),
        );
        let before = world.checkers[1].datagrams(flow);
        load(&mut world, flow, seq, seconds(5), Duration::from_millis(20));
        world.run(seconds(1));
        let passed = world.checkers[1].datagrams(flow) - before;
        assert_eq!(passed, 250, "direction {shrunk}");
    }
}

#[test]
fn after_an_outage_the_path_is_as_wide_as_before() {
    let mut world = World::new(NATIVE, 1);
    let flow = Flow::udp(0);
    let mut seq = load(&mut world, flow, 0, seconds(20), Duration::from_millis(50));
    world.links.iter_mut().for_each(|l| l.path.down = true);
    seq = load(
        &mut world,
        flow,
        seq,
        seconds(30),
        Duration::from_millis(50),
    );
    world.links.iter_mut().for_each(|l| l.path.down = false);
    load(
        &mut world,
        flow,
        seq,
        seconds(20),
        Duration::from_millis(50),
    );
    assert_eq!(world.peer(0).path.mtu.mtu(), 1500);
}

#[test]
fn a_new_path_is_measured_from_scratch() {
    let mut world = World::new(NATIVE, 1);
    load(
        &mut world,
        Flow::udp(1),
        0,
        seconds(20),
        Duration::from_millis(50),
    );
    assert_eq!(world.peer(1).path.mtu.mtu(), 1500);
    world.links.iter_mut().for_each(|l| l.path.mtu = 1300);
    world.rebind(std::net::SocketAddr::from(([203, 0, 113, 5], 4000)));
    world.send(0, &[Flow::udp(0).datagram(1, 100)]);
    world.run(Duration::from_millis(100));
    assert!(world.peer(1).path.mtu.mtu() <= 1300);
}

#[test]
fn a_packet_too_big_for_the_far_interface_is_answered_with_its_mtu() {
    let mut setups = [Setup::new(NATIVE), Setup::new(NATIVE)];
    setups[0].inner_mtu = 9000;
    setups[1].inner_mtu = 1300;
    let mut world = World::with(setups, [Path::default(), Path::default()], 1);
    world.establish();
    for (v6, offset, kind) in [(false, 20, [3, 4]), (true, 40, [2, 0])] {
        let flow = Flow { v6, ..Flow::udp(0) };
        world.send(0, &[flow.datagram(1, 1400)]);
        let answers = world.take_delivered(0);
        assert_eq!(answers.len(), 1, "IPv6 {v6}");
        let answer = &answers[0][VNET_HDR_LEN..];
        assert_eq!(answer[offset..offset + 2], kind);
        let mtu = if v6 {
            u32::from_be_bytes(answer[44..48].try_into().expect("four"))
        } else {
            u32::from(u16::from_be_bytes([answer[26], answer[27]]))
        };
        assert_eq!(mtu, 1300, "IPv6 {v6}");
        let parsed = IpPacket::parse(answer).expect("a packet");
        let sent = flow.datagram(1, 1400);
        let offending = IpPacket::parse(&sent[VNET_HDR_LEN..]).expect("a packet");
        assert_eq!((parsed.src, parsed.dst), (offending.dst, offending.src));
    }
    let out = world.totals(0).outbound;
    assert_eq!(out.drops.get(DropReason::TooBig), 2);
    world.send(0, &[Flow::udp(0).datagram(3, 1272)]);
    world.run(seconds(1));
    assert_eq!(
        world.checkers[1].datagrams(Flow::udp(0)),
        1,
        "1300 bytes fit"
    );
    world.check_nothing_pending();
}

/// A SYN with an MSS option, with a complete checksum or a partial one.
pub fn syn(v6: bool, mss: u16, partial: bool) -> Vec<u8> {
    let flow = Flow { v6, ..Flow::tcp(0) };
    let mut read = flow.segments_with(0, 0, 1000, tcp::SYN, ECN_NOT_ECT, partial);
    let at = VNET_HDR_LEN + flow.ip_len();
    read[at + 20..at + 24].copy_from_slice(&[2, 4, (mss >> 8) as u8, mss as u8]);
    if !partial {
        let parsed = IpPacket::parse(&read[VNET_HDR_LEN..]).expect("a packet");
        read[at + 16..at + 18].fill(0);
        let pseudo = checksum::pseudo_header(parsed.src, parsed.dst, 6, read.len() - at);
        let check = checksum::fold(pseudo + checksum::sum(&read[at..]));
        read[at + 16..at + 18].copy_from_slice(&check.to_be_bytes());
    }
    read
}

#[test]
fn the_mss_of_a_syn_fits_the_smaller_inner_mtu() {
    for (ours, theirs, wanted) in [(1420, 1300, 1300), (1300, 1420, 1300), (1420, 1420, 1420)] {
        for v6 in [false, true] {
            for partial in [false, true] {
                let mut setups = [Setup::new(NATIVE), Setup::new(NATIVE)];
                setups[0].inner_mtu = ours;
                setups[1].inner_mtu = theirs;
                let mut world = World::with(setups, [Path::default(), Path::default()], 1);
                world.establish();
                world.send(0, &[syn(v6, 9000, partial)]);
                world.run(seconds(1));
                assert_eq!(
                    delivered_mss(&mut world, v6),
                    wanted - if v6 { 60 } else { 40 }
                );
                // Inbound SYNs are clamped as well, whatever the far end believes.
                world.sides[1].tunnel.set_inner_mtu(1000);
                world.checkers[1].in_order = false;
                world.send(0, &[syn(v6, 9000, partial)]);
                world.run(seconds(1));
                assert_eq!(delivered_mss(&mut world, v6), if v6 { 940 } else { 960 });
            }
        }
    }
}

/// Inner MTU of a native tunnel: a path of 1500 bytes carries it.
const FULL: u32 = 1444;

#[test]
fn a_full_packet_takes_one_datagram() {
    for repair in [None, Some(10)] {
        let setup = Setup {
            inner_mtu: FULL,
            repair,
            ..Setup::new(NATIVE)
        };
        let mut world = World::with(
            [setup.clone(), setup],
            [Path::default(), Path::default()],
            1,
        );
        world.establish();
        let (udp, tcp) = (Flow::udp(0), Flow::tcp(0));
        let payload = FULL as usize - 40;
        let mut cases = vec![
            (
                "a super-packet",
                tcp.segments(0, 10 * (payload - 12), payload - 12),
                10,
            ),
            (
                "a segment",
                tcp.segments(10 * (payload as u64 - 12), payload - 12, payload),
                1,
            ),
            ("a datagram", udp.datagram(0, payload + 12), 1),
            (
                "datagrams",
                udp.datagrams(1, &[payload + 12; 5], true, ECN_NOT_ECT),
                5,
            ),
        ];
        // The MSS is lower with loss repair.
        let payload = payload - 20 - if repair.is_some() { 4 } else { 0 };
        let segments = tcp.v6().segments(0, 10 * (payload - 12), payload - 12);
        cases.push(("a super-packet of IPv6", segments, 10));
        if repair.is_none() {
            cases.push(("a datagram of IPv6", udp.v6().datagram(0, payload + 12), 1));
        }
        for (name, read, datagrams) in cases {
            world.take_sent(0);
            world.send(0, &[read]);
            let sent = world.take_sent(0);
            let sizes: Vec<_> = sent.iter().map(Path::ip_size).collect();
            assert_eq!(sizes.len(), datagrams, "{name}, {repair:?}: {sizes:?}");
            let most = if repair.is_some() { 1495 } else { 1500 };
            assert!(sizes.iter().all(|size| *size <= most), "{name}: {sizes:?}");
            world.run(Duration::from_millis(100));
        }
        world.check_nothing_pending();
        assert_eq!(world.checkers[1].datagrams(udp), 6);
        assert_eq!(world.totals(1).inbound.drops.total(), 0);
    }
}

/// The MSS of the SYN that side 1 delivered; its checksum is checked, complete or partial.
pub fn delivered_mss(world: &mut World, v6: bool) -> u16 {
    let delivered = world.take_delivered(1);
    let packet = &packets_of(&delivered[0])[0];
    let at = if v6 { 40 } else { 20 };
    u16::from_be_bytes([packet[at + 22], packet[at + 23]])
}

/// RFC 6040, figure 4: the inner field, and for each outer field (Not-ECT, ECT(0), ECT(1), CE) the
/// resulting field, if the packet is forwarded.
const DECAPSULATION: [(u8, [Option<u8>; 4]); 4] = [
    (
        ECN_NOT_ECT,
        [
            Some(ECN_NOT_ECT),
            Some(ECN_NOT_ECT),
            Some(ECN_NOT_ECT),
            None,
        ],
    ),
    (
        ECN_ECT0,
        [Some(ECN_ECT0), Some(ECN_ECT0), Some(ECN_ECT1), Some(ECN_CE)],
    ),
    (
        ECN_ECT1,
        [Some(ECN_ECT1), Some(ECN_ECT1), Some(ECN_ECT1), Some(ECN_CE)],
    ),
    (
        ECN_CE,
        [Some(ECN_CE), Some(ECN_CE), Some(ECN_CE), Some(ECN_CE)],
    ),
];

/// The cells of [`DECAPSULATION`]: inner, outer, result.
fn decapsulations() -> impl Iterator<Item = (u8, u8, Option<u8>)> {
    let outers = [ECN_NOT_ECT, ECN_ECT0, ECN_ECT1, ECN_CE];
    DECAPSULATION.into_iter().flat_map(move |(inner, row)| {
        (0..4).map(move |column| (inner, outers[column], row[column]))
    })
}

#[test]
fn the_marking_of_the_inner_packet_goes_out_and_that_of_the_path_comes_in() {
    for protocol in [Protocol::WireGuard, NATIVE] {
        for (inner, on_the_way, expected) in decapsulations() {
            for v6 in [false, true] {
                let mut world = World::new(protocol, 1);
                world.establish();
                world.take_sent(0);
                let flow = Flow { v6, ..Flow::udp(0) };
                world.links[0].path.down = true;
                world.send(0, &[flow.datagrams(1, &[200], true, inner)]);
                let mut sent = world.take_sent(0);
                assert_eq!(sent[0].traffic_class, inner, "RFC 6040, normal mode");
                sent[0].traffic_class = on_the_way;
                world.receive(1, &sent);
                let delivered = world.take_delivered(1);
                let marks: Vec<u8> = delivered
                    .iter()
                    .map(|w| traffic_class(&w[VNET_HDR_LEN..]) & 3)
                    .collect();
                assert_eq!(
                    marks.first().copied(),
                    expected,
                    "{protocol:?} {inner} {on_the_way}"
                );
                world.check();
            }
        }
    }
}

#[test]
fn a_mark_on_one_slice_stays_with_its_bytes() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.take_sent(0);
    world.links[0].path.down = true;
    let flow = Flow::tcp(0);
    world.send(
        0,
        &[flow.segments_with(0, 20_000, 1348, tcp::ACK, ECN_ECT0, true)],
    );
    let mut sent = world.take_sent(0);
    sent[5].traffic_class = ECN_CE;
    world.receive(1, &sent);
    let delivered = world.take_delivered(1);
    let marks: Vec<u8> = delivered
        .iter()
        .map(|w| traffic_class(&w[VNET_HDR_LEN..]) & 3)
        .collect();
    assert_eq!(marks, [ECN_ECT0, ECN_CE, ECN_ECT0]);
    assert_eq!(world.checkers[1].bytes(flow), 20_000);
    world.check();
}

/// RFC 2983: by default the pipe model (section 3.1), which hides the inner DSCP from the path;
/// `copy_dscp` reveals it. Changes of the outer DSCP on the path have no effect inside.
#[test]
fn the_dscp_is_copied_outbound_if_configured_and_never_inbound() {
    /// Expedited forwarding (RFC 3246), CS1 (RFC 2474) and their traffic classes.
    const INNER: u8 = 46 << 2 | ECN_ECT0;
    const CHANGED: u8 = 8 << 2 | ECN_ECT0;
    for protocol in [Protocol::WireGuard, NATIVE] {
        for (copy_dscp, outer) in [(false, ECN_ECT0), (true, INNER)] {
            for v6 in [false, true] {
                let setup = Setup {
                    copy_dscp,
                    ..Setup::new(protocol)
                };
                let mut world = World::with(
                    [setup.clone(), setup],
                    [Path::default(), Path::default()],
                    1,
                );
                world.establish();
                world.take_sent(0);
                world.links[0].path.down = true;
                let flow = Flow { v6, ..Flow::udp(0) };
                let reads: Vec<_> = (1..)
                    .zip([INNER, INNER, ECN_ECT0])
                    .map(|(seq, class)| flow.datagrams(seq, &[1200], true, class))
                    .collect();
                world.send(0, &reads);
                let mut sent = world.take_sent(0);
                let classes: Vec<u8> = sent.iter().map(|p| p.traffic_class).collect();
                assert_eq!(classes, [outer, outer, ECN_ECT0], "{protocol:?}");
                sent[0].traffic_class = CHANGED;
                world.receive(1, &sent);
                let inner: Vec<u8> = packets_of_all(&world.take_delivered(1))
                    .iter()
                    .map(|packet| traffic_class(packet))
                    .collect();
                assert_eq!(inner, [INNER, INNER, ECN_ECT0]);
            }
        }
    }
}

fn packets_of_all(writes: &[Vec<u8>]) -> Vec<Vec<u8>> {
    writes.iter().flat_map(|write| packets_of(write)).collect()
}

#[test]
fn slices_take_the_marking_of_the_path() {
    for (inner, on_the_way, expected) in decapsulations() {
        let mut world = World::new(NATIVE, 1);
        world.establish();
        world.take_sent(0);
        world.links[0].path.down = true;
        let read = Flow::tcp(0).segments_with(0, 20_000, 1348, tcp::ACK, inner, true);
        world.send(0, &[read]);
        let mut sent = world.take_sent(0);
        sent.iter_mut().for_each(|p| p.traffic_class = on_the_way);
        world.receive(1, &sent);
        let delivered = world.take_delivered(1);
        let mark = delivered
            .first()
            .map(|w| traffic_class(&w[VNET_HDR_LEN..]) & 3);
        assert_eq!(mark, expected, "{inner} {on_the_way}");
        world.check();
    }
}

/// A packet that crosses in fragments, and its datagrams, none of which has arrived.
fn fragments(ecn: u8) -> (World, Vec<Parcel>) {
    let setup = Setup {
        inner_mtu: 9000,
        ..Setup::new(NATIVE)
    };
    let paths = [Path::default(), Path::default()];
    let mut world = World::with([setup.clone(), setup], paths, 1);
    world.establish();
    world.take_sent(0);
    world.links[0].path.down = true;
    world.send(0, &[Flow::udp(0).datagrams(1, &[6000], true, ecn)]);
    let sent = world.take_sent(0);
    (world, sent)
}

#[test]
fn a_mark_on_one_fragment_marks_the_packet() {
    for (inner, on_the_way, expected) in decapsulations() {
        let (mut world, mut sent) = fragments(inner);
        sent[2].traffic_class = on_the_way;
        world.receive(1, &sent);
        let delivered = world.take_delivered(1);
        let mark = delivered
            .first()
            .map(|w| traffic_class(&w[VNET_HDR_LEN..]) & 3);
        assert_eq!(mark, expected, "{inner} {on_the_way}");
        world.check_nothing_pending();
    }
}

/// RFC 3168 section 5.3: reassembly loses no mark; RFC 6040 section 4.2 has ECT(1) between ECT(0)
/// and CE.
#[test]
fn of_different_marks_on_fragments_the_most_severe_counts() {
    for (marks, expected) in [
        ([ECN_ECT0, ECN_ECT1], ECN_ECT1),
        ([ECN_ECT1, ECN_ECT0], ECN_ECT1),
        ([ECN_CE, ECN_ECT1], ECN_CE),
        ([ECN_ECT1, ECN_CE], ECN_CE),
        ([ECN_NOT_ECT, ECN_CE], ECN_CE),
    ] {
        let (mut world, mut sent) = fragments(ECN_ECT0);
        [sent[1].traffic_class, sent[3].traffic_class] = marks;
        world.receive(1, &sent);
        let delivered = world.take_delivered(1);
        let mark = traffic_class(&delivered[0][VNET_HDR_LEN..]) & 3;
        assert_eq!(mark, expected, "{marks:?}");
    }
}

#[test]
fn only_ce_is_reported_as_congestion() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.take_sent(0);
    world.links[0].path.down = true;
    let reads: Vec<_> = (0..4)
        .map(|seq| Flow::udp(0).datagrams(seq, &[1200], true, ECN_ECT0))
        .collect();
    world.send(0, &reads);
    let mut sent = world.take_sent(0);
    let marks = [ECN_NOT_ECT, ECN_ECT0, ECN_ECT1, ECN_CE];
    for (parcel, mark) in sent.iter_mut().zip(marks) {
        parcel.traffic_class = mark;
    }
    world.receive(1, &sent);
    world.run(seconds(2));
    let report = world.peer(0).path.report.expect("a report");
    assert_eq!(report.congestion_marks, 1);
}

/// All reports that side 0 receives while it sends `count` datagrams, one each millisecond, over a
/// path changed by `spoil`.
fn reports(world: &mut World, count: u32) -> Vec<Report> {
    reports_of(world, 0..count, Duration::from_millis(1))
}

/// The same for these datagrams, with a pause after each.
fn reports_of(world: &mut World, seqs: Range<u32>, pause: Duration) -> Vec<Report> {
    let mut reports = Vec::new();
    let mut latest = world.peer(0).path.report;
    for seq in seqs {
        world.send(0, &[Flow::udp(0).datagrams(seq, &[500], true, ECN_ECT0)]);
        world.run(pause);
        let report = world.peer(0).path.report;
        if report != latest {
            reports.extend(report);
            latest = report;
        }
    }
    reports
}

#[test]
fn the_health_reports_agree_with_the_network() {
    let mut world = World::new(NATIVE, 3);
    // The search for the MTU comes first.
    for seq in 0..600 {
        world.send(0, &[Flow::udp(0).v6().datagram(seq, 100)]);
        world.run(Duration::from_millis(100));
    }
    // Everything leaves the receiver's horizon.
    for seq in 600..1800 {
        world.send(0, &[Flow::udp(0).v6().datagram(seq, 100)]);
        world.run(Duration::from_millis(1));
    }
    world.run(seconds(30));
    world.links[0].counts = Default::default();
    world.checkers[1].in_order = false;
    world.links[0].path.loss = 0.1;
    world.links[0].path.marking = 0.05;
    let mut all = reports(&mut world, 6000);
    let lost = world.links[0].counts.lost;
    // No further losses: all lost datagrams leave the receiver's horizon.
    world.links[0].path.loss = 0.0;
    world.links[0].path.marking = 0.0;
    let marked = world.links[0].counts.marked;
    for seq in 6000..8500 {
        world.send(0, &[Flow::udp(0).datagrams(seq, &[500], true, ECN_ECT0)]);
        world.run(Duration::from_millis(1));
        let report = world.peer(0).path.report.expect("reports");
        if all.last() != Some(&report) {
            all.push(report);
        }
    }
    let counts = world.links[0].counts;
    let sum = |field: fn(&Report) -> u32| all.iter().map(|r| u64::from(field(r))).sum::<u64>();
    assert!(lost > 400, "{lost}");
    assert_eq!(sum(|r| r.lost), lost);
    assert_eq!(sum(|r| r.congestion_marks), marked);
    assert_eq!(sum(|r| u32::from(r.reordering)), 0);
    // The last second is not reported yet.
    let received = sum(|r| r.received);
    assert!(
        received <= counts.arrived && received + 1100 > counts.arrived,
        "{received}"
    );
    assert!(
        all.iter().all(|r| r.queueing_delay < 100),
        "no queue on this path"
    );
}

/// All reports of the search for the MTU and after it, until its losses have left the receiver's
/// horizon.
fn losses_during_the_search(world: &mut World, count: u32) -> u64 {
    world.checkers[1].in_order = false;
    // No two reports have the same delay, or the second would be overlooked.
    world.links[0].path.jitter = Duration::from_micros(500);
    let mut all = reports_of(world, 0..count, Duration::from_millis(5));
    let loss = std::mem::take(&mut world.links[0].path.loss);
    all.extend(reports_of(
        world,
        count..count + 3000,
        Duration::from_millis(1),
    ));
    world.links[0].path.loss = loss;
    all.iter().map(|r| u64::from(r.lost)).sum()
}

#[test]
fn a_clean_path_has_no_loss_from_the_start() {
    for local in [false, true] {
        let path = Path {
            local,
            ..Path::default()
        };
        let setup = Setup::new(NATIVE);
        let mut world = World::with([setup.clone(), setup], [path, Path::default()], 3);
        world.establish();
        assert_eq!(losses_during_the_search(&mut world, 9000), 0, "{local}");
        assert_eq!(world.peer(0).path.mtu.mtu(), 1500);
        assert_eq!(world.links[0].counts.lost, 0);
        assert!(local || world.links[0].counts.too_big > 20);
    }
}

#[test]
fn the_search_hides_no_loss_of_others() {
    let mut world = World::new(NATIVE, 3);
    world.establish();
    world.links[0].path.loss = 0.01;
    let reported = losses_during_the_search(&mut world, 9000);
    assert!(world.links[0].counts.lost > 60);
    assert_eq!(reported, world.links[0].counts.lost);
}

#[test]
fn keepalives_probes_and_reports_do_not_pass_for_lost() {
    let mut world = World::new(NATIVE, 3);
    let now = world.now(0).mono;
    let side = &mut world.sides[0];
    side.tunnel
        .set_persistent_keepalive(side.peer, seconds(1), now);
    world.run(seconds(100));
    let all = reports(&mut world, 3000);
    let lost: u32 = all.iter().map(|r| r.lost).sum();
    assert!(world.links[0].counts.too_big > 0);
    assert_eq!(lost, 0);
    assert!(all.len() >= 2);
}

#[test]
fn reports_show_reordering_and_queues() {
    let mut world = World::new(NATIVE, 3);
    world.establish();
    world.checkers[1].in_order = false;
    world.links[0].path.reordering = 0.05;
    let all = reports(&mut world, 3000);
    // Up to 100 ms later, at one datagram each millisecond.
    assert!(
        all.iter().any(|r| (30..=101).contains(&r.reordering)),
        "{all:?}"
    );
    world.links[0].path.reordering = 0.0;
    world.run(seconds(2));
    // 500 KB/s into a path of 400 KB/s fills its queue of 40 KB: 100 ms.
    world.links[0].path.rate = Some(400_000);
    world.links[0].path.queue = 40_000;
    world.run(seconds(1));
    let mut world2 = world;
    for seq in 10_000..13_000 {
        world2.send(0, &[Flow::udp(0).datagram(seq, 500)]);
        world2.run(Duration::from_millis(1));
    }
    let delay = world2.peer(0).path.report.expect("a report").queueing_delay;
    assert!((80_000..120_000).contains(&delay), "{delay} us");
}

#[test]
fn records_state_when_they_leave() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    let wait = |world: &mut World, wait| {
        let side = &mut world.sides[0];
        side.tunnel.set_wait(side.peer, wait);
    };
    // Nothing waits in truth, so records that state a wait seem 5 ms faster than later ones.
    wait(&mut world, Duration::from_millis(5));
    reports_of(&mut world, 0..1500, Duration::from_millis(1));
    wait(&mut world, Duration::ZERO);
    let after = reports_of(&mut world, 1500..4500, Duration::from_millis(1));
    let delay = after.last().expect("a report").queueing_delay;
    assert!((4_900..5_100).contains(&delay), "{delay} us");
}

#[test]
fn a_path_that_breaks_gso_gets_single_datagrams() {
    let mut world = World::new(NATIVE, 1);
    world.links[0].path.mangles_gso = true;
    world.establish();
    let flow = Flow::tcp(0);
    let mut position = 0;
    let send = |world: &mut World, position: &mut u64| {
        world.send(0, &[flow.segments(*position, 13_480, 1348)]);
        *position += 13_480;
        world.run(Duration::from_millis(20));
    };
    for _ in 0..200 {
        send(&mut world, &mut position);
    }
    assert!(!world.peer(0).path.gso, "found out within four seconds");
    world.links[0].counts = Default::default();
    let before = world.checkers[1].bytes(flow);
    for _ in 0..50 {
        send(&mut world, &mut position);
    }
    world.run(seconds(1));
    let counts = world.links[0].counts;
    assert_eq!((counts.later, counts.lost), (0, 0));
    assert_eq!(world.checkers[1].bytes(flow) - before, 50 * 13_480);
    // Another path may work.
    world.links[0].path.mangles_gso = false;
    world.links[0].counts = Default::default();
    let elsewhere = std::net::SocketAddr::from(([203, 0, 113, 5], 4000));
    let side = &mut world.sides[0];
    side.tunnel.set_endpoint(side.peer, elsewhere);
    assert!(world.peer(0).path.gso);
}

#[test]
fn loss_and_short_queues_are_not_taken_for_broken_gso() {
    for path in [
        Path {
            loss: 0.3,
            ..Path::default()
        },
        // Space for about six datagrams of a batch of ten.
        Path {
            rate: Some(1_000_000),
            queue: 9_000,
            ..Path::default()
        },
    ] {
        let mut world = World::with(
            [Setup::new(NATIVE), Setup::new(NATIVE)],
            [path, Path::default()],
            1,
        );
        world.send(0, &[Flow::udp(0).datagram(0, 100)]);
        world.run(seconds(6));
        for n in 0..300 {
            world.send(0, &[Flow::tcp(0).segments(n * 13_480, 13_480, 1348)]);
            world.run(Duration::from_millis(20));
        }
        let counts = world.links[0].counts;
        assert!(
            counts.lost > counts.sent / 5 && counts.later > 1000,
            "{counts:?}"
        );
        assert!(world.peer(0).path.gso);
    }
}

/// The virtio-net header describes the packet, see `packets_of`; here only the presence of a write
/// is checked.
#[test]
fn marked_and_unmarked_packets_of_one_batch_do_not_share_a_datagram() {
    let mut world = World::new(NATIVE, 1);
    world.establish();
    world.take_sent(0);
    let reads: Vec<_> = (0..6)
        .map(|n| Flow::udp(0).datagrams(n, &[100], true, [ECN_NOT_ECT, ECN_ECT0][n as usize % 2]))
        .collect();
    world.send(0, &reads);
    let classes: Vec<u8> = world.take_sent(0).iter().map(|p| p.traffic_class).collect();
    assert_eq!(classes, [0, 2, 0, 2, 0, 2]);
    world.run(seconds(1));
    assert!(
        world
            .take_delivered(1)
            .iter()
            .all(|w| VnetHdr::read(w).is_ok())
    );
    assert_eq!(world.checkers[1].datagrams(Flow::udp(0)), 6);
}
