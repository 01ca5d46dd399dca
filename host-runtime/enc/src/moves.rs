//! Collectives that only move bytes, from one list of moves that all ranks derive alike from the call and its lists.
//!
//! Device memory, and private memory that peers can read: each receiver pulls, and the owner waits for its readers. Private
//! memory that they cannot read: every sender stages, in
//! each *round*, a piece of each of its outgoing stretches, side by side in *lanes* of one half; receivers copy out. Stretches
//! that several ranks get (all_gather_v) are staged once. Lanes are as wide as their stretches are long, so all of a
//! sender's end in the same round. Small: the whole input goes beside the arrival record, as in one-hop.
//!
//! Ranks that neither send to nor receive from one another do not meet.

use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{At, Place, Step};
use hw_bridge::limits::{INLINE_BYTES, MAX_STEPS, STAGE_BYTES};

use super::{Algorithm, Builder, Call, Lists};

const STAGE: u64 = STAGE_BYTES as u64;
/// "I have read all I get."
const FINISHED: u16 = 2;
/// Signals of round k: `ROUND + 2k` "staged", `ROUND + 2k + 1` "read".
const ROUND: u64 = 2;
/// Rounds that can be numbered.
const MOST_ROUNDS: u64 = (MAX_STEPS - ROUND) / 2 - 1;
/// Lanes begin at multiples of this.
const ALIGN: u64 = 64;

/// Some bytes of one rank's input that belong in another's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Move {
    /// Whose input.
    pub src: usize,
    /// First byte of it.
    pub src_at: u64,
    /// Whose output.
    pub dst: usize,
    /// First byte there.
    pub dst_at: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Whether a collective is a list of moves.
pub(super) fn is_listed(op: Op) -> bool {
    matches!(op, Op::Gather | Op::Scatter | Op::Permute | Op::AllGatherV | Op::AllToAllV | Op::Group)
}

/// All moves of a call that move something, by sender.
pub(super) fn moves(call: &Call, lists: Lists<'_>, n: usize) -> Vec<Move> {
    let size = call.dtype.size() as u64;
    let block = call.bytes().unwrap_or(u64::MAX);
    let root = call.root;
    let mut all: Vec<Move> = match (call.op, lists) {
        (Op::Gather, _) => {
            let one = |p| Move { src: p, src_at: 0, dst: root, dst_at: (p as u64).saturating_mul(block), bytes: block };
            (0..n).map(one).collect()
        }
        (Op::Scatter, _) => {
            let one = |p| Move { src: root, src_at: (p as u64).saturating_mul(block), dst: p, dst_at: 0, bytes: block };
            (0..n).map(one).collect()
        }
        (Op::Permute, Lists::Pairs(pairs)) => {
            pairs.iter().map(|(src, dst)| Move { src: *src, src_at: 0, dst: *dst, dst_at: 0, bytes: block }).collect()
        }
        (Op::AllGatherV, Lists::Counts(counts)) => {
            let mut all = Vec::with_capacity(n * n);
            let mut at = 0;
            for (src, count) in counts.iter().enumerate() {
                let bytes = count * size;
                all.extend((0..n).map(|dst| Move { src, src_at: 0, dst, dst_at: at, bytes }));
                at += bytes;
            }
            all
        }
        (Op::AllToAllV, Lists::Matrix(matrix)) => {
            let mut all = Vec::with_capacity(n * n);
            let mut filled = vec![0; n];
            for (src, row) in matrix.chunks(n).enumerate() {
                let mut src_at = 0;
                for (dst, count) in row.iter().enumerate() {
                    let bytes = count * size;
                    all.push(Move { src, src_at, dst, dst_at: filled[dst], bytes });
                    src_at += bytes;
                    filled[dst] += bytes;
                }
            }
            all
        }
        (Op::Group, Lists::Moves(moves)) => moves.to_vec(),
        _ => Vec::new(),
    };
    all.retain(|m| m.bytes > 0);
    all
}

/// Builds the schedule of one rank.
pub(super) fn build(b: &mut Builder<'_>, algorithm: Algorithm) {
    let all = moves(b.call, b.lists, b.n);
    match algorithm {
        Algorithm::OneHop => one_hop(b, &all),
        Algorithm::Staged => staged(b, &all),
        _ => {
            b.schedule.direct = algorithm == Algorithm::Direct;
            pulled(b, &all);
        }
    }
}

/// What a rank sends to itself; after it has met the others, so that a call that does not match writes nothing. In place, the
/// block is where it belongs.
fn own(b: &mut Builder<'_>, all: &[Move]) {
    let rank = b.rank;
    for m in all.iter().filter(|m| m.src == rank && m.dst == rank && !b.call.in_place) {
        b.copy(At(Place::Out, m.dst_at), At(Place::In, m.src_at), m.bytes);
    }
}

/// Ranks that send to this one, and ranks that receive from it, each in an order that begins behind this rank.
fn partners(b: &Builder<'_>, all: &[Move]) -> (Vec<usize>, Vec<usize>) {
    let sources = b.others().filter(|p| all.iter().any(|m| m.src == *p && m.dst == b.rank)).collect();
    let readers = b.others().filter(|p| all.iter().any(|m| m.src == b.rank && m.dst == *p)).collect();
    (sources, readers)
}

fn one_hop(b: &mut Builder<'_>, all: &[Move]) {
    let (rank, slot_len) = (b.rank, b.call.slot_bytes_with(b.lists, b.n).unwrap_or(u64::MAX));
    let (sources, readers) = partners(b, all);
    // A record with a digest in its words has its payload behind them, however small that is.
    let room = if b.schedule.table != 0 { INLINE_BYTES as u64 + 1 } else { 0 };
    b.schedule.slot_len = if slot_len > 0 { slot_len.max(room) } else { 0 };
    b.schedule.payload = if readers.is_empty() { 0 } else { b.schedule.in_bytes };
    for p in sources {
        b.push(Step::Arrival(p as u16));
        for m in all.iter().filter(|m| m.src == p && m.dst == rank) {
            b.copy(At(Place::Out, m.dst_at), At(Place::Slot(p as u16), m.src_at), m.bytes);
        }
    }
    own(b, all);
}

fn pulled(b: &mut Builder<'_>, all: &[Move]) {
    let rank = b.rank;
    let (sources, readers) = partners(b, all);
    for p in &sources {
        b.push(Step::Arrival(*p as u16));
    }
    for p in &sources {
        for m in all.iter().filter(|m| m.src == *p && m.dst == rank) {
            b.copy(At(Place::Out, m.dst_at), At(Place::PeerIn(*p as u16), m.src_at), m.bytes);
        }
    }
    if !sources.is_empty() {
        b.push(Step::Signal(FINISHED));
    }
    own(b, all);
    for p in readers.iter().filter(|p| !sources.contains(p)) {
        b.push(Step::Arrival(*p as u16));
    }
    for p in &readers {
        b.push(Step::Wait { peer: *p as u16, step: FINISHED });
    }
}

/// One outgoing stretch of a sender's input, and its lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lane {
    /// First byte of the stretch.
    pub at: u64,
    /// Its bytes.
    pub bytes: u64,
    /// First byte of the lane in a half.
    pub lane: u64,
    /// Bytes of a piece.
    pub piece: u64,
}

impl Lane {
    /// First byte and bytes of the piece of round `k` in the stretch; no bytes behind its end.
    pub fn piece_of(&self, k: u64) -> (u64, u64) {
        let off = (k.saturating_mul(self.piece)).min(self.bytes);
        (off, self.piece.min(self.bytes - off))
    }

    fn rounds(&self) -> u64 {
        self.bytes.div_ceil(self.piece.max(1))
    }
}

/// Lanes for stretches (first byte, bytes) side by side in one half, in pieces of whole `unit`s; all end in as few
/// rounds as can be.
pub(super) fn lanes(stretches: &[(u64, u64)], unit: u64) -> Vec<Lane> {
    let grain = ALIGN.max(unit).next_multiple_of(unit);
    let total: u64 = stretches.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
    let mut rounds = total.div_ceil(STAGE).max(1);
    loop {
        let mut end = 0u64;
        let mut out = Vec::with_capacity(stretches.len());
        for (at, bytes) in stretches {
            let piece = bytes.div_ceil(rounds).div_ceil(grain).saturating_mul(grain);
            out.push(Lane { at: *at, bytes: *bytes, lane: end, piece });
            end = end.saturating_add(piece);
        }
        // Rounding up takes at most a grain a lane, which a few more rounds make up for.
        if end <= STAGE {
            return out;
        }
        rounds += rounds / 64 + 1;
    }
}

/// Lanes of what `src` sends to others: one for each different stretch.
fn outgoing(all: &[Move], src: usize) -> Vec<Lane> {
    let mut stretches: Vec<(u64, u64)> =
        all.iter().filter(|m| m.src == src && m.dst != src).map(|m| (m.src_at, m.bytes)).collect();
    stretches.sort_unstable();
    stretches.dedup();
    lanes(&stretches, 1)
}

/// Whether private memory can take the call: its rounds must have numbers.
pub(super) fn fits_private(call: &Call, lists: Lists<'_>, n: usize) -> bool {
    let all = moves(call, lists, n);
    (0..n).all(|src| outgoing(&all, src).iter().all(|l| l.rounds() <= MOST_ROUNDS))
}

fn staged(b: &mut Builder<'_>, all: &[Move]) {
    b.schedule.staged = true;
    let rank = b.rank;
    let (sources, readers) = partners(b, all);
    let mine = outgoing(all, rank);
    let find = |lanes: &[Lane], m: &Move| lanes.iter().find(|l| (l.at, l.bytes) == (m.src_at, m.bytes)).copied();
    // What I get of each source, with the source's lane for it; and all the rounds of that source.
    let incoming: Vec<_> = sources
        .iter()
        .map(|p| {
            let theirs = outgoing(all, *p);
            let to_me = all.iter().filter(|m| m.src == *p && m.dst == rank);
            let list: Vec<(Move, Lane)> = to_me.filter_map(|m| find(&theirs, m).map(|l| (*m, l))).collect();
            (*p, list, theirs.iter().map(Lane::rounds).max().unwrap_or(0))
        })
        .collect();
    // Rounds in which each reader reads from me.
    let reads: Vec<(usize, u64)> = readers
        .iter()
        .map(|p| {
            let to_them = all.iter().filter(|m| m.src == rank && m.dst == *p);
            (*p, to_them.filter_map(|m| find(&mine, m)).map(|l| l.rounds()).max().unwrap_or(0))
        })
        .collect();
    let sends = mine.iter().map(Lane::rounds).max().unwrap_or(0);
    let gets = incoming.iter().flat_map(|(_, l, _)| l).map(|(_, l)| l.rounds()).max().unwrap_or(0);
    let staged = |k: u64| (ROUND + 2 * k) as u16;
    let read = |k: u64| (ROUND + 2 * k + 1) as u16;
    let half = |r: usize, k: u64, at: u64| At(Place::Stage(r as u16, (k % 2) as u8), at);
    for k in 0..sends.max(gets) {
        if k < sends {
            for (p, _) in reads.iter().filter(|(_, rounds)| k >= 2 && *rounds + 2 > k) {
                b.push(Step::Wait { peer: *p as u16, step: read(k - 2) });
            }
            for l in &mine {
                let (off, len) = l.piece_of(k);
                b.copy(half(rank, k, l.lane), At(Place::In, l.at + off), len);
            }
            b.push(Step::Signal(staged(k)));
        }
        if k == 0 {
            for p in &sources {
                b.push(Step::Arrival(*p as u16));
            }
        }
        if k < gets {
            let mut heard = false;
            for (p, list, theirs) in &incoming {
                let mine = list.iter().map(|(_, l)| l.rounds()).max().unwrap_or(0);
                if k >= mine {
                    continue;
                }
                // The source waits before it fills this half again, or at its end.
                heard |= k + 2 < *theirs || k + 1 == mine;
                b.push(Step::Wait { peer: *p as u16, step: staged(k) });
                for (m, l) in list {
                    let (off, len) = l.piece_of(k);
                    b.copy(At(Place::Out, m.dst_at + off), half(*p, k, l.lane), len);
                }
            }
            if heard {
                b.push(Step::Signal(read(k)));
            }
        }
    }
    own(b, all);
    for (p, rounds) in &reads {
        if !sources.contains(p) {
            b.push(Step::Arrival(*p as u16));
        }
        // Unless that was waited for to fill the half again.
        if rounds + 1 >= sends {
            b.push(Step::Wait { peer: *p as u16, step: read(rounds - 1) });
        }
    }
}
