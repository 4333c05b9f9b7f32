//! A mesh in the lab: a coordinator, relays and members, each the program as anybody would run it,
//! inside a host.
//!
//! Members leave the machine's `resolv.conf` alone (`names = false`): hosts here have networks of
//! their own, but no files.

use std::fs::{self, Permissions};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ipnet::IpNet;
use seikan_ui::Interrupt;
use serde_json::Value;

use crate::error::{Doing, Result, setup};
use crate::process::{Process, wait_for};
use crate::program;
use crate::site::Host;
use crate::tunnel::seikan::RUN_DIR;
use crate::tunnel::wireguard;

/// Maximum time until a program has started.
const PATIENCE: Duration = Duration::from_secs(60);

/// Common parts of a mesh: the folder of its files, and the coordinator's address.
pub(crate) struct Mesh {
    folder: PathBuf,
    coordinator: SocketAddr,
    /// Join token without limits.
    pub(crate) token: String,
    /// Pin of the coordinator's certificate.
    pub(crate) pin: String,
}

/// A host that has joined.
pub(crate) struct Member {
    pub(crate) host: Host,
    folder: PathBuf,
    /// Its interface.
    pub(crate) interface: String,
    /// Its IPv4 address inside of the mesh.
    pub(crate) address: IpAddr,
    /// Its addresses, IPv4 first, with the networks of the mesh.
    pub(crate) networks: Vec<IpNet>,
}

impl Mesh {
    /// Starts a coordinator on `host` and makes a token for everybody.
    pub(crate) fn start(
        host: &Host,
        coordinator: SocketAddr,
        folder: &Path,
        interrupt: &Interrupt,
    ) -> Result<(Mesh, Process)> {
        // The services run as the daemons' user and must be able to enter their directories below
        // it.
        fs::set_permissions(folder, Permissions::from_mode(0o755))
            .doing("open the folder to the services")?;
        let mut mesh = Mesh {
            folder: folder.to_owned(),
            coordinator,
            token: String::new(),
            pin: String::new(),
        };
        let mut process = mesh.start_coordinator(host)?;
        let said = patiently("the coordinator creates a token", interrupt, || {
            process.check_alive()?;
            // Devices behind members need no approval here.
            let said = mesh.administer(host, &["token", "--reusable", "--devices"]);
            let said = said.ok();
            // The coordinator may not have made its certificate yet.
            Ok(said.filter(|said| said.contains("--pin")))
        })?;
        let after = |option: &str| {
            let mut words = said.split_whitespace();
            words.find(|word| *word == option);
            words.next().unwrap_or_default().to_owned()
        };
        (mesh.token, mesh.pin) = (after("--token"), after("--pin"));
        Ok((mesh, process))
    }

    /// Starts the coordinator, or restarts it.
    pub(crate) fn start_coordinator(&self, host: &Host) -> Result<Process> {
        let (store, listen) = (self.path("coordinator"), self.coordinator.to_string());
        let words = ["coordinator", "--dir", &store, "--listen", &listen];
        self.spawn(host, "coordinator", &words, &[])
    }

    /// Starts a relay and adds it to the mesh. It also accepts TLS, at the TCP port of the same
    /// number. `ports` are its ports for pairs, `environment` the variables of its environment.
    pub(crate) fn start_relay(
        &self,
        host: &Host,
        at: SocketAddr,
        ports: &str,
        environment: &[(String, String)],
        interrupt: &Interrupt,
    ) -> Result<Process> {
        let name = format!("relay{}", at.port());
        let (folder, at) = (self.path(&name), at.to_string());
        let words = ["relay", "--dir", &folder, "--listen", &at];
        let rest = ["--tls-listen", &at, "--ports", ports, "--rate", "100G"];
        let mut process = self.spawn(host, &name, &[&words[..], &rest].concat(), environment)?;
        // The relay writes this file last, once it listens. The file has the port and the pin.
        let tls = patiently("the relay listens", interrupt, || {
            process.check_alive()?;
            let noted = fs::read_to_string(format!("{folder}/tls")).ok();
            Ok(noted.filter(|noted| noted.ends_with('\n')))
        })?;
        let secret = fs::read_to_string(format!("{folder}/secret"));
        let secret = secret.doing("read the relay's secret")?;
        let (port, pin) = tls.trim().split_once(' ').unwrap_or_default();
        let words = ["relay", "add", &at, "--secret", secret.trim()];
        self.administer(host, &[&words[..], &["--tls", port, "--pin", pin]].concat())?;
        Ok(process)
    }

    /// Runs a command of the coordinator and returns its output.
    pub(crate) fn administer(&self, host: &Host, words: &[&str]) -> Result<String> {
        let store = self.path("coordinator");
        let words = [&["coordinator"], words, &["--dir", &store]].concat();
        run(host, &self.folder, &words)
    }

    /// Makes a host join under a name; its tunnel is not up yet. The name of the interface must be
    /// unique on the machine.
    pub(crate) fn join(&self, host: &Host, name: &str, interface: &str) -> Result<Member> {
        let (url, file) = (
            format!("https://{}", self.coordinator),
            self.path(&format!("{interface}.toml")),
        );
        let join = ["join", &url, "--token", &self.token, "--pin", &self.pin];
        let rest = ["--name", name, "--iface", &file, "--no-up"];
        run(host, &self.folder, &[&join[..], &rest].concat())?;
        let text = turn_names_off(Path::new(&file))?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("address = "));
        let words = line.unwrap_or_default().split('"');
        let networks: Vec<IpNet> = words.filter_map(|word| word.parse().ok()).collect();
        let address = networks.first().map(IpNet::addr);
        Ok(Member {
            host: host.clone(),
            folder: self.folder.clone(),
            interface: interface.to_owned(),
            address: address.ok_or_else(|| setup(format!("{interface} has no address")))?,
            networks,
        })
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).to_string_lossy().into_owned()
    }

    fn spawn(
        &self,
        host: &Host,
        name: &str,
        words: &[&str],
        environment: &[(String, String)],
    ) -> Result<Process> {
        let mut command = command(&self.folder, words)?;
        command.envs(environment.iter().cloned());
        Process::start(host, name, command, &self.folder)
    }
}

impl Member {
    /// Adds sections to its configuration.
    pub(crate) fn configure(&self, sections: &str) -> Result<()> {
        let mut file = fs::OpenOptions::new();
        let file = file.append(true).open(self.file());
        file.and_then(|mut file| file.write_all(sections.as_bytes()))
            .doing("write a member's configuration")
    }

    fn file(&self) -> PathBuf {
        self.folder.join(format!("{}.toml", self.interface))
    }

    /// Starts its tunnel, with these variables in its environment.
    pub(crate) fn up(&self, environment: &[(String, String)]) -> Result<Process> {
        let file = self.file();
        let mut command = command(&self.folder, &["up", &file.to_string_lossy()])?;
        command.envs(environment.iter().cloned());
        let process = Process::start(&self.host, &self.interface, command, &self.folder)?;
        Ok(process.leaving(wireguard::socket(&self.interface)))
    }

    /// Returns the output of `seikan status --json`.
    pub(crate) fn status(&self) -> Result<Value> {
        let said = run(
            &self.host,
            &self.folder,
            &["status", &self.interface, "--json"],
        )?;
        serde_json::from_str(&said)
            .map_err(|e| setup(format!("cannot parse the output of `seikan status`: {e}")))
    }
}

/// Calls a function until it returns a value, for at most a minute.
pub(crate) fn patiently<T>(
    event: &str,
    interrupt: &Interrupt,
    attempt: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    wait_for(event, PATIENCE, interrupt, attempt)
}

/// Turns the member's changes of `resolv.conf` off in its configuration; returns the configuration
/// before.
fn turn_names_off(file: &Path) -> Result<String> {
    let text = fs::read_to_string(file).doing("read the joined members")?;
    fs::write(file, format!("names = false\n{text}")).doing("write the joined members")?;
    Ok(text)
}

/// Returns a command of the program, with its state in `folder`.
pub(crate) fn command(folder: &Path, words: &[&str]) -> Result<Command> {
    let mut command = program::seikan_command()?;
    command
        .args(words)
        .env(RUN_DIR, folder)
        .env("SEIKAN_STATE_DIR", folder);
    Ok(command)
}

/// Runs `seikan` with these words on a host, and returns its output.
fn run(host: &Host, folder: &Path, words: &[&str]) -> Result<String> {
    host.output(&mut command(folder, words)?, "")
}
