//! Any bytes as requests to the SOCKS5 and HTTP proxies: a message has the same meaning however its bytes arrive, and
//! has no more bytes than have arrived.
use seikan_userspace::fuzzing::{Message, Outcome, datagram_header, read};

/// One input.
pub fn run(bytes: &[u8]) {
    for message in [
        Message::SocksGreeting,
        Message::SocksRequest,
        Message::HttpHead,
    ] {
        let whole = read(message, bytes);
        let Outcome::Complete { content, length } = &whole else {
            continue;
        };
        assert!(*length <= bytes.len(), "{message:?}: {whole:?}");
        // An invalid address and too many fields take all bytes.
        if content.contains("Unknown") || content.contains("TooManyFields") {
            continue;
        }
        assert_eq!(read(message, &bytes[..*length]), whole, "{message:?}");
        for end in 0..*length {
            let part = read(message, &bytes[..end]);
            assert_eq!(
                part,
                Outcome::Partial,
                "{message:?}: {end} bytes of {whole:?}"
            );
        }
    }
    if let Some(length) = datagram_header(bytes) {
        assert!(length <= bytes.len());
        assert_eq!(datagram_header(&bytes[..length]), Some(length));
    }
}
