//! Who a rank is in its group, whichever instance it is in and wherever its sockets are.

use crate::bytes::{bad, put, u32_at, u64_at};
use crate::fail::Failure;

/// Ranks of a group: what the roll and the records of one fit this library's memory.
pub const MAX_RANKS: u32 = 4096;
/// Bytes of a head.
pub(crate) const HEAD_BYTES: usize = 32;

/// Who it is: what a plan begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub nranks: usize,
    /// This rank's logical core.
    pub dev: i32,
    /// Bound of every socket operation, milliseconds.
    pub timeout_ms: u32,
    /// Same on all ranks.
    pub cluster_id: u64,
    /// Same on all ranks.
    pub epoch: i64,
}

impl Head {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut b = Vec::with_capacity(HEAD_BYTES);
        for word in [self.rank as u32, self.nranks as u32, self.dev as u32, self.timeout_ms] {
            put(&mut b, word);
        }
        b.extend_from_slice(&self.cluster_id.to_le_bytes());
        b.extend_from_slice(&self.epoch.to_le_bytes());
        b
    }

    pub(crate) fn decode(b: &[u8]) -> Result<Head, Failure> {
        if b.len() != HEAD_BYTES {
            return Err(bad(&format!("its head has {} bytes, {HEAD_BYTES} were expected", b.len())));
        }
        let (rank, nranks) = (u32_at(b, 0), u32_at(b, 4));
        if rank >= nranks || nranks > MAX_RANKS {
            return Err(bad(&format!("rank {rank} of {nranks}")));
        }
        Ok(Head {
            rank: rank as usize,
            nranks: nranks as usize,
            dev: u32_at(b, 8) as i32,
            timeout_ms: u32_at(b, 12),
            cluster_id: u64_at(b, 16),
            epoch: u64_at(b, 24) as i64,
        })
    }
}
