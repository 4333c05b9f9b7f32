//! A site: a device without Seikan, its gateway, and a remote host behind the gateway's other NIC.
//!
//! ```text
//! device eth0 ---- lan0 gateway wan0 ---- wan0 remote
//! 192.168.1.10     192.168.1.1  10.0.0.1  10.0.0.2      on the NICs
//! 10.77.0.10           10.77.0.1          10.77.0.2     in the overlay
//! ```
//! With more than one device, a switch (a bridge in a namespace of its own) joins them and the
//! gateway. The gateway and the remote may also be behind NATs of their own:
//!
//! ```text
//! gateway wan0 ---- NAT ---------- internet ---------- NAT ---- wan0 remote
//! 10.0.1.10    198.51.100.11     198.51.100.1     198.51.100.12  10.0.2.10
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use ipnet::IpNet;
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::Route;
use serde::Serialize;

use crate::error::{LabError, Result};
use crate::site::{
    Congestion, FIRST, Host, INTERNET, Link, NatBox, Router, Switch, address, all_cpus, join,
    network,
};

/// The gateway's NIC to the devices.
pub const LAN: &str = "lan0";
/// The gateway's and the remote's NICs to each other.
pub const WAN: &str = "wan0";
/// Bridge of the switch between devices and gateway.
const BRIDGE: &str = "switch";
/// The device's NIC.
const NIC: &str = "eth0";
/// Last byte of the first device's addresses in all networks.
const DEVICE: u8 = 10;
/// Maximum number of devices of a site.
pub const MAX_DEVICES: u8 = 100;

/// Last bytes of the addresses of the gateway and of the remote on the LAN. The remote appears
/// there only through a transparent gateway.
const TAKEN: [u8; 2] = [1, 202];
/// The networks behind the NATs of gateway and remote, and the last byte of either host's address
/// in its network.
const HOMES: [[u8; 3]; 2] = [[10, 0, 1], [10, 0, 2]];
const AT_HOME: u8 = 10;
/// Last bytes of the outer addresses of the two NATs.
const NATS: [u8; 2] = [11, 12];

/// Number of addresses of a device that represents many.
pub const MANY: usize = 200;

/// An address of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// IPv4.
    pub v4: Ipv4Addr,
    /// IPv6.
    pub v6: Ipv6Addr,
}

impl Pair {
    /// Returns both addresses, IPv4 first.
    pub fn both(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// Returns the address of a family.
    pub fn of(self, ipv6: bool) -> IpAddr {
        self.both()[usize::from(ipv6)]
    }

    /// Returns the networks of both addresses.
    pub fn networks(self) -> [IpNet; 2] {
        self.both().map(|address| network(address).trunc())
    }
}

const fn pair(a: u8, b: u8, c: u8, net: [u16; 2], host: u8) -> Pair {
    Pair {
        v4: Ipv4Addr::new(a, b, c, host),
        // The same digits in both families: 10 becomes ::10.
        v6: Ipv6Addr::new(net[0], net[1], 0, 0, 0, 0, 0, digits(host)),
    }
}

const fn digits(decimal: u8) -> u16 {
    let d = decimal as u16;
    (d / 100) << 8 | (d / 10 % 10) << 4 | (d % 10)
}

/// An address on the LAN.
pub const fn on_lan(host: u8) -> Pair {
    pair(192, 168, 1, [0xfd00, 1], host)
}

/// An address between gateway and remote.
pub const fn on_wan(host: u8) -> Pair {
    pair(10, 0, 0, [0xfd00, 2], host)
}

/// An address in the overlay.
pub const fn on_overlay(host: u8) -> Pair {
    pair(10, 77, 0, [0xfd77, 0], host)
}

/// The address of the LAN under which a transparent gateway shows the remote.
pub const PRESENTED: Pair = on_lan(202);

/// Returns the numbers, in all networks, of the addresses of a device that represents many; its own
/// comes first. The remote's number in the overlay is left out.
pub fn many_numbers() -> impl Iterator<Item = u8> {
    let others = (3..=254).filter(|n| *n != DEVICE && !TAKEN.contains(n));
    std::iter::once(DEVICE).chain(others).take(MANY)
}

/// Offloads of the LAN's NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Nic {
    /// Packets of the MTU, which the gateway's kernel merges, as with a physical NIC
    Plain,
    /// Whole super-packets
    Whole,
}

/// NICs of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lan {
    /// Offloads of the NICs.
    pub nic: Nic,
    /// Whether the gateway's NIC merges received packets (GRO).
    pub gro: bool,
    /// Whether the gateway's kernel distributes received packets over all processors (RPS).
    pub rps: bool,
    /// Number of devices; the first is [`Site::device`].
    pub devices: u8,
    /// Rate of every NIC in bit/s; `None`: limited only by the processors.
    pub rate: Option<u64>,
    /// Congestion control of all hosts.
    pub congestion: Congestion,
    /// Whether the internet and a NAT at each end are between gateway and remote, rather than a cable.
    pub nats: bool,
}

impl Default for Lan {
    fn default() -> Self {
        Self {
            nic: Nic::Plain,
            gro: true,
            rps: false,
            devices: 1,
            rate: None,
            congestion: Congestion::default(),
            nats: false,
        }
    }
}

/// Mode of Seikan's gateway: how it receives packets.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// With a packet socket, at an address of the LAN.
    Transparent,
    /// Through the kernel's forwarding.
    Routed,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Transparent => "transparent",
            Mode::Routed => "routed",
        }
    }

    /// Returns the sections of a gateway in a configuration, with devices of these addresses on the LAN and
    /// further lines for each.
    pub(super) fn section(
        self,
        devices: impl Iterator<Item = [IpAddr; 2]>,
        further: impl Fn(usize) -> String,
    ) -> String {
        let mut text = format!(
            "\n[gateway]\ninterface = \"{LAN}\"\nmode = \"{}\"\n",
            self.name()
        );
        for (number, [v4, v6]) in devices.enumerate() {
            text += &format!(
                "\n[[gateway.device]]\nname = \"device{number}\"\nlan = [\"{v4}\", \"{v6}\"]\n{}",
                further(number)
            );
        }
        text
    }
}

/// The hosts of a site.
#[derive(Debug)]
pub struct Site {
    /// The device that is measured. It has only plain addresses and routes.
    pub device: Host,
    /// The gateway.
    pub gateway: Host,
    /// The host at the far end.
    pub remote: Host,
    /// Further devices, idle.
    pub others: Vec<Host>,
    /// The addresses at which gateway and remote reach each other from outside.
    pub(super) outside: [IpAddr; 2],
    pub(super) internet: Option<Internet>,
    _switch: Option<Host>,
}

/// The internet between two NATs: where a coordinator runs.
#[derive(Debug)]
pub(super) struct Internet {
    pub(super) core: Switch,
    _nats: [Router; 2],
}

impl Internet {
    /// Joins gateway and remote, each behind a NAT that masquerades and drops unsolicited packets.
    fn between(gateway: &mut Host, remote: &mut Host, link: &Link) -> Result<Internet> {
        let core = Switch::create("internet", INTERNET)?.route()?;
        let join = |host: &mut Host, home, end| {
            let nat = Router::create(&core, end, &NatBox::default(), home, &[AT_HOME])?;
            nat.inside.connect(host, WAN, AT_HOME, link)?;
            host.address = address(home, AT_HOME);
            Ok::<_, LabError>(nat)
        };
        let nats = [
            join(gateway, HOMES[0], NATS[0])?,
            join(remote, HOMES[1], NATS[1])?,
        ];
        Ok(Internet { core, _nats: nats })
    }

    /// The host of the internet, and its address.
    pub(super) fn host(&self) -> (&Host, IpAddr) {
        (&self.core.host, address(INTERNET, FIRST))
    }
}

impl Site {
    /// Makes the hosts and joins them.
    ///
    /// # Errors
    /// The privilege to create namespaces is missing, or the kernel refuses an operation.
    pub fn create(lan: &Lan) -> Result<Self> {
        let device = host("device", NIC, on_lan(DEVICE), on_overlay(DEVICE))?;
        let mut gateway = host("gate", WAN, on_wan(1), on_overlay(1))?;
        // Tunnels that route the devices' own addresses send them to the gateway.
        gateway.behind = on_lan(1).networks().to_vec();
        let mut remote = host("remote", WAN, on_wan(2), on_overlay(2))?;
        let others = (1..lan.devices.clamp(1, MAX_DEVICES))
            .map(|n| host("other", NIC, on_lan(DEVICE + n), on_overlay(DEVICE + n)))
            .collect::<Result<Vec<Host>>>()?;
        let link = Link {
            rate: lan.rate,
            congestion: lan.congestion,
            ..Link::default()
        };
        let switch = join_lan(&gateway, &device, &others, &lan.link(link))?;
        gateway.set_features(LAN, &[(Feature::Gro, lan.gro)])?;
        if lan.rps {
            gateway.steer(LAN, &all_cpus())?;
        }
        let (internet, outside) = if lan.nats {
            remote.set_congestion_control(lan.congestion)?;
            let internet = Internet::between(&mut gateway, &mut remote, &link)?;
            (Some(internet), NATS.map(|end| address(INTERNET, end)))
        } else {
            let [near, far] = [&gateway, &remote].map(Host::addresses);
            join([gateway.nic(WAN, &near), remote.nic(WAN, &far)], &link)?;
            (None, [near[0], far[0]])
        };
        Ok(Self {
            device,
            gateway,
            remote,
            others,
            outside,
            internet,
            _switch: switch,
        })
    }

    /// All devices, the measured one first.
    pub fn devices(&self) -> impl Iterator<Item = &Host> {
        std::iter::once(&self.device).chain(&self.others)
    }

    /// Makes the devices resolve the addresses of `networks` on the LAN.
    ///
    /// # Errors
    /// The kernel refuses a route.
    pub(super) fn route_on_lan(&self, networks: &[IpNet]) -> Result<()> {
        for host in self.devices() {
            for network in networks {
                host.add_route(&Route::to(*network).device(host.index(NIC)?))?;
            }
        }
        Ok(())
    }

    /// Routes the devices' packets for `networks` to the gateway.
    ///
    /// # Errors
    /// The kernel refuses a route.
    pub fn route_through_gateway(&self, networks: &[IpNet]) -> Result<()> {
        for host in self.devices() {
            for (network, via) in networks.iter().zip(on_lan(1).both()) {
                host.add_route(&Route::to(*network).via(via))?;
            }
        }
        Ok(())
    }

    /// Routes the remote's packets for the LAN to the gateway's outer address, or out of `device`.
    ///
    /// # Errors
    /// The kernel refuses a route.
    pub fn route_to_lan(&self, device: Option<&str>) -> Result<()> {
        for (network, via) in on_lan(1).networks().into_iter().zip(on_wan(1).both()) {
            let there = Route::to(network);
            let there = match device {
                Some(name) => there.device(self.remote.index(name)?),
                None => there.via(via),
            };
            self.remote.add_route(&there)?;
        }
        Ok(())
    }

    /// Adds the addresses of [`many_numbers`] to the device.
    ///
    /// # Errors
    /// The kernel refuses an address.
    pub fn add_many_addresses(&self) -> Result<()> {
        let addresses = many_numbers()
            .skip(1)
            .flat_map(|number| on_lan(number).both());
        addresses
            .map(network)
            .try_for_each(|address| self.device.add_address(NIC, address))
    }

    /// Lets the gateway's kernel forward.
    ///
    /// # Errors
    /// When the settings cannot be written.
    pub fn let_gateway_forward(&self) -> Result<()> {
        self.gateway.forward_all()
    }
}

fn host(name: &'static str, nic: &str, outer: Pair, overlay: Pair) -> Result<Host> {
    let mut host = Host::create(name, 0)?;
    host.device = nic.to_owned();
    [host.address, host.address6] = outer.both();
    [host.inner, host.inner6] = overlay.both();
    Ok(host)
}

impl Lan {
    /// Returns the link with the NICs' offloads. A veth has receive offload only on request.
    fn link(&self, link: Link) -> Link {
        let features: &[_] = match self.nic {
            Nic::Plain => &[
                (Feature::Gro, true),
                (Feature::Tso, false),
                (Feature::TxChecksum, false),
            ],
            Nic::Whole => &[(Feature::Gro, true)],
        };
        Link { features, ..link }
    }
}

/// Joins gateway and devices, by a switch when there are several.
fn join_lan(gateway: &Host, device: &Host, others: &[Host], link: &Link) -> Result<Option<Host>> {
    let (own, addresses) = (on_lan(1).both(), device.addresses());
    let (near, far) = (gateway.nic(LAN, &own), device.nic(NIC, &addresses));
    if others.is_empty() {
        join([near, far], link)?;
        return Ok(None);
    }
    let switch = Host::create("switch", 0)?;
    switch.bridge(BRIDGE, &[])?;
    switch.plug(BRIDGE, "gateway", near, link)?;
    switch.plug(BRIDGE, "port0", far, link)?;
    for (number, host) in (1..).zip(others) {
        let port = format!("port{number}");
        switch.plug(BRIDGE, &port, host.nic(NIC, &host.addresses()), link)?;
    }
    Ok(Some(switch))
}

#[cfg(test)]
mod tests;
