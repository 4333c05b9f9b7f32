//! From a configuration to a running tunnel, and back to nothing.

use crate::config::Config;
use crate::node::{Node, NodeError};
use crate::worker::{self, Service, Verdict};
use seikan_sys::netlink::{Netlink, NetlinkError};
use seikan_sys::poll::Epoll;
use seikan_sys::signal::Signals;

/// Packets that the TUN device queues for us; the kernel's 500 overflow in a burst of small ones.
const TX_QUEUE_LEN: u32 = 1000;

/// Why `up` failed.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The node.
    #[error(transparent)]
    Node(#[from] NodeError),
    /// Interface set-up.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// Signals.
    #[error("cannot block signals: {0}")]
    Signals(std::io::Error),
}

struct Nothing;
impl Service for Nothing {
    fn start(&mut self, _: &Epoll) -> std::io::Result<()> {
        Ok(())
    }
    fn ready(&mut self, _: u64, _: &Epoll, _: &mut Node) -> Verdict {
        Verdict::Continue
    }
}

/// Brings the interface up and runs until told to stop.
pub fn up(config: &Config) -> Result<(), UpError> {
    let signals = Signals::block().map_err(UpError::Signals)?;
    let mut node = Node::create(config)?;
    let netlink = Netlink::open()?;
    let index = node.tun.index();
    netlink.set_tx_queue_len(index, TX_QUEUE_LEN)?;
    for address in &config.addresses {
        netlink.add_address(index, *address)?;
    }
    netlink.set_up(index)?;
    worker::run(&mut node, &signals, &mut Nothing)?;
    Ok(())
}
