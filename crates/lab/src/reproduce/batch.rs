//! N frames for each crossing between kernel and program, instead of one.
//!
//! The source changed the driver of the kernel so that one read returns several packets. Linux has
//! since learned to hand a TUN device's program one super-packet for many segments of a TCP stream.
//! The number of segments is a setting of the interface (`gso_max_segs`), so N can be chosen. The
//! load is the source's: `ab` requests a page of 5 MB from a web server repeatedly over eight
//! connections that are kept. [`surface`] answers questions that the source leaves open.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use seikan_diagnose::Cause;
use seikan_load::{Ends, LiveOptions};
use seikan_sys::ethtool::Feature;
use seikan_ui::Interrupt;

use super::figures::interleaved;
use super::look::Looker;
use super::{Bench, Curve, Curves, Figures, Found, Row, plain, set_link, surface, titled};
use crate::cleanup::private_directory;
use crate::error::{LabError, Result};
use crate::host::Host;
use crate::process::Process;
use crate::tunnel::{self, Started, Tunnel, inner_device};

/// Frames for each crossing.
const SIZES: [u32; 6] = [2, 4, 8, 16, 32, 64];
/// Buffer of the source: four packets of 1,500 bytes.
const PUBLISHED_SIZE: u32 = 4;
const BARE: &str = "no tunnel";
const CRUDE: &str = "crude, 1 frame";
pub(super) const ONE: &str = "Seikan, 1 frame";
/// Published, in KB/s: bare forwarding, the driver as it is, the driver changed.
const PUBLISHED: [f64; 3] = [114_089.42, 102_512.37, 111_139.88];

/// The web server's port, and its page.
const PORT: u16 = 8_080;
const PAGE: &str = "5m.html";
const PAGE_BYTES: usize = 5 << 20;
/// The source made 500 requests over 8 connections; slow tunnels are limited to this many seconds.
const REQUESTS: u32 = 500;
const CONNECTIONS: u32 = 8;
const SECONDS: u32 = 20;
/// How long the web server may take to answer, and `ab` to be done.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Found> {
    let rounds = bench.options.rounds as usize;
    let rows: usize = bench.rates().map(|rate| sizes(rate).len() + 3).iter().sum();
    bench.expect(rows * rounds + surface::POINTS + 1);
    let mut found = Found::default();
    for rate in bench.rates() {
        let done = pages(bench, rate, &mut found);
        found.note_failure(done)?;
    }
    for part in [surface::surface, diagnosis] {
        let done = part(bench, &mut found);
        found.note_failure(done)?;
    }
    Ok(found)
}

pub(super) fn frames_in_words(size: u32) -> String {
    match size {
        1 => "1 frame".to_owned(),
        more => format!("{more} frames"),
    }
}

fn batched(size: u32) -> String {
    format!("Seikan, {}", frames_in_words(size))
}

/// Frames for each crossing that are measured over a link of this rate.
fn sizes(rate: Option<u64>) -> &'static [u32] {
    if rate.is_some() {
        &[PUBLISHED_SIZE, SIZES[5]]
    } else {
        &SIZES
    }
}

/// Reads the output of `ab` for every row, over a link of this rate.
fn pages(bench: &mut Bench<'_>, rate: Option<u64>, found: &mut Found) -> Result<()> {
    let mut names = vec![BARE.to_owned(), CRUDE.to_owned(), ONE.to_owned()];
    names.extend(sizes(rate).iter().copied().map(batched));
    let words: Vec<&str> = names.iter().map(String::as_str).collect();
    let measured = interleaved(bench, &words, &mut found.problems, &mut |bench, name| {
        let tunnel = tunnel_of(name)?;
        let mut running = tunnel::start(tunnel.as_ref(), bench.link(rate), bench.interrupt)?;
        let size = SIZES.into_iter().find(|size| batched(*size) == name);
        if name == ONE || size.is_some() {
            let host_b = &running.hosts.b;
            for host in [&running.hosts.a, host_b] {
                frames(host, tunnel.name(), size.unwrap_or(1))?;
            }
        }
        let dir = private_directory()?;
        let ends = tunnel.ends(&running.hosts);
        let server = web_server(&running.hosts.b, dir.path())?;
        let pages = request_repeatedly(&ends, server, bench.interrupt)?;
        running.check_alive()?;
        Ok(pages)
    })?;
    let there = |name: &str| match name {
        BARE => Some(PUBLISHED[0]),
        CRUDE => Some(PUBLISHED[1]),
        name if name == batched(PUBLISHED_SIZE) => Some(PUBLISHED[2]),
        _ => None,
    };
    let rows = names.iter().zip(measured);
    let title = format!(
        "a page of 5 MB, {REQUESTS} times or for {SECONDS} s over {CONNECTIONS} connections"
    );
    let figures = Figures {
        title: titled(&title, rate),
        unit: "KB/s".to_owned(),
        base: BARE.to_owned(),
        rows: rows
            .map(|(name, rounds)| Row {
                own: name.starts_with("Seikan"),
                rounds,
                ..Row::new(name, there(name))
            })
            .collect(),
    };
    let (few, many) = (batched(PUBLISHED_SIZE), batched(SIZES[5]));
    found.claims.push(figures.claim(&few, CRUDE));
    if rate.is_some() {
        found.figures.push(figures);
        return Ok(());
    }
    found.claims.push(figures.claim(&few, ONE));
    found.claims.push(figures.claim(&many, &few));
    let points = figures.rows.iter().filter_map(|row| {
        let size = SIZES.into_iter().find(|size| batched(*size) == row.name);
        let size = size.or((row.name == ONE).then_some(1))?;
        Some([f64::from(size), row.spread()?.median / 1e3])
    });
    found.curves.push(Curves {
        name: "batch-frames".to_owned(),
        title: "a page again and again".to_owned(),
        x: "frames for each crossing, at most".to_owned(),
        y: "thousands of KB/s".to_owned(),
        logarithmic: [true, true],
        curves: vec![Curve {
            name: "Seikan".to_owned(),
            own: true,
            published: false,
            points: points.collect(),
        }],
    });
    found.figures.push(figures);
    Ok(())
}

/// Diagnoses one frame for each crossing.
fn diagnosis(bench: &mut Bench<'_>, found: &mut Found) -> Result<()> {
    bench.step("the doctor on one frame for each crossing")?;
    let tunnel = tunnel_of(CRUDE)?;
    let running = tunnel::start(tunnel.as_ref(), bench.link(None), bench.interrupt)?;
    let host = &running.hosts.a;
    let rows = found
        .figures
        .first()
        .map_or(&[][..], |figures| &figures.rows);
    let best = rows.last().and_then(Row::spread);
    let interface = inner_device(tunnel.name(), host);
    let looker = Looker {
        // KB/s of 1,024 bytes as Mbit/s.
        expected: best.map_or(1e3, |best| best.median * 8.192e-3),
        right: &[Cause::FramePerSyscall],
        ..Looker::new(CRUDE, host, &interface)
    };
    let load = LiveOptions {
        streams: CONNECTIONS as usize,
        ..LiveOptions::default()
    };
    let ends = tunnel.ends(&running.hosts);
    let verdict = looker.look_under(&load, &ends, bench.desk(), |_| Vec::new())?;
    found.looks.push(verdict);
    Ok(())
}

pub(super) fn tunnel_of(row: &str) -> Result<Box<dyn Tunnel>> {
    let name = match row {
        BARE => "raw",
        CRUDE => "crude",
        _ => "seikan-native",
    };
    plain(name)
}

/// So many frames at most make a super-packet of the tunnel's interface; with one, there are none.
pub(super) fn frames(host: &Host, tunnel: &str, size: u32) -> Result<()> {
    let device = inner_device(tunnel, host);
    host.set_features(&device, &[(Feature::Tso, size > 1)])?;
    set_link(host, tunnel, &format!("gso_max_segs {size}"))
}

/// Requests pages from the web server and stops it; returns the rate in KB/s, as `ab` prints it.
fn request_repeatedly(ends: &Ends<'_>, server: Process, interrupt: &Interrupt) -> Result<f64> {
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
            &SECONDS.to_string(),
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
    let status = loop {
        if let Some(status) = child.try_wait().map_err(LabError::io("wait for `ab`"))? {
            break status;
        }
        let patience = if start.elapsed() < PATIENCE {
            interrupt
                .sleep(Duration::from_millis(20))
                .map_err(LabError::from)
        } else {
            Err(LabError::Timeout {
                event: "`ab`".to_owned(),
                seconds: PATIENCE.as_secs_f64(),
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
fn web_server(host: &Host, dir: &Path) -> Result<Process> {
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
