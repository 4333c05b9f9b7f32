//! Packets that the kernel dropped, by reason (`enum skb_drop_reason`,
//! include/net/dropreason-core.h). They are counted at the tracepoint `skb:kfree_skb`, which fires
//! for nothing else.
//!
//! The numbers of reasons differ between kernels and are resolved by name. The counts cover the
//! whole machine, because a tracepoint belongs to no network namespace.
//!
//! The tracepoint also fires for harmless drops, such as every packet that a bridge in user space
//! has copied, and then every counter evaluates every packet. So at first there is one counter for
//! all reasons. Only after that has counted, there is one for each reason; drops before that,
//! within the time between two samples, are in no count.

use std::borrow::Cow;
use std::io;

use seikan_observe::metric;
use seikan_observe::{Kind, Subject};

use super::Output;
use crate::perf::{PerfError, Tracepoint, TracepointCounters};
use crate::softirq;

/// The reasons that distinguish causes, the most informative first.
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
/// Maximum number of descriptors for counters: half of the usual limit of a process.
const DESCRIPTORS_MAX: usize = 512;
const DROPS: &str = "dropped packets by reason";

/// The counters; none if the kernel refuses.
#[derive(Debug)]
pub(super) struct Drops {
    counters: Option<Counters>,
}

#[derive(Debug)]
struct Counters {
    tracepoint: Tracepoint,
    cpus: Vec<u32>,
    /// The metric and the filter of each reason.
    reasons: Vec<(Cow<'static, str>, String)>,
    counters: TracepointCounters,
    /// Whether there is one counter for each reason.
    apart: bool,
}

impl Drops {
    /// Starts to count.
    pub(super) fn open(output: &mut Output) -> Self {
        let counters = Counters::open(output);
        Drops {
            counters: output.keep(DROPS, counters),
        }
    }

    /// Samples the counts.
    pub(super) fn sample(&mut self, output: &mut Output) {
        let Some(counters) = &mut self.counters else {
            return;
        };
        if let Some(counts) = output.keep(DROPS, counters.read()) {
            for ((name, _), count) in counters.reasons.iter().zip(counts) {
                output.push(&Subject::Host, name.clone(), Kind::Counter, count);
            }
        }
    }
}

impl Counters {
    fn open(output: &mut Output) -> Result<Self, PerfError> {
        let tracepoint = Tracepoint::find("skb", "kfree_skb")?;
        if !tracepoint.has_field("reason") {
            return Err(tracepoint.lacks("field `reason`, which Linux 5.17 added"));
        }
        let cpus: Vec<u32> = match softirq::net_rx() {
            Ok(counts) => counts.iter().map(|count| count.cpu).collect(),
            Err(_) => return Err(PerfError::NoProcessor),
        };
        let affordable = DESCRIPTORS_MAX / cpus.len().max(1);
        let mut reasons = Vec::new();
        for reason in REASONS {
            let missing = format!("packets dropped for {reason}");
            match tracepoint.symbol(reason) {
                None => output.missing(&missing, "this kernel has no such reason"),
                Some(_) if reasons.len() >= affordable => {
                    output.missing(&missing, "too many processors for a counter on each");
                }
                Some(number) => {
                    let name = format!("{}{reason}", metric::DROP_PREFIX);
                    reasons.push((name.into(), format!("reason == {number}")));
                }
            }
        }
        if reasons.is_empty() {
            return Err(tracepoint.lacks("known reason"));
        }
        let all: Vec<&str> = reasons.iter().map(|(_, filter)| filter.as_str()).collect();
        let counters = TracepointCounters::open(&tracepoint, &[all.join(" || ")], &cpus)?;
        Ok(Counters {
            tracepoint,
            cpus,
            reasons,
            counters,
            apart: false,
        })
    }

    /// Returns the number of packets dropped for each reason so far.
    fn read(&mut self) -> io::Result<Vec<u64>> {
        let counts = self.counters.read()?;
        if self.apart {
            return Ok(counts);
        }
        if counts.iter().any(|count| *count > 0) {
            let filters = self.reasons.iter().map(|(_, filter)| filter.clone());
            let filters: Vec<String> = filters.collect();
            self.counters = TracepointCounters::open(&self.tracepoint, &filters, &self.cpus)
                .map_err(io::Error::other)?;
            self.apart = true;
        }
        Ok(vec![0; self.reasons.len()])
    }
}
