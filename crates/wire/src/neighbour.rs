//! Neighbour solicitations and advertisements (RFC 4861), the ARP of IPv6.
//!
//! [`Neighbour::parse`] takes a whole IPv6 packet and performs all checks of section 7.1, so a
//! parsed message was sent on this link. [`Solicitation::to_packet`] and
//! [`Advertisement::to_packet`] build whole packets. Their frames go to [`multicast_mac`] of the
//! destination, or to the neighbour.

use crate::checksum;
use crate::ethernet::Mac;
use crate::ip::{self, IpPacket, PROTO_ICMPV6};
use std::net::{IpAddr, Ipv6Addr};

/// ICMPv6 type of a neighbour solicitation.
pub const SOLICITATION: u8 = 135;
/// ICMPv6 type of a neighbour advertisement.
pub const ADVERTISEMENT: u8 = 136;

/// All nodes on the link.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Length of the ICMPv6 header and the target address.
const MESSAGE_LEN: usize = 24;
/// Hop limit of a packet that no router has forwarded.
const HOP_LIMIT: u8 = 255;

/// Option: link-layer address of the sender.
const SOURCE_LINK_LAYER: u8 = 1;
/// Option: link-layer address of the target.
const TARGET_LINK_LAYER: u8 = 2;

/// Flags of an advertisement, in the byte after the checksum.
const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// A solicitation or an advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// "Who has the target?"
    Solicitation(Solicitation),
    /// "The target is here."
    Advertisement(Advertisement),
}

/// A neighbour solicitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Solicitation {
    /// IP source; `::` while the sender checks that nobody else has the target.
    pub source: Ipv6Addr,
    /// IP destination: the target, or its solicited-node address.
    pub destination: Ipv6Addr,
    /// The address to resolve.
    pub target: Ipv6Addr,
    /// Link-layer address of the sender.
    pub link_layer: Option<Mac>,
}

/// A neighbour advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// IP source.
    pub source: Ipv6Addr,
    /// IP destination: the sender of the solicitation, or all nodes.
    pub destination: Ipv6Addr,
    /// The resolved address.
    pub target: Ipv6Addr,
    /// Link-layer address of the target.
    pub link_layer: Option<Mac>,
    /// The sender is a router.
    pub router: bool,
    /// Whether it answers a solicitation.
    pub solicited: bool,
    /// Whether caches should replace another link-layer address of this target.
    pub overriding: bool,
}

/// Why a packet is not a valid solicitation or advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NeighbourError {
    /// Another packet: not IPv6, not ICMPv6, or another ICMPv6 type.
    #[error("not a neighbour solicitation or advertisement")]
    NotNeighbour,
    /// A fragment (RFC 6980 forbids them).
    #[error("neighbour discovery in a fragment")]
    Fragment,
    /// It was forwarded by a router, so it is not from this link.
    #[error("neighbour discovery with hop limit {0}, not 255")]
    HopLimit(u8),
    /// The ICMPv6 code is not zero.
    #[error("neighbour discovery with ICMPv6 code {0}")]
    Code(u8),
    /// Shorter than its fixed part.
    #[error("neighbour discovery message truncated")]
    Truncated,
    /// The checksum is wrong.
    #[error("neighbour discovery with a wrong checksum")]
    Checksum,
    /// From a multicast address (RFC 4291 section 2.7).
    #[error("neighbour discovery from the multicast address {0}")]
    MulticastSource(Ipv6Addr),
    /// The target is a multicast address.
    #[error("neighbour discovery for the multicast address {0}")]
    MulticastTarget(Ipv6Addr),
    /// An option of length zero, or one that exceeds the packet.
    #[error("neighbour discovery option {kind} with a wrong length")]
    OptionLength {
        /// Type of the option.
        kind: u8,
    },
    /// A solicitation from `::` with a link-layer address, or to another destination than the
    /// target's solicited-node address.
    #[error("solicitation from :: that is not duplicate address detection")]
    Unspecified,
    /// An advertisement to a multicast address that claims to be solicited.
    #[error("solicited advertisement to a multicast address")]
    SolicitedMulticast,
}

impl Neighbour {
    /// Parses a whole IPv6 packet (RFC 4861 sections 7.1.1 and 7.1.2). Bytes after its length, such
    /// as the padding of a frame, are ignored.
    pub fn parse(packet: &[u8]) -> Result<Neighbour, NeighbourError> {
        use NeighbourError as Error;
        let ip = IpPacket::parse(packet).map_err(|_| Error::NotNeighbour)?;
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (ip.src, ip.dst) else {
            return Err(Error::NotNeighbour);
        };
        let message = &packet[ip.header_len..ip.total_len];
        let kind = match message {
            [kind @ (SOLICITATION | ADVERTISEMENT), ..] if ip.protocol == PROTO_ICMPV6 => *kind,
            _ => return Err(Error::NotNeighbour),
        };
        if ip.fragment {
            return Err(Error::Fragment);
        }
        if packet[7] != HOP_LIMIT {
            return Err(Error::HopLimit(packet[7]));
        }
        let fixed: &[u8; MESSAGE_LEN] = message.first_chunk().ok_or(Error::Truncated)?;
        let pseudo = checksum::pseudo_header(ip.src, ip.dst, PROTO_ICMPV6, message.len());
        if checksum::fold(pseudo + checksum::sum(message)) != 0 {
            return Err(Error::Checksum);
        }
        if fixed[1] != 0 {
            return Err(Error::Code(fixed[1]));
        }
        if source.is_multicast() {
            return Err(Error::MulticastSource(source));
        }
        let target = Ipv6Addr::from(std::array::from_fn(|i| fixed[8 + i]));
        if target.is_multicast() {
            return Err(Error::MulticastTarget(target));
        }
        let options = &message[MESSAGE_LEN..];
        if kind == SOLICITATION {
            let solicitation = Solicitation {
                source,
                destination,
                target,
                link_layer: link_layer(options, SOURCE_LINK_LAYER)?,
            };
            solicitation.check().map(Neighbour::Solicitation)
        } else {
            let advertisement = Advertisement {
                source,
                destination,
                target,
                link_layer: link_layer(options, TARGET_LINK_LAYER)?,
                router: fixed[4] & ROUTER != 0,
                solicited: fixed[4] & SOLICITED != 0,
                overriding: fixed[4] & OVERRIDE != 0,
            };
            advertisement.check().map(Neighbour::Advertisement)
        }
    }
}

impl Solicitation {
    /// "Who has `target`? Tell `source` at `mac`.", to the target's solicited-node address.
    pub fn new(source: Ipv6Addr, mac: Mac, target: Ipv6Addr) -> Solicitation {
        Solicitation {
            source,
            destination: solicited_node(target),
            target,
            link_layer: Some(mac),
        }
    }

    /// "Does anybody use `target`?" (RFC 4862 section 5.4.2).
    pub fn duplicate_address_detection(target: Ipv6Addr) -> Solicitation {
        Solicitation {
            source: Ipv6Addr::UNSPECIFIED,
            destination: solicited_node(target),
            target,
            link_layer: None,
        }
    }

    /// Whether the sender has no address yet and checks that the target is free.
    pub fn is_duplicate_address_detection(&self) -> bool {
        self.source.is_unspecified()
    }

    /// The answer: the target is at `by` (RFC 4861 section 7.2.4). In duplicate address detection
    /// there is no sender to answer, and the answer goes to all nodes.
    ///
    /// It overrides other entries, as the owner's answer does. Clear [`Advertisement::overriding`]
    /// to answer for another host (section 7.2.8).
    pub fn answer(&self, by: Mac) -> Advertisement {
        let solicited = !self.is_duplicate_address_detection();
        Advertisement {
            source: self.target,
            destination: if solicited { self.source } else { ALL_NODES },
            target: self.target,
            link_layer: Some(by),
            router: false,
            solicited,
            overriding: true,
        }
    }

    /// Builds the whole IPv6 packet.
    pub fn to_packet(&self) -> Vec<u8> {
        let option = self.link_layer.map(|mac| (SOURCE_LINK_LAYER, mac));
        let addresses = (self.source, self.destination);
        build(SOLICITATION, 0, addresses, self.target, option)
    }

    fn check(self) -> Result<Solicitation, NeighbourError> {
        let elsewhere = self.destination != solicited_node(self.target);
        if self.source.is_unspecified() && (elsewhere || self.link_layer.is_some()) {
            return Err(NeighbourError::Unspecified);
        }
        Ok(self)
    }
}

impl Advertisement {
    /// "`target` is at `mac` now", to all nodes (RFC 4861 section 7.2.6).
    pub fn unsolicited(target: Ipv6Addr, mac: Mac) -> Advertisement {
        Advertisement {
            source: target,
            destination: ALL_NODES,
            target,
            link_layer: Some(mac),
            router: false,
            solicited: false,
            overriding: true,
        }
    }

    /// Builds the whole IPv6 packet.
    pub fn to_packet(&self) -> Vec<u8> {
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags = flag(self.router, ROUTER)
            | flag(self.solicited, SOLICITED)
            | flag(self.overriding, OVERRIDE);
        let option = self.link_layer.map(|mac| (TARGET_LINK_LAYER, mac));
        let addresses = (self.source, self.destination);
        build(ADVERTISEMENT, flags, addresses, self.target, option)
    }

    fn check(self) -> Result<Advertisement, NeighbourError> {
        if self.solicited && self.destination.is_multicast() {
            return Err(NeighbourError::SolicitedMulticast);
        }
        Ok(self)
    }
}

/// The solicited-node multicast address of `address` (RFC 4291 section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    let high = u16::from_be_bytes([0xff, a]);
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, high, u16::from_be_bytes([b, c]))
}

/// The Ethernet address of a multicast address (RFC 2464 section 7).
pub fn multicast_mac(address: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = address.octets();
    Mac([0x33, 0x33, a, b, c, d])
}

/// The Ethernet address in the first option of type `wanted`. All options are checked.
fn link_layer(mut options: &[u8], wanted: u8) -> Result<Option<Mac>, NeighbourError> {
    let mut found = None;
    while let [kind, rest @ ..] = options {
        let kind = *kind;
        let length = rest.first().map_or(0, |units| usize::from(*units) * 8);
        if length == 0 || length > options.len() {
            return Err(NeighbourError::OptionLength { kind });
        }
        let (option, behind) = options.split_at(length);
        if kind == wanted {
            // An Ethernet address fills one unit of eight bytes (RFC 2464 section 6).
            let &[_, _, a, b, c, d, e, f] = option else {
                return Err(NeighbourError::OptionLength { kind });
            };
            found = found.or(Some(Mac([a, b, c, d, e, f])));
        }
        options = behind;
    }
    Ok(found)
}

fn build(
    kind: u8,
    flags: u8,
    (source, destination): (Ipv6Addr, Ipv6Addr),
    target: Ipv6Addr,
    option: Option<(u8, Mac)>,
) -> Vec<u8> {
    let mut packet = vec![0; 40 + MESSAGE_LEN];
    packet[0] = 0x60;
    packet[6] = PROTO_ICMPV6;
    packet[7] = HOP_LIMIT;
    packet[8..24].copy_from_slice(&source.octets());
    packet[24..40].copy_from_slice(&destination.octets());
    packet[40] = kind;
    packet[44] = flags;
    packet[48..64].copy_from_slice(&target.octets());
    if let Some((kind, mac)) = option {
        packet.extend([kind, 1]);
        packet.extend(mac.0);
    }
    let total = packet.len();
    ip::set_length(&mut packet, 40, total, None);
    let pseudo =
        checksum::pseudo_header(source.into(), destination.into(), PROTO_ICMPV6, total - 40);
    let check = checksum::fold(pseudo + checksum::sum(&packet[40..]));
    packet[42..44].copy_from_slice(&check.to_be_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0x5e, 0x10, 0, 1]);

    fn address(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    /// fe80::1 (at 02:00:5e:10:00:01) asks for fe80::2: RFC 4861 section 4.3 by hand, its checksum
    /// by a calculator.
    fn solicitation() -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 32, 58, 255];
        packet.extend(address("fe80::1").octets());
        packet.extend(address("ff02::1:ff00:2").octets());
        packet.extend([135, 0, 0x1c, 0x87, 0, 0, 0, 0]);
        packet.extend(address("fe80::2").octets());
        packet.extend([1, 1, 2, 0, 0x5e, 0x10, 0, 1]);
        packet
    }

    /// The solicitation with one byte changed, and a correct checksum unless that byte was part of
    /// it.
    fn changed(at: usize, value: u8) -> Result<Neighbour, NeighbourError> {
        let mut packet = solicitation();
        let word = at & !1;
        let old = u16::from_be_bytes([packet[word], packet[word + 1]]);
        packet[at] = value;
        let new = u16::from_be_bytes([packet[word], packet[word + 1]]);
        let check = u16::from_be_bytes([packet[42], packet[43]]);
        let check = checksum::update(check, old, new);
        if at >= 8 && word != 42 {
            packet[42..44].copy_from_slice(&check.to_be_bytes());
        }
        Neighbour::parse(&packet)
    }

    #[test]
    fn a_solicitation_is_read_field_by_field() {
        let mut padded = solicitation();
        padded.resize(100, 0xaa);
        let expected = Solicitation {
            source: address("fe80::1"),
            destination: address("ff02::1:ff00:2"),
            target: address("fe80::2"),
            link_layer: Some(MAC),
        };
        assert!(!expected.is_duplicate_address_detection());
        assert_eq!(
            Neighbour::parse(&padded),
            Ok(Neighbour::Solicitation(expected))
        );
    }

    #[test]
    fn a_solicitation_is_encoded_as_specified() {
        let built = Solicitation::new(address("fe80::1"), MAC, address("fe80::2"));
        assert_eq!(built.to_packet(), solicitation());
    }

    #[test]
    fn an_answer_goes_to_the_sender() {
        let solicitation = Solicitation::new(address("fe80::1"), MAC, address("fe80::2"));
        let by = Mac([2, 0, 0x5e, 0x10, 0, 2]);
        let packet = solicitation.answer(by).to_packet();
        assert_eq!(packet[8..24], address("fe80::2").octets());
        assert_eq!(packet[24..40], address("fe80::1").octets());
        // Solicited and override: 0x40 | 0x20.
        assert_eq!(packet[40..42], [136, 0]);
        assert_eq!(packet[44..48], [0x60, 0, 0, 0]);
        assert_eq!(packet[64..], [2, 1, 2, 0, 0x5e, 0x10, 0, 2]);
        let Ok(Neighbour::Advertisement(read)) = Neighbour::parse(&packet) else {
            panic!("{:?}", Neighbour::parse(&packet));
        };
        assert_eq!(read, solicitation.answer(by));
    }

    #[test]
    fn duplicate_address_detection_is_answered_to_all() {
        let probe = Solicitation::duplicate_address_detection(address("2001:db8::7"));
        let packet = probe.to_packet();
        assert_eq!(packet.len(), 64);
        assert_eq!(
            Neighbour::parse(&packet),
            Ok(Neighbour::Solicitation(probe))
        );
        assert!(probe.is_duplicate_address_detection());
        let answer = probe.answer(MAC);
        assert_eq!(answer.destination, address("ff02::1"));
        assert!(!answer.solicited && answer.overriding);
    }

    #[test]
    fn an_unsolicited_advertisement_goes_to_all_nodes() {
        let advertisement = Advertisement::unsolicited(address("2001:db8::7"), MAC);
        assert_eq!(advertisement.to_packet()[44], 0x20);
        assert_eq!(
            Neighbour::parse(&advertisement.to_packet()),
            Ok(Neighbour::Advertisement(advertisement))
        );
    }

    /// RFC 4291 section 2.7.1 and RFC 2464 section 7 give these examples.
    #[test]
    fn multicast_addresses() {
        let solicited = solicited_node(address("4037::01:800:200e:8c6c"));
        assert_eq!(solicited, address("ff02::1:ff0e:8c6c"));
        let mac = multicast_mac(solicited);
        assert_eq!(mac, Mac([0x33, 0x33, 0xff, 0x0e, 0x8c, 0x6c]));
    }

    #[test]
    fn every_invalid_message_has_its_error() {
        use NeighbourError::*;
        assert_eq!(changed(7, 64), Err(HopLimit(64)));
        assert_eq!(changed(6, 17), Err(NotNeighbour));
        assert_eq!(changed(40, 134), Err(NotNeighbour));
        assert_eq!(changed(41, 1), Err(Code(1)));
        assert_eq!(changed(43, 0x88), Err(Checksum));
        let multicast = address("ff80::2");
        let source = address("ff80::1");
        assert_eq!(changed(8, 0xff), Err(MulticastSource(source)));
        assert_eq!(changed(48, 0xff), Err(MulticastTarget(multicast)));
        assert_eq!(changed(65, 0), Err(OptionLength { kind: 1 }));
        assert_eq!(changed(65, 2), Err(OptionLength { kind: 1 }));
        assert_eq!(Neighbour::parse(&[]), Err(NotNeighbour));
        let mut short = solicitation();
        short[5] = 23;
        assert_eq!(Neighbour::parse(&short), Err(Truncated));
        let mut fragment = solicitation();
        fragment[5] += 8;
        fragment[6] = 44;
        fragment.splice(40..40, [58, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(Neighbour::parse(&fragment), Err(Fragment));
    }

    #[test]
    fn an_option_of_another_kind_is_skipped_but_bounded() {
        let nonce = [14, 1, 9, 9, 9, 9, 9, 9];
        let own = [1, 1, 2, 0, 0x5e, 0x10, 0, 1];
        assert_eq!(link_layer(&[nonce, own].concat(), 1), Ok(Some(MAC)));
        assert_eq!(link_layer(&nonce, 1), Ok(None));
        let kind = 14;
        let error = Err(NeighbourError::OptionLength { kind });
        assert_eq!(link_layer(&nonce[..7], 1), error);
        assert_eq!(link_layer(&nonce[..1], 1), error);
    }

    #[test]
    fn a_link_layer_address_of_another_size_is_refused() {
        let kind = 1;
        let option = [1, 2, 2, 0, 0x5e, 0x10, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let error = NeighbourError::OptionLength { kind };
        assert_eq!(link_layer(&option, 1), Err(error));
    }

    #[test]
    fn an_unspecified_source_has_no_link_layer_address() {
        let mut probe = Solicitation::duplicate_address_detection(address("2001:db8::7"));
        probe.link_layer = Some(MAC);
        let error = Err(NeighbourError::Unspecified);
        assert_eq!(Neighbour::parse(&probe.to_packet()), error);
        probe.link_layer = None;
        probe.destination = probe.target;
        assert_eq!(Neighbour::parse(&probe.to_packet()), error);
    }

    #[test]
    fn a_multicast_advertisement_answers_nobody() {
        let mut advertisement = Advertisement::unsolicited(address("2001:db8::7"), MAC);
        advertisement.solicited = true;
        let error = Err(NeighbourError::SolicitedMulticast);
        assert_eq!(Neighbour::parse(&advertisement.to_packet()), error);
    }
}
