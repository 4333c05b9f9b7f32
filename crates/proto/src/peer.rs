//! A peer: its keys, sessions, path and counters.

use crate::birthday::Birthday;
use crate::capabilities::Capabilities;
use crate::constants::REKEY_TIMEOUT;
use crate::cookie::CookieJar;
use crate::filter::StatefulFilter;
use crate::indices::PeerId;
use crate::keys::{PresharedKey, PublicKey};
use crate::native::address_validation::AddressValidation;
use crate::native::check::UnknownAcks;
use crate::native::health::{Receiver, Report, SentBatches};
use crate::native::path_mtu::PathMtu;
use crate::native::reassembly::Reassembly;
use crate::native::record::Outgoing;
use crate::native::repair;
use crate::native::stamp::RECORD_OVERHEAD;
use crate::noise::{Initiator, Protocol};
use crate::outbox::Destination;
use crate::paths::Paths;
use crate::ping::Pings;
use crate::session::Session;
use crate::tai64n::Tai64n;
use crate::time::Instant;
use crate::timers::Timers;
use seikan_observe::{DropReason, PeerCounters};
use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use tracing::{debug, info, warn};

/// Target of log events of sessions and paths.
pub(crate) const LOG: &str = "tunnel";
/// Consecutive reports without any datagram after the first of a GSO batch, after which GSO counts
/// as broken on this path.
const MANGLED_REPORTS: u8 = 2;
/// Minimum time between two reports that are assessed. Regular reports are one second apart.
const ASSESS_INTERVAL: Duration = Duration::from_millis(900);
/// Maximum number of packets staged for a handshake (kernel: `MAX_STAGED_PACKETS`, 128).
const STAGED_PACKETS: usize = 128;
/// Maximum number of bytes staged for a handshake.
pub(crate) const STAGED_BYTES: usize = 256 * 1024;

/// All state of one peer.
pub struct Peer {
    /// Its number in this tunnel.
    pub id: PeerId,
    /// Its static public key.
    pub public_key: PublicKey,
    /// Mixed into the handshake; all zero if none is set.
    pub preshared_key: PresharedKey,
    /// The path in use.
    pub path: Path,
    /// Candidate paths. While the peer does not answer, initiations are sent to all of them.
    pub paths: Paths,
    /// Port probing through a symmetric NAT, at either end.
    pub birthday: Birthday,
    /// Pings and their answers.
    pub pings: Pings,
    /// How many acknowledgements of checks that were never sent may still arrive.
    pub(crate) unknown_acks: UnknownAcks,
    /// Packet, byte and handshake counters.
    pub counters: PeerCounters,
    /// When the newest session was established, since the Unix epoch.
    pub last_handshake: Option<Duration>,
    /// Capabilities of the peer (native).
    pub capabilities: Option<Capabilities>,
    /// Why the peer's last handshake was refused, for the operator.
    pub refusal: Option<String>,
    pub(crate) sessions: Sessions,
    pub(crate) handshake: Handshake,
    pub(crate) timers: Timers,
    pub(crate) staged: StagedPackets,
    pub(crate) reassembly: Reassembly,
    /// Restores lost records, if both ends repair. Boxed, so that peers that do not take less memory.
    pub repair: Option<Box<repair::Receiver>>,
    /// Whether allowed IPs were set. In Ethernet mode, a peer without them may use any address. A
    /// peer that lost its last one to another peer may use none.
    pub(crate) has_allowed_ips: bool,
    /// Filters packets from the peer; `None` if the peer may send anything.
    pub(crate) filter: Option<Box<StatefulFilter>>,
    /// This peer's entry in the tunnel's wake-up queue.
    pub(crate) scheduled: Option<Instant>,
}

/// The peers by number. A new peer takes the lowest free number.
#[derive(Default)]
pub(crate) struct PeerTable {
    slots: Vec<Option<Peer>>,
    /// Free slots. A linear search for them would make loading many peers quadratic.
    vacant: BTreeSet<PeerId>,
}

impl PeerTable {
    /// Inserts the peer that `make` returns for its number. Returns `None` if there are no free
    /// numbers.
    pub fn insert(&mut self, make: impl FnOnce(PeerId) -> Peer) -> Option<PeerId> {
        if let Some(id) = self.vacant.pop_first() {
            self.slots[id.0 as usize] = Some(make(id));
            return Some(id);
        }
        let id = PeerId(u32::try_from(self.slots.len()).ok()?);
        self.slots.push(Some(make(id)));
        Some(id)
    }

    /// Removes a peer.
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
    /// Responses open no NATs until then.
    pub opens_again_at: Instant,
    /// The reason for a refusal that was logged last, and when. Boxed, because few peers have one.
    pub logged_refusal: Option<Box<LoggedRefusal>>,
}

/// A refusal of a handshake in the log.
pub(crate) struct LoggedRefusal {
    pub at: Instant,
    pub reason: String,
}

/// An initiation that waits for its response.
pub(crate) struct Pending {
    pub initiator: Initiator,
    /// The message as it was sent.
    pub message: Box<[u8]>,
    pub sent: Instant,
    /// The address that it was sent to, if there was only one.
    pub alone: Option<SocketAddr>,
    /// Candidates at the time of sending, and those to which the initiation was sent since.
    pub known: Vec<SocketAddr>,
    /// Whether there may be a candidate that is not in `known`.
    pub new_candidate: bool,
    /// Whether NATs get an opener first. Set if the peer did not send a call-me-maybe.
    pub openers_first: bool,
    /// Destinations to which only an opener was sent.
    pub opening: Option<Opening>,
}

/// Addresses whose NATs are given time to open from inside.
pub(crate) struct Opening {
    pub destinations: Vec<Destination>,
    pub ends_at: Instant,
}

impl Handshake {
    /// A candidate was added.
    pub fn mark_new_candidate(&mut self) {
        if let Some(pending) = &mut self.pending {
            pending.new_candidate = true;
        }
    }

    /// Whether an initiation waits for its response and may not have been sent to every candidate.
    pub fn has_new_candidate(&self) -> bool {
        let pending = self.pending.as_ref();
        pending.is_some_and(|pending| pending.new_candidate)
    }

    /// When the initiation is to be sent to the addresses that only got an opener.
    pub fn opening_ends_at(&self) -> Option<Instant> {
        let opening = self.pending.as_ref()?.opening.as_ref()?;
        Some(opening.ends_at)
    }
}

/// The path in use.
#[derive(Debug)]
pub struct Path {
    /// The address to send to.
    pub endpoint: Option<SocketAddr>,
    /// The local address that the peer last sent to.
    pub source: Option<IpAddr>,
    /// The MTU of the path (native).
    pub mtu: PathMtu,
    /// The latest round-trip time of a probe or check (native).
    pub rtt: Option<Duration>,
    /// The least of them: the round trip without queues (native).
    pub least_rtt: Option<Duration>,
    /// The peer's latest report on received datagrams (native), without probes that were lost for
    /// their size.
    pub report: Option<Report>,
    /// Records of this host that the path lost and the peer restored, as it reports.
    pub restored: u64,
    /// Records that it could not restore while parity was sent.
    pub not_restored: u64,
    /// The time for which datagrams wait after they were made.
    pub(crate) wait: Duration,
    /// Whether to use GSO. Cleared when the path breaks GSO batches.
    pub gso: bool,
    /// Statistics of received datagrams (native).
    pub(crate) health: Receiver,
    /// Amount sent, and amount that may be sent.
    pub(crate) outgoing: Outgoing,
    /// The previous endpoint, if it was validated and this one is not yet.
    previous: Option<PreviousEndpoint>,
    /// The address that the unconfirmed response was sent to.
    pub(crate) responded: Option<SocketAddr>,
    /// The path is probed until then. Extended by sending data.
    pub(crate) active_until: Instant,
    /// Datagrams sent since reports were last assessed.
    pub(crate) sent_batches: SentBatches,
    /// Datagrams behind the first of their batch that the peer has reported as received since.
    received_later: u32,
    /// When reports were last assessed.
    assessed: Instant,
    /// Number of consecutive reports without any of these datagrams.
    missed: u8,
}

/// A validated endpoint that the peer has left.
#[derive(Clone, Copy, Debug)]
struct PreviousEndpoint {
    address: SocketAddr,
    /// The local address that the peer sent to.
    source: Option<IpAddr>,
}

impl Path {
    fn new(endpoint: Option<SocketAddr>) -> Path {
        Path {
            endpoint,
            source: None,
            mtu: PathMtu::new(endpoint.is_some_and(|e| e.is_ipv6())),
            rtt: None,
            least_rtt: None,
            report: None,
            restored: 0,
            not_restored: 0,
            wait: Duration::ZERO,
            gso: true,
            health: Receiver::default(),
            outgoing: Outgoing::default(),
            previous: None,
            responded: None,
            active_until: Instant::BOOT,
            sent_batches: SentBatches::default(),
            received_later: 0,
            assessed: Instant::BOOT,
            missed: 0,
        }
    }

    /// Notes the round-trip time of a probe or check.
    pub(crate) fn measured(&mut self, rtt: Duration) {
        self.rtt = Some(rtt);
        self.least_rtt = Some(self.least_rtt.map_or(rtt, |least| least.min(rtt)));
        self.health.set_round_trip(self.least_rtt);
    }

    /// Processes a report of the peer.
    pub(crate) fn reported(&mut self, report: Report, now: Instant) {
        self.received_later = self.received_later.saturating_add(report.received_later);
        // Early reports are too close to each other to show anything about batches.
        if now.duration_since(self.assessed) >= ASSESS_INTERVAL {
            self.assessed = now;
            let received_later = std::mem::take(&mut self.received_later);
            let all = Report {
                received_later,
                ..report
            };
            let sent = std::mem::take(&mut self.sent_batches);
            if all.misses_batches(sent) {
                self.missed += 1;
                self.gso &= self.missed < MANGLED_REPORTS;
            } else if all.arrived_later(sent) > 0 {
                self.missed = 0;
            }
        }
        self.outgoing.repair.reported(&report, now);
        self.restored += u64::from(report.restored);
        self.not_restored += u64::from(report.not_restored);
        self.report = Some(report);
    }

    /// Loss repair of the records that this host sends.
    pub fn repair(&self) -> &repair::Sender {
        &self.outgoing.repair
    }

    /// Whether the peer is known to receive at its endpoint.
    pub fn is_validated(&self) -> bool {
        self.outgoing.validation.is_complete()
    }

    /// Marks the endpoint as validated.
    pub(crate) fn validate(&mut self) {
        self.outgoing.validation = AddressValidation::default();
        self.previous = None;
    }

    /// Follows the peer to the source address of a datagram. Only little is sent there until the
    /// address is validated.
    pub(crate) fn follow(&mut self, endpoint: SocketAddr, source: Option<IpAddr>, now: Instant) {
        if self.endpoint == Some(endpoint) {
            self.source = source;
            return;
        }
        // The peer returns to where it is known to receive (RFC 9000, section 9.3).
        let returns = self.previous.is_some_and(|p| p.address == endpoint);
        if returns && self.go_back() {
            self.source = source;
            return;
        }
        let validated = self.endpoint.filter(|_| self.is_validated());
        let previous = validated.map(|address| PreviousEndpoint {
            address,
            source: self.source,
        });
        let previous = previous.or(self.previous);
        self.move_to(endpoint, source);
        self.outgoing.validation = AddressValidation::required(now);
        self.previous = previous;
    }

    /// Whether [`Self::go_back`] has an endpoint to return to.
    pub(crate) fn may_go_back(&self) -> bool {
        self.previous.is_some() && !self.is_validated()
    }

    /// Returns to the previous endpoint if this one is not validated. Returns false if there is
    /// none.
    pub(crate) fn go_back(&mut self) -> bool {
        let Some(previous) = self.previous.filter(|_| !self.is_validated()) else {
            return false;
        };
        self.move_to(previous.address, previous.source);
        true
    }

    /// Moves to `endpoint`, where the peer is known to be. A new path is measured from scratch.
    pub(crate) fn move_to(&mut self, endpoint: SocketAddr, source: Option<IpAddr>) {
        if self.endpoint != Some(endpoint) {
            let mut health = std::mem::take(&mut self.health);
            health.set_round_trip(None);
            *self = Path {
                outgoing: self.outgoing.moved(),
                responded: self.responded,
                health,
                active_until: self.active_until,
                mtu: self.mtu.moved(endpoint.is_ipv6()),
                restored: self.restored,
                not_restored: self.not_restored,
                ..Path::new(Some(endpoint))
            };
        }
        self.source = source;
    }

    /// The destination for datagrams with this traffic class.
    pub(crate) fn destination(&self, traffic_class: u8) -> Option<Destination> {
        Some(Destination {
            address: self.endpoint?,
            source: self.source,
            traffic_class,
            hop_limit: None,
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
    /// Number of sessions derived so far.
    derived: u64,
}

impl Sessions {
    /// Adds a session derived as initiator, which may be used at once. Returns the local indices of
    /// the sessions that it ends.
    pub fn establish_initiated(&mut self, session: Session) -> [Option<u32>; 2] {
        let session = self.numbered(session);
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
        self.current = Some(session);
        ended
    }

    /// Adds a session derived as responder, which waits for its first datagram. Returns the local
    /// indices of the sessions that it ends.
    pub fn establish_responded(&mut self, session: Session) -> [Option<u32>; 2] {
        let session = self.numbered(session);
        let ended = [index(&self.next), index(&self.previous)];
        self.previous = None;
        self.next = Some(session);
        ended
    }

    /// Numbers a new session. Two may be derived at the same time.
    fn numbered(&mut self, session: Session) -> Box<Session> {
        self.derived += 1;
        let mut session = Box::new(session);
        session.number = self.derived;
        session
    }

    /// Makes `next` the current session, because its first datagram has arrived. Returns the local
    /// index of the session that ends.
    pub fn confirm_next(&mut self) -> Option<u32> {
        let ended = index(&self.previous);
        self.previous = self.current.take();
        self.current = self.next.take();
        ended
    }

    /// Returns the session with this local index, and whether it is the unconfirmed one.
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

    /// Erases all keys. Returns the local indices that become free.
    pub fn clear(&mut self) -> [Option<u32>; 3] {
        let Sessions {
            current,
            previous,
            next,
            derived,
        } = std::mem::take(self);
        self.derived = derived;
        [index(&current), index(&previous), index(&next)]
    }
}

fn index(session: &Option<Box<Session>>) -> Option<u32> {
    session.as_ref().map(|s| s.local_index)
}

/// A read of the TUN device that waits for a session.
#[derive(Debug)]
pub(crate) struct StagedRead {
    pub bytes: Box<[u8]>,
    /// Number of packets in it.
    pub packets: u64,
}

/// Reads of the TUN device that wait for a session. Bounded; the oldest are dropped first.
#[derive(Debug, Default)]
pub(crate) struct StagedPackets {
    reads: VecDeque<StagedRead>,
    bytes: usize,
}

impl StagedPackets {
    /// Adds a read of `packets` packets. Returns the number of packets dropped to make space.
    pub fn push(&mut self, read: &[u8], packets: u64) -> u64 {
        let mut dropped = 0;
        while self.reads.len() >= STAGED_PACKETS || self.bytes + read.len() > STAGED_BYTES {
            match self.reads.pop_front() {
                Some(old) => {
                    self.bytes -= old.bytes.len();
                    dropped += old.packets;
                }
                None => break,
            }
        }
        self.bytes += read.len();
        self.reads.push_back(StagedRead {
            bytes: read.into(),
            packets,
        });
        dropped
    }

    /// Removes the oldest read.
    pub fn pop(&mut self) -> Option<StagedRead> {
        let read = self.reads.pop_front()?;
        self.bytes -= read.bytes.len();
        Some(read)
    }

    /// Maximum size of the oldest read in bytes of UDP payload, in a record of its own.
    /// `usize::MAX` for a super-packet.
    pub fn next_cost(&self) -> usize {
        match self.reads.front() {
            Some(read) if read.packets == 1 => read.bytes.len() + RECORD_OVERHEAD,
            _ => usize::MAX,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.reads.is_empty()
    }
}

impl Peer {
    /// Logs a new session, before it becomes the current one. Renewals have a lower level.
    pub(crate) fn log_session(&self, endpoint: SocketAddr) {
        let peer = &self.public_key;
        if self.sessions.current.is_some() {
            debug!(target: LOG, %peer, %endpoint, "session renewed");
        } else {
            info!(target: LOG, %peer, %endpoint, "session established");
        }
    }

    /// Notes why a handshake was refused, and logs a new reason, at most one in [`REKEY_TIMEOUT`].
    pub(crate) fn refuse(&mut self, reason: String, now: Instant) {
        let logged = self.handshake.logged_refusal.as_ref();
        let may_log = logged.is_none_or(|logged| {
            logged.reason != reason && logged.at.has_expired(REKEY_TIMEOUT, now)
        });
        if may_log {
            warn!(target: LOG, peer = %self.public_key, %reason, "handshake refused");
            let reason = reason.clone();
            self.handshake.logged_refusal = Some(Box::new(LoggedRefusal { at: now, reason }));
        }
        self.refusal = Some(reason);
    }

    /// Notes that a handshake was not refused: the next refusal is logged whatever its reason.
    pub(crate) fn accept(&mut self) {
        self.refusal = None;
        if let Some(logged) = &mut self.handshake.logged_refusal {
            logged.reason.clear();
        }
    }

    pub(crate) fn new(id: PeerId, protocol: Protocol, public_key: PublicKey) -> Peer {
        Peer {
            id,
            public_key,
            preshared_key: PresharedKey::from_bytes([0; 32]),
            path: Path::new(None),
            paths: Paths::default(),
            birthday: Birthday::default(),
            pings: Pings::default(),
            unknown_acks: UnknownAcks::default(),
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
                opens_again_at: Instant::BOOT,
                logged_refusal: None,
            },
            timers: Timers::default(),
            staged: StagedPackets::default(),
            reassembly: Reassembly::default(),
            repair: None,
            has_allowed_ips: false,
            filter: None,
            scheduled: None,
        }
    }

    /// Starts loss repair with parity up to `ceiling` percent, or ends it (`None`), as both ends
    /// agreed. At the end, held segments stay until the tunnel has released them.
    pub(crate) fn set_repair(&mut self, ceiling: Option<u8>, now: Instant) {
        if ceiling.is_some() {
            self.repair.get_or_insert_default().resume();
        } else if !self.repair.as_mut().is_some_and(|repair| repair.end(now)) {
            self.repair = None;
        }
        self.path.health.set_repairs(ceiling.is_some());
        self.path.outgoing.repair.set_ceiling(ceiling);
    }

    /// Whether there is a session that may send at this time.
    pub fn has_session(&self, now: Instant) -> bool {
        let session = self.sessions.current.as_ref();
        session.is_some_and(|session| session.may_send(now))
    }

    /// Whether there is any address to send an initiation to.
    pub fn is_reachable(&self) -> bool {
        self.path.endpoint.is_some() || !self.paths.is_empty()
    }

    /// Number of receiver indices in use: one for each session and for a pending initiation.
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

    /// Since when data or an initiation waits for a response or anything in a session.
    pub fn waiting_since(&self) -> Option<Instant> {
        self.timers.waiting_since()
    }

    /// The persistent keepalive interval, if set.
    pub fn persistent_keepalive(&self) -> Option<Duration> {
        self.timers.persistent_keepalive()
    }

    /// Drops all staged packets.
    pub(crate) fn drop_staged(&mut self, reason: DropReason) {
        while let Some(read) = self.staged.pop() {
            self.counters.outbound.pending -= read.packets;
            self.counters.outbound.drops.add(reason, read.packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::Cipher;
    use crate::noise::Established;

    #[test]
    fn sessions_derived_at_the_same_time_have_an_order() {
        let keys = Established {
            local_index: 1,
            remote_index: 2,
            send: [3; 32].into(),
            receive: [4; 32].into(),
            handshake_hash: [5; 32],
            payload: vec![],
        };
        let session = |initiator| {
            let now = Instant::from_nanos(7);
            Session::new(&keys, Cipher::Aes256Gcm, initiator, now)
        };
        let mut sessions = Sessions::default();
        let number = |session: &Option<Box<Session>>| session.as_ref().map(|s| s.number);
        sessions.establish_initiated(session(true));
        sessions.establish_responded(session(false));
        assert_eq!(number(&sessions.current), Some(1));
        assert_eq!(number(&sessions.next), Some(2));
        // The order goes on when the keys are erased.
        sessions.clear();
        sessions.establish_initiated(session(true));
        assert_eq!(number(&sessions.current), Some(3));
    }

    #[test]
    fn reasons_that_alternate_are_logged_at_a_bounded_rate() {
        let mut peer = Peer::new(PeerId(0), Protocol::Native, PublicKey::from_bytes([1; 32]));
        let at = |seconds| Instant::from_nanos(1 << 40) + Duration::from_secs(seconds);
        let mut logged = Vec::new();
        for (second, reason) in [(0, "a"), (1, "b"), (2, "a"), (5, "b"), (11, "b"), (12, "a")] {
            peer.refuse(reason.into(), at(second));
            let newest = peer.handshake.logged_refusal.as_ref();
            logged.extend(newest.map(|newest| (newest.at, newest.reason.clone())));
            assert_eq!(peer.refusal.as_deref(), Some(reason));
        }
        logged.dedup();
        let expected = [(0, "a"), (5, "b"), (12, "a")];
        assert_eq!(
            logged,
            expected.map(|(second, reason)| (at(second), reason.into()))
        );
    }

    #[test]
    fn a_reason_that_returns_after_an_accepted_handshake_is_logged_again() {
        let mut peer = Peer::new(PeerId(0), Protocol::Native, PublicKey::from_bytes([1; 32]));
        let at = |seconds| Instant::from_nanos(1 << 40) + Duration::from_secs(seconds);
        peer.refuse("a".into(), at(0));
        peer.accept();
        assert_eq!(peer.refusal, None);
        // The first one is too early, the second is not.
        peer.refuse("a".into(), at(4));
        peer.refuse("a".into(), at(6));
        let logged = peer.handshake.logged_refusal.expect("logged");
        assert_eq!((logged.at, logged.reason.as_str()), (at(6), "a"));
    }
}
