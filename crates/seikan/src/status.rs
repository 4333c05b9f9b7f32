//! Status of a tunnel.

use seikan_node::status;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// A running tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Addresses of this host inside the tunnel.
    pub addresses: Vec<IpAddr>,
    /// MTU inside the tunnel in bytes.
    pub mtu: u32,
    /// UDP port of the tunnel's own datagrams.
    pub port: u16,
    /// Whether the coordinator answers; `None` if this host is not a member of a mesh.
    pub coordinator: Option<bool>,
    /// The peers, ordered by key; those of a mesh are its members.
    pub peers: Vec<PeerStatus>,
}

/// A peer of a running tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerStatus {
    /// Its name in the configuration or the mesh.
    pub name: Option<String>,
    /// Its public key in Base64.
    pub public_key: String,
    /// Whether it answers.
    pub state: PeerState,
    /// Address of its datagrams, or of its relay.
    pub endpoint: Option<SocketAddr>,
    /// Latest round trip of a probe; native protocol only.
    pub round_trip: Option<Duration>,
    /// Bytes of datagrams received from it and authenticated.
    pub received_bytes: u64,
    /// Bytes of datagrams sent to it.
    pub sent_bytes: u64,
}

/// Whether a peer answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// There was no session since the tunnel started.
    NeverSeen,
    /// There is a session, and nothing waits for an answer for long.
    Up,
    /// The last session has ended, and nothing waits for an answer for long.
    Idle,
    /// Nothing came back for 15 seconds, in which a peer that is there has to answer.
    Down,
}

impl Status {
    pub(crate) fn of(status: status::Status, addresses: Vec<IpAddr>, mtu: u32) -> Status {
        let connected =
            |mesh: &status::MeshStatus| mesh.contact == seikan_mesh::event::Contact::Connected;
        Status {
            addresses,
            mtu,
            port: status.interface.listen_port,
            coordinator: status.mesh.as_ref().map(connected),
            peers: status.peers.into_iter().map(peer).collect(),
        }
    }
}

fn peer(peer: status::PeerStatus) -> PeerStatus {
    PeerStatus {
        name: peer.name,
        public_key: peer.public_key,
        state: match peer.state {
            Some(status::PeerState::Up) => PeerState::Up,
            Some(status::PeerState::Idle) => PeerState::Idle,
            Some(status::PeerState::Down) => PeerState::Down,
            Some(status::PeerState::NeverSeen) | None => PeerState::NeverSeen,
        },
        endpoint: peer.path.endpoint,
        round_trip: peer.path.rtt_us.map(Duration::from_micros),
        received_bytes: peer.traffic.received_bytes,
        sent_bytes: peer.traffic.sent_bytes,
    }
}
