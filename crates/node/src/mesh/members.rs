//! Turns members of the mesh into peers of the tunnel, with their addresses and packet filters.

use crate::node::Node;
use crate::system::now;
use ipnet::IpNet;
use seikan_mesh::endpoints::{is_routable, may_serve};
use seikan_mesh::event::WorkerEvent;
use seikan_mesh::state::LOG;
use seikan_proto::keys::PublicKey;
use seikan_proto::mesh::Member;
use seikan_proto::tunnel::Reachability;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use tracing::{info, warn};

/// Maximum number of refused members that are noted; a coordinator could name any number.
const MAX_REFUSED: usize = 1024;

/// Which members may become peers. A coordinator decides who has which address of the mesh, and nothing else:
/// it cannot direct other traffic to a member, nor change a peer of the configuration file.
#[derive(Debug, Default)]
pub(super) struct Rules {
    /// The interface's own addresses, with the networks of the mesh.
    pub own: Vec<IpNet>,
    /// Keys of the peers of the configuration file.
    pub configured: BTreeSet<PublicKey>,
    /// Allowed IPs of these peers.
    pub taken: Vec<IpNet>,
}

/// Adds the peer of a member, or updates it.
pub(super) fn set(node: &mut Node, member: Member, rules: &Rules) {
    let Some(mesh) = &mut node.mesh else { return };
    let key = member.public_key;
    mesh.refused.remove(&key);
    if let Err(reason) = rules.check(&member) {
        return refuse(node, &key, reason, rules);
    }
    let before = mesh.members.get(&key);
    let is_new = before.is_none();
    let peer = node.tunnel.peer_by_key(&key);
    if is_new && peer.is_some() {
        mesh.refused
            .insert(key, "a peer with its key was added by hand");
        return;
    }
    // Also if the peer was removed by hand.
    let has_moved = |before: &Member| !before.all_addresses().eq(member.all_addresses());
    let moved = peer.is_none() || before.is_none_or(has_moved);
    // The filter of a gateway's peer takes a while, and most changes are of endpoints.
    let has_same_policy = |before: &Member| before.parties() == member.parties();
    let is_filtered = !moved && before.is_some_and(has_same_policy);
    // This host's own key cannot be a peer's.
    let Some(id) = node.tunnel.add_peer(key) else {
        return;
    };
    if moved {
        node.tunnel.clear_allowed_ips(id);
        for address in member.all_addresses() {
            node.tunnel.add_allowed_ip(id, IpNet::from(address));
        }
    }
    let candidates = member.endpoints.iter().copied();
    let candidates: Vec<_> = candidates.filter(|at| rules.may_be_at(*at)).collect();
    node.tunnel.set_candidates(id, &candidates, now().mono);
    if is_new {
        info!(target: LOG, peer = %key, name = %member.name, "member added");
        node.former.resume_member(&mut node.tunnel, id, &key);
    }
    mesh.members.insert(key, member);
    if !is_filtered {
        filter(node, &key);
    }
}

/// Removes the peer of a member, if it has one, and notes why it is none.
pub(super) fn refuse(node: &mut Node, key: &PublicKey, reason: &'static str, rules: &Rules) {
    remove(node, key, rules);
    let Some(mesh) = &mut node.mesh else { return };
    if mesh.refused.len() < MAX_REFUSED || mesh.refused.contains_key(key) {
        warn!(target: LOG, peer = %key, reason, "member refused");
        mesh.refused.insert(*key, reason);
    }
}

/// Changes the key of a member: its peer keeps its sessions until a handshake under the new key replaces them.
pub(super) fn rotate(node: &mut Node, former: &PublicKey, member: Member, rules: &Rules) {
    let (key, now) = (member.public_key, now());
    let believed = rules.check(&member).is_ok();
    let peer = node.tunnel.peer_by_key(former).filter(|_| believed);
    let Some(mesh) = &mut node.mesh else { return };
    mesh.refused.remove(former);
    match (peer, mesh.members.remove(former)) {
        (Some(id), Some(before)) if node.tunnel.rotate_peer_key(id, key) => {
            info!(target: LOG, peer = %key, name = %before.name, "member changed its key");
            mesh.members.insert(key, before);
            if node.tunnel.reached(id, now.mono) == Reachability::Relayed {
                // The port of a pair at a relay depends on the keys.
                mesh.notify_agent(WorkerEvent::Sought {
                    key,
                    lost: false,
                    calls: true,
                });
            }
            node.tunnel.renew(now, id, &mut node.outbox);
            node.transmit();
        }
        (_, Some(before)) => {
            mesh.members.insert(*former, before);
            remove(node, former, rules);
        }
        (_, None) => {}
    }
    set(node, member, rules);
    // A policy in the same answer was set for the former key.
    filter(node, &key);
}

/// Sets the packet filter of a member: connections that it and the devices behind it may open, to the addresses in
/// the mesh of this host and the devices behind it only.
/// Peers that are not members are not subject to the policy.
pub(super) fn filter(node: &mut Node, key: &PublicKey) {
    let Some(mesh) = &node.mesh else { return };
    let Some(member) = mesh.members.get(key) else {
        return;
    };
    if let Some(id) = node.tunnel.peer_by_key(key) {
        let filters = mesh.access.filters(&mesh.receivers, member);
        node.tunnel.set_filter(id, filters);
    }
}

/// Removes a member's peer with its sessions; nothing of it is accepted any more.
pub(super) fn remove(node: &mut Node, key: &PublicKey, rules: &Rules) {
    let Some(mesh) = &mut node.mesh else { return };
    mesh.refused.remove(key);
    let Some(member) = mesh.members.remove(key) else {
        return;
    };
    info!(target: LOG, peer = %key, name = %member.name, "member removed");
    if rules.configured.contains(key) {
        return;
    }
    if let Some(id) = node.tunnel.peer_by_key(key) {
        node.tunnel.remove_peer(id);
    }
}

impl Rules {
    /// The addresses of this host in the mesh.
    pub(super) fn own_addresses(&self) -> Vec<IpAddr> {
        self.own.iter().map(IpNet::addr).collect()
    }

    /// Whether a member may have this endpoint: not on this host, nor inside the mesh, where its datagrams
    /// would be sent through the tunnel that they carry.
    pub(super) fn may_be_at(&self, endpoint: SocketAddr) -> bool {
        let ip = endpoint.ip().to_canonical();
        endpoint.port() != 0 && is_routable(ip) && !self.is_inside(ip)
    }

    /// Whether a STUN server or relay may have this address, `own` being the tunnel's port: not inside the
    /// mesh, where requests to it would be sent through the tunnel.
    pub(super) fn may_serve(&self, server: SocketAddr, own: u16) -> bool {
        may_serve(server, own) && !self.is_inside(server.ip())
    }

    /// Whether a device behind this host may have an address: inside the mesh, and not this host's own.
    pub(super) fn may_allocate(&self, ip: IpAddr) -> bool {
        let is_own = self.own.iter().any(|net| net.addr() == ip);
        self.is_inside(ip) && !is_own && !self.taken.iter().any(|net| net.contains(&ip))
    }

    /// Whether an address is inside the mesh.
    fn is_inside(&self, ip: IpAddr) -> bool {
        self.own.iter().any(|net| net.contains(&ip.to_canonical()))
    }

    /// Returns why a member cannot be a peer.
    fn check(&self, member: &Member) -> Result<(), &'static str> {
        if self.configured.contains(&member.public_key) {
            return Err("the configuration file has a peer with its key");
        }
        if !member
            .all_addresses()
            .all(|address| self.is_inside(address))
        {
            return Err("its address is outside the mesh's networks");
        }
        let own = |address| self.own.iter().any(|net| net.addr() == address);
        if member.all_addresses().any(own) {
            return Err("its address is this host's own");
        }
        let taken = |address| self.taken.iter().any(|net| net.contains(&address));
        if member.all_addresses().any(taken) {
            return Err("its address belongs to a peer of the configuration file");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(key: u8, addresses: &[&str]) -> Member {
        Member {
            name: "m".parse().expect("a name"),
            public_key: PublicKey::from_bytes([key; 32]),
            addresses: addresses.iter().map(|a| a.parse().expect(a)).collect(),
            endpoints: Vec::new(),
            relayed: Vec::new(),
            tags: Vec::new(),
            devices: Vec::new(),
        }
    }

    #[test]
    fn members_are_neither_on_this_host_nor_inside_of_the_mesh() {
        let rules = Rules {
            own: vec!["100.80.0.1/12".parse().expect("a network")],
            ..Rules::default()
        };
        let at = |text: &str| rules.may_be_at(text.parse().expect(text));
        assert!(at("192.0.2.1:7") && at("10.0.0.1:7") && at("[2001:db8::1]:7"));
        for bad in [
            "127.0.0.1:7",
            "[::1]:7",
            "[::ffff:127.0.0.1]:7",
            "0.0.0.0:7",
            "224.0.0.1:7",
            "255.255.255.255:7",
            "169.254.1.1:7",
            "[fe80::1]:7",
            "100.80.0.9:7",
            "192.0.2.1:0",
        ] {
            assert!(!at(bad), "{bad}");
        }
    }

    #[test]
    fn impossible_addresses_of_servers_are_refused() {
        let rules = Rules {
            own: vec!["100.80.0.1/12".parse().expect("a network")],
            ..Rules::default()
        };
        let at = |text: &str| rules.may_serve(text.parse().expect(text), 51820);
        for good in [
            "192.0.2.1:443",
            "10.0.0.1:3478",
            "[2001:db8::1]:7",
            "127.0.0.1:3478",
            "[::1]:7443",
        ] {
            assert!(at(good), "{good}");
        }
        for bad in [
            "100.80.0.1:3478",
            "100.80.0.9:3478",
            "[::ffff:100.80.0.9]:3478",
            "127.0.0.53:53",
            "[::1]:123",
            "127.0.0.1:51820",
            "[::ffff:127.0.0.1]:51820",
            "169.254.169.254:3478",
            "[fe80::1]:3478",
            "0.0.0.0:3478",
            "224.0.0.1:3478",
            "255.255.255.255:3478",
            "192.0.2.1:0",
        ] {
            assert!(!at(bad), "{bad}");
        }
    }

    #[test]
    fn a_coordinator_is_believed_about_addresses_of_the_mesh_alone() {
        let net = |text: &str| text.parse::<IpNet>().expect(text);
        let rules = Rules {
            own: vec![net("100.80.0.1/12"), net("fd00::1/64")],
            configured: BTreeSet::from([PublicKey::from_bytes([9; 32])]),
            taken: vec![net("100.80.7.0/24")],
        };
        let good = ["100.80.0.2", "fd00::2"];
        assert_eq!(rules.check(&member(1, &good)), Ok(()));
        for (key, addresses) in [
            (1, vec!["192.0.2.1"]),
            (1, vec!["100.80.0.2", "2001:db8::1"]),
            (1, vec!["100.80.0.1"]),
            (1, vec!["100.80.7.3"]),
            (9, good.to_vec()),
        ] {
            assert!(
                rules.check(&member(key, &addresses)).is_err(),
                "{addresses:?}"
            );
        }
    }
}
