//! The ARP and neighbour discovery responder of a transparent gateway: it answers for remotes,
//! finds devices and detects address conflicts. Without I/O: frames in, frames out.
//!
//! A [`Responder`] has a MAC address of its own, derived from the gateway's identity, so that the
//! host's network stack is not involved and a gateway that takes over has the same address. Packets
//! to that address are for the tunnel ([`Frame::Packet`]). ARP (RFC 826, 5227) and neighbour
//! discovery (RFC 4861) end here. All other frames stay on the local network and are counted.

use super::{DeviceId, Gateway, election};
use crate::keys::PublicKey;
use crate::time::Instant;
use blake2::{Blake2s256, Digest};
use ipnet::IpNet;
use seikan_observe::DropReason;
use seikan_wire::arp::{Arp, Operation};
use seikan_wire::ethernet::{
    ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ethernet, Mac, TAGGED_HEADER_LEN, Vlan,
};
use seikan_wire::ip::{IpPacket, PROTO_ICMPV6};
use seikan_wire::neighbour::{self, Advertisement, Neighbour, Solicitation};
use seikan_wire::{VNET_HDR_LEN, VnetHdr};
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

/// How long an address is left to another host that used it.
const CONFLICT_TTL: Duration = Duration::from_secs(60);
/// Maximum number of conflicts; the oldest is replaced.
const MAX_CONFLICTS: usize = 64;
/// Time since a device's last frame in which another MAC address with its address is a duplicate,
/// not a replacement.
const PRESENT_FOR: Duration = Duration::from_secs(10);
/// Minimum and maximum interval between queries for a device.
const FIRST_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum interval between queries for a device that packets wait for, however long nobody has
/// found it: it may just have been plugged in, and need not announce itself.
const AWAITED_INTERVAL: Duration = Duration::from_millis(250);
/// Silence after which a device is queried.
const SILENT_AFTER: Duration = Duration::from_secs(30);
/// Maximum number of queries at a time, and the interval between batches: a thousand devices do not
/// cause a storm.
const MAX_QUERIES: usize = 32;
const BATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Result of processing a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A packet for the tunnel: `[virtio-net header][packet]` from `start` on in the read.
    Packet {
        /// Its start in the read.
        start: usize,
        /// The sender of the frame.
        mac: Mac,
        /// Its VLAN.
        vlan: Option<u16>,
    },
    /// An advert of the other gateway ([`election`]): the payload from `start` on in the read.
    Advert {
        /// Its start in the read.
        start: usize,
    },
    /// Nothing more to do; the frame was counted.
    Done,
}

/// An address with two claimants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The address on the local network.
    pub address: IpAddr,
    /// The MAC address that claims it wrongly.
    pub mac: Mac,
    /// When it was last claimed.
    pub at: Instant,
}

/// The responder of a gateway.
#[derive(Debug)]
pub struct Responder {
    mac: Mac,
    link_local: Ipv6Addr,
    answer_for: Vec<IpNet>,
    /// Whether it answers for the remotes. A standby responder only listens.
    active: bool,
    conflicts: Vec<Conflict>,
    queries: HashMap<DeviceId, AddressQuery>,
    /// When the devices are scanned next.
    due: Instant,
    /// Position of the scan.
    cursor: u32,
    /// Begin of the present interval of queries for devices that packets wait for, and their number
    /// in it.
    awaited_since: Instant,
    awaited: usize,
    out: Vec<Vec<u8>>,
}

/// Queries for one device.
#[derive(Clone, Copy, Debug)]
struct AddressQuery {
    sent: Instant,
    next: Instant,
    interval: Duration,
    unanswered: u32,
    /// Since when another MAC address has claimed the device's address, while the device has not
    /// answered yet.
    contested_since: Option<Instant>,
}

impl AddressQuery {
    fn new(now: Instant) -> AddressQuery {
        AddressQuery {
            sent: now,
            next: now,
            interval: FIRST_INTERVAL,
            unanswered: 0,
            contested_since: None,
        }
    }
}

impl AddressQuery {
    /// Notes a query of the scan, whose intervals grow.
    fn on_scan(&mut self, now: Instant) {
        self.sent = now;
        self.next = now + self.interval;
        self.unanswered += 1;
        if self.contested_since.is_none() {
            self.interval = (self.interval * 2).min(MAX_INTERVAL);
        }
    }
}

impl Responder {
    /// Creates a responder with this MAC address. It answers for the remotes that the gateway
    /// shows, and for whole prefixes.
    pub fn new(mac: Mac, answer_for: Vec<IpNet>) -> Responder {
        let [a, b, c, d, e, f] = mac.0;
        // RFC 4291 appendix A: EUI-64 from a MAC address, the universal/local bit turned round.
        let link_local = Ipv6Addr::from([
            0xfe,
            0x80,
            0,
            0,
            0,
            0,
            0,
            0,
            a ^ 2,
            b,
            c,
            0xff,
            0xfe,
            d,
            e,
            f,
        ]);
        Responder {
            mac,
            link_local,
            answer_for,
            active: true,
            conflicts: Vec::new(),
            queries: HashMap::new(),
            due: Instant::BOOT,
            cursor: 0,
            awaited_since: Instant::BOOT,
            awaited: 0,
            out: Vec::new(),
        }
    }

    /// The MAC address for a gateway with this identity: locally administered, and the same for a
    /// standby gateway with the same identity.
    pub fn address_of(key: &PublicKey) -> Mac {
        let mut hash = Blake2s256::new();
        hash.update(b"seikan gateway station");
        hash.update(key.as_bytes());
        let hash = hash.finalize();
        // Bit 1 of the first byte: not assigned by the IEEE; bit 0: no group (IEEE 802, section 8).
        Mac([0x02, hash[0], hash[1], hash[2], hash[3], hash[4]])
    }

    /// Its MAC address.
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Makes it active or standby; see [`Self::announce`].
    pub fn set_active(&mut self, active: bool) {
        self.active = active;
    }

    /// Whether it is active.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Address conflicts of the last minute.
    pub fn conflicts(&self, now: Instant) -> impl Iterator<Item = &Conflict> {
        self.conflicts
            .iter()
            .filter(move |c| !c.at.has_expired(CONFLICT_TTL, now))
    }

    /// Takes the frames to send, each after an empty virtio-net header.
    pub fn take_frames(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.out)
    }

    /// Processes `read`, `[virtio-net header][frame]`. `tci` is the tag that the kernel has
    /// removed.
    pub fn frame(
        &mut self,
        now: Instant,
        gateway: &mut Gateway,
        read: &mut [u8],
        tci: Option<u16>,
    ) -> Frame {
        let Some(Ok(header)) = read.get(VNET_HDR_LEN..).map(Ethernet::parse) else {
            gateway.drop_unattributed(DropReason::BadFrameType, 1);
            return Frame::Done;
        };
        let tag = tci.filter(|tci| tci & 0x0fff != 0).map(|tci| tci & 0x0fff);
        let vlan = tag.or(header.vlan_id());
        let start = header.header_len;
        let payload = &read[VNET_HDR_LEN + start..];
        if header.src.is_multicast() || header.src == self.mac {
            // An invalid source, or this responder's own address at a second gateway that has taken
            // over.
            gateway.drop_unattributed(DropReason::BadFrameType, 1);
            return Frame::Done;
        }
        match header.ethertype {
            election::ETHERTYPE_ADVERT if header.dst == election::GROUP => {
                gateway.consume_unattributed();
                return Frame::Advert {
                    start: VNET_HDR_LEN + start,
                };
            }
            ETHERTYPE_ARP => self.arp(now, gateway, &header, vlan, payload),
            ETHERTYPE_IPV6 if is_neighbour(payload) => {
                self.neighbour(now, gateway, &header, vlan, payload)
            }
            ETHERTYPE_IPV4 | ETHERTYPE_IPV6 if header.dst == self.mac && !self.active => {
                gateway.drop_unattributed(DropReason::Standby, 1)
            }
            ETHERTYPE_IPV4 | ETHERTYPE_IPV6 if header.dst == self.mac => {
                shift(read, start);
                return Frame::Packet {
                    start,
                    mac: header.src,
                    vlan,
                };
            }
            ETHERTYPE_IPV4 | ETHERTYPE_IPV6 if header.dst.is_multicast() => {
                gateway.drop_group(vlan, header.src, payload)
            }
            _ => gateway.drop_unattributed(DropReason::BadFrameType, 1),
        }
        Frame::Done
    }

    fn arp(
        &mut self,
        now: Instant,
        gateway: &mut Gateway,
        header: &Ethernet,
        vlan: Option<u16>,
        payload: &[u8],
    ) {
        let arp = match Arp::parse(payload) {
            Ok(arp) if arp.sender_mac == header.src => arp,
            _ => return gateway.drop_unattributed(DropReason::BadFrameType, 1),
        };
        if !arp.is_probe() {
            self.on_claim(now, gateway, vlan, arp.sender_mac, arp.sender.into());
        }
        let target = IpAddr::V4(arp.target);
        let solicitation = arp.operation == Operation::Request && !arp.is_announcement();
        if solicitation && self.answers(now, gateway, vlan, target) {
            // Any host that probes for one of these addresses is answered, device or not (RFC
            // 5227).
            let known = gateway.is_known(vlan, arp.sender_mac, arp.sender.into());
            if !known && !arp.is_probe() {
                return gateway.drop_unattributed(DropReason::UnlistedDevice, 1);
            }
            let reply = arp.reply(self.mac).to_bytes();
            self.push(arp.sender_mac, vlan, ETHERTYPE_ARP, &reply);
        }
        gateway.consume_unattributed();
    }

    fn neighbour(
        &mut self,
        now: Instant,
        gateway: &mut Gateway,
        header: &Ethernet,
        vlan: Option<u16>,
        payload: &[u8],
    ) {
        match Neighbour::parse(payload) {
            Ok(Neighbour::Solicitation(solicitation)) => {
                if !solicitation.is_duplicate_address_detection() {
                    self.on_claim(now, gateway, vlan, header.src, solicitation.source.into());
                }
                if self.answers(now, gateway, vlan, solicitation.target.into()) {
                    let known = gateway.is_known(vlan, header.src, solicitation.source.into());
                    if !known && !solicitation.is_duplicate_address_detection() {
                        return gateway.drop_unattributed(DropReason::UnlistedDevice, 1);
                    }
                    let answer = solicitation.answer(self.mac);
                    let to = if answer.destination.is_multicast() {
                        neighbour::multicast_mac(answer.destination)
                    } else {
                        header.src
                    };
                    self.push(to, vlan, ETHERTYPE_IPV6, &answer.to_packet());
                }
            }
            Ok(Neighbour::Advertisement(advertisement)) => {
                let mac = advertisement.link_layer.unwrap_or(header.src);
                if mac != header.src {
                    // An advertisement for another MAC address could divert a device's packets.
                    return gateway.drop_unattributed(DropReason::BadFrameType, 1);
                }
                self.on_claim(now, gateway, vlan, mac, advertisement.target.into());
            }
            Err(_) => return gateway.drop_unattributed(DropReason::BadFrameType, 1),
        }
        gateway.consume_unattributed();
    }

    /// Handles a claim that `address` is at `mac`.
    fn on_claim(
        &mut self,
        now: Instant,
        gateway: &mut Gateway,
        vlan: Option<u16>,
        mac: Mac,
        address: IpAddr,
    ) {
        if mac == self.mac || mac.is_multicast() {
            return;
        }
        if gateway.is_shown(address) {
            return self.record_conflict(now, address, mac);
        }
        match gateway.on_address_claim(now, vlan, mac, address, PRESENT_FOR) {
            Ok(Some(id)) => {
                self.queries.remove(&id);
                self.conflicts
                    .retain(|c| (c.address, c.mac) != (address, mac));
            }
            Ok(None) => {}
            Err(()) => {
                self.verify_owner(now, gateway, vlan, address);
                self.record_conflict(now, address, mac);
            }
        }
    }

    /// Another MAC address claims a device's address: a duplicate if the device still answers,
    /// otherwise its new MAC address.
    fn verify_owner(
        &mut self,
        now: Instant,
        gateway: &Gateway,
        vlan: Option<u16>,
        address: IpAddr,
    ) {
        let Some(id) = gateway.device_by_lan(vlan, address) else {
            return;
        };
        if gateway.device(id).is_none_or(|d| d.config.mac.is_some()) {
            return;
        }
        let query = self.queries.entry(id).or_insert(AddressQuery::new(now));
        if query.contested_since.is_none() {
            *query = AddressQuery {
                contested_since: Some(now),
                ..AddressQuery::new(now)
            };
            (self.due, self.cursor) = (now, 0);
        }
    }

    fn record_conflict(&mut self, now: Instant, address: IpAddr, mac: Mac) {
        let record_conflict = Conflict {
            address,
            mac,
            at: now,
        };
        let known = self.conflicts.iter_mut().find(|c| c.address == address);
        if let Some(known) = known {
            *known = record_conflict;
        } else if self.conflicts.len() < MAX_CONFLICTS {
            self.conflicts.push(record_conflict);
        } else if let Some(oldest) = self.conflicts.iter_mut().min_by_key(|c| c.at) {
            *oldest = record_conflict;
        }
    }

    /// Whether to answer for an address. Never for one that belongs to a local host.
    fn answers(&self, now: Instant, gateway: &Gateway, vlan: Option<u16>, target: IpAddr) -> bool {
        let ours = target == IpAddr::V6(self.link_local)
            || gateway.is_shown(target)
            || self.answer_for.iter().any(|net| net.contains(&target));
        ours && self.active
            && gateway.device_by_lan(vlan, target).is_none()
            // The host's own stack answers for these.
            && !gateway.own.contains(&target)
            && self.conflicts(now).all(|c| c.address != target)
    }

    /// Queries for a device that a packet waits for, unless it was just queried. Packets for absent
    /// devices cause no more queries at a time than [`Self::poll`].
    pub fn resolve(&mut self, now: Instant, gateway: &Gateway, id: DeviceId) {
        let query = self.queries.get(&id);
        if query.is_some_and(|q| !q.sent.has_expired(AWAITED_INTERVAL, now)) {
            return;
        }
        if self.awaited_since.has_expired(BATCH_INTERVAL, now) {
            (self.awaited_since, self.awaited) = (now, 0);
        }
        if self.awaited < MAX_QUERIES {
            self.awaited += 1;
            self.send_query(gateway, id);
            let query = self.queries.entry(id).or_insert(AddressQuery::new(now));
            query.sent = now;
        }
    }

    /// When [`Self::poll`] has work to do.
    pub fn next_wakeup(&self) -> Instant {
        self.due
    }

    /// Queries for devices that have not been found or are silent.
    pub fn poll(&mut self, now: Instant, gateway: &mut Gateway) {
        if now < self.due {
            return;
        }
        if !self.active {
            self.due = now + FIRST_INTERVAL;
            return;
        }
        let mut solicitation = 0;
        while let Some(device) = gateway.device(DeviceId(self.cursor)) {
            let (id, vlan) = (DeviceId(self.cursor), device.config.vlan);
            let silent = device
                .last_seen
                .is_none_or(|seen| seen.has_expired(SILENT_AFTER, now));
            let mut query = self.queries.get(&id).copied();
            let contested_since = query.and_then(|q| q.contested_since);
            if contested_since.is_some_and(|since| device.last_seen > Some(since)) {
                // The device answered, so the other claim is a duplicate.
                self.queries.remove(&id);
                query = None;
            }
            let contested = query.is_some_and(|q| q.contested_since.is_some());
            if (silent || contested) && query.is_none_or(|q| q.next <= now) {
                if solicitation >= MAX_QUERIES {
                    self.due = now + BATCH_INTERVAL;
                    return;
                }
                // A MAC address that does not answer may have been replaced.
                if query.is_some_and(|q| q.unanswered >= 3) {
                    gateway.forget_mac(id);
                }
                self.send_query(gateway, id);
                self.queries
                    .entry(id)
                    .or_insert(AddressQuery::new(now))
                    .on_scan(now);
                solicitation += 1;
            }
            if let Some(address) = gateway.poll_successor(id, now) {
                self.solicit(address, vlan);
                solicitation += 1;
            }
            self.cursor += 1;
        }
        self.cursor = 0;
        self.due = now + FIRST_INTERVAL;
    }

    /// Restarts the search for all devices after a link failure or when this gateway becomes
    /// active. Announces the remotes on the local network.
    pub fn announce(&mut self, now: Instant, gateway: &Gateway) {
        self.queries.clear();
        (self.due, self.cursor) = (now, 0);
        let mut vlans: Vec<Option<u16>> = gateway.devices().map(|(_, d)| d.config.vlan).collect();
        vlans.sort_unstable();
        vlans.dedup();
        let mut shown: Vec<IpAddr> = gateway.shown().collect();
        shown.sort_unstable();
        for vlan in vlans {
            for address in &shown {
                match address {
                    IpAddr::V4(address) => {
                        let advertisement = Arp::announcement(self.mac, *address).to_bytes();
                        self.push(Mac::BROADCAST, vlan, ETHERTYPE_ARP, &advertisement);
                    }
                    IpAddr::V6(address) => {
                        let advertisement = Advertisement::unsolicited(*address, self.mac);
                        let to = neighbour::multicast_mac(advertisement.destination);
                        self.push(to, vlan, ETHERTYPE_IPV6, &advertisement.to_packet());
                    }
                }
            }
            // Switches learn this port from any frame.
            let advertisement = Advertisement::unsolicited(self.link_local, self.mac);
            let to = neighbour::multicast_mac(advertisement.destination);
            self.push(to, vlan, ETHERTYPE_IPV6, &advertisement.to_packet());
        }
    }

    fn send_query(&mut self, gateway: &Gateway, id: DeviceId) {
        let Some(device) = gateway.device(id) else {
            return;
        };
        let vlan = device.config.vlan;
        let known = device.mac;
        let sender = |v6: bool| gateway.shown().filter(|a| a.is_ipv6() == v6).min();
        for address in device.lan.into_iter().flatten() {
            match address {
                IpAddr::V4(address) => {
                    let arp = match sender(false) {
                        Some(IpAddr::V4(sender)) => Arp::request(self.mac, sender, address),
                        _ => Arp::probe(self.mac, address),
                    };
                    let to = known.unwrap_or(Mac::BROADCAST);
                    self.push(to, vlan, ETHERTYPE_ARP, &arp.to_bytes());
                }
                IpAddr::V6(address) => self.solicit(address, vlan),
            }
        }
    }

    fn solicit(&mut self, address: Ipv6Addr, vlan: Option<u16>) {
        let solicitation = Solicitation::new(self.link_local, self.mac, address);
        let to = neighbour::multicast_mac(solicitation.destination);
        self.push(to, vlan, ETHERTYPE_IPV6, &solicitation.to_packet());
    }

    fn push(&mut self, to: Mac, vlan: Option<u16>, ethertype: u16, payload: &[u8]) {
        let header = Ethernet::new(to, self.mac, vlan.map(|tci| Vlan { tci }), ethertype);
        let mut head = [0; VNET_HDR_LEN + TAGGED_HEADER_LEN];
        let length = VNET_HDR_LEN + header.write(&mut head[VNET_HDR_LEN..]);
        let mut frame = Vec::with_capacity(length + payload.len());
        frame.extend(&head[..length]);
        frame.extend(payload);
        self.out.push(frame);
    }

    /// The header of a frame to a device, with its length; `None` while its MAC address is unknown.
    pub fn header_to(
        &self,
        gateway: &Gateway,
        id: DeviceId,
        v6: bool,
    ) -> Option<([u8; TAGGED_HEADER_LEN], usize)> {
        let device = gateway.device(id)?;
        let vlan = device.config.vlan.map(|tci| Vlan { tci });
        let ethertype = if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 };
        let mut out = [0; TAGGED_HEADER_LEN];
        let length = Ethernet::new(device.mac?, self.mac, vlan, ethertype).write(&mut out);
        Some((out, length))
    }
}

/// Moves the virtio-net header over the Ethernet header, so that the packet follows it.
fn shift(read: &mut [u8], start: usize) {
    let mut vnet = [0; VNET_HDR_LEN];
    vnet.copy_from_slice(&read[..VNET_HDR_LEN]);
    if let Ok(mut parsed) = VnetHdr::read(&vnet)
        && parsed.needs_csum
    {
        // The offset was relative to the frame and is now relative to the packet.
        parsed.csum_start = parsed.csum_start.wrapping_sub(start as u16);
        vnet = parsed.to_bytes();
    }
    read[start..start + VNET_HDR_LEN].copy_from_slice(&vnet);
}

/// Whether an IPv6 packet is neighbour discovery, valid or not.
fn is_neighbour(payload: &[u8]) -> bool {
    IpPacket::parse(payload).is_ok_and(|ip| {
        ip.protocol == PROTO_ICMPV6
            && !ip.fragment
            && matches!(
                payload.get(ip.header_len),
                Some(&(neighbour::SOLICITATION | neighbour::ADVERTISEMENT))
            )
    })
}
