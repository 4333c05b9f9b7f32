//! The records in a ring (perf_event_open(2), "MMAP layout") that a profile needs.

/// `PERF_RECORD_LOST`, `PERF_RECORD_SAMPLE`, `PERF_RECORD_LOST_SAMPLES`.
const LOST: u32 = 2;
const SAMPLE: u32 = 9;
const LOST_SAMPLES: u32 = 13;
/// `PERF_RECORD_MISC_CPUMODE_MASK` and its values.
const MODE_MASK: u16 = 7;
const MODE_KERNEL: u16 = 1;
const MODE_USER: u16 = 2;
/// Bytes of a record's header.
const HEADER: usize = 8;
/// Addresses from here on are context marks in a call stack, not functions (`PERF_CONTEXT_MAX`).
const CONTEXT_MAX: u64 = -4095i64 as u64;
/// `PERF_CONTEXT_KERNEL`, `PERF_CONTEXT_USER`.
const CONTEXT_KERNEL: u64 = -128i64 as u64;
const CONTEXT_USER: u64 = -512i64 as u64;

/// The owner of executed code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// The kernel.
    Kernel,
    /// A program.
    User,
    /// A virtual machine.
    Guest,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Record {
    /// A sample of a processor.
    Sample {
        /// Process id; 0 if the processor is idle, except for interrupts.
        pid: u32,
        /// The address.
        address: u64,
        /// The owner of the code.
        mode: Mode,
        /// The call stack, innermost function first; empty unless requested.
        stack: Vec<(Mode, u64)>,
    },
    /// This many samples were lost.
    Lost(u64),
}

/// Iterates over the records. It ends at a malformed one, because the next one cannot be found.
#[derive(Debug)]
pub(super) struct Records<'a> {
    rest: &'a [u8],
    stacks: bool,
}

impl<'a> Records<'a> {
    /// `stacks`: whether samples have call stacks.
    pub(super) fn new(bytes: &'a [u8], stacks: bool) -> Self {
        Records {
            rest: bytes,
            stacks,
        }
    }

    /// Number of bytes that could not be parsed as records.
    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }
}

impl Iterator for Records<'_> {
    type Item = Record;

    fn next(&mut self) -> Option<Record> {
        loop {
            let mut header = Words(self.rest);
            let kind = header.u32()?;
            let [mode, length] = header.u16s()?;
            let body = self.rest.get(HEADER..usize::from(length))?;
            let record = match kind {
                SAMPLE => Some(sample(Words(body), mode, self.stacks)?),
                LOST => Some(Record::Lost({
                    let mut words = Words(body);
                    words.u64()?;
                    words.u64()?
                })),
                LOST_SAMPLES => Some(Record::Lost(Words(body).u64()?)),
                _ => None,
            };
            self.rest = &self.rest[usize::from(length)..];
            if record.is_some() {
                return record;
            }
        }
    }
}

fn sample(mut words: Words<'_>, misc: u16, stacks: bool) -> Option<Record> {
    let address = words.u64()?;
    let pid = words.u32()?;
    let _tid = words.u32()?;
    let mode = match misc & MODE_MASK {
        MODE_KERNEL => Mode::Kernel,
        MODE_USER => Mode::User,
        _ => Mode::Guest,
    };
    let stack = if stacks {
        stack(words, mode)?
    } else {
        Vec::new()
    };
    Some(Record::Sample {
        // The kernel reports -1 for a process that has ended.
        pid: if pid == u32::MAX { 0 } else { pid },
        address,
        mode,
        stack,
    })
}

fn stack(mut words: Words<'_>, mut mode: Mode) -> Option<Vec<(Mode, u64)>> {
    let count = words.u64()?;
    let mut stack = Vec::new();
    for _ in 0..count {
        match words.u64()? {
            CONTEXT_KERNEL => mode = Mode::Kernel,
            CONTEXT_USER => mode = Mode::User,
            mark if mark >= CONTEXT_MAX => mode = Mode::Guest,
            address => stack.push((mode, address)),
        }
    }
    Some(stack)
}

struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn u64(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*word))
    }

    fn u32(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*word))
    }

    fn u16s(&mut self) -> Option<[u16; 2]> {
        let word = self.u32()?.to_ne_bytes();
        Some([
            u16::from_ne_bytes([word[0], word[1]]),
            u16::from_ne_bytes([word[2], word[3]]),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u16, body: &[u64]) -> Vec<u8> {
        let length = (HEADER + body.len() * 8) as u16;
        let mut bytes = kind.to_ne_bytes().to_vec();
        bytes.extend(misc.to_ne_bytes());
        bytes.extend(length.to_ne_bytes());
        bytes.extend(body.iter().flat_map(|word| word.to_ne_bytes()));
        bytes
    }

    fn ids(pid: u32, tid: u32) -> u64 {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&pid.to_ne_bytes());
        bytes[4..].copy_from_slice(&tid.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }

    fn plain(pid: u32, address: u64, mode: Mode) -> Record {
        Record::Sample {
            pid,
            address,
            mode,
            stack: Vec::new(),
        }
    }

    #[test]
    fn samples_and_losses_are_read_and_others_passed_over() {
        let mut bytes = record(SAMPLE, MODE_USER, &[0x1000, ids(7, 8)]);
        bytes.extend(record(5, 0, &[1, 2, 3]));
        bytes.extend(record(LOST, 0, &[99, 12]));
        bytes.extend(record(SAMPLE, MODE_KERNEL | 1 << 14, &[0x2000, ids(0, 0)]));
        bytes.extend(record(LOST_SAMPLES, 0, &[3]));
        let mut records = Records::new(&bytes, false);
        let read: Vec<Record> = records.by_ref().collect();
        let expected = [
            plain(7, 0x1000, Mode::User),
            Record::Lost(12),
            plain(0, 0x2000, Mode::Kernel),
            Record::Lost(3),
        ];
        assert_eq!(read, expected);
        assert_eq!(records.left(), 0);
    }

    #[test]
    fn marks_in_a_stack_name_the_owner_of_the_code() {
        let body = [
            0x9000,
            ids(7, 8),
            5,
            CONTEXT_KERNEL,
            0x9000,
            CONTEXT_USER,
            0x10,
            0x20,
        ];
        let bytes = record(SAMPLE, MODE_KERNEL, &body);
        let Some(Record::Sample { stack, .. }) = Records::new(&bytes, true).next() else {
            panic!("no sample");
        };
        let expected = [
            (Mode::Kernel, 0x9000),
            (Mode::User, 0x10),
            (Mode::User, 0x20),
        ];
        assert_eq!(stack, expected);
    }

    #[test]
    fn lengths_that_make_no_sense_end_it() {
        let whole = record(SAMPLE, MODE_USER, &[0x1000, ids(7, 8), u64::MAX]);
        for length in 0..whole.len() as u16 {
            let mut bytes = whole.clone();
            bytes[6..8].copy_from_slice(&length.to_ne_bytes());
            let read: Vec<Record> = Records::new(&bytes, false).collect();
            assert!(read.len() <= 1, "{read:?}");
            assert_eq!(Records::new(&whole[..length.into()], false).count(), 0);
        }
        assert_eq!(Records::new(&whole, true).count(), 0);
        let zero = record(5, 0, &[]);
        let mut zero = [zero.clone(), zero].concat();
        zero[6..8].fill(0);
        assert_eq!(Records::new(&zero, false).count(), 0);
    }
}
