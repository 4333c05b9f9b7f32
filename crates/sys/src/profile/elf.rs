//! The functions in the file of a program or library.
//!
//! They come from `.symtab`. For a stripped file, they come from the distribution's debug file with
//! the same build id if it is installed, otherwise from the exported functions (`.dynsym`) and the
//! table that Go's runtime needs of every function (`.gopclntab`).
//!
//! The file belongs to the user of the program and is not trusted. It is read, never mapped
//! (truncating a mapped file would kill the reader); sizes are bounded, and malformed parts are
//! skipped.

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
/// Assumed maximum length in bytes of a label in assembler code without a size.
const REACH: u64 = 64 << 10;
/// Directory in which distributions install the symbols of stripped files, by build id.
const DEBUG: &str = "/usr/lib/debug/.build-id";
/// Sections with Go's table.
const GO: [&[u8]; 2] = [b".gopclntab", b".data.rel.ro.gopclntab"];

type Cached<'a> = ReadCacheRange<'a, File>;

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
    /// not an ELF file or has no functions.
    pub(super) fn read<P: AsRef<Path>>(paths: &[P]) -> Option<Self> {
        let file = paths.iter().find_map(|path| open(path.as_ref()))?;
        let found = scan(file)?;
        let mut table = found.symbols;
        if table.is_empty() {
            let debug = found.debug.and_then(|path| open(&path)).and_then(scan);
            table = match debug {
                Some(debug) if !debug.symbols.is_empty() => debug.symbols,
                _ => found.others,
            };
        }
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

fn scan(file: File) -> Option<Found> {
    let length = file.metadata().ok()?.len().min(FILE_MAX);
    let cache = ReadCache::new(file);
    let data = cache.range(0, length);
    match FileKind::parse(data).ok()? {
        FileKind::Elf64 => scan_class::<elf::FileHeader64<Endianness>>(data),
        FileKind::Elf32 => scan_class::<elf::FileHeader32<Endianness>>(data),
        _ => None,
    }
}

fn scan_class<E: FileHeader<Endian = Endianness>>(data: Cached<'_>) -> Option<Found> {
    let header = E::parse(data).ok()?;
    let endian = header.endian().ok()?;
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
}

impl<'a, E: FileHeader<Endian = Endianness>> Sections<'a, E> {
    fn bytes(&self, section: &E::SectionHeader) -> Option<&'a [u8]> {
        let size: u64 = section.sh_size(self.endian).into();
        if size > SECTION_MAX || section.sh_type(self.endian) == elf::SHT_NOBITS {
            return None;
        }
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
                table.push(start, symbol.st_size(self.endian).into(), name?);
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

/// Returns the text from an offset to the next zero byte.
pub(super) fn text(bytes: &[u8], offset: usize) -> Option<&[u8]> {
    let text = bytes.get(offset..)?;
    text.split(|byte| *byte == 0).next()
}
