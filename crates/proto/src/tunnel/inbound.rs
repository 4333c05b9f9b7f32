//! From the network to the TUN device: find the session, decrypt in place, check, deliver.

use super::outbound::{Sending, clamp_syn};
use super::{Now, Tunnel};
use crate::allowed_ips::{AllowedIps, LookupCache};
use crate::constants::*;
use crate::filter::StatefulFilter;
use crate::inbox::{Inbox, Packet};
use crate::indices::PeerId;
use crate::mac_table::MacTable;
use crate::mode::{Carried, Ethernet, Ip, Mode};
use crate::native::check::Check;
use crate::native::frame::{self, Frame, Frames};
use crate::native::path_mtu;
use crate::native::reassembly::{Outcome, Reassembled, Record};
use crate::native::record::RecordWriter;
use crate::native::repair::flows::Segment;
use crate::native::repair::receiver::{Part, Ready, Selection};
use crate::native::repair::verdict::Verdict;
use crate::native::repair::{self, parity};
use crate::native::stamp::{RECORD_OVERHEAD, STAMP_LEN, Stamp};
use crate::noise::Protocol;
use crate::outbox::Outbox;
use crate::paths::CheckOutcome;
use crate::peer::{LOG, Peer};
use crate::session::Session;
use crate::time::Instant;
use seikan_observe::DropReason;
use seikan_wire::ethernet::Mac;
use seikan_wire::ip::{self, IpPacket, PROTO_TCP};
use seikan_wire::message::{DataHeader, RecordHeader, TAG_LEN};
use seikan_wire::tcp;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use tracing::{debug, info};

/// The result of one receive call: one datagram, or several of the same size that GRO merged.
#[derive(Clone, Debug)]
pub struct Datagram {
    /// The sender's address.
    pub source: SocketAddr,
    /// The local address that it was sent to.
    pub destination: Option<IpAddr>,
    /// DSCP and ECN byte of the outer header.
    pub traffic_class: u8,
    /// Position in the arena.
    pub range: Range<usize>,
    /// Size of each datagram except the last one.
    pub segment_size: usize,
    /// The receive buffer was too small, so the end is missing.
    pub truncated: bool,
}

/// One datagram of a receive call.
struct Arrival<'a> {
    from: &'a Datagram,
    range: Range<usize>,
}

/// Memory that the handling of received datagrams works on.
struct Buffers<'a> {
    /// The datagrams.
    arena: &'a mut [u8],
    /// Packets for the TUN device.
    inbox: &'a mut Inbox,
    /// Answers to the peers.
    outbox: &'a mut Outbox,
}

impl Arrival<'_> {
    /// The ECN field of the outer header.
    fn ecn(&self) -> u8 {
        self.from.traffic_class & 3
    }
}

impl Tunnel {
    /// Processes received datagrams. Their bytes lie in `arena`, where they are decrypted in place.
    /// Packets are added to `inbox`, answers to `outbox`.
    pub fn inbound(
        &mut self,
        now: Now,
        datagrams: impl Iterator<Item = Datagram>,
        arena: &mut [u8],
        inbox: &mut Inbox,
        outbox: &mut Outbox,
    ) {
        let mut touched = std::mem::take(&mut self.scratch.touched);
        let mut buffers = Buffers {
            arena,
            inbox,
            outbox,
        };
        for datagram in datagrams {
            let size = datagram.segment_size.max(1);
            if datagram.range.is_empty() {
                self.drop_datagrams(DropReason::Truncated, 1);
            }
            for start in datagram.range.clone().step_by(size) {
                let range = start..(start + size).min(datagram.range.end);
                let arrival = Arrival {
                    from: &datagram,
                    range,
                };
                match self.datagram(now, &arrival, &mut buffers) {
                    Ok(id) if touched.last() != Some(&id) => touched.push(id),
                    Ok(_) => {}
                    Err(reason) => self.drop_datagrams(reason, 1),
                }
            }
        }
        buffers.inbox.finish(buffers.arena);
        touched.sort_unstable();
        touched.dedup();
        for id in touched.drain(..) {
            self.reschedule(id, now.mono, now.mono);
        }
        self.scratch.touched = touched;
    }

    /// Processes one datagram. Returns an error for datagrams that belong to no peer.
    fn datagram(
        &mut self,
        now: Now,
        arrival: &Arrival<'_>,
        buffers: &mut Buffers<'_>,
    ) -> Result<PeerId, DropReason> {
        if arrival.from.truncated {
            return Err(DropReason::Truncated);
        }
        let bytes = &mut buffers.arena[arrival.range.clone()];
        let kind = *bytes.first().ok_or(DropReason::Truncated)?;
        if kind != self.protocol.data_type() {
            return self.handshake_message(now, bytes, arrival.from, buffers.outbox);
        }
        let (index, sent) = match self.protocol {
            Protocol::WireGuard => DataHeader::read(bytes).map(|h| (h.receiver, h.counter)),
            Protocol::Native => RecordHeader::read(bytes).map(|h| (h.receiver, h.counter.into())),
        }
        .ok_or(DropReason::Truncated)?;
        let id = *self.indices.get(index).ok_or(DropReason::UnknownIndex)?;
        let peer = self.peers[id.0 as usize]
            .as_mut()
            .ok_or(DropReason::UnknownIndex)?;
        let (session, unconfirmed) = peer
            .sessions
            .by_index(index)
            .ok_or(DropReason::UnknownIndex)?;
        let counter = match self.protocol {
            Protocol::WireGuard => sent,
            Protocol::Native => session.whole_counter(sent as u32),
        };
        if session.created.has_expired(REJECT_AFTER_TIME, now.mono)
            || counter >= REJECT_AFTER_MESSAGES
        {
            return Err(DropReason::KeyExpired);
        }
        let header_len = self.protocol.data_header_len();
        let sealed = &mut bytes[header_len..];
        let health = &mut peer.path.health;
        let length = match session.open(counter, sealed) {
            // Parity restored it before, but it was only late. If it counted as lost, a path that reorders would get
            // parity without end.
            Err(DropReason::Replayed) if health.misses(index, counter) => {
                session.decrypt(counter, sealed)?;
                health.original(counter);
                if let Some(repair) = &mut peer.repair {
                    repair.restored = repair.restored.saturating_sub(1);
                }
                return Err(DropReason::Replayed);
            }
            opened => opened?,
        };
        peer.counters.received_bytes += bytes.len() as u64;
        // This is stricter than in the kernel, where any authenticated datagram moves the endpoint.
        // A datagram that was overtaken, or delayed by an attacker, shows where the peer was, not
        // where it is.
        let newest = session.is_newest(counter);
        let number = session.number;
        let (from, began) = (arrival.from.source, session.initiator);
        let follows = newest
            && (self.protocol == Protocol::WireGuard
                || peer
                    .paths
                    .on_datagram(from, peer.path.endpoint, began, now.mono));
        if !newest && self.protocol == Protocol::Native {
            peer.paths
                .on_late_datagram(from, peer.path.endpoint, now.mono);
        }
        if follows
            && (peer.path.endpoint != Some(from) || peer.path.source != arrival.from.destination)
        {
            let to = arrival.from.destination;
            debug!(target: LOG, peer = %peer.public_key, endpoint = %from, "peer sends from another address");
            // The address of a relay was set by the driver, not claimed by the peer, and needs no
            // validation.
            match self.protocol {
                Protocol::Native if !peer.paths.is_relay(from) => {
                    peer.path.follow(from, to, now.mono)
                }
                _ => peer.path.move_to(from, to),
            }
        }
        if !peer.path.is_validated() && peer.path.endpoint == Some(from) {
            peer.path
                .outgoing
                .validation
                .received(bytes.len(), now.mono);
        }
        peer.timers.any_authenticated_packet_received(now.mono);
        peer.timers.answered();
        if unconfirmed {
            self.confirm_session(now, id);
        }
        let start = arrival.range.start + header_len;
        let plaintext = start..start + length;
        let record = Record {
            session: index,
            counter,
            ecn: arrival.ecn(),
        };
        let mut verdict = None;
        if self.protocol == Protocol::Native
            && let Some(peer) = self.peer_mut(id)
        {
            let Some(stamp) = Stamp::read(&buffers.arena[plaintext.clone()]) else {
                peer.counters.inbound.packets_in += 1;
                peer.counters.inbound.drops.add(DropReason::BadFrame, 1);
                return Ok(id);
            };
            // Keepalives count too, or their counters would be reported as lost.
            let health = &mut peer.path.health;
            verdict = health.datagram(&record, stamp, (number, from), now.mono);
        }
        let rekey = self.peers[id.0 as usize].as_mut().is_some_and(|peer| {
            let age = peer.sessions.current.as_ref().map(|s| s.age());
            age.is_some_and(|age| peer.timers.rekey_on_receive(&age, now.mono))
        });
        let arrived = Arrived {
            record,
            number,
            verdict,
        };
        self.opened(now, id, arrived, plaintext, buffers);
        if rekey {
            self.initiate_handshake(now, id, buffers.outbox);
        }
        Ok(id)
    }

    /// Handles the first datagram of a session derived as responder.
    fn confirm_session(&mut self, now: Now, id: PeerId) {
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return;
        };
        // A peer that confirms the session has received the response.
        if peer.path.responded.take() == peer.path.endpoint {
            peer.path.validate();
        }
        if let Some(endpoint) = peer.path.endpoint {
            peer.log_session(endpoint);
        }
        let ended = peer.sessions.confirm_next();
        let agreed = peer.sessions.current.as_mut().and_then(|s| s.agreed.take());
        if let Some(theirs) = agreed {
            peer.set_repair(self.repair.filter(|_| theirs.repair()), now.mono);
            note_ready(&mut self.to_release, peer);
            peer.capabilities = Some(theirs);
        }
        peer.timers.handshake_complete();
        peer.counters.handshakes.completed += 1;
        peer.last_handshake = Some(now.wall);
        peer.path.active_until = now.mono + KEEPALIVE_TIMEOUT;
        if let Some(index) = ended {
            self.indices.remove(index);
        }
    }

    /// Handles the plaintext of an authenticated datagram that is no replay.
    fn opened(
        &mut self,
        now: Now,
        id: PeerId,
        arrived: Arrived,
        plaintext: Range<usize>,
        buffers: &mut Buffers<'_>,
    ) {
        let sending = self.sending(now);
        let mode = self.mode;
        let record = arrived.record;
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return;
        };
        let mut part = Part::All;
        if let Some(repair) = &mut peer.repair {
            let frames = &buffers.arena[plaintext.start + STAMP_LEN..plaintext.end];
            let session = peer.sessions.by_index(record.session);
            repair.set_round_trip(peer.path.least_rtt);
            part = repaired(repair, arrived, frames, session.map(|(s, _)| s), now.mono);
            note_ready(&mut self.to_release, peer);
        }
        let mut receiving = Receiving {
            sending,
            allowed_ips: &self.allowed_ips,
            cache: &mut self.scratch.source,
            mac_table: &mut self.mac_table,
        };
        let keepalive = match sending.protocol {
            Protocol::WireGuard => 0,
            Protocol::Native => STAMP_LEN,
        };
        if plaintext.len() == keepalive {
            peer.counters.inbound.packets_in += 1;
            peer.counters.inbound.consumed += 1;
            return;
        }
        match sending.protocol {
            Protocol::WireGuard => {
                peer.timers.data_received(now.mono);
                peer.counters.inbound.packets_in += 1;
                if let Err(reason) =
                    wireguard_packet(peer, &mut receiving, plaintext, record.ecn, buffers)
                {
                    peer.counters.inbound.drops.add(reason, 1);
                }
            }
            Protocol::Native => {
                let frames = plaintext.start + STAMP_LEN..plaintext.end;
                let of = (record, Selection::new(part, 0));
                native_record(peer, receiving, mode, of, frames, buffers);
            }
        }
    }
}

impl Tunnel {
    /// Processes records that loss repair restored, or whose segments it no longer holds back, in
    /// `arena`, which is free. Packets are added to `inbox`, answers to `outbox`. Returns true if
    /// there is more to do once both are emptied.
    pub fn release(
        &mut self,
        now: Now,
        arena: &mut [u8],
        inbox: &mut Inbox,
        outbox: &mut Outbox,
    ) -> bool {
        if self.to_release.is_empty() {
            return false;
        }
        let sending = self.sending(now);
        let mode = self.mode;
        let mut used = 0;
        let mut more = false;
        let mut buffers = Buffers {
            arena,
            inbox,
            outbox,
        };
        let peers = std::mem::take(&mut self.to_release);
        for id in &peers {
            let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
                continue;
            };
            while let Some(repair) = &mut peer.repair
                && let Some(ready) = repair.take_ready(now.mono)
            {
                let frames = used..used + ready.frames.len();
                buffers.arena[frames.clone()].copy_from_slice(&ready.frames);
                // Unfolding a frame writes beyond the end of the record.
                used = frames.end + TAG_LEN;
                repair.give_back(ready.frames);
                let receiving = Receiving {
                    sending,
                    allowed_ips: &self.allowed_ips,
                    cache: &mut self.scratch.source,
                    mac_table: &mut self.mac_table,
                };
                let of = (ready.record, Selection::new(ready.part, ready.passed));
                native_record(peer, receiving, mode, of, frames, &mut buffers);
                // Stop if there may be no room for the longest record, or for an answer.
                if buffers.arena.len() - used < MAX_DATAGRAM
                    || buffers.outbox.remaining() < MAX_DATAGRAM
                {
                    self.to_release.push(*id);
                    more = true;
                    break;
                }
            }
            peer.repair.take_if(|repair| repair.is_over());
            if more {
                let rest = peers.iter().skip_while(|peer| *peer != id).skip(1);
                self.to_release.extend(rest);
                break;
            }
        }
        buffers.inbox.finish(buffers.arena);
        for id in peers {
            self.reschedule(id, now.mono, now.mono);
        }
        more
    }
}

/// Notes a peer that has records to [release](Tunnel::release).
pub(super) fn note_ready(to_release: &mut Vec<PeerId>, peer: &Peer) {
    let is_ready = peer
        .repair
        .as_ref()
        .is_some_and(|repair| repair.has_ready());
    if is_ready && !to_release.contains(&peer.id) {
        to_release.push(peer.id);
    }
}

/// Drops what loss repair holds back of a peer.
pub(super) fn drop_held(peer: &mut Peer, mode: Mode, reason: DropReason) {
    let Some(mut repair) = peer.repair.take() else {
        return;
    };
    repair.end(Instant::BOOT);
    while let Some(ready) = repair.take_ready(Instant::BOOT) {
        let dropped = match mode {
            Mode::Ip => unprocessed::<Ip>(&mut repair, ready),
            Mode::Ethernet => unprocessed::<Ethernet>(&mut repair, ready),
        };
        let counters = &mut peer.counters.inbound;
        counters.packets_in += dropped;
        counters.drops.add(reason, dropped);
    }
}

/// The packets and other frames in a record that was not processed, or only in part.
fn unprocessed<C: Carried>(repair: &mut repair::Receiver, ready: Ready) -> u64 {
    let Ready {
        record,
        part,
        passed,
        frames: mut arena,
    } = ready;
    let length = arena.len();
    arena.resize(length + TAG_LEN, 0);
    let mut selection = Selection::new(part, passed);
    let mut frames = Frames::<C>::new(0..length, record.ecn);
    let mut packets = 0;
    while let Some(frame) = frames.next(&mut arena) {
        let segment = frame.as_ref().ok();
        let segment = segment.and_then(|frame| segment_of(frame, &arena));
        if repair.selects(&mut selection, record, segment) {
            packets += match frame {
                Ok(Frame::Slice(slice)) => slice.segments(),
                _ => 1,
            };
        }
    }
    packets
}

/// Maximum bytes of a datagram.
const MAX_DATAGRAM: usize = 65_536;

/// A record as it arrived.
#[derive(Clone, Copy)]
struct Arrived {
    record: Record,
    /// [Number](Session::number) of its session.
    number: u64,
    /// Verdict on the datagrams missing before the record.
    verdict: Option<Verdict>,
}

/// Passes a record of `session` to loss repair. Returns the part of it to process now.
fn repaired(
    repair: &mut repair::Receiver,
    arrived: Arrived,
    frames: &[u8],
    session: Option<&mut Session>,
    now: Instant,
) -> Part {
    let Arrived {
        record,
        number,
        verdict,
    } = arrived;
    let part = repair.record(record, number, frames, verdict, now);
    if let Some(session) = session {
        // If the original of a restored record arrives from now on, it counts as a repeat.
        for counter in repair.take_restored() {
            session.restored(counter);
        }
    }
    part
}

/// Parameters of the tunnel that receiving from a peer needs.
struct Receiving<'a> {
    /// Parameters of the answers to the peer.
    sending: Sending,
    allowed_ips: &'a AllowedIps,
    cache: &'a mut LookupCache,
    mac_table: &'a mut MacTable,
}

/// The sender of a packet, and its rules.
struct Sender<'a> {
    id: PeerId,
    has_allowed_ips: bool,
    filter: &'a mut Option<Box<StatefulFilter>>,
}

impl Receiving<'_> {
    /// Checks the MAC address of an Ethernet frame, then the inner source address against the
    /// peer's allowed IPs, then the packet against its filter. `packet` begins with the headers, up
    /// to the transport header; `ip` was parsed at `ip_at`.
    #[inline]
    fn check<C: Carried>(
        &mut self,
        packet: &[u8],
        ip_at: usize,
        ip: &IpPacket,
        sender: Sender<'_>,
    ) -> Result<(), DropReason> {
        if C::ETHERNET {
            self.check_mac(packet, sender.id)?;
        }
        if !C::ETHERNET || sender.has_allowed_ips {
            match self.allowed_ips.lookup_cached(ip.src, self.cache) {
                Some(owner) if owner == sender.id => {}
                _ => return Err(DropReason::SourceNotAllowed),
            }
        }
        match sender.filter {
            None => Ok(()),
            Some(filter) => filter.check(ip, &packet[ip_at..], self.sending.now.mono),
        }
    }

    /// Checks the source of an Ethernet frame, and learns it.
    fn check_mac(&mut self, frame: &[u8], peer: PeerId) -> Result<(), DropReason> {
        let source = frame.get(6..).and_then(|rest| rest.first_chunk());
        let source = Mac(*source.ok_or(DropReason::BadEthernet)?);
        self.mac_table.learn(source, peer, self.sending.now.mono)
    }
}

fn wireguard_packet(
    peer: &mut Peer,
    receiving: &mut Receiving<'_>,
    range: Range<usize>,
    ecn: u8,
    buffers: &mut Buffers<'_>,
) -> Result<(), DropReason> {
    let arena = &mut *buffers.arena;
    let ip = IpPacket::parse(&arena[range.clone()]).map_err(|_| DropReason::NotIp)?;
    receiving.check::<Ip>(&arena[range.clone()], 0, &ip, sender(peer))?;
    frame::decapsulate_ecn(&mut arena[range.clone()], ecn)?;
    let packet = Packet {
        range,
        ip_at: 0,
        ip,
        partial: false,
    };
    buffers.inbox.packet(arena, &packet, peer.id);
    Ok(())
}

fn sender(peer: &mut Peer) -> Sender<'_> {
    Sender {
        id: peer.id,
        has_allowed_ips: peer.has_allowed_ips,
        filter: &mut peer.filter,
    }
}

/// Handles a part of the frames of a record; `frames` is their position.
fn native_record(
    peer: &mut Peer,
    mut receiving: Receiving<'_>,
    mode: Mode,
    of: (Record, Selection),
    frames: Range<usize>,
    buffers: &mut Buffers<'_>,
) {
    if parity::is_parity(&buffers.arena[frames.clone()]) {
        let counters = &mut peer.counters.inbound;
        counters.packets_in += 1;
        match peer.repair {
            Some(_) => counters.consumed += 1,
            None => counters.drops.add(DropReason::BadFrame, 1),
        }
        return;
    }
    match mode {
        Mode::Ip => native_frames::<Ip>(peer, &mut receiving, of, frames, buffers),
        Mode::Ethernet => native_frames::<Ethernet>(peer, &mut receiving, of, frames, buffers),
    }
}

fn native_frames<C: Carried>(
    peer: &mut Peer,
    receiving: &mut Receiving<'_>,
    (record, mut selection): (Record, Selection),
    frames: Range<usize>,
    buffers: &mut Buffers<'_>,
) {
    let size = RECORD_OVERHEAD + frames.len();
    let mut frames = Frames::<C>::new(frames, record.ecn);
    // A record is parsed once for each part. Each of its frames is processed, or counted as
    // dropped, in only one of these passes.
    while let Some(frame) = frames.next(buffers.arena) {
        let all = selection.part == Part::All;
        let repair = peer.repair.as_mut().filter(|repair| !all || repair.keeps());
        let now = repair.is_none_or(|repair| {
            let frame = frame.as_ref().ok();
            let segment = frame.and_then(|frame| segment_of(frame, buffers.arena));
            repair.selects(&mut selection, record, segment)
        });
        if now {
            native_frame::<C>(peer, receiving, frame, record, size, buffers);
        }
    }
    if let Some(repair) = &mut peer.repair {
        repair.processed(selection, record);
    }
}

/// Returns the TCP segment of a frame that a gap before it may hold back: one that is not just an
/// acknowledgement.
fn segment_of(frame: &Frame, arena: &[u8]) -> Option<Segment> {
    match frame {
        Frame::Slice(slice) => {
            let header = &arena[slice.header.start + slice.ip_at + slice.ip.header_len..];
            let length = slice.chunk.len();
            Some(Segment::new(&slice.ip, header, slice.offset, length))
        }
        Frame::Packet(packet) if packet.ip.protocol == PROTO_TCP && !packet.ip.fragment => {
            let start = packet.range.start + packet.ip_at;
            let segment = &arena[start + packet.ip.header_len..start + packet.ip.total_len];
            let length = segment.len() - tcp::header_len(segment)?;
            let acknowledges = length == 0 && tcp::flags(segment) == tcp::ACK;
            (!acknowledges).then(|| Segment::new(&packet.ip, segment, 0, length))
        }
        _ => None,
    }
}

/// Handles one frame of a record in a datagram of `size` bytes.
fn native_frame<C: Carried>(
    peer: &mut Peer,
    receiving: &mut Receiving<'_>,
    frame: Result<Frame, DropReason>,
    record: Record,
    size: usize,
    buffers: &mut Buffers<'_>,
) {
    let Buffers {
        arena,
        inbox,
        outbox,
    } = buffers;
    let sending = receiving.sending;
    let now = sending.now.mono;
    let repairs = peer.repair.is_some();
    if matches!(
        frame,
        Ok(Frame::Packet(_) | Frame::NotIp { .. } | Frame::Slice(_) | Frame::Fragment(_))
    ) {
        peer.timers.data_received(now);
        peer.path.health.packets(now);
    }
    let frame = frame.and_then(|frame| accept_offload(frame, sending.offload));
    let counters = &mut peer.counters.inbound;
    let taken = match frame {
        Err(reason) => {
            counters.packets_in += 1;
            Err((reason, 1))
        }
        Ok(Frame::Packet(packet)) => {
            counters.packets_in += 1;
            let Packet { range, ip_at, .. } = &packet;
            let bytes = &arena[range.clone()];
            receiving
                .check::<C>(bytes, *ip_at, &packet.ip, sender(peer))
                .map_err(|reason| (reason, 1))
                .map(|()| {
                    let bytes = &mut arena[range.start + ip_at..range.end];
                    let mtu = sending.inner_mtu as usize;
                    clamp_syn(bytes, packet.partial, |is_v6| {
                        let path = &peer.path.mtu;
                        path.segment_mtu(mtu, *ip_at, is_v6, repairs)
                    });
                    inbox.packet(arena, &packet, peer.id);
                })
        }
        Ok(Frame::NotIp { range }) => {
            counters.packets_in += 1;
            receiving
                .check_mac(&arena[range.clone()], peer.id)
                .map_err(|reason| (reason, 1))
                .map(|()| inbox.frame(range, peer.id))
        }
        Ok(Frame::Slice(slice)) => {
            let packets = slice.segments();
            counters.packets_in += packets;
            let header = &arena[slice.header.clone()];
            receiving
                .check::<C>(header, slice.ip_at, &slice.ip, sender(peer))
                .map_err(|reason| (reason, packets))
                .map(|()| inbox.slice(arena, &slice, peer.id))
        }
        Ok(Frame::Fragment(fragment)) => {
            let chunk = &arena[fragment.chunk.clone()];
            match peer.reassembly.fragment(&fragment, record, chunk, now) {
                Outcome::Opened { evicted } => {
                    counters.packets_in += 1;
                    counters.pending += 1;
                    counters.pending -= evicted;
                    counters.drops.add(DropReason::ReassemblyTimeout, evicted);
                    Ok(())
                }
                Outcome::Joined => Ok(()),
                Outcome::Complete(whole) => {
                    counters.pending -= 1;
                    reassembled::<C>(peer, receiving, whole, inbox).map_err(|reason| (reason, 1))
                }
                Outcome::Contradiction => {
                    counters.packets_in += 1;
                    Err((DropReason::BadFrame, 1))
                }
            }
        }
        Ok(control) => {
            counters.packets_in += 1;
            counters.consumed += 1;
            control_frame(peer, &sending, control, size, outbox);
            Ok(())
        }
    };
    if let Err((reason, packets)) = taken {
        peer.counters.inbound.drops.add(reason, packets);
    }
}

/// Rejects frames that need a TUN device with offload if there is none: nobody would complete their
/// checksum. The peer knows this from the capabilities.
fn accept_offload(frame: Frame, offload: bool) -> Result<Frame, DropReason> {
    match frame {
        Frame::Packet(Packet { partial: true, .. }) | Frame::Slice(_) if !offload => {
            Err(DropReason::BadFrame)
        }
        Frame::Fragment(fragment) if fragment.partial && !offload => Err(DropReason::BadFrame),
        frame => Ok(frame),
    }
}

fn reassembled<C: Carried>(
    peer: &mut Peer,
    receiving: &mut Receiving<'_>,
    whole: Reassembled,
    inbox: &mut Inbox,
) -> Result<(), DropReason> {
    let Reassembled {
        mut packet,
        partial,
        ecn,
    } = whole;
    let Some(ip_at) = C::ip_at(&packet)? else {
        if partial {
            return Err(DropReason::BadFrame);
        }
        if ecn == ip::ECN_CE {
            return Err(DropReason::EcnNotCapable);
        }
        receiving.check_mac(&packet, peer.id)?;
        inbox.owned_frame(packet, peer.id);
        return Ok(());
    };
    frame::decapsulate_ecn(&mut packet[ip_at..], ecn)?;
    let ip = IpPacket::parse(&packet[ip_at..]).map_err(|_| DropReason::NotIp)?;
    if partial && !frame::has_checksum(&ip) {
        return Err(DropReason::BadFrame);
    }
    receiving.check::<C>(&packet, ip_at, &ip, sender(peer))?;
    packet.truncate(ip_at + ip.total_len);
    inbox.owned(packet, ip_at, &ip, peer.id, partial);
    Ok(())
}

fn control_frame(
    peer: &mut Peer,
    sending: &Sending,
    frame: Frame,
    size: usize,
    outbox: &mut Outbox,
) {
    match frame {
        Frame::Health(report) => {
            peer.path.reported(report, sending.now.mono);
        }
        Frame::ProbeAck { id, size } if size < path_mtu::BASE => {
            check_answered(peer, Check { id, size }, sending.now.mono)
        }
        Frame::ProbeAck { id, size } => {
            if let Some(rtt) = peer.path.mtu.acknowledged(id, size, sending.now.mono) {
                peer.path.measured(rtt);
            }
        }
        Frame::Probe { id } => {
            let Some(envelope) = super::outbound::envelope(peer, sending, 0) else {
                return;
            };
            let current = &mut peer.sessions.current;
            let Some(mut session) = current.take_if(|s| s.may_send(sending.now.mono)) else {
                return;
            };
            let mut writer =
                RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
            // If the outbox is full, the probe is not acknowledged, and the peer repeats it.
            let answered =
                writer.probe_ack(id, size.min(65_535) as u16).is_ok() && writer.finish().is_ok();
            peer.sessions.current = Some(session);
            if answered {
                peer.timers.any_authenticated_packet_sent(sending.now.mono);
            }
        }
        // Processed together with the state of the other peers (`Tunnel::search_ports`).
        Frame::Ports(request) => peer.birthday.on_request(request),
        Frame::Packet(_) | Frame::NotIp { .. } | Frame::Slice(_) | Frame::Fragment(_) => {}
    }
}

/// Handles the acknowledgement of a small probe: a check of an address or a candidate, a ping, or a
/// port probe.
fn check_answered(peer: &mut Peer, check: Check, now: Instant) {
    // A peer that guesses might guess right: its acknowledgements prove nothing for now.
    if !peer.unknown_acks.is_available(now) {
        return;
    }
    if peer.path.outgoing.validation.acknowledged(check) {
        peer.path.validate();
        return;
    }
    if let Some((rtt, to)) = peer.pings.acknowledged(check, now) {
        if peer.path.endpoint == Some(to) {
            peer.path.measured(rtt);
        }
        return;
    }
    if peer.birthday.is_port_probe(check) {
        // The candidate appears once the peer sends from it.
        return;
    }
    let session = peer.sessions.current.as_ref();
    let began = session.is_some_and(|session| session.initiator);
    let answered = peer
        .paths
        .acknowledged(check, peer.path.endpoint, began, now);
    let Some((rtt, better)) = answered else {
        peer.unknown_acks.take(now);
        peer.path.outgoing.validation.on_unknown_ack();
        peer.paths.on_unknown_ack();
        return;
    };
    match better {
        CheckOutcome::Keep => {}
        CheckOutcome::InUse => {
            peer.path.measured(rtt);
            peer.path.validate();
        }
        CheckOutcome::Switch(address) => {
            info!(target: LOG, peer = %peer.public_key, endpoint = %address, ?rtt, "better path taken");
            peer.path.move_to(address, None);
            peer.path.measured(rtt);
        }
    }
}
