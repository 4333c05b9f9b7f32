//! Any bytes as a virtio-net header: what is read is written back the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seikan_wire::VnetHdr;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = VnetHdr::read(bytes) {
        assert_eq!(VnetHdr::read(&header.to_bytes()), Ok(header));
    }
});
