//! The flows of devices: connection tracking for replies, and TCP statistics of both sides.
//!
//! The gateway is in the middle of each connection and can tell on which side an event happens (the
//! passive midpoint of RFC 7799). A segment that passes the gateway twice was lost behind it; a
//! segment that is missing at the gateway was lost before it. The time until data is acknowledged
//! is the round-trip time of the receiver's side.
//!
//! Memory is bounded: flows live in two generations. When the younger one is old enough, it becomes
//! the older one, and the older one is dropped, except for flows used since. When it is full, this
//! happens to the flows of one device: the one that has the most.

use crate::time::Instant;
use seikan_wire::tcp;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

/// Maximum number of flows in one generation, of all devices.
const GENERATION_FLOWS: usize = 16_384;
/// Length of a generation. A flow that is silent for one to two generations is dropped.
const GENERATION: Duration = Duration::from_secs(300);

/// One flow of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// The device, by its position in the table.
    pub device: u32,
    /// The overlay address at the other end.
    pub remote: IpAddr,
    /// The transport protocol, by its IANA number.
    pub protocol: u8,
    /// The device's port, or 0.
    pub device_port: u16,
    /// The other end's port, or 0.
    pub remote_port: u16,
}

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device into the overlay.
    Out,
    /// From the overlay to the device.
    In,
}

/// State of a flow.
#[derive(Clone, Debug, Default)]
pub struct Flow {
    out: Half,
    inward: Half,
}

/// One direction of a TCP connection: sequence numbers as seen at the gateway.
#[derive(Clone, Copy, Debug, Default)]
struct Half {
    /// The number after the highest byte seen.
    next: Option<u32>,
    /// The newest range that was missing when later data arrived.
    hole: Option<SeqRange>,
    /// A sequence number, and the time when the bytes before it passed, if they passed only once
    /// (Karn's algorithm).
    timed: Option<(u32, Instant)>,
    /// The contiguous range of the newest super-packets that was not retransmitted.
    merged: SeqRange,
}

/// A range of sequence numbers, without its end.
#[derive(Clone, Copy, Debug, Default)]
struct SeqRange {
    start: u32,
    end: u32,
}

impl SeqRange {
    fn contains(self, seq: u32) -> bool {
        seq_before(seq, self.end) && !seq_before(seq, self.start)
    }
}

/// A TCP segment or super-packet in transit.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Sequence number of its first byte.
    pub seq: u32,
    /// The acknowledgement number, if it has one.
    pub ack: Option<u32>,
    /// Payload length in bytes.
    pub payload: u32,
    /// Whether SYN is set.
    pub syn: bool,
    /// Payload length of each segment in bytes, at least 1.
    pub size: u32,
}

impl Segment {
    /// Reads a TCP header of at least 20 bytes. `payload` bytes follow, in segments of `size`
    /// bytes.
    pub fn read(header: &[u8], payload: usize, size: usize) -> Segment {
        let flags = tcp::flags(header);
        Segment {
            seq: tcp::seq(header),
            ack: (flags & tcp::ACK != 0)
                .then(|| u32::from_be_bytes([header[8], header[9], header[10], header[11]])),
            payload: payload as u32,
            syn: flags & tcp::SYN != 0,
            size: size.max(1) as u32,
        }
    }
}

/// Result of observing a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Segments that were lost before the gateway and arrive now.
    pub lost_before: u64,
    /// Segments that were lost after the gateway and arrive again.
    pub lost_behind: u64,
    /// Number of the segments in `lost_behind` that were sent on in a super-packet.
    pub lost_merged: u64,
    /// Round-trip time of the side that this segment comes from.
    pub rtt: Option<Duration>,
}

impl Flow {
    /// Observes a segment in `direction`.
    pub fn observe(&mut self, direction: Direction, segment: &Segment, now: Instant) -> Seen {
        let (own, other) = match direction {
            Direction::Out => (&mut self.out, &mut self.inward),
            Direction::In => (&mut self.inward, &mut self.out),
        };
        let mut seen = own.sent(segment, now);
        seen.rtt = segment.ack.and_then(|ack| other.acknowledged(ack, now));
        seen
    }
}

impl Half {
    fn sent(&mut self, segment: &Segment, now: Instant) -> Seen {
        let mut seen = Seen::default();
        let start = segment.seq;
        let end = start.wrapping_add(segment.payload + u32::from(segment.syn));
        if segment.syn {
            // A repeated SYN restarts the measurement, because it is unknown which one is answered.
            *self = Half {
                next: Some(end),
                timed: Some((end, now)),
                ..Half::default()
            };
            return seen;
        }
        if segment.payload == 0 {
            return seen;
        }
        let Some(next) = self.next else {
            self.next = Some(end);
            return seen;
        };
        let segments = |bytes: u32| u64::from(bytes.div_ceil(segment.size));
        if seq_before(start, next) {
            // A keepalive probe repeats one byte (RFC 9293 section 3.8.4).
            let again = next.wrapping_sub(start).min(segment.payload);
            if again > 1 {
                let filled = self.fill(start, start.wrapping_add(again));
                let rest = again - filled.min(again);
                seen.lost_before = segments(filled);
                seen.lost_behind = segments(rest);
                if rest > 0 && self.merged.contains(start) {
                    seen.lost_merged = seen.lost_behind;
                }
                // Remember the range that is sent on now: it may be lost next.
                if segment.payload > segment.size {
                    if seq_before(start, self.merged.start) {
                        self.merged.start = start;
                    }
                } else if !seq_before(start, self.merged.start) {
                    self.merged.start = start.wrapping_add(again);
                }
                self.timed = None;
            }
        } else if start != next {
            self.hole = Some(SeqRange {
                start: next,
                end: start,
            });
        } else if self.timed.is_none() {
            self.timed = Some((end, now));
        }
        if seq_before(next, end) {
            self.next = Some(end);
            if segment.payload > segment.size {
                if self.merged.end != start {
                    self.merged.start = start;
                }
                self.merged.end = end;
            }
        }
        seen
    }

    /// Removes `start..end` from the missing range, from the range's beginning. Returns the number
    /// of missing bytes among them.
    fn fill(&mut self, start: u32, end: u32) -> u32 {
        let Some(hole) = self.hole else {
            return 0;
        };
        let first = if seq_before(hole.start, start) {
            start
        } else {
            hole.start
        };
        let last = if seq_before(end, hole.end) {
            end
        } else {
            hole.end
        };
        if !seq_before(first, last) {
            return 0;
        }
        self.hole = seq_before(last, hole.end).then_some(SeqRange {
            start: last,
            end: hole.end,
        });
        last.wrapping_sub(first)
    }

    fn acknowledged(&mut self, ack: u32, now: Instant) -> Option<Duration> {
        let (end, at) = self.timed?;
        if seq_before(ack, end) {
            return None;
        }
        self.timed = None;
        Some(now.duration_since(at))
    }
}

/// Sequence numbers compare modulo 2^32 (RFC 9293 section 3.4).
fn seq_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

/// The flows of all devices.
#[derive(Debug, Default)]
pub struct Flows {
    /// By the position of the device.
    devices: Vec<Generations>,
    /// Number of flows in the younger generation.
    young: usize,
    /// Number of flows in the older generation.
    old: usize,
    since: Instant,
    /// Number of flows dropped because the table was full, not because they were silent.
    evicted: u64,
}

/// The flows of one device.
#[derive(Debug, Default)]
struct Generations {
    young: HashMap<FlowKey, Flow>,
    old: HashMap<FlowKey, Flow>,
}

impl Flows {
    /// Returns a known flow.
    pub fn get(&mut self, key: &FlowKey, now: Instant) -> Option<&mut Flow> {
        self.age(now);
        let device = self.devices.get_mut(key.device as usize)?;
        if !device.young.contains_key(key) {
            let flow = device.old.remove(key)?;
            self.old -= 1;
            self.insert(*key, flow);
        }
        self.devices[key.device as usize].young.get_mut(key)
    }

    /// Returns the flow, creating it if necessary.
    pub fn get_or_insert(&mut self, key: &FlowKey, now: Instant) -> &mut Flow {
        if self.get(key, now).is_none() {
            self.insert(*key, Flow::default());
        }
        let device = &mut self.devices[key.device as usize];
        device.young.entry(*key).or_default()
    }

    /// Number of flows.
    pub fn len(&self) -> usize {
        self.young + self.old
    }

    /// Whether there are no flows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of flows dropped because the table was full.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Adds a flow that is in neither generation.
    fn insert(&mut self, key: FlowKey, flow: Flow) {
        let device = key.device as usize;
        if self.devices.len() <= device {
            self.devices.resize_with(device + 1, Generations::default);
        }
        if self.young >= GENERATION_FLOWS {
            self.evict();
        }
        self.devices[device].young.insert(key, flow);
        self.young += 1;
    }

    fn age(&mut self, now: Instant) {
        if now.duration_since(self.since) > GENERATION {
            for device in &mut self.devices {
                device.old = std::mem::take(&mut device.young);
            }
            self.old = std::mem::take(&mut self.young);
            self.since = now;
        }
    }

    /// Makes space in the younger generation at the cost of the device that has the most flows
    /// there, so that no device has the flows of others evicted.
    fn evict(&mut self) {
        let by_young = |device: &&mut Generations| device.young.len();
        if let Some(device) = self.devices.iter_mut().max_by_key(by_young) {
            let dropped = std::mem::replace(&mut device.old, std::mem::take(&mut device.young));
            self.evicted += dropped.len() as u64;
            self.young -= device.old.len();
            self.old = self.old - dropped.len() + device.old.len();
        }
        while self.old > GENERATION_FLOWS {
            let by_old = |device: &&mut Generations| device.old.len();
            let Some(device) = self.devices.iter_mut().max_by_key(by_old) else {
                return;
            };
            let dropped = std::mem::take(&mut device.old).len();
            self.evicted += dropped as u64;
            self.old -= dropped;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u32 = 1000;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_millis(ms)
    }

    fn data(seq: u32, segments: u32) -> Segment {
        Segment {
            seq,
            ack: None,
            payload: segments * SIZE,
            syn: false,
            size: SIZE,
        }
    }

    fn ack(ack: u32) -> Segment {
        Segment {
            ack: Some(ack),
            ..data(0, 0)
        }
    }

    /// A flow whose device has sent up to byte 1000 times `segments`, counted from `start`.
    fn flow(start: u32, segments: u32) -> Flow {
        let mut flow = Flow::default();
        let seen = flow.observe(Direction::Out, &data(start, segments), at(0));
        assert_eq!(seen, Seen::default());
        flow
    }

    #[test]
    fn a_repeated_segment_was_lost_after_the_gateway() {
        // The numbers wrap in the middle.
        let start = 5000u32.wrapping_neg();
        let mut flow = flow(start, 10);
        let again = data(start.wrapping_add(3000), 2);
        let seen = flow.observe(Direction::Out, &again, at(1));
        assert_eq!((seen.lost_before, seen.lost_behind), (0, 2));
    }

    #[test]
    fn a_segment_that_fills_a_gap_was_lost_before_the_gateway() {
        let mut flow = flow(0, 2);
        flow.observe(Direction::Out, &data(5000, 1), at(1));
        let seen = flow.observe(Direction::Out, &data(2000, 1), at(2));
        assert_eq!((seen.lost_before, seen.lost_behind), (1, 0));
        let seen = flow.observe(Direction::Out, &data(3000, 2), at(3));
        assert_eq!((seen.lost_before, seen.lost_behind), (2, 0));
        // And once more: this time it had passed the gateway before.
        let seen = flow.observe(Direction::Out, &data(3000, 2), at(4));
        assert_eq!((seen.lost_before, seen.lost_behind), (0, 2));
    }

    #[test]
    fn losses_in_super_packets_are_counted_separately() {
        let mut flow = flow(0, 1);
        flow.observe(Direction::Out, &data(1000, 1), at(1));
        let seen = flow.observe(Direction::Out, &data(1000, 1), at(2));
        assert_eq!((seen.lost_behind, seen.lost_merged), (1, 0));
        flow.observe(Direction::Out, &data(2000, 8), at(3));
        // It is repeated in a smaller super-packet, which is lost as well, then in single segments.
        let seen = flow.observe(Direction::Out, &data(2000, 2), at(4));
        assert_eq!((seen.lost_behind, seen.lost_merged), (2, 2));
        for seq in [2000, 3000] {
            let seen = flow.observe(Direction::Out, &data(seq, 1), at(5));
            assert_eq!((seen.lost_behind, seen.lost_merged), (1, 1));
        }
        let seen = flow.observe(Direction::Out, &data(2000, 1), at(6));
        assert_eq!((seen.lost_behind, seen.lost_merged), (1, 0));
    }

    #[test]
    fn the_round_trip_is_that_of_the_side_that_answers() {
        let mut flow = flow(0, 1);
        flow.observe(Direction::Out, &data(1000, 4), at(10));
        let seen = flow.observe(Direction::In, &ack(5000), at(17));
        assert_eq!(seen.rtt, Some(Duration::from_millis(7)));
        // It is timed only once.
        let seen = flow.observe(Direction::In, &ack(5000), at(18));
        assert_eq!(seen.rtt, None);
    }

    #[test]
    fn retransmitted_data_is_not_timed() {
        let mut flow = flow(0, 1);
        flow.observe(Direction::Out, &data(1000, 1), at(10));
        flow.observe(Direction::Out, &data(1000, 1), at(20));
        let seen = flow.observe(Direction::In, &ack(2000), at(27));
        assert_eq!(seen.rtt, None);
    }

    #[test]
    fn a_keepalive_probe_is_no_loss() {
        let mut flow = flow(0, 2);
        let probe = Segment {
            payload: 1,
            ..data(1999, 0)
        };
        assert_eq!(flow.observe(Direction::Out, &probe, at(1)), Seen::default());
    }

    #[test]
    fn a_new_connection_on_old_ports_starts_afresh() {
        let mut flow = flow(1 << 30, 1);
        let syn = Segment {
            syn: true,
            ..data(5, 0)
        };
        flow.observe(Direction::Out, &syn, at(1));
        let seen = flow.observe(Direction::Out, &data(6, 1), at(2));
        assert_eq!(seen, Seen::default());
    }

    fn key(n: u16) -> FlowKey {
        FlowKey {
            device: 0,
            remote: [10, 0, 0, 1].into(),
            protocol: 6,
            device_port: n,
            remote_port: 80,
        }
    }

    #[test]
    fn silent_flows_expire_and_used_ones_do_not() {
        let mut flows = Flows::default();
        flows.get_or_insert(&key(1), at(0));
        flows.get_or_insert(&key(2), at(0));
        for minute in 1..30 {
            assert!(flows.get(&key(1), at(minute * 60_000)).is_some());
        }
        assert!(flows.get(&key(2), at(1_800_000)).is_none());
        assert_eq!(flows.len(), 1);
    }

    #[test]
    fn the_flow_table_is_bounded() {
        let mut flows = Flows::default();
        for device in 0..4u32 {
            for port in 0..GENERATION_FLOWS as u16 {
                let key = FlowKey {
                    device,
                    ..key(port)
                };
                flows.get_or_insert(&key, at(0));
            }
        }
        assert!(flows.len() <= 2 * GENERATION_FLOWS);
        assert_eq!(flows.evicted() as usize, 2 * GENERATION_FLOWS);
        let newest = FlowKey {
            device: 3,
            ..key(0)
        };
        assert!(flows.get(&newest, at(0)).is_some());
    }

    #[test]
    fn a_device_with_many_flows_evicts_its_own_only() {
        let mut flows = Flows::default();
        let of = |device, port: u32| FlowKey {
            device,
            remote_port: (port >> 16) as u16,
            ..key(port as u16)
        };
        // The flows of the others are silent, but not for long.
        for device in [0, 2] {
            for port in 0..100 {
                flows.get_or_insert(&of(device, port), at(0));
            }
        }
        for port in 0..10 * GENERATION_FLOWS as u32 {
            flows.get_or_insert(&of(1, port), at(u64::from(port / 1000)));
            assert!(flows.len() <= 2 * GENERATION_FLOWS);
        }
        for device in [0, 2] {
            for port in 0..100 {
                assert!(flows.get(&of(device, port), at(299_000)).is_some());
            }
        }
    }
}
