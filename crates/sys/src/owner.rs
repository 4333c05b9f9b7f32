//! Work in another user's folder as that user.
//!
//! Root that opens what is in somebody else's folder does that user's bidding: a link leads it anywhere, and a file there can name others
//! that only root may read. [`become_owner`] gives up being root first, for good.
//!
//! The folder may lie behind one that its owner cannot pass, as that of a service with `DynamicUser=` does (`/var/lib/private`). Then this
//! process has mounts of its own, in which the way is open.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{Gid, Uid, geteuid, setgroups, setresgid, setresuid};

/// Why this process is still who it was.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// The folder cannot be looked at.
    #[error("cannot look at {}: {source}", path.display())]
    Look {
        /// The folder, or one above it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The folder was another one a moment ago.
    #[error("{} is being replaced by another: try again", path.display())]
    Replaced {
        /// The folder.
        path: PathBuf,
    },
    /// The owner cannot get there, and no mounts could be made in which it can.
    #[error(
        "user {user} cannot pass {} to its own folder, and a way around it cannot be mounted: {source}; run this as that user where it can",
        wall.display()
    )]
    Wall {
        /// Whose folder it is.
        user: u32,
        /// What it cannot pass.
        wall: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot become user {user}, whose folder it is: {source}")]
    Become {
        /// Who.
        user: u32,
        /// Why not.
        source: io::Error,
    },
}

/// The user whose folder this is, if it is another one than root, which this process is; `None` also if there is no folder.
///
/// # Errors
/// [`OwnerError::Look`].
pub fn foreign_owner(folder: &Path) -> Result<Option<u32>, OwnerError> {
    let found = open(folder)?.map(|folder| folder.user);
    Ok(found.filter(|user| geteuid().is_root() && *user != 0))
}

/// If this process is root and the folder another user's, become that user, with its group and no others, for good; who it is then. All
/// threads do. Whatever only root may open has to be open before.
///
/// # Errors
/// Each means that nothing may be opened there.
pub fn become_owner(folder: &Path) -> Result<Option<u32>, OwnerError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let Some(held) = open(folder)?.filter(|held| held.user != 0) else {
        return Ok(None);
    };
    if let Some(wall) = held.wall()? {
        let user = held.user;
        let walled = |source| OwnerError::Wall { user, wall, source };
        held.make_way(folder)?.map_err(walled)?;
    }
    let (user, group) = (Uid::from_raw(held.user), Gid::from_raw(held.group));
    let change = || {
        setgroups(&[])?;
        setresgid(group, group, group)?;
        // Last: it takes the right to do the others, and all capabilities (capabilities(7)).
        setresuid(user, user, user)?;
        nix::sys::prctl::set_no_new_privs()
    };
    change().map_err(|errno| OwnerError::Become {
        user: held.user,
        source: errno.into(),
    })?;
    Ok(Some(held.user))
}

/// A folder that stays the same whatever is put in its place.
struct Held {
    file: File,
    /// Without links.
    path: PathBuf,
    user: u32,
    group: u32,
}

/// `None`: there is none.
fn open(folder: &Path) -> Result<Option<Held>, OwnerError> {
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let look = || -> io::Result<Held> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(folder)?;
        let of = file.metadata()?;
        Ok(Held {
            path: fs::read_link(itself(&file))?,
            user: of.uid(),
            group: of.gid(),
            file,
        })
    };
    match look() {
        Ok(held) => Ok(Some(held)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(folder)(source)),
    }
}

impl Held {
    /// The first folder on the way that the owner cannot pass, as far as its mode tells.
    fn wall(&self) -> Result<Option<PathBuf>, OwnerError> {
        let mut way: Vec<&Path> = self.path.ancestors().skip(1).collect();
        way.reverse();
        for folder in way {
            let of = fs::metadata(folder).map_err(failed(folder))?;
            let shift = match (of.uid() == self.user, of.gid() == self.group) {
                (true, _) => 6,
                (_, true) => 3,
                _ => 0,
            };
            if of.mode() >> shift & 1 == 0 {
                return Ok(Some(folder.to_owned()));
            }
        }
        Ok(None)
    }

    /// Puts, for this process alone, an empty folder over the wall, and the folder where it is in that.
    fn make_way(&self, folder: &Path) -> Result<io::Result<()>, OwnerError> {
        let none = None::<&str>;
        let own = || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            // Nobody else sees what is mounted here.
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        };
        if let Err(errno) = own() {
            return Ok(Err(errno.into()));
        }
        // What was opened before is of the mounts before.
        let again = open(folder)?.filter(|again| again.is_same(self));
        let again = again.ok_or_else(|| OwnerError::Replaced {
            path: folder.to_owned(),
        })?;
        let Some(wall) = self.wall()? else {
            return Ok(Ok(()));
        };
        let cover = || {
            let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
            mount(
                Some("tmpfs"),
                &wall,
                Some("tmpfs"),
                flags,
                Some("mode=0755"),
            )?;
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o755).create(&self.path)?;
            // Whatever the umask is.
            let made = self.path.ancestors().take_while(|path| *path != wall);
            for path in made {
                fs::set_permissions(path, Permissions::from_mode(0o755))?;
            }
            let source = itself(&again.file);
            mount(Some(&source), &self.path, none, MsFlags::MS_BIND, none)?;
            Ok(())
        };
        Ok(cover())
    }

    fn is_same(&self, other: &Held) -> bool {
        let number = |held: &Held| {
            let of = held.file.metadata();
            of.map(|of| (of.dev(), of.ino(), of.uid(), of.gid())).ok()
        };
        self.path == other.path && number(self).is_some() && number(self) == number(other)
    }
}

/// Its name in this process (proc_pid_fd(5)).
fn itself(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn failed(path: &Path) -> impl Fn(io::Error) -> OwnerError {
    move |source| OwnerError::Look {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;
    use crate::netns::tests::in_child;

    /// `nobody` of every distribution (the kernel's overflow user).
    const NOBODY: u32 = 65534;

    /// A folder of that user in one that lets nobody pass, or everybody, and beside it a file for root alone.
    fn folder(wall: u32) -> Option<(tempfile::TempDir, PathBuf)> {
        if !geteuid().is_root() {
            let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some();
            assert!(!all, "not root");
            eprintln!("SKIPPED: not root");
            return None;
        }
        let around = tempfile::tempdir().unwrap();
        let folder = around.path().join("wall/service");
        DirBuilder::new().recursive(true).create(&folder).unwrap();
        let open = Permissions::from_mode(0o755);
        fs::set_permissions(around.path(), open).unwrap();
        let parent = around.path().join("wall");
        fs::set_permissions(parent, Permissions::from_mode(wall)).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        chown(&folder, Some(NOBODY), Some(NOBODY)).unwrap();
        fs::write(folder.join("own"), "south").unwrap();
        let secret = around.path().join("secret");
        fs::write(&secret, "north").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        Some((around, folder))
    }

    fn said<T>(what: &str, result: io::Result<T>) -> Result<T, String> {
        result.map_err(|error| format!("{what}: {error}"))
    }

    #[test]
    fn root_becomes_who_the_folder_belongs_to_and_keeps_nothing() {
        for wall in [0o755, 0o700] {
            let Some((around, folder)) = folder(wall) else {
                return;
            };
            let (inside, secret) = (folder.join("new"), around.path().join("secret"));
            in_child(|| {
                nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
                let who = become_owner(&folder).map_err(|error| error.to_string())?;
                if who != Some(NOBODY) {
                    return Err(format!("it is {who:?}"));
                }
                let status = said("status", fs::read_to_string("/proc/self/status"))?;
                let line = |key: &str| {
                    let line = status.lines().find_map(|line| line.strip_prefix(key));
                    line.unwrap_or("?")
                        .split_whitespace()
                        .collect::<Vec<_>>()
                        .join(" ")
                };
                let all = [NOBODY; 4].map(|id| id.to_string()).join(" ");
                let none = "0".repeat(16);
                let left = ["Uid:", "Gid:", "Groups:", "CapPrm:", "CapEff:"].map(line);
                if left != [&all, &all, "", &none, &none] {
                    return Err(format!("{left:?}"));
                }
                let own = said("own", fs::read_to_string(folder.join("own")))?;
                said("new", fs::write(&inside, own))?;
                match fs::read(&secret) {
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
                    other => Err(format!("the secret: {other:?}")),
                }
            });
            // And nothing of the way is seen elsewhere.
            let new = fs::metadata(&inside).unwrap();
            assert_eq!((new.uid(), new.gid(), new.len()), (NOBODY, NOBODY, 5));
        }
    }

    #[test]
    fn a_link_leads_to_whose_the_folder_is() {
        let Some((around, folder)) = folder(0o700) else {
            return;
        };
        let link = around.path().join("link");
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert_eq!(foreign_owner(&link).unwrap(), Some(NOBODY));
        in_child(|| {
            become_owner(&link).map_err(|error| error.to_string())?;
            said("own", fs::read(link.join("own"))).map(drop)
        });
    }

    #[test]
    fn who_is_at_home_or_nowhere_stays_who_it_is() {
        let Some((around, folder)) = folder(0o700) else {
            return;
        };
        for place in [around.path(), &folder.join("nowhere")] {
            assert_eq!(foreign_owner(place).unwrap(), None);
            in_child(|| match become_owner(place) {
                Ok(None) if geteuid().is_root() => Ok(()),
                other => Err(format!("{other:?}")),
            });
        }
    }
}
