//! Options of a stack, and the texts that describe forwarded and exposed ports.

use ipnet::IpNet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

/// Options of a stack.
#[derive(Clone, Debug)]
pub struct Options {
    /// Addresses of this host inside the tunnel, 1 to 8. The prefix lengths only help to choose the
    /// source address: everything goes into the tunnel.
    pub addresses: Vec<IpNet>,
    /// MTU of the tunnel in bytes, 576 to 65535 (with an IPv6 address at least 1280).
    pub mtu: u32,
    /// Addresses of the host on which SOCKS5 is served; port 0 chooses a free port.
    pub socks: Vec<SocketAddr>,
    /// Addresses of the host on which HTTP CONNECT is served; port 0 chooses a free port.
    pub http: Vec<SocketAddr>,
    /// Ports of the host that lead into the tunnel.
    pub forwards: Vec<Forward>,
    /// Ports inside the tunnel that lead to the host.
    pub exposed: Vec<Exposed>,
    /// Bounds on memory.
    pub limits: Limits,
}

/// Bounds on the memory of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of simultaneous connections and UDP flows of all services together. The
    /// process's limit of open files less 256 applies as well.
    pub connections: usize,
    /// Maximum size of all connection buffers together, in bytes. New connections get smaller
    /// buffers once a quarter of it is used, and the smallest from three quarters on.
    pub buffer_bytes: usize,
    /// Time without a segment from the far end after which a connection opened by the far end is
    /// closed. From half of this time on, the far end is probed ten times (keep-alives, RFC 9293
    /// section 3.8.4).
    pub silent_for: Duration,
    /// Time without progress after which a connection that one side has ended is closed.
    pub half_closed_for: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 4096,
            buffer_bytes: 512 << 20,
            silent_for: Duration::from_secs(600),
            half_closed_for: Duration::from_secs(600),
        }
    }
}

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
        })
    }
}

/// A port of the host that leads to a port inside the tunnel: `[ADDRESS:]PORT:HOST:PORT[/udp]`, for example
/// `8080:db-1:5432`, `127.0.0.1:8080:db-1:5432` or `[::1]:8080:[fd00::1]:80`. The address is 127.0.0.1 by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// Address of the host to listen on. Port 0 chooses a free port; the text form does not accept
    /// it.
    pub listen: SocketAddr,
    /// Name or address inside the tunnel; a name is looked up for each connection.
    pub host: String,
    /// Port inside the tunnel.
    pub port: u16,
    /// Transport protocol.
    pub transport: Transport,
}

/// A port on this host's addresses inside the tunnel that leads to a port of the host: `PORT[:[ADDRESS:]PORT][/udp]`, for
/// example `22`, `80:8080`, `80:192.0.2.1:8080` or `53/udp`. The target is the same port of 127.0.0.1 by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// Port inside the tunnel.
    pub port: u16,
    /// Address and port to connect to, from the host.
    pub target: SocketAddr,
    /// Transport protocol.
    pub transport: Transport,
}

/// Error in a text that describes a forwarded or exposed port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// The number of parts is wrong.
    #[error("cannot read {text:?}: {expected} is expected")]
    Form {
        /// The whole text.
        text: String,
        /// The correct form.
        expected: &'static str,
    },
    /// A port is not a number from 1 to 65535.
    #[error("cannot read the port {part:?} in {text:?}; use a number from 1 to 65535")]
    Port {
        /// The whole text.
        text: String,
        /// The port.
        part: String,
    },
    /// A part is not an IP address.
    #[error("cannot read the address {part:?} in {text:?}; use an IP address, IPv6 in brackets")]
    Address {
        /// The whole text.
        text: String,
        /// The address.
        part: String,
    },
    /// A part is neither a name nor an IP address.
    #[error(
        "cannot read the host {part:?} in {text:?}; use a name or an IP address, IPv6 in brackets"
    )]
    Host {
        /// The whole text.
        text: String,
        /// The host.
        part: String,
    },
    /// The transport is neither `tcp` nor `udp`.
    #[error("unknown transport {part:?} in {text:?}; use /tcp or /udp")]
    Transport {
        /// The whole text.
        text: String,
        /// The transport.
        part: String,
    },
}

const FORWARD: &str = "[ADDRESS:]PORT:HOST:PORT[/udp]";
const EXPOSED: &str = "PORT[:[ADDRESS:]PORT][/udp]";
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

impl FromStr for Forward {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Forward, OptionError> {
        let parser = Parser::new(text, FORWARD)?;
        let (listen, host, port) = match parser.parts[..] {
            [port, host, inside] => (LOOPBACK, host, (port, inside)),
            [address, port, host, inside] => (parser.address(address)?, host, (port, inside)),
            _ => return Err(parser.form()),
        };
        Ok(Forward {
            listen: SocketAddr::new(listen, parser.port(port.0)?),
            host: parser.host(host)?,
            port: parser.port(port.1)?,
            transport: parser.transport,
        })
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Forward {
            listen, host, port, ..
        } = self;
        if host.contains(':') {
            write!(f, "{listen}:[{host}]:{port}")?;
        } else {
            write!(f, "{listen}:{host}:{port}")?;
        }
        write_transport(f, self.transport)
    }
}

impl FromStr for Exposed {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Exposed, OptionError> {
        let parser = Parser::new(text, EXPOSED)?;
        let (inside, address, target) = match parser.parts[..] {
            [port] => (port, LOOPBACK, port),
            [inside, target] => (inside, LOOPBACK, target),
            [inside, address, target] => (inside, parser.address(address)?, target),
            _ => return Err(parser.form()),
        };
        Ok(Exposed {
            port: parser.port(inside)?,
            target: SocketAddr::new(address, parser.port(target)?),
            transport: parser.transport,
        })
    }
}

impl fmt::Display for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.port, self.target)?;
        write_transport(f, self.transport)
    }
}

fn write_transport(f: &mut fmt::Formatter<'_>, transport: Transport) -> fmt::Result {
    match transport {
        Transport::Tcp => Ok(()),
        Transport::Udp => f.write_str("/udp"),
    }
}

/// A text split at the colons outside of brackets.
struct Parser<'a> {
    text: &'a str,
    expected: &'static str,
    parts: Vec<&'a str>,
    transport: Transport,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, expected: &'static str) -> Result<Parser<'a>, OptionError> {
        let (ports, transport) = match text.rsplit_once('/') {
            None => (text, Transport::Tcp),
            Some((ports, "tcp")) => (ports, Transport::Tcp),
            Some((ports, "udp")) => (ports, Transport::Udp),
            Some((_, other)) => {
                return Err(OptionError::Transport {
                    text: text.to_owned(),
                    part: other.to_owned(),
                });
            }
        };
        let mut depth = 0i32;
        let parts = ports
            .split(|c| {
                depth += match c {
                    '[' => 1,
                    ']' => -1,
                    _ => 0,
                };
                c == ':' && depth <= 0
            })
            .collect();
        Ok(Parser {
            text,
            expected,
            parts,
            transport,
        })
    }

    fn form(&self) -> OptionError {
        OptionError::Form {
            text: self.text.to_owned(),
            expected: self.expected,
        }
    }

    fn port(&self, part: &str) -> Result<u16, OptionError> {
        part.parse()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(|| OptionError::Port {
                text: self.text.to_owned(),
                part: part.to_owned(),
            })
    }

    fn address(&self, part: &str) -> Result<IpAddr, OptionError> {
        bracketed(part)
            .map(|inner| inner.parse::<Ipv6Addr>().map(IpAddr::V6))
            .unwrap_or_else(|| part.parse::<Ipv4Addr>().map(IpAddr::V4))
            .map_err(|_| OptionError::Address {
                text: self.text.to_owned(),
                part: part.to_owned(),
            })
    }

    fn host(&self, part: &str) -> Result<String, OptionError> {
        let name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
        match bracketed(part) {
            Some(inner) if inner.parse::<Ipv6Addr>().is_ok() => Ok(inner.to_owned()),
            None if (1..=253).contains(&part.len()) && part.chars().all(name) => {
                Ok(part.to_owned())
            }
            _ => Err(OptionError::Host {
                text: self.text.to_owned(),
                part: part.to_owned(),
            }),
        }
    }
}

fn bracketed(part: &str) -> Option<&str> {
    part.strip_prefix('[')?.strip_suffix(']')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(listen: &str, host: &str, port: u16, transport: Transport) -> Forward {
        Forward {
            listen: listen.parse().unwrap(),
            host: host.to_owned(),
            port,
            transport,
        }
    }

    #[test]
    fn forwards_are_read_and_written() {
        let (tcp, udp) = (Transport::Tcp, Transport::Udp);
        for (text, expected) in [
            (
                "8080:db-1:5432",
                forward("127.0.0.1:8080", "db-1", 5432, tcp),
            ),
            (
                "127.0.0.2:8080:db-1:5432/tcp",
                forward("127.0.0.2:8080", "db-1", 5432, tcp),
            ),
            (
                "[::1]:8080:[fd00::1]:80",
                forward("[::1]:8080", "fd00::1", 80, tcp),
            ),
            (
                "53:10.0.0.1:5353/udp",
                forward("127.0.0.1:53", "10.0.0.1", 5353, udp),
            ),
        ] {
            assert_eq!(text.parse(), Ok(expected.clone()), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn exposed_ports_are_read_and_written() {
        let exposed = |port, target: &str, transport| Exposed {
            port,
            target: target.parse().unwrap(),
            transport,
        };
        for (text, expected) in [
            ("22", exposed(22, "127.0.0.1:22", Transport::Tcp)),
            ("80:8080", exposed(80, "127.0.0.1:8080", Transport::Tcp)),
            (
                "80:192.0.2.1:8080",
                exposed(80, "192.0.2.1:8080", Transport::Tcp),
            ),
            ("80:[::1]:8080", exposed(80, "[::1]:8080", Transport::Tcp)),
            ("53/udp", exposed(53, "127.0.0.1:53", Transport::Udp)),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
            assert_eq!(expected.to_string().parse(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_are_errors_that_quote_the_part() {
        for (text, part) in [
            ("", FORWARD),
            ("8080", FORWARD),
            ("1:2:3:4:5", FORWARD),
            ("0:db-1:80", "\"0\""),
            ("8080:db-1:65536", "65536"),
            ("localhost:8080:db-1:80", "localhost"),
            ("fd00::1:8080:db-1:80", FORWARD),
            ("8080:d b:80", "d b"),
            ("8080:[db-1]:80", "[db-1]"),
            ("8080::80", "\"\""),
            ("8080:db-1:80/sctp", "sctp"),
        ] {
            let error = text.parse::<Forward>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        for text in ["", "0", "ssh", "80:host:8080", "80:1:2:3", "80/"] {
            assert!(text.parse::<Exposed>().is_err(), "{text}");
        }
    }
}
