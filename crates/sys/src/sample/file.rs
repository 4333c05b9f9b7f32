//! A file of `/proc` or `/sys` that is read repeatedly: opened once, and read from its start into
//! one buffer.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Maximum length in bytes. No such file is longer on a machine with a thousand processors.
const LIMIT: usize = 16 << 20;
/// Initial size of the buffer.
const START: usize = 4096;

/// An open file and its last content.
#[derive(Debug)]
pub(super) struct Counters {
    file: File,
    buffer: Vec<u8>,
}

impl Counters {
    /// Opens the file.
    pub(super) fn open(path: &str) -> io::Result<Self> {
        let file = File::open(path).map_err(|error| named(path, &error))?;
        Ok(Counters {
            file,
            buffer: vec![0; START],
        })
    }

    /// Opens the file and reads it once, since some files refuse only that.
    pub(super) fn open_readable(path: &str) -> io::Result<Self> {
        let mut counters = Self::open(path)?;
        counters.read().map_err(|error| named(path, &error))?;
        Ok(counters)
    }

    /// Returns the current content. Bytes that are not UTF-8 (in the name of a thread) are
    /// replaced.
    pub(super) fn read(&mut self) -> io::Result<Cow<'_, str>> {
        let mut length = 0;
        loop {
            if length == self.buffer.len() {
                if length >= LIMIT {
                    let text = "it is longer than expected";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, text));
                }
                self.buffer.resize(2 * length, 0);
            }
            match self.file.read_at(&mut self.buffer[length..], length as u64) {
                Ok(0) => break,
                Ok(read) => length += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(String::from_utf8_lossy(&self.buffer[..length]))
    }
}

fn named(path: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{path}: {error}"))
}
