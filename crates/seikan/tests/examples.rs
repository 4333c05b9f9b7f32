//! The example of the guide: it is what is compiled, and runs as it stands.

use crate::pair::{Hosts, PATIENCE, runtime, skip};
use seikan::Tunnel;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const NOBODY: u32 = 65534;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The binary of an example, built with this test.
fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this binary");
    let folder = test.parent().and_then(Path::parent).expect("the build");
    folder.join("examples").join(name)
}

#[test]
fn the_guide_shows_the_example_that_is_compiled() {
    let page = fs::read_to_string(project().join("docs/guides/library.md")).expect("the page");
    let code = include_str!("../examples/fetch.rs");
    assert!(
        page.contains(&format!("```rust,no_run\n{code}```\n")),
        "the example differs"
    );
    let lines = code.lines().filter(|line| !line.trim().is_empty());
    assert!(lines.count() <= 30);
}

#[test]
fn it_runs_without_privileges() {
    let hosts = match Hosts::create() {
        Ok(hosts) => hosts,
        Err(reason) => return skip(&reason),
    };
    let (folder, program) = (tempfile::tempdir().expect("a folder"), binary("fetch"));
    let text = configs_as_text();
    let file = folder.path().join("work.toml");
    fs::write(&file, text.left).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("set");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("set");
    chown(&file, Some(NOBODY), Some(NOBODY)).expect("given");
    // Other users may not reach the directory of the build.
    let copy = folder.path().join("fetch");
    fs::copy(&program, &copy).expect("the example");
    let (ready, wait) = std::sync::mpsc::channel();
    let server = hosts.right.spawn_thread("server", move || {
        runtime().block_on(async {
            let config = seikan::Config::from_toml(&text.right).expect("a configuration");
            let tunnel = Tunnel::connect(config).await.expect("a tunnel");
            let mut listener = tunnel.tcp_listen(8000).await.expect("a port");
            ready.send(()).expect("awaited");
            let accepted = tokio::time::timeout(PATIENCE, listener.accept()).await;
            let mut stream = accepted.expect("in time").expect("accepted");
            stream.read_exact(&mut [0; 18]).await.expect("a request");
            stream
                .write_all(b"hello from the office\n")
                .await
                .expect("sent");
            drop(stream);
            tunnel.close().await;
        });
    });
    wait.recv().expect("listens");
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .args([
            "--inh-caps=-all",
            "--bounding-set=-all",
            "--no-new-privs",
            "--",
        ])
        .arg(&copy)
        .arg(&file)
        .arg("office:8000")
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = hosts.left.spawn_command(&mut command).expect("started");
    let output = child.wait_with_output().expect("an end");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "hello from the office\n"
    );
    server.expect("a thread").join().expect("no panic");
}

/// The configurations of the guide, with new keys.
struct Texts {
    left: String,
    right: String,
}

fn configs_as_text() -> Texts {
    let keys = [(); 2]
        .map(|()| seikan_config::PrivateKey::generate(&mut seikan_node::system::SystemRandom));
    let base64 = |bytes: &[u8; 32]| seikan_config::encode_key(bytes).to_string();
    let [left, right] = keys.each_ref().map(|key| base64(key.as_bytes()));
    let [left_public, right_public] = keys.each_ref().map(|key| base64(key.public().as_bytes()));
    Texts {
        left: format!(
            "private-key = \"{left}\"\naddress = \"10.9.0.2/24\"\n[[peer]]\nname = \"office\"\n\
             public-key = \"{right_public}\"\nallowed-ips = \"10.9.0.1/32\"\nendpoint = \"192.0.2.2:51820\"\n"
        ),
        right: format!(
            "private-key = \"{right}\"\naddress = \"10.9.0.1/24\"\nlisten-port = 51820\n[[peer]]\nname = \"laptop\"\n\
             public-key = \"{left_public}\"\nallowed-ips = \"10.9.0.2/32\"\n"
        ),
    }
}
