//! Tokens and credentials: random secrets, of which a coordinator stores only digests.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use crate::rng::Rng;

/// Random bytes in each.
pub(super) const SECRET_LEN: usize = 24;

/// Why a text is not a token or credential. The error never contains the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is `{prefix}` followed by 32 of A-Z a-z 0-9 - _")]
pub struct SecretError {
    prefix: &'static str,
}

/// SHA-256 of a secret. A reader of a coordinator's database learns no secret from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    fn of(bytes: &[u8]) -> Self {
        let mut own = [0; 32];
        own.copy_from_slice(digest::digest(&digest::SHA256, bytes).as_ref());
        Self(own)
    }
}

macro_rules! secret {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        /// Erased when dropped; [`Self::reveal`] is the only way to see it.
        #[derive(Clone)]
        pub struct $name(Zeroizing<[u8; SECRET_LEN]>);

        impl $name {
            const PREFIX: &'static str = $prefix;

            /// Generates a new one.
            pub fn generate(rng: &mut dyn Rng) -> Self {
                let mut bytes = Zeroizing::new([0; SECRET_LEN]);
                rng.fill(&mut *bytes);
                Self(bytes)
            }

            /// The secret as text, to be handed over.
            pub fn reveal(&self) -> Zeroizing<String> {
                let text = Zeroizing::new(URL_SAFE_NO_PAD.encode(&*self.0));
                Zeroizing::new(format!("{}{}", Self::PREFIX, *text))
            }

            /// The digest to store.
            pub fn digest(&self) -> Digest {
                Digest::of(&*self.0)
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.0.ct_eq(&*other.0).into()
            }
        }

        impl FromStr for $name {
            type Err = SecretError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let wrong = SecretError { prefix: Self::PREFIX };
                let text = text.strip_prefix(Self::PREFIX).ok_or(wrong)?;
                let mut bytes = Zeroizing::new([0; SECRET_LEN]);
                match URL_SAFE_NO_PAD.decode_slice(text, &mut *bytes) {
                    Ok(SECRET_LEN) => Ok(Self(bytes)),
                    _ => Err(wrong),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(redacted)"))
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.reveal())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = Zeroizing::new(String::deserialize(from)?);
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

secret! {
    /// A token that admits a host to a mesh, once or several times, as it was created.
    Token, "skt_"
}
secret! {
    /// The credential of a member for its coordinator.
    Credential, "skc_"
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counting(u8);

    impl Rng for Counting {
        fn fill(&mut self, destination: &mut [u8]) {
            for byte in destination {
                *byte = self.0;
                self.0 = self.0.wrapping_add(1);
            }
        }
    }

    #[test]
    fn a_secret_is_shown_by_reveal_only() {
        let token = Token::generate(&mut Counting(0));
        let text = token.reveal();
        // Bytes 0 to 23 in base64url (RFC 4648, section 5).
        assert_eq!(*text, "skt_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX");
        assert_eq!(text.parse::<Token>().expect("its own text"), token);
        assert_eq!(format!("{token:?}"), "Token(redacted)");
        // SHA-256 of the bytes 0 to 23, by Python's hashlib.
        let digest: String = token
            .digest()
            .0
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert!(digest.starts_with("1d64add2"), "{digest}");
    }

    #[test]
    fn other_texts_are_refused_without_being_repeated() {
        let good = Token::generate(&mut Counting(0)).reveal();
        let long = format!("{}A", *good);
        let credential = good.replace("skt_", "skc_");
        for bad in ["", "skt_", &good[..20], &long, &credential, "skt_!!"] {
            let error = bad.parse::<Token>().expect_err(bad).to_string();
            assert!(!error.contains("AAEC"), "{error}");
        }
    }
}
