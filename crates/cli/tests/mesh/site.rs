//! A site: a coordinator, relays and hosts, each a namespace at one switch, or behind a NAT that is at it.
//!
//! ```text
//! coordinator, relays 192.0.2.1 --- switch --- 192.0.2.10, .11, .12 ... hosts
//!                                      |------ 192.0.2.100, .101 ... NATs --- 10.0.0.10, .11 ... hosts
//! ```

use crate::common::{Tunnel, eventually, skip, stderr};
use seikan_sys::netlink::Netlink;
use seikan_sys::netns::NetNs;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Where the coordinator listens.
const COORDINATOR: &str = "192.0.2.1:7443";
/// Where members answer.
const ECHO_PORT: u16 = 7;
/// Certificates that hosts' systems trust, if there is this file.
const TRUSTED: &str = "trusted.pem";
/// What a host's resolv.conf says at first.
pub const RESOLV_CONF: &str =
    "# By hand.\nsearch corp.example\nnameserver 192.0.2.1\noptions timeout:1\n";
/// Runs a program with a host's files in place of the machine's, and with systemd-resolved's state if the host has it.
const WITH_OWN_FILES: &str = r#"for file in resolv.conf nsswitch.conf passwd group; do
    [ ! -e "$0/$file" ] || [ ! -e /etc/$file ] || mount --bind "$0/$file" /etc/$file || exit 125
done
[ ! -e "$0/systemd" ] || mount --bind "$0/systemd" /run/systemd || exit 125
PATH="$0/bin:$PATH" exec "$@""#;

/// The coordinator's host, which has the switch.
pub struct Site {
    pub netns: NetNs,
    pub netlink: Netlink,
    pub bridge: u32,
    folder: tempfile::TempDir,
    members: AtomicU32,
}

/// A host that may become a member.
pub struct Host {
    pub netns: NetNs,
    pub interface: String,
    pub folder: PathBuf,
    pub card: u32,
    pub netlink: Netlink,
}

/// Runs a test at a site of its own.
pub fn at_a_site(test: impl FnOnce(&Site)) {
    if !std::path::Path::new("/dev/net/tun").exists() {
        return skip("no /dev/net/tun");
    }
    match Site::create() {
        Ok(site) => test(&site),
        Err(reason) => skip(&reason),
    }
}

impl Site {
    fn create() -> Result<Site, String> {
        let netns = NetNs::create().map_err(|e| e.to_string())?;
        let netlink = netns.netlink().map_err(|e| e.to_string())?;
        let bridge = netlink.create_bridge("switch").map_err(|e| e.to_string())?;
        // Its own, or it has another each time that a port with a lower one comes, and its neighbours wait for it in vain.
        let mac = [2, 0, 0, 0, 0, 1];
        netlink.set_hardware_address(bridge, mac).expect("a MAC");
        let address = "192.0.2.1/24".parse().expect("an address");
        netlink.add_address(bridge, address).expect("an address");
        netlink.set_up(bridge).expect("up");
        Ok(Site {
            netns,
            netlink,
            bridge,
            folder: tempfile::tempdir().expect("a folder"),
            members: AtomicU32::new(0),
        })
    }

    /// Another host at the switch.
    pub fn host(&self) -> Host {
        let number = self.members.fetch_add(1, Ordering::Relaxed);
        let at = (&self.netlink, self.bridge);
        self.host_at(at, &format!("192.0.2.{}/24", 10 + number))
    }

    /// A host at any switch, with this address.
    pub fn host_at(&self, (switch, bridge): (&Netlink, u32), address: &str) -> Host {
        // Interfaces' names are the machine's: `wg` looks for their sockets in one place.
        static ALL: AtomicU32 = AtomicU32::new(0);
        let unique = ALL.fetch_add(1, Ordering::Relaxed);
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        plug(switch, bridge, &format!("port{unique}"), (&netns, "eth0"));
        let card = netlink.link("eth0").expect("a card").index;
        let address = address.parse().expect("an address");
        netlink.add_address(card, address).expect("an address");
        netlink.set_up(card).expect("up");
        let interface = format!("m{}x{unique}", std::process::id());
        let folder = self.folder.path().join(&interface);
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("resolv.conf"), RESOLV_CONF).expect("a file");
        fs::write(folder.join("nsswitch.conf"), "hosts: files dns\n").expect("a file");
        Host {
            netns,
            interface,
            folder,
            card,
            netlink,
        }
    }

    pub fn store(&self) -> String {
        let store = self.folder.path().join("coordinator");
        store.to_str().expect("UTF-8").to_owned()
    }

    /// The coordinator, once it listens.
    pub fn coordinator(&self) -> Tunnel {
        let store = self.store();
        let words = ["coordinator", "--dir", &store, "--listen", COORDINATOR];
        let mut child = self.spawn(&words);
        let mut line = String::new();
        child.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}");
        child
    }

    /// One of several coordinators over etcd, number 1 or 2, once it listens; the verbs are said in the folder of the last. All of them have
    /// the certificate of the first.
    pub fn shared_coordinator(&self, number: u8, etcd: &str) -> Tunnel {
        if number > 1 {
            let address = format!("192.0.2.{number}/24").parse().expect("an address");
            let added = self.netlink.add_address(self.bridge, address);
            added.expect("an address");
        }
        let folder = self.folder.path().join(format!("coordinator{number}"));
        fs::create_dir(&folder).expect("a folder");
        let first = self.folder.path().join("coordinator1/tls.pem");
        if first.exists() {
            fs::copy(first, folder.join("tls.pem")).expect("copied");
        }
        let store = self.store();
        // A link, so that what is said in the usual place is said there.
        let _ = fs::remove_file(&store);
        std::os::unix::fs::symlink(&folder, &store).expect("a link");
        let address = format!("192.0.2.{number}:7443");
        let folder = folder.to_str().expect("UTF-8");
        let words = ["coordinator", "--dir", folder, "--listen", &address];
        let shared = ["--advertise", &address, "--etcd", etcd];
        let mut child = self.spawn(&[&words[..], &shared].concat());
        let mut line = String::new();
        child.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}: {:?}", child.ended());
        child
    }

    pub fn folder(&self) -> &std::path::Path {
        self.folder.path()
    }

    /// A relay at the coordinator's host, number 0 or 1, known to the mesh from when it listens.
    pub fn relay(&self, number: u16) -> Tunnel {
        let (child, _) = self.start_relay(number, &[]);
        self.add_relay(number, &[]);
        child
    }

    /// Relay 0, which is reached by TLS as well: with its own certificate, or members are told of this pin.
    pub fn relay_by_tls(&self, pin: Option<&str>) -> Tunnel {
        let (child, folder) = self.start_relay(0, &["--tls-listen", "[::]:443"]);
        let noted = fs::read_to_string(folder.join("tls")).expect("a note");
        let (port, own) = noted.trim().split_once(' ').expect("port and pin");
        self.add_relay(0, &["--tls", port, "--pin", pin.unwrap_or(own)]);
        child
    }

    fn start_relay(&self, number: u16, more: &[&str]) -> (Tunnel, PathBuf) {
        let path = self.folder.path().join(format!("relay{number}"));
        let folder = path.to_str().expect("UTF-8");
        let listen = format!("[::]:{}", 3478 + number);
        // Each its own ports.
        let first = 40_000 + 1000 * number;
        let ports = format!("{first}-{}", first + 999);
        let words = [
            "relay", "--dir", folder, "--listen", &listen, "--ports", &ports,
        ];
        let mut child = self.spawn(&[&words[..], more].concat());
        let mut line = String::new();
        child.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}: {:?}", child.ended());
        (child, path)
    }

    fn add_relay(&self, number: u16, more: &[&str]) {
        let secret = self.folder.path().join(format!("relay{number}/secret"));
        let secret = fs::read_to_string(secret).expect("a secret");
        let address = format!("192.0.2.1:{}", 3478 + number);
        let add = ["relay", "add", &address, "--secret", secret.trim()];
        self.administer(&[&add[..], more].concat());
    }

    /// A TURN server at the coordinator's host, number 0 or 1: coturn, which takes tickets by its REST API. Known to the mesh as this
    /// kind of a relay, `--turn` or `--turns`, from when it listens.
    pub fn coturn(&self, number: u16, kind: &str) -> Tunnel {
        let folder = self.folder.path().join(format!("coturn{number}"));
        fs::create_dir(&folder).expect("a folder");
        let (port, tls_port) = (5478 + number, 5349 + number);
        let first = 44_000 + 1000 * number;
        let host = vec!["192.0.2.1".to_owned()];
        let own = rcgen::generate_simple_self_signed(host).expect("a certificate");
        let file = |name: &str| folder.join(name).display().to_string();
        fs::write(file("cert"), own.cert.pem()).expect("a file");
        fs::write(file("key"), own.signing_key.serialize_pem()).expect("a file");
        fs::write(self.folder.path().join(TRUSTED), own.cert.pem()).expect("a file");
        let lines = format!(
            "listening-ip=192.0.2.1\nrelay-ip=192.0.2.1\nlistening-port={port}\ntls-listening-port={tls_port}\n\
             min-port={first}\nmax-port={}\nuse-auth-secret\nstatic-auth-secret=north\nrealm=mesh\n\
             no-cli\nfingerprint\ncert={}\npkey={}\npidfile={}\nuserdb={}\nlog-file={}\nsimple-log\nno-stdout-log\n",
            first + 999,
            file("cert"),
            file("key"),
            file("pid"),
            file("db"),
            file("log"),
        );
        fs::write(folder.join("conf"), lines).expect("a file");
        let mut command = Command::new("turnserver");
        command.arg("-c").arg(folder.join("conf"));
        let child = self.start(&mut command);
        let listens = || {
            let connected = self.netns.run(|| TcpStream::connect(("192.0.2.1", port)));
            connected.expect("namespace").is_ok()
        };
        eventually("coturn listens", listens);
        let port = if kind == "--turns" { tls_port } else { port };
        let address = format!("192.0.2.1:{port}");
        self.administer(&["relay", "add", &address, kind, "--secret", "north"]);
        child
    }

    fn spawn(&self, words: &[&str]) -> Tunnel {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        self.start(command.args(words))
    }

    fn start(&self, command: &mut Command) -> Tunnel {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = self.netns.spawn_command(command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    /// What a verb of the coordinator prints.
    pub fn administer(&self, words: &[&str]) -> String {
        let store = self.store();
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .arg("coordinator")
            .args(words)
            .args(["--dir", &store])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // Here, where etcd is.
        let child = self.netns.spawn_command(&mut command).expect("start");
        let output = child.wait_with_output().expect("an end");
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// A token, and the pin of the coordinator's certificate.
    pub fn token(&self, words: &[&str]) -> [String; 2] {
        let said = self.administer(&[&["token"], words].concat());
        let after = |option: &str| {
            let mut words = said.split_whitespace();
            words.find(|word| *word == option);
            words.next().expect(&said).to_owned()
        };
        [after("--token"), after("--pin")]
    }

    pub fn members(&self) -> Vec<Value> {
        serde_json::from_str(&self.administer(&["members", "--json"])).expect("JSON")
    }
}

impl Host {
    pub fn file(&self) -> String {
        let file = self.folder.join(format!("{}.toml", self.interface));
        file.to_str().expect("UTF-8").to_owned()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_seikan"), words)
    }

    /// A program on this host, whose resolv.conf is not the machine's: a member changes it.
    pub fn program(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", WITH_OWN_FILES])
            .arg(&self.folder)
            .arg(program)
            .args(words)
            .env("SEIKAN_RUN_DIR", self.folder.join("run"))
            .env("SEIKAN_STATE_DIR", self.folder.join("state"))
            .env("SSL_CERT_FILE", self.folder.with_file_name(TRUSTED))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.run_program(env!("CARGO_BIN_EXE_seikan"), words)
    }

    pub fn run_program(&self, program: &str, words: &[&str]) -> Output {
        let child = self.netns.spawn_command(&mut self.program(program, words));
        child.expect("start").wait_with_output().expect("an end")
    }

    pub fn resolv_conf(&self) -> String {
        fs::read_to_string(self.folder.join("resolv.conf")).expect("a file")
    }

    /// Becomes a member under this name; its addresses.
    pub fn join(&self, name: &str, [token, pin]: &[String; 2]) -> Vec<IpAddr> {
        let output = self.try_join(name, [token, pin]);
        assert!(output.status.success(), "{}", stderr(&output));
        let text = fs::read_to_string(self.file()).expect("a configuration");
        let line = text.lines().find_map(|l| l.strip_prefix("address = "));
        let nets: Vec<String> = serde_json::from_str(line.expect(&text)).expect("a list");
        let address = |net: &String| net.split('/').next().expect("one").parse().expect("one");
        nets.iter().map(address).collect()
    }

    pub fn try_join(&self, name: &str, [token, pin]: [&str; 2]) -> Output {
        let (url, file) = (format!("https://{COORDINATOR}"), self.file());
        let words = ["join", &url, "--token", token, "--pin", pin];
        self.run(&[&words[..], &["--name", name, "--iface", &file, "--no-up"]].concat())
    }

    pub fn up(&self) -> Tunnel {
        let file = self.file();
        let mut tunnel = self.start(&mut self.command(&["up", &file]));
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}: {:?}", tunnel.ended());
        tunnel
    }

    /// A program that goes on.
    pub fn start(&self, command: &mut Command) -> Tunnel {
        let mut child = self.netns.spawn_command(command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    pub fn status(&self) -> Value {
        let output = self.run(&["status", &self.interface, "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The names of its peers.
    pub fn peers(&self) -> Vec<String> {
        let status = self.status();
        let peers = status["peers"].as_array().expect("a list").iter();
        let mut names: Vec<String> = peers
            .map(|peer| peer["name"].as_str().unwrap_or("?").to_owned())
            .collect();
        names.sort();
        names
    }

    /// Whether an answer comes from an address in that time; asked for every 20 ms.
    pub fn hears(&self, from: IpAddr, within: Duration) -> bool {
        let asked = self.netns.run(|| {
            let own: IpAddr = match from {
                IpAddr::V4(_) => [0; 4].into(),
                IpAddr::V6(_) => [0; 16].into(),
            };
            let socket = UdpSocket::bind((own, 0)).expect("bind");
            let pause = Some(Duration::from_millis(20));
            socket.set_read_timeout(pause).expect("timeout");
            let until = Instant::now() + within;
            let mut buffer = [0; 64];
            while Instant::now() < until {
                let _ = socket.send_to(b"are you there?", SocketAddr::new(from, ECHO_PORT));
                if socket.recv_from(&mut buffer).is_ok() {
                    return true;
                }
            }
            false
        });
        asked.expect("namespace")
    }
}

/// Gives a namespace a card at a switch.
pub fn plug(switch: &Netlink, bridge: u32, port: &str, (netns, card): (&NetNs, &str)) {
    let peer = Some(netns.as_fd());
    let port = switch.create_veth(port, card, peer).expect("veth");
    switch.set_master(port, Some(bridge)).expect("a port");
    switch.set_up(port).expect("up");
}

impl Drop for Host {
    fn drop(&mut self) {
        // What a killed tunnel could not remove.
        let _ = fs::remove_file(format!("/var/run/wireguard/{}.sock", self.interface));
    }
}

/// Answers in a namespace until told to stop.
fn echo(netns: &NetNs, stop: &AtomicBool) {
    let answering = netns.run(|| {
        let socket = UdpSocket::bind(("::", ECHO_PORT)).expect("bind");
        let pause = Some(Duration::from_millis(20));
        socket.set_read_timeout(pause).expect("timeout");
        let mut buffer = [0; 64];
        while !stop.load(Ordering::Relaxed) {
            if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..length], from);
            }
        }
    });
    answering.expect("namespace");
}

/// Runs `test` while these hosts answer.
pub fn while_answering(hosts: &[&Host], test: impl FnOnce()) {
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for host in hosts {
            let (netns, stop) = (&host.netns, &stop);
            scope.spawn(move || echo(netns, stop));
        }
        // Also when the test fails, or the hosts would answer for ever.
        let _stop = Stop(&stop);
        test();
    });
}

/// Time for what should take much less.
pub const SOON: Duration = Duration::from_secs(30);
