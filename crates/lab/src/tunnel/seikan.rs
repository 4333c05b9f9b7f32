//! Our own tunnel, run as anybody would: `seikan up FILE --protocol P`, in the foreground, inside each host.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{LabError, Result};
use crate::interrupt::Interrupt;
use crate::link::{Host, Hosts};
use crate::process::Process;
use crate::tunnel::{
    KeyPair, PORT, Started, Tunnel, device_name, find_program, is_executable, need_tun,
    version_line, write_private,
};

/// Tells Seikan where its control socket goes: not to the system's directory, which others use and which a user namespace
/// cannot write.
const RUN_DIR: &str = "SEIKAN_RUN_DIR";

/// Seikan in one of its protocols.
pub(super) struct Seikan {
    protocol: &'static str,
    name: String,
}

impl Seikan {
    pub(super) fn new(protocol: &'static str) -> Self {
        Self {
            protocol,
            name: format!("seikan-{protocol}"),
        }
    }
}

impl Seikan {
    /// Starts the end in `host`, for a peer that is `other`.
    pub(super) fn start_end(
        &self,
        host: &Host,
        other: &Host,
        own: &KeyPair,
        peer: &KeyPair,
        dir: &Path,
    ) -> Result<Process> {
        let program = program()
            .ok_or_else(|| LabError::Setup("no program `seikan`: set $SEIKAN_BIN to it".into()))?;
        // The interface is named after the file.
        let file = dir.join(format!("{}.conf", device_name(host)));
        let config = format!(
            "[Interface]\nPrivateKey = {}\nListenPort = {PORT}\nAddress = {}/24, {}/64\n\n\
             [Peer]\nPublicKey = {}\nAllowedIPs = {}/32, {}/128\nEndpoint = {}:{PORT}\nPersistentKeepalive = 5\n",
            own.private_base64(),
            host.inner,
            host.inner6,
            peer.public_base64(),
            other.inner,
            other.inner6,
            other.address,
        );
        write_private(&file, &config)?;
        let mut command = Command::new(&program);
        command
            .arg("up")
            .arg(&file)
            .args(["--protocol", self.protocol]);
        command.env(RUN_DIR, dir);
        Process::start(host, &self.name, command, dir)
    }
}

impl Tunnel for Seikan {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_own(&self) -> bool {
        true
    }

    fn availability(&self) -> std::result::Result<(), String> {
        need_tun()?;
        program()
            .map(drop)
            .ok_or_else(|| "no program `seikan`: set $SEIKAN_BIN to it".to_owned())
    }

    fn version(&self) -> Option<String> {
        version_line(&program()?, "--version")
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let (a, b) = (KeyPair::generate()?, KeyPair::generate()?);
        let mut started = Started::default();
        for (host, other, own, peer) in [(&hosts.b, &hosts.a, &b, &a), (&hosts.a, &hosts.b, &a, &b)]
        {
            interrupt.check()?;
            let process = self.start_end(host, other, own, peer, dir)?;
            started.processes.0.push(process);
        }
        Ok(started)
    }

    fn status(&self, host: &Host, dir: &Path) -> Option<serde_json::Value> {
        let output = Command::new(program()?)
            .args(["status", &device_name(host), "--json"])
            .env(RUN_DIR, dir)
            .stdin(Stdio::null())
            .output()
            .ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }
}

/// `$SEIKAN_BIN`, this program if it is `seikan`, or the one on `PATH`.
fn program() -> Option<PathBuf> {
    if let Some(file) = std::env::var_os("SEIKAN_BIN").map(PathBuf::from) {
        return is_executable(&file).then_some(file);
    }
    let this = std::env::current_exe().ok();
    this.filter(|file| file.file_name().is_some_and(|name| name == "seikan"))
        .or_else(|| find_program("seikan"))
}
