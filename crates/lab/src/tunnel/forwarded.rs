//! Tunnels that have no interface at host A: a TCP/IP stack in the program, and a port of host A that
//! leads to a port of host B. Host B has an ordinary interface of Seikan with all of them.

use std::net::Ipv4Addr;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use seikan_load::{Ends, Forward};
use seikan_ui::Interrupt;

use crate::error::Result;
use crate::process::Process;
use crate::program::{self, of_tunnel};
use crate::site::Hosts;
use crate::tunnel::seikan::{config, up};
use crate::tunnel::{End, PORT, Tunnel, write_private};

/// The program of [wireproxy](https://github.com/pufferffish/wireproxy).
const WIREPROXY: &str = "wireproxy";
/// The port of host A, and the one of host B that it leads to.
const FORWARD: Forward = Forward {
    from: 5300,
    to: 5201,
};
/// MTU of wireproxy's stack: the default of wg-quick(8), which Seikan has at the other end.
const MTU: u32 = 1420;

/// A forwarded port by one program.
pub(super) struct Forwarded {
    name: &'static str,
    /// Program of host A, then of host B.
    programs: &'static [&'static str],
    protocol: &'static str,
}

/// Returns the programs to compare with each other.
pub(super) fn all() -> [Forwarded; 3] {
    const OURS: &[&str] = &[program::SEIKAN];
    [
        ("seikan-native-userspace", OURS, "native"),
        ("seikan-wireguard-userspace", OURS, "wireguard"),
        (WIREPROXY, &[WIREPROXY, program::SEIKAN], "wireguard"),
    ]
    .map(|(name, programs, protocol)| Forwarded {
        name,
        programs,
        protocol,
    })
}

impl Tunnel for Forwarded {
    fn name(&self) -> &str {
        self.name
    }

    fn is_own(&self) -> bool {
        self.programs[0] == program::SEIKAN
    }

    /// Most loads cannot pass a forwarded port, and figures of an interface cannot be compared with it.
    fn by_default(&self) -> bool {
        false
    }

    fn programs(&self) -> &[&str] {
        self.programs
    }

    fn start_end(&self, end: &End<'_>, _: &Interrupt) -> Result<Process> {
        let both = [end.other.inner, end.other.inner6];
        let text = config(end, &both);
        let seikan = program::seikan_command;
        if end.host.name != "A" {
            return up(end, seikan()?, self.name, &text, self.protocol, &[]);
        }
        let (from, to) = (FORWARD.from, FORWARD.to);
        if self.is_own() {
            let forward = format!("{from}:{}:{to}", end.other.inner);
            let more = ["--userspace", "--forward", &forward];
            return up(end, seikan()?, self.name, &text, self.protocol, &more);
        }
        let file = end.dir.join("wireproxy.conf");
        write_private(&file, &of_wireproxy(end))?;
        let mut command = Command::new(of_tunnel(WIREPROXY)?);
        command.arg("--config").arg(&file);
        end.run(self.name, command)
    }

    fn ends<'a>(&self, hosts: &'a Hosts) -> Ends<'a> {
        Ends {
            target: Ipv4Addr::LOCALHOST.into(),
            forward: Some(FORWARD),
            ..hosts.through_tunnel()
        }
    }
}

/// Returns the configuration of wireproxy at an end.
fn of_wireproxy(end: &End<'_>) -> String {
    format!(
        "[Interface]\nAddress = {}/32\nPrivateKey = {}\nMTU = {MTU}\n\n\
         [Peer]\nPublicKey = {}\nAllowedIPs = {other}/32\nEndpoint = {}:{PORT}\nPersistentKeepalive = 5\n\n\
         [TCPClientTunnel]\nBindAddress = 127.0.0.1:{}\nTarget = {other}:{}\n",
        end.host.inner,
        STANDARD.encode(end.own.as_bytes()),
        end.peer,
        end.other.address,
        FORWARD.from,
        FORWARD.to,
        other = end.other.inner,
    )
}
