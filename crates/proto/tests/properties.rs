//! Thousands of seeded runs of two tunnels on bad paths, each of which must keep the invariants.
//!
//! Each seed determines a scenario: protocol, offloads, addresses, faults, and disturbances at
//! random times (clocks that jump, addresses that change, outages, restarts at any moment), while
//! packets of several flows go in both directions. [`crate::sim::World`] and
//! [`crate::sim::packets::Checker`] assert all along that delivered packets are genuine, arrive
//! once and in order, that the counters balance, that no index leaks, and that time advances.
//! Afterwards the path is good again, and both directions must work again within the protocol's
//! times.
//!
//! `SEIKAN_SEEDS=100000` runs more of them, `SEIKAN_SEED=17` only that one.

use crate::sim::network::{Bursts, Link, Parcel, Path};
use crate::sim::packets::Flow;
use crate::sim::{MILLISECOND, SECOND, Setup, World, address};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use seikan_proto::capabilities::Cipher;
use seikan_proto::constants::{KEEPALIVE_TIMEOUT, REKEY_TIMEOUT};
use seikan_proto::mode::{MAX_ETHERNET_MTU, Mode};
use seikan_proto::noise::Protocol;
use std::hash::Hasher;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Default number of seeds; each takes some 30 ms of one core.
const SEEDS: u64 = 2000;

/// An external disturbance.
#[derive(Clone, Copy, Debug)]
enum Disturbance {
    Restart(usize),
    /// The monotonic and the wall clock of one side jump ahead by this many seconds: it slept.
    Sleep(usize, u64),
    /// The wall clock of one side is set.
    WallClock(usize, i64),
    /// The path changes its MTU.
    Mtu(usize),
    /// The path loses everything for this many milliseconds.
    Outage(u64),
    /// The NAT of side 0 changes its address.
    Rebinding(u16),
    /// GSO batches are lost except their first datagram, from now on or no longer.
    Mangling(bool),
    Loss(f64),
    /// The path loses in bursts from now on, or no longer.
    Bursts(Option<Bursts>),
}

/// The scenario of a seed.
#[derive(Debug)]
struct Scenario {
    setups: [Setup; 2],
    path: Path,
    /// Times in nanoseconds.
    disturbances: Vec<(u64, Disturbance)>,
    duration: u64,
    /// Mean pause between two batches of reads of one side.
    pause: u64,
    gro: bool,
    refuse_every: u64,
}

fn scenario(rng: &mut ChaCha8Rng) -> Scenario {
    let protocol = if rng.random_bool(0.6) {
        Protocol::Native
    } else {
        Protocol::WireGuard
    };
    let v6 = rng.random_bool(0.3);
    let psk = if rng.random_bool(0.3) {
        [7; 32]
    } else {
        [0; 32]
    };
    let ciphers = [
        vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
        vec![Cipher::ChaCha20Poly1305, Cipher::Aes256Gcm],
        vec![Cipher::ChaCha20Poly1305],
    ];
    let mode = match protocol {
        Protocol::Native if rng.random_bool(0.3) => Mode::Ethernet,
        _ => Mode::Ip,
    };
    let most = match mode {
        Mode::Ip => 65_535,
        Mode::Ethernet => MAX_ETHERNET_MTU,
    };
    let mut setup = || Setup {
        protocol,
        mode,
        offload: rng.random_bool(0.6),
        inner_mtu: *[1280, 1444, 9000, most].choose(rng).expect("some"),
        ciphers: ciphers.choose(rng).expect("some").clone(),
        psk,
        keepalive: rng.random_bool(0.3).then_some(Duration::from_secs(25)),
        knows_endpoint: true,
        v6,
        copy_dscp: false,
        repair: rng.random_bool(0.6).then_some(10),
    };
    let setups = [setup(), setup()];
    let ordered = rng.random_bool(0.4);
    let path = Path {
        latency: Duration::from_micros(rng.random_range(50..100_000)),
        jitter: if ordered || rng.random_bool(0.5) {
            Duration::ZERO
        } else {
            Duration::from_micros(rng.random_range(1..20_000))
        },
        loss: if rng.random_bool(0.3) {
            0.0
        } else {
            rng.random_range(0.0..0.3)
        },
        bursts: rng.random_bool(0.3).then(|| bursts(rng)),
        reordering: if ordered {
            0.0
        } else {
            rng.random_range(0.0..0.2)
        },
        duplication: if rng.random_bool(0.5) {
            0.0
        } else {
            rng.random_range(0.0..0.2)
        },
        corruption: if rng.random_bool(0.5) {
            0.0
        } else {
            rng.random_range(0.0..0.1)
        },
        marking: if rng.random_bool(0.5) {
            0.0
        } else {
            rng.random_range(0.0..0.3)
        },
        mtu: *[1500, 1500, 1400, 9000, 1320].choose(rng).expect("some"),
        local: rng.random_bool(0.2),
        rate: rng
            .random_bool(0.3)
            .then(|| rng.random_range(100_000..20_000_000)),
        queue: rng.random_range(3_000..500_000),
        mangles_gso: rng.random_bool(0.1),
        down: false,
    };
    // Half the runs are long enough for a rekey by time.
    let duration = if rng.random_bool(0.5) {
        20 * SECOND
    } else {
        260 * SECOND
    };
    let mut disturbances: Vec<_> = (0..rng.random_range(0..8))
        .map(|_| (rng.random_range(0..duration), disturbance(rng)))
        .collect();
    disturbances.sort_by_key(|d| d.0);
    Scenario {
        setups,
        path,
        disturbances,
        duration,
        pause: duration / rng.random_range(20..80),
        gro: rng.random_bool(0.8),
        refuse_every: if rng.random_bool(0.2) {
            rng.random_range(2..50)
        } else {
            0
        },
    }
}

/// Bursts from two datagrams to those of a whole super-packet, some of which pass.
fn bursts(rng: &mut ChaCha8Rng) -> Bursts {
    Bursts {
        length: rng.random_range(2.0..64.0),
        share: rng.random_range(0.01..0.3),
        loss: *[1.0, 1.0, 0.8, 0.5].choose(rng).expect("some"),
    }
}

fn disturbance(rng: &mut ChaCha8Rng) -> Disturbance {
    let side = rng.random_range(0..2);
    match rng.random_range(0..10) {
        0 | 1 => Disturbance::Restart(side),
        2 => Disturbance::Sleep(
            side,
            *[1, 30, 130, 200, 700, 100_000].choose(rng).expect("some"),
        ),
        3 => Disturbance::WallClock(side, rng.random_range(-100_000..100_000)),
        4 => Disturbance::Mtu(
            *[1280, 1300, 1400, 1492, 1500, 4000]
                .choose(rng)
                .expect("some"),
        ),
        5 => Disturbance::Outage(rng.random_range(100..40_000)),
        6 => Disturbance::Rebinding(rng.random_range(1..60_000)),
        7 => Disturbance::Mangling(rng.random_bool(0.5)),
        8 => Disturbance::Loss(rng.random_range(0.0..0.3)),
        _ => Disturbance::Bursts(rng.random_bool(0.7).then(|| bursts(rng))),
    }
}

/// The next numbers of the flows of one side.
#[derive(Clone, Default)]
struct Traffic {
    datagrams: [u32; 4],
    bytes: [u64; 4],
}

impl Traffic {
    /// One read of the TUN device of side `from`, as its kernel would create it.
    fn read(&mut self, from: usize, setup: &Setup, rng: &mut ChaCha8Rng) -> Vec<u8> {
        let number = rng.random_range(0..4usize);
        let flow = Flow {
            from,
            v6: number % 2 == 1,
            tcp: rng.random_bool(0.5),
            number: number as u8,
        };
        let ecn = if rng.random_bool(0.5) { 2 } else { 0 };
        let mtu = setup.inner_mtu as usize;
        let transport = if flow.tcp { 32 } else { 8 };
        let most = mtu.min(20_000) - flow.ip_len() - transport;
        let size = match rng.random_range(0..4) {
            0 => rng.random_range(6..200.min(most)),
            1 => most,
            _ => rng.random_range(6..=most),
        };
        if flow.tcp {
            let count = if setup.offload && rng.random_bool(0.5) {
                rng.random_range(1..20)
            } else {
                1
            };
            let length = (size * count).min(60_000);
            let position = self.bytes[number];
            self.bytes[number] += length as u64;
            let flags = if rng.random_bool(0.3) { 0x18 } else { 0x10 };
            return flow.segments_with(position, length, size, flags, ecn, setup.offload);
        }
        let count = if setup.offload && rng.random_bool(0.3) {
            rng.random_range(1..10).min(60_000 / size)
        } else {
            1
        };
        let seq = self.datagrams[number];
        self.datagrams[number] += count as u32;
        let partial = setup.offload && rng.random_bool(0.5);
        flow.datagrams(seq, &vec![size; count], partial, ecn)
    }
}

/// Runs the scenario of `seed`. Returns a hash of everything sent and delivered.
fn live(seed: u64) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let s = scenario(&mut rng);
    let mut world = World::with(s.setups.clone(), [s.path.clone(), s.path.clone()], seed);
    world.gro = s.gro;
    world.sent = None;
    let mut traffic = [Traffic::default(), Traffic::default()];
    for i in 0..2 {
        world.sides[i].refuse_every = s.refuse_every;
        if let Some(interval) = s.setups[i].keepalive {
            let now = world.now(i).mono;
            let side = &mut world.sides[i];
            side.tunnel
                .set_persistent_keepalive(side.peer, interval, now);
        }
    }
    let mut disturbances = s.disturbances.iter().copied().peekable();
    let mut outage_ends = None;
    while world.time < s.duration {
        let until = world.time + rng.random_range(1..2 * s.pause);
        while let Some((at, what)) = disturbances.next_if(|d| d.0 <= until) {
            world.run_until(at.max(world.time));
            disturb(&mut world, what, &mut outage_ends);
        }
        if outage_ends.is_some_and(|end| end <= until) {
            world.run_until(outage_ends.take().unwrap_or(until).max(world.time));
            world.links.iter_mut().for_each(|l| l.path.down = false);
        }
        world.run_until(until.max(world.time));
        for (i, traffic) in traffic.iter_mut().enumerate() {
            let reads: Vec<_> = (0..rng.random_range(0..6))
                .map(|_| traffic.read(i, &s.setups[i], &mut rng))
                .collect();
            world.send(i, &reads);
        }
        world.check();
    }
    recover(&mut world);
    world.check_nothing_pending();
    world.trace.finish()
}

fn disturb(world: &mut World, what: Disturbance, outage_ends: &mut Option<u64>) {
    match what {
        Disturbance::Restart(i) => world.restart(i),
        Disturbance::Sleep(i, seconds) => world.sides[i].slept += seconds * SECOND,
        Disturbance::WallClock(i, skew) => world.sides[i].wall_skew = skew,
        Disturbance::Mtu(mtu) => world.links.iter_mut().for_each(|l| l.path.mtu = mtu),
        Disturbance::Outage(ms) => {
            world.links.iter_mut().for_each(|l| l.path.down = true);
            *outage_ends = Some(world.time + ms * MILLISECOND);
        }
        Disturbance::Rebinding(port) => {
            let mut behind = address(0, world.sides[0].setup.v6);
            behind.set_port(port);
            world.rebind(behind);
        }
        Disturbance::Mangling(mangles) => {
            for link in &mut world.links {
                link.path.mangles_gso = mangles;
            }
        }
        Disturbance::Bursts(bursts) => {
            for link in &mut world.links {
                link.path.bursts = bursts;
            }
        }
        Disturbance::Loss(loss) => world.links.iter_mut().for_each(|l| l.path.loss = loss),
    }
}

/// On a good path both directions work again, at the latest after three steps. A side without
/// answers notices (`KEEPALIVE_TIMEOUT + REKEY_TIMEOUT`), an initiation in flight is repeated, and
/// one more has crossed it.
fn recover(world: &mut World) {
    for link in &mut world.links {
        link.path = Path {
            mtu: link.path.mtu,
            latency: link.path.latency,
            ..Path::default()
        };
    }
    for side in &mut world.sides {
        side.refuse_every = 0;
        // A side that restarted with its clock set back is refused as a replay until the clock
        // catches up, as with every WireGuard.
        side.wall_skew = 100_000;
    }
    let bound = KEEPALIVE_TIMEOUT + 4 * REKEY_TIMEOUT;
    let end = world.time + bound.as_nanos() as u64;
    let flows = [0, 1].map(|from| Flow {
        number: 200,
        ..Flow::udp(from)
    });
    let mut seq = 0;
    while world.time < end {
        for (i, flow) in flows.iter().enumerate() {
            world.send(i, &[flow.datagram(seq, 100)]);
        }
        seq += 1;
        world.run(Duration::from_millis(500));
    }
    world.run(Duration::from_secs(1));
    for flow in flows {
        // Not always the last ones: the session of a side that has slept may expire at this moment.
        let newest = world.checkers[1 - flow.from].newest(flow);
        assert!(
            newest.is_some_and(|newest| newest + 3 >= seq),
            "{flow:?} does not work again after {bound:?}: {newest:?} of {seq}"
        );
    }
    if world.sides[0].setup.protocol == Protocol::Native {
        large_packets_pass(world);
    }
}

/// The size of a shrunk path is known by now, so larger packets pass in fragments. Not always the
/// first: a side that has slept considers the session dead before the other does.
fn large_packets_pass(world: &mut World) {
    let mtu = world.sides.iter().map(|s| s.setup.inner_mtu).min();
    let size = mtu.unwrap_or(0) as usize - 28;
    for from in [0, 1] {
        let flow = Flow {
            number: 201,
            ..Flow::udp(from)
        };
        let passed = (0..20).any(|seq| {
            world.send(from, &[flow.datagram(seq, size)]);
            world.run(Duration::from_secs(1));
            world.checkers[1 - from].datagrams(flow) > 0
        });
        assert!(passed, "{size} bytes from {from}");
    }
}

/// Calls `life` for every seed on all cores. Reports the seeds that fail.
fn for_all_seeds(seeds: u64, life: impl Fn(u64) + Sync) {
    let only: Option<u64> = number("SEIKAN_SEED");
    let seeds = number("SEIKAN_SEEDS").unwrap_or(seeds);
    let range = only.map_or(0..seeds, |seed| seed..seed + 1);
    let next = AtomicU64::new(range.start);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= range.end {
                        return;
                    }
                    let lived = catch_unwind(AssertUnwindSafe(|| life(seed)));
                    if lived.is_err() {
                        let mut rng = ChaCha8Rng::seed_from_u64(seed);
                        panic!("SEIKAN_SEED={seed} fails: {:?}", scenario(&mut rng));
                    }
                }
            });
        }
    });
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn every_run_keeps_the_invariants() {
    for_all_seeds(SEEDS, |seed| {
        live(seed);
    });
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in 0..20 {
        assert_eq!(live(seed), live(seed), "seed {seed}");
    }
}

#[test]
fn bursts_have_their_share_and_length() {
    const DATAGRAMS: usize = 200_000;
    for (length, share) in [(1.5, 0.05), (8.0, 0.1), (40.0, 0.3)] {
        let bursts = Some(Bursts {
            length,
            share,
            loss: 1.0,
        });
        let mut link = Link::new(Path {
            bursts,
            ..Path::default()
        });
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let address = SocketAddr::from(([192, 0, 2, 1], 1));
        let lost: Vec<bool> = (0..DATAGRAMS)
            .map(|_| {
                let parcel = Parcel {
                    from: address,
                    to: address,
                    traffic_class: 0,
                    is_opener: false,
                    bytes: Vec::new(),
                };
                link.send(0, 0, parcel, &mut rng).is_empty()
            })
            .collect();
        let count = lost.iter().filter(|lost| **lost).count() as f64;
        let begins = lost.windows(2).filter(|two| !two[0] && two[1]).count() as f64;
        let is_near = |value: f64, expected: f64| (value / expected - 1.0).abs() < 0.1;
        assert!(
            is_near(count / DATAGRAMS as f64, share),
            "{length}: {count}"
        );
        assert!(
            is_near(count / begins, length),
            "{length}: {}",
            count / begins
        );
    }
}
