//! A seeded simulation of two tunnels and the network between them, without clocks and sockets.
//!
//! [`World`] moves time from event to event: a datagram arrives, or a tunnel is to be polled. After
//! every step it checks the invariants; [`Checker`] checks the delivered packets.

pub mod ethernet;
pub mod network;
pub mod packets;

use network::{Link, Parcel, Path};
use packets::Checker;
use rand::{Rng as _, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use seikan_observe::{DropReason, PeerCounters};
use seikan_proto::batch::PacketBatch;
use seikan_proto::birthday::PORTS;
use seikan_proto::capabilities::Cipher;
use seikan_proto::inbox::{Inbox, MAX_PIECES, Write};
use seikan_proto::indices::PeerId;
use seikan_proto::keys::{PresharedKey, PrivateKey};
use seikan_proto::mode::Mode;
use seikan_proto::noise::Protocol;
use seikan_proto::outbox::Outbox;
use seikan_proto::peer::Peer;
use seikan_proto::rng::Rng;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::VNET_HDR_LEN;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

pub const SECOND: u64 = 1_000_000_000;
pub const MILLISECOND: u64 = 1_000_000;
/// World time zero on the monotonic clock.
pub const EPOCH: u64 = 1 << 42;

/// A seeded random source.
pub struct Seeded(pub ChaCha8Rng);

impl Seeded {
    pub fn new(seed: u64) -> Seeded {
        Seeded(ChaCha8Rng::seed_from_u64(seed))
    }
}

impl Rng for Seeded {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0.fill_bytes(destination);
    }
}

/// The configuration of a side; kept over restarts.
#[derive(Clone, Debug)]
pub struct Setup {
    pub protocol: Protocol,
    pub mode: Mode,
    pub offload: bool,
    pub inner_mtu: u32,
    pub ciphers: Vec<Cipher>,
    pub psk: [u8; 32],
    pub keepalive: Option<Duration>,
    /// Whether it knows the other side's address.
    pub knows_endpoint: bool,
    pub v6: bool,
    pub copy_dscp: bool,
    /// Loss repair, up to this many percent of parity.
    pub repair: Option<u8>,
}

impl Setup {
    pub fn new(protocol: Protocol) -> Setup {
        Setup {
            protocol,
            mode: Mode::Ip,
            offload: true,
            inner_mtu: 1420,
            ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            psk: [0; 32],
            keepalive: None,
            knows_endpoint: true,
            v6: false,
            copy_dscp: false,
            repair: None,
        }
    }
}

/// One side.
pub struct Side {
    pub tunnel: Tunnel,
    pub setup: Setup,
    pub peer: PeerId,
    pub address: SocketAddr,
    /// Added to world time on this side's monotonic clock.
    pub slept: u64,
    /// Added to the wall clock, in seconds.
    pub wall_skew: i64,
    /// Writes to the TUN device, virtio-net header first; in Ethernet mode without the Ethernet
    /// header.
    pub delivered: Vec<Vec<u8>>,
    /// Frames without IP that were written to the TAP device.
    pub frames: Vec<Vec<u8>>,
    /// The device refuses one in this many writes; 0 for none.
    pub refuse_every: u64,
    writes: u64,
    restarts: u64,
    pub outbox: Outbox,
    pub inbox: Inbox,
}

/// Two sides and the paths between them.
pub struct World {
    pub sides: [Side; 2],
    /// `links[i]` carries the datagrams of side `i`.
    pub links: [Link; 2],
    pub checkers: [Checker; 2],
    /// World time in nanoseconds.
    pub time: u64,
    /// Every datagram sent, if recorded.
    pub sent: Option<Vec<(usize, Parcel)>>,
    /// Datagrams to this address are forwarded to the other side, from this address.
    pub relay: Option<SocketAddr>,
    /// Additional delay of the relay.
    pub detour: Duration,
    /// `direct_down[i]`: datagrams of side `i` arrive over the relay only.
    pub direct_down: [bool; 2],
    /// Side 0 is behind a symmetric NAT, side 1 behind one that admits only addresses it has sent
    /// to.
    pub nats: Option<Nats>,
    /// Received datagrams are merged as by UDP_GRO.
    pub gro: bool,
    pub trace: DefaultHasher,
    keys: [[u8; 32]; 2],
    seed: u64,
    rng: ChaCha8Rng,
    flying: BTreeMap<(u64, u64), (usize, Parcel)>,
    order: u64,
    /// See [`Self::release`].
    arena: Vec<u8>,
}

/// The NATs of both sides.
#[derive(Default)]
pub struct Nats {
    /// Ports that side 0 has opened towards side 1, and the one that it keeps.
    pub open: BTreeSet<u16>,
    pub kept_port: Option<u16>,
    /// Destinations of side 1.
    sent: BTreeSet<SocketAddr>,
    /// Additional delay of the direct path, in nanoseconds.
    pub detour: u64,
    pub punches: u32,
}

impl Nats {
    /// The outer port of the tunnel's own socket towards side 1.
    const MAIN: u16 = 999;

    /// Whether a datagram of side `i` passes. Translates its address.
    fn pass(&mut self, i: usize, parcel: &mut Parcel) -> bool {
        match i {
            0 => {
                let port = self.kept_port.unwrap_or(Nats::MAIN);
                parcel.from.set_port(port);
                self.sent.contains(&parcel.from)
            }
            _ => {
                self.sent.insert(parcel.to);
                let port = parcel.to.port();
                if self.open.contains(&port) {
                    self.kept_port = Some(port);
                }
                parcel.to = address(0, parcel.to.is_ipv6());
                self.kept_port == Some(port)
            }
        }
    }
}

pub fn address(side: usize, v6: bool) -> SocketAddr {
    if v6 {
        SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, side as u16 + 1], 51820))
    } else {
        SocketAddr::from(([192, 0, 2, side as u8 + 1], 51820))
    }
}

impl World {
    /// Two equal sides and good paths.
    pub fn new(protocol: Protocol, seed: u64) -> World {
        World::with(
            [Setup::new(protocol), Setup::new(protocol)],
            [Path::default(), Path::default()],
            seed,
        )
    }

    pub fn with(setups: [Setup; 2], paths: [Path; 2], seed: u64) -> World {
        let mut rng = Seeded::new(seed);
        let mut keys = [[0; 32]; 2];
        keys.iter_mut().for_each(|key| rng.fill(key));
        let [a, b] = setups;
        // Restored datagrams come after later ones.
        let repairs = a.repair.is_some() && b.repair.is_some();
        let in_order = paths.each_ref().map(|path| path.keeps_order() && !repairs);
        let sides = [(0, a), (1, b)].map(|(i, setup)| Side::new(i, setup, keys, seed, 0));
        World {
            sides,
            links: paths.map(Link::new),
            checkers: [Checker::new(in_order[1]), Checker::new(in_order[0])],
            time: 0,
            sent: Some(Vec::new()),
            relay: None,
            detour: Duration::ZERO,
            direct_down: [false; 2],
            nats: None,
            gro: true,
            trace: DefaultHasher::new(),
            keys,
            seed,
            rng: rng.0,
            flying: BTreeMap::new(),
            order: 0,
            arena: vec![0; 200_000],
        }
    }

    /// The clocks of side `i`.
    pub fn now(&self, i: usize) -> Now {
        let side = &self.sides[i];
        let wall = 1_800_000_000 + side.wall_skew;
        Now {
            mono: Instant::from_nanos(EPOCH + self.time + side.slept),
            wall: Duration::from_secs(wall.max(0) as u64)
                + Duration::from_nanos(self.time + side.slept),
        }
    }

    pub fn peer(&self, i: usize) -> &Peer {
        let side = &self.sides[i];
        side.tunnel.peer(side.peer).expect("the one peer")
    }

    pub fn totals(&self, i: usize) -> PeerCounters {
        self.sides[i].tunnel.totals()
    }

    /// Restarts side `i` without its state.
    pub fn restart(&mut self, i: usize) {
        let old = &self.sides[i];
        let mut fresh = Side::new(i, old.setup.clone(), self.keys, self.seed, old.restarts + 1);
        fresh.address = old.address;
        fresh.slept = old.slept;
        fresh.wall_skew = old.wall_skew;
        fresh.refuse_every = old.refuse_every;
        self.sides[i] = fresh;
        let now = self.now(i).mono;
        let side = &mut self.sides[i];
        if let Some(interval) = side.setup.keepalive {
            side.tunnel
                .set_persistent_keepalive(side.peer, interval, now);
        }
    }

    /// The private key of side `i`, for forged messages.
    pub fn private_key(&self, i: usize) -> PrivateKey {
        PrivateKey::from_bytes(self.keys[i])
    }

    /// Takes the datagrams that side `i` has sent since the last call.
    pub fn take_sent(&mut self, i: usize) -> Vec<Parcel> {
        let sent = self.sent.get_or_insert_default();
        let (mine, others) = std::mem::take(sent).into_iter().partition(|s| s.0 == i);
        *sent = others;
        mine.into_iter().map(|(_, parcel)| parcel).collect()
    }

    /// The NAT of side 0 changes its address; the old address is unused.
    pub fn rebind(&mut self, address: SocketAddr) {
        self.sides[0].address = address;
    }

    /// Passes reads of the TUN device to side `i`, in one batch.
    pub fn send(&mut self, i: usize, reads: &[Vec<u8>]) {
        self.send_batch(i, reads, false);
    }

    /// As [`Self::send`]; `congested` marks the first read as having waited too long.
    pub fn send_batch(&mut self, i: usize, reads: &[Vec<u8>], congested: bool) {
        match self.sides[i].setup.mode {
            Mode::Ip => self.send_raw(i, reads, congested),
            Mode::Ethernet => {
                let framed: Vec<_> = reads.iter().map(|read| ethernet::framed(i, read)).collect();
                self.send_raw(i, &framed, congested);
            }
        }
    }

    /// As [`Self::send_batch`], with the bytes as the device of the side's mode has them.
    pub fn send_raw(&mut self, i: usize, reads: &[Vec<u8>], congested: bool) {
        let mut batch = PacketBatch::new(4 << 20, 512);
        for read in reads {
            batch.space().expect("a batch of test packets fits")[..read.len()]
                .copy_from_slice(read);
            batch.commit(read.len());
        }
        if congested {
            batch.set_congested();
        }
        let now = self.now(i);
        let side = &mut self.sides[i];
        side.tunnel
            .outbound(now, &mut batch, &mut side.outbox, &mut side.inbox);
        self.flush(i, &[]);
    }

    /// Advances time by `by` and processes everything due.
    pub fn run(&mut self, by: Duration) {
        self.run_until(self.time + by.as_nanos() as u64);
    }

    pub fn run_until(&mut self, end: u64) {
        let mut stalled = 0;
        loop {
            let wake = (0..2).filter_map(|i| self.wakeup(i)).min();
            let arrival = self.flying.first_key_value().map(|(key, _)| key.0);
            let Some(next) = wake.into_iter().chain(arrival).min().filter(|n| *n <= end) else {
                break;
            };
            stalled = if next <= self.time { stalled + 1 } else { 0 };
            assert!(
                stalled < 100,
                "seed {}: time stands still at {}",
                self.seed,
                self.time
            );
            self.time = self.time.max(next);
            for i in 0..2 {
                if self.wakeup(i).is_some_and(|at| at <= self.time) {
                    self.poll(i);
                }
            }
            self.arrivals();
            self.punch();
            self.check();
        }
        self.time = self.time.max(end);
    }

    /// Opens ports for side 0, as its driver does.
    fn punch(&mut self) {
        let now = self.now(0).mono;
        let side = &mut self.sides[0];
        let Some(nats) = &mut self.nats else { return };
        for punch in side.tunnel.take_punches() {
            nats.punches += 1;
            while nats.open.len() < usize::from(PORTS) {
                let port: u16 = self.rng.random_range(1024..=u16::MAX);
                nats.open.insert(port);
            }
            side.tunnel.on_punched(punch.peer, PORTS, now);
        }
        if nats.kept_port.is_some() && !nats.open.is_empty() {
            nats.open.clear();
            side.tunnel.on_punch_succeeded(side.peer, now);
        }
        if !side.tunnel.is_open(side.peer, now) {
            nats.open.clear();
        }
    }

    /// When side `i` is to be polled, in world time.
    fn wakeup(&self, i: usize) -> Option<u64> {
        let side = &self.sides[i];
        let (at, _) = side.tunnel.next_wakeup()?;
        Some(at.as_nanos().saturating_sub(EPOCH + side.slept))
    }

    fn poll(&mut self, i: usize) {
        let now = self.now(i);
        for _ in 0..100 {
            let side = &mut self.sides[i];
            let more = side.tunnel.poll(now, &mut side.outbox, &mut side.inbox);
            let next = side.tunnel.next_wakeup();
            self.flush(i, &[]);
            self.release(i);
            if !more {
                assert!(
                    next.is_none_or(|(at, _)| at > now.mono),
                    "nothing came of the poll"
                );
                return;
            }
        }
        panic!("seed {}: poll has no end", self.seed);
    }

    fn arrivals(&mut self) {
        let later = self.flying.split_off(&(self.time + 1, 0));
        let here = std::mem::replace(&mut self.flying, later);
        for i in 0..2 {
            let address = self.sides[i].address;
            let mine = here.values().filter(|(to, p)| *to == i && p.to == address);
            let parcels: Vec<Parcel> = mine.map(|(_, parcel)| parcel.clone()).collect();
            self.receive(i, &parcels);
        }
    }

    /// Passes datagrams to side `i` as one batch of receives.
    pub fn receive(&mut self, i: usize, parcels: &[Parcel]) {
        if parcels.is_empty() {
            return;
        }
        let (mut arena, datagrams) = gather(parcels, self.gro);
        let now = self.now(i);
        let side = &mut self.sides[i];
        side.tunnel.inbound(
            now,
            datagrams.into_iter(),
            &mut arena,
            &mut side.inbox,
            &mut side.outbox,
        );
        self.flush(i, &arena);
        self.release(i);
    }

    /// Processes what loss repair restored or held back.
    fn release(&mut self, i: usize) {
        let now = self.now(i);
        let mut arena = std::mem::take(&mut self.arena);
        loop {
            let side = &mut self.sides[i];
            let more = side
                .tunnel
                .release(now, &mut arena, &mut side.inbox, &mut side.outbox);
            self.flush(i, &arena);
            if !more {
                break;
            }
        }
        self.arena = arena;
    }

    /// Sends the outbox of side `i` and writes its inbox, as the daemon does.
    pub fn flush(&mut self, i: usize, arena: &[u8]) {
        let World { sides, links, .. } = self;
        let other = sides[1 - i].address;
        let (side, link) = (&mut sides[i], &mut links[i]);
        for run in side.outbox.runs() {
            let bytes = side.outbox.bytes(run);
            self.trace.write(bytes);
            let overhead = if run.destination.address.is_ipv6() {
                48
            } else {
                28
            };
            if link.path.local && run.segment_size + overhead > link.path.mtu {
                side.tunnel.sent(run, Err(DropReason::SendTooLarge.into()));
                continue;
            }
            assert_eq!(bytes.chunks(run.segment_size).len(), run.segments);
            for (position, datagram) in bytes.chunks(run.segment_size).enumerate() {
                let parcel = Parcel {
                    from: side.address,
                    to: run.destination.address,
                    traffic_class: run.destination.traffic_class,
                    is_opener: run.destination.hop_limit.is_some(),
                    bytes: datagram.to_vec(),
                };
                if let Some(sent) = &mut self.sent {
                    sent.push((i, parcel.clone()));
                }
                let relayed = self.relay.filter(|relay| *relay == parcel.to);
                if parcel.is_opener || relayed.is_none() && self.direct_down[i] {
                    continue;
                }
                let (mut parcel, mut detour) = match relayed {
                    Some(_) => (parcel, self.detour.as_nanos() as u64),
                    None => (parcel, 0),
                };
                if relayed.is_none()
                    && let Some(nats) = &mut self.nats
                {
                    detour = nats.detour;
                    if !nats.pass(i, &mut parcel) {
                        continue;
                    }
                }
                let parcel = match relayed {
                    Some(relay) => Parcel {
                        from: relay,
                        to: other,
                        ..parcel
                    },
                    None => parcel,
                };
                for (at, parcel) in link.send(self.time, position, parcel, &mut self.rng) {
                    self.order += 1;
                    let key = (at + detour, self.order);
                    self.flying.insert(key, (1 - i, parcel));
                }
            }
            side.tunnel.sent(run, Ok(()));
        }
        side.outbox.clear();
        for write in side.inbox.writes() {
            let bytes = written(write, arena);
            side.writes += 1;
            if side.refuse_every > 0 && side.writes % side.refuse_every == 0 {
                side.tunnel
                    .delivered(write, Err(DropReason::TunWriteRefused.into()));
                continue;
            }
            self.trace.write(&self.time.to_le_bytes());
            self.trace.write(&bytes);
            let bytes = match side.setup.mode {
                Mode::Ip => bytes,
                Mode::Ethernet => match ethernet::unframed(i, &bytes) {
                    Some(bytes) => bytes,
                    None => {
                        side.frames.push(bytes[VNET_HDR_LEN..].to_vec());
                        side.tunnel.delivered(write, Ok(()));
                        continue;
                    }
                },
            };
            self.checkers[i].write(i, &bytes);
            if !side.setup.offload {
                assert!(
                    bytes[..10].iter().all(|b| *b == 0),
                    "offload without a device for it"
                );
            }
            side.delivered.push(bytes);
            side.tunnel.delivered(write, Ok(()));
        }
        side.inbox.clear();
    }

    /// Checks the invariants.
    pub fn check(&self) {
        for side in &self.sides {
            let totals = side.tunnel.totals();
            for direction in [&totals.outbound, &totals.inbound] {
                assert_eq!(
                    direction.unaccounted(),
                    0,
                    "seed {}: {direction:?}",
                    self.seed
                );
            }
            let known: usize = side.tunnel.peers().map(Peer::indices).sum();
            assert_eq!(
                side.tunnel.indices_in_use(),
                known,
                "seed {}: index leak",
                self.seed
            );
            // 128 reads of 64 segments each, and eight packets in fragments.
            assert!(totals.outbound.pending <= 128 * 64 && totals.inbound.pending <= 8);
        }
    }

    /// After all timeouts nothing may be pending.
    pub fn check_nothing_pending(&mut self) {
        self.run(Duration::from_secs(120));
        self.check();
        for i in 0..2 {
            let totals = self.totals(i);
            assert_eq!(
                (totals.outbound.pending, totals.inbound.pending),
                (0, 0),
                "seed {}",
                self.seed
            );
        }
    }

    pub fn take_delivered(&mut self, i: usize) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sides[i].delivered)
    }

    /// Establishes a session in both directions, with nothing in flight.
    pub fn establish(&mut self) {
        let hello = packets::Flow {
            number: 250,
            ..packets::Flow::udp(0)
        };
        self.send(0, &[hello.datagram(1, 50)]);
        self.run(Duration::from_secs(2));
        assert_eq!(self.take_delivered(1).len(), 1, "a session");
    }
}

/// Datagrams to one host in the form of its socket, and their arena; merged as by UDP_GRO if `gro`.
pub fn gather(parcels: &[Parcel], gro: bool) -> (Vec<u8>, Vec<Datagram>) {
    let mut arena = Vec::new();
    let mut datagrams: Vec<Datagram> = Vec::new();
    let mut closed = true;
    for parcel in parcels {
        let length = parcel.bytes.len();
        let range = arena.len()..arena.len() + length;
        arena.extend(&parcel.bytes);
        match datagrams.last_mut() {
            Some(last)
                if gro
                    && !closed
                    && last.source == parcel.from
                    && last.traffic_class == parcel.traffic_class
                    && length <= last.segment_size
                    && last.range.len() + length <= 65_535 =>
            {
                last.range.end = range.end;
                closed = length < last.segment_size;
            }
            _ => {
                closed = length == 0;
                datagrams.push(Datagram {
                    source: parcel.from,
                    destination: Some(parcel.to.ip()),
                    traffic_class: parcel.traffic_class,
                    range,
                    segment_size: length,
                    truncated: false,
                });
            }
        }
    }
    (arena, datagrams)
}

/// A write to the TUN device as bytes, virtio-net header first.
pub fn written(write: &Write, arena: &[u8]) -> Vec<u8> {
    let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
    let n = write.parts(arena, &mut parts);
    parts[..n].iter().flat_map(|p| p.iter().copied()).collect()
}

impl Side {
    fn new(i: usize, setup: Setup, keys: [[u8; 32]; 2], seed: u64, restarts: u64) -> Side {
        let mut tunnel = Tunnel::new(TunnelConfig {
            protocol: setup.protocol,
            mode: setup.mode,
            private_key: PrivateKey::from_bytes(keys[i]),
            inner_mtu: setup.inner_mtu,
            offload: setup.offload,
            ciphers: setup.ciphers.clone(),
            copy_dscp: setup.copy_dscp,
            repair: setup.repair,
            rng: Box::new(Seeded::new(seed ^ (restarts << 32 | 1 << 16 | i as u64))),
        });
        let other = PrivateKey::from_bytes(keys[1 - i]).public();
        let peer = tunnel.add_peer(other).expect("two different keys");
        tunnel.set_preshared_key(peer, PresharedKey::from_bytes(setup.psk));
        if setup.knows_endpoint {
            tunnel.set_endpoint(peer, address(1 - i, setup.v6));
        }
        for prefix in [
            format!("10.0.0.{}/32", 2 - i),
            format!("fd00::{}/128", 2 - i),
        ] {
            tunnel.add_allowed_ip(peer, prefix.parse().expect("a prefix"));
        }
        Side {
            tunnel,
            peer,
            address: address(i, setup.v6),
            slept: 0,
            wall_skew: 0,
            delivered: Vec::new(),
            frames: Vec::new(),
            refuse_every: 0,
            writes: 0,
            restarts,
            outbox: Outbox::new(4 << 20),
            inbox: Inbox::new(setup.offload, setup.offload),
            setup,
        }
    }
}
