//! The load of the source of [`batch`](super::batch): `ab` requests a page of 5 MB from a web server
//! repeatedly, over eight connections that are kept.

use std::io::Read;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use seikan_load::Ends;

use super::{Bench, ReproduceOptions};
use crate::error::{Doing, Result, setup};
use crate::process::{Killed, Process, wait_for};
use crate::site::Host;
use crate::tunnel::Started;

/// The web server's port, and its page.
const PORT: u16 = 8_080;
const PAGE: &str = "5m.html";
const PAGE_BYTES: usize = 5 << 20;
/// Maximum number of requests, as many as the source made. The time of a load may end them earlier.
pub(super) const REQUESTS: u32 = 500;
pub(super) const CONNECTIONS: u32 = 8;
/// Maximum time until the web server answers, and until `ab` ends after its time.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the maximum time of requesting pages: that of a load, in whole seconds.
pub(super) fn page_seconds(options: &ReproduceOptions) -> u32 {
    options.seconds.ceil().max(1.0) as u32
}

/// Requests pages from the web server for the time of a load at most, and stops it; returns the
/// rate in KB/s, as `ab` prints it.
pub(super) fn request_repeatedly(
    bench: &Bench<'_>,
    ends: &Ends<'_>,
    server: Process,
) -> Result<f64> {
    let (interrupt, seconds) = (bench.interrupt, page_seconds(bench.options));
    let mut started = Started::default();
    started.processes.push(server);
    let to = std::net::SocketAddr::new(ends.target, PORT);
    let connect = || TcpStream::connect_timeout(&to, Duration::from_millis(200));
    wait_for("the web server", SERVER_PATIENCE, interrupt, || {
        started.check_alive()?;
        Ok(ends.client.run(connect)?.ok())
    })
    .map_err(|error| started.explain(error))?;
    let program = program("ab", "apache2-utils")?;
    let mut command = Command::new(program);
    command
        .args(["-k", "-q", "-c", &CONNECTIONS.to_string()])
        // This option removes the limit of requests, so the limit must follow.
        .args(["-t", &seconds.to_string()])
        .args(["-n", &REQUESTS.to_string()])
        .arg(format!("http://{}:{PORT}/{PAGE}", ends.target))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let child = ends.client.spawn_command(&mut command);
    let mut child = Killed(child.doing("start `ab`")?);
    let allowed = PATIENCE + Duration::from_secs(seconds.into());
    let status = child.wait("`ab`", allowed, interrupt)?;
    let mut said = String::new();
    if let Some(mut out) = child.0.stdout.take() {
        out.read_to_string(&mut said).doing("read what `ab` says")?;
    }
    transfer_rate(&said)
        .filter(|_| status.success())
        .ok_or_else(|| setup(format!("`ab` failed ({status}): {}", said.trim())))
}

/// Returns the rate in a line such as `Transfer rate:          111139.88 [Kbytes/sec] received`, in
/// KB/s.
///
/// `None` if requests failed or were not answered with the page.
fn transfer_rate(said: &str) -> Option<f64> {
    let value = |name| {
        let line = said.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let failed =
        value("Failed requests:").unwrap_or(0.0) + value("Non-2xx responses:").unwrap_or(0.0);
    value("Transfer rate:").filter(|_| failed == 0.0)
}

/// Starts nginx in the foreground, with one page. It writes all its files into `dir`.
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
        std::fs::write(&file, bytes).doing(format!("write {}", file.display()))
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
    let [error_log, config] = ["error.log", "nginx.conf"].map(|name| dir.join(name));
    command.arg("-p").arg(dir);
    command.arg("-e").arg(error_log).arg("-c").arg(config);
    Process::start(host, "nginx", command, dir)
}

fn program(name: &str, package: &str) -> Result<PathBuf> {
    crate::program::find(name).ok_or_else(|| {
        setup(format!(
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
