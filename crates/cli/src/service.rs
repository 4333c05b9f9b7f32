//! Functions shared by the services `coordinator` and `relay`: directory, user, confinement,
//! address.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use nix::unistd::{Uid, User};
use seikan_proto::mesh::Pin;
use seikan_sys::confine::{self, Needs};
use seikan_sys::owner::{self, OwnerError};
use seikan_sys::privilege::{self, Capability};

/// For a command that works in a service's directory: drops root's privileges if the directory is
/// the daemons', and refuses the directory of any other user. Root could otherwise be led by links
/// there to read, write or send files of its own.
pub fn enter(directory: &Path) -> anyhow::Result<()> {
    let identity = owner::identity_for(directory).map_err(|error| refusal(directory, error))?;
    if identity.is_some() {
        privilege::keep_only(&[], identity)?;
        check_access(directory)?;
    }
    Ok(())
}

/// Like [`enter`], for a directory that has to exist.
pub fn enter_existing(directory: &Path) -> anyhow::Result<()> {
    enter(directory)?;
    match directory.try_exists() {
        Ok(false) => bail!(
            "cannot find the directory {}: start the service once, which makes it, or name another with --dir",
            directory.display()
        ),
        _ => Ok(()),
    }
}

/// Prepares a service that root starts: creates the directory, gives it to the daemons' user, and
/// becomes that user. Drops all capabilities, except the one for `ports` below 1024, which is kept
/// until they are bound. The names of the service's files begin with one of `names`.
pub fn drop_privileges(directory: &Path, names: &[&str], ports: &[u16]) -> anyhow::Result<()> {
    let keep: &[Capability] = if ports.iter().any(|port| (1..1024).contains(port)) {
        &[Capability::CAP_NET_BIND_SERVICE]
    } else {
        &[]
    };
    let identity = match owner::give_to_daemon(directory, names) {
        // A user namespace may lack that user. Root there has no power outside of it.
        Err(error @ OwnerError::Give { .. }) => {
            writeln!(
                anstream::stderr(),
                "warning: {error}; continuing as root without capabilities"
            )?;
            None
        }
        other => other.map_err(|error| refusal(directory, error))?,
    };
    privilege::keep_only(keep, identity)?;
    if identity.is_some() {
        check_access(directory)?;
    }
    Ok(())
}

/// Checks that this user passes the directories above.
fn check_access(directory: &Path) -> anyhow::Result<()> {
    fs::read_dir(directory).map(drop).with_context(|| {
        format!(
            "cannot open {} as user {}: allow other users to enter the directories above it (chmod o+x), or use another --dir",
            directory.display(),
            user_name(Uid::effective())
        )
    })
}

fn refusal(directory: &Path, error: OwnerError) -> anyhow::Error {
    let OwnerError::Foreign { user, group, .. } = error else {
        return error.into();
    };
    let command = shown_command(std::env::args());
    let run_as = match User::from_uid(Uid::from_raw(user)) {
        Ok(Some(entry)) => format!("sudo -u {} {command}", entry.name),
        // sudo accepts only users that the host knows.
        _ => format!("sudo setpriv --reuid {user} --regid {group} --clear-groups {command}"),
    };
    anyhow!(
        "cannot use {} as root: it belongs to user {}; run: {run_as}",
        directory.display(),
        user_name(Uid::from_raw(user))
    )
}

/// Options whose values are secrets.
const SECRETS: [&str; 2] = ["--secret", "--token"];

/// Returns a command line for a shell, without the values of [`SECRETS`].
pub fn shown_command(words: impl Iterator<Item = String>) -> String {
    let mut shown = Vec::new();
    let mut hide = false;
    for word in words {
        let value_follows = SECRETS.contains(&word.as_str());
        if std::mem::replace(&mut hide, value_follows) {
            shown.push("...".to_owned());
        } else if let Some((name, _)) = word.split_once('=')
            && SECRETS.contains(&name)
        {
            shown.push(format!("{name}=..."));
        } else {
            shown.push(quoted(&word));
        }
    }
    shown.join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Returns the name of a user, or its number.
pub fn user_name(user: Uid) -> String {
    match User::from_uid(user) {
        Ok(Some(entry)) => entry.name,
        _ => user.to_string(),
    }
}

/// Returns the directories of a certificate and its key, as named and as links lead there: a renewal
/// replaces the files or links in them.
pub fn folders_of_certificate(cert: Option<&Path>, key: Option<&Path>) -> Vec<PathBuf> {
    let files = || cert.into_iter().chain(key);
    let named = files().filter_map(|file| std::path::absolute(file).ok());
    let linked = files().filter_map(|file| file.canonicalize().ok());
    let folders = named
        .chain(linked)
        .filter_map(|file| Some(file.parent()?.to_owned()));
    // Never the whole file system.
    folders.filter(|folder| folder.parent().is_some()).collect()
}

/// Confines a service to its directory, and to reading these files and directories. Existing threads stay
/// unconfined.
pub fn confine(directory: &Path, files: Vec<PathBuf>) -> anyhow::Result<()> {
    let confinement = confine::confine(&Needs {
        packets: false,
        folders: vec![directory.to_owned()],
        files,
    });
    for (name, ability) in confinement.table() {
        if let Some(reason) = ability.reason() {
            let name = name.replace('_', " ");
            writeln!(anstream::stderr(), "note: not confined: {name}: {reason}")?;
        }
    }
    Ok(())
}

/// Returns the address to listen on: the given one, or `port` of all addresses.
pub fn listen_address(given: Option<SocketAddr>, port: u16) -> anyhow::Result<SocketAddr> {
    let address = given.unwrap_or_else(|| {
        // Missing if the kernel has no IPv6.
        if Path::new("/proc/net/if_inet6").exists() {
            (Ipv6Addr::UNSPECIFIED, port).into()
        } else {
            (Ipv4Addr::UNSPECIFIED, port).into()
        }
    });
    if address.ip().is_multicast() {
        bail!("cannot listen on {address}: it is a multicast address");
    }
    Ok(address)
}

/// Creates a file for its owner only.
pub fn create_private(file: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).open(file)
}

/// A TCP port of a service's last start, and the pin of its certificate; `None` if systems trust the
/// certificate. It is kept in a file, for commands that print it.
pub struct Listener {
    /// The port.
    pub port: u16,
    /// The pin.
    pub pin: Option<Pin>,
}

impl Listener {
    /// Reads the file; `None` without it.
    pub fn read(file: &Path) -> Option<Listener> {
        let text = fs::read_to_string(file).ok()?;
        let mut words = text.split_whitespace();
        Some(Listener {
            port: words.next()?.parse().ok()?,
            pin: words.next().and_then(|word| word.parse().ok()),
        })
    }

    /// Writes the file.
    pub fn write(&self, file: &Path) -> io::Result<()> {
        let pin = self.pin.map_or(String::new(), |pin| pin.to_string());
        fs::write(file, format!("{} {pin}\n", self.port))
    }
}

/// Returns the name of this host; others may know it by another.
pub fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}

/// Returns HOST:PORT for a command that another host runs, from `--host HOST[:PORT]`. Without it, the
/// name of this host if it has a domain. Other hosts may not resolve a name without one, so then the
/// address from which this host reaches the internet; without that, the name and a warning.
pub fn advertised_host(given: Option<&str>, port: u16) -> anyhow::Result<String> {
    if let Some(given) = given {
        return Ok(match given.rsplit_once(':') {
            Some((_, given_port)) if given_port.parse::<u16>().is_ok() => given.to_owned(),
            _ => format!("{given}:{port}"),
        });
    }
    let host = host_name();
    if host.contains('.') {
        return Ok(format!("{host}:{port}"));
    }
    let shown = crate::screen::printable(&host);
    let mut stderr = anstream::stderr();
    match internet_address() {
        Some(address) => {
            writeln!(
                stderr,
                "note: `{shown}` has no domain, so the command has the address {address}; --host sets another"
            )?;
            Ok(SocketAddr::new(address, port).to_string())
        }
        None => {
            writeln!(
                stderr,
                "warning: other hosts may not resolve `{shown}`; if so, name this host with --host"
            )?;
            Ok(format!("{host}:{port}"))
        }
    }
}

/// Returns the address from which this host sends to the internet, if it has a route there.
fn internet_address() -> Option<IpAddr> {
    // Addresses for documentation (RFC 5737, RFC 3849). Connecting a datagram socket sends nothing.
    let source = |own: IpAddr, documentation: &str| {
        let socket = UdpSocket::bind((own, 0)).ok()?;
        socket.connect((documentation, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    source(Ipv4Addr::UNSPECIFIED.into(), "203.0.113.1")
        .or_else(|| source(Ipv6Addr::UNSPECIFIED.into(), "2001:db8::1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_command_is_quoted_and_has_no_secret() {
        let shown = |words: &[&str]| shown_command(words.iter().map(ToString::to_string));
        assert_eq!(
            shown(&["seikan", "tag", "a b", "", "it's", "c"]),
            r"seikan tag 'a b' '' 'it'\''s' c"
        );
        assert_eq!(
            shown(&["seikan", "--secret", "north", "--secret=north", "x"]),
            "seikan --secret ... --secret=... x"
        );
        assert_eq!(
            shown(&["seikan", "--token", "skt_a", "--token=skt_a", "x=y"]),
            "seikan --token ... --token=... x=y"
        );
    }
}
