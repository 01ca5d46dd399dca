//! The step language, and the check that makes a schedule executable.

use crate::call::{FLAG_PRIVATE, OpHeader, ReduceOp};
use crate::group::STEP_DONE;
use crate::limits::{
    INLINE_BYTES, LARGE_SLOT_BYTES, LARGE_SLOTS, MAX_LOCAL_RANKS, SLOT_BYTES, SLOTS, STAGE_BYTES, STREAM_BYTES,
};

/// A buffer that a step reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// This rank's input.
    In,
    /// This rank's output.
    Out,
    /// A peer's input, in its device memory or, if the schedule is `direct`, in its private memory.
    PeerIn(u16),
    /// A peer's output in its device memory.
    PeerOut(u16),
    /// The payload that came with a rank's arrival record; this rank's own included.
    Slot(u16),
    /// A rank's staging half for input pieces; this rank's own included.
    Stage(u16, u8),
    /// A rank's staging half for results; this rank's own included.
    Result(u16, u8),
}

impl Place {
    /// Whose scale a source here is multiplied by in a pre-scaled sum of `rank`: inputs are scaled, sums are not.
    #[inline]
    pub fn scaled_by(self, rank: usize) -> Option<usize> {
        match self {
            Place::In => Some(rank),
            Place::PeerIn(r) | Place::Slot(r) | Place::Stage(r, _) => Some(usize::from(r)),
            Place::Out | Place::PeerOut(_) | Place::Result(..) => None,
        }
    }
}

/// A position in a buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At(pub Place, pub u64);

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Wait for a peer's arrival record, compare headers, learn where its buffers are.
    Arrival(u16),
    /// Check that an arrived peer sends to this rank.
    SendsToMe(u16),
    /// Check that an arrived peer receives from this rank.
    ReceivesFromMe(u16),
    /// Wait until a peer has signalled this step of this operation.
    Wait {
        /// The peer.
        peer: u16,
        /// Its step.
        step: u16,
    },
    /// Tell the peers that this rank has come so far.
    Signal(u16),
    /// Move bytes.
    Copy {
        /// To.
        dst: At,
        /// From.
        src: At,
        /// Bytes.
        len: u64,
    },
    /// Reduce `n` sources, listed in [`Schedule::sources`] from `first`, in that order.
    Reduce {
        /// To; may be one of the sources.
        dst: At,
        /// First source.
        first: u32,
        /// Number of sources.
        n: u32,
        /// Elements.
        count: u64,
        /// Type of the reduction: the header's, or the sum that an average begins with.
        op: ReduceOp,
    },
    /// Divide by `n`: the end of an average whose sums were made pairwise.
    Average {
        /// What to divide.
        dst: At,
        /// Elements.
        count: u64,
        /// Divisor.
        n: u32,
    },
    /// Exchange bytes of two buffers: in-place all-to-all.
    Swap {
        /// One.
        a: At,
        /// The other.
        b: At,
        /// Bytes.
        len: u64,
    },
}

/// A compiled operation of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// What all ranks must agree on.
    pub header: OpHeader,
    /// Bytes of the input that travel with the record (at most [`LARGE_SLOT_BYTES`]); 0 for none.
    pub payload: u64,
    /// Bytes the payload has on any rank; decides where it lies. More than [`INLINE_BYTES`] in a pre-scaled sum, whose
    /// scale is in the record.
    pub slot_len: u64,
    /// Bytes of this rank's input.
    pub in_bytes: u64,
    /// Bytes of this rank's output.
    pub out_bytes: u64,
    /// Bytes of a peer's input, where it is one that the steps read.
    pub peer_in_bytes: u64,
    /// Bytes of a peer's output, where it is one that the steps touch.
    pub peer_out_bytes: u64,
    /// In the in-place form: the first byte of the input counted from the first byte of the output.
    pub in_place: Option<i64>,
    /// Whether staging halves are used.
    pub staged: bool,
    /// Whether inputs in private memory are read where they lie. Nothing else is done with a peer's: copies from
    /// [`Place::PeerIn`] are all that there may be.
    pub direct: bool,
    /// Digest of what all ranks must agree on and the header cannot hold (counts of each rank, pairs); 0 for nothing. A
    /// schedule with one has no inline payload: the record's words hold the digest.
    pub table: u64,
    /// The steps.
    pub steps: Vec<Step>,
    /// Sources of the reductions.
    pub sources: Vec<At>,
}

/// Why a schedule is not executable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("step {step} of the schedule for {what} is invalid: {why}; this is an error of wccl, please report it")]
pub struct BadSchedule {
    /// Index of the step.
    pub step: usize,
    /// The operation.
    pub what: String,
    /// What is wrong.
    pub why: String,
}

impl Schedule {
    /// How many operations a rank may be ahead of its slowest reader in this one.
    pub fn ahead(&self) -> u64 {
        if self.slot_len > SLOT_BYTES as u64 { LARGE_SLOTS as u64 } else { SLOTS as u64 }
    }

    /// Whether this rank writes a payload that has no room beside its record.
    pub(super) fn sends_large(&self) -> bool {
        self.payload > 0 && self.slot_len > SLOT_BYTES as u64
    }

    /// Whether any step uses `place`.
    fn touches(&self, place: Place) -> bool {
        self.sources.iter().any(|at| at.0 == place)
            || self.steps.iter().any(|s| match s {
                Step::Copy { dst, src, .. } => dst.0 == place || src.0 == place,
                Step::Swap { a, b, .. } => a.0 == place || b.0 == place,
                Step::Reduce { dst, .. } | Step::Average { dst, .. } => dst.0 == place,
                _ => false,
            })
    }

    /// Whether a step uses a peer's private memory in another way than to copy from its input.
    fn misuses_private(&self, step: &Step) -> bool {
        let peers = |at: &At| self.direct && matches!(at.0, Place::PeerIn(_) | Place::PeerOut(_));
        match step {
            Step::Copy { dst, src, .. } => peers(dst) || self.direct && matches!(src.0, Place::PeerOut(_)),
            Step::Swap { a, b, .. } => peers(a) || peers(b),
            // No reduction of a direct schedule has a peer's input among its sources.
            Step::Reduce { dst, .. } => peers(dst) || self.sources.iter().any(peers),
            Step::Average { dst, .. } => peers(dst),
            _ => false,
        }
    }

    /// Checks that every step stays inside its buffers and that peers are used only after they arrived. Everything the
    /// sequencer relies on for memory safety is checked here, once, when a schedule is compiled.
    pub fn seal(self, rank: usize, nranks: usize) -> Result<Sealed, BadSchedule> {
        let dtype = self.header.dtype;
        let bad = |step: usize, why: String| BadSchedule { step, what: self.header.to_string(), why };
        if nranks > MAX_LOCAL_RANKS || rank >= nranks {
            return Err(bad(0, format!("rank {rank} of {nranks}")));
        }
        if self.slot_len > LARGE_SLOT_BYTES as u64 || self.payload > self.slot_len || self.payload > self.in_bytes {
            return Err(bad(0, format!("payload {} in a slot of {}", self.payload, self.slot_len)));
        }
        if self.table != 0 && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
            return Err(bad(0, "a record with inline payload has no room for the digest of a table".into()));
        }
        let scaled = self.header.redop == Some(ReduceOp::PreMulSum);
        if scaled && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
            return Err(bad(0, "a record with inline payload has no room for the scale of a pre-scaled sum".into()));
        }
        if scaled && !dtype.is_float() {
            return Err(bad(0, format!("a pre-scaled sum of {dtype}")));
        }
        let private = self.header.flags & FLAG_PRIVATE != 0;
        if self.direct && (!private || self.slot_len > 0) {
            return Err(bad(0, "only a schedule for private memory without payload is direct".into()));
        }
        if let Some(i) = self.steps.iter().position(|s| self.misuses_private(s)) {
            return Err(bad(i, "a peer's private memory can be copied from and nothing else".into()));
        }
        let (mut signalled, mut last_wait) = (1u16, 0u16);
        let mut arrived = vec![false; nranks];
        arrived[rank] = true;
        // What a step reads and what it writes of one buffer must be the same or apart; declared in-place buffers are one.
        let clash = |a: At, b: At, len: u64, same_is_fine: bool| {
            let lies = |at: At| match (at.0, self.in_place) {
                (Place::In, Some(d)) => (Place::Out, i128::from(at.1) + i128::from(d)),
                (place, _) => (place, i128::from(at.1)),
            };
            let ((p, x), (q, y), len) = (lies(a), lies(b), i128::from(len));
            p == q && if x == y { !same_is_fine && len > 0 } else { x < y + len && y < x + len }
        };
        let mut extents = vec![(0u64, 0u64); nranks];
        let mut inside = |at: At, len: u64, arrived: &[bool], step: usize| -> Result<(), BadSchedule> {
            if let Place::Stage(_, half @ 2..) | Place::Result(_, half @ 2..) = at.0 {
                return Err(bad(step, format!("{at:?}: half {half} of two")));
            }
            let (limit, who) = match at.0 {
                Place::In => (self.in_bytes, rank),
                Place::Out => (self.out_bytes, rank),
                Place::PeerIn(p) => (self.peer_in_bytes, usize::from(p)),
                Place::PeerOut(p) => (self.peer_out_bytes, usize::from(p)),
                Place::Slot(r) => (self.slot_len, usize::from(r)),
                Place::Stage(r, _) | Place::Result(r, _) => {
                    (if self.staged { STAGE_BYTES as u64 } else { 0 }, usize::from(r))
                }
            };
            if !arrived.get(who).copied().unwrap_or(false) {
                return Err(bad(step, format!("{at:?} is used before rank {who} has arrived")));
            }
            let peer_memory = matches!(at.0, Place::PeerIn(_) | Place::PeerOut(_));
            if peer_memory && (who == rank || private && !self.direct) {
                return Err(bad(step, format!("{at:?} is not memory of a peer that this schedule reaches")));
            }
            if peer_memory && self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES {
                return Err(bad(step, format!("{at:?}: a record with inline payload has no offsets")));
            }
            match at.1.checked_add(len) {
                Some(end) if end <= limit => {
                    match at.0 {
                        Place::PeerIn(_) => extents[who].0 = extents[who].0.max(end),
                        Place::PeerOut(_) => extents[who].1 = extents[who].1.max(end),
                        _ => {}
                    }
                    Ok(())
                }
                _ => Err(bad(step, format!("{len} bytes at {at:?}, limit {limit}"))),
            }
        };
        // Inputs are the callers', who may have lent them for reading; of a peer's control segment only its bells are written.
        let mine = |at: At, step: usize| match at.0 {
            Place::Out | Place::PeerOut(_) => Ok(()),
            Place::Slot(r) | Place::Stage(r, _) | Place::Result(r, _) if usize::from(r) == rank => Ok(()),
            _ => Err(bad(step, format!("{at:?} is not rank {rank}'s to write"))),
        };
        for (i, step) in self.steps.iter().enumerate() {
            match *step {
                Step::Copy { dst, .. } | Step::Reduce { dst, .. } | Step::Average { dst, .. } => mine(dst, i)?,
                Step::Swap { a, b, .. } => mine(a, i).and_then(|()| mine(b, i))?,
                _ => {}
            }
            match *step {
                Step::Arrival(p) | Step::SendsToMe(p) | Step::ReceivesFromMe(p) | Step::Wait { peer: p, .. }
                    if usize::from(p) >= nranks || usize::from(p) == rank =>
                {
                    return Err(bad(i, format!("waits for rank {p} of {nranks}")));
                }
                Step::Arrival(p) => arrived[usize::from(p)] = true,
                // The step shares a word with the sequence: it must rise, and never look like "arrived" or "done".
                Step::Signal(step) if step <= signalled || step == STEP_DONE => {
                    return Err(bad(i, format!("signals step {step} after {signalled}")));
                }
                Step::Signal(step) => signalled = step,
                Step::Wait { step, .. } if step < 2 || step == STEP_DONE => {
                    return Err(bad(i, format!("waits for step {step}")));
                }
                Step::Wait { step, .. } => last_wait = last_wait.max(step),
                Step::SendsToMe(_) | Step::ReceivesFromMe(_) => {}
                Step::Copy { dst, src, len } => {
                    inside(dst, len, &arrived, i)?;
                    inside(src, len, &arrived, i)?;
                    if clash(dst, src, len, false) {
                        return Err(bad(i, "copies onto itself".into()));
                    }
                }
                Step::Swap { a, b, len } => {
                    inside(a, len, &arrived, i)?;
                    inside(b, len, &arrived, i)?;
                    if a.0 == b.0 || clash(a, b, len, false) {
                        return Err(bad(i, "swaps a buffer with itself".into()));
                    }
                }
                // The peers' scales are known only where all agree that it is such a sum.
                Step::Reduce { op: ReduceOp::PreMulSum, .. } if !scaled => {
                    return Err(bad(i, "a pre-scaled sum in another operation".into()));
                }
                Step::Reduce { dst, first, n, count, .. } => {
                    let len = count.checked_mul(dtype.size() as u64).ok_or_else(|| bad(i, "size overflows".into()))?;
                    inside(dst, len, &arrived, i)?;
                    let end = first as usize + n as usize;
                    if n == 0 || n as usize > MAX_LOCAL_RANKS || end > self.sources.len() {
                        return Err(bad(i, format!("{n} sources from {first} of {}", self.sources.len())));
                    }
                    for src in &self.sources[first as usize..end] {
                        inside(*src, len, &arrived, i)?;
                        if clash(dst, *src, len, true) {
                            return Err(bad(i, "reduces into a part of its source".into()));
                        }
                    }
                }
                Step::Average { dst, count, n } => {
                    let len = count.checked_mul(dtype.size() as u64).ok_or_else(|| bad(i, "size overflows".into()))?;
                    inside(dst, len, &arrived, i)?;
                    if n == 0 {
                        return Err(bad(i, "divides by zero".into()));
                    }
                }
            }
        }
        let reached =
            (0..nranks as u16).filter(|p| self.touches(Place::PeerIn(*p)) || self.touches(Place::PeerOut(*p)));
        let reached: Vec<u16> = reached.collect();
        // Peers reach this rank's buffers in every schedule whose records tell where they are.
        let reaches_me = (!private || self.direct) && self.slot_len == 0;
        // The buffers of a group are views of all device memory; what it moves is what it copies.
        let copies = self.steps.iter().map(|s| if let Step::Copy { len, .. } = s { *len } else { 0 });
        let moved = match self.header.op {
            crate::call::Op::Group => copies.sum(),
            _ => self.in_bytes.max(self.out_bytes),
        };
        let streaming = reaches_me && self.header.redop.is_none() && moved >= STREAM_BYTES;
        let words = self.header.words();
        Ok(Sealed {
            seat: (rank, nranks),
            words,
            digest: digest([words[0], words[1], self.table]),
            ahead: self.ahead(),
            private,
            inline: self.slot_len > 0 && self.slot_len as usize <= INLINE_BYTES,
            stamped: self.slot_len == 0 || self.slot_len > SLOT_BYTES as u64,
            reached,
            extents,
            reaches_me,
            last_wait,
            moved,
            streaming,
            schedule: self,
        })
    }
}

/// FNV-1a over the bytes of some words.
fn digest(words: [u64; 3]) -> u32 {
    let bytes = words.map(u64::to_le_bytes);
    bytes.iter().flatten().fold(2_166_136_261, |d, b| (d ^ u32::from(*b)).wrapping_mul(16_777_619))
}

/// A schedule that was checked, with all that its operations need of it worked out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sealed {
    schedule: Schedule,
    /// The rank that it was checked for, and of how many: for any other one it proves nothing.
    pub(super) seat: (usize, usize),
    /// The header as records have it.
    pub(super) words: [u64; 2],
    /// Of the header, and of what all ranks must agree on beside it.
    pub(super) digest: u32,
    /// How many operations a rank may be ahead of its slowest reader in this one.
    pub(super) ahead: u64,
    /// Whether the buffers are private memory.
    pub(super) private: bool,
    /// Whether the payload lies in the record.
    pub(super) inline: bool,
    /// Whether its end is worth a look at the clock.
    pub(super) stamped: bool,
    /// Peers whose buffers the steps touch.
    pub(super) reached: Vec<u16>,
    /// How far into each rank's input and output the steps reach, in bytes.
    pub(super) extents: Vec<(u64, u64)>,
    /// Whether peers may touch this rank's buffers.
    pub(super) reaches_me: bool,
    /// Highest step waited for.
    pub(super) last_wait: u16,
    /// Bytes of the larger of this rank's buffers; of a group, bytes this rank copies.
    pub(super) moved: u64,
    /// Whether copies go past the caches: nothing that a large move writes is read again by it.
    pub(super) streaming: bool,
}

impl std::ops::Deref for Sealed {
    type Target = Schedule;
    fn deref(&self) -> &Schedule {
        &self.schedule
    }
}
