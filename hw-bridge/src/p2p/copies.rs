//! The bytes of messages: from the sender's memory to the receiver's, on whatever way.

use std::sync::atomic::{AtomicPtr, Ordering};

use super::matching::{Id, Matched};
use super::{Mailbox, OpError};
use crate::exec::sequencer::LocalMem;
use crate::group::{Envelope, SlotKind};
use crate::limits::{EAGER_BYTES, ENVELOPE_BYTES, MAIL_STAGE_BYTES, STREAM_BYTES};
use crate::memory::copy;

/// The memory of an operation. Whoever has begun the operation keeps it as it is until that is done or given up: nobody else
/// touches it but the copies here. The pointer is atomic only so that any thread can make them; nobody changes it.
#[derive(Debug)]
pub(super) struct Memory {
    at: AtomicPtr<u8>,
    pub(super) len: u64,
    /// Its offset in this rank's device memory, if it lies there.
    pub(super) device: Option<u64>,
}

impl Memory {
    pub(super) fn of(mem: &LocalMem<'_>) -> Memory {
        // What is no memory at all is of no kind.
        let device = mem.in_device();
        Memory { at: AtomicPtr::new(mem.ptr), len: mem.len, device }
    }

    fn ptr(&self) -> *mut u8 {
        self.at.load(Ordering::Relaxed)
    }

    /// Where it is, as whoever reads this process's memory says it.
    pub(super) fn address(&self) -> u64 {
        self.ptr().addr() as u64
    }
}

/// A copy that is too large to be made with the mailbox locked. Its operation is busy until it has been made.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) id: Id,
    pub(super) what: Work,
    /// The operation's memory.
    memory: AtomicPtr<u8>,
}

/// What is copied.
#[derive(Debug)]
pub(super) enum Work {
    /// All of a message, from where it lies.
    Whole(Matched),
    /// One piece of it into the staging halves, to rank `to`.
    Fill { to: usize, slot: usize, seq: u64, piece: u64, len: u64 },
    /// One piece out of them.
    Drain(Matched),
}

/// How a copy ended.
#[derive(Debug)]
pub(super) enum End {
    /// It was made.
    Copied,
    /// The sender's memory cannot be read from here.
    Unreadable,
    /// The sender says that it lies where it cannot.
    Outside,
    /// This rank was told to stop.
    Stopped(OpError),
}

/// Bytes of piece `piece` of a message of `len` bytes.
pub(super) fn piece_bytes(len: u64, piece: u64) -> u64 {
    len.saturating_sub(piece * MAIL_STAGE_BYTES as u64).min(MAIL_STAGE_BYTES as u64)
}

impl Job {
    pub(super) fn new(id: Id, what: Work, memory: &Memory) -> Job {
        Job { id, what, memory: AtomicPtr::new(memory.ptr()) }
    }
}

impl Mailbox {
    /// Puts a message of up to [`ENVELOPE_BYTES`] into its envelope.
    pub(super) fn enclose(&self, memory: &Memory, envelope: &mut Envelope) {
        debug_assert!(memory.len <= ENVELOPE_BYTES as u64);
        let len = (memory.len as usize).min(ENVELOPE_BYTES);
        // SAFETY: the memory has `len` bytes as long as its operation is not done, which the caller has at hand with the mailbox
        // locked; the envelope is a local of the caller.
        unsafe { copy::copy(envelope.payload.as_mut_ptr(), memory.ptr(), len) };
    }

    /// Copies a message of up to [`EAGER_BYTES`] into its slot of the outbox for rank `to`.
    pub(super) fn put_in(&self, memory: &Memory, to: usize, slot: usize) {
        debug_assert!(memory.len <= EAGER_BYTES as u64);
        let Some(outbox) = self.to(to) else { return };
        let len = (memory.len as usize).min(EAGER_BYTES);
        // SAFETY: the memory as in `enclose`; a slot's payload has EAGER_BYTES inside the segment, which its owner has
        // allocated, and belongs to nobody else while the slot does.
        unsafe { copy::copy(outbox.payload(slot), memory.ptr(), len) };
        self.endpoint.control().mail_tally().copied(memory.len);
    }

    /// Copies a message that is in its envelope, or in its slot, to the memory of the receive that it was matched with, which
    /// has room for it.
    pub(super) fn take_out(&self, memory: &Memory, from: usize, e: &Envelope) {
        debug_assert!(e.len <= memory.len);
        let most = if e.kind == SlotKind::Inline { ENVELOPE_BYTES } else { EAGER_BYTES };
        let len = e.len.min(memory.len).min(most as u64) as usize;
        let src = match e.kind {
            SlotKind::Inline => e.payload.as_ptr(),
            _ => match self.from(from) {
                Some(outbox) => outbox.payload(e.slot).cast_const(),
                None => return,
            },
        };
        // SAFETY: the memory has `len` bytes as long as its operation is not done, as in `enclose`, and is writable (checked
        // when it was posted); the source has `most` bytes: the envelope's own, or those of a slot inside the sender's segment,
        // which may change meanwhile if the sender does what it should not: they are copied as they are.
        unsafe { copy::copy(memory.ptr(), src, len) };
        self.endpoint.control().mail_tally().copied(len as u64);
    }

    /// Makes a copy, in stretches, with the mailbox unlocked.
    pub(super) fn copy(&self, job: &Job) -> End {
        let mine = job.memory.load(Ordering::Relaxed);
        let staged = |piece: u64| piece as usize * MAIL_STAGE_BYTES;
        // SAFETY (of all three): a busy operation is neither done nor given up, so its memory is as it was given, with at least
        // the message's bytes for a receive and exactly them for a send; pieces lie inside the message. What a peer owns was
        // checked to be inside its mapping.
        match &job.what {
            Work::Fill { to, piece, len, .. } => {
                let Some(outbox) = self.to(*to) else { return End::Outside };
                let (src, dst) = (mine.wrapping_add(staged(*piece)).cast_const(), outbox.half(*piece));
                // SAFETY: as above; a half has MAIL_STAGE_BYTES in our segment, and the reader has read what it held before.
                self.stretch(*len, |at, len| unsafe {
                    copy::copy(dst.wrapping_add(at), src.wrapping_add(at), len);
                    End::Copied
                })
            }
            Work::Drain(m) => {
                let Some(outbox) = self.from(m.from) else { return End::Outside };
                let (src, dst) = (outbox.half(m.pieces).cast_const(), mine.wrapping_add(staged(m.pieces)));
                // SAFETY: as above; a half has MAIL_STAGE_BYTES in the sender's segment.
                self.stretch(piece_bytes(m.envelope.len, m.pieces), |at, len| unsafe {
                    copy::copy(dst.wrapping_add(at), src.wrapping_add(at), len);
                    End::Copied
                })
            }
            Work::Whole(m) => self.whole(m, mine),
        }
    }

    /// Copies all of a message from where its sender says that it lies.
    fn whole(&self, m: &Matched, mine: *mut u8) -> End {
        let (Some(end), Some(outbox)) = (self.end(m.from), self.from(m.from)) else { return End::Outside };
        let e = &m.envelope;
        let mut moved = 0;
        let mut count = |len: usize| {
            moved += len as u64;
            outbox.set_moved(e.slot, moved);
        };
        if e.kind == SlotKind::Device {
            let Some(src) = end.hbm.at(e.at, e.len) else { return End::Outside };
            let (own, streaming) = (m.from == self.endpoint.rank(), e.len >= STREAM_BYTES);
            return self.stretch(e.len, |at, len| {
                let (dst, src) = (mine.wrapping_add(at), src.wrapping_add(at).cast_const());
                // SAFETY: the receive's memory has `e.len` bytes at least (it was matched so) and is this thread's until the
                // operation is done; the source is inside the sender's device memory (just checked), which stays mapped.
                // Of this rank's own device memory source and destination may overlap.
                unsafe {
                    match (own, streaming) {
                        (true, _) => std::ptr::copy(src, dst, len),
                        (_, true) => copy::copy_nt(dst, src, len),
                        (_, false) => copy::copy(dst, src, len),
                    }
                };
                count(len);
                End::Copied
            });
        }
        self.stretch(e.len, |at, len| {
            // SAFETY: the destination as above; the kernel checks the address in the sender's process.
            match unsafe { end.space.read(e.at.wrapping_add(at as u64), mine.wrapping_add(at), len as u64) } {
                Ok(()) => {
                    count(len);
                    End::Copied
                }
                Err(why) => {
                    tracing::debug!("a message of rank {} is to be staged: {why}", m.from);
                    End::Unreadable
                }
            }
        })
    }

    /// Makes a copy of `len` bytes piece by piece, each when it is the tenant's turn.
    fn stretch(&self, len: u64, mut copy: impl FnMut(usize, usize) -> End) -> End {
        let share = self.endpoint.share();
        let mut at = 0;
        while at < len {
            let part = share.stretch().min(len - at);
            let turn = self.endpoint.usable().and_then(|()| share.pace(part, || self.endpoint.usable()));
            if let Err(why) = turn {
                return End::Stopped(why);
            }
            match copy(at as usize, part as usize) {
                End::Copied => at += part,
                other => return other,
            }
        }
        End::Copied
    }
}
