//! Errors on standard error, in colour where it is wanted, and results in files.

use std::io::{self, Write};
use std::path::Path;

use crate::screen::printable_lines;
use anstream::{AutoStream, ColorChoice};
use anyhow::Context;

/// Whether standard error takes colours: a terminal, and `NO_COLOR` is not set.
pub fn colours() -> bool {
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
        printable_lines(&with_causes(error))
    );
}

/// An error and its causes in one line; a cause that the error tells itself is not told again.
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
    fn every_cause_is_named_once() {
        let error = anyhow!("no entry").context("cannot open: no entry");
        assert_eq!(
            with_causes(&error.context("start")),
            "start: cannot open: no entry"
        );
    }
}
