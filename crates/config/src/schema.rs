//! The definition of a key, and a file as sections of texts before its values are converted.
//!
//! Both syntaxes produce [`Section`]s of [`Entry`]s, each value a text with its line.

use zeroize::Zeroizing;

use super::source::Syntax;

/// Kinds of sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SectionKind {
    Interface,
    Peer,
    Gateway,
    /// One device behind the gateway.
    Device,
    /// One address of the overlay, mapped to an address on the local network.
    Remote,
}

/// Number of values of a key, their notation, and whether reports for others may contain them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// One value.
    Text,
    /// One number or boolean, which TOML has without quotes.
    Plain,
    /// One secret.
    Secret,
    /// Any number, separated by commas or repeated.
    List,
    /// Any number, each on a line of its own.
    Lines,
    /// Lines, of which an empty list is an error: it reads as "nobody" and would allow anybody.
    Rules,
    /// Lines of commands, which may contain secrets.
    Commands,
}

/// Definition of a key.
#[derive(Debug)]
pub(super) struct KeySpec {
    pub section: SectionKind,
    pub form: Form,
    pub ini: &'static str,
    pub toml: &'static str,
}

/// A line of the file, and the key that it is about.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Site {
    /// Counted from 1; 0 for the file as a whole.
    pub line: usize,
    pub key: Option<&'static KeySpec>,
}

/// One section.
pub(super) struct Section {
    pub kind: SectionKind,
    /// Line of its header (1 if there is none).
    pub line: usize,
    pub entries: Vec<Entry>,
}

/// A key and its values. An entry without items was present but invalid, which was reported: it is
/// not missing.
pub(super) struct Entry {
    pub key: &'static KeySpec,
    pub line: usize,
    pub items: Vec<Item>,
}

/// One value as text.
pub(super) struct Item {
    pub text: Zeroizing<String>,
    pub line: usize,
}

impl KeySpec {
    /// Returns the key's name in a syntax.
    pub fn name(&self, syntax: Syntax) -> &'static str {
        match syntax {
            Syntax::Ini => self.ini,
            Syntax::Toml => self.toml,
        }
    }

    /// Returns whether the key may have many values.
    pub fn is_list(&self) -> bool {
        !matches!(self.form, Form::Text | Form::Plain | Form::Secret)
    }

    /// Returns whether a report for others may contain the value: it is neither a secret nor a command.
    pub fn is_reportable(&self) -> bool {
        !matches!(self.form, Form::Secret | Form::Commands)
    }

    /// Returns the key in a line.
    pub fn at(&'static self, line: usize) -> Site {
        Site {
            line,
            key: Some(self),
        }
    }

    /// Splits a text into the values of the key: a list by commas and spaces. Empty elements of a
    /// list are skipped.
    pub fn items(&self, text: &str, line: usize) -> Vec<Item> {
        let item = |text: &str| Item {
            text: Zeroizing::new(text.to_owned()),
            line,
        };
        if self.form != Form::List {
            return vec![item(text.trim())];
        }
        let parts = text.split([',', ' ', '\t']).map(str::trim);
        parts.filter(|part| !part.is_empty()).map(item).collect()
    }
}

impl Section {
    /// A section without entries.
    pub fn new(kind: SectionKind, line: usize) -> Self {
        Self {
            kind,
            line,
            entries: Vec::new(),
        }
    }
}

impl Site {
    /// The file as a whole.
    pub const FILE: Self = Self::line(0);

    /// A line.
    pub const fn line(line: usize) -> Self {
        Self { line, key: None }
    }
}

impl SectionKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [
        Self::Interface,
        Self::Peer,
        Self::Gateway,
        Self::Device,
        Self::Remote,
    ];

    /// Returns the section's header; an interface has none in TOML.
    pub fn header(self, syntax: Syntax) -> &'static str {
        let (ini, toml) = match self {
            Self::Interface => ("[Interface]", ""),
            Self::Peer => ("[Peer]", "[[peer]]"),
            Self::Gateway => ("[Gateway]", "[gateway]"),
            Self::Device => ("[Device]", "[[gateway.device]]"),
            Self::Remote => ("[Remote]", "[[gateway.remote]]"),
        };
        match syntax {
            Syntax::Ini => ini,
            Syntax::Toml => toml,
        }
    }

    /// Returns the location of the section's keys, for messages.
    pub fn location(self, syntax: Syntax) -> String {
        match self.header(syntax) {
            "" => "at the top of the file".to_owned(),
            header => format!("in {header}"),
        }
    }
}
