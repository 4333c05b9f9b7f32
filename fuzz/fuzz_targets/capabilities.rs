//! Any bytes as the capabilities of a handshake: what is understood is said again the same way.
use seikan_proto::capabilities::Capabilities;

/// One input.
pub fn run(payload: &[u8]) {
    if let Ok(capabilities) = Capabilities::parse(payload) {
        let again = Capabilities::parse(&capabilities.encode());
        assert!(
            again.as_ref() == Ok(&capabilities),
            "{capabilities:?} became {again:?}"
        );
    }
}
