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
use seikan_proto::mode::Mode;
use seikan_proto::noise::Protocol;
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
    assert!((1..=3 * 35).contains(&peer.sent_to(new)));
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
