//! Any bytes as a message of another doctor: an accepted message can be encoded and decoded again, and the rules reach a
//! verdict about an accepted measurement, alone and as both ends.
use seikan_diagnose::exchange::{Measurement, Message};
use seikan_diagnose::{both, diagnose};

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(message) = Message::read(bytes) else {
        return;
    };
    assert!(Message::read(&message.write()).is_ok(), "{message:?}");
    let Message::Measurement(measurement) = message else {
        return;
    };
    let Ok(evidence) = measurement.evidence() else {
        return;
    };
    let verdict = diagnose(&evidence);
    assert_eq!(verdict.chain.first(), Some(&verdict.cause));
    let verdict = both(&evidence, &evidence);
    assert_eq!(verdict.chain.first(), Some(&verdict.cause));
    assert!(Measurement::of(&evidence).evidence().is_ok());
}
