//! Writes samples as a table: `time` (nanoseconds since the first sample), `subject`, `name`,
//! `kind`, `value`.
//!
//! A row group holds some minutes of samples, which bounds the memory of a recording in progress.
//! Its rows are ordered by key and then by time: texts are runs, times repeat for each key, and
//! values differ little from the previous one.

use std::borrow::Cow;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use parquet::basic::{Compression, Encoding};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::ColumnPath;
use seikan_observe::{Kind, Sample, Series};

use super::{
    Facts, KEY_PROGRAM, KEY_RECORDING, KEY_STARTED, KEY_VERSION, MAX_FACTS, MAX_TEXT, MAX_VALUES,
    Recording, RecordingError, SCHEMA, VERSION,
};

/// Values of a row group: 300 values ten times a second for a minute and a half; 4 MiB.
const GROUP: usize = 1 << 18;

/// Writes a recording in progress.
pub struct Writer<W: Write + Send> {
    file: SerializedFileWriter<W>,
    /// Samples not yet written.
    pending: Series,
    pending_values: usize,
    last: Option<Duration>,
    values: usize,
}

impl<W: Write + Send> Writer<W> {
    /// Starts a file.
    ///
    /// # Errors
    /// [`RecordingError::Write`].
    pub fn new(out: W) -> Result<Self, RecordingError> {
        let schema = parse_message_type(SCHEMA).map_err(failed)?;
        let column = |name: &str| ColumnPath::from(name);
        let properties = WriterProperties::builder()
            .set_created_by(format!("seikan {}", env!("CARGO_PKG_VERSION")))
            .set_compression(Compression::SNAPPY)
            .set_statistics_enabled(EnabledStatistics::Chunk)
            .set_offset_index_disabled(true)
            .set_column_dictionary_enabled(column("value"), false)
            .set_column_encoding(column("value"), Encoding::DELTA_BINARY_PACKED)
            .build();
        let file = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties));
        Ok(Writer {
            file: file.map_err(failed)?,
            pending: Series::default(),
            pending_values: 0,
            last: None,
            values: 0,
        })
    }

    /// Adds a sample, which must be later than the previous one. A sample without values is
    /// ignored.
    ///
    /// # Errors
    /// [`RecordingError::Write`]; [`RecordingError::Unfit`] if the sample is not later, or has a
    /// name that is too long.
    pub fn push(&mut self, sample: Sample) -> Result<(), RecordingError> {
        if self.last.is_some_and(|last| sample.at <= last) {
            return Err(unfit(format!(
                "a sample at {:?} comes after a later one",
                sample.at
            )));
        }
        if sample.values.is_empty() {
            return Ok(());
        }
        if self.pending_values + sample.values.len() > GROUP {
            self.flush()?;
        }
        self.last = Some(sample.at);
        self.values += sample.values.len();
        self.pending_values += sample.values.len();
        self.pending.push(sample);
        Ok(())
    }

    /// Whether the recording would be too large with `more` additional values.
    pub fn is_full(&self, more: usize) -> bool {
        self.values.saturating_add(more) > MAX_VALUES
    }

    /// Number of values so far.
    pub fn values(&self) -> usize {
        self.values
    }

    /// Number of values in memory.
    #[cfg(test)]
    pub(super) fn pending_values(&self) -> usize {
        self.pending_values
    }

    /// Adds the samples of a series, as [`Writer::push`] does.
    pub(super) fn append(&mut self, series: &Series) -> Result<(), RecordingError> {
        let mut columns: Vec<_> = series
            .columns
            .iter()
            .map(|(key, column)| (key, column.kind, column.points.iter().peekable()))
            .collect();
        for (index, at) in series.times.iter().enumerate() {
            let mut sample = Sample {
                at: *at,
                values: Vec::new(),
            };
            for (key, kind, points) in &mut columns {
                if let Some((_, value)) = points.next_if(|(of, _)| *of as usize == index) {
                    sample.values.push((key.clone(), *kind, *value));
                }
            }
            self.push(sample)?;
        }
        Ok(())
    }

    /// Completes the file with the other data of the recording; its series is ignored in favour of
    /// the pushed samples.
    ///
    /// # Errors
    /// [`RecordingError::Write`]; [`RecordingError::Unfit`] if it is too large to be read again.
    pub fn finish(mut self, recording: &Recording) -> Result<(), RecordingError> {
        if self.is_full(0) {
            let values = self.values;
            return Err(unfit(format!("{values} values, at most {MAX_VALUES}")));
        }
        self.flush()?;
        let facts = facts(recording)?;
        let started_at = recording.started_at.duration_since(UNIX_EPOCH);
        let started_at = started_at.map_err(|_| unfit("it began before 1970".to_owned()))?;
        for (key, value) in [
            (KEY_VERSION, VERSION.to_string()),
            (KEY_PROGRAM, env!("CARGO_PKG_VERSION").to_owned()),
            (KEY_STARTED, started_at.as_nanos().to_string()),
            (KEY_RECORDING, facts),
        ] {
            let pair = KeyValue::new(key.to_owned(), value);
            self.file.append_key_value_metadata(pair);
        }
        self.file.finish().map_err(failed)?;
        self.file.inner_mut().flush().map_err(|error| {
            let why = error.to_string();
            RecordingError::Write(why)
        })
    }

    /// Writes the pending samples as a row group.
    fn flush(&mut self) -> Result<(), RecordingError> {
        let series = std::mem::take(&mut self.pending);
        if std::mem::take(&mut self.pending_values) == 0 {
            return Ok(());
        }
        let rows = Rows::of(&series)?;
        let mut group = self.file.next_row_group().map_err(failed)?;
        let cells = [
            Cells::Integers(&rows.times),
            Cells::Texts(&rows.subjects),
            Cells::Texts(&rows.names),
            Cells::Texts(&rows.kinds),
            Cells::Integers(&rows.values),
        ];
        for cells in cells {
            let Some(mut column) = group.next_column().map_err(failed)? else {
                unreachable!("the schema has five columns");
            };
            cells.write(&mut column).map_err(failed)?;
            column.close().map_err(failed)?;
        }
        group.close().map_err(failed)?;
        Ok(())
    }
}

/// Returns the JSON. If there are too many call stacks, the rarest are left out.
fn facts(recording: &Recording) -> Result<String, RecordingError> {
    let evidence = &recording.evidence;
    let mut facts = Facts {
        map: Cow::Borrowed(&evidence.map),
        expected: evidence.expected,
        profile: evidence.profile.as_ref().map(Cow::Borrowed),
        probes: Cow::Borrowed(&evidence.probes),
        functions: recording.functions.as_ref().map(Cow::Borrowed),
        attempts: Cow::Borrowed(&recording.attempts),
        cost: recording.cost,
    };
    loop {
        let json = serde_json::to_string(&facts).map_err(|error| unfit(error.to_string()))?;
        if json.len() <= MAX_FACTS {
            return Ok(json);
        }
        match &mut facts.functions {
            Some(functions) if !functions.stacks.is_empty() => {
                let functions = functions.to_mut();
                let half = functions.stacks.len() / 2;
                functions.stacks.truncate(half);
            }
            _ => {
                let length = json.len();
                let why = format!("{length} bytes of facts, at most {MAX_FACTS}");
                return Err(unfit(why));
            }
        }
    }
}

/// A column of a row group.
enum Cells<'a> {
    Integers(&'a [i64]),
    Texts(&'a [ByteArray]),
}

impl Cells<'_> {
    fn write(&self, column: &mut SerializedColumnWriter) -> Result<usize, ParquetError> {
        match self {
            Cells::Integers(cells) => {
                let column = column.typed::<Int64Type>();
                column.write_batch(cells, None, None)
            }
            Cells::Texts(cells) => {
                let column = column.typed::<ByteArrayType>();
                column.write_batch(cells, None, None)
            }
        }
    }
}

/// Rows of a row group, column by column.
#[derive(Default)]
struct Rows {
    times: Vec<i64>,
    subjects: Vec<ByteArray>,
    names: Vec<ByteArray>,
    kinds: Vec<ByteArray>,
    values: Vec<i64>,
}

impl Rows {
    fn of(series: &Series) -> Result<Self, RecordingError> {
        let times: Result<Vec<i64>, _> = series.times.iter().map(nanoseconds).collect();
        let times = times?;
        let mut rows = Rows::default();
        for (key, column) in &series.columns {
            let subject = text(key.subject.to_string())?;
            let name = text(key.name.clone().into_owned())?;
            let kind = ByteArray::from(kind_name(column.kind));
            for (index, value) in &column.points {
                rows.times.push(times[*index as usize]);
                rows.subjects.push(subject.clone());
                rows.names.push(name.clone());
                rows.kinds.push(kind.clone());
                rows.values.push(value.cast_signed());
            }
        }
        Ok(rows)
    }
}

fn nanoseconds(time: &Duration) -> Result<i64, RecordingError> {
    let nanoseconds = time.as_nanos().try_into();
    nanoseconds.map_err(|_| unfit(format!("a sample after {time:?}")))
}

fn text(text: String) -> Result<ByteArray, RecordingError> {
    match text.len() {
        0..=MAX_TEXT => Ok(ByteArray::from(text.into_bytes())),
        length => Err(unfit(format!(
            "a name of {length} bytes, at most {MAX_TEXT}"
        ))),
    }
}

/// Texts of the column `kind`.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
    }
}

fn unfit(why: String) -> RecordingError {
    RecordingError::Unfit(why)
}

fn failed(error: ParquetError) -> RecordingError {
    RecordingError::Write(match error {
        ParquetError::General(why) => why,
        ParquetError::External(error) => error.to_string(),
        other => other.to_string(),
    })
}
