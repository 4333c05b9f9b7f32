//! Errors on standard error, results on standard output or in files; coloured on terminals.

use std::io::{self, Write};
use std::path::Path;

use anstream::{AutoStream, ColorChoice};
use anyhow::Context;
use serde::Serialize;

use crate::screen::printable_lines;

/// Returns whether standard error gets colours: it is a terminal, and `NO_COLOR` is not set.
pub fn colours() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// Returns standard output, without colours unless it is a terminal.
pub fn stdout() -> AutoStream<io::StdoutLock<'static>> {
    AutoStream::auto(io::stdout()).lock()
}

/// Prints a value as JSON, indented.
pub fn print_json(value: &(impl Serialize + ?Sized)) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    writeln!(io::stdout(), "{json}")?;
    Ok(())
}

/// Prints an error and its causes, with control characters replaced: parts may come from a file or
/// a coordinator. Ignores a closed standard error.
pub fn error(error: &anyhow::Error) {
    let label = if colours() {
        "\x1b[1;31merror\x1b[0m"
    } else {
        "error"
    };
    let text = printable_lines(&with_causes(error));
    let _ = writeln!(io::stderr(), "{label}: {text}");
}

/// Returns an error and its causes in one line, without causes that the error already contains.
fn with_causes(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .fold(error.to_string(), |text, cause| {
            let cause = cause.to_string();
            if text.contains(&cause) {
                text
            } else {
                format!("{text}: {cause}")
            }
        })
}

/// Returns a count with its noun: "1 error", "2 errors".
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Writes a result to a file.
pub fn write_file(file: &Path, content: &str) -> anyhow::Result<()> {
    std::fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn every_cause_is_printed_once() {
        let error = anyhow!("no entry").context("cannot open: no entry");
        assert_eq!(
            with_causes(&error.context("start")),
            "start: cannot open: no entry"
        );
    }
}
