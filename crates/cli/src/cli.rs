//! What may be written on the command line. Help, completions and man pages all come from this definition.

use clap::{Args, Parser, Subcommand, ValueEnum};
use seikan_config::{Diagnostics, Overrides, Protocol};

use crate::verbs;

/// A user-space secure overlay network that can say and prove what makes a tunnel slow.
#[derive(Debug, Parser)]
#[command(
    name = "seikan",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Example:\n  \
    sudo seikan demo                    see it work on this machine, in under a minute\n\n\
    Exit status: 0 done, 1 failed, 2 wrong usage. NO_COLOR turns colours off.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs, in the order of the help.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show everything on this machine: two hosts, a tunnel, load, figures
    Demo(verbs::lab::DemoArguments),
    /// Run a tunnel from a configuration file
    Up(verbs::up::Arguments),
    /// Stop a tunnel
    Down(verbs::down::Arguments),
    /// Show tunnels: peers, rates, and every drop by its reason
    Status(verbs::status::Arguments),
    /// Find out what makes a tunnel slow
    Doctor(verbs::doctor::Arguments),
    /// Keep what a tunnel does in a file, for `doctor --from`
    Record(verbs::record::Arguments),
    /// Draw a recording of the doctor's as a page with pictures
    Report(verbs::report::Arguments),
    /// Watch a tunnel in the terminal
    Top(verbs::top::Arguments),
    /// Make this host a member of a mesh
    Join(verbs::join::Arguments),
    /// Give this host another key in its mesh, while it is up
    RotateKey(verbs::rotate_key::Arguments),
    /// Take this host out of a mesh
    Leave(verbs::leave::Arguments),
    /// See what lies between this host and the other members of its mesh
    Netcheck(verbs::netcheck::Arguments),
    /// Ask a peer whether it answers, how fast, and by which way
    Ping(verbs::ping::Arguments),
    /// Run the coordinator of a mesh, and see to its members
    Coordinator(Box<verbs::coordinator::Arguments>),
    /// Run a relay for members of a mesh that do not reach each other
    Relay(verbs::relay::Arguments),
    /// See the devices of a gateway, and who is on a local network
    Gateway(verbs::gateway::Arguments),
    /// Print a new private key
    Genkey(verbs::genkey::Arguments),
    /// Print the public key of the private key read from standard input
    Pubkey(verbs::pubkey::Arguments),
    /// Print a new preshared key
    Genpsk(verbs::genpsk::Arguments),
    /// Check a configuration file
    Check(verbs::check::Arguments),
    /// Measure and test on this machine
    Lab(verbs::lab::Arguments),
    /// Write shell completions and man pages
    #[command(hide = true)]
    Generate(verbs::generate::Arguments),
}

/// What replaces a value of the configuration file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Instead of what the file says")]
pub struct OverrideArguments {
    /// Wire protocol [environment: SEIKAN_PROTOCOL]
    #[arg(long)]
    pub protocol: Option<ProtocolName>,
    /// Use no segmentation or checksum offloads [environment: SEIKAN_OFFLOAD=false]
    #[arg(long)]
    pub no_offload: bool,
    /// Serve Prometheus metrics there, such as 127.0.0.1:9586 [environment: SEIKAN_METRICS]
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<std::net::SocketAddr>,
    /// MTU inside the tunnel [environment: SEIKAN_MTU]
    #[arg(long, value_name = "BYTES")]
    pub mtu: Option<u32>,
}

/// A wire protocol, as the command line has it.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum ProtocolName {
    /// WireGuard, with any WireGuard at the other end
    Wireguard,
    /// Seikan's own, with Seikan at the other end
    Native,
}

impl OverrideArguments {
    /// These options over the environment's variables.
    pub fn with_environment(&self) -> Result<Overrides, Diagnostics> {
        let options = Overrides {
            protocol: self.protocol.map(|name| match name {
                ProtocolName::Wireguard => Protocol::Wireguard,
                ProtocolName::Native => Protocol::Native,
            }),
            offload: self.no_offload.then_some(false),
            metrics: self.metrics,
            mtu: self.mtu,
        };
        Ok(options.over(Overrides::from_env()?))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        super::Cli::command().debug_assert();
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
        check(&super::Cli::command());
    }
}
