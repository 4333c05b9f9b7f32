//! `seikan lab crowd`, with few daemons.

use crate::common::skip;
use seikan_lab::wire::Wire;
use serde_json::Value;

/// Maximum number of wake-ups per second of a daemon that talks to nobody. The tunnel alone has one at
/// most (`an_idle_tunnel_wakes_at_most_once_a_second`), and the mesh asks its coordinator and keeps its
/// address at a NAT. A timer of a second for each member of a mesh would exceed it.
const MOST_WAKEUPS: f64 = 10.0;

#[test]
fn many_daemons_reach_each_other_and_all_is_measured() {
    if let Err(reason) = Wire::availability() {
        return skip(&reason);
    }
    if !nix::unistd::geteuid().is_root() {
        return skip("the lab needs root");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("figures.json");
    let output = super::lab()
        .args(["crowd", "--members", "24", "--real", "16"])
        .args(["--pairs", "4", "--rounds", "1", "--seconds", "1"])
        .args(["--idle", "5", "--json"])
        .arg(&json)
        .output()
        .expect("seikan");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{complaint}");
    let text = std::fs::read_to_string(&json).expect("figures");
    let figures: Value = serde_json::from_str(&text).expect("JSON");
    crate::shape::check_shape("lab crowd", &figures);
    let count = |name: &str| figures[name].as_array().map_or(0, Vec::len);
    assert_eq!([count("first_packet"), count("join_to_answer")], [4, 5]);
    let all_positive = |value: &Value| value.as_f64().is_some_and(|number| number > 0.0);
    for name in ["pairs", "memory", "processor"] {
        let both = figures[name].as_array().expect(name);
        assert!(both.iter().all(all_positive), "{name}: {both:?}");
    }
    for rate in [&figures["still"], &figures["changing"]] {
        assert!(all_positive(&rate["median"]), "{figures}");
    }
    let wakeups = figures["silent_wakeups"].as_f64().expect("a number");
    assert!(wakeups > 0.0 && wakeups <= MOST_WAKEUPS, "{wakeups}");
    assert!(figures["changes"].as_u64() > Some(0), "{figures}");
}
