//! A TCP connection in figures, from the packets at its sender, as a time-sequence graph shows
//! them: how many segments the sender sends in a row, how long it waits then, whether the
//! receiver's window would have let it send on, and how much it sends again.

use std::collections::HashMap;
use std::net::IpAddr;

use seikan_load::stats::ratio;
use seikan_wire::ip::{IpPacket, PROTO_TCP};
use seikan_wire::tcp;

use super::figures::{cell, quantile};
use crate::capture::Packet;

/// Maximum number of connections among which the largest is searched.
const MAX_CONNECTIONS: usize = 1_000;
/// A pause of this share of the handshake's round trip ends a row of segments.
const PAUSE: f64 = 0.5;

/// Address and port of sender and receiver.
type Direction = [(IpAddr, u16); 2];

/// A segment with data.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Segment {
    /// Seconds since the connection's first packet.
    at: f64,
    bytes: i64,
    /// Whether all of it had been sent before.
    again: bool,
    /// Bytes that the receiver's window had room for before it was sent; `None` while the scale of
    /// the window is unknown.
    room: Option<i64>,
}

/// One direction of a connection.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Connection {
    segments: Vec<Segment>,
    /// Acknowledgements of the receiver.
    acknowledgements: usize,
    /// Seconds from the sender's SYN to the answer.
    round_trip: Option<f64>,
}

/// A row of segments without a pause, and the pause before it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Burst {
    segments: usize,
    /// Seconds.
    pause: f64,
    /// Whether the window had room for another segment of full size at the end of the pause.
    open: bool,
}

impl Connection {
    /// The direction with most data; `None` without data.
    pub(super) fn largest(packets: &[Packet]) -> Option<Self> {
        let mut sizes: HashMap<Direction, usize> = HashMap::new();
        for (direction, length, _) in packets.iter().filter_map(parse) {
            if sizes.len() < MAX_CONNECTIONS || sizes.contains_key(&direction) {
                *sizes.entry(direction).or_default() += length;
            }
        }
        let (direction, size) = sizes.into_iter().max_by_key(|(d, size)| (*size, *d))?;
        (size > 0).then(|| Self::follow(packets, direction))
    }

    fn follow(packets: &[Packet], [from, to]: Direction) -> Self {
        let mut found = Self::default();
        let mut positions = tcp::Positions::default();
        let (mut start, mut syn) = (None, None);
        // Scales apply only if both sides announce one (RFC 7323, 2.2).
        let (mut own, mut theirs) = (None, None);
        let (mut sent, mut window) = (0, None);
        for packet in packets {
            let Some((direction, length, segment)) = parse(packet) else {
                continue;
            };
            let is_own = direction == [from, to];
            if !is_own && direction != [to, from] {
                continue;
            }
            let start = *start.get_or_insert(packet.at);
            let at = packet.at.saturating_sub(start).as_secs_f64();
            let flags = tcp::flags(segment);
            let is_syn = flags & tcp::SYN != 0;
            let scale = || tcp::window_scale(segment.get(20..).unwrap_or_default());
            if is_own {
                if is_syn {
                    own = scale();
                    syn = Some(at);
                }
                // A SYN occupies a number.
                let begin = positions.of(tcp::seq(segment).wrapping_add(u32::from(is_syn)));
                if length > 0 {
                    let end = begin + length as i64;
                    found.segments.push(Segment {
                        at,
                        bytes: length as i64,
                        again: end <= sent,
                        room: window.map(|window: i64| window - sent),
                    });
                    sent = sent.max(end);
                }
            } else if flags & tcp::ACK != 0 && flags & tcp::RST == 0 {
                let number = positions.of(tcp::acknowledged(segment));
                // The window of a SYN is never scaled.
                let mut shift = own.and(theirs).unwrap_or(0);
                if is_syn {
                    theirs = scale();
                    shift = 0;
                    found.round_trip = syn.map(|syn| at - syn);
                }
                found.acknowledgements += 1;
                if syn.is_some() {
                    let bytes = i64::from(tcp::window(segment)) << shift.min(14);
                    window = Some(number + bytes);
                }
            }
        }
        found
    }

    /// Rows of segments with a pause before each but the first.
    fn bursts(&self) -> Vec<Burst> {
        let limit = self.round_trip.unwrap_or(0.0) * PAUSE;
        let full = self.segments.iter().map(|segment| segment.bytes).max();
        let mut bursts: Vec<Burst> = Vec::new();
        let mut before: Option<f64> = None;
        for segment in &self.segments {
            let pause = before.map_or(0.0, |before| segment.at - before);
            before = Some(segment.at);
            match bursts.last_mut() {
                Some(last) if pause <= limit => last.segments += 1,
                _ => bursts.push(Burst {
                    segments: 1,
                    pause,
                    open: segment
                        .room
                        .zip(full)
                        .is_some_and(|(room, full)| room >= full),
                }),
            }
        }
        bursts
    }

    /// Segments with data.
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Names and values, as rows of a table.
    pub(super) fn figures(&self, first: usize) -> Vec<(&'static str, String)> {
        let bursts = self.bursts();
        let pauses = bursts.get(1..).unwrap_or_default();
        let again = self.segments.iter().filter(|segment| segment.again).count();
        let first_again = self.segments.iter().position(|segment| segment.again);
        let rows: Vec<String> = bursts
            .iter()
            .take(first)
            .map(|of| of.segments.to_string())
            .collect();
        let waited: f64 = pauses.iter().map(|of| of.pause).sum();
        let open = pauses.iter().filter(|of| of.open);
        let open: f64 = open.map(|of| of.pause).sum();
        let longest = pauses.iter().map(|of| of.pause).fold(0.0, f64::max);
        let milliseconds = |value: Option<f64>| cell(value.map(|seconds| seconds * 1e3), 2);
        let row = quantile(bursts.iter().map(|of| of.segments as f64), 0.5);
        let wait = quantile(pauses.iter().map(|of| of.pause), 0.5);
        vec![
            (
                "round trip of the handshake, ms",
                milliseconds(self.round_trip),
            ),
            ("segments with data", self.segments.len().to_string()),
            ("acknowledgements", self.acknowledgements.to_string()),
            ("segments sent again", again.to_string()),
            ("segments in a row, the first rows", rows.join(", ")),
            (
                "segments before the first one that is sent again",
                first_again.map_or_else(|| "none is".to_owned(), |count| count.to_string()),
            ),
            ("segments in a row, median", cell(row, 0)),
            ("wait between two rows, median, ms", milliseconds(wait)),
            (
                "longest wait, ms",
                milliseconds((!pauses.is_empty()).then_some(longest)),
            ),
            (
                "share of the waiting with room in the window for another segment, %",
                cell(ratio(100.0 * open, waited), 0),
            ),
        ]
    }
}

/// The direction of a packet, its bytes of data, and its TCP header.
fn parse(packet: &Packet) -> Option<(Direction, usize, &[u8])> {
    let ip = IpPacket::parse_headers(&packet.head).ok()?;
    if ip.protocol != PROTO_TCP || ip.fragment {
        return None;
    }
    let segment = packet.head.get(ip.header_len..)?;
    let header = tcp::header_len(segment)?;
    let length = ip.total_len.checked_sub(ip.header_len + header)?;
    let port = |at: usize| u16::from_be_bytes([segment[at], segment[at + 1]]);
    let direction = [(ip.src, port(0)), (ip.dst, port(2))];
    Some((direction, length, &segment[..header]))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const SENDER: u8 = 1;
    const RECEIVER: u8 = 2;
    /// Initial numbers of both sides; the sender's wraps within the connection.
    const OWN: u32 = u32::MAX - 150;
    const THEIRS: u32 = 7_000;

    /// An IPv4 packet (RFC 791, RFC 9293) at a time in microseconds; of its `length` bytes of data
    /// none are recorded.
    fn packet(
        at: u64,
        from: u8,
        [seq, ack]: [u32; 2],
        flags: u8,
        window: u16,
        length: u16,
    ) -> Packet {
        let options: &[u8] = if flags & tcp::SYN != 0 {
            // No operation, window scale: 2^2.
            &[1, 3, 3, 2]
        } else {
            &[]
        };
        let header = 20 + options.len() as u16;
        let mut head = vec![0x45, 0];
        head.extend((20 + header + length).to_be_bytes());
        head.extend([
            0,
            0,
            0x40,
            0,
            64,
            6,
            0,
            0,
            10,
            0,
            0,
            from,
            10,
            0,
            0,
            3 - from,
        ]);
        head.extend(if from == SENDER {
            [0x0f, 0xa0, 0, 80]
        } else {
            [0, 80, 0x0f, 0xa0]
        });
        head.extend(seq.to_be_bytes());
        head.extend(ack.to_be_bytes());
        head.extend([(header as u8 / 4) << 4, flags]);
        head.extend(window.to_be_bytes());
        head.extend([0; 4]);
        head.extend(options);
        Packet {
            at: Duration::from_micros(1_000_000 + at),
            head,
        }
    }

    fn data(at: u64, position: u32) -> Packet {
        packet(
            at,
            SENDER,
            [OWN.wrapping_add(1 + position), THEIRS + 1],
            tcp::ACK,
            500,
            100,
        )
    }

    fn acknowledged(at: u64, position: u32, window: u16) -> Packet {
        packet(
            at,
            RECEIVER,
            [THEIRS + 1, OWN.wrapping_add(1 + position)],
            tcp::ACK,
            window,
            0,
        )
    }

    /// Segments of 100 bytes over a round trip of 1,000 µs: three, then four, of which the first
    /// again after 50 ms, then none until a window of zero is opened.
    fn connection() -> Vec<Packet> {
        vec![
            packet(0, SENDER, [OWN, 0], tcp::SYN, 500, 0),
            packet(
                1_000,
                RECEIVER,
                [THEIRS, OWN.wrapping_add(1)],
                tcp::SYN | tcp::ACK,
                1_000,
                0,
            ),
            data(1_100, 0),
            data(1_200, 100),
            data(1_300, 200),
            // The window ends at 300 + 4 * 1,000.
            acknowledged(2_300, 300, 1_000),
            data(2_400, 300),
            data(2_500, 400),
            data(2_600, 500),
            data(2_700, 600),
            acknowledged(3_000, 300, 100),
            // Again; the window ends at 700, which is sent already.
            data(52_700, 300),
            acknowledged(60_000, 700, 0),
            acknowledged(70_000, 700, 1_000),
            data(70_100, 700),
        ]
    }

    #[test]
    fn rows_and_pauses_are_those_of_the_packets() {
        let found = Connection::largest(&connection()).expect("data");
        assert_eq!((found.segments.len(), found.acknowledgements), (9, 5));
        let round_trip = found.round_trip.expect("a handshake");
        assert!((round_trip - 1e-3).abs() < 1e-9);
        let again: Vec<bool> = found.segments.iter().map(|of| of.again).collect();
        let mut expected = [false; 9];
        expected[7] = true;
        assert_eq!(again, expected);
        let bursts = found.bursts();
        let sizes: Vec<usize> = bursts.iter().map(|of| of.segments).collect();
        assert_eq!(sizes, [3, 4, 1, 1]);
        for (burst, milliseconds) in bursts.iter().zip([0.0, 1.1, 50.0, 17.4]) {
            assert!((burst.pause * 1e3 - milliseconds).abs() < 1e-6, "{burst:?}");
        }
        let open: Vec<bool> = bursts[1..].iter().map(|of| of.open).collect();
        assert_eq!(open, [true, false, true]);
    }

    #[test]
    fn figures_are_of_the_whole_connection() {
        let figures = Connection::largest(&connection()).expect("data").figures(2);
        let values: Vec<&str> = figures.iter().map(|(_, value)| value.as_str()).collect();
        // Waits of 1.1, 50 and 17.4 ms, the first and the last with an open window: 27 %.
        assert_eq!(
            values,
            [
                "1.00", "9", "5", "1", "3, 4", "7", "1", "17.40", "50.00", "27"
            ]
        );
    }

    #[test]
    fn other_packets_are_left_out() {
        let mut packets = connection();
        let mut other = data(1_000, 0);
        other.head[9] = 17;
        let mut fragment = data(1_050, 0);
        fragment.head[6..8].copy_from_slice(&[0x20, 1]);
        let short = Packet {
            at: Duration::ZERO,
            head: vec![0x45; 30],
        };
        packets.splice(2..2, [other, fragment, short]);
        assert_eq!(
            Connection::largest(&packets),
            Connection::largest(&connection())
        );
        assert_eq!(Connection::largest(&[]), None);
    }
}
