//! Errors, findings and results, as people read them.

use std::io::{self, Write};

use seikan_config::Diagnostics;
pub use seikan_ui::output::{colours, counted, error};

/// Prints findings about a configuration on standard error.
pub fn diagnostics(diagnostics: &Diagnostics) {
    if !diagnostics.is_empty() {
        let _ = writeln!(io::stderr(), "{}", diagnostics.render(colours()));
    }
}
