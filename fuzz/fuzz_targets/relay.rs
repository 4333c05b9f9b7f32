//! Any bytes as messages between members and a relay: none is trusted without the password, and
//! decoding adds nothing.
use seikan_proto::mesh::relay::{
    Answer, RelayError, RequestError, ServerRequest, TransactionId, is_request,
};
use seikan_proto::mesh::{Relay, RelayAddress, RelayKind, RelaySecret};

/// One input.
pub fn run(bytes: &[u8]) {
    let secret = RelaySecret::parse("north", RelayKind::Turn).expect("a secret");
    match ServerRequest::parse(bytes) {
        Ok(ServerRequest::Port(asked)) => {
            assert!(is_request(bytes) && asked.member != asked.peer);
            // The fuzzer cannot guess an HMAC.
            assert!(!asked.verify(&secret.password(&asked.username)));
        }
        Ok(ServerRequest::Address(_)) | Err(RequestError::Refused(..)) => {
            assert!(is_request(bytes))
        }
        Err(RequestError::NotARequest) => {}
    }
    // The transaction is taken from the input, so that all code behind it is reached.
    let id = bytes.iter().skip(8).take(12);
    let id = TransactionId::from(id.fold(0, |id, byte| id << 8 | u128::from(*byte)));
    match Answer::parse(bytes, id, &secret.password("1:a")) {
        Ok(answer) => assert_eq!((answer.port, answer.present), (None, false)),
        Err(RelayError::Refused(refusal)) => assert!((300..700).contains(&refusal.code())),
        Err(RelayError::NotAnAnswer) => {}
    }
    let _ = serde_json::from_slice::<Relay>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(address) = text.parse::<RelayAddress>()
    {
        let again: RelayAddress = address.to_string().parse().expect("its own text");
        assert_eq!(again, address);
    }
}
