//! The first bytes of a data message.
//!
//! ```text
//! WireGuard (whitepaper 5.4.6)            native
//! 0  type, u8: 4                          0  type, u8: 0x14
//! 1  reserved, zero                       1  receiver index, u24
//! 4  receiver index, u32                  4  counter, its low 32 bits
//! 8  counter, u64                         8  sealed record, and the AEAD's tag
//! 16 sealed packet, and the AEAD's tag
//! ```
//! Integers are little endian. There is no additional data: a wrong type or receiver finds no key,
//! and a wrong counter is a wrong nonce.

/// Length of the header of a WireGuard data message.
pub const DATA_HEADER_LEN: usize = 16;
/// Length of the header of a native data message.
pub const RECORD_HEADER_LEN: usize = 8;
/// Length of the AEAD tag behind the sealed part.
pub const TAG_LEN: usize = 16;
/// Maximum receiver index of a native message: it has 24 bits.
pub const MAX_RECORD_INDEX: u32 = (1 << 24) - 1;

/// The header of a WireGuard data message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// Message type.
    pub kind: u8,
    /// The receiver's session index.
    pub receiver: u32,
    /// Nonce counter.
    pub counter: u64,
}

impl DataHeader {
    /// Reads the header. `None` if there is no space for it and a tag, or if a reserved byte is
    /// set.
    pub fn read(datagram: &[u8]) -> Option<DataHeader> {
        if datagram.len() < DATA_HEADER_LEN + TAG_LEN {
            return None;
        }
        let &[kind, 0, 0, 0, r0, r1, r2, r3, ref counter @ ..] =
            datagram.first_chunk::<DATA_HEADER_LEN>()?
        else {
            return None;
        };
        Some(DataHeader {
            kind,
            receiver: u32::from_le_bytes([r0, r1, r2, r3]),
            counter: u64::from_le_bytes(*counter.first_chunk()?),
        })
    }

    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; DATA_HEADER_LEN] {
        let mut b = [0; DATA_HEADER_LEN];
        b[0] = self.kind;
        b[4..8].copy_from_slice(&self.receiver.to_le_bytes());
        b[8..].copy_from_slice(&self.counter.to_le_bytes());
        b
    }
}

/// The header of a native data message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Message type.
    pub kind: u8,
    /// The receiver's session index, at most [`MAX_RECORD_INDEX`].
    pub receiver: u32,
    /// The low 32 bits of the nonce counter.
    pub counter: u32,
}

impl RecordHeader {
    /// Reads the header. `None` if there is no space for it and a tag.
    pub fn read(datagram: &[u8]) -> Option<RecordHeader> {
        if datagram.len() < RECORD_HEADER_LEN + TAG_LEN {
            return None;
        }
        let &[kind, r0, r1, r2, c0, c1, c2, c3] = datagram.first_chunk()?;
        Some(RecordHeader {
            kind,
            receiver: u32::from_le_bytes([r0, r1, r2, 0]),
            counter: u32::from_le_bytes([c0, c1, c2, c3]),
        })
    }

    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; RECORD_HEADER_LEN] {
        let [r0, r1, r2, _] = self.receiver.to_le_bytes();
        let [c0, c1, c2, c3] = self.counter.to_le_bytes();
        [self.kind, r0, r1, r2, c0, c1, c2, c3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_reserved_byte_or_a_missing_tag_is_no_header() {
        let mut datagram = [0; 32];
        datagram[0] = 4;
        datagram[4..8].copy_from_slice(&[1, 2, 3, 4]);
        datagram[8] = 5;
        let header = DataHeader::read(&datagram).unwrap();
        assert_eq!(
            (header.kind, header.receiver, header.counter),
            (4, 0x0403_0201, 5)
        );
        assert_eq!(header.to_bytes(), datagram[..16]);
        assert_eq!(DataHeader::read(&datagram[..31]), None);
        datagram[2] = 1;
        assert_eq!(DataHeader::read(&datagram), None);
    }

    #[test]
    fn a_native_header_has_an_index_of_24_bits_and_half_a_counter() {
        let mut datagram = [0; 24];
        datagram[..8].copy_from_slice(&[0x14, 1, 2, 3, 4, 5, 6, 7]);
        let header = RecordHeader::read(&datagram).unwrap();
        assert_eq!(
            (header.kind, header.receiver, header.counter),
            (0x14, 0x03_0201, 0x0706_0504)
        );
        assert_eq!(header.to_bytes(), datagram[..8]);
        assert_eq!(RecordHeader::read(&datagram[..23]), None);
    }
}
