//! Temporary files, removed also if the lab is killed: by a shell that reads their paths from a
//! pipe, and removes them when the pipe ends with the lab.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

use crate::error::{LabError, Result};

/// Reads a path per line.
const SCRIPT: &str = r#"
while IFS= read -r path; do set -- "$@" "$path"; done
rm -rf -- "$@"
"#;

/// The pipe to the shell, which the first path starts.
static SHELL: Mutex<Option<ChildStdin>> = Mutex::new(None);

/// Creates a directory that only its owner can read, for private keys. It is removed when it is
/// dropped, or with the end of this process.
///
/// # Errors
/// The directory cannot be made.
pub fn private_directory() -> Result<TempDir> {
    let failed = || LabError::io("make a temporary directory");
    let directory = tempfile::Builder::new()
        .prefix("seikan-lab.")
        .permissions(PermissionsExt::from_mode(0o700))
        .tempdir()
        .map_err(failed())?;
    remove_at_end(directory.path()).map_err(failed())?;
    Ok(directory)
}

/// Has a file or directory removed at the end of this process, if it exists then.
///
/// # Errors
/// The shell cannot be started.
pub(crate) fn remove_at_end(path: &Path) -> io::Result<()> {
    let mut shell = SHELL.lock().unwrap_or_else(PoisonError::into_inner);
    if shell.is_none() {
        let mut child = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals to the lab's group, such as those of the terminal, do not end it.
            .process_group(0)
            .spawn()?;
        *shell = child.stdin.take();
    }
    let line = [path.as_os_str().as_bytes(), b"\n"].concat();
    match &mut *shell {
        Some(pipe) => pipe.write_all(&line),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn the_shell_removes_the_paths_that_it_read_when_the_pipe_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let [mine, others] = ["mine 1", "others"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(mine.join("deep")).expect("a folder");
        std::fs::write(&others, "").expect("a file");
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let pipe = shell.stdin.as_mut().expect("piped");
        pipe.write_all(format!("{}\n", mine.display()).as_bytes())
            .expect("written");
        assert!(mine.exists());
        // Closes the pipe.
        assert!(shell.wait().expect("ended").success());
        assert!(!mine.exists() && others.exists());
    }
}
