//! Changes of a configuration file: `SaveConfig`, which writes the running state back, and a new private key.
//!
//! The new text is written to a temporary file, synced and renamed, so that a full disk or a crash leaves the
//! old file unchanged. Comments are lost, as with wg-quick, and a key from a file of its own is written inline;
//! the file is readable by its owner only.

use crate::control::json::Secret;
use crate::node::Node;
use ipnet::IpNet;
use seikan_config::{
    Config, Endpoint, Host, KeyError, NotInIni, Overrides, PeerConfig, PrivateKey, PublicKey,
    Source, Syntax, encode_key, parse_preshared_key, parse_private_key,
};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// Why the state was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// The wg-quick syntax cannot express the state.
    #[error("cannot save the configuration to {}: {source}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// The part that cannot be expressed.
        source: NotInIni,
    },
    /// The file system.
    #[error(
        "cannot save the configuration to {}: {source}; the file is unchanged{}",
        path.display(),
        remedy(source)
    )]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
}

fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": make room in that file system"
        }
        io::ErrorKind::PermissionDenied => ": its folder must be writable for the tunnel's user",
        _ => "",
    }
}

/// Writes the state to `path`: TOML if the name ends in `.toml`, otherwise wg-quick's syntax.
pub fn save(config: &Config, path: &Path) -> Result<(), SaveError> {
    let text = match path.extension() {
        Some(ending) if ending == "toml" => config.to_toml(),
        _ => config.to_ini().map_err(|source| SaveError::Syntax {
            path: path.into(),
            source,
        })?,
    };
    replace(path, text.as_bytes()).map_err(|source| SaveError::File {
        path: path.into(),
        source,
    })
}

/// Writes another private key into the file at `path`, or into the key file that it names. Everything else
/// stays unchanged, mode and owner too.
///
/// # Errors
/// The file cannot be read or replaced, or has no line with a key; it is unchanged.
pub fn set_private_key(path: &Path, key: &PrivateKey) -> Result<(), SaveError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SaveError::File { path, source }
    };
    let text = fs::read_to_string(path).map(Zeroizing::new);
    let text = text.map_err(failed(path))?;
    let syntax = Syntax::of(path);
    let is = |name: &str, field: &str| match syntax {
        Syntax::Ini => name.eq_ignore_ascii_case(&field.replace('-', "")),
        Syntax::Toml => name == field,
    };
    let encoded = encode_key(key.as_bytes());
    // Large enough: growing would leave copies of the key in memory.
    let mut new = Zeroizing::new(String::with_capacity(text.len() + 128));
    let mut found = false;
    for line in text.split_inclusive('\n') {
        let name = line.split_once('=').map_or(line, |(name, _)| name);
        if is(name.trim(), "private-key-file") {
            let file = key_file(&text, syntax).ok_or_else(|| {
                let message = "the name of the private key's file cannot be parsed";
                failed(path)(io::Error::new(io::ErrorKind::InvalidData, message))
            })?;
            let file = path.parent().unwrap_or(Path::new("")).join(file);
            let line = Zeroizing::new(format!("{}\n", *encoded));
            return replace_keeping_mode(&file, line.as_bytes()).map_err(failed(&file));
        }
        if found || !is(name.trim(), "private-key") {
            new.push_str(line);
            continue;
        }
        found = true;
        let (open, close) = match syntax {
            Syntax::Ini => (" ", "\n"),
            Syntax::Toml => (" \"", "\"\n"),
        };
        for part in [name, "=", open, &encoded, close] {
            new.push_str(part);
        }
    }
    if !found {
        let message = "the file has no line with a private key";
        let source = io::Error::new(io::ErrorKind::InvalidData, message);
        return Err(failed(path)(source));
    }
    replace_keeping_mode(path, new.as_bytes()).map_err(failed(path))
}

/// Returns the file that `private-key-file` names in a configuration with this key.
fn key_file(text: &Zeroizing<String>, syntax: Syntax) -> Option<PathBuf> {
    let source = Source {
        file: String::new(),
        syntax,
        text: text.clone(),
    };
    let first = RefCell::new(None);
    // The private key is read before the keys of peers.
    seikan_config::parse(&source, &Overrides::default(), &|file: &Path| {
        first.borrow_mut().get_or_insert_with(|| file.to_owned());
        Err(io::ErrorKind::NotFound.into())
    });
    first.into_inner()
}

/// The saved part of a running tunnel: values only, no text that a parser of the configuration would interpret.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Running {
    listen_port: u16,
    fwmark: Option<u32>,
    private_key: Secret,
    peers: Vec<RunningPeer>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunningPeer {
    public_key: PublicKey,
    preshared_key: Option<Secret>,
    allowed_ips: Vec<IpNet>,
    endpoint: Option<SocketAddr>,
    /// Seconds.
    persistent_keepalive: Option<u16>,
}

impl Running {
    /// Takes the state of a node, without the mark that the tunnel chose itself: the next start chooses one again.
    pub fn of(node: &Node, chosen_mark: Option<u32>) -> Running {
        let tunnel = &node.tunnel;
        // Members of a mesh are learned again after each start.
        let members = node.mesh.as_ref().map(|mesh| &mesh.members);
        let is_member = |key| members.is_some_and(|members| members.contains_key(key));
        let peers = tunnel.peers().filter(|peer| !is_member(&peer.public_key));
        let peers = peers.map(|peer| {
            let preshared_key = Some(&peer.preshared_key).filter(|key| key.is_set());
            let mut allowed_ips: Vec<_> = tunnel.allowed_ips(peer.id).collect();
            allowed_ips.sort();
            RunningPeer {
                public_key: peer.public_key,
                preshared_key: preshared_key.map(|key| Secret::new(&encode_key(key.as_bytes()))),
                allowed_ips,
                endpoint: peer.path.endpoint,
                persistent_keepalive: peer
                    .persistent_keepalive()
                    .and_then(|interval| u16::try_from(interval.as_secs()).ok())
                    .filter(|seconds| *seconds != 0),
            }
        });
        Running {
            listen_port: node.sockets.port(),
            fwmark: node
                .sockets
                .fwmark()
                .filter(|mark| Some(*mark) != chosen_mark),
            private_key: Secret::new(&encode_key(tunnel.identity().private().as_bytes())),
            peers: peers.collect(),
        }
    }

    /// Returns the configuration with the running state. Names of peers and hosts are kept.
    ///
    /// # Errors
    /// A key is invalid.
    pub fn merged_into(&self, config: &Config) -> Result<Config, KeyError> {
        let mut peers = Vec::new();
        for peer in &self.peers {
            let mut before = config.peers.iter();
            let before = before.find(|before| before.public_key == peer.public_key);
            let preshared_key = peer.preshared_key.as_ref();
            peers.push(PeerConfig {
                name: before.and_then(|before| before.name.clone()),
                public_key: peer.public_key,
                preshared_key: preshared_key
                    .map(|key| parse_preshared_key(key.reveal()))
                    .transpose()?,
                allowed_ips: peer.allowed_ips.clone(),
                endpoint: endpoint(before, peer.endpoint),
                persistent_keepalive: peer.persistent_keepalive,
            });
        }
        // Peers keep the order of the file, and new ones come last.
        let position = |peer: &PeerConfig| {
            let mut keys = config.peers.iter().map(|before| before.public_key);
            keys.position(|key| key == peer.public_key)
                .unwrap_or(usize::MAX)
        };
        peers.sort_by_key(position);
        Ok(Config {
            listen_port: Some(self.listen_port),
            fwmark: self.fwmark,
            private_key: parse_private_key(self.private_key.reveal())?,
            peers,
            ..config.clone()
        })
    }
}

/// A peer that was configured by name keeps the name, which outlives its address.
fn endpoint(before: Option<&PeerConfig>, now: Option<std::net::SocketAddr>) -> Option<Endpoint> {
    let before = before.and_then(|before| before.endpoint.clone());
    match (before, now) {
        (Some(named), _) if matches!(named.host, Host::Name(_)) => Some(named),
        (_, Some(now)) => Some(Endpoint {
            host: Host::Address(now.ip()),
            port: now.port(),
        }),
        (before, None) => before,
    }
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    replace_with(path, text, |_| Ok(()))
}

/// Replaces a file and keeps its owner and mode, except for the access of others.
fn replace_keeping_mode(path: &Path, text: &[u8]) -> io::Result<()> {
    let old = fs::metadata(path)?;
    replace_with(path, text, |new| {
        fchown(new, Some(old.uid()), Some(old.gid()))?;
        // The file contains a secret, so others lose access whatever the mode was.
        new.set_permissions(Permissions::from_mode(old.mode() & 0o7770))
    })
}

fn replace_with(
    path: &Path,
    text: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    // The target of a symbolic link is replaced.
    let path = fs::canonicalize(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    // The open file, since another program may replace what has its name.
    let written = write(&new, text)
        .and_then(|file| prepare(&file))
        .and_then(|()| fs::rename(&new, &path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write(path: &Path, text: &[u8]) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let mut file = match options.write(true).create_new(true).mode(0o600).open(path) {
        // Left by a crash: no other process uses this name.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            options.open(path)?
        }
        other => other?,
    };
    file.write_all(text)?;
    file.sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_new_text_replaces_the_old_for_the_owner_only() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("wg0.conf");
        fs::write(&path, "old").expect("write");
        replace(&path, b"new").expect("replace");
        assert_eq!(fs::read(&path).expect("read"), b"new");
        let mode = fs::metadata(&path).expect("metadata").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 1);
    }

    #[test]
    fn a_link_stays_a_link() {
        let folder = tempfile::tempdir().expect("folder");
        let (file, link) = (folder.path().join("real"), folder.path().join("wg0.conf"));
        fs::write(&file, "old").expect("write");
        std::os::unix::fs::symlink(&file, &link).expect("link");
        replace(&link, b"new").expect("replace");
        assert!(fs::symlink_metadata(&link).expect("metadata").is_symlink());
        assert_eq!(fs::read(&file).expect("read"), b"new");
    }

    #[test]
    fn the_key_file_is_the_one_that_the_parser_reads() {
        let folder = tempfile::tempdir().unwrap();
        let key = PrivateKey::from_bytes([0x48; 32]);
        for (name, line, file) in [
            ("a.toml", "private-key-file = \"a#b\"", "a#b"),
            ("b.toml", "private-key-file = \"\\u0061b\" # a", "ab"),
            ("c.conf", "[Interface]\nPrivateKeyFile = a b # c", "a b"),
        ] {
            let path = folder.path().join(name);
            fs::write(&path, format!("{line}\n")).unwrap();
            for other in ["a", file] {
                fs::write(folder.path().join(other), "old").unwrap();
            }
            set_private_key(&path, &key).unwrap();
            let written = fs::read_to_string(folder.path().join(file)).unwrap();
            assert_eq!(written.trim(), *encode_key(&[0x48; 32]), "{name}");
            let other = fs::read_to_string(folder.path().join("a")).unwrap();
            assert_eq!(other, "old", "{name}");
        }
    }

    #[test]
    fn a_new_key_replaces_the_old_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let key = PrivateKey::from_bytes([0x48; 32]);
        let (old, new) = (
            "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEA=",
            encode_key(&[0x48; 32]),
        );
        let ini = "# mine\n[Interface]\nprivatekey = KEY\nAddress = 10.0.0.1/24\n[Peer]\nPublicKey = KEY\n";
        let toml = "# mine\nprivate-key = \"KEY\"\naddress = \"10.0.0.1/24\"\n";
        for (name, text) in [("a.conf", ini), ("a.toml", toml)] {
            let path = folder.path().join(name);
            fs::write(&path, text.replace("KEY", old)).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
            set_private_key(&path, &key).unwrap();
            let expected = text.replacen("KEY", &new, 1).replace("KEY", old);
            assert_eq!(fs::read_to_string(&path).unwrap(), expected);
            assert_eq!(
                fs::metadata(&path).unwrap().permissions().mode() & 0o777,
                0o640
            );
        }
        let path = folder.path().join("b.toml");
        let text = "private-key-file = \"b.key\"\n";
        fs::write(&path, text).unwrap();
        fs::write(folder.path().join("b.key"), old).unwrap();
        set_private_key(&path, &key).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        let file = fs::read_to_string(folder.path().join("b.key")).unwrap();
        assert_eq!(file.trim(), *new);
        fs::write(&path, "address = \"10.0.0.1/24\"\n").unwrap();
        assert!(set_private_key(&path, &key).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }
}
