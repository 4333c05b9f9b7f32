//! UDP header fields (RFC 768).

/// Length of the header.
pub const HEADER_LEN: usize = 8;
/// Offset of the checksum in the header.
pub const CHECKSUM_AT: usize = 6;

/// The length field: header and payload. `header` holds at least eight bytes.
pub fn length(header: &[u8]) -> usize {
    usize::from(u16::from_be_bytes([header[4], header[5]]))
}

/// The checksum field; zero means "none" over IPv4.
pub fn checksum(header: &[u8]) -> u16 {
    u16::from_be_bytes([header[6], header[7]])
}

/// The wire form of a computed checksum: zero is sent as 0xFFFF (RFC 768).
pub fn on_wire(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}
