//! Diagnosis of slow tunnels: from evidence to a cause, its confidence and its remedies.
//!
//! [`Evidence`] holds the measurements of a host. Each rule of [`rules`] examines them for one
//! [`Cause`] and returns a [`Judgement`]. [`diagnose`] weighs the findings and names one cause,
//! with the chain to the symptom, the figures, the remedies, and the causes that it excludes.
//!
//! Everything here is a pure function: it reads no clock, no file and no socket. Live and recorded
//! evidence are treated alike.
#![forbid(unsafe_code)]

pub mod baseline;
mod cause;
mod ends;
mod evidence;
pub mod exchange;
mod finding;
mod load;
mod losses;
pub mod recording;
mod remedy;
pub mod rules;
mod signature;
mod stage;
pub mod stats;
pub mod trial;
mod verdict;

pub use cause::{Cause, PathStep, Severity};
pub use ends::{Crossing, End, Far, both};
pub use evidence::{Evidence, MtuProbe, OwnTraffic, Probes, ThreadUse};
pub use finding::{Excluded, Fact, Finding, Judgement};
pub use losses::{Arrivals, Losses, Stall};
pub use recording::{Recording, RecordingError};
pub use remedy::{Action, Location, Remedy, clamp, is_plain};
pub use seikan_observe::profile::{Profile, Share, Stage};
pub use signature::Moves;
pub use stage::{profile, stage};
pub use verdict::{Cost, Level, RuledOut, Verdict, concluded, diagnose, rival};
