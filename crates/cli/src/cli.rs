//! The command line. Help, completions and man pages are made from it.

use std::ffi::OsString;
use std::fmt::Write;
use std::process::ExitCode;

use clap::builder::Styles;
use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use seikan_ui::generate;

use crate::verbs;

/// Run, join, diagnose and repair encrypted tunnels.
#[derive(Debug, Parser)]
#[command(
    name = "seikan",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Example:\n  \
    sudo seikan demo    show a tunnel, load and a diagnosis on this machine\n\n\
    `seikan COMMAND --help` shows options and examples of a command.\n\
    `seikan IFACE` behaves as wireguard-go does, for wg-quick.\n\
    Exit status: 0 done, 1 failed, 2 wrong usage. NO_COLOR turns colours off.")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

/// The verbs. [`GROUPS`] has their order in the help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run a tunnel from a configuration file
    Up(verbs::up::Arguments),
    /// Stop a tunnel
    Down(verbs::down::Arguments),
    /// Apply a changed configuration file to a running tunnel
    Reload(verbs::reload::Arguments),
    /// Show tunnels, peers, rates and dropped packets
    Status(verbs::status::Arguments),
    /// Check a configuration file
    Check(verbs::check::Arguments),
    /// Show the devices of a gateway, or discover hosts on a LAN
    Gateway(verbs::gateway::Arguments),
    /// Join a mesh
    Join(verbs::join::Arguments),
    /// Leave a mesh
    Leave(verbs::leave::Arguments),
    /// Measure the round trip to a peer and show its path
    Ping(verbs::ping::Arguments),
    /// Replace this host's key in its mesh
    RotateKey(verbs::rotate_key::Arguments),
    /// Run or administer the coordinator of a mesh
    Coordinator(Box<verbs::coordinator::Arguments>),
    /// Run a relay for members without a direct path
    Relay(verbs::relay::Arguments),
    /// Diagnose why a tunnel is slow
    Doctor(verbs::doctor::Arguments),
    /// Measure the path to another host, with and without the tunnel
    Bench(verbs::bench::Arguments),
    /// Watch a tunnel in the terminal
    Top(verbs::top::Arguments),
    /// Report NAT type, reachability and relays of this host
    Netcheck(verbs::netcheck::Arguments),
    /// Record a tunnel for `seikan doctor --from`
    Record(verbs::record::Arguments),
    /// Draw a recording as an HTML page
    Report(verbs::report::Arguments),
    /// Write an archive to attach to a bug report
    Bugreport(verbs::bugreport::Arguments),
    /// Print a new private key
    Genkey(verbs::genkey::Arguments),
    /// Print the public key of the private key on standard input
    Pubkey(verbs::pubkey::Arguments),
    /// Print a new preshared key
    Genpsk(verbs::genpsk::Arguments),
    /// Show a tunnel, load and a diagnosis on this machine
    Demo(verbs::lab::DemoArguments),
    /// Measure and test on this machine
    Lab(verbs::lab::Arguments),
    /// Write shell completions or man pages
    #[command(after_help = "Example:\n  seikan generate man ./man1")]
    Generate(generate::Arguments),
    /// An interface instead of a verb.
    #[command(skip)]
    Interface(verbs::interface::Arguments),
}

/// Groups of verbs in the help.
const GROUPS: [(&str, &[&str]); 4] = [
    (
        "Tunnel",
        &["up", "down", "reload", "status", "check", "gateway"],
    ),
    (
        "Mesh",
        &[
            "join",
            "leave",
            "ping",
            "rotate-key",
            "coordinator",
            "relay",
        ],
    ),
    (
        "Diagnose",
        &[
            "doctor",
            "bench",
            "top",
            "netcheck",
            "record",
            "report",
            "bugreport",
        ],
    ),
    (
        "Tools",
        &["genkey", "pubkey", "genpsk", "demo", "lab", "generate"],
    ),
];

/// Parses the arguments of this process; prints help or an error and exits if they ask for it.
pub fn parse() -> Verb {
    let words: Vec<OsString> = std::env::args_os().collect();
    if let Some(arguments) = verbs::interface::Arguments::of_link(&words) {
        return Verb::Interface(arguments);
    }
    let parsed = command()
        .try_get_matches_from(&words)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => cli.verb,
        Err(error) => match verbs::interface::Arguments::of_words(&words, is_unlike_verbs) {
            Some(arguments) => Verb::Interface(arguments),
            None => error.exit(),
        },
    }
}

/// Whether a word is neither a verb nor resembles one, as a misspelt verb does.
fn is_unlike_verbs(word: &str) -> bool {
    let error = command().try_get_matches_from(["seikan", word]).err();
    error.is_some_and(|error| {
        error.kind() == ErrorKind::InvalidSubcommand
            && error.get(ContextKind::SuggestedSubcommand).is_none()
    })
}

/// Returns the definition of the command line, with the verbs in groups: clap has one heading for
/// all of them.
pub fn command() -> clap::Command {
    let command = Cli::command();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{}\n{}\n{{options}}{{after-help}}",
        groups(&command),
        heading("Options")
    );
    command.help_template(template)
}

fn groups(command: &clap::Command) -> String {
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let width = names.map(|name| name.len()).max().unwrap_or_default();
    let literal = *Styles::styled().get_literal();
    let mut text = String::new();
    for (group, names) in GROUPS {
        let _ = writeln!(text, "\n{}", heading(group));
        for name in names {
            let verb = command.find_subcommand(name);
            let about = verb.and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {literal}{name:width$}{literal:#}  {about}");
        }
    }
    text
}

fn heading(text: &str) -> String {
    let style = *Styles::styled().get_header();
    format!("{style}{text}:{style:#}")
}

impl Verb {
    /// Runs the verb.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Verb::Up(arguments) => verbs::up::run(&arguments),
            Verb::Down(arguments) => verbs::down::run(&arguments),
            Verb::Reload(arguments) => verbs::reload::run(&arguments),
            Verb::Status(arguments) => verbs::status::run(&arguments),
            Verb::Check(arguments) => verbs::check::run(&arguments),
            Verb::Gateway(arguments) => verbs::gateway::run(&arguments),
            Verb::Join(arguments) => verbs::join::run(&arguments),
            Verb::Leave(arguments) => verbs::leave::run(&arguments),
            Verb::Ping(arguments) => verbs::ping::run(&arguments),
            Verb::RotateKey(arguments) => verbs::rotate_key::run(&arguments),
            Verb::Coordinator(arguments) => verbs::coordinator::run(&arguments),
            Verb::Relay(arguments) => verbs::relay::run(&arguments),
            Verb::Doctor(arguments) => verbs::doctor::run(&arguments),
            Verb::Bench(arguments) => verbs::bench::run(&arguments),
            Verb::Top(arguments) => verbs::top::run(&arguments),
            Verb::Netcheck(arguments) => verbs::netcheck::run(&arguments),
            Verb::Record(arguments) => verbs::record::run(&arguments),
            Verb::Report(arguments) => verbs::report::run(&arguments),
            Verb::Bugreport(arguments) => verbs::bugreport::run(&arguments),
            Verb::Genkey(arguments) => verbs::genkey::run(&arguments),
            Verb::Pubkey(arguments) => verbs::pubkey::run(&arguments),
            Verb::Genpsk(arguments) => verbs::genpsk::run(&arguments),
            Verb::Demo(arguments) => verbs::lab::demo(&arguments),
            Verb::Lab(arguments) => verbs::lab::run(&arguments),
            Verb::Generate(arguments) => {
                // The pages of these are written by `seikan-lab generate`.
                let others = ["demo", "lab"];
                generate::run(&arguments, "seikan", command(), &others)
            }
            Verb::Interface(arguments) => verbs::interface::run(&arguments),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn misspelt_verbs_are_no_interfaces() {
        for word in ["up", "statsu", "dwon", "doctr", "help", "-f", "--version"] {
            assert!(!is_unlike_verbs(word), "{word}");
        }
        for word in ["wg0", "wg-home", "tun0", "s123x0a"] {
            assert!(is_unlike_verbs(word), "{word}");
        }
    }

    #[test]
    fn every_verb_has_an_example() {
        fn check(command: &clap::Command) {
            for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
                let after = verb.get_after_help().map(ToString::to_string);
                let name = verb.get_name();
                assert!(after.is_some_and(|text| text.contains(name)), "{name}");
                check(verb);
            }
        }
        check(&command());
    }

    #[test]
    fn every_verb_is_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, names)| *names)
            .copied()
            .collect();
        let command = command();
        let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
        let mut all: Vec<&str> = verbs.map(clap::Command::get_name).collect();
        grouped.sort_unstable();
        all.sort_unstable();
        assert_eq!(grouped, all);
    }
}
