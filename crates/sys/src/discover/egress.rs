//! Through which interface a tunnel's own packets leave.
//!
//! What is certain comes first: the interface a kernel tunnel is bound to, the route to its other
//! end, to the peers of the program's sockets, the interface of a socket's address. Then what is
//! likely: the default route, the only other interface. A guess is told as one.

use std::net::IpAddr;

use seikan_observe::path::{SocketFacts, Transport, Unseen};

use super::network::Network;
use crate::netlink::{Family, LinkNode};

/// Peers of sockets whose routes are looked up, at most.
const PEERS_MAX: usize = 16;

/// A tunnel, as far as it matters for where its packets go.
pub(super) struct Tunnel<'a> {
    pub(super) network: &'a Network,
    /// The inner interface.
    pub(super) inner: &'a LinkNode,
    /// Whether a program is behind it.
    pub(super) program: bool,
    /// The program's sockets.
    pub(super) sockets: &'a [SocketFacts],
    /// The other ends of a tunnel of the kernel, where known.
    pub(super) peers: &'a [IpAddr],
    /// Interfaces that the program has packet sockets on.
    pub(super) bound: &'a [u32],
}

impl Tunnel<'_> {
    /// The index of the interface.
    pub(super) fn egress(&self, unseen: &mut Vec<Unseen>) -> Option<u32> {
        let tunnel = self.program || is_kernel_tunnel(&self.inner.info.kind);
        if !tunnel {
            return self.lower_or_uplink();
        }
        self.inner
            .underlay
            .or_else(|| self.towards_peers())
            .or_else(|| self.of_address())
            .or_else(|| self.of_packet_sockets())
            .or_else(|| self.guess(unseen))
    }

    /// Of what is no tunnel: the interface below (a VLAN's), the way out of a bridge, itself.
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
        // Guests hang on veth and tap; what is neither leads out. With two ports the other does.
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
        // Connections to the host itself are to its own helpers, if there are any others.
        peers.sort_by_key(IpAddr::is_loopback);
        peers.dedup();
        peers.iter().take(PEERS_MAX).find_map(|peer| {
            let route = self.network.netlink.route_get(*peer, None).ok()?;
            (route.device != self.inner.info.index).then_some(route.device)
        })
    }

    /// The interface that has an address a socket is bound to.
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
            (Some(_), _) => "the other end is not known; taken: where the default route leads",
            (None, Some(_)) if others().count() == 1 => return found,
            (None, Some(_)) => {
                "the other end is not known, and there is no default route; taken: the interface \
                 that carried most"
            }
            (None, None) => "there is no other interface that is up in this network namespace",
        };
        unseen.push(Unseen {
            what: "through which interface the tunnel's packets leave".into(),
            why: why.into(),
        });
        found
    }
}

/// Tunnels that the kernel does itself.
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

/// Through what packets come from programs rather than leave the host.
fn is_virtual_end(kind: &str) -> bool {
    matches!(kind, "tun" | "tap" | "bridge" | "dummy" | "ifb") || is_kernel_tunnel(kind)
}
