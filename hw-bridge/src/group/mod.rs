//! The control channel of a communicator inside a server: arrivals, op headers, deaths, aborts.
//!
//! Every rank owns one *control segment* and maps those of its peers. Only the owner writes its block and its lanes;
//! peers read them, and write nothing but its bells, and in the outbox for them what became of the messages there. The channel never passes through a plugin, so it works while a
//! plugin hangs.
//!
//! ```text
//! 0        ident | state + reason                            (one 4 KiB block)
//! 4 KiB    lane 0 | lane 1 | ... LANES                       (lane 0: blocking calls; the others: streams)
//!          outbox for rank 0 | for rank 1 | ... ranks        (messages to one rank; no memory until the first)
//!
//! lane     progress | bell | tally | flight records          (8 KiB, hot words on lines of their own)
//!          slot 0 | slot 1 | ... SLOTS                       (a 64-byte record, then the payload)
//!          stage in 0 | in 1 | result 0 | result 1           (STAGE_BYTES each, touched by private buffers only)
//!          large 0 | large 1 | ... LARGE_SLOTS               (payloads that are too large for the place beside a record)
//! ```
//!
//! A lane is a sequence of operations of its own: operations of different lanes run side by side and never wait for each
//! other. *progress* is `sequence << 16 | step`, only ever rises, and is the one word peers wait on. Step 1 is "arrived", and
//! [`STEP_DONE`] is "has read all it wanted of its peers". A *slot* is the arrival record of operation `sequence`, in
//! slot `sequence % SLOTS`; its tag is written last. A rank reuses a slot, or the place of a large payload, only after every
//! linked peer is done with the operation it held.
//!
//! An outbox has nothing to do with lanes and operations: what two ranks say to one another there concerns no third
//! ([`crate::p2p`] has the protocol).
//!
//! ```text
//! outbox   head: drained | filled | taken | slots             (4 KiB)
//!          envelope 0 | envelope 1 | ... ENVELOPES            (64 bytes each: tag, length, where the payload is)
//!          payload 0 | payload 1 | ... MAIL_SLOTS             (EAGER_BYTES each, touched by small messages only)
//!          half 0 | half 1                                    (MAIL_STAGE_BYTES each, touched where memory may not be read)
//! ```
//!
//! What a peer writes is an allegation: headers are compared, offsets checked against the mapping, texts cleaned.
//!
//! | room | owns |
//! |---|---|
//! | `layout` | where everything lies in a control segment |
//! | `control` | one rank's segment: who it is, how it stands |
//! | `lanes` | a lane of it: arrival records, payloads, progress |
//! | `outbox` | messages to one rank: envelopes, payloads, what became of them |
//! | `peers` | a linked peer; ending a communicator's operations |
//! | [`flight`] | what a lane did: counters, the last operations |
//! | [`ballot`] | one decision that several processes come to |

#[expect(unsafe_code, reason = "mapped words that several processes share")]
pub mod ballot;
#[expect(unsafe_code, reason = "mapped words that the ranks share")]
mod control;
pub mod flight;
#[expect(unsafe_code, reason = "mapped words that the ranks share")]
pub(crate) mod lanes;
mod layout;
#[expect(unsafe_code, reason = "mapped words that the ranks share")]
mod outbox;
mod peers;

pub(crate) use control::LaneAt;
pub use control::{Control, Owner, RankState};
pub use lanes::{Aside, LaneView};
pub use layout::{CONTROL_NAME, NO_RANK, STEP_ARRIVED, STEP_DONE, control_bytes};
pub(crate) use outbox::{Envelope, Outbox, SlotKind, SlotStanding};
pub use peers::{Abort, Peer};

/// Where a control segment says where its owner's mark is, and what the number there.
#[cfg(test)]
pub(crate) fn ident_of_mark() -> [usize; 2] {
    layout::ident::MARK.map(|at| at * 8)
}
