//! `seikan lab relay`: two members of a mesh whose direct path comes and goes, and a relay.
//!
//! ```text
//! A 10.77.1.1 ---- 10.77.1.3 M 10.77.2.3 ---- 10.77.2.1 B
//!              coordinators, relay, coturn
//! ```
//! M is a router between A and B, and forwards or does not: without it, only the relay on M reaches both. A TCP stream runs through
//! the tunnel all the time; each round has four parts: what it carries by the relay, how long nothing arrives at most while the path
//! changes to direct, what it carries then, and how long nothing arrives when the direct path dies. A stream that takes all that there
//! is fills the relay's receive buffer, which then drops; what a change loses by itself shows another that takes less.
//!
//! Where there is coturn, it is the only relay of another mesh with members C and D, who are at M likewise. Then a stream by the one
//! relay and one by the other take turns, with M not forwarding, and it is noted how busy relay and ends were: who waits for whom.

use std::fs::{self, Permissions};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use seikan_sys::netlink::Route;
use serde::{Deserialize, Serialize};

use crate::Progress;
use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::Host;
use crate::load::{Ends, LiveOptions, Meter, live, wait_reachable};
use crate::machine;
use crate::mesh::{command, patiently, run, turn_names_off};
use crate::process::{Process, Processes};
use crate::stats::{Spread, ratio};
use crate::tunnel::wireguard;
use seikan_sys::process::CpuClock;

/// How often is looked whether something has arrived.
const LOOK: Duration = Duration::from_millis(1);
/// How often is asked by which way members are reached.
const ASK: Duration = Duration::from_millis(200);
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// What the stream carries that shows what a change loses, in Mbit/s: less than would fill a queue.
const PACED: f64 = 500.0;
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
    /// While the path changed to direct, all the relay's time before that included.
    pub missing: Missing,
}

/// What did not arrive, and where it was lost.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Missing {
    /// Datagrams that either end told the other were missing.
    pub reported: u64,
    /// Datagrams that the ends dropped.
    pub dropped: u64,
    /// What the kernel dropped at the relay's full receive buffer: up to 64 datagrams each, of one send.
    pub relay_queue: u64,
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
    /// By ours and by coturn, each round.
    pub rounds: Vec<[Relayed; 2]>,
    /// By ours, in Gbit/s.
    pub ours: Spread,
    /// By coturn, in Gbit/s.
    pub coturn: Spread,
    /// Median by ours by median by coturn.
    pub ratio: Option<f64>,
}

/// What a stream carried by a relay, and what that cost.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Relayed {
    /// In Gbit/s.
    pub rate: f64,
    /// Processors that the relay kept busy.
    pub relay_busy: f64,
    /// Processors that the two members kept busy, each its tunnel and, by coturn, its client of TURN.
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
    let dir =
        tempfile::TempDir::with_prefix("seikan-lab-").map_err(LabError::io("make a folder"))?;
    // The services, as the daemons' user, pass through to their own folders.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755))
        .map_err(LabError::io("open the folder to the services"))?;
    let site = Site::create(dir.path(), interrupt)?;
    let (ours, relay) = site.with_relay(interrupt)?;
    let begun = Instant::now();
    wait_reachable(&site.ends(&ours), PATIENCE, interrupt, || {
        site.check_alive()
    })?;
    let first_answer = begun.elapsed().as_secs_f64();
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
                        what: format!("round {}  {what}", round + 1),
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
                site.forward(false)?;
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
                what: format!("round {}  a direct path opens, 500 Mbit/s", round + 1),
            });
            site.wait_for(&ours, true, meter, interrupt)?;
            all.push(site.open(&ours, meter, interrupt)?.1);
            site.forward(false)?;
        }
        Ok(all)
    })?;
    let mut compared = Vec::new();
    if let Some((theirs, coturn)) = &coturn {
        for round in 0..options.rounds {
            let done = 5 * options.rounds + round;
            progress(Progress {
                fraction: f64::from(done) / f64::from(steps),
                what: format!("round {}  by the relay, by coturn", round + 1),
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
        coturn: match compared.is_empty() {
            true => None,
            false => Some(CoturnReport::of(compared)?),
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

/// What the stream carries, in Gbit/s.
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
struct Mesh {
    hosts: [Host; 2],
    /// The second inside the tunnel.
    target: IpAddr,
    /// Processes of both.
    members: Vec<u32>,
}

/// A change of the way.
struct Change {
    /// How long it took.
    time: Duration,
    /// Longest time in which nothing arrived.
    longest: Duration,
    /// What reports said were missing.
    lost: u64,
}

impl Site {
    fn create(folder: &Path, interrupt: &Interrupt) -> Result<Site> {
        let site = Site {
            middle: Host::create("M", 3)?,
            folder: folder.to_owned(),
            processes: Default::default(),
        };
        site.forward(false)?;
        interrupt.check()?;
        Ok(site)
    }

    /// The mesh with one relay of ours, at an address in reach of both, and the relay's process.
    fn with_relay(&self, interrupt: &Interrupt) -> Result<(Mesh, u32)> {
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
        let process = self.start("relay", None, command(&self.folder, &relay)?)?;
        let secret = patiently("the relay has a secret", interrupt, || {
            Ok(fs::read_to_string(self.folder.join("relay/secret")).ok())
        })?;
        let add = ["10.77.1.3:3478", "--secret", secret.trim()];
        Ok((
            self.mesh([("A", 1), ("B", 2)], "7443", &add, interrupt)?,
            process,
        ))
    }

    /// The mesh with coturn as Debian has it, and its process; `None` where it is not installed.
    fn with_coturn(&self, interrupt: &Interrupt) -> Result<Option<(Mesh, u32)>> {
        let mut coturn = Command::new("turnserver");
        coturn
            .args(["-n", "--listening-ip=10.77.1.3", "--relay-ip=10.77.1.3"])
            .args(["--listening-port=5478", "--no-tls", "--no-dtls", "--no-cli"])
            .args(["--use-auth-secret", "--static-auth-secret=lab"])
            .args(["--realm=lab", "--log-file=stdout"])
            .arg(format!("--pidfile={}", path(&self.folder, "coturn.pid")))
            .arg(format!("--userdb={}", path(&self.folder, "coturn.db")));
        let process = match self.start("coturn", None, coturn) {
            Ok(process) => process,
            Err(LabError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let add = ["10.77.1.3:5478", "--turn", "--secret", "lab"];
        Ok(Some((
            self.mesh([("C", 4), ("D", 5)], "7444", &add, interrupt)?,
            process,
        )))
    }

    /// A mesh with one relay, whose coordinator is at that port of M, and two new hosts as members.
    fn mesh(
        &self,
        hosts: [(&'static str, u8); 2],
        port: &str,
        relay: &[&str],
        interrupt: &Interrupt,
    ) -> Result<Mesh> {
        let folder = &self.folder;
        let [first, second] = hosts.map(|(name, number)| {
            let host = Host::create(name, number)?;
            cable(&host, &self.middle, number)?;
            Ok::<_, LabError>(host)
        });
        let hosts = [first?, second?];
        let name = format!("coordinator-{port}");
        let store = path(folder, &name);
        let listen = format!("10.77.1.3:{port}");
        let words = ["coordinator", "--dir", &store, "--listen", &listen];
        self.start(&name, None, command(folder, &words)?)?;
        let said = patiently("the coordinator makes a token", interrupt, || {
            let token = ["coordinator", "token", "--reusable", "--dir", &store];
            let said = run(&self.middle, folder, &token).ok();
            // Without a certificate it has no pin yet.
            Ok(said.filter(|said| said.contains("--pin")))
        })?;
        let after = |option: &str| {
            let mut words = said.split_whitespace();
            words.find(|word| *word == option);
            words.next().unwrap_or_default().to_owned()
        };
        let (token, pin) = (after("--token"), after("--pin"));
        let add = ["coordinator", "relay", "add", "--dir", &store];
        run(&self.middle, folder, &[&add[..], relay].concat())?;
        let mut mesh = Mesh {
            hosts,
            target: IpAddr::from([0; 4]),
            members: Vec::new(),
        };
        for host in &mesh.hosts {
            let file = path(folder, &format!("lab{}.toml", host.name));
            let url = format!("https://{listen}");
            let join = ["join", &url, "--token", &token, "--pin", &pin];
            let rest = ["--name", host.name, "--iface", &file, "--no-up"];
            run(host, folder, &[&join[..], &rest].concat())?;
            turn_names_off(Path::new(&file))?;
            let up = command(folder, &["up", &file])?;
            let process = Process::start(host, "seikan", up, folder)?;
            mesh.members.push(process.pid());
            let socket = wireguard::socket(&format!("lab{}", host.name));
            self.processes.borrow_mut().0.push(process.leaving(socket));
        }
        let file = format!("lab{}.toml", mesh.hosts[1].name);
        let text = fs::read_to_string(folder.join(file));
        let text = text.map_err(LabError::io("read what was joined"))?;
        let address = text
            .split('"')
            .find_map(|word| word.split('/').next()?.parse().ok());
        mesh.target = address.ok_or_else(|| LabError::Setup("a member has no address".into()))?;
        for host in &mesh.hosts {
            patiently("the members know each other", interrupt, || {
                let known = self.status(host)?["peers"]
                    .as_array()
                    .is_some_and(|p| p.len() == 1);
                Ok(known.then_some(()))
            })?;
        }
        Ok(mesh)
    }

    /// Starts a program on a host, or on M; its process.
    fn start(&self, name: &str, host: Option<&Host>, command: Command) -> Result<u32> {
        let host = host.unwrap_or(&self.middle);
        let process = Process::start(host, name, command, &self.folder)?;
        let pid = process.pid();
        self.processes.borrow_mut().0.push(process);
        Ok(pid)
    }

    /// What a stream of its own carries by a mesh's relay, which is that process.
    fn relayed(
        &self,
        mesh: &Mesh,
        relay: u32,
        options: &RelayOptions,
        interrupt: &Interrupt,
    ) -> Result<Relayed> {
        let ends = self.ends(mesh);
        wait_reachable(&ends, PATIENCE, interrupt, || self.check_alive())?;
        live(&ends, &LiveOptions::default(), interrupt, |meter| {
            self.wait_for(mesh, true, meter, interrupt)?;
            let clock = |pids: &[u32]| {
                let clock = CpuClock::start(pids.iter().copied());
                clock.map_err(|e| LabError::Setup(e.to_string()))
            };
            let (relay, members) = (clock(&[relay])?, clock(&mesh.members)?);
            let time = Duration::from_secs_f64(options.seconds);
            let rate = meter.rate_over(time, interrupt)? / 1000.0;
            let busy = |clock: &CpuClock| {
                let used = clock.elapsed();
                let used = used.map_err(|e| LabError::Setup(e.to_string()))?;
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
        let mut processes = self.processes.borrow_mut();
        processes.0.iter_mut().try_for_each(Process::check_alive)
    }

    /// From the first to the second through the tunnel.
    fn ends<'a>(&self, mesh: &'a Mesh) -> Ends<'a> {
        Ends {
            client: &mesh.hosts[0],
            server: &mesh.hosts[1],
            target: mesh.target,
            sources: &[],
        }
    }

    /// Whether M forwards.
    fn forward(&self, on: bool) -> Result<()> {
        let file = "/proc/sys/net/ipv4/ip_forward";
        let written = self
            .middle
            .run(|| fs::write(file, if on { "1" } else { "0" }))?;
        written.map_err(LabError::io(format!("write {file} of M")))
    }

    /// Opens the direct path and waits until it is used: how that went, and what did not arrive meanwhile.
    fn open(&self, mesh: &Mesh, meter: &Meter, interrupt: &Interrupt) -> Result<(Change, Missing)> {
        let queue = || self.middle.run(machine::udp_receive_buffer_errors);
        let (dropped, relay_queue) = (self.dropped(mesh)?, queue()?);
        self.forward(true)?;
        let change = self.wait_for(mesh, false, meter, interrupt)?;
        let missing = Missing {
            reported: change.lost,
            dropped: self.dropped(mesh)?.saturating_sub(dropped),
            relay_queue: queue()?.saturating_sub(relay_queue),
        };
        Ok((change, missing))
    }

    /// What an end says of itself.
    fn status(&self, host: &Host) -> Result<serde_json::Value> {
        let words = ["status", &format!("lab{}", host.name), "--json"];
        let said = run(host, &self.folder, &words)?;
        serde_json::from_str(&said).map_err(|e| LabError::Setup(format!("status: {e}")))
    }

    /// Datagrams that either end has dropped on their way in.
    fn dropped(&self, mesh: &Mesh) -> Result<u64> {
        let mut dropped = 0;
        for host in &mesh.hosts {
            let status = self.status(host)?;
            let drops = status["totals"]["inbound"]["drops"].as_object();
            dropped += drops.map_or(0, |d| d.values().filter_map(|n| n.as_u64()).sum());
            dropped += status["receive_queue_drops"].as_u64().unwrap_or(0);
        }
        Ok(dropped)
    }

    /// Waits until both ends send by a relay, or both directly.
    fn wait_for(
        &self,
        mesh: &Mesh,
        relayed: bool,
        meter: &Meter,
        interrupt: &Interrupt,
    ) -> Result<Change> {
        let begun = Instant::now();
        let (mut last, mut seen, mut longest) = (begun, meter.bytes(), Duration::ZERO);
        let mut asked = begun;
        let (mut there, mut lost) = (None, 0);
        let mut reports: [Option<serde_json::Value>; 2] = [None, None];
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
                for (host, known) in mesh.hosts.iter().zip(&mut reports) {
                    let path = &self.status(host)?["peers"][0]["path"];
                    all &= path["relayed"].as_bool() == Some(relayed);
                    // A second's. Two that are alike to the last datagram are one, and the first is of before.
                    let report = &path["report"];
                    if known
                        .replace(report.clone())
                        .is_some_and(|known| known != *report)
                    {
                        lost += report["lost"].as_u64().unwrap_or(0);
                    }
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

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_string_lossy().into_owned()
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
