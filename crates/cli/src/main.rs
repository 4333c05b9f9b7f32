//! The `seikan` command.
//!
//! [`cli::Verb`] defines the command line; [`verbs`] has one file for every verb, with its options
//! and its `run`. A word that is no verb may be an interface ([`verbs::interface`]). Exit status: 0
//! done, 1 failed, 2 wrong usage (clap's own), or a configuration that `up` cannot use.
#![forbid(unsafe_code)]

mod background;
mod cli;
mod explain;
mod fix;
mod logging;
mod manager;
mod output;
mod overrides;
mod permission;
mod recording;
#[cfg(test)]
mod schema;
mod service;
mod ssh;
mod userspace;
mod verbs;

use std::io;
use std::process::ExitCode;

use seikan_ui::screen;

fn main() -> ExitCode {
    permission::remember_user();
    match cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            // A reader that closed the pipe early (`| head`) is no error to report.
            let cause = error.root_cause().downcast_ref::<io::Error>();
            if cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe) {
                return ExitCode::FAILURE;
            }
            output::error(&error);
            ExitCode::FAILURE
        }
    }
}
