//! The processes that have a tun device open.
//!
//! The line `iff:` in the fdinfo of a descriptor names the device (`tun_chr_show_fdinfo()`,
//! drivers/net/tun.c). But a name is unique only within a network namespace, and the device may be
//! in another namespace than the program. The kernel reports the namespace of the device only to a
//! holder of the descriptor (`TUNGETDEVNETNS`), so the descriptor is duplicated for a moment
//! (pidfd_getfd(2)). If that is refused, the namespace of the process is assumed.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use super::procfs;

/// `_IO('T', 227)` (include/uapi/linux/if_tun.h).
const TUNGETDEVNETNS: libc::Ioctl = 0x54e3;

/// A process with an open tun or tap device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) pid: u32,
    /// Name of the device.
    pub(super) device: String,
    /// Whether the device is in the network namespace of the caller.
    pub(super) here: bool,
}

/// Result of a search through all processes.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// Each process and device once.
    pub(super) holders: Vec<Holder>,
    /// Number of processes that could not be inspected.
    pub(super) refused: usize,
}

impl Search {
    /// Returns the processes that have a device of this namespace open.
    pub(super) fn of(&self, device: &str) -> Vec<u32> {
        let matches = |holder: &&Holder| holder.here && holder.device == device;
        self.holders
            .iter()
            .filter(matches)
            .map(|holder| holder.pid)
            .collect()
    }
}

/// Searches all processes.
pub(super) fn search() -> Search {
    let mut search = Search::default();
    for pid in procfs::pids() {
        match of_process(pid) {
            Ok(holders) => search.holders.extend(holders),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => search.refused += 1,
            Err(_) => {} // it has ended
        }
    }
    search
}

/// Returns the devices of one process.
pub(super) fn of_process(pid: u32) -> io::Result<Vec<Holder>> {
    let own = procfs::namespace("thread-self");
    let mut holders: Vec<Holder> = Vec::new();
    for (fd, target) in procfs::descriptors(pid)? {
        // This includes /dev/net/tun in the /dev of a container, and /dev/tap7 of a macvtap.
        let file = target.rsplit('/').next().unwrap_or_default();
        if !file.starts_with("tun") && !file.starts_with("tap") {
            continue;
        }
        let Ok(text) = procfs::read(format!("/proc/{pid}/fdinfo/{fd}")) else {
            continue;
        };
        let Some(device) = procfs::value(&text, "iff").filter(|name| !name.is_empty()) else {
            continue; // opened, but no device made yet
        };
        let namespace = device_namespace(pid, fd)
            .ok()
            .or_else(|| procfs::namespace(pid));
        let holder = Holder {
            pid,
            device: device.to_owned(),
            here: namespace.is_some() && namespace == own,
        };
        if !holders.contains(&holder) {
            holders.push(holder);
        }
    }
    Ok(holders)
}

/// Returns the process that does the work, of several that hold a descriptor. A supervisor that
/// holds it as well has no network sockets and uses no processor time. `connected` returns whether
/// a process has network sockets.
pub(super) fn worker(pids: &[u32], connected: impl Fn(u32) -> bool) -> Option<u32> {
    let spent = |pid: u32| crate::process::cpu_time(pid).unwrap_or_default().total();
    pids.iter()
        .copied()
        .max_by_key(|pid| (connected(*pid), spent(*pid), *pid))
}

/// Returns the inode of the network namespace of a descriptor's device.
fn device_namespace(pid: u32, fd: u32) -> io::Result<u64> {
    let process = descriptor(libc::SYS_pidfd_open, i64::from(pid), 0)?;
    let device = descriptor(
        libc::SYS_pidfd_getfd,
        i64::from(process.as_raw_fd()),
        i64::from(fd),
    )?;
    // SAFETY: the request takes no argument and returns a new descriptor.
    let namespace = unsafe { libc::ioctl(device.as_raw_fd(), TUNGETDEVNETNS) };
    if namespace < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it, and nobody else knows it.
    let namespace = unsafe { OwnedFd::from_raw_fd(namespace) };
    Ok(File::from(namespace).metadata()?.ino())
}

/// Makes a system call with two numbers and zero flags that returns a new descriptor.
fn descriptor(call: libc::c_long, first: i64, second: i64) -> io::Result<OwnedFd> {
    // SAFETY: neither call takes a pointer.
    let fd = unsafe { libc::syscall(call, first, second, 0) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether the process exists.
pub(super) fn exists(pid: u32) -> bool {
    fs::metadata(format!("/proc/{pid}")).is_ok()
}
