//! OpenVPN, point to point over UDP with AES-256-GCM in user space, in three settings of its tunnel
//! MTU: its default, and two that let the sender's kernel hand it larger packets (which it sends as
//! IP fragments). It also runs with Ethernet frames instead of IP packets (TAP).

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use aws_lc_rs::digest::{SHA256, digest};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use seikan_ui::Interrupt;

use crate::error::{Result, setup};
use crate::program::of_tunnel;
use crate::site::Hosts;
use crate::tunnel::{Changes, End, Started, Tunnel, start_ends, version_line, write_private};

const PORT: u16 = 11_000;
const CIPHER: &str = "AES-256-GCM";
/// Name of OpenVPN over TCP, which runs only if a scenario names it.
const OVER_TCP: &str = "openvpn-tcp";

/// OpenVPN with some extra arguments.
#[derive(Debug, Default)]
pub(super) struct OpenVpn {
    name: String,
    /// Extra arguments of both ends.
    extra: &'static [&'static str],
    /// Whether the tunnel carries Ethernet frames instead of IP packets.
    tap: bool,
    /// Whether the tunnel runs over TCP instead of UDP.
    tcp: bool,
    /// Changes of each end.
    changes: Changes,
}

/// Returns the variant of OpenVPN called `name`, with changes; `None` if there is no such variant.
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

/// The three settings, and TAP.
pub(super) fn all() -> [OpenVpn; 4] {
    let with = |name: &str, extra| OpenVpn {
        name: name.to_owned(),
        extra,
        ..OpenVpn::default()
    };
    [
        with("openvpn", &[]),
        with("openvpn-mtu9000", &["--tun-mtu", "9000", "--mssfix", "0"]),
        with("openvpn-mtu48000", &["--tun-mtu", "48000", "--mssfix", "0"]),
        OpenVpn {
            tap: true,
            ..with("openvpn-tap", &[])
        },
    ]
}

impl Tunnel for OpenVpn {
    fn name(&self) -> &str {
        &self.name
    }

    fn by_default(&self) -> bool {
        !self.tap
    }

    fn programs(&self) -> &[&str] {
        &["openvpn"]
    }

    fn version(&self) -> Option<String> {
        let line = version_line("openvpn", "--version")?;
        // "OpenVPN 2.6.3 x86_64-pc-linux-gnu [SSL (OpenSSL)] ...": the platform says nothing new.
        Some(line.split(' ').take(2).collect::<Vec<_>>().join(" "))
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let program = of_tunnel("openvpn")?;
        let (server, client) = (identity(dir, "server")?, identity(dir, "client")?);
        start_ends(hosts.both(), dir, interrupt, &mut |end| {
            let End { host, other, .. } = end;
            let is_client = host.name == "A";
            let (name, role, peer) = if is_client {
                ("client", "--tls-client", &server)
            } else {
                ("server", "--tls-server", &client)
            };
            let protocol = match (self.tcp, is_client) {
                (false, _) => "udp",
                (true, true) => "tcp-client",
                (true, false) => "tcp-server",
            };
            // A TAP device has a network, a TUN device the address of the other end.
            let (device_type, second) = if self.tap {
                ("tap", "255.255.255.0".to_owned())
            } else {
                ("tun", other.inner.to_string())
            };
            let mut command = Command::new(&program);
            command
                .args(["--dev", &end.device(), "--dev-type", device_type])
                .args(["--proto", protocol, "--port", &PORT.to_string()])
                .args(["--cipher", CIPHER, "--data-ciphers", CIPHER])
                .args(["--dh", "none", "--verb", "1", "--disable-dco", role])
                // The other end may change its address, as with all other tunnels.
                .arg("--float")
                .args(["--peer-fingerprint", peer])
                .arg("--cert")
                .arg(dir.join(format!("{name}.crt")))
                .arg("--key")
                .arg(dir.join(format!("{name}.key")))
                .arg("--ifconfig")
                .args([host.inner.to_string(), second])
                .args(self.extra)
                .args(self.changes.arguments_of(host))
                .envs(self.changes.environment_of(host));
            if is_client {
                command.args(["--remote", &other.address.to_string()]);
            }
            end.run(&self.name, command)
        })
    }
}

/// Writes a self-signed certificate and its key (ECDSA P-256); returns the fingerprint as OpenVPN wants it.
fn identity(dir: &Path, name: &str) -> Result<String> {
    let refuse = |e: rcgen::Error| setup(format!("cannot make a certificate for OpenVPN: {e}"));
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
