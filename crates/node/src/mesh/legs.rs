//! Proxy sockets: UDP sockets on loopback addresses by which a thread of this host forwards for the tunnel.
//! Each stands for one remote address, of a TURN server's peer or of a relay's port: datagrams of the tunnel to
//! the socket are forwarded to that address, and datagrams from it reach the tunnel from the socket.
//!
//! Consecutive datagrams of the same length to the same destination are sent together (GSO), as they were
//! received (GRO).

use seikan_observe::{DropCounts, DropReason};
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::udp::{
    MAX_GSO_SEGMENTS, ReceiveBatch, ReceiveMeta, Transmit, UdpOptions, UdpSocket,
};
use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// A proxy socket that was not requested is closed after this time without a datagram of the tunnel, or after
/// the shorter one if there never was any: any permitted peer can cause one to be opened.
const IDLE: Duration = Duration::from_secs(600);
const UNANSWERED: Duration = Duration::from_secs(30);
/// Maximum bytes sent at once.
pub(super) const MAX_RUN: usize = 60_000;

/// Counters of forwarded datagrams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// From the remote side to the tunnel.
    pub received: u64,
    /// From the tunnel to the remote side.
    pub sent: u64,
    /// Dropped datagrams.
    pub drops: DropCounts,
}

/// The socket that stands for one remote address.
pub(super) struct Leg {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// The agent was told of it.
    pub told: bool,
    /// A channel was requested from the TURN server.
    pub bound: bool,
    /// Time of the tunnel's last datagram.
    pub answered: Option<Instant>,
    socket: UdpSocket,
    overflow: Overflow,
    opened: Instant,
}

impl Leg {
    /// Whether it may be closed unless it is required.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        match self.answered {
            Some(at) => now.duration_since(at) >= IDLE,
            None => now.duration_since(self.opened) >= UNANSWERED,
        }
    }
}

/// All proxy sockets of a thread.
pub(super) struct Legs {
    all: BTreeMap<u64, Leg>,
    by_peer: HashMap<SocketAddr, u64>,
    next: u64,
    /// The tunnel's port.
    port: Arc<AtomicU16>,
    /// Datagrams to the tunnel.
    inward: Run,
    pub counters: Counters,
}

impl Legs {
    /// Creates an empty set; the first socket gets the token `first`. `port` is the tunnel's port.
    pub(super) fn new(first: u64, port: Arc<AtomicU16>) -> Legs {
        Legs {
            all: BTreeMap::new(),
            by_peer: HashMap::new(),
            next: first,
            port,
            inward: Run::default(),
            counters: Counters::default(),
        }
    }

    /// Number of sockets.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the socket that stands for a peer.
    pub(super) fn at(&self, peer: &SocketAddr) -> Option<u64> {
        self.by_peer.get(peer).copied()
    }

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut Leg> {
        self.all.get_mut(&token)
    }

    /// Number of sockets for one IP address that the tunnel has not answered yet.
    pub(super) fn unanswered(&self, ip: IpAddr) -> usize {
        let same = |leg: &&Leg| leg.answered.is_none() && leg.peer.ip().to_canonical() == ip;
        self.all.values().filter(same).count()
    }

    /// Opens a socket; `None` if the system lacks resources.
    pub(super) fn open(&mut self, peer: SocketAddr, epoll: &Epoll) -> Option<u64> {
        let any = (Ipv4Addr::LOCALHOST, 0).into();
        let socket = UdpSocket::bind(any, &UdpOptions::default()).ok()?;
        let local = socket.local_addr().ok()?;
        let token = self.next;
        epoll.add(&socket, token, Interest::Read).ok()?;
        self.next += 1;
        let leg = Leg {
            peer,
            local,
            told: false,
            bound: false,
            answered: None,
            socket,
            overflow: Overflow::default(),
            opened: Instant::now(),
        };
        self.all.insert(token, leg);
        self.by_peer.insert(peer, token);
        Some(token)
    }

    /// Closes a socket.
    pub(super) fn close(&mut self, token: u64) -> Option<Leg> {
        let mut leg = self.all.remove(&token)?;
        self.by_peer.remove(&leg.peer);
        leg.overflow.count(&leg.socket, &mut self.counters.drops);
        Some(leg)
    }

    /// Returns the tokens of matching sockets.
    pub(super) fn of(&self, is_like: impl Fn(&Leg) -> bool) -> Vec<u64> {
        let legs = self.all.iter().filter(|(_, leg)| is_like(leg));
        legs.map(|(token, _)| *token).collect()
    }

    /// Queues a datagram to the tunnel; [`Self::flush`] sends it at the latest.
    pub(super) fn deliver(&mut self, token: u64, data: &[u8]) {
        if !self.inward.has_room(token, data.len()) {
            self.flush();
        }
        self.inward.room(token, data.len()).copy_from_slice(data);
    }

    /// Sends the queued datagrams to the tunnel.
    pub(super) fn flush(&mut self) {
        let tunnel = self.tunnel();
        if let Some(leg) = self.all.get(&self.inward.to) {
            let drops = &mut self.counters.drops;
            self.counters.received += self.inward.send(&leg.socket, tunnel, drops);
        }
        self.inward.clear();
    }

    /// Receives a batch from a socket; returns whether there was any datagram.
    pub(super) fn receive(&mut self, token: u64, batch: &mut ReceiveBatch) -> bool {
        let Some(leg) = self.all.get_mut(&token) else {
            return false;
        };
        // The error belongs to an earlier send, and was counted there.
        let received = leg.socket.receive(batch).is_ok_and(|filled| filled > 0);
        match received {
            true => leg.answered = Some(Instant::now()),
            false => leg.overflow.count(&leg.socket, &mut self.counters.drops),
        }
        received
    }

    /// Whether a datagram is of the tunnel and complete; counts it otherwise.
    pub(super) fn is_whole(&mut self, meta: &ReceiveMeta) -> bool {
        let reason = match meta.truncated || meta.length == 0 {
            _ if meta.source != self.tunnel() => DropReason::UnknownSource,
            true => DropReason::Truncated,
            false => return true,
        };
        let count = meta.length.div_ceil(meta.segment_size.max(1)).max(1) as u64;
        self.counters.drops.add(reason, count);
        false
    }

    fn tunnel(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port.load(Ordering::Relaxed)).into()
    }
}

/// Drops by the kernel at a socket's full receive buffer that were counted already.
#[derive(Default)]
pub(super) struct Overflow(u64);

impl Overflow {
    /// Adds the new drops.
    pub(super) fn count(&mut self, socket: &UdpSocket, drops: &mut DropCounts) {
        let before = std::mem::replace(&mut self.0, socket.receive_queue_drops());
        drops.add(DropReason::ReceiveQueueFull, self.0 - before);
    }
}

/// Datagrams to one destination that are sent together: all of one length except the last, which may be
/// shorter.
#[derive(Default)]
pub(super) struct Run {
    pub to: u64,
    pub size: usize,
    pub bytes: Vec<u8>,
}

impl Run {
    /// Whether a datagram of this length can be added.
    pub(super) fn has_room(&self, to: u64, length: usize) -> bool {
        self.bytes.is_empty()
            || (to == self.to
                && length <= self.size
                && self.bytes.len().is_multiple_of(self.size)
                && self.bytes.len() + length <= MAX_RUN
                && self.bytes.len() / self.size < MAX_GSO_SEGMENTS)
    }

    /// Returns the space for a datagram that fits.
    pub(super) fn room(&mut self, to: u64, length: usize) -> &mut [u8] {
        if self.bytes.is_empty() {
            (self.to, self.size) = (to, length.max(1));
        }
        let at = self.bytes.len();
        self.bytes.resize(at + length, 0);
        &mut self.bytes[at..]
    }

    /// Sends them and returns how many were sent; counts the others as dropped.
    pub(super) fn send(&self, socket: &UdpSocket, to: SocketAddr, drops: &mut DropCounts) -> u64 {
        let count = |bytes: usize| bytes.div_ceil(self.size.max(1)) as u64;
        let transmit = Transmit {
            segment_size: u16::try_from(self.size).ok(),
            ..whole(to, &self.bytes)
        };
        count(socket.send_or_drop(&transmit, |reason, bytes| drops.add(reason, count(bytes))))
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
        segment_size: None,
        payload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(datagrams: &[(u64, usize)]) -> (Run, usize) {
        let mut run = Run::default();
        for (n, (to, length)) in datagrams.iter().enumerate() {
            if !run.has_room(*to, *length) {
                return (run, n);
            }
            run.room(*to, *length).fill(n as u8);
        }
        (run, datagrams.len())
    }

    #[test]
    fn datagrams_of_one_length_for_one_place_are_sent_together() {
        let (run, all) = run(&[(5, 100), (5, 100), (5, 40)]);
        assert_eq!((run.to, run.size, run.bytes.len(), all), (5, 100, 240, 3));
        assert_eq!(run.bytes[99..101], [0, 1]);
    }

    #[test]
    fn another_place_a_longer_one_or_one_after_a_shorter_begins_anew() {
        for third in [(6, 100), (5, 101)] {
            assert_eq!(run(&[(5, 100), (5, 100), third]).1, 2, "{third:?}");
        }
        assert_eq!(run(&[(5, 100), (5, 40), (5, 40)]).1, 2);
    }

    #[test]
    fn no_more_are_joined_than_can_be_sent_at_once() {
        assert_eq!(run(&[(5, 100); 200]).1, MAX_GSO_SEGMENTS);
        assert_eq!(run(&[(5, 1400); 200]).1, MAX_RUN / 1400);
    }

    #[test]
    fn what_the_kernel_drops_before_a_leg_is_counted_also_of_one_that_is_closed() {
        let tunnel = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let port = tunnel.local_addr().expect("an address").port();
        let epoll = Epoll::new(1).expect("an epoll instance");
        let mut legs = Legs::new(2, Arc::new(AtomicU16::new(port)));
        let token = legs.open(([192, 0, 2, 1], 7).into(), &epoll).expect("one");
        let local = legs.get_mut(token).expect("one").local;
        // More than the largest buffer can hold, with the kernel's overhead for each.
        let flood = || {
            for _ in 0..20_000 {
                tunnel.send_to(&[4; 1000], local).expect("sent");
            }
        };
        let dropped = |legs: &Legs| legs.counters.drops.get(DropReason::ReceiveQueueFull);
        flood();
        let mut batch = ReceiveBatch::new(16, 1 << 16);
        let mut came = 0;
        while legs.receive(token, &mut batch) {
            came += batch.parts_mut().0.len() as u64;
        }
        assert!(came < 20_000, "nothing overflowed");
        let first = 20_000 - came;
        assert_eq!(dropped(&legs), first);
        flood();
        legs.close(token);
        assert!(dropped(&legs) > first, "unread datagrams are not counted");
    }

    #[test]
    fn what_is_sent_together_arrives_one_by_one() {
        let bind = || {
            let any = (Ipv4Addr::LOCALHOST, 0).into();
            UdpSocket::bind(any, &UdpOptions::default()).expect("bind")
        };
        let from = bind();
        let to = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let (run, _) = run(&[(5, 100), (5, 100), (5, 40)]);
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
