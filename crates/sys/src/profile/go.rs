//! The functions of a Go program, from the table that its runtime needs for stack traces, which
//! stripping does not remove (`src/runtime/symtab.go` and `src/internal/abi/symtab.go` of Go, from
//! 1.18 on).

use super::elf::text;
use super::symbols::Table;

/// Go 1.18 and 1.19; 1.20 and later.
const MAGIC: [u64; 2] = [0xffff_fff0, 0xffff_fff1];
/// Bytes of the header before its words.
const PREFIX: usize = 8;
/// Maximum number of functions of one program.
const FUNCTIONS_MAX: u64 = 4_000_000;

/// Adds the functions. `code` is address and size of the section `.text`. Returns `None` if the
/// table is malformed.
pub(super) fn functions(
    bytes: &[u8],
    code: (u64, u64),
    little: bool,
    table: &mut Table,
) -> Option<()> {
    let number = |at: usize, length: usize| -> Option<u64> {
        let bytes = bytes.get(at..at.checked_add(length)?)?;
        let join = |all: u64, byte: &u8| all << 8 | u64::from(*byte);
        Some(if little {
            bytes.iter().rev().fold(0, join)
        } else {
            bytes.iter().fold(0, join)
        })
    };
    let half = |at: usize| number(at, 4);
    if !MAGIC.contains(&half(0)?) {
        return None;
    }
    let width = number(7, 1)? as usize;
    if width != 4 && width != 8 {
        return None;
    }
    let word = |index: usize| number(PREFIX + index * width, width);
    let count = word(0)?.min(FUNCTIONS_MAX) as usize;
    // The loader fills in the start of a position-independent program.
    let start = match word(2)? {
        0 => code.0,
        start => start,
    };
    let names = bytes.get(usize::try_from(word(3)?).ok()?..)?;
    let index = usize::try_from(word(7)?).ok()?;
    let entry = |function: usize| half(index.checked_add(function * 8)?);
    for function in 0..count {
        let at = entry(function)?;
        let size = entry(function + 1)?.saturating_sub(at);
        let details = half(index.checked_add(function * 8 + 4)?)? as usize;
        let name = half(index.checked_add(details)?.checked_add(4)?)? as usize;
        if !table.push(start.checked_add(at)?, size, text(names, name)?) {
            break;
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of two functions: at 0x10 with 0x30 bytes, and at 0x40 with 0x20.
    fn sample(start: u64) -> Vec<u8> {
        let names = b"\0main.main\0crypto/aes.gcmAesEnc\0";
        let names_at = PREFIX + 8 * 8;
        let index = names_at + names.len();
        let mut bytes = 0xffff_fff1u32.to_le_bytes().to_vec();
        bytes.extend([0, 0, 1, 8]);
        for word in [2, 0, start, names_at as u64, 0, 0, 0, index as u64] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(names);
        for half in [0x10u32, 20, 0x40, 28, 0x60, 0x10, 1, 0x40, 11] {
            bytes.extend(half.to_le_bytes());
        }
        bytes
    }

    fn find(bytes: &[u8], address: u64) -> Option<String> {
        let mut table = Table::new(0);
        functions(bytes, (0x40_1000, 0x1000), true, &mut table)?;
        table.sort();
        let name = table.find(address)?;
        Some(String::from_utf8_lossy(name).into_owned())
    }

    #[test]
    fn functions_are_found_in_the_runtimes_table() {
        let bytes = sample(0x50_0000);
        assert_eq!(find(&bytes, 0x50_003f).as_deref(), Some("main.main"));
        let second = find(&bytes, 0x50_0040);
        assert_eq!(second.as_deref(), Some("crypto/aes.gcmAesEnc"));
        assert_eq!(find(&bytes, 0x50_0060), None);
    }

    #[test]
    fn a_start_left_to_the_loader_is_that_of_the_code() {
        let first = find(&sample(0), 0x40_1010);
        assert_eq!(first.as_deref(), Some("main.main"));
    }

    #[test]
    fn tables_that_make_no_sense_are_passed_over() {
        let whole = sample(0x50_0000);
        for length in 0..whole.len() {
            find(&whole[..length], 0x50_0010);
        }
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] = 0xff;
            find(&bytes, 0x50_0010);
        }
        assert_eq!(find(&[0xff; 200], 0), None);
    }
}
