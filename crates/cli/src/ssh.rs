//! The SSH session in which this process runs.

use std::fs;
use std::net::IpAddr;

/// Maximum number of ancestors of this process to search for an SSH session: shells, sudo, tmux and
/// others are in between.
const MAX_PARENTS: usize = 16;

/// Addresses of a session's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Address of the client.
    pub client: IpAddr,
    /// Address of this host, as its SSH server has it.
    pub server: IpAddr,
}

/// Returns the SSH session of this process. `sudo` removes the variable, so the ancestors of this
/// process are searched.
pub fn session() -> Option<Session> {
    let mut pid = std::process::id();
    for _ in 0..MAX_PARENTS {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok();
        if let Some(found) = environment.and_then(|environment| connection(&environment)) {
            return Some(found);
        }
        pid = parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    }
    None
}

/// Parses `SSH_CONNECTION`: `client port server port` (ssh(1), ENVIRONMENT).
fn connection(environment: &[u8]) -> Option<Session> {
    let mut variables = environment.split(|byte| *byte == 0);
    let value = variables.find_map(|variable| variable.strip_prefix(b"SSH_CONNECTION="))?;
    let mut words = std::str::from_utf8(value).ok()?.split(' ');
    // A link-local address is followed by a percent sign and its interface.
    let address = |word: &str| {
        Some(
            word.split('%')
                .next()?
                .parse::<IpAddr>()
                .ok()?
                .to_canonical(),
        )
    };
    Some(Session {
        client: address(words.next()?)?,
        server: address(words.nth(1)?)?,
    })
}

/// Returns the parent from `/proc/PID/stat`: the second field after the name, which may contain any character
/// (proc_pid_stat(5)).
fn parent(stat: &str) -> Option<u32> {
    let (_, rest) = stat.rsplit_once(") ")?;
    let parent = rest.split(' ').nth(1)?.parse().ok()?;
    (parent > 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_of_a_session_are_found() {
        let of = |environment: &[u8]| connection(environment).map(|it| [it.client, it.server]);
        let both = |client: &str, server: &str| {
            Some([client, server].map(|address| address.parse::<IpAddr>().expect("an address")))
        };
        let plain = b"A=1\0SSH_CONNECTION=2001:db8::7 50000 2001:db8::1 22\0B=2\0";
        assert_eq!(of(plain), both("2001:db8::7", "2001:db8::1"));
        let mapped = b"SSH_CONNECTION=::ffff:192.0.2.7 50000 ::ffff:192.0.2.1 22";
        assert_eq!(of(mapped), both("192.0.2.7", "192.0.2.1"));
        let local = b"SSH_CONNECTION=fe80::1%eth0 50000 fe80::2%eth0 22\0";
        assert_eq!(of(local), both("fe80::1", "fe80::2"));
        for wrong in [
            &b"SSH_CONNECTION=nonsense\0"[..],
            b"SSH_CONNECTION=::1 1",
            b"",
        ] {
            assert_eq!(of(wrong), None);
        }
    }

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent("77 (a) b) S 12 77 77 0"), Some(12));
        assert_eq!(parent("1 (init) S 0 1 1 0"), None);
        assert_eq!(parent("77"), None);
    }
}
