//! Links: their properties, the NICs at their ends, and two hosts joined by a link.
//!
//! A link is a veth pair, a [`Wire`] that can have faults, or a host in the middle, such as a
//! bridge, a virtual switch or a gateway.

use std::net::IpAddr;
use std::os::fd::AsFd;

use seikan_load::Ends;
use seikan_sys::ethtool::Feature;

use super::host::{Congestion, Host};
use crate::error::{Result, setup};
use crate::wire::{Wire, WireFaults};

/// Implementation of a link.
#[expect(
    clippy::large_enum_variant,
    reason = "a run has one or two, and they are copied"
)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LinkKind {
    /// A veth pair of the kernel, without faults.
    #[default]
    Veth,
    /// A program between two TAP devices, which applies these faults to frames.
    Wire(WireFaults),
    /// Two veth pairs, from a host in the middle to each end. The two ports of that host are not
    /// connected yet.
    Middle,
}

/// Names of the ports of a host in the middle, to A and to B.
pub const PORTS: [&str; 2] = ["portA", "portB"];

/// Disables segmentation, receive and transmit checksum offload of a NIC. The order matters:
/// segmentation depends on transmit checksums.
pub const NO_OFFLOAD: [(Feature, bool); 4] = [
    (Feature::Tso, false),
    (Feature::Gso, false),
    (Feature::Gro, false),
    (Feature::TxChecksum, false),
];
/// Makes a NIC behave like a physical one: no packet above the MTU crosses the link, and checksums
/// are complete. The kernel's software segmentation (GSO) stays on, because it splits
/// super-packets.
pub const PLAIN_NIC: [(Feature, bool); 2] = [(Feature::Tso, false), (Feature::TxChecksum, false)];

/// Properties of the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Implementation of the link.
    pub kind: LinkKind,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
    /// Offloads of both ends to switch on or off. A veth with all offloads passes packets of 64 KiB
    /// by reference, which makes every tunnel look faster; without them it is closer to a plain
    /// NIC.
    pub features: &'static [(Feature, bool)],
    /// Time in microseconds for which both ends wait for more packets before they pass them on,
    /// like the interrupt moderation of a NIC; 0: none.
    pub moderation: u32,
    /// Rate of both ends' NICs in bit/s; `None`: limited only by the processors.
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
    /// Returns an emulated link with these faults, and the default properties otherwise.
    pub fn with_faults(faults: WireFaults) -> Self {
        Self {
            kind: LinkKind::Wire(faults),
            ..Self::default()
        }
    }

    /// Returns the same link with all offloads of a veth, or with none.
    pub(crate) fn offload(self, on: bool) -> Self {
        Self {
            features: if on { &[] } else { &NO_OFFLOAD },
            ..self
        }
    }
}

/// A NIC at the end of a link. Without addresses it is a bridge port that only forwards.
#[derive(Clone, Copy)]
pub(crate) struct Nic<'a> {
    host: &'a Host,
    device: &'a str,
    addresses: &'a [IpAddr],
}

impl Host {
    /// Returns a NIC of this host with these addresses, for [`join`].
    pub(crate) fn nic<'a>(&'a self, device: &'a str, addresses: &'a [IpAddr]) -> Nic<'a> {
        Nic {
            host: self,
            device,
            addresses,
        }
    }

    /// Creates `nic`, which belongs to another host, and links it to a new port of this host's
    /// bridge.
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

/// Creates two NICs with a link between them, and sets them up. A NIC with addresses gets all
/// properties of the link, a port only its MTU. Returns the carrier of an emulated link; `None` for
/// a veth pair.
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
    /// The link that joins the hosts.
    pub link: Link,
    /// Carrier of frames between the hosts, with [`LinkKind::Wire`].
    pub wire: Option<Wire>,
    /// The host in the middle, with [`LinkKind::Middle`]. It has no addresses; its `device` is the
    /// port to B.
    pub middle: Option<Host>,
}

impl Hosts {
    /// Makes the hosts and the link.
    ///
    /// # Errors
    /// The privilege to create namespaces is missing, or the kernel refuses an operation.
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

    /// Returns host A and host B.
    pub fn both(&self) -> [&Host; 2] {
        [&self.a, &self.b]
    }

    /// Returns the host in the middle.
    ///
    /// # Errors
    /// There is none, which is a bug.
    pub fn middle(&self) -> Result<&Host> {
        let none = || setup("there is no host in the middle: this is a bug");
        self.middle.as_ref().ok_or_else(none)
    }

    /// Returns the ends of a load from A to B over the link itself.
    pub fn over_link(&self) -> Ends<'_> {
        self.a.to(&self.b, self.b.address)
    }

    /// Returns the ends of a load from A to B through a tunnel.
    pub fn through_tunnel(&self) -> Ends<'_> {
        self.a.to(&self.b, self.b.inner)
    }
}
