//! More load than the tunnel can carry: packets wait in the queue of its device, and are marked, or
//! dropped at the head if they cannot be (RFC 8289, RFC 3168).

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, World, drops, in_world, unaccounted};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{ReceiveBatch, Transmit, UdpOptions, UdpSocket};

const RIGHT: &str = "10.80.0.2:9000";
const ECT0: u8 = 2;
const CE: u8 = 3;

/// Sends super-packets of datagrams with this traffic class through the tunnel, as fast as the
/// kernel takes them.
fn flood(traffic_class: u8, until: Instant) {
    let destination: SocketAddr = RIGHT.parse().expect("address");
    let here = "10.80.0.1:0".parse().expect("address");
    let socket = UdpSocket::bind(here, &UdpOptions::default()).expect("bind");
    let transmit = Transmit {
        destination,
        source: None,
        traffic_class,
        hop_limit: None,
        segment_size: Some(1200),
        payload: &[7; 48 * 1200],
    };
    while Instant::now() < until {
        // A full queue is no error for a UDP sender.
        let _ = socket.send(&transmit);
    }
}

/// Counts arriving datagrams by ECN field, until the flood has ended and all have arrived.
fn count(until: Instant) -> [u64; 4] {
    let socket =
        UdpSocket::bind(RIGHT.parse().expect("address"), &UdpOptions::default()).expect("bind");
    let mut epoll = Epoll::new(1).expect("epoll");
    epoll.add(&socket, 0, Interest::Read).expect("epoll");
    let mut batch = ReceiveBatch::new(16, 65_536);
    let mut counts = [0; 4];
    let mut latest = Instant::now();
    while Instant::now() < until || latest.elapsed() < Duration::from_millis(500) {
        let _ready = epoll.wait(Some(Duration::from_millis(20))).expect("epoll");
        let Ok(received) = socket.receive(&mut batch) else {
            continue;
        };
        latest = Instant::now();
        for meta in &batch.parts_mut().0[..received] {
            let datagrams = meta.length.div_ceil(meta.segment_size.max(1));
            counts[usize::from(meta.traffic_class & 3)] += datagrams as u64;
        }
    }
    counts
}

/// Runs a flood of a second and a half; returns the datagrams by ECN field, and the drops for
/// delay.
fn overload(world: &World, traffic_class: u8) -> ([u64; 4], u64) {
    let before = drops(&world.status(&world.left), "outbound", "queue_delay");
    let until = Instant::now() + Duration::from_millis(1500);
    let counts = std::thread::scope(|scope| {
        let right = world.right.namespace.try_clone().expect("namespace");
        let counts = scope.spawn(move || right.run(|| count(until)));
        let flood = || flood(traffic_class, until);
        world.left.namespace.run(flood).expect("namespace");
        counts.join().expect("thread").expect("namespace")
    });
    let left = world.status(&world.left);
    assert_eq!(unaccounted(&left), [0; 2]);
    (counts, drops(&left, "outbound", "queue_delay") - before)
}

fn relieved(protocol: &str) {
    in_world([""; 2], |world| {
        let _tunnels = world.both_up_with(&["--protocol", protocol]);
        assert!(world.answers_within(PATIENCE), "no echo");

        let ([plain, _, _, marked], dropped) = overload(world, 0);
        assert!(plain > 0 && marked == 0, "{plain} {marked}");
        assert!(dropped > 0, "nothing was dropped for its delay");

        let ([plain, _, capable, marked], dropped) = overload(world, ECT0);
        assert!(capable > 0 && plain == 0, "{capable} {plain}");
        assert!(marked > 0, "nothing was marked CE ({CE})");
        assert_eq!(dropped, 0, "packets with ECN were dropped for their delay");
    });
}

#[test]
fn in_wireguard_mode() {
    relieved("wireguard");
}

#[test]
fn in_native_mode() {
    relieved("native");
}
