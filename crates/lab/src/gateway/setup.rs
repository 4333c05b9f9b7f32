//! The paths from the device to the remote: no tunnel, Seikan, other implementations, and the naive
//! one.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use seikan_ui::Interrupt;

use crate::error::{Result, setup};
use crate::gateway::mesh;
use crate::gateway::site::{
    LAN, Lan, MANY, Mode, Nic, PRESENTED, Pair, Site, WAN, many_numbers, on_lan, on_overlay, on_wan,
};
use crate::gateway::{FORWARDING, YARDSTICK};
use crate::process::Process;
use crate::program;
use crate::site::{Host, network};
use crate::tunnel::middle::{NAIVE_HOSTS, NaiveHosts, start_naive};
use crate::tunnel::raw::RAW_LINK;
use crate::tunnel::seikan::{Seikan, config, status, up};
use crate::tunnel::wireguard;
use crate::tunnel::{End, Started, Tunnel, device_name, start_ends};

/// Number of devices in the configuration of a gateway with many devices.
const CONFIGURED: usize = 1000;
/// Name of Seikan's own setup in reports and in log files.
const SEIKAN: &str = "seikan";

/// A setup that carries packets from the device to the remote.
pub(super) struct Setup {
    pub(super) name: String,
    /// Whether the setup is measured if none is named.
    pub(super) by_default: bool,
    pub(super) way: Way,
    /// The tunnel whose programs it runs.
    pub(super) carrier: Arc<dyn Tunnel>,
}

/// The way from the device to the remote.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Device and remote run the tunnel themselves, without a gateway.
    Hosts,
    /// The kernel forwards, without a tunnel.
    Plain,
    /// Seikan at the gateway and at the remote.
    Seikan { mode: Mode, many: bool },
    /// A WireGuard program at the gateway, which forwards.
    WireGuard,
    /// The naive encapsulator.
    Naive { gro: bool, rps: bool },
}

/// Programs on a site. Dropping it stops them.
pub(super) struct Carriers {
    pub(super) started: Started,
    /// The address at which the remote is loaded.
    pub(super) target: IpAddr,
}

impl Carriers {
    fn join_mesh(&mut self, mesh: mesh::InMesh, ipv6: bool) {
        self.started = mesh.started;
        self.target = mesh.remote[usize::from(ipv6)];
    }
}

impl Setup {
    fn new(name: &str, way: Way, carrier: impl Tunnel + 'static) -> Self {
        Self {
            name: name.to_owned(),
            by_default: true,
            way,
            carrier: Arc::new(carrier),
        }
    }

    /// Seikan at the gateway and at the remote. Many devices are measured only if they are named.
    pub(super) fn seikan(mode: Mode, many: bool) -> Self {
        let suffix = if many { "+1000" } else { "" };
        let name = format!("seikan-{}{suffix}", mode.name());
        Self {
            by_default: !many,
            ..Self::new(&name, Way::Seikan { mode, many }, Seikan::new("native", 0))
        }
    }

    /// Whether the setup can run where gateway and remote are members of a mesh behind NATs. Other
    /// tunnels would need the outer addresses and ports; the naive encapsulator gets them.
    pub(super) fn in_mesh(&self) -> bool {
        match self.way {
            Way::Hosts => self.carrier.is_own(),
            Way::Seikan { many, .. } => !many,
            Way::Naive { rps, .. } => !rps,
            Way::Plain | Way::WireGuard => false,
        }
    }

    pub(super) fn availability(&self, ipv6: bool) -> Result<()> {
        if ipv6 && self.carrier.name() == NAIVE_HOSTS {
            return Err(setup("it supports only IPv4"));
        }
        self.carrier.availability()
    }

    /// Returns the LAN that the setup needs, given the requested one.
    pub(super) fn lan(&self, asked: Lan) -> Lan {
        match self.way {
            // Super-packets that are never split do not involve GRO.
            Way::Naive { gro, rps } => Lan {
                nic: Nic::Plain,
                gro,
                rps,
                ..asked
            },
            _ => asked,
        }
    }

    /// Returns the source addresses of streams, if the device represents many.
    pub(super) fn sources(&self, ipv6: bool) -> Vec<IpAddr> {
        match self.way {
            Way::Seikan { many: true, .. } => many_numbers().map(|n| on_lan(n).of(ipv6)).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the addresses at which the device reaches the remote without a mesh.
    fn target(&self) -> Pair {
        match self.way {
            Way::Plain => on_wan(2),
            Way::Seikan {
                mode: Mode::Transparent,
                ..
            } => PRESENTED,
            _ => on_overlay(2),
        }
    }

    /// Starts the setup on both hosts, for a load over IPv6 or IPv4. Files are written to `dir`,
    /// which only the lab's user can read.
    pub(super) fn up(
        &self,
        site: &Site,
        dir: &Path,
        ipv6: bool,
        interrupt: &Interrupt,
    ) -> Result<Carriers> {
        let mut carriers = Carriers {
            started: Started::default(),
            target: self.target().of(ipv6),
        };
        let is_mesh = site.internet.is_some();
        match self.way {
            Way::Hosts if is_mesh => {
                carriers.join_mesh(mesh::start(None, site, dir, interrupt)?, ipv6);
            }
            Way::Seikan { mode, .. } if is_mesh => {
                carriers.join_mesh(mesh::start(Some(mode), site, dir, interrupt)?, ipv6);
            }
            // Without a mesh it has no site.
            Way::Hosts => {}
            Way::Plain => {
                site.let_gateway_forward()?;
                site.route_through_gateway(&on_wan(2).networks())?;
                site.route_to_lan(None)?;
            }
            Way::Seikan { mode, many } => {
                let mut devices = devices(site);
                if many {
                    site.add_many_addresses()?;
                    devices.extend(many_devices());
                }
                if mode == Mode::Routed {
                    site.route_through_gateway(&on_overlay(2).networks())?;
                }
                carriers.started = start_seikan(mode, &devices, site, dir, interrupt)?;
            }
            Way::WireGuard => {
                site.let_gateway_forward()?;
                site.route_through_gateway(&on_overlay(2).networks())?;
                let ends = [&site.gateway, &site.remote];
                let start = &mut |end: &End<'_>| self.carrier.start_end(end, interrupt);
                carriers.started = start_ends(ends, dir, interrupt, start)?;
                site.route_to_lan(Some(&device_name(&site.remote)))?;
            }
            Way::Naive { .. } => {
                site.route_through_gateway(&on_overlay(2).networks())?;
                let [near, far] = naive_options(site);
                let ends = [(&site.gateway, &*near), (&site.remote, &far)];
                carriers.started = start_naive(ends, dir)?;
                if is_mesh {
                    let keepalive = keep_mappings(site, dir)?;
                    carriers.started.processes.push(keepalive);
                }
            }
        }
        Ok(carriers)
    }

    /// Returns the status of both ends, the gateway first. The naive encapsulator prints it when it
    /// ends.
    pub(super) fn said(
        &self,
        carriers: &mut Carriers,
        site: &Site,
        dir: &Path,
    ) -> Result<Vec<serde_json::Value>> {
        let hosts = [&site.gateway, &site.remote].into_iter();
        match self.way {
            Way::Seikan { .. } => Ok(hosts.filter_map(|host| status(host, dir)).collect()),
            Way::Naive { .. } => {
                // The two ends come first; behind NATs a ping follows.
                let ends = carriers.started.processes.drain(..).take(2);
                ends.map(Process::end)
                    .map(|output| counts_of(&output))
                    .collect()
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// Returns what the naive encapsulator counted: the object at the end of its output.
fn counts_of(output: &str) -> Result<serde_json::Value> {
    let start = output.rfind("\n{").map_or(0, |at| at + 1);
    let failed = |_| {
        setup(format!(
            "the naive encapsulator ended without its counts: {output}"
        ))
    };
    serde_json::from_str(&output[start..]).map_err(failed)
}

/// A device in a configuration: its addresses on the LAN, and in the overlay.
type Device = [[IpAddr; 2]; 2];

/// The devices of a site.
fn devices(site: &Site) -> Vec<Device> {
    let addresses = |host: &Host| [host.addresses(), [host.inner, host.inner6]];
    site.devices().map(addresses).collect()
}

/// Returns the other devices of a site: existing ones, then those that are only configured.
fn many_devices() -> impl Iterator<Item = Device> {
    let there = many_numbers()
        .skip(1)
        .map(|n| [on_lan(n).both(), on_overlay(n).both()]);
    let absent = (MANY..CONFIGURED).map(|n| {
        let [a, b] = [16 + (n / 250) as u8, 1 + (n % 250) as u8];
        let v6 = |net| IpAddr::V6(Ipv6Addr::new(net, 0, 0, 0, 0, 0, a.into(), b.into()));
        [
            [Ipv4Addr::new(192, 168, a, b).into(), v6(0xfd01)],
            [Ipv4Addr::new(10, 77, a, b).into(), v6(0xfd77)],
        ]
    });
    there.chain(absent)
}

fn start_seikan(
    mode: Mode,
    devices: &[Device],
    site: &Site,
    dir: &Path,
    interrupt: &Interrupt,
) -> Result<Started> {
    let gateway = &site.gateway;
    let mut behind = vec![gateway.inner, gateway.inner6];
    behind.extend(devices.iter().flat_map(|[_, overlay]| overlay));
    start_ends([gateway, &site.remote], dir, interrupt, &mut |end| {
        let text = if end.host.name == gateway.name {
            config(end, &on_overlay(2).both()) + &gateway_section(mode, devices)
        } else {
            config(end, &behind)
        };
        up(
            end,
            program::seikan_command()?,
            SEIKAN,
            &text,
            "native",
            &[],
        )
    })
}

/// Returns the gateway section of a configuration.
fn gateway_section(mode: Mode, devices: &[Device]) -> String {
    let lan = devices.iter().map(|[lan, _]| *lan);
    let overlay = |number: usize| {
        let [v4, v6] = devices[number][1];
        format!("overlay = [\"{v4}\", \"{v6}\"]\n")
    };
    let mut text = mode.section(lan, overlay);
    if mode == Mode::Transparent {
        for (overlay, lan) in on_overlay(2).both().into_iter().zip(PRESENTED.both()) {
            text += &format!("\n[[gateway.remote]]\noverlay = \"{overlay}\"\nlan = \"{lan}\"\n");
        }
    }
    text
}

/// Options of the naive encapsulator at the gateway and at the remote.
fn naive_options(site: &Site) -> [String; 2] {
    let [to_gateway, to_remote] = site.outside;
    let [own, lan] = [on_overlay(2), on_lan(1)].map(|pair| network(pair.v4.into()));
    let (overlay, lan) = (own.trunc(), lan.trunc());
    [
        format!("--wan={WAN} --peer={to_remote} --lan={LAN} --overlay={overlay}"),
        format!("--wan={WAN} --peer={to_gateway} --tun=naive0 --address={own} --network={lan}"),
    ]
}

/// Makes the remote ping the device through the naive tunnel, so that its NAT admits the gateway.
fn keep_mappings(site: &Site, dir: &Path) -> Result<Process> {
    let mut ping = Command::new("ping");
    ping.args(["-q", "-i", "0.5"])
        .arg(on_lan(10).v4.to_string());
    Process::start(&site.remote, "ping", ping, dir)
}

/// Returns all setups, in the order of reports.
pub(super) fn all() -> Vec<Setup> {
    let naive = || NaiveHosts { spread: false };
    let mut all = vec![
        Setup::new(YARDSTICK, Way::Hosts, Seikan::new("native", 0)),
        Setup {
            by_default: false,
            ..Setup::new(NAIVE_HOSTS, Way::Hosts, naive())
        },
        Setup::new(FORWARDING, Way::Plain, RAW_LINK),
    ];
    for many in [false, true] {
        let modes = [Mode::Transparent, Mode::Routed];
        all.extend(modes.map(|mode| Setup::seikan(mode, many)));
    }
    // Of the WireGuard programs the two in Go are measured if none is named.
    all.extend(wireguard::all().map(|program| {
        let name = program.name().to_owned();
        Setup {
            by_default: name.ends_with("wireguard-go"),
            ..Setup::new(&name, Way::WireGuard, program)
        }
    }));
    let naive_gateways = [
        ("naive-gro", true, false),
        ("naive-no-gro", false, false),
        ("naive-no-gro-rps", false, true),
    ];
    all.extend(
        naive_gateways.map(|(name, gro, rps)| Setup::new(name, Way::Naive { gro, rps }, naive())),
    );
    all
}
