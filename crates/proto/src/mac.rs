//! The MACs of handshake messages: keyed BLAKE2s, and mac1 (WireGuard whitepaper, 5.4.4).

use blake2::digest::consts::U16;
use blake2::digest::{Digest, FixedOutput, Mac, Update};
use blake2::{Blake2s256, Blake2sMac};

use crate::constants::{KEY_LEN, MAC_LEN, MACS_LEN};

/// Key of mac1 in the messages to one host. Anyone who knows the host's public key can derive it.
#[derive(Clone, Copy, Debug)]
pub struct MacKey([u8; 32]);

impl MacKey {
    /// The key for messages to the holder of `public_key`: HASH(label || public key).
    pub(crate) fn derive(label: &[u8; 8], public_key: &[u8; KEY_LEN]) -> MacKey {
        MacKey(hash(label, public_key))
    }
}

/// Writes mac1 of a handshake message whose other fields are complete. The message has at least
/// [`MACS_LEN`] bytes.
pub fn write_mac1(key: &MacKey, message: &mut [u8]) {
    let mac1_at = message.len() - MACS_LEN;
    let mac = keyed(&key.0, &[&message[..mac1_at]]).finalize_fixed();
    message[mac1_at..mac1_at + MAC_LEN].copy_from_slice(&mac);
}

/// Returns whether mac1 of a handshake message is valid, in constant time. False if the message is
/// too short.
pub fn verify_mac1(key: &MacKey, message: &[u8]) -> bool {
    let Some(mac1_at) = message.len().checked_sub(MACS_LEN) else {
        return false;
    };
    keyed(&key.0, &[&message[..mac1_at]])
        .verify_slice(&message[mac1_at..mac1_at + MAC_LEN])
        .is_ok()
}

/// BLAKE2s of a label and a public key.
pub(crate) fn hash(label: &[u8; 8], public_key: &[u8; KEY_LEN]) -> [u8; 32] {
    Blake2s256::new_with_prefix(label)
        .chain_update(public_key)
        .finalize()
        .into()
}

/// Keyed BLAKE2s with 16 bytes of output, the paper's MAC. The key has 16 or 32 bytes.
pub(crate) fn keyed(key: &[u8], parts: &[&[u8]]) -> Blake2sMac<U16> {
    let mut mac =
        <Blake2sMac<U16> as Mac>::new_from_slice(key).expect("keys here have 16 or 32 bytes");
    parts.iter().for_each(|part| Update::update(&mut mac, part));
    mac
}
