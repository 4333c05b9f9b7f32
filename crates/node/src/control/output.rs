//! Bytes on their way to a client. They may hold keys, so every copy of them is wiped.

use std::fmt;
use std::io;
use zeroize::Zeroizing;

/// A piece of a reply: once this much waits to be sent, no more is made.
pub const PIECE: usize = 64 * 1024;

/// What is still to be sent.
#[derive(Default)]
pub struct Output {
    bytes: Zeroizing<Vec<u8>>,
    sent: usize,
}

impl Output {
    /// What is to be sent next.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Whether everything was sent.
    pub fn is_empty(&self) -> bool {
        self.unsent().is_empty()
    }

    /// Whether enough waits for now.
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

    /// Appends; what a larger allocation leaves behind is wiped, which a plain `Vec` would not do.
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
    fn what_is_pushed_comes_out_in_order_whatever_was_sent_between() {
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
