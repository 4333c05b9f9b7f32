//! Finds the keys of a section by their names, and suggests one for a name that is unknown.

use super::report::{Reporter, did_you_mean, word};
use super::schema::{Entry, Form, Item, KeySpec, Section, SectionKind, Site};
use super::sections::KEYS;
use super::source::Syntax;

/// Maximum length of a word that may be a misspelt key, in bytes.
const LONGEST_SLIP: usize = 32;

impl Section {
    /// Adds a key with its values; `None` if they are invalid, which was reported.
    pub fn add(
        &mut self,
        key: &'static KeySpec,
        line: usize,
        items: Option<Vec<Item>>,
        reporter: &mut Reporter<'_>,
    ) {
        if items.as_ref().is_some_and(Vec::is_empty) {
            // An empty list is equivalent to none.
            if key.form != Form::Rules {
                return;
            }
            let name = reporter.name(key);
            reporter.error(
                key.at(line),
                "is empty",
                format!("write which hosts are allowed; without `{name}` all are"),
            );
        }
        let items = items.unwrap_or_default();
        self.entries.push(Entry { key, line, items });
    }

    /// Returns the key of this section with a name (INI: case-insensitive). Reports another name,
    /// and marks the key that was meant, if that is clear, as invalid.
    pub fn find(
        &mut self,
        name: &str,
        line: usize,
        reporter: &mut Reporter<'_>,
    ) -> Option<&'static KeySpec> {
        let syntax = reporter.syntax;
        let named: Vec<_> = find(name, syntax).collect();
        if let Some(own) = named.iter().find(|key| key.section == self.kind) {
            return Some(own);
        }
        let Some(elsewhere) = named.first() else {
            self.unknown_key(name, line, reporter);
            return None;
        };
        let locations: Vec<_> = named
            .iter()
            .map(|key| key.section.location(syntax))
            .collect();
        reporter.error(
            elsewhere.at(line),
            format!("does not belong {}", self.kind.location(syntax)),
            format!(
                "`{}` belongs {}",
                elsewhere.name(syntax),
                locations.join(" or ")
            ),
        );
        None
    }

    fn unknown_key(&mut self, name: &str, line: usize, reporter: &mut Reporter<'_>) {
        let syntax = reporter.syntax;
        let own = KEYS.iter().filter(|key| key.section == self.kind);
        let known: Vec<_> = own.map(|key| key.name(syntax)).collect();
        let near = nearest(name, self.kind);
        let otherwise = format!("known keys: {}", known.join(", "));
        let help = did_you_mean(near.map(|key| key.name(syntax)), otherwise);
        let location = self.kind.location(syntax);
        let message = format!("unknown key `{}` {location}", word(name));
        reporter.named_error(Site { line, key: near }, name, &message, help);
        if let Some(key) = near.filter(|key| key.section == self.kind) {
            self.add(key, line, None, reporter);
        }
    }
}

/// Returns the keys of all sections with a name (INI: case-insensitive).
pub(super) fn find(name: &str, syntax: Syntax) -> impl Iterator<Item = &'static KeySpec> {
    KEYS.iter().filter(move |key| match syntax {
        Syntax::Ini => key.ini.eq_ignore_ascii_case(name),
        Syntax::Toml => key.toml == name,
    })
}

/// Returns the key with the most similar name, preferably of the section, if it is similar enough.
fn nearest(name: &str, section: SectionKind) -> Option<&'static KeySpec> {
    let plain = |text: &str| text.replace(['-', '_', ' '], "").to_ascii_lowercase();
    // Time and memory of the distance grow with the product of the lengths.
    if name.len() > LONGEST_SLIP {
        return None;
    }
    let given = plain(name);
    let candidates = KEYS.iter().filter_map(|key| {
        let known = plain(key.ini);
        let distance = strsim::damerau_levenshtein(&given, &known);
        let rank = if distance <= (known.len() / 3).max(1) {
            distance
        } else if given.len() >= 4 && known.contains(&given) {
            // "keepalive" has a large distance to "PersistentKeepalive", but is clear.
            usize::MAX
        } else {
            return None;
        };
        Some((rank, key.section != section, key))
    });
    let nearest = candidates.min_by_key(|(rank, elsewhere, _)| (*rank, *elsewhere));
    nearest.map(|(.., key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_key_finds_its_neighbour() {
        let near = |name| nearest(name, SectionKind::Peer).map(|key| key.ini);
        assert_eq!(near("AllowedIP"), Some("AllowedIPs"));
        assert_eq!(near("Adress"), Some("Address"));
        assert_eq!(near("PersistantKeepAlive"), Some("PersistentKeepalive"));
        assert_eq!(near("keepalive"), Some("PersistentKeepalive"));
        assert_eq!(near("Colour"), None);
        assert_eq!(near("listen_port"), Some("ListenPort"));
    }
}
