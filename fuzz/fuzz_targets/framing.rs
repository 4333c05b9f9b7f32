//! Any bytes as a stream of frames of a relay and of a TURN server: the frames do not depend on how
//! the bytes arrive, lie within the input, and a relay's encode to the same bytes.
use seikan_proto::mesh::framing::{Framing, FramingError, split_port};

/// Returns the content of all complete frames, and the start of the rest.
fn cut(framing: Framing, bytes: &[u8]) -> Result<(Vec<&[u8]>, usize), FramingError> {
    let (mut contents, mut taken) = (Vec::new(), 0);
    while let Some(frame) = framing.first(&bytes[taken..])? {
        assert!(!frame.content.is_empty() && frame.content.end <= frame.length);
        assert_eq!(frame.length, framing.length(frame.content.len()));
        contents.push(&bytes[taken..][frame.content]);
        taken += frame.length;
    }
    Ok((contents, taken))
}

/// One input.
pub fn run(input: &[u8]) {
    let Some((at, bytes)) = input.split_first() else {
        return;
    };
    for framing in [Framing::Relay, Framing::Turn] {
        let Ok((contents, taken)) = cut(framing, bytes) else {
            continue;
        };
        // The length of an incomplete frame is bounded.
        assert!(bytes.len() - taken <= 20 + (1 << 16));
        let half = bytes.len() * usize::from(*at) / 256;
        let (mut early, from) =
            cut(framing, &bytes[..half]).expect("the beginning of what is good");
        let (late, _) = cut(framing, &bytes[from..]).expect("the rest of it");
        early.extend(late);
        assert_eq!(early, contents);
        if framing == Framing::Relay {
            let mut again = Vec::new();
            for content in contents {
                let (port, datagram) = split_port(content).expect("a port");
                assert!(framing.put(&[&port.to_be_bytes(), datagram], &mut again));
            }
            assert_eq!(again, bytes[..taken]);
        }
    }
}
