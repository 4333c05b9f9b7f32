//! The wg-quick syntax: `[Section]`, `Key = value`, `#` to the end of the line.
//!
//! Sections and keys in any case; a key may come again (its values add up, or the last one counts); values with commas or
//! spaces are lists. All of it as `wg` and `wg-quick` read it.

use zeroize::Zeroizing;

use super::report::{Reporter, did_you_mean, unknown_key, word};
use super::schema::{self, Document, Entry, Item, Section, SectionKind, Shape};

/// Where the line under the cursor belongs.
enum Place {
    /// Before any section.
    Nowhere,
    /// In the last section of the document.
    Known(SectionKind),
    /// In a section that was reported: its keys are passed over.
    Unknown,
}

/// Splits a text into sections and entries; reports what it cannot split.
pub(super) fn split(text: &str, reporter: &mut Reporter<'_>) -> Document {
    let mut document = Document::default();
    let mut place = Place::Nowhere;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (index, raw) in text.lines().enumerate() {
        let line = index + 1;
        let content = raw.split_once('#').map_or(raw, |(before, _)| before).trim();
        if content.is_empty() {
            continue;
        }
        if content.starts_with('[') {
            place = match header(content, line, reporter) {
                Some(kind) => {
                    document.sections.push(Section {
                        kind,
                        line,
                        entries: Vec::new(),
                    });
                    Place::Known(kind)
                }
                None => Place::Unknown,
            };
            continue;
        }
        match place {
            Place::Known(kind) => {
                if let (Some(entry), Some(section)) = (
                    entry(content, kind, line, reporter),
                    document.sections.last_mut(),
                ) {
                    section.entries.push(entry);
                }
            }
            Place::Nowhere => {
                let help = "start with `[Interface]`, then a `[Peer]` for every peer";
                reporter.error(line, None, "there is no section above this line", help);
                place = Place::Unknown;
            }
            Place::Unknown => {}
        }
    }
    document
}

/// Reads a section's header.
fn header(content: &str, line: usize, reporter: &mut Reporter<'_>) -> Option<SectionKind> {
    let name: String = content.chars().filter(|c| !c.is_whitespace()).collect();
    match name.to_ascii_lowercase().as_str() {
        "[interface]" => return Some(SectionKind::Interface),
        "[peer]" => return Some(SectionKind::Peer),
        _ => {}
    }
    let plain = name.trim_matches(['[', ']']).to_ascii_lowercase();
    let near = ["Interface", "Peer"]
        .into_iter()
        .find(|known| strsim::damerau_levenshtein(&plain, &known.to_ascii_lowercase()) <= 2)
        .map(|known| format!("[{known}]"));
    let help = did_you_mean(
        near.as_deref(),
        "there are two kinds of sections: `[Interface]` and `[Peer]`",
    );
    let message = format!("unknown section `{}`", word(&name));
    reporter.error(line, None, &message, help);
    None
}

/// Reads one `Key = value`.
fn entry(
    content: &str,
    section: SectionKind,
    line: usize,
    reporter: &mut Reporter<'_>,
) -> Option<Entry> {
    let Some((name, value)) = content.split_once('=') else {
        let help = "write `Key = value`; comments begin with `#`";
        reporter.error(line, None, "this line has no `=`", help);
        return None;
    };
    let (name, value) = (name.trim(), value.trim());
    let spec = match schema::find(name, reporter.syntax) {
        Some(spec) if spec.section == section => spec,
        _ => {
            unknown_key(reporter, name, section, line);
            return None;
        }
    };
    let item = |text: &str| Item {
        text: Zeroizing::new(text.to_owned()),
        line,
    };
    let items = match spec.shape {
        Shape::One if value.is_empty() => {
            let message = format!("`{}` has no value", spec.name(reporter.syntax));
            let help = "write a value after the `=`, or take the line out";
            reporter.error(line, Some(spec.key), &message, help);
            return None;
        }
        Shape::One => vec![item(value)],
        Shape::Lines if value.is_empty() => Vec::new(),
        Shape::Lines => vec![item(value)],
        Shape::List => list(value).map(item).collect(),
    };
    Some(Entry {
        key: spec.key,
        line,
        items,
    })
}

/// The parts of a list: commas and spaces separate, empty parts do not count.
pub(super) fn list(value: &str) -> impl Iterator<Item = &str> {
    value
        .split([',', ' ', '\t'])
        .map(str::trim)
        .filter(|part| !part.is_empty())
}
