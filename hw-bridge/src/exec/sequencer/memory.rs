//! The caller's buffers of one call.

use std::marker::PhantomData;

use crate::memory::hbm::{Hbm, HbmBuf};

/// This rank's buffer for one call: device memory (which peers reach) or private memory (which they do not).
#[derive(Debug, Clone, Copy)]
pub struct LocalMem<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) len: u64,
    pub(super) kind: MemoryKind<'a>,
}

/// What memory it is.
#[derive(Debug, Clone, Copy)]
pub(super) enum MemoryKind<'a> {
    /// None at all.
    Nothing,
    /// Private, lent for reading.
    Read(PhantomData<&'a [u8]>),
    /// Private, lent for writing.
    Written(PhantomData<&'a mut [u8]>),
    /// A part of this buffer in device memory.
    Part(&'a HbmBuf),
    /// All of a core's device memory.
    Arena(&'a Arena<'a>),
}

/// All of a core's device memory, for schedules whose positions are offsets in it.
#[derive(Debug, Clone, Copy)]
pub struct Arena<'a> {
    /// Whose it is.
    pub hbm: &'a Hbm,
    /// The buffers that the operation uses: they must stay allocated while it runs, and are kept if it fails in a peer's hands.
    pub parts: &'a [&'a HbmBuf],
}

impl<'a> LocalMem<'a> {
    /// No memory: a rank that only receives has no input, and the other way round.
    #[inline]
    pub fn none() -> LocalMem<'static> {
        LocalMem { ptr: std::ptr::NonNull::<u8>::dangling().as_ptr(), len: 0, kind: MemoryKind::Nothing }
    }

    /// `len` bytes of device memory from `offset`; `None` if they are not all inside the buffer.
    #[inline]
    pub fn hbm(buf: &'a HbmBuf, offset: u64, len: u64) -> Option<LocalMem<'a>> {
        if offset.checked_add(len)? > buf.len() {
            return None;
        }
        Some(LocalMem { ptr: buf.ptr().wrapping_add(offset as usize), len, kind: MemoryKind::Part(buf) })
    }

    /// All of a core's device memory.
    pub fn arena(arena: &'a Arena<'a>) -> LocalMem<'a> {
        let segment = arena.hbm.segment();
        LocalMem { ptr: segment.base(), len: segment.len() as u64, kind: MemoryKind::Arena(arena) }
    }

    /// Private memory to read from.
    #[inline]
    pub fn input(bytes: &'a [u8]) -> LocalMem<'a> {
        LocalMem { ptr: bytes.as_ptr().cast_mut(), len: bytes.len() as u64, kind: MemoryKind::Read(PhantomData) }
    }

    /// Private memory to write to.
    #[inline]
    pub fn output(bytes: &'a mut [u8]) -> LocalMem<'a> {
        LocalMem { ptr: bytes.as_mut_ptr(), len: bytes.len() as u64, kind: MemoryKind::Written(PhantomData) }
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
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it may be written.
    #[inline]
    pub(crate) fn is_writable(&self) -> bool {
        !matches!(self.kind, MemoryKind::Read(_))
    }

    /// Whether it can stand where a schedule wants `need` bytes of private memory, or of device memory.
    #[inline]
    pub(super) fn serves(&self, need: u64, private: bool) -> bool {
        need == 0 || matches!(self.kind, MemoryKind::Read(_) | MemoryKind::Written(_)) == private
    }

    /// Whether it is memory of this core, if of any.
    #[inline]
    pub(crate) fn is_of(&self, core: &Hbm) -> bool {
        match self.kind {
            MemoryKind::Part(buf) => std::ptr::eq(&**buf.hbm(), core),
            MemoryKind::Arena(arena) => std::ptr::eq(arena.hbm, core),
            MemoryKind::Nothing | MemoryKind::Read(_) | MemoryKind::Written(_) => true,
        }
    }

    /// Its first byte in device memory, counted from the start of `core`'s, whose it is; 0 if it is none.
    #[inline]
    pub(super) fn offset_in(&self, core: &Hbm) -> u64 {
        match self.kind {
            MemoryKind::Part(_) => self.ptr.addr().wrapping_sub(core.segment().base().addr()) as u64,
            _ => 0,
        }
    }

    /// Its offset in its core's device memory, if it is a part of that.
    pub(crate) fn in_device(&self) -> Option<u64> {
        match self.kind {
            MemoryKind::Part(buf) => Some(self.offset_in(buf.hbm())),
            _ => None,
        }
    }

    /// Has the device memory stay allocated for good.
    pub(super) fn keep(&self) {
        match self.kind {
            MemoryKind::Part(buf) => buf.keep(),
            MemoryKind::Arena(arena) => arena.parts.iter().for_each(|buf| buf.keep()),
            MemoryKind::Nothing | MemoryKind::Read(_) | MemoryKind::Written(_) => {}
        }
    }
}

/// Input and output of one call.
#[derive(Debug, Clone, Copy)]
pub struct CallBuffers<'a> {
    pub(super) input: LocalMem<'a>,
    pub(super) output: LocalMem<'a>,
    overlap: Option<i64>,
}

impl<'a> CallBuffers<'a> {
    /// Of these two, which may overlap.
    #[inline]
    pub fn new(input: LocalMem<'a>, output: LocalMem<'a>) -> CallBuffers<'a> {
        let (a, b) = (input.ptr.addr() as u64, output.ptr.addr() as u64);
        let apart = input.len == 0 || output.len == 0 || a + input.len <= b || b + output.len <= a;
        let overlap = if apart { None } else { Some(a.wrapping_sub(b) as i64) };
        CallBuffers { input, output, overlap }
    }

    /// Where the input begins, in bytes from the output's first, if they overlap.
    #[inline]
    pub fn overlap(&self) -> Option<i64> {
        self.overlap
    }
}
