//! A site: a coordinator, relays and hosts, each in a namespace at one switch or behind a NAT.
//!
//! ```text
//! coordinator, relays 192.0.2.1 --- switch --- 192.0.2.10, .11, .12 ... hosts
//!                                      |------ 192.0.2.100, .101 ... NATs --- 10.0.0.10, .11 ... hosts
//! ```

use crate::common::{Tunnel, eventually, passable_folder, skip, stderr};
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

/// Address of the coordinator.
const COORDINATOR: &str = "192.0.2.1:7443";
/// UDP port at which members echo.
const ECHO_PORT: u16 = 7;
/// File with certificates that the hosts' systems trust, if it exists.
const TRUSTED: &str = "trusted.pem";
/// Initial resolv.conf of a host.
pub const RESOLV_CONF: &str =
    "# By hand.\nsearch corp.example\nnameserver 192.0.2.1\noptions timeout:1\n";
/// Runs a program with a host's files instead of the machine's, and with systemd-resolved's state
/// if the host has it.
const WITH_OWN_FILES: &str = r#"for file in resolv.conf nsswitch.conf hosts passwd group; do
    [ ! -e "$0/$file" ] || [ ! -e /etc/$file ] || mount --bind "$0/$file" /etc/$file || exit 125
done
if [ -e "$0/systemd" ]; then
    # Where systemd does not run, an empty /run gets the directory.
    [ -e /run/systemd ] || { mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/systemd; } || exit 125
    mount --bind "$0/systemd" /run/systemd || exit 125
fi
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
    pub nic: u32,
    pub netlink: Netlink,
}

/// Runs a test with a site of its own.
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
        // The bridge has a fixed address: without one, it takes the lowest of its ports, and
        // changes it with each new port.
        let mac = [2, 0, 0, 0, 0, 1];
        netlink.set_hardware_address(bridge, mac).expect("a MAC");
        let address = "192.0.2.1/24".parse().expect("an address");
        netlink.add_address(bridge, address).expect("an address");
        netlink.set_up(bridge).expect("up");
        Ok(Site {
            netns,
            netlink,
            bridge,
            folder: passable_folder(),
            members: AtomicU32::new(0),
        })
    }

    /// Routes between the site's networks.
    pub fn forward(&self) {
        let forward = || fs::write("/proc/sys/net/ipv4/ip_forward", "1");
        let written = self.netns.run(forward);
        written.expect("namespace").expect("forwarding");
    }

    /// Makes another host at the switch.
    pub fn host(&self) -> Host {
        let number = self.members.fetch_add(1, Ordering::Relaxed);
        let at = (&self.netlink, self.bridge);
        self.host_at(at, &format!("192.0.2.{}/24", 10 + number))
    }

    /// Makes a host at any switch, with this address.
    pub fn host_at(&self, (switch, bridge): (&Netlink, u32), address: &str) -> Host {
        // Names of interfaces are unique on the machine: `wg` looks for their sockets in one
        // directory.
        static ALL: AtomicU32 = AtomicU32::new(0);
        let unique = ALL.fetch_add(1, Ordering::Relaxed);
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        plug(switch, bridge, &format!("port{unique}"), (&netns, "eth0"));
        let nic = netlink.link("eth0").expect("a link").index;
        let address = address.parse().expect("an address");
        netlink.add_address(nic, address).expect("an address");
        netlink.set_up(nic).expect("up");
        let interface = format!("m{}x{unique}", std::process::id());
        let folder = self.folder.path().join(&interface);
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("resolv.conf"), RESOLV_CONF).expect("a file");
        fs::write(folder.join("nsswitch.conf"), "hosts: files dns\n").expect("a file");
        Host {
            netns,
            interface,
            folder,
            nic,
            netlink,
        }
    }

    pub fn store(&self) -> String {
        let store = self.folder.path().join("coordinator");
        store.to_str().expect("UTF-8").to_owned()
    }

    /// Starts the coordinator and waits until it listens.
    pub fn coordinator(&self) -> Tunnel {
        let store = self.store();
        let words = ["coordinator", "--dir", &store, "--listen", COORDINATOR];
        let mut child = self.spawn(&words);
        let mut line = String::new();
        child.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}");
        child
    }

    /// Starts coordinator 1 or 2 of several over etcd, and waits until it listens. Verbs run in the
    /// directory of the last one. All have the certificate of the first.
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
        // A link, so that verbs in the usual directory run there.
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

    /// Starts relay 0 or 1 at the coordinator's host, and adds it to the mesh.
    pub fn relay(&self, number: u16) -> Tunnel {
        let (child, _) = self.start_relay(number, &[]);
        self.add_relay(number, &[]);
        child
    }

    /// Starts relay 0 with TLS as well, and adds it with its own pin or this one.
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
        // Each relay has its own ports.
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

    /// Starts TURN server 0 or 1 at the coordinator's host: coturn, with time-limited credentials.
    /// Adds it to the mesh by `--turn` or `--turns` once it listens.
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

    /// Returns the output of a coordinator's verb.
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
        // In the coordinator's namespace, which has etcd.
        let child = self.netns.spawn_command(&mut command).expect("start");
        let output = child.wait_with_output().expect("an end");
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Returns a token, and the pin of the coordinator's certificate.
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
        let printed = self.administer(&["members", "--json"]);
        let members = crate::schema::printed("coordinator members", printed.as_bytes());
        members.as_array().expect("a list").clone()
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

    /// Returns a program on this host, with a resolv.conf of its own: a member changes it.
    pub fn program(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", WITH_OWN_FILES])
            .arg(&self.folder)
            .arg(program)
            .args(words)
            .env("SEIKAN_RUN_DIR", self.folder.join("run"))
            // A web proxy of this machine is not reachable from the site.
            .env_remove("https_proxy")
            .env_remove("HTTPS_PROXY")
            .env_remove("all_proxy")
            .env_remove("ALL_PROXY")
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

    /// Joins under this name; returns the addresses.
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

    /// Starts a program in the background.
    pub fn start(&self, command: &mut Command) -> Tunnel {
        let mut child = self.netns.spawn_command(command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    pub fn status(&self) -> Value {
        let output = self.run(&["status", &self.interface, "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        crate::schema::printed("status", &output.stdout)
    }

    /// Returns the names of its peers.
    pub fn peers(&self) -> Vec<String> {
        let status = self.status();
        let peers = status["peers"].as_array().expect("a list").iter();
        let mut names: Vec<String> = peers
            .map(|peer| peer["name"].as_str().unwrap_or("?").to_owned())
            .collect();
        names.sort();
        names
    }

    /// Returns whether an address answers in that time; sends every 20 ms.
    pub fn reaches(&self, from: IpAddr, within: Duration) -> bool {
        let answered = self.netns.run(|| {
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
        answered.expect("namespace")
    }
}

/// Connects a namespace to a switch by a new interface.
pub fn plug(switch: &Netlink, bridge: u32, port: &str, (netns, nic): (&NetNs, &str)) {
    let peer = Some(netns.as_fd());
    let port = switch.create_veth(port, nic, peer).expect("veth");
    switch.set_master(port, Some(bridge)).expect("a port");
    switch.set_up(port).expect("up");
}

impl Drop for Host {
    fn drop(&mut self) {
        // Files that a killed tunnel could not remove.
        let _ = fs::remove_file(format!("/var/run/wireguard/{}.sock", self.interface));
    }
}

/// Echoes in a namespace until it is stopped.
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

/// Runs `test` while these hosts echo.
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
        // Also if the test fails; otherwise the hosts would echo forever.
        let _stop = Stop(&stop);
        test();
    });
}

/// Time limit for events that usually take much less.
pub const SOON: Duration = Duration::from_secs(30);
