//! Interfaces and their queueing disciplines, read with netlink.

use std::time::Instant;

use seikan_observe::Subject;
use seikan_observe::metric;
use seikan_observe::path::PathMap;

use super::{Again, Output};
use crate::netlink::{LinkStats, Netlink, NetlinkError, QdiscStats};

const QDISCS: &str = "queueing disciplines";
/// Number of queueing disciplines above which they are read only once a second. The kernel can only
/// list those of all interfaces.
const QDISCS_CHEAP: usize = 256;

/// The interfaces of a path.
#[derive(Debug)]
pub(super) struct Links {
    netlink: Option<Netlink>,
    links: Vec<Link>,
    again: Again,
    qdiscs: bool,
    many: bool,
}

#[derive(Debug)]
struct Link {
    name: String,
    index: Option<u32>,
    counters: Subject,
    qdisc: Subject,
}

impl Links {
    /// Opens a netlink socket for the interfaces of the path.
    pub(super) fn open(map: &PathMap, output: &mut Output) -> Self {
        let link = |name: &String| Link {
            name: name.clone(),
            index: None,
            counters: Subject::Link(name.clone()),
            qdisc: Subject::Qdisc(name.clone()),
        };
        let links: Vec<Link> = map.links.iter().map(|facts| link(&facts.name)).collect();
        let netlink = if links.is_empty() {
            None
        } else {
            output.keep("interfaces", Netlink::open())
        };
        Links {
            netlink,
            links,
            again: Again::every(Again::SECOND),
            qdiscs: true,
            many: false,
        }
    }

    /// Samples the counters.
    pub(super) fn sample(&mut self, now: Instant, output: &mut Output) {
        let Some(netlink) = &self.netlink else {
            return;
        };
        let again = self.again.due(now);
        for link in &mut self.links {
            // An interface may be created again under its name.
            if again || link.index.is_none() {
                link.index = match netlink.link_index(&link.name) {
                    Ok(index) => index,
                    Err(error) => {
                        output.missing(&format!("interface {}", link.name), error);
                        None
                    }
                };
            }
            let Some(index) = link.index else { continue };
            match netlink.link_stats(index) {
                Ok(stats) => push_link(output, &link.counters, &stats),
                Err(NetlinkError::NoSuchDevice { .. }) => link.index = None,
                Err(error) => output.missing(&format!("interface {}", link.name), error),
            }
        }
        if self.qdiscs && (again || !self.many) {
            match netlink.qdiscs() {
                Ok(qdiscs) => {
                    self.many = qdiscs.len() > QDISCS_CHEAP;
                    self.push_qdiscs(&qdiscs, output);
                }
                // The table changed while it was read; the next sample has it.
                Err(NetlinkError::Unsteady { .. }) => {}
                Err(error) => {
                    output.missing(QDISCS, error);
                    self.qdiscs = false;
                }
            }
        }
    }

    fn push_qdiscs(&self, qdiscs: &[QdiscStats], output: &mut Output) {
        for qdisc in qdiscs.iter().filter(|qdisc| qdisc.is_root()) {
            let of = |link: &&Link| link.index == Some(qdisc.index);
            if let Some(link) = self.links.iter().find(of) {
                push_qdisc(output, &link.qdisc, qdisc);
            }
        }
    }
}

fn push_link(output: &mut Output, subject: &Subject, stats: &LinkStats) {
    for (name, value) in [
        (metric::RX_PACKETS, stats.rx_packets),
        (metric::TX_PACKETS, stats.tx_packets),
        (metric::RX_BYTES, stats.rx_bytes),
        (metric::TX_BYTES, stats.tx_bytes),
        (metric::RX_DROPPED, stats.rx_dropped),
        (metric::TX_DROPPED, stats.tx_dropped),
        (metric::RX_ERRORS, stats.rx_errors),
        (metric::TX_ERRORS, stats.tx_errors),
        (metric::RX_LENGTH_ERRORS, stats.rx_length_errors),
        (metric::RX_FRAME_ERRORS, stats.rx_frame_errors),
    ] {
        output.counter(subject, name, value);
    }
}

fn push_qdisc(output: &mut Output, subject: &Subject, qdisc: &QdiscStats) {
    output.counter(subject, metric::QDISC_PACKETS, qdisc.packets);
    output.counter(subject, metric::QDISC_BYTES, qdisc.bytes);
    output.counter(subject, metric::QDISC_DROPS, qdisc.drops);
    output.counter(subject, metric::QDISC_OVERLIMITS, qdisc.overlimits);
    if let Some(requeues) = qdisc.requeues {
        output.counter(subject, metric::QDISC_REQUEUES, requeues);
    }
    output.gauge(subject, metric::QDISC_BACKLOG_BYTES, qdisc.backlog);
    output.gauge(subject, metric::QDISC_LENGTH, qdisc.qlen);
}
