//! Types shared by the data path and the diagnosis: drop reasons, counters, histograms, samples of
//! a host, the path that packets take on it, and profiles of its processors.
//!
//! Invariant of the counters, per direction: `in = out + consumed + pending + sum of drops`.
#![forbid(unsafe_code)]

mod drops;
mod histogram;
mod ledger;
pub mod path;
pub mod profile;
mod sample;

pub use drops::{DropCounts, DropReason, Stopped};
pub use histogram::Histogram;
pub use ledger::{DirectionCounters, Handshakes, PeerCounters};
pub use sample::{Column, Key, Kind, Sample, Series, Subject, metric};
