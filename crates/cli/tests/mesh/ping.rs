//! `seikan ping`: answers, their path, and changes of the path.

use crate::common::{eventually, stderr};
use crate::mesh::nat::{Mapping, Two};
use crate::mesh::site::{Host, at_a_site};
use crate::schema::{check_json, printed};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

impl Host {
    fn ping(&self, words: &[&str]) -> Output {
        self.run(&[&["ping", "--iface", &self.interface], words].concat())
    }
}

/// A run of `ping --json`, line by line.
struct Pings(Child, std::io::Lines<BufReader<std::process::ChildStdout>>);

impl Pings {
    fn begin(host: &Host, peer: &str) -> Pings {
        let words = ["ping", peer, "--iface", &host.interface, "-i", "0.1"];
        let mut command = host.command(&[&words[..], &["--json"]].concat());
        let mut child = host.netns.spawn_command(&mut command).expect("start");
        let stdout = child.stdout.take().expect("piped");
        Pings(child, BufReader::new(stdout).lines())
    }

    fn next(&mut self) -> Value {
        let line = self.1.next().expect("a line").expect("a line");
        let value = serde_json::from_str(&line).expect(&line);
        check_json("ping", &value);
        value
    }

    /// Returns the next change of the path.
    fn moved(&mut self) -> Value {
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            let line = self.next();
            if !line["path_changed"].is_null() {
                return line["path_changed"].clone();
            }
        }
        panic!("no change of the way");
    }
}

#[test]
fn a_change_of_the_path_is_reported_at_once() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay(0);
        let two = Two::new(site, [Mapping::EndpointIndependent; 2]);
        // The two NATs block each other; the relay is reachable.
        let between = "192.0.2.101";
        for rule in ["daddr", "saddr"] {
            let rule = format!("insert rule inet filter through ip {rule} {between} drop");
            two.nats[0].run_nft(&rule);
        }
        // No packet was sent before: the request itself starts the search for a path.
        let mut pings = Pings::begin(&two.hosts[0], "b.seikan");
        let first = loop {
            let line = pings.next()["ping"].clone();
            if !line["rtt_us"].is_null() {
                break line;
            }
        };
        assert_eq!(first["path"]["relayed"], true, "{first}");
        assert_eq!(first["path"]["relay"], "192.0.2.1:3478", "{first}");
        assert_eq!(first["name"], "b");
        two.nats[0].run_nft("flush chain inet filter through");
        two.nats[0].run_nft("add rule inet filter through accept");
        let direct = pings.moved();
        assert_eq!(direct["to"]["relayed"], false, "{direct}");
        assert_eq!(direct["from"], first["path"]);
        for rule in ["daddr", "saddr"] {
            let rule = format!("insert rule inet filter through ip {rule} {between} drop");
            two.nats[0].run_nft(&rule);
        }
        let back = pings.moved();
        assert_eq!(back["to"]["relayed"], true, "{back}");
        // Ctrl-C: `unshare` and the shell have been replaced by the program.
        let pid = pings.0.id().to_string();
        let killed = Command::new("kill").args(["-INT", &pid]).status();
        assert!(killed.expect("kill").success());
        let sum = loop {
            let line = pings.next();
            if !line["summary"].is_null() {
                break line["summary"].clone();
            }
        };
        assert!(pings.0.wait().expect("an end").success());
        assert!(sum["answered"].as_u64() > Some(1), "{sum}");
        assert_eq!(sum["paths"].as_array().map(Vec::len), Some(2), "{sum}");
    });
}

#[test]
fn a_member_is_pinged_by_name_address_or_key_and_a_stopped_one_gives_no_answer() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let token = site.token(&["--reusable"]);
        let [a, b] = [site.host(), site.host()];
        a.join("a", &token);
        let at_b = b.join("b", &token);
        let (_a, b_runs) = (a.up(), b.up());
        eventually("they know each other", || {
            a.peers() == ["b"] && b.peers() == ["a"]
        });
        let key = a.status()["peers"][0]["public_key"].clone();
        let key = key.as_str().expect("a key");
        // Endpoints may be known a moment after the members.
        eventually("it answers", || a.ping(&["b", "-c", "1"]).status.success());
        for peer in [
            "b",
            "B.seikan",
            &at_b[0].to_string(),
            &at_b[1].to_string(),
            key,
        ] {
            let output = a.ping(&[peer, "-c", "1"]);
            assert!(output.status.success(), "{peer}: {}", stderr(&output));
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("direct: 192.0.2.11:"), "{peer}: {said}");
        }
        let output = a.ping(&["nobody", "-c", "1"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("there is no peer `nobody`"));
        drop(b_runs);
        let output = a.ping(&["b", "-c", "1", "--json"]);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<Value> = said
            .lines()
            .map(|line| printed("ping", line.as_bytes()))
            .collect();
        assert_eq!(lines[0]["ping"]["silence"], "no-answer", "{said}");
    });
}
