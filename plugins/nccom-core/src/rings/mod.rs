//! Rings: from every rank's fragment to `channels[c].ring`, the kangaring table and what the runtime reads back.
//!
//! Owns: the 960-byte record that ranks gather ([`TopoRanks`]), preset (this rank's fragment), postset (joining node
//! segments to global rings, doubling, clamping), the walk that finds both ring defects ([`build_rings`]), grouping of
//! ranks by node and pod ([`layout`]), and the assembly of the communicator info ([`info`]).
//! Spec: topology-and-rings 3, 6 to 9; INV-41, 44, 49, 50, 51, 53.
//!
//! Invariants: every rank, given the same records, computes the same rings; a ring that leaves here closes and holds
//! every rank; records come from peers and are checked before they are followed.

pub mod info;
pub mod layout;
pub mod postset;
pub mod preset;
pub mod record;

pub use info::{CommInfo, PeerInfo, comm_info};
pub use layout::{Layout, Pods, pods};
pub use postset::{Channels, Ring, both_ways_and_strided, build_rings, doubled, postset};
pub use preset::{NodeNeighbours, preset};
pub use record::{TOPO_RANKS_BYTES, TopoRanks};

use std::fmt;

/// Why rings could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RingError {
    /// A record has another size than 960 bytes.
    RecordSize {
        /// Bytes it has.
        found: usize,
    },
    /// A walk does not end where it began; the text is the original's.
    NoLoop {
        /// Ring.
        ring: usize,
        /// Where it ended.
        end: i32,
        /// Where it began.
        rank: i32,
    },
    /// A walk misses a rank; the text is the original's.
    Misses {
        /// Ring.
        ring: usize,
        /// The rank.
        rank: i32,
    },
    /// `prev` and `next` of a ring contradict one another.
    Contradiction {
        /// Ring.
        ring: usize,
        /// The rank whose next has another prev.
        rank: i32,
    },
    /// A record names a rank that does not exist, or one of another node.
    BadRecord {
        /// Whose record.
        rank: i32,
        /// What it says.
        what: &'static str,
        /// The rank it names.
        named: i32,
    },
    /// Numbers that do not fit together: records, ranks, nodes.
    Shape {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many were expected.
        expected: usize,
    },
    /// This rank is in no channel of its graph.
    NotInGraph {
        /// The rank.
        rank: i32,
        /// The channel.
        channel: usize,
    },
    /// The kangaring fragments do not join to a path over every rank.
    Kangaring {
        /// Path.
        path: usize,
        /// Ranks it has.
        found: usize,
        /// Ranks it should have.
        expected: usize,
    },
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RecordSize { found } => write!(
                f,
                "a topology record of {found} bytes arrived where {TOPO_RANKS_BYTES} were expected: the ranks run different versions"
            ),
            Self::NoLoop { ring, end, rank } => {
                write!(f, "Error : ring {ring} does not loop back to start ({end} != {rank})")
            }
            Self::Misses { ring, rank } => {
                write!(f, "Error : ring {ring} does not contain rank {rank}")
            }
            Self::Contradiction { ring, rank } => {
                write!(
                    f,
                    "ring {ring}: the rank behind rank {rank} has another predecessor; the ranks' records disagree"
                )
            }
            Self::BadRecord { rank, what, named } => write!(
                f,
                "the topology record of rank {rank} names rank {named} as {what}, which is not a rank of its node: check that all ranks run the same version and configuration"
            ),
            Self::Shape { what, found, expected } => {
                write!(f, "rings need {expected} {what} but {found} were given")
            }
            Self::NotInGraph { rank, channel } => {
                write!(f, "rank {rank} is not in channel {channel} of the graph of its own node")
            }
            Self::Kangaring { path, found, expected } => write!(
                f,
                "kangaring path {path} joins {found} ranks where {expected} were expected; the ranks' records disagree"
            ),
        }
    }
}

impl std::error::Error for RingError {}

#[cfg(test)]
mod tests;
