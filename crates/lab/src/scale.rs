//! Many members at one switch, each a daemon on a host of its own, with one coordinator; and their
//! resources.
//!
//! ```text
//! coordinator 198.51.100.1 --- switch --- 198.51.100.2, .3, .4 ... members
//! ```

use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use seikan_load::{LiveOptions, Meter};
use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;
use serde::Serialize;

use crate::cleanup::private_directory;
use crate::error::{Doing, Result, usage};
use crate::load::live;
use crate::mesh::{Member, Mesh, patiently};
use crate::nat::flow::{EVERY, Flow};
use crate::process::Process;
use crate::site::{FIRST, Host, INTERNET, Link, Switch, address};

/// Maximum number of real members: somewhat less than the number of addresses in the switch's
/// network.
pub const MOST: usize = 200;
/// Port of the coordinator.
const COORDINATOR: u16 = 7443;
/// Interval of requests between members that talk from time to time.
const NOW_AND_THEN: Duration = Duration::from_secs(1);

/// A member with its daemon. It ends before its host.
struct Real {
    process: Process,
    member: Member,
}

/// All members, and their coordinator.
pub struct ScaleTest {
    reals: Vec<Real>,
    coordinator: Process,
    mesh: Mesh,
    switch: Switch,
    _folder: tempfile::TempDir,
}

/// Resources that a process has used.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Used {
    /// Resident memory at its peak, in bytes.
    pub memory: u64,
    /// Processor time since its start, in seconds.
    pub processor: f64,
}

/// Work of a process that has little to do.
#[derive(Clone, Copy, Debug)]
pub struct Idle {
    /// Share of a processor that it keeps busy.
    pub processor: f64,
    /// How often its threads woke up, per second.
    pub wakeups: f64,
}

impl ScaleTest {
    /// Creates a coordinator without members.
    ///
    /// # Errors
    /// The privilege to create namespaces or a program is missing, or the kernel refuses an
    /// operation; [`Interrupted`](crate::error::LabError::Interrupted).
    pub fn create(interrupt: &Interrupt) -> Result<Self> {
        let folder = private_directory()?;
        let switch = Switch::create("internet", INTERNET)?;
        let at = (address(INTERNET, FIRST), COORDINATOR).into();
        let (mesh, coordinator) = Mesh::start(&switch.host, at, folder.path(), interrupt)?;
        Ok(Self {
            reals: Vec::new(),
            coordinator,
            mesh,
            switch,
            _folder: folder,
        })
    }

    /// Returns the coordinator's address, for clients on its own host
    /// ([`Self::coordinator_namespace`]).
    pub fn coordinator(&self) -> SocketAddr {
        (address(INTERNET, FIRST), COORDINATOR).into()
    }

    /// Returns a join token without limits, and the pin of the coordinator's certificate.
    pub fn token_and_pin(&self) -> [&str; 2] {
        [&self.mesh.token, &self.mesh.pin]
    }

    /// Returns the namespace of the coordinator's host.
    ///
    /// # Errors
    /// Too many open files.
    pub fn coordinator_namespace(&self) -> Result<NetNs> {
        let namespace = self.switch.host.netns().try_clone();
        namespace.doing("keep a namespace open")
    }

    /// Adds a real member and returns its number.
    ///
    /// # Errors
    /// [`Usage`](crate::error::LabError::Usage) if there are [`MOST`] already; an error of the kernel or the
    /// coordinator.
    pub fn add(&mut self) -> Result<usize> {
        let number = self.reals.len();
        if number >= MOST {
            return Err(usage(format!(
                "cannot add a member: {MOST} real members are the maximum"
            )));
        }
        let end = FIRST + 1 + number as u8;
        let host = Host::create("member", end)?;
        let link = Link::default();
        self.switch.connect(&host, &host.device, end, &link)?;
        let interface = format!("c{}x{number}", std::process::id());
        let name = format!("real-{number}");
        let member = self.mesh.join(&host, &name, &interface)?;
        let process = member.up(&[])?;
        self.reals.push(Real { process, member });
        Ok(number)
    }

    /// Waits until a member with a daemon knows `count` others.
    ///
    /// # Errors
    /// [`Timeout`](crate::error::LabError::Timeout); [`Interrupted`](crate::error::LabError::Interrupted).
    pub fn wait_known(&self, number: usize, others: usize, interrupt: &Interrupt) -> Result<()> {
        let real = &self.reals[number];
        patiently("members that know each other", interrupt, || {
            // Not up yet.
            let status = real.member.status().unwrap_or_default();
            let known = status["mesh"]["members"].as_u64().unwrap_or(0);
            Ok((known >= others as u64).then_some(()))
        })
    }

    /// Adds a member. Returns the seconds until the first answer from a member that it did not
    /// know: it joins, its tunnel starts, and it sends.
    ///
    /// # Errors
    /// As [`Self::add`]; no answer.
    pub fn join_and_reach(&mut self, other: usize, interrupt: &Interrupt) -> Result<f64> {
        let started_at = Instant::now();
        let new = self.add()?;
        Ok(self
            .reach_since(started_at, [new, other], interrupt)?
            .as_secs_f64())
    }

    /// Returns the seconds from the first packet of one member to another until its answer.
    ///
    /// # Errors
    /// No answer; [`Interrupted`](crate::error::LabError::Interrupted).
    pub fn reach(&self, pair: [usize; 2], interrupt: &Interrupt) -> Result<f64> {
        let started_at = Instant::now();
        Ok(self.reach_since(started_at, pair, interrupt)?.as_secs_f64())
    }

    fn reach_since(
        &self,
        started_at: Instant,
        [from, to]: [usize; 2],
        interrupt: &Interrupt,
    ) -> Result<Duration> {
        let flow = self.flow([from, to], EVERY)?;
        let event = format!("an answer from {}", self.reals[to].member.interface);
        let first = patiently(&event, interrupt, || Ok(flow.seen().first))?;
        Ok(first - started_at)
    }

    fn flow(&self, pair: [usize; 2], every: Duration) -> Result<Flow> {
        let [from, to] = pair.map(|number| &self.reals[number].member);
        Flow::start(&from.host, &to.host, to.address, every)
    }

    /// Returns the resources that a real member's daemon has used so far.
    ///
    /// # Errors
    /// The daemon has ended.
    pub fn used(&self, number: usize) -> Result<Used> {
        used(&self.reals[number].process)
    }

    /// Returns the resources that the coordinator has used so far.
    ///
    /// # Errors
    /// The coordinator has ended.
    pub fn coordinator_used(&self) -> Result<Used> {
        used(&self.coordinator)
    }

    /// The work of a member while it exchanges a packet a second with each of some others.
    ///
    /// # Errors
    /// No answer; [`Interrupted`](crate::error::LabError::Interrupted).
    pub fn idle(
        &self,
        number: usize,
        others: &[usize],
        time: Duration,
        interrupt: &Interrupt,
    ) -> Result<Idle> {
        let mut flows = Vec::new();
        for other in others {
            let flow = self.flow([number, *other], NOW_AND_THEN)?;
            patiently("an answer", interrupt, || Ok(flow.seen().first))?;
            flows.push(flow);
        }
        let pid = self.reals[number].process.pid();
        let (used, slept) = (self.used(number)?, sleeps(pid)?);
        let started_at = Instant::now();
        interrupt.sleep(time)?;
        let (used_now, slept_now) = (self.used(number)?, sleeps(pid)?);
        let seconds = started_at.elapsed().as_secs_f64();
        Ok(Idle {
            processor: (used_now.processor - used.processor) / seconds,
            wakeups: slept_now.saturating_sub(slept) as f64 / seconds,
        })
    }

    /// Has a TCP stream run from one real member to another as long as `work` does.
    ///
    /// # Errors
    /// What `work` returns; no connection.
    pub fn stream<T>(
        &self,
        [from, to]: [usize; 2],
        interrupt: &Interrupt,
        work: impl FnOnce(&Meter) -> Result<T>,
    ) -> Result<T> {
        let [from, to] = [from, to].map(|number| &self.reals[number].member);
        let ends = from.host.to(&to.host, to.address);
        live(&ends, &LiveOptions::default(), interrupt, work)
    }
}

/// Returns how often the threads of a process have slept so far (`voluntary_ctxt_switches`, proc_pid_status(5)).
fn sleeps(pid: u32) -> Result<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).doing("list the threads of a daemon")?;
    // A thread that has ended has no file any more.
    let texts = tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let counts = texts.filter_map(|text| {
        let mut lines = text.lines();
        let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count?.trim().parse::<u64>().ok()
    });
    Ok(counts.sum())
}

fn used(process: &Process) -> Result<Used> {
    let pid = process.pid();
    let both = seikan_sys::process::memory(pid)
        .and_then(|memory| Ok((memory.peak, seikan_sys::process::cpu_time(pid)?.total())));
    let (memory, processor) = both?;
    Ok(Used {
        memory,
        processor: processor.as_secs_f64(),
    })
}
