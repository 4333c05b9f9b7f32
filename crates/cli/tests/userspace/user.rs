//! A user without privileges, who runs the program.

use crate::common::{Host, Tunnel, World, in_world, passable_folder, stderr};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use seikan_sys::netns::NetNs;

/// User and group of `nobody`.
pub const NOBODY: u32 = 65534;
/// Runs the rest of the line as a user without privileges, where there is no TUN driver.
const WITHOUT_RIGHTS: &str = r#"mount -t tmpfs tmpfs /dev/net || exit 125
exec setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups --inh-caps=-all --bounding-set=-all \
    --no-new-privs -- "$@""#;

/// A user with a home directory, and a copy of the program that this user may execute.
pub struct User {
    pub folder: tempfile::TempDir,
    id: u32,
    program: PathBuf,
    /// Whether the user's session has a directory.
    has_session: bool,
}

impl User {
    pub fn new(id: u32) -> User {
        let folder = passable_folder();
        let program = folder.path().join("seikan");
        let binary = env!("CARGO_BIN_EXE_seikan");
        // Other users may not reach the directory of the build.
        fs::hard_link(binary, &program)
            .or_else(|_| fs::copy(binary, &program).map(drop))
            .expect("the program");
        for name in ["home", "session"] {
            let folder = folder.path().join(name);
            fs::create_dir(&folder).expect("a folder");
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("set");
            chown(&folder, Some(id), Some(id)).expect("given");
        }
        User {
            folder,
            id,
            program,
            has_session: true,
        }
    }

    /// A user whose session has no directory for sockets, as one of `su` or cron.
    pub fn without_session(id: u32) -> User {
        let mut user = User::new(id);
        user.has_session = false;
        user
    }

    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// Directory of the sockets of the user's tunnels.
    pub fn run_dir(&self) -> PathBuf {
        if self.has_session {
            self.folder.path().join("session/seikan")
        } else {
            format!("/tmp/seikan-{}", self.id).into()
        }
    }

    /// Gives a file to the user.
    pub fn give(&self, file: &Path) {
        chown(file, Some(self.id), Some(self.id)).expect("given");
        let parent = file.parent().expect("a folder");
        fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).expect("set");
    }

    pub fn command(&self, words: &[&str]) -> Command {
        self.command_of(&self.program, words)
    }

    /// A command of another program that the user may execute.
    pub fn command_of(&self, program: &Path, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", WITHOUT_RIGHTS, "sh"])
            .arg(program)
            .args(words)
            .current_dir(self.home())
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("USER_ID", self.id.to_string())
            .env("HOME", self.home())
            .env("SEIKAN_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if self.has_session {
            command.env("XDG_RUNTIME_DIR", self.folder.path().join("session"));
        }
        command
    }

    pub fn run(&self, at: &NetNs, words: &[&str]) -> Output {
        let child = at.spawn_command(&mut self.command(words));
        child.expect("start").wait_with_output().expect("an end")
    }

    /// Runs a command that succeeds; returns its output.
    pub fn succeed(&self, at: &NetNs, words: &[&str]) -> String {
        let output = self.run(at, words);
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Starts a tunnel without root and waits until it is up. Returns its line as well.
    pub fn up(&self, host: &Host, words: &[&str]) -> (Tunnel, String) {
        self.give(&host.config);
        let words = [&["up", host.config(), "--userspace"], words].concat();
        let child = host.namespace.spawn_command(&mut self.command(&words));
        let mut child = child.expect("start");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut tunnel = Tunnel { child, stdout };
        let mut line = String::new();
        tunnel.stdout.read_line(&mut line).expect("read");
        if !line.starts_with(&format!("{} is up", host.interface)) {
            let mut errors = String::new();
            let stderr = tunnel.child.stderr.as_mut().expect("piped");
            stderr.read_to_string(&mut errors).expect("read");
            panic!("not up: {line:?}: {errors}");
        }
        (tunnel, line)
    }

    pub fn status(&self, at: &NetNs, interface: &str) -> Value {
        let printed = self.succeed(at, &["status", interface, "--json"]);
        crate::schema::printed("status", printed.as_bytes())
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // A failed test leaves its tunnels in the background.
        if std::thread::panicking() {
            let files = fs::read_dir(self.run_dir()).into_iter().flatten().flatten();
            let paths = files.map(|file| file.path());
            for lock in paths.filter(|path| path.extension().is_some_and(|ending| ending == "lock"))
            {
                let process = fs::read_to_string(lock).unwrap_or_default();
                let _ = Command::new("kill").arg(process.trim()).status();
            }
        }
    }
}

/// Two hosts, the left one with a tunnel of `nobody` with these options, and the right one with an
/// interface. All packets of the left tunnel are accounted for in the end.
pub fn with_tunnels(words: &[&str], test: impl Fn(&World, &User)) {
    for protocol in ["wireguard", "native"] {
        in_world(["", ""], |world| {
            let user = User::new(NOBODY);
            let protocol = ["--protocol", protocol];
            let _right = world.up_with(&world.right, &protocol);
            let (_left, _) = user.up(&world.left, &[&protocol, words].concat());
            test(world, &user);
            let status = user.status(&world.left.namespace, &world.left.interface);
            assert_eq!(crate::common::unaccounted(&status), [0, 0], "{status:#}");
        });
    }
}
