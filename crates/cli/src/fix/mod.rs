//! Changes of this host that may make a tunnel faster. They are recorded in a journal first,
//! measured with and without, and kept only if they help. Otherwise they are reverted, also if this
//! process is killed.
//!
//! [`Fix::prepare`] forks a process that reverts everything if this one ends; [`Fix::run`] records
//! the changes of a remedy, runs the trial ([`trial::run`]), and keeps or reverts them; [`undo`]
//! reverts kept changes.

mod change;
pub mod watchdog;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::unistd::{Pid, setpgid};
use seikan_diagnose::Remedy;
use seikan_diagnose::trial::{self, Decision, Look, Trial};
use seikan_node::control::RuntimeDirs;
use seikan_node::journal::{self, Journal};
use seikan_sys::monitor::{self, Monitor};
use seikan_sys::netns::NetNs;

pub use change::Change;

/// A prepared fix.
#[derive(Debug)]
pub struct Fix {
    /// Reverts the journal's changes when this process ends.
    _guard: Monitor,
    directory: PathBuf,
    name: String,
}

impl Fix {
    /// Starts the process that cleans up. This process must not have a second thread yet.
    ///
    /// # Errors
    /// There are other threads, or no process can be created.
    pub fn prepare() -> Result<Fix> {
        let directory = RuntimeDirs::default().run;
        let pid = std::process::id();
        let name = format!("{}{pid}", prefix()?);
        let path = directory.join(format!("{name}.journal"));
        let guard = Monitor::start(&[], move |socket| {
            // The watchdog must survive a SIGKILL to this program's process group.
            let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
            monitor::wait_for_the_end(&socket);
            journal::clean_up_after(pid, &path, |_: &[Change]| ());
        });
        Ok(Fix {
            _guard: guard.context("cannot start the process that reverts changes")?,
            directory,
            name,
        })
    }

    /// Reads the current state for a remedy's changes. Changes nothing.
    ///
    /// # Errors
    /// A setting cannot be changed here, or could not be restored.
    pub fn plan(remedy: &Remedy) -> Result<Vec<Change>> {
        let planned = remedy.actions.iter().cloned().map(Change::plan);
        let changes = planned.collect::<Result<Vec<Change>>>()?;
        if changes.is_empty() {
            bail!("`{}` is not a change of this host", remedy.what);
        }
        Ok(changes)
    }

    /// Tries changes, and keeps them only if they gain at least `keep` (a share) with confidence;
    /// with `None` they are reverted in any case.
    ///
    /// # Errors
    /// A change cannot be made, or the measurement failed; everything has been reverted.
    pub fn run(
        &self,
        changes: &[Change],
        keep: Option<f64>,
        measure: impl FnMut(Duration) -> Result<Look>,
    ) -> Result<Trial> {
        let (mut journal, _) = Journal::open(&self.directory, &self.name)?;
        // Recorded first: from here on everything is reverted unless it is kept.
        for change in changes {
            journal.will_do(change.clone())?;
        }
        let switch = |on: bool| {
            if on {
                changes.iter().try_for_each(Change::apply)
            } else {
                match journal::take_back(changes.to_vec()) {
                    (_, failures) if failures.is_empty() => Ok(()),
                    (_, failures) => bail!("{}", failures.join("; ")),
                }
            }
        };
        let mut trial = trial::run(switch, measure, keep.unwrap_or(trial::LEAST_GAIN));
        if let (None, Ok(trial)) = (keep, &mut trial)
            && trial.decision == Decision::Keep
        {
            trial.decision = Decision::TakeBack("it was made for the measurement only".to_owned());
        }
        let keeps = matches!(&trial, Ok(trial) if trial.decision == Decision::Keep);
        let applied = if keeps {
            changes.iter().try_for_each(Change::apply)
        } else {
            Ok(())
        };
        if keeps && applied.is_ok() {
            journal.keep(&free_name(&self.directory, &self.name))?;
        } else {
            let failures = journal.take_back();
            if !failures.is_empty() {
                bail!("{}", failures.join("; "));
            }
        }
        applied.and(trial)
    }
}

/// Returns a name for the file of kept changes that no file has: an earlier process may have had the
/// number of this one.
fn free_name(directory: &Path, journal: &str) -> String {
    let mut name = format!("{journal}.kept");
    for number in 1.. {
        if !directory.join(&name).exists() {
            break;
        }
        name = format!("{journal}.{number}.kept");
    }
    name
}

/// Reverts everything that was kept in this network namespace. Returns the commands of the reverted
/// changes, and the failures: also files that cannot be read, or that another process uses.
///
/// # Errors
/// The folder cannot be read.
pub fn undo() -> Result<(Vec<String>, Vec<String>)> {
    undo_in(&RuntimeDirs::default().run)
}

fn undo_in(directory: &Path) -> Result<(Vec<String>, Vec<String>)> {
    let (mut done, mut failures) = (Vec::new(), Vec::new());
    let prefix = prefix()?;
    let entries = match std::fs::read_dir(directory) {
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
        match journal::undo::<Change>(&file) {
            Ok((changes, failed)) => {
                done.extend(changes.iter().rev().map(|change| change.action.command()));
                failures.extend(failed);
            }
            Err(error) => failures.push(error.to_string()),
        }
    }
    Ok((done, failures))
}

/// Returns the prefix of this network namespace's files: a change belongs to its namespace.
fn prefix() -> Result<String> {
    let namespace = NetNs::current()?.id()?;
    Ok(format!("doctor-{namespace}-"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_diagnose::Action;

    /// A change of a process that has ended, so that nothing is changed.
    fn change() -> Change {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("a process");
        let pid = child.id();
        let change = Change::plan(Action::Nice { pid, nice: 5 });
        child.kill().expect("kill");
        child.wait().expect("an end");
        change.expect("plan")
    }

    #[test]
    fn kept_changes_of_an_earlier_process_with_this_number_are_not_overwritten() {
        let directory = tempfile::tempdir().expect("a directory");
        let name = format!("{}1", prefix().expect("a prefix"));
        for _ in 0..3 {
            let (mut journal, _) = Journal::open(directory.path(), &name).expect("open");
            journal.will_do(change()).expect("noted");
            let kept = free_name(directory.path(), &name);
            journal.keep(&kept).expect("kept");
        }
        let (done, failures) = undo_in(directory.path()).expect("undone");
        assert_eq!((done.len(), failures), (3, Vec::new()));
    }

    #[test]
    fn a_file_in_use_keeps_no_other_from_being_reverted() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = |number: u32| {
            let name = format!("{}{number}", prefix().expect("a prefix"));
            let (mut journal, _) = Journal::open(directory.path(), &name).expect("open");
            journal.will_do(change()).expect("noted");
            journal
        };
        let kept = format!("{}1.kept", prefix().expect("a prefix"));
        open(1).keep(&kept).expect("kept");
        let _in_use = open(2);
        let (done, failures) = undo_in(directory.path()).expect("undone");
        assert_eq!((done.len(), failures.len()), (1, 1), "{failures:?}");
    }
}
