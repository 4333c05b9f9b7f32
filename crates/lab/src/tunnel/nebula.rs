//! Nebula: two members, one of them the lighthouse, certificates by its own `nebula-cert`.

use std::path::Path;
use std::process::{Command, Stdio};

use seikan_ui::Interrupt;

use crate::error::{LabError, Result};
use crate::host::Host;
use crate::link::Hosts;
use crate::process::Process;
use crate::tunnel::{
    Started, Tunnel, device_name, need_program, need_tun, version_line, write_private,
};

const PORT: u16 = 4242;

/// Nebula with AES and its default MTU.
pub(super) struct Nebula;

impl Tunnel for Nebula {
    fn name(&self) -> &str {
        "nebula"
    }

    fn availability(&self) -> std::result::Result<(), String> {
        need_program("nebula")?;
        need_program("nebula-cert")?;
        need_tun()
    }

    fn version(&self) -> Option<String> {
        version_line(&need_program("nebula").ok()?, "-version")
    }

    fn up(&self, hosts: &Hosts, dir: &Path, interrupt: &Interrupt) -> Result<Started> {
        let program = need_program("nebula").map_err(LabError::Setup)?;
        certify(dir, &["ca", "-name", "lab"])?;
        for host in [&hosts.a, &hosts.b] {
            certify(
                dir,
                &[
                    "sign",
                    "-name",
                    host.name,
                    "-ip",
                    &format!("{}/24", host.inner),
                ],
            )?;
        }
        let mut started = Started::default();
        for host in [&hosts.b, &hosts.a] {
            interrupt.check()?;
            let file = dir.join(format!("{}.yml", host.name));
            write_private(&file, &config(host, &hosts.b, dir))?;
            let mut command = Command::new(&program);
            command.arg("-config").arg(&file);
            started
                .processes
                .0
                .push(Process::start(host, "nebula", command, dir)?);
        }
        Ok(started)
    }
}

fn certify(dir: &Path, arguments: &[&str]) -> Result<()> {
    let program = need_program("nebula-cert").map_err(LabError::Setup)?;
    let output = Command::new(program)
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .map_err(LabError::io("run nebula-cert"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Setup(format!(
        "nebula-cert failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    )))
}

fn config(host: &Host, lighthouse: &Host, dir: &Path) -> String {
    let is_lighthouse = host.name == lighthouse.name;
    let known = if is_lighthouse {
        String::new()
    } else {
        format!("\"{}\"", lighthouse.inner)
    };
    let dir = dir.display();
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
        device = device_name(host),
    )
}
