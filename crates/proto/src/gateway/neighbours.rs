//! The neighbour table of a local network, from captured frames: MAC address, VLAN and addresses of
//! each host.
//!
//! A frame identifies its MAC address for certain, but an address only sometimes: behind a router's
//! MAC address is the whole Internet. An address belongs to a MAC address if its owner says so
//! (ARP, RFC 826; neighbour discovery, RFC 4861). It also does if it is the source of a packet and
//! local: in a prefix of the interface, or link-local.
//!
//! Memory is bounded. Frames that do not fit the table are counted.

use crate::time::Instant;
use ipnet::IpNet;
use seikan_wire::arp::Arp;
use seikan_wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ethernet, Mac};
use seikan_wire::ip::{IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::neighbour::Neighbour;
use seikan_wire::{VnetHdr, tcp};
use std::collections::HashMap;
use std::net::IpAddr;

/// Maximum number of entries.
pub const MAX_NEIGHBOURS: usize = 4096;
/// Maximum number of addresses of an entry. A host with IPv6 privacy addresses has about ten.
pub const MAX_ADDRESSES: usize = 16;

/// A host on the local network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeighbourEntry {
    /// Its MAC address.
    pub mac: Mac,
    /// Its VLAN; `None` is untagged.
    pub vlan: Option<u16>,
    /// Its addresses, in the order of discovery.
    pub addresses: Vec<IpAddr>,
    /// The neighbour has more addresses than are kept: it is a router that answers for others, or
    /// an impostor.
    pub has_more: bool,
    /// When its first frame arrived.
    pub first: Instant,
    /// When its last frame arrived.
    pub last: Instant,
    /// Number of frames that it sent, before merging.
    pub frames: u64,
    /// Bytes of these frames, including Ethernet headers.
    pub bytes: u64,
}

/// A captured frame.
#[derive(Clone, Copy, Debug)]
pub struct CapturedFrame<'a> {
    /// The frame from the Ethernet header on; it may be cut after the headers.
    pub frame: &'a [u8],
    /// The kernel's description of it.
    pub vnet: VnetHdr,
    /// The tag that the kernel removed (IEEE 802.1Q tag control information).
    pub tci: Option<u16>,
    /// Length of the whole frame in bytes.
    pub length: usize,
}

/// The neighbour table.
#[derive(Clone, Debug, Default)]
pub struct NeighbourTable {
    /// Prefixes of the interface.
    local: Vec<IpNet>,
    entries: HashMap<(Option<u16>, Mac), NeighbourEntry>,
    overflowed: u64,
    not_understood: u64,
}

impl NeighbourTable {
    /// Creates an empty table. `local` are the prefixes of the interface.
    pub fn new(local: Vec<IpNet>) -> NeighbourTable {
        NeighbourTable {
            local,
            ..NeighbourTable::default()
        }
    }

    /// Adds a frame.
    pub fn observe(&mut self, now: Instant, captured: &CapturedFrame<'_>) {
        let header = match Ethernet::parse(captured.frame) {
            Ok(header) if !header.src.is_multicast() && header.src != Mac::default() => header,
            _ => {
                self.not_understood += 1;
                return;
            }
        };
        let tag = captured.tci.map(|tci| tci & 0x0fff).filter(|id| *id != 0);
        let vlan = tag.or(header.vlan_id());
        let payload = &captured.frame[header.header_len..];
        let address = self.address(&header, payload);
        let key = (vlan, header.src);
        if !self.entries.contains_key(&key) && self.entries.len() >= MAX_NEIGHBOURS {
            self.overflowed += 1;
            return;
        }
        let (frames, bytes) = captured.counts(&header);
        let entry = self.entries.entry(key).or_insert(NeighbourEntry {
            mac: header.src,
            vlan,
            addresses: Vec::new(),
            has_more: false,
            first: now,
            last: now,
            frames: 0,
            bytes: 0,
        });
        entry.last = now;
        entry.frames += frames;
        entry.bytes += bytes;
        if let Some(address) = address
            && !entry.addresses.contains(&address)
        {
            if entry.addresses.len() < MAX_ADDRESSES {
                entry.addresses.push(address)
            } else {
                entry.has_more = true
            }
        }
    }

    /// All entries, ordered by VLAN, address and MAC address.
    pub fn entries(&self) -> Vec<&NeighbourEntry> {
        let mut entries: Vec<_> = self.entries.values().collect();
        entries.sort_by_key(|entry| {
            let first = entry.primary_address();
            (entry.vlan, first.is_none(), first, entry.mac)
        });
        entries
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Number of frames that did not fit the table.
    pub fn overflowed(&self) -> u64 {
        self.overflowed
    }

    /// Number of frames without a valid sender.
    pub fn not_understood(&self) -> u64 {
        self.not_understood
    }

    /// Returns the MAC address of another host in the same VLAN with this address.
    pub fn shares(&self, entry: &NeighbourEntry, address: IpAddr) -> Option<Mac> {
        let others = self.entries.values().filter(|other| {
            other.vlan == entry.vlan && other.mac != entry.mac && other.addresses.contains(&address)
        });
        others.map(|other| other.mac).min()
    }

    /// The sender's address in a frame, if it has one.
    fn address(&self, header: &Ethernet, payload: &[u8]) -> Option<IpAddr> {
        let address = match header.ethertype {
            ETHERTYPE_ARP => {
                let arp = Arp::parse(payload).ok()?;
                (arp.sender_mac == header.src).then_some(IpAddr::V4(arp.sender))?
            }
            ETHERTYPE_IPV4 | ETHERTYPE_IPV6 => match Neighbour::parse(payload) {
                Ok(Neighbour::Solicitation(solicitation)) => solicitation.source.into(),
                Ok(Neighbour::Advertisement(advertisement)) => {
                    let mac = advertisement.link_layer.unwrap_or(header.src);
                    (mac == header.src).then_some(IpAddr::V6(advertisement.target))?
                }
                Err(_) => {
                    let source = IpPacket::parse_headers(payload).ok()?.src;
                    self.is_local(source).then_some(source)?
                }
            },
            _ => return None,
        };
        is_unicast(address).then_some(address)
    }

    fn is_local(&self, address: IpAddr) -> bool {
        let link_local = match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        link_local || self.local.iter().any(|net| net.contains(&address))
    }
}

impl NeighbourEntry {
    /// The usual address of the host: IPv4 first, link-local last.
    pub fn primary_address(&self) -> Option<IpAddr> {
        self.addresses.iter().copied().min_by_key(|address| {
            let link_local = match address {
                IpAddr::V4(address) => address.is_link_local(),
                IpAddr::V6(address) => address.is_unicast_link_local(),
            };
            (link_local, address.is_ipv6())
        })
    }

    /// Addresses for a configuration: at most one of each family, none link-local.
    pub fn lan(&self) -> Vec<IpAddr> {
        let of = |v6: bool| {
            self.addresses
                .iter()
                .copied()
                .find(|address| match address {
                    IpAddr::V4(address) => !v6 && !address.is_link_local(),
                    IpAddr::V6(address) => v6 && !address.is_unicast_link_local(),
                })
        };
        [of(false), of(true)].into_iter().flatten().collect()
    }
}

impl CapturedFrame<'_> {
    /// Frames and bytes as they were on the wire, before GRO merged them.
    fn counts(&self, ethernet: &Ethernet) -> (u64, u64) {
        let size = usize::from(self.vnet.gso_size);
        match self.headers(ethernet) {
            Some(headers) if size > 0 && headers < self.length => {
                let frames = (self.length - headers).div_ceil(size);
                let bytes = self.length + (frames - 1) * headers;
                (frames as u64, bytes as u64)
            }
            _ => (1, self.length as u64),
        }
    }

    /// Length of all headers in bytes. The header length in the virtio-net header is only a hint.
    fn headers(&self, ethernet: &Ethernet) -> Option<usize> {
        let packet = &self.frame[ethernet.header_len..];
        let ip = IpPacket::parse_headers(packet).ok()?;
        let transport = match ip.protocol {
            PROTO_TCP => tcp::header_len(packet.get(ip.header_len..)?)?,
            PROTO_UDP => 8,
            _ => return None,
        };
        Some(ethernet.header_len + ip.header_len + transport)
    }
}

/// Whether the address is not unspecified, loopback, multicast or broadcast.
fn is_unicast(address: IpAddr) -> bool {
    let broadcast = IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
    !(address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address == broadcast)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_wire::ethernet::Vlan;
    use seikan_wire::neighbour::{Advertisement, Solicitation};
    use std::time::Duration;

    const A: Mac = Mac([2, 0, 0, 0, 0, 0xa]);
    const B: Mac = Mac([2, 0, 0, 0, 0, 0xb]);

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(1 << 40) + Duration::from_secs(seconds)
    }

    fn local() -> NeighbourTable {
        NeighbourTable::new(vec!["192.168.1.1/24".parse().unwrap()])
    }

    fn frame(src: Mac, vlan: Option<u16>, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let vlan = vlan.map(|tci| Vlan { tci });
        let header = Ethernet::new(Mac::BROADCAST, src, vlan, ethertype);
        let mut frame = vec![0; header.header_len];
        header.write(&mut frame);
        frame.extend(payload);
        frame
    }

    fn captured(frame: &[u8]) -> CapturedFrame<'_> {
        CapturedFrame {
            frame,
            vnet: VnetHdr::default(),
            tci: None,
            length: frame.len(),
        }
    }

    /// An IPv4 packet of protocol 17, by the layout of RFC 791.
    fn packet(source: [u8; 4]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(source);
        packet.extend([10, 0, 0, 1]);
        packet.extend([0, 53, 0, 53, 0, 8, 0, 0]);
        packet
    }

    fn addresses(table: &NeighbourTable) -> Vec<String> {
        let entries = table.entries();
        let all = entries.iter().flat_map(|entry| &entry.addresses);
        all.map(ToString::to_string).collect()
    }

    #[test]
    fn remote_addresses_do_not_belong_to_the_routers_mac_address() {
        let mut table = local();
        for source in [[192, 168, 1, 10], [8, 8, 8, 8], [192, 168, 2, 10]] {
            let frame = frame(A, None, ETHERTYPE_IPV4, &packet(source));
            table.observe(at(0), &captured(&frame));
        }
        assert_eq!(addresses(&table), ["192.168.1.10"]);
        assert_eq!(table.entries()[0].frames, 3);
    }

    #[test]
    fn without_an_own_address_only_arp_reveals_addresses() {
        let mut table = NeighbourTable::default();
        let advertisement = frame(A, None, ETHERTYPE_IPV4, &packet([192, 168, 1, 10]));
        table.observe(at(0), &captured(&advertisement));
        assert_eq!(addresses(&table), [""; 0]);
        let arp = Arp::request(A, [192, 168, 1, 10].into(), [192, 168, 1, 1].into());
        let advertisement = frame(A, None, ETHERTYPE_ARP, &arp.to_bytes());
        table.observe(at(1), &captured(&advertisement));
        assert_eq!(addresses(&table), ["192.168.1.10"]);
    }

    #[test]
    fn a_probe_does_not_claim_the_address() {
        let mut table = local();
        let arp = Arp::probe(A, [192, 168, 1, 10].into());
        let probe = frame(A, None, ETHERTYPE_ARP, &arp.to_bytes());
        table.observe(at(0), &captured(&probe));
        let solicitation = Solicitation::duplicate_address_detection("fe80::a".parse().unwrap());
        let probe = frame(A, None, ETHERTYPE_IPV6, &solicitation.to_packet());
        table.observe(at(0), &captured(&probe));
        assert_eq!(addresses(&table), [""; 0]);
        assert_eq!(table.entries()[0].frames, 2);
    }

    #[test]
    fn arp_for_another_mac_address_is_ignored() {
        let mut table = local();
        let arp = Arp::request(B, [192, 168, 1, 10].into(), [192, 168, 1, 1].into());
        let advertisement = frame(A, None, ETHERTYPE_ARP, &arp.to_bytes());
        table.observe(at(0), &captured(&advertisement));
        assert_eq!(addresses(&table), [""; 0]);
    }

    #[test]
    fn neighbour_discovery_reveals_ipv6_addresses() {
        let mut table = NeighbourTable::default();
        let advertisement = Advertisement::unsolicited("fd00:1::10".parse().unwrap(), A);
        let advertisement = frame(A, None, ETHERTYPE_IPV6, &advertisement.to_packet());
        table.observe(at(0), &captured(&advertisement));
        let source = "fe80::a".parse().unwrap();
        let solicitation = Solicitation::new(source, A, "fd00:1::1".parse().unwrap());
        let solicitation = frame(A, None, ETHERTYPE_IPV6, &solicitation.to_packet());
        table.observe(at(0), &captured(&solicitation));
        assert_eq!(addresses(&table), ["fd00:1::10", "fe80::a"]);
        assert_eq!(
            table.entries()[0].lan(),
            ["fd00:1::10".parse::<IpAddr>().unwrap()]
        );
    }

    #[test]
    fn a_mac_address_in_two_vlans_is_two_neighbours() {
        let mut table = local();
        let arp = Arp::announcement(A, [192, 168, 1, 10].into()).to_bytes();
        let tagged = frame(A, Some(0xb02a), ETHERTYPE_ARP, &arp);
        table.observe(at(0), &captured(&tagged));
        let plain = frame(A, None, ETHERTYPE_ARP, &arp);
        table.observe(at(0), &captured(&plain));
        // The kernel has removed this tag; a priority tag is no VLAN.
        let taken = CapturedFrame {
            tci: Some(0xb02a),
            ..captured(&plain)
        };
        table.observe(at(0), &taken);
        table.observe(
            at(0),
            &CapturedFrame {
                tci: Some(0xe000),
                ..taken
            },
        );
        let seen: Vec<_> = table.entries().iter().map(|c| (c.vlan, c.frames)).collect();
        assert_eq!(seen, [(None, 2), (Some(42), 2)]);
    }

    #[test]
    fn an_address_of_two_neighbours_is_reported() {
        let mut table = local();
        for mac in [A, B] {
            let arp = Arp::announcement(mac, [192, 168, 1, 10].into()).to_bytes();
            table.observe(at(0), &captured(&frame(mac, None, ETHERTYPE_ARP, &arp)));
        }
        let entries = table.entries();
        assert_eq!(table.shares(entries[0], entries[0].addresses[0]), Some(B));
        assert_eq!(table.shares(entries[0], [192, 168, 1, 11].into()), None);
    }

    #[test]
    fn times_are_of_the_first_and_the_last_frame() {
        let mut table = local();
        let advertisement = frame(A, None, ETHERTYPE_IPV4, &packet([192, 168, 1, 10]));
        for second in [1, 2, 5] {
            table.observe(at(second), &captured(&advertisement));
        }
        let entry = table.entries()[0].clone();
        assert_eq!((entry.first, entry.last), (at(1), at(5)));
        assert_eq!((entry.frames, entry.bytes), (3, 3 * 42));
    }

    #[test]
    fn merged_frames_count_as_on_the_wire() {
        let mut table = local();
        // TCP: 20 bytes of header by its data offset, as much of it as is left in the packet.
        let mut advertisement = packet([192, 168, 1, 10]);
        advertisement[9] = 6;
        advertisement.resize(40, 0);
        advertisement[32] = 0x50;
        let advertisement = frame(A, None, ETHERTYPE_IPV4, &advertisement);
        // Headers of 14 + 20 + 20 bytes in front of 3,000 bytes of payload, cut by 1,400.
        let vnet = VnetHdr {
            gso_size: 1400,
            hdr_len: 1000,
            ..VnetHdr::default()
        };
        let joined = CapturedFrame {
            vnet,
            length: 3054,
            ..captured(&advertisement)
        };
        table.observe(at(0), &joined);
        let entry = table.entries()[0];
        assert_eq!((entry.frames, entry.bytes), (3, 3000 + 3 * 54));
    }

    #[test]
    fn frames_without_a_valid_sender_are_counted() {
        let mut table = local();
        table.observe(at(0), &captured(&[0; 13]));
        table.observe(
            at(0),
            &captured(&frame(Mac::BROADCAST, None, ETHERTYPE_ARP, &[])),
        );
        table.observe(
            at(0),
            &captured(&frame(Mac::default(), None, ETHERTYPE_ARP, &[])),
        );
        assert_eq!((table.not_understood(), table.entries().len()), (3, 0));
    }

    #[test]
    fn neighbours_and_addresses_are_bounded() {
        let mut table = local();
        for n in 0..MAX_NEIGHBOURS as u32 + 10 {
            let [_, _, c, d] = n.to_be_bytes();
            let mac = Mac([2, 0, 0, 0, c, d]);
            table.observe(at(0), &captured(&frame(mac, None, 0x88cc, &[])));
        }
        assert_eq!(
            (table.entries().len(), table.overflowed()),
            (MAX_NEIGHBOURS, 10)
        );
        let mut table = local();
        for n in 1..=20 {
            let advertisement = frame(A, None, ETHERTYPE_IPV4, &packet([192, 168, 1, n]));
            table.observe(at(0), &captured(&advertisement));
        }
        let entry = table.entries()[0];
        assert_eq!(
            (entry.addresses.len(), entry.has_more),
            (MAX_ADDRESSES, true)
        );
    }
}
