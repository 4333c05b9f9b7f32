//! The work that a malicious authenticated peer can cause for each byte that it sends: never more
//! than a small constant.
//!
//! The peer is that of the fuzz targets. Nothing here measures time: records, packets and bytes are
//! counted.

#[path = "../../../fuzz/src/lib.rs"]
#[allow(dead_code, reason = "the fuzz targets use all of it")]
mod fuzz;

use crate::shapes::{Shape, fields, frame, full};
use fuzz::{Peer, Work};
use seikan_observe::DropReason;
use seikan_proto::capabilities::{Capabilities, Cipher, FEATURE_OFFLOAD};
use seikan_proto::mode::Mode;
use seikan_proto::native::repair::{parity, receiver, sender::State};
use seikan_proto::noise::Protocol;
use seikan_proto::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Plaintext of a record of 1,400 bytes of UDP payload.
const PLAINTEXT: usize = 1400 - crate::shapes::OVERHEAD;

/// The total work for `records` records of one shape.
fn work(records: usize, mut plaintext: impl FnMut(usize) -> Vec<u8>) -> Work {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.wait(Duration::from_millis(1));
    peer.take_work();
    for n in 0..records {
        let plaintext = plaintext(n);
        peer.deliver_record(&plaintext);
        peer.wait(Duration::from_micros(100));
    }
    peer.assert_ledger_closes();
    peer.take_work()
}

#[test]
fn no_shape_of_a_record_makes_more_than_its_bytes_pay_for() {
    for size in [100, 1400] {
        for shape in Shape::all(size - crate::shapes::OVERHEAD) {
            let name = shape.name;
            let work = work(200, shape.plaintext);
            println!("{name}, {size}: {work:?}");
            work.assert_bounded(name);
        }
    }
}

#[test]
fn many_probes_in_a_record_have_one_answer() {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.wait(Duration::from_secs(1));
    peer.take_work();
    peer.deliver_record(&full(PLAINTEXT, |i| frame(5, &fields(&[i as u16]))));
    let work = peer.take_work();
    assert_eq!(work.records_out, 1, "{work:?}");
    let totals = peer.tunnel.totals().inbound;
    // The second ends the record.
    assert_eq!(totals.drops.get(DropReason::BadFrame), 1);
}

/// A peer that forges its source addresses, and answers the checks that it does not receive there
/// with guesses.
#[test]
fn checks_of_a_forged_address_cannot_be_guessed() {
    let forged = [5, 6].map(|port| SocketAddr::from(([203, 0, 113, 5], port)));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.wait(Duration::from_secs(1));
    let is_validated = |peer: &Peer| {
        let path = &peer.tunnel.peers().next().expect("one peer").path;
        path.is_validated()
    };
    // Each number is guessed once, so that only the true answers at the end can be right.
    let mut guess = 0;
    for _ in 0..1000 {
        for address in forged {
            for _ in 0..4 {
                guess += 1;
                let answer = frame(6, &fields(&[guess, 32]));
                let answer = peer.seal(&[&[0; 3], &answer[..]].concat());
                peer.deliver_from(address, answer);
            }
            peer.wait(Duration::from_millis(3));
        }
        assert!(!is_validated(&peer), "guessed {guess}");
    }
    // Answers to the former checks would be guesses as well.
    peer.answer_probes(SocketAddr::from(([203, 0, 113, 7], 9)));
    let new = forged[0];
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(new, keepalive);
    peer.wait(Duration::from_millis(3));
    peer.answer_probes(new);
    assert!(!is_validated(&peer), "guesses are compared without end");
    // A token comes back every 1.875 s.
    peer.wait(Duration::from_secs(2));
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(new, keepalive);
    peer.wait(Duration::from_millis(10));
    peer.answer_probes(new);
    assert!(is_validated(&peer), "the true answer counts no more");
}

/// Traffic to an address that only a datagram's source field names, and that does not answer.
#[test]
fn an_unvalidated_endpoint_is_sent_at_most_three_times_the_bytes_received() {
    let victim = SocketAddr::from(([203, 0, 113, 5], 9));
    for from_the_peer in [1, 3, 50] {
        let mut peer = Peer::new(Protocol::Native, Mode::Ip);
        // Confirms the session from the peer's own address.
        peer.deliver_record(&[0; 3]);
        peer.wait(Duration::from_secs(1));
        peer.take_work();
        let received = |peer: &mut Peer| {
            let datagram = peer.seal(&full(PLAINTEXT, |i| frame(5, &fields(&[i as u16]))));
            let length = datagram.len();
            peer.deliver_from(victim, datagram);
            length
        };
        let mut bytes_in = 0;
        for n in 0..from_the_peer {
            bytes_in += received(&mut peer);
            // There is always more to send, including a ping and a keepalive.
            for _ in 0..20 {
                peer.read_from_device(1000);
            }
            peer.ask_whether_it_answers();
            peer.wait(Duration::from_millis(40 * n));
        }
        for _ in 0..300 {
            peer.read_from_device(1000);
            peer.wait(Duration::from_secs(1));
        }
        let sent = peer.sent_to(victim);
        assert!(sent > 0, "it is asked");
        assert!(sent <= 3 * bytes_in, "{sent} bytes for {bytes_in}");
    }
}

#[test]
fn a_peer_that_answers_from_its_new_endpoint_is_sent_all_waiting_packets() {
    let new = SocketAddr::from(([203, 0, 113, 5], 9));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.wait(Duration::from_secs(1));
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(new, keepalive);
    for _ in 0..50 {
        peer.read_from_device(1000);
    }
    peer.wait(Duration::from_millis(1));
    assert!((1..=3 * 27).contains(&peer.sent_to(new)));
    peer.answer_probes(new);
    peer.wait(Duration::from_millis(10));
    assert!(peer.sent_to(new) > 50 * 1000, "{}", peer.sent_to(new));
    peer.assert_ledger_closes();
}

#[test]
fn an_unvalidated_endpoint_is_left_for_the_previous_one() {
    let nowhere = SocketAddr::from(([203, 0, 113, 5], 9));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.wait(Duration::from_secs(1));
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(nowhere, keepalive);
    peer.read_from_device(1000);
    let before = peer.sent_to(fuzz::SOURCE);
    peer.wait(Duration::from_millis(2900));
    assert_eq!(peer.sent_to(fuzz::SOURCE), before);
    peer.wait(Duration::from_millis(200));
    assert!(peer.sent_to(fuzz::SOURCE) > before + 1000);
}

#[test]
fn a_peer_that_returns_to_its_validated_endpoint_needs_no_check() {
    let elsewhere = [5, 6].map(|port| SocketAddr::from(([203, 0, 113, 5], port)));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    for address in elsewhere {
        let keepalive = peer.seal(&[0; 3]);
        peer.deliver_from(address, keepalive);
    }
    let validated = |peer: &Peer| {
        let path = &peer.tunnel.peers().next().expect("one peer").path;
        path.endpoint.filter(|_| path.is_validated())
    };
    assert_eq!(validated(&peer), None);
    peer.deliver_record(&[0; 3]);
    assert_eq!(validated(&peer), Some(fuzz::SOURCE));
    let before = peer.sent_to(fuzz::SOURCE);
    (0..50).for_each(|_| peer.read_from_device(1000));
    peer.wait(Duration::from_millis(1));
    assert!(peer.sent_to(fuzz::SOURCE) > before + 50 * 1000);
}

/// The session was confirmed from an address that never answers, and no other one was validated.
#[test]
fn other_paths_are_tried_in_place_of_an_unvalidated_first_endpoint() {
    let nowhere = SocketAddr::from(([203, 0, 113, 5], 9));
    let candidate = SocketAddr::from(([203, 0, 113, 6], 9));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(nowhere, keepalive);
    let id = peer.tunnel.peers().next().expect("one peer").id;
    peer.tunnel.set_candidates(id, &[candidate], peer.now.mono);
    for _ in 0..50 {
        peer.read_from_device(1000);
        peer.wait(Duration::from_millis(100));
    }
    let path = &peer.tunnel.peers().next().expect("one peer").path;
    assert_eq!((path.endpoint, path.is_validated()), (Some(nowhere), false));
    assert!(peer.sent_to(candidate) > 0, "it is not tried");
    peer.assert_ledger_closes();
}

/// A peer that moves and does not answer, while many packets for it wait.
#[test]
fn an_unvalidated_endpoint_gets_packets_and_no_parity() {
    let new = SocketAddr::from(([203, 0, 113, 5], 9));
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.wait(Duration::from_secs(1));
    for n in 0..400 {
        let datagram = peer.seal(&full(PLAINTEXT, |_| packet_frame(n % 100)));
        peer.deliver_from(new, datagram);
        // Of all lengths, so that some leave no space for parity.
        peer.read_from_device(40 + n * 7 % 1300);
        peer.wait(Duration::from_micros(300));
    }
    let tunnel = &peer.tunnel;
    let path = &tunnel.peers().next().expect("one peer").path;
    assert_eq!((path.is_validated(), path.repair().sent), (false, 0));
    peer.assert_ledger_closes();
}

/// Blocks of a peer that makes its receiver multiply as much as it can for each byte.
#[test]
fn parity_costs_few_multiplications_for_each_byte() {
    for (records, lost, parities) in [(112, 16, 16), (1, 1, 16), (120, 8, 8), (100, 16, 15)] {
        let mut peer = Peer::new(Protocol::Native, Mode::Ip);
        peer.deliver_record(&[0; 3]);
        peer.take_work();
        for _ in 0..40 {
            for n in 0..records {
                let plaintext = full(PLAINTEXT - parity::ROOM, |_| packet_frame(n));
                peer.deliver_record(&plaintext);
            }
            for _ in 0..lost {
                // Sealed and not delivered: a gap in the counters.
                peer.seal(&[0; 3]);
            }
            for number in 0..parities {
                let head = [
                    8 | (number as u8) << 4,
                    parities as u8,
                    (records + lost) as u8,
                ];
                let mut plaintext = vec![0; 3];
                plaintext.extend(head);
                plaintext.resize(PLAINTEXT, number as u8);
                peer.deliver_record(&plaintext);
            }
            peer.wait(Duration::from_micros(100));
            let kept = repair(&peer).kept();
            let (most, bytes) = (receiver::MAX_KEPT, receiver::MAX_BYTES);
            assert!(kept.0 <= most && kept.1 <= bytes, "{kept:?}");
            assert!(kept.2 <= 4 * 16 * PLAINTEXT, "{kept:?}");
        }
        let work = peer.take_work();
        let multiplied = repair(&peer).work();
        println!(
            "{records}, {lost}, {parities}: {multiplied} for {}",
            work.bytes_in
        );
        assert_eq!(multiplied > 0, parities >= lost);
        assert!(multiplied <= 16 * work.bytes_in as u64);
        peer.wait(Duration::from_secs(1));
        peer.assert_ledger_closes();
    }
}

/// Small parity records, each for a block that is lost as a whole.
#[test]
fn parity_behind_gaps_costs_few_visits_for_each_byte() {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.take_work();
    for _ in 0..100 {
        for _ in 0..parity::MAX_RECORDS {
            peer.seal(&[0; 3]);
        }
        peer.deliver_record(&[0, 0, 0, 8, 1, parity::MAX_RECORDS as u8, 0, 0]);
    }
    let work = peer.take_work();
    let visited = repair(&peer).visited();
    println!("{visited} visits for {}", work.bytes_in);
    assert!(repair(&peer).kept().0 > 900, "{:?}", repair(&peer).kept());
    assert!(visited <= 16 * work.bytes_in as u64, "{visited}");
}

/// One block that other parity claims again and again, each time with another record missing.
#[test]
fn blocks_that_overlap_are_not_multiplied() {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    for n in 0..100 {
        peer.deliver_record(&full(PLAINTEXT - parity::ROOM, |_| packet_frame(n)));
    }
    let mut solved = Vec::new();
    for _ in 0..20 {
        peer.seal(&[0; 3]);
        let mut plaintext = vec![0, 0, 0, 8, 1, 101];
        plaintext.resize(PLAINTEXT, 1);
        peer.deliver_record(&plaintext);
        solved.push(repair(&peer).work());
    }
    assert!(
        solved[0] > 0 && solved.iter().all(|work| *work == solved[0]),
        "{solved:?}"
    );
}

/// A peer with two segments that wait behind a lost record.
fn with_held_segments() -> Peer {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    peer.wait(Duration::from_millis(25));
    peer.seal(&[0; 3]);
    peer.take_work();
    let segments = crate::shapes::slice(1, 0, 512, 256, 512);
    peer.deliver_record(&[&[0; 3], &segments[..]].concat());
    assert_eq!(peer.take_work().packets, 0, "nothing is held");
    peer
}

/// Capabilities of the peer, with these features.
fn capabilities(features: u64) -> Vec<u8> {
    let offer = Capabilities {
        version: 1,
        ciphers: vec![Cipher::Aes256Gcm],
        max_lanes: 1,
        inner_mtu: 1420,
        features,
        mode: Mode::Ip,
    };
    offer.encode()
}

#[test]
fn held_segments_are_passed_on_when_a_new_session_does_not_repair() {
    let mut peer = with_held_segments();
    peer.renew(&capabilities(FEATURE_OFFLOAD));
    assert_eq!(peer.take_work().packets, 0, "the session is not confirmed");
    peer.deliver_record(&[0; 3]);
    assert_eq!(peer.take_work().packets, 2);
    let receiver = &peer.tunnel.peers().next().expect("one peer").repair;
    assert!(receiver.is_none(), "repair goes on");
    peer.assert_ledger_closes();
}

/// An initiation that was delayed, and whose session the peer no longer uses.
#[test]
fn a_session_that_is_not_confirmed_changes_no_capability() {
    let mut peer = Peer::new(Protocol::Native, Mode::Ip);
    peer.deliver_record(&[0; 3]);
    let agreed = |peer: &Peer| {
        let peer = peer.tunnel.peers().next().expect("one peer");
        (
            peer.capabilities.clone(),
            peer.repair.is_some(),
            peer.path.repair().state(Instant::BOOT),
        )
    };
    let before = agreed(&peer);
    assert!(before.1 && before.2 != State::Off);
    peer.wait(Duration::from_millis(25));
    let initiation = peer.initiate(&capabilities(0));
    peer.deliver_from(fuzz::SOURCE, initiation);
    peer.deliver_record(&[0; 3]);
    assert_eq!(agreed(&peer), before);
    peer.wait(Duration::from_millis(25));
    peer.renew(&capabilities(0));
    assert_eq!(agreed(&peer), before);
    peer.deliver_record(&[0; 3]);
    let (theirs, receives, sends) = agreed(&peer);
    assert_eq!(theirs.map(|theirs| theirs.features), Some(0));
    assert_eq!((receives, sends), (false, State::Off));
}

#[test]
fn held_segments_of_a_removed_peer_are_counted() {
    let mut peer = with_held_segments();
    let id = peer.tunnel.peers().next().expect("one peer").id;
    peer.tunnel.remove_peer(id);
    let drops = peer.tunnel.totals().inbound.drops;
    assert_eq!(drops.get(DropReason::PeerRemoved), 2);
    peer.assert_ledger_closes();
}

#[test]
fn a_tunnel_that_stands_by_keeps_no_packet() {
    let mut peer = with_held_segments();
    let fragment = crate::shapes::fragment(1, 0, 2000, 512);
    peer.deliver_record(&[&[0; 3], &fragment[..]].concat());
    // Packets wait for the validation of an address.
    let keepalive = peer.seal(&[0; 3]);
    peer.deliver_from(SocketAddr::from(([203, 0, 113, 5], 9)), keepalive);
    (0..3).for_each(|_| peer.read_from_device(1000));
    let pending = |peer: &Peer| {
        let totals = peer.tunnel.totals();
        (totals.inbound.pending, totals.outbound.pending)
    };
    assert_eq!(pending(&peer), (1, 3));
    peer.tunnel.stand_by();
    assert_eq!(pending(&peer), (0, 0));
    let totals = peer.tunnel.totals();
    let (inbound, outbound) = (totals.inbound.drops, totals.outbound.drops);
    assert_eq!(inbound.get(DropReason::Standby), 2 + 1);
    assert_eq!(outbound.get(DropReason::Standby), 3);
    peer.take_work();
    peer.wait(Duration::from_secs(200));
    assert_eq!(peer.take_work().packets, 0);
    peer.assert_ledger_closes();
}

fn repair(peer: &Peer) -> &receiver::Receiver {
    let repair = peer
        .tunnel
        .peers()
        .next()
        .expect("one peer")
        .repair
        .as_ref();
    repair.expect("both ends repair")
}

fn packet_frame(n: usize) -> Vec<u8> {
    frame(1, &crate::shapes::packet(40 + n))
}
