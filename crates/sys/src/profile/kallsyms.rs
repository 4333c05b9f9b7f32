//! The functions of the kernel, from `/proc/kallsyms`: address, kind, name, and after a tab the
//! module.

use std::fs::File;
use std::io::{self, BufRead, BufReader};

use super::symbols::Table;

const PATH: &str = "/proc/kallsyms";
/// Maximum assumed length of a function. The kernel's largest functions have a few ten KiB, and the
/// gaps between its parts are MiB long.
const REACH: u64 = 256 << 10;

/// The kernel's functions.
#[derive(Debug)]
pub(super) struct Kernel {
    table: Table,
}

impl Kernel {
    /// Reads the functions. The error is for people.
    pub(super) fn read() -> Result<Self, String> {
        let file = File::open(PATH).map_err(|error| format!("cannot read {PATH}: {error}"))?;
        Self::parse(BufReader::new(file)).map_err(|error| format!("cannot read {PATH}: {error}"))
    }

    fn parse(mut lines: impl BufRead) -> io::Result<Self> {
        let mut table = Table::new(REACH);
        let mut line = Vec::new();
        let mut hidden = false;
        while lines.read_until(b'\n', &mut line)? > 0 {
            if let Some((address, name)) = parse_line(&line) {
                hidden |= address == 0;
                if address != 0 {
                    table.push(address, 0, name);
                }
            }
            line.clear();
        }
        if table.is_empty() {
            return Err(io::Error::other(if hidden {
                "addresses are hidden; run as root, or set the sysctl kernel.kptr_restrict to 0"
            } else {
                "it has no functions"
            }));
        }
        table.sort();
        Ok(Kernel { table })
    }

    /// Returns the name of the function at an address, and of the kernel module that it belongs to.
    pub(super) fn find(&self, address: u64) -> Option<(&[u8], &[u8])> {
        let name = self.table.find(address)?;
        // Name and module are stored together, with the tab between them.
        let mut parts = name.splitn(2, |byte| *byte == b'\t');
        let function = parts.next()?;
        let module = parts.next().unwrap_or(b"[kernel]");
        let module = module.strip_prefix(b"[").unwrap_or(module);
        Some((function, module.strip_suffix(b"]").unwrap_or(module)))
    }
}

/// Parses the address, and the name with the module, of a function.
fn parse_line(line: &[u8]) -> Option<(u64, &[u8])> {
    let mut fields = line.trim_ascii_end().splitn(3, |byte| *byte == b' ');
    let address = str::from_utf8(fields.next()?).ok()?;
    let address = u64::from_str_radix(address, 16).ok()?;
    let kind = fields.next()?;
    let name = fields.next()?;
    // Padding before functions is never executed.
    let code = matches!(kind, b"t" | b"T" | b"w" | b"W") && !name.starts_with(b"__pfx_");
    code.then_some((address, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"ffffffff81000000 T _text\n\
        ffffffff81a3b4b0 t __pfx_tcp_ack\n\
        ffffffff81a3b4c0 t tcp_ack\n\
        ffffffff82400000 D jiffies\n\
        ffffffffc0350000 t wg_xmit\t[wireguard]\n";

    #[test]
    fn functions_and_their_modules_are_found() {
        let kernel = Kernel::parse(TEXT).unwrap();
        let find = |address| kernel.find(address);
        assert_eq!(
            find(0xffff_ffff_81a3_b4c8),
            Some((&b"tcp_ack"[..], &b"kernel"[..]))
        );
        assert_eq!(
            find(0xffff_ffff_c035_0010),
            Some((&b"wg_xmit"[..], &b"wireguard"[..]))
        );
        assert_eq!(find(0xffff_ffff_8240_0000), None);
        assert_eq!(find(0x1000), None);
    }

    #[test]
    fn hidden_addresses_are_an_error() {
        let text = &b"0000000000000000 T _text\n0000000000000000 t tcp_ack\n"[..];
        let error = Kernel::parse(text).unwrap_err();
        assert!(error.to_string().contains("kptr_restrict"), "{error}");
    }

    #[test]
    fn lines_that_make_no_sense_are_passed_over() {
        for length in 0..TEXT.len() {
            _ = Kernel::parse(&TEXT[..length]);
        }
        assert!(Kernel::parse(&b"\xff\xff\nzz T x\n\n \n12\n12 T\n"[..]).is_err());
    }
}
