//! Start, control and end of a tunnel without root.

use crate::common::{PATIENCE, eventually, in_world, stderr};
use crate::userspace::user::{NOBODY, User};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, chown};

const SOCKS: [&str; 2] = ["--socks", "1080"];

/// Returns a line of /proc/PID/status.
fn status_line(pid: &str, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.expect(key).trim().to_owned()
}

#[test]
fn its_user_controls_it_and_nothing_of_it_remains() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let left = &world.left;
        let _right = world.up_with(&world.right, &["--protocol", "native"]);
        let native = ["--protocol", "native", "--socks", "1080"];
        let (mut tunnel, line) = user.up(left, &native);
        assert!(line.trim().ends_with(", SOCKS5 127.0.0.1:1080"), "{line}");
        let at = &left.namespace;
        assert!(!left.has_tunnel());
        let list = user.succeed(at, &["status"]);
        let expected = format!("interface: {}\n", left.interface);
        assert!(list.contains(&expected), "{list}");
        assert!(list.contains("userspace: no interface"), "{list}");
        assert!(
            list.contains("SOCKS5 proxy: 127.0.0.1:1080; 0 open"),
            "{list}"
        );
        user.succeed(at, &["ping", "10.80.0.2", "-c", "1"]);
        user.succeed(at, &["down", left.config()]);
        assert_eq!(tunnel.wait(PATIENCE).code(), Some(0));
        assert_eq!(left.traces(), Vec::<String>::new());
        let files = fs::read_dir(user.run_dir()).expect("a folder");
        let names = files.map(|file| {
            file.expect("a file")
                .file_name()
                .into_string()
                .expect("UTF-8")
        });
        let mut names: Vec<String> = names.collect();
        names.sort();
        // The file has the peers with a session, for the next start.
        let sessions = format!("{}.sessions", left.interface);
        assert_eq!(names, [sessions, "wireguard".to_owned()]);
        let sockets = fs::read_dir(user.run_dir().join("wireguard")).expect("a folder");
        assert_eq!(sockets.count(), 0);
    });
}

#[test]
fn the_doctor_says_that_it_has_no_interface_to_examine() {
    in_world(["", ""], |world| {
        let (user, left) = (User::new(NOBODY), &world.left);
        let (_tunnel, _) = user.up(left, &SOCKS);
        let pid = user.status(&left.namespace, &left.interface)["pid"].to_string();
        for words in [
            vec!["doctor", "--iface", &left.interface],
            vec!["doctor", "--pid", &pid],
            vec!["doctor"],
        ] {
            let refused = user.run(&left.namespace, &words);
            assert!(!refused.status.success());
            let said = stderr(&refused);
            let expected = format!(
                "`{}` runs without root: it has no interface",
                left.interface
            );
            assert!(said.contains(&expected), "{words:?}: {said}");
        }
    });
}

#[test]
fn it_takes_little_memory_while_it_is_idle() {
    in_world(["", ""], |world| {
        let (user, left) = (User::new(NOBODY), &world.left);
        let (_tunnel, _) = user.up(left, &SOCKS);
        let pid = user.status(&left.namespace, &left.interface)["pid"].to_string();
        // The pages of the program's file do not count: tests use most of them, and releases do not
        // have them.
        let own = status_line(&pid, "RssAnon:");
        let kilobytes: u64 = own.trim_end_matches(" kB").parse().expect(&own);
        assert!(kilobytes < 8192, "{own}");
    });
}

#[test]
fn it_has_no_privileges_and_is_confined() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let (tunnel, _) = user.up(&world.left, &SOCKS);
        let pid = tunnel.child.id().to_string();
        assert!(status_line(&pid, "Uid:").starts_with("65534"));
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(
                u64::from_str_radix(&status_line(&pid, set), 16),
                Ok(0),
                "{set}"
            );
        }
        assert_eq!(status_line(&pid, "NoNewPrivs:"), "1");
        assert_eq!(status_line(&pid, "Seccomp:"), "2");
        let status = user.status(&world.left.namespace, &world.left.interface);
        let parts = status["interface"]["confinement"]
            .as_object()
            .expect("parts");
        for (part, ability) in parts {
            // Landlock is the kernel's.
            let expected = part == "system_calls" || ability["present"] == true;
            assert!(
                expected || ability["reason"].is_string(),
                "{part}: {ability}"
            );
        }
        assert_eq!(parts["system_calls"]["present"], true);
    });
}

#[test]
fn a_changed_file_is_applied_by_reload_and_by_hangup() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let left = &world.left;
        let (tunnel, _) = user.up(left, &SOCKS);
        let keepalive = || {
            let status = user.status(&left.namespace, &left.interface);
            status["peers"][0]["persistent_keepalive_s"].as_u64()
        };
        assert_eq!(keepalive(), Some(1));
        let change = |from: &str, to: &str| {
            let text = fs::read_to_string(&left.config).expect("read");
            left.write(&text.replace(from, to));
        };
        change("PersistentKeepalive = 1", "PersistentKeepalive = 20");
        let said = user.succeed(&left.namespace, &["reload", left.config()]);
        assert!(said.contains("1 peer changed"), "{said}");
        assert_eq!(keepalive(), Some(20));
        change("PersistentKeepalive = 20", "PersistentKeepalive = 21");
        tunnel.signal("HUP");
        eventually("the file is applied", || keepalive() == Some(21));
    });
}

#[test]
fn in_the_background_it_logs_beside_its_socket() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let left = &world.left;
        user.give(&left.config);
        let at = &left.namespace;
        let words = ["up", "-d", left.config(), "--userspace", "--socks", "1080"];
        let said = user.succeed(at, &words);
        assert!(said.contains("is up"), "{said}");
        let log = user.run_dir().join(format!("{}.log", left.interface));
        let owner = fs::metadata(&log).expect("a log").uid();
        assert_eq!(owner, NOBODY);
        let archive = user.home().join("report.tar.gz");
        let archive = archive.to_str().expect("UTF-8");
        let said = user.succeed(at, &["bugreport", &left.interface, "--output", archive]);
        assert!(!said.contains("missing: tunnel"), "{said}");
        let second = user.run(at, &words);
        let errors = stderr(&second);
        assert!(errors.contains("is running already as process"), "{errors}");
        user.succeed(at, &["down", &left.interface]);
        assert!(!log.exists());
    });
}

#[test]
fn settings_of_the_host_have_a_warning_and_no_effect() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let left = &world.left;
        let mark = user.home().join("mark");
        left.add_to_interface(&format!(
            "PostUp = touch {}\nDNS = 10.80.0.2",
            mark.display()
        ));
        let (mut tunnel, _) = user.up(left, &SOCKS);
        tunnel.signal("TERM");
        assert_eq!(tunnel.wait(PATIENCE).code(), Some(0));
        assert!(!mark.exists());
        let (_, errors) = tunnel.ended();
        for setting in ["`PostUp`", "`DNS`"] {
            assert!(errors.contains(setting), "{errors}");
        }
    });
}

#[test]
fn a_port_in_use_is_named_and_nothing_stays() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        let left = &world.left;
        user.give(&left.config);
        let taken = left
            .namespace
            .run(|| std::net::TcpListener::bind("127.0.0.1:1080"));
        let _taken = taken.expect("namespace").expect("bind");
        let words = ["up", left.config(), "--userspace", "--socks", "1080"];
        let output = user.run(&left.namespace, &words);
        assert_eq!(output.status.code(), Some(1));
        let errors = stderr(&output);
        assert!(
            errors.contains("cannot listen on 127.0.0.1:1080"),
            "{errors}"
        );
        assert!(
            !user
                .run_dir()
                .join(format!("{}.lock", left.interface))
                .exists()
        );
    });
}

#[test]
fn without_the_option_the_error_names_it() {
    in_world(["", ""], |world| {
        let user = User::new(NOBODY);
        user.give(&world.left.config);
        let output = user.run(&world.left.namespace, &["up", world.left.config()]);
        let errors = stderr(&output);
        assert!(errors.contains("--userspace"), "{errors}");
    });
}

#[test]
fn a_directory_of_another_user_in_tmp_is_refused() {
    in_world(["", ""], |world| {
        // No other test uses this id.
        let id = 3_000_000_000 + std::process::id();
        let user = User::without_session(id);
        let left = &world.left;
        user.give(&left.config);
        let words = ["up", left.config(), "--userspace", "--socks", "1080"];
        fs::create_dir(user.run_dir()).expect("a folder");
        chown(user.run_dir(), Some(NOBODY), Some(NOBODY)).expect("given");
        let output = user.run(&left.namespace, &words);
        fs::remove_dir(user.run_dir()).expect("removed");
        let errors = stderr(&output);
        let expected = format!("cannot use {}", user.run_dir().display());
        assert!(errors.contains(&expected), "{errors}");
        let (tunnel, _) = user.up(left, &SOCKS);
        let mode = fs::metadata(user.run_dir()).expect("a folder").mode() & 0o777;
        user.succeed(&left.namespace, &["down", &left.interface]);
        drop(tunnel);
        fs::remove_dir_all(user.run_dir()).expect("removed");
        assert_eq!(mode, 0o700);
    });
}

/// As in a container without capabilities.
#[test]
fn root_may_run_it_too_and_it_becomes_another_user() {
    in_world(["", ""], |world| {
        let _right = world.up(&world.right);
        let left = world.up_with(&world.left, &["--userspace", "--socks", "1080"]);
        let pid = left.child.id().to_string();
        assert!(!status_line(&pid, "Uid:").starts_with("0\t"));
        let kept = u64::from_str_radix(&status_line(&pid, "CapEff:"), 16);
        // CAP_NET_BIND_SERVICE (linux/capability.h).
        assert_eq!(kept, Ok(1 << 10));
        let proxy: SocketAddr = "127.0.0.1:1080".parse().expect("an address");
        let connected = world.left.namespace.run(|| TcpStream::connect(proxy));
        assert!(connected.expect("namespace").is_ok());
    });
}
