//! The hosts of the measurement, and the programs on them.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use seikan_load::counters::udp_receive_buffer_errors;
use seikan_load::{Ends, LiveOptions, Meter};
use seikan_sys::process::CpuClock;
use seikan_ui::Interrupt;

use super::{Missing, PATIENCE, RelayOptions, Relayed, WARMUP};
use crate::error::{Doing, LabError, Result};
use crate::load::{live, wait_reachable};
use crate::mesh::{Member, Mesh, command, patiently};
use crate::process::Process;
use crate::site::{Host, Link, join};
use crate::tunnel::Started;

/// Interval of checks whether something has arrived.
const LOOK: Duration = Duration::from_millis(1);
/// Interval of queries of the members' paths.
const ASK: Duration = Duration::from_millis(200);

/// The hosts, and the programs on them.
pub(super) struct Site {
    pub(super) middle: Host,
    folder: std::path::PathBuf,
    started: std::cell::RefCell<Started>,
}

/// A mesh of two members.
pub(super) struct Pair {
    members: [Member; 2],
    /// Process ids of both daemons.
    pids: Vec<u32>,
}

/// Result of a change of the path.
pub(super) struct Change {
    /// Duration of the change.
    pub(super) time: Duration,
    /// Longest time in which nothing arrived during the change.
    pub(super) longest: Duration,
    /// Datagrams reported as missing.
    lost: u64,
}

impl Site {
    pub(super) fn create(folder: &Path, interrupt: &Interrupt) -> Result<Site> {
        let site = Site {
            middle: Host::create("M", 3)?,
            folder: folder.to_owned(),
            started: Default::default(),
        };
        site.middle.forward(false)?;
        interrupt.check()?;
        Ok(site)
    }

    /// Creates the mesh with a Seikan relay, at an address that both hosts reach. Returns the mesh
    /// and the relay's process id.
    pub(super) fn with_relay(&self, interrupt: &Interrupt) -> Result<(Pair, u32)> {
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

    /// Creates the mesh with Debian's coturn. Returns the mesh and coturn's process id; `None` if
    /// coturn is not installed.
    pub(super) fn with_coturn(&self, interrupt: &Interrupt) -> Result<Option<(Pair, u32)>> {
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
        let host = |(name, number)| {
            let host = Host::create(name, number)?;
            join_middle(&host, &self.middle, number)?;
            Ok::<_, LabError>(host)
        };
        // Create the hosts first: the coordinator listens on an address of M that faces one of
        // them.
        let hosts = [host(hosts[0])?, host(hosts[1])?];
        let folder = self.folder.join(port.to_string());
        fs::create_dir(&folder).doing("make a folder")?;
        let coordinator = ([10, 77, 1, 3], port).into();
        let (mesh, process) = Mesh::start(&self.middle, coordinator, &folder, interrupt)?;
        self.started.borrow_mut().processes.push(process);
        mesh.administer(&self.middle, &[&["relay", "add"], relay].concat())?;
        let mut pids = Vec::new();
        let mut join = |host: &Host| {
            let member = mesh.join(host, host.name, &format!("lab{}", host.name))?;
            let process = member.up(&[])?;
            pids.push(process.pid());
            self.started.borrow_mut().processes.push(process);
            Ok::<_, LabError>(member)
        };
        let members = [join(&hosts[0])?, join(&hosts[1])?];
        for member in &members {
            patiently("the members know each other", interrupt, || {
                // Not up yet.
                let status = member.status().unwrap_or_default();
                let known = status["peers"].as_array().is_some_and(|p| p.len() == 1);
                Ok(known.then_some(()))
            })?;
        }
        Ok(Pair { members, pids })
    }

    /// Starts a program on M, and returns its process.
    fn start(&self, name: &str, command: Command) -> Result<u32> {
        let process = Process::start(&self.middle, name, command, &self.folder)?;
        let pid = process.pid();
        self.started.borrow_mut().processes.push(process);
        Ok(pid)
    }

    /// Measures a separate stream through a mesh's relay, whose process id is `relay`.
    pub(super) fn relayed(
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

    pub(super) fn check_alive(&self) -> Result<()> {
        self.started.borrow_mut().check_alive()
    }

    /// Returns the ends of a load from the first member to the second, through the tunnel.
    pub(super) fn ends<'a>(&self, mesh: &'a Pair) -> Ends<'a> {
        let [from, to] = &mesh.members;
        from.host.to(&to.host, to.address)
    }

    /// Opens the direct path, and waits until it is used. Returns the duration of the change, and
    /// the losses meanwhile.
    pub(super) fn open(
        &self,
        mesh: &Pair,
        meter: &Meter,
        interrupt: &Interrupt,
    ) -> Result<(Change, Missing)> {
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

    /// Returns the number of received datagrams that both ends have dropped.
    fn dropped(&self, mesh: &Pair) -> Result<u64> {
        let mut dropped = 0;
        for member in &mesh.members {
            let status = member.status()?;
            let drops = status["totals"]["inbound"]["drops"].as_object();
            dropped += drops.map_or(0, |d| d.values().filter_map(|n| n.as_u64()).sum());
            dropped += status["receive_queue_drops"].as_u64().unwrap_or(0);
        }
        Ok(dropped)
    }

    /// Waits until both ends send through a relay, or both directly.
    pub(super) fn wait_for(
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
        // Wait a moment longer: packets of the old path may arrive late.
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
                for (member, known) in mesh.members.iter().zip(&mut reports) {
                    let path = &member.status()?["peers"][0]["path"];
                    all &= path["relayed"].as_bool() == Some(relayed);
                    // Each report covers one second. Two equal reports count as one, and the first
                    // one belongs to the time before.
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

/// Joins a host and M in a network of their own, with M as the default gateway.
fn join_middle(host: &Host, middle: &Host, number: u8) -> Result<()> {
    let [near, far] = [1, 3].map(|last| IpAddr::from([10, 77, number, last]));
    let (port, near, far_end) = (format!("port{}", host.name), [near], [far]);
    let nics = [host.nic(&host.device, &near), middle.nic(&port, &far_end)];
    join(nics, &Link::default())?;
    host.add_default_route(far, &host.device)
}
