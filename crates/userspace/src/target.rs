//! Requests of clients: their destinations, and the reasons for which they fail.

use std::net::{IpAddr, Ipv6Addr};

/// The destination of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub host: Host,
    /// Never 0.
    pub port: u16,
}

/// The host of a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    Address(IpAddr),
    /// A name in lower case, without a dot at its end.
    Name(String),
}

impl Host {
    /// Reads a name or an address without brackets; `None` if it is neither.
    pub fn parse(text: &str) -> Option<Host> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Host::Address(address.to_canonical()));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        let is_name = (1..=253).contains(&name.len()) && name.chars().all(valid);
        is_name.then(|| Host::Name(name.to_ascii_lowercase()))
    }
}

impl Target {
    /// Reads `HOST:PORT`, with an IPv6 address in brackets (RFC 9110 section 9.3.6).
    pub fn parse_authority(text: &str) -> Option<Target> {
        let (host, port) = text.rsplit_once(':')?;
        let digits = port.bytes().all(|b| b.is_ascii_digit());
        let port: u16 = port.parse().ok().filter(|port| *port != 0 && digits)?;
        let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(inner) => Host::Address(inner.parse::<Ipv6Addr>().ok()?.to_canonical()),
            None if host.contains(':') => return None,
            None => Host::parse(host)?,
        };
        Some(Target { host, port })
    }
}

/// Why a destination cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The far end refused the connection.
    Refused,
    /// There is no path to the host.
    Unreachable,
    /// The name is unknown, or none of its addresses is of a family of this host.
    UnknownName,
    /// The far end did not answer.
    TimedOut,
    /// The stack has reached its limit of connections.
    Limit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_address_in_the_form_of_ipv6_is_one_of_ipv4() {
        let address = "10.0.0.1".parse().unwrap();
        assert_eq!(Host::parse("::ffff:10.0.0.1"), Some(Host::Address(address)));
    }

    #[test]
    fn authorities_are_read_strictly() {
        let host = |text: &str| Host::parse(text).unwrap();
        for (text, expected, port) in [
            ("DB-1.mesh.:5432", host("db-1.mesh"), 5432),
            ("10.0.0.1:80", host("10.0.0.1"), 80),
            ("[fd00::1]:65535", host("fd00::1"), 65535),
            ("[::ffff:10.0.0.1]:80", host("10.0.0.1"), 80),
        ] {
            let target = Target::parse_authority(text).unwrap();
            assert_eq!(
                target,
                Target {
                    host: expected,
                    port
                },
                "{text}"
            );
        }
        for text in [
            "",
            ":80",
            "a",
            "a:",
            "a:0",
            "a:65536",
            "a:+80",
            "a b:80",
            "fd00::1:80",
            "[10.0.0.1]:80",
            "[a]:80",
            "a/b:80",
            "a\u{e9}:80",
        ] {
            assert_eq!(Target::parse_authority(text), None, "{text}");
        }
    }
}
