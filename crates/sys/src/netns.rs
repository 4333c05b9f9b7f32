//! Network namespaces that are never left behind.
//!
//! A [`NetNs`] is a file descriptor: the kernel removes the namespace, with every virtual interface
//! in it, when the last descriptor is closed and the last process has left, however this process
//! ends. A thread enters it with setns(2) for the length of a closure ([`NetNs::run`]), and a child
//! process between fork and exec ([`NetNs::spawn_command`]).
//!
//! [`unshare_user`] moves an unprivileged process into namespaces in which it is root.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, mpsc};
use std::thread;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use crate::ethtool::Ethtool;
use crate::netlink::{Netlink, NetlinkError};

/// The namespace of the calling thread; `/proc/self` would be that of the main thread.
const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

/// Why a namespace could not be created or entered.
#[derive(Debug, thiserror::Error)]
pub enum NetNsError {
    /// unshare(2) was refused.
    #[error(
        "cannot create a network namespace: {errno}; it needs root (CAP_SYS_ADMIN), or a user namespace"
    )]
    Create {
        /// The kernel's error number.
        errno: Errno,
    },
    /// The file of a namespace could not be opened.
    #[error("cannot open the network namespace {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// setns(2) was refused.
    #[error("cannot enter the network namespace: {errno}; it needs root (CAP_SYS_ADMIN)")]
    Enter {
        /// The kernel's error number.
        errno: Errno,
    },
    /// A thread could not be started.
    #[error("cannot start a thread for the network namespace: {source}")]
    Thread {
        /// The cause.
        source: io::Error,
    },
    /// The loopback interface of the new namespace could not be set up.
    #[error("the new network namespace has no loopback: {0}")]
    Loopback(#[from] NetlinkError),
    /// The socket for offload settings could not be opened.
    #[error("cannot open a socket in the network namespace: {source}")]
    Ethtool {
        /// The cause.
        source: io::Error,
    },
    /// The user namespace could not be created.
    #[error("cannot create a user namespace ({step}): {source}; {remedy}")]
    User {
        /// The failed step.
        step: &'static str,
        /// The cause.
        source: io::Error,
        /// The remedy.
        remedy: &'static str,
    },
}

/// A network namespace, held open.
#[derive(Debug)]
pub struct NetNs {
    fd: OwnedFd,
}

impl NetNs {
    /// Creates an empty namespace with the loopback interface up.
    pub fn create() -> Result<Self, NetNsError> {
        // A thread of its own enters the new namespace and ends with it, so no other thread moves.
        let fd = on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| NetNsError::Create { errno })?;
            set_loopback_up()?;
            open_namespace(Path::new(OWN_NAMESPACE))
        })??;
        Ok(Self { fd })
    }

    /// Returns the namespace of the calling thread.
    pub fn current() -> Result<Self, NetNsError> {
        Self::open(Path::new(OWN_NAMESPACE))
    }

    /// Opens the namespace of a file such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, NetNsError> {
        Ok(Self {
            fd: open_namespace(path.as_ref())?,
        })
    }

    /// Returns another handle on the same namespace.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            fd: self.fd.try_clone()?,
        })
    }

    /// Returns the inode number that identifies the namespace on this machine.
    pub fn id(&self) -> io::Result<u64> {
        Ok(nix::sys::stat::fstat(&self.fd)?.st_ino)
    }

    /// Moves the calling thread into the namespace, permanently.
    pub fn enter(&self) -> Result<(), NetNsError> {
        setns(&self.fd, CloneFlags::CLONE_NEWNET).map_err(|errno| NetNsError::Enter { errno })
    }

    /// Runs a closure on a thread inside the namespace and waits for it. A panic continues in the
    /// caller. Sockets opened inside stay in the namespace.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, NetNsError> {
        on_thread(|| self.enter().map(|()| work()))?
    }

    /// Starts a thread inside the namespace.
    pub fn spawn_thread<T: Send + 'static>(
        &self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<thread::JoinHandle<T>, NetNsError> {
        // A thread starts in the namespace of the thread that creates it.
        on_thread(|| {
            self.enter()?;
            thread::Builder::new()
                .name(name.into())
                .spawn(work)
                .map_err(|source| NetNsError::Thread { source })
        })?
    }

    /// Opens a netlink socket in the namespace.
    pub fn netlink(&self) -> Result<Netlink, NetNsError> {
        Ok(self.run(Netlink::open)??)
    }

    /// Opens a handle on the offloads of the namespace's interfaces.
    pub fn ethtool(&self) -> Result<Ethtool, NetNsError> {
        self.run(Ethtool::open)?
            .map_err(|source| NetNsError::Ethtool { source })
    }

    /// Starts a program in the namespace, like `ip netns exec` but without private mounts. The
    /// kernel kills the child when this process ends in any way (`PR_SET_PDEATHSIG`). A thread that
    /// lives as long as the process forks the child, because the signal follows the death of the
    /// parent *thread*. The child inherits the CPU affinity and scheduling of that thread.
    pub fn spawn_command(&self, command: &mut Command) -> io::Result<Child> {
        let namespace = self.fd.try_clone()?;
        let parent = nix::unistd::getpid();
        let enter = move || {
            // Runs between fork and exec: only system calls, no allocation.
            setns(&namespace, CloneFlags::CLONE_NEWNET)?;
            nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
            // The parent may have died before the line above.
            if nix::unistd::getppid() == parent {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        };
        // SAFETY: the closure makes only the async-signal-safe system calls setns, prctl and
        // getppid, neither allocates nor locks, and owns the descriptor it uses.
        unsafe { command.pre_exec(enter) };
        spawn_on_keeper(command)
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Moves this process, which must be single-threaded, into new user, network and mount namespaces
/// in which its user is root. It may then create interfaces, namespaces and tunnels without any
/// privilege outside. The loopback interface is up. The process cannot return.
pub fn unshare_user() -> Result<(), NetNsError> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    let flags = CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
    unshare(flags).map_err(|errno| NetNsError::User {
        step: "unshare",
        source: errno.into(),
        remedy: match errno {
            Errno::EINVAL => "it must happen before the process starts a second thread",
            Errno::ENOSPC => "sysctl user.max_user_namespaces is too low",
            Errno::EPERM => {
                "unprivileged user namespaces are switched off \
                 (sysctl kernel.unprivileged_userns_clone=1, \
                 kernel.apparmor_restrict_unprivileged_userns=0); or run as root"
            }
            _ => "run as root instead",
        },
    })?;
    // Order and "deny": user_namespaces(7), "Defining user and group ID mappings".
    let files = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/uid_map", format!("0 {uid} 1")),
        ("/proc/self/gid_map", format!("0 {gid} 1")),
    ];
    for (path, content) in files {
        fs::write(path, content).map_err(|source| NetNsError::User {
            step: path,
            source,
            remedy: "check that /proc is mounted and that AppArmor or SELinux permits it, or run as root",
        })?;
    }
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map_err(|errno| {
        NetNsError::User {
            step: "private mounts",
            source: errno.into(),
            remedy: "run as root",
        }
    })?;
    Ok(set_loopback_up()?)
}

fn set_loopback_up() -> Result<(), NetlinkError> {
    let netlink = Netlink::open()?;
    netlink.set_up(netlink.link("lo")?.index)
}

fn open_namespace(path: &Path) -> Result<OwnedFd, NetNsError> {
    File::open(path)
        .map(OwnedFd::from)
        .map_err(|source| NetNsError::Open {
            path: path.into(),
            source,
        })
}

/// Runs a closure on a thread of its own and waits for it.
fn on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, NetNsError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, work)
            .map_err(|source| NetNsError::Thread { source })?;
        thread
            .join()
            .map_err(|panic| std::panic::resume_unwind(panic))
    })
}

type Job = Box<dyn FnOnce() + Send>;

/// Forks the command on the thread that is the parent of all such children.
fn spawn_on_keeper(command: &mut Command) -> io::Result<Child> {
    // With the id of its process: a fork copies this value but not the thread.
    static KEEPER: Mutex<Option<(u32, mpsc::Sender<Job>)>> = Mutex::new(None);
    let gone = || io::Error::other("the thread that starts programs has ended");
    let process = std::process::id();
    let mut keeper = KEEPER.lock().map_err(|_| gone())?;
    let jobs = match &*keeper {
        Some((owner, jobs)) if *owner == process => jobs.clone(),
        _ => {
            let (jobs, queue) = mpsc::channel::<Job>();
            thread::Builder::new()
                .name("children".into())
                .spawn(move || queue.into_iter().for_each(|job| job()))?;
            *keeper = Some((process, jobs.clone()));
            jobs
        }
    };
    drop(keeper);
    let (answer, answered) = mpsc::sync_channel(1);
    let mut owned = std::mem::replace(command, Command::new(""));
    let job: Job = Box::new(move || {
        let outcome = owned.spawn();
        let _ = answer.send((owned, outcome));
    });
    jobs.send(job).map_err(|_| gone())?;
    let (owned, outcome) = answered.recv().map_err(|_| gone())?;
    *command = owned;
    outcome
}

#[cfg(test)]
mod tests;
