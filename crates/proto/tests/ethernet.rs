//! Ethernet mode: frames of any type, rules for their sources, several peers, and ends of another
//! mode.

use crate::sim::network::Path;
use crate::sim::packets::{Flow, packets_of};
use crate::sim::{Seeded, Setup, World, ethernet as tap};
use seikan_observe::DropReason;
use seikan_proto::batch::PacketBatch;
use seikan_proto::capabilities::Cipher;
use seikan_proto::inbox::Inbox;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mode::Mode;
use seikan_proto::noise::Protocol;
use seikan_proto::outbox::Outbox;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::ethernet::{ETHERTYPE_ARP, Ethernet, Mac, Vlan};
use seikan_wire::ip::ECN_CE;
use seikan_wire::{VNET_HDR_LEN, VnetHdr};
use std::net::SocketAddr;
use std::time::Duration;

fn setup(mode: Mode) -> Setup {
    Setup {
        mode,
        ..Setup::new(Protocol::Native)
    }
}

fn world(modes: [Mode; 2]) -> World {
    World::with(modes.map(setup), [Path::default(), Path::default()], 1)
}

fn ethernet_world() -> World {
    let mut world = world([Mode::Ethernet; 2]);
    world.establish();
    world
}

/// A frame of `length` bytes with this type, or these tags and a type.
fn frame(to: Mac, from: Mac, types: &[u16], length: usize) -> Vec<u8> {
    let mut frame = [to.0, from.0].concat();
    frame.extend(types.iter().flat_map(|word| word.to_be_bytes()));
    let start = frame.len();
    frame.extend((start..length).map(|n| n as u8));
    frame
}

/// Passes frames to the device of side `i`.
fn send_frames(world: &mut World, i: usize, frames: &[Vec<u8>]) {
    let reads: Vec<Vec<u8>> = frames
        .iter()
        .map(|frame| [&[0; VNET_HDR_LEN][..], frame].concat())
        .collect();
    world.send_raw(i, &reads, false);
    world.run(Duration::from_millis(500));
}

fn drops(world: &World, i: usize, reason: DropReason) -> u64 {
    let totals = world.totals(i);
    totals.inbound.drops.get(reason) + totals.outbound.drops.get(reason)
}

#[test]
fn frames_of_any_type_cross_unchanged() {
    let mut world = ethernet_world();
    let (a, b) = (tap::mac(0), tap::mac(1));
    let frames = [
        frame(Mac::BROADCAST, a, &[ETHERTYPE_ARP], 60),
        frame(b, a, &[0x8100, 7, ETHERTYPE_ARP], 64),
        frame(b, a, &[0x88a8, 5, 0x8100, 7, ETHERTYPE_ARP], 68),
        // Spanning tree: a length instead of a type (IEEE 802.3).
        frame(Mac([1, 0x80, 0xc2, 0, 0, 0]), a, &[0x0026], 60),
        // MPLS, as long as the MTU allows.
        frame(b, a, &[0x8847], 14 + 1420),
        // IP is in it, but behind a third tag.
        frame(b, a, &[0x88a8, 5, 0x8100, 7, 0x8100, 8, 0x0800], 80),
    ];
    send_frames(&mut world, 0, &frames);
    assert_eq!(world.sides[1].frames, frames);
    world.check_nothing_pending();
}

#[test]
fn a_frame_that_no_record_has_space_for_is_reassembled() {
    let mut setups = [setup(Mode::Ethernet), setup(Mode::Ethernet)];
    for setup in &mut setups {
        setup.inner_mtu = 9000;
    }
    let mut world = World::with(setups, [Path::default(), Path::default()], 1);
    world.establish();
    let large = frame(tap::mac(1), tap::mac(0), &[0x8100, 7, 0x88b5], 9018);
    send_frames(&mut world, 0, std::slice::from_ref(&large));
    assert_eq!(world.sides[1].frames, [large]);
}

#[test]
fn a_frame_above_the_mtu_is_dropped_and_an_ip_packet_is_answered_in_a_frame() {
    let mut world = ethernet_world();
    let (a, b) = (tap::mac(0), tap::mac(1));
    send_frames(&mut world, 0, &[frame(b, a, &[0x88b5], 14 + 1421)]);
    assert_eq!(drops(&world, 0, DropReason::TooBig), 1);
    // An ICMP error comes back in a frame from the destination (`tap::unframed` asserts that).
    world.send(0, &[Flow::udp(0).datagram(7, 1500)]);
    assert_eq!(drops(&world, 0, DropReason::TooBig), 2);
    let errors = world.take_delivered(0);
    assert_eq!(errors.len(), 1);
    // Destination unreachable, fragmentation needed, with the MTU.
    let error = &packets_of(&errors[0])[0];
    assert_eq!((error[9], error[20], error[21]), (1, 3, 4));
    assert_eq!(error[26..28], 1420_u16.to_be_bytes());
    world.check_nothing_pending();
}

#[test]
fn super_packets_stay_whole_with_their_tags() {
    let mut world = ethernet_world();
    for number in [0, 1] {
        let flow = Flow {
            number,
            ..Flow::tcp(0)
        };
        for flow in [flow, flow.v6()] {
            world.send(0, &[flow.segments(0, 40_000, 1300)]);
            world.run(Duration::from_millis(500));
            assert_eq!(world.take_delivered(1).len(), 1, "{flow:?}");
            assert_eq!(world.checkers[1].bytes(flow), 40_000);
        }
    }
}

#[test]
fn a_checksum_that_a_device_left_to_others_is_completed_without_knowing_the_protocol() {
    let mut world = ethernet_world();
    let mut payload = frame(tap::mac(1), tap::mac(0), &[0x88b5], 64);
    // The sum over everything from byte 20 on belongs at byte 24.
    payload[24..26].fill(0);
    let vnet = VnetHdr {
        needs_csum: true,
        csum_start: 20,
        csum_offset: 4,
        ..VnetHdr::default()
    };
    let read = [&vnet.to_bytes()[..], &payload].concat();
    world.send_raw(0, &[read], false);
    world.run(Duration::from_millis(500));
    let sum = seikan_wire::checksum::fold(seikan_wire::checksum::sum(&payload[20..]));
    payload[24..26].copy_from_slice(&sum.to_be_bytes());
    assert_eq!(world.sides[1].frames, [payload]);
}

#[test]
fn a_congested_frame_is_marked_if_it_is_ip_and_otherwise_dropped() {
    let mut world = ethernet_world();
    let arp = frame(Mac::BROADCAST, tap::mac(0), &[ETHERTYPE_ARP], 60);
    let read = [&[0; VNET_HDR_LEN][..], &arp].concat();
    world.send_raw(0, &[read], true);
    assert_eq!(drops(&world, 0, DropReason::QueueDelay), 1);
    let capable = Flow::udp(0).datagrams(3, &[100], false, 2);
    world.send_batch(0, &[capable], true);
    world.run(Duration::from_millis(500));
    let delivered = world.take_delivered(1);
    assert_eq!(packets_of(&delivered[0])[0][1] & 3, ECN_CE);
    assert!(world.sides[1].frames.is_empty());
    world.check_nothing_pending();
}

#[test]
fn ends_of_different_modes_refuse_each_other() {
    for modes in [[Mode::Ip, Mode::Ethernet], [Mode::Ethernet, Mode::Ip]] {
        let mut world = world(modes);
        for from in 0..2 {
            world.send(from, &[Flow::udp(from).datagram(0, 100)]);
        }
        world.run(Duration::from_secs(1));
        for i in 0..2 {
            let refusal = world.peer(i).refusal.clone().unwrap_or_default();
            assert!(refusal.contains("same `mode`"), "{refusal:?}");
            assert!(drops(&world, i, DropReason::UnsupportedCapability) >= 1);
            assert!(world.take_delivered(i).is_empty());
        }
    }
}

#[test]
fn allowed_ips_limit_ip_and_nothing_else_also_when_none_is_left() {
    let mut world = ethernet_world();
    let stranger = |seq| {
        let mut read = Flow::udp(0).datagram(seq, 100);
        // The last byte of the source address.
        read[VNET_HDR_LEN + 15] = 99;
        read
    };
    let arp = frame(Mac::BROADCAST, tap::mac(0), &[ETHERTYPE_ARP], 60);
    world.send(0, &[stranger(1)]);
    send_frames(&mut world, 0, std::slice::from_ref(&arp));
    assert_eq!(drops(&world, 1, DropReason::SourceNotAllowed), 1);
    assert_eq!(world.sides[1].frames, [arp]);
    let peer = world.sides[1].peer;
    world.sides[1].tunnel.clear_allowed_ips(peer);
    world.send(0, &[stranger(2)]);
    world.run(Duration::from_millis(500));
    assert!(world.take_delivered(1).is_empty());
    assert_eq!(drops(&world, 1, DropReason::SourceNotAllowed), 2);
}

#[test]
fn a_peer_uses_neither_this_hosts_address_nor_one_of_a_group() {
    let mut world = ethernet_world();
    world.sides[1].tunnel.set_own_mac(tap::mac(1));
    let to = Mac::BROADCAST;
    send_frames(
        &mut world,
        0,
        &[
            frame(to, tap::mac(1), &[ETHERTYPE_ARP], 60),
            frame(to, Mac::BROADCAST, &[ETHERTYPE_ARP], 60),
        ],
    );
    assert_eq!(drops(&world, 1, DropReason::MacConflict), 1);
    assert_eq!(drops(&world, 1, DropReason::BadEthernet), 1);
    assert!(world.sides[1].frames.is_empty());
    world.check_nothing_pending();
}

/// Tunnels in Ethernet mode that all know each other, and a network without delay.
struct Hub {
    tunnels: Vec<Tunnel>,
    time: u64,
}

impl Hub {
    fn key(i: usize) -> PrivateKey {
        PrivateKey::from_bytes([i as u8 + 1; 32])
    }

    fn address(i: usize) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, i as u8 + 1], 51820))
    }

    fn mac(i: usize) -> Mac {
        Mac([2, 0, 0, 0, 0, i as u8])
    }

    fn new(count: usize) -> Hub {
        let tunnel = |own: usize| {
            let mut tunnel = Tunnel::new(TunnelConfig {
                protocol: Protocol::Native,
                mode: Mode::Ethernet,
                private_key: Hub::key(own),
                inner_mtu: 1406,
                offload: true,
                ciphers: vec![Cipher::ChaCha20Poly1305],
                copy_dscp: false,
                repair: None,
                rng: Box::new(Seeded::new(own as u64)),
            });
            for other in (0..count).filter(|other| *other != own) {
                let id = tunnel.add_peer(Hub::key(other).public());
                tunnel.set_endpoint(id.expect("another key"), Hub::address(other));
            }
            tunnel
        };
        Hub {
            tunnels: (0..count).map(tunnel).collect(),
            time: 1 << 42,
        }
    }

    fn peer(&self, i: usize, other: usize) -> PeerId {
        let key: PublicKey = Hub::key(other).public();
        self.tunnels[i].peer_by_key(&key).expect("a peer")
    }

    fn now(&self) -> Now {
        Now {
            mono: Instant::from_nanos(self.time),
            wall: Duration::from_secs(1_800_000_000) + Duration::from_nanos(self.time),
        }
    }

    /// Passes a frame to the device of tunnel `i`; returns the tunnels that deliver it.
    fn send(&mut self, i: usize, frame: &[u8]) -> Vec<usize> {
        self.time += 20_000_000;
        let now = self.now();
        let mut batch = PacketBatch::new(0, 1);
        assert!(batch.push(frame));
        let (mut outbox, mut inbox) = (Outbox::new(1 << 20), Inbox::new(true, true));
        self.tunnels[i].outbound(now, &mut batch, &mut outbox, &mut inbox);
        let mut flying = self.take(i, &outbox);
        let mut delivered = Vec::new();
        while let Some((from, to, mut bytes)) = flying.pop() {
            let (mut outbox, mut inbox) = (Outbox::new(1 << 20), Inbox::new(true, true));
            let datagram = Datagram {
                source: Hub::address(from),
                destination: None,
                traffic_class: 0,
                range: 0..bytes.len(),
                segment_size: bytes.len(),
                truncated: false,
            };
            let arrived = std::iter::once(datagram);
            self.tunnels[to].inbound(now, arrived, &mut bytes, &mut inbox, &mut outbox);
            self.tunnels[to].poll(now, &mut outbox, &mut inbox);
            for write in inbox.writes() {
                let written = crate::sim::written(write, &bytes);
                assert_eq!(written[VNET_HDR_LEN..], *frame);
                self.tunnels[to].delivered(write, Ok(()));
                delivered.push(to);
            }
            flying.extend(self.take(to, &outbox));
        }
        delivered.sort_unstable();
        delivered
    }

    /// The datagrams of an outbox: sender, receiver, bytes.
    fn take(&mut self, from: usize, outbox: &Outbox) -> Vec<(usize, usize, Vec<u8>)> {
        let mut flying = Vec::new();
        for run in outbox.runs() {
            let to = (0..self.tunnels.len())
                .find(|to| Hub::address(*to) == run.destination.address)
                .expect("a tunnel");
            for bytes in outbox.bytes(run).chunks(run.segment_size) {
                flying.push((from, to, bytes.to_vec()));
            }
            self.tunnels[from].sent(run, Ok(()));
        }
        flying
    }
}

#[test]
fn unknown_addresses_go_to_all_peers_and_learned_ones_to_one() {
    let mut hub = Hub::new(3);
    let [a, b, c] = [0, 1, 2].map(Hub::mac);
    let broadcast = |from| frame(Mac::BROADCAST, from, &[ETHERTYPE_ARP], 60);
    // The peers do not pass it on to each other.
    assert_eq!(hub.send(0, &broadcast(a)), [1, 2]);
    assert_eq!(hub.send(0, &frame(b, a, &[0x88b5], 60)), [1, 2]);
    assert_eq!(hub.send(1, &frame(a, b, &[0x88b5], 60)), [0]);
    assert_eq!(hub.send(0, &frame(b, a, &[0x88b5], 60)), [1]);
    assert_eq!(hub.send(0, &frame(c, a, &[0x88b5], 60)), [1, 2]);
    assert_eq!(hub.send(0, &broadcast(a)), [1, 2]);
    // The third cannot take the address of the second.
    assert_eq!(hub.send(2, &frame(a, b, &[0x88b5], 60)), [0; 0]);
    let conflicts = hub.tunnels[0].totals().inbound.drops;
    assert_eq!(conflicts.get(DropReason::MacConflict), 1);
    assert_eq!(hub.send(0, &frame(b, a, &[0x88b5], 60)), [1]);
    // A removed peer has no addresses, and the one that is left gets everything.
    let second = hub.peer(0, 1);
    hub.tunnels[0].remove_peer(second);
    assert_eq!(hub.send(0, &frame(b, a, &[0x88b5], 60)), [2]);
    for tunnel in &hub.tunnels {
        let totals = tunnel.totals();
        assert_eq!(totals.outbound.unaccounted(), 0);
        assert_eq!(totals.inbound.unaccounted(), 0);
    }
}

#[test]
fn a_frame_without_a_peer_is_counted() {
    let mut hub = Hub::new(1);
    let lost = frame(Mac::BROADCAST, Hub::mac(0), &[ETHERTYPE_ARP], 60);
    assert_eq!(hub.send(0, &lost), [0; 0]);
    let drops = hub.tunnels[0].totals().outbound.drops;
    assert_eq!(drops.get(DropReason::NoRoute), 1);
}

#[test]
fn a_header_is_found_behind_its_tags() {
    let tagged = Ethernet::new(tap::mac(0), tap::mac(1), Some(Vlan { tci: 9 }), 0x0800);
    let mut bytes = [0; 18];
    tagged.write(&mut bytes);
    assert_eq!(Mode::Ethernet.ip_at(&bytes), Ok(Some(18)));
    assert_eq!(Mode::Ip.ip_at(&bytes), Ok(Some(0)));
    assert_eq!(
        Mode::Ethernet.ip_at(&bytes[..13]),
        Err(DropReason::BadEthernet)
    );
}
