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

use seikan_sys::ethtool::Feature;
use serde::Deserialize;

pub use kind::FaultKind;
use network::Nic;
pub(crate) use network::long_ruleset;

use super::LoadSpec;
use crate::error::{Result, setup};
use crate::process::Process;
use crate::site::{Host, Hosts, NO_OFFLOAD, all_cpus};
use crate::tunnel::{CRUDE, Changes, Started, inner_device, openvswitch};
use seikan_load::LiveOptions;

/// Outer flows of the crude tunnel if it spreads connections: enough that two processors get about
/// half each.
const LANES: u8 = 16;

/// The hosts that have a fault.
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

/// The interface that has a fault.
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
    /// The hosts that have it.
    #[serde(default)]
    pub at: Location,
    /// Mildest and worst, in the kind's unit; the order does not matter.
    pub severity: Option<[f64; 2]>,
    /// The interface that has it, for kinds with a choice.
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
        let all = self.started.processes.iter();
        all.filter(|process| process.host() == host.name)
            .map(Process::pid)
            .collect()
    }
}

/// A step that reverts part of a fault.
type Undo<'a> = Box<dyn FnOnce() + Send + 'a>;

/// A fault in force. Undone when dropped.
#[derive(Default)]
pub struct Applied<'a>(Vec<Undo<'a>>);

impl<'a> Applied<'a> {
    /// Adds a step to run on drop. The step added last runs first.
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
    pub fn is_none(&self) -> bool {
        self.kind == FaultKind::None
    }

    /// Whether [`Fault::apply`] alone makes the fault, in a running tunnel, so that it can be
    /// combined with another fault.
    pub fn is_of_a_running_tunnel(&self) -> bool {
        let of_the_load = matches!(
            self.kind,
            FaultKind::ApplicationLimited | FaultKind::SlowReader | FaultKind::Overload
        );
        !self.is_none() && !of_the_load && !self.needs_restart() && !self.kind.is_of_a_wire()
    }

    /// Whether this fault can be made in the tunnel called `name`.
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
                        "severity {wrong} is out of range: use {} to {} {}",
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
    pub fn changes_without(&self) -> Changes {
        match self.kind {
            FaultKind::ReceiveOnOneCpu | FaultKind::OneFlow => {
                let lanes = vec![format!("--lanes={LANES}")];
                Changes {
                    arguments: [lanes.clone(), lanes],
                    ..Changes::default()
                }
            }
            _ => Changes::default(),
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
            // These settings end with the host, so there is nothing to revert.
            host.steer(&host.device, &all_cpus())?;
            // Unlike a hardware NIC, a veth has GRO off by default. It merges nothing here, because
            // the tunnel's socket does not request it.
            host.set_features(&host.device, &[(Feature::Gro, true)])?;
            network::long_ruleset(host, &host.device, severity as u32)?;
        }
        Ok(())
    }

    /// Returns the changes that the tunnel called `name` starts with.
    pub fn changes(&self, name: &str, severity: f64) -> Changes {
        let words = match self.kind {
            FaultKind::ReceiveBufferOption => format!("--rcvbuf {severity:.0}"),
            FaultKind::SendBufferOption => format!("--sndbuf {severity:.0}"),
            FaultKind::BothBufferOptions => {
                format!("--sndbuf {severity:.0} --rcvbuf {severity:.0}")
            }
            FaultKind::MtuMismatch if name == CRUDE => format!("--mtu {severity:.0}"),
            // Buffers fit the longer MTU of the two ends, not the own one.
            FaultKind::MtuMismatch => {
                format!("--tun-mtu {severity:.0} --tun-mtu-max {severity:.0} --mssfix 0")
            }
            FaultKind::SlowCipher => format!("--burn {:.0}", severity * 1e3),
            FaultKind::Handoff => "--handoff".to_owned(),
            FaultKind::Copies => format!("--copy {severity:.0}"),
            FaultKind::ReceiveOnOneCpu => return self.changes_without(),
            _ => String::new(),
        };
        let environment = match self.kind {
            // OPENSSL_ia32cap(3): no AES instructions (bit 57), no carry-less multiplication (bit
            // 33), no SSSE3 (bit 41).
            FaultKind::NoAesInstructions => {
                vec![("OPENSSL_ia32cap".into(), "~0x220020200000000".into())]
            }
            _ => Vec::new(),
        };
        let words = words.split_whitespace().map(str::to_owned);
        Changes {
            arguments: self.at_hosts(words.collect()),
            environment: self.at_hosts(environment),
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
        if self.kind == FaultKind::DefaultReceiveBuffer {
            self.set_sysctl(severity, &mut applied)?;
        }
        Ok(applied)
    }

    /// Returns whether the tunnel must restart for this fault.
    pub fn needs_restart(&self) -> bool {
        self.kind.programs().is_some() || self.kind == FaultKind::DefaultReceiveBuffer
    }

    /// Returns the application's load under this fault.
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
        if !self.needs_restart() {
            self.set_sysctl(severity, &mut applied)?;
        }
        Ok(applied)
    }

    /// Applies the part of the fault that is a setting of the machine.
    fn set_sysctl(&self, severity: f64, applied: &mut Applied<'_>) -> Result<()> {
        let path = match self.kind {
            FaultKind::DefaultReceiveBuffer => "net/core/rmem_default",
            FaultKind::NetdevBacklog => "net/core/netdev_max_backlog",
            FaultKind::NapiBudget => "net/core/netdev_budget",
            FaultKind::ConntrackMax => "net/netfilter/nf_conntrack_max",
            _ => return Ok(()),
        };
        machine::set(path, severity, applied)
    }

    /// Applies the part of the fault that is in one host.
    fn apply_at<'a>(
        &self,
        severity: f64,
        site: Site<'a>,
        host: &'a Host,
        applied: &mut Applied<'a>,
    ) -> Result<()> {
        let device = match self.kind {
            FaultKind::QueueLength | FaultKind::MtuMismatch => Device::Inner,
            FaultKind::Loss | FaultKind::MtuBlackHole | FaultKind::NetdevBacklog => Device::Outer,
            _ => self.device,
        };
        let device = site.device(host, device);
        let mut nic = Nic {
            host,
            device,
            applied,
        };
        match self.kind {
            FaultKind::QueueLength => nic.queue_length(severity as u32),
            FaultKind::Shaper => nic.token_bucket(severity, network::SHORT),
            FaultKind::Bufferbloat => nic.token_bucket(severity, network::LONG),
            FaultKind::Loss => nic.loss(severity),
            FaultKind::MtuBlackHole => nic.black_hole(severity as u32),
            FaultKind::Mtu => nic.mtu(severity as u32),
            // OpenVPN's device gets the MTU that the other end assumes.
            FaultKind::MtuMismatch if site.tunnel.starts_with("openvpn") => {
                nic.mtu(network::BELIEVED_MTU)
            }
            FaultKind::OffloadsOff => nic.offloads(&NO_OFFLOAD.map(|(feature, _)| feature)),
            FaultKind::NetdevBacklog => {
                // Packets then come in bursts: the kernel splits a super-packet of datagrams just
                // before the link.
                nic.offloads(&[Feature::Gro, Feature::UdpSegmentation])?;
                // Receive on another processor than the sender's. The sender's would empty the
                // backlog itself after each packet.
                let cpus = all_cpus();
                nic.receive_on(&cpus[cpus.len() - 1..])
            }
            FaultKind::ConntrackMax => nic.track_connections(),
            FaultKind::ReceiveOnOneCpu => nic.receive_on(&all_cpus()[..1]),
            FaultKind::ReceiveOffload => nic.receive_offload(),
            FaultKind::FlowTable => match &site.started.orders {
                Some(dir) => {
                    applied.then(move || {
                        // The switch may have ended.
                        let _ = openvswitch::forget_flows(dir, None);
                    });
                    openvswitch::forget_flows(dir, Some(severity as u32))
                }
                None => Err(setup(
                    "cannot empty the flow table: this tunnel is no virtual switch",
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
