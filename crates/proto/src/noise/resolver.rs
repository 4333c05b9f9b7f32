//! Primitives for `snow`: ephemeral keys from the caller's random source, and X25519.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use snow::Builder;
use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use x25519_dalek::StaticSecret;
use zeroize::Zeroizing;

use super::{Identity, PROTOCOL_NAME, Protocol};
use crate::constants::KEY_LEN;
use crate::rng::Rng;

/// The next ephemeral private key, shared with the random source inside `snow`, which is built
/// before the caller's source is available. It is taken once; a second draw fails instead of
/// repeating it.
#[derive(Clone, Default)]
pub(super) struct EphemeralSeed(Arc<Mutex<Option<Zeroizing<[u8; KEY_LEN]>>>>);

impl EphemeralSeed {
    /// Creates a handshake builder for `identity` that takes its ephemeral key from this seed.
    pub(super) fn builder<'a>(
        &self,
        protocol: Protocol,
        identity: &'a Identity,
    ) -> Result<Builder<'a>, snow::Error> {
        static PARAMS: LazyLock<NoiseParams> =
            LazyLock::new(|| PROTOCOL_NAME.parse().expect("a pattern that snow knows"));
        Builder::with_resolver(PARAMS.clone(), Box::new(Resolver(self.clone())))
            .prologue(protocol.identifier())?
            .local_private_key(identity.private().as_bytes())
    }

    /// Draws the next ephemeral private key.
    pub(super) fn refill(&self, rng: &mut dyn Rng) {
        let mut seed = Zeroizing::new([0; KEY_LEN]);
        rng.fill(&mut *seed);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(seed);
    }
}

impl Random for EphemeralSeed {
    fn try_fill_bytes(&mut self, destination: &mut [u8]) -> Result<(), snow::Error> {
        let seed = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        match seed {
            Some(seed) if destination.len() == KEY_LEN => {
                destination.copy_from_slice(&*seed);
                Ok(())
            }
            _ => Err(snow::Error::Rng),
        }
    }
}

/// Provides `snow` with these ephemeral keys and Diffie-Hellman, and with `snow`'s own hash and
/// cipher.
pub(super) struct Resolver(pub(super) EphemeralSeed);

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(self.0.clone()))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        match choice {
            DHChoice::Curve25519 => Some(Box::<X25519>::default()),
            _ => None,
        }
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

/// X25519 for `snow`. The library's own version keeps private keys in memory after use and accepts
/// public keys of low order. The kernel's WireGuard refuses such keys, and so does this one.
#[derive(Default)]
struct X25519 {
    private: Zeroizing<[u8; KEY_LEN]>,
    public: [u8; KEY_LEN],
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        KEY_LEN
    }

    fn priv_len(&self) -> usize {
        KEY_LEN
    }

    fn set(&mut self, private: &[u8]) {
        self.private.copy_from_slice(private);
        self.public = x25519_dalek::PublicKey::from(&StaticSecret::from(*self.private)).to_bytes();
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        let mut private = Zeroizing::new([0; KEY_LEN]);
        rng.try_fill_bytes(&mut *private)?;
        self.set(&*private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &*self.private
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let public = public.first_chunk().ok_or(snow::Error::Dh)?;
        let secret = StaticSecret::from(*self.private)
            .diffie_hellman(&x25519_dalek::PublicKey::from(*public));
        if !secret.was_contributory() {
            return Err(snow::Error::Dh);
        }
        out.get_mut(..KEY_LEN)
            .ok_or(snow::Error::Dh)?
            .copy_from_slice(secret.as_bytes());
        Ok(())
    }
}
