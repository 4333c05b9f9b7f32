//! The program `seikan-lab` from outside.

mod bench;
mod crude;
mod gateway;
mod nat;
mod pass_through;
mod path;
mod reproduce;
mod scale;
mod scenarios;
mod score;
mod wire;

use std::process::Command;

use serde::de::DeserializeOwned;

/// Returns a command that runs `seikan-lab`.
fn lab() -> Command {
    Command::new(env!("CARGO_BIN_EXE_seikan-lab"))
}

/// Runs `seikan-lab bench` with rounds of a second. Returns whether all loads worked, and the JSON.
fn bench<T: DeserializeOwned>(words: &[&str]) -> (bool, T) {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("bench.json");
    let output = lab()
        .args(["bench", "--seconds", "1", "--rounds", "1"])
        .args(words)
        .arg("--json")
        .arg(&file)
        .output()
        .expect("seikan-lab");
    let written = String::from_utf8_lossy(&output.stderr);
    let json = std::fs::read(&file).unwrap_or_else(|error| panic!("{error}: {written}"));
    let report = serde_json::from_slice(&json).expect("a report");
    (output.status.success(), report)
}
