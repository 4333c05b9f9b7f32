//! The cost of idle members that are connected to a relay over TLS.

use super::{Service, addresses, text};
use crate::hostile::service::seconds;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection};
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::framing::{Framing, MAIN_PORT, split_port};
use seikan_proto::mesh::relay::{Answer, ClientRequest};
use seikan_proto::mesh::{Pin, RelayKind, RelaySecret, Ticket};
use seikan_proto::rng::Rng;
use seikan_tls::Stream;
use socket2::{Domain, Socket, Type};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const MEMBERS: u16 = 1000;
/// Interval in which members refresh their bindings; they do nothing else.
const BIND_EVERY: Duration = Duration::from_secs(20);
const ROUNDS: u32 = 3;

/// A source of bytes that never repeat.
struct Counting(u64);

impl Rng for Counting {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0 += 1;
        let bytes = self.0.to_be_bytes();
        let (to, _) = destination.split_at_mut(bytes.len());
        to.copy_from_slice(&bytes);
    }
}

fn key(member: u16) -> PublicKey {
    let mut bytes = [1; 32];
    bytes[..2].copy_from_slice(&member.to_be_bytes());
    PublicKey::from_bytes(bytes)
}

struct Member {
    stream: Stream,
    ticket: Ticket,
    peer: PublicKey,
    /// The pair's port.
    port: u16,
}

impl Member {
    /// Connects from one of fifty addresses, with a binding to the next or the previous member.
    fn new(number: u16, relay: SocketAddr, tls: &Arc<ClientConfig>, secret: &RelaySecret) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let from = Ipv4Addr::new(127, 1, 0, (number % 50) as u8);
        socket
            .bind(&SocketAddr::from((from, 0)).into())
            .expect("bound");
        socket.connect(&relay.into()).expect("connected");
        let name = ServerName::try_from("relay.example.org").expect("a name");
        let tls = ClientConnection::new(Arc::clone(tls), name).expect("a client");
        let stream = Stream::new(socket.into(), Some(tls.into()), Framing::Relay);
        let mut member = Member {
            stream: stream.expect("a stream"),
            ticket: Ticket::new(secret, number.into(), &key(number), seconds() + 86_400),
            peer: key(number ^ 1),
            port: MAIN_PORT,
        };
        member.port = member.ask();
        member
    }

    /// Returns the pair's port from the relay's answer.
    fn ask(&mut self) -> u16 {
        let stamp = SystemTime::now().duration_since(UNIX_EPOCH);
        let stamp = stamp.expect("a clock").as_nanos() as u64;
        let ask = ClientRequest {
            ticket: &self.ticket,
            peer: self.peer,
            stamp,
        };
        let (id, bytes) = ask.write(&mut Counting(stamp));
        assert!(self.stream.push(&[&self.port.to_be_bytes(), &bytes]));
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            self.stream.flush().expect("it is there");
            self.stream.receive().expect("it is there");
            if let Some(frame) = self.stream.peek().expect("a frame") {
                let (_, answer) = split_port(frame).expect("a port");
                let answer = Answer::parse(answer, id, &self.ticket.password).expect("granted");
                self.stream.take();
                return answer.port.expect("a port");
            }
            assert!(Instant::now() < until, "no answer");
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Returns a process's memory in KiB (proc_pid_status(5)).
fn memory(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.expect("memory").trim().trim_end_matches(" kB");
    kib.parse().expect("a number")
}

/// Returns the processor time of its first thread (/proc/PID/schedstat).
fn busy(process: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{process}/schedstat")).expect("schedstat");
    let nanoseconds = text.split_whitespace().next().expect("a number");
    Duration::from_nanos(nanoseconds.parse().expect("a number"))
}

#[test]
#[ignore = "a measurement, of more than a minute"]
fn the_cost_of_a_thousand_idle_members() {
    seikan_sys::process::allow_more_files().expect("files");
    let folder = tempfile::tempdir().expect("a folder");
    let relay = Service::start(&[
        "relay",
        "--dir",
        text(folder.path()),
        "--listen",
        "127.0.0.1:0",
        "--tls-listen",
        "127.0.0.1:0",
    ]);
    let at = addresses(&relay.line)[1];
    let noted = fs::read_to_string(folder.path().join("tls")).expect("a note");
    let (_, pin) = noted.trim().split_once(' ').expect("port and pin");
    let pin: Pin = pin.parse().expect("a pin");
    let secret = fs::read_to_string(folder.path().join("secret")).expect("a secret");
    let secret = RelaySecret::parse(secret.trim(), RelayKind::Seikan).expect("a secret");
    let tls = Arc::new(seikan_tls::pinned(pin, &[&TLS13]).expect("a configuration"));

    let process = relay.child.id();
    let without = memory(process);
    let before = busy(process);
    let mut members: Vec<Member> = (0..MEMBERS)
        .map(|number| {
            // All addresses of this host count as one source, with twenty new connections a second.
            std::thread::sleep(Duration::from_millis(52));
            Member::new(number, at, &tls, &secret)
        })
        .collect();
    let connected = busy(process);
    let each = (connected - before).as_secs_f64() * 1e3 / f64::from(MEMBERS);
    println!("to connect takes {each:.1} ms of the relay's time");
    let started_at = Instant::now();
    for round in 1..=ROUNDS {
        let ports = members.iter_mut().map(|member| (member.port, member.ask()));
        assert!(ports.filter(|(port, answered)| port != answered).count() == 0);
        std::thread::sleep((BIND_EVERY * round).saturating_sub(started_at.elapsed()));
    }
    let (took, idle) = (started_at.elapsed(), busy(process) - connected);
    let share = 100.0 * idle.as_secs_f64() / took.as_secs_f64();
    let with = memory(process);
    println!(
        "then {share:.2} % of a processor, and {:.1} KiB each in addition to {without} KiB",
        (with - without) as f64 / f64::from(MEMBERS)
    );
    assert!(!relay.end().contains("turned away"));
}
