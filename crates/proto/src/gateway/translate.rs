//! One-to-one address translation in place, with incremental updates of every checksum (RFC 1624).
//!
//! [`translate`] checks everything first, and changes nothing if it returns an error. Then it
//! replaces the addresses. The change of the sum ([`Change`]) is applied to the checksum of the
//! IPv4 header and to that of the transport, whose pseudo-header contains the addresses. An ICMP
//! error quotes a packet of the same flow, whose addresses are translated as well (RFC 5508 section
//! 4.2). Every word changed in the quote, including its checksums, is a change under the ICMP
//! checksum.
//!
//! A wrong checksum stays wrong by the same amount, so damage is never hidden.

use seikan_observe::DropReason;
use seikan_wire::ip::{IpPacket, PROTO_ICMP, PROTO_ICMPV6, PROTO_TCP, PROTO_UDP};
use seikan_wire::{checksum, icmp, tcp, udp};
use std::net::IpAddr;

/// IANA protocol number of DCCP (RFC 4340).
const PROTO_DCCP: u8 = 33;
/// IANA protocol number of UDP-Lite (RFC 3828).
const PROTO_UDP_LITE: u8 = 136;
/// Offset of the checksum in a DCCP header.
const DCCP_CHECKSUM_AT: usize = 6;
/// Offset of the checksum in ICMP and ICMPv6 headers.
const ICMP_CHECKSUM_AT: usize = 2;

/// ICMP type of a redirect (RFC 792).
const REDIRECT: u8 = 5;
/// ICMPv6 type of a redirect (RFC 4861).
const REDIRECT_V6: u8 = 137;

/// Replaces source and destination of `packet`: an address that is the first of a pair in `mapping`
/// becomes the second. Pairs of different families are ignored.
///
/// `packet` begins with all headers, from which `ip` was parsed. The payload of a super-packet may
/// be elsewhere; that of ICMP must be present. `partial`: the transport's checksum field covers
/// only the pseudo-header, not complemented (virtio-net's NEEDS_CSUM).
///
/// Translating the result with reversed pairs restores the packet.
///
/// # Errors
/// The packet is unchanged and has to be dropped: [`DropReason::NotIp`] if `ip` does not belong to
/// it; [`DropReason::TransportTruncated`], [`DropReason::SourceRouted`] or
/// [`DropReason::IcmpRedirect`] if an address would have to change.
pub fn translate(
    packet: &mut [u8],
    ip: &IpPacket,
    mapping: &[(IpAddr, IpAddr)],
    partial: bool,
) -> Result<(), DropReason> {
    let end = ip.total_len.min(packet.len());
    if ip.header_len > end {
        return Err(DropReason::NotIp);
    }
    let addresses = Addresses::mapped(ip, mapping);
    let field = if addresses.changed() {
        if ip.source_routed(packet) {
            return Err(DropReason::SourceRouted);
        }
        let field = Field::find(ip, &packet[..end])?;
        if is_redirect(ip, &packet[..end]) {
            return Err(DropReason::IcmpRedirect);
        }
        field
    } else {
        None
    };
    let quote = icmp::quote(ip, &packet[..end]);
    let change = addresses.write(packet, ip.is_v6());
    if let Some(field) = field {
        field.update(packet, change, partial);
    }
    if let Some(start) = quote.filter(|start| *start < end) {
        let change = translate_quote(&mut packet[start..end], ip.is_v6(), mapping);
        // A checksum that is computed later will cover the changed quote.
        if !partial {
            let at = start - icmp::HEADER_LEN + ICMP_CHECKSUM_AT;
            Field {
                at,
                zero_is_none: false,
            }
            .update(packet, change, false);
        }
    }
    Ok(())
}

/// Change of a checksum's sum by replaced words: their new values and the complements of their old
/// ones.
#[derive(Clone, Copy, Default)]
struct Change(u64);

impl Change {
    /// Writes `new`, which has an even length, at the even offset `at`.
    fn write(&mut self, packet: &mut [u8], at: usize, new: &[u8]) {
        let old = &mut packet[at..at + new.len()];
        let all_ones = (new.len() as u64 / 2) * 0xffff;
        // Σ !word = Σ 0xffff - Σ word; `sum` is folded, hence at most 0xffff.
        self.0 += all_ones - checksum::sum(old) + checksum::sum(new);
        old.copy_from_slice(new);
    }
}

/// The new source and destination of a packet; `None` for an unchanged one.
struct Addresses {
    src: Option<IpAddr>,
    dst: Option<IpAddr>,
}

impl Addresses {
    fn mapped(ip: &IpPacket, mapping: &[(IpAddr, IpAddr)]) -> Addresses {
        let find = |address: IpAddr| {
            let same_family = |to: &IpAddr| to.is_ipv4() == address.is_ipv4();
            let mut found = mapping.iter().filter(|(from, _)| *from == address);
            found.next().map(|(_, to)| *to).filter(same_family)
        };
        Addresses {
            src: find(ip.src),
            dst: find(ip.dst),
        }
    }

    fn changed(&self) -> bool {
        self.src.is_some() || self.dst.is_some()
    }

    /// Writes the addresses to the IP header at the start of `packet` and updates the header's
    /// checksum. Returns the change of a pseudo-header's sum.
    fn write(&self, packet: &mut [u8], v6: bool) -> Change {
        let mut change = Change::default();
        for (address, at) in [(self.src, (12, 8)), (self.dst, (16, 24))] {
            match address {
                Some(IpAddr::V4(address)) => change.write(packet, at.0, &address.octets()),
                Some(IpAddr::V6(address)) => change.write(packet, at.1, &address.octets()),
                None => {}
            }
        }
        if !v6 {
            const HEADER: Field = Field {
                at: 10,
                zero_is_none: false,
            };
            HEADER.update(packet, change, false);
        }
        change
    }
}

/// A checksum field that covers the changes.
#[derive(Clone, Copy)]
struct Field {
    /// Offset in the packet.
    at: usize,
    /// Zero means "no checksum" (UDP), and a computed zero is written as 0xffff.
    zero_is_none: bool,
}

impl Field {
    /// The transport checksum that covers the addresses; `None` if there is none, or if it is in
    /// another fragment. `packet` ends at its length field or before.
    fn find(ip: &IpPacket, packet: &[u8]) -> Result<Option<Field>, DropReason> {
        let transport = ip.transport(packet);
        let Some((protocol, start)) = transport.map_err(|_| DropReason::TransportTruncated)? else {
            return Ok(None);
        };
        let (offset, zero_is_none) = match protocol {
            PROTO_TCP => (tcp::CHECKSUM_AT, false),
            PROTO_UDP | PROTO_UDP_LITE => (udp::CHECKSUM_AT, true),
            PROTO_DCCP => (DCCP_CHECKSUM_AT, false),
            PROTO_ICMPV6 if ip.is_v6() => (ICMP_CHECKSUM_AT, false),
            _ => return Ok(None),
        };
        let at = start + offset;
        if at + 2 > packet.len() {
            return Err(DropReason::TransportTruncated);
        }
        Ok(Some(Field { at, zero_is_none }))
    }

    /// RFC 1624, equation 3, for many words at once.
    fn update(self, packet: &mut [u8], change: Change, partial: bool) {
        let bytes = &mut packet[self.at..self.at + 2];
        let old = u16::from_be_bytes([bytes[0], bytes[1]]);
        if change.0 == 0 {
            return;
        }
        let new = if partial {
            checksum::add_carries(u64::from(old) + change.0)
        } else if self.zero_is_none && old == 0 {
            return;
        } else {
            let new = checksum::fold(u64::from(!old) + change.0);
            if self.zero_is_none {
                udp::on_wire(new)
            } else {
                new
            }
        };
        bytes.copy_from_slice(&new.to_be_bytes());
    }
}

/// Translates the packet quoted in an ICMP error of the same family, as far as it is present.
/// Returns the change of the error's sum by all changed words.
fn translate_quote(quote: &mut [u8], v6: bool, mapping: &[(IpAddr, IpAddr)]) -> Change {
    let ip = match IpPacket::parse_headers(quote) {
        Ok(ip) if ip.is_v6() == v6 => ip,
        _ => return Change::default(),
    };
    let addresses = Addresses::mapped(&ip, mapping);
    if !addresses.changed() {
        return Change::default();
    }
    let end = ip.total_len.min(quote.len());
    let field = if ip.source_routed(quote) {
        None
    } else {
        Field::find(&ip, &quote[..end]).ok().flatten()
    };
    let covered = field.map_or(ip.header_len, |field| field.at + 2);
    let before = checksum::sum(&quote[..covered]);
    let change = addresses.write(quote, v6);
    if let Some(field) = field {
        field.update(quote, change, false);
    }
    Change(0xffff - before + checksum::sum(&quote[..covered]))
}

/// Whether this is a redirect. `packet` ends at its length field or before.
fn is_redirect(ip: &IpPacket, packet: &[u8]) -> bool {
    let Ok(Some((protocol, at))) = ip.transport(packet) else {
        return false;
    };
    match packet.get(at) {
        Some(&kind) if ip.is_v6() => protocol == PROTO_ICMPV6 && kind == REDIRECT_V6,
        Some(&kind) => protocol == PROTO_ICMP && kind == REDIRECT,
        None => false,
    }
}

#[cfg(test)]
mod tests;
