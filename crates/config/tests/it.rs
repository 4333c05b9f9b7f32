//! Configuration files in both syntaxes, and the findings about them.
#![forbid(unsafe_code)]

mod diagnostics;
mod syntaxes;
