//! Errors and diagnostics on standard error, results on standard output; coloured on terminals.

use std::io::{self, Write};

use seikan_config::{Diagnostic, Diagnostics};
pub use seikan_ui::output::{colours, counted, error, print_json, stdout};

/// Prints diagnostics of a configuration.
pub fn diagnostics(diagnostics: &Diagnostics) {
    if !diagnostics.is_empty() {
        let _ = writeln!(io::stderr(), "{}", diagnostics.render(colours()));
    }
}

/// Prints one diagnostic of a configuration.
pub fn diagnostic(diagnostic: Diagnostic) {
    let mut all = Diagnostics::default();
    all.push(diagnostic);
    diagnostics(&all);
}
