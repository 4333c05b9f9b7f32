//! Handshakes: starting them, answering them, and cookies under load.

use super::inbound::{Datagram, note_ready};
use super::{Now, PreviousIdentity, Reachability, RecentHandshakes, Tunnel};
use crate::capabilities::{self, Capabilities, CapabilityError, Cipher};
use crate::constants::*;
use crate::cookie::Admission;
use crate::indices::PeerId;
use crate::mac::verify_mac1;
use crate::noise::{self, HandshakeError, Protocol};
use crate::outbox::{Destination, Outbox, Payload};
use crate::paths::MAX_RELAYS;
use crate::peer::{Opening, Peer, Pending};
use crate::session::Session;
use crate::time::Instant;
use seikan_observe::DropReason;
use std::net::SocketAddr;
use std::time::Duration;

/// Handshake messages with a valid mac1 per second above which cookies are demanded. Each costs
/// several Diffie-Hellman computations, some 200 microseconds. Other messages cost one hash and do
/// not count: otherwise anyone could have cookies demanded of everybody.
const LOAD_THRESHOLD: u32 = 100;
/// Maximum number of peers in [`Tunnel::take_peers_to_call`]; the others follow with their next
/// attempt.
const MAX_PEERS_TO_CALL: usize = 64;
/// Maximum number of candidates that one initiation is sent to, however often they change.
const MAX_COPIES: usize = MAX_CANDIDATES + MAX_RELAYS;
/// DSCP of handshake messages: AF41, as the kernel's (`HANDSHAKE_DSCP` 0x88).
const HANDSHAKE_TRAFFIC_CLASS: u8 = 0x88;

/// Where an initiation is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// The path in use.
    PathInUse,
    /// The path in use and all candidates.
    Everywhere,
    /// The destinations of `Everywhere`, but NATs that the peer is probably behind get an opener
    /// first.
    OpenersFirst,
    /// The destinations of `Everywhere` without these NATs.
    WithoutNats,
}

/// The identity that a handshake message is addressed to.
#[derive(Clone, Copy)]
enum RecipientIdentity {
    /// The identity in use.
    Current,
    /// The identity before the last key rotation.
    Previous,
}

impl Tunnel {
    /// Handles a call-me-maybe: the peer tries to reach this host. Sends an initiation to all
    /// candidates of the peer, which opens this host's NATs for its packets. The peer has opened
    /// its own before the call. At most twice a second.
    pub fn on_call_me_maybe(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        if !peer.timers.may_answer_call(now.mono) {
            return;
        }
        peer.paths.on_call_me_maybe(now.mono);
        let tried = self.initiate(now, id, Scope::Everywhere, outbox);
        if let Some(peer) = self.peer_mut(id).filter(|_| tried) {
            peer.timers.call_answered(now.mono);
            self.reschedule(id, now.mono, now.mono);
        }
    }

    /// Takes the peers whose candidates were all sent an initiation since the last call. It may
    /// help to signal a call-me-maybe to them.
    pub fn take_peers_to_call(&mut self) -> Vec<PeerId> {
        std::mem::take(&mut self.peers_to_call)
    }

    /// Sends an initiation when the timers allow it.
    pub(super) fn initiate_handshake(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return;
        };
        let current = peer.sessions.current.as_ref();
        let lives = current.is_some_and(|session| session.may_send(now.mono));
        let scope = if !lives || peer.paths.is_lost() {
            // Only ports of this host's NAT are taken by what arrives there.
            let pauses = peer.paths.has_nat() && !self.nat_mappings.is_open4();
            let pauses_longer = *self.identity.public() > peer.public_key;
            if !pauses || peer.paths.may_punch(now.mono, pauses_longer) {
                Scope::OpenersFirst
            } else {
                Scope::WithoutNats
            }
        } else if peer.timers.is_retrying() {
            Scope::Everywhere
        } else {
            Scope::PathInUse
        };
        let calls = scope != Scope::PathInUse && !peer.paths.is_empty();
        if calls && self.peers_to_call.len() < MAX_PEERS_TO_CALL {
            self.peers_to_call.push(id);
        }
        let tried = self.initiate(now, id, scope, outbox);
        if let Some(peer) = self.peers[id.0 as usize].as_mut().filter(|_| tried) {
            peer.timers.handshake_initiated(now.mono, &mut *self.rng);
            self.reschedule(id, now.mono, now.mono);
        }
    }

    /// Builds an initiation and sends it. Returns false if there is no address or no free index for
    /// it; it is not repeated then.
    fn initiate(&mut self, now: Now, id: PeerId, scope: Scope, outbox: &mut Outbox) -> bool {
        let ours = self.capabilities();
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return false;
        };
        let payload = match self.protocol {
            Protocol::WireGuard => Vec::new(),
            Protocol::Native => ours.encode(),
        };
        let length = INITIATION_LEN + payload.len();
        if !peer.path.outgoing.validation.allows(length) {
            peer.path.go_back();
        }
        let destinations = initiation_destinations(peer, scope, length);
        if destinations.is_empty() {
            peer.drop_staged(DropReason::NoEndpoint);
            return false;
        }
        if let Some(old) = peer.handshake.pending.take() {
            self.indices.remove(old.initiator.local_index());
        }
        let Ok(index) = self.indices.insert(id, &mut *self.rng) else {
            return false;
        };
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return false;
        };
        let stamp = self.clock.stamp(now.wall);
        let mut message = [0; MAX_HANDSHAKE_LEN];
        let made = noise::Initiation {
            protocol: self.protocol,
            identity: &self.identity,
            remote: &peer.public_key,
            psk: &peer.preshared_key,
            sender_index: index,
            timestamp: stamp,
            payload: &payload,
        }
        .write(&mut *self.rng, &mut message);
        match made {
            Ok((initiator, length)) => {
                peer.handshake
                    .cookie
                    .stamp(&mut message[..length], now.mono);
                let candidates = peer.paths.candidates().iter().map(|c| c.address);
                peer.handshake.pending = Some(Box::new(Pending {
                    initiator,
                    message: message[..length].into(),
                    sent: now.mono,
                    alone: match destinations[..] {
                        [alone] => Some(alone.address),
                        _ => None,
                    },
                    known: candidates.chain(peer.path.endpoint).collect(),
                    new_candidate: false,
                    openers_first: scope != Scope::Everywhere,
                    opening: Opening::of(&destinations, now.mono),
                }));
                peer.counters.handshakes.initiations_sent += 1;
                if scope != Scope::PathInUse {
                    let to: Vec<_> = destinations.iter().map(|to| to.address).collect();
                    peer.paths.on_initiation(&to);
                }
                peer.timers.any_authenticated_packet_sent(now.mono);
                if destinations
                    .iter()
                    .any(|to| Some(to.address) == peer.path.endpoint)
                {
                    peer.path.outgoing.validation.take(length);
                }
                for destination in &destinations {
                    post(outbox, destination, Some(id), &message[..length]);
                }
            }
            // A key of low order: this peer can never be reached.
            Err(error) => {
                peer.refusal = Some(error.to_string());
                self.indices.remove(index);
            }
        }
        true
    }

    /// Repeats the pending initiation to the candidates that were added since. It is the same
    /// message, so either copy may be answered; a new one would void an answer that is already on
    /// its way.
    pub(super) fn initiate_to_new_candidates(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let reached = self.reached(id, now.mono);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let Some(pending) = peer.handshake.pending.as_mut() else {
            return;
        };
        pending.new_candidate = false;
        if reached != Reachability::Unreachable || pending.sent.has_expired(REKEY_TIMEOUT, now.mono)
        {
            return;
        }
        for address in peer.paths.candidates().iter().map(|c| c.address) {
            if !pending.known.contains(&address) && pending.known.len() < MAX_COPIES {
                pending.known.push(address);
                pending.alone = None;
                let mut destination = towards(address);
                if pending.openers_first && peer.paths.is_behind_nat(address) {
                    destination.hop_limit = Some(OPENER_HOPS);
                    let opening = pending.opening.get_or_insert_with(|| Opening {
                        destinations: Vec::new(),
                        ends_at: now.mono + OPENING_TIME,
                    });
                    opening.destinations.push(towards(address));
                }
                post(outbox, &destination, Some(id), &pending.message);
            }
        }
    }

    /// Sends the pending initiation to the NATs that only got an opener, when [`OPENING_TIME`] has
    /// passed. The peer may not have been called, or the opener may have ended before this host's
    /// outermost NAT.
    pub(super) fn initiate_after_opening(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let reached = self.reached(id, now.mono);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let Some(pending) = peer.handshake.pending.as_mut() else {
            return;
        };
        let Some(opening) = pending
            .opening
            .take_if(|opening| opening.ends_at <= now.mono)
        else {
            return;
        };
        if reached != Reachability::Unreachable {
            return;
        }
        let length = pending.message.len();
        for destination in opening.destinations {
            let in_use = Some(destination.address) == peer.path.endpoint;
            if !in_use || peer.path.outgoing.validation.take(length) {
                post(outbox, &destination, Some(id), &pending.message);
            }
        }
    }

    /// Capabilities of this host, for a native handshake.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            version: capabilities::VERSION,
            ciphers: self.ciphers.clone(),
            max_lanes: 1,
            inner_mtu: self
                .inner_mtu
                .clamp(u32::from(capabilities::MIN_INNER_MTU), 65_535)
                as u16,
            features: [
                (self.offload, capabilities::FEATURE_OFFLOAD),
                (self.repair.is_some(), capabilities::FEATURE_REPAIR),
            ]
            .into_iter()
            .filter_map(|(has, feature)| has.then_some(feature))
            .sum(),
            mode: self.mode,
        }
    }

    /// Handles any message that is not data.
    pub(super) fn handshake_message(
        &mut self,
        now: Now,
        message: &[u8],
        from: &Datagram,
        outbox: &mut Outbox,
    ) -> Result<PeerId, DropReason> {
        let kind = message[0];
        let c = self.protocol;
        let reply_to = Destination {
            address: from.source,
            source: from.destination,
            traffic_class: HANDSHAKE_TRAFFIC_CLASS,
            hop_limit: None,
        };
        if kind == c.cookie_reply_type() {
            return self.cookie_reply(now, message);
        }
        if kind != c.initiation_type() && kind != c.response_type() {
            return Err(DropReason::UnknownType);
        }
        self.previous.take_if(|previous| previous.until <= now.mono);
        let for_previous =
            |previous: &&mut PreviousIdentity| verify_mac1(previous.identity.mac1_key(c), message);
        let previous = self.previous.as_mut().filter(for_previous);
        let to = match previous {
            Some(_) => RecipientIdentity::Previous,
            None => RecipientIdentity::Current,
        };
        let super::FloodProtection {
            cookies,
            load,
            recent,
        } = &mut self.flood_protection;
        let cookies = previous.map_or(cookies, |previous| &mut previous.cookies);
        if load.is_on(now.mono) && cookies.reserved().is_stale(now.mono) {
            let live = self
                .peers
                .iter()
                .flatten()
                .filter(|p| p.has_session(now.mono));
            let endpoints = live.filter_map(|peer| peer.path.endpoint);
            cookies.reserved().set(endpoints, now.mono);
        }
        let under_load = || load.observe(busy(recent, now.mono), now.mono);
        match cookies.admit(message, from.source, under_load, now.mono, &mut *self.rng) {
            Admission::Process => {}
            Admission::InvalidMac1 => return Err(DropReason::BadMac1),
            Admission::RateLimited => return Err(DropReason::RateLimited),
            Admission::NeedsCookie => {
                let reply = cookies.create_reply(message, from.source, now.mono, &mut *self.rng);
                if let Some(reply) = reply {
                    post(outbox, &reply_to, None, &reply);
                }
                return Err(DropReason::CookieRequired);
            }
        }
        if kind == c.initiation_type() {
            self.initiation(now, message, to, &reply_to, outbox)
        } else {
            self.response(now, message, from, outbox)
        }
    }

    fn cookie_reply(&mut self, now: Now, message: &[u8]) -> Result<PeerId, DropReason> {
        let receiver = message
            .get(4..8)
            .and_then(|b| b.first_chunk())
            .ok_or(DropReason::Truncated)?;
        let id = *self
            .indices
            .get(u32::from_le_bytes(*receiver))
            .ok_or(DropReason::UnknownIndex)?;
        let peer = self.peers[id.0 as usize]
            .as_mut()
            .ok_or(DropReason::UnknownIndex)?;
        peer.handshake
            .cookie
            .consume_reply(message, now.mono)
            .map_err(|_| DropReason::BadHandshake)?;
        peer.counters.inbound.packets_in += 1;
        peer.counters.received_bytes += message.len() as u64;
        peer.counters.inbound.consumed += 1;
        Ok(id)
    }

    /// Handles an initiation, as the responder.
    fn initiation(
        &mut self,
        now: Now,
        message: &[u8],
        to: RecipientIdentity,
        reply_to: &Destination,
        outbox: &mut Outbox,
    ) -> Result<PeerId, DropReason> {
        let identity = match (to, &self.previous) {
            (RecipientIdentity::Previous, Some(previous)) => &previous.identity,
            _ => &self.identity,
        };
        let received = noise::consume_initiation(self.protocol, identity, message)
            .map_err(|e| drop_reason(&e))?;
        let id = self
            .peer_by_key(&received.remote)
            .ok_or(DropReason::UnknownPeer)?;
        let ours = self.capabilities();
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return Err(DropReason::UnknownPeer);
        };
        // A replay, or a flood by somebody with the peer's key (kernel `noise.c`).
        let replayed = peer
            .handshake
            .last_timestamp
            .is_some_and(|last| received.timestamp <= last);
        let flood = peer.handshake.last_received.is_some_and(|last| {
            now.mono.duration_since(last) < Duration::from_secs(1) / INITIATIONS_PER_SECOND
        });
        if replayed {
            return Err(DropReason::ReplayedHandshake);
        }
        if flood {
            return Err(DropReason::RateLimited);
        }
        // Also of one that is refused below.
        peer.handshake.last_timestamp = Some(received.timestamp);
        peer.handshake.last_received = Some(now.mono);
        let (cipher, payload, agreed) = match self.protocol {
            Protocol::WireGuard => (Cipher::ChaCha20Poly1305, Vec::new(), None),
            Protocol::Native => match answer(&ours, &received.payload) {
                Ok((theirs, choice, cipher)) => {
                    peer.accept();
                    (cipher, choice.encode(), Some(theirs))
                }
                Err(error) => {
                    peer.refuse(error.to_string(), now.mono);
                    return Err(DropReason::UnsupportedCapability);
                }
            },
        };
        let index = self
            .indices
            .insert(id, &mut *self.rng)
            .map_err(|_| DropReason::RateLimited)?;
        peer.counters.handshakes.initiations_received += 1;
        peer.counters.inbound.packets_in += 1;
        peer.counters.received_bytes += message.len() as u64;
        peer.counters.inbound.consumed += 1;
        let mut reply = [0; MAX_HANDSHAKE_LEN];
        let made = received.create_response(
            &peer.preshared_key,
            index,
            &payload,
            &mut *self.rng,
            &mut reply,
        );
        let Ok((established, length)) = made else {
            self.indices.remove(index);
            return Ok(id);
        };
        let mut session = Session::new(&established, cipher, false, now.mono);
        session.agreed = agreed;
        for ended in peer
            .sessions
            .establish_responded(session)
            .into_iter()
            .flatten()
        {
            self.indices.remove(ended);
        }
        let (to, source) = (reply_to.address, reply_to.source);
        match self.protocol {
            Protocol::Native if !peer.paths.is_relay(to) => peer.path.follow(to, source, now.mono),
            _ => peer.path.move_to(to, source),
        }
        peer.path.responded = Some(to);
        let validation = &mut peer.path.outgoing.validation;
        validation.received(message.len(), now.mono);
        // The response is no longer than the initiation that it answers.
        validation.take(length);
        peer.paths.moved();
        peer.timers.any_authenticated_packet_received(now.mono);
        peer.timers.session_derived(now.mono);
        peer.timers.any_authenticated_packet_sent(now.mono);
        peer.handshake.cookie.stamp(&mut reply[..length], now.mono);
        post(outbox, reply_to, Some(id), &reply[..length]);
        // These addresses are known from the peer alone.
        let may_open = peer.handshake.opens_again_at <= now.mono;
        if peer.paths.is_relay(to) && may_open {
            // The peer checks its direct paths as soon as it has the response.
            for opener in openers(peer) {
                peer.handshake.opens_again_at = now.mono + REKEY_TIMEOUT;
                post(outbox, &opener, Some(id), &reply[..length]);
            }
        }
        Ok(id)
    }

    /// Handles a response, as the initiator.
    fn response(
        &mut self,
        now: Now,
        message: &[u8],
        from: &Datagram,
        outbox: &mut Outbox,
    ) -> Result<PeerId, DropReason> {
        let receiver = message
            .get(8..12)
            .and_then(|b| b.first_chunk())
            .ok_or(DropReason::Truncated)?;
        let id = *self
            .indices
            .get(u32::from_le_bytes(*receiver))
            .ok_or(DropReason::UnknownIndex)?;
        let ours = self.capabilities();
        let peer = self.peers[id.0 as usize]
            .as_mut()
            .ok_or(DropReason::UnknownIndex)?;
        let pending = peer
            .handshake
            .pending
            .as_mut()
            .ok_or(DropReason::UnknownIndex)?;
        let established = pending
            .initiator
            .consume_response(message)
            .map_err(|e| drop_reason(&e))?;
        let alone = pending.alone == Some(from.source);
        peer.handshake.pending = None;
        let cipher = match self.protocol {
            Protocol::WireGuard => Some(Cipher::ChaCha20Poly1305),
            Protocol::Native => match accept(&ours, &established.payload) {
                Ok((theirs, cipher)) => {
                    peer.set_repair(self.repair.filter(|_| theirs.repair()), now.mono);
                    note_ready(&mut self.to_release, peer);
                    peer.capabilities = Some(theirs);
                    peer.accept();
                    Some(cipher)
                }
                Err(error) => {
                    peer.refuse(error.to_string(), now.mono);
                    None
                }
            },
        };
        let Some(cipher) = cipher else {
            self.indices.remove(established.local_index);
            return Err(DropReason::UnsupportedCapability);
        };
        let session = Session::new(&established, cipher, true, now.mono);
        peer.log_session(from.source);
        for ended in peer
            .sessions
            .establish_initiated(session)
            .into_iter()
            .flatten()
        {
            self.indices.remove(ended);
        }
        peer.counters.inbound.packets_in += 1;
        peer.counters.received_bytes += message.len() as u64;
        peer.counters.inbound.consumed += 1;
        peer.counters.handshakes.completed += 1;
        peer.last_handshake = Some(now.wall);
        // If the initiation was sent to one address only, the response proves that the peer
        // receives there. If it was sent to several, another one may have arrived.
        if alone || self.protocol == Protocol::WireGuard || peer.paths.is_relay(from.source) {
            peer.path.move_to(from.source, from.destination);
            peer.path.validate();
        } else {
            peer.path.follow(from.source, from.destination, now.mono);
            let validation = &mut peer.path.outgoing.validation;
            validation.received(message.len(), now.mono);
        }
        peer.paths.moved();
        peer.path.active_until = now.mono + KEEPALIVE_TIMEOUT;
        peer.timers.any_authenticated_packet_received(now.mono);
        peer.timers.answered();
        peer.timers.handshake_complete();
        peer.timers.session_derived(now.mono);
        // The responder may not send before it has received data (whitepaper 5.1).
        if peer.staged.is_empty() || !peer.path.is_validated() {
            self.send_keepalive(now, id, outbox);
        }
        Ok(id)
    }
}

/// The addresses that an initiation is sent to. The peer answers the first copy that arrives, over
/// the same path; the others are replays to it. If both peers do so at once, they open the NATs
/// between them.
///
/// A lost endpoint is left out at first: the peer might answer the copy that arrives there, over a
/// path on which nothing returns. So is an unvalidated endpoint without enough credit.
fn initiation_destinations(peer: &Peer, scope: Scope, length: usize) -> Vec<Destination> {
    let mut all: Vec<Destination> = Vec::new();
    if scope != Scope::PathInUse {
        let candidates = peer.paths.candidates().iter().map(|c| c.address);
        let others = candidates.filter(|address| Some(*address) != peer.path.endpoint);
        all.extend(others.map(towards));
    }
    let behind_nat = |to: &Destination| peer.paths.is_behind_nat(to.address);
    if scope == Scope::WithoutNats {
        all.retain(|to| !behind_nat(to));
    }
    let left_out = peer.paths.leaves_out_lost() && !all.is_empty();
    if let Some(known) = peer
        .path
        .destination(HANDSHAKE_TRAFFIC_CLASS)
        .filter(|_| !left_out && peer.path.outgoing.validation.allows(length))
    {
        all.insert(0, known);
    }
    match scope {
        Scope::PathInUse | Scope::Everywhere => {}
        Scope::OpenersFirst => {
            for destination in all.iter_mut().filter(|to| behind_nat(to)) {
                destination.hop_limit = Some(OPENER_HOPS);
            }
        }
        Scope::WithoutNats => all.retain(|to| !behind_nat(to)),
    }
    all
}

/// Openers towards all NATs that the peer is probably behind.
fn openers(peer: &Peer) -> Vec<Destination> {
    let addresses = peer.paths.candidates().iter().map(|c| c.address);
    let behind_nat = addresses.filter(|address| peer.paths.is_behind_nat(*address));
    let opener = |address| Destination {
        hop_limit: Some(OPENER_HOPS),
        ..towards(address)
    };
    behind_nat.map(opener).collect()
}

impl Opening {
    /// Returns the subset of `destinations` that gets an opener.
    fn of(destinations: &[Destination], now: Instant) -> Option<Opening> {
        let openers = destinations.iter().filter(|to| to.hop_limit.is_some());
        let whole = openers.map(|to| Destination {
            hop_limit: None,
            ..*to
        });
        let destinations: Vec<_> = whole.collect();
        (!destinations.is_empty()).then_some(Opening {
            destinations,
            ends_at: now + OPENING_TIME,
        })
    }
}

/// The destination for an address without a known local address.
fn towards(address: SocketAddr) -> Destination {
    Destination {
        address,
        source: None,
        traffic_class: HANDSHAKE_TRAFFIC_CLASS,
        hop_limit: None,
    }
}

/// The responder's side of the negotiation.
fn answer(
    ours: &Capabilities,
    offer: &[u8],
) -> Result<(Capabilities, Capabilities, Cipher), CapabilityError> {
    let theirs = Capabilities::parse(offer)?;
    let (choice, agreed) = ours.choose(&theirs)?;
    Ok((theirs, choice, agreed.cipher))
}

/// The initiator's side of the negotiation.
fn accept(ours: &Capabilities, choice: &[u8]) -> Result<(Capabilities, Cipher), CapabilityError> {
    let theirs = Capabilities::parse(choice)?;
    let agreed = ours.accept(&theirs)?;
    Ok((theirs, agreed.cipher))
}

/// Counts a handshake message. Returns whether there are too many in this second.
fn busy(recent: &mut RecentHandshakes, now: Instant) -> bool {
    if now.duration_since(recent.since) >= Duration::from_secs(1) {
        *recent = RecentHandshakes {
            since: now,
            count: 0,
        };
    }
    recent.count = recent.count.saturating_add(1);
    recent.count > LOAD_THRESHOLD
}

/// Queues a message that is not data. If the outbox is full the message is lost, as on any network,
/// and the timers repeat it.
fn post(outbox: &mut Outbox, to: &Destination, peer: Option<PeerId>, message: &[u8]) {
    if let Some(mut slot) = outbox.reserve(message.len()) {
        slot.bytes().copy_from_slice(message);
        slot.commit(message.len(), to, peer, Payload::default());
    }
}

fn drop_reason(error: &HandshakeError) -> DropReason {
    match error {
        HandshakeError::Length { .. } => DropReason::Truncated,
        HandshakeError::UnexpectedType { .. } | HandshakeError::SenderIndex { .. } => {
            DropReason::UnknownType
        }
        HandshakeError::Mac1 => DropReason::BadMac1,
        HandshakeError::ReceiverIndex { .. } => DropReason::UnknownIndex,
        _ => DropReason::BadHandshake,
    }
}
