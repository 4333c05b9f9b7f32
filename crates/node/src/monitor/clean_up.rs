//! Undoes the changes of a tunnel that was killed with its monitor.

use crate::control::socket::Lock;
use crate::control::{ControlError, RuntimeDirs};
use crate::journal::change::Change;
use crate::journal::{Journal, JournalError};
use seikan_config::{Diagnostic, Severity};
use std::fs;
use std::os::unix::net::UnixStream;

/// Undoes the changes of an instance that was killed, and removes its sockets; returns `false` if there are
/// none. Hooks are not run. `warn` gets the failures.
///
/// # Errors
/// Another process is cleaning up, or the name is in use.
pub fn clean_up(
    dirs: &RuntimeDirs,
    name: &str,
    warn: &mut dyn FnMut(Diagnostic),
) -> Result<bool, CleanUpError> {
    if !crate::journal::is_left(&dirs.run, name) {
        return Ok(false);
    }
    let _lock = Lock::take(dirs, name)?;
    let (mut journal, left) = Journal::open(&dirs.run, name)?;
    let remaining = take_back(name, left, warn);
    journal.settle(remaining)?;
    drop(journal);
    let _ = fs::remove_file(dirs.control(name));
    // If another program owned the socket, it would answer.
    let uapi = dirs.uapi(name);
    if UnixStream::connect(&uapi).is_err() {
        let _ = fs::remove_file(uapi);
    }
    Ok(true)
}

/// Why a clean-up failed.
#[derive(Debug, thiserror::Error)]
pub enum CleanUpError {
    /// The name is in use.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The journal is in use.
    #[error(transparent)]
    State(#[from] JournalError),
}

/// Undoes the changes of an earlier instance, with a warning, and returns those that could not be undone. Changes that a
/// tunnel of this name never makes are skipped, whoever wrote them into the journal.
pub fn take_back(name: &str, left: Vec<Change>, warn: &mut dyn FnMut(Diagnostic)) -> Vec<Change> {
    let (left, foreign): (Vec<_>, Vec<_>) =
        left.into_iter().partition(|change| change.may_be_of(name));
    if !foreign.is_empty() {
        let message = format!(
            "the journal of an earlier tunnel lists {} changes that a tunnel of this name never makes; they were not undone",
            foreign.len()
        );
        let warning = Diagnostic::new(Severity::Warning, name, message);
        warn(warning.with_help("only root can write the journal: find out who did"));
    }
    if left.is_empty() {
        return Vec::new();
    }
    let has_hooks = left.contains(&Change::Hooks);
    let (remaining, failures) = crate::journal::take_back(left);
    let message = if remaining.is_empty() {
        "an earlier tunnel of this name was killed; its changes were undone"
    } else {
        "an earlier tunnel of this name left changes; some could not be undone"
    };
    let mut warning = Diagnostic::new(Severity::Warning, name, message);
    if has_hooks {
        warning = warning.with_help(
            "its hooks did not run: check whether its PreDown and PostDown commands are needed",
        );
    }
    warn(warning);
    for failure in failures {
        warn(Diagnostic::new(Severity::Warning, name, failure));
    }
    remaining
}
