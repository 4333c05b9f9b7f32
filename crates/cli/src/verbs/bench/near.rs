//! The far end as seen from here: started by SSH, and asked for one phase after the other.

use std::io::BufReader;
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use seikan_diagnose::exchange::Token;
use seikan_diagnose::{Evidence, Recording};
use seikan_load::LatencyReport;
use seikan_observe::path::PathMap;
use seikan_sys::netns::NetNs;
use seikan_ui::Interrupt;

use super::control::{
    Control, Counts, Done, Host, KernelRequest, LONGEST_REPLY, Phase, Reply, Request, Run,
    read_greeting,
};
use super::phase::{self, End, Flows};
use crate::screen::printable;

/// Maximum time to wait for an answer, in addition to the duration of a phase.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for the far end to remove everything and end by itself.
const ENDS: Duration = Duration::from_secs(3);

/// The far end.
pub struct Far {
    child: Child,
    /// `None` once the far end was told to end.
    control: Option<Control<Reply>>,
    /// Facts of the far host.
    pub host: Host,
}

/// A path to the far end.
pub struct Path {
    /// Address of the far end.
    pub to: IpAddr,
    /// Addresses at which the far end opens its port.
    pub at: Vec<IpAddr>,
    /// Interfaces of the tunnel here and there, if the path goes through a tunnel.
    pub tunnel: Option<[String; 2]>,
    /// Namespace of the interface, if the path goes through the kernel's WireGuard.
    pub namespace: Option<NetNs>,
}

/// Result of a phase at both ends.
pub struct Measured {
    /// Counts here.
    pub here: Counts,
    /// Counts of the far end.
    pub there: Counts,
    /// Round trips; empty in a phase with datagrams.
    pub round_trips: LatencyReport,
    /// The doctors' measurements of both ends, if they were requested.
    pub evidence: Option<(Recording, Evidence)>,
}

impl Far {
    /// Starts the far end. `ssh` is the command of SSH with its options, `program` the command that
    /// runs Seikan on the far host.
    ///
    /// # Errors
    /// SSH or the far program cannot be started, or the far program has another version.
    pub fn start(
        ssh: &str,
        host: &str,
        program: &str,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Far> {
        let mut words = ssh.split_whitespace();
        let command = words.next().context("--ssh names no command")?;
        let started = Command::new(command)
            .args(words)
            // HOST is never taken for an option, and the far shell splits the command.
            .arg(host)
            .arg(format!("{program} bench --serve"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = started.map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => anyhow!(
                "cannot run `{command}`: there is no such program; install the OpenSSH client, or name another with --ssh"
            ),
            _ => anyhow!("cannot run `{command}`: {error}"),
        })?;
        let greeted = greet(&mut child);
        let (control, version) = match greeted {
            Ok(Some(greeted)) => greeted,
            // Ctrl-C ends SSH, too.
            _ if interrupt.is_raised() => return Err(seikan_ui::Interrupted.into()),
            Ok(None) => bail!(explain(host, program, wait(&mut child))),
            Err(error) => return Err(error.into()),
        };
        let mut far = Far {
            child,
            control: Some(control),
            host: Host::default(),
        };
        let own = env!("CARGO_PKG_VERSION");
        if version != own {
            eprintln!(
                "note: {host} has Seikan {}, this host {own}",
                printable(&version)
            );
        }
        match far.receive(PATIENCE, interrupt)? {
            Reply::Host(host) => far.host = host,
            _ => bail!("unexpected message of the far end"),
        }
        Ok(far)
    }

    /// Measures a phase of a path. `map`: path of the tunnel at this end, if the flows pass it.
    ///
    /// # Errors
    /// The path does not lead there, one end fails, or the interrupt was raised.
    pub fn measure(
        &mut self,
        path: &Path,
        port: u16,
        phase: Phase,
        map: Option<PathMap>,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Measured> {
        let mut token = Token([0; 16]);
        getrandom::fill(&mut token.0).context("the kernel gives no random bytes")?;
        self.send(&Request::Run(Run {
            at: path.at.clone(),
            port,
            token,
            kernel: path.namespace.is_some(),
            tunnel: path.tunnel.as_ref().map(|[_, there]| there.clone()),
            phase,
        }))?;
        match self.receive(PATIENCE, interrupt)? {
            Reply::Listening => {}
            _ => bail!("unexpected message of the far end"),
        }
        let connect = || phase::connect(path.to, port, &token.0);
        let connected = match &path.namespace {
            Some(namespace) => namespace.run(connect)?,
            None => connect(),
        };
        let flows: Flows = match connected {
            Ok(flows) => flows,
            Err(error) => {
                // The far end waits in vain, and says so.
                let _ = self.receive(PATIENCE, interrupt);
                return Err(error);
            }
        };
        let seed = super::seed(&token);
        let outcome = phase::carry(&flows, &phase, End::Near, seed, map, interrupt);
        drop(flows);
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                // The far end reports, too; the next request would get that answer.
                let _ = self.receive(PATIENCE, interrupt);
                return Err(error);
            }
        };
        let Reply::Done(done) = self.receive(PATIENCE, interrupt)? else {
            bail!("unexpected message of the far end");
        };
        let Done {
            counts,
            measurement,
        } = *done;
        let evidence = measurement.map(|it| it.evidence()).transpose()?;
        Ok(Measured {
            here: outcome.counts,
            there: counts,
            round_trips: outcome.round_trips.unwrap_or_default(),
            evidence: outcome.recording.zip(evidence),
        })
    }

    /// Has the far end create an interface of the kernel's WireGuard; returns its public key.
    ///
    /// # Errors
    /// The far end cannot.
    pub fn create_kernel(
        &mut self,
        request: KernelRequest,
        interrupt: &Interrupt,
    ) -> anyhow::Result<[u8; 32]> {
        self.send(&Request::Kernel(request))?;
        match self.receive(PATIENCE, interrupt)? {
            Reply::Kernel(public_key) => Ok(public_key),
            _ => bail!("unexpected message of the far end"),
        }
    }

    fn send(&mut self, request: &Request) -> anyhow::Result<()> {
        let control = self.control.as_mut().context("the far end has ended")?;
        control.send(request).context("the far end has ended")
    }

    /// Returns the next message; a failure of the far end is an error.
    fn receive(&self, patience: Duration, interrupt: &Interrupt) -> anyhow::Result<Reply> {
        let control = self.control.as_ref().context("the far end has ended")?;
        match control.receive(patience, interrupt)? {
            Reply::Failed(reason) => Err(anyhow!("the far end failed: {}", printable(&reason))),
            reply => Ok(reply),
        }
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // The far end ends at the end of its input.
        self.control = None;
        wait(&mut self.child);
    }
}

/// Reads the greeting; `None` without one.
fn greet(child: &mut Child) -> std::io::Result<Option<(Control<Reply>, String)>> {
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Ok(None);
    };
    let stdin: ChildStdin = stdin;
    let mut stdout = BufReader::new(stdout);
    let Some(version) = read_greeting(&mut stdout)? else {
        return Ok(None);
    };
    Ok(Some((
        Control::start(stdout, stdin, LONGEST_REPLY, || {}),
        version,
    )))
}

/// Waits a moment for the end of the process, and ends it otherwise.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let until = Instant::now() + ENDS;
    while Instant::now() < until {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// Explains why the far end did not greet.
fn explain(host: &str, program: &str, status: Option<ExitStatus>) -> String {
    match status.and_then(|status| status.code()) {
        // sh(1): not found, not executable; ssh(1): its own failure; clap: wrong usage.
        Some(126 | 127) => format!(
            "cannot start the far end: {host} has no `{program}`; install Seikan there, or name it with --program"
        ),
        Some(255) => {
            format!("cannot start the far end: SSH does not reach {host} (its message is above)")
        }
        Some(2) => format!(
            "cannot start the far end: `{program}` of {host} has no `bench`; install Seikan {} there",
            env!("CARGO_PKG_VERSION")
        ),
        Some(code) if code != 0 => format!(
            "cannot start the far end: `{program} bench --serve` ended on {host} with status {code} (its message is above)"
        ),
        _ => format!(
            "cannot start the far end: {host} did not answer with this version of `bench`; install Seikan {} at both ends",
            env!("CARGO_PKG_VERSION")
        ),
    }
}
