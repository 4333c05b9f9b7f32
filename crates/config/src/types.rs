//! What a configuration says, in types: [`Config`], its [`PeerConfig`]s, and the values they are made of.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use seikan_proto::mesh::{Credential, Name, Pin};

use super::gateway::GatewaySettings;
use super::key::{PresharedKey, PrivateKey, PublicKey};

/// Everything that one interface is told.
#[derive(Debug, Clone)]
pub struct Config {
    /// The interface, from the file's name.
    pub name: InterfaceName,
    /// The wire protocol spoken with every peer.
    pub protocol: Protocol,
    /// The interface's identity.
    pub private_key: PrivateKey,
    /// UDP port to listen on; `None` or 0 lets the kernel choose.
    pub listen_port: Option<u16>,
    /// Addresses of the interface, with their host bits.
    pub addresses: Vec<IpNet>,
    /// Inner MTU in bytes; `None` leaves it to the node.
    pub mtu: Option<u32>,
    /// Name servers while the interface is up.
    pub dns: Vec<IpAddr>,
    /// Search domains while the interface is up.
    pub dns_search: Vec<String>,
    /// Where the routes to allowed IPs go.
    pub table: Table,
    /// Mark on the tunnel's own datagrams; `None` leaves it to the node.
    pub fwmark: Option<u32>,
    /// Commands around the life of the interface.
    pub hooks: Hooks,
    /// Write the running state back to the file at the end.
    pub save_config: bool,
    /// Use the kernel's segmentation and checksum offloads where they are.
    pub offload: bool,
    /// Where Prometheus may scrape, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// Which AEAD to prefer (native protocol only).
    pub cipher: CipherPreference,
    /// Show the path the traffic class of the packets inside: the outer header gets their DSCP.
    pub copy_dscp: bool,
    /// The peers, in the order of the file.
    pub peers: Vec<PeerConfig>,
    /// The gateway for devices that run nothing of ours, if there is one.
    pub gateway: Option<GatewaySettings>,
    /// The mesh that this host is a member of, if it is one.
    pub mesh: Option<MeshSettings>,
}

/// What a member knows of its coordinator.
#[derive(Debug, Clone, PartialEq)]
pub struct MeshSettings {
    /// Where it is.
    pub coordinator: CoordinatorUrl,
    /// The certificate that it has; any that the system trusts for its name if `None`.
    pub pin: Option<Pin>,
    /// What it knows this host by.
    pub credential: Credential,
    /// STUN servers (RFC 8489) to be asked beside the coordinator and its relays.
    pub stun: Vec<Endpoint>,
    /// Have this host's programs find members by their names.
    pub names: bool,
    /// Ask the router for a port where this host is behind a NAT.
    pub port_mapping: bool,
    /// Which members' keys are believed.
    pub trust: Trust,
}

/// Which members' keys are believed, whatever a coordinator says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trust {
    /// Who of these names has another key is no peer.
    pub pins: BTreeMap<Name, PublicKey>,
    /// Nor is who has another key than was first seen under its name.
    pub first_use: bool,
}

/// `https://HOST` or `https://HOST:PORT`, without a path; port 443 unless given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorUrl(Endpoint);

/// Not the address of a coordinator.
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
        let endpoint = super::values::endpoint(rest)
            .or_else(|_| super::values::endpoint(&format!("{rest}:443")))
            .map_err(|_| wrong())?;
        // It goes into a request line: nothing but what a host name or an address has.
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

/// Everything that is said about one peer.
#[derive(Debug, Clone)]
pub struct PeerConfig {
    /// A name for people.
    pub name: Option<String>,
    /// The peer's identity.
    pub public_key: PublicKey,
    /// A symmetric key shared with the peer.
    pub preshared_key: Option<PresharedKey>,
    /// Prefixes routed to and accepted from the peer, host bits masked.
    pub allowed_ips: Vec<IpNet>,
    /// Where the peer is before it is heard from.
    pub endpoint: Option<Endpoint>,
    /// Seconds between keepalives, 1 to 65535.
    pub persistent_keepalive: Option<u16>,
}

/// Shell commands, run in the order given, `%i` standing for the interface's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    /// Before the interface is made.
    pub pre_up: Vec<String>,
    /// Once the interface carries traffic.
    pub post_up: Vec<String>,
    /// Before the interface is taken away.
    pub pre_down: Vec<String>,
    /// After the interface is gone.
    pub post_down: Vec<String>,
}

/// A wire protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// WireGuard, bit for bit.
    Wireguard,
    /// Seikan's own.
    Native,
}

/// A wish for an AEAD; the native handshake settles it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CipherPreference {
    /// What is fastest on both ends.
    #[default]
    Auto,
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305,
    /// None at all, to measure what is left without one.
    #[cfg(feature = "null-cipher")]
    Null,
}

/// A routing table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Table {
    /// The main table, and a table with rules of its own for default routes.
    #[default]
    Auto,
    /// No routes.
    Off,
    /// This table.
    Number(u32),
}

/// Where a peer is reached: `host:port`, `192.0.2.1:51820` or `[2001:db8::1]:51820`.
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

/// A word that is none of those it may be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is none of {choices}")]
pub struct UnknownValue {
    /// What was given.
    pub given: String,
    /// What may be given.
    pub choices: &'static str,
}

/// A name that the kernel, `wg-quick` and a shell take as it is: 1 to 15 of `A-Z a-z 0-9 _ = + . -`,
/// neither `.` nor `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InterfaceName(String);

/// Why a text is no interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceNameError {
    /// No character at all, `.` or `..`.
    #[error("`{0}` cannot name an interface")]
    Reserved(String),
    /// More than 15 bytes (the kernel's `IFNAMSIZ` less its NUL).
    #[error("`{0}` has {1} bytes, an interface name has at most {max}", max = InterfaceName::MAX_LEN)]
    Long(String, usize),
    /// A character outside the set.
    #[error("`{0}` contains {1:?}, an interface name is made of A-Z a-z 0-9 _ = + . -")]
    Character(String, char),
}

impl InterfaceName {
    /// Longest name in bytes.
    pub const MAX_LEN: usize = 15;

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A hook's command with this name for every `%i`, as `wg-quick` runs it. The name has no character that a shell
    /// takes for its own.
    pub fn fill_in(&self, command: &str) -> String {
        command.replace("%i", &self.0)
    }
}

impl FromStr for InterfaceName {
    type Err = InterfaceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |c: &char| c.is_ascii_alphanumeric() || "_=+.-".contains(*c);
        if matches!(text, "" | "." | "..") {
            return Err(InterfaceNameError::Reserved(text.to_owned()));
        }
        if let Some(c) = text.chars().find(|c| !allowed(c)) {
            return Err(InterfaceNameError::Character(text.to_owned(), c));
        }
        if text.len() > Self::MAX_LEN {
            return Err(InterfaceNameError::Long(text.to_owned(), text.len()));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Protocol {
    /// The words for it, for messages.
    pub const CHOICES: &'static str = "`wireguard`, `native`";
}

impl FromStr for Protocol {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "wireguard" => Ok(Self::Wireguard),
            "native" => Ok(Self::Native),
            _ => Err(UnknownValue {
                given: text.to_owned(),
                choices: Self::CHOICES,
            }),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wireguard => "wireguard",
            Self::Native => "native",
        })
    }
}

impl CipherPreference {
    /// The words for it, for messages.
    pub const CHOICES: &'static str = "`auto`, `aes-256-gcm`, `chacha20-poly1305`";
}

impl FromStr for CipherPreference {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "aes-256-gcm" => Ok(Self::Aes256Gcm),
            "chacha20-poly1305" => Ok(Self::ChaCha20Poly1305),
            #[cfg(feature = "null-cipher")]
            "null" => Ok(Self::Null),
            _ => Err(UnknownValue {
                given: text.to_owned(),
                choices: Self::CHOICES,
            }),
        }
    }
}

impl fmt::Display for CipherPreference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Aes256Gcm => "aes-256-gcm",
            Self::ChaCha20Poly1305 => "chacha20-poly1305",
            #[cfg(feature = "null-cipher")]
            Self::Null => "null",
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Number(number) => write!(f, "{number}"),
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

impl Hooks {
    /// Whether there is no command at all.
    pub fn is_empty(&self) -> bool {
        self.pre_up.is_empty()
            && self.post_up.is_empty()
            && self.pre_down.is_empty()
            && self.post_down.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
