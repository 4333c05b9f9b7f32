//! The families of a gateway. Labels are configured devices, directions and reasons, so their number does not
//! depend on the local network.

use super::families::{Family, Label, Samples, family, with};
use crate::gateway::GatewayNode;
use crate::subject::Subject;
use crate::system::now;
use prometheus_client::metrics::MetricType::{Counter, Gauge};
use seikan_observe::DirectionCounters;
use seikan_proto::gateway::{Device, SideStats};

/// All families of a gateway, in the order of the reply.
pub const FAMILIES: &[Family] = &[
    family(
        Gauge,
        "gateway_up",
        "Whether the interface of the local network is up, in transparent mode.",
        |s, out| {
            lan(s, |lan| {
                out.flag(&[], lan.is_up());
            })
        },
    ),
    family(
        Gauge,
        "gateway_active",
        "Whether this gateway is active; a standby gateway only listens.",
        |s, out| {
            lan(s, |lan| {
                out.flag(&[], lan.responder.is_active());
            })
        },
    ),
    family(
        Gauge,
        "gateway_conflicts",
        "Addresses claimed by two hosts within the last minute.",
        |s, out| {
            lan(s, |lan| {
                let conflicts = lan.responder.conflicts(now().mono).count();
                out.gauge(&[], conflicts as f64);
            })
        },
    ),
    family(
        Counter,
        "gateway_lost_frames",
        "Frames of the local network that the kernel could not queue.",
        |s, out| lan(s, |lan| out.count(&[], lan.lost())),
    ),
    family(
        Counter,
        "gateway_unsent_frames",
        "Frames made by the gateway (ARP, neighbour discovery, errors, adverts) that could not be sent.",
        |s, out| {
            lan(s, |lan| {
                out.count(&[], lan.counters.own.drops.total());
            })
        },
    ),
    family(Gauge, "gateway_flows", "Flows in the table.", |s, out| {
        gateway(s, |gateway| {
            let flows = gateway.gateway.flows().len();
            out.gauge(&[], flows as f64);
        })
    }),
    family(
        Counter,
        "gateway_evicted_flows",
        "Flows evicted from the full table.",
        |s, out| {
            gateway(s, |gateway| {
                out.count(&[], gateway.gateway.flows().evicted());
            })
        },
    ),
    family(
        Counter,
        "gateway_unattributed_packets",
        "Packets from the local network that belong to no device.",
        |s, out| {
            gateway(s, |gateway| {
                out.count(&[], gateway.gateway.unattributed().packets_in);
            })
        },
    ),
    family(
        Counter,
        "gateway_unattributed_dropped_packets",
        "Dropped packets of the local network that belong to no device, by reason.",
        |s, out| {
            gateway(s, |gateway| {
                out.drops(&[], &gateway.gateway.unattributed().drops);
            })
        },
    ),
    family(
        Counter,
        "gateway_refused_packets",
        "Packets from the tunnel for neither a device nor the host, by reason.",
        |s, out| {
            gateway(s, |gateway| {
                out.drops(&[], &gateway.gateway.refused().drops);
            })
        },
    ),
    family(
        Gauge,
        "gateway_device_last_seen_seconds",
        "Time since the last packet or frame of the device.",
        |s, out| {
            let now = now().mono;
            devices(s, |labels, device| {
                if let Some(at) = device.last_seen {
                    let age = now.duration_since(at).as_secs_f64();
                    out.gauge(labels, age);
                }
            });
        },
    ),
    family(
        Counter,
        "gateway_device_bytes",
        "Inner bytes of the device that left: outbound into the tunnel, inbound to the device.",
        |s, out| counters(s, out, |direction| direction.bytes_out),
    ),
    family(
        Counter,
        "gateway_device_packets",
        "Inner packets of the device that left.",
        |s, out| counters(s, out, |direction| direction.packets_out),
    ),
    family(
        Counter,
        "gateway_device_dropped_packets",
        "Packets of the device dropped, by reason.",
        |s, out| {
            devices(s, |labels, device| {
                for (direction, counters) in directions(device) {
                    out.drops(&with(labels, "direction", direction), &counters.drops);
                }
            })
        },
    ),
    family(
        Counter,
        "gateway_device_segments",
        "TCP segments of the device seen on one side.",
        |s, out| sides(s, |labels, side| out.count(labels, side.segments)),
    ),
    family(
        Counter,
        "gateway_device_lost_segments",
        "TCP segments of the device lost on one side.",
        |s, out| sides(s, |labels, side| out.count(labels, side.lost)),
    ),
    family(
        Gauge,
        "gateway_device_round_trip_seconds",
        "Smoothed round-trip time of a side, by TCP of the device.",
        |s, out| {
            sides(s, |labels, side| {
                if let Some(rtt) = side.rtt {
                    out.gauge(labels, rtt.as_secs_f64());
                }
            })
        },
    ),
];

fn gateway(s: &Subject<'_>, visit: impl FnOnce(&GatewayNode)) {
    if let Some(gateway) = &s.node.gateway {
        visit(gateway);
    }
}

pub(super) fn lan(s: &Subject<'_>, visit: impl FnOnce(&crate::gateway::Lan)) {
    if let Some(GatewayNode { lan: Some(lan), .. }) = &s.node.gateway {
        visit(lan);
    }
}

/// Calls `visit` for every device, with its label.
fn devices(s: &Subject<'_>, mut visit: impl FnMut(&[Label], &Device)) {
    gateway(s, |gateway| {
        for (_, device) in gateway.gateway.devices() {
            visit(&[("device", device.config.name.clone())], device);
        }
    });
}

fn directions(device: &Device) -> [(&'static str, &DirectionCounters); 2] {
    [("outbound", &device.outbound), ("inbound", &device.inbound)]
}

fn counters(s: &Subject<'_>, out: &mut Samples, of: fn(&DirectionCounters) -> u64) {
    devices(s, |labels, device| {
        for (name, counters) in directions(device) {
            out.count(&with(labels, "direction", name), of(counters));
        }
    });
}

/// Calls `visit` for both sides of every device, with their labels.
fn sides(s: &Subject<'_>, mut visit: impl FnMut(&[Label], &SideStats)) {
    devices(s, |labels, device| {
        for (name, side) in [("lan", &device.lan_side), ("tunnel", &device.tunnel_side)] {
            visit(&with(labels, "side", name), side);
        }
    });
}
