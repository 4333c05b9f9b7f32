//! The `seikan` command.
#![forbid(unsafe_code)]
fn main() {}
