//! The program that only passes packets on, between two namespaces.

use std::process::Child;
use std::time::{Duration, Instant};

use seikan_lab::site::Host;
use seikan_lab::site::{Hosts, Link};
use seikan_load::{LoadError, TcpOptions, tcp_bulk, wait_reachable};
use seikan_sys::ethtool::Feature;
use seikan_ui::Interrupt;

use crate::common::{PATIENCE, skip};

/// The program's device.
const DEVICE: &str = "tun0";

/// Kills an end if the test fails.
struct End(Child);

impl Drop for End {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(host: &Host, role: &str, listener: &Host, more: &[&str]) -> End {
    let mut command = super::lab();
    command
        .args(["pass-through", "--device", DEVICE])
        .arg(format!("--address={}/24", host.inner))
        .arg(format!("--{role}={}:7000", listener.address))
        .args(more);
    End(host.spawn(&mut command).expect("starts"))
}

/// A stream from A to B, checked byte by byte.
fn stream(hosts: &Hosts) {
    let ends = hosts.through_tunnel();
    let interrupt = Interrupt::new();
    wait_reachable(&ends, PATIENCE, &interrupt, || Ok::<_, LoadError>(())).expect("an answer");
    let options = TcpOptions {
        warmup: Duration::ZERO,
        duration: Duration::from_secs(1),
        verify: true,
        ..TcpOptions::default()
    };
    tcp_bulk(&ends, &options, &interrupt).expect("unharmed");
}

/// Returns the mean bytes of the packets read from the device of A, and of the packets written to
/// the device of B.
fn bytes_per_packet(hosts: &Hosts) -> [u64; 2] {
    let stats = |host: &Host| {
        let netlink = host.netlink().expect("netlink");
        let index = netlink.link(DEVICE).expect("a device").index;
        netlink.link_stats(index).expect("counters")
    };
    let (read, written) = (stats(&hosts.a), stats(&hosts.b));
    [
        read.tx_bytes / read.tx_packets,
        written.rx_bytes / written.rx_packets,
    ]
}

#[test]
fn a_super_packet_is_written_frame_by_frame() {
    let hosts = match Hosts::create(Link::default()) {
        Ok(hosts) => hosts,
        Err(error) => return skip(error.to_string()),
    };
    let _near = start(&hosts.a, "connect", &hosts.b, &[]);
    let _far = start(&hosts.b, "listen", &hosts.b, &["--frames-per-write=1"]);
    stream(&hosts);
    let [read, written] = bytes_per_packet(&hosts);
    assert!(read > 3_000, "{read} bytes in each read");
    assert!(written <= 1_500, "{written} bytes in each write");
}

#[test]
fn single_frames_are_merged_for_a_write() {
    let hosts = match Hosts::create(Link::default()) {
        Ok(hosts) => hosts,
        Err(error) => return skip(error.to_string()),
    };
    let _near = start(&hosts.a, "connect", &hosts.b, &[]);
    let _far = start(&hosts.b, "listen", &hosts.b, &["--frames-per-write=16"]);
    let ends = hosts.through_tunnel();
    wait_reachable(
        &ends,
        PATIENCE,
        &Interrupt::new(),
        || Ok::<_, LoadError>(()),
    )
    .expect("an answer");
    let one_by_one = [(Feature::Tso, false)];
    hosts.a.set_features(DEVICE, &one_by_one).expect("no TSO");
    stream(&hosts);
    let [read, written] = bytes_per_packet(&hosts);
    assert!(read <= 1_500, "{read} bytes in each read");
    // The number of packets in a write depends on the number that has arrived.
    assert!(written > 1_500, "{written} bytes in each write");
}

#[test]
fn a_stream_passes_in_super_packets_and_one_end_ends_with_the_other() {
    let hosts = match Hosts::create(Link::default()) {
        Ok(hosts) => hosts,
        Err(error) => return skip(error.to_string()),
    };
    let near = start(&hosts.a, "connect", &hosts.b, &[]);
    let mut far = start(&hosts.b, "listen", &hosts.b, &[]);
    stream(&hosts);
    // The far end writes packets of data to its device, and acknowledgements to its connection. With
    // one frame of 1,500 bytes in each write the mean would be below that.
    let io = std::fs::read_to_string(format!("/proc/{}/io", far.0.id())).expect("counts");
    let count = |name: &str| -> u64 {
        let line = io.lines().find_map(|line| line.strip_prefix(name));
        line.expect(name).trim().parse().expect("a number")
    };
    let per_write = count("wchar:") / count("syscw:").max(1);
    assert!(per_write > 3_000, "{per_write} bytes in each write");

    drop(near);
    let begin = Instant::now();
    while far.0.try_wait().expect("a child").is_none() {
        assert!(begin.elapsed() < PATIENCE, "the other end stays");
        std::thread::sleep(Duration::from_millis(20));
    }
}
