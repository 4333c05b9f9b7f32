//! A program with a wrong clock: libfaketime (Debian's `faketime`) changes its time of day, but not
//! its timers.

use std::path::PathBuf;

use crate::error::{Result, setup};

const FILE: &str = "libfaketime.so.1";

/// Returns the environment variables that change a program's clock by an offset such as `+1h`;
/// empty without an offset.
///
/// # Errors
/// The library is not installed.
pub(super) fn environment(offset: Option<&str>) -> Result<Vec<(String, String)>> {
    let Some(offset) = offset else {
        return Ok(Vec::new());
    };
    let library = library().ok_or_else(|| {
        setup(format!(
            "cannot find {FILE}, which sets a wrong clock: install it (Debian: faketime)"
        ))
    })?;
    let variables = [
        ("LD_PRELOAD", library.to_string_lossy().as_ref()),
        ("FAKETIME", offset),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()));
    Ok(variables.to_vec())
}

/// `/usr/lib/TRIPLET/faketime/libfaketime.so.1`, or without the triplet.
fn library() -> Option<PathBuf> {
    let lib = std::path::Path::new("/usr/lib");
    let folders = std::fs::read_dir(lib).ok()?.flatten();
    let candidates = folders.map(|folder| folder.path().join("faketime").join(FILE));
    let all = std::iter::once(lib.join("faketime").join(FILE)).chain(candidates);
    all.into_iter().find(|file| file.exists())
}
