//! Members on networks that block UDP: they reach others over TLS to a Seikan relay.

use crate::common::eventually;
use crate::mesh::nat::Mapping::{AddressAndPortDependent, EndpointIndependent, None as Open};
use crate::mesh::nat::Two;
use crate::mesh::site::{SOON, Site, at_a_site};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs::{self, DirEntry};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Address of the relay for members.
const RELAY: &str = "192.0.2.1:3478";

fn path(two: &Two, end: usize) -> Value {
    two.hosts[end].status()["peers"][0]["path"].clone()
}

/// Returns whether each end sends over TLS to the relay.
fn by_tls(two: &Two) -> [bool; 2] {
    [0, 1].map(|end| path(two, end)["tls"]["relay"] == RELAY)
}

fn relay(two: &Two, end: usize) -> Value {
    two.hosts[end].status()["mesh"]["relays"][RELAY].clone()
}

/// Unblocks UDP.
fn unblock(two: &Two, nat: usize) {
    two.nats[nat].run_nft(
        "flush chain inet filter through
         add rule inet filter through ct state established,related accept
         add rule inet filter through iifname \"lan\" accept",
    );
}

fn at_a_site_with_relay(test: impl FnOnce(&Site)) {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let _relay = site.relay_by_tls(None);
        test(site);
    });
}

#[test]
fn a_member_without_udp_reaches_others_over_tls_to_a_relay() {
    at_a_site_with_relay(|site| {
        let two = Two::blocked(site, [EndpointIndependent, Open], &[0]);
        two.answering(|| {
            let started_at = Instant::now();
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            let took = started_at.elapsed();
            assert_eq!(two.relayed(), [Some(true); 2]);
            assert_eq!(by_tls(&two), [true, false]);
            // Half a second on an idle machine; UDP alone is given up after 3.5 s.
            assert!(took < Duration::from_secs(3), "{took:?}");
            eventually("it says so", || relay(&two, 0)["tls_rtt_us"].is_u64());
            assert!(relay(&two, 1)["rtt_us"].is_u64());
        });
    });
}

#[test]
fn two_members_without_udp_connect_over_tls_at_a_relay() {
    at_a_site_with_relay(|site| {
        let two = Two::blocked(site, [EndpointIndependent; 2], &[0, 1]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            assert_eq!(by_tls(&two), [true; 2]);
            // No proxied address is sent to other hosts.
            let members = serde_json::to_string(&site.members()).expect("text");
            assert!(!members.contains("[100::"), "{members}");
            eventually("it is counted", || {
                let status = two.hosts[0].status();
                let stream = &status["mesh"]["streams"][RELAY];
                stream["received"].as_u64() > Some(0) && stream["sent"].as_u64() > Some(0)
            });
        });
    });
}

#[test]
fn much_goes_by_tls_at_both_ends_byte_for_byte() {
    at_a_site_with_relay(|site| {
        let two = Two::blocked(site, [EndpointIndependent; 2], &[0, 1]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            let sent: Vec<u8> = (0..8_000_000_u32).map(|n| (n % 251) as u8).collect();
            let mut received = Vec::new();
            let listener = two.hosts[1].netns.run(|| TcpListener::bind(("::", 9)));
            let listener = listener.expect("namespace").expect("bind");
            let (netns, to, bytes) = (&two.hosts[0].netns, (two.address, 9), &sent);
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    let connected = netns.run(|| TcpStream::connect(to));
                    let mut stream = connected.expect("namespace").expect("connected");
                    stream.write_all(bytes).expect("sent");
                });
                let (mut stream, _) = listener.accept().expect("accepted");
                stream.read_to_end(&mut received).expect("received");
            });
            assert!(received == sent, "{} of {}", received.len(), sent.len());
            assert_eq!(by_tls(&two), [true; 2]);
        });
    });
}

#[test]
fn tls_is_left_for_udp_when_that_goes_again_while_packets_go_on() {
    at_a_site_with_relay(|site| {
        let two = Two::blocked(site, [AddressAndPortDependent; 2], &[0]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            assert_eq!(by_tls(&two), [true, false]);
            unblock(&two, 0);
            // UDP is tried every 20 s. The tunnel then moves without a detected loss, which would
            // take three seconds.
            let until = Instant::now() + Duration::from_secs(90);
            while by_tls(&two)[0] {
                assert!(Instant::now() < until, "{}", two.hosts[0].status());
                assert!(two.reaches(Duration::from_secs(2)), "lost on the way");
            }
            assert_eq!(two.relayed(), [Some(true); 2]);
            assert!(relay(&two, 0)["rtt_us"].is_u64());
            assert!(two.reaches(SOON));
        });
    });
}

#[test]
fn a_member_with_udp_opens_no_tls_connection_to_a_relay() {
    at_a_site_with_relay(|site| {
        let two = Two::new(site, [AddressAndPortDependent; 2]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            assert_eq!(by_tls(&two), [false; 2]);
            assert!(two.hosts[0].status()["mesh"]["streams"].is_null());
        });
    });
}

#[test]
fn a_relay_by_tls_that_comes_back_is_used_again() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let relay = site.relay_by_tls(None);
        let two = Two::blocked(site, [EndpointIndependent; 2], &[0, 1]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            drop(relay);
            assert!(!two.reaches(Duration::from_secs(1)));
            let _relay = site.relay_by_tls(None);
            assert!(two.reaches(SOON * 2), "{}", two.hosts[0].status());
            assert_eq!(by_tls(&two), [true; 2]);
        });
    });
}

#[test]
fn nothing_is_sent_to_a_relay_with_another_certificate() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        // FIPS 180-2, appendix B.1: the digest of "abc".
        let other = "sha256:ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0";
        let mut relay = site.relay_by_tls(Some(other));
        let two = Two::blocked(site, [EndpointIndependent, Open], &[0]);
        two.answering(|| {
            assert!(!two.reaches(Duration::from_secs(5)));
            eventually("it says why", || {
                let why = self::relay(&two, 0)["refuses"].clone();
                why.as_str()
                    .is_some_and(|why| why.contains("by TLS: ") && why.contains("pinned"))
            });
        });
        let pid = Pid::from_raw(relay.child.id() as i32);
        kill(pid, Signal::SIGTERM).expect("signalled");
        let mut said = String::new();
        relay.stdout.read_to_string(&mut said).expect("text");
        // Tickets were shown there over UDP only.
        assert!(said.contains("connections turned away"), "{said}");
    });
}

/// Returns the processor time of all threads of a process (/proc/PID/task/TID/schedstat).
fn busy(process: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("tasks");
    let read = |task: &DirEntry, file| fs::read_to_string(task.path().join(file)).expect("text");
    let nanoseconds = tasks.map(|task| task.expect("a task")).map(|task| {
        let text = read(&task, "schedstat");
        let first = text.split_whitespace().next().expect("a number");
        first.parse::<u64>().expect("a number")
    });
    Duration::from_nanos(nanoseconds.sum())
}

#[test]
#[ignore = "a measurement, of a minute"]
fn the_cost_of_an_idle_connection_for_a_member() {
    at_a_site_with_relay(|site| {
        let two = Two::blocked(site, [EndpointIndependent; 2], &[0]);
        two.answering(|| {
            assert!(two.reaches(SOON), "{}", two.hosts[0].status());
            std::thread::sleep(Duration::from_secs(10));
            assert_eq!(by_tls(&two), [true, false]);
            let [a, b] = [0, 1].map(|end: usize| two.running[end].child.id());
            let now = || [busy(a), busy(b)];
            let (started_at, before) = (Instant::now(), now());
            std::thread::sleep(Duration::from_secs(60));
            let (took, after) = (started_at.elapsed(), now());
            assert_eq!(by_tls(&two), [true, false]);
            let titles = ["its daemon", "the other's, by UDP"];
            for ((before, after), title) in before.iter().zip(&after).zip(titles) {
                let share = 100.0 * (*after - *before).as_secs_f64() / took.as_secs_f64();
                println!("{title}: {share:.3} % of a processor");
            }
            for (process, title) in [(a, "its daemon"), (b, "the other's")] {
                let status = fs::read_to_string(format!("/proc/{process}/status"));
                let status = status.expect("status");
                let memory = status.lines().find(|line| line.starts_with("VmRSS:"));
                println!("{title}: {}", memory.expect("memory"));
            }
        });
    });
}
