//! Little-endian fields of handshake messages.

/// Reads the number at `offset`, which must lie within `message`.
pub(crate) fn get_u32(message: &[u8], offset: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&message[offset..offset + 4]);
    u32::from_le_bytes(bytes)
}

/// Writes the number at `offset`, which must lie within `message`.
pub(crate) fn put_u32(message: &mut [u8], offset: usize, value: u32) {
    message[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
}
