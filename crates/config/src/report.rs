//! Creates [`Diagnostic`]s without secrets.
//!
//! Every text from the file passes one of two filters here: [`excerpt`] for the line, [`shown`] for
//! words in a message. Both hide keys and everything that looks like one, and control characters,
//! which could control a terminal.

use std::collections::HashSet;
use std::fmt::Display;
use std::ops::Range;

use ipnet::IpNet;

use super::diagnostic::{Diagnostic, Diagnostics, Severity};
use super::schema::{Form, KeySpec, Site};
use super::source::Syntax;

/// Replacement of a secret.
const MASK: &str = "********";
/// Minimum length of a run of base64 that counts as a key; a complete key has 43 characters before
/// its padding.
const KEY_LIKE: usize = 40;
/// First characters of a mesh's secrets: the credential of a member, the secret of a relay, a join token.
const MESH_SECRETS: [&str; 3] = ["skc_", "skr_", "skt_"];
/// Names of keys whose value is a secret; an underscore counts as a hyphen.
const SECRET_NAMES: [&str; 5] = [
    "privatekey",
    "private-key",
    "presharedkey",
    "preshared-key",
    "credential",
];
/// Maximum length of an excerpt, in characters.
const EXCERPT: usize = 120;
/// Maximum length of an unknown word that is repeated in a message; a longer one may be a secret.
const WORD: usize = 24;
/// Maximum number of diagnostics: a file that is no configuration has one for every line.
const MAX_FINDINGS: usize = 500;

/// Collects the diagnostics of one file.
pub(super) struct Reporter<'a> {
    pub syntax: Syntax,
    file: &'a str,
    text: &'a str,
    /// Offsets of the starts of lines.
    starts: Vec<usize>,
    hidden: HashSet<usize>,
    /// Numbers of errors, warnings and notes that were not kept, by [`Severity`].
    left_out: [usize; 3],
    diagnostics: Diagnostics,
}

impl<'a> Reporter<'a> {
    pub fn new(file: &'a str, syntax: Syntax, text: &'a str) -> Self {
        let ends = text.match_indices('\n').map(|(at, _)| at + 1);
        Self {
            syntax,
            file,
            text,
            starts: std::iter::once(0).chain(ends).collect(),
            hidden: HashSet::new(),
            left_out: [0; 3],
            diagnostics: Diagnostics::default(),
        }
    }

    /// Returns the line in which a span begins, counted from 1.
    pub fn line_of(&self, span: &Range<usize>) -> usize {
        self.starts.partition_point(|start| *start <= span.start)
    }

    /// Returns the key's name in the file's syntax.
    pub fn name(&self, key: &KeySpec) -> &'static str {
        key.name(self.syntax)
    }

    /// Returns an example of a key with a value.
    pub fn example(&self, key: &KeySpec, value: &str) -> String {
        let name = self.name(key);
        match self.syntax {
            Syntax::Ini => format!("`{name} = {value}`"),
            Syntax::Toml if key.is_list() => format!("`{name} = [\"{value}\"]`"),
            Syntax::Toml => format!("`{name} = \"{value}\"`"),
        }
    }

    /// Reports an error. The message about a key follows its name: "`Key` ...".
    pub fn error(&mut self, site: Site, message: impl Display, help: impl Into<String>) {
        self.about_key(Severity::Error, site, &message, help.into());
    }

    /// Warns. The message about a key follows its name: "`Key` ...".
    pub fn warn(&mut self, site: Site, message: impl Display, help: impl Into<String>) {
        self.about_key(Severity::Warning, site, &message, help.into());
    }

    /// Notes a consequence. The message about a key follows its name: "`Key` ...".
    pub fn note(&mut self, site: Site, message: impl Display, help: impl Into<String>) {
        self.about_key(Severity::Note, site, &message, help.into());
    }

    fn about_key(&mut self, severity: Severity, site: Site, message: &dyn Display, help: String) {
        let message = match site.key {
            Some(key) => format!("`{}` {message}", self.name(key)),
            None => message.to_string(),
        };
        let name = site.key.map(|key| self.name(key));
        self.add(severity, site, name, &message, help);
    }

    /// Returns the prefix without its host bits; warns if it has any.
    pub fn truncate_prefix(&mut self, site: Site, value: IpNet) -> IpNet {
        let masked = value.trunc();
        if masked != value {
            let host = IpNet::from(value.addr());
            let help =
                format!("write `{masked}` for the whole network, or `{host}` for the one address");
            let message = format!("has `{value}`, which is read as `{masked}`");
            self.warn(site, message, help);
        }
        masked
    }

    /// Warns of a value that is twice in a list.
    pub fn repeated_value(&mut self, site: Site, value: impl Display, first: usize) {
        let message = format!("has `{value}` twice, first in line {first}");
        self.warn(site, message, "remove one of them");
    }

    /// Hides the text of a line in all diagnostics, earlier ones included: it contains a secret
    /// under a wrong name.
    pub fn hide_line(&mut self, line: usize) {
        self.hidden.insert(line);
        self.diagnostics.hide_line(line, MASK);
    }

    /// Reports an error of a key by the name that the file has, with the whole message. The excerpt
    /// is masked as for the site's key.
    pub fn named_error(&mut self, site: Site, name: &str, message: &str, help: impl Into<String>) {
        self.add(Severity::Error, site, Some(name), message, help.into());
    }

    fn add(
        &mut self,
        severity: Severity,
        site: Site,
        key: Option<&str>,
        message: &str,
        help: String,
    ) {
        if self.diagnostics.iter().len() >= MAX_FINDINGS {
            self.left_out[severity as usize] += 1;
            return;
        }
        let mut finding = Diagnostic::new(severity, self.file, shown(message)).with_help(help);
        finding.key = key.map(|key| word(key).to_owned());
        if let Some(index) = site.line.checked_sub(1) {
            finding.line = Some(site.line);
            let rest = self.starts.get(index).map(|start| &self.text[*start..]);
            let line = rest.and_then(|rest| rest.lines().next());
            finding.excerpt = line.map(|text| {
                if self.hidden.contains(&site.line) {
                    MASK.to_owned()
                } else {
                    excerpt(text, site.key)
                }
            });
        }
        self.diagnostics.push(finding);
    }

    /// Returns all diagnostics, in the order of the lines.
    pub fn finish(mut self) -> Diagnostics {
        self.diagnostics.sort();
        let severity = match self.left_out {
            [0, 0, _] => return self.diagnostics,
            [0, _, _] => Severity::Warning,
            _ => Severity::Error,
        };
        let [errors, warnings, _] = self.left_out;
        let message = format!("{errors} more errors and {warnings} more warnings are not shown");
        let finding = Diagnostic::new(severity, self.file, message);
        self.diagnostics
            .push(finding.with_help("correct the first ones, then check again"));
        self.diagnostics
    }
}

/// Returns a word from the file in a form that a message may contain.
pub(super) fn word(text: &str) -> &str {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "-_. []".contains(c);
    if text.len() <= WORD && text.chars().all(harmless) && mesh_secret(text).is_none() {
        text
    } else {
        MASK
    }
}

/// Returns a message with everything hidden that looks like a key.
fn shown(text: &str) -> String {
    mask_runs(&printable(text), 0)
}

/// Returns a line in a form that may be shown. `key`: the key that the line is about.
fn excerpt(line: &str, key: Option<&KeySpec>) -> String {
    let line = printable(line.trim_end());
    let masked = match (secret_from(&line), key) {
        (Some(end), _) => mask_from(&line, end),
        (None, Some(key)) if key.form != Form::Secret => {
            // The value of a public key is shown.
            mask_runs(&line, usize::from(key.toml == "public-key"))
        }
        (None, _) => unknown_line(&line),
    };
    match masked.char_indices().nth(EXCERPT) {
        Some((end, _)) => format!("{}...", &masked[..end]),
        None => masked,
    }
}

/// Returns the name at the start of a line that was not understood.
fn unknown_line(line: &str) -> String {
    let plain = line.trim();
    match line.split_once('=') {
        Some((name, _)) => format!("{} = {MASK}", word(name.trim())),
        None if plain.starts_with('[') => word(plain).to_owned(),
        None => MASK.to_owned(),
    }
}

/// Masks a secret that follows its name.
fn mask_from(line: &str, end: usize) -> String {
    let value = line[end..].trim_start_matches([' ', '=', ':', '"', '\'']);
    let mask = if value.is_empty() { "" } else { MASK };
    format!("{}{mask}", &line[..line.len() - value.len()])
}

/// Returns the end of a secret key's name in the line.
fn secret_from(line: &str) -> Option<usize> {
    // The syntaxes differ only in case and hyphens; underscores are a common slip.
    let line = line.to_ascii_lowercase().replace('_', "-");
    let found = SECRET_NAMES
        .iter()
        .flat_map(|name| line.match_indices(name));
    let ends = found.map(|(at, name)| at + name.len());
    ends.filter(|end| !line[*end..].trim_start_matches('-').starts_with("file"))
        .min()
}

/// Replaces control characters.
fn printable(text: &str) -> String {
    let plain = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.chars().map(plain).collect()
}

/// Returns the first secret of a mesh: its kind (`skc_` of a member's credential, `skr_`, `skt_`) and the
/// base64url after that.
fn mesh_secret(text: &str) -> Option<Range<usize>> {
    let kinds = MESH_SECRETS.iter();
    let start = kinds.filter_map(|kind| text.find(kind)).min()?;
    let base64 = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let length = text[start..].find(|c| !base64(c));
    Some(start..length.map_or(text.len(), |length| start + length))
}

/// Hides every secret of a mesh, and every run of base64 that is long enough to be a key, except the
/// first `keep` of them (the value of a public key).
fn mask_runs(text: &str, mut keep: usize) -> String {
    let mut text = text.to_owned();
    while let Some(secret) = mesh_secret(&text) {
        text.replace_range(secret, MASK);
    }
    let other = |c: char| !c.is_ascii_alphanumeric() && c != '+' && c != '/';
    let parts = text.split_inclusive(other).map(|part| {
        let run = part.trim_end_matches(other).len();
        if run < KEY_LIKE {
            return part.to_owned();
        }
        if keep > 0 {
            keep -= 1;
            return part.to_owned();
        }
        format!("{MASK}{}", &part[run..])
    });
    parts.collect()
}

/// Suggests the nearest known key.
pub(super) fn did_you_mean(nearest: Option<&str>, otherwise: impl Into<String>) -> String {
    let suggestion = |name| format!("did you mean `{name}`?");
    nearest.map_or_else(|| otherwise.into(), suggestion)
}

#[cfg(test)]
mod tests {
    use super::super::schema::SectionKind;
    use super::*;

    const fn key(form: Form, toml: &'static str) -> KeySpec {
        KeySpec {
            section: SectionKind::Interface,
            form,
            ini: "",
            toml,
        }
    }

    const PRIVATE_KEY: KeySpec = key(Form::Secret, "private-key");
    const PUBLIC_KEY: KeySpec = key(Form::Text, "public-key");
    const OTHER: KeySpec = key(Form::Text, "other");

    const SECRET: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";

    #[test]
    fn no_line_shows_a_secret() {
        for (line, key) in [
            (format!("PrivateKey = {SECRET}"), Some(&PRIVATE_KEY)),
            (format!("privatekey={SECRET}"), None),
            (
                format!("PrivateKey = {}", &SECRET[..20]),
                Some(&PRIVATE_KEY),
            ),
            (format!("PrivteKey = {SECRET}"), None),
            (format!("PrivteKey = {}", &SECRET[..20]), None),
            (SECRET.to_owned(), None),
            (format!("ListenPort = {SECRET}"), Some(&OTHER)),
            (format!("Address = 10.0.0.1 # {SECRET}"), Some(&OTHER)),
            (
                format!("peer = [{{ public-key = \"x\", preshared-key = \"{SECRET}\" }}]"),
                Some(&PUBLIC_KEY),
            ),
            (
                format!("PublicKey = {} # {SECRET}", SECRET.replace('y', "z")),
                Some(&PUBLIC_KEY),
            ),
        ] {
            let shown = excerpt(&line, key);
            assert!(!shown.contains(&SECRET[..20]), "{line} -> {shown}");
            assert!(shown.contains(MASK), "{line} -> {shown}");
        }
    }

    #[test]
    fn no_line_shows_a_secret_of_a_mesh() {
        for secret in [
            "skc_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX",
            "skt_-_ECAwQFBgcICQoLDA0ODxAREhMUFRYX",
            "skr_AAECAwQFBgcICQoLDA0ODxAREhMUFRYX",
            "skc_AAECAwQFBgc",
        ] {
            for (line, key) in [
                (format!("coordinator = \"{secret}\""), Some(&OTHER)),
                (format!("CoordinatorPin = {secret}"), Some(&OTHER)),
                (format!("PublicKey = {secret}"), Some(&PUBLIC_KEY)),
                (format!("MTU = 1{secret} {secret}"), Some(&OTHER)),
                (format!("[{secret}]"), None),
                (format!("{secret} = 1"), None),
                ("credential = AAECAwQFBgc".to_owned(), Some(&OTHER)),
            ] {
                let shown = excerpt(&line, key);
                assert!(!shown.contains("ECAwQ"), "{line} -> {shown}");
                assert!(shown.contains(MASK), "{line} -> {shown}");
            }
            let message = shown(&format!("`MTU` is `{secret}`"));
            assert_eq!(message, format!("`MTU` is `{MASK}`"));
        }
    }

    #[test]
    fn the_path_of_a_key_file_is_no_secret() {
        let line = "private-key-file = \"/etc/seikan/wg0.key\"";
        assert_eq!(excerpt(line, Some(&OTHER)), line);
    }

    #[test]
    fn a_terminal_is_not_steered() {
        assert_eq!(excerpt("MTU = \x1b[2J", Some(&OTHER)), "MTU = \u{fffd}[2J");
    }
}
