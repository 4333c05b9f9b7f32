//! Where the control sockets are, who owns them, and how they come to be.
//!
//! `RUN/NAME.lock` is held by a running instance and contains its process id: the kernel lets go of
//! it with the process, however that ends. Who has it may replace `RUN/NAME.sock` and, unless
//! another WireGuard answers there, `/run/wireguard/NAME.sock`.
//!
//! Network namespaces share both folders, so an interface's name is in use for the whole host.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where `wg` looks for user-space tunnels (`SOCK_PATH` of wireguard-tools).
const WIREGUARD_DIR: &str = "/var/run/wireguard";
/// Where Seikan's own sockets are.
const RUN_DIR: &str = "/run/seikan";
/// What replaces [`RUN_DIR`].
pub const RUN_DIR_VARIABLE: &str = "SEIKAN_RUN_DIR";
const STATE_DIR: &str = "/var/lib/seikan";
/// What replaces [`STATE_DIR`].
pub const STATE_DIR_VARIABLE: &str = "SEIKAN_STATE_DIR";

/// Why there is no control socket.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another Seikan has the name.
    #[error(
        "`{name}` is running already{}: names are unique on a host, also across network \
         namespaces; stop it with `seikan down {name}`, or choose another name",
        pid.map_or_else(String::new, |pid| format!(" as process {pid}"))
    )]
    Running {
        /// The interface.
        name: String,
        /// Who has it, if the lock says.
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
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// The metrics endpoint.
    #[error("cannot serve metrics on {address}: {error}{}", metrics_hint(error))]
    Metrics {
        /// The address that was asked for.
        address: std::net::SocketAddr,
        /// The system's answer.
        error: io::Error,
    },
    /// Something else of the system.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: &'static str,
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

/// The folders of the sockets.
#[derive(Clone, Debug)]
pub struct Places {
    /// Seikan's own.
    pub run: PathBuf,
    /// `wg`'s.
    pub wireguard: PathBuf,
    /// What is kept over restarts: a folder for each interface.
    pub state: PathBuf,
}

impl Default for Places {
    /// `/run/seikan`, or what `SEIKAN_RUN_DIR` says; `/var/run/wireguard`; `/var/lib/seikan`, or what
    /// `SEIKAN_STATE_DIR` says.
    fn default() -> Places {
        let or = |variable, usual: &str| {
            let own = std::env::var_os(variable).filter(|dir| !dir.is_empty());
            own.map_or_else(|| usual.into(), PathBuf::from)
        };
        Places {
            run: or(RUN_DIR_VARIABLE, RUN_DIR),
            wireguard: WIREGUARD_DIR.into(),
            state: or(STATE_DIR_VARIABLE, STATE_DIR),
        }
    }
}

impl Places {
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

    /// Names of the instances that have left a lock here, running or not.
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

    /// Whether an instance runs: somebody holds its lock.
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

/// The name of an instance, held until dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
    /// The file is removed by somebody else.
    is_left: bool,
}

impl Lock {
    /// Takes the name.
    pub fn take(places: &Places, name: &str) -> Result<Lock, ControlError> {
        create_folder(&places.run, 0o700)?;
        let path = places.lock(name);
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
                // Perhaps only somebody who looks whether it is held.
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
            // The one before may have removed the file between our opening and locking it.
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

    /// From now on somebody else removes the file.
    pub fn leave_file(&mut self) {
        self.is_left = true;
    }

    /// Notes who holds it.
    fn write_pid(&mut self) -> io::Result<()> {
        self.file.rewind()?;
        self.file.set_len(0)?;
        writeln!(self.file, "{}", std::process::id())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before the lock goes, or we might remove that of a successor.
        if !self.is_left {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A listening socket whose file goes with it.
#[derive(Debug)]
pub struct Listener {
    /// Never blocks.
    pub socket: UnixListener,
    path: PathBuf,
    /// The file is removed by somebody else.
    is_left: bool,
}

impl Listener {
    /// Listens at `path`, for nobody but our own user, in place of whoever listened there before.
    pub fn bind(path: &Path) -> Result<Listener, ControlError> {
        let at = |action, path: &Path| {
            let path = path.to_owned();
            move |error| ControlError::File {
                action,
                path,
                error,
            }
        };
        // It comes to be in a folder that nobody else can enter, so that it is at no time open to
        // others, and takes the place of an old one in one step.
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

    /// From now on somebody else removes the file.
    pub fn leave_file(&mut self) {
        self.is_left = true;
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.is_left {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds the socket for `wg`. The reason, if we may not: a tunnel can do without.
pub fn bind_uapi(places: &Places, name: &str) -> Result<Result<Listener, String>, ControlError> {
    let path = places.uapi(name);
    if UnixStream::connect(&path).is_ok() {
        return Err(ControlError::Foreign {
            name: name.into(),
            path,
        });
    }
    match create_folder(&places.wireguard, 0o755).and_then(|()| Listener::bind(&path)) {
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

    fn places(dir: &tempfile::TempDir) -> Places {
        Places {
            run: dir.path().join("run"),
            wireguard: dir.path().join("wireguard"),
            state: dir.path().join("state"),
        }
    }

    #[test]
    fn a_second_instance_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(&places(&dir), "wg0").unwrap();
        let error = Lock::take(&places(&dir), "wg0").unwrap_err().to_string();
        let pid = format!("process {}", std::process::id());
        assert!(error.contains(&pid), "{error}");
        assert!(places(&dir).is_running("wg0").unwrap());
        drop(first);
        assert!(!places(&dir).is_running("wg0").unwrap());
        assert!(Lock::take(&places(&dir), "wg0").is_ok());
    }

    #[test]
    fn what_a_dead_process_left_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(&dir);
        drop(Lock::take(&places, "wg0").unwrap());
        fs::write(places.lock("wg0"), "1\n").unwrap();
        fs::create_dir_all(&places.wireguard).unwrap();
        drop(UnixListener::bind(places.uapi("wg0")).unwrap());
        let _lock = Lock::take(&places, "wg0").unwrap();
        let _listener = bind_uapi(&places, "wg0").unwrap().unwrap();
        assert!(UnixStream::connect(places.uapi("wg0")).is_ok());
    }

    #[test]
    fn a_living_wireguard_keeps_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(&dir);
        fs::create_dir_all(&places.wireguard).unwrap();
        let _other = UnixListener::bind(places.uapi("wg0")).unwrap();
        let error = bind_uapi(&places, "wg0").unwrap_err();
        assert!(matches!(error, ControlError::Foreign { .. }), "{error}");
    }

    #[test]
    fn sockets_are_for_their_owner_alone_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(&dir);
        let lock = Lock::take(&places, "wg0").unwrap();
        let listener = Listener::bind(&places.control("wg0")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&places.run), 0o700);
        assert_eq!(mode(&places.control("wg0")), 0o600);
        drop((listener, lock));
        assert_eq!(fs::read_dir(&places.run).unwrap().count(), 0);
    }
}
