//! Seikan without a cipher: another build, which is for measurements alone. No release build can do
//! without one.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{Result, setup};
use crate::tunnel::Tunnel;
use crate::tunnel::seikan::Seikan;

/// The variable with the path of that program, as `make reproduce` sets it.
const PROGRAM: &str = "SEIKAN_NULL_BIN";

/// Returns the path of the program, if the variable is set.
pub(super) fn program() -> Option<PathBuf> {
    std::env::var_os(PROGRAM).map(PathBuf::from)
}

/// Returns Seikan without a cipher.
///
/// # Errors
/// There is no such program, or it cannot run here.
pub(super) fn tunnel() -> Result<Arc<dyn Tunnel>> {
    let program = program().ok_or_else(|| setup(missing()))?;
    let tunnel = Seikan::with_cipher("null").with_program(program);
    tunnel.availability()?;
    Ok(Arc::new(tunnel))
}

/// Returns a note that the program is missing.
pub(super) fn missing() -> String {
    format!(
        "Without a cipher Seikan is not measured: ${PROGRAM} names no program that has none (cargo build --profile lab \
         --features null-cipher)."
    )
}
