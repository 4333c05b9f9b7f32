//! Names of members and tags: DNS labels.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A DNS label (RFC 1123, section 2.1): 1 to 63 of `a-z 0-9 -`, no `-` at either end. Capital
/// letters are accepted and converted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Why a text is not a name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Empty or too long.
    #[error("a name has 1 to {max} characters, not {0}", max = Name::MAX_LEN)]
    Length(usize),
    /// A character that is not allowed in a label, or not at this position.
    #[error("a name is made of a-z, 0-9 and, between them, `-`; not {0:?} at position {1}")]
    Character(char, usize),
}

impl Name {
    /// Maximum length of a name in characters.
    pub const MAX_LEN: usize = 63;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let length = text.chars().count();
        if !(1..=Self::MAX_LEN).contains(&length) {
            return Err(NameError::Length(length));
        }
        for (index, c) in text.chars().enumerate() {
            let inside = index > 0 && index + 1 < length;
            if !(c.is_ascii_alphanumeric() || c == '-' && inside) {
                return Err(NameError::Character(c, index + 1));
            }
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_names_and_nothing_else_is() {
        for good in ["a", "7", "web-1", "a--b", &"x".repeat(63)] {
            assert_eq!(good.parse::<Name>().expect(good).as_str(), good);
        }
        assert_eq!("Web-1".parse::<Name>().expect("capitals").as_str(), "web-1");
        for bad in ["", "-a", "a-", "a.b", "a b", "ä", "a_b", &"x".repeat(64)] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
        assert_eq!("ab_".parse::<Name>(), Err(NameError::Character('_', 3)));
    }
}
