use super::reload::{RELOAD_PATIENCE, Reload};
use super::*;
use crate::control::RuntimeDirs;
use seikan_config::{Overrides, Source, Syntax, parse};
use seikan_sys::poll::Epoll;
use std::ffi::OsString;
use std::fs;
use std::net::Shutdown;
use std::path::Path;
use std::time::{Duration, Instant};

fn config(hooks: &str) -> Config {
    let key = "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEA=";
    let text = format!("[Interface]\nPrivateKey = {key}\nAddress = 10.0.0.1/24\n{hooks}");
    let source = Source {
        file: "wg0.conf".into(),
        syntax: Syntax::Ini,
        text: Zeroizing::new(text),
    };
    let parsed = parse(&source, &Overrides::default(), &|_| unreachable!());
    parsed.config.expect("a configuration")
}

/// Replies of the monitor to these requests and bytes, and the contents of the directory afterwards.
fn answers(requests: &[Request], bytes: &[u8]) -> (Vec<String>, Vec<String>) {
    let folder = tempfile::tempdir().expect("folder");
    let mark = folder.path().join("mark");
    let config = config(&format!("PostDown = touch {}", mark.display()));
    let dirs = RuntimeDirs {
        run: folder.path().to_owned(),
        wireguard: folder.path().join("wireguard"),
        state: folder.path().join("state"),
    };
    let (journal, _) = Journal::open(&dirs.run, "wg0").expect("journal");
    let options = UpOptions {
        dirs,
        ..UpOptions::default()
    };
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let answers = std::thread::scope(|scope| {
        let (config, options) = (&config, &options);
        scope.spawn(move || Keeper::new(config, options, journal).serve(&theirs));
        for request in requests {
            send(&ours, request).expect("sent");
        }
        let _ = (&ours).write_all(bytes);
        let _ = ours.shutdown(Shutdown::Write);
        let mut answers = Vec::new();
        while let Ok(Some(reply)) = receive::<serde_json::Value>(&ours) {
            answers.push(reply.to_string());
        }
        answers
    });
    let entries = fs::read_dir(folder.path()).expect("folder").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    (answers, names.collect())
}

fn message(text: &str) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("short");
    [&length.to_le_bytes(), text.as_bytes()].concat()
}

const SEALED: Request = Request::Seal(Sealed {
    names: false,
    uapi: false,
});

#[test]
fn a_forged_request_is_refused_and_ends_the_conversation() {
    let forged = [
        r#"{"note":{"sysctl":{"path":"/proc/sys/net/ipv4/ip_default_ttl","before":"64"}}}"#,
        r#"{"note":{"rule":{"v6":false,"priority":1,"table":254,"unless_mark":null,"suppress":null}}}"#,
        r#"{"note":{"resolv-conf":{"interface":"../../x","server":"10.0.0.1"}}}"#,
        r#"{"note":{"firewall":{"table":"seikan-wg0"}}}"#,
        r#"{"run":"post-down"}"#,
        r#"{"run":"pre-up"}"#,
        r#"{"seal":{"names":true,"uapi":true}}"#,
        r#"{"exec":"id"}"#,
        r#"{"leave":{"path":"/etc/cron.d/x"}}"#,
        r#""end""#,
        "",
        "[",
    ];
    for text in forged {
        // The messages after it are not read.
        let bytes = [message(text), message(r#"{"leave":null}"#)].concat();
        let (answers, files) = answers(&[Request::Run(Moment::PreUp), SEALED], &bytes);
        assert_eq!(answers.len(), 3, "{text}: {answers:?}");
        assert!(
            answers[2].starts_with(r#"{"refused":"#),
            "{text}: {answers:?}"
        );
        assert_eq!(files, ["mark"], "{text}: everything is taken back");
    }
}

#[test]
fn a_forged_journal_takes_nothing_back_that_is_not_the_tunnels() {
    let folder = tempfile::tempdir().expect("folder");
    let file = folder.path().join("x");
    fs::write(&file, "1").expect("written");
    let sysctl = |path: &Path| Change::Sysctl {
        path: path.to_owned(),
        before: "0".to_owned(),
    };
    let left = vec![
        sysctl(&file),
        sysctl(Path::new("/proc/sys/net/ipv4/conf/all/forwarding")),
        Change::Firewall {
            table: "filter".to_owned(),
        },
    ];
    let mut warnings = Vec::new();
    take_back("wg0", left, &mut |warning| warnings.push(warning.message));
    assert_eq!(fs::read_to_string(&file).expect("read"), "1");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("3 changes"), "{warnings:?}");
}

#[test]
fn requests_during_a_reload_lead_to_one_more() {
    let folder = tempfile::tempdir().expect("folder");
    let [mark, go_on] = ["mark", "go-on"].map(|name| folder.path().join(name));
    // Both runs wait until all requests are made.
    let script = format!(
        "echo >> {}; until [ -e {} ]; do sleep 0.01; done",
        mark.display(),
        go_on.display()
    );
    let options = UpOptions {
        reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
        ..UpOptions::default()
    };
    let mut epoll = Epoll::new(1).expect("epoll");
    let mut reload = Reload::default();
    for _ in 0..5 {
        reload.begin(&options, &epoll).expect("begun");
    }
    fs::write(&go_on, "").expect("written");
    while reload.running.is_some() {
        assert_eq!(epoll.wait(None).expect("waited").len(), 1);
        reload.has_ended(&options, &epoll);
    }
    assert_eq!(fs::read_to_string(&mark).expect("read"), "\n\n");
}

#[test]
fn a_reload_that_does_not_end_is_killed_and_the_next_one_runs() {
    let folder = tempfile::tempdir().expect("folder");
    let mark = folder.path().join("mark");
    // The first run does not end.
    let script = format!("[ -e {0} ] || {{ > {0}; exec sleep 600; }}", mark.display());
    let options = UpOptions {
        reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
        ..UpOptions::default()
    };
    let mut epoll = Epoll::new(1).expect("epoll");
    let mut reload = Reload::default();
    let now = Instant::now();
    assert_eq!(reload.end_if_late(now), None);
    for _ in 0..2 {
        reload.begin(&options, &epoll).expect("begun");
    }
    while !mark.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(reload.end_if_late(now).is_some());
    assert_eq!(reload.end_if_late(now + 10 * RELOAD_PATIENCE), None);
    for _ in 0..2 {
        assert_eq!(epoll.wait(None).expect("waited").len(), 1);
        reload.has_ended(&options, &epoll);
    }
    assert!(reload.running.is_none());
}

#[test]
fn a_reload_ends_before_the_tunnel_is_taken_back() {
    let folder = tempfile::tempdir().expect("folder");
    let (gone, mark) = (folder.path().join("gone"), folder.path().join("mark"));
    let config = config(&format!(
        "PostDown = kill -0 $(cat {}) || touch {}",
        mark.display(),
        gone.display()
    ));
    let dirs = RuntimeDirs {
        run: folder.path().to_owned(),
        wireguard: folder.path().join("wireguard"),
        state: folder.path().join("state"),
    };
    let (journal, _) = Journal::open(&dirs.run, "wg0").expect("journal");
    let script = format!(
        "echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600",
        mark.display()
    );
    let options = UpOptions {
        dirs,
        reload: ["sh", "-c", &script].map(OsString::from).to_vec(),
        ..UpOptions::default()
    };
    let epoll = Epoll::new(1).expect("epoll");
    let mut keeper = Keeper::new(&config, &options, journal);
    keeper.reached = Some(Moment::PostUp);
    keeper.reload.begin(&options, &epoll).expect("begun");
    while !mark.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    keeper.leave(&Leaving::default());
    keeper.end();
    assert!(gone.exists());
}

#[test]
fn the_last_hooks_end_before_the_journal_is_released() {
    let folder = tempfile::tempdir().expect("folder");
    let (journal_file, mark) = (
        folder.path().join("wg0.journal"),
        folder.path().join("mark"),
    );
    let config = config(&format!(
        "PostDown = flock -n {} true || touch {}",
        journal_file.display(),
        mark.display()
    ));
    let (journal, _) = Journal::open(folder.path(), "wg0").expect("journal");
    let options = UpOptions::default();
    let mut keeper = Keeper::new(&config, &options, journal);
    keeper.reached = Some(Moment::PreUp);
    keeper.end();
    assert!(mark.exists(), "locked while the hook runs");
    assert!(!journal_file.exists());
}

#[test]
fn a_reload_needs_a_file_and_a_tunnel_that_is_set_up() {
    let (replies, _) = answers(&[SEALED, Request::Reload], &[]);
    assert!(
        replies[1].starts_with(r#"{"failures":["cannot reload"#),
        "{replies:?}"
    );
    let (replies, _) = answers(&[Request::Reload], &[]);
    assert!(replies[0].starts_with(r#"{"refused":"#), "{replies:?}");
}

#[test]
fn a_message_that_is_too_long_is_refused_unread() {
    let (answers, _) = answers(&[SEALED], &u32::MAX.to_le_bytes());
    assert!(answers[1].starts_with(r#"{"refused":"#), "{answers:?}");
}

#[test]
fn also_before_it_is_sealed_only_the_tunnels_own_changes_are_noted() {
    let sysctl = |path: &str| Change::Sysctl {
        path: path.into(),
        before: "0".to_owned(),
    };
    let firewall = |table: &str| Change::Firewall {
        table: table.to_owned(),
    };
    let config = config("");
    assert!(sysctl("/proc/sys/net/ipv4/conf/all/src_valid_mark").is_of(&config));
    assert!(firewall("seikan-wg0").is_of(&config));
    for change in [
        sysctl("/proc/sys/kernel/core_pattern"),
        sysctl("/proc/sys/net/../kernel/core_pattern"),
        sysctl("/proc/sys/net/ipv4/ip_forward"),
        sysctl("/etc/cron.d/x"),
        firewall("filter"),
        firewall("seikan-wg1"),
        Change::Dns {
            interface: "wg0".to_owned(),
        },
        Change::ResolvConf {
            interface: "wg0".to_owned(),
            server: [10, 0, 0, 1].into(),
        },
    ] {
        assert!(!change.is_of(&config), "{change:?}");
    }
}
