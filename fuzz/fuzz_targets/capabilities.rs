//! Any bytes as the capabilities of a handshake: encoding the decoded ones returns the same bytes.
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
