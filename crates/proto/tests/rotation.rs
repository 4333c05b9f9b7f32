//! Key rotation while packets go in both directions.

use crate::sim::World;
use crate::sim::packets::Flow;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::noise::Protocol;
use seikan_proto::peer::Peer;
use std::time::Duration;

const EVERY: Duration = Duration::from_millis(10);

fn new_key() -> PrivateKey {
    PrivateKey::from_bytes([0x48; 32])
}

/// A packet in each direction every 10 ms, from number `first` on. Returns the next number.
fn in_both_directions(world: &mut World, first: u32, time: Duration) -> u32 {
    let count = (time.as_millis() / EVERY.as_millis()) as u32;
    for seq in first..first + count {
        for i in [0, 1] {
            world.send(i, &[Flow::udp(i).datagram(seq, 100)]);
        }
        world.run(EVERY);
    }
    first + count
}

fn arrived(world: &World) -> [u64; 2] {
    [1, 0].map(|i| world.checkers[i].datagrams(Flow::udp(1 - i)) as u64)
}

/// The first side changes its key.
fn rotate(world: &mut World) {
    let now = world.now(0).mono;
    world.sides[0].tunnel.rotate_private_key(new_key(), now);
}

/// The second side learns the new key.
fn receive(world: &mut World) {
    let now = world.now(1);
    let side = &mut world.sides[1];
    assert!(side.tunnel.rotate_peer_key(side.peer, new_key().public()));
    side.tunnel.renew(now, side.peer, &mut side.outbox);
    world.flush(1, &[]);
}

fn completed(peer: &Peer) -> u64 {
    peer.counters.handshakes.completed
}

#[test]
fn a_key_rotation_loses_no_packet_however_late_it_is_known() {
    for (protocol, lates) in [
        (Protocol::Native, &[0, 1, 150][..]),
        (Protocol::WireGuard, &[1]),
    ] {
        for late in lates.iter().copied() {
            let mut world = World::new(protocol, 1);
            world.establish();
            let seq = in_both_directions(&mut world, 0, Duration::from_secs(2));
            rotate(&mut world);
            let seq = in_both_directions(&mut world, seq, Duration::from_secs(late));
            let before = completed(world.peer(0));
            receive(&mut world);
            let seq = in_both_directions(&mut world, seq, Duration::from_secs(10));
            world.run(Duration::from_secs(1));
            assert_eq!(arrived(&world), [u64::from(seq); 2], "{late} s");
            // And the sessions are those of the new key.
            assert!(completed(world.peer(0)) > before, "{late} s");
            assert_eq!(world.peer(1).public_key, new_key().public());
            world.check_nothing_pending();
        }
    }
}

#[test]
fn the_previous_key_is_answered_for_three_minutes() {
    for (after, answered) in [(170, true), (185, false)] {
        let mut world = World::new(Protocol::Native, 1);
        world.establish();
        rotate(&mut world);
        world.run(Duration::from_secs(after));
        // It has no session any more, and knows only the previous key.
        world.restart(1);
        world.send(1, &[Flow::udp(1).datagram(0, 100)]);
        world.run(Duration::from_secs(2));
        assert_eq!(
            world.take_delivered(0).len(),
            usize::from(answered),
            "{after} s"
        );
    }
}

#[test]
fn the_previous_key_is_refused_by_peers_with_the_new_one() {
    let mut world = World::new(Protocol::Native, 1);
    world.establish();
    receive(&mut world);
    // The first side does not know it, and starts again with its previous key.
    world.restart(0);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(Duration::from_secs(20));
    assert_eq!(world.take_delivered(1), Vec::<Vec<u8>>::new());
}

#[test]
fn a_key_of_another_peer_is_not_taken() {
    let mut world = World::new(Protocol::Native, 1);
    let own = *world.sides[1].tunnel.identity().public();
    let side = &mut world.sides[1];
    let taken: PublicKey = PrivateKey::from_bytes([0x50; 32]).public();
    side.tunnel.add_peer(taken).expect("another peer");
    for key in [own, taken] {
        assert!(!side.tunnel.rotate_peer_key(side.peer, key));
    }
}
