//! The messages that a rank has for one other rank: envelopes, payloads, and what became of them.
//!
//! The owner writes envelopes and payloads; the reader writes how far it has read, and both change the *state* of a message in
//! one of the slots. Everything here is words that two processes share: what is read was written by anybody, and is an
//! allegation to whoever reads it.

use std::sync::atomic::Ordering;

use super::control::Control;
use super::layout::{self, ENVELOPES_AT, MAIL_STAGE_AT, OutboxHead, PAYLOADS_AT};
use crate::limits::{EAGER_BYTES, ENVELOPE_BYTES, ENVELOPES, MAIL_SLOTS, MAIL_STAGE_BYTES};

/// How a message that has a slot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum SlotStanding {
    /// It waits for a receive.
    Open = 1,
    /// A receive has it, and reads it from where it lies, or will have it staged.
    Taken = 2,
    /// Its sender is to put it into the staging halves, piece by piece.
    Staging = 3,
    /// Its reader needs it no more.
    Done = 4,
    /// Its sender has taken it back.
    Withdrawn = 5,
}

/// Where the payload of a message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum SlotKind {
    /// In the envelope.
    Inline = 1,
    /// In the slot.
    Eager = 2,
    /// In the sender's device memory.
    Device = 3,
    /// In the sender's private memory.
    Private = 4,
    /// In private memory that is not to be read: it is to be staged.
    Staged = 5,
}

/// What is said of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Envelope {
    pub tag: u32,
    pub kind: SlotKind,
    /// Its slot; of no use to one that is inline.
    pub slot: usize,
    pub len: u64,
    /// Offset in device memory, or address in private memory.
    pub at: u64,
    pub payload: [u8; ENVELOPE_BYTES],
}

/// What an envelope says that cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// An outbox that has memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outbox<'a> {
    base: *mut u8,
    life: std::marker::PhantomData<&'a Control>,
}

const STATE_BITS: u32 = 3;
const PIECE_BITS: u32 = 24;

impl<'a> Outbox<'a> {
    /// The outbox at `base`, a page of the control segment that has all of its bytes.
    pub(super) fn new(base: *mut u8, _of: &'a Control) -> Outbox<'a> {
        Outbox { base, life: std::marker::PhantomData }
    }

    #[inline]
    fn head(&self) -> &'a OutboxHead {
        // SAFETY: an outbox begins at a page of the segment and has OUTBOX_BYTES there (`Control::outbox`); OutboxHead ends
        // before ENVELOPES_AT and consists of atomics, for which any bytes are valid; the segment lives as long as the Control
        // that 'a borrows.
        unsafe { &*self.base.cast::<OutboxHead>() }
    }

    #[inline]
    fn words(&self, seq: u64) -> &'a layout::Envelope {
        let at = ENVELOPES_AT + (seq as usize % ENVELOPES) * size_of::<layout::Envelope>();
        // SAFETY: the envelopes end before PAYLOADS_AT, and `at` is a multiple of their size, which is their alignment; atomics
        // only; the life is as for `head`.
        unsafe { &*self.base.wrapping_add(at).cast::<layout::Envelope>() }
    }

    /// Puts the envelope of message `seq` there, whose place its reader has read before; payloads and state must be in place.
    #[inline]
    pub(crate) fn publish(&self, seq: u64, e: &Envelope) {
        let w = self.words(seq);
        let what = u64::from(e.tag) | (e.kind as u64) << 32 | (e.slot as u64) << 40;
        w.what.store(what, Ordering::Relaxed);
        w.len.store(e.len, Ordering::Relaxed);
        w.at.store(e.at, Ordering::Relaxed);
        if e.kind == SlotKind::Inline {
            for (to, from) in w.payload.iter().zip(e.payload.as_chunks::<8>().0) {
                to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
            }
        }
        w.seq.store(seq, Ordering::Release);
    }

    /// The envelope of message `seq`, the next one that is not read yet, if it is there.
    #[inline]
    pub(crate) fn envelope(&self, seq: u64) -> Option<Result<Envelope, Corrupt>> {
        let w = self.words(seq);
        if w.seq.load(Ordering::Acquire) != seq {
            return None;
        }
        let (what, len, at) =
            (w.what.load(Ordering::Relaxed), w.len.load(Ordering::Relaxed), w.at.load(Ordering::Relaxed));
        let (kind, most) = match what >> 32 & 0xFF {
            1 => (SlotKind::Inline, ENVELOPE_BYTES as u64),
            2 => (SlotKind::Eager, EAGER_BYTES as u64),
            3 => (SlotKind::Device, i64::MAX as u64),
            4 => (SlotKind::Private, i64::MAX as u64),
            5 => (SlotKind::Staged, i64::MAX as u64),
            _ => return Some(Err(Corrupt)),
        };
        let slot = (what >> 40) as usize;
        if slot >= MAIL_SLOTS || len > most {
            return Some(Err(Corrupt));
        }
        let mut payload = [0; ENVELOPE_BYTES];
        if kind == SlotKind::Inline {
            for (to, from) in payload.as_chunks_mut::<8>().0.iter_mut().zip(&w.payload) {
                *to = from.load(Ordering::Relaxed).to_ne_bytes();
            }
        }
        Some(Ok(Envelope { tag: what as u32, kind, slot, len, at, payload }))
    }

    /// The last envelope that the reader has read, as it says.
    #[inline]
    pub(crate) fn drained(&self) -> u64 {
        self.head().drained.0.load(Ordering::Acquire)
    }

    /// Says that the envelopes up to `seq` were read: their places are the owner's again.
    #[inline]
    pub(crate) fn set_drained(&self, seq: u64) {
        self.head().drained.0.store(seq, Ordering::Release);
    }

    #[inline]
    fn slot(&self, slot: usize) -> &'a layout::MailSlot {
        &self.head().slots[slot % MAIL_SLOTS]
    }

    /// How message `seq` stands, which has this slot; `None` if the slot says nothing of it.
    #[inline]
    pub(crate) fn standing(&self, slot: usize, seq: u64) -> Option<SlotStanding> {
        let word = self.slot(slot).state.load(Ordering::Acquire);
        (word >> STATE_BITS == seq).then_some(match word & 7 {
            1 => SlotStanding::Open,
            2 => SlotStanding::Taken,
            3 => SlotStanding::Staging,
            4 => SlotStanding::Done,
            _ => SlotStanding::Withdrawn,
        })
    }

    /// Gives the slot to message `seq`.
    #[inline]
    pub(crate) fn assign(&self, slot: usize, seq: u64) {
        self.slot(slot).moved.store(0, Ordering::Relaxed);
        self.slot(slot).state.store(seq << STATE_BITS | SlotStanding::Open as u64, Ordering::Relaxed);
    }

    /// Has message `seq` stand otherwise, if it stands as `from` says: whether it did. What was read of the payload before is
    /// read before the other end sees it.
    #[inline]
    pub(crate) fn turn(&self, slot: usize, seq: u64, from: SlotStanding, to: SlotStanding) -> bool {
        let word = |s: SlotStanding| seq << STATE_BITS | s as u64;
        let state = &self.slot(slot).state;
        state.compare_exchange(word(from), word(to), Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Bytes that the reader has copied of the message in this slot, as it says.
    pub(crate) fn moved(&self, slot: usize) -> u64 {
        self.slot(slot).moved.load(Ordering::Relaxed)
    }

    /// Says how many bytes were copied of the message in this slot.
    pub(crate) fn set_moved(&self, slot: usize, bytes: u64) {
        self.slot(slot).moved.store(bytes, Ordering::Relaxed);
    }

    /// Where the payload of a slot lies.
    #[inline]
    pub(crate) fn payload(&self, slot: usize) -> *mut u8 {
        self.base.wrapping_add(PAYLOADS_AT + (slot % MAIL_SLOTS) * EAGER_BYTES)
    }

    /// One of the staging halves.
    #[inline]
    pub(crate) fn half(&self, piece: u64) -> *mut u8 {
        self.base.wrapping_add(MAIL_STAGE_AT + (piece % 2) as usize * MAIL_STAGE_BYTES)
    }

    /// Pieces of message `seq` that were staged.
    pub(crate) fn filled(&self, seq: u64) -> u64 {
        pieces(self.head().filled.0.load(Ordering::Acquire), seq)
    }

    /// Says how many.
    pub(crate) fn set_filled(&self, seq: u64, pieces: u64) {
        self.head().filled.0.store(seq << PIECE_BITS | pieces, Ordering::Release);
    }

    /// Pieces of message `seq` that were read.
    pub(crate) fn taken(&self, seq: u64) -> u64 {
        pieces(self.head().taken.0.load(Ordering::Acquire), seq)
    }

    /// Says how many.
    pub(crate) fn set_taken(&self, seq: u64, pieces: u64) {
        self.head().taken.0.store(seq << PIECE_BITS | pieces, Ordering::Release);
    }
}

/// The pieces that a word counts, if it is of message `seq`.
fn pieces(word: u64, seq: u64) -> u64 {
    if word >> PIECE_BITS == seq & (u64::MAX >> PIECE_BITS) { word & ((1 << PIECE_BITS) - 1) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_envelope_is_read_as_it_was_written_and_refused_where_it_cannot_be() {
        let owner = Control::create(0, 2).unwrap();
        owner.open_outbox(1).unwrap();
        let outbox = owner.outbox(1).unwrap();
        let payload = std::array::from_fn(|i| i as u8);
        let e = Envelope { tag: u32::MAX, kind: SlotKind::Inline, slot: 3, len: 32, at: 9, payload };
        assert_eq!(outbox.envelope(1), None);
        outbox.publish(1, &e);
        assert_eq!(outbox.envelope(1), Some(Ok(e)));
        assert_eq!(outbox.envelope(1 + ENVELOPES as u64), None);
        for (kind, slot, len) in [
            (SlotKind::Inline, 0, ENVELOPE_BYTES as u64 + 1),
            (SlotKind::Eager, 0, EAGER_BYTES as u64 + 1),
            (SlotKind::Device, MAIL_SLOTS, 1),
            (SlotKind::Private, 0, u64::MAX),
        ] {
            outbox.publish(2, &Envelope { kind, slot, len, ..e });
            assert_eq!(outbox.envelope(2), Some(Err(Corrupt)), "{kind:?}");
        }
        outbox.words(3).what.store(0xFF << 32, Ordering::Relaxed);
        outbox.words(3).seq.store(3, Ordering::Relaxed);
        assert_eq!(outbox.envelope(3), Some(Err(Corrupt)));
    }

    /// Sender and receiver change the state at once: one of them does, and both know which.
    #[test]
    fn a_message_is_taken_or_withdrawn_and_never_both() {
        let owner = Control::create(0, 2).unwrap();
        owner.open_outbox(1).unwrap();
        let outbox = || owner.outbox(1).unwrap();
        for seq in 1..500 {
            outbox().assign(5, seq);
            let (done, withdrawn) = std::thread::scope(|s| {
                let reader = s.spawn(|| {
                    outbox().turn(5, seq, SlotStanding::Open, SlotStanding::Taken)
                        && outbox().turn(5, seq, SlotStanding::Taken, SlotStanding::Done)
                });
                let from = [SlotStanding::Open, SlotStanding::Taken];
                let withdrawn = from.into_iter().any(|from| outbox().turn(5, seq, from, SlotStanding::Withdrawn));
                (reader.join().unwrap(), withdrawn)
            });
            // A sender that looks at the wrong moments twice has another look to take.
            let stands = outbox().standing(5, seq);
            assert!(!(done && withdrawn), "{stands:?}");
            assert_eq!(withdrawn, stands == Some(SlotStanding::Withdrawn));
            assert_eq!(outbox().standing(5, seq + 1), None);
            assert!(!outbox().turn(5, seq + 1, SlotStanding::Open, SlotStanding::Taken));
        }
    }

    #[test]
    fn pieces_are_counted_for_one_message() {
        let owner = Control::create(0, 2).unwrap();
        owner.open_outbox(1).unwrap();
        let outbox = owner.outbox(1).unwrap();
        outbox.set_filled(7, 3);
        outbox.set_taken(7, 2);
        assert_eq!((outbox.filled(7), outbox.taken(7), outbox.filled(8), outbox.taken(0)), (3, 2, 0, 0));
        assert_eq!(outbox.half(3) as usize - outbox.half(2) as usize, MAIL_STAGE_BYTES);
    }
}
