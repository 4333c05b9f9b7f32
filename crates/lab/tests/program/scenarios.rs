//! Scenarios with the real program, without the doctor.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, skip};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use seikan_lab::scenario::{Fault, Outcome, Site};
use seikan_lab::site::{Hosts, Link};
use seikan_lab::tunnel::Started;
use seikan_lab::wire::{Wire, WireFaults};

/// Plays a scenario; returns `None`, with a message, if the machine cannot.
fn played(words: &[&str]) -> Option<Outcome> {
    if let Err(reason) = Wire::availability() {
        skip(&reason);
        return None;
    }
    if !nix::unistd::geteuid().is_root() {
        skip("the lab needs root");
        return None;
    }
    let output = super::lab()
        .args(["run"])
        .args(words)
        .args(["--seconds", "0", "--json"])
        .output()
        .expect("seikan");
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("is it installed") {
        skip(&complaint);
        return None;
    }
    assert!(output.status.success(), "{complaint}");
    Some(serde_json::from_slice(&output.stdout).expect("an outcome"))
}

#[test]
fn a_shaped_tunnel_carries_the_rate_of_the_shaper() {
    let words = ["shaper", "--tunnel", "seikan-wireguard", "--severity", "40"];
    let Some(outcome) = played(&words) else {
        return;
    };
    // The rate inside the tunnel is below the rate outside.
    assert!((10.0..40.0).contains(&outcome.faulty), "{outcome:?}");
    assert_eq!(outcome.expected, outcome.healthy);
    assert_eq!(outcome.diagnosis, None);
}

#[test]
fn the_machine_is_as_it_was_when_the_lab_is_killed() {
    const SETTING: &str = "/proc/sys/net/core/netdev_budget";
    let read = || std::fs::read_to_string(SETTING).unwrap_or_default();
    if !nix::unistd::geteuid().is_root() {
        return skip("the lab needs root");
    }
    if std::fs::OpenOptions::new()
        .write(true)
        .open(SETTING)
        .is_err()
    {
        return skip("the machine's settings cannot be written");
    }
    let before = read();
    let temporary = tempfile::tempdir().expect("a directory");
    let mut lab = super::lab()
        .env("TMPDIR", temporary.path())
        .args(["run", "napi-budget", "--tunnel", "seikan-native"])
        .args(["--severity", "7", "--seconds", "0", "--keep"])
        .stderr(std::process::Stdio::null())
        .process_group(0)
        .spawn()
        .expect("seikan");
    let comes = |value: &str| {
        let deadline = Instant::now() + Duration::from_secs(40);
        while read().trim() != value && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        read().trim() == value
    };
    let changed = comes("7");
    let sockets = ["a", "b"].map(|end| format!("/var/run/wireguard/sk{}{end}.sock", lab.id()));
    let keys = || {
        let made = std::fs::read_dir(&temporary).expect("read");
        made.count()
    };
    let are_there = || sockets.each_ref().map(|socket| Path::new(socket).exists());
    let served = (are_there(), keys() > 0);
    // All its processes are killed, as by an impatient operator.
    killpg(Pid::from_raw(lab.id() as i32), Signal::SIGKILL).expect("kill");
    lab.wait().expect("wait");
    let set_back = comes(before.trim());
    let deadline = Instant::now() + PATIENCE;
    while (are_there() != [false; 2] || keys() > 0) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let left = (are_there(), keys());
    for socket in &sockets {
        let _ = std::fs::remove_file(socket);
    }
    // In any case, the machine is not left like this.
    let _ = std::fs::write(SETTING, before.trim());
    assert!(changed, "the fault was never made");
    assert!(set_back, "netdev_budget was left at 7");
    assert_eq!((served, left), (([true; 2], true), ([false; 2], 0)));
}

#[test]
fn a_scenario_that_there_is_not_is_refused_with_those_there_are() {
    let output = super::lab().args(["run", "rust"]).output().expect("seikan");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(complaint.contains("tun-queue-overflow"), "{complaint}");
}

#[test]
fn a_wire_carries_as_before_once_its_fault_is_undone() {
    if let Err(reason) = Wire::availability() {
        return skip(&reason);
    }
    let hosts = match Hosts::create(Link::with_faults(WireFaults::default())) {
        Ok(hosts) => hosts,
        Err(error) => return skip(error.to_string()),
    };
    let started = Started::default();
    let site = Site {
        hosts: &hosts,
        tunnel: "raw",
        started: &started,
    };
    let wire = hosts.wire.as_ref().expect("a wire");
    let lost_by_a_datagram = || {
        let before = wire.counts().expect("counts").a_to_b;
        let send = || {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("bind");
            let _ = socket.send_to(b"x", (hosts.b.address, 9));
        };
        hosts.a.run(send).expect("run");
        // The neighbour's address is resolved first, one attempt a second.
        let deadline = Instant::now() + PATIENCE;
        loop {
            let after = wire.counts().expect("counts").a_to_b;
            if after.frames > before.frames {
                return after.lost - before.lost;
            }
            assert!(Instant::now() < deadline, "nothing on the wire");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let fault: Fault = serde_json::from_str(r#"{"kind": "wire-loss"}"#).expect("a fault");
    let applied = fault.apply(100.0, site).expect("apply");
    assert!(lost_by_a_datagram() > 0);
    drop(applied);
    assert_eq!(lost_by_a_datagram(), 0);
}
