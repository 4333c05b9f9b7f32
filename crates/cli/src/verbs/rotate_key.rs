//! `seikan rotate-key`: gives a member of a mesh another key, without an end of its sessions.
//!
//! The order is such that this host can come up after a crash between any two steps: first the file has the new key, then the running
//! tunnel, then the coordinator. A tunnel tells its coordinator its key whenever it starts or has another one, so what is left
//! undone by a crash is done then.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_config::{Config, Overrides, PrivateKey, encode_key};
use seikan_node::control::{Places, ask};
use seikan_node::mesh::client::{Client, wait_for};
use seikan_node::node::SystemRandom;
use seikan_node::save;

use crate::output;

/// What `rotate-key` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan rotate-key              of the member seikan0\n  \
    sudo seikan rotate-key office       of another interface\n\n\
    Makes a new private key, which never leaves this host, and writes it to the interface's file; the coordinator is told the public \
    one, and tells the others. Name, addresses and connections stay: no packet is lost. Members that have pinned the old key refuse \
    the new one until they pin that; members that cannot hear of it reach this host for three minutes more.")]
pub struct Arguments {
    /// Interface, or its file
    #[arg(value_name = "IFACE|FILE", default_value = "seikan0", value_hint = ValueHint::AnyPath)]
    target: String,
}

/// Rotates.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let parsed = seikan_config::load(&arguments.target, &Overrides::default());
    let (Some(config), Some(file)) = (parsed.config, parsed.path) else {
        output::diagnostics(&parsed.diagnostics);
        return Ok(ExitCode::FAILURE);
    };
    let Some(mesh) = &config.mesh else {
        bail!(
            "{} is of no mesh: write its new key into it, and the public one into the files of its peers",
            file.display()
        );
    };
    if config.gateway.is_some() && is_running(&config)? {
        let name = &config.name;
        bail!(
            "{name} is a gateway, whose address on the local network is made of its key: stop it (`seikan down {name}`), run this \
             again, and start it; nothing was changed"
        );
    }
    let client = Client::new(&mesh.coordinator, mesh.pin, Some(mesh.credential.clone()))?;
    let key = PrivateKey::generate(&mut SystemRandom);
    let public = key.public();
    save::set_private_key(&file, &key)?;
    let done = take_on(&config, &key).and_then(|()| Ok(wait_for(client.rotate(public))?));
    if let Err(error) = done {
        // A coordinator that was told all the same is told the old one again by the tunnel, now or when it starts.
        let back = save::set_private_key(&file, &config.private_key);
        back.map_err(anyhow::Error::from)
            .and_then(|()| take_on(&config, &config.private_key))
            .context("the new key cannot be taken back; run `seikan rotate-key` again")?;
        return Err(error).context("the key was not changed");
    }
    let name = &config.name;
    writeln!(io::stdout(), "{name} has another key: {public}")?;
    Ok(ExitCode::SUCCESS)
}

/// Has the tunnel take on a key, if it runs.
fn take_on(config: &Config, key: &PrivateKey) -> anyhow::Result<()> {
    if is_running(config)? {
        let key = encode_key(key.as_bytes());
        ask::rotate(&Places::default(), config.name.as_str(), &key)?;
    }
    Ok(())
}

fn is_running(config: &Config) -> anyhow::Result<bool> {
    let running = ask::running(&Places::default())?;
    Ok(running.iter().any(|name| name == config.name.as_str()))
}
