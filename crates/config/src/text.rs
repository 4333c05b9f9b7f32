//! Text of a configuration under construction, in either syntax.

use zeroize::Zeroizing;

use super::schema::{Form, KeySpec, SectionKind};
use super::source::Syntax;

/// Replaces values that a redacted text leaves out.
const REDACTED: &str = "(redacted)";

/// Text under construction; wiped on drop.
pub(super) struct Text {
    pub syntax: Syntax,
    /// Values that are secret or may contain a secret are left out.
    pub is_redacted: bool,
    pub out: Zeroizing<String>,
    /// The first key with a value that wg-quick's syntax cannot express.
    pub not_in_ini: Option<&'static KeySpec>,
}

impl Text {
    /// Begins a section.
    pub fn header(&mut self, kind: SectionKind) {
        let header = kind.header(self.syntax);
        if !self.out.is_empty() {
            self.push("\n");
        }
        if !header.is_empty() {
            self.push(header);
            self.push("\n");
        }
    }

    /// Writes all values of a key: in TOML a list as an array; in INI on one line, or a line each.
    pub fn write(&mut self, key: &'static KeySpec, values: impl IntoIterator<Item: ToString>) {
        let start = format!("{} = ", key.name(self.syntax));
        let (open, separator, close) = match (self.syntax, key.form) {
            (Syntax::Toml, _) if key.is_list() => ("[", ", ", "]\n"),
            (Syntax::Ini, Form::List) => ("", ", ", "\n"),
            _ => ("", &*format!("\n{start}"), "\n"),
        };
        let mut before = format!("{start}{open}");
        let mut end = "";
        for value in values {
            let value = Zeroizing::new(value.to_string());
            if self.syntax == Syntax::Ini && value.contains(['#', '\n', '\r']) {
                self.not_in_ini.get_or_insert(key);
            }
            self.push(&before);
            if self.is_redacted && !key.is_reportable() {
                self.value(key.form, REDACTED);
            } else {
                self.value(key.form, &value);
            }
            before = separator.to_owned();
            end = close;
        }
        self.push(end);
    }

    /// Writes a value; in TOML all but numbers and booleans are basic strings (v1.0.0, "String").
    /// Implemented here so that no copy of a key remains in memory.
    fn value(&mut self, form: Form, value: &str) {
        if self.syntax == Syntax::Ini || form == Form::Plain {
            return self.push(value);
        }
        self.push("\"");
        for c in value.chars() {
            match c {
                '"' => self.push("\\\""),
                '\\' => self.push("\\\\"),
                c if c.is_control() => self.push(&format!("\\u{:04X}", u32::from(c))),
                c => self.push(c.encode_utf8(&mut [0; 4])),
            }
        }
        self.push("\"");
    }

    /// Appends text. A full buffer is replaced by one of twice the size, and wiped: growing it in
    /// place could leave copies of the keys in freed memory.
    fn push(&mut self, text: &str) {
        let length = self.out.len() + text.len();
        if length > self.out.capacity() {
            let mut larger = Zeroizing::new(String::with_capacity(1024.max(2 * length)));
            larger.push_str(&self.out);
            self.out = larger;
        }
        self.out.push_str(text);
    }
}
