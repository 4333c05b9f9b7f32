//! Packs frames into records: full records while there is more to send, so that one GSO call sends
//! them all.
//!
//! A [`RecordWriter`] lives for one batch to one peer. It fills the reserved tail of the
//! [`Outbox`], seals a record when it is full, and seals the last one in [`RecordWriter::finish`]:
//! small packets are never delayed for a fuller record. The end of one super-packet and the start
//! of the next share a record, which keeps all datagrams of a batch the same size.

use crate::inbox::MAX_HEADER;
use crate::indices::PeerId;
use crate::native::address_validation::AddressValidation;
use crate::native::fold::Fold;
use crate::native::frame::{
    self, FRAGMENT_OVERHEAD, LAST_SAVES, MIN_CHUNK, PACKET_OVERHEAD, PROBE_ACK_LEN, PROBE_LEN,
    SLICE_OVERHEAD, SliceHead,
};
use crate::native::health::Report;
use crate::native::probe_request::ProbeRequest;
use crate::native::repair::{self, parity};
use crate::native::stamp::{RECORD_OVERHEAD, STAMP_LEN, Stamp};
use crate::noise::Protocol;
use crate::outbox::{Destination, MAX_SEGMENTS, Outbox, Payload};
use crate::segment::{SuperPacket, Transport};
use crate::session::Session;
use crate::time::Instant;
use seikan_observe::DropReason;
use seikan_wire::ip::PROTO_TCP;
use seikan_wire::message::{RECORD_HEADER_LEN, TAG_LEN};
use seikan_wire::tcp;

/// Offset of the first frame in a record.
const FRAMES_AT: usize = RECORD_HEADER_LEN + STAMP_LEN;
/// A record that is at most this much shorter than the datagrams of its run is padded, so that the
/// run continues.
const MAX_PADDING: usize = 400;
/// A slice ends where a segment ends if that leaves at most one in this many bytes unused.
const UNUSED: usize = 8;

/// Common parameters of the records of one batch.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// Destination and marking.
    pub destination: Destination,
    /// The peer.
    pub peer: PeerId,
    /// UDP payload bytes that the path carries.
    pub size: usize,
    /// Send timestamp: fraction of a second in 1/65536.
    pub stamp: u16,
    /// Current time, from which `stamp` is derived.
    pub now: Instant,
    /// Whether the peer accepts slices and partial checksums.
    pub offload: bool,
    /// Whether the path carries GSO batches.
    pub gso: bool,
}

/// Sending state of one address, over all batches.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Identifier of the next packet in slices or fragments.
    pub(crate) next_id: u16,
    /// Limits the bytes sent to an unvalidated address.
    pub(crate) validation: AddressValidation,
    /// Parity for lost records.
    pub(crate) repair: repair::Sender,
}

impl Outgoing {
    /// State of a validated address; `next_id` is the identifier of the next packet in slices or
    /// fragments.
    pub fn from_id(next_id: u16) -> Outgoing {
        Outgoing {
            next_id,
            ..Outgoing::default()
        }
    }

    /// State of another address of the same peer, which is validated.
    pub(crate) fn moved(&self) -> Outgoing {
        Outgoing {
            repair: self.repair.moved(),
            ..Outgoing::from_id(self.next_id)
        }
    }
}

/// Packs frames for one peer into sealed records.
#[derive(Debug)]
pub struct RecordWriter<'a> {
    outbox: &'a mut Outbox,
    session: &'a mut Session,
    envelope: Envelope,
    outgoing: &'a mut Outgoing,
    /// Bytes of the open record so far, including the header.
    used: usize,
    /// Its last frame has the flag LAST, so nothing can follow.
    complete: bool,
    payload: Payload,
}

impl<'a> RecordWriter<'a> {
    /// Creates a writer without an open record.
    pub fn new(
        outbox: &'a mut Outbox,
        session: &'a mut Session,
        outgoing: &'a mut Outgoing,
        envelope: Envelope,
    ) -> RecordWriter<'a> {
        RecordWriter {
            outbox,
            session,
            envelope,
            outgoing,
            used: FRAMES_AT,
            complete: false,
            payload: Payload::default(),
        }
    }

    /// Changes the marking of the following records. The open record is sealed first.
    pub fn set_traffic_class(&mut self, traffic_class: u8) -> Result<(), DropReason> {
        if self.envelope.destination.traffic_class != traffic_class {
            self.close(false)?;
            self.envelope.destination.traffic_class = traffic_class;
        }
        Ok(())
    }

    /// Adds one read of the TUN device: whole, in slices or in fragments. An error holds the number
    /// of its packets that are lost; the others were added.
    pub fn super_packet(&mut self, packet: &SuperPacket<'_>) -> Result<(), (DropReason, u64)> {
        let segments = packet.segments();
        if let Some((header_len, gso_size)) = self.sliceable(packet) {
            // Counted with the last slice. The receiver may use any part, but all were one read.
            self.slices(packet, header_len, gso_size, packet.ecn)
                .map_err(|reason| (reason, segments as u64))?;
            self.payload.packets += segments as u64;
            self.payload.bytes += (0..segments)
                .map(|i| packet.segment_len(i) as u64)
                .sum::<u64>();
            return Ok(());
        }
        for i in 0..segments {
            self.segment(packet, i)
                .map_err(|reason| (reason, (segments - i) as u64))?;
        }
        Ok(())
    }

    /// Returns the length of the headers and the segment size if the packet can go in slices. That
    /// is a TCP super-packet, or one large TCP segment, since the receiver can use any part of
    /// either.
    fn sliceable(&self, packet: &SuperPacket<'_>) -> Option<(usize, usize)> {
        if !self.envelope.offload || !packet.partial || packet.ip.protocol != PROTO_TCP {
            return None;
        }
        let (header_len, gso_size) = match packet.kind {
            Some(Transport::Tcp) if packet.gso_size >= MIN_CHUNK => {
                (packet.header_len, packet.gso_size)
            }
            None if !packet.ip.fragment
                && self.whole_form(packet.bytes.len(), || Fold::of_packet(packet))
                    == Form::Parts =>
            {
                // The headers of an ordinary packet end where its transport begins.
                let transport = &packet.bytes[packet.header_len..];
                let length = packet.header_len + tcp::header_len(transport)?;
                // SYN, RST and URG apply to the whole packet and not to a part.
                let whole = tcp::flags(transport) & (tcp::SYN | tcp::RST | tcp::URG) != 0;
                let payload = packet.bytes.len() - length;
                (payload > 0 && !whole).then_some((length, payload))?
            }
            _ => return None,
        };
        (header_len <= MAX_HEADER).then_some((header_len, gso_size))
    }

    fn capacity(&self) -> usize {
        self.envelope.size - RECORD_OVERHEAD
    }

    fn left(&self) -> usize {
        if self.complete {
            0
        } else {
            self.envelope.size - TAG_LEN - self.used
        }
    }

    /// The form in which a packet of this length is sent; `fold` says what it can leave out.
    fn whole_form(&self, length: usize, fold: impl FnOnce() -> Option<Fold>) -> Form {
        let over = (PACKET_OVERHEAD + length).saturating_sub(self.capacity());
        if over == 0 {
            return Form::Whole;
        }
        match fold() {
            Some(fold) if over <= LAST_SAVES + fold.saved() => Form::Last(fold),
            _ => Form::Parts,
        }
    }

    /// Adds an Ethernet frame that carries no IP.
    pub fn frame(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        let form = self.whole_form(frame.len(), || Some(Fold::none()));
        self.whole(frame.len(), false, form, |out| out.copy_from_slice(frame))
    }

    fn segment(&mut self, packet: &SuperPacket<'_>, i: usize) -> Result<(), DropReason> {
        let partial = self.envelope.offload && packet.partial;
        let length = packet.segment_len(i);
        let form = self.whole_form(length, || Fold::of_packet(packet));
        self.whole(length, partial, form, |out| packet.segment(i, partial, out))
    }

    /// Adds a packet of this length, which `write` writes, in this form.
    #[inline]
    fn whole(
        &mut self,
        length: usize,
        partial: bool,
        form: Form,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), DropReason> {
        let last = match &form {
            Form::Whole => None,
            Form::Last(fold) => Some(fold),
            Form::Parts => {
                let mut packet = vec![0; length];
                write(&mut packet);
                return self.fragments(&packet, partial);
            }
        };
        let saved = last.map_or(0, |fold| LAST_SAVES + fold.saved());
        if PACKET_OVERHEAD + length - saved > self.left() {
            self.close(true)?;
        }
        let used = self.used;
        let out = &mut self.buffer()?[used..];
        self.used += frame::write_packet(out, length, partial, last, write);
        self.complete = last.is_some();
        self.payload.packets += 1;
        self.payload.bytes += length as u64;
        Ok(())
    }

    fn slices(
        &mut self,
        packet: &SuperPacket<'_>,
        header_len: usize,
        gso_size: usize,
        ecn: bool,
    ) -> Result<(), DropReason> {
        let (header, payload) = packet.bytes.split_at(header_len);
        let id = self.take_id();
        let fixed = SLICE_OVERHEAD + header_len;
        let fold = Fold::of_slice(packet);
        let saves = fold.as_ref().map_or(0, |fold| LAST_SAVES + fold.saved());
        // A super-packet that does not fit the rest of the run would arrive in two receives and
        // cost the far device two writes. It starts a new run instead.
        let Envelope {
            destination, peer, ..
        } = self.envelope;
        let room = self.capacity() - fixed + saves;
        let unit = slice_unit(room, gso_size);
        let records = payload.len().div_ceil(room - room % unit);
        if records <= MAX_SEGMENTS && !self.outbox.run_takes(&destination, Some(peer), records) {
            self.close(false)?;
        }
        let mut offset = 0;
        while offset < payload.len() {
            let rest = payload.len() - offset;
            // Small ones always fit in the usual form.
            let saves = if rest < MIN_CHUNK { 0 } else { saves };
            if self.left() + saves < fixed + rest.min(unit.max(MIN_CHUNK)) {
                self.close(true)?;
            }
            let room = self.left() + saves - fixed;
            let length = if rest <= room {
                rest
            } else {
                room - room % unit
            };
            let last = fold.as_ref().filter(|_| self.left() < fixed + length);
            let used = self.used;
            let out = &mut self.buffer()?[used..];
            let head = SliceHead {
                id,
                offset,
                ends: length == rest,
                gso_size,
                ecn,
            };
            let chunk = &payload[offset..offset + length];
            self.used += frame::write_slice(out, &head, header, chunk, last);
            self.complete = last.is_some();
            offset += length;
        }
        Ok(())
    }

    fn fragments(&mut self, packet: &[u8], partial: bool) -> Result<(), DropReason> {
        let length = packet.len();
        let id = self.take_id();
        let mut offset = 0;
        while offset < length {
            let rest = length - offset;
            if self.left() < FRAGMENT_OVERHEAD + rest.min(MIN_CHUNK) {
                self.close(true)?;
            }
            let chunk = rest.min(self.left() - FRAGMENT_OVERHEAD);
            let used = self.used;
            let out = &mut self.buffer()?[used..];
            frame::write_fragment(out, id, offset, length, chunk, partial);
            out[FRAGMENT_OVERHEAD..FRAGMENT_OVERHEAD + chunk]
                .copy_from_slice(&packet[offset..offset + chunk]);
            self.used += FRAGMENT_OVERHEAD + chunk;
            offset += chunk;
        }
        self.payload.packets += 1;
        self.payload.bytes += length as u64;
        Ok(())
    }

    /// Adds a health report.
    pub fn health(&mut self, report: &Report) -> Result<(), DropReason> {
        let with_repair = self.outgoing.repair.ceiling().is_some();
        if self.left() < 3 + Report::length(with_repair) {
            self.close(true)?;
        }
        let used = self.used;
        self.used += frame::write_health(&mut self.buffer()?[used..], report, with_repair);
        Ok(())
    }

    /// Seals the parity of a block of records that ends now. Returns whether there is any.
    pub fn parity(&mut self) -> Result<bool, DropReason> {
        self.close(false)?;
        let before = self.session.counter();
        self.parities(false)?;
        Ok(self.session.counter() > before)
    }

    /// Adds the probe request of a symmetric end.
    pub fn ports(&mut self, request: &ProbeRequest) -> Result<(), DropReason> {
        if self.left() < 3 + request.len() {
            self.close(true)?;
        }
        let used = self.used;
        self.used += frame::write_ports(&mut self.buffer()?[used..], request);
        Ok(())
    }

    /// Adds the acknowledgement of a probe of `size` bytes.
    pub fn probe_ack(&mut self, id: u16, size: u16) -> Result<(), DropReason> {
        if self.left() < PROBE_ACK_LEN {
            self.close(true)?;
        }
        let used = self.used;
        frame::write_probe_ack(&mut self.buffer()?[used..], id, size);
        self.used += PROBE_ACK_LEN;
        Ok(())
    }

    /// Seals a record of exactly `size` bytes with a probe.
    pub fn probe(&mut self, id: u16, size: usize) -> Result<(), DropReason> {
        self.close(false)?;
        self.envelope.size = size;
        let used = self.used;
        frame::write_probe(&mut self.buffer()?[used..], id);
        self.used += PROBE_LEN;
        self.pad_to(size)?;
        self.seal_uncovered()?;
        self.session.probed = true;
        Ok(())
    }

    /// Seals an empty record: a keepalive.
    pub fn keepalive(&mut self) -> Result<(), DropReason> {
        self.close(false)?;
        self.seal()
    }

    /// Seals the open record. If there is no space, returns the number of packets lost with it.
    pub fn finish(mut self) -> Result<(), u64> {
        self.close(false).map_err(|_| self.payload.packets)
    }

    fn take_id(&mut self) -> u16 {
        let id = self.outgoing.next_id;
        self.outgoing.next_id = id.wrapping_add(1);
        id
    }

    /// Returns the reserved record, which is not committed before [`Self::seal`].
    fn buffer(&mut self) -> Result<&mut [u8], DropReason> {
        let size = self.envelope.size;
        // The reservation is released at once: reserving again yields the same bytes until a
        // commit.
        self.outbox.tail(size).ok_or(DropReason::OutboxFull)
    }

    fn close(&mut self, more: bool) -> Result<(), DropReason> {
        if self.used == FRAMES_AT {
            return Ok(());
        }
        if more && !self.complete {
            let length = self.used + TAG_LEN;
            let wanted = self
                .outbox
                .run_size(&self.envelope.destination, Some(self.envelope.peer));
            if let Some(wanted) = wanted
                && self.envelope.gso
                && length < wanted
                && wanted - length <= MAX_PADDING
                && wanted <= self.envelope.size
            {
                self.pad_to(wanted)?;
            }
        }
        self.seal()
    }

    fn pad_to(&mut self, size: usize) -> Result<(), DropReason> {
        let used = self.used;
        self.buffer()?[used..size - TAG_LEN].fill(0);
        self.used = size - TAG_LEN;
        Ok(())
    }

    /// Seals the open record. If a block of records is full with it, its parity follows.
    fn seal(&mut self) -> Result<(), DropReason> {
        let frames = FRAMES_AT..self.used;
        let repairs = self.outgoing.repair.ceiling().is_some();
        let ended = self.seal_with(|outgoing, session, now, record| {
            let (index, counter) = (session.local_index, session.counter());
            repairs && outgoing.repair.record(index, counter, &record[frames], now)
        })?;
        if ended {
            // Without space for the parity, the block has less parity, but no packet is lost.
            let _ = self.parities(true);
        }
        Ok(())
    }

    /// Seals the open record, which loss repair does not cover.
    fn seal_uncovered(&mut self) -> Result<(), DropReason> {
        self.seal_with(|_, _, _, _| false).map(|_| ())
    }

    /// Seals the parities of a block that has ended, or that is `full`.
    fn parities(&mut self, full: bool) -> Result<(), DropReason> {
        // Only little may be sent to an unvalidated address: packets and checks come first.
        if !self.outgoing.validation.is_complete() {
            return Ok(());
        }
        loop {
            let (index, counter) = (self.session.local_index, self.session.counter());
            let repair = &mut self.outgoing.repair;
            let Some((head, symbol)) = repair.parity(index, counter, full, self.envelope.now)
            else {
                return Ok(());
            };
            let end = FRAMES_AT + parity::OVERHEAD + symbol.len();
            let out = self
                .outbox
                .tail(end + TAG_LEN)
                .ok_or(DropReason::OutboxFull)?;
            out[FRAMES_AT..FRAMES_AT + parity::OVERHEAD].copy_from_slice(&head.to_bytes());
            out[FRAMES_AT + parity::OVERHEAD..end].copy_from_slice(symbol);
            self.used = end;
            self.complete = false;
            let sealed = self.seal_uncovered();
            // A record without space leaves nothing open.
            self.used = FRAMES_AT;
            sealed?;
        }
    }

    /// Seals the open record; `cover` is called with its plaintext.
    fn seal_with(
        &mut self,
        cover: impl FnOnce(&mut Outgoing, &Session, Instant, &[u8]) -> bool,
    ) -> Result<bool, DropReason> {
        let length = self.used + TAG_LEN;
        let Envelope {
            destination,
            peer,
            stamp,
            now,
            gso,
            ..
        } = self.envelope;
        let position = if gso {
            self.outbox.next_position(&destination, Some(peer), length)
        } else {
            0
        };
        let mut slot = self.outbox.reserve(length).ok_or(DropReason::OutboxFull)?;
        if !self.outgoing.validation.take(length) {
            return Err(DropReason::NoEndpoint);
        }
        let record = slot.bytes();
        let stamp = Stamp {
            position,
            follows_probe: std::mem::take(&mut self.session.probed),
            time: stamp,
        };
        record[RECORD_HEADER_LEN..FRAMES_AT].copy_from_slice(&stamp.to_bytes());
        let ended = cover(self.outgoing, self.session, now, record);
        self.session.seal(Protocol::Native, record);
        slot.commit_to_run(
            length,
            &destination,
            Some(peer),
            std::mem::take(&mut self.payload),
            gso,
        );
        self.used = FRAMES_AT;
        self.complete = false;
        Ok(ended)
    }
}

/// The form in which a packet is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// In one PACKET frame.
    Whole,
    /// In one PACKET frame that is the last frame of its record.
    Last(Fold),
    /// In parts, in more than one record.
    Parts,
}

/// Returns the number of which the length of a slice is a multiple, where `room` bytes of payload
/// fit a record: a segment, so that a lost datagram costs no part of another, or 1 where that would
/// waste too much.
fn slice_unit(room: usize, gso_size: usize) -> usize {
    let unused = room % gso_size;
    if gso_size <= room && unused * UNUSED <= room {
        gso_size
    } else {
        1
    }
}
