//! TODO
#![forbid(unsafe_code)]

pub mod allowed_ips;
pub mod capabilities;
pub mod constants;
pub mod construction;
pub mod cookie;
pub mod indices;
pub mod keys;
pub mod noise;
pub mod rate_limiter;
pub mod replay;
pub mod rng;
pub mod tai64n;
pub mod time;
pub mod timers;
