//! Directories of services, the user that may work in them, and files that only root can change.
//!
//! A service's directory may hold links, and names of other files. Root that followed them would
//! act for the owner of the directory. Therefore root works there only if nobody else can change
//! the directory, becomes the daemons' user in a directory of that user, and refuses any other; as
//! sshd does for keys (`StrictModes` of sshd_config(5)).

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, chown};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::handover::give_files;
use crate::privilege::{Identity, PrivilegeError, UNNAMED};

/// Write permission of the group and of others (inode(7)).
const OTHERS_WRITE: u32 = 0o022;
/// Only their owners rename and remove entries of a directory with this bit (inode(7)).
const STICKY: u32 = 0o1000;
/// Owner, as this user namespace shows it, of files whose owner it does not map
/// (user_namespaces(7)).
const OVERFLOW: u32 = 65534;

/// Reasons not to work in a directory as root.
#[derive(Debug, thiserror::Error)]
pub enum OwnerError {
    /// The directory belongs to another user.
    #[error("{} belongs to user {user}", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        user: u32,
        /// Its group.
        group: u32,
    },
    /// The directory, or one above it, cannot be inspected.
    #[error("cannot inspect {}: {source}", path.display())]
    Inspect {
        /// The directory, or one above it.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A directory of root has files of something else.
    #[error(
        "cannot give {} to user {daemon}: it has `{name}`, which does not belong to this service; use another directory, or give this one to the user (chown -R {daemon})",
        path.display()
    )]
    UnknownFile {
        /// The directory.
        path: PathBuf,
        /// The file.
        name: String,
        /// The daemons' user.
        daemon: u32,
    },
    /// Other users can change the directory or replace it.
    #[error(
        "cannot use {} as root: {} (user {user}, mode {mode:04o}) can be changed by others; {remedy}, or use another directory",
        path.display(),
        writable.display()
    )]
    Writable {
        /// The directory.
        path: PathBuf,
        /// The directory itself or one above it, which others can change.
        writable: PathBuf,
        /// Owner of `writable`.
        user: u32,
        /// Mode of `writable`.
        mode: u32,
        /// Remedy, with its command.
        remedy: &'static str,
    },
    /// The daemons' user is not usable.
    #[error(transparent)]
    Privilege(#[from] PrivilegeError),
    /// The kernel does not let this process give files to the daemons' user.
    #[error("cannot give {} to user {user}: {source}", path.display())]
    Give {
        /// The directory.
        path: PathBuf,
        /// The daemons' user.
        user: u32,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Returns the user that this process has to become before it opens anything in `directory`; `None`
/// if it stays as it is.
///
/// A process of root becomes the daemons' user ([`Identity::of_daemon`]) in a directory of that
/// user. It stays root in a directory of root, and in one that is missing and that root may make.
///
/// # Errors
/// [`OwnerError::Foreign`], [`OwnerError::Writable`], [`OwnerError::Inspect`].
pub fn identity_for(directory: &Path) -> Result<Option<Identity>, OwnerError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    let Some(directory) = open(directory)? else {
        check_new(directory)?;
        return Ok(None);
    };
    match directory.user() {
        0 => directory.check_only_root_writes().map(|()| None),
        user => {
            let daemon = Identity::of_daemon().unwrap_or(None);
            let daemon = daemon.filter(|daemon| daemon.user == user);
            daemon.map(Some).ok_or_else(|| directory.foreign())
        }
    }
}

/// Checks that nobody but root can change this file, or put another in its place. `file` has to be without links, as
/// [`Path::canonicalize`] returns it. Without root every file is accepted.
///
/// # Errors
/// [`OwnerError::Foreign`], [`OwnerError::Writable`], [`OwnerError::Inspect`].
pub fn check_only_root_changes(file: &Path) -> Result<(), OwnerError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let metadata = fs::symlink_metadata(file).map_err(inspecting(file))?;
    if metadata.uid() != 0 {
        return Err(OwnerError::Foreign {
            path: file.to_owned(),
            user: metadata.uid(),
            group: metadata.gid(),
        });
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        return Err(writable(file, file, &metadata, REVOKE));
    }
    let parent = file.parent().unwrap_or(Path::new("/"));
    let missing = || inspecting(parent)(io::ErrorKind::NotFound.into());
    let directory = open(parent)?.ok_or_else(missing)?;
    match directory.user() {
        0 => directory.check_only_root_writes(),
        _ => Err(directory.foreign()),
    }
}

/// For a service that root starts: makes the directory if it is missing, gives it with its plain
/// files to the daemons' user, and returns that user. The names of the service's files begin with
/// one of `names`. Without root it changes nothing and returns `None`.
///
/// # Errors
/// As [`identity_for`]; [`OwnerError::UnknownFile`]; [`OwnerError::Give`] in a user namespace
/// without that user, and then nothing was given.
pub fn give_to_daemon(path: &Path, names: &[&str]) -> Result<Option<Identity>, OwnerError> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    if open(path)?.is_none() {
        check_new(path)?;
        // If that fails, the service reports it.
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(path);
    }
    let Some(directory) = open(path)? else {
        return Ok(None);
    };
    let daemon = Identity::of_daemon();
    let daemon_user = daemon.as_ref().ok().copied().flatten();
    match directory.user() {
        0 => directory.check_only_root_writes()?,
        // Seikan's own, also from before the host had a user of that name.
        UNNAMED => {}
        user if daemon_user.is_some_and(|daemon| daemon.user == user) => {}
        _ => return Err(directory.foreign()),
    }
    let Some(daemon) = daemon? else {
        return Ok(None);
    };
    directory.give(daemon, names)?;
    Ok(Some(daemon))
}

/// Checks that nobody but root can make this directory, which is missing, or replace it.
fn check_new(directory: &Path) -> Result<(), OwnerError> {
    let path = std::path::absolute(directory).map_err(inspecting(directory))?;
    for above in path.ancestors().skip(1) {
        let Some(parent) = open(above)? else {
            continue;
        };
        for ancestor in parent.path.ancestors() {
            let metadata = fs::metadata(ancestor).map_err(inspecting(ancestor))?;
            // Even in a sticky directory, anybody may create it first.
            let others_make = ancestor == parent.path && metadata.mode() & OTHERS_WRITE != 0;
            let remedy = remedy(&metadata).or(others_make.then_some(MAKE));
            if let Some(remedy) = remedy {
                return Err(writable(&path, ancestor, &metadata, remedy));
            }
        }
        return Ok(());
    }
    Ok(())
}

/// Remedy if others can write.
const REVOKE: &str = "remove their write permission (chmod go-w)";
/// Remedy if another user owns a directory above.
const OWN: &str = "give it to root (chown root)";
/// Remedy if others may make the directory first.
const MAKE: &str = "create the directory first (mkdir -m 700)";

/// Returns the remedy if others than root can replace what is in this directory.
fn remedy(directory: &Metadata) -> Option<&'static str> {
    let owner = directory.uid();
    let is_root = owner == 0 || (owner == OVERFLOW && is_unmapped(OVERFLOW));
    if !is_root {
        return Some(OWN);
    }
    let mode = directory.mode();
    (mode & OTHERS_WRITE != 0 && mode & STICKY == 0).then_some(REVOKE)
}

/// Returns whether this user namespace has no such user. Files of users that it does not map belong
/// to users of the namespace above, whose root outranks this process.
fn is_unmapped(user: u32) -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let mut ranges = map.lines().map(|line| {
        let mut numbers = line.split_whitespace().map(str::parse::<u32>);
        let (first, _, count) = (numbers.next(), numbers.next(), numbers.next());
        Some((first?.ok()?, count?.ok()?))
    });
    // A map that cannot be read proves nothing.
    !map.is_empty()
        && ranges
            .all(|range| range.is_some_and(|(first, count)| user < first || user - first >= count))
}

/// An open directory: another one in its place does not change it.
struct Directory {
    file: File,
    /// Absolute, without links.
    path: PathBuf,
    metadata: Metadata,
}

/// Opens a directory; `None` if it is missing.
fn open(path: &Path) -> Result<Option<Directory>, OwnerError> {
    let mut options = OpenOptions::new();
    let options = options.read(true);
    let file = match options
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(inspecting(path)(source)),
    };
    // Without /proc this fails, which must not count as missing.
    let link = descriptor_path(&file);
    let metadata = file.metadata().map_err(inspecting(path))?;
    let path = fs::read_link(link).map_err(inspecting(path))?;
    Ok(Some(Directory {
        file,
        path,
        metadata,
    }))
}

impl Directory {
    fn user(&self) -> u32 {
        self.metadata.uid()
    }

    fn foreign(&self) -> OwnerError {
        OwnerError::Foreign {
            path: self.path.clone(),
            user: self.user(),
            group: self.metadata.gid(),
        }
    }

    /// Checks that only root can write here, and replace this directory or one above. Files in a
    /// sticky directory may be of others.
    fn check_only_root_writes(&self) -> Result<(), OwnerError> {
        if self.metadata.mode() & OTHERS_WRITE != 0 {
            return Err(writable(&self.path, &self.path, &self.metadata, REVOKE));
        }
        for above in self.path.ancestors().skip(1) {
            let metadata = fs::metadata(above).map_err(inspecting(above))?;
            if let Some(remedy) = remedy(&metadata) {
                return Err(writable(&self.path, above, &metadata, remedy));
            }
        }
        Ok(())
    }

    fn give(&self, daemon: Identity, names: &[&str]) -> Result<(), OwnerError> {
        let directory = descriptor_path(&self.file);
        for entry in fs::read_dir(&directory).map_err(inspecting(&self.path))? {
            let name = entry.map_err(inspecting(&self.path))?.file_name();
            let name = name.to_string_lossy();
            if self.user() == 0 && !names.iter().any(|known| name.starts_with(known)) {
                return Err(OwnerError::UnknownFile {
                    path: self.path.clone(),
                    name: name.into_owned(),
                    daemon: daemon.user,
                });
            }
        }
        // The directory first: if that fails, its files stay as they are.
        let given = chown(&directory, Some(daemon.user), Some(daemon.group))
            .and_then(|()| give_files(&directory, daemon));
        given.map_err(|source| OwnerError::Give {
            path: self.path.clone(),
            user: daemon.user,
            source,
        })
    }
}

/// Returns the path of an open file in this process (proc_pid_fd(5)).
fn descriptor_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn writable(path: &Path, writable: &Path, metadata: &Metadata, remedy: &'static str) -> OwnerError {
    OwnerError::Writable {
        path: path.to_owned(),
        writable: writable.to_owned(),
        user: metadata.uid(),
        mode: metadata.mode() & 0o7777,
        remedy,
    }
}

fn inspecting(path: &Path) -> impl Fn(io::Error) -> OwnerError {
    move |source| OwnerError::Inspect {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::privilege::keep_only;
    use crate::testing::in_child;
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    /// `nobody` of every distribution (the kernel's overflow user).
    const NOBODY: u32 = 65534;

    /// Makes `parent/service`, of root, below a directory that everybody may pass.
    fn directory() -> Option<(tempfile::TempDir, PathBuf)> {
        if !geteuid().is_root() {
            let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some();
            assert!(!all, "not root");
            eprintln!("SKIPPED: not root");
            return None;
        }
        let top = tempfile::tempdir().unwrap();
        let directory = top.path().join("parent/service");
        fs::create_dir_all(&directory).unwrap();
        for (path, mode) in [
            (top.path(), 0o755),
            (directory.parent().unwrap(), 0o755),
            (&directory, 0o700),
        ] {
            set_mode(path, mode);
        }
        Some((top, directory))
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// Asserts that root refuses the directory, as verb and as service, because of `expected`.
    fn assert_writable(directory: &Path, expected: &Path) {
        let service = give_to_daemon(directory, &[]).map(drop);
        for result in [identity_for(directory).map(drop), service] {
            match result {
                Err(OwnerError::Writable { path, writable, .. }) => {
                    assert_eq!((&*path, &*writable), (directory, expected));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn root_refuses_a_directory_of_another_user() {
        let Some((top, directory)) = directory() else {
            return;
        };
        chown(&directory, Some(NOBODY), Some(NOBODY)).unwrap();
        let link = top.path().join("link");
        std::os::unix::fs::symlink(&directory, &link).unwrap();
        for path in [&directory, &link] {
            let service = give_to_daemon(path, &[]).map(drop);
            for result in [identity_for(path).map(drop), service] {
                match result {
                    Err(OwnerError::Foreign { path, user, group }) => {
                        assert_eq!((path, user, group), (directory.clone(), NOBODY, NOBODY));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    #[test]
    fn a_service_of_root_becomes_the_daemons_user_and_so_do_its_verbs() {
        let Some((top, directory)) = directory() else {
            return;
        };
        let secret = top.path().join("secret");
        fs::write(&secret, "north").unwrap();
        set_mode(&secret, 0o600);
        fs::write(directory.join("own"), "south").unwrap();
        let daemon = give_to_daemon(&directory, &["own"]).unwrap();
        assert_eq!(daemon, Identity::of_daemon().unwrap());
        assert_eq!(identity_for(&directory).unwrap(), daemon);
        assert_eq!(give_to_daemon(&directory, &["own"]).unwrap(), daemon);
        in_child(|| {
            let failed = |error: io::Error| error.to_string();
            keep_only(&[], daemon).map_err(|error| error.to_string())?;
            let status = fs::read_to_string("/proc/self/status").map_err(failed)?;
            let line = |key: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(key));
                line.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            };
            let user = daemon.map(|daemon| vec![daemon.user.to_string(); 4].join(" "));
            let none = Some("0".repeat(16));
            let found = ["Uid:", "Groups:", "CapPrm:", "CapEff:"].map(line);
            if found != [user, Some(String::new()), none.clone(), none] {
                return Err(format!("{found:?}"));
            }
            fs::write(directory.join("own"), "east").map_err(failed)?;
            match fs::read(&secret) {
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
                other => Err(format!("the secret: {other:?}")),
            }
        });
    }

    #[test]
    fn root_stays_root_in_its_own_directory_and_where_there_is_none() {
        let Some((top, directory)) = directory() else {
            return;
        };
        for path in [&directory, &top.path().join("no/where")] {
            assert_eq!(identity_for(path).unwrap(), None);
        }
    }

    #[test]
    fn a_directory_of_root_with_other_files_is_not_given_away() {
        let Some((_top, directory)) = directory() else {
            return;
        };
        fs::write(directory.join("shadow"), "").unwrap();
        match give_to_daemon(&directory, &["mesh.db"]) {
            Err(OwnerError::UnknownFile { name, .. }) => assert_eq!(name, "shadow"),
            other => panic!("{other:?}"),
        }
        assert_eq!(fs::metadata(&directory).unwrap().uid(), 0);
    }

    #[test]
    fn root_uses_no_directory_that_others_can_change() {
        let Some((_top, directory)) = directory() else {
            return;
        };
        let parent = directory.parent().unwrap();
        for mode in [0o775, 0o757, 0o1777] {
            set_mode(&directory, mode);
            assert_writable(&directory, &directory);
        }
        set_mode(&directory, 0o755);
        // The sticky bit keeps its entries in place, as in /tmp.
        set_mode(parent, 0o1777);
        assert_eq!(identity_for(&directory).unwrap(), None);
        for mode in [0o775, 0o777] {
            set_mode(parent, mode);
            assert_writable(&directory, parent);
        }
        set_mode(parent, 0o755);
        chown(parent, Some(NOBODY), None).unwrap();
        assert_writable(&directory, parent);
    }

    #[test]
    fn a_file_is_roots_alone_if_its_folders_are_too() {
        let Some((top, directory)) = directory() else {
            return;
        };
        let file = directory.canonicalize().unwrap().join("office.conf");
        fs::write(&file, "").unwrap();
        set_mode(&file, 0o644);
        check_only_root_changes(&file).unwrap();

        let link = directory.join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let foreign = |path: &Path| {
            chown(path, Some(NOBODY), None).unwrap();
            let error = check_only_root_changes(&file).unwrap_err();
            assert!(matches!(error, OwnerError::Foreign { .. }), "{error}");
            chown(path, Some(0), None).unwrap();
        };
        let open_to_others = |path: &Path, mode, before| {
            set_mode(path, mode);
            let error = check_only_root_changes(&file).unwrap_err();
            assert!(matches!(error, OwnerError::Writable { .. }), "{error}");
            set_mode(path, before);
        };
        foreign(&file);
        foreign(&directory);
        open_to_others(&file, 0o664, 0o644);
        // The sticky bit of its own folder does not keep others from adding a second name of a file.
        open_to_others(&directory, 0o1777, 0o755);
        open_to_others(top.path(), 0o757, 0o755);
        let error = check_only_root_changes(&link).unwrap_err();
        assert!(matches!(error, OwnerError::Writable { .. }), "{error}");
        check_only_root_changes(&file).unwrap();
    }

    #[test]
    fn root_makes_no_directory_where_others_can_make_it_first() {
        let Some((_top, directory)) = directory() else {
            return;
        };
        let parent = directory.parent().unwrap();
        let new = directory.join("new/service");
        assert_eq!(identity_for(&new).unwrap(), None);
        for mode in [0o775, 0o757, 0o1777] {
            set_mode(&directory, mode);
            assert_writable(&new, &directory);
        }
        set_mode(&directory, 0o755);
        set_mode(parent, 0o1777);
        assert_eq!(identity_for(&new).unwrap(), None);
        set_mode(parent, 0o777);
        assert_writable(&new, parent);
        set_mode(parent, 0o755);
        chown(parent, Some(NOBODY), None).unwrap();
        assert_writable(&new, parent);
    }

    #[test]
    fn a_directory_is_not_missing_because_proc_is() {
        let Some((_top, directory)) = directory() else {
            return;
        };
        in_child(|| {
            let none = None::<&str>;
            unshare(CloneFlags::CLONE_NEWNS).map_err(|errno| errno.to_string())?;
            let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
            mount(none, "/", none, private, none).map_err(|errno| errno.to_string())?;
            let kind = Some("tmpfs");
            let over = mount(kind, "/proc", kind, MsFlags::empty(), none);
            over.map_err(|errno| errno.to_string())?;
            match (identity_for(&directory), give_to_daemon(&directory, &[])) {
                (Err(OwnerError::Inspect { .. }), Err(OwnerError::Inspect { .. })) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn a_user_outside_of_every_range_is_unmapped() {
        // 2^32 - 1 is no user's id in any namespace.
        assert!(is_unmapped(u32::MAX));
        assert!(!is_unmapped(geteuid().as_raw()));
    }
}
