//! The doctor, without a hint, in some scenarios that are easy to distinguish; and stored cases,
//! diagnosed again from their recordings.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::common::skip;
use crate::shape::check_shape;
use seikan_diagnose::Cause;
use seikan_lab::scenario::{Counts, Outcome};

/// A scenario, and a medium severity.
const HANDFUL: [(&str, Option<&str>); 5] = [
    ("tun-queue-overflow", Some("2")),
    ("shaper", Some("60")),
    ("mtu-black-hole", Some("900")),
    ("udp-receive-buffer", Some("6000")),
    ("healthy-paced", None),
];
/// Maximum attempts for a case: other load on the machine spoils it, or is the cause that the
/// doctor names.
const ATTEMPTS: usize = 3;
/// Minimum number of correctly named cases; one may be spoilt in all attempts.
const LEAST_NAMED: usize = 4;

/// Serialises the cases: a load beside them would look like another fault.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns the output of `seikan lab`; `None` (loudly) where the lab cannot run.
fn lab(words: &[&str]) -> Option<Vec<u8>> {
    if !nix::unistd::geteuid().is_root() {
        skip("the lab needs root");
        return None;
    }
    let output = super::lab().args(words).output().expect("seikan");
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("is it installed") || complaint.contains("not found") {
        skip(&complaint);
        return None;
    }
    assert!(output.status.success(), "{complaint}");
    Some(output.stdout)
}

/// Plays a case once; returns whether it was named correctly.
fn is_named(scenario: &str, severity: Option<&str>) -> Option<bool> {
    let fixed = ["--tunnel", "openvpn", "--seconds", "5", "--json"];
    let mut words = [&["run", scenario], &fixed[..]].concat();
    words.extend(severity.iter().flat_map(|value| ["--severity", value]));
    let outcome = lab(&words)?;
    check_shape("lab run", &serde_json::from_slice(&outcome).expect("JSON"));
    let outcome: Outcome = serde_json::from_slice(&outcome).expect("an outcome");
    let right = outcome.counts && outcome.found() == Some(outcome.cause);
    if !right {
        eprintln!("{scenario}: {outcome:?}");
    }
    Some(right)
}

#[test]
fn the_doctor_names_a_handful_of_faults_without_a_hint() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut named = 0;
    for (scenario, severity) in HANDFUL {
        for _ in 0..ATTEMPTS {
            let Some(right) = is_named(scenario, severity) else {
                return;
            };
            if right {
                named += 1;
                break;
            }
        }
    }
    assert!(named >= LEAST_NAMED, "only {named} of {}", HANDFUL.len());
}

#[test]
fn a_stored_case_gets_the_same_diagnosis_again_without_being_played() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (cases, recordings) = (path("cases.jsonl"), path("recordings"));
    let kept = ["--out", &cases, "--recordings", &recordings, "--json"];
    let counts = |words: &[&str]| -> Option<Counts> {
        let mut all = vec!["score", "--classes", "healthy-paced"];
        all.extend(words);
        all.extend(kept);
        let json = lab(&all)?;
        check_shape("lab score", &serde_json::from_slice(&json).expect("JSON"));
        Some(serde_json::from_slice(&json).expect("a count"))
    };
    let Some(played) = counts(&["--cases", "1", "--seconds", "3"]) else {
        return;
    };
    assert_eq!(counts(&["--again"]).as_ref(), Some(&played));

    // The count is of the recording's content, not of its printed form.
    let text = std::fs::read_to_string(&cases).expect("cases");
    let (before, rest) = text
        .split_once("\"diagnosis\":{\"cause\":\"")
        .expect("a diagnosis");
    let (_, after) = rest.split_once('"').expect("its cause");
    let wrong = Cause::MtuMismatch;
    let wrong = format!("{before}\"diagnosis\":{{\"cause\":\"{wrong}\"{after}");
    std::fs::write(&cases, wrong).expect("write");
    assert_eq!(counts(&["--again"]), Some(played));

    let files = std::fs::read_dir(Path::new(&recordings)).expect("recordings");
    for file in files.flatten() {
        std::fs::write(file.path(), "no recording").expect("write");
    }
    let again = super::lab()
        .args(["score", "--again"])
        .args(kept)
        .output()
        .expect("seikan");
    assert_eq!(again.status.code(), Some(2));
}
