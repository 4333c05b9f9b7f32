//! Any bytes as a recording: what is accepted survives being written and read again.
use seikan_diagnose::Recording;

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(recording) = Recording::parse(bytes) else {
        return;
    };
    seikan_diagnose::diagnose(&recording.evidence);
    let mut again = Vec::new();
    let written = recording.write(&mut again);
    written.unwrap_or_else(|error| panic!("what was read is not written: {error}"));
    let read = Recording::parse(&again);
    let read = read.unwrap_or_else(|error| panic!("what was written is not read: {error}"));
    assert!(read == recording, "it is another one");
}
