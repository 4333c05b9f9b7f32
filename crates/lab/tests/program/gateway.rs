//! The lab's gateway as a program: the verb of the naive encapsulator, and clean-up after an
//! interrupt.

use std::io::Read;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seikan_lab::gateway::site::{LAN, Lan, Site, WAN, on_overlay};
use seikan_lab::site::Host;
use seikan_load::{Ends, LoadError, wait_reachable};
use seikan_ui::Interrupt;

use crate::common::{PATIENCE, skip};

/// A process; killed if the test fails before it ends.
struct Running(Child);

impl Running {
    fn naive(host: &Host, words: &[&str]) -> Self {
        let mut command = super::lab();
        command.args(["naive", "--wan", WAN]).args(words);
        command.stdout(Stdio::piped());
        Self(host.spawn(&mut command).expect("starts"))
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).expect("running");
    }

    fn end(&mut self, patience: Duration) -> std::process::ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("a child") {
                return status;
            }
            assert!(begin.elapsed() < patience, "does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_naive_verb_carries_and_counts_until_a_signal() {
    let site = match Site::create(&Lan::default()) {
        Ok(site) => site,
        Err(error) => return skip(error.to_string()),
    };
    site.route_through_gateway(&on_overlay(2).networks())
        .expect("routes");
    let near = [
        "--peer",
        "10.0.0.2",
        "--lan",
        LAN,
        "--overlay",
        "10.77.0.0/24",
    ];
    let far = [
        "--peer",
        "10.0.0.1",
        "--tun",
        "naive0",
        "--address",
        "10.77.0.2/24",
    ];
    let network = ["--network", "192.168.1.0/24"];
    let mut ends = [
        Running::naive(&site.gateway, &near),
        Running::naive(&site.remote, &[far.as_slice(), &network].concat()),
    ];
    let through = Ends {
        client: site.device.netns(),
        server: site.remote.netns(),
        target: on_overlay(2).of(false),
        sources: &[],
        congestion: None,
        forward: None,
    };
    let patience = PATIENCE;
    wait_reachable(&through, patience, &Interrupt::new(), || {
        Ok::<_, LoadError>(())
    })
    .expect("an answer");
    for end in &mut ends {
        end.signal(Signal::SIGTERM);
        assert!(end.end(patience).success());
        let mut text = String::new();
        let output = end.0.stdout.as_mut().expect("piped");
        output.read_to_string(&mut text).expect("text");
        let counts: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert!(counts["out"].as_u64() > Some(0), "{counts}");
        assert!(counts["arrived"].as_u64() > Some(0), "{counts}");
    }
}

#[test]
fn an_interrupted_run_leaves_no_files_and_says_so() {
    if let Err(error) = Host::create("A", 1) {
        return skip(error.to_string());
    }
    let temporary = tempfile::tempdir().expect("directory");
    let files = || std::fs::read_dir(temporary.path()).expect("read").count();
    let mut command = super::lab();
    command
        .args([
            "gateway",
            "--seconds",
            "60",
            "--rounds",
            "1",
            "--loads",
            "tcp1",
        ])
        .args(["--only", "naive-no-gro"])
        .env("TMPDIR", temporary.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut run = Running(command.spawn().expect("starts"));
    let begin = Instant::now();
    while files() == 0 {
        assert!(begin.elapsed() < PATIENCE, "does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    // In the middle of the load, or before it: everything is removed.
    std::thread::sleep(Duration::from_secs(1));
    run.signal(Signal::SIGINT);
    assert_eq!(run.end(PATIENCE).code(), Some(1));
    assert_eq!(files(), 0);
    let mut text = String::new();
    let output = run.0.stderr.as_mut().expect("piped");
    output.read_to_string(&mut text).expect("text");
    assert!(text.contains("interrupted"), "{text}");
}

/// Whether `seikan lab gateway` with these words succeeds, which it does only if no Seikan row
/// failed.
fn succeeds(words: &[&str]) -> bool {
    let file = tempfile::NamedTempFile::new().expect("file");
    let output = super::lab()
        .args(["gateway", "--seconds", "1", "--rounds", "1", "--json"])
        .arg(file.path())
        .args(words)
        .output()
        .expect("runs");
    let text = std::fs::read_to_string(file.path()).expect("read");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    crate::shape::check_shape("lab gateway", &report);
    let absent = report["absent"].as_array().expect("a list");
    if !absent.is_empty() {
        skip(format!("{absent:?}"));
        return true;
    }
    let problems = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{problems}");
    let rows = report["rows"].as_array().expect("a list");
    let carries = |row: &serde_json::Value| {
        let loads = row["loads"].as_array().expect("a list");
        let speed = |load: &serde_json::Value| load["gbit_per_second"]["median"].as_f64();
        !loads.is_empty() && loads.iter().all(|load| speed(load) > Some(0.02))
    };
    !rows.is_empty() && rows.iter().all(carries)
}

#[test]
fn our_gateway_carries_both_directions_in_both_modes_and_families() {
    if let Err(error) = Host::create("A", 1) {
        return skip(error.to_string());
    }
    let ours = ["--only", "seikan-transparent,seikan-routed"];
    assert!(succeeds(&ours));
    assert!(succeeds(&[ours.as_slice(), &["--ipv6"]].concat()));
}

#[test]
fn our_gateway_serves_many_devices() {
    if let Err(error) = Host::create("A", 1) {
        return skip(error.to_string());
    }
    assert!(succeeds(&[
        "--only",
        "seikan-transparent+1000,seikan-routed+1000",
        "--loads",
        "tcp200",
    ]));
}
