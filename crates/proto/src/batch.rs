//! Packets read from the TUN device, waiting to be sent: one arena, filled by consecutive reads.

use seikan_wire::VNET_HDR_LEN;
use seikan_wire::ethernet::TAGGED_HEADER_LEN;
use std::ops::Range;

/// Maximum length of a read: a virtio-net header and a packet of 64 KiB, possibly with an Ethernet
/// header.
pub const MAX_READ: usize = VNET_HDR_LEN + TAGGED_HEADER_LEN + 65_536;

/// A batch of reads. Each holds a virtio-net header and an IP packet.
#[derive(Debug)]
pub struct PacketBatch {
    arena: Box<[u8]>,
    used: usize,
    packets: Vec<Range<usize>>,
    max_packets: usize,
    congested: bool,
}

impl PacketBatch {
    /// Creates a batch that is full at `max_packets` reads, or when fewer than [`MAX_READ`] of its
    /// `bytes` are left.
    pub fn new(bytes: usize, max_packets: usize) -> PacketBatch {
        PacketBatch {
            arena: vec![0; bytes.max(MAX_READ)].into(),
            used: 0,
            packets: Vec::with_capacity(max_packets),
            max_packets,
            congested: false,
        }
    }

    /// Returns the space for the next read, or `None` when the batch is full.
    pub fn space(&mut self) -> Option<&mut [u8]> {
        if self.packets.len() == self.max_packets || self.arena.len() - self.used < MAX_READ {
            return None;
        }
        Some(&mut self.arena[self.used..self.used + MAX_READ])
    }

    /// Bytes in use, with gaps between packets.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Keeps `length` bytes that were written to [`Self::space`].
    pub fn commit(&mut self, length: usize) {
        self.commit_from(0, length);
    }

    /// Keeps `length` bytes that were written to [`Self::space`], except the first `start` of them.
    pub fn commit_from(&mut self, start: usize, length: usize) {
        self.packets.push(self.used + start..self.used + length);
        // The next read starts on a cache line, which makes copies cheaper.
        self.used = (self.used + length)
            .next_multiple_of(64)
            .min(self.arena.len());
    }

    /// Adds a copy of a packet without offloads. Returns false if there is no space.
    pub fn push(&mut self, packet: &[u8]) -> bool {
        let length = VNET_HDR_LEN + packet.len();
        let Some(space) = self.space().filter(|space| length <= space.len()) else {
            return false;
        };
        space[..VNET_HDR_LEN].fill(0);
        space[VNET_HDR_LEN..length].copy_from_slice(packet);
        self.commit(length);
        true
    }

    /// Number of reads held.
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// True when nothing is held.
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Marks the first packet as having waited too long, so that it will be marked or dropped, see
    /// [`crate::codel`].
    pub fn set_congested(&mut self) {
        self.congested = true;
    }

    /// Whether [`Self::set_congested`] was called.
    pub fn is_congested(&self) -> bool {
        self.congested
    }

    /// Returns and clears the mark of [`Self::set_congested`].
    pub(crate) fn take_congested(&mut self) -> bool {
        std::mem::take(&mut self.congested)
    }

    /// The `i`-th read.
    pub fn packet(&mut self, i: usize) -> &mut [u8] {
        &mut self.arena[self.packets[i].clone()]
    }

    /// Forgets all reads.
    pub fn clear(&mut self) {
        self.packets.clear();
        self.used = 0;
        self.congested = false;
    }
}
