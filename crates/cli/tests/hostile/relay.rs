//! Malicious members and unknown hosts at a relay: the program on loopback.
//!
//! The cost of a message is compared with that of the cheapest message of the same length, in the
//! same run.

use super::coordinator::{Coordinator, Member};
use super::service::{WORTH, addresses, busy, connect, seconds, start};
use crate::common::{PATIENCE, Tunnel};
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection};
use seikan_mesh::client::wait_for;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::framing::{Framing, MAIN_PORT, split_port};
use seikan_proto::mesh::relay::{Answer, ClientRequest, RelayError, RelayRefusal};
use seikan_proto::mesh::{Cursor, RelayKind, RelaySecret, Ticket};
use seikan_proto::rng::Rng;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of bytes that never repeat.
struct Counting(u64);

impl Rng for Counting {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0 += 1;
        destination.fill(self.0 as u8);
        let bytes = self.0.to_be_bytes();
        let length = destination.len().min(bytes.len());
        destination[..length].copy_from_slice(&bytes[8 - length..]);
    }
}

struct Relay {
    tunnel: Tunnel,
    main: SocketAddr,
    tls: Option<(SocketAddr, Arc<ClientConfig>)>,
    secret: RelaySecret,
    _folder: tempfile::TempDir,
}

impl Relay {
    fn start(more: &[&str]) -> Relay {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().to_str().expect("UTF-8").to_owned();
        let words = ["relay", "--dir", &dir, "--listen", "127.0.0.1:0"];
        let (tunnel, line) = start(&[&words[..], more].concat());
        let at = addresses(&line);
        let secret = fs::read_to_string(folder.path().join("secret")).expect("a secret");
        let tls = more.contains(&"--tls-listen").then(|| {
            let noted = fs::read_to_string(folder.path().join("tls")).expect("a note");
            let (_, pin) = noted.trim().split_once(' ').expect("port and pin");
            let pin = pin.parse().expect("a pin");
            let tls = seikan_tls::pinned(pin, &[&TLS13]).expect("a configuration");
            (at[1], Arc::new(tls))
        });
        Relay {
            main: at[0],
            tls,
            secret: RelaySecret::parse(secret.trim(), RelayKind::Seikan).expect("a secret"),
            _folder: folder,
            tunnel,
        }
    }

    fn ticket(&self, number: u64) -> Ticket {
        Ticket::new(&self.secret, number, &key(number), seconds() + 3600)
    }
}

fn key(number: u64) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    PublicKey::from_bytes(bytes)
}

/// A client with a socket, with or without a ticket.
struct Asker {
    socket: UdpSocket,
    rng: Counting,
}

impl Asker {
    fn new() -> Asker {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let patience = Some(Duration::from_secs(10));
        socket.set_read_timeout(patience).expect("set");
        Asker {
            socket,
            rng: Counting(1),
        }
    }

    fn ask(&mut self, to: SocketAddr, ticket: &Ticket, peer: PublicKey) -> Result<u16, RelayError> {
        let stamp = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock");
        let stamp = stamp.as_nanos() as u64;
        let ask = ClientRequest {
            ticket,
            peer,
            stamp,
        };
        let (id, bytes) = ask.write(&mut self.rng);
        self.socket.send_to(&bytes, to).expect("sent");
        let mut answer = [0; 1500];
        let length = self.socket.recv(&mut answer).expect("an answer");
        let answer = Answer::parse(&answer[..length], id, &ticket.password)?;
        Ok(answer.port.expect("a port"))
    }
}

#[test]
fn a_member_that_changes_its_key_again_and_again_has_one_share_of_a_relay() {
    let relay = Relay::start(&["--pairs", "20", "--pairs-per-member", "4"]);
    let coordinator = Coordinator::start(0);
    let at = relay.main.to_string();
    let secret = relay.secret.reveal().to_owned();
    coordinator.administer(&["relay", "add", &at, "--secret", &secret]);
    let [bad, good] = ["bad", "good"].map(|name| coordinator.member(name));
    let ticket = |member: &Member| {
        let changes = wait_for(member.client.changes(Cursor::default(), Duration::ZERO));
        changes.expect("an answer").relays[0].ticket.clone()
    };
    let mut asker = Asker::new();
    let (mut granted, mut refused) = (0, 0);
    for rotation in 0..10 {
        let ticket = ticket(&bad);
        for peer in 0..8 {
            match asker.ask(relay.main, &ticket, key(1000 + 8 * rotation + peer)) {
                Ok(_) => granted += 1,
                Err(RelayError::Refused(RelayRefusal::Quota)) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        let key = PrivateKey::generate(&mut SystemRandom).public();
        wait_for(bad.client.rotate(key)).expect("another key");
    }
    assert_eq!((granted, refused), (4, 76));
    let own = ticket(&good);
    for peer in 0..4 {
        let port = Asker::new().ask(relay.main, &own, key(2000 + peer));
        port.expect("another member's share");
    }
}

/// The baseline of all comparisons.
const SENT_ON: &str = "sent on";

/// Repeats a datagram `rate` times a second.
fn shoot(socket: &UdpSocket, to: SocketAddr, datagram: &[u8], count: u32, rate: u32) {
    let started_at = Instant::now();
    for n in 0..count {
        if n % 16 == 0 {
            let due = Duration::from_secs(1) * n / rate;
            thread::sleep(due.saturating_sub(started_at.elapsed()));
        }
        // An error is of an earlier datagram.
        let _ = socket.send_to(datagram, to);
    }
}

#[test]
fn no_datagram_costs_a_relay_more_than_its_bytes_are_worth() {
    const COUNT: u32 = 8_000;
    const RATE: u32 = 16_000;
    let relay = Relay::start(&["--pairs-per-member", "4"]);
    let (a, b) = (relay.ticket(1), relay.ticket(2));
    let (mut one, mut other, stranger) = (Asker::new(), Asker::new(), Asker::new().socket);
    let port = one.ask(relay.main, &a, key(2)).expect("a port");
    let pair = SocketAddr::new(relay.main.ip(), port);
    one.ask(pair, &a, key(2)).expect("bound");
    other.ask(relay.main, &b, key(1)).expect("a port");
    other.ask(pair, &b, key(1)).expect("bound");
    for peer in 3..6 {
        one.ask(relay.main, &a, key(peer)).expect("a port");
    }
    let mut ask = |ticket: &Ticket, peer: u64| {
        let ask = ClientRequest {
            ticket,
            peer: key(peer),
            stamp: 1,
        };
        ask.write(&mut one.rng).1
    };
    let foreign = RelaySecret::generate(&mut SystemRandom);
    let foreign = Ticket::new(&foreign, 1, &key(1), seconds() + 3600);
    let expired = Ticket::new(&relay.secret, 1, &key(1), 1);
    let requests = [
        ("a ticket that is none", ask(&foreign, 2)),
        ("a ticket that has expired", ask(&expired, 2)),
        ("a port that it has", ask(&a, 2)),
        ("a port beyond its share", ask(&a, 100)),
    ];
    let length = requests[0].1.len();
    let mut binding = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
    binding.extend([9; 12]);
    let own = one.socket;
    let mut kinds = Vec::new();
    for size in [length, 100, 1400] {
        let fill = vec![0xee; size];
        let mut push =
            |name: &str, socket, to, bytes| kinds.push((size, name.to_owned(), socket, to, bytes));
        push(SENT_ON, &own, pair, fill.clone());
        push("no request", &stranger, relay.main, fill.clone());
        push("a stranger's at a pair's port", &stranger, pair, fill);
        // SOFTWARE (RFC 8489, section 14.14) as padding.
        let mut request = binding.clone();
        request[3] = (size - 20) as u8;
        request[2] = ((size - 20) >> 8) as u8;
        let text = size - 24;
        request.extend([0x80, 0x22, (text >> 8) as u8, text as u8]);
        request.resize(size, b'x');
        push("a request for its address", &stranger, relay.main, request);
    }
    for (name, request) in requests {
        for (to, at) in [(relay.main, "main"), (pair, "pair's")] {
            let name = format!("{name}, at the {at} port");
            kinds.push((request.len(), name, &own, to, request.clone()));
        }
    }
    let pid = relay.tunnel.child.id();
    let mut bases: Vec<(usize, f64)> = Vec::new();
    let mut dear = Vec::new();
    for (size, name, socket, to, bytes) in &kinds {
        let measured = || {
            let before = busy(pid);
            shoot(socket, *to, bytes, COUNT, RATE);
            thread::sleep(Duration::from_millis(50));
            (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(COUNT)
        };
        let mut each = measured();
        if *name == SENT_ON {
            each = each.min(measured());
            bases.push((*size, each));
        }
        // Two tickets may differ in length by some bytes.
        let base = bases.iter().min_by_key(|(of, _)| of.abs_diff(*size));
        let base = base.expect("it comes first").1;
        // The minimum of several measurements: other load on the machine adds to each.
        for _ in 0..3 {
            if each >= WORTH * base {
                each = each.min(measured());
            }
        }
        let ratio = each / base;
        println!("{each:6.2} µs  {ratio:4.1}  {name}, {size} bytes");
        if ratio >= WORTH {
            dear.push(format!("{name}, {size} bytes: {ratio:.1}"));
        }
    }
    assert!(dear.is_empty(), "{dear:?}");
}

/// A ticket holder over TLS.
struct ByTls {
    stream: seikan_tls::Stream,
    rng: Counting,
}

impl ByTls {
    fn new(relay: &Relay, from: Ipv4Addr) -> ByTls {
        let (at, tls) = relay.tls.as_ref().expect("TLS");
        let socket = connect(from, *at, false).expect("connected");
        let name = ServerName::try_from("relay.example.org").expect("a name");
        let tls = ClientConnection::new(Arc::clone(tls), name).expect("a client");
        let stream = seikan_tls::Stream::new(socket, Some(tls.into()), Framing::Relay);
        ByTls {
            stream: stream.expect("a stream"),
            rng: Counting(1),
        }
    }

    fn ask(&mut self, port: u16, ticket: &Ticket, peer: PublicKey) -> u16 {
        let stamp = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock");
        let ask = ClientRequest {
            ticket,
            peer,
            stamp: stamp.as_nanos() as u64,
        };
        let (id, bytes) = ask.write(&mut self.rng);
        assert!(self.stream.push(&[&port.to_be_bytes(), &bytes]));
        let until = Instant::now() + PATIENCE;
        loop {
            self.stream.flush().expect("it is there");
            self.stream.receive().expect("it is there");
            if let Some(frame) = self.stream.peek().expect("a frame") {
                let (_, answer) = split_port(frame).expect("a port");
                let answer = Answer::parse(answer, id, &ticket.password).expect("granted");
                self.stream.take();
                return answer.port.expect("a port");
            }
            assert!(Instant::now() < until, "no answer");
            thread::sleep(Duration::from_micros(200));
        }
    }

    /// Sends frames for a port, with these datagrams in turn, until so many bytes are sent, at so
    /// many a second.
    fn send(&mut self, port: u16, datagrams: &[&[u8]], bytes: usize, rate: usize) {
        let (started_at, mut sent) = (Instant::now(), 0);
        let mut next = datagrams.iter().cycle();
        let mut datagram = next.next().expect("a datagram");
        while sent < bytes {
            let due = Duration::from_secs_f64(sent as f64 / rate as f64);
            thread::sleep(due.saturating_sub(started_at.elapsed()));
            // About the size of a TLS record.
            let until = sent + 14_000;
            while sent < until {
                if self.stream.push(&[&port.to_be_bytes(), datagram]) {
                    sent += datagram.len() + 4;
                    datagram = next.next().expect("another");
                    continue;
                }
                self.stream.flush().expect("it is there");
                thread::sleep(Duration::from_micros(100));
            }
            self.stream.flush().expect("it is there");
            let _ = self.stream.receive().expect("it is there");
            while self.stream.peek().expect("frames").is_some() {
                self.stream.take();
            }
        }
    }
}

/// Maximum cost per byte of a frame, as a multiple of a forwarded frame of 1,400 bytes: the kernel
/// sends datagrams of 33 bytes one by one, and each costs about as much as a large one.
const WORTH_BY_TLS: f64 = 10.0;

#[test]
fn no_frame_costs_a_relay_more_than_its_bytes_are_worth() {
    const BYTES: usize = 1_000_000;
    const RATE: usize = 1_250_000;
    let relay = Relay::start(&["--tls-listen", "127.0.0.1:0"]);
    let (a, b) = (relay.ticket(1), relay.ticket(2));
    let mut one = ByTls::new(&relay, Ipv4Addr::new(127, 0, 0, 4));
    let mut other = Asker::new();
    let port = one.ask(MAIN_PORT, &a, key(2));
    one.ask(port, &a, key(2));
    let pair = SocketAddr::new(relay.main.ip(), port);
    other.ask(relay.main, &b, key(1)).expect("a port");
    other.ask(pair, &b, key(1)).expect("bound");
    let ask = ClientRequest {
        ticket: &a,
        peer: key(2),
        stamp: 1,
    };
    let request = ask.write(&mut one.rng).1;
    let mut binding = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
    binding.extend([9; 12]);
    let long = vec![0xee; request.len()];
    // For each length, the cost of a forwarded frame comes first.
    let kinds: [(&str, u16, &[&[u8]]); 10] = [
        ("forwarded, 1,400 bytes", port, &[&[0xee; 1400]]),
        ("forwarded, 100 bytes", port, &[&[0xee; 100]]),
        ("forwarded, 32 bytes", port, &[&[0xee; 32]]),
        // Datagrams of different lengths are sent one by one.
        ("32 and 33 bytes", port, &[&[0xee; 32], &[0xee; 33]]),
        ("forwarded, 1 byte", port, &[&[0xee; 1]]),
        ("to a port that does not exist, 1 byte", 1, &[&[0xee; 1]]),
        ("forwarded, 20 bytes", port, &[&[0xee; 20]]),
        ("a binding request, 20 bytes", MAIN_PORT, &[&binding]),
        ("forwarded, as long as a request", port, &[&long]),
        ("a request for a port that it has", MAIN_PORT, &[&request]),
    ];
    let pid = relay.tunnel.child.id();
    let mut cost = |(_, port, datagrams): (&str, u16, &[&[u8]])| {
        let before = busy(pid);
        one.send(port, datagrams, BYTES, RATE);
        thread::sleep(Duration::from_millis(50));
        (busy(pid) - before).as_secs_f64() * 1e9 / BYTES as f64
    };
    let bases = |costs: [f64; 10]| {
        let mut base = costs[0];
        let forwarded = kinds.map(|(name, ..)| name.starts_with("forwarded"));
        std::array::from_fn::<f64, 10, _>(|n| {
            base = if forwarded[n] { costs[n] } else { base };
            base
        })
    };
    // The minimum of several measurements: other load on the machine adds to each.
    let mut costs = kinds.map(|kind| cost(kind).min(cost(kind)));
    let too_much = |costs: [f64; 10], n: usize| {
        costs[n] >= WORTH * bases(costs)[n] || costs[n] >= WORTH_BY_TLS * costs[0]
    };
    for n in 0..kinds.len() {
        for _ in 0..3 {
            if too_much(costs, n) {
                costs[n] = costs[n].min(cost(kinds[n]));
            }
        }
    }
    let bases = bases(costs);
    for (n, (name, ..)) in kinds.iter().enumerate() {
        let (same, large) = (costs[n] / bases[n], costs[n] / costs[0]);
        println!(
            "{:6.2} ns a byte  {same:4.1}  {large:4.1}  {name}",
            costs[n]
        );
    }
    for (n, (name, ..)) in kinds.iter().enumerate() {
        assert!(!too_much(costs, n), "{name}: {costs:?}");
    }
}
