//! No tunnel: the link itself, the yardstick of every ratio.

use std::path::Path;

use seikan_load::Ends;
use seikan_ui::Interrupt;

use crate::error::Result;
use crate::host::Host;
use crate::link::{Hosts, Link};
use crate::tunnel::{Started, Tunnel, link_device};

/// The link as requested, or without offloads, independent of the request.
pub(super) struct Raw {
    pub(super) without_offload: bool,
}

impl Tunnel for Raw {
    fn name(&self) -> &str {
        if self.without_offload {
            "raw-no-offload"
        } else {
            "raw"
        }
    }

    fn link(&self, asked: Link) -> Link {
        Link {
            offload: asked.offload && !self.without_offload,
            ..asked
        }
    }

    fn up(&self, _: &Hosts, _: &Path, _: &Interrupt) -> Result<Started> {
        Ok(Started::default())
    }

    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        hosts.over_link()
    }

    fn device(&self, host: &Host) -> String {
        link_device(host, "")
    }
}
