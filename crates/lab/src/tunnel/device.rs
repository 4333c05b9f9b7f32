//! TUN devices of the lab's own tunnels, and their wait for packets.

use std::io;
use std::os::fd::BorrowedFd;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use seikan_sys::netlink::{AddressOptions, Netlink};

use crate::error::Result;

/// Interval at which a waiting loop checks its flag, in milliseconds.
pub(crate) const PATIENCE: u16 = 50;

/// Sets a device up with these addresses; returns its index.
pub(crate) fn set_up(netlink: &Netlink, device: &str, addresses: &[IpNet]) -> Result<u32> {
    let index = netlink.link(device)?.index;
    let no_dad = AddressOptions {
        no_dad: true,
        ..AddressOptions::default()
    };
    for address in addresses {
        let done = netlink.add_address_with(index, *address, no_dad);
        // A kernel may have no IPv6, or none on an MTU this small (RFC 8200, section 5).
        if matches!(address, IpNet::V4(_)) {
            done?;
        }
    }
    netlink.set_up(index)?;
    Ok(index)
}

/// Waits for at most [`PATIENCE`], and returns which of the descriptors are readable.
pub(crate) fn readable<const N: usize>(fds: [BorrowedFd<'_>; N]) -> io::Result<[bool; N]> {
    let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    match poll(&mut fds, PollTimeout::from(PATIENCE)) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(fds.map(|fd| fd.any().unwrap_or(false)))
}
