//! No tunnel: the link itself, the yardstick of every ratio.

use std::path::Path;

use seikan_load::Ends;
use seikan_ui::Interrupt;

use crate::error::Result;
use crate::link::{Hosts, Link};
use crate::tunnel::{Started, Tunnel};

/// The requested link.
pub(super) struct Raw;

impl Tunnel for Raw {
    fn name(&self) -> &str {
        "raw"
    }

    fn availability(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn up(&self, _: &Hosts, _: &Path, _: &Interrupt) -> Result<Started> {
        Ok(Started::default())
    }

    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        hosts.over_link()
    }
}

/// The link without offloads, independent of the request.
pub(super) struct RawNoOffload;

impl Tunnel for RawNoOffload {
    fn name(&self) -> &str {
        "raw-no-offload"
    }

    fn availability(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    fn link(&self, asked: Link) -> Link {
        Link {
            offload: false,
            ..asked
        }
    }

    fn up(&self, _: &Hosts, _: &Path, _: &Interrupt) -> Result<Started> {
        Ok(Started::default())
    }

    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        hosts.over_link()
    }
}
