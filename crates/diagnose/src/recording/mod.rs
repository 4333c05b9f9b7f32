//! Recordings: measurements kept in a file. Diagnosed again, they have the verdict of the live measurement.
//!
//! A recording is an Apache Parquet file with one long table that other programs can read;
//! [`mod@write`] describes its columns. All other data is JSON in the metadata of the file.
//! [`read`] accepts untrusted bytes, [`page`] decodes the pages of columns.

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

/// Version of the written format, and the newest version that can be read.
pub const VERSION: u32 = 1;
/// Largest file that is read, bytes.
pub const MAX_BYTES: u64 = 256 << 20;
/// Values of the longest recording: three hours of 300 values, ten times a second.
pub const MAX_VALUES: usize = 1 << 25;

/// Keys of the file's metadata: version of the format.
const KEY_VERSION: &str = "seikan.version";
/// Version of the writing program.
const KEY_PROGRAM: &str = "seikan.program";
/// [`Recording::started_at`], nanoseconds since 1970.
const KEY_STARTED: &str = "seikan.started";
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
/// Maximum length of a subject or name, in bytes.
const MAX_TEXT: usize = 4096;
/// Largest JSON, bytes.
const MAX_FACTS: usize = 16 << 20;
/// Largest metadata, bytes: the JSON and the positions of the row groups.
const MAX_METADATA: usize = 2 * MAX_FACTS;

/// A measurement of one host.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// Time of the first sample.
    pub started_at: SystemTime,
    /// Evidence for the rules.
    pub evidence: Evidence,
    /// Processor time by function, with call stacks if requested.
    pub functions: Option<Functions>,
    /// Tests of remedies, in order.
    pub attempts: Vec<Attempt>,
    /// Cost of the measurement.
    pub cost: Cost,
}

/// The data of a recording that is not a time series.
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

/// Reason why a recording cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// Writing failed.
    #[error("cannot write the recording: {0}")]
    Write(String),
    /// The recording could not be read again.
    #[error("this cannot be recorded: {0}")]
    Unfit(String),
    /// The file is not a recording.
    #[error(
        "this is no recording: {0}; create one with `seikan record` or `seikan doctor --record`"
    )]
    Foreign(String),
    /// A newer version.
    #[error(
        "this recording has version {found} of the format, newer than {VERSION}: read it with the program that wrote it \
         (seikan {program}), or a newer one"
    )]
    Newer {
        /// Version of the format.
        found: u32,
        /// Version of the writing program.
        program: String,
    },
    /// Incomplete or changed.
    #[error("this recording is damaged: {0}")]
    Damaged(String),
    /// Too large.
    #[error("this recording is too large: {what}, but only {most} are readable")]
    TooLarge {
        /// Kind of the items.
        what: String,
        /// Largest readable number.
        most: u64,
    },
}

impl Recording {
    /// Writes the recording as a file.
    ///
    /// # Errors
    /// [`RecordingError::Write`], and [`RecordingError::Unfit`] if it is too large to be read again.
    pub fn write<W: Write + Send>(&self, out: W) -> Result<(), RecordingError> {
        let mut writer = Writer::new(out)?;
        writer.append(&self.evidence.series)?;
        writer.finish(self)
    }

    /// Reads the bytes of a file, which are untrusted. Memory is bounded by the length of the file
    /// and by [`MAX_VALUES`].
    ///
    /// # Errors
    /// All but [`RecordingError::Write`] and [`RecordingError::Unfit`].
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordingError> {
        read::parse(bytes)
    }
}
