use super::*;
use crate::mesh::{RelayKind, RelaySecret};
use crate::rng::testing::Seeded;

fn key(n: u8) -> PublicKey {
    PublicKey::from_bytes([n; 32])
}

fn ticket(secret: &str) -> Ticket {
    let secret = RelaySecret::parse(secret, RelayKind::Turn).expect("a secret");
    Ticket::new(&secret, 42, &key(1), 1_700_000_000)
}

fn ask(ticket: &Ticket) -> (TransactionId, Vec<u8>) {
    let ask = ClientRequest {
        ticket,
        peer: key(2),
        stamp: 0x0102_0304_0506_0708,
    };
    ask.write(&mut Seeded::new(1))
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hex"))
        .collect()
}

/// One byte changed.
fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[test]
fn a_members_request_is_parsed_by_the_relay() {
    let ticket = ticket("north");
    let (id, bytes) = ask(&ticket);
    let Ok(ServerRequest::Port(asked)) = ServerRequest::parse(&bytes) else {
        panic!("a request for a port");
    };
    assert_eq!((asked.id, asked.member, asked.peer), (id, key(1), key(2)));
    assert_eq!(asked.holder, 42);
    assert_eq!(asked.stamp, 0x0102_0304_0506_0708);
    assert_eq!(
        (asked.username, asked.expires),
        (ticket.username, 1_700_000_000)
    );
}

/// Encoded by hand after RFC 8489, sections 5 and 14: types, lengths, padding.
#[test]
fn a_request_is_laid_out_as_documented() {
    let (id, bytes) = ask(&ticket("north"));
    let mut expected = hex("0001 0094 2112a442");
    expected.extend(&u128::from(id).to_be_bytes()[4..]);
    expected.extend(hex("0006 003a"));
    expected.extend(b"1700000000:42:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\0\0");
    expected.extend(hex("c5e1 0020"));
    expected.extend([2; 32]);
    expected.extend(hex("c5e2 0008 0102030405060708 001c 0020"));
    assert_eq!(bytes[..bytes.len() - 32], expected);
    assert_eq!(bytes.len(), 20 + 0x94);
}

/// RFC 8489, appendix B.1, with erratum 6268. Its key is a long-term one: SHA-256 of user, realm
/// and password.
#[test]
fn the_integrity_of_the_sample_of_rfc_8489_is_proven() {
    let sample = hex(
        "0001 0090 2112a442 78ad3433c6ad72c029da412e
         001e 0020 4a3cf38fef6992bda952c6780417da0f24819415569e60b205c46e41407f1704
         0015 0029 6f624d61744a6f7332414141 43662f2f3439396b39353464364f4c33346f4c394653547679363473 41 000000
         0014 000b 6578616d706c652e6f7267 00
         001d 0004 00020000
         001c 0020 b5c7bf005b6c52a21c51c5e892f81924136296cb927c43149309278cc6518e65",
    );
    let message = whole(&sample).expect("a message");
    let (signed, integrity) = signed(&message).expect("an integrity");
    let key = "マトリックス:example.org:TheMatrIX";
    let key = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, key.as_bytes());
    assert!(verify(signed, &integrity, key.as_ref()));
    assert!(!verify(signed, &integrity, b"another"));
}

#[test]
fn requests_are_authenticated_by_the_password() {
    let ticket = ticket("north");
    let (_, bytes) = ask(&ticket);
    let verified = |bytes: &[u8], ticket: &Ticket| match ServerRequest::parse(bytes) {
        Ok(ServerRequest::Port(asked)) => asked.verify(&ticket.password),
        _ => false,
    };
    assert!(verified(&bytes, &ticket));
    assert!(!verified(&bytes, &self::ticket("south")));
    for at in 0..bytes.len() {
        assert!(!verified(&flipped(&bytes, at), &ticket), "byte {at}");
    }
}

#[test]
fn requests_without_a_ticket_or_with_nonsense_are_refused() {
    let (id, bytes) = ask(&ticket("north"));
    let refused = |attributes: &[RawAttribute<'_>], key: Option<&RelayPassword>| {
        let bytes = message(MessageClass::Request, id, attributes, key);
        match ServerRequest::parse(&bytes) {
            Err(RequestError::Refused(of, refusal)) if of == id => refusal,
            other => panic!("{other:?}"),
        }
    };
    let ticket = ticket("north");
    let name = |text: &'static str| RawAttribute::new(Username::TYPE, text.as_bytes());
    let own = RawAttribute::new(Username::TYPE, ticket.username.as_bytes());
    let (member, peer, stamp) = ([1; 32], [2; 32], [0; 8]);
    let other = RawAttribute::new(PEER, &peer);
    let stamp = RawAttribute::new(STAMP, &stamp);
    let password = Some(&ticket.password);
    for unknown in [name("7:x"), name("x:AA"), name(""), name("::")] {
        let all = [unknown, other.clone(), stamp.clone()];
        assert_eq!(refused(&all, password), RelayRefusal::Unauthorized);
    }
    let unsigned = [own.clone(), other.clone(), stamp.clone()];
    assert_eq!(refused(&unsigned, None), RelayRefusal::Unauthorized);
    let nobody = [other.clone(), stamp.clone()];
    assert_eq!(refused(&nobody, password), RelayRefusal::Unauthorized);
    for nonsense in [
        [own.clone(), RawAttribute::new(PEER, &member), stamp.clone()],
        [own.clone(), RawAttribute::new(PEER, &peer[..31]), stamp],
        [
            own.clone(),
            other.clone(),
            RawAttribute::new(STAMP, &peer[..7]),
        ],
        [own.clone(), other, own],
    ] {
        assert_eq!(refused(&nonsense, password), RelayRefusal::Malformed);
    }
    for end in 0..bytes.len() {
        assert!(
            !matches!(
                ServerRequest::parse(&bytes[..end]),
                Ok(ServerRequest::Port(_))
            ),
            "{end}"
        );
    }
    let longer = [&bytes[..], &[0; 4]].concat();
    assert_eq!(
        ServerRequest::parse(&longer).err(),
        Some(RequestError::NotARequest)
    );
}

#[test]
fn an_ordinary_request_is_answered_with_its_address() {
    // RFC 5769, section 2.2: the address of the sample response by its transaction.
    let request = hex("0001 0000 2112a442 b7e7a701bc34d686fa87dfae");
    let Ok(ServerRequest::Address(id)) = ServerRequest::parse(&request) else {
        panic!("an ordinary request");
    };
    let from = "[::ffff:192.0.2.1]:32853".parse().expect("an address");
    let answer = Answer::address(from).write(id, None);
    let expected = hex("0101 000c 2112a442 b7e7a701bc34d686fa87dfae 0020 0008 0001 a147 e112a643");
    assert_eq!(answer, expected);
    let parsed = Answer::parse(&answer, id, &ticket("north").password).expect("an answer");
    let mapped: SocketAddr = "192.0.2.1:32853".parse().expect("an address");
    assert_eq!(parsed, Answer::address(mapped));
}

#[test]
fn a_port_needs_an_authenticated_answer() {
    let (ticket, mapped) = (ticket("north"), SocketAddr::from(([192, 0, 2, 1], 7)));
    let (id, request) = ask(&ticket);
    let answer = Answer {
        mapped,
        port: Some(50_000),
        present: true,
    };
    let bytes = answer.write(id, Some(&ticket.password));
    assert!(bytes.len() < request.len());
    assert_eq!(Answer::parse(&bytes, id, &ticket.password), Ok(answer));
    let unproven = answer.write(id, None);
    let address = Ok(Answer::address(mapped));
    assert_eq!(Answer::parse(&unproven, id, &ticket.password), address);
    let other = &self::ticket("south").password;
    let not = Err(RelayError::NotAnAnswer);
    assert_eq!(Answer::parse(&bytes, id, other), not);
    assert_eq!(Answer::parse(&bytes, 7.into(), &ticket.password), not);
    for at in 0..bytes.len() {
        let parsed = Answer::parse(&flipped(&bytes, at), id, &ticket.password);
        // Without the type of the integrity attribute, the answer is not authenticated.
        assert!(parsed == not || parsed == address, "byte {at}");
    }
    for end in 0..bytes.len() {
        assert_eq!(
            Answer::parse(&bytes[..end], id, &ticket.password),
            not,
            "{end}"
        );
    }
}

#[test]
fn refusals_keep_their_code_and_are_shorter_than_the_request() {
    let ticket = ticket("north");
    let (id, request) = ask(&ticket);
    for code in [400, 401, 438, 486, 508, 500] {
        let refusal = RelayRefusal::of(code);
        for password in [None, Some(&ticket.password)] {
            let bytes = refusal.write(id, password);
            assert!(bytes.len() < request.len());
            // RFC 8489, section 14.8: the hundreds, then the rest.
            assert_eq!(
                bytes[20..28],
                [0, 9, 0, 4, 0, 0, (code / 100) as u8, (code % 100) as u8]
            );
            let parsed = Answer::parse(&bytes, id, &ticket.password);
            assert_eq!(parsed, Err(RelayError::Refused(refusal)));
        }
    }
}

#[test]
fn no_message_of_the_tunnel_looks_like_a_request() {
    for kind in [1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14] {
        let mut message = [0; 148];
        message[0] = kind;
        message[4..8].copy_from_slice(&COOKIE);
        assert!(!is_request(&message), "{kind}");
    }
}
