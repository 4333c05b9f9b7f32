//! State of a dialogue, and bytes on their way to a client. They may contain keys, so every copy is wiped.

use std::fmt;
use std::io;
use zeroize::Zeroizing;

/// Size in bytes from which on no further piece of a reply is produced.
pub const PIECE: usize = 64 * 1024;

/// State of a dialogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Between requests.
    Idle,
    /// Part of a request was read.
    Asking,
    /// Part of a reply was produced.
    Replying,
    /// The reply is not known yet; it is polled.
    Waiting,
    /// The dialogue is over: the client is closed once its output is sent.
    Over,
}

/// Output that was not sent yet.
#[derive(Default)]
pub struct Output {
    bytes: Zeroizing<Vec<u8>>,
    sent: usize,
}

impl Output {
    /// Returns the bytes to send next.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Whether everything was sent.
    pub fn is_empty(&self) -> bool {
        self.unsent().is_empty()
    }

    /// Whether no further piece should be produced now.
    pub fn is_full(&self) -> bool {
        self.unsent().len() >= PIECE
    }

    /// Notes that the first `count` unsent bytes are sent.
    pub fn advance(&mut self, count: usize) {
        self.sent = (self.sent + count).min(self.bytes.len());
        if self.is_empty() {
            self.bytes.clear();
            self.sent = 0;
        }
    }

    /// Appends bytes. Unlike a plain `Vec`, it wipes the old allocation when it grows.
    pub fn push(&mut self, more: &[u8]) {
        let needed = self.bytes.len() + more.len();
        if needed > self.bytes.capacity() {
            let capacity = needed.max(2 * self.bytes.capacity()).max(4096);
            let mut grown = Zeroizing::new(Vec::with_capacity(capacity));
            grown.extend_from_slice(&self.bytes);
            self.bytes = grown;
        }
        self.bytes.extend_from_slice(more);
    }
}

impl fmt::Write for Output {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Output({} bytes)", self.unsent().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_keeps_its_order() {
        let mut output = Output::default();
        let mut out = Vec::new();
        for i in 0..20_000u32 {
            output.push(&i.to_le_bytes());
            if i % 3 == 0 {
                let part = output.unsent().len().min(5);
                out.extend_from_slice(&output.unsent()[..part]);
                output.advance(part);
            }
        }
        out.extend_from_slice(output.unsent());
        let expected: Vec<u8> = (0..20_000u32).flat_map(u32::to_le_bytes).collect();
        assert!(out == expected);
    }
}
