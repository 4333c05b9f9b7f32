//! `seikan lab relay`: two members of a mesh whose direct path comes and goes, and a relay.
//!
//! ```text
//! A 10.77.1.1 ---- 10.77.1.3 M 10.77.2.3 ---- 10.77.2.1 B
//!                coordinator, relay
//! ```
//! M is a router between A and B, and forwards or does not: without it, only the relay on M reaches both. A TCP stream runs through
//! the tunnel all the time; each round has four parts: what it carries by the relay, how long nothing arrives at most while the path
//! changes to direct, what it carries then, and how long nothing arrives when the direct path dies.

use std::fs;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use seikan_sys::netlink::Route;
use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::Host;
use crate::load::{Ends, LiveOptions, Meter, live, wait_reachable};
use crate::mesh::{Member, Mesh, patiently};
use crate::process::{Process, Processes};
use crate::stats::{Spread, ratio};

/// How often is looked whether something has arrived.
const LOOK: Duration = Duration::from_millis(1);
/// How often is asked by which way members are reached.
const ASK: Duration = Duration::from_millis(200);
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Until a stream has its rate after the way has changed.
const WARMUP: Duration = Duration::from_secs(2);

/// What to measure, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RelayOptions {
    /// Measured seconds of each way.
    pub seconds: f64,
    /// Rounds.
    pub rounds: u32,
}

/// One round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RelayRound {
    /// By the relay, in Gbit/s.
    pub relayed: f64,
    /// Directly, in Gbit/s.
    pub direct: f64,
    /// From when there is a direct path until both ends use it, in seconds.
    pub found_after: f64,
    /// Longest time in which nothing arrived meanwhile, in seconds.
    pub stall: f64,
    /// Longest time in which nothing arrived after the direct path died, in seconds.
    pub outage: f64,
    /// Datagrams that the ends dropped while the path changed to direct, and until the next change.
    pub dropped: u64,
    /// The most that a report of an end said were missing meanwhile, of about a second.
    pub lost: u64,
}

/// All rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayReport {
    /// What was asked for.
    pub options: RelayOptions,
    /// From the first packet until an answer came by the relay, in seconds.
    pub first_answer: f64,
    /// Each round.
    pub rounds: Vec<RelayRound>,
    /// By the relay, in Gbit/s.
    pub relayed: Spread,
    /// Directly, in Gbit/s.
    pub direct: Spread,
    /// Median by the relay by median directly.
    pub ratio: Option<f64>,
}

/// Measures; calls `progress` before every step.
///
/// # Errors
/// A program that does not start, a way that is not found; [`LabError::Interrupted`].
pub fn relay(
    options: &RelayOptions,
    interrupt: &Interrupt,
    progress: &mut dyn FnMut(Progress),
) -> Result<RelayReport> {
    let dir =
        tempfile::TempDir::with_prefix("seikan-lab-").map_err(LabError::io("make a folder"))?;
    let site = Site::create(dir.path(), interrupt)?;
    let begun = Instant::now();
    wait_reachable(&site.ends(), PATIENCE, interrupt, || site.check_alive())?;
    let first_answer = begun.elapsed().as_secs_f64();
    let mut rounds = Vec::new();
    live(&site.ends(), &LiveOptions::default(), interrupt, |meter| {
        for round in 0..options.rounds {
            let mut step = |part: u32, what: &str| {
                progress(Progress {
                    fraction: f64::from(4 * round + part) / f64::from(4 * options.rounds),
                    what: format!("round {}  {what}", round + 1),
                });
            };
            step(0, "by the relay");
            site.wait_for(true, meter, interrupt)?;
            let relayed = rate(meter, options, interrupt)?;
            step(1, "a direct path opens");
            let dropped = site.dropped()?;
            forward(&site.middle, true)?;
            let change = site.wait_for(false, meter, interrupt)?;
            step(2, "directly");
            let direct = rate(meter, options, interrupt)?;
            let dropped = site.dropped()?.saturating_sub(dropped);
            step(3, "the direct path dies");
            forward(&site.middle, false)?;
            let death = site.wait_for(true, meter, interrupt)?;
            rounds.push(RelayRound {
                relayed,
                direct,
                found_after: change.time.as_secs_f64(),
                stall: change.longest.as_secs_f64(),
                outage: death.longest.as_secs_f64(),
                dropped,
                lost: change.lost,
            });
        }
        Ok(())
    })?;
    let spread = |of: fn(&RelayRound) -> f64| {
        let all: Vec<f64> = rounds.iter().map(of).collect();
        Spread::of(&all).ok_or_else(|| LabError::Setup("nothing was measured".into()))
    };
    let (relayed, direct) = (spread(|r| r.relayed)?, spread(|r| r.direct)?);
    Ok(RelayReport {
        options: *options,
        first_answer,
        relayed,
        direct,
        ratio: ratio(relayed.median, direct.median),
        rounds,
    })
}

/// What the stream carries, in Gbit/s.
fn rate(meter: &Meter, options: &RelayOptions, interrupt: &Interrupt) -> Result<f64> {
    interrupt.sleep(WARMUP)?;
    let time = Duration::from_secs_f64(options.seconds);
    Ok(meter.rate_over(time, interrupt)? / 1000.0)
}

/// The hosts and what runs on them.
struct Site {
    a: Host,
    b: Host,
    middle: Host,
    members: [Member; 2],
    processes: std::cell::RefCell<Processes>,
}

/// A change of the way.
struct Change {
    /// How long it took.
    time: Duration,
    /// Longest time in which nothing arrived.
    longest: Duration,
    /// The most that a report said were missing.
    lost: u64,
}

impl Site {
    fn create(folder: &Path, interrupt: &Interrupt) -> Result<Site> {
        let [a, b, middle] = [("A", 1), ("B", 2), ("M", 3)].map(|(n, i)| Host::create(n, i));
        let (a, b, middle) = (a?, b?, middle?);
        cable(&a, &middle, 1)?;
        cable(&b, &middle, 2)?;
        forward(&middle, false)?;
        let at = |port: u16| ([10, 77, 1, 3], port).into();
        let (mesh, coordinator) = Mesh::start(&middle, at(7443), folder, interrupt)?;
        // One relay, at an address in reach of both.
        let relay = mesh.start_relay(&middle, at(3478), "49152-65535", &[], interrupt)?;
        let members = [mesh.join(&a, "A", "labA")?, mesh.join(&b, "B", "labB")?];
        let tunnels = [members[0].up(&a, &[])?, members[1].up(&b, &[])?];
        let processes = [coordinator, relay].into_iter().chain(tunnels).collect();
        let site = Site {
            a,
            b,
            middle,
            members,
            processes: Processes(processes).into(),
        };
        for end in 0..2 {
            patiently("the members know each other", interrupt, || {
                // Not up yet.
                let Ok(status) = site.status(end) else {
                    return site.check_alive().map(|()| None);
                };
                let known = status["peers"].as_array().is_some_and(|p| p.len() == 1);
                Ok(known.then_some(()))
            })?;
        }
        Ok(site)
    }

    fn check_alive(&self) -> Result<()> {
        let mut processes = self.processes.borrow_mut();
        processes.0.iter_mut().try_for_each(Process::check_alive)
    }

    /// From A to B through the tunnel.
    fn ends(&self) -> Ends<'_> {
        Ends {
            client: &self.a,
            server: &self.b,
            target: self.members[1].address,
            sources: &[],
        }
    }

    /// What an end says of itself.
    fn status(&self, end: usize) -> Result<serde_json::Value> {
        self.members[end].status([&self.a, &self.b][end])
    }

    /// Datagrams that either end has dropped on their way in.
    fn dropped(&self) -> Result<u64> {
        let mut dropped = 0;
        for end in 0..2 {
            let status = self.status(end)?;
            let drops = status["totals"]["inbound"]["drops"].as_object();
            dropped += drops.map_or(0, |d| d.values().filter_map(|n| n.as_u64()).sum());
            dropped += status["receive_queue_drops"].as_u64().unwrap_or(0);
        }
        Ok(dropped)
    }

    /// Waits until both ends send by a relay, or both directly.
    fn wait_for(&self, relayed: bool, meter: &Meter, interrupt: &Interrupt) -> Result<Change> {
        let begun = Instant::now();
        let (mut last, mut seen, mut longest) = (begun, meter.bytes(), Duration::ZERO);
        let mut asked = begun;
        let (mut there, mut lost) = (None, 0);
        // A moment longer: what was under way by the old way may come late.
        while there.is_none_or(|at: Instant| at.elapsed() < WARMUP) {
            interrupt.sleep(LOOK)?;
            let now = Instant::now();
            let bytes = meter.bytes();
            if bytes != seen {
                (last, seen) = (now, bytes);
            }
            longest = longest.max(now - last);
            if asked.elapsed() >= ASK {
                self.check_alive()?;
                let mut all = true;
                for end in 0..2 {
                    let path = &self.status(end)?["peers"][0]["path"];
                    all &= path["relayed"].as_bool() == Some(relayed);
                    lost = lost.max(path["report"]["lost"].as_u64().unwrap_or(0));
                }
                asked = Instant::now();
                there = there.or(all.then_some(now));
                if there.is_none() && begun.elapsed() > PATIENCE {
                    let what = if relayed {
                        "a relay"
                    } else {
                        "the direct path"
                    };
                    return Err(LabError::Timeout {
                        what: format!("finding {what}"),
                        seconds: PATIENCE.as_secs_f64(),
                    });
                }
            }
        }
        Ok(Change {
            time: there.map_or(Duration::ZERO, |at| at - begun),
            longest,
            lost,
        })
    }
}

/// Whether M forwards.
fn forward(middle: &Host, on: bool) -> Result<()> {
    let file = "/proc/sys/net/ipv4/ip_forward";
    let written = middle.run(|| fs::write(file, if on { "1" } else { "0" }))?;
    written.map_err(LabError::io(format!("write {file} of M")))
}

/// A cable from a host to M, in a network of its own, with M as the way to everything else.
fn cable(host: &Host, middle: &Host, number: u8) -> Result<()> {
    let failed = |e: seikan_sys::netlink::NetlinkError| LabError::Setup(e.to_string());
    let (ours, theirs) = (host.netlink()?, middle.netlink()?);
    let port = format!("port{}", host.name);
    let peer = Some(middle.netns().as_fd());
    ours.create_veth(&host.device, &port, peer)
        .map_err(failed)?;
    for (netlink, card, last) in [(&ours, &host.device, 1), (&theirs, &port, 3)] {
        let index = netlink.link(card).map_err(failed)?.index;
        let net = ipnet::IpNet::new_assert(IpAddr::from([10, 77, number, last]), 24);
        netlink.add_address(index, net).map_err(failed)?;
        netlink.set_up(index).map_err(failed)?;
    }
    let all = ipnet::IpNet::new_assert(IpAddr::from([0; 4]), 0);
    let gateway = IpAddr::from([10, 77, number, 3]);
    ours.add_route(&Route::to(all).via(gateway)).map_err(failed)
}
