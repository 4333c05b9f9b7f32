//! The methods of receiving.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, c_void};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use seikan_sys::packet::{
    Accept, PacketOptions, PacketSocket, RECEIVE_BUFFER_LEN, VNET_HEADER_LEN,
};

use super::DESTINATION;

const BATCH: usize = 32;
/// Size of a ring in bytes: that of the library's receive buffer.
const MEMORY: usize = 16 << 20;
/// Size in bytes of a slot in the ring of version 2: the longest frame and its header.
const SLOT: usize = 66_560;

const TPACKET_V2: c_int = libc::tpacket_versions::TPACKET_V2 as c_int;
const TPACKET_V3: c_int = libc::tpacket_versions::TPACKET_V3 as c_int;

/// Receives header and frame.
pub type Sink<'a> = &'a mut dyn FnMut(&[u8]);

/// A method of receiving.
pub trait Receiver {
    fn fd(&self) -> c_int;
    /// Passes all waiting frames with their headers to `sink`.
    fn drain(&mut self, sink: Sink<'_>);
}

struct Single(PacketSocket, Vec<u8>);

impl Receiver for Single {
    fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }

    fn drain(&mut self, sink: Sink<'_>) {
        while let Ok(received) = self.0.receive(&mut self.1) {
            sink(&self.1[..received.length]);
        }
    }
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 64]);

struct Batch {
    socket: PacketSocket,
    arena: Vec<u8>,
}

impl Receiver for Batch {
    fn fd(&self) -> c_int {
        self.socket.as_raw_fd()
    }

    fn drain(&mut self, sink: Sink<'_>) {
        let mut addresses: [libc::sockaddr_ll; BATCH] = zeroed();
        let mut controls = [Control([0; 64]); BATCH];
        loop {
            let mut parts: [libc::iovec; BATCH] = zeroed();
            let mut headers: [libc::mmsghdr; BATCH] = zeroed();
            for index in 0..BATCH {
                let buffer = &mut self.arena[index * RECEIVE_BUFFER_LEN..][..RECEIVE_BUFFER_LEN];
                parts[index].iov_base = buffer.as_mut_ptr().cast();
                parts[index].iov_len = buffer.len();
                let header = &mut headers[index].msg_hdr;
                header.msg_name = (&raw mut addresses[index]).cast();
                header.msg_namelen = size_of::<libc::sockaddr_ll>() as u32;
                header.msg_iov = &raw mut parts[index];
                header.msg_iovlen = 1;
                header.msg_control = (&raw mut controls[index]).cast();
                header.msg_controllen = 64;
            }
            // SAFETY: every header points to live buffers of the stated lengths.
            let count = unsafe {
                libc::recvmmsg(
                    self.fd(),
                    headers.as_mut_ptr(),
                    BATCH as u32,
                    0,
                    std::ptr::null_mut(),
                )
            };
            let Ok(count) = usize::try_from(count) else {
                return;
            };
            for (index, header) in headers[..count].iter().enumerate() {
                let start = index * RECEIVE_BUFFER_LEN;
                sink(&self.arena[start..start + header.msg_len as usize]);
            }
            if count < BATCH {
                return;
            }
        }
    }
}

/// A socket with a mapped ring, which the library does not have.
struct Ring {
    fd: OwnedFd,
    start: *mut u8,
    version: c_int,
    next: usize,
}

impl Ring {
    const BLOCK: usize = 1 << 20;
    const BLOCKS: usize = MEMORY / Self::BLOCK;
    const SLOTS: usize = Self::BLOCK / SLOT;

    fn open(interface: u32, version: c_int) -> Ring {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let fd = socket(AddressFamily::Packet, SockType::Raw, flags, None).expect("socket");
        set(&fd, libc::PACKET_VERSION, &version);
        set(&fd, libc::PACKET_VNET_HDR, &1);
        set(&fd, libc::PACKET_IGNORE_OUTGOING, &1);
        let mut request: libc::tpacket_req3 = zeroed();
        request.tp_block_size = Self::BLOCK as u32;
        request.tp_block_nr = Self::BLOCKS as u32;
        request.tp_frame_size = SLOT as u32;
        request.tp_frame_nr = (Self::SLOTS * Self::BLOCKS) as u32;
        request.tp_retire_blk_tov = 1; // milliseconds, the least
        if version == TPACKET_V2 {
            let words = [
                request.tp_block_size,
                request.tp_block_nr,
                request.tp_frame_size,
                request.tp_frame_nr,
            ];
            set(&fd, libc::PACKET_RX_RING, &words);
        } else {
            set(&fd, libc::PACKET_RX_RING, &request);
        }
        // SAFETY: a new mapping of the ring's size, checked below.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                MEMORY,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED, "mmap");
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = interface as c_int;
        let length = size_of_val(&address) as u32;
        // SAFETY: a sockaddr_ll of the stated length.
        let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
        assert_eq!(bound, 0, "bind");
        let start = start.cast();
        Ring {
            fd,
            start,
            version,
            next: 0,
        }
    }

    /// The status word at `at`, which the kernel shares.
    fn status(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned, as all blocks and slots are.
        unsafe { AtomicU32::from_ptr(self.start.add(at).cast()) }
    }

    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        assert!(at + length <= MEMORY);
        // SAFETY: inside the mapping; the kernel does not write to released parts.
        unsafe { std::slice::from_raw_parts(self.start.add(at), length) }
    }

    fn header<T: Copy>(&self, at: usize) -> T {
        assert!(at + size_of::<T>() <= MEMORY);
        // SAFETY: inside the mapping; `T` is integers.
        unsafe { self.start.add(at).cast::<T>().read_unaligned() }
    }

    fn drain_slots(&mut self, sink: Sink<'_>) {
        loop {
            let at = self.next / Self::SLOTS * Self::BLOCK + self.next % Self::SLOTS * SLOT;
            if self.status(at).load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return;
            }
            let header: libc::tpacket2_hdr = self.header(at);
            let length = VNET_HEADER_LEN + header.tp_snaplen as usize;
            sink(self.bytes(at + header.tp_mac as usize - VNET_HEADER_LEN, length));
            self.status(at)
                .store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = (self.next + 1) % (Self::SLOTS * Self::BLOCKS);
        }
    }

    fn drain_blocks(&mut self, sink: Sink<'_>) {
        loop {
            let block = self.next * Self::BLOCK;
            // struct tpacket_block_desc: version, offset_to_priv, then struct tpacket_hdr_v1.
            let descriptor = block + 8;
            if self.status(descriptor).load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
                return;
            }
            let count: u32 = self.header(descriptor + 4);
            let first: u32 = self.header(descriptor + 8);
            let mut at = block + first as usize;
            for _ in 0..count {
                let header: libc::tpacket3_hdr = self.header(at);
                let length = VNET_HEADER_LEN + header.tp_snaplen as usize;
                sink(self.bytes(at + header.tp_mac as usize - VNET_HEADER_LEN, length));
                at += header.tp_next_offset as usize;
            }
            self.status(descriptor)
                .store(libc::TP_STATUS_KERNEL, Ordering::Release);
            self.next = (self.next + 1) % Self::BLOCKS;
        }
    }
}

impl Receiver for Ring {
    fn fd(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    fn drain(&mut self, sink: Sink<'_>) {
        match self.version {
            TPACKET_V2 => self.drain_slots(sink),
            _ => self.drain_blocks(sink),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping of `open`, unmapped once.
        unsafe { libc::munmap(self.start.cast(), MEMORY) };
    }
}

/// A C structure of integers and pointers, or an array of them, all zero.
pub fn zeroed<T: Copy>() -> T {
    // SAFETY: used here only for C structures of integers and pointers, and arrays of them.
    unsafe { std::mem::zeroed() }
}

fn set<T>(fd: &OwnedFd, name: c_int, value: &T) {
    let value_start = std::ptr::from_ref(value).cast::<c_void>();
    let length = size_of::<T>() as u32;
    // SAFETY: `length` bytes at `value_start` that outlive the call.
    let outcome =
        unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_PACKET, name, value_start, length) };
    assert_eq!(
        outcome,
        0,
        "option {name}: {}",
        std::io::Error::last_os_error()
    );
}

/// All methods, in the order of the tables.
pub const METHODS: [&str; 4] = ["recvmsg", "recvmmsg", "ring v2", "ring v3"];

/// Opens a socket on an interface that is read by this method.
pub fn open(method: &str, interface: u32) -> Box<dyn Receiver> {
    let options = PacketOptions::new(Accept::Host(DESTINATION));
    let library = || PacketSocket::open(interface, &options).expect("packet socket");
    match method {
        "recvmsg" => Box::new(Single(library(), vec![0; RECEIVE_BUFFER_LEN])),
        "recvmmsg" => Box::new(Batch {
            socket: library(),
            arena: vec![0; BATCH * RECEIVE_BUFFER_LEN],
        }),
        "ring v2" => Box::new(Ring::open(interface, TPACKET_V2)),
        _ => Box::new(Ring::open(interface, TPACKET_V3)),
    }
}
