//! Writes a configuration as text in either syntax, for `SaveConfig`, bug reports and tests.
//!
//! Only values that differ from the default are written. The text contains keys, so it is wiped on
//! drop. The text for a bug report contains none.

use zeroize::Zeroizing;

use super::sections::{Device, Gateway, Interface, Peer, Remote};
use super::source::Syntax;
use super::text::Text;
use super::types::Config;

/// A value that the wg-quick syntax cannot express.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{key}` has a `#` or a line break, which a .conf file cannot hold: keep this configuration in a .toml file"
)]
pub struct NotInIni {
    key: &'static str,
}

impl Config {
    /// Returns the configuration in wg-quick's syntax.
    pub fn to_ini(&self) -> Result<Zeroizing<String>, NotInIni> {
        let text = self.to_text(Syntax::Ini, false);
        match text.not_in_ini {
            Some(key) => Err(NotInIni { key: key.ini }),
            None => Ok(text.out),
        }
    }

    /// Returns the configuration in TOML.
    pub fn to_toml(&self) -> Zeroizing<String> {
        self.to_text(Syntax::Toml, false).out
    }

    /// Returns the configuration for readers on other hosts: without keys, the credential and the
    /// commands of hooks. The keys' names remain, each with `(redacted)`. The text is for people:
    /// it cannot be parsed again.
    pub fn to_redacted(&self, syntax: Syntax) -> String {
        self.to_text(syntax, true).out.to_string()
    }

    fn to_text(&self, syntax: Syntax, is_redacted: bool) -> Text {
        let mut text = Text {
            syntax,
            is_redacted,
            out: Zeroizing::default(),
            not_in_ini: None,
        };
        Interface::write(self, &mut text);
        for peer in &self.peers {
            Peer::write(peer, &mut text);
        }
        if let Some(gateway) = &self.gateway {
            Gateway::write(gateway, &mut text);
            for device in &gateway.devices {
                Device::write(device, &mut text);
            }
            for remote in &gateway.remotes {
                Remote::write(remote, &mut text);
            }
        }
        text
    }
}
