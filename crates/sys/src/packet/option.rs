//! The socket options of packet(7), one safe function for each.

use std::os::fd::{AsRawFd, BorrowedFd};

use libc::{c_int, packet_mreq, sock_filter, sock_fprog, sockaddr_ll, socklen_t, tpacket_stats};
use nix::errno::Errno;

/// Sets an option of `SOL_PACKET` that takes an int.
pub(super) fn set_int(fd: BorrowedFd<'_>, name: c_int, value: c_int) -> nix::Result<()> {
    set(fd, libc::SOL_PACKET, name, &value)
}

/// SO_ATTACH_FILTER: replaces the filter atomically, if there is one.
pub(super) fn attach_filter(fd: BorrowedFd<'_>, program: &mut [sock_filter]) -> nix::Result<()> {
    let program = sock_fprog {
        len: program.len() as libc::c_ushort,
        filter: program.as_mut_ptr(),
    };
    // The kernel copies and checks the memory at `filter` before the call returns.
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &program)
}

/// PACKET_ADD_MEMBERSHIP or PACKET_DROP_MEMBERSHIP.
pub(super) fn membership(
    fd: BorrowedFd<'_>,
    operation: c_int,
    interface: u32,
    kind: c_int,
    address: Option<[u8; 6]>,
) -> nix::Result<()> {
    let mut request = packet_mreq {
        mr_ifindex: interface as c_int,
        mr_type: kind as libc::c_ushort,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    if let Some(address) = address {
        request.mr_alen = 6;
        request.mr_address[..6].copy_from_slice(&address);
    }
    set(fd, libc::SOL_PACKET, operation, &request)
}

/// PACKET_STATISTICS: frames dropped at the full receive buffer since the last call.
pub(super) fn take_drops(fd: BorrowedFd<'_>) -> nix::Result<u32> {
    let mut statistics = tpacket_stats {
        tp_packets: 0,
        tp_drops: 0,
    };
    let mut length = size_of::<tpacket_stats>() as socklen_t;
    // SAFETY: `statistics` has `length` bytes, and both outlive the call.
    let outcome = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut statistics).cast(),
            &raw mut length,
        )
    };
    Errno::result(outcome).map(|_| statistics.tp_drops)
}

/// bind(2): frames of `protocol` (`ETH_P_*`) of one interface are received from now on.
pub(super) fn bind(fd: BorrowedFd<'_>, interface: u32, protocol: c_int) -> nix::Result<()> {
    let mut address = no_address();
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_protocol = (protocol as u16).to_be();
    address.sll_ifindex = interface as c_int;
    // SAFETY: `address` is a sockaddr_ll of the stated length and outlives the call.
    let outcome = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<sockaddr_ll>() as socklen_t,
        )
    };
    Errno::result(outcome).map(drop)
}

/// Returns the hardware type (`ARPHRD_*`) of the interface that the socket is bound to.
pub(super) fn hardware_type(fd: BorrowedFd<'_>) -> nix::Result<u16> {
    let mut address = no_address();
    let mut length = size_of::<sockaddr_ll>() as socklen_t;
    // SAFETY: `address` has `length` bytes, and both outlive the call.
    let outcome =
        unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut address).cast(), &raw mut length) };
    Errno::result(outcome).map(|_| address.sll_hatype)
}

/// Returns an address of zeros.
pub(super) fn no_address() -> sockaddr_ll {
    sockaddr_ll {
        sll_family: 0,
        sll_protocol: 0,
        sll_ifindex: 0,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    }
}

fn set<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> nix::Result<()> {
    let length = size_of::<T>() as socklen_t;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: `value` points to `length` bytes that outlive the call; the callers above pass what
    // each option reads, and pointers in it lead to memory that they hold borrowed.
    let outcome = unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, value, length) };
    Errno::result(outcome).map(drop)
}
