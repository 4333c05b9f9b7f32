//! The policy of a mesh, as hosts experience it.

use crate::common::{eventually, stderr};
use crate::mesh::site::{Host, SOON, Site, at_a_site, while_answering};
use crate::schema::printed;
use serde_json::Value;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time in which a change reaches members.
const REACHES_MEMBERS: Duration = Duration::from_secs(3);
/// Time to wait for denied traffic that must not arrive.
const NEVER: Duration = Duration::from_millis(300);
const OPEN: u16 = 8001;
const CLOSED: u16 = 8002;

/// Listens at both ports while the result lives; connections wait in the kernel.
fn listen(host: &Host) -> Vec<TcpListener> {
    let listen = || [OPEN, CLOSED].map(|port| TcpListener::bind(("::", port)).expect("bind"));
    host.netns.run(listen).expect("namespace").into()
}

fn connects(from: &Host, to: IpAddr, port: u16, within: Duration) -> bool {
    let answered = from.netns.run(|| {
        let until = Instant::now() + within;
        loop {
            if TcpStream::connect_timeout(&SocketAddr::new(to, port), NEVER).is_ok() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
        }
    });
    answered.expect("namespace")
}

fn pings(from: &Host, to: IpAddr) -> bool {
    let mut command = Command::new("ping");
    let to = to.to_string();
    command.args(["-n", "-c", "1", "-W", "1", &to]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = from.netns.spawn_command(&mut command).expect("ping");
    child.wait().expect("an end").success()
}

/// Returns the packets of its only peer that the policy dropped, after a check that all packets are
/// accounted for.
fn denied(host: &Host) -> u64 {
    let inbound = &host.status()["peers"][0]["traffic"]["inbound"];
    assert_eq!(inbound["unaccounted"], 0, "{inbound}");
    inbound["drops"]["policy_denied"].as_u64().unwrap_or(0)
}

fn set_policy(site: &Site, text: &str) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), text).expect("written");
    let path = file.path().to_str().expect("UTF-8").to_owned();
    site.administer(&["policy", "set", &path]);
    assert_eq!(site.administer(&["policy", "show"]), text);
}

/// Runs a test with a host tagged `ops` and one tagged `web`, and their addresses.
fn tagged(site: &Site) -> ([Host; 2], [Vec<IpAddr>; 2]) {
    let [a, b] = [site.host(), site.host()];
    let at_a = a.join("a", &site.token(&["--tag", "ops"]));
    let at_b = b.join("b", &site.token(&["--tag", "web"]));
    ([a, b], [at_a, at_b])
}

#[test]
fn members_of_different_tags_reach_only_ports_that_a_rule_opens() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let ([a, b], [at_a, at_b]) = tagged(site);
        let _running = [a.up(), b.up()];
        std::thread::sleep(REACHES_MEMBERS);
        assert!(a.peers().is_empty() && b.peers().is_empty());
        set_policy(site, "allow tag:ops -> tag:web udp/9\n");
        eventually("they know each other", || {
            a.peers() == ["b"] && b.peers() == ["a"]
        });
        let _listening = [listen(&a), listen(&b)];
        while_answering(&[&a, &b], || {
            for (from, to, at) in [(&a, &b, &at_b), (&b, &a, &at_a)] {
                let before = denied(to);
                for address in at {
                    assert!(!connects(from, *address, OPEN, NEVER), "{address}");
                    assert!(!from.reaches(*address, NEVER), "{address}");
                    assert!(!pings(from, *address), "{address}");
                }
                // The policy dropped it, not the tunnel.
                assert!(denied(to) >= before + 6);
            }
            set_policy(site, "# web\nallow tag:ops -> tag:web tcp/8001\n");
            for address in &at_b {
                assert!(connects(&a, *address, OPEN, REACHES_MEMBERS), "{address}");
                assert!(!connects(&a, *address, CLOSED, NEVER), "{address}");
                assert!(!a.reaches(*address, NEVER), "{address}");
                assert!(!pings(&a, *address), "{address}");
            }
            for address in &at_a {
                assert!(!connects(&b, *address, OPEN, NEVER), "{address}");
                assert!(!b.reaches(*address, NEVER), "{address}");
            }
            // UDP: answers to the other side's requests pass.
            set_policy(site, "allow b -> a udp/7\nallow a -> b icmp\n");
            assert!(b.reaches(at_a[0], REACHES_MEMBERS) && b.reaches(at_a[1], REACHES_MEMBERS));
            assert!(pings(&a, at_b[0]) && pings(&a, at_b[1]));
            assert!(!pings(&b, at_a[0]));
            assert!(!a.reaches(at_b[0], NEVER));
            assert!(!connects(&a, at_b[0], OPEN, NEVER), "that rule is gone");
            // A shared tag allows nothing beside rules, and everything without rules.
            site.administer(&["tag", "a", "web"]);
            std::thread::sleep(REACHES_MEMBERS);
            assert!(!connects(&a, at_b[0], CLOSED, NEVER));
            set_policy(site, "# by tags\n");
            assert!(connects(&a, at_b[0], CLOSED, REACHES_MEMBERS));
            assert!(connects(&b, at_a[0], CLOSED, REACHES_MEMBERS));
            site.administer(&["tag", "a", "--none"]);
            eventually("they are gone for each other", || {
                a.peers().is_empty() && b.peers().is_empty()
            });
            assert!(!connects(&b, at_a[0], CLOSED, NEVER));
        });
        let audit = site.administer(&["audit"]);
        for change in ["policy set", "tags set"] {
            assert!(audit.contains(change), "{audit}");
        }
    });
}

#[test]
fn policy_holds_and_is_explained_without_a_coordinator() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let ([a, b], [at_a, at_b]) = tagged(site);
        set_policy(site, "allow tag:ops -> tag:web tcp/8001\n");
        let _a = a.up();
        let first = b.up();
        let explain = |host: &Host, from: &str, to: &str, port: &str| -> Value {
            let explain = [
                "check",
                "--explain",
                from,
                to,
                port,
                "--iface",
                &host.interface,
            ];
            let output = host.run(&[&explain[..], &["--json"]].concat());
            let json = match &output.stdout[..] {
                [] => Value::Null,
                text => printed("coordinator policy explain", text),
            };
            assert_eq!(json["allowed"] == true, output.status.success(), "{json}");
            json
        };
        eventually("it is kept", || {
            !explain(&b, "a", "b", "tcp/8001").is_null()
        });
        // The member also has the peer's endpoint: the coordinator does not send it again.
        let kept = format!("{}/members.json", b.interface);
        let kept = b.folder.join("state").join(kept);
        eventually("its address is kept", || {
            std::fs::read_to_string(&kept).is_ok_and(|text| text.contains("192.0.2.10:"))
        });
        drop(coordinator);
        first.signal("TERM");
        assert_eq!(first.ended().0, Some(0));
        let _b = b.up();
        let _listening = listen(&b);
        eventually("it knows its peer again", || b.peers() == ["a"]);
        // The member sends from another port than before, which the peer learns by the handshake.
        assert!(!pings(&b, at_a[0]));
        assert!(connects(&a, at_b[0], OPEN, SOON));
        assert!(!connects(&a, at_b[0], CLOSED, NEVER));
        let answer = explain(&b, "a", "b", "tcp/8001");
        assert_eq!(answer["rule"], "allow tag:ops -> tag:web tcp/8001");
        assert_eq!(explain(&b, "a", "b", "tcp/8002")["why"], "nothing");
        assert_eq!(explain(&b, "b", "a", "tcp/8001")["why"], "nothing");
        // The administrator gets the same answer.
        let said = site.administer(&["policy", "explain", "a", "b", "tcp/8001"]);
        assert!(said.contains("allow tag:ops -> tag:web tcp/8001"), "{said}");
    });
}

/// A modified member: its file has the other member as a peer, with networks behind it.
#[test]
fn a_rule_opens_the_member_and_nothing_behind_it_nor_groups_nor_broadcasts() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let ([a, b], [at_a, at_b]) = tagged(site);
        set_policy(site, "allow tag:ops -> tag:web *\n");
        let words = |host: &Host, words: &str| {
            let words: Vec<&str> = words.split(' ').collect();
            let mut command = Command::new(words[0]);
            command.args(&words[1..]);
            let mut child = host.netns.spawn_command(&mut command).expect(words[0]);
            assert!(child.wait().expect("an end").success(), "{words:?}");
        };
        // Behind the peer: another network of its host.
        words(&b, "ip link add behind type veth peer name wall");
        words(&b, "ip link set wall up");
        words(&b, "ip link set behind up");
        words(&b, "ip addr add 10.99.0.1/24 dev behind");
        words(&b, "ip addr add fd99::1/64 dev behind nodad");
        let _b = b.up();
        let first = a.up();
        eventually("they know each other", || a.peers() == ["b"]);
        eventually("so do they there", || b.peers() == ["a"]);
        let there = b.status()["interface"].clone();
        let key = there["public_key"].as_str().expect("a key").to_owned();
        let endpoint = format!("192.0.2.11:{}", there["listen_port"]);
        first.signal("TERM");
        first.ended();
        let text = std::fs::read_to_string(a.file()).expect("a configuration");
        let kept = text.lines().filter(|line| {
            ["private-key", "address"]
                .iter()
                .any(|key| line.starts_with(key))
        });
        let nets = r#"["100.80.0.0/12", "10.99.0.0/24", "fd99::/64", "224.0.0.0/4", "ff00::/8", "255.255.255.255/32"]"#;
        let own = format!(
            "{}\n[[peer]]\npublic-key = \"{key}\"\nendpoint = \"{endpoint}\"\nallowed-ips = {nets}\n",
            kept.collect::<Vec<_>>().join("\n")
        );
        std::fs::write(a.file(), own).expect("written");
        let _a = a.up();
        let listening = listen(&b);
        assert!(connects(&a, at_b[0], OPEN, SOON), "its own address");
        for behind in ["10.99.0.1", "fd99::1"] {
            let before = denied(&b);
            let to: IpAddr = behind.parse().expect(behind);
            assert!(!connects(&a, to, OPEN, NEVER), "{behind}");
            eventually("it came and was denied", || denied(&b) > before);
        }
        let receive = || UdpSocket::bind(("0.0.0.0", OPEN)).expect("bind");
        let received = b.netns.run(receive).expect("namespace");
        received.set_read_timeout(Some(NEVER)).expect("timeout");
        let send = || {
            let socket = UdpSocket::bind((at_a[0], 0)).expect("bind");
            socket.set_broadcast(true).expect("set");
            socket
        };
        let sender = a.netns.run(send).expect("namespace");
        let reaches = || received.recv_from(&mut [0; 64]).is_ok();
        sender.send_to(b"you?", (at_b[0], OPEN)).expect("sent");
        assert!(reaches(), "its own address");
        for to in ["100.95.255.255", "224.0.0.1", "255.255.255.255"] {
            let before = denied(&b);
            sender.send_to(b"anybody?", (to, OPEN)).expect(to);
            eventually(to, || denied(&b) > before);
            assert!(!reaches(), "{to}");
        }
        drop(listening);
    });
}

#[test]
fn the_first_rule_denies_everything_else_in_a_mesh_without_tags_and_says_so() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let hosts = [site.host(), site.host(), site.host()];
        let names = ["a", "b", "c"];
        let at: Vec<Vec<IpAddr>> = hosts
            .iter()
            .zip(names)
            .map(|(host, name)| host.join(name, &site.token(&[])))
            .collect();
        let [a, b, c] = &hosts;
        let _running = [a.up(), b.up(), c.up()];
        eventually("all know each other", || {
            hosts.iter().all(|host| host.peers().len() == 2)
        });
        let _listening = listen(b);
        assert!(connects(c, at[1][0], OPEN, SOON));
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "allow a -> b tcp/8001\n").expect("written");
        let path = file.path().to_str().expect("UTF-8");
        let said = site.administer(&["policy", "set", path]);
        assert!(said.contains("closed: 5 pairs\n"), "{said}");
        assert!(said.contains("changed: 1 pair\n  a -> b\n"), "{said}");
        eventually("those alone are left who may talk", || {
            a.peers() == ["b"] && b.peers() == ["a"] && c.peers().is_empty()
        });
        assert!(connects(a, at[1][0], OPEN, SOON));
        assert!(!connects(a, at[1][0], CLOSED, NEVER));
        assert!(!connects(c, at[1][0], OPEN, NEVER));
        eventually("c receives none of them", || {
            let words = ["check", "--explain", "a", "b", "tcp/8001", "--iface"];
            let explained = c.run(&[&words[..], &[&c.interface]].concat());
            !explained.status.success()
        });
        let again = site.administer(&["policy", "set", path]);
        assert!(again.contains("no change"), "{again}");
        std::fs::write(file.path(), "allow * -> * *\n").expect("written");
        let said = site.administer(&["policy", "set", path]);
        assert!(said.contains("opened: 5 pairs\n"), "{said}");
        eventually("all know each other again", || {
            hosts.iter().all(|host| host.peers().len() == 2)
        });
        assert!(connects(c, at[1][0], CLOSED, SOON));
    });
}

/// All namespaces see the file: the verb runs on a member's host, like that of an administrator who
/// is connected through the mesh.
#[test]
fn a_policy_that_takes_something_from_this_host_is_set_after_a_yes_alone() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let [a, b] = [site.host(), site.host()];
        a.join("a", &site.token(&[]));
        b.join("b", &site.token(&[]));
        let _running = [a.up(), b.up()];
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().to_str().expect("UTF-8");
        let store = site.store();
        let set = |text: &str, more: &[&str]| {
            std::fs::write(file.path(), text).expect("written");
            let words = ["coordinator", "policy", "set", path, "--dir", &store];
            a.run(&[&words[..], more].concat())
        };
        let in_force = || site.administer(&["policy", "show"]);
        // Without lost access there is no explain, and no terminal is needed.
        let wide = "allow * -> * *\n";
        let done = set(wide, &[]);
        assert!(done.status.success(), "{}", stderr(&done));
        let narrow = "allow a -> b tcp/1\n";
        let refused = set(narrow, &[]);
        assert_eq!(refused.status.code(), Some(1));
        let said = stderr(&refused);
        assert!(said.contains("b -> a") && said.contains("--yes"), "{said}");
        assert_eq!(in_force(), wide);
        // With a terminal it asks.
        let answered = |answer: &str| {
            let binary = env!("CARGO_BIN_EXE_seikan");
            let line = format!("{binary} coordinator policy set {path} --dir {store}");
            let line = format!("echo {answer} | script -qec '{line}' /dev/null");
            a.run_program("sh", &["-c", &line])
        };
        let no = answered("n");
        let said = String::from_utf8_lossy(&no.stdout);
        assert!(said.contains("[y/N]") && !no.status.success(), "{said}");
        assert_eq!(in_force(), wide);
        assert!(answered("y").status.success());
        assert_eq!(in_force(), narrow);
        set(wide, &[]);
        assert!(set(narrow, &["--yes"]).status.success());
        assert_eq!(in_force(), narrow);
    });
}
