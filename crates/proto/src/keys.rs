//! Keys as types: a key of one kind cannot be passed for another, and a secret one cannot be
//! printed by accident.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use subtle::ConstantTimeEq as _;
use x25519_dalek::StaticSecret;
use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::constants::KEY_LEN;
use crate::mac::MacKey;
use crate::protocol::Protocol;
use crate::rng::Rng;

/// A peer's static X25519 public key; its identity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; KEY_LEN]);

impl PublicKey {
    /// The key with these bytes. Any 32 bytes are a key; one of low order fails in the handshake.
    pub const fn from_bytes(bytes: [u8; KEY_LEN]) -> Self {
        PublicKey(bytes)
    }

    /// The key's bytes.
    pub const fn as_bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }

    /// Derives the key of mac1 in messages to the holder of this key.
    pub fn mac1_key(&self, protocol: Protocol) -> MacKey {
        MacKey::derive(protocol.mac1_label(), &self.0)
    }
}

/// Not the base64 of 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a public key is the base64 of {KEY_LEN} bytes, 44 characters")]
pub struct NotAKey;

/// Parses the format of `Display`.
impl FromStr for PublicKey {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // `decode_slice` requires the capacity that the length of the text allows, including
        // padding.
        let mut bytes = [0; KEY_LEN + 1];
        match STANDARD.decode_slice(text, &mut bytes) {
            Ok(KEY_LEN) => bytes.first_chunk().copied().map(PublicKey).ok_or(NotAKey),
            _ => Err(NotAKey),
        }
    }
}

/// The whole key in base64, as `wg` prints it.
impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

/// The first and last four characters of the base64 form, as WireGuard's logs show peers.
impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let base64 = STANDARD.encode(self.0);
        write!(f, "{}…{}", &base64[..4], &base64[39..43])
    }
}

/// A static X25519 private key. Erased when dropped, never printed.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct PrivateKey([u8; KEY_LEN]);

impl PrivateKey {
    /// The key with these bytes; clamped (RFC 7748, section 5) when used, as `wg` does.
    pub const fn from_bytes(bytes: [u8; KEY_LEN]) -> Self {
        PrivateKey(bytes)
    }

    /// A new key, clamped as `wg genkey` prints it.
    pub fn generate(rng: &mut dyn Rng) -> Self {
        let mut bytes = [0; KEY_LEN];
        rng.fill(&mut bytes);
        bytes[0] &= 248;
        bytes[31] = bytes[31] & 127 | 64;
        PrivateKey(bytes)
    }

    /// The public key that belongs to it.
    pub fn public(&self) -> PublicKey {
        PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(self.0)).to_bytes())
    }

    /// The key's bytes, for storing it and for the handshake.
    pub const fn as_bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey(redacted)")
    }
}

/// A symmetric key mixed into the handshake besides Diffie-Hellman; all zeros stands for none.
#[derive(Clone, Default, Zeroize, ZeroizeOnDrop)]
pub struct PresharedKey([u8; KEY_LEN]);

impl PresharedKey {
    /// The key with these bytes.
    pub const fn from_bytes(bytes: [u8; KEY_LEN]) -> Self {
        PresharedKey(bytes)
    }

    /// A new random key.
    pub fn generate(rng: &mut dyn Rng) -> Self {
        let mut bytes = [0; KEY_LEN];
        rng.fill(&mut bytes);
        PresharedKey(bytes)
    }

    /// The key's bytes.
    pub const fn as_bytes(&self) -> &[u8; KEY_LEN] {
        &self.0
    }

    /// Whether a key is set, that is, not all zeros.
    pub fn is_set(&self) -> bool {
        !bool::from(self.0.ct_eq(&[0; KEY_LEN]))
    }
}

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() {
            "PresharedKey(redacted)"
        } else {
            "PresharedKey(none)"
        })
    }
}

/// This host's static key pair, with what every received handshake message needs precomputed.
#[derive(Clone)]
pub struct Identity {
    private: PrivateKey,
    public: PublicKey,
    mac1_keys: [MacKey; 2],
}

impl Identity {
    /// The identity of `private`.
    pub fn new(private: PrivateKey) -> Self {
        let public = private.public();
        let mac1_keys =
            [Protocol::WireGuard, Protocol::Native].map(|protocol| public.mac1_key(protocol));
        Identity {
            private,
            public,
            mac1_keys,
        }
    }

    /// The private key.
    pub const fn private(&self) -> &PrivateKey {
        &self.private
    }

    /// The public key.
    pub const fn public(&self) -> &PublicKey {
        &self.public
    }

    /// The key of mac1 in messages sent to this host.
    pub const fn mac1_key(&self, protocol: Protocol) -> &MacKey {
        &self.mac1_keys[protocol as usize]
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("public", &self.public)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7748, section 6.1: Alice's key pair.
    const PRIVATE: [u8; 32] = [
        0x77, 0x07, 0x6d, 0x0a, 0x73, 0x18, 0xa5, 0x7d, 0x3c, 0x16, 0xc1, 0x72, 0x51, 0xb2, 0x66,
        0x45, 0xdf, 0x4c, 0x2f, 0x87, 0xeb, 0xc0, 0x99, 0x2a, 0xb1, 0x77, 0xfb, 0xa5, 0x1d, 0xb9,
        0x2c, 0x2a,
    ];
    const PUBLIC: [u8; 32] = [
        0x85, 0x20, 0xf0, 0x09, 0x89, 0x30, 0xa7, 0x54, 0x74, 0x8b, 0x7d, 0xdc, 0xb4, 0x3e, 0xf7,
        0x5a, 0x0d, 0xbf, 0x3a, 0x0d, 0x26, 0x38, 0x1a, 0xf4, 0xeb, 0xa4, 0xa9, 0x8e, 0xaa, 0x9b,
        0x4e, 0x6a,
    ];

    #[test]
    fn public_key_of_rfc_7748() {
        assert_eq!(PrivateKey::from_bytes(PRIVATE).public().as_bytes(), &PUBLIC);
    }

    #[test]
    fn a_public_key_shows_its_ends_only() {
        let key = PublicKey::from_bytes(PUBLIC);
        assert_eq!(
            key.to_string(),
            "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo="
        );
        assert_eq!(format!("{key:?}"), "hSDw…bTmo");
    }

    #[test]
    fn debug_output_has_no_secret() {
        let identity = Identity::new(PrivateKey::from_bytes(PRIVATE));
        assert_eq!(
            format!("{identity:?}"),
            "Identity { public: hSDw…bTmo, .. }"
        );
        assert_eq!(format!("{:?}", identity.private()), "PrivateKey(redacted)");
        let psk = PresharedKey::from_bytes(PRIVATE);
        assert_eq!(format!("{psk:?}"), "PresharedKey(redacted)");
        assert_eq!(
            format!("{:?}", PresharedKey::default()),
            "PresharedKey(none)"
        );
    }

    #[test]
    fn a_generated_key_is_clamped() {
        let key = PrivateKey::generate(&mut crate::rng::testing::Scripted(vec![0xff; 32]));
        assert_eq!((key.as_bytes()[0], key.as_bytes()[31]), (0xf8, 0x7f));
    }
}
