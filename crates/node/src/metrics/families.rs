//! The metric families: name, help text and samples.

use crate::status::{is_relayed, is_up};
use crate::subject::Subject;
use crate::system::now;
use crate::uapi::Device;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge, Info};
use seikan_observe::{DirectionCounters, DropCounts, Histogram, PeerCounters};
use seikan_proto::mode::Mode;
use seikan_proto::noise::Protocol;
use seikan_proto::peer::Peer;
use seikan_sys::process;
use std::fmt;

/// A family: one quantity, for every set of labels.
pub struct Family {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: MetricType,
    pub(super) sample: fn(&Subject<'_>, &mut Samples),
}

/// A name with its value.
pub(super) type Label = (&'static str, String);

/// A sample with its labels.
#[derive(Debug)]
struct Sample {
    labels: Vec<Label>,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Count(u64),
    Seconds(f64),
    Gauge(f64),
    Info,
    Histogram(Histogram),
}

/// Samples of one family.
#[derive(Debug, Default)]
pub(super) struct Samples(Vec<Sample>);

impl Samples {
    pub(super) fn count(&mut self, labels: &[Label], count: u64) {
        self.push(labels, Value::Count(count));
    }

    /// Adds a counter of seconds.
    fn seconds(&mut self, labels: &[Label], seconds: f64) {
        self.push(labels, Value::Seconds(seconds));
    }

    /// Adds a gauge that is 1 or 0.
    pub(super) fn flag(&mut self, labels: &[Label], is_true: bool) {
        self.gauge(labels, f64::from(u8::from(is_true)));
    }

    pub(super) fn gauge(&mut self, labels: &[Label], value: f64) {
        self.push(labels, Value::Gauge(value));
    }

    /// Adds the count of every drop reason that occurred.
    pub(super) fn drops(&mut self, labels: &[Label], drops: &DropCounts) {
        for (reason, count) in drops.nonzero() {
            self.count(&with(labels, "reason", reason.name()), count);
        }
    }

    fn push(&mut self, labels: &[Label], value: Value) {
        let labels = labels.to_vec();
        self.0.push(Sample { labels, value });
    }
}

/// Adds a label.
pub(super) fn with(labels: &[Label], name: &'static str, value: &str) -> Vec<Label> {
    [labels, &[(name, value.to_owned())]].concat()
}

/// A family's samples at one moment.
#[derive(Debug)]
pub struct Collected {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    samples: Samples,
}

impl Family {
    /// Collects the samples.
    pub fn collect(&self, subject: &Subject<'_>) -> Collected {
        let mut samples = Samples::default();
        (self.sample)(subject, &mut samples);
        Collected {
            name: self.name,
            help: self.help,
            kind: self.kind,
            samples,
        }
    }
}

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        if self.samples.0.is_empty() {
            return Ok(());
        }
        let mut family = encoder.encode_descriptor(self.name, self.help, None, self.kind)?;
        for sample in &self.samples.0 {
            match &sample.value {
                Value::Info => family.encode_info(&sample.labels)?,
                value if sample.labels.is_empty() => encode(value, &mut family)?,
                value => encode(value, &mut family.encode_family(&sample.labels)?)?,
            }
        }
        Ok(())
    }
}

fn encode(value: &Value, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
    match value {
        Value::Count(count) => encoder.encode_counter::<NoLabelSet, u64, f64>(count, None),
        Value::Seconds(seconds) => encoder.encode_counter::<NoLabelSet, f64, f64>(seconds, None),
        Value::Gauge(value) => encoder.encode_gauge(value),
        Value::Histogram(histogram) => {
            // Buckets are labelled with their largest value; the last has none.
            let bounds = histogram.buckets().map(|(low, count)| {
                let largest = if low == 0 { 1 } else { 2 * low - 1 };
                (largest as f64, count)
            });
            let mut bounds: Vec<_> = bounds.collect();
            if let Some(last) = bounds.last_mut() {
                last.0 = f64::INFINITY;
            }
            let (sum, count) = (histogram.sum() as f64, histogram.count());
            encoder.encode_histogram::<NoLabelSet>(sum, count, &bounds, None)
        }
        Value::Info => Ok(()),
    }
}

pub(super) const fn family(
    kind: MetricType,
    name: &'static str,
    help: &'static str,
    sample: fn(&Subject<'_>, &mut Samples),
) -> Family {
    Family {
        name,
        help,
        kind,
        sample,
    }
}

/// The families of every tunnel, in the order of the reply.
pub const FAMILIES: &[Family] = &[
    family(
        Info,
        "interface",
        "Properties of the interface.",
        |s, out| {
            let protocol = match s.tunnel().protocol() {
                Protocol::WireGuard => "wireguard",
                Protocol::Native => "native",
            };
            let mode = match s.tunnel().mode() {
                Mode::Ip => "ip",
                Mode::Ethernet => "ethernet",
            };
            let mut labels = vec![
                ("protocol", protocol.to_owned()),
                ("mode", mode.to_owned()),
                ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ];
            if !s.record.keyless {
                let key = s.tunnel().identity().public().to_string();
                labels.push(("public_key", key));
            }
            out.push(&labels, Value::Info);
        },
    ),
    family(
        Gauge,
        "uptime_seconds",
        "Time since the start.",
        |s, out| {
            let uptime = now().mono.duration_since(s.node.started);
            out.gauge(&[], uptime.as_secs_f64());
        },
    ),
    family(
        Counter,
        "cpu_seconds",
        "Processor time of the daemon, all of its threads.",
        |_, out| {
            if let Ok(time) = process::own_cpu_time() {
                out.seconds(&[], time.total().as_secs_f64());
            }
        },
    ),
    family(
        Gauge,
        "resident_memory_bytes",
        "Resident memory of the daemon.",
        |_, out| {
            if let Ok(memory) = process::own_memory() {
                out.gauge(&[], memory.resident as f64);
            }
        },
    ),
    family(Gauge, "peers", "Configured peers.", |s, out| {
        let peers = s.tunnel().peers().count();
        out.gauge(&[], peers as f64);
    }),
    family(Counter, "sent_bytes", "Outer bytes sent.", |s, out| {
        out.count(&[], s.tunnel().totals().sent_bytes)
    }),
    family(
        Counter,
        "received_bytes",
        "Outer bytes received and authenticated.",
        |s, out| out.count(&[], s.tunnel().totals().received_bytes),
    ),
    family(
        Counter,
        "packets_in",
        "Inner packets that entered.",
        |s, out| totals(s, out, |d| d.packets_in),
    ),
    family(
        Counter,
        "packets_out",
        "Inner packets that left.",
        |s, out| totals(s, out, |d| d.packets_out),
    ),
    family(
        Counter,
        "payload_bytes",
        "Inner bytes that left.",
        |s, out| totals(s, out, |d| d.bytes_out),
    ),
    family(
        Counter,
        "consumed_packets",
        "Packets consumed here as intended: handshakes, keepalives, probes, reports.",
        |s, out| totals(s, out, |d| d.consumed),
    ),
    family(
        Gauge,
        "pending_packets",
        "Packets that wait for a handshake, for their time to be sent, or for missing parts.",
        |s, out| {
            let sum = s.tunnel().totals();
            for (name, direction) in directions(&sum) {
                out.gauge(&[("direction", name.into())], direction.pending as f64);
            }
        },
    ),
    family(
        Counter,
        "dropped_packets",
        "Packets dropped, by reason.",
        |s, out| dropped(out, &[], &s.tunnel().totals()),
    ),
    family(
        Counter,
        "device_dropped_packets",
        "Packets dropped by the kernel before the tunnel (tun_queue) or after it (stack), and malformed ones.",
        |s, out| {
            let read = || {
                let netlink = s.record.netlink.as_ref()?;
                netlink.link_stats(s.node.tun.index()?).ok()
            };
            if let Some(stats) = read() {
                for (place, count) in [
                    ("tun_queue", stats.tx_dropped),
                    ("tun_queue_error", stats.tx_errors),
                    ("stack", stats.rx_dropped),
                    ("stack_error", stats.rx_errors),
                ] {
                    out.count(&[("place", place.into())], count);
                }
            }
        },
    ),
    family(
        Counter,
        "receive_queue_dropped_datagrams",
        "Datagrams dropped by the kernel because the receive buffer was full.",
        |s, out| out.count(&[], s.node.sockets.counts().receive_queue_drops),
    ),
    family(
        Counter,
        "oversized_dropped_datagrams",
        "Datagrams longer than any of a peer, dropped by the socket filter.",
        |s, out| out.count(&[], s.node.sockets.counts().oversized_drops),
    ),
    family(
        Counter,
        "malformed_dropped_datagrams",
        "Datagrams of an unknown type, or too short for their type, dropped by the socket filter.",
        |s, out| out.count(&[], s.node.sockets.counts().malformed_drops),
    ),
    family(
        Counter,
        "flood_dropped_datagrams",
        "Datagrams of sources that are not the endpoint of a peer, dropped by the socket filter during a flood.",
        |s, out| out.count(&[], s.node.sockets.counts().flood_drops),
    ),
    family(
        Counter,
        "gso_fallbacks",
        "Sends that failed with segmentation offload and were repeated without.",
        |s, out| out.count(&[], s.node.sockets.counts().gso_fallbacks),
    ),
    family(
        Gauge,
        "port_search_sockets",
        "Additional sockets open for the port search behind a symmetric NAT.",
        |s, out| {
            let open = s.node.sockets.punch.iter().count();
            out.gauge(&[], open as f64);
        },
    ),
    family(
        Counter,
        "port_search_openers",
        "Datagrams sent to open ports of this host's symmetric NAT.",
        |s, out| {
            let openers = s.node.sockets.punch.openers();
            out.count(&[], openers);
        },
    ),
    family(
        MetricType::Gauge,
        "uplink_limit_bits_per_second",
        "Configured maximum rate of the tunnel's datagrams, IP headers included.",
        |s, out| {
            if let Some(rate) = s.node.pacer.limit() {
                out.gauge(&[], rate as f64);
            }
        },
    ),
    family(
        MetricType::Counter,
        "delayed_datagrams",
        "Datagrams sent later than they were made: bursts are spread, streams delayed, or the rate is limited.",
        |s, out| out.count(&[], s.node.pacer.delayed),
    ),
    family(
        MetricType::Histogram,
        "batch_size",
        "Packets or datagrams moved by one call.",
        |s, out| {
            let batches = &s.node.batches;
            for (call, sizes) in [
                ("tun_read", &batches.packets_per_read),
                ("udp_send", &batches.datagrams_per_send),
                ("udp_receive", &batches.datagrams_per_receive),
                ("tun_write", &batches.packets_per_write),
            ] {
                let histogram = Value::Histogram(sizes.clone());
                out.push(&[("call", call.into())], histogram);
            }
        },
    ),
    family(Info, "peer", "A peer.", |s, out| {
        peers(s, |labels, peer| {
            // A dashboard has one label to show, whether the peer has a name or not.
            let name = s.record.name_of(s.node, &peer.public_key);
            let name = name.unwrap_or_else(|| peer.public_key.to_string());
            out.push(&with(labels, "name", &name), Value::Info);
        });
    }),
    family(
        Gauge,
        "peer_up",
        "Whether the peer answers: 0 if it has not answered for 15 s; absent if it was never seen and nothing has waited \
         for it that long.",
        |s, out| {
            let now = now();
            peers(s, |labels, peer| {
                if let Some(is_up) = is_up(peer, now) {
                    out.flag(labels, is_up);
                }
            })
        },
    ),
    family(
        Gauge,
        "peer_relayed",
        "Whether the path to the member of the mesh is a relay.",
        |s, out| {
            peers(s, |labels, peer| {
                if let Some(is_relayed) = is_relayed(peer) {
                    out.flag(labels, is_relayed);
                }
            })
        },
    ),
    family(
        Gauge,
        "peer_latest_handshake_timestamp_seconds",
        "When the newest session was established, since the Unix epoch.",
        |s, out| gauge(s, out, |p| p.last_handshake.map(|at| at.as_secs_f64())),
    ),
    family(
        Counter,
        "peer_handshakes",
        "Handshake messages and sessions.",
        |s, out| {
            peers(s, |labels, peer| {
                let handshakes = &peer.counters.handshakes;
                for (event, count) in [
                    ("initiation_sent", handshakes.initiations_sent),
                    ("initiation_received", handshakes.initiations_received),
                    ("completed", handshakes.completed),
                ] {
                    out.count(&with(labels, "event", event), count);
                }
            })
        },
    ),
    family(
        Counter,
        "peer_sent_bytes",
        "Outer bytes sent to the peer.",
        |s, out| counter(s, out, |c| c.sent_bytes),
    ),
    family(
        Counter,
        "peer_received_bytes",
        "Outer bytes received from the peer and authenticated.",
        |s, out| counter(s, out, |c| c.received_bytes),
    ),
    family(
        Counter,
        "peer_packets_in",
        "Inner packets of the peer that entered.",
        |s, out| counters(s, out, |d| d.packets_in),
    ),
    family(
        Counter,
        "peer_packets_out",
        "Inner packets of the peer that left.",
        |s, out| counters(s, out, |d| d.packets_out),
    ),
    family(
        Counter,
        "peer_dropped_packets",
        "Packets of the peer dropped, by reason.",
        |s, out| peers(s, |labels, peer| dropped(out, labels, &peer.counters)),
    ),
    family(
        Counter,
        "peer_port_search_probes",
        "Probes sent to ports of the peer's symmetric NAT.",
        |s, out| {
            peers(s, |labels, peer| {
                out.count(labels, peer.birthday.probes());
            })
        },
    ),
    family(
        Gauge,
        "peer_port_search_failures",
        "Failed port searches for the peer since the last successful one.",
        |s, out| gauge(s, out, |p| Some(p.birthday.failed_attempts() as f64)),
    ),
    family(
        Gauge,
        "peer_path_mtu_bytes",
        "Largest outer packet known to reach the peer.",
        |s, out| {
            if s.tunnel().protocol() == Protocol::Native {
                gauge(s, out, |p| Some(p.path.mtu.mtu() as f64));
            }
        },
    ),
    family(
        Gauge,
        "peer_round_trip_seconds",
        "Round trip of the latest probe of the path, in the native protocol.",
        |s, out| gauge(s, out, |p| p.path.rtt.map(|rtt| rtt.as_secs_f64())),
    ),
    family(
        Gauge,
        "peer_loss_ratio",
        "Share of sent records that were lost, by the peer's latest report.",
        |s, out| {
            gauge(s, out, |p| {
                let report = p.path.report.as_ref()?;
                let sent = f64::from(report.received) + f64::from(report.lost);
                (sent > 0.0).then(|| f64::from(report.lost) / sent)
            })
        },
    ),
    family(
        Counter,
        "peer_repair_parity_records",
        "Parity records sent to the peer.",
        |s, out| repair(s, out, |p| p.path.repair().sent),
    ),
    family(
        Counter,
        "peer_repair_restored_records",
        "Records that the path lost and the peer restored from parity.",
        |s, out| repair(s, out, |p| p.path.restored),
    ),
    family(
        Counter,
        "peer_repair_unrestored_records",
        "Records that the path lost and the parity sent did not suffice for.",
        |s, out| repair(s, out, |p| p.path.not_restored),
    ),
    family(
        Counter,
        "peer_repair_held_records",
        "Records from the peer whose TCP segments waited for a lost one.",
        |s, out| {
            repair(s, out, |p| {
                p.repair.as_ref().map_or(0, |repair| repair.held)
            })
        },
    ),
    family(
        Gauge,
        "peer_queueing_delay_seconds",
        "One-way delay above the least, by the peer's latest report. It contains the time in this host's own queue.",
        |s, out| {
            gauge(s, out, |p| {
                let report = p.path.report.as_ref()?;
                Some(f64::from(report.queueing_delay) / 1e6)
            })
        },
    ),
];

fn directions(counters: &PeerCounters) -> [(&'static str, &DirectionCounters); 2] {
    [
        ("outbound", &counters.outbound),
        ("inbound", &counters.inbound),
    ]
}

fn totals(s: &Subject<'_>, out: &mut Samples, of: fn(&DirectionCounters) -> u64) {
    for (name, direction) in directions(&s.tunnel().totals()) {
        out.count(&[("direction", name.into())], of(direction));
    }
}

/// Calls `visit` for every peer, with its label.
fn peers(s: &Subject<'_>, mut visit: impl FnMut(&[Label], &Peer)) {
    for peer in s.tunnel().peers() {
        visit(&[("peer", peer.public_key.to_string())], peer);
    }
}

fn counter(s: &Subject<'_>, out: &mut Samples, of: fn(&PeerCounters) -> u64) {
    peers(s, |labels, peer| out.count(labels, of(&peer.counters)));
}

fn counters(s: &Subject<'_>, out: &mut Samples, of: fn(&DirectionCounters) -> u64) {
    peers(s, |labels, peer| {
        for (name, direction) in directions(&peer.counters) {
            out.count(&with(labels, "direction", name), of(direction));
        }
    });
}

fn gauge(s: &Subject<'_>, out: &mut Samples, of: fn(&Peer) -> Option<f64>) {
    peers(s, |labels, peer| {
        if let Some(value) = of(peer) {
            out.gauge(labels, value);
        }
    });
}

/// Counts of loss repair, for the peers that have it.
fn repair(s: &Subject<'_>, out: &mut Samples, of: fn(&Peer) -> u64) {
    peers(s, |labels, peer| {
        if peer.path.repair().ceiling().is_some() {
            out.count(labels, of(peer));
        }
    });
}

fn dropped(out: &mut Samples, labels: &[Label], counters: &PeerCounters) {
    for (name, direction) in directions(counters) {
        out.drops(&with(labels, "direction", name), &direction.drops);
    }
}
