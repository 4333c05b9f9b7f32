//! `seikan IFACE`, and a link to the program with the name `wireguard-go`: an interface that other programs
//! configure, as wireguard-go has. wg-quick starts it where the kernel has no WireGuard.
//!
//! Options and environment variables are those of wireguard-go: the interface and the socket for
//! `wg` exist once the command returns, and the process ends when the interface is deleted.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::process::{ExitCode, Stdio};

use anyhow::Context;
use clap::Parser;
use seikan_config::{Diagnostic, InterfaceName};
use seikan_node::options::UpOptions;
use seikan_node::up::{Given, Observer, UpSummary, up_unconfigured};
use seikan_sys::inherited;
use tracing::info;
use tracing_subscriber::filter::LevelFilter;

use super::up::{describe, log_warning};
use crate::background::{self, Starter};
use crate::logging::LogArguments;
use crate::manager::Manager;
use crate::output;

/// Name of a link to this program, by which it behaves like wireguard-go.
const LINK: &str = "wireguard-go";
/// Environment variable: descriptor of an open TUN device.
const TUN: &str = "WG_TUN_FD";
/// Environment variable: descriptor of a listening socket for `wg`.
const UAPI: &str = "WG_UAPI_FD";
/// Environment variable: with the value 1 the process stays in the foreground.
const FOREGROUND: &str = "WG_PROCESS_FOREGROUND";
/// Environment variable: the log level (`verbose`, `error` or `silent`).
const LOG_LEVEL: &str = "LOG_LEVEL";

/// Run a WireGuard interface that other programs configure
#[derive(Debug, Parser)]
#[command(name = LINK, display_name = "seikan", version, max_term_width = 100)]
#[command(
    after_help = "Behaves as wireguard-go does: creates the interface and the socket for `wg`, and runs until \
    the interface is deleted or a signal arrives. Environment: WG_TUN_FD, WG_UAPI_FD, WG_PROCESS_FOREGROUND, \
    LOG_LEVEL."
)]
pub struct Arguments {
    /// Stay in the foreground
    #[arg(short, long)]
    foreground: bool,
    /// Run as the background process, with a socket to the starting process as standard input
    #[arg(long, hide = true, conflicts_with = "foreground")]
    detached: bool,
    /// Interface
    #[arg(value_name = "IFACE")]
    name: InterfaceName,
}

impl Arguments {
    /// Parses the arguments of this process if it was started by the name of wireguard-go; prints
    /// help or an error and exits if they ask for it.
    pub fn of_link(words: &[OsString]) -> Option<Arguments> {
        let program = words.first().map(Path::new);
        let is_link = program.and_then(Path::file_name) == Some(OsStr::new(LINK));
        is_link.then(|| Arguments::parse_from(words))
    }

    /// Returns the arguments if the words after the program's name are `[-f] IFACE`. `is_word`:
    /// whether a word may be an interface, and not a misspelt verb.
    pub fn of_words(words: &[OsString], is_word: impl Fn(&str) -> bool) -> Option<Arguments> {
        let words: Option<Vec<&str>> = words.iter().skip(1).map(|word| word.to_str()).collect();
        let (option, name) = match words?[..] {
            [name] => ("", name),
            [option @ ("-f" | "--foreground" | "--detached"), name] => (option, name),
            _ => return None,
        };
        let detached = option == "--detached";
        // The detached process has checked the name before.
        if name.starts_with('-') || !detached && !is_word(name) {
            return None;
        }
        Some(Arguments {
            foreground: !option.is_empty() && !detached,
            detached,
            name: name.parse().ok()?,
        })
    }
}

/// Runs the interface, here or in the background.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.detached {
        return Ok(run_detached(arguments));
    }
    if !arguments.foreground && env::var_os(FOREGROUND).is_none_or(|value| value != "1") {
        return start_detached(arguments);
    }
    log().start(false)?;
    let mut events = Events::Foreground(Manager::connect());
    serve(arguments, &mut events)?;
    Ok(ExitCode::SUCCESS)
}

/// Starts the background process, which inherits the given descriptors.
fn start_detached(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let words = vec!["--detached".into(), arguments.name.to_string().into()];
    let logs = !matches!(log_level().as_deref(), None | Some("silent"));
    let stream = || {
        if logs {
            Stdio::inherit()
        } else {
            Stdio::null()
        }
    };
    Ok(match background::start(words, stream(), stream())? {
        Some(_) => ExitCode::SUCCESS,
        None => ExitCode::FAILURE,
    })
}

/// Runs the background process.
fn run_detached(arguments: &Arguments) -> ExitCode {
    let mut events = Events::Detached(Starter::connect());
    let outcome = background::detach()
        .and_then(|()| log().start(false))
        .and_then(|()| serve(arguments, &mut events));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let reported = match &mut events {
                Events::Detached(starter) => starter.fail(&error),
                Events::Foreground(_) => Ok(()),
            };
            // After a successful start the starting process is gone.
            if reported.is_err() {
                output::error(&error);
            }
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: &Arguments, events: &mut Events) -> anyhow::Result<()> {
    let given = Given {
        device: inherited::take(TUN)?,
        uapi: inherited::take_listener(UAPI)?,
    };
    let name = arguments.name.clone();
    up_unconfigured(name, given, &UpOptions::default(), events)
        .with_context(|| format!("cannot run interface {}", arguments.name))
}

fn log_level() -> Option<String> {
    env::var(LOG_LEVEL).ok().filter(|level| !level.is_empty())
}

/// Returns the options of the log: of the level that `LOG_LEVEL` has, as wireguard-go understands it, or else
/// `SEIKAN_LOG`.
fn log() -> LogArguments {
    match log_level().as_deref() {
        Some("verbose" | "debug") => LogArguments::at(LevelFilter::DEBUG),
        Some("silent") => LogArguments::at(LevelFilter::OFF),
        Some(_) => LogArguments::at(LevelFilter::ERROR),
        None if env::var_os("SEIKAN_LOG").is_some() => LogArguments::default(),
        None => LogArguments::at(LevelFilter::WARN),
    }
}

/// Receiver of the node's events.
enum Events {
    /// Events in the foreground, reported to the service manager.
    Foreground(Manager),
    /// Events in the background, reported to the starting process.
    Detached(Starter),
}

impl Observer for Events {
    fn warn(&mut self, warning: Diagnostic) {
        log_warning(&warning);
        // Without a log level, the background process writes no log.
        if let (Events::Detached(starter), None) = (self, log_level()) {
            let _ = starter.warn(warning);
        }
    }

    fn is_up(&mut self, summary: &UpSummary) -> io::Result<()> {
        let line = describe(summary);
        info!(target: "tunnel", "{line}");
        match self {
            Events::Foreground(manager) => {
                manager.notify_ready(&line);
                Ok(())
            }
            Events::Detached(starter) => starter.is_up(&line),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &str) -> Option<(String, bool, bool)> {
        let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
        let parsed = Arguments::of_words(&words, |word| word != "statsu")?;
        let name = parsed.name.to_string();
        Some((name, parsed.foreground, parsed.detached))
    }

    #[test]
    fn an_interface_is_one_word_after_an_option_at_most() {
        let wg0 = |foreground, detached| Some(("wg0".to_owned(), foreground, detached));
        assert_eq!(parsed("seikan wg0"), wg0(false, false));
        assert_eq!(parsed("seikan -f wg0"), wg0(true, false));
        assert_eq!(parsed("seikan --foreground wg0"), wg0(true, false));
        assert_eq!(parsed("seikan --detached wg0"), wg0(false, true));
        for other in [
            "seikan",
            "seikan -f",
            "seikan --version",
            "seikan wg0 wg1",
            "seikan -x wg0",
            "seikan -f wg0 wg1",
            "seikan statsu",
            "seikan -f statsu",
            "seikan wg/0",
            "seikan wireguard-interface",
        ] {
            assert_eq!(parsed(other), None, "{other}");
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
