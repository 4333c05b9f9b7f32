//! Destinations inside a tunnel.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A host inside the tunnel, by name or address, and one of its ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// A name, or an IP address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// A text that does not name a destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot use `{0}` as a destination: use NAME:PORT or ADDRESS:PORT, IPv6 in brackets")]
pub struct NotADestination(pub String);

/// Types that name a destination: `"db-1:5432"`, `("db-1", 5432)`, addresses with ports, and [`Destination`] itself.
pub trait IntoDestination {
    /// Returns the destination.
    ///
    /// # Errors
    /// The text is not `HOST:PORT`.
    fn into_destination(self) -> Result<Destination, NotADestination>;
}

impl IntoDestination for Destination {
    fn into_destination(self) -> Result<Destination, NotADestination> {
        Ok(self)
    }
}

impl IntoDestination for &str {
    fn into_destination(self) -> Result<Destination, NotADestination> {
        parse(self).ok_or_else(|| NotADestination(self.to_owned()))
    }
}

fn parse(text: &str) -> Option<Destination> {
    let (host, port) = text.rsplit_once(':')?;
    let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
        Some(inner) => inner.parse::<Ipv6Addr>().ok()?.to_string(),
        None if host.is_empty() || host.contains(':') => return None,
        None => host.to_owned(),
    };
    let port = port.parse().ok()?;
    Some(Destination { host, port })
}

impl IntoDestination for SocketAddr {
    fn into_destination(self) -> Result<Destination, NotADestination> {
        (self.ip(), self.port()).into_destination()
    }
}

macro_rules! pairs {
    ($($host:ty,)*) => {
        $(impl IntoDestination for ($host, u16) {
            fn into_destination(self) -> Result<Destination, NotADestination> {
                let (host, port) = self;
                Ok(Destination { host: host.to_string(), port })
            }
        })*
    };
}

pairs! { &str, String, IpAddr, Ipv4Addr, Ipv6Addr, }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_host_and_a_port() {
        for (text, host, port) in [
            ("db-1:5432", "db-1", 5432),
            ("10.0.0.1:80", "10.0.0.1", 80),
            ("[fd00::1]:80", "fd00::1", 80),
        ] {
            let destination = text.into_destination().expect(text);
            assert_eq!((destination.host.as_str(), destination.port), (host, port));
            assert_eq!(destination.to_string(), text);
        }
        for text in [
            "",
            "db-1",
            ":80",
            "db-1:",
            "db-1:65536",
            "fd00::1:80",
            "[db-1]:80",
        ] {
            assert!(text.into_destination().is_err(), "{text}");
        }
    }
}
