//! A daemon compromised by a sender of packets: its power over the host and over its monitor.
//!
//! A process of the test plays it, with the user, groups and capabilities of the real daemon,
//! dropped by the product's own functions. It attempts to gain more, and every attempt has to be
//! denied.

mod attempts;

use std::fs;
use std::io::{BufRead, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use seikan_sys::confine::{Needs, confine};
use seikan_sys::privilege::{self, Identity};
use serde::{Deserialize, Serialize};

use crate::common::{Tunnel, World, eventually, in_world, monitor_of, skip, stderr};

/// CAP_NET_ADMIN (include/uapi/linux/capability.h).
const NET_ADMIN: u64 = 1 << 12;
/// A name server, hooks, a default route: all tasks of a monitor.
const EVERYTHING: [&str; 2] = [
    "PostUp = true\nPostDown = true",
    "AllowedIPs = 0.0.0.0/0, ::/0\nPersistentKeepalive = 1",
];
/// Environment variable with the parameters of the playing process.
const PLAY: &str = "SEIKAN_TEST_PLAY";
/// Prefix of the lines of its output.
const OUTCOME: &str = "OUTCOME ";

/// Parameters of the playing process.
#[derive(Debug, Serialize, Deserialize)]
struct Play {
    /// Whether it is under seccomp and Landlock too. Without these, they cannot hide a missing
    /// denial by permissions and capabilities.
    confined: bool,
    user: u32,
    group: u32,
    monitor: i32,
    interface: String,
    journal: PathBuf,
    config: PathBuf,
    /// A socket for root only.
    socket: PathBuf,
    /// A file of the user, as replacement for others.
    own: PathBuf,
}

/// Outcome of an attempt.
#[derive(Debug, Serialize, Deserialize)]
struct Outcome {
    attempt: String,
    /// Error number; `None` if the attempt succeeded.
    errno: Option<i32>,
}

/// Returns a line of a process's status.
fn status_of(pid: &str, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(key));
    let line = lines.next().unwrap_or_else(|| panic!("no {key}"));
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn mask_of(pid: &str, set: &str) -> u64 {
    u64::from_str_radix(&status_of(pid, set), 16).expect("hexadecimal")
}

fn filters_of(pid: &str) -> u32 {
    status_of(pid, "Seccomp_filters:").parse().expect("a count")
}

/// Returns the only user and the only group of a process.
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
            // Two filters more than this test has (proc_pid_status(5)).
            assert_eq!(status_of(&task, "Seccomp:"), "2");
            assert_eq!(filters_of(&task), filters_of("self") + 2);
            for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
                assert_eq!(mask_of(&task, set), NET_ADMIN, "{set}");
            }
            assert_eq!(mask_of(&task, "CapInh:"), 0);
            assert_eq!(mask_of(&task, "CapAmb:"), 0);
        }
        let monitor = monitor_of(&left);
        assert_eq!(user_of(&monitor).0, 0, "the monitor keeps its privileges");
        assert_eq!(filters_of(&monitor), filters_of("self"));
        let confinement = &world.status(&world.left)["interface"]["confinement"];
        assert_eq!(
            confinement["system_calls"]["present"], true,
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
            // In /proc, the files of a process that is not dumpable are root's (proc(5)).
            let owner = fs::metadata(format!("/proc/{pid}/environ")).expect("a file");
            assert_eq!(owner.uid(), 0);
        }
    });
}

#[test]
fn a_compromised_daemon_is_denied_everything_else() {
    in_world(EVERYTHING, |world| {
        let [_right, left] = world.both_up();
        let socket = world.folder.path().join("private");
        let _manager = UnixListener::bind(&socket).expect("a socket");
        let (user, group) = user_of(&left.child.id().to_string());
        let own = world.folder.path().join("own");
        fs::create_dir(&own).expect("a folder");
        fs::write(own.join("file"), "").expect("a file");
        for path in [&own, &own.join("file")] {
            chown(path, Some(user), Some(group)).expect("given away");
        }
        let mut play = Play {
            confined: false,
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
        for confined in [false, true] {
            play.confined = confined;
            check(&played(world, &play));
        }
        assert_eq!(fs::read(&play.journal).expect("the journal"), journal);
        left.signal("TERM");
        assert_eq!(left.ended(), (Some(0), String::new()));
        assert_eq!(world.left.traces(), Vec::<String>::new());
    });
}

/// Asserts that everything was denied except the needs of a daemon.
fn check(outcomes: &[Outcome]) {
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
    // Otherwise the process would be denied everything, which proves nothing.
    assert!(
        !own.is_empty() && own.iter().all(|outcome| outcome.errno.is_none()),
        "{own:?}"
    );
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
        // A member, whose coordinator is down, has a directory of its own.
        let member = "Coordinator = https://192.0.2.2:1\nNames = false\nCredential = skc_";
        world
            .left
            .add_to_interface(&format!("{member}{}", "a".repeat(32)));
        let state = world.folder.path().join("state");
        for _ in 0..2 {
            // Root with all capabilities overrides permissions; this root cannot.
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
                let limit = &sockets[0]["capabilities"]["datagram_filter"];
                assert_eq!(limit["present"], true, "{sockets}");
                left.signal("TERM");
            }
            let (code, errors) = left.ended();
            assert!(up && code == Some(0), "{line}{errors}");
            // Only the coordinator, which is down, may be in the log.
            let others = errors
                .lines()
                .filter(|line| !line.contains("coordinator does not answer"));
            assert_eq!(others.collect::<Vec<_>>(), Vec::<&str>::new());
            let folder = fs::metadata(state.join(&world.left.interface)).expect("a folder");
            assert_eq!((folder.uid(), folder.mode() & 0o7777), (0, 0o770));
        }
    });
}

/// As in a container with CAP_NET_ADMIN only.
#[test]
fn a_member_without_the_capabilities_to_change_its_user_stays_root_and_says_so() {
    in_world(["", ""], |world| {
        let member = "Coordinator = https://192.0.2.2:1\nNames = false\nCredential = skc_";
        world
            .left
            .add_to_interface(&format!("{member}{}", "a".repeat(32)));
        let mut command = Command::new("setpriv");
        command
            .args(["--inh-caps=-all", "--bounding-set=-all,+net_admin", "--"])
            .args([env!("CARGO_BIN_EXE_seikan"), "up", world.left.config()])
            .env("SEIKAN_STATE_DIR", world.folder.path().join("state"));
        for _ in 0..2 {
            world.settle(&mut command);
            let mut left = world.start(&world.left, &mut command);
            let mut line = String::new();
            left.stdout.read_line(&mut line).expect("read");
            let user = line
                .contains("is up")
                .then(|| user_of(&left.child.id().to_string()).0);
            left.signal("TERM");
            let (code, errors) = left.ended();
            assert_eq!((user, code), (Some(0), Some(0)), "{line}{errors}");
            assert!(errors.contains("could open files of root"), "{errors}");
        }
    });
}

#[test]
fn a_service_is_not_given_a_folder_of_roots_with_other_files_in_it() {
    in_world(["", ""], |world| {
        let folder = world.folder.path().join("etc");
        fs::create_dir(&folder).expect("a folder");
        fs::write(folder.join("shadow"), "").expect("a file");
        for service in ["coordinator", "relay"] {
            let words = [service, "--listen", "127.0.0.1:0", "--dir", text(&folder)];
            let output = world.run(&world.left, &words);
            assert_eq!(output.status.code(), Some(1), "{service}");
            let said = stderr(&output);
            assert!(said.contains("`shadow`"), "{service}: {said}");
            for path in [&folder, &folder.join("shadow")] {
                assert_eq!(fs::metadata(path).expect("there").uid(), 0, "{service}");
            }
        }
    });
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn a_coordinator_and_a_relay_that_root_starts_become_the_daemons_user_without_any_capability() {
    in_world(["", ""], |world| {
        let top = world.folder.path();
        fs::set_permissions(top, fs::Permissions::from_mode(0o755)).expect("set");
        for service in ["coordinator", "relay"] {
            let folder = top.join(service);
            // The second port takes a capability to bind, which is not kept either.
            for address in ["127.0.0.1:0", "127.0.0.1:443"] {
                let shown = text(&folder);
                let words = [service, "--listen", address, "--dir", shown];
                let mut running = world.start(&world.left, &mut world.seikan(&words));
                let mut line = String::new();
                running.stdout.read_line(&mut line).expect("read");
                if !line.contains("listens on") {
                    let (_, errors) = running.ended();
                    panic!("{service} in {shown}: {line}{errors}");
                }
                let pid = running.child.id().to_string();
                // The lowest bit is signal 1, and SIGTERM is 15.
                let takes_the_end = |set| mask_of(&pid, set) >> 14 & 1 == 1;
                eventually("it takes no signal", || {
                    takes_the_end("SigCgt:") || takes_the_end("SigBlk:")
                });
                let (user, group) = user_of(&pid);
                assert!(user != 0 && group != 0, "{user}, {group}");
                let metadata = fs::metadata(&folder).expect("a folder");
                assert_eq!((metadata.uid(), metadata.mode() & 0o077), (user, 0));
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

/// Returns the outcomes of a playing process.
fn played(world: &World, play: &Play) -> Vec<Outcome> {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", "hostile::takeover::plays_a_compromised_daemon"])
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

/// The process of [`played`]; alone it does nothing.
#[test]
fn plays_a_compromised_daemon() {
    let Ok(play) = std::env::var(PLAY) else {
        return;
    };
    let play: Play = serde_json::from_str(&play).expect("JSON");
    let identity = Identity {
        user: play.user,
        group: play.group,
    };
    // The thread that waits for this one does nothing else.
    privilege::drop_thread_to(&[], Some(identity)).expect("privileges are given up");
    // Like the daemon of a plain tunnel.
    let few_files = play.confined && confine(&Needs::default()).files.is_present();
    println!();
    for (attempt, outcome) in attempts::attempts(&play, few_files) {
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

/// Returns the daemon's end of its stream to the monitor: its only socket of a pair.
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
        // In this namespace only, so that an obedient monitor harms nothing else.
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
fn leave_and_end_end_the_tunnel_and_each_is_accepted_once() {
    let message = |text: &str| {
        let length = u32::try_from(text.len()).expect("short").to_le_bytes();
        [&length[..], text.as_bytes()].concat()
    };
    in_world(EVERYTHING, |world| {
        let _right = world.up(&world.right);
        let left = world.up(&world.left);
        let mut stream = stream_of(&left);
        // A second "leave" could make it write the configuration again.
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
