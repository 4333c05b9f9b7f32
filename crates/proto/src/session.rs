//! A session: a pair of keys, sealing with a counter, and opening with a replay window.

use crate::capabilities::{Capabilities, Cipher};
use crate::constants::{NATIVE_DATA, REJECT_AFTER_MESSAGES, REJECT_AFTER_TIME, WIREGUARD_DATA};
use crate::noise::{Established, Protocol};
use crate::replay::ReplayWindow;
use crate::time::Instant;
use crate::timers::SessionAge;
use aws_lc_rs::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use seikan_observe::DropReason;
use seikan_wire::message::{DataHeader, RecordHeader, TAG_LEN};

/// A transport session (WireGuard whitepaper, 5.4.5 and 5.4.6).
pub struct Session {
    /// Local index: the receiver field of datagrams to this host.
    pub local_index: u32,
    /// Remote index: the receiver field of datagrams to the peer.
    pub remote_index: u32,
    /// When the handshake completed.
    pub created: Instant,
    /// Its number among the sessions with this peer, in the order of derivation, from 1.
    pub number: u64,
    /// This host sent the initiation.
    pub initiator: bool,
    /// The AEAD in use.
    pub cipher: Cipher,
    /// The peer's capabilities, until this host as responder knows that the peer has the session.
    pub(crate) agreed: Option<Capabilities>,
    seal: LessSafeKey,
    open: LessSafeKey,
    next_counter: u64,
    /// The record sealed last is a probe.
    pub probed: bool,
    replay: ReplayWindow,
}

impl Session {
    /// Creates a session with freshly derived keys.
    pub fn new(keys: &Established, cipher: Cipher, initiator: bool, now: Instant) -> Session {
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
            // A key that is never used.
            #[cfg(feature = "null-cipher")]
            Cipher::Null => &CHACHA20_POLY1305,
        };
        let key = |bytes: &[u8; 32]| {
            LessSafeKey::new(
                UnboundKey::new(algorithm, bytes).expect("both AEADs take 32-byte keys"),
            )
        };
        Session {
            local_index: keys.local_index,
            remote_index: keys.remote_index,
            created: now,
            number: 0,
            initiator,
            cipher,
            agreed: None,
            seal: key(&keys.send),
            open: key(&keys.receive),
            next_counter: 0,
            probed: false,
            replay: ReplayWindow::default(),
        }
    }

    /// Age and use of the session, for the timers.
    pub fn age(&self) -> SessionAge {
        SessionAge {
            derived: self.created,
            is_initiator: self.initiator,
            sent: self.next_counter,
        }
    }

    /// The counter of the next sealed datagram, which is the number of datagrams sealed so far.
    pub fn counter(&self) -> u64 {
        self.next_counter
    }

    /// Whether the session is young enough to send and has counters left.
    pub fn may_send(&self, now: Instant) -> bool {
        !self.created.has_expired(REJECT_AFTER_TIME, now)
            && self.next_counter < REJECT_AFTER_MESSAGES
    }

    /// Seals a data message of `protocol` in place. `datagram` is space for the
    /// [header](Protocol::data_header_len), the plaintext, and space for the tag.
    pub fn seal(&mut self, protocol: Protocol, datagram: &mut [u8]) {
        let counter = self.next_counter;
        self.next_counter += 1;
        let receiver = self.remote_index;
        let (head, rest) = datagram.split_at_mut(protocol.data_header_len());
        match protocol {
            Protocol::WireGuard => head.copy_from_slice(
                &DataHeader {
                    kind: WIREGUARD_DATA,
                    receiver,
                    counter,
                }
                .to_bytes(),
            ),
            Protocol::Native => head.copy_from_slice(
                &RecordHeader {
                    kind: NATIVE_DATA,
                    receiver,
                    counter: counter as u32,
                }
                .to_bytes(),
            ),
        }
        let (text, tag_room) = rest.split_at_mut(rest.len() - TAG_LEN);
        #[cfg(feature = "null-cipher")]
        if self.cipher == Cipher::Null {
            tag_room.fill(0);
            return;
        }
        let tag = self
            .seal
            .seal_in_place_separate_tag(nonce(counter), Aad::empty(), text)
            .expect("datagrams are far below the AEAD's length limit");
        tag_room.copy_from_slice(tag.as_ref());
    }

    /// Returns the counter of a received record, of which its header has the low 32 bits. If it is
    /// wrong, the record does not authenticate.
    pub fn whole_counter(&self, low: u32) -> u64 {
        self.replay.whole_counter(low)
    }

    /// Whether no datagram with a higher counter has been accepted.
    pub fn is_newest(&self, counter: u64) -> bool {
        self.replay.next_counter() == counter + 1
    }

    /// Enters the counter of a record that was lost and restored, as if it had been received.
    pub fn restored(&mut self, counter: u64) {
        // Counters outside the window cannot be received either.
        let _ = self.replay.update(counter);
    }

    /// Opens what is behind the header of a received datagram in place, and returns the length of
    /// the plaintext at its start. The tag behind it must be there.
    ///
    /// A replayed counter is refused before decryption. The window moves only after authentication
    /// (RFC 6479), so a forged counter does not move it.
    pub fn open(&mut self, counter: u64, sealed: &mut [u8]) -> Result<usize, DropReason> {
        self.replay
            .would_accept(counter)
            .map_err(|_| DropReason::Replayed)?;
        let length = sealed.len() - TAG_LEN;
        self.decrypt(counter, sealed)?;
        self.replay
            .update(counter)
            .map_err(|_| DropReason::Replayed)?;
        Ok(length)
    }

    /// Decrypts what is behind the header of a received datagram in place. Neither checks the replay
    /// window nor moves it. Returns an error if the datagram is not authentic.
    pub(crate) fn decrypt(&self, counter: u64, sealed: &mut [u8]) -> Result<(), DropReason> {
        #[cfg(feature = "null-cipher")]
        if self.cipher == Cipher::Null {
            return Ok(());
        }
        self.open
            .open_in_place(nonce(counter), Aad::empty(), sealed)
            .map_err(|_| DropReason::BadTag)?;
        Ok(())
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("local_index", &self.local_index)
            .field("remote_index", &self.remote_index)
            .field("cipher", &self.cipher)
            .finish_non_exhaustive()
    }
}

/// 32 zero bits, then the counter, little endian (WireGuard whitepaper, 5.4.6).
fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&counter.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use seikan_wire::message::RECORD_HEADER_LEN;
    use zeroize::Zeroizing;

    /// The two ends of a session.
    fn pair() -> [Session; 2] {
        [[1, 2], [2, 1]].map(|[send, receive]| {
            let keys = Established {
                local_index: u32::from(send),
                remote_index: u32::from(receive),
                send: Zeroizing::new([send; 32]),
                receive: Zeroizing::new([receive; 32]),
                handshake_hash: [0; 32],
                payload: Vec::new(),
            };
            Session::new(&keys, Cipher::Aes256Gcm, true, Instant::BOOT)
        })
    }

    #[test]
    fn records_open_across_the_wrap_of_the_counter_on_the_wire() {
        let [mut from, mut to] = pair();
        from.next_counter = (1 << 32) - 2;
        to.restored((1 << 32) - 3);
        let mut sent: Vec<_> = (0..4u8)
            .map(|n| {
                let mut datagram = [n; RECORD_HEADER_LEN + 1 + TAG_LEN];
                from.seal(Protocol::Native, &mut datagram);
                datagram
            })
            .collect();
        sent.swap(1, 2); // the last one before the wrap arrives behind the first one after it
        for mut datagram in sent.clone() {
            let header = RecordHeader::read(&datagram).expect("a header");
            let counter = to.whole_counter(header.counter);
            let length = to.open(counter, &mut datagram[RECORD_HEADER_LEN..]);
            assert_eq!(length, Ok(1), "{counter}");
        }
        assert!(to.is_newest((1 << 32) + 1));
        // Repeated, they are known.
        for mut datagram in sent {
            let header = RecordHeader::read(&datagram).expect("a header");
            let counter = to.whole_counter(header.counter);
            let opened = to.open(counter, &mut datagram[RECORD_HEADER_LEN..]);
            assert_eq!(opened, Err(DropReason::Replayed));
        }
    }
}
