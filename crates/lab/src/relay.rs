//! `seikan lab relay`: two members of a mesh whose direct path comes and goes, and a relay.
//!
//! ```text
//! A 10.77.1.1 ---- 10.77.1.3 M 10.77.2.3 ---- 10.77.2.1 B
//!              coordinators, relay, coturn
//! ```
//! M is a router between A and B that forwards or does not; without forwarding, only the relay on M
//! reaches both. A TCP stream runs through the tunnel throughout. Each round measures four values:
//! the rate by the relay, the longest gap during the change to the direct path, the rate of the
//! direct path, and the gap after the direct path ends. A stream without a limit fills the relay's
//! receive buffer, which then drops packets; a slower stream shows the loss of the change alone.
//!
//! With coturn installed, it is the only relay of another mesh with members C and D, who are
//! attached to M likewise. Then a stream by the one relay and one by the other alternate, with M
//! not forwarding. The processor time of relay and members shows which of them is the bottleneck.

use std::fs::{self, Permissions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use seikan_load::counters::udp_receive_buffer_errors;
use seikan_load::stats::{Spread, ratio};
use seikan_load::{Ends, LiveOptions, Meter};
use seikan_sys::process::CpuClock;
use seikan_ui::{Interrupt, Progress};
use serde::{Deserialize, Serialize};

use crate::arguments::seconds;
use crate::cleanup::private_directory;
use crate::error::{Doing, LabError, Result};
use crate::host::{Host, network};
use crate::load::{live, wait_reachable};
use crate::mesh::{Member, Mesh, command, patiently};
use crate::process::{Process, Processes};

/// How often is looked whether something has arrived.
const LOOK: Duration = Duration::from_millis(1);
/// Interval of queries of the members' paths.
const ASK: Duration = Duration::from_millis(200);
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Rate of the stream that shows the loss of a change, in Mbit/s: too little to fill a queue.
const PACED: f64 = 500.0;
/// Until a stream has its rate after the way has changed.
const WARMUP: Duration = Duration::from_secs(2);

/// Options of the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, Args)]
pub struct RelayOptions {
    /// Length of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "4", value_parser = seconds::<600>)]
    pub seconds: f64,
    /// Repetitions of each measurement
    #[arg(long, value_name = "ROUNDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
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
    /// While the path changed to direct, all the relay's time before that included.
    pub missing: Missing,
}

/// Lost datagrams, by place.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Missing {
    /// Datagrams that the ends reported missing to each other.
    pub reported: u64,
    /// Datagrams that the ends dropped.
    pub dropped: u64,
    /// Sends (up to 64 datagrams each) that the kernel dropped at the relay's full receive buffer.
    pub relay_queue: u64,
}

/// All rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayReport {
    /// Options of the run.
    pub options: RelayOptions,
    /// From the first packet until an answer came by the relay, in seconds.
    pub first_answer: f64,
    /// Each round.
    pub rounds: Vec<RelayRound>,
    /// Of as many changes to direct under a stream of 500 Mbit/s.
    #[serde(default)]
    pub paced: Vec<Missing>,
    /// By the relay, in Gbit/s.
    pub relayed: Spread,
    /// Directly, in Gbit/s.
    pub direct: Spread,
    /// Median by the relay by median directly.
    pub ratio: Option<f64>,
    /// Against coturn, if it is installed.
    #[serde(default)]
    pub coturn: Option<CoturnReport>,
}

/// A stream by `seikan relay` and one by coturn, in turns.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CoturnReport {
    /// Through Seikan's relay and through coturn, each round.
    pub rounds: Vec<[Relayed; 2]>,
    /// Through Seikan's relay, in Gbit/s.
    pub ours: Spread,
    /// By coturn, in Gbit/s.
    pub coturn: Spread,
    /// Median of Seikan's relay by median of coturn.
    pub ratio: Option<f64>,
}

/// Rate of a stream by a relay, and its cost.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Relayed {
    /// In Gbit/s.
    pub rate: f64,
    /// Processors that the relay kept busy.
    pub relay_busy: f64,
    /// Processors that the two members kept busy, each its tunnel and, by coturn, its client of
    /// TURN.
    pub members_busy: f64,
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
    let dir = private_directory()?;
    // The services, as the daemons' user, pass through to their own folders.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755))
        .doing("open the folder to the services")?;
    let site = Site::create(dir.path(), interrupt)?;
    let (ours, relay) = site.with_relay(interrupt)?;
    let started_at = Instant::now();
    wait_reachable(&site.ends(&ours), PATIENCE, interrupt, || {
        site.check_alive()
    })?;
    let first_answer = started_at.elapsed().as_secs_f64();
    let mut rounds = Vec::new();
    let coturn = site.with_coturn(interrupt)?;
    // Each round of the comparison, and of the slower stream, counts as one of four parts.
    let steps = options.rounds * if coturn.is_some() { 6 } else { 5 };
    live(
        &site.ends(&ours),
        &LiveOptions::default(),
        interrupt,
        |meter| {
            for round in 0..options.rounds {
                let mut step = |part: u32, what: &str| {
                    progress(Progress {
                        fraction: f64::from(4 * round + part) / f64::from(steps),
                        step: format!("round {}  {what}", round + 1),
                    });
                };
                step(0, "by the relay");
                site.wait_for(&ours, true, meter, interrupt)?;
                let relayed = rate(meter, options, interrupt)?;
                step(1, "a direct path opens");
                let (change, missing) = site.open(&ours, meter, interrupt)?;
                step(2, "directly");
                let direct = rate(meter, options, interrupt)?;
                step(3, "the direct path dies");
                site.middle.forward(false)?;
                let death = site.wait_for(&ours, true, meter, interrupt)?;
                rounds.push(RelayRound {
                    relayed,
                    direct,
                    found_after: change.time.as_secs_f64(),
                    stall: change.longest.as_secs_f64(),
                    outage: death.longest.as_secs_f64(),
                    missing,
                });
            }
            Ok(())
        },
    )?;
    let slower = LiveOptions {
        rate: Some(PACED),
        ..LiveOptions::default()
    };
    let paced = live(&site.ends(&ours), &slower, interrupt, |meter| {
        let mut all = Vec::new();
        for round in 0..options.rounds {
            let done = 4 * options.rounds + round;
            progress(Progress {
                fraction: f64::from(done) / f64::from(steps),
                step: format!("round {}  a direct path opens, 500 Mbit/s", round + 1),
            });
            site.wait_for(&ours, true, meter, interrupt)?;
            all.push(site.open(&ours, meter, interrupt)?.1);
            site.middle.forward(false)?;
        }
        Ok(all)
    })?;
    let mut compared = Vec::new();
    if let Some((theirs, coturn)) = &coturn {
        for round in 0..options.rounds {
            let done = 5 * options.rounds + round;
            progress(Progress {
                fraction: f64::from(done) / f64::from(steps),
                step: format!("round {}  by the relay, by coturn", round + 1),
            });
            compared.push([
                site.relayed(&ours, relay, options, interrupt)?,
                site.relayed(theirs, *coturn, options, interrupt)?,
            ]);
        }
    }
    let spread = |of: fn(&RelayRound) -> f64| spread(rounds.iter().map(of));
    let (relayed, direct) = (spread(|r| r.relayed)?, spread(|r| r.direct)?);
    Ok(RelayReport {
        options: *options,
        first_answer,
        paced,
        relayed,
        direct,
        ratio: ratio(relayed.median, direct.median),
        coturn: if compared.is_empty() {
            None
        } else {
            Some(CoturnReport::of(compared)?)
        },
        rounds,
    })
}

fn spread(all: impl Iterator<Item = f64>) -> Result<Spread> {
    Spread::of(&all.collect::<Vec<_>>())
        .ok_or_else(|| LabError::Setup("nothing was measured".into()))
}

impl CoturnReport {
    fn of(rounds: Vec<[Relayed; 2]>) -> Result<CoturnReport> {
        let ours = spread(rounds.iter().map(|[ours, _]| ours.rate))?;
        let coturn = spread(rounds.iter().map(|[_, coturn]| coturn.rate))?;
        Ok(CoturnReport {
            ours,
            coturn,
            ratio: ratio(ours.median, coturn.median),
            rounds,
        })
    }
}

/// Returns the rate of the stream, in Gbit/s.
fn rate(meter: &Meter, options: &RelayOptions, interrupt: &Interrupt) -> Result<f64> {
    interrupt.sleep(WARMUP)?;
    let time = Duration::from_secs_f64(options.seconds);
    Ok(meter.rate_over(time, interrupt)? / 1000.0)
}

/// The hosts and what runs on them.
struct Site {
    middle: Host,
    folder: std::path::PathBuf,
    processes: std::cell::RefCell<Processes>,
}

/// A mesh of two members.
struct Pair {
    hosts: [Host; 2],
    members: [Member; 2],
    /// Processes of both.
    pids: Vec<u32>,
}

/// A change of the way.
struct Change {
    /// How long it took.
    time: Duration,
    /// Longest time in which nothing arrived.
    longest: Duration,
    /// Datagrams reported as missing.
    lost: u64,
}

impl Site {
    fn create(folder: &Path, interrupt: &Interrupt) -> Result<Site> {
        let site = Site {
            middle: Host::create("M", 3)?,
            folder: folder.to_owned(),
            processes: Default::default(),
        };
        site.middle.forward(false)?;
        interrupt.check()?;
        Ok(site)
    }

    /// Creates the mesh with a Seikan relay, at an address that both hosts reach; returns it with
    /// the relay's process.
    fn with_relay(&self, interrupt: &Interrupt) -> Result<(Pair, u32)> {
        let folder = path(&self.folder, "relay");
        let relay = [
            "relay",
            "--dir",
            &folder,
            "--listen",
            "0.0.0.0:3478",
            "--rate",
            "100G",
        ];
        let process = self.start("relay", command(&self.folder, &relay)?)?;
        let secret = patiently("the relay has a secret", interrupt, || {
            Ok(fs::read_to_string(self.folder.join("relay/secret")).ok())
        })?;
        let add = ["10.77.1.3:3478", "--secret", secret.trim()];
        Ok((
            self.mesh([("A", 1), ("B", 2)], 7443, &add, interrupt)?,
            process,
        ))
    }

    /// The mesh with coturn as Debian has it, and its process; `None` where it is not installed.
    fn with_coturn(&self, interrupt: &Interrupt) -> Result<Option<(Pair, u32)>> {
        let mut coturn = Command::new("turnserver");
        coturn
            .args(["-n", "--listening-ip=10.77.1.3", "--relay-ip=10.77.1.3"])
            .args(["--listening-port=5478", "--no-tls", "--no-dtls", "--no-cli"])
            .args(["--use-auth-secret", "--static-auth-secret=lab"])
            .args(["--realm=lab", "--log-file=stdout"])
            .arg(format!("--pidfile={}", path(&self.folder, "coturn.pid")))
            .arg(format!("--userdb={}", path(&self.folder, "coturn.db")));
        let process = match self.start("coturn", coturn) {
            Ok(process) => process,
            Err(LabError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let add = ["10.77.1.3:5478", "--turn", "--secret", "lab"];
        Ok(Some((
            self.mesh([("C", 4), ("D", 5)], 7444, &add, interrupt)?,
            process,
        )))
    }

    /// Creates a mesh with one relay, a coordinator at a port of M, and two new hosts as members.
    fn mesh(
        &self,
        hosts: [(&'static str, u8); 2],
        port: u16,
        relay: &[&str],
        interrupt: &Interrupt,
    ) -> Result<Pair> {
        let [first, second] = hosts.map(|(name, number)| {
            let host = Host::create(name, number)?;
            cable(&host, &self.middle, number)?;
            Ok::<_, LabError>(host)
        });
        let hosts = [first?, second?];
        let folder = self.folder.join(port.to_string());
        fs::create_dir(&folder).doing("make a folder")?;
        let coordinator = ([10, 77, 1, 3], port).into();
        let (mesh, process) = Mesh::start(&self.middle, coordinator, &folder, interrupt)?;
        self.processes.borrow_mut().0.push(process);
        mesh.administer(&self.middle, &[&["relay", "add"], relay].concat())?;
        let mut pids = Vec::new();
        let mut join = |host: &Host| {
            let member = mesh.join(host, host.name, &format!("lab{}", host.name))?;
            let process = member.up(host, &[])?;
            pids.push(process.pid());
            self.processes.borrow_mut().0.push(process);
            Ok::<_, LabError>(member)
        };
        let [first, second] = hosts.each_ref().map(&mut join);
        let members = [first?, second?];
        for (host, member) in hosts.iter().zip(&members) {
            patiently("the members know each other", interrupt, || {
                // Not up yet.
                let status = member.status(host).unwrap_or_default();
                let known = status["peers"].as_array().is_some_and(|p| p.len() == 1);
                Ok(known.then_some(()))
            })?;
        }
        Ok(Pair {
            hosts,
            members,
            pids,
        })
    }

    /// Starts a program on M, and returns its process.
    fn start(&self, name: &str, command: Command) -> Result<u32> {
        let process = Process::start(&self.middle, name, command, &self.folder)?;
        let pid = process.pid();
        self.processes.borrow_mut().0.push(process);
        Ok(pid)
    }

    /// Measures a stream of its own by a mesh's relay; `relay` is the process of that relay.
    fn relayed(
        &self,
        mesh: &Pair,
        relay: u32,
        options: &RelayOptions,
        interrupt: &Interrupt,
    ) -> Result<Relayed> {
        let ends = self.ends(mesh);
        wait_reachable(&ends, PATIENCE, interrupt, || self.check_alive())?;
        live(&ends, &LiveOptions::default(), interrupt, |meter| {
            self.wait_for(mesh, true, meter, interrupt)?;
            let clock = |pids: &[u32]| CpuClock::start(pids.iter().copied());
            let (relay, members) = (clock(&[relay])?, clock(&mesh.pids)?);
            let time = Duration::from_secs_f64(options.seconds);
            let rate = meter.rate_over(time, interrupt)? / 1000.0;
            let busy = |clock: &CpuClock| {
                let used = clock.elapsed()?;
                Ok::<_, LabError>(used.processes.total().as_secs_f64() / used.wall.as_secs_f64())
            };
            Ok(Relayed {
                rate,
                relay_busy: busy(&relay)?,
                members_busy: busy(&members)?,
            })
        })
    }

    fn check_alive(&self) -> Result<()> {
        self.processes.borrow_mut().check_alive()
    }

    /// From the first to the second through the tunnel.
    fn ends<'a>(&self, mesh: &'a Pair) -> Ends<'a> {
        let [from, to] = &mesh.hosts;
        from.to(to, mesh.members[1].address)
    }

    /// Opens the direct path and waits until it is used: how that went, and what did not arrive
    /// meanwhile.
    fn open(&self, mesh: &Pair, meter: &Meter, interrupt: &Interrupt) -> Result<(Change, Missing)> {
        let queue = || self.middle.run(udp_receive_buffer_errors);
        let (dropped, relay_queue) = (self.dropped(mesh)?, queue()?);
        self.middle.forward(true)?;
        let change = self.wait_for(mesh, false, meter, interrupt)?;
        let missing = Missing {
            reported: change.lost,
            dropped: self.dropped(mesh)?.saturating_sub(dropped),
            relay_queue: queue()?.saturating_sub(relay_queue),
        };
        Ok((change, missing))
    }

    /// Datagrams that either end has dropped on their way in.
    fn dropped(&self, mesh: &Pair) -> Result<u64> {
        let mut dropped = 0;
        for (host, member) in mesh.hosts.iter().zip(&mesh.members) {
            let status = member.status(host)?;
            let drops = status["totals"]["inbound"]["drops"].as_object();
            dropped += drops.map_or(0, |d| d.values().filter_map(|n| n.as_u64()).sum());
            dropped += status["receive_queue_drops"].as_u64().unwrap_or(0);
        }
        Ok(dropped)
    }

    /// Waits until both ends send by a relay, or both directly.
    fn wait_for(
        &self,
        mesh: &Pair,
        relayed: bool,
        meter: &Meter,
        interrupt: &Interrupt,
    ) -> Result<Change> {
        let started_at = Instant::now();
        let (mut last, mut seen, mut longest) = (started_at, meter.bytes(), Duration::ZERO);
        let mut last_check = started_at;
        let (mut there, mut lost) = (None, 0);
        let mut reports: [Option<serde_json::Value>; 2] = [None, None];
        // A moment longer: packets of the old path may arrive late.
        while there.is_none_or(|at: Instant| at.elapsed() < WARMUP) {
            interrupt.sleep(LOOK)?;
            let now = Instant::now();
            let bytes = meter.bytes();
            if bytes != seen {
                (last, seen) = (now, bytes);
            }
            longest = longest.max(now - last);
            if last_check.elapsed() >= ASK {
                self.check_alive()?;
                let mut all = true;
                let ends = mesh.hosts.iter().zip(&mesh.members);
                for ((host, member), known) in ends.zip(&mut reports) {
                    let path = &member.status(host)?["peers"][0]["path"];
                    all &= path["relayed"].as_bool() == Some(relayed);
                    // A second's. Two that are alike to the last datagram are one, and the first is
                    // of before.
                    let report = &path["report"];
                    if known
                        .replace(report.clone())
                        .is_some_and(|known| known != *report)
                    {
                        lost += report["lost"].as_u64().unwrap_or(0);
                    }
                }
                last_check = Instant::now();
                there = there.or(all.then_some(now));
                if there.is_none() && started_at.elapsed() > PATIENCE {
                    let path = if relayed {
                        "a relay"
                    } else {
                        "the direct path"
                    };
                    return Err(LabError::Timeout {
                        event: format!("finding {path}"),
                        seconds: PATIENCE.as_secs_f64(),
                    });
                }
            }
        }
        Ok(Change {
            time: there.map_or(Duration::ZERO, |at| at - started_at),
            longest,
            lost,
        })
    }
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_string_lossy().into_owned()
}

/// A cable from a host to M, in a network of its own, with M as the way to everything else.
fn cable(host: &Host, middle: &Host, number: u8) -> Result<()> {
    let port = format!("port{}", host.name);
    crate::host::cable(host, &host.device, middle, &port)?;
    let [near, far] = [1, 3].map(|last| IpAddr::from([10, 77, number, last]));
    for (host, card, address) in [(host, &host.device, near), (middle, &port, far)] {
        host.add_address(card, network(address))?;
        host.set_up(card)?;
    }
    host.add_default_route(far, &host.device)
}
