//! A coordinator whose etcd requires a certificate and a user.

use crate::common::{Tunnel, passable_folder, skip, stderr};
use seikan_lab::etcd::Cluster;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// One member of etcd that requires certificates, with authentication tokens that expire after two
/// seconds.
struct Guarded {
    folder: tempfile::TempDir,
    url: String,
    running: Child,
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.running.kill();
        let _ = self.running.wait();
    }
}

impl Guarded {
    fn start() -> Guarded {
        let folder = passable_folder();
        for name in ["server", "client"] {
            let key = rcgen::KeyPair::generate().expect("a key");
            let names = vec!["127.0.0.1".to_owned()];
            let parameters = rcgen::CertificateParams::new(names).expect("parameters");
            let certificate = parameters.self_signed(&key).expect("a certificate");
            let write =
                |end: &str, text| fs::write(folder.path().join(name.to_owned() + end), text);
            write(".pem", certificate.pem()).expect("written");
            write(".key", key.serialize_pem()).expect("written");
        }
        fs::write(folder.path().join("jwt"), "a key that signs tokens").expect("written");
        let port = || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            listener.local_addr().expect("an address").port()
        };
        let url = format!("https://127.0.0.1:{}", port());
        let peer = format!("http://127.0.0.1:{}", port());
        let file = |name: &str| folder.path().join(name).display().to_string();
        let tokens = format!("jwt,sign-method=HS256,ttl=2s,priv-key={}", file("jwt"));
        let running = Command::new("etcd")
            .args(["--data-dir", &file("data"), "--client-cert-auth"])
            .args([
                "--listen-client-urls",
                &url,
                "--advertise-client-urls",
                &url,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("default={peer}")])
            .args([
                "--cert-file",
                &file("server.pem"),
                "--key-file",
                &file("server.key"),
            ])
            .args([
                "--trusted-ca-file",
                &file("client.pem"),
                "--auth-token",
                &tokens,
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let guarded = Guarded {
            running: running.expect("started"),
            folder,
            url,
        };
        let until = Instant::now() + Duration::from_secs(10);
        while !guarded.ctl("", &["endpoint", "health"]).status.success() {
            assert!(Instant::now() < until, "etcd does not start");
        }
        guarded
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs etcdctl, as `user:password` if given.
    fn ctl(&self, user: &str, words: &[&str]) -> Output {
        let mut command = Command::new("etcdctl");
        command
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url, "--cacert"])
            .arg(self.file("server.pem"))
            .arg("--cert")
            .arg(self.file("client.pem"))
            .arg("--key")
            .arg(self.file("client.key"));
        if !user.is_empty() {
            command.args(["--user", user]);
        }
        command.args(words).output().expect("start")
    }

    fn set(&self, user: &str, words: &[&str]) {
        let output = self.ctl(user, words);
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    }

    /// Returns a coordinator as `user`, whose password is in the file of that name, with its keys
    /// under a prefix.
    fn coordinator(&self, user: Option<&str>, prefix: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
            .arg(self.coordinator_folder(user, prefix))
            .args(["--etcd", &self.url, "--etcd-prefix", prefix, "--etcd-ca"])
            .arg(self.file("server.pem"))
            .arg("--etcd-cert")
            .arg(self.file("client.pem"))
            .arg("--etcd-key")
            .arg(self.file("client.key"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(user) = user {
            command.args(["--etcd-user", user, "--etcd-password-file"]);
            command.arg(self.file(user));
        }
        command
    }

    fn coordinator_folder(&self, user: Option<&str>, prefix: &str) -> PathBuf {
        self.file(&format!(
            "as-{}{}",
            user.unwrap_or("nobody"),
            prefix.replace('/', "-")
        ))
    }
}

fn verb(folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
    command
        .arg("coordinator")
        .args(words)
        .arg("--dir")
        .arg(folder);
    command.output().expect("start")
}

#[test]
fn a_coordinator_is_a_user_of_etcd_with_a_certificate_and_goes_on_when_its_token_expires() {
    if !Cluster::is_possible() {
        return skip("no etcd (Debian: etcd-server)");
    }
    let etcd = Guarded::start();
    let root = "root:north";
    etcd.set("", &["user", "add", root]);
    etcd.set("", &["user", "grant-role", "root", "root"]);
    etcd.set("", &["user", "add", "seikan:south"]);
    etcd.set("", &["role", "add", "mesh"]);
    let all = [
        "role",
        "grant-permission",
        "--prefix",
        "mesh",
        "readwrite",
        "/mesh/",
    ];
    etcd.set("", &all);
    etcd.set("", &["user", "grant-role", "seikan", "mesh"]);
    etcd.set("", &["auth", "enable"]);
    fs::write(etcd.file("seikan"), "south\n").expect("written");
    fs::write(etcd.file("root"), "a wrong password").expect("written");

    let mut child = etcd
        .coordinator(Some("seikan"), "/mesh")
        .spawn()
        .expect("start");
    let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("read");
    assert!(line.contains("listens"), "{line}");
    let _coordinator = Tunnel { child, stdout };

    // The settings for the verbs are stored, without the password.
    let folder = etcd.coordinator_folder(Some("seikan"), "/mesh");
    let made = verb(&folder, &["token", "--reusable"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let noted = fs::read_to_string(folder.join("etcd.toml")).expect("a file");
    assert!(
        noted.contains("user = \"seikan\"") && !noted.contains("south"),
        "{noted}"
    );

    let words = String::from_utf8_lossy(&made.stdout).into_owned();
    let after = |option: &str| {
        let mut words = words.split_whitespace();
        words.find(|word| *word == option);
        words.next().expect("a word").to_owned()
    };
    let at = line
        .split([' ', ','])
        .skip_while(|word| *word != "on")
        .nth(1);
    let url = format!("https://{}", at.expect("an address"))
        .parse()
        .expect("a URL");
    let pin = after("--pin").parse().expect("a pin");
    let client = seikan_mesh::client::Client::new(&url, Some(pin), None, Default::default())
        .expect("a client");
    let join = |name: &str| {
        use seikan_node::system::SystemRandom;
        let request = seikan_proto::mesh::JoinRequest {
            token: after("--token").parse().expect("a token"),
            name: name.parse().expect("a name"),
            public_key: seikan_proto::keys::PrivateKey::generate(&mut SystemRandom).public(),
            credential: seikan_proto::mesh::Credential::generate(&mut SystemRandom),
        };
        seikan_mesh::client::wait_for(client.join(&request)).expect(name);
    };
    join("first");
    // The coordinator's token has expired.
    std::thread::sleep(Duration::from_secs(3));
    join("second");
    // Tokens from before the change of users are invalid too.
    etcd.set(
        root,
        &["role", "grant-permission", "mesh", "read", "/elsewhere"],
    );
    join("third");
    let members = verb(&folder, &["members", "--json"]);
    let members: Vec<serde_json::Value> = serde_json::from_slice(&members.stdout).expect("JSON");
    assert_eq!(members.len(), 3);

    for (user, prefix, why) in [
        (Some("root"), "/mesh", "authentication failed"),
        (Some("seikan"), "/other", "permission denied"),
        // Then its user is the name in its certificate, which etcd does not know.
        (None, "/mesh", "permission denied"),
    ] {
        let refused = etcd.coordinator(user, prefix).output().expect("start");
        let said = stderr(&refused);
        assert!(
            !refused.status.success() && said.contains(why),
            "{user:?} {prefix}: {said}"
        );
        assert!(
            !said.contains("wrong password") && !said.contains("south"),
            "{said}"
        );
    }
}

#[test]
fn a_coordinator_reads_the_certificates_that_the_environment_names_for_etcd() {
    if !Cluster::is_possible() {
        return skip("no etcd (Debian: etcd-server)");
    }
    let etcd = Guarded::start();
    let trusted = etcd.file("trusted");
    fs::create_dir(&trusted).expect("a folder");
    fs::copy(etcd.file("server.pem"), trusted.join("etcd.pem")).expect("copied");
    for (name, value) in [
        ("SSL_CERT_FILE", etcd.file("server.pem")),
        ("SSL_CERT_DIR", trusted),
    ] {
        let folder = etcd.file(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_seikan"));
        command
            .args(["coordinator", "--listen", "127.0.0.1:0", "--dir"])
            .arg(folder)
            .args(["--etcd", &etcd.url, "--etcd-prefix", name, "--etcd-cert"])
            .arg(etcd.file("client.pem"))
            .arg("--etcd-key")
            .arg(etcd.file("client.key"))
            .env_remove("SSL_CERT_FILE")
            .env_remove("SSL_CERT_DIR")
            .env(name, value)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("start");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        stdout.read_line(&mut line).expect("read");
        if !line.contains("listens") {
            let ended = child.wait_with_output().expect("an end");
            panic!("{name}: {line}{}", stderr(&ended));
        }
        drop(Tunnel { child, stdout });
    }
}
