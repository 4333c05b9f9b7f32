//! Peers with which a tunnel has a session when it ends, noted for its next start.
//!
//! Their end of the session outlives the process, and they send into it for up to 15 seconds until they notice. So the
//! next start begins a handshake with each of them ([`Tunnel::resume`]). The file is in the directory of sockets, which a
//! reboot empties, and holds no secret.

use crate::system::now;
use seikan_proto::constants::REJECT_AFTER_TIME;
use seikan_proto::indices::PeerId;
use seikan_proto::keys::PublicKey;
use seikan_proto::tunnel::Tunnel;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Largest file that is read, in bytes: some 100,000 peers.
const MAX_FILE: u64 = 16 << 20;

/// Peers that had a session, and their endpoints.
///
/// The daemon that reported them may have been compromised. So an endpoint is used only for a peer of the configuration
/// that has no other: the peer itself could have brought that about, by sending from there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FormerSessions(BTreeMap<PublicKey, Option<SocketAddr>>);

impl FormerSessions {
    /// Returns the peers whose session still carries data.
    pub fn of(tunnel: &Tunnel) -> FormerSessions {
        let now = now().wall;
        let is_live = |at| now.saturating_sub(at) < REJECT_AFTER_TIME;
        let peers = tunnel.peers();
        let live = peers.filter(|peer| peer.last_handshake.is_some_and(is_live));
        FormerSessions(
            live.map(|peer| (peer.public_key, peer.path.endpoint))
                .collect(),
        )
    }

    /// Writes the file at `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let _ = fs::remove_file(path);
        if self.0.is_empty() {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(&serde_json::to_vec(self)?)
    }

    /// Reads the file at `path` and removes it. A file that is missing, unreadable or older than a session holds nobody.
    pub fn take(path: &Path) -> FormerSessions {
        let read = || -> io::Result<FormerSessions> {
            let file = File::open(path)?;
            let age = file.metadata()?.modified()?.elapsed();
            if age.map_or(true, |age| age >= REJECT_AFTER_TIME) {
                return Ok(FormerSessions::default());
            }
            let mut text = Vec::new();
            file.take(MAX_FILE).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        let former = read().unwrap_or_default();
        let _ = fs::remove_file(path);
        former
    }

    /// Starts a handshake with each of them that is a peer now. Others may become one soon, as members of a mesh.
    pub fn resume_configured(&mut self, tunnel: &mut Tunnel) {
        let mut resume = |key: &PublicKey, endpoint: &Option<SocketAddr>| {
            let Some(id) = tunnel.peer_by_key(key) else {
                return true;
            };
            tunnel.resume(now().mono, id, endpoint.filter(may_be_peer));
            false
        };
        self.0.retain(|key, endpoint| resume(key, endpoint));
    }

    /// Starts a handshake with a member once, if it had a session before the restart. Its addresses
    /// come from the coordinator.
    pub fn resume_member(&mut self, tunnel: &mut Tunnel, id: PeerId, key: &PublicKey) {
        if self.0.remove(key).is_some() {
            tunnel.resume(now().mono, id, None);
        }
    }
}

fn may_be_peer(endpoint: &SocketAddr) -> bool {
    let address = endpoint.ip();
    endpoint.port() != 0 && !address.is_unspecified() && !address.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_once_and_only_while_the_sessions_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("wg0.sessions");
        let key = PublicKey::from_bytes([7; 32]);
        let former = FormerSessions([(key, Some("192.0.2.1:7".parse().unwrap()))].into());
        former.write(&path).unwrap();
        assert_eq!(FormerSessions::take(&path), former);
        assert_eq!(FormerSessions::take(&path), FormerSessions::default());

        former.write(&path).unwrap();
        let old = std::time::SystemTime::now() - REJECT_AFTER_TIME;
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(old)
            .unwrap();
        assert_eq!(FormerSessions::take(&path), FormerSessions::default());
        assert!(!path.exists());

        fs::write(&path, "{\"nonsense\": 1}").unwrap();
        assert_eq!(FormerSessions::take(&path), FormerSessions::default());
        former.write(&path).unwrap();
        FormerSessions::default().write(&path).unwrap();
        assert!(!path.exists());
    }
}
