//! Devices: identification, addresses, counters, and statistics of the local and the tunnel side.

use super::successor::Successor;
use super::{DeviceConfig, Gateway, Origin};
use crate::time::Instant;
use seikan_observe::{DirectionCounters, DropReason};
use seikan_wire::ethernet::Mac;
use seikan_wire::ip::IpPacket;
use std::net::IpAddr;
use std::time::Duration;

/// Minimum time that a learned address is kept while another one is used as well.
const LEARNED_FOR: Duration = Duration::from_secs(60);

/// A device, by its position in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId(pub u32);

/// State of a device.
#[derive(Clone, Debug)]
pub struct Device {
    /// Its configuration.
    pub config: DeviceConfig,
    /// Addresses on the local network, IPv4 and IPv6, configured or learned.
    pub lan: [Option<IpAddr>; 2],
    /// Addresses in the overlay, IPv4 and IPv6.
    pub overlay: [Option<IpAddr>; 2],
    /// The MAC address of its last frame, in transparent mode.
    pub mac: Option<Mac>,
    /// When its last frame or packet arrived.
    pub last_seen: Option<Instant>,
    /// When each address of `lan` was last used.
    pub(super) used: [Option<Instant>; 2],
    /// An IPv6 address that may replace the one in `lan`.
    pub(super) successor: Option<Successor>,
    /// From the device into the tunnel.
    pub outbound: DirectionCounters,
    /// From the tunnel to the device.
    pub inbound: DirectionCounters,
    /// Number of reads for the packets of `outbound`; smaller where GRO or TSO merged them.
    pub reads: u64,
    /// New flows by the rule that admitted them: those of `allow_from`, then those of `allow_to`.
    pub rule_hits: Vec<u64>,
    /// Statistics between device and gateway.
    pub lan_side: SideStats,
    /// Statistics between gateway and remote.
    pub tunnel_side: SideStats,
}

/// Statistics of one side of the gateway, from TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SideStats {
    /// Segments sent into this side, or found missing from it.
    pub segments: u64,
    /// Lost segments: they had to be retransmitted.
    pub lost: u64,
    /// Smoothed round-trip time (RFC 6298, an eighth of each sample).
    pub rtt: Option<Duration>,
    /// The shortest round trip.
    pub rtt_min: Option<Duration>,
}

impl SideStats {
    /// Adds a round-trip time.
    pub fn measured(&mut self, sample: Duration) {
        self.rtt = Some(match self.rtt {
            Some(rtt) => (rtt * 7 + sample) / 8,
            None => sample,
        });
        self.rtt_min = Some(self.rtt_min.map_or(sample, |min| min.min(sample)));
    }

    /// Lost segments as a share of all, from 0 to 1.
    pub fn loss(&self) -> f64 {
        match self.segments {
            0 => 0.0,
            all => self.lost as f64 / all as f64,
        }
    }
}

/// Index of an address's family in a pair.
pub(super) fn family(address: IpAddr) -> usize {
    usize::from(address.is_ipv6())
}

/// The IPv4 and the IPv6 address.
pub(super) fn pair(addresses: &[IpAddr]) -> [Option<IpAddr>; 2] {
    [false, true].map(|v6| addresses.iter().copied().find(|a| a.is_ipv6() == v6))
}

impl Device {
    /// Creates a device. With `allocates`, one without overlay addresses in its configuration has
    /// none yet.
    pub(super) fn new(config: DeviceConfig, allocates: bool) -> Device {
        let lan = pair(&config.lan);
        let overlay = pair(&config.overlay);
        let allocates = allocates && config.overlay.is_empty();
        let default = if allocates { [None; 2] } else { lan };
        Device {
            lan,
            overlay: [overlay[0].or(default[0]), overlay[1].or(default[1])],
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

    /// Whether the address on the local network is configured, not learned.
    pub fn has_fixed_lan(&self, v6: bool) -> bool {
        self.config.lan.iter().any(|a| a.is_ipv6() == v6)
    }

    /// Packets per read: how much GRO or TSO merged.
    pub fn gro_factor(&self) -> Option<f64> {
        (self.reads > 0).then(|| self.outbound.packets_in as f64 / self.reads as f64)
    }
}

impl Gateway {
    /// Identifies the sender of a packet; `None` is the host itself.
    pub(super) fn sender(
        &mut self,
        ip: &IpPacket,
        origin: Origin,
        now: Instant,
    ) -> Result<Option<DeviceId>, DropReason> {
        let (mac, vlan) = match origin {
            Origin::Tun if self.own.contains(&ip.src) => return Ok(None),
            // Packets forwarded by the kernel have neither MAC address nor VLAN.
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
        // Another MAC address with a device's address: a duplicate, or an impostor.
        match device.config.mac.or(device.mac) {
            Some(known) if known != mac => Err(DropReason::DeviceMismatch),
            Some(_) => Ok(Some(id)),
            None => {
                self.note_mac(id, mac);
                Ok(Some(id))
            }
        }
    }

    /// Learns an address from a device's packet, unless the device has a fixed one or it is that of a
    /// remote.
    pub(super) fn learn(
        &mut self,
        id: DeviceId,
        address: IpAddr,
        now: Instant,
    ) -> Result<(), DropReason> {
        // Otherwise a device could silence a remote for its VLAN.
        let shown = self.is_shown(address);
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
        if !usable || shown || device.has_fixed_lan(address.is_ipv6()) {
            return Err(DropReason::DeviceMismatch);
        }
        let family = family(address);
        let old = device.lan[family];
        // IPv6 hosts use several addresses at once; the first one is translated one-to-one.
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

    /// Replaces the address of a device.
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

    /// Whether the MAC address or the address belongs to a device.
    pub(super) fn is_known(&self, vlan: Option<u16>, mac: Mac, address: IpAddr) -> bool {
        if self.by_mac.contains_key(&(vlan, mac)) {
            return true;
        }
        let id = self.device_by_lan(vlan, address);
        id.is_some_and(|id| self.devices[id.0 as usize].config.mac.is_none())
    }

    /// Counts an ARP or neighbour message that ended here as intended.
    pub(super) fn consume_unattributed(&mut self) {
        self.unattributed.packets_in += 1;
        self.unattributed.consumed += 1;
    }

    /// Drops a broadcast or multicast packet, of a device or any other host.
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

    /// Handles a claim that `address` is at `mac`. Returns the device, or an error if the claim
    /// contradicts the device's state.
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
            // Link-local and fixed addresses are not learned, but the device is present.
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

    /// Sets the MAC address of a device.
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

    /// Forgets the MAC address of a device, unless it is configured.
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
