//! Names of members, on hosts whose programs use resolv.conf.

use crate::common::{Tunnel, eventually, skip};
use crate::mesh::site::{Host, RESOLV_CONF, SOON, at_a_site, while_answering};
use std::fs::{self, OpenOptions};
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Record types (RFC 1035, section 3.2.2).
const A: u8 = 1;
/// Response codes (section 4.1.1).
const NO_ERROR: u8 = 0;
const NAME_ERROR: u8 = 3;
const REFUSED: u8 = 5;

#[test]
fn a_member_is_found_by_its_name_until_it_is_revoked() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        let running = a.up();
        let _b = b.up();
        let names = a.status()["mesh"]["names"].clone();
        assert_eq!(names["by"], "resolv.conf", "{names}");
        eventually("its name is known", || looked_up(&a, "b.seikan") == at_b);
        assert_eq!(looked_up(&a, "B.Seikan"), at_b);
        for address in &at_b {
            let output = a.run_program("getent", &["hosts", &address.to_string()]);
            let said = String::from_utf8(output.stdout).expect("UTF-8");
            assert_eq!(
                said.split_whitespace().nth(1),
                Some("b.seikan"),
                "{address}"
            );
        }
        site.administer(&["revoke", "b"]);
        let until = Instant::now() + Duration::from_secs(3);
        while code(&by_datagram(&a, at_a[0], "b.seikan")) != NAME_ERROR {
            assert!(Instant::now() < until, "its name is still there");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_ne!(a.resolv_conf(), RESOLV_CONF);
        running.signal("TERM");
        assert_eq!(running.ended().0, Some(0));
        assert_eq!(a.resolv_conf(), RESOLV_CONF);
    });
}

#[test]
fn other_names_go_to_the_former_name_server() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let a = site.host();
        let at_a = a.join("a", &token);
        // The server of resolv.conf, 192.0.2.1.
        let bound = site.netns.run(|| {
            let udp = UdpSocket::bind("192.0.2.1:53").expect("bind");
            (udp, TcpListener::bind("192.0.2.1:53").expect("bind"))
        });
        let (udp, tcp) = bound.expect("namespace");
        std::thread::spawn(move || answer_datagrams(&udp));
        std::thread::spawn(move || answer_connections(&tcp));
        let running = a.up();
        let expected: IpAddr = NETWORK_ANSWER.into();
        assert_eq!(looked_up(&a, "www.example.org"), [expected]);
        assert_eq!(
            code(&by_connection(&a, at_a[0], "www.example.org")),
            NO_ERROR
        );
        assert_eq!(
            code(&by_connection(&a, at_a[0], "nobody.seikan")),
            NAME_ERROR
        );
        // The file is written as by a DHCP client for another network.
        let network = "# Generated.\nnameserver 192.0.2.1\n";
        let file = a.folder.join("resolv.conf");
        let mut file = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(file)
            .expect("a file");
        file.write_all(network.as_bytes()).expect("write");
        eventually("it is in the new file", || {
            a.resolv_conf().contains(&at_a[0].to_string())
        });
        assert_eq!(looked_up(&a, "www.example.org"), [expected]);
        running.signal("TERM");
        assert_eq!(running.ended().0, Some(0));
        assert_eq!(a.resolv_conf(), network);
    });
}

#[test]
fn a_name_server_that_cannot_be_added_again_is_reported_once() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let a = site.host();
        a.join("a", &token);
        let running = a.up();
        assert_ne!(a.resolv_conf(), RESOLV_CONF);
        let network = "nameserver 192.0.2.1\noptions rotate\n";
        fs::write(a.folder.join("resolv.conf"), network).expect("write");
        // Two attempts, of one each 5 s.
        std::thread::sleep(Duration::from_secs(12));
        running.signal("TERM");
        let (_, said) = running.ended();
        let of_it = |line: &&str| line.contains("options rotate");
        assert_eq!(said.lines().filter(of_it).count(), 1, "{said}");
    });
}

#[test]
fn systemd_resolved_queries_only_names_of_the_mesh() {
    at_a_site(|site| {
        let Some(program) = on_path("systemd-resolved") else {
            return skip("no systemd-resolved (make deps)");
        };
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let a = site.host();
        let at_a = a.join("a", &token);
        let bound = site
            .netns
            .run(|| UdpSocket::bind("192.0.2.1:53").expect("bind"));
        let udp = bound.expect("namespace");
        std::thread::spawn(move || answer_datagrams(&udp));
        let _resolved = resolved(&a, &program);
        let expected: IpAddr = NETWORK_ANSWER.into();
        eventually("it answers", || {
            looked_up(&a, "www.example.org") == [expected]
        });
        let running = a.up();
        let names = a.status()["mesh"]["names"].clone();
        assert_eq!(names["by"], "systemd-resolved", "{names}");
        assert_eq!(a.resolv_conf(), STUB);
        eventually("its name is known", || looked_up(&a, "a.seikan") == at_a);
        assert!(looked_up(&a, "nobody.seikan").is_empty());
        assert_eq!(looked_up(&a, "www.example.net"), [expected]);
        // A name server that does not exist.
        assert_eq!(code(&by_datagram(&a, at_a[0], "www.example.net")), REFUSED);
        running.signal("TERM");
        assert_eq!(running.ended().0, Some(0));
        // After that, another server answers for names.
        assert_eq!(looked_up(&a, "a.seikan"), [expected]);
    });
}

/// The address at which systemd-resolved answers programs (systemd-resolved.service(8)).
const STUB: &str = "nameserver 127.0.0.53\n";

/// Runs systemd-resolved on a host, with a bus of its own. Other names go to 192.0.2.1.
fn resolved(host: &Host, program: &Path) -> [Tunnel; 2] {
    const USER: u32 = 64_999;
    let file = |name: &str| host.folder.join(name);
    fs::write(file("resolv.conf"), STUB).expect("write");
    for name in ["passwd", "group"] {
        let known = fs::read_to_string(Path::new("/etc").join(name)).expect("a file");
        let rest = if name == "group" {
            ""
        } else {
            "64999::/:/bin/false"
        };
        // The first one counts.
        let known = format!("systemd-resolve:x:64999:{rest}\n{known}");
        fs::write(file(name), known).expect("write");
    }
    let folders = [
        "systemd",
        "systemd/resolve",
        "systemd/resolved.conf.d",
        "bin",
    ];
    for folder in folders {
        fs::create_dir(file(folder)).expect("a folder");
    }
    chown(file("systemd/resolve"), Some(USER), Some(USER)).expect("chown");
    let settings = "[Resolve]\nDNS=192.0.2.1\nFallbackDNS=\nDNSSEC=no\nLLMNR=no\nMulticastDNS=no\n";
    fs::write(file("systemd/resolved.conf.d/test.conf"), settings).expect("write");
    let settings = "<busconfig><listen>unix:path=/run/systemd/bus</listen><auth>EXTERNAL</auth><policy context=\"default\">\
                    <allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/><allow receive_sender=\"*\"/></policy></busconfig>";
    fs::write(file("bus.conf"), settings).expect("write");
    let settings = format!("--config-file={}", file("bus.conf").display());
    let bus = host.start(&mut host.program("dbus-daemon", &["--nofork", &settings]));
    let listens = || file("systemd/bus").exists();
    eventually("the bus is there", listens);
    let at = "DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/systemd/bus";
    let sibling = program.with_file_name("resolvectl");
    let ctl = if sibling.exists() {
        sibling
    } else {
        "/usr/bin/resolvectl".into()
    };
    let script = format!("#!/bin/sh\n{at} exec {} \"$@\"\n", ctl.display());
    fs::write(file("bin/resolvectl"), script).expect("write");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(file("bin/resolvectl"), mode).expect("mode");
    let program = program.to_str().expect("UTF-8");
    [bus, host.start(&mut host.program("env", &[at, program]))]
}

/// Returns the path of a program, without links.
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join(name));
    found.filter_map(|file| file.canonicalize().ok()).next()
}

#[test]
fn a_killed_member_leaves_resolv_conf_as_it_was() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let a = site.host();
        a.join("a", &token);
        let running = a.up();
        assert_ne!(a.resolv_conf(), RESOLV_CONF);
        running.signal("KILL");
        running.ended();
        eventually("it is as it was", || a.resolv_conf() == RESOLV_CONF);
    });
}

#[test]
fn names_are_answered_to_this_host_only() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        let _running = [a.up(), b.up()];
        eventually("its name is known", || looked_up(&a, "b.seikan") == at_b);
        while_answering(&[&a], || {
            assert!(b.reaches(at_a[0], SOON));
            assert_eq!(by_datagram(&b, at_a[0], "b.seikan"), b"");
            assert_eq!(by_connection(&b, at_a[0], "b.seikan"), b"");
        });
        // From another of its interfaces, the host may query.
        let answer = a.netns.run(|| {
            let socket = UdpSocket::bind("192.0.2.10:0").expect("bind");
            exchange(&socket, at_a[0], "b.seikan")
        });
        assert_eq!(code(&answer.expect("namespace")), NO_ERROR);
    });
}

#[test]
fn without_names_everything_else_is_as_with_them() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        let at_a = a.join("a", &token);
        let at_b = b.join("b", &token);
        // One member is configured not to serve names, the other cannot.
        let text = fs::read_to_string(a.file()).expect("a file");
        fs::write(a.file(), format!("{text}names = false\n")).expect("write");
        let taken = b.netns.run(|| UdpSocket::bind("0.0.0.0:53").expect("bind"));
        let _running = [a.up(), b.up()];
        let reason = |host: &Host| host.status()["mesh"]["names"]["off"].to_string();
        assert!(reason(&a).contains("configuration"), "{}", reason(&a));
        assert!(
            reason(&b).contains(&format!("{} port 53", at_b[0])),
            "{}",
            reason(&b)
        );
        drop(taken);
        for host in [&a, &b] {
            assert_eq!(host.resolv_conf(), RESOLV_CONF);
        }
        while_answering(&[&a, &b], || {
            assert!(a.reaches(at_b[0], SOON) && b.reaches(at_a[0], SOON));
        });
    });
}

/// Returns the addresses that a program on a host gets for a name, sorted.
fn looked_up(host: &Host, name: &str) -> Vec<IpAddr> {
    let output = host.run_program("getent", &["ahosts", name]);
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    let first = |line: &str| line.split_whitespace().next()?.parse().ok();
    let mut found: Vec<IpAddr> = said.lines().filter_map(first).collect();
    found.sort();
    found.dedup();
    found
}

/// Returns the response to a query for an A record, or nothing.
fn by_datagram(host: &Host, server: IpAddr, name: &str) -> Vec<u8> {
    let answer = host.netns.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        exchange(&socket, server, name)
    });
    answer.expect("namespace")
}

fn exchange(socket: &UdpSocket, server: IpAddr, name: &str) -> Vec<u8> {
    let patience = Some(Duration::from_secs(1));
    socket.set_read_timeout(patience).expect("timeout");
    let _ = socket.send_to(&query(name), (server, 53));
    let mut answer = [0; 512];
    let length = socket.recv(&mut answer).unwrap_or(0);
    answer[..length].to_vec()
}

fn by_connection(host: &Host, server: IpAddr, name: &str) -> Vec<u8> {
    let answer = host.netns.run(|| {
        let mut stream = TcpStream::connect(SocketAddr::new(server, 53)).expect("a connection");
        stream.set_read_timeout(Some(SOON)).expect("timeout");
        let query = query(name);
        let _ = stream.write_all(&(query.len() as u16).to_be_bytes());
        let _ = stream.write_all(&query);
        let mut length = [0; 2];
        let _ = stream.read_exact(&mut length);
        let mut answer = vec![0; usize::from(u16::from_be_bytes(length))];
        let _ = stream.read_exact(&mut answer);
        answer
    });
    answer.expect("namespace")
}

/// Returns a query (RFC 1035, section 4.1): id 7, recursion desired, one query, class IN.
fn query(name: &str) -> Vec<u8> {
    let mut message = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.extend([0, 0, A, 0, 1]);
    message
}

fn code(answer: &[u8]) -> u8 {
    answer.get(3).map_or(u8::MAX, |flags| flags & 0xf)
}

/// The answer of the network's name server to all queries.
const NETWORK_ANSWER: [u8; 4] = [198, 51, 100, 7];

fn answer_datagrams(socket: &UdpSocket) {
    let mut buffer = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut buffer) {
        let _ = socket.send_to(&answer_to(&buffer[..length]), from);
    }
}

fn answer_connections(listener: &TcpListener) {
    for mut stream in listener.incoming().flatten() {
        let mut length = [0; 2];
        let _ = stream.read_exact(&mut length);
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        let _ = stream.read_exact(&mut query);
        let answer = answer_to(&query);
        let _ = stream.write_all(&[&(answer.len() as u16).to_be_bytes(), &answer[..]].concat());
    }
}

/// Returns a response to a query: [`NETWORK_ANSWER`] for an A record, empty for others.
fn answer_to(query: &[u8]) -> Vec<u8> {
    let end = 12 + query[12..].iter().position(|b| *b == 0).expect("a name") + 5;
    let is_a = query[end - 3] == A;
    let mut answer = query[..end].to_vec();
    answer[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    if is_a {
        // The name of the query, A, IN, TTL 60 s.
        answer.extend([0xc0, 12, 0, A, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(NETWORK_ANSWER);
    }
    answer
}
