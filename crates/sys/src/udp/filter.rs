//! A socket filter for datagrams that no peer sends (too long, too short, or of an unknown type) and
//! for floods.
//!
//! A datagram of 64 KiB uses 100 kB of a receive buffer and is copied before the protocol sees it.
//! Many short ones each cost a wake-up, and those of a flood fill the buffer so that the datagrams of
//! peers are lost. [`DatagramFilter`] is an eBPF program that the kernel runs for each datagram
//! before it enters the receive buffer. For datagrams joined by GRO it sees the length of each
//! (`gso_size`), which classic BPF cannot read, and the first byte of the first. Datagrams on the
//! loopback interface pass.
//!
//! During a flood, sources that are not known may send a few datagrams each time that the allowance
//! is renewed ([`DatagramFilter::limit_sources`]). There is an allowance for each IPv4 address or
//! IPv6 /64, as in WireGuard's `ratelimiter.c`, and each type of message, so a flood does not use up
//! that of other sources, and one of data none of a handshake. They are mapped to [`GROUPS`] counters
//! by a keyed hash: the table does not grow, and a sender cannot choose whose counter it shares.
//!
//! Limits and counts are in a page shared with the kernel, so later changes need neither a system
//! call nor a privilege. Loading needs Linux 5.7 (`gso_size` of `struct __sk_buff`), and CAP_BPF or
//! root.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;

use super::control::set_int;
use crate::random;

mod program;

use program::program;

/// The minimum length of a type that is always dropped.
const NEVER: u16 = u16::MAX;
/// Counters of allowances that all sources share.
const GROUPS: usize = 1024;
/// Sets of known sources, each with room for [`WAYS`] of them. A thousand sources fill a quarter.
const SETS: usize = 1024;
const WAYS: usize = 4;

/// The page with the limits that the program reads, and its counts.
#[repr(C)]
struct Shared {
    /// Maximum length of a payload, in bytes.
    maximum: AtomicU32,
    /// 1 while sources that are not known are limited.
    limits: AtomicU32,
    /// Keys of [`hash`]. The second is odd.
    keys: [AtomicU64; 2],
    /// Dropped buffers: each a datagram, or several that GRO joined.
    buffers: AtomicU64,
    /// Datagrams longer than the maximum.
    oversized: AtomicU64,
    /// Datagrams shorter than the minimum of their type, or of no type.
    malformed: AtomicU64,
    /// Datagrams of sources that used up their allowance.
    limited: AtomicU64,
    /// Minimum length of a payload in bytes, by its first byte.
    minimum: [AtomicU16; 256],
    /// Datagrams that each group of addresses and types may still send. Joined ones may take it below zero.
    allowance: [AtomicI64; GROUPS],
    /// Fingerprints of known sources; 0 is a free entry.
    known: [[AtomicU32; WAYS]; SETS],
}

/// Counts of datagrams that the filter dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filtered {
    /// Buffers of the kernel, each of which counts as one drop of its socket.
    pub buffers: u64,
    /// Datagrams longer than the maximum.
    pub oversized: u64,
    /// Datagrams shorter than the minimum of their type, or of no type.
    pub malformed: u64,
    /// Datagrams of sources that used up their allowance ([`DatagramFilter::limit_sources`]).
    pub limited: u64,
}

/// The program and its page, for any number of sockets.
pub struct DatagramFilter {
    program: OwnedFd,
    shared: NonNull<Shared>,
}

// SAFETY: the mapping belongs to this value and is not bound to a thread; it is reached through atomics alone.
unsafe impl Send for DatagramFilter {}
// SAFETY: as above.
unsafe impl Sync for DatagramFilter {}

impl DatagramFilter {
    /// Loads the program. It lets every datagram pass until a limit is set, except empty ones.
    ///
    /// # Errors
    /// Those of bpf(2) or mmap(2): an older kernel, or a missing privilege.
    pub fn load() -> io::Result<DatagramFilter> {
        let map = create_map()?;
        let shared = share(&map)?;
        let program = load(map.as_fd());
        // The mapping and the program each hold the map.
        let filter = DatagramFilter {
            program: match program {
                Ok(program) => program,
                Err(error) => {
                    unmap(shared);
                    return Err(error);
                }
            },
            shared,
        };
        filter.set_maximum(u32::MAX);
        for key in &filter.shared().keys {
            let mut bytes = [0; 8];
            random::fill(&mut bytes)?;
            key.store(u64::from_ne_bytes(bytes) | 1, Ordering::Relaxed);
        }
        Ok(filter)
    }

    /// Sets the maximum length of a payload in bytes.
    pub fn set_maximum(&self, bytes: u32) {
        self.shared().maximum.store(bytes, Ordering::Relaxed);
    }

    /// Drops payloads that do not start with one of these bytes or are shorter than its length.
    pub fn set_types(&self, types: &[(u8, u16)]) {
        for (first, minimum) in self.shared().minimum.iter().enumerate() {
            let of_type = types.iter().find(|(byte, _)| usize::from(*byte) == first);
            minimum.store(
                of_type.map_or(NEVER, |(_, length)| *length),
                Ordering::Relaxed,
            );
        }
    }

    /// Limits sources other than `known` until [`DatagramFilter::lift_limit`]: all sources of an IPv4 address
    /// or an IPv6 /64 together may send `allowance` datagrams of each type until the next call. A call replaces
    /// the known sources. Sources that the table has no room for count as unknown.
    pub fn limit_sources(&self, known: impl Iterator<Item = SocketAddr>, allowance: u32) {
        let shared = self.shared();
        let keys = [0, 1].map(|i| shared.keys[i].load(Ordering::Relaxed));
        let mut sets = vec![[0; WAYS]; SETS];
        for source in known {
            let hash = hash(keys, source);
            let set = &mut sets[set(hash)];
            if !set.contains(&fingerprint(hash))
                && let Some(free) = set.iter_mut().find(|entry| **entry == 0)
            {
                *free = fingerprint(hash);
            }
        }
        // A source that stays known keeps its entry or gets it back at once.
        for (entry, new) in shared.known.as_flattened().iter().zip(sets.as_flattened()) {
            entry.store(*new, Ordering::Relaxed);
        }
        for group in &shared.allowance {
            group.store(allowance.into(), Ordering::Relaxed);
        }
        shared.limits.store(1, Ordering::Relaxed);
    }

    /// Lets every source send without a limit.
    pub fn lift_limit(&self) {
        self.shared().limits.store(0, Ordering::Relaxed);
    }

    /// Returns the number of datagrams dropped by the limit of sources.
    pub fn limited(&self) -> u64 {
        self.shared().limited.load(Ordering::Relaxed)
    }

    /// Returns the drops at all sockets together.
    pub fn filtered(&self) -> Filtered {
        let shared = self.shared();
        Filtered {
            buffers: shared.buffers.load(Ordering::Relaxed),
            oversized: shared.oversized.load(Ordering::Relaxed),
            malformed: shared.malformed.load(Ordering::Relaxed),
            limited: self.limited(),
        }
    }

    /// Attaches the program to a socket.
    pub(super) fn attach(&self, socket: BorrowedFd<'_>) -> nix::Result<()> {
        let program = self.program.as_raw_fd();
        set_int(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, program)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped, aligned to a page, at least as large, zeroed by the kernel, and only reached by atomics.
        unsafe { self.shared.as_ref() }
    }
}

impl Drop for DatagramFilter {
    fn drop(&mut self) {
        unmap(self.shared);
    }
}

impl fmt::Debug for DatagramFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatagramFilter")
            .field("maximum", &self.shared().maximum)
            .field("filtered", &self.filtered())
            .finish_non_exhaustive()
    }
}

/// Keyed hash of a source, as [`program()`] computes it: each word of the address, then the port, is mixed in by
/// [`mix`].
fn hash(keys: [u64; 2], source: SocketAddr) -> u64 {
    let words = match source.ip() {
        IpAddr::V4(address) => vec![address.to_bits()],
        IpAddr::V6(address) => {
            let bits = address.to_bits();
            vec![
                (bits >> 96) as u32,
                (bits >> 64) as u32,
                (bits >> 32) as u32,
                bits as u32,
            ]
        }
    };
    let words = words.into_iter().chain([source.port().into()]);
    words.fold(keys[0], |hash, word| mix(hash, word, keys[1]))
}

fn mix(hash: u64, word: u32, key: u64) -> u64 {
    let product = (hash ^ u64::from(word)).wrapping_mul(key);
    product ^ product >> 32
}

/// The set of a source, by the high bits of its hash.
fn set(hash: u64) -> usize {
    (hash >> (u64::BITS - SETS.ilog2())) as usize
}

/// The fingerprint of a source: the low bits of its hash, never zero.
fn fingerprint(hash: u64) -> u32 {
    hash as u32 | 1
}

/// Whether both are the same program.
impl PartialEq for DatagramFilter {
    fn eq(&self, other: &DatagramFilter) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for DatagramFilter {}

/// `union bpf_attr` of `BPF_MAP_CREATE` (linux/bpf.h).
#[repr(C)]
struct MapAttributes {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// `union bpf_attr` of `BPF_PROG_LOAD`.
#[repr(C)]
struct ProgramAttributes {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
}

const BPF_MAP_CREATE: c_int = 0;
const BPF_PROG_LOAD: c_int = 5;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_MMAPABLE: u32 = 1 << 10;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;

/// Creates an array with one element, in a page of its own.
fn create_map() -> io::Result<OwnedFd> {
    let attributes = MapAttributes {
        map_type: BPF_MAP_TYPE_ARRAY,
        key_size: 4,
        value_size: size_of::<Shared>() as u32,
        max_entries: 1,
        map_flags: BPF_F_MMAPABLE,
    };
    // SAFETY: `attributes` is laid out as the kernel reads it and holds no pointers.
    unsafe { bpf(BPF_MAP_CREATE, &attributes) }
}

fn share(map: &OwnedFd) -> io::Result<NonNull<Shared>> {
    // SAFETY: a new mapping where the kernel finds room; no memory in use is touched.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size_of::<Shared>(),
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            map.as_raw_fd(),
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(memory.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

fn unmap(shared: NonNull<Shared>) {
    // SAFETY: mapped by `share` with this length, and given back once.
    unsafe { libc::munmap(shared.as_ptr().cast(), size_of::<Shared>()) };
}

fn load(map: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let program = program(map.as_raw_fd());
    // The program calls no kernel function that requires another license.
    let license = c"Apache-2.0";
    let attributes = ProgramAttributes {
        prog_type: BPF_PROG_TYPE_SOCKET_FILTER,
        insn_cnt: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: 0,
    };
    // SAFETY: `attributes` is laid out as the kernel reads it; its pointers lead to the instructions, as many as said,
    // and to a string with its end, which outlive the call.
    unsafe { bpf(BPF_PROG_LOAD, &attributes) }
}

/// bpf(2), for commands that return a descriptor.
///
/// # Safety
/// `attributes` is what the command reads, and its pointers hold for the call.
unsafe fn bpf<T>(command: c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise; the length is that of `attributes`.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    let fd = Errno::result(fd)?;
    // SAFETY: the kernel has just opened it for us; descriptors fit.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}
