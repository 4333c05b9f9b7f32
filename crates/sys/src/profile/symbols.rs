//! Tables of functions by address, and readable names.

use std::fmt::Write;

/// Maximum number of functions kept of one file; Chromium has a million.
const ENTRIES_MAX: usize = 4_000_000;
/// Maximum number of bytes of all names of one file.
const NAMES_MAX: usize = 64 << 20;
/// Number of entries before an address that are searched for a function that includes it.
const NESTED_MAX: usize = 16;
/// Maximum length of a name in characters: those of generic code have thousands.
const NAME_MAX: usize = 160;
/// Suffixes that compilers append to a function that they have split or specialised.
const VARIANTS: [&str; 5] = [".isra.", ".constprop.", ".part.", ".cold", ".llvm."];

/// Functions of the kernel or of a file, by address.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
    names: Vec<u8>,
    /// Maximum length of a function without a size.
    reach: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u64,
    /// 0: up to the next function.
    size: u64,
    name: u32,
    length: u32,
}

impl Table {
    /// Creates a table. A function of unknown size ends at the next one, but has at most `reach`
    /// bytes.
    pub(super) fn new(reach: u64) -> Self {
        Table {
            reach,
            ..Table::default()
        }
    }

    /// Adds a function, unless its name is empty; size 0 means unknown. Returns false if the table
    /// is full.
    pub(super) fn push(&mut self, start: u64, size: u64, name: &[u8]) -> bool {
        let at = u32::try_from(self.names.len());
        let (Ok(at), Ok(length)) = (at, u32::try_from(name.len())) else {
            return false;
        };
        if name.is_empty() {
            return true;
        }
        if self.entries.len() >= ENTRIES_MAX || self.names.len() + name.len() > NAMES_MAX {
            return false;
        }
        self.names.extend_from_slice(name);
        self.entries.push(Entry {
            start,
            size,
            name: at,
            length,
        });
        true
    }

    /// Returns the number of bytes that the table needs.
    pub(super) fn bytes(&self) -> usize {
        self.names.len() + size_of_val(self.entries.as_slice())
    }

    /// Sorts the table; call it after the last [`Table::push`]. Of several functions at one
    /// address, one with a size is found.
    pub(super) fn sort(&mut self) {
        self.entries.sort_by_key(|entry| (entry.start, entry.size));
    }

    /// Whether the table has no functions.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the name of the function at an address.
    pub(super) fn find(&self, address: u64) -> Option<&[u8]> {
        let after = self.entries.partition_point(|entry| entry.start <= address);
        let before = self.entries[..after].iter().rev().take(NESTED_MAX);
        let entry = before.enumerate().find_map(|(distance, entry)| {
            let size = match (entry.size, distance) {
                (0, 0) => self.reach,
                (size, _) => size,
            };
            (address - entry.start < size).then_some(entry)
        })?;
        let name = entry.name as usize;
        self.names.get(name..name + entry.length as usize)
    }
}

/// Returns the name of a function as in its source: demangled, and without suffixes of the
/// compiler.
pub(super) fn readable(raw: &[u8]) -> String {
    let raw = String::from_utf8_lossy(raw);
    let mut name = String::new();
    match rustc_demangle::try_demangle(&raw) {
        // The alternate form omits the hash.
        Ok(demangled) => _ = write!(name, "{demangled:#}"),
        Err(_) => {
            let cut = VARIANTS.iter().filter_map(|variant| raw.find(variant));
            let end = cut.filter(|at| *at > 0).min().unwrap_or(raw.len());
            name.push_str(&raw[..end]);
        }
    }
    if let Some((end, _)) = name.char_indices().nth(NAME_MAX) {
        name.truncate(end);
        name.push('…');
    }
    name.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(0x100);
        table.push(0x3000, 0, b"label");
        table.push(0x1000, 0x100, b"outer");
        table.push(0x1020, 0x10, b"inner");
        table.push(0x2000, 0, b"alias");
        table.push(0x2000, 0x20, b"sized");
        table.sort();
        table
    }

    #[test]
    fn an_address_belongs_to_the_innermost_function_that_reaches_over_it() {
        let table = table();
        let name = |address| {
            table
                .find(address)
                .map(|name| str::from_utf8(name).unwrap())
        };
        assert_eq!(name(0x1010), Some("outer"));
        assert_eq!(name(0x1025), Some("inner"));
        assert_eq!(name(0x1035), Some("outer"));
        assert_eq!(name(0x2000), Some("sized"));
    }

    #[test]
    fn an_address_between_functions_belongs_to_none() {
        let table = table();
        assert_eq!(table.find(0xfff), None);
        assert_eq!(table.find(0x1100), None);
        assert_eq!(table.find(0x2020), None);
        assert_eq!(table.find(0x3100), None);
        assert_eq!(table.find(u64::MAX), None);
    }

    #[test]
    fn one_without_a_size_reaches_to_the_next_but_not_far() {
        assert_eq!(table().find(0x30ff), Some(&b"label"[..]));
    }

    #[test]
    fn changes_by_compilers_to_names_are_undone() {
        assert_eq!(readable(b"tcp_ack.isra.0"), "tcp_ack");
        assert_eq!(readable(b"tun_do_read.constprop.0.cold"), "tun_do_read");
        assert_eq!(
            readable(b"_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE"),
            "core::fmt::Write::write_fmt"
        );
        assert_eq!(readable(b"crypto/aes.gcmAesEnc"), "crypto/aes.gcmAesEnc");
        assert_eq!(readable(b".cold"), ".cold");
    }

    #[test]
    fn names_cannot_harm_a_terminal() {
        assert_eq!(readable(b"a\x1b[31m\xff"), "a?[31m\u{fffd}");
        let long = "x".repeat(5_000);
        assert_eq!(readable(long.as_bytes()).chars().count(), NAME_MAX + 1);
    }
}
