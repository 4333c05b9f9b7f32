//! Ping of a peer, for a client that waits for the result: [`Pong`].

use crate::node::Node;
use crate::subject::{Record, Subject};
use crate::system::now;
use seikan_mesh::names::DOMAIN;
use seikan_mesh::transport::ProxyTarget;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::Name;
use seikan_proto::noise::Protocol;
use seikan_proto::ping::Ping;
use seikan_proto::time::Instant;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Timeout of the answer.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Result of a ping.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Pong {
    /// Name of the peer in the configuration or the mesh.
    pub name: Option<String>,
    /// Its public key, in Base64.
    pub public_key: String,
    /// Round trip in microseconds; `None` if no answer came within two seconds.
    pub rtt_us: Option<u64>,
    /// Path of the request; `None` if none is known.
    pub path: Option<Path>,
    /// Reason of a missing answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silence: Option<Silence>,
}

/// The path to a peer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Path {
    /// Destination address.
    pub address: SocketAddr,
    /// Whether the destination is a relay.
    pub relayed: bool,
    /// Name of the relay in the mesh, if exactly one has that address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
}

/// Reason of a missing answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Silence {
    /// No address of the peer is known.
    NoAddress,
    /// No handshake was answered, so there is no session.
    NoHandshake,
    /// The session did not return an answer.
    NoAnswer,
}

/// A ping in progress.
#[derive(Debug)]
pub(super) struct Pinging {
    /// The peer; its key may change meanwhile.
    id: PeerId,
    /// Number of the request.
    number: u64,
    until: Instant,
}

impl Pinging {
    /// Pings the peer with this name, address or key.
    ///
    /// # Errors
    /// A message for the user: there is no such peer, or it cannot be pinged.
    pub fn begin(subject: &mut Subject<'_>, peer_name: &str) -> Result<Pinging, String> {
        if subject.node.tunnel.protocol() == Protocol::WireGuard {
            return Err(
                "the WireGuard protocol has no echo request; use ping(8) with an address of the peer"
                    .to_owned(),
            );
        }
        if subject.node.is_standby() {
            return Err("this gateway is on standby and has no sessions".to_owned());
        }
        let id = find(subject.node, subject.record, peer_name)?;
        let now = now();
        let node = &mut *subject.node;
        let number = node.tunnel.ping(now, id, &mut node.outbox);
        node.transmit();
        Ok(Pinging {
            id,
            number,
            until: now.mono + PATIENCE,
        })
    }

    /// Returns the result, also if the timeout has passed; `None` while an answer may still come.
    pub fn outcome(&self, subject: &Subject<'_>) -> Option<Result<Pong, String>> {
        let (node, now) = (&*subject.node, now().mono);
        let peer = node.tunnel.peer(self.id);
        let Some((peer, ping)) = peer.and_then(|peer| Some((peer, peer.pings.get(self.number)?)))
        else {
            return Some(Err("the peer was removed meanwhile".to_owned()));
        };
        let (to, rtt) = match ping {
            Ping::Answered { to, rtt } => (Some(to), Some(rtt)),
            _ if now < self.until => return None,
            Ping::Sent { to, .. } => (Some(to), None),
            Ping::Queued => (peer.path.endpoint, None),
        };
        let silence = match ping {
            _ if rtt.is_some() => None,
            Ping::Sent { .. } => Some(Silence::NoAnswer),
            _ if peer.is_reachable() => Some(Silence::NoHandshake),
            _ => Some(Silence::NoAddress),
        };
        Some(Ok(Pong {
            name: subject.record.name_of(node, &peer.public_key),
            public_key: peer.public_key.to_string(),
            rtt_us: rtt.map(|rtt| rtt.as_micros().try_into().unwrap_or(u64::MAX)),
            path: to.map(|address| {
                let relayed = peer.paths.is_relay(address);
                Path {
                    address,
                    relayed,
                    relay: relayed.then(|| relay_at(node, address)).flatten(),
                }
            }),
            silence,
        }))
    }
}

/// Returns the name of the relay that has an address. The port of a pair is at the same IP address as the main
/// port.
fn relay_at(node: &Node, address: SocketAddr) -> Option<String> {
    let mesh = node.mesh.as_ref()?;
    match node.transports.target(address) {
        Some(ProxyTarget::Relay { relay, .. }) => return Some(format!("{relay} (TLS)")),
        Some(ProxyTarget::Turn { server, .. }) => return Some(format!("{server} (TURN)")),
        None => {}
    }
    let ip = address.ip();
    let views = mesh.views.iter();
    let relays = views.filter(|view| mesh.relays.contains_key(&view.name));
    let mut there = relays.filter(|view| view.server.ip().to_canonical() == ip.to_canonical());
    let first = there.next()?;
    there.next().is_none().then(|| first.name.clone())
}

/// Finds a peer by its configured name, its mesh name, its address or its key.
fn find(node: &Node, record: &Record, peer_name: &str) -> Result<PeerId, String> {
    let tunnel = &node.tunnel;
    if let Ok(address) = peer_name.parse::<IpAddr>() {
        return tunnel
            .peer_at(address)
            .ok_or_else(|| format!("no peer has the address {address}"));
    }
    if let Ok(key) = peer_name.parse::<PublicKey>() {
        return tunnel.peer_by_key(&key).ok_or_else(|| unknown(peer_name));
    }
    let named = |name: &str| name.eq_ignore_ascii_case(peer_name);
    let configured = record.names.iter().find(|(_, name)| named(name));
    if let Some(id) = configured.and_then(|(key, _)| tunnel.peer_by_key(key)) {
        return Ok(id);
    }
    let Some(mesh) = &node.mesh else {
        return Err(unknown(peer_name));
    };
    let name = peer_name.strip_suffix('.').unwrap_or(peer_name);
    let host = name.strip_suffix(DOMAIN);
    let name = host.and_then(|host| host.strip_suffix('.')).unwrap_or(name);
    let has_name = |member: &Name| member.as_str().eq_ignore_ascii_case(name);
    let mut members = mesh.members.iter();
    let member = members.find(|(_, member)| has_name(&member.name));
    if let Some(id) = member.and_then(|(key, _)| tunnel.peer_by_key(key)) {
        return Ok(id);
    }
    let mut refused = mesh.key_conflicts.refused.values();
    Err(match refused.find(|refused| has_name(&refused.name)) {
        Some(refused) => format!("not a peer: {}", refused.reason),
        None => unknown(peer_name),
    })
}

fn unknown(peer_name: &str) -> String {
    // The text is displayed to a user.
    let shown: String = peer_name
        .chars()
        .filter(|c| !c.is_control())
        .take(64)
        .collect();
    format!(
        "there is no peer `{shown}`: give a name, an address or a key that `seikan status` lists"
    )
}
