//! Links: their properties, the NICs at their ends, and two hosts that one joins.
//!
//! A link is a veth pair, a [`Wire`] that can have faults, or a host in the middle: a bridge, a virtual
//! switch, a gateway.

use std::net::IpAddr;
use std::os::fd::AsFd;

use seikan_load::Ends;
use seikan_sys::ethtool::Feature;

use super::host::{Congestion, Host};
use crate::error::{LabError, Result};
use crate::wire::{Wire, WireFaults};

/// Implementation of a link.
#[expect(
    clippy::large_enum_variant,
    reason = "a run has one or two, and they are copied"
)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LinkKind {
    /// A veth pair: the kernel's own, without faults.
    #[default]
    Veth,
    /// A program between two TAP devices, which does this to frames.
    Wire(WireFaults),
    /// A veth pair to each end from a host in the middle, whose two ports are not connected yet.
    Middle,
}

/// The ports of a host in the middle, to A and to B.
pub const PORTS: [&str; 2] = ["portA", "portB"];

/// A NIC without segmentation, receive and transmit checksum offload, in the order in which they go:
/// segmentation depends on transmit checksums.
pub const NO_OFFLOAD: [(Feature, bool); 4] = [
    (Feature::Tso, false),
    (Feature::Gso, false),
    (Feature::Gro, false),
    (Feature::TxChecksum, false),
];
/// As a physical NIC: no packet above the MTU crosses the link, and checksums are complete. The kernel's own
/// segmentation (GSO) stays: it is what cuts.
pub const PLAIN_NIC: [(Feature, bool); 2] = [(Feature::Tso, false), (Feature::TxChecksum, false)];

/// Properties of the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Implementation.
    pub kind: LinkKind,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
    /// Offloads of the ends that are switched on or off. A veth with all of them hands 64 KiB packets
    /// over by reference, which flatters everyone; without them it is nearer to a plain network card.
    pub features: &'static [(Feature, bool)],
    /// Microseconds for which both ends wait for more packets before they hand them on, as the
    /// interrupt moderation of a network card does; 0: not at all.
    pub moderation: u32,
    /// Rate of both ends' NICs in bit/s; `None`: as fast as the processors are.
    pub rate: Option<u64>,
    /// Congestion control of both ends, whatever this machine's default is.
    pub congestion: Congestion,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            kind: LinkKind::Veth,
            mtu: 1500,
            features: &[],
            moderation: 0,
            rate: None,
            congestion: Congestion::default(),
        }
    }
}

impl Link {
    /// A link with these faults, else as by default.
    pub fn with_faults(faults: WireFaults) -> Self {
        Self {
            kind: LinkKind::Wire(faults),
            ..Self::default()
        }
    }

    /// The same link with the offloads of a veth, or without.
    pub(crate) fn offload(self, on: bool) -> Self {
        Self {
            features: if on { &[] } else { &NO_OFFLOAD },
            ..self
        }
    }
}

/// A NIC at the end of a link. Without addresses, it is a port that only passes packets on.
#[derive(Clone, Copy)]
pub(crate) struct Nic<'a> {
    host: &'a Host,
    device: &'a str,
    addresses: &'a [IpAddr],
}

impl Host {
    /// A NIC for [`join`], and its addresses.
    pub(crate) fn nic<'a>(&'a self, device: &'a str, addresses: &'a [IpAddr]) -> Nic<'a> {
        Nic {
            host: self,
            device,
            addresses,
        }
    }

    /// Makes a NIC of another host whose link ends at a new port of a bridge.
    pub(crate) fn plug(
        &self,
        bridge: &str,
        port: &str,
        nic: Nic<'_>,
        link: &Link,
    ) -> Result<Option<Wire>> {
        let wire = join([self.nic(port, &[]), nic], link)?;
        self.add_port(bridge, port)?;
        Ok(wire)
    }
}

/// Makes two NICs with a link between them, and sets them up: with the properties of the link, or a port with
/// its MTU only. Returns the carrier of an emulated link.
pub(crate) fn join(nics: [Nic<'_>; 2], link: &Link) -> Result<Option<Wire>> {
    let [near, far] = nics;
    let there = far.host.netns();
    let wire = match link.kind {
        LinkKind::Wire(faults) => {
            let ends = [(near.host.netns(), near.device), (there, far.device)];
            Some(Wire::between(ends, faults)?)
        }
        LinkKind::Veth | LinkKind::Middle => {
            let netlink = near.host.netlink()?;
            netlink.create_veth(near.device, far.device, Some(there.as_fd()))?;
            None
        }
    };
    for Nic {
        host,
        device,
        addresses,
    } in nics
    {
        host.configure(device, link.mtu, addresses)?;
        if addresses.is_empty() {
            continue;
        }
        host.set_features(device, link.features)?;
        if link.moderation > 0 {
            host.moderate(device, link.moderation)?;
        }
        if let Some(rate) = link.rate {
            host.limit(device, rate)?;
        }
        host.set_congestion_control(link.congestion)?;
    }
    Ok(wire)
}

/// Host A and host B, joined by a link.
#[derive(Debug)]
pub struct Hosts {
    /// The client side: 10.77.0.1, inside a tunnel 10.78.0.1.
    pub a: Host,
    /// The server side: 10.77.0.2, inside a tunnel 10.78.0.2.
    pub b: Host,
    /// How they are joined.
    pub link: Link,
    /// Carrier of frames between the hosts, with [`LinkKind::Wire`].
    pub wire: Option<Wire>,
    /// The host in the middle, of [`LinkKind::Middle`]. It has no addresses; its interface on the
    /// link is the port to B.
    pub middle: Option<Host>,
}

impl Hosts {
    /// Makes the hosts and the link.
    ///
    /// # Errors
    /// No privilege to make namespaces, or anything else the kernel refuses.
    pub fn create(link: Link) -> Result<Self> {
        let (a, b) = (Host::create("A", 1)?, Host::create("B", 2)?);
        let addresses = [&a, &b].map(Host::addresses);
        let nics = [
            a.nic(&a.device, &addresses[0]),
            b.nic(&b.device, &addresses[1]),
        ];
        let (mut wire, mut middle) = (None, None);
        if link.kind == LinkKind::Middle {
            let mut host = Host::create("M", 3)?;
            PORTS[1].clone_into(&mut host.device);
            for (port, nic) in PORTS.into_iter().zip(nics) {
                join([host.nic(port, &[]), nic], &link)?;
            }
            middle = Some(host);
        } else {
            wire = join(nics, &link)?;
        }
        Ok(Self {
            a,
            b,
            link,
            wire,
            middle,
        })
    }

    /// A and B.
    pub fn both(&self) -> [&Host; 2] {
        [&self.a, &self.b]
    }

    /// The host in the middle.
    ///
    /// # Errors
    /// There is none, which is a bug.
    pub fn middle(&self) -> Result<&Host> {
        let none = || LabError::Setup("there is no host in the middle: this is a bug".into());
        self.middle.as_ref().ok_or_else(none)
    }

    /// Load from A to B over the link itself.
    pub fn over_link(&self) -> Ends<'_> {
        self.a.to(&self.b, self.b.address)
    }

    /// Load from A to B through a tunnel.
    pub fn through_tunnel(&self) -> Ends<'_> {
        self.a.to(&self.b, self.b.inner)
    }
}
