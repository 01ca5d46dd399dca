//! `ncclTopoRanks`: the record every rank gathers, 960 bytes little-endian (topology-and-rings 3, INV-44).
//!
//! ```text
//!   0 ringRecv[32]        512 treeToParent[32]   \
//! 128 ringSend[32]        640 treeToChild0[32]    > always zero (INV-41)
//! 256 ringPrev[32]        768 treeToChild1[32]   /
//! 384 ringNext[32]        896 JbogKangaringPath[4][4]
//! ```
//! Ring entries of channels that do not exist are -1, so that every rank finds the number of channels all have.

use super::RingError;
use crate::topo::limits::{MAX_CHANNELS, MAX_KANGA_PATHS};

/// The unit of the all-gather.
pub const TOPO_RANKS_BYTES: usize = 960;

/// One rank's fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopoRanks {
    /// Head of this node's segment: receives from the network.
    pub ring_recv: [i32; MAX_CHANNELS],
    /// Tail of this node's segment: sends to the network.
    pub ring_send: [i32; MAX_CHANNELS],
    /// Rank before this one in the segment, -1 at the head.
    pub ring_prev: [i32; MAX_CHANNELS],
    /// Rank behind this one in the segment, -1 at the tail.
    pub ring_next: [i32; MAX_CHANNELS],
    /// Dead, zero.
    pub tree_to_parent: [i32; MAX_CHANNELS],
    /// Dead, zero.
    pub tree_to_child0: [i32; MAX_CHANNELS],
    /// Dead, zero.
    pub tree_to_child1: [i32; MAX_CHANNELS],
    /// This rank's group on each kangaring path: primary, secondaries, -1. Zero on every family but switch-v1.
    pub jbog_kangaring_path: [[i32; 4]; MAX_KANGA_PATHS],
}

impl TopoRanks {
    /// A fragment without channels.
    pub fn empty() -> Self {
        Self {
            ring_recv: [-1; MAX_CHANNELS],
            ring_send: [-1; MAX_CHANNELS],
            ring_prev: [-1; MAX_CHANNELS],
            ring_next: [-1; MAX_CHANNELS],
            tree_to_parent: [0; MAX_CHANNELS],
            tree_to_child0: [0; MAX_CHANNELS],
            tree_to_child1: [0; MAX_CHANNELS],
            jbog_kangaring_path: [[0; 4]; MAX_KANGA_PATHS],
        }
    }

    /// Channels this fragment has: up to the first without a head.
    pub fn channels(&self) -> usize {
        self.ring_recv.iter().position(|r| *r < 0).unwrap_or(MAX_CHANNELS)
    }

    fn rows(&self) -> [&[i32; MAX_CHANNELS]; 7] {
        [
            &self.ring_recv,
            &self.ring_send,
            &self.ring_prev,
            &self.ring_next,
            &self.tree_to_parent,
            &self.tree_to_child0,
            &self.tree_to_child1,
        ]
    }

    /// The 960 bytes.
    pub fn encode(&self) -> [u8; TOPO_RANKS_BYTES] {
        let mut bytes = [0; TOPO_RANKS_BYTES];
        let values = self.rows().into_iter().flatten().chain(self.jbog_kangaring_path.iter().flatten());
        for (slot, value) in bytes.chunks_exact_mut(4).zip(values) {
            slot.copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads 960 bytes. The values are not judged here; whoever follows them does.
    ///
    /// # Errors
    /// [`RingError::RecordSize`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RingError> {
        if bytes.len() != TOPO_RANKS_BYTES {
            return Err(RingError::RecordSize { found: bytes.len() });
        }
        let word = |i: usize| {
            let at = bytes.get(4 * i..4 * i + 4).and_then(|b| b.try_into().ok());
            i32::from_le_bytes(at.unwrap_or_default())
        };
        let row = |r: usize| std::array::from_fn(|c| word(r * MAX_CHANNELS + c));
        Ok(Self {
            ring_recv: row(0),
            ring_send: row(1),
            ring_prev: row(2),
            ring_next: row(3),
            tree_to_parent: row(4),
            tree_to_child0: row(5),
            tree_to_child1: row(6),
            jbog_kangaring_path: std::array::from_fn(|k| std::array::from_fn(|i| word(7 * MAX_CHANNELS + 4 * k + i))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Proves INV-44.
    #[test]
    fn the_record_is_960_bytes_at_the_recorded_offsets() {
        let mut t = TopoRanks::empty();
        let at = |bytes: &[u8], offset: usize| i32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap());
        for c in 0..32 {
            let c32 = c as i32;
            (t.ring_recv[c], t.ring_send[c], t.ring_prev[c], t.ring_next[c]) = (c32, 100 + c32, 200 + c32, 300 + c32);
            (t.tree_to_parent[c], t.tree_to_child0[c], t.tree_to_child1[c]) = (400 + c32, 500 + c32, 600 + c32);
        }
        t.jbog_kangaring_path = std::array::from_fn(|k| std::array::from_fn(|i| 0x0102_0300 + (4 * k + i) as i32));
        let bytes = t.encode();
        assert_eq!(bytes.len(), 960);
        for c in 0..32 {
            for (row, offset) in [0, 128, 256, 384, 512, 640, 768].into_iter().enumerate() {
                assert_eq!(at(&bytes, offset + 4 * c), (100 * row + c) as i32);
            }
        }
        assert_eq!(bytes[896..900], [0, 3, 2, 1], "little-endian");
        for i in 0..16 {
            assert_eq!(at(&bytes, 896 + 4 * i), 0x0102_0300 + i as i32);
        }
        assert_eq!(TopoRanks::decode(&bytes), Ok(t));
        for wrong in [0, 959, 961] {
            let error = TopoRanks::decode(&vec![0; wrong]).unwrap_err();
            assert_eq!(error, RingError::RecordSize { found: wrong });
        }
    }
}
