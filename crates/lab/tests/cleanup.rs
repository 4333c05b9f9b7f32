//! Nothing is left behind: programs, interfaces and files of a tunnel go with it in every case.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use seikan_lab::process::Process;
use seikan_lab::site::Host;
use seikan_lab::site::{Hosts, Link};
use seikan_lab::tunnel::{Started, Tunnel, start};
use seikan_lab::{LabError, Result};
use seikan_ui::Interrupt;

/// A tunnel made of shell scripts.
struct Script(&'static str);

impl Tunnel for Script {
    fn name(&self) -> &str {
        "script"
    }

    fn up(&self, hosts: &Hosts, dir: &Path, _: &Interrupt) -> Result<Started> {
        let mark = mark();
        std::fs::write(&mark, dir.display().to_string()).map_err(LabError::io("write"))?;
        let mode = dir
            .metadata()
            .map_err(LabError::io("stat"))?
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o700, "private keys go there");
        let mut started = Started::default();
        for host in [&hosts.a, &hosts.b] {
            let mut command = Command::new("sh");
            command.args(["-c", self.0, &token()]);
            let process = Process::start(host, "script", command, dir)?;
            started.processes.push(process.leaving(mark.clone()));
        }
        Ok(started)
    }
}

/// On the command line of every program of this test, and of nothing else.
fn token() -> String {
    format!(
        "lab-cleanup-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    )
}

/// A file that outlives the programs.
fn mark() -> PathBuf {
    std::env::temp_dir().join(token())
}

/// Processes with this test's token on their command line.
fn survivors() -> Vec<PathBuf> {
    let all = std::fs::read_dir("/proc")
        .expect("procfs")
        .flatten()
        .map(|e| e.path().join("cmdline"));
    all.filter(|f| std::fs::read(f).is_ok_and(|c| String::from_utf8_lossy(&c).contains(&token())))
        .collect()
}

/// Interfaces of this namespace that have a link's names.
fn visible() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/sys/class/net")
        .into_iter()
        .flatten()
        .flatten();
    let mut all: Vec<PathBuf> = entries
        .map(|e| e.path())
        .filter(|p| {
            p.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("link"))
        })
        .collect();
    all.sort();
    all
}

fn check_gone(before: &[PathBuf]) {
    assert_eq!(survivors(), Vec::<PathBuf>::new());
    assert!(!mark().exists());
    assert_eq!(visible(), before);
}

/// Runs a tunnel that cannot come up; returns its error once nothing of it is left.
fn fail(script: &'static str, interrupt: &Interrupt) -> LabError {
    let before = visible();
    let shared: Arc<dyn Tunnel> = Arc::new(Script(script));
    let error = start(&shared, Link::default(), interrupt).expect_err("cannot come up");
    check_gone(&before);
    error
}

fn may_run() -> bool {
    crate::common::host().is_some()
}

#[test]
fn a_program_that_dies_is_reported_with_its_last_words() {
    if !may_run() {
        return;
    }
    let error = fail("echo no key for the gate; exit 3", &Interrupt::new());
    let LabError::ChildExited { name, status, log } = error else {
        panic!("{error:?}")
    };
    assert!(name.starts_with("script on host"), "{name}");
    assert!(status.contains('3'), "{status}");
    assert_eq!(log, "no key for the gate");
}

#[test]
fn one_dead_end_takes_the_other_with_it() {
    if !may_run() {
        return;
    }
    // Both race for the directory: exactly one stays.
    let race = "mkdir \"/tmp/$0.lock\" || exit 1; trap 'rmdir \"/tmp/$0.lock\"' EXIT; trap 'exit' TERM; while :; do sleep 0.1; done";
    let error = fail(race, &Interrupt::new());
    assert!(matches!(error, LabError::ChildExited { .. }), "{error:?}");
}

#[test]
fn an_interruption_stops_programs_that_run() {
    if !may_run() {
        return;
    }
    let interrupt = Interrupt::new();
    let waker = interrupt.clone();
    let waking = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        waker.raise();
    });
    let begin = Instant::now();
    let error = fail("sleep 60; :", &interrupt);
    assert!(matches!(error, LabError::Interrupted), "{error:?}");
    assert!(
        begin.elapsed() < Duration::from_secs(30),
        "SIGTERM reaches the script's children"
    );
    waking.join().expect("waker");
}

#[test]
fn a_program_that_ignores_sigterm_is_killed() {
    if !may_run() {
        return;
    }
    let Some(host) = crate::common::host() else {
        return;
    };
    let dir = tempfile::tempdir().expect("directory");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' TERM; while :; do sleep 1; done", &token()]);
    let process = Process::start(&host, "stubborn", command, dir.path()).expect("started");
    std::thread::sleep(Duration::from_millis(200));
    drop(Started::from(vec![process]));
    assert_eq!(survivors(), Vec::<PathBuf>::new());
}

#[test]
fn programs_run_inside_their_host() {
    let Some(host) = crate::common::host() else {
        return;
    };
    let dir = tempfile::tempdir().expect("directory");
    let inside = |host: &Host| {
        host.run(|| std::fs::read_link("/proc/thread-self/ns/net"))
            .expect("run")
            .expect("link")
    };
    let mut command = Command::new("readlink");
    command.arg("/proc/self/ns/net");
    let mut process = Process::start(&host, "readlink", command, dir.path()).expect("started");
    while process.check_alive().is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(process.last_words(), inside(&host).display().to_string());
}

#[test]
fn the_file_of_a_program_that_is_killed_goes_with_it() {
    let host = Host::create("A", 1).expect("a host");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("socket");
    let mut script = Command::new("sh");
    script.args(["-c", &format!(": > {}; exec sleep 60", file.display())]);
    let process = Process::start(&host, "script", script, folder.path()).expect("a program");
    let process = process.leaving(file.clone());
    let until = Instant::now() + Duration::from_secs(30);
    while !file.exists() {
        assert!(Instant::now() < until, "it makes its file");
        std::thread::sleep(Duration::from_millis(5));
    }
    process.kill();
    assert!(!file.exists());
}
