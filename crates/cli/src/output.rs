//! What people read: errors and findings on standard error, in colour where it is wanted.

use std::io::{self, Write};
use std::path::Path;

use anstream::{AutoStream, ColorChoice};
use anyhow::Context;
use seikan_config::Diagnostics;

use crate::screen::printable_lines;

/// Whether standard error takes colours: a terminal, and `NO_COLOR` is not set.
fn colours() -> bool {
    AutoStream::choice(&io::stderr()) != ColorChoice::Never
}

/// Says why the command failed. Some of that may be what a file or a coordinator says, which moves no terminal's cursor. Nothing can be done
/// about a standard error that is closed.
pub fn error(error: &anyhow::Error) {
    let label = if colours() {
        "\x1b[1;31merror\x1b[0m"
    } else {
        "error"
    };
    let _ = writeln!(
        io::stderr(),
        "{label}: {}",
        printable_lines(&told_once(error))
    );
}

/// An error and its causes in one line; a cause that the error tells itself is not told again.
fn told_once(error: &anyhow::Error) -> String {
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

/// Shows findings about a configuration.
pub fn diagnostics(diagnostics: &Diagnostics) {
    if !diagnostics.is_empty() {
        let _ = writeln!(io::stderr(), "{}", diagnostics.render(colours()));
    }
}

/// "1 error", "2 errors".
pub fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

/// Writes a result to a file of the user's choice.
pub fn write_file(file: &Path, content: &str) -> anyhow::Result<()> {
    std::fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn every_cause_is_told_once() {
        let error = anyhow!("no entry").context("cannot open: no entry");
        assert_eq!(
            told_once(&error.context("start")),
            "start: cannot open: no entry"
        );
    }
}
