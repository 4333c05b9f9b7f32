//! `seikan leave`: removes this host from a mesh.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{MeshSettings, Overrides};
use seikan_mesh::client::{Client, wait_for};
use seikan_mesh::web_proxy::WebProxies;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_proto::mesh::Reason;

use crate::output;

/// Maximum time for the tunnel to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of `leave`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan leave                   leave the mesh of seikan0\n  \
    sudo seikan leave office --force    leave although the coordinator does not answer\n\n\
    Unregisters this host at the coordinator, stops the tunnel, and removes the file that `seikan join` wrote, \
    with the host's key.")]
pub struct Arguments {
    /// Interface or its configuration file
    #[arg(value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    target: String,
    /// Leave even if the coordinator does not answer; its administrator has to revoke this host
    #[arg(long)]
    force: bool,
}

/// Leaves the mesh.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parsed = seikan_config::load(&arguments.target, &Overrides::default());
    let (Some(config), Some(file)) = (parsed.config, parsed.path) else {
        output::diagnostics(&parsed.diagnostics);
        return Ok(ExitCode::FAILURE);
    };
    let Some(mesh) = &config.mesh else {
        bail!(
            "cannot leave: {} names no coordinator, so it belongs to no mesh",
            file.display()
        );
    };
    if let Err(error) = unregister(mesh) {
        if !arguments.force {
            return Err(error).context(
                "cannot leave, nothing was changed; add --force to leave without the coordinator",
            );
        }
        let error = error.context("cannot unregister; revoke this host at the coordinator");
        output::error(&error);
    }
    let name = config.name.as_str();
    let places = RuntimeDirs::for_client(Some(name));
    if places.is_running(name).unwrap_or(false) {
        ask::stop(&places, name, STOP_TIMEOUT).with_context(|| format!("cannot stop `{name}`"))?;
    }
    remove(&file)?;
    seikan_mesh::cache::forget(&places.state, name);
    writeln!(io::stdout(), "left the mesh and removed {}", file.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns a client of the coordinator with the credential of this host.
pub fn client(mesh: &MeshSettings) -> anyhow::Result<Client> {
    Ok(Client::new(
        &mesh.coordinator,
        mesh.pin,
        Some(mesh.credential.clone()),
        WebProxies::from_env()?,
    )?)
}

/// Unregisters this host at the coordinator. A revoked host is unregistered already.
fn unregister(mesh: &MeshSettings) -> anyhow::Result<()> {
    match wait_for(client(mesh)?.leave()) {
        Err(error) if error.reason() == Some(Reason::NotAMember) => Ok(()),
        other => Ok(other?),
    }
}

fn remove(file: &Path) -> anyhow::Result<()> {
    fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))
}
