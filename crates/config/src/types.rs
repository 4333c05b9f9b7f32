//! The types of a configuration: [`Config`], [`PeerConfig`], and their values.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;
use seikan_proto::gateway::{DeviceConfig, Remote};
use seikan_proto::mesh::{Credential, Devices, Name, Pin};

use super::endpoint::{CoordinatorUrl, Endpoint};
use super::key::{PresharedKey, PrivateKey, PublicKey};
use super::source::Syntax;

/// Configuration of one interface.
#[derive(Debug, Clone)]
pub struct Config {
    /// The interface, from the file's name.
    pub name: InterfaceName,
    /// Wire protocol of all peers.
    pub protocol: Protocol,
    /// Content of the tunnel: IP packets or Ethernet frames.
    pub mode: Mode,
    /// The interface's identity.
    pub private_key: PrivateKey,
    /// UDP port to listen on; `None` or 0: any.
    pub listen_port: Option<u16>,
    /// Addresses of the interface, with their host bits.
    pub addresses: Vec<IpNet>,
    /// Inner MTU in bytes; `None`: chosen by the node.
    pub mtu: Option<u32>,
    /// Name servers while the interface is up.
    pub dns: Vec<IpAddr>,
    /// Search domains while the interface is up.
    pub dns_search: Vec<String>,
    /// Routing table for the routes to allowed IPs.
    pub table: Table,
    /// Firewall mark of the tunnel's own datagrams; `None`: chosen by the node.
    pub fwmark: Option<u32>,
    /// Commands that run when the interface goes up and down.
    pub hooks: Hooks,
    /// Write the running state to the file when the interface goes down.
    pub save_config: bool,
    /// Use the kernel's segmentation and checksum offloads if available.
    pub offload: bool,
    /// Address of the metrics server, if any.
    pub metrics: Option<SocketAddr>,
    /// Preferred AEAD (native protocol only).
    pub cipher: CipherPreference,
    /// Copy the DSCP of inner packets to the outer header.
    pub copy_dscp: bool,
    /// Loss repair (native protocol only).
    pub repair: Repair,
    /// Maximum rate of the tunnel's datagrams, IP headers included; `None`: no limit.
    pub uplink_rate: Option<BitRate>,
    /// The peers, in the order of the file.
    pub peers: Vec<PeerConfig>,
    /// The gateway for devices without Seikan, if any.
    pub gateway: Option<GatewaySettings>,
    /// The mesh that this host is a member of, if any.
    pub mesh: Option<MeshSettings>,
}

impl Config {
    /// The devices whose addresses the coordinator of the mesh allocates: those of the gateway
    /// without an address in the overlay. The addresses of a device with a MAC address are learned,
    /// so it may have both families.
    pub fn mesh_devices(&self) -> Devices {
        let gateway = self.gateway.as_ref().filter(|_| self.mesh.is_some());
        let devices = gateway.iter().flat_map(|gateway| &gateway.devices);
        let mut all = Devices::default();
        for device in devices.filter(|device| device.overlay.is_empty()) {
            let Ok(name) = device.name.parse::<Name>() else {
                continue;
            };
            let has = |v6| device.mac.is_some() || device.lan.iter().any(|ip| ip.is_ipv6() == v6);
            match (has(false), has(true)) {
                (true, false) => all.ipv4_only.push(name.clone()),
                (false, true) => all.ipv6_only.push(name.clone()),
                _ => {}
            }
            all.devices.push(name);
        }
        all
    }
}

/// Settings of a member of a mesh.
#[derive(Debug, Clone, PartialEq)]
pub struct MeshSettings {
    /// URL of the coordinator.
    pub coordinator: CoordinatorUrl,
    /// Pin of the coordinator's certificate; `None`: a certificate that the system trusts.
    pub pin: Option<Pin>,
    /// Credential of this host.
    pub credential: Credential,
    /// STUN servers (RFC 8489), in addition to the coordinator and its relays.
    pub stun: Vec<Endpoint>,
    /// Resolve names of members for programs of this host.
    pub names: bool,
    /// Request a port mapping from the router behind a NAT.
    pub port_mapping: bool,
    /// Trust in members' keys.
    pub trust: Trust,
}

/// Trust in members' keys, independent of the coordinator.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trust {
    /// Pinned keys: a member with one of these names and another key is refused.
    pub pins: BTreeMap<Name, PublicKey>,
    /// Trust on first use: a member with another key than the first one of its name is refused.
    pub first_use: bool,
}

/// Settings of the gateway of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewaySettings {
    /// The interface of the local network.
    pub interface: InterfaceName,
    /// Mode of the gateway: how packets of devices reach it.
    pub mode: GatewayMode,
    /// Prefixes of the overlay for which the gateway answers ARP and neighbour discovery
    /// (transparent mode only).
    pub answer_for: Vec<IpNet>,
    /// Whether the kernel answers ARP and neighbour discovery for the remotes (routed mode only).
    pub proxy_arp: bool,
    /// VRRP-like priority with a second gateway on the same network: 1 to 254, the higher is
    /// active. `None`: there is no second gateway.
    pub priority: Option<u8>,
    /// The devices, in the order of the file.
    pub devices: Vec<DeviceConfig>,
    /// The remotes, in the order of the file.
    pub remotes: Vec<Remote>,
}

/// How packets of devices reach the gateway.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GatewayMode {
    /// The gateway reads the frames of the local network, and answers ARP and neighbour discovery.
    #[default]
    Transparent,
    /// Devices, or their router, send to the gateway's host, and its kernel forwards.
    Routed,
}

/// Configuration of one peer.
#[derive(Debug, Clone)]
pub struct PeerConfig {
    /// Display name.
    pub name: Option<String>,
    /// The peer's identity.
    pub public_key: PublicKey,
    /// A symmetric key shared with the peer.
    pub preshared_key: Option<PresharedKey>,
    /// Prefixes routed to and accepted from the peer, host bits masked. In Ethernet mode: source
    /// prefixes accepted from the peer, all if empty.
    pub allowed_ips: Vec<IpNet>,
    /// Initial endpoint of the peer.
    pub endpoint: Option<Endpoint>,
    /// Seconds between keepalives, 1 to 65535.
    pub persistent_keepalive: Option<u16>,
}

/// Shell commands, run in this order; `%i` is replaced by the interface's name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    /// Before the interface is created.
    pub pre_up: Vec<String>,
    /// Once the interface carries traffic.
    pub post_up: Vec<String>,
    /// Before the interface is removed.
    pub pre_down: Vec<String>,
    /// After the interface is removed.
    pub post_down: Vec<String>,
}

/// A wire protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// WireGuard.
    Wireguard,
    /// Seikan's native protocol.
    Native,
}

/// Content of a tunnel: IP packets or Ethernet frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// IP packets.
    #[default]
    Ip,
    /// Ethernet frames (native protocol only).
    Ethernet,
}

/// Preferred AEAD; the native handshake negotiates it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CipherPreference {
    /// The fastest on both ends.
    #[default]
    Auto,
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305,
    /// No encryption, for measurements.
    #[cfg(feature = "null-cipher")]
    Null,
}

/// A rate: `40M` are 40,000,000 bits per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BitRate(u64);

impl BitRate {
    /// The lowest rate, in bits per second.
    pub const LEAST: u64 = 64_000;
    /// The highest rate, in bits per second.
    pub const MOST: u64 = 1_000_000_000_000;
    /// Accepted values, for messages.
    pub const CHOICES: &'static str =
        "bits per second with k, M or G, from `64k` to `1000G`, such as `40M`";
    /// Units and their bits per second, largest first.
    const UNITS: [(&'static str, u64); 4] =
        [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000), ("", 1)];

    /// Bits per second.
    pub const fn bits_per_second(self) -> u64 {
        self.0
    }
}

impl FromStr for BitRate {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.find(|c: char| !c.is_ascii_digit());
        let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
        let mut units = Self::UNITS.iter();
        let factor = units.find(|(name, _)| name.eq_ignore_ascii_case(unit));
        let rate = factor.and_then(|(_, factor)| number.parse::<u64>().ok()?.checked_mul(*factor));
        let rate = rate.filter(|rate| (Self::LEAST..=Self::MOST).contains(rate));
        rate.map(BitRate).ok_or_else(|| UnknownValue {
            given: text.to_owned(),
            choices: Self::CHOICES,
        })
    }
}

impl fmt::Display for BitRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |(_, factor): &&(&str, u64)| self.0.is_multiple_of(*factor);
        let (unit, factor) = Self::UNITS.iter().find(whole).unwrap_or(&("", 1));
        write!(f, "{}{unit}", self.0 / factor)
    }
}

/// Loss repair; both ends must have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Repair {
    /// No loss repair.
    Off,
    /// Repair where losses are random, with up to [`Self::AUTO`] percent more bytes.
    #[default]
    Auto,
    /// Repair where losses are random, with up to this many percent more bytes, from 1 to
    /// [`Self::MOST`].
    Percent(u8),
}

impl Repair {
    /// Maximum parity of [`Self::Auto`], in percent of all other bytes.
    pub const AUTO: u8 = 10;
    /// Maximum of [`Self::Percent`]: a block of 128 records has at most 16 parity records.
    pub const MOST: u8 = 12;
    /// Accepted values, for messages.
    pub const CHOICES: &'static str = "`auto`, `off`, or the most additional bytes, `1%` to `12%`";

    /// Returns the maximum parity in percent of all other bytes; `None` without loss repair.
    pub fn ceiling(self) -> Option<u8> {
        match self {
            Repair::Off => None,
            Repair::Auto => Some(Repair::AUTO),
            Repair::Percent(percent) => Some(percent),
        }
    }
}

impl FromStr for Repair {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let percent = |text: &str| text.strip_suffix('%')?.trim_end().parse().ok();
        match text.to_ascii_lowercase().as_str() {
            "off" => Ok(Repair::Off),
            "auto" => Ok(Repair::Auto),
            text => match percent(text) {
                Some(percent @ 1..=Repair::MOST) => Ok(Repair::Percent(percent)),
                _ => Err(UnknownValue {
                    given: text.to_owned(),
                    choices: Repair::CHOICES,
                }),
            },
        }
    }
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Repair::Off => f.write_str("off"),
            Repair::Auto => f.write_str("auto"),
            Repair::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// A routing table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Table {
    /// The main table, and a separate table with rules for default routes.
    #[default]
    Auto,
    /// No routes.
    Off,
    /// The table with this number.
    Number(u32),
}

/// A word that is not one of the accepted values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not one of {choices}")]
pub struct UnknownValue {
    /// The word.
    pub given: String,
    /// Accepted values.
    pub choices: &'static str,
}

/// An interface name that the kernel, `wg-quick` and a shell accept without quoting: 1 to 15 of
/// `A-Z a-z 0-9 _ = + . -`, neither `.` nor `..`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InterfaceName(String);

/// Error of an interface name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InterfaceNameError {
    /// The name is empty, `.` or `..`.
    #[error("`{0}` cannot name an interface")]
    Reserved(String),
    /// The name has more than 15 bytes (the kernel's `IFNAMSIZ` without its NUL).
    #[error("`{0}` has {1} bytes, an interface name has at most {max}", max = InterfaceName::MAX_LEN)]
    Long(String, usize),
    /// The name has a character outside of the set.
    #[error("`{0}` contains {1:?}, an interface name is made of A-Z a-z 0-9 _ = + . -")]
    Character(String, char),
}

impl InterfaceName {
    /// Maximum length of a name, in bytes.
    pub const MAX_LEN: usize = 15;

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns a hook's command with `%i` replaced by this name, as in `wg-quick`. The name has no
    /// characters that are special to a shell.
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

/// Implements `FromStr` (case-insensitive) and `Display` for an enum by the word of each variant.
macro_rules! words {
    ($type:ident, $choices:literal, $($(#[$attribute:meta])* $variant:ident = $word:literal,)*) => {
        impl $type {
            /// Accepted values, for messages.
            pub const CHOICES: &'static str = $choices;
        }

        impl FromStr for $type {
            type Err = UnknownValue;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text.to_ascii_lowercase().as_str() {
                    $($(#[$attribute])* $word => Ok(Self::$variant),)*
                    _ => Err(UnknownValue {
                        given: text.to_owned(),
                        choices: Self::CHOICES,
                    }),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $($(#[$attribute])* Self::$variant => $word,)*
                })
            }
        }
    };
}

impl Protocol {
    /// The protocol of a file that does not name one.
    pub(super) fn default_of(syntax: Syntax) -> Self {
        match syntax {
            Syntax::Ini => Self::Wireguard,
            Syntax::Toml => Self::Native,
        }
    }
}

words! {
    Protocol, "`wireguard`, `native`",
    Wireguard = "wireguard",
    Native = "native",
}

words! {
    Mode, "`ip`, `ethernet`",
    Ip = "ip",
    Ethernet = "ethernet",
}

words! {
    CipherPreference, "`auto`, `aes-256-gcm`, `chacha20-poly1305`",
    Auto = "auto",
    Aes256Gcm = "aes-256-gcm",
    ChaCha20Poly1305 = "chacha20-poly1305",
    #[cfg(feature = "null-cipher")]
    Null = "null",
}

words! {
    GatewayMode, "`transparent`, `routed`",
    Transparent = "transparent",
    Routed = "routed",
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

impl Hooks {
    /// Returns whether there are no commands.
    pub fn is_empty(&self) -> bool {
        self.pre_up.is_empty()
            && self.post_up.is_empty()
            && self.pre_down.is_empty()
            && self.post_down.is_empty()
    }
}
