//! The gateway: devices on which nothing can be installed take part in the overlay.
//!
//! A [`Gateway`] is a stage between the local network and the tunnel, without I/O:
//!
//! 1. its driver hands every packet of the local network to [`Gateway::outbound`] before
//!    [`Tunnel::outbound`](crate::tunnel::Tunnel::outbound), and passes on what it lets through;
//! 2. it hands every write that the tunnel left in its inbox to [`Gateway::inbound`], which says
//!    whether it goes to the host, to a device, or nowhere.
//!
//! Super-packets go through whole, either way: addresses are exchanged in their one header. In this
//! order: whose packet is it (`devices`), is it allowed ([`rules`] on what `query` finds, and answers to what is
//! allowed: [`flows`]), what does it tell of the two legs ([`flows`]), then [`translate`].
//! In transparent mode [`responder`] speaks for the gateway on the local network.

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

/// What the gateway is told of one device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceConfig {
    /// A name for people.
    pub name: String,
    /// Its card. With it the device is who it is wherever its address moves; without it, who has the
    /// address.
    pub mac: Option<Mac>,
    /// The VLAN it is in; `None` is untagged.
    pub vlan: Option<u16>,
    /// Its addresses on the local network, at most one of each family. A family that is not given
    /// is learned from what the card sends.
    pub lan: Vec<IpAddr>,
    /// Its addresses in the overlay, at most one of each family; in a family that is not given it
    /// has the same as on the local network.
    pub overlay: Vec<IpAddr>,
    /// Who may reach it; empty: anybody.
    pub allow_from: Vec<Rule>,
    /// Whom it may reach; empty: anybody.
    pub allow_to: Vec<Rule>,
}

/// An address of the overlay that devices know by an address of their own network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// In the overlay.
    pub overlay: IpAddr,
    /// On the local network.
    pub lan: IpAddr,
}

/// What a gateway is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayConfig {
    /// The devices.
    pub devices: Vec<DeviceConfig>,
    /// Remote addresses that are shown on the local network under others.
    pub remotes: Vec<Remote>,
    /// The overlay addresses of the gateway's own host: its packets pass, and by these alone a remote reaches it.
    pub own: Vec<IpAddr>,
    /// The gateway is a hop by itself, which lowers hop limits, cuts what is too long or says so to
    /// its sender. Where the kernel forwards, it does all that.
    pub is_hop: bool,
    /// What the interfaces carry.
    pub mtu: Mtus,
}

/// The longest packets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtus {
    /// On the local network.
    pub lan: u32,
    /// In the tunnel.
    pub tunnel: u32,
}

impl Default for Mtus {
    /// No limit but that of IP.
    fn default() -> Self {
        Mtus {
            lan: 65_535,
            tunnel: 65_535,
        }
    }
}

/// A packet that the gateway made: an ICMP error, or a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Made {
    /// For the device, with addresses of the local network.
    ToDevice(DeviceId, Vec<u8>),
    /// For the tunnel, with addresses of the overlay.
    ToTunnel(Vec<u8>),
}

/// The devices, their rights and what is known of them.
#[derive(Debug)]
pub struct Gateway {
    devices: Vec<Device>,
    /// By VLAN and address on the local network.
    by_lan: HashMap<(Option<u16>, IpAddr), DeviceId>,
    by_overlay: HashMap<IpAddr, DeviceId>,
    by_mac: HashMap<(Option<u16>, Mac), DeviceId>,
    /// Remote addresses: as shown on the local network, and as they are.
    shown: HashMap<IpAddr, IpAddr>,
    /// The other way round.
    shown_as: HashMap<IpAddr, IpAddr>,
    own: Vec<IpAddr>,
    is_hop: bool,
    mtu: Mtus,
    made: Vec<Made>,
    flows: Flows,
    fragments: query::Fragments,
    /// What becomes of super-packets on the local network.
    merging: Merging,
    /// From the local network, of no device.
    unattributed: DirectionCounters,
    /// From the tunnel, neither for a device nor for the host.
    refused: DirectionCounters,
}

impl Gateway {
    /// A gateway for these devices. Of two devices that claim one address the first has it: that
    /// is an error of the configuration, found there.
    pub fn new(config: GatewayConfig) -> Gateway {
        let mut gateway = Gateway {
            devices: Vec::new(),
            by_lan: HashMap::new(),
            by_overlay: HashMap::new(),
            by_mac: HashMap::new(),
            shown: config.remotes.iter().map(|r| (r.lan, r.overlay)).collect(),
            shown_as: config.remotes.iter().map(|r| (r.overlay, r.lan)).collect(),
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
            let device = Device::new(device);
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

    /// Tells what the interfaces carry after it changed.
    pub fn set_mtu(&mut self, mtu: Mtus) {
        self.mtu = mtu;
    }

    /// Tells which addresses the tunnel's interface has after that changed.
    pub fn set_own(&mut self, own: Vec<IpAddr>) {
        self.own = own;
    }

    /// What the interfaces carry.
    pub fn mtu(&self) -> Mtus {
        self.mtu
    }

    /// What the gateway has to say or cut since this was asked last.
    pub fn take_made(&mut self) -> Vec<Made> {
        std::mem::take(&mut self.made)
    }

    /// All devices, in the order of the configuration.
    pub fn devices(&self) -> impl Iterator<Item = (DeviceId, &Device)> {
        (0..).map(DeviceId).zip(&self.devices)
    }

    /// One device.
    pub fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(id.0 as usize)
    }

    /// The device that has this card.
    pub fn device_by_mac(&self, vlan: Option<u16>, mac: Mac) -> Option<DeviceId> {
        self.by_mac.get(&(vlan, mac)).copied()
    }

    /// The device that has this address on the local network.
    pub fn device_by_lan(&self, vlan: Option<u16>, address: IpAddr) -> Option<DeviceId> {
        self.by_lan.get(&(vlan, address)).copied()
    }

    /// Remote addresses as the local network sees them.
    pub fn shown(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.shown.keys().copied()
    }

    /// Whether the local network sees a remote under this address.
    pub fn is_shown(&self, address: IpAddr) -> bool {
        self.shown.contains_key(&address)
    }

    /// What came from the local network and is of no device: in, and dropped.
    pub fn unattributed(&self) -> &DirectionCounters {
        &self.unattributed
    }

    /// Counts something of the local network that is of no device.
    pub fn drop_unattributed(&mut self, reason: seikan_observe::DropReason, packets: u64) {
        self.unattributed.packets_in += packets;
        self.unattributed.drops.add(reason, packets);
    }

    /// Packets from the tunnel that were neither for a device nor for the host: in, and dropped.
    pub fn refused(&self) -> &DirectionCounters {
        &self.refused
    }

    /// What becomes of super-packets on the local network.
    pub fn merging(&self) -> &Merging {
        &self.merging
    }

    /// Flows that are known.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }
}

#[cfg(test)]
mod tests;
