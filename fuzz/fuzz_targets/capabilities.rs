//! Any bytes as the capabilities of a handshake: what is understood is said again the same way.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seikan_proto::capabilities::Capabilities;

fuzz_target!(|payload: &[u8]| {
    if let Ok(capabilities) = Capabilities::parse(payload) {
        let again = Capabilities::parse(&capabilities.encode());
        assert!(
            again.as_ref() == Ok(&capabilities),
            "{capabilities:?} became {again:?}"
        );
    }
});
