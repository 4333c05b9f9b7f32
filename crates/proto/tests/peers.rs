//! Ten thousand peers: memory, lookups, and nothing left behind.

use crate::sim::Seeded;
use crate::sim::packets::Flow;
use seikan_proto::capabilities::Cipher;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::noise::Protocol;
use seikan_proto::peer::Peer;
use seikan_proto::session::Session;
use seikan_proto::time::Instant;
use seikan_proto::tunnel::{Now, Tunnel, TunnelConfig};
use std::net::SocketAddr;
use std::time::Duration;

const PEERS: u32 = 10_000;

fn tunnel() -> Tunnel {
    Tunnel::new(TunnelConfig {
        protocol: Protocol::Native,
        mode: seikan_proto::mode::Mode::Ip,
        private_key: PrivateKey::from_bytes([1; 32]),
        inner_mtu: 1420,
        offload: true,
        ciphers: vec![Cipher::ChaCha20Poly1305],
        copy_dscp: false,
        repair: None,
        rng: Box::new(Seeded::new(1)),
    })
}

fn key(n: u32) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[4..8].copy_from_slice(&n.to_le_bytes());
    PrivateKey::from_bytes(bytes).public()
}

fn prefix(n: u32) -> String {
    format!("10.{}.{}.{}/32", n >> 16, n >> 8 & 255, n & 255)
}

#[test]
fn ten_thousand_idle_peers_come_and_go() {
    let keys: Vec<PublicKey> = (0..PEERS).map(key).collect();
    let mut tunnel = tunnel();
    let ids: Vec<_> = (0..PEERS)
        .map(|n| {
            let id = tunnel.add_peer(keys[n as usize]).expect("not our key");
            tunnel.add_allowed_ip(id, prefix(n).parse().expect("a prefix"));
            tunnel.set_endpoint(id, SocketAddr::from(([198, 18, 0, 1], n as u16 + 1)));
            id
        })
        .collect();
    assert_eq!(tunnel.peers().count(), PEERS as usize);
    for n in (0..PEERS).step_by(97) {
        assert_eq!(tunnel.peer_by_key(&keys[n as usize]), Some(ids[n as usize]));
        let prefixes: Vec<_> = tunnel
            .allowed_ips(ids[n as usize])
            .map(|p| p.to_string())
            .collect();
        assert_eq!(prefixes, [prefix(n)]);
    }
    assert_eq!(tunnel.next_wakeup(), None, "nobody has anything to do");
    for id in &ids {
        tunnel.remove_peer(*id);
    }
    assert_eq!((tunnel.peers().count(), tunnel.indices_in_use()), (0, 0));
    // Their numbers are free again.
    assert_eq!(tunnel.add_peer(keys[5]), Some(ids[0]));
}

/// 256 MiB for 10,000 idle peers are 26 KiB each. A peer right after a handshake has at most three
/// sessions.
#[test]
fn a_peer_takes_little_memory() {
    let idle = size_of::<Peer>();
    let busy = idle + 3 * size_of::<Session>();
    assert!(idle <= 3 * 1024 + 256, "{idle} bytes");
    assert!(busy <= 13 * 1024, "{busy} bytes");
}

/// Packets for many peers in one batch each start their own handshake, and each wakes once.
#[test]
fn many_peers_wake_one_by_one() {
    let mut tunnel = tunnel();
    let now = Now {
        mono: Instant::from_nanos(1 << 40),
        wall: Duration::from_secs(1_800_000_000),
    };
    let mut batch = seikan_proto::batch::PacketBatch::new(8 << 20, 600);
    for n in 0..500 {
        let id = tunnel.add_peer(key(n)).expect("not our key");
        tunnel.add_allowed_ip(id, prefix(n).parse().expect("a prefix"));
        tunnel.set_endpoint(id, SocketAddr::from(([198, 18, 0, 1], n as u16 + 1)));
        let mut read = Flow::udp(0).datagram(0, 100);
        read[26..30].copy_from_slice(&[10, 0, (n >> 8) as u8, n as u8]);
        batch.space().expect("room")[..read.len()].copy_from_slice(&read);
        batch.commit(read.len());
    }
    let mut outbox = seikan_proto::outbox::Outbox::new(2 << 20);
    let mut inbox = seikan_proto::inbox::Inbox::new(true, true);
    tunnel.outbound(now, &mut batch, &mut outbox, &mut inbox);
    assert_eq!(outbox.runs().len(), 500);
    assert_eq!(tunnel.indices_in_use(), 500);
    let mut wakes = 0;
    let mut at = now;
    while let Some((next, _)) = tunnel.next_wakeup() {
        if next > now.mono + Duration::from_secs(6) {
            break;
        }
        assert!(next > at.mono || wakes == 0, "time moves on");
        at.mono = next;
        outbox.clear();
        while tunnel.poll(at, &mut outbox, &mut inbox) {
            outbox.clear();
        }
        wakes += 1;
    }
    assert!(
        (100..=500).contains(&wakes),
        "{wakes}: jitter spreads the retries"
    );
    assert_eq!(tunnel.indices_in_use(), 500, "one initiation each");
}
