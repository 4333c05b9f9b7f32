//! A peer: its keys, its sessions, the path to it and what was counted.

use crate::address_validation::AddressValidation;
use crate::birthday::Birthday;
use crate::capabilities::Capabilities;
use crate::cookie::CookieJar;
use crate::filter::StatefulFilter;
use crate::indices::PeerId;
use crate::keys::{PresharedKey, PublicKey};
use crate::native::health::{Receiver, Report};
use crate::native::path_mtu::PathMtu;
use crate::native::reassembly::Reassembly;
use crate::native::record::{Outgoing, RECORD_OVERHEAD};
use crate::noise::{Initiator, Protocol};
use crate::outbox::Destination;
use crate::paths::Paths;
use crate::ping::Pings;
use crate::session::Session;
use crate::tai64n::Tai64n;
use crate::time::Instant;
use crate::timers::Timers;
use crate::tunnel::may_send;
use seikan_observe::{DropReason, PeerCounters};
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::time::Duration;

/// Reports in a row without what followed the first of a batch, from which GSO counts as mangled.
const MANGLED_REPORTS: u8 = 2;
/// Packets that wait for a handshake, at most (kernel: `MAX_STAGED_PACKETS` is 128).
const STAGED_PACKETS: usize = 128;
/// Bytes that wait for a handshake, at most.
pub(crate) const STAGED_BYTES: usize = 256 * 1024;

/// Everything about one peer.
pub struct Peer {
    /// Its number in this tunnel.
    pub id: PeerId,
    /// Its identity.
    pub public_key: PublicKey,
    /// Mixed into the handshake; all zero when none is set.
    pub preshared_key: PresharedKey,
    /// Where it is.
    pub path: Path,
    /// How else it may be reached: an initiation goes there as well while nothing is heard from it.
    pub paths: Paths,
    /// Of the search for a port of a symmetric NAT, at either end.
    pub birthday: Birthday,
    /// What became of the questions whether it answers.
    pub pings: Pings,
    /// What was counted.
    pub counters: PeerCounters,
    /// When the newest session was established, since the Unix epoch.
    pub last_handshake: Option<Duration>,
    /// What the far end said it can do (native).
    pub capabilities: Option<Capabilities>,
    /// Why the far end's last handshake was refused, for the operator.
    pub refusal: Option<String>,
    pub(crate) sessions: Sessions,
    pub(crate) handshake: Handshake,
    pub(crate) timers: Timers,
    pub(crate) staged: StagedPackets,
    pub(crate) reassembly: Reassembly,
    /// Judges what it sends; absent if it may send whatever it likes.
    pub(crate) filter: Option<Box<StatefulFilter>>,
    /// This peer's entry in the tunnel's wake-up queue.
    pub(crate) scheduled: Option<Instant>,
}

/// The peers by their numbers. A removed peer's number is the next one's.
#[derive(Default)]
pub(crate) struct PeerTable {
    slots: Vec<Option<Peer>>,
    /// Places without a peer: searching for them would make loading many peers quadratic.
    vacant: BTreeSet<PeerId>,
}

impl PeerTable {
    /// Enters the peer that `make` makes for its number; `None` when there are no more numbers.
    pub fn insert(&mut self, make: impl FnOnce(PeerId) -> Peer) -> Option<PeerId> {
        if let Some(id) = self.vacant.pop_first() {
            self.slots[id.0 as usize] = Some(make(id));
            return Some(id);
        }
        let id = PeerId(u32::try_from(self.slots.len()).ok()?);
        self.slots.push(Some(make(id)));
        Some(id)
    }

    /// Takes a peer out.
    pub fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.slots.get_mut(id.0 as usize)?.take()?;
        self.vacant.insert(id);
        Some(peer)
    }
}

impl Deref for PeerTable {
    type Target = [Option<Peer>];

    fn deref(&self) -> &Self::Target {
        &self.slots
    }
}

impl DerefMut for PeerTable {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.slots
    }
}

/// The state of handshakes with one peer.
pub(crate) struct Handshake {
    pub pending: Option<Box<Pending>>,
    pub cookie: CookieJar,
    /// The newest timestamp of an initiation from the peer.
    pub last_timestamp: Option<Tai64n>,
    /// When the last initiation from the peer was processed.
    pub last_received: Option<Instant>,
}

/// An initiation that waits for its response.
pub(crate) struct Pending {
    pub initiator: Initiator,
    /// As it was sent.
    pub message: Box<[u8]>,
    pub sent: Instant,
    /// The one address that it was sent to, if it is one.
    pub alone: Option<SocketAddr>,
    /// The ways that there were when it was sent, and those that it was sent to since.
    pub known: Vec<SocketAddr>,
    /// There may be another one.
    pub new_candidate: bool,
}

impl Handshake {
    /// There is a new way to the peer.
    pub fn mark_new_candidate(&mut self) {
        if let Some(pending) = &mut self.pending {
            pending.new_candidate = true;
        }
    }

    /// Whether an initiation waits for its response that may not have been sent by every way.
    pub fn has_new_candidate(&self) -> bool {
        let pending = self.pending.as_ref();
        pending.is_some_and(|pending| pending.new_candidate)
    }
}

/// The way to a peer.
#[derive(Debug)]
pub struct Path {
    /// Where to send.
    pub endpoint: Option<SocketAddr>,
    /// Our address that the peer last sent to.
    pub source: Option<IpAddr>,
    /// What the path carries (native).
    pub mtu: PathMtu,
    /// From a probe or a check to its acknowledgement, the latest (native).
    pub rtt: Option<Duration>,
    /// The peer's latest report about what we send (native), without the probes that were lost for being too large.
    pub report: Option<Report>,
    /// Cleared when the path turned out to mangle GSO batches.
    pub gso: bool,
    /// What we see of what the peer sends (native).
    pub(crate) health: Receiver,
    /// What is sent there, and how much may be.
    pub(crate) outgoing: Outgoing,
    /// The endpoint before this one, if it was proven and this one is not yet.
    before: Option<(SocketAddr, Option<IpAddr>)>,
    /// Where the response that waits to be confirmed went.
    pub(crate) responded: Option<SocketAddr>,
    /// Probing goes on until then; moved by sending data.
    pub(crate) active_until: Instant,
    /// Datagrams sent behind the first of their GSO batch since the latest report.
    pub(crate) sent_later: u32,
    /// Reports in a row that missed them.
    missed: u8,
}

impl Path {
    fn new(endpoint: Option<SocketAddr>) -> Path {
        Path {
            endpoint,
            source: None,
            mtu: PathMtu::new(endpoint.is_some_and(|e| e.is_ipv6())),
            rtt: None,
            report: None,
            gso: true,
            health: Receiver::default(),
            outgoing: Outgoing::default(),
            before: None,
            responded: None,
            active_until: Instant::BOOT,
            sent_later: 0,
            missed: 0,
        }
    }

    /// Takes in what the peer saw of our datagrams while `session` was our index of the current session.
    pub(crate) fn reported(&mut self, report: Report, session: u32) {
        if report.misses_batches(std::mem::take(&mut self.sent_later)) {
            self.missed += 1;
            self.gso &= self.missed < MANGLED_REPORTS;
        } else if report.received_later > 0 {
            self.missed = 0;
        }
        self.report = Some(Report {
            lost: self.mtu.excuse(report.lost, session),
            ..report
        });
    }

    /// Whether the peer is known to receive at its endpoint.
    pub fn is_validated(&self) -> bool {
        self.outgoing.validation.is_complete()
    }

    /// It is, now.
    pub(crate) fn validate(&mut self) {
        self.outgoing.validation = AddressValidation::default();
        self.before = None;
    }

    /// Sends to `endpoint` from now on, which is where a datagram came from: little until it is proven.
    pub(crate) fn follow(&mut self, endpoint: SocketAddr, source: Option<IpAddr>, now: Instant) {
        if self.endpoint == Some(endpoint) {
            self.source = source;
            return;
        }
        let validated = self.endpoint.filter(|_| self.is_validated());
        let before = validated.map(|endpoint| (endpoint, self.source));
        let before = before.or(self.before);
        self.move_to(endpoint, source);
        self.outgoing.validation = AddressValidation::required(now);
        self.before = before;
    }

    /// Goes back to where the peer was before, if this endpoint is not proven; false if that is not known.
    pub(crate) fn go_back(&mut self) -> bool {
        let Some((endpoint, source)) = self.before.filter(|_| !self.is_validated()) else {
            return false;
        };
        self.move_to(endpoint, source);
        true
    }

    /// Sends to `endpoint` from now on, where the peer is known to be; a path that is another one is measured anew.
    pub(crate) fn move_to(&mut self, endpoint: SocketAddr, source: Option<IpAddr>) {
        if self.endpoint != Some(endpoint) {
            let next_id = self.outgoing.next_id;
            let health = std::mem::take(&mut self.health);
            *self = Path {
                outgoing: Outgoing::from_id(next_id),
                responded: self.responded,
                health,
                active_until: self.active_until,
                mtu: self.mtu.moved(endpoint.is_ipv6()),
                ..Path::new(Some(endpoint))
            };
        }
        self.source = source;
    }

    /// The address to send to, with the given marking.
    pub(crate) fn destination(&self, traffic_class: u8) -> Option<Destination> {
        Some(Destination {
            address: self.endpoint?,
            source: self.source,
            traffic_class,
        })
    }
}

/// The key pairs of a peer (whitepaper section 6.3 and kernel `noise.c`).
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    pub current: Option<Box<Session>>,
    pub previous: Option<Box<Session>>,
    /// Derived as responder; confirmed by the first datagram that uses it.
    pub next: Option<Box<Session>>,
}

impl Sessions {
    /// Takes in a session derived as initiator, which may be used at once. Returns the local
    /// indices of sessions that end by it.
    pub fn establish_initiated(&mut self, session: Session) -> [Option<u32>; 2] {
        let next = self.next.take();
        let ended = [
            index(&self.previous),
            next.as_ref().and_then(|_| index(&self.current)),
        ];
        self.previous = if next.is_some() {
            next
        } else {
            self.current.take()
        };
        self.current = Some(Box::new(session));
        ended
    }

    /// Takes in a session derived as responder, which waits for its first datagram.
    pub fn establish_responded(&mut self, session: Session) -> [Option<u32>; 2] {
        let ended = [index(&self.next), index(&self.previous)];
        self.previous = None;
        self.next = Some(Box::new(session));
        ended
    }

    /// The first datagram under `next` has come: it becomes current. Returns the local index of
    /// the session that ends by it.
    pub fn confirm_next(&mut self) -> Option<u32> {
        let ended = index(&self.previous);
        self.previous = self.current.take();
        self.current = self.next.take();
        ended
    }

    /// The session that receives under `local_index`, and whether it is the unconfirmed one.
    pub fn by_index(&mut self, local_index: u32) -> Option<(&mut Session, bool)> {
        let is =
            |s: &Option<Box<Session>>| s.as_ref().is_some_and(|s| s.local_index == local_index);
        if is(&self.current) {
            self.current.as_deref_mut().map(|s| (s, false))
        } else if is(&self.previous) {
            self.previous.as_deref_mut().map(|s| (s, false))
        } else if is(&self.next) {
            self.next.as_deref_mut().map(|s| (s, true))
        } else {
            None
        }
    }

    /// Forgets all keys; returns the local indices that become free.
    pub fn clear(&mut self) -> [Option<u32>; 3] {
        let Sessions {
            current,
            previous,
            next,
        } = std::mem::take(self);
        [index(&current), index(&previous), index(&next)]
    }
}

fn index(session: &Option<Box<Session>>) -> Option<u32> {
    session.as_ref().map(|s| s.local_index)
}

/// Reads of the TUN device that wait for a session; bounded, dropped at the head.
#[derive(Debug, Default)]
pub(crate) struct StagedPackets {
    reads: VecDeque<(Box<[u8]>, u64)>,
    bytes: usize,
}

impl StagedPackets {
    /// Keeps a read that stands for `packets`; returns how many packets had to go for it.
    pub fn push(&mut self, read: &[u8], packets: u64) -> u64 {
        let mut dropped = 0;
        while self.reads.len() >= STAGED_PACKETS || self.bytes + read.len() > STAGED_BYTES {
            match self.reads.pop_front() {
                Some((old, packets)) => {
                    self.bytes -= old.len();
                    dropped += packets;
                }
                None => break,
            }
        }
        self.bytes += read.len();
        self.reads.push_back((read.into(), packets));
        dropped
    }

    /// The oldest read.
    pub fn pop(&mut self) -> Option<(Box<[u8]>, u64)> {
        let (read, packets) = self.reads.pop_front()?;
        self.bytes -= read.len();
        Some((read, packets))
    }

    /// Bytes of UDP payload that the oldest read takes at most, in a record of its own; of a super-packet it is not known.
    pub fn next_cost(&self) -> usize {
        match self.reads.front() {
            Some((read, 1)) => read.len() + RECORD_OVERHEAD,
            _ => usize::MAX,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }
}

impl Peer {
    pub(crate) fn new(id: PeerId, protocol: Protocol, public_key: PublicKey) -> Peer {
        Peer {
            id,
            public_key,
            preshared_key: PresharedKey::from_bytes([0; 32]),
            path: Path::new(None),
            paths: Paths::default(),
            birthday: Birthday::default(),
            pings: Pings::default(),
            counters: PeerCounters::default(),
            last_handshake: None,
            capabilities: None,
            refusal: None,
            sessions: Sessions::default(),
            handshake: Handshake {
                pending: None,
                cookie: CookieJar::new(protocol, &public_key),
                last_timestamp: None,
                last_received: None,
            },
            timers: Timers::default(),
            staged: StagedPackets::default(),
            reassembly: Reassembly::default(),
            filter: None,
            scheduled: None,
        }
    }

    /// Whether there is a session to send in at this time.
    pub fn has_session(&self, now: Instant) -> bool {
        let session = self.sessions.current.as_ref();
        session.is_some_and(|session| may_send(session, now))
    }

    /// Whether there is anywhere to send an initiation to.
    pub fn is_reachable(&self) -> bool {
        self.path.endpoint.is_some() || !self.paths.is_empty()
    }

    /// Sessions, confirmed or not, and initiations that wait for a response: what each has a
    /// receiver index for.
    pub fn indices(&self) -> usize {
        let sessions = &self.sessions;
        [&sessions.current, &sessions.previous, &sessions.next]
            .iter()
            .filter(|s| s.is_some())
            .count()
            + usize::from(self.handshake.pending.is_some())
    }

    /// The AEAD of the current session.
    pub fn cipher(&self) -> Option<crate::capabilities::Cipher> {
        self.sessions.current.as_ref().map(|s| s.cipher)
    }

    /// The persistent keepalive interval, if there is one.
    pub fn persistent_keepalive(&self) -> Option<Duration> {
        self.timers.persistent_keepalive()
    }

    /// Gives up everything that waits for a handshake.
    pub(crate) fn drop_staged(&mut self, reason: DropReason) {
        while let Some((_, packets)) = self.staged.pop() {
            self.counters.outbound.pending -= packets;
            self.counters.outbound.drops.add(reason, packets);
        }
    }
}
