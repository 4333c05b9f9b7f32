//! Other user-space WireGuards: started in the foreground, configured through their control socket
//! with the cross-platform userspace configuration protocol (wireguard.com/xplatform), so that no
//! `wg` is needed.

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice;
use std::time::Duration;

use seikan_ui::Interrupt;

use crate::error::{Doing, Result, setup};
use crate::process::{Process, wait_for};
use crate::program::{need, of_tunnel};
use crate::tunnel::{End, PORT, Tunnel};

/// Directory of the control sockets, set by the protocol.
const SOCKET_DIR: &str = "/var/run/wireguard";
/// Maximum time until a program's control socket answers.
const SOCKET_PATIENCE: Duration = Duration::from_secs(5);
/// Interval of keepalives, in seconds.
const KEEPALIVE: u32 = 5;
/// MTU that fits into 1500 bytes over IPv6: the default of wg-quick(8).
const MTU: u32 = 1420;

/// A WireGuard program.
pub(crate) struct WireGuard {
    name: &'static str,
    program: &'static str,
    /// Arguments before the interface's name.
    arguments: &'static [&'static str],
}

/// Returns the programs to compare with.
pub(crate) fn all() -> [WireGuard; 4] {
    const GO: &[&str] = &["-f"];
    const RUST: &[&str] = &["-f", "--disable-drop-privileges"];
    [
        ("wireguard-go", "wireguard", GO),
        ("ts-wireguard-go", "wireguard-go", GO),
        ("boringtun", "boringtun-cli", RUST),
        ("gotatun", "gotatun", RUST),
    ]
    .map(|(name, program, arguments)| WireGuard {
        name,
        program,
        arguments,
    })
}

impl Tunnel for WireGuard {
    fn name(&self) -> &str {
        self.name
    }

    fn programs(&self) -> &[&str] {
        slice::from_ref(&self.program)
    }

    fn availability(&self) -> Result<()> {
        need(self.programs())?;
        std::fs::create_dir_all(SOCKET_DIR)
            .and_then(|()| tempfile::tempfile_in(SOCKET_DIR).map(drop))
            .map_err(|e| setup(format!("its control socket goes to {SOCKET_DIR}, which cannot be written ({e}): run as root")))
    }

    fn start_end(&self, end: &End<'_>, interrupt: &Interrupt) -> Result<Process> {
        let program = of_tunnel(self.program)?;
        let (device, mut command) = (end.device(), Command::new(&program));
        command.args(self.arguments).arg(&device);
        let path = socket(&device);
        let mut process = end.run(self.name, command)?.leaving(path.clone());
        let event = format!("the control socket {}", path.display());
        let socket = wait_for(&event, SOCKET_PATIENCE, interrupt, || {
            process.check_alive()?;
            Ok(UnixStream::connect(&path).ok())
        })?;
        configure(socket, end)?;
        end.host.configure_tunnel(&device, MTU)?;
        Ok(process)
    }
}

/// The control socket of an interface.
pub(crate) fn socket(interface: &str) -> PathBuf {
    Path::new(SOCKET_DIR).join(format!("{interface}.sock"))
}

/// Sends one `set` request and reads its `errno`.
fn configure(mut socket: UnixStream, end: &End<'_>) -> Result<()> {
    let other = end.other;
    // Only one end initiates. If both did, wireguard-go would repeat both handshakes at the same
    // time over a path with a delay, and complete neither.
    let keepalive = if end.host.name == "B" { 0 } else { KEEPALIVE };
    let mut request = format!(
        "set=1\nprivate_key={}\nlisten_port={PORT}\nreplace_peers=true\npublic_key={}\nendpoint={}:{PORT}\n\
         persistent_keepalive_interval={keepalive}\nreplace_allowed_ips=true\nallowed_ip={}/32\nallowed_ip={}/128\n",
        hex(end.own.as_bytes()),
        hex(end.peer.as_bytes()),
        other.address,
        other.inner,
        other.inner6,
    );
    for network in &other.behind {
        // Writing to a String cannot fail.
        let _ = writeln!(request, "allowed_ip={network}");
    }
    request.push('\n');
    let mut answer = String::new();
    socket
        .set_read_timeout(Some(SOCKET_PATIENCE))
        .and_then(|()| socket.write_all(request.as_bytes()))
        .and_then(|()| socket.shutdown(Shutdown::Write))
        .and_then(|()| socket.read_to_string(&mut answer))
        .doing("configure the tunnel through its control socket")?;
    if answer.lines().any(|l| l == "errno=0") {
        return Ok(());
    }
    Err(setup(format!(
        "the tunnel refuses its configuration: {}",
        answer.trim()
    )))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_has_two_digits_per_byte() {
        assert_eq!(hex(&[0x00, 0x0f, 0xa0, 0xff]), "000fa0ff");
    }
}
