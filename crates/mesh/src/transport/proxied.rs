//! Addresses behind a server, as the tunnel sees them.

use crate::random::SystemRandom;
use seikan_observe::{DropCounts, DropReason};
use seikan_proto::proxied;
use seikan_proto::rng::Rng as _;
use seikan_proto::time::Instant;
use seikan_sys::udp::{MAX_GSO_SEGMENTS, Transmit, UdpSocket};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Time without datagrams from the tunnel after which an address that the agent does not require is
/// closed; the shorter time applies if the tunnel never sent any. The limit is needed because any
/// permitted peer can cause an address to be opened.
const IDLE: Duration = Duration::from_secs(600);
const UNANSWERED: Duration = Duration::from_secs(30);
/// Maximum number of bytes in one run.
const MAX_RUN: usize = 60_000;

/// Counters of forwarded datagrams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams from the server to the tunnel.
    pub received: u64,
    /// Datagrams from the tunnel to the server.
    pub sent: u64,
    /// Dropped datagrams.
    pub drops: DropCounts,
}

/// A peer behind a server.
#[derive(Debug)]
pub(super) struct Peer {
    /// The peer's address, as the server sees it.
    pub to: SocketAddr,
    /// The peer was reported to the agent.
    pub reported: bool,
    /// A channel was requested from the TURN server.
    pub bound: bool,
    /// Time of the tunnel's last datagram to the peer.
    pub answered: Option<Instant>,
    opened: Instant,
}

impl Peer {
    /// Whether the peer's address may be closed, unless the agent requires it.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        match self.answered {
            Some(at) => now.duration_since(at) >= IDLE,
            None => now.duration_since(self.opened) >= UNANSWERED,
        }
    }
}

/// All peers behind a server.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// Peers by the tunnel's address.
    all: HashMap<SocketAddr, Peer>,
    local: HashMap<SocketAddr, SocketAddr>,
}

impl Peers {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the tunnel's address for a peer.
    pub(super) fn at(&self, to: &SocketAddr) -> Option<SocketAddr> {
        self.local.get(to).copied()
    }

    pub(super) fn get(&self, local: SocketAddr) -> Option<&Peer> {
        self.all.get(&local)
    }

    pub(super) fn get_mut(&mut self, local: SocketAddr) -> Option<&mut Peer> {
        self.all.get_mut(&local)
    }

    /// Number of peers with this IP address that the tunnel has not answered yet.
    pub(super) fn unanswered(&self, ip: IpAddr) -> usize {
        let same = |peer: &&Peer| peer.answered.is_none() && peer.to.ip().to_canonical() == ip;
        self.all.values().filter(same).count()
    }

    /// Gives a peer an address in the tunnel.
    pub(super) fn open(&mut self, to: SocketAddr, now: Instant) -> SocketAddr {
        let mut id = [0; 8];
        SystemRandom.fill(&mut id);
        let local = proxied::address(u64::from_be_bytes(id), to.port());
        let peer = Peer {
            to,
            reported: false,
            bound: false,
            answered: None,
            opened: now,
        };
        self.all.insert(local, peer);
        self.local.insert(to, local);
        local
    }

    pub(super) fn close(&mut self, local: SocketAddr) -> Option<Peer> {
        let peer = self.all.remove(&local)?;
        self.local.remove(&peer.to);
        Some(peer)
    }

    /// Returns the tunnel's addresses for matching peers.
    pub(super) fn of(&self, is_like: impl Fn(&Peer) -> bool) -> Vec<SocketAddr> {
        let peers = self.all.iter().filter(|(_, peer)| is_like(peer));
        peers.map(|(local, _)| *local).collect()
    }
}

/// Messages to a server that are sent together: all of one length except the last, which may be shorter.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub size: usize,
    pub bytes: Vec<u8>,
}

impl Run {
    /// Whether a message of this length can be added.
    pub(super) fn fits(&self, length: usize) -> bool {
        self.bytes.is_empty()
            || (length <= self.size
                && self.bytes.len().is_multiple_of(self.size)
                && self.bytes.len() + length <= MAX_RUN
                && self.bytes.len() / self.size < MAX_GSO_SEGMENTS)
    }

    /// Returns the space for a message that fits.
    pub(super) fn reserve(&mut self, length: usize) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.size = length.max(1);
        }
        let at = self.bytes.len();
        self.bytes.resize(at + length, 0);
        &mut self.bytes[at..]
    }

    /// Sends the messages and returns the number sent. The others are counted in `drops`.
    pub(super) fn send(&self, socket: &UdpSocket, to: SocketAddr, drops: &mut DropCounts) -> u64 {
        let count = |bytes: usize| bytes.div_ceil(self.size.max(1)) as u64;
        let transmit = Transmit {
            segment_size: u16::try_from(self.size).ok(),
            ..whole(to, &self.bytes)
        };
        let dropped = |reason: DropReason, bytes| drops.add(reason, count(bytes));
        count(socket.send_or_drop(&transmit, dropped))
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
    }
}

pub(super) fn whole(destination: SocketAddr, payload: &[u8]) -> Transmit<'_> {
    Transmit {
        destination,
        source: None,
        traffic_class: 0,
        hop_limit: None,
        segment_size: None,
        payload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_sys::udp::UdpOptions;
    use std::net::Ipv4Addr;

    fn run(messages: &[usize]) -> (Run, usize) {
        let mut run = Run::default();
        for (n, length) in messages.iter().enumerate() {
            if !run.fits(*length) {
                return (run, n);
            }
            run.reserve(*length).fill(n as u8);
        }
        (run, messages.len())
    }

    #[test]
    fn messages_of_one_length_are_sent_together() {
        let (run, all) = run(&[100, 100, 40]);
        assert_eq!((run.size, run.bytes.len(), all), (100, 240, 3));
        assert_eq!(run.bytes[99..101], [0, 1]);
    }

    #[test]
    fn a_run_ends_with_another_length() {
        assert_eq!(run(&[100, 100, 101]).1, 2);
        assert_eq!(run(&[100, 40, 40]).1, 2);
    }

    #[test]
    fn no_more_are_joined_than_can_be_sent_at_once() {
        assert_eq!(run(&[100; 200]).1, MAX_GSO_SEGMENTS);
        assert_eq!(run(&[1400; 200]).1, MAX_RUN / 1400);
    }

    #[test]
    fn a_run_arrives_as_single_datagrams() {
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let from = UdpSocket::bind(any, &UdpOptions::default()).expect("bind");
        let to = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let (run, _) = run(&[100, 100, 40]);
        let mut drops = DropCounts::default();
        let at = to.local_addr().expect("an address");
        assert_eq!(run.send(&from, at, &mut drops), 3);
        let mut buffer = [0; 1000];
        let lengths: Vec<usize> = (0..3)
            .map(|_| to.recv(&mut buffer).expect("received"))
            .collect();
        assert_eq!(lengths, [100, 100, 40]);
        assert_eq!(drops, DropCounts::default());
    }
}
