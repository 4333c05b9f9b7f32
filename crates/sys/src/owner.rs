//! Work in another user's folder as that user.
//!
//! Root that opens what is in somebody else's folder does that user's bidding: a link leads it anywhere, and a file there can name others
//! that only root may read. [`become_owner`] gives up being root first, for good. Root stays root only where nobody else can change what is
//! in the folder, or put another in its place; as sshd has it for keys (`StrictModes` of sshd_config(5)).
//!
//! The folder may lie behind one that its owner cannot pass, as that of a service with `DynamicUser=` does (`/var/lib/private`). Then this
//! process has mounts of its own, in which the way is open.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use caps::Capability;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::unistd::{Gid, Uid, User, geteuid, getgrouplist, setgroups, setresgid, setresuid};

use crate::handover::give_files;
use crate::privilege::{Identity, PrivilegeError, keep_only};

/// Write permission of the group and of others (inode(7)).
const OTHERS_WRITE: u32 = 0o022;
/// Entries of a folder are renamed and removed by their owners alone (inode(7)).
const STICKY: u32 = 0o1000;
/// Who files belong to whose owner is nobody in this user namespace (user_namespaces(7)).
const OVERFLOW: u32 = 65534;

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
    /// A folder of root's has what is not the service's.
    #[error(
        "{} is root's and has `{name}`, which is not of this service: name a folder of its own, or give it this one (chown -R {daemon})",
        path.display()
    )]
    Strange {
        /// The folder.
        path: PathBuf,
        /// What is in it.
        name: String,
        /// Who would get it.
        daemon: u32,
    },
    /// The folder was another one a moment ago.
    #[error("{} is being replaced by another: try again", path.display())]
    Replaced {
        /// The folder.
        path: PathBuf,
    },
    /// Somebody else can put into the folder what they like, or another folder in its place.
    #[error(
        "{} (of user {user}, mode {mode:04o}) can be changed by others, and with it what is found in {}: {what}, or take another folder",
        loose.display(),
        path.display()
    )]
    Loose {
        /// The folder.
        path: PathBuf,
        /// What others can change: it, or one above it.
        loose: PathBuf,
        /// Who owns that.
        user: u32,
        /// Its permissions.
        mode: u32,
        /// What would be right.
        what: &'static str,
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
    /// No group is known that is not root's.
    #[error(
        "user {user}, whose folder {} is, is unknown here and the folder's group is root's: give the folder to a group of that user (chgrp)",
        path.display()
    )]
    Group {
        /// Who.
        user: u32,
        /// Its folder.
        path: PathBuf,
    },
    /// What is to be kept cannot be, or who a service is cannot be told.
    #[error(transparent)]
    Privilege(#[from] PrivilegeError),
    /// A system call failed.
    #[error("cannot become user {user}, whose folder it is: {source}")]
    Become {
        /// Who.
        user: u32,
        /// Why not.
        source: io::Error,
    },
}

/// A folder to work in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Without links, and from the root: what is opened there is to be opened by this path.
    pub path: PathBuf,
    /// Who root has become for it; `None`: this process is who it was.
    pub user: Option<u32>,
}

/// The user whose folder this is, if it is another one than root, which this process is; `None` also if there is no folder and root
/// may make it.
///
/// # Errors
/// [`OwnerError::Look`]; [`OwnerError::Loose`] if it is or would be root's own and others can change it.
pub fn foreign_owner(folder: &Path) -> Result<Option<u32>, OwnerError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let Some(held) = open(folder)? else {
        may_make(folder)?;
        return Ok(None);
    };
    if held.user() == 0 {
        held.is_roots_alone()?;
    }
    Ok(Some(held.user()).filter(|user| *user != 0))
}

/// If this process is root and the folder another user's, become that user, with the groups that it has and no others, for good. Whatever
/// only root may open has to be open before, and no other thread may run: each has capabilities of its own. `None`: there is no folder.
///
/// # Errors
/// Each means that nothing may be opened there.
pub fn become_owner(folder: &Path) -> Result<Option<Place>, OwnerError> {
    become_owner_with(folder, &[])
}

/// For a service that root starts: a folder of root's own, or one that is made if it is not there, goes to the user that daemons become
/// ([`Identity::of_daemon`]), with the plain files in it. Another user's stays that user's. The names of a service's files begin with one
/// of `names`.
///
/// # Errors
/// As [`foreign_owner`]; [`OwnerError::Strange`]: there is something else in it, so that it may not be the service's alone;
/// [`OwnerError::Become`]: this namespace does not have that user, and nothing was given.
pub fn give_to_daemon(folder: &Path, names: &[&str]) -> Result<(), OwnerError> {
    if !geteuid().is_root() || foreign_owner(folder)?.is_some() {
        return Ok(());
    }
    // Where it cannot be made, its service says why.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    let Some(held) = open(folder)? else {
        return Ok(());
    };
    if held.user() != 0 {
        return Err(OwnerError::Replaced { path: held.path });
    }
    held.is_roots_alone()?;
    let Some(daemon) = Identity::of_daemon()? else {
        return Ok(());
    };
    let folder = itself(&held.file);
    for entry in fs::read_dir(&folder).map_err(failed(&held.path))? {
        let name = entry.map_err(failed(&held.path))?.file_name();
        let name = name.to_string_lossy();
        if !names.iter().any(|known| name.starts_with(known)) {
            return Err(OwnerError::Strange {
                path: held.path,
                name: name.into_owned(),
                daemon: daemon.user,
            });
        }
    }
    // First the folder: what cannot be given is left as it is.
    let given = chown(&folder, Some(daemon.user), Some(daemon.group))
        .and_then(|()| give_files(&folder, daemon));
    given.map_err(|source| OwnerError::Become {
        user: daemon.user,
        source,
    })
}

/// [`become_owner`], but for these capabilities.
///
/// # Errors
/// The same.
pub fn become_owner_with(
    folder: &Path,
    capabilities: &[Capability],
) -> Result<Option<Place>, OwnerError> {
    let Some(held) = open(folder)? else {
        return Ok(None);
    };
    let mut place = Place {
        path: held.path.clone(),
        user: None,
    };
    if !geteuid().is_root() {
        return Ok(Some(place));
    }
    if held.user() == 0 {
        held.is_roots_alone()?;
        return Ok(Some(place));
    }
    held.above(|of| others_write(of).then_some(CLOSE))?;
    let owner = held.owner()?;
    if let Some(wall) = held.wall(&owner)? {
        let user = held.user();
        let walled = |source| OwnerError::Wall { user, wall, source };
        held.make_way(folder, &owner)?.map_err(walled)?;
    }
    owner
        .become_it(capabilities)
        .map_err(|source| OwnerError::Become {
            user: held.user(),
            source,
        })?;
    place.user = Some(held.user());
    Ok(Some(place))
}

/// That root, if this process is root, may make a folder that is not there: nobody else can make it first, or put another in its place.
///
/// # Errors
/// [`OwnerError::Look`]; [`OwnerError::Loose`].
pub fn may_make(folder: &Path) -> Result<(), OwnerError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let folder = std::path::absolute(folder).map_err(failed(folder))?;
    for above in folder.ancestors().skip(1) {
        if let Some(held) = open(above)? {
            for at in held.path.ancestors() {
                let of = fs::metadata(at).map_err(failed(at))?;
                // In a sticky folder, too, whoever comes first makes it.
                let is_first = at == held.path && of.mode() & OTHERS_WRITE != 0;
                if let Some(what) = others_change(&of).or(is_first.then_some(MAKE)) {
                    return Err(loose(&folder, at, &of, what));
                }
            }
            return Ok(());
        }
    }
    Ok(())
}

/// What would be right where others write.
const CLOSE: &str = "take the right to write from them (chmod go-w)";
/// What would be right where somebody else owns.
const OWN: &str = "give it to root (chown root)";
/// What would be right where others may make a folder first.
const MAKE: &str = "make the folder yourself before (mkdir -m 700)";

/// Whether others than the owner put something else in the place of what is in this folder.
fn others_write(of: &Metadata) -> bool {
    of.mode() & OTHERS_WRITE != 0 && of.mode() & STICKY == 0
}

/// Whether somebody can who is not root.
fn others_change(of: &Metadata) -> Option<&'static str> {
    let is_roots = of.uid() == 0 || (of.uid() == OVERFLOW && is_outside(OVERFLOW));
    match is_roots {
        false => Some(OWN),
        true => others_write(of).then_some(CLOSE),
    }
}

/// Whether a user is none of this user namespace, so that what it owns is of whoever is above it: root here is less than that.
fn is_outside(user: u32) -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mut ranges = map.lines().map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        Some((first?.ok()?, count?.ok()?))
    });
    // What cannot be read says nothing of an outside.
    !map.is_empty()
        && ranges
            .all(|range| range.is_some_and(|(first, count)| user < first || user - first >= count))
}

/// A folder that stays the same whatever is put in its place.
struct Held {
    file: File,
    /// Without links.
    path: PathBuf,
    of: Metadata,
}

/// Who to be in a folder.
struct Owner {
    user: Uid,
    group: Gid,
    /// The others that it is in.
    groups: Vec<Gid>,
}

/// `None`: there is none.
fn open(folder: &Path) -> Result<Option<Held>, OwnerError> {
    let mut options = OpenOptions::new();
    let options = options.read(true);
    let file = match options
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(folder)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed(folder)(source)),
    };
    // Without /proc nothing is known of it, which is not that it is not there.
    let path = fs::read_link(itself(&file)).map_err(failed(folder))?;
    let of = file.metadata().map_err(failed(folder))?;
    Ok(Some(Held { file, path, of }))
}

impl Held {
    fn user(&self) -> u32 {
        self.of.uid()
    }

    /// That root may stay root in it. Files in a sticky folder of others' are theirs, so that is none.
    fn is_roots_alone(&self) -> Result<(), OwnerError> {
        if self.of.mode() & OTHERS_WRITE != 0 {
            return Err(loose(&self.path, &self.path, &self.of, CLOSE));
        }
        self.above(others_change)
    }

    /// That nothing is wrong with any folder above it.
    fn above(&self, wrong: impl Fn(&Metadata) -> Option<&'static str>) -> Result<(), OwnerError> {
        for folder in self.path.ancestors().skip(1) {
            let of = fs::metadata(folder).map_err(failed(folder))?;
            if let Some(what) = wrong(&of) {
                return Err(loose(&self.path, folder, &of, what));
            }
        }
        Ok(())
    }

    /// Its user as the system knows it; one that it does not know, as with `DynamicUser=`, has the folder's group alone.
    fn owner(&self) -> Result<Owner, OwnerError> {
        let user = Uid::from_raw(self.user());
        let known = || -> nix::Result<Option<Owner>> {
            let Some(entry) = User::from_uid(user)? else {
                return Ok(None);
            };
            let name = CString::new(entry.name).map_err(|_| nix::Error::EINVAL)?;
            Ok(Some(Owner {
                user,
                group: entry.gid,
                groups: getgrouplist(&name, entry.gid)?,
            }))
        };
        let known = known().map_err(|errno| OwnerError::Become {
            user: self.user(),
            source: errno.into(),
        })?;
        match known {
            Some(owner) => Ok(owner),
            None if self.of.gid() != 0 => Ok(Owner {
                user,
                group: Gid::from_raw(self.of.gid()),
                groups: Vec::new(),
            }),
            None => Err(OwnerError::Group {
                user: self.user(),
                path: self.path.clone(),
            }),
        }
    }

    /// The first folder on the way that the owner cannot pass, as far as its mode tells.
    fn wall(&self, owner: &Owner) -> Result<Option<PathBuf>, OwnerError> {
        for folder in self.way() {
            let of = fs::metadata(folder).map_err(failed(folder))?;
            let shift = match (of.uid() == self.user(), owner.is_in(of.gid())) {
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

    /// The folders above it, from the root.
    fn way(&self) -> impl Iterator<Item = &Path> {
        let way: Vec<&Path> = self.path.ancestors().skip(1).collect();
        way.into_iter().rev()
    }

    /// Puts, for this process alone, an empty folder over the wall, and the folder where it is in that.
    fn make_way(&self, folder: &Path, owner: &Owner) -> Result<io::Result<()>, OwnerError> {
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
        let Some(wall) = self.wall(owner)? else {
            return Ok(Ok(()));
        };
        // What follows is done by these paths, and by root.
        for above in wall.ancestors() {
            let of = fs::metadata(above).map_err(failed(above))?;
            if let Some(what) = others_change(&of) {
                let why = format!("{} can be changed by others: {what}", above.display());
                return Ok(Err(io::Error::other(why)));
            }
        }
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
        let number = |held: &Held| (held.of.dev(), held.of.ino(), held.of.uid(), held.of.gid());
        self.path == other.path && number(self) == number(other)
    }
}

impl Owner {
    fn is_in(&self, group: u32) -> bool {
        let mut all = self.groups.iter().chain([&self.group]);
        all.any(|gid| gid.as_raw() == group)
    }

    fn become_it(&self, capabilities: &[Capability]) -> io::Result<()> {
        // The kernel forgets it with the user (commit_creds in kernel/cred.c): who started this process may rely on it.
        let with_parent = prctl::get_pdeathsig()?;
        setgroups(&self.groups)?;
        setresgid(self.group, self.group, self.group)?;
        // After those: it takes the right to do them, and the capabilities that are in force.
        prctl::set_keepcaps(true)?;
        setresuid(self.user, self.user, self.user)?;
        prctl::set_keepcaps(false)?;
        prctl::set_pdeathsig(with_parent)?;
        keep_only(capabilities).map_err(io::Error::other)
    }
}

/// Its name in this process (proc_pid_fd(5)).
fn itself(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn loose(path: &Path, loose: &Path, of: &Metadata, what: &'static str) -> OwnerError {
    OwnerError::Loose {
        path: path.to_owned(),
        loose: loose.to_owned(),
        user: of.uid(),
        mode: of.mode() & 0o7777,
        what,
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> OwnerError {
    move |source| OwnerError::Look {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
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
                // A kernel that is told so takes them from nobody who changes its user id.
                nix::sys::prctl::set_keepcaps(true).map_err(|errno| errno.to_string())?;
                nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
                let who = become_owner(&folder).map_err(|error| error.to_string())?;
                let place = Place {
                    path: folder.clone(),
                    user: Some(NOBODY),
                };
                if who != Some(place) {
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
                let groups = NOBODY.to_string();
                if left != [all.clone(), all, groups, none.clone(), none] {
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
            let place = become_owner(&link).map_err(|error| error.to_string())?;
            let path = place.ok_or("there is no folder")?.path;
            if path != folder {
                return Err(format!("{}", path.display()));
            }
            said("own", fs::read(path.join("own"))).map(drop)
        });
    }

    #[test]
    fn who_is_at_home_or_nowhere_stays_who_it_is() {
        let Some((around, _)) = folder(0o700) else {
            return;
        };
        for place in [around.path(), &around.path().join("no/where")] {
            assert_eq!(foreign_owner(place).unwrap(), None);
            in_child(|| {
                let found = become_owner(place).map_err(|error| error.to_string())?;
                let stays = found.as_ref().is_none_or(|place| place.user.is_none());
                match stays && geteuid().is_root() && found.is_some() == place.exists() {
                    true => Ok(()),
                    false => Err(format!("{found:?}")),
                }
            });
        }
    }

    #[test]
    fn a_folder_behind_a_wall_is_found_again_by_the_path_that_comes_back() {
        let Some((around, folder)) = folder(0o700) else {
            return;
        };
        in_child(|| {
            said("go", std::env::set_current_dir(around.path().join("wall")))?;
            let place = become_owner(Path::new("service")).map_err(|error| error.to_string())?;
            let path = place.ok_or("there is no folder")?.path;
            said("own", fs::read(path.join("own")))?;
            match path == folder {
                true => Ok(()),
                false => Err(format!("{}", path.display())),
            }
        });
    }

    /// Nobody becomes anybody, and `loose` is to blame.
    fn is_loose(folder: &Path, loose: &Path) {
        in_child(|| match become_owner(folder) {
            Err(OwnerError::Loose { loose: found, .. }) if found == loose => Ok(()),
            other => Err(format!("{other:?}")),
        });
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn root_stays_root_nowhere_that_others_can_change() {
        let Some((around, of_nobody)) = folder(0o755) else {
            return;
        };
        let wall = around.path().join("wall");
        let own = wall.join("own");
        fs::create_dir(&own).unwrap();
        assert_eq!(foreign_owner(&own).unwrap(), None);
        for others in [0o775, 0o757, 0o1777] {
            set_mode(&own, others);
            is_loose(&own, &own);
        }
        assert!(foreign_owner(&own).is_err());
        set_mode(&own, 0o755);
        // By its sticky bit what is in it stays where it is, as in /tmp.
        set_mode(&wall, 0o1777);
        assert_eq!(foreign_owner(&own).unwrap(), None);
        for others in [0o775, 0o777] {
            set_mode(&wall, others);
            is_loose(&own, &wall);
            assert!(foreign_owner(&own).is_err());
            // Whoever writes there chooses who root becomes.
            is_loose(&of_nobody, &wall);
        }
        set_mode(&wall, 0o755);
        chown(&wall, Some(NOBODY), None).unwrap();
        is_loose(&own, &wall);
        assert!(foreign_owner(&own).is_err());
        // Its owner, and no other.
        in_child(|| {
            let found = become_owner(&of_nobody).map_err(|error| error.to_string())?;
            let user = found.and_then(|place| place.user);
            match user == Some(NOBODY) {
                true => Ok(()),
                false => Err(format!("{user:?}")),
            }
        });
    }

    #[test]
    fn root_makes_a_folder_nowhere_that_others_can_change() {
        let Some((around, of_nobody)) = folder(0o755) else {
            return;
        };
        let wall = around.path().join("wall");
        let own = wall.join("own");
        fs::create_dir(&own).unwrap();
        let new = own.join("new/folder");
        let is_refused = |folder: &Path, by: &Path| {
            for refused in [may_make(folder), foreign_owner(folder).map(drop)] {
                match refused {
                    Err(OwnerError::Loose { path, loose, .. }) => {
                        assert_eq!((&*path, &*loose), (folder, by));
                    }
                    other => panic!("{other:?}"),
                }
            }
        };
        assert_eq!(foreign_owner(&new).unwrap(), None);
        may_make(&new).unwrap();
        is_refused(&of_nobody.join("new"), &of_nobody);
        // Whoever may write there makes it first, sticky or not.
        for others in [0o775, 0o757, 0o1777] {
            set_mode(&own, others);
            is_refused(&new, &own);
        }
        set_mode(&own, 0o755);
        set_mode(&wall, 0o1777);
        may_make(&new).unwrap();
        set_mode(&wall, 0o777);
        is_refused(&new, &wall);
        set_mode(&wall, 0o755);
        chown(&wall, Some(NOBODY), None).unwrap();
        is_refused(&new, &wall);
        // Who is no root has nobody's bidding to do but its own.
        in_child(|| {
            become_owner(&of_nobody).map_err(|error| error.to_string())?;
            may_make(&new).map_err(|error| error.to_string())
        });
    }

    #[test]
    fn no_way_is_made_where_somebody_else_can_change_it() {
        let Some((around, folder)) = folder(0o700) else {
            return;
        };
        chown(around.path(), Some(NOBODY + 1), None).unwrap();
        in_child(|| match become_owner(&folder) {
            Err(OwnerError::Wall { source, .. }) if source.to_string().contains("by others") => {
                Ok(())
            }
            other => Err(format!("{other:?}")),
        });
    }

    #[test]
    fn an_owner_has_the_groups_that_it_is_in_and_an_unknown_one_that_of_its_folder() {
        /// In no file of any distribution.
        const UNKNOWN: u32 = 3_999_999_999;
        const KEYS: u32 = 3_999_999_998;
        let Some((around, folder)) = folder(0o755) else {
            return;
        };
        let known = around.path().join("group");
        fs::write(&known, format!("keys:x:{KEYS}:nobody\n")).unwrap();
        fs::set_permissions(&known, Permissions::from_mode(0o644)).unwrap();
        let key = around.path().join("key");
        fs::write(&key, "east").unwrap();
        fs::set_permissions(&key, Permissions::from_mode(0o640)).unwrap();
        chown(&key, None, Some(KEYS)).unwrap();
        // The folder's group is no matter.
        chown(&folder, None, Some(0)).unwrap();
        in_child(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| errno.to_string())?;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none).map_err(|errno| errno.to_string())?;
            let over = mount(Some(&known), "/etc/group", none, MsFlags::MS_BIND, none);
            over.map_err(|errno| errno.to_string())?;
            become_owner(&folder).map_err(|error| error.to_string())?;
            said("key", fs::read(&key))?;
            match nix::unistd::getegid().as_raw() {
                NOBODY => Ok(()),
                other => Err(format!("group {other}")),
            }
        });
        chown(&folder, Some(UNKNOWN), Some(0)).unwrap();
        in_child(|| match become_owner(&folder) {
            Err(OwnerError::Group { user: UNKNOWN, .. }) => Ok(()),
            other => Err(format!("{other:?}")),
        });
        chown(&folder, Some(UNKNOWN), Some(KEYS)).unwrap();
        in_child(|| {
            become_owner(&folder).map_err(|error| error.to_string())?;
            said("key", fs::read(&key)).map(drop)
        });
    }

    #[test]
    fn without_proc_it_is_not_said_that_there_is_no_folder() {
        let Some((_around, folder)) = folder(0o755) else {
            return;
        };
        in_child(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| errno.to_string())?;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none).map_err(|errno| errno.to_string())?;
            let over = mount(
                Some("tmpfs"),
                "/proc",
                Some("tmpfs"),
                MsFlags::empty(),
                none,
            );
            over.map_err(|errno| errno.to_string())?;
            match (become_owner(&folder), foreign_owner(&folder)) {
                (Err(OwnerError::Look { .. }), Err(OwnerError::Look { .. })) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn who_is_in_no_range_of_the_namespace_is_outside() {
        // Of the namespace in which this runs: 2^32 - 1 is nobody's id anywhere.
        assert!(is_outside(u32::MAX));
        assert!(!is_outside(geteuid().as_raw()));
    }
}
