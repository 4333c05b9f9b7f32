//! Status of a node: [`Status`], which is also the JSON of `seikan status --json`.
//!
//! That JSON is a stable interface: fields are added, but keep their names and meaning while
//! [`Status::version`] is the same. Keys in it are public keys only.

pub mod gateway;
mod interface;
mod mesh;
mod peer;
mod traffic;
mod userspace;

pub use interface::{Capability, Device, Interface, KernelCounters, Socket};
pub use mesh::{
    MeshStatus, PortMappingStatus, RelayStatus, StreamStatus, StunStatus, TurnStatus,
    WebProxyStatus,
};
pub use peer::{
    Candidate, CandidateKind, CandidateState, LatestHandshake, NoDirectPath, Path, PeerDevice,
    PeerState, PeerStatus, PortSearch, Repair, RepairState, Report, TlsPath, TurnPath, peer,
};
pub(crate) use peer::{is_relayed, is_up};
pub use traffic::{Batches, Bucket, Direction, Distribution, Handshakes, Traffic};
pub(crate) use traffic::{direction, distribution};
pub use userspace::{ExposedPort, ListeningPort, ServiceCounts, UserspaceStatus};

use crate::node::Node;
use crate::status::gateway::GatewayStatus;
use crate::subject::Record;
use seikan_mesh::endpoints::is_routable;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Version of the interface; incremented by an incompatible change.
pub const VERSION: u32 = 1;

/// Status of a running tunnel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Status {
    /// Version of this format; incremented by an incompatible change.
    pub version: u32,
    /// The process id.
    pub pid: u32,
    /// The interface.
    pub interface: Interface,
    /// The TUN device and the kernel's counts of it.
    pub device: Device,
    /// The UDP sockets, one for each address family.
    pub sockets: Vec<Socket>,
    /// Datagrams dropped by the kernel because the receive buffer was full; a merged batch counts once.
    pub receive_queue_drops: u64,
    /// Datagrams longer than any datagram of a peer, dropped by the socket filter.
    #[serde(default)]
    pub oversized_drops: u64,
    /// Datagrams of an unknown type, or too short for their type, dropped by the socket filter.
    #[serde(default)]
    pub malformed_drops: u64,
    /// Datagrams from sources that are not the endpoint of a peer, dropped by the socket filter
    /// during a flood.
    #[serde(default)]
    pub flood_drops: u64,
    /// Sends that failed with segmentation offload and were repeated without.
    pub gso_fallbacks: u64,
    /// Datagrams sent later than they were made: bursts are spread, streams delayed, or the rate is limited.
    #[serde(default)]
    pub delayed_datagrams: u64,
    /// Maximum rate of all datagrams with their IP headers, in bits per second; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink_rate: Option<u64>,
    /// Totals of all peers, including removed ones and packets of no peer.
    pub totals: Traffic,
    /// Number of packets per system call.
    pub batches: Batches,
    /// The mesh; absent if this host is not a member of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh: Option<MeshStatus>,
    /// The TCP/IP stack of a tunnel without root; absent if the tunnel has an interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub userspace: Option<UserspaceStatus>,
    /// The peers, ordered by key.
    pub peers: Vec<PeerStatus>,
    /// The gateway; absent if this host is not one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<GatewayStatus>,
}

/// Returns everything except peers and gateway, which may be long and are sent piece by piece.
pub fn without_peers(node: &Node, record: &Record) -> Status {
    let counts = node.sockets.counts();
    Status {
        version: VERSION,
        pid: std::process::id(),
        interface: interface::interface(node, record),
        device: interface::device(node, record),
        sockets: node.sockets.iter().map(interface::socket).collect(),
        receive_queue_drops: counts.receive_queue_drops,
        oversized_drops: counts.oversized_drops,
        malformed_drops: counts.malformed_drops,
        flood_drops: counts.flood_drops,
        gso_fallbacks: counts.gso_fallbacks,
        delayed_datagrams: node.pacer.delayed,
        uplink_rate: node.pacer.limit(),
        totals: traffic::traffic(&node.tunnel.totals()),
        batches: Batches {
            packets_per_read: distribution(&node.batches.packets_per_read),
            datagrams_per_send: distribution(&node.batches.datagrams_per_send),
            datagrams_per_receive: distribution(&node.batches.datagrams_per_receive),
            packets_per_write: distribution(&node.batches.packets_per_write),
        },
        mesh: node.mesh.as_ref().map(|mesh| {
            let netlink = record.netlink.as_ref();
            let all = netlink.and_then(|netlink| netlink.all_addresses().ok());
            let tun = node.tun.index();
            let others = all.into_iter().flatten().filter(|a| Some(a.index) != tun);
            let usable = others.map(|a| a.net.addr()).filter(|ip| is_routable(*ip));
            mesh::mesh(mesh, &node.transports, &usable.collect::<Vec<_>>())
        }),
        userspace: node.stack.as_ref().map(userspace::userspace),
        peers: Vec::new(),
        gateway: None,
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    /// The stable interface with all its fields.
    const GOLDEN: &str = include_str!("../testdata/status.json");

    #[test]
    fn the_json_has_the_fields_it_is_known_for() {
        let known: Value = serde_json::from_str(GOLDEN).unwrap();
        let status: Status = serde_json::from_str(GOLDEN).unwrap();
        assert_eq!(status.version, VERSION);
        assert_eq!(serde_json::to_value(&status).unwrap(), known);
    }

    #[test]
    fn peers_come_last_so_that_they_can_follow_in_pieces() {
        let mut status: Status = serde_json::from_str(GOLDEN).unwrap();
        status.peers.clear();
        status.gateway = None;
        let text = serde_json::to_string(&status).unwrap();
        assert!(text.ends_with("\"peers\":[]}"), "{text}");
    }
}
