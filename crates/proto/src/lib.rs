//! TODO
#![forbid(unsafe_code)]

pub mod constants;
pub mod cookie;
pub mod keys;
pub mod noise;
pub mod rate_limiter;
pub mod replay;
pub mod rng;
pub mod tai64n;
pub mod time;
