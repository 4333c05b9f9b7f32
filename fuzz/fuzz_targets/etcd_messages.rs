//! Any bytes as what an etcd says to a coordinator.
use seikan_coordinator::store::fuzzing;

/// One input.
pub fn run(bytes: &[u8]) {
    fuzzing::messages(bytes);
}
