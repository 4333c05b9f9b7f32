//! A device: where it is, what went through for it, and how its two legs are.

use super::DeviceConfig;
use crate::time::Instant;
use seikan_observe::DirectionCounters;
use seikan_wire::ethernet::Mac;
use std::net::IpAddr;
use std::time::Duration;

/// A device's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// What is known of one device.
#[derive(Clone, Debug)]
pub struct Device {
    /// What was configured.
    pub config: DeviceConfig,
    /// Addresses on the local network, IPv4 and IPv6, configured or learned.
    pub lan: [Option<IpAddr>; 2],
    /// Addresses in the overlay, IPv4 and IPv6.
    pub overlay: [Option<IpAddr>; 2],
    /// The card it was heard from last, in transparent mode.
    pub mac: Option<Mac>,
    /// When something of it was heard last.
    pub last_seen: Option<Instant>,
    /// When each of `lan` was heard last.
    pub(super) used: [Option<Instant>; 2],
    /// From the device into the tunnel.
    pub outbound: DirectionCounters,
    /// From the tunnel to the device.
    pub inbound: DirectionCounters,
    /// Reads that brought the packets of `outbound`: fewer where GRO or TSO joined them.
    pub reads: u64,
    /// New flows by the rule that let them pass: those of `allow_from`, then those of `allow_to`.
    pub rule_hits: Vec<u64>,
    /// Between device and gateway.
    pub lan_leg: Leg,
    /// Between gateway and remote.
    pub tunnel_leg: Leg,
}

/// What TCP told of one leg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leg {
    /// Segments that were sent into the leg, or found missing out of it.
    pub segments: u64,
    /// Of these, lost: they had to be sent again.
    pub lost: u64,
    /// Smoothed round-trip time (RFC 6298, an eighth of each sample).
    pub rtt: Option<Duration>,
    /// The shortest round trip.
    pub rtt_min: Option<Duration>,
}

impl Leg {
    /// Takes in a round trip.
    pub fn measured(&mut self, sample: Duration) {
        self.rtt = Some(match self.rtt {
            Some(rtt) => (rtt * 7 + sample) / 8,
            None => sample,
        });
        self.rtt_min = Some(self.rtt_min.map_or(sample, |min| min.min(sample)));
    }

    /// Lost segments as a share of all, 0 to 1.
    pub fn loss(&self) -> f64 {
        match self.segments {
            0 => 0.0,
            all => self.lost as f64 / all as f64,
        }
    }
}

/// Place of an address's family in a pair.
pub(super) fn family(address: IpAddr) -> usize {
    usize::from(address.is_ipv6())
}

impl Device {
    pub(super) fn new(config: DeviceConfig) -> Device {
        let pair = |addresses: &[IpAddr]| {
            [false, true].map(|v6| addresses.iter().copied().find(|a| a.is_ipv6() == v6))
        };
        let lan = pair(&config.lan);
        let overlay = pair(&config.overlay);
        Device {
            lan,
            overlay: [overlay[0].or(lan[0]), overlay[1].or(lan[1])],
            mac: config.mac,
            last_seen: None,
            used: [None; 2],
            outbound: DirectionCounters::default(),
            inbound: DirectionCounters::default(),
            reads: 0,
            rule_hits: vec![0; config.allow_from.len() + config.allow_to.len()],
            lan_leg: Leg::default(),
            tunnel_leg: Leg::default(),
            config,
        }
    }

    /// Whether the address on the local network is given, not learned.
    pub fn has_fixed_lan(&self, v6: bool) -> bool {
        self.config.lan.iter().any(|a| a.is_ipv6() == v6)
    }

    /// Packets that each read brought: how much GRO or TSO joined.
    pub fn gro_factor(&self) -> Option<f64> {
        (self.reads > 0).then(|| self.outbound.packets_in as f64 / self.reads as f64)
    }
}
