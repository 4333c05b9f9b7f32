//! The first sixteen bytes of a data message, the same in both protocols.
//!
//! ```text
//! 0  type, u8: 4 (WireGuard, whitepaper 5.4.6), 0x14 (native)
//! 1  reserved, zero
//! 4  receiver index, u32
//! 8  counter, u64
//! 16 sealed packet (WireGuard) or sealed record (native), and the AEAD's tag
//! ```
//! Integers are little endian. There is no additional data: a wrong type or receiver finds no key,
//! and a wrong counter is a wrong nonce.

/// Length of the header of a data message.
pub const DATA_HEADER_LEN: usize = 16;
/// Length of the AEAD tag behind the sealed part.
pub const TAG_LEN: usize = 16;

/// A parsed data header.
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
}
