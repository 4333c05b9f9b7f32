//! No tunnel: the link itself, to which every ratio refers.

use std::path::Path;

use seikan_ui::Interrupt;

use crate::error::Result;
use crate::site::{Hosts, Link};
use crate::tunnel::{Started, Tunnel};

/// The link as requested, or without offloads, independent of the request.
pub(crate) struct Raw {
    pub(crate) without_offload: bool,
}

/// The link with its offloads.
pub(crate) const RAW_LINK: Raw = Raw {
    without_offload: false,
};

impl Tunnel for Raw {
    fn name(&self) -> &str {
        if self.without_offload {
            "raw-no-offload"
        } else {
            "raw"
        }
    }

    fn link(&self, asked: Link) -> Link {
        if self.without_offload {
            asked.offload(false)
        } else {
            asked
        }
    }

    fn up(&self, _: &Hosts, _: &Path, _: &Interrupt) -> Result<Started> {
        Ok(Started::default())
    }

    fn crossed(&self) -> Option<&str> {
        Some("")
    }
}
