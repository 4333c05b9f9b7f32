//! Any plaintext as the frames of a record, in either mode, in the middle of an arena: nothing but
//! the tag behind it is changed, and the iteration ends.
use seikan_proto::mode::{Carried, Ethernet, Ip};
use seikan_proto::native::frame::{Frame, Frames, MIN_CHUNK};
use seikan_proto::native::reassembly::{Reassembly, Record};
use seikan_proto::time::Instant;
use seikan_wire::message::TAG_LEN;
use std::ops::Range;

/// Bytes before and after the plaintext, which must stay unchanged.
const MARGIN: usize = 64;

/// One input.
pub fn run(input: &[u8]) {
    let Some((first, plaintext)) = input.split_first() else {
        return;
    };
    if first & 4 == 0 {
        frames::<Ip>(plaintext, first & 3);
    } else {
        frames::<Ethernet>(plaintext, first & 3);
    }
}

fn frames<C: Carried>(plaintext: &[u8], ecn: u8) {
    let mut arena = vec![0x11; MARGIN];
    arena.extend(plaintext);
    arena.extend([0x11; MARGIN]);
    let inside = MARGIN..MARGIN + plaintext.len();
    let mut frames = Frames::<C>::new(inside.clone(), ecn);
    // A folded frame is restored over the tag.
    let end = inside.end + TAG_LEN;
    let within = |part: &Range<usize>| part.start >= inside.start && part.end <= end;
    let mut count = 0;
    let mut control = 0;
    let (mut segments, mut reassembly) = (0, Reassembly::default());
    while let Some(frame) = frames.next(&mut arena) {
        count += 1;
        assert!(
            count <= plaintext.len(),
            "every frame takes a byte at least"
        );
        match frame {
            Ok(Frame::Packet(packet)) => {
                assert!(within(&packet.range));
                assert!(packet.ip_at + packet.ip.total_len <= packet.range.len());
                assert!(C::ETHERNET == (packet.ip_at >= 14));
            }
            Ok(Frame::NotIp { range }) => assert!(C::ETHERNET && within(&range)),
            Ok(Frame::Slice(slice)) => {
                assert!(within(&slice.header) && within(&slice.chunk));
                let end = slice.offset + slice.chunk.len();
                assert!(end + slice.header.len() - slice.ip_at <= 65_535);
                // The parts have no more segments than the whole.
                assert!(slice.segments() <= end.div_ceil(slice.gso_size) as u64);
                assert!(slice.gso_size >= MIN_CHUNK);
                segments += slice.segments();
            }
            Ok(Frame::Fragment(fragment)) => {
                assert!(within(&fragment.chunk));
                let end = fragment.offset + fragment.chunk.len();
                assert!(
                    end == fragment.total
                        || end < fragment.total && fragment.chunk.len() >= MIN_CHUNK
                );
                let record = Record {
                    session: 0,
                    counter: count as u64 / 8,
                    ecn: 0,
                };
                reassembly.fragment(
                    &fragment,
                    record,
                    &arena[fragment.chunk.clone()],
                    Instant::BOOT,
                );
                let (bytes, pieces) = reassembly.pending_bytes();
                assert!(bytes <= plaintext.len() && pieces <= 8 * 64);
            }
            Ok(
                Frame::Health(_) | Frame::Probe { .. } | Frame::ProbeAck { .. } | Frame::Ports(_),
            ) => {
                control += 1;
            }
            Err(_) => {}
        }
    }
    assert!(control <= 4, "one of each kind");
    // A slice of two segments has at least 47 bytes: its frame and headers, in which there is the end
    // of one and the start of the next.
    assert!(2 * 47 * segments as usize <= 4 * plaintext.len() + 47);
    assert!(
        arena[..MARGIN]
            .iter()
            .chain(&arena[end..])
            .all(|b| *b == 0x11)
    );
}
