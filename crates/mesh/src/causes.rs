//! Errors as one line of text.

use std::error::Error;

/// Describes an error and its causes; the innermost names the problem.
pub(crate) fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let description = cause.to_string();
        if !text.contains(&description) {
            text = format!("{text}: {description}");
        }
        source = cause.source();
    }
    text
}
