//! The program that applies a changed configuration.

use crate::options::UpOptions;
use seikan_config::{Diagnostic, Diagnostics, Severity};
use seikan_sys::poll::{Epoll, Interest};
use std::io::{self, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time of a reload. It asks the daemon, and resolves names, which takes minutes without a name server.
pub(super) const RELOAD_PATIENCE: Duration = Duration::from_secs(180);
/// Token of the program's pipe in the monitor's `Epoll`.
pub(super) const TOKEN_RELOAD: u64 = 2;

/// The program that applies a changed configuration ([`UpOptions::reload`]), at most one at a time. A drop kills it.
#[derive(Default)]
pub(super) struct Reload {
    pub running: Option<Child>,
    /// The running program is killed then: a daemon that does not end its answers must not prevent later reloads.
    late_at: Option<Instant>,
    /// The file may have changed after the running program read it.
    again: bool,
}

impl Reload {
    /// Starts the program, or has it started again when it ends.
    pub fn begin(&mut self, options: &UpOptions, epoll: &Epoll) -> Result<(), String> {
        if self.running.is_some() {
            self.again = true;
            return Ok(());
        }
        let [program, arguments @ ..] = options.reload.as_slice() else {
            return Err("cannot reload: this tunnel was not started from a file".to_owned());
        };
        // The program does not read the pipe: it is there because its other end fails when the program ends.
        let mut command = Command::new(program);
        let child = command.args(arguments).stdin(Stdio::piped()).spawn();
        let failed = |error: io::Error| format!("cannot reload: {}: {error}", program.display());
        let mut child = child.map_err(failed)?;
        let pipe = child.stdin.as_ref();
        if let Some(Err(error)) = pipe.map(|pipe| epoll.add(pipe, TOKEN_RELOAD, Interest::Read)) {
            end(&mut child);
            return Err(failed(error));
        }
        self.running = Some(child);
        self.late_at = Some(Instant::now() + RELOAD_PATIENCE);
        Ok(())
    }

    /// Kills the program if it takes too long; its end is an event as usual. Returns the time until then, if any.
    pub fn end_if_late(&mut self, now: Instant) -> Option<Duration> {
        let left = self.late_at?.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        self.late_at = None;
        let _ = self.running.as_mut()?.kill();
        let message = format!(
            "cannot reload: it was ended after {} s",
            RELOAD_PATIENCE.as_secs()
        );
        warn(Diagnostic::new(Severity::Warning, "reload", message));
        None
    }

    /// Takes the exit status of the program, which has printed its errors.
    pub fn has_ended(&mut self, options: &UpOptions, epoll: &Epoll) {
        self.late_at = None;
        if let Some(mut child) = self.running.take() {
            let _ = child.wait();
        }
        if std::mem::take(&mut self.again)
            && let Err(error) = self.begin(options, epoll)
        {
            warn(Diagnostic::new(Severity::Warning, "reload", error));
        }
    }
}

impl Drop for Reload {
    fn drop(&mut self) {
        if let Some(child) = &mut self.running {
            end(child);
        }
    }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Prints a warning like those of the daemon.
pub(super) fn warn(warning: Diagnostic) {
    let mut warnings = Diagnostics::default();
    warnings.push(warning);
    let _ = io::stderr().write_all(warnings.render(false).as_bytes());
}
