//! Faults that are settings of the whole machine: set back afterwards, also by a second process
//! should this one be killed, which then takes away the sockets of killed tunnels, too.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use seikan_sys::monitor::{self, Monitor};

use super::Applied;
use crate::error::{LabError, Result};
use crate::tunnel::wireguard;

/// Where settings are.
const ROOT: &str = "/proc/sys";
/// Directory of the journal of former values: only root can write there, as only root can change
/// them.
const NOTES: &str = "/run";

/// Files changed and not yet reverted, with their former content.
static CHANGED: Mutex<Vec<(PathBuf, String)>> = Mutex::new(Vec::new());

/// A process that restores the machine's settings, and removes the tunnels' remains, if this one is
/// killed.
#[derive(Debug)]
pub struct MachineGuard(#[expect(dead_code, reason = "lives as long as this")] Monitor);

impl MachineGuard {
    /// Starts it. Must come before this process has a second thread.
    ///
    /// # Errors
    /// There are threads already, or no process to be had.
    pub fn prepare() -> Result<Self> {
        let lab = std::process::id();
        let clean_up = move |socket| {
            monitor::wait_for_the_end(&socket);
            set_back(&notes(lab));
            wireguard::remove_sockets(lab);
        };
        Monitor::start(&[], clean_up)
            .map(Self)
            .map_err(LabError::io(
                "start the process that sets the machine's settings back",
            ))
    }
}

fn notes(pid: u32) -> PathBuf {
    Path::new(NOTES).join(format!("seikan-lab-{pid}.settings"))
}

/// Restores the recorded settings; there are none if all went well.
fn set_back(notes: &Path) {
    let Ok(text) = std::fs::read_to_string(notes) else {
        return;
    };
    let noted = text.lines().filter_map(|line| line.split_once('\t'));
    for (file, value) in noted.filter(|(file, _)| Path::new(file).starts_with(ROOT)) {
        // No process is left to report an error to.
        let _ = std::fs::write(file, value);
    }
    let _ = std::fs::remove_file(notes);
}

/// Changes and stores the list of settings to restore.
fn note(change: impl FnOnce(&mut Vec<(PathBuf, String)>)) -> io::Result<()> {
    let mut changed = CHANGED.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut changed);
    let file = notes(std::process::id());
    if changed.is_empty() {
        return std::fs::remove_file(file);
    }
    let lines = changed.iter();
    let lines = lines.map(|(file, value)| format!("{}\t{value}\n", file.display()));
    std::fs::write(file, lines.collect::<String>())
}

/// Sets the sysctl at `path` below `/proc/sys`.
pub(super) fn set(path: &str, value: f64, applied: &mut Applied<'_>) -> Result<()> {
    let file = Path::new(ROOT).join(path);
    let fail = |source: io::Error| {
        LabError::Setup(format!(
            "{} cannot be set for this fault: {source}",
            file.display()
        ))
    };
    let before = std::fs::read_to_string(&file).map_err(fail)?;
    let before = before.trim().to_owned();
    note(|changed| changed.push((file.clone(), before.clone()))).map_err(fail)?;
    let own = file.clone();
    applied.then(move || {
        // Could be written a moment ago.
        let _ = std::fs::write(&own, before);
        let _ = note(|changed| changed.retain(|(file, _)| *file != own));
    });
    std::fs::write(&file, format!("{value:.0}")).map_err(fail)
}
