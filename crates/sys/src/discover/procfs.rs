//! Bounded reading of `/proc`: a process cannot make a read long by its name or the number of its
//! descriptors, nor print control characters on a terminal.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Maximum number of bytes read from a file.
const FILE_MAX: u64 = 1 << 20;
/// Maximum number of descriptors or threads of a process that are read.
const ENTRIES_MAX: usize = 1 << 16;
/// Maximum length of a name in characters.
const NAME_MAX: usize = 32;

/// Reads the beginning of a file. Bytes that are not UTF-8 become replacement characters.
pub(super) fn read(path: impl AsRef<Path>) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the entries of a directory that are numbers.
pub(super) fn numbers(path: impl AsRef<Path>) -> io::Result<Vec<u32>> {
    let entries = fs::read_dir(path)?.flatten().take(ENTRIES_MAX);
    Ok(entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

/// Returns all processes.
pub(super) fn pids() -> Vec<u32> {
    let mut pids = numbers("/proc").unwrap_or_default();
    pids.sort_unstable();
    pids
}

/// Returns the descriptors of a process with their targets: `/dev/net/tun`, `socket:[1234]`.
pub(super) fn descriptors(pid: u32) -> io::Result<Vec<(u32, String)>> {
    let folder = format!("/proc/{pid}/fd");
    let open = numbers(&folder)?;
    let target = |fd: &u32| fs::read_link(format!("{folder}/{fd}")).ok();
    Ok(open
        .iter()
        .filter_map(|fd| Some((*fd, target(fd)?.to_string_lossy().into_owned())))
        .collect())
}

/// Returns the inode of a socket from the target of its descriptor.
pub(super) fn socket_inode(target: &str) -> Option<u64> {
    target
        .strip_prefix("socket:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

/// Returns the network namespace of a process (`PID`) or of the calling thread (`thread-self`).
pub(super) fn namespace(process: impl std::fmt::Display) -> Option<u64> {
    Some(fs::metadata(format!("/proc/{process}/ns/net")).ok()?.ino())
}

/// Returns the name of a process.
pub(super) fn name(pid: u32) -> String {
    clean(&read(format!("/proc/{pid}/comm")).unwrap_or_default())
}

/// Limits the length of a name and removes control characters, so that it is safe for a terminal.
pub(super) fn clean(name: &str) -> String {
    let name = name.strip_suffix('\n').unwrap_or(name).chars();
    let fit = |c: char| if c.is_control() { '?' } else { c };
    name.take(NAME_MAX).map(fit).collect()
}

/// Returns the value of a line `Key:\tvalue` (`status`, `fdinfo`).
pub(super) fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = text.lines();
    lines.find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_be_long_or_speak_to_the_terminal() {
        assert_eq!(clean("openvpn\n"), "openvpn");
        assert_eq!(clean("\u{1b}[2Jx\ny\n"), "?[2Jx?y");
        assert_eq!(clean(&"x".repeat(1000)).len(), NAME_MAX);
    }

    #[test]
    fn the_inode_of_a_socket_is_between_brackets() {
        assert_eq!(socket_inode("socket:[4711]"), Some(4711));
        for other in ["pipe:[4711]", "socket:[", "socket:[x]", "/dev/net/tun", ""] {
            assert_eq!(socket_inode(other), None);
        }
    }

    #[test]
    fn a_value_is_found_by_its_whole_key() {
        let text = "Cpus_allowed:\t3\nCpus_allowed_list:\t0-1\n";
        assert_eq!(value(text, "Cpus_allowed_list"), Some("0-1"));
        assert_eq!(value(text, "Cpus"), None);
    }
}
