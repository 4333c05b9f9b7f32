//! The load of the source of [`batch`](super::batch): `ab` requests a page of 5 MB from a web server
//! repeatedly, over eight connections that are kept.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use seikan_load::Ends;
use seikan_ui::Interrupt;

use super::ReproduceOptions;
use crate::error::{LabError, Result};
use crate::host::Host;
use crate::process::Process;
use crate::tunnel::Started;

/// The web server's port, and its page.
const PORT: u16 = 8_080;
const PAGE: &str = "5m.html";
const PAGE_BYTES: usize = 5 << 20;
/// The source made 500 requests over 8 connections; here it is that or a time.
pub(super) const REQUESTS: u32 = 500;
pub(super) const CONNECTIONS: u32 = 8;
/// How long the web server may take to answer, and `ab` to be done after its time.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);

/// Seconds for which pages are requested at most: those of a load, in whole ones.
pub(super) fn page_seconds(options: &ReproduceOptions) -> u32 {
    options.seconds.ceil().max(1.0) as u32
}

/// Requests pages from the web server for so many seconds at most, and stops it; returns the rate
/// in KB/s, as `ab` prints it.
pub(super) fn request_repeatedly(
    ends: &Ends<'_>,
    server: Process,
    seconds: u32,
    interrupt: &Interrupt,
) -> Result<f64> {
    let mut started = Started::default();
    started.processes.0.push(server);
    wait_for(ends, &mut started, interrupt).map_err(|error| started.explain(error))?;
    let program = program("ab", "apache2-utils")?;
    let mut command = Command::new(program);
    command
        .args([
            "-k",
            "-q",
            "-c",
            &CONNECTIONS.to_string(),
            // Takes away the limit of requests, so that comes after it.
            "-t",
            &seconds.to_string(),
            "-n",
            &REQUESTS.to_string(),
        ])
        .arg(format!("http://{}:{PORT}/{PAGE}", ends.target))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = ends
        .client
        .spawn_command(&mut command)
        .map_err(LabError::io("start `ab`"))?;
    let start = Instant::now();
    let allowed = PATIENCE + Duration::from_secs(seconds.into());
    let status = loop {
        if let Some(status) = child.try_wait().map_err(LabError::io("wait for `ab`"))? {
            break status;
        }
        let patience = if start.elapsed() < allowed {
            interrupt
                .sleep(Duration::from_millis(20))
                .map_err(LabError::from)
        } else {
            Err(LabError::Timeout {
                event: "`ab`".to_owned(),
                seconds: allowed.as_secs_f64(),
            })
        };
        if let Err(error) = patience {
            // Fails only when it has ended already.
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)
            .map_err(LabError::io("read what `ab` says"))?;
    }
    transfer_rate(&said)
        .filter(|_| status.success())
        .ok_or_else(|| LabError::Setup(format!("`ab` failed ({status}): {}", said.trim())))
}

/// `Transfer rate:          111139.88 [Kbytes/sec] received`.
///
/// None where requests failed or were not answered with the page.
fn transfer_rate(said: &str) -> Option<f64> {
    let value = |name| {
        let line = said.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let failed =
        value("Failed requests:").unwrap_or(0.0) + value("Non-2xx responses:").unwrap_or(0.0);
    value("Transfer rate:").filter(|_| failed == 0.0)
}

/// nginx in the foreground, with one page, everything it writes in `dir`.
pub(super) fn web_server(host: &Host, dir: &Path) -> Result<Process> {
    let program = program("nginx", "nginx-light")?;
    let page: Vec<u8> = b"seikan \n"
        .iter()
        .copied()
        .cycle()
        .take(PAGE_BYTES)
        .collect();
    let write = |name: &str, bytes: &[u8]| {
        let file = dir.join(name);
        std::fs::write(&file, bytes).map_err(LabError::io(format!("write {}", file.display())))
    };
    write(PAGE, &page)?;
    let here = dir.display();
    // One process, which ends with the lab.
    let config = format!(
        "daemon off;\nmaster_process off;\npid {here}/nginx.pid;\nerror_log {here}/error.log;\n\
         events {{ }}\nhttp {{\n  access_log off;\n  sendfile on;\n  tcp_nopush on;\n  keepalive_requests 1000000;\n  \
         client_body_temp_path {here}/a;\n  proxy_temp_path {here}/b;\n  fastcgi_temp_path {here}/c;\n  \
         uwsgi_temp_path {here}/d;\n  scgi_temp_path {here}/e;\n  \
         server {{\n    listen {PORT};\n    root {here};\n  }}\n}}\n"
    );
    write("nginx.conf", config.as_bytes())?;
    let mut command = Command::new(program);
    command
        .arg("-p")
        .arg(dir)
        .arg("-e")
        .arg(dir.join("error.log"))
        .arg("-c")
        .arg(dir.join("nginx.conf"));
    Process::start(host, "nginx", command, dir)
}

/// Until it takes connections.
fn wait_for(ends: &Ends<'_>, started: &mut Started, interrupt: &Interrupt) -> Result<()> {
    let start = Instant::now();
    let to = std::net::SocketAddr::new(ends.target, PORT);
    while ends
        .client
        .run(|| std::net::TcpStream::connect_timeout(&to, Duration::from_millis(200)))?
        .is_err()
    {
        started.check_alive()?;
        if start.elapsed() > SERVER_PATIENCE {
            return Err(LabError::Timeout {
                event: "the web server".to_owned(),
                seconds: SERVER_PATIENCE.as_secs_f64(),
            });
        }
        interrupt.sleep(Duration::from_millis(20))?;
    }
    Ok(())
}

fn program(name: &str, package: &str) -> Result<PathBuf> {
    crate::program::find(name).ok_or_else(|| {
        LabError::Setup(format!(
            "no program `{name}` on PATH (Debian: apt install {package})"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line as ApacheBench 2.3 prints it.
    #[test]
    fn the_transfer_rate_is_read() {
        let said = "Failed requests:        0\nRequests per second:    3.00 [#/sec] (mean)\nTransfer rate:          111139.88 [Kbytes/sec] received\n";
        assert_eq!(transfer_rate(said), Some(111_139.88));
        assert_eq!(transfer_rate("Transfer rate:\n"), None);
        assert_eq!(transfer_rate(""), None);
        for failed in [
            "Failed requests:        3\n",
            "Non-2xx responses:      500\n",
        ] {
            assert_eq!(
                transfer_rate(&format!(
                    "{failed}Transfer rate:          5.0 [Kbytes/sec] received\n"
                )),
                None
            );
        }
    }
}
