use super::*;
use crate::paths::Paths;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

struct Seeded(ChaCha8Rng);

impl Rng for Seeded {
    fn fill(&mut self, destination: &mut [u8]) {
        self.0.fill_bytes(destination);
    }
}

fn seeded(seed: u64) -> Seeded {
    Seeded(ChaCha8Rng::seed_from_u64(seed))
}

const AFTER_MILLIS: u64 = AFTER.as_millis() as u64;
/// Time before ports are opened as the last resort.
const LAST_RESORT: Duration = Duration::from_secs(20);
/// Probes per second.
const RATE: usize = 500;

fn at(millis: u64) -> Instant {
    Instant::BOOT + Duration::from_millis(1_000_000 + millis)
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect(text)
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect(text)
}

/// One end with its input.
struct End {
    birthday: Birthday,
    paths: Paths,
    nat_mappings: NatMappings,
    relayed: bool,
    active: bool,
    last_resort: Option<Duration>,
    opening_peers: usize,
    probing_peers: usize,
    rng: Seeded,
}

impl End {
    fn new(v4: Mapping, signalled: &[&str]) -> End {
        let mut paths = Paths::default();
        paths.set_signalled(
            &signalled
                .iter()
                .map(|text| address(text))
                .collect::<Vec<_>>(),
        );
        End {
            birthday: Birthday::default(),
            paths,
            nat_mappings: NatMappings {
                v4,
                v6: Mapping::Unknown,
                outer: vec![ip("203.0.113.9")],
            },
            last_resort: None,
            relayed: true,
            active: true,
            opening_peers: 0,
            probing_peers: 0,
            rng: seeded(1),
        }
    }

    fn due(&mut self, millis: u64) -> Vec<Due> {
        let context = Context {
            relayed: self.relayed,
            active: self.active,
            candidates: self.paths.candidates(),
            nat_mappings: &self.nat_mappings,
            last_resort: self.last_resort,
            opening_peers: self.opening_peers,
            probing_peers: self.probing_peers,
        };
        let due = self.birthday.due(&context, at(millis), &mut self.rng);
        for due in &due {
            if let Due::Probe(_, ports) = due {
                self.birthday.on_probed(ports.len());
            }
        }
        due
    }

    /// Polls from `from` to `until`. Returns all actions with their times.
    fn run(&mut self, from: u64, until: u64) -> Vec<(u64, Due)> {
        let mut all = Vec::new();
        for millis in (from..until).step_by(10) {
            all.extend(self.due(millis).into_iter().map(|due| (millis, due)));
        }
        all
    }
}

/// An end behind a symmetric NAT at 198.51.100.7. Its peer is seen as 203.0.113.9 port 4000.
fn symmetric() -> End {
    let own = Mapping::AddressAndPortDependent(vec![ip("198.51.100.7")]);
    End::new(own, &["203.0.113.9:4000", "192.168.1.10:4000"])
}

/// The other end.
fn easy() -> End {
    End::new(
        Mapping::EndpointIndependent,
        &["198.51.100.7:6000", "10.0.0.5:6000"],
    )
}

fn request(addresses: &[&str]) -> ProbeRequest {
    ProbeRequest {
        ports: PORTS,
        addresses: addresses.iter().map(|text| ip(text)).collect(),
    }
}

fn probed(due: &[(u64, Due)]) -> Vec<SocketAddr> {
    let ports = due.iter().filter_map(|(_, due)| match due {
        Due::Probe(_, ports) => Some(ports.clone()),
        _ => None,
    });
    ports.flatten().collect()
}

fn punches(due: &[(u64, Due)]) -> Vec<u64> {
    let punches = due.iter().filter(|(_, due)| matches!(due, Due::Punch(..)));
    punches.map(|(at, _)| *at).collect()
}

/// Probability that `k` probes hit one of 256 open ports of 64,512. The i-th one misses with
/// probability (64512 - 256 - i) / (64512 - i) (hypergeometric).
fn hit_probability(k: u32) -> f64 {
    let miss = |i: u32| f64::from(RANGE - u32::from(PORTS) - i) / f64::from(RANGE - i);
    1.0 - (0..k).map(miss).product::<f64>()
}

#[test]
fn every_port_comes_once() {
    for seed in 0..20 {
        let mut ports = Ports::random(&mut seeded(seed));
        let all: BTreeSet<u16> = (0..RANGE).map(|_| ports.next()).collect();
        assert_eq!(all.len(), RANGE as usize);
        assert_eq!(all.first(), Some(&FIRST_PORT));
    }
}

#[test]
fn probes_hit_a_port_with_the_computed_probability() {
    // The bound of the documentation, from below.
    for (k, least) in [(1024, 0.9828), (2048, 0.9997)] {
        let bound = 1.0 - (1.0 - f64::from(PORTS) / f64::from(RANGE)).powf(f64::from(k));
        assert!(
            bound >= least && hit_probability(k) >= bound,
            "{k}: {bound}"
        );
    }
    const TRIALS: u32 = 2000;
    let mut rng = seeded(7);
    let mut hits = [0; 3];
    let tries = [128, 512, 1024];
    for _ in 0..TRIALS {
        let mut open = BTreeSet::new();
        while open.len() < usize::from(PORTS) {
            let port = rng.next_u32() as u16;
            if port >= FIRST_PORT {
                open.insert(port);
            }
        }
        let mut ports = Ports::random(&mut rng);
        let first = (1..=2048).find(|_| open.contains(&ports.next()));
        for (count, k) in hits.iter_mut().zip(tries) {
            *count += u32::from(first.is_some_and(|first| first <= k));
        }
    }
    for (count, k) in hits.into_iter().zip(tries) {
        let (share, expected) = (f64::from(count) / f64::from(TRIALS), hit_probability(k));
        // Four standard deviations of a binomial share.
        let spread = 4.0 * (expected * (1.0 - expected) / f64::from(TRIALS)).sqrt();
        assert!(
            (share - expected).abs() < spread,
            "{k}: {share}, {expected}"
        );
    }
}

#[test]
fn ports_are_opened_and_requested_after_half_a_second_on_a_relay() {
    let mut end = symmetric();
    let due = end.run(0, 1500);
    let destinations = vec![address("203.0.113.9:4000")];
    assert_eq!(due, [(500, Due::Punch(destinations, Some(OPENER_HOPS)))]);
    end.birthday.on_punched(PORTS, at(1500));
    assert_eq!(end.due(1500), [Due::Request(request(&["198.51.100.7"]))]);
    assert_eq!(end.birthday.punch_state(), PunchState::Open(PORTS));
}

#[test]
fn ports_are_opened_behind_a_symmetric_nat_only() {
    for nat_mappings in [Mapping::EndpointIndependent, Mapping::Unknown] {
        let mut end = symmetric();
        end.nat_mappings.v4 = nat_mappings;
        assert_eq!(end.run(0, 10_000), []);
        // Nor does it schedule anything.
        assert_eq!(end.birthday.next_wakeup(false, at(20_000)), None);
    }
}

#[test]
fn peers_without_another_public_address_are_not_punched_for() {
    for signalled in [
        &["192.168.1.10:4000", "100.64.0.3:4000", "10.1.1.1:1"][..],
        &["198.51.100.7:4000"],
        &["[2001:db8::7]:4000"],
    ] {
        let mut end = symmetric();
        end.paths = End::new(Mapping::Unknown, signalled).paths;
        assert_eq!(end.run(0, 10_000), [], "{signalled:?}");
    }
}

#[test]
fn private_ranges_are_those_of_the_rfcs() {
    // RFC 1918, RFC 6598 (100.64.0.0/10), RFC 4193 (fc00::/7): first and last of each, and their
    // neighbours.
    for private in [
        "10.0.0.0",
        "10.255.255.255",
        "172.16.0.0",
        "172.31.255.255",
        "192.168.0.0",
        "192.168.255.255",
        "100.64.0.0",
        "100.127.255.255",
        "fc00::",
        "fdff::ffff",
    ] {
        assert!(is_private(ip(private)), "{private}");
    }
    for public in [
        "9.255.255.255",
        "11.0.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.169.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "101.64.0.0",
        "fbff::ffff",
        "fe00::",
    ] {
        assert!(!is_private(ip(public)), "{public}");
    }
}

#[test]
fn two_addresses_of_a_peer_are_punched_towards_at_one_port_each() {
    let mut end = symmetric();
    let signalled = [
        "203.0.113.9:1",
        "203.0.113.9:2",
        "203.0.113.10:3",
        "203.0.113.11:4",
    ];
    end.paths = End::new(Mapping::Unknown, &signalled).paths;
    let destinations = [signalled[0], signalled[2]].map(address).to_vec();
    assert_eq!(
        end.run(0, 1500),
        [(AFTER_MILLIS, Due::Punch(destinations, Some(OPENER_HOPS)))]
    );
}

#[test]
fn two_own_addresses_are_requested_at_most() {
    let own = ["198.51.100.7", "198.51.100.8", "198.51.100.9"];
    let mut end = symmetric();
    end.nat_mappings.v4 = Mapping::AddressAndPortDependent(own.map(ip).to_vec());
    end.run(0, 3500);
    end.birthday.on_punched(PORTS, at(3500));
    assert_eq!(end.due(3500), [Due::Request(request(&own[..2]))]);
}

#[test]
fn without_packets_no_ports_are_opened() {
    let mut end = symmetric();
    end.active = false;
    assert_eq!(end.run(0, 60_000), []);
    end.active = true;
    assert_eq!(punches(&end.run(60_000, 62_000)).len(), 1);
}

#[test]
fn without_addresses_of_the_peer_punches_stop() {
    let mut end = symmetric();
    assert_eq!(punches(&end.run(0, 2000)), [AFTER_MILLIS]);
    end.paths.set_signalled(&[]);
    assert_eq!(end.run(2000, 60_000), []);
}

#[test]
fn an_attempt_at_a_vanished_address_restarts_with_its_remaining_punches() {
    let signalled = |end: &mut End, signalled: &[&str], millis| {
        end.paths = End::new(Mapping::Unknown, signalled).paths;
        end.birthday.on_nat_change(at(millis));
        let wakeup = end.birthday.next_wakeup(true, at(1_000_000));
        assert_eq!(wakeup, Some(Instant::BOOT), "at once");
    };
    let others = ["203.0.113.77:4000", "203.0.113.9:4000"];
    let mut end = symmetric();
    assert_eq!(punches(&end.run(0, AFTER_MILLIS + 100)), [AFTER_MILLIS]);
    // Irrelevant to this NAT: the attempt continues.
    signalled(
        &mut end,
        &["203.0.113.9:4000", "192.168.7.7:1"],
        AFTER_MILLIS + 100,
    );
    end.due(AFTER_MILLIS + 100);
    assert!(end.birthday.is_open(at(AFTER_MILLIS + 100)));
    signalled(&mut end, &others[..1], AFTER_MILLIS + 200);
    assert_eq!(end.due(AFTER_MILLIS + 200), []);
    assert!(!end.birthday.is_open(at(AFTER_MILLIS + 200)));
    let again = 2 * AFTER_MILLIS + 200;
    let due = end.run(AFTER_MILLIS + 210, again + 60_000);
    let destinations = others[..1].iter().map(|to| address(to)).collect();
    assert_eq!(due[0], (again, Due::Punch(destinations, Some(OPENER_HOPS))));
    assert_eq!(punches(&due), [again, again + 2000]);
    assert_eq!(end.birthday.failed_attempts(), 1, "the second alone");
}

#[test]
fn an_attempt_restarts_for_other_own_addresses_but_not_for_another_order() {
    let own = |all: [&str; 2]| Mapping::AddressAndPortDependent(all.map(ip).to_vec());
    let mut end = symmetric();
    end.nat_mappings.v4 = own(["198.51.100.7", "198.51.100.8"]);
    end.run(0, AFTER_MILLIS + 10);
    for (seen, open) in [
        (["198.51.100.8", "198.51.100.7"], true),
        (["198.51.100.8", "198.51.100.9"], false),
    ] {
        end.nat_mappings.v4 = own(seen);
        end.birthday.on_nat_change(at(AFTER_MILLIS + 10));
        end.due(AFTER_MILLIS + 10);
        assert_eq!(end.birthday.is_open(at(AFTER_MILLIS + 10)), open);
    }
    end.run(AFTER_MILLIS + 20, 2 * AFTER_MILLIS + 20);
    end.birthday.on_punched(PORTS, at(2 * AFTER_MILLIS + 20));
    let addresses = ["198.51.100.8", "198.51.100.9"];
    assert_eq!(
        end.due(2 * AFTER_MILLIS + 20),
        [Due::Request(request(&addresses))]
    );
}

#[test]
fn a_success_from_a_vanished_address_restarts_the_search() {
    let mut end = symmetric();
    end.run(0, AFTER_MILLIS + 10);
    end.birthday.on_punch_succeeded(at(AFTER_MILLIS + 10));
    end.paths = End::new(Mapping::Unknown, &["203.0.113.77:4000"]).paths;
    end.birthday.on_nat_change(at(AFTER_MILLIS + 20));
    let again = AFTER_MILLIS + 10 + 5000 + AFTER_MILLIS;
    assert_eq!(punches(&end.run(AFTER_MILLIS + 20, again + 1000)), [again]);
}

#[test]
fn failed_attempts_become_rare() {
    let mut end = symmetric();
    let due = end.run(0, 5_000_000);
    let first: Vec<u64> = punches(&due)
        .into_iter()
        .scan(0, |last, at| {
            let begins = at - std::mem::replace(last, at) > 10_000 || at == AFTER_MILLIS;
            Some(begins.then_some(at))
        })
        .flatten()
        .collect();
    // 15 s each, and 1, 5, 30 and 30 minutes between.
    let [a, b, c] = [15 + 60, 15 + 300, 15 + 1800];
    let begin = [0, a, a + b, a + b + c, a + b + 2 * c];
    assert_eq!(first, begin.map(|seconds| AFTER_MILLIS + seconds * 1000));
    // The ports are kept open meanwhile.
    let open = [0, 2000, 7000].map(|millis| AFTER_MILLIS + millis);
    assert_eq!(punches(&due)[..3], open);
}

#[test]
fn a_nat_change_resets_the_interval_of_attempts() {
    let mut end = symmetric();
    // The third begins 390 s after the first, and punches for the last time 7 s later.
    end.run(0, 420_000);
    assert_eq!(end.birthday.failed_attempts(), 3);
    end.birthday.on_nat_change(at(420_000));
    assert_eq!(end.birthday.failed_attempts(), 0);
    // A minute after the last punch, and a minute after the end of that attempt.
    let begin = punches(&end.run(420_000, 533_000));
    let first = AFTER_MILLIS + 390_000 + 7000 + 60_000;
    let expected = [0, 2000, 7000, 75_000].map(|millis| first + millis);
    assert_eq!(begin, expected);
}

#[test]
fn a_path_lost_again_is_searched_at_once_but_not_within_a_minute() {
    let last_punch = AFTER_MILLIS + 7000;
    for (lost, again) in [
        (43_000, last_punch + 60_000),
        (72_000, 72_000 + AFTER_MILLIS),
        (103_000, 103_000 + AFTER_MILLIS),
    ] {
        let mut end = symmetric();
        end.run(0, 30_000);
        assert_eq!(end.birthday.failed_attempts(), 1);
        end.relayed = false;
        end.due(30_000);
        end.relayed = true;
        assert_eq!(punches(&end.run(lost, again + 1000)), [again]);
    }
}

#[test]
fn unused_punches_remain_for_attempts_that_follow_at_once() {
    let mut end = symmetric();
    let lost_again = |end: &mut End, millis| {
        end.birthday.on_punched(PORTS, at(millis));
        end.birthday.on_punch_succeeded(at(millis));
        end.relayed = false;
        end.due(millis);
        end.relayed = true;
    };
    assert_eq!(punches(&end.run(0, 2000)), [AFTER_MILLIS]);
    lost_again(&mut end, 2000);
    // This attempt fails and has two punches of three. The next one in this minute has none; the
    // one after it has all.
    let next = punches(&end.run(10_000, 100_000));
    let expected = [0, 2000, 70_000, 72_000, 77_000].map(|millis| 10_000 + AFTER_MILLIS + millis);
    assert_eq!(next, expected);
}

#[test]
fn unused_probes_remain_for_the_next_run_of_the_same_minute() {
    let mut end = easy();
    end.due(0);
    let requests = |end: &mut End, from, until| {
        end.birthday.on_request(request(&["198.51.100.7"]));
        probed(&end.run(from, until)).len()
    };
    assert_eq!(requests(&mut end, 0, 1000), RATE);
    end.relayed = false;
    end.due(1000);
    end.relayed = true;
    assert_eq!(requests(&mut end, 10_000, 30_000), PROBES as usize - RATE);
    assert_eq!(requests(&mut end, 69_000, 69_900), 0);
    // A minute after the start of that run.
    assert_eq!(requests(&mut end, 70_000, 90_000), PROBES as usize);
}

#[test]
fn a_request_at_the_earliest_time_is_served_at_once() {
    // Both windows start with the first action of the previous attempt; the request takes 2 s
    // longer there than now.
    let (mut asks, mut serves) = (symmetric(), easy());
    let first = punches(&asks.run(0, 30_000))[0];
    serves.due(0);
    serves.birthday.on_request(request(&["198.51.100.7"]));
    serves.run(first + 2000, 30_000);
    asks.relayed = false;
    asks.due(30_000);
    asks.relayed = true;
    let again = punches(&asks.run(30_000, 200_000))[0];
    serves.birthday.on_request(request(&["198.51.100.7"]));
    assert_eq!(probed(&serves.run(again, again + 100)).len(), RATE / 10);
}

/// The maximum sum over `window` consecutive counts.
fn most_of(window: usize, counts: &[usize]) -> usize {
    let before = |at: usize| counts[..at].iter().sum::<usize>();
    let mut sum = before(window);
    let moves = counts.iter().zip(&counts[window..]).map(|(gone, new)| {
        sum = sum + new - gone;
        sum
    });
    moves.max().unwrap_or(0).max(before(window))
}

#[test]
fn signals_and_requests_of_a_peer_never_exceed_the_limit_per_minute() {
    let unknown_sources = ["203.0.113.9:4000", "203.0.113.10:53", "[2001:db8::9]:1"];
    let requested = ["203.0.113.9", "203.0.113.10", "2001:db8::9", "2001:db8::a"];
    // Punches and probes in a minute, and probes in a burst.
    let mut most = [0; 3];
    for (seed, symmetric) in (0..40).map(|seed| (seed, seed % 2 == 0)) {
        let mapping = if symmetric {
            Mapping::AddressAndPortDependent(vec![ip("198.51.100.7")])
        } else {
            Mapping::EndpointIndependent
        };
        let mut end = End::new(mapping.clone(), &unknown_sources);
        end.nat_mappings.v6 = mapping;
        let mut rng = seeded(seed);
        // In each 50 ms of five minutes.
        let (mut punches, mut probes) = ([0; 6000], [0; 6000]);
        for tick in 0..6000 {
            let millis = tick as u64 * 50;
            // Some runs lag now and then, by less than what ends them.
            if seed % 4 == 3 && tick / 300 % 2 == 0 && tick % 19 > 0 {
                continue;
            }
            // An event every second or two.
            match rng.next_u32() % 200 {
                0 => end.relayed = false,
                1..5 => end.relayed = true,
                5 => end.birthday.on_nat_change(at(millis)),
                6 => end.birthday.on_punch_succeeded(at(millis)),
                7 => end.birthday.on_punched(0, at(millis)),
                8 => {
                    let ports = 0;
                    let addresses = Vec::new();
                    end.birthday.on_request(ProbeRequest { ports, addresses });
                }
                9..12 => end
                    .birthday
                    .on_request(request(&requested[..1 + millis as usize % 4])),
                12..15 => {
                    let signalled: Vec<_> =
                        unknown_sources.iter().map(|text| address(text)).collect();
                    end.paths
                        .set_signalled(&signalled[..1 + millis as usize % 3]);
                    end.birthday.on_nat_change(at(millis));
                }
                _ => end.birthday.on_punched(PORTS, at(millis)),
            }
            for due in end.due(millis) {
                match due {
                    Due::Punch(destinations, _) => {
                        assert!(destinations.len() <= MAX_DESTINATIONS);
                        punches[tick] += 1;
                    }
                    Due::Probe(_, ports) => probes[tick] += ports.len(),
                    Due::Request(_) => {}
                }
            }
        }
        let minute = 60 * 20;
        most[0] = most[0].max(most_of(minute, &punches));
        most[1] = most[1].max(most_of(minute, &probes));
        most[2] = most[2].max(most_of(1, &probes));
    }
    assert_eq!(most, [PUNCHES, PROBES, PER_TICK].map(|most| most as usize));
}

#[test]
fn ports_are_open_for_two_peers_at_most_and_then_for_the_next() {
    let mut end = symmetric();
    end.opening_peers = MAX_OPENING;
    assert_eq!(end.run(0, 20_000), []);
    end.opening_peers = MAX_OPENING - 1;
    assert_eq!(punches(&end.run(20_000, 23_000)).len(), 1);
}

#[test]
fn no_request_is_sent_once_a_datagram_arrived() {
    let mut end = symmetric();
    end.run(0, 3500);
    end.birthday.on_punched(PORTS, at(3500));
    end.due(3500);
    end.birthday.on_punch_succeeded(at(4000));
    assert!(!end.birthday.is_open(at(4000)));
    assert_eq!(end.run(4000, 60_000), []);
}

#[test]
fn a_datagram_that_leads_to_no_path_in_five_seconds_is_a_failure() {
    let mut end = symmetric();
    end.run(0, 4000);
    end.birthday.on_punch_succeeded(at(4000));
    assert_eq!(punches(&end.run(4000, 70_000)), [69_000]);
    assert_eq!(end.birthday.failed_attempts(), 1);
}

#[test]
fn without_open_ports_a_punch_cannot_succeed() {
    let mut end = symmetric();
    end.due(0);
    end.birthday.on_punch_succeeded(at(100));
    assert!(matches!(end.birthday.punch_state(), PunchState::Idle(_)));
}

#[test]
fn without_open_sockets_no_request_is_sent() {
    let mut end = symmetric();
    end.run(0, 3500);
    end.birthday.on_punched(0, at(3500));
    assert_eq!(end.run(3500, 60_000), []);
}

#[test]
fn probing_sends_five_hundred_probes_a_second_each_port_once() {
    let mut end = easy();
    end.due(0);
    end.birthday.on_request(request(&["198.51.100.7"]));
    let second = probed(&end.run(0, 1000));
    assert_eq!(second.len(), RATE);
    let mut all = second;
    all.extend(probed(&end.run(1000, 30_000)));
    assert_eq!(all.len(), PROBES as usize);
    assert_eq!(end.birthday.probes(), u64::from(PROBES));
    assert!(all.iter().all(|to| to.ip() == ip("198.51.100.7")));
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
}

#[test]
fn an_address_requested_twice_is_probed_once() {
    let mut end = easy();
    end.due(0);
    end.birthday.on_request(request(&["198.51.100.7"; 2]));
    let all = probed(&end.run(0, 1000));
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
}

#[test]
fn a_request_for_another_address_gets_the_remaining_probes() {
    let mut end = easy();
    end.paths = End::new(Mapping::Unknown, &["198.51.100.7:1", "198.51.100.8:1"]).paths;
    end.due(0);
    end.birthday.on_request(request(&["198.51.100.7"]));
    assert_eq!(probed(&end.run(0, 1000)).len(), RATE);
    end.birthday.on_request(request(&["198.51.100.8"]));
    let second = probed(&end.run(1000, 2000));
    assert_eq!(second.len(), RATE);
    assert!(second.iter().all(|to| to.ip() == ip("198.51.100.8")));
    // The same request again changes nothing: no port twice.
    end.birthday.on_request(request(&["198.51.100.8"]));
    let all = [second, probed(&end.run(2000, 60_000))].concat();
    assert_eq!(all.len(), PROBES as usize - RATE);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
}

#[test]
fn an_early_request_is_served_once_allowed_until_it_is_repeated() {
    let know = |end: &mut End, millis| {
        let known = easy();
        (end.nat_mappings, end.paths) = (known.nat_mappings, known.paths);
        end.birthday.on_nat_change(at(millis));
        let wakeup = end.birthday.next_wakeup(false, at(1_000_000));
        assert_eq!(wakeup, Some(Instant::BOOT), "at once");
    };
    let early: [fn(&mut End); 2] = [
        |end| end.nat_mappings.v4 = Mapping::Unknown,
        |end| end.paths = Paths::default(),
    ];
    for early in early {
        for (known, probes) in [(4990, RATE), (5000, 0)] {
            let mut end = easy();
            early(&mut end);
            end.birthday.on_request(request(&["198.51.100.7"]));
            assert_eq!(end.run(0, known), []);
            know(&mut end, known);
            assert_eq!(probed(&end.run(known, known + 1000)).len(), probes);
        }
    }
}

#[test]
fn stalled_probing_skips_bursts_and_ends_after_a_second() {
    let mut end = easy();
    end.birthday.on_request(request(&["198.51.100.7"]));
    for (millis, probes) in [
        (0, 25),
        (990, 25),
        (1030, 0),
        (1040, 25),
        (2090, 0),
        (2200, 0),
    ] {
        let due = end.due(millis).into_iter().map(|due| (millis, due));
        assert_eq!(
            probed(&due.collect::<Vec<_>>()).len(),
            probes,
            "{millis} ms"
        );
    }
    assert!(!end.birthday.is_probing(at(2200)));
}

#[test]
fn stalled_probing_ends_on_time_so_that_no_minute_exceeds_the_limit() {
    let mut end = easy();
    let mut sent = vec![0; 3000];
    for (tick, sent) in sent.iter_mut().enumerate() {
        // As late as allowed, and on time from the 50th second on.
        if tick < 1000 && tick % 20 > 0 {
            continue;
        }
        let millis = tick as u64 * 50;
        if tick == 0 || tick >= 1000 {
            end.birthday.on_request(request(&["198.51.100.7"]));
        }
        *sent = probed(&end.run(millis, millis + 10)).len();
    }
    // 2,048 at 500 a second take 4.1 s, which is five bursts at one burst a second.
    assert_eq!(sent[..1000].iter().sum::<usize>(), 125);
    assert_eq!(most_of(60 * 20, &sent), PROBES as usize);
}

#[test]
fn the_family_without_a_symmetric_nat_is_probed() {
    let mut end = easy();
    end.nat_mappings.v4 = Mapping::AddressAndPortDependent(vec![ip("203.0.113.9")]);
    end.nat_mappings.v6 = Mapping::EndpointIndependent;
    end.paths = End::new(
        Mapping::Unknown,
        &["198.51.100.7:6000", "[2001:db8::7]:6000"],
    )
    .paths;
    end.due(0);
    end.birthday
        .on_request(request(&["198.51.100.7", "2001:db8::7"]));
    let all = probed(&end.run(0, 100));
    assert!(!all.is_empty() && all.iter().all(SocketAddr::is_ipv6));
    assert!(!end.birthday.is_both_symmetric());
}

#[test]
fn only_signalled_public_addresses_are_probed() {
    for requested in ["203.0.113.77", "10.0.0.5", "192.168.1.1", "2001:db8::1"] {
        let mut end = easy();
        end.due(0);
        end.birthday.on_request(request(&[requested]));
        assert_eq!(end.run(0, 1000), [], "{requested}");
    }
}

#[test]
fn with_an_unknown_nat_or_a_direct_path_nothing_is_probed() {
    let mut unknown = easy();
    unknown.nat_mappings.v4 = Mapping::Unknown;
    let mut direct = easy();
    direct.relayed = false;
    for mut end in [unknown, direct] {
        end.due(0);
        end.birthday.on_request(request(&["198.51.100.7"]));
        assert_eq!(end.run(0, 1000), []);
    }
}

#[test]
fn probing_ends_when_the_path_is_direct() {
    let mut end = easy();
    end.due(0);
    end.birthday.on_request(request(&["198.51.100.7"]));
    assert_eq!(probed(&end.run(0, 500)).len(), RATE / 2);
    end.relayed = false;
    assert_eq!(end.run(500, 1000), []);
    end.relayed = true;
    assert_eq!(end.run(1000, 2000), []);
}

#[test]
fn one_request_a_minute_is_served_and_four_peers_at_a_time() {
    let mut end = easy();
    end.due(0);
    end.probing_peers = MAX_PROBING;
    end.birthday.on_request(request(&["198.51.100.7"]));
    assert_eq!(end.run(0, 1000), []);
    end.probing_peers = MAX_PROBING - 1;
    for second in 0..122 {
        end.birthday.on_request(request(&["198.51.100.7"]));
        end.run(second * 1000, second * 1000 + 1000);
    }
    // At 0, 60 and 120 s, of which two belong to the last.
    assert_eq!(
        end.birthday.probes(),
        2 * u64::from(PROBES) + 2 * RATE as u64
    );
}

#[test]
fn two_symmetric_ends_notice_each_other() {
    let mut ends = [symmetric(), symmetric()];
    ends[1].nat_mappings.v4 = Mapping::AddressAndPortDependent(vec![ip("203.0.113.9")]);
    ends[1].paths = End::new(Mapping::Unknown, &["198.51.100.7:6000"]).paths;
    ends[1].due(0);
    ends[0].run(0, 3500);
    ends[0].birthday.on_punched(PORTS, at(3500));
    ends[0].due(3500);
    ends[1].birthday.on_request(request(&["198.51.100.7"]));
    let none = ProbeRequest {
        ports: 0,
        addresses: Vec::new(),
    };
    assert_eq!(ends[1].due(3500), [Due::Request(none.clone())]);
    ends[0].birthday.on_request(none);
    for end in &mut ends {
        // Nothing more for half an hour, and no answer to an answer.
        assert_eq!(end.run(3500, 1_800_000), []);
        assert!(end.birthday.is_both_symmetric());
    }
    // Another NAT may be different.
    ends[0].birthday.on_nat_change(at(1_800_000));
    assert!(!ends[0].birthday.is_both_symmetric());
    assert_eq!(punches(&ends[0].run(1_800_000, 1_802_000)).len(), 1);
}

#[test]
fn hopeless_attempts_are_repeated_every_half_an_hour() {
    let mut end = symmetric();
    end.run(0, 3500);
    end.birthday.on_request(ProbeRequest {
        ports: 0,
        addresses: Vec::new(),
    });
    let begin = punches(&end.run(3500, 4_000_000));
    // And nothing more is sent.
    let first = 3500 + 1_800_000;
    assert_eq!(begin[..3], [first, first + 2000, first + 7000]);
    assert_eq!(begin[3], first + 15_000 + 1_800_000);
}

#[test]
fn requests_round_trip_up_to_the_maximum() {
    let all = ["198.51.100.7", "198.51.100.8", "2001:db8::1", "2001:db8::2"];
    let whole = request(&all);
    let bytes = whole.to_bytes();
    assert_eq!((bytes.len(), whole.len()), (2 + 4 * 16, 2 + 4 * 16));
    // RFC 4291, section 2.5.5.2.
    assert_eq!(bytes[2..14], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    assert_eq!(ProbeRequest::read(&bytes), Some(whole.clone()));
    assert_eq!(
        ProbeRequest::read(&[&bytes[..], &[7; 500]].concat()),
        Some(whole)
    );
    assert_eq!(
        ProbeRequest::read(&bytes[..2 + 16 + 15]),
        Some(request(&all[..1]))
    );
    assert_eq!(ProbeRequest::read(&bytes[..1]), None);
}

#[test]
fn without_a_symmetric_nat_ports_are_opened_after_twenty_seconds() {
    let mut end = easy();
    assert!(punches(&end.run(0, 100_000)).is_empty());
    let mut end = easy();
    end.last_resort = Some(LAST_RESORT);
    let due = end.run(0, 21_000);
    let destinations = vec![address("198.51.100.7:6000")];
    assert_eq!(due, [(20_000, Due::Punch(destinations, Some(OPENER_HOPS)))]);
    end.birthday.on_punched(PORTS, at(21_000));
    assert_eq!(end.due(21_000), [Due::Request(request(&["203.0.113.9"]))]);
}

#[test]
fn a_nat_that_turns_out_to_be_symmetric_does_not_wait_for_the_last_resort() {
    let mut end = easy();
    end.last_resort = Some(LAST_RESORT);
    assert!(punches(&end.run(0, 1000)).is_empty());
    end.last_resort = None;
    end.nat_mappings.v4 = Mapping::AddressAndPortDependent(vec![ip("203.0.113.9")]);
    end.birthday.on_nat_change(at(1000));
    assert_eq!(punches(&end.run(1000, 2500)), [1000 + AFTER_MILLIS]);
}

#[test]
fn the_last_resort_is_not_for_the_peer_of_a_symmetric_nat_nor_within_a_nat() {
    let mut end = easy();
    end.last_resort = Some(LAST_RESORT);
    end.run(0, 1000);
    // The NAT of the peer is symmetric, so it has not waited.
    end.birthday.on_request(request(&["198.51.100.7"]));
    assert!(punches(&end.run(1000, 100_000)).is_empty());
    // Behind the same NAT they could only meet inside.
    let mut end = End::new(
        Mapping::EndpointIndependent,
        &["203.0.113.9:1", "10.0.0.5:1"],
    );
    end.last_resort = Some(LAST_RESORT);
    assert!(punches(&end.run(0, 100_000)).is_empty());
}
