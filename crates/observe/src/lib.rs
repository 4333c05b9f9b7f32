//! The vocabulary shared by the data path and the diagnosis: why packets are dropped, what is
//! counted, and how distributions are kept.
//!
//! The invariant of the ledger, per direction: `in = out + consumed + sum of drops`.
#![forbid(unsafe_code)]

mod drops;
mod histogram;
mod ledger;

pub use drops::{DropCounts, DropReason};
pub use histogram::Histogram;
pub use ledger::{DirectionCounters, Handshakes, PeerCounters};
