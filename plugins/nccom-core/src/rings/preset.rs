//! Preset: this rank's fragment of every ring (topology-and-rings 6, INV-49).

use super::RingError;
use super::record::TopoRanks;
use crate::search::Graph;
use crate::topo::Family;
use crate::topo::limits::{MAX_CHANNELS, MAX_KANGA_PATHS};

/// A rank's neighbours inside its node; -1 where the segment hands over to the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeNeighbours {
    /// Rank before.
    pub prev: i32,
    /// Rank behind.
    pub next: i32,
}

/// Makes the fragment, and the local neighbours of every channel: those of the graph and, behind them, the copies of
/// the doubled half.
///
/// # Errors
/// [`RingError::NotInGraph`] if a channel does not hold the rank; [`RingError::Shape`] for more channels than a record
/// holds.
pub fn preset(graph: &Graph, rank: i32, family: Family) -> Result<(TopoRanks, Vec<NodeNeighbours>), RingError> {
    if graph.n_channels > MAX_CHANNELS {
        return Err(RingError::Shape { what: "channels at most", found: graph.n_channels, expected: MAX_CHANNELS });
    }
    let mut mine = TopoRanks::empty();
    let mut segments = Vec::with_capacity(2 * graph.n_channels);
    for c in 0..graph.n_channels {
        let row = graph.channel(c);
        let missing = RingError::NotInGraph { rank, channel: c };
        let i = row.iter().position(|r| *r == rank).ok_or(missing.clone())?;
        let (Some(head), Some(tail)) = (row.first(), row.last()) else {
            return Err(missing);
        };
        let prev = i.checked_sub(1).and_then(|i| row.get(i)).copied().unwrap_or(-1);
        let next = row.get(i + 1).copied().unwrap_or(-1);
        mine.ring_recv[c] = *head;
        mine.ring_send[c] = *tail;
        mine.ring_prev[c] = prev;
        mine.ring_next[c] = next;
        segments.push(NodeNeighbours { prev, next });
    }
    segments.extend_from_within(..);
    if family.is_switch_v1() && !graph.kangaring.is_empty() {
        mine.jbog_kangaring_path = [[-1; 4]; MAX_KANGA_PATHS];
        for (slot, path) in mine.jbog_kangaring_path.iter_mut().zip(&graph.kangaring) {
            if let Some(group) = path.iter().find(|g| g.contains(&rank)) {
                *slot = *group;
            }
        }
    }
    Ok((mine, segments))
}
