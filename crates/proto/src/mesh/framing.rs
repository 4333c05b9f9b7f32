//! Framing of datagrams in a stream.
//!
//! To and from a `seikan relay`, a frame is a 16-bit length and as many bytes (RFC 4571). The first
//! two bytes are a port of the relay; the rest is a datagram to or from that port:
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-------------------------------+-------------------------------+
//! |   length (of the rest)        |   port (0: the main port)     |
//! +-------------------------------+-------------------------------+
//! |                          datagram ...                         |
//! ```
//!
//! To and from a TURN server, frames are STUN messages and ChannelData messages (RFC 8656, sections
//! 3.1 and 12.5). They contain their length and are padded to four bytes.

use std::ops::Range;

/// Length in bytes of the port at the start of a relay's frame.
pub const PORT: usize = 2;
/// The port that stands for a relay's main port, whatever its number.
pub const MAIN_PORT: u16 = 0;
/// Length in bytes of the length field of a frame (RFC 4571, section 2).
const LENGTH: usize = 2;
/// Length in bytes of a STUN message header (RFC 8489, section 5).
const STUN_HEADER: usize = 20;
/// The magic cookie, after type and length.
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// Length in bytes of a ChannelData header (RFC 8656, section 12.4).
const CHANNEL_HEADER: usize = 4;

/// The framing of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// A stream to or from a `seikan relay`.
    Relay,
    /// A stream to or from a TURN server.
    Turn,
}

/// The stream has no valid frame at its start and must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    /// The frame is shorter than a port.
    #[error("invalid frame: shorter than a port number")]
    NoPort,
    /// Neither a STUN message nor a ChannelData message.
    #[error("invalid data: neither STUN nor ChannelData")]
    NotTurn,
}

/// A frame at the start of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Position of its content: a port and a datagram from a relay, or the message of a TURN
    /// server.
    pub content: Range<usize>,
    /// Length of the frame in bytes, including framing.
    pub length: usize,
}

impl Framing {
    /// Finds the frame at the start of `bytes`; `None` if it is incomplete. Its content lies within
    /// `bytes`, is at most 65,555 bytes long, and is never empty.
    ///
    /// # Errors
    /// [`FramingError`].
    pub fn first(self, bytes: &[u8]) -> Result<Option<Frame>, FramingError> {
        let frame = match self {
            Framing::Relay => relay_frame(bytes)?,
            Framing::Turn => turn_frame(bytes)?,
        };
        Ok(frame.filter(|frame| frame.length <= bytes.len()))
    }

    /// Appends a frame with the concatenated `parts` to `out`. Returns false and appends nothing if
    /// they are too long.
    pub fn put(self, parts: &[&[u8]], out: &mut Vec<u8>) -> bool {
        let content: usize = parts.iter().map(|part| part.len()).sum();
        match (self, u16::try_from(content)) {
            (Framing::Relay, Err(_)) => return false,
            (Framing::Relay, Ok(length)) => out.extend_from_slice(&length.to_be_bytes()),
            (Framing::Turn, _) => {}
        }
        parts.iter().for_each(|part| out.extend_from_slice(part));
        if self == Framing::Turn {
            out.resize(out.len() + content.next_multiple_of(4) - content, 0);
        }
        true
    }

    /// Length in bytes of a frame with this many bytes of content.
    pub fn length(self, content: usize) -> usize {
        match self {
            Framing::Relay => LENGTH + content,
            Framing::Turn => content.next_multiple_of(4),
        }
    }
}

/// Splits the content of a relay's frame into port and datagram.
pub fn split_port(content: &[u8]) -> Option<(u16, &[u8])> {
    let (port, datagram) = content.split_first_chunk()?;
    Some((u16::from_be_bytes(*port), datagram))
}

fn relay_frame(bytes: &[u8]) -> Result<Option<Frame>, FramingError> {
    let Some(length) = bytes.first_chunk() else {
        return Ok(None);
    };
    let length = LENGTH + usize::from(u16::from_be_bytes(*length));
    if length < LENGTH + PORT {
        return Err(FramingError::NoPort);
    }
    let content = LENGTH..length;
    Ok(Some(Frame { content, length }))
}

fn turn_frame(bytes: &[u8]) -> Result<Option<Frame>, FramingError> {
    let Some([kind, _, high, low]) = bytes.first_chunk() else {
        return Ok(None);
    };
    let said = usize::from(u16::from_be_bytes([*high, *low]));
    // The two highest bits (RFC 8656, section 12): 00 for STUN messages, 01 for channels.
    let content = match kind >> 6 {
        0 if !said.is_multiple_of(4) => return Err(FramingError::NotTurn),
        // The library would wait for the rest of an unknown message.
        0 if bytes.get(4..8).is_some_and(|at| *at != COOKIE) => return Err(FramingError::NotTurn),
        0 => STUN_HEADER + said,
        1 => CHANNEL_HEADER + said,
        _ => return Err(FramingError::NotTurn),
    };
    Ok(Some(Frame {
        content: 0..content,
        length: content.next_multiple_of(4),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(content: Range<usize>, length: usize) -> Option<Frame> {
        Some(Frame { content, length })
    }

    #[test]
    fn a_frame_of_a_relay_is_a_length_a_port_and_a_datagram() {
        // RFC 4571, section 2: the length is in network byte order and does not count itself.
        let bytes = [0, 5, 0xc0, 0x01, 7, 8, 9, 0, 2];
        let frame = Framing::Relay.first(&bytes).expect("a frame");
        assert_eq!(frame, found(2..7, 7));
        assert_eq!(split_port(&bytes[2..7]), Some((49_153, &[7, 8, 9][..])));
        for end in 0..7 {
            let part = Framing::Relay.first(&bytes[..end]).expect("a frame");
            assert_eq!(part, None, "{end}");
        }
        let mut out = vec![];
        assert!(Framing::Relay.put(&[&[0xc0, 0x01], &[7, 8, 9]], &mut out));
        assert_eq!(out, bytes[..7]);
        assert_eq!(Framing::Relay.length(5), 7);
    }

    #[test]
    fn a_frame_without_a_port_ends_the_stream() {
        for bad in [[0, 0, 1], [0, 1, 1]] {
            assert_eq!(Framing::Relay.first(&bad), Err(FramingError::NoPort));
        }
        // A port, and an empty datagram.
        let frame = Framing::Relay.first(&[0, 2, 0, 1]).expect("a frame");
        assert_eq!(frame, found(2..4, 4));
    }

    #[test]
    fn content_beyond_the_maximum_length_is_refused() {
        let mut out = vec![1];
        assert!(!Framing::Relay.put(&[&[0; 2], &[0; 65_534]], &mut out));
        assert_eq!(out, [1]);
        assert!(Framing::Relay.put(&[&[0; 2], &[0; 65_533]], &mut out));
        assert_eq!(out.len(), 1 + 2 + 65_535);
    }

    #[test]
    fn turn_messages_are_split_and_their_padding_is_removed() {
        // RFC 8656, section 12.5: over TCP a ChannelData message is padded to a multiple of four
        // bytes.
        let channel = [0x40, 0x00, 0, 5, 1, 2, 3, 4, 5, 0, 0, 0];
        assert_eq!(Framing::Turn.first(&channel), Ok(found(0..9, 12)));
        let mut out = vec![];
        assert!(Framing::Turn.put(&[&channel[..4], &channel[4..9]], &mut out));
        assert_eq!(
            (out.as_slice(), Framing::Turn.length(9)),
            (&channel[..], 12)
        );
        // RFC 8489, section 5: 20 bytes, the cookie among them, and as many as it says.
        let mut stun = [0; 28];
        stun[3] = 8;
        stun[4..8].copy_from_slice(&[0x21, 0x12, 0xa4, 0x42]);
        assert_eq!(Framing::Turn.first(&stun), Ok(found(0..28, 28)));
        for part in [
            &channel[..3],
            &channel[..11],
            &stun[..4],
            &stun[..7],
            &stun[..8],
            &stun[..27],
            &[],
        ] {
            assert_eq!(Framing::Turn.first(part), Ok(None), "{part:?}");
        }
    }

    #[test]
    fn the_longest_message_of_turn_is_one() {
        let mut longest = vec![0; CHANNEL_HEADER + 0xffff + 1];
        longest[..4].copy_from_slice(&[0x7f, 0xff, 0xff, 0xff]);
        let expected = found(0..4 + 0xffff, 4 + 0x1_0000);
        assert_eq!(Framing::Turn.first(&longest), Ok(expected));
    }

    #[test]
    fn other_bytes_are_no_turn_message() {
        for bad in [
            &[0x80, 0, 0, 0][..],
            &[0xff, 0, 0, 0],
            &[0, 1, 0, 3],
            &[0, 1, 0, 0, 0, 0, 0, 0],
            &[0, 1, 0, 0, 0x21, 0x12, 0xa4, 0x43],
            &[0, 1, 0xff, 0xfc, 0x42, 0xa4, 0x12, 0x21, 0],
            b"\r\n\r\n\r\n\r\n",
            b"HTTP",
        ] {
            // "H" has the bits of a channel, but no channel has that number; the library rejects
            // it.
            let expected = bad == b"HTTP";
            assert_eq!(Framing::Turn.first(bad).is_ok(), expected, "{bad:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn a_frame_lies_within_any_input(bytes in proptest::collection::vec(0u8.., 0..100)) {
            for framing in [Framing::Relay, Framing::Turn] {
                if let Ok(Some(Frame { content, length })) = framing.first(&bytes) {
                    assert!(content.end <= length && length <= bytes.len() && !content.is_empty());
                }
            }
        }
    }
}
