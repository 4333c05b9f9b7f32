//! A configuration that may be incomplete: values have types, and nothing is required yet.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use seikan_proto::gateway::rules::Rule;
use seikan_proto::mesh::{Credential, Name, Pin};
use seikan_wire::ethernet::Mac;

use super::endpoint::{CoordinatorUrl, Endpoint};
use super::key::{PresharedKey, PrivateKey, PublicKey};
use super::schema::{Entry, Field};
use super::types::{
    CipherPreference, GatewayMode, Hooks, InterfaceName, Mode, Protocol, Repair, Table,
};
use super::values::DnsItem;

/// A value and its line.
#[derive(Debug, Clone)]
pub(super) struct At<T> {
    pub value: T,
    pub line: usize,
}

/// A configuration that may be incomplete.
#[derive(Default)]
pub(super) struct Draft {
    pub interface: InterfaceDraft,
    pub peers: Vec<PeerDraft>,
    pub gateway: GatewayDraft,
}

/// The keys of a section, valid or not.
#[derive(Default)]
pub(super) struct Given(HashMap<Field, usize>);

/// `[Interface]` so far.
#[derive(Default)]
pub(super) struct InterfaceDraft {
    /// Line of the section's header; `None` where there was none.
    pub line: Option<usize>,
    pub given: Given,
    pub private_key: Option<At<PrivateKey>>,
    pub listen_port: Option<u16>,
    pub addresses: Vec<At<IpNet>>,
    pub mtu: Option<At<u32>>,
    pub dns: Vec<DnsItem>,
    pub table: Option<Table>,
    pub fwmark: Option<u32>,
    pub hooks: Hooks,
    pub save_config: Option<bool>,
    pub native: NativeDraft,
    pub mesh: MeshDraft,
}

/// Settings of a mesh so far.
#[derive(Default)]
pub(super) struct MeshDraft {
    pub coordinator: Option<At<CoordinatorUrl>>,
    pub pin: Option<At<Pin>>,
    pub credential: Option<At<Credential>>,
    pub stun: Vec<At<Endpoint>>,
    pub names: Option<bool>,
    pub port_mapping: Option<bool>,
    pub pins: Vec<At<(Name, PublicKey)>>,
    pub first_use: Option<bool>,
}

/// Keys that wg-quick does not have.
#[derive(Default)]
pub(super) struct NativeDraft {
    pub protocol: Option<Protocol>,
    pub mode: Option<At<Mode>>,
    pub offload: Option<bool>,
    pub metrics: Option<At<SocketAddr>>,
    pub cipher: Option<At<CipherPreference>>,
    pub copy_dscp: Option<bool>,
    pub repair: Option<At<Repair>>,
}

impl NativeDraft {
    /// Content of the tunnel: IP packets or Ethernet frames.
    pub fn mode(&self) -> Mode {
        self.mode.as_ref().map_or(Mode::Ip, |mode| mode.value)
    }
}

/// One `[Peer]` so far.
#[derive(Default)]
pub(super) struct PeerDraft {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub name: Option<String>,
    pub public_key: Option<At<PublicKey>>,
    pub preshared_key: Option<PresharedKey>,
    /// With their host bits.
    pub allowed_ips: Vec<At<IpNet>>,
    pub endpoint: Option<Endpoint>,
    pub persistent_keepalive: Option<u16>,
}

/// The gateway's sections so far.
#[derive(Default)]
pub(super) struct GatewayDraft {
    pub section: Option<GatewaySection>,
    pub devices: Vec<DeviceDraft>,
    pub remotes: Vec<RemoteDraft>,
}

/// `[gateway]` so far.
#[derive(Default)]
pub(super) struct GatewaySection {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub interface: Option<At<InterfaceName>>,
    pub mode: Option<GatewayMode>,
    /// With their host bits.
    pub answer_for: Vec<At<IpNet>>,
    pub proxy_arp: Option<At<bool>>,
    pub priority: Option<At<u8>>,
}

/// One `[[gateway.device]]` so far.
#[derive(Default)]
pub(super) struct DeviceDraft {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub name: Option<At<String>>,
    pub mac: Option<At<Mac>>,
    pub vlan: Option<At<u16>>,
    pub lan: Vec<At<IpAddr>>,
    pub overlay: Vec<At<IpAddr>>,
    pub allow_from: Vec<Rule>,
    pub allow_to: Vec<Rule>,
}

/// One `[[gateway.remote]]` so far.
#[derive(Default)]
pub(super) struct RemoteDraft {
    /// Line of the section's header.
    pub line: usize,
    pub given: Given,
    pub overlay: Option<At<IpAddr>>,
    pub lan: Option<At<IpAddr>>,
}

impl Given {
    /// Returns whether the section has the key.
    pub fn has(&self, key: Field) -> bool {
        self.0.contains_key(&key)
    }

    /// Adds an entry; returns whether the key had values before and the entry has some, too.
    pub fn add(&mut self, entry: &Entry) -> bool {
        let values = self.0.entry(entry.key).or_default();
        let again = *values > 0 && !entry.items.is_empty();
        *values += entry.items.len();
        again
    }
}

impl PeerDraft {
    /// Returns the peer's name for messages.
    pub fn described(&self) -> String {
        match &self.name {
            Some(name) => format!("the peer `{name}`"),
            None => format!("the peer in line {}", self.line),
        }
    }
}

impl GatewaySection {
    /// Returns an empty section.
    pub fn new(line: usize) -> Self {
        Self {
            line,
            ..Self::default()
        }
    }
}

impl DeviceDraft {
    /// Returns the device's name for messages.
    pub fn described(&self) -> String {
        match &self.name {
            Some(name) => format!("the device `{}`", name.value),
            None => format!("the device in line {}", self.line),
        }
    }

    /// The VLAN, if there is one.
    pub fn vlan(&self) -> Option<u16> {
        self.vlan.as_ref().map(|vlan| vlan.value)
    }
}

/// Returns the prefixes without their host bits, each once.
pub(super) fn unique_prefixes(prefixes: &[At<IpNet>]) -> Vec<IpNet> {
    let mut seen = HashSet::new();
    let masked = prefixes.iter().map(|prefix| prefix.value.trunc());
    masked.filter(|prefix| seen.insert(*prefix)).collect()
}
