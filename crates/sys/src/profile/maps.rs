//! The executable mappings of a process, from `/proc/PID/maps`.

/// An executable mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Its offset in the file, in bytes.
    pub offset: u64,
    /// Device of the file; 0 if there is no file.
    pub device: String,
    /// Inode of the file; 0 if there is no file.
    pub inode: u64,
    /// Path of the file in the mount namespace of the process, or `[vdso]` and the like; empty for
    /// anonymous memory.
    pub path: String,
}

impl Mapping {
    /// Returns the last part of its path.
    pub(super) fn name(&self) -> &str {
        let path = self.path.strip_suffix(" (deleted)").unwrap_or(&self.path);
        path.rsplit('/').next().unwrap_or(path)
    }
}

/// Parses the executable mappings, sorted by address.
pub(super) fn parse(text: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = text.lines().filter_map(parse_line).collect();
    mappings.sort_by_key(|mapping| mapping.start);
    mappings
}

/// Returns the mapping at an address.
pub(super) fn find(mappings: &[Mapping], address: u64) -> Option<&Mapping> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    let mapping = mappings[..after].last()?;
    (address < mapping.end).then_some(mapping)
}

fn parse_line(line: &str) -> Option<Mapping> {
    let mut rest = line;
    let mut field = || {
        let (field, after) = rest.split_once(' ').unwrap_or((rest, ""));
        rest = after;
        field
    };
    let (start, end) = field().split_once('-')?;
    let rights = field();
    let offset = field();
    let device = field().to_owned();
    let inode = field().parse().ok()?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let mapping = Mapping {
        start: number(start)?,
        end: number(end)?,
        offset: number(offset)?,
        device,
        inode,
        path: rest.trim_start().to_owned(),
    };
    rights.contains('x').then_some(mapping)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
5581c0000000-5581c0010000 r--p 00000000 fe:00 1234                       /usr/bin/a b\n\
5581c0010000-5581c0090000 r-xp 00010000 fe:00 1234                       /usr/bin/a b\n\
7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n\
7f1200000000-7f1200100000 r-xp 00022000 fe:00 99                         /lib/x.so (deleted)\n\
7fff00000000-7fff00002000 r-xp 00000000 00:00 0                          [vdso]\n";

    #[test]
    fn code_is_found_by_its_address() {
        let mappings = parse(TEXT);
        assert_eq!(mappings.len(), 4);
        let name = |address| find(&mappings, address).map(Mapping::name);
        assert_eq!(name(0x5581_c001_0000), Some("a b"));
        assert_eq!(name(0x5581_c000_ffff), None);
        assert_eq!(name(0x5581_c009_0000), None);
        assert_eq!(name(0x7f12_0000_1000), Some("x.so"));
        assert_eq!(name(0x7f00_0000_0000), Some(""));
        assert_eq!(name(0x7fff_0000_0000), Some("[vdso]"));
        assert_eq!(mappings[0].offset, 0x10000);
        assert_eq!(mappings[0].inode, 1234);
    }

    #[test]
    fn lines_that_make_no_sense_are_passed_over() {
        for length in 0..TEXT.len() {
            _ = parse(&TEXT[..length]);
        }
        assert_eq!(
            parse("x-y r-xp 0 0 0 /a\n1-2 r-xp\n\n-\n1 r-xp 0 0 0\n"),
            []
        );
    }
}
