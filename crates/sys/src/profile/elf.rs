//! The functions in the file of a program or library.
//!
//! They come from `.symtab`. For a stripped file, they come from the distribution's debug file with
//! the same build id if it is installed, otherwise from the exported functions (`.dynsym`) and the
//! table that Go's runtime needs of every function (`.gopclntab`).
//!
//! The file belongs to the user of the program and is not trusted. It is read, never mapped
//! (truncating a mapped file would kill the reader); sizes are bounded, those of all files together
//! by a [`Budget`], and malformed parts are skipped.

use std::cell::Cell;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym};
use object::read::{ReadCache, ReadCacheRange, ReadRef};
use object::{Endianness, FileKind};

use super::symbols::Table;

/// Maximum number of bytes of a file, and of one section, that are read.
const FILE_MAX: u64 = 2 << 30;
const SECTION_MAX: u64 = 256 << 20;
/// Maximum number of section headers, and of program headers, of a file. Linked files have some
/// tens.
const HEADERS_MAX: u32 = 4096;
/// Maximum length in bytes of a name; the rest of a longer one is cut off.
const NAME_MAX: usize = 4096;
/// Assumed maximum length in bytes of a label in assembler code without a size.
const REACH: u64 = 64 << 10;
/// Directory in which distributions install the symbols of stripped files, by build id.
const DEBUG: &str = "/usr/lib/debug/.build-id";
/// Sections with Go's table.
const GO: [&[u8]; 2] = [b".gopclntab", b".data.rel.ro.gopclntab"];

type Cached<'a> = ReadCacheRange<'a, File>;

/// Bytes that may still be read from files and kept of them. A program can have thousands of files,
/// which need no space on a disk.
#[derive(Debug)]
pub(super) struct Budget(Cell<u64>);

impl Budget {
    /// The budget of one profile.
    pub(super) fn new() -> Self {
        Budget(Cell::new(512 << 20))
    }

    /// Takes bytes from the budget; `None` if it has fewer, and then it is spent.
    fn take(&self, bytes: u64) -> Option<()> {
        let left = self.0.get().checked_sub(bytes);
        self.0.set(left.unwrap_or(0));
        left.map(drop)
    }
}

/// The functions of a file.
#[derive(Debug)]
pub(super) struct Elf {
    segments: Vec<Segment>,
    table: Table,
}

#[derive(Debug, PartialEq, Eq)]
struct Segment {
    offset: u64,
    size: u64,
    address: u64,
}

impl Elf {
    /// Reads the functions of the first of these files that can be opened. Returns `None` if it is
    /// not an ELF file or has no functions, or if the budget is spent.
    pub(super) fn read<P: AsRef<Path>>(paths: &[P], budget: &Budget) -> Option<Self> {
        let file = paths.iter().find_map(|path| open(path.as_ref()))?;
        let found = scan(file, budget)?;
        let mut table = found.symbols;
        if table.is_empty() {
            let debug = found.debug.and_then(|path| open(&path));
            let debug = debug.and_then(|file| scan(file, budget));
            table = match debug {
                Some(debug) if !debug.symbols.is_empty() => debug.symbols,
                _ => found.others,
            };
        }
        budget.take(table.bytes() as u64)?;
        table.sort();
        Some(Elf {
            segments: found.segments,
            table,
        })
    }

    /// Returns the name of the function at an offset in the file.
    pub(super) fn find(&self, offset: u64) -> Option<&[u8]> {
        let segment = self
            .segments
            .iter()
            .find(|segment| offset.wrapping_sub(segment.offset) < segment.size)?;
        let address = (offset - segment.offset).checked_add(segment.address)?;
        self.table.find(address)
    }
}

/// Opens a regular file. A pipe or device with that name could block or have effects.
fn open(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).custom_flags(libc::O_NONBLOCK);
    let regular = |path: &Path| path.metadata().is_ok_and(|data| data.is_file());
    let file = regular(path).then(|| options.open(path).ok())??;
    file.metadata().ok()?.is_file().then_some(file)
}

struct Found {
    segments: Vec<Segment>,
    /// The functions of `.symtab`.
    symbols: Table,
    /// The functions of other tables, if `.symtab` is missing.
    others: Table,
    /// The debug file, which may have a `.symtab`.
    debug: Option<PathBuf>,
}

fn scan(file: File, budget: &Budget) -> Option<Found> {
    let length = file.metadata().ok()?.len().min(FILE_MAX);
    let cache = ReadCache::new(file);
    let data = cache.range(0, length);
    match FileKind::parse(data).ok()? {
        FileKind::Elf64 => scan_class::<elf::FileHeader64<Endianness>>(data, budget),
        FileKind::Elf32 => scan_class::<elf::FileHeader32<Endianness>>(data, budget),
        _ => None,
    }
}

fn scan_class<E: FileHeader<Endian = Endianness>>(
    data: Cached<'_>,
    budget: &Budget,
) -> Option<Found> {
    let header = E::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let (sections, segments) = (header.shnum(endian, data), header.phnum(endian, data));
    if sections.ok()?.max(segments.ok()?) > HEADERS_MAX {
        return None;
    }
    let segments = header.program_headers(endian, data).ok()?.iter();
    let loaded = segments.filter(|segment| segment.p_type(endian) == elf::PT_LOAD);
    let segments = loaded.map(|segment| Segment {
        offset: segment.p_offset(endian).into(),
        size: segment.p_filesz(endian).into(),
        address: segment.p_vaddr(endian).into(),
    });
    let sections = header.sections(endian, data).ok()?;
    let file = Sections {
        sections,
        endian,
        data,
        budget,
    };
    let symbols = file.symbols(elf::SHT_SYMTAB);
    let mut others = Table::new(REACH);
    if symbols.is_empty() {
        others = file.symbols(elf::SHT_DYNSYM);
        file.go(&mut others);
    }
    Some(Found {
        segments: segments.collect(),
        debug: symbols.is_empty().then(|| file.debug()).flatten(),
        symbols,
        others,
    })
}

struct Sections<'a, E: FileHeader> {
    sections: SectionTable<'a, E, Cached<'a>>,
    endian: E::Endian,
    data: Cached<'a>,
    budget: &'a Budget,
}

impl<'a, E: FileHeader<Endian = Endianness>> Sections<'a, E> {
    fn bytes(&self, section: &E::SectionHeader) -> Option<&'a [u8]> {
        let size: u64 = section.sh_size(self.endian).into();
        if size > SECTION_MAX || section.sh_type(self.endian) == elf::SHT_NOBITS {
            return None;
        }
        self.budget.take(size)?;
        let offset: u64 = section.sh_offset(self.endian).into();
        self.data.read_bytes_at(offset, size).ok()
    }

    fn named(&self, name: &[u8]) -> Option<&'a E::SectionHeader> {
        let section = self.sections.section_by_name(self.endian, name);
        section.map(|(_, section)| section)
    }

    /// Returns the functions of a symbol table; none if it does not exist.
    fn symbols(&self, kind: elf::SectionType) -> Table {
        let mut table = Table::new(REACH);
        let mut of_kind = self.sections.iter();
        if let Some(section) = of_kind.find(|section| section.sh_type(self.endian) == kind) {
            _ = self.collect(section, &mut table);
        }
        table
    }

    fn collect(&self, section: &E::SectionHeader, table: &mut Table) -> Option<()> {
        let symbols = self.bytes(section)?;
        let (symbols, _) =
            object::pod::slice_from_bytes::<E::Sym>(symbols, symbols.len() / size_of::<E::Sym>())
                .ok()?;
        let strings = object::SectionIndex(section.sh_link(self.endian) as usize);
        let strings = self.bytes(self.sections.section(strings).ok()?)?;
        for symbol in symbols {
            if self.is_function(symbol) {
                let name = text(strings, symbol.st_name(self.endian) as usize);
                let start = symbol.st_value(self.endian).into();
                if !table.push(start, symbol.st_size(self.endian).into(), name?) {
                    break;
                }
            }
        }
        Some(())
    }

    /// Whether a symbol is a function: typed ones, and labels in code without a type, as in
    /// assembler code. The address of an indirect function is not the function's.
    fn is_function(&self, symbol: &E::Sym) -> bool {
        let section = symbol.st_shndx(self.endian);
        if section == elf::SHN_UNDEF {
            return false;
        }
        let index = || object::SectionIndex(usize::from(section.0));
        let code = || {
            let section = self.sections.section(index()).ok();
            section.is_some_and(|section| {
                let flags: u64 = section.sh_flags(self.endian).0;
                flags & elf::SHF_EXECINSTR.0 != 0
            })
        };
        match symbol.st_type() {
            elf::STT_FUNC => true,
            elf::STT_NOTYPE => code(),
            _ => false,
        }
    }

    /// Returns the path of the debug file of a stripped file.
    fn debug(&self) -> Option<PathBuf> {
        let note = self.bytes(self.named(b".note.gnu.build-id")?)?;
        // Three words of header, and the name "GNU\0".
        let id = note.get(16..).filter(|id| (2..=64).contains(&id.len()))?;
        let hex: Vec<String> = id.iter().map(|byte| format!("{byte:02x}")).collect();
        Some(
            Path::new(DEBUG)
                .join(&hex[0])
                .join(hex[1..].concat() + ".debug"),
        )
    }

    /// Adds the functions in Go's table.
    fn go(&self, table: &mut Table) -> Option<()> {
        let section = GO.iter().find_map(|name| self.named(name))?;
        let text = self.named(b".text")?;
        let text = (
            text.sh_addr(self.endian).into(),
            text.sh_size(self.endian).into(),
        );
        let little = self.endian == Endianness::Little;
        super::go::functions(self.bytes(section)?, text, little, table)
    }
}

/// Returns the text from an offset to the next zero byte, at most [`NAME_MAX`] bytes: a million
/// symbols may share one long name.
pub(super) fn text(bytes: &[u8], offset: usize) -> Option<&[u8]> {
    let text = bytes.get(offset..)?;
    let text = &text[..text.len().min(NAME_MAX)];
    text.split(|byte| *byte == 0).next()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Size in bytes of the file header, and of a section header, of 64 bits.
    const HEADER: usize = 64;

    /// Writes an ELF file with these sections: type, offset of the contents in `body`, size, link.
    fn file(sections: &[(u32, usize, usize, u32)], body: &[u8]) -> tempfile::NamedTempFile {
        let at = HEADER * (1 + sections.len());
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(HEADER, 0);
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        // e_shoff, e_shentsize, e_shnum, e_shstrndx.
        set(40, &(HEADER as u64).to_le_bytes());
        set(58, &(HEADER as u16).to_le_bytes());
        set(60, &(sections.len() as u16).to_le_bytes());
        set(62, &1u16.to_le_bytes());
        for (kind, offset, size, link) in sections {
            let mut header = [0; HEADER];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&((at + offset) as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(*size as u64).to_le_bytes());
            header[40..44].copy_from_slice(&link.to_le_bytes());
            bytes.extend(header);
        }
        bytes.extend(body);
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(&bytes).expect("written");
        file
    }

    /// A file whose functions share one name.
    fn with_one_name(functions: u64, name: usize) -> tempfile::NamedTempFile {
        const SYMBOL: usize = 24;
        let mut body = Vec::new();
        for function in 0..functions {
            body.extend(1u32.to_le_bytes());
            // STT_FUNC, in section 1.
            body.extend([2, 0, 1, 0]);
            body.extend(function.to_le_bytes());
            body.extend(1u64.to_le_bytes());
        }
        let symbols = body.len();
        assert_eq!(symbols, SYMBOL * functions as usize);
        body.push(0);
        body.resize(symbols + 1 + name, b'x');
        body.push(0);
        let (strings, size) = ((elf::SHT_STRTAB.0, symbols), body.len() - symbols);
        let sections = [
            (0, 0, 0, 0),
            (strings.0, strings.1, size, 0),
            (elf::SHT_SYMTAB.0, 0, symbols, 1),
        ];
        file(&sections, &body)
    }

    #[test]
    fn functions_that_share_a_long_name_cost_little() {
        let file = with_one_name(4096, 1 << 20);
        assert!(file.path().metadata().expect("a file").len() < 1200 << 10);
        let found = Elf::read(&[file.path()], &Budget::new()).expect("functions");
        assert_eq!(found.table.find(4095).map(<[u8]>::len), Some(NAME_MAX));
        assert!(found.table.bytes() < 20 << 20, "{}", found.table.bytes());
    }

    #[test]
    fn the_names_of_a_file_have_a_limit() {
        let file = with_one_name(40_000, NAME_MAX);
        let found = Elf::read(&[file.path()], &Budget::new()).expect("functions");
        assert_eq!(found.table.find(16_000).map(<[u8]>::len), Some(NAME_MAX));
        assert_eq!(found.table.find(39_999), None);
        assert!(found.table.bytes() < 66 << 20, "{}", found.table.bytes());
    }

    #[test]
    fn files_of_one_profile_share_a_budget() {
        // 16.6 MB each.
        let file = with_one_name(4000, NAME_MAX);
        let budget = Budget(Cell::new(60 << 20));
        let read = (0..10).filter_map(|_| Elf::read(&[file.path()], &budget));
        assert_eq!(read.filter(|elf| !elf.table.is_empty()).count(), 3);
        assert_eq!(budget.0.get(), 0);
    }

    #[test]
    fn a_file_with_many_headers_is_not_read() {
        let one = [(elf::SHT_STRTAB.0, 0, 1, 0)];
        for (sections, is_read) in [(HEADERS_MAX, true), (HEADERS_MAX + 1, false)] {
            let file = file(&one.repeat(sections as usize), &[0]);
            let found = Elf::read(&[file.path()], &Budget::new());
            assert_eq!(found.is_some(), is_read, "{sections}");
        }
    }
}
