//! A pair of connected sockets that keep the bounds of packets, in place of a TUN device.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt::SndBuf,
};

/// Requested send buffer of each end in bytes; the kernel grants at most net.core.wmem_max. A super-packet takes more than
/// 64 KiB of it, so at the usual maximum of 208 KiB an end holds six of them.
const SEND_BUFFER: usize = 4 << 20;

/// Creates a SOCK_SEQPACKET pair, non-blocking. A write of one end is a read of the other. A write to an end whose reader is
/// behind is refused with `WouldBlock`; the end becomes writable again when a quarter of its buffer or less is in use.
///
/// # Errors
/// Those of socketpair(2): out of descriptors or memory.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
    for end in [&a, &b] {
        setsockopt(end, SndBuf, &SEND_BUFFER)?;
    }
    Ok((a, b))
}
