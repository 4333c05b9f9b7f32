//! Pings to a peer: a PROBE of the size of a [`Check`] is sent over the path in use, and the time
//! to its acknowledgement is measured. The acknowledgement may return over any path. Without a
//! session the ping waits for one, like a packet.

use crate::native::check::Check;
use crate::time::Instant;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// State of a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ping {
    /// Waits for a session.
    Queued,
    /// Sent, and not answered yet.
    Sent {
        /// The probe that was sent.
        check: Check,
        /// When it was sent.
        at: Instant,
        /// The address that it was sent to.
        to: SocketAddr,
    },
    /// Answered by the peer.
    Answered {
        /// The address that it was sent to.
        to: SocketAddr,
        /// The round-trip time.
        rtt: Duration,
    },
}

/// Maximum number of pings remembered for each peer.
const MAX_PINGS: usize = 16;

/// The latest pings to one peer, by number.
#[derive(Debug, Default)]
pub struct Pings {
    pings: VecDeque<(u64, Ping)>,
}

impl Pings {
    /// Returns the state of a ping, or `None` if it is unknown or too old.
    pub fn get(&self, number: u64) -> Option<Ping> {
        let mut pings = self.pings.iter();
        pings.find_map(|(of, ping)| (*of == number).then_some(*ping))
    }

    /// Adds a ping. `number` must be unique.
    pub(crate) fn queue(&mut self, number: u64) {
        self.pings.truncate(MAX_PINGS - 1);
        self.pings.push_front((number, Ping::Queued));
    }

    /// Whether a ping waits to be sent.
    pub(crate) fn is_queued(&self) -> bool {
        self.pings.iter().any(|(_, ping)| *ping == Ping::Queued)
    }

    /// All waiting pings were sent as this probe.
    pub(crate) fn sent(&mut self, check: Check, to: SocketAddr, at: Instant) {
        for (_, ping) in &mut self.pings {
            if *ping == Ping::Queued {
                *ping = Ping::Sent { check, at, to };
            }
        }
    }

    /// Handles an acknowledgement. Returns the round-trip time and the address if it answers a
    /// ping.
    pub(crate) fn acknowledged(
        &mut self,
        answered: Check,
        now: Instant,
    ) -> Option<(Duration, SocketAddr)> {
        let mut answer = None;
        for (_, ping) in &mut self.pings {
            if let Ping::Sent { check, at, to } = *ping
                && check == answered
            {
                let rtt = now.duration_since(at);
                *ping = Ping::Answered { to, rtt };
                answer = Some((rtt, to));
            }
        }
        answer
    }
}
