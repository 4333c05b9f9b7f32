//! Changes of the interfaces on both sides while the gateway runs: the local network's interface loses its
//! carrier, is deleted, recreated or gets another MTU; the tunnel's interface gets other addresses. In routed
//! mode the monitor sets a recreated interface up for forwarding.
//!
//! [`LanMonitor`] is a [`Service`] of the worker's loop.

use crate::gateway::{LanError, Link};
use crate::node::Node;
use crate::system::now;
use crate::worker::{ControlFlow, Service, TOKEN_LAN};
use seikan_proto::gateway::Mtus;
use seikan_sys::netlink::{Event, Group, Netlink, NetlinkError, Subscription};
use seikan_sys::poll::{Epoll, Interest};
use std::io;

/// Token of the subscription.
const TOKEN: u64 = (1 << 62) + 16;
/// Events read before packets get their turn.
const MAX_EVENTS: usize = 64;

/// Watches the interface, and the addresses of the tunnel's interface.
pub struct LanMonitor {
    network: Subscription,
    netlink: Netlink,
}

impl LanMonitor {
    /// Starts watching. Hooks may have changed the addresses before.
    pub fn new(node: &mut Node) -> Result<LanMonitor, NetlinkError> {
        let monitor = LanMonitor {
            network: Netlink::subscribe(&[Group::Link, Group::Address])?,
            netlink: Netlink::open()?,
        };
        node.update_addresses(&monitor.netlink);
        Ok(monitor)
    }

    /// Whether a token is this service's.
    pub fn owns(token: u64) -> bool {
        token == TOKEN
    }
}

impl Service for LanMonitor {
    fn start(&mut self, epoll: &Epoll) -> io::Result<()> {
        epoll.add(&self.network, TOKEN, Interest::Read)
    }

    fn ready(&mut self, _token: u64, epoll: &Epoll, node: &mut Node) -> ControlFlow {
        let Some(gateway) = &node.gateway else {
            return ControlFlow::Continue;
        };
        let (mut concerned, mut removed, mut addressed) = (false, false, false);
        let tun = node.tun.index();
        for _ in 0..MAX_EVENTS {
            // An error of the socket is no event; read the next one.
            let Ok(Some(event)) = self.network.next_event() else {
                break;
            };
            match event {
                Event::Link(link) => concerned |= link.name == gateway.interface,
                Event::LinkRemoved(link) => removed |= link.name == gateway.interface,
                Event::Address(address) | Event::AddressRemoved(address) => {
                    addressed |= Some(address.index) == tun;
                }
                // The lost event may have been any of these.
                Event::Lost => (removed, addressed) = (true, true),
                Event::Route(_) | Event::RouteRemoved(_) | Event::RuleRemoved => {}
            }
        }
        if addressed {
            node.update_addresses(&self.netlink);
        }
        if concerned || removed {
            node.update_link(&self.netlink, epoll);
        }
        ControlFlow::Continue
    }
}

impl Node {
    /// Updates the addresses of the tunnel's interface; keeps the old ones if the kernel cannot be asked.
    fn update_addresses(&mut self, netlink: &Netlink) {
        let Some(index) = self.tun.index() else {
            return;
        };
        if let (Some(node), Ok(addresses)) = (&mut self.gateway, netlink.addresses(index)) {
            let own = addresses.iter().map(|address| address.net.addr());
            node.gateway.set_own(own.collect());
        }
    }

    /// Updates the state of the interface.
    fn update_link(&mut self, netlink: &Netlink, epoll: &Epoll) {
        let Some(node) = &mut self.gateway else {
            return;
        };
        let found = match Link::find(netlink, &node.interface) {
            Ok(link) => Some(link),
            Err(LanError::Missing(_)) => None,
            // Unknown for now; the next event retries.
            Err(_) => return,
        };
        if let Some(link) = found {
            node.gateway.set_mtu(Mtus {
                lan: link.mtu,
                ..node.gateway.mtu()
            });
        }
        let Some(lan) = &mut node.lan else { return };
        let was_up = lan.is_up();
        match found {
            None => lan.disconnect(),
            Some(link) if lan.socket.is_none() || link.index != lan.link.index => {
                // Without permission the socket stays closed. `status` shows that.
                if lan.connect(link, &node.interface).is_ok()
                    && let Some(socket) = lan.socket()
                {
                    let _ = epoll.add(socket, TOKEN_LAN, Interest::Read);
                }
            }
            Some(link) => lan.link = link,
        }
        let is_up = lan.is_up();
        if let Some(election) = &mut lan.election {
            election.set_connected(is_up, now().mono);
        }
        if is_up && !was_up && lan.responder.is_active() {
            lan.responder.announce(now().mono, &node.gateway);
            self.send_made();
        }
        self.poll_election();
    }
}
