//! The crude tunnel between two namespaces: it works, and each of its faults shows in a counter.

use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seikan_lab::site::Host;
use seikan_lab::site::{Hosts, Link};
use seikan_lab::tunnel::crude::{Crude, CrudeCounts};
use seikan_lab::tunnel::{Changes, Tunnel, start};
use seikan_load::{LatencyOptions, LoadError, TcpOptions, ping, tcp_bulk, wait_reachable};
use seikan_ui::Interrupt;

use crate::common::{PATIENCE, skip};

/// Name of the device in both hosts.
const DEVICE: &str = "crude0";

/// A tunnel whose ends are started separately, for their counts. The ends are killed if a test
/// fails.
struct ByHand {
    ends: [Child; 2],
    hosts: Hosts,
}

impl ByHand {
    /// Returns `None`, with a message, if the machine cannot.
    fn start(words: &[&str]) -> Option<Self> {
        let hosts = match Hosts::create(Link::default()) {
            Ok(hosts) => hosts,
            Err(error) => {
                skip(error.to_string());
                return None;
            }
        };
        let end = |host: &Host, other: &Host| {
            let mut command = super::lab();
            command
                .args(["crude", "--device", DEVICE])
                .arg(format!("--listen={}:7000", host.address))
                .arg(format!("--peer={}:7000", other.address))
                .arg(format!("--address={}/24", host.inner))
                .args(words)
                .stdout(Stdio::piped());
            host.spawn(&mut command).expect("starts")
        };
        let ends = [end(&hosts.a, &hosts.b), end(&hosts.b, &hosts.a)];
        let through = Self { ends, hosts };
        let patience = PATIENCE;
        wait_reachable(
            &through.hosts.through_tunnel(),
            patience,
            &Interrupt::new(),
            || Ok::<_, LoadError>(()),
        )
        .expect("an answer");
        Some(through)
    }

    /// Sends `count` echo requests through it, which are all answered.
    fn ping(&self, count: u32) {
        let options = LatencyOptions {
            count,
            ..LatencyOptions::default()
        };
        let ends = self.hosts.through_tunnel();
        let report = ping(&ends, &options, &Interrupt::new()).expect("ping");
        assert_eq!(report.received, count);
    }

    /// Returns how often threads of host A's end have slept (proc_pid_status(5)).
    fn sleeps(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.ends[0].id())).expect("tasks");
        let of = |task: std::io::Result<std::fs::DirEntry>| -> u64 {
            let text = std::fs::read_to_string(task.expect("task").path().join("status"));
            let text = text.expect("status");
            let mut lines = text.lines();
            let value = lines.find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            value.expect("a count").trim().parse().expect("a number")
        };
        tasks.map(of).sum()
    }

    fn queue(&self) -> u32 {
        let netlink = self.hosts.a.netlink().expect("netlink");
        netlink.link(DEVICE).expect("device").tx_queue_len
    }

    /// Ends host A's end by a signal; returns its counts.
    fn counts(mut self) -> CrudeCounts {
        let end = &mut self.ends[0];
        kill(Pid::from_raw(end.id() as i32), Signal::SIGTERM).expect("running");
        let begin = Instant::now();
        while end.try_wait().expect("a child").is_none() {
            assert!(begin.elapsed() < PATIENCE, "does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut text = String::new();
        let output = end.stdout.as_mut().expect("piped");
        output.read_to_string(&mut text).expect("text");
        serde_json::from_str(&text).expect("counts")
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        for end in &mut self.ends {
            // Fails only if it has ended.
            let _ = end.kill();
            let _ = end.wait();
        }
    }
}

/// Sleeps of host A's end per echo request and reply: two packets.
fn sleeps_per_ping(words: &[&str]) -> Option<f64> {
    let through = ByHand::start(words)?;
    let before = through.sleeps();
    through.ping(200);
    Some((through.sleeps() - before) as f64 / 200.0)
}

#[test]
fn a_stream_passes_unharmed_whatever_it_suffers_from() {
    let words = ["--burn=2000", "--handoff", "--copy=2", "--queue=100"];
    let words = words.map(str::to_owned).to_vec();
    let sick = Changes {
        arguments: [words.clone(), words],
        ..Changes::default()
    };
    for tunnel in [
        Crude::new("crude", &Changes::default()),
        Crude::new("crude-sick", &sick),
    ] {
        if let Err(reason) = tunnel.availability() {
            return skip(&reason);
        }
        let shared: Arc<dyn Tunnel> = Arc::new(tunnel.clone());
        let mut running = match start(&shared, Link::default(), &Interrupt::new()) {
            Ok(running) => running,
            Err(error) => return skip(error.to_string()),
        };
        let options = TcpOptions {
            warmup: Duration::ZERO,
            duration: Duration::from_secs(1),
            verify: true,
            ..TcpOptions::default()
        };
        let ends = tunnel.ends(&running.hosts);
        let report = tcp_bulk(&ends, &options, &Interrupt::new()).expect("unharmed");
        eprintln!("{}: {:.2} Gbit/s", tunnel.name(), report.gbit_per_second);
        running.check_alive().expect("alive");
    }
}

#[test]
fn every_packet_is_one_read_and_one_write() {
    let Some(through) = ByHand::start(&[]) else {
        return;
    };
    through.ping(100);
    let counts = through.counts();
    // The counts include packets of the wait for an answer.
    assert!(counts.out > 100 && counts.arrived > 100, "{counts:?}");
    assert_eq!((counts.blocks, counts.copied, counts.handed_on), (0, 0, 0));
    assert_eq!(counts.undelivered, 0);
}

#[test]
fn burning_spends_cipher_blocks_on_each_packet() {
    let Some(through) = ByHand::start(&["--burn", "20000"]) else {
        return;
    };
    through.ping(10);
    let counts = through.counts();
    let packets = counts.out + counts.unsent + counts.arrived;
    assert!(counts.blocks >= packets, "{counts:?}");
    assert_eq!(counts.blocks % packets, 0, "the same for each: {counts:?}");
}

#[test]
fn copies_are_counted_in_bytes() {
    let Some(through) = ByHand::start(&["--copy", "5"]) else {
        return;
    };
    through.ping(10);
    let counts = through.counts();
    // An echo is 20 + 8 + 56 bytes; other packets are the kernel's IPv6 messages, of at least 48
    // bytes.
    let packets = counts.out + counts.unsent + counts.arrived;
    assert!(counts.copied >= packets * 5 * 48, "{counts:?}");
    assert_eq!(counts.copied % 5, 0);
}

#[test]
fn a_handed_on_packet_wakes_two_threads_more() {
    let Some(plain) = sleeps_per_ping(&[]) else {
        return;
    };
    let Some(handed_on) = sleeps_per_ping(&["--handoff"]) else {
        return;
    };
    eprintln!("{plain} and {handed_on} sleeps per ping");
    // Two packets, two threads: four sleeps, or fewer if the loop finds the next packet first.
    assert!(handed_on >= plain + 3.0, "{plain} and {handed_on}");
}

#[test]
fn handing_on_counts_twice_per_packet() {
    let Some(through) = ByHand::start(&["--handoff"]) else {
        return;
    };
    through.ping(10);
    let counts = through.counts();
    let packets = counts.out + counts.unsent + counts.arrived + counts.undelivered;
    assert_eq!(counts.handed_on, 2 * packets, "{counts:?}");
}

#[test]
fn buffers_and_the_queue_are_as_requested() {
    let words = ["--rcvbuf=8192", "--sndbuf=16384", "--queue=7", "--mtu=1300"];
    let Some(through) = ByHand::start(&words) else {
        return;
    };
    assert_eq!(through.queue(), 7);
    let netlink = through.hosts.a.netlink().expect("netlink");
    assert_eq!(netlink.link(DEVICE).expect("device").mtu, 1300);
    let counts = through.counts();
    // socket(7): the kernel doubles the value.
    assert_eq!(
        (counts.receive_buffer, counts.send_buffer),
        (2 * 8192, 2 * 16384)
    );
}
