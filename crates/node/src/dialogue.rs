//! The server side of a protocol that clients of the control sockets speak.

use crate::output::{Output, Phase};
use crate::subject::Subject;

/// One client's exchange of requests and replies.
pub trait Dialogue: Send {
    /// Consumes input of the client and returns the number of bytes consumed. The rest is passed again with the
    /// bytes that follow it.
    fn take(&mut self, input: &[u8], subject: &mut Subject<'_>, output: &mut Output) -> usize;
    /// Appends to `output`: in [`Phase::Replying`] the next piece of the reply, in
    /// [`Phase::Waiting`] the reply once it is known.
    fn give(&mut self, subject: &Subject<'_>, output: &mut Output);
    /// Returns the current state.
    fn phase(&self) -> Phase;
}
