//! Proxied addresses: datagrams to them go through a relay over TLS or a TURN server, instead of the
//! tunnel's own sockets.
//!
//! Proxied addresses are in 100::/64, the discard prefix (RFC 6666), which no host has. The
//! interface identifier is random. Datagrams that come from this prefix to the tunnel's own sockets
//! are dropped.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The upper 64 bits of 100::/64.
const PREFIX: u64 = 0x0100 << 48;

/// Returns the proxied address with this interface identifier and port.
pub fn address(id: u64, port: u16) -> SocketAddr {
    let bits = u128::from(PREFIX) << 64 | u128::from(id);
    (Ipv6Addr::from_bits(bits), port).into()
}

/// Returns the interface identifier of a proxied address; `None` for any other address.
pub fn id(ip: IpAddr) -> Option<u64> {
    let IpAddr::V6(ip) = ip else { return None };
    let bits = ip.to_bits();
    ((bits >> 64) as u64 == PREFIX).then_some(bits as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_in_the_discard_prefix_and_no_others_are_proxied() {
        let at = address(0x1234_5678_9abc_def0, 7);
        assert_eq!(at.to_string(), "[100::1234:5678:9abc:def0]:7");
        assert_eq!(id(at.ip()), Some(0x1234_5678_9abc_def0));
        for other in ["100:0:0:1::1", "::1", "2001:db8::1", "127.0.0.1", "1.0.0.0"] {
            assert_eq!(id(other.parse().expect(other)), None, "{other}");
        }
    }
}
