//! Reads a recording from untrusted bytes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use parquet::basic::Compression;
use parquet::column::page::PageReader;
use parquet::file::metadata::{ColumnChunkMetaData, FileMetaData, ParquetMetaDataReader};
use parquet::file::properties::ReaderProperties;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::parser::parse_message_type;
use seikan_observe::{Column, Key, Kind, Series, Subject};

use super::page::{Pages, Rows, Texts, Value};
use super::write::kind_name;
use super::{
    Facts, KEY_PROGRAM, KEY_RECORDING, KEY_STARTED, KEY_VERSION, MAX_BYTES, MAX_METADATA,
    MAX_VALUES, Recording, RecordingError, SCHEMA, VERSION,
};
use crate::Evidence;
use crate::exchange::MAX_PROCESSORS;

/// Maximum number of values per byte of a file: a recording of zeros has 50.
const MAX_VALUES_PER_BYTE: usize = 256;
/// Bytes of all subjects and names together, with the memory of their series.
const MAX_NAMES: usize = 64 << 20;
/// Memory of an empty series, bytes.
const SERIES: usize = 128;
/// First and last bytes of a Parquet file.
const MAGIC: &[u8] = b"PAR1";

pub(super) fn parse(bytes: &[u8]) -> Result<Recording, RecordingError> {
    check_frame(bytes)?;
    let file = Bytes::copy_from_slice(bytes);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&file);
    let metadata = metadata.map_err(|error| damaged(format!("its end: {error}")))?;
    let about = metadata.file_metadata();
    check_version(about)?;
    let schema = parse_message_type(SCHEMA).map_err(|error| damaged(error.to_string()))?;
    let same = about.schema().get_fields() == schema.get_fields();
    if !same {
        return Err(damaged("its columns are not those of a recording"));
    }
    let facts: Facts = serde_json::from_str(value(about, KEY_RECORDING)?)
        .map_err(|error| damaged(format!("`{KEY_RECORDING}`: {error}")))?;
    // Rules examine each of them.
    if facts.map.host.cpus.len() > MAX_PROCESSORS {
        return Err(damaged("more processors than a kernel can have"));
    }
    let started_at = value(about, KEY_STARTED)?.parse().ok();
    let started_at =
        started_at.and_then(|started_at| UNIX_EPOCH.checked_add(Duration::from_nanos(started_at)));
    let started_at = started_at.ok_or_else(|| damaged(format!("`{KEY_STARTED}` is not a time")))?;

    let most = MAX_VALUES.min(bytes.len().saturating_mul(MAX_VALUES_PER_BYTE));
    let mut table = Table::default();
    let mut rows = 0_usize;
    for (number, group) in metadata.row_groups().iter().enumerate() {
        let of = usize::try_from(group.num_rows()).unwrap_or(usize::MAX);
        rows = rows.saturating_add(of);
        if rows > most {
            return Err(RecordingError::TooLarge {
                what: format!("{rows} values in {} bytes", bytes.len()),
                most: most as u64,
            });
        }
        let taken = Group::read(&file, group.columns(), of).and_then(|group| table.take(&group));
        taken.map_err(|why| damaged(format!("part {number} of its table: {why}")))?;
    }
    Ok(Recording {
        started_at,
        evidence: Evidence {
            map: facts.map.into_owned(),
            series: table.series(),
            expected: facts.expected,
            profile: facts.profile.map(|profile| profile.into_owned()),
            probes: facts.probes.into_owned(),
        },
        functions: facts.functions.map(|functions| functions.into_owned()),
        attempts: facts.attempts.into_owned(),
        cost: facts.cost,
    })
}

/// Checks the magic at both ends, and that the metadata is not too long.
fn check_frame(bytes: &[u8]) -> Result<(), RecordingError> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(RecordingError::TooLarge {
            what: format!("{} bytes", bytes.len()),
            most: MAX_BYTES,
        });
    }
    if !bytes.starts_with(MAGIC) {
        return Err(RecordingError::Foreign(
            "it is not a Parquet file".to_owned(),
        ));
    }
    let footer = bytes.strip_suffix(MAGIC).and_then(|rest| rest.last_chunk());
    let Some(length) = footer.map(|length| u32::from_le_bytes(*length)) else {
        return Err(damaged("its end is missing"));
    };
    if length as usize > MAX_METADATA {
        Err(RecordingError::TooLarge {
            what: format!("{length} bytes of metadata"),
            most: MAX_METADATA as u64,
        })
    } else {
        Ok(())
    }
}

fn check_version(about: &FileMetaData) -> Result<(), RecordingError> {
    let foreign =
        |_| RecordingError::Foreign(format!("it is a Parquet file without `{KEY_VERSION}`"));
    let version = value(about, KEY_VERSION).map_err(foreign)?;
    match version.parse() {
        Ok(VERSION) => Ok(()),
        Ok(found) if found > VERSION => Err(RecordingError::Newer {
            found,
            program: value(about, KEY_PROGRAM)
                .unwrap_or("?")
                .chars()
                .filter(|c| !c.is_control())
                .take(32)
                .collect(),
        }),
        _ => Err(damaged(format!("`{KEY_VERSION}` is not a version"))),
    }
}

fn value<'a>(about: &'a FileMetaData, key: &str) -> Result<&'a str, RecordingError> {
    let pairs = about.key_value_metadata().into_iter().flatten();
    let value = pairs
        .filter(|pair| pair.key == key)
        .find_map(|pair| pair.value.as_deref());
    value.ok_or_else(|| damaged(format!("it has no `{key}`")))
}

/// A row group.
struct Group {
    times: Vec<i64>,
    subjects: Texts,
    names: Texts,
    kinds: Texts,
    values: Vec<i64>,
}

impl Group {
    fn read(file: &Bytes, columns: &[ColumnChunkMetaData], rows: usize) -> Result<Self, String> {
        let [times, subjects, names, kinds, values] = columns else {
            return Err("it has not five columns".to_owned());
        };
        let of = |column: &str| {
            let column = column.to_owned();
            move |why: String| format!("column `{column}`: {why}")
        };
        Ok(Group {
            times: integers(file, times, rows).map_err(of("time"))?,
            subjects: texts(file, subjects, rows).map_err(of("subject"))?,
            names: texts(file, names, rows).map_err(of("name"))?,
            kinds: texts(file, kinds, rows).map_err(of("kind"))?,
            values: integers(file, values, rows).map_err(of("value"))?,
        })
    }
}

fn integers(file: &Bytes, column: &ColumnChunkMetaData, rows: usize) -> Result<Vec<i64>, String> {
    let mut values = Vec::new();
    pages(file, column, rows, |pages: &Pages<i64>, rows| match rows {
        Rows::Indices(indices) => values.append(&mut pages.look_up(&indices)),
        Rows::Values(mut of) => values.append(&mut of),
    })?;
    Ok(values)
}

fn texts(file: &Bytes, column: &ColumnChunkMetaData, rows: usize) -> Result<Texts, String> {
    let mut texts = Texts::default();
    // Indexes of plain pages follow the dictionary, whose length is known when the first of them comes.
    let mut plain = Vec::new();
    let dictionary = pages(
        file,
        column,
        rows,
        |pages: &Pages<String>, rows| match rows {
            Rows::Indices(mut indices) => texts.rows.append(&mut indices),
            Rows::Values(mut of) => {
                let first = pages.dictionary_length() + plain.len();
                texts
                    .rows
                    .extend((first..first + of.len()).map(|at| at as u32));
                plain.append(&mut of);
            }
        },
    )?;
    texts.dictionary = dictionary;
    texts.dictionary.append(&mut plain);
    Ok(texts)
}

/// Reads the pages of a column one by one; returns its dictionary.
fn pages<T: Value>(
    file: &Bytes,
    column: &ColumnChunkMetaData,
    rows: usize,
    mut take: impl FnMut(&Pages<T>, Rows<T>),
) -> Result<Vec<T>, String> {
    let begin = column
        .dictionary_page_offset()
        .unwrap_or(column.data_page_offset());
    let end = begin
        .checked_add(column.compressed_size())
        .and_then(|end| usize::try_from(end).ok());
    let inside =
        begin >= 0 && column.compressed_size() >= 0 && end.is_some_and(|end| end <= file.len());
    if !inside {
        return Err("it is outside of the file".to_owned());
    }
    // The library would decompress into as much memory as a page asks for; here it returns raw pages.
    let raw = column.clone().into_builder();
    let raw = raw.set_compression(Compression::UNCOMPRESSED).build();
    let raw = raw.map_err(|error| error.to_string())?;
    let properties = ReaderProperties::builder()
        .set_read_page_statistics(false)
        .build();
    let file = Arc::new(file.clone());
    let reader =
        SerializedPageReader::new_with_properties(file, &raw, rows, None, Arc::new(properties));
    let mut reader = reader.map_err(|error| error.to_string())?;
    let mut pages = Pages::new(column.compression(), rows);
    while let Some(page) = reader.get_next_page().map_err(|error| error.to_string())? {
        if let Some(rows) = pages.take(&page)? {
            take(&pages, rows);
        }
    }
    Ok(pages.finish()?)
}

/// The table so far.
#[derive(Default)]
struct Table {
    times: Vec<Duration>,
    columns: Vec<(Key, Column)>,
    indexes: HashMap<Key, usize>,
    /// Bytes of all keys.
    names: usize,
}

impl Table {
    /// Adds a row group, whose times are later than those before.
    fn take(&mut self, group: &Group) -> Result<(), String> {
        let subjects: Result<Vec<Subject>, _> = group
            .subjects
            .dictionary
            .iter()
            .map(|text| text.parse())
            .collect();
        let subjects = subjects?;
        let kinds: Result<Vec<Kind>, _> = group
            .kinds
            .dictionary
            .iter()
            .map(|text| kind(text))
            .collect();
        let kinds = kinds?;
        let mut times = group.times.clone();
        times.sort_unstable();
        times.dedup();
        let first = self.times.len();
        for time in &times {
            let time = u64::try_from(*time)
                .map_err(|_| format!("time {time} is before the first sample"))?;
            self.times.push(Duration::from_nanos(time));
        }
        if first > 0
            && self
                .times
                .get(first)
                .is_some_and(|time| *time <= self.times[first - 1])
        {
            return Err("its times do not ascend".to_owned());
        }
        // Returns the index of the series of a subject and a name.
        let mut indexes = HashMap::new();
        for (row, time) in group.times.iter().enumerate() {
            let of = (group.subjects.rows[row], group.names.rows[row]);
            let kind = kinds[group.kinds.rows[row] as usize];
            let index = match indexes.get(&of) {
                Some(index) => *index,
                None => {
                    let subject = &subjects[of.0 as usize];
                    let name = &group.names.dictionary[of.1 as usize];
                    let index = self.index(Key::new(subject.clone(), name.clone()), kind)?;
                    indexes.insert(of, index);
                    index
                }
            };
            let (key, column) = &mut self.columns[index];
            let index = first + times.partition_point(|other| other < time);
            let index = u32::try_from(index).map_err(|_| "it has too many samples".to_owned())?;
            let late = column.points.last().is_none_or(|(last, _)| *last < index);
            if !late || column.kind != kind {
                return Err(format!(
                    "`{} {}`: its times do not ascend, or its kind changes",
                    key.subject, key.name
                ));
            }
            column
                .points
                .push((index, group.values[row].cast_unsigned()));
        }
        Ok(())
    }

    /// Returns the index of the series of a key; adds one if there is none.
    fn index(&mut self, key: Key, kind: Kind) -> Result<usize, String> {
        if let Some(index) = self.indexes.get(&key) {
            return Ok(*index);
        }
        self.names += SERIES + 2 * (key.name.len() + key.subject.to_string().len());
        if self.names > MAX_NAMES {
            return Err(format!("its names take more than {MAX_NAMES} bytes"));
        }
        let index = self.columns.len();
        self.indexes.insert(key.clone(), index);
        let points = Vec::new();
        self.columns.push((key, Column { kind, points }));
        Ok(index)
    }

    fn series(self) -> Series {
        Series {
            times: self.times,
            columns: self.columns.into_iter().collect(),
        }
    }
}

fn kind(text: &str) -> Result<Kind, String> {
    let kinds = [Kind::Counter, Kind::Gauge].into_iter();
    let found = kinds.into_iter().find(|kind| kind_name(*kind) == text);
    found.ok_or_else(|| format!("`{text}` is not a kind of value"))
}

fn damaged(why: impl Into<String>) -> RecordingError {
    RecordingError::Damaged(why.into())
}
