//! Whether this process is a forked child of the one that opened the runtime.
//!
//! A child has its parent's mappings and none of its threads: an operation there would write the parent's records. The
//! kernel zeroes one page in every child (`MADV_WIPEONFORK`), so that asking costs a load and no system call.

use std::sync::OnceLock;

use memmap2::MmapMut;

/// One page that holds ones here and zeros in a child.
static PAGE: OnceLock<Option<MmapMut>> = OnceLock::new();

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
    PAGE.get_or_init(mark);
}

/// Whether this process was forked from the one that was marked. Before the mark, and on kernels that cannot wipe a page
/// (before 4.14), the answer is no.
#[inline]
pub fn in_child() -> bool {
    match PAGE.get() {
        Some(Some(page)) => std::hint::black_box(page)[0] == 0,
        _ => false,
    }
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
