//! The set-up of the source of [`batch`](super::batch): hosts S0, S1 and S2. S1 forwards between S0
//! and S2. S0 reaches S1 directly, or through a program that only passes packets on.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;

use ipnet::Ipv4Net;
use seikan_load::Ends;
use seikan_sys::ethtool::Feature;
use seikan_sys::netlink::Route;
use seikan_ui::Interrupt;

use super::crossings::{self, Crossings, Through};
use super::pages::{request_repeatedly, web_server};
use super::{Bench, Experiment, Figures, Row, titled};
use crate::cleanup::private_directory;
use crate::error::Result;
use crate::process::{Process, wait_for};
use crate::program::lab_command;
use crate::site::{Host, Link, join, network};
use crate::tunnel::{READY_PATIENCE, Started};

/// Addresses of the source: S0; S1 towards S0 and towards S2; S2.
const S0: Ipv4Addr = Ipv4Addr::new(192, 168, 188, 194);
const S1: [Ipv4Addr; 2] = [
    Ipv4Addr::new(192, 168, 188, 193),
    Ipv4Addr::new(10, 0, 188, 193),
];
const S2: Ipv4Addr = Ipv4Addr::new(10, 0, 188, 139);
/// Addresses of S0 and S1 on the program's devices.
const INSIDE: [Ipv4Addr; 2] = [Ipv4Addr::new(172, 16, 0, 2), Ipv4Addr::new(172, 16, 0, 1)];
/// NICs of S1, and the program's device.
const PORTS: [&str; 2] = ["eth0", "eth1"];
const DEVICE: &str = "tun0";
const PORT: u16 = 5_555;
pub(super) const MTU: u32 = 1_500;

const BARE: &str = "forwarding, no program";
const PUBLISHED_BARE: f64 = 114_089.42;
/// The driver as it was: each read and each write carries one frame.
const NATIVE: PerCall = PerCall::both(1);
/// The driver as it was changed: four frames in both.
const CHANGED: PerCall = PerCall::both(4);
/// Rows with the program, and their published KB/s. The source changed both sides of the driver at
/// once; here each is changed alone, too.
const PASSED: [(PerCall, Option<f64>); 7] = [
    (NATIVE, Some(102_512.37)),
    (PerCall { read: 4, write: 1 }, None),
    (PerCall { read: 1, write: 4 }, None),
    (CHANGED, Some(111_139.88)),
    (PerCall { read: 64, write: 1 }, None),
    (PerCall { read: 1, write: 64 }, None),
    (PerCall::both(64), None),
];
/// Returns the rows over links of this rate in bit/s: all without a rate; otherwise the rows with
/// published values, the rows with one side changed, and the largest.
fn passed(rate: Option<u64>) -> Vec<(PerCall, Option<f64>)> {
    let one_side = |per_call: PerCall| per_call.read != per_call.write;
    let kept = |per_call: PerCall| {
        rate.is_none() || !one_side(per_call) || per_call.read.max(per_call.write) < 64
    };
    let rows = PASSED.into_iter();
    rows.filter(|(per_call, _)| kept(*per_call)).collect()
}

/// Maximum number of frames in one read from the program's device, and in one write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PerCall {
    pub(super) read: u32,
    pub(super) write: u32,
}

impl PerCall {
    /// Returns the same maximum for reads and writes.
    pub(super) const fn both(frames: u32) -> Self {
        Self {
            read: frames,
            write: frames,
        }
    }
}

impl fmt::Display for PerCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "read {}, write {}", self.read, self.write)
    }
}

/// A row: with the program or without, and the published KB/s.
struct Passage {
    per_call: Option<PerCall>,
    published: Option<f64>,
}

impl fmt::Display for Passage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.per_call {
            Some(per_call) => per_call.fmt(f),
            None => f.write_str(BARE),
        }
    }
}

/// How S0 reaches S2.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// Maximum frames per call of the program between S0 and S1; `None`: no program, S1 only
    /// forwards.
    pub(super) per_call: Option<PerCall>,
    /// Rate of all NICs in bit/s.
    pub(super) rate: Option<u64>,
    /// MTU of all NICs and of the program's device.
    pub(super) mtu: u32,
}

/// Measures every row by the output of `ab`, over links of this rate in bit/s.
pub(super) fn rows(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Experiment) -> Result<()> {
    let through = passed(rate)
        .into_iter()
        .map(|(per_call, published)| Passage {
            per_call: Some(per_call),
            published,
        });
    let bare = Passage {
        per_call: None,
        published: Some(PUBLISHED_BARE),
    };
    let rows: Vec<Passage> = [bare].into_iter().chain(through).collect();
    let measured = bench.rounds(
        &rows,
        |row| row,
        found,
        |bench, row| {
            let setting = Setting {
                per_call: row.per_call,
                rate,
                mtu: MTU,
            };
            let dir = private_directory()?;
            let mut site = Forwarding::start(setting, dir.path(), bench)?;
            let server = web_server(&site.hosts[2], dir.path())?;
            site.counting(|ends| request_repeatedly(bench, ends, server))
        },
    )?;
    let title = "the same through S1, without encryption: frames in a read and in a write";
    let row = |row: &Passage| Row::new(row.to_string(), row.published);
    let figures = measured.rows(row, |(pages, _)| Some(*pages));
    let figures = Figures::new(titled(title, rate), "KB/s", figures);
    let claim = figures.claim(&CHANGED.to_string(), &NATIVE.to_string());
    found.claims.push(claim);
    found.figures.push(figures);
    let title = titled("system calls of the program for the pages", rate);
    found.lists.push(crossings::list(title, &measured));
    Ok(())
}

/// Hosts S0, S1 and S2, and the program between S0 and S1. Dropping it stops the program before the
/// hosts.
pub(super) struct Forwarding {
    started: Started,
    hosts: [Host; 3],
}

impl Forwarding {
    /// Starts everything, and waits until S2 answers.
    pub(super) fn start(setting: Setting, dir: &Path, bench: &Bench<'_>) -> Result<Self> {
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
        site.connect(setting, bench)?;
        let Self { started, hosts } = &mut site;
        let [s0, s1, s2] = &*hosts;
        let to = |address: Ipv4Addr| Route::to(network(address.into()).trunc());
        let own = match setting.per_call {
            None => {
                s0.add_route(&to(S2).via(S1[0].into()))?;
                S0
            }
            Some(per_call) => {
                for (host, own) in [s0, s1].into_iter().zip(INSIDE) {
                    let program = pass_through(host, own, (per_call, setting.mtu), dir)?;
                    started.processes.push(program);
                }
                wait_for_device([s0, s1], started, bench.interrupt)?;
                s0.add_route(&to(S2).device(s0.index(DEVICE)?))?;
                limit_all(hosts, per_call.read)?;
                INSIDE[0]
            }
        };
        s2.add_route(&to(own).via(S1[1].into()))?;
        started.wait(&s0.to(s2, S2.into()), bench.interrupt)?;
        Ok(site)
    }

    /// Joins the hosts by cables, with addresses and without routes; S1 forwards.
    fn connect(&self, setting: Setting, bench: &Bench<'_>) -> Result<()> {
        let [s0, s1, s2] = &self.hosts;
        let link = Link {
            mtu: setting.mtu,
            ..bench.link(setting.rate)
        };
        for (number, (other, address)) in [(s0, S0), (s2, S2)].into_iter().enumerate() {
            let (near, far) = ([S1[number].into()], [address.into()]);
            let nics = [s1.nic(PORTS[number], &near), other.nic(&other.device, &far)];
            join(nics, &link)?;
        }
        s1.forward(true)
    }

    /// Sets the queue length of the program's two devices, in packets.
    pub(super) fn set_queue(&self, packets: u32) -> Result<()> {
        let [s0, s1, _] = &self.hosts;
        let words = format!("txqueuelen {packets}");
        [s0, s1]
            .into_iter()
            .try_for_each(|host| host.set_link(DEVICE, &words))
    }

    /// Sets the frames that a read carries at most.
    pub(super) fn set_frames(&self, frames: u32) -> Result<()> {
        limit_all(&self.hosts, frames)
    }

    /// Runs a load from S2 to S0, and counts the program's calls meanwhile; `None` without a
    /// program.
    pub(super) fn counting<T>(
        &mut self,
        load: impl FnOnce(&Ends<'_>) -> Result<T>,
    ) -> Result<(T, Option<Crossings>)> {
        let [s0, s1, s2] = &self.hosts;
        let ends = s0.to(s2, S2.into());
        let through = Through {
            read: (s1, DEVICE),
            written: (s0, DEVICE),
            programs: &self.started.processes,
        };
        let loaded = through.counting(|| load(&ends))?;
        self.started.check_alive()?;
        Ok(loaded)
    }
}

/// Waits until both ends have the program's device.
fn wait_for_device(ends: [&Host; 2], started: &mut Started, interrupt: &Interrupt) -> Result<()> {
    ends.into_iter().try_for_each(|host| {
        wait_for("the program's device", READY_PATIENCE, interrupt, || {
            started.check_alive()?;
            // Routes need a device that is up.
            let link = host.netlink()?.link(DEVICE).ok();
            Ok(link.filter(|link| link.up))
        })
        .map(drop)
    })
}

/// Starts one end of the program. S1 listens.
fn pass_through(
    host: &Host,
    own: Ipv4Addr,
    (per_call, mtu): (PerCall, u32),
    dir: &Path,
) -> Result<Process> {
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
        .arg(format!("--{role}={}:{PORT}", S1[0]))
        .arg(format!("--mtu={mtu}"));
    if per_call.read != per_call.write {
        command.arg(format!("--frames-per-write={}", per_call.write));
    }
    Process::start(host, "pass-through", command, dir)
}

/// Limits super-packets on the path through the program's device: at the interfaces that make them,
/// and at those that would split them into single frames.
fn limit_all([s0, s1, s2]: &[Host; 3], frames: u32) -> Result<()> {
    for (host, device) in [(s0, DEVICE), (s1, DEVICE), (s2, s2.device.as_str())] {
        limit_frames(host, device, frames)?;
    }
    Ok(())
}

/// Limits super-packets of a device to `frames` segments; 1 disables them.
pub(super) fn limit_frames(host: &Host, device: &str, frames: u32) -> Result<()> {
    host.set_features(device, &[(Feature::Tso, frames > 1)])?;
    host.set_link(device, &format!("gso_max_segs {frames}"))
}
