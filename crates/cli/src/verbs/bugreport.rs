//! `seikan bugreport`: writes an archive to attach to a bug report.
//!
//! [`host`], [`tunnel`] and [`log`] collect parts. A part that cannot be collected is listed with
//! the reason, and the others follow. [`archive`] writes them, after [`redact`] has replaced every
//! secret that is known.

mod archive;
mod host;
mod log;
mod redact;
mod tunnel;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use clap::{Args, ValueHint};
use seikan_node::control::{RuntimeDirs, ask};
use seikan_ui::{Interrupt, time};

use crate::output::counted;
use crate::recording::Draft;
use crate::screen::{number, printable};
use crate::service::host_name;
use archive::Report;
use tunnel::Tunnel;

/// Options of `bugreport`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan bugreport                     report on this host and all tunnels that run here\n  \
    sudo seikan bugreport office -o a.tar.gz  report on one, which may also have failed to start\n\n\
    For each tunnel the archive has its configuration, status, metrics, last log lines, firewall rules, path on this host \
    and a recording of 5 s, which sends echo requests as `seikan record` does. Private keys, preshared keys, credentials, \
    tokens and the commands of hooks are left out. Addresses, also public ones, public keys, and names of hosts, peers \
    and programs are not: read the archive before you send it. Its README.txt lists the parts, and those that could not \
    be collected with the reason. Ctrl-C ends a recording early.\n\
    Exit status: 0 if an archive was written, also if parts are missing.")]
pub struct Arguments {
    /// Interface, or the file that it was started from [default: all running tunnels]
    #[arg(value_name = "IFACE|FILE", value_hint = ValueHint::AnyPath)]
    target: Option<String>,
    /// Archive, which must not exist [default: seikan-bugreport-HOST-DATE.tar.gz]
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
}

/// Collects the parts and writes the archive.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    const FAILED: &str = "cannot report";
    let given = arguments.target.as_deref().map(Tunnel::named).transpose();
    let given = given.context(FAILED)?;
    let title = title();
    let default = || format!("{title}.tar.gz").into();
    let path = arguments.output.clone().unwrap_or_else(default);
    let draft = Draft::create_new(&path)?;
    let interrupt = Interrupt::new();
    let _signals = interrupt.catch_signals()?;

    let dirs = RuntimeDirs::for_client(given.as_ref().map(Tunnel::name));
    let mut report = Report::default();
    host::collect(&mut report);
    let tunnels = match given {
        Some(tunnel) => vec![tunnel],
        None => running(&dirs, &mut report),
    };
    for tunnel in &tunnels {
        tunnel.collect(&dirs, &interrupt, &mut report);
    }
    let contents = report.write(&title, draft.file()).context(FAILED)?;
    let bytes = draft.keep_for_user()?;

    let mut out = std::io::stdout();
    let parts = counted(contents.parts, "part");
    writeln!(out, "{}: {parts}, {} bytes", path.display(), number(bytes))?;
    for (part, reason) in &contents.missing {
        writeln!(out, "missing: {}: {}", printable(part), printable(reason))?;
    }
    writeln!(
        out,
        "It contains addresses, also public ones, and names of hosts, peers and programs:\n\
         read it before you send it. README.txt in it lists the parts."
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the running tunnels.
fn running(dirs: &RuntimeDirs, report: &mut Report) -> Vec<Tunnel> {
    let names = ask::running(dirs).map_err(anyhow::Error::from);
    let tunnels = names.and_then(|names| {
        if names.is_empty() {
            bail!("none is running; name one that does not start: `seikan bugreport IFACE`");
        }
        names.iter().map(|name| Tunnel::named(name)).collect()
    });
    tunnels.unwrap_or_else(|error| {
        report.miss("tunnels", &error);
        Vec::new()
    })
}

/// Returns the name of the archive and of the directory in it.
fn title() -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' {
            c
        } else {
            '-'
        }
    };
    let host: String = host_name().chars().map(plain).collect();
    let date = time::utc_now().replace(' ', "-").replace(':', "");
    format!("seikan-bugreport-{host}-{date}")
}

/// Runs a program to its end and returns its output.
fn output_of(command: &mut Command) -> anyhow::Result<String> {
    let program = command.get_program().display().to_string();
    command.stdin(Stdio::null()).env("LC_ALL", "C");
    let output = command
        .output()
        .with_context(|| format!("cannot run `{program}`"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let first = errors.lines().next().unwrap_or_default();
        bail!("`{program}` failed ({}): {first}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
