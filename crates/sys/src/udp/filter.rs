//! A socket filter for datagrams that no peer sends: too long, too short, or of an unknown type.
//!
//! A datagram of 64 KiB uses 100 kB of a receive buffer and is copied before the protocol sees it.
//! Many short ones each cost a wake-up. [`DatagramFilter`] is an eBPF program that the kernel runs
//! for each datagram before it enters the receive buffer. For datagrams joined by GRO it sees the
//! length of each (`gso_size`), which classic BPF cannot read, and the first byte of the first.
//! Datagrams on the loopback interface pass.
//!
//! Limits and counts are in a page shared with the kernel, so later changes need neither a system
//! call nor a privilege. Loading needs Linux 5.7 (`gso_size` of `struct __sk_buff`), and CAP_BPF or
//! root.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;

use super::control::set_int;

/// The minimum length of a type that is always dropped.
const NEVER: u16 = u16::MAX;

/// The page with the limits that the program reads, and its counts.
#[repr(C)]
struct Shared {
    /// Maximum length of a payload, in bytes.
    maximum: AtomicU32,
    _unused: u32,
    /// Dropped buffers: each a datagram, or several that GRO joined.
    buffers: AtomicU64,
    /// Datagrams longer than the maximum.
    oversized: AtomicU64,
    /// Datagrams shorter than the minimum of their type, or of no type.
    malformed: AtomicU64,
    /// Minimum length of a payload in bytes, by its first byte.
    minimum: [AtomicU16; 256],
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

    /// Returns the drops at all sockets together.
    pub fn filtered(&self) -> Filtered {
        let shared = self.shared();
        Filtered {
            buffers: shared.buffers.load(Ordering::Relaxed),
            oversized: shared.oversized.load(Ordering::Relaxed),
            malformed: shared.malformed.load(Ordering::Relaxed),
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

/// One instruction (linux/bpf.h, `struct bpf_insn`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    // Two bit fields, in the byte order of the machine.
    let registers = if cfg!(target_endian = "little") {
        from << 4 | to
    } else {
        to << 4 | from
    };
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

/// The program. Register 1 holds the packet at first. At the end, register 0 holds the number of
/// bytes that are accepted.
fn program(map: c_int) -> [Instruction; 30] {
    /// Fields of `struct __sk_buff`.
    const LEN: i16 = 0;
    const IFINDEX: i16 = 40;
    const GSO_SEGS: i16 = 164;
    const GSO_SIZE: i16 = 176;
    /// Index of the loopback interface in every namespace (net/flow.h).
    const LOOPBACK_IFINDEX: i32 = 1;
    const UDP_HEADER: i32 = 8;
    /// `BPF_PSEUDO_MAP_VALUE`: the immediate is a map, and the register gets the address of its first element.
    const MAP_VALUE: u8 = 2;
    const SET_64: u8 = 0x18; // BPF_LD | BPF_DW | BPF_IMM, two instructions long
    const LOAD: u8 = 0x61; // BPF_LDX | BPF_W | BPF_MEM
    const LOAD_16: u8 = 0x69; // BPF_LDX | BPF_H | BPF_MEM
    const LOAD_PACKET: u8 = 0x30; // BPF_LD | BPF_B | BPF_ABS: of the packet in register 6, into register 0
    const ADD_TO: u8 = 0xdb; // BPF_STX | BPF_DW | BPF_ATOMIC, with 0: BPF_ADD
    const COPY: u8 = 0xbf; // BPF_ALU64 | BPF_MOV | BPF_X
    const SET: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
    const SET_32: u8 = 0xb4; // BPF_ALU | BPF_MOV | BPF_K
    const ADD: u8 = 0x0f; // BPF_ALU64 | BPF_ADD | BPF_X
    const SUBTRACT: u8 = 0x17; // BPF_ALU64 | BPF_SUB | BPF_K
    const AND: u8 = 0x57; // BPF_ALU64 | BPF_AND | BPF_K
    const IF_EQUAL: u8 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const IF_OTHER: u8 = 0x55; // BPF_JMP | BPF_JNE | BPF_K
    const IF_GREATER: u8 = 0x2d; // BPF_JMP | BPF_JGT | BPF_X
    const JUMP: u8 = 0x05; // BPF_JMP | BPF_JA
    const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT
    const ACCEPT: i16 = 21;
    const OVERSIZED: i16 = 23;
    const MALFORMED: i16 = 25;
    // Jumps are relative to the next instruction.
    let to = |target: i16, from: i16| target - from - 1;
    let at = |field: usize| field as i16;
    [
        instruction(COPY, 6, 1, 0, 0),
        instruction(LOAD, 2, 6, IFINDEX, 0),
        instruction(IF_EQUAL, 2, 0, to(ACCEPT, 2), LOOPBACK_IFINDEX),
        instruction(SET_64, 7, MAP_VALUE, 0, map),
        instruction(0, 0, 0, 0, 0),
        // Register 8: the length of each joined datagram, or of the only one.
        instruction(LOAD, 8, 6, GSO_SIZE, 0),
        instruction(IF_OTHER, 8, 0, 2, 0),
        instruction(LOAD, 8, 6, LEN, 0),
        instruction(SUBTRACT, 8, 0, 0, UDP_HEADER),
        // Register 9: the number of joined datagrams; 0 means one.
        instruction(LOAD, 9, 6, GSO_SEGS, 0),
        instruction(IF_OTHER, 9, 0, 1, 0),
        instruction(SET, 9, 0, 0, 1),
        instruction(LOAD, 4, 7, at(offset_of!(Shared, maximum)), 0),
        instruction(IF_GREATER, 8, 4, to(OVERSIZED, 13), 0),
        // There is no first byte.
        instruction(IF_EQUAL, 8, 0, to(MALFORMED, 14), 0),
        instruction(LOAD_PACKET, 0, 0, 0, UDP_HEADER),
        // Twice the first byte; the verifier requires the bound.
        instruction(AND, 0, 0, 0, 0xff),
        instruction(ADD, 0, 0, 0, 0),
        instruction(ADD, 0, 7, 0, 0),
        instruction(LOAD_16, 3, 0, at(offset_of!(Shared, minimum)), 0),
        instruction(IF_GREATER, 3, 8, to(MALFORMED, 20), 0),
        instruction(SET_32, 0, 0, 0, -1),
        instruction(EXIT, 0, 0, 0, 0),
        // OVERSIZED
        instruction(ADD_TO, 7, 9, at(offset_of!(Shared, oversized)), 0),
        instruction(JUMP, 0, 0, 1, 0),
        // MALFORMED
        instruction(ADD_TO, 7, 9, at(offset_of!(Shared, malformed)), 0),
        instruction(SET, 3, 0, 0, 1),
        instruction(ADD_TO, 7, 3, at(offset_of!(Shared, buffers)), 0),
        instruction(SET, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}
