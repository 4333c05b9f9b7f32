//! The ioctls of `linux/if_tun.h`, one safe function for each.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{c_int, c_short, ifreq};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use nix::sys::stat::Mode;

/// Opens the clone device: non-blocking, close-on-exec.
pub(crate) fn open() -> nix::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    nix::fcntl::open("/dev/net/tun", flags, Mode::empty()).map(File::from)
}

/// TUNGETFEATURES: returns the `IFF_*` flags that this kernel supports.
pub(crate) fn features(file: &File) -> nix::Result<u32> {
    let mut features: libc::c_uint = 0;
    // SAFETY: TUNGETFEATURES writes one unsigned int, and `features` outlives the call.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETFEATURES, &raw mut features) };
    Errno::result(outcome).map(|_| features)
}

/// TUNSETIFF: makes `file` a queue of interface `name`.
pub(crate) fn attach(file: &File, name: &str, flags: c_int) -> nix::Result<()> {
    let mut request = request(name);
    // IFF_TUN_EXCL is the sign bit of the 16-bit field.
    request.ifr_ifru.ifru_flags = flags as c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, and `request` outlives the call.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    Errno::result(outcome).map(drop)
}

/// TUNGETIFF: returns the name of the interface that `file` is a queue of, and its `IFF_*` flags.
/// The name is made valid UTF-8.
pub(crate) fn interface(file: &File) -> nix::Result<(String, c_int)> {
    let mut request = request("");
    // SAFETY: TUNGETIFF writes one ifreq, and `request` outlives the call. The number, which
    // includes a direction and a size, is that of no other driver.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    Errno::result(outcome)?;
    let name = request.ifr_name.iter().map(|byte| *byte as u8);
    let name: Vec<u8> = name.take_while(|byte| *byte != 0).collect();
    // SAFETY: TUNGETIFF has set the flags, and every value of these bits is valid.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let name = String::from_utf8_lossy(&name).into_owned();
    Ok((name, c_int::from(flags.cast_unsigned())))
}

/// TUNSETVNETHDRSZ, and TUNSETVNETLE, so that the header does not depend on the byte order of the
/// machine.
pub(crate) fn set_header(file: &File, length: usize) -> nix::Result<()> {
    let length = length as c_int;
    let little_endian: c_int = 1;
    // SAFETY: TUNSETVNETHDRSZ reads one int, and `length` outlives the call.
    let outcome =
        unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const length) };
    Errno::result(outcome)?;
    // SAFETY: TUNSETVNETLE reads one int, and `little_endian` outlives the call.
    let outcome = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            libc::TUNSETVNETLE,
            &raw const little_endian,
        )
    };
    Errno::result(outcome).map(drop)
}

/// TUNSETOFFLOAD: enables exactly the offloads in `bits` (`TUN_F_*`), or fails without a change.
pub(crate) fn set_offload(file: &File, bits: u32) -> nix::Result<()> {
    let bits = libc::c_ulong::from(bits);
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let outcome = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, bits) };
    Errno::result(outcome).map(drop)
}

/// SIOCSIFMTU: sets the MTU, in the network namespace of the calling thread.
pub(crate) fn set_mtu(name: &str, mtu: u32) -> nix::Result<()> {
    let socket: OwnedFd = socket(
        AddressFamily::Inet,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let mut request = request(name);
    request.ifr_ifru.ifru_mtu = c_int::try_from(mtu).map_err(|_| Errno::EINVAL)?;
    // SAFETY: SIOCSIFMTU reads one ifreq, and `request` outlives the call.
    let outcome = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            libc::SIOCSIFMTU as _,
            &raw const request,
        )
    };
    Errno::result(outcome).map(drop)
}

/// An ifreq with `name`, which the caller checked to be shorter than IFNAMSIZ.
fn request(name: &str) -> ifreq {
    // SAFETY: ifreq is integers, arrays and unions of them, for which zero bytes are valid.
    let mut request: ifreq = unsafe { std::mem::zeroed() };
    let terminated = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..terminated].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}
