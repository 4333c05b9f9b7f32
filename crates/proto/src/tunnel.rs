//! A tunnel: one identity, its peers, and the drive contract that the daemon and the simulation
//! share.
//!
//! # Drive contract
//!
//! A tunnel performs no I/O and reads no clock. Its driver repeats:
//!
//! 1. [`Tunnel::outbound`] with a batch of reads of the TUN device;
//! 2. [`Tunnel::inbound`] with a batch of received datagrams and the arena they lie in;
//! 3. [`Tunnel::poll`] when [`Tunnel::next_wakeup`] has come, again while it says there is more;
//! 4. [`Tunnel::release`] after 2 and 3, again while it says there is more;
//! 5. after each of these: sends the [`Outbox`]'s runs and reports each by [`Tunnel::sent`], writes
//!    the [`Inbox`](crate::inbox::Inbox)'s writes and reports each by [`Tunnel::delivered`], clears
//!    both. Runs that it sends later are reported by [`Tunnel::queued`] and [`Tunnel::dequeued`].
//!
//! Equal calls with equal arguments and the same random source return equal bytes.

mod birthday;
mod handshake;
mod housekeeping;
mod inbound;
mod outbound;

pub use inbound::Datagram;
pub(crate) use outbound::clamp_syn;

use crate::allowed_ips::{AllowedIps, LookupCache};
use crate::birthday::{NatMappings, Punch};
use crate::capabilities::Cipher;
use crate::constants::{REJECT_AFTER_TIME, REKEY_AFTER_TIME};
use crate::cookie::{CookieChecker, CookieJar};
use crate::filter::{Filters, StatefulFilter};
use crate::inbox::Write;
use crate::indices::{IndexTable, PeerId};
use crate::keys::{Identity, PresharedKey, PrivateKey, PublicKey};
use crate::mac_table::MacTable;
use crate::mode::Mode;
use crate::native::health::SentBatches;
use crate::noise::Protocol;
use crate::outbox::{Outbox, Payload, Run};
use crate::peer::{Peer, PeerTable};
use crate::rate_limiter::LoadMeter;
use crate::rng::{BufferedRng, Rng};
use crate::tai64n::Tai64nClock;
use crate::time::Instant;
use ipnet::IpNet;
use seikan_observe::{DirectionCounters, DropReason, PeerCounters, Stopped};
use seikan_wire::ethernet::Mac;
use seikan_wire::ip;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Maximum number of sessions and pending handshakes. Each peer needs at most four indices.
const MAX_INDICES: usize = 1 << 20;

/// The time, as read by the driver.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Time since boot, including suspended time.
    pub mono: Instant,
    /// Time since the Unix epoch; used only for handshake timestamps.
    pub wall: Duration,
}

/// How a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reachability {
    /// There is no session that may send, or no answers arrive.
    Unreachable,
    /// The peer is reached over a relay, in at least one direction.
    Relayed,
    /// Directly in both directions, as far as this end knows.
    Direct,
}

/// Parameters of a new tunnel.
pub struct TunnelConfig {
    /// WireGuard or native.
    pub protocol: Protocol,
    /// Packets of a TUN device, or frames of a TAP device (native only).
    pub mode: Mode,
    /// Static private key of this host.
    pub private_key: PrivateKey,
    /// MTU of the TUN device in bytes.
    pub inner_mtu: u32,
    /// Whether the TUN device takes super-packets and partial checksums.
    pub offload: bool,
    /// AEADs in order of preference (native).
    pub ciphers: Vec<Cipher>,
    /// Copy the DSCP of the inner packet to the outer header (RFC 2983, uniform model), which
    /// reveals the kind of traffic to the path. Otherwise data has DSCP 0 (pipe model).
    pub copy_dscp: bool,
    /// Loss repair: the most bytes of parity, in percent of all others; `None`: no repair (native).
    pub repair: Option<u8>,
    /// Random source.
    pub rng: Box<dyn Rng + Send>,
}

/// One tunnel: an identity and its peers.
pub struct Tunnel {
    protocol: Protocol,
    mode: Mode,
    identity: Identity,
    previous: Option<PreviousIdentity>,
    inner_mtu: u32,
    offload: bool,
    ciphers: Vec<Cipher>,
    /// Bits of the inner packet's traffic class that are copied to the outer header.
    class_mask: u8,
    /// See [`TunnelConfig::repair`].
    repair: Option<u8>,
    peers: PeerTable,
    by_key: BTreeMap<PublicKey, PeerId>,
    allowed_ips: AllowedIps,
    mac_table: MacTable,
    indices: IndexTable<PeerId>,
    flood_protection: FloodProtection,
    clock: Tai64nClock,
    rng: Box<dyn Rng + Send>,
    /// Wake-up queue; at most one entry for each peer ([`Peer::scheduled`]).
    wakeups: BTreeSet<(Instant, PeerId)>,
    scratch: Scratch,
    /// See [`Tunnel::take_peers_to_call`].
    peers_to_call: Vec<PeerId>,
    /// Number of pings so far, which is the number of the latest.
    pings_sent: u64,
    /// Mapping behaviour of this host's NATs.
    nat_mappings: NatMappings,
    /// See [`Tunnel::take_punches`]; at most one for each peer.
    punches: Vec<Punch>,
    /// See [`Tunnel::take_removed_peers`].
    removed_peers: Vec<PeerId>,
    searches: birthday::Searches,
    /// Peers with records to process that were restored or held back.
    to_release: Vec<PeerId>,
    /// Counts without a peer, and counts of removed peers.
    unattributed: PeerCounters,
    rejected: u64,
}

/// The identity before the last key rotation, for peers that do not know the new key yet.
struct PreviousIdentity {
    identity: Identity,
    cookies: CookieChecker,
    /// When it expires.
    until: Instant,
}

/// Protection against floods of handshakes.
struct FloodProtection {
    cookies: CookieChecker,
    load: LoadMeter,
    recent: RecentHandshakes,
}

/// Handshake messages with a valid mac1 in the current second.
struct RecentHandshakes {
    /// Start of the second.
    since: Instant,
    count: u32,
}

/// Buffers kept between batches, so that a batch allocates nothing.
#[derive(Default)]
struct Scratch {
    routed: Vec<(PeerId, u32)>,
    touched: Vec<PeerId>,
    source: LookupCache,
    destination: LookupCache,
    /// Random bytes for the data timers, which restart on almost every reply.
    jitter: BufferedRng,
}

impl Tunnel {
    /// Creates a tunnel without peers.
    pub fn new(config: TunnelConfig) -> Tunnel {
        let identity = Identity::new(config.private_key);
        Tunnel {
            protocol: config.protocol,
            mode: config.mode,
            flood_protection: FloodProtection::new(config.protocol, &identity),
            identity,
            previous: None,
            inner_mtu: config.inner_mtu,
            offload: config.offload,
            ciphers: config.ciphers,
            class_mask: if config.copy_dscp { 0xff } else { ip::ECN_CE },
            repair: config.repair,
            peers: PeerTable::default(),
            by_key: BTreeMap::new(),
            allowed_ips: AllowedIps::default(),
            mac_table: MacTable::default(),
            indices: IndexTable::new(MAX_INDICES, config.protocol.max_index()),
            clock: Tai64nClock::default(),
            rng: config.rng,
            wakeups: BTreeSet::new(),
            scratch: Scratch::default(),
            peers_to_call: Vec::new(),
            pings_sent: 0,
            nat_mappings: NatMappings::default(),
            punches: Vec::new(),
            removed_peers: Vec::new(),
            searches: birthday::Searches::default(),
            to_release: Vec::new(),
            unattributed: PeerCounters::default(),
            rejected: 0,
        }
    }

    /// The protocol of this tunnel.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Content of this tunnel: IP packets or Ethernet frames.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Sets the MAC address of the TAP device, which no peer may use.
    pub fn set_own_mac(&mut self, mac: Mac) {
        self.mac_table.set_own(mac);
    }

    /// Number of MAC addresses learned from peers.
    pub fn learned_macs(&self) -> usize {
        self.mac_table.len()
    }

    /// The key pair of this host.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Changes the identity and ends every session and pending handshake. A peer with the new key
    /// is removed, because a host is not its own peer.
    pub fn set_private_key(&mut self, private_key: PrivateKey) {
        self.identity = Identity::new(private_key);
        self.flood_protection = FloodProtection::new(self.protocol, &self.identity);
        self.previous = None;
        if let Some(own) = self.peer_by_key(self.identity.public()) {
            self.remove_peer(own);
        }
        self.end_sessions();
    }

    /// Changes the identity and keeps every session. A session ends when a handshake under the new
    /// key replaces it, or when it expires. Peers that do not know the new key are answered under
    /// the previous one for [`REJECT_AFTER_TIME`].
    pub fn rotate_private_key(&mut self, private_key: PrivateKey, now: Instant) {
        let identity = Identity::new(private_key);
        if identity.public() == self.identity.public() {
            return;
        }
        if let Some(own) = self.peer_by_key(identity.public()) {
            self.remove_peer(own);
        }
        let cookies = CookieChecker::new(self.protocol, &identity);
        self.previous = Some(PreviousIdentity {
            identity: std::mem::replace(&mut self.identity, identity),
            cookies: std::mem::replace(&mut self.flood_protection.cookies, cookies),
            until: now + REJECT_AFTER_TIME,
        });
    }

    /// Changes the key of a peer and keeps its sessions until a handshake under the new key
    /// replaces them. Returns false if there is no such peer, or if the key belongs to another peer
    /// or to this host.
    pub fn rotate_peer_key(&mut self, id: PeerId, key: PublicKey) -> bool {
        if key == *self.identity.public() || self.by_key.contains_key(&key) {
            return false;
        }
        let protocol = self.protocol;
        let Some(peer) = self.peer_mut(id) else {
            return false;
        };
        let previous = std::mem::replace(&mut peer.public_key, key);
        peer.handshake.cookie = CookieJar::new(protocol, &key);
        // State that depends on the previous key is void: the last timestamp, and a pending
        // initiation to it.
        peer.handshake.last_timestamp = None;
        if let Some(pending) = peer.handshake.pending.take() {
            self.indices.remove(pending.initiator.local_index());
        }
        self.by_key.remove(&previous);
        self.by_key.insert(key, id);
        true
    }

    /// Starts a handshake with a peer if there is a session to replace.
    pub fn renew(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let wanted = self
            .peer_mut(id)
            .is_some_and(|p| p.has_session(now.mono) && p.timers.want_handshake(now.mono));
        if wanted {
            self.initiate_handshake(now, id, outbox);
            self.reschedule(id, now.mono, now.mono);
        }
    }

    /// Ends every session and pending handshake. The next initiation is not delayed.
    pub fn end_sessions(&mut self) {
        for id in self.by_key.values().copied().collect::<Vec<_>>() {
            self.forget_sessions(id);
            if let Some(peer) = self.peer_mut(id) {
                peer.timers.forget_initiation();
            }
        }
    }

    /// Ends every session as [`Self::end_sessions`] does, and drops the packets that wait: another host
    /// is active in place of this one.
    pub fn stand_by(&mut self) {
        self.end_sessions();
        for peer in self.peers.iter_mut().flatten() {
            peer.drop_staged(DropReason::Standby);
            inbound::drop_held(peer, self.mode, DropReason::Standby);
            let open = std::mem::take(&mut peer.reassembly).pending() as u64;
            peer.counters.inbound.pending -= open;
            peer.counters.inbound.drops.add(DropReason::Standby, open);
        }
    }

    /// Starts a handshake with every peer that has an endpoint, so that they learn this host's new
    /// identity and address.
    pub fn greet(&mut self, now: Now, outbox: &mut Outbox) {
        for id in self.by_key.values().copied().collect::<Vec<_>>() {
            let wanted = self
                .peer_mut(id)
                .is_some_and(|p| p.is_reachable() && p.timers.want_handshake(now.mono));
            if wanted && outbox.remaining() > crate::batch::MAX_READ {
                self.initiate_handshake(now, id, outbox);
                self.reschedule(id, now.mono, now.mono);
            }
        }
    }

    /// Starts a handshake with a peer that had a session with this host's last process. Otherwise the peer would send into that
    /// session until it notices that nothing comes back (`KEEPALIVE_TIMEOUT + REKEY_TIMEOUT`). `endpoint` is its address at
    /// that time, for a peer without another. Does nothing if there is a session already, or no address.
    pub fn resume(&mut self, now: Instant, id: PeerId, endpoint: Option<SocketAddr>) {
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        if peer.path.endpoint.is_none()
            && let Some(endpoint) = endpoint
        {
            peer.path.move_to(endpoint, None);
        }
        if peer.is_reachable() && !peer.has_session(now) {
            peer.timers.resume(now);
            self.reschedule(id, now, now);
        }
    }

    /// Returns the MTU of the TUN device.
    pub fn inner_mtu(&self) -> u32 {
        self.inner_mtu
    }

    /// Sets the MTU of the TUN device after a change.
    pub fn set_inner_mtu(&mut self, mtu: u32) {
        self.inner_mtu = mtu;
    }

    /// Returns all peers, ordered by key.
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.by_key.values().filter_map(|id| self.peer(*id))
    }

    /// Returns the peer with this number.
    pub fn peer(&self, id: PeerId) -> Option<&Peer> {
        self.peers.get(id.0 as usize)?.as_ref()
    }

    /// Returns the number of the peer with this key.
    pub fn peer_by_key(&self, key: &PublicKey) -> Option<PeerId> {
        self.by_key.get(key).copied()
    }

    /// Returns the prefixes of a peer.
    pub fn allowed_ips(&self, peer: PeerId) -> impl Iterator<Item = IpNet> {
        self.allowed_ips.iter_peer(peer)
    }

    /// Adds a peer, or returns the existing one with this key. Returns `None` for this host's own
    /// key.
    pub fn add_peer(&mut self, key: PublicKey) -> Option<PeerId> {
        if key == *self.identity.public() {
            return None;
        }
        if let Some(id) = self.peer_by_key(&key) {
            return Some(id);
        }
        let protocol = self.protocol;
        let id = self.peers.insert(|id| Peer::new(id, protocol, key))?;
        self.by_key.insert(key, id);
        self.mac_table.set_learns(self.by_key.len() > 1);
        Some(id)
    }

    /// Removes a peer and all its state. Its counts stay in the totals.
    pub fn remove_peer(&mut self, id: PeerId) {
        self.forget_sessions(id);
        let Some(mut peer) = self.peers.remove(id) else {
            return;
        };
        if let Some(at) = peer.scheduled {
            self.wakeups.remove(&(at, id));
        }
        peer.drop_staged(DropReason::PeerRemoved);
        inbound::drop_held(&mut peer, self.mode, DropReason::PeerRemoved);
        // Outbound packets are still pending if they are in the driver's queue.
        for direction in [&mut peer.counters.outbound, &mut peer.counters.inbound] {
            let pending = std::mem::take(&mut direction.pending);
            direction.drops.add(DropReason::PeerRemoved, pending);
        }
        self.removed_peers.push(id);
        self.unattributed.add(&peer.counters);
        self.by_key.remove(&peer.public_key);
        self.allowed_ips.remove_peer(id);
        self.mac_table.remove_peer(id);
        self.mac_table.set_learns(self.by_key.len() > 1);
        self.punches.retain(|punch| punch.peer != id);
    }

    /// Sets the preshared key; all zero means none. It takes effect with the next handshake.
    pub fn set_preshared_key(&mut self, id: PeerId, key: PresharedKey) {
        if let Some(peer) = self.peer_mut(id) {
            peer.preshared_key = key;
        }
    }

    /// Sets the time for which datagrams to a peer wait after they were made. The peer must not take it for the delay of
    /// a queue on the path, so records state when they leave.
    pub fn set_wait(&mut self, id: PeerId, wait: Duration) {
        if let Some(peer) = self.peer_mut(id) {
            peer.path.wait = wait;
        }
    }

    /// Sets the endpoint of a peer.
    pub fn set_endpoint(&mut self, id: PeerId, endpoint: SocketAddr) {
        if let Some(peer) = self.peer_mut(id) {
            peer.path.move_to(endpoint, None);
        }
    }

    /// Sets the signalled candidates of a peer, best first
    /// ([`Paths::set_signalled`](crate::paths::Paths::set_signalled)).
    pub fn set_candidates(&mut self, id: PeerId, candidates: &[SocketAddr], now: Instant) {
        if let Some(peer) = self.peer_mut(id)
            && peer.paths.set_signalled(candidates)
        {
            peer.birthday.on_nat_change(now);
            peer.handshake.mark_new_candidate();
        }
        self.reschedule(id, now, now);
    }

    /// Sets the relays of a peer ([`Paths::set_relays`](crate::paths::Paths::set_relays)).
    pub fn set_relays(&mut self, id: PeerId, relays: &[SocketAddr]) {
        if let Some(peer) = self.peer_mut(id)
            && peer.paths.set_relays(relays, peer.path.endpoint)
        {
            peer.handshake.mark_new_candidate();
            self.reschedule(id, Instant::BOOT, Instant::BOOT);
        }
    }

    /// Returns how the peer is reached at this time.
    pub fn reached(&self, id: PeerId, now: Instant) -> Reachability {
        let Some(peer) = self.peer(id) else {
            return Reachability::Unreachable;
        };
        let session = peer.sessions.current.as_ref();
        let lives = session.is_some_and(|session| {
            session.may_send(now) && !peer.paths.call_received_since(session.created)
        });
        let relay = |endpoint| peer.paths.is_relay(endpoint);
        if !lives || peer.paths.is_lost() {
            Reachability::Unreachable
        } else if peer.path.endpoint.is_some_and(relay)
            || peer.paths.received_by_relay_within(REKEY_AFTER_TIME, now)
        {
            Reachability::Relayed
        } else {
            Reachability::Direct
        }
    }

    /// Returns the peer that packets to `address` are routed to.
    pub fn peer_at(&self, address: IpAddr) -> Option<PeerId> {
        self.allowed_ips.lookup(address)
    }

    /// Sets the services that a peer, or a device behind it, may use here, and at which addresses.
    /// Without a call it may send anything to any address. TCP connections to these addresses
    /// continue. If the peer was unrestricted before, UDP replies to this host pass once this host
    /// sends again.
    pub fn set_filter(&mut self, id: PeerId, filters: Filters) {
        if let Some(peer) = self.peer_mut(id) {
            peer.filter = StatefulFilter::set(peer.filter.take(), filters);
        }
    }

    /// Sets the persistent keepalive interval; zero turns it off.
    pub fn set_persistent_keepalive(&mut self, id: PeerId, interval: Duration, now: Instant) {
        if let Some(peer) = self.peer_mut(id) {
            peer.timers.set_persistent_keepalive(Some(interval), now);
        }
        self.reschedule(id, now, now);
    }

    /// Assigns a prefix to a peer. A previous owner loses it.
    pub fn add_allowed_ip(&mut self, id: PeerId, prefix: IpNet) {
        self.allowed_ips.insert(prefix, id);
        if let Some(peer) = self.peer_mut(id) {
            peer.has_allowed_ips = true;
        }
    }

    /// Removes a prefix from a peer, if the peer owns it. In Ethernet mode a peer that once had a
    /// prefix and has none left may send no IP packets.
    pub fn remove_allowed_ip(&mut self, id: PeerId, prefix: IpNet) {
        self.allowed_ips.remove(prefix, id);
    }

    /// Removes all prefixes of a peer; see [`Self::remove_allowed_ip`].
    pub fn clear_allowed_ips(&mut self, id: PeerId) {
        self.allowed_ips.remove_peer(id);
    }

    /// The sum over all peers, including removed ones, and of counts without a peer.
    pub fn totals(&self) -> PeerCounters {
        let mut sum = self.unattributed.clone();
        for peer in self.peers.iter().flatten() {
            sum.add(&peer.counters);
        }
        sum
    }

    /// Number of received datagrams that were of no peer: not authentic, replayed, or malformed.
    pub fn rejected(&self) -> u64 {
        self.rejected
    }

    /// Number of receiver indices in use: one for each session and each pending initiation, so at
    /// most four for each peer.
    pub fn indices_in_use(&self) -> usize {
        self.indices.len()
    }

    /// Reports that a run is in the driver's queue. [`Self::dequeued`] ends that.
    pub fn queued(&mut self, run: &Run) {
        if let Some(peer) = run.peer.and_then(|id| self.peer_mut(id)) {
            peer.counters.outbound.pending += run.payload.packets;
        }
    }

    /// Reports that a part of a run has left the driver's queue; [`Self::sent`] follows.
    pub fn dequeued(&mut self, part: &Run) {
        if let Some(peer) = part.peer.and_then(|id| self.peer_mut(id)) {
            peer.counters.outbound.pending -= part.payload.packets;
        }
    }

    /// Returns the peers that were removed since the last call. The driver discards their runs
    /// from its queue without a report.
    pub fn take_removed_peers(&mut self) -> Vec<PeerId> {
        std::mem::take(&mut self.removed_peers)
    }

    /// Reports the result of sending a run: `Ok`, or the number of datagrams that were sent before the
    /// kernel refused the next, and why.
    pub fn sent(&mut self, run: &Run, result: Result<(), Stopped>) {
        let peer = run
            .peer
            .and_then(|id| self.peers.get_mut(id.0 as usize)?.as_mut());
        let reason = result.err().map(|stopped| stopped.reason);
        let mut is_due = reason == Some(DropReason::SendTooLarge);
        let mut nobody = SentBatches::default();
        let (counters, batches) = match peer {
            Some(peer) => {
                let address = run.destination.address;
                // A run that was in the driver's queue may be for an endpoint that the peer has left.
                let in_use = peer.path.endpoint == Some(address);
                match reason {
                    Some(DropReason::SendTooLarge) if in_use => {
                        peer.path.mtu.too_large(run.segment_size)
                    }
                    Some(DropReason::SendRefused) => {
                        is_due |= peer.paths.refused(address, peer.path.endpoint);
                    }
                    None if in_use => peer.paths.accepted(),
                    _ => {}
                }
                let batches = if in_use {
                    &mut peer.path.sent_batches
                } else {
                    &mut nobody
                };
                (&mut peer.counters, batches)
            }
            None => (&mut self.unattributed, &mut nobody),
        };
        let segments = run.segments as u64;
        let sent = result.map_or_else(|stopped| stopped.done.min(segments), |()| segments);
        counters.sent_bytes += (sent * run.segment_size as u64).min(run.range.len() as u64);
        batches.add(run.first, sent);
        let Payload { packets, bytes } = run.payload;
        // A run does not know which of its datagrams carry which packets.
        let part = |stopped| Stopped {
            done: packets * sent / segments.max(1),
            ..stopped
        };
        counters
            .outbound
            .leave(packets, bytes, result.map_err(part));
        if is_due && let Some(id) = run.peer {
            // The search for a smaller size, or for another path, continues at once.
            self.reschedule(id, Instant::BOOT, Instant::BOOT);
        }
    }

    /// Reports the result of a write to the TUN device: `Ok`, or the number of packets that were written
    /// before the device refused the next, and why.
    pub fn delivered(&mut self, write: &Write, result: Result<(), Stopped>) {
        self.inbound_of(write.peer)
            .leave(write.packets, write.bytes, result);
    }

    /// Counts received datagrams that are dropped before they reach [`Self::inbound`].
    pub fn drop_datagrams(&mut self, reason: DropReason, datagrams: u64) {
        self.rejected += datagrams;
        self.unattributed.inbound.packets_in += datagrams;
        self.unattributed.inbound.drops.add(reason, datagrams);
    }

    fn inbound_of(&mut self, id: PeerId) -> &mut DirectionCounters {
        match self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) {
            Some(peer) => &mut peer.counters.inbound,
            None => &mut self.unattributed.inbound,
        }
    }

    fn peer_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.peers.get_mut(id.0 as usize)?.as_mut()
    }

    fn forget_sessions(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let pending = peer.handshake.pending.take();
        let pending = pending.map(|pending| pending.initiator.local_index());
        for index in peer.sessions.clear().into_iter().flatten().chain(pending) {
            self.indices.remove(index);
        }
    }
}

impl FloodProtection {
    fn new(protocol: Protocol, identity: &Identity) -> FloodProtection {
        FloodProtection {
            cookies: CookieChecker::new(protocol, identity),
            load: LoadMeter::default(),
            recent: RecentHandshakes {
                since: Instant::BOOT,
                count: 0,
            },
        }
    }
}
