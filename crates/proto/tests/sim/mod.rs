//! Two tunnels and what lies between them, all of it seeded: no clock, no socket.
#![allow(dead_code, reason = "every test file uses its part of the harness")]

use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use seikan_proto::batch::PacketBatch;
use seikan_proto::capabilities::Cipher;
use seikan_proto::inbox::{Inbox, MAX_PIECES};
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::noise::Construction;
use seikan_proto::outbox::Outbox;
use seikan_proto::rng::Rng;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Datagram, Now, Tunnel, TunnelConfig};
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr, checksum, ip, tcp};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::time::Duration;

/// A seeded random source.
pub struct Seeded(pub ChaCha8Rng);

impl Rng for Seeded {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0.fill_bytes(destination);
    }
}

/// One side: a tunnel and what it has delivered.
pub struct Side {
    pub tunnel: Tunnel,
    pub address: SocketAddr,
    pub delivered: Vec<Vec<u8>>,
    outbox: Outbox,
    inbox: Inbox,
}

/// A datagram batch under way.
#[derive(Clone)]
pub struct Flying {
    pub to: usize,
    pub source: SocketAddr,
    pub traffic_class: u8,
    pub segment_size: usize,
    pub bytes: Vec<u8>,
}

/// Two sides and a perfect wire.
pub struct Pair {
    pub sides: [Side; 2],
    pub now: Now,
    pub wire: Vec<Flying>,
}

impl Pair {
    pub fn new(construction: Construction, seed: u64) -> Pair {
        let mut rng = Seeded(ChaCha8Rng::seed_from_u64(seed));
        let keys = [
            PrivateKey::generate(&mut rng),
            PrivateKey::generate(&mut rng),
        ];
        let public = [keys[0].public(), keys[1].public()];
        let mut index = 0;
        let sides = keys.map(|key| {
            let side = Side::new(
                construction,
                key,
                public[1 - index],
                index,
                seed * 2 + index as u64,
            );
            index += 1;
            side
        });
        let now = Now {
            mono: Instant::from_nanos(1 << 40),
            wall: Duration::from_secs(1_800_000_000),
        };
        Pair {
            sides,
            now,
            wire: Vec::new(),
        }
    }

    /// Hands reads to a side's tunnel.
    pub fn send(&mut self, from: usize, reads: &[Vec<u8>]) {
        let mut batch = PacketBatch::new(1 << 20, 256);
        for read in reads {
            batch.space().expect("a batch of test packets fits")[..read.len()]
                .copy_from_slice(read);
            batch.commit(read.len());
        }
        let side = &mut self.sides[from];
        side.tunnel
            .outbound(self.now, &mut batch, &mut side.outbox, &mut side.inbox);
        self.flush(from, &[]);
    }

    /// Moves datagrams until none are under way.
    pub fn settle(&mut self) {
        loop {
            for i in 0..2 {
                self.poll(i);
            }
            if self.wire.is_empty() {
                break;
            }
            for flying in std::mem::take(&mut self.wire) {
                self.receive(flying);
            }
        }
    }

    /// Lets time pass in steps, polling both sides.
    pub fn advance(&mut self, by: Duration) {
        let end = self.now.mono + by;
        loop {
            let next = (0..2)
                .filter_map(|i| self.sides[i].tunnel.next_wakeup())
                .map(|w| w.0)
                .min();
            let Some(next) = next.filter(|n| *n <= end) else {
                break;
            };
            let step = next.duration_since(self.now.mono);
            self.now.mono = self.now.mono.max(next);
            self.now.wall += step;
            self.settle();
        }
        self.now.wall += end.duration_since(self.now.mono);
        self.now.mono = end;
        self.settle();
    }

    pub fn poll(&mut self, i: usize) {
        let side = &mut self.sides[i];
        while side
            .tunnel
            .poll(self.now, &mut side.outbox, &mut side.inbox)
        {
            self.flush(i, &[]);
            return self.poll(i);
        }
        self.flush(i, &[]);
    }

    pub fn receive(&mut self, flying: Flying) {
        let i = flying.to;
        let side = &mut self.sides[i];
        let mut arena = flying.bytes;
        let datagram = Datagram {
            source: flying.source,
            destination: Some(side.address.ip()),
            traffic_class: flying.traffic_class,
            range: 0..arena.len(),
            segment_size: flying.segment_size,
            truncated: false,
        };
        side.tunnel.inbound(
            self.now,
            [datagram].into_iter(),
            &mut arena,
            &mut side.inbox,
            &mut side.outbox,
        );
        self.flush(i, &arena);
    }

    pub fn take_delivered(&mut self, i: usize) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sides[i].delivered)
    }

    pub fn assert_ledgers_close(&self) {
        for side in &self.sides {
            let totals = side.tunnel.totals();
            assert_eq!(
                totals.outbound.unaccounted(),
                0,
                "outbound {:?}",
                totals.outbound
            );
            assert_eq!(
                totals.inbound.unaccounted(),
                0,
                "inbound {:?}",
                totals.inbound
            );
        }
    }

    fn flush(&mut self, i: usize, arena: &[u8]) {
        let side = &mut self.sides[i];
        for run in side.outbox.runs() {
            self.wire.push(Flying {
                to: 1 - i,
                source: side.address,
                traffic_class: run.destination.traffic_class,
                segment_size: run.segment_size,
                bytes: side.outbox.bytes(run).to_vec(),
            });
            side.tunnel.sent(run, Ok(()));
        }
        side.outbox.clear();
        for write in side.inbox.writes() {
            let mut parts = [IoSlice::new(&[]); MAX_PIECES + 2];
            let n = write.parts(arena, &mut parts);
            let bytes: Vec<u8> = parts[..n].iter().flat_map(|p| p.to_vec()).collect();
            side.delivered.push(bytes[VNET_HDR_LEN..].to_vec());
            side.tunnel.delivered(write, Ok(()));
        }
        side.inbox.clear();
    }
}

impl Side {
    fn new(
        construction: Construction,
        key: PrivateKey,
        peer: PublicKey,
        index: usize,
        seed: u64,
    ) -> Side {
        let address = |i: usize| SocketAddr::from(([192, 0, 2, i as u8 + 1], 51820));
        let mut tunnel = Tunnel::new(TunnelConfig {
            construction,
            private_key: key,
            inner_mtu: 1420,
            offload: true,
            ciphers: vec![Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305],
            rng: Box::new(Seeded(ChaCha8Rng::seed_from_u64(seed))),
        });
        let id = tunnel.add_peer(peer).expect("two different keys");
        tunnel.set_endpoint(id, address(1 - index));
        let prefix = format!("10.0.0.{}/32", 2 - index)
            .parse()
            .expect("a prefix");
        tunnel.add_allowed_ip(id, prefix);
        Side {
            tunnel,
            address: address(index),
            delivered: Vec::new(),
            outbox: Outbox::new(4 << 20),
            inbox: Inbox::new(true, true),
        }
    }
}

fn ipv4(from: usize, to: usize, protocol: u8, body: &[u8]) -> Vec<u8> {
    let mut p = vec![0; 20];
    p[0] = 0x45;
    p[6] = 0x40;
    p[8] = 64;
    p[9] = protocol;
    p[12..20].copy_from_slice(&[10, 0, 0, from as u8 + 1, 10, 0, 0, to as u8 + 1]);
    p.extend(body);
    let total = p.len();
    ip::set_length(&mut p, 20, total, None);
    p
}

/// A read of the TUN device: a complete UDP packet with `payload` bytes derived from `tag`.
pub fn udp_packet(from: usize, to: usize, payload: usize, tag: u32) -> Vec<u8> {
    let mut u = vec![0; 8 + payload];
    u[0..4].copy_from_slice(&[0x30, 0x39, 0xd4, 0x31]);
    u[4..6].copy_from_slice(&((8 + payload) as u16).to_be_bytes());
    for (i, b) in u[8..].iter_mut().enumerate() {
        *b = (tag as usize * 31 + i * 7) as u8;
    }
    if payload >= 4 {
        u[8..12].copy_from_slice(&tag.to_be_bytes());
    }
    let mut p = ipv4(from, to, 17, &u);
    let parsed = seikan_wire::IpPacket::parse(&p).expect("a packet");
    let pseudo = checksum::pseudo_header(parsed.src, parsed.dst, 17, 8 + payload);
    let check = checksum::fold(pseudo + checksum::sum(&p[20..]));
    p[26..28].copy_from_slice(&seikan_wire::udp::on_wire(check).to_be_bytes());
    [VnetHdr::default().to_bytes().to_vec(), p].concat()
}

/// A read of the TUN device: a TCP super-packet.
pub fn tcp_super_packet(
    from: usize,
    to: usize,
    payload: usize,
    gso_size: u16,
    seq: u32,
) -> Vec<u8> {
    let mut t = vec![0; 20 + payload];
    t[0..4].copy_from_slice(&[0x30, 0x39, 0x14, 0x51]);
    tcp::set_seq(&mut t, seq);
    t[12] = 0x50;
    t[13] = tcp::ACK;
    for (i, b) in t[20..].iter_mut().enumerate() {
        *b = ((seq as usize + i) * 13 / 7) as u8;
    }
    let mut p = ipv4(from, to, 6, &t);
    let parsed = seikan_wire::IpPacket::parse(&p).expect("a packet");
    let pseudo = checksum::pseudo_header(parsed.src, parsed.dst, 6, 20 + payload);
    p[36..38].copy_from_slice(&checksum::add_carries(pseudo).to_be_bytes());
    let gso = payload > usize::from(gso_size);
    let vnet = VnetHdr {
        needs_csum: true,
        gso_type: if gso { GsoType::Tcp4 } else { GsoType::None },
        hdr_len: 40,
        gso_size: if gso { gso_size } else { 0 },
        csum_start: 20,
        csum_offset: 16,
        gso_ecn: false,
    };
    [vnet.to_bytes().to_vec(), p].concat()
}
