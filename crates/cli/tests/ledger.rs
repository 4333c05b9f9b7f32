//! The counters of the real program balance on both sides: every packet that entered left again,
//! was consumed, is pending, or was dropped for a counted reason.

use std::net::UdpSocket;

use crate::common::{PATIENCE, World, drops, eventually, in_world, number, unaccounted};

const PROTOCOLS: [&str; 2] = ["wireguard", "native"];

/// Sends traffic with drops of several kinds, in one protocol.
fn closes(protocol: &str) {
    // 10.80.9.0/24 is routed to the right, which does not accept that source from the left, and
    // whose kernel does not use it.
    let peer = "AllowedIPs = 10.80.0.2/32, 10.80.9.0/24\nPersistentKeepalive = 1";
    in_world(["MTU = 1400\nAddress = 10.80.9.1/32", peer], |world| {
        world.right.add_to_interface("MTU = 1398");
        let _tunnels = world.both_up_with(&["--protocol", protocol]);
        let send = || {
            // Within allowed IPs and routed nowhere else: not accepted as source.
            let strange = UdpSocket::bind("10.80.9.1:0").expect("bind");
            let usual = UdpSocket::bind("10.80.0.1:0").expect("bind");
            for n in 0..50_usize {
                // A fragmented one now and then.
                let payload = vec![n as u8; if n % 10 == 0 { 4000 } else { 100 }];
                strange.send_to(&payload, "10.80.0.2:9").expect("send");
                usual.send_to(&payload, "10.80.9.7:9").expect("send");
                usual.send_to(&payload, "10.80.0.2:9").expect("send");
            }
            // The interface's network is wider than the peer's allowed IPs.
            for _ in 0..7 {
                usual.send_to(b"nobody", "10.80.0.77:9").expect("send");
            }
        };
        world.left.namespace.run(send).expect("namespace");
        assert!(world.answers_within(PATIENCE), "no echo");
        let left = world.status(&world.left);
        let right = world.status(&world.right);
        assert_eq!((unaccounted(&left), unaccounted(&right)), ([0; 2], [0; 2]));
        assert_eq!(drops(&left, "outbound", "no_route"), 7, "{left:#}");
        // 45 small ones, 5 of three fragments (of up to 1396 bytes) each.
        assert_eq!(
            drops(&right, "inbound", "source_not_allowed"),
            60,
            "{right:#}"
        );
        assert!(number(&right, "inbound", "packets_out") >= 120, "{right:#}");
        // To an address of its own: the kernel remembers the path MTU of the error.
        let large = || UdpSocket::bind("10.80.0.1:0")?.send_to(&[0; 1372], "10.80.9.99:9");
        let sent = world.left.namespace.run(large).expect("namespace");
        assert_eq!(sent.expect("send"), 1372);
        if protocol == "native" {
            // The other protocol does not know the limit of the far end.
            let is_reported = || drops(&world.status(&world.left), "outbound", "too_big") == 1;
            eventually("no drop for its size", is_reported);
        }
        balanced(world);
    });
}

/// Recomputes `unaccounted` of the status from the other figures.
fn balanced(world: &World) {
    for host in [&world.left, &world.right] {
        let status = world.status(host);
        let mut all = vec![&status["totals"]];
        all.extend(
            status["peers"]
                .as_array()
                .expect("peers")
                .iter()
                .map(|peer| &peer["traffic"]),
        );
        for traffic in all {
            for direction in ["outbound", "inbound"] {
                let counts = &traffic[direction];
                let of = |name: &str| counts[name].as_u64().expect("a number");
                let dropped: u64 = counts["drops"]
                    .as_object()
                    .expect("drops")
                    .values()
                    .map(|n| n.as_u64().expect("a number"))
                    .sum();
                let fates = of("packets_out") + of("consumed") + of("pending") + dropped;
                assert_eq!(of("packets_in"), fates, "{direction}: {traffic:#}");
                assert!(of("packets_in") > 0, "{direction}: {traffic:#}");
            }
        }
    }
}

#[test]
fn in_wireguard_mode() {
    closes(PROTOCOLS[0]);
}

#[test]
fn in_native_mode() {
    closes(PROTOCOLS[1]);
}
