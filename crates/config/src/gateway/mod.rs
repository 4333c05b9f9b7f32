//! The gateway in a configuration: `[gateway]`, its devices and its remotes.
//!
//! As for the rest of a file, `draft` converts values and `check` checks the whole; `overlay` has
//! the checks against the tunnel's part. The result is [`GatewaySettings`].

use std::fmt;
use std::str::FromStr;

use ipnet::IpNet;
use seikan_proto::gateway::{DeviceConfig, Remote};

use super::types::{InterfaceName, UnknownValue};

pub(super) mod check;
pub(super) mod draft;
mod overlay;

/// Settings of the gateway of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewaySettings {
    /// The interface of the local network.
    pub interface: InterfaceName,
    /// How packets reach the gateway.
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

/// How packets of devices get to the gateway.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GatewayMode {
    /// The gateway reads the frames of the local network, and answers ARP and neighbour discovery.
    #[default]
    Transparent,
    /// Devices, or their router, send to the gateway's host, and its kernel forwards.
    Routed,
}

impl GatewayMode {
    /// Accepted values, for messages.
    pub const CHOICES: &'static str = "`transparent`, `routed`";
}

impl FromStr for GatewayMode {
    type Err = UnknownValue;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "transparent" => Ok(Self::Transparent),
            "routed" => Ok(Self::Routed),
            _ => Err(UnknownValue {
                given: text.to_owned(),
                choices: Self::CHOICES,
            }),
        }
    }
}

impl fmt::Display for GatewayMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Transparent => "transparent",
            Self::Routed => "routed",
        })
    }
}
