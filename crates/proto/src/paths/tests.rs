use super::*;

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * 1_000_000)
}

fn direct(n: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, n], 7))
}

fn relay(n: u8) -> SocketAddr {
    SocketAddr::from(([198, 51, 100, n], 50_000))
}

/// A peer with two addresses and a relay.
fn paths() -> Paths {
    let mut paths = Paths::default();
    paths.set_signalled(&[direct(1), direct(2)]);
    paths.set_relays(&[relay(1)], None);
    paths
}

/// Different bytes every time.
struct Count(u32);

impl Rng for Count {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0 += 1;
        for (byte, new) in destination.iter_mut().zip(self.0.to_le_bytes()) {
            *byte = new;
        }
    }
}

fn due(paths: &mut Paths, used: SocketAddr, now: Instant) -> Vec<Due> {
    let ms = now.duration_since(Instant::BOOT).as_millis() as u32;
    paths.due(Some(used), now, &mut Count(100 * ms))
}

/// The checks that are due, by address.
fn checks(paths: &mut Paths, used: SocketAddr, now: Instant) -> Vec<(Check, SocketAddr)> {
    let due = due(paths, used, now);
    due.into_iter()
        .filter_map(|due| match due {
            Due::Check(id, address) => Some((id, address)),
            Due::Lost => None,
        })
        .collect()
}

#[test]
fn while_a_relay_is_in_use_direct_candidates_are_checked_at_growing_intervals() {
    let mut paths = paths();
    let mut rounds = Vec::new();
    for ms in (0..100_000).step_by(100) {
        let round = checks(&mut paths, relay(1), at(ms));
        if !round.is_empty() {
            let addresses: Vec<_> = round.iter().map(|(_, address)| *address).collect();
            assert_eq!(addresses, [direct(1), direct(2)]);
            rounds.push(ms);
        }
    }
    assert_eq!(
        rounds,
        [
            0, 200, 500, 1000, 2000, 4000, 9000, 19_000, 44_000, 69_000, 94_000
        ]
    );
}

#[test]
fn a_direct_path_in_use_is_not_compared_with_others() {
    let mut paths = paths();
    assert_eq!(paths.next_wakeup(Some(direct(1))), None);
    assert_eq!(due(&mut paths, direct(1), at(5000)), []);
}

fn direct6() -> SocketAddr {
    SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1], 7))
}

/// A peer with an address of each family.
fn both_families() -> Paths {
    let mut paths = Paths::default();
    paths.set_signalled(&[direct6(), direct(1)]);
    paths
}

#[test]
fn ipv6_is_checked_along_with_ipv4_for_a_few_rounds() {
    let mut paths = both_families();
    let mut rounds = Vec::new();
    for ms in (0..100_000).step_by(100) {
        let round = checks(&mut paths, direct(1), at(ms));
        if !round.is_empty() {
            let addresses: Vec<_> = round.iter().map(|(_, address)| *address).collect();
            assert_eq!(addresses, [direct6(), direct(1)]);
            rounds.push(ms);
        }
    }
    assert_eq!(rounds, [0, 200, 500, 1000, 2000]);
    assert_eq!(paths.next_wakeup(Some(direct(1))), None);
    // And not in the other direction.
    assert_eq!(due(&mut both_families(), direct6(), at(0)), []);
}

#[test]
fn the_initiator_switches_to_ipv6_if_it_is_no_slower() {
    for (ipv6, began, taken) in [
        (30, true, CheckOutcome::Switch(direct6())),
        (40, true, CheckOutcome::Switch(direct6())),
        (41, true, CheckOutcome::Keep),
        (30, false, CheckOutcome::Keep),
    ] {
        let mut paths = both_families();
        let round = checks(&mut paths, direct(1), at(0));
        let mut answered = |of: usize, ms| {
            let check = round[of].0;
            paths.acknowledged(check, Some(direct(1)), began, at(ms))
        };
        let used = answered(1, 30).expect("the one in use").1;
        let other = answered(0, ipv6).expect("the other").1;
        assert_eq!(
            (used, other),
            (CheckOutcome::InUse, taken),
            "{ipv6} ms, {began}"
        );
    }
}

#[test]
fn lost_ipv6_is_not_preferred_again_until_the_peer_moves() {
    let mut paths = both_families();
    paths.sent(at(0));
    let mut lost = false;
    for ms in (0..=3000).step_by(500) {
        lost |= due(&mut paths, direct6(), at(ms)).contains(&Due::Lost);
    }
    assert!(lost);
    paths.moved();
    assert_eq!(checks(&mut paths, direct(1), at(4000)), []);
    paths.set_signalled(&[direct6(), direct(1), direct(2)]);
    assert_eq!(checks(&mut paths, direct(1), at(4000)).len(), 2);
}

#[test]
fn a_lost_proxied_path_does_not_count_as_lost_ipv6() {
    let mut paths = both_families();
    let proxied = crate::proxied::address(7, 7);
    paths.sent(at(0));
    let mut lost = false;
    for ms in (0..=3000).step_by(500) {
        lost |= due(&mut paths, proxied, at(ms)).contains(&Due::Lost);
    }
    assert!(lost);
    assert!(!paths.ipv6_lost);
}

#[test]
fn the_initiator_follows_to_proven_ipv6_only() {
    let mut paths = both_families();
    let round = checks(&mut paths, direct(1), at(0));
    assert!(!paths.on_datagram(direct6(), Some(direct(1)), true, at(20)));
    // It is slower, so this end does not switch.
    paths.acknowledged(round[1].0, Some(direct(1)), true, at(30));
    paths.acknowledged(round[0].0, Some(direct(1)), true, at(60));
    assert!(paths.on_datagram(direct6(), Some(direct(1)), true, at(70)));
    // The responder follows at once.
    assert!(both_families().on_datagram(direct6(), Some(direct(1)), false, at(20)));
}

#[test]
fn the_first_proven_direct_path_is_taken() {
    let mut paths = paths();
    let round = checks(&mut paths, relay(1), at(0));
    let taken = paths.acknowledged(round[1].0, Some(relay(1)), true, at(30));
    let rtt = Duration::from_millis(30);
    assert_eq!(taken, Some((rtt, CheckOutcome::Switch(direct(2)))));
    assert_eq!(paths.candidates()[1].state, CheckState::Works { rtt });
    // The second answer is too late.
    let late = paths.acknowledged(round[0].0, Some(direct(2)), true, at(31));
    assert_eq!(late.map(|(_, taken)| taken), Some(CheckOutcome::Keep));
    // Only once.
    assert_eq!(
        paths.acknowledged(round[0].0, Some(direct(2)), true, at(32)),
        None
    );
}

#[test]
fn a_relayed_datagram_does_not_replace_a_direct_path() {
    let mut paths = paths();
    assert!(!paths.on_datagram(relay(1), Some(direct(1)), false, at(0)));
    // A datagram over another relay is followed while a relay is in use.
    paths.set_relays(&[relay(1), relay(2)], Some(relay(1)));
    assert!(paths.on_datagram(relay(2), Some(relay(1)), false, at(0)));
}

#[test]
fn a_loopback_address_is_a_relay_and_left_for_a_direct_path() {
    let forwarder = SocketAddr::from(([127, 0, 0, 1], 40_000));
    let mut paths = paths();
    assert!(!paths.on_datagram(forwarder, Some(direct(1)), false, at(0)));
    assert!(paths.received_by_relay_within(PATIENCE, at(0)));
    // Also while it is checked as the path in use.
    paths.restart_checks();
    paths.sent(at(0));
    let round = checks(&mut paths, forwarder, at(1000));
    assert_eq!(round.len(), 3);
    let direct_check = round.iter().find(|(_, address)| *address == direct(1));
    let (check, _) = direct_check.expect("a check");
    let taken = paths.acknowledged(*check, Some(forwarder), true, at(1030));
    assert_eq!(
        taken.map(|(_, taken)| taken),
        Some(CheckOutcome::Switch(direct(1)))
    );
}

#[test]
fn a_direct_source_is_checked_before_the_relay_is_left() {
    let mut paths = paths();
    checks(&mut paths, relay(1), at(0));
    assert!(!paths.on_datagram(direct(9), Some(relay(1)), false, at(10)));
    let round = checks(&mut paths, relay(1), at(10));
    assert!(round.iter().any(|(_, address)| *address == direct(9)));
    assert_eq!(
        paths.candidates().last().map(|c| c.kind),
        Some(CandidateKind::PeerReflexive)
    );
    // From a known address: at most twice a second.
    assert!(!paths.on_datagram(direct(1), Some(relay(1)), false, at(100)));
    assert_eq!(checks(&mut paths, relay(1), at(100)), []);
    assert!(!paths.on_datagram(direct(1), Some(relay(1)), false, at(5_000)));
    assert_eq!(checks(&mut paths, relay(1), at(5_000)).len(), 3);
}

#[test]
fn a_direct_datagram_right_after_a_check_repeats_the_check() {
    let mut paths = paths();
    // The sixth round is at 4 s, the next at 9 s.
    for ms in [0, 200, 500, 1000, 2000, 4000] {
        assert!(!checks(&mut paths, relay(1), at(ms)).is_empty());
    }
    paths.on_datagram(direct(1), Some(relay(1)), false, at(4_010));
    assert_eq!(checks(&mut paths, relay(1), at(4_490)), []);
    assert!(!checks(&mut paths, relay(1), at(4_500)).is_empty());
}

/// A peer that forges two source addresses in turn, over a relay and directly.
#[test]
fn new_source_addresses_cause_rounds_of_checks_at_a_bounded_rate() {
    let others = [direct(8), direct(9)];
    for (mut paths, used, others, each) in [
        (paths(), relay(1), others, 3),
        (both_families(), direct(1), others, 2),
    ] {
        let mut used = used;
        let mut sent = 0;
        for n in 0..1000 {
            let now = at(100_000 + 10 * n);
            let from = others[n as usize % 2];
            if paths.on_datagram(from, Some(used), false, now) {
                used = from;
            }
            sent += checks(&mut paths, used, now).len();
        }
        let rounds = 16 + 10;
        assert!((rounds..=rounds * each).contains(&sent), "{sent} checks");
        // The next round is known, and it takes place then.
        paths.on_datagram(others[0], Some(used), false, at(109_995));
        let next = paths.next_wakeup(Some(used)).expect("a round");
        assert!(next > at(109_995) && checks(&mut paths, used, at(109_995)).is_empty());
        assert!(!checks(&mut paths, used, next).is_empty());
    }
}

#[test]
fn a_path_slower_than_the_check_interval_is_taken() {
    for rtt in [700, 1_300, 4_900] {
        let mut paths = paths();
        let (mut in_flight, mut taken) = (Vec::new(), None);
        for ms in (0..10_000).step_by(100) {
            // A continuous source is checked every half a second.
            paths.on_datagram(direct(1), Some(relay(1)), false, at(ms));
            let sent = checks(&mut paths, relay(1), at(ms));
            let there = sent.into_iter().filter(|(_, to)| *to == direct(1));
            in_flight.extend(there.map(|(check, _)| (ms + rtt, check)));
            for (_, check) in in_flight.extract_if(.., |(due, _)| *due <= ms) {
                let answered = paths.acknowledged(check, Some(relay(1)), true, at(ms));
                taken = taken.or(answered);
            }
        }
        let expected = (Duration::from_millis(rtt), CheckOutcome::Switch(direct(1)));
        assert_eq!(taken, Some(expected), "{rtt} ms");
    }
}

#[test]
fn a_roaming_peer_is_followed_unless_this_end_has_just_switched() {
    let mut paths = paths();
    assert!(paths.on_datagram(direct(9), Some(direct(1)), true, at(0)));
    let round = checks(&mut paths, relay(1), at(0));
    paths.acknowledged(round[0].0, Some(relay(1)), true, at(10));
    assert!(!paths.on_datagram(direct(2), Some(direct(1)), true, at(900)));
    assert!(
        paths.on_datagram(direct(2), Some(direct(1)), false, at(900)),
        "the responder follows"
    );
    assert!(paths.on_datagram(direct(2), Some(direct(1)), true, at(1100)));
}

/// Two ends that send continuously, 10 ms apart, and start on different paths. Returns the number
/// of switches and the final path of each.
fn chase(candidates: [SocketAddr; 2]) -> [(usize, SocketAddr); 2] {
    let mut ends = [0, 1].map(|_| {
        let mut paths = Paths::default();
        paths.set_signalled(&[direct(1), direct(2)]);
        paths.set_relays(&[relay(1), relay(2)], None);
        paths
    });
    let mut used = candidates;
    let mut moves = [0, 0];
    let mut in_flight = std::collections::VecDeque::new();
    for ms in 0..900 {
        in_flight.push_back(used);
        if ms < 10 {
            continue;
        }
        let arrived = in_flight.pop_front().unwrap();
        for end in [0, 1] {
            let from = arrived[1 - end];
            let follows = ends[end].on_datagram(from, Some(used[end]), end == 0, at(ms));
            if follows && used[end] != from {
                used[end] = from;
                moves[end] += 1;
            }
        }
    }
    [0, 1].map(|end| (moves[end], used[end]))
}

#[test]
fn ends_on_different_paths_converge_and_stop_switching() {
    for candidates in [[direct(1), direct(2)], [relay(1), relay(2)]] {
        let [first, second] = chase(candidates);
        assert_eq!(first.1, second.1, "{candidates:?}");
        assert!(first.0 + second.0 <= 3, "{first:?}, {second:?}");
    }
}

#[test]
fn silence_is_checked_and_then_counts_as_a_loss() {
    let mut paths = paths();
    paths.sent(at(0));
    paths.sent(at(900));
    let mut events = Vec::new();
    for ms in (0..6000).step_by(100) {
        for due in due(&mut paths, direct(1), at(ms)) {
            events.push((ms, matches!(due, Due::Lost)));
        }
    }
    assert_eq!(
        events,
        [
            (1000, false),
            (1500, false),
            (2000, false),
            (2500, false),
            (3000, true)
        ]
    );
    assert!(paths.is_lost());
    assert_eq!(paths.candidates()[0].state, CheckState::Silent);
    // A datagram arrives after all.
    assert!(paths.on_datagram(direct(1), Some(direct(1)), false, at(6000)));
    assert!(!paths.is_lost());
}

#[test]
fn an_answer_over_any_path_ends_the_silence() {
    let mut paths = paths();
    paths.sent(at(0));
    // Over a relay: this does not prove the direct path.
    paths.on_datagram(relay(1), Some(direct(1)), false, at(500));
    let sent = checks(&mut paths, direct(1), at(1000));
    let taken = paths.acknowledged(sent[0].0, Some(direct(1)), true, at(1040));
    assert_eq!(
        taken,
        Some((Duration::from_millis(40), CheckOutcome::InUse))
    );
    assert_eq!(due(&mut paths, direct(1), at(9000)), []);
}

#[test]
fn a_check_cannot_be_acknowledged_unseen_or_late() {
    let mut paths = paths();
    let round = checks(&mut paths, relay(1), at(0));
    let (check, _) = round[0];
    let forged = [
        Check {
            id: check.id.wrapping_add(7),
            ..check
        },
        Check {
            size: check.size + 1,
            ..check
        },
    ];
    for forged in forged {
        assert_eq!(
            paths.acknowledged(forged, Some(relay(1)), true, at(1)),
            None
        );
    }
    assert_eq!(
        paths.acknowledged(check, Some(relay(1)), true, at(5000)),
        None
    );
    assert!(
        paths
            .acknowledged(check, Some(relay(1)), true, at(4999))
            .is_some()
    );
}

#[test]
fn a_repeated_check_is_answered_however_late() {
    let mut paths = paths();
    paths.sent(at(0));
    let first = checks(&mut paths, direct(1), at(1000));
    assert_eq!(checks(&mut paths, direct(1), at(1500)), first);
    // A round trip of 0.9 s.
    assert!(
        paths
            .acknowledged(first[0].0, Some(direct(1)), true, at(1900))
            .is_some()
    );
    assert_eq!(due(&mut paths, direct(1), at(9000)), []);
}

#[test]
fn a_lost_path_is_reported_once() {
    let mut paths = paths();
    let mut lost = 0;
    for ms in (0..30_000).step_by(100) {
        paths.sent(at(ms));
        let due = due(&mut paths, direct(1), at(ms));
        lost += due.iter().filter(|due| **due == Due::Lost).count();
    }
    assert_eq!(lost, 1);
}

#[test]
fn a_peer_with_a_single_path_is_never_checked() {
    let mut paths = Paths::default();
    paths.sent(at(0));
    assert_eq!(paths.next_wakeup(Some(direct(1))), None);
    assert!(paths.on_datagram(direct(2), Some(direct(1)), true, at(0)));
}

#[test]
fn a_removed_relay_in_use_stays_until_a_direct_path_is_proven() {
    let mut paths = paths();
    assert!(!paths.set_relays(&[], Some(relay(1))));
    assert!(paths.is_relay(relay(1)));
    let round = checks(&mut paths, relay(1), at(0));
    assert_eq!(round.len(), 2, "direct ways are looked for as before");
    let taken = paths.acknowledged(round[0].0, Some(relay(1)), true, at(20));
    assert_eq!(
        taken.map(|(_, taken)| taken),
        Some(CheckOutcome::Switch(direct(1)))
    );
    paths.set_relays(&[], Some(direct(1)));
    assert!(!paths.is_relay(relay(1)));
}

#[test]
fn a_candidate_signalled_again_keeps_its_state() {
    let mut paths = paths();
    let round = checks(&mut paths, relay(1), at(0));
    paths.acknowledged(round[0].0, Some(relay(1)), true, at(10));
    paths.set_signalled(&[direct(3), direct(1)]);
    let candidates: Vec<_> = paths
        .candidates()
        .iter()
        .map(|candidate| (candidate.address, candidate.kind))
        .collect();
    assert_eq!(
        candidates,
        [
            (direct(3), CandidateKind::Signalled),
            (direct(1), CandidateKind::Signalled),
            (relay(1), CandidateKind::Relayed)
        ]
    );
    assert!(matches!(
        paths.candidates()[1].state,
        CheckState::Works { .. }
    ));
}

#[test]
fn a_candidate_that_does_not_answer_is_silent() {
    let mut paths = paths();
    for ms in [0, 200, 500, 1000, 2000] {
        checks(&mut paths, relay(1), at(ms));
    }
    assert_eq!(paths.candidates()[0].state, CheckState::Silent);
    // Its check may still be answered.
    assert_eq!(
        super::tests::paths().candidates()[0].state,
        CheckState::Unchecked
    );
}

#[test]
fn a_candidate_without_a_route_is_tried_again() {
    let mut paths = paths();
    checks(&mut paths, relay(1), at(0));
    paths.refused(direct(1), None);
    assert_eq!(paths.candidates()[0].state, CheckState::NoRoute);
    checks(&mut paths, relay(1), at(200));
    assert_eq!(paths.candidates()[0].state, CheckState::Checking);
}

#[test]
fn candidates_are_bounded() {
    let mut paths = Paths::default();
    let many: Vec<_> = (0..100).map(direct).collect();
    paths.set_signalled(&many);
    let relays: Vec<_> = (0..100).map(relay).collect();
    paths.set_relays(&relays, None);
    for n in 0..100 {
        paths.on_datagram(
            SocketAddr::from(([203, 0, 113, n], 9)),
            Some(relay(1)),
            false,
            at(0),
        );
    }
    assert_eq!(paths.candidates().len(), MAX_CANDIDATES + MAX_RELAYS + 1);
}

#[test]
fn a_relay_that_ends_is_left_for_the_next_that_is_proven() {
    let mut paths = paths();
    checks(&mut paths, relay(1), at(0));
    assert!(paths.set_relays(&[relay(2)], Some(relay(1))));
    assert!(paths.is_relay(relay(1)));
    let round = checks(&mut paths, relay(1), at(10));
    assert!(round.iter().all(|(_, address)| *address != relay(1)));
    let next = round.iter().find(|(_, address)| *address == relay(2));
    let (check, _) = next.expect("the next is checked");
    let taken = paths.acknowledged(*check, Some(relay(1)), true, at(30));
    let expected = (Duration::from_millis(20), CheckOutcome::Switch(relay(2)));
    assert_eq!(taken, Some(expected));
    assert!(!paths.set_relays(&[relay(2)], Some(relay(2))));
    assert!(!paths.is_relay(relay(1)));
}

#[test]
fn outstanding_checks_of_a_candidate_are_bounded() {
    let mut paths = paths();
    for ms in (0..4000).step_by(10) {
        paths.restart_checks();
        checks(&mut paths, relay(1), at(ms));
        assert!(paths.candidates()[0].checks.len() <= MAX_CHECKS);
    }
    assert_eq!(paths.candidates()[0].checks.len(), MAX_CHECKS);
}

#[test]
fn the_initiator_follows_the_peer_again_after_a_second() {
    let mut paths = paths();
    assert!(paths.on_datagram(direct(2), Some(direct(1)), true, at(0)));
    assert!(!paths.on_datagram(direct(1), Some(direct(2)), true, at(999)));
    assert!(paths.on_datagram(direct(1), Some(direct(2)), true, at(1000)));
}

#[test]
fn ipv6_without_a_route_is_not_preferred() {
    let mut paths = both_families();
    assert_eq!(checks(&mut paths, direct(1), at(0)).len(), 2);
    paths.refused(direct6(), None);
    assert_eq!(checks(&mut paths, direct(1), at(200)), []);
}

#[test]
fn a_removed_relay_in_use_counts_towards_the_maximum() {
    let mut paths = paths();
    let others: Vec<_> = (10..10 + MAX_RELAYS as u8).map(relay).collect();
    paths.set_relays(&others, Some(relay(1)));
    assert!(paths.is_relay(relay(1)));
}

#[test]
fn another_relay_does_not_restart_checks_of_direct_candidates() {
    let mut paths = paths();
    checks(&mut paths, relay(1), at(0));
    assert!(paths.set_relays(&[relay(1), relay(2)], Some(relay(1))));
    assert_eq!(checks(&mut paths, relay(1), at(10)), []);
}

#[test]
fn ipv6_that_was_lost_is_not_followed_though_it_answers_again() {
    let mut paths = both_families();
    paths.set_relays(&[relay(1)], None);
    paths.sent(at(0));
    due(&mut paths, direct6(), at(3000));
    assert!(paths.is_lost());
    // A relay is in use, and both candidates answer: IPv4 first.
    paths.moved();
    let round = checks(&mut paths, relay(1), at(3000));
    let check_of = |to| round.iter().find(|(_, address)| *address == to);
    for (to, used) in [(direct(1), relay(1)), (direct6(), direct(1))] {
        let (check, _) = check_of(to).expect("a check");
        paths.acknowledged(*check, Some(used), true, at(3010));
    }
    assert!(!paths.on_datagram(direct6(), Some(direct(1)), true, at(9000)));
}

#[test]
fn a_late_direct_datagram_triggers_a_check() {
    for (from, again) in [(relay(2), false), (direct(1), true)] {
        let mut paths = paths();
        paths.set_relays(&[relay(1), relay(2)], Some(relay(1)));
        for ms in [0, 200, 500, 1000, 2000, 4000] {
            checks(&mut paths, relay(1), at(ms));
        }
        // The next round is at 9 s.
        paths.on_late_datagram(from, Some(relay(1)), at(5000));
        let checked = !checks(&mut paths, relay(1), at(5000)).is_empty();
        assert_eq!(checked, again, "{from}");
    }
}

#[test]
fn any_candidate_that_answers_replaces_a_lost_path() {
    let mut paths = both_families();
    let round = checks(&mut paths, direct(1), at(0));
    let (check, _) = round.iter().find(|(_, to)| *to == direct6()).expect("one");
    paths.sent(at(0));
    due(&mut paths, direct(1), at(3000));
    // The responder of the session prefers nothing by itself.
    let taken = paths.acknowledged(*check, Some(direct(1)), false, at(3100));
    let expected = (Duration::from_millis(3100), CheckOutcome::Switch(direct6()));
    assert_eq!(taken, Some(expected));
}

#[test]
fn a_check_refused_by_the_kernel_is_not_outstanding() {
    let mut paths = paths();
    let round = checks(&mut paths, relay(1), at(0));
    paths.refused(direct(1), None);
    let taken = paths.acknowledged(round[0].0, Some(relay(1)), true, at(10));
    assert_eq!(taken, None);
}

#[test]
fn a_check_of_an_earlier_silence_is_not_repeated() {
    let mut paths = paths();
    paths.sent(at(0));
    let first = checks(&mut paths, direct(1), at(1000));
    paths.on_datagram(direct(1), Some(direct(1)), false, at(1100));
    paths.sent(at(8000));
    let second = checks(&mut paths, direct(1), at(9000));
    assert_ne!(first, second);
    let taken = paths.acknowledged(second[0].0, Some(direct(1)), true, at(9040));
    assert_eq!(
        taken,
        Some((Duration::from_millis(40), CheckOutcome::InUse))
    );
}

#[test]
fn a_public_ipv4_address_of_a_peer_with_a_private_one_is_a_nats() {
    let at = |text: &str| -> SocketAddr { text.parse().expect(text) };
    let [outer, inner, v6] = ["192.0.2.1:7", "10.0.0.1:7", "[2001:db8::1]:7"].map(at);
    let mut paths = Paths::default();
    paths.set_signalled(&[outer, v6, at("[fd00::1]:7")]);
    assert!(!paths.has_nat(), "no private IPv4 address");
    paths.set_signalled(&[v6, outer, inner]);
    paths.set_relays(&[relay(1)], None);
    let behind_nat = |address| paths.is_behind_nat(address);
    assert_eq!(
        [outer, inner, v6, relay(1)].map(behind_nat),
        [true, false, false, false]
    );
    // A port of a symmetric NAT, from which the peer has sent.
    assert!(behind_nat(at("192.0.2.1:9")));
}

#[test]
fn tries_are_counted_until_something_arrives_directly() {
    let mut paths = paths();
    paths.on_initiation(&[direct(1), relay(1)]);
    assert_eq!(paths.candidates()[0].state, CheckState::Checking);
    paths.on_initiation(&[direct(1)]);
    assert_eq!(paths.candidates()[0].state, CheckState::Silent);
    paths.on_initiation(&[relay(1)]);
    paths.moved();
    due(&mut paths, relay(1), at(1000));
    assert_eq!(paths.direct_tries(), 3);
    paths.on_datagram(relay(1), Some(relay(1)), true, at(1000));
    assert_eq!(paths.direct_tries(), 3);
    paths.on_datagram(direct(1), Some(direct(1)), true, at(1000));
    assert_eq!(paths.direct_tries(), 0);
}

#[test]
fn an_initiation_that_leaves_the_nats_out_is_no_try() {
    let [outer, inner] = ["192.0.2.1:7", "10.0.0.1:7"].map(|text| text.parse().expect(text));
    let mut paths = Paths::default();
    paths.set_signalled(&[outer, inner]);
    paths.on_initiation(&[inner]);
    assert_eq!(paths.direct_tries(), 0);
    let states = paths.candidates().iter().map(|candidate| candidate.state);
    assert!(states.eq([CheckState::Unchecked, CheckState::Checking]));
    paths.on_initiation(&[outer, inner]);
    assert_eq!(paths.direct_tries(), 1);
}

/// Seconds in which punching periods begin and end, if an initiation is due each second.
fn punching_periods(pauses_longer: bool, seconds: std::ops::Range<u64>) -> Vec<(u64, u64)> {
    let [outer, inner] = ["192.0.2.1:7", "10.0.0.1:7"].map(|text| text.parse().expect(text));
    let mut paths = Paths::default();
    paths.set_signalled(&[outer, inner]);
    let mut periods: Vec<(u64, u64)> = Vec::new();
    for second in seconds {
        let may = paths.may_punch(at(second * 1000), pauses_longer);
        assert_eq!(may, !paths.is_pausing(at(second * 1000)));
        match periods.last_mut().filter(|(_, end)| *end == second) {
            Some((_, end)) if may => *end += 1,
            _ if may => periods.push((second, second + 1)),
            _ => {}
        }
    }
    periods
}

#[test]
fn punching_pauses_for_longer_than_nats_remember_and_begins_anew() {
    let shorter = punching_periods(false, 0..340);
    assert_eq!(
        shorter,
        [(0, 20), (55, 75), (165, 185), (220, 240), (330, 340)]
    );
    let longer = punching_periods(true, 0..340);
    assert_eq!(longer, [(0, 20), (110, 130), (220, 240), (330, 340)]);
}

/// The longest time that a NAT keeps the entry of an unanswered datagram.
const NAT_REMEMBERS: u64 = 30;

#[test]
fn both_ends_pause_together_before_a_period_soon_whenever_they_began() {
    for offset in 0..165 {
        let both = [
            punching_periods(false, 0..800),
            punching_periods(true, offset..800),
        ];
        let mut all = both.concat();
        all.sort_unstable();
        // From the time at which both have begun.
        let follow = all.windows(2).filter(|pair| pair[1].0 > offset);
        let after_pause = follow.filter(|pair| pair[1].0 >= pair[0].1 + NAT_REMEMBERS);
        let first = after_pause.map(|pair| pair[1].0).next().expect("a period");
        assert!(first - offset <= 110, "{offset}: {first}");
    }
}

#[test]
fn another_address_of_the_peer_ends_a_pause_of_punching() {
    let [outer, inner] = ["192.0.2.1:7", "10.0.0.1:7"].map(|text| text.parse().expect(text));
    let mut paths = Paths::default();
    paths.set_signalled(&[outer, inner]);
    assert!(paths.may_punch(at(0), true));
    assert!(!paths.may_punch(at(21_000), true));
    paths.set_signalled(&[outer, inner, direct(9)]);
    assert!(paths.may_punch(at(21_000), true));
}

/// Over IPv4, with no checks of IPv6 any more.
fn settled() -> Paths {
    let mut paths = both_families();
    for ms in (0..100_000).step_by(100) {
        due(&mut paths, direct(1), at(ms));
    }
    paths
}

/// Refuses the path in use until it has been checked after [`REFUSAL`]; returns the checks.
fn refuse_until_checked(paths: &mut Paths, used: SocketAddr, ms: u64) -> Vec<SocketAddr> {
    assert!(paths.refused(used, Some(used)));
    assert_eq!(paths.next_wakeup(Some(used)), Some(Instant::BOOT));
    assert_eq!(due(paths, used, at(ms)), []);
    // Further ones do not postpone the check.
    assert!(!paths.refused(used, Some(used)));
    assert_eq!(due(paths, used, at(ms + 199)), []);
    let checks = due(paths, used, at(ms + 200)).into_iter();
    checks
        .map(|due| match due {
            Due::Check(_, address) => address,
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_path_in_use_that_the_kernel_refuses_is_lost_without_a_silence() {
    let mut paths = settled();
    let used = direct(1);
    assert_eq!(refuse_until_checked(&mut paths, used, 105_000), [used]);
    assert!(paths.refused(used, Some(used)));
    assert!(due(&mut paths, used, at(105_201)).contains(&Due::Lost));
    assert!(paths.is_lost() && paths.leaves_out_lost());
    // Once, until the kernel sends over it again.
    assert!(!paths.refused(used, Some(used)));
    assert_eq!(due(&mut paths, used, at(105_900)), []);
    paths.accepted();
    assert!(!paths.is_lost());
}

#[test]
fn a_refusal_that_is_over_loses_nothing() {
    let mut paths = settled();
    let used = direct(1);
    for ms in [105_000, 106_000] {
        // A single datagram was refused, and no other was sent: the check is.
        assert_eq!(refuse_until_checked(&mut paths, used, ms), [used]);
        paths.accepted();
        assert_eq!(due(&mut paths, used, at(ms + 500)), []);
    }
    assert!(!paths.is_lost());
}

#[test]
fn datagrams_that_arrive_do_not_end_a_refusal() {
    let mut paths = settled();
    let used = direct(1);
    assert!(paths.refused(used, Some(used)));
    for ms in (105_000..105_200).step_by(20) {
        assert_eq!(due(&mut paths, used, at(ms)), []);
        paths.on_datagram(used, Some(used), true, at(ms));
    }
    assert_eq!(due(&mut paths, used, at(105_200)).len(), 1);
    assert!(paths.refused(used, Some(used)));
    assert!(due(&mut paths, used, at(105_201)).contains(&Due::Lost));
    paths.on_datagram(used, Some(used), true, at(105_220));
    assert!(paths.is_lost());
}

#[test]
fn a_refusal_of_all_paths_loses_none() {
    let mut paths = settled();
    let used = direct(1);
    paths.refused(direct6(), Some(used));
    assert_eq!(
        refuse_until_checked(&mut paths, used, 105_000),
        [direct6(), used]
    );
    paths.refused(used, Some(used));
    paths.refused(direct6(), Some(used));
    assert_eq!(due(&mut paths, used, at(105_201)), []);
    assert!(!paths.is_lost());
}

#[test]
fn a_path_that_was_refused_long_ago_is_tried_again() {
    let mut paths = settled();
    let used = direct(1);
    paths.refused(direct6(), Some(used));
    refuse_until_checked(&mut paths, used, 105_000);
    // The other check was sent.
    paths.refused(used, Some(used));
    assert!(due(&mut paths, used, at(105_201)).contains(&Due::Lost));
}

#[test]
fn the_only_path_and_one_that_is_not_in_use_are_not_lost_by_a_refusal() {
    let mut only = Paths::default();
    only.set_signalled(&[direct(1)]);
    let mut others = settled();
    for (paths, refused) in [(&mut only, direct(1)), (&mut others, direct6())] {
        for ms in [105_000, 106_000, 107_000] {
            assert!(!paths.refused(refused, Some(direct(1))));
            assert!(!due(paths, direct(1), at(ms)).contains(&Due::Lost), "{ms}");
        }
    }
}
