//! Device memory of one logical core: a sparse arena in one [`Segment`], with an allocator.
//!
//! A peer that was granted the arena maps it once; a tensor is then an offset in it, and offsets travel in the
//! arrival records of `peers`. Memory is committed when it is allocated and given back when it is freed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::limits::HBM_ALIGN;
use crate::memory::segment::{Segment, SegmentError};

/// The arena of one logical core.
#[derive(Debug)]
pub struct Hbm {
    segment: Arc<Segment>,
    free: Mutex<FreeList>,
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HbmError {
    /// The arena has no gap of that size.
    #[error(
        "device memory is full: {wanted} bytes wanted, largest free piece {largest}, {used} of {capacity} bytes in use; free tensors, or give the runtime more for each core (WCCL_HBM_BYTES)"
    )]
    Full {
        /// Bytes asked for.
        wanted: u64,
        /// Largest piece there is.
        largest: u64,
        /// Bytes in use.
        used: u64,
        /// Size of the arena.
        capacity: u64,
    },
    /// The kernel had no memory for it.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Free pieces by offset. Neighbours are always merged.
#[derive(Debug)]
struct FreeList {
    pieces: BTreeMap<u64, u64>,
    used: u64,
}

impl FreeList {
    fn take(&mut self, len: u64) -> Option<u64> {
        let (&at, &size) = self.pieces.iter().find(|(_, size)| **size >= len)?;
        self.pieces.remove(&at);
        if size > len {
            self.pieces.insert(at + len, size - len);
        }
        self.used += len;
        Some(at)
    }

    fn give(&mut self, mut at: u64, mut len: u64) {
        self.used -= len;
        if let Some((&before, &size)) = self.pieces.range(..at).next_back()
            && before + size == at
        {
            self.pieces.remove(&before);
            at = before;
            len += size;
        }
        if let Some(size) = self.pieces.remove(&(at + len)) {
            len += size;
        }
        self.pieces.insert(at, len);
    }
}

impl Hbm {
    /// An arena of `capacity` bytes of address space. It costs memory only as tensors are allocated.
    pub fn new(capacity: u64) -> Result<Arc<Hbm>, HbmError> {
        let capacity = capacity.max(1).checked_next_multiple_of(HBM_ALIGN).unwrap_or(u64::MAX - HBM_ALIGN + 1);
        Ok(Hbm::adopt(Segment::create("wccl-hbm", capacity)?))
    }

    /// The arena in `segment`, which nobody else allocates from: fresh, or made by a service for this process.
    pub fn adopt(segment: Segment) -> Arc<Hbm> {
        let pieces = BTreeMap::from([(0, segment.len() as u64)]);
        Arc::new(Hbm { segment: Arc::new(segment), free: Mutex::new(FreeList { pieces, used: 0 }) })
    }

    /// Allocates `bytes` (rounded up to whole pages), zeroed.
    pub fn alloc(self: &Arc<Self>, bytes: u64) -> Result<HbmBuf, HbmError> {
        let len = bytes.max(1).checked_next_multiple_of(HBM_ALIGN).unwrap_or(u64::MAX);
        let mut free = self.lock();
        let Some(offset) = free.take(len) else {
            let largest = free.pieces.values().copied().max().unwrap_or(0);
            let capacity = self.segment.len() as u64;
            return Err(HbmError::Full { wanted: bytes, largest, used: free.used, capacity });
        };
        drop(free);
        if let Err(e) = self.segment.commit(offset, len) {
            self.lock().give(offset, len);
            return Err(e.into());
        }
        Ok(HbmBuf { hbm: self.clone(), offset, reserved: len, len: bytes, kept: AtomicBool::new(false) })
    }

    /// The arena's memory.
    #[inline]
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Bytes allocated now.
    pub fn used(&self) -> u64 {
        self.lock().used
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// An allocated piece of device memory; freed when dropped.
#[derive(Debug)]
pub struct HbmBuf {
    hbm: Arc<Hbm>,
    offset: u64,
    /// Whole pages taken from the arena.
    reserved: u64,
    len: u64,
    /// A peer may still use it: it must be neither cleared nor given to another tensor.
    kept: AtomicBool,
}

impl HbmBuf {
    /// Keeps the memory for good: an operation on it failed while a peer was still using it.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Where it lies in the arena.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes asked for.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Pointer to its first byte.
    #[inline]
    pub fn ptr(&self) -> *mut u8 {
        self.hbm.segment.base().wrapping_add(self.offset as usize)
    }

    /// Copies `bytes` into the buffer at `offset`; false (and nothing written) if they do not all fit.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.len);
        if fits {
            // SAFETY: the range is inside this allocation (just checked), and `bytes` is private memory.
            unsafe { crate::memory::copy::copy(self.ptr().add(offset as usize), bytes.as_ptr(), bytes.len()) };
        }
        fits
    }

    /// Copies from the buffer at `offset` into `bytes`; false (and nothing read) if the range is not all inside.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> bool {
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= self.len);
        if fits {
            // SAFETY: as in `write`.
            unsafe { crate::memory::copy::copy(bytes.as_mut_ptr(), self.ptr().add(offset as usize), bytes.len()) };
        }
        fits
    }

    /// The arena it belongs to.
    #[inline]
    pub fn hbm(&self) -> &Arc<Hbm> {
        &self.hbm
    }
}

impl Drop for HbmBuf {
    fn drop(&mut self) {
        if self.kept.load(Ordering::Relaxed) {
            tracing::debug!(offset = self.offset, bytes = self.reserved, "device memory kept: a peer may still use it");
            return;
        }
        // A failed release costs memory, not correctness: the range is committed again before it is reused, but then
        // its old content would show, so it stays allocated instead.
        match self.hbm.segment.release(self.offset, self.reserved) {
            Ok(()) => self.hbm.lock().give(self.offset, self.reserved),
            Err(e) => tracing::warn!(offset = self.offset, bytes = self.reserved, "device memory kept: {e}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_split_merged_and_refused_with_numbers() {
        let hbm = Hbm::new(4 * HBM_ALIGN).unwrap();
        let a = hbm.alloc(1).unwrap();
        let b = hbm.alloc(HBM_ALIGN + 1).unwrap();
        assert_eq!((a.offset(), b.offset()), (0, HBM_ALIGN));
        let e = hbm.alloc(2 * HBM_ALIGN).unwrap_err().to_string();
        assert!(e.contains("device memory is full") && e.contains(&format!("largest free piece {HBM_ALIGN}")), "{e}");
        drop(a);
        drop(b);
        assert_eq!(hbm.used(), 0);
        assert_eq!(hbm.alloc(4 * HBM_ALIGN).unwrap().offset(), 0);
    }

    #[test]
    fn freed_memory_is_zero_when_allocated_again() {
        let hbm = Hbm::new(HBM_ALIGN).unwrap();
        let a = hbm.alloc(16).unwrap();
        // SAFETY: `a` owns these bytes.
        unsafe { a.ptr().write(9) };
        drop(a);
        // SAFETY: the new allocation owns these bytes.
        unsafe { assert_eq!(hbm.alloc(16).unwrap().ptr().read(), 0) };
    }

    #[test]
    fn a_size_beyond_the_address_space_is_an_error() {
        let hbm = Hbm::new(HBM_ALIGN).unwrap();
        assert!(matches!(hbm.alloc(u64::MAX), Err(HbmError::Full { .. })));
    }
}
