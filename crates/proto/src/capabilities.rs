//! Capabilities of a native peer: the payload of its initiation (an offer) and response (a choice).
//!
//! ```text
//! payload = TLV*      TLV = type u16 | length u16 | value of `length` bytes   (all little-endian)
//! type bit 15: mandatory. A receiver that does not know the type refuses the handshake if the bit
//! is set, and ignores the TLV otherwise. The other 15 bits are the type, in strictly rising order.
//! ```
//! | type | value |
//! |---|---|
//! | 0x8001 version | u8, from 1 |
//! | 0x8002 ciphers | u8 each, best first: 1 AES-256-GCM, 2 ChaCha20-Poly1305; unknown ones are skipped; a choice has one |
//! | 0x0003 max lanes | u8, from 1; 1 if absent |
//! | 0x0004 inner MTU | u16 bytes, from 576; 1420 if absent |
//! | 0x0005 features | u64 of flag bits; 0 if absent |
//! | 0x8006 mode | u8: 1 Ethernet frames; IP packets if absent |
//!
//! Payloads are encrypted and part of the handshake hash, so neither offer nor choice can be
//! altered in transit: a downgrade is impossible.

use crate::constants::MAX_PAYLOAD_LEN;
use crate::mode::Mode;

/// Version of the native protocol that this implementation speaks.
pub const VERSION: u8 = 1;
/// Inner MTU of a peer that does not state one, in bytes: the customary one of WireGuard.
pub const DEFAULT_INNER_MTU: u16 = 1420;
/// Minimum inner MTU in bytes: every IPv4 host accepts it (RFC 1122, section 3.3.2).
pub const MIN_INNER_MTU: u16 = 576;
/// Feature: accepts TCP slices, and packets whose transport checksum the receiver has to complete.
pub const FEATURE_OFFLOAD: u64 = 1;
/// Feature: sends and accepts parity records ([`crate::native::repair`]).
pub const FEATURE_REPAIR: u64 = 2;

const MANDATORY: u16 = 0x8000;
const TYPE_VERSION: u16 = MANDATORY | 1;
const TYPE_CIPHERS: u16 = MANDATORY | 2;
const TYPE_MAX_LANES: u16 = 3;
const TYPE_INNER_MTU: u16 = 4;
const TYPE_FEATURES: u16 = 5;
const TYPE_MODE: u16 = MANDATORY | 6;
/// Value of [`TYPE_MODE`] for Ethernet frames.
const MODE_ETHERNET: u8 = 1;

/// An AEAD for transport data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Cipher {
    /// AES-256-GCM (NIST SP 800-38D); the faster where the processor has AES instructions.
    Aes256Gcm = 1,
    /// ChaCha20-Poly1305 (RFC 8439); WireGuard's, fast everywhere.
    ChaCha20Poly1305 = 2,
    /// No encryption, to measure the cost of everything else. No release build has it.
    #[cfg(feature = "null-cipher")]
    Null = 255,
}

impl Cipher {
    /// The usual name of the AEAD.
    pub fn name(self) -> &'static str {
        match self {
            Cipher::Aes256Gcm => "AES-256-GCM",
            Cipher::ChaCha20Poly1305 => "ChaCha20-Poly1305",
            #[cfg(feature = "null-cipher")]
            Cipher::Null => "none",
        }
    }

    fn from_wire(code: u8) -> Option<Self> {
        match code {
            1 => Some(Cipher::Aes256Gcm),
            2 => Some(Cipher::ChaCha20Poly1305),
            #[cfg(feature = "null-cipher")]
            255 => Some(Cipher::Null),
            _ => None,
        }
    }
}

/// The offer of one end, or its choice from an offer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Version of the native protocol, from 1.
    pub version: u8,
    /// Ciphers, best first. A host without AES instructions lists AES-256-GCM last or leaves it
    /// out.
    pub ciphers: Vec<Cipher>,
    /// Maximum number of lanes (UDP 4-tuples), from 1.
    pub max_lanes: u8,
    /// Largest inner packet that this end accepts, in bytes.
    pub inner_mtu: u16,
    /// Feature flags.
    pub features: u64,
    /// Content at this end: IP packets or Ethernet frames.
    pub mode: Mode,
}

/// The agreed parameters of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The lower version.
    pub version: u8,
    /// The responder's choice.
    pub cipher: Cipher,
    /// The lower number of lanes.
    pub max_lanes: u8,
    /// The flags that both ends have set.
    pub features: u64,
}

/// Why capabilities could not be parsed or agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapabilityError {
    /// The payload ends within a TLV.
    #[error("capabilities are truncated")]
    Truncated,
    /// The payload is longer than a handshake message carries.
    #[error("capabilities of {0} bytes, more than {MAX_PAYLOAD_LEN}")]
    TooLong(usize),
    /// A type repeats or is out of order.
    #[error("capability {0:#06x} is repeated or out of order")]
    Order(u16),
    /// The peer requires a capability that is unknown here.
    #[error(
        "the peer requires capability {0:#06x}, which this version does not know: upgrade this \
         end or turn the feature off at the peer"
    )]
    UnknownMandatory(u16),
    /// A known type with an invalid value.
    #[error("capability {0:#06x} has an invalid value")]
    Malformed(u16),
    /// A required type is missing.
    #[error("capability {0:#06x} is missing")]
    Missing(u16),
    /// The two ends have no cipher in common.
    #[error("no cipher in common: allow another cipher at one of the ends")]
    NoCommonCipher,
    /// One end carries Ethernet frames, the other IP packets.
    #[error("{}: set the same `mode` at both ends", other_mode(*.peer))]
    OtherMode {
        /// The mode of the peer.
        peer: Mode,
    },
    /// The responder chose a cipher that was not offered, or not exactly one.
    #[error("the peer's choice of cipher is not one of those offered to it")]
    NotOffered,
}

impl Capabilities {
    /// Whether slices and partial checksums are accepted.
    pub fn offload(&self) -> bool {
        self.features & FEATURE_OFFLOAD != 0
    }

    /// Whether losses are repaired.
    pub fn repair(&self) -> bool {
        self.features & FEATURE_REPAIR != 0
    }

    /// Encodes the capabilities as a payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(64);
        let mut put = |kind: u16, value: &[u8]| {
            payload.extend(kind.to_le_bytes());
            payload.extend((value.len() as u16).to_le_bytes());
            payload.extend(value);
        };
        let ciphers: Vec<u8> = self.ciphers.iter().map(|&cipher| cipher as u8).collect();
        put(TYPE_VERSION, &[self.version]);
        put(TYPE_CIPHERS, &ciphers);
        put(TYPE_MAX_LANES, &[self.max_lanes]);
        put(TYPE_INNER_MTU, &self.inner_mtu.to_le_bytes());
        put(TYPE_FEATURES, &self.features.to_le_bytes());
        if self.mode == Mode::Ethernet {
            put(TYPE_MODE, &[MODE_ETHERNET]);
        }
        payload
    }

    /// Parses a payload.
    pub fn parse(payload: &[u8]) -> Result<Self, CapabilityError> {
        if payload.len() > MAX_PAYLOAD_LEN {
            return Err(CapabilityError::TooLong(payload.len()));
        }
        let (mut version, mut ciphers) = (None, None);
        let (mut max_lanes, mut inner_mtu, mut features) = (1, DEFAULT_INNER_MTU, 0);
        let mut mode = Mode::Ip;
        let mut rest = payload;
        let mut previous = None;
        while !rest.is_empty() {
            let (kind, value, tail) = split_tlv(rest)?;
            rest = tail;
            let number = kind & !MANDATORY;
            if previous.is_some_and(|previous| number <= previous) {
                return Err(CapabilityError::Order(kind));
            }
            previous = Some(number);
            let malformed = CapabilityError::Malformed(kind);
            match number | MANDATORY {
                TYPE_VERSION => {
                    version = Some(number_u8(value).filter(|&v| v >= 1).ok_or(malformed)?);
                }
                TYPE_CIPHERS => {
                    let mut known = Vec::new();
                    for cipher in value.iter().filter_map(|&code| Cipher::from_wire(code)) {
                        if known.contains(&cipher) {
                            return Err(malformed);
                        }
                        known.push(cipher);
                    }
                    ciphers = Some(known);
                }
                LANES => max_lanes = number_u8(value).filter(|&n| n >= 1).ok_or(malformed)?,
                MTU => {
                    let mtu = value
                        .try_into()
                        .map(u16::from_le_bytes)
                        .map_err(|_| malformed)?;
                    inner_mtu = Some(mtu)
                        .filter(|&mtu| mtu >= MIN_INNER_MTU)
                        .ok_or(malformed)?;
                }
                FEATURES => {
                    features = value
                        .try_into()
                        .map(u64::from_le_bytes)
                        .map_err(|_| malformed)?;
                }
                TYPE_MODE => match number_u8(value) {
                    Some(MODE_ETHERNET) => mode = Mode::Ethernet,
                    _ => return Err(malformed),
                },
                _ if kind & MANDATORY != 0 => return Err(CapabilityError::UnknownMandatory(kind)),
                _ => {}
            }
        }
        Ok(Capabilities {
            version: version.ok_or(CapabilityError::Missing(TYPE_VERSION))?,
            ciphers: ciphers.ok_or(CapabilityError::Missing(TYPE_CIPHERS))?,
            max_lanes,
            inner_mtu,
            features,
            mode,
        })
    }

    /// The responder's side: returns the answer to `offer` and the agreed parameters.
    ///
    /// The cipher is the first choice of both ends if they agree. Otherwise it is
    /// ChaCha20-Poly1305, because one end has no AES instructions; failing that, any cipher that
    /// both have.
    pub fn choose(&self, offer: &Capabilities) -> Result<(Capabilities, Agreed), CapabilityError> {
        self.check_mode(offer)?;
        let common = || {
            offer
                .ciphers
                .iter()
                .copied()
                .filter(|cipher| self.ciphers.contains(cipher))
        };
        let cipher = match (offer.ciphers.first(), self.ciphers.first()) {
            (Some(theirs), Some(ours)) if theirs == ours => Some(*ours),
            _ => common()
                .find(|&cipher| cipher == Cipher::ChaCha20Poly1305)
                .or(common().next()),
        };
        let cipher = cipher.ok_or(CapabilityError::NoCommonCipher)?;
        let agreed = self.agree(offer, cipher);
        let answer = Capabilities {
            version: agreed.version,
            ciphers: vec![cipher],
            ..self.clone()
        };
        Ok((answer, agreed))
    }

    /// The initiator's side: returns the parameters agreed by this offer and the peer's `choice`.
    pub fn accept(&self, choice: &Capabilities) -> Result<Agreed, CapabilityError> {
        self.check_mode(choice)?;
        match choice.ciphers[..] {
            [cipher] if self.ciphers.contains(&cipher) && choice.version <= self.version => {
                Ok(self.agree(choice, cipher))
            }
            _ => Err(CapabilityError::NotOffered),
        }
    }

    fn check_mode(&self, peer: &Capabilities) -> Result<(), CapabilityError> {
        if self.mode == peer.mode {
            Ok(())
        } else {
            Err(CapabilityError::OtherMode { peer: peer.mode })
        }
    }

    fn agree(&self, peer: &Capabilities, cipher: Cipher) -> Agreed {
        Agreed {
            version: self.version.min(peer.version),
            cipher,
            max_lanes: self.max_lanes.min(peer.max_lanes),
            features: self.features & peer.features,
        }
    }
}

// The mandatory bit states the sender's intent and is not part of the type: known types are
// recognised with or without it.
const LANES: u16 = TYPE_MAX_LANES | MANDATORY;
const MTU: u16 = TYPE_INNER_MTU | MANDATORY;
const FEATURES: u16 = TYPE_FEATURES | MANDATORY;

fn other_mode(peer: Mode) -> &'static str {
    match peer {
        Mode::Ethernet => "the peer carries Ethernet frames and this end IP packets",
        Mode::Ip => "the peer carries IP packets and this end Ethernet frames",
    }
}

/// Splits off the first TLV.
fn split_tlv(bytes: &[u8]) -> Result<(u16, &[u8], &[u8]), CapabilityError> {
    let (&[a, b, c, d], rest) = bytes
        .split_first_chunk()
        .ok_or(CapabilityError::Truncated)?;
    let len = usize::from(u16::from_le_bytes([c, d]));
    let (value, rest) = rest
        .split_at_checked(len)
        .ok_or(CapabilityError::Truncated)?;
    Ok((u16::from_le_bytes([a, b]), value, rest))
}

fn number_u8(value: &[u8]) -> Option<u8> {
    match *value {
        [number] => Some(number),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Cipher::*;
    use super::*;
    use proptest::prelude::*;

    fn capabilities(ciphers: &[Cipher]) -> Capabilities {
        Capabilities {
            version: 1,
            ciphers: ciphers.to_vec(),
            max_lanes: 4,
            inner_mtu: 65535,
            features: 0b101,
            mode: Mode::Ip,
        }
    }

    /// Version 1 and both ciphers, written out by hand.
    const MINIMAL: [u8; 11] = [0x01, 0x80, 1, 0, 1, 0x02, 0x80, 2, 0, 1, 2];

    fn with(tail: &[u8]) -> Result<Capabilities, CapabilityError> {
        Capabilities::parse(&[&MINIMAL[..], tail].concat())
    }

    #[test]
    fn the_encoding_is_the_documented_one() {
        let expected = [
            &MINIMAL[..],
            &[0x03, 0, 1, 0, 4],
            &[0x04, 0, 2, 0, 0xff, 0xff],
            &[0x05, 0, 8, 0, 0b101, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(
            capabilities(&[Aes256Gcm, ChaCha20Poly1305]).encode(),
            expected.concat()
        );
    }

    #[test]
    fn ethernet_is_stated_and_refused_by_the_other_mode() {
        let ip = capabilities(&[Aes256Gcm]);
        let ethernet = Capabilities {
            mode: Mode::Ethernet,
            ..ip.clone()
        };
        let encoded = ethernet.encode();
        assert_eq!(encoded, [&ip.encode()[..], &[0x06, 0x80, 1, 0, 1]].concat());
        assert_eq!(Capabilities::parse(&encoded), Ok(ethernet.clone()));
        let (answer, _) = ethernet.choose(&ethernet).unwrap();
        assert_eq!(answer.mode, Mode::Ethernet);
        assert!(ethernet.accept(&answer).is_ok());
        for (own, peer) in [(&ip, &ethernet), (&ethernet, &ip)] {
            let refused = CapabilityError::OtherMode { peer: peer.mode };
            assert_eq!(own.choose(peer).unwrap_err(), refused);
            assert_eq!(own.accept(peer).unwrap_err(), refused);
            assert!(refused.to_string().contains("`mode`"), "{refused}");
        }
        for value in [0, 2] {
            let malformed = Err(CapabilityError::Malformed(0x8006));
            assert_eq!(with(&[0x06, 0x80, 1, 0, value]), malformed);
        }
    }

    #[test]
    fn absent_capabilities_have_defaults() {
        let parsed = Capabilities::parse(&MINIMAL).unwrap();
        assert_eq!(
            (parsed.max_lanes, parsed.inner_mtu, parsed.features),
            (1, 1420, 0)
        );
    }

    #[test]
    fn unknown_optional_types_are_ignored() {
        assert_eq!(
            with(&[0x77, 0x01, 3, 0, 9, 9, 9]),
            Capabilities::parse(&MINIMAL)
        );
    }

    #[test]
    fn unknown_mandatory_types_are_reported() {
        let error = with(&[0x77, 0x81, 0, 0]).unwrap_err();
        assert_eq!(error, CapabilityError::UnknownMandatory(0x8177));
        assert!(error.to_string().contains("0x8177"), "{error}");
    }

    #[test]
    fn known_types_are_known_with_the_mandatory_bit() {
        assert_eq!(with(&[0x03, 0x80, 1, 0, 9]).unwrap().max_lanes, 9);
    }

    #[test]
    fn repeated_and_disordered_types_are_refused() {
        let lanes = [0x03, 0, 1, 0, 4];
        assert_eq!(
            with(&[lanes, lanes].concat()),
            Err(CapabilityError::Order(3))
        );
        // Twice the same number, once with the mandatory bit.
        assert_eq!(with(&[0x02, 0, 1, 0, 1]), Err(CapabilityError::Order(2)));
        let unknown = [0x77, 0, 0, 0];
        assert_eq!(
            with(&[unknown, unknown].concat()),
            Err(CapabilityError::Order(0x77))
        );
    }

    #[test]
    fn every_truncation_is_refused() {
        let whole = capabilities(&[Aes256Gcm]).encode();
        for len in 0..whole.len() {
            match Capabilities::parse(&whole[..len]) {
                // Cut between two TLVs.
                Ok(_) => assert!([10, 15, 21].contains(&len), "{len}"),
                Err(CapabilityError::Missing(_)) => assert!([0, 5].contains(&len), "{len}"),
                Err(error) => assert_eq!(error, CapabilityError::Truncated),
            }
        }
    }

    #[test]
    fn impossible_values_are_refused() {
        for (tail, kind) in [
            (&[0x03, 0, 1, 0, 0][..], 3),
            (&[0x03, 0, 2, 0, 1, 1], 3),
            (&[0x04, 0, 2, 0, 0x3f, 0x02], 4),
            (&[0x04, 0, 1, 0, 5], 4),
            (&[0x05, 0, 4, 0, 0, 0, 0, 0], 5),
        ] {
            assert_eq!(
                with(tail),
                Err(CapabilityError::Malformed(kind)),
                "{tail:?}"
            );
        }
        let twice = [0x01, 0x80, 1, 0, 1, 0x02, 0x80, 2, 0, 1, 1];
        assert_eq!(
            Capabilities::parse(&twice),
            Err(CapabilityError::Malformed(0x8002))
        );
    }

    #[test]
    fn ciphers_to_come_are_skipped() {
        let payload = [0x01, 0x80, 1, 0, 1, 0x02, 0x80, 3, 0, 77, 2, 1];
        let parsed = Capabilities::parse(&payload).unwrap();
        assert_eq!(parsed.ciphers, [ChaCha20Poly1305, Aes256Gcm]);
    }

    #[test]
    fn the_cipher_is_aes_only_where_both_prefer_it() {
        let (aes, chacha) = (
            &[Aes256Gcm, ChaCha20Poly1305][..],
            &[ChaCha20Poly1305, Aes256Gcm][..],
        );
        for (offer, ours, expected) in [
            (aes, aes, Some(Aes256Gcm)),
            (aes, chacha, Some(ChaCha20Poly1305)),
            (chacha, aes, Some(ChaCha20Poly1305)),
            (chacha, chacha, Some(ChaCha20Poly1305)),
            (aes, &[ChaCha20Poly1305], Some(ChaCha20Poly1305)),
            (chacha, &[Aes256Gcm], Some(Aes256Gcm)),
            (&[Aes256Gcm], &[ChaCha20Poly1305], None),
            (&[], aes, None),
        ] {
            let chosen = capabilities(ours).choose(&capabilities(offer));
            assert_eq!(
                chosen.ok().map(|(_, agreed)| agreed.cipher),
                expected,
                "{offer:?} {ours:?}"
            );
        }
    }

    #[test]
    fn both_ends_agree_on_the_lesser_of_each() {
        let initiator = capabilities(&[Aes256Gcm, ChaCha20Poly1305]);
        let responder = Capabilities {
            max_lanes: 2,
            inner_mtu: 9000,
            features: 0b110,
            ..initiator.clone()
        };
        let (answer, theirs) = responder.choose(&initiator).unwrap();
        let ours = initiator
            .accept(&Capabilities::parse(&answer.encode()).unwrap())
            .unwrap();
        assert_eq!((ours.max_lanes, ours.features), (2, 0b100));
        assert_eq!(theirs, ours);
    }

    #[test]
    fn a_choice_outside_the_offer_is_refused() {
        let offer = capabilities(&[ChaCha20Poly1305]);
        for choice in [&[][..], &[Aes256Gcm], &[ChaCha20Poly1305, Aes256Gcm]] {
            let refused = offer.accept(&capabilities(choice));
            assert_eq!(refused, Err(CapabilityError::NotOffered), "{choice:?}");
        }
        let newer = Capabilities {
            version: 2,
            ..offer.clone()
        };
        assert_eq!(offer.accept(&newer), Err(CapabilityError::NotOffered));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(payload in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Capabilities::parse(&payload);
        }

        #[test]
        fn capabilities_round_trip(
            version in 1u8..,
            order in 0usize..5,
            max_lanes in 1u8..,
            inner_mtu in MIN_INNER_MTU..,
            features: u64,
            ethernet: bool,
        ) {
            let orders = [
                &[][..], &[Aes256Gcm], &[ChaCha20Poly1305],
                &[Aes256Gcm, ChaCha20Poly1305], &[ChaCha20Poly1305, Aes256Gcm],
            ];
            let ciphers = orders[order].to_vec();
            let mode = if ethernet { Mode::Ethernet } else { Mode::Ip };
            let said = Capabilities { version, ciphers, max_lanes, inner_mtu, features, mode };
            prop_assert_eq!(Capabilities::parse(&said.encode()), Ok(said));
        }
    }
}
