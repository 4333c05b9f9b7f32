//! `seikan leave`: this host is a member of a mesh no more.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{MeshSettings, Overrides};
use seikan_node::control::{Places, ask};
use seikan_node::mesh::client::{Client, wait_for};
use seikan_proto::mesh::Reason;

use crate::output;

/// How long the tunnel has to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// What `leave` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan leave                   leave the mesh of seikan0\n  \
    sudo seikan leave office --force    even though its coordinator cannot be reached\n\n\
    Tells the coordinator, stops the tunnel, and removes the file that `seikan join` wrote, with the host's key.")]
pub struct Arguments {
    /// Interface, or its file
    #[arg(value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    target: String,
    /// Go on if the coordinator cannot be told: its administrator has to revoke this host
    #[arg(long)]
    force: bool,
}

/// Leaves.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parsed = seikan_config::load(&arguments.target, &Overrides::default());
    let (Some(config), Some(file)) = (parsed.config, parsed.path) else {
        output::diagnostics(&parsed.diagnostics);
        return Ok(ExitCode::FAILURE);
    };
    let Some(mesh) = &config.mesh else {
        bail!("{} is of no mesh: it names no coordinator", file.display());
    };
    let told = tell(mesh);
    if let Err(error) = told {
        if !arguments.force {
            return Err(error).context(
                "the coordinator cannot be told, so nothing was changed; with --force this host leaves all the same",
            );
        }
        let error = error.context("the coordinator was not told; have this host revoked there");
        output::error(&error);
    }
    let places = Places::default();
    let name = config.name.as_str();
    if ask::running(&places)
        .unwrap_or_default()
        .iter()
        .any(|running| running == name)
    {
        ask::stop(&places, name, PATIENCE).with_context(|| format!("cannot stop `{name}`"))?;
    }
    remove(&file)?;
    seikan_node::mesh::forget(&places.state, name);
    writeln!(io::stdout(), "left: {} is removed", file.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Tells the coordinator. Who was revoked has left.
fn tell(mesh: &MeshSettings) -> anyhow::Result<()> {
    let client = Client::new(&mesh.coordinator, mesh.pin, Some(mesh.credential.clone()))?;
    match wait_for(client.leave()) {
        Err(error) if error.reason() == Some(Reason::NotAMember) => Ok(()),
        other => Ok(other?),
    }
}

fn remove(file: &Path) -> anyhow::Result<()> {
    fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))
}
