//! Abilities of the kernel, found by trying at run time and never by its version.

use std::fmt;
use std::io;

/// An ability of the kernel or of a device, or the reason why it is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ability {
    /// The kernel accepted the request.
    Present,
    /// The ability is missing, with the reason for people.
    Absent(String),
}

impl Ability {
    /// Whether the ability can be used.
    pub fn is_present(&self) -> bool {
        matches!(self, Ability::Present)
    }

    /// Returns why it is missing; `None` if it is present.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Ability::Present => None,
            Ability::Absent(reason) => Some(reason),
        }
    }

    /// Missing because the configuration turns it off.
    pub(crate) fn turned_off() -> Self {
        Ability::Absent("turned off by configuration".into())
    }

    /// Missing because the kernel refused `action`.
    pub(crate) fn refused(action: &str, error: &io::Error) -> Self {
        Ability::Absent(format!("the kernel refused {action}: {error}"))
    }

    /// Converts the outcome of `action`.
    pub(crate) fn from_outcome<T>(action: &str, outcome: nix::Result<T>) -> Self {
        match outcome {
            Ok(_) => Ability::Present,
            Err(errno) => Ability::refused(action, &errno.into()),
        }
    }
}

impl fmt::Display for Ability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ability::Present => f.write_str("yes"),
            Ability::Absent(reason) => write!(f, "no ({reason})"),
        }
    }
}

/// Writes `name: ability` pairs separated by commas, for the `Display` of capability tables.
pub(crate) fn write_table(
    f: &mut fmt::Formatter<'_>,
    table: &[(&'static str, &Ability)],
) -> fmt::Result {
    for (position, (name, ability)) in table.iter().enumerate() {
        let separator = if position == 0 { "" } else { ", " };
        write!(f, "{separator}{name}: {ability}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_shows_its_reason() {
        let outcome: nix::Result<()> = Err(nix::errno::Errno::EINVAL);
        let ability = Ability::from_outcome("TUN_F_USO4", outcome);
        assert!(
            ability
                .to_string()
                .starts_with("no (the kernel refused TUN_F_USO4: Invalid argument")
        );
    }
}
