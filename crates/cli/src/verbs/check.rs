//! `seikan check`: everything that is wrong with a configuration file; or why the mesh lets a member begin something with another, or not.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{Config, Diagnostics, Severity};
use seikan_node::control::Places;
use seikan_node::mesh;
use seikan_proto::mesh::{Access, Name, Party};
use serde::Serialize;

use crate::cli::OverrideArguments;
use crate::explain::Question;
use crate::output::{self, counted};

/// What `check` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan check ./wg0.conf             every fault, with its line and what would be right\n  \
    seikan check wg0 --json             the same for a program\n  \
    sudo seikan check --explain laptop web-1 tcp/443\n                                      \
    may `laptop` connect to port 443 of `web-1`, and why?\n\n\
    Exit status: 0 if the file can be used (there may be warnings), or the policy allows it; 1 if not.")]
pub struct Arguments {
    /// Configuration file, or the name of an interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "explain")]
    target: Option<String>,
    /// Say whether the policy of the mesh lets one member begin this with another: tcp/443, udp/53, icmp, or * for other protocols
    #[arg(long, num_args = 3, value_names = ["FROM", "TO", "PORT"],
          conflicts_with_all = ["target", "OverrideArguments"])]
    explain: Option<Vec<String>>,
    /// Interface of the mesh, with --explain
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

/// The result, for programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    file: String,
    usable: bool,
    errors: usize,
    warnings: usize,
    diagnostics: &'a Diagnostics,
}

/// Does what was asked for.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match (&arguments.explain, &arguments.target) {
        (Some(words), _) => explain(words, &arguments.iface, arguments.json),
        (None, target) => check(target.as_deref().unwrap_or_default(), arguments),
    }
}

/// Answers from what the daemon has kept of its mesh.
fn explain(words: &[String], interface: &str, as_json: bool) -> anyhow::Result<ExitCode> {
    let [from, to, traffic] = words else {
        bail!("--explain takes FROM, TO and PORT");
    };
    let membership = mesh::kept(&Places::default().state, interface).with_context(|| {
        format!("nothing is known here of a mesh of {interface}: say --iface, and have it up once")
    })?;
    let Access {
        own: Some(own),
        policy,
    } = membership.access()
    else {
        bail!(
            "the coordinator of {interface} tells of no policy, being of an earlier version: everything is let in"
        );
    };
    let party = |name: &str| -> anyhow::Result<Party> {
        let name: Name = name.parse()?;
        if name == own.name {
            return Ok(own.clone());
        }
        let member = membership
            .members()
            .values()
            .find(|member| member.name == name);
        let member = member.with_context(|| {
            format!("no member that this host may talk to is called {name}; ask where the coordinator is: seikan coordinator policy explain")
        })?;
        Ok(member.party())
    };
    if policy.untold() > 0 && ![from, to].contains(&&own.name.to_string()) {
        bail!(
            "this host is told no rules between others; ask where the coordinator is: seikan coordinator policy explain {from} {to} {traffic}"
        );
    }
    let question = Question {
        from: party(from)?,
        to: party(to)?,
        traffic: traffic.parse()?,
    };
    question.answer(policy, as_json)
}

/// Reads the file and says what was found.
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
        diagnostics: &diagnostics,
    };
    if arguments.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write JSON")?;
        writeln!(io::stdout(), "{json}")?;
    } else {
        output::diagnostics(&diagnostics);
        writeln!(io::stdout(), "{}", summary(&report, config.as_ref()))?;
    }
    Ok(match config {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

/// One line at the end.
fn summary(report: &Report<'_>, config: Option<&Config>) -> String {
    let warnings = match report.warnings {
        0 => String::new(),
        count => format!(", {}", counted(count, "warning")),
    };
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
