//! Cookies between two ends, with boringtun at either end, and with forged messages.

use std::time::Duration;

use boringtun::noise::rate_limiter::RateLimiter as TheirLimiter;
use boringtun::noise::{Tunn, TunnResult};
use proptest::prelude::*;

use super::*;
use crate::keys::{PresharedKey, PrivateKey};
use crate::noise::Initiation;
use crate::rng::testing::Seeded;
use crate::tai64n::Tai64n;

const START: Instant = Instant::from_nanos(1 << 40);
const SOURCE: &str = "192.0.2.1:51820";

fn identity(seed: u8) -> Identity {
    Identity::new(PrivateKey::from_bytes([seed; 32]))
}

fn source(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// An initiation of `identity(1)` to `identity(2)`, index 7.
fn initiation(protocol: Protocol, seed: u64) -> Vec<u8> {
    let mut out = [0; MAX_HANDSHAKE_LEN];
    let (_, len) = Initiation {
        protocol,
        identity: &identity(1),
        remote: identity(2).public(),
        psk: &PresharedKey::default(),
        sender_index: 7,
        timestamp: Tai64n::from_unix(Duration::from_secs(seed)),
        payload: &[],
    }
    .write(&mut Seeded::new(seed), &mut out)
    .unwrap();
    out[..len].to_vec()
}

/// A receiver under load, and a sender with its cookie.
struct Pair {
    checker: CookieChecker,
    jar: CookieJar,
    rng: Seeded,
    sent: u64,
}

impl Pair {
    fn new(protocol: Protocol) -> Self {
        Pair {
            checker: CookieChecker::new(protocol, &identity(2)),
            jar: CookieJar::new(protocol, identity(2).public()),
            rng: Seeded::new(99),
            sent: 0,
        }
    }

    fn with_cookie(protocol: Protocol) -> Self {
        let mut pair = Pair::new(protocol);
        let message = pair.send(START);
        let reply = pair.reply(&message, SOURCE, START);
        pair.jar.consume_reply(&reply, START).unwrap();
        pair
    }

    fn send(&mut self, now: Instant) -> Vec<u8> {
        self.sent += 1;
        let mut message = initiation(self.jar.protocol, self.sent);
        self.jar.stamp(&mut message, now);
        message
    }

    fn admit(&mut self, message: &[u8], from: &str, now: Instant) -> Admission {
        self.checker
            .admit(message, source(from), || true, now, &mut self.rng)
    }

    fn reply(&mut self, message: &[u8], to: &str, now: Instant) -> [u8; COOKIE_REPLY_LEN] {
        self.checker
            .create_reply(message, source(to), now, &mut self.rng)
            .unwrap()
    }
}

#[test]
fn without_load_mac1_suffices() {
    let mut pair = Pair::new(Protocol::WireGuard);
    let mut message = pair.send(START);
    let mut admit = |message: &[u8]| {
        pair.checker
            .admit(message, source(SOURCE), || false, START, &mut pair.rng)
    };
    assert_eq!(admit(&message), Admission::Process);
    let mac1_at = message.len() - MACS_LEN;
    message[mac1_at] ^= 1;
    assert_eq!(admit(&message), Admission::InvalidMac1);
}

#[test]
fn under_load_a_cookie_is_needed_and_suffices() {
    for protocol in [Protocol::WireGuard, Protocol::Native] {
        let mut pair = Pair::new(protocol);
        let message = pair.send(START);
        assert_eq!(pair.admit(&message, SOURCE, START), Admission::NeedsCookie);
        let reply = pair.reply(&message, SOURCE, START);
        pair.jar.consume_reply(&reply, START).unwrap();
        let message = pair.send(START);
        assert_eq!(pair.admit(&message, SOURCE, START), Admission::Process);
    }
}

#[test]
fn a_cookie_is_bound_to_address_and_port() {
    let mut pair = Pair::with_cookie(Protocol::WireGuard);
    let message = pair.send(START);
    for from in ["192.0.2.2:51820", "192.0.2.1:51821", "[2001:db8::1]:51820"] {
        assert_eq!(
            pair.admit(&message, from, START),
            Admission::NeedsCookie,
            "{from}"
        );
    }
    assert_eq!(
        pair.admit(&message, "[::ffff:192.0.2.1]:51820", START),
        Admission::Process
    );
}

#[test]
fn a_cookie_dies_with_the_receivers_secret() {
    let mut pair = Pair::with_cookie(Protocol::WireGuard);
    let message = pair.send(START);
    let end = START + Duration::from_secs(120);
    assert_eq!(
        pair.admit(&message, SOURCE, end - Duration::from_nanos(1)),
        Admission::Process
    );
    assert_eq!(pair.admit(&message, SOURCE, end), Admission::NeedsCookie);
}

#[test]
fn the_sender_uses_a_cookie_for_115_seconds() {
    let mut pair = Pair::with_cookie(Protocol::WireGuard);
    let end = START + Duration::from_secs(115);
    assert_ne!(pair.send(end - Duration::from_nanos(1))[132..], [0; 16]);
    assert_eq!(pair.send(end)[132..], [0; 16]);
}

#[test]
fn a_source_with_a_cookie_is_rate_limited() {
    let mut pair = Pair::with_cookie(Protocol::WireGuard);
    let message = pair.send(START);
    let admitted: Vec<_> = (0..6)
        .map(|_| pair.admit(&message, SOURCE, START))
        .collect();
    assert_eq!(admitted[..5], [Admission::Process; 5]);
    assert_eq!(admitted[5], Admission::RateLimited);
}

#[test]
fn a_reply_counts_once_and_only_for_the_last_message() {
    let mut pair = Pair::new(Protocol::WireGuard);
    let first = pair.send(START);
    let to_first = pair.reply(&first, SOURCE, START);
    let second = pair.send(START);
    let to_second = pair.reply(&second, SOURCE, START);
    assert_eq!(
        pair.jar.consume_reply(&to_first, START),
        Err(CookieError::Authentication)
    );
    assert_eq!(pair.jar.consume_reply(&to_second, START), Ok(()));
    assert_eq!(
        pair.jar.consume_reply(&to_second, START),
        Err(CookieError::Unsolicited)
    );
}

#[test]
fn a_reply_names_the_senders_index() {
    let mut pair = Pair::new(Protocol::Native);
    let message = pair.send(START);
    assert_eq!(
        pair.reply(&message, SOURCE, START)[..8],
        [0x13, 0, 0, 0, 7, 0, 0, 0]
    );
}

#[test]
fn a_cookie_reply_of_the_other_protocol_is_refused() {
    let mut pair = Pair::new(Protocol::Native);
    pair.send(START);
    let mut wireguard = Pair::new(Protocol::WireGuard);
    let message = wireguard.send(START);
    let reply = wireguard.reply(&message, SOURCE, START);
    assert_eq!(
        pair.jar.consume_reply(&reply, START),
        Err(CookieError::NotACookieReply)
    );
}

#[test]
fn boringtuns_cookie_reply_is_understood_and_our_mac2_satisfies_it() {
    // Limit 0: always under load.
    let theirs = TheirLimiter::new(&(*identity(2).public().as_bytes()).into(), 0);
    let mut pair = Pair::new(Protocol::WireGuard);
    let from = Some(source(SOURCE).ip());
    let message = pair.send(START);
    let mut buffer = [0; 256];
    let Err(TunnResult::WriteToNetwork(reply)) = theirs.verify_packet(from, &message, &mut buffer)
    else {
        panic!("no cookie reply")
    };
    pair.jar.consume_reply(reply, START).unwrap();
    let message = pair.send(START);
    assert!(theirs.verify_packet(from, &message, &mut [0; 256]).is_ok());
}

#[test]
fn boringtun_understands_our_cookie_reply_and_sends_mac2() {
    let remote = (*identity(2).public().as_bytes()).into();
    let mut theirs = Tunn::new([1; 32].into(), remote, None, None, 5, None);
    let mut pair = Pair::new(Protocol::WireGuard);
    let initiate = |theirs: &mut Tunn| {
        let mut buffer = [0; 256];
        match theirs.format_handshake_initiation(&mut buffer, true) {
            TunnResult::WriteToNetwork(message) => message.to_vec(),
            other => panic!("{other:?}"),
        }
    };
    let message = initiate(&mut theirs);
    assert_eq!(pair.admit(&message, SOURCE, START), Admission::NeedsCookie);
    let reply = pair.reply(&message, SOURCE, START);
    assert!(matches!(
        theirs.decapsulate(None, &reply, &mut [0; 256]),
        TunnResult::Done
    ));
    let message = initiate(&mut theirs);
    assert_eq!(pair.admit(&message, SOURCE, START), Admission::Process);
}

#[test]
fn debug_output_has_no_cookie() {
    let pair = Pair::with_cookie(Protocol::Native);
    let jar = format!("{:?}", pair.jar);
    assert_eq!(jar, "CookieJar { protocol: Native, has_cookie: true, .. }");
    assert_eq!(
        format!("{:?}", pair.checker),
        "CookieChecker { protocol: Native, .. }"
    );
}

proptest! {
    #[test]
    fn garbage_never_panics(message in prop::collection::vec(any::<u8>(), 0..450), load: bool) {
        let mut pair = Pair::with_cookie(Protocol::WireGuard);
        let admission =
            pair.checker.admit(&message, source(SOURCE), || load, START, &mut pair.rng);
        prop_assert_eq!(admission, Admission::InvalidMac1);
        let _ = pair.checker.create_reply(&message, source(SOURCE), START, &mut pair.rng);
        prop_assert!(pair.jar.consume_reply(&message, START).is_err());
        let mut message = message;
        pair.jar.stamp(&mut message, START);
        prop_assert!(pair.jar.consume_reply(&message, START).is_err());
    }

    #[test]
    fn an_altered_reply_is_refused(byte in 0..COOKIE_REPLY_LEN, bit in 0..8) {
        let mut pair = Pair::new(Protocol::WireGuard);
        let message = pair.send(START);
        let mut reply = pair.reply(&message, SOURCE, START);
        reply[byte] ^= 1u8 << bit;
        // The receiver index only selects the peer's jar.
        let expected = (4..8).contains(&byte);
        prop_assert_eq!(pair.jar.consume_reply(&reply, START).is_ok(), expected);
    }
}
