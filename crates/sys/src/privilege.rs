//! Dropping of privileges: a daemon that faces the network runs as a user of its own with `CAP_NET_ADMIN` and no other
//! capability.
//!
//! Order of the steps in a daemon:
//! 1. As root: start the monitor (`monitor.rs`), open files that only root may read, bind ports below 1024, create the TUN
//!    interface, run the `PreUp` and `PostUp` hooks, and give the state directory to the user of the daemon
//!    (`handover.rs`).
//! 2. Call [`drop_to`] while there is only one thread. Capabilities belong to threads, and threads that start later inherit
//!    the rest.
//! 3. Face the network. From now on only socket marks and buffer sizes above the limit need `CAP_NET_ADMIN`.
//!
//! After step 2 the process can open no file of root's by its path, gains nothing from the programs that it executes
//! (`PR_SET_NO_NEW_PRIVS`), and can neither inspect nor signal another process of root. Later work that needs privileges is
//! done by the monitor, which keeps them and checks each request itself.

use std::collections::HashSet;
use std::io;

use caps::{CapSet, CapsHashSet};
use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Group, Uid, User, geteuid, setgroups, setresgid, setresuid};

pub use caps::Capability;

/// The system user that a daemon started by root becomes, if the host has this user.
pub const USER: &str = "seikan";
/// User and group id on other hosts. Neither Debian's policy (9.2.2) nor systemd (UIDS-GIDS.md)
/// assigns it.
pub const UNNAMED: u32 = 61_000;

/// Ids of users who log in (`UID_MIN` and `UID_MAX` of login.defs(5)).
const PEOPLE: std::ops::RangeInclusive<u32> = 1000..=60_000;

/// User and group of a daemon that faces the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub user: u32,
    /// Group id; there are no supplementary groups.
    pub group: u32,
}

impl Identity {
    /// Returns the user and group [`USER`] of this host, else [`UNNAMED`]; `None` if this process
    /// does not run as root and keeps its user. A user directory that does not answer, for example
    /// because it is behind this tunnel, counts as empty.
    ///
    /// # Errors
    /// [`PrivilegeError::Taken`], also if [`USER`] is root or a user who can log in (ids from 1000
    /// to 60000, login.defs(5)).
    pub fn of_daemon() -> Result<Option<Identity>, PrivilegeError> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let (user, group) = match User::from_name(USER).unwrap_or(None) {
            Some(entry) => (entry.uid.as_raw(), entry.gid.as_raw()),
            None => {
                let user = User::from_uid(Uid::from_raw(UNNAMED)).unwrap_or(None);
                let group = Group::from_gid(Gid::from_raw(UNNAMED)).unwrap_or(None);
                let taken = user.map(|user| user.name);
                if let Some(name) = taken.or(group.map(|group| group.name)) {
                    return Err(PrivilegeError::Taken { id: UNNAMED, name });
                }
                (UNNAMED, UNNAMED)
            }
        };
        if user == 0 || group == 0 || PEOPLE.contains(&user) {
            Err(PrivilegeError::Taken {
                id: user,
                name: USER.to_owned(),
            })
        } else {
            Ok(Some(Identity { user, group }))
        }
    }

    /// Becomes this user. Keeps the permitted capabilities and loses the effective ones.
    fn assume(self) -> nix::Result<()> {
        let (user, group) = (Uid::from_raw(self.user), Gid::from_raw(self.group));
        // The kernel resets the parent-death signal when the user changes (commit_creds in
        // kernel/cred.c), but the parent may rely on it.
        let with_parent = prctl::get_pdeathsig()?;
        prctl::set_keepcaps(true)?;
        setgroups(&[])?;
        setresgid(group, group, group)?;
        setresuid(user, user, user)?;
        prctl::set_keepcaps(false)?;
        prctl::set_pdeathsig(with_parent)
    }
}

/// Why privileges could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum PrivilegeError {
    /// A capability to be kept is missing.
    #[error(
        "this process lacks {capability}; run it as root, or let systemd grant it (AmbientCapabilities={capability})"
    )]
    Missing {
        /// The capability.
        capability: Capability,
    },
    /// Other threads would keep their privileges.
    #[error(
        "{count} threads are running: drop privileges before a second thread starts, which would keep them"
    )]
    Threads {
        /// The number of threads, including this one.
        count: usize,
    },
    /// The daemon's user or group id belongs to another account.
    #[error(
        "user or group {id} of the daemon is that of `{name}`, which is root or a login account: make `{USER}` a system user with a group of its own"
    )]
    Taken {
        /// User or group id.
        id: u32,
        /// Its name.
        name: String,
    },
    /// The process could not change its user.
    #[error("cannot become user {user}: {source}")]
    Become {
        /// The user id.
        user: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

fn system(action: &'static str) -> impl Fn(io::Error) -> PrivilegeError {
    move |source| PrivilegeError::System { action, source }
}

fn from_caps(action: &'static str) -> impl Fn(caps::errors::CapsError) -> PrivilegeError {
    move |error| system(action)(io::Error::other(error.to_string()))
}

/// Returns the effective user id of this process.
pub fn user_id() -> u32 {
    geteuid().as_raw()
}

/// Whether the calling thread may administer the interfaces of its network namespace now.
///
/// This is no statement about a namespace that belongs to another user namespace.
pub fn has_net_admin() -> bool {
    caps::has_cap(None, CapSet::Effective, Capability::CAP_NET_ADMIN).unwrap_or(false)
}

/// Prevents core dumps, which would contain keys, and access to this process by other users than
/// root.
///
/// # Errors
/// [`PrivilegeError::System`].
pub fn forbid_core_dumps() -> Result<(), PrivilegeError> {
    let failed = |errno: Errno| system("forbid core dumps")(errno.into());
    prctl::set_dumpable(false).map_err(failed)?;
    // The hard limit stays, for programs that this one starts.
    let (_, hard) = getrlimit(Resource::RLIMIT_CORE).map_err(failed)?;
    setrlimit(Resource::RLIMIT_CORE, 0, hard).map_err(failed)
}

/// Becomes `identity`, if there is one, without supplementary groups. Keeps `CAP_NET_ADMIN` and the
/// capabilities in `also` (for example `CAP_NET_BIND_SERVICE` for a port below 1024 that is bound
/// again later), and drops all others permanently. The process must have one thread.
///
/// # Errors
/// After [`PrivilegeError::Become`] and [`PrivilegeError::Missing`] the process keeps its
/// privileges, but can no longer gain any by executing programs. It may try again with fewer.
pub fn drop_to(also: &[Capability], identity: Option<Identity>) -> Result<(), PrivilegeError> {
    let tasks = std::fs::read_dir("/proc/self/task").map_err(system("count the threads"))?;
    match tasks.count() {
        1 => drop_thread_to(also, identity),
        count => Err(PrivilegeError::Threads { count }),
    }
}

/// Like [`drop_to`], for the calling thread and those that it starts. Other threads also change the
/// user, and keep the capabilities that remain after that.
///
/// # Errors
/// Like [`drop_to`].
pub fn drop_thread_to(
    also: &[Capability],
    identity: Option<Identity>,
) -> Result<(), PrivilegeError> {
    assume_with(&keepable(also)?, identity)
}

/// Becomes `identity`, if there is one, without supplementary groups. Drops all capabilities of the
/// calling thread except these, as far as it has them, and all that executed programs could add,
/// permanently.
///
/// # Errors
/// [`PrivilegeError::Become`], [`PrivilegeError::System`].
pub fn keep_only(these: &[Capability], identity: Option<Identity>) -> Result<(), PrivilegeError> {
    let action = "read the capabilities";
    let permitted = caps::read(None, CapSet::Permitted).map_err(from_caps(action))?;
    let these = these.iter().copied();
    let keep = these.filter(|capability| permitted.contains(capability));
    assume_with(&keep.collect(), identity)
}

fn assume_with(keep: &CapsHashSet, identity: Option<Identity>) -> Result<(), PrivilegeError> {
    drop_capabilities_of_exec(keep)?;
    if let Some(identity) = identity {
        identity.assume().map_err(|errno| PrivilegeError::Become {
            user: identity.user,
            source: errno.into(),
        })?;
    }
    set_capabilities(keep)?;
    // A change of the user resets the dumpable flag to fs.suid_dumpable (prctl(2),
    // PR_SET_DUMPABLE).
    forbid_core_dumps()
}

/// Returns the capabilities to keep, if all are present.
fn keepable(also: &[Capability]) -> Result<CapsHashSet, PrivilegeError> {
    let mut keep: CapsHashSet = also.iter().copied().collect();
    keep.insert(Capability::CAP_NET_ADMIN);
    let permitted =
        caps::read(None, CapSet::Permitted).map_err(from_caps("read the capabilities"))?;
    if let Some(&capability) = keep
        .iter()
        .find(|capability| !permitted.contains(capability))
    {
        return Err(PrivilegeError::Missing { capability });
    }

    Ok(keep)
}

fn drop_capabilities_of_exec(keep: &CapsHashSet) -> Result<(), PrivilegeError> {
    prctl::set_no_new_privs().map_err(|errno| system("forbid new privileges")(errno.into()))?;
    caps::clear(None, CapSet::Ambient).map_err(from_caps("clear the ambient capabilities"))?;
    // The bounding set limits the capabilities that exec could add. Changing it needs CAP_SETPCAP;
    // without that, no_new_privs is enough.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP).unwrap_or(false) {
        let action = "shrink the bounding capabilities";
        let bounding = caps::read(None, CapSet::Bounding).map_err(from_caps(action))?;
        for &capability in bounding.difference(keep) {
            caps::drop(None, CapSet::Bounding, capability).map_err(from_caps(action))?;
        }
    }
    Ok(())
}

fn set_capabilities(keep: &CapsHashSet) -> Result<(), PrivilegeError> {
    let set = |kind, value: &HashSet<Capability>| {
        caps::set(None, kind, value).map_err(from_caps("drop the capabilities"))
    };
    set(CapSet::Inheritable, &CapsHashSet::new())?;
    set(CapSet::Effective, keep)?; // before the permitted, of which it must be a part
    set(CapSet::Permitted, keep)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::test_namespace::namespace;
    use crate::testing::in_child;

    /// Returns the number in a line of /proc/thread-self/status.
    fn status(key: &str) -> u64 {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    fn privileged() -> bool {
        namespace().is_some()
    }

    const NET_ADMIN: u64 = 1 << 12; // include/uapi/linux/capability.h
    const NET_BIND_SERVICE: u64 = 1 << 10;

    #[test]
    fn only_kept_capabilities_remain_in_every_set() {
        if !privileged() {
            return;
        }
        std::thread::spawn(|| {
            drop_thread_to(&[Capability::CAP_NET_BIND_SERVICE], None).unwrap();
            let keep = NET_ADMIN | NET_BIND_SERVICE;
            assert_eq!(
                ["CapPrm:", "CapEff:", "CapBnd:", "CapInh:", "CapAmb:"].map(status),
                [keep, keep, keep, 0, 0]
            );
            assert_eq!(status("NoNewPrivs:"), 1);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_program_started_afterwards_gains_nothing() {
        if !privileged() {
            return;
        }
        let effective = std::thread::spawn(|| {
            drop_thread_to(&[], None).unwrap();
            let output = Command::new("grep")
                .args(["CapEff:", "/proc/self/status"])
                .output()
                .unwrap();
            String::from_utf8(output.stdout).unwrap()
        })
        .join()
        .unwrap();
        let effective = effective.trim_start_matches("CapEff:").trim();
        assert_eq!(u64::from_str_radix(effective, 16).unwrap(), NET_ADMIN);
    }

    #[test]
    fn afterwards_interfaces_can_be_changed_but_no_namespace_made() {
        let Some(namespace) = namespace() else { return };
        namespace
            .run(|| {
                let netlink = crate::netlink::Netlink::open().unwrap();
                let device = netlink.create_veth("v0", "v1", None).unwrap();
                drop_thread_to(&[], None).unwrap();
                assert!(has_net_admin());
                netlink.set_mtu(device, 1400).unwrap();
                assert!(matches!(
                    crate::netns::NetNs::create(),
                    Err(crate::netns::NetNsError::Create { .. })
                ));
            })
            .unwrap();
    }

    #[test]
    fn a_process_with_threads_is_refused() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || stopped.recv());
        assert!(matches!(
            drop_to(&[], None),
            Err(PrivilegeError::Threads { .. })
        ));
        drop(stop);
        let _ = other.join();
    }

    #[test]
    fn a_process_with_one_thread_drops_them() {
        if !privileged() {
            return;
        }
        in_child(|| {
            drop_to(&[], None).map_err(|error| error.to_string())?;
            let left = status("CapEff:");
            if left == NET_ADMIN {
                Ok(())
            } else {
                Err(format!("{left:x}"))
            }
        });
    }

    #[test]
    fn a_process_that_changes_its_user_keeps_the_capability_and_cannot_return() {
        if !privileged() {
            return;
        }
        in_child(|| {
            let said = |error: PrivilegeError| error.to_string();
            let identity = Identity {
                user: UNNAMED,
                group: UNNAMED,
            };
            drop_to(&[Capability::CAP_NET_RAW], Some(identity)).map_err(said)?;
            let text = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
            let of = |key: &str| {
                let mut lines = text.lines().filter_map(|line| line.strip_prefix(key));
                let line = lines.next().unwrap_or_default();
                line.split_whitespace().collect::<Vec<_>>().join(" ")
            };
            let ids = format!("{UNNAMED} {UNNAMED} {UNNAMED} {UNNAMED}");
            let keep = format!("{:016x}", NET_ADMIN | 1 << 13);
            let found = ["Uid:", "Gid:", "Groups:", "CapPrm:", "CapEff:", "CapBnd:"].map(of);
            let wanted = [&ids, &ids, "", &keep, &keep, &keep].map(str::to_owned);
            if found != wanted {
                return Err(format!("{found:?}"));
            }
            let root = Uid::from_raw(0);
            match (setresuid(root, root, root), prctl::get_dumpable()) {
                (Err(Errno::EPERM), Ok(false)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn the_signal_at_the_parents_death_outlives_the_change_of_the_user() {
        if !privileged() {
            return;
        }
        in_child(|| {
            let identity = Identity {
                user: UNNAMED,
                group: UNNAMED,
            };
            let signal = nix::sys::signal::Signal::SIGUSR1;
            prctl::set_pdeathsig(signal).map_err(|e| e.to_string())?;
            drop_to(&[], Some(identity)).map_err(|e| e.to_string())?;
            match prctl::get_pdeathsig() {
                Ok(Some(found)) if found == signal => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn without_the_capability_it_says_which_is_missing() {
        std::thread::spawn(|| {
            caps::clear(None, CapSet::Effective).unwrap();
            caps::clear(None, CapSet::Permitted).unwrap();
            assert!(!has_net_admin());
            let error = drop_thread_to(&[], None).unwrap_err();
            assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
        })
        .join()
        .unwrap();
    }
}
