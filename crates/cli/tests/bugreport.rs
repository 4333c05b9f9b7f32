//! Archives for bug reports: the parts that are there, and the secrets that are not.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use flate2::read::GzDecoder;
use nix::unistd::geteuid;
use seikan_diagnose::Recording;
use serde_json::Value;

use crate::common::{PATIENCE, Tunnel, eventually, in_world, key_pair, passable_folder, stderr};
use crate::mesh::site::at_a_site;

/// A preshared key with both characters in which alphabets of base64 differ.
const PRESHARED: &str = "+/8AAQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0=";
/// A secret in the command of a hook, which also prints it.
const HOOK_SECRET: &str = "horse-battery-staple-4711";
/// A secret in a comment of a configuration.
const COMMENT_SECRET: &str = "correct-door-lamp-2903";

/// Status of a tunnel called `office`.
const STATUS: &str = include_str!("../../node/testdata/status.json");

/// Files of an archive by their names in its directory.
type Files = BTreeMap<String, Vec<u8>>;

fn unpack(archive: &Path) -> Files {
    let file = File::open(archive).expect("an archive");
    let mut archive = tar::Archive::new(GzDecoder::new(file));
    let entries = archive.entries().expect("entries").map(|entry| {
        let mut entry = entry.expect("an entry");
        let path = entry.path().expect("a path").into_owned();
        let mut parts = path.components();
        let top = parts.next().expect("a directory");
        let top = top.as_os_str().to_str().expect("UTF-8");
        assert!(top.starts_with("seikan-bugreport-"), "{}", path.display());
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).expect("read");
        let name = parts.as_path().to_str().expect("UTF-8");
        (name.to_owned(), bytes)
    });
    entries.collect()
}

fn text<'a>(files: &'a Files, name: &str) -> &'a str {
    let names: Vec<_> = files.keys().collect();
    let bytes = files
        .get(name)
        .unwrap_or_else(|| panic!("no {name}: {names:?}\n{}", text(files, "README.txt")));
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// Returns a secret of text or of base64 in every form in which a file may have it.
fn forms(secret: &str) -> Vec<String> {
    let hex = |bytes: &[u8]| -> String { bytes.iter().map(|b| format!("{b:02x}")).collect() };
    let percent = |text: &str| -> String {
        let each = text.chars().map(|c| match c {
            c if c.is_ascii_alphanumeric() => c.to_string(),
            c => format!("%{:02X}", u32::from(c)),
        });
        each.collect()
    };
    let decoded = STANDARD.decode(secret);
    let decoded = decoded.or_else(|_| URL_SAFE_NO_PAD.decode(secret.trim_start_matches("skc_")));
    let bytes = [Some(secret.as_bytes().to_vec()), decoded.ok()];
    let mut forms = vec![secret.to_owned(), percent(secret)];
    for bytes in bytes.into_iter().flatten() {
        forms.extend([
            STANDARD.encode(&bytes),
            STANDARD_NO_PAD.encode(&bytes),
            URL_SAFE.encode(&bytes),
            URL_SAFE_NO_PAD.encode(&bytes),
            percent(&STANDARD.encode(&bytes)),
            hex(&bytes),
            hex(&bytes).to_uppercase(),
        ]);
    }
    forms
}

/// Returns the forms of a key in which a log may have it.
fn planted(key: &str) -> Vec<String> {
    let mut planted = forms(key);
    // Nothing encodes the base64 of a key once more.
    let twice = STANDARD_NO_PAD.encode(key);
    planted.retain(|form| !form.starts_with(&twice[..8]));
    let hex: String = key.bytes().map(|byte| format!("{byte:02x}")).collect();
    planted.retain(|form| !form.eq_ignore_ascii_case(&hex));
    planted
}

/// Expects no secret in any file, also not within compressed data.
fn assert_clean(files: &Files, secrets: &[&str]) {
    for (name, bytes) in files {
        let mut content = String::from_utf8_lossy(bytes).into_owned();
        if name.ends_with(".parquet") {
            let recording = Recording::parse(bytes).expect("a recording");
            content += &format!("{recording:?}");
        }
        for secret in secrets {
            for form in forms(secret) {
                assert!(!content.contains(&form), "{name} has {form}");
            }
        }
    }
}

/// Returns the values of a key in a configuration of either syntax.
fn values<'a>(config: &'a str, key: &str) -> Vec<&'a str> {
    let lines = config.lines().filter_map(|line| line.strip_prefix(key));
    let value = |rest: &'a str| rest.trim_start().strip_prefix('=').map(str::trim);
    let values = lines.filter_map(value);
    values.map(|value| value.trim_matches('"')).collect()
}

/// Returns the lines about missing parts of a tunnel.
fn missing_parts<'a>(output: &'a str, interface: &str) -> Vec<&'a str> {
    let start = format!("missing: {interface}/");
    let lines = output.lines();
    lines.filter(|line| line.starts_with(&start)).collect()
}

/// Waits for the end of a report; returns its output.
fn finished(mut report: Tunnel) -> String {
    let mut output = String::new();
    report.stdout.read_to_string(&mut output).expect("read");
    let (code, errors) = report.ended();
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{output}");
    output
}

#[test]
fn an_archive_of_a_tunnel_has_every_part_and_no_secret() {
    let hook = format!("PostUp = echo \"%i {HOOK_SECRET}\" >&2 # {COMMENT_SECRET}");
    let peer =
        format!("AllowedIPs = 10.80.0.2/32\nPersistentKeepalive = 1\nPresharedKey = {PRESHARED}");
    in_world([&hook, &peer], |world| {
        let host = &world.right;
        let both = fs::read_to_string(host.config()).expect("a configuration");
        host.write(&(both + &format!("PresharedKey = {PRESHARED}\n")));
        let _right = world.up(host);
        let host = &world.left;
        let output = world.run(host, &["up", "-d", host.config()]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(world.answers_within(PATIENCE), "no echo");

        // Logs have no secrets, except what hooks print. Reports do not rely on it.
        let config = fs::read_to_string(host.config()).expect("a configuration");
        let private = values(&config, "PrivateKey")[0].to_owned();
        let log = world.status(host)["interface"]["log"].clone();
        let log = log.as_str().expect("a log file");
        let mut lines = fs::read_to_string(log).expect("a log");
        assert!(lines.contains(HOOK_SECRET), "{lines}");
        let command = format!("echo \"{} {HOOK_SECRET}\" >&2", host.interface);
        lines += &format!("WARN tunnel: the hook `{command}` failed\n");
        for key in [&private, PRESHARED] {
            for form in planted(key) {
                lines += &format!("INFO tunnel: key={form} peer=x\n");
            }
        }
        lines += "WARN tunnel: the end\n";
        fs::write(log, lines).expect("written");

        let archive = world.folder.path().join("report.tar.gz");
        let path = archive.to_str().expect("UTF-8");
        let words = ["bugreport", "-o", path];
        let output = finished(world.start(host, &mut world.seikan(&words)));
        let name = &host.interface;
        // Its table is missing where the kernel has no such rules.
        let has_rules = host
            .traces()
            .iter()
            .any(|trace| trace.contains("inet seikan"));
        let rules = format!("missing: {name}/firewall.txt: ");
        let missing = missing_parts(&output, name);
        assert!(
            missing
                .iter()
                .all(|line| !has_rules && line.starts_with(&rules)),
            "{output}"
        );
        // The other tunnel runs too, in another namespace.
        let elsewhere = format!(
            "recording.parquet: there is no network interface \"{}\"",
            world.right.interface
        );
        assert!(output.contains(&elsewhere), "{output}");
        let mode = fs::metadata(&archive).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        let files = unpack(&archive);
        let secrets = [&private, PRESHARED, HOOK_SECRET, COMMENT_SECRET];
        assert_clean(&files, &secrets);
        let part = |part: &str| text(&files, &format!("{name}/{part}"));
        let config = part("config.conf");
        for key in ["PrivateKey", "PresharedKey", "PostUp"] {
            assert_eq!(values(config, key), ["(redacted)"], "{config}");
        }
        assert_eq!(values(config, "Endpoint"), ["192.0.2.2:51820"]);
        assert!(part("status.json").contains("\"handshakes\""));
        assert!(part("metrics.txt").ends_with("# EOF\n"));
        assert!(part("metrics.txt").contains("seikan_peer_"));
        let log = part("log.txt");
        assert!(log.contains("the hook `(redacted)` failed"), "{log}");
        assert!(log.contains("key=(redacted) peer=x"), "{log}");
        assert!(log.ends_with("WARN tunnel: the end\n"), "{log}");
        assert!(!has_rules || part("firewall.txt").contains("fib saddr type != local drop"));
        assert!(part("path.txt").contains(name.as_str()));
        assert!(part("path.json").contains("\"inner\""));
        let recording = &files[&format!("{name}/recording.parquet")];
        let recording = Recording::parse(recording).expect("a recording");
        assert!(recording.cost.seconds >= 5.0);
        assert!(text(&files, "network.txt").contains("10.80.0.1/24"));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel");
        assert!(text(&files, "host.json").contains(kernel.trim()));
        let readme = text(&files, "README.txt");
        for file in files.keys().filter(|file| *file != "README.txt") {
            assert!(readme.contains(&format!("  {file}  ")), "{file}: {readme}");
        }
        let down = world.run(host, &["down", name]);
        assert!(down.status.success(), "{}", stderr(&down));
    });
}

#[test]
fn an_archive_of_a_member_has_neither_its_credential_nor_a_token() {
    at_a_site(|site| {
        let _coordinator = site.coordinator();
        let host = site.host();
        let token = site.token(&["--reusable"]);
        host.join("host", &token);
        let config = fs::read_to_string(host.file()).expect("a configuration");
        let hook = format!("post-up = [\"test -n {HOOK_SECRET}\"]\n");
        fs::write(host.file(), hook + &config).expect("written");
        let _tunnel = host.up();
        eventually("the coordinator answers", || {
            host.status()["mesh"]["contact"]
                .to_string()
                .contains("connected")
        });

        let archive = host.folder.join("report.tar.gz");
        let path = archive.to_str().expect("UTF-8");
        let words = ["bugreport", &host.interface, "-o", path];
        let output = finished(host.start(&mut host.command(&words)));
        // It logs to a pipe here.
        let log = format!("missing: {}/log.txt: process ", host.interface);
        let missing = missing_parts(&output, &host.interface);
        assert!(
            missing.iter().any(|line| line.starts_with(&log)),
            "{output}"
        );

        let files = unpack(&archive);
        let secret = |key| values(&config, key)[0];
        let private = secret("private-key");
        let secrets = [private, secret("credential"), &token[0], HOOK_SECRET];
        assert_clean(&files, &secrets);
        let part = |part: &str| text(&files, &format!("{}/{part}", host.interface));
        let shown = part("config.toml");
        for key in ["private-key", "credential"] {
            assert_eq!(values(shown, key), ["(redacted)"], "{shown}");
        }
        assert_eq!(values(shown, "post-up"), ["[\"(redacted)\"]"]);
        assert_eq!(values(shown, "coordinator"), [secret("coordinator")]);
        assert!(part("netcheck.txt").contains("NAT"));
    });
}

#[test]
fn without_rights_and_with_nothing_running_there_is_an_archive() {
    let folder = passable_folder();
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(folder.path(), open).expect("set");
    // Other users may not pass to the folder of builds.
    let program = folder.path().join("seikan");
    fs::copy(env!("CARGO_BIN_EXE_seikan"), &program).expect("copied");
    let report = |run: &str, words: &[&str]| -> (Output, Files) {
        let archive = folder.path().join(format!("{run}.tar.gz"));
        let output = Command::new(words[0])
            .args(&words[1..])
            .arg(&program)
            .args(["bugreport", "-o"])
            .arg(&archive)
            .env("SEIKAN_RUN_DIR", folder.path().join(run))
            .output();
        let output = output.expect("start");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        (output, unpack(&archive))
    };
    let (output, files) = report("absent", &["env"]);
    let names: Vec<_> = files.keys().map(String::as_str).collect();
    assert_eq!(names, ["README.txt", "host.json", "network.txt"]);
    let missing = "missing: tunnels: none is running";
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains(missing), "{printed}");
    assert!(text(&files, "README.txt").contains("  tunnels: none is running"));

    // Root's, as /run/seikan is.
    let run = folder.path().join("closed");
    fs::create_dir(&run).expect("a folder");
    fs::set_permissions(&run, fs::Permissions::from_mode(0o700)).expect("set");
    let nobody = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--",
    ];
    let (_, files) = report("closed", &nobody);
    let readme = text(&files, "README.txt");
    assert!(readme.contains("tunnels: cannot connect to"), "{readme}");
    assert!(readme.contains("permission denied"), "{readme}");
    assert!(text(&files, "host.json").contains("\"is_root\": false"));
    assert!(text(&files, "network.txt").contains("lo: up"));
}

#[test]
fn a_tunnel_that_does_not_start_has_its_findings_and_not_the_text_of_its_file() {
    in_world(["", ""], |world| {
        let host = &world.left;
        host.add_to_interface(&format!("MTU = many\nPostUp = echo {HOOK_SECRET} >&2"));
        let archive = world.folder.path().join("report.tar.gz");
        let path = archive.to_str().expect("UTF-8");
        let output = world.run(host, &["bugreport", host.config(), "-o", path]);
        assert!(output.status.success(), "{}", stderr(&output));
        let files = unpack(&archive);
        let config = fs::read_to_string(host.config()).expect("a configuration");
        assert_clean(&files, &[HOOK_SECRET, values(&config, "PrivateKey")[0]]);
        let check = text(&files, &format!("{}/check.json", host.interface));
        assert!(check.contains("\"key\": \"MTU\""), "{check}");
        let readme = text(&files, "README.txt");
        for part in ["config.conf", "status.json", "log.txt", "recording.parquet"] {
            let (_, missing) = readme.split_once("Missing parts:").expect("a list");
            assert!(missing.contains(part), "{part}: {readme}");
        }
    });
}

#[test]
fn a_log_is_left_out_if_the_hooks_are_not_known() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = format!("INFO tunnel: up\n{HOOK_SECRET}\nWARN tunnel: the end\n");
    fs::write(folder.path().join("office.log"), log).expect("written");
    let (private, _) = key_pair();
    let toml = format!("private-key = \"{private}\"\naddress = \"10.0.0.1/24\"\n");
    let ini = format!("[Interface]\nPrivateKey = {private}\nAddress = 10.0.0.1/24\n");
    let hook = format!("echo {HOOK_SECRET}");
    let report = |run: usize, ending: &str, text: &str| {
        let config = folder.path().join(format!("office.{ending}"));
        fs::write(&config, text).expect("written");
        let archive = folder.path().join(format!("{run}.tar.gz"));
        let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
            .arg("bugreport")
            .arg(&config)
            .arg("-o")
            .arg(&archive)
            .env("SEIKAN_RUN_DIR", folder.path())
            .output();
        let output = output.expect("start");
        assert!(output.status.success(), "{}", stderr(&output));
        let files = unpack(&archive);
        assert_clean(&files, &[HOOK_SECRET, &private]);
        files
    };
    let usable = [
        ("toml", format!("{toml}post-up = [\"{hook}\"]\n")),
        ("conf", format!("{ini}PostUp = {hook}\n")),
    ];
    for (run, (ending, config)) in usable.iter().enumerate() {
        let files = report(run, ending, config);
        let expected = "INFO tunnel: up\n(redacted)\nWARN tunnel: the end\n";
        assert_eq!(text(&files, "office/log.txt"), expected);
    }
    let unusable = [
        ("toml", format!("{toml}post-up = [\"{hook}\"\n")),
        ("toml", format!("{toml}post-upp = [\"{hook}\"]\n")),
        ("toml", format!("{toml}[hooks]\npost-up = [\"{hook}\"]\n")),
        ("conf", format!("{ini}PostUp {hook}\n")),
        ("conf", format!("{ini}PotsUp = {hook}\n")),
        ("conf", format!("{ini}[Hooks]\nPostUp = {hook}\n")),
    ];
    for (run, (ending, config)) in unusable.iter().enumerate() {
        let files = report(usable.len() + run, ending, config);
        let readme = text(&files, "README.txt");
        let reason = "  office/log.txt: it may quote commands of hooks";
        assert!(readme.contains(reason), "{config}: {readme}");
        assert!(files.contains_key("office/check.json"), "{config}");
    }
}

#[test]
fn a_daemon_leads_a_report_to_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let top = folder.path().canonicalize().expect("a folder");
    let other = top.join("other.conf");
    let (private, _) = key_pair();
    let config = format!(
        "[Interface]\nPrivateKey = {private}\nAddress = 10.0.0.1/24\n\
         [Peer]\nName = {HOOK_SECRET}\nPublicKey = {PRESHARED}\nAllowedIPs = 10.0.0.2/32\n"
    );
    fs::write(&other, &config).expect("written");
    let linked = top.join("office.conf");
    symlink(&other, &linked).expect("a link");
    // A daemon could write such a file, and name any file of root as its key file.
    let own = top.join("own/office.conf");
    fs::create_dir(top.join("own")).expect("a folder");
    fs::write(&own, &config).expect("written");
    fs::set_permissions(&own, fs::Permissions::from_mode(0o666)).expect("set");
    let named = Arc::new(Mutex::new(linked.clone()));
    let mut status: Value = serde_json::from_str(STATUS).expect("JSON");
    status["interface"]["log"] = other.to_str().into();
    let listener = UnixListener::bind(top.join("office.sock")).expect("a socket");
    let config_file = Arc::clone(&named);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = String::new();
            let _ = BufReader::new(&stream).read_line(&mut request);
            status["interface"]["config"] = config_file.lock().expect("a path").to_str().into();
            let reply = serde_json::json!({ "ok": true, "status": status, "metrics": "" });
            let _ = writeln!(stream, "{reply}");
        }
    });
    let report = |run: &str, config: &Path| {
        *named.lock().expect("a path") = config.to_owned();
        let archive = top.join(format!("{run}.tar.gz"));
        let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
            .args(["bugreport", "office", "-o"])
            .arg(&archive)
            .env("SEIKAN_RUN_DIR", &top)
            .output();
        let output = output.expect("start");
        assert!(output.status.success(), "{}", stderr(&output));
        let files = unpack(&archive);
        assert!(text(&files, "office/status.json").contains("\"office\""));
        files
    };
    let files = report("linked", &linked);
    assert_clean(&files, &[HOOK_SECRET]);
    let readme = text(&files, "README.txt");
    let reason = "which the tunnel names: it is no file of that name; if the file is the right one";
    assert!(readme.contains(reason), "{readme}");

    // Another user reads only what is this user's anyway.
    if !geteuid().is_root() {
        return;
    }
    let files = report("own", &own);
    assert_clean(&files, &[HOOK_SECRET]);
    let readme = text(&files, "README.txt");
    assert!(readme.contains("can be changed by others"), "{readme}");
    fs::set_permissions(&own, fs::Permissions::from_mode(0o600)).expect("set");
    let files = report("roots", &own);
    assert!(text(&files, "office/config.conf").contains(HOOK_SECRET));
}

#[test]
fn an_existing_file_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.tar.gz");
    fs::write(&path, "other").expect("written");
    let output = Command::new(env!("CARGO_BIN_EXE_seikan"))
        .args(["bugreport", "-o"])
        .arg(&path)
        .output();
    let output = output.expect("start");
    assert_eq!(output.status.code(), Some(1));
    let expected = format!("cannot write {}: it exists already", path.display());
    assert!(stderr(&output).contains(&expected), "{}", stderr(&output));
    assert_eq!(fs::read(&path).expect("read"), b"other");
}
