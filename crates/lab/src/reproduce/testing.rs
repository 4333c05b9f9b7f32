//! Parts of the tests of mechanisms, which need root.

use seikan_ui::Interrupt;

use super::{Bench, Desk, ReproduceOptions, Source};
use crate::error::{LabError, Result};
use crate::site::Host;

/// Runs a test with short loads in one round. If the lab cannot run, it prints the reason and
/// passes, or fails where all tests are required.
pub(super) fn short(source: Source, work: impl FnOnce(&mut Bench<'_>) -> Result<()>) {
    let options = ReproduceOptions {
        seconds: 0.6,
        rounds: 1,
        ..ReproduceOptions::default()
    };
    let desk = Desk {
        options: &options,
        interrupt: &Interrupt::new(),
        source,
    };
    let mut bench = Bench {
        desk,
        progress: &mut |_| {},
        steps: (0.0, 1.0),
    };
    let outcome = Host::create("A", 1).and_then(|_| work(&mut bench));
    match outcome {
        Ok(()) => {}
        Err(error @ (LabError::Setup(_) | LabError::Namespace(_))) => {
            let required = std::env::var_os("SEIKAN_REQUIRE_ALL").is_some_and(|v| v == "1");
            assert!(!required, "required, but: {error}");
            eprintln!("SKIPPED: {error}");
        }
        Err(error) => panic!("{error}"),
    }
}
