//! OpenVPN, point to point over UDP with AES-256-GCM in user space, in three settings of its tunnel MTU: its default,
//! and two that let the sender's kernel hand it larger packets (which it sends as IP fragments).

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use seikan_ui::Interrupt;

use crate::error::{LabError, Result};
use crate::link::Hosts;
use crate::process::Process;
use crate::tunnel::{
    Changes, Started, Tunnel, device_name, need_program, need_tun, version_line, write_private,
};

const PORT: u16 = 11_000;
const CIPHER: &str = "AES-256-GCM";
/// Run only where a scenario names it.
const OVER_TCP: &str = "openvpn-tcp";

/// OpenVPN with some extra arguments.
#[derive(Debug, Default)]
pub(super) struct OpenVpn {
    name: String,
    /// At both ends.
    extra: &'static [&'static str],
    /// Over TCP instead of UDP.
    tcp: bool,
    /// At one end each.
    changes: Changes,
}

/// OpenVPN called `name`, with changes; `None` if it has another name.
pub(super) fn changed(name: &str, changes: &Changes) -> Option<OpenVpn> {
    let tcp = OpenVpn {
        name: OVER_TCP.to_owned(),
        tcp: true,
        ..OpenVpn::default()
    };
    let known = all().into_iter().chain([tcp]);
    known
        .into_iter()
        .find(|t| t.name == name)
        .map(|tunnel| OpenVpn {
            changes: changes.clone(),
            ..tunnel
        })
}

/// The three settings.
pub(super) fn all() -> Vec<OpenVpn> {
    vec![
        OpenVpn {
            name: "openvpn".to_owned(),
            extra: &[],
            ..OpenVpn::default()
        },
        OpenVpn {
            name: "openvpn-mtu9000".to_owned(),
            extra: &["--tun-mtu", "9000", "--mssfix", "0"],
            ..OpenVpn::default()
        },
        OpenVpn {
            name: "openvpn-mtu48000".to_owned(),
            extra: &["--tun-mtu", "48000", "--mssfix", "0"],
            ..OpenVpn::default()
        },
    ]
}

impl Tunnel for OpenVpn {
    fn name(&self) -> &str {
        &self.name
    }

    fn availability(&self) -> std::result::Result<(), String> {
        need_program("openvpn")?;
        need_tun()
    }

    fn version(&self) -> Option<String> {
        let line = version_line(&need_program("openvpn").ok()?, "--version")?;
        // "OpenVPN 2.6.3 x86_64-pc-linux-gnu [SSL (OpenSSL)] ...": the platform says nothing new.
        Some(line.split(' ').take(2).collect::<Vec<_>>().join(" "))
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let program = need_program("openvpn").map_err(LabError::Setup)?;
        let (server, client) = (identity(dir, "server")?, identity(dir, "client")?);
        let mut started = Started::default();
        for (host, other, name, role, peer) in [
            (&hosts.b, &hosts.a, "server", "--tls-server", &client),
            (&hosts.a, &hosts.b, "client", "--tls-client", &server),
        ] {
            interrupt.check()?;
            let mut command = Command::new(&program);
            command
                .args([
                    "--dev",
                    &device_name(host),
                    "--dev-type",
                    "tun",
                    "--proto",
                    match (self.tcp, role) {
                        (false, _) => "udp",
                        (true, "--tls-server") => "tcp-server",
                        (true, _) => "tcp-client",
                    },
                ])
                .args([
                    "--port",
                    &PORT.to_string(),
                    "--cipher",
                    CIPHER,
                    "--data-ciphers",
                    CIPHER,
                ])
                .args([
                    "--dh",
                    "none",
                    "--verb",
                    "1",
                    "--disable-dco",
                    role,
                    "--peer-fingerprint",
                    peer,
                ])
                .arg("--cert")
                .arg(dir.join(format!("{name}.crt")))
                .arg("--key")
                .arg(dir.join(format!("{name}.key")))
                .args([
                    "--ifconfig",
                    &host.inner.to_string(),
                    &other.inner.to_string(),
                ])
                .args(self.extra)
                .args(self.changes.arguments_of(host))
                .envs(self.changes.environment_of(host));
            if role == "--tls-client" {
                command.args(["--remote", &other.address.to_string()]);
            }
            started
                .processes
                .0
                .push(Process::start(host, &self.name, command, dir)?);
        }
        Ok(started)
    }
}

/// Writes a self-signed certificate and its key (ECDSA P-256); returns the fingerprint as OpenVPN wants it.
fn identity(dir: &Path, name: &str) -> Result<String> {
    let refuse =
        |e: rcgen::Error| LabError::Setup(format!("cannot make a certificate for OpenVPN: {e}"));
    let key = KeyPair::generate().map_err(refuse)?;
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, name);
    let certificate = parameters.self_signed(&key).map_err(refuse)?;
    write_private(&dir.join(format!("{name}.crt")), &certificate.pem())?;
    write_private(&dir.join(format!("{name}.key")), &key.serialize_pem())?;
    Ok(fingerprint(certificate.der()))
}

/// SHA-256 of the certificate as `AB:CD:...`.
fn fingerprint(der: &[u8]) -> String {
    let mut text = String::new();
    for (index, byte) in digest(&SHA256, der).as_ref().iter().enumerate() {
        let colon = if index == 0 { "" } else { ":" };
        // Writing to a String cannot fail.
        let _ = write!(text, "{colon}{byte:02X}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-2, appendix B.1: the digest of "abc".
    #[test]
    fn fingerprint_of_abc() {
        assert_eq!(
            fingerprint(b"abc"),
            "BA:78:16:BF:8F:01:CF:EA:41:41:40:DE:5D:AE:22:23:B0:03:61:A3:96:17:7A:9C:B4:10:FF:61:F2:00:15:AD"
        );
    }
}
