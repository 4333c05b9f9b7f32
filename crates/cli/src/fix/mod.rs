//! Changes of this host that may make a tunnel faster: written to a journal before they are made, tested, kept only if they
//! help, and reverted otherwise, also if this process is killed.
//!
//! [`Fix::prepare`] forks a process that reverts everything if this one ends; [`Fix::run`] writes the changes of a remedy to
//! the journal, runs the trial ([`trial::run`]), and keeps or reverts them; [`undo`] reverts kept changes.

mod change;
pub mod watchdog;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use seikan_diagnose::Remedy;
use seikan_diagnose::trial::{self, Decision, Look, Trial};
use seikan_node::control::Places;
use seikan_node::state::{self, Journal};
use seikan_sys::monitor::{self, Monitor};
use seikan_sys::netns::NetNs;

pub use change::Change;

/// Tests of changes.
#[derive(Debug)]
pub struct Fix {
    /// Reverts the changes of the journal when this process ends.
    _guard: Monitor,
    directory: PathBuf,
    name: String,
}

impl Fix {
    /// Starts the process that reverts changes, before this one has a second thread.
    ///
    /// # Errors
    /// There are other threads, or the process cannot be started.
    pub fn prepare() -> Result<Fix> {
        let directory = Places::default().run;
        let pid = std::process::id();
        let name = format!("{}{pid}", prefix()?);
        let path = directory.join(format!("{name}.journal"));
        let guard = Monitor::start(&[], move |socket| {
            monitor::wait_for_the_end(&socket);
            state::clean_up_after(pid, &path, |_: &[Change]| ());
        });
        Ok(Fix {
            _guard: guard.context("cannot start the process that reverts changes")?,
            directory,
            name,
        })
    }

    /// Reads the settings that a remedy changes. Changes nothing.
    ///
    /// # Errors
    /// A setting cannot be changed or restored here.
    pub fn plan(remedy: &Remedy) -> Result<Vec<Change>> {
        let planned = remedy.actions.iter().cloned().map(Change::plan);
        let changes = planned.collect::<Result<Vec<Change>>>()?;
        if changes.is_empty() {
            bail!("`{}` is not a change of this host", remedy.what);
        }
        Ok(changes)
    }

    /// Tests changes, and keeps them only if their gain is certainly `keep` (a share); `None`: always reverts them.
    ///
    /// # Errors
    /// A change or a measurement failed; everything is reverted.
    pub fn run(
        &self,
        changes: &[Change],
        keep: Option<f64>,
        measure: impl FnMut(Duration) -> Result<Look>,
    ) -> Result<Trial> {
        let (mut journal, _) = Journal::open(&self.directory, &self.name)?;
        // Journal first: from here on every change is reverted unless it is kept.
        for change in changes {
            journal.will_do(change.clone())?;
        }
        let switch = |on: bool| {
            if on {
                return changes.iter().try_for_each(Change::apply);
            }
            match state::take_back(changes.to_vec()) {
                failures if failures.is_empty() => Ok(()),
                failures => bail!("{}", failures.join("; ")),
            }
        };
        let mut trial = trial::run(switch, measure, keep.unwrap_or(trial::LEAST_GAIN));
        if let (None, Ok(trial)) = (keep, &mut trial)
            && trial.decision == Decision::Keep
        {
            trial.decision = Decision::TakeBack("`--prove` reverts every change".to_owned());
        }
        let keeps = matches!(&trial, Ok(trial) if trial.decision == Decision::Keep);
        let applied = if keeps {
            changes.iter().try_for_each(Change::apply)
        } else {
            Ok(())
        };
        if keeps && applied.is_ok() {
            journal.keep(&format!("{}.kept", self.name))?;
        } else {
            let failures = journal.take_back();
            if !failures.is_empty() {
                bail!("{}", failures.join("; "));
            }
        }
        applied.and(trial)
    }
}

/// Reverts everything that was kept in this network namespace; returns the commands of reverted changes, and failures.
///
/// # Errors
/// The directory cannot be read, or another process uses it.
pub fn undo() -> Result<(Vec<String>, Vec<String>)> {
    let directory = Places::default().run;
    let (mut done, mut failures) = (Vec::new(), Vec::new());
    let prefix = prefix()?;
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok((done, failures)),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", directory.display()))?,
    };
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with(&prefix))
        })
        .collect();
    // The newest first, as a stack.
    files.sort_by_key(|path| {
        std::cmp::Reverse(path.metadata().and_then(|meta| meta.modified()).ok())
    });
    for file in files {
        let (changes, failed) = state::undo::<Change>(&file)?;
        done.extend(changes.iter().rev().map(|change| change.action.command()));
        failures.extend(failed);
    }
    Ok((done, failures))
}

/// Prefix of the files of this network namespace: a change belongs to the namespace in which it was made.
fn prefix() -> Result<String> {
    let namespace = NetNs::current()?.id()?;
    Ok(format!("doctor-{namespace}-"))
}
