//! Packets that exceed the MTU of the next interface: fragmented where IPv4 allows it, otherwise
//! reported to their sender (RFC 791, RFC 1191, RFC 8201).

use super::{Gateway, Made};
use seikan_wire::ip::{self, IpPacket, PROTO_TCP, PROTO_UDP};
use seikan_wire::{checksum, icmp, tcp, udp};

/// Maximum number of waiting replies, so that the gateway is no amplifier.
const MAX_MADE: usize = 64;

/// Whether a router may fragment the packet: IPv4 without DF, and not a super-packet, whose
/// segments have the size chosen by the sender.
pub(super) fn may_be_cut(packet: &[u8], ip: &IpPacket, gso_size: usize) -> bool {
    !ip.is_v6() && gso_size == 0 && packet[6] & 0x40 == 0 && ip.total_len <= packet.len()
}

/// Returns the packet with a complete transport checksum.
pub(super) fn complete(packet: &[u8], ip: &IpPacket, partial: bool) -> Vec<u8> {
    let mut whole = packet[..ip.total_len].to_vec();
    let at = match ip.protocol {
        PROTO_TCP => tcp::CHECKSUM_AT,
        PROTO_UDP => udp::CHECKSUM_AT,
        _ => return whole,
    };
    let transport = &mut whole[ip.header_len..];
    if partial && transport.len() >= at + 2 {
        // The field covers the pseudo-header only.
        let sum = udp::on_wire(checksum::fold(checksum::sum(transport)));
        transport[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    whole
}

/// Whether an IPv4 fragment ends beyond the longest packet, so that the offset of a part of it might
/// wrap (RFC 791 section 3.1).
pub(super) fn ends_too_late(packet: &[u8], ip: &IpPacket) -> bool {
    !ip.is_v6() && ip.fragment_offset(packet) + ip.total_len > usize::from(u16::MAX)
}

/// Fragments an IPv4 packet, which may be a fragment itself, to at most `mtu` bytes (RFC 791
/// section 3.2). Each fragment has the whole header: options for the first one do no harm in the
/// others. A fragment that [`ends_too_late`] was refused.
pub(super) fn fragments(packet: &[u8], mtu: usize) -> Vec<Vec<u8>> {
    let Ok(ip) = IpPacket::parse(packet) else {
        return Vec::new();
    };
    let payload = &packet[ip.header_len..ip.total_len];
    let max_payload = (mtu.saturating_sub(ip.header_len) & !7).max(8);
    let field = u16::from_be_bytes([packet[6], packet[7]]);
    let (flags, offset) = (field & 0xe000, usize::from(field & 0x1fff));
    let parts = payload.chunks(max_payload).enumerate();
    let count = payload.len().div_ceil(max_payload);
    parts
        .map(|(i, part)| {
            let last = i + 1 == count;
            let mut fragment = packet[..ip.header_len].to_vec();
            // More fragments follow, here or in the original.
            let flags = if last { flags } else { flags | 0x2000 };
            let flags_and_offset = flags | (offset + i * max_payload / 8) as u16;
            fragment[6..8].copy_from_slice(&flags_and_offset.to_be_bytes());
            fragment.extend(part);
            let total = fragment.len();
            ip::set_length(&mut fragment, ip.header_len, total, None);
            fragment
        })
        .collect()
}

impl Gateway {
    /// Reports the MTU of the next interface to the sender of a packet.
    pub(super) fn too_big(
        &mut self,
        packet: &[u8],
        mtu: usize,
        made: impl FnOnce(Vec<u8>) -> Made,
    ) {
        if self.made.len() < MAX_MADE
            && let Some(answer) = icmp::too_big(packet, mtu as u32)
        {
            self.made.push(made(answer));
        }
    }

    /// Fragments a packet that [`Gateway::inbound`] has passed to the MTU of the local network.
    /// Returns nothing if it fits. `packet` is the whole packet.
    pub fn fragments_for_lan(&self, packet: &[u8], partial: bool) -> Vec<Vec<u8>> {
        let limit = self.mtu.lan as usize;
        match IpPacket::parse(packet) {
            Ok(ip) if self.is_hop && ip.total_len > limit && !ip.is_v6() => {
                fragments(&complete(packet, &ip, partial), limit)
            }
            _ => Vec::new(),
        }
    }
}
