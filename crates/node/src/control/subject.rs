//! What clients may see and change: the node, and what control keeps about it.

use crate::node::{Node, SystemRandom, now};
use crate::uapi::{Device, Refusal};
use crate::worker::Verdict;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::tunnel::{Now, Tunnel};
use seikan_sys::netlink::Netlink;
use std::collections::BTreeMap;

/// What control keeps about a node.
#[derive(Debug)]
pub struct Record {
    /// The interface.
    pub name: String,
    /// Names of peers, for people.
    pub names: BTreeMap<PublicKey, String>,
    /// The private key was taken away by a client.
    pub keyless: bool,
    /// To ask about the device's counters.
    pub netlink: Option<Netlink>,
    /// Why `wg` cannot reach us, if so.
    pub without_uapi: Option<String>,
}

impl Record {
    /// What people call a peer: as the configuration does, or the mesh.
    pub fn name_of(&self, node: &Node, key: &PublicKey) -> Option<String> {
        let member = || {
            let member = node.mesh.as_ref()?.members.get(key)?;
            Some(member.name.to_string())
        };
        self.names.get(key).cloned().or_else(member)
    }
}

/// A node as clients have it.
pub struct Subject<'a> {
    /// The node.
    pub node: &'a mut Node,
    /// What is known besides.
    pub record: &'a mut Record,
    /// What the loop has to do about what clients did.
    pub verdict: Verdict,
}

impl Device for Subject<'_> {
    fn tunnel(&self) -> &Tunnel {
        &self.node.tunnel
    }

    fn tunnel_mut(&mut self) -> &mut Tunnel {
        &mut self.node.tunnel
    }

    fn now(&self) -> Now {
        now()
    }

    fn private_key(&self) -> Option<&PrivateKey> {
        (!self.record.keyless).then(|| self.node.tunnel.identity().private())
    }

    fn set_private_key(&mut self, key: Option<PrivateKey>) {
        self.record.keyless = key.is_none();
        // Nobody knows, and no peer accepts, a random key: the interface is without identity.
        let key = key.unwrap_or_else(|| PrivateKey::generate(&mut SystemRandom));
        self.node.tunnel.set_private_key(key);
    }

    fn listen_port(&self) -> u16 {
        self.node.sockets.port()
    }

    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal> {
        self.node.sockets.rebind(port)?;
        if self.verdict != Verdict::Stop {
            self.verdict = Verdict::SocketsChanged;
        }
        Ok(())
    }

    fn fwmark(&self) -> u32 {
        self.node.sockets.fwmark().unwrap_or(0)
    }

    fn set_fwmark(&mut self, mark: u32) -> Result<(), Refusal> {
        Ok(self.node.sockets.set_fwmark(mark)?)
    }
}
