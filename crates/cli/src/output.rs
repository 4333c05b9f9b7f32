//! Errors and diagnostics on standard error, results on standard output; coloured on terminals.

use std::io::{self, Write};

use seikan_config::{Diagnostic, Diagnostics, Severity};
pub use seikan_ui::output::{colours, counted, print_json, stdout};

use crate::permission;

/// Prints an error and its causes. If rights are missing, also prints the command to run.
pub fn error(error: &anyhow::Error) {
    seikan_ui::output::error(error);
    permission::advise(&format!("{error:#}"), true);
}

/// Prints diagnostics of a configuration. If a file cannot be read, also the command that can.
pub fn diagnostics(diagnostics: &Diagnostics) {
    if !diagnostics.is_empty() {
        let _ = writeln!(io::stderr(), "{}", diagnostics.render(colours()));
    }
    for fault in diagnostics.iter().filter(|d| d.severity == Severity::Error) {
        permission::advise(&fault.message, false);
    }
}

/// Prints one diagnostic of a configuration.
pub fn diagnostic(diagnostic: Diagnostic) {
    let mut all = Diagnostics::default();
    all.push(diagnostic);
    diagnostics(&all);
}
