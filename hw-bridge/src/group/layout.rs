//! Where everything lies in a control segment.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

use super::flight::{self, Tally};
use crate::limits::{
    EAGER_BYTES, ENVELOPE_BYTES, ENVELOPES, INLINE_BYTES, LANES, LARGE_SLOT_BYTES, LARGE_SLOTS, MAIL_SLOTS,
    MAIL_STAGE_BYTES, MAX_LOCAL_RANKS, REASON_BYTES, SLOT_BYTES, SLOTS, STAGE_BYTES,
};
use crate::os::bell::Bell;

pub(super) const MAGIC: u64 = 0x316c_6363_776c_6377;
pub(super) const BLOCK_BYTES: usize = 4096;
/// A record and the first line of its payload share a pair of lines, which processors fetch together.
pub(super) const SLOT_STRIDE: usize = (SLOT_BYTES + 64).next_multiple_of(128);
/// In a lane: where the flight records, the slots, the staging halves and the large payloads begin.
pub(super) const FLIGHT_AT: usize = 4096;
pub(super) const SLOTS_AT: usize = FLIGHT_AT + flight::RING_BYTES;
pub(super) const STAGE_AT: usize = (SLOTS_AT + SLOTS * SLOT_STRIDE).next_multiple_of(4096);
pub(super) const LARGE_AT: usize = STAGE_AT + 4 * STAGE_BYTES;
pub(super) const LANE_BYTES: usize = LARGE_AT + LARGE_SLOTS * LARGE_SLOT_BYTES;
/// In an outbox: where the envelopes, the payloads of the slots and the staging halves begin.
pub(super) const ENVELOPES_AT: usize = 4096;
pub(super) const PAYLOADS_AT: usize = (ENVELOPES_AT + ENVELOPES * size_of::<Envelope>()).next_multiple_of(4096);
pub(super) const MAIL_STAGE_AT: usize = PAYLOADS_AT + MAIL_SLOTS * EAGER_BYTES;
pub(super) const OUTBOX_BYTES: usize = MAIL_STAGE_AT + 2 * MAIL_STAGE_BYTES;
/// Where the outboxes begin, one for each rank.
pub(super) const OUTBOXES_AT: usize = BLOCK_BYTES + LANES * LANE_BYTES;

/// Bytes of a control segment of one of `nranks` ranks (address space; pages cost memory when touched).
pub const fn control_bytes(nranks: usize) -> usize {
    OUTBOXES_AT + nranks * OUTBOX_BYTES
}

/// Name of a control segment's memfd: how `wccl top` finds those of other processes.
pub const CONTROL_NAME: &str = "wccl-control";
/// The step of an operation that its rank has finished.
pub const STEP_DONE: u16 = 0xFFFF;
/// The step of an operation that its rank has announced.
pub const STEP_ARRIVED: u16 = 1;

/// "Nobody", where a record names whom a rank sends to and receives from.
pub const NO_RANK: u16 = u16::MAX;

#[repr(C, align(128))]
pub(super) struct Line<T>(pub(super) T);

#[repr(C)]
pub(super) struct Block {
    pub(super) ident: Line<[AtomicU64; 16]>,
    pub(super) state: Line<StateLine>,
    pub(super) positions: Line<PositionsLine>,
    /// Rung for whoever waits for a message, or for one to be taken.
    pub(super) mail: Line<Bell>,
    pub(super) mail_tally: Line<Tally>,
    /// Bits of the ranks whose outboxes have memory.
    pub(super) outboxes: Line<[AtomicU64; MAX_LOCAL_RANKS.div_ceil(64)]>,
}

/// Words of `Block::ident`.
pub(super) mod ident {
    pub const MAGIC: usize = 0;
    /// Rank, and ranks << 32.
    pub const WHO: usize = 1;
    /// Whether the owner may skip the publisher's fence ([`crate::os::bell`]).
    pub const ASYMMETRIC: usize = 2;
    pub const PID: usize = 3;
    /// Number of the communicator: the same on all its ranks as far as their libraries number alike.
    pub const COMM: usize = 4;
    /// The clock and the counter of cycles at the same moment, for readers of flight records.
    pub const CLOCK_NS: usize = 5;
    pub const TICKS: usize = 6;
    pub const COMPONENT_CALLS: usize = 7;
    /// Bits of the lanes that have memory.
    pub const COMMITTED: usize = 8;
    /// Address of the owner's mark in its private memory, and the number there ([`crate::memory::foreign`]).
    pub const MARK: [usize; 2] = [9, 10];
}

/// The first page of a lane.
#[repr(C)]
pub(super) struct LaneHead {
    pub(super) progress: Line<AtomicU64>,
    /// The last operation that the rank left with an error.
    pub(super) left: Line<AtomicU64>,
    pub(super) bell: Line<Bell>,
    pub(super) tally: Line<Tally>,
}

/// Where the rank's lanes were when it last closed its gates.
#[repr(C)]
pub(super) struct PositionsLine {
    /// Which closing; written last.
    pub(super) id: AtomicU64,
    pub(super) lanes: [AtomicU64; LANES],
    pub(super) rings: AtomicU64,
}

#[repr(C)]
pub(super) struct StateLine {
    pub(super) state: AtomicU32,
    pub(super) len: AtomicU32,
    pub(super) reason: [AtomicU8; REASON_BYTES],
    /// One more than the rank whose process has ended, if that is why; else 0.
    pub(super) dead: AtomicU32,
}

/// The 64-byte arrival record.
#[repr(C, align(64))]
pub(super) struct Record {
    pub(super) tag: AtomicU64,
    pub(super) what: AtomicU64,
    pub(super) count: AtomicU64,
    pub(super) aside: AtomicU64,
    pub(super) words: [AtomicU64; INLINE_BYTES / 8],
}

/// The first page of an outbox. The owner writes `filled`; `drained` and `taken` are its reader's.
#[repr(C)]
pub(super) struct OutboxHead {
    /// The last envelope that was read.
    pub(super) drained: Line<AtomicU64>,
    /// `message << 24 | pieces` that lie, or have lain, in the staging halves.
    pub(super) filled: Line<AtomicU64>,
    /// The same of those that were read.
    pub(super) taken: Line<AtomicU64>,
    pub(super) slots: [MailSlot; MAIL_SLOTS],
}

/// A message that is on its way.
#[repr(C, align(64))]
pub(super) struct MailSlot {
    /// `message << 3 | state`; both ends change it.
    pub(super) state: AtomicU64,
    /// Bytes that the reader has copied.
    pub(super) moved: AtomicU64,
}

/// What is said of a message.
#[repr(C, align(64))]
pub(super) struct Envelope {
    /// The number of the message; written last.
    pub(super) seq: AtomicU64,
    /// Tag, kind << 32, slot << 40.
    pub(super) what: AtomicU64,
    pub(super) len: AtomicU64,
    pub(super) at: AtomicU64,
    pub(super) payload: [AtomicU64; ENVELOPE_BYTES / 8],
}

const _: () =
    assert!(size_of::<Envelope>() == 64 && size_of::<OutboxHead>() <= ENVELOPES_AT && OUTBOX_BYTES % 4096 == 0);
const _: () = assert!(size_of::<Record>() == 64 && size_of::<Block>() <= BLOCK_BYTES);
const _: () = assert!(size_of::<LaneHead>() <= FLIGHT_AT && LANE_BYTES % 4096 == 0 && SLOT_STRIDE % 128 == 0);
