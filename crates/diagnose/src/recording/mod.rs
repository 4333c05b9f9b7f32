//! What a diagnosis measured, kept for later: read again, it is as if it were live.
//!
//! A recording is an Apache Parquet file of one long table, so that other programs read it, too: [`mod@write`] has its columns.
//! What is not a value over time is JSON in the file's metadata. [`read`] takes bytes from anywhere, [`page`] decodes
//! the columns' pages.

mod page;
mod read;
#[cfg(test)]
mod tests;
mod write;

use std::borrow::Cow;
use std::io::Write;
use std::time::SystemTime;

use seikan_observe::path::PathMap;
use seikan_observe::profile::{Functions, Profile};
use serde::{Deserialize, Serialize};

use crate::trial::Attempt;
use crate::{Cost, Evidence, Probes};

pub use write::Writer;

/// The version of the format that is written, and the newest that is read.
pub const VERSION: u32 = 1;
/// Bytes of the largest file that is read.
pub const MAX_BYTES: u64 = 256 << 20;
/// Values of the longest recording: three hours of some 300 values, ten times a second.
pub const MAX_VALUES: usize = 1 << 25;

/// Keys of the file's metadata: the version of the format.
const KEY_VERSION: &str = "seikan.version";
/// The version of the program that wrote it.
const KEY_PROGRAM: &str = "seikan.program";
/// [`Recording::begun`], nanoseconds since 1970.
const KEY_BEGUN: &str = "seikan.begun";
/// [`Facts`] as JSON.
const KEY_RECORDING: &str = "seikan.recording";

/// The table.
const SCHEMA: &str = "message recording {
    required int64 time (INTEGER(64, true));
    required binary subject (STRING);
    required binary name (STRING);
    required binary kind (STRING);
    required int64 value (INTEGER(64, false));
}";
/// Bytes of the longest subject or name.
const MAX_TEXT: usize = 4096;
/// Bytes of what is not a value over time.
const MAX_FACTS: usize = 16 << 20;
/// Bytes of the file's metadata: those, and where the row groups are.
const MAX_METADATA: usize = 2 * MAX_FACTS;

/// Everything that was measured at one time on one host.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// When the first sample was taken.
    pub begun: SystemTime,
    /// What the rules read.
    pub evidence: Evidence,
    /// Where processor time went by function, and call stacks if they were asked for.
    pub functions: Option<Functions>,
    /// Remedies that were tried afterwards, in order.
    pub attempts: Vec<Attempt>,
    /// What it cost.
    pub cost: Cost,
}

/// What of a recording is not a value over time.
#[derive(Serialize, Deserialize)]
struct Facts<'a> {
    map: Cow<'a, PathMap>,
    expected: Option<f64>,
    profile: Option<Cow<'a, Profile>>,
    probes: Cow<'a, Probes>,
    functions: Option<Cow<'a, Functions>>,
    attempts: Cow<'a, [Attempt]>,
    cost: Cost,
}

/// Why a recording cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// It does not go where it is written to.
    #[error("cannot write the recording: {0}")]
    Write(String),
    /// What is to be written could not be read again.
    #[error("this cannot be recorded: {0}")]
    Unfit(String),
    /// Something else.
    #[error(
        "this is no recording: {0}; one is made by `seikan record` or `seikan doctor --record`"
    )]
    Foreign(String),
    /// From the future.
    #[error(
        "this recording is of version {found} of the format, of which {VERSION} is the newest that this program \
         knows: read it with the program that wrote it (seikan {program}), or a newer one"
    )]
    Newer {
        /// Its version.
        found: u32,
        /// The version of the program that wrote it.
        program: String,
    },
    /// Not all there, or changed.
    #[error("this recording is damaged: {0}")]
    Damaged(String),
    /// More than is read.
    #[error("this recording is too large: {what}, of which {most} at most are read")]
    TooLarge {
        /// What there is too much of.
        what: String,
        /// How many are read.
        most: u64,
    },
}

impl Recording {
    /// Writes it as a file.
    ///
    /// # Errors
    /// [`RecordingError::Write`], and [`RecordingError::Unfit`] where it is larger than what can be read again.
    pub fn write<W: Write + Send>(&self, out: W) -> Result<(), RecordingError> {
        let mut writer = Writer::new(out)?;
        writer.append(&self.evidence.series)?;
        writer.finish(self)
    }

    /// Reads a file's bytes, which may be anybody's: what is not as it should be is an error, and memory is bounded by
    /// the length of the file, and by [`MAX_VALUES`].
    ///
    /// # Errors
    /// All but [`RecordingError::Write`] and [`RecordingError::Unfit`].
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordingError> {
        read::parse(bytes)
    }
}
