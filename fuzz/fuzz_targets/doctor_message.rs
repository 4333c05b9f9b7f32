//! Any bytes as a message of another doctor. An accepted message survives encoding and decoding,
//! and the rules reach a verdict about it, alone and as its own other end.
use seikan_diagnose::exchange::{Message, Told};
use seikan_diagnose::{both, diagnose};

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(message) = Message::read(bytes) else {
        return;
    };
    assert!(Message::read(&message.write()).is_ok(), "{message:?}");
    let Message::Told(told) = message else {
        return;
    };
    let Ok(evidence) = told.evidence() else {
        return;
    };
    let verdict = diagnose(&evidence);
    assert_eq!(verdict.chain.first(), Some(&verdict.cause));
    let verdict = both(&evidence, &evidence);
    assert_eq!(verdict.chain.first(), Some(&verdict.cause));
    assert!(Told::of(&evidence).evidence().is_ok());
}
