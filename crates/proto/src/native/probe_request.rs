//! The request for port probing: the body of a PORTS frame.

use std::net::{IpAddr, Ipv6Addr};

/// Maximum number of addresses of each family in one probe request.
pub const MAX_ADDRESSES: usize = 2;

/// The request of the symmetric end to the other end: the PORTS frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeRequest {
    /// Number of open ports. Zero is the answer of an end that is behind a symmetric NAT too and
    /// will not probe.
    pub ports: u16,
    /// Outer addresses of the open ports; at most [`MAX_ADDRESSES`] of each family.
    pub addresses: Vec<IpAddr>,
}

impl ProbeRequest {
    /// Length of the port count in bytes.
    pub const PORTS_LEN: usize = 2;
    /// Length of an address in bytes. IPv4 is sent as an IPv4-mapped address (RFC 4291, section
    /// 2.5.5.2).
    pub const ADDRESS_LEN: usize = 16;

    /// Parses the body of a PORTS frame. Trailing bytes and addresses beyond the maximum are
    /// ignored. Returns `None` if the body is too short.
    pub fn read(body: &[u8]) -> Option<ProbeRequest> {
        let (ports, addresses) = body.split_first_chunk()?;
        let (addresses, _) = addresses.as_chunks::<{ ProbeRequest::ADDRESS_LEN }>();
        let addresses = addresses.iter().take(2 * MAX_ADDRESSES);
        Some(ProbeRequest {
            ports: u16::from_le_bytes(*ports),
            addresses: addresses
                .map(|bytes| Ipv6Addr::from(*bytes).to_canonical())
                .collect(),
        })
    }

    /// Length of the frame body in bytes.
    #[expect(clippy::len_without_is_empty, reason = "none is empty")]
    pub fn len(&self) -> usize {
        ProbeRequest::PORTS_LEN + self.addresses.len() * ProbeRequest::ADDRESS_LEN
    }

    /// Returns the frame body.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mapped = |ip: &IpAddr| match ip {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        let addresses = self.addresses.iter().flat_map(mapped);
        self.ports
            .to_le_bytes()
            .into_iter()
            .chain(addresses)
            .collect()
    }
}
