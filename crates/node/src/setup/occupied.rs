//! Finds the process that uses a UDP port or interface name, in procfs, for error messages.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the process that has a UDP port open, as "`named` (process 312)".
pub fn port_holder(port: u16) -> String {
    let tables = ["/proc/net/udp", "/proc/net/udp6"];
    let mut inodes = tables
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| inodes(&table, port));
    match inodes.next() {
        // A socket of the kernel has inode 0.
        None | Some(0) => "the kernel, perhaps for a WireGuard interface".to_owned(),
        Some(inode) => {
            let wanted = PathBuf::from(format!("socket:[{inode}]"));
            let holder = find(|descriptor| fs::read_link(descriptor).is_ok_and(|to| to == wanted));
            holder.unwrap_or_else(|| "a process that cannot be seen from here".to_owned())
        }
    }
}

/// Returns the process that has a TUN interface open, if any.
pub fn tun_holder(interface: &str) -> Option<String> {
    find(|descriptor| {
        // /proc/PID/fd/N -> /proc/PID/fdinfo/N
        let number = descriptor.file_name().unwrap_or_default();
        let process = descriptor.parent().and_then(Path::parent);
        let information = process.map(|p| p.join("fdinfo").join(number));
        is_tun(descriptor)
            && information
                .and_then(|path| fs::read_to_string(path).ok())
                .is_some_and(|text| names_interface(&text, interface))
    })
}

fn is_tun(descriptor: &Path) -> bool {
    fs::read_link(descriptor).is_ok_and(|to| to == Path::new("/dev/net/tun"))
}

/// The line `iff:` of a TUN descriptor (`tun_chr_show_fdinfo()`, drivers/net/tun.c).
fn names_interface(information: &str, interface: &str) -> bool {
    information
        .lines()
        .filter_map(|line| line.strip_prefix("iff:"))
        .any(|name| name.trim() == interface)
}

/// Inode numbers of the sockets on a local port (proc_net_udp(5): the second column is the local
/// address and port in hexadecimal, the tenth the inode).
fn inodes(table: &str, port: u16) -> Vec<u64> {
    let suffix = format!(":{port:04X}");
    let lines = table.lines().skip(1).map(|line| line.split_whitespace());
    let of_port = lines.filter_map(|mut fields| {
        let local = fields.nth(1)?;
        local
            .ends_with(&suffix)
            .then(|| fields.nth(7)?.parse().ok())?
    });
    of_port.collect()
}

/// The first process with a descriptor of that kind, with its name.
fn find(mut is_it: impl FnMut(&Path) -> bool) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    for process in processes {
        let name = process.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else {
            continue;
        };
        if descriptors.flatten().any(|entry| is_it(&entry.path())) {
            let program = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("`{}` (process {pid})", program.trim()));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_port_is_found() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("bind");
        let port = socket.local_addr().expect("address").port();
        let holder = port_holder(port);
        assert!(
            holder.ends_with(&format!("(process {})", std::process::id())),
            "{holder}"
        );
    }

    #[test]
    fn a_line_of_the_table_gives_the_inode() {
        // The example of proc_net_tcp.rst, as UDP has it.
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n\
            1234: 0100007F:CA6C 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0000000000000000 0\n";
        assert_eq!(inodes(table, 51820), [4711]);
        assert_eq!(inodes(table, 51821), [0u64; 0]);
    }

    #[test]
    fn the_interface_is_on_a_line_of_its_own() {
        let text = "pos:\t0\nflags:\t02004002\nmnt_id:\t26\niff:\twg0\n";
        assert!(names_interface(text, "wg0"));
        assert!(!names_interface(text, "wg"));
    }
}
