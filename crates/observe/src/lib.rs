//! The vocabulary shared by the data path and the diagnosis: why packets are dropped, what is
//! counted, how distributions are kept, what samples of a host are, what a path over it is, and
//! where its processors' time went.
//!
//! The invariant of the ledger, per direction: `in = out + consumed + sum of drops`.
#![forbid(unsafe_code)]

mod drops;
mod histogram;
mod ledger;
pub mod path;
pub mod profile;
mod sample;

pub use drops::{DropCounts, DropReason};
pub use histogram::Histogram;
pub use ledger::{DirectionCounters, Handshakes, PeerCounters};
pub use sample::{Column, Key, Kind, Sample, Series, Subject, metric};
