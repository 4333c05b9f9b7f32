//! A user without root gets the command that has the rights.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use crate::common::{World, in_world};

/// User and group of `nobody`.
const NOBODY: u32 = 65534;

/// Runs the program as `nobody` on the left. Returns whether it succeeded, and its standard error.
fn as_nobody(world: &World, words: &[&str]) -> (bool, String) {
    let program = world.folder.path().join("seikan");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.arg(&program).args(words);
    for name in ["XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"] {
        command.env_remove(name);
    }
    world.settle(&mut command);
    let (code, errors) = world.start(&world.left, &mut command).ended();
    (code == Some(0), errors)
}

/// Lets everybody pass the world's folder and run a copy of the program in it.
fn open(world: &World) {
    let program = world.folder.path().join("seikan");
    // Other users may not reach the directory of the build.
    fs::copy(env!("CARGO_BIN_EXE_seikan"), &program).expect("copy");
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(world.folder.path(), mode).expect("mode");
}

/// Writes a file that only its owner may read, and returns its path.
fn file(world: &World, name: &str, text: &str, owner: u32) -> PathBuf {
    let path = world.folder.path().join(name);
    fs::write(&path, text).expect("write");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
    chown(&path, Some(owner), Some(owner)).expect("given");
    path
}

#[test]
fn errors_of_missing_rights_name_the_command_with_sudo() {
    in_world(["", ""], |world| {
        open(world);
        let _left = world.up(&world.left);
        let text = fs::read_to_string(world.left.config()).expect("read");
        let key = text
            .lines()
            .find_map(|line| line.strip_prefix("PrivateKey = "));
        let key = file(world, "root.key", key.expect("a key"), 0);
        let key_line = format!("PrivateKeyFile = {}", key.display());
        let with_key_file = text.replacen("PrivateKey = ", "# ", 1);
        let with_key_file =
            with_key_file.replacen("[Interface]", &format!("[Interface]\n{key_line}"), 1);
        let with_key_file = file(world, "keyed.conf", &with_key_file, NOBODY);
        let readable = file(world, "mine.conf", &text, NOBODY);
        let closed = world.folder.path().join("closed");
        fs::create_dir(&closed).expect("a folder");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).expect("mode");
        let in_closed = closed.join("mesh.toml");
        let token = format!("skt_{}", "A".repeat(32));
        let [closed, in_closed, with_key_file, readable] =
            [&closed, &in_closed, &with_key_file, &readable].map(|path| path.to_str().unwrap());
        let (config, name) = (world.left.config(), world.left.interface.as_str());
        for words in [
            &["up", config][..],
            &["up", "-d", config],
            &["up", with_key_file],
            &["up", readable],
            &["up", "-d", readable],
            &["check", config],
            &["reload", config],
            &["leave", config],
            &["rotate-key", config],
            &["status"],
            &["status", name],
            &["down", name],
            &["ping", "10.80.0.2", "--iface", name, "-c", "1"],
            &["netcheck", name],
            &["join", "https://192.0.2.9:1", "--iface", in_closed],
            &["coordinator", "token", "--dir", closed],
            &["coordinator", "policy", "show", "--dir", closed],
            &["relay", "secret", "--dir", closed],
        ] {
            let (mut words, mut shown) = (words.to_vec(), words.join(" "));
            if words[0] == "join" {
                words.extend(["--token", &token]);
                shown.push_str(" --token ...");
            }
            let (is_done, errors) = as_nobody(world, &words);
            let program = world.folder.path().join("seikan");
            // The tests set variables, which sudo would remove.
            let command = format!(" {} {shown}`", program.display());
            assert!(!is_done, "{words:?}: {errors}");
            for advice in ["needs root: run `sudo --preserve-env=", &command] {
                let count = errors.matches(advice).count();
                assert_eq!(count, 1, "{words:?}: {errors}");
            }
            assert!(!errors.contains(&token), "{words:?}: {errors}");
        }
        // The tunnel runs on, and another error gets no such advice.
        assert!(world.left.has_tunnel());
        let (_, errors) = as_nobody(world, &["check", "/nonexistent/wg0.conf"]);
        assert!(!errors.contains("sudo"), "{errors}");
    });
}

#[test]
fn up_without_root_names_the_tunnel_without_root() {
    in_world(["", ""], |world| {
        open(world);
        let text = fs::read_to_string(world.left.config()).expect("read");
        let readable = file(world, "mine.conf", &text, NOBODY);
        for words in [&["up"][..], &["up", "-d"]] {
            let words = [words, &[readable.to_str().unwrap()]].concat();
            let (_, errors) = as_nobody(world, &words);
            assert!(errors.contains("--userspace"), "{words:?}: {errors}");
        }
    });
}
