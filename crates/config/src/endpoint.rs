//! Addresses of peers and coordinators: a host and a port.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// Address of a peer: `host:port`, `192.0.2.1:51820` or `[2001:db8::1]:51820`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// The host.
    pub host: Host,
    /// The UDP port, 1 to 65535.
    pub port: u16,
}

/// A host by address or by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// An address that needs no resolving.
    Address(IpAddr),
    /// A host name, or an IPv6 address with a scope (`fe80::1%eth0`), for `getaddrinfo`.
    Name(String),
}

/// Reason why a text is not an [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// An opening bracket without a closing one and a port.
    #[error("`]:port` is missing")]
    Bracket,
    /// The text in brackets is not an IPv6 address.
    #[error("`{0}` is not an IPv6 address")]
    Ipv6(String),
    /// An IPv6 address without brackets.
    #[error("an IPv6 address needs brackets and a port")]
    BareIpv6,
    /// There is no port.
    #[error("the port is missing")]
    NoPort,
    /// The text before the port is not a host.
    #[error("`{0}` is not a host")]
    Host(String),
    /// The text after the host is not a port.
    #[error("`{0}` is not a port from 1 to 65535")]
    Port(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest.split_once("]:").ok_or(EndpointError::Bracket)?;
                let host = bracketed(host).ok_or_else(|| EndpointError::Ipv6(host.to_owned()))?;
                (host, port)
            }
            None if Ipv6Addr::from_str(text).is_ok() => return Err(EndpointError::BareIpv6),
            None => {
                let (host, port) = text.rsplit_once(':').ok_or(EndpointError::NoPort)?;
                let host = plain_host(host).ok_or_else(|| EndpointError::Host(host.to_owned()))?;
                (host, port)
            }
        };
        // Digits only: `FromStr` would accept a sign as well.
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        match port.parse() {
            Ok(port) if digits && port != 0 => Ok(Self { host, port }),
            _ => Err(EndpointError::Port(port.to_owned())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Address(IpAddr::V6(address)) => write!(f, "[{address}]:{}", self.port),
            Host::Address(address) => write!(f, "{address}:{}", self.port),
            Host::Name(name) if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// `https://HOST` or `https://HOST:PORT`, without a path; port 443 unless given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorUrl(Endpoint);

/// The text is not the URL of a coordinator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the address of a coordinator: write `https://HOST` or `https://HOST:PORT`")]
pub struct NotACoordinator(String);

impl CoordinatorUrl {
    /// Host and port.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0
    }
}

impl FromStr for CoordinatorUrl {
    type Err = NotACoordinator;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || NotACoordinator(text.to_owned());
        let rest = text.strip_prefix("https://").ok_or_else(wrong)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let endpoint = Endpoint::from_str(rest)
            .or_else(|_| format!("{rest}:443").parse())
            .map_err(|_| wrong())?;
        // The host becomes part of a request line: only characters of host names and addresses are
        // allowed.
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_:".contains(c);
        match &endpoint.host {
            Host::Name(name) if !name.chars().all(plain) => Err(wrong()),
            _ => Ok(Self(endpoint)),
        }
    }
}

impl fmt::Display for CoordinatorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}", self.0)
    }
}

/// An IPv6 address from within brackets, with or without a scope.
fn bracketed(text: &str) -> Option<Host> {
    if let Ok(address) = Ipv6Addr::from_str(text) {
        return Some(Host::Address(IpAddr::V6(address)));
    }
    let (address, scope) = text.split_once('%')?;
    let scope_is_name = !scope.is_empty() && scope.chars().all(host_char);
    (Ipv6Addr::from_str(address).is_ok() && scope_is_name).then(|| Host::Name(text.to_owned()))
}

/// An IPv4 address or a host name.
pub(super) fn plain_host(text: &str) -> Option<Host> {
    if let Ok(address) = IpAddr::from_str(text) {
        return address.is_ipv4().then_some(Host::Address(address));
    }
    // A text of digits and dots that is no address is a mistyped one, not a name.
    let mistyped = text.chars().all(|c| c.is_ascii_digit() || c == '.');
    let name = !text.is_empty() && text.len() <= 253 && text.chars().all(host_char);
    (name && !mistyped).then(|| Host::Name(text.to_owned()))
}

fn host_char(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '_' | '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_and_a_port() {
        let shown = |text: &str| text.parse::<Endpoint>().unwrap().to_string();
        for text in [
            "192.0.2.1:51820",
            "[2001:db8::1]:51820",
            "vpn.example.com:1",
            "[fe80::1%eth0]:65535",
            "bücher.example:5",
        ] {
            assert_eq!(shown(text), text);
        }
        for text in [
            "",
            ":",
            "host",
            "host:",
            "host:0",
            "host:65536",
            "host:+5",
            ":51820",
            "2001:db8::1",
            "2001:db8::1:51820",
            "[2001:db8::1]",
            "[192.0.2.1]:5",
            "[]:5",
            "192.0.2:5",
            "192.0.2.1.1:5",
            "a b:5",
            "[fe80::1%]:5",
            "[fe80::1%e/0]:5",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_coordinator_is_named_by_host_and_port() {
        let shown = |text: &str| text.parse::<CoordinatorUrl>().map(|url| url.to_string());
        for (text, same) in [
            ("https://mesh.example.org", "https://mesh.example.org:443"),
            ("https://mesh.example.org/", "https://mesh.example.org:443"),
            ("https://192.0.2.1:7443", "https://192.0.2.1:7443"),
            ("https://[2001:db8::1]:7443/", "https://[2001:db8::1]:7443"),
            ("https://[2001:db8::1]", "https://[2001:db8::1]:443"),
        ] {
            assert_eq!(shown(text).as_deref(), Ok(same));
        }
        for bad in [
            "mesh.example.org",
            "http://mesh.example.org",
            "https://",
            "https://mesh.example.org/path",
            "https://user@mesh.example.org",
            "https://a b",
            "https://a:0",
            "https://a:99999",
        ] {
            assert!(shown(bad).is_err(), "{bad}");
        }
    }
}
