//! Attempts of a compromised daemon to gain more rights.

use std::fs::{self, OpenOptions};
use std::io::{self, IoSlice};
use std::net::{ToSocketAddrs, UdpSocket};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::{Pid, Uid, setresuid};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use seikan_sys::netlink::Netlink;

use super::Play;

/// Returns all attempts with their outcomes. `few_files`: Landlock denies files that permissions
/// allow to everybody.
pub fn attempts(play: &Play, few_files: bool) -> Vec<(String, io::Result<()>)> {
    let mut all = Vec::new();
    let mut attempt = |name: String, outcome: io::Result<()>| all.push((name, outcome));

    // Files of root: those that determine root's later actions, and those that the monitor reverts.
    let run = play.journal.parent().expect("a folder").to_owned();
    let mut written = vec![play.journal.clone(), play.config.clone()];
    written.extend(
        [
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/modprobe",
            "/etc/passwd",
            "/etc/ld.so.cache",
        ]
        .map(PathBuf::from),
    );
    for path in written
        .iter()
        .filter(|path| path.starts_with("/tmp") || path.exists())
    {
        attempt(format!("write {}", path.display()), write(path));
    }
    for folder in [
        &run,
        Path::new("/etc"),
        Path::new("/etc/cron.d"),
        Path::new("/etc/wireguard"),
        Path::new("/etc/seikan"),
        Path::new("/run"),
        Path::new("/usr/bin"),
        Path::new("/root"),
        Path::new("/var/lib"),
    ] {
        if folder.exists() || folder == run {
            let name = format!("make a file in {}", folder.display());
            attempt(name, make_in(folder));
        }
    }
    // Only files of the test itself: a permitted attempt takes effect.
    for path in [&play.journal, &play.config] {
        attempt(format!("remove {}", path.display()), fs::remove_file(path));
        attempt(
            format!("replace {}", path.display()),
            fs::rename(&play.own, path),
        );
    }
    for path in [&play.journal, &play.config, Path::new("/etc/shadow")] {
        attempt(format!("read {}", path.display()), fs::read(path).map(drop));
    }

    // The monitor, and ways back to root.
    let monitor = Pid::from_raw(play.monitor);
    for signal in [
        None,
        Some(Signal::SIGTERM),
        Some(Signal::SIGKILL),
        Some(Signal::SIGSTOP),
    ] {
        let sent = kill(monitor, signal).map_err(io::Error::from);
        attempt(format!("send the monitor {signal:?}"), sent);
    }
    let memory = format!("/proc/{monitor}/mem");
    let open = OpenOptions::new().write(true).open(&memory);
    attempt(format!("write {memory}"), open.map(drop));
    let remote = [RemoteIoVec {
        base: 0x1000,
        len: 1,
    }];
    let poked = process_vm_writev(monitor, &[IoSlice::new(&[0])], &remote);
    attempt(
        "process_vm_writev".to_owned(),
        poked.map(drop).map_err(io::Error::from),
    );
    let files = fs::read_dir(format!("/proc/{monitor}/fd"));
    attempt("look into the monitor's files".to_owned(), files.map(drop));
    let pidfd = rustix::process::Pid::from_raw(play.monitor).expect("a number");
    let stolen = pidfd_open(pidfd, PidfdFlags::empty())
        .and_then(|pidfd| pidfd_getfd(pidfd, 0, PidfdGetfdFlags::empty()));
    attempt(
        "take a file of the monitor's".to_owned(),
        stolen.map(drop).map_err(io::Error::from),
    );
    let root = Uid::from_raw(0);
    let become_root = setresuid(root, root, root).map_err(io::Error::from);
    attempt("become root".to_owned(), become_root);

    // Services of root.
    let private = Path::new("/run/systemd/private");
    for socket in [&play.socket, private] {
        if *socket == *play.socket || socket.exists() {
            let connected = UnixStream::connect(socket).map(drop);
            attempt(format!("connect to {}", socket.display()), connected);
        }
    }

    // Files that permissions allow to every user.
    if few_files {
        attempt("make a file in /tmp".to_owned(), make_in(Path::new("/tmp")));
        attempt("write what is its own".to_owned(), write(&play.own));
        let sysctl = Path::new("/proc/sys/net/ipv4/ip_forward");
        attempt("write a sysctl of the network".to_owned(), write(sysctl));
        let status = fs::read("/proc/1/status").map(drop);
        attempt("look at another process".to_owned(), status);
    }
    if play.confined {
        let program = Command::new("/bin/true").status().map(drop);
        attempt("start a program".to_owned(), program);
        let namespace = unshare(CloneFlags::CLONE_NEWUSER).map_err(io::Error::from);
        attempt("make a user namespace".to_owned(), namespace);
        let datagrams = UnixDatagram::unbound().map(drop);
        attempt("open a socket to services".to_owned(), datagrams);
    }

    let mtu = || {
        let netlink = Netlink::open()?;
        let link = netlink.link(&play.interface)?;
        netlink.set_mtu(link.index, link.mtu - 1)?;
        netlink.set_mtu(link.index, link.mtu)
    };
    let resolved = ("localhost", 1).to_socket_addrs().map(drop);
    attempt("own: resolve a name".to_owned(), resolved);
    let socket = UdpSocket::bind("127.0.0.1:0").map(drop);
    attempt("own: open a socket".to_owned(), socket);
    let thread = std::thread::Builder::new().spawn(|| ()).map(drop);
    attempt("own: start a thread".to_owned(), thread);
    attempt(
        "own: change its interface".to_owned(),
        mtu().map_err(io::Error::other),
    );
    all
}

/// Opens a file for writing and leaves it unchanged: tests run on machines that matter.
fn write(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).open(path).map(drop)
}

/// Makes an unnamed file, which vanishes at once.
fn make_in(folder: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options
        .write(true)
        .custom_flags(nix::fcntl::OFlag::O_TMPFILE.bits());
    options.open(folder).map(drop)
}
