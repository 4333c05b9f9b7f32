//! Tests of the TLS port, with members and with unauthenticated clients.

use super::*;
use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use seikan_proto::mesh::Pin;
use seikan_proto::mesh::framing::{Framing, split_port};
use seikan_relay::TlsOptions;
use seikan_tls::{Certificate, Stream};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;

/// The TLS port of a relay.
#[derive(Clone, Copy)]
struct ByTls {
    at: SocketAddr,
    pin: Pin,
}

/// A relay that also listens for TLS.
fn by_tls(limits: Limits) -> (Site, ByTls) {
    let folder = tempfile::tempdir().expect("a folder");
    let own = Certificate::own(folder.path(), "a relay", &[]).expect("made");
    let relay = Relay::bind(Options {
        listen: "127.0.0.1:0".parse().expect("an address"),
        tls: Some(TlsOptions {
            listen: "127.0.0.1:0".parse().expect("an address"),
            config: own.server_config().expect("it can serve"),
        }),
        secret: secret("north"),
        limits,
    });
    let relay = relay.expect("a relay");
    let main = relay.addresses().expect("addresses")[0];
    let at = relay.tls_address().expect("an address");
    let tls = ByTls {
        at: at.expect("it is there"),
        pin: own.pin(),
    };
    let elapsed = Duration::ZERO;
    let site = Site {
        relay,
        main,
        elapsed,
    };
    (site, tls)
}

/// A client of the TLS port.
struct Caller {
    stream: Stream,
    ticket: Ticket,
    stamp: u64,
    rng: Counting,
    over: bool,
}

impl Caller {
    fn new(number: u8, relay: ByTls) -> Caller {
        let config = seikan_tls::pinned(relay.pin, &[&TLS13]).expect("a configuration");
        let name = ServerName::try_from("relay.example.org").expect("a name");
        let tls = ClientConnection::new(Arc::new(config), name).expect("a client");
        let socket = TcpStream::connect(relay.at).expect("connected");
        let stream = Stream::new(socket, Some(tls.into()), Framing::Relay);
        Caller {
            stream: stream.expect("a stream"),
            ticket: Ticket::new(
                &secret("north"),
                number.into(),
                &key(number),
                START + 86_400,
            ),
            stamp: 0,
            rng: Counting(number),
            over: false,
        }
    }

    fn send(&mut self, port: u16, datagram: &[u8]) {
        assert!(self.stream.push(&[&port.to_be_bytes(), datagram]));
        let _ = self.stream.flush();
    }

    /// Receives until `enough` datagrams have arrived, the connection has ended, or `timeout` has passed. Returns each with its
    /// port.
    fn receive(
        &mut self,
        site: &mut Site,
        enough: usize,
        timeout: Duration,
    ) -> Vec<(u16, Vec<u8>)> {
        let mut frames = Vec::new();
        let end = Wall::now() + timeout;
        while frames.len() < enough && Wall::now() < end && !self.over {
            site.poll();
            self.over = self.stream.receive().is_err();
            let _ = self.stream.flush();
            while let Some(frame) = self.stream.peek().expect("a frame") {
                let (port, datagram) = split_port(frame).expect("a port");
                frames.push((port, datagram.to_vec()));
                self.stream.take();
            }
        }
        frames
    }

    fn next(&mut self, site: &mut Site) -> (u16, Vec<u8>) {
        let mut frames = self.receive(site, 1, TIMEOUT);
        assert_eq!(frames.len(), 1, "frames");
        frames.remove(0)
    }

    fn is_over(&mut self, site: &mut Site) -> bool {
        let received = self.receive(site, 1, QUIET);
        assert!(received.is_empty(), "{received:?}");
        self.over
    }

    fn request(&mut self, site: &mut Site, peer: u8, port: u16) -> Result<Answer, Refused> {
        self.stamp += 1;
        let ask = ClientRequest {
            ticket: &self.ticket,
            peer: key(peer),
            stamp: self.stamp,
        };
        let (id, bytes) = ask.write(&mut self.rng);
        self.send(port, &bytes);
        let (from, answer) = self.next(site);
        assert_eq!(from, port);
        Answer::parse(&answer, id, &self.ticket.password)
    }

    /// As [`Host::bind`].
    fn bind(&mut self, site: &mut Site, peer: u8) -> (u16, bool) {
        let port = self.request(site, peer, 0).expect("a port").port;
        let port = port.expect("a port");
        let bound = self.request(site, peer, port).expect("bound");
        assert_eq!(bound.port, Some(port));
        (port, bound.present)
    }
}

#[test]
fn members_on_tls_and_udp_share_a_port() {
    let (mut site, tls) = by_tls(Limits::default());
    let (mut a, mut b) = (Caller::new(1, tls), Host::new(2));
    let (port, present) = a.bind(&mut site, 2);
    assert!(!present, "the other side is not bound yet");
    let (at, present) = b.bind(&mut site, 1);
    assert_eq!((at.port(), present), (port, true));
    let sent = datagrams(40, 1200, 300);
    b.send(at, &sent.concat(), Some(1200));
    let received = a.receive(&mut site, sent.len(), TIMEOUT);
    assert!(received.iter().all(|(from, _)| *from == port));
    let received: Vec<_> = received.into_iter().map(|(_, datagram)| datagram).collect();
    assert_eq!(received, sent);
    sent.iter().for_each(|datagram| a.send(port, datagram));
    let (received, receives) = b.receive(&mut site, sent.len(), TIMEOUT);
    assert_eq!(received, sent);
    assert!(
        receives < sent.len(),
        "a run is sent as one batch: {receives}"
    );
    let counters = site.counters();
    assert_eq!((counters.datagrams, counters.streams), (80, 1));
    assert_eq!(counters.bytes, 2 * (39 * 1200 + 300));
    assert_eq!((counters.drops.total(), counters.turned_away), (0, 0));
}

#[test]
fn a_burst_above_the_queue_limit_arrives_if_the_client_reads() {
    let (mut site, tls) = by_tls(Limits::default());
    let (mut a, mut b) = (Caller::new(1, tls), Host::new(2));
    a.bind(&mut site, 2);
    let (at, _) = b.bind(&mut site, 1);
    // 448,000 bytes; the queue holds 256 KiB.
    let sent = datagrams(40, 1400, 1400).concat();
    (0..8).for_each(|_| b.send(at, &sent, Some(1400)));
    assert_eq!(a.receive(&mut site, 8 * 40, TIMEOUT).len(), 8 * 40);
    assert_eq!(site.dropped(DropReason::SendNoBuffers), 0);
}

#[test]
fn one_connection_serves_several_pairs() {
    let (mut site, tls) = by_tls(Limits::default());
    let [mut a, mut b, mut c] = [1, 2, 3].map(|n| Caller::new(n, tls));
    let (ab, _) = a.bind(&mut site, 2);
    let (ac, _) = a.bind(&mut site, 3);
    assert_eq!(b.bind(&mut site, 1), (ab, true));
    assert_eq!(c.bind(&mut site, 1), (ac, true));
    assert_ne!(ab, ac);
    for (port, length) in [(ab, 100), (ac, 200), (ab, 300)] {
        a.send(port, &vec![4; length]);
    }
    let lengths = |frames: Vec<(u16, Vec<u8>)>| -> Vec<_> {
        let length = |(port, datagram): (u16, Vec<u8>)| (port, datagram.len());
        frames.into_iter().map(length).collect()
    };
    assert_eq!(
        lengths(b.receive(&mut site, 2, TIMEOUT)),
        [(ab, 100), (ab, 300)]
    );
    assert_eq!(lengths(c.receive(&mut site, 1, TIMEOUT)), [(ac, 200)]);
    b.send(ab, &[4; 60]);
    assert_eq!(a.next(&mut site), (ab, vec![4; 60]));
    // A port of another pair, and one without a pair.
    b.send(ac, &[4; 60]);
    b.send(7, &[4; 60]);
    assert_eq!(site.dropped(DropReason::UnknownSource), 2);
}

#[test]
fn each_datagram_of_a_run_to_the_main_port_is_counted() {
    let (mut site, tls) = by_tls(Limits::default());
    let mut a = Caller::new(1, tls);
    a.bind(&mut site, 2);
    (0..40).for_each(|_| a.send(0, &[4; 100]));
    let count = |site: &mut Site| site.dropped(DropReason::UnknownType);
    let end = Wall::now() + TIMEOUT;
    while count(&mut site) < 40 && Wall::now() < end {}
    assert_eq!(count(&mut site), 40);
    // The connection goes on.
    a.request(&mut site, 2, 0).expect("a port");
}

#[test]
fn a_member_that_changes_from_tls_to_udp_may_send_by_both() {
    let (mut site, tls) = by_tls(Limits::default());
    let (mut a, mut b) = (Caller::new(1, tls), Host::new(2));
    let (port, _) = a.bind(&mut site, 2);
    let (at, _) = b.bind(&mut site, 1);
    let mut over = Host::new(1);
    over.stamp = a.stamp;
    over.request(&mut site, 2, at).expect("bound");
    b.send(at, &[4; 100], None);
    assert_eq!(over.next(&mut site), [4; 100]);
    a.send(port, &[4; 60]);
    assert_eq!(b.next(&mut site), [4; 60]);
    over.send(at, &[4; 70], None);
    assert_eq!(b.next(&mut site), [4; 70]);
}

#[test]
fn the_end_of_a_connection_unbinds_its_sides() {
    let (mut site, tls) = by_tls(Limits::default());
    let (mut a, mut b) = (Caller::new(1, tls), Host::new(2));
    a.bind(&mut site, 2);
    let (at, _) = b.bind(&mut site, 1);
    drop(a);
    assert_eq!(site.counters().streams, 0);
    b.send(at, &[4; 100], None);
    assert_eq!(site.dropped(DropReason::NotBound), 1);
}

#[test]
fn an_unauthenticated_client_gets_the_reason_and_is_disconnected() {
    let (mut site, tls) = by_tls(Limits::default());
    let mut client = Caller::new(1, tls);
    client.ticket = Ticket::new(&secret("south"), 1, &key(1), START + 86_400);
    let refused = client.request(&mut site, 2, 0);
    assert_eq!(refused, Err(Refused::Refused(RelayRefusal::Unauthorized)));
    assert!(client.is_over(&mut site));
    // Anything but a request, or a frame larger than a request, ends the connection.
    for (port, length) in [(0, 100), (50_000, 100), (0, 20_000)] {
        let mut client = Caller::new(1, tls);
        client.send(port, &vec![4; length]);
        assert!(client.is_over(&mut site), "{port} {length}");
    }
    let counters = site.counters();
    assert_eq!((counters.turned_away, counters.streams), (4, 0));
    assert_eq!(counters.pairs, 0);
}

#[test]
fn a_client_without_a_valid_ticket_is_disconnected_after_five_seconds() {
    let (mut site, tls) = by_tls(Limits::default());
    let mut silent = TcpStream::connect(tls.at).expect("connected");
    let mut slow = Caller::new(1, tls);
    assert!(!slow.is_over(&mut site));
    for _ in 0..4 {
        site.advance(1);
        // A TLS record that is never complete.
        io::Write::write_all(&mut silent, &[22]).expect("written");
        assert!(!slow.is_over(&mut site));
    }
    site.advance(1);
    assert!(slow.is_over(&mut site));
    assert_eq!(site.counters().turned_away, 2);
}

#[test]
fn a_connection_ends_a_minute_after_its_last_request() {
    let (mut site, tls) = by_tls(Limits::default());
    let mut a = Caller::new(1, tls);
    let (port, _) = a.bind(&mut site, 2);
    for _ in 0..2 {
        site.advance(59);
        a.request(&mut site, 2, port).expect("bound");
    }
    site.advance(59);
    a.send(port, &[4; 100]);
    assert!(!a.is_over(&mut site));
    site.advance(1);
    assert!(a.is_over(&mut site));
}

#[test]
fn unauthenticated_connections_are_limited_to_a_quarter() {
    let of_eight = Limits {
        streams: 8,
        ..Limits::default()
    };
    let (mut site, tls) = by_tls(of_eight);
    let mut a = Caller::new(1, tls);
    a.bind(&mut site, 2);
    // A quarter of eight.
    let mut clients: Vec<_> = (0..3).map(|_| Caller::new(9, tls)).collect();
    let over = clients.iter_mut().map(|one| one.is_over(&mut site));
    assert_eq!(over.collect::<Vec<_>>(), [false, false, true]);
    clients.clear();
    assert_eq!(site.counters().turned_away, 3);
    // The rate limit of the source recovers.
    site.advance(1);
    Caller::new(2, tls).bind(&mut site, 1);
}

#[test]
fn the_rate_of_new_connections_from_one_source_is_limited() {
    let (mut site, tls) = by_tls(Limits::default());
    // WireGuard's limit for handshakes: a burst of five.
    let mut all: Vec<_> = (0..6).map(|_| Caller::new(1, tls)).collect();
    let over = all
        .iter_mut()
        .filter_map(|one| one.is_over(&mut site).then_some(()));
    assert_eq!(over.count(), 1);
}

#[test]
fn a_client_that_does_not_read_delays_no_other_pair() {
    let fast = Limits {
        rate: 1 << 40,
        ..Limits::default()
    };
    let (mut site, tls) = by_tls(fast);
    let (mut a, mut b, mut c) = (Caller::new(1, tls), Host::new(2), Host::new(3));
    a.bind(&mut site, 2);
    let (blocked, _) = b.bind(&mut site, 1);
    c.bind(&mut site, 2);
    let (reading, _) = b.bind(&mut site, 3);
    let sent = datagrams(40, 1400, 1400).concat();
    // More than the buffers of the kernel and of the relay hold.
    let mut count = 0;
    while site
        .relay
        .counters()
        .lock()
        .expect("counters")
        .drops
        .total()
        == 0
        && count < 1000
    {
        b.send(blocked, &sent, Some(1400));
        site.poll();
        count += 1;
    }
    let full = site.dropped(DropReason::SendNoBuffers);
    assert!(full > 0, "after {count}");
    b.send(reading, &[4; 100], None);
    assert_eq!(c.next(&mut site), [4; 100]);
    // The connection still works: the answer to a request follows the queued datagrams.
    let port = blocked.port();
    a.stamp += 1;
    let ask = ClientRequest {
        ticket: &a.ticket,
        peer: key(2),
        stamp: a.stamp,
    };
    let (id, bytes) = ask.write(&mut a.rng);
    a.send(port, &bytes);
    let answered = |(from, bytes): &(u16, Vec<u8>)| {
        *from == port && Answer::parse(bytes, id, &a.ticket.password).is_ok()
    };
    let mut received = Vec::new();
    let until = Wall::now() + TIMEOUT;
    let mut reader = a.stream;
    while !received.iter().any(answered) && Wall::now() < until {
        site.poll();
        let _ = reader.receive();
        while let Some(frame) = reader.peek().expect("a frame") {
            let (port, datagram) = split_port(frame).expect("a port");
            received.push((port, datagram.to_vec()));
            reader.take();
        }
    }
    assert!(received.iter().any(answered));
}

#[test]
fn the_rate_limit_applies_to_tls() {
    let slow = Limits {
        rate: 100_000,
        ..Limits::default()
    };
    let (mut site, tls) = by_tls(slow);
    let (mut a, mut b) = (Caller::new(1, tls), Host::new(2));
    let (port, _) = a.bind(&mut site, 2);
    b.bind(&mut site, 1);
    // The burst of a quarter of a second is 25,000 bytes.
    (0..40).for_each(|_| a.send(port, &[4; 1000]));
    let received = b.receive(&mut site, 40, QUIET * 4).0;
    assert_eq!(received.len(), 25);
    assert_eq!(site.dropped(DropReason::OverRate), 15);
}
