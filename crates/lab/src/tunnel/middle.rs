//! Virtual networks with the host under test in the middle: a bridge with veth guests, and a
//! gateway that encapsulates a device's packets (the naive one). And its encapsulator without a
//! gateway, at both ends.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use ipnet::{IpNet, Ipv4Net};
use seikan_load::Ends;
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::Route;
use seikan_ui::Interrupt;

use crate::error::{LabError, Result};
use crate::host::{Host, network as net};
use crate::link::{Hosts, Link, LinkKind, PORTS};
use crate::program;
use crate::tunnel::{SWITCH, Started, Tunnel, device_name, link_device, need_tun, start_ends};

/// A bridge of the kernel's, with host A and host B as its guests.
pub(super) struct Bridge;

impl Tunnel for Bridge {
    fn name(&self) -> &str {
        "bridge"
    }

    fn by_default(&self) -> bool {
        false
    }

    fn link(&self, asked: Link) -> Link {
        Link {
            kind: LinkKind::Middle,
            ..asked
        }
    }

    fn up(&self, hosts: &Hosts, _: &Path, _: &Interrupt) -> Result<Started> {
        hosts.middle()?.bridge(SWITCH, &PORTS)?;
        Ok(Started::default())
    }

    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        hosts.over_link()
    }

    fn device(&self, host: &Host) -> String {
        link_device(host, SWITCH)
    }
}

/// The naive gateway: host A is a device of its LAN, host B the far end.
pub(super) struct Naive;

/// The gateway's addresses on the LAN and outside, and host B's outside.
const GATEWAY: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 77, 0, 3), Ipv4Addr::new(10, 79, 0, 3)];
const FAR_END: Ipv4Addr = Ipv4Addr::new(10, 79, 0, 2);

impl Tunnel for Naive {
    fn name(&self) -> &str {
        "naive"
    }

    fn by_default(&self) -> bool {
        false
    }

    fn availability(&self) -> std::result::Result<(), String> {
        need_tun()?;
        program::lab().map(drop)
    }

    fn link(&self, asked: Link) -> Link {
        Link {
            kind: LinkKind::Middle,
            ..asked
        }
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let middle = hosts.middle()?;
        for host in hosts.both() {
            packets_of_the_mtu(host)?;
        }
        let [lan, wan] = PORTS;
        middle.add_address(lan, net(GATEWAY[0].into()))?;
        middle.add_address(wan, net(GATEWAY[1].into()))?;
        hosts.b.add_address(&hosts.b.device, net(FAR_END.into()))?;
        let overlay = network(hosts.b.inner, 24)?.trunc();
        let route = Route::to(IpNet::V4(overlay)).via(GATEWAY[0].into());
        hosts.a.add_route(&route)?;
        let device = network(hosts.a.address, 32)?;
        let own = network(hosts.b.inner, 24)?;
        let far = format!(
            "--wan={} --peer={} --tun={} --address={own} --network={device}",
            hosts.b.device,
            GATEWAY[1],
            device_name(&hosts.b),
        );
        let near = format!("--wan={wan} --peer={FAR_END} --lan={lan} --overlay={overlay}");
        start_ends([middle, &hosts.b], dir, interrupt, &mut |end| {
            let words = if end.host.name == "B" { &far } else { &near };
            let mut command = program::lab_command()?;
            command.arg("naive").args(words.split(' '));
            end.run(self.name(), command)
        })
    }

    fn device(&self, host: &Host) -> String {
        match host.name {
            "B" => device_name(host),
            _ => link_device(host, PORTS[0]),
        }
    }
}

/// The naive encapsulator at both ends, each with a TUN device of its own, without a gateway.
pub(crate) struct NaiveHosts {
    /// Whether the packets of a connection go out of many UDP ports by turns.
    pub(crate) spread: bool,
}

/// Its names.
pub(crate) const NAIVE_HOSTS: &str = "naive-host-to-host";
pub(crate) const NAIVE_SPREAD: &str = "naive-host-to-host-spread";
/// The ports, so many that every processor gets some.
const SPREAD_PORTS: u8 = 16;

impl Tunnel for NaiveHosts {
    fn name(&self) -> &str {
        if self.spread {
            NAIVE_SPREAD
        } else {
            NAIVE_HOSTS
        }
    }

    fn by_default(&self) -> bool {
        false
    }

    fn availability(&self) -> std::result::Result<(), String> {
        Naive.availability()
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        for host in hosts.both() {
            packets_of_the_mtu(host)?;
        }
        start_ends(hosts.both(), dir, interrupt, &mut |end| {
            let own = network(end.host.inner, 24)?;
            let mut command = program::lab_command()?;
            command
                .args(["naive", "--wan", &end.host.device])
                .args(["--peer", &end.other.address.to_string()])
                .args(["--tun", &end.device(), "--address", &own.to_string()]);
            if self.spread {
                command.args(["--ports", &SPREAD_PORTS.to_string()]);
            }
            end.run(self.name(), command)
        })
    }
}

/// As between physical NICs: no packet above the MTU crosses, and checksums are complete.
fn packets_of_the_mtu(host: &Host) -> Result<()> {
    // Segmentation depends on checksums: last to go. The kernel's own (GSO) stays: it is what cuts.
    let whole = [(Feature::Tso, false), (Feature::TxChecksum, false)];
    host.set_features(&host.device, &whole)
}

fn network(address: IpAddr, length: u8) -> Result<Ipv4Net> {
    match address {
        IpAddr::V4(v4) => Ipv4Net::new(v4, length)
            .map_err(|e| LabError::Setup(format!("{address}/{length}: {e}"))),
        IpAddr::V6(_) => Err(LabError::Setup(
            "the naive gateway supports only IPv4".into(),
        )),
    }
}
