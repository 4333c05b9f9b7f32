//! `seikan up`: runs a tunnel from a configuration file.
//!
//! In the foreground the node runs in this process. With `-d` this process starts the program again with
//! `--detached` ([`crate::background`]), and returns once the interface is up.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context;
use clap::{Args, ValueHint};
use seikan_config::{Config, Diagnostic, Diagnostics};
use seikan_node::control::RuntimeDirs;
use seikan_node::options::UpOptions;
use seikan_node::up::{Observer, UpError, UpSummary, up};
use tracing::field::display;
use tracing::warn;

use crate::background::{self, Starter};
use crate::logging::LogArguments;
use crate::manager::Manager;
use crate::output;
use crate::overrides::OverrideArguments;
use crate::userspace::{self, UserspaceArguments};

/// Options of `up`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    sudo seikan up ./wg0.conf    run a wg-quick file until Ctrl-C\n  \
    sudo seikan up -d office     run /etc/seikan/office.toml in the background\n  \
    seikan up ./wg0.conf --userspace --socks 1080    run without root; programs use SOCKS5\n\n\
    The name of an interface stands for /etc/seikan/NAME.toml, /etc/seikan/NAME.conf or \
    /etc/wireguard/NAME.conf. A .conf file uses WireGuard, a .toml file the native protocol, unless they set \
    another. Needs CAP_NET_ADMIN, except with --userspace. SIGINT, SIGTERM and `seikan down` stop the tunnel and revert its settings; \
    SIGHUP applies a changed file, as `seikan reload` does, unless the tunnel has a terminal.\n\n\
    Exit status: 0 if the tunnel was stopped, or runs in the background; 2 if options, configuration or environment cannot be \
    used, so that another start fails too; 1 after any other failure.")]
pub struct Arguments {
    /// Configuration file or interface
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    target: String,
    /// Run in the background; return once the interface is up
    #[arg(short, long)]
    daemon: bool,
    /// Log file of the background process, of at most 1 MiB [default: IFACE.log in /run/seikan, or
    /// with --userspace in the user's runtime directory]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    log_file: Option<PathBuf>,
    #[command(flatten)]
    log: LogArguments,
    /// Run as the background process, with a socket to the starting process as standard input
    #[arg(long, hide = true, conflicts_with = "daemon")]
    detached: bool,
    #[command(flatten)]
    userspace: UserspaceArguments,
    #[command(flatten)]
    overrides: OverrideArguments,
}

/// Exit status if the configuration cannot be used, as after wrong usage. The unit of systemd does not start the tunnel
/// again then (`RestartPreventExitStatus=`).
const UNUSABLE: u8 = 2;

impl Arguments {
    /// Returns the log file of the background process.
    fn log_file(&self, dirs: &RuntimeDirs, config: &Config) -> PathBuf {
        let default = || dirs.log(config.name.as_str());
        self.log_file.clone().unwrap_or_else(default)
    }

    /// Returns the options of the node for a configuration file.
    fn options(&self, path: PathBuf, dirs: RuntimeDirs) -> anyhow::Result<UpOptions> {
        // A terminal that closes sends SIGHUP as well, and the file may be half written then.
        let has_terminal = File::open("/dev/tty").is_ok();
        // The running program, also after an upgrade has replaced its file.
        let reload = [
            "/proc/self/exe".into(),
            "reload".into(),
            path.clone().into(),
        ];
        Ok(UpOptions {
            reload: if has_terminal {
                Vec::new()
            } else {
                reload.to_vec()
            },
            config_file: Some(path),
            log: None,
            userspace: self.userspace.services()?,
            dirs,
        })
    }
}

/// Reads the configuration, prints its diagnostics, and runs the tunnel.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.detached {
        return Ok(run_detached(arguments));
    }
    let Some((config, path)) = read(arguments)? else {
        return Ok(ExitCode::from(UNUSABLE));
    };
    let dirs = arguments.userspace.dirs()?;
    let options = arguments.options(path, dirs.clone())?;
    let mut warnings = Diagnostics::default();
    arguments
        .userspace
        .warnings()
        .for_each(|warning| warnings.push(warning));
    output::diagnostics(&warnings);
    if arguments.daemon {
        dirs.create_run()?;
        return start_detached(&arguments.log_file(&dirs, &config));
    }
    if arguments.log_file.is_some() {
        anyhow::bail!("cannot use --log-file without -d: the log is on standard error");
    }
    arguments.log.start(false)?;
    let mut observer = Foreground {
        log: &arguments.log,
        interface: config.name.to_string(),
        started_at: None,
        manager: Manager::connect(),
    };
    let outcome = up(&config, &options, &mut observer);
    observer.print_end();
    match outcome {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ (UpError::Userspace(_) | UpError::WebProxy(_))) => {
            output::error(&error.into());
            Ok(ExitCode::from(UNUSABLE))
        }
        Err(error) => Err(error.into()),
    }
}

/// Returns the configuration and its file; `None` after printing errors.
fn read(arguments: &Arguments) -> anyhow::Result<Option<(Config, PathBuf)>> {
    let overrides = match arguments.overrides.with_environment() {
        Ok(overrides) => overrides,
        Err(faults) => {
            output::diagnostics(&faults);
            return Ok(None);
        }
    };
    let parsed = seikan_config::load(&arguments.target, &overrides);
    // The starting process has printed warnings already.
    if !arguments.detached || parsed.config.is_none() {
        output::diagnostics(&parsed.diagnostics.without_notes());
    }
    Ok(parsed.config.zip(parsed.path))
}

/// Reports to the terminal and to systemd.
struct Foreground<'a> {
    log: &'a LogArguments,
    interface: String,
    started_at: Option<Instant>,
    manager: Manager,
}

impl Foreground<'_> {
    /// Prints a line at the end, if the tunnel was up.
    fn print_end(&self) {
        if let Some(started_at) = self.started_at {
            let seconds = started_at.elapsed().as_secs();
            print(&format!(
                "{} is down after {}",
                self.interface,
                format_duration(seconds)
            ));
        }
    }
}

impl Observer for Foreground<'_> {
    fn warn(&mut self, warning: Diagnostic) {
        if self.log.is_for_reader() {
            output::diagnostic(warning);
        } else {
            log_warning(&warning);
        }
    }

    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()> {
        self.started_at = Some(Instant::now());
        let line = describe(summary);
        print(&line);
        self.manager.notify_ready(&line);
        Ok(())
    }
}

/// Reports a warning as an event of the log.
pub fn log_warning(warning: &Diagnostic) {
    let help = warning.help.as_deref().map(display);
    warn!(target: "tunnel", help, "{}", warning.message);
}

/// Prints a line. A closed standard output does not stop the tunnel.
fn print(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Returns a line about a tunnel that is up.
pub fn describe(summary: &UpSummary) -> String {
    let UpSummary {
        interface,
        protocol,
        port,
        mtu,
        listeners,
    } = summary;
    let mut line = format!("{interface} is up: protocol {protocol}, port {port}, MTU {mtu}");
    for listener in listeners {
        line.push_str(", ");
        line.push_str(&userspace::describe(listener));
    }
    line
}

fn format_duration(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// Starts the background process and prints its messages until it is up or has ended.
fn start_detached(path: &Path) -> anyhow::Result<ExitCode> {
    let log =
        open_log(path).with_context(|| format!("cannot write to the log {}", path.display()))?;
    let words = detached_arguments(std::env::args_os().skip(1));
    match background::start(words, log.try_clone()?.into(), log.into())? {
        Some(line) => {
            print(&line);
            Ok(ExitCode::SUCCESS)
        }
        None => Ok(ExitCode::FAILURE),
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    // The file is also opened for reading, because a log that is too long is shortened.
    let mut options = OpenOptions::new();
    let options = options.read(true).append(true).create(true).mode(0o600);
    options.open(path)
}

/// Returns the arguments for the background process.
fn detached_arguments(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut result = Vec::new();
    for word in words {
        match word.to_str() {
            Some("-d" | "--daemon") => {}
            _ => result.push(word),
        }
    }
    // The option follows the name of the verb.
    result.insert(result.len().min(1), "--detached".into());
    result
}

/// Runs the background process.
fn run_detached(arguments: &Arguments) -> ExitCode {
    let mut observer = Detached(Starter::connect());
    let outcome = background::detach()
        .and_then(|()| arguments.log.start(true))
        .and_then(|()| read(arguments))
        .and_then(|read| read.context("cannot use the configuration: it has just changed"))
        .and_then(|(config, path)| {
            let dirs = arguments.userspace.dirs()?;
            let log = Some(arguments.log_file(&dirs, &config));
            let options = UpOptions {
                log,
                ..arguments.options(path, dirs)?
            };
            Ok(up(&config, &options, &mut observer)?)
        });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&error);
            // After a successful start the starting process is gone.
            let _ = observer.0.fail(&error);
            ExitCode::FAILURE
        }
    }
}

/// Reports to the log, and to the starting process until the tunnel is up.
struct Detached(Starter);

impl Observer for Detached {
    fn warn(&mut self, warning: Diagnostic) {
        log_warning(&warning);
        let _ = self.0.warn(warning);
    }

    /// Fails if the starting process is gone (Ctrl-C), which stops the tunnel.
    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()> {
        let line = describe(summary);
        print(&line);
        self.0.is_up(&line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detached(words: &[&str]) -> Vec<OsString> {
        detached_arguments(words.iter().map(OsString::from))
    }

    #[test]
    fn the_background_process_gets_the_same_arguments() {
        let words = ["up", "-d", "--log", "debug", "--mtu", "1400", "wg0"];
        assert_eq!(
            detached(&words),
            ["up", "--detached", "--log", "debug", "--mtu", "1400", "wg0"]
        );
    }

    #[test]
    fn durations_have_two_units() {
        assert_eq!(format_duration(59), "59 s");
        assert_eq!(format_duration(61), "1 min 1 s");
        assert_eq!(format_duration(7_380), "2 h 3 min");
        assert_eq!(format_duration(200_000), "2 d 7 h");
    }
}
