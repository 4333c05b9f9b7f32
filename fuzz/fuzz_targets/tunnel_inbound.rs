//! The whole receive path of a tunnel: bytes from an unknown source, and from a peer that has a
//! session and may violate the protocol.
//!
//! The input is a script: an operation, two bytes for it, a length of two bytes, and as many bytes.
use seikan_fuzz::{Peer, SOURCE};
use seikan_proto::filter::{Destinations, Filter, Filters, Open};
use seikan_proto::mode::Mode;
use seikan_proto::protocol::Protocol;
use std::time::Duration;

/// One input.
pub fn run(script: &[u8]) {
    let Some((flags, mut rest)) = script.split_first() else {
        return;
    };
    let protocol = if flags & 1 == 0 {
        Protocol::Native
    } else {
        Protocol::WireGuard
    };
    let mode = if flags & 5 == 4 {
        Mode::Ethernet
    } else {
        Mode::Ip
    };
    let mut peer = Peer::new(protocol, mode);
    // A peer with few permissions: the headers of every packet are examined.
    let id = peer.tunnel.peers().next().map(|peer| peer.id);
    if let Some(id) = id.filter(|_| flags & 2 != 0) {
        let open = Open {
            udp: std::iter::once(53..=53).collect(),
            ..Open::default()
        };
        peer.tunnel
            .set_filter(id, Filters::Same(Filter::Only(open), Destinations::Any));
    }
    while let Some((&[operation, a, b, l0, l1], tail)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([l0, l1])).min(tail.len());
        let (bytes, tail) = tail.split_at(length);
        rest = tail;
        match operation % 8 {
            // An authenticated record with any content.
            0 => {
                let message = peer.seal(bytes);
                let size = message.len();
                // From the peer's address, or from one of three others.
                let mut source = SOURCE;
                source.set_port(source.port() + u16::from(a & 3));
                peer.deliver_batch(source, message, size, b);
            }
            // Several of one size in one receive, as GRO merges them.
            1 => {
                let size = (usize::from(a) * 8).max(1);
                let messages: Vec<Vec<u8>> = bytes
                    .chunks(size)
                    .take(64)
                    .map(|part| peer.seal(part))
                    .collect();
                if let Some(first) = messages.first() {
                    let size = first.len();
                    peer.deliver(messages.concat(), size, b);
                }
            }
            // An unknown source.
            2 => peer.deliver(bytes.to_vec(), usize::from(a).max(1) * 64, b),
            // The peer's handshake, with any offer.
            3 => {
                let message = peer.initiate(bytes);
                let size = message.len();
                peer.deliver(message, size, b);
            }
            // An authenticated message with a byte changed.
            4 => {
                let mut message = if b & 1 == 0 {
                    peer.initiate(&[])
                } else {
                    peer.seal(bytes)
                };
                let at = usize::from(a) % message.len();
                message[at] ^= b | 2;
                let size = message.len();
                peer.deliver(message, size, 0);
            }
            // Reflects the latest datagram of the tunnel.
            5 => {
                if let Some(answer) = peer.last_answer().map(<[u8]>::to_vec) {
                    let size = answer.len();
                    peer.deliver(answer, size, b);
                }
            }
            // A packet to send.
            6 => peer.read_from_device(usize::from(a) * 5),
            // From a millisecond to four minutes.
            _ => peer.wait(Duration::from_millis(
                1 + 1000 * u64::from(a) + u64::from(b),
            )),
        }
    }
    peer.assert_ledger_closes();
    peer.assert_nobody_is_flooded();
    peer.take_work().assert_bounded("the script");
}
