//! MAC addresses behind the peers of a tunnel in Ethernet mode, learned from the sources of their
//! frames, as a bridge does (IEEE 802.1Q, section 8.7; VLANs share one table).
//!
//! Peers are authenticated but may be hostile. A peer fills only its own share of the table, cannot
//! use the address of this host's device, and cannot take an address that another peer is using.

use crate::indices::PeerId;
use crate::time::Instant;
use seikan_observe::DropReason;
use seikan_wire::ethernet::Mac;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time for which an address is remembered after its last frame (the default of the Linux bridge).
const AGEING: Duration = Duration::from_secs(300);
/// Time for which an address stays with a peer that no longer uses it, although another peer does.
const HOLD: Duration = Duration::from_secs(5);
/// Maximum number of addresses of each peer. Frames from further ones are dropped.
const MAX_PER_PEER: usize = 1024;
/// Minimum time between two updates of an address, and between two searches for old ones.
const PAUSE: Duration = Duration::from_secs(1);

/// The table.
#[derive(Debug)]
pub struct MacTable {
    /// Address of this host's device.
    own: Option<Mac>,
    /// Whether addresses are learned: only if there are several peers.
    learns: bool,
    entries: BTreeMap<Mac, Entry>,
    /// Number of entries of each peer that has some.
    counts: BTreeMap<PeerId, usize>,
    /// The entry that was updated last.
    latest: Option<(Mac, Entry)>,
    /// When old entries were last removed to make space.
    purged: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    peer: PeerId,
    seen: Instant,
}

impl Default for MacTable {
    fn default() -> MacTable {
        MacTable {
            own: None,
            learns: false,
            entries: BTreeMap::new(),
            counts: BTreeMap::new(),
            latest: None,
            purged: Instant::BOOT,
        }
    }
}

impl MacTable {
    /// Sets the address of this host's device.
    pub fn set_own(&mut self, own: Mac) {
        self.own = Some(own);
        self.latest = None;
    }

    /// Sets whether addresses are learned: with one peer there is no need.
    pub fn set_learns(&mut self, learns: bool) {
        self.learns = learns;
        self.latest = None;
    }

    /// Checks the source of a frame of `peer`, and learns it.
    #[inline]
    pub fn learn(&mut self, source: Mac, peer: PeerId, now: Instant) -> Result<(), DropReason> {
        if let Some((mac, entry)) = &self.latest
            && *mac == source
            && entry.peer == peer
            && now.duration_since(entry.seen) < PAUSE
        {
            return Ok(());
        }
        self.update(source, peer, now)
    }

    fn update(&mut self, source: Mac, peer: PeerId, now: Instant) -> Result<(), DropReason> {
        if source.is_multicast() || source == Mac::default() {
            return Err(DropReason::BadEthernet);
        }
        if self.own == Some(source) {
            return Err(DropReason::MacConflict);
        }
        let entry = Entry { peer, seen: now };
        if !self.learns {
            self.latest = Some((source, entry));
            return Ok(());
        }
        match self.entries.get_mut(&source) {
            Some(known) if known.peer == peer => *known = entry,
            Some(known) if now.duration_since(known.seen) < HOLD => {
                return Err(DropReason::MacConflict);
            }
            _ => {
                // Frames to an unknown address go to all peers, so that its owner would make this
                // host send more than it receives.
                if !self.has_space(peer, now) {
                    return Err(DropReason::MacConflict);
                }
                if let Some(before) = self.entries.insert(source, entry) {
                    forget(&mut self.counts, before.peer);
                }
                *self.counts.entry(peer).or_default() += 1;
            }
        }
        self.latest = Some((source, entry));
        Ok(())
    }

    /// Returns the peer behind an address.
    pub fn lookup(&self, destination: Mac, now: Instant) -> Option<PeerId> {
        let entry = self.entries.get(&destination)?;
        (now.duration_since(entry.seen) < AGEING).then_some(entry.peer)
    }

    /// Forgets the addresses of a peer.
    pub fn remove_peer(&mut self, peer: PeerId) {
        self.entries.retain(|_, entry| entry.peer != peer);
        self.counts.remove(&peer);
        self.latest = None;
    }

    /// Number of addresses in the table.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no address in the table.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a peer may have one more address. If not, old ones are removed first, which takes
    /// time and so is not done for every frame.
    fn has_space(&mut self, peer: PeerId, now: Instant) -> bool {
        let count = |table: &MacTable| table.counts.get(&peer).copied().unwrap_or(0);
        if count(self) >= MAX_PER_PEER && now.duration_since(self.purged) >= PAUSE {
            self.purged = now;
            let MacTable {
                entries, counts, ..
            } = self;
            entries.retain(|_, entry| {
                let stays = now.duration_since(entry.seen) < AGEING;
                if !stays {
                    forget(counts, entry.peer);
                }
                stays
            });
        }
        count(self) < MAX_PER_PEER
    }
}

/// Counts one address of a peer less.
fn forget(counts: &mut BTreeMap<PeerId, usize>, peer: PeerId) {
    if let Some(count) = counts.get_mut(&peer) {
        *count -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PeerId = PeerId(0);
    const B: PeerId = PeerId(1);

    fn at(seconds: u64) -> Instant {
        Instant::BOOT + Duration::from_secs(1000 + seconds)
    }

    /// The `n`-th address of one interface.
    fn mac(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        Mac([2, 0, a, b, c, d])
    }

    fn table() -> MacTable {
        let mut table = MacTable::default();
        table.set_learns(true);
        table
    }

    #[test]
    fn an_address_is_found_for_five_minutes_after_its_last_frame() {
        let mut table = table();
        for seconds in [0, 100] {
            assert_eq!(table.learn(mac(1), A, at(seconds)), Ok(()));
        }
        assert_eq!(table.lookup(mac(1), at(399)), Some(A));
        assert_eq!(table.lookup(mac(1), at(400)), None);
        assert_eq!(table.lookup(mac(2), at(100)), None);
    }

    #[test]
    fn an_address_in_use_is_not_taken_over_and_an_idle_one_moves() {
        let mut table = table();
        table.learn(mac(1), A, at(0)).unwrap();
        assert_eq!(table.learn(mac(1), B, at(4)), Err(DropReason::MacConflict));
        assert_eq!(table.lookup(mac(1), at(4)), Some(A));
        assert_eq!(table.learn(mac(1), B, at(5)), Ok(()));
        assert_eq!(table.lookup(mac(1), at(5)), Some(B));
    }

    #[test]
    fn nobody_sends_from_this_hosts_address_or_from_that_of_a_group() {
        for learns in [true, false] {
            let mut table = MacTable::default();
            table.set_learns(learns);
            table.set_own(mac(7));
            let conflict = Err(DropReason::MacConflict);
            assert_eq!(table.learn(mac(7), A, at(0)), conflict);
            for source in [Mac::BROADCAST, Mac([3, 0, 0, 0, 0, 1]), Mac::default()] {
                assert_eq!(table.learn(source, A, at(0)), Err(DropReason::BadEthernet));
            }
            assert!(table.is_empty());
        }
    }

    #[test]
    fn a_peer_fills_only_its_own_share() {
        let mut table = table();
        for n in 0..MAX_PER_PEER as u32 {
            assert_eq!(table.learn(mac(n), A, at(0)), Ok(()));
        }
        let more = table.learn(mac(5000), A, at(0));
        assert_eq!(more, Err(DropReason::MacConflict));
        assert_eq!(table.len(), MAX_PER_PEER);
        table.learn(mac(9999), B, at(0)).unwrap();
        assert_eq!(table.lookup(mac(9999), at(0)), Some(B));
        // Its old addresses make space for new ones.
        table.learn(mac(6000), A, at(300)).unwrap();
        assert_eq!(table.lookup(mac(6000), at(300)), Some(A));
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_removed_peer_has_no_addresses() {
        let mut table = table();
        table.learn(mac(1), A, at(0)).unwrap();
        table.learn(mac(2), B, at(0)).unwrap();
        table.remove_peer(A);
        assert_eq!(table.lookup(mac(1), at(0)), None);
        assert_eq!(table.lookup(mac(2), at(0)), Some(B));
        assert_eq!(table.learn(mac(1), B, at(0)), Ok(()));
    }
}
