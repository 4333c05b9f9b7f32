//! What a relay has done.

use std::fmt;

use seikan_observe::DropCounts;
use seikan_proto::mesh::relay::RelayRefusal;

/// What it has done since it started, and how many there are now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pairs that have a port.
    pub pairs: usize,
    /// Members in these.
    pub members: usize,
    /// Connections by TLS of members.
    pub streams: usize,
    /// Connections that there was no room for, or that showed no good ticket in time.
    pub turned_away: u64,
    /// Datagrams that went on to the other side.
    pub datagrams: u64,
    /// Bytes of these, without headers of UDP and IP.
    pub bytes: u64,
    /// Datagrams that did not, by reason.
    pub drops: DropCounts,
    /// Datagrams (or what GRO had joined of them) that the kernel dropped at full receive buffers.
    pub receive_queue_drops: u64,
    /// Requests that were granted, those of ordinary STUN among them.
    pub answered: u64,
    /// Requests that were refused, in the order of [`REFUSALS`].
    refused: [u64; REFUSALS.len()],
}

/// Why a relay refuses.
const REFUSALS: [RelayRefusal; 5] = [
    RelayRefusal::Malformed,
    RelayRefusal::Unauthorized,
    RelayRefusal::Stale,
    RelayRefusal::Quota,
    RelayRefusal::Full,
];

impl Counters {
    /// Counts a request that was refused.
    pub fn refuse(&mut self, refusal: RelayRefusal) {
        let place = REFUSALS.iter().position(|known| *known == refusal);
        if let Some(count) = place.and_then(|place| self.refused.get_mut(place)) {
            *count += 1;
        }
    }

    /// How often requests were refused, by reason.
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
