//! The TOML syntax: the interface's keys at the top, a `[[peer]]` for every peer, and the gateway's
//! tables.
//!
//! The library parses, and continues after errors. This module converts the tree to a [`Document`]:
//! values keep their lines, and the rules are those of the other syntax.

use std::borrow::Cow;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use zeroize::Zeroizing;

use super::ini;
use super::report::{Reporter, empty_list, unknown_key};
use super::schema::{self, Document, Entry, FieldSpec, Item, Section, SectionKind, Shape};

/// Splits a text into sections and entries; reports faults. Returns `None` if the text is not TOML:
/// diagnostics of a partly parsed text would mislead.
pub(super) fn split(text: &str, reporter: &mut Reporter<'_>) -> Option<Document> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = Lines::new(text);
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut last = 0;
    for error in &errors {
        let line = error.span().map_or(1, |span| lines.of(&span));
        // The first fault of a line causes the others.
        if line != last {
            let message = format!("not TOML: {}", error.message());
            reporter.error(line, &message, "see https://toml.io for the syntax");
        }
        last = line;
    }
    if !errors.is_empty() {
        return None;
    }
    let mut splitter = Splitter {
        lines,
        sections: Vec::new(),
        reporter,
    };
    let interface = splitter.interface(table.get_ref());
    let mut sections = splitter.sections;
    // The library returns tables in the order of their keys; diagnostics use the order of lines.
    sections.sort_by_key(|section| section.line);
    sections.insert(0, interface);
    Some(Document { sections })
}

type Key<'a> = Spanned<Cow<'a, str>>;
type Value<'a> = Spanned<DeValue<'a>>;

/// Converts tables to sections.
struct Splitter<'r, 's> {
    lines: Lines,
    /// All sections but the interface's.
    sections: Vec<Section>,
    reporter: &'r mut Reporter<'s>,
}

impl Splitter<'_, '_> {
    /// Converts the top of the file, and the tables below it.
    fn interface(&mut self, table: &DeTable<'_>) -> Section {
        let mut interface = Section::new(SectionKind::Interface, 1);
        for (key, value) in table {
            let is_table = matches!(value.get_ref(), DeValue::Table(_));
            let line = self.lines.of(&key.span());
            match key.get_ref().as_ref() {
                "peer" => self.tables(SectionKind::Peer, "peer", value),
                "gateway" => self.gateway(line, value),
                name @ ("device" | "remote") => {
                    let message = format!("`{name}` does not belong at the top of the file");
                    let help = format!("begin each {name} with a line `[[gateway.{name}]]`");
                    self.reporter.error(line, &message, help);
                }
                name if is_table && name.eq_ignore_ascii_case("interface") => {
                    let message = "there is no table for the interface";
                    let help = "write the interface's keys at the top of the file, above the first `[[peer]]`";
                    self.reporter.error(line, message, help);
                }
                _ => self.entry(key, value, &mut interface),
            }
        }
        interface.entries.sort_by_key(|entry| entry.line);
        interface
    }

    /// Converts `[gateway]`, and the lists of tables in it. `line`: that of the key.
    fn gateway(&mut self, line: usize, value: &Value<'_>) {
        let DeValue::Table(table) = value.get_ref() else {
            let message = "`gateway` is not a table";
            let help = "a tunnel has one gateway: begin it with a line `[gateway]`";
            self.reporter.error(line, message, help);
            return;
        };
        let mut section = Section::new(SectionKind::Gateway, self.lines.of(&value.span()));
        // `[[gateway.device]]` also creates the table, without a header.
        let mut has_keys = table.is_empty();
        for (key, value) in table {
            match key.get_ref().as_ref() {
                name @ "device" => self.tables(SectionKind::Device, name, value),
                name @ "remote" => self.tables(SectionKind::Remote, name, value),
                _ => {
                    has_keys = true;
                    self.entry(key, value, &mut section);
                }
            }
        }
        if has_keys {
            self.push(section);
        }
    }

    /// Converts every table of a list: `[[peer]]`, `[[gateway.device]]`, `[[gateway.remote]]`.
    fn tables(&mut self, kind: SectionKind, name: &str, value: &Value<'_>) {
        let not_a_list = format!("`{name}` is not a list of tables");
        let header = kind.header(self.reporter.syntax).unwrap_or_default();
        let help = format!("begin each {name} with a line `{header}`");
        let DeValue::Array(array) = value.get_ref() else {
            let line = self.lines.of(&value.span());
            self.reporter.error(line, &not_a_list, help);
            return;
        };
        for element in array {
            let line = self.lines.of(&element.span());
            let DeValue::Table(table) = element.get_ref() else {
                self.reporter.error(line, &not_a_list, &*help);
                continue;
            };
            let mut section = Section::new(kind, line);
            for (key, value) in table {
                self.entry(key, value, &mut section);
            }
            self.push(section);
        }
    }

    /// Adds a section, its entries in the order of lines.
    fn push(&mut self, mut section: Section) {
        section.entries.sort_by_key(|entry| entry.line);
        self.sections.push(section);
    }

    /// Converts one key.
    fn entry(&mut self, key: &Key<'_>, value: &Value<'_>, section: &mut Section) {
        let reporter = &mut *self.reporter;
        let line = self.lines.of(&key.span());
        let Some(spec) = schema::find(key.get_ref(), section.kind, reporter.syntax) else {
            let meant = unknown_key(reporter, key.get_ref(), section.kind, line);
            section.entries.extend(meant);
            return;
        };
        match items(spec, value, &self.lines) {
            Some(items) if items.is_empty() && spec.key.must_have_values() => {
                empty_list(reporter, spec.key, line);
                section.entries.push(Entry::invalid(spec.key, line));
            }
            // An empty list is equivalent to none.
            Some(items) if items.is_empty() => {}
            Some(items) => section.entries.push(Entry {
                key: spec.key,
                line,
                items,
            }),
            None => {
                let help = match spec.shape {
                    Shape::One => "write one text in quotes, a whole number, `true` or `false`",
                    Shape::List | Shape::Lines => {
                        "write a text in quotes, or a list of them in `[ ]`"
                    }
                };
                reporter.key_error(spec.key, line, "has a value of the wrong kind", help);
                section.entries.push(Entry::invalid(spec.key, line));
            }
        }
    }
}

/// Returns the value as texts; `None` for a type that the key does not take.
fn items(spec: &FieldSpec, value: &Value<'_>, lines: &Lines) -> Option<Vec<Item>> {
    let line = lines.of(&value.span());
    let item = |text: &str| Item {
        text: Zeroizing::new(text.to_owned()),
        line,
    };
    match (value.get_ref(), spec.shape) {
        (DeValue::String(text), Shape::One) => Some(vec![item(text.trim())]),
        (DeValue::String(text), Shape::Lines) => Some(vec![item(text)]),
        (DeValue::String(text), Shape::List) => Some(ini::list(text).map(item).collect()),
        (DeValue::Integer(number), Shape::One) => {
            // Decimal, as the parsers expect. Too large for i128 is too large for every key.
            let text = i128::from_str_radix(number.as_str(), number.radix())
                .map_or_else(|_| number.to_string(), |value| value.to_string());
            Some(vec![item(&text)])
        }
        (DeValue::Boolean(value), Shape::One) => Some(vec![item(&value.to_string())]),
        (DeValue::Array(array), Shape::List | Shape::Lines) => {
            let mut all = Vec::new();
            for element in array {
                // Elements must be strings: nested lists are not allowed.
                let DeValue::String(_) = element.get_ref() else {
                    return None;
                };
                all.extend(items(spec, element, lines)?);
            }
            Some(all)
        }
        _ => None,
    }
}

/// Offsets of the starts of lines.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        let ends = text.match_indices('\n').map(|(at, _)| at + 1);
        Self(std::iter::once(0).chain(ends).collect())
    }

    /// Returns the line in which a span begins, counted from 1.
    fn of(&self, span: &Range<usize>) -> usize {
        self.0.partition_point(|start| *start <= span.start)
    }
}
