//! From the TUN device to the network: route, select the session, seal into the outbox.

use super::{Now, Tunnel};
use crate::batch::PacketBatch;
use crate::inbox::Inbox;
use crate::indices::PeerId;
use crate::mode::{Carried, Ethernet, Ip, MAX_ETHERNET_MTU, Mode};
use crate::native::check::Check;
use crate::native::record::{Envelope, RecordWriter};
use crate::native::repair::parity;
use crate::native::stamp::{RECORD_OVERHEAD, stamp_of};
use crate::noise::Protocol;
use crate::outbox::{Outbox, Payload};
use crate::peer::Peer;
use crate::segment::{self, SuperPacket};
use crate::session::Session;
use seikan_observe::{DirectionCounters, DropReason};
use seikan_wire::ip::{self, IpPacket, PROTO_TCP};
use seikan_wire::message::{DATA_HEADER_LEN, TAG_LEN};
use seikan_wire::{VNET_HDR_LEN, VnetHdr, ethernet, icmp, tcp};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

/// How long the path is probed after the last packet.
const PROBE_WHILE_ACTIVE: Duration = Duration::from_secs(15);

/// Parameters of the tunnel that sending to a peer needs.
#[derive(Clone, Copy)]
pub(super) struct Sending {
    pub now: Now,
    pub protocol: Protocol,
    pub mode: Mode,
    pub inner_mtu: u32,
    pub offload: bool,
    /// Bits of the inner packet's traffic class that are copied to the outer header.
    pub class_mask: u8,
}

/// Reads of a batch that go to the same peer.
pub(super) struct Reads<'a, I> {
    batch: &'a mut PacketBatch,
    indices: I,
}

impl<I: Iterator<Item = usize>> Reads<'_, I> {
    fn for_each(self, mut each: impl FnMut(&mut [u8])) {
        self.indices.for_each(|i| each(self.batch.packet(i)));
    }
}

impl Tunnel {
    /// Seals a batch of reads into `outbox`, grouped by peer. Replies to packets that are too big
    /// are added to `inbox`.
    pub fn outbound(
        &mut self,
        now: Now,
        batch: &mut PacketBatch,
        outbox: &mut Outbox,
        inbox: &mut Inbox,
    ) {
        match self.mode {
            Mode::Ip => self.route(batch),
            Mode::Ethernet => self.route_frames(batch, now),
        }
        let routed = std::mem::take(&mut self.scratch.routed);
        for group in routed.chunk_by(|a, b| a.0 == b.0) {
            let id = group[0].0;
            let indices = group.iter().map(|(_, i)| *i as usize);
            self.send_group(now, id, Reads { batch, indices }, outbox, inbox);
            self.reschedule(id, now.mono, now.mono);
        }
        self.scratch.routed = routed;
    }

    /// Finds the peer of every read and sorts by peer, keeping the order within each.
    fn route(&mut self, batch: &mut PacketBatch) {
        let mut routed = std::mem::take(&mut self.scratch.routed);
        routed.clear();
        let mut sorted = true;
        let mut congested = batch.take_congested();
        for i in 0..batch.len() {
            let read = batch.packet(i);
            let relieve = std::mem::take(&mut congested) && !mark_congestion(read, 0);
            match self.peer_for(read) {
                Ok(id) if relieve => {
                    if let Some(peer) = self.peer_mut(id) {
                        drop_read(peer, read, DropReason::QueueDelay);
                    }
                }
                Ok(id) => {
                    sorted &= routed.last().is_none_or(|(last, _)| *last <= id);
                    routed.push((id, i as u32));
                }
                Err(reason) => drop_unrouted(&mut self.unattributed.outbound, read, reason),
            }
        }
        if !sorted {
            routed.sort_by_key(|(id, _)| *id);
        }
        self.scratch.routed = routed;
    }

    /// [`Self::route`] in Ethernet mode: a frame goes to the peer that its destination was learned
    /// from, otherwise to all peers.
    fn route_frames(&mut self, batch: &mut PacketBatch, now: Now) {
        let mut routed = std::mem::take(&mut self.scratch.routed);
        routed.clear();
        let mut congested = batch.take_congested();
        for i in 0..batch.len() {
            let read = batch.packet(i);
            let first = routed.len();
            let frame = read.get(VNET_HDR_LEN..).unwrap_or_default();
            let Some(destination) = frame.first_chunk() else {
                drop_unrouted(
                    &mut self.unattributed.outbound,
                    read,
                    DropReason::BadEthernet,
                );
                continue;
            };
            match self.mac_table.lookup(ethernet::Mac(*destination), now.mono) {
                Some(id) => routed.push((id, i as u32)),
                None => routed.extend(self.by_key.values().map(|id| (*id, i as u32))),
            }
            if routed.len() == first {
                drop_unrouted(&mut self.unattributed.outbound, read, DropReason::NoRoute);
            }
            let ip_at = Ethernet::ip_at(frame).ok().flatten();
            if std::mem::take(&mut congested) && !ip_at.is_some_and(|at| mark_congestion(read, at))
            {
                for (id, _) in routed.drain(first..) {
                    if let Some(peer) = self.peers[id.0 as usize].as_mut() {
                        drop_read(peer, read, DropReason::QueueDelay);
                    }
                }
            }
        }
        if self.by_key.len() > 1 {
            routed.sort_by_key(|(id, _)| *id);
        }
        self.scratch.routed = routed;
    }

    fn peer_for(&mut self, read: &[u8]) -> Result<PeerId, DropReason> {
        let destination = destination(read).ok_or(DropReason::NotIp)?;
        let cache = &mut self.scratch.destination;
        self.allowed_ips
            .lookup_cached(destination, cache)
            .ok_or(DropReason::NoRoute)
    }

    fn send_group(
        &mut self,
        now: Now,
        id: PeerId,
        reads: Reads<'_, impl Iterator<Item = usize>>,
        outbox: &mut Outbox,
        inbox: &mut Inbox,
    ) {
        let sending = self.sending(now);
        // Staged packets go first, or flows would be reordered.
        let waiting = self.send_staged(now, id, outbox, inbox);
        let Some(peer) = self.peers[id.0 as usize].as_mut() else {
            return;
        };
        let usable = peer
            .sessions
            .current
            .as_ref()
            .is_some_and(|s| s.may_send(now.mono));
        let want_handshake = if !peer.is_reachable() {
            reads.for_each(|read| drop_read(peer, read, DropReason::NoEndpoint));
            false
        } else if waiting || (usable && !peer.path.is_validated()) {
            reads.for_each(|read| stage_read(peer, read));
            // Nothing more may be sent to an endpoint that never answers. Without a former one, other
            // paths are tried as if the packets had been sent.
            if usable && !peer.path.is_validated() && !peer.path.may_go_back() {
                peer.paths.sent(now.mono);
                let jitter = &mut self.scratch.jitter;
                peer.timers
                    .data_sent(now.mono, &mut jitter.of(&mut *self.rng));
            }
            if !waiting {
                self.send_staged(now, id, outbox, inbox);
            }
            false
        } else if usable {
            send_reads(peer, &sending, reads, outbox, inbox);
            let jitter = &mut self.scratch.jitter;
            peer.timers
                .data_sent(now.mono, &mut jitter.of(&mut *self.rng));
            let age = peer.sessions.current.as_ref().map(|s| s.age());
            age.is_some_and(|age| peer.timers.rekey_on_send(&age, now.mono))
        } else {
            reads.for_each(|read| stage_read(peer, read));
            peer.timers.want_handshake(now.mono)
        };
        if want_handshake {
            self.initiate_handshake(now, id, outbox);
        }
    }

    pub(super) fn sending(&self, now: Now) -> Sending {
        Sending {
            now,
            protocol: self.protocol,
            mode: self.mode,
            inner_mtu: self.inner_mtu,
            offload: self.offload,
            class_mask: self.class_mask,
        }
    }

    /// Sends staged packets as far as there is space. Returns true if some are left.
    pub(super) fn send_staged(
        &mut self,
        now: Now,
        id: PeerId,
        outbox: &mut Outbox,
        inbox: &mut Inbox,
    ) -> bool {
        let sending = self.sending(now);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return false;
        };
        let session = peer.sessions.current.as_ref();
        if peer.staged.is_empty() || !session.is_some_and(|s| s.may_send(now.mono)) {
            return false;
        }
        // Only little may be sent to an unvalidated endpoint; the rest waits.
        let validated = peer.path.is_validated();
        let mut credit = peer.path.outgoing.validation.for_packets();
        let mut batch = PacketBatch::new(2 * crate::batch::MAX_READ, 64);
        while !peer.staged.is_empty() {
            // Twice the size of the arena is enough for all headers, tags and padding.
            if outbox.remaining() < 4 * crate::batch::MAX_READ {
                return true;
            }
            batch.clear();
            while (validated || peer.staged.next_cost() <= credit)
                && let Some(space) = batch.space()
                && let Some(read) = peer.staged.pop()
            {
                peer.counters.outbound.pending -= read.packets;
                peer.counters.outbound.packets_in -= read.packets;
                let length = read.bytes.len();
                space[..length].copy_from_slice(&read.bytes);
                batch.commit(length);
                credit = credit.saturating_sub(length + RECORD_OVERHEAD);
            }
            if batch.is_empty() {
                return true;
            }
            let indices = 0..batch.len();
            let batch = &mut batch;
            send_reads(peer, &sending, Reads { batch, indices }, outbox, inbox);
            let jitter = &mut self.scratch.jitter;
            peer.timers
                .data_sent(now.mono, &mut jitter.of(&mut *self.rng));
        }
        false
    }

    /// Tells a peer this host's current address by a keepalive, if there is a session. The peer
    /// then updates its endpoint.
    pub fn announce(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        self.send_keepalive(now, id, outbox);
        self.reschedule(id, now.mono, now.mono);
    }

    /// Sends a ping to a peer and returns its number; [`Peer::pings`] has the result. Like a
    /// packet, it starts a handshake if there is no session, and restarts the checks of the path.
    /// Native only.
    pub fn ping(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) -> u64 {
        self.pings_sent += 1;
        let number = self.pings_sent;
        let Some(peer) = self.peer_mut(id) else {
            return number;
        };
        peer.pings.queue(number);
        if !peer.has_session(now.mono)
            && peer.is_reachable()
            && peer.timers.want_handshake(now.mono)
        {
            self.initiate_handshake(now, id, outbox);
        }
        self.send_ping(now, id, outbox);
        self.reschedule(id, now.mono, now.mono);
        number
    }

    /// Sends the waiting ping if there is a session.
    pub(super) fn send_ping(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let sending = self.sending(now);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        if !peer.pings.is_queued() || !peer.path.is_validated() {
            return;
        }
        let Some(envelope) = envelope(peer, &sending, 0) else {
            return;
        };
        let Some(mut session) = peer.sessions.current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        let (check, to) = (Check::random(&mut *self.rng), envelope.destination.address);
        let mut writer = RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
        let sent = writer.probe(check.id, check.size.into()).is_ok();
        let age = session.age();
        peer.sessions.current = Some(session);
        if !sent {
            return;
        }
        let at = now.mono;
        peer.pings.sent(check, to, at);
        peer.path.active_until = at + PROBE_WHILE_ACTIVE;
        peer.paths.sent(at);
        peer.timers.any_authenticated_packet_sent(at);
        peer.timers.data_sent(at, &mut *self.rng);
        if peer.timers.rekey_on_send(&age, at) {
            self.initiate_handshake(now, id, outbox);
        }
    }

    /// Seals an empty datagram, a keepalive. Returns false without a session.
    pub(super) fn send_keepalive(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) -> bool {
        let sending = self.sending(now);
        let Some(peer) = self.peer_mut(id) else {
            return false;
        };
        let Some(mut session) = peer.sessions.current.take_if(|s| s.may_send(now.mono)) else {
            return false;
        };
        let sent = match sending.protocol {
            Protocol::WireGuard => {
                wireguard_record(peer, &mut session, outbox, &Content::default(), |_| {})
            }
            Protocol::Native => match envelope(peer, &sending, 0) {
                Some(envelope) => {
                    RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope)
                        .keepalive()
                }
                None => Err(DropReason::NoEndpoint),
            },
        };
        peer.sessions.current = Some(session);
        if sent.is_ok() {
            peer.timers.any_authenticated_packet_sent(now.mono);
        }
        sent.is_ok()
    }
}

/// Sends through the peer's current session, which must exist.
pub(super) fn send_reads(
    peer: &mut Peer,
    sending: &Sending,
    reads: Reads<'_, impl Iterator<Item = usize>>,
    outbox: &mut Outbox,
    inbox: &mut Inbox,
) {
    let Some(mut session) = peer.sessions.current.take() else {
        return;
    };
    let now = sending.now.mono;
    match sending.protocol {
        Protocol::WireGuard => {
            reads.for_each(|read| {
                let packets = segment::packets_in(read);
                peer.counters.outbound.packets_in += packets;
                if let Err((reason, left)) =
                    wireguard_read(peer, &mut session, sending, read, outbox)
                {
                    peer.counters.outbound.drops.add(reason, left);
                }
            });
        }
        Protocol::Native => {
            match sending.mode {
                Mode::Ip => {
                    native_reads::<Ip>(peer, &mut session, sending, reads, outbox, inbox);
                }
                Mode::Ethernet => {
                    native_reads::<Ethernet>(peer, &mut session, sending, reads, outbox, inbox);
                }
            }
            peer.paths.sent(now);
        }
    }
    peer.timers.any_authenticated_packet_sent(now);
    peer.path.active_until = now + PROBE_WHILE_ACTIVE;
    peer.sessions.current = Some(session);
}

fn native_reads<C: Carried>(
    peer: &mut Peer,
    session: &mut Session,
    sending: &Sending,
    reads: Reads<'_, impl Iterator<Item = usize>>,
    outbox: &mut Outbox,
    inbox: &mut Inbox,
) {
    let Some(envelope) = envelope(peer, sending, 0) else {
        return reads.for_each(|read| drop_read(peer, read, DropReason::NoEndpoint));
    };
    let mtu = peer
        .capabilities
        .as_ref()
        .map_or(sending.inner_mtu, |c| u32::from(c.inner_mtu));
    let most = if C::ETHERNET {
        MAX_ETHERNET_MTU
    } else {
        u32::MAX
    };
    let mtu = mtu.min(most) as usize;
    let repairs = peer.repair.is_some();
    let mut writer = RecordWriter::new(outbox, session, &mut peer.path.outgoing, envelope);
    let counters = &mut peer.counters.outbound;
    for i in reads.indices {
        let read = reads.batch.packet(i);
        let ip_at = match C::ip_at(&read[VNET_HDR_LEN..]) {
            Ok(Some(at)) => at,
            other => {
                counters.packets_in += 1;
                let sent = other.and_then(|_| other_frame(&mut writer, read, mtu));
                if let Err(reason) = sent {
                    counters.drops.add(reason, 1);
                }
                continue;
            }
        };
        let partial = VnetHdr::read(read).is_ok_and(|vnet| vnet.needs_csum);
        let smaller = mtu.min(sending.inner_mtu as usize);
        clamp_syn(&mut read[VNET_HDR_LEN + ip_at..], partial, |is_v6| {
            let mtu = &peer.path.mtu;
            mtu.segment_mtu(smaller, ip_at, is_v6, repairs)
        });
        let packet = match SuperPacket::parse_at(read, ip_at) {
            Ok(packet) => packet,
            Err(reason) => {
                counters.packets_in += 1;
                counters.drops.add(reason, 1);
                continue;
            }
        };
        let packets = packet.segments() as u64;
        counters.packets_in += packets;
        if let Some(filter) = &mut peer.filter {
            filter.note(&packet.ip, &packet.bytes[ip_at..], sending.now.mono);
        }
        if packet.segment_len(0) - ip_at > mtu {
            counters.drops.add(DropReason::TooBig, packets);
            if let Some((answer, ip)) = too_big(&packet, mtu) {
                // The reply originates here: it enters the inbound direction and leaves to the TUN
                // device.
                peer.counters.inbound.packets_in += 1;
                inbox.owned(answer, ip_at, &ip, peer.id, false);
            }
            continue;
        }
        // The outer header gets the inner ECN field (RFC 6040, normal mode), and the DSCP if
        // configured.
        let sealed = writer
            .set_traffic_class(ip::traffic_class(&packet.bytes[ip_at..]) & sending.class_mask)
            .map_err(|reason| (reason, packets))
            .and_then(|()| writer.super_packet(&packet));
        if let Err((reason, lost)) = sealed {
            counters.drops.add(reason, lost);
        }
    }
    if let Err(lost) = writer.finish() {
        counters.drops.add(DropReason::OutboxFull, lost);
    }
}

/// Adds a frame that carries no IP. Its payload must fit `mtu`.
fn other_frame(
    writer: &mut RecordWriter<'_>,
    read: &mut [u8],
    mtu: usize,
) -> Result<(), DropReason> {
    segment::complete_any_checksum(read)?;
    let frame = &read[VNET_HDR_LEN..];
    let (_, at) = ethernet::payload(frame).ok_or(DropReason::BadEthernet)?;
    if frame.len() - at > mtu {
        return Err(DropReason::TooBig);
    }
    writer.set_traffic_class(0)?;
    writer.frame(frame)
}

/// Returns the error "too big" for a packet, and its IP header. In Ethernet mode the error is in a
/// frame from the destination of the packet's frame to its source; there is none for a group.
fn too_big(packet: &SuperPacket<'_>, mtu: usize) -> Option<(Vec<u8>, IpPacket)> {
    let (link, inner) = packet.bytes.split_at(packet.ip_at);
    let error = icmp::too_big(inner, mtu as u32)?;
    let ip = IpPacket::parse(&error).ok()?;
    let (Some(destination), Some(source)) = (link.get(..6), link.get(6..12)) else {
        return Some((error, ip));
    };
    let is_group = destination[0] & 1 != 0;
    (!is_group).then(|| ([source, destination, &link[12..], &error].concat(), ip))
}

/// Common parameters of the records to `peer`; `None` without an endpoint.
pub(super) fn envelope(peer: &Peer, sending: &Sending, traffic_class: u8) -> Option<Envelope> {
    let now = sending.now.mono;
    // The parity of covered records must fit a datagram, too.
    let covers = peer.path.repair().covers(now);
    let room = if covers { parity::ROOM } else { 0 };
    Some(Envelope {
        destination: peer.path.destination(traffic_class)?,
        peer: peer.id,
        size: peer.path.mtu.size() - room,
        stamp: stamp_of(now + peer.path.wait),
        now,
        offload: peer.capabilities.as_ref().is_some_and(|c| c.offload()),
        gso: peer.path.gso,
    })
}

/// Seals every packet of a read in a datagram of its own. An error holds the number of packets
/// lost.
fn wireguard_read(
    peer: &mut Peer,
    session: &mut Session,
    sending: &Sending,
    read: &[u8],
    outbox: &mut Outbox,
) -> Result<(), (DropReason, u64)> {
    let packet = SuperPacket::parse(read).map_err(|reason| (reason, segment::packets_in(read)))?;
    if let Some(filter) = &mut peer.filter {
        filter.note(&packet.ip, packet.bytes, sending.now.mono);
    }
    let count = packet.segments();
    let class = ip::traffic_class(packet.bytes) & sending.class_mask;
    for i in 0..count {
        let length = packet.segment_len(i);
        // Padded to 16 bytes but not beyond the MTU (kernel `send.c`, `calculate_skb_padding`).
        let padded = length
            .next_multiple_of(16)
            .min((sending.inner_mtu as usize).max(length));
        let fill = |out: &mut [u8]| {
            packet.segment(i, false, out);
            out[length..].fill(0);
        };
        let content = Content {
            traffic_class: class,
            length: padded,
            payload: Payload {
                packets: 1,
                bytes: length as u64,
            },
        };
        wireguard_record(peer, session, outbox, &content, fill)
            .map_err(|reason| (reason, (count - i) as u64))?;
    }
    Ok(())
}

/// Content of a WireGuard datagram. The default is that of a keepalive.
#[derive(Default)]
struct Content {
    /// Traffic class of the outer header.
    traffic_class: u8,
    /// Length of the plaintext in bytes, with padding.
    length: usize,
    /// The packet in it, or none in a keepalive.
    payload: Payload,
}

/// Seals one datagram. `fill` writes its plaintext.
fn wireguard_record(
    peer: &Peer,
    session: &mut Session,
    outbox: &mut Outbox,
    content: &Content,
    fill: impl FnOnce(&mut [u8]),
) -> Result<(), DropReason> {
    let destination = peer
        .path
        .destination(content.traffic_class)
        .ok_or(DropReason::NoEndpoint)?;
    let total = DATA_HEADER_LEN + content.length + TAG_LEN;
    let mut slot = outbox.reserve(total).ok_or(DropReason::OutboxFull)?;
    let out = slot.bytes();
    fill(&mut out[DATA_HEADER_LEN..DATA_HEADER_LEN + content.length]);
    session.seal(Protocol::WireGuard, out);
    slot.commit(total, &destination, Some(peer.id), content.payload);
    Ok(())
}

/// Marks a packet CE if it is ECN-capable (RFC 3168). Returns false if it is not.
fn mark_congestion(read: &mut [u8], ip_at: usize) -> bool {
    let packet = read.get_mut(VNET_HDR_LEN + ip_at..);
    let Some(packet) = packet.filter(|packet| !packet.is_empty()) else {
        return false;
    };
    match ip::ecn(packet) {
        ip::ECN_NOT_ECT => false,
        _ => {
            ip::set_ecn(packet, ip::ECN_CE);
            true
        }
    }
}

fn stage_read(peer: &mut Peer, read: &[u8]) {
    let packets = segment::packets_in(read);
    peer.counters.outbound.packets_in += packets;
    peer.counters.outbound.pending += packets;
    let dropped = peer.staged.push(read, packets);
    peer.counters.outbound.pending -= dropped;
    peer.counters
        .outbound
        .drops
        .add(DropReason::HandshakeQueueFull, dropped);
}

fn drop_unrouted(counters: &mut DirectionCounters, read: &[u8], reason: DropReason) {
    let packets = segment::packets_in(read);
    counters.packets_in += packets;
    counters.drops.add(reason, packets);
}

fn drop_read(peer: &mut Peer, read: &[u8], reason: DropReason) {
    let packets = segment::packets_in(read);
    peer.counters.outbound.packets_in += packets;
    peer.counters.outbound.drops.add(reason, packets);
}

/// The inner destination address, read without further checks.
fn destination(read: &[u8]) -> Option<IpAddr> {
    let packet = read.get(VNET_HDR_LEN..)?;
    match packet.first()? >> 4 {
        4 => {
            let octets: [u8; 4] = *packet.get(16..20)?.first_chunk()?;
            Some(Ipv4Addr::from(octets).into())
        }
        6 => {
            let octets: [u8; 16] = *packet.get(24..40)?.first_chunk()?;
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// Lowers the MSS of a SYN so that segments fit the inner MTU that `mtu` returns for IPv4 or, if called
/// with true, IPv6.
///
/// A complete checksum is updated; one that is `partial` does not cover the option.
pub(crate) fn clamp_syn(packet: &mut [u8], partial: bool, mtu: impl FnOnce(bool) -> usize) {
    let Ok(ip) = IpPacket::parse_headers(packet) else {
        return;
    };
    if ip.protocol != PROTO_TCP || ip.fragment || ip.total_len > packet.len() {
        return;
    }
    let segment = &mut packet[ip.header_len..ip.total_len];
    if segment.len() < 20 || tcp::flags(segment) & tcp::SYN == 0 {
        return;
    }
    let limit = mtu(ip.is_v6())
        .saturating_sub(if ip.is_v6() { 60 } else { 40 })
        .min(65_535) as u16;
    tcp::clamp_mss(segment, limit, partial);
}
