//! Faults that make a tunnel slow, and their reversal.
//!
//! A [`Fault`] is a kind with a location and a range of severities. [`Fault::changes`] are the
//! changes that the tunnel starts with, [`Fault::load`] changes the application's load,
//! [`Fault::apply`] changes a running tunnel. [`Applied`] reverts changes when it is dropped, in
//! reverse order: also on an error, on Ctrl-C, and on a panic.

pub(crate) mod cpu;
mod kind;
mod machine;
mod network;
mod wire;

use std::process::Command;

use seikan_sys::ethtool::Feature;
use serde::Deserialize;

pub use kind::FaultKind;
pub use machine::MachineGuard;
pub(crate) use network::long_ruleset;

use super::LoadSpec;
use crate::error::{LabError, Result};
use crate::host::Host;
use crate::link::Hosts;
use crate::process::Process;
use crate::tunnel::crude::CrudeOptions;
use crate::tunnel::{Changes, Started, inner_device, openvswitch};
use seikan_load::LiveOptions;

/// Flows of the crude tunnel where there are several: enough for two processors to get about half
/// each.
const LANES: u8 = 16;

/// Where a fault is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Location {
    /// Host A.
    #[default]
    Sender,
    /// Host B.
    Receiver,
    /// Both hosts.
    Both,
    /// The host in the middle.
    Middle,
}

/// Which interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// The tunnel's.
    Inner,
    /// The link's.
    #[default]
    Outer,
}

/// A fault with its range of severities.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Where it is.
    #[serde(default)]
    pub at: Location,
    /// Mildest and worst, in the kind's unit; the order does not matter.
    pub severity: Option<[f64; 2]>,
    /// At which interface, for kinds that have a choice.
    #[serde(default)]
    pub device: Device,
    /// Receive buffer of an application that reads slowly, in bytes.
    pub buffer: Option<usize>,
}

/// A tunnel that runs, for faults to act upon.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    /// The hosts at its ends.
    pub hosts: &'a Hosts,
    /// Its name.
    pub tunnel: &'a str,
    /// Its programs.
    pub started: &'a Started,
}

impl<'a> Site<'a> {
    /// The hosts of a location.
    fn hosts_at(&self, place: Location) -> Vec<&'a Host> {
        match place {
            Location::Sender => vec![&self.hosts.a],
            Location::Receiver => vec![&self.hosts.b],
            Location::Both => vec![&self.hosts.a, &self.hosts.b],
            Location::Middle => self.hosts.middle.iter().collect(),
        }
    }

    /// Name of an interface of `host`.
    fn device(&self, host: &Host, device: Device) -> String {
        match device {
            Device::Inner => inner_device(self.tunnel, host),
            Device::Outer => host.device.clone(),
        }
    }

    /// The tunnel's programs in `host`.
    pub(super) fn pids(&self, host: &Host) -> Vec<u32> {
        let all = self.started.processes.0.iter();
        all.filter(|process| process.host() == host.name)
            .map(Process::pid)
            .collect()
    }
}

/// A step that takes a fault back.
type Undo<'a> = Box<dyn FnOnce() + Send + 'a>;

/// A fault in force. Undone when dropped.
#[derive(Default)]
pub struct Applied<'a>(Vec<Undo<'a>>);

impl<'a> Applied<'a> {
    /// Adds a step to be taken at the end; the last added is taken first.
    fn then(&mut self, undo: impl FnOnce() + Send + 'a) {
        self.0.push(Box::new(undo));
    }
}

impl Drop for Applied<'_> {
    fn drop(&mut self) {
        while let Some(undo) = self.0.pop() {
            undo();
        }
    }
}

impl Fault {
    /// Whether there is no fault.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.kind == FaultKind::None
    }

    /// Whether it is made in a tunnel that runs, by nothing but [`Fault::apply`], so that it can
    /// come on top of another one.
    #[must_use]
    pub fn is_of_a_running_tunnel(&self) -> bool {
        let of_the_load = matches!(
            self.kind,
            FaultKind::ApplicationLimited | FaultKind::SlowReader | FaultKind::Overload
        );
        !self.is_none() && !of_the_load && !self.needs_restart() && !self.kind.is_of_a_wire()
    }

    /// Whether this fault can be made in the tunnel called `name`.
    #[must_use]
    pub fn can_be_in(&self, name: &str) -> bool {
        let programs = self.kind.programs();
        programs.is_none_or(|all| all.iter().any(|program| name.starts_with(program)))
    }

    /// Whether severity and load fit the kind.
    pub(super) fn check(&self, load: &LoadSpec) -> std::result::Result<(), String> {
        match (self.severity, self.kind.limits()) {
            (None, None) => {}
            (Some(_), None) => return Err(format!("{:?} has no severity", self.kind)),
            (None, Some(limits)) => {
                return Err(format!(
                    "{:?} needs a severity in {}",
                    self.kind, limits.unit
                ));
            }
            (Some(range), Some(limits)) => {
                if let Some(wrong) = range.iter().find(|s| !limits.contains(**s)) {
                    return Err(format!(
                        "severity {wrong}: {} to {} {} are possible",
                        limits.min, limits.max, limits.unit
                    ));
                }
            }
        }
        if self.kind == FaultKind::ApplicationLimited && load.rate.is_none() {
            return Err("an application that sends less needs a load with a rate".into());
        }
        Ok(())
    }

    /// Returns the changes that the tunnel starts with in the absence of the fault.
    #[must_use]
    pub fn changes_without(&self) -> Changes {
        let crude = match self.kind {
            FaultKind::ReceiveOnOneCpu | FaultKind::OneFlow => CrudeOptions {
                lanes: LANES,
                ..CrudeOptions::default()
            },
            _ => CrudeOptions::default(),
        };
        Changes {
            crude: [crude; 2],
            ..Changes::default()
        }
    }

    /// Prepares the hosts, with and without the fault. For faults of receiving processors, each
    /// frame takes much work, and all processors do it.
    ///
    /// # Errors
    /// An error of the kernel or of a tool.
    pub fn prepare(&self, severity: f64, hosts: &Hosts) -> Result<()> {
        if matches!(self.kind, FaultKind::ReceiveOnOneCpu | FaultKind::OneFlow) {
            let host = &hosts.b;
            let count = std::thread::available_parallelism().map_or(1, usize::from);
            let cpus: Vec<u32> = (0..count as u32).collect();
            // All of it for as long as the host is there: nothing to be taken back.
            let file = format!("{}/queues/rx-0/rps_cpus", host.device);
            host.set_attribute(&file, &seikan_sys::softirq::mask(&cpus))?;
            // A veth has none by default, unlike cards; it merges nothing here, as the tunnel does
            // not ask for it.
            host.set_features(&host.device, &[(Feature::Gro, true)])?;
            network::long_ruleset(host, &host.device, severity as u32)?;
        }
        Ok(())
    }

    /// Returns the changes that the tunnel starts with.
    #[must_use]
    pub fn changes(&self, severity: f64) -> Changes {
        let bytes = format!("{severity:.0}");
        let arguments: Vec<String> = match self.kind {
            FaultKind::ReceiveBufferOption => vec!["--rcvbuf".into(), bytes],
            FaultKind::SendBufferOption => vec!["--sndbuf".into(), bytes],
            FaultKind::BothBufferOptions => {
                vec!["--sndbuf".into(), bytes.clone(), "--rcvbuf".into(), bytes]
            }
            // Buffers are as long as the longest MTU, not as the own one.
            FaultKind::MtuMismatch => {
                let words = [
                    "--tun-mtu",
                    &bytes,
                    "--tun-mtu-max",
                    &bytes,
                    "--mssfix",
                    "0",
                ];
                words.map(String::from).to_vec()
            }
            _ => Vec::new(),
        };
        let environment = match self.kind {
            // OPENSSL_ia32cap(3): no AES instructions (bit 57), no carry-less multiplication (bit
            // 33), no SSSE3 (bit 41).
            FaultKind::NoAesInstructions => {
                vec![("OPENSSL_ia32cap".into(), "~0x220020200000000".into())]
            }
            _ => Vec::new(),
        };
        Changes {
            arguments: self.at_hosts(arguments),
            environment: self.at_hosts(environment),
            crude: self.crude(severity),
        }
    }

    /// How sick the crude tunnel is, host A first.
    fn crude(&self, severity: f64) -> [CrudeOptions; 2] {
        let well = CrudeOptions::default();
        let sick = match self.kind {
            FaultKind::ReceiveBufferOption => CrudeOptions {
                rcvbuf: Some(severity as usize),
                ..well
            },
            FaultKind::SendBufferOption => CrudeOptions {
                sndbuf: Some(severity as usize),
                ..well
            },
            FaultKind::MtuMismatch => CrudeOptions {
                mtu: severity as u32,
                ..well
            },
            FaultKind::SlowCipher => CrudeOptions {
                burn_ns: (severity * 1e3) as u64,
                ..well
            },
            FaultKind::Handoff => CrudeOptions {
                handoff: true,
                ..well
            },
            FaultKind::Copies => CrudeOptions {
                copy: severity as u32,
                ..well
            },
            FaultKind::ReceiveOnOneCpu => return self.changes_without().crude,
            _ => well,
        };
        match self.at {
            Location::Sender => [sick, well],
            Location::Receiver => [well, sick],
            Location::Both => [sick, sick],
            Location::Middle => [well, well],
        }
    }

    fn at_hosts<T: Clone>(&self, value: Vec<T>) -> [Vec<T>; 2] {
        match self.at {
            Location::Sender => [value, Vec::new()],
            Location::Receiver => [Vec::new(), value],
            Location::Both => [value.clone(), value],
            Location::Middle => Default::default(),
        }
    }

    /// Applies changes that must be in place when the tunnel starts, in addition to its arguments.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn before_start(&self, severity: f64) -> Result<Applied<'static>> {
        let mut applied = Applied::default();
        if let FaultKind::DefaultReceiveBuffer = self.kind {
            machine::set("net/core/rmem_default", severity, &mut applied)?;
        }
        Ok(applied)
    }

    /// Returns whether the tunnel must restart for this fault.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.kind.programs().is_some() || self.kind == FaultKind::DefaultReceiveBuffer
    }

    /// Returns the application's load under this fault.
    #[must_use]
    pub fn load(&self, severity: f64, load: LiveOptions) -> LiveOptions {
        match self.kind {
            FaultKind::ApplicationLimited => LiveOptions {
                rate: Some(severity),
                ..load
            },
            FaultKind::SlowReader => LiveOptions {
                reader_rate: Some(severity),
                receive_buffer: self.buffer,
                ..load
            },
            FaultKind::Overload => LiveOptions { rate: None, ..load },
            _ => load,
        }
    }

    /// Applies the fault to a running tunnel.
    ///
    /// # Errors
    /// An error of the kernel or of a tool; changes made so far are reverted.
    pub fn apply<'a>(&self, severity: f64, site: Site<'a>) -> Result<Applied<'a>> {
        let mut applied = Applied::default();
        for host in site.hosts_at(self.at) {
            self.apply_at(severity, site, host, &mut applied)?;
        }
        if self.kind.is_of_a_wire() {
            wire::set(self.kind, severity, site.hosts, &mut applied)?;
        }
        match self.kind {
            FaultKind::NetdevBacklog => {
                machine::set("net/core/netdev_max_backlog", severity, &mut applied)?;
            }
            FaultKind::NapiBudget => {
                machine::set("net/core/netdev_budget", severity, &mut applied)?;
            }
            FaultKind::ConntrackMax => {
                machine::set("net/netfilter/nf_conntrack_max", severity, &mut applied)?;
            }
            _ => {}
        }
        Ok(applied)
    }

    /// The part of it that is in one host.
    fn apply_at<'a>(
        &self,
        severity: f64,
        site: Site<'a>,
        host: &'a Host,
        applied: &mut Applied<'a>,
    ) -> Result<()> {
        let device = site.device(host, self.device);
        match self.kind {
            FaultKind::QueueLength => {
                let inner = site.device(host, Device::Inner);
                network::queue_length(host, &inner, severity as u32, applied)
            }
            FaultKind::Shaper => {
                network::token_bucket(host, &device, severity, network::SHORT, applied)
            }
            FaultKind::Bufferbloat => {
                network::token_bucket(host, &device, severity, network::LONG, applied)
            }
            FaultKind::Loss => network::loss(host, &host.device, severity, applied),
            FaultKind::MtuBlackHole => {
                network::black_hole(host, &host.device, severity as u32, applied)
            }
            FaultKind::Mtu => network::mtu(host, &device, severity as u32, applied),
            // Its device gets the length that the other end assumes.
            FaultKind::MtuMismatch if site.tunnel.starts_with("openvpn") => {
                let inner = site.device(host, Device::Inner);
                network::mtu(host, &inner, network::BELIEVED_MTU, applied)
            }
            FaultKind::OffloadsOff => {
                const ALL: [Feature; 4] = [
                    Feature::Tso,
                    Feature::Gso,
                    Feature::Gro,
                    Feature::TxChecksum,
                ];
                network::offloads(host, &device, &ALL, applied)
            }
            FaultKind::NetdevBacklog => {
                // So that packets come in bursts: a super-packet of datagrams is cut up just before
                // the link.
                let off = [Feature::Gro, Feature::UdpSegmentation];
                network::offloads(host, &host.device, &off, applied)?;
                // Another processor than the sender's, which would empty the queue itself after
                // each packet.
                let last = std::thread::available_parallelism().map_or(0, |n| n.get() - 1);
                network::receive_on(host, &host.device, &[last as u32], applied)
            }
            FaultKind::ConntrackMax => network::track_connections(host, applied),
            FaultKind::ReceiveOnOneCpu => network::receive_on(host, &device, &[0], applied),
            FaultKind::ReceiveOffload => network::receive_offload(host, &device, applied),
            FaultKind::FlowTable => match &site.started.orders {
                Some(dir) => {
                    applied.then(move || {
                        // The switch may have ended.
                        let _ = openvswitch::forget_flows(dir, None);
                    });
                    openvswitch::forget_flows(dir, Some(severity as u32))
                }
                None => Err(LabError::Setup(
                    "only a virtual switch has a table of flows".into(),
                )),
            },
            FaultKind::CpuHog => {
                cpu::contend(host, &site.pids(host), severity.round() as usize, applied)
            }
            FaultKind::CpuQuota => cpu::quota(&site.pids(host), severity, applied),
            _ => Ok(()),
        }
    }
}

/// Runs a command line in a host; words are separated by blanks.
pub(crate) fn tool(host: &Host, line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    host.output(command.args(words), "").map(drop)
}
