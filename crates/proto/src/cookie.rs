//! Denial-of-service protection of the handshake: mac1, mac2 and cookies (paper 5.3, 5.4.4, 5.4.7).
//!
//! mac1 proves that the sender knows the receiver's public key; messages without it are not
//! answered. Under load a message also needs mac2, which proves that the sender receives at its
//! source address. mac2 is keyed with a cookie, which only a [`CookieChecker::create_reply`] to
//! that address contains.
//!
//! ```text
//! sender: message, CookieJar::stamp  --->  CookieChecker::admit, under load, no mac2: NeedsCookie
//! CookieJar::consume_reply            <---  CookieChecker::create_reply
//! sender: message, CookieJar::stamp  --->  CookieChecker::admit: Process, at a limited rate
//! ```

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use blake2::digest::{FixedOutput, Mac};
use chacha20poly1305::{AeadInPlace, KeyInit, XChaCha20Poly1305, XNonce};
use zeroize::Zeroizing;

use crate::constants::*;
use crate::fields::{get_u32, put_u32};
use crate::keys::{Identity, PublicKey};
use crate::mac::{MacKey, hash, keyed, verify_mac1};
use crate::protocol::Protocol;
use crate::rate_limiter::{RateLimiter, ReplyLimiter, Reserved};
use crate::rng::Rng;
use crate::time::Instant;

/// Decision about a received handshake message, before any Diffie-Hellman.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Process it.
    Process,
    /// Under load, and mac2 is missing or stale: answer with a cookie reply and drop the message.
    NeedsCookie,
    /// mac1 is wrong, or this is no handshake message: drop it unanswered.
    InvalidMac1,
    /// Under load, and the source has used up its share of handshakes or, without a valid mac2, of
    /// cookie replies: drop the message unanswered.
    RateLimited,
}

/// The receiver's side: checks incoming handshake messages and issues cookies.
pub struct CookieChecker {
    protocol: Protocol,
    mac1_key: MacKey,
    cookie_key: Zeroizing<[u8; 32]>,
    /// The paper's R_m, replaced once it is older than [`COOKIE_REFRESH_TIME`].
    secret: Option<(Zeroizing<[u8; 32]>, Instant)>,
    limiter: RateLimiter,
    replies: ReplyLimiter,
    reserved: Reserved,
}

impl CookieChecker {
    /// Creates the checker for messages to `identity`.
    pub fn new(protocol: Protocol, identity: &Identity) -> Self {
        CookieChecker {
            protocol,
            mac1_key: *identity.mac1_key(protocol),
            cookie_key: Zeroizing::new(hash(protocol.cookie_label(), identity.public().as_bytes())),
            secret: None,
            limiter: RateLimiter::default(),
            replies: ReplyLimiter::default(),
            reserved: Reserved::default(),
        }
    }

    /// Shares reserved for the endpoints of live sessions, so that a flood from other sources does
    /// not delay their handshakes.
    pub fn reserved(&mut self) -> &mut Reserved {
        &mut self.reserved
    }

    /// Checks an initiation or a response from `source`. `under_load` is called only for messages
    /// with a valid mac1 (see [`crate::rate_limiter::LoadMeter`]), so senders that do not know this
    /// host's public key cannot add to the load.
    pub fn admit(
        &mut self,
        message: &[u8],
        source: SocketAddr,
        under_load: impl FnOnce() -> bool,
        now: Instant,
        rng: &mut dyn Rng,
    ) -> Admission {
        if message.len() < RESPONSE_LEN || !verify_mac1(&self.mac1_key, message) {
            return Admission::InvalidMac1;
        }
        if !under_load() {
            return Admission::Process;
        }
        let (covered, mac2) = message.split_at(message.len() - MAC_LEN);
        // A sender without a cookie sends zeros (whitepaper 5.4.4), which need no check in a flood.
        let has_cookie = mac2 != [0; MAC_LEN] && {
            let cookie = self.cookie(source, now, rng);
            keyed(&*cookie, &[covered]).verify_slice(mac2).is_ok()
        };
        if !has_cookie {
            let reserved = self.reserved.allow_reply(source, now);
            let allowed = reserved.unwrap_or_else(|| {
                let secret = fresh(&mut self.secret, now, rng);
                self.replies.allow(source, secret, now)
            });
            return if allowed {
                Admission::NeedsCookie
            } else {
                Admission::RateLimited
            };
        }
        let reserved = self.reserved.allow_handshake(source, now);
        if reserved.unwrap_or_else(|| self.limiter.allow(source, now)) {
            Admission::Process
        } else {
            Admission::RateLimited
        }
    }

    /// Creates the cookie reply to a message for which [`admit`](Self::admit) returned
    /// `NeedsCookie`.
    pub fn create_reply(
        &mut self,
        message: &[u8],
        source: SocketAddr,
        now: Instant,
        rng: &mut dyn Rng,
    ) -> Option<[u8; COOKIE_REPLY_LEN]> {
        let mac1_at = message.len().checked_sub(MACS_LEN).filter(|&at| at >= 8)?;
        let mac1 = &message[mac1_at..mac1_at + MAC_LEN];
        let cookie = self.cookie(source, now, rng);

        let mut reply = [0; COOKIE_REPLY_LEN];
        put_u32(&mut reply, 0, u32::from(self.protocol.cookie_reply_type()));
        put_u32(
            &mut reply,
            RECEIVER_INDEX_OFFSET,
            get_u32(message, SENDER_INDEX_OFFSET),
        );
        let (nonce, sealed) = reply[8..].split_at_mut(COOKIE_NONCE_LEN);
        rng.fill(nonce);
        let (text, tag) = sealed.split_at_mut(MAC_LEN);
        text.copy_from_slice(&*cookie);
        let computed = XChaCha20Poly1305::new((&*self.cookie_key).into())
            .encrypt_in_place_detached(XNonce::from_slice(nonce), mac1, text)
            .ok()?;
        tag.copy_from_slice(&computed);
        Some(reply)
    }

    /// The cookie of `source`: MAC(secret, address || port). A v4-mapped address counts as IPv4.
    fn cookie(
        &mut self,
        source: SocketAddr,
        now: Instant,
        rng: &mut dyn Rng,
    ) -> Zeroizing<[u8; MAC_LEN]> {
        let secret = fresh(&mut self.secret, now, rng);
        let port = source.port().to_be_bytes();
        let mac = match source.ip().to_canonical() {
            IpAddr::V4(address) => keyed(secret, &[&address.octets(), &port]),
            IpAddr::V6(address) => keyed(secret, &[&address.octets(), &port]),
        };
        Zeroizing::new(mac.finalize_fixed().into())
    }
}

/// Returns the current secret, replaced if it is too old.
fn fresh<'a>(
    secret: &'a mut Option<(Zeroizing<[u8; 32]>, Instant)>,
    now: Instant,
    rng: &mut dyn Rng,
) -> &'a [u8; 32] {
    let old = |(_, birth): &(_, Instant)| birth.has_expired(COOKIE_REFRESH_TIME, now);
    if secret.as_ref().is_some_and(old) {
        *secret = None;
    }
    let draw = || {
        let mut fresh = Zeroizing::new([0; 32]);
        rng.fill(&mut *fresh);
        (fresh, now)
    };
    &secret.get_or_insert_with(draw).0
}

impl fmt::Debug for CookieChecker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CookieChecker")
            .field("protocol", &self.protocol)
            .finish_non_exhaustive()
    }
}

/// Why a cookie reply was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CookieError {
    /// Not a cookie reply of this protocol.
    #[error("not a cookie reply: wrong size or message type")]
    NotACookieReply,
    /// No sent message waits for a cookie.
    #[error("cookie reply without a pending handshake message")]
    Unsolicited,
    /// It does not authenticate against the last mac1 sent.
    #[error("cookie reply does not answer the last handshake message sent")]
    Authentication,
}

/// The sender's side, one per peer: stores the cookie that the peer issued.
pub struct CookieJar {
    protocol: Protocol,
    cookie_key: Zeroizing<[u8; 32]>,
    /// mac1 of the last message sent, which a cookie reply must answer. The first reply takes it.
    last_mac1: Option<[u8; MAC_LEN]>,
    cookie: Option<(Zeroizing<[u8; MAC_LEN]>, Instant)>,
}

impl CookieJar {
    /// Creates the jar for messages to `remote`.
    pub fn new(protocol: Protocol, remote: &PublicKey) -> Self {
        CookieJar {
            protocol,
            cookie_key: Zeroizing::new(hash(protocol.cookie_label(), remote.as_bytes())),
            last_mac1: None,
            cookie: None,
        }
    }

    /// Completes an initiation or a response before sending: writes mac2 if there is a fresh
    /// cookie, and remembers mac1. Call once per message, after it was written.
    pub fn stamp(&mut self, message: &mut [u8], now: Instant) {
        let Some(mac1_at) = message.len().checked_sub(MACS_LEN) else {
            return;
        };
        let mut mac1 = [0; MAC_LEN];
        mac1.copy_from_slice(&message[mac1_at..mac1_at + MAC_LEN]);
        self.last_mac1 = Some(mac1);

        let lifetime = COOKIE_REFRESH_TIME - COOKIE_LATENCY;
        self.cookie = self
            .cookie
            .take()
            .filter(|(_, birth)| !birth.has_expired(lifetime, now));
        if let Some((cookie, _)) = &self.cookie {
            let (covered, mac2) = message.split_at_mut(mac1_at + MAC_LEN);
            mac2.copy_from_slice(&keyed(&**cookie, &[covered]).finalize_fixed());
        }
    }

    /// Stores the cookie of a reply. The next message to the peer carries mac2; a cookie triggers
    /// no early retransmission (paper 6.6).
    pub fn consume_reply(&mut self, message: &[u8], now: Instant) -> Result<(), CookieError> {
        let expected = u32::from(self.protocol.cookie_reply_type());
        if message.len() != COOKIE_REPLY_LEN || get_u32(message, 0) != expected {
            return Err(CookieError::NotACookieReply);
        }
        let mac1 = self.last_mac1.ok_or(CookieError::Unsolicited)?;
        let (nonce, sealed) = message[8..].split_at(COOKIE_NONCE_LEN);
        let (text, tag) = sealed.split_at(MAC_LEN);
        let mut cookie = Zeroizing::new([0; MAC_LEN]);
        cookie.copy_from_slice(text);
        XChaCha20Poly1305::new((&*self.cookie_key).into())
            .decrypt_in_place_detached(XNonce::from_slice(nonce), &mac1, &mut *cookie, tag.into())
            .map_err(|_| CookieError::Authentication)?;
        self.last_mac1 = None;
        self.cookie = Some((cookie, now));
        Ok(())
    }
}

impl fmt::Debug for CookieJar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CookieJar")
            .field("protocol", &self.protocol)
            .field("has_cookie", &self.cookie.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
