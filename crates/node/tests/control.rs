//! Control sockets of a real node, in a namespace of its own: `wg` as the client of one, Seikan's
//! command line of the other, hostile ones of both.

use seikan_config::{Config, Overrides, Source, Syntax};
use seikan_node::control::{Control, RuntimeDirs, ask};
use seikan_node::node::Node;
use seikan_node::status::Status;
use seikan_node::worker;
use seikan_sys::netns::NetNs;
use seikan_sys::signal::Signals;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Private keys are 32 times a byte (clamped), whose public keys `wg pubkey` gave.
const KEY_A: &str = "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEA=";
const KEY_B: &str = "SEhISEhISEhISEhISEhISEhISEhISEhISEhISEhISEg=";

/// Says why a test did not run; fails instead where every test must run.
fn skip(reason: &str) {
    assert!(
        std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|value| value != "1"),
        "{reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// A namespace in which nodes can run, or `None` after saying why not.
fn namespace() -> Option<NetNs> {
    if !Path::new("/dev/net/tun").exists() {
        skip("no /dev/net/tun");
        return None;
    }
    if Command::new("wg").arg("--version").output().is_err() {
        skip("no `wg`: install wireguard-tools");
        return None;
    }
    match NetNs::create() {
        Ok(namespace) => Some(namespace),
        Err(error) => {
            skip(&format!("no network namespace: {error}"));
            None
        }
    }
}

/// A running node. Dropping it stops it.
struct Instance {
    name: String,
    dirs: RuntimeDirs,
    thread: Option<JoinHandle<()>>,
}

impl Instance {
    /// Starts a node with this configuration; `folder` is for its sockets.
    fn start(namespace: &NetNs, folder: &Path, text: &str) -> Instance {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ct{}-{number}", std::process::id());
        let dirs = RuntimeDirs {
            run: folder.to_owned(),
            ..RuntimeDirs::default()
        };
        let config = parse(&name, text);
        let control = Control::new(&dirs, &config).expect("control sockets");
        let thread = namespace.spawn_thread("node", move || run(&config, control));
        Instance {
            name,
            dirs,
            thread: Some(thread.expect("a thread in the namespace")),
        }
    }

    fn status(&self) -> Status {
        ask::status(&self.dirs, &self.name).expect("status")
    }

    fn uapi(&self) -> PathBuf {
        self.dirs.uapi(&self.name)
    }

    /// Sends a request of the configuration protocol and returns the reply.
    fn ask_uapi(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.uapi()).expect("connect");
        stream.write_all(request.as_bytes()).expect("write");
        let lines = BufReader::new(stream).lines().map_while(Result::ok);
        let lines: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        lines.join("\n")
    }

    /// Runs `wg`.
    fn wg(&self, arguments: &[&str]) -> String {
        let arguments = arguments.iter().map(|a| a.replace("%i", &self.name));
        let output = Command::new("wg").args(arguments).output().expect("run wg");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&Status) -> bool) {
        let begun = Instant::now();
        while !condition(&self.status()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "no {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let stopped = ask::stop(&self.dirs, &self.name, Duration::from_secs(10));
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            stopped.expect("stops");
            assert!(ended.is_some_and(|end| end.is_ok()));
        }
    }
}

fn run(config: &Config, mut control: Control) {
    let signals = Signals::block().expect("signals");
    let mut node = Node::create(config).expect("node");
    worker::run(&mut node, Some(&signals), &mut control).expect("worker");
    drop(node);
}

fn parse(name: &str, text: &str) -> Config {
    let source = Source {
        syntax: if text.contains("[[peer]]") {
            Syntax::Toml
        } else {
            Syntax::Ini
        },
        text: text.to_owned().into(),
        file: format!("{name}.conf"),
    };
    let read = |_: &Path| Err(std::io::ErrorKind::NotFound.into());
    let parsed = seikan_config::parse(&source, &Overrides::default(), &read);
    let (mut config, _) = parsed.into_result().expect("a good configuration");
    config.name = name.parse().expect("a good name");
    config
}

/// The public key of a private one.
fn public(private: &str) -> String {
    let key = seikan_config::parse_private_key(private).expect("a key");
    key.public().to_string()
}

/// A public key that nobody has the private one of.
fn unknown_key(number: u32) -> String {
    let mut bytes = [0x55; 32];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    seikan_config::PublicKey::from_bytes(bytes).to_string()
}

fn interface(key: &str) -> String {
    format!("[Interface]\nPrivateKey = {key}\n")
}

#[test]
fn wg_show_returns_the_values_of_wg_set() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let node = Instance::start(&namespace, folder.path(), &interface(KEY_A));
    let psk = folder.path().join("psk");
    std::fs::write(&psk, KEY_B).unwrap();
    let (psk, peer) = (psk.to_str().unwrap(), unknown_key(1));
    let set = "set %i listen-port 12345 fwmark 0x1234 peer KEY preshared-key PSK endpoint \
               [2001:db8::1]:99 persistent-keepalive 7 allowed-ips 10.0.0.0/8,fd00::/16";
    let set = set.split_whitespace().map(|word| match word {
        "KEY" => &peer,
        "PSK" => psk,
        word => word,
    });
    node.wg(&set.collect::<Vec<_>>());
    let dump = node.wg(&["show", "%i", "dump"]);
    let lines: Vec<Vec<_>> = dump.lines().map(|l| l.split('\t').collect()).collect();
    assert_eq!(lines[0], [KEY_A, &public(KEY_A), "12345", "0x1234"]);
    let allowed = "10.0.0.0/8,fd00::/16";
    assert_eq!(lines[1][..4], [&peer, KEY_B, "[2001:db8::1]:99", allowed]);
    assert_eq!(lines[1][7], "7");
}

#[test]
fn showconf_and_setconf_go_round() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "{}ListenPort = 4321\nFwMark = 0x7\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.0.0.0/24, \
         fd00::/64\nEndpoint = 127.0.0.1:9\n[Peer]\nPublicKey = {}\nPresharedKey = {KEY_B}\n",
        interface(KEY_A),
        unknown_key(1),
        unknown_key(2)
    );
    let node = Instance::start(&namespace, folder.path(), &text);
    let shown = node.wg(&["showconf", "%i"]);
    let other = Instance::start(&namespace, folder.path(), &interface(KEY_B));
    let file = folder.path().join("shown.conf");
    std::fs::write(&file, shown.replace("4321", "4322")).unwrap();
    other.wg(&["setconf", "%i", file.to_str().unwrap()]);
    let again = other.wg(&["showconf", "%i"]);
    assert_eq!(again.replace("4322", "4321"), shown);
    assert!(shown.contains(&unknown_key(2)) && shown.contains("FwMark = 0x7"));
}

#[test]
fn syncconf_leaves_the_peers_that_stay_alone() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let peer = |number| {
        format!(
            "[Peer]\nPublicKey = {}\nAllowedIPs = 10.0.0.{number}/32\n",
            unknown_key(number)
        )
    };
    // Its handshakes go unanswered, but are counted.
    let busy = format!(
        "{}Endpoint = 127.0.0.1:9\nPersistentKeepalive = 5\n",
        peer(1)
    );
    let text = |peers: &str| format!("{}ListenPort = 5555\n{busy}{peers}", interface(KEY_A));
    let node = Instance::start(&namespace, folder.path(), &text(&peer(2)));
    let sent = |status: &Status| {
        let key = unknown_key(1);
        let mut peers = status.peers.iter();
        let peer = peers.find(|peer| peer.public_key == key);
        peer.map_or(0, |peer| peer.traffic.sent_bytes)
    };
    node.wait_for("handshake", |status| sent(status) > 0);
    let before = sent(&node.status());
    let file = folder.path().join("new.conf");
    std::fs::write(&file, text(&peer(3))).unwrap();
    node.wg(&["syncconf", "%i", file.to_str().unwrap()]);
    let peers = node.wg(&["show", "%i", "peers"]);
    let mut peers: Vec<_> = peers.lines().collect();
    peers.sort_unstable();
    let mut expected = [unknown_key(1), unknown_key(3)];
    expected.sort_unstable();
    assert_eq!(peers, expected);
    assert!(sent(&node.status()) >= before);
    assert_eq!(node.status().interface.listen_port, 5555);
}

#[test]
fn addconf_adds_and_remove_removes() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "{}[Peer]\nPublicKey = {}\n",
        interface(KEY_A),
        unknown_key(1)
    );
    let node = Instance::start(&namespace, folder.path(), &text);
    let file = folder.path().join("more.conf");
    std::fs::write(&file, format!("[Peer]\nPublicKey = {}\n", unknown_key(2))).unwrap();
    node.wg(&["addconf", "%i", file.to_str().unwrap()]);
    assert_eq!(node.status().peers.len(), 2);
    node.wg(&["set", "%i", "peer", &unknown_key(1), "remove"]);
    let left: Vec<_> = node
        .status()
        .peers
        .into_iter()
        .map(|p| p.public_key)
        .collect();
    assert_eq!(left, [unknown_key(2)]);
    assert_eq!(node.status().interface.public_key, Some(public(KEY_A)));
}

#[test]
fn a_tunnel_goes_on_at_another_port() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    for protocol in ["wireguard", "native"] {
        let text = |own: &str, port, peer: &str, endpoint: &str| {
            let peer = public(peer);
            format!(
                "private-key = \"{own}\"\nlisten-port = {port}\nprotocol = \
                 \"{protocol}\"\n[[peer]]\npublic-key = \"{peer}\"\n{endpoint}\n"
            )
        };
        let a = Instance::start(&namespace, folder.path(), &text(KEY_A, 6001, KEY_B, ""));
        let endpoint = "endpoint = \"127.0.0.1:6001\"\npersistent-keepalive = 1";
        let b = Instance::start(
            &namespace,
            folder.path(),
            &text(KEY_B, 6002, KEY_A, endpoint),
        );
        a.wait_for("handshake", |s| s.peers[0].latest_handshake.is_some());
        // Told the key that it has, as by `wg syncconf`, it keeps its session.
        let key = seikan_config::parse_private_key(KEY_A).unwrap();
        let key = key.as_bytes().map(|byte| format!("{byte:02x}")).concat();
        let reply = a.ask_uapi(&format!("set=1\nprivate_key={key}\n\n"));
        assert_eq!(reply, "errno=0");
        assert!(a.status().peers[0].cipher.is_some());
        // Taken by the other: refused, and everything stays.
        assert_eq!(a.ask_uapi("set=1\nlisten_port=6002\n\n"), "errno=-98");
        assert_eq!(a.status().interface.listen_port, 6001);
        assert_eq!(b.ask_uapi("set=1\nlisten_port=6003\n\n"), "errno=0");
        let received = |s: &Status| s.peers[0].traffic.received_bytes;
        let before = received(&a.status());
        a.wait_for("roaming", |s| {
            let at = s.peers[0].path.endpoint;
            received(s) > before && at.is_some_and(|at| at.port() == 6003)
        });
        // And back: datagrams to the new port are received.
        let before = received(&b.status());
        let keepalive = format!(
            "set=1\npublic_key={}\npersistent_keepalive_interval=1\n\n",
            hex(&public(KEY_B))
        );
        assert_eq!(a.ask_uapi(&keepalive), "errno=0");
        b.wait_for("data at the new port", |s| received(s) > before);
    }
}

fn hex(key: &str) -> String {
    let key = seikan_config::parse_public_key(key).expect("a key");
    key.as_bytes().map(|byte| format!("{byte:02x}")).concat()
}

#[test]
fn ten_thousand_peers_are_set_and_shown_in_seconds() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let node = Instance::start(&namespace, folder.path(), &interface(KEY_A));
    let memory = || seikan_sys::process::own_memory().expect("memory").resident;
    let before = memory();
    let mut text = interface(KEY_A);
    for i in 0..10_000u32 {
        let (high, low) = (i >> 8, i & 255);
        let prefixes = format!("10.{high}.{low}.0/24, 11.{high}.{low}.1/32, fd00:{i:x}::/64");
        text += &format!(
            "[Peer]\nPublicKey = {}\nAllowedIPs = {prefixes}\n",
            unknown_key(i)
        );
    }
    let file = folder.path().join("many.conf");
    std::fs::write(&file, text).unwrap();
    let timed = |what: &str, work: &dyn Fn() -> String| {
        let begun = Instant::now();
        let text = work();
        let took = begun.elapsed();
        eprintln!("{what}: {took:?}");
        assert!(took < Duration::from_secs(10), "{what} took {took:?}");
        text
    };
    timed("setconf", &|| {
        node.wg(&["setconf", "%i", file.to_str().unwrap()])
    });
    let shown = timed("show", &|| node.wg(&["show", "%i", "allowed-ips"]));
    assert_eq!(shown.lines().count(), 10_000);
    let prefixes = shown.lines().filter_map(|line| line.split_once('\t'));
    assert_eq!(
        prefixes.map(|(_, p)| p.matches('/').count()).sum::<usize>(),
        30_000
    );
    timed("syncconf", &|| {
        node.wg(&["syncconf", "%i", file.to_str().unwrap()])
    });
    timed("status", &|| node.status().peers.len().to_string());
    let grown = memory().saturating_sub(before) >> 20;
    eprintln!("memory: {grown} MiB more, this test's own included");
}

#[test]
fn hostile_clients_disturb_nobody() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let node = Instance::start(&namespace, folder.path(), &interface(KEY_A));
    let sockets = [node.uapi(), node.dirs.control(&node.name)];
    let garbage: Vec<u8> = (0..200_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    for socket in &sockets {
        // Too many, who say nothing.
        let idle: Vec<_> = (0..100).map(|_| UnixStream::connect(socket)).collect();
        drop(idle);
        // Half a request, kept.
        let mut half = UnixStream::connect(socket).unwrap();
        half.write_all(b"set=1\nlisten_po").unwrap();
        // Garbage, and a line without end: refused or cut off, whichever comes first.
        for bytes in [&garbage[..], &vec![b'a'; 200_000], &vec![0; 200_000]] {
            let mut stream = UnixStream::connect(socket).unwrap();
            let timeout = Some(Duration::from_secs(60));
            stream.set_write_timeout(timeout).unwrap();
            stream.set_read_timeout(timeout).unwrap();
            let _ = stream.write_all(bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let mut reply = Vec::new();
            let ended = stream.read_to_end(&mut reply);
            assert!(
                ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset
            );
        }
        // Asks for much and reads nothing.
        let mut deaf = UnixStream::connect(socket).unwrap();
        deaf.set_nonblocking(true).unwrap();
        while deaf.write(b"get=1\n\n{\"cmd\":\"status\"}\n").is_ok() {}
        assert!(node.ask_uapi("get=1\n\n").ends_with("errno=0"));
        assert_eq!(node.status().interface.name, node.name);
        drop(half);
    }
}

#[test]
fn an_invalid_request_gets_an_example() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let node = Instance::start(&namespace, folder.path(), &interface(KEY_A));
    let mut stream = UnixStream::connect(node.dirs.control(&node.name)).unwrap();
    stream
        .write_all(b"{\"cmd\":\"dance\"}\n{\"cmd\":\"status\"}\n")
        .unwrap();
    let mut lines = BufReader::new(stream).lines();
    let mut next =
        || -> serde_json::Value { serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap() };
    let refused = next();
    assert_eq!(refused["ok"], false);
    assert!(
        refused["error"]
            .as_str()
            .unwrap()
            .contains("{\"cmd\":\"status\"}")
    );
    // The connection is still good.
    assert_eq!(next()["status"]["interface"]["name"], node.name);
}

#[test]
fn metrics_are_well_formed_and_slow_scrapes_end() {
    let Some(namespace) = namespace() else { return };
    let folder = tempfile::tempdir().unwrap();
    let text = format!(
        "private-key = \"{KEY_A}\"\nmetrics = \"127.0.0.1:9586\"\n[[peer]]\n\
         name = \"a \\\"b\\\"\"\npublic-key = \"{}\"\nendpoint = \"127.0.0.1:9\"\n\
         persistent-keepalive = 1\n",
        unknown_key(1)
    );
    // The listener belongs to the namespace in which it is bound.
    let (text, slow) = namespace
        .run(|| {
            let node = Instance::start(&namespace, folder.path(), &text);
            node.wait_for("handshake", |s| s.totals.sent_bytes > 0);
            let scrape = |request: &str| {
                let mut stream = TcpStream::connect("127.0.0.1:9586").unwrap();
                stream
                    .set_read_timeout(Some(Duration::from_secs(60)))
                    .unwrap();
                stream.write_all(request.as_bytes()).unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                text
            };
            let text = scrape("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
            assert!(scrape("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
            let begun = Instant::now();
            assert_eq!(scrape("GET /met"), "");
            (text, begun.elapsed())
        })
        .unwrap();
    assert!(slow < Duration::from_secs(10), "{slow:?}");
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("application/openmetrics-text; version=1.0.0"));
    assert!(body.contains("peer_info{"), "{body}");
    assert!(body.contains(r#"name="a \"b\"""#), "{body}");
    let value = |name: &str| -> f64 {
        let line = body.lines().find(|line| line.starts_with(name));
        let value = line.expect(name).rsplit(' ').next().expect("a value");
        value.parse().expect("a number")
    };
    for none in [
        "seikan_port_search_sockets{",
        "seikan_port_search_openers_total{",
        "seikan_peer_port_search_probes_total{",
        "seikan_peer_port_search_failures{",
    ] {
        assert_eq!(value(none), 0.0, "{none}");
    }
    assert!(value("seikan_resident_memory_bytes{") > 1e6);
    // It has used less than a tick of the clock, perhaps.
    assert!(value("seikan_cpu_seconds_total{") < 1000.0);
    check_open_metrics(body);
}

/// Checks the rules of the OpenMetrics text format that an error here could break
/// (<https://github.com/prometheus/OpenMetrics>, specification 1.0).
fn check_open_metrics(body: &str) {
    let body = body.strip_suffix("# EOF\n").expect("ends with EOF");
    let (mut family, mut kind) = (String::new(), String::new());
    let mut seen = std::collections::BTreeSet::new();
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, of) = rest.split_once(' ').unwrap();
            assert!(name.starts_with("seikan_"), "{name}");
            assert!(!name.ends_with("_total"), "{name}");
            assert!(seen.insert(name.to_owned()), "{name} comes twice");
            (family, kind) = (name.into(), of.into());
            continue;
        }
        if line.starts_with("# HELP ") {
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').unwrap();
        let (name, labels) = sample.split_once('{').unwrap();
        assert!(
            labels.contains("interface=\"") && labels.ends_with('}'),
            "{line}"
        );
        let suffix = name.strip_prefix(&family).expect(line);
        let good: &[&str] = match kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "info" => &["_info"],
            "histogram" => &["_sum", "_count", "_bucket"],
            other => panic!("type {other}"),
        };
        assert!(good.contains(&suffix), "{line}");
        let number: f64 = value.parse().expect(line);
        assert!(number >= 0.0, "{line}");
    }
    assert!(seen.len() > 15, "{seen:?}");
}
