//! Whether a peer answers, for somebody who asks: a PROBE of the size of a [`Check`] by the way in use, and the time to its
//! acknowledgement, whichever way that comes. Without a session it waits for one, as a packet would.

use crate::paths::Check;
use crate::time::Instant;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// Where a question stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ping {
    /// There is no session to send it in yet.
    Queued,
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

/// Questions to one peer that are remembered, at most.
const MAX_PINGS: usize = 16;

/// What was asked of one peer lately. Who asks knows a question by its number, and is not disturbed by others.
#[derive(Debug, Default)]
pub struct Pings {
    pings: VecDeque<(u64, Ping)>,
}

impl Pings {
    /// Where a question stands; `None` if it was never asked of this peer, or many have been since.
    pub fn get(&self, number: u64) -> Option<Ping> {
        let mut pings = self.pings.iter();
        pings.find_map(|(of, ping)| (*of == number).then_some(*ping))
    }

    /// Somebody asks, under a number that no other has.
    pub(crate) fn queue(&mut self, number: u64) {
        self.pings.truncate(MAX_PINGS - 1);
        self.pings.push_front((number, Ping::Queued));
    }

    /// Whether there is one to be sent.
    pub(crate) fn is_queued(&self) -> bool {
        self.pings.iter().any(|(_, ping)| *ping == Ping::Queued)
    }

    /// What was sent is the question of all that waited.
    pub(crate) fn sent(&mut self, check: Check, to: SocketAddr, at: Instant) {
        for (_, ping) in &mut self.pings {
            if *ping == Ping::Queued {
                *ping = Ping::Sent { check, at, to };
            }
        }
    }

    /// Something was acknowledged; how long that took and where it had been sent, if it was one of these questions.
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
