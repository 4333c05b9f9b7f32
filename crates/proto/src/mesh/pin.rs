//! Certificate pins: how a member trusts its coordinator without a certificate authority, by a
//! digest that it got beforehand.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

const PREFIX: &str = "sha256:";
const DIGEST_LEN: usize = 32;

/// SHA-256 of a certificate in DER. As text it is `sha256:` and the digest in base64url without
/// padding (RFC 4648, section 5), 43 characters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pin([u8; DIGEST_LEN]);

/// Why a text is not a pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a certificate pin is `{PREFIX}` followed by 43 of A-Z a-z 0-9 - _")]
pub struct PinError;

impl Pin {
    /// The pin of the certificate with these bytes.
    pub fn of_certificate(der: &[u8]) -> Self {
        let mut own = [0; DIGEST_LEN];
        own.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
        Self(own)
    }
}

impl FromStr for Pin {
    type Err = PinError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_prefix(PREFIX).ok_or(PinError)?;
        // `decode_slice` requires the capacity that the length of the text allows.
        let mut bytes = [0; DIGEST_LEN + 1];
        match URL_SAFE_NO_PAD.decode_slice(text, &mut bytes) {
            Ok(DIGEST_LEN) => bytes.first_chunk().copied().map(Self).ok_or(PinError),
            _ => Err(PinError),
        }
    }
}

impl TryFrom<String> for Pin {
    type Error = PinError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Pin> for String {
    fn from(pin: Pin) -> String {
        pin.to_string()
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(self.0))
    }
}

/// The same as `Display`.
impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-2, appendix B.1: the digest of "abc", in base64url.
    const ABC: &str = "sha256:ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0";

    #[test]
    fn a_pin_is_the_digest_of_the_certificates_der() {
        let pin = Pin::of_certificate(b"abc");
        assert_eq!(pin.to_string(), ABC);
        assert_eq!(ABC.parse(), Ok(pin));
        let json = serde_json::to_string(&pin).expect("text");
        assert_eq!(json, format!("\"{ABC}\""));
        assert_eq!(serde_json::from_str::<Pin>(&json).expect("again"), pin);
    }

    #[test]
    fn other_texts_are_no_pins() {
        let bare = &ABC["sha256:".len()..];
        for bad in ["", "sha256:", bare, &ABC[..ABC.len() - 1]] {
            assert_eq!(bad.parse::<Pin>(), Err(PinError), "{bad}");
        }
        for bad in [format!("{ABC}="), format!("{ABC}A"), ABC.replace('_', "/")] {
            assert_eq!(bad.parse::<Pin>(), Err(PinError), "{bad}");
        }
    }
}
