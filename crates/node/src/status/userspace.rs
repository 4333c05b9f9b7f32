//! The stack of a tunnel without root.

use crate::userspace::Stack;
use seikan_userspace::{Service, ServiceCounters};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// The TCP/IP stack in the daemon, in place of the kernel's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct UserspaceStatus {
    /// Ports of this host that lead into the tunnel.
    pub listening: Vec<ListeningPort>,
    /// Ports inside the tunnel that lead to this host.
    pub exposed: Vec<ExposedPort>,
    /// Counts by service: `socks`, `http`, `forward`, `expose`; those in use.
    pub services: BTreeMap<String, ServiceCounts>,
    /// Packets from the tunnel; a super-packet counts once.
    pub packets_in: u64,
    /// Packets to the tunnel; a super-packet counts once.
    pub packets_out: u64,
    /// Packets that the stack dropped, by reason.
    pub drops: BTreeMap<String, u64>,
}

/// A port of this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListeningPort {
    /// `socks`, `http` or `forward`.
    pub service: String,
    /// `tcp` or `udp`.
    pub transport: String,
    /// Address and port.
    pub address: SocketAddr,
    /// Host and port inside the tunnel, of a forwarded port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// A port inside the tunnel, on the addresses of this host there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExposedPort {
    /// Port inside the tunnel.
    pub port: u16,
    /// `tcp` or `udp`.
    pub transport: String,
    /// Address and port to which this host connects.
    pub target: SocketAddr,
}

/// Counts of one service since the start. A flow of UDP counts as a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ServiceCounts {
    /// Current number of connections.
    pub open: u64,
    /// Connections whose far end answered.
    pub accepted: u64,
    /// Connections that were refused: bad request, unknown name, no answer, refused by the far end,
    /// or over a limit.
    pub refused: u64,
    /// Payload bytes from the tunnel.
    pub bytes_in: u64,
    /// Payload bytes to the tunnel.
    pub bytes_out: u64,
}

pub(super) fn userspace(stack: &Stack) -> UserspaceStatus {
    let counters = stack.counters();
    let listening = stack.listeners().iter().map(|listener| ListeningPort {
        service: name(listener.service).to_owned(),
        transport: listener.transport.to_string(),
        address: listener.address,
        target: stack.forward(listener).map(|forward| {
            if forward.host.contains(':') {
                format!("[{}]:{}", forward.host, forward.port)
            } else {
                format!("{}:{}", forward.host, forward.port)
            }
        }),
    });
    let listening: Vec<_> = listening.collect();
    let exposed = stack.exposed().iter().map(|exposed| ExposedPort {
        port: exposed.port,
        transport: exposed.transport.to_string(),
        target: exposed.target,
    });
    let exposed: Vec<_> = exposed.collect();
    let all = [
        (Service::Socks, counters.socks),
        (Service::Http, counters.http),
        (Service::Forward, counters.forwards),
        (Service::Exposed, counters.exposed),
        (Service::Own, counters.own),
    ];
    let is_used = |service: Service| match service {
        Service::Exposed => !exposed.is_empty(),
        Service::Own => counters.own != ServiceCounters::default(),
        other => listening.iter().any(|port| port.service == name(other)),
    };
    let used = all.into_iter().filter(|(service, _)| is_used(*service));
    let services = used.map(|(service, count)| (name(service).to_owned(), counts(count)));
    UserspaceStatus {
        services: services.collect(),
        listening,
        exposed,
        packets_in: counters.packets_in,
        packets_out: counters.packets_out,
        drops: counters
            .drops
            .nonzero()
            .map(|(reason, count)| (reason.name().to_owned(), count))
            .collect(),
    }
}

fn name(service: Service) -> &'static str {
    match service {
        Service::Socks => "socks",
        Service::Http => "http",
        Service::Forward => "forward",
        Service::Exposed => "expose",
        Service::Own => "own",
    }
}

fn counts(counters: ServiceCounters) -> ServiceCounts {
    let ServiceCounters {
        open,
        accepted,
        refused,
        bytes_in,
        bytes_out,
    } = counters;
    ServiceCounts {
        open,
        accepted,
        refused,
        bytes_in,
        bytes_out,
    }
}
