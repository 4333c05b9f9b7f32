//! The families of a tunnel without root. Labels are services, directions and reasons.

use super::families::{Family, family, with};
use crate::subject::Subject;
use prometheus_client::metrics::MetricType::{Counter, Gauge};
use seikan_userspace::{Counters, ServiceCounters};

/// All families, in the order of the reply.
pub const FAMILIES: &[Family] = &[
    family(
        Gauge,
        "userspace_open_connections",
        "Open connections of a tunnel without root, by service (socks, http, forward, expose).",
        |s, out| {
            services(s, |service, counts| {
                out.gauge(&[("service", service.into())], counts.open as f64)
            })
        },
    ),
    family(
        Counter,
        "userspace_connections",
        "Connections of a tunnel without root that were accepted or refused.",
        |s, out| {
            services(s, |service, counts| {
                let labels = [("service", service.into())];
                out.count(&with(&labels, "result", "accepted"), counts.accepted);
                out.count(&with(&labels, "result", "refused"), counts.refused);
            })
        },
    ),
    family(
        Counter,
        "userspace_payload_bytes",
        "Bytes of connections, into the tunnel (outbound) and from it (inbound).",
        |s, out| {
            services(s, |service, counts| {
                let labels = [("service", service.into())];
                out.count(&with(&labels, "direction", "outbound"), counts.bytes_out);
                out.count(&with(&labels, "direction", "inbound"), counts.bytes_in);
            })
        },
    ),
    family(
        Counter,
        "userspace_dropped_packets",
        "Packets that the TCP/IP stack of a tunnel without root dropped, by reason.",
        |s, out| {
            if let Some(counters) = counters(s) {
                out.drops(&[], &counters.drops);
            }
        },
    ),
];

fn counters(subject: &Subject<'_>) -> Option<Counters> {
    subject.node.stack.as_ref().map(|stack| stack.counters())
}

fn services(subject: &Subject<'_>, mut add: impl FnMut(&'static str, &ServiceCounters)) {
    if let Some(counters) = counters(subject) {
        add("socks", &counters.socks);
        add("http", &counters.http);
        add("forward", &counters.forwards);
        add("expose", &counters.exposed);
    }
}
