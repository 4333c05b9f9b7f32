//! Receiver indices: the table from the index in a datagram to its session, looked up for every
//! datagram.
//!
//! The table has a power of two of slots, and an entry is in the slot given by the low bits of its
//! index. This host chooses the indices, so a random index whose slot is taken is drawn again. A
//! lookup is one array access and one comparison, without hashing, probing or collisions, and
//! nobody else can steer entries into one slot. Iteration is in the order of the slots.

use crate::rng::Rng;

/// A peer, by its position in the tunnel's table of peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

/// Slots of a new table.
const INITIAL_SLOTS: usize = 16;

/// The table is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no free receiver index: {capacity} sessions and handshakes are in use")]
pub struct TableFull {
    /// Maximum number of entries.
    pub capacity: usize,
}

/// Random indices and their values, such as a peer and one of its sessions.
#[derive(Clone, Debug)]
pub struct IndexTable<T> {
    slots: Vec<Option<(u32, T)>>,
    len: usize,
    capacity: usize,
    /// Bits of an index.
    mask: u32,
}

impl<T> IndexTable<T> {
    /// Creates a table for at most `capacity` entries, with indices up to `mask`, which is one less
    /// than a power of two. It grows as it fills, and is never more than half full: the capacity is
    /// at most a quarter of the indices.
    pub fn new(capacity: usize, mask: u32) -> Self {
        let slots = std::iter::repeat_with(|| None)
            .take(INITIAL_SLOTS)
            .collect();
        IndexTable {
            slots,
            len: 0,
            capacity: capacity.min(mask as usize / 4),
            mask,
        }
    }

    /// Inserts `value` under a new random index.
    pub fn insert(&mut self, value: T, rng: &mut dyn Rng) -> Result<u32, TableFull> {
        if self.len >= self.capacity {
            return Err(TableFull {
                capacity: self.capacity,
            });
        }
        // At most half full: two draws on average.
        if 2 * (self.len + 1) > self.slots.len() {
            self.grow();
        }
        loop {
            let index = rng.next_u32() & self.mask;
            let slot = self.slot(index);
            if self.slots[slot].is_none() {
                self.slots[slot] = Some((index, value));
                self.len += 1;
                return Ok(index);
            }
        }
    }

    /// Returns the value of `index`.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        match &self.slots[self.slot(index)] {
            Some((found, value)) if *found == index => Some(value),
            _ => None,
        }
    }

    /// Returns the value of `index` for modification.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        let slot = self.slot(index);
        match &mut self.slots[slot] {
            Some((found, value)) if *found == index => Some(value),
            _ => None,
        }
    }

    /// Removes `index` and returns its value.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let slot = self.slot(index);
        let (_, value) = self.slots[slot].take_if(|(found, _)| *found == index)?;
        self.len -= 1;
        Some(value)
    }

    /// All entries, in an order that depends only on their indices.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.slots
            .iter()
            .flatten()
            .map(|(index, value)| (*index, value))
    }

    /// Number of entries.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the table is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn slot(&self, index: u32) -> usize {
        index as usize & (self.slots.len() - 1)
    }

    /// Doubles the slots. Entries cannot collide: their indexes differ in the bits used before.
    fn grow(&mut self) {
        let doubled = std::iter::repeat_with(|| None)
            .take(2 * self.slots.len())
            .collect();
        for entry in std::mem::replace(&mut self.slots, doubled)
            .into_iter()
            .flatten()
        {
            let slot = self.slot(entry.0);
            self.slots[slot] = Some(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::testing::{Scripted, Seeded};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn an_index_with_a_taken_slot_is_drawn_again() {
        let mut rng = Scripted(
            [5u32, 5, 21, 6]
                .iter()
                .flat_map(|i| i.to_le_bytes())
                .collect(),
        );
        let mut table = IndexTable::new(100, u32::MAX);
        assert_eq!(table.insert('a', &mut rng), Ok(5));
        assert_eq!(table.insert('b', &mut rng), Ok(6));
    }

    #[test]
    fn an_index_that_only_shares_a_slot_finds_nothing() {
        let mut table = IndexTable::new(100, u32::MAX);
        table
            .insert('a', &mut Scripted(5u32.to_le_bytes().to_vec()))
            .unwrap();
        assert_eq!(table.get(5), Some(&'a'));
        assert_eq!(table.get(5 + INITIAL_SLOTS as u32), None);
        assert_eq!(table.get_mut(5 + INITIAL_SLOTS as u32), None);
        assert_eq!(table.remove(5 + INITIAL_SLOTS as u32), None);
    }

    #[test]
    fn indices_have_the_bits_of_the_mask() {
        let mut table = IndexTable::new(100, 0xff_ffff);
        let mut rng = Scripted(0xffee_ddccu32.to_le_bytes().to_vec());
        assert_eq!(table.insert('a', &mut rng), Ok(0xee_ddcc));
        assert_eq!(table.get(0xffee_ddcc), None);
    }

    #[test]
    fn the_table_is_bounded() {
        let mut table = IndexTable::new(1000, u32::MAX);
        let mut rng = Seeded::new(1);
        let indexes: Vec<u32> = (0..1000)
            .map(|i| table.insert(i, &mut rng).unwrap())
            .collect();
        assert_eq!(table.insert(0, &mut rng), Err(TableFull { capacity: 1000 }));
        table.remove(indexes[0]);
        assert!(table.insert(0, &mut rng).is_ok());
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec((0..3u8, any::<prop::sample::Index>()), 1..300)) {
            let mut rng = Seeded::new(7);
            let mut table = IndexTable::new(1 << 16, (1 << 24) - 1);
            let mut model = BTreeMap::new();
            for (number, (step, choice)) in steps.into_iter().enumerate() {
                if step < 2 || model.is_empty() {
                    let index = table.insert(number, &mut rng).unwrap();
                    prop_assert_eq!(model.insert(index, number), None);
                } else {
                    let index = *choice.get(&model.keys().copied().collect::<Vec<_>>());
                    prop_assert_eq!(table.remove(index), model.remove(&index));
                    prop_assert_eq!(table.get(index), None);
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for (index, value) in &model {
                prop_assert_eq!(table.get(*index), Some(value));
            }
            let mut entries: Vec<_> = table.iter().map(|(index, value)| (index, *value)).collect();
            entries.sort_unstable();
            prop_assert_eq!(entries, model.into_iter().collect::<Vec<_>>());
        }
    }
}
