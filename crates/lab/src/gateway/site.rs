//! A site: a device with nothing of ours, a gateway beside it, and a remote host behind the gateway's other card.
//!
//! ```text
//! device eth0 ---- lan0 gateway wan0 ---- wan0 remote
//! 192.168.1.10     192.168.1.1  10.0.0.1  10.0.0.2      on the cards
//! 10.77.0.10           10.77.0.1          10.77.0.2     in the overlay
//! ```
//! With more than one device a switch (a bridge in a namespace of its own) stands between them and the gateway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsFd;

use ipnet::IpNet;
use seikan_sys::ethtool::{Feature, FeatureState};
use seikan_sys::netlink::{AddressOptions, NetlinkError, Route};
use seikan_sys::netns::NetNs;
use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::link::Host;

/// MTU of all cards, in bytes.
const MTU: u32 = 1500;
/// The gateway's card to the devices.
pub const LAN: &str = "lan0";
/// The gateway's and the remote's card to each other.
pub const WAN: &str = "wan0";
/// The device's card.
const CARD: &str = "eth0";
/// Interface number of the first device in all networks.
const DEVICE: u8 = 10;
/// Most devices of a site.
pub const MAX_DEVICES: u8 = 100;

/// The gateway's and the remote's number on the LAN, where the latter is only shown.
const TAKEN: [u8; 2] = [1, 202];
/// Addresses of the device when it stands for a crowd.
pub const CROWD: usize = 200;

/// An address of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// IPv4.
    pub v4: Ipv4Addr,
    /// IPv6.
    pub v6: Ipv6Addr,
}

impl Pair {
    /// Both, IPv4 first.
    #[must_use]
    pub fn both(self) -> [IpAddr; 2] {
        [self.v4.into(), self.v6.into()]
    }

    /// The one of a family.
    #[must_use]
    pub fn of(self, ipv6: bool) -> IpAddr {
        self.both()[usize::from(ipv6)]
    }

    /// The networks of both.
    #[must_use]
    pub fn networks(self) -> [IpNet; 2] {
        // Constant lengths, which cannot be refused.
        self.both().map(|address| {
            let length = if address.is_ipv4() { 24 } else { 64 };
            IpNet::new_assert(address, length).trunc()
        })
    }
}

const fn pair(a: u8, b: u8, c: u8, net: [u16; 2], host: u8) -> Pair {
    Pair {
        v4: Ipv4Addr::new(a, b, c, host),
        // The same digits in both: 10 is ::10.
        v6: Ipv6Addr::new(net[0], net[1], 0, 0, 0, 0, 0, digits(host)),
    }
}

const fn digits(decimal: u8) -> u16 {
    let d = decimal as u16;
    (d / 100) << 8 | (d / 10 % 10) << 4 | (d % 10)
}

/// An address on the LAN.
#[must_use]
pub const fn on_lan(host: u8) -> Pair {
    pair(192, 168, 1, [0xfd00, 1], host)
}

/// An address between gateway and remote.
#[must_use]
pub const fn on_wan(host: u8) -> Pair {
    pair(10, 0, 0, [0xfd00, 2], host)
}

/// An address in the overlay.
#[must_use]
pub const fn on_overlay(host: u8) -> Pair {
    pair(10, 77, 0, [0xfd77, 0], host)
}

/// The address of the LAN under which a transparent gateway shows the remote.
pub const PRESENTED: Pair = on_lan(202);

/// Numbers of a crowd's members that are there, in all networks; the device's own comes first. The remote's number in
/// the overlay is left out, too.
pub fn crowd() -> impl Iterator<Item = u8> {
    let others = (3..=254).filter(|n| *n != DEVICE && !TAKEN.contains(n));
    std::iter::once(DEVICE).chain(others).take(CROWD)
}

/// What the cards of the LAN do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Card {
    /// Packets of the MTU cross the wire, with their checksums, as between physical cards: the sender's kernel cuts
    /// super-packets up, and the receiver's merges packets again.
    Plain,
    /// A veth with all of its offloads: super-packets cross whole, and nothing is there to merge.
    Whole,
}

/// The LAN of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lan {
    /// What the cards do.
    pub card: Card,
    /// Whether the gateway's card merges what it receives (GRO).
    pub gro: bool,
    /// Whether the gateway's kernel spreads what the card receives over all processors (RPS).
    pub rps: bool,
    /// Number of devices; the first is [`Site::device`].
    pub devices: u8,
}

/// The hosts.
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
    _switch: Option<NetNs>,
}

impl Site {
    /// Makes the hosts and joins them.
    ///
    /// # Errors
    /// No privilege to make namespaces, or anything else the kernel refuses.
    pub fn create(lan: &Lan) -> Result<Self> {
        let device = host("device", CARD, on_lan(DEVICE), on_overlay(DEVICE))?;
        let mut gateway = host("gate", WAN, on_wan(1), on_overlay(1))?;
        // What routes packets to the devices' own addresses sends them there.
        gateway.behind = on_lan(1).networks().to_vec();
        let remote = host("remote", WAN, on_wan(2), on_overlay(2))?;
        let others = (1..lan.devices.clamp(1, MAX_DEVICES))
            .map(|n| host("other", CARD, on_lan(DEVICE + n), on_overlay(DEVICE + n)))
            .collect::<Result<Vec<Host>>>()?;
        let switch = join_lan(&gateway, &device, &others)?;
        veth(gateway.netns(), WAN, remote.netns(), WAN)?;
        for host in [&gateway, &remote, &device].into_iter().chain(&others) {
            host.configure(&host.device, MTU, host.address, host.address6)?;
        }
        let [lan4, lan6] = on_lan(1).both();
        gateway.configure(LAN, MTU, lan4, lan6)?;
        for host in std::iter::once(&device).chain(&others) {
            set_card(host, CARD, lan.card, true)?;
        }
        set_card(&gateway, LAN, lan.card, lan.gro)?;
        if lan.rps {
            spread_over_processors(&gateway, LAN)?;
        }
        Ok(Self {
            device,
            gateway,
            remote,
            others,
            _switch: switch,
        })
    }

    /// Sends what the devices have for `networks` to the gateway.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn route_through_gateway(&self, networks: [IpNet; 2]) -> Result<()> {
        let devices = std::iter::once(&self.device).chain(&self.others);
        for (host, (network, via)) in devices.flat_map(|host| {
            networks
                .into_iter()
                .zip(on_lan(1).both())
                .map(move |r| (host, r))
        }) {
            route(host, Route::to(network).via(via))?;
        }
        Ok(())
    }

    /// Sends what the remote has for the LAN to the gateway's outer address, or out of `device`.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn route_to_lan(&self, device: Option<&str>) -> Result<()> {
        let netlink = self.remote.netlink()?;
        for (network, via) in on_lan(1).networks().into_iter().zip(on_wan(1).both()) {
            let there = Route::to(network);
            let there = match device {
                Some(name) => there.device(netlink.link(name).map_err(refuse)?.index),
                None => there.via(via),
            };
            route(&self.remote, there)?;
        }
        Ok(())
    }

    /// Gives the device the addresses of a crowd.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn make_crowd(&self) -> Result<()> {
        let netlink = self.device.netlink()?;
        let index = netlink.link(CARD).map_err(refuse)?.index;
        for address in crowd().skip(1).flat_map(|number| on_lan(number).both()) {
            let net = IpNet::new_assert(address, if address.is_ipv4() { 24 } else { 64 });
            let options = AddressOptions {
                no_dad: true,
                ..AddressOptions::default()
            };
            let added = netlink.add_address_with(index, net, options);
            if address.is_ipv4() || has_ipv6() {
                added.map_err(refuse)?;
            }
        }
        Ok(())
    }

    /// Lets the gateway's kernel forward.
    ///
    /// # Errors
    /// When the settings cannot be written.
    pub fn let_gateway_forward(&self) -> Result<()> {
        for file in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            // What is shown there belongs to the network namespace of the thread that opens it.
            let path = format!("/proc/sys/net/{file}");
            let written = self.gateway.run(|| std::fs::write(&path, "1"))?;
            // Without IPv6 there is nothing to forward.
            if file.starts_with("ipv4") || has_ipv6() {
                written.map_err(LabError::io(format!("write {path} of the gateway")))?;
            }
        }
        Ok(())
    }
}

/// A kernel booted with ipv6.disable=1 has no IPv6; nothing here depends on it unless asked for.
fn has_ipv6() -> bool {
    std::path::Path::new("/proc/sys/net/ipv6").exists()
}

fn host(name: &'static str, card: &str, outer: Pair, overlay: Pair) -> Result<Host> {
    let mut host = Host::create(name, 0)?;
    host.device = card.to_owned();
    [host.address, host.address6] = outer.both();
    [host.inner, host.inner6] = overlay.both();
    Ok(host)
}

fn refuse(error: NetlinkError) -> LabError {
    LabError::Setup(error.to_string())
}

fn route(host: &Host, route: Route) -> Result<()> {
    let added = host.netlink()?.add_route(&route);
    // A kernel without IPv6 has no routes of it either.
    let needed = route.destination.addr().is_ipv4() || has_ipv6();
    added.or_else(|e| if needed { Err(refuse(e)) } else { Ok(()) })
}

fn veth(a: &NetNs, name: &str, b: &NetNs, peer: &str) -> Result<()> {
    let netlink = a.netlink().map_err(|e| LabError::Setup(e.to_string()))?;
    let made = netlink.create_veth(name, peer, Some(b.as_fd()));
    made.map(drop).map_err(refuse)
}

/// Joins gateway and devices, by a switch when there are several.
fn join_lan(gateway: &Host, device: &Host, others: &[Host]) -> Result<Option<NetNs>> {
    if others.is_empty() {
        return veth(gateway.netns(), LAN, device.netns(), CARD).map(|()| None);
    }
    let setup = |e: seikan_sys::netns::NetNsError| LabError::Setup(e.to_string());
    let switch = NetNs::create().map_err(setup)?;
    let netlink = switch.netlink().map_err(setup)?;
    let bridge = netlink.create_bridge("switch").map_err(refuse)?;
    netlink.set_up(bridge).map_err(refuse)?;
    let ends = [(gateway, LAN), (device, CARD)];
    let ends = ends
        .into_iter()
        .chain(others.iter().map(|host| (host, CARD)));
    for (number, (host, card)) in ends.enumerate() {
        let port = format!("port{number}");
        veth(&switch, &port, host.netns(), card)?;
        let index = netlink.link(&port).map_err(refuse)?.index;
        netlink.set_master(index, Some(bridge)).map_err(refuse)?;
        netlink.set_up(index).map_err(refuse)?;
    }
    Ok(Some(switch))
}

/// Makes a card plain, or leaves it whole; with or without receive offload, which a veth has only when asked.
fn set_card(host: &Host, name: &str, card: Card, gro: bool) -> Result<()> {
    let ethtool = host.netns().ethtool();
    let ethtool = ethtool.map_err(|e| LabError::Setup(e.to_string()))?;
    let set = |feature, on| {
        ethtool
            .set_feature(name, feature, on)
            .map_err(|e| LabError::Setup(format!("host {}: {e}", host.name)))
    };
    set(Feature::Gro, gro)?;
    if card == Card::Plain {
        // Segmentation depends on transmit checksums: last to go. The kernel's own (GSO) stays: it is what cuts.
        set(Feature::Tso, false)?;
        set(Feature::TxChecksum, false)?;
    }
    Ok(())
}

/// The offloads of a card of `host` that are in force.
///
/// # Errors
/// When they cannot be read.
pub fn offloads(host: &Host, card: &str) -> Result<Vec<String>> {
    let setup = |e: &dyn std::fmt::Display| LabError::Setup(format!("host {}: {e}", host.name));
    let ethtool = host.netns().ethtool().map_err(|e| setup(&e))?;
    let states = ethtool.features(card).map_err(|e| setup(&e))?;
    let active = states
        .into_iter()
        .filter(|state: &FeatureState| state.active);
    Ok(active.map(|state| state.name).collect())
}

/// Sets RPS of a card to all processors.
fn spread_over_processors(host: &Host, card: &str) -> Result<()> {
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let cpus: Vec<u32> = (0..count as u32).collect();
    let file = format!("{card}/queues/rx-0/rps_cpus");
    host.set_attribute(&file, &seikan_sys::softirq::mask(&cpus))
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_same_digits_in_both_families() {
        assert_eq!(
            on_lan(10).both().map(|a| a.to_string()),
            ["192.168.1.10", "fd00:1::10"]
        );
        assert_eq!(
            PRESENTED.both().map(|a| a.to_string()),
            ["192.168.1.202", "fd00:1::202"]
        );
        assert_eq!(
            on_overlay(2).networks().map(|n| n.to_string()),
            ["10.77.0.0/24", "fd77::/64"]
        );
    }

    #[test]
    fn a_crowd_takes_nobody_s_address() {
        let all: std::collections::BTreeSet<u8> = crowd().collect();
        assert_eq!(all.len(), CROWD);
        assert!([1, 2, 202].iter().all(|n| !all.contains(n)));
        assert_eq!(crowd().next(), Some(DEVICE));
    }

    #[test]
    fn names_of_interfaces_fit_the_kernel() {
        // Named after the host by tunnels, beside the largest process id; IFNAMSIZ is 16 with its NUL.
        for name in ["gate", "remote", "device"] {
            assert!(format!("sk4194304{name}").len() < 16);
        }
    }
}
