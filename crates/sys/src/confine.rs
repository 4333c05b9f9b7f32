//! Confinement of a process that faces the network: fewer system calls (seccomp(2)) and fewer files
//! (landlock(7)).
//!
//! Permissions and capabilities limit the effect of a compromised process on others. Confinement
//! also reduces the attack surface of the kernel, and covers objects without permissions: sockets
//! that any user may connect to, programs that any user may run, user namespaces, and the terminal.
//! A kernel without support is no failure: the missing part is an absent [`Ability`].
//!
//! The list of system calls was found by running the test suites with all other calls logged.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, RestrictionStatus, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use libc::{EPERM, c_long};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter,
};

use crate::ability::Ability;

/// Files that are read while a process runs: those of the resolver and its libraries, and
/// information on processors and network interfaces.
const READ: [&str; 9] = [
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/nix/store",
    "/proc/self",
    "/proc/softirqs",
    "/sys/devices",
    "/sys/class/net",
];
/// Directories that resolvers write to and /etc/resolv.conf links to.
const RESOLVERS: [&str; 3] = [
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager",
];
/// The newest version of landlock(7) that is requested. On an older kernel, the part that it knows
/// is used.
const LANDLOCK: ABI = ABI::V6;

/// Inserts input into a terminal (ioctl_tty(2); asm-generic/ioctls.h).
const TIOCSTI: u64 = 0x5412;
/// Pastes the selection into a console (ioctl_console(2)).
const TIOCLINUX: u64 = 0x541c;

/// Operations that a process still needs.
#[derive(Debug, Clone, Default)]
pub struct Needs {
    /// Opening packet sockets.
    pub packets: bool,
    /// Creating and changing files in these directories.
    pub folders: Vec<PathBuf>,
    /// Reading these files.
    pub files: Vec<PathBuf>,
}

/// The result of [`confine`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confinement {
    /// Only the necessary system calls are allowed.
    pub system_calls: Ability,
    /// Only the necessary files can be opened.
    pub files: Ability,
    /// Signals and abstract sockets do not reach other processes.
    pub signals: Ability,
}

impl Confinement {
    /// Returns the abilities with their names in JSON.
    pub fn table(&self) -> [(&'static str, &Ability); 3] {
        [
            ("system_calls", &self.system_calls),
            ("files", &self.files),
            ("signals", &self.signals),
        ]
    }
}

/// Confines the calling thread and all threads that it starts, permanently.
pub fn confine(needs: &Needs) -> Confinement {
    // In this order, because seccomp forbids the calls of Landlock.
    let none = |reason: String| [Ability::Absent(reason.clone()), Ability::Absent(reason)];
    let [files, signals] = match restrict_files(needs).map(|status| status.ruleset) {
        Ok(RulesetStatus::NotEnforced) => none("the kernel has no Landlock".to_owned()),
        Ok(RulesetStatus::PartiallyEnforced) => {
            let reason = "the kernel's Landlock does not cover them (Linux 6.12 does)";
            [Ability::Present, Ability::Absent(reason.to_owned())]
        }
        Ok(RulesetStatus::FullyEnforced) => [Ability::Present, Ability::Present],
        Err(error) => none(format!("the kernel refused Landlock: {error}")),
    };
    let system_calls = match restrict_calls(needs) {
        Ok(()) => Ability::Present,
        Err(reason) => Ability::Absent(reason),
    };
    Confinement {
        system_calls,
        files,
        signals,
    }
}

fn restrict_files(needs: &Needs) -> Result<RestrictionStatus, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let change = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
        | AccessFs::MakeDir
        | AccessFs::RemoveDir;
    let write_file: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::WriteFile;
    let resolver = Path::new("/etc/resolv.conf").canonicalize();
    let resolver = resolver
        .ok()
        .and_then(|file| Some(file.parent()?.to_owned()));
    let readable = READ.iter().chain(&RESOLVERS).map(PathBuf::from);
    let readable: Vec<PathBuf> = readable.chain(resolver).collect();
    Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(readable, read))?
        .add_rules(path_beneath_rules(["/dev/null"], write_file))?
        .add_rules(path_beneath_rules(["/dev/urandom"], read))?
        .add_rules(path_beneath_rules(&needs.files, read))?
        .add_rules(path_beneath_rules(&needs.folders, change))?
        .restrict_self()
}

fn restrict_calls(needs: &Needs) -> Result<(), String> {
    // Of two filters, the stricter result applies. A filter cannot read the flags of clone3;
    // without clone3, libraries use clone.
    let no_clone3 = filter(
        BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.cast_unsigned()),
    )?;
    let listed = filter(
        calls(needs)?,
        SeccompAction::Errno(EPERM.cast_unsigned()),
        SeccompAction::Allow,
    )?;
    for program in [no_clone3, listed] {
        apply_filter(&program).map_err(|error| format!("the kernel refused seccomp: {error}"))?;
    }
    Ok(())
}

fn filter(
    calls: BTreeMap<c_long, Vec<SeccompRule>>,
    others: SeccompAction,
    these: SeccompAction,
) -> Result<BpfProgram, String> {
    let unknown = |error: seccompiler::BackendError| format!("no filter for this machine: {error}");
    let machine = std::env::consts::ARCH.try_into().map_err(unknown)?;
    let filter = SeccompFilter::new(calls, others, these, machine).map_err(unknown)?;
    filter.try_into().map_err(unknown)
}

/// A condition on an argument, counted from 0.
fn is(argument: u8, how: SeccompCmpOp, value: u64) -> Result<SeccompCondition, String> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value);
    condition.map_err(|error| error.to_string())
}

/// A rule that requires all of these conditions.
fn when<const N: usize>(
    conditions: [Result<SeccompCondition, String>; N],
) -> Result<SeccompRule, String> {
    let conditions = conditions.into_iter().collect::<Result<Vec<_>, _>>()?;
    SeccompRule::new(conditions).map_err(|error| error.to_string())
}

/// The allowed calls. Some have rules, one of which must hold.
fn calls(needs: &Needs) -> Result<BTreeMap<c_long, Vec<SeccompRule>>, String> {
    use SeccompCmpOp::{Eq, Lt, MaskedEq, Ne};
    let number = |value: i32| u64::from(value.cast_unsigned());
    let mut calls: BTreeMap<c_long, Vec<SeccompRule>> =
        ALWAYS.iter().map(|call| (*call, Vec::new())).collect();
    #[cfg(target_arch = "x86_64")]
    calls.extend(ALWAYS_X86_64.iter().map(|call| (*call, Vec::new())));

    // Threads, no processes.
    let thread = number(libc::CLONE_THREAD);
    calls.insert(
        libc::SYS_clone,
        vec![when([is(0, MaskedEq(thread), thread)])?],
    );

    // No memory that is both writable and executable. Libraries of the resolver are mapped from
    // files.
    let (write, execute) = (number(libc::PROT_WRITE), number(libc::PROT_EXEC));
    let not_executed = || when([is(2, MaskedEq(execute), 0)]);
    let not_written = when([is(2, MaskedEq(write | execute), execute)])?;
    calls.insert(libc::SYS_mmap, vec![not_executed()?, not_written]);
    calls.insert(libc::SYS_mprotect, vec![not_executed()?]);

    // The network, and netlink.
    let mut families = vec![libc::AF_INET, libc::AF_INET6];
    if needs.packets {
        families.push(libc::AF_PACKET);
    }
    let families = families.into_iter();
    let mut sockets = families
        .map(|family| when([is(0, Eq, number(family))]))
        .collect::<Result<Vec<_>, _>>()?;
    sockets.push(when([
        is(0, Eq, number(libc::AF_NETLINK)),
        is(2, Eq, number(libc::NETLINK_ROUTE)),
    ])?);
    calls.insert(libc::SYS_socket, sockets);
    // Wake-ups between threads. A pair of datagram sockets could be connected to other sockets.
    let stream = is(1, MaskedEq(0xf), number(libc::SOCK_STREAM));
    let pair = when([is(0, Eq, number(libc::AF_UNIX)), stream])?;
    calls.insert(libc::SYS_socketpair, vec![pair]);

    // Socket options of IP, but not the options by which CAP_NET_ADMIN changes firewall tables and
    // IPsec policies (linux/netfilter_ipv4/ip_tables.h and similar: from 64 on).
    let (v4, v6) = (number(libc::IPPROTO_IP), number(libc::IPPROTO_IPV6));
    let class = [libc::IPV6_RECVTCLASS, libc::IPV6_TCLASS]
        .map(|name| when([is(1, Eq, v6), is(2, Eq, number(name))]));
    let mut options = vec![
        when([is(1, Ne, v4), is(1, Ne, v6)])?,
        when([
            is(1, Eq, v4),
            is(2, Lt, FIRST_TABLE_OPTION),
            is(2, Ne, number(IP_IPSEC_POLICY)),
            is(2, Ne, number(IP_XFRM_POLICY)),
        ])?,
        when([
            is(1, Eq, v6),
            is(2, Lt, FIRST_TABLE_OPTION),
            is(2, Ne, number(IPV6_IPSEC_POLICY)),
            is(2, Ne, number(IPV6_XFRM_POLICY)),
        ])?,
    ];
    for rule in class {
        options.push(rule?);
    }
    calls.insert(libc::SYS_setsockopt, options.clone());
    calls.insert(libc::SYS_getsockopt, options);

    // Input inserted into the terminal would be read by the shell after this process.
    let typed = when([is(1, Ne, TIOCSTI), is(1, Ne, TIOCLINUX)])?;
    calls.insert(libc::SYS_ioctl, vec![typed]);
    // Names of threads and of memory mappings.
    let named = [libc::PR_SET_NAME, libc::PR_SET_VMA].map(|what| when([is(0, Eq, number(what))]));
    calls.insert(
        libc::SYS_prctl,
        named.into_iter().collect::<Result<_, _>>()?,
    );
    // Its own resource limits.
    calls.insert(libc::SYS_prlimit64, vec![when([is(0, Eq, 0)])?]);
    Ok(calls)
}

/// The first option of IP that belongs to firewall tables: `IPT_SO_SET_REPLACE`
/// (linux/netfilter_ipv4/ip_tables.h).
const FIRST_TABLE_OPTION: u64 = 64;
/// linux/in.h and linux/in6.h.
const IP_IPSEC_POLICY: i32 = 16;
const IP_XFRM_POLICY: i32 = 17;
const IPV6_IPSEC_POLICY: i32 = 34;
const IPV6_XFRM_POLICY: i32 = 35;

/// Calls that are allowed with any arguments.
const ALWAYS: &[c_long] = &[
    // Reading and writing.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_dup,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_pipe2,
    // Files, within permissions and Landlock.
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_mkdirat,
    libc::SYS_linkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    libc::SYS_fchmod,
    libc::SYS_umask,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads.
    libc::SYS_clone3, // refused by the other filter, with an errno that says to use clone
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_wait4, // for the monitor, at the end
    // Signals. abort(3) needs tgkill, or tkill with musl; permissions limit which other processes they reach.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    libc::SYS_restart_syscall,
    // Time.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_eventfd2,
    // Open sockets.
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    // Information on the process and the machine.
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getppid,
    libc::SYS_getrusage,
    libc::SYS_capget,
];

/// Older names of the same calls on x86-64.
#[cfg(target_arch = "x86_64")]
const ALWAYS_X86_64: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_link,
    libc::SYS_rename,
    libc::SYS_unlink,
    libc::SYS_dup2,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_time,
    libc::SYS_getrlimit,
];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::process::Command;

    use super::*;
    use crate::testing::in_child;

    fn denied<T>(what: &str, outcome: std::io::Result<T>) -> Result<(), String> {
        match outcome.map_err(|error| error.raw_os_error()) {
            Err(Some(libc::EPERM | libc::EACCES)) => Ok(()),
            Err(other) => Err(format!("{what}: {other:?}")),
            Ok(_) => Err(format!("{what} is let through")),
        }
    }

    fn done<T>(what: &str, outcome: std::io::Result<T>) -> Result<T, String> {
        outcome.map_err(|error| format!("{what}: {error}"))
    }

    #[test]
    fn few_calls_are_left_and_threads_sockets_and_names_among_them() {
        in_child(|| {
            let confinement = confine(&Needs::default());
            if let Ability::Absent(reason) = confinement.system_calls {
                return Err(reason);
            }
            denied("a program", Command::new("/bin/true").status())?;
            denied("a socket of this host", UnixDatagram::unbound())?;
            denied("a pair for datagrams", UnixDatagram::pair())?;
            let namespace = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER);
            denied("a user namespace", namespace.map_err(std::io::Error::from))?;
            let netfilter = netlink_sys::Socket::new(netlink_sys::protocols::NETLINK_NETFILTER);
            denied("the firewall", netfilter)?;
            let route = netlink_sys::Socket::new(netlink_sys::protocols::NETLINK_ROUTE);
            done("routes", route)?;
            done("a pair of streams", UnixStream::pair())?;
            done("a socket", std::net::UdpSocket::bind("127.0.0.1:0"))?;
            // The C library creates threads with clone3 if it can.
            let thread = std::thread::Builder::new().spawn(|| 7);
            let joined = done("a thread", thread)?.join();
            (joined.ok() == Some(7)).then_some(()).ok_or("no thread")?;
            let name = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1));
            done("a name", name).map(drop)
        });
    }

    #[test]
    fn a_terminal_is_not_typed_into() {
        in_child(|| {
            confine(&Needs::default());
            let letter = b'x';
            // SAFETY: the call reads one byte of a local, if anything; no descriptor has the number.
            let typed = unsafe { libc::ioctl(-1, libc::TIOCSTI, &raw const letter) };
            let error = std::io::Error::last_os_error();
            match (typed, error.raw_os_error()) {
                // Not EBADF.
                (-1, Some(libc::EPERM)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    #[test]
    fn options_of_the_firewall_are_not_set_by_a_socket() {
        in_child(|| {
            let socket = done("a socket", std::net::UdpSocket::bind("127.0.0.1:0"))?;
            confine(&Needs::default());
            let set = |level: i32, name: i32| {
                let value = 1;
                // SAFETY: the call reads as many bytes of a local as it is told.
                let set = unsafe {
                    libc::setsockopt(
                        std::os::fd::AsRawFd::as_raw_fd(&socket),
                        level,
                        name,
                        (&raw const value).cast(),
                        size_of::<i32>() as u32,
                    )
                };
                match set {
                    0 => 0,
                    _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
                }
            };
            for (level, name) in [
                (libc::IPPROTO_IP, 64),
                (libc::IPPROTO_IP, 96),
                (libc::IPPROTO_IP, 128),
                (libc::IPPROTO_IP, IP_XFRM_POLICY),
                (libc::IPPROTO_IPV6, 64),
                (libc::IPPROTO_IPV6, IPV6_IPSEC_POLICY),
            ] {
                // Not ENOPROTOOPT or EINVAL.
                if set(level, name) != libc::EPERM {
                    return Err(format!("level {level}, option {name}"));
                }
            }
            match set(libc::IPPROTO_IP, libc::IP_TOS) {
                0 => Ok(()),
                error => Err(format!("IP_TOS: {error}")),
            }
        });
    }

    #[test]
    fn files_are_changed_in_the_named_folders_alone() {
        let (own, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::write(other.path().join("file"), "").unwrap();
        in_child(|| {
            let confinement = confine(&Needs {
                folders: vec![own.path().to_owned()],
                ..Needs::default()
            });
            if let Ability::Absent(reason) = confinement.files {
                // Where every test must run, this one must, too.
                return if std::env::var_os("SEIKAN_REQUIRE_ALL").is_some_and(|all| all == "1") {
                    Err(reason)
                } else {
                    Ok(())
                };
            }
            let (new, file) = (own.path().join("new"), own.path().join("file"));
            done("write", fs::write(&new, "1"))?;
            done("rename", fs::rename(&new, &file))?;
            done("remove", fs::remove_file(&file))?;
            done("read", fs::read("/etc/hosts"))?;
            done("look at its own files", fs::read_dir("/proc/self/fd"))?;
            denied("another folder", fs::write(other.path().join("new"), "1"))?;
            denied("another file", fs::write(other.path().join("file"), "1"))?;
            denied("another's reading", fs::read(other.path().join("file")))?;
            denied("a sysctl", fs::write("/proc/sys/net/ipv4/ip_forward", "1"))
        });
    }
}
