//! A published experiment, repeated briefly: its result is confirmed and drawn.

use crate::shape::check_shape;

use crate::common::skip;
use seikan_diagnose::Cause;
use seikan_lab::Experiment;
use seikan_lab::reproduce::Claim;

/// Maximum attempts: other load on the machine spoils a run.
const ATTEMPTS: usize = 3;

#[test]
fn a_queue_of_three_packets_is_slow_again_and_drawn() {
    if !nix::unistd::geteuid().is_root() {
        skip("the lab needs root");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (json, html, svg) = (path("queue.json"), path("queue.html"), path("pictures"));
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let output = super::lab()
            .args(["reproduce", "queue", "--seconds", "0.5", "--rounds", "1"])
            .args(["--json", &json, "--html", &html, "--svg", &svg])
            .output()
            .expect("seikan");
        let complaint = String::from_utf8_lossy(&output.stderr);
        if complaint.contains("the program `openvpn`") {
            skip(&complaint);
            return;
        }
        let text = std::fs::read_to_string(&json).expect(&complaint);
        check_shape("lab reproduce", &serde_json::from_str(&text).expect("JSON"));
        let experiments: Vec<Experiment> = serde_json::from_str(&text).expect("experiments");
        let [experiment] = &experiments[..] else {
            panic!("one was asked for: {}", experiments.len());
        };
        // The source's comparison: OpenVPN with a long queue against a short one, on either link.
        let is_source = |claim: &&Claim| {
            claim.quantity.starts_with("TCP, 1 stream") && claim.better.contains("TAP, 720 packets")
        };
        let slower = experiment.claims.iter().filter(is_source).any(Claim::holds);
        let named = experiment
            .looks
            .iter()
            .filter_map(|look| look.said.as_ref())
            .any(|said| said.cause == Cause::TunQueueOverflow);
        last = format!("{:?} {:?}", experiment.claims, experiment.looks);
        assert_eq!(output.status.success(), experiment.reproduced());
        if slower && named {
            traces_the_slow_queue(experiment);
            let page = std::fs::read_to_string(&html).expect("a page");
            assert!(page.contains("OpenVPN over TAP, 3 packets") && !page.contains("<script"));
            for name in [
                "queue",
                "queue-throughput",
                "queue-latency",
                "queue-openvpn-over-tap-3-packets-sequence",
                "queue-openvpn-over-tap-3-packets-segments",
            ] {
                let picture = std::fs::read_to_string(format!("{svg}/{name}.svg")).expect(name);
                assert!(
                    picture.starts_with("<svg ") && !picture.contains("NaN"),
                    "{name}"
                );
            }
            return;
        }
    }
    panic!("not in {ATTEMPTS} attempts: {last}");
}

/// The driver gets packets, drops some of them with a full queue, and the program reads the others.
fn traces_the_slow_queue(experiment: &Experiment) {
    let list = |title: &str| {
        let mut lists = experiment.lists.iter();
        lists.find(|list| list.title.contains(title)).expect(title)
    };
    let problems = &experiment.problems;
    let calls = |function: &str| -> u64 {
        let mut rows = list("calls of functions").rows.iter();
        let row = rows.find(|row| row[0] == function);
        let row = row.unwrap_or_else(|| panic!("{function} is not called: {problems:?}"));
        row[2].parse().expect("a number")
    };
    let (handed, read) = (calls("tun_net_xmit"), calls("tun_chr_read_iter"));
    // The program also finds out by reading that there is nothing more.
    assert!(handed > 10 && read > 10 && calls("poll") > 0);
    let drops = &list("dropped by the driver").rows;
    let waiting: Vec<i64> = drops
        .iter()
        .map(|row| row[2].parse().expect("a number"))
        .collect();
    // A packet that the program is copying no longer occupies the queue.
    assert!(
        !waiting.is_empty() && waiting.iter().all(|packets| (3..=4).contains(packets)),
        "{waiting:?} {:?}",
        experiment.notes
    );
    let segments = list("the segments of one connection");
    assert_eq!(segments.columns.len(), 3);
    let again = segments
        .rows
        .iter()
        .find(|row| row[0] == "segments sent again");
    let again = again.and_then(|row| row[1].parse::<u64>().ok());
    assert!(again > Some(0), "{segments:?}");
}

#[test]
fn an_unknown_source_is_refused() {
    let output = super::lab()
        .args(["reproduce", "perpetual-motion"])
        .output()
        .expect("seikan");
    assert_eq!(output.status.code(), Some(2));
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("mtu-cipher"), "{complaint}");
}
