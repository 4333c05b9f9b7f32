//! Keys in the format of `wg`: base64 of 32 bytes.
//!
//! [`parse_private_key`], [`parse_public_key`] and [`parse_preshared_key`] decode a key;
//! [`encode_key`] encodes one. A private key is clamped when it is read (RFC 7748, section 5), as
//! in the kernel and `wg`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

pub use seikan_proto::keys::{PresharedKey, PrivateKey, PublicKey};

/// Length of every key in bytes.
pub const KEY_LEN: usize = 32;
/// Length of every key in base64, with its padding.
pub const KEY_BASE64_LEN: usize = 44;

/// Error of a key. It does not contain the text, which may be secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The text does not have 44 characters.
    #[error("has {0} characters, a key has {KEY_BASE64_LEN}")]
    Length(usize),
    /// A character (counted from 1) is not in the base64 alphabet.
    #[error("has a character that is not base64 (A-Z a-z 0-9 + /) at position {0}")]
    Alphabet(usize),
    /// The last characters cannot end a base64 text of 32 bytes.
    #[error("does not end like the base64 of {KEY_LEN} bytes")]
    Ending,
}

/// Reads a private key and clamps it.
pub fn parse_private_key(text: &str) -> Result<PrivateKey, KeyError> {
    let mut bytes = decode(text)?;
    clamp(&mut bytes);
    Ok(PrivateKey::from_bytes(*bytes))
}

/// Reads a public key.
pub fn parse_public_key(text: &str) -> Result<PublicKey, KeyError> {
    Ok(PublicKey::from_bytes(*decode(text)?))
}

/// Reads a preshared key.
pub fn parse_preshared_key(text: &str) -> Result<PresharedKey, KeyError> {
    Ok(PresharedKey::from_bytes(*decode(text)?))
}

/// Returns the base64 of a key's bytes, wiped on drop.
pub fn encode_key(bytes: &[u8; KEY_LEN]) -> Zeroizing<String> {
    Zeroizing::new(STANDARD.encode(bytes))
}

/// Clamps 32 bytes to a scalar of X25519.
fn clamp(bytes: &mut [u8; KEY_LEN]) {
    bytes[0] &= 0b1111_1000;
    bytes[31] = (bytes[31] & 0b0111_1111) | 0b0100_0000;
}

/// Decodes 44 characters of base64 to 32 bytes.
fn decode(text: &str) -> Result<Zeroizing<[u8; KEY_LEN]>, KeyError> {
    let text = text.trim();
    let chars = text.chars().count();
    if chars != KEY_BASE64_LEN {
        return Err(KeyError::Length(chars));
    }
    let in_alphabet = |c: char| c.is_ascii_alphanumeric() || c == '+' || c == '/';
    if let Some(at) = text
        .chars()
        .take(KEY_BASE64_LEN - 1)
        .position(|c| !in_alphabet(c))
    {
        return Err(KeyError::Alphabet(at + 1));
    }
    // 36: the library needs space for whole groups of three bytes.
    let mut bytes = Zeroizing::new([0u8; 36]);
    match STANDARD.decode_slice(text, bytes.as_mut_slice()) {
        Ok(KEY_LEN) => {
            let mut key = Zeroizing::new([0u8; KEY_LEN]);
            key.copy_from_slice(&bytes[..KEY_LEN]);
            Ok(key)
        }
        _ => Err(KeyError::Ending),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_key_is_clamped_when_read() {
        let key = parse_private_key(&encode_key(&[0xff; 32])).unwrap();
        assert_eq!((key.as_bytes()[0], key.as_bytes()[31]), (0xf8, 0x7f));
    }

    #[test]
    fn a_wrong_text_names_its_fault() {
        let good = encode_key(&[7; 32]);
        let fault = |text: &str| parse_public_key(text).unwrap_err();
        assert_eq!(fault(&good[..43]), KeyError::Length(43));
        let at = good.find('c').unwrap();
        assert_eq!(
            fault(&good.replacen('c', "!", 1)),
            KeyError::Alphabet(at + 1)
        );
        // 'd' before the padding would leave bits over that 32 bytes do not have.
        assert_eq!(fault(&format!("{}d=", &good[..42])), KeyError::Ending);
        assert_eq!(fault(&format!("{}A", &good[..43])), KeyError::Ending);
    }
}
