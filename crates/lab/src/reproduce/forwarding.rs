//! The set-up of the source of [`batch`](super::batch): hosts S0, S1 and S2. S1 forwards between
//! the others. S0 reaches it directly, or through a program that only passes packets on.

use std::net::Ipv4Addr;
use std::path::Path;

use ipnet::{IpNet, Ipv4Net};
use seikan_load::wait_reachable;
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::Route;
use seikan_ui::Interrupt;

use super::figures::interleaved;
use super::pages::{request_repeatedly, web_server};
use super::{Bench, Figures, Found, Row, titled};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::host::{Host, cable, network};
use crate::process::{Process, wait_for};
use crate::program::lab_command;
use crate::scenario::tool;
use crate::tunnel::{READY_PATIENCE, Started};

/// Addresses of the source: S0; S1 towards S0 and towards S2; S2.
const S0: Ipv4Addr = Ipv4Addr::new(192, 168, 188, 194);
const S1: [Ipv4Addr; 2] = [
    Ipv4Addr::new(192, 168, 188, 193),
    Ipv4Addr::new(10, 0, 188, 193),
];
const S2: Ipv4Addr = Ipv4Addr::new(10, 0, 188, 139);
/// Those inside the program, of S0 and S1.
const INSIDE: [Ipv4Addr; 2] = [Ipv4Addr::new(172, 16, 0, 2), Ipv4Addr::new(172, 16, 0, 1)];
/// NICs of S1, and the program's device.
const PORTS: [&str; 2] = ["eth0", "eth1"];
const DEVICE: &str = "tun0";
const PORT: u16 = 5_555;
const MTU: u32 = 1_500;

const BARE: &str = "forwarding, no program";
/// Frames for each crossing, and the published KB/s: the driver as it is, changed, and the largest.
const PASSED: [(u32, Option<f64>); 3] = [(1, Some(102_512.37)), (4, Some(111_139.88)), (64, None)];
const PUBLISHED_BARE: f64 = 114_089.42;
/// Number of rows.
pub(super) const ROWS: usize = 1 + PASSED.len();

fn passed(frames: u32) -> String {
    let plural = if frames == 1 { "" } else { "s" };
    format!("passed on, {frames} frame{plural}")
}

/// Reads the output of `ab` for every row, over links of this rate.
pub(super) fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let mut names = vec![BARE.to_owned()];
    names.extend(PASSED.map(|(frames, _)| passed(frames)));
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let size = PASSED.into_iter().find(|(size, _)| passed(*size) == name);
        let dir = private_directory()?;
        let mut site = Forwarding::start(size.map(|(size, _)| size), rate, dir.path(), bench)?;
        let server = web_server(&site.hosts[2], dir.path())?;
        let ends = site.hosts[0].to(&site.hosts[2], S2.into());
        let pages = request_repeatedly(&ends, server, bench.interrupt)?;
        site.started.check_alive()?;
        Ok(pages)
    })?;
    let published = std::iter::once(Some(PUBLISHED_BARE)).chain(PASSED.map(|(_, there)| there));
    let figures = Figures {
        title: titled("the same through S1, without encryption", rate),
        unit: "KB/s".to_owned(),
        base: BARE.to_owned(),
        rows: names
            .iter()
            .zip(published)
            .zip(measured)
            .map(|((name, there), rounds)| Row {
                rounds,
                ..Row::new(name, there)
            })
            .collect(),
    };
    found.claims.push(figures.claim(&passed(4), &passed(1)));
    found.figures.push(figures);
    Ok(())
}

/// S0, S1 and S2, and the program between the first two. Dropping it stops the program first.
struct Forwarding {
    started: Started,
    hosts: [Host; 3],
}

impl Forwarding {
    /// `frames` for each crossing of the program; without it, S1 only forwards.
    fn start(
        frames: Option<u32>,
        rate: Option<u64>,
        dir: &Path,
        bench: &Bench<'_>,
    ) -> Result<Self> {
        let mut hosts = [
            Host::create("S0", 1)?,
            Host::create("S1", 3)?,
            Host::create("S2", 2)?,
        ];
        PORTS[0].clone_into(&mut hosts[1].device);
        let mut site = Self {
            started: Started::default(),
            hosts,
        };
        site.connect(rate, bench)?;
        let Self { started, hosts } = &mut site;
        let [s0, s1, s2] = &*hosts;
        let to_s2 = Route::to(IpNet::new_assert(S2.into(), 24).trunc());
        match frames {
            None => {
                s0.add_route(&to_s2.via(S1[0].into()))?;
                let back = Route::to(IpNet::new_assert(S0.into(), 24).trunc());
                s2.add_route(&back.via(S1[1].into()))?;
            }
            Some(frames) => {
                for (host, own) in [s0, s1].into_iter().zip(INSIDE) {
                    let program = pass_through(host, own, dir)?;
                    started.processes.0.push(program);
                }
                wait_for_device([s0, s1], started, bench.interrupt)?;
                s0.add_route(&to_s2.device(s0.index(DEVICE)?))?;
                let back = Route::to(IpNet::new_assert(INSIDE[0].into(), 24).trunc());
                s2.add_route(&back.via(S1[1].into()))?;
                for (host, device) in [(s0, DEVICE), (s1, DEVICE), (s2, s2.device.as_str())] {
                    limit_frames(host, device, frames)?;
                }
            }
        }
        let ends = s0.to(s2, S2.into());
        wait_reachable(&ends, READY_PATIENCE, bench.interrupt, || {
            started.check_alive()
        })
        .map_err(|error| started.explain(error))?;
        Ok(site)
    }

    /// Joins the hosts by cables, with addresses and without routes; S1 forwards.
    fn connect(&self, rate: Option<u64>, bench: &Bench<'_>) -> Result<()> {
        let [s0, s1, s2] = &self.hosts;
        for (port, other) in PORTS.into_iter().zip([s0, s2]) {
            cable(s1, port, other, &other.device)?;
        }
        for (host, device, address) in [
            (s0, s0.device.as_str(), S0),
            (s1, PORTS[0], S1[0]),
            (s1, PORTS[1], S1[1]),
            (s2, s2.device.as_str(), S2),
        ] {
            let netlink = host.netlink()?;
            netlink.set_mtu(host.index(device)?, MTU)?;
            host.add_address(device, network(address.into()))?;
            host.set_up(device)?;
            host.set_congestion_control(bench.options.congestion)?;
            if let Some(rate) = rate {
                host.limit(device, rate)?;
            }
        }
        s1.forward(true)
    }
}

/// Waits for the device of both ends.
fn wait_for_device(ends: [&Host; 2], started: &mut Started, interrupt: &Interrupt) -> Result<()> {
    ends.into_iter().try_for_each(|host| {
        wait_for("the program's device", READY_PATIENCE, interrupt, || {
            started.check_alive()?;
            Ok(host.index(DEVICE).ok())
        })
        .map(drop)
    })
}

/// Starts one end of the program. S1 listens.
fn pass_through(host: &Host, own: Ipv4Addr, dir: &Path) -> Result<Process> {
    let role = if own == INSIDE[1] {
        "listen"
    } else {
        "connect"
    };
    let own = Ipv4Net::new_assert(own, 24);
    let mut command = lab_command()?;
    command
        .args(["pass-through", "--device", DEVICE])
        .arg(format!("--address={own}"))
        .arg(format!("--{role}={}:{PORT}", S1[0]));
    Process::start(host, "pass-through", command, dir)
}

/// Super-packets of a device have at most so many segments; with one, there are none.
fn limit_frames(host: &Host, device: &str, frames: u32) -> Result<()> {
    host.set_features(device, &[(Feature::Tso, frames > 1)])?;
    tool(
        host,
        &format!("ip link set dev {device} gso_max_segs {frames}"),
    )
}
