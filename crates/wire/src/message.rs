//! The first sixteen bytes of a data message, the same in both protocols.
//!
//! ```text
//! WireGuard (whitepaper 5.4.6)        native
//! 0  type = 4                         0  type = 0x14
//! 1  reserved, zero                   1  position in the sender's GSO batch
//! 2  reserved, zero                   2  send stamp, u16, units of 2^-16 s (wraps every second)
//! 4  receiver index, u32              4  receiver index, u32
//! 8  counter, u64                     8  counter, u64
//! 16 sealed packet                    16 sealed frames
//! ```
//! Integers are little endian. In the native protocol the sixteen bytes are the AEAD's additional
//! data; in WireGuard it has none.

/// Length of the header of a data message.
pub const DATA_HEADER_LEN: usize = 16;
/// Length of the AEAD tag behind the sealed part.
pub const TAG_LEN: usize = 16;
/// WireGuard's data message.
pub const TYPE_DATA_WIREGUARD: u8 = 4;
/// The native data message.
pub const TYPE_DATA_NATIVE: u8 = 0x14;

/// A parsed data header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    /// Message type byte.
    pub kind: u8,
    /// Native: the datagram's position in its GSO batch. WireGuard: zero.
    pub position: u8,
    /// Native: the fractional second at which the batch was sealed, in 1/65536 s. WireGuard: zero.
    pub stamp: u16,
    /// The receiver's session index.
    pub receiver: u32,
    /// Nonce counter.
    pub counter: u64,
}

impl DataHeader {
    /// Reads the header; `None` when there is no room for it and a tag.
    pub fn read(datagram: &[u8]) -> Option<DataHeader> {
        if datagram.len() < DATA_HEADER_LEN + TAG_LEN {
            return None;
        }
        let &[kind, position, t0, t1, r0, r1, r2, r3, ref counter @ ..] =
            datagram.first_chunk::<DATA_HEADER_LEN>()?;
        Some(DataHeader {
            kind,
            position,
            stamp: u16::from_le_bytes([t0, t1]),
            receiver: u32::from_le_bytes([r0, r1, r2, r3]),
            counter: u64::from_le_bytes(*counter.first_chunk()?),
        })
    }

    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; DATA_HEADER_LEN] {
        let mut b = [0; DATA_HEADER_LEN];
        b[0] = self.kind;
        b[1] = self.position;
        b[2..4].copy_from_slice(&self.stamp.to_le_bytes());
        b[4..8].copy_from_slice(&self.receiver.to_le_bytes());
        b[8..].copy_from_slice(&self.counter.to_le_bytes());
        b
    }
}
