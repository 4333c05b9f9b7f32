//! The reply to `get=1`: the device, then peer after peer.

use super::Device;
use crate::output::Output;
use seikan_proto::indices::PeerId;
use seikan_proto::peer::Peer;
use std::fmt::{self, Write};
use std::time::Duration;

/// A reply in progress: the peers as of its beginning.
#[derive(Debug)]
pub struct Get {
    peers: std::vec::IntoIter<PeerId>,
}

impl Get {
    /// Starts with the device.
    pub fn new(device: &dyn Device, output: &mut Output) -> Get {
        // Writing to memory does not fail.
        let _ = write_device(device, output);
        let peers: Vec<_> = device.tunnel().peers().map(|peer| peer.id).collect();
        Get {
            peers: peers.into_iter(),
        }
    }

    /// Appends peers until the output is full; returns false after the last one.
    pub fn give(&mut self, device: &dyn Device, output: &mut Output) -> bool {
        while !output.is_full() {
            let Some(id) = self.peers.next() else {
                return false;
            };
            // The peer may have been removed since.
            if let Some(peer) = device.tunnel().peer(id) {
                let _ = write_peer(device, peer, output);
            }
        }
        true
    }
}

fn write_device(device: &dyn Device, output: &mut Output) -> fmt::Result {
    if let Some(key) = device.private_key() {
        write_key(output, "private_key", key.as_bytes())?;
    }
    writeln!(output, "listen_port={}", device.listen_port())?;
    match device.fwmark() {
        0 => Ok(()),
        mark => writeln!(output, "fwmark={mark}"),
    }
}

fn write_peer(device: &dyn Device, peer: &Peer, output: &mut Output) -> fmt::Result {
    write_key(output, "public_key", peer.public_key.as_bytes())?;
    write_key(output, "preshared_key", peer.preshared_key.as_bytes())?;
    writeln!(output, "protocol_version=1")?;
    if let Some(endpoint) = peer.path.endpoint {
        writeln!(output, "endpoint={endpoint}")?;
    }
    let handshake = peer.last_handshake.unwrap_or(Duration::ZERO);
    writeln!(output, "last_handshake_time_sec={}", handshake.as_secs())?;
    let nanos = handshake.subsec_nanos();
    writeln!(output, "last_handshake_time_nsec={nanos}")?;
    writeln!(output, "tx_bytes={}", peer.counters.sent_bytes)?;
    writeln!(output, "rx_bytes={}", peer.counters.received_bytes)?;
    let keepalive = peer.persistent_keepalive().map_or(0, |i| i.as_secs());
    writeln!(output, "persistent_keepalive_interval={keepalive}")?;
    for prefix in device.tunnel().allowed_ips(peer.id) {
        writeln!(output, "allowed_ip={prefix}")?;
    }
    Ok(())
}

fn write_key(output: &mut Output, name: &str, key: &[u8; 32]) -> fmt::Result {
    write!(output, "{name}=")?;
    for byte in key {
        write!(output, "{byte:02x}")?;
    }
    writeln!(output)
}
