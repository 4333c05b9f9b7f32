//! What this host has begun with a peer: what its answers are known by, in bounded memory.

use crate::time::Instant;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_UDP};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

/// Flows of one generation, of which there are two for each peer.
pub(super) const GENERATION_FLOWS: usize = 1024;
/// How long a generation lasts.
const GENERATION: Duration = Duration::from_secs(120);

/// The identification of a fragment: that of IPv4, or that of the fragment header, at whose end the walk over IPv6 headers ends.
pub(super) fn identification(ip: &IpPacket, packet: &[u8]) -> [u8; 4] {
    match ip.src {
        IpAddr::V4(_) => match packet.get(4..6) {
            Some(&[i0, i1]) => [i0, i1, 0, 0],
            _ => [0; 4],
        },
        IpAddr::V6(_) => {
            let header = packet.get(..ip.header_len);
            header
                .and_then(<[u8]>::last_chunk)
                .copied()
                .unwrap_or_default()
        }
    }
}

/// What an answer is known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub kind: Kind,
    pub local: IpAddr,
    pub remote: IpAddr,
    /// Local and remote port, the identifier of an echo, or the identification of fragments.
    pub id: [u8; 4],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Udp,
    Echo,
    /// Of this protocol, of which the first one passed.
    Fragment(u8),
}

/// Most of what looking for a key costs. The peer has few addresses and there are few kinds, so they are left out; what it can choose
/// is not.
impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self.local {
            IpAddr::V4(address) => state.write_u32(address.to_bits()),
            IpAddr::V6(address) => state.write_u128(address.to_bits()),
        }
        state.write_u32(u32::from_be_bytes(self.id));
    }
}

impl Key {
    /// What the answers to a packet of this host are known by; `None` for what has none, or needs no note for it.
    pub fn of_sent(ip: &IpPacket, protocol: u8, transport: &[u8]) -> Option<Key> {
        let (kind, id) = match protocol {
            PROTO_UDP => (Kind::Udp, *transport.first_chunk()?),
            PROTO_ICMP | PROTO_ICMPV6 => {
                let &[kind, _, _, _, i0, i1] = transport.first_chunk()?;
                if kind != if ip.is_v6() { 128 } else { 8 } {
                    return None;
                }
                (Kind::Echo, [i0, i1, 0, 0])
            }
            _ => return None,
        };
        Some(Key {
            kind,
            local: ip.src,
            remote: ip.dst,
            id,
        })
    }
}

/// What may be answered, in two generations: when the younger is full or old enough it becomes the older, and the older is forgotten
/// but for what was noted again since. Their memory is used again.
#[derive(Debug, Default)]
pub(super) struct Conntrack {
    pub young: HashSet<Key>,
    pub old: HashSet<Key>,
    /// Among the young: a flow is mostly many packets in a row.
    newest: Option<Key>,
    since: Instant,
}

impl Conntrack {
    pub fn note(&mut self, key: Key, now: Instant) {
        self.age(now);
        if self.newest == Some(key) {
            return;
        }
        if self.young.len() >= GENERATION_FLOWS && !self.young.contains(&key) {
            self.rotate(now);
        }
        self.young.insert(key);
        self.newest = Some(key);
    }

    pub fn has(&mut self, key: &Key, now: Instant) -> bool {
        self.age(now);
        self.newest == Some(*key) || self.young.contains(key) || self.old.contains(key)
    }

    fn age(&mut self, now: Instant) {
        if self.since.has_expired(2 * GENERATION, now) {
            self.rotate(now);
            self.old.clear();
        } else if self.since.has_expired(GENERATION, now) {
            self.rotate(self.since + GENERATION);
        }
    }

    fn rotate(&mut self, since: Instant) {
        std::mem::swap(&mut self.young, &mut self.old);
        self.young.clear();
        self.newest = None;
        self.since = since;
    }
}
