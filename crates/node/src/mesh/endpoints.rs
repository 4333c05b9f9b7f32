//! Where this host may be reached: its own addresses. The kernel knows them; those that no other host can use are left out.

use ipnet::IpNet;
use seikan_proto::mesh::MAX_ENDPOINTS;
use seikan_sys::netlink::{Address, Netlink, NetlinkError};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The host's endpoints, IPv6 before IPv4 and public addresses before private ones. `own` is the mesh's own interface.
pub(super) fn local(
    netlink: &Netlink,
    own: u32,
    networks: &[IpNet],
    port: u16,
) -> Result<Vec<SocketAddr>, NetlinkError> {
    Ok(choose(netlink.all_addresses()?, own, networks, port))
}

fn choose(all: Vec<Address>, own: u32, networks: &[IpNet], port: u16) -> Vec<SocketAddr> {
    let usable = |address: &Address| {
        let ip = address.net.addr();
        address.index != own
            && !address.tentative
            && !address.dad_failed
            && is_routable(ip)
            // What goes to the mesh's addresses goes through the mesh.
            && !networks.iter().any(|net| net.contains(&ip))
    };
    let mut found: Vec<IpAddr> = all
        .iter()
        .filter(|a| usable(a))
        .map(|a| a.net.addr())
        .collect();
    found.sort_by_key(|ip| (ip.is_ipv4(), is_private(*ip), *ip));
    found.dedup();
    found.truncate(MAX_ENDPOINTS);
    found
        .into_iter()
        .map(|ip| SocketAddr::new(ip, port))
        .collect()
}

/// Whether another host could send there at all.
pub(crate) fn is_routable(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        // Without its scope it means nothing to others.
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || link_local)
}

/// RFC 1918, RFC 6598, RFC 4193.
fn is_private(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_private() || (ip.octets()[0] == 100 && ip.octets()[1] & 0xc0 == 64),
        IpAddr::V6(ip) => Ipv6Addr::is_unique_local(&ip),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(index: u32, net: &str) -> Address {
        Address {
            index,
            net: net.parse().expect(net),
            peer: None,
            tentative: false,
            dad_failed: false,
        }
    }

    #[test]
    fn only_what_others_can_use_is_told_the_best_first() {
        let all = vec![
            address(1, "127.0.0.1/8"),
            address(1, "::1/128"),
            address(2, "10.0.0.5/24"),
            address(2, "198.51.100.7/24"),
            address(2, "fe80::1/64"),
            address(2, "fd12::1/64"),
            address(2, "2001:db8::7/64"),
            address(3, "169.254.3.4/16"),
            address(3, "198.51.100.7/32"),
            address(4, "100.80.0.1/12"),
            address(5, "100.80.0.9/32"),
            Address {
                tentative: true,
                ..address(2, "2001:db8::8/64")
            },
        ];
        let networks = ["100.80.0.1/12".parse().expect("a network")];
        let found: Vec<String> = choose(all, 4, &networks, 7)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            found,
            [
                "[2001:db8::7]:7",
                "[fd12::1]:7",
                "198.51.100.7:7",
                "10.0.0.5:7"
            ]
        );
    }

    #[test]
    fn no_more_are_told_than_a_coordinator_takes() {
        let many = (0..40)
            .map(|n| address(2, &format!("10.0.0.{n}/24")))
            .collect();
        assert_eq!(choose(many, 4, &[], 7).len(), MAX_ENDPOINTS);
    }
}
