//! How often functions of the kernel are called that tell how a packet travels: one by one, merged, cut up, handed over.
//!
//! A rate of calls per packet tells apart what times and counters leave open: `/proc/PID/io` does not count `recv` and
//! `send`, and no counter tells of segmentation in software. Counts are those of the whole machine: a function knows no
//! network namespace.

use std::borrow::Cow;
use std::ffi::CStr;

use seikan_observe::metric;
use seikan_observe::{Kind, Subject};

use super::Output;
use crate::calls::{Absence, Calls, CallsError};
use crate::softirq;

/// The functions, the most telling first.
const FUNCTIONS: [&CStr; 20] = [
    // Messages that programs send and receive over UDP, for the sendmmsg and recvmmsg kinds each of a call's. One message
    // may be many datagrams (UDP_SEGMENT, UDP_GRO). To an address of IPv4, the one for IPv6 calls the other.
    c"udp_sendmsg",
    c"udp_recvmsg",
    c"udpv6_sendmsg",
    c"udpv6_recvmsg",
    // Calls that read and write packets at tun devices, also those that had to come again (EAGAIN).
    c"tun_chr_read_iter",
    c"tun_chr_write_iter",
    // Wakes threads that wait for one another, such as at a lock or a channel.
    c"futex_wake",
    // Super-packets that are cut up in software, and packets that are summed up there.
    c"__skb_gso_segment",
    c"skb_checksum_help",
    // Packets that are cut into fragments, and fragments that came in.
    c"ip_do_fragment",
    c"ip6_fragment",
    c"ip_defrag",
    // Received packets that were merged with those before them.
    c"skb_gro_receive",
    // Packets looked at by connection tracking, in each namespace that they pass.
    c"nf_conntrack_in",
    // Frames that the kernel's bridge takes, and those that programs send and ask for at packet sockets, as a virtual switch
    // in user space does.
    c"br_handle_frame",
    c"packet_sendmsg",
    c"packet_recvmsg",
    // Packets whose flow the kernel's virtual switch asks its slow path for.
    c"ovs_dp_upcall",
    // Turns of the threads that move a virtual machine's packets out and in.
    c"handle_tx",
    c"handle_rx",
];
/// Descriptors that counters may take. The drops' take up to twice as many of the 1,024 that a process usually has.
const DESCRIPTORS_MAX: usize = 256;
const CALLS: &str = "calls of kernel functions";

/// The counters.
#[derive(Debug)]
pub(super) struct Counted {
    calls: Calls,
    names: Vec<Cow<'static, str>>,
}

impl Counted {
    /// Starts to count; `None` where the kernel refuses.
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
        let what = format!("calls of {}", names.join(", "));
        output.missing(&what, "too many processors for a counter on each");
    }
    Ok(calls)
}
