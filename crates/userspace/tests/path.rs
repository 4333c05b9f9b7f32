//! Paths with delay and loss, and how fast a stream is. These measure, and are run by name.

use crate::bytes;
use crate::world::{PEER_V4, PEER_V6, Path, World, options};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

fn flood(mut socket: TcpStream, until: Instant) {
    let buf = vec![7; 1 << 20];
    while Instant::now() < until && socket.write_all(&buf).is_ok() {}
}

fn drain(mut socket: TcpStream) -> u64 {
    let mut buf = vec![0; 1 << 20];
    let mut total = 0;
    while let Ok(length @ 1..) = socket.read(&mut buf) {
        total += length as u64;
    }
    total
}

fn measure(name: &str, host: &'static str, path: Path, outward: bool, seconds: u64) {
    let world = World::with(options(), 1420, path);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (tell, told) = std::sync::mpsc::channel();
    let port = world.serve(host, move |socket| {
        if outward {
            tell.send((drain(socket), Instant::now())).unwrap();
        } else {
            let cubic = socket2::SockRef::from(&socket).set_tcp_congestion(b"cubic");
            cubic.expect("CUBIC");
            flood(socket, until);
        }
    });
    let started = Instant::now();
    let (socket, code) = world.socks(host, port);
    assert_eq!(code, 0);
    let (bytes, ended) = if outward {
        flood(socket, until);
        told.recv().unwrap()
    } else {
        (drain(socket), Instant::now())
    };
    let rate = bytes as f64 * 8.0 / (ended - started).as_secs_f64() / 1e6;
    println!(
        "{name}: {rate:.1} Mbit/s, {} lost",
        world.seen.lost.load(Relaxed)
    );
}

#[test]
#[ignore = "measures"]
fn measure_local() {
    for (host, family) in [(PEER_V4, "IPv4"), (PEER_V6, "IPv6")] {
        measure(&format!("{family} out"), host, Path::default(), true, 4);
        measure(&format!("{family} in"), host, Path::default(), false, 4);
    }
}

#[test]
#[ignore = "measures"]
fn measure_long() {
    let long = |lost, rate, queue| Path {
        delay: Duration::from_millis(25),
        lost,
        rate,
        queue,
    };
    for (name, path, seconds) in [
        ("50 ms", long(0, 0, 0), 8),
        ("50 ms, 0.1 % lost", long(1000, 0, 0), 40),
        ("50 ms, 100 Mbit/s", long(0, 100_000_000, 625_000), 8),
        (
            "50 ms, 20 Mbit/s, short queue",
            long(0, 20_000_000, 30_000),
            8,
        ),
    ] {
        // Inward the kernel sends: the figure to compare with.
        for outward in [true, false] {
            let direction = if outward { "out" } else { "in" };
            measure(
                &format!("{name}, {direction}"),
                PEER_V4,
                path,
                outward,
                seconds,
            );
        }
    }
}

/// Losses are repaired: every byte arrives.
#[test]
fn bytes_survive_a_bad_path() {
    let path = Path {
        delay: Duration::from_millis(5),
        lost: 50,
        rate: 50_000_000,
        queue: 100_000,
    };
    let length = 4 << 20;
    let world = World::with(options(), 1420, path);
    let port = world.serve(PEER_V4, move |socket| {
        bytes::exchange(&socket, 2, 1, length)
    });
    let (socket, code) = world.socks(PEER_V4, port);
    assert_eq!(code, 0);
    bytes::exchange(&socket, 1, 2, length);
    let lost = world.seen.lost.load(Relaxed);
    assert!(lost > 50, "{lost} packets were lost");
}
