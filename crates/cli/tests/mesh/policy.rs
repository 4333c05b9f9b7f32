//! Who may talk to whom, as hosts meet it.

use crate::common::eventually;
use crate::mesh::site::{Host, SOON, Site, at_a_site, while_answering};
use serde_json::Value;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time that a change may take to reach members.
const HEARD: Duration = Duration::from_secs(3);
/// Time in which nothing comes of what is denied.
const NEVER: Duration = Duration::from_millis(300);
const OPEN: u16 = 8001;
const CLOSED: u16 = 8002;

/// Listens at both ports for as long as they are kept; connections wait in the kernel.
fn listen(host: &Host) -> Vec<TcpListener> {
    let listen = || [OPEN, CLOSED].map(|port| TcpListener::bind(("::", port)).expect("bind"));
    host.netns.run(listen).expect("namespace").into()
}

fn connects(from: &Host, to: IpAddr, port: u16, within: Duration) -> bool {
    let asked = from.netns.run(|| {
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
    asked.expect("namespace")
}

fn pings(from: &Host, to: IpAddr) -> bool {
    let mut command = Command::new("ping");
    let to = to.to_string();
    command.args(["-n", "-c", "1", "-W", "1", &to]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = from.netns.spawn_command(&mut command).expect("ping");
    child.wait().expect("an end").success()
}

/// Packets of its one peer that policy kept out, after a look whether all are accounted for.
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

/// A host with the tag `ops` and one with the tag `web`, and their addresses.
fn tagged(site: &Site) -> ([Host; 2], [Vec<IpAddr>; 2]) {
    let [a, b] = [site.host(), site.host()];
    let at_a = a.join("a", &site.token(&["--tag", "ops"]));
    let at_b = b.join("b", &site.token(&["--tag", "web"]));
    ([a, b], [at_a, at_b])
}

#[test]
fn members_of_different_tags_reach_what_a_rule_opens_and_nothing_else() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let ([a, b], [at_a, at_b]) = tagged(site);
        let _running = [a.up(), b.up()];
        eventually("they know each other", || {
            a.peers() == ["b"] && b.peers() == ["a"]
        });
        let _listening = [listen(&a), listen(&b)];
        while_answering(&[&a, &b], || {
            for (from, to, at) in [(&a, &b, &at_b), (&b, &a, &at_a)] {
                let before = denied(to);
                for address in at {
                    assert!(!connects(from, *address, OPEN, NEVER), "{address}");
                    assert!(!from.hears(*address, NEVER), "{address}");
                    assert!(!pings(from, *address), "{address}");
                }
                // It was policy, not the tunnel.
                assert!(denied(to) >= before + 6);
            }
            set_policy(site, "# web\nallow tag:ops -> tag:web tcp/8001\n");
            for address in &at_b {
                assert!(connects(&a, *address, OPEN, HEARD), "{address}");
                assert!(!connects(&a, *address, CLOSED, NEVER), "{address}");
                assert!(!a.hears(*address, NEVER), "{address}");
                assert!(!pings(&a, *address), "{address}");
            }
            for address in &at_a {
                assert!(!connects(&b, *address, OPEN, NEVER), "{address}");
                assert!(!b.hears(*address, NEVER), "{address}");
            }
            // UDP: the answers of what is asked from the other side come in.
            set_policy(site, "allow b -> a udp/7\nallow a -> b icmp\n");
            assert!(b.hears(at_a[0], HEARD) && b.hears(at_a[1], HEARD));
            assert!(pings(&a, at_b[0]) && pings(&a, at_b[1]));
            assert!(!pings(&b, at_a[0]));
            assert!(!a.hears(at_b[0], NEVER));
            assert!(!connects(&a, at_b[0], OPEN, NEVER), "that rule is gone");
            // Another tag, and everything is open.
            site.administer(&["tag", "a", "web"]);
            assert!(connects(&a, at_b[0], CLOSED, HEARD));
            assert!(connects(&b, at_a[0], CLOSED, HEARD));
            site.administer(&["tag", "a", "--none"]);
            std::thread::sleep(HEARD);
            assert!(!connects(&b, at_a[0], CLOSED, NEVER));
        });
        let audit = site.administer(&["audit"]);
        for what in ["policy set", "tags set"] {
            assert!(audit.contains(what), "{audit}");
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
            let question = [
                "check",
                "--explain",
                from,
                to,
                port,
                "--iface",
                &host.interface,
            ];
            let output = host.run(&[&question[..], &["--json"]].concat());
            let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            assert_eq!(json["allowed"] == true, output.status.success(), "{json}");
            json
        };
        eventually("it is kept", || {
            !explain(&b, "a", "b", "tcp/8001").is_null()
        });
        // And where the other is: nobody tells it again.
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
        // From another port than before, of which the other one learns by its handshake.
        assert!(!pings(&b, at_a[0]));
        assert!(connects(&a, at_b[0], OPEN, SOON));
        assert!(!connects(&a, at_b[0], CLOSED, NEVER));
        let answer = explain(&b, "a", "b", "tcp/8001");
        assert_eq!(answer["rule"], "allow tag:ops -> tag:web tcp/8001");
        assert_eq!(explain(&b, "a", "b", "tcp/8002")["why"], "nothing");
        assert_eq!(explain(&b, "b", "a", "tcp/8001")["why"], "nothing");
        // The administrator hears the same.
        let said = site.administer(&["policy", "explain", "a", "b", "tcp/8001"]);
        assert!(said.contains("allow tag:ops -> tag:web tcp/8001"), "{said}");
    });
}
