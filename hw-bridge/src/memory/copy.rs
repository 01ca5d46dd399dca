//! Copies, with and without going through the caches.
//!
//! Invariant: no byte outside the two ranges is touched, whatever their alignment.

/// Copies `len` bytes.
///
/// # Safety
/// `src` is valid for reads and `dst` for writes of `len` bytes, and the two do not overlap (they may be equal, which
/// copies nothing). No alignment is asked for.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if dst.cast_const() == src {
        return;
    }
    // SAFETY: the caller's contract is that of copy_nonoverlapping, but for equal pointers, which are done.
    unsafe {
        match len {
            4..=8 => ends::<u32>(dst, src, len),
            9..=16 => ends::<u64>(dst, src, len),
            _ => std::ptr::copy_nonoverlapping(src, dst, len),
        }
    }
}

/// Copies the first and the last `T` of `len` bytes, which together are all of them: of so few the call of a function would be
/// the larger part.
///
/// # Safety
/// As [`copy`], and `len` is one `T` to two.
#[inline]
unsafe fn ends<T: Copy>(dst: *mut u8, src: *const u8, len: usize) {
    let last = len - size_of::<T>();
    // SAFETY: the caller's contract: both lie inside the `len` bytes.
    unsafe {
        let (head, tail) = (src.cast::<T>().read_unaligned(), src.add(last).cast::<T>().read_unaligned());
        dst.cast::<T>().write_unaligned(head);
        dst.add(last).cast::<T>().write_unaligned(tail);
    }
}

/// Copies `len` bytes with streaming stores, which leave the caches to others and spare reading `dst` before it is
/// overwritten. For copies that are larger than the cache, of data that this core will not read again soon. The stores
/// are visible to other threads, in order, when the function returns.
///
/// # Safety
/// As [`copy`].
pub unsafe fn copy_nt(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        stream(dst, src, len);
    }
    fence();
}

/// Bytes of a line of the caches.
const LINE: usize = 64;

/// Bytes from `at` to the start of a line.
#[inline(always)]
fn until_line(at: *const u8) -> usize {
    at.addr().wrapping_neg() % LINE
}

/// Makes the streaming stores so far visible before any store after this.
#[inline(always)]
fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is part of x86-64 and touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// [`copy_nt`] without the fence.
///
/// # Safety
/// As [`copy`].
unsafe fn stream(dst: *mut u8, src: *const u8, len: usize) {
    if dst.cast_const() == src {
        return;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the head brings `dst` to the start of a line without going past `len`; every step of the loop has a line
    // left in both buffers; the loads ask for no alignment and the stores have theirs.
    unsafe {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let head = until_line(dst).min(len);
        std::ptr::copy_nonoverlapping(src, dst, head);
        let mut done = head;
        while len - done >= LINE {
            let from = src.add(done).cast::<__m128i>();
            let to = dst.add(done).cast::<__m128i>();
            let line = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            _mm_stream_si128(to, line[0]);
            _mm_stream_si128(to.add(1), line[1]);
            _mm_stream_si128(to.add(2), line[2]);
            _mm_stream_si128(to.add(3), line[3]);
            done += LINE;
        }
        std::ptr::copy_nonoverlapping(src.add(done), dst.add(done), len - done);
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's contract, and the pointers are not equal.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_small_size_are_whole_and_touch_nothing_else() {
        let from: Vec<u8> = (1..=64).collect();
        for len in 0..=40 {
            for (at, to) in [(0, 0), (3, 5), (8, 1)] {
                let mut all = [0u8; 64];
                // SAFETY: both have room for `len` bytes behind these places.
                unsafe { copy(all.as_mut_ptr().add(to), from.as_ptr().add(at), len) };
                assert_eq!(all[to..to + len], from[at..at + len]);
                assert!(all[..to].iter().chain(&all[to + len..]).all(|b| *b == 0), "{len} bytes");
            }
        }
    }
}
