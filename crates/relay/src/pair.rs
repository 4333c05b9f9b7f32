//! Two members, their port, and where each of them is.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use seikan_proto::keys::PublicKey;
use seikan_proto::time::Instant;
use seikan_sys::udp::UdpSocket;

use crate::policer::Policer;

/// How long a side stays that does not bind itself anew, or is bound by nobody.
pub(crate) const LIFE: Duration = Duration::from_secs(60);

/// A member for as long as it is a side of a pair, whatever keys it has had.
#[derive(Debug)]
pub(crate) struct Holder {
    /// Its number in tickets.
    pub number: u64,
    /// Sides that it is.
    pub sides: usize,
    /// Those of them that it asked for: its share.
    pub asked: usize,
    pub policer: Policer,
}

/// Two members and the port that they share.
#[derive(Debug)]
pub(crate) struct Pair {
    pub keys: Keys,
    pub port: u16,
    pub sides: [Side; 2],
    /// For IPv4 and IPv6, as far as the sides have asked by them.
    pub sockets: [Option<UdpSocket>; 2],
    /// What the kernel had dropped at their buffers when that was last looked at.
    pub receive_queue_drops: u64,
    /// Something was received since.
    pub busy: bool,
}

impl Pair {
    /// Which side is in this place.
    pub fn side_at(&self, place: Place) -> Option<usize> {
        let is_there = |bound: Option<Bound>| bound.is_some_and(|bound| bound.place == place);
        let mut sides = self.sides.iter();
        let now = sides.position(|side| is_there(side.bound));
        now.or_else(|| self.sides.iter().position(|side| is_there(side.former)))
    }
}

/// Two keys, the smaller first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Keys(pub [PublicKey; 2]);

impl Keys {
    /// Those of two members, and which of them `own` is.
    pub fn of(own: PublicKey, other: PublicKey) -> (Keys, usize) {
        match own < other {
            true => (Keys([own, other]), 0),
            false => (Keys([other, own]), 1),
        }
    }
}

/// One of two members.
#[derive(Debug, Default)]
pub(crate) struct Side {
    /// Where the [`Holder`] is that asked for the port or bound itself to it.
    pub holder: Option<usize>,
    /// It asked for the port, which counts as one of its share.
    pub asked: bool,
    /// Where it is.
    pub bound: Option<Bound>,
    /// Where it was before, if that was by UDP and is by a stream now, or the other way: it may send from there, until its tunnel has
    /// gone over, too.
    pub former: Option<Bound>,
    /// From when on neither holds, unless it binds itself anew.
    pub until: Instant,
    /// Of the last request that bound it; kept when it is gone, so that a copy of that does not bring it back.
    pub stamp: u64,
}

impl Side {
    /// Whether there is anything to be ended.
    pub fn is_there(&self) -> bool {
        self.asked || self.bound.is_some()
    }
}

/// Where something comes from or goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// An address of UDP.
    Udp(SocketAddr),
    /// A connection, by its number.
    Stream(u64),
}

/// Where a side is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub place: Place,
    /// By UDP: our address that it knows the port by.
    pub source: Option<IpAddr>,
}
