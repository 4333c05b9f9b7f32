//! The kernel's information on a received frame (PACKET_AUXDATA).

use libc::{cmsghdr, tpacket_auxdata};

/// Buffer for the only requested control message.
#[repr(C, align(8))]
pub(super) struct Control(pub(super) [u8; CONTROL_LEN]);

/// Bytes of [`Control`].
// SAFETY: plain arithmetic.
pub(super) const CONTROL_LEN: usize =
    unsafe { libc::CMSG_SPACE(size_of::<tpacket_auxdata>() as libc::c_uint) as usize };

/// The used fields of `struct tpacket_auxdata`; all zero if the kernel sent none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Auxiliary {
    pub(super) status: u32,
    pub(super) frame_length: u32,
    pub(super) vlan: u16,
    pub(super) vlan_protocol: u16,
}

impl Auxiliary {
    /// Reads the first control message.
    ///
    /// # Safety
    /// `message` must be as recvmsg(2) left it: `msg_control` points to `msg_controllen` bytes, aligned
    /// for cmsghdr, that nobody writes during the call.
    #[inline]
    pub(super) unsafe fn parse(message: &libc::msghdr) -> Auxiliary {
        // SAFETY: the caller vouches for the control buffer.
        let first = unsafe { libc::CMSG_FIRSTHDR(message) };
        if first.is_null() {
            return Auxiliary::default();
        }
        // SAFETY: CMSG_FIRSTHDR gives only a header inside the buffer.
        let header: cmsghdr = unsafe { first.read() };
        // SAFETY: plain arithmetic.
        let enough =
            unsafe { libc::CMSG_LEN(size_of::<tpacket_auxdata>() as libc::c_uint) } as usize;
        let is_auxiliary =
            header.cmsg_level == libc::SOL_PACKET && header.cmsg_type == libc::PACKET_AUXDATA;
        if !is_auxiliary || (header.cmsg_len as usize) < enough {
            return Auxiliary::default();
        }
        // SAFETY: the message holds a whole tpacket_auxdata, integers only, behind its header; an
        // unaligned read needs no alignment.
        let data = unsafe {
            libc::CMSG_DATA(first)
                .cast::<tpacket_auxdata>()
                .read_unaligned()
        };
        Auxiliary {
            status: data.tp_status,
            frame_length: data.tp_len,
            vlan: data.tp_vlan_tci,
            vlan_protocol: data.tp_vlan_tpid,
        }
    }
}
