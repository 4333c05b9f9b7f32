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
use super::schema::{self, Entry, Field, Shape};
use super::source::{Source, Syntax};
use super::values::Problem;

/// Replacement of a secret.
const MASK: &str = "********";
/// Minimum length of a run of base64 that counts as a key; a complete key has 43 characters before
/// its padding.
const KEY_LIKE: usize = 40;
/// First characters of a mesh's secrets: the credential of a member, the secret of a relay, a join token.
const MESH_SECRETS: [&str; 3] = ["skc_", "skr_", "skt_"];
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
    lines: Vec<&'a str>,
    hidden: HashSet<usize>,
    /// Numbers of errors and of warnings that were not kept.
    left_out: (usize, usize),
    diagnostics: Diagnostics,
}

impl<'a> Reporter<'a> {
    pub fn new(source: &'a Source) -> Self {
        Self {
            syntax: source.syntax,
            file: &source.file,
            lines: source.text.lines().collect(),
            hidden: HashSet::new(),
            left_out: (0, 0),
            diagnostics: Diagnostics::default(),
        }
    }

    /// Returns the key's name in the file's syntax.
    pub fn name(&self, key: Field) -> &'static str {
        key.name(self.syntax)
    }

    /// Reports an invalid value of a key.
    pub fn problem(&mut self, key: Field, line: usize, problem: Problem) {
        self.key_error(key, line, &problem.message, problem.help);
    }

    /// Reports an error of a key. `message` follows the key's name: "`Key` ...".
    pub fn key_error(&mut self, key: Field, line: usize, message: &str, help: impl Into<String>) {
        let message = format!("`{}` {message}", self.name(key));
        self.add(Severity::Error, line, Some(key), &message, help);
    }

    /// Warns of a key. `message` follows the key's name: "`Key` ...".
    pub fn key_warning(&mut self, key: Field, line: usize, message: &str, help: impl Into<String>) {
        let message = format!("`{}` {message}", self.name(key));
        self.add(Severity::Warning, line, Some(key), &message, help);
    }

    /// Reports an error of a line.
    pub fn error(&mut self, line: usize, message: &str, help: impl Into<String>) {
        self.add(Severity::Error, line, None, message, help);
    }

    /// Warns of a line.
    pub fn warn(&mut self, line: usize, message: &str, help: impl Into<String>) {
        self.add(Severity::Warning, line, None, message, help);
    }

    /// Returns an example of a key with a value.
    pub fn example(&self, key: Field, value: &str) -> String {
        let name = self.name(key);
        match (self.syntax, key.spec().shape) {
            (Syntax::Ini, _) => format!("`{name} = {value}`"),
            (Syntax::Toml, Shape::One) => format!("`{name} = \"{value}\"`"),
            (Syntax::Toml, _) => format!("`{name} = [\"{value}\"]`"),
        }
    }

    /// Returns the prefix without its host bits; warns if it has any.
    pub fn truncate_prefix(&mut self, key: Field, value: IpNet, line: usize) -> IpNet {
        let masked = value.trunc();
        if masked != value {
            let message = format!("has `{value}`, which is read as `{masked}`");
            let help = format!(
                "write `{masked}` for the whole network, or `{}` for the one address",
                IpNet::from(value.addr())
            );
            self.key_warning(key, line, &message, help);
        }
        masked
    }

    /// Warns of a value that is twice in a list.
    pub fn repeated_value(&mut self, key: Field, value: impl Display, line: usize, first: usize) {
        let message = format!("has `{value}` twice, first in line {first}");
        self.key_warning(key, line, &message, "remove one of them");
    }

    /// Hides the text of a line in all diagnostics, earlier ones included: it contains a secret
    /// under a wrong name.
    pub fn hide_line(&mut self, line: usize) {
        self.hidden.insert(line);
        self.diagnostics.hide_line(line, MASK);
    }

    /// Reports a fault of the file as a whole.
    pub fn whole(&mut self, severity: Severity, message: &str, help: impl Into<String>) {
        let finding = Diagnostic::new(severity, self.file, shown(message)).with_help(help);
        self.keep(finding);
    }

    /// Reports an unknown key. The excerpt is masked as for the nearest key, so that its secret
    /// stays hidden.
    fn unknown_key(
        &mut self,
        line: usize,
        name: &str,
        near: Option<Field>,
        message: &str,
        help: String,
    ) {
        let mut finding = self.finding(Severity::Error, line, near, message, help);
        finding.key = Some(word(name).to_owned());
        self.keep(finding);
    }

    /// Reports a fault of a line. `key`: the key that the line is about.
    pub fn add(
        &mut self,
        severity: Severity,
        line: usize,
        key: Option<Field>,
        message: &str,
        help: impl Into<String>,
    ) {
        let mut finding = self.finding(severity, line, key, message, help);
        finding.key = key.map(|key| self.name(key).to_owned());
        self.keep(finding);
    }

    fn keep(&mut self, finding: Diagnostic) {
        if self.diagnostics.iter().len() < MAX_FINDINGS {
            self.diagnostics.push(finding);
            return;
        }
        match finding.severity {
            Severity::Error => self.left_out.0 += 1,
            Severity::Warning => self.left_out.1 += 1,
        }
    }

    /// Returns all diagnostics, in the order of the lines.
    pub fn finish(mut self) -> Diagnostics {
        self.diagnostics.sort();
        let severity = match self.left_out {
            (0, 0) => return self.diagnostics,
            (0, _) => Severity::Warning,
            _ => Severity::Error,
        };
        let (errors, warnings) = self.left_out;
        let message = format!("{errors} more errors and {warnings} more warnings are not shown");
        let finding = Diagnostic::new(severity, self.file, message);
        self.diagnostics
            .push(finding.with_help("correct the first ones, then check again"));
        self.diagnostics
    }

    fn finding(
        &self,
        severity: Severity,
        line: usize,
        key: Option<Field>,
        message: &str,
        help: impl Into<String>,
    ) -> Diagnostic {
        let mut finding = Diagnostic::new(severity, self.file, shown(message)).with_help(help);
        finding.line = Some(line);
        finding.excerpt = line
            .checked_sub(1)
            .and_then(|index| self.lines.get(index))
            .map(|text| {
                if self.hidden.contains(&line) {
                    MASK.to_owned()
                } else {
                    excerpt(text, key)
                }
            });
        finding
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
fn excerpt(line: &str, key: Option<Field>) -> String {
    let line = printable(line.trim_end());
    let masked = match (secret_from(&line), key) {
        (Some(end), _) => mask_from(&line, end),
        (None, Some(Field::PublicKey)) => mask_runs(&line, 1),
        (None, Some(key)) if !key.is_secret() => mask_runs(&line, 0),
        (None, _) => unknown_line(&line),
    };
    if masked.chars().count() <= EXCERPT {
        return masked;
    }
    let cut: String = masked.chars().take(EXCERPT).collect();
    format!("{cut}...")
}

/// Returns the name at the start of a line that was not understood.
fn unknown_line(line: &str) -> String {
    let Some((name, _)) = line.split_once('=') else {
        let plain = line.trim();
        return if plain.starts_with('[') && word(plain) == plain {
            plain.to_owned()
        } else {
            MASK.to_owned()
        };
    };
    format!("{} = {MASK}", word(name.trim()))
}

/// Masks a secret that follows its name.
fn mask_from(line: &str, end: usize) -> String {
    let value = line[end..].trim_start_matches([' ', '=', ':', '"', '\'']);
    let shown = &line[..line.len() - value.len()];
    if value.is_empty() {
        shown.to_owned()
    } else {
        format!("{shown}{MASK}")
    }
}

/// Returns the end of a secret key's name in the line.
fn secret_from(line: &str) -> Option<usize> {
    // The syntaxes differ only in case and hyphens; underscores are a common slip.
    let lower = line.to_ascii_lowercase();
    let names = [
        "privatekey",
        "private-key",
        "private_key",
        "presharedkey",
        "preshared-key",
        "preshared_key",
        "credential",
    ];
    let ends = names.iter().flat_map(|name| {
        let found = lower.match_indices(name);
        found.map(|(at, name)| at + name.len())
    });
    let is_file = |end: usize| {
        let rest = lower[end..].trim_start_matches(['-', '_']);
        rest.starts_with("file")
    };
    ends.filter(|end| !is_file(*end)).min()
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
    let end = text[start..].find(|c| !base64(c));
    Some(start..end.map_or(text.len(), |length| start + length))
}

/// Hides every secret of a mesh, and every run of base64 that is long enough to be a key, except the
/// first `keep` of them (the value of a public key).
fn mask_runs(text: &str, keep: usize) -> String {
    let mut text = text.to_owned();
    while let Some(secret) = mesh_secret(&text) {
        text.replace_range(secret, MASK);
    }
    let base64 = |c: char| c.is_ascii_alphanumeric() || c == '+' || c == '/';
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    let mut seen = 0;
    while let Some(start) = rest.find(base64) {
        let (before, from) = rest.split_at(start);
        let end = from.find(|c| !base64(c)).unwrap_or(from.len());
        let (run, after) = from.split_at(end);
        out.push_str(before);
        if run.len() >= KEY_LIKE {
            out.push_str(if seen < keep { run } else { MASK });
            seen += 1;
        } else {
            out.push_str(run);
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Suggests the nearest known key.
pub(super) fn did_you_mean(nearest: Option<&str>, otherwise: &str) -> String {
    match nearest {
        Some(name) => format!("did you mean `{name}`?"),
        None => otherwise.to_owned(),
    }
}

/// Reports an empty list where "nobody" would be read as "anybody".
pub(super) fn empty_list(reporter: &mut Reporter<'_>, key: Field, line: usize) {
    let name = reporter.name(key);
    let help = format!("write which hosts are allowed; without `{name}` all are");
    reporter.key_error(key, line, "is empty", help);
}

/// Reports a key that does not exist, or not in this section; gives the key of this section that
/// was meant, if that is clear.
pub(super) fn unknown_key(
    reporter: &mut Reporter<'_>,
    name: &str,
    section: schema::SectionKind,
    line: usize,
) -> Option<Entry> {
    let syntax = reporter.syntax;
    let elsewhere: Vec<_> = schema::find_anywhere(name, syntax).collect();
    if let [spec, ..] = elsewhere[..] {
        let known = spec.name(syntax);
        let message = format!("does not belong {}", section.location(syntax));
        let locations = elsewhere.iter().map(|spec| spec.section.location(syntax));
        let help = format!(
            "`{known}` belongs {}",
            locations.collect::<Vec<_>>().join(" or ")
        );
        reporter.key_error(spec.key, line, &message, help);
        return None;
    }
    let message = format!("unknown key `{}` {}", word(name), section.location(syntax));
    let known: Vec<_> = schema::KEYS
        .iter()
        .filter(|spec| spec.section == section)
        .map(|spec| spec.name(syntax))
        .collect();
    let otherwise = format!("known keys: {}", known.join(", "));
    let near = schema::nearest(name, section);
    let help = did_you_mean(near.map(|spec| spec.name(syntax)), &otherwise);
    reporter.unknown_key(line, name, near.map(|spec| spec.key), &message, help);
    near.filter(|spec| spec.section == section)
        .map(|spec| Entry::invalid(spec.key, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";

    #[test]
    fn no_line_shows_a_secret() {
        for (line, key) in [
            (format!("PrivateKey = {SECRET}"), Some(Field::PrivateKey)),
            (format!("privatekey={SECRET}"), None),
            (
                format!("PrivateKey = {}", &SECRET[..20]),
                Some(Field::PrivateKey),
            ),
            (format!("PrivteKey = {SECRET}"), None),
            (format!("PrivteKey = {}", &SECRET[..20]), None),
            (SECRET.to_owned(), None),
            (format!("ListenPort = {SECRET}"), Some(Field::ListenPort)),
            (
                format!("Address = 10.0.0.1 # {SECRET}"),
                Some(Field::Address),
            ),
            (
                format!("peer = [{{ public-key = \"x\", preshared-key = \"{SECRET}\" }}]"),
                Some(Field::PublicKey),
            ),
            (
                format!("PublicKey = {} # {SECRET}", SECRET.replace('y', "z")),
                Some(Field::PublicKey),
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
                (
                    format!("coordinator = \"{secret}\""),
                    Some(Field::Coordinator),
                ),
                (
                    format!("CoordinatorPin = {secret}"),
                    Some(Field::CoordinatorPin),
                ),
                (format!("PublicKey = {secret}"), Some(Field::PublicKey)),
                (format!("MTU = 1{secret} {secret}"), Some(Field::Mtu)),
                (format!("[{secret}]"), None),
                (format!("{secret} = 1"), None),
                (
                    "credential = AAECAwQFBgc".to_owned(),
                    Some(Field::Coordinator),
                ),
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
        assert_eq!(excerpt(line, Some(Field::PrivateKeyFile)), line);
    }

    #[test]
    fn a_terminal_is_not_steered() {
        assert_eq!(
            excerpt("MTU = \x1b[2J", Some(Field::Mtu)),
            "MTU = \u{fffd}[2J"
        );
    }
}
