//! Members gone bad, and strangers, at a coordinator and a relay: the programs as they run, on loopback.
//!
//! What one message costs is compared with what the cheapest of the same length costs, in the same run.

use crate::common::{PATIENCE, Tunnel};
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use seikan_coordinator::{Actor, NewToken, Store};
use seikan_node::mesh::client::{Client, wait_for};
use seikan_node::node::SystemRandom;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::framing::{Framing, MAIN_PORT, split_port};
use seikan_proto::mesh::relay::{Answer, Ask, RelayError, RelayRefusal};
use seikan_proto::mesh::{
    Call, Credential, Cursor, JoinRequest, Networks, Pin, RelayKind, RelaySecret, Ticket, Token,
};
use seikan_proto::rng::Rng;
use seikan_sys::process;
use socket2::{Domain, Socket, Type};
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// So many times what the cheapest message of the same length costs, a message may cost.
const WORTH: f64 = 5.0;

fn operator() -> Actor {
    Actor::Operator("root".to_owned())
}

fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("a clock").as_secs()
}

/// A service, and the line that it says when it listens.
fn start(words: &[&str]) -> (Tunnel, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    command.args(words).env_remove("SEIKAN_RELAY_SECRET");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().expect("started");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    (Tunnel { child, stdout }, line)
}

/// Addresses in a line, in their order.
fn addresses(line: &str) -> Vec<SocketAddr> {
    let words = line.split([' ', ',', '\n']);
    words.filter_map(|word| word.parse().ok()).collect()
}

/// The time that the threads of a process were on a processor, to the nanosecond (schedstat): utime and stime are in ticks of 10 ms.
fn busy(pid: u32) -> Duration {
    let sum = || {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            sum += text.split_whitespace().next()?.parse::<u64>().ok()?;
        }
        Some(sum)
    };
    // A thread may end between two looks.
    let looks = std::iter::repeat_with(sum).take(100);
    Duration::from_nanos(looks.flatten().next().expect("schedstat"))
}

struct Coordinator {
    tunnel: Tunnel,
    at: SocketAddr,
    pin: Pin,
    folder: tempfile::TempDir,
    token: Token,
}

impl Coordinator {
    /// With so many members more, whose tags make what is told of each a kilobyte.
    fn start(crowd: u32) -> Coordinator {
        let folder = tempfile::tempdir().expect("a folder");
        let token = Token::generate(&mut SystemRandom);
        let store = Store::open(&folder.path().join("mesh.db")).expect("a store");
        let networks = Networks::from_random([1, 2, 3, 4, 5]);
        store.init(networks, &operator(), 0).expect("networks");
        let plain = NewToken::default();
        let made = store.create_token(&token.digest(), &plain, &operator(), 0);
        made.expect("a token");
        let wordy = Token::generate(&mut SystemRandom);
        let tags = (0..16).map(|n| format!("t{n}{}", "x".repeat(55)).parse().expect("a tag"));
        let tagged = NewToken {
            tags: tags.collect(),
            ..NewToken::default()
        };
        let made = store.create_token(&wordy.digest(), &tagged, &operator(), 0);
        made.expect("a token");
        for number in 0..crowd {
            let request = request(&wordy, &format!("crowd{number}"));
            let from = Actor::Host([127, 0, 0, 1].into());
            store.join(&request, &from, seconds()).expect("joined");
        }
        if crowd > 0 {
            let all = "allow * -> * *\n";
            store.set_policy(all, &operator(), 0).expect("a policy");
        }
        drop(store);
        let dir = folder.path().to_str().expect("UTF-8").to_owned();
        let words = ["coordinator", "--listen", "127.0.0.1:0", "--dir", &dir];
        let (tunnel, line) = start(&words);
        let mut words = line.split([' ', ',', '\n']).filter(|word| !word.is_empty());
        words.find(|word| *word == "pin");
        let pin = words.next().expect(&line).parse().expect(&line);
        Coordinator {
            at: addresses(&line)[0],
            tunnel,
            pin,
            folder,
            token,
        }
    }

    /// A member that joined over the network.
    fn member(&self, name: &str) -> Member {
        let url = format!("https://{}", self.at).parse().expect("a URL");
        let request = request(&self.token, name);
        let client = Client::new(&url, Some(self.pin), None).expect("a client");
        wait_for(client.join(&request)).expect("joined");
        let shown = request.credential.reveal().to_string();
        Member {
            key: request.public_key,
            client: Client::new(&url, Some(self.pin), Some(request.credential)).expect("a client"),
            shown,
        }
    }

    fn administer(&self, words: &[&str]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.arg("coordinator").args(words).arg("--dir");
        let status = command
            .arg(self.folder.path())
            .stdout(Stdio::null())
            .status();
        assert!(status.expect("run").success());
    }

    fn policy(&self, text: &str) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), text).expect("written");
        self.administer(&["policy", "set", file.path().to_str().expect("UTF-8")]);
    }

    fn tls(&self) -> Arc<ClientConfig> {
        Arc::new(seikan_tls::pinned(self.pin, &[&TLS13]).expect("a configuration"))
    }
}

struct Member {
    key: PublicKey,
    client: Client,
    /// Its credential.
    shown: String,
}

fn request(token: &Token, name: &str) -> JoinRequest {
    JoinRequest {
        token: token.clone(),
        name: name.parse().expect("a name"),
        public_key: PrivateKey::generate(&mut SystemRandom).public(),
        credential: Credential::generate(&mut SystemRandom),
    }
}

/// A TCP connection from one of this host's addresses; `deaf`: hardly anything fits into its receive buffer.
fn connect(from: Ipv4Addr, to: SocketAddr, deaf: bool) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    if deaf {
        socket.set_recv_buffer_size(4096)?;
    }
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect(&to.into())?;
    let socket = TcpStream::from(socket);
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// A connection on which requests follow each other.
struct Https(StreamOwned<ClientConnection, TcpStream>);

impl Https {
    fn new(socket: TcpStream, tls: &Arc<ClientConfig>) -> Https {
        let name = ServerName::try_from("mesh.example.org").expect("a name");
        let connection = ClientConnection::new(Arc::clone(tls), name).expect("a client");
        Https(StreamOwned::new(connection, socket))
    }

    /// Sends a request, and gives the status and the body of its answer.
    fn ask(&mut self, request: &str) -> io::Result<(u16, Vec<u8>)> {
        self.0.write_all(request.as_bytes())?;
        let (mut head, mut buffer) = (Vec::new(), [0; 16_384]);
        let end = loop {
            let length = self.0.read(&mut buffer)?;
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            head.extend_from_slice(&buffer[..length]);
            if let Some(at) = head.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
        };
        let text = String::from_utf8_lossy(&head[..end]).to_lowercase();
        let status = text.get(9..12).and_then(|status| status.parse().ok());
        let length = text
            .lines()
            .find_map(|l| l.strip_prefix("content-length: "));
        let length: usize = length.map_or(0, |l| l.trim().parse().expect("a length"));
        let mut body = head.split_off(end);
        let had = body.len();
        body.resize(length, 0);
        self.0.read_exact(&mut body[had..])?;
        Ok((status.expect("a status"), body))
    }
}

/// Bytes of each request.
const REQUEST: usize = 600;

/// A request of that length.
fn http(line: &str, shown: Option<&str>, body: &str) -> String {
    let shown = shown.map_or(String::new(), |shown| {
        format!("Authorization: Bearer {shown}\r\n")
    });
    let head = format!(
        "{line} HTTP/1.1\r\nHost: mesh\r\n{shown}Content-Length: {}\r\nX-Fill: ",
        body.len()
    );
    let fill = REQUEST - head.len() - body.len() - 4;
    format!("{head}{}\r\n\r\n{body}", "x".repeat(fill))
}

/// Everybody whom one question told of, by name.
fn told(member: &Member) -> (Vec<String>, Cursor) {
    let changes = wait_for(member.client.changes(Cursor::default(), Duration::ZERO));
    let changes = changes.expect("an answer");
    assert!(changes.whole);
    let names = changes.members.iter().map(|m| m.name.to_string());
    let mut names: Vec<String> = names.collect();
    names.sort();
    (names, changes.cursor())
}

#[test]
fn a_member_hears_of_those_alone_that_policy_lets_it_talk_to() {
    let coordinator = Coordinator::start(0);
    let [a, b, c] = ["alice", "bob", "carol"].map(|name| coordinator.member(name));
    coordinator.policy("allow alice -> bob tcp/443\n");
    assert_eq!(told(&a).0, ["bob"]);
    assert_eq!(told(&b).0, ["alice"]);
    let (names, cursor) = told(&c);
    assert!(names.is_empty(), "{names:?}");
    // Nor is there anything of them in what it is sent.
    let socket = connect(Ipv4Addr::LOCALHOST, coordinator.at, false).expect("connected");
    let mut raw = Https::new(socket, &coordinator.tls());
    let question = http("GET /v1/changes?since=0", Some(&c.shown), "");
    let (status, body) = raw.ask(&question).expect("an answer");
    let body = String::from_utf8(body).expect("text");
    assert_eq!(status, 200);
    for secret in [
        "alice",
        "bob",
        &a.key.to_string(),
        &b.key.to_string(),
        "443",
    ] {
        assert!(!body.contains(secret), "{secret} in {body}");
    }
    // It can call nobody whom it may not know: that is as if there were no such member.
    let call = |whom| {
        let called = wait_for(c.client.call(&Call { public_key: whom }));
        called.map_err(|error| error.to_string())
    };
    let nobody = PrivateKey::generate(&mut SystemRandom).public();
    assert_eq!(call(b.key), call(nobody));
    let calls = wait_for(b.client.changes(told(&b).1, Duration::ZERO));
    assert!(calls.expect("an answer").calls.is_empty());

    // Another policy shows them while it waits, and the former hides them again.
    let ask = |cursor| wait_for(c.client.changes(cursor, Duration::from_secs(30))).expect("told");
    let asked = thread::scope(|scope| {
        let asked = scope.spawn(move || ask(cursor));
        thread::sleep(Duration::from_millis(100));
        coordinator.policy("allow * -> * *\n");
        asked.join().expect("no panic")
    });
    assert_eq!((asked.whole, asked.members.len()), (true, 2));
    coordinator.policy("allow alice -> bob tcp/443\n");
    let asked = wait_for(c.client.changes(asked.cursor(), Duration::from_secs(30)));
    let asked = asked.expect("told");
    assert_eq!((asked.whole, asked.members.len()), (true, 0));
}

/// Connections that ask for everything and read nothing.
const UNREAD: u32 = 2_000;
/// Memory that they may take: 64 MiB of answers, 64 KiB for each connection, and some to make answers of.
const UNREAD_MEMORY: u64 = (64 << 20) + UNREAD as u64 * (64 << 10) + (48 << 20);

#[test]
fn thousands_of_questions_whose_answers_nobody_reads_take_little_memory_and_nobodys_turn() {
    process::allow_more_files().expect("files");
    let coordinator = Coordinator::start(1500);
    let bad: Vec<Member> = (0..8)
        .map(|n| coordinator.member(&format!("bad{n}")))
        .collect();
    let good = coordinator.member("good");
    let pid = coordinator.tunnel.child.id();
    let memory = || process::memory(pid).expect("memory").resident;
    let before = memory();
    let (tls, from) = (coordinator.tls(), Ipv4Addr::new(127, 0, 0, 2));
    let mut unread: Vec<Https> = thread::scope(|scope| {
        let asking: Vec<_> = bad
            .iter()
            .map(|member| {
                let (tls, at) = (&tls, coordinator.at);
                scope.spawn(move || {
                    let question = http("GET /v1/changes?since=0", Some(&member.shown), "");
                    let asked = (0..UNREAD / 8).map(|_| {
                        let mut raw = Https::new(connect(from, at, true).expect("connected"), tls);
                        raw.0.write_all(question.as_bytes()).expect("asked");
                        raw.0.flush().expect("asked");
                        raw
                    });
                    asked.collect::<Vec<_>>()
                })
            })
            .collect();
        let all = asking.into_iter().flat_map(|t| t.join().expect("no panic"));
        all.collect()
    });
    let mut most = memory();
    for _ in 0..60 {
        thread::sleep(Duration::from_millis(50));
        most = most.max(memory());
    }
    let grown = most.saturating_sub(before);
    println!(
        "{} MiB for {UNREAD} connections, from {} MiB",
        grown >> 20,
        before >> 20
    );
    assert!(grown < UNREAD_MEMORY, "{} MiB", grown >> 20);
    let begun = Instant::now();
    // Some of them have left since, one by one, as far as the other members are concerned.
    assert!(told(&good).0.len() >= 1500);
    println!("another member is answered within {:?}", begun.elapsed());
    // Each question counted: what came beside eight of a member was refused.
    let mut answered = 0;
    for raw in &mut unread {
        let mut status = [0; 12];
        if raw.0.read_exact(&mut status).is_ok() {
            assert!([&b"HTTP/1.1 200"[..], b"HTTP/1.1 429"].contains(&&status[..]));
            answered += u32::from(status.ends_with(b"200"));
        }
    }
    assert!((8..=64).contains(&answered), "{answered} were told");
}

#[test]
fn one_source_does_not_take_all_connections_of_a_coordinator() {
    process::allow_more_files().expect("files");
    let coordinator = Coordinator::start(0);
    let member = coordinator.member("good");
    let from = Ipv4Addr::new(127, 0, 0, 3);
    let all: Vec<TcpStream> = (0..4500)
        .map(|_| connect(from, coordinator.at, false).expect("connected"))
        .collect();
    assert!(told(&member).0.is_empty());
    thread::sleep(Duration::from_millis(500));
    let is_there = |mut socket: &TcpStream| {
        socket.set_nonblocking(true).expect("set");
        let read = socket.read(&mut [0]);
        read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    };
    let there = all.iter().filter(|socket| is_there(socket)).count();
    assert!((4000..=4096).contains(&there), "{there} of {}", all.len());
}

#[test]
fn no_request_costs_a_coordinator_more_than_its_bytes_are_worth() {
    const COUNT: u32 = 800;
    let coordinator = Coordinator::start(0);
    let member = coordinator.member("good");
    let other = coordinator.member("other");
    let shown = Some(member.shown.as_str());
    let now = told(&member).1;
    let bad = Credential::generate(&mut SystemRandom).reveal().to_string();
    let none = |_: u32| http("GET /v1/nothing", None, "");
    let is_member = |_: u32| {
        http(
            &format!("GET /v1/changes?since={}", now.revision),
            shown,
            "",
        )
    };
    let since_0 = |_: u32| http("GET /v1/changes?since=0", Some(&other.shown), "");
    let unknown = |_: u32| http("GET /v1/changes?since=0", Some(&bad), "");
    let nonsense = |_: u32| http("POST /v1/join", None, &"[".repeat(200));
    let joining = |n: u32| {
        let request = request(&Token::generate(&mut SystemRandom), &format!("m{n}"));
        http(
            "POST /v1/join",
            None,
            &serde_json::to_string(&request).expect("JSON"),
        )
    };
    let moving = |n: u32| {
        let at = format!(r#"{{"endpoints":["192.0.2.1:{}"]}}"#, 1 + n);
        http("POST /v1/endpoints", shown, &at)
    };
    let calling = |_: u32| {
        let whom = PrivateKey::generate(&mut SystemRandom).public();
        http(
            "POST /v1/call",
            shown,
            &format!(r#"{{"public_key":"{whom}"}}"#),
        )
    };
    let rotating = |_: u32| {
        let key = PrivateKey::generate(&mut SystemRandom).public();
        http(
            "POST /v1/key",
            shown,
            &format!(r#"{{"public_key":"{key}"}}"#),
        )
    };
    let kinds: [(&str, &dyn Fn(u32) -> String); 9] = [
        // What a member asks all the time; so few that none is refused.
        ("a member's question, nothing new", &is_member),
        ("a member's question, everything", &since_0),
        ("a member moves", &moving),
        ("a member calls", &calling),
        ("a member has another key", &rotating),
        ("a path that is none", &none),
        ("a credential that is none", &unknown),
        ("joining, no JSON", &nonsense),
        ("joining, a token that is none", &joining),
    ];
    let pid = coordinator.tunnel.child.id();
    let tls = coordinator.tls();
    let at = |source| connect(source, coordinator.at, false).expect("connected");
    let mut costs = Vec::new();
    for (number, (name, make)) in (0..).zip(kinds) {
        let mut raw = Https::new(at(Ipv4Addr::new(127, 0, 1, number)), &tls);
        raw.ask(&none(0)).expect("an answer");
        let count = if number == 0 { 100 } else { COUNT };
        let requests: Vec<String> = (0..count).map(make).collect();
        let before = busy(pid);
        let mut statuses = std::collections::BTreeMap::new();
        for request in &requests {
            assert_eq!(request.len(), REQUEST);
            let (status, _) = raw.ask(request).expect(name);
            *statuses.entry(status).or_insert(0) += 1;
        }
        let each = (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(count);
        costs.push((each, format!("{name} {statuses:?}")));
    }
    const CONNECTIONS: u32 = 100;
    let before = busy(pid);
    for _ in 0..CONNECTIONS {
        let mut raw = Https::new(at(Ipv4Addr::new(127, 0, 1, 100)), &tls);
        raw.ask(&none(0)).expect("an answer");
    }
    let each = (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(CONNECTIONS);
    costs.push((each, "a connection, and a path that is none".to_owned()));
    let base = costs[0].0;
    for (each, name) in &costs {
        println!("{each:7.1} µs  {:4.1}  {name}", each / base);
    }
    for (each, name) in &costs {
        assert!(*each < WORTH * base, "{name}: {each} to {base} µs");
    }
}

/// Bytes that are never the same again.
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

/// A ticket holder, or anybody with a socket.
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
        let ask = Ask {
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
        let asked = wait_for(member.client.changes(Cursor::default(), Duration::ZERO));
        asked.expect("an answer").relays[0].ticket.clone()
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

/// What the others are compared with.
const SENT_ON: &str = "sent on";

/// Sends a datagram again and again, so many a second.
fn shoot(socket: &UdpSocket, to: SocketAddr, datagram: &[u8], count: u32, rate: u32) {
    let begun = Instant::now();
    for n in 0..count {
        if n % 16 == 0 {
            let due = Duration::from_secs(1) * n / rate;
            thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        // An error belongs to an earlier one.
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
        let ask = Ask {
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
        // SOFTWARE (RFC 8489, section 14.14) fills it.
        let mut question = binding.clone();
        question[3] = (size - 20) as u8;
        question[2] = ((size - 20) >> 8) as u8;
        let text = size - 24;
        question.extend([0x80, 0x22, (text >> 8) as u8, text as u8]);
        question.resize(size, b'x');
        push(
            "a question for its address",
            &stranger,
            relay.main,
            question,
        );
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
        let before = busy(pid);
        shoot(socket, *to, bytes, COUNT, RATE);
        thread::sleep(Duration::from_millis(50));
        let each = (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(COUNT);
        if *name == SENT_ON {
            bases.push((*size, each));
        }
        // Of two tickets one may be some bytes longer.
        let base = bases.iter().min_by_key(|(of, _)| of.abs_diff(*size));
        let ratio = each / base.expect("it comes first").1;
        println!("{each:6.2} µs  {ratio:4.1}  {name}, {size} bytes");
        if ratio >= WORTH {
            dear.push(format!("{name}, {size} bytes: {ratio:.1}"));
        }
    }
    assert!(dear.is_empty(), "{dear:?}");
}

/// A ticket holder by TLS.
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
        let ask = Ask {
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

    /// Sends frames for a port, with these datagrams in turns, until so many bytes have been sent, at so many a second.
    fn send(&mut self, port: u16, datagrams: &[&[u8]], bytes: usize, rate: usize) {
        let (begun, mut sent) = (Instant::now(), 0);
        let mut next = datagrams.iter().cycle();
        let mut datagram = next.next().expect("a datagram");
        while sent < bytes {
            let due = Duration::from_secs_f64(sent as f64 / rate as f64);
            thread::sleep(due.saturating_sub(begun.elapsed()));
            // About as much as a record of TLS has.
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
    let ask = Ask {
        ticket: &a,
        peer: key(2),
        stamp: 1,
    };
    let request = ask.write(&mut one.rng).1;
    let mut binding = vec![0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42];
    binding.extend([9; 12]);
    let kinds: [(&str, u16, &[&[u8]]); 8] = [
        ("sent on, 1,400 bytes", port, &[&[0xee; 1400]]),
        ("sent on, 100 bytes", port, &[&[0xee; 100]]),
        ("sent on, 32 bytes", port, &[&[0xee; 32]]),
        // Of unlike lengths, so they do not go on together.
        (
            "sent on, 32 and 33 bytes",
            port,
            &[&[0xee; 32], &[0xee; 33]],
        ),
        ("1 byte", port, &[&[0xee; 1]]),
        ("to a port that is none", 1, &[&[0xee; 1]]),
        ("a question for its address", MAIN_PORT, &[&binding]),
        ("a port that it has", MAIN_PORT, &[&request]),
    ];
    let pid = relay.tunnel.child.id();
    let mut cost = |(_, port, datagrams): (&str, u16, &[&[u8]])| {
        let before = busy(pid);
        one.send(port, datagrams, BYTES, RATE);
        thread::sleep(Duration::from_millis(50));
        (busy(pid) - before).as_secs_f64() * 1e9 / BYTES as f64
    };
    // The least of some: what else the machine does makes it more.
    let mut costs = kinds.map(|kind| cost(kind).min(cost(kind)));
    for (kind, n) in kinds.iter().zip(0..) {
        for _ in 0..3 {
            if costs[n] < WORTH * costs[0] {
                break;
            }
            costs[n] = costs[n].min(cost(*kind));
        }
    }
    let ratios = costs.map(|cost| cost / costs[0]);
    for ((name, ..), (cost, ratio)) in kinds.iter().zip(costs.iter().zip(ratios)) {
        println!("{cost:6.2} ns a byte  {ratio:4.1}  {name}");
    }
    for ((name, ..), ratio) in kinds.iter().zip(ratios) {
        assert!(ratio < WORTH, "{name}: {ratio:.1} times");
    }
}
