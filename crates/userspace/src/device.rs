//! The device that smoltcp sees: one packet in at a time, packets out to the socket pair.

use crate::packet;
use crate::sender::{self, Sent};
use nix::errno::Errno;
use seikan_observe::DropReason;
use seikan_sys::tun::{READ_BUFFER_LEN, VNET_HEADER_LEN};
use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium};
use smoltcp::time::Instant;
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Maximum length of an IP packet in bytes, super-packets included: the length field has 16 bits.
const MAX_PACKET: usize = 65_535;
/// Maximum number of packets that are kept while the worker is behind. They are answers to received
/// packets and resets; data waits in the send buffers instead.
const MAX_PENDING: usize = 256;

/// One end of the socket pair, as a device of smoltcp.
#[derive(Debug)]
pub(crate) struct Device {
    fd: OwnedFd,
    mtu: usize,
    /// MSS of the connection that is being handled: the size of the segments of a super-packet.
    pub mss: u16,
    /// Header and packet that were read last.
    inbox: Vec<u8>,
    /// The packet in `inbox` that [`phy::Device::receive`] returns next.
    arrived: Option<Range<usize>>,
    out: Vec<u8>,
    pending: VecDeque<Vec<u8>>,
    /// Whether smoltcp may send while the worker is behind.
    pub keeps: bool,
    /// Ranges of sequence numbers to leave out when smoltcp sends them again.
    pub left_out: Vec<sender::Range>,
    /// TCP segments that were sent since smoltcp was polled last.
    pub sent: Vec<Sent>,
    /// The sequence number after the last one that smoltcp has sent, whether or not it was left
    /// out.
    pub position: Option<u32>,
    /// Packets written.
    pub packets_out: u64,
    /// Packets dropped because the worker is behind.
    pub dropped: u64,
}

/// Outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// Header and packet, of this length.
    Packet(usize),
    /// Nothing waits.
    Empty,
    /// The other end is closed.
    Closed,
}

impl Device {
    pub fn new(fd: OwnedFd, mtu: usize) -> Device {
        Device {
            fd,
            mtu,
            mss: packet::max_segment(mtu, true),
            inbox: vec![0; READ_BUFFER_LEN],
            arrived: None,
            out: vec![0; VNET_HEADER_LEN + MAX_PACKET],
            pending: VecDeque::new(),
            keeps: false,
            left_out: Vec::new(),
            sent: Vec::new(),
            position: None,
            packets_out: 0,
            dropped: 0,
        }
    }

    /// Reads one packet with its header into [`Device::inbox`].
    pub fn read(&mut self) -> Read {
        loop {
            return match nix::unistd::read(&self.fd, &mut self.inbox) {
                Ok(0) => Read::Closed,
                Ok(length) => Read::Packet(length),
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => Read::Empty,
                Err(_) => Read::Closed,
            };
        }
    }

    /// Returns the buffer of the packet that was read last, header first.
    pub fn inbox(&mut self) -> &mut [u8] {
        &mut self.inbox
    }

    /// Makes the part of the inbox the packet that smoltcp receives next.
    pub fn arrive(&mut self, packet: Range<usize>) {
        self.arrived = Some(packet);
    }

    /// Whether the worker is behind, so that data has to wait.
    pub fn is_blocked(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Writes waiting packets; returns whether all are gone.
    pub fn flush(&mut self) -> bool {
        while let Some(packet) = self.pending.front() {
            match write(self.fd.as_fd(), packet) {
                Written::Later => return false,
                Written::Sent => self.packets_out += 1,
                Written::Refused => self.dropped += 1,
            }
            self.pending.pop_front();
        }
        true
    }

    /// Sends a packet with its header that was built elsewhere.
    ///
    /// # Errors
    /// [`DropReason::TunWriteRefused`] if the worker is too far behind.
    pub fn send(&mut self, packet: &[u8]) -> Result<(), DropReason> {
        let mut port = self.port();
        if port.send(packet) {
            Ok(())
        } else {
            Err(DropReason::TunWriteRefused)
        }
    }

    fn port(&mut self) -> TxToken<'_> {
        self.ports().1
    }

    fn ports(&mut self) -> (&[u8], TxToken<'_>) {
        let token = TxToken {
            fd: self.fd.as_fd(),
            mtu: self.mtu,
            mss: self.mss,
            out: &mut self.out,
            pending: &mut self.pending,
            left_out: &self.left_out,
            sent: &mut self.sent,
            position: &mut self.position,
            packets_out: &mut self.packets_out,
            dropped: &mut self.dropped,
        };
        (&self.inbox, token)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Outcome of writing a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Written {
    Sent,
    /// The other end is behind. An event follows when there is space.
    Later,
    /// The packet is too large for the socket, there is no memory, or the other end is closed;
    /// reading detects a closed end.
    Refused,
}

fn write(fd: BorrowedFd<'_>, packet: &[u8]) -> Written {
    loop {
        return match nix::unistd::write(fd, packet) {
            Ok(_) => Written::Sent,
            Err(Errno::EINTR) => continue,
            Err(Errno::EAGAIN) => Written::Later,
            Err(_) => Written::Refused,
        };
    }
}

impl phy::Device for Device {
    type RxToken<'a> = RxToken<'a>;
    type TxToken<'a> = TxToken<'a>;

    fn receive(&mut self, _: Instant) -> Option<(RxToken<'_>, TxToken<'_>)> {
        let range = self.arrived.take()?;
        let (inbox, token) = self.ports();
        let packet = inbox.get(range)?;
        Some((RxToken { packet }, token))
    }

    fn transmit(&mut self, _: Instant) -> Option<TxToken<'_>> {
        (self.keeps || !self.is_blocked()).then(|| self.port())
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut caps = DeviceCapabilities::default();
        caps.medium = Medium::Ip;
        // Packets of the tunnel are smaller: `packet::complete` lowers the announced MSS, and the
        // peer's MSS is lowered before smoltcp reads it. An MTU of this size is needed because
        // smoltcp 0.14 drops IPv6 super-packets that exceed it.
        caps.max_transmission_unit = MAX_PACKET;
        caps.segmentation.tcpv4 = NonZeroUsize::new(MAX_PACKET);
        caps.segmentation.tcpv6 = NonZeroUsize::new(MAX_PACKET);
        // Verified by `packet::classify`, written by `packet::complete`.
        caps.checksum.tcp = Checksum::None;
        caps.checksum.udp = Checksum::None;
        caps
    }
}

/// The packet that arrived.
#[derive(Debug)]
pub(crate) struct RxToken<'a> {
    packet: &'a [u8],
}

impl phy::RxToken for RxToken<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.packet)
    }
}

/// Room for a packet to send.
#[derive(Debug)]
pub(crate) struct TxToken<'a> {
    fd: BorrowedFd<'a>,
    mtu: usize,
    mss: u16,
    out: &'a mut Vec<u8>,
    pending: &'a mut VecDeque<Vec<u8>>,
    left_out: &'a [sender::Range],
    sent: &'a mut Vec<Sent>,
    position: &'a mut Option<u32>,
    packets_out: &'a mut u64,
    dropped: &'a mut u64,
}

impl TxToken<'_> {
    /// Sends a TCP segment that occupies sequence numbers, except for the ranges in `left_out`.
    fn send_numbers(&mut self, packet: &[u8], sent: Sent) {
        let whole = (sent.seq, sent.seq.wrapping_add(sent.length));
        *self.position = Some(whole.1);
        let pieces = sender::subtract(whole, self.left_out);
        if pieces == [whole] {
            self.sent.push(sent);
            return self.send_or_drop(packet);
        }
        for piece in pieces {
            let mut cut = packet::cut(packet, piece);
            let sent = packet::complete(&mut cut, self.mtu, self.mss);
            self.sent.extend(sent);
            self.send_or_drop(&cut);
        }
    }

    fn send_or_drop(&mut self, packet: &[u8]) {
        if !self.send(packet) {
            *self.dropped += 1;
        }
    }

    /// Writes or keeps a packet with its header; returns false if it was dropped.
    fn send(&mut self, packet: &[u8]) -> bool {
        let written = if self.pending.is_empty() {
            write(self.fd, packet)
        } else {
            Written::Later
        };
        match written {
            Written::Sent => *self.packets_out += 1,
            Written::Later if self.pending.len() < MAX_PENDING => {
                self.pending.push_back(packet.to_vec());
            }
            Written::Later | Written::Refused => return false,
        }
        true
    }
}

impl phy::TxToken for TxToken<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(mut self, length: usize, f: F) -> R {
        let mut out = std::mem::take(self.out);
        let result = f(&mut out[VNET_HEADER_LEN..VNET_HEADER_LEN + length]);
        let packet = &mut out[..VNET_HEADER_LEN + length];
        let sent = packet::complete(packet, self.mtu, self.mss);
        match sent {
            Some(sent) if sent.length > 0 => self.send_numbers(packet, sent),
            _ => self.send_or_drop(packet),
        }
        *self.out = out;
        result
    }
}
