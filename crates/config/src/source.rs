//! A text with its name and syntax, before it is parsed.

use std::io;
use std::path::Path;

use zeroize::Zeroizing;

/// Syntax of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syntax {
    /// wg-quick's syntax: `.conf`, and every other name but `.toml`.
    Ini,
    /// TOML: `.toml`.
    Toml,
}

/// A file's text, with its name.
#[derive(Debug, Clone)]
pub struct Source {
    /// Name of the file in diagnostics.
    pub file: String,
    /// Syntax of the text.
    pub syntax: Syntax,
    /// The text; wiped on drop.
    pub text: Zeroizing<String>,
}

/// Reads the file that `private-key-file` or `preshared-key-file` names.
pub type ReadKey<'a> = dyn Fn(&Path) -> io::Result<Zeroizing<String>> + 'a;

impl Syntax {
    /// Returns the syntax of a file by its extension.
    pub fn of(path: &Path) -> Self {
        match path.extension() {
            Some(ending) if ending == "toml" => Self::Toml,
            _ => Self::Ini,
        }
    }
}
