//! Faults that are settings of the whole machine.

use std::io;
use std::path::Path;

use super::Applied;
use crate::cleanup::restore_at_end;
use crate::error::{Result, setup};

/// Sets the sysctl at `path` below `/proc/sys`; restored also if this process is killed.
pub(super) fn set(path: &str, value: f64, applied: &mut Applied<'_>) -> Result<()> {
    let file = Path::new("/proc/sys").join(path);
    let fail = |source: io::Error| {
        setup(format!(
            "cannot set {} for this fault: {source}",
            file.display()
        ))
    };
    let before = std::fs::read_to_string(&file).map_err(fail)?;
    let before = before.trim().to_owned();
    restore_at_end(&file, &before).map_err(fail)?;
    let own = file.clone();
    applied.then(move || {
        // The file was writable a moment ago.
        let _ = std::fs::write(&own, before);
    });
    std::fs::write(&file, format!("{value:.0}")).map_err(fail)
}
