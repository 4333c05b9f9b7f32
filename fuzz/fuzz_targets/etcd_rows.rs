//! Any text as what etcd has of a mesh, and as what becomes of it: what another coordinator wrote, of whatever version, or somebody by hand.
//! It is taken, and then is the same when it is read and taken again, or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seikan_coordinator::store::fuzzing;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        fuzzing::rows(text);
    }
});
