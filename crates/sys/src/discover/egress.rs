//! The interface through which the packets of a tunnel leave.
//!
//! Certain sources come first: the interface that a kernel tunnel is bound to, the route to its
//! other end, the routes to the peers of the program's sockets, and the interface with the address
//! of a socket. Then likely ones: the default route, and the only other interface. A guess is
//! reported as one.

use std::net::IpAddr;

use seikan_observe::path::{SocketFacts, Transport, Unseen};

use super::network::Network;
use crate::netlink::{Family, LinkNode};

/// Maximum number of peers whose routes are looked up.
const PEERS_MAX: usize = 16;

/// The properties of a tunnel that determine where its packets leave.
pub(super) struct Tunnel<'a> {
    pub(super) network: &'a Network,
    /// The inner interface.
    pub(super) inner: &'a LinkNode,
    /// Whether a program implements it.
    pub(super) program: bool,
    /// The sockets of the program.
    pub(super) sockets: &'a [SocketFacts],
    /// The known remote ends of a kernel tunnel.
    pub(super) peers: &'a [IpAddr],
    /// Interfaces on which the program has packet sockets.
    pub(super) bound: &'a [u32],
}

impl Tunnel<'_> {
    /// Returns the index of the interface.
    pub(super) fn egress(&self, unseen: &mut Vec<Unseen>) -> Option<u32> {
        if !self.is_tunnel() {
            return self.lower_or_uplink();
        }
        self.inner
            .underlay
            .or_else(|| self.towards_peers())
            .or_else(|| self.of_address())
            .or_else(|| self.of_packet_sockets())
            .or_else(|| self.guess(unseen))
    }

    /// Whether packets leave inside other packets. A tap in a bridge may instead be the NIC of a
    /// virtual machine: then the program, an emulator, has no sockets to the outside.
    fn is_tunnel(&self) -> bool {
        let kind = &*self.inner.info.kind;
        let outside = |socket: &SocketFacts| {
            socket.transport != Transport::Raw && !socket.local.ip().is_loopback()
        };
        match self.inner.master {
            _ if is_kernel_tunnel(kind) => true,
            Some(_) => self.program && self.sockets.iter().any(outside),
            // This process may be unable to see the program of a tun.
            None => self.program || matches!(kind, "tun" | "tap"),
        }
    }

    /// For an interface that is no tunnel: the lower interface (of a VLAN), the uplink of a bridge,
    /// or itself.
    fn lower_or_uplink(&self) -> Option<u32> {
        let inner = self.inner;
        let bridge = match inner.info.kind.as_str() {
            "bridge" => Some(inner.info.index),
            "veth" | "tap" | "tun" => inner.master,
            _ => return inner.lower.or(Some(inner.info.index)),
        };
        let Some(bridge) = bridge else {
            return Some(inner.info.index);
        };
        let ports: Vec<&LinkNode> = self
            .network
            .ports(bridge)
            .filter(|port| port.info.index != inner.info.index)
            .collect();
        // Guests are attached by veth and tap; any other port is an uplink. Of two ports, the other
        // one leads out.
        let guest = |port: &&&LinkNode| matches!(&*port.info.kind, "veth" | "tap" | "tun");
        let uplink = ports.iter().filter(|port| !guest(port));
        let uplink = uplink.max_by_key(|port| port.bytes);
        let only = || {
            ports
                .first()
                .filter(|_| ports.len() == 1 && inner.info.index != bridge)
        };
        let routed = || {
            let device = self.network.default_device(Family::V4, bridge)?;
            ports.iter().find(|port| port.info.index == device)
        };
        let port = uplink.or_else(only).or_else(routed)?;
        Some(port.info.index)
    }

    fn towards_peers(&self) -> Option<u32> {
        let connected = self.sockets.iter();
        let connected = connected.filter(|socket| socket.transport != Transport::Raw);
        let connected = connected.filter_map(|socket| Some(socket.remote?.ip()));
        let mut peers: Vec<IpAddr> = self.peers.iter().copied().chain(connected).collect();
        // Connections to the host itself go to helpers of the program, if there are others.
        peers.sort_by_key(IpAddr::is_loopback);
        peers.dedup();
        peers.iter().take(PEERS_MAX).find_map(|peer| {
            let route = self.network.netlink.route_get(*peer, None).ok()?;
            (route.device != self.inner.info.index).then_some(route.device)
        })
    }

    /// Returns the interface that has the local address of a socket.
    fn of_address(&self) -> Option<u32> {
        let mut bound = self.sockets.iter().map(|socket| socket.local.ip());
        bound.find_map(|ip| {
            let addresses = self.network.addresses.iter();
            let mut owners = addresses.filter(|address| address.net.addr() == ip);
            let owner = owners.find(|address| address.index != self.inner.info.index)?;
            (!ip.is_loopback()).then_some(owner.index)
        })
    }

    fn of_packet_sockets(&self) -> Option<u32> {
        let others = self
            .bound
            .iter()
            .filter_map(|index| self.network.node(*index));
        let others = others.filter(|node| node.info.index != self.inner.info.index);
        let busiest = others.max_by_key(|node| (node.info.kind.is_empty(), node.bytes))?;
        Some(busiest.info.index)
    }

    fn guess(&self, unseen: &mut Vec<Unseen>) -> Option<u32> {
        let inner = self.inner.info.index;
        let routed = [Family::V4, Family::V6]
            .into_iter()
            .find_map(|family| self.network.default_device(family, inner));
        let others = || {
            let nodes = self.network.nodes.iter();
            nodes.filter(|node| {
                let info = &node.info;
                info.up && info.index != inner && info.name != "lo" && !is_virtual_end(&info.kind)
            })
        };
        let busiest = || Some(others().max_by_key(|node| node.bytes)?.info.index);
        let found = routed.or_else(busiest);
        let why = match (routed, found) {
            (Some(_), _) => "the remote end is not known; using the interface of the default route",
            (None, Some(_)) if others().count() == 1 => return found,
            (None, Some(_)) => {
                "the remote end is not known, and there is no default route; using the interface that carried the most bytes"
            }
            (None, None) => "there is no other interface that is up in this network namespace",
        };
        unseen.push(Unseen {
            what: "the interface through which the tunnel's packets leave".into(),
            why: why.into(),
        });
        found
    }
}

/// Whether the kernel itself implements a tunnel of this kind.
pub(super) fn is_kernel_tunnel(kind: &str) -> bool {
    matches!(
        kind,
        "wireguard"
            | "vxlan"
            | "geneve"
            | "gre"
            | "gretap"
            | "ip6gre"
            | "ip6gretap"
            | "erspan"
            | "ip6erspan"
            | "ipip"
            | "ip6tnl"
            | "sit"
            | "vti"
            | "vti6"
            | "xfrm"
            | "gtp"
            | "bareudp"
            | "amt"
            | "ovpn"
    )
}

/// Whether packets arrive from programs through interfaces of this kind instead of leaving the
/// host.
fn is_virtual_end(kind: &str) -> bool {
    matches!(kind, "tun" | "tap" | "bridge" | "dummy" | "ifb") || is_kernel_tunnel(kind)
}
