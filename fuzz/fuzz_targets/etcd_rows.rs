//! Any text as what etcd has of a mesh, and as what becomes of it: what another coordinator wrote, of whatever version, or somebody by hand.
//! It is taken, and then is the same when it is read and taken again, or refused.
use seikan_coordinator::store::fuzzing;

/// One input.
pub fn run(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        fuzzing::rows(text);
    }
}
