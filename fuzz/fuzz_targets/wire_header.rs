//! Any bytes as a virtio-net header: what is read is written back the same.
use seikan_wire::VnetHdr;

/// One input.
pub fn run(bytes: &[u8]) {
    if let Ok(header) = VnetHdr::read(bytes) {
        assert_eq!(VnetHdr::read(&header.to_bytes()), Ok(header));
    }
}
