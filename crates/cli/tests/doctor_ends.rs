//! Two doctors at the two ends of a tunnel: each reports what the other cannot see, and unknown
//! sources get nothing.

use crate::schema::check_json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, eventually, skip, stderr};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seikan_lab::site::Host;
use seikan_lab::site::{Hosts, Link};
use seikan_load::{LiveOptions, LoadError, live, wait_reachable};
use seikan_ui::Interrupt;
use serde_json::Value;

const SEIKAN: &str = env!("CARGO_BIN_EXE_seikan");
/// Name of the tunnel's device in both hosts.
const DEVICE: &str = "crude0";
const PORT: u16 = 9587;

/// A process; killed with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id() as i32), signal).expect("signal");
    }
}

/// A crude tunnel between two hosts, and a listening doctor at its far end.
struct Two {
    listener: Running,
    log: BufReader<ChildStderr>,
    _ends: [Running; 2],
    folder: tempfile::TempDir,
    hosts: Hosts,
}

impl Two {
    /// `far`: fault of the tunnel's far end; `options` of the listening doctor. Returns `None`,
    /// with a message, if the machine cannot.
    fn start(far: &[&str], options: &[&str]) -> Option<Self> {
        let hosts = match Hosts::create(Link::default()) {
            Ok(hosts) => hosts,
            Err(error) => {
                skip(&error.to_string());
                return None;
            }
        };
        let end = |host: &Host, other: &Host, words: &[&str]| {
            let mut command = Command::new(SEIKAN);
            command
                .args(["lab", "crude", "--device", DEVICE])
                .arg(format!("--listen={}:7000", host.address))
                .arg(format!("--peer={}:7000", other.address))
                .arg(format!("--address={}/24", host.inner))
                .args(words)
                .stdout(Stdio::null());
            Running(host.spawn(&mut command).expect("starts"))
        };
        let ends = [end(&hosts.a, &hosts.b, &[]), end(&hosts.b, &hosts.a, far)];
        let patience = PATIENCE;
        wait_reachable(&hosts.through_tunnel(), patience, &Interrupt::new(), || {
            Ok::<_, LoadError>(())
        })
        .expect("an answer");
        let folder = tempfile::tempdir().expect("folder");
        for name in ["key", "other"] {
            let key = Command::new(SEIKAN).arg("genpsk").output().expect("genpsk");
            let file = folder.path().join(name);
            std::fs::write(&file, key.stdout).expect("write");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&file, mode).expect("mode");
        }
        let mut command = Command::new(SEIKAN);
        command
            .args(["doctor", "--listen", "--key"])
            .arg(folder.path().join("key"));
        command.args(options).stderr(Stdio::piped());
        let mut listener = Running(hosts.b.spawn(&mut command).expect("starts"));
        let mut log = BufReader::new(listener.0.stderr.take().expect("piped"));
        let mut line = String::new();
        log.read_line(&mut line).expect("read");
        assert_eq!(line, format!("listening on [::]:{PORT}\n"));
        Some(Self {
            listener,
            log,
            _ends: ends,
            folder,
            hosts,
        })
    }

    fn key(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(SEIKAN);
        command.args(["doctor", "--json"]);
        if !words.contains(&"--seconds") {
            command.args(["--seconds", "3"]);
        }
        command.arg("--peer");
        command.arg(self.hosts.b.inner.to_string());
        command.arg("--key").arg(self.key("key")).args(words);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Starts a doctor at the near end.
    fn ask(&self, words: &[&str]) -> Running {
        Running(
            self.hosts
                .a
                .spawn(&mut self.command(words))
                .expect("starts"),
        )
    }

    /// Returns the output of a doctor at the near end.
    fn asked(&self, words: &[&str]) -> Output {
        finish(self.ask(words))
    }

    /// Returns the next line of the listener's log.
    fn logged(&mut self) -> String {
        let mut line = String::new();
        self.log.read_line(&mut line).expect("read");
        line
    }

    /// Returns the sockets of the far host: listening TCP, and UDP.
    fn ports(&self) -> Vec<String> {
        // The thread's files are read, because the process is in another namespace.
        let read = || {
            ["tcp", "udp", "tcp6", "udp6"].map(|name| {
                let text = std::fs::read_to_string(format!("/proc/thread-self/net/{name}"));
                (name, text.expect("read"))
            })
        };
        let tables = self.hosts.b.run(read).expect("namespace");
        let mut ports = Vec::new();
        for (name, text) in tables {
            for line in text.lines().skip(1) {
                let words: Vec<_> = line.split_whitespace().collect();
                if name.starts_with("udp") || words[3] == "0A" {
                    ports.push(format!("{name} {}", words[1]));
                }
            }
        }
        ports
    }

    fn connect(&self) -> TcpStream {
        let to = SocketAddr::new(self.hosts.b.inner, PORT);
        let stream = self
            .hosts
            .a
            .run(|| TcpStream::connect(to))
            .expect("namespace");
        stream.expect("connect")
    }
}

fn finish(mut running: Running) -> Output {
    let (mut out, mut errors) = (Vec::new(), Vec::new());
    let mut stdout = running.0.stdout.take().expect("piped");
    let mut stderr = running.0.stderr.take().expect("piped");
    std::thread::scope(|scope| {
        scope.spawn(|| stderr.read_to_end(&mut errors));
        stdout.read_to_end(&mut out).expect("read");
    });
    Output {
        status: running.0.wait().expect("wait"),
        stdout: out,
        stderr: errors,
    }
}

fn verdict(output: &Output) -> Value {
    let verdict = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", stderr(output)));
    check_json("doctor", &verdict);
    verdict
}

/// Returns whether a cause is named or also shown: with many tests at once, waiting for a processor
/// shows too.
fn shows(verdict: &Value, cause: &str) -> bool {
    let lists = ["chain", "alternatives"].map(|list| verdict[list].as_array().expect("a list"));
    lists.into_iter().flatten().any(|name| name == cause)
}

#[test]
fn causes_visible_only_at_the_far_end_are_named_from_here() {
    // Capacity for a datagram or two.
    let Some(mut two) = Two::start(&["--rcvbuf", "2304"], &[]) else {
        return;
    };
    let options = LiveOptions {
        streams: 4,
        rate: Some(200.0),
        ..LiveOptions::default()
    };
    let ends = two.hosts.through_tunnel();
    let [alone, both] = live(&ends, &options, &Interrupt::new(), |_| {
        let mut command = Command::new(SEIKAN);
        command.args(["doctor", "--json", "--seconds", "3", "--iface", DEVICE]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let alone = finish(Running(two.hosts.a.spawn(&mut command).expect("starts")));
        Ok::<_, LoadError>([alone, two.asked(&[])].map(|output| verdict(&output)))
    })
    .expect("load");
    assert!(!shows(&alone, "udp-receive-buffer"), "{alone:#}");
    assert_eq!(alone["far"], Value::Null);
    assert!(shows(&both, "udp-receive-buffer"), "{both:#}");
    assert_eq!(both["far"]["at"], "far-end");
    assert_eq!(both["far"]["path"]["inner"], DEVICE);
    // The doctors' own connection does not count as traffic of the tunnel.
    for path in [&both["path"], &both["far"]["path"]] {
        assert_eq!(
            path["flows"].as_array().expect("a list").len(),
            4,
            "{path:#}"
        );
    }
    // On a busy machine another cause may be named, with other remedies.
    let chain = both["chain"].as_array().expect("a list");
    let is_named = chain.iter().any(|name| name == "udp-receive-buffer");
    let remedies = both["remedies"].as_array().expect("a list");
    assert!(!is_named || !remedies.is_empty());
    for remedy in remedies.iter().filter(|_| is_named) {
        assert_eq!(remedy["where"], "far-end");
        assert_eq!(remedy["actions"], Value::Array(vec![]));
    }
    let line = two.logged();
    assert!(line.contains("measured crude0 for"), "{line}");
}

#[test]
fn the_wrong_key_is_refused_and_shown_nowhere() {
    let Some(two) = Two::start(&[], &[]) else {
        return;
    };
    let mut command = Command::new(SEIKAN);
    command
        .args(["doctor", "--peer"])
        .arg(two.hosts.b.inner.to_string());
    command.arg("--key").arg(two.key("other"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = finish(Running(two.hosts.a.spawn(&mut command).expect("starts")));
    let errors = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.contains("another key") && output.stdout.is_empty(),
        "{errors}"
    );
    // A doctor with the right key is still served, and neither of the others was notified.
    let output = two.asked(&[]);
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for name in ["key", "other"] {
        let key = std::fs::read_to_string(two.key(name)).expect("key");
        assert!(!said.contains(key.trim()) && !errors.contains(key.trim()));
    }
}

#[test]
fn a_second_doctor_is_refused_as_busy() {
    let Some(mut two) = Two::start(&[], &[]) else {
        return;
    };
    let first = two.ask(&[]);
    std::thread::sleep(Duration::from_millis(1500));
    let output = two.asked(&[]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("busy"), "{}", stderr(&output));
    assert!(two.logged().contains("busy"));
    let output = finish(first);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn unknown_sources_get_no_answer_and_block_nobody() {
    let Some(two) = Two::start(&[], &[]) else {
        return;
    };
    let (mut silent, mut talking) = (two.connect(), two.connect());
    let begun = Instant::now();
    talking.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("write");
    let output = two.asked(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for stranger in [&mut talking, &mut silent] {
        let mut heard = Vec::new();
        let limit = Some(PATIENCE);
        stranger.set_read_timeout(limit).expect("timeout");
        // Closed, or reset with its message unread.
        let _ = stranger.read_to_end(&mut heard);
        assert!(heard.is_empty(), "{heard:?}");
    }
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn load_is_only_taken_where_it_is_allowed() {
    let Some(two) = Two::start(&[], &[]) else {
        return;
    };
    let output = two.asked(&["--load"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("--allow-load"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn load_flows_at_its_rate_in_either_direction_and_leaves_nothing() {
    let Some(two) = Two::start(&[], &["--allow-load"]) else {
        return;
    };
    let before = two.ports();
    for (words, direction) in [
        (&["--load", "udp", "--load-rate", "20"][..], "rx_bytes"),
        (&["--load", "--load-rate", "20", "--reverse"], "tx_bytes"),
    ] {
        let counted = || {
            let link = two.hosts.b.netlink().expect("netlink");
            let index = link.link(DEVICE).expect("link").index;
            let counts = link.link_stats(index).expect("counts");
            if direction == "rx_bytes" {
                counts.rx_bytes
            } else {
                counts.tx_bytes
            }
        };
        let bytes = counted();
        let output = two.asked(words);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let bytes = counted() - bytes;
        // 20 Mbit/s for 3 s are 7.5 MB; set-up and end take a second or two.
        assert!(
            (3_000_000..=20_000_000).contains(&bytes),
            "{direction}: {bytes}"
        );
        let verdict = verdict(&output);
        assert_eq!(verdict["expected"], 20e6);
        let through = verdict["far"]["throughput"].as_f64().expect("a number");
        // Bytes that wait while the machine is busy may arrive later, at most 3 s of them within 1 s.
        assert!((8e6..=60e6).contains(&through), "{verdict:#}");
        eventually("a port stays open", || two.ports() == before);
    }
}

#[test]
fn the_load_ends_with_ctrl_c_and_with_a_client_that_is_killed_or_silent() {
    let Some(two) = Two::start(&[], &["--allow-load"]) else {
        return;
    };
    let before = two.ports();
    let words = ["--load", "udp", "--load-rate", "5", "--seconds", "60"];
    // A stopped process keeps its connection but is silent.
    let ends = [
        (Signal::SIGINT, Some(0)),
        (Signal::SIGKILL, None),
        (Signal::SIGSTOP, None),
    ];
    for (signal, code) in ends {
        let asking = two.ask(&words);
        eventually("no port for the load", || two.ports() != before);
        std::thread::sleep(Duration::from_millis(4000));
        asking.signal(signal);
        if signal == Signal::SIGSTOP {
            eventually("a port stays open", || two.ports() == before);
            asking.signal(Signal::SIGKILL);
        }
        let output = finish(asking);
        assert_eq!(output.status.code(), code, "{}", stderr(&output));
        eventually("a port stays open", || two.ports() == before);
    }
    // The next doctor is served.
    let output = two.asked(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn a_far_end_that_goes_leaves_the_verdict_of_this_one() {
    let Some(two) = Two::start(&[], &["--allow-load"]) else {
        return;
    };
    let idle = two.ports();
    let words = ["--load", "udp", "--load-rate", "5", "--seconds", "60"];
    let asking = two.ask(&words);
    eventually("no port for the load", || two.ports() != idle);
    std::thread::sleep(Duration::from_millis(2000));
    two.listener.signal(Signal::SIGKILL);
    let begun = Instant::now();
    let output = finish(asking);
    // Without load there is nothing to examine.
    assert!(begun.elapsed() < Duration::from_secs(45));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let verdict = verdict(&output);
    assert_eq!(verdict["far"], Value::Null);
    let unseen = verdict["path"]["unseen"].as_array().expect("a list");
    let told = unseen.iter().any(|unseen| {
        let what = unseen["what"].as_str().unwrap_or_default();
        what.starts_with("the far end")
    });
    assert!(told, "{verdict:#}");
    // The far end is gone.
    let output = two.asked(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--listen"), "{}", stderr(&output));
}

#[test]
fn a_service_manager_ends_it_cleanly() {
    let Some(mut two) = Two::start(&[], &[]) else {
        return;
    };
    let asking = two.ask(&[]);
    std::thread::sleep(Duration::from_millis(1500));
    let begun = Instant::now();
    two.listener.signal(Signal::SIGTERM);
    let status = two.listener.0.wait().expect("wait");
    assert_eq!(status.code(), Some(0));
    assert!(begun.elapsed() < PATIENCE);
    assert!(two.logged().contains("the listening doctor was stopped"));
    let output = finish(asking);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

#[test]
fn incomplete_options_are_reported() {
    let run = |words: &[&str]| {
        let output = Command::new(SEIKAN).arg("doctor").args(words).output();
        let output = output.expect("run");
        (output.status.code(), stderr(&output))
    };
    let key = tempfile::NamedTempFile::new().expect("file");
    let path = key.path().to_str().expect("UTF-8");
    let (code, errors) = run(&["--peer", "192.0.2.1"]);
    assert!(code == Some(2) && errors.contains("--key"), "{errors}");
    let (code, errors) = run(&["--load"]);
    assert!(code == Some(2) && errors.contains("--peer"), "{errors}");
    let (code, errors) = run(&["--listen", "--key", path]);
    assert!(code == Some(1) && errors.contains("44"), "{errors}");
    let to = IpAddr::from([127, 0, 0, 1]).to_string();
    std::fs::write(key.path(), "A".repeat(43) + "=").expect("write");
    let (code, errors) = run(&["--peer", &to, "--key", path]);
    assert!(code == Some(1) && errors.contains("zero"), "{errors}");
}
