//! Virtual addresses: a member's number selects its address in every network of the mesh.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// Maximum number of members, by the mesh's IPv6 network: numbers go from 1 to this.
pub const HOSTS: u32 = (1 << 24) - 2;
/// A part of the shared address space (RFC 6598), the default of a mesh.
const DEFAULT_V4: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(100, 80, 0, 0), 12);

/// The networks of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Networks {
    /// Its IPv4 network.
    pub v4: Ipv4Net,
    /// Its IPv6 network, a /64.
    pub v6: Ipv6Net,
}

/// Why networks cannot be used for a mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    /// Too small or too large.
    #[error("{0} cannot be the mesh's network: its prefix must have /8 to /30")]
    V4(Ipv4Net),
    /// Not a /64.
    #[error("{0} cannot be the mesh's network: its prefix must be a /64")]
    V6(Ipv6Net),
}

impl Networks {
    /// Creates the networks, with their host bits cleared.
    ///
    /// # Errors
    /// An IPv4 prefix that is not /8 to /30; an IPv6 prefix that is not a /64.
    pub fn new(v4: Ipv4Net, v6: Ipv6Net) -> Result<Self, NetworkError> {
        if !(8..=30).contains(&v4.prefix_len()) {
            return Err(NetworkError::V4(v4));
        }
        if v6.prefix_len() != 64 {
            return Err(NetworkError::V6(v6));
        }
        Ok(Self {
            v4: v4.trunc(),
            v6: v6.trunc(),
        })
    }

    /// 100.80.0.0/12 of the shared address space, and a unique local network (RFC 4193, section
    /// 3.2) with these five random bytes as global ID and subnet 0.
    pub fn from_random(random: [u8; 5]) -> Self {
        let [a, b, c, d, e] = random;
        let segments = [
            u16::from_be_bytes([0xfd, a]),
            u16::from_be_bytes([b, c]),
            u16::from_be_bytes([d, e]),
        ];
        let [a, b, c] = segments;
        Self {
            v4: DEFAULT_V4,
            v6: Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0), 64),
        }
    }

    /// The highest number that a member can have.
    pub fn capacity(&self) -> u32 {
        // Less the network's own address and the broadcast address.
        let bits = 32 - u32::from(self.v4.prefix_len());
        ((1 << bits) - 2).min(HOSTS)
    }

    /// The addresses of member `number`, from 1 to [`Self::capacity`]; `None` for any other.
    pub fn addresses(&self, number: u32) -> Option<[IpAddr; 2]> {
        if number == 0 || number > self.capacity() {
            return None;
        }
        let v4 = Ipv4Addr::from(u32::from(self.v4.network()) + number);
        let v6 = Ipv6Addr::from(u128::from(self.v6.network()) + u128::from(number));
        Some([v4.into(), v6.into()])
    }

    /// The same as interface addresses, with the prefix length of the network.
    pub fn interface_addresses(&self, number: u32) -> Option<[IpNet; 2]> {
        let [v4, v6] = self.addresses(number)?;
        let with = |address, length| IpNet::new_assert(address, length);
        Some([
            with(v4, self.v4.prefix_len()),
            with(v6, self.v6.prefix_len()),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_selects_an_address_in_both_networks() {
        let networks = Networks::from_random([1, 2, 3, 4, 5]);
        assert_eq!(networks.v6.to_string(), "fd01:203:405::/64");
        let addresses = networks.addresses(258).expect("a member's");
        assert_eq!(
            addresses.map(|a| a.to_string()),
            ["100.80.1.2", "fd01:203:405::102"]
        );
        assert_eq!(
            networks
                .interface_addresses(1)
                .map(|a| a.map(|n| n.to_string())),
            Some(["100.80.0.1/12".to_owned(), "fd01:203:405::1/64".to_owned()])
        );
    }

    #[test]
    fn neither_the_network_nor_the_broadcast_address_is_a_members() {
        let v6 = "fd00::/64".parse().expect("a network");
        let small = Networks::new("10.0.0.8/30".parse().expect("a network"), v6).expect("networks");
        assert_eq!(small.capacity(), 2);
        assert_eq!(small.addresses(0), None);
        assert_eq!(
            small.addresses(2).map(|a| a[0].to_string()),
            Some("10.0.0.10".into())
        );
        assert_eq!(small.addresses(3), None);
        let large = Networks::new("10.0.0.0/8".parse().expect("a network"), v6).expect("networks");
        assert_eq!(large.capacity(), HOSTS);
        for bad in ["10.0.0.0/31", "0.0.0.0/4"] {
            assert!(Networks::new(bad.parse().expect(bad), v6).is_err(), "{bad}");
        }
    }
}
