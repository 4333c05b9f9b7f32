//! Sending: batches by UDP_SEGMENT and sendmmsg(2), replayed without UDP_SEGMENT if it is refused.
//!
//! Loads are divided into units, each one message to the kernel: as many segments as one
//! UDP_SEGMENT call may carry, or a single datagram without offload. Rounds of up to [`ROUND`]
//! units are sent in one call. A unit that is refused because of the offload is sent again as
//! datagrams, at the same position, before the units after it: nothing is lost, repeated or
//! reordered.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU8;
use std::os::fd::AsRawFd;

use libc::{c_uint, iovec, mmsghdr, socklen_t};
use nix::errno::Errno;
use seikan_observe::DropReason;

use super::UdpSocket;
use super::control::{RawAddress, SendControl};

/// Maximum number of segments in one UDP_SEGMENT call: `UDP_MAX_SEGMENTS` before Linux 6.9, which
/// has 128.
pub const MAX_GSO_SEGMENTS: usize = 64;

/// Maximum number of bytes in one UDP_SEGMENT call: the largest IP packet without IPv6 and UDP
/// headers.
pub const MAX_GSO_BYTES: usize = 65535 - 40 - 8;

/// Maximum number of messages in one sendmmsg call.
const ROUND: usize = 64;

/// Maximum number of pieces in one sendmmsg call, and in one message (`UIO_MAXIOV`).
const PIECES: usize = 1024;

/// Destination and properties of datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope {
    /// Destination, in the family of the socket.
    pub destination: SocketAddr,
    /// Local address to send from, of the same family; `None`: the kernel chooses.
    pub source: Option<IpAddr>,
    /// TOS or traffic class byte: DSCP and, in the two low bits, ECN.
    pub traffic_class: u8,
    /// TTL or hop limit; `None`: the kernel's default.
    pub hop_limit: Option<NonZeroU8>,
    /// Length in bytes of the datagrams in the payload; the last may be shorter. `None`, or at
    /// least the length of the payload: one datagram.
    pub segment_size: Option<u16>,
}

/// A payload with its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit<'a> {
    /// See [`Envelope::destination`].
    pub destination: SocketAddr,
    /// See [`Envelope::source`].
    pub source: Option<IpAddr>,
    /// See [`Envelope::traffic_class`].
    pub traffic_class: u8,
    /// See [`Envelope::hop_limit`].
    pub hop_limit: Option<NonZeroU8>,
    /// See [`Envelope::segment_size`].
    pub segment_size: Option<u16>,
    /// The datagrams, concatenated. More than [`MAX_GSO_SEGMENTS`] or [`MAX_GSO_BYTES`] need
    /// several messages.
    pub payload: &'a [u8],
}

/// Sending stopped: everything before this position was sent, nothing after it.
#[derive(Debug, thiserror::Error)]
#[error("sending stopped at transmit {transmits}, byte {bytes}: {error}")]
pub struct SendError {
    /// Number of transmits that were sent completely, and therefore the index of the failed one.
    pub transmits: usize,
    /// Number of bytes of the failed transmit that were sent, in whole datagrams: the position to
    /// continue at.
    pub bytes: usize,
    /// `WouldBlock`: the send buffer is full. EMSGSIZE: a datagram exceeds the MTU of the device.
    /// ENOBUFS: no memory. EPERM: a firewall. EINVAL (IPv6) or ENETUNREACH (IPv4): this host no
    /// longer has the address `source`.
    pub error: io::Error,
}

impl SendError {
    /// Returns the drop reason of a datagram that is not sent again.
    pub fn reason(&self) -> DropReason {
        match self.error.raw_os_error() {
            Some(libc::EMSGSIZE) => DropReason::SendTooLarge,
            Some(libc::ENOBUFS) => DropReason::SendNoBuffers,
            _ if self.error.kind() == io::ErrorKind::WouldBlock => DropReason::SendNoBuffers,
            _ => DropReason::SendRefused,
        }
    }
}

impl From<SendError> for io::Error {
    fn from(error: SendError) -> Self {
        error.error
    }
}

impl UdpSocket {
    /// Sends the datagrams of `transmit`.
    ///
    /// # Errors
    /// See [`SendError`]; `transmits` is 0. A full queue of the device is no error: the kernel
    /// drops and counts there (tc(8)).
    #[inline]
    pub fn send(&self, transmit: &Transmit<'_>) -> Result<(), SendError> {
        self.drive(std::slice::from_ref(transmit))
    }

    /// Sends like [`UdpSocket::send`] without waiting, and drops refused datagrams: calls `dropped`
    /// with the reason and the number of bytes. Returns the number of bytes sent.
    pub fn send_or_drop(
        &self,
        transmit: &Transmit<'_>,
        mut dropped: impl FnMut(DropReason, usize),
    ) -> usize {
        let size = transmit.segment_size.map_or(usize::MAX, usize::from);
        let mut rest = *transmit;
        let mut sent = 0;
        while !rest.payload.is_empty() {
            let Err(stopped) = self.send(&rest) else {
                return sent + rest.payload.len();
            };
            sent += stopped.bytes;
            let unsent = rest.payload.get(stopped.bytes..).unwrap_or_default();
            let reason = stopped.reason();
            let lost = match reason {
                // An oversized datagram must not drop the ones after it, as it may be a probe of
                // the path MTU.
                DropReason::SendTooLarge => size.min(unsent.len()),
                _ => unsent.len(),
            };
            dropped(reason, lost);
            rest.payload = unsent.get(lost..).unwrap_or_default();
        }
        sent
    }

    /// Like [`UdpSocket::send`], with the payload gathered from `pieces`, whose boundaries need not
    /// match those of datagrams.
    ///
    /// # Errors
    /// Those of [`UdpSocket::send`]; EINVAL for a datagram of more than 1024 pieces.
    #[inline]
    pub fn send_vectored(
        &self,
        envelope: &Envelope,
        pieces: &[IoSlice<'_>],
    ) -> Result<(), SendError> {
        let length = pieces.iter().map(|piece| piece.len()).sum();
        self.drive(&[Gathered {
            envelope,
            pieces,
            length,
        }])
    }

    /// Sends the datagrams of all `transmits`, in order.
    ///
    /// # Errors
    /// Those of [`UdpSocket::send`]. To continue, omit the part that was sent; to drop the failed
    /// transmit, skip it.
    #[inline]
    pub fn send_batch(&self, transmits: &[Transmit<'_>]) -> Result<(), SendError> {
        self.drive(transmits)
    }

    /// Sends all `loads`, and replays units for which GSO is refused.
    fn drive<L: Load>(&self, loads: &[L]) -> Result<(), SendError> {
        let end = Position {
            load: loads.len(),
            offset: 0,
        };
        let mut at = Position { load: 0, offset: 0 };
        // A connected socket returns the ICMP error of an earlier datagram once, and sends nothing.
        let mut may_be_earlier = self.is_connected;
        while let Err(Stop { errno, unit }) = self.run(loads, &mut at, end, true) {
            if errno != Errno::EAGAIN && std::mem::take(&mut may_be_earlier) {
                continue;
            }
            if !unit.segmented || !refuses_gso(errno) {
                return Err(at.stopped(errno));
            }
            let behind = at.advanced(unit.length, loads[at.load].length());
            let destination = loads[at.load].envelope().destination.ip();
            // If datagrams fail too, the offload is not the cause and stays on.
            self.run(loads, &mut at, behind, false)
                .map_err(|stop| at.stopped(stop.errno))?;
            self.gso.refuse(destination);
        }
        Ok(())
    }

    /// Sends from `at` to `end`, and moves `at` past the sent units. On an error, `at` is the start
    /// of the failed unit.
    fn run<L: Load>(
        &self,
        loads: &[L],
        at: &mut Position,
        end: Position,
        gso: bool,
    ) -> Result<(), Stop> {
        let mut round = Round::new();
        while *at < end {
            round.clear();
            let mut next = *at;
            while next < end {
                let load = &loads[next.load];
                let gso = gso && self.gso.allowed(load.envelope().destination.ip());
                let Some(unit) = round.push(load, next.offset, gso) else {
                    break;
                };
                next = next.advanced(unit.length, load.length());
            }
            let sent = round.send(self.socket.as_raw_fd())?;
            for unit in round.units(sent) {
                *at = at.advanced(unit.length, loads[at.load].length());
            }
        }
        Ok(())
    }
}

/// Whether `errno` can mean that the route or the kernel does not support UDP_SEGMENT: EIO without
/// checksum offload or with IPsec at the egress (`udp_send_skb`); EINVAL if the kernel does not
/// know the control message, the socket sends no checksums, or, on older kernels, a segment exceeds
/// the MTU; EOPNOTSUPP from drivers. The replay decides.
pub(super) fn refuses_gso(errno: Errno) -> bool {
    matches!(errno, Errno::EIO | Errno::EINVAL | Errno::EOPNOTSUPP)
}

/// A payload and its envelope.
trait Load {
    fn envelope(&self) -> Envelope;

    /// Length of the payload in bytes.
    fn length(&self) -> usize;

    /// Writes vectors for `length` bytes from `offset` on. Returns their number, or `None` if
    /// `vectors` is too short.
    fn gather(
        &self,
        offset: usize,
        length: usize,
        vectors: &mut [MaybeUninit<iovec>],
    ) -> Option<usize>;
}

impl Load for Transmit<'_> {
    #[inline]
    fn envelope(&self) -> Envelope {
        Envelope {
            destination: self.destination,
            source: self.source,
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            segment_size: self.segment_size,
        }
    }

    #[inline]
    fn length(&self) -> usize {
        self.payload.len()
    }

    #[inline]
    fn gather(
        &self,
        offset: usize,
        length: usize,
        vectors: &mut [MaybeUninit<iovec>],
    ) -> Option<usize> {
        vectors
            .first_mut()?
            .write(vector(&self.payload[offset..offset + length]));
        Some(1)
    }
}

/// A payload in pieces.
struct Gathered<'a> {
    envelope: &'a Envelope,
    pieces: &'a [IoSlice<'a>],
    /// Length of all pieces together.
    length: usize,
}

impl Load for Gathered<'_> {
    #[inline]
    fn envelope(&self) -> Envelope {
        *self.envelope
    }

    #[inline]
    fn length(&self) -> usize {
        self.length
    }

    #[inline]
    fn gather(
        &self,
        offset: usize,
        length: usize,
        vectors: &mut [MaybeUninit<iovec>],
    ) -> Option<usize> {
        let (mut skip, mut missing, mut used) = (offset, length, 0);
        for piece in self.pieces {
            if missing == 0 {
                break;
            }
            if skip >= piece.len() {
                skip -= piece.len();
                continue;
            }
            let part = &piece[skip..piece.len().min(skip + missing)];
            vectors.get_mut(used)?.write(vector(part));
            used += 1;
            missing -= part.len();
            skip = 0;
        }
        Some(used)
    }
}

/// A position in a list of loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    load: usize,
    offset: usize,
}

impl Position {
    /// Returns the position after `step` bytes, which is in the next load at the end of `length`
    /// bytes.
    #[inline]
    fn advanced(self, step: usize, length: usize) -> Position {
        match self.offset + step {
            offset if offset < length => Position { offset, ..self },
            _ => Position {
                load: self.load + 1,
                offset: 0,
            },
        }
    }

    fn stopped(self, errno: Errno) -> SendError {
        SendError {
            transmits: self.load,
            bytes: self.offset,
            error: errno.into(),
        }
    }
}

/// A part of a load that makes one message.
#[derive(Debug, Clone, Copy)]
struct Unit {
    length: usize,
    /// Whether it has more than one segment and therefore needs UDP_SEGMENT.
    segmented: bool,
}

impl Unit {
    /// Returns the next unit of a load with `rest` bytes left.
    #[inline]
    fn of(rest: usize, segment_size: Option<u16>, gso: bool) -> Unit {
        let size = segment_size.map_or(0, usize::from);
        if size == 0 || rest <= size {
            return Unit {
                length: rest,
                segmented: false,
            };
        }
        let segments = if gso {
            MAX_GSO_SEGMENTS.min(MAX_GSO_BYTES / size)
        } else {
            1
        };
        let length = rest.min(size * segments.max(1));
        Unit {
            length,
            segmented: length > size,
        }
    }
}

/// Why a run stopped early.
struct Stop {
    errno: Errno,
    unit: Unit,
}

/// The messages of one call, on the stack. Only the used part is written.
struct Round {
    slots: [MaybeUninit<Slot>; ROUND],
    headers: [MaybeUninit<mmsghdr>; ROUND],
    pieces: [MaybeUninit<iovec>; PIECES],
    used: usize,
    pieces_used: usize,
    /// A unit that cannot be sent in any form: one datagram of too many pieces.
    rejected: Option<Unit>,
}

struct Slot {
    address: RawAddress,
    control: SendControl,
    unit: Unit,
    /// Number of vectors of the message.
    pieces: usize,
}

impl Round {
    #[inline]
    fn new() -> Self {
        Round {
            slots: [const { MaybeUninit::uninit() }; ROUND],
            headers: [const { MaybeUninit::uninit() }; ROUND],
            pieces: [const { MaybeUninit::uninit() }; PIECES],
            used: 0,
            pieces_used: 0,
            rejected: None,
        }
    }

    #[inline]
    fn clear(&mut self) {
        (self.used, self.pieces_used, self.rejected) = (0, 0, None);
    }

    /// Adds the unit of `load` at `offset`; `None` if the round is full.
    #[inline]
    fn push<L: Load>(&mut self, load: &L, offset: usize, gso: bool) -> Option<Unit> {
        if self.used == ROUND {
            return None;
        }
        let envelope = load.envelope();
        let rest = load.length() - offset;
        let mut unit = Unit::of(rest, envelope.segment_size, gso);
        let vectors = &mut self.pieces[self.pieces_used..];
        let mut count = load.gather(offset, unit.length, vectors);
        if count.is_none() && self.used == 0 && unit.segmented {
            // There are too many pieces for one message. Single datagrams may need fewer.
            unit = Unit::of(rest, envelope.segment_size, false);
            count = load.gather(offset, unit.length, vectors);
        }
        let Some(count) = count else {
            if self.used == 0 {
                self.rejected = Some(unit);
            }
            return None;
        };

        let (address, address_len) = RawAddress::new(envelope.destination);
        let mut control = SendControl::new();
        if let (true, Some(size)) = (unit.segmented, envelope.segment_size) {
            control.push_segment_size(size);
        }
        if envelope.traffic_class != 0 {
            control.push_traffic_class(&envelope.destination, envelope.traffic_class);
        }
        if let Some(hops) = envelope.hop_limit {
            control.push_hop_limit(&envelope.destination, hops);
        }
        if let Some(source) = envelope.source {
            control.push_source(source);
        }
        self.slots[self.used].write(Slot {
            address,
            control,
            unit,
            pieces: count,
        });
        self.headers[self.used].write(header(address_len, count));
        self.used += 1;
        self.pieces_used += count;
        Some(unit)
    }

    /// Sends the round. Returns the number of units sent, at least 1.
    #[inline]
    fn send(&mut self, fd: libc::c_int) -> Result<usize, Stop> {
        if let Some(unit) = self.rejected {
            return Err(Stop {
                errno: Errno::EINVAL,
                unit,
            });
        }
        // Only now are the slots in their final position, and nothing borrows them before the call.
        let mut piece = self.pieces.as_mut_ptr().cast::<iovec>();
        for (slot, header) in self.slots.iter_mut().zip(&mut self.headers).take(self.used) {
            // SAFETY: `push` wrote the first `used` slots and headers.
            let (slot, header) = unsafe { (slot.assume_init_mut(), header.assume_init_mut()) };
            let (control, control_len) = slot.control.raw();
            header.msg_hdr.msg_name = (&raw mut slot.address).cast();
            header.msg_hdr.msg_control = control;
            header.msg_hdr.msg_controllen = control_len as _;
            header.msg_hdr.msg_iov = piece;
            // SAFETY: `push` wrote as many vectors for this header, all in `self.pieces`.
            piece = unsafe { piece.add(slot.pieces) };
        }
        let headers = self.headers.as_mut_ptr().cast::<mmsghdr>();
        let sent = match self.used {
            // SAFETY: the header points to an address, control messages and vectors that live in
            // `self`, and those to payloads that the caller borrows until the round is over.
            1 => unsafe { libc::sendmsg(fd, &raw const (*headers).msg_hdr, libc::MSG_DONTWAIT) }
                .min(1) as libc::c_int,
            // SAFETY: as above, for `used` headers.
            used => unsafe { libc::sendmmsg(fd, headers, used as c_uint, libc::MSG_DONTWAIT as _) },
        };
        match Errno::result(sent) {
            // sendmsg returns the number of bytes, which may be 0.
            Ok(sent) => Ok((sent as usize).max(1)),
            Err(errno) => {
                // SAFETY: a round with nothing in it is rejected above, so the first slot is written.
                let unit = unsafe { self.slots[0].assume_init_ref() }.unit;
                Err(Stop { errno, unit })
            }
        }
    }

    /// Returns the first `count` units.
    #[inline]
    fn units(&self, count: usize) -> impl Iterator<Item = Unit> + '_ {
        let written = &self.slots[..count.min(self.used)];
        // SAFETY: `push` wrote the first `used` slots.
        written
            .iter()
            .map(|slot| unsafe { slot.assume_init_ref() }.unit)
    }
}

/// Returns a header without its pointers, which [`Round::send`] fills in.
#[inline]
fn header(address_len: socklen_t, pieces: usize) -> mmsghdr {
    // SAFETY: mmsghdr is integers and pointers, for which zero bytes are valid.
    let mut header: mmsghdr = unsafe { std::mem::zeroed() };
    header.msg_hdr.msg_namelen = address_len;
    header.msg_hdr.msg_iovlen = pieces as _;
    header
}

/// A vector for sending, which the kernel does not write to.
#[inline]
fn vector(bytes: &[u8]) -> iovec {
    iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// Returns the lengths of the units of a load, for tests.
#[cfg(test)]
pub(super) fn unit_lengths(length: usize, segment_size: Option<u16>, gso: bool) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut at = Position { load: 0, offset: 0 };
    while at.load == 0 {
        let unit = Unit::of(length - at.offset, segment_size, gso);
        lengths.push(unit.length);
        at = at.advanced(unit.length, length);
    }
    lengths
}
