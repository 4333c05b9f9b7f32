//! Counts of calls of kernel functions that show how packets travel: one by one, merged, segmented,
//! passed on.
//!
//! The number of calls per packet distinguishes cases that times and counters do not:
//! `/proc/PID/io` does not count `recv` and `send`, and no counter shows segmentation in software.
//! The counts cover the whole machine, because a function belongs to no network namespace.

use std::borrow::Cow;
use std::ffi::CStr;

use seikan_observe::metric;
use seikan_observe::{Kind, Subject};

use super::Output;
use crate::calls::{Absence, Calls, CallsError};
use crate::softirq;

/// The functions, the most informative first.
const FUNCTIONS: [&CStr; 20] = [
    // Messages that programs send and receive over UDP; sendmmsg and recvmmsg count each message.
    // One message may be many datagrams (UDP_SEGMENT, UDP_GRO). For an IPv4 address, the IPv6
    // function calls the IPv4 one.
    c"udp_sendmsg",
    c"udp_recvmsg",
    c"udpv6_sendmsg",
    c"udpv6_recvmsg",
    // Calls that read and write packets at tun devices, including those that fail with EAGAIN.
    c"tun_chr_read_iter",
    c"tun_chr_write_iter",
    // Wakes threads that wait for another one, for example at a lock or a channel.
    c"futex_wake",
    // Super-packets segmented in software, and packets whose checksum is computed in software.
    c"__skb_gso_segment",
    c"skb_checksum_help",
    // Packets that are fragmented, and received fragments.
    c"ip_do_fragment",
    c"ip6_fragment",
    c"ip_defrag",
    // Received packets that were merged with the ones before them.
    c"skb_gro_receive",
    // Packets inspected by connection tracking, in each namespace that they pass.
    c"nf_conntrack_in",
    // Frames received by the kernel's bridge, and frames that programs send and receive at packet
    // sockets, as a virtual switch in user space does.
    c"br_handle_frame",
    c"packet_sendmsg",
    c"packet_recvmsg",
    // Packets for whose flow the kernel's virtual switch queries its slow path.
    c"ovs_dp_upcall",
    // Iterations of the threads that move the packets of a virtual machine out and in.
    c"handle_tx",
    c"handle_rx",
];
/// Maximum number of descriptors for counters. The drop counters use up to twice as many of the
/// 1,024 that a process usually has.
const DESCRIPTORS_MAX: usize = 256;
const CALLS: &str = "calls of kernel functions";

/// The counters.
#[derive(Debug)]
pub(super) struct Counted {
    calls: Calls,
    names: Vec<Cow<'static, str>>,
}

impl Counted {
    /// Starts to count; `None` if the kernel refuses.
    pub(super) fn open(output: &mut Output) -> Option<Self> {
        let calls = open(output);
        let calls = output.keep(CALLS, calls)?;
        for why in [
            Absence::NoSuchFunction,
            Absence::Ambiguous,
            Absence::NotProbeable,
        ] {
            let absent = calls.absent().iter().filter(|(_, other)| *other == why);
            let names: Vec<_> = absent.map(|(name, _)| name.to_string_lossy()).collect();
            if !names.is_empty() {
                output.missing(&format!("calls of {}", names.join(", ")), why);
            }
        }
        let names = calls.functions().iter().map(|function| {
            let name = function.to_string_lossy();
            format!("{}{name}", metric::CALL_PREFIX).into()
        });
        Some(Counted {
            names: names.collect(),
            calls,
        })
    }

    /// Reads the counts.
    pub(super) fn sample(&mut self, output: &mut Output) {
        if let Some(counts) = output.keep(CALLS, self.calls.read()) {
            for (name, count) in self.names.iter().zip(counts) {
                output.push(&Subject::Host, name.clone(), Kind::Counter, count);
            }
        }
    }
}

fn open(output: &mut Output) -> Result<Calls, CallsError> {
    let cpus: Vec<u32> = match softirq::net_rx() {
        Ok(counts) => counts.iter().map(|count| count.cpu).collect(),
        Err(_) => return Err(CallsError::Nothing),
    };
    let affordable = DESCRIPTORS_MAX / cpus.len().max(1);
    let (taken, left) = FUNCTIONS.split_at(affordable.min(FUNCTIONS.len()));
    let calls = Calls::open(taken, &cpus)?;
    if !left.is_empty() {
        let names: Vec<_> = left.iter().map(|name| name.to_string_lossy()).collect();
        let name = format!("calls of {}", names.join(", "));
        output.missing(&name, "too many processors for a counter on each");
    }
    Ok(calls)
}
