//! The configuration's commands around the life of the interface.
//!
//! They are run by a process that is forked before the daemon gives up its privileges and that
//! outlives it: should the daemon be killed, that process runs the commands of the end and takes
//! back what the journal says. See `seikan_sys::hooks` for why it is safe to have.

use crate::config::{Config, Hooks as Commands, InterfaceName};
use crate::setup::Change;
use crate::state;
use seikan_sys::hooks::HookRunner;
use std::io;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

/// When a command is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before the interface is made.
    PreUp,
    /// Once it carries traffic.
    PostUp,
    /// Before it is taken away.
    PreDown,
    /// After it is gone.
    PostDown,
}

/// Why a command did not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// It failed.
    #[error("the {moment:?} hook `{command}` failed ({status}); run it by hand to see why")]
    Failed {
        /// When.
        moment: Moment,
        /// The command, `%i` filled in.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// It could not be run.
    #[error("cannot run the {moment:?} hook `{command}`: {source}")]
    Run {
        /// When.
        moment: Moment,
        /// The command.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// The process that runs them could not be started.
    #[error("cannot start the process that runs the hooks: {0}")]
    Start(io::Error),
}

/// The commands and the process that runs them.
#[derive(Debug)]
pub struct Hooks {
    /// `None` where none is needed and none could be had.
    runner: Option<HookRunner>,
    commands: Vec<(Moment, String)>,
}

impl Hooks {
    /// Forks the process that runs the commands. With a `journal`, it also cleans up should this
    /// process be killed.
    pub fn start(config: &Config, journal: Option<PathBuf>) -> Result<Hooks, HookError> {
        let commands = in_order(&config.hooks, &config.name);
        let lines = commands.iter().map(|(_, line)| line.clone()).collect();
        let at_the_end: Vec<String> = commands
            .iter()
            .filter(|(moment, _)| matches!(moment, Moment::PreDown | Moment::PostDown))
            .map(|(_, line)| line.clone())
            .collect();
        let daemon = std::process::id();
        let clean_up = move || {
            let Some(journal) = journal else { return };
            state::clean_up_after(daemon, &journal, |changes: &[Change]| {
                if changes.contains(&Change::Hooks) {
                    at_the_end.iter().for_each(|line| run_alone(line));
                }
            });
        };
        match HookRunner::start_with(lines, clean_up) {
            Ok(runner) => Ok(Hooks {
                runner: Some(runner),
                commands,
            }),
            // A program of many threads, such as a test, cannot fork; it is not killed, either.
            Err(_) if commands.is_empty() => Ok(Hooks {
                runner: None,
                commands,
            }),
            Err(error) => Err(HookError::Start(error)),
        }
    }

    /// Whether there is any command.
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Runs all commands of one moment, in order, and stops at the first that fails.
    pub fn run(&mut self, wanted: Moment) -> Result<(), HookError> {
        let Some(runner) = &mut self.runner else {
            return Ok(());
        };
        for (number, (moment, command)) in self.commands.iter().enumerate() {
            if *moment != wanted {
                continue;
            }
            let status = runner.run(number).map_err(|source| HookError::Run {
                moment: wanted,
                command: command.clone(),
                source,
            })?;
            if !status.success() {
                return Err(HookError::Failed {
                    moment: wanted,
                    command: command.clone(),
                    status,
                });
            }
        }
        Ok(())
    }
}

fn in_order(hooks: &Commands, interface: &InterfaceName) -> Vec<(Moment, String)> {
    let lists = [
        (Moment::PreUp, &hooks.pre_up),
        (Moment::PostUp, &hooks.post_up),
        (Moment::PreDown, &hooks.pre_down),
        (Moment::PostDown, &hooks.post_down),
    ];
    let all = lists.into_iter().flat_map(|(moment, list)| {
        list.iter()
            .map(move |line| (moment, interface.fill_in(line)))
    });
    all.collect()
}

/// Runs a command with nobody to tell how it went.
fn run_alone(line: &str) {
    let _ = Command::new("/bin/sh")
        .args(["-c", line])
        .stdin(Stdio::null())
        .status();
}
