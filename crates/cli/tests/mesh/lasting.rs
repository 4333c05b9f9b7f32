//! Everything that a coordinator has acknowledged survives a kill.

use crate::common::Tunnel;
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::PrivateKey;
use seikan_proto::mesh::{Credential, JoinRequest};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Starts a coordinator on loopback; returns it, its address and its pin.
fn start(folder: &Path) -> (Tunnel, String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_seikan"))
        .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
        .arg(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("read");
    let after = |word: &str| {
        let mut words = line.split([' ', ',', '\n']);
        words.find(|w| *w == word);
        words.find(|w| !w.is_empty()).expect("a word").to_owned()
    };
    (Tunnel { child, stdout }, after("on"), after("pin"))
}

/// Returns the output of a verb.
fn verb(folder: &Path, words: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    let command = command
        .arg("coordinator")
        .args(words)
        .arg("--dir")
        .arg(folder);
    let output = command.output().expect("start");
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn acknowledged_members_survive_a_kill_of_the_coordinator() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let (mut coordinator, mut at, pin) = start(folder);
    let said = verb(folder, &["token", "--reusable"]);
    let mut words = said.split_whitespace();
    words.find(|word| *word == "--token");
    let token = words.next().expect("a token").to_owned();
    let acknowledged = Mutex::new(BTreeSet::new());
    for round in 0..5u64 {
        let (url, pin) = (format!("https://{at}"), pin.parse().expect("a pin"));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (url, token, acknowledged) = (&url, &token, &acknowledged);
                scope.spawn(move || {
                    let url = url.parse().expect("a URL");
                    let client = Client::new(&url, Some(pin), None, WebProxies::default())
                        .expect("a client");
                    for n in 0.. {
                        let name = format!("m{round}-{thread}-{n}");
                        let request = JoinRequest {
                            token: token.parse().expect("a token"),
                            name: name.parse().expect("a name"),
                            public_key: PrivateKey::generate(&mut SystemRandom).public(),
                            credential: Credential::generate(&mut SystemRandom),
                        };
                        // The first without an answer was interrupted by the kill.
                        if wait_for(client.join(&request)).is_err() {
                            return;
                        }
                        acknowledged.lock().expect("no panic").insert(name);
                    }
                });
            }
            // The kill is at another moment each time.
            std::thread::sleep(Duration::from_millis(300 + 37 * round));
            coordinator.signal("KILL");
        });
        coordinator.child.wait().expect("an end");
        (coordinator, at, _) = start(folder);
        let members: Vec<serde_json::Value> =
            serde_json::from_str(&verb(folder, &["members", "--json"])).expect("JSON");
        let names = members
            .iter()
            .map(|m| m["name"].as_str().expect("a name").to_owned());
        let known: BTreeSet<String> = names.collect();
        let acknowledged = acknowledged.lock().expect("no panic");
        let lost: Vec<_> = acknowledged.difference(&known).collect();
        assert!(lost.is_empty(), "{lost:?} of {}", acknowledged.len());
        assert!(
            acknowledged.len() > 10 * round as usize,
            "it was killed at work"
        );
    }
}
