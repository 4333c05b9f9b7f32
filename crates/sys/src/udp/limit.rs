//! Datagrams that are too long to be any that a peer sends, refused before they take room in a receive buffer.
//!
//! A stranger's datagram of 64 KiB takes 100 kB of a receive buffer and a copy before anybody looks at it, and those
//! that are wanted find the buffer full. [`SizeLimit`] is an eBPF program that the kernel runs for what comes to a socket.
//! It sees what GRO made: of joined datagrams the length of each (`gso_size`), which classic BPF cannot see. What comes
//! by the loopback interface passes.
//!
//! Limit and counts lie in a page that the kernel and this process share, so that neither needs a system call nor a
//! privilege later. Needs Linux 5.7 (`gso_size` of `struct __sk_buff`), and at first CAP_BPF or root.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::errno::Errno;

use super::control::set_int;

/// What the program reads and counts.
#[repr(C)]
struct Shared {
    /// Bytes of the longest payload that passes.
    limit: AtomicU32,
    _unused: u32,
    /// Dropped buffers: each a datagram, or several that GRO joined.
    runs: AtomicU64,
    /// Datagrams in them.
    datagrams: AtomicU64,
}

/// What was refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refused {
    /// Buffers of the kernel, each of which counts as one drop of its socket.
    pub runs: u64,
    /// Datagrams in them.
    pub datagrams: u64,
}

/// The program and its page; for any number of sockets.
pub struct SizeLimit {
    program: OwnedFd,
    shared: NonNull<Shared>,
}

// SAFETY: the mapping belongs to this value and is not bound to a thread; it is reached through atomics alone.
unsafe impl Send for SizeLimit {}
// SAFETY: as above.
unsafe impl Sync for SizeLimit {}

impl SizeLimit {
    /// Loads the program. At first everything passes.
    ///
    /// # Errors
    /// What bpf(2) or mmap(2) says: an older kernel, or no right to.
    pub fn load() -> io::Result<SizeLimit> {
        let map = create_map()?;
        let shared = share(&map)?;
        let program = load(map.as_fd());
        // The mapping and the program each hold the map.
        let limit = SizeLimit {
            program: match program {
                Ok(program) => program,
                Err(error) => {
                    unmap(shared);
                    return Err(error);
                }
            },
            shared,
        };
        limit.set(u32::MAX);
        Ok(limit)
    }

    /// Lets payloads of at most so many bytes pass from now on.
    pub fn set(&self, bytes: u32) {
        self.shared().limit.store(bytes, Ordering::Relaxed);
    }

    /// What did not pass, at all sockets together.
    pub fn refused(&self) -> Refused {
        Refused {
            runs: self.shared().runs.load(Ordering::Relaxed),
            datagrams: self.shared().datagrams.load(Ordering::Relaxed),
        }
    }

    /// Has the kernel run it for a socket.
    pub(super) fn attach(&self, socket: BorrowedFd<'_>) -> nix::Result<()> {
        let program = self.program.as_raw_fd();
        set_int(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, program)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped, aligned to a page, at least as large, zeroed by the kernel, and only reached by atomics.
        unsafe { self.shared.as_ref() }
    }
}

impl Drop for SizeLimit {
    fn drop(&mut self) {
        unmap(self.shared);
    }
}

impl fmt::Debug for SizeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SizeLimit")
            .field("limit", &self.shared().limit)
            .field("refused", &self.refused())
            .finish_non_exhaustive()
    }
}

/// The same program.
impl PartialEq for SizeLimit {
    fn eq(&self, other: &SizeLimit) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for SizeLimit {}

/// `union bpf_attr` as `BPF_MAP_CREATE` reads it (linux/bpf.h).
#[repr(C)]
struct MapAttributes {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

/// The same for `BPF_PROG_LOAD`.
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

/// An array with one element, in a page of its own.
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
    // No function of the kernel is called that asks for another.
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

/// bpf(2), for commands that give a descriptor.
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
    // Two bit fields, whose order is that of the bytes.
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

/// The program. Register 1 has the packet at first, 0 the answer: how many bytes of it are taken.
fn program(map: c_int) -> [Instruction; 20] {
    /// Fields of `struct __sk_buff`.
    const LEN: i16 = 0;
    const IFINDEX: i16 = 40;
    const GSO_SEGS: i16 = 164;
    const GSO_SIZE: i16 = 176;
    /// The loopback interface's, in every namespace (net/flow.h).
    const LOOPBACK_IFINDEX: i32 = 1;
    const UDP_HEADER: i32 = 8;
    /// `BPF_PSEUDO_MAP_VALUE`: the immediate is a map, and the register gets the address of its first element.
    const MAP_VALUE: u8 = 2;
    const SET_64: u8 = 0x18; // BPF_LD | BPF_DW | BPF_IMM, two instructions long
    const LOAD: u8 = 0x61; // BPF_LDX | BPF_W | BPF_MEM
    const ADD_TO: u8 = 0xdb; // BPF_STX | BPF_DW | BPF_ATOMIC, with 0: BPF_ADD
    const SET: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
    const SET_32: u8 = 0xb4; // BPF_ALU | BPF_MOV | BPF_K
    const SUBTRACT: u8 = 0x17; // BPF_ALU64 | BPF_SUB | BPF_K
    const IF_EQUAL: u8 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const IF_OTHER: u8 = 0x55; // BPF_JMP | BPF_JNE | BPF_K
    const IF_AT_LEAST: u8 = 0x3d; // BPF_JMP | BPF_JGE | BPF_X
    const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT
    let at = |field: usize| field as i16;
    [
        instruction(LOAD, 2, 1, IFINDEX, 0),
        instruction(IF_EQUAL, 2, 0, 16, LOOPBACK_IFINDEX), // take it
        instruction(SET_64, 3, MAP_VALUE, 0, map),
        instruction(0, 0, 0, 0, 0),
        instruction(LOAD, 4, 3, at(offset_of!(Shared, limit)), 0),
        // The length of each that was joined, or of the only one.
        instruction(LOAD, 2, 1, GSO_SIZE, 0),
        instruction(IF_OTHER, 2, 0, 2, 0),
        instruction(LOAD, 2, 1, LEN, 0),
        instruction(SUBTRACT, 2, 0, 0, UDP_HEADER),
        instruction(IF_AT_LEAST, 4, 2, 8, 0), // take it
        // How many were joined; none is one.
        instruction(LOAD, 5, 1, GSO_SEGS, 0),
        instruction(IF_OTHER, 5, 0, 1, 0),
        instruction(SET, 5, 0, 0, 1),
        instruction(SET, 0, 0, 0, 1),
        instruction(ADD_TO, 3, 0, at(offset_of!(Shared, runs)), 0),
        instruction(ADD_TO, 3, 5, at(offset_of!(Shared, datagrams)), 0),
        instruction(SET, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
        // Taken, all of it.
        instruction(SET_32, 0, 0, 0, -1),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}
