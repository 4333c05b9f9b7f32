//! Packets that the kernel dropped, by reason.

use super::Output;

/// The counters.
#[derive(Debug)]
pub(super) struct Drops;

impl Drops {
    pub(super) fn open(_output: &mut Output) -> Self {
        Drops
    }

    pub(super) fn sample(&mut self, _output: &mut Output) {}
}
