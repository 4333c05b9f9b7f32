//! `seikan lab nat`, with a few pairs from a file.

use std::process::Output;

use crate::common::skip;
use seikan_lab::nat::{EventReport, NatReport, PathKind};
use seikan_lab::wire::Wire;
use serde::de::DeserializeOwned;

const NATS: &str = r#"
delay-ms = 2
[[nat]]
name = "open"
about = ""
seen = "open"
boxes = []
[[nat]]
name = "masquerade"
about = ""
seen = "endpoint-independent"
boxes = [{ source = "masquerade" }]
[[nat]]
name = "random"
about = ""
seen = "symmetric"
boxes = [{ source = "masquerade random" }]
"#;

/// Runs these expectations; returns `None`, with a message, if the machine cannot.
fn played<R: DeserializeOwned>(expectations: &str, words: &[&str]) -> Option<(Output, R)> {
    if let Err(reason) = Wire::availability() {
        skip(&reason);
        return None;
    }
    if !nix::unistd::geteuid().is_root() {
        skip("the lab needs root");
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let [file, json] = ["plan.toml", "report.json"].map(|name| folder.path().join(name));
    std::fs::write(&file, format!("{NATS}{expectations}")).expect("a file");
    let output = super::lab()
        .args(["nat"])
        .args(words)
        .arg("--file")
        .arg(&file)
        .arg("--json")
        .arg(&json)
        .output()
        .expect("seikan");
    let complaint = String::from_utf8_lossy(&output.stderr);
    let text = std::fs::read_to_string(&json).unwrap_or_else(|_| panic!("{complaint}"));
    let report = serde_json::from_str(&text).expect("JSON");
    crate::shape::check_shape("lab nat", &report);
    Some((output, serde_json::from_value(report).expect("a report")))
}

#[test]
fn linux_maps_per_destination_with_random_and_independently_without() {
    let played = played(
        r#"
        [[expect]]
        path = "direct"
        why = "one port for all"
        pairs = [["masquerade", "masquerade"]]
        [[expect]]
        path = "relay"
        why = "a port for each"
        pairs = [["random", "random"]]
        "#,
        &[],
    );
    let Some((_, report)): Option<(_, NatReport)> = played else {
        return;
    };
    let found: Vec<_> = report.rows.iter().map(|row| row.found).collect();
    assert_eq!(
        found,
        [[PathKind::Direct; 2], [PathKind::Relay; 2]],
        "{report:?}"
    );
    for row in &report.rows {
        for [expected, seen] in &row.seen {
            assert_eq!(expected, seen, "{}", row.cell);
        }
    }
}

#[test]
fn an_unexpected_path_is_reported_and_the_exit_code_is_1() {
    let played = played(
        r#"
        [[expect]]
        path = "relay"
        why = "nobody would say so"
        pairs = [["open", "open"]]
        "#,
        &[],
    );
    let Some((output, report)): Option<(_, NatReport)> = played else {
        return;
    };
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report.rows[0].found, [PathKind::Direct; 2]);
    assert!(report.rows[0].wrong.contains(&"another path".to_owned()));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("nobody would say so"), "{said}");
}

#[test]
fn a_relayed_pair_without_its_only_relay_has_no_path() {
    let played = played(
        r#"
        [[event]]
        name = "killed"
        about = ""
        nats = ["random", "random"]
        happens = "kill-relay"
        path = "relay"
        then = "none"
        gap = 10
        settled = 10
        "#,
        &["--events"],
    );
    let Some((_, report)): Option<(_, EventReport)> = played else {
        return;
    };
    let row = &report.rows[0];
    assert!(row.before.contains(&PathKind::Relay), "{row:?}");
    assert_eq!(row.found, [PathKind::None; 2], "{row:?}");
}
