//! Malicious members and unknown hosts at a coordinator: the program on loopback.
//!
//! The cost of a message is compared with that of the cheapest message of the same length, in the
//! same run.

use super::service::{WORTH, addresses, busy, connect, seconds, start};
use crate::common::Tunnel;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use seikan_coordinator::{Actor, NewToken, Store};
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::mesh::{
    Call, Changes, Credential, Cursor, Endpoints, JoinRequest, Networks, Pin, Token,
};
use seikan_sys::process;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

fn operator() -> Actor {
    Actor::Operator("root".to_owned())
}

pub struct Coordinator {
    tunnel: Tunnel,
    at: SocketAddr,
    pin: Pin,
    folder: tempfile::TempDir,
    token: Token,
    /// Credentials of the additional members.
    members: Vec<String>,
}

impl Coordinator {
    /// Starts a coordinator with `count` additional members, whose tags make each entry a kilobyte.
    pub fn start(count: u32) -> Coordinator {
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
        let join = |number: u32| {
            let request = request(&wordy, &format!("crowd{number}"));
            let from = Actor::Host([127, 0, 0, 1].into());
            store.join(&request, &from, seconds()).expect("joined");
            request.credential.reveal().to_string()
        };
        let shown: Vec<String> = (0..count).map(join).collect();
        if count > 0 {
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
            members: shown,
        }
    }

    /// Returns a member that joined over the network.
    pub fn member(&self, name: &str) -> Member {
        let url = format!("https://{}", self.at).parse().expect("a URL");
        let request = request(&self.token, name);
        let client =
            Client::new(&url, Some(self.pin), None, WebProxies::default()).expect("a client");
        wait_for(client.join(&request)).expect("joined");
        let shown = request.credential.reveal().to_string();
        Member {
            key: request.public_key,
            client: Client::new(
                &url,
                Some(self.pin),
                Some(request.credential),
                WebProxies::default(),
            )
            .expect("a client"),
            shown,
        }
    }

    pub fn administer(&self, words: &[&str]) {
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

pub struct Member {
    key: PublicKey,
    pub client: Client,
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

/// A connection for several requests.
struct Https(StreamOwned<ClientConnection, TcpStream>);

impl Https {
    fn new(socket: TcpStream, tls: &Arc<ClientConfig>) -> Https {
        let name = ServerName::try_from("mesh.example.org").expect("a name");
        let connection = ClientConnection::new(Arc::clone(tls), name).expect("a client");
        Https(StreamOwned::new(connection, socket))
    }

    /// Sends a request; returns the status and the body of its answer.
    fn ask(&mut self, request: &str) -> io::Result<(u16, Vec<u8>)> {
        self.0.write_all(request.as_bytes())?;
        self.answer()
    }

    fn answer(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let (status, length, mut body) = self.head()?;
        let had = body.len();
        body.resize(length, 0);
        self.0.read_exact(&mut body[had..])?;
        Ok((status, body))
    }

    /// Reads the head of an answer; returns its status, the length of its body, and the part of the
    /// body that was read with it.
    fn head(&mut self) -> io::Result<(u16, usize, Vec<u8>)> {
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
        Ok((status.expect("a status"), length, head.split_off(end)))
    }
}

/// Length of each request, in bytes.
const REQUEST: usize = 600;

/// Returns a request of that length.
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

/// Returns the names of all members in an answer.
fn poll(member: &Member) -> (Vec<String>, Cursor) {
    let changes = wait_for(member.client.changes(Cursor::default(), Duration::ZERO));
    let changes = changes.expect("an answer");
    assert!(changes.whole);
    let names = changes.members.iter().map(|m| m.name.to_string());
    let mut names: Vec<String> = names.collect();
    names.sort();
    (names, changes.cursor())
}

#[test]
fn a_member_receives_only_members_that_the_policy_lets_it_talk_to() {
    let coordinator = Coordinator::start(0);
    let [a, b, c] = ["alice", "bob", "carol"].map(|name| coordinator.member(name));
    coordinator.policy("allow alice -> bob tcp/443\n");
    assert_eq!(poll(&a).0, ["bob"]);
    assert_eq!(poll(&b).0, ["alice"]);
    let (names, cursor) = poll(&c);
    assert!(names.is_empty(), "{names:?}");
    // The raw answer has no trace of them either.
    let socket = connect(Ipv4Addr::LOCALHOST, coordinator.at, false).expect("connected");
    let mut raw = Https::new(socket, &coordinator.tls());
    let request = http("GET /v1/changes?since=0", Some(&c.shown), "");
    let (status, body) = raw.ask(&request).expect("an answer");
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
    // It can call no member that it may not know: the answer is as if there were no such member.
    let call = |key| {
        let outcome = wait_for(c.client.call(&Call { public_key: key }));
        outcome.map_err(|error| error.to_string())
    };
    let nobody = PrivateKey::generate(&mut SystemRandom).public();
    assert_eq!(call(b.key), call(nobody));
    let calls = wait_for(b.client.changes(poll(&b).1, Duration::ZERO));
    assert!(calls.expect("an answer").calls.is_empty());

    // Another policy shows them while it waits; the former one hides them again.
    let ask =
        |cursor| wait_for(c.client.changes(cursor, Duration::from_secs(30))).expect("an answer");
    let answer = thread::scope(|scope| {
        let answer = scope.spawn(move || ask(cursor));
        thread::sleep(Duration::from_millis(100));
        coordinator.policy("allow * -> * *\n");
        answer.join().expect("no panic")
    });
    assert_eq!((answer.whole, answer.members.len()), (true, 2));
    coordinator.policy("allow alice -> bob tcp/443\n");
    let answer = wait_for(c.client.changes(answer.cursor(), Duration::from_secs(30)));
    let answer = answer.expect("an answer");
    assert_eq!((answer.whole, answer.members.len()), (true, 0));
}

/// Connections that request everything and read nothing.
const UNREAD: u32 = 2_000;
/// Maximum growth of memory: 64 MiB of answers, 64 KiB for each connection, and some for making
/// answers.
const UNREAD_MEMORY: u64 = (64 << 20) + UNREAD as u64 * (64 << 10) + (48 << 20);

#[test]
fn thousands_of_requests_with_unread_answers_take_little_memory_and_delay_nobody() {
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
                    let request = http("GET /v1/changes?since=0", Some(&member.shown), "");
                    let answer = (0..UNREAD / 8).map(|_| {
                        let mut raw = Https::new(connect(from, at, true).expect("connected"), tls);
                        raw.0.write_all(request.as_bytes()).expect("sent");
                        raw.0.flush().expect("sent");
                        raw
                    });
                    answer.collect::<Vec<_>>()
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
    let started_at = Instant::now();
    // Other members see that some of these members have left since, one by one.
    assert!(poll(&good).0.len() >= 1500);
    println!(
        "another member is answered within {:?}",
        started_at.elapsed()
    );
    // Each request counted: a member's ninth at a time was refused. A short answer that fits in the
    // buffers of its connection is done, and makes space for the next.
    let mut answered = 0;
    for raw in &mut unread {
        let mut status = [0; 12];
        if raw.0.read_exact(&mut status).is_ok() {
            assert!([&b"HTTP/1.1 200"[..], b"HTTP/1.1 429"].contains(&&status[..]));
            answered += u32::from(status.ends_with(b"200"));
        }
    }
    assert!(
        (8..=UNREAD / 4).contains(&answered),
        "{answered} were answered"
    );
}

/// Maximum bytes of an answer when the limits are used up.
const SHORT: usize = 512 << 10;

#[test]
fn members_that_read_nothing_delay_no_other_behind_their_address() {
    let coordinator = Coordinator::start(1500);
    let bad: Vec<Member> = (0..12)
        .map(|n| coordinator.member(&format!("bad{n}")))
        .collect();
    let good = coordinator.member("good");
    let (tls, from) = (coordinator.tls(), Ipv4Addr::new(127, 0, 0, 2));
    let request = |member: &Member, since: &str| {
        let request = format!("GET /v1/changes?{since}");
        http(&request, Some(&member.shown), "")
    };
    // Each member leaves as many long answers unread as it gets: together 64 MiB.
    let mut unread: Vec<Https> = Vec::new();
    for member in &bad {
        for _ in 0..8 {
            let socket = connect(from, coordinator.at, true).expect("connected");
            let mut raw = Https::new(socket, &tls);
            let asked = raw.0.write_all(request(member, "since=0").as_bytes());
            asked.and_then(|()| raw.0.flush()).expect("sent");
            let (_, length, _) = raw.head().expect("an answer");
            unread.push(raw);
            if length <= SHORT {
                break;
            }
        }
    }
    let started_at = Instant::now();
    let mut raw = Https::new(
        connect(from, coordinator.at, false).expect("connected"),
        &tls,
    );
    let (mut cursor, mut members, mut parts) = ("since=0".to_owned(), 0, 0);
    loop {
        let (status, body) = raw.ask(&request(&good, &cursor)).expect("an answer");
        assert_eq!(status, 200, "after {:?}", started_at.elapsed());
        assert!(
            body.len() <= SHORT,
            "the limit of the address is not used up"
        );
        let changes: Changes = serde_json::from_slice(&body).expect("changes");
        (members, parts) = (members + changes.members.len(), parts + 1);
        if !changes.more {
            break;
        }
        let Cursor {
            revision,
            epoch,
            sight,
        } = changes.cursor();
        cursor = format!("since={revision}&sight={sight}&epoch={epoch}");
    }
    println!(
        "{members} members in {parts} parts within {:?}",
        started_at.elapsed()
    );
    assert!(members >= 1512 && parts > 1, "{members} in {parts}");
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
    assert!(poll(&member).0.is_empty());
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
    let now = poll(&member).1;
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
        let key = PrivateKey::generate(&mut SystemRandom).public();
        http(
            "POST /v1/call",
            shown,
            &format!(r#"{{"public_key":"{key}"}}"#),
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
        // The baseline: a usual request, seldom enough that none is refused.
        ("a member's poll, nothing new", &is_member),
        ("a member's poll, everything", &since_0),
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
    // The handshake of TLS is as many bytes again as the request.
    let each = (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(2 * CONNECTIONS);
    costs.push((each, "a connection, and a path that is none".to_owned()));
    let base = costs[0].0;
    for (each, name) in &costs {
        println!("{each:7.1} µs  {:4.1}  {name}", each / base);
    }
    for (each, name) in &costs {
        assert!(*each < WORTH * base, "{name}: {each} to {base} µs");
    }
}

/// Number of members that wait for changes.
const WAITING: u32 = 500;

#[test]
fn a_new_policy_costs_each_waiting_member_only_its_changes() {
    process::allow_more_files().expect("files");
    let coordinator = Coordinator::start(WAITING);
    let mover = coordinator.member("mover");
    let mut now = poll(&mover).1.revision;
    let tls = coordinator.tls();
    let from = Ipv4Addr::new(127, 0, 2, 1);
    let open = |shown: &String| {
        let socket = connect(from, coordinator.at, false).expect("connected");
        (Https::new(socket, &tls), shown.clone())
    };
    let mut waiting: Vec<(Https, String)> = coordinator.members.iter().map(open).collect();
    let pid = coordinator.tunnel.child.id();
    // Bytes of all answers, and their processor time.
    let mut report = |change: &dyn Fn()| {
        for (raw, shown) in &mut waiting {
            let request = http(
                &format!("GET /v1/changes?since={now}&wait=50"),
                Some(shown),
                "",
            );
            raw.0.write_all(request.as_bytes()).expect("sent");
            raw.0.flush().expect("sent");
        }
        // Until all of them wait.
        let mut last = busy(pid);
        loop {
            thread::sleep(Duration::from_millis(300));
            let taken = busy(pid);
            if taken - last < Duration::from_millis(5) {
                break;
            }
            last = taken;
        }
        let before = busy(pid);
        change();
        let answer = |(raw, _): &mut (Https, String)| -> Changes {
            let (status, body) = raw.answer().expect("an answer");
            assert_eq!(status, 200);
            serde_json::from_slice(&body).expect("changes")
        };
        let answers: Vec<Changes> = waiting.iter_mut().map(answer).collect();
        let cost = (busy(pid) - before).as_secs_f64() * 1e6 / f64::from(WAITING);
        now = answers
            .iter()
            .map(|changes| changes.revision)
            .max()
            .expect("one");
        (cost, answers)
    };
    let moves = || {
        let at = Endpoints {
            endpoints: vec![([192, 0, 2, 1], 7).into()],
            relayed: Vec::new(),
        };
        wait_for(mover.client.report_endpoints(&at)).expect("an answer");
    };
    let (base, answers) = report(&moves);
    assert!(answers.iter().all(|changes| changes.members.len() == 1));
    println!("{base:7.1} µs each: a member moves");
    let policies = [
        // All members see each other, as before.
        "allow * -> * *\nallow crowd0 -> crowd1 tcp/1\n",
        // Hardly any member sees another.
        "allow crowd0 -> crowd1 tcp/1\n",
        // Three of them see one more.
        "allow crowd0 -> crowd2 tcp/1\n",
    ];
    for (policy, wanted) in policies.iter().zip([[0, 0, 0], [1, 1, 0], [1, 0, 1]]) {
        let (cost, answers) = report(&|| coordinator.policy(policy));
        println!("{cost:7.1} µs each: {policy:?}");
        let changes: Vec<usize> = answers
            .iter()
            .map(|changes| changes.members.len())
            .collect();
        assert_eq!(changes[..3], wanted);
        assert_eq!(changes.iter().sum::<usize>(), wanted.iter().sum::<usize>());
        assert!(answers.iter().all(|changes| changes.policy.is_some()));
        assert!(cost < WORTH * base, "{cost} to {base} µs: {policy:?}");
    }
}

#[test]
fn a_policy_of_a_thousand_rules_for_a_thousand_members_is_set_as_soon_as_one_for_two() {
    let coordinator = Coordinator::start(1000);
    let set = |members: u32, port: u32| {
        let rule = |n: u32| {
            let (from, to) = (n % members, (n + 1) % members);
            format!("allow crowd{from} -> crowd{to} tcp/{}\n", port + n)
        };
        let rules: String = (0..1024).map(rule).collect();
        let started_at = Instant::now();
        coordinator.policy(&rules);
        started_at.elapsed()
    };
    let base = set(2, 1000);
    for port in [1000, 3000] {
        let took = set(1000, port);
        println!("{took:?}, for two {base:?}");
        assert!(took.as_secs_f64() < 2.0 * WORTH * base.as_secs_f64());
    }
}
