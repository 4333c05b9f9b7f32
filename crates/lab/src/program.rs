//! The programs that the lab runs: `seikan`, and itself for the parts that need a process of their
//! own.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Result, setup};

/// Names of `seikan` and of this program.
pub(crate) const SEIKAN: &str = "seikan";
pub(crate) const LAB: &str = "seikan-lab";

/// Returns the program `seikan`: `$SEIKAN_BIN`, or the one next to this program, or the one on
/// `PATH`.
///
/// # Errors
/// [`Setup`](crate::error::LabError::Setup) when there is none.
pub fn seikan() -> Result<PathBuf> {
    let file = match std::env::var_os("SEIKAN_BIN").map(PathBuf::from) {
        Some(file) => Some(file).filter(|file| is_executable(file)),
        None => sibling(SEIKAN).or_else(|| find(SEIKAN)),
    };
    file.ok_or_else(|| {
        let missing =
            "cannot find the program `seikan` next to seikan-lab or on PATH; set $SEIKAN_BIN";
        setup(missing)
    })
}

/// Returns a command that runs [`seikan`].
///
/// # Errors
/// [`Setup`](crate::error::LabError::Setup) when there is none.
pub fn seikan_command() -> Result<Command> {
    let mut command = Command::new(seikan()?);
    // A web proxy of this machine is not reachable from the lab's networks.
    for variable in ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env_remove(variable);
    }
    Ok(command)
}

/// Returns this program, also to a test that was built with it.
fn lab() -> Result<PathBuf> {
    let file = sibling(LAB).or_else(|| find(LAB));
    file.ok_or_else(|| {
        let missing = "cannot find the program `seikan-lab` next to this one or on PATH";
        setup(missing)
    })
}

/// Returns a command that runs [`lab`].
pub(crate) fn lab_command() -> Result<Command> {
    lab().map(Command::new)
}

/// Returns the program that implements a tunnel.
pub(crate) fn of_tunnel(name: &str) -> Result<PathBuf> {
    match name {
        SEIKAN => seikan(),
        LAB => lab(),
        _ => find(name).ok_or_else(|| {
            setup(format!(
                "cannot find the program `{name}` on PATH or in $SEIKAN_PEERS"
            ))
        }),
    }
}

/// Checks that the programs of a tunnel and tunnel devices are there.
pub(crate) fn need(programs: &[&str]) -> Result<()> {
    need_tun()?;
    programs
        .iter()
        .try_for_each(|name| of_tunnel(name).map(drop))
}

/// Checks whether tunnel devices can be created, by opening the file that creates them.
pub(crate) fn need_tun() -> Result<()> {
    let opened = File::options().read(true).write(true).open("/dev/net/tun");
    opened.map(drop).map_err(|e| setup(format!(
        "/dev/net/tun cannot be opened ({e}): load the module `tun`, or give this user or container the device"
    )))
}

/// Returns the executable `name` in the folder of this one. Tests run in `deps`, below that folder.
fn sibling(name: &str) -> Option<PathBuf> {
    let this = std::env::current_exe().ok()?;
    let folder = this.parent()?;
    let folder = if folder.ends_with("deps") {
        folder.parent()?
    } else {
        folder
    };
    Some(folder.join(name)).filter(|file| is_executable(file))
}

/// Returns the executable `name` in `$SEIKAN_PEERS` or `PATH`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let paths = |variable: &str| std::env::var_os(variable).unwrap_or_default();
    let (peers, path) = (paths("SEIKAN_PEERS"), paths("PATH"));
    std::env::split_paths(&peers)
        .chain(std::env::split_paths(&path))
        // Debian keeps daemons where only root's PATH looks.
        .chain(["/usr/sbin".into(), "/usr/local/sbin".into()])
        .filter(|dir| !dir.as_os_str().is_empty())
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}
