//! A pair of members, their port, and the binding of each.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use seikan_proto::keys::PublicKey;
use seikan_proto::time::Instant;
use seikan_sys::udp::UdpSocket;

use crate::policer::Policer;

/// Lifetime of a binding, of a requested port without one, and of an authenticated TLS connection, from the last request.
pub(crate) const LIFETIME: Duration = Duration::from_secs(60);

/// The holder of tickets: a member while it is a side of a pair, also when its key changes.
#[derive(Debug)]
pub(crate) struct Holder {
    /// Its number in tickets.
    pub number: u64,
    /// Number of sides that it is.
    pub sides: usize,
    /// Number of pairs that it requested. They count against its quota.
    pub requested: usize,
    pub policer: Policer,
}

/// Two members and the port that they share.
#[derive(Debug)]
pub(crate) struct Pair {
    pub keys: Keys,
    pub port: u16,
    pub sides: [Side; 2],
    /// For IPv4 and IPv6; opened when a side requests the port over that family.
    pub sockets: [Option<UdpSocket>; 2],
    /// Datagrams that the kernel had dropped at the receive buffers at the last look.
    pub receive_queue_drops: u64,
    /// Whether something was received since.
    pub busy: bool,
}

impl Pair {
    /// Returns the side with this binding. Former bindings count as well.
    pub fn side_of(&self, transport: Transport) -> Option<usize> {
        let matches =
            |binding: Option<Binding>| binding.is_some_and(|known| known.transport == transport);
        let current = self.sides.iter().position(|side| matches(side.binding));
        current.or_else(|| self.sides.iter().position(|side| matches(side.former)))
    }
}

/// The keys of two members, the smaller first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Keys(pub [PublicKey; 2]);

impl Keys {
    /// Returns the keys of two members, and the index of `own`.
    pub fn of(own: PublicKey, other: PublicKey) -> (Keys, usize) {
        if own < other {
            (Keys([own, other]), 0)
        } else {
            (Keys([other, own]), 1)
        }
    }
}

/// One of the two members of a pair.
#[derive(Debug, Default)]
pub(crate) struct Side {
    /// Index of the [`Holder`] that requested the port or is bound to it.
    pub holder: Option<usize>,
    /// Whether this side requested the port. If so, the pair counts against its holder's quota.
    pub requested: bool,
    /// The current binding.
    pub binding: Option<Binding>,
    /// The binding before a change between UDP and TLS. The side may still send from there until its tunnel has changed too.
    pub former: Option<Binding>,
    /// When the side expires, unless it binds itself again.
    pub until: Instant,
    /// Stamp of the last request that bound this side. It is forgotten when the side expires, but not when a connection
    /// ends, so that a replay cannot restore a binding that may still be used.
    pub stamp: u64,
}

impl Side {
    /// Whether the side has requested the port or is bound to it.
    pub fn is_present(&self) -> bool {
        self.requested || self.binding.is_some()
    }
}

/// The transport by which a datagram arrives or leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// UDP, from or to this address.
    Udp(SocketAddr),
    /// The TLS connection with this number.
    Stream(u64),
}

/// The transport of a side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub transport: Transport,
    /// For UDP: the local address that the side sends to.
    pub source: Option<IpAddr>,
}
