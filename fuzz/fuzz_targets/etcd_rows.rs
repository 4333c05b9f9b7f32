//! Any text as the rows of a mesh in etcd and as changes of them, as written by another coordinator
//! of any version, or by hand. They are refused, or accepted and then stay the same when read and
//! applied again.
use seikan_coordinator::store::fuzzing;

/// One input.
pub fn run(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        fuzzing::rows(text);
    }
}
