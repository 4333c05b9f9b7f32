//! Any bytes as an initiation, a response or a cookie reply, with or without a valid mac1, and
//! valid ones with a part replaced: none is accepted.
use seikan_fuzz::Counter;
use seikan_proto::constants::MAX_HANDSHAKE_LEN;
use seikan_proto::cookie::{CookieChecker, CookieJar};
use seikan_proto::keys::{Identity, PresharedKey, PrivateKey};
use seikan_proto::noise::{Initiation, Initiator, Protocol, consume_initiation};
use seikan_proto::tai64n::Tai64n;
use seikan_proto::time::Instant;
use std::net::SocketAddr;

/// One input.
pub fn run(input: &[u8]) {
    let Some((&[mode, at], bytes)) = input.split_first_chunk() else {
        return;
    };
    let protocol = if mode & 1 == 0 {
        Protocol::Native
    } else {
        Protocol::WireGuard
    };
    let [ours, theirs] = [[1; 32], [2; 32]].map(|key| Identity::new(PrivateKey::from_bytes(key)));
    let mut rng = Counter::new(1);
    let mut message = [0; MAX_HANDSHAKE_LEN];
    let (mut initiator, length) = Initiation {
        protocol,
        identity: &ours,
        remote: theirs.public(),
        psk: &PresharedKey::default(),
        sender_index: 7,
        timestamp: Tai64n::default(),
        payload: &[],
    }
    .write(&mut rng, &mut message)
    .expect("room for an initiation");
    let mut jar = CookieJar::new(protocol, theirs.public());
    jar.stamp(&mut message[..length], Instant::BOOT);
    let genuine = message[..length].to_vec();
    let spoilt = spoil(&genuine, bytes, at);
    let source = SocketAddr::from(([192, 0, 2, 1], 1));
    let mut checker = CookieChecker::new(protocol, &theirs);
    match mode >> 1 & 3 {
        0 => {
            let taken = consume_initiation(protocol, &theirs, &spoilt).is_ok();
            // mac2 is only verified under load.
            let covered = genuine.len() - 16;
            let same = spoilt.len() == genuine.len() && spoilt[..covered] == genuine[..covered];
            assert_eq!(taken, same);
        }
        1 => assert!(initiator.consume_response(bytes).is_err()),
        2 => assert!(jar.consume_reply(bytes, Instant::BOOT).is_err()),
        _ => {
            checker.admit(bytes, source, || true, Instant::BOOT, &mut rng);
            checker.create_reply(bytes, source, Instant::BOOT, &mut rng);
            response(
                protocol,
                &theirs,
                &genuine,
                bytes,
                at,
                &mut initiator,
                &mut rng,
            );
        }
    }
}

/// Returns a valid response with a part replaced.
fn response(
    protocol: Protocol,
    responder: &Identity,
    initiation: &[u8],
    bytes: &[u8],
    at: u8,
    initiator: &mut Initiator,
    rng: &mut Counter,
) {
    let mut reply = [0; MAX_HANDSHAKE_LEN];
    let (_, length) = consume_initiation(protocol, responder, initiation)
        .expect("a true initiation")
        .create_response(&PresharedKey::default(), 9, &[], rng, &mut reply)
        .expect("room for a response");
    let genuine = &reply[..length];
    let spoilt = spoil(genuine, bytes, at);
    let covered = genuine.len() - 16;
    let same = spoilt.len() == genuine.len() && spoilt[..covered] == genuine[..covered];
    assert_eq!(initiator.consume_response(&spoilt).is_ok(), same);
}

/// Overwrites the message with `bytes` from `at` on, and extends it if necessary.
fn spoil(message: &[u8], bytes: &[u8], at: u8) -> Vec<u8> {
    let mut spoilt = message.to_vec();
    let at = usize::from(at).min(spoilt.len());
    let end = at + bytes.len();
    if spoilt.len() < end {
        spoilt.resize(end, 0);
    }
    spoilt[at..end].copy_from_slice(bytes);
    spoilt
}
