//! Any bytes as a recording: an accepted one survives encoding and decoding.
use seikan_diagnose::Recording;

/// One input.
pub fn run(bytes: &[u8]) {
    let Ok(recording) = Recording::parse(bytes) else {
        return;
    };
    seikan_diagnose::diagnose(&recording.evidence);
    let mut again = Vec::new();
    let written = recording.write(&mut again);
    written.unwrap_or_else(|error| panic!("cannot write the recording: {error}"));
    let read = Recording::parse(&again);
    let read = read.unwrap_or_else(|error| panic!("cannot read the written recording: {error}"));
    assert!(read == recording, "it is another one");
}
