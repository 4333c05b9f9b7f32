//! Allowed IPs: the peer that an inner address belongs to. Outbound it is the route to the peer;
//! inbound it shows that the peer may send from an address. Looked up once per packet in each
//! direction.
//!
//! Longest-prefix match is `prefix-trie`'s. The prefixes of each peer are also kept separately, so
//! that listing and removing a peer does not walk the prefixes of ten thousand others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use prefix_trie::PrefixMap;

use crate::indices::PeerId;

/// The prefixes of all peers.
#[derive(Clone, Default)]
pub struct AllowedIps {
    v4: PrefixMap<(u32, u8), PeerId>,
    v6: PrefixMap<(u128, u8), PeerId>,
    by_peer: BTreeMap<PeerId, BTreeSet<IpNet>>,
    /// Number of changes, by which a [`LookupCache`] detects that it is stale.
    generation: u64,
}

/// The result of the last lookup. One per table and direction.
///
/// A bundle of small packets looks up the same address many times. At 10,000 prefixes a lookup
/// costs about 25 ns (IPv4) to 95 ns (IPv6), more than opening the packet's share of the record.
#[derive(Clone, Copy, Debug, Default)]
pub struct LookupCache {
    last: Option<(u64, IpAddr, Option<PeerId>)>,
}

impl AllowedIps {
    /// Assigns the prefix to `peer`; host bits are ignored. Returns the previous owner, if another
    /// peer had it: a prefix has one owner, the last, as with `wg set`.
    pub fn insert(&mut self, prefix: IpNet, peer: PeerId) -> Option<PeerId> {
        self.generation += 1;
        let prefix = prefix.trunc();
        let previous = match prefix {
            IpNet::V4(net) => self
                .v4
                .insert((net.addr().to_bits(), net.prefix_len()), peer),
            IpNet::V6(net) => self
                .v6
                .insert((net.addr().to_bits(), net.prefix_len()), peer),
        };
        let robbed = previous.filter(|&previous| previous != peer);
        if let Some(robbed) = robbed {
            self.forget(prefix, robbed);
        }
        self.by_peer.entry(peer).or_default().insert(prefix);
        robbed
    }

    /// Removes the prefix from `peer`. Returns false if another peer owns it.
    pub fn remove(&mut self, prefix: IpNet, peer: PeerId) -> bool {
        let prefix = prefix.trunc();
        let had = self
            .by_peer
            .get(&peer)
            .is_some_and(|prefixes| prefixes.contains(&prefix));
        if had {
            self.generation += 1;
            self.unlink(prefix);
            self.forget(prefix, peer);
        }
        had
    }

    /// Removes all prefixes of `peer`.
    pub fn remove_peer(&mut self, peer: PeerId) {
        self.generation += 1;
        for prefix in self.by_peer.remove(&peer).unwrap_or_default() {
            self.unlink(prefix);
        }
    }

    /// Returns the owner of the longest prefix that contains `address`.
    #[inline]
    pub fn lookup(&self, address: IpAddr) -> Option<PeerId> {
        match address {
            IpAddr::V4(address) => self
                .v4
                .get_lpm(&(address.to_bits(), 32))
                .map(|(_, peer)| *peer),
            IpAddr::V6(address) => self
                .v6
                .get_lpm(&(address.to_bits(), 128))
                .map(|(_, peer)| *peer),
        }
    }

    /// Like [`lookup`](Self::lookup), and stores the result in `cache`.
    #[inline]
    pub fn lookup_cached(&self, address: IpAddr, cache: &mut LookupCache) -> Option<PeerId> {
        match cache.last {
            Some((generation, last, peer)) if last == address && generation == self.generation => {
                peer
            }
            _ => {
                let peer = self.lookup(address);
                cache.last = Some((self.generation, address, peer));
                peer
            }
        }
    }

    /// The prefixes of `peer`, IPv4 first, ordered by address.
    pub fn iter_peer(&self, peer: PeerId) -> impl Iterator<Item = IpNet> {
        self.by_peer.get(&peer).into_iter().flatten().copied()
    }

    /// Number of prefixes of all peers.
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// Whether no peer has a prefix.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn unlink(&mut self, prefix: IpNet) {
        match prefix {
            IpNet::V4(net) => {
                self.v4.remove(&(net.addr().to_bits(), net.prefix_len()));
            }
            IpNet::V6(net) => {
                self.v6.remove(&(net.addr().to_bits(), net.prefix_len()));
            }
        }
    }

    fn forget(&mut self, prefix: IpNet, peer: PeerId) {
        if let Some(prefixes) = self.by_peer.get_mut(&peer) {
            prefixes.remove(&prefix);
            if prefixes.is_empty() {
                self.by_peer.remove(&peer);
            }
        }
    }
}

impl std::fmt::Debug for AllowedIps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(&self.by_peer).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::hint::black_box;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const A: PeerId = PeerId(1);
    const B: PeerId = PeerId(2);

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_longest_prefix_wins() {
        let mut ips = AllowedIps::default();
        ips.insert(net("0.0.0.0/0"), A);
        ips.insert(net("10.1.0.0/16"), B);
        ips.insert(net("10.1.2.3/32"), A);
        assert_eq!(ips.lookup(ip("10.1.2.3")), Some(A));
        assert_eq!(ips.lookup(ip("10.1.2.4")), Some(B));
        assert_eq!(ips.lookup(ip("10.2.0.0")), Some(A));
        assert_eq!(ips.lookup(ip("::1")), None);
    }

    #[test]
    fn a_prefix_assigned_again_moves() {
        let mut ips = AllowedIps::default();
        assert_eq!(ips.insert(net("10.0.0.0/8"), A), None);
        assert_eq!(ips.insert(net("10.9.9.9/8"), B), Some(A));
        assert_eq!(ips.lookup(ip("10.1.1.1")), Some(B));
        assert_eq!(ips.iter_peer(A).count(), 0);
        assert_eq!(ips.insert(net("10.0.0.0/8"), B), None);
    }

    #[test]
    fn only_the_owner_loses_a_prefix() {
        let mut ips = AllowedIps::default();
        ips.insert(net("10.0.0.0/8"), A);
        assert!(!ips.remove(net("10.0.0.0/8"), B));
        assert_eq!(ips.lookup(ip("10.0.0.1")), Some(A));
        assert!(ips.remove(net("10.0.0.0/8"), A));
        assert_eq!(ips.lookup(ip("10.0.0.1")), None);
    }

    #[test]
    fn a_peers_prefixes_are_listed_in_order() {
        let mut ips = AllowedIps::default();
        for text in ["fd00::/8", "10.0.0.0/8", "::/0", "1.2.3.4/32"] {
            ips.insert(net(text), A);
        }
        let listed: Vec<_> = ips.iter_peer(A).map(|net| net.to_string()).collect();
        assert_eq!(listed, ["1.2.3.4/32", "10.0.0.0/8", "::/0", "fd00::/8"]);
    }

    /// The reference: a linear search in a list of prefixes.
    #[derive(Default)]
    struct Model(Vec<(IpNet, PeerId)>);

    impl Model {
        fn insert(&mut self, prefix: IpNet, peer: PeerId) {
            self.0.retain(|(known, _)| *known != prefix.trunc());
            self.0.push((prefix.trunc(), peer));
        }

        fn lookup(&self, address: IpAddr) -> Option<PeerId> {
            let covering = self
                .0
                .iter()
                .filter(|(prefix, _)| prefix.contains(&address));
            covering
                .max_by_key(|(prefix, _)| prefix.prefix_len())
                .map(|(_, peer)| *peer)
        }
    }

    /// Addresses with few distinct bits, so that prefixes nest and repeat.
    fn address() -> impl Strategy<Value = IpAddr> {
        let v4 = (0..4u32, 0..4u32, 0..4u32).prop_map(|(a, b, c)| a << 30 | b << 15 | c);
        let v6 = (0..4u128, 0..4u128, 0..4u128).prop_map(|(a, b, c)| a << 126 | b << 63 | c);
        prop_oneof![
            v4.prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits))),
            v6.prop_map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits))),
        ]
    }

    fn prefix() -> impl Strategy<Value = IpNet> {
        (address(), 0..=128u8).prop_map(|(address, len)| {
            IpNet::new(address, if address.is_ipv4() { len / 4 } else { len }).unwrap()
        })
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(IpNet, PeerId),
        Remove(IpNet, PeerId),
        RemovePeer(PeerId),
        Lookup(IpAddr),
        LookupCached(IpAddr),
    }

    fn step() -> impl Strategy<Value = Step> {
        let peer = || (0..4u32).prop_map(PeerId);
        prop_oneof![
            6 => (prefix(), peer()).prop_map(|(prefix, peer)| Step::Insert(prefix, peer)),
            1 => (prefix(), peer()).prop_map(|(prefix, peer)| Step::Remove(prefix, peer)),
            1 => peer().prop_map(Step::RemovePeer),
            4 => address().prop_map(Step::Lookup),
            // Few addresses, so that the cache is hit.
            8 => (0..2u32).prop_map(|bits| Step::LookupCached(Ipv4Addr::from_bits(bits).into())),
        ]
    }

    proptest! {
        #[test]
        fn agrees_with_a_linear_search(steps in prop::collection::vec(step(), 1..200)) {
            let mut ips = AllowedIps::default();
            let mut model = Model::default();
            let mut cache = LookupCache::default();
            for step in steps {
                match step {
                    Step::Insert(prefix, peer) => {
                        ips.insert(prefix, peer);
                        model.insert(prefix, peer);
                    }
                    Step::Remove(prefix, peer) => {
                        ips.remove(prefix, peer);
                        model.0.retain(|known| *known != (prefix.trunc(), peer));
                    }
                    Step::RemovePeer(peer) => {
                        ips.remove_peer(peer);
                        model.0.retain(|(_, owner)| *owner != peer);
                    }
                    Step::Lookup(address) => {
                        prop_assert_eq!(ips.lookup(address), model.lookup(address), "{}", address);
                    }
                    Step::LookupCached(address) => {
                        let found = ips.lookup_cached(address, &mut cache);
                        prop_assert_eq!(found, model.lookup(address), "{}", address);
                    }
                }
                prop_assert_eq!(ips.len(), model.0.len());
            }
            for peer in (0..4).map(PeerId) {
                let mut expected: Vec<_> =
                    model.0.iter().filter(|(_, owner)| *owner == peer).map(|(net, _)| *net).collect();
                expected.sort_unstable();
                prop_assert_eq!(ips.iter_peer(peer).collect::<Vec<_>>(), expected);
            }
        }
    }

    /// Prints the cost of a lookup: `cargo test --release -p seikan-proto lookup_cost -- --ignored
    /// --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    #[expect(clippy::disallowed_methods, reason = "a measurement reads the clock")]
    fn lookup_cost_with_ten_thousand_prefixes() {
        let mut ips = AllowedIps::default();
        for i in 0..10_000u32 {
            ips.insert(
                IpNet::new(Ipv4Addr::from_bits(10 << 24 | i << 8).into(), 24).unwrap(),
                PeerId(i),
            );
            let v6 = 0xfd << 120 | u128::from(i) << 64;
            ips.insert(
                IpNet::new(Ipv6Addr::from_bits(v6).into(), 64).unwrap(),
                PeerId(i),
            );
        }
        let time = |name: &str, address: &dyn Fn(u32) -> IpAddr| {
            const ROUNDS: u32 = 4_000_000;
            let addresses: Vec<_> = (0..1 << 16).map(address).collect();
            let start = std::time::Instant::now();
            for i in 0..ROUNDS {
                black_box(ips.lookup(black_box(addresses[i as usize & 0xffff])));
            }
            let nanos = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
            eprintln!("{name}: {nanos:.1} ns per lookup");
        };
        let one = black_box(IpAddr::V6(Ipv6Addr::from_bits((0xfd << 120) | 7)));
        let mut cache = LookupCache::default();
        let start = std::time::Instant::now();
        (0..4_000_000).for_each(|_| {
            black_box(ips.lookup_cached(black_box(one), &mut cache));
        });
        eprintln!(
            "IPv6, one flow, cached: {:.1} ns",
            start.elapsed().as_nanos() as f64 / 4e6
        );
        let scatter = |i: u32| i.wrapping_mul(2_654_435_761) % 10_000;
        let v4 = |i: u32| IpAddr::V4(Ipv4Addr::from_bits(10 << 24 | i << 8 | 7));
        let v6 = |i: u32| IpAddr::V6(Ipv6Addr::from_bits(0xfd << 120 | u128::from(i) << 64 | 7));
        time("IPv4, one flow", &|_| v4(5));
        time("IPv4, scattered", &|i| v4(scatter(i)));
        time("IPv6, one flow", &|_| v6(5));
        time("IPv6, scattered", &|i| v6(scatter(i)));
    }
}
