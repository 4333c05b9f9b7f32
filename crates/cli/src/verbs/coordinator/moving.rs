//! `coordinator import` and `coordinator export`: from one coordinator to several, and back.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_coordinator::{Etcd, Store};
use seikan_proto::mesh::RelayAddress;

use super::etcd::{self, EtcdArguments};
use super::{DATABASE, Directory, now, operator, read_listener};
use crate::output::counted;
use crate::service;

/// Options of `coordinator import`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan coordinator import --etcd https://etcd-1:2379,https://etcd-2:2379 \\\n      \
    --advertise coordinator-1.example.org:7443\n\n\
    Stop the coordinator first and start it afterwards, without other options. Members keep what they have. \
    Other coordinators of the mesh need the same certificate: copy tls.pem to their directories.\n\n\
    After an interrupted import, or if etcd does not confirm the end, the coordinator does not start until the \
    import is repeated or undone:\n  \
    seikan coordinator import --etcd https://etcd-1:2379 --undo\n\n\
    --replace deletes the mesh that etcd holds, at once and also if the import is interrupted or undone. Copy \
    that mesh first, in the directory of one of its coordinators:\n  \
    seikan coordinator export /backup/former.db")]
pub struct ImportArguments {
    #[command(flatten)]
    etcd: EtcdArguments,
    /// Address by which members reach this coordinator, from its next start on
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<RelayAddress>,
    /// Delete the mesh that etcd holds under the prefix; `export` it first
    #[arg(long)]
    replace: bool,
    /// Undo an interrupted import: the mesh stays in its file. A mesh deleted by --replace is not
    /// restored
    #[arg(long, conflicts_with_all = ["replace", "advertise"])]
    undo: bool,
    #[command(flatten)]
    directory: Directory,
}

/// Options of `coordinator export`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan coordinator export /backup/mesh.db    copy the mesh while coordinators run\n  \
    sudo seikan coordinator export DIR/mesh.db        for one coordinator to continue with, if\n                                                    \
    tls.pem is copied to DIR too\n\n\
    Later changes are not in the copy.")]
pub struct ExportArguments {
    /// File to write; it must not exist
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,
    #[command(flatten)]
    directory: Directory,
}

pub fn import(arguments: &ImportArguments) -> anyhow::Result<()> {
    let Some(target) = arguments.etcd.settings(None)? else {
        bail!("cannot import: no etcd is given; add --etcd https://HOST:2379,...");
    };
    let operator = operator();
    let directory = &arguments.directory.dir;
    // From here on as the coordinator's user, which has to be able to read password and
    // certificates.
    service::enter_existing(directory)?;
    let file = directory.join(DATABASE);
    let exists = file.try_exists()?;
    // An interrupted import that has already written the settings may go on.
    let is_interrupted = exists && Store::is_moving(&file)?;
    if let Some(stored) = etcd::read_settings(directory)?.filter(|_| !is_interrupted) {
        bail!(
            "cannot import: the mesh of {} is already in etcd, under {}",
            directory.display(),
            stored.prefix
        );
    }
    if !exists {
        bail!(
            "cannot import: there is no {}; name its directory with --dir",
            file.display()
        );
    }
    if arguments.undo {
        Store::undo_move(&file, &target, |mesh| {
            etcd::remove_settings(directory, mesh)
        })?;
        return Ok(());
    }
    let pin = read_listener(directory).pin;
    let moved = Store::move_to_etcd(&file, &target, pin, arguments.replace, &operator, now())?;
    let members = moved.store.members()?.len();
    // Before the file is renamed: a start that found neither would make a new mesh.
    etcd::write_settings(
        directory,
        &Etcd {
            advertise: arguments.advertise.clone(),
            mesh: moved.store.mesh(),
            ..target.clone()
        },
    )?;
    let former = moved.retire()?;
    writeln!(
        anstream::stdout(),
        "moved the mesh of {} into etcd, under {}; its former file is {}. Start the coordinator again",
        counted(members, "member"),
        target.prefix,
        former.file.display()
    )?;
    if let Some(error) = former.marked {
        writeln!(
            io::stderr(),
            "warning: cannot remove the mark of the import from {}, so that it cannot be used again: {error}",
            former.file.display()
        )?;
    }
    Ok(())
}

pub fn export(arguments: &ExportArguments) -> anyhow::Result<()> {
    let file = &arguments.file;
    let failed = || format!("cannot write {}", file.display());
    // Made by the user of the command, before it becomes the coordinator's.
    let new = create(file).with_context(failed)?;
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
    let copy = arguments.directory.open()?.store.export()?;
    file.write_all(&copy)
        .and_then(|()| file.sync_all())
        .with_context(failed)
}

/// Creates a file for its owner only.
fn create(file: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
}
