//! `seikan rotate-key`: replaces the key of a member without closing its sessions.
//!
//! The new key goes to the file first, then to the running tunnel, then to the coordinator. A
//! tunnel registers its key with the coordinator at each start and change, so that it completes a
//! rotation that a crash interrupted.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{Config, Overrides, PrivateKey, encode_key};
use seikan_mesh::client::wait_for;
use seikan_node::control::{RuntimeDirs, ask};
use seikan_node::save;
use seikan_node::system::SystemRandom;

use crate::output;

/// Options of `rotate-key`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan rotate-key           replace the key of seikan0\n  \
    sudo seikan rotate-key office    replace the key of another interface\n\n\
    Writes the new private key to the interface's file and registers the public key with the coordinator, which \
    sends it to the members. Name, addresses and connections stay; no packet is lost. Members that pinned the old \
    key refuse the new one until they pin it. Members that the coordinator does not reach can use the old key for \
    three more minutes.")]
pub struct Arguments {
    /// Interface or its configuration file
    #[arg(value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Rotates the key.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parsed = seikan_config::load(&arguments.target, &Overrides::default());
    let (Some(config), Some(file)) = (parsed.config, parsed.path) else {
        output::diagnostics(&parsed.diagnostics);
        return Ok(ExitCode::FAILURE);
    };
    let Some(mesh) = &config.mesh else {
        bail!(
            "cannot rotate the key of {}: it belongs to no mesh; write a new key into the file, and its public key into the files \
             of its peers",
            file.display()
        );
    };
    if config.gateway.is_some() && is_running(&config) {
        let name = &config.name;
        bail!(
            "cannot rotate the key of {name} while it runs: it is a gateway, and its address on the LAN depends on the key; run \
             `seikan down {name}`, then `seikan rotate-key {name}`, then `seikan up {name}`"
        );
    }
    let client = super::leave::client(mesh)?;
    let key = PrivateKey::generate(&mut SystemRandom);
    let public = key.public();
    save::set_private_key(&file, &key)?;
    let rotated =
        set_running_key(&config, &key).and_then(|()| Ok(wait_for(client.rotate(public))?));
    if let Err(error) = rotated {
        // The coordinator may have the new key. The tunnel registers the old one again, now or at
        // its start.
        let restored = save::set_private_key(&file, &config.private_key);
        restored
            .map_err(anyhow::Error::from)
            .and_then(|()| set_running_key(&config, &config.private_key))
            .context("cannot restore the old key; run `seikan rotate-key` again")?;
        return Err(error).context("cannot rotate the key; the old one stays");
    }
    let name = &config.name;
    writeln!(
        io::stdout(),
        "Key of {name} rotated. New public key: {public}"
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Replaces the key of the running tunnel, if it runs.
fn set_running_key(config: &Config, key: &PrivateKey) -> anyhow::Result<()> {
    if is_running(config) {
        let key = encode_key(key.as_bytes());
        let name = config.name.as_str();
        ask::rotate(&RuntimeDirs::for_client(Some(name)), name, &key)?;
    }
    Ok(())
}

fn is_running(config: &Config) -> bool {
    let name = config.name.as_str();
    // A request to a tunnel that cannot be examined fails with the reason.
    let running = RuntimeDirs::for_client(Some(name)).is_running(name);
    running.unwrap_or(true)
}
