//! A device: where it is, what went through for it, how its two legs are, and how it is told from others.

use super::successor::Successor;
use super::{DeviceConfig, Gateway, Origin};
use crate::time::Instant;
use seikan_observe::{DirectionCounters, DropReason};
use seikan_wire::ethernet::Mac;
use seikan_wire::ip::IpPacket;
use std::net::IpAddr;
use std::time::Duration;

/// An address that was learned is kept at least so long when another is used beside it.
const LEARNED_FOR: Duration = Duration::from_secs(60);

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
    /// An IPv6 address that may take the place of the one in `lan`.
    pub(super) successor: Option<Successor>,
    /// From the device into the tunnel.
    pub outbound: DirectionCounters,
    /// From the tunnel to the device.
    pub inbound: DirectionCounters,
    /// Reads that brought the packets of `outbound`: fewer where GRO or TSO joined them.
    pub reads: u64,
    /// New flows by the rule that let them pass: those of `allow_from`, then those of `allow_to`.
    pub rule_hits: Vec<u64>,
    /// Between device and gateway.
    pub lan_side: SideStats,
    /// Between gateway and remote.
    pub tunnel_side: SideStats,
}

/// What TCP told of one leg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SideStats {
    /// Segments that were sent into the leg, or found missing out of it.
    pub segments: u64,
    /// Of these, lost: they had to be sent again.
    pub lost: u64,
    /// Smoothed round-trip time (RFC 6298, an eighth of each sample).
    pub rtt: Option<Duration>,
    /// The shortest round trip.
    pub rtt_min: Option<Duration>,
}

impl SideStats {
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
            successor: None,
            outbound: DirectionCounters::default(),
            inbound: DirectionCounters::default(),
            reads: 0,
            rule_hits: vec![0; config.allow_from.len() + config.allow_to.len()],
            lan_side: SideStats::default(),
            tunnel_side: SideStats::default(),
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

impl Gateway {
    /// Whose packet it is; `None` is the host's own.
    pub(super) fn sender(
        &mut self,
        ip: &IpPacket,
        origin: Origin,
        now: Instant,
    ) -> Result<Option<DeviceId>, DropReason> {
        let (mac, vlan) = match origin {
            Origin::Tun if self.own.contains(&ip.src) => return Ok(None),
            // What the kernel forwards shows neither card nor VLAN.
            Origin::Tun => {
                let found = self.by_lan.get(&(None, ip.src)).copied();
                return found.map(Some).ok_or(DropReason::UnlistedDevice);
            }
            Origin::Lan { mac, vlan } => (mac, vlan),
        };
        let Some(id) = self.device_by_lan(vlan, ip.src) else {
            let id = self.device_by_mac(vlan, mac);
            let id = id.ok_or(DropReason::UnlistedDevice)?;
            return self.learn(id, ip.src, now).map(|()| Some(id));
        };
        let device = &self.devices[id.0 as usize];
        // Another card with a device's address: a duplicate, or somebody who pretends.
        match device.config.mac.or(device.mac) {
            Some(known) if known != mac => Err(DropReason::DeviceMismatch),
            Some(_) => Ok(Some(id)),
            None => {
                self.note_mac(id, mac);
                Ok(Some(id))
            }
        }
    }

    /// A device's card uses an address that was not given: it is the device's, if none is fixed.
    pub(super) fn learn(
        &mut self,
        id: DeviceId,
        address: IpAddr,
        now: Instant,
    ) -> Result<(), DropReason> {
        let device = &mut self.devices[id.0 as usize];
        let usable = match address {
            IpAddr::V4(a) => {
                !(a.is_unspecified() || a.is_loopback() || a.is_multicast() || a.is_broadcast())
            }
            IpAddr::V6(a) => {
                !(a.is_unspecified()
                    || a.is_loopback()
                    || a.is_multicast()
                    || a.is_unicast_link_local())
            }
        };
        if !usable || device.has_fixed_lan(address.is_ipv6()) {
            return Err(DropReason::DeviceMismatch);
        }
        let family = family(address);
        let old = device.lan[family];
        // IPv6 hosts use several at once: one-to-one is the one that was first.
        if address.is_ipv6()
            && old.is_some()
            && device.used[family].is_some_and(|used| now.duration_since(used) < LEARNED_FOR)
        {
            device.contend(address, now);
            return Err(DropReason::DeviceMismatch);
        }
        self.readdress(id, address, now);
        Ok(())
    }

    /// The address is the device's from now on, instead of the one that was.
    pub(super) fn readdress(&mut self, id: DeviceId, address: IpAddr, now: Instant) {
        let device = &mut self.devices[id.0 as usize];
        let (family, vlan) = (family(address), device.config.vlan);
        device.used[family] = Some(now);
        if address.is_ipv6() {
            device.successor = None;
        }
        if let Some(old) = device.lan[family].replace(address) {
            self.by_lan.remove(&(vlan, old));
        }
        self.by_lan.insert((vlan, address), id);
    }

    /// Whether the card or the address is a device's.
    pub(super) fn is_known(&self, vlan: Option<u16>, mac: Mac, address: IpAddr) -> bool {
        if self.by_mac.contains_key(&(vlan, mac)) {
            return true;
        }
        let id = self.device_by_lan(vlan, address);
        id.is_some_and(|id| self.devices[id.0 as usize].config.mac.is_none())
    }

    /// An ARP or neighbour message of the local network ended here as intended.
    pub(super) fn consume_unattributed(&mut self) {
        self.unattributed.packets_in += 1;
        self.unattributed.consumed += 1;
    }

    /// A broadcast or multicast packet: of a device or of somebody else, it stays.
    pub(super) fn drop_group(&mut self, vlan: Option<u16>, mac: Mac, packet: &[u8]) {
        let by_address = || {
            let ip = IpPacket::parse_headers(packet).ok()?;
            self.device_by_lan(vlan, ip.src)
        };
        let counters = match self.device_by_mac(vlan, mac).or_else(by_address) {
            Some(id) => {
                let device = &mut self.devices[id.0 as usize];
                device.reads += 1;
                &mut device.outbound
            }
            None => &mut self.unattributed,
        };
        counters.packets_in += 1;
        counters.drops.add(DropReason::NotUnicast, 1);
    }

    /// Hears that `address` is at `mac`: which device that is, or an error if it contradicts what is
    /// known of the device.
    pub(super) fn on_address_claim(
        &mut self,
        now: Instant,
        vlan: Option<u16>,
        mac: Mac,
        address: IpAddr,
        present_for: Duration,
    ) -> Result<Option<DeviceId>, ()> {
        let Some(id) = self.device_by_lan(vlan, address) else {
            let Some(id) = self.device_by_mac(vlan, mac) else {
                return Ok(None);
            };
            // Link-local and fixed addresses are not learned; the card was heard all the same.
            let _ = self.learn(id, address, now);
            self.devices[id.0 as usize].last_seen = Some(now);
            return Ok(Some(id));
        };
        let device = &mut self.devices[id.0 as usize];
        let is_there = device
            .last_seen
            .is_some_and(|seen| !seen.has_expired(present_for, now));
        match (device.config.mac, device.mac) {
            (Some(own), _) if own != mac => return Err(()),
            (None, Some(known)) if known != mac && is_there => return Err(()),
            _ => {}
        }
        device.last_seen = Some(now);
        if !device.refute(address) {
            device.used[family(address)] = Some(now);
        }
        self.note_mac(id, mac);
        Ok(Some(id))
    }

    /// The device's card.
    pub(super) fn note_mac(&mut self, id: DeviceId, mac: Mac) {
        let device = &mut self.devices[id.0 as usize];
        let vlan = device.config.vlan;
        if device.mac == Some(mac) {
            return;
        }
        if let Some(old) = device.mac.replace(mac)
            && self.by_mac.get(&(vlan, old)) == Some(&id)
        {
            self.by_mac.remove(&(vlan, old));
        }
        self.by_mac.entry((vlan, mac)).or_insert(id);
    }

    /// The device's card is not known any more, unless it is given.
    pub(super) fn forget_mac(&mut self, id: DeviceId) {
        let device = &mut self.devices[id.0 as usize];
        if device.config.mac.is_none()
            && let Some(old) = device.mac.take()
        {
            let vlan = device.config.vlan;
            if self.by_mac.get(&(vlan, old)) == Some(&id) {
                self.by_mac.remove(&(vlan, old));
            }
        }
    }
}
