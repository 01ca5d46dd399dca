//! Whether this process is a forked child of the one that opened the runtime.
//!
//! A child has its parent's mappings and none of its threads: an operation there would write the parent's records. The
//! kernel zeroes one page in every child (`MADV_WIPEONFORK`), so that asking costs a load and no system call.

use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

use memmap2::MmapMut;

/// What is looked at before there is a page.
static OURS: AtomicU8 = AtomicU8::new(1);
/// A byte that is 1 here, and in a page that is zeros in a child. The page stays mapped for good.
static BYTE: AtomicPtr<AtomicU8> = AtomicPtr::new((&raw const OURS).cast_mut());

fn mark() -> Option<MmapMut> {
    let mut page = MmapMut::map_anon(4096).ok()?;
    // SAFETY: the range is exactly the mapping just made, which nothing else refers to; being zeroed in a child is sound,
    // as any byte is a valid u8 and the child's view begins after the fork.
    let wiped =
        unsafe { rustix::mm::madvise(page.as_mut_ptr().cast(), page.len(), rustix::mm::Advice::LinuxWipeOnFork) };
    wiped.ok()?;
    page[0] = 1;
    Some(page)
}

/// Marks this process as the one whose communicators may be used. Called before anything is shared with peers; later calls
/// change nothing.
pub fn mark_process() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(mut page) = mark() {
            BYTE.store(page.as_mut_ptr().cast(), Ordering::Release);
            std::mem::forget(page);
        }
    });
}

/// Whether this process was forked from the one that was marked. Before the mark, and on kernels that cannot wipe a page
/// (before 4.14), the answer is no.
#[inline]
pub fn in_child() -> bool {
    // SAFETY: a static, or the first byte of a page that is never unmapped and that nobody else refers to; any byte is a valid
    // AtomicU8. What the kernel writes into a child's page is there before the child runs.
    unsafe { (*BYTE.load(Ordering::Acquire)).load(Ordering::Relaxed) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marked_process_is_no_child() {
        assert!(!in_child());
        mark_process();
        mark_process();
        assert!(!in_child());
        // That a child sees zeros is tried with a real fork, in the package of whole-system tests.
    }
}
