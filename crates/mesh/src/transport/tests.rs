//! Transports in a loop like the worker's.

use super::allocation::{self, At, By};
use super::*;
use crate::client;
use rustls::pki_types::ServerName;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::framing::Framing;
use seikan_proto::mesh::{RelayKind, RelaySecret, Ticket};
use seikan_sys::udp::{UdpOptions, UdpSocket};
use seikan_tls::Stream;
use std::io::Read as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

const RELAY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const PATIENCE: Duration = Duration::from_secs(10);

/// The worker's part, with the agent's ends of one transport.
struct Loop {
    transports: Transports,
    epoll: Epoll,
    batch: ReceiveBatch,
    handle: Option<Handle>,
    state: watch::Receiver<State>,
    _agent: UnixStream,
}

fn waker() -> (Waker, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    (Waker(Arc::new(theirs)), ours)
}

impl Loop {
    fn new(open: impl FnOnce(Waker) -> Opened) -> Loop {
        let (waker, agent) = waker();
        let opened = open(waker);
        let (mut transports, epoll) = (Transports::default(), Epoll::new(8).expect("epoll"));
        transports.add(*opened.transport, &epoll);
        Loop {
            transports,
            epoll,
            batch: ReceiveBatch::new(16, 1 << 16),
            handle: Some(opened.handle),
            state: opened.state,
            _agent: agent,
        }
    }

    /// A connection to a relay with these ports in use, and the relay's end.
    fn relay(ports: &[u16]) -> (Loop, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let server = listener.local_addr().expect("an address");
        let ours = TcpStream::connect(server).expect("connected");
        let theirs = listener.accept().expect("accepted").0;
        let stream = Stream::new(ours, None, Framing::Relay).expect("a stream");
        let mut looped = Loop::new(|waker| stream::open("north".into(), stream, RELAY, waker));
        looped.want(ports);
        (looped, theirs)
    }

    /// An allocation at a server.
    fn turn(link: Link, at: At) -> Loop {
        let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
        let ticket = Ticket::new(&secret, 1, &PublicKey::from_bytes([1; 32]), 7);
        let open = |waker| allocation::open("north".into(), link, at, &ticket, now(), waker);
        Loop::new(open)
    }

    fn want(&mut self, ports: &[u16]) {
        let handle = self.handle.as_ref().expect("it is in use");
        handle.set(Wanted {
            peers: ports.iter().map(|port| (RELAY, *port).into()).collect(),
            ..Wanted::default()
        });
        self.transports.woken();
        self.transports.poll(now());
    }

    fn local(&self, port: u16) -> SocketAddr {
        self.state.borrow().peers[&(RELAY, port).into()]
    }

    /// Runs the loop once; returns sources and contents of the datagrams for the tunnel.
    fn run_once(&mut self) -> Vec<(SocketAddr, Vec<u8>)> {
        let due = self.transports.wakeup().map(|at| at.duration_since(now()));
        let wait = due.unwrap_or(PATIENCE).min(Duration::from_millis(100));
        for event in self.epoll.wait(Some(wait)).expect("events") {
            assert!(Transports::owns(event.token));
            self.transports.ready(event.token);
        }
        let mut all = Vec::new();
        for token in self.transports.readable() {
            let mut arrived = Vec::new();
            self.transports
                .receive(token, now(), &mut self.batch, &mut arrived);
            let arena = self.batch.parts_mut().1;
            let bytes = |one: &Datagram| arena[one.range.clone()].to_vec();
            all.extend(arrived.iter().map(|one| (one.source, bytes(one))));
        }
        self.transports.poll(now());
        all
    }

    /// Runs the loop until this many datagrams have arrived.
    fn receive(&mut self, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
        let until = now() + PATIENCE;
        let mut all = Vec::new();
        while all.len() < count && now() < until {
            all.extend(self.run_once());
        }
        all
    }

    fn counters(&self) -> Counters {
        self.transports.iter().next().expect("one").counters()
    }

    /// Runs the loop until the transport has ended; returns why, and the time until then.
    fn ended(&mut self) -> (String, Duration) {
        let started_at = now();
        loop {
            if let Some(reason) = self.state.borrow().ended.clone() {
                return (reason, now().duration_since(started_at));
            }
            assert!(now() < started_at + PATIENCE * 2, "it goes on");
            self.run_once();
        }
    }
}

fn frame(port: u16, datagram: &[u8]) -> Vec<u8> {
    let length = (2 + datagram.len()) as u16;
    [&length.to_be_bytes(), &port.to_be_bytes(), datagram].concat()
}

#[test]
fn each_port_of_a_relay_has_an_address_in_both_directions() {
    let (mut looped, mut relay) = Loop::relay(&[0, 7]);
    let [main, pair] = [0, 7].map(|port| looped.local(port));
    assert!(seikan_proto::proxied::id(pair.ip()).is_some(), "{pair}");
    let target = ProxyTarget::Relay {
        relay: "north".into(),
        to: (RELAY, 7).into(),
    };
    assert_eq!(looped.transports.target(pair), Some(target));
    for (port, datagram) in [(7, &b"one"[..]), (0, b"two"), (8, b"not wanted"), (7, b"")] {
        relay.write_all(&frame(port, datagram)).expect("written");
    }
    let arrived = looped.receive(2);
    assert_eq!(arrived, [(pair, b"one".into()), (main, b"two".into())]);
    let until = now() + PATIENCE;
    while looped.counters().drops.get(DropReason::NoChannel) < 2 && now() < until {
        looped.run_once();
    }
    assert_eq!(looped.counters().drops.get(DropReason::NoChannel), 2);
    let sent = looped.transports.send(now(), pair, b"threefour!five", 5);
    sent.expect("sent");
    looped.transports.poll(now());
    let expected = [&b"three"[..], b"four!", b"five"].map(|part| frame(7, part));
    let mut got = vec![0; expected.concat().len()];
    relay.read_exact(&mut got).expect("read");
    assert_eq!(got, expected.concat());
    let counters = looped.counters();
    assert_eq!((counters.received, counters.sent), (2, 3));
    // The address of a port that is no longer in use leads nowhere.
    looped.want(&[0]);
    let sent = looped.transports.send(now(), pair, b"six", 3);
    assert_eq!(sent, Err(DropReason::SendRefused));
    assert_eq!(looped.state.borrow().peers.len(), 1);
}

#[test]
fn a_relay_that_does_not_read_causes_counted_drops_and_no_growth() {
    let (mut looped, mut relay) = Loop::relay(&[7]);
    let local = looped.local(7);
    let datagrams = vec![1; 1000 * 64];
    let mut given = 0;
    while looped.counters().drops.get(DropReason::SendNoBuffers) < 1000 {
        let sent = looped.transports.send(now(), local, &datagrams, 1000);
        sent.expect("sent");
        looped.transports.poll(now());
        given += 64;
    }
    let counters = looped.counters();
    let dropped = counters.drops.get(DropReason::SendNoBuffers);
    assert_eq!(counters.sent + dropped, given);
    // All that was not dropped arrives, once the relay reads.
    let reader = std::thread::spawn(move || {
        let mut all = vec![0; counters.sent as usize * 1004];
        relay.read_exact(&mut all).expect("read");
        relay
    });
    let until = now() + PATIENCE;
    while !reader.is_finished() && now() < until {
        looped.run_once();
    }
    reader.join().expect("all of it");
    let sent = looped.transports.send(now(), local, &datagrams, 1000);
    sent.expect("sent");
    let dropped_now = looped.counters().drops.get(DropReason::SendNoBuffers);
    assert_eq!(dropped_now, dropped);
}

#[test]
fn a_transport_ends_with_the_agents_handle() {
    let (mut looped, mut relay) = Loop::relay(&[0]);
    looped.handle.take();
    looped.transports.woken();
    looped.transports.poll(now());
    assert_eq!(looped.ended().0, "it is not needed");
    assert_eq!(looped.transports.iter().count(), 0);
    assert_eq!(relay.read(&mut [0; 9]).expect("the end"), 0);
}

#[test]
fn a_relay_that_closes_the_connection_ends_only_its_transport() {
    let (mut looped, relay) = Loop::relay(&[0]);
    let (other, _relay) = Loop::relay(&[0]);
    let Loop { transports, .. } = other;
    let other = transports.all.into_values().next().expect("one");
    looped.transports.add(other, &looped.epoll);
    drop(relay);
    looped.ended();
    assert_eq!(looped.transports.iter().count(), 1);
}

/// A protocol with an error.
#[derive(Debug)]
struct Faulty;

impl Server for Faulty {
    fn turn(&self) -> Option<&'static str> {
        None
    }

    fn poll(&mut self, _: &mut Core, now: Instant) -> Result<Instant, Ended> {
        Ok(now + LOOK_EVERY)
    }

    fn receive(&mut self, _: &mut Core, _: Instant, _: &mut Message<'_>) {
        panic!("an error of the library");
    }

    fn send(&mut self, _: &mut Core, _: Instant, _: SocketAddr, _: Chunks<'_, u8>) {
        panic!("an error of the library");
    }

    fn lost(&self, error: std::io::Error) -> Ended {
        Ended::Stream(error)
    }
}

/// A connection to a relay with an error in its protocol, and the relay's end.
fn faulty() -> (Loop, TcpStream) {
    let (mut looped, relay) = Loop::relay(&[0]);
    let all = std::mem::take(&mut looped.transports.all);
    let faulty = all.into_values().map(|transport| Transport {
        server: Box::new(Faulty),
        ..transport
    });
    looped.transports.all = (FIRST_TOKEN..).zip(faulty).collect();
    (looped, relay)
}

#[test]
fn datagrams_to_a_protocol_that_fails_are_not_counted_as_sent() {
    let (mut looped, _relay) = faulty();
    let to = looped.local(0);
    let sent = looped.transports.send(now(), to, b"one", 3);
    assert_eq!(sent, Err(DropReason::SendRefused));
    assert_eq!(looped.ended().0, "its protocol has failed");
}

#[test]
fn a_protocol_that_fails_ends_only_its_transport() {
    let (mut looped, mut relay) = faulty();
    relay.write_all(&frame(0, b"one")).expect("written");
    assert_eq!(looped.ended().0, "its protocol has failed");
}

#[test]
fn an_empty_datagram_of_a_server_is_counted() {
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let socket = UdpSocket::bind(any, &UdpOptions::default()).expect("bind");
    let to = socket.local_addr().expect("an address");
    let sender = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let server = sender.local_addr().expect("an address");
    let by = By::Udp;
    let mut looped = Loop::turn(Link::Udp { socket, server }, At { server, by });
    sender.send_to(&[], to).expect("sent");
    let until = now() + PATIENCE;
    while looped.counters().drops.get(DropReason::NoChannel) == 0 && now() < until {
        looped.run_once();
    }
    assert_eq!(looped.counters().drops.get(DropReason::NoChannel), 1);
}

#[test]
fn kernel_drops_of_the_servers_socket_are_counted() {
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let socket = UdpSocket::bind(any, &UdpOptions::default()).expect("bind");
    let to = socket.local_addr().expect("an address");
    let server = (Ipv4Addr::LOCALHOST, 9).into();
    let by = By::Udp;
    let mut looped = Loop::turn(Link::Udp { socket, server }, At { server, by });
    let sender = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    // More than the largest buffer can hold, with the kernel's overhead for each.
    for _ in 0..20_000 {
        sender.send_to(&[4; 1000], to).expect("sent");
    }
    let counted = |looped: &Loop| {
        let counters = looped.counters();
        [DropReason::UnknownSource, DropReason::ReceiveQueueFull].map(|why| counters.drops.get(why))
    };
    let until = now() + PATIENCE;
    while counted(&looped).iter().sum::<u64>() < 20_000 && now() < until {
        looped.run_once();
    }
    let [came, dropped] = counted(&looped);
    assert!(dropped > 0, "nothing overflowed");
    assert_eq!(came + dropped, 20_000);
}

/// Why an allocation over TLS ended, and the time until then.
fn ended_by_tls(server: SocketAddr) -> (String, Duration) {
    let config = client::tls(None, rustls::ALL_VERSIONS).expect("TLS");
    let name = ServerName::try_from("localhost").expect("a name");
    let tls = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    // The time allowed begins with the connection.
    let begun = std::time::Instant::now();
    let socket = TcpStream::connect(server).expect("connected");
    let stream = Stream::new(socket, Some(tls.into()), Framing::Turn).expect("a stream");
    let by = By::Tls;
    let (why, _) = Loop::turn(Link::Stream(stream), At { server, by }).ended();
    (why, begun.elapsed())
}

#[test]
fn a_server_has_four_seconds_for_tls_and_the_allocation_whatever_it_sends_meanwhile() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let server = listener.local_addr().expect("an address");
    let slowly = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("accepted");
        // RFC 8446, section 5.1: a record of 16 KiB that arrives byte by byte, until the client has left.
        let mut bytes = [22, 3, 3, 0x40, 0, 2].into_iter();
        while socket.write_all(&[bytes.next().unwrap_or(0)]).is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let (ended, took) = ended_by_tls(server);
    assert_eq!(ended, "no answer by TLS");
    let within = Duration::from_secs(4);
    assert!((within..within * 2).contains(&took), "{took:?}");
    slowly.join().expect("it has ended");
}

#[test]
fn a_server_without_tls_is_no_connection() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
    let server = listener.local_addr().expect("an address");
    let other = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("accepted");
        socket
            .write_all(b"220 mail.example.org\r\n")
            .expect("written");
        let _ = socket.read(&mut [0; 4096]);
    });
    let (ended, _) = ended_by_tls(server);
    assert!(ended.starts_with("cannot connect by TLS"), "{ended}");
    other.join().expect("it has ended");
}
