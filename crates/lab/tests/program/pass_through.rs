//! The program that only passes packets on, between two namespaces.

use std::process::Child;
use std::time::{Duration, Instant};

use seikan_lab::host::Host;
use seikan_lab::link::{Hosts, Link};
use seikan_load::{LoadError, TcpOptions, tcp_bulk, wait_reachable};
use seikan_ui::Interrupt;

use crate::common::{PATIENCE, skip};

/// Kills an end if the test fails.
struct End(Child);

impl Drop for End {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(host: &Host, role: &str, listener: &Host) -> End {
    let mut command = super::lab();
    command
        .args(["pass-through", "--device", "tun0"])
        .arg(format!("--address={}/24", host.inner))
        .arg(format!("--{role}={}:7000", listener.address));
    End(host.spawn(&mut command).expect("starts"))
}

#[test]
fn a_stream_passes_in_super_packets_and_one_end_ends_with_the_other() {
    let hosts = match Hosts::create(Link::default()) {
        Ok(hosts) => hosts,
        Err(error) => return skip(&error.to_string()),
    };
    let near = start(&hosts.a, "connect", &hosts.b);
    let mut far = start(&hosts.b, "listen", &hosts.b);
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
