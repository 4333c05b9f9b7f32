//! Status of a gateway: [`GatewayStatus`], the section `gateway` of the status.
//!
//! It is part of the stable interface of [`crate::status`]. The daemon reports counters ([`without_devices`],
//! then [`device`] by device); the client computes rates from two reports ([`GatewayStatus::since`]), so that
//! the daemon keeps no state for clients.

use crate::gateway::offload::{self, Finding, Side};
use crate::gateway::spread::{Queue, Runs, Softirqs, Spread, spread};
use crate::gateway::{GatewayNode, Lan};
use crate::node::Node;
use crate::status::{Direction, Distribution, direction, distribution};
use crate::subject::Record;
use crate::system::now;
use seikan_observe::DropReason;
use seikan_proto::gateway::merging::Merging;
use seikan_proto::gateway::{self, DeviceId};
use seikan_proto::time::Instant;
use seikan_sys::ethtool::Ethtool;
use seikan_sys::netlink::{LinkInfo, Netlink};
use seikan_sys::softirq;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

/// Maximum number of peers whose routes are looked up, each with a request to the kernel.
const MAX_ROUTES: usize = 32;
/// Minimum number of segments for a loss ratio.
const LOSS_SEGMENTS: u64 = 200;
/// Loss ratio from which a side counts as slow.
const LOSS: f64 = 0.005;
/// Round-trip time in microseconds below which no side counts as slow.
const RTT_US: u64 = 1000;

/// Status of a gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GatewayStatus {
    /// `transparent` or `routed`.
    pub mode: String,
    /// The interface of the local network.
    pub interface: String,
    /// Whether the interface exists, is up and has a carrier.
    pub up: bool,
    /// The gateway's responder; only in transparent mode.
    pub responder: Option<Responder>,
    /// Table of flows.
    pub flows: FlowTable,
    /// Packets from the local network that belong to no device; bytes are not counted.
    pub unattributed: Direction,
    /// Packets from the tunnel for neither a device nor the host; bytes are not counted.
    pub refused: Direction,
    /// Addresses claimed by two hosts within the last minute.
    pub conflicts: Vec<Conflict>,
    /// Offloads of the NICs on both sides.
    pub offloads: Vec<Offloads>,
    /// Processors that handle received packets.
    pub softirqs: Softirqs,
    /// Distribution over the processors, from two samples; `None` with one.
    pub spread: Option<Spread>,
    /// Seconds between the two samples; `None` with one.
    pub interval_s: Option<f64>,
    /// The devices, in the order of the configuration.
    pub devices: Vec<DeviceStatus>,
}

/// The responder on the local network, in transparent mode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Responder {
    /// MAC address of the responder.
    pub mac: String,
    /// Whether the responder is active; a standby gateway only listens.
    pub active: bool,
    /// The other gateway on this local network; `None` where none is configured.
    pub second: Option<Second>,
    /// Frames that the kernel could not queue.
    pub lost: u64,
    /// Whether super-packets are passed to the NIC; if not, the gateway segments them.
    pub gso: bool,
    /// Reason if super-packets are not passed to the NIC.
    pub without_gso: Option<String>,
    /// Super-packets that the NIC's driver refused and the gateway then segmented.
    pub gso_refused: u64,
    /// Number of frames read together.
    pub frames_per_read: Distribution,
    /// Frames that the gateway itself makes: ARP, neighbour discovery, errors to devices, adverts
    /// to the other gateway.
    pub own: Direction,
}

/// The other gateway on the local network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Second {
    /// Whether an advert arrived within the last second.
    pub present: bool,
    /// Whether its last advert reported it as active.
    pub active: bool,
}

/// The flows of all devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FlowTable {
    /// Flows in the table.
    pub known: u64,
    /// Flows evicted from the full table.
    pub evicted: u64,
}

/// An address that two hosts claim.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Conflict {
    /// The address on the local network.
    pub address: IpAddr,
    /// MAC address of the other host that claims it.
    pub mac: String,
    /// Seconds since its last claim.
    pub age_s: f64,
}

/// The offloads of a NIC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Offloads {
    /// The NIC.
    pub interface: String,
    /// The network that the NIC is on.
    pub side: Side,
    /// Settings that matter for a gateway, by their names in `ethtool -k`.
    pub settings: BTreeMap<String, bool>,
    /// Settings that should be changed.
    pub findings: Vec<Finding>,
    /// Reason if the settings could not be read.
    pub unread: Option<String>,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceStatus {
    /// Its name in the configuration.
    pub name: String,
    /// MAC address that it last used.
    pub mac: Option<String>,
    /// Its VLAN.
    pub vlan: Option<u16>,
    /// Its addresses on the local network, configured or learned.
    pub lan: Vec<IpAddr>,
    /// Its addresses in the overlay.
    pub overlay: Vec<IpAddr>,
    /// The coordinator of the mesh has not allocated an address: an administrator has to approve the device.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
    /// Seconds since its last packet or frame.
    pub last_seen_s: Option<f64>,
    /// Mean number of packets merged into one that was read.
    pub gro_factor: Option<f64>,
    /// TCP between the device and the gateway.
    pub lan_side: SideStatus,
    /// TCP between the gateway and the remotes.
    pub tunnel_side: SideStatus,
    /// The slower of the two sides.
    pub slow_side: SlowSide,
    /// Its rules.
    pub rules: Vec<RuleStatus>,
    /// Packets that no rule allows.
    pub denied: Denied,
    /// Bytes per second between two samples; `None` with one.
    pub rate: Option<Rate>,
    /// Traffic from the device into the tunnel.
    pub outbound: Direction,
    /// Traffic from the tunnel to the device.
    pub inbound: Direction,
}

/// Loss and round trips of the device's TCP on one side.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SideStatus {
    /// Segments sent to this side, or found missing from it.
    pub segments: u64,
    /// Lost segments.
    pub lost: u64,
    /// Lost segments as a share of all, 0 to 1.
    pub loss: f64,
    /// Smoothed round-trip time in microseconds.
    pub rtt_us: Option<u64>,
    /// Shortest round-trip time in microseconds.
    pub rtt_min_us: Option<u64>,
}

/// The slow side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum SlowSide {
    /// Not enough TCP segments were seen.
    #[default]
    Unknown,
    /// Neither side is slow.
    Neither,
    /// The local network.
    Lan,
    /// The tunnel.
    Tunnel,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RuleStatus {
    /// The rule, as written in the configuration.
    pub rule: String,
    /// `from`: rule for connections to the device; `to`: rule for connections of the device.
    pub direction: String,
    /// Number of flows that the rule allowed.
    pub flows: u64,
}

/// Packets that no rule allows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Denied {
    /// Number of packets to the device.
    pub from: u64,
    /// Number of packets from the device.
    pub to: u64,
}

/// Rates in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Rate {
    /// From the device into the tunnel, in bytes per second.
    pub outbound: f64,
    /// From the tunnel to the device, in bytes per second.
    pub inbound: f64,
}

impl GatewayStatus {
    /// Adds the values that need two samples: rates, and the distribution of received packets. `earlier` was
    /// taken `seconds` before.
    pub fn since(&mut self, earlier: &GatewayStatus, seconds: f64) {
        self.spread = spread(&earlier.softirqs, &self.softirqs, seconds);
        self.interval_s = Some(seconds);
        let before: HashMap<&str, &DeviceStatus> =
            earlier.devices.iter().map(|d| (&*d.name, d)).collect();
        let rate = |before: &Direction, after: &Direction| {
            after.bytes_out.saturating_sub(before.bytes_out) as f64 / seconds.max(0.001)
        };
        for device in &mut self.devices {
            device.rate = before.get(&*device.name).map(|before| Rate {
                outbound: rate(&before.outbound, &device.outbound),
                inbound: rate(&before.inbound, &device.inbound),
            });
        }
    }

    /// Returns all settings that should be changed.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.offloads.iter().flat_map(|offloads| &offloads.findings)
    }
}

/// Returns the slow side: the side whose loss is relevant and at least twice that of the other;
/// otherwise the side whose round-trip time is relevant and at least twice that of the other.
pub fn slow_side(lan: &SideStatus, tunnel: &SideStatus) -> SlowSide {
    let loss = |side: &SideStatus| (side.segments >= LOSS_SEGMENTS).then_some(side.loss);
    let pairs = [
        (lan, tunnel, SlowSide::Lan),
        (tunnel, lan, SlowSide::Tunnel),
    ];
    for (side, other, name) in pairs {
        if let (Some(loss), Some(others)) = (loss(side), loss(other))
            && loss >= LOSS
            && loss >= 2.0 * others
        {
            return name;
        }
    }
    for (side, other, name) in pairs {
        if let (Some(rtt), Some(others)) = (side.rtt_us, other.rtt_us)
            && rtt > RTT_US
            && rtt >= 2 * others
        {
            return name;
        }
    }
    let is_measured = |side: &SideStatus| side.rtt_us.is_some() || side.segments >= LOSS_SEGMENTS;
    if is_measured(lan) && is_measured(tunnel) {
        SlowSide::Neither
    } else {
        SlowSide::Unknown
    }
}

/// Returns everything except the devices, which may be many and are reported one by one; `None` without a
/// gateway.
pub fn without_devices(node: &Node, record: &Record) -> Option<GatewayStatus> {
    let gateway = node.gateway.as_ref()?;
    let now = now().mono;
    let netlink = record.netlink.as_ref();
    let links = netlink.map_or_else(Vec::new, |netlink| links(node, gateway, netlink));
    let lan_link = links.iter().find(|(side, _)| *side == Side::Lan);
    let flows = gateway.gateway.flows();
    let lan = gateway.lan.as_ref();
    Some(GatewayStatus {
        mode: if lan.is_some() {
            "transparent"
        } else {
            "routed"
        }
        .into(),
        interface: gateway.interface.clone(),
        up: match lan {
            Some(lan) => lan.is_up(),
            None => lan_link.is_some_and(|(_, link)| link.up && link.carrier),
        },
        responder: lan.map(|lan| responder(lan, gateway.gateway.merging(), now)),
        flows: FlowTable {
            known: flows.len() as u64,
            evicted: flows.evicted(),
        },
        unattributed: direction(gateway.gateway.unattributed()),
        refused: direction(gateway.gateway.refused()),
        conflicts: lan.map_or_else(Vec::new, |lan| conflicts(lan, now)),
        offloads: offloads(gateway, &links),
        softirqs: softirqs(&links),
        spread: None,
        interval_s: None,
        devices: Vec::new(),
    })
}

/// Returns one device.
pub fn device(gateway: &GatewayNode, id: DeviceId, now: Instant) -> Option<DeviceStatus> {
    let device = gateway.gateway.device(id)?;
    let (lan_side, tunnel_side) = (side(&device.lan_side), side(&device.tunnel_side));
    let from = device.config.allow_from.iter().map(|rule| ("from", rule));
    let to = device.config.allow_to.iter().map(|rule| ("to", rule));
    let rules = from.chain(to).zip(&device.rule_hits);
    Some(DeviceStatus {
        name: device.config.name.clone(),
        mac: device.mac.map(|mac| mac.to_string()),
        vlan: device.config.vlan,
        lan: device.lan.into_iter().flatten().collect(),
        overlay: device.overlay.into_iter().flatten().collect(),
        pending: gateway.gateway.is_pending(id),
        last_seen_s: device.last_seen.map(|at| seconds(at, now)),
        gro_factor: device.gro_factor(),
        slow_side: slow_side(&lan_side, &tunnel_side),
        lan_side,
        tunnel_side,
        rules: rules
            .map(|((direction, rule), flows)| RuleStatus {
                rule: rule.to_string(),
                direction: direction.into(),
                flows: *flows,
            })
            .collect(),
        denied: Denied {
            from: device.inbound.drops.get(DropReason::DeniedFrom),
            to: device.outbound.drops.get(DropReason::DeniedTo),
        },
        rate: None,
        outbound: direction(&device.outbound),
        inbound: direction(&device.inbound),
    })
}

fn side(side: &gateway::SideStats) -> SideStatus {
    SideStatus {
        segments: side.segments,
        lost: side.lost,
        loss: side.loss(),
        rtt_us: side.rtt.map(|rtt| rtt.as_micros() as u64),
        rtt_min_us: side.rtt_min.map(|rtt| rtt.as_micros() as u64),
    }
}

fn responder(lan: &Lan, merging: &Merging, now: Instant) -> Responder {
    let without_gso = if !lan.gso() {
        Some("`offload = false` in the configuration")
    } else if merging.is_broken() {
        Some("the interface loses super-packets; they are tried again after ten minutes")
    } else if merging.is_cut() {
        Some("most super-packets were lost; a trial without them is running")
    } else {
        None
    };
    Responder {
        mac: lan.responder.mac().to_string(),
        active: lan.responder.is_active(),
        second: lan.election.as_ref().map(|election| {
            let other = election.other(now);
            Second {
                present: other.is_some(),
                active: other.unwrap_or(false),
            }
        }),
        lost: lan.lost(),
        gso: without_gso.is_none(),
        without_gso: without_gso.map(str::to_owned),
        gso_refused: lan.counters.gso_refused,
        frames_per_read: distribution(&lan.counters.frames_per_read),
        own: direction(&lan.counters.own),
    }
}

fn conflicts(lan: &Lan, now: Instant) -> Vec<Conflict> {
    let conflicts = lan.responder.conflicts(now).map(|conflict| Conflict {
        address: conflict.address,
        mac: conflict.mac.to_string(),
        age_s: seconds(conflict.at, now),
    });
    let mut all: Vec<_> = conflicts.collect();
    all.sort_by_key(|conflict| conflict.address);
    all
}

/// Returns the interface of the local network and those over which peers are reached.
fn links(node: &Node, gateway: &GatewayNode, netlink: &Netlink) -> Vec<(Side, LinkInfo)> {
    let lan = netlink.link(&gateway.interface).ok();
    let mut links: Vec<_> = lan.map(|link| (Side::Lan, link)).into_iter().collect();
    let endpoints = node.tunnel.peers().filter_map(|peer| peer.path.endpoint);
    let mark = node.sockets.fwmark();
    for endpoint in endpoints.take(MAX_ROUTES) {
        let Ok(route) = netlink.route_get(endpoint.ip(), mark) else {
            continue;
        };
        let known =
            |(side, link): &(Side, LinkInfo)| *side == Side::Wan && link.index == route.device;
        if !links.iter().any(known)
            && let Ok(link) = netlink.link_by_index(route.device)
        {
            links.push((Side::Wan, link));
        }
    }
    links
}

fn offloads(gateway: &GatewayNode, links: &[(Side, LinkInfo)]) -> Vec<Offloads> {
    let devices = gateway.gateway.devices();
    let tagged = devices.into_iter().any(|(_, d)| d.config.vlan.is_some());
    let ethtool = Ethtool::open();
    let mut all: Vec<Offloads> = Vec::new();
    for (side, link) in links {
        for interface in softirq::nics(link) {
            if all
                .iter()
                .any(|o| o.side == *side && o.interface == interface)
            {
                continue;
            }
            let read = match &ethtool {
                Ok(ethtool) => ethtool.features(&interface).map_err(|e| e.to_string()),
                Err(error) => Err(format!("cannot open a socket: {error}")),
            };
            let features = read.as_deref().unwrap_or_default();
            let nic = offload::Nic {
                interface: &interface,
                side: *side,
                tagged,
            };
            let mut findings = offload::check(&nic, features);
            // A NIC may be on both sides.
            findings.retain(|f| {
                all.iter()
                    .all(|o| o.findings.iter().all(|g| g.command != f.command))
            });
            let settings = offload::settings(features);
            all.push(Offloads {
                settings: settings.map(|(name, on)| (name.to_owned(), on)).collect(),
                findings,
                unread: read.as_ref().err().cloned(),
                interface,
                side: *side,
            });
        }
    }
    all
}

fn softirqs(links: &[(Side, LinkInfo)]) -> Softirqs {
    let runs = softirq::net_rx().unwrap_or_default().into_iter();
    let mut queues: Vec<Queue> = Vec::new();
    for (_, link) in links {
        for steering in softirq::steering(link).into_iter().flatten() {
            let queue = Queue {
                interface: link.name.clone(),
                queue: steering.queue,
                cpus: steering.cpus,
            };
            if !queues.contains(&queue) {
                queues.push(queue);
            }
        }
    }
    Softirqs {
        net_rx: runs
            .map(|r| Runs {
                cpu: r.cpu,
                runs: r.runs,
            })
            .collect(),
        queues,
    }
}

fn seconds(at: Instant, now: Instant) -> f64 {
    // Rounded to a millisecond.
    now.duration_since(at).as_millis() as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(lost: u64, rtt_us: u64) -> SideStatus {
        SideStatus {
            segments: 1000,
            lost,
            loss: lost as f64 / 1000.0,
            rtt_us: Some(rtt_us),
            rtt_min_us: Some(rtt_us),
        }
    }

    #[test]
    fn the_side_that_loses_is_slow() {
        assert_eq!(slow_side(&side(5, 300), &side(2, 40_000)), SlowSide::Lan);
        assert_eq!(slow_side(&side(0, 40_000), &side(5, 300)), SlowSide::Tunnel);
    }

    #[test]
    fn equal_loss_has_no_slow_side_but_time_may() {
        assert_eq!(slow_side(&side(8, 300), &side(10, 400)), SlowSide::Neither);
        assert_eq!(slow_side(&side(8, 300), &side(10, 4000)), SlowSide::Tunnel);
    }

    #[test]
    fn loss_below_half_a_percent_is_no_verdict() {
        assert_eq!(slow_side(&side(4, 300), &side(0, 300)), SlowSide::Neither);
    }

    #[test]
    fn a_single_loss_of_few_segments_says_nothing() {
        let few = SideStatus {
            segments: 100,
            ..side(10, 300)
        };
        assert_eq!(slow_side(&few, &side(0, 300)), SlowSide::Neither);
    }

    #[test]
    fn round_trips_count_when_they_are_long_and_twice_as_long() {
        assert_eq!(slow_side(&side(0, 300), &side(0, 900)), SlowSide::Neither);
        assert_eq!(slow_side(&side(0, 300), &side(0, 1001)), SlowSide::Tunnel);
        assert_eq!(slow_side(&side(0, 1900), &side(0, 1001)), SlowSide::Neither);
        assert_eq!(slow_side(&side(0, 2002), &side(0, 1001)), SlowSide::Lan);
    }

    #[test]
    fn without_samples_nobody_knows() {
        let none = SideStatus::default();
        assert_eq!(slow_side(&none, &none), SlowSide::Unknown);
        assert_eq!(slow_side(&side(0, 9000), &none), SlowSide::Unknown);
    }

    fn golden() -> GatewayStatus {
        let json = include_str!("../../testdata/status.json");
        let status: crate::status::Status = serde_json::from_str(json).unwrap();
        status.gateway.unwrap()
    }

    #[test]
    fn two_samples_give_rates() {
        let before = golden();
        let mut after = before.clone();
        after.devices[0].outbound.bytes_out += 3000;
        after.devices[0].inbound.bytes_out += 500;
        after.since(&before, 2.0);
        let rate = after.devices[0].rate.unwrap();
        assert_eq!((rate.outbound, rate.inbound), (1500.0, 250.0));
        assert_eq!(after.interval_s, Some(2.0));
        assert!(after.spread.is_some());
    }

    #[test]
    fn devices_come_last_so_that_they_can_follow_in_pieces() {
        let mut gateway = golden();
        gateway.devices.clear();
        let text = serde_json::to_string(&gateway).unwrap();
        assert!(text.ends_with("\"devices\":[]}"), "{text}");
    }
}
