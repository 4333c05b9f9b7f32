//! How a stream is cut into what would be datagrams by UDP.
//!
//! To and from a relay of ours a frame is 16 bits of length and as many bytes (RFC 4571), of which the first two are a port of the
//! relay's, and the rest is a datagram to or from there:
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-------------------------------+-------------------------------+
//! |    length (of what follows)   |      port (0: the main one)   |
//! +-------------------------------+-------------------------------+
//! |                          datagram ...                         |
//! ```
//!
//! To and from a TURN server frames are STUN messages and those of channels (RFC 8656, sections 3.1 and 12.5), which say their
//! lengths themselves, padded to four bytes.

use std::ops::Range;

/// Bytes of a port, at the beginning of what is in a frame of a relay's.
pub const PORT: usize = 2;
/// The port in a frame that stands for a relay's main one, whatever its number.
pub const MAIN_PORT: u16 = 0;
/// Bytes of the length before a frame (RFC 4571, section 2).
const LENGTH: usize = 2;
/// Bytes of a STUN message's header (RFC 8489, section 5).
const STUN_HEADER: usize = 20;
/// What is in it after its type and length.
const COOKIE: [u8; 4] = [0x21, 0x12, 0xa4, 0x42];
/// Bytes of a ChannelData message's header (RFC 8656, section 12.4).
const CHANNEL_HEADER: usize = 4;

/// Who is spoken to by a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// A relay of ours.
    Relay,
    /// A TURN server.
    Turn,
}

/// What is in a stream cannot be cut: it is at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FramingError {
    /// It is shorter than a port.
    #[error("what comes is not what a relay and its members say")]
    NoPort,
    /// It is neither a STUN message nor one of a channel.
    #[error("what it sends is not TURN")]
    NotTurn,
}

/// Where a frame lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What is in it: of a relay's a port and a datagram, of a TURN server's the message.
    pub content: Range<usize>,
    /// Its bytes, with what is around that.
    pub length: usize,
}

impl Framing {
    /// The frame that `bytes` begin with; `None`: not all of it is there. Its content is within `bytes`, 65,555 bytes long at most, and
    /// never empty.
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

    /// Puts what is in `parts`, one behind the other, as a frame behind what is in `out`. `false`: it is too long for one, and nothing
    /// was put there.
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

    /// Bytes of a frame with so much in it.
    pub fn length(self, content: usize) -> usize {
        match self {
            Framing::Relay => LENGTH + content,
            Framing::Turn => content.next_multiple_of(4),
        }
    }
}

/// The port and the datagram of a frame of a relay's.
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
    // The two uppermost bits (RFC 8656, section 12): 00 of a STUN message, 01 of a channel's.
    let content = match kind >> 6 {
        0 if !said.is_multiple_of(4) => return Err(FramingError::NotTurn),
        // The library would wait for more of what it does not know.
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
    fn what_is_longer_than_its_length_could_say_is_not_put() {
        let mut out = vec![1];
        assert!(!Framing::Relay.put(&[&[0; 2], &[0; 65_534]], &mut out));
        assert_eq!(out, [1]);
        assert!(Framing::Relay.put(&[&[0; 2], &[0; 65_533]], &mut out));
        assert_eq!(out.len(), 1 + 2 + 65_535);
    }

    #[test]
    fn messages_of_turn_are_told_apart_and_their_padding_is_no_part_of_them() {
        // RFC 8656, section 12.5: over TCP a ChannelData message is padded to a multiple of four bytes.
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
    fn what_is_not_turn_is_no_message() {
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
            // "H" begins as a channel does; no channel has that number, which is the library's to say.
            let expected = bad == b"HTTP";
            assert_eq!(Framing::Turn.first(bad).is_ok(), expected, "{bad:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn whatever_comes_a_frame_lies_within_what_is_there(bytes in proptest::collection::vec(0u8.., 0..100)) {
            for framing in [Framing::Relay, Framing::Turn] {
                if let Ok(Some(Frame { content, length })) = framing.first(&bytes) {
                    assert!(content.end <= length && length <= bytes.len() && !content.is_empty());
                }
            }
        }
    }
}
