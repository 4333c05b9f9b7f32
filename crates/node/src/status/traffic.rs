//! Counters of a peer, or of all peers.

use seikan_observe::{DirectionCounters, DropCounts, Histogram, PeerCounters};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counters of both directions and of handshakes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Traffic {
    /// Outer bytes sent: the payload of UDP.
    pub sent_bytes: u64,
    /// Outer bytes received and authenticated.
    pub received_bytes: u64,
    /// From the TUN device to the network.
    pub outbound: Direction,
    /// From the network to the TUN device.
    pub inbound: Direction,
    /// Handshakes.
    pub handshakes: Handshakes,
}

/// One direction. `packets_in = packets_out + consumed + pending + drops + unaccounted`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Direction {
    /// Inner packets that entered; a super-packet counts as its segments.
    pub packets_in: u64,
    /// Inner packets that left.
    pub packets_out: u64,
    /// Inner bytes that left.
    pub bytes_out: u64,
    /// Packets consumed here as intended: keepalives, probes, reports, handshakes.
    pub consumed: u64,
    /// Packets that wait for a handshake or for missing parts.
    pub pending: u64,
    /// Packets that were not accounted for. A value other than 0 is a defect of Seikan.
    pub unaccounted: i64,
    /// Packets dropped, by the name of the reason; zero counts are left out.
    pub drops: BTreeMap<String, u64>,
}

/// Handshakes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Handshakes {
    /// Initiations sent.
    pub initiations_sent: u64,
    /// Valid initiations received.
    pub initiations_received: u64,
    /// Sessions established.
    pub completed: u64,
}

/// Number of packets or datagrams per system call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Batches {
    /// Reads of the TUN device per batch; each may be a super-packet.
    pub packets_per_read: Distribution,
    /// Datagrams per send.
    pub datagrams_per_send: Distribution,
    /// Datagrams per receive.
    pub datagrams_per_receive: Distribution,
    /// Packets per write to the TUN device.
    pub packets_per_write: Distribution,
}

/// A distribution of sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Distribution {
    /// Number of batches.
    pub count: u64,
    /// Arithmetic mean of the sizes; 0 without batches.
    pub mean: f64,
    /// Number of batches per size class; empty classes are left out.
    pub buckets: Vec<Bucket>,
}

/// A class: sizes from a power of two up to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bucket {
    /// Smallest size.
    pub from: u64,
    /// Number of batches of this size up to twice as much.
    pub count: u64,
}

pub(super) fn traffic(counters: &PeerCounters) -> Traffic {
    Traffic {
        sent_bytes: counters.sent_bytes,
        received_bytes: counters.received_bytes,
        outbound: direction(&counters.outbound),
        inbound: direction(&counters.inbound),
        handshakes: Handshakes {
            initiations_sent: counters.handshakes.initiations_sent,
            initiations_received: counters.handshakes.initiations_received,
            completed: counters.handshakes.completed,
        },
    }
}

pub(crate) fn direction(counters: &DirectionCounters) -> Direction {
    Direction {
        packets_in: counters.packets_in,
        packets_out: counters.packets_out,
        bytes_out: counters.bytes_out,
        consumed: counters.consumed,
        pending: counters.pending,
        unaccounted: i64::try_from(counters.unaccounted()).unwrap_or(i64::MAX),
        drops: drops(&counters.drops),
    }
}

pub(super) fn drops(counts: &DropCounts) -> BTreeMap<String, u64> {
    let named = counts.nonzero();
    named.map(|(r, n)| (r.name().to_owned(), n)).collect()
}

pub(crate) fn distribution(histogram: &Histogram) -> Distribution {
    let filled = histogram.buckets().filter(|(_, count)| *count > 0);
    Distribution {
        count: histogram.count(),
        mean: histogram.mean(),
        buckets: filled.map(|(from, count)| Bucket { from, count }).collect(),
    }
}
