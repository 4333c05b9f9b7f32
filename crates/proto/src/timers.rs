//! The timers of one peer, after the kernel's `timers.c` and the paper's section 6.
//!
//! - **Retransmit handshake**: an initiation unanswered for `REKEY_TIMEOUT` plus up to a third of a
//!   second is repeated, until `REKEY_ATTEMPT_TIME` has passed. Then the peer is given up and
//!   staged packets are dropped. New traffic starts over.
//! - **Send keepalive**: data was received and nothing authenticated was sent for
//!   `KEEPALIVE_TIMEOUT`. An empty packet tells the peer that its data arrives.
//! - **New handshake**: data was sent and nothing authenticated was received for `KEEPALIVE_TIMEOUT
//!   + REKEY_TIMEOUT`. The session may be dead, so a new one is initiated.
//! - **Zero keys**: no new session for three times `REJECT_AFTER_TIME`. Every key is erased.
//! - **Persistent keepalive**: nothing authenticated in either direction for the configured
//!   interval. An empty packet keeps the state of middleboxes alive.
//!
//! This is a pure state machine. Events are methods, named as in the kernel; [`Timers::next`]
//! returns when to call again and why, and [`Timers::expire`] the actions to perform. A session's
//! age is not a timer: [`Timers::rekey_on_send`] and [`Timers::rekey_on_receive`] check it on use.

use std::time::Duration;

use crate::constants::*;
use crate::rng::Rng;
use crate::time::Instant;

/// Kind of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WakeReason {
    /// An initiation may be unanswered.
    RetransmitHandshake,
    /// An empty packet may be due to a peer that sends data.
    SendKeepalive,
    /// A peer may have stopped answering.
    NewHandshake,
    /// Keys may have to be erased.
    ZeroKeys,
    /// A persistent keepalive may be due.
    PersistentKeepalive,
}

use WakeReason::*;

const ALL: [WakeReason; 5] = [
    RetransmitHandshake,
    SendKeepalive,
    NewHandshake,
    ZeroKeys,
    PersistentKeepalive,
];

/// An action of an expired timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Erase the keys of all sessions and of a pending handshake.
    ZeroKeys,
    /// Drop the staged packets: the peer does not answer.
    GiveUp,
    /// Send an initiation from the current source address, and report it by
    /// [`Timers::handshake_initiated`] even if the socket refused it; otherwise it is not repeated.
    SendInitiation {
        /// Whether it repeats an unanswered one.
        retry: bool,
    },
    /// Send an empty packet. Without a session, call [`Timers::want_handshake`] instead.
    SendKeepalive,
}

/// Age and use of a session, as input to [`Timers`].
#[derive(Clone, Copy, Debug)]
pub struct SessionAge {
    /// When its keys were derived.
    pub derived: Instant,
    /// Whether this end initiated the handshake. Only the initiator renews a session for its age.
    pub is_initiator: bool,
    /// Messages sent in it.
    pub sent: u64,
}

/// The timers of one peer.
#[derive(Clone, Debug, Default)]
pub struct Timers {
    /// When each timer fires, by [`WakeReason`]; `None` if it is not running.
    due: [Option<Instant>; ALL.len()],
    persistent_interval: Option<Duration>,
    last_initiation: Option<Instant>,
    /// When an initiation was last sent in answer to a call-me-maybe. It is neither repeated nor
    /// does it delay others.
    last_call: Option<Instant>,
    /// When the first data or initiation was sent that nothing of a session has followed.
    waiting_since: Option<Instant>,
    /// Initiations repeated since the last reason to send one.
    retries: u32,
    /// A session is being renewed because data arrived near its end. Once per session is enough.
    sent_lastminute_handshake: bool,
}

/// Events.
impl Timers {
    /// Data, not just a keepalive, was sent.
    pub fn data_sent(&mut self, now: Instant, rng: &mut dyn Rng) {
        self.waiting_since.get_or_insert(now);
        if self.due[NewHandshake as usize].is_none() {
            self.arm(
                NewHandshake,
                now + KEEPALIVE_TIMEOUT + REKEY_TIMEOUT + jitter(rng),
            );
        }
    }

    /// Data, not just a keepalive, was received and authenticated.
    ///
    /// The kernel also records that data arrived while the timer ran, because its receive and timer
    /// contexts race. Here they are one, and the keepalive answers everything before it.
    pub fn data_received(&mut self, now: Instant) {
        if self.due[SendKeepalive as usize].is_none() {
            self.arm(SendKeepalive, now + KEEPALIVE_TIMEOUT);
        }
    }

    /// A packet that the peer can authenticate was sent: data, a keepalive or a handshake message.
    pub fn any_authenticated_packet_sent(&mut self, now: Instant) {
        self.disarm(SendKeepalive);
        self.traversal(now);
    }

    /// An authenticated packet was received: data, a keepalive or a handshake message.
    pub fn any_authenticated_packet_received(&mut self, now: Instant) {
        self.disarm(NewHandshake);
        self.traversal(now);
    }

    /// A packet of a session or a response was received. An initiation of the peer does not show that this host's packets
    /// arrive.
    pub fn answered(&mut self) {
        self.waiting_since = None;
    }

    /// An initiation was sent, or sending was at least attempted.
    pub fn handshake_initiated(&mut self, now: Instant, rng: &mut dyn Rng) {
        self.last_initiation = Some(now);
        self.waiting_since.get_or_insert(now);
        self.arm(RetransmitHandshake, now + REKEY_TIMEOUT + jitter(rng));
    }

    /// The handshake is confirmed: a response was accepted, or the first data arrived in a session
    /// derived as responder.
    pub fn handshake_complete(&mut self) {
        self.disarm(RetransmitHandshake);
        self.retries = 0;
        self.sent_lastminute_handshake = false;
    }

    /// Keys of a new session exist, confirmed or not.
    pub fn session_derived(&mut self, now: Instant) {
        self.arm(ZeroKeys, now + ZERO_KEYS_AFTER);
    }

    /// Since when data or an initiation waits for a response or anything in a session. A peer answers data within
    /// `KEEPALIVE_TIMEOUT`.
    pub fn waiting_since(&self) -> Option<Instant> {
        self.waiting_since
    }

    /// Whether a recent initiation waits for its response.
    pub fn handshake_pending(&self) -> bool {
        self.due[RetransmitHandshake as usize].is_some()
    }

    /// Whether a call-me-maybe may be answered by an initiation: not if one was answered less than
    /// [`CALL_INTERVAL`] ago.
    pub fn may_answer_call(&self, now: Instant) -> bool {
        self.last_call
            .is_none_or(|last| last.has_expired(CALL_INTERVAL, now))
    }

    /// A call-me-maybe was answered by an initiation.
    pub fn call_answered(&mut self, now: Instant) {
        self.last_call = Some(now);
        // A partial handshake may leave key material behind.
        if self.due[ZeroKeys as usize].is_none() {
            self.arm(ZeroKeys, now + ZERO_KEYS_AFTER);
        }
    }

    /// Whether the latest initiation repeats an unanswered one.
    pub fn is_retrying(&self) -> bool {
        self.retries > 0
    }

    /// Sets or clears the persistent keepalive. A new one is due at once (as when `wg` sets it).
    pub fn set_persistent_keepalive(&mut self, interval: Option<Duration>, now: Instant) {
        let interval = interval.filter(|interval| !interval.is_zero());
        match (interval, self.persistent_interval) {
            (None, _) => self.disarm(PersistentKeepalive),
            (Some(_), None) => self.arm(PersistentKeepalive, now),
            // The next packet starts the new interval.
            (Some(_), Some(_)) => {}
        }
        self.persistent_interval = interval;
    }

    /// The persistent keepalive interval, if there is one.
    pub fn persistent_keepalive(&self) -> Option<Duration> {
        self.persistent_interval
    }

    /// The interface comes up, so a persistent keepalive is due at once.
    pub fn start(&mut self, now: Instant) {
        if self.persistent_interval.is_some() {
            self.arm(PersistentKeepalive, now);
        }
    }

    /// Makes a packet due at once, because the peer may have a session that this host lost with its
    /// last process. Without a session, the packet is an initiation.
    pub fn resume(&mut self, now: Instant) {
        self.arm(SendKeepalive, now);
    }

    /// Voids the initiations sent so far: the next one need not wait.
    pub fn forget_initiation(&mut self) {
        self.last_initiation = None;
    }

    /// Stops every timer, as when the peer is removed or the interface goes down.
    pub fn stop(&mut self) {
        let persistent_interval = self.persistent_interval;
        *self = Timers {
            persistent_interval,
            ..Timers::default()
        };
    }
}

/// Handshake decisions.
impl Timers {
    /// Whether to send an initiation now, for a new reason such as data without a session. Not if
    /// one was sent less than `REKEY_TIMEOUT` ago; the retransmit timer repeats that one if
    /// necessary.
    pub fn want_handshake(&mut self, now: Instant) -> bool {
        self.retries = 0;
        self.last_initiation
            .is_none_or(|last| last.has_expired(REKEY_TIMEOUT, now))
    }

    /// Whether to send an initiation because `session`, in which something was just sent, is old or
    /// nearly used up.
    pub fn rekey_on_send(&mut self, session: &SessionAge, now: Instant) -> bool {
        let used_up = session.sent > REKEY_AFTER_MESSAGES;
        let old = session.is_initiator && session.derived.has_expired(REKEY_AFTER_TIME, now);
        (used_up || old) && self.want_handshake(now)
    }

    /// Whether to send an initiation because `session`, in which something was just received,
    /// expires soon and this end may have nothing to send that would renew it.
    pub fn rekey_on_receive(&mut self, session: &SessionAge, now: Instant) -> bool {
        let old = session.is_initiator && session.derived.has_expired(REKEY_ON_RECEIVE_AFTER, now);
        if self.sent_lastminute_handshake || !old {
            return false;
        }
        self.sent_lastminute_handshake = true;
        self.want_handshake(now)
    }
}

/// Timers.
impl Timers {
    /// When to call [`expire`](Self::expire), and why; `None` while nothing is pending.
    pub fn next(&self) -> Option<(Instant, WakeReason)> {
        ALL.iter()
            .filter_map(|&reason| Some((self.due[reason as usize]?, reason)))
            .min()
    }

    /// Returns the actions that are due at `now`, in the order to perform them; each at most once.
    pub fn expire(&mut self, now: Instant) -> impl Iterator<Item = Action> + use<> {
        let zero_keys = self.take_due(ZeroKeys, now).then_some(Action::ZeroKeys);
        let (give_up, initiation) = self.expire_handshake(now);
        let keepalive = self.expire_keepalives(now).then_some(Action::SendKeepalive);
        [zero_keys, give_up, initiation, keepalive]
            .into_iter()
            .flatten()
    }

    fn expire_handshake(&mut self, now: Instant) -> (Option<Action>, Option<Action>) {
        let fresh = self.take_due(NewHandshake, now) && self.want_handshake(now);
        if !self.take_due(RetransmitHandshake, now) {
            return (
                None,
                fresh.then_some(Action::SendInitiation { retry: false }),
            );
        }
        if self.retries + 1 < MAX_HANDSHAKE_ATTEMPTS {
            self.retries += 1;
            return (None, Some(Action::SendInitiation { retry: true }));
        }
        self.disarm(SendKeepalive);
        // A partial handshake may have left key material behind.
        if self.due[ZeroKeys as usize].is_none() {
            self.arm(ZeroKeys, now + ZERO_KEYS_AFTER);
        }
        (Some(Action::GiveUp), None)
    }

    fn expire_keepalives(&mut self, now: Instant) -> bool {
        let passive = self.take_due(SendKeepalive, now);
        let persistent = self.take_due(PersistentKeepalive, now);
        if persistent {
            // This happens also without a session, so that a lost peer is retried forever.
            self.traversal(now);
        }
        passive || persistent
    }

    fn traversal(&mut self, now: Instant) {
        if let Some(interval) = self.persistent_interval {
            self.arm(PersistentKeepalive, now + interval);
        }
    }

    fn arm(&mut self, timer: WakeReason, at: Instant) {
        self.due[timer as usize] = Some(at);
    }

    fn disarm(&mut self, timer: WakeReason) {
        self.due[timer as usize] = None;
    }

    fn take_due(&mut self, timer: WakeReason, now: Instant) -> bool {
        self.due[timer as usize].take_if(|at| *at <= now).is_some()
    }
}

fn jitter(rng: &mut dyn Rng) -> Duration {
    rng.duration_below(REKEY_TIMEOUT_JITTER_MAX)
}

#[cfg(test)]
mod tests;
