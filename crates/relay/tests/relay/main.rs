//! Tests of a relay from the side of its members: over loopback, without privileges, with a simulated clock.

mod streams;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant as Wall};

use seikan_observe::DropReason;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::relay::{Answer, ClientRequest, RelayError as Refused, RelayRefusal};
use seikan_proto::mesh::{RelayKind, RelaySecret, Ticket};
use seikan_proto::rng::Rng;
use seikan_proto::time::Instant;
use seikan_relay::{Counters, Limits, Now, Options, Relay};
use seikan_sys::udp::{ReceiveBatch, Transmit, UdpOptions, UdpSocket};

/// Start of the simulated clock, in seconds since the Unix epoch.
const START: u64 = 1_800_000_000;
/// Time limit for an expected datagram.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time to wait for a datagram that must not arrive.
const QUIET: Duration = Duration::from_millis(50);

struct Counting(u8);

impl Rng for Counting {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0 += 1;
        destination.fill(self.0);
    }
}

fn key(n: u8) -> PublicKey {
    PublicKey::from_bytes([n; 32])
}

fn secret(text: &str) -> RelaySecret {
    RelaySecret::parse(text, RelayKind::Turn).expect("a secret")
}

/// A relay and its simulated clock.
struct Site {
    relay: Relay,
    main: SocketAddr,
    elapsed: Duration,
}

impl Site {
    fn new(limits: Limits) -> Site {
        Site::at("127.0.0.1:0", limits)
    }

    fn at(listen: &str, limits: Limits) -> Site {
        let relay = Relay::bind(Options {
            listen: listen.parse().expect("an address"),
            tls: None,
            secret: secret("north"),
            limits,
        });
        let relay = relay.expect("a relay");
        let main = relay.addresses().expect("addresses")[0];
        Site {
            relay,
            main,
            elapsed: Duration::ZERO,
        }
    }

    fn poll(&mut self) {
        let now = Now {
            mono: Instant::BOOT + Duration::from_secs(100) + self.elapsed,
            unix: START + self.elapsed.as_secs(),
        };
        self.relay
            .poll(Duration::from_millis(1), || now)
            .expect("a poll");
    }

    fn counters(&mut self) -> Counters {
        // Datagrams in flight are handled first.
        let end = Wall::now() + QUIET;
        while Wall::now() < end {
            self.poll();
        }
        self.relay.counters().lock().expect("counters").clone()
    }

    /// Advances the clock.
    fn advance(&mut self, seconds: u64) {
        self.elapsed += Duration::from_secs(seconds);
        self.poll();
    }

    fn refused(&mut self, refusal: RelayRefusal) -> u64 {
        let refused = self.counters();
        let refused = refused.refused().find(|(of, _)| *of == refusal);
        refused.expect("a refusal of a relay").1
    }

    fn dropped(&mut self, reason: DropReason) -> u64 {
        self.counters().drops.get(reason)
    }
}

/// A host with a UDP socket and a ticket.
struct Host {
    socket: UdpSocket,
    batch: ReceiveBatch,
    ticket: Ticket,
    stamp: u64,
    rng: Counting,
    /// Source of the last datagram.
    last_source: Option<SocketAddr>,
}

impl Host {
    fn new(number: u8) -> Host {
        Host::at(number, "127.0.0.1")
    }

    fn at(number: u8, address: &str) -> Host {
        let address: IpAddr = address.parse().expect("an address");
        let socket = UdpSocket::bind((address, 0).into(), &UdpOptions::default());
        Host {
            socket: socket.expect("a socket"),
            batch: ReceiveBatch::new(64, 65_536),
            ticket: Ticket::new(
                &secret("north"),
                number.into(),
                &key(number),
                START + 86_400,
            ),
            stamp: 0,
            rng: Counting(number),
            last_source: None,
        }
    }

    fn address(&self) -> SocketAddr {
        self.socket.local_addr().expect("an address")
    }

    fn send(&self, to: SocketAddr, bytes: &[u8], segment_size: Option<u16>) {
        let sent = self.socket.send(&Transmit {
            destination: to,
            source: None,
            traffic_class: 0,
            hop_limit: None,
            segment_size,
            payload: bytes,
        });
        sent.expect("sent");
    }

    /// Receives until `enough` datagrams have arrived or `timeout` has passed. Returns the datagrams, and the number of buffers
    /// that they filled.
    fn receive(
        &mut self,
        site: &mut Site,
        enough: usize,
        timeout: Duration,
    ) -> (Vec<Vec<u8>>, usize) {
        let (mut datagrams, mut receives) = (Vec::new(), 0);
        let end = Wall::now() + timeout;
        while datagrams.len() < enough && Wall::now() < end {
            site.poll();
            let Ok(filled) = self.socket.receive(&mut self.batch) else {
                continue;
            };
            receives += filled;
            let (metas, arena) = self.batch.parts_mut();
            self.last_source = metas.last().map(|meta| meta.source);
            let segments = metas.iter().flat_map(|meta| meta.segments());
            datagrams.extend(segments.map(|segment| arena[segment].to_vec()));
        }
        (datagrams, receives)
    }

    /// Returns the next datagram.
    fn next(&mut self, site: &mut Site) -> Vec<u8> {
        let mut datagrams = self.receive(site, 1, TIMEOUT).0;
        assert_eq!(datagrams.len(), 1, "datagrams");
        datagrams.remove(0)
    }

    fn receives_nothing(&mut self, site: &mut Site) {
        let received = self.receive(site, 1, QUIET).0;
        assert!(received.is_empty(), "{received:?}");
    }

    /// Requests a port with `peer`, or binds to it.
    fn request(&mut self, site: &mut Site, peer: u8, to: SocketAddr) -> Result<Answer, Refused> {
        self.stamp += 1;
        let ask = ClientRequest {
            ticket: &self.ticket,
            peer: key(peer),
            stamp: self.stamp,
        };
        let (id, bytes) = ask.write(&mut self.rng);
        self.send(to, &bytes, None);
        let answer = self.next(site);
        assert!(answer.len() < bytes.len());
        Answer::parse(&answer, id, &self.ticket.password)
    }

    /// Requests a port with `peer` and binds to it. Returns its address, and whether the peer is bound.
    fn bind(&mut self, site: &mut Site, peer: u8) -> (SocketAddr, bool) {
        let main = match self.address() {
            SocketAddr::V4(_) => SocketAddr::from(([127, 0, 0, 1], site.main.port())),
            SocketAddr::V6(_) => SocketAddr::from((
                "::1".parse::<IpAddr>().expect("an address"),
                site.main.port(),
            )),
        };
        let port = self.request(site, peer, main).expect("a port").port;
        let port = SocketAddr::new(main.ip(), port.expect("a port"));
        let bound = self.request(site, peer, port).expect("bound");
        assert_eq!(
            (bound.port, bound.mapped),
            (Some(port.port()), self.address())
        );
        (port, bound.present)
    }
}

/// Two members that are bound to a port, and the address of the port.
fn two(site: &mut Site) -> (Host, Host, SocketAddr) {
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    let (port, present) = a.bind(site, 2);
    assert!(!present, "the other side is not bound yet");
    assert_eq!(b.bind(site, 1), (port, true));
    (a, b, port)
}

/// Datagrams of a tunnel: each begins with the message type, and all differ.
fn datagrams(count: usize, length: usize, last: usize) -> Vec<Vec<u8>> {
    let one = |n: usize| {
        let length = if n + 1 == count { last } else { length };
        let mut bytes: Vec<u8> = (0..length).map(|at| (at * 7 + n) as u8).collect();
        bytes[..4].copy_from_slice(&[0x14, 0, 0, n as u8]);
        bytes
    };
    (0..count).map(one).collect()
}

#[test]
fn batches_are_forwarded_unchanged_in_both_directions() {
    let mut site = Site::new(Limits::default());
    let (mut a, mut b, port) = two(&mut site);
    let sent = datagrams(40, 1200, 300);
    for _ in 0..2 {
        a.send(port, &sent.concat(), Some(1200));
        let (received, receives) = b.receive(&mut site, sent.len(), TIMEOUT);
        assert_eq!(received, sent);
        if b.socket.gso() && b.socket.capabilities().gro.is_present() {
            assert_eq!(receives, 1, "forwarded as one batch");
        }
        std::mem::swap(&mut a, &mut b);
    }
    let counters = site.counters();
    assert_eq!(counters.datagrams, 80);
    assert_eq!(counters.bytes, 2 * (39 * 1200 + 300));
    assert_eq!((counters.pairs, counters.members), (1, 2));
    assert_eq!(counters.drops.total(), 0);
}

#[test]
fn members_of_different_families_reach_each_other() {
    let mut site = Site::at("[::]:0", Limits::default());
    let (mut a, mut b) = (Host::new(1), Host::at(2, "::1"));
    let (of_a, _) = a.bind(&mut site, 2);
    let (of_b, present) = b.bind(&mut site, 1);
    assert!(present);
    assert_eq!(of_a.port(), of_b.port());
    a.send(of_a, &[4; 100], None);
    assert_eq!(b.next(&mut site), [4; 100]);
    b.send(of_b, &[4; 50], None);
    assert_eq!(a.next(&mut site), [4; 50]);
}

#[test]
fn datagrams_from_unknown_sources_are_dropped_and_counted() {
    let mut site = Site::new(Limits::default());
    let (mut a, mut b, port) = two(&mut site);
    let outsider = Host::new(3);
    outsider.send(port, &datagrams(5, 100, 100).concat(), Some(100));
    a.receives_nothing(&mut site);
    b.receives_nothing(&mut site);
    assert_eq!(site.dropped(DropReason::UnknownSource), 5);
    // The main port forwards nothing.
    a.send(site.main, &[4; 100], None);
    assert_eq!(site.dropped(DropReason::UnknownType), 1);
    a.receives_nothing(&mut site);
}

#[test]
fn datagrams_to_an_unbound_side_are_counted() {
    let mut site = Site::new(Limits::default());
    let mut a = Host::new(1);
    let (port, _) = a.bind(&mut site, 2);
    a.send(port, &[4; 100], None);
    assert_eq!(site.dropped(DropReason::NotBound), 1);
}

#[test]
fn a_new_binding_replaces_the_old_one() {
    let mut site = Site::new(Limits::default());
    let (a, mut b, port) = two(&mut site);
    let mut moved = Host::new(1);
    moved.stamp = a.stamp;
    moved.request(&mut site, 2, port).expect("bound");
    b.send(port, &[4; 100], None);
    assert_eq!(moved.next(&mut site), [4; 100]);
    a.send(port, &[4; 100], None);
    assert_eq!(site.dropped(DropReason::UnknownSource), 1);
    moved.send(port, &[4; 60], None);
    assert_eq!(b.next(&mut site), [4; 60]);
}

#[test]
fn a_replayed_request_changes_no_binding() {
    let mut site = Site::new(Limits::default());
    let (mut a, b, port) = two(&mut site);
    let ask = ClientRequest {
        ticket: &a.ticket,
        peer: key(2),
        stamp: a.stamp + 1,
    };
    let (id, bytes) = ask.write(&mut a.rng);
    a.send(port, &bytes, None);
    Answer::parse(&a.next(&mut site), id, &a.ticket.password).expect("bound");
    // Repeated from the same address, as when an answer was lost.
    a.send(port, &bytes, None);
    Answer::parse(&a.next(&mut site), id, &a.ticket.password).expect("still bound");
    let mut copier = Host::new(1);
    copier.send(port, &bytes, None);
    let answer = Answer::parse(&copier.next(&mut site), id, &a.ticket.password);
    assert_eq!(answer, Err(Refused::Refused(RelayRefusal::Stale)));
    b.send(port, &[4; 100], None);
    assert_eq!(a.next(&mut site), [4; 100]);
    copier.receives_nothing(&mut site);
}

#[test]
fn a_request_between_datagrams_is_answered_and_the_datagrams_are_forwarded() {
    let mut site = Site::new(Limits::default());
    let (mut a, mut b, port) = two(&mut site);
    let ask = ClientRequest {
        ticket: &a.ticket,
        peer: key(2),
        stamp: a.stamp + 1,
    };
    let (id, request) = ask.write(&mut a.rng);
    // All have the same length, so that GRO joins them.
    let data = datagrams(4, request.len(), request.len());
    let sent = [&data[0], &data[1], &request, &data[2], &data[3]].map(|d| d.as_slice());
    a.send(port, &sent.concat(), Some(request.len() as u16));
    assert_eq!(b.receive(&mut site, 4, TIMEOUT).0, data);
    let answer = Answer::parse(&a.next(&mut site), id, &a.ticket.password);
    assert!(answer.expect("bound").present);
    b.receives_nothing(&mut site);
}

#[test]
fn an_invalid_ticket_gets_no_port() {
    let mut site = Site::new(Limits::default());
    let main = site.main;
    let unauthorized = Err(Refused::Refused(RelayRefusal::Unauthorized));
    let mut expired = Host::new(1);
    expired.ticket = Ticket::new(&secret("north"), 1, &key(1), START);
    assert_eq!(expired.request(&mut site, 2, main), unauthorized);
    let mut wrong = Host::new(1);
    wrong.ticket = Ticket::new(&secret("south"), 1, &key(1), START + 86_400);
    assert_eq!(wrong.request(&mut site, 2, main), unauthorized);
    assert_eq!(site.refused(RelayRefusal::Unauthorized), 2);
    assert_eq!(site.counters().pairs, 0);
    // A request that is shorter than a refusal gets none: an empty SEIKAN-PEER (0xC5E1), and nothing else.
    let tiny = [
        &[0, 1, 0, 4, 0x21, 0x12, 0xa4, 0x42][..],
        &[0; 12],
        &[0xc5, 0xe1, 0, 0],
    ]
    .concat();
    wrong.send(main, &tiny, None);
    wrong.receives_nothing(&mut site);
    assert_eq!(site.refused(RelayRefusal::Unauthorized), 3);
    // A ticket that expires while it is in use.
    let mut short = Host::new(1);
    short.ticket = Ticket::new(&secret("north"), 1, &key(1), START + 1);
    let (port, _) = short.bind(&mut site, 2);
    site.advance(1);
    assert_eq!(short.request(&mut site, 2, port), unauthorized);
}

#[test]
fn a_member_cannot_bind_to_the_port_of_another_pair() {
    let mut site = Site::new(Limits::default());
    let (a, mut b, port) = two(&mut site);
    let mut third = Host::new(3);
    let refused = third.request(&mut site, 1, port);
    assert_eq!(refused, Err(Refused::Refused(RelayRefusal::Malformed)));
    a.send(port, &[4; 100], None);
    assert_eq!(b.next(&mut site), [4; 100]);
    third.receives_nothing(&mut site);
}

#[test]
fn the_quota_counts_only_pairs_that_the_member_requested() {
    let mut site = Site::new(Limits {
        pairs_per_member: 2,
        ..Limits::default()
    });
    let main = site.main;
    // Requests of two others for a port with the first do not count against it.
    for other in [2, 3] {
        Host::new(other)
            .request(&mut site, 1, main)
            .expect("a port");
    }
    let mut a = Host::new(1);
    for peer in [2, 4, 4] {
        a.request(&mut site, peer, main).expect("a port");
    }
    let quota = Err(Refused::Refused(RelayRefusal::Quota));
    assert_eq!(a.request(&mut site, 5, main), quota);
    // One of the two is in use. The other, which nobody is bound to, expires after a minute.
    a.bind(&mut site, 2);
    site.advance(59);
    a.bind(&mut site, 2);
    site.advance(1);
    assert_eq!(site.counters().pairs, 1);
    a.request(&mut site, 5, main).expect("a port");
    assert_eq!(a.request(&mut site, 6, main), quota);
}

/// Tickets outlive a rotation of keys, so tickets for former keys are valid too.
#[test]
fn all_keys_of_a_member_share_one_quota() {
    let mut site = Site::new(Limits {
        pairs: 8,
        pairs_per_member: 2,
        ..Limits::default()
    });
    let main = site.main;
    let mut granted = Vec::new();
    for rotation in 0..8 {
        let mut a = Host::new(100 + rotation);
        a.ticket = Ticket::new(&secret("north"), 1, &key(100 + rotation), START + 86_400);
        for peer in [2, 3] {
            granted.push(a.request(&mut site, peer, main).is_ok());
        }
    }
    assert_eq!(granted.iter().filter(|granted| **granted).count(), 2);
    assert_eq!((site.counters().pairs, site.counters().members), (2, 1));
    // The remaining pairs are for others.
    Host::new(2).request(&mut site, 4, main).expect("a port");
    // An expired pair no longer counts.
    site.advance(61);
    assert_eq!((site.counters().pairs, site.counters().members), (0, 0));
    let mut a = Host::new(1);
    for peer in [2, 3] {
        a.request(&mut site, peer, main).expect("a port");
    }
}

#[test]
fn a_relay_sends_from_the_address_that_the_side_used() {
    let mut site = Site::at("0.0.0.0:0", Limits::default());
    let (mut a, mut b) = (Host::new(1), Host::new(2));
    b.bind(&mut site, 1);
    let second = SocketAddr::from(([127, 0, 0, 2], site.main.port()));
    let port = a.request(&mut site, 2, second).expect("a port").port;
    assert_eq!(a.last_source, Some(second));
    let known = SocketAddr::new(second.ip(), port.expect("a port"));
    a.request(&mut site, 2, known).expect("bound");
    assert_eq!(a.last_source, Some(known));
    let (as_b_knows, _) = b.bind(&mut site, 1);
    b.send(as_b_knows, &[4; 100], None);
    a.next(&mut site);
    assert_eq!(a.last_source, Some(known));
}

#[test]
fn the_number_of_pairs_is_limited_by_the_option_and_by_ports() {
    let of_pairs = Limits {
        pairs: 1,
        ..Limits::default()
    };
    // A port that was free just now.
    let free = Host::new(9).address().port();
    let of_ports = Limits {
        ports: free..=free,
        ..Limits::default()
    };
    for limits in [of_pairs, of_ports] {
        let mut site = Site::new(limits);
        let main = site.main;
        let mut a = Host::new(1);
        let port = a.request(&mut site, 2, main).expect("a port").port;
        let full = Err(Refused::Refused(RelayRefusal::Full));
        assert_eq!(a.request(&mut site, 3, main), full);
        // The other side of the existing pair.
        let other = Host::new(2).request(&mut site, 1, main).expect("a port");
        assert_eq!(other.port, port);
        assert_eq!(site.refused(RelayRefusal::Full), 1);
    }
}

#[test]
fn a_binding_expires_after_a_minute() {
    let mut site = Site::new(Limits::default());
    let (mut a, mut b, port) = two(&mut site);
    for _ in 0..3 {
        site.advance(59);
        let answer = a.request(&mut site, 2, port).expect("bound");
        assert_eq!(answer.port, Some(port.port()));
    }
    a.send(port, &[4; 100], None);
    b.receives_nothing(&mut site);
    assert_eq!(site.dropped(DropReason::NotBound), 1);
    // The side binds itself again.
    b.request(&mut site, 1, port).expect("bound");
    a.send(port, &[4; 100], None);
    assert_eq!(b.next(&mut site), [4; 100]);
    site.advance(60);
    let counters = site.counters();
    assert_eq!((counters.pairs, counters.members), (0, 0));
    a.send(port, &[4; 100], None);
    b.receives_nothing(&mut site);
}

#[test]
fn a_member_sends_no_more_than_its_rate() {
    let mut site = Site::new(Limits {
        rate: 100_000,
        ..Limits::default()
    });
    let (a, mut b, port) = two(&mut site);
    // The burst of a quarter of a second is 25,000 bytes.
    a.send(port, &datagrams(40, 1000, 1000).concat(), Some(1000));
    assert_eq!(b.receive(&mut site, 40, QUIET).0.len(), 25);
    assert_eq!(site.dropped(DropReason::OverRate), 15);
    // The other side has a rate of its own.
    b.send(port, &[4; 1000], None);
    site.advance(1);
    a.send(port, &[4; 1000], None);
    assert_eq!(b.next(&mut site), [4; 1000]);
    assert_eq!(site.dropped(DropReason::OverRate), 15);
}

#[test]
fn only_the_main_port_answers_ordinary_stun_requests() {
    let mut site = Site::new(Limits::default());
    let (mut a, _, port) = two(&mut site);
    // RFC 8489, section 5: an ordinary binding request; the transaction is all zeros.
    let request = [&[0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42][..], &[0; 12]].concat();
    a.send(site.main, &request, None);
    let answer = Answer::parse(&a.next(&mut site), 0.into(), &a.ticket.password);
    assert_eq!(answer, Ok(Answer::address(a.address())));
    a.send(port, &request, None);
    a.receives_nothing(&mut site);
    assert_eq!(site.dropped(DropReason::UnknownType), 1);
}
