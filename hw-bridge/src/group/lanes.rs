//! One lane of a control segment: arrival records, payloads, progress.

use std::sync::atomic::{Ordering, fence};

use super::control::Control;
use super::flight::{Flight, Tally};
use super::layout::*;
use crate::call::{Op, describe};
use crate::limits::{INLINE_BYTES, LARGE_SLOT_BYTES, LARGE_SLOTS, SLOT_BYTES, SLOTS, STAGE_BYTES};
use crate::os::bell::Bell;

/// What a record says beside the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aside {
    /// Whom the rank sends to, [`NO_RANK`] for nobody.
    pub dst: u16,
    /// Whom it receives from.
    pub src: u16,
    /// Digest of the rings and of all headers before this one: it shows a difference in an operation in which the two
    /// ranks did not meet.
    pub digest: u32,
}

impl Aside {
    fn pack(self) -> u64 {
        u64::from(self.dst) | u64::from(self.src) << 16 | u64::from(self.digest) << 32
    }

    fn unpack(word: u64) -> Aside {
        Aside { dst: word as u16, src: (word >> 16) as u16, digest: (word >> 32) as u32 }
    }
}

/// Where in a lane the payload of operation `seq` lies: in the record's line if it fits, else behind it, else among the large
/// ones.
#[inline]
pub(crate) fn payload_at(seq: u64, len: usize) -> usize {
    debug_assert!(len <= LARGE_SLOT_BYTES);
    if len > SLOT_BYTES {
        return LARGE_AT + (seq as usize % LARGE_SLOTS) * LARGE_SLOT_BYTES;
    }
    slot_at(seq) + if len <= INLINE_BYTES { 64 - INLINE_BYTES } else { 64 }
}

/// Where in a lane a staging area lies: `result` picks the pair, `half` the piece's parity.
#[inline]
pub(crate) fn stage_at(result: bool, half: usize) -> usize {
    STAGE_AT + (usize::from(result) * 2 + half % 2) * STAGE_BYTES
}

#[inline]
fn slot_at(seq: u64) -> usize {
    SLOTS_AT + (seq as usize % SLOTS) * SLOT_STRIDE
}

/// One lane of a control segment.
#[derive(Debug, Clone, Copy)]
pub struct LaneView<'a> {
    pub(super) base: *mut u8,
    pub(super) life: std::marker::PhantomData<&'a Control>,
}

impl<'a> LaneView<'a> {
    #[inline]
    fn head(&self) -> &'a LaneHead {
        // SAFETY: a lane begins at a page of the segment and has LANE_BYTES there; LaneHead consists of atomics, for which
        // any bytes are valid; the segment lives as long as the Control that 'a borrows.
        unsafe { &*self.base.cast::<LaneHead>() }
    }

    #[inline]
    pub(super) fn record(&self, seq: u64) -> &'a Record {
        // SAFETY: a slot begins at a multiple of 64 and the record ends before STAGE_AT <= LANE_BYTES; atomics only; the life is
        // as for `head`.
        unsafe { &*self.base.wrapping_add(slot_at(seq)).cast::<Record>() }
    }

    /// Its first byte: [`payload_at`] and [`stage_at`] count from here.
    #[inline]
    pub(crate) fn first(&self) -> *mut u8 {
        self.base
    }

    /// `sequence << 16 | step` of the rank.
    #[inline]
    pub fn progress(&self) -> u64 {
        self.head().progress.0.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn set_progress(&self, seq: u64, step: u16) {
        self.head().progress.0.store(seq << 16 | u64::from(step), Ordering::Release);
    }

    pub(crate) fn set_left(&self, seq: u64) {
        self.head().left.0.store(seq, Ordering::Release);
    }

    /// The last operation that the rank left with an error: it touches nothing for it any more.
    pub(crate) fn left(&self) -> u64 {
        self.head().left.0.load(Ordering::Acquire)
    }

    /// The owner's bell.
    #[inline]
    pub fn bell(&self) -> &'a Bell {
        &self.head().bell.0
    }

    /// The owner's counters.
    #[inline]
    pub fn tally(&self) -> &'a Tally {
        &self.head().tally.0
    }

    /// The owner's flight records.
    #[inline]
    pub fn flight(&self) -> &'a Flight {
        // SAFETY: Flight is RING_BYTES of atomics from a page of the lane on; the life is as for `head`.
        unsafe { &*self.base.wrapping_add(FLIGHT_AT).cast::<Flight>() }
    }

    /// Publishes the arrival record of operation `seq`; the payload must be in place.
    #[inline]
    pub(crate) fn publish(&self, seq: u64, [what, count]: [u64; 2], aside: Aside, words: Option<[u64; 4]>) {
        let r = self.record(seq);
        // Who reads the record that was here, as `call` does at any time, must not take a part of this one for it.
        r.tag.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        r.what.store(what, Ordering::Relaxed);
        r.count.store(count, Ordering::Relaxed);
        r.aside.store(aside.pack(), Ordering::Relaxed);
        if let Some(words) = words {
            for (to, w) in r.words.iter().zip(words) {
                to.store(w, Ordering::Relaxed);
            }
        }
        r.tag.store(seq, Ordering::Release);
        self.set_progress(seq, STEP_ARRIVED);
    }

    /// Whether the record of `seq` is there.
    #[inline]
    pub(crate) fn arrived(&self, seq: u64) -> bool {
        self.record(seq).tag.load(Ordering::Acquire) == seq
    }

    /// The rank's call of operation `seq` in words, while its record is kept.
    #[cold]
    pub(crate) fn call(&self, seq: u64) -> Option<String> {
        // The first look makes the record of `seq`, or what was written over it, visible. If any of what is read then is of a
        // later record, this fence meets the one in `publish`, and the second look sees that record's 0 or what came after;
        // no number comes twice.
        if !self.arrived(seq) {
            return None;
        }
        let r = self.record(seq);
        let (what, count) = (r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (r.tag.load(Ordering::Relaxed) == seq).then(|| describe([what, count]))
    }

    /// Compares the rank's header of `seq` with ours; `Err` is the other's view in words.
    #[inline]
    pub(crate) fn same_call(&self, seq: u64, ours: [u64; 2]) -> Result<(), String> {
        let r = self.record(seq);
        let theirs = [r.what.load(Ordering::Relaxed), r.count.load(Ordering::Relaxed)];
        if theirs == ours { Ok(()) } else { Err(other_call(theirs, ours)) }
    }

    /// The words of a record without inline payload: where the rank's buffers lie in its device memory (input, output), or
    /// address and bytes of an input in private memory that peers read;
    /// the digest of what the header cannot hold (counts of each rank, pairs), and the bits of its scale.
    #[inline]
    pub(crate) fn words(&self, seq: u64) -> [u64; 4] {
        let r = self.record(seq);
        [0, 1, 2, 3].map(|i| r.words[i].load(Ordering::Relaxed))
    }

    /// What the record of `seq` says beside its header.
    #[inline]
    pub(crate) fn aside(&self, seq: u64) -> Aside {
        Aside::unpack(self.record(seq).aside.load(Ordering::Relaxed))
    }

    /// What the rank did last, in words: for messages about ranks that are missing.
    pub fn last_seen(&self, seq: u64) -> String {
        let p = self.progress();
        let (at, step) = (p >> 16, p as u16);
        if at == 0 {
            return "it has not started any operation".into();
        }
        let what = self.call(at).unwrap_or_else(|| "whose record is gone".into());
        match step {
            STEP_DONE => format!("its last operation was #{at} ({what}), completed"),
            _ if at == seq => format!("it is in operation #{at} ({what}) at step {step}"),
            _ => format!("it is still in operation #{at} ({what}) at step {step}"),
        }
    }
}

/// A call that is not ours, in words.
#[cold]
fn other_call(theirs: [u64; 2], ours: [u64; 2]) -> String {
    let mut text = describe(theirs);
    if (theirs[0] ^ ours[0]) & !(0xFF << 48) == 0 && theirs[1] == ours[1] {
        text += " (WCCL_ALGO, WCCL_ONE_HOP_MAX or WCCL_TUNE_FILE differ between them";
        text += if ours[0] as u8 == Op::AllToAll as u8 { ", or only one is in place)" } else { ")" };
    }
    text
}
