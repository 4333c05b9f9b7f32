//! Any bytes as messages from etcd to a coordinator.
use seikan_coordinator::store::fuzzing;

/// One input.
pub fn run(bytes: &[u8]) {
    fuzzing::messages(bytes);
}
