//! `seikan up`: from a configuration file to a running tunnel.
//!
//! In the foreground the node runs in this process. With `-d` this process starts the program again
//! with `--detached` and a socket for standard input, shows what comes over it, and returns once
//! that says that the interface carries traffic; the other goes on in a session of its own.

use std::ffi::{CStr, OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueHint};
use nix::sys::prctl;
use sd_notify::NotifyState;
use seikan_config::{Config, Diagnostic, Diagnostics};
use seikan_node::up::{Observer, UpOptions, UpSummary, up};

use crate::cli::OverrideArguments;
use crate::manager::Manager;
use crate::output;

/// What `up` is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan up ./wg0.conf           run a wg-quick file until Ctrl-C\n  \
    sudo seikan up -d office            run /etc/seikan/office.toml in the background\n\n\
    An interface's name is looked up as /etc/seikan/NAME.toml, /etc/seikan/NAME.conf and \
    /etc/wireguard/NAME.conf. A .conf file speaks WireGuard, a .toml file the native protocol, unless \
    they say otherwise. Needs CAP_NET_ADMIN. On SIGINT, SIGTERM and `seikan down` everything that was \
    set up is taken back; SIGHUP does nothing.")]
pub struct Arguments {
    /// Configuration file, or the name of an interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    target: String,
    /// Return once the interface carries traffic, and run in the background
    #[arg(short, long)]
    daemon: bool,
    /// Where the background process writes what it has to say; nowhere if left out
    #[arg(long, value_name = "FILE", requires = "daemon", value_hint = ValueHint::FilePath)]
    log: Option<PathBuf>,
    /// This is the background process: standard input is a socket to the one that started it
    #[arg(long, hide = true, conflicts_with = "daemon")]
    detached: bool,
    #[command(flatten)]
    overrides: OverrideArguments,
}

/// Reads the configuration, shows what is odd about it, and starts the node.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.detached {
        return Ok(run_detached(arguments));
    }
    let Some((config, path)) = read(arguments)? else {
        return Ok(ExitCode::FAILURE);
    };
    if arguments.daemon {
        return start_detached(arguments);
    }
    let mut observer = Foreground {
        interface: config.name.to_string(),
        since: None,
        manager: Manager::connect(),
    };
    let outcome = up(&config, &options(path), &mut observer);
    observer.has_stopped();
    outcome?;
    Ok(ExitCode::SUCCESS)
}

/// The configuration and its file, or nothing after showing what is wrong.
fn read(arguments: &Arguments) -> anyhow::Result<Option<(Config, PathBuf)>> {
    let overrides = match arguments.overrides.with_environment() {
        Ok(overrides) => overrides,
        Err(faults) => {
            output::diagnostics(&faults);
            return Ok(None);
        }
    };
    let parsed = seikan_config::load(&arguments.target, &overrides);
    // The one who started a background process has shown them.
    if !arguments.detached || parsed.config.is_none() {
        output::diagnostics(&parsed.diagnostics);
    }
    Ok(parsed.config.zip(parsed.path))
}

fn options(path: PathBuf) -> UpOptions {
    UpOptions {
        config_file: Some(path),
        ..UpOptions::default()
    }
}

/// Shows on the terminal, and to systemd, how things go.
struct Foreground {
    interface: String,
    since: Option<Instant>,
    manager: Manager,
}

impl Foreground {
    /// One line at the end, if there was one at the beginning.
    fn has_stopped(&self) {
        if let Some(since) = self.since {
            let seconds = since.elapsed().as_secs();
            print(&format!(
                "{} is down after {}",
                self.interface,
                span(seconds)
            ));
        }
    }
}

impl Observer for Foreground {
    fn warn(&mut self, warning: Diagnostic) {
        show(warning);
    }

    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()> {
        self.since = Some(Instant::now());
        let line = describe(summary);
        print(&line);
        self.manager
            .tell(&[NotifyState::Ready, NotifyState::Status(&line)]);
        Ok(())
    }
}

/// One line on standard output; a reader who has gone does not stop the tunnel.
fn print(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

fn show(warning: Diagnostic) {
    let mut warnings = Diagnostics::default();
    warnings.push(warning);
    output::diagnostics(&warnings);
}

fn describe(summary: &UpSummary) -> String {
    let UpSummary {
        interface,
        protocol,
        port,
        mtu,
    } = summary;
    format!("{interface} is up: protocol {protocol}, port {port}, MTU {mtu}")
}

fn span(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// What the background process says over its standard input: a kind, a space, a text in JSON.
const UP: &str = "up";
const WARNING: &str = "warning";
const ERROR: &str = "error";
/// What the background process is called; else it would be `exe`, as the file that it is started from.
const NAME: &CStr = c"seikan";

/// Starts the background process and shows what it says until it is up or has ended.
fn start_detached(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (ours, theirs) = UnixStream::pair().context("cannot make a pair of sockets")?;
    let (output, errors) = match &arguments.log {
        None => (Stdio::null(), Stdio::null()),
        Some(path) => {
            let log = open_log(path)
                .with_context(|| format!("cannot write to the log {}", path.display()))?;
            (log.try_clone()?.into(), log.into())
        }
    };
    let mut child = Command::new("/proc/self/exe")
        .arg0(OsStr::from_bytes(NAME.to_bytes()))
        .args(detached_arguments(std::env::args_os().skip(1)))
        .stdin(OwnedFd::from(theirs))
        .stdout(output)
        .stderr(errors)
        .spawn()
        .context("cannot start the background process")?;
    for line in BufReader::new(ours).lines() {
        let line = line.context("cannot hear the background process")?;
        let (kind, text) = line.split_once(' ').unwrap_or_default();
        let text: String = serde_json::from_str(text).unwrap_or_default();
        match kind {
            UP => {
                print(&text);
                return Ok(ExitCode::SUCCESS);
            }
            WARNING => {
                let _ = writeln!(io::stderr(), "{text}");
            }
            _ => output::error(&anyhow::anyhow!(text)),
        }
    }
    let status = child
        .wait()
        .context("cannot wait for the background process")?;
    if status.code().is_none() {
        anyhow::bail!("the background process was killed ({status}); run it without -d to see why");
    }
    Ok(ExitCode::FAILURE)
}

fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).open(path)
}

/// The same words, but for those about the background.
fn detached_arguments(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut result = Vec::new();
    let mut skip = false;
    for word in words {
        if std::mem::take(&mut skip) {
            continue;
        }
        match word.to_str() {
            Some("-d" | "--daemon") => {}
            Some("--log") => skip = true,
            Some(text) if text.starts_with("--log=") => {}
            _ => result.push(word),
        }
    }
    // After the verb.
    result.insert(result.len().min(1), "--detached".into());
    result
}

/// The background process.
fn run_detached(arguments: &Arguments) -> ExitCode {
    // Under another name it does the same.
    let _ = prctl::set_name(NAME);
    let mut starter = Detached {
        socket: starter().ok(),
    };
    let outcome = seikan_sys::process::new_session()
        .context("cannot leave the terminal")
        .and_then(|()| read(arguments))
        .and_then(|read| read.context("the configuration has changed and cannot be used now"))
        .and_then(|(config, path)| Ok(up(&config, &options(path), &mut starter)?));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            // The one who started us has gone once we were up.
            let _ = starter.say(ERROR, &format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// The socket to the one who started this process.
fn starter() -> io::Result<UnixStream> {
    Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
}

/// Tells the one who started it until it is up, and the log.
struct Detached {
    socket: Option<UnixStream>,
}

impl Detached {
    fn say(&mut self, kind: &str, text: &str) -> io::Result<()> {
        match &mut self.socket {
            Some(socket) => {
                let text = serde_json::to_string(text)?;
                socket.write_all(format!("{kind} {text}\n").as_bytes())
            }
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

impl Observer for Detached {
    fn warn(&mut self, warning: Diagnostic) {
        let mut warnings = Diagnostics::default();
        warnings.push(warning);
        let _ = self.say(WARNING, &warnings.render(false));
        output::diagnostics(&warnings);
    }

    /// If the one who waits has gone (Ctrl-C), nobody wants the tunnel.
    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()> {
        let line = describe(summary);
        print(&line);
        self.say(UP, &line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detached(words: &[&str]) -> Vec<OsString> {
        detached_arguments(words.iter().map(OsString::from))
    }

    #[test]
    fn the_background_process_gets_the_same_words() {
        let words = ["up", "-d", "--log", "x", "--mtu", "1400", "--log=y", "wg0"];
        assert_eq!(
            detached(&words),
            ["up", "--detached", "--mtu", "1400", "wg0"]
        );
    }

    #[test]
    fn spans_have_two_units() {
        assert_eq!(span(59), "59 s");
        assert_eq!(span(61), "1 min 1 s");
        assert_eq!(span(7_380), "2 h 3 min");
        assert_eq!(span(200_000), "2 d 7 h");
    }
}
