//! Tunnels between two hosts: none (the raw link), Seikan with both protocols, and other
//! implementations.
//!
//! A [`Tunnel`] reports whether it can run here, and if not, why. [`start`] starts it between new
//! hosts and waits until the far end answers through it. Programs are looked up in the directories
//! of `$SEIKAN_PEERS` (colon separated), then on `PATH`. One file per program family.

pub mod crude;
pub(crate) mod device;
mod forwarded;
pub(crate) mod middle;
mod mixed;
mod nebula;
mod openvpn;
pub(crate) mod openvswitch;
pub mod pass_through;
pub(crate) mod raw;
pub(crate) mod seikan;
pub(crate) mod wireguard;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use seikan_load::Ends;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::{PrivateKey, PublicKey};
use seikan_ui::Interrupt;

use crate::cleanup::private_directory;
use crate::error::{Doing, LabError, Result, setup};
use crate::load::wait_reachable;
use crate::process::Process;
use crate::program;
use crate::site::{Host, Hosts, Link, LinkKind};

/// Maximum time until a tunnel's far end answers.
pub(crate) const READY_PATIENCE: Duration = Duration::from_secs(15);
/// UDP port the tunnels listen on.
pub(crate) const PORT: u16 = 51820;

/// A tunnel from host A to host B, or the link itself.
pub trait Tunnel: Send + Sync {
    /// Its name in reports and in `--only`.
    fn name(&self) -> &str;

    /// Whether it is Seikan; reports highlight it.
    fn is_own(&self) -> bool {
        false
    }

    /// Whether it is compared when no names are given.
    fn by_default(&self) -> bool {
        true
    }

    /// Returns the programs that it runs, the one that carries packets first.
    fn programs(&self) -> &[&str] {
        &[]
    }

    /// Checks whether the tunnel can run here.
    ///
    /// # Errors
    /// The reason.
    fn availability(&self) -> Result<()> {
        match self.programs() {
            [] => Ok(()),
            programs => program::need(programs),
        }
    }

    /// Returns the version of another program than this one, in one line; `None` if it is unknown.
    fn version(&self) -> Option<String> {
        match self.programs().first()? {
            &program::LAB => None,
            name => version_line(name, "--version"),
        }
    }

    /// Returns the link that the tunnel needs, given the requested one.
    fn link(&self, asked: Link) -> Link {
        asked
    }

    /// Starts the tunnel in both hosts. Files are written to `dir`, which only the lab's user can
    /// read.
    ///
    /// # Errors
    /// The reason why it does not start.
    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        start_ends(hosts.both(), dir, interrupt, &mut |end| {
            self.start_end(end, interrupt)
        })
    }

    /// Starts one end, for tunnels that consist only of two ends.
    ///
    /// # Errors
    /// As [`Tunnel::up`].
    fn start_end(&self, _end: &End<'_>, _interrupt: &Interrupt) -> Result<Process> {
        Err(setup(format!(
            "{} has no single ends: this is a bug",
            self.name()
        )))
    }

    /// Returns the interface that packets cross in the host in the middle, if the link replaces the
    /// tunnel.
    fn crossed(&self) -> Option<&str> {
        None
    }

    /// Returns the status of the end in `host`, as JSON; `None` if there is none. `dir` is the
    /// directory passed to [`Tunnel::up`].
    fn status(&self, _host: &Host, _dir: &Path) -> Option<serde_json::Value> {
        None
    }

    /// Returns the ends of a load through the tunnel.
    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        match self.crossed() {
            Some(_) => hosts.over_link(),
            None => hosts.through_tunnel(),
        }
    }

    /// Returns the tunnel's interface in `host`. Without a tunnel, it is the interface on the link;
    /// in the middle, the port to A.
    fn device(&self, host: &Host) -> String {
        match (self.crossed(), host.name) {
            (Some(interface), "M") => interface.to_owned(),
            (Some(_), _) => host.device.clone(),
            (None, _) => device_name(host),
        }
    }
}

impl fmt::Debug for dyn Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Running programs of a tunnel. Dropping this stops the programs.
#[derive(Debug, Default)]
pub struct Started {
    /// Programs of the tunnel.
    pub processes: Vec<Process>,
    /// Directory of a virtual switch's sockets, for changes of its settings while it runs.
    pub orders: Option<PathBuf>,
}

impl From<Vec<Process>> for Started {
    fn from(processes: Vec<Process>) -> Self {
        Self {
            processes,
            orders: None,
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Both ends of a tunnel notify each other when they end, so ask all before waiting for any.
        for process in &mut self.processes {
            process.terminate();
        }
    }
}

impl Started {
    /// An error if a program of the tunnel has ended.
    ///
    /// # Errors
    /// [`LabError::ChildExited`].
    pub fn check_alive(&mut self) -> Result<()> {
        self.processes.iter_mut().try_for_each(Process::check_alive)
    }

    /// Largest resident memory of any of its programs so far, in bytes; `None` without programs.
    pub fn peak_rss(&self) -> Option<u64> {
        let all = self.processes.iter();
        all.filter_map(Process::peak_rss).max()
    }

    /// Waits until the other end answers. An error contains the output of the programs.
    pub(crate) fn wait(&mut self, ends: &Ends<'_>, interrupt: &Interrupt) -> Result<()> {
        let answer = wait_reachable(ends, READY_PATIENCE, interrupt, || self.check_alive());
        answer.map_err(|error| self.explain(error))
    }

    /// Adds the output of the programs to a time-out.
    pub(crate) fn explain(&self, error: LabError) -> LabError {
        let LabError::Timeout { .. } = error else {
            return error;
        };
        let all = self.processes.iter();
        let words: Vec<String> = all.map(Process::last_words).collect();
        setup(format!(
            "{error}; the end of the programs' logs:\n{}",
            words.join("\n")
        ))
    }
}

/// A tunnel that answers, with its hosts. Fields drop in this order: programs, hosts, directory.
#[derive(Debug)]
pub struct Running {
    /// Its programs.
    pub started: Started,
    /// The hosts at its ends.
    pub hosts: Hosts,
    /// Time from the start until the first answer.
    pub ready_after: Duration,
    tunnel: Arc<dyn Tunnel>,
    dir: tempfile::TempDir,
}

impl Running {
    /// An error if a program of the tunnel has ended.
    ///
    /// # Errors
    /// [`LabError::ChildExited`].
    pub fn check_alive(&mut self) -> Result<()> {
        self.started.check_alive()
    }

    /// Returns the ends of a load through the tunnel.
    pub(crate) fn ends(&self) -> Ends<'_> {
        self.tunnel.ends(&self.hosts)
    }

    /// Its interface in a host.
    pub(crate) fn device(&self, host: &Host) -> String {
        self.tunnel.device(host)
    }

    /// Returns the status of both ends, host A first; empty if there is none.
    pub(crate) fn status(&self) -> Vec<serde_json::Value> {
        let status = |host| self.tunnel.status(host, self.dir.path());
        self.hosts.both().into_iter().filter_map(status).collect()
    }
}

/// Brings `tunnel` up between two new hosts and waits for an answer through it.
///
/// # Errors
/// The tunnel cannot start, with the end of its log; [`LabError::Timeout`] when the far end does
/// not answer.
pub fn start(tunnel: &Arc<dyn Tunnel>, link: Link, interrupt: &Interrupt) -> Result<Running> {
    start_between(tunnel, Hosts::create(tunnel.link(link))?, interrupt)
}

/// Brings `tunnel` up between existing hosts and waits for an answer through it.
///
/// # Errors
/// As with [`start`].
pub fn start_between(
    tunnel: &Arc<dyn Tunnel>,
    hosts: Hosts,
    interrupt: &Interrupt,
) -> Result<Running> {
    let dir = private_directory()?;
    let begin = Instant::now();
    let mut started = tunnel.up(&hosts, dir.path(), interrupt)?;
    started.wait(&tunnel.ends(&hosts), interrupt)?;
    Ok(Running {
        started,
        hosts,
        ready_after: begin.elapsed(),
        tunnel: Arc::clone(tunnel),
        dir,
    })
}

/// One end of a tunnel to start.
pub struct End<'a> {
    /// The host of this end.
    pub host: &'a Host,
    /// The host of the other end.
    pub other: &'a Host,
    pub(crate) own: &'a PrivateKey,
    pub(crate) peer: PublicKey,
    /// Directory for its files.
    pub(crate) dir: &'a Path,
}

impl End<'_> {
    /// Its interface.
    pub(crate) fn device(&self) -> String {
        device_name(self.host)
    }

    /// Starts a program, which is called `name` in its log.
    pub(crate) fn run(&self, name: &str, command: Command) -> Result<Process> {
        Process::start(self.host, name, command, self.dir)
    }
}

/// Starts both ends of a tunnel with fresh keys, the second first.
pub(crate) fn start_ends(
    [a, b]: [&Host; 2],
    dir: &Path,
    interrupt: &Interrupt,
    start: &mut dyn FnMut(&End<'_>) -> Result<Process>,
) -> Result<Started> {
    let keys = [(); 2].map(|()| PrivateKey::generate(&mut SystemRandom));
    let mut started = Started::default();
    for (host, other, [own, peer]) in [(b, a, [1, 0]), (a, b, [0, 1])] {
        interrupt.check()?;
        let (own, peer) = (&keys[own], keys[peer].public());
        let end = End {
            host,
            other,
            own,
            peer,
            dir,
        };
        started.processes.push(start(&end)?);
    }
    Ok(started)
}

/// Returns all tunnels, in the order of reports: raw link, Seikan, others, Seikan with others,
/// tunnels without an interface. With `idle_peers`, also Seikan with this many additional peers that
/// never send; with `uplink`, also Seikan with this `uplink-rate`.
pub fn all(idle_peers: u32, uplink: Option<&str>) -> Vec<Arc<dyn Tunnel>> {
    fn shared(tunnel: impl Tunnel + 'static) -> Arc<dyn Tunnel> {
        Arc::new(tunnel)
    }
    let mut all = vec![];
    all.extend([false, true].map(|without_offload| shared(raw::Raw { without_offload })));
    for protocol in ["native", "wireguard"] {
        all.push(shared(seikan::Seikan::new(protocol, 0)));
        if idle_peers > 0 {
            all.push(shared(seikan::Seikan::new(protocol, idle_peers)));
        }
        all.extend(uplink.map(|rate| shared(seikan::Seikan::limited(protocol, rate))));
    }
    all.push(shared(seikan::Seikan::ethernet()));
    all.push(shared(seikan::Seikan::unrepaired()));
    all.extend(wireguard::all().map(shared));
    all.extend(openvpn::all().map(shared));
    all.push(shared(nebula::Nebula));
    all.push(shared(crude::Crude::new(CRUDE, &Changes::default())));
    all.push(shared(middle::Bridge));
    all.push(shared(openvswitch::OpenVSwitch));
    all.push(shared(middle::Naive));
    all.extend([false, true].map(|spread| shared(middle::NaiveHosts { spread })));
    all.extend(wireguard::all().map(|tunnel| shared(mixed::Mixed::new(tunnel))));
    all.extend(forwarded::all().map(shared));
    all
}

/// Name of the crude tunnel.
pub(crate) const CRUDE: &str = "crude";
/// A bridge or virtual switch of the host in the middle.
pub(crate) const SWITCH: &str = "switch";

/// Changes of a tunnel's start, host A first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Further arguments of its program.
    pub arguments: [Vec<String>; 2],
    /// Variables of its program's environment.
    pub environment: [Vec<(String, String)>; 2],
}

impl Changes {
    fn arguments_of(&self, host: &Host) -> &[String] {
        &self.arguments[usize::from(host.name != "A")]
    }

    fn environment_of(&self, host: &Host) -> impl Iterator<Item = (&String, &String)> {
        let all = &self.environment[usize::from(host.name != "A")];
        all.iter().map(|(name, value)| (name, value))
    }
}

/// The tunnel called `name`, started with `changes`; `None` if there is none of that name, or it
/// cannot be changed.
pub fn named(name: &str, changes: &Changes) -> Option<Arc<dyn Tunnel>> {
    if let Some(tunnel) = openvpn::changed(name, changes) {
        return Some(Arc::new(tunnel));
    }
    if name == CRUDE {
        return Some(Arc::new(crude::Crude::new(CRUDE, changes)));
    }
    if *changes != Changes::default() {
        return None;
    }
    all(0, None)
        .into_iter()
        .find(|tunnel| tunnel.name() == name)
}

/// Whether the tunnel called `name` has a host in the middle.
pub fn has_middle(name: &str) -> bool {
    named(name, &Changes::default())
        .is_some_and(|tunnel| tunnel.link(Link::default()).kind == LinkKind::Middle)
}

/// The interface of the tunnel called `name` in `host`.
pub fn inner_device(name: &str, host: &Host) -> String {
    named(name, &Changes::default()).map_or_else(|| device_name(host), |of| of.device(host))
}

/// The first line that `name ARGUMENT` prints about itself.
fn version_line(name: &str, argument: &str) -> Option<String> {
    let output = Command::new(program::of_tunnel(name).ok()?)
        .arg(argument)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let text = if output.stdout.is_empty() {
        output.stderr
    } else {
        output.stdout
    };
    let line = String::from_utf8_lossy(&text)
        .lines()
        .find(|l| !l.trim().is_empty())?
        .trim()
        .to_owned();
    Some(line.chars().take(60).collect())
}

/// Interface name of a tunnel's end: unique per lab process, because control sockets carry it too.
pub(crate) fn device_name(host: &Host) -> String {
    format!("sk{}{}", std::process::id(), host.name.to_ascii_lowercase())
}

/// Writes a file that only the lab's user can read.
pub(crate) fn write_private(file: &Path, content: &str) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .and_then(|mut f| f.write_all(content.as_bytes()))
        .doing(format!("write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let all = all(10_000, Some("285M"));
        let names: std::collections::BTreeSet<&str> = all.iter().map(|t| t.name()).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn device_names_fit_the_kernel() {
        // The largest process id is 2^22 (proc_sys_kernel(5)); IFNAMSIZ is 16 with its NUL.
        assert!("sk4194304a".len() < 16);
    }
}
