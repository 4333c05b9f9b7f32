//! Diagnostics of a configuration.
//!
//! A [`Diagnostic`] has the file, line and key, and suggests a correction. [`Diagnostics`] has all
//! of one file in the order of its lines. Excerpts were masked before (`report`): neither text nor
//! JSON contains a secret.

use std::fmt;

use serde::Serialize;

/// Parameters of ANSI's SGR sequence, after that of bold text.
const BOLD: &str = "";
const RED: &str = ";31";
const YELLOW: &str = ";33";
const BLUE: &str = ";34";

/// Severity of the diagnostic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The file cannot be used.
    Error,
    /// The file can be used, but is probably wrong.
    Warning,
    /// The file can be used and may be right; it has a consequence that not everybody knows.
    Note,
}

/// One diagnostic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Diagnostic {
    /// Severity of the diagnostic.
    pub severity: Severity,
    /// The file, as it was named; or the source of the value, such as an environment variable.
    pub file: String,
    /// The line, counted from 1.
    pub line: Option<usize>,
    /// The key, as the file's syntax spells it.
    pub key: Option<String>,
    /// The fault.
    pub message: String,
    /// Suggested correction.
    pub help: Option<String>,
    /// Text of the line, with secrets masked.
    #[serde(skip)]
    pub(super) excerpt: Option<String>,
}

/// All diagnostics of one file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostic {
    /// Returns a diagnostic of a file (or a variable) as a whole.
    pub fn new(severity: Severity, file: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            severity,
            file: file.into(),
            line: None,
            key: None,
            message: message.into(),
            help: None,
            excerpt: None,
        }
    }

    /// Adds a suggested correction.
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Returns the diagnostic as text of a few lines, in the style of rustc:
    ///
    /// ```text
    /// error: `MTU` is 100, less than 576
    ///  --> wg0.conf:4
    ///   |
    /// 4 | MTU = 100
    ///   = help: ...
    /// ```
    pub fn render(&self, colours: bool) -> String {
        let paint = |style: &str, text: &str| {
            if colours {
                format!("\x1b[1{style}m{text}\x1b[0m")
            } else {
                text.to_owned()
            }
        };
        let label = match self.severity {
            Severity::Error => paint(RED, "error"),
            Severity::Warning => paint(YELLOW, "warning"),
            Severity::Note => paint(BLUE, "note"),
        };
        let message = paint(BOLD, &format!(": {}", self.message));
        let number = self.line.map(|n| n.to_string()).unwrap_or_default();
        let colon = if number.is_empty() { "" } else { ":" };
        let gutter = " ".repeat(number.len().max(1));
        let (arrow, bar) = (paint(BLUE, "-->"), paint(BLUE, "|"));
        let mut out = format!(
            "{label}{message}\n{gutter}{arrow} {}{colon}{number}\n",
            self.file
        );
        if let Some(excerpt) = &self.excerpt {
            let number = paint(BLUE, &number);
            out += &format!("{gutter} {bar}\n{number} {bar} {excerpt}\n");
        }
        if let Some(help) = &self.help {
            out += &format!("{gutter} {} help: {help}\n", paint(BLUE, "="));
        }
        out
    }
}

impl Diagnostics {
    /// Adds a diagnostic.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        self.0.push(diagnostic);
    }

    /// Adds the diagnostics of another set.
    pub fn append(&mut self, mut other: Diagnostics) {
        self.0.append(&mut other.0);
    }

    /// Sorts by line; diagnostics of the whole file come first.
    pub(super) fn sort(&mut self) {
        self.0.sort_by_key(|d| d.line);
    }

    /// Replaces the excerpt of a line.
    pub(super) fn hide_line(&mut self, line: usize, by: &str) {
        for diagnostic in &mut self.0 {
            if diagnostic.line == Some(line) && diagnostic.excerpt.is_some() {
                diagnostic.excerpt = Some(by.to_owned());
            }
        }
    }

    /// Returns the diagnostics without notes, which belong to a check and not to a start.
    pub fn without_notes(mut self) -> Self {
        self.0.retain(|d| d.severity != Severity::Note);
        self
    }

    /// Returns whether there are no diagnostics.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the diagnostics.
    pub fn iter(&self) -> std::slice::Iter<'_, Diagnostic> {
        self.0.iter()
    }

    /// Returns the number of diagnostics of a severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.0.iter().filter(|d| d.severity == severity).count()
    }

    /// Returns whether the file cannot be used.
    pub fn has_errors(&self) -> bool {
        self.count(Severity::Error) > 0
    }

    /// Returns all diagnostics as text, separated by empty lines.
    pub fn render(&self, colours: bool) -> String {
        let parts: Vec<_> = self.0.iter().map(|d| d.render(colours)).collect();
        parts.join("\n")
    }
}

impl<'a> IntoIterator for &'a Diagnostics {
    type Item = &'a Diagnostic;
    type IntoIter = std::slice::Iter<'a, Diagnostic>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl From<Diagnostic> for Diagnostics {
    fn from(diagnostic: Diagnostic) -> Self {
        Self(vec![diagnostic])
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.render(false).trim_end())
    }
}
