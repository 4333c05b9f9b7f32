//! Published vectors, another implementation at the other end, and hostile messages.

use boringtun::noise::{Tunn, TunnResult};
use proptest::prelude::*;
use snow::Builder;

use super::resolver::Resolver;
use super::*;
use crate::rng::testing::{Scripted, Seeded};
use std::time::Duration;

fn identity(seed: u8) -> Identity {
    Identity::new(PrivateKey::from_bytes([seed; 32]))
}

fn stamp() -> Tai64n {
    Tai64n::from_unix(Duration::from_secs(1_700_000_000))
}

fn psk() -> PresharedKey {
    PresharedKey::from_bytes([9; 32])
}

/// A sent initiation of `identity(1)` to `identity(2)`, index 7.
fn initiation(protocol: Protocol, payload: &[u8]) -> (Initiator, Vec<u8>) {
    let mut out = [0xaa; MAX_HANDSHAKE_LEN];
    let (initiator, len) = Initiation {
        protocol,
        identity: &identity(1),
        remote: identity(2).public(),
        psk: &psk(),
        sender_index: 7,
        timestamp: stamp(),
        payload,
    }
    .write(&mut Seeded::new(1), &mut out)
    .unwrap();
    (initiator, out[..len].to_vec())
}

/// The response of `identity(2)`, index 8.
fn response(
    protocol: Protocol,
    message: &[u8],
    psk: &PresharedKey,
    payload: &[u8],
) -> (Established, Vec<u8>) {
    let mut out = [0xaa; MAX_HANDSHAKE_LEN];
    let (session, len) = consume_initiation(protocol, &identity(2), message)
        .unwrap()
        .create_response(psk, 8, payload, &mut Seeded::new(2), &mut out)
        .unwrap();
    (session, out[..len].to_vec())
}

mod vectors {
    use super::*;
    use std::collections::HashMap;

    fn hex(text: &str) -> Vec<u8> {
        let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
        text.as_bytes()
            .chunks(2)
            .map(|pair| digit(pair[0]) << 4 | digit(pair[1]))
            .collect()
    }

    fn load() -> HashMap<&'static str, Vec<u8>> {
        include_str!("../../testdata/noise-ikpsk2.txt")
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_once(' ').unwrap())
            .map(|(name, value)| (name, hex(value)))
            .collect()
    }

    /// The published handshake, byte by byte, through the resolver.
    #[test]
    fn resolver_reproduces_the_cacophony_vector() {
        let vector = load();
        let psk: [u8; 32] = vector["psk"].clone().try_into().unwrap();
        let side = |ephemeral: &str| {
            let seed = EphemeralSeed::default();
            seed.refill(&mut Scripted(vector[ephemeral].clone()));
            Builder::with_resolver(PROTOCOL_NAME.parse().unwrap(), Box::new(Resolver(seed)))
                .prologue(&vector["init_prologue"])
                .unwrap()
                .psk(2, &psk)
                .unwrap()
        };
        let mut initiator = side("init_ephemeral")
            .local_private_key(&vector["init_static"])
            .unwrap()
            .remote_public_key(&vector["init_remote_static"])
            .unwrap()
            .build_initiator()
            .unwrap();
        let mut responder = side("resp_ephemeral")
            .local_private_key(&vector["resp_static"])
            .unwrap()
            .build_responder()
            .unwrap();

        let (mut message, mut payload) = ([0; 256], [0; 256]);
        let len = initiator
            .write_message(&vector["payload_0"], &mut message)
            .unwrap();
        assert_eq!(message[..len], vector["ciphertext_0"]);
        let len = responder
            .read_message(&message[..len], &mut payload)
            .unwrap();
        assert_eq!(payload[..len], vector["payload_0"]);
        let len = responder
            .write_message(&vector["payload_1"], &mut message)
            .unwrap();
        assert_eq!(message[..len], vector["ciphertext_1"]);
        let len = initiator
            .read_message(&message[..len], &mut payload)
            .unwrap();
        assert_eq!(payload[..len], vector["payload_1"]);
        assert_eq!(initiator.get_handshake_hash(), vector["handshake_hash"]);

        let ours = established(&mut initiator, 0, 0, Vec::new());
        let theirs = established(&mut responder, 0, 0, Vec::new());
        assert_eq!(
            open(&ours.receive, &vector["ciphertext_3"]),
            vector["payload_3"]
        );
        assert_eq!(
            open(&theirs.receive, &vector["ciphertext_2"]),
            vector["payload_2"]
        );
    }
}

/// Opens the first transport message under a session key.
fn open(key: &[u8; 32], sealed: &[u8]) -> Vec<u8> {
    use chacha20poly1305::{ChaCha20Poly1305, KeyInit, aead::Aead};
    ChaCha20Poly1305::new(key.into())
        .decrypt(&[0; 12].into(), sealed)
        .unwrap()
}

/// WireGuard data message with counter 0.
fn seal(session: &Established, plaintext: &[u8]) -> Vec<u8> {
    use chacha20poly1305::{ChaCha20Poly1305, KeyInit, aead::Aead};
    let mut message = vec![4, 0, 0, 0];
    message.extend(session.remote_index.to_le_bytes());
    message.extend([0; 8]);
    let cipher = ChaCha20Poly1305::new((&*session.send).into());
    message.extend(cipher.encrypt(&[0; 12].into(), plaintext).unwrap());
    message
}

mod interop {
    use super::*;

    /// An IPv4 packet of 28 bytes, the minimum that boringtun carries.
    const PACKET: [u8; 28] = [
        0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 9, 0, 9, 0, 8, 0, 0,
    ];

    fn boringtun() -> Tunn {
        Tunn::new(
            [2; 32].into(),
            (*identity(1).public().as_bytes()).into(),
            Some([9; 32]),
            None,
            5,
            None,
        )
    }

    #[test]
    fn boringtun_answers_our_initiation() {
        let mut theirs = boringtun();
        let (mut ours, message) = initiation(Protocol::WireGuard, &[]);
        let mut buffer = [0; 2048];
        let TunnResult::WriteToNetwork(answer) = theirs.decapsulate(None, &message, &mut buffer)
        else {
            panic!("no response")
        };
        let session = ours.consume_response(answer).unwrap();

        let data = seal(&session, &PACKET);
        match theirs.decapsulate(None, &data, &mut buffer) {
            TunnResult::WriteToTunnelV4(packet, _) => assert_eq!(packet, PACKET),
            other => panic!("{other:?}"),
        }
        let TunnResult::WriteToNetwork(data) = theirs.encapsulate(&PACKET, &mut buffer) else {
            panic!("no data")
        };
        assert_eq!(data[4..8], session.local_index.to_le_bytes());
        assert_eq!(open(&session.receive, &data[16..]), PACKET);
    }

    #[test]
    fn boringtun_accepts_our_response() {
        let mut theirs = Tunn::new(
            [1; 32].into(),
            (*identity(2).public().as_bytes()).into(),
            Some([9; 32]),
            None,
            5,
            None,
        );
        let mut buffer = [0; 2048];
        let TunnResult::WriteToNetwork(message) =
            theirs.format_handshake_initiation(&mut buffer, false)
        else {
            panic!("no initiation")
        };
        let received = consume_initiation(Protocol::WireGuard, &identity(2), message).unwrap();
        assert_eq!(received.remote, *identity(1).public());
        let (session, answer) = response(Protocol::WireGuard, message, &psk(), &[]);

        // boringtun confirms the session with an empty packet, as the initiator has to.
        let TunnResult::WriteToNetwork(keepalive) = theirs.decapsulate(None, &answer, &mut buffer)
        else {
            panic!("no keepalive")
        };
        assert!(open(&session.receive, &keepalive[16..]).is_empty());
    }

    #[test]
    fn boringtun_refuses_another_preshared_key() {
        let mut theirs = Tunn::new(
            [1; 32].into(),
            (*identity(2).public().as_bytes()).into(),
            Some([3; 32]),
            None,
            5,
            None,
        );
        let mut buffer = [0; 2048];
        let TunnResult::WriteToNetwork(message) =
            theirs.format_handshake_initiation(&mut buffer, false)
        else {
            panic!("no initiation")
        };
        let (_, answer) = response(Protocol::WireGuard, message, &psk(), &[]);
        assert!(matches!(
            theirs.decapsulate(None, &answer, &mut buffer),
            TunnResult::Err(_)
        ));
    }
}

const BOTH: [Protocol; 2] = [Protocol::WireGuard, Protocol::Native];

#[test]
fn both_ends_agree_on_mirrored_keys() {
    for protocol in BOTH {
        let (mut initiator, message) = initiation(protocol, &[]);
        let (theirs, answer) = response(protocol, &message, &psk(), &[]);
        let ours = initiator.consume_response(&answer).unwrap();
        assert_eq!((&ours.send, &ours.receive), (&theirs.receive, &theirs.send));
        assert_ne!(ours.send, ours.receive);
        assert_eq!(ours.handshake_hash, theirs.handshake_hash);
        assert_eq!((ours.local_index, ours.remote_index), (7, 8));
        assert_eq!((theirs.local_index, theirs.remote_index), (8, 7));
    }
}

#[test]
fn the_responder_learns_the_key_and_the_timestamp() {
    let (_, message) = initiation(Protocol::WireGuard, &[]);
    let received = consume_initiation(Protocol::WireGuard, &identity(2), &message).unwrap();
    assert_eq!(received.remote, *identity(1).public());
    assert_eq!(received.timestamp, stamp());
    assert_eq!(received.sender_index, 7);
}

#[test]
fn native_payloads_arrive_up_to_their_limit() {
    for len in [0, 1, MAX_PAYLOAD_LEN] {
        let (offer, choice) = (vec![1; len], vec![2; len]);
        let (mut initiator, message) = initiation(Protocol::Native, &offer);
        let (theirs, answer) = response(Protocol::Native, &message, &psk(), &choice);
        assert_eq!(theirs.payload, offer);
        assert_eq!(initiator.consume_response(&answer).unwrap().payload, choice);
    }
}

#[test]
fn a_payload_beyond_the_limit_is_refused() {
    let mut out = [0; 1024];
    for (protocol, maximum) in [(Protocol::WireGuard, 0), (Protocol::Native, 256)] {
        let payload = vec![0; maximum + 1];
        let refused = Initiation {
            protocol,
            identity: &identity(1),
            remote: identity(2).public(),
            psk: &psk(),
            sender_index: 7,
            timestamp: stamp(),
            payload: &payload,
        }
        .write(&mut Seeded::new(1), &mut out);
        let error = HandshakeError::PayloadTooLong {
            found: maximum + 1,
            maximum,
        };
        assert_eq!(refused.unwrap_err(), error);
    }
}

#[test]
fn a_small_buffer_is_refused() {
    let refused = Initiation {
        protocol: Protocol::WireGuard,
        identity: &identity(1),
        remote: identity(2).public(),
        psk: &psk(),
        sender_index: 7,
        timestamp: stamp(),
        payload: &[],
    }
    .write(&mut Seeded::new(1), &mut [0; 147]);
    assert_eq!(
        refused.unwrap_err(),
        HandshakeError::BufferTooSmall {
            found: 147,
            needed: 148
        }
    );
}

#[test]
fn an_invalid_response_does_not_spoil_the_handshake() {
    let (mut initiator, message) = initiation(Protocol::Native, &[]);
    let (_, answer) = response(Protocol::Native, &message, &psk(), &[5; 20]);
    let (_, other_psk) = response(Protocol::Native, &message, &PresharedKey::default(), &[]);
    assert_eq!(
        initiator.consume_response(&other_psk).unwrap_err(),
        HandshakeError::Authentication
    );
    // Bytes 4 to 7 are the responder's index, which only mac1 covers.
    for byte in (0..4).chain(8..answer.len() - MACS_LEN) {
        let mut altered = answer.clone();
        altered[byte] ^= 1;
        // With a valid mac1, so that the alteration reaches the Noise message.
        mac::write_mac1(identity(1).mac1_key(Protocol::Native), &mut altered);
        assert!(initiator.consume_response(&altered).is_err(), "byte {byte}");
    }
    assert_eq!(
        initiator.consume_response(&answer).unwrap().payload,
        [5; 20]
    );
}

#[test]
fn a_response_is_accepted_once() {
    let (mut initiator, message) = initiation(Protocol::WireGuard, &[]);
    let (_, answer) = response(Protocol::WireGuard, &message, &psk(), &[]);
    initiator.consume_response(&answer).unwrap();
    assert_eq!(
        initiator.consume_response(&answer).unwrap_err(),
        HandshakeError::AlreadyComplete
    );
}

#[test]
fn a_response_to_another_index_is_refused() {
    let (mut initiator, message) = initiation(Protocol::WireGuard, &[]);
    let (_, mut answer) = response(Protocol::WireGuard, &message, &psk(), &[]);
    put_u32(&mut answer, RESPONSE_RECEIVER_OFFSET, 99);
    let error = HandshakeError::ReceiverIndex { found: 99 };
    assert_eq!(initiator.consume_response(&answer).unwrap_err(), error);
}

#[test]
fn native_and_wireguard_messages_are_refused_by_the_other_protocol() {
    for (sent, expected) in [(BOTH[0], BOTH[1]), (BOTH[1], BOTH[0])] {
        let (_, mut message) = initiation(sent, &[]);
        let error = consume_initiation(expected, &identity(2), &message).unwrap_err();
        assert!(
            matches!(error, HandshakeError::UnexpectedType { .. }),
            "{error}"
        );
        // Even with another type and a new mac1, the prologue differs.
        message[0] = expected.initiation_type();
        mac::write_mac1(identity(2).mac1_key(expected), &mut message);
        let error = consume_initiation(expected, &identity(2), &message).unwrap_err();
        assert_eq!(error, HandshakeError::Authentication);
    }
}

#[test]
fn an_initiation_for_another_host_fails_at_mac1() {
    let (_, message) = initiation(Protocol::WireGuard, &[]);
    let error = consume_initiation(Protocol::WireGuard, &identity(3), &message).unwrap_err();
    assert_eq!(error, HandshakeError::Mac1);
}

#[test]
fn reserved_bytes_must_be_zero() {
    let (_, mut message) = initiation(Protocol::WireGuard, &[]);
    message[2] = 1;
    let error = consume_initiation(Protocol::WireGuard, &identity(2), &message).unwrap_err();
    assert_eq!(
        error,
        HandshakeError::UnexpectedType {
            found: 0x1_0001,
            expected: 1
        }
    );
}

#[test]
fn a_key_of_low_order_is_refused_at_both_ends() {
    let to_zero = Initiation {
        protocol: Protocol::WireGuard,
        identity: &identity(1),
        remote: &PublicKey::from_bytes([0; 32]),
        psk: &psk(),
        sender_index: 7,
        timestamp: stamp(),
        payload: &[],
    }
    .write(&mut Seeded::new(1), &mut [0; MAX_HANDSHAKE_LEN]);
    assert_eq!(to_zero.unwrap_err(), HandshakeError::LowOrderPoint);

    let (_, mut message) = initiation(Protocol::WireGuard, &[]);
    message[INITIATION_NOISE_OFFSET..][..KEY_LEN].fill(0);
    mac::write_mac1(identity(2).mac1_key(Protocol::WireGuard), &mut message);
    let error = consume_initiation(Protocol::WireGuard, &identity(2), &message).unwrap_err();
    assert_eq!(error, HandshakeError::LowOrderPoint);
}

#[test]
fn debug_output_has_no_key() {
    let (mut initiator, message) = initiation(Protocol::Native, &[]);
    let received = consume_initiation(Protocol::Native, &identity(2), &message).unwrap();
    assert_eq!(format!("{initiator:?}"), "Initiator { local_index: 7, .. }");
    assert!(format!("{received:?}").starts_with("ReceivedInitiation { remote: "));
    let (theirs, answer) = response(Protocol::Native, &message, &psk(), &[]);
    let expected = "Established { local_index: 8, remote_index: 7, .. }";
    assert_eq!(format!("{theirs:?}"), expected);
    initiator.consume_response(&answer).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn garbage_never_panics(
        mut message in prop::collection::vec(any::<u8>(), 0..450),
        native: bool,
        plausible: bool,
    ) {
        let protocol = BOTH[native as usize];
        let (mut initiator, _) = initiation(protocol, &[]);
        if plausible && message.len() >= RESPONSE_LEN {
            // Passes the header and mac1 checks, up to the cryptography.
            put_u32(&mut message, 0, protocol.response_type().into());
            put_u32(&mut message, RESPONSE_RECEIVER_OFFSET, 7);
            mac::write_mac1(identity(1).mac1_key(protocol), &mut message);
        }
        prop_assert!(initiator.consume_response(&message).is_err());
        if plausible && message.len() >= INITIATION_LEN {
            put_u32(&mut message, 0, protocol.initiation_type().into());
            mac::write_mac1(identity(2).mac1_key(protocol), &mut message);
        }
        prop_assert!(consume_initiation(protocol, &identity(2), &message).is_err());
    }

    #[test]
    fn truncated_and_extended_messages_are_refused(
        len in 0usize..600,
        payload in prop::collection::vec(any::<u8>(), 0..=256),
    ) {
        let (mut initiator, message) = initiation(Protocol::Native, &payload);
        let (_, answer) = response(Protocol::Native, &message, &psk(), &payload);
        let resized = |message: &[u8], identity: &Identity| {
            let mut resized = message.to_vec();
            resized.resize(len, 0);
            if len >= MACS_LEN {
                mac::write_mac1(identity.mac1_key(Protocol::Native), &mut resized);
            }
            resized
        };
        if len != message.len() {
            let message = resized(&message, &identity(2));
            prop_assert!(consume_initiation(Protocol::Native, &identity(2), &message).is_err());
        }
        if len != answer.len() {
            prop_assert!(initiator.consume_response(&resized(&answer, &identity(1))).is_err());
        }
    }
}
