//! The rules of the paper's section 6, with the paper's times.

use proptest::prelude::*;

use super::*;
use crate::rng::{Rng, testing::Seeded};

/// No jitter, so that the times below are exact.
struct NoJitter;
impl Rng for NoJitter {
    fn fill(&mut self, destination: &mut [u8]) {
        destination.fill(0);
    }
}

const INITIATION: Action = Action::SendInitiation { retry: false };
const RETRY: Action = Action::SendInitiation { retry: true };

fn at(seconds: u64) -> Instant {
    Instant::from_nanos((1_000_000 + seconds) * 1_000_000_000)
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn expire(timers: &mut Timers, now: Instant) -> Vec<Action> {
    timers.expire(now).collect()
}

/// A peer whose session this end initiated at `at(0)`.
fn established() -> Timers {
    let mut timers = Timers::default();
    assert!(timers.want_handshake(at(0)));
    timers.handshake_initiated(at(0), &mut NoJitter);
    timers.session_derived(at(0));
    timers.handshake_complete();
    timers
}

fn session(is_initiator: bool) -> SessionAge {
    SessionAge {
        derived: at(0),
        is_initiator,
        sent: 1,
    }
}

#[test]
fn nothing_is_pending_at_first() {
    assert_eq!(Timers::default().next(), None);
    assert_eq!(expire(&mut Timers::default(), at(1000)), []);
}

#[test]
fn an_unanswered_initiation_is_repeated_after_five_seconds() {
    let mut timers = Timers::default();
    timers.handshake_initiated(at(0), &mut NoJitter);
    assert_eq!(timers.next(), Some((at(5), RetransmitHandshake)));
    assert_eq!(expire(&mut timers, at(5) - millis(1)), []);
    assert_eq!(expire(&mut timers, at(5)), [RETRY]);
    assert_eq!(timers.next(), None);
}

#[test]
fn a_peer_is_given_up_after_ninety_seconds() {
    let mut timers = Timers::default();
    timers.data_received(at(80));
    let mut now = at(0);
    let mut sent = 0;
    loop {
        timers.handshake_initiated(now, &mut NoJitter);
        sent += 1;
        now += Duration::from_secs(5);
        match expire(&mut timers, now)[..] {
            [RETRY] => {}
            [Action::GiveUp] => break,
            ref other => panic!("{other:?}"),
        }
    }
    assert_eq!((sent, now), (18, at(90)));
    // A keepalive would have no receiver; residues are erased after 540 s.
    assert_eq!(timers.next(), Some((at(90 + 540), ZeroKeys)));
}

#[test]
fn fresh_traffic_starts_the_ninety_seconds_over() {
    let mut timers = Timers::default();
    let mut now = at(0);
    for _ in 0..17 {
        timers.handshake_initiated(now, &mut NoJitter);
        now += Duration::from_secs(5);
        assert_eq!(expire(&mut timers, now), [RETRY]);
    }
    timers.handshake_initiated(now, &mut NoJitter);
    assert!(!timers.want_handshake(now));
    assert_eq!(expire(&mut timers, now + Duration::from_secs(5)), [RETRY]);
}

#[test]
fn initiations_are_five_seconds_apart() {
    let mut timers = established();
    assert!(!timers.want_handshake(at(5) - millis(1)));
    assert!(timers.want_handshake(at(5)));
}

#[test]
fn a_response_stops_the_repetition() {
    let mut timers = established();
    assert_eq!(timers.next(), Some((at(540), ZeroKeys)));
    assert_eq!(expire(&mut timers, at(90)), []);
}

#[test]
fn keys_are_erased_three_lifetimes_after_the_last_session() {
    let mut timers = established();
    timers.session_derived(at(100));
    assert_eq!(expire(&mut timers, at(540)), []);
    assert_eq!(expire(&mut timers, at(640)), [Action::ZeroKeys]);
    assert_eq!(timers.next(), None);
}

#[test]
fn a_silent_receiver_sends_a_keepalive_after_ten_seconds() {
    let mut timers = established();
    timers.data_received(at(20));
    timers.data_received(at(25));
    assert_eq!(timers.next(), Some((at(30), SendKeepalive)));
    assert_eq!(expire(&mut timers, at(30)), [Action::SendKeepalive]);
}

#[test]
fn a_receiver_that_talks_sends_no_keepalive() {
    let mut timers = established();
    timers.data_received(at(20));
    timers.any_authenticated_packet_sent(at(21));
    assert_eq!(expire(&mut timers, at(31)), []);
}

#[test]
fn a_sender_without_an_answer_starts_a_handshake_after_fifteen_seconds() {
    let mut timers = established();
    timers.data_sent(at(20), &mut NoJitter);
    timers.data_sent(at(30), &mut NoJitter);
    assert_eq!(timers.next(), Some((at(35), NewHandshake)));
    assert_eq!(expire(&mut timers, at(35)), [INITIATION]);
}

#[test]
fn any_answer_is_an_answer() {
    let mut timers = established();
    timers.data_sent(at(20), &mut NoJitter);
    timers.any_authenticated_packet_received(at(34));
    assert_eq!(expire(&mut timers, at(35)), []);
}

#[test]
fn the_initiator_renews_a_session_of_two_minutes_when_it_sends() {
    let mut timers = established();
    assert!(!timers.rekey_on_send(&session(true), at(120) - millis(1)));
    assert!(timers.rekey_on_send(&session(true), at(120)));
    assert!(!timers.rekey_on_send(&session(false), at(120)));
}

#[test]
fn either_end_renews_a_session_of_two_to_the_sixty_messages() {
    let mut timers = established();
    let used = |sent| SessionAge {
        derived: at(9),
        is_initiator: false,
        sent,
    };
    assert!(!timers.rekey_on_send(&used(1 << 60), at(10)));
    assert!(timers.rekey_on_send(&used((1 << 60) + 1), at(10)));
}

#[test]
fn the_initiator_renews_a_session_once_when_it_receives_at_165_seconds() {
    let mut timers = established();
    assert!(!timers.rekey_on_receive(&session(true), at(165) - millis(1)));
    assert!(!timers.rekey_on_receive(&session(false), at(165)));
    assert!(timers.rekey_on_receive(&session(true), at(165)));
    assert!(!timers.rekey_on_receive(&session(true), at(175)));
}

#[test]
fn a_new_session_may_be_renewed_on_receipt_again() {
    let mut timers = established();
    assert!(timers.rekey_on_receive(&session(true), at(165)));
    timers.handshake_complete();
    assert!(timers.rekey_on_receive(&session(true), at(330)));
}

#[test]
fn a_persistent_keepalive_follows_silence_in_both_directions() {
    let mut timers = Timers::default();
    timers.set_persistent_keepalive(Some(Duration::from_secs(25)), at(0));
    assert_eq!(expire(&mut timers, at(0)), [Action::SendKeepalive]);
    timers.any_authenticated_packet_sent(at(10));
    timers.any_authenticated_packet_received(at(20));
    assert_eq!(timers.next(), Some((at(45), PersistentKeepalive)));
    assert_eq!(expire(&mut timers, at(45)), [Action::SendKeepalive]);
    // The next one is due although it could not be sent.
    assert_eq!(timers.next(), Some((at(70), PersistentKeepalive)));
}

#[test]
fn an_interval_of_zero_turns_the_persistent_keepalive_off() {
    let mut timers = Timers::default();
    timers.set_persistent_keepalive(Some(Duration::from_secs(25)), at(0));
    timers.set_persistent_keepalive(Some(Duration::ZERO), at(1));
    assert_eq!(timers.next(), None);
    timers.any_authenticated_packet_sent(at(2));
    assert_eq!(timers.next(), None);
}

#[test]
fn start_and_stop_keep_the_configuration() {
    let mut timers = established();
    timers.set_persistent_keepalive(Some(Duration::from_secs(25)), at(0));
    timers.stop();
    assert_eq!(timers.next(), None);
    timers.start(at(1));
    assert_eq!(expire(&mut timers, at(1)), [Action::SendKeepalive]);
    assert!(timers.want_handshake(at(1)));
}

#[test]
fn after_an_hour_of_sleep_each_action_is_due_once() {
    let mut timers = established();
    timers.set_persistent_keepalive(Some(Duration::from_secs(25)), at(0));
    timers.data_sent(at(1), &mut NoJitter);
    timers.data_received(at(1));
    timers.handshake_initiated(at(5), &mut NoJitter);
    let actions = expire(&mut timers, at(3600));
    assert_eq!(actions, [Action::ZeroKeys, RETRY, Action::SendKeepalive]);
    assert_eq!(expire(&mut timers, at(3600)), []);
}

#[test]
fn jitter_is_below_a_third_of_a_second() {
    let mut rng = Seeded::new(3);
    let delays: Vec<Duration> = (0..1000)
        .map(|_| {
            let mut timers = Timers::default();
            timers.handshake_initiated(at(0), &mut rng);
            timers.next().unwrap().0 - at(5)
        })
        .collect();
    assert!(delays.iter().all(|&delay| delay < millis(333)));
    assert!(
        delays.iter().any(|&delay| delay > millis(250)),
        "it is spread"
    );
}

proptest! {
    /// Every wake-up that is processed is done: no busy loop, and none is late.
    #[test]
    fn expiry_leaves_nothing_due(events in prop::collection::vec((0..9u8, 0..100u64), 1..100)) {
        let mut rng = Seeded::new(1);
        let mut timers = Timers::default();
        let mut now = at(0);
        for (event, seconds) in events {
            now += Duration::from_secs(seconds);
            match event {
                0 => timers.data_sent(now, &mut rng),
                1 => timers.data_received(now),
                2 => timers.any_authenticated_packet_sent(now),
                3 => timers.any_authenticated_packet_received(now),
                4 => timers.handshake_initiated(now, &mut rng),
                5 => timers.handshake_complete(),
                6 => timers.session_derived(now),
                7 => timers.set_persistent_keepalive(Some(Duration::from_secs(seconds)), now),
                _ => {
                    let due = timers.next().filter(|(at, _)| *at <= now);
                    let actions = expire(&mut timers, now);
                    prop_assert!(due.is_some() || actions.is_empty());
                    prop_assert!(timers.next().is_none_or(|(at, _)| at > now));
                }
            }
        }
    }
}
