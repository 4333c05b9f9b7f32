//! Any bytes as a virtio-net header: decoding and encoding returns the same bytes.
use seikan_wire::VnetHdr;

/// One input.
pub fn run(bytes: &[u8]) {
    if let Ok(header) = VnetHdr::read(bytes) {
        assert_eq!(VnetHdr::read(&header.to_bytes()), Ok(header));
    }
}
