//! Unknown sources flood the tunnel's port with every kind of datagram they can make: the program
//! and its memory are stable, only entitled sources get answers, and an established flow continues.
//!
//! `seikan lab hostile` measures the throughput that remains.

mod coordinator;
mod cost;
mod relay;
pub mod service;
mod takeover;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, StopsAtEnd, TUNNEL_PORT, Tunnel, World, drops, eventually, in_world, unaccounted,
};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::ValueEnum;
use seikan_lab::hostile::{Capture, Flood, Target, shoot};
use seikan_load::Pattern;
use seikan_proto::keys::{Identity, PrivateKey, PublicKey};
use seikan_proto::noise::{self, Protocol};
use seikan_proto::rng::Rng;
use seikan_proto::tai64n::Tai64nClock;
use seikan_sys::netlink::AddressOptions;
use seikan_sys::netns::NetNs;
use seikan_ui::{Interrupt, Stop};

/// Duration of each kind of flood.
const SHOOTING: Duration = Duration::from_millis(600);
/// Bytes per second of the flow: enough to notice loss, and little enough for a busy machine.
const FLOW_RATE: u64 = 2_000_000;
/// Time without a byte after which the flow has stalled.
const STALL: Duration = Duration::from_secs(1);
/// Maximum growth of the program's memory, in bytes.
const GROWTH: u64 = 8 << 20;

/// A third host with a link of its own to the right, and a socket there that floods the tunnel.
struct UnknownSource {
    namespace: NetNs,
    gun: UdpSocket,
}

impl UnknownSource {
    fn beside(world: &World) -> UnknownSource {
        let namespace = NetNs::create().expect("namespace");
        let netlink = namespace.netlink().expect("netlink");
        let end = std::os::fd::AsFd::as_fd(&world.right.namespace);
        netlink
            .create_veth("outer", "outer", Some(end))
            .expect("link");
        for (netlink, address) in [
            (&netlink, "198.51.100.1/24"),
            (&world.right.netlink, "198.51.100.2/24"),
        ] {
            let index = netlink.link("outer").expect("link").index;
            let address = address.parse().expect("address");
            netlink.add_address(index, address).expect("address");
            netlink.set_up(index).expect("up");
        }
        let open = || UdpSocket::bind("198.51.100.1:4000");
        let gun = namespace.run(open).expect("namespace").expect("bind");
        gun.connect(("198.51.100.2", TUNNEL_PORT)).expect("connect");
        gun.set_nonblocking(true).expect("socket");
        UnknownSource { namespace, gun }
    }

    /// Sends for a while; returns the datagrams that came back until shortly after.
    fn fire(&self, datagrams: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let stop = Interrupt::new();
        std::thread::scope(|scope| {
            let shooting = scope.spawn(|| shoot(&self.gun, datagrams, &stop));
            let stopping = Stop(&stop);
            let mut answers = self.answers(SHOOTING);
            drop(stopping);
            assert!(shooting.join().expect("shooting") > 100, "hardly a flood");
            answers.extend(self.answers(Duration::from_millis(100)));
            answers
        })
    }

    fn answers(&self, time: Duration) -> Vec<Vec<u8>> {
        let until = Instant::now() + time;
        let (mut answers, mut buffer) = (Vec::new(), [0; 2048]);
        while Instant::now() < until {
            match self.gun.recv(&mut buffer) {
                Ok(length) => answers.push(buffer[..length].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => panic!("an answer by ICMP: {error}"),
            }
        }
        answers
    }
}

/// Knowledge of an attacker: the public key, and captured packets to the right.
fn overhear(world: &World, protocol: &str) -> (Target, Vec<Vec<u8>>, Tunnel) {
    let mut capture = world
        .right
        .namespace
        .run(Capture::open)
        .expect("namespace")
        .expect("packet socket");
    let (seen, left) = std::thread::scope(|scope| {
        let seen = scope.spawn(move || capture.datagrams(TUNNEL_PORT, Duration::from_secs(2)));
        let left = world.up_with(&world.left, &["--protocol", protocol]);
        for _ in 0..20 {
            assert!(world.answers_within(PATIENCE), "no echo");
        }
        (seen.join().expect("capture"), left)
    });
    let status = world.status(&world.right);
    let key = status["interface"]["public_key"].as_str().expect("a key");
    let key = STANDARD.decode(key).expect("base64");
    let mut target = Target {
        native: protocol == "native",
        public_key: key.try_into().expect("32 bytes"),
        genuine: Vec::new(),
    };
    let [initiation, .., data] = target.types();
    let of = |kind| {
        seen.iter()
            .filter(move |d| d.first() == Some(&kind))
            .cloned()
    };
    target.genuine = of(data).collect();
    assert!(!target.genuine.is_empty(), "nothing overheard");
    let initiations = of(initiation).collect();
    (target, initiations, left)
}

/// Valid initiations of a key that is no peer.
fn by_an_unknown_source(target: &Target) -> Vec<Vec<u8>> {
    struct Fixed(u64);
    impl Rng for Fixed {
        fn fill(&mut self, destination: &mut [u8]) {
            self.0 += 1;
            Pattern::new(self.0).fill(0, destination);
        }
    }
    let protocol = if target.native {
        Protocol::Native
    } else {
        Protocol::WireGuard
    };
    let unknown_source = Identity::new(PrivateKey::from_bytes([0x42; 32]));
    let receiver = PublicKey::from_bytes(target.public_key);
    (1..=32)
        .map(|n| {
            let stamp = Tai64nClock::default().stamp(Duration::from_secs(1_900_000_000 + n));
            let mut message = [0; 512];
            let (_, length) = noise::Initiation {
                protocol,
                identity: &unknown_source,
                remote: &receiver,
                psk: &Default::default(),
                sender_index: n as u32,
                timestamp: stamp,
                payload: &[],
            }
            .write(&mut Fixed(n << 32), &mut message)
            .expect("an initiation");
            message[..length].to_vec()
        })
        .collect()
}

/// Runs a flow from the left to the right, checked byte by byte, until it is stopped. Returns the
/// received bytes and the longest gap.
fn flow([left, right]: [&NetNs; 2], stop: &AtomicBool) -> (u64, Duration) {
    let listen = || TcpListener::bind("10.80.0.2:0");
    let listener = right.run(listen).expect("namespace");
    let listener = listener.expect("listen");
    let to = listener.local_addr().expect("address");
    let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(10));
    let sender = left.run(connect).expect("namespace");
    let (mut sender, (receiver, _)) =
        (sender.expect("connect"), listener.accept().expect("accept"));
    let patience = Some(Duration::from_secs(20));
    receiver.set_read_timeout(patience).expect("timeout");
    sender.set_write_timeout(patience).expect("timeout");
    let pattern = Pattern::new(7);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive(receiver, pattern));
        let (begin, mut sent, mut chunk) = (Instant::now(), 0, [0; 8192]);
        while !stop.load(Ordering::Relaxed) {
            pattern.fill(sent, &mut chunk);
            sender.write_all(&chunk).expect("send");
            sent += chunk.len() as u64;
            let due = Duration::from_micros(sent * 1_000_000 / FLOW_RATE);
            std::thread::sleep(due.saturating_sub(begin.elapsed()));
        }
        drop(sender);
        let (received, longest) = receiving.join().expect("receive");
        assert_eq!(received, sent);
        (received, longest)
    })
}

fn receive(mut stream: TcpStream, pattern: Pattern) -> (u64, Duration) {
    let (mut received, mut longest, mut buffer) = (0, Duration::ZERO, vec![0; 65_536]);
    loop {
        let waiting = Instant::now();
        let length = stream.read(&mut buffer).expect("receive");
        longest = longest.max(waiting.elapsed());
        assert_eq!(pattern.first_mismatch(received, &buffer[..length]), None);
        received += length as u64;
        if length == 0 {
            return (received, longest);
        }
    }
}

fn survives_the_floods(protocol: &str) {
    in_world(["", ""], |world| {
        let mut right = world.up_with(&world.right, &["--protocol", protocol]);
        let unknown_source = UnknownSource::beside(world);
        let (target, initiations, _left) = overhear(world, protocol);
        assert!(!initiations.is_empty(), "no handshake overheard");
        let stop = AtomicBool::new(false);
        let pid = right.child.id();
        let memory = || seikan_sys::process::memory(pid).expect("memory").resident;
        let (received, longest, grown) = std::thread::scope(|scope| {
            let ends = [&world.left, &world.right].map(|host| &host.namespace);
            let stop = &stop;
            let flowing = scope.spawn(move || flow(ends, stop));
            let stopping = StopsAtEnd(stop);
            // Warm-up: each kind once.
            for flood in Flood::value_variants().iter().copied() {
                let _ = unknown_source.fire(&target.datagrams(flood, 1)[..1]);
            }
            let before = memory();
            unanswered(&unknown_source, &target);
            known_key(&unknown_source, &target, &initiations);
            let grown = memory().saturating_sub(before);
            drop(stopping);
            let (received, longest) = flowing.join().expect("flow");
            (received, longest, grown)
        });
        assert!(right.child.try_wait().expect("wait").is_none(), "it ended");
        assert!(grown < GROWTH, "memory grew by {grown} bytes");
        assert!(longest < STALL, "stood still for {longest:?}");
        assert!(received > FLOW_RATE, "{received} bytes in all");
        accounted(world);
    });
}

/// Without the public key, and for replays, there is no answer at all.
fn unanswered(unknown_source: &UnknownSource, target: &Target) {
    let kinds = Flood::value_variants()
        .iter()
        .copied()
        .filter(|flood| *flood != Flood::Initiations);
    for flood in kinds {
        let answers = unknown_source.fire(&target.datagrams(flood, 2));
        assert!(answers.is_empty(), "{flood:?}: {:02x?}", answers[0]);
    }
}

/// With the public key an attacker can cause load, and then gets cookies as in WireGuard: no larger
/// than their trigger, to its source address, and nothing else.
fn known_key(unknown_source: &UnknownSource, target: &Target, initiations: &[Vec<u8>]) {
    let [_, _, cookie_reply, _] = target.types();
    for datagrams in [
        target.datagrams(Flood::Initiations, 3),
        by_an_unknown_source(target),
        initiations.to_vec(),
    ] {
        let answers = unknown_source.fire(&datagrams);
        let cookie = |answer: &Vec<u8>| answer.len() == 64 && answer[0] == cookie_reply;
        assert!(answers.iter().all(cookie), "{answers:02x?}");
        // Bursts of 5, then 20 a second.
        assert!((1..=30).contains(&answers.len()), "{}", answers.len());
    }
    // After a second the load is over: then the same datagrams get no answer, and another drop
    // reason.
    std::thread::sleep(Duration::from_millis(2100));
    for datagrams in [
        target.datagrams(Flood::Initiations, 4),
        by_an_unknown_source(target),
        initiations.to_vec(),
    ] {
        for datagram in datagrams.iter().take(20) {
            unknown_source.gun.send(datagram).expect("send");
        }
    }
    let answers = unknown_source.answers(Duration::from_millis(200));
    assert!(answers.is_empty(), "{answers:02x?}");
}

/// Asserts that the counters balance and name each kind of datagram.
fn accounted(world: &World) {
    assert!(world.answers_within(PATIENCE), "no echo");
    // The socket's queue is empty once two readings agree.
    let count = || world.status(&world.right)["totals"]["inbound"]["drops"].clone();
    eventually("no end of drops", || count() == count());
    let status = world.status(&world.right);
    assert_eq!(unaccounted(&status), [0, 0], "{status:#}");
    assert_eq!(unaccounted(&world.status(&world.left)), [0, 0]);
    for filtered in ["oversized_drops", "malformed_drops", "flood_drops"] {
        assert!(
            status[filtered].as_u64() > Some(0),
            "{filtered}: {status:#}"
        );
    }
    for reason in [
        "unknown_index",
        "replayed",
        "bad_tag",
        "bad_mac1",
        "cookie_required",
        "rate_limited",
        "bad_handshake",
        "unknown_peer",
        "replayed_handshake",
    ] {
        assert!(
            drops(&status, "inbound", reason) > 0,
            "{reason}: {status:#}"
        );
    }
}

#[test]
fn wireguard_mode_survives_the_floods() {
    survives_the_floods("wireguard");
}

#[test]
fn native_mode_survives_the_floods() {
    survives_the_floods("native");
}

#[test]
fn a_peer_connects_during_a_flood_of_data() {
    in_world(["", ""], |world| {
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let unknown_source = UnknownSource::beside(world);
        let (target, _, left) = overhear(world, "native");
        let limited = || world.status(&world.right)["flood_drops"].as_u64() > Some(0);
        let datagrams = target.datagrams(Flood::Forged, 1);
        let stop = Interrupt::new();
        std::thread::scope(|scope| {
            scope.spawn(|| shoot(&unknown_source.gun, &datagrams, &stop));
            let _stopping = Stop(&stop);
            eventually("the flood is not limited", limited);
            drop(left);
            let _left = world.up_with(&world.left, &["--protocol", "native"]);
            assert!(world.answers_within(PATIENCE), "no echo");
        });
        // The limit ends with the flood: all datagrams of an unknown source reach the program again.
        let counts = || {
            let status = world.status(&world.right);
            let drops = status["totals"]["inbound"]["drops"].as_object();
            let drops = drops.expect("drops").values();
            let rejected: u64 = drops.filter_map(serde_json::Value::as_u64).sum();
            [rejected, status["flood_drops"].as_u64().expect("a count")]
        };
        let burst = || {
            let before = counts();
            for datagram in datagrams.iter().cycle().take(200) {
                unknown_source.gun.send(datagram).expect("send");
            }
            let new = || [0, 1].map(|kind| counts()[kind] - before[kind]);
            eventually("datagrams are missing", || new().iter().sum::<u64>() >= 200);
            new()
        };
        eventually("the limit is not lifted", || burst() == [200, 0]);
    });
}

#[test]
fn a_long_datagram_is_refused_until_an_interface_carries_it() {
    in_world(["", ""], |world| {
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let unknown_source = UnknownSource::beside(world);
        // These datagrams have no message type, and are reassembled from fragments.
        let counts = || {
            let status = world.status(&world.right);
            let refused = status["oversized_drops"].as_u64().expect("a count");
            (
                refused,
                status["malformed_drops"].as_u64().expect("a count"),
            )
        };
        unknown_source.gun.send(&[0xff; 8000]).expect("send");
        eventually("it is not refused", || counts() == (1, 0));
        let outer = world.right.netlink.link("outer").expect("link").index;
        world.right.netlink.set_mtu(outer, 9000).expect("mtu");
        let taken = || {
            unknown_source.gun.send(&[0xff; 8000]).expect("send");
            counts().1 > 0
        };
        eventually("it is refused still", taken);
        // Longer datagrams are refused as before.
        let (before, _) = counts();
        unknown_source.gun.send(&[0xff; 9001]).expect("send");
        eventually("a longer one is not refused", || counts().0 == before + 1);
    });
}

#[test]
fn a_sender_with_an_address_of_a_proxied_peer_is_refused() {
    in_world(["", ""], |world| {
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let lo = world.right.netlink.link("lo").expect("link").index;
        let address = "100::7/128".parse().expect("address");
        world.right.netlink.set_up(lo).expect("up");
        let options = AddressOptions {
            no_dad: true,
            ..AddressOptions::default()
        };
        let added = world.right.netlink.add_address_with(lo, address, options);
        added.expect("address");
        let sent = world.right.namespace.run(|| {
            let socket = UdpSocket::bind("[100::7]:0").expect("bind");
            for _ in 0..3 {
                socket
                    .send_to(&[0xff; 100], ("::1", TUNNEL_PORT))
                    .expect("sent");
            }
        });
        sent.expect("namespace");
        let dropped = || drops(&world.status(&world.right), "inbound", "unknown_source");
        eventually("they are not refused", || dropped() == 3);
        assert_eq!(unaccounted(&world.status(&world.right)), [0, 0]);
    });
}
