//! What root does in the folder of a coordinator that is another user, and may have been taken over.

use crate::common::{Tunnel, skip, stderr};
use seikan_lab::etcd::Cluster;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// `nobody` (the kernel's overflow user).
const NOBODY: u32 = 65534;
/// What root alone may read.
const SECRET: &str = "allow north -> south *\n";

/// A mesh in a folder of that user, behind one that it cannot pass, as with `DynamicUser=`.
struct Owned {
    folder: tempfile::TempDir,
}

impl Owned {
    fn new() -> Owned {
        let owned = Owned {
            folder: tempfile::tempdir().expect("a folder"),
        };
        let mut child = owned
            .command(&["--listen", "127.0.0.1:0"])
            .spawn()
            .expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        assert!(line.contains("listens"), "{line}");
        drop(Tunnel { child, stdout });
        fs::write(owned.secret(), SECRET).expect("written");
        let private = Permissions::from_mode(0o600);
        fs::set_permissions(owned.secret(), private).expect("set");
        owned.give_away();
        owned
    }

    /// Where the mesh is.
    fn store(&self) -> PathBuf {
        self.folder.path().join("mesh")
    }

    /// A file that root alone may read.
    fn secret(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    fn give_away(&self) {
        for file in self.files().iter().chain([&self.store()]) {
            chown(file, Some(NOBODY), Some(NOBODY)).expect("given away");
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.store()).expect("a folder");
        files.map(|file| file.expect("a file").path()).collect()
    }

    /// Every file there is that user's.
    fn is_its_own(&self) {
        for file in self.files() {
            let of = fs::metadata(&file).expect("a file");
            let both = (of.uid(), of.gid());
            assert_eq!(both, (NOBODY, NOBODY), "{}", file.display());
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .arg("coordinator")
            .args(words)
            .arg("--dir")
            .arg(self.store())
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
fn what_a_coordinator_notes_has_root_read_and_send_nothing_that_is_roots() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    listener.set_nonblocking(true).expect("set");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (secret, copy) = (owned.secret(), owned.folder.path().join("copy.db"));
    let (secret, copy) = (text(&secret), text(&copy));
    let noted = owned.store().join("etcd.toml");
    let lines = format!(
        "endpoints = [\"{url}\"]\nprefix = \"/mesh\"\nuser = \"me\"\npassword-file = \"{secret}\"\n"
    );
    fs::write(&noted, lines).expect("written");
    owned.give_away();
    let verbs: &[&[&str]] = &[
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
        &["export", copy],
    ];
    let import = [
        "import",
        "--etcd",
        &url,
        "--etcd-user",
        "me",
        "--etcd-password-file",
        secret,
    ];
    let refused = |words: &[&str]| {
        let output = owned.run(words);
        let said = stderr(&output);
        assert!(!output.status.success(), "{words:?}");
        let why = format!("cannot read {secret}: Permission denied");
        assert!(
            said.contains(&why) && said.contains("as user 65534"),
            "{words:?}: {said}"
        );
        assert!(!said.contains("north") && output.stdout.is_empty());
        let asked = listener.accept().map_err(|error| error.kind());
        assert_eq!(asked.err(), Some(ErrorKind::WouldBlock), "{words:?}");
    };
    for words in verbs {
        refused(words);
    }
    fs::remove_file(noted).expect("gone");
    refused(&import);
}

#[test]
fn what_a_coordinator_notes_moves_no_cursor_in_the_error_about_it() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    let lines = "endpoints = [\"\\u001b[2J://x\"]\nprefix = \"/mesh\"\n";
    fs::write(owned.store().join("etcd.toml"), lines).expect("written");
    owned.give_away();
    let output = owned.run(&["members"]);
    let said = stderr(&output);
    assert!(!output.status.success());
    assert!(said.contains("[2J://x"), "{said}");
    assert!(!said.contains('\u{1b}'), "{said:?}");
}

#[test]
fn a_policy_moves_no_cursor_and_a_file_gets_it_as_it_was_written() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    let rules = "# \u{1b}[2Jhidden\nallow *\t-> * *\n";
    fs::write(owned.secret(), rules).expect("written");
    owned.done(&["policy", "set", text(&owned.secret())]);
    let shown = owned.done(&["policy", "show"]);
    assert_eq!(String::from_utf8_lossy(&shown.stdout), rules);
    // script(1), of bsdutils, which every Debian has, makes a terminal.
    let line = format!(
        "{} coordinator policy show --dir {}",
        env!("CARGO_BIN_EXE_seikan"),
        text(&owned.store())
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
fn what_a_coordinator_links_to_is_not_written_by_root() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    let away = owned.folder.path().join("away");
    fs::rename(owned.store().join("mesh.db"), &away).expect("renamed");
    let before = fs::read(&away).expect("a file");
    symlink(&away, owned.store().join("mesh.db")).expect("a link");
    let output = owned.run(&["token"]);
    assert!(!output.status.success());
    assert_eq!(fs::read(&away).expect("a file"), before);
    assert!(!away.with_extension("db-wal").exists());
}

#[test]
fn what_a_relay_links_to_is_not_read_by_root_nor_printed_as_its_secret() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (of_root, of_nobody) = (folder.path().join("root"), folder.path().join("relay"));
    let run = |words: &[&str], dir: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.arg("relay").args(words).arg("--dir").arg(dir);
        command.stdin(Stdio::null()).output().expect("start")
    };
    let secret = ["secret", "--host", "relay.example.org"];
    assert!(run(&secret, &of_root).status.success());
    fs::create_dir(&of_nobody).expect("made");
    symlink(of_root.join("secret"), of_nobody.join("secret")).expect("a link");
    // As long as it is root's own, root trusts it.
    assert!(run(&secret, &of_nobody).status.success());
    chown(&of_nobody, Some(NOBODY), Some(NOBODY)).expect("given away");
    let output = run(&secret, &of_nobody);
    assert!(!output.status.success());
    assert!(output.stdout.is_empty());
    let said = stderr(&output);
    assert!(said.contains("Permission denied"), "{said}");
    assert!(said.contains("as user 65534"), "{said}");
    // The service is that user, too.
    let output = run(&["--listen", "127.0.0.1:0"], &of_nobody);
    assert!(!output.status.success());
    let said = stderr(&output);
    assert!(said.contains("Permission denied"), "{said}");
}

#[test]
fn verbs_work_in_a_folder_that_is_named_from_where_root_is_and_in_none_that_is_not_there() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    let verb = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command.arg("coordinator").args(words);
        command.current_dir(owned.folder.path());
        command.stdin(Stdio::null()).output().expect("start")
    };
    let output = verb(&["token", "--dir", "mesh"]);
    assert!(output.status.success(), "{}", stderr(&output));
    owned.is_its_own();
    let output = verb(&["token", "--dir", "nowhere"]);
    let said = stderr(&output);
    assert!(
        !output.status.success() && said.contains("there is no folder nowhere"),
        "{said}"
    );
    assert!(!owned.folder.path().join("nowhere").exists());
}

#[test]
fn root_trusts_no_folder_that_others_can_change() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    chown(owned.store(), Some(0), Some(0)).expect("taken back");
    let everybody = Permissions::from_mode(0o777);
    fs::set_permissions(owned.store(), everybody).expect("set");
    for words in [&["token"][..], &["--listen", "127.0.0.1:0"]] {
        let output = owned.run(words);
        let said = stderr(&output);
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{words:?}"
        );
        assert!(
            said.contains("can be changed by others"),
            "{words:?}: {said}"
        );
    }
}

#[test]
fn verbs_leave_the_coordinator_its_files_and_root_reads_and_writes_what_it_names() {
    if !is_root() {
        return;
    }
    let owned = Owned::new();
    owned.done(&["token", "--reusable"]);
    owned.done(&["policy", "set", text(&owned.secret())]);
    let shown = owned.done(&["policy", "show"]);
    assert_eq!(String::from_utf8_lossy(&shown.stdout), SECRET);
    owned.is_its_own();

    let copy = owned.folder.path().join("copy.db");
    owned.done(&["export", text(&copy)]);
    let of = fs::metadata(&copy).expect("a file");
    assert_eq!((of.uid(), of.mode() & 0o777), (0, 0o600));
    let again = owned.run(&["export", text(&copy)]);
    assert!(!again.status.success(), "it is there");
    assert_eq!(fs::metadata(&copy).expect("a file").len(), of.len());
    // For the service to go on with.
    let back = owned.store().join("back.db");
    owned.done(&["export", text(&back)]);
    owned.is_its_own();
}

#[test]
fn what_an_import_leaves_is_the_coordinators() {
    if !is_root() {
        return;
    }
    if !Cluster::is_possible() {
        return skip("no etcd (Debian: etcd-server)");
    }
    let owned = Owned::new();
    let cluster = Cluster::start(None).expect("a cluster");
    let urls = cluster.endpoints().join(",");
    owned.done(&["import", "--etcd", &urls]);
    for name in ["etcd.toml", "mesh.db.moved"] {
        assert!(owned.store().join(name).exists(), "{name}");
    }
    owned.done(&["members"]);
    owned.is_its_own();
}
