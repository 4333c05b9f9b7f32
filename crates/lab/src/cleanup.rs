//! Cleans up also if the lab is killed: temporary files are removed and settings of the machine
//! restored by a shell that reads them from a pipe, and acts when the pipe ends with the lab.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

use crate::error::{LabError, Result};

/// Reads steps, one a line, and runs them in reverse order once the input ends.
const SCRIPT: &str = r#"
while IFS= read -r step; do set -- "$step" "$@"; done
for step; do
    what=${step#* }
    case $step in
    "remove "*) rm -rf -- "$what" ;;
    "restore "*) printf %s "${what#* }" >"${what%% *}" ;;
    esac
done
"#;

/// The pipe to the shell, which the first step starts.
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
    at_end(&[b"remove ", path.as_os_str().as_bytes()].concat())
}

/// Has a setting below `/proc/sys` restored at the end of this process.
///
/// # Errors
/// The shell cannot be started.
pub(crate) fn restore_at_end(file: &Path, value: &str) -> io::Result<()> {
    at_end(format!("restore {} {value}", file.display()).as_bytes())
}

/// Passes a step to the shell.
fn at_end(step: &[u8]) -> io::Result<()> {
    let mut shell = SHELL.lock().unwrap_or_else(PoisonError::into_inner);
    if shell.is_none() {
        let mut child = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Signals to the lab's process group, such as those of the terminal, do not end this
            // process.
            .process_group(0)
            .spawn()?;
        *shell = child.stdin.take();
    }
    match &mut *shell {
        Some(pipe) => pipe.write_all(&[step, b"\n"].concat()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn the_shell_takes_the_steps_that_it_read_when_the_pipe_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let [mine, others, setting] =
            ["mine 1", "others", "setting"].map(|name| folder.path().join(name));
        std::fs::create_dir_all(mine.join("deep")).expect("a folder");
        std::fs::write(&others, "").expect("a file");
        std::fs::write(&setting, "3").expect("a file");
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let pipe = shell.stdin.as_mut().expect("piped");
        // It was 1\t1, then 2, then 3.
        let (file, mine_shown) = (setting.display(), mine.display());
        let steps = format!("restore {file} 1\t1\nremove {mine_shown}\nrestore {file} 2\n");
        pipe.write_all(steps.as_bytes()).expect("written");
        assert!(mine.exists());
        // Closes the pipe.
        assert!(shell.wait().expect("ended").success());
        assert!(!mine.exists() && others.exists());
        assert_eq!(std::fs::read_to_string(&setting).expect("read"), "1\t1");
    }
}
