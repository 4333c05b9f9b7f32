//! What a member knows of its mesh.

use super::micros;
use super::traffic::drops;
use crate::mesh::mapping::Mapping;
use crate::mesh::nat::{self, Nat, Sight};
use crate::mesh::{Answers, Changed, Contact, MeshState};
use crate::setup::names::Found;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

/// Members that are no peers of whom a status tells, at most.
const MAX_REFUSED_SHOWN: usize = 16;

/// Membership in a mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeshStatus {
    /// Where the coordinator is that is asked, or was last; of several it may be another than the configured one.
    pub coordinator: String,
    /// How it stands with it.
    pub contact: Contact,
    /// The revision up to which the members are known.
    pub revision: u64,
    /// Members that are peers, besides this host.
    pub members: usize,
    /// What this host looks like from outside, as the coordinator sees it; what is not an address of its own a NAT has made.
    #[serde(default)]
    pub reflexive: Vec<SocketAddr>,
    /// A port of the router before this host; absent if none is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port_mapping: Option<PortMappingStatus>,
    /// What is between this host and the world, by IPv4.
    #[serde(default = "not_asked")]
    pub nat4: Nat,
    /// The same by IPv6.
    #[serde(default = "not_asked")]
    pub nat6: Nat,
    /// What each STUN server sees of this host.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stun: Vec<StunStatus>,
    /// Relays that were asked for something, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub relays: BTreeMap<String, RelayStatus>,
    /// Relays of ours to which there is a connection by TLS, by address.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub streams: BTreeMap<String, StreamStatus>,
    /// This host's allocations at TURN servers, by the servers' addresses.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub turn: BTreeMap<String, TurnStatus>,
    /// How members are found by their names; absent where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<Found>,
    /// Members that are no peers.
    #[serde(default)]
    pub refused_members: usize,
    /// The first of those, by their keys, with the reason; those with doubtful keys before the others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused: BTreeMap<String, String>,
    /// Members that have another key than before and are peers all the same, by name: of the last seven days, and the first of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub changed_keys: BTreeMap<String, Changed>,
}

/// A port of the router before this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortMappingStatus {
    /// It sends on what comes to it.
    Given(Mapping),
    /// It gave none, for this reason.
    Refused(String),
}

/// An allocation at a TURN server (RFC 8656), and what was forwarded by it, in datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnStatus {
    /// Where others send.
    pub relayed: SocketAddr,
    /// UDP, TCP or TLS.
    pub transport: String,
    /// To this host.
    pub received: u64,
    /// By this host.
    pub sent: u64,
    /// What went no further here, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// A connection by TLS to a relay of ours, and what was forwarded by it, in datagrams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStatus {
    /// To this host.
    pub received: u64,
    /// By this host.
    pub sent: u64,
    /// What went no further here, by reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drops: BTreeMap<String, u64>,
}

/// What a STUN server sees of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StunStatus {
    /// As the configuration or the coordinator calls it.
    pub name: String,
    /// Where it was asked.
    pub server: SocketAddr,
    /// Where it sees this host; absent if it does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<SocketAddr>,
    /// From the question to the answer, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u64>,
}

fn not_asked() -> Nat {
    Nat::NotAsked
}

/// How it stands with a relay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RelayStatus {
    /// It answers, after so many microseconds.
    RttUs(u64),
    /// It does by TLS, and not by UDP.
    TlsRttUs(u64),
    /// It does not do what it was asked for.
    Refuses(String),
}

pub(super) fn mesh(mesh: &MeshState, own: &[IpAddr]) -> MeshStatus {
    let doubted = mesh.doubts.refused.iter();
    let doubted = doubted.map(|(key, refused)| (key, refused.reason.as_str()));
    let refused = mesh.refused.iter().map(|(key, reason)| (key, *reason));
    let refused = doubted.chain(refused).take(MAX_REFUSED_SHOWN);
    let changed = mesh.doubts.changed.iter().take(MAX_REFUSED_SHOWN);
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
        nat::judge(&sights, &own)
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
        refused_members: mesh.refused.len() + mesh.doubts.refused.len(),
        coordinator: mesh.coordinator.clone(),
        contact: mesh.contact.clone(),
        revision: mesh.revision,
        members: mesh.members.len(),
        reflexive: mesh.reflexive.clone(),
        port_mapping: mesh.mapped.clone().map(|standing| match standing {
            Ok(mapping) => PortMappingStatus::Given(mapping),
            Err(reason) => PortMappingStatus::Refused(reason),
        }),
        relays: mesh
            .relays
            .iter()
            .map(|(address, standing)| {
                let status = match standing {
                    Ok(Answers { rtt, by_tls: false }) => RelayStatus::RttUs(micros(*rtt)),
                    Ok(Answers { rtt, by_tls: true }) => RelayStatus::TlsRttUs(micros(*rtt)),
                    Err(reason) => RelayStatus::Refuses(reason.clone()),
                };
                (address.clone(), status)
            })
            .collect(),
        streams: mesh
            .streams
            .iter()
            .map(|(address, counters)| {
                let status = StreamStatus {
                    received: counters.received,
                    sent: counters.sent,
                    drops: drops(&counters.drops),
                };
                (address.clone(), status)
            })
            .collect(),
        turn: mesh
            .turn
            .iter()
            .map(|(address, allocation)| {
                let counters = &allocation.counters;
                let status = TurnStatus {
                    relayed: allocation.relayed,
                    transport: allocation.transport.to_owned(),
                    received: counters.received,
                    sent: counters.sent,
                    drops: drops(&counters.drops),
                };
                (address.clone(), status)
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
