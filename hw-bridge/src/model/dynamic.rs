//! Sizes that become known only during execution: the metadata of a variable-length all-to-all
//! (reverse-abi.md §3.4).
//!
//! The layout is not recorded; this is the one the spec proposes: four arrays of `rank_n` u32 element counts,
//! `send_count | send_offset | recv_count | recv_offset`, in that order. The functions below are the runtime-internal
//! ones with the runtime-internal order of arguments. The callbacks in front of them differ in one case, which is the
//! caller's work: `nec_get_dynamic_send_size_bytes` drops `rank_n` and swaps size and rank (INV-13).
//!
//! Invariant: an access is answered only inside the arrays; a `rank_n` that is not the memory's own would shift every
//! array behind the first and is refused. Threads: words are atomic, producer and consumer may be different threads.

use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

/// Ranks that one metadata block may describe (16 MiB of metadata).
pub const MAX_DYNAMIC_RANKS: u32 = 1 << 20;

/// Why a dynamic size could not be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DynSizeError {
    /// The block was to be made for no rank, or for too many.
    #[error(
        "dynamic sizes for {rank_n} ranks were asked for, but a block holds 1 to {MAX_DYNAMIC_RANKS}; correct rank_n"
    )]
    RankCount {
        /// Ranks asked for.
        rank_n: u32,
    },
    /// A rank that the block does not have.
    #[error("rank {rank} is not in the dynamic-size metadata, which has ranks 0 to {}; correct the rank", .rank_n - 1)]
    RankOutOfRange {
        /// The rank.
        rank: i32,
        /// Ranks in the block.
        rank_n: u32,
    },
    /// The caller counts other ranks than the block.
    #[error(
        "the caller passed rank_n {given}, but the dynamic-size metadata was made for {rank_n} ranks; pass the size of \
         the communicator the metadata belongs to"
    )]
    RankCountMismatch {
        /// The caller's `rank_n`.
        given: i32,
        /// Ranks in the block.
        rank_n: u32,
    },
    /// An element of no bytes.
    #[error("the element size is 0 bytes, but dynamic sizes are element counts; pass the size of the data type")]
    ZeroElement,
    /// The product does not fit.
    #[error("{count} elements of {data_type_sz} bytes are more than a 64-bit size holds; correct the element size")]
    Overflow {
        /// Elements.
        count: u32,
        /// Bytes of an element.
        data_type_sz: u64,
    },
    /// A received size that the block cannot express.
    #[error(
        "{recv_size_bytes} received bytes are not a whole number of at most {} elements of {data_type_sz} bytes; pass the \
         bytes received and the size of their data type",
        u32::MAX
    )]
    NotElements {
        /// Bytes received.
        recv_size_bytes: u64,
        /// Bytes of an element.
        data_type_sz: u64,
    },
}

/// Which of the four arrays.
#[derive(Clone, Copy)]
enum Array {
    SendCount = 0,
    SendOffset = 1,
    RecvCount = 2,
    RecvOffset = 3,
}

/// Host memory with the per-peer counts (what `enc_host_mem_t` points at).
#[derive(Debug)]
pub struct HostMem {
    rank_n: u32,
    words: Box<[AtomicU32]>,
}

impl HostMem {
    /// A block for `rank_n` ranks, all counts and offsets 0.
    ///
    /// # Errors
    /// [`DynSizeError::RankCount`] unless 1 ≤ `rank_n` ≤ [`MAX_DYNAMIC_RANKS`].
    pub fn new(rank_n: u32) -> Result<HostMem, DynSizeError> {
        if rank_n == 0 || rank_n > MAX_DYNAMIC_RANKS {
            return Err(DynSizeError::RankCount { rank_n });
        }
        Ok(HostMem { rank_n, words: (0..4 * rank_n).map(|_| AtomicU32::new(0)).collect() })
    }

    /// Ranks in the block.
    pub fn rank_n(&self) -> u32 {
        self.rank_n
    }

    /// Says that `count` elements from element `offset` on go to `dst`.
    ///
    /// # Errors
    /// [`DynSizeError::RankOutOfRange`].
    pub fn set_send(&self, dst: i32, count: u32, offset: u32) -> Result<(), DynSizeError> {
        self.word(Array::SendOffset, dst)?.store(offset, Ordering::Release);
        self.word(Array::SendCount, dst)?.store(count, Ordering::Release);
        Ok(())
    }

    /// Says that what comes from `src` goes to element `offset` on.
    ///
    /// # Errors
    /// [`DynSizeError::RankOutOfRange`].
    pub fn set_recv_offset(&self, src: i32, offset: u32) -> Result<(), DynSizeError> {
        self.word(Array::RecvOffset, src)?.store(offset, Ordering::Release);
        Ok(())
    }

    /// Elements received from `src`.
    ///
    /// # Errors
    /// [`DynSizeError::RankOutOfRange`].
    pub fn recv_count(&self, src: i32) -> Result<u32, DynSizeError> {
        Ok(self.word(Array::RecvCount, src)?.load(Ordering::Acquire))
    }

    fn word(&self, array: Array, rank: i32) -> Result<&AtomicU32, DynSizeError> {
        let out_of_range = DynSizeError::RankOutOfRange { rank, rank_n: self.rank_n };
        let index = u32::try_from(rank).ok().filter(|r| *r < self.rank_n).ok_or(out_of_range)?;
        // 4 × MAX_DYNAMIC_RANKS fits u32.
        let position = array as u32 * self.rank_n + index;
        usize::try_from(position).ok().and_then(|p| self.words.get(p)).ok_or(out_of_range)
    }

    fn bytes(&self, array: Array, rank: i32, data_type_sz: u64) -> Result<u64, DynSizeError> {
        if data_type_sz == 0 {
            return Err(DynSizeError::ZeroElement);
        }
        let count = self.word(array, rank)?.load(Ordering::Acquire);
        u64::from(count).checked_mul(data_type_sz).ok_or(DynSizeError::Overflow { count, data_type_sz })
    }

    fn check_rank_n(&self, given: i32) -> Result<(), DynSizeError> {
        if u32::try_from(given) == Ok(self.rank_n) {
            Ok(())
        } else {
            Err(DynSizeError::RankCountMismatch { given, rank_n: self.rank_n })
        }
    }
}

/// Bytes to send to `dst`. Note the order: rank, then element size, and no `rank_n` (INV-13).
///
/// # Errors
/// [`DynSizeError`]: rank outside the block, element of 0 bytes, product too large.
pub fn enc_get_send_count_size_bytes(mem: &HostMem, dst: i32, data_type_sz: u64) -> Result<u64, DynSizeError> {
    mem.bytes(Array::SendCount, dst, data_type_sz)
}

/// Byte offset of what goes to `dst`.
///
/// # Errors
/// [`DynSizeError`]: as above, and a `rank_n` that is not the block's.
pub fn enc_get_send_offset_bytes(mem: &HostMem, data_type_sz: u64, dst: i32, rank_n: i32) -> Result<u64, DynSizeError> {
    mem.check_rank_n(rank_n)?;
    mem.bytes(Array::SendOffset, dst, data_type_sz)
}

/// Byte offset at which to post the receive for what comes from `src`.
///
/// # Errors
/// [`DynSizeError`]: as above, and a `rank_n` that is not the block's.
pub fn enc_get_recv_post_offset_bytes(
    mem: &HostMem,
    data_type_sz: u64,
    src: i32,
    rank_n: i32,
) -> Result<u64, DynSizeError> {
    mem.check_rank_n(rank_n)?;
    mem.bytes(Array::RecvOffset, src, data_type_sz)
}

/// Records that `recv_size_bytes` came from `src`. A size that is no whole number of elements is refused: rounding it
/// down would lose received bytes silently.
///
/// # Errors
/// [`DynSizeError`]: rank outside the block, another `rank_n`, element of 0 bytes, bytes that are no element count.
pub fn enc_set_recv_size_bytes(
    mem: &HostMem,
    recv_size_bytes: u64,
    data_type_sz: u64,
    src: i32,
    rank_n: i32,
) -> Result<(), DynSizeError> {
    mem.check_rank_n(rank_n)?;
    if data_type_sz == 0 {
        return Err(DynSizeError::ZeroElement);
    }
    let not_elements = DynSizeError::NotElements { recv_size_bytes, data_type_sz };
    if !recv_size_bytes.is_multiple_of(data_type_sz) {
        return Err(not_elements);
    }
    let count = u32::try_from(recv_size_bytes / data_type_sz).map_err(|_| not_elements)?;
    mem.word(Array::RecvCount, src)?.store(count, Ordering::Release);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distinct values in all four arrays, so that reading the wrong array or the wrong rank shows.
    fn filled() -> HostMem {
        let mem = HostMem::new(3).unwrap();
        for r in 0..3 {
            mem.set_send(r, 10 + r as u32, 20 + r as u32).unwrap();
            mem.set_recv_offset(r, 40 + r as u32).unwrap();
            enc_set_recv_size_bytes(&mem, 4 * (30 + r as u64), 4, r, 3).unwrap();
        }
        mem
    }

    #[test]
    fn answers_are_bytes_of_the_right_array_and_rank() {
        let mem = filled();
        for r in 0..3 {
            let n = r as u64;
            assert_eq!(enc_get_send_count_size_bytes(&mem, r, 4), Ok(4 * (10 + n)));
            assert_eq!(enc_get_send_offset_bytes(&mem, 2, r, 3), Ok(2 * (20 + n)));
            assert_eq!(enc_get_recv_post_offset_bytes(&mem, 8, r, 3), Ok(8 * (40 + n)));
            assert_eq!(mem.recv_count(r), Ok(30 + r as u32));
        }
        let words: Vec<u32> = mem.words.iter().map(|w| w.load(Ordering::Acquire)).collect();
        assert_eq!(words, [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]);
    }

    #[test]
    fn nothing_outside_the_arrays_is_reached() {
        let mem = filled();
        for rank in [-1, 3, i32::MIN, i32::MAX] {
            let error = DynSizeError::RankOutOfRange { rank, rank_n: 3 };
            assert_eq!(enc_get_send_count_size_bytes(&mem, rank, 4), Err(error));
            assert_eq!(enc_get_send_offset_bytes(&mem, 4, rank, 3), Err(error));
            assert_eq!(enc_get_recv_post_offset_bytes(&mem, 4, rank, 3), Err(error));
            assert_eq!(enc_set_recv_size_bytes(&mem, 4, 4, rank, 3), Err(error));
        }
        for given in [-3, 0, 2, 4, i32::MAX] {
            let error = DynSizeError::RankCountMismatch { given, rank_n: 3 };
            assert_eq!(enc_get_send_offset_bytes(&mem, 4, 0, given), Err(error));
            assert_eq!(enc_get_recv_post_offset_bytes(&mem, 4, 0, given), Err(error));
            assert_eq!(enc_set_recv_size_bytes(&mem, 4, 4, 0, given), Err(error));
        }
    }

    #[test]
    fn bad_sizes_are_refused_with_a_sentence() {
        let mem = filled();
        assert_eq!(HostMem::new(0).unwrap_err(), DynSizeError::RankCount { rank_n: 0 });
        assert!(HostMem::new(MAX_DYNAMIC_RANKS + 1).is_err());
        assert_eq!(enc_get_send_count_size_bytes(&mem, 0, 0), Err(DynSizeError::ZeroElement));
        assert_eq!(enc_set_recv_size_bytes(&mem, 4, 0, 0, 3), Err(DynSizeError::ZeroElement));
        let error = enc_get_send_count_size_bytes(&mem, 0, u64::MAX).unwrap_err();
        assert_eq!(error, DynSizeError::Overflow { count: 10, data_type_sz: u64::MAX });
        let error = enc_set_recv_size_bytes(&mem, 7, 4, 0, 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "7 received bytes are not a whole number of at most 4294967295 elements of 4 bytes; pass the bytes received \
             and the size of their data type"
        );
        assert!(enc_set_recv_size_bytes(&mem, 1 << 32, 1, 0, 3).is_err());
        assert_eq!(mem.recv_count(0), Ok(30), "a refused size must not be stored");
        assert_eq!(
            DynSizeError::RankOutOfRange { rank: 3, rank_n: 3 }.to_string(),
            "rank 3 is not in the dynamic-size metadata, which has ranks 0 to 2; correct the rank"
        );
    }
}
