//! Endpoints of peers that are given by host name, resolved before a tunnel starts.

use crate::node::{NodeError, resolve};
use crate::setup::routes::{Endpoints, best_route};
use ipnet::IpNet;
use seikan_config::{Config, Diagnostic, Host, Mode, PeerConfig, Severity, Table};
use seikan_sys::dns;
use seikan_sys::netlink::Route;
use std::net::{IpAddr, SocketAddr};

/// Endpoints of a configuration, as far as they could be resolved.
pub struct Resolved {
    /// The configuration with addresses in place of names. A peer whose name could not be resolved has no endpoint.
    pub config: Config,
    /// Addresses of the endpoints.
    pub addresses: Vec<IpAddr>,
    /// Positions of the peers whose names could not be resolved, with the errors.
    pub failures: Vec<(usize, NodeError)>,
}

/// Resolves all endpoints once.
pub fn resolve_all(config: &Config) -> Resolved {
    let mut resolved = Resolved {
        config: config.clone(),
        addresses: Vec::new(),
        failures: Vec::new(),
    };
    for (position, peer) in resolved.config.peers.iter_mut().enumerate() {
        let Some(endpoint) = &mut peer.endpoint else {
            continue;
        };
        match resolve(&endpoint.host, endpoint.port) {
            Ok(address) => {
                // A link-local address keeps its name, which has the scope.
                if !matches!(address, SocketAddr::V6(v6) if v6.scope_id() != 0) {
                    endpoint.host = Host::Address(address.ip());
                }
                resolved.addresses.push(address.ip());
            }
            Err(error) => {
                resolved.failures.push((position, error));
                peer.endpoint = None;
            }
        }
    }
    resolved
}

impl Resolved {
    /// Returns the endpoints for a plan of routes.
    pub fn endpoints(&self) -> Endpoints {
        Endpoints {
            addresses: self.addresses.clone(),
            has_unknown: !self.failures.is_empty(),
        }
    }

    /// Reports names that could not be resolved, as during boot. They are retried while the tunnel runs.
    pub fn warn(&self, warn: &mut dyn FnMut(Diagnostic)) {
        for (_, error) in &self.failures {
            let name = self.config.name.as_str();
            let warning = Diagnostic::new(Severity::Warning, name, error.to_string());
            let help = "the tunnel starts without this peer's address, and resolves it again every few seconds";
            warn(warning.with_help(help));
        }
    }

    /// Whether the tunnel, once it is set up, leads every look-up of a name to a peer whose own name could not be resolved.
    /// Such a name would never be resolved. `servers` are the name servers of this host, `main` its routes.
    pub fn is_deadlock(&self, servers: &[IpAddr], main: &[Route]) -> bool {
        let config = &self.config;
        // Other routes than these are not known here, and neither are the name servers behind them.
        let has_routes = config.mode == Mode::Ip && config.table == Table::Auto;
        let servers = match config.dns.as_slice() {
            [] if !has_routes => return false,
            [] => servers,
            own => own,
        };
        let is_behind = |server: &IpAddr| match self.peer_of(*server) {
            Some((position, prefix)) => {
                let more_specific =
                    best_route(*server, main).is_some_and(|length| length > prefix.prefix_len());
                !more_specific && self.failures.iter().any(|(peer, _)| *peer == position)
            }
            None => false,
        };
        !self.failures.is_empty() && !servers.is_empty() && servers.iter().all(is_behind)
    }

    /// Returns the position of the peer that gets packets to an address, and its prefix. A name server on this host itself
    /// asks others, which are assumed to be on the Internet of IPv4.
    fn peer_of(&self, address: IpAddr) -> Option<(usize, IpNet)> {
        let is_of = |prefix: &IpNet| {
            if address.is_loopback() {
                prefix.addr().is_ipv4() && prefix.prefix_len() <= 1
            } else {
                prefix.contains(&address)
            }
        };
        let prefixes = |(position, peer): (usize, &PeerConfig)| {
            let prefixes = peer.allowed_ips.iter().filter(|prefix| is_of(prefix));
            prefixes
                .max_by_key(|prefix| prefix.prefix_len())
                .map(|prefix| (position, *prefix))
        };
        let peers = self.config.peers.iter().enumerate();
        peers
            .filter_map(prefixes)
            .max_by_key(|(_, prefix)| prefix.prefix_len())
    }
}

/// Returns the name servers of this host; a name server on the host itself if it names none (resolv.conf(5)).
pub fn name_servers() -> Vec<IpAddr> {
    let mut servers = dns::servers();
    if servers.is_empty() {
        servers.push([127, 0, 0, 1].into());
    }
    servers
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_config::{Overrides, Source, Syntax, parse};
    use zeroize::Zeroizing;

    const KEYS: [&str; 2] = [
        "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=",
        "TrMvSoP4jYQlY6RIzBgbssQqY3vxI2Pi+y71lOWWXX0=",
    ];

    /// Two peers with these allowed IPs, of which the first could not be resolved.
    fn unresolved(interface: &str, allowed: [&str; 2]) -> Resolved {
        let peer = |i: usize| {
            format!(
                "[Peer]\nPublicKey = {}\nAllowedIPs = {}\n",
                KEYS[i], allowed[i]
            )
        };
        let text = format!(
            "[Interface]\nPrivateKey = yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=\n{interface}\n{}{}",
            peer(0),
            peer(1)
        );
        let source = Source {
            file: "wg0.conf".into(),
            syntax: Syntax::Ini,
            text: Zeroizing::new(text),
        };
        let parsed = parse(&source, &Overrides::default(), &|_| unreachable!());
        let error = NodeError::Resolve {
            host: "a.example".into(),
            error: std::io::ErrorKind::NotFound.into(),
        };
        Resolved {
            config: parsed
                .config
                .unwrap_or_else(|| panic!("{}", parsed.diagnostics.render(false))),
            addresses: Vec::new(),
            failures: vec![(0, error)],
        }
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn a_name_that_is_looked_up_through_its_own_peer_is_a_deadlock() {
        let main = ["0.0.0.0/0", "192.0.2.0/24"].map(|net| Route::to(net.parse().expect("a net")));
        let is = |interface: &str, allowed: [&str; 2], servers: &[&str]| {
            let servers: Vec<IpAddr> = servers.iter().map(|server| ip(server)).collect();
            unresolved(interface, allowed).is_deadlock(&servers, &main)
        };
        let all = ["0.0.0.0/0", "10.2.0.0/16"];
        assert!(is("", all, &["198.51.100.1"]));
        assert!(is(
            "",
            ["128.0.0.0/1, 0.0.0.0/1", "10.2.0.0/16"],
            &["198.51.100.1"]
        ));
        assert!(is("DNS = 10.99.0.1", all, &["192.0.2.1"]));
        assert!(is("", all, &["127.0.0.53"]), "it asks a server elsewhere");
        // On a network of this host; outside of the tunnel; behind the other peer.
        assert!(!is("", all, &["192.0.2.1"]));
        assert!(!is("", all, &["198.51.100.1", "192.0.2.1"]));
        assert!(!is("", ["10.1.0.0/16", "10.2.0.0/16"], &["198.51.100.1"]));
        assert!(!is("", ["10.1.0.0/16", "10.2.0.0/16"], &["127.0.0.53"]));
        assert!(!is("", all, &["10.2.0.1"]));
        assert!(!is("DNS = 10.2.0.1", all, &["198.51.100.1"]));
        assert!(!is("Table = off", all, &["198.51.100.1"]));
        let resolved = Resolved {
            failures: Vec::new(),
            ..unresolved("", all)
        };
        assert!(!resolved.is_deadlock(&[ip("198.51.100.1")], &main));
    }
}
