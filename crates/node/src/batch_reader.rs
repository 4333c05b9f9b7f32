//! Reads the TUN device, or a gateway's interface, in batches, and measures how long packets have queued in it.
//!
//! A batch is small, so that its packets are still in the cache when they are sealed; the rest waits in the
//! device's queue. Once that queue has not been empty for a while ([`Codel`]), all of it is read at once, up to
//! [`BACKLOG_BATCHES`] batches, and sent in order: the time which that takes is the minimum queueing delay of
//! the last packets.

use seikan_proto::batch::PacketBatch;
use seikan_proto::codel::Codel;
use seikan_proto::time::Instant;
use std::io;
use std::ops::Range;

/// Bytes read from the TUN device before they are sent: two super-packets, so that the second arrives while the
/// first is handled, and still less than the second-level cache.
const READ_BYTES: usize = 3 * 65_536;
/// Reads of small packets per batch.
const READ_PACKETS: usize = 128;
/// Maximum number of batches read at once to measure the delay: 8 MB, more than the target delay at 12 Gbit/s.
const BACKLOG_BATCHES: usize = 42;
/// The same with a limit of the rate, as a multiple of its batches: twice the target delay ([`Codel`]). At least two
/// batches are read.
const LIMITED_BACKLOG: usize = 10;

/// `EBADFD` of Linux: file descriptor in bad state.
const EBADFD: i32 = 77;

/// Batches between a device and the tunnel.
#[derive(Debug)]
pub(crate) struct BatchReader {
    /// The first `filled` batches contain packets; those before `next` were returned already.
    batches: Vec<PacketBatch>,
    filled: usize,
    next: usize,
    /// Time at which the backlog was read.
    taken: Instant,
    /// The queue was found empty and no batch waits here, so there is no backlog however long nothing arrives.
    drained: bool,
    codel: Codel,
    /// Maximum bytes of a batch; a longer packet is a batch of its own.
    limit: usize,
}

impl BatchReader {
    /// Creates a reader whose batches have at most `limit` bytes, or a single packet.
    pub fn new(limit: usize) -> BatchReader {
        BatchReader {
            limit,
            batches: Vec::new(),
            filled: 0,
            next: 0,
            taken: Instant::BOOT,
            drained: true,
            codel: Codel::default(),
        }
    }
}

/// Why reading stopped.
#[derive(PartialEq)]
enum Stop {
    Full,
    Empty,
    Gone,
}

impl BatchReader {
    /// Whether a batch was read that was not returned yet.
    pub fn waits(&self) -> bool {
        self.next < self.filled
    }

    /// Returns the next batch, reading if necessary, and whether the device is gone. `read` gets the space for
    /// a packet behind its virtio-net header and returns the range that it has filled.
    pub fn next(
        &mut self,
        read: impl FnMut(&mut [u8]) -> io::Result<Range<usize>>,
        now: Instant,
    ) -> (&mut PacketBatch, bool) {
        // If the device is gone, the next read finds that again, after its last packets were returned.
        let gone = !self.waits() && self.take(read, now) == Stop::Gone && self.filled == 1;
        let last_of_many = self.filled > 1 && self.next + 1 == self.filled;
        let batch = &mut self.batches[self.next];
        self.next += 1;
        if last_of_many && self.codel.measured(now.duration_since(self.taken), now) {
            batch.set_congested();
        }
        (batch, gone)
    }

    /// Reads one batch, or a whole backlog when its delay is to be measured.
    fn take(
        &mut self,
        mut read: impl FnMut(&mut [u8]) -> io::Result<Range<usize>>,
        now: Instant,
    ) -> Stop {
        if self.drained {
            self.codel.emptied(now);
            // The memory of a backlog is freed after it.
            self.batches.truncate(1);
        }
        let most = if self.codel.is_due(now) {
            BACKLOG_BATCHES
        } else {
            1
        };
        (self.filled, self.next, self.taken) = (0, 0, now);
        // With a limit, what is read is sent slowly, and what arrives behind it waits as long.
        let most_bytes = self.limit.saturating_mul(LIMITED_BACKLOG);
        let (mut stop, mut bytes) = (Stop::Full, 0);
        while stop == Stop::Full && self.filled < most && (self.filled < 2 || bytes < most_bytes) {
            if self.filled == self.batches.len() {
                let batch = PacketBatch::new(READ_BYTES, READ_PACKETS);
                self.batches.push(batch);
            }
            let batch = &mut self.batches[self.filled];
            batch.clear();
            stop = fill(batch, self.limit, &mut read);
            bytes += batch.used();
            // The first may be empty, which means that nothing was read.
            if self.filled == 0 || !batch.is_empty() {
                self.filled += 1;
            }
        }
        self.drained = stop == Stop::Empty && self.filled == 1;
        stop
    }
}

/// Reads until the batch is full or the queue is empty.
fn fill(
    batch: &mut PacketBatch,
    limit: usize,
    read: &mut impl FnMut(&mut [u8]) -> io::Result<Range<usize>>,
) -> Stop {
    while (batch.is_empty() || batch.used() < limit)
        && let Some(space) = batch.space()
    {
        match read(space) {
            Ok(range) => batch.commit_from(range.start, range.end),
            // The device was deleted (Linux drivers/net/tun.c).
            Err(error) if error.raw_os_error() == Some(EBADFD) => return Stop::Gone,
            Err(_) => return Stop::Empty,
        }
    }
    Stop::Full
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A queue that holds `left` packets of 100 bytes.
    fn queue(left: &mut usize) -> impl FnMut(&mut [u8]) -> io::Result<Range<usize>> {
        |_| match left.checked_sub(1) {
            Some(rest) => {
                *left = rest;
                Ok(0..100)
            }
            None => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_millis(ms)
    }

    /// A reader that has read a part of a queue at 0 ms and left the rest in it.
    fn behind() -> BatchReader {
        let mut reader = BatchReader::new(usize::MAX);
        reader.next(queue(&mut 1000), at(0));
        reader
    }

    /// Reads a backlog of 300 packets at 200 ms, each further batch `step` ms later. Returns the sizes of the
    /// batches, and which were congested.
    fn backlog(reader: &mut BatchReader, step: u64) -> Vec<(usize, bool)> {
        let (mut left, mut found) = (300, Vec::new());
        for i in 0..3 {
            let (batch, gone) = reader.next(queue(&mut left), at(200 + i * step));
            found.push((batch.len(), batch.is_congested()));
            assert!(!gone);
        }
        assert!(!reader.waits());
        found
    }

    #[test]
    fn the_end_of_a_backlog_that_took_too_long_is_congested() {
        let mut reader = behind();
        let found = backlog(&mut reader, 3);
        assert_eq!(found, [(128, false), (128, false), (44, true)]);
    }

    #[test]
    fn a_backlog_that_is_soon_sent_is_not() {
        let mut reader = behind();
        let found = backlog(&mut reader, 2);
        assert_eq!(found, [(128, false), (128, false), (44, false)]);
    }

    #[test]
    fn a_limited_backlog_is_short() {
        let mut reader = BatchReader::new(500);
        reader.next(queue(&mut 1000), at(0));
        let mut left = 300;
        let mut sizes = Vec::new();
        loop {
            let (batch, _) = reader.next(queue(&mut left), at(200));
            sizes.push(batch.len());
            if !reader.waits() {
                break;
            }
        }
        // Packets of 100 bytes take 128 with their gaps: four of them reach the limit of a batch.
        assert_eq!(sizes, [4; 10]);
    }

    #[test]
    fn a_burst_after_a_time_without_packets_is_left_where_it_is() {
        let mut reader = BatchReader::new(usize::MAX);
        reader.next(queue(&mut 5), at(0));
        let mut left = 300;
        let (batch, _) = reader.next(queue(&mut left), at(200));
        assert_eq!(batch.len(), 128);
        assert!(!reader.waits());
        assert_eq!(left, 172);
    }

    #[test]
    fn a_backlog_has_an_end() {
        let mut reader = behind();
        let mut left = 1_000_000;
        reader.next(queue(&mut left), at(200));
        assert_eq!(left, 1_000_000 - BACKLOG_BATCHES * READ_PACKETS);
    }

    #[test]
    fn a_deleted_device_is_reported_after_its_backlog() {
        let mut reader = behind();
        let mut left = 200;
        let mut read = |_: &mut [u8]| match left {
            0 => Err(io::Error::from_raw_os_error(EBADFD)),
            _ => {
                left -= 1;
                Ok(0..100)
            }
        };
        let found = [200, 201, 202].map(|ms| {
            let (batch, gone) = reader.next(&mut read, at(ms));
            (batch.len(), gone)
        });
        assert_eq!(found, [(128, false), (72, false), (0, true)]);
    }

    #[test]
    fn a_deleted_device_is_reported_after_its_packets() {
        let mut reader = BatchReader::new(usize::MAX);
        let mut reads = 0;
        let (batch, gone) = reader.next(
            |_| {
                reads += 1;
                if reads == 1 {
                    Ok(0..100)
                } else {
                    Err(io::Error::from_raw_os_error(EBADFD))
                }
            },
            at(0),
        );
        assert_eq!((batch.len(), gone), (1, true));
    }
}
