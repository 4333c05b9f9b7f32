//! The configuration's commands around the life of the interface, run by the monitor ([`crate::monitor`]) with the privileges
//! that the daemon has given up.

use seikan_config::Config;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// When a command is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
}

/// Runs all commands of one moment, in order, and stops at the first that fails.
///
/// # Errors
/// See [`HookError`].
pub fn run(config: &Config, moment: Moment) -> Result<(), HookError> {
    let lines = match moment {
        Moment::PreUp => &config.hooks.pre_up,
        Moment::PostUp => &config.hooks.post_up,
        Moment::PreDown => &config.hooks.pre_down,
        Moment::PostDown => &config.hooks.post_down,
    };
    for line in lines {
        let command = config.name.fill_in(line);
        let mut shell = Command::new("/bin/sh");
        let status = shell.arg("-c").arg(&command).stdin(Stdio::null()).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => {
                return Err(HookError::Failed {
                    moment,
                    command,
                    status,
                });
            }
            Err(source) => {
                return Err(HookError::Run {
                    moment,
                    command,
                    source,
                });
            }
        }
    }
    Ok(())
}

/// Why a command failed, as the monitor tells it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    command: String,
    /// As waitpid(2) has it, or the error's number.
    outcome: Result<i32, i32>,
}

impl From<HookError> for Failure {
    fn from(error: HookError) -> Failure {
        match error {
            HookError::Failed {
                command, status, ..
            } => Failure {
                command,
                outcome: Ok(status.into_raw()),
            },
            HookError::Run {
                command, source, ..
            } => Failure {
                command,
                outcome: Err(source.raw_os_error().unwrap_or(0)),
            },
        }
    }
}

impl Failure {
    /// The error that it was.
    pub fn of(self, moment: Moment) -> HookError {
        let command = self.command;
        match self.outcome {
            Ok(status) => HookError::Failed {
                moment,
                command,
                status: ExitStatus::from_raw(status),
            },
            Err(number) => HookError::Run {
                moment,
                command,
                source: io::Error::from_raw_os_error(number),
            },
        }
    }
}
