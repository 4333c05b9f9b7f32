//! The wg-quick syntax: `[Section]`, `Key = value`, `#` to the end of the line.
//!
//! Names of sections and keys are case-insensitive. A key may be repeated: its values are combined,
//! or the last one counts. Commas and spaces separate the values of lists. `wg` and `wg-quick` read
//! files in the same way.

use zeroize::Zeroizing;

use super::report::{Reporter, did_you_mean, empty_list, unknown_key, word};
use super::schema::{self, Document, Entry, Item, Section, SectionKind, Shape};
use super::source::Syntax;

/// Maximum length of a name that may be a misspelt section, in bytes.
const MAX_HEADER: usize = 16;

/// Splits a text into sections and entries; reports faults.
pub(super) fn split(text: &str, reporter: &mut Reporter<'_>) -> Document {
    let mut document = Document::default();
    // `false` in an unknown section, whose keys are skipped.
    let mut known = true;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, raw) in text.lines().enumerate() {
        let line = index + 1;
        let content = raw.split_once('#').map_or(raw, |(before, _)| before);
        let content = content.trim();
        if content.is_empty() {
            continue;
        }
        if content.starts_with('[') {
            let kind = header(content, line, reporter);
            known = kind.is_some();
            document
                .sections
                .extend(kind.map(|kind| Section::new(kind, line)));
            continue;
        }
        if !known {
            continue;
        }
        if document.sections.is_empty() {
            let help = "start with `[Interface]`, then a `[Peer]` for every peer";
            reporter.error(line, "this line is outside of a section", help);
            // Most likely the header is missing.
            document
                .sections
                .push(Section::new(SectionKind::Interface, line));
        }
        if let Some(section) = document.sections.last_mut() {
            let entry = entry(content, section.kind, line, reporter);
            section.entries.extend(entry);
        }
    }
    document
}

/// Parses a section's header. A misspelt one is reported, and read as the section that was meant.
fn header(content: &str, line: usize, reporter: &mut Reporter<'_>) -> Option<SectionKind> {
    let name: String = content.chars().filter(|c| !c.is_whitespace()).collect();
    let plain = name.trim_matches(['[', ']']).to_ascii_lowercase();
    let sections = SectionKind::ALL.into_iter();
    let sections = sections.filter_map(|kind| Some((kind.header(Syntax::Ini)?, kind)));
    let near = sections
        .map(|(header, kind)| {
            let known = header.trim_matches(['[', ']']).to_ascii_lowercase();
            let distance = if plain.len() <= MAX_HEADER {
                strsim::damerau_levenshtein(&plain, &known)
            } else {
                usize::MAX
            };
            (distance, header, kind)
        })
        .min_by_key(|(distance, ..)| *distance)
        .filter(|(distance, ..)| *distance <= 2);
    if let Some((_, header, kind)) = near
        && header.eq_ignore_ascii_case(&name)
    {
        return Some(kind);
    }
    let help = did_you_mean(
        near.map(|(_, header, _)| header),
        "there are five kinds of sections: `[Interface]`, `[Peer]`, `[Gateway]`, `[Device]` and `[Remote]`",
    );
    let message = format!("unknown section `{}`", word(&name));
    reporter.error(line, &message, help);
    near.map(|(.., kind)| kind)
}

/// Parses one `Key = value`.
fn entry(
    content: &str,
    section: SectionKind,
    line: usize,
    reporter: &mut Reporter<'_>,
) -> Option<Entry> {
    let name_like = |name: &str| {
        !name.is_empty()
            && name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
    };
    let parts = content
        .split_once('=')
        .map(|(name, value)| (name.trim(), value.trim()));
    // A line without `=` may contain one at the end of a key.
    let Some((name, value)) = parts.filter(|(name, _)| name_like(name)) else {
        let help = "write `Key = value`; comments begin with `#`";
        reporter.error(line, "this line is not `Key = value`", help);
        let first = content.split_whitespace().next().unwrap_or_default();
        let meant = schema::find(first.trim_end_matches(':'), section, reporter.syntax)?;
        return Some(Entry::invalid(meant.key, line));
    };
    let Some(spec) = schema::find(name, section, reporter.syntax) else {
        return unknown_key(reporter, name, section, line);
    };
    let item = |text: &str| Item {
        text: Zeroizing::new(text.to_owned()),
        line,
    };
    let items = match spec.shape {
        Shape::One if value.is_empty() => {
            let help = "write a value after the `=`, or remove the line";
            reporter.key_error(spec.key, line, "has no value", help);
            Vec::new()
        }
        Shape::List | Shape::Lines if value.is_empty() && spec.key.must_have_values() => {
            empty_list(reporter, spec.key, line);
            Vec::new()
        }
        // An empty list is equivalent to none.
        Shape::List | Shape::Lines if value.is_empty() => return None,
        Shape::One => vec![item(value)],
        Shape::Lines => vec![item(value)],
        Shape::List => list(value).map(item).collect(),
    };
    Some(Entry {
        key: spec.key,
        line,
        items,
    })
}

/// Returns the elements of a list: commas and spaces separate, empty elements are skipped.
pub(super) fn list(value: &str) -> impl Iterator<Item = &str> {
    value
        .split([',', ' ', '\t'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
}
