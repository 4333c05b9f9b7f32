//! Addresses of the paths to the far host: outside of any tunnel, and through one.

use std::net::IpAddr;

use anyhow::bail;
use seikan_sys::netlink::Netlink;

use super::control::Host;
use super::far;
use super::near::Path;

/// Maximum number of addresses outside of the tunnel that are tried.
const TRIED: usize = 3;

/// Interfaces of this host towards the addresses of another host.
pub struct Routes {
    /// Each address with the interface.
    interfaces: Vec<(IpAddr, String)>,
    /// Tunnels of this host.
    tunnels: Vec<String>,
}

impl Routes {
    /// Looks up the routes to these addresses.
    ///
    /// # Errors
    /// The interfaces of this host cannot be listed.
    pub fn to(addresses: impl IntoIterator<Item = IpAddr>) -> anyhow::Result<Routes> {
        let netlink = Netlink::open()?;
        let interface = |address: IpAddr| {
            let route = netlink.route_get(address, None).ok()?;
            Some((address, netlink.link_by_index(route.device).ok()?.name))
        };
        Ok(Routes {
            interfaces: addresses.into_iter().filter_map(interface).collect(),
            tunnels: far::tunnels()?.into_iter().collect(),
        })
    }

    /// Returns the interface towards an address, if there is a route.
    fn interface(&self, address: IpAddr) -> Option<&str> {
        let found = self.interfaces.iter().find(|(to, _)| *to == address)?;
        Some(&found.1)
    }

    fn tunnel(&self, address: IpAddr) -> Option<&str> {
        let interface = self.interface(address)?;
        self.tunnels
            .iter()
            .map(String::as_str)
            .find(|tunnel| *tunnel == interface)
    }
}

/// Returns the paths to try outside of tunnels, the best first. `given`: address from the command line.
///
/// # Errors
/// There is no such path.
pub fn raw(host: &Host, given: Option<IpAddr>, routes: &Routes) -> anyhow::Result<Vec<Path>> {
    let outside = host.addresses.iter().filter(|address| !address.is_tunnel);
    let own: Vec<IpAddr> = outside.map(|address| address.ip).collect();
    let candidates = match given {
        Some(address) => vec![address],
        None => host.ssh.into_iter().chain(own.iter().copied()).collect(),
    };
    let mut paths: Vec<Path> = Vec::new();
    for to in candidates {
        let is_known = paths.iter().any(|path| path.to == to);
        if is_known || routes.interface(to).is_none() || routes.tunnel(to).is_some() {
            continue;
        }
        // A router may translate an address that is not the far host's own.
        let at = if own.contains(&to) {
            vec![to]
        } else {
            own.iter()
                .filter(|address| address.is_ipv4() == to.is_ipv4())
                .copied()
                .collect()
        };
        if !at.is_empty() {
            paths.push(Path {
                to,
                at,
                tunnel: None,
                namespace: None,
            });
        }
    }
    paths.truncate(TRIED);
    if paths.is_empty() {
        bail!("no address of the far end is reached outside of a tunnel; name one with --address");
    }
    Ok(paths)
}

/// Returns the path through a tunnel; through that of `interface`, if given.
///
/// # Errors
/// There is no such path.
pub fn tunnel(host: &Host, interface: Option<&str>, routes: &Routes) -> anyhow::Result<Path> {
    let mut addresses: Vec<_> = host.addresses.iter().collect();
    // Prefer an address of the far end's tunnel to another one that the tunnel here leads to.
    addresses.sort_by_key(|address| !address.is_tunnel);
    for address in addresses {
        let here = routes.tunnel(address.ip);
        let Some(here) = here.filter(|here| interface.is_none_or(|name| name == *here)) else {
            continue;
        };
        // If the far end has no tunnel interface, its doctor measures none.
        let there = host.addresses.iter().find(|other| {
            other.is_tunnel && (!address.is_tunnel || other.interface == address.interface)
        });
        let Some(there) = there else { continue };
        return Ok(Path {
            to: address.ip,
            at: vec![address.ip],
            tunnel: Some([here.to_owned(), there.interface.clone()]),
            namespace: None,
        });
    }
    match interface {
        Some(name) => bail!("interface {name} is connected to no tunnel of the far end"),
        None => bail!("no tunnel of this host is connected to a tunnel of the far end"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::Address;
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn host(addresses: &[(&str, &str)]) -> Host {
        let address = |(text, interface): &(&str, &str)| Address {
            ip: ip(text),
            interface: (*interface).to_owned(),
            is_tunnel: interface.starts_with("wg"),
        };
        Host {
            addresses: addresses.iter().map(address).collect(),
            ssh: Some(ip("203.0.113.9")),
            ..Host::default()
        }
    }

    fn routes(interfaces: &[(&str, &str)]) -> Routes {
        let route = |(address, name): &(&str, &str)| (ip(address), (*name).to_owned());
        Routes {
            interfaces: interfaces.iter().map(route).collect(),
            tunnels: vec!["wg0".into(), "wg1".into()],
        }
    }

    #[test]
    fn the_raw_path_passes_no_tunnel_and_prefers_the_address_of_ssh() {
        let host = host(&[("192.168.1.2", "eth0"), ("10.8.0.2", "wg0")]);
        let routes = routes(&[
            ("203.0.113.9", "eth0"),
            ("192.168.1.2", "wg0"),
            ("10.8.0.2", "wg0"),
        ]);
        let paths = raw(&host, None, &routes).expect("a path");
        let to: Vec<IpAddr> = paths.iter().map(|path| path.to).collect();
        assert_eq!(to, [ip("203.0.113.9")]);
        // Translated by a router: the port is opened at the far end's own address.
        assert_eq!(paths[0].at, [ip("192.168.1.2")]);
        assert!(raw(&host, Some(ip("10.8.0.2")), &routes).is_err());
    }

    #[test]
    fn the_tunnel_is_the_one_that_leads_to_a_tunnel_of_the_far_end() {
        let host = host(&[
            ("192.168.1.2", "eth0"),
            ("10.8.0.2", "wg7"),
            ("10.9.0.2", "wg9"),
        ]);
        let routes = routes(&[
            ("192.168.1.2", "eth0"),
            ("10.8.0.2", "wg0"),
            ("10.9.0.2", "wg1"),
        ]);
        let of = |interface| {
            tunnel(&host, interface, &routes)
                .ok()
                .and_then(|it| it.tunnel)
        };
        let pair = |here: &str, there: &str| Some([here.to_owned(), there.to_owned()]);
        assert_eq!(of(None), pair("wg0", "wg7"));
        assert_eq!(of(Some("wg1")), pair("wg1", "wg9"));
        assert_eq!(of(Some("eth0")), None);
    }
}
