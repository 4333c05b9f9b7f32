//! Tracks the sequence numbers of TCP flows, so that a segment is held back only behind a gap in
//! its own flow.
//!
//! It is unknown to which flows the segments of a lost record belong. But if a segment starts where
//! the last segment of its flow ended, no earlier segment of that flow is missing.

use seikan_wire::ip::IpPacket;
use seikan_wire::tcp;
use std::hash::{DefaultHasher, Hash, Hasher};

/// Number of flows whose next sequence number is known. If two flows have the same slot in the
/// table, the later one takes it, and segments of the other are held back behind any gap.
const FLOWS: usize = 256;

/// A TCP segment that is more than an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    flow: u64,
    start: u32,
    end: u32,
    /// The segment opens its flow.
    syn: bool,
}

impl Segment {
    /// Creates a segment of `payload` bytes that starts `offset` bytes after the sequence number in
    /// the TCP header `header`.
    pub fn new(ip: &IpPacket, header: &[u8], offset: usize, payload: usize) -> Segment {
        let mut flow = DefaultHasher::new();
        (ip.src, ip.dst, &header[..4]).hash(&mut flow);
        let syn = tcp::flags(header) & tcp::SYN != 0;
        let start = tcp::seq(header).wrapping_add(offset as u32);
        Segment {
            flow: flow.finish(),
            start,
            end: start.wrapping_add(payload as u32 + u32::from(syn)),
            syn,
        }
    }
}

/// The next sequence number of each flow.
#[derive(Debug, Default)]
pub struct Flows {
    /// The hash of a flow and the sequence number of its next byte; empty, or [`FLOWS`] entries.
    next: Vec<(u64, u32)>,
}

impl Flows {
    /// Returns whether no earlier segment of the same flow is missing.
    pub fn is_due(&self, segment: &Segment) -> bool {
        let known = self.next.get(segment.flow as usize % FLOWS);
        segment.syn
            || known.is_some_and(|(flow, next)| {
                *flow == segment.flow && !is_after(segment.start, *next)
            })
    }

    /// Records a delivered segment.
    pub fn delivered(&mut self, segment: &Segment) {
        if self.next.is_empty() {
            self.next = vec![(0, 0); FLOWS];
        }
        let known = &mut self.next[segment.flow as usize % FLOWS];
        if known.0 != segment.flow || segment.syn || is_after(segment.end, known.1) {
            *known = (segment.flow, segment.end);
        }
    }

    /// Forgets all flows.
    pub fn clear(&mut self) {
        self.next = Vec::new();
    }
}

/// Compares sequence numbers (RFC 9293, section 3.4).
fn is_after(number: u32, other: u32) -> bool {
    (number.wrapping_sub(other) as i32) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(flow: u64, start: u32, payload: u32) -> Segment {
        Segment {
            flow,
            start,
            end: start.wrapping_add(payload),
            syn: false,
        }
    }

    #[test]
    fn a_segment_is_due_where_its_flow_continues() {
        let mut flows = Flows::default();
        assert!(!flows.is_due(&segment(1, 100, 10)), "nothing is known");
        flows.delivered(&segment(1, u32::MAX - 4, 10));
        assert!(flows.is_due(&segment(1, 5, 10)));
        assert!(flows.is_due(&segment(1, u32::MAX - 4, 10)), "a repeat");
        assert!(!flows.is_due(&segment(1, 6, 10)), "a byte is missing");
        assert!(!flows.is_due(&segment(2, 5, 10)), "another flow");
        // A late segment does not move its flow back.
        flows.delivered(&segment(1, u32::MAX - 4, 3));
        assert!(flows.is_due(&segment(1, 5, 10)));
    }

    #[test]
    fn a_syn_is_always_due_and_starts_its_flow_anew() {
        let mut flows = Flows::default();
        flows.delivered(&segment(1, 1000, 10));
        let syn = Segment {
            syn: true,
            ..segment(1, 7, 1)
        };
        assert!(flows.is_due(&syn));
        flows.delivered(&syn);
        assert!(flows.is_due(&segment(1, 8, 10)));
        assert!(!flows.is_due(&segment(1, 1010, 10)));
    }

    #[test]
    fn flows_share_a_bounded_table() {
        let mut flows = Flows::default();
        for flow in 0..10_000 {
            flows.delivered(&segment(flow, 0, 1));
        }
        assert_eq!(flows.next.len(), FLOWS);
        assert!(!flows.is_due(&segment(1, 1, 1)), "another has its place");
        assert!(flows.is_due(&segment(9_999, 1, 1)));
    }
}
