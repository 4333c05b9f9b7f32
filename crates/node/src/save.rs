//! `SaveConfig`: writes the running state back to the file it came from.
//!
//! The new text is written beside the old file, brought to disk and then put in its place, so that
//! a full disk or a crash leaves the old one as it was. Comments are lost, as with wg-quick, and a
//! key that came from a file of its own is written out: the file is readable by its owner only.

use crate::config::{Config, Endpoint, Host, NotInIni, PeerConfig, PresharedKey};
use crate::node::Node;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Why the state was not saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// Not a thing that the wg-quick syntax can hold.
    #[error("cannot save the configuration to {}: {source}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What cannot be written.
        source: NotInIni,
    },
    /// The file system.
    #[error(
        "cannot save the configuration to {}: {source}; the file is as it was{}",
        path.display(),
        room(source)
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn room(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": make room in that file system"
        }
        io::ErrorKind::PermissionDenied => ": its folder must be writable for the tunnel's user",
        _ => "",
    }
}

/// Writes the state to `path`; TOML if it ends so, else wg-quick's syntax.
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

/// What runs now, as a configuration: the configured one with the peers, port and mark that were
/// changed since.
pub fn running(config: &Config, node: &Node) -> Config {
    let tunnel = &node.tunnel;
    // Members of a mesh are told anew each time.
    let members = node.mesh.as_ref().map(|mesh| &mesh.members);
    let is_member = |key| members.is_some_and(|members| members.contains_key(key));
    let peers = tunnel.peers().filter(|peer| !is_member(&peer.public_key));
    let peers = peers.map(|peer| {
        let before = config
            .peers
            .iter()
            .find(|before| before.public_key == peer.public_key);
        let preshared_key = peer.preshared_key.clone();
        let mut allowed_ips: Vec<_> = tunnel.allowed_ips(peer.id).collect();
        allowed_ips.sort();
        PeerConfig {
            name: before.and_then(|before| before.name.clone()),
            public_key: peer.public_key,
            preshared_key: Some(preshared_key).filter(PresharedKey::is_set),
            allowed_ips,
            endpoint: endpoint(before, peer.path.endpoint),
            persistent_keepalive: peer
                .persistent_keepalive()
                .and_then(|interval| u16::try_from(interval.as_secs()).ok())
                .filter(|seconds| *seconds != 0),
        }
    });
    let mut peers: Vec<PeerConfig> = peers.collect();
    // In the order of the file, new ones last.
    let place = |peer: &PeerConfig| {
        let mut keys = config.peers.iter().map(|before| before.public_key);
        keys.position(|key| key == peer.public_key)
            .unwrap_or(usize::MAX)
    };
    peers.sort_by_key(place);
    Config {
        listen_port: Some(node.sockets.port()),
        fwmark: node.sockets.fwmark(),
        private_key: tunnel.identity().private().clone(),
        peers,
        ..config.clone()
    }
}

/// A peer that was given by name stays so: the name outlives its address.
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
    // The file itself, where a link leads to it.
    let path = fs::canonicalize(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    let written = write(&new, text).and_then(|()| fs::rename(&new, &path));
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written
}

fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = match options.write(true).create_new(true).mode(0o600).open(path) {
        // Left by a crash: nobody else has this name.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            options.open(path)?
        }
        other => other?,
    };
    file.write_all(text)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_new_text_takes_the_place_of_the_old_for_the_owner_only() {
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
}
