//! Reads and writes of a TAP device: those of a TUN device, with an Ethernet header.

use seikan_wire::ethernet::{Ethernet, Mac, Vlan};
use seikan_wire::{GsoType, VNET_HDR_LEN, VnetHdr, ethernet};

/// The address of the device of a side.
pub fn mac(side: usize) -> Mac {
    Mac([2, 0, 0x5e, 0x10, 0, side as u8])
}

/// The Ethernet header of packets from `side`, tagged or not.
fn header(side: usize, tagged: bool, ethertype: u16) -> Vec<u8> {
    let vlan = tagged.then_some(Vlan { tci: 0xa007 });
    let header = Ethernet::new(mac(1 - side), mac(side), vlan, ethertype);
    let mut bytes = [0; ethernet::TAGGED_HEADER_LEN];
    let length = header.write(&mut bytes);
    bytes[..length].to_vec()
}

/// A read of the TUN device of `side` as a read of a TAP device. The frames of half of the flows
/// have a VLAN tag.
pub fn framed(side: usize, read: &[u8]) -> Vec<u8> {
    let (vnet, packet) = read.split_at(VNET_HDR_LEN);
    let is_v6 = packet[0] >> 4 == 6;
    let port = if is_v6 { 41 } else { 21 };
    let ethertype = if is_v6 {
        ethernet::ETHERTYPE_IPV6
    } else {
        ethernet::ETHERTYPE_IPV4
    };
    let header = header(
        side,
        packet.get(port).is_some_and(|b| b & 1 != 0),
        ethertype,
    );
    let mut vnet = VnetHdr::read(vnet).expect("a virtio-net header");
    if vnet.needs_csum {
        vnet.csum_start += header.len() as u16;
    }
    if vnet.hdr_len > 0 {
        vnet.hdr_len += header.len() as u16;
    }
    [&vnet.to_bytes()[..], &header, packet].concat()
}

/// A write to the TAP device of `side` as one to a TUN device; `None` if the frame has no IP.
pub fn unframed(side: usize, write: &[u8]) -> Option<Vec<u8>> {
    let (vnet, frame) = write.split_at(VNET_HDR_LEN);
    let parsed = Ethernet::parse(frame).ok()?;
    let is_ip = [ethernet::ETHERTYPE_IPV4, ethernet::ETHERTYPE_IPV6].contains(&parsed.ethertype);
    if !is_ip {
        return None;
    }
    // A packet from the other side, or an error that answers one of this side.
    assert_eq!(parsed.src, mac(1 - side));
    assert_eq!(parsed.dst, mac(side));
    let mut vnet = VnetHdr::read(vnet).expect("a virtio-net header");
    if vnet.needs_csum {
        vnet.csum_start -= parsed.header_len as u16;
    }
    if vnet.gso_type != GsoType::None {
        vnet.hdr_len -= parsed.header_len as u16;
    }
    let packet = &frame[parsed.header_len..];
    Some([&vnet.to_bytes()[..], packet].concat())
}
