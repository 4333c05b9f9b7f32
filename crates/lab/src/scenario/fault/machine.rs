//! Faults that are settings of the whole machine: set back afterwards.

use std::path::Path;

use super::Applied;
use crate::error::{LabError, Result};

/// Sets the sysctl at `path` below `/proc/sys`.
pub(super) fn set(path: &str, value: f64, applied: &mut Applied<'_>) -> Result<()> {
    let file = Path::new("/proc/sys").join(path);
    let fail = |source: std::io::Error| {
        LabError::Setup(format!(
            "{} cannot be set for this fault: {source}",
            file.display()
        ))
    };
    let before = std::fs::read_to_string(&file).map_err(fail)?;
    std::fs::write(&file, format!("{value:.0}")).map_err(fail)?;
    let file = file.clone();
    applied.then(move || {
        // Could be written a moment ago.
        let _ = std::fs::write(&file, before.trim());
    });
    Ok(())
}
