//! The `seikan` command: words from the command line to a call into the library that does the work.
//!
//! [`cli::Cli`] says what may be written; [`verbs`] has one file for every verb, with its options and its `run`.
//! Exit status: 0 done, 1 failed, 2 wrong usage (clap's own).
#![forbid(unsafe_code)]

mod cli;
mod explain;
mod fix;
mod folder;
mod manager;
mod output;
mod recording;
mod verbs;

use std::io;
use std::process::ExitCode;

use clap::Parser;
use seikan_ui::screen;

fn main() -> ExitCode {
    match verbs::run(cli::Cli::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            // A reader that has seen enough (`| head`) needs no complaint.
            let cause = error.root_cause().downcast_ref::<io::Error>();
            if cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe) {
                return ExitCode::FAILURE;
            }
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}
