//! `seikan relay` and its registration at a coordinator, as a shell sees them; needs no privileges.

mod idle;

use crate::common::passable_folder;
use crate::hostile::service::addresses;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustls::ClientConnection;
use rustls::pki_types::ServerName;
use rustls::version::TLS13;
use seikan_coordinator::Store;
use seikan_proto::mesh::Pin;
use seikan_tls::Certificate;

fn seikan(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    command.args(words).env_remove("SEIKAN_RELAY_SECRET");
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Returns the output of a successful command.
fn good(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).expect("text")
}

/// A service, with its first line of output.
struct Service {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    line: String,
}

impl Service {
    fn start(words: &[&str]) -> Service {
        let mut child = seikan(words).spawn().expect("started");
        let mut out = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        Service { child, out, line }
    }

    /// Stops it as systemd does; returns the rest of its output.
    fn end(mut self) -> String {
        let pid = Pid::from_raw(self.child.id() as i32);
        kill(pid, Signal::SIGTERM).expect("signalled");
        let mut rest = String::new();
        self.out.read_to_string(&mut rest).expect("the rest");
        assert!(self.child.wait().expect("ended").success());
        rest
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

#[test]
fn a_coordinator_accepts_the_printed_command_of_a_relay_and_never_shows_the_secret() {
    let folder = passable_folder();
    let (mesh, relay) = (folder.path().join("mesh"), folder.path().join("relay"));
    // Like the first start of a coordinator.
    drop(Store::open(&mesh.join("mesh.db")).expect("a database"));
    let (mesh, relay) = (text(&mesh), text(&relay));
    let secret = [
        "relay",
        "secret",
        "--dir",
        relay,
        "--host",
        "relay.example.org",
    ];
    let printed = good(seikan(&secret).output().expect("run"));
    let line = printed.lines().last().expect("a line");
    let words: Vec<&str> = line.split(' ').skip(2).chain(["--dir", mesh]).collect();
    assert_eq!(
        words[..4],
        ["coordinator", "relay", "add", "relay.example.org:3478"]
    );
    good(seikan(&words).output().expect("run"));

    let list = |words: &[&str]| {
        let output = seikan(words).args(["--dir", mesh]).output();
        let shown = good(output.expect("run"));
        assert!(!shown.contains("skr_"), "{shown}");
        shown
    };
    let shown = list(&["coordinator", "relays", "--json"]);
    let shown = crate::schema::printed("coordinator relays", shown.as_bytes());
    let expected = serde_json::json!([{"address": "relay.example.org:3478", "kind": "seikan"}]);
    assert_eq!(shown, expected);
    assert!(list(&["coordinator", "audit"]).contains("relay added"));
    let remove = ["coordinator", "relay", "remove", "relay.example.org:3478"];
    list(&remove);
    assert_eq!(list(&["coordinator", "relays"]), "no relay\n");
    let again = seikan(&remove).args(["--dir", mesh]).output();
    assert_eq!(again.expect("run").status.code(), Some(1));

    // A mistyped secret of a Seikan relay is refused, and not printed.
    let add = [
        "coordinator",
        "relay",
        "add",
        "r:1",
        "--secret",
        "skr_hunter2",
        "--dir",
        mesh,
    ];
    let output = seikan(&add).stderr(Stdio::piped()).output().expect("run");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("seikan relay secret") && !error.contains("hunter2"),
        "{error}"
    );
}

#[test]
fn the_printed_command_has_the_tls_port_and_pin_while_tls_is_on() {
    let folder = passable_folder();
    let (mesh, relay) = (folder.path().join("mesh"), folder.path().join("relay"));
    drop(Store::open(&mesh.join("mesh.db")).expect("a database"));
    let (mesh, relay) = (text(&mesh), text(&relay));
    let secret = || {
        let words = ["relay", "secret", "--dir", relay, "--host", "r"];
        let printed = good(seikan(&words).output().expect("run"));
        printed.lines().last().expect("a line").to_owned()
    };
    assert!(!secret().contains("--tls"), "{}", secret());
    let plain = ["relay", "--listen", "127.0.0.1:0", "--dir", relay];
    let by_tls = [&plain[..], &["--tls-listen", "127.0.0.1:0"]].concat();
    let service = Service::start(&by_tls);
    let port = addresses(&service.line).last().expect("an address").port();
    let pin = Certificate::own(Path::new(relay), "", &[])
        .expect("kept")
        .pin();
    let line = secret();
    assert!(
        line.ends_with(&format!(" --tls {port} --pin {pin}")),
        "{line}"
    );
    let words: Vec<&str> = line.split(' ').skip(2).chain(["--dir", mesh]).collect();
    good(seikan(&words).output().expect("run"));
    let list = ["coordinator", "relays", "--dir", mesh];
    let json = seikan(&list).arg("--json").output().expect("run");
    let shown = crate::schema::printed("coordinator relays", good(json).as_bytes());
    let tls = serde_json::json!({"port": port, "pin": pin});
    let expected = serde_json::json!([{"address": "r:3478", "kind": "seikan", "tls": tls}]);
    assert_eq!(shown, expected);
    let shown = good(seikan(&list).output().expect("run"));
    assert!(shown.contains(&format!("port {port}, pinned")), "{shown}");
    service.end();

    // A certificate that systems trust has no pin; without TLS there is no port.
    let file = format!("{relay}/tls.pem");
    let trusted = ["--cert", &file, "--key", &file];
    Service::start(&[&by_tls[..], &trusted].concat()).end();
    assert!(secret().contains(" --tls ") && !secret().contains("--pin"));
    Service::start(&plain).end();
    assert!(!secret().contains("--tls"), "{}", secret());
}

/// Shakes hands with a server; returns the reason if it does not show the certificate with this pin.
fn shake_hands(server: SocketAddr, pin: Pin) -> Result<(), String> {
    let config = seikan_tls::pinned(pin, &[&TLS13]).expect("a configuration");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut client = ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut stream = TcpStream::connect(server).expect("connected");
    while client.is_handshaking() {
        let done = client.complete_io(&mut stream);
        done.map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[test]
fn a_coordinator_and_a_relay_serve_a_renewed_certificate_without_a_restart() {
    let folder = passable_folder();
    let folder = folder.path();
    let make = |name: &str| Certificate::own(&folder.join(name), name, &[]).expect("made");
    let (old, new) = (make("old").pin(), make("new").pin());
    // A folder as Kubernetes makes it: with links, of which the renewal replaces one.
    let point_to = |name: &str| {
        let versions = folder.join("served").join(name);
        fs::create_dir_all(&versions).expect("a folder");
        let file = versions.join("tls.pem");
        fs::copy(folder.join(name).join("tls.pem"), &file).expect("copied");
        let readable = fs::Permissions::from_mode(0o644);
        fs::set_permissions(&file, readable).expect("set");
        let link = folder.join("served/link");
        symlink(name, &link).expect("linked");
        fs::rename(link, folder.join("served/data")).expect("renamed");
    };
    let file = folder.join("served/tls.pem");
    let (mesh, relay) = (folder.join("mesh"), folder.join("relay"));
    let given = ["--cert", text(&file), "--key", text(&file)];
    let tls = ["--tls-listen", "127.0.0.1:0"];
    let services = [
        &["coordinator", "--dir", text(&mesh)][..],
        &[&["relay", "--dir", text(&relay)], &tls[..]].concat(),
    ];
    fs::create_dir(folder.join("served")).expect("a folder");
    symlink("data/tls.pem", &file).expect("linked");
    for words in services {
        point_to("old");
        let service = Service::start(&[words, &["--listen", "127.0.0.1:0"], &given].concat());
        let server = *addresses(&service.line).last().expect("an address");
        point_to("new");
        // The first connection makes it look, the next ones a minute later.
        assert_eq!(shake_hands(server, new), Ok(()), "{words:?}");
        let error = shake_hands(server, old).expect_err("the old one is gone");
        assert!(error.contains(&new.to_string()), "{error}");
        service.end();
    }
}

#[test]
fn a_relay_answers_serves_metrics_and_prints_a_summary_at_the_end() {
    let folder = passable_folder();
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let metrics = free.local_addr().expect("an address").to_string();
    drop(free);
    let dir = text(folder.path());
    let relay = Service::start(&[
        "relay",
        "--listen",
        "127.0.0.1:0",
        "--dir",
        dir,
        "--pairs",
        "10",
        "--metrics",
        &metrics,
    ]);
    let address = addresses(&relay.line);
    let address = address.first();
    let address = *address.unwrap_or_else(|| panic!("an address in {:?}", relay.line));

    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let patience = Some(Duration::from_secs(10));
    socket.set_read_timeout(patience).expect("set");
    // RFC 8489, section 5: a binding request, and an invalid datagram.
    let request = [&[0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x42][..], &[7; 12]].concat();
    socket.send_to(&[4; 100], address).expect("sent");
    socket.send_to(&request, address).expect("sent");
    let mut answer = [0; 100];
    let length = socket.recv(&mut answer).expect("an answer");
    assert_eq!((length, &answer[..2]), (32, &[1, 1][..]));

    // Counters are published at the end of a loop, a moment after the answer.
    let expected = [
        "seikan_relay_answered_total 1",
        "seikan_relay_drops_total{reason=\"unknown_type\"} 1",
    ];
    let mut text = String::new();
    for _ in 0..100 {
        text = scrape(&metrics);
        if expected.iter().all(|line| text.lines().any(|l| l == *line)) {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    for line in expected {
        assert!(text.lines().any(|l| l == line), "{line} in {text}");
    }

    let end = relay.end();
    assert!(
        end.contains("0 datagrams forwarded (0 bytes), 1 dropped as unknown_type"),
        "{end}"
    );
}

fn scrape(metrics: &str) -> String {
    let mut stream = TcpStream::connect(metrics).expect("connected");
    let request = b"GET /metrics HTTP/1.1\r\n\r\n";
    stream.write_all(request).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("received");
    text
}
