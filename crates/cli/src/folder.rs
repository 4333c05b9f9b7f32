//! The folder of a service, in which root works as who it belongs to.

use anyhow::{Context, bail};
use seikan_sys::owner::{self, Place};
use std::path::Path;

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

/// A service that root starts in another user's folder is refused: started as that user it could not use what it has made there before. So
/// is one whose folder is not there, if somebody else could make it first.
pub fn refuse_foreign(folder: &Path, service: &str) -> anyhow::Result<()> {
    if let Some(user) = owner::foreign_owner(folder)? {
        bail!(
            "{} belongs to user {user}, and this is root: start it as that user, as its service does (systemctl start {service}), or \
             take another folder (--dir)",
            folder.display()
        );
    }
    Ok(())
}
