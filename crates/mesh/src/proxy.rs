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
pub(super) struct ProxySocket {
    pub peer: SocketAddr,
    pub local: SocketAddr,
    /// The agent was told of it.
    pub reported: bool,
    /// A channel was requested from the TURN server.
    pub bound: bool,
    /// Time of the tunnel's last datagram.
    pub answered: Option<Instant>,
    socket: UdpSocket,
    overflow: Overflow,
    opened: Instant,
}

impl ProxySocket {
    /// Whether it may be closed unless it is required.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        match self.answered {
            Some(at) => now.duration_since(at) >= IDLE,
            None => now.duration_since(self.opened) >= UNANSWERED,
        }
    }
}

/// All proxy sockets of a thread.
pub(super) struct ProxySockets {
    all: BTreeMap<u64, ProxySocket>,
    by_peer: HashMap<SocketAddr, u64>,
    next: u64,
    /// The tunnel's port.
    port: Arc<AtomicU16>,
    /// Datagrams to the tunnel.
    inward: Run,
    pub counters: Counters,
}

impl ProxySockets {
    /// Creates an empty set; the first socket gets the token `first`. `port` is the tunnel's port.
    pub(super) fn new(first: u64, port: Arc<AtomicU16>) -> ProxySockets {
        ProxySockets {
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

    pub(super) fn get_mut(&mut self, token: u64) -> Option<&mut ProxySocket> {
        self.all.get_mut(&token)
    }

    /// Number of sockets for one IP address that the tunnel has not answered yet.
    pub(super) fn unanswered(&self, ip: IpAddr) -> usize {
        let same =
            |proxy: &&ProxySocket| proxy.answered.is_none() && proxy.peer.ip().to_canonical() == ip;
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
        let proxy = ProxySocket {
            peer,
            local,
            reported: false,
            bound: false,
            answered: None,
            socket,
            overflow: Overflow::default(),
            opened: Instant::now(),
        };
        self.all.insert(token, proxy);
        self.by_peer.insert(peer, token);
        Some(token)
    }

    /// Closes a socket.
    pub(super) fn close(&mut self, token: u64) -> Option<ProxySocket> {
        let mut proxy = self.all.remove(&token)?;
        self.by_peer.remove(&proxy.peer);
        proxy
            .overflow
            .count(&proxy.socket, &mut self.counters.drops);
        Some(proxy)
    }

    /// Returns the tokens of matching sockets.
    pub(super) fn of(&self, is_like: impl Fn(&ProxySocket) -> bool) -> Vec<u64> {
        let proxies = self.all.iter().filter(|(_, proxy)| is_like(proxy));
        proxies.map(|(token, _)| *token).collect()
    }

    /// Queues a datagram to the tunnel; [`Self::flush`] sends it at the latest.
    pub(super) fn deliver(&mut self, token: u64, data: &[u8]) {
        if !self.inward.fits(token, data.len()) {
            self.flush();
        }
        self.inward.reserve(token, data.len()).copy_from_slice(data);
    }

    /// Sends the queued datagrams to the tunnel.
    pub(super) fn flush(&mut self) {
        let tunnel = self.tunnel();
        if let Some(proxy) = self.all.get(&self.inward.to) {
            let drops = &mut self.counters.drops;
            self.counters.received += self.inward.send(&proxy.socket, tunnel, drops);
        }
        self.inward.clear();
    }

    /// Receives a batch from a socket; returns whether there was any datagram.
    pub(super) fn receive(&mut self, token: u64, batch: &mut ReceiveBatch) -> bool {
        let Some(proxy) = self.all.get_mut(&token) else {
            return false;
        };
        // The error belongs to an earlier send, and was counted there.
        let received = proxy.socket.receive(batch).is_ok_and(|filled| filled > 0);
        if received {
            proxy.answered = Some(Instant::now())
        } else {
            proxy
                .overflow
                .count(&proxy.socket, &mut self.counters.drops)
        }
        received
    }

    /// Whether a datagram is of the tunnel and complete; counts it otherwise.
    pub(super) fn is_whole(&mut self, meta: &ReceiveMeta) -> bool {
        let reason = if meta.source != self.tunnel() {
            DropReason::UnknownSource
        } else if meta.truncated || meta.length == 0 {
            DropReason::Truncated
        } else {
            return true;
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
    pub(super) fn fits(&self, to: u64, length: usize) -> bool {
        self.bytes.is_empty()
            || (to == self.to
                && length <= self.size
                && self.bytes.len().is_multiple_of(self.size)
                && self.bytes.len() + length <= MAX_RUN
                && self.bytes.len() / self.size < MAX_GSO_SEGMENTS)
    }

    /// Returns the space for a datagram that fits.
    pub(super) fn reserve(&mut self, to: u64, length: usize) -> &mut [u8] {
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
        hop_limit: None,
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
            if !run.fits(*to, *length) {
                return (run, n);
            }
            run.reserve(*to, *length).fill(n as u8);
        }
        (run, datagrams.len())
    }

    #[test]
    fn datagrams_of_one_length_and_destination_are_sent_together() {
        let (run, all) = run(&[(5, 100), (5, 100), (5, 40)]);
        assert_eq!((run.to, run.size, run.bytes.len(), all), (5, 100, 240, 3));
        assert_eq!(run.bytes[99..101], [0, 1]);
    }

    #[test]
    fn a_run_ends_with_another_destination_or_length() {
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
    fn kernel_drops_of_proxy_sockets_are_counted_also_after_closing() {
        let tunnel = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bind");
        let port = tunnel.local_addr().expect("an address").port();
        let epoll = Epoll::new(1).expect("an epoll instance");
        let mut proxies = ProxySockets::new(2, Arc::new(AtomicU16::new(port)));
        let token = proxies
            .open(([192, 0, 2, 1], 7).into(), &epoll)
            .expect("one");
        let local = proxies.get_mut(token).expect("one").local;
        // More than the largest buffer can hold, with the kernel's overhead for each.
        let flood = || {
            for _ in 0..20_000 {
                tunnel.send_to(&[4; 1000], local).expect("sent");
            }
        };
        let dropped =
            |proxies: &ProxySockets| proxies.counters.drops.get(DropReason::ReceiveQueueFull);
        flood();
        let mut batch = ReceiveBatch::new(16, 1 << 16);
        let mut came = 0;
        while proxies.receive(token, &mut batch) {
            came += batch.parts_mut().0.len() as u64;
        }
        assert!(came < 20_000, "nothing overflowed");
        let first = 20_000 - came;
        assert_eq!(dropped(&proxies), first);
        flood();
        proxies.close(token);
        assert!(
            dropped(&proxies) > first,
            "unread datagrams are not counted"
        );
    }

    #[test]
    fn a_run_arrives_as_single_datagrams() {
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
