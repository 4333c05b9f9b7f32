//! Counters of a relay.

use std::fmt;

use seikan_observe::DropCounts;
use seikan_proto::mesh::relay::RelayRefusal;

/// Counts since the start, and current numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Current number of pairs with a port.
    pub pairs: usize,
    /// Current number of members in these pairs.
    pub members: usize,
    /// Current number of authenticated TLS connections.
    pub streams: usize,
    /// TLS connections that were rejected, or that showed no valid ticket in time.
    pub turned_away: u64,
    /// Forwarded datagrams.
    pub datagrams: u64,
    /// Forwarded bytes, without UDP and IP headers.
    pub bytes: u64,
    /// Dropped datagrams, by reason.
    pub drops: DropCounts,
    /// Datagrams, or batches joined by GRO, that the kernel dropped at full receive buffers.
    pub receive_queue_drops: u64,
    /// Granted requests, including ordinary STUN binding requests.
    pub answered: u64,
    /// Refused requests, in the order of [`REFUSALS`].
    refused: [u64; REFUSALS.len()],
}

/// All reasons of a refusal.
const REFUSALS: [RelayRefusal; 5] = [
    RelayRefusal::Malformed,
    RelayRefusal::Unauthorized,
    RelayRefusal::Stale,
    RelayRefusal::Quota,
    RelayRefusal::Full,
];

impl Counters {
    /// Counts a refused request.
    pub fn refuse(&mut self, refusal: RelayRefusal) {
        let index = REFUSALS.iter().position(|known| *known == refusal);
        if let Some(count) = index.and_then(|index| self.refused.get_mut(index)) {
            *count += 1;
        }
    }

    /// Number of refused requests, by reason.
    pub fn refused(&self) -> impl Iterator<Item = (RelayRefusal, u64)> {
        REFUSALS.into_iter().zip(self.refused)
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counters {
            datagrams, bytes, ..
        } = self;
        write!(f, "{datagrams} datagrams forwarded ({bytes} bytes)")?;
        for (reason, count) in self.drops.nonzero() {
            write!(f, ", {count} dropped as {}", reason.name())?;
        }
        if self.receive_queue_drops > 0 {
            let count = self.receive_queue_drops;
            write!(f, ", {count} dropped at full receive buffers")?;
        }
        if self.turned_away > 0 {
            let count = self.turned_away;
            write!(f, ", {count} connections turned away")?;
        }
        for (refusal, count) in self.refused().filter(|(_, count)| *count > 0) {
            write!(f, ", {count} requests refused with {}", refusal.code())?;
        }
        Ok(())
    }
}
