//! Packet accounting: counters per direction, per peer and for the whole interface.
//!
//! Packets are inner IP packets. A super-packet counts as its number of segments, so both ends
//! count the same whatever offloads they use.

use crate::{DropCounts, Stopped};
use serde::Serialize;

/// One direction of one peer or interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirectionCounters {
    /// Inner packets that entered.
    pub packets_in: u64,
    /// Inner packets that left.
    pub packets_out: u64,
    /// Inner bytes that left.
    pub bytes_out: u64,
    /// Packets that ended here as intended (keepalives, probes, reports, handshakes).
    pub consumed: u64,
    /// Packets that wait for a handshake, for their time to be sent, or for missing fragments.
    pub pending: u64,
    /// Packets dropped, by reason.
    pub drops: DropCounts,
}

impl DirectionCounters {
    /// `in - out - consumed - pending - drops`: zero when every packet is accounted for.
    pub fn unaccounted(&self) -> i128 {
        i128::from(self.packets_in)
            - i128::from(self.packets_out)
            - i128::from(self.consumed)
            - i128::from(self.pending)
            - i128::from(self.drops.total())
    }
}

impl DirectionCounters {
    /// Counts a batch of `packets`, with `bytes` in all, that left; or the part of it that left,
    /// and the rest as dropped.
    pub fn leave(&mut self, packets: u64, bytes: u64, result: Result<(), Stopped>) {
        let left = result.map_or_else(|stopped| stopped.done.min(packets), |()| packets);
        self.packets_out += left;
        // Packets of a batch have one length, except for the last.
        self.bytes_out += bytes * left / packets.max(1);
        if let Err(stopped) = result {
            self.drops.add(stopped.reason, packets - left);
        }
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &DirectionCounters) {
        self.packets_in += other.packets_in;
        self.packets_out += other.packets_out;
        self.bytes_out += other.bytes_out;
        self.consumed += other.consumed;
        self.pending += other.pending;
        for (reason, packets) in other.drops.nonzero() {
            self.drops.add(reason, packets);
        }
    }
}

/// Handshakes of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Handshakes {
    /// Initiations sent.
    pub initiations_sent: u64,
    /// Valid initiations received.
    pub initiations_received: u64,
    /// Sessions established.
    pub completed: u64,
}

/// Counters of a peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PeerCounters {
    /// From the TUN device to the peer.
    pub outbound: DirectionCounters,
    /// From the peer to the TUN device.
    pub inbound: DirectionCounters,
    /// Outer bytes sent, UDP payload.
    pub sent_bytes: u64,
    /// Outer bytes received and authenticated, UDP payload.
    pub received_bytes: u64,
    /// Handshakes.
    pub handshakes: Handshakes,
}

impl PeerCounters {
    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &PeerCounters) {
        self.outbound.add(&other.outbound);
        self.inbound.add(&other.inbound);
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.handshakes.initiations_sent += other.handshakes.initiations_sent;
        self.handshakes.initiations_received += other.handshakes.initiations_received;
        self.handshakes.completed += other.handshakes.completed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DropReason;

    #[test]
    fn a_batch_that_stops_has_left_in_part() {
        let reason = DropReason::SendNoBuffers;
        let results = [Ok(()), Err(Stopped { done: 3, reason }), Err(reason.into())];
        let counted = results.map(|result| {
            let mut c = DirectionCounters::default();
            c.leave(8, 800, result);
            (c.packets_out, c.bytes_out, c.drops.get(reason))
        });
        assert_eq!(counted, [(8, 800, 0), (3, 300, 5), (0, 0, 8)]);
    }

    #[test]
    fn the_ledger_closes_when_every_packet_has_a_fate() {
        let mut c = DirectionCounters {
            packets_in: 10,
            packets_out: 6,
            consumed: 1,
            pending: 1,
            ..Default::default()
        };
        c.drops.add(DropReason::BadTag, 1);
        assert_eq!(c.unaccounted(), 1);
        c.drops.add(DropReason::NoRoute, 1);
        assert_eq!(c.unaccounted(), 0);
    }
}
