//! Connection tracking: the flows of this host with a peer that the peer may reply to, in bounded
//! memory.

use crate::time::Instant;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_UDP};
use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::time::Duration;

/// Flows of one generation; there are two generations for each peer.
pub(super) const GENERATION_FLOWS: usize = 1024;
/// Length of a generation.
const GENERATION: Duration = Duration::from_secs(120);

/// The identification of a fragment: of the IPv4 header, or of the IPv6 fragment header, which is
/// the last one that header parsing reaches.
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

/// The key of a reply.
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
    /// Later fragments of a datagram of this protocol whose first fragment passed.
    Fragment(u8),
}

/// Hashing is most of the cost of a lookup. The remote address and the kind are left out, since a
/// peer has few addresses and there are few kinds. Everything that the peer can choose is hashed.
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
    /// The key of replies to a packet of this host. `None` if there are no replies, or if replies
    /// pass without an entry.
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

/// Flows that the peer may reply to, in two generations. When the younger one is full or old
/// enough, it becomes the older one, and the older one is cleared, except for flows that were used
/// since. Their memory is reused.
#[derive(Debug, Default)]
pub(super) struct Conntrack {
    pub young: HashSet<Key>,
    pub old: HashSet<Key>,
    /// The newest flow, which is among the young: many packets in a row belong to the same flow.
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
