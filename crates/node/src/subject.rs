//! State that clients may read and change: the node, and the control sockets' own record of it.

use crate::node::Node;
use crate::system::{SystemRandom, now};
use crate::uapi::{Device, Refusal};
use crate::worker::ControlFlow;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_proto::tunnel::{Now, Tunnel};
use seikan_sys::netlink::Netlink;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Data about a node that only the control sockets need.
#[derive(Debug)]
pub struct Record {
    /// The interface.
    pub name: String,
    /// Configured names of peers.
    pub names: BTreeMap<PublicKey, String>,
    /// There is no private key: none was set yet, or a client has removed it.
    pub keyless: bool,
    /// Connection that reads the device's counters.
    pub netlink: Option<Netlink>,
    /// Reason why `wg` has no socket, if so.
    pub without_uapi: Option<String>,
    /// Configuration file; `None` if other programs configure the interface.
    pub config: Option<PathBuf>,
    /// Log file, if the node runs in the background.
    pub log: Option<PathBuf>,
}

impl Record {
    /// Returns the name of a peer in the configuration or the mesh.
    pub fn name_of(&self, node: &Node, key: &PublicKey) -> Option<String> {
        let member = || {
            let member = node.mesh.as_ref()?.members.get(key)?;
            Some(member.name.to_string())
        };
        self.names.get(key).cloned().or_else(member)
    }
}

/// A node with its record.
pub struct Subject<'a> {
    /// The node.
    pub node: &'a mut Node,
    /// Its record.
    pub record: &'a mut Record,
    /// Effect of the clients' requests on the loop.
    pub flow: ControlFlow,
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
        // The interface has no identity: a random key is known to nobody, and no peer accepts it.
        let key = key.unwrap_or_else(|| PrivateKey::generate(&mut SystemRandom));
        self.node.tunnel.set_private_key(key);
    }

    fn listen_port(&self) -> u16 {
        self.node.sockets.port()
    }

    fn set_listen_port(&mut self, port: u16) -> Result<(), Refusal> {
        self.node.sockets.rebind(port)?;
        if self.flow != ControlFlow::Stop {
            self.flow = ControlFlow::SocketsChanged;
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
