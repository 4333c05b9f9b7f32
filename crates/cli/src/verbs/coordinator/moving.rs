//! From one coordinator to several, and back.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::fchown;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use seikan_coordinator::{Etcd, Store};
use seikan_proto::mesh::RelayAddress;

use super::etcd::{self, EtcdArguments};
use super::{DATABASE, Folder, noted, now, operator};
use crate::output::counted;

/// Where to.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    seikan coordinator import --etcd https://etcd-1:2379,https://etcd-2:2379 --advertise coordinator-1.example.org:7443\n\n\
    Stop the coordinator first, and start it again afterwards as before: it goes on from etcd, and members with what they have. \
    Others of its mesh need the same certificate: copy tls.pem to their folders.\n\n\
    If it is broken off, or etcd does not answer in the end, the coordinator does not start until the same was done again, or taken back:\n  \
    seikan coordinator import --etcd https://etcd-1:2379 --undo\n\n\
    With --replace the mesh that was there is gone from the moment that this begins, also if it is broken off or taken back: copy it first, \
    in the folder of one of its coordinators:\n  \
    seikan coordinator export /backup/former.db")]
pub struct ImportArguments {
    #[command(flatten)]
    etcd: EtcdArguments,
    /// Where members reach this coordinator, as if it were said at its next start
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<RelayAddress>,
    /// Put it in the place of a mesh that is there, which is the end of that one, also if this is broken off: `export` it first
    #[arg(long)]
    replace: bool,
    /// Take back an import that was broken off: the mesh stays in its file. One that --replace was to end does not come back
    #[arg(long, conflicts_with_all = ["replace", "advertise"])]
    undo: bool,
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
    let Some(into) = arguments.etcd.settings(None)? else {
        bail!("say where etcd is: --etcd https://HOST:2379,...");
    };
    // Also the password and the certificates are read by who the coordinator will be.
    arguments
        .folder
        .as_owner(|dir| move_from(dir, arguments, &into))
}

fn move_from(dir: &Path, arguments: &ImportArguments, into: &Etcd) -> anyhow::Result<ExitCode> {
    let file = dir.join(DATABASE);
    let is_there = file.try_exists()?;
    // One that was broken off after it was noted goes on.
    let is_moving = is_there && Store::is_moving(&file)?;
    if let Some(noted) = etcd::noted(dir)?.filter(|_| !is_moving) {
        bail!(
            "the mesh of {} is in etcd under {} already",
            dir.display(),
            noted.prefix
        );
    }
    if !is_there {
        bail!("there is no {} to bring: say --dir", file.display());
    }
    if arguments.undo {
        Store::undo_move(&file, into, |mesh| etcd::forget(dir, mesh))?;
        return Ok(ExitCode::SUCCESS);
    }
    let (_, pin) = noted(dir);
    let moved = Store::move_to_etcd(&file, into, pin, arguments.replace, &operator(), now())?;
    let members = moved.store.members()?.len();
    // First: with neither of both the next start would make a mesh of its own.
    etcd::note(
        dir,
        &Etcd {
            advertise: arguments.advertise.clone(),
            mesh: moved.store.mesh(),
            ..into.clone()
        },
    )?;
    let away = moved.put_away()?;
    writeln!(
        anstream::stdout(),
        "the mesh of {} is in etcd now, under {}; {} is what it was. Start the coordinator again",
        counted(members, "member"),
        into.prefix,
        away.file.display()
    )?;
    if let Some(error) = away.marked {
        writeln!(
            io::stderr(),
            "warning: {} cannot be opened again as it is: {error}",
            away.file.display()
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

pub fn export(arguments: &ExportArguments) -> anyhow::Result<ExitCode> {
    let file = &arguments.file;
    let cannot = || format!("cannot write {}", file.display());
    // Before it is the folder's owner who opens.
    let (beside, new) = make(file).with_context(cannot)?;
    let write = |mut new: fs::File| {
        let copy = arguments.folder.store()?.export()?;
        let written = new.write_all(&copy).and_then(|()| new.sync_all());
        written.with_context(cannot)
    };
    write(new).map_err(|error| match beside.remove() {
        // Half a mesh is no use to anybody.
        Ok(()) => error,
        Err(_) => error.context(format!(
            "{} is left with nothing of use in it",
            file.display()
        )),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// A name in a folder that stays the same whatever is put in its place.
struct Beside<'a> {
    folder: OwnedFd,
    name: &'a OsStr,
}

impl Beside<'_> {
    fn remove(&self) -> io::Result<()> {
        Ok(unlinkat(
            &self.folder,
            self.name,
            UnlinkatFlags::NoRemoveDir,
        )?)
    }
}

/// A new file, for its owner only, who is the folder's if root makes it: for a service that is another user.
fn make(file: &Path) -> io::Result<(Beside<'_>, fs::File)> {
    let name = file.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new("."));
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let folder = open(folder, flags, Mode::empty())?;
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
    let new = openat(&folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let (own, owner) = (fstat(&new)?, fstat(&folder)?);
    if own.st_uid == 0 && owner.st_uid != 0 {
        fchown(&new, Some(owner.st_uid), Some(owner.st_gid))?;
    }
    Ok((Beside { folder, name }, new.into()))
}
