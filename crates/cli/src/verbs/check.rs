//! `seikan check`: checks a configuration file, or explains whether the policy of a mesh allows a
//! connection.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{Config, Diagnostics, Severity};
use seikan_mesh::cache;
use seikan_node::control::RuntimeDirs;
use seikan_proto::mesh::{Access, Member, Party, PartyName};
use serde::Serialize;

use crate::explain::Connection;
use crate::output::{self, counted};
use crate::overrides::OverrideArguments;

/// Options of `check`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan check ./wg0.conf                           list errors with lines and corrections\n  \
    seikan check wg0 --json                           list them as JSON\n  \
    sudo seikan check --explain laptop web-1 tcp/443  may `laptop` connect to port 443 of `web-1`?\n\n\
    Exit status: 0 if the file is usable (with or without warnings) or the policy allows it, 1 if not.")]
pub struct Arguments {
    /// Configuration file or interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "explain")]
    target: Option<String>,
    /// Explain whether the policy lets FROM open a connection to TO; PORT is tcp/443, udp/53, icmp,
    /// or * for other protocols
    #[arg(long, num_args = 3, value_names = ["FROM", "TO", "PORT"],
          conflicts_with_all = ["target", "OverrideArguments"])]
    explain: Option<Vec<String>>,
    /// Interface of the mesh, for --explain
    #[arg(
        long,
        value_name = "IFACE",
        default_value = "seikan0",
        conflicts_with = "target"
    )]
    iface: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    overrides: OverrideArguments,
}

/// Result of the check of a configuration file.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report<'a> {
    /// Path of the file; the argument if it was not found.
    file: String,
    /// Whether a tunnel can be started with it.
    usable: bool,
    /// Number of errors.
    errors: usize,
    /// Number of warnings.
    warnings: usize,
    /// Number of notes.
    notes: usize,
    /// Errors, warnings and notes, ordered by line.
    diagnostics: &'a Diagnostics,
}

/// Checks the file, or explains the policy.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match (&arguments.explain, &arguments.target) {
        (Some(words), _) => explain(words, &arguments.iface, arguments.json),
        (None, target) => check(target.as_deref().unwrap_or_default(), arguments),
    }
}

/// Explains from the daemon's copy of the mesh.
fn explain(words: &[String], interface: &str, as_json: bool) -> anyhow::Result<ExitCode> {
    let [from, to, traffic] = words else {
        bail!("cannot explain: --explain takes FROM, TO and PORT");
    };
    let membership = cache::stored_membership(&RuntimeDirs::for_client(Some(interface)).state, interface).with_context(|| {
        format!("cannot explain: there is no copy of a mesh for {interface}; run `seikan up {interface}` once, or name another --iface")
    })?;
    let Access {
        own: Some(own),
        devices,
        policy,
    } = membership.access()
    else {
        bail!(
            "cannot explain: the coordinator of {interface} is of an earlier version without policies, so everything is allowed"
        );
    };
    let here = devices.iter().map(|device| device.party(&own.name));
    let here: Vec<Party> = std::iter::once(own.clone()).chain(here).collect();
    let members = membership.members().values();
    let all: Vec<Party> = here
        .iter()
        .cloned()
        .chain(members.flat_map(Member::parties))
        .collect();
    let party = |name: &PartyName| -> anyhow::Result<Party> {
        let party = all.iter().find(|party| party.full_name() == *name).cloned();
        party.with_context(|| {
            format!("cannot explain: this host may talk to no member or device called {name}; run `seikan coordinator policy explain` on the coordinator's host")
        })
    };
    let ends: [PartyName; 2] = [from.parse()?, to.parse()?];
    let is_here = |name: &PartyName| here.iter().any(|party| party.full_name() == *name);
    if policy.untold() > 0 && !ends.iter().any(is_here) {
        bail!(
            "cannot explain: this host has only the rules about itself; run `seikan coordinator policy explain {from} {to} {traffic}` on \
             the coordinator's host"
        );
    }
    let connection = Connection {
        from: party(&ends[0])?,
        to: party(&ends[1])?,
        traffic: traffic.parse()?,
    };
    connection.answer(policy, as_json)
}

/// Checks the file and prints the result.
fn check(target: &str, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (config, file, diagnostics) = match arguments.overrides.with_environment() {
        Ok(overrides) => {
            let parsed = seikan_config::load(target, &overrides);
            let file = parsed.path.map(|path| path.display().to_string());
            (parsed.config, file, parsed.diagnostics)
        }
        Err(faults) => (None, None, faults),
    };
    let report = Report {
        file: file.unwrap_or_else(|| target.to_owned()),
        usable: config.is_some(),
        errors: diagnostics.count(Severity::Error),
        warnings: diagnostics.count(Severity::Warning),
        notes: diagnostics.count(Severity::Note),
        diagnostics: &diagnostics,
    };
    if arguments.json {
        output::print_json(&report)?;
    } else {
        output::diagnostics(&diagnostics);
        writeln!(io::stdout(), "{}", summary(&report, config.as_ref()))?;
    }
    Ok(if config.is_some() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Returns the last line of the output.
fn summary(report: &Report<'_>, config: Option<&Config>) -> String {
    let rest = |count, noun| match count {
        0 => String::new(),
        count => format!(", {}", counted(count, noun)),
    };
    let warnings = rest(report.warnings, "warning") + &rest(report.notes, "note");
    match config {
        Some(config) => {
            let gateway = config.gateway.as_ref().map(|gateway| {
                let devices = counted(gateway.devices.len(), "device");
                let remotes = counted(gateway.remotes.len(), "remote");
                format!(
                    ", {} gateway on {} for {devices} and {remotes}",
                    gateway.mode, gateway.interface
                )
            });
            format!(
                "{}: usable: interface {}, protocol {}, {}{}{warnings}",
                report.file,
                config.name,
                config.protocol,
                counted(config.peers.len(), "peer"),
                gateway.unwrap_or_default()
            )
        }
        None => format!(
            "{}: not usable: {}{warnings}",
            report.file,
            counted(report.errors, "error")
        ),
    }
}
