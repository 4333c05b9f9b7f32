//! The virtio-net header that a TUN device with `IFF_VNET_HDR` puts before every packet.
//!
//! Layout: `struct virtio_net_hdr` in Linux `include/uapi/linux/virtio_net.h`, ten bytes, little
//! endian (`TUNSETVNETLE`).

/// Length of the header in bytes (`TUNSETVNETHDRSZ` is set to this).
pub const VNET_HDR_LEN: usize = 10;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the checksum field covers only the pseudo-header.
const F_NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_ECN`: the TCP super-packet has CWR set; a bit next to the type.
const GSO_ECN: u8 = 0x80;

/// The kind of super-packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GsoType {
    /// An ordinary packet.
    #[default]
    None,
    /// `VIRTIO_NET_HDR_GSO_TCPV4`.
    Tcp4,
    /// `VIRTIO_NET_HDR_GSO_TCPV6`.
    Tcp6,
    /// `VIRTIO_NET_HDR_GSO_UDP_L4`: equal-sized UDP datagrams of one flow, IPv4 or IPv6.
    UdpL4,
}

/// The parsed header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// The transport checksum has to be completed from `csum_start` on.
    pub needs_csum: bool,
    /// The kind of super-packet.
    pub gso_type: GsoType,
    /// Whether the super-packet has CWR set, for its first segment only.
    pub gso_ecn: bool,
    /// Length of all headers in bytes (a hint: the kernel does not always fill it in).
    pub hdr_len: u16,
    /// Payload bytes of each segment except the last.
    pub gso_size: u16,
    /// Start of the checksummed part, from the first byte of the packet.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
}

/// Why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VnetError {
    /// Fewer than ten bytes.
    #[error("virtio-net header truncated")]
    Truncated,
    /// A `gso_type` that this program did not enable.
    #[error("virtio-net header with the unknown gso_type {0:#x}")]
    UnknownGso(u8),
}

impl VnetHdr {
    /// Parses the first [`VNET_HDR_LEN`] bytes of `bytes`.
    pub fn read(bytes: &[u8]) -> Result<VnetHdr, VnetError> {
        let Some(&[flags, gso, h0, h1, g0, g1, s0, s1, o0, o1]) =
            bytes.first_chunk::<VNET_HDR_LEN>()
        else {
            return Err(VnetError::Truncated);
        };
        let gso_type = match gso & !GSO_ECN {
            0 => GsoType::None,
            1 => GsoType::Tcp4,
            4 => GsoType::Tcp6,
            5 => GsoType::UdpL4,
            other => return Err(VnetError::UnknownGso(other)),
        };
        Ok(VnetHdr {
            needs_csum: flags & F_NEEDS_CSUM != 0,
            gso_type,
            gso_ecn: gso & GSO_ECN != 0,
            hdr_len: u16::from_le_bytes([h0, h1]),
            gso_size: u16::from_le_bytes([g0, g1]),
            csum_start: u16::from_le_bytes([s0, s1]),
            csum_offset: u16::from_le_bytes([o0, o1]),
        })
    }

    /// The header as bytes.
    pub fn to_bytes(self) -> [u8; VNET_HDR_LEN] {
        let gso = match self.gso_type {
            GsoType::None => 0,
            GsoType::Tcp4 => 1,
            GsoType::Tcp6 => 4,
            GsoType::UdpL4 => 5,
        } | if self.gso_ecn { GSO_ECN } else { 0 };
        let [h0, h1] = self.hdr_len.to_le_bytes();
        let [g0, g1] = self.gso_size.to_le_bytes();
        let [s0, s1] = self.csum_start.to_le_bytes();
        let [o0, o1] = self.csum_offset.to_le_bytes();
        let flags = if self.needs_csum { F_NEEDS_CSUM } else { 0 };
        [flags, gso, h0, h1, g0, g1, s0, s1, o0, o1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ecn_bit_is_not_part_of_the_type() {
        // gso_type 0x81: TCPv4 with the ECN bit, as the kernel writes it for a CWR super-packet.
        let h = VnetHdr::read(&[1, 0x81, 54, 0, 0xa8, 0x05, 20, 0, 16, 0]).unwrap();
        assert_eq!(h.gso_type, GsoType::Tcp4);
        assert!(h.gso_ecn && h.needs_csum);
        assert_eq!(
            (h.hdr_len, h.gso_size, h.csum_start, h.csum_offset),
            (54, 1448, 20, 16)
        );
        assert_eq!(h.to_bytes(), [1, 0x81, 54, 0, 0xa8, 0x05, 20, 0, 16, 0]);
    }

    #[test]
    fn short_or_unknown_headers_are_errors() {
        assert_eq!(VnetHdr::read(&[0; 9]), Err(VnetError::Truncated));
        let mut h = [0; 10];
        h[1] = 3; // VIRTIO_NET_HDR_GSO_UDP (UFO) is never asked for.
        assert_eq!(VnetHdr::read(&h), Err(VnetError::UnknownGso(3)));
    }
}
