//! A deliberately crude tunnel, as a subject for diagnosis: one frame per system call, no offload,
//! no encryption.
//!
//! [`Crude`] starts it at both ends as `seikan lab crude`, which is [`CrudeEnd`]. Each of
//! [`CrudeOptions`] adds one fault that has a name: a slow cipher, threads that hand every packet
//! on, copies, buffers and queues too small, an MTU that does not fit.

mod cost;
mod end;

use std::net::SocketAddr;

use seikan_ui::Interrupt;

use crate::error::Result;
use crate::process::Process;
use crate::program;
use crate::tunnel::{Changes, End, PORT, Tunnel};

pub use end::{CrudeCounts, CrudeEnd, CrudeOptions};

/// The crude tunnel between host A and host B, without faults except for its changes.
#[derive(Clone, Debug)]
pub struct Crude {
    name: String,
    changes: Changes,
}

impl Crude {
    /// Creates the tunnel with this name in reports, and with these changes.
    pub fn new(name: &str, changes: &Changes) -> Self {
        Self {
            name: name.to_owned(),
            changes: changes.clone(),
        }
    }
}

impl Tunnel for Crude {
    fn name(&self) -> &str {
        &self.name
    }

    fn by_default(&self) -> bool {
        false
    }

    fn programs(&self) -> &[&str] {
        &[program::LAB]
    }

    fn start_end(&self, end: &End<'_>, _: &Interrupt) -> Result<Process> {
        let End { host, other, .. } = end;
        let mut command = program::lab_command()?;
        command
            .args(["crude", "--device", &end.device()])
            .arg(format!("--listen={}", SocketAddr::new(host.address, PORT)))
            .arg(format!("--peer={}", SocketAddr::new(other.address, PORT)))
            .arg(format!("--address={}/24,{}/64", host.inner, host.inner6))
            .args(self.changes.arguments_of(host));
        end.run(&self.name, command)
    }
}
