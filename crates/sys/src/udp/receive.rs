//! Receiving: one recvmmsg(2) fills many buffers of one arena, each with many datagrams (UDP_GRO).
//!
//! [`ReceiveBatch::new`] allocates everything once. [`UdpSocket::receive`] fills it. Then
//! [`ReceiveBatch::parts_mut`] returns the datagrams and their positions, to be opened in place.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use libc::{iovec, mmsghdr};
use nix::errno::Errno;

use super::UdpSocket;
use super::control::{ADDRESS_LEN, RECEIVE_CONTROL, RawAddress, ReceiveControl, Received};

/// One filled buffer: one datagram, or several datagrams of one sender and equal length (GRO).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveMeta {
    /// Source address in the outer header.
    pub source: SocketAddr,
    /// Destination address, one of this host.
    pub destination: Option<IpAddr>,
    /// Index of the interface that received it; 0 if unknown.
    pub interface: u32,
    /// TOS or traffic class byte: DSCP and, in the two low bits, ECN. GRO joins only equal ones.
    pub traffic_class: u8,
    /// Its start in the arena, in bytes.
    pub offset: usize,
    /// Number of bytes in the buffer.
    pub length: usize,
    /// Length in bytes of every datagram except the last, which may be shorter; `length` if there
    /// is only one.
    pub segment_size: usize,
    /// The buffer or the control messages were too small: the rest is lost, and the boundaries
    /// between datagrams may be wrong. Drop and count it.
    pub truncated: bool,
}

impl ReceiveMeta {
    /// Number of datagrams; an empty one counts as one.
    #[inline]
    pub fn datagrams(&self) -> u64 {
        self.length.div_ceil(self.segment_size.max(1)).max(1) as u64
    }

    /// Positions of the datagrams in the arena, in the order of sending. An empty datagram has
    /// none.
    #[inline]
    pub fn segments(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (start, end) = (self.offset, self.offset + self.length);
        let step = self.segment_size.max(1);
        (start..end)
            .step_by(step)
            .map(move |from| from..end.min(from + step))
    }
}

/// Buffers, addresses and control messages for receive calls; allocated once.
pub struct ReceiveBatch {
    arena: Raw<u8>,
    slots: Raw<Slot>,
    headers: Raw<mmsghdr>,
    metas: Box<[ReceiveMeta]>,
    /// Number of buffers that the last receive filled.
    filled: usize,
    /// Number of buffers that the next receive may fill.
    limit: usize,
    /// Number of headers that the kernel may have written to since the last reset.
    dirty: usize,
    buffer_len: usize,
}

/// The memory that one header points to.
struct Slot {
    address: RawAddress,
    control: ReceiveControl,
    buffer: iovec,
}

impl ReceiveBatch {
    /// Allocates `buffers` (at least 1, at most 1024) of `buffer_len` bytes each. With GRO a buffer
    /// receives up to 65535 bytes; a smaller one truncates, which is detected but loses datagrams.
    pub fn new(buffers: usize, buffer_len: usize) -> Self {
        let buffers = buffers.clamp(1, 1024);
        let arena = Raw::new(vec![0; buffers * buffer_len].into());
        let slots = (0..buffers).map(|index| Slot {
            address: RawAddress::EMPTY,
            control: ReceiveControl([0; RECEIVE_CONTROL]),
            buffer: iovec {
                iov_base: arena.pointer(index * buffer_len).cast(),
                iov_len: buffer_len,
            },
        });
        let slots = Raw::new(slots.collect());
        let headers = (0..buffers).map(|index| {
            let slot = slots.pointer(index);
            // SAFETY: mmsghdr is integers and pointers, for which zero bytes are valid.
            let mut header: mmsghdr = unsafe { std::mem::zeroed() };
            // SAFETY: `slot` points to a live Slot; only addresses of its fields are taken.
            unsafe {
                header.msg_hdr.msg_name = (&raw mut (*slot).address).cast();
                header.msg_hdr.msg_control = (&raw mut (*slot).control).cast();
                header.msg_hdr.msg_iov = &raw mut (*slot).buffer;
            }
            header.msg_hdr.msg_iovlen = 1;
            header
        });
        let headers = Raw::new(headers.collect());
        let nothing = ReceiveMeta {
            source: (Ipv4Addr::UNSPECIFIED, 0).into(),
            destination: None,
            interface: 0,
            traffic_class: 0,
            offset: 0,
            length: 0,
            segment_size: 0,
            truncated: false,
        };
        let metas = vec![nothing; buffers].into();
        ReceiveBatch {
            arena,
            slots,
            headers,
            metas,
            filled: 0,
            limit: buffers,
            dirty: buffers,
            buffer_len,
        }
    }

    /// Limits the next receives to at most `buffers`, at least 1 and no more than there are.
    pub fn set_limit(&mut self, buffers: usize) {
        self.limit = buffers.clamp(1, self.metas.len());
    }

    /// Number of buffers that the last receive filled.
    pub fn len(&self) -> usize {
        self.filled
    }

    /// Whether the last receive filled none.
    pub fn is_empty(&self) -> bool {
        self.filled == 0
    }

    /// Returns filled buffer `index`, below [`ReceiveBatch::len`].
    ///
    /// # Panics
    /// If `index` is out of range.
    pub fn meta(&self, index: usize) -> ReceiveMeta {
        self.metas[..self.filled][index]
    }

    /// Returns all filled buffers, in order of arrival.
    pub fn metas(&self) -> &[ReceiveMeta] {
        &self.metas[..self.filled]
    }

    /// Returns the filled buffers and the arena.
    #[inline]
    pub fn parts_mut(&mut self) -> (&[ReceiveMeta], &mut [u8]) {
        // SAFETY: the arena is initialised, and only reached through `self`, which stays exclusively
        // borrowed; the kernel writes to it only during `receive`.
        let arena = unsafe { &mut *self.arena.0.as_ptr() };
        (&self.metas[..self.filled], arena)
    }

    /// Resets the fields that the kernel wrote in the used headers.
    #[inline]
    fn reset(&mut self) {
        for index in 0..self.dirty {
            // SAFETY: `index` is below the number of headers, which `self` alone reaches.
            let header = unsafe { &mut *self.headers.pointer(index) };
            header.msg_hdr.msg_namelen = ADDRESS_LEN;
            header.msg_hdr.msg_controllen = RECEIVE_CONTROL as _;
            header.msg_hdr.msg_flags = 0;
        }
        self.dirty = 0;
        self.filled = 0;
    }

    /// Translates header `index`. Returns the drop counter that it carried, if any.
    #[inline]
    fn translate(&mut self, index: usize) -> Option<u32> {
        // SAFETY: `index` is below the number of headers and slots, which `self` alone reaches.
        let (header, slot) =
            unsafe { (&*self.headers.pointer(index), &*self.slots.pointer(index)) };
        // SAFETY: recvmmsg filled this header, its control buffer is in the live, aligned slot.
        let received = unsafe { Received::parse(&header.msg_hdr) };
        let length = (header.msg_len as usize).min(self.buffer_len);
        let cut = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        let source = slot.address.socket_addr();
        self.metas[index] = ReceiveMeta {
            source: source.unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))),
            destination: received.destination,
            interface: received.interface,
            traffic_class: received.traffic_class,
            offset: index * self.buffer_len,
            length,
            segment_size: match received.segment_size {
                Some(size) if (1..length).contains(&size) => size,
                _ => length,
            },
            truncated: cut || source.is_none(),
        };
        received.drops
    }
}

impl fmt::Debug for ReceiveBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceiveBatch")
            .field("buffers", &self.metas.len())
            .field("buffer_len", &self.buffer_len)
            .field("filled", &self.metas())
            .finish()
    }
}

impl UdpSocket {
    /// Fills `batch` with the waiting datagrams, without waiting for more. Returns the number of
    /// filled buffers, at least 1.
    ///
    /// This is the only correct receive call: with UDP_GRO, every buffer may hold many datagrams,
    /// and only [`ReceiveMeta::segment_size`] separates them.
    ///
    /// # Errors
    /// `WouldBlock` if no datagram waits; otherwise those of recvmmsg(2). ICMP errors are reported
    /// only on a connected socket, because IP_RECVERR is off.
    #[inline]
    pub fn receive(&self, batch: &mut ReceiveBatch) -> io::Result<usize> {
        batch.reset();
        let buffers = batch.limit;
        // SAFETY: there are at least `buffers` headers; each points to an address, control and data buffer
        // of the stated lengths, owned by `batch`, which is exclusively borrowed. A null timeout is
        // none.
        let filled = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                batch.headers.pointer(0),
                buffers as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        let outcome = Errno::result(filled);
        // The kernel may also have written to the header after the last filled one.
        let filled = outcome.map_or(0, |filled| (filled as usize).min(buffers));
        batch.dirty = (filled + 1).min(buffers);
        outcome?;
        let mut drops = None;
        for index in 0..filled {
            drops = batch.translate(index).or(drops);
        }
        batch.filled = filled;
        if let Some(drops) = drops {
            self.note_drops(drops);
        }
        Ok(filled)
    }
}

/// A boxed slice whose elements are the targets of pointers in other boxes and in the kernel.
///
/// It is a raw pointer, because moving or borrowing a `Box` asserts that there are no other
/// pointers into it, which would invalidate the pointers in headers.
struct Raw<T>(NonNull<[T]>);

impl<T> Raw<T> {
    fn new(elements: Box<[T]>) -> Self {
        Raw(NonNull::from(Box::leak(elements)))
    }

    /// Returns a pointer to element `index`, or to one past the last, which must not be
    /// dereferenced.
    #[inline]
    fn pointer(&self, index: usize) -> *mut T {
        assert!(index <= self.0.len());
        // SAFETY: stays within the allocation, or one past its end.
        unsafe { self.0.as_ptr().cast::<T>().add(index) }
    }
}

impl<T> Drop for Raw<T> {
    fn drop(&mut self) {
        // SAFETY: came from a box in `new`, and is given back once.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: all pointers lead into allocations that the batch owns alone; shared references to it give
// only the plain `metas`.
unsafe impl Send for ReceiveBatch {}
// SAFETY: as above; nothing is written through a shared reference.
unsafe impl Sync for ReceiveBatch {}
