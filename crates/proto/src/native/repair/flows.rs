//! Tracks the sequence numbers of TCP flows, so that a segment is held back only behind a gap in
//! its own flow.
//!
//! It is unknown to which flows the segments of a lost record belong. But if a segment starts where
//! the last segment of its flow ended, no earlier segment of that flow is missing. Segments of one
//! flow never overtake each other.

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

/// The next sequence number of each flow, and which flows wait.
#[derive(Debug, Default)]
pub struct Flows {
    /// Empty, or [`FLOWS`] entries.
    known: Vec<Flow>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    hash: u64,
    /// Sequence number of the next byte.
    next: u32,
    /// Counter of the newest record with a segment of this flow that was held back.
    held: Option<u64>,
}

impl Flows {
    /// Returns whether no earlier segment of the same flow is missing, and none is held back, if
    /// records from the counter `edge` on are. A repeat has to wait for these as well: TCP would
    /// take them for lost, because a later transmission has arrived before them (RACK, RFC 8985).
    pub fn is_due(&self, segment: &Segment, edge: u64) -> bool {
        let known = self.known.get(segment.flow as usize % FLOWS);
        segment.syn
            || known.is_some_and(|flow| {
                flow.hash == segment.flow
                    && !is_after(segment.start, flow.next)
                    && flow.held.is_none_or(|counter| counter < edge)
            })
    }

    /// Records that a segment in the record with this counter is held back.
    pub fn held(&mut self, segment: &Segment, counter: u64) {
        let known = self.known.get_mut(segment.flow as usize % FLOWS);
        if let Some(flow) = known.filter(|flow| flow.hash == segment.flow) {
            flow.held = flow.held.max(Some(counter));
        }
    }

    /// Records a delivered segment.
    pub fn delivered(&mut self, segment: &Segment) {
        if self.known.is_empty() {
            self.known = vec![Flow::default(); FLOWS];
        }
        let flow = &mut self.known[segment.flow as usize % FLOWS];
        if flow.hash != segment.flow || segment.syn {
            *flow = Flow {
                hash: segment.flow,
                next: segment.end,
                held: None,
            };
        } else if is_after(segment.end, flow.next) {
            flow.next = segment.end;
        }
    }

    /// Nothing is held back any more: counters begin anew.
    pub fn release(&mut self) {
        self.known.iter_mut().for_each(|flow| flow.held = None);
    }

    /// Forgets all flows.
    pub fn clear(&mut self) {
        self.known = Vec::new();
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
        assert!(!flows.is_due(&segment(1, 100, 10), 0), "nothing is known");
        flows.delivered(&segment(1, u32::MAX - 4, 10));
        assert!(flows.is_due(&segment(1, 5, 10), 0));
        assert!(flows.is_due(&segment(1, u32::MAX - 4, 10), 0), "a repeat");
        assert!(!flows.is_due(&segment(1, 6, 10), 0), "a byte is missing");
        assert!(!flows.is_due(&segment(2, 5, 10), 0), "another flow");
        // A late segment does not move its flow back.
        flows.delivered(&segment(1, u32::MAX - 4, 3));
        assert!(flows.is_due(&segment(1, 5, 10), 0));
    }

    #[test]
    fn a_repeat_waits_for_segments_that_are_held_back() {
        let mut flows = Flows::default();
        flows.delivered(&segment(1, 100, 10));
        flows.held(&segment(1, 120, 10), 7);
        assert!(!flows.is_due(&segment(1, 100, 10), 7));
        assert!(!flows.is_due(&segment(1, 110, 10), 7));
        assert!(flows.is_due(&segment(1, 100, 10), 8), "all are released");
        flows.release();
        assert!(flows.is_due(&segment(1, 100, 10), 0));
    }

    #[test]
    fn a_syn_is_always_due_and_starts_its_flow_anew() {
        let mut flows = Flows::default();
        flows.delivered(&segment(1, 1000, 10));
        let syn = Segment {
            syn: true,
            ..segment(1, 7, 1)
        };
        assert!(flows.is_due(&syn, 0));
        flows.delivered(&syn);
        assert!(flows.is_due(&segment(1, 8, 10), 0));
        assert!(!flows.is_due(&segment(1, 1010, 10), 0));
    }

    #[test]
    fn flows_share_a_bounded_table() {
        let mut flows = Flows::default();
        for flow in 0..10_000 {
            flows.delivered(&segment(flow, 0, 1));
        }
        assert_eq!(flows.known.len(), FLOWS);
        assert!(!flows.is_due(&segment(1, 1, 1), 0), "another has its place");
        assert!(flows.is_due(&segment(9_999, 1, 1), 0));
    }
}
