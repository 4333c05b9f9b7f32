//! Timed work: timers, probes, reports and staged packets.

use super::{Now, Tunnel};
use crate::inbox::Inbox;
use crate::indices::PeerId;
use crate::native::health::Report;
use crate::native::record::{Outgoing, RecordWriter};
use crate::noise::Protocol;
use crate::outbox::Outbox;
use crate::paths::Due;
use crate::peer::{LOG, Peer};
use crate::time::Instant;
use crate::timers::Action;
use seikan_observe::DropReason;
use std::time::Duration;
use tracing::info;

/// Delay before work that was due but could not be done is retried.
const RETRY: Duration = Duration::from_millis(1);

impl Tunnel {
    /// Returns when to call [`Tunnel::poll`], and for which peer.
    pub fn next_wakeup(&self) -> Option<(Instant, PeerId)> {
        self.wakeups.first().copied()
    }

    /// Does the work that is due. Returns true if there is more to do once the outbox and inbox are
    /// emptied.
    pub fn poll(&mut self, now: Now, outbox: &mut Outbox, inbox: &mut Inbox) -> bool {
        // Dropping the identity erases its key.
        self.previous.take_if(|previous| previous.until <= now.mono);
        while let Some((at, id)) = self.wakeups.first().copied() {
            if at > now.mono {
                return false;
            }
            // Handle one peer at a time, and only if everything that it may send certainly fits.
            if outbox.remaining() < 4 * crate::batch::MAX_READ {
                return true;
            }
            self.wakeups.pop_first();
            if let Some(peer) = self.peer_mut(id) {
                peer.scheduled = None;
                self.due(now, id, outbox, inbox);
                // Work that could not be done is not retried in the same instant.
                self.reschedule(id, now.mono, now.mono + RETRY);
            }
        }
        false
    }

    fn due(&mut self, now: Now, id: PeerId, outbox: &mut Outbox, inbox: &mut Inbox) {
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        let released = peer
            .repair
            .as_ref()
            .and_then(|repair| repair.next_release());
        let given_up = peer.reassembly.expire(now.mono);
        peer.counters.inbound.pending -= given_up;
        peer.counters
            .inbound
            .drops
            .add(DropReason::ReassemblyTimeout, given_up);
        let actions = peer.timers.expire(now.mono);
        if released.is_some_and(|at| at <= now.mono) && !self.to_release.contains(&id) {
            self.to_release.push(id);
        }
        for action in actions {
            self.act(now, id, action, outbox);
        }
        if self
            .peer_mut(id)
            .is_some_and(|p| p.handshake.has_new_candidate())
        {
            self.initiate_to_new_candidates(now, id, outbox);
        }
        self.initiate_after_opening(now, id, outbox);
        if self.protocol == Protocol::Native {
            self.validate_endpoint(now, id, outbox);
        }
        self.send_staged(now, id, outbox, inbox);
        if self.protocol == Protocol::Native {
            self.probe_and_report(now, id, outbox);
            self.check_paths(now, id, outbox);
            self.search_ports(now, id, outbox);
            self.send_ping(now, id, outbox);
        }
    }

    fn act(&mut self, now: Now, id: PeerId, action: Action, outbox: &mut Outbox) {
        match action {
            Action::SendInitiation { .. } => self.initiate_handshake(now, id, outbox),
            Action::SendKeepalive => {
                if !self.send_keepalive(now, id, outbox)
                    && self
                        .peer_mut(id)
                        .is_some_and(|p| p.timers.want_handshake(now.mono))
                {
                    self.initiate_handshake(now, id, outbox);
                }
                self.rekey_after_sending(now, id, outbox);
            }
            Action::ZeroKeys => self.zero_keys(id),
            Action::GiveUp => {
                if let Some(peer) = self.peer_mut(id) {
                    info!(target: LOG, peer = %peer.public_key, "peer does not answer handshakes");
                    peer.drop_staged(DropReason::HandshakeTimeout);
                }
            }
        }
    }

    /// Erases old keys. After a long sleep the timer may find a handshake that has just been
    /// started for the first packet; that one continues.
    fn zero_keys(&mut self, id: PeerId) {
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        info!(target: LOG, peer = %peer.public_key, "session expired");
        let pending = peer.timers.handshake_pending();
        let pending = pending.then(|| peer.handshake.pending.take()).flatten();
        self.forget_sessions(id);
        if let Some(peer) = self.peer_mut(id) {
            peer.handshake.pending = pending;
        }
    }

    /// A keepalive renews an old session as data does (kernel `send.c`, `keep_key_fresh`).
    fn rekey_after_sending(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let due = self.peer_mut(id).is_some_and(|peer| {
            let age = peer.sessions.current.as_ref().map(|s| s.age());
            age.is_some_and(|age| peer.timers.rekey_on_send(&age, now.mono))
        });
        if due {
            self.initiate_handshake(now, id, outbox);
        }
    }

    /// Sends a check to an unvalidated endpoint, or returns to the previous endpoint.
    fn validate_endpoint(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let sending = self.sending(now);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        if peer.path.outgoing.validation.is_abandoned(now.mono) && peer.path.go_back() {
            return;
        }
        let current = &mut peer.sessions.current;
        let Some(mut session) = current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        if let Some(check) = peer.path.outgoing.validation.ask(now.mono, &mut *self.rng)
            && let Some(envelope) = super::outbound::envelope(peer, &sending, 0)
        {
            let mut writer =
                RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
            // If the outbox is full, the check counts as lost and another one follows.
            if writer.probe(check.id, check.size.into()).is_ok() {
                peer.timers.any_authenticated_packet_sent(now.mono);
            }
        }
        peer.sessions.current = Some(session);
    }

    fn probe_and_report(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let sending = self.sending(now);
        let Some(peer) = self.peer_mut(id) else {
            return;
        };
        if !peer.path.is_validated() {
            return;
        }
        let Some(envelope) = super::outbound::envelope(peer, &sending, 0) else {
            return;
        };
        let Some(mut session) = peer.sessions.current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        let report = peer.path.health.due(now.mono).map(|report| Report {
            restored: peer
                .repair
                .as_mut()
                .map_or(0, |r| take_count(&mut r.restored)),
            not_restored: peer
                .repair
                .as_mut()
                .map_or(0, |r| take_count(&mut r.not_restored)),
            ..report
        });
        let parity = peer
            .path
            .repair()
            .ends_at()
            .is_some_and(|at| at <= now.mono);
        let probe = (now.mono < peer.path.active_until)
            .then(|| peer.path.mtu.poll(now.mono))
            .flatten();
        if report.is_some() || probe.is_some() || parity {
            let mut writer =
                RecordWriter::new(outbox, &mut session, &mut peer.path.outgoing, envelope);
            // There is space (see `poll`). If there were none, the next interval would send another
            // report.
            let reported = report.is_none_or(|r| writer.health(&r).is_ok());
            // Without space for the parity, the block has none, but no packet is lost.
            let protected = writer.parity().unwrap_or(false);
            let sends = report.is_some() || probe.is_some() || protected;
            let probed = probe.is_none_or(|(id, size)| writer.probe(id, size).is_ok());
            if writer.finish().is_ok() && reported && probed && sends {
                peer.timers.any_authenticated_packet_sent(now.mono);
            }
        }
        peer.sessions.current = Some(session);
    }

    /// Sends the checks that are due. Starts a handshake if the path in use is lost.
    fn check_paths(&mut self, now: Now, id: PeerId, outbox: &mut Outbox) {
        let sending = self.sending(now);
        let Some(peer) = self.peers.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        let Some(mut session) = peer.sessions.current.take_if(|s| s.may_send(now.mono)) else {
            return;
        };
        let due = peer.paths.due(peer.path.endpoint, now.mono, &mut *self.rng);
        let lost = due.contains(&Due::Lost);
        for due in due {
            let (Due::Check(check, address), Some(mut envelope)) =
                (due, super::outbound::envelope(peer, &sending, 0))
            else {
                continue;
            };
            // Checks of other candidates have limits of their own (`Paths`).
            let mut other = Outgoing::default();
            let mut outgoing = &mut peer.path.outgoing;
            if Some(address) != peer.path.endpoint {
                envelope.destination.address = address;
                envelope.destination.source = None;
                outgoing = &mut other;
            }
            let mut writer = RecordWriter::new(outbox, &mut session, outgoing, envelope);
            // If the outbox is full, the check counts as lost and another one follows.
            if writer.probe(check.id, check.size.into()).is_ok() {
                peer.timers.any_authenticated_packet_sent(now.mono);
            }
        }
        peer.sessions.current = Some(session);
        if lost {
            // The latest initiation may be recent, but it went over the lost path.
            peer.timers.forget_initiation();
            if peer.timers.want_handshake(now.mono) {
                self.initiate_handshake(now, id, outbox);
            }
        }
    }

    /// The earliest deadline of this peer.
    fn deadline(&self, peer: &Peer, now: Instant) -> Option<Instant> {
        let has_session = peer.has_session(now);
        let native = has_session && self.protocol == Protocol::Native;
        // Only little may be sent to an unvalidated endpoint; everything else waits.
        let validated = peer.path.is_validated();
        let staged = has_session && validated && !peer.staged.is_empty();
        let ping = native && validated && peer.pings.is_queued();
        let new_candidate = peer.handshake.has_new_candidate();
        let probe = peer.path.mtu.next_wakeup().unwrap_or(now);
        [
            peer.timers.next().map(|(at, _)| at),
            peer.handshake.opening_ends_at(),
            // Without traffic there is no probing, even if a search has started.
            (native && validated && probe.max(now) < peer.path.active_until).then_some(probe),
            peer.path
                .outgoing
                .validation
                .next_wakeup(now)
                .filter(|_| native),
            peer.paths
                .next_wakeup(peer.path.endpoint)
                .filter(|_| native),
            peer.birthday
                .next_wakeup(self.opens_ports(peer), peer.path.active_until)
                .filter(|_| native),
            peer.path
                .health
                .next_report()
                .filter(|_| native && validated),
            peer.reassembly.next_expiry(),
            peer.repair
                .as_ref()
                .and_then(|repair| repair.next_release()),
            peer.path.repair().ends_at().filter(|_| native && validated),
            (staged || ping || new_candidate).then_some(Instant::BOOT),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Schedules the peer's next deadline if it is earlier than the scheduled one. `earliest` is a
    /// lower bound.
    pub(super) fn reschedule(&mut self, id: PeerId, now: Instant, earliest: Instant) {
        let Some(peer) = self.peer(id) else { return };
        let Some(at) = self.deadline(peer, now) else {
            return;
        };
        let at = at.max(earliest);
        let scheduled = peer.scheduled;
        if scheduled.is_none_or(|scheduled| at < scheduled) {
            // Keep one entry for each peer; otherwise outdated entries would pile up.
            if let Some(scheduled) = scheduled {
                self.wakeups.remove(&(scheduled, id));
            }
            self.wakeups.insert((at, id));
            if let Some(peer) = self.peer_mut(id) {
                peer.scheduled = Some(at);
            }
        }
    }
}

/// Takes a count for a report, which starts anew.
fn take_count(count: &mut u64) -> u32 {
    std::mem::take(count).min(u32::MAX.into()) as u32
}
