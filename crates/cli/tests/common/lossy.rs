//! Loss of a path, and how much of it reaches the packets inside a tunnel.

use std::net::IpAddr;
use std::time::Duration;

use seikan_load::{Ends, UdpOptions, udp_flood};
use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;
use serde_json::Value;

use super::PATIENCE;

/// Rule of nftables that drops one datagram of UDP in fifty.
pub const LOSS: &str = "meta l4proto udp numgen random mod 50 == 0 drop";
/// Number of datagrams that are counted.
const COUNTED: u64 = 4_000;
/// Maximum number of them that may be lost in a repaired tunnel. Without repair, 80 are lost on
/// average: 20 or fewer of 4,000 independent losses of 2 % have a probability below 1e-15, so a
/// test without repair does not pass by chance.
const MOST_LOST: u64 = 20;

/// Sends datagrams of 1,000 bytes at one each millisecond; returns those sent and lost.
fn flood(from: &NetNs, to: &NetNs, target: IpAddr, time: Duration) -> (u64, u64) {
    let ends = Ends {
        client: from,
        server: to,
        target,
        sources: &[],
        congestion: None,
        forward: None,
    };
    let options = UdpOptions {
        datagram: 1_000,
        rate: Some(8e6),
        duration: time,
        ..UdpOptions::default()
    };
    let report = udp_flood(&ends, &options, &Interrupt::new()).expect("a flood");
    (report.sent, report.lost - report.lost_at_receiver)
}

/// Sends datagrams until the loss repair of a status satisfies a condition.
pub fn send_until(
    [from, to]: [&NetNs; 2],
    target: IpAddr,
    repair: &dyn Fn() -> Value,
    is_so: &dyn Fn(&Value) -> bool,
) {
    let until = std::time::Instant::now() + PATIENCE;
    loop {
        flood(from, to, target, Duration::from_secs(1));
        let now = repair();
        if is_so(&now) {
            return;
        }
        assert!(std::time::Instant::now() < until, "{now:#}");
    }
}

/// Waits until the tunnel repairs, and checks that hardly any loss is left. `repair`: loss repair
/// of the sender's status.
pub fn is_repaired(ends: [&NetNs; 2], target: IpAddr, repair: &dyn Fn() -> Value) {
    let restored = |repair: &Value| repair["restored"].as_u64().expect("a count");
    send_until(ends, target, repair, &|repair| {
        repair["state"] == "repairing" && restored(repair) > 0
    });
    let before = restored(&repair());
    let [from, to] = ends;
    let (mut sent, mut lost) = (0, 0);
    while sent < COUNTED {
        let (more, of_them) = flood(from, to, target, Duration::from_secs(2));
        sent += more;
        lost += of_them;
    }
    // More were sent: the limit is that of the first ones.
    assert!(lost <= MOST_LOST, "{lost} of {sent} lost: {:#}", repair());
    // The path lost about 80, and nothing else restores them.
    assert!(restored(&repair()) >= before + 30, "{:#}", repair());
}
