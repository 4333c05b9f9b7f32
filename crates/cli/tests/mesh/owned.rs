//! Root in the directory of a coordinator or relay that belongs to another user: it refuses, and
//! names the command to run instead.

use crate::common::{Tunnel, passable_folder, skip, stderr};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// `nobody` (the kernel's overflow user).
const NOBODY: u32 = 65534;
/// A policy in a file that only root can read.
const SECRET: &str = "allow north -> south *\n";

/// The directory of a coordinator that was started once.
struct Mesh {
    folder: tempfile::TempDir,
}

impl Mesh {
    fn new() -> Mesh {
        let mesh = Mesh {
            folder: passable_folder(),
        };
        let mut child = mesh
            .command(&["--listen", "127.0.0.1:0"])
            .spawn()
            .expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}");
        drop(Tunnel { child, stdout });
        fs::write(mesh.secret(), SECRET).expect("written");
        let private = Permissions::from_mode(0o600);
        fs::set_permissions(mesh.secret(), private).expect("set");
        mesh
    }

    /// As [`Mesh::new`], in a directory of `nobody`.
    fn of_nobody() -> Mesh {
        let mesh = Mesh::new();
        mesh.give_to(NOBODY);
        mesh
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("mesh")
    }

    /// A file that only root can read.
    fn secret(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    fn give_to(&self, user: u32) {
        for file in self.files().iter().chain([&self.directory()]) {
            chown(file, Some(user), Some(user)).expect("given away");
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.directory()).expect("a directory");
        files.map(|file| file.expect("a file").path()).collect()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .arg("coordinator")
            .args(words)
            .arg("--dir")
            .arg(self.directory())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("start")
    }

    fn done(&self, words: &[&str]) -> Output {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        output
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        skip("not root");
    }
    is_root
}

#[test]
fn root_runs_no_verb_in_the_directory_of_another_user_and_names_the_command() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::of_nobody();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    listener.set_nonblocking(true).expect("set");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let copy = mesh.folder.path().join("copy.snapshot");
    let (secret, copy) = (mesh.secret(), text(&copy).to_owned());
    let secret = text(&secret);
    // Root must not read a file that the directory names, nor connect to a server that it names.
    let settings = format!(
        "endpoints = [\"{url}\"]\nprefix = \"/mesh\"\nuser = \"me\"\npassword-file = \"{secret}\"\n"
    );
    fs::write(mesh.directory().join("etcd.toml"), settings).expect("written");
    mesh.give_to(NOBODY);
    let import = [
        "import",
        secret,
        "--etcd",
        &url,
        "--etcd-user",
        "me",
        "--etcd-password-file",
        secret,
    ];
    let verbs: &[&[&str]] = &[
        &["--listen", "127.0.0.1:0"],
        &["token"],
        &["tokens"],
        &["withdraw", "1"],
        &["members"],
        &["revoke", "a"],
        &["relays"],
        &["relay", "add", "r.example:1", "--turn", "--secret", "x"],
        &["relay", "remove", "r.example:1"],
        &["tag", "a", "b"],
        &["policy", "set", secret],
        &["policy", "show"],
        &["policy", "explain", "a", "b", "icmp"],
        &["audit"],
        &["export", &copy],
        &import,
    ];
    for words in verbs {
        let output = mesh.run(words);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let shown = words.join(" ").replace("--secret x", "--secret ...");
        let command = format!("coordinator {shown} --dir {}", text(&mesh.directory()));
        assert!(
            error.contains("sudo -u nobody ") && error.contains(&command),
            "{words:?}: {error}"
        );
        assert!(!error.contains("north") && output.stdout.is_empty());
        let connection = listener.accept().map_err(|error| error.kind());
        assert_eq!(connection.err(), Some(ErrorKind::WouldBlock), "{words:?}");
    }
    assert!(!Path::new(&copy).exists());
}

#[test]
fn the_command_for_a_user_without_a_name_is_of_setpriv() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    mesh.give_to(3_999_999_999);
    let error = stderr(&mesh.run(&["token"]));
    let command = "run: sudo setpriv --reuid 3999999999 --regid 3999999999 --clear-groups ";
    assert!(error.contains(command), "{error}");
}

#[test]
fn root_reads_no_secret_through_a_link_in_the_directory_of_a_relay() {
    if !is_root() {
        return;
    }
    let folder = passable_folder();
    let (of_root, of_nobody) = (folder.path().join("root"), folder.path().join("relay"));
    let run = |words: &[&str], directory: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.arg("relay").args(words).arg("--dir").arg(directory);
        command.stdin(Stdio::null()).output().expect("start")
    };
    let secret = ["secret", "--host", "relay.example.org"];
    assert!(run(&secret, &of_root).status.success());
    fs::create_dir(&of_nobody).expect("made");
    symlink(of_root.join("secret"), of_nobody.join("secret")).expect("a link");
    chown(&of_nobody, Some(NOBODY), Some(NOBODY)).expect("given away");
    for words in [&secret[..], &["--listen", "127.0.0.1:0"]] {
        let output = run(words, &of_nobody);
        let error = stderr(&output);
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(error.contains("sudo -u nobody "), "{error}");
    }
}

/// If root runs a verb in the directory of a coordinator that root started, the verb runs as the
/// daemons' user.
#[test]
fn verbs_of_root_follow_no_link_of_the_daemon_and_leave_it_its_files() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    let owner = fs::metadata(mesh.directory()).expect("a directory").uid();
    assert_ne!(owner, 0);
    mesh.done(&["token", "--reusable"]);
    // Files on the command line are root's to read and write.
    mesh.done(&["policy", "set", text(&mesh.secret())]);
    let shown = mesh.done(&["policy", "show"]);
    assert_eq!(String::from_utf8_lossy(&shown.stdout), SECRET);
    let copy = mesh.folder.path().join("copy.db");
    mesh.done(&["export", text(&copy)]);
    let metadata = fs::metadata(&copy).expect("a file");
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (0, 0o600));
    let again = mesh.run(&["export", text(&copy)]);
    assert!(!again.status.success(), "it exists");
    assert_eq!(fs::metadata(&copy).expect("a file").len(), metadata.len());
    for file in mesh.files() {
        let metadata = fs::metadata(&file).expect("a file");
        assert_eq!(metadata.uid(), owner, "{}", file.display());
    }

    let moved = mesh.folder.path().join("moved");
    fs::rename(mesh.directory().join("mesh.db"), &moved).expect("renamed");
    chown(&moved, Some(0), Some(0)).expect("root's");
    let before = fs::read(&moved).expect("a file");
    symlink(&moved, mesh.directory().join("mesh.db")).expect("a link");
    assert!(!mesh.run(&["token"]).status.success());
    assert_eq!(fs::read(&moved).expect("a file"), before);
    assert!(!moved.with_extension("db-wal").exists());
}

#[test]
fn an_error_about_etcd_settings_has_no_control_characters() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    let lines = "endpoints = [\"\\u001b[2J://x\"]\nprefix = \"/mesh\"\n";
    fs::write(mesh.directory().join("etcd.toml"), lines).expect("written");
    let owner = fs::metadata(mesh.directory()).expect("a directory").uid();
    mesh.give_to(owner);
    let output = mesh.run(&["members"]);
    let error = stderr(&output);
    assert!(!output.status.success());
    assert!(error.contains("[2J://x"), "{error}");
    assert!(!error.contains('\u{1b}'), "{error:?}");
}

#[test]
fn a_policy_is_shown_without_control_characters_and_written_to_a_file_unchanged() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    let rules = "# \u{1b}[2Jhidden\nallow *\t-> * *\n";
    fs::write(mesh.secret(), rules).expect("written");
    mesh.done(&["policy", "set", text(&mesh.secret())]);
    let shown = mesh.done(&["policy", "show"]);
    assert_eq!(String::from_utf8_lossy(&shown.stdout), rules);
    // script(1), of bsdutils, which every Debian has, makes a terminal.
    let line = format!(
        "{} coordinator policy show --dir {}",
        env!("CARGO_BIN_EXE_seikan"),
        text(&mesh.directory())
    );
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    let output = script.stdin(Stdio::null()).output().expect("start");
    let screen = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{screen}");
    assert!(
        screen.contains("[2Jhidden") && screen.contains("allow *\t-> * *"),
        "{screen:?}"
    );
    assert!(!screen.contains('\u{1b}'), "{screen:?}");
}

#[test]
fn a_relative_directory_is_found_and_a_missing_one_is_not_made() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    let verb = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.arg("coordinator").args(words);
        command.current_dir(mesh.folder.path());
        command.stdin(Stdio::null()).output().expect("start")
    };
    let output = verb(&["token", "--dir", "mesh"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let output = verb(&["token", "--dir", "nowhere"]);
    let error = stderr(&output);
    assert!(
        !output.status.success() && error.contains("cannot find the directory nowhere"),
        "{error}"
    );
    assert!(!mesh.folder.path().join("nowhere").exists());
}

#[test]
fn a_token_before_the_coordinator_has_listened_warns_that_the_pin_is_missing() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    let warns = || {
        let output = mesh.run(&["token"]);
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output).contains("has not listened yet")
    };
    assert!(!warns());
    // As on its first start, between the database and the certificate.
    fs::remove_file(mesh.directory().join("listens")).expect("removed");
    assert!(warns());
}

#[test]
fn root_uses_no_directory_that_others_can_change() {
    if !is_root() {
        return;
    }
    let mesh = Mesh::new();
    mesh.give_to(0);
    let everybody = Permissions::from_mode(0o777);
    fs::set_permissions(mesh.directory(), everybody).expect("set");
    for words in [&["token"][..], &["--listen", "127.0.0.1:0"]] {
        let output = mesh.run(words);
        let error = stderr(&output);
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{words:?}"
        );
        assert!(
            error.contains("can be changed by others"),
            "{words:?}: {error}"
        );
    }
}
