//! Virtual networks with the host under test in the middle: a bridge with veth guests, and a
//! gateway that encapsulates a device's packets (the naive one). The naive encapsulator also runs
//! without a gateway, at both ends.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use seikan_sys::netlink::Route;
use seikan_ui::Interrupt;

use crate::error::Result;
use crate::process::Process;
use crate::program;
use crate::site::{Host, Hosts, Link, LinkKind, PLAIN_NIC, PORTS, network as net};
use crate::tunnel::{End, SWITCH, Started, Tunnel, device_name};

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

    fn crossed(&self) -> Option<&str> {
        Some(SWITCH)
    }
}

/// The naive gateway: host A is a device of its LAN, host B the far end.
pub(super) struct Naive;

/// The gateway's addresses on the LAN and outside, and host B's outside.
const GATEWAY: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 77, 0, 3)),
    IpAddr::V4(Ipv4Addr::new(10, 79, 0, 3)),
];
const FAR_END: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 79, 0, 2));

impl Tunnel for Naive {
    fn name(&self) -> &str {
        "naive"
    }

    fn by_default(&self) -> bool {
        false
    }

    fn programs(&self) -> &[&str] {
        &[program::LAB]
    }

    fn link(&self, asked: Link) -> Link {
        Link {
            kind: LinkKind::Middle,
            ..plain(asked)
        }
    }

    fn up(&self, hosts: &Hosts, dir: &Path, _: &Interrupt) -> Result<Started> {
        let Hosts { a, b, .. } = hosts;
        let (middle, [lan, wan]) = (hosts.middle()?, PORTS);
        let outside = [(middle, lan), (middle, wan), (b, &*b.device)];
        for ((host, nic), address) in outside.into_iter().zip([GATEWAY[0], GATEWAY[1], FAR_END]) {
            host.add_address(nic, net(address))?;
        }
        let overlay = net(b.inner).trunc();
        a.add_route(&Route::to(overlay).via(GATEWAY[0]))?;
        let near = format!("--wan={wan} --peer={FAR_END} --lan={lan} --overlay={overlay}");
        let far = format!(
            "--wan={} --peer={} --tun={} --address={} --network={}/32",
            b.device,
            GATEWAY[1],
            device_name(b),
            net(b.inner),
            a.address,
        );
        start_naive([(middle, &near), (b, &far)], dir)
    }

    fn device(&self, host: &Host) -> String {
        match host.name {
            "B" => device_name(host),
            "M" => PORTS[0].to_owned(),
            _ => host.device.clone(),
        }
    }
}

/// Starts the naive encapsulator at two hosts, each with these options.
pub(crate) fn start_naive(ends: [(&Host, &str); 2], dir: &Path) -> Result<Started> {
    let mut started = Started::default();
    for (host, words) in ends {
        let mut command = program::lab_command()?;
        command.arg("naive").args(words.split(' '));
        let process = Process::start(host, "naive", command, dir)?;
        started.processes.push(process);
    }
    Ok(started)
}

/// The naive encapsulator at both ends, each with a TUN device of its own, without a gateway.
pub(crate) struct NaiveHosts {
    /// Whether the packets of a connection are sent from many UDP ports alternately.
    pub(crate) spread: bool,
}

/// Name of the tunnel in reports.
pub(crate) const NAIVE_HOSTS: &str = "naive-host-to-host";
pub(crate) const NAIVE_SPREAD: &str = "naive-host-to-host-spread";
/// Number of ports: enough that every processor gets some.
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

    fn programs(&self) -> &[&str] {
        &[program::LAB]
    }

    fn link(&self, asked: Link) -> Link {
        plain(asked)
    }

    fn start_end(&self, end: &End<'_>, _: &Interrupt) -> Result<Process> {
        let ports = if self.spread { SPREAD_PORTS } else { 1 };
        let mut command = program::lab_command()?;
        command
            .args(["naive", "--wan", &end.host.device])
            .args(["--peer", &end.other.address.to_string()])
            .args(["--tun", &end.device()])
            .args(["--address", &net(end.host.inner).to_string()])
            .args(["--ports", &ports.to_string()]);
        end.run(self.name(), command)
    }
}

/// A link between NICs that are no better than physical ones.
fn plain(asked: Link) -> Link {
    let features: &[_] = if asked.features.is_empty() {
        &PLAIN_NIC
    } else {
        asked.features
    };
    Link { features, ..asked }
}
