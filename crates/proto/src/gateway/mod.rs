//! The gateway: it connects devices on which nothing can be installed to the overlay.
//!
//! A [`Gateway`] is a stage between the local network and the tunnel, without I/O:
//!
//! 1. Its driver passes every packet of the local network to [`Gateway::outbound`] before
//!    [`Tunnel::outbound`](crate::tunnel::Tunnel::outbound), and forwards those that it admits.
//! 2. Its driver passes every write that the tunnel left in its inbox to [`Gateway::inbound`],
//!    which returns whether it goes to the host, to a device, or nowhere.
//!
//! Super-packets pass as a whole in both directions: only their one header is translated. The steps
//! are, in this order:
//!
//! 1. identify the device (`devices`);
//! 2. apply [`rules`] to the packet's flow (`query`), and admit replies of known [`flows`];
//! 3. update the TCP statistics of both sides ([`flows`]);
//! 4. [`translate`] the addresses.
//!
//! In transparent mode [`responder`] answers for the gateway on the local network.

mod admit;
mod devices;
pub mod election;
pub mod flows;
mod length;
pub mod merging;
pub mod neighbours;
mod query;
pub mod responder;
pub mod rules;
mod successor;
pub mod translate;

pub use admit::{Inbound, Origin, Outbound};
pub use devices::{Device, DeviceId, SideStats};

use flows::Flows;
use merging::Merging;
use rules::Rule;
use seikan_observe::DirectionCounters;
use seikan_wire::ethernet::Mac;
use std::collections::HashMap;
use std::net::IpAddr;

/// Configuration of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Display name.
    pub name: String,
    /// Its MAC address. With it, the device keeps its identity when its address changes. Without
    /// it, the device is whoever has the address.
    pub mac: Option<Mac>,
    /// The VLAN it is in; `None` is untagged.
    pub vlan: Option<u16>,
    /// Its addresses on the local network, at most one of each family. A missing family is learned
    /// from the device's packets.
    pub lan: Vec<IpAddr>,
    /// Its addresses in the overlay, at most one of each family. In a missing family it has the
    /// same address as on the local network, or one that is [`allocated`](GatewayConfig::allocates).
    pub overlay: Vec<IpAddr>,
    /// Rules for remotes that may reach it; everybody if empty.
    pub allow_from: Vec<Rule>,
    /// Rules for remotes that it may reach; everybody if empty.
    pub allow_to: Vec<Rule>,
}

/// A remote that devices reach by an address of their own network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its address in the overlay.
    pub overlay: IpAddr,
    /// Its address on the local network.
    pub lan: IpAddr,
}

/// Configuration of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayConfig {
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// Remotes that appear on the local network under another address.
    pub remotes: Vec<Remote>,
    /// Whether a device without configured overlay addresses has none until
    /// [`Gateway::set_overlay`].
    pub allocates: bool,
    /// Overlay addresses of the gateway's own host. Its packets pass, and remotes reach it only at
    /// these addresses.
    pub own: Vec<IpAddr>,
    /// Whether the gateway acts as a hop: it lowers hop limits, and fragments packets that are too
    /// long or returns an error. If the kernel forwards, the kernel does all that.
    pub is_hop: bool,
    /// MTUs of the interfaces.
    pub mtu: Mtus,
}

/// MTUs in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtus {
    /// MTU of the local network in bytes.
    pub lan: u32,
    /// MTU of the tunnel in bytes.
    pub tunnel: u32,
}

impl Default for Mtus {
    /// Returns MTUs that limit nothing but what IP limits itself.
    fn default() -> Self {
        Mtus {
            lan: 65_535,
            tunnel: 65_535,
        }
    }
}

/// A packet created by the gateway: an ICMP error or a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Made {
    /// For a device, with addresses of the local network.
    ToDevice(DeviceId, Vec<u8>),
    /// For the tunnel, with addresses of the overlay.
    ToTunnel(Vec<u8>),
}

/// The devices, their rules and their state.
#[derive(Debug)]
pub struct Gateway {
    devices: Vec<Device>,
    /// Devices by VLAN and address on the local network.
    by_lan: HashMap<(Option<u16>, IpAddr), DeviceId>,
    by_overlay: HashMap<IpAddr, DeviceId>,
    by_mac: HashMap<(Option<u16>, Mac), DeviceId>,
    /// Overlay addresses of remotes, by the address on the local network.
    shown: HashMap<IpAddr, IpAddr>,
    /// The inverse of `shown`.
    shown_as: HashMap<IpAddr, IpAddr>,
    allocates: bool,
    own: Vec<IpAddr>,
    is_hop: bool,
    mtu: Mtus,
    made: Vec<Made>,
    flows: Flows,
    fragments: query::Fragments,
    /// Detects whether the local network loses super-packets.
    merging: Merging,
    /// Packets from the local network that belong to no device.
    unattributed: DirectionCounters,
    /// Packets from the tunnel for neither a device nor the host.
    refused: DirectionCounters,
}

impl Gateway {
    /// Creates a gateway. If two devices claim the same address, the first has it; the
    /// configuration check reports this.
    pub fn new(config: GatewayConfig) -> Gateway {
        let mut gateway = Gateway {
            devices: Vec::new(),
            by_lan: HashMap::new(),
            by_overlay: HashMap::new(),
            by_mac: HashMap::new(),
            shown: config.remotes.iter().map(|r| (r.lan, r.overlay)).collect(),
            shown_as: config.remotes.iter().map(|r| (r.overlay, r.lan)).collect(),
            allocates: config.allocates,
            own: config.own,
            is_hop: config.is_hop,
            mtu: config.mtu,
            made: Vec::new(),
            flows: Flows::default(),
            fragments: query::Fragments::default(),
            merging: Merging::default(),
            unattributed: DirectionCounters::default(),
            refused: DirectionCounters::default(),
        };
        for device in config.devices {
            let id = DeviceId(gateway.devices.len() as u32);
            let device = Device::new(device, config.allocates);
            let vlan = device.config.vlan;
            for address in device.lan.iter().flatten() {
                gateway.by_lan.entry((vlan, *address)).or_insert(id);
            }
            for address in device.overlay.iter().flatten() {
                gateway.by_overlay.entry(*address).or_insert(id);
            }
            if let Some(mac) = device.config.mac {
                gateway.by_mac.entry((vlan, mac)).or_insert(id);
            }
            gateway.devices.push(device);
        }
        gateway
    }

    /// Sets the MTUs after a change.
    pub fn set_mtu(&mut self, mtu: Mtus) {
        self.mtu = mtu;
    }

    /// Sets the addresses of the tunnel's interface after a change.
    pub fn set_own(&mut self, own: Vec<IpAddr>) {
        self.own = own;
    }

    /// Sets the overlay addresses of a device, at most one of each family. An address of another
    /// device stays that device's.
    pub fn set_overlay(&mut self, id: DeviceId, addresses: &[IpAddr]) {
        let Some(device) = self.devices.get_mut(id.0 as usize) else {
            return;
        };
        device.overlay = devices::pair(addresses);
        self.by_overlay.retain(|_, owner| *owner != id);
        for address in device.overlay.iter().flatten() {
            self.by_overlay.entry(*address).or_insert(id);
        }
    }

    /// Whether a device waits for overlay addresses.
    pub fn is_pending(&self, id: DeviceId) -> bool {
        let device = self.device(id).filter(|_| self.allocates);
        device.is_some_and(|device| device.overlay == [None; 2])
    }

    /// MTUs of the interfaces.
    pub fn mtu(&self) -> Mtus {
        self.mtu
    }

    /// Takes the packets that the gateway has created.
    pub fn take_made(&mut self) -> Vec<Made> {
        std::mem::take(&mut self.made)
    }

    /// All devices, in the order of the configuration.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, &Device)> {
        (0..).map(DeviceId).zip(&self.devices)
    }

    /// Returns a device.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(id.0 as usize)
    }

    /// The device with this MAC address.
    pub fn device_by_mac(&self, vlan: Option<u16>, mac: Mac) -> Option<DeviceId> {
        self.by_mac.get(&(vlan, mac)).copied()
    }

    /// The device with this address on the local network.
    pub fn device_by_lan(&self, vlan: Option<u16>, address: IpAddr) -> Option<DeviceId> {
        self.by_lan.get(&(vlan, address)).copied()
    }

    /// Addresses of remotes on the local network.
    pub fn shown(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.shown.keys().copied()
    }

    /// Whether a remote has this address on the local network.
    pub fn is_shown(&self, address: IpAddr) -> bool {
        self.shown.contains_key(&address)
    }

    /// Counts of packets from the local network that belong to no device.
    pub fn unattributed(&self) -> &DirectionCounters {
        &self.unattributed
    }

    /// Counts dropped packets of the local network that belong to no device.
    pub fn drop_unattributed(&mut self, reason: seikan_observe::DropReason, packets: u64) {
        self.unattributed.packets_in += packets;
        self.unattributed.drops.add(reason, packets);
    }

    /// Counts of packets from the tunnel for neither a device nor the host.
    pub fn refused(&self) -> &DirectionCounters {
        &self.refused
    }

    /// Detects whether the local network loses super-packets.
    pub fn merging(&self) -> &Merging {
        &self.merging
    }

    /// The flows of the devices.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }
}

#[cfg(test)]
mod tests;
