//! A deliberately crude tunnel, as a subject for diagnosis: one frame per system call, no offload,
//! no encryption.
//!
//! [`Crude`] starts it at both ends as `seikan lab crude`, which is [`CrudeEnd`]. Each of
//! [`CrudeOptions`] makes it sick in one way that has a name: a slow cipher, threads that hand
//! every packet on, copies, buffers and queues too small, an MTU that does not fit.

mod cost;
mod program;

use std::net::SocketAddr;
use std::path::Path;

use seikan_ui::Interrupt;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::host::Host;
use crate::link::Hosts;
use crate::process::Process;
use crate::tunnel::{PORT, Started, Tunnel, device_name, need_tun};

pub use program::{CrudeCounts, CrudeEnd, CrudeSetup};

/// How sick it is. The default is as well as such a tunnel can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CrudeOptions {
    /// MTU of its device, in bytes. It reads no more of a packet from either side, so larger
    /// packets from the other end arrive truncated. TCP avoids such packets: it uses the smaller
    /// segment size of both ends.
    pub mtu: u32,
    /// A slow cipher: processor time spent on each packet, in nanoseconds, in a function named
    /// `chacha20_block_slow`. The rounds it takes are measured once, so that a preempted end does
    /// not get away with less.
    pub burn_ns: u64,
    /// Hands each packet on twice, from thread to thread, and waits each time until it was taken.
    pub handoff: bool,
    /// How often each packet is copied out into a large memory and back.
    pub copy: u32,
    /// Receive buffer of the UDP socket, in bytes as setsockopt(2) takes them (the kernel doubles
    /// it); `None`: the kernel's default.
    pub rcvbuf: Option<usize>,
    /// Send buffer of the UDP socket, likewise.
    pub sndbuf: Option<usize>,
    /// Packets that its device holds for it (`txqueuelen`); `None`: the kernel's default, 500.
    pub queue: Option<u32>,
    /// Outer flows, 1 to 255: inner connections are distributed over them.
    pub lanes: u8,
}

impl Default for CrudeOptions {
    fn default() -> Self {
        Self {
            mtu: 1400,
            burn_ns: 0,
            handoff: false,
            copy: 0,
            rcvbuf: None,
            sndbuf: None,
            queue: None,
            lanes: 1,
        }
    }
}

impl CrudeOptions {
    /// As words on the command line.
    fn words(&self) -> Vec<String> {
        let mut words = vec![format!("--mtu={}", self.mtu)];
        if self.burn_ns > 0 {
            words.push(format!("--burn={}", self.burn_ns));
        }
        if self.handoff {
            words.push("--handoff".to_owned());
        }
        if self.copy > 0 {
            words.push(format!("--copy={}", self.copy));
        }
        words.extend(self.rcvbuf.map(|bytes| format!("--rcvbuf={bytes}")));
        words.extend(self.sndbuf.map(|bytes| format!("--sndbuf={bytes}")));
        words.extend(self.queue.map(|packets| format!("--queue={packets}")));
        if self.lanes > 1 {
            words.push(format!("--lanes={}", self.lanes));
        }
        words
    }
}

/// The crude tunnel between host A and host B.
#[derive(Clone, Debug)]
pub struct Crude {
    name: String,
    ends: [CrudeOptions; 2],
}

impl Crude {
    /// Equally sick at both ends; its name is `crude`.
    #[must_use]
    pub fn new(options: CrudeOptions) -> Self {
        Self::with_ends(options, options)
    }

    /// Host A's end, then host B's.
    #[must_use]
    pub fn with_ends(a: CrudeOptions, b: CrudeOptions) -> Self {
        Self {
            name: "crude".to_owned(),
            ends: [a, b],
        }
    }

    /// With another name in reports.
    #[must_use]
    pub fn named(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    fn start_end(
        &self,
        host: &Host,
        other: &Host,
        options: &CrudeOptions,
        dir: &Path,
    ) -> Result<Process> {
        let mut command = crate::program::lab_command()?;
        command
            .args(["crude", "--device", &device_name(host)])
            .arg(format!("--listen={}", SocketAddr::new(host.address, PORT)))
            .arg(format!("--peer={}", SocketAddr::new(other.address, PORT)))
            .arg(format!("--address={}/24,{}/64", host.inner, host.inner6))
            .args(options.words());
        Process::start(host, &self.name, command, dir)
    }
}

impl Tunnel for Crude {
    fn name(&self) -> &str {
        &self.name
    }

    fn by_default(&self) -> bool {
        false
    }

    fn availability(&self) -> std::result::Result<(), String> {
        need_tun()?;
        crate::program::lab().map(drop)
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let mut started = Started::default();
        let [a, b] = &self.ends;
        for (host, other, options) in [(&hosts.b, &hosts.a, b), (&hosts.a, &hosts.b, a)] {
            interrupt.check()?;
            let process = self.start_end(host, other, options, dir)?;
            started.processes.0.push(process);
        }
        Ok(started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_without_costs_gets_its_mtu_only() {
        assert_eq!(CrudeOptions::default().words(), ["--mtu=1400"]);
    }

    #[test]
    fn every_cost_has_an_option() {
        let options = CrudeOptions {
            mtu: 1300,
            burn_ns: 5,
            handoff: true,
            copy: 6,
            rcvbuf: Some(7),
            sndbuf: Some(8),
            queue: Some(9),
            lanes: 10,
        };
        let words =
            "--mtu=1300 --burn=5 --handoff --copy=6 --rcvbuf=7 --sndbuf=8 --queue=9 --lanes=10";
        assert_eq!(options.words().join(" "), words);
    }
}
