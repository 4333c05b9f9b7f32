//! From evidence to a verdict: what makes a tunnel slow, how sure that is, and what helps.
//!
//! [`Evidence`] holds what was measured on a host. Each rule of [`rules`] looks at it for one [`Cause`] and says
//! whether the cause is [present](Judgement). [`diagnose`] weighs what the rules say and names one, with the chain of
//! causes behind it, the numbers, the remedies, and what was ruled out.
//!
//! Everything here is a pure function: it reads no clock, no file and no socket. What is measured live and what was
//! recorded take the same way.
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
pub use remedy::{Action, Place, Remedy, clamp, is_plain};
pub use seikan_observe::profile::{Profile, Share, Stage};
pub use signature::Moves;
pub use stage::{profile, stage};
pub use verdict::{Cost, Level, RuledOut, Verdict, concluded, diagnose, rival};
