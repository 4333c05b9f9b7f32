//! `coordinator export` and `coordinator import`: a whole mesh as one file, as a backup, or from one
//! coordinator to several and back.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_coordinator::{Etcd, Store};

use super::etcd::{self, EtcdArguments};
use super::{DATABASE, Directory, lock, now, open_store, operator, read_listener};
use crate::output::counted;
use crate::service;

/// Options of `coordinator import`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator import /backup/mesh.snapshot \\\n      \
    --etcd https://etcd-1:2379,https://etcd-2:2379 --advertise coordinator-1.example.org:7443\n  \
    sudo seikan coordinator import /backup/mesh.snapshot    into a file of the directory\n\n\
    There must be no mesh yet, in the directory or in etcd under the prefix. Stop the coordinator before the \
    export: later changes are not in the snapshot. An interrupted import can be repeated. Members keep what \
    they have. Every coordinator of the mesh needs the same certificate: copy tls.pem to its directory.")]
pub struct ImportArguments {
    /// Snapshot, as `seikan coordinator export` wrote it
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    #[command(flatten)]
    etcd: EtcdArguments,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator export`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    sudo seikan coordinator export /backup/mesh.snapshot\n\n\
    Coordinators may run meanwhile. Later changes are not in the snapshot. It has the secrets of relays: \
    only its owner can read the file.")]
pub struct ExportArguments {
    /// File to write; it must not exist
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    #[command(flatten)]
    directory: Directory,
}

pub fn import(arguments: &ImportArguments) -> anyhow::Result<()> {
    let file = &arguments.file;
    // The file is read as the user of the command, before the process becomes the coordinator's
    // user.
    let snapshot = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let operator = operator();
    let directory = &arguments.directory.dir;
    service::enter(directory)?;
    if !directory.try_exists()? {
        bail!(
            "cannot import: there is no directory {}; make it, and copy tls.pem of the coordinator into it",
            directory.display()
        );
    }
    let alone = lock(directory, true)?;
    let stored = etcd::read_coordinator_settings(directory)?;
    match arguments.etcd.settings(stored.as_ref())? {
        None => Store::import_file(&snapshot, &directory.join(DATABASE), &operator, now())?,
        Some(etcd) => {
            etcd::refuse_both(directory, DATABASE)?;
            let pin = read_listener(directory).pin;
            let mesh = Store::import_etcd(&snapshot, &etcd, pin, &operator, now())?;
            let mesh = Some(mesh);
            etcd::write_settings(directory, &Etcd { mesh, ..etcd })?;
        }
    }
    drop(alone);
    let members = open_store(directory).and_then(|store| Ok(store.members()?.len()));
    writeln!(
        anstream::stdout(),
        "imported the mesh of {}. Start the coordinator",
        counted(
            members.context("the mesh is imported, but it cannot be read")?,
            "member"
        ),
    )?;
    Ok(())
}

pub fn export(arguments: &ExportArguments) -> anyhow::Result<()> {
    let file = &arguments.file;
    let failed = || format!("cannot write {}", file.display());
    // The file is made as the user of the command, before the process becomes the coordinator's
    // user.
    let new = service::create_private(file).with_context(failed)?;
    let result = write_copy(new, arguments, failed);
    if result.is_err() && fs::remove_file(file).is_err() {
        return result.with_context(|| format!("remove {}: it is incomplete", file.display()));
    }
    result
}

fn write_copy(
    mut file: File,
    arguments: &ExportArguments,
    failed: impl Fn() -> String,
) -> anyhow::Result<()> {
    let copy = arguments.directory.open()?.export()?;
    file.write_all(&copy)
        .and_then(|()| file.sync_all())
        .with_context(failed)
}
