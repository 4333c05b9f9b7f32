//! Our tunnel at host A and another WireGuard at host B: shows how much each of them limits the
//! other.

use std::path::Path;

use seikan_ui::Interrupt;

use crate::error::Result;
use crate::link::Hosts;
use crate::tunnel::seikan::Seikan;
use crate::tunnel::wireguard::WireGuard;
use crate::tunnel::{Started, Tunnel, start_ends};

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

    fn availability(&self) -> std::result::Result<(), String> {
        self.ours.availability()?;
        self.theirs.availability()
    }

    fn version(&self) -> Option<String> {
        self.theirs.version()
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        start_ends(
            hosts.both(),
            dir,
            interrupt,
            &mut |end| match end.host.name {
                "A" => self.ours.start_end(end),
                _ => self.theirs.start_end(end, interrupt),
            },
        )
    }
}
