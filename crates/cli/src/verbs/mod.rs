//! One file for every verb: its `Arguments` with their help, and `run`.

pub mod check;
pub mod coordinator;
pub mod doctor;
pub mod down;
pub mod gateway;
pub mod generate;
pub mod genkey;
pub mod genpsk;
pub mod join;
pub mod lab;
pub mod leave;
pub mod netcheck;
pub mod ping;
pub mod pubkey;
pub mod record;
pub mod relay;
pub mod report;
pub mod rotate_key;
pub mod status;
pub mod top;
pub mod up;

use std::process::ExitCode;

use crate::cli::Verb;

/// Does what was asked for.
pub fn run(verb: Verb) -> anyhow::Result<ExitCode> {
    match verb {
        Verb::Demo(arguments) => lab::demo(&arguments),
        Verb::Up(arguments) => up::run(&arguments),
        Verb::Down(arguments) => down::run(&arguments),
        Verb::Status(arguments) => status::run(&arguments),
        Verb::Doctor(arguments) => doctor::run(&arguments),
        Verb::Record(arguments) => record::run(&arguments),
        Verb::Report(arguments) => report::run(&arguments),
        Verb::Top(arguments) => top::run(&arguments),
        Verb::Join(arguments) => join::run(&arguments),
        Verb::Leave(arguments) => leave::run(&arguments),
        Verb::Netcheck(arguments) => netcheck::run(&arguments),
        Verb::RotateKey(arguments) => rotate_key::run(&arguments),
        Verb::Ping(arguments) => ping::run(&arguments),
        Verb::Coordinator(arguments) => coordinator::run(&arguments),
        Verb::Relay(arguments) => relay::run(&arguments),
        Verb::Gateway(arguments) => gateway::run(&arguments),
        Verb::Genkey(arguments) => genkey::run(&arguments),
        Verb::Pubkey(arguments) => pubkey::run(&arguments),
        Verb::Genpsk(arguments) => genpsk::run(&arguments),
        Verb::Check(arguments) => check::run(&arguments),
        Verb::Lab(arguments) => lab::run(&arguments),
        Verb::Generate(arguments) => generate::run(&arguments),
    }
}
