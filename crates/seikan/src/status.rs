//! Status of a tunnel.

use seikan_node::status;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Status of a running tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Addresses of this host inside the tunnel.
    pub addresses: Vec<IpAddr>,
    /// MTU inside the tunnel in bytes.
    pub mtu: u32,
    /// UDP port on which the tunnel listens.
    pub port: u16,
    /// Whether the coordinator answers; `None` if this host is not a member of a mesh.
    pub coordinator: Option<bool>,
    /// The peers, ordered by key; in a mesh, the other members.
    pub peers: Vec<PeerStatus>,
}

/// Status of a peer of a running tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerStatus {
    /// Name of the peer in the configuration or the mesh.
    pub name: Option<String>,
    /// Public key of the peer in Base64.
    pub public_key: String,
    /// Whether the peer answers.
    pub state: PeerState,
    /// Address to which datagrams for the peer are sent: its own, or that of its relay.
    pub endpoint: Option<SocketAddr>,
    /// Latest round-trip time of a probe; native protocol only.
    pub round_trip: Option<Duration>,
    /// Bytes of authenticated datagrams received from the peer.
    pub received_bytes: u64,
    /// Bytes of datagrams sent to the peer.
    pub sent_bytes: u64,
}

/// Whether a peer answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// There has been no session since the tunnel started.
    NeverSeen,
    /// There is a session, and no answer is overdue.
    Up,
    /// The last session has ended, and no answer is overdue.
    Idle,
    /// No answer for 15 seconds, although a reachable peer answers within that time.
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
