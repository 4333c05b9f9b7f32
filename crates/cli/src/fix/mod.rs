//! Changes of this host that are meant to make a tunnel faster: noted before they are made, compared with and without,
//! kept only if they help, and taken back otherwise, also when this process is killed on the way.
//!
//! [`Fix::prepare`] forks a process that takes everything back should this one end; [`Fix::run`] notes the changes of a
//! remedy, runs the trial ([`trial::run`]), and keeps or takes back; [`undo`] takes back what was kept.

mod change;
pub mod watchdog;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use seikan_diagnose::Remedy;
use seikan_diagnose::trial::{self, Decision, Look, Trial};
use seikan_node::control::RuntimeDirs;
use seikan_node::journal::{self, Journal};
use seikan_sys::monitor::{self, Monitor};
use seikan_sys::netns::NetNs;

pub use change::Change;

/// Ready to change something.
#[derive(Debug)]
pub struct Fix {
    /// Takes back what is noted when this process is gone.
    _guard: Monitor,
    directory: PathBuf,
    name: String,
}

impl Fix {
    /// Starts the process that cleans up. Must come before this one has a second thread.
    ///
    /// # Errors
    /// There are threads already, or no process to be had.
    pub fn prepare() -> Result<Fix> {
        let directory = RuntimeDirs::default().run;
        let pid = std::process::id();
        let name = format!("{}{pid}", prefix()?);
        let path = directory.join(format!("{name}.journal"));
        let guard = Monitor::start(&[], move |socket| {
            monitor::wait_for_the_end(&socket);
            journal::clean_up_after(pid, &path, |_: &[Change]| ());
        });
        Ok(Fix {
            _guard: guard.context("cannot start the process that takes changes back")?,
            directory,
            name,
        })
    }

    /// Reads what a remedy would change. Changes nothing.
    ///
    /// # Errors
    /// It cannot be changed here, or could not be brought back.
    pub fn plan(remedy: &Remedy) -> Result<Vec<Change>> {
        let planned = remedy.actions.iter().cloned().map(Change::plan);
        let changes = planned.collect::<Result<Vec<Change>>>()?;
        if changes.is_empty() {
            bail!("`{}` is not a change of this host", remedy.what);
        }
        Ok(changes)
    }

    /// Tries changes, and leaves them in force only if they gain `keep` (a share) for sure; with `None` they are taken back
    /// in any case.
    ///
    /// # Errors
    /// A change cannot be made, or measuring failed; everything is as it was then.
    pub fn run(
        &self,
        changes: &[Change],
        keep: Option<f64>,
        measure: impl FnMut(Duration) -> Result<Look>,
    ) -> Result<Trial> {
        let (mut journal, _) = Journal::open(&self.directory, &self.name)?;
        // Noted first: whatever happens from here on, everything is taken back unless it is kept.
        for change in changes {
            journal.will_do(change.clone())?;
        }
        let switch = |on: bool| match on {
            true => changes.iter().try_for_each(Change::apply),
            false => match journal::take_back(changes.to_vec()) {
                failures if failures.is_empty() => Ok(()),
                failures => bail!("{}", failures.join("; ")),
            },
        };
        let mut trial = trial::run(switch, measure, keep.unwrap_or(trial::LEAST_GAIN));
        if let (None, Ok(trial)) = (keep, &mut trial)
            && trial.decision == Decision::Keep
        {
            trial.decision = Decision::TakeBack("it was made for the proof only".to_owned());
        }
        let keeps = matches!(&trial, Ok(trial) if trial.decision == Decision::Keep);
        let applied = match keeps {
            true => changes.iter().try_for_each(Change::apply),
            false => Ok(()),
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

/// Takes back everything that was kept in this network namespace; the commands of what was taken back, and what could
/// not be.
///
/// # Errors
/// The folder cannot be read, or another process is at it.
pub fn undo() -> Result<(Vec<String>, Vec<String>)> {
    let directory = RuntimeDirs::default().run;
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
        let (changes, failed) = journal::undo::<Change>(&file)?;
        done.extend(changes.iter().rev().map(|change| change.action.command()));
        failures.extend(failed);
    }
    Ok((done, failures))
}

/// How the files of this network namespace begin: a change belongs to the namespace in which it was made.
fn prefix() -> Result<String> {
    let namespace = NetNs::current()?.id()?;
    Ok(format!("doctor-{namespace}-"))
}
