//! Options of a tunnel besides its configuration.

use crate::control::RuntimeDirs;
use crate::userspace::Services;
use std::ffi::OsString;
use std::path::PathBuf;

/// Options of `up` besides the configuration.
#[derive(Debug, Clone, Default)]
pub struct UpOptions {
    /// The file of the configuration, which `SaveConfig` writes.
    pub config_file: Option<PathBuf>,
    /// A program and its arguments, which the monitor runs after SIGHUP to apply the changed `config_file`. Empty: SIGHUP
    /// is ignored.
    pub reload: Vec<OsString>,
    /// The log file, for `status`.
    pub log: Option<PathBuf>,
    /// Run without an interface and without root: these services lead into the tunnel.
    pub userspace: Option<Services>,
    /// Directories of the control sockets, the journal and the state.
    pub dirs: RuntimeDirs,
}
