//! The `seikan-lab` command: measurements and tests of Seikan on one machine.
//!
//! Users start it by `seikan lab ...` and `seikan demo`. [`verbs`] has one file for every verb.
//! Exit status: 0 done, 1 failed, 2 wrong usage (clap's own).
#![forbid(unsafe_code)]

mod verbs;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match verbs::run(&verbs::Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            seikan_ui::output::error(&error);
            verbs::exit_code_of(&error)
        }
    }
}
