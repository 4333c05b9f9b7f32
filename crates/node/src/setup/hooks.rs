//! Hooks: the configuration's commands at certain moments, run by the monitor, which keeps the privileges.

use seikan_config::Config;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};

/// Moment of a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Moment {
    /// Before the interface is created.
    PreUp,
    /// When the tunnel is up.
    PostUp,
    /// Before the interface is removed.
    PreDown,
    /// After it was removed.
    PostDown,
}

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The command failed.
    #[error("the {moment:?} hook `{command}` failed ({status}); run it by hand to see why")]
    Failed {
        /// Its moment.
        moment: Moment,
        /// The command, with `%i` replaced.
        command: String,
        /// Its exit status.
        status: ExitStatus,
    },
    /// The command could not be run.
    #[error("cannot run the {moment:?} hook `{command}`: {source}")]
    Run {
        /// Its moment.
        moment: Moment,
        /// The command.
        command: String,
        /// The error.
        source: io::Error,
    },
}

/// Runs all commands of one moment, in order, up to the first failure.
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

/// Failure of a command, as the monitor reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    command: String,
    /// Wait status as of waitpid(2), or the error number.
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
    /// Converts it to the error of a hook.
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
