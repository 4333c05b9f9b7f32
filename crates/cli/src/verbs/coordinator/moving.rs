//! From one coordinator to several, and back.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use clap::{Args, ValueHint};
use seikan_coordinator::{Etcd, Store};
use seikan_proto::mesh::RelayAddress;

use super::etcd::{self, EtcdArguments};
use super::{DATABASE, Folder, now, operator};
use crate::output::counted;

/// Where to.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan coordinator import --etcd https://etcd-1:2379,https://etcd-2:2379 --advertise coordinator-1.example.org:7443\n\n\
    Stop the coordinator first, and start it again afterwards as before: it goes on from etcd, and members with what they have.\n\
    Others of its mesh need the same certificate: copy tls.pem to their folders.")]
pub struct ImportArguments {
    #[command(flatten)]
    etcd: EtcdArguments,
    /// Where members reach this coordinator, as if it were said at its next start
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<RelayAddress>,
    /// Put it in the place of a mesh that is there, which is the end of that one
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    folder: Folder,
}

/// Where to.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    seikan coordinator export /backup/mesh.db     a copy, also while coordinators run\n  \
    seikan coordinator export DIR/mesh.db         for one coordinator to go on with, if tls.pem is copied to DIR, too\n\n\
    What is changed afterwards is not in it.")]
pub struct ExportArguments {
    /// A file that is not there yet
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    #[command(flatten)]
    folder: Folder,
}

pub fn import(arguments: &ImportArguments) -> anyhow::Result<ExitCode> {
    let dir = &arguments.folder.dir;
    let Some(into) = arguments.etcd.settings()? else {
        bail!("say where etcd is: --etcd https://HOST:2379,...");
    };
    if let Some(noted) = etcd::noted(dir)? {
        bail!(
            "the mesh of {} is in etcd under {} already",
            dir.display(),
            noted.prefix
        );
    }
    let file = dir.join(DATABASE);
    if !file.try_exists()? {
        bail!("there is no {} to bring: say --dir", file.display());
    }
    let (_, pin) = arguments.folder.noted();
    let moved = Store::move_to_etcd(&file, &into, pin, arguments.replace, &operator(), now())?;
    let members = moved.store.members()?.len();
    // First: with neither of both the next start would make a mesh of its own.
    etcd::note(
        dir,
        &Etcd {
            advertise: arguments.advertise.clone(),
            ..into.clone()
        },
    )?;
    let away = moved.put_away()?;
    writeln!(
        anstream::stdout(),
        "the mesh of {} is in etcd now, under {}; {} is what it was. Start the coordinator again",
        counted(members, "member"),
        into.prefix,
        away.display()
    )?;
    Ok(ExitCode::SUCCESS)
}

pub fn export(arguments: &ExportArguments) -> anyhow::Result<ExitCode> {
    arguments.folder.store()?.export(&arguments.file)?;
    Ok(ExitCode::SUCCESS)
}
