//! Two hosts and the link between them.
//!
//! The link is a veth pair, a [`Wire`] that can have faults, or a host in the middle: a bridge, a
//! virtual switch, a gateway.

use std::net::IpAddr;

use seikan_load::Ends;

use crate::error::{LabError, Result};
use crate::host::{Congestion, Host, OFFLOADS, cable};
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

/// Properties of the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Implementation.
    pub kind: LinkKind,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
    /// Whether the ends keep segmentation, receive and checksum offload. A veth with all of them
    /// hands 64 KiB packets over by reference, which flatters everyone; without them it is nearer
    /// to a plain network card.
    pub offload: bool,
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
            offload: true,
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
}

/// Gives a NIC addresses and the properties of a link, and sets it up.
pub(crate) fn attach(host: &Host, device: &str, addresses: &[IpAddr], link: &Link) -> Result<()> {
    host.configure(device, link.mtu, addresses)?;
    if !link.offload {
        host.set_features(device, &OFFLOADS.map(|feature| (feature, false)))?;
    }
    if link.moderation > 0 {
        host.moderate(device, link.moderation)?;
    }
    if let Some(rate) = link.rate {
        host.limit(device, rate)?;
    }
    host.set_congestion_control(link.congestion)
}

/// A host with a veth pair to A and to B; its ports are up.
fn host_between(a: &Host, b: &Host, mtu: u32) -> Result<Host> {
    let mut middle = Host::create("M", 3)?;
    middle.device = PORTS[1].to_owned();
    for (port, end) in PORTS.into_iter().zip([a, b]) {
        cable(&middle, port, end, &end.device)?;
        middle.configure(port, mtu, &[])?;
    }
    Ok(middle)
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
        let (mut wire, mut middle) = (None, None);
        match link.kind {
            LinkKind::Veth => cable(&a, &a.device, &b, &b.device)?,
            LinkKind::Wire(faults) => wire = Some(Wire::between(&a, &b, faults)?),
            LinkKind::Middle => middle = Some(host_between(&a, &b, link.mtu)?),
        }
        for host in [&a, &b] {
            attach(host, &host.device, &[host.address, host.address6], &link)?;
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
