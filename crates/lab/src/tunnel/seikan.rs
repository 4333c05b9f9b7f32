//! Our own tunnel, run as anybody would: `seikan up FILE --protocol P`, in the foreground, inside
//! each host.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use seikan_ui::Interrupt;

use crate::error::{LabError, Result};
use crate::host::Host;
use crate::link::Hosts;
use crate::process::Process;
use crate::program;
use crate::tunnel::wireguard;
use crate::tunnel::{
    KeyPair, PORT, Started, Tunnel, device_name, need_tun, version_line, write_private,
};

/// Tells Seikan where its control socket goes: not to the system's directory, which others use and
/// which a user namespace cannot write.
pub(crate) const RUN_DIR: &str = "SEIKAN_RUN_DIR";

/// Seikan in one of its protocols.
pub(crate) struct Seikan {
    protocol: &'static str,
    name: String,
    /// Additional idle peers.
    idle_peers: u32,
    /// The cipher that its configuration asks for; both ends settle it if `None`.
    cipher: Option<&'static str>,
    /// The program, if it is not the usual one.
    program: Option<PathBuf>,
}

impl Seikan {
    pub(crate) fn new(protocol: &'static str, idle_peers: u32) -> Self {
        let suffix = match idle_peers {
            0 => String::new(),
            more => format!("+{more}"),
        };
        Self {
            protocol,
            name: format!("seikan-{protocol}{suffix}"),
            idle_peers,
            cipher: None,
            program: None,
        }
    }

    /// Run by this program.
    pub(crate) fn with_program(self, program: PathBuf) -> Self {
        Self {
            program: Some(program),
            ..self
        }
    }

    /// With this cipher, as its configuration calls it.
    pub(crate) fn with_cipher(self, cipher: &'static str) -> Self {
        Self {
            cipher: Some(cipher),
            ..self
        }
    }

    /// Returns the sections of peers that do not exist. Their random keys behave like real ones
    /// until they are used.
    fn idle_sections(&self) -> Result<String> {
        let mut sections = String::new();
        for n in 0..self.idle_peers {
            let mut key = [0_u8; 32];
            seikan_sys::random::fill(&mut key)
                .map_err(LabError::io("get random bytes for keys"))?;
            let [_, a, b, c] = n.to_be_bytes();
            // Apart from the hosts' own networks (10.77.0.0/24 and 10.78.0.0/24).
            let _ = writeln!(
                sections,
                "\n[Peer]\nPublicKey = {}\nAllowedIPs = 10.{}.{b}.{c}/32\nEndpoint = 198.51.100.1:{}",
                STANDARD.encode(key),
                128 + a,
                1 + n % 60_000,
            );
        }
        Ok(sections)
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
        let mut command = match &self.program {
            Some(program) => Command::new(program),
            None => program::seikan_command()?,
        };
        // The interface is named after the file.
        let file = dir.join(format!("{}.conf", device_name(host)));
        let cipher = self.cipher;
        let cipher = cipher.map_or_else(String::new, |cipher| format!("Cipher = {cipher}\n"));
        let config = format!(
            "[Interface]\nPrivateKey = {}\nListenPort = {PORT}\nAddress = {}/24, {}/64\n{cipher}\n\
             [Peer]\nPublicKey = {}\nAllowedIPs = {}/32, {}/128\nEndpoint = {}:{PORT}\nPersistentKeepalive = 5\n",
            own.private_base64(),
            host.inner,
            host.inner6,
            peer.public_base64(),
            other.inner,
            other.inner6,
            other.address,
        );
        write_private(&file, &(config + &self.idle_sections()?))?;
        command
            .arg("up")
            .arg(&file)
            .args(["--protocol", self.protocol]);
        command.env(RUN_DIR, dir);
        let process = Process::start(host, &self.name, command, dir)?;
        Ok(process.leaving(wireguard::socket(&device_name(host))))
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
        program::seikan().map(drop)
    }

    fn version(&self) -> Option<String> {
        version_line(&program::seikan().ok()?, "--version")
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
        status(host, dir)
    }
}

/// Returns the status of the end in `host`.
pub(crate) fn status(host: &Host, dir: &Path) -> Option<serde_json::Value> {
    let output = program::seikan_command()
        .ok()?
        .args(["status", &device_name(host), "--json"])
        .env(RUN_DIR, dir)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    serde_json::from_slice(&output.stdout).ok()
}
