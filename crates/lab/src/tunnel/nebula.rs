//! Nebula: two members, one of them the lighthouse, certificates by its own `nebula-cert`.

use std::path::Path;
use std::process::Command;

use seikan_ui::Interrupt;

use crate::error::Result;
use crate::program::of_tunnel;
use crate::site::{Host, Hosts, output};
use crate::tunnel::{End, Started, Tunnel, start_ends, version_line, write_private};

const PORT: u16 = 4242;

/// Nebula with AES and its default MTU.
pub(super) struct Nebula;

impl Tunnel for Nebula {
    fn name(&self) -> &str {
        "nebula"
    }

    fn programs(&self) -> &[&str] {
        &["nebula", "nebula-cert"]
    }

    fn version(&self) -> Option<String> {
        version_line("nebula", "-version")
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let program = of_tunnel("nebula")?;
        certify(dir, &["ca", "-name", "lab"])?;
        for host in hosts.both() {
            let network = format!("{}/24", host.inner);
            certify(dir, &["sign", "-name", host.name, "-ip", &network])?;
        }
        start_ends(hosts.both(), dir, interrupt, &mut |end| {
            let file = dir.join(format!("{}.yml", end.host.name));
            write_private(&file, &config(end, &hosts.b))?;
            let mut command = Command::new(&program);
            command.arg("-config").arg(&file);
            end.run("nebula", command)
        })
    }
}

fn certify(dir: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new(of_tunnel("nebula-cert")?);
    output(None, command.args(arguments).current_dir(dir), "").map(drop)
}

fn config(end: &End<'_>, lighthouse: &Host) -> String {
    let host = end.host;
    let is_lighthouse = host.name == lighthouse.name;
    let known = if is_lighthouse {
        String::new()
    } else {
        format!("\"{}\"", lighthouse.inner)
    };
    let dir = end.dir.display();
    format!(
        "pki: {{ca: {dir}/ca.crt, cert: {dir}/{name}.crt, key: {dir}/{name}.key}}\n\
         static_host_map: {{\"{inner}\": [\"{outer}:{PORT}\"]}}\n\
         lighthouse: {{am_lighthouse: {is_lighthouse}, hosts: [{known}]}}\n\
         listen: {{host: 0.0.0.0, port: {PORT}, batch: 64}}\n\
         cipher: aes\n\
         punchy: {{punch: true}}\n\
         tun: {{dev: {device}, mtu: 1300, tx_queue: 500}}\n\
         firewall:\n  outbound: [{{port: any, proto: any, host: any}}]\n  inbound: [{{port: any, proto: any, host: any}}]\n",
        name = host.name,
        inner = lighthouse.inner,
        outer = lighthouse.address,
        device = end.device(),
    )
}
