//! Packet processing of the gateway, in both directions.

use super::devices::family;
use super::flows::{Direction, Flow, Seen, Segment};
use super::query::{Ends, FirstFragment, Query, query};
use super::rules::Subject;
use super::translate::translate;
use super::{Device, DeviceId, Gateway, Made, length};
use crate::segment::SuperPacket;
use crate::time::Instant;
use crate::tunnel::clamp_syn;
use seikan_observe::{DropReason, Stopped};
use seikan_wire::ethernet::Mac;
use seikan_wire::ip::{IpPacket, PROTO_TCP};
use seikan_wire::{VNET_HDR_LEN, VnetHdr, checksum, tcp};
use std::net::IpAddr;

/// Where an outbound packet was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the TUN device: forwarded by the kernel, or sent by the host itself.
    Tun,
    /// From the interface on the local network.
    Lan {
        /// The sender of the frame.
        mac: Mac,
        /// Its VLAN.
        vlan: Option<u16>,
    },
}

/// Result for an outbound packet that may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outbound {
    /// The packet in the read passes, with translated addresses.
    Whole,
    /// The packet was fragmented; the fragments are in [`Gateway::take_made`].
    Cut,
}

/// Destination of an inbound packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inbound {
    /// The host itself; the packet is unchanged.
    Host,
    /// This device; the packet has addresses of the local network now.
    Device(DeviceId),
}

/// A packet or super-packet in transit.
struct Passing {
    ip: IpPacket,
    partial: bool,
    /// Number of segments.
    packets: u64,
    /// Their bytes.
    bytes: u64,
    /// Payload bytes of each segment; 0 for an ordinary packet.
    gso_size: usize,
    /// Length of the IP and transport headers of a super-packet.
    header_len: usize,
}

impl Passing {
    /// Length of its longest segment.
    fn longest(&self) -> usize {
        match self.gso_size {
            0 => self.ip.total_len,
            size => self.header_len + size,
        }
    }
}

impl Gateway {
    /// Processes a read, `[virtio-net header][packet]`, from the local network. Returns `Ok` if it
    /// may enter the tunnel; it has overlay addresses then. Otherwise it was counted.
    pub fn outbound(
        &mut self,
        now: Instant,
        read: &mut [u8],
        origin: Origin,
    ) -> Result<Outbound, DropReason> {
        let passing = match SuperPacket::parse(read) {
            Ok(packet) => Passing {
                ip: packet.ip,
                partial: packet.partial,
                packets: packet.segments() as u64,
                bytes: (packet.bytes.len() + (packet.segments() - 1) * packet.header_len) as u64,
                gso_size: packet.kind.map_or(0, |_| packet.gso_size),
                header_len: packet.header_len,
            },
            Err(reason) => {
                self.drop_unattributed(reason, 1);
                return Err(reason);
            }
        };
        let id = match self.sender(&passing.ip, origin, now) {
            Ok(Some(id)) => id,
            Ok(None) => return Ok(Outbound::Whole),
            Err(reason) => {
                self.drop_unattributed(reason, passing.packets);
                return Err(reason);
            }
        };
        let packet = &mut read[VNET_HDR_LEN..VNET_HDR_LEN + passing.ip.total_len];
        let outcome = self.send_on(now, id, packet, &passing);
        let cut = outcome.is_ok() && self.is_hop && passing.longest() > self.mtu.tunnel as usize;
        let device = &mut self.devices[id.0 as usize];
        device.last_seen = Some(now);
        device.used[family(passing.ip.src)] = Some(now);
        device.refute(passing.ip.src);
        device.reads += 1;
        let counters = &mut device.outbound;
        counters.packets_in += passing.packets;
        match outcome {
            Ok(()) => {
                counters.packets_out += passing.packets;
                counters.bytes_out += passing.bytes;
            }
            Err(reason) => counters.drops.add(reason, passing.packets),
        }
        if cut {
            let limit = self.mtu.tunnel as usize;
            let whole = length::complete(packet, &passing.ip, passing.partial);
            let parts = length::fragments(&whole, limit);
            self.made.extend(parts.into_iter().map(Made::ToTunnel));
            return Ok(Outbound::Cut);
        }
        outcome.map(|()| Outbound::Whole)
    }

    /// Checks a read of the TUN device in transparent mode. The host's own packets pass. Forwarded
    /// packets do not: the tunnel is for devices, and their packets arrive at the interface on the
    /// local network.
    pub fn from_host(&mut self, read: &[u8]) -> Result<(), DropReason> {
        let packet = read.get(VNET_HDR_LEN..).unwrap_or_default();
        let reason = match IpPacket::parse_headers(packet).map(|ip| ip.src) {
            Ok(source) if self.by_overlay.contains_key(&source) => DropReason::DeviceMismatch,
            Ok(source) if self.own.contains(&source) || source.is_unspecified() => return Ok(()),
            Ok(_) => DropReason::UnlistedDevice,
            // The tunnel drops it.
            Err(_) => return Ok(()),
        };
        self.drop_unattributed(reason, 1);
        Err(reason)
    }

    /// Processes a packet from the tunnel. `header` begins with the IP header and holds all headers
    /// of a super-packet, or the whole of an ordinary packet; it stands for `packets` packets of
    /// `bytes` in total. After `Ok` for a device, [`Self::delivered`] reports the result. After
    /// `Err` the packet was counted.
    pub fn inbound(
        &mut self,
        now: Instant,
        header: &mut [u8],
        vnet: &VnetHdr,
        packets: u64,
        bytes: u64,
    ) -> Result<Inbound, DropReason> {
        let found = IpPacket::parse_headers(header).map_err(|_| DropReason::NotIp);
        let found = found.and_then(|ip| Ok((self.receiver(&ip, header)?, ip)));
        let (id, ip) = match found {
            Ok((Inbound::Device(id), ip)) => (id, ip),
            Ok((Inbound::Host, _)) => return Ok(Inbound::Host),
            Err(reason) => {
                self.refused.packets_in += packets;
                self.refused.drops.add(reason, packets);
                return Err(reason);
            }
        };
        let passing = Passing {
            ip,
            partial: vnet.needs_csum,
            packets,
            bytes,
            gso_size: usize::from(vnet.gso_size),
            // Super-packets of the tunnel come with their headers only.
            header_len: usize::from(vnet.hdr_len),
        };
        let outcome = self.let_in(now, id, header, &passing);
        if let Err(reason) = outcome {
            self.delivered(id, passing.packets, passing.bytes, Err(reason.into()));
        }
        outcome.map(|()| Inbound::Device(id))
    }

    /// Finds the receiver of a packet from the tunnel: a device, or the host at an address of the
    /// tunnel's interface. Nothing else may reach the host, which might forward it or accept it for
    /// another network.
    fn receiver(&self, ip: &IpPacket, header: &[u8]) -> Result<Inbound, DropReason> {
        let is_own = |address| self.own.contains(address) || self.by_overlay.contains_key(address);
        // Allowed IPs may be wide, and rules depend on the source.
        if is_own(&ip.src) {
            return Err(DropReason::DeviceMismatch);
        }
        if is_group(ip.src) || ip.src.is_unspecified() || ip.src.is_loopback() {
            return Err(DropReason::NotUnicast);
        }
        if let Some(&id) = self.by_overlay.get(&ip.dst) {
            // The device would take the source for a host of its own network.
            let shown = self.shown_as.get(&ip.src).unwrap_or(&ip.src);
            let vlan = self.devices[id.0 as usize].config.vlan;
            let pretends = self.by_lan.contains_key(&(vlan, *shown)) || self.is_shown(ip.src);
            return if pretends {
                Err(DropReason::DeviceMismatch)
            } else {
                Ok(Inbound::Device(id))
            };
        }
        if self.own.contains(&ip.dst) {
            // The next hop of a source route has not been checked.
            return if ip.source_routed(header) {
                Err(DropReason::SourceRouted)
            } else {
                Ok(Inbound::Host)
            };
        }
        if is_group(ip.dst) {
            Err(DropReason::NotUnicast)
        } else {
            Err(DropReason::UnlistedDevice)
        }
    }

    /// Reports the result of a packet or super-packet that [`Self::inbound`] passed for a device: `Ok`,
    /// or the number of packets that were delivered before the next was refused, and why.
    pub fn delivered(
        &mut self,
        id: DeviceId,
        packets: u64,
        bytes: u64,
        result: Result<(), Stopped>,
    ) {
        let counters = &mut self.devices[id.0 as usize].inbound;
        counters.packets_in += packets;
        counters.leave(packets, bytes, result);
    }

    /// A packet from a device: applies the rules and translates the remote's address.
    fn send_on(
        &mut self,
        now: Instant,
        id: DeviceId,
        packet: &mut [u8],
        passing: &Passing,
    ) -> Result<(), DropReason> {
        let ip = &passing.ip;
        if is_group(ip.dst) {
            return Err(DropReason::NotUnicast);
        }
        if self.shown_as.contains_key(&ip.dst) {
            // Replies would come from the other address.
            return Err(DropReason::ShownOtherwise);
        }
        let remote = self.shown.get(&ip.dst).copied().unwrap_or(ip.dst);
        let own = self.devices[id.0 as usize].overlay[family(ip.src)];
        let own = own.ok_or(DropReason::UnlistedDevice)?;
        let ends = Ends {
            device: id,
            remote,
            direction: Direction::Out,
        };
        let first = self.admit(now, packet, passing, ends)?;
        let limit = self.mtu.tunnel as usize;
        clamp_syn(packet, passing.partial, |_| limit);
        if self.is_hop {
            lower_hop_limit(packet)?;
            if passing.longest() > limit && !length::may_be_cut(packet, ip, passing.gso_size) {
                self.too_big(packet, limit, |answer| Made::ToDevice(id, answer));
                return Err(DropReason::TooBig);
            }
        }
        let mapping = [(ip.src, own), (ip.dst, remote)];
        translate(packet, ip, &mapping, passing.partial)?;
        self.fragments.passed(first, now);
        Ok(())
    }

    /// A packet to a device: applies the rules and translates the remote's address.
    fn let_in(
        &mut self,
        now: Instant,
        id: DeviceId,
        packet: &mut [u8],
        passing: &Passing,
    ) -> Result<(), DropReason> {
        let ip = &passing.ip;
        let lan = self.devices[id.0 as usize].lan[family(ip.dst)];
        let lan = lan.ok_or(DropReason::DeviceUnresolved)?;
        let ends = Ends {
            device: id,
            remote: ip.src,
            direction: Direction::In,
        };
        let first = self.admit(now, packet, passing, ends)?;
        let limit = self.mtu.lan as usize;
        clamp_syn(packet, passing.partial, |_| limit);
        if self.is_hop {
            lower_hop_limit(packet)?;
            if passing.longest() > limit && !length::may_be_cut(packet, ip, passing.gso_size) {
                self.too_big(packet, limit, Made::ToTunnel);
                return Err(DropReason::TooBig);
            }
        }
        let shown = self.shown_as.get(&ip.src).copied().unwrap_or(ip.src);
        let mapping = [(ip.dst, lan), (ip.src, shown)];
        translate(packet, ip, &mapping, passing.partial)?;
        self.fragments.passed(first, now);
        Ok(())
    }

    /// Applies the rules and evaluates TCP headers. Returns a first fragment, whose later ones may
    /// follow it once it has passed.
    fn admit(
        &mut self,
        now: Instant,
        packet: &[u8],
        passing: &Passing,
        ends: Ends,
    ) -> Result<Option<FirstFragment>, DropReason> {
        let (ip, direction) = (&passing.ip, ends.direction);
        if length::ends_too_late(packet, ip) {
            return Err(DropReason::FragmentTooLong);
        }
        let device = &mut self.devices[ends.device.0 as usize];
        let is_tcp = ip.protocol == PROTO_TCP && !ip.fragment;
        let ruled = !(device.config.allow_from.is_empty() && device.config.allow_to.is_empty());
        if !ruled && !is_tcp {
            return Ok(None);
        }
        let query = query(&self.fragments, now, packet, ip, ends);
        let flow = match self.flows.get(&query.key, now) {
            Some(flow) => flow,
            None => {
                let denied = match direction {
                    Direction::Out => DropReason::DeniedTo,
                    Direction::In => DropReason::DeniedFrom,
                };
                if !query.opens && ruled {
                    return Err(denied);
                }
                let rule = open(device, &query, direction).ok_or(denied)?;
                if let Some(rule) = rule {
                    device.rule_hits[rule] += 1;
                }
                self.flows.get_or_insert(&query.key, now)
            }
        };
        if is_tcp {
            let seen = observe(device, flow, now, packet, passing, direction);
            if direction == Direction::In {
                let merged = passing.gso_size > 0;
                let (lost, lost_merged) = (seen.lost_behind, seen.lost_merged);
                self.merging
                    .sent(now, passing.packets, merged, lost, lost_merged);
            }
        }
        Ok(query.first)
    }
}

/// Returns the rule that admits a new flow, or `Some(None)` if there are no rules for its
/// direction.
fn open(device: &Device, query: &Query, direction: Direction) -> Option<Option<usize>> {
    let config = &device.config;
    let (rules, port, first) = match direction {
        Direction::In => (&config.allow_from, query.key.device_port, 0),
        Direction::Out => (
            &config.allow_to,
            query.key.remote_port,
            config.allow_from.len(),
        ),
    };
    if rules.is_empty() {
        return Some(None);
    }
    let subject = Subject {
        remote: query.key.remote,
        protocol: query.key.protocol,
        port: query.has_ports.then_some(port),
    };
    let rule = rules.iter().position(|rule| rule.allows(&subject))?;
    Some(Some(first + rule))
}

/// Updates the statistics of both sides from a TCP segment.
fn observe(
    device: &mut Device,
    flow: &mut Flow,
    now: Instant,
    packet: &[u8],
    passing: &Passing,
    direction: Direction,
) -> Seen {
    let Some(header) = packet.get(passing.ip.header_len..) else {
        return Seen::default();
    };
    let Some(length) = tcp::header_len(header) else {
        return Seen::default();
    };
    let payload = passing
        .ip
        .total_len
        .saturating_sub(passing.ip.header_len + length);
    let size = if passing.gso_size > 0 {
        passing.gso_size
    } else {
        payload
    };
    let segment = Segment::read(header, payload, size);
    let seen = flow.observe(direction, &segment, now);
    let (before, behind) = match direction {
        Direction::Out => (&mut device.lan_side, &mut device.tunnel_side),
        Direction::In => (&mut device.tunnel_side, &mut device.lan_side),
    };
    if payload > 0 {
        before.segments += passing.packets;
        behind.segments += passing.packets;
    }
    before.lost += seen.lost_before;
    behind.lost += seen.lost_behind;
    if let Some(rtt) = seen.rtt {
        before.measured(rtt);
    }
    seen
}

/// Lowers the hop limit (RFC 791, RFC 8200). Returns an error if it is used up.
fn lower_hop_limit(packet: &mut [u8]) -> Result<(), DropReason> {
    let at = if packet[0] >> 4 == 4 { 8 } else { 7 };
    if packet[at] <= 1 {
        return Err(DropReason::HopLimit);
    }
    let old = u16::from_be_bytes([packet[8], packet[9]]);
    packet[at] -= 1;
    if at == 8 {
        let new = u16::from_be_bytes([packet[8], packet[9]]);
        let sum = u16::from_be_bytes([packet[10], packet[11]]);
        packet[10..12].copy_from_slice(&checksum::update(sum, old, new).to_be_bytes());
    }
    Ok(())
}

/// Multicast, or a recognisable IPv4 broadcast.
fn is_group(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => a.is_multicast() || a.is_broadcast(),
        IpAddr::V6(a) => a.is_multicast(),
    }
}
