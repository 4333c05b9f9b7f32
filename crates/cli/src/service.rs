//! The folder of a service, in which root works as who it belongs to.

use anyhow::{Context, bail};
use seikan_sys::confine::{self, Needs};
use seikan_sys::owner::{self, OwnerError, Place};
use seikan_sys::privilege::{self, Capability};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Works in the folder as its owner, by the path that is given to the work, and root stays that user: what is in a service's folder is not
/// to have root read, write or send anything, and what is made there the service can use.
pub fn as_owner<T>(
    folder: &Path,
    work: impl FnOnce(&Path) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    match owner::become_owner(folder)? {
        Some(place) => work_in(&place, work),
        None => bail!(
            "there is no folder {}: start the service once, which makes it, or say --dir",
            folder.display()
        ),
    }
}

/// The same, for work that makes the folder if it is not there.
pub fn as_owner_or_new<T>(
    folder: &Path,
    work: impl FnOnce(&Path) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    match owner::become_owner(folder)? {
        Some(place) => work_in(&place, work),
        None => {
            owner::may_make(folder)?;
            work(folder)
        }
    }
}

fn work_in<T>(place: &Place, work: impl FnOnce(&Path) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let done = work(&place.path);
    match place.user {
        Some(user) => done
            .with_context(|| format!("as user {user}, whose folder {} is", place.path.display())),
        None => done,
    }
}

/// Makes this process, a service, the owner of its folder before it opens anything there, if root has started it. A folder of root's, and a
/// new one, goes to the user that daemons become, if all names in it begin with one of `names`. The process keeps no capability but the
/// one that `ports` need, until it has bound them. Returns the folder by a path that is open to that user.
pub fn settle(folder: &Path, names: &[&str], ports: &[u16]) -> anyhow::Result<PathBuf> {
    privilege::forbid_core_dumps()?;
    let keep: &[Capability] = match ports.iter().any(|port| (1..1024).contains(port)) {
        true => &[Capability::CAP_NET_BIND_SERVICE],
        false => &[],
    };
    match owner::give_to_daemon(folder, names) {
        // In a user namespace that does not have that user, root is nobody outside of it.
        Err(error @ OwnerError::Become { .. }) => writeln!(
            anstream::stderr(),
            "warning: {error}; it runs as root without capabilities"
        )?,
        other => other?,
    }
    let place = owner::become_owner_with(folder, keep)?;
    privilege::keep_only(keep)?;
    Ok(place.map_or_else(|| folder.to_owned(), |place| place.path))
}

/// Confines a service to its folder, and to these files to read. Threads that it has already stay as they are.
pub fn confine_to(folder: &Path, files: Vec<PathBuf>) -> anyhow::Result<()> {
    let confinement = confine::confine(&Needs {
        packets: false,
        folders: vec![folder.to_owned()],
        files,
    });
    for (name, ability) in confinement.table() {
        if let Some(reason) = ability.reason() {
            writeln!(anstream::stderr(), "note: not confined: {name}: {reason}")?;
        }
    }
    Ok(())
}
