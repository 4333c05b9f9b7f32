//! The `seikan` binary as a shell sees it: output and exit status.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const PRIVATE: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";
const PEER: &str = "8kfUEz8qhR7BQ5TjDIo3G07Wy+gE18QueE0wzU1MNSE=";

/// Returns a command that runs `seikan` without variables that override the configuration.
fn seikan() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    for name in ["PROTOCOL", "OFFLOAD", "METRICS", "MTU"] {
        command.env_remove(format!("SEIKAN_{name}"));
    }
    command.stdin(Stdio::null());
    command
}

fn run(words: &[&str]) -> Output {
    seikan().args(words).output().unwrap()
}

fn run_with_input(program: &mut Command, input: &str) -> Output {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A file `wg0.conf` that only its owner can read.
fn config_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wg0.conf");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
    (folder, path)
}

fn good_config() -> (tempfile::TempDir, PathBuf) {
    config_file(&format!(
        "[Interface]\nPrivateKey = {PRIVATE}\nAddress = 10.0.0.1/24\nListenPort = 51820\n\
         [Peer]\nPublicKey = {PEER}\nAllowedIPs = 10.0.0.2/32\n"
    ))
}

/// Returns all verbs, with those below them, as the help lists them, each with its help.
fn verbs() -> Vec<(Vec<String>, String)> {
    let mut all: Vec<(Vec<String>, String)> = Vec::new();
    let mut open = vec![Vec::new()];
    while let Some(verb) = open.pop() {
        let words: Vec<&str> = verb.iter().map(String::as_str).collect();
        let output = run(&[&words[..], &["--help"]].concat());
        assert_eq!(output.status.code(), Some(0), "{verb:?}");
        let text = stdout(&output);
        // Verbs of the first level are in groups.
        let is_heading =
            |line: &str| ["Tunnel:", "Mesh:", "Diagnose:", "Tools:", "Commands:"].contains(&line);
        let mut within = false;
        let below = text.lines().filter(|line| {
            within = is_heading(line) || within && !line.is_empty();
            within
        });
        // A deeper indented line continues the one before.
        let names = below.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
        for name in names.filter(|name| !name.is_empty() && *name != "help") {
            open.push([verb.clone(), vec![name.to_owned()]].concat());
        }
        all.push((verb, text));
    }
    all
}

#[test]
fn the_help_lists_every_verb() {
    let all = verbs();
    let has = |verb: &[&str]| all.iter().any(|(words, _)| words == verb);
    for verb in [
        &["up"][..],
        &["status"],
        &["doctor"],
        &["join"],
        &["coordinator", "token"],
        &["coordinator", "policy", "set"],
        &["gateway", "discover"],
        &["lab", "bench"],
    ] {
        assert!(has(verb), "{verb:?}");
    }
    assert!(has(&["generate"]));
}

#[test]
fn the_help_of_every_verb_shows_its_use_and_an_example() {
    for (verb, text) in verbs().into_iter().filter(|(verb, _)| !verb.is_empty()) {
        let name = format!("seikan {}", verb.join(" "));
        assert!(text.contains(&format!("Usage: {name}")), "{text}");
        let example = text.split("Example").nth(1);
        assert!(example.is_some_and(|text| text.contains(&name)), "{text}");
    }
}

#[test]
fn lines_of_the_help_end_where_the_terminal_does() {
    /// Width of the help without a terminal.
    const WIDTH: usize = 100;
    let prose = |line: &str| !line.is_empty() && !line.starts_with(' ');
    for (verb, text) in verbs() {
        for (line, next) in text.lines().zip(text.lines().skip(1)) {
            let word = next.split(' ').next().unwrap_or_default();
            let early = line.len() + 1 + word.len() <= WIDTH && !line.ends_with(['.', ':']);
            let both = prose(line) && prose(next);
            assert!(!(both && early), "{verb:?}: {line:?}, then {next:?}");
        }
    }
}

#[test]
fn wrong_usage_is_exit_status_2() {
    for words in [
        &[][..],
        &["fly", "high"],
        &["up"],
        &["up", "wg0", "--protocol", "ipsec"],
        &["down"],
        &["check", "wg0", "--metrics", "9586"],
        &["lab"],
        &["lab", "bench", "--loads", "quic"],
        &["lab", "bench", "--rounds", "0"],
        &["demo", "--seconds", "x"],
        &["pubkey", "a-key-does-not-belong-here"],
    ] {
        let output = run(words);
        assert_eq!(
            output.status.code(),
            Some(2),
            "{words:?}: {}",
            stderr(&output)
        );
    }
}

/// RFC 7748, section 6.1, in base64.
#[test]
fn pubkey_gives_the_public_keys_of_rfc_7748() {
    for (private, public) in [
        (
            "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=",
            "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=",
        ),
        (
            "XasIfmJKikt54X+Lg4AO5m87sSkmGLb9HC+LJ/+I4Os=",
            "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=",
        ),
    ] {
        for end in ["", "\n", "\r\n"] {
            let output = run_with_input(seikan().arg("pubkey"), &format!("{private}{end}"));
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
            assert_eq!(stdout(&output), format!("{public}\n"));
        }
    }
}

#[test]
fn pubkey_refuses_invalid_keys_and_does_not_print_them() {
    for input in [
        "",
        "short",
        &PRIVATE[..43],
        &format!("{PRIVATE}\n{PRIVATE}\n"),
    ] {
        let output = run_with_input(seikan().arg("pubkey"), input);
        assert_eq!(output.status.code(), Some(1), "{input}");
        assert_eq!(stdout(&output), "");
        assert!(!stderr(&output).contains(&PRIVATE[..20]));
    }
}

#[test]
fn wg_derives_the_same_public_key_from_a_new_private_key() {
    let private = run(&["genkey"]);
    let ours = run_with_input(seikan().arg("pubkey"), &stdout(&private));
    match Command::new("wg").arg("help").output() {
        Ok(_) => {}
        Err(error) if std::env::var_os("SEIKAN_REQUIRE_ALL").is_none() => {
            eprintln!("SKIPPED: cannot run wg: {error}");
            return;
        }
        Err(error) => panic!("cannot run wg: {error}"),
    }
    let theirs = run_with_input(Command::new("wg").arg("pubkey"), &stdout(&private));
    assert_eq!(stdout(&ours), stdout(&theirs));
}

#[test]
fn new_keys_have_44_characters_and_differ() {
    for verb in ["genkey", "genpsk"] {
        let keys = [run(&[verb]), run(&[verb])].map(|output| stdout(&output));
        assert!(
            keys.iter()
                .all(|key| key.len() == 45 && key.ends_with("=\n")),
            "{verb}"
        );
        assert_ne!(keys[0], keys[1], "{verb}");
    }
}

#[test]
fn a_key_is_written_to_a_file_for_its_owner_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    for verb in ["genkey", "genpsk"] {
        for mode in [0o600, 0o640, 0o644] {
            let file = File::create(&path).unwrap();
            file.set_permissions(PermissionsExt::from_mode(mode))
                .unwrap();
            let mut child = seikan().arg(verb).stdout(file).spawn().unwrap();
            assert!(child.wait().unwrap().success());
            let after = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(after & 0o777, 0o600, "{verb} {mode:o}");
        }
    }
}

#[test]
fn check_says_that_a_good_file_is_usable() {
    let (_folder, path) = good_config();
    let output = run(&["check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(stderr(&output), "");
    let expected = "usable: interface wg0, protocol wireguard, 1 peer\n";
    assert!(stdout(&output).ends_with(expected), "{}", stdout(&output));
}

#[test]
fn check_summarises_a_gateway() {
    let (_folder, path) = config_file(&format!(
        "[Interface]\nPrivateKey = {PRIVATE}\nAddress = 10.77.0.1/24\n[Gateway]\nInterface = eth1\n\
         Mode = routed\n[Device]\nName = plc\nLAN = 192.168.1.10\n"
    ));
    let output = run(&["check", path.to_str().unwrap()]);
    assert_eq!(stderr(&output), "");
    let expected = "0 peers, routed gateway on eth1 for 1 device and 0 remotes\n";
    assert!(stdout(&output).ends_with(expected), "{}", stdout(&output));
}

#[test]
fn check_names_file_line_and_key_and_exits_1() {
    let text = format!("[Interface]\nPrivateKey = {PRIVATE}\nMTU = 1\nColour = blue\n");
    let (_folder, path) = config_file(&text);
    let output = run(&["check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains(&format!("{}:3", path.display())), "{text}");
    assert!(
        text.contains("`MTU`") && text.contains("`Colour`"),
        "{text}"
    );
    assert!(!text.contains(PRIVATE), "{text}");
    assert!(
        stdout(&output).contains("not usable: 2 errors"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn check_lists_its_findings_as_json() {
    let (_folder, path) = config_file(&format!("[Interface]\nPrivateKey = {PRIVATE}\nMTU = 1\n"));
    let output = run(&["check", "--json", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    crate::schema::check_json("check", &json);
    assert_eq!(json["usable"], false);
    assert_eq!((&json["errors"], &json["warnings"]), (&1.into(), &1.into()));
    let all = json["diagnostics"].as_array().unwrap();
    let error = all.iter().find(|d| d["severity"] == "error").unwrap();
    assert_eq!((&error["line"], &error["key"]), (&3.into(), &"MTU".into()));
}

#[test]
fn the_command_line_comes_before_the_environment_before_the_file() {
    let (_folder, path) = good_config();
    let path = path.to_str().unwrap();
    let protocol = |environment: Option<&str>, words: &[&str]| {
        let mut command = seikan();
        command.args(["check", path]).args(words);
        if let Some(value) = environment {
            command.env("SEIKAN_PROTOCOL", value);
        }
        let text = stdout(&command.output().unwrap());
        text.split("protocol ")
            .nth(1)
            .unwrap_or("")
            .split(',')
            .next()
            .unwrap_or("")
            .to_owned()
    };
    assert_eq!(protocol(None, &[]), "wireguard");
    assert_eq!(protocol(Some("native"), &[]), "native");
    assert_eq!(
        protocol(Some("native"), &["--protocol", "wireguard"]),
        "wireguard"
    );
}

#[test]
fn a_faulty_variable_is_named() {
    let (_folder, path) = good_config();
    let output = seikan()
        .args(["up", path.to_str().unwrap()])
        .env("SEIKAN_MTU", "big")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("`SEIKAN_MTU`"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn up_refuses_a_file_with_errors() {
    let (_folder, path) = config_file("[Interface]\n");
    let output = run(&["up", path.to_str().unwrap()]);
    // The units of systemd do not start it again.
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("no `PrivateKey`"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn colours_are_for_terminals_without_no_color() {
    let (_folder, path) = config_file("[Interface]\n");
    let coloured = |forced: bool, refused: bool| {
        let mut command = seikan();
        command.args(["check", path.to_str().unwrap()]);
        for (name, set) in [("CLICOLOR_FORCE", forced), ("NO_COLOR", refused)] {
            if set {
                command.env(name, "1")
            } else {
                command.env_remove(name)
            };
        }
        stderr(&command.output().unwrap()).contains('\x1b')
    };
    assert!(!coloured(false, false), "a pipe gets none");
    assert!(coloured(true, false));
    assert!(!coloured(true, true), "NO_COLOR has the last word");
}

#[test]
fn completions_know_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    for program in [&[][..], &["lab"]] {
        let words = ["generate", "completions", folder.path().to_str().unwrap()];
        let output = run(&[program, &words].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    for file in ["seikan.bash", "_seikan", "seikan.fish"] {
        let read = |file: &str| fs::read_to_string(folder.path().join(file)).unwrap();
        let text = read(file) + &read(&file.replace("seikan", "seikan-lab"));
        for (verb, _) in verbs() {
            let known = verb.iter().all(|word| text.contains(word));
            assert!(known, "{file}: {verb:?}");
        }
    }
}

#[test]
fn every_verb_has_a_man_page() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("man1");
    for program in [&[][..], &["lab"]] {
        let words = ["generate", "man", directory.to_str().unwrap()];
        let output = run(&[program, &words].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    for (verb, _) in verbs() {
        let name = [vec!["seikan".to_owned()], verb].concat().join("-");
        let page = directory.join(name + ".1");
        let text = fs::read_to_string(&page).unwrap_or_default();
        assert!(text.contains(".SH NAME"), "{}", page.display());
    }
    let up = fs::read_to_string(directory.join("seikan-up.1")).unwrap();
    assert!(up.contains("\nseikan up [OPTIONS] <FILE>\n"), "{up}");
    let demo = fs::read_to_string(directory.join("seikan-demo.1")).unwrap();
    assert!(demo.contains("\nseikan demo [OPTIONS]\n"), "{demo}");
}

/// Runs `seikan` with an empty directory of control sockets.
fn without_instances(args: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = seikan();
    command.args(args).env("SEIKAN_RUN_DIR", folder.path());
    command.output().unwrap()
}

#[test]
fn status_without_a_tunnel_says_so() {
    let output = without_instances(&["status"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("No tunnel is running"));
    let output = without_instances(&["status", "--json"]);
    assert_eq!(output.stdout, b"[]\n");
}

#[test]
fn status_and_down_fail_without_a_tunnel() {
    for verb in ["status", "down"] {
        let output = without_instances(&[verb, "nothere0"]);
        assert_eq!(output.status.code(), Some(1), "{verb}");
        assert!(
            stderr(&output).contains("`nothere0` is not running"),
            "{verb}"
        );
    }
}
