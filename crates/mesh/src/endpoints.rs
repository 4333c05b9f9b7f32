//! This host's own addresses as endpoints. Addresses that no other host can use, or only through another
//! tunnel, are left out.

use ipnet::IpNet;
use seikan_proto::mesh::MAX_ENDPOINTS;
use seikan_proto::paths::is_private;
use seikan_proto::proxied;
use seikan_sys::netlink::{Address, Netlink, NetlinkError, RouteType};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Destinations for which the kernel is asked for a route, one of each family: two of the root name servers.
/// Nothing is sent.
const FAR: [IpAddr; 2] = [
    IpAddr::V6(Ipv6Addr::new(0x2001, 0x503, 0xba3e, 0, 0, 0, 2, 0x30)),
    IpAddr::V4(Ipv4Addr::new(198, 41, 0, 4)),
];
/// Kinds of interfaces (`IFLA_INFO_KIND`) whose packets go through another tunnel.
const TUNNELS: [&str; 17] = [
    "tun",
    "wireguard",
    "ovpn",
    "vxlan",
    "geneve",
    "bareudp",
    "gre",
    "gretap",
    "erspan",
    "ip6gre",
    "ip6gretap",
    "ip6tnl",
    "ipip",
    "sit",
    "vti",
    "vti6",
    "xfrm",
];

/// Returns this host's endpoints, IPv6 before IPv4, at most [`MAX_ENDPOINTS`]. `own` is the mesh's interface, if it has
/// one, `fwmark` the mark of the tunnel's datagrams.
///
/// Addresses of other tunnels are left out unless the default route uses them; otherwise members would run one
/// tunnel inside another.
pub(super) fn local(
    netlink: &Netlink,
    own: Option<u32>,
    networks: &[IpNet],
    fwmark: Option<u32>,
    port: u16,
) -> Result<Vec<SocketAddr>, NetlinkError> {
    let links = netlink.links()?;
    let of_kind = |kinds: &[&str]| -> BTreeSet<u32> {
        let those = links
            .iter()
            .filter(|link| kinds.contains(&link.kind.as_str()));
        those.map(|link| link.index).collect()
    };
    // Without a default route there is no source address.
    let sources = FAR.iter().filter_map(|far| {
        let route = netlink.route_get(*far, fwmark).ok()?;
        route.source.filter(|_| route.kind == RouteType::Unicast)
    });
    let host = Host {
        own,
        networks,
        tunnels: of_kind(&TUNNELS),
        bridges: of_kind(&["bridge"]),
        sources: sources.collect(),
    };
    Ok(host.choose(netlink.all_addresses()?, port))
}

/// Properties of the host's interfaces.
#[derive(Default)]
struct Host<'a> {
    /// Index of the mesh's interface, if it has one.
    own: Option<u32>,
    /// The mesh's networks.
    networks: &'a [IpNet],
    tunnels: BTreeSet<u32>,
    bridges: BTreeSet<u32>,
    /// Source addresses towards the rest of the internet.
    sources: BTreeSet<IpAddr>,
}

impl Host<'_> {
    fn choose(&self, mut all: Vec<Address>, port: u16) -> Vec<SocketAddr> {
        all.retain(|address| self.is_usable(address));
        all.sort_by_key(|address| (self.rank(address), address.net.addr().is_ipv4()));
        let ranked = all.iter().map(|address| address.net.addr());
        let mut found: Vec<IpAddr> = Vec::new();
        for ip in ranked {
            if found.len() < MAX_ENDPOINTS && !found.contains(&ip) {
                found.push(ip);
            }
        }
        found.sort_by_key(|ip| (ip.is_ipv4(), is_private(*ip)));
        found
            .into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .collect()
    }

    fn is_usable(&self, address: &Address) -> bool {
        let ip = address.net.addr();
        Some(address.index) != self.own
            && !address.tentative
            && !address.dad_failed
            && is_routable(ip)
            // Datagrams to addresses of the mesh would go through the mesh.
            && !self.networks.iter().any(|net| net.contains(&ip))
            && (!self.tunnels.contains(&address.index) || self.sources.contains(&ip))
    }

    /// Order of preference if there are too many: first this host's source addresses, since firewalls accept
    /// answers there; last those of bridges, whose containers have the same addresses on every host.
    fn rank(&self, address: &Address) -> (u8, bool, IpAddr) {
        let ip = address.net.addr();
        let rank = match address {
            _ if self.sources.contains(&ip) => 0,
            address if self.bridges.contains(&address.index) => 3,
            // Temporary and deprecated addresses rank lower, because they expire first.
            Address {
                temporary: true, ..
            }
            | Address {
                deprecated: true, ..
            } => 2,
            _ => 1,
        };
        (rank, is_private(ip), ip)
    }
}

/// Returns the unspecified address of a destination's family, with port 0: a socket bound to it can send there.
pub fn any_port(destination: SocketAddr) -> SocketAddr {
    match destination {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Whether another host could send to the address.
pub fn is_routable(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        // A link-local address is meaningless to other hosts.
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_proxied = proxied::id(ip).is_some();
    !(ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || link_local || is_proxied)
}

/// Whether a server of the mesh may have this address, `own` being the tunnel's port. Excluded are link-local
/// addresses such as 169.254.169.254, and on this host ports of system services (below 1024) and the tunnel
/// itself; a relay or coordinator on this host is allowed.
pub fn may_serve(server: SocketAddr, own: u16) -> bool {
    let (ip, port) = (server.ip().to_canonical(), server.port());
    let of_a_host = ip.is_loopback() || is_routable(ip);
    of_a_host && port != 0 && (!is_own(ip) || (port >= 1024 && port != own))
}

/// Whether an address is one of this host's.
pub(super) fn is_own(ip: IpAddr) -> bool {
    let found = Netlink::open().and_then(|netlink| netlink.route_get(ip, None));
    ip.is_loopback() || found.is_ok_and(|found| found.kind == RouteType::Local)
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
            temporary: false,
            deprecated: false,
        }
    }

    #[test]
    fn no_member_has_a_proxied_address() {
        assert!(!is_routable(proxied::address(7, 1).ip()));
    }

    #[test]
    fn this_hosts_addresses_are_its_own() {
        for own in ["127.0.0.1", "127.9.9.9", "::1"] {
            assert!(is_own(own.parse().expect(own)), "{own}");
        }
        for other in ["192.0.2.1", "2001:db8::1"] {
            assert!(!is_own(other.parse().expect(other)), "{other}");
        }
    }

    #[test]
    fn only_usable_addresses_are_reported_best_first() {
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
        let host = Host {
            own: Some(4),
            networks: &networks,
            ..Host::default()
        };
        assert_eq!(
            chosen(&host, all),
            [
                "[2001:db8::7]:7",
                "[fd12::1]:7",
                "198.51.100.7:7",
                "10.0.0.5:7"
            ]
        );
    }

    fn chosen(host: &Host<'_>, all: Vec<Address>) -> Vec<String> {
        let found = host.choose(all, 7);
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn addresses_of_other_tunnels_need_the_default_route() {
        let all = || {
            vec![
                address(2, "10.0.0.5/24"),
                address(7, "100.81.0.9/12"),
                address(8, "2001:db8::8/64"),
            ]
        };
        let mut host = Host {
            own: Some(4),
            tunnels: BTreeSet::from([7, 8]),
            ..Host::default()
        };
        assert_eq!(chosen(&host, all()), ["10.0.0.5:7"]);
        // The address of a tunnel broker.
        host.sources.insert("2001:db8::8".parse().expect("one"));
        assert_eq!(chosen(&host, all()), ["[2001:db8::8]:7", "10.0.0.5:7"]);
    }

    #[test]
    fn the_best_of_too_many_endpoints_are_reported() {
        let mut all: Vec<Address> = (0..10)
            .map(|n| address(9, &format!("172.{}.0.1/16", 17 + n)))
            .collect();
        let temporary = (1..=12).map(|n| Address {
            temporary: true,
            ..address(2, &format!("2001:db8::a:{n}/64"))
        });
        all.extend(temporary);
        let stable = ["2001:db8::7/64", "192.168.1.5/24", "198.51.100.7/24"];
        all.extend(stable.map(|net| address(2, net)));
        let host = Host {
            bridges: BTreeSet::from([9]),
            sources: ["2001:db8::a:12", "192.168.1.5"]
                .map(|ip| ip.parse().expect(ip))
                .into(),
            ..Host::default()
        };
        let found = chosen(&host, all);
        assert_eq!(found.len(), MAX_ENDPOINTS);
        // A source address, stable ones, temporary ones; of the bridges one, for which there is room.
        for expected in [
            "[2001:db8::a:12]:7",
            "192.168.1.5:7",
            "[2001:db8::7]:7",
            "198.51.100.7:7",
            "[2001:db8::a:1]:7",
            "172.17.0.1:7",
        ] {
            assert!(
                found.iter().any(|found| found == expected),
                "{expected} of {found:?}"
            );
        }
        assert_eq!(
            found
                .iter()
                .filter(|found| found.starts_with("172."))
                .count(),
            1
        );
    }

    #[test]
    fn the_number_of_endpoints_is_limited() {
        let many = (0..40)
            .map(|n| address(2, &format!("10.0.0.{n}/24")))
            .collect();
        assert_eq!(Host::default().choose(many, 7).len(), MAX_ENDPOINTS);
    }
}
