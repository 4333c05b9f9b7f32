//! Checks of a path: PROBE frames whose acknowledgement proves that the peer receives at an address.

use crate::native::frame::PROBE_LEN;
use crate::native::path_mtu::BASE;
use crate::native::stamp::RECORD_OVERHEAD;
use crate::rng::Rng;
use crate::token_bucket::TokenBucket;

/// Minimum size of a check in UDP payload bytes. The maximum is below the size of any MTU probe.
const LEAST_CHECK: u16 = (RECORD_OVERHEAD + PROBE_LEN) as u16;

/// Maximum size of a short check.
pub(crate) const LARGEST_SHORT: u16 = LEAST_CHECK + 12;

/// Limit of acknowledgements of checks that were never sent: 32 a minute. It belongs to the peer and
/// not to an address, because a peer that guesses checks chooses the addresses.
pub(crate) type UnknownAcks = TokenBucket<32, 1875>;

/// A check: a PROBE with this number and size. Both are random, so that only a receiver knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Probe number.
    pub id: u16,
    /// Size in bytes of UDP payload.
    pub size: u16,
}

impl Check {
    pub(crate) fn random(rng: &mut dyn Rng) -> Check {
        let mut bytes = [0; 4];
        rng.fill(&mut bytes);
        let [a, b, c, d] = bytes;
        let sizes = BASE - LEAST_CHECK;
        Check {
            id: u16::from_le_bytes([a, b]),
            size: LEAST_CHECK + u16::from_le_bytes([c, d]) % sizes,
        }
    }

    /// A short check, for an address with little credit.
    pub(crate) fn short(rng: &mut dyn Rng) -> Check {
        let Check { id, size } = Check::random(rng);
        Check {
            id,
            size: LEAST_CHECK + size % (LARGEST_SHORT - LEAST_CHECK + 1),
        }
    }

    /// A check of minimum size, for use in large numbers. Its acknowledgement proves nothing.
    pub(crate) fn least(rng: &mut dyn Rng) -> Check {
        Check {
            size: LEAST_CHECK,
            ..Check::random(rng)
        }
    }
}
