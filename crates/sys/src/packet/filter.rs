//! Classic BPF programs that select received frames. The kernel runs them for every frame of the
//! interface (Documentation/networking/filter.rst).

use libc::{
    BPF_ABS, BPF_B, BPF_H, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter,
};

use super::Accept;

/// A socket with this filter receives nothing.
const REFUSE: u32 = 0;
/// The whole frame, whatever its length.
const WHOLE: u32 = u32::MAX;

/// Offset of the EtherType. The kernel removes the outer VLAN tag before filters run
/// (`__netif_receive_skb_core()`, net/core/dev.c).
const ETHER_TYPE: u32 = 12;
/// The group bit (I/G) of the destination's first byte, IEEE 802-2014, 8.2.2.
const GROUP_BIT: u32 = 1;

/// Returns the program for `accept`.
///
/// Every program refuses frames sent by this host: PACKET_IGNORE_OUTGOING saves the work, but
/// kernels before 4.20 do not have it.
pub(super) fn program(accept: Accept) -> Vec<sock_filter> {
    let packet_type = (libc::SKF_AD_OFF + libc::SKF_AD_PKTTYPE) as u32;
    let outgoing = u32::from(libc::PACKET_OUTGOING);
    match accept {
        Accept::Everything { snap_length } => vec![
            load(BPF_B, packet_type),
            jump(BPF_JEQ, outgoing, 1, 0),
            verdict(snap_length.max(1)),
            verdict(REFUSE),
        ],
        Accept::Host([a, b, c, d, e, f]) => {
            let (high, low) = (u16::from_be_bytes([a, b]), [c, d, e, f]);
            vec![
                load(BPF_B, packet_type),
                jump(BPF_JEQ, outgoing, 9, 0),
                // The data path first.
                load(BPF_W, 2),
                jump(BPF_JEQ, u32::from_be_bytes(low), 0, 2),
                load(BPF_H, 0),
                jump(BPF_JEQ, high.into(), 4, 0),
                load(BPF_B, 0),
                jump(BPF_JSET, GROUP_BIT, 2, 0),
                load(BPF_H, ETHER_TYPE),
                jump(BPF_JEQ, libc::ETH_P_ARP as u32, 0, 1),
                verdict(WHOLE),
                verdict(REFUSE),
            ]
        }
    }
}

/// Loads `size` (`BPF_B`, `BPF_H`, `BPF_W`) in network order at `offset` of the frame.
fn load(size: u32, offset: u32) -> sock_filter {
    instruction(BPF_LD | size | BPF_ABS, offset, 0, 0)
}

/// Skips `yes` or `no` instructions.
fn jump(test: u32, value: u32, yes: u8, no: u8) -> sock_filter {
    instruction(BPF_JMP | test | BPF_K, value, yes, no)
}

/// Ends the program and delivers `length` bytes of the frame.
fn verdict(length: u32) -> sock_filter {
    instruction(BPF_RET | BPF_K, length, 0, 0)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    }
}
