//! A daemon that was taken over by whoever sends it packets: what it can do to the host it runs on, and to its monitor.
//!
//! A process of the test's own plays it: with the user, the groups and the capabilities that the real daemon is seen to have, given up
//! by the product's own functions. It tries what would get it more, and each attempt has to be denied.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::{ToSocketAddrs, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, chown};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::{Pid, Uid, setresuid};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use seikan_sys::confine::{Needs, confine};
use seikan_sys::netlink::Netlink;
use seikan_sys::privilege::{self, Identity};
use serde::{Deserialize, Serialize};

use crate::common::{Tunnel, World, eventually, in_world, monitor_of, skip, stderr};

/// CAP_NET_ADMIN (include/uapi/linux/capability.h).
const NET_ADMIN: u64 = 1 << 12;
/// A name server to be told of, hooks, a default route: all that a monitor does.
const EVERYTHING: [&str; 2] = [
    "PostUp = true\nPostDown = true",
    "AllowedIPs = 0.0.0.0/0, ::/0\nPersistentKeepalive = 1",
];
/// Names the play to the process that plays.
const PLAY: &str = "SEIKAN_TEST_PLAY";
/// Begins a line of what it says.
const OUTCOME: &str = "OUTCOME ";

/// Against whom, and who plays.
#[derive(Debug, Serialize, Deserialize)]
struct Play {
    user: u32,
    group: u32,
    monitor: i32,
    interface: String,
    journal: PathBuf,
    config: PathBuf,
    /// Root's, and for root alone.
    socket: PathBuf,
    /// The user's, to be put in the place of others.
    own: PathBuf,
}

/// What came of an attempt.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    attempt: String,
    /// The error's number; `None`: it was done.
    errno: Option<i32>,
}

/// A line of a process's status.
fn status_of(pid: &str, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(key));
    let line = lines.next().unwrap_or_else(|| panic!("no {key}"));
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn mask_of(pid: &str, set: &str) -> u64 {
    u64::from_str_radix(&status_of(pid, set), 16).expect("hexadecimal")
}

/// The one user that it is in all respects, and its group.
fn user_of(pid: &str) -> (u32, u32) {
    let [user, group] = ["Uid:", "Gid:"].map(|key| {
        let line = status_of(pid, key);
        let ids: Vec<u32> = line
            .split(' ')
            .map(|id| id.parse().expect("an id"))
            .collect();
        assert!(ids.iter().all(|id| *id == ids[0]), "{key} {line}");
        ids[0]
    });
    (user, group)
}

#[test]
fn the_daemon_is_a_user_of_its_own_with_one_capability_in_all_of_its_threads() {
    in_world(EVERYTHING, |world| {
        let [_right, left] = world.both_up();
        let daemon = left.child.id().to_string();
        let tasks = fs::read_dir(format!("/proc/{daemon}/task")).expect("threads");
        for task in tasks.flatten() {
            let task = task.file_name().into_string().expect("a number");
            let (user, group) = user_of(&task);
            assert!(user != 0 && group != 0, "{user}, {group}");
            assert_eq!(status_of(&task, "Groups:"), "");
            assert_eq!(status_of(&task, "NoNewPrivs:"), "1");
            // Filtered, by two filters (proc_pid_status(5)).
            assert_eq!(status_of(&task, "Seccomp:"), "2");
            assert_eq!(status_of(&task, "Seccomp_filters:"), "2");
            for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
                assert_eq!(mask_of(&task, set), NET_ADMIN, "{set}");
            }
            assert_eq!(mask_of(&task, "CapInh:"), 0);
            assert_eq!(mask_of(&task, "CapAmb:"), 0);
        }
        let monitor = monitor_of(&left);
        assert_eq!(user_of(&monitor).0, 0, "the monitor keeps its privileges");
        assert_eq!(status_of(&monitor, "Seccomp:"), "0");
        let confinement = &world.status(&world.left)["interface"]["confinement"];
        assert_eq!(
            confinement["system-calls"]["present"], true,
            "{confinement}"
        );
        if confinement["files"]["present"] != true {
            skip(&confinement["files"]["reason"].to_string());
        }
    });
}

#[test]
fn neither_process_leaves_its_memory_in_a_core_dump() {
    in_world(["", ""], |world| {
        let [_right, left] = world.both_up();
        for pid in [left.child.id().to_string(), monitor_of(&left)] {
            let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("limits");
            let mut lines = limits.lines();
            let core = lines.find(|line| line.starts_with("Max core file size"));
            let soft = core.and_then(|line| line.split_whitespace().nth(4));
            assert_eq!(soft, Some("0"), "{limits}");
            // The files in /proc of a process that is not dumpable are root's (proc(5)).
            let owner = fs::metadata(format!("/proc/{pid}/environ")).expect("a file");
            assert_eq!(owner.uid(), 0);
        }
    });
}

#[test]
fn a_daemon_that_was_taken_over_is_denied_what_is_not_its_own() {
    in_world(EVERYTHING, |world| {
        let [_right, left] = world.both_up();
        let socket = world.folder.path().join("private");
        let _manager = UnixListener::bind(&socket).expect("a socket");
        let (user, group) = user_of(&left.child.id().to_string());
        let own = world.folder.path().join("own");
        fs::create_dir(&own).expect("a folder");
        fs::write(own.join("file"), "").expect("a file");
        chown(&own, Some(user), Some(group)).expect("given away");
        let play = Play {
            own: own.join("file"),
            user,
            group,
            monitor: monitor_of(&left).parse().expect("a number"),
            interface: world.left.interface.clone(),
            journal: journal_of(world),
            config: world.left.config.clone(),
            socket,
        };
        let journal = fs::read(&play.journal).expect("the journal");
        let outcomes = played(world, &play);
        let (own, denied): (Vec<_>, Vec<_>) = outcomes
            .iter()
            .partition(|outcome| outcome.attempt.starts_with("own: "));
        assert!(denied.len() > 15, "{denied:?}");
        let undenied: Vec<_> = denied
            .iter()
            .filter(|outcome| {
                let errno = outcome.errno.map(Errno::from_raw);
                !matches!(errno, Some(Errno::EACCES | Errno::EPERM | Errno::EROFS))
            })
            .collect();
        assert!(undenied.is_empty(), "not denied: {undenied:#?}");
        // Else the process would be denied everything, and nothing would be shown.
        assert!(
            !own.is_empty() && own.iter().all(|outcome| outcome.errno.is_none()),
            "{own:?}"
        );
        assert_eq!(fs::read(&play.journal).expect("the journal"), journal);
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

#[test]
fn a_tunnel_starts_again_and_again_with_the_capabilities_of_its_unit() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    let unit = fs::read_to_string(unit.join("seikan@.service")).expect("the unit");
    let lines = unit.lines();
    let lines = lines.filter_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let words = lines.flat_map(str::split_whitespace);
    let words = words.map(|word| word.to_lowercase().replace("cap_", "+"));
    let capabilities = words.collect::<Vec<_>>().join(",");
    in_world(["", ""], |world| {
        // A member, whose coordinator is not there, has a folder of its own.
        let member = "Coordinator = https://192.0.2.2:1\nNames = false\nCredential = skc_";
        world
            .left
            .add_to_interface(&format!("{member}{}", "a".repeat(32)));
        let state = world.folder.path().join("state");
        for _ in 0..2 {
            // Root with all capabilities passes over permissions, and this one does not.
            let mut command = Command::new("setpriv");
            command
                .args([
                    "--inh-caps=-all",
                    &format!("--bounding-set=-all,{capabilities}"),
                ])
                .args([
                    "--",
                    env!("CARGO_BIN_EXE_seikan"),
                    "up",
                    world.left.config(),
                ])
                .env("SEIKAN_STATE_DIR", &state);
            world.settle(&mut command);
            let mut left = world.start(&world.left, &mut command);
            let mut line = String::new();
            left.stdout.read_line(&mut line).expect("read");
            let up = line.contains("is up");
            if up {
                assert_ne!(user_of(&left.child.id().to_string()).0, 0);
                let sockets = &world.status(&world.left)["sockets"];
                let limit = &sockets[0]["capabilities"]["size_limit"];
                assert_eq!(limit["present"], true, "{sockets}");
                left.signal("TERM");
            }
            let (code, errors) = left.ended();
            assert!(up && code == Some(0), "{line}{errors}");
            assert_eq!(errors, "");
            let folder = fs::metadata(state.join(&world.left.interface)).expect("a folder");
            assert_eq!((folder.uid(), folder.mode() & 0o7777), (0, 0o770));
        }
    });
}

#[test]
fn a_coordinator_and_a_relay_that_root_starts_are_who_owns_their_folder_without_any_capability() {
    in_world(["", ""], |world| {
        let (new, of_nobody) = (
            world.folder.path().join("new"),
            world.folder.path().join("nobody"),
        );
        fs::create_dir(&of_nobody).expect("a folder");
        chown(&of_nobody, Some(65534), Some(65534)).expect("given away");
        for service in ["coordinator", "relay"] {
            for folder in [
                new.join(service),
                new.join(service),
                of_nobody.join(service),
            ] {
                let is_new = folder.starts_with(&new);
                if !is_new {
                    fs::create_dir(&folder).expect("a folder");
                    chown(&folder, Some(65534), Some(65534)).expect("given away");
                }
                let shown = folder.to_str().expect("UTF-8");
                let words = [service, "--listen", "127.0.0.1:0", "--dir", shown];
                let mut running = world.start(&world.left, &mut world.seikan(&words));
                let mut line = String::new();
                running.stdout.read_line(&mut line).expect("read");
                if !line.contains("listens on") {
                    let (_, errors) = running.ended();
                    panic!("{service} in {shown}: {line}{errors}");
                }
                let pid = running.child.id().to_string();
                // The lowest bit is that of signal 1, and SIGTERM is 15.
                let takes_the_end = |set| mask_of(&pid, set) >> 14 & 1 == 1;
                eventually("it takes no signal", || {
                    takes_the_end("SigCgt:") || takes_the_end("SigBlk:")
                });
                let (user, group) = user_of(&pid);
                match is_new {
                    true => assert!(user != 0 && group != 0, "{user}, {group}"),
                    false => assert_eq!((user, group), (65534, 65534)),
                }
                let of = fs::metadata(&folder).expect("a folder");
                assert_eq!((of.uid(), of.mode() & 0o077 != 0 && is_new), (user, false));
                let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
                for task in tasks.flatten() {
                    let task = task.file_name().into_string().expect("a number");
                    for set in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
                        assert_eq!(mask_of(&task, set), 0, "{service}: {set}");
                    }
                    assert_eq!(status_of(&task, "NoNewPrivs:"), "1");
                    assert_eq!(status_of(&task, "Seccomp:"), "2", "{service}");
                }
                running.signal("TERM");
                let (code, errors) = running.ended();
                assert_eq!(code, Some(0), "{service}: {errors}");
            }
        }
    });
}

fn journal_of(world: &World) -> PathBuf {
    let run = world.folder.path().join("run");
    run.join(format!("{}.journal", world.left.interface))
}

/// What came of the attempts of a process that plays.
fn played(world: &World, play: &Play) -> Vec<Outcome> {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([
            "--exact",
            "hostile::takeover::plays_a_daemon_that_was_taken_over",
        ])
        .arg("--nocapture")
        .env(PLAY, serde_json::to_string(play).expect("JSON"));
    let mut playing = world.start(&world.left, &mut command);
    let mut lines = Vec::new();
    for line in playing.stdout.by_ref().lines() {
        let line = line.expect("a line");
        if let Some(outcome) = line.strip_prefix(OUTCOME) {
            lines.push(serde_json::from_str(outcome).expect("an outcome"));
        }
    }
    let (code, errors) = playing.ended();
    assert_eq!(code, Some(0), "{errors}");
    lines
}

/// The process of [`played`]; by itself it does nothing.
#[test]
fn plays_a_daemon_that_was_taken_over() {
    let Ok(play) = std::env::var(PLAY) else {
        return;
    };
    let play: Play = serde_json::from_str(&play).expect("JSON");
    let identity = Identity {
        user: play.user,
        group: play.group,
    };
    // The one that waits for this thread does nothing else.
    privilege::drop_thread_to(&[], Some(identity)).expect("privileges are given up");
    // As the daemon of a plain tunnel.
    let confinement = confine(&Needs::default());
    println!();
    for (attempt, outcome) in attempts(&play, confinement.files.is_present()) {
        let errno = outcome
            .err()
            .map(|error| error.raw_os_error().unwrap_or(-1));
        let outcome = Outcome { attempt, errno };
        println!(
            "{OUTCOME}{}",
            serde_json::to_string(&outcome).expect("JSON")
        );
    }
}

/// Everything that it tries, and what came of each. `few_files`: the kernel keeps files from it that permissions do not.
fn attempts(play: &Play, few_files: bool) -> Vec<(String, io::Result<()>)> {
    let mut all = Vec::new();
    let mut attempt = |name: String, outcome: io::Result<()>| all.push((name, outcome));

    // Files of root's: those that decide what root does later, and what the monitor takes back.
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
    // The world's own alone: what is let in happens.
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

    // The monitor, and the way back to root.
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

    // Services of root's.
    let private = Path::new("/run/systemd/private");
    for socket in [&play.socket, private] {
        if *socket == *play.socket || socket.exists() {
            let connected = UnixStream::connect(socket).map(drop);
            attempt(format!("connect to {}", socket.display()), connected);
        }
    }

    // What permissions leave to everybody.
    if few_files {
        attempt("make a file in /tmp".to_owned(), make_in(Path::new("/tmp")));
        attempt("write what is its own".to_owned(), write(&play.own));
        let sysctl = Path::new("/proc/sys/net/ipv4/ip_forward");
        attempt("write a sysctl of the network".to_owned(), write(sysctl));
        let status = fs::read("/proc/1/status").map(drop);
        attempt("look at another process".to_owned(), status);
    }
    let program = Command::new("/bin/true").status().map(drop);
    attempt("start a program".to_owned(), program);
    let namespace = unshare(CloneFlags::CLONE_NEWUSER).map_err(io::Error::from);
    attempt("make a user namespace".to_owned(), namespace);
    let datagrams = UnixDatagram::unbound().map(drop);
    attempt("open a socket to services".to_owned(), datagrams);

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

/// Opens it to be written, and leaves it as it is: tests run on machines that matter.
fn write(path: &Path) -> io::Result<()> {
    OpenOptions::new().append(true).open(path).map(drop)
}

/// Makes a file without a name, which is gone at once.
fn make_in(folder: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let options = options
        .write(true)
        .custom_flags(nix::fcntl::OFlag::O_TMPFILE.bits());
    options.open(folder).map(drop)
}

/// The daemon's end of its stream to the monitor: the one socket of a pair that it has.
fn stream_of(tunnel: &Tunnel) -> UnixStream {
    let pid = tunnel.child.id();
    let process = rustix::process::Pid::from_raw(pid.try_into().expect("a number"));
    let process = process.expect("a process");
    let process = pidfd_open(process, PidfdFlags::empty()).expect("a process");
    let is_pair = |socket: &UnixStream| {
        socket.peer_addr().is_ok_and(|address| address.is_unnamed())
            && socket
                .local_addr()
                .is_ok_and(|address| address.is_unnamed())
    };
    let files = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("files")
        .flatten();
    let number = |file: fs::DirEntry| -> Option<i32> {
        let target = fs::read_link(file.path()).ok()?;
        let is_socket = target.to_str()?.starts_with("socket:");
        file.file_name()
            .to_str()?
            .parse()
            .ok()
            .filter(|_| is_socket)
    };
    let mut pairs: Vec<UnixStream> = files
        .filter_map(number)
        .map(|number| -> OwnedFd {
            pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).expect("a file")
        })
        .map(UnixStream::from)
        .filter(is_pair)
        .collect();
    assert_eq!(pairs.len(), 1, "{pairs:?}");
    pairs.remove(0)
}

#[test]
fn a_forged_request_has_the_monitor_take_everything_back_and_do_nothing_else() {
    let length = |text: &str| u32::try_from(text.len()).expect("short").to_le_bytes();
    let message = |text: &str| [&length(text)[..], text.as_bytes()].concat();
    let forged = [
        message(
            r#"{"note":{"sysctl":{"path":"/proc/sys/net/ipv4/ip_default_ttl","before":"77"}}}"#,
        ),
        message(r#"{"note":"hooks"}"#),
        message(r#"{"run":"post-up"}"#),
        message(r#"{"seal":{"names":false,"uapi":false}}"#),
        message(r#""end""#),
        message("\0\u{1}garbage"),
        u32::MAX.to_le_bytes().to_vec(),
    ];
    in_world(EVERYTHING, |world| {
        // One of the namespace's own, so that a monitor that obeys harms nobody.
        let sysctl = || {
            let read = || fs::read_to_string("/proc/sys/net/ipv4/ip_default_ttl");
            world
                .left
                .namespace
                .run(read)
                .expect("namespace")
                .expect("a sysctl")
        };
        let before = sysctl();
        let mark = world.folder.path().join("mark");
        let hook = format!(
            "PostUp = echo up >> {0}\nPostDown = echo down >> {0}",
            mark.display()
        );
        world.left.add_to_interface(&hook);
        let _right = world.up(&world.right);
        for bytes in forged {
            fs::write(&mark, "").expect("written");
            let left = world.up(&world.left);
            let mut stream = stream_of(&left);
            stream
                .set_read_timeout(Some(Duration::from_secs(20)))
                .expect("set");
            let shown = String::from_utf8_lossy(&bytes).into_owned();
            stream.write_all(&bytes).expect("sent");
            let (code, errors) = left.ended();
            assert_eq!(code, Some(1), "{shown}: {errors}");
            assert_eq!(world.left.traces(), Vec::<String>::new(), "{shown}");
            assert_eq!(
                fs::read_to_string(&mark).expect("read"),
                "up\ndown\n",
                "{shown}"
            );
            assert_eq!(sysctl(), before);
            let down = world.run(&world.left, &["down", &world.left.interface]);
            assert!(stderr(&down).contains("is not running"), "{shown}");
        }
    });
}

#[test]
fn leave_and_end_are_all_that_a_daemon_can_ask_for_and_each_once() {
    let message = |text: &str| {
        let length = u32::try_from(text.len()).expect("short").to_le_bytes();
        [&length[..], text.as_bytes()].concat()
    };
    in_world(EVERYTHING, |world| {
        let _right = world.up(&world.right);
        let left = world.up(&world.left);
        let mut stream = stream_of(&left);
        // A second "leave" could have it write the configuration again.
        for _ in 0..2 {
            stream
                .write_all(&message(r#"{"leave":null}"#))
                .expect("sent");
        }
        let (code, errors) = left.ended();
        assert_eq!(code, Some(1), "{errors}");
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}
