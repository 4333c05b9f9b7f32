//! Golden texts: `--help` of every verb, and the shapes of `--json` output.
//!
//! `UPDATE_GOLDEN=1` rewrites the files under `tests/golden` (`make golden`): review the changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::Command;

use crate::common::eventually;
use crate::mesh::site::{Host, SOON, at_a_site, plug, while_answering};
use crate::schema::{check_json, check_type};
use crate::shape::{check_shape, folder, updates};
use seikan_diagnose::Action;

/// Returns the difference between the golden text `name` and `text`, if any.
fn difference(name: &str, text: &str) -> Option<String> {
    let path = folder().join(name);
    if updates() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(&path, text).expect("written");
        return None;
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    if golden == text {
        return None;
    }
    let [before, after] = [&golden[..], text].map(|text| text.lines().collect::<BTreeSet<_>>());
    let gone = golden.lines().filter(|line| !after.contains(line));
    let new = text.lines().filter(|line| !before.contains(line));
    let lines = gone
        .map(|l| format!("- {l}\n"))
        .chain(new.map(|l| format!("+ {l}\n")));
    Some(format!(
        "{}:\n{}",
        path.display(),
        lines.collect::<String>()
    ))
}

/// A gateway's part of a configuration.
const DEVICES: &str = r#"
[gateway]
interface = "lan0"
[[gateway.device]]
name = "plc"
lan = "192.168.1.10"
[[gateway.device]]
name = "camera"
lan = "192.168.1.11"
"#;

/// Headings of lists of verbs.
const LISTS: [&str; 5] = ["Commands:", "Tunnel:", "Mesh:", "Diagnose:", "Tools:"];

/// Returns the help of a verb, at a fixed width, and the verbs below it.
pub fn help(words: &[String]) -> (String, Vec<String>) {
    let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
        .args(words)
        .arg("--help")
        .env("COLUMNS", "100")
        .env("NO_COLOR", "1")
        .output()
        .expect("seikan");
    assert!(output.status.success(), "{words:?}: {output:?}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let mut in_list = false;
    let verbs = text
        .lines()
        .filter(|line| {
            if !line.starts_with(' ') {
                in_list = LISTS.contains(line);
            }
            // A wrapped description is indented further.
            in_list && line.starts_with("  ") && !line.starts_with("   ")
        })
        .filter_map(|line| line.split_whitespace().next())
        .filter(|verb| *verb != "help")
        .map(str::to_owned)
        .collect();
    (text, verbs)
}

#[test]
fn the_help_of_every_verb_is_its_golden_text() {
    let mut known = BTreeSet::new();
    let mut differences = String::new();
    let mut waiting = vec![Vec::new()];
    while let Some(words) = waiting.pop() {
        let (text, verbs) = help(&words);
        let name = [&["seikan".to_owned()], &words[..]].concat().join("-") + ".txt";
        differences.extend(difference(&format!("help/{name}"), &text));
        known.insert(name);
        waiting.extend(verbs.into_iter().map(|verb| [&words[..], &[verb]].concat()));
    }
    assert!(known.len() > 20, "the verbs are not found: {known:?}");
    for file in fs::read_dir(folder().join("help")).expect("a folder") {
        let file = file.expect("a file");
        let name = file.file_name().into_string().expect("UTF-8");
        if !known.contains(&name) {
            if updates() {
                fs::remove_file(file.path()).expect("removed");
            } else {
                differences += &format!("{name}: of a verb that is not there\n");
            }
        }
    }
    assert!(
        differences.is_empty(),
        "the help has changed; if it should, run `make golden`:\n{differences}"
    );
}

#[test]
fn the_json_of_every_action_has_its_golden_shape() {
    let (link, cpus) = (|| "eth0".to_owned(), || vec![0, 1]);
    let actions = [
        Action::QueueLength {
            link: link(),
            packets: 1000,
        },
        Action::Mtu {
            link: link(),
            bytes: 1500,
        },
        Action::Offload {
            link: link(),
            feature: "gro".into(),
            on: true,
        },
        Action::Sysctl {
            name: "net.core.rmem_default".into(),
            value: "212992".into(),
        },
        Action::Rps {
            link: link(),
            queue: 0,
            cpus: cpus(),
        },
        Action::RemoveQdisc { link: link() },
        Action::Nice { pid: 1, nice: -10 },
        Action::Affinity {
            pid: 1,
            cpus: cpus(),
        },
        Action::CpuLimit {
            group: "/sys/fs/cgroup/a".into(),
            cpus: Some(1.0),
        },
        Action::ClampMss {
            link: link(),
            bytes: 1360,
        },
    ];
    let mut kinds = BTreeMap::new();
    for action in actions {
        let kind = match action {
            Action::QueueLength { .. } => "queue-length",
            Action::Mtu { .. } => "mtu",
            Action::Offload { .. } => "offload",
            Action::Sysctl { .. } => "sysctl",
            Action::Rps { .. } => "rps",
            Action::RemoveQdisc { .. } => "remove-qdisc",
            Action::Nice { .. } => "nice",
            Action::Affinity { .. } => "affinity",
            Action::CpuLimit { .. } => "cpu-limit",
            // A new kind needs an example in the list above.
            Action::ClampMss { .. } => "clamp-mss",
        };
        let json = serde_json::to_value(&action).expect("JSON");
        assert_eq!(json["do"], kind);
        check_type("doctor", "Action", &json);
        kinds.insert(kind, json);
    }
    check_shape(
        "doctor actions",
        &serde_json::to_value(kinds).expect("JSON"),
    );
}

#[test]
fn the_json_of_a_coordinator_and_a_member_has_its_golden_shape() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        host.join("host", &site.token(&[]));
        let other = site.host();
        let addresses = other.join("other", &site.token(&[]));
        // A gateway with an approved device and one that waits for approval.
        let at = (&other.netns, "lan0");
        plug(&site.netlink, site.bridge, "lan", at);
        let mut file = OpenOptions::new()
            .append(true)
            .open(other.file())
            .expect("a file");
        file.write_all(DEVICES.as_bytes()).expect("written");
        let _tunnels = [&host, &other].map(Host::up);
        while_answering(&[&other], || assert!(host.reaches(addresses[0], SOON)));
        site.token(&["--reusable", "--tag", "server"]);
        let secret = "--secret=skr_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";
        site.administer(&["relay", "add", "192.0.2.1:3478", secret]);
        eventually("devices are reported", || {
            site.administer(&["devices"]).contains("plc.other")
        });
        site.administer(&["approve-device", "plc.other", "--tag", "plcs"]);
        for list in ["members", "devices", "tokens", "relays", "audit"] {
            let json = site.administer(&[list, "--json"]);
            let json = serde_json::from_str(&json).expect("JSON");
            check_json(&format!("coordinator {list}"), &json);
        }
        let explain = ["policy", "explain", "host", "other", "tcp/22", "--json"];
        let json = serde_json::from_str(&site.administer(&explain)).expect("JSON");
        check_json("coordinator policy explain", &json);
        site.administer(&["tag", "plc.other", "--none"]);
        eventually("the device is known", || {
            host.status()["peers"].to_string().contains("plc.other")
        });
        check_json("status", &host.status());
        let output = host.run(&["netcheck", &host.interface, "--json"]);
        let json = serde_json::from_slice(&output.stdout).expect("JSON");
        check_json("netcheck", &json);
    });
}
