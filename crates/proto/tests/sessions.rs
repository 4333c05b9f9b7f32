//! Sessions: established, renewed, confirmed, refused, moved, given up.

use crate::sim::network::{Parcel, Path};
use crate::sim::packets::Flow;
use crate::sim::{MILLISECOND, SECOND, Seeded, Setup, World, address};
use seikan_observe::DropReason;
use seikan_proto::capabilities::{Capabilities, Cipher};
use seikan_proto::constants::*;
use seikan_proto::keys::Identity;
use seikan_proto::noise::{self, Protocol};
use seikan_proto::tai64n::Tai64nClock;
use std::net::SocketAddr;
use std::time::Duration;

const BOTH: [Protocol; 2] = [Protocol::WireGuard, Protocol::Native];

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Sends one datagram of every flow each `every`, for `time`. Returns the number for each flow.
fn load(world: &mut World, flows: &[Flow], time: Duration, every: Duration) -> u32 {
    let end = world.time + time.as_nanos() as u64;
    let mut seq = 0;
    while world.time < end {
        for flow in flows {
            world.send(flow.from, &[flow.datagram(seq, 300)]);
        }
        seq += 1;
        world.run(every);
    }
    seq
}

fn handshakes(world: &World, i: usize) -> (u64, u64) {
    let handshakes = &world.peer(i).counters.handshakes;
    (handshakes.initiations_sent, handshakes.completed)
}

#[test]
fn the_initiator_renews_the_session_under_load_without_losing_a_packet() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        let flows = [Flow::udp(0), Flow::udp(1)];
        let sent = load(&mut world, &flows, seconds(500), Duration::from_millis(100));
        world.run(seconds(1));
        for flow in flows {
            let arrived = world.checkers[1 - flow.from].datagrams(flow);
            assert_eq!(arrived, sent as usize, "{protocol:?} {flow:?}");
        }
        // At 120, 240, 360 and 480 seconds, by the initiator.
        assert_eq!(handshakes(&world, 0), (5, 5), "{protocol:?}");
        assert_eq!(handshakes(&world, 1), (0, 5), "{protocol:?}");
        world.check_nothing_pending();
    }
}

#[test]
fn a_host_that_starts_again_renews_former_sessions_at_once() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        let endpoint = world.peer(1).path.endpoint;
        world.restart(1);
        world.run(seconds(1));
        assert_eq!(handshakes(&world, 1), (0, 0), "{protocol:?}");

        let now = world.now(1).mono;
        let side = &mut world.sides[1];
        side.tunnel.resume(now, side.peer, endpoint);
        world.run(seconds(1));
        assert_eq!(handshakes(&world, 1), (1, 1), "{protocol:?}");
        assert_eq!(handshakes(&world, 0), (1, 2), "{protocol:?}");

        // Once there is a session, there is nothing to renew.
        let now = world.now(1).mono;
        let side = &mut world.sides[1];
        side.tunnel.resume(now, side.peer, endpoint);
        world.run(seconds(1));
        assert_eq!(handshakes(&world, 1), (1, 1), "{protocol:?}");
    }
}

#[test]
fn nothing_waits_for_an_answer_longer_than_a_keepalive_takes_unless_the_peer_is_gone() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        let waited = |world: &World| {
            let since = world.peer(0).waiting_since();
            since.map_or(Duration::ZERO, |since| world.now(0).mono - since)
        };
        // The other side has nothing to send but keepalives, which take KEEPALIVE_TIMEOUT.
        for number in 0..100 {
            world.send(0, &[Flow::udp(0).datagram(number, 300)]);
            world.run(seconds(1));
            assert!(waited(&world) <= seconds(11), "{protocol:?}");
        }
        world.run(seconds(11));
        assert_eq!(waited(&world), Duration::ZERO, "{protocol:?}");

        world
            .links
            .iter_mut()
            .for_each(|link| link.path.down = true);
        for number in 100..300 {
            world.send(0, &[Flow::udp(0).datagram(number, 300)]);
            world.run(seconds(1));
        }
        assert!(waited(&world) >= seconds(199), "{protocol:?}");
    }
}

#[test]
fn a_session_is_not_used_after_reject_after_time() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.links[0].path.down = true;
        world.take_sent(0);
        world.send(0, &[Flow::udp(0).datagram(1, 100)]);
        let kept = world.take_sent(0);
        world.run(REJECT_AFTER_TIME - seconds(3));
        world.take_sent(0);
        let before = world.totals(1).inbound;
        world.run(seconds(4));
        world.send(0, &[Flow::udp(0).datagram(2, 100)]);
        let kinds: Vec<u8> = world.take_sent(0).iter().map(|p| p.bytes[0]).collect();
        assert!(
            !kinds.contains(&protocol.data_type()),
            "{protocol:?}: {kinds:?}"
        );
        // The other end refuses as well: a delayed datagram arrives too late.
        world.receive(1, &kept);
        let after = world.totals(1).inbound;
        let expired = |c: &seikan_observe::DirectionCounters| c.drops.get(DropReason::KeyExpired);
        assert_eq!(expired(&after) - expired(&before), 1, "{protocol:?}");
        assert!(world.take_delivered(1).is_empty());
    }
}

#[test]
fn a_silent_receiver_answers_with_one_keepalive_after_keepalive_timeout() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.run(seconds(60));
        world.take_sent(0);
        world.take_sent(1);
        world.send(0, &[Flow::udp(0).datagram(1, 100)]);
        world.run(seconds(9));
        let early = world.take_sent(1).len();
        world.run(seconds(20));
        let late = world.take_sent(1).len();
        match protocol {
            Protocol::WireGuard => assert_eq!((early, late), (0, 1)),
            // The native protocol answers with a report after a second, and by acknowledging the
            // probes that go on for 15 s after the last packet: at 10 s and at 15 s.
            Protocol::Native => assert!(early > 0 && late <= 2, "{early} {late}"),
        }
        world.run(seconds(20));
        assert_eq!(world.take_sent(1).len(), 0, "{protocol:?}");
        assert_eq!(handshakes(&world, 0).0, 1, "nobody took the other for dead");
    }
}

#[test]
fn idle_peers_fall_silent() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        let flows = [Flow::udp(0), Flow::udp(1)];
        load(&mut world, &flows, seconds(5), Duration::from_millis(50));
        world.run(seconds(40));
        world.take_sent(0);
        world.take_sent(1);
        world.run(seconds(3600));
        let sent = (world.take_sent(0).len(), world.take_sent(1).len());
        assert_eq!(sent, (0, 0), "{protocol:?}");
        assert_eq!(world.sides[0].tunnel.next_wakeup(), None);
        assert_eq!(world.sides[0].tunnel.indices_in_use(), 0, "keys are erased");
    }
}

#[test]
fn persistent_keepalives_come_at_their_interval_and_renew_the_session_in_time() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        let now = world.now(0).mono;
        let side = &mut world.sides[0];
        side.tunnel
            .set_persistent_keepalive(side.peer, seconds(25), now);
        world.run(seconds(1));
        assert_eq!(
            handshakes(&world, 0).1,
            1,
            "the first one opens the session"
        );
        world.run(seconds(29));
        world.take_sent(0);
        world.run(seconds(75));
        let sent: Vec<usize> = world.take_sent(0).iter().map(|p| p.bytes.len()).collect();
        assert_eq!(sent.len(), 3, "{protocol:?}: {sent:?}");
        world.run(seconds(40));
        // Renewed by REKEY_AFTER_TIME, long before the session dies.
        assert_eq!(handshakes(&world, 0), (2, 2), "{protocol:?}");
    }
}

#[test]
fn both_ends_may_initiate_at_once() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        let flows = [Flow::udp(0), Flow::udp(1)];
        let sent = load(&mut world, &flows, seconds(300), Duration::from_millis(250));
        world.run(seconds(1));
        for flow in flows {
            let arrived = world.checkers[1 - flow.from].datagrams(flow);
            assert_eq!(arrived, sent as usize, "{protocol:?} {flow:?}");
        }
        world.check_nothing_pending();
    }
}

#[test]
fn staged_packets_are_bounded_and_expire() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.links[1].path.down = true;
        for seq in 0..200 {
            world.send(0, &[Flow::udp(0).datagram(seq, 100)]);
        }
        let out = world.totals(0).outbound;
        assert_eq!(
            (out.pending, out.drops.get(DropReason::HandshakeQueueFull)),
            (128, 72)
        );
        world.run(REKEY_ATTEMPT_TIME + seconds(10));
        let out = world.totals(0).outbound;
        assert_eq!(
            (out.pending, out.drops.get(DropReason::HandshakeTimeout)),
            (0, 128)
        );
        assert_eq!(handshakes(&world, 0).0, u64::from(MAX_HANDSHAKE_ATTEMPTS));
        world.check();
    }
}

#[test]
fn staged_packets_are_sent_before_later_ones() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        let flow = Flow::udp(0);
        world.send(0, &[flow.datagram(0, 100), flow.datagram(1, 100)]);
        // The response has arrived, but nothing was polled when the next packets are read.
        let initiation = world.take_sent(0);
        world.receive(1, &initiation);
        let response = world.take_sent(1);
        world.receive(0, &response);
        world.send(0, &[flow.datagram(2, 100)]);
        world.run(seconds(1));
        // The checker has verified their order.
        assert_eq!(world.checkers[1].datagrams(flow), 3, "{protocol:?}");
        world.check_nothing_pending();
    }
}

#[test]
fn a_replayed_initiation_is_refused_and_unanswered() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.run(seconds(5));
        let mut other = World::new(protocol, 1);
        other.send(0, &[Flow::udp(0).datagram(0, 100)]);
        let initiation = other.take_sent(0);
        assert_eq!(initiation[0].bytes[0], protocol.initiation_type());
        world.take_sent(1);
        world.receive(1, &initiation);
        let inbound = world.totals(1).inbound;
        assert_eq!(
            inbound.drops.get(DropReason::ReplayedHandshake),
            1,
            "{protocol:?}"
        );
        assert!(world.take_sent(1).is_empty());
        assert_eq!(handshakes(&world, 1).1, 1);
    }
}

#[test]
fn a_replayed_datagram_is_refused() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.take_sent(0);
        world.send(0, &[Flow::udp(0).datagram(1, 100)]);
        let sent = world.take_sent(0);
        world.run(seconds(1));
        world.receive(1, &sent);
        assert_eq!(world.take_delivered(1).len(), 1, "{protocol:?}");
        assert_eq!(world.totals(1).inbound.drops.get(DropReason::Replayed), 1);
    }
}

#[test]
fn with_another_preshared_key_no_session_comes_about() {
    for protocol in BOTH {
        let setup = Setup::new(protocol);
        let other = Setup {
            psk: [1; 32],
            ..setup.clone()
        };
        let mut world = World::with([setup, other], [Path::default(), Path::default()], 1);
        let flows = [Flow::udp(0)];
        load(&mut world, &flows, seconds(60), seconds(1));
        assert_eq!((handshakes(&world, 0).1, handshakes(&world, 1).1), (0, 0));
        assert!(world.take_delivered(1).is_empty());
        // The preshared key enters with the response, so the responder answers each initiation and
        // nothing else.
        let kinds: Vec<u8> = world.take_sent(1).iter().map(|p| p.bytes[0]).collect();
        assert!(
            kinds.iter().all(|k| *k == protocol.response_type()),
            "{kinds:?}"
        );
        assert_eq!(kinds.len() as u64, handshakes(&world, 0).0);
        assert!(world.totals(0).inbound.drops.get(DropReason::BadHandshake) > 0);
        world.check_nothing_pending();
    }
}

/// An initiation from side 0 to side 1 with this payload.
fn initiation(world: &World, payload: &[u8], rng: u64) -> Parcel {
    let protocol = world.sides[0].setup.protocol;
    let mut message = [0; MAX_HANDSHAKE_LEN];
    let (_, length) = noise::Initiation {
        protocol,
        identity: &Identity::new(world.private_key(0)),
        remote: &world.private_key(1).public(),
        psk: &Default::default(),
        sender_index: 17,
        timestamp: Tai64nClock::default().stamp(world.now(0).wall),
        payload,
    }
    .write(&mut Seeded::new(rng), &mut message)
    .expect("an initiation");
    Parcel {
        from: address(0, false),
        to: address(1, false),
        traffic_class: 0,
        is_opener: false,
        bytes: message[..length].to_vec(),
    }
}

#[test]
fn an_unknown_mandatory_capability_is_refused_with_a_reason() {
    let mut world = World::new(Protocol::Native, 1);
    let mut offer = Capabilities {
        version: 1,
        ciphers: vec![Cipher::Aes256Gcm],
        max_lanes: 1,
        inner_mtu: 1420,
        features: 0,
        mode: seikan_proto::mode::Mode::Ip,
    }
    .encode();
    offer.extend([0x77, 0x80, 0, 0]);
    let message = initiation(&world, &offer, 5);
    world.receive(1, std::slice::from_ref(&message));
    let refusal = world.peer(1).refusal.clone();
    assert!(
        refusal.as_deref().is_some_and(|r| r.contains("0x8077")),
        "{refusal:?}"
    );
    assert_eq!(
        world
            .totals(1)
            .inbound
            .drops
            .get(DropReason::UnsupportedCapability),
        1
    );
    assert!(world.take_sent(1).is_empty());
    assert_eq!(world.sides[1].tunnel.indices_in_use(), 0);
    // It is not examined twice.
    world.run(seconds(1));
    world.receive(1, &[message]);
    let drops = world.totals(1).inbound.drops;
    assert_eq!(drops.get(DropReason::UnsupportedCapability), 1);
    assert_eq!(drops.get(DropReason::ReplayedHandshake), 1);
    // An acceptable one clears it.
    world.run(seconds(1));
    world.establish();
    assert_eq!(world.peer(1).refusal, None);
}

#[test]
fn no_common_cipher_is_refused_with_a_reason() {
    let mut setups = [Setup::new(Protocol::Native), Setup::new(Protocol::Native)];
    setups[0].ciphers = vec![Cipher::Aes256Gcm];
    setups[1].ciphers = vec![Cipher::ChaCha20Poly1305];
    let mut world = World::with(setups, [Path::default(), Path::default()], 1);
    world.send(0, &[Flow::udp(0).datagram(0, 100)]);
    world.run(seconds(1));
    assert!(world.peer(1).refusal.is_some());
    assert_eq!(world.peer(1).cipher(), None);
}

#[test]
fn the_cipher_is_the_common_first_choice_else_chacha() {
    use Cipher::{Aes256Gcm as Aes, ChaCha20Poly1305 as ChaCha};
    let table: [(&[Cipher], &[Cipher], Cipher); 6] = [
        (&[Aes, ChaCha], &[Aes, ChaCha], Aes),
        (&[ChaCha, Aes], &[ChaCha, Aes], ChaCha),
        (&[Aes, ChaCha], &[ChaCha, Aes], ChaCha),
        (&[Aes, ChaCha], &[ChaCha], ChaCha),
        (&[ChaCha], &[Aes, ChaCha], ChaCha),
        (&[Aes], &[ChaCha, Aes], Aes),
    ];
    for (a, b, agreed) in table {
        let mut setups = [Setup::new(Protocol::Native), Setup::new(Protocol::Native)];
        setups[0].ciphers = a.to_vec();
        setups[1].ciphers = b.to_vec();
        let mut world = World::with(setups, [Path::default(), Path::default()], 1);
        world.establish();
        let both = (world.peer(0).cipher(), world.peer(1).cipher());
        assert_eq!(both, (Some(agreed), Some(agreed)), "{a:?} meets {b:?}");
    }
}

/// Handshake messages from many addresses of a sender that does not know the public key.
fn flood(world: &mut World, count: u32) {
    let template = initiation(world, &[], 9);
    for n in 0..count {
        let mut parcel = template.clone();
        parcel.bytes[20] ^= n as u8 | 1;
        parcel.from = SocketAddr::from(([198, 18, (n >> 8) as u8, n as u8], 1000));
        world.receive(1, &[parcel]);
    }
}

#[test]
fn messages_without_a_valid_mac1_get_no_answer() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        let flow = Flow::udp(0);
        world.take_sent(1);
        for seq in 0..20 {
            flood(&mut world, 100);
            world.send(0, &[flow.datagram(seq, 100)]);
            world.run(Duration::from_millis(20));
        }
        let to_unknown_sources = world
            .take_sent(1)
            .iter()
            .filter(|p| p.to != address(0, false))
            .count();
        assert_eq!(to_unknown_sources, 0, "{protocol:?}");
        assert_eq!(world.totals(1).inbound.drops.get(DropReason::BadMac1), 2000);
        assert_eq!(world.checkers[1].datagrams(flow), 20);
        world.check();
    }
}

/// A sender that does not know the public key cannot cause cookies to be demanded from others.
#[test]
fn a_flood_without_a_valid_mac1_is_no_load() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        flood(&mut world, 1000);
        world.send(0, &[Flow::udp(0).datagram(1, 100)]);
        world.run(Duration::from_millis(500));
        let answer = world.take_sent(1).first().map(|parcel| parcel.bytes[0]);
        assert_eq!(answer, Some(protocol.response_type()));
    }
}

/// Initiations of a legitimate peer from many addresses, each with a valid mac1.
#[test]
fn under_a_flood_cookies_are_demanded_and_established_flows_go_on() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.take_sent(1);
        let flow = Flow::udp(0);
        let mut cookies = 0;
        for seq in 0..40u32 {
            for n in 0..25u32 {
                let mut parcel = initiation(&world, &[], u64::from(seq * 1000 + n));
                parcel.from = SocketAddr::from(([198, 18, seq as u8, n as u8], 1000));
                world.receive(1, &[parcel]);
            }
            world.send(0, &[flow.datagram(seq, 100)]);
            world.run(Duration::from_millis(25));
            let reply = protocol.cookie_reply_type();
            cookies += world
                .take_sent(1)
                .iter()
                .filter(|p| p.bytes[0] == reply)
                .count();
        }
        let drops = world.totals(1).inbound.drops;
        assert_eq!(drops.get(DropReason::CookieRequired), cookies as u64);
        assert!(cookies >= 900 - 100, "{protocol:?}: {cookies} of 1000");
        assert_eq!(world.checkers[1].datagrams(flow), 40);
        world.check();
    }
}

/// A peer that restarts while its responder is under load gets through with a cookie.
#[test]
fn a_true_peer_gets_through_a_flood_by_its_cookie() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        let flow = Flow::udp(0);
        world.send(0, &[flow.datagram(0, 100)]);
        for step in 0..80u32 {
            for n in 0..30u32 {
                let mut parcel = initiation(&world, &[], u64::from(step * 1000 + n));
                // Another identity, or each would be a handshake of the same peer.
                parcel.bytes[40] ^= 1;
                let key = world.private_key(1).public();
                remac(protocol, &key, &mut parcel.bytes);
                parcel.from = SocketAddr::from(([198, 18, step as u8, n as u8], 1000));
                world.receive(1, &[parcel]);
            }
            world.run(Duration::from_millis(100));
        }
        assert_eq!(world.checkers[1].datagrams(flow), 1, "{protocol:?}");
        let (sent, completed) = handshakes(&world, 0);
        assert!(
            completed == 1 && sent <= 3,
            "{protocol:?}: {sent} initiations"
        );
    }
}

/// Writes a mac1, which anyone who knows the receiver's key can compute (paper 5.4.4).
fn remac(protocol: Protocol, receiver: &seikan_proto::keys::PublicKey, message: &mut [u8]) {
    use blake2::digest::consts::U16;
    use blake2::digest::{Digest, FixedOutput, Mac, Update};
    let key: [u8; 32] = blake2::Blake2s256::new_with_prefix(protocol.mac1_label())
        .chain_update(receiver.as_bytes())
        .finalize()
        .into();
    let at = message.len() - MACS_LEN;
    let mut mac = <blake2::Blake2sMac<U16> as Mac>::new_from_slice(&key).expect("32 bytes");
    Update::update(&mut mac, &message[..at]);
    message[at..at + MAC_LEN].copy_from_slice(&mac.finalize_fixed());
}

#[test]
fn the_newest_datagram_moves_the_endpoint_and_an_older_one_does_not() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.take_sent(0);
        let flow = Flow::udp(0);
        world.links[0].path.down = true;
        world.send(0, &[flow.datagram(1, 100)]);
        let delayed = world.take_sent(0);
        world.links[0].path.down = false;
        let moved = SocketAddr::from(([203, 0, 113, 5], 4000));
        world.rebind(moved);
        world.send(0, &[flow.datagram(2, 100)]);
        world.run(seconds(1));
        assert_eq!(world.peer(1).path.endpoint, Some(moved), "{protocol:?}");
        world.checkers[1].in_order = false;
        world.receive(1, &delayed);
        assert_eq!(world.checkers[1].datagrams(flow), 2);
        assert_eq!(world.peer(1).path.endpoint, Some(moved), "{protocol:?}");
        // A replay by an attacker does not move the endpoint either.
        let mut copy = delayed[0].clone();
        copy.from = SocketAddr::from(([198, 18, 0, 1], 1));
        world.receive(1, &[copy]);
        assert_eq!(world.peer(1).path.endpoint, Some(moved), "{protocol:?}");
    }
}

#[test]
fn a_restarted_side_is_noticed_within_the_protocols_times() {
    for protocol in BOTH {
        for restarted in [0, 1] {
            let mut world = World::new(protocol, 1);
            world.establish();
            world.restart(restarted);
            // Only the side that does not know it sends.
            let flow = Flow::udp(1 - restarted);
            let bound = KEEPALIVE_TIMEOUT + REKEY_TIMEOUT + seconds(1);
            let sent = load(&mut world, &[flow], bound, Duration::from_millis(200));
            let newest = world.checkers[restarted].newest(flow);
            assert_eq!(newest, Some(sent - 1), "{protocol:?} {restarted}");
        }
    }
}

#[test]
fn a_side_that_slept_goes_on_at_once() {
    for protocol in BOTH {
        for asleep in [0, 1] {
            let mut world = World::new(protocol, 1);
            world.establish();
            world.sides[asleep].slept += 100_000 * SECOND;
            let flow = Flow::udp(asleep);
            world.send(asleep, &[flow.datagram(1, 100)]);
            world.run_until(world.time + 200 * MILLISECOND);
            let arrived = world.checkers[1 - asleep].datagrams(flow);
            assert_eq!(arrived, 1, "{protocol:?} {asleep}");
            world.check_nothing_pending();
        }
    }
}

#[test]
fn another_private_key_ends_the_sessions_and_leaks_no_index() {
    for protocol in BOTH {
        let mut world = World::new(protocol, 1);
        world.establish();
        world.sides[0]
            .tunnel
            .set_private_key(seikan_proto::keys::PrivateKey::from_bytes([9; 32]));
        assert_eq!(world.sides[0].tunnel.indices_in_use(), 0);
        world.take_sent(0);
        world.send(0, &[Flow::udp(0).datagram(1, 100)]);
        // At once, although an initiation was sent a moment ago.
        assert_eq!(world.take_sent(0).len(), 1, "{protocol:?}");
        world.run(seconds(1));
        assert_eq!(
            world.totals(1).inbound.drops.get(DropReason::UnknownPeer),
            1
        );
        world.check_nothing_pending();
    }
}
