//! Names of members, tags and devices: DNS labels.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A DNS label (RFC 1123, section 2.1): 1 to 63 of `a-z 0-9 -`, no `-` at either end. Capital
/// letters are accepted and converted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// The name of a device in the mesh, `printer.site-a`: its own name and that of the member that it
/// is behind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceName {
    /// The device; unique behind its gateway.
    pub device: Name,
    /// The gateway.
    pub gateway: Name,
}

/// The name of a member or a device, as in the rules of a policy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PartyName {
    /// A member.
    Member(Name),
    /// A device behind a member.
    Device(DeviceName),
}

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

impl FromStr for DeviceName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (device, gateway) = text.split_once('.').unwrap_or((text, ""));
        Ok(Self {
            device: device.parse()?,
            gateway: gateway.parse()?,
        })
    }
}

impl FromStr for PartyName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.contains('.') {
            text.parse().map(PartyName::Device)
        } else {
            text.parse().map(PartyName::Member)
        }
    }
}

impl fmt::Display for PartyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PartyName::Member(name) => name.fmt(f),
            PartyName::Device(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.device, self.gateway)
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

    #[test]
    fn a_device_is_named_after_its_gateway() {
        let name: DeviceName = "Printer.site-a".parse().expect("a name");
        assert_eq!(name.device.as_str(), "printer");
        assert_eq!(name.gateway.as_str(), "site-a");
        assert_eq!(name.to_string(), "printer.site-a");
        for bad in ["", "printer", "printer.", ".site-a", "a.b.c", "a..b", "*.b"] {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad}");
        }
    }
}
