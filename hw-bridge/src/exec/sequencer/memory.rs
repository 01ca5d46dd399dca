//! The caller's buffers of one call.

use std::marker::PhantomData;

use crate::memory::hbm::{Hbm, HbmBuf};

/// This rank's buffer for one call: device memory (which peers reach) or private memory (which they do not).
#[derive(Debug, Clone, Copy)]
pub struct LocalMem<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) len: u64,
    pub(crate) writable: bool,
    /// Device memory: its offset in the arena, the arena, and the buffer it is a part of.
    pub(crate) hbm: Option<u64>,
    pub(crate) arena: *const u8,
    pub(super) buf: Option<&'a HbmBuf>,
    /// The buffers an operation uses of a whole arena.
    pub(super) parts: &'a [&'a HbmBuf],
    life: PhantomData<&'a [u8]>,
}

impl<'a> LocalMem<'a> {
    /// No memory: a rank that only receives has no input, and the other way round.
    pub fn none() -> LocalMem<'static> {
        LocalMem {
            ptr: std::ptr::NonNull::<u8>::dangling().as_ptr(),
            len: 0,
            writable: true,
            hbm: Some(0),
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// `len` bytes of device memory from `offset`; `None` if they are not all inside the buffer.
    pub fn hbm(buf: &'a HbmBuf, offset: u64, len: u64) -> Option<LocalMem<'a>> {
        if offset.checked_add(len)? > buf.len() {
            return None;
        }
        let ptr = buf.ptr().wrapping_add(offset as usize);
        Some(LocalMem {
            ptr,
            len,
            writable: true,
            hbm: Some(buf.offset() + offset),
            arena: buf.hbm().segment().base(),
            buf: Some(buf),
            parts: &[],
            life: PhantomData,
        })
    }

    /// All of a core's device memory, for schedules whose positions are offsets in it. `parts` are the buffers that the
    /// operation uses: they must stay allocated while it runs, and are kept if it fails in a peer's hands.
    pub fn arena(hbm: &'a Hbm, parts: &'a [&'a HbmBuf]) -> LocalMem<'a> {
        let base = hbm.segment().base();
        let len = hbm.segment().len() as u64;
        LocalMem { ptr: base, len, writable: true, hbm: Some(0), arena: base, buf: None, parts, life: PhantomData }
    }

    /// Private memory to read from.
    pub fn input(bytes: &'a [u8]) -> LocalMem<'a> {
        LocalMem {
            ptr: bytes.as_ptr().cast_mut(),
            len: bytes.len() as u64,
            writable: false,
            hbm: None,
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// Private memory to write to.
    pub fn output(bytes: &'a mut [u8]) -> LocalMem<'a> {
        LocalMem {
            ptr: bytes.as_mut_ptr(),
            len: bytes.len() as u64,
            writable: true,
            hbm: None,
            arena: std::ptr::null(),
            buf: None,
            parts: &[],
            life: PhantomData,
        }
    }

    /// Private memory that is input and output at once; the input is `len` bytes from `offset`.
    pub fn in_place(bytes: &'a mut [u8], offset: usize, len: usize) -> Option<(LocalMem<'a>, LocalMem<'a>)> {
        if offset.checked_add(len)? > bytes.len() {
            return None;
        }
        let output = LocalMem::output(bytes);
        let input = LocalMem { ptr: output.ptr.wrapping_add(offset), len: len as u64, ..output };
        Some((input, output))
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether peers reach it.
    pub fn is_device(&self) -> bool {
        self.hbm.is_some()
    }

    /// How this memory and another lie to one another: the byte distance if they overlap.
    pub fn overlap(&self, other: &LocalMem<'_>) -> Option<i64> {
        let (a, b) = (self.ptr as u64, other.ptr as u64);
        let apart = self.len == 0 || other.len == 0 || a + self.len <= b || b + other.len <= a;
        if apart { None } else { Some(a.wrapping_sub(b) as i64) }
    }
}
