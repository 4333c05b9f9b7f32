use super::responder::{Frame, Responder};
use super::*;
use crate::time::Instant;
use seikan_observe::DropReason;
use seikan_wire::arp::Arp;
use seikan_wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ethernet};
use seikan_wire::ip::IpPacket;
use seikan_wire::neighbour::{Advertisement, Neighbour};
use seikan_wire::{VNET_HDR_LEN, VnetHdr, checksum};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

const DEVICE_MAC: Mac = Mac([2, 0, 0, 0, 0, 0x10]);
const OTHER: Mac = Mac([2, 0, 0, 0, 0, 0x99]);
const RESPONDER: Mac = Mac([2, 0, 0x5e, 1, 2, 3]);
const LAN: &str = "192.168.1.10";
const SHOWN: &str = "192.168.1.202";
const OVERLAY: &str = "10.77.0.10";
const REMOTE: &str = "10.77.0.2";

fn at(ms: u64) -> Instant {
    Instant::from_nanos(1 << 40) + Duration::from_millis(ms)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn config() -> GatewayConfig {
    GatewayConfig {
        devices: vec![DeviceConfig {
            name: "plc".into(),
            lan: vec![ip(LAN)],
            overlay: vec![ip(OVERLAY)],
            ..DeviceConfig::default()
        }],
        remotes: vec![Remote {
            overlay: ip(REMOTE),
            lan: ip(SHOWN),
        }],
        allocates: false,
        own: vec![ip("10.77.0.1")],
        is_hop: true,
        mtu: Mtus::default(),
    }
}

fn gateway(change: impl FnOnce(&mut GatewayConfig)) -> Gateway {
    let mut config = config();
    change(&mut config);
    Gateway::new(config)
}

fn rules(texts: &[&str]) -> Vec<Rule> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

/// A read: an IPv4 packet with this transport header and correct checksums.
fn read(src: &str, dst: &str, protocol: u8, transport: &[u8]) -> Vec<u8> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (ip(src), ip(dst)) else {
        panic!("IPv4 only");
    };
    let mut packet = vec![0x45, 0, 0, 0, 0, 7, 0x40, 0, 64, protocol, 0, 0];
    packet.extend(src.octets());
    packet.extend(dst.octets());
    packet.extend(transport);
    let total = packet.len() as u16;
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    let sum = checksum::fold(checksum::sum(&packet[..20]));
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut read = vec![0; VNET_HDR_LEN];
    read.extend(packet);
    read
}

fn udp(source: u16, destination: u16) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(source.to_be_bytes());
    header.extend(destination.to_be_bytes());
    header.extend([0, 12, 0, 0, 1, 2, 3, 4]);
    header
}

fn tcp(source: u16, destination: u16, seq: u32, ack: u32, payload: usize) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(source.to_be_bytes());
    header.extend(destination.to_be_bytes());
    header.extend(seq.to_be_bytes());
    header.extend(ack.to_be_bytes());
    header.extend([0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    header.resize(20 + payload, 0);
    header
}

const UDP: u8 = 17;
const TCP: u8 = 6;

fn from_lan(mac: Mac) -> Origin {
    Origin::Lan { mac, vlan: None }
}

fn addresses(read: &[u8]) -> (IpAddr, IpAddr) {
    let packet = &read[VNET_HDR_LEN..];
    let parsed = IpPacket::parse(packet).unwrap();
    assert_eq!(checksum::fold(checksum::sum(&packet[..20])), 0);
    (parsed.src, parsed.dst)
}

/// A packet from the remote to the device, as delivered by the tunnel.
fn inbound(gateway: &mut Gateway, ms: u64, transport: (u8, &[u8])) -> Result<Vec<u8>, DropReason> {
    let mut read = read(REMOTE, OVERLAY, transport.0, transport.1);
    let bytes = read.len() as u64;
    let vnet = VnetHdr::default();
    let found = gateway.inbound(at(ms), &mut read[VNET_HDR_LEN..], &vnet, 1, bytes)?;
    let Inbound::Device(id) = found else {
        panic!("{found:?}");
    };
    gateway.delivered(id, 1, bytes, Ok(()));
    Ok(read)
}

#[test]
fn addresses_are_translated_in_both_directions() {
    let mut gateway = gateway(|_| {});
    let mut out = read(LAN, SHOWN, UDP, &udp(5000, 53));
    gateway
        .outbound(at(0), &mut out, from_lan(DEVICE_MAC))
        .unwrap();
    assert_eq!(addresses(&out), (ip(OVERLAY), ip(REMOTE)));
    let back = inbound(&mut gateway, 1, (UDP, &udp(53, 5000))).unwrap();
    assert_eq!(addresses(&back), (ip(SHOWN), ip(LAN)));
    // One hop in each direction (RFC 791).
    assert_eq!((out[VNET_HDR_LEN + 8], back[VNET_HDR_LEN + 8]), (63, 63));
    let (_, device) = gateway.devices().next().unwrap();
    assert_eq!(device.outbound.packets_out, 1);
    assert_eq!(device.outbound.unaccounted(), 0);
    assert_eq!(device.inbound.packets_out, 1);
    assert_eq!(device.inbound.unaccounted(), 0);
}

#[test]
fn a_device_without_an_allocated_address_stays_out() {
    let mut gateway = gateway(|config| {
        config.allocates = true;
        config.devices[0].overlay.clear();
    });
    let send = |gateway: &mut Gateway| {
        let mut out = read(LAN, SHOWN, UDP, &udp(5000, 53));
        let outcome = gateway.outbound(at(0), &mut out, from_lan(DEVICE_MAC));
        outcome.map(|_| addresses(&out))
    };
    assert_eq!(send(&mut gateway), Err(DropReason::UnlistedDevice));
    let outcome = inbound(&mut gateway, 0, (UDP, &udp(53, 5000)));
    assert_eq!(outcome, Err(DropReason::UnlistedDevice));
    gateway.set_overlay(DeviceId(0), &[ip(OVERLAY)]);
    assert_eq!(send(&mut gateway), Ok((ip(OVERLAY), ip(REMOTE))));
    assert!(inbound(&mut gateway, 1, (UDP, &udp(53, 5000))).is_ok());
    // Another address replaces it.
    gateway.set_overlay(DeviceId(0), &[ip("10.77.0.11")]);
    assert_eq!(send(&mut gateway), Ok((ip("10.77.0.11"), ip(REMOTE))));
    let outcome = inbound(&mut gateway, 2, (UDP, &udp(53, 5000)));
    assert_eq!(outcome, Err(DropReason::UnlistedDevice));
    gateway.set_overlay(DeviceId(0), &[]);
    assert_eq!(send(&mut gateway), Err(DropReason::UnlistedDevice));
}

#[test]
fn a_remote_has_one_address_for_devices() {
    let mut gateway = gateway(|_| {});
    let mut send = |to| {
        let mut out = read(LAN, to, UDP, &udp(5000, 53));
        gateway
            .outbound(at(0), &mut out, from_lan(DEVICE_MAC))
            .map(|_| addresses(&out).1)
    };
    assert_eq!(send(REMOTE), Err(DropReason::ShownOtherwise));
    // Remotes without another address keep their own.
    assert_eq!(send("10.77.0.3"), Ok(ip("10.77.0.3")));
}

#[test]
fn unlisted_devices_stay_out() {
    let mut gateway = gateway(|_| {});
    let mut out = read("192.168.1.11", SHOWN, UDP, &udp(5000, 53));
    let outcome = gateway.outbound(at(0), &mut out, from_lan(OTHER));
    assert_eq!(outcome, Err(DropReason::UnlistedDevice));
    assert_eq!(
        gateway.unattributed().drops.get(DropReason::UnlistedDevice),
        1
    );
    assert_eq!(gateway.unattributed().unaccounted(), 0);
}

#[test]
fn the_host_itself_is_no_device() {
    let mut gateway = gateway(|_| {});
    let mut out = read("10.77.0.1", REMOTE, UDP, &udp(5000, 53));
    let before = out.clone();
    let outcome = gateway.outbound(at(0), &mut out, Origin::Tun);
    assert_eq!(outcome, Ok(Outbound::Whole));
    assert_eq!(out, before);
    let mut packet = read(REMOTE, "10.77.0.1", UDP, &udp(53, 5000));
    let vnet = VnetHdr::default();
    let found = gateway.inbound(at(0), &mut packet[VNET_HDR_LEN..], &vnet, 1, 32);
    assert_eq!(found, Ok(Inbound::Host));
}

/// The result for a packet from the tunnel between these addresses.
fn receiver(gateway: &mut Gateway, src: &str, dst: &str) -> Result<Inbound, DropReason> {
    let mut packet = read(src, dst, UDP, &udp(53, 5000));
    let packet = &mut packet[VNET_HDR_LEN..];
    gateway.inbound(at(0), packet, &VnetHdr::default(), 3, 96)
}

#[test]
fn a_packet_for_neither_a_device_nor_the_host_is_dropped() {
    let mut gateway = gateway(|_| {});
    let mut n = 0;
    for (dst, reason) in [
        (LAN, DropReason::UnlistedDevice),
        ("192.168.1.1", DropReason::UnlistedDevice),
        (SHOWN, DropReason::UnlistedDevice),
        ("10.77.0.255", DropReason::UnlistedDevice),
        ("127.0.0.1", DropReason::UnlistedDevice),
        ("0.0.0.0", DropReason::UnlistedDevice),
        ("255.255.255.255", DropReason::NotUnicast),
        ("224.0.0.1", DropReason::NotUnicast),
    ] {
        assert_eq!(receiver(&mut gateway, REMOTE, dst), Err(reason), "{dst}");
        n += 3;
        assert_eq!(gateway.refused().packets_in, n);
        assert_eq!(gateway.refused().drops.total(), n);
    }
    assert_eq!(
        receiver(&mut gateway, REMOTE, OVERLAY),
        Ok(Inbound::Device(DeviceId(0)))
    );
    gateway.set_own(vec![ip("10.77.0.3")]);
    assert_eq!(
        receiver(&mut gateway, REMOTE, "10.77.0.3"),
        Ok(Inbound::Host)
    );
    let former = receiver(&mut gateway, REMOTE, "10.77.0.1");
    assert_eq!(former, Err(DropReason::UnlistedDevice));
}

#[test]
fn a_remote_has_no_address_of_the_gateways_side() {
    let mut gateway = gateway(|_| {});
    for dst in [OVERLAY, "10.77.0.1"] {
        for src in [OVERLAY, "10.77.0.1"] {
            let found = receiver(&mut gateway, src, dst);
            assert_eq!(found, Err(DropReason::DeviceMismatch), "{src} to {dst}");
        }
        for src in ["224.0.0.1", "255.255.255.255", "0.0.0.0", "127.0.0.1"] {
            let found = receiver(&mut gateway, src, dst);
            assert_eq!(found, Err(DropReason::NotUnicast), "{src} to {dst}");
        }
    }
    for src in [LAN, SHOWN] {
        let found = receiver(&mut gateway, src, OVERLAY);
        assert_eq!(found, Err(DropReason::DeviceMismatch), "{src}");
    }
}

#[test]
fn the_host_accepts_no_packet_with_a_source_route() {
    let mut gateway = gateway(|_| {});
    let mut packet = read(REMOTE, "10.77.0.1", UDP, &udp(53, 5000));
    let option = [[131, 7, 4, 192], [168, 1, 20, 0]].concat();
    packet.splice(VNET_HDR_LEN + 20..VNET_HDR_LEN + 20, option);
    let packet = &mut packet[VNET_HDR_LEN..];
    packet[0] = 0x47;
    packet[3] += 8;
    let found = gateway.inbound(at(0), packet, &VnetHdr::default(), 1, 40);
    assert_eq!(found, Err(DropReason::SourceRouted));
}

#[test]
fn packets_forwarded_by_the_host_are_from_no_device() {
    let mut gateway = gateway(|_| {});
    let forwarded = |from| read(from, REMOTE, UDP, &udp(5000, 53));
    assert_eq!(gateway.from_host(&forwarded("10.77.0.1")), Ok(()));
    for (from, reason) in [
        ("192.168.9.9", DropReason::UnlistedDevice),
        (OVERLAY, DropReason::DeviceMismatch),
    ] {
        assert_eq!(gateway.from_host(&forwarded(from)), Err(reason));
    }
}

#[test]
fn a_devices_address_from_another_mac_address_is_refused() {
    let mut gateway = gateway(|c| c.devices[0].mac = Some(DEVICE_MAC));
    let mut out = read(LAN, SHOWN, UDP, &udp(5000, 53));
    let outcome = gateway.outbound(at(0), &mut out, from_lan(OTHER));
    assert_eq!(outcome, Err(DropReason::DeviceMismatch));
}

#[test]
fn a_mac_address_identifies_a_device_under_any_address() {
    let mut gateway = gateway(|c| {
        c.devices[0].mac = Some(DEVICE_MAC);
        c.devices[0].lan = Vec::new();
    });
    for address in [LAN, "192.168.1.77"] {
        let mut out = read(address, SHOWN, UDP, &udp(5000, 53));
        gateway
            .outbound(at(0), &mut out, from_lan(DEVICE_MAC))
            .unwrap();
        assert_eq!(addresses(&out), (ip(OVERLAY), ip(REMOTE)));
        let back = inbound(&mut gateway, 1, (UDP, &udp(53, 5000))).unwrap();
        assert_eq!(addresses(&back).1, ip(address));
    }
    // The previous address is free.
    let mut out = read(LAN, SHOWN, UDP, &udp(5000, 53));
    let outcome = gateway.outbound(at(0), &mut out, from_lan(OTHER));
    assert_eq!(outcome, Err(DropReason::UnlistedDevice));
}

#[test]
fn no_device_takes_the_address_of_a_remote() {
    let mut gateway = gateway(|c| {
        let unaddressed = DeviceConfig {
            name: "unaddressed".into(),
            mac: Some(OTHER),
            overlay: vec![ip("10.77.0.11")],
            ..DeviceConfig::default()
        };
        c.devices.push(unaddressed);
    });
    let mut out = read(SHOWN, "192.168.1.203", UDP, &udp(5000, 53));
    let outcome = gateway.outbound(at(0), &mut out, from_lan(OTHER));
    assert_eq!(outcome, Err(DropReason::DeviceMismatch));
    // The remote still reaches the devices.
    assert!(inbound(&mut gateway, 1, (UDP, &udp(53, 5000))).is_ok());
    let mut out = read("192.168.1.11", SHOWN, UDP, &udp(5000, 53));
    let outcome = gateway.outbound(at(2), &mut out, from_lan(OTHER));
    assert_eq!(outcome, Ok(Outbound::Whole));
}

#[test]
fn rules_hold_and_answers_pass() {
    let mut gateway = gateway(|c| {
        c.devices[0].allow_from = rules(&["10.99.0.0/16", "10.77.0.2 udp/502"]);
        c.devices[0].allow_to = rules(&["any udp/53"]);
    });
    let denied = inbound(&mut gateway, 0, (UDP, &udp(9, 503)));
    assert_eq!(denied.unwrap_err(), DropReason::DeniedFrom);
    inbound(&mut gateway, 0, (UDP, &udp(9, 502))).unwrap();
    let mut send = |source, destination| {
        let mut out = read(LAN, SHOWN, UDP, &udp(source, destination));
        gateway
            .outbound(at(1), &mut out, from_lan(DEVICE_MAC))
            .map(|_| ())
    };
    assert_eq!(send(502, 9), Ok(())); // the answer
    assert_eq!(send(502, 10), Err(DropReason::DeniedTo));
    assert_eq!(send(7000, 53), Ok(()));
    inbound(&mut gateway, 2, (UDP, &udp(53, 7000))).unwrap();
    let (_, device) = gateway.devices().next().unwrap();
    assert_eq!(device.rule_hits, [0, 1, 1]);
    assert_eq!(device.inbound.drops.get(DropReason::DeniedFrom), 1);
    assert_eq!(device.outbound.drops.get(DropReason::DeniedTo), 1);
}

#[test]
fn an_icmp_error_passes_if_its_flow_does() {
    let mut gateway = gateway(|c| {
        c.devices[0].allow_from = rules(&["10.99.0.0/16"]);
        c.devices[0].allow_to = rules(&["any udp/53"]);
    });
    let mut out = read(LAN, SHOWN, UDP, &udp(7000, 53));
    gateway
        .outbound(at(0), &mut out, from_lan(DEVICE_MAC))
        .unwrap();
    // Port unreachable, quoting a packet that was sent, and one that was not.
    let error = |quoted: &[u8]| [&[3, 3, 0, 0, 0, 0, 0, 0], quoted].concat();
    let good = error(&out[VNET_HDR_LEN..]);
    inbound(&mut gateway, 1, (1, &good)).unwrap();
    let bad = error(&read(OVERLAY, REMOTE, UDP, &udp(7001, 53))[VNET_HDR_LEN..]);
    let denied = inbound(&mut gateway, 1, (1, &bad));
    assert_eq!(denied.unwrap_err(), DropReason::DeniedFrom);
}

#[test]
fn later_fragments_go_where_the_first_went() {
    let mut gateway = gateway(|c| c.devices[0].allow_from = rules(&["any udp/502"]));
    let fragment = |identification: u8, offset: u8, more: u8, transport: &[u8]| {
        let mut read = read(REMOTE, OVERLAY, UDP, transport);
        let packet = &mut read[VNET_HDR_LEN..];
        packet[5] = identification;
        packet[6..8].copy_from_slice(&[more << 5, offset]);
        read
    };
    let mut let_in = |mut read: Vec<u8>| {
        let vnet = VnetHdr::default();
        gateway
            .inbound(at(0), &mut read[VNET_HDR_LEN..], &vnet, 1, 32)
            .map(|_| ())
    };
    assert_eq!(let_in(fragment(1, 0, 1, &udp(9, 502))), Ok(()));
    assert_eq!(let_in(fragment(1, 2, 0, &[0; 16])), Ok(()));
    let other = let_in(fragment(2, 2, 0, &[0; 16]));
    assert_eq!(other, Err(DropReason::DeniedFrom));
    let denied = let_in(fragment(3, 0, 1, &udp(9, 503)));
    assert_eq!(denied, Err(DropReason::DeniedFrom));
}

/// An IPv4 fragment: a packet of UDP with this flags-and-offset field, in units of eight bytes.
fn fragment(mut read: Vec<u8>, field: u16) -> Vec<u8> {
    let header = &mut read[VNET_HDR_LEN..];
    header[6..8].copy_from_slice(&field.to_be_bytes());
    header[10..12].fill(0);
    let sum = checksum::fold(checksum::sum(&header[..20]));
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    read
}

const MORE: u16 = 0x2000;

#[test]
fn a_fragment_beyond_the_longest_packet_is_refused() {
    // The second part of it would be a first fragment, with ports of the sender's choice.
    let mut gateway = gateway(|c| {
        c.devices[0].allow_to = rules(&["any udp/53"]);
        c.mtu = Mtus {
            lan: 1400,
            tunnel: 1420,
        };
    });
    let mut send = |offset: u16, payload: usize, protocol| {
        let mut out = fragment(
            read(
                LAN,
                SHOWN,
                protocol,
                &[udp(5000, 53), vec![0; payload - 12]].concat(),
            ),
            MORE | offset,
        );
        let sent = gateway.outbound(at(0), &mut out, from_lan(DEVICE_MAC));
        (sent, gateway.take_made().len())
    };
    assert_eq!(send(0, 1480, UDP), (Ok(Outbound::Cut), 2));
    let refused = (Err(DropReason::FragmentTooLong), 0);
    assert_eq!(send(8017, 1480, UDP), refused);
    // To byte 65,532 and to byte 65,540.
    assert_eq!(send(8004, 1480, UDP), (Ok(Outbound::Cut), 2));
    assert_eq!(send(8005, 1480, UDP), refused);
    let (_, device) = gateway.devices().next().unwrap();
    assert_eq!(device.outbound.drops.get(DropReason::FragmentTooLong), 2);
    assert_eq!(device.outbound.unaccounted(), 0);
    // The same in the other direction.
    let mut from_remote = |offset| {
        let long = [udp(53, 5000), vec![0; 1468]].concat();
        let mut read = fragment(read(REMOTE, OVERLAY, UDP, &long), MORE | offset);
        let vnet = VnetHdr::default();
        let found = gateway.inbound(at(1), &mut read[VNET_HDR_LEN..], &vnet, 1, 1500);
        found.map(|_| {
            gateway
                .fragments_for_lan(&read[VNET_HDR_LEN..], false)
                .len()
        })
    };
    assert_eq!(from_remote(8004), Ok(2));
    assert_eq!(from_remote(8017), Err(DropReason::FragmentTooLong));
}

#[test]
fn later_fragments_do_not_follow_a_first_one_that_was_dropped() {
    let mut gateway = gateway(|c| {
        c.devices[0].allow_to = rules(&["any udp/53"]);
        c.mtu.tunnel = 1420;
    });
    let mut send = |identification, field, hops, length| {
        let mut out = read(LAN, SHOWN, UDP, &[udp(5000, 53), vec![0; length]].concat());
        out[VNET_HDR_LEN + 5] = identification;
        out[VNET_HDR_LEN + 8] = hops;
        let mut out = fragment(out, field);
        gateway.outbound(at(0), &mut out, from_lan(DEVICE_MAC))
    };
    assert_eq!(send(1, MORE, 64, 12), Ok(Outbound::Whole));
    assert_eq!(send(1, 3, 64, 12), Ok(Outbound::Whole));
    assert_eq!(send(2, MORE, 1, 12), Err(DropReason::HopLimit));
    assert_eq!(send(2, 3, 64, 12), Err(DropReason::DeniedTo));
    // DF, and longer than the tunnel's MTU.
    assert_eq!(send(3, MORE | 0x4000, 64, 1480), Err(DropReason::TooBig));
    assert_eq!(send(3, 3, 64, 12), Err(DropReason::DeniedTo));
}

#[test]
fn the_two_sides_are_measured_separately() {
    let mut gateway = gateway(|_| {});
    let send = |gateway: &mut Gateway, ms, transport: Vec<u8>| {
        let mut out = read(LAN, SHOWN, TCP, &transport);
        gateway
            .outbound(at(ms), &mut out, from_lan(DEVICE_MAC))
            .unwrap();
    };
    // The remote takes 20 ms to answer the device's data, the device 3 ms to answer the remote's.
    send(&mut gateway, 0, tcp(7000, 80, 1, 1, 100));
    send(&mut gateway, 1, tcp(7000, 80, 101, 1, 100));
    inbound(&mut gateway, 20, (TCP, &tcp(80, 7000, 1, 201, 100))).unwrap();
    inbound(&mut gateway, 21, (TCP, &tcp(80, 7000, 101, 201, 100))).unwrap();
    send(&mut gateway, 24, tcp(7000, 80, 201, 201, 0));
    // Repeated: lost between gateway and device.
    inbound(&mut gateway, 30, (TCP, &tcp(80, 7000, 101, 201, 100))).unwrap();
    let (_, device) = gateway.devices().next().unwrap();
    let ms = Duration::from_millis;
    assert_eq!(device.tunnel_side.rtt_min, Some(ms(19)));
    assert_eq!(device.lan_side.rtt_min, Some(ms(3)));
    assert_eq!((device.lan_side.lost, device.tunnel_side.lost), (1, 0));
}

/// Sets the MTUs of the two interfaces.
fn mtus(lan: u32, tunnel: u32) -> impl FnOnce(&mut GatewayConfig) {
    move |c| c.mtu = Mtus { lan, tunnel }
}

#[test]
fn unfragmentable_packets_are_reported_to_their_sender() {
    let mut gateway = gateway(mtus(1500, 1420));
    let mut long = udp(5000, 53);
    long.resize(1473, 0);
    long[4..6].copy_from_slice(&1473u16.to_be_bytes());
    let mut out = read(LAN, SHOWN, UDP, &long);
    let outcome = gateway.outbound(at(0), &mut out, from_lan(DEVICE_MAC));
    assert_eq!(outcome, Err(DropReason::TooBig));
    let made = gateway.take_made();
    let [Made::ToDevice(_, answer)] = &made[..] else {
        panic!("{made:?}");
    };
    let parsed = IpPacket::parse(answer).unwrap();
    assert_eq!((parsed.src, parsed.dst), (ip(SHOWN), ip(LAN)));
    // Fragmentation needed, next-hop MTU (RFC 1191 section 4).
    assert_eq!(answer[20..22], [3, 4]);
    assert_eq!(answer[26..28], 1420u16.to_be_bytes());
    // Packets too long for the local network are reported to the remote.
    let mut gateway = self::gateway(mtus(576, 1500));
    let denied = inbound(&mut gateway, 0, (UDP, &long));
    assert_eq!(denied.unwrap_err(), DropReason::TooBig);
    let made = gateway.take_made();
    let [Made::ToTunnel(answer)] = &made[..] else {
        panic!("{made:?}");
    };
    let parsed = IpPacket::parse(answer).unwrap();
    assert_eq!((parsed.src, parsed.dst), (ip(OVERLAY), ip(REMOTE)));
}

#[test]
fn fragmentable_packets_are_fragmented() {
    let mut gateway = gateway(mtus(1500, 576));
    let mut long = udp(5000, 53);
    long.extend((0..1000u32).map(|i| i as u8));
    let length = long.len() as u16;
    long[4..6].copy_from_slice(&length.to_be_bytes());
    long[6..8].fill(0);
    let mut out = read(LAN, SHOWN, UDP, &long);
    out[VNET_HDR_LEN + 6] = 0; // no DF
    let sum = &mut out[VNET_HDR_LEN + 10..][..2];
    sum.copy_from_slice(&[0, 0]);
    let sum = checksum::fold(checksum::sum(&out[VNET_HDR_LEN..][..20]));
    out[VNET_HDR_LEN + 10..][..2].copy_from_slice(&sum.to_be_bytes());
    let outcome = gateway.outbound(at(0), &mut out, from_lan(DEVICE_MAC));
    assert_eq!(outcome, Ok(Outbound::Cut));
    let mut whole = vec![0; long.len()];
    let mut offsets = Vec::new();
    for made in gateway.take_made() {
        let Made::ToTunnel(fragment) = made else {
            panic!("{made:?}");
        };
        let parsed = IpPacket::parse(&fragment).unwrap();
        assert_eq!(checksum::fold(checksum::sum(&fragment[..20])), 0);
        assert_eq!((parsed.src, parsed.dst), (ip(OVERLAY), ip(REMOTE)));
        assert!(fragment.len() <= 576);
        let offset = parsed.fragment_offset(&fragment);
        let more = fragment[6] & 0x20 != 0;
        offsets.push((offset, more));
        whole[offset..offset + fragment.len() - 20].copy_from_slice(&fragment[20..]);
    }
    // 552 bytes fit after the header, in units of eight.
    assert_eq!(offsets, [(0, true), (552, false)]);
    assert_eq!(whole, long);
}

#[test]
fn the_segments_of_a_connection_fit_both_sides() {
    let mut gateway = gateway(mtus(1300, 1420));
    let mut syn = tcp(7000, 80, 1, 0, 4);
    (syn[12], syn[13]) = (0x60, 2);
    syn[20..24].copy_from_slice(&[2, 4, 0x05, 0xb4]); // MSS 1460
    let mut out = read(LAN, SHOWN, TCP, &syn);
    gateway
        .outbound(at(0), &mut out, from_lan(DEVICE_MAC))
        .unwrap();
    assert_eq!(out[out.len() - 2..], 1380u16.to_be_bytes());
    let back = inbound(&mut gateway, 1, (TCP, &syn)).unwrap();
    assert_eq!(back[back.len() - 2..], 1260u16.to_be_bytes());
}

// The responder.

fn responder() -> Responder {
    Responder::new(RESPONDER, vec!["10.77.0.0/24".parse().unwrap()])
}

/// A read of an ARP message as the kernel delivers it.
fn arp(arp: &Arp, tag: Option<u16>) -> Vec<u8> {
    let vlan = tag.map(|tci| seikan_wire::ethernet::Vlan { tci });
    let header = Ethernet::new(Mac::BROADCAST, arp.sender_mac, vlan, ETHERTYPE_ARP);
    let mut read = vec![0; VNET_HDR_LEN + 18];
    let length = header.write(&mut read[VNET_HDR_LEN..]);
    read.truncate(VNET_HDR_LEN + length);
    read.extend(arp.to_bytes());
    read
}

fn v4(text: &str) -> Ipv4Addr {
    text.parse().unwrap()
}

/// The replies to an ARP message, with their destinations.
fn answers(
    responder: &mut Responder,
    gateway: &mut Gateway,
    ms: u64,
    message: &Arp,
) -> Vec<(Mac, Arp)> {
    let frame = responder.frame(at(ms), gateway, &mut arp(message, None), None);
    assert_eq!(frame, Frame::Done);
    let frames = responder.take_frames();
    frames
        .iter()
        .map(|frame| {
            let header = Ethernet::parse(&frame[VNET_HDR_LEN..]).unwrap();
            assert_eq!(header.src, RESPONDER);
            let payload = &frame[VNET_HDR_LEN + header.header_len..];
            (header.dst, Arp::parse(payload).unwrap())
        })
        .collect()
}

#[test]
fn an_arp_request_for_a_remote_is_answered() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    for target in [SHOWN, "10.77.0.9"] {
        let ask = Arp::request(DEVICE_MAC, v4(LAN), v4(target));
        let got = answers(&mut responder, &mut gateway, 0, &ask);
        assert_eq!(got, [(DEVICE_MAC, ask.reply(RESPONDER))]);
    }
    let (_, device) = gateway.devices().next().unwrap();
    assert_eq!(device.mac, Some(DEVICE_MAC));
}

#[test]
fn other_addresses_are_not_answered_for() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    for target in ["192.168.1.1", LAN, "10.78.0.1", "10.77.0.1"] {
        let ask = Arp::request(DEVICE_MAC, v4(LAN), v4(target));
        assert_eq!(answers(&mut responder, &mut gateway, 0, &ask), []);
    }
    let unlisted = Arp::request(OTHER, v4("192.168.1.11"), v4(SHOWN));
    assert_eq!(answers(&mut responder, &mut gateway, 0, &unlisted), []);
    assert_eq!(
        gateway.unattributed().drops.get(DropReason::UnlistedDevice),
        1
    );
    // A probe for the responder's address is answered.
    let probe = Arp::probe(OTHER, v4(SHOWN));
    assert_eq!(answers(&mut responder, &mut gateway, 0, &probe).len(), 1);
    assert_eq!(gateway.unattributed().unaccounted(), 0);
}

#[test]
fn an_address_in_use_is_not_answered_for() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    let theirs = Arp::announcement(OTHER, v4(SHOWN));
    assert_eq!(answers(&mut responder, &mut gateway, 0, &theirs), []);
    let ask = Arp::request(DEVICE_MAC, v4(LAN), v4(SHOWN));
    assert_eq!(answers(&mut responder, &mut gateway, 1, &ask), []);
    assert_eq!(responder.conflicts(at(1)).next().unwrap().mac, OTHER);
    // A minute after its last use by another host, the address is answered for again.
    assert_eq!(answers(&mut responder, &mut gateway, 60_001, &ask).len(), 1);
}

#[test]
fn a_second_claimant_is_a_duplicate_until_the_device_is_silent() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    let first = Arp::announcement(DEVICE_MAC, v4(LAN));
    answers(&mut responder, &mut gateway, 0, &first);
    let second = Arp::announcement(OTHER, v4(LAN));
    answers(&mut responder, &mut gateway, 5_000, &second);
    let mac = |gateway: &Gateway| gateway.devices().next().unwrap().1.mac;
    assert_eq!(mac(&gateway), Some(DEVICE_MAC));
    let conflict = responder.conflicts(at(5_000)).next().unwrap();
    assert_eq!((conflict.address, conflict.mac), (ip(LAN), OTHER));
    answers(&mut responder, &mut gateway, 20_000, &second);
    assert_eq!(mac(&gateway), Some(OTHER));
}

#[test]
fn a_device_without_a_mac_address_is_queried() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    responder.poll(at(0), &mut gateway);
    let frames = responder.take_frames();
    let header = Ethernet::parse(&frames[0][VNET_HDR_LEN..]).unwrap();
    let query = Arp::parse(&frames[0][VNET_HDR_LEN + 14..]).unwrap();
    assert_eq!((frames.len(), header.dst), (1, Mac::BROADCAST));
    assert_eq!((query.sender, query.target), (v4(SHOWN), v4(LAN)));
    let reply = query.reply(DEVICE_MAC);
    answers(&mut responder, &mut gateway, 1, &reply);
    let (id, device) = gateway.devices().next().unwrap();
    assert_eq!(device.mac, Some(DEVICE_MAC));
    let (header, length) = responder.header_to(&gateway, id, false).unwrap();
    let header = Ethernet::parse(&header[..length]).unwrap();
    assert_eq!((header.dst, header.src), (DEVICE_MAC, RESPONDER));
    // Present a moment ago, so it is not queried.
    responder.poll(at(5_000), &mut gateway);
    assert!(responder.take_frames().is_empty());
}

#[test]
fn a_thousand_devices_are_queried_in_batches() {
    let mut gateway = gateway(|c| {
        for i in 0..1000u32 {
            c.devices.push(DeviceConfig {
                name: i.to_string(),
                lan: vec![Ipv4Addr::from(0x0a00_0000 + i).into()],
                ..DeviceConfig::default()
            });
        }
    });
    let mut responder = responder();
    responder.poll(at(0), &mut gateway);
    assert_eq!(responder.take_frames().len(), 32);
    assert_eq!(responder.next_wakeup(), at(50));
}

#[test]
fn a_device_that_packets_wait_for_is_queried_at_once() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    let (id, _) = gateway.devices().next().unwrap();
    // Nobody has found it for a minute, so that it is queried every 30 seconds.
    for second in 0..60 {
        responder.poll(at(1_000 * second), &mut gateway);
    }
    responder.take_frames();
    let mut queries = |ms| {
        responder.resolve(at(ms), &gateway, id);
        responder.take_frames().len()
    };
    assert_eq!(
        [60_000, 60_001, 60_249, 60_250].map(&mut queries),
        [1, 0, 0, 1]
    );
}

#[test]
fn packets_for_absent_devices_cause_a_bounded_number_of_queries() {
    let gateway = gateway(|c| {
        for i in 0..1000u32 {
            c.devices.push(DeviceConfig {
                name: i.to_string(),
                lan: vec![Ipv4Addr::from(0x0a00_0000 + i).into()],
                ..DeviceConfig::default()
            });
        }
    });
    let ids: Vec<DeviceId> = gateway.devices().map(|(id, _)| id).collect();
    let mut responder = responder();
    for ms in 0..100 {
        for id in &ids {
            responder.resolve(at(ms), &gateway, *id);
        }
    }
    assert_eq!(responder.take_frames().len(), 2 * 32);
}

#[test]
fn replies_carry_the_vlan_tag_of_the_request() {
    let mut gateway = gateway(|c| c.devices[0].vlan = Some(7));
    let ask = Arp::request(DEVICE_MAC, v4(LAN), v4(SHOWN));
    // Removed by the kernel, or still in the frame.
    for (tag, tci) in [(None, Some(0x6007)), (Some(7), None)] {
        let mut responder = responder();
        responder.frame(at(0), &mut gateway, &mut arp(&ask, tag), tci);
        let frames = responder.take_frames();
        let header = Ethernet::parse(&frames[0][VNET_HDR_LEN..]).unwrap();
        assert_eq!(header.vlan_id(), Some(7));
    }
    // The same address in another VLAN is another device.
    let mut responder = responder();
    responder.frame(at(0), &mut gateway, &mut arp(&ask, None), None);
    assert!(responder.take_frames().is_empty());
}

#[test]
fn a_packet_for_the_responder_follows_its_virtio_header() {
    let mut gateway = gateway(|_| {});
    let packet = read(LAN, SHOWN, UDP, &udp(5000, 53));
    for tag in [None, Some(7)] {
        let vlan = tag.map(|tci| seikan_wire::ethernet::Vlan { tci });
        let header = Ethernet::new(RESPONDER, DEVICE_MAC, vlan, ETHERTYPE_IPV4);
        let mut head = [0; 18];
        let length = header.write(&mut head);
        let vnet = VnetHdr {
            needs_csum: true,
            csum_start: (length + 20) as u16,
            csum_offset: 6,
            ..VnetHdr::default()
        };
        let mut read = vnet.to_bytes().to_vec();
        read.extend(&head[..length]);
        read.extend(&packet[VNET_HDR_LEN..]);
        let found = responder().frame(at(0), &mut gateway, &mut read, None);
        let expected = Frame::Packet {
            start: length,
            mac: DEVICE_MAC,
            vlan: tag,
        };
        assert_eq!(found, expected);
        let vnet = VnetHdr::read(&read[length..]).unwrap();
        assert_eq!(vnet.csum_start, 20);
        assert_eq!(read[length + VNET_HDR_LEN..], packet[VNET_HDR_LEN..]);
    }
}

#[test]
fn broadcast_and_multicast_stay_on_the_local_network() {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    let packet = read(LAN, "192.168.1.255", UDP, &udp(137, 137));
    for (source, address) in [(DEVICE_MAC, LAN), (OTHER, "192.168.1.11")] {
        let header = Ethernet::new(Mac::BROADCAST, source, None, ETHERTYPE_IPV4);
        let mut read = vec![0; VNET_HDR_LEN + 14];
        header.write(&mut read[VNET_HDR_LEN..]);
        read.extend(&packet[VNET_HDR_LEN..]);
        let IpAddr::V4(source) = ip(address) else {
            panic!()
        };
        read[VNET_HDR_LEN + 14 + 12..][..4].copy_from_slice(&source.octets());
        let found = responder.frame(at(0), &mut gateway, &mut read, None);
        assert_eq!(found, Frame::Done);
    }
    let (_, device) = gateway.devices().next().unwrap();
    assert_eq!(device.outbound.drops.get(DropReason::NotUnicast), 1);
    assert_eq!(gateway.unattributed().drops.get(DropReason::NotUnicast), 1);
}

/// A device whose address another MAC address claims at 1 s. Returns the queried MAC addresses
/// until 3.5 s.
fn contested(answering: bool) -> (Gateway, Vec<Mac>) {
    let (mut responder, mut gateway) = (responder(), gateway(|_| {}));
    answers(
        &mut responder,
        &mut gateway,
        0,
        &Arp::announcement(DEVICE_MAC, v4(LAN)),
    );
    let claim = Arp::announcement(OTHER, v4(LAN));
    answers(&mut responder, &mut gateway, 1_000, &claim);
    let mut queries = Vec::new();
    for ms in (1_000..=4_500).step_by(500) {
        responder.poll(at(ms), &mut gateway);
        for frame in responder.take_frames() {
            let to = Ethernet::parse(&frame[VNET_HDR_LEN..]).unwrap().dst;
            let query = Arp::parse(&frame[VNET_HDR_LEN + 14..]).unwrap();
            if answering && to == DEVICE_MAC {
                let _ = responder.frame(
                    at(ms),
                    &mut gateway,
                    &mut arp(&query.reply(DEVICE_MAC), None),
                    None,
                );
            }
            queries.push(to);
        }
    }
    answers(&mut responder, &mut gateway, 4_600, &claim);
    (gateway, queries)
}

#[test]
fn a_silent_device_loses_its_address_to_the_other_claimant() {
    let (gateway, queries) = contested(false);
    // Three queries to the old MAC address, then broadcasts.
    assert_eq!(
        queries,
        [DEVICE_MAC, DEVICE_MAC, DEVICE_MAC, Mac::BROADCAST]
    );
    assert_eq!(gateway.devices().next().unwrap().1.mac, Some(OTHER));
}

#[test]
fn a_device_that_answers_for_its_address_keeps_it() {
    let (gateway, queries) = contested(true);
    // The second claim, later, has not caused a query yet.
    assert_eq!(queries, [DEVICE_MAC]);
    assert_eq!(gateway.devices().next().unwrap().1.mac, Some(DEVICE_MAC));
}

#[test]
fn a_silent_learned_ipv6_address_is_replaced() {
    let mut gateway = gateway(|config| {
        config.devices[0].mac = Some(DEVICE_MAC);
        config.devices[0].lan.clear();
    });
    let id = gateway.device_by_mac(None, DEVICE_MAC).unwrap();
    let (old, new) = (ip("fd00:1::10"), ip("fd00:2::10"));
    gateway.learn(id, old, at(0)).unwrap();
    let origin = Origin::Lan {
        mac: DEVICE_MAC,
        vlan: None,
    };
    for ms in (0..=60_000).step_by(10_000) {
        // The other family is in use all the time.
        let mut packet = read(LAN, SHOWN, 17, &[0, 9, 0, 9, 0, 8, 0, 0]);
        gateway.outbound(at(ms), &mut packet, origin).unwrap();
        if ms < 60_000 {
            let refused = gateway.learn(id, new, at(ms));
            assert_eq!(refused, Err(DropReason::DeviceMismatch));
        }
    }
    gateway.learn(id, new, at(60_000)).unwrap();
    assert_eq!(gateway.device_by_lan(None, new), Some(id));
    assert_eq!(gateway.device_by_lan(None, old), None);
}

/// A device with a configured MAC address has an IPv6 address, uses another one at 1 s and is
/// queried until 6 s; it answers if `answers`. Returns the queries with their times.
fn with_a_second_address(answers: bool) -> (Gateway, Vec<(u64, Ipv6Addr)>) {
    let (old, new) = ("fd00:1::10".parse().unwrap(), ip("fd00:1::77"));
    let mut responder = responder();
    let mut gateway = gateway(|config| {
        config.devices[0].mac = Some(DEVICE_MAC);
        config.devices[0].lan.clear();
    });
    let id = gateway.device_by_mac(None, DEVICE_MAC).unwrap();
    gateway.learn(id, IpAddr::V6(old), at(0)).unwrap();
    let refused = gateway.learn(id, new, at(1_000));
    assert_eq!(refused, Err(DropReason::DeviceMismatch));
    let mut queries = Vec::new();
    for ms in (1_000..=6_000).step_by(100) {
        // It is present, and not queried for anything else.
        gateway.devices[0].last_seen = Some(at(ms));
        responder.poll(at(ms), &mut gateway);
        for frame in responder.take_frames() {
            let payload = &frame[VNET_HDR_LEN + 14..];
            let Ok(Neighbour::Solicitation(query)) = Neighbour::parse(payload) else {
                panic!("no solicitation");
            };
            queries.push((ms, query.target));
            if answers {
                send_advertisement(
                    &mut responder,
                    &mut gateway,
                    ms,
                    DEVICE_MAC,
                    &query.answer(DEVICE_MAC),
                );
            }
        }
    }
    (gateway, queries)
}

/// An advertisement in a frame from this MAC address.
fn send_advertisement(
    responder: &mut Responder,
    gateway: &mut Gateway,
    ms: u64,
    src: Mac,
    advertisement: &Advertisement,
) {
    let header = Ethernet::new(RESPONDER, src, None, ETHERTYPE_IPV6);
    let mut read = vec![0; VNET_HDR_LEN + 14];
    header.write(&mut read[VNET_HDR_LEN..]);
    read.extend(advertisement.to_packet());
    let frame = responder.frame(at(ms), gateway, &mut read, None);
    assert_eq!(frame, Frame::Done);
}

#[test]
fn a_device_that_does_not_answer_for_its_ipv6_address_has_another() {
    let (gateway, queries) = with_a_second_address(false);
    let old = "fd00:1::10".parse().unwrap();
    assert_eq!(queries, [(1_000, old), (2_000, old), (3_000, old)]);
    let id = gateway.device_by_lan(None, ip("fd00:1::77"));
    assert_eq!(id, gateway.device_by_mac(None, DEVICE_MAC));
    assert_eq!(gateway.device_by_lan(None, ip("fd00:1::10")), None);
}

#[test]
fn a_device_that_answers_for_its_ipv6_address_keeps_it() {
    let (mut gateway, queries) = with_a_second_address(true);
    assert_eq!(queries.len(), 1);
    let id = gateway.device_by_lan(None, ip("fd00:1::10")).unwrap();
    assert_eq!(gateway.device_by_lan(None, ip("fd00:1::77")), None);
    // An answer is no use of the address: a minute after the last use the other one is taken.
    gateway.learn(id, ip("fd00:1::77"), at(60_000)).unwrap();
}

#[test]
fn a_claim_for_another_mac_address_does_not_move_a_device() {
    let (mut responder, mut gateway) = (
        responder(),
        gateway(|config| {
            config.devices[0].mac = Some(DEVICE_MAC);
            config.devices[0].lan.clear();
        }),
    );
    let advertisement = Advertisement::unsolicited("fd00:1::66".parse().unwrap(), DEVICE_MAC);
    send_advertisement(&mut responder, &mut gateway, 0, OTHER, &advertisement);
    assert_eq!(gateway.device_by_lan(None, ip("fd00:1::66")), None);
    assert_eq!(
        gateway.unattributed().drops.get(DropReason::BadFrameType),
        1
    );
}
