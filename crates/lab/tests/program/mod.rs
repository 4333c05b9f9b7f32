//! The program `seikan-lab` from outside.

mod bench;
mod crude;
mod gateway;
mod nat;
mod pass_through;
mod path;
mod reproduce;
mod scale;
mod scenarios;
mod score;
mod wire;

use std::process::Command;

/// Returns a command that runs `seikan-lab`.
fn lab() -> Command {
    Command::new(env!("CARGO_BIN_EXE_seikan-lab"))
}
