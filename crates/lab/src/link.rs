//! Two hosts and the link between them.
//!
//! A host is a network namespace without a name: it ends with the last descriptor and process that holds it. The
//! link is a veth pair, a [`Wire`] that can have faults, or a host in the middle: a bridge, a virtual switch, a gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;
use std::process::{Child, Command};

use ipnet::IpNet;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use seikan_sys::ethtool::{Ethtool, Feature};
use seikan_sys::netlink::{AddressOptions, Netlink};
use seikan_sys::netns::NetNs;

use crate::error::{LabError, Result};
use crate::load::Ends;
use crate::wire::{Wire, WireFaults};

/// Length of the prefix of the hosts' IPv4 networks.
const PREFIX4: u8 = 24;
/// Length of the prefix of the hosts' IPv6 networks.
const PREFIX6: u8 = 64;

/// What the link is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LinkKind {
    /// A veth pair: the kernel's own, without faults.
    #[default]
    Veth,
    /// A program between two TAP devices, which does this to frames.
    Wire(WireFaults),
    /// A veth pair to each end from a host in the middle, whose two ports nothing joins yet.
    Middle,
}

/// The ports of a host in the middle, to A and to B.
pub const PORTS: [&str; 2] = ["portA", "portB"];

/// Times that a card is not asked again at once when it had nothing, in [`Host::moderate`]: for ever, nearly.
const DEFERRED: u32 = 1_000_000;

/// Properties of the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// What it is made of.
    pub kind: LinkKind,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
    /// Whether the ends keep segmentation, receive and checksum offload. A veth with all of them hands 64 KiB
    /// packets over by reference, which flatters everyone; without them it is nearer to a plain network card.
    pub offload: bool,
    /// Microseconds for which both ends wait for more packets before they hand them on, as the interrupt moderation of
    /// a network card does; 0: not at all.
    pub moderation: u32,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            kind: LinkKind::Veth,
            mtu: 1500,
            offload: true,
            moderation: 0,
        }
    }
}

impl Link {
    /// A link with these faults, else as by default.
    #[must_use]
    pub fn with_faults(faults: WireFaults) -> Self {
        Self {
            kind: LinkKind::Wire(faults),
            ..Self::default()
        }
    }
}

/// A host: a network namespace with one interface on the link.
#[derive(Debug)]
pub struct Host {
    /// `A` or `B`, or `M` in the middle.
    pub name: &'static str,
    /// Name of the interface on the link.
    pub device: String,
    /// Address on the link (IPv4).
    pub address: IpAddr,
    /// Address on the link (IPv6).
    pub address6: IpAddr,
    /// Address inside a tunnel (IPv4), for tunnels to configure.
    pub inner: IpAddr,
    /// Address inside a tunnel (IPv6).
    pub inner6: IpAddr,
    /// Networks that a tunnel reaches through this host, beside its own address inside.
    pub behind: Vec<IpNet>,
    netns: NetNs,
}

impl Host {
    /// A host without an interface but loopback. `number` makes its addresses.
    ///
    /// # Errors
    /// When the kernel refuses a namespace.
    pub fn create(name: &'static str, number: u8) -> Result<Self> {
        let netns = NetNs::create().map_err(|e| LabError::Setup(e.to_string()))?;
        let v6 = |net: u16| IpAddr::V6(Ipv6Addr::new(net, 0, 0, 0, 0, 0, 0, u16::from(number)));
        Ok(Self {
            name,
            device: format!("link{name}"),
            address: Ipv4Addr::new(10, 77, 0, number).into(),
            address6: v6(0xfd77),
            inner: Ipv4Addr::new(10, 78, 0, number).into(),
            inner6: v6(0xfd78),
            behind: Vec::new(),
            netns,
        })
    }

    /// Runs `work` in a thread inside the host; sockets opened there belong to the host for good.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns
            .run(work)
            .map_err(|e| LabError::Setup(e.to_string()))
    }

    /// Starts a program inside the host. The kernel kills it when this process ends.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(&self, command: &mut Command) -> std::io::Result<Child> {
        self.netns.spawn_command(command)
    }

    /// The namespace, for what this type does not offer.
    #[must_use]
    pub fn netns(&self) -> &NetNs {
        &self.netns
    }

    /// A netlink socket inside the host.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn netlink(&self) -> Result<Netlink> {
        self.netns
            .netlink()
            .map_err(|e| LabError::Setup(e.to_string()))
    }

    /// Gives `device` the host's tunnel addresses and an MTU, and sets it up.
    ///
    /// # Errors
    /// When there is no such device or the kernel refuses.
    pub fn configure_tunnel(&self, device: &str, mtu: u32) -> Result<()> {
        self.configure(device, mtu, self.inner, self.inner6)
    }

    /// Gives `device` an MTU and an address of each family, and sets it up.
    pub(crate) fn configure(&self, device: &str, mtu: u32, v4: IpAddr, v6: IpAddr) -> Result<()> {
        let netlink = self.netlink()?;
        let refuse = |e: seikan_sys::netlink::NetlinkError| {
            LabError::Setup(format!("host {}: {e}", self.name))
        };
        let index = netlink.link(device).map_err(refuse)?.index;
        netlink.set_mtu(index, mtu).map_err(refuse)?;
        netlink
            .add_address(index, net(v4, PREFIX4)?)
            .map_err(refuse)?;
        // A kernel booted with ipv6.disable=1 has no IPv6; nothing here depends on it unless asked for.
        let options = AddressOptions {
            no_dad: true,
            ..AddressOptions::default()
        };
        if let Err(error) = netlink.add_address_with(index, net(v6, PREFIX6)?, options)
            && std::path::Path::new("/proc/sys/net/ipv6").exists()
        {
            return Err(refuse(error));
        }
        netlink.set_up(index).map_err(refuse)
    }

    /// Has the host's TCP use this congestion control unless a program asks for another, as
    /// `sysctl net.ipv4.tcp_congestion_control=NAME` does.
    ///
    /// # Errors
    /// When the kernel does not have it.
    pub fn set_congestion_control(&self, name: &str) -> Result<()> {
        // Shows the namespace of the thread that opens it.
        const FILE: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
        self.run(|| std::fs::write(FILE, name))?
            .map_err(LabError::io(format!("write {name} to {FILE}")))
    }

    /// Takes segmentation, receive and transmit checksum offload away from the interface on the link, or gives them
    /// back; as `ethtool -K DEVICE tso off gso off gro off tx off` does.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_offload(&self, on: bool) -> Result<()> {
        // TSO depends on transmit checksums: last to go, first to come back.
        let mut features = [
            Feature::Tso,
            Feature::Gso,
            Feature::Gro,
            Feature::TxChecksum,
        ];
        if on {
            features.reverse();
        }
        let features = features.map(|feature| (feature, on));
        self.set_features(&self.device, &features)
    }

    /// Switches offloads of `device` on or off, one after the other.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn set_features(&self, device: &str, features: &[(Feature, bool)]) -> Result<()> {
        let ethtool = self
            .run(Ethtool::open)?
            .map_err(LabError::io("open a socket for offload settings"))?;
        features
            .iter()
            .try_for_each(|(feature, on)| ethtool.set_feature(device, *feature, *on))
            .map_err(|e| LabError::Setup(format!("host {}: {e}", self.name)))
    }

    /// Has the interface on the link look for received packets every so many microseconds only.
    fn moderate(&self, microseconds: u32) -> Result<()> {
        // A veth polls with receive offload only, and if who sends does not leave cutting to it.
        let features = [(Feature::Gro, true), (Feature::Tso, false)];
        self.set_features(&self.device, &features)?;
        for (name, value) in [
            ("gro_flush_timeout", u64::from(microseconds) * 1_000),
            ("napi_defer_hard_irqs", u64::from(DEFERRED)),
        ] {
            self.set_attribute(&format!("{}/{name}", self.device), &value.to_string())?;
        }
        Ok(())
    }

    /// Writes a file below `/sys/class/net`; returns what it held. Sysfs shows the network namespace of whoever mounted
    /// it: so the thread that writes mounts its own, in a mount namespace that ends with it.
    ///
    /// # Errors
    /// When there is no such file or the kernel refuses.
    pub fn set_attribute(&self, path: &str, value: &str) -> Result<String> {
        let file = format!("/sys/class/net/{path}");
        self.run(|| {
            let none: Option<&str> = None;
            unshare(CloneFlags::CLONE_NEWNS)?;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none)?;
            let before = std::fs::read_to_string(&file)?;
            std::fs::write(&file, value)?;
            Ok(before)
        })?
        .map_err(LabError::io(format!(
            "write {value} to {file} of host {}",
            self.name
        )))
    }
}

fn net(address: IpAddr, prefix: u8) -> Result<IpNet> {
    IpNet::new(address, prefix).map_err(|e| LabError::Setup(format!("{address}/{prefix}: {e}")))
}

/// A pair of interfaces, one in each host.
pub(crate) fn veth(one: &Host, name: &str, other: &Host, peer: &str) -> Result<()> {
    let there = other.netns().as_fd();
    let made = one.netlink()?.create_veth(name, peer, Some(there));
    made.map(drop).map_err(|e| LabError::Setup(e.to_string()))
}

/// A host with a veth pair to A and to B; its ports are up.
fn host_between(a: &Host, b: &Host, mtu: u32) -> Result<Host> {
    let refuse = |e: seikan_sys::netlink::NetlinkError| LabError::Setup(e.to_string());
    let mut middle = Host::create("M", 3)?;
    middle.device = PORTS[1].to_owned();
    let netlink = middle.netlink()?;
    for (port, end) in PORTS.into_iter().zip([a, b]) {
        veth(&middle, port, end, &end.device)?;
        let index = netlink.link(port).map_err(refuse)?.index;
        netlink.set_mtu(index, mtu).map_err(refuse)?;
        netlink.set_up(index).map_err(refuse)?;
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
    /// What carries frames between them, of [`LinkKind::Wire`].
    pub wire: Option<Wire>,
    /// The host in the middle, of [`LinkKind::Middle`]. It has no addresses; its interface on the link is the port to B.
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
            LinkKind::Veth => veth(&a, &a.device, &b, &b.device)?,
            LinkKind::Wire(faults) => wire = Some(Wire::between(&a, &b, faults)?),
            LinkKind::Middle => middle = Some(host_between(&a, &b, link.mtu)?),
        }
        for host in [&a, &b] {
            host.configure(&host.device, link.mtu, host.address, host.address6)?;
            if !link.offload {
                host.set_offload(false)?;
            }
            if link.moderation > 0 {
                host.moderate(link.moderation)?;
            }
        }
        Ok(Self {
            a,
            b,
            link,
            wire,
            middle,
        })
    }

    /// Load from A to B over the link itself.
    #[must_use]
    pub fn over_link(&self) -> Ends<'_> {
        Ends {
            client: &self.a,
            server: &self.b,
            target: self.b.address,
            sources: &[],
        }
    }

    /// Load from A to B through a tunnel.
    #[must_use]
    pub fn through_tunnel(&self) -> Ends<'_> {
        Ends {
            client: &self.a,
            server: &self.b,
            target: self.b.inner,
            sources: &[],
        }
    }
}
