//! `seikan rotate-key`: replacement of a key while packets flow both ways.

use crate::common::{eventually, stderr};
use crate::mesh::nat::{Mapping, Two};
use crate::mesh::site::{Host, SOON, at_a_site, while_answering};
use seikan_sys::netns::NetNs;
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// Interval of packets.
const EVERY: Duration = Duration::from_millis(10);

impl Host {
    fn public_key(&self) -> String {
        let key = self.status()["interface"]["public_key"].clone();
        key.as_str().expect("a key").to_owned()
    }

    fn rotate_key(&self) {
        let output = self.run(&["rotate-key", &self.file()]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
}

/// Sends a packet every 10 ms for that time; returns those without answer.
fn unanswered(from: &NetNs, to: IpAddr, time: Duration) -> BTreeSet<u32> {
    let answered = from.run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
        socket.set_nonblocking(true).expect("set");
        socket.connect((to, 7)).expect("connect");
        let mut missing = BTreeSet::new();
        let started_at = Instant::now();
        let count = (time.as_millis() / EVERY.as_millis()) as u32;
        // Time for the last answer.
        for number in 0..count + 100 {
            if number < count && socket.send(&number.to_be_bytes()).is_ok() {
                missing.insert(number);
            }
            std::thread::sleep((EVERY * (number + 1)).saturating_sub(started_at.elapsed()));
            let mut buffer = [0; 4];
            while let Ok(4) = socket.recv(&mut buffer) {
                missing.remove(&u32::from_be_bytes(buffer));
            }
        }
        missing
    });
    answered.expect("namespace")
}

#[test]
fn no_packet_is_lost_while_either_end_has_another_key() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let (_a, b_runs) = (a.up(), b.up());
        let before = [&a, &b].map(Host::public_key);
        let mode = |host: &Host| {
            fs::metadata(host.file())
                .expect("a file")
                .permissions()
                .mode()
        };
        let modes = [&a, &b].map(mode);
        while_answering(&[&b], || {
            assert!(a.reaches(at_b[0], SOON));
            let netns = &a.netns;
            let missing = std::thread::scope(|scope| {
                let sending = scope.spawn(|| unanswered(netns, at_b[0], Duration::from_secs(14)));
                for host in [&b, &a, &b] {
                    std::thread::sleep(Duration::from_secs(2));
                    host.rotate_key();
                }
                sending.join().expect("sent")
            });
            assert_eq!(missing, BTreeSet::new());
        });
        // Each knows the other's new key and has a session under it.
        let after = [&a, &b].map(Host::public_key);
        assert!(after[0] != before[0] && after[1] != before[1]);
        for (host, other) in [(&a, &after[1]), (&b, &after[0])] {
            let status = host.status();
            assert_eq!(status["mesh"]["members"], 1);
            assert_eq!(status["peers"].as_array().map(Vec::len), Some(1));
            let peer = &status["peers"][0];
            assert_eq!(peer["public_key"], **other);
            let completed = peer["traffic"]["handshakes"]["completed"].as_u64();
            assert!(completed > Some(3), "{peer}");
        }
        let audit = site.administer(&["audit"]);
        assert_eq!(audit.matches("key changed").count(), 3, "{audit}");
        assert_eq!([&a, &b].map(mode), modes);
        // The file has the key in use.
        b_runs.signal("TERM");
        assert_eq!(b_runs.ended().0, Some(0));
        let _b = b.up();
        assert_eq!(b.public_key(), after[1]);
        while_answering(&[&b], || assert!(a.reaches(at_b[0], SOON)));
    });
}

#[test]
fn an_unregistered_key_is_registered_at_the_next_start() {
    at_a_site(|site| {
        let coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let _a = a.up();
        let b_runs = b.up();
        eventually("they know each other", || a.peers() == ["b"]);
        let before = b.public_key();
        let kept = fs::read_to_string(b.file()).expect("a file");
        drop(coordinator);
        // The coordinator cannot be reached: everything stays as it was.
        let output = b.run(&["rotate-key", &b.file()]);
        assert!(!output.status.success());
        assert!(
            stderr(&output).contains("cannot rotate the key; the old one stays"),
            "{}",
            stderr(&output)
        );
        assert_eq!(fs::read_to_string(b.file()).expect("a file"), kept);
        assert_eq!(b.public_key(), before);
        let _coordinator = site.coordinator();
        // This is a crash after the file was written.
        b_runs.signal("KILL");
        b_runs.ended();
        let line = kept.lines().find(|line| line.starts_with("private-key"));
        let other = format!(
            "private-key = \"{}\"",
            "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEA="
        );
        fs::write(b.file(), kept.replace(line.expect("a key"), &other)).expect("written");
        let _b = b.up();
        assert_ne!(b.public_key(), before);
        while_answering(&[&b], || assert!(a.reaches(at_b[0], SOON)));
        assert_eq!(a.status()["peers"][0]["public_key"], *b.public_key());
    });
}

/// The policy waits for the former key when the key changes in the same answer. The first answer
/// after a start contains all changes since the end.
#[test]
fn a_policy_applies_to_a_key_that_changes_with_it() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let (_a, b_runs) = (a.up(), b.up());
        while_answering(&[&b], || {
            assert!(a.reaches(at_b[0], SOON));
            let former = a.public_key();
            let kept = format!("{}/members.json", b.interface);
            let kept = b.folder.join("state").join(kept);
            eventually("the former key is kept", || {
                fs::read_to_string(&kept).is_ok_and(|text| text.contains(&former))
            });
            b_runs.signal("TERM");
            assert_eq!(b_runs.ended().0, Some(0));
            let file = site.folder().join("policy");
            fs::write(&file, "allow a -> b icmp\n").expect("written");
            site.administer(&["policy", "set", file.to_str().expect("UTF-8")]);
            a.rotate_key();
            let _b = b.up();
            let key = a.public_key();
            eventually("it knows the new key", || {
                b.status()["peers"][0]["public_key"] == *key
            });
            let ping = || {
                let to = at_b[0].to_string();
                let output = a.run_program("ping", &["-n", "-c", "1", "-W", "1", &to]);
                output.status.success()
            };
            eventually("the new key has a session", ping);
            assert!(
                !a.reaches(at_b[0], Duration::from_secs(1)),
                "policy opens no UDP port"
            );
        });
    });
}

#[test]
fn a_gateway_is_to_be_stopped_first_and_has_another_key_then() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let host = site.host();
        host.join("g", &token);
        let file = || fs::read_to_string(host.file()).expect("a file");
        let gateway = "\n[gateway]\ninterface = \"eth0\"\nmode = \"routed\"\n";
        fs::write(host.file(), file() + gateway).expect("written");
        let runs = host.up();
        let (before, kept) = (host.public_key(), file());
        let output = host.run(&["rotate-key", &host.file()]);
        assert!(!output.status.success());
        let said = stderr(&output);
        assert!(
            said.contains("cannot rotate the key") && said.contains("seikan down"),
            "{said}"
        );
        assert_eq!((host.public_key(), file()), (before.clone(), kept));
        runs.signal("TERM");
        runs.ended();
        host.rotate_key();
        let _runs = host.up();
        assert_ne!(host.public_key(), before);
    });
}

#[test]
fn a_pair_at_a_relay_goes_over_to_its_new_port_there() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [Mapping::AddressAndPortDependent; 2]);
        let [a, b] = [&two.hosts[0], &two.hosts[1]];
        let ports = || [a, b].map(|host| host.status()["peers"][0]["path"]["endpoint"].clone());
        while_answering(&[b], || {
            assert!(a.reaches(two.address, SOON));
            let before = ports();
            let (netns, to) = (&a.netns, two.address);
            let missing = std::thread::scope(|scope| {
                // A relay binding is refreshed every 20 s.
                let sending = scope.spawn(move || unanswered(netns, to, Duration::from_secs(30)));
                std::thread::sleep(Duration::from_secs(2));
                b.rotate_key();
                sending.join().expect("sent")
            });
            assert_eq!(missing, BTreeSet::new());
            let after = ports();
            assert!(after[0] != before[0] && after[1] != before[1], "{after:?}");
        });
        assert_eq!(a.status()["peers"][0]["public_key"], *b.public_key());
    });
}
