//! The families of a mesh's member. Labels are the mesh's servers with their kind, directions and reasons.

use super::families::{Family, Label, family, with};
use super::gateway::lan;
use crate::subject::Subject;
use prometheus_client::metrics::MetricType::{Counter, Gauge};
use seikan_mesh::event::Contact;
use seikan_mesh::state::MeshState;
use seikan_mesh::transport::Counters;

/// All families of a member, in the order of the reply.
pub const FAMILIES: &[Family] = &[
    family(
        Gauge,
        "coordinator_up",
        "Whether the coordinator answers, and has this host as a member; absent before the first answer and on a standby \
         gateway.",
        |s, out| {
            let mut is_standby = false;
            lan(s, |lan| is_standby = !lan.responder.is_active());
            mesh(s, |mesh| {
                // Only the active one of two gateways talks to the coordinator.
                if !is_standby && mesh.contact != Contact::Starting {
                    out.flag(&[], mesh.contact == Contact::Connected);
                }
            })
        },
    ),
    family(
        Gauge,
        "port_mapping_active",
        "Whether the router forwards a port to this host, where it was asked to.",
        |s, out| {
            mesh(s, |mesh| {
                if let Some(state) = &mesh.mapped {
                    out.flag(&[], state.is_ok());
                }
            })
        },
    ),
    family(
        Counter,
        "forwarded_datagrams",
        "Datagrams forwarded by an allocation at a TURN server (turn) or a connection by TLS to a relay (tls).",
        |s, out| {
            servers(s, |labels, counters| {
                for (direction, count) in
                    [("outbound", counters.sent), ("inbound", counters.received)]
                {
                    out.count(&with(labels, "direction", direction), count);
                }
            })
        },
    ),
    family(
        Counter,
        "forwarded_dropped_datagrams",
        "Datagrams dropped while forwarding, by reason.",
        |s, out| servers(s, |labels, counters| out.drops(labels, &counters.drops)),
    ),
];

fn mesh(s: &Subject<'_>, visit: impl FnOnce(&MeshState)) {
    if let Some(mesh) = &s.node.mesh {
        visit(mesh);
    }
}

/// Calls `visit` for every server that forwards datagrams, with its labels.
fn servers(s: &Subject<'_>, mut visit: impl FnMut(&[Label], &Counters)) {
    let transports = s.node.transports.iter();
    for one in transports.filter(|one| one.serves().is_some()) {
        let by = one.turn().map_or("tls", |_| "turn");
        let labels = [("by", by.into()), ("server", one.name().to_owned())];
        visit(&labels, &one.counters());
    }
}
