//! Any bytes as what an etcd says to a coordinator.
#![no_main]

use libfuzzer_sys::fuzz_target;
use seikan_coordinator::store::fuzzing;

fuzz_target!(|bytes: &[u8]| fuzzing::messages(bytes));
