//! The TOML syntax: the interface's keys at the top, a `[[peer]]` for every peer, and the gateway's
//! tables.
//!
//! The library parses, and continues after errors. This module converts the tree to [`Section`]s:
//! values keep their lines, and the rules are those of the other syntax.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::report::Reporter;
use super::schema::{Item, KeySpec, Section, SectionKind, Site};

/// Splits a text into sections and entries; reports faults. Returns `None` if the text is not TOML:
/// diagnostics of a partly parsed text would mislead.
pub(super) fn split(text: &str, reporter: &mut Reporter<'_>) -> Option<Vec<Section>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    let mut last = 0;
    for error in &errors {
        let line = error.span().map_or(1, |span| reporter.line_of(&span));
        // The first fault of a line causes the others.
        if line != last {
            reporter.error(
                Site::line(line),
                format!("not TOML: {}", error.message()),
                "see https://toml.io for the syntax",
            );
        }
        last = line;
    }
    let mut splitter = Splitter {
        sections: Vec::new(),
        reporter,
    };
    if errors.is_empty() {
        splitter.table(SectionKind::Interface, 1, table.get_ref());
    }
    errors.is_empty().then_some(splitter.sections)
}

/// Converts tables to sections.
struct Splitter<'r, 's> {
    sections: Vec<Section>,
    reporter: &'r mut Reporter<'s>,
}

impl Splitter<'_, '_> {
    /// Converts a table, and the tables below it.
    fn table(&mut self, kind: SectionKind, line: usize, table: &DeTable<'_>) {
        let mut section = Section::new(kind, line);
        // `[[gateway.device]]` also creates the table of the gateway, without a header.
        let mut has_header = kind != SectionKind::Gateway || table.is_empty();
        for (key, value) in table {
            let line = self.reporter.line_of(&key.span());
            let start = self.reporter.line_of(&value.span());
            match (kind, key.get_ref().as_ref(), value.get_ref()) {
                (SectionKind::Interface, "peer", _) => self.tables(SectionKind::Peer, value),
                (SectionKind::Interface, "gateway", DeValue::Table(gateway)) => {
                    self.table(SectionKind::Gateway, start, gateway);
                }
                (SectionKind::Interface, "gateway", _) => {
                    let help = "a tunnel has one gateway: begin it with a line `[gateway]`";
                    self.error(line, "`gateway` is not a table", help);
                }
                (SectionKind::Interface, name @ ("device" | "remote"), _) => {
                    let message = format!("`{name}` does not belong at the top of the file");
                    let help = format!("begin each {name} with a line `[[gateway.{name}]]`");
                    self.error(line, &message, help);
                }
                (SectionKind::Interface, name, DeValue::Table(_))
                    if name.eq_ignore_ascii_case("interface") =>
                {
                    let help = "write the interface's keys at the top of the file, above the first `[[peer]]`";
                    self.error(line, "there is no table for the interface", help);
                }
                (SectionKind::Gateway, "device", _) => self.tables(SectionKind::Device, value),
                (SectionKind::Gateway, "remote", _) => self.tables(SectionKind::Remote, value),
                (_, name, _) => {
                    has_header = true;
                    self.entry(name, line, value, &mut section);
                }
            }
        }
        // The library returns the keys of a table in the order of their names.
        section.entries.sort_by_key(|entry| entry.line);
        self.sections.extend(has_header.then_some(section));
    }

    /// Converts every table of a list: `[[peer]]`, `[[gateway.device]]`, `[[gateway.remote]]`.
    fn tables(&mut self, kind: SectionKind, value: &Spanned<DeValue<'_>>) {
        let (elements, is_list) = match value.get_ref() {
            DeValue::Array(array) => (array.iter().collect(), true),
            _ => (vec![value], false),
        };
        for element in elements {
            let line = self.reporter.line_of(&element.span());
            match element.get_ref() {
                DeValue::Table(table) if is_list => self.table(kind, line, table),
                _ => {
                    let header = kind.header(self.reporter.syntax);
                    let name = header.trim_matches(['[', ']']);
                    let name = name.rsplit('.').next().unwrap_or(name);
                    self.error(
                        line,
                        &format!("`{name}` is not a list of tables"),
                        format!("begin each {name} with a line `{header}`"),
                    );
                }
            }
        }
    }

    fn error(&mut self, line: usize, message: &str, help: impl Into<String>) {
        self.reporter.error(Site::line(line), message, help);
    }

    /// Converts one key.
    fn entry(
        &mut self,
        name: &str,
        line: usize,
        value: &Spanned<DeValue<'_>>,
        section: &mut Section,
    ) {
        let Some(key) = section.find(name, line, self.reporter) else {
            return;
        };
        let items = self.items(key, value);
        if items.is_none() {
            let help = if key.is_list() {
                "write a text in quotes, or a list of them in `[ ]`"
            } else {
                "write one text in quotes, a whole number, `true` or `false`"
            };
            self.reporter
                .error(key.at(line), "has a value of the wrong kind", help);
        }
        section.add(key, line, items, self.reporter);
    }

    /// Returns the value as texts; `None` for a type that the key does not take.
    fn items(&self, key: &KeySpec, value: &Spanned<DeValue<'_>>) -> Option<Vec<Item>> {
        let line = self.reporter.line_of(&value.span());
        match value.get_ref() {
            DeValue::String(text) => Some(key.items(text, line)),
            DeValue::Integer(number) if !key.is_list() => {
                // Decimal, as the parsers expect. Too large for i128 is too large for every key.
                let value = i128::from_str_radix(number.as_str(), number.radix());
                let text = value.map_or_else(|_| number.to_string(), |value| value.to_string());
                Some(key.items(&text, line))
            }
            DeValue::Boolean(value) if !key.is_list() => Some(key.items(&value.to_string(), line)),
            DeValue::Array(array) if key.is_list() => {
                // Elements must be strings: nested lists are not allowed.
                let texts = array.iter().filter(|element| element.get_ref().is_str());
                let items: Vec<_> = texts.map(|text| self.items(key, text)).collect();
                (items.len() == array.len())
                    .then(|| items.into_iter().flatten().flatten().collect())
            }
            _ => None,
        }
    }
}
