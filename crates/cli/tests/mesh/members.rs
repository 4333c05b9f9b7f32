//! A mesh from the outside: a coordinator and its members, each a namespace at one switch.
//!
//! ```text
//! coordinator 192.0.2.1 --- switch --- 192.0.2.10, .11, .12 ... members
//! ```
#![forbid(unsafe_code)]

mod common;

use common::{Tunnel, eventually, skip, stderr};
use seikan_sys::netlink::Netlink;
use seikan_sys::netns::NetNs;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Where the coordinator listens.
const COORDINATOR: &str = "192.0.2.1:7443";
/// Where members answer.
const ECHO_PORT: u16 = 7;

/// The coordinator's host, which has the switch.
struct Site {
    netns: NetNs,
    netlink: Netlink,
    bridge: u32,
    folder: tempfile::TempDir,
    members: AtomicU32,
}

/// A host that may become a member.
struct Host {
    netns: NetNs,
    interface: String,
    folder: PathBuf,
    card: u32,
    netlink: Netlink,
}

/// Runs a test at a site of its own.
fn at_a_site(test: impl FnOnce(&Site)) {
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
    fn host(&self) -> Host {
        // Interfaces' names are the machine's: `wg` looks for their sockets in one place.
        static ALL: AtomicU32 = AtomicU32::new(0);
        let unique = ALL.fetch_add(1, Ordering::Relaxed);
        let number = self.members.fetch_add(1, Ordering::Relaxed);
        let netns = NetNs::create().expect("a namespace");
        let netlink = netns.netlink().expect("netlink");
        let port = format!("port{number}");
        let peer = Some(netns.as_fd());
        let port = self.netlink.create_veth(&port, "eth0", peer).expect("veth");
        let bridge = Some(self.bridge);
        self.netlink.set_master(port, bridge).expect("a port");
        self.netlink.set_up(port).expect("up");
        let card = netlink.link("eth0").expect("a card").index;
        let address = format!("192.0.2.{}/24", 10 + number);
        let address = address.parse().expect("an address");
        netlink.add_address(card, address).expect("an address");
        netlink.set_up(card).expect("up");
        let interface = format!("m{}x{unique}", std::process::id());
        let folder = self.folder.path().join(&interface);
        fs::create_dir(&folder).expect("a folder");
        Host {
            netns,
            interface,
            folder,
            card,
            netlink,
        }
    }

    fn store(&self) -> String {
        let store = self.folder.path().join("coordinator");
        store.to_str().expect("UTF-8").to_owned()
    }

    /// The coordinator, once it listens.
    fn coordinator(&self) -> Tunnel {
        let store = self.store();
        let words = ["coordinator", "--dir", &store, "--listen", COORDINATOR];
        let mut child = self.spawn(&words);
        let mut line = String::new();
        child.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}");
        child
    }

    fn spawn(&self, words: &[&str]) -> Tunnel {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = self.netns.spawn_command(&mut command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        Tunnel { child, stdout }
    }

    /// What a verb of the coordinator prints.
    fn administer(&self, words: &[&str]) -> String {
        let store = self.store();
        let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
            .arg("coordinator")
            .args(words)
            .args(["--dir", &store])
            .output()
            .expect("start");
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// A token, and the pin of the coordinator's certificate.
    fn token(&self, words: &[&str]) -> [String; 2] {
        let said = self.administer(&[&["token"], words].concat());
        let after = |option: &str| {
            let mut words = said.split_whitespace();
            words.find(|word| *word == option);
            words.next().expect(&said).to_owned()
        };
        [after("--token"), after("--pin")]
    }

    fn members(&self) -> Vec<Value> {
        serde_json::from_str(&self.administer(&["members", "--json"])).expect("JSON")
    }
}

impl Host {
    fn file(&self) -> String {
        let file = self.folder.join(format!("{}.toml", self.interface));
        file.to_str().expect("UTF-8").to_owned()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args(words)
            .env("SEIKAN_RUN_DIR", self.folder.join("run"))
            .env("SEIKAN_STATE_DIR", self.folder.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        let child = self.netns.spawn_command(&mut self.command(words));
        child.expect("start").wait_with_output().expect("an end")
    }

    /// Becomes a member under this name; its addresses.
    fn join(&self, name: &str, [token, pin]: &[String; 2]) -> Vec<IpAddr> {
        let output = self.try_join(name, [token, pin]);
        assert!(output.status.success(), "{}", stderr(&output));
        let text = fs::read_to_string(self.file()).expect("a configuration");
        let line = text.lines().find_map(|l| l.strip_prefix("address = "));
        let nets: Vec<String> = serde_json::from_str(line.expect(&text)).expect("a list");
        let address = |net: &String| net.split('/').next().expect("one").parse().expect("one");
        nets.iter().map(address).collect()
    }

    fn try_join(&self, name: &str, [token, pin]: [&str; 2]) -> Output {
        let (url, file) = (format!("https://{COORDINATOR}"), self.file());
        let words = ["join", &url, "--token", token, "--pin", pin];
        self.run(&[&words[..], &["--name", name, "--iface", &file, "--no-up"]].concat())
    }

    fn up(&self) -> Tunnel {
        let file = self.file();
        let mut command = self.command(&["up", &file]);
        let mut child = self.netns.spawn_command(&mut command).expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut tunnel = Tunnel { child, stdout };
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        assert!(line.contains("is up"), "{line}: {:?}", tunnel.ended());
        tunnel
    }

    fn status(&self) -> Value {
        let output = self.run(&["status", &self.interface, "--json"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// The names of its peers.
    fn peers(&self) -> Vec<String> {
        let status = self.status();
        let peers = status["peers"].as_array().expect("a list").iter();
        let mut names: Vec<String> = peers
            .map(|peer| peer["name"].as_str().unwrap_or("?").to_owned())
            .collect();
        names.sort();
        names
    }

    /// Whether an answer comes from an address in that time; asked for every 20 ms.
    fn hears(&self, from: IpAddr, within: Duration) -> bool {
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
fn while_answering(hosts: &[&Host], test: impl FnOnce()) {
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

const SOON: Duration = Duration::from_secs(10);

#[test]
fn who_joins_is_reached_by_its_virtual_address() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        assert_ne!(at_a, at_b);
        let _running = [a.up(), b.up()];
        while_answering(&[&a, &b], || {
            // IPv4 and IPv6, from either side.
            for (host, addresses) in [(&a, &at_b), (&b, &at_a)] {
                for address in addresses {
                    assert!(host.hears(*address, SOON), "{address}");
                }
            }
        });
        let status = a.status();
        assert_eq!(status["mesh"]["contact"], "connected");
        assert_eq!(status["mesh"]["members"], 1);
        let peer = &status["peers"][0];
        assert_eq!(peer["name"], "b");
        let endpoint = peer["path"]["endpoint"].as_str().expect("an endpoint");
        assert!(endpoint.starts_with("192.0.2.11:"), "{endpoint}");
    });
}

#[test]
fn a_member_that_was_there_before_reaches_a_new_one_within_a_second() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [old, new] = [site.host(), site.host()];
        old.join("old", &token);
        let _old = old.up();
        eventually("the old one is connected", || {
            old.status()["mesh"]["contact"] == "connected"
        });
        let addresses = new.join("new", &token);
        let _new = new.up();
        while_answering(&[&new], || {
            assert!(old.hears(addresses[0], Duration::from_secs(5)));
        });
    });
}

#[test]
fn who_is_revoked_is_let_in_nowhere_within_seconds() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let _running = [a.up(), b.up()];
        while_answering(&[&b], || {
            assert!(a.hears(at_b[0], SOON));
            site.administer(&["revoke", "b"]);
            let until = Instant::now() + Duration::from_secs(3);
            while !a.peers().is_empty() || !b.peers().is_empty() {
                assert!(Instant::now() < until, "{:?} {:?}", a.peers(), b.peers());
                std::thread::sleep(Duration::from_millis(50));
            }
            assert!(!a.hears(at_b[0], Duration::from_millis(300)));
        });
        assert_eq!(b.status()["mesh"]["contact"], "revoked");
        assert_eq!(a.status()["mesh"]["contact"], "connected");
    });
}

#[test]
fn members_go_on_without_their_coordinator_and_start_without_it() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        let _b = b.up();
        let first = a.up();
        while_answering(&[&a, &b], || {
            assert!(a.hears(at_b[0], SOON));
            let kept = a
                .folder
                .join("state")
                .join(format!("{}.members.json", a.interface));
            eventually("the members are kept", || {
                fs::read_to_string(&kept).is_ok_and(|text| text.contains("192.0.2.11"))
            });
            drop(coordinator);
            eventually("the loss is told", || {
                !a.status()["mesh"]["contact"]["lost"].is_null()
            });
            assert!(a.hears(at_b[0], SOON) && b.hears(at_a[0], SOON));
            first.signal("TERM");
            assert_eq!(first.ended().0, Some(0));
            let _again = a.up();
            assert!(a.hears(at_b[0], SOON));
            // And when it is back, they find it.
            let _coordinator = site.coordinator();
            eventually("it is found again", || {
                a.status()["mesh"]["contact"] == "connected"
                    && b.status()["mesh"]["contact"] == "connected"
            });
        });
    });
}

#[test]
fn a_member_whose_address_changed_is_found_where_it_is_now() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let _running = [a.up(), b.up()];
        while_answering(&[&b], || {
            assert!(a.hears(at_b[0], SOON));
            let [old, new] = ["192.0.2.11/24", "192.0.2.200/24"].map(|a| a.parse().expect("one"));
            b.netlink.delete_address(b.card, old).expect("an address");
            b.netlink.add_address(b.card, new).expect("an address");
            // It says so itself, as soon as it has settled.
            assert!(a.hears(at_b[0], Duration::from_secs(5)));
        });
        let endpoint = a.status()["peers"][0]["path"]["endpoint"].clone();
        assert!(
            endpoint.as_str().expect("one").starts_with("192.0.2.200:"),
            "{endpoint}"
        );
    });
}

#[test]
fn tokens_admit_as_they_were_made_and_tell_strangers_nothing() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let once = site.token(&[]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &once);
        let texts = |[token, pin]: &[String; 2]| [token.clone(), pin.clone()];
        let refused = |[token, pin]: [String; 2], name: &str| {
            let output = b.try_join(name, [&token, &pin]);
            assert!(!output.status.success());
            assert!(!std::path::Path::new(&b.file()).exists(), "a file is left");
            stderr(&output)
        };
        let used_up = refused(texts(&once), "b");
        let never = format!("skt_{}", "A".repeat(32));
        let unknown = refused([never, once[1].clone()], "b");
        assert_eq!(used_up, unknown);
        let reusable = site.token(&["--reusable"]);
        let taken = refused(texts(&reusable), "a");
        assert!(taken.contains("name"), "{taken}");
        // Somebody else's certificate.
        let other = "sha256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        let elsewhere = refused([reusable[0].clone(), other.to_owned()], "b");
        assert!(elsewhere.contains("certificate"), "{elsewhere}");
        assert_eq!(site.members().len(), 1);
    });
}

#[test]
fn who_leaves_is_gone_with_all_that_was_written() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        b.join("b", &token);
        let _a = a.up();
        let b_runs = b.up();
        eventually("they know each other", || a.peers() == ["b"]);
        let output = b.run(&["leave", &b.file()]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(b_runs.ended().0, Some(0));
        assert!(!std::path::Path::new(&b.file()).exists());
        eventually("it is told", || a.peers().is_empty());
        let names: Vec<Value> = site.members().iter().map(|m| m["name"].clone()).collect();
        assert_eq!(names, ["a"]);
        // The name is free, the address is not soon another's.
        let again = site.host();
        again.join("b", &token);
    });
}
