//! `seikan lab nat`: the paths that pairs of hosts find through NATs, compared with theory.
//!
//! A [`plan`] lists the NATs, and for each pair the expected path and the reason. Each pair is a
//! cell with its own namespaces, coordinator, relay and two daemons; several cells run side by
//! side. A is up and known; then B starts and sends at once. Times count from that start and
//! include the start of the program. [`events`] are interruptions of a pair that exchanges packets,
//! with the length of the gap.

mod clock;
mod event;
pub(crate) mod flow;
mod plan;
mod site;

use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

pub use event::{EventReport, EventRow, events};
pub use plan::{Cell, Clocks, Event, Expect, Family, Happening, Nat, PLAN, PathKind, Plan};

use crate::cleanup::private_directory;
use crate::error::Result;
use crate::mesh::{Member, Mesh, patiently};
use crate::process::Process;
use crate::tunnel::Started;
use flow::{EVERY, Flow};
use seikan_ui::Interrupt;
use seikan_ui::Progress;
use site::Site;

/// Time from the start within which a possible direct path must be in use.
pub const DIRECT_WITHIN: Duration = Duration::from_secs(3);
/// Time from the start within which IPv6 must be in use, where IPv4 may be used before IPv6 is
/// found to be as good.
const PREFERRED_WITHIN: Duration = Duration::from_secs(5);
/// Time from the start within which the first answer must come through a relay, where there is no
/// direct path.
pub const RELAY_WITHIN: Duration = Duration::from_secs(1);
/// Time to wait for expected results, and then for unexpected ones.
const PATIENCE: Duration = Duration::from_secs(10);
const SETTLED_AFTER: Duration = Duration::from_secs(3);
/// Interval of queries of the members' paths.
const ASK: Duration = Duration::from_millis(100);
/// Ports of the coordinator and of the relays.
const COORDINATOR: u16 = 7443;
const RELAY: u16 = 3478;
/// The first port for pairs of the first relay, and the number of ports of each relay.
const PAIRS: u16 = 40_000;
const PAIRS_EACH: u16 = 1000;
/// Ports for pairs of the relay that is reached by IPv6.
const PAIRS6: &str = "50000-50999";

/// Options of the run.
#[derive(Clone, Debug, Args)]
pub struct NatOptions {
    /// NATs whose pairs to run, or events [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Pairs in parallel
    #[arg(long, value_name = "PAIRS", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub jobs: u8,
}

/// Result of a pair. Times are in seconds from the start of the second daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NatRow {
    /// The cell, by the names of its NATs.
    pub cell: String,
    /// NATs of A and of B.
    pub nats: [String; 2],
    /// Expected path of both.
    pub expected: PathKind,
    /// Why.
    pub why: String,
    /// Limit of the time until a direct path is in use, if the pair is expected to start at a
    /// relay.
    #[serde(default)]
    pub within: Option<f64>,
    /// Paths by which A and B send; `None`: nothing arrived.
    pub found: [PathKind; 2],
    /// Address family that each end uses, if it matters.
    #[serde(default)]
    pub family: Option<(Family, [Option<Family>; 2])>,
    /// Time until the first answer.
    pub first_answer: Option<f64>,
    /// Time until both ends used the direct path.
    pub direct: Option<f64>,
    /// NAT type that each daemon should detect, and the type that it detected.
    pub seen: [[String; 2]; 2],
    /// Differences from the expected result; empty if there are none.
    pub wrong: Vec<String>,
}

/// Results of all pairs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NatReport {
    /// Delay of a packet to or from host B, in milliseconds.
    pub delay_ms: f64,
    /// Each pair.
    pub rows: Vec<NatRow>,
}

impl NatReport {
    /// Whether any result differs from the expected one.
    pub fn failed(&self) -> bool {
        self.rows.iter().any(|row| !row.wrong.is_empty())
    }
}

/// Plays all pairs, and calls `progress` before each.
///
/// # Errors
/// A program does not start, or the kernel refuses an operation;
/// [`Usage`](crate::error::LabError::Usage)(crate::LabError::Usage);
/// [`Interrupted`](crate::error::LabError::Interrupted)(crate::LabError::Interrupted).
pub fn nat(
    plan: &Plan,
    options: &NatOptions,
    interrupt: &Interrupt,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<NatReport> {
    for name in &options.only {
        plan.nat(name)?;
    }
    let wanted = |cell: &Cell| {
        let only = &options.only;
        only.is_empty() || cell.nats.iter().any(|nat| only.contains(&nat.name))
    };
    let mut cells = plan.cells()?;
    cells.retain(wanted);
    let delay = Duration::from_secs_f64(plan.delay_ms / 1000.0);
    let rows = side_by_side(&cells, options.jobs, progress, |number, cell, progress| {
        interrupt.check()?;
        progress(cell.name());
        let setting = Setting::of(cell, delay, number);
        Stage::set(&setting, interrupt)?.play(cell, interrupt)
    })?;
    Ok(NatReport {
        delay_ms: plan.delay_ms,
        rows,
    })
}

/// Returns the times in seconds from the first packet to a known, directly reachable member until
/// its answer, one for each one-way delay.
///
/// # Errors
/// A program does not start, the kernel refuses an operation, or there is no answer;
/// [`Interrupted`](crate::error::LabError::Interrupted)(crate::LabError::Interrupted).
pub fn first_packets(delays: &[Duration], interrupt: &Interrupt) -> Result<Vec<f64>> {
    let open = Plan::parse(PLAN)?.nat("open")?;
    let cell = Cell {
        nats: [open.clone(), open],
        shared: Vec::new(),
        path: PathKind::Direct,
        family: None,
        why: String::new(),
        within: None,
    };
    let one = |(number, delay): (usize, &Duration)| {
        let setting = Setting::of(&cell, *delay, number);
        let mut stage = Stage::set(&setting, interrupt)?;
        stage.start_b(&[])?;
        patiently("the members know each other", interrupt, || {
            stage.check_alive()?;
            let known = |end: usize| {
                // The tunnel may not be up yet.
                let status = stage.status(end).unwrap_or_default();
                !status["peers"][0]["path"]["candidates"].is_null()
            };
            Ok((known(0) && known(1)).then_some(()))
        })?;
        // Resolve the neighbours' MAC addresses beforehand: a link to a router has no such delay.
        let [a, b] = &stage.members;
        let outside = Flow::start(&b.host, &a.host, stage.site.open_a(), EVERY)?;
        patiently("an answer", interrupt, || Ok(outside.seen().first))?;
        drop(outside);
        interrupt.sleep(SETTLED_AFTER)?;
        let started_at = Instant::now();
        let flow = stage.flow()?;
        let answer = patiently("an answer", interrupt, || Ok(flow.seen().first))?;
        Ok((answer - started_at).as_secs_f64())
    };
    delays.iter().enumerate().map(one).collect()
}

/// Runs `work` for each item and its number, several at a time. The first error ends it. The work
/// reports each step that it starts.
fn side_by_side<I: Sync, T: Send>(
    items: &[I],
    jobs: u8,
    progress: &mut (dyn FnMut(Progress) + Send),
    work: impl Fn(usize, &I, &dyn Fn(String)) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let progress = Mutex::new(progress);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(number) else {
                        break;
                    };
                    let begin = |step: String| {
                        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                        progress(Progress {
                            fraction: number as f64 / items.len() as f64,
                            step,
                        });
                    };
                    let outcome = work(number, item, &begin);
                    if outcome.is_err() {
                        next.store(items.len(), Ordering::Relaxed);
                    }
                    let mut all = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push((number, outcome));
                }
            });
        }
    });
    let mut all = outcomes
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    all.sort_by_key(|(number, _)| *number);
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

/// Settings of a cell.
struct Setting<'a> {
    cell: &'a Cell,
    delay: Duration,
    /// Number of the cell among all that are played, for names.
    number: usize,
    relays: u16,
    clocks: Clocks,
}

impl<'a> Setting<'a> {
    /// Returns the settings with one relay and right clocks.
    fn of(cell: &'a Cell, delay: Duration, number: usize) -> Self {
        Self {
            cell,
            delay,
            number,
            relays: 1,
            clocks: Clocks::default(),
        }
    }
}

/// A cell in which A is up.
struct Stage {
    members: [Member; 2],
    /// The coordinator's process, while it runs.
    coordinator: Option<Process>,
    relays: Vec<Process>,
    /// Processes of A and B.
    tunnels: Started,
    mesh: Mesh,
    site: Site,
    _folder: tempfile::TempDir,
}

impl Stage {
    /// Creates hosts and services, and starts A.
    fn set(setting: &Setting<'_>, interrupt: &Interrupt) -> Result<Stage> {
        let folder = private_directory()?;
        let site = Site::create(setting.cell, setting.delay)?;
        let (internet, address) = site.internet();
        let at = |port| (address, port).into();
        let (mesh, coordinator) = Mesh::start(internet, at(COORDINATOR), folder.path(), interrupt)?;
        let clock = clock::environment(setting.clocks.relay.as_deref())?;
        let relay = |number: u16| {
            let first = PAIRS + PAIRS_EACH * number;
            let ports = format!("{first}-{}", first + PAIRS_EACH - 1);
            mesh.start_relay(internet, at(RELAY + number), &ports, &clock, interrupt)
        };
        let mut relays = (0..setting.relays).map(relay).collect::<Result<Vec<_>>>()?;
        if setting.cell.nats.iter().any(|nat| nat.ipv6) {
            let at = (site.internet6(), RELAY + setting.relays).into();
            relays.push(mesh.start_relay(internet, at, PAIRS6, &clock, interrupt)?);
        }
        let join = |end: usize| {
            let host = site.host(end);
            let number = setting.number;
            let interface = format!("n{}x{number}{}", std::process::id(), host.name);
            mesh.join(host, host.name, &interface)
        };
        let members = [join(0)?, join(1)?];
        let a = members[0].up(&[])?;
        let mut stage = Stage {
            members,
            coordinator: Some(coordinator),
            relays,
            tunnels: vec![a].into(),
            mesh,
            site,
            _folder: folder,
        };
        patiently("host A is up", interrupt, || {
            stage.check_alive()?;
            // The tunnel may not be up yet.
            let Ok(status) = stage.status(0) else {
                return Ok(None);
            };
            let connected = status["mesh"]["contact"] == "connected";
            // Servers that have answered so far.
            let seen = status["mesh"]["stun"].as_array().map_or(0, Vec::len);
            Ok((connected && seen > stage.relays.len()).then_some(()))
        })?;
        Ok(stage)
    }

    fn check_alive(&mut self) -> Result<()> {
        let services = self.coordinator.iter_mut().chain(&mut self.relays);
        let mut all = services.chain(&mut self.tunnels.processes);
        all.try_for_each(Process::check_alive)
    }

    fn start_b(&mut self, clock: &[(String, String)]) -> Result<()> {
        let b = self.members[1].up(clock)?;
        self.tunnels.processes.push(b);
        Ok(())
    }

    fn status(&self, end: usize) -> Result<serde_json::Value> {
        self.members[end].status()
    }

    /// Returns the path by which an end sends.
    fn path(&self, end: usize) -> Result<PathKind> {
        let status = self.status(end)?;
        let path = &status["peers"][0]["path"];
        Ok(match path["relayed"].as_bool() {
            Some(false) => PathKind::Direct,
            Some(true) => PathKind::Relay,
            None => PathKind::None,
        })
    }

    /// Returns the address family by which an end sends.
    fn family(&self, end: usize) -> Result<Option<Family>> {
        let endpoint = &self.status(end)?["peers"][0]["path"]["endpoint"];
        let endpoint = endpoint.as_str().and_then(|at| at.parse().ok());
        Ok(endpoint.map(|at: SocketAddr| {
            if at.is_ipv6() {
                Family::IPv6
            } else {
                Family::IPv4
            }
        }))
    }

    /// Starts requests from B to A.
    fn flow(&self) -> Result<Flow> {
        let [a, b] = &self.members;
        Flow::start(&b.host, &a.host, a.address, EVERY)
    }

    /// Starts B, and observes the paths of both ends.
    fn play(&mut self, cell: &Cell, interrupt: &Interrupt) -> Result<NatRow> {
        let started_at = Instant::now();
        self.start_b(&[])?;
        let flow = self.flow()?;
        let mut direct = None;
        let mut found = [PathKind::None; 2];
        loop {
            let answered = flow.seen().first.is_some();
            if answered {
                found = [self.path(0)?, self.path(1)?];
                let right = match cell.family {
                    Some(family) => [self.family(0)?, self.family(1)?] == [Some(family); 2],
                    None => true,
                };
                if direct.is_none() && right && found == [PathKind::Direct; 2] {
                    direct = Some(started_at.elapsed());
                }
            } else {
                self.check_alive()?;
            }
            let has_settled = started_at.elapsed() > SETTLED_AFTER;
            let settled = match cell.path {
                PathKind::Direct => direct.is_some(),
                // By then, a direct path that theory excludes would have been found.
                PathKind::Relay => answered && has_settled,
                PathKind::None => has_settled,
            };
            let within = cell.within.map_or(Duration::ZERO, Duration::from_secs_f64);
            if settled || started_at.elapsed() > within + PATIENCE {
                break;
            }
            interrupt.sleep(ASK)?;
        }
        let first_answer = flow.seen().first.map(|at| at - started_at);
        drop(flow);
        let family = match cell.family {
            Some(expected) => Some((expected, [self.family(0)?, self.family(1)?])),
            None => None,
        };
        let seen = self.seen(cell, interrupt)?;
        let mut row = NatRow {
            cell: cell.name(),
            nats: cell.nats.each_ref().map(|nat| nat.name.clone()),
            expected: cell.path,
            why: cell.why.clone(),
            within: cell.within,
            found,
            family,
            first_answer: first_answer.map(|time| time.as_secs_f64()),
            direct: direct.map(|time| time.as_secs_f64()),
            seen,
            wrong: Vec::new(),
        };
        row.compare(!cell.shared.is_empty());
        Ok(row)
    }

    /// Returns the NAT type that each end should detect, and the type that it detected.
    fn seen(&self, cell: &Cell, interrupt: &Interrupt) -> Result<[[String; 2]; 2]> {
        let mut all = [const { [String::new(), String::new()] }; 2];
        for (end, nat) in cell.nats.iter().enumerate() {
            // Unresponsive servers are queried for some seconds.
            let deadline = Instant::now() + PATIENCE;
            loop {
                let status = self.status(end)?;
                let of = |family: &str| status["mesh"][family].as_str().unwrap_or("?").to_owned();
                let seen = match (of("nat4"), of("nat6")) {
                    // Behind IPv6 there is no NAT.
                    (_, odd) if nat.ipv6 && odd != "open" => format!("{odd} by IPv6"),
                    (nat4, _) => nat4,
                };
                let done = seen == nat.seen || Instant::now() > deadline;
                all[end] = [nat.seen.clone(), seen];
                if done || !cell.shared.is_empty() {
                    break;
                }
                interrupt.sleep(ASK)?;
            }
        }
        Ok(all)
    }
}

impl NatRow {
    /// Lists the differences from the expected result. NATs seen from behind shared boxes belong to
    /// these boxes, too.
    fn compare(&mut self, shared: bool) {
        let ends = self.found;
        let found = match self.first_answer {
            None => PathKind::None,
            Some(_) if ends == [PathKind::Direct; 2] => PathKind::Direct,
            Some(_) => PathKind::Relay,
        };
        if found != self.expected {
            self.wrong.push("another path".to_owned());
        }
        if let Some((expected, found)) = self.family
            && found != [Some(expected); 2]
        {
            self.wrong.push(format!("not by {expected:?}"));
        }
        let late = |time: Option<f64>, within: Duration| {
            time.is_some_and(|time| time > within.as_secs_f64())
        };
        let late = match self.expected {
            PathKind::Direct => match self.within {
                None if self.family.is_some() => late(self.direct, PREFERRED_WITHIN),
                None => late(self.direct, DIRECT_WITHIN),
                Some(within) => {
                    late(self.direct, Duration::from_secs_f64(within))
                        || late(self.first_answer, RELAY_WITHIN)
                }
            },
            PathKind::Relay => late(self.first_answer, RELAY_WITHIN),
            PathKind::None => false,
        };
        if late {
            self.wrong.push("late".to_owned());
        }
        for (end, [expected, seen]) in ["A", "B"].iter().zip(&self.seen) {
            if expected != seen && !shared {
                self.wrong.push(format!(
                    "{end} classifies its NAT as {seen}, not {expected}"
                ));
            }
        }
    }
}
