//! The systemd units: systemd accepts them, and the services start as their units start them.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use seikan_sys::netns::NetNs;

/// The user of the services here.
const NOBODY: u32 = 65534;
/// Runs a program as a service that may write to one directory: as nobody, without capabilities,
/// everything else read-only.
const AS_A_SERVICE: &str = r#"folder=$1 files=$2; shift 2
umask 0077 && ulimit -c 0 || exit 125
# In a container there may be fewer.
ulimit -n "$files" 2>/dev/null || :
mount --bind "$folder" "$folder" && mount -o remount,bind,ro / || exit 125
exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@""#;

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")
}

fn unit(name: &str) -> String {
    fs::read_to_string(folder().join(name)).expect(name)
}

/// Returns the value of a unit's setting.
fn said<'a>(unit: &'a str, name: &str) -> &'a str {
    let mut values = unit
        .lines()
        .filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    values.next().unwrap_or_else(|| panic!("no {name}"))
}

fn skip(reason: &str) {
    let all = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some_and(|value| value == "1");
    assert!(!all, "{reason}");
    eprintln!("SKIPPED: {reason}");
}

#[test]
fn systemd_understands_the_units() {
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        return skip("no systemd-analyze (Debian: systemd)");
    }
    let copies = tempfile::tempdir().expect("a folder");
    for (name, copy) in [
        ("seikan@.service", "seikan@wg0.service"),
        ("seikan-coordinator.service", "seikan-coordinator.service"),
        ("seikan-relay.service", "seikan-relay.service"),
    ] {
        // systemd-analyze also looks for the program, and for manual pages, which are not
        // installed.
        let text = unit(name).replace("/usr/bin/seikan", env!("CARGO_BIN_EXE_seikan"));
        let copy = copies.path().join(copy);
        fs::write(&copy, text).expect("written");
        let mut verify = Command::new("systemd-analyze");
        let output = verify.args(["verify", "--man=no"]).arg(&copy).output();
        let output = output.expect("start");
        let about = String::from_utf8_lossy(&output.stderr).into_owned();
        // Units of this machine may be faulty: only messages about these units count.
        let ours: Vec<&str> = about
            .lines()
            .filter(|line| line.contains("seikan"))
            .collect();
        assert!(ours.is_empty(), "{name}: {ours:?}");
    }
}

#[test]
fn every_unit_starts_a_program_that_knows_its_words() {
    for name in [
        "seikan@.service",
        "seikan-coordinator.service",
        "seikan-relay.service",
    ] {
        let unit = unit(name);
        let words: Vec<&str> = said(&unit, "ExecStart").split(' ').collect();
        assert_eq!(words[0], "/usr/bin/seikan");
        // Unknown arguments are an error before help is printed.
        let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
            .args(&words[1..])
            .arg("--help")
            .output();
        let help = output.expect("start");
        assert!(help.status.success(), "{name}");
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{name}: {option}");
        }
        assert_eq!(said(&unit, "Type"), "notify");
        // Otherwise the program cannot confine itself: older systemd has these calls in no group.
        for call in [
            "seccomp",
            "landlock_create_ruleset",
            "landlock_add_rule",
            "landlock_restrict_self",
        ] {
            let is_let_through = |line: &str| {
                let calls = line.strip_prefix("SystemCallFilter=").unwrap_or_default();
                calls.split(' ').any(|word| word == call)
            };
            assert!(unit.lines().any(is_let_through), "{name}: {call}");
        }
    }
}

/// The mount of a single file ends when that file is replaced, so its directory must be writable.
#[test]
fn a_tunnel_can_write_to_a_resolv_conf_that_another_program_replaced() {
    let unit = unit("seikan@.service");
    let covers_etc = matches!(said(&unit, "ProtectSystem"), "full" | "strict");
    assert!(!covers_etc, "read-only: /etc");
}

#[test]
fn the_coordinator_and_the_relay_run_as_nobody_with_nothing_but_their_folder() {
    let Ok(netns) = NetNs::create() else {
        return skip("no namespaces: not root");
    };
    let netlink = netns.netlink().expect("netlink");
    let loopback = netlink.link("lo").expect("a link").index;
    netlink.set_up(loopback).expect("up");
    // In a directory that `nobody` passes, wherever the checkout is.
    let folder_of_test = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder_of_test.path(), fs::Permissions::from_mode(0o755)).expect("set");
    let program = folder_of_test.path().join("seikan");
    fs::copy(env!("CARGO_BIN_EXE_seikan"), &program).expect("copied");
    for name in ["seikan-coordinator", "seikan-relay"] {
        let unit = unit(&format!("{name}.service"));
        let state = said(&unit, "StateDirectory");
        let start = said(&unit, "ExecStart");
        assert!(
            start.ends_with(&format!("--dir /var/lib/{state}")),
            "{start}"
        );
        assert_eq!(said(&unit, "CapabilityBoundingSet"), "");
        assert_eq!(said(&unit, "UMask"), "0077");

        let folder = folder_of_test.path().join(state);
        fs::create_dir(&folder).expect("a folder");
        let mode = u32::from_str_radix(said(&unit, "StateDirectoryMode"), 8).expect("a mode");
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).expect("set");
        chown(&folder, Some(NOBODY), Some(NOBODY)).expect("nobody's");
        let notify_socket = folder_of_test.path().join(format!("{name}.notify"));
        let manager = UnixDatagram::bind(&notify_socket).expect("a socket");
        fs::set_permissions(&notify_socket, fs::Permissions::from_mode(0o777)).expect("set");
        manager
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("set");

        let words = start.replace(
            &format!("/var/lib/{state}"),
            folder.to_str().expect("UTF-8"),
        );
        let mut service = Command::new("unshare");
        service
            .args(["--mount", "sh", "-c", AS_A_SERVICE, "sh"])
            .arg(&folder)
            .arg(said(&unit, "LimitNOFILE"))
            .arg(&program)
            .args(words.split(' ').skip(1))
            .env_clear()
            .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
            .env("NOTIFY_SOCKET", &notify_socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut running = Running(netns.spawn_command(&mut service).expect("start"));
        let mut message = [0; 4096];
        let length = manager.recv(&mut message).unwrap_or_else(|error| {
            let _ = running.0.kill();
            let mut said = String::new();
            let mut stderr = running.0.stderr.take().expect("piped");
            let _ = std::io::Read::read_to_string(&mut stderr, &mut said);
            panic!("{name} does not say that it runs ({error}): {said}")
        });
        let message = String::from_utf8_lossy(&message[..length]).into_owned();
        assert!(message.contains("READY=1"), "{message}");

        let pid = running.0.id();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
        let of = |name: &str| {
            let mut lines = status.lines().filter_map(|line| line.strip_prefix(name));
            lines.next().unwrap_or_default().trim().to_owned()
        };
        assert!(of("Uid:").starts_with("65534"), "{status}");
        for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
            assert_eq!(of(set), "0000000000000000", "{set}");
        }
        for file in fs::read_dir(&folder).expect("a folder") {
            let file = file.expect("a file");
            let found = file.metadata().expect("a file");
            let shown = (file.file_name(), found.uid(), found.mode() & 0o077);
            assert_eq!(shown, (file.file_name(), NOBODY, 0));
        }

        let stop = Command::new("kill")
            .args(["-TERM", &pid.to_string()])
            .status();
        assert!(stop.expect("kill").success());
        let until = Instant::now() + crate::common::PATIENCE;
        let end = loop {
            match running.0.try_wait().expect("queried") {
                Some(end) => break end,
                None => assert!(Instant::now() < until, "{name} does not stop"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(end.success(), "{name}: {end}");
    }
}
