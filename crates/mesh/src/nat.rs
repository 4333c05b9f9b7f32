//! Type of the NAT of this host, from the results of STUN servers (RFC 4787, RFC 5780 section 4.3).
//!
//! If servers at different addresses or ports, queried from the tunnel's socket, report the same address and
//! port, the NAT has an endpoint-independent mapping, or there is none. Its filtering cannot be detected and
//! does not matter, because both ends send.

use crate::endpoints::{is_own, is_routable};
use crate::event::View;
use seikan_proto::birthday::{Mapping, NatMappings};
use seikan_proto::paths::is_private;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Result of one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The server's address.
    pub server: SocketAddr,
    /// Reflexive address of this host; `None` if the server does not answer.
    pub seen: Option<SocketAddr>,
}

/// Type of the NAT, for one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Nat {
    /// No server of this family is known, or this host has no address of it.
    Untested,
    /// No server answers.
    Silent,
    /// No NAT: the reflexive address is this host's own.
    Open,
    /// A NAT of unknown type, since only one server answers.
    Unknown,
    /// Endpoint-independent mapping.
    EndpointIndependent,
    /// Address-dependent or address and port-dependent mapping (symmetric).
    Symmetric,
}

/// Classifies the results of servers of one family, for a host with these addresses.
pub fn classify(sights: &[Sight], own: &[IpAddr]) -> Nat {
    let seen: Vec<SocketAddr> = sights.iter().filter_map(|sight| sight.seen).collect();
    let Some(first) = seen.first() else {
        return if sights.is_empty() || own.is_empty() {
            Nat::Untested
        } else {
            Nat::Silent
        };
    };
    if seen.iter().any(|address| address != first) {
        return Nat::Symmetric;
    }
    if own.contains(&first.ip()) {
        return Nat::Open;
    }
    match seen.len() {
        1 => Nat::Unknown,
        _ => Nat::EndpointIndependent,
    }
}

/// Whether a reflexive address is public.
pub(super) fn is_public(seen: &SocketAddr) -> bool {
    let ip = seen.ip().to_canonical();
    is_routable(ip) && !is_private(ip)
}

/// Converts results to the tunnel's type.
pub fn nat_mappings(views: &[View]) -> NatMappings {
    let family = |v6: bool| {
        let of_family = views.iter().filter(|view| view.server.is_ipv6() == v6);
        let sights = of_family.map(|view| Sight {
            server: view.server,
            seen: view.seen,
        });
        let from_outside = |sight: &Sight| sight.seen.is_none_or(|seen| is_public(&seen));
        // A server on this side of the NAT does not see the NAT.
        let sights: Vec<Sight> = sights.filter(from_outside).collect();
        // The mapping type does not depend on this host's own addresses.
        match classify(&sights, &[]) {
            Nat::Symmetric => {
                // The first one is the address reported to others.
                let mut all: Vec<IpAddr> = Vec::new();
                for seen in sights.iter().filter_map(|sight| sight.seen) {
                    if !all.contains(&seen.ip()) {
                        all.push(seen.ip());
                    }
                }
                Mapping::AddressAndPortDependent(all)
            }
            Nat::Open | Nat::Unknown | Nat::EndpointIndependent => Mapping::EndpointIndependent,
            Nat::Untested | Nat::Silent => Mapping::Unknown,
        }
    };
    let (v4, v6) = (family(false), family(true));
    let mut outer: Vec<IpAddr> = Vec::new();
    if v4 == Mapping::EndpointIndependent {
        let seen = views.iter().filter_map(|view| view.seen);
        let public = seen.filter(|seen| seen.is_ipv4() && is_public(seen));
        // All of them have the same. One of this host's own is not a NAT's.
        let mut seen = public.map(|seen| seen.ip());
        outer.extend(seen.next().filter(|ip| !is_own(*ip)));
    }
    NatMappings { v4, v6, outer }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sights(seen: &[Option<&str>]) -> Vec<Sight> {
        let of = |(n, seen): (u16, &Option<&str>)| Sight {
            server: SocketAddr::from(([192, 0, 2, 1], 3478 + n)),
            seen: seen.map(|text| text.parse().expect(text)),
        };
        (0..).zip(seen).map(of).collect()
    }

    #[test]
    fn a_nat_is_classified_by_the_results_of_several_servers() {
        let own = [
            "10.0.0.5".parse().expect("one"),
            "198.51.100.7".parse().expect("one"),
        ];
        let one = Some("203.0.113.9:4000");
        for (seen, nat) in [
            (vec![], Nat::Untested),
            (vec![None, None], Nat::Silent),
            (vec![Some("198.51.100.7:7"), None], Nat::Open),
            (vec![one], Nat::Unknown),
            (vec![one, None], Nat::Unknown),
            (vec![one, one], Nat::EndpointIndependent),
            (vec![one, Some("203.0.113.9:4001")], Nat::Symmetric),
            (vec![one, Some("203.0.113.8:4000")], Nat::Symmetric),
            // A firewall before a host without a NAT, and a second uplink.
            (vec![Some("198.51.100.7:7"), one], Nat::Symmetric),
        ] {
            assert_eq!(classify(&sights(&seen), &own), nat, "{seen:?}");
        }
        assert_eq!(classify(&sights(&[None]), &[]), Nat::Untested);
    }

    #[test]
    fn a_symmetric_nat_is_at_every_address_that_was_seen_the_first_one_first() {
        let mapping = |seen: &[Option<&str>]| {
            let view = |sight: Sight| View {
                name: String::new(),
                server: sight.server,
                seen: sight.seen,
                rtt: None,
            };
            let views: Vec<View> = sights(seen).into_iter().map(view).collect();
            let nat_mappings = nat_mappings(&views);
            assert_eq!(nat_mappings.v6, Mapping::Unknown);
            nat_mappings.v4
        };
        let [a, b] = ["203.0.113.9", "203.0.113.8"].map(|ip| ip.parse().expect(ip));
        let seen = [
            Some("203.0.113.9:1"),
            Some("203.0.113.8:2"),
            Some("203.0.113.9:3"),
            None,
        ];
        assert_eq!(mapping(&seen), Mapping::AddressAndPortDependent(vec![a, b]));
        assert_eq!(mapping(&seen[..1]), Mapping::EndpointIndependent);
        assert_eq!(mapping(&seen[3..]), Mapping::Unknown);
        assert_eq!(mapping(&[]), Mapping::Unknown);
        // A server on this side of the NAT, and one on this host.
        let seen = ["192.168.1.5:1", "127.0.0.1:1", "203.0.113.9:3"].map(Some);
        assert_eq!(mapping(&seen), Mapping::EndpointIndependent);
    }
}
