//! Calls of the program `seikan-lab`, which is installed separately: `seikan lab`, `seikan demo`, and the
//! pictures of `seikan report --png`.

use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use clap::Args;

/// Name of the program.
const PROGRAM: &str = "seikan-lab";

/// Options of `seikan lab`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
#[command(after_help = "Example:\n  sudo seikan lab bench    compare the tunnels found on PATH")]
pub struct Arguments {
    /// Verb and options of seikan-lab; --help lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<OsString>,
}

/// Options of `seikan demo`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
#[command(after_help = "Example:\n  sudo seikan demo")]
pub struct DemoArguments {
    /// Options of the demo; --help lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTIONS"
    )]
    arguments: Vec<OsString>,
}

/// Replaces this process by `seikan-lab ARGUMENTS`.
///
/// # Errors
/// The program is not installed, or the kernel does not start it.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    exec(&arguments.arguments)
}

/// Replaces this process by `seikan-lab demo OPTIONS`.
///
/// # Errors
/// As with [`run`].
pub fn demo(arguments: &DemoArguments) -> anyhow::Result<ExitCode> {
    exec(&[&["demo".into()], &arguments.arguments[..]].concat())
}

/// Draws a picture as PNG by `seikan-lab`, which has the renderer.
///
/// # Errors
/// As with [`run`]; the program fails, with its message.
pub fn png(svg: &str) -> anyhow::Result<Vec<u8>> {
    let program = program()?;
    let failed = || format!("cannot run {}", program.display());
    let mut drawing = Command::new(&program)
        .arg("png")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(failed)?;
    if let Some(mut stdin) = drawing.stdin.take() {
        // A program that ends before it has read reports the reason.
        let _ = stdin.write_all(svg.as_bytes());
    }
    let output = drawing.wait_with_output().with_context(failed)?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        bail!("{}", message.trim().trim_start_matches("error: "));
    }
    Ok(output.stdout)
}

fn exec(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let program = program()?;
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}

/// Returns the path of the program.
fn program() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe().context("cannot find the folder of this program")?;
    let folder = this.parent().unwrap_or(Path::new("/"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    find(folder, &path).with_context(|| {
        format!(
            "cannot find the program {PROGRAM} in {} or on PATH: install the package {PROGRAM}, or build it with \
             `cargo build --release -p {PROGRAM}` and copy target/release/{PROGRAM} there",
            folder.display()
        )
    })
}

/// Returns the program in `folder`, or else on `path`.
fn find(folder: &Path, path: &std::ffi::OsStr) -> Option<PathBuf> {
    let folders = std::iter::once(folder.to_owned()).chain(std::env::split_paths(path));
    folders
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(PROGRAM))
        .find(|file| {
            file.metadata()
                .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_program_in_the_same_directory_comes_before_path() {
        let [beside, other] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
        assert_eq!(find(beside.path(), other.path().as_os_str()), None);
        for folder in [&other, &beside] {
            let file = folder.path().join(PROGRAM);
            fs::write(&file, "").expect("written");
            assert_ne!(
                find(beside.path(), other.path().as_os_str()),
                Some(file.clone()),
                "it is no program yet"
            );
            fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).expect("a mode");
            assert_eq!(find(beside.path(), other.path().as_os_str()), Some(file));
        }
    }
}
