//! The wg-quick syntax: `[Section]`, `Key = value`, `#` to the end of the line.
//!
//! Names of sections and keys are case-insensitive. A key may be repeated: its values are combined,
//! or the last one counts. Commas and spaces separate the values of lists. `wg` and `wg-quick` read
//! files in the same way.

use super::lookup;
use super::report::{Reporter, did_you_mean, word};
use super::schema::{Section, SectionKind, Site};
use super::source::Syntax;

/// Maximum length of a name that may be a misspelt section, in bytes.
const MAX_HEADER: usize = 16;

/// Splits a text into sections and entries; reports faults.
pub(super) fn split(text: &str, reporter: &mut Reporter<'_>) -> Vec<Section> {
    let mut sections: Vec<Section> = Vec::new();
    // `false` in an unknown section, whose keys are skipped.
    let mut known = true;
    for (index, raw) in text.lines().enumerate() {
        let line = index + 1;
        let content = raw.split('#').next().unwrap_or_default().trim();
        if content.starts_with('[') {
            let kind = header(content, line, reporter);
            known = kind.is_some();
            sections.extend(kind.map(|kind| Section::new(kind, line)));
        } else if !content.is_empty() && known {
            if sections.is_empty() {
                reporter.error(
                    Site::line(line),
                    "this line is outside of a section",
                    "start with `[Interface]`, then a `[Peer]` for every peer",
                );
                // Most likely the header is missing.
                sections.push(Section::new(SectionKind::Interface, line));
            }
            if let Some(section) = sections.last_mut() {
                entry(content, section, line, reporter);
            }
        }
    }
    sections
}

/// Parses a section's header. A misspelt one is reported, and read as the section that was meant.
fn header(content: &str, line: usize, reporter: &mut Reporter<'_>) -> Option<SectionKind> {
    let plain = |text: &str| text.trim_matches(['[', ']']).to_ascii_lowercase();
    let name: String = content.chars().filter(|c| !c.is_whitespace()).collect();
    let given = plain(&name);
    let distances = SectionKind::ALL.map(|kind| {
        let header = kind.header(Syntax::Ini);
        let distance = match given.len() {
            0..=MAX_HEADER => strsim::damerau_levenshtein(&given, &plain(header)),
            _ => usize::MAX,
        };
        (distance, header, kind)
    });
    let nearest = distances.into_iter().min_by_key(|(distance, ..)| *distance);
    let near = nearest.filter(|(distance, ..)| *distance <= 2);
    let near_header = near.map(|(_, header, _)| header);
    if !near_header.is_some_and(|header| header.eq_ignore_ascii_case(&name)) {
        let kinds = "there are five kinds of sections: `[Interface]`, `[Peer]`, `[Gateway]`, `[Device]` and `[Remote]`";
        reporter.error(
            Site::line(line),
            format!("unknown section `{}`", word(&name)),
            did_you_mean(near_header, kinds),
        );
    }
    near.map(|(.., kind)| kind)
}

/// Parses one `Key = value`.
fn entry(content: &str, section: &mut Section, line: usize, reporter: &mut Reporter<'_>) {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    // A line without `=` may contain one at the end of a key.
    let parts = content.split_once('=');
    let parts = parts.map(|(name, value)| (name.trim(), value.trim()));
    let named = parts.filter(|(name, _)| !name.is_empty() && name.chars().all(is_name));
    let Some((name, value)) = named else {
        reporter.error(
            Site::line(line),
            "this line is not `Key = value`",
            "write `Key = value`; comments begin with `#`",
        );
        let first = content.split_whitespace().next().unwrap_or_default();
        let first = first.trim_end_matches(':');
        if let Some(key) = lookup::find(first, Syntax::Ini).find(|key| key.section == section.kind)
        {
            section.add(key, line, None, reporter);
        }
        return;
    };
    let Some(key) = section.find(name, line, reporter) else {
        return;
    };
    let items = if !value.is_empty() {
        Some(key.items(value, line))
    } else if key.is_list() {
        Some(Vec::new())
    } else {
        reporter.error(
            key.at(line),
            "has no value",
            "write a value after the `=`, or remove the line",
        );
        None
    };
    section.add(key, line, items, reporter);
}
