//! Packets that the kernel dropped, by its reason (`enum skb_drop_reason`, include/net/dropreason-core.h): counted at the
//! tracepoint `skb:kfree_skb`, which fires for nothing else.
//!
//! The numbers of reasons differ between kernels and are resolved by name. Counts are those of the whole machine: a
//! tracepoint knows no network namespace.

use std::borrow::Cow;

use seikan_observe::metric;
use seikan_observe::{Kind, Subject};

use super::Output;
use crate::perf::{PerfError, Tally, Tracepoint};
use crate::softirq;

/// The reasons that tell causes apart, the most telling first.
const REASONS: [&str; 10] = [
    "FULL_RING",
    "SOCKET_RCVBUFF",
    "CPU_BACKLOG",
    "QDISC_DROP",
    "PKT_TOO_BIG",
    "NETFILTER_DROP",
    "UDP_CSUM",
    "TCP_CSUM",
    "IP_CSUM",
    "PACKET_SOCK_ERROR",
];
/// Descriptors that counters may take: half of what a process usually has.
const DESCRIPTORS_MAX: usize = 512;
const DROPS: &str = "dropped packets by reason";

/// The counters; none where the kernel refuses.
#[derive(Debug)]
pub(super) struct Drops {
    tally: Option<Tally>,
    names: Vec<Cow<'static, str>>,
}

impl Drops {
    /// Starts to count.
    pub(super) fn open(output: &mut Output) -> Self {
        let mut names = Vec::new();
        let tally = open(&mut names, output);
        Drops {
            tally: output.keep(DROPS, tally),
            names,
        }
    }

    /// Reads the counts.
    pub(super) fn sample(&mut self, output: &mut Output) {
        let Some(tally) = &mut self.tally else { return };
        if let Some(counts) = output.keep(DROPS, tally.read()) {
            for (name, count) in self.names.iter().zip(counts) {
                output.push(&Subject::Host, name.clone(), Kind::Counter, count);
            }
        }
    }
}

fn open(names: &mut Vec<Cow<'static, str>>, output: &mut Output) -> Result<Tally, PerfError> {
    let tracepoint = Tracepoint::find("skb", "kfree_skb")?;
    if !tracepoint.has_field("reason") {
        return Err(tracepoint.lacks("reason (Linux 5.17 brought it)"));
    }
    let cpus: Vec<u32> = match softirq::net_rx() {
        Ok(counts) => counts.iter().map(|count| count.cpu).collect(),
        Err(_) => return Err(PerfError::NoProcessor),
    };
    let affordable = DESCRIPTORS_MAX / cpus.len().max(1);
    let mut filters = Vec::new();
    for reason in REASONS {
        let what = format!("packets dropped for {reason}");
        match tracepoint.symbol(reason) {
            None => output.missing(&what, "this kernel has no such reason"),
            Some(_) if filters.len() >= affordable => {
                output.missing(&what, "too many processors for a counter on each");
            }
            Some(number) => {
                filters.push(format!("reason == {number}"));
                names.push(format!("{}{reason}", metric::DROP_PREFIX).into());
            }
        }
    }
    if filters.is_empty() {
        return Err(tracepoint.lacks("reason that is known"));
    }
    Tally::open(&tracepoint, &filters, &cpus)
}
