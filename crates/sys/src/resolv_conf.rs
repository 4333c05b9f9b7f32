//! Adds a name server to `/etc/resolv.conf` on hosts where no program manages that file
//! (resolv.conf(5)).
//!
//! Two lines are inserted before the first server, and these two are removed again. The rest of the
//! file stays as it is, also if others change it in between. The previous servers stay in the file
//! as a fallback.
//!
//! The file is written in place, in one call: in containers it may be a mount of its own, which
//! cannot be replaced.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::{Path, PathBuf};

/// The file that the C library reads.
pub const FILE: &str = "/etc/resolv.conf";
/// Maximum length in bytes of a file that is changed.
const MAX_FILE: u64 = 1 << 16;
/// Prefix of the comment before the server.
const REMARK: &str = "# seikan, for ";
/// The port of DNS.
const PORT: u16 = 53;

/// Why a server could not be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum ResolvConfError {
    /// The file cannot be read or written.
    #[error("cannot {doing} {}: {source}", path.display())]
    File {
        /// `read` or `change`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file has the server of another interface.
    #[error("{} has the name server of another mesh, of interface {interface}", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
        /// The interface.
        interface: String,
    },
    /// `options rotate` is set, so the server would be queried only for some names.
    #[error("{} has `options rotate`, with which names would be resolved only sometimes; remove it", path.display())]
    Rotates {
        /// The file.
        path: PathBuf,
    },
}

/// The server of an interface in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvConf {
    /// The file.
    pub path: PathBuf,
    /// The interface that the server belongs to.
    pub interface: String,
    /// The server.
    pub server: IpAddr,
}

impl ResolvConf {
    /// Inserts the server before all others.
    pub fn add(&self) -> Result<(), ResolvConfError> {
        let (mut file, text) = self.open()?;
        let before = self.removed(&text);
        if let Some(interface) = other(&before) {
            return Err(ResolvConfError::Taken {
                path: self.path.clone(),
                interface: interface.to_owned(),
            });
        }
        if rotates(&text) {
            return Err(ResolvConfError::Rotates {
                path: self.path.clone(),
            });
        }
        let after = self.added(&before);
        if after == text {
            Ok(())
        } else {
            self.write(&mut file, &text, &after)
        }
    }

    /// Inserts the server again if another program has rewritten the file without it.
    pub fn keep(&self) -> Result<(), ResolvConfError> {
        let remark = self.remark();
        let text = self.text()?;
        if text.split_inclusive('\n').any(|line| line == remark) {
            Ok(())
        } else {
            self.add()
        }
    }

    /// Removes the server. A file that does not have it, or does not exist, is no error.
    pub fn remove(&self) -> Result<(), ResolvConfError> {
        match self.open() {
            Ok((mut file, text)) => {
                let rest = self.removed(&text);
                if rest == text {
                    Ok(())
                } else {
                    self.write(&mut file, &text, &rest)
                }
            }
            Err(ResolvConfError::File { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the other servers in order. Without any, the server on this host is used
    /// (resolv.conf(5)).
    pub fn others(&self) -> Result<Vec<SocketAddr>, ResolvConfError> {
        let text = self.removed(&self.text()?);
        let mut servers: Vec<SocketAddr> = text.lines().filter_map(server).collect();
        if servers.is_empty() {
            servers.push((Ipv4Addr::LOCALHOST, PORT).into());
        }
        Ok(servers)
    }

    fn text(&self) -> Result<String, ResolvConfError> {
        let text = File::open(&self.path).and_then(|file| read(&file));
        text.map_err(|source| self.failed("read", source))
    }

    /// Opens the file with a lock against other processes of Seikan.
    fn open(&self) -> Result<(File, String), ResolvConfError> {
        let opened = OpenOptions::new().read(true).write(true).open(&self.path);
        let failed = |source| self.failed("change", source);
        let file = opened.map_err(failed)?;
        file.lock().map_err(failed)?;
        let text = read(&file).map_err(failed)?;
        Ok((file, text))
    }

    fn failed(&self, doing: &'static str, source: io::Error) -> ResolvConfError {
        ResolvConfError::File {
            doing,
            path: self.path.clone(),
            source,
        }
    }

    /// Writes the file: overwrites the old text before truncating the rest, so that the file is
    /// never empty. If the disk is full, the old text is restored.
    fn write(&self, file: &mut File, old: &str, new: &str) -> Result<(), ResolvConfError> {
        let mut put = |text: &str| {
            file.seek(SeekFrom::Start(0))?;
            file.write_all(text.as_bytes())?;
            file.set_len(text.len() as u64)
        };
        put(new).map_err(|source| {
            let _ = put(old);
            self.failed("change", source)
        })
    }

    fn remark(&self) -> String {
        format!("{REMARK}{}: the next line goes with it\n", self.interface)
    }

    fn added(&self, text: &str) -> String {
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            if server(line).is_some() {
                break;
            }
            at += line.len();
        }
        // Without a server line, the position is the end of the file, if a line begins there.
        if at == text.len() && !text.ends_with('\n') {
            at = 0;
        }
        let (before, after) = text.split_at(at);
        format!(
            "{before}{}nameserver {}\n{after}",
            self.remark(),
            self.server
        )
    }

    fn removed(&self, text: &str) -> String {
        let remark = self.remark();
        let ours = SocketAddr::from((self.server, PORT));
        let mut after_remark = false;
        let kept = |line: &&str| {
            // The server in the file may be another one, after a power failure.
            let goes_with_it = std::mem::replace(&mut after_remark, *line == remark);
            let server = server(line);
            !(after_remark || server == Some(ours) || goes_with_it && server.is_some())
        };
        text.split_inclusive('\n').filter(kept).collect()
    }
}

/// Returns another interface whose server is in the file. `text` does not have this interface's
/// server.
fn other(text: &str) -> Option<&str> {
    let remark = text.lines().find_map(|line| line.strip_prefix(REMARK))?;
    Some(remark.split(':').next().unwrap_or(remark))
}

fn rotates(text: &str) -> bool {
    text.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("options") && words.any(|word| word == "rotate")
    })
}

/// Parses a line `nameserver ADDRESS`.
fn server(line: &str) -> Option<SocketAddr> {
    let mut words = line
        .strip_prefix("nameserver")?
        .split([' ', '\t', '\n', '\r', '#', ';']);
    // The keyword must end there.
    if words.next() != Some("") {
        return None;
    }
    let address = words.find(|word| !word.is_empty())?;
    match address.split_once('%') {
        Some((address, zone)) => {
            let address: Ipv6Addr = address.parse().ok()?;
            let zone = nix::net::if_::if_nametoindex(zone)
                .ok()
                .or_else(|| zone.parse().ok())?;
            Some(SocketAddrV6::new(address, PORT, 0, zone).into())
        }
        None => Some((address.parse::<IpAddr>().ok()?, PORT).into()),
    }
}

fn read(file: &File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        Err(io::ErrorKind::FileTooLarge.into())
    } else {
        Ok(text)
    }
}

/// Returns the servers of a file; none if it cannot be read.
pub(crate) fn servers(path: &Path) -> Vec<IpAddr> {
    let text = File::open(path).and_then(|file| read(&file));
    let text = text.unwrap_or_default();
    let servers = text.lines().filter_map(server);
    servers.map(|server| server.ip()).collect()
}

/// Whether lookups on this host go to systemd-resolved: by its address in resolv.conf, or directly
/// from the C library (nss-resolve(8)).
pub(crate) fn uses_resolved(resolv_conf: &Path, nsswitch: &Path) -> bool {
    let read = |path: &Path| {
        File::open(path)
            .and_then(|file| read(&file))
            .unwrap_or_default()
    };
    let stub = |line: &str| {
        // systemd-resolved.service(8): the addresses of the stub and the proxy.
        let stubs = [[127, 0, 0, 53], [127, 0, 0, 54]].map(|ip| SocketAddr::from((ip, PORT)));
        server(line).is_some_and(|server| stubs.contains(&server))
    };
    let nss = |line: &str| {
        let hosts = line.trim_start().strip_prefix("hosts:");
        hosts.is_some_and(|services| services.split_whitespace().any(|word| word == "resolve"))
    };
    read(resolv_conf).lines().any(stub) || read(nsswitch).lines().any(nss)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn at(path: &Path) -> ResolvConf {
        ResolvConf {
            path: path.into(),
            interface: "seikan0".into(),
            server: [100, 80, 0, 2].into(),
        }
    }

    #[test]
    fn the_server_comes_first_and_goes_without_a_trace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let ours = at(&path);
        for before in [
            "# by hand\nsearch corp.example\nnameserver 192.0.2.53\nnameserver 2001:db8::53\noptions edns0\n",
            "nameserver 192.0.2.53",
            "nameserver\t192.0.2.53 # one\r\n",
            "search corp.example",
            "search corp.example\n",
            "",
        ] {
            fs::write(&path, before).unwrap();
            ours.add().unwrap();
            ours.add().unwrap();
            let text = fs::read_to_string(&path).unwrap();
            let servers: Vec<_> = text.lines().filter_map(server).collect();
            assert_eq!(servers[0], "100.80.0.2:53".parse().unwrap(), "{text:?}");
            assert_eq!(text.matches("100.80.0.2").count(), 1, "{text:?}");
            for line in before.lines() {
                assert!(text.lines().any(|l| l == line), "{line:?} in {text:?}");
            }
            ours.remove().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), before);
        }
    }

    #[test]
    fn changes_by_others_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        fs::write(&path, "nameserver 192.0.2.53\n").unwrap();
        at(&path).add().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{text}nameserver 192.0.2.54\n")).unwrap();
        at(&path).remove().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "nameserver 192.0.2.53\nnameserver 192.0.2.54\n");
        // As in a file that was rewritten.
        at(&path).remove().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        fs::remove_file(&path).unwrap();
        at(&path).remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn the_previous_servers_resolve_other_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let text = "nameserver 192.0.2.53\n;nameserver 192.0.2.1\nnameservers 192.0.2.2\nnameserver x\nnameserver fe80::1%lo\n";
        fs::write(&path, text).unwrap();
        at(&path).add().unwrap();
        let lo = nix::net::if_::if_nametoindex("lo").unwrap();
        let expected = [
            "192.0.2.53:53".parse().unwrap(),
            SocketAddrV6::new("fe80::1".parse().unwrap(), 53, 0, lo).into(),
        ];
        assert_eq!(at(&path).others().unwrap(), expected);
        fs::write(&path, "").unwrap();
        assert_eq!(
            at(&path).others().unwrap(),
            ["127.0.0.1:53".parse().unwrap()]
        );
    }

    #[test]
    fn where_it_would_not_work_nothing_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let missing = at(&path).add().unwrap_err().to_string();
        assert!(
            missing.contains("resolv.conf") && !path.exists(),
            "{missing}"
        );
        let rotates = "options rotate\nnameserver 192.0.2.53\n";
        fs::write(&path, rotates).unwrap();
        assert!(matches!(
            at(&path).add(),
            Err(ResolvConfError::Rotates { .. })
        ));
        assert_eq!(fs::read_to_string(&path).unwrap(), rotates);
        fs::write(&path, "nameserver 192.0.2.53\n").unwrap();
        let another = ResolvConf {
            interface: "seikan1".into(),
            server: [10, 0, 0, 1].into(),
            ..at(&path)
        };
        another.add().unwrap();
        let error = at(&path).add().unwrap_err();
        assert!(
            matches!(error, ResolvConfError::Taken { interface, .. } if interface == "seikan1")
        );
        fs::write(&path, " ".repeat(1 << 17)).unwrap();
        assert!(at(&path).add().is_err());
    }

    #[test]
    fn resolved_is_used_if_its_address_or_its_service_is_configured() {
        let folder = tempfile::tempdir().unwrap();
        let [conf, nss] = ["resolv.conf", "nsswitch.conf"].map(|name| folder.path().join(name));
        assert!(!uses_resolved(&conf, &nss));
        fs::write(&conf, "nameserver 192.0.2.53\n").unwrap();
        fs::write(&nss, "passwd: files resolve\nhosts: files dns\n").unwrap();
        assert!(!uses_resolved(&conf, &nss));
        fs::write(&nss, "hosts: files resolve [!UNAVAIL=return] dns\n").unwrap();
        assert!(uses_resolved(&conf, &nss));
        fs::write(&nss, "").unwrap();
        fs::write(&conf, "nameserver 127.0.0.53\n").unwrap();
        assert!(uses_resolved(&conf, &nss));
    }
}
