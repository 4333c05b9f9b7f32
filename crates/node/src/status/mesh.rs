//! Status of a member of a mesh.

use super::micros;
use super::traffic::drops;
use seikan_mesh::event::{Contact, RelayAnswer};
use seikan_mesh::mapping::Mapping;
use seikan_mesh::names::Found;
use seikan_mesh::nat::{self, Nat, Sight};
use seikan_mesh::state::MeshState;
use seikan_mesh::transport::{Transport, Transports};
use seikan_mesh::trust::Changed;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// Maximum number of rejected members in a status.
const MAX_REFUSED_SHOWN: usize = 16;

/// Membership in a mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MeshStatus {
    /// URL of the coordinator in use, or last used; may differ from the configured one if there are several.
    pub coordinator: String,
    /// State of the coordinator.
    pub contact: Contact,
    /// Revision of the known membership.
    pub revision: u64,
    /// Number of members that are peers, without this host.
    pub members: usize,
    /// Why the coordinator has refused the devices behind this host; absent if it has not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub devices_refused: Option<String>,
    /// Reflexive addresses of this host. An address that is not its own belongs to a NAT.
    #[serde(default)]
    pub reflexive: Vec<SocketAddr>,
    /// State of the port mapping; absent if none is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_mapping: Option<PortMappingStatus>,
    /// NAT of this host, for IPv4.
    #[serde(default = "untested")]
    pub nat4: Nat,
    /// NAT of this host, for IPv6.
    #[serde(default = "untested")]
    pub nat6: Nat,
    /// Result of each STUN server.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stun: Vec<StunStatus>,
    /// Relays in use, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub relays: BTreeMap<String, RelayStatus>,
    /// Connections to relays over TLS, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub streams: BTreeMap<String, StreamStatus>,
    /// Web proxy in use; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub web_proxy: Option<WebProxyStatus>,
    /// Allocations at TURN servers, by server.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub turn: BTreeMap<String, TurnStatus>,
    /// How members are found by name; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Found>,
    /// Number of rejected members.
    #[serde(default)]
    pub refused_members: usize,
    /// Rejected members by key, with the reason: at most 16, those with unexpected keys first.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, String>,
    /// Members accepted with a changed key, by name: at most 16 of the last seven days.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed_keys: BTreeMap<String, Changed>,
}

/// State of the port mapping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum PortMappingStatus {
    /// The router forwards a port.
    Given(Mapping),
    /// There is no port mapping, for this reason.
    Refused(String),
}

/// An allocation at a TURN server (RFC 8656), with counters of forwarded datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TurnStatus {
    /// The relayed address.
    pub relayed: SocketAddr,
    /// Transport protocol to the server: UDP, TCP or TLS.
    pub transport: String,
    /// Forwarded datagrams.
    #[serde(flatten)]
    pub forwarded: StreamStatus,
}

/// Datagrams forwarded by a connection to a relay over TLS, or by an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StreamStatus {
    /// Datagrams forwarded to this host.
    pub received: u64,
    /// Datagrams forwarded from this host.
    pub sent: u64,
    /// Dropped datagrams, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// A web proxy (HTTP CONNECT).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WebProxyStatus {
    /// Its host and port.
    pub address: String,
    /// URL of the coordinator and addresses of relays that are reached through it.
    pub servers: Vec<String>,
}

/// Result of a STUN server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StunStatus {
    /// Its name in the configuration or at the coordinator.
    pub name: String,
    /// The address that was queried.
    pub server: SocketAddr,
    /// Reflexive address of this host; absent if the server does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SocketAddr>,
    /// Round trip in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u64>,
}

fn untested() -> Nat {
    Nat::Untested
}

/// State of a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RelayStatus {
    /// The relay answers over UDP, after this many microseconds.
    RttUs(u64),
    /// The relay answers over TLS only, after this many microseconds.
    TlsRttUs(u64),
    /// The relay fails or refuses, for this reason.
    Refuses(String),
}

/// Returns the connections to relays over TLS that answer.
fn streams(transports: &Transports) -> impl Iterator<Item = &Transport> {
    let answering = transports.iter().filter(|one| one.serves().is_some());
    answering.filter(|one| one.turn().is_none())
}

fn forwarded(transport: &Transport) -> StreamStatus {
    let counters = transport.counters();
    StreamStatus {
        received: counters.received,
        sent: counters.sent,
        drops: drops(&counters.drops),
    }
}

/// Returns the web proxy of the coordinator and of the connections to relays.
fn web_proxy(mesh: &MeshState, transports: &Transports) -> Option<WebProxyStatus> {
    let coordinator = (mesh.coordinator.clone(), mesh.coordinator.clone());
    let relays = streams(transports).map(Transport::name);
    let relays = relays.map(|address| (address.to_owned(), format!("https://{address}")));
    let mut found: Option<WebProxyStatus> = None;
    for (server, url) in std::iter::once(coordinator).chain(relays) {
        if let Some(proxy) = mesh.web_proxies.of_url(&url) {
            let status = found.get_or_insert_with(|| WebProxyStatus {
                address: proxy.to_string(),
                servers: Vec::new(),
            });
            status.servers.push(server);
        }
    }
    found
}

pub(super) fn mesh(mesh: &MeshState, transports: &Transports, own: &[IpAddr]) -> MeshStatus {
    let untrusted = mesh.key_conflicts.refused.iter();
    let untrusted = untrusted.map(|(key, refused)| (key, refused.reason.as_str()));
    let refused = mesh.refused.iter().map(|(key, reason)| (key, *reason));
    let refused = untrusted.chain(refused).take(MAX_REFUSED_SHOWN);
    let changed = mesh.key_conflicts.changed.iter().take(MAX_REFUSED_SHOWN);
    let nat = |v6: bool| {
        let views = mesh.views.iter();
        let of_family = views.filter(|view| view.server.is_ipv6() == v6);
        let sights: Vec<Sight> = of_family
            .map(|view| Sight {
                server: view.server,
                seen: view.seen,
            })
            .collect();
        let own: Vec<IpAddr> = own
            .iter()
            .copied()
            .filter(|ip| ip.is_ipv6() == v6)
            .collect();
        nat::classify(&sights, &own)
    };
    MeshStatus {
        nat4: nat(false),
        nat6: nat(true),
        stun: mesh
            .views
            .iter()
            .map(|view| StunStatus {
                name: view.name.clone(),
                server: view.server,
                seen: view.seen,
                rtt_us: view.rtt.map(micros),
            })
            .collect(),
        web_proxy: web_proxy(mesh, transports),
        refused_members: mesh.refused.len() + mesh.key_conflicts.refused.len(),
        coordinator: mesh.coordinator.clone(),
        contact: mesh.contact.clone(),
        revision: mesh.revision,
        devices_refused: mesh.devices_refused.clone(),
        members: mesh.members.len(),
        reflexive: mesh.reflexive.clone(),
        port_mapping: mesh.mapped.clone().map(|state| match state {
            Ok(mapping) => PortMappingStatus::Given(mapping),
            Err(reason) => PortMappingStatus::Refused(reason),
        }),
        relays: mesh
            .relays
            .iter()
            .map(|(address, state)| {
                let status = match state {
                    Ok(RelayAnswer { rtt, by_tls: false }) => RelayStatus::RttUs(micros(*rtt)),
                    Ok(RelayAnswer { rtt, by_tls: true }) => RelayStatus::TlsRttUs(micros(*rtt)),
                    Err(reason) => RelayStatus::Refuses(reason.clone()),
                };
                (address.clone(), status)
            })
            .collect(),
        streams: streams(transports)
            .map(|one| (one.name().to_owned(), forwarded(one)))
            .collect(),
        turn: transports
            .iter()
            .filter_map(|one| {
                let status = TurnStatus {
                    relayed: one.serves()?,
                    transport: one.turn()?.to_owned(),
                    forwarded: forwarded(one),
                };
                Some((one.name().to_owned(), status))
            })
            .collect(),
        names: Some(mesh.names.clone()),
        refused: refused
            .map(|(key, reason)| (key.to_string(), reason.to_owned()))
            .collect(),
        changed_keys: changed
            .map(|(name, changed)| (name.to_string(), changed.clone()))
            .collect(),
    }
}
