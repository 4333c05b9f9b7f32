//! Common parts of the tests.

use seikan_lab::site::Host;

/// A host of its own, or `None` (loudly) where this process may not make one.
pub fn host() -> Option<Host> {
    match Host::create("A", 1) {
        Ok(host) => Some(host),
        Err(error) => {
            skip(error.to_string());
            None
        }
    }
}

/// Says why a test does not run; fails instead when everything is required.
pub fn skip(reason: impl std::fmt::Display) {
    assert!(
        std::env::var_os("SEIKAN_REQUIRE_ALL").is_none_or(|v| v != "1"),
        "required, but: {reason}"
    );
    eprintln!("SKIPPED: {reason}");
}

/// Timeout for another process. It is long because machines may be busy; only a failure takes this
/// long.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
