//! Whether a peer answers, for somebody who asks: a PROBE of the size of a [`Check`] by the way in use, and the time to its
//! acknowledgement, whichever way that comes. Without a session it waits for one, as a packet would.

use crate::paths::Check;
use crate::time::Instant;
use std::net::SocketAddr;
use std::time::Duration;

/// Where a question stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ping {
    /// There is no session to send it in yet.
    Waits,
    /// No answer has come yet.
    Sent {
        /// What was sent.
        check: Check,
        /// When.
        at: Instant,
        /// Where to.
        to: SocketAddr,
    },
    /// The peer has answered.
    Answered {
        /// Where it was sent.
        to: SocketAddr,
        /// How long that took.
        rtt: Duration,
    },
}

impl Ping {
    /// Something was acknowledged; how long that took and where it had been sent, if it was this question.
    pub(crate) fn acknowledged(
        &mut self,
        answered: Check,
        now: Instant,
    ) -> Option<(Duration, SocketAddr)> {
        let Ping::Sent { check, at, to } = *self else {
            return None;
        };
        let rtt = (check == answered).then(|| now.duration_since(at))?;
        *self = Ping::Answered { to, rtt };
        Some((rtt, to))
    }
}
