//! Our tunnel at host A and another WireGuard at host B: shows how much each of them limits the
//! other.

use seikan_ui::Interrupt;

use crate::error::Result;
use crate::process::Process;
use crate::tunnel::seikan::Seikan;
use crate::tunnel::wireguard::WireGuard;
use crate::tunnel::{End, Tunnel};

/// Two programs, one at each end.
pub(super) struct Mixed {
    ours: Seikan,
    theirs: WireGuard,
    name: String,
}

impl Mixed {
    pub(super) fn new(theirs: WireGuard) -> Self {
        Self {
            ours: Seikan::new("wireguard", 0),
            name: format!("seikan+{}", theirs.name()),
            theirs,
        }
    }
}

impl Tunnel for Mixed {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_own(&self) -> bool {
        true
    }

    fn by_default(&self) -> bool {
        false
    }

    fn availability(&self) -> Result<()> {
        self.ours.availability()?;
        self.theirs.availability()
    }

    fn version(&self) -> Option<String> {
        self.theirs.version()
    }

    fn start_end(&self, end: &End<'_>, interrupt: &Interrupt) -> Result<Process> {
        match end.host.name {
            "A" => self.ours.start_end(end, interrupt),
            _ => self.theirs.start_end(end, interrupt),
        }
    }
}
