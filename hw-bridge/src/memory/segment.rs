//! Shared memory: one memfd per region, sealed against shrinking and growing, mapped read-write.
//!
//! Nothing has a name in a file system, so nothing is left behind when a process is killed: the kernel frees a
//! segment when the last descriptor and the last mapping are gone.
//!
//! Invariants: `base` points to `len` mapped bytes for as long as the [`Segment`] lives; the length of the file cannot
//! change (seals), so a peer cannot make an access fault by truncating it. Bytes may be changed by other processes at
//! any time; this module therefore hands out raw pointers and atomics, never references to plain data.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

/// A mapped memfd.
#[derive(Debug)]
pub struct Segment {
    /// Absent for a peer's: the mapping is all that is needed of it, and a rank has many peers.
    fd: Option<OwnedFd>,
    map: MmapRaw,
}

/// Why a segment could not be made or mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The kernel refused one of the steps.
    #[error("{step} of a {bytes}-byte memory region failed: {source}{}", crate::os::exhausted::limit_behind(source))]
    System {
        /// What was tried.
        step: &'static str,
        /// Size asked for.
        bytes: u64,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A descriptor from a peer is not what it was said to be.
    #[error(
        "a memory region received from a peer is not usable: {0}; the peer runs another version or is not a wccl process"
    )]
    Foreign(String),
}

fn sys(step: &'static str, bytes: u64, e: impl Into<std::io::Error>) -> SegmentError {
    SegmentError::System { step, bytes, source: e.into() }
}

/// The kernel's number for the file system of memfds of ordinary pages.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// The size of memory that another process made, if it is what [`Segment::create`] makes: a memfd of ordinary pages, whose
/// size cannot change. One of huge pages looks the same and faults where the machine has none left.
fn ordinary(fd: &OwnedFd) -> Result<u64, SegmentError> {
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(|e| SegmentError::Foreign(format!("it cannot be sealed ({e})")))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(SegmentError::Foreign("its size is not sealed".into()));
    }
    let stat = rustix::fs::fstat(fd).map_err(|e| sys("inspection", 0, e))?;
    let bytes = stat.st_size as u64;
    let on = rustix::fs::fstatfs(fd).map_err(|e| sys("inspection", bytes, e))?;
    let page = rustix::param::page_size() as u64;
    if on.f_type != TMPFS || on.f_bsize as u64 != page {
        return Err(SegmentError::Foreign(format!("it is not made of ordinary pages of {page} bytes")));
    }
    Ok(bytes)
}

impl Segment {
    /// Makes a zeroed segment of `len` bytes (rounded up by nobody: pass a multiple of the page size). Pages are
    /// allocated when first touched or by [`Segment::commit`].
    pub fn create(name: &str, len: u64) -> Result<Segment, SegmentError> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| sys("creation", len, e))?;
        crate::os::exhausted::file_of(len).map_err(|e| sys("sizing", len, e))?;
        rustix::fs::ftruncate(&fd, len).map_err(|e| sys("sizing", len, e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| sys("sealing", len, e))?;
        Ok(Segment { map: Self::map(&fd, len)?, fd: Some(fd) })
    }

    /// Maps a descriptor that a peer passed. Refuses one whose size is not `len`, that is not sealed, or that is not made of
    /// ordinary pages, because an access to it could fault.
    pub fn from_peer(fd: OwnedFd, len: u64) -> Result<Segment, SegmentError> {
        Ok(Segment { fd: None, ..Segment::adopt(fd, len)? })
    }

    /// Maps a descriptor of memory that a service made for this process: as [`Segment::from_peer`], and it is this process's
    /// to commit and to release.
    pub fn adopt(fd: OwnedFd, len: u64) -> Result<Segment, SegmentError> {
        let has = ordinary(&fd)?;
        if has != len {
            return Err(SegmentError::Foreign(format!("it has {has} bytes, {len} were announced")));
        }
        Ok(Segment { map: Self::map(&fd, len)?, fd: Some(fd) })
    }

    /// Maps another process's segment to look at it, without being able to write.
    ///
    /// # Errors
    /// [`SegmentError::Foreign`] for one that could shrink under the reader.
    pub fn watch(fd: OwnedFd) -> Result<Segment, SegmentError> {
        let len = ordinary(&fd)?;
        let map = MmapOptions::new().map_raw_read_only(&fd).map_err(|e| sys("mapping", len, e))?;
        Ok(Segment { map, fd: None })
    }

    fn map(fd: &OwnedFd, len: u64) -> Result<MmapRaw, SegmentError> {
        let size = usize::try_from(len).map_err(|_| sys("mapping", len, std::io::ErrorKind::InvalidInput))?;
        MmapOptions::new().len(size).map_raw(fd).map_err(|e| sys("mapping", len, e))
    }

    /// First byte. Valid for [`Segment::len`] bytes while `self` lives.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Mapped bytes.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether the segment has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The descriptor, to be passed to a peer that was granted the region; none for a peer's region.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The descriptor, for its owner's own calls.
    fn own(&self, step: &'static str, len: u64) -> Result<BorrowedFd<'_>, SegmentError> {
        self.fd().ok_or_else(|| sys(step, len, std::io::ErrorKind::PermissionDenied))
    }

    /// Whether both have descriptors, and of the same memory.
    pub fn same_memory(&self, other: &Segment) -> bool {
        let inode = |s: &Segment| s.fd().and_then(|fd| rustix::fs::fstat(fd).ok()).map(|s| (s.st_dev, s.st_ino));
        inode(self).is_some() && inode(self) == inode(other)
    }

    /// Allocates the pages of a range now, so that running out of memory is an error here and not a fault later.
    pub fn commit(&self, offset: u64, len: u64) -> Result<(), SegmentError> {
        if len == 0 {
            return Ok(());
        }
        let fd = self.own("allocation", len)?;
        loop {
            match rustix::fs::fallocate(fd, FallocateFlags::empty(), offset, len) {
                Err(rustix::io::Errno::INTR) => {}
                r => return r.map_err(|e| sys("allocation", len, e)),
            }
        }
    }

    /// Gives the pages of a range back to the kernel; they read as zero afterwards, in every mapping.
    pub fn release(&self, offset: u64, len: u64) -> Result<(), SegmentError> {
        if len == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let fd = self.own("release", len)?;
        loop {
            match rustix::fs::fallocate(fd, flags, offset, len) {
                Err(rustix::io::Errno::INTR) => {}
                r => return r.map_err(|e| sys("release", len, e)),
            }
        }
    }

    /// Checked pointer to `len` bytes at `offset`; `None` if they are not all inside.
    pub fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        if end > self.len() as u64 {
            return None;
        }
        Some(self.base().wrapping_add(offset as usize))
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "looks at bytes of the mapping")]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_zeroed_sealed_and_bounded() {
        let s = Segment::create("test", 8192).unwrap();
        assert!(s.at(0, 8192).is_some());
        assert!(s.at(1, 8192).is_none());
        assert!(s.at(u64::MAX, 2).is_none());
        // SAFETY: the segment is 8192 bytes and nobody else maps it.
        unsafe { assert!(std::slice::from_raw_parts(s.base(), 8192).iter().all(|b| *b == 0)) };
        assert!(rustix::fs::ftruncate(s.fd().unwrap(), 4096).is_err());
        assert!(rustix::fs::ftruncate(s.fd().unwrap(), 16384).is_err());
    }

    #[test]
    fn a_second_mapping_sees_the_bytes_and_a_release_zeroes_them() {
        let a = Segment::create("test", 8192).unwrap();
        let b = Segment::from_peer(a.fd().unwrap().try_clone_to_owned().unwrap(), 8192).unwrap();
        assert!(b.fd().is_none() && b.commit(0, 4096).is_err() && b.release(0, 4096).is_err());
        // SAFETY: both mappings are 8192 bytes long and used by this thread alone.
        unsafe {
            a.base().add(5000).write_volatile(7);
            assert_eq!(b.base().add(5000).read_volatile(), 7);
        }
        a.release(4096, 4096).unwrap();
        // SAFETY: as above; volatile, because the kernel changed the byte behind the compiler's back.
        unsafe { assert_eq!(b.base().add(5000).read_volatile(), 0) };
    }

    #[test]
    fn a_foreign_descriptor_is_refused() {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let e = Segment::from_peer(fd, 4096).unwrap_err().to_string();
        assert!(e.contains("not sealed"), "{e}");
        let huge = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        match rustix::fs::memfd_create("x", huge) {
            Ok(fd) => {
                rustix::fs::ftruncate(&fd, 2 << 20).unwrap();
                rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
                let e = Segment::watch(fd.try_clone().unwrap()).unwrap_err().to_string();
                assert!(e.contains("not made of ordinary pages"), "{e}");
                let e = Segment::from_peer(fd, 2 << 20).unwrap_err().to_string();
                assert!(e.contains("not made of ordinary pages"), "{e}");
            }
            Err(e) => eprintln!("this kernel has no huge pages, so that no peer can pass any: {e}"),
        }
        let s = Segment::create("test", 4096).unwrap();
        let e = Segment::from_peer(s.fd().unwrap().try_clone_to_owned().unwrap(), 8192).unwrap_err().to_string();
        assert!(e.contains("4096 bytes, 8192"), "{e}");
    }
}
