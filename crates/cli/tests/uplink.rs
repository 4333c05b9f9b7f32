//! `uplink-rate`: packets leave no faster than it says, and none is lost on the way.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use crate::common::{in_world, unaccounted};

/// Datagrams of a burst: 50 ms, which is too short for the queue delay to be limited.
const BURST: usize = 200;
/// Bytes of a datagram inside.
const BYTES: usize = 1200;
/// Rate in bits per second.
const RATE: f64 = 40e6;

#[test]
fn a_burst_arrives_no_faster_than_the_rate_of_the_uplink() {
    for protocol in ["native", "wireguard"] {
        let peer = "AllowedIPs = 10.80.0.2/32\nEndpoint = 192.0.2.2:51820";
        in_world(["", peer], |world| {
            world.left.add_to_interface("UplinkRate = 40M");
            let _tunnels = world.both_up_with(&["--protocol", protocol]);
            assert!(world.answers_within(Duration::from_secs(10)));
            let right = &world.right.namespace;
            let receiver = right.run(|| UdpSocket::bind("10.80.0.2:4000").expect("bind"));
            let receiver = receiver.expect("namespace");
            let timeout = Some(Duration::from_secs(5));
            receiver.set_read_timeout(timeout).expect("a timeout");
            let send = || {
                let socket = UdpSocket::bind("0.0.0.0:0").expect("bind");
                for _ in 0..BURST {
                    let sent = socket.send_to(&[7; BYTES], "10.80.0.2:4000");
                    sent.expect("sent");
                }
            };
            let left = &world.left.namespace;
            std::thread::scope(|scope| {
                scope.spawn(|| left.run(send).expect("namespace"));
                let mut space = [0; 2000];
                receiver.recv(&mut space).expect("the first");
                let begin = Instant::now();
                for number in 1..BURST {
                    let received = receiver.recv(&mut space);
                    assert_eq!(received.ok(), Some(BYTES), "{protocol}: {number}");
                    if number == BURST / 2 {
                        // Those that wait are accounted for.
                        assert_eq!(unaccounted(&world.status(&world.left)), [0, 0]);
                    }
                }
                let rate = ((BURST - 1) * BYTES * 8) as f64 / begin.elapsed().as_secs_f64();
                println!("{protocol}: {rate} bit/s");
                assert!(rate < RATE, "{protocol}: {rate} bit/s");
            });
            let status = world.status(&world.left);
            assert_eq!(status["uplink_rate"], 40_000_000);
            assert!(status["delayed_datagrams"].as_u64() > Some(BURST as u64 / 2));
            assert_eq!(unaccounted(&status), [0, 0]);
        });
    }
}
