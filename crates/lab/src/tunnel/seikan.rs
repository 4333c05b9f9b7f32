//! Our own tunnel, run as anybody would: `seikan up FILE --protocol P`, in the foreground, inside
//! each host.

use std::fmt::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipnet::IpNet;
use seikan_node::system::SystemRandom;
use seikan_proto::keys::PublicKey;
use seikan_proto::rng::Rng;
use seikan_ui::Interrupt;

use crate::error::Result;
use crate::process::Process;
use crate::program;
use crate::site::Host;
use crate::tunnel::wireguard;
use crate::tunnel::{End, PORT, Tunnel, device_name, write_private};

/// Environment variable with the directory of Seikan's control socket. The system's directory would
/// not do: others use it, and a user namespace cannot write to it.
pub(crate) const RUN_DIR: &str = "SEIKAN_RUN_DIR";

/// Seikan in one of its protocols.
#[derive(Default)]
pub(crate) struct Seikan {
    protocol: &'static str,
    name: String,
    /// Additional idle peers.
    idle_peers: u32,
    /// First lines of its configuration.
    settings: String,
    /// Whether the tunnel carries Ethernet frames instead of IP packets.
    ethernet: bool,
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
            ..Self::default()
        }
    }

    /// The native protocol with Ethernet frames.
    pub(crate) fn ethernet() -> Self {
        Self {
            name: "seikan-ethernet".to_owned(),
            settings: "mode = \"ethernet\"\n".to_owned(),
            ethernet: true,
            ..Self::new("native", 0)
        }
    }

    /// The native protocol without loss repair.
    pub(crate) fn unrepaired() -> Self {
        Self {
            name: "seikan-unrepaired".to_owned(),
            settings: "repair = \"off\"\n".to_owned(),
            ..Self::new("native", 0)
        }
    }

    /// A protocol with this `uplink-rate`.
    pub(crate) fn limited(protocol: &'static str, rate: &str) -> Self {
        Self {
            name: format!("seikan-{protocol}-limited"),
            settings: format!("uplink-rate = \"{rate}\"\n"),
            ..Self::new(protocol, 0)
        }
    }

    /// The native protocol with this cipher, as its configuration calls it.
    pub(crate) fn with_cipher(cipher: &str) -> Self {
        Self {
            settings: format!("cipher = \"{cipher}\"\n"),
            ..Self::new("native", 0)
        }
    }

    /// Returns the same tunnel, run by this program.
    pub(crate) fn with_program(self, program: PathBuf) -> Self {
        Self {
            program: Some(program),
            ..self
        }
    }

    /// Returns the sections of peers that do not exist. Their random keys behave like real ones
    /// until they are used.
    fn idle_sections(&self) -> String {
        let mut sections = String::new();
        for n in 0..self.idle_peers {
            let mut key = [0; 32];
            SystemRandom.fill(&mut key);
            let [_, a, b, c] = n.to_be_bytes();
            // These addresses are apart from the hosts' own networks (10.77.0.0/24 and
            // 10.78.0.0/24).
            let _ = writeln!(
                sections,
                "\n[[peer]]\npublic-key = \"{}\"\nallowed-ips = [\"10.{}.{b}.{c}/32\"]\nendpoint = \"198.51.100.1:{}\"",
                PublicKey::from_bytes(key),
                128 + a,
                1 + n % 60_000,
            );
        }
        sections
    }
}

/// The configuration of an end whose peer has these addresses.
pub(crate) fn config(end: &End<'_>, allowed: &[IpAddr]) -> String {
    let allowed: Vec<String> = allowed
        .iter()
        .map(|address| format!("\"{}\"", IpNet::from(*address)))
        .collect();
    format!(
        "private-key = \"{}\"\nlisten-port = {PORT}\naddress = [\"{}/24\", \"{}/64\"]\n\n\
         [[peer]]\npublic-key = \"{}\"\nallowed-ips = [{}]\nendpoint = \"{}:{PORT}\"\npersistent-keepalive = 5\n",
        STANDARD.encode(end.own.as_bytes()),
        end.host.inner,
        end.host.inner6,
        end.peer,
        allowed.join(", "),
        end.other.address,
    )
}

/// Runs `command up` with this configuration and `more` arguments.
pub(crate) fn up(
    end: &End<'_>,
    mut command: Command,
    name: &str,
    config: &str,
    protocol: &str,
    more: &[&str],
) -> Result<Process> {
    // The interface is named after the file.
    let file = end.dir.join(format!("{}.toml", end.device()));
    write_private(&file, config)?;
    command.arg("up").arg(&file).args(["--protocol", protocol]);
    command.args(more);
    command.env(RUN_DIR, end.dir);
    let process = end.run(name, command)?;
    Ok(process.leaving(wireguard::socket(&end.device())))
}

impl Tunnel for Seikan {
    fn name(&self) -> &str {
        &self.name
    }

    fn is_own(&self) -> bool {
        true
    }

    fn by_default(&self) -> bool {
        !self.ethernet
    }

    fn programs(&self) -> &[&str] {
        &[program::SEIKAN]
    }

    fn start_end(&self, end: &End<'_>, _: &Interrupt) -> Result<Process> {
        let command = match &self.program {
            Some(program) => Command::new(program),
            None => program::seikan_command()?,
        };
        // Neighbour discovery has other addresses; without a limit the peer may use all.
        let both = [end.other.inner, end.other.inner6];
        let allowed = if self.ethernet { &both[..0] } else { &both[..] };
        let text = self.settings.clone() + &config(end, allowed) + &self.idle_sections();
        up(end, command, &self.name, &text, self.protocol, &[])
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
