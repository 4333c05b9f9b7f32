//! What lies between this host and the rest of the world, by what STUN servers see of it (RFC 4787, RFC 5780 section 4.3).
//!
//! Servers at different addresses or ports that see this host at the same address and port, all asked from the tunnel's one socket,
//! have a NAT before them that maps alike for everybody, or none. How a NAT filters cannot be seen so, and does not matter: both
//! ends send.

use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// What one server said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// Who was asked.
    pub server: SocketAddr,
    /// Where it sees this host; `None`: it does not answer.
    pub seen: Option<SocketAddr>,
}

/// What is before this host, for one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nat {
    /// No server of this family is known, or this host has no address of it.
    NotAsked,
    /// No server answers.
    Silent,
    /// None: it is seen at an address of its own.
    Open,
    /// One of which a single server cannot tell more.
    Unknown,
    /// One that maps alike for everybody (endpoint-independent mapping).
    EndpointIndependent,
    /// One that maps anew for each destination (address-dependent, or address and port-dependent mapping): symmetric.
    Symmetric,
}

/// Judges what servers of one family saw of a host that has these addresses.
pub fn judge(sights: &[Sight], own: &[IpAddr]) -> Nat {
    let seen: Vec<SocketAddr> = sights.iter().filter_map(|sight| sight.seen).collect();
    let Some(first) = seen.first() else {
        return if sights.is_empty() || own.is_empty() {
            Nat::NotAsked
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
    fn a_nat_is_known_by_what_several_servers_see() {
        let own = [
            "10.0.0.5".parse().expect("one"),
            "198.51.100.7".parse().expect("one"),
        ];
        let one = Some("203.0.113.9:4000");
        for (seen, nat) in [
            (vec![], Nat::NotAsked),
            (vec![None, None], Nat::Silent),
            (vec![Some("198.51.100.7:7"), None], Nat::Open),
            (vec![one], Nat::Unknown),
            (vec![one, None], Nat::Unknown),
            (vec![one, one], Nat::EndpointIndependent),
            (vec![one, Some("203.0.113.9:4001")], Nat::Symmetric),
            (vec![one, Some("203.0.113.8:4000")], Nat::Symmetric),
            // A firewall before a host without a NAT, and another way out.
            (vec![Some("198.51.100.7:7"), one], Nat::Symmetric),
        ] {
            assert_eq!(judge(&sights(&seen), &own), nat, "{seen:?}");
        }
        assert_eq!(judge(&sights(&[None]), &[]), Nat::NotAsked);
    }
}
