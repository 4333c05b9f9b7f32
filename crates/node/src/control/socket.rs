//! Paths, ownership and creation of the control sockets.
//!
//! A running instance holds a lock on `RUN/NAME.lock`, which contains its process id; the kernel releases the
//! lock with the process. The holder of the lock may replace `RUN/NAME.sock` and, unless another WireGuard
//! implementation answers there, `/run/wireguard/NAME.sock`.
//!
//! Network namespaces share both directories, so an interface's name is unique on the whole host. A user's tunnels without
//! root are in directories of that user ([`RuntimeDirs::for_user`]), with names of their own.

use seikan_sys::privilege::user_id;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Directory in which `wg` looks for user-space tunnels (`SOCK_PATH` of wireguard-tools).
const WIREGUARD_DIR: &str = "/var/run/wireguard";
/// Directory of Seikan's own sockets.
const RUN_DIR: &str = "/run/seikan";
/// Environment variable that overrides [`RUN_DIR`].
pub const RUN_DIR_VARIABLE: &str = "SEIKAN_RUN_DIR";
const STATE_DIR: &str = "/var/lib/seikan";
/// Environment variable that overrides [`STATE_DIR`].
pub const STATE_DIR_VARIABLE: &str = "SEIKAN_STATE_DIR";

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another instance of Seikan uses the name.
    #[error(
        "`{name}` is running already{}: names are unique on a host, also across network \
         namespaces; stop it with `seikan down {name}`, or choose another name",
        pid.map_or_else(String::new, |pid| format!(" as process {pid}"))
    )]
    Running {
        /// The interface.
        name: String,
        /// Process id of the other instance, if its lock contains one.
        pid: Option<u32>,
    },
    /// Another program serves the name to `wg`.
    #[error(
        "another WireGuard serves `{name}` at {}: stop it, or choose another name",
        path.display()
    )]
    Foreign {
        /// The interface.
        name: String,
        /// Its socket.
        path: PathBuf,
    },
    /// A file or folder.
    #[error("cannot {action} {}: {error}{}", path.display(), hint(error))]
    File {
        /// The operation that failed.
        action: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// Another user owns the directory, or may write to it.
    #[error(
        "cannot use {}: it is not a directory of this user alone; remove it, or name another in {RUN_DIR_VARIABLE}",
        path.display()
    )]
    NotPrivate {
        /// Its path.
        path: PathBuf,
    },
    /// The metrics endpoint.
    #[error("cannot serve metrics on {address}: {error}{}", metrics_hint(error))]
    Metrics {
        /// The configured address.
        address: std::net::SocketAddr,
        /// The system's answer.
        error: io::Error,
    },
    /// Another system call failed.
    #[error("{operation}: {error}")]
    System {
        /// The operation that failed.
        operation: &'static str,
        /// The system's answer.
        error: io::Error,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; run as root, or name a folder of your own in SEIKAN_RUN_DIR"
        }
        _ => "",
    }
}

fn metrics_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another port, or find who has it with `ss -tlpn`",
        io::ErrorKind::AddrNotAvailable => "; choose an address of this host, such as 127.0.0.1",
        _ => "",
    }
}

/// Directories of the sockets and of the persistent state.
#[derive(Clone, Debug)]
pub struct RuntimeDirs {
    /// Directory of Seikan's own sockets and locks.
    pub run: PathBuf,
    /// Directory of the sockets for `wg`.
    pub wireguard: PathBuf,
    /// Persistent state, with a directory for each interface.
    pub state: PathBuf,
}

impl Default for RuntimeDirs {
    /// `/run/seikan` or the value of `SEIKAN_RUN_DIR`; `/var/run/wireguard`; `/var/lib/seikan` or the value of
    /// `SEIKAN_STATE_DIR`.
    fn default() -> RuntimeDirs {
        let or = |name, usual: &str| variable(name).unwrap_or_else(|| usual.into());
        RuntimeDirs {
            run: or(RUN_DIR_VARIABLE, RUN_DIR),
            wireguard: WIREGUARD_DIR.into(),
            state: or(STATE_DIR_VARIABLE, STATE_DIR),
        }
    }
}

impl RuntimeDirs {
    /// Directories for tunnels that this user runs without root. The sockets are in `seikan` in `XDG_RUNTIME_DIR`, else in
    /// `/run/user/UID`, else in `/tmp/seikan-UID`, which is created; the state is in `seikan` in `XDG_STATE_HOME`, else in
    /// `~/.local/state`. The variables of [`RuntimeDirs::default`] override them. Root's are the default.
    ///
    /// # Errors
    /// The directory in `/tmp` cannot be created, or is not this user's alone.
    pub fn for_user() -> Result<RuntimeDirs, ControlError> {
        let user = user_id();
        let temporary = temporary_dir(user);
        let dirs = RuntimeDirs::of_user(user);
        if dirs.run == temporary {
            // mkdir(2) follows no link, and nobody else can replace an entry of a sticky directory.
            match DirBuilder::new().mode(0o700).create(&temporary) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(ControlError::File {
                        action: "create",
                        path: temporary,
                        error,
                    });
                }
                _ if !is_private(&temporary, user) => {
                    return Err(ControlError::NotPrivate { path: temporary });
                }
                _ => {}
            }
        }
        Ok(dirs)
    }

    /// Directories in which a client of this user finds an instance, or with `None` all instances: those of
    /// [`RuntimeDirs::for_user`] if it is there, else the default.
    pub fn for_client(name: Option<&str>) -> RuntimeDirs {
        let user = user_id();
        let own = RuntimeDirs::of_user(user);
        let is_here = match name {
            // An instance that is down still has its state.
            Some(name) => own.lock(name).exists() || own.state.join(name).exists(),
            None => own.names().is_ok_and(|names| !names.is_empty()),
        };
        // A variable may name any directory. The directory of the sockets for `wg` shows that
        // Seikan uses it.
        if is_here && is_private(&own.run, user) && own.wireguard.exists() {
            own
        } else {
            RuntimeDirs::default()
        }
    }

    fn of_user(user: u32) -> RuntimeDirs {
        if user == 0 {
            return RuntimeDirs::default();
        }
        let session = [
            variable("XDG_RUNTIME_DIR"),
            Some(format!("/run/user/{user}").into()),
        ];
        let mut session = session.into_iter().flatten();
        // `su` leaves the variable of another user.
        let session = session.find(|dir| dir.is_absolute() && is_private(dir, user));
        let run = variable(RUN_DIR_VARIABLE)
            .or_else(|| session.map(|dir| dir.join("seikan")))
            .unwrap_or_else(|| temporary_dir(user));
        let home = || Some(variable("HOME")?.join(".local/state"));
        let state_home = variable("XDG_STATE_HOME").or_else(home);
        let state_home = state_home.filter(|dir| dir.is_absolute());
        RuntimeDirs {
            wireguard: run.join("wireguard"),
            state: variable(STATE_DIR_VARIABLE)
                .or_else(|| state_home.map(|dir| dir.join("seikan")))
                .unwrap_or_else(|| run.join("state")),
            run,
        }
    }

    /// The control socket of an instance.
    pub fn control(&self, name: &str) -> PathBuf {
        self.run.join(format!("{name}.sock"))
    }

    /// The lock of an instance.
    pub fn lock(&self, name: &str) -> PathBuf {
        self.run.join(format!("{name}.lock"))
    }

    /// The socket for `wg`.
    pub fn uapi(&self, name: &str) -> PathBuf {
        self.wireguard.join(format!("{name}.sock"))
    }

    /// The note of an instance's sessions at its end.
    pub fn former(&self, name: &str) -> PathBuf {
        self.run.join(format!("{name}.sessions"))
    }

    /// The log of an instance that runs in the background.
    pub fn log(&self, name: &str) -> PathBuf {
        self.run.join(format!("{name}.log"))
    }

    /// Creates the directory of sockets, locks and logs if it is missing.
    pub fn create_run(&self) -> Result<(), ControlError> {
        create_folder(&self.run, 0o700)
    }

    /// Returns the names of the instances that have a lock file here, running or not.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.run) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.filter_map(|entry| {
            let name = entry.ok()?.file_name();
            Some(name.to_str()?.strip_suffix(".lock")?.to_owned())
        });
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Whether an instance runs, that is, a process holds its lock.
    pub fn is_running(&self, name: &str) -> io::Result<bool> {
        let file = match File::open(self.lock(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(false),
            Err(TryLockError::WouldBlock) => Ok(true),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

/// Returns the directory that a variable names.
fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    value.map(PathBuf::from)
}

/// Directory of the sockets of a user without a session.
fn temporary_dir(user: u32) -> PathBuf {
    format!("/tmp/seikan-{user}").into()
}

/// Whether a path is a directory, not a link to one, that belongs to a user, and that no other user can write to.
fn is_private(path: &Path, user: u32) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|dir| dir.is_dir() && dir.uid() == user && dir.mode() & 0o022 == 0)
}

/// The lock on the name of an instance, released when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
    /// Whether another process removes the file.
    is_left: bool,
}

impl Lock {
    /// Takes the name.
    pub fn take(dirs: &RuntimeDirs, name: &str) -> Result<Lock, ControlError> {
        dirs.create_run()?;
        let path = dirs.lock(name);
        let failed = |action| {
            let path = path.clone();
            move |error| ControlError::File {
                action,
                path,
                error,
            }
        };
        let mut patience = 5;
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600);
            let mut file = options.open(&path).map_err(failed("open"))?;
            match file.try_lock() {
                Ok(()) => {}
                // Perhaps a process only checks whether it is locked.
                Err(TryLockError::WouldBlock) if patience > 0 => {
                    patience -= 1;
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    let mut text = String::new();
                    let _ = file.read_to_string(&mut text);
                    return Err(ControlError::Running {
                        name: name.into(),
                        pid: text.trim().parse().ok(),
                    });
                }
                Err(TryLockError::Error(error)) => return Err(failed("lock")(error)),
            }
            // The previous holder may have removed the file between opening and locking it.
            let ours = file.metadata().map_err(failed("look at"))?;
            if fs::metadata(&path).is_ok_and(|there| there.ino() == ours.ino()) {
                let mut lock = Lock {
                    file,
                    path,
                    is_left: false,
                };
                lock.write_pid().map_err(|error| ControlError::File {
                    action: "write",
                    path: lock.path.clone(),
                    error,
                })?;
                return Ok(lock);
            }
        }
    }

    /// Leaves the removal of the file to another process.
    pub fn leave_file(&mut self) {
        self.is_left = true;
    }

    /// Writes this process's id into the lock file.
    fn write_pid(&mut self) -> io::Result<()> {
        self.file.rewind()?;
        self.file.set_len(0)?;
        writeln!(self.file, "{}", std::process::id())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed before the lock is released; otherwise a successor's file might be removed.
        if !self.is_left {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listening socket that removes its file when dropped.
#[derive(Debug)]
pub struct Listener {
    /// The socket, in non-blocking mode.
    pub socket: UnixListener,
    path: PathBuf,
    /// Whether another process removes the file.
    is_left: bool,
}

impl Listener {
    /// Listens at `path`, for this user only, and replaces an existing socket file.
    pub fn bind(path: &Path) -> Result<Listener, ControlError> {
        let at = |action, path: &Path| {
            let path = path.to_owned();
            move |error| ControlError::File {
                action,
                path,
                error,
            }
        };
        // The socket is created in a directory that no other user can enter and then renamed, so that it is
        // never open to others and replaces an old one atomically.
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let nest = path.with_file_name(format!(".{name}.{}", std::process::id()));
        let _ = fs::remove_dir_all(&nest);
        create_folder(&nest, 0o700)?;
        let egg = nest.join("sock");
        let bound = UnixListener::bind(&egg)
            .and_then(|socket| {
                fs::set_permissions(&egg, Permissions::from_mode(0o600))?;
                socket.set_nonblocking(true)?;
                fs::rename(&egg, path)?;
                Ok(socket)
            })
            .map_err(at("listen at", path));
        let _ = fs::remove_dir_all(&nest);
        Ok(Listener {
            socket: bound?,
            path: path.to_owned(),
            is_left: false,
        })
    }

    /// Takes over a listening socket that another program has bound. The file of the socket is
    /// removed only if it is `usual`; otherwise that program has to remove it.
    ///
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn adopt(socket: UnixListener, usual: &Path) -> Result<Listener, ControlError> {
        let failed = |error| ControlError::System {
            operation: "cannot use the given socket",
            error,
        };
        socket.set_nonblocking(true).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        let file = address.as_pathname();
        let is_usual = file.is_some_and(|file| is_same_file(file, usual));
        Ok(Listener {
            socket,
            path: usual.to_owned(),
            is_left: !is_usual,
        })
    }

    /// Leaves the removal of the file to another process. Returns whether there is a file to
    /// remove: one that another program has bound stays.
    pub fn leave_file(&mut self) -> bool {
        !std::mem::replace(&mut self.is_left, true)
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let number = |path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    matches!((number(a), number(b)), (Ok(a), Ok(b)) if a == b)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.is_left {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket for `wg`. The inner error is the reason why this user may not: a tunnel works without that
/// socket.
pub fn bind_uapi(dirs: &RuntimeDirs, name: &str) -> Result<Result<Listener, String>, ControlError> {
    let path = dirs.uapi(name);
    if UnixStream::connect(&path).is_ok() {
        return Err(ControlError::Foreign {
            name: name.into(),
            path,
        });
    }
    match create_folder(&dirs.wireguard, 0o755).and_then(|()| Listener::bind(&path)) {
        Err(ControlError::File { error, action, .. })
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            Ok(Err(format!("cannot {action} {}: {error}", path.display())))
        }
        listener => listener.map(Ok),
    }
}

fn create_folder(path: &Path, mode: u32) -> Result<(), ControlError> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(mode).create(path);
    made.map_err(|error| ControlError::File {
        action: "create",
        path: path.into(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirs(dir: &tempfile::TempDir) -> RuntimeDirs {
        RuntimeDirs {
            run: dir.path().join("run"),
            wireguard: dir.path().join("wireguard"),
            state: dir.path().join("state"),
        }
    }

    #[test]
    fn a_second_instance_names_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(&dirs(&dir), "wg0").unwrap();
        let error = Lock::take(&dirs(&dir), "wg0").unwrap_err().to_string();
        let pid = format!("process {}", std::process::id());
        assert!(error.contains(&pid), "{error}");
        assert!(dirs(&dir).is_running("wg0").unwrap());
        drop(first);
        assert!(!dirs(&dir).is_running("wg0").unwrap());
        assert!(Lock::take(&dirs(&dir), "wg0").is_ok());
    }

    #[test]
    fn leftovers_of_a_dead_process_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = dirs(&dir);
        drop(Lock::take(&dirs, "wg0").unwrap());
        fs::write(dirs.lock("wg0"), "1\n").unwrap();
        fs::create_dir_all(&dirs.wireguard).unwrap();
        drop(UnixListener::bind(dirs.uapi("wg0")).unwrap());
        let _lock = Lock::take(&dirs, "wg0").unwrap();
        let _listener = bind_uapi(&dirs, "wg0").unwrap().unwrap();
        assert!(UnixStream::connect(dirs.uapi("wg0")).is_ok());
    }

    #[test]
    fn a_living_wireguard_keeps_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = dirs(&dir);
        fs::create_dir_all(&dirs.wireguard).unwrap();
        let _other = UnixListener::bind(dirs.uapi("wg0")).unwrap();
        let error = bind_uapi(&dirs, "wg0").unwrap_err();
        assert!(matches!(error, ControlError::Foreign { .. }), "{error}");
    }

    #[test]
    fn sockets_are_for_their_owner_alone_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = dirs(&dir);
        let lock = Lock::take(&dirs, "wg0").unwrap();
        let listener = Listener::bind(&dirs.control("wg0")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&dirs.run), 0o700);
        assert_eq!(mode(&dirs.control("wg0")), 0o600);
        drop((listener, lock));
        assert_eq!(fs::read_dir(&dirs.run).unwrap().count(), 0);
    }
}
