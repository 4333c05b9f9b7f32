//! Ethernet II frames (RFC 894, RFC 2464) with at most one IEEE 802.1Q tag. [`payload`] accepts two.

use std::fmt;
use std::str::FromStr;

/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of ARP.
pub const ETHERTYPE_ARP: u16 = 0x0806;
/// EtherType of an IEEE 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// Length in bytes of a header without a tag.
pub const HEADER_LEN: usize = 14;
/// Length in bytes of a header with one tag.
pub const TAGGED_HEADER_LEN: usize = 18;

/// Provider tags, which contain another tag: IEEE 802.1ad, and its vendor-specific predecessor.
const PROVIDER_TAGS: [u16; 2] = [0x88a8, 0x9100];
/// Values below are lengths (IEEE 802.3), not types.
const FIRST_TYPE: u16 = 0x0600;

/// An IEEE 802 address of 48 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// All stations.
    pub const BROADCAST: Mac = Mac([0xff; 6]);

    /// A group address; the broadcast address is one.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// The address of all stations.
    pub fn is_broadcast(self) -> bool {
        self == Mac::BROADCAST
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A text that is not a MAC address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no MAC address: write six pairs of hexadecimal digits with `:` or `-` between them, \
     as in 02:00:5e:10:00:01"
)]
pub struct MacParseError(pub String);

impl FromStr for Mac {
    type Err = MacParseError;

    /// Reads six pairs of hexadecimal digits, all separated by `:` or all by `-`.
    fn from_str(text: &str) -> Result<Mac, MacParseError> {
        let error = || MacParseError(text.to_owned());
        let bytes: &[u8; 17] = text.as_bytes().try_into().map_err(|_| error())?;
        let separator = bytes[2];
        if !matches!(separator, b':' | b'-') {
            return Err(error());
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|value| value as u8);
        let mut octets = [0; 6];
        for (i, octet) in octets.iter_mut().enumerate() {
            let at = 3 * i;
            if i > 0 && bytes[at - 1] != separator {
                return Err(error());
            }
            let (Some(high), Some(low)) = (digit(bytes[at]), digit(bytes[at + 1])) else {
                return Err(error());
            };
            *octet = high << 4 | low;
        }
        Ok(Mac(octets))
    }
}

/// The tag control information of IEEE 802.1Q.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Vlan {
    /// Priority (3 bits), drop eligible (1 bit), identifier (12 bits).
    pub tci: u16,
}

impl Vlan {
    /// VLAN identifier, 0 to 4095; 0 is a tag for its priority only.
    pub fn id(self) -> u16 {
        self.tci & 0x0fff
    }

    /// Priority code point, 0 to 7.
    pub fn priority(self) -> u8 {
        (self.tci >> 13) as u8
    }
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Destination address.
    pub dst: Mac,
    /// Source address.
    pub src: Mac,
    /// The tag, if there is one; see [`Ethernet::vlan_id`].
    pub vlan: Option<Vlan>,
    /// Type of the payload, at least 0x0600.
    pub ethertype: u16,
    /// Bytes before the payload: 14, or 18 with a tag.
    pub header_len: usize,
}

/// Returns the type (or IEEE 802.3 length) of a frame's payload, and the offset of the payload. At
/// most two VLAN tags, of any kind, are skipped; a third one counts as payload. `None` if the frame
/// is shorter than its header.
#[inline]
pub fn payload(frame: &[u8]) -> Option<(u16, usize)> {
    let mut at = HEADER_LEN;
    loop {
        let &[high, low] = frame.get(at - 2..at)?.first_chunk()?;
        let ethertype = u16::from_be_bytes([high, low]);
        let is_tag = ethertype == ETHERTYPE_VLAN || PROVIDER_TAGS.contains(&ethertype);
        if !is_tag || at == HEADER_LEN + 8 {
            return Some((ethertype, at));
        }
        at += 4;
    }
}

/// Why a frame cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EthernetError {
    /// Too short for its header.
    #[error("Ethernet frame truncated")]
    Truncated,
    /// A tag after a tag.
    #[error("Ethernet frame with two VLAN tags")]
    SecondTag,
    /// A provider tag (IEEE 802.1ad and its forerunner 0x9100).
    #[error("Ethernet frame with a provider VLAN tag ({0:#06x})")]
    ProviderTag(u16),
    /// An IEEE 802.3 length (spanning tree, IPX), not an EtherType.
    #[error("IEEE 802.3 frame of length {0}")]
    Length(u16),
}

impl Ethernet {
    /// Creates a header.
    pub fn new(dst: Mac, src: Mac, vlan: Option<Vlan>, ethertype: u16) -> Ethernet {
        let header_len = match vlan {
            None => HEADER_LEN,
            Some(_) => TAGGED_HEADER_LEN,
        };
        Ethernet {
            dst,
            src,
            vlan,
            ethertype,
            header_len,
        }
    }

    /// Parses the header at the start of `frame`.
    pub fn parse(frame: &[u8]) -> Result<Ethernet, EthernetError> {
        let Some(&[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1]) = frame.first_chunk()
        else {
            return Err(EthernetError::Truncated);
        };
        let mut ethertype = u16::from_be_bytes([t0, t1]);
        let mut vlan = None;
        if ethertype == ETHERTYPE_VLAN {
            let Some(&[tci0, tci1, t0, t1]) = frame[HEADER_LEN..].first_chunk() else {
                return Err(EthernetError::Truncated);
            };
            let tci = u16::from_be_bytes([tci0, tci1]);
            vlan = Some(Vlan { tci });
            ethertype = u16::from_be_bytes([t0, t1]);
        }
        match ethertype {
            ETHERTYPE_VLAN => Err(EthernetError::SecondTag),
            tag if PROVIDER_TAGS.contains(&tag) => Err(EthernetError::ProviderTag(tag)),
            length if length < FIRST_TYPE => Err(EthernetError::Length(length)),
            ethertype => Ok(Ethernet::new(
                Mac([d0, d1, d2, d3, d4, d5]),
                Mac([s0, s1, s2, s3, s4, s5]),
                vlan,
                ethertype,
            )),
        }
    }

    /// The VLAN of the frame, 1 to 4095. `None` without a tag or with a priority tag.
    pub fn vlan_id(&self) -> Option<u16> {
        self.vlan.map(Vlan::id).filter(|id| *id != 0)
    }

    /// Writes the header to the start of `out`, which must have [`TAGGED_HEADER_LEN`] bytes or,
    /// without a tag, [`HEADER_LEN`]. Returns the number of bytes written.
    pub fn write(&self, out: &mut [u8]) -> usize {
        out[..6].copy_from_slice(&self.dst.0);
        out[6..12].copy_from_slice(&self.src.0);
        let mut at = 12;
        if let Some(vlan) = self.vlan {
            out[12..14].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            out[14..16].copy_from_slice(&vlan.tci.to_be_bytes());
            at = 16;
        }
        out[at..at + 2].copy_from_slice(&self.ethertype.to_be_bytes());
        at + 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DST: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);
    const SRC: Mac = Mac([0x02, 0, 0x5e, 0x10, 0, 0xaf]);

    fn frame(types: &[u16]) -> Vec<u8> {
        let mut frame = [DST.0, SRC.0].concat();
        frame.extend(types.iter().flat_map(|word| word.to_be_bytes()));
        frame
    }

    #[test]
    fn a_mac_reads_with_colons_or_dashes_and_prints_with_colons() {
        for text in ["02:00:5e:10:00:af", "02-00-5E-10-00-AF"] {
            assert_eq!(text.parse(), Ok(SRC));
        }
        assert_eq!(SRC.to_string(), "02:00:5e:10:00:af");
    }

    #[test]
    fn an_invalid_mac_address_is_quoted_in_the_error() {
        for text in [
            "",
            "02:00:5e:10:00",
            "02:00:5e:10:00:af:01",
            "02:00-5e:10:00:af",
            "02.00.5e.10.00.af",
            "02:00:5e:10:00:+f",
            "02:00:5e:10:00:ag",
            "02:00:5e:10:0:0af",
            "é2:00:5e:10:00:a",
        ] {
            let error = text.parse::<Mac>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn group_addresses_have_their_first_bit_set() {
        assert!(DST.is_multicast() && !DST.is_broadcast());
        assert!(Mac::BROADCAST.is_multicast() && Mac::BROADCAST.is_broadcast());
        assert!(!SRC.is_multicast());
    }

    #[test]
    fn a_plain_frame() {
        let header = Ethernet::parse(&frame(&[ETHERTYPE_IPV6])).unwrap();
        assert_eq!((header.dst, header.src), (DST, SRC));
        assert_eq!((header.ethertype, header.header_len), (0x86dd, 14));
        assert_eq!((header.vlan, header.vlan_id()), (None, None));
    }

    #[test]
    fn a_tag_is_taken_apart() {
        // Priority 5, drop eligible indicator set, VLAN 42.
        let header = Ethernet::parse(&frame(&[0x8100, 0xb02a, ETHERTYPE_IPV4])).unwrap();
        let vlan = header.vlan.unwrap();
        assert_eq!((vlan.id(), vlan.priority()), (42, 5));
        assert_eq!(header.vlan_id(), Some(42));
        assert_eq!((header.ethertype, header.header_len), (0x0800, 18));
    }

    #[test]
    fn a_priority_tag_belongs_to_no_vlan() {
        let header = Ethernet::parse(&frame(&[0x8100, 0xe000, ETHERTYPE_ARP])).unwrap();
        assert_eq!((header.vlan_id(), header.header_len), (None, 18));
    }

    #[test]
    fn every_parse_error_has_its_variant() {
        use EthernetError::*;
        for (types, error) in [
            (&[][..], Truncated),
            (&[0x8100], Truncated),
            (&[0x8100, 1], Truncated),
            (&[0x8100, 1, 0x8100, 2, 0x0800], SecondTag),
            (&[0x88a8, 1, 0x8100, 2, 0x0800], ProviderTag(0x88a8)),
            (&[0x8100, 1, 0x88a8, 2, 0x0800], ProviderTag(0x88a8)),
            (&[0x0027], Length(0x27)),
            (&[0x8100, 1, 0x05ff], Length(0x5ff)),
        ] {
            assert_eq!(Ethernet::parse(&frame(types)), Err(error));
        }
    }

    #[test]
    fn the_payload_is_behind_at_most_two_tags() {
        for (types, found) in [
            (&[0x0800][..], Some((0x0800, 14))),
            (&[0x8100, 1, 0x0800], Some((0x0800, 18))),
            (&[0x88a8, 1, 0x8100, 2, 0x86dd], Some((0x86dd, 22))),
            (
                &[0x88a8, 1, 0x8100, 2, 0x8100, 3, 0x0800],
                Some((0x8100, 22)),
            ),
            (&[0x0027], Some((0x27, 14))),
            (&[], None),
            (&[0x8100], None),
            (&[0x8100, 1], None),
        ] {
            assert_eq!(payload(&frame(types)), found, "{types:x?}");
        }
    }

    #[test]
    fn a_header_is_written_as_it_was_read() {
        for types in [&[0x0806][..], &[0x8100, 0xb02a, 0x0800]] {
            let frame = frame(types);
            let mut out = [0; TAGGED_HEADER_LEN];
            let length = Ethernet::parse(&frame).unwrap().write(&mut out);
            assert_eq!(out[..length], frame);
        }
    }
}
