//! Punch sockets: sockets in addition to the two on the tunnel's port, each for one address of a peer. Behind a
//! symmetric NAT each of them has another external port, and the peer's probes hit one of many
//! ([`seikan_proto::birthday`]).
//!
//! Punch sockets wait for a datagram of their peer. The first one on which the tunnel authenticates a datagram
//! from the expected address is kept: datagrams to that address leave by it, and the peer's other punch sockets
//! are closed. A kept socket is closed when another path is in use and it has received nothing authentic
//! lately.

use super::SocketCounts;
use seikan_mesh::endpoints::any_port;
use seikan_mesh::stun;
use seikan_proto::birthday::{PORTS, Punch};
use seikan_proto::indices::PeerId;
use seikan_proto::time::Instant;
use seikan_sys::poll::{Epoll, Interest};
use seikan_sys::process::allow_more_files;
use seikan_sys::udp::{ReceiveMeta, Transmit, UdpOptions, UdpSocket};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::time::Duration;
use std::{fs, iter};

/// First token of punch sockets.
pub(crate) const FIRST_TOKEN: u64 = 1 << 63;
/// Descriptors reserved for the rest of the process.
const SPARE_FILES: u64 = 64;
/// Sockets opened before packets are handled again; each takes some 100 us.
const MAX_OPENED: usize = 16;
/// Interval at which punch sockets are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval between two keepalives by a kept socket in use. NATs forget a mapping after 30 s at the soonest,
/// and without traffic the loss would go unnoticed.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Time after which an unused kept socket is closed if nothing authentic arrives by it.
const UNUSED_FOR: Duration = Duration::from_secs(5);

/// All punch sockets of a tunnel; usually none.
#[derive(Debug, Default)]
pub struct PunchSockets {
    waiting: Vec<Opened>,
    kept: BTreeMap<SocketAddr, KeptSocket>,
    /// Pending requests; the first may be half done.
    punches: VecDeque<Punch>,
    /// Number of tokens used.
    tokens: u64,
    check_at: Option<Instant>,
    /// Counters of closed sockets.
    closed: SocketCounts,
    /// Datagrams sent to open ports in NATs, without those that the kernel refused.
    openers: u64,
    /// The latest reason why no sockets could be opened for a peer.
    trouble: Option<(PeerId, String)>,
}

/// A punch socket and its peer.
#[derive(Debug)]
struct Opened {
    socket: UdpSocket,
    token: u64,
    peer: PeerId,
    towards: SocketAddr,
}

#[derive(Debug)]
struct KeptSocket {
    opened: Opened,
    /// Time of the last authentic datagram received.
    received_at: Instant,
    /// Time of the last keepalive sent.
    kept_alive_at: Instant,
}

impl PunchSockets {
    /// Returns a peer's kept socket for an address; other peers may be reached at that address too, but not by
    /// this socket.
    #[inline]
    pub fn to(&self, address: SocketAddr, peer: Option<PeerId>) -> Option<&UdpSocket> {
        if self.kept.is_empty() {
            return None;
        }
        let socket = self.kept.get(&address);
        let socket = socket.filter(|socket| Some(socket.opened.peer) == peer)?;
        Some(&socket.opened.socket)
    }

    /// Returns the port of a peer's kept socket for an address.
    pub fn port_to(&self, address: SocketAddr, peer: PeerId) -> Option<u16> {
        Some(self.to(address, Some(peer))?.local_addr().ok()?.port())
    }

    /// Returns the number of datagrams sent to open ports in NATs.
    pub fn openers(&self) -> u64 {
        self.openers
    }

    /// Returns why no sockets could be opened for a peer.
    pub fn trouble(&self, peer: PeerId) -> Option<&str> {
        let of = |(id, _): &&(PeerId, String)| *id == peer;
        self.trouble.as_ref().filter(of).map(|(_, why)| &**why)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &UdpSocket> {
        let kept = self.kept.values().map(|socket| &socket.opened);
        self.waiting.iter().chain(kept).map(|one| &one.socket)
    }

    /// Returns the counters of closed sockets.
    pub(crate) fn closed(&self) -> SocketCounts {
        self.closed
    }

    fn opened(&self, token: u64) -> Option<&Opened> {
        let kept = self.kept.values().map(|socket| &socket.opened);
        let mut all = kept.chain(&self.waiting);
        all.find(|opened| opened.token == token)
    }

    /// Returns the peer of a token's socket, if a datagram of a batch has the expected source address.
    pub(crate) fn expected_peer(&self, token: u64, metas: &[ReceiveMeta]) -> Option<PeerId> {
        let opened = self.opened(token)?;
        let is_expected = |meta: &ReceiveMeta| meta.source == opened.towards;
        metas.iter().any(is_expected).then_some(opened.peer)
    }

    /// Returns the time of the next work: requests, or a check.
    pub(crate) fn wakeup(&self) -> Option<Instant> {
        let now = (!self.punches.is_empty()).then_some(Instant::BOOT);
        now.or(self.check_at)
    }

    pub(crate) fn is_check_due(&self, now: Instant) -> bool {
        self.check_at.is_some_and(|at| at <= now)
    }

    /// Closes waiting sockets of requests that are not open any more, and kept sockets that are not used. Returns
    /// the peers and addresses that need a keepalive by their kept socket.
    pub(crate) fn check(
        &mut self,
        now: Instant,
        is_open: impl Fn(PeerId) -> bool,
        is_used: impl Fn(PeerId, SocketAddr) -> bool,
    ) -> Vec<(PeerId, SocketAddr)> {
        self.close(|one| !is_open(one.peer));
        let mut keepalives = Vec::new();
        let mut unused = Vec::new();
        for (address, socket) in &mut self.kept {
            let peer = socket.opened.peer;
            match is_used(peer, *address) {
                false if now.duration_since(socket.received_at) >= UNUSED_FOR => {
                    unused.push(*address);
                }
                true if now.duration_since(socket.kept_alive_at) >= KEEP_ALIVE => {
                    socket.kept_alive_at = now;
                    keepalives.push((peer, *address));
                }
                _ => {}
            }
        }
        for address in unused {
            if let Some(socket) = self.kept.remove(&address) {
                self.count(&socket.opened);
            }
        }
        let none = self.waiting.is_empty() && self.kept.is_empty();
        self.check_at = (!none).then_some(now + LOOK_EVERY);
        keepalives
    }

    /// Returns the socket of a token.
    pub(crate) fn socket(&self, token: u64) -> Option<&UdpSocket> {
        self.opened(token).map(|opened| &opened.socket)
    }

    /// Adds requests. A new request for a peer replaces an old one. Requests that the tunnel no
    /// longer needs are removed.
    pub(crate) fn add_requests(&mut self, punches: Vec<Punch>, is_open: impl Fn(PeerId) -> bool) {
        let replaced = |old: &Punch| punches.iter().any(|new| new.peer == old.peer);
        self.punches.retain(|old| !replaced(old));
        self.punches.extend(punches);
        self.punches.retain(|punch| is_open(punch.peer));
    }

    /// Continues the first request. Returns its peer and the number of sockets that sent a datagram once it is
    /// done.
    pub(super) fn continue_punch(
        &mut self,
        options: &UdpOptions,
        epoll: &Epoll,
        now: Instant,
    ) -> Option<(PeerId, u16)> {
        let punch = self.punches.pop_front()?;
        let peer = punch.peer;
        self.check_at.get_or_insert(now + LOOK_EVERY);
        if let Err(why) = self.open(&punch, options, epoll) {
            self.close_waiting(peer);
            self.trouble = Some((peer, why));
            return Some((peer, 0));
        }
        let waiting = self.waiting.iter().filter(|one| one.peer == peer);
        if waiting.clone().count() < PORTS.into() {
            self.punches.push_front(punch);
            return None;
        }
        let opener = stun::indication();
        let sent = waiting.filter(|one| one.send(&opener, punch.hop_limit));
        let sent = sent.count();
        self.openers += sent as u64;
        if sent == 0 {
            let why = format!("cannot send to {}", punch.destinations[0]);
            self.close_waiting(peer);
            self.trouble = Some((peer, why));
        }
        Some((peer, sent as u16))
    }

    /// Opens some of the missing sockets, after it closed those for obsolete addresses and those above an
    /// address's share.
    fn open(&mut self, punch: &Punch, options: &UdpOptions, epoll: &Epoll) -> Result<(), String> {
        if !self.waiting.iter().any(|one| one.peer == punch.peer) {
            self.trouble = None;
            check_descriptors(PORTS)?;
        }
        let share = usize::from(PORTS).div_ceil(punch.destinations.len().max(1));
        let mut missing: Vec<(SocketAddr, usize)> =
            punch.destinations.iter().map(|to| (*to, share)).collect();
        self.close(|one| {
            let of_use =
                |(to, missing): &&mut (SocketAddr, usize)| *to == one.towards && *missing > 0;
            let ours = one.peer == punch.peer;
            ours && missing
                .iter_mut()
                .find(of_use)
                .map(|(_, missing)| *missing -= 1)
                .is_none()
        });
        let missing = missing.into_iter();
        let missing = missing.flat_map(|(to, missing)| iter::repeat_n(to, missing));
        for towards in missing.take(MAX_OPENED) {
            let socket =
                UdpSocket::bind(any_port(towards), options).map_err(|error| error.to_string())?;
            let token = FIRST_TOKEN + self.tokens;
            self.tokens += 1;
            epoll
                .add(&socket, token, Interest::Read)
                .map_err(|error| format!("cannot watch a socket: {error}"))?;
            self.waiting.push(Opened {
                socket,
                token,
                peer: punch.peer,
                towards,
            });
        }
        Ok(())
    }

    /// Notes an authentic datagram. Returns the peer if the socket was waiting until now, and closes the peer's
    /// other waiting sockets.
    pub(crate) fn note_received(&mut self, token: u64, now: Instant) -> Option<PeerId> {
        let mut kept = self.kept.values_mut();
        if let Some(socket) = kept.find(|socket| socket.opened.token == token) {
            socket.received_at = now;
            return None;
        }
        let at = self.waiting.iter().position(|one| one.token == token)?;
        let opened = self.waiting.swap_remove(at);
        let peer = opened.peer;
        let socket = KeptSocket {
            received_at: now,
            kept_alive_at: now,
            opened,
        };
        self.close_waiting(peer);
        if let Some(former) = self.kept.insert(socket.opened.towards, socket) {
            self.count(&former.opened);
        }
        Some(peer)
    }

    fn close_waiting(&mut self, peer: PeerId) {
        self.close(|one| one.peer == peer);
    }

    /// Closes the waiting sockets that match.
    fn close(&mut self, mut meant: impl FnMut(&Opened) -> bool) {
        let closed: Vec<Opened> = self.waiting.extract_if(.., |one| meant(one)).collect();
        closed.iter().for_each(|one| self.count(one));
    }

    /// Closes all sockets and drops pending requests. The tunnel repeats the requests that it still
    /// needs.
    pub(crate) fn close_all(&mut self) {
        self.punches.clear();
        let kept = std::mem::take(&mut self.kept).into_values();
        let waiting = std::mem::take(&mut self.waiting);
        for closed in kept.map(|socket| socket.opened).chain(waiting) {
            self.count(&closed);
        }
    }

    fn count(&mut self, closed: &Opened) {
        self.closed.add(&closed.socket);
    }
}

impl Opened {
    fn send(&self, bytes: &[u8], hop_limit: Option<NonZeroU8>) -> bool {
        let sent = self.socket.send(&Transmit {
            destination: self.towards,
            source: None,
            traffic_class: 0,
            hop_limit,
            segment_size: None,
            payload: bytes,
        });
        sent.is_ok()
    }
}

/// Checks whether this process may open that many more descriptors.
fn check_descriptors(files: u16) -> Result<(), String> {
    let failed = |error| format!("cannot read the limit of open files: {error}");
    let most = allow_more_files().map_err(failed)?;
    let open = fs::read_dir("/proc/self/fd").map_err(failed)?.count() as u64;
    let needed = open + u64::from(files) + SPARE_FILES;
    if needed <= most {
        Ok(())
    } else {
        Err(format!(
            "cannot open {files} sockets: {open} of at most {most} files are open; raise `LimitNOFILE` to {needed}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::Sockets;

    fn at(seconds: u64) -> Instant {
        Instant::BOOT + Duration::from_secs(seconds)
    }

    /// Punches in as many rounds as needed; returns the number of sockets that sent.
    fn punch(
        punch_sockets: &mut PunchSockets,
        epoll: &Epoll,
        peer: PeerId,
        towards: Vec<SocketAddr>,
    ) -> u16 {
        punch_sockets.punches.push_back(Punch {
            peer,
            destinations: towards,
            hop_limit: None,
        });
        let turns = usize::from(PORTS) / MAX_OPENED;
        let options = UdpOptions::default();
        let mut done =
            (0..turns).filter_map(|_| punch_sockets.continue_punch(&options, epoll, at(0)));
        let (whose, ports) = done.next().expect("done");
        assert_eq!(whose, peer);
        assert!(done.next().is_none());
        ports
    }

    /// A peer's socket, and punch sockets that have sent to it.
    fn punched(peer: PeerId) -> (std::net::UdpSocket, SocketAddr, PunchSockets, Epoll) {
        let far = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let patience = Some(Duration::from_secs(1));
        far.set_read_timeout(patience).expect("a timeout");
        let address = far.local_addr().expect("an address");
        let (mut punch_sockets, epoll) = (PunchSockets::default(), Epoll::new(4).expect("epoll"));
        let ports = punch(&mut punch_sockets, &epoll, peer, vec![address]);
        assert_eq!(ports, PORTS, "{:?}", punch_sockets.trouble(peer));
        (far, address, punch_sockets, epoll)
    }

    /// Source addresses of the received datagrams.
    fn senders(far: &std::net::UdpSocket, count: usize) -> Vec<SocketAddr> {
        let mut buffer = [0; 64];
        let mut one = || {
            let (length, from) = far.recv_from(&mut buffer).expect("a datagram");
            // RFC 8489, sections 5 and 6: an indication of the method Binding, with the magic cookie and no attributes.
            assert_eq!(buffer[..8], [0, 0x11, 0, 0, 0x21, 0x12, 0xa4, 0x42]);
            assert_eq!(length, 20);
            from
        };
        (0..count).map(|_| one()).collect()
    }

    #[test]
    fn every_port_sends_something_and_again_from_the_same_ports() {
        let (far, address, mut punch_sockets, epoll) = punched(PeerId(3));
        let mut first = senders(&far, PORTS.into());
        punch(&mut punch_sockets, &epoll, PeerId(3), vec![address]);
        let mut again = senders(&far, PORTS.into());
        first.sort_unstable();
        again.sort_unstable();
        assert_eq!(first, again);
        first.dedup();
        assert_eq!(first.len(), usize::from(PORTS));
        assert_eq!(punch_sockets.openers(), 2 * u64::from(PORTS));
        // None of them is used for sending.
        assert!(punch_sockets.to(address, Some(PeerId(3))).is_none());
    }

    #[test]
    fn a_punch_at_another_address_closes_sockets_for_the_former() {
        let (_far, address, mut punch_sockets, epoll) = punched(PeerId(3));
        let others = [0; 2].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket"));
        let [still_open, new] = others.map(|far| far.local_addr().expect("an address"));
        for towards in [vec![address, still_open], vec![still_open, new]] {
            assert_eq!(
                punch(&mut punch_sockets, &epoll, PeerId(3), towards.clone()),
                PORTS
            );
            assert_eq!(punch_sockets.waiting.len(), usize::from(PORTS));
            for to in towards {
                let there = punch_sockets.waiting.iter().filter(|one| one.towards == to);
                assert_eq!(there.count(), usize::from(PORTS) / 2);
            }
        }
    }

    #[test]
    fn obsolete_punches_are_dropped() {
        let punch = |peer, to: &str| Punch {
            peer: PeerId(peer),
            destinations: vec![to.parse().expect("an address")],
            hop_limit: None,
        };
        let mut punch_sockets = PunchSockets::default();
        let [first, second, third] =
            [(1, "[::1]:1"), (2, "[::1]:2"), (3, "[::1]:3")].map(|(peer, to)| punch(peer, to));
        punch_sockets.add_requests(vec![first, second, third.clone()], |_| true);
        let again = punch(1, "[::1]:4");
        punch_sockets.add_requests(vec![again.clone()], |peer| peer != PeerId(2));
        assert_eq!(punch_sockets.punches, [third, again]);
    }

    #[test]
    fn the_first_socket_with_an_authentic_datagram_is_kept() {
        let (_far, address, mut punch_sockets, _epoll) = punched(PeerId(3));
        let token = punch_sockets.waiting[100].token;
        let port = punch_sockets.waiting[100]
            .socket
            .local_addr()
            .expect("one")
            .port();
        assert_eq!(punch_sockets.note_received(token, at(1)), Some(PeerId(3)));
        assert_eq!(punch_sockets.port_to(address, PeerId(3)), Some(port));
        // The peer at the same address is reached as before.
        assert_eq!(punch_sockets.port_to(address, PeerId(4)), None);
        assert_eq!(punch_sockets.iter().count(), 1);
        assert_eq!(punch_sockets.note_received(token, at(2)), None, "once");
        assert_eq!(
            punch_sockets.note_received(token + 1, at(2)),
            None,
            "closed"
        );
        assert_eq!(punch_sockets.port_to(address, PeerId(3)), Some(port));
    }

    #[test]
    fn counters_of_punch_sockets_survive_a_change_of_the_port() {
        let far = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let address = far.local_addr().expect("an address");
        let options = UdpOptions {
            receive_buffer: 4096,
            ..UdpOptions::default()
        };
        let mut sockets = Sockets::bind(0, options).expect("sockets");
        let epoll = Epoll::new(4).expect("epoll");
        sockets.punch.punches.push_back(Punch {
            peer: PeerId(3),
            destinations: vec![address],
            hop_limit: None,
        });
        for _ in 0..usize::from(PORTS) / MAX_OPENED {
            sockets.continue_punch(&epoll, at(0));
        }
        let waiting = &sockets.punch.waiting;
        let [socket, other] = [0, 1].map(|i| (waiting[i].token, waiting[i].socket.local_addr()));
        // More datagrams than their receive buffers can hold.
        for (_, local) in [&socket, &other] {
            let port = local.as_ref().expect("an address").port();
            for _ in 0..100 {
                far.send_to(&[0; 1000], ("127.0.0.1", port))
                    .expect("a datagram");
            }
        }
        sockets.punch.note_received(socket.0, at(1));
        let (closed, all) = (sockets.punch.closed(), sockets.counts());
        assert!(closed.receive_queue_drops > 0, "the other's");
        assert!(
            all.receive_queue_drops > closed.receive_queue_drops,
            "the punch_sockets socket's"
        );
        sockets.rebind(0).expect("another port");
        assert_eq!(sockets.punch.iter().count(), 0);
        assert_eq!(sockets.counts(), all);
        assert_eq!(sockets.punch.openers(), u64::from(PORTS));
    }

    #[test]
    fn sockets_of_one_peer_stay_open_when_another_is_reached() {
        let (_far, _, mut punch_sockets, epoll) = punched(PeerId(3));
        let far = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let towards = vec![far.local_addr().expect("an address")];
        punch(&mut punch_sockets, &epoll, PeerId(4), towards);
        let token = punch_sockets.waiting[0].token;
        assert_eq!(punch_sockets.note_received(token, at(1)), Some(PeerId(3)));
        assert_eq!(punch_sockets.iter().count(), usize::from(PORTS) + 1);
    }

    #[test]
    fn the_ports_are_shared_out_among_two_addresses() {
        let all = [0; 2].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket"));
        let address = |far: &std::net::UdpSocket| far.local_addr().expect("an address");
        let (mut punch_sockets, epoll) = (PunchSockets::default(), Epoll::new(4).expect("epoll"));
        let towards = all.iter().map(address).collect();
        punch(&mut punch_sockets, &epoll, PeerId(1), towards);
        for far in &all {
            let patience = Some(Duration::from_secs(1));
            far.set_read_timeout(patience).expect("a timeout");
            senders(far, usize::from(PORTS) / 2);
        }
    }

    #[test]
    fn where_nothing_can_be_sent_it_says_so_and_nothing_stays_open() {
        let (mut punch_sockets, epoll) = (PunchSockets::default(), Epoll::new(4).expect("epoll"));
        // Not a broadcast socket (socket(7), SO_BROADCAST): refused at once.
        let towards = vec!["255.255.255.255:7".parse().expect("an address")];
        let peer = PeerId(1);
        assert_eq!(punch(&mut punch_sockets, &epoll, peer, towards), 0);
        assert_eq!(punch_sockets.iter().count(), 0);
        let why = punch_sockets.trouble(peer).expect("why");
        assert!(why.contains("255.255.255.255:7"), "{why}");
    }
}
