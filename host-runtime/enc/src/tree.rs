//! Binomial trees for broadcast and reduce in device memory, in pieces that follow one another down or up the tree.
//!
//! Ranks are numbered from the root on; the parent of v is v without its lowest bit, so the subtree of a child is a stretch
//! of numbers and operands are reduced in their order. broadcast: everybody reads its parent's output. reduce: a rank with
//! children leaves its partial sums in its two staging halves, where its parent reads them; a half is filled again when
//! the parent has read it. A leaf's input is read where it is.

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Step};
use hw_bridge::limits::{MAX_STEPS, STAGE_BYTES};

use super::{Builder, Call};

/// Smallest piece.
const PIECE: u64 = 64 * 1024;
/// Largest piece of a reduction: it fits in a staging half, whatever the element size.
const LARGEST: u64 = STAGE_BYTES as u64 - 8;
/// Pieces are this many at least once they are large enough: a tree of depth d takes the time of d pieces more.
const PIECES: u64 = 16;
/// Signal of the first piece.
const FIRST: u64 = 2;
/// Pieces that can be numbered.
const MOST: u64 = MAX_STEPS - FIRST - 1;

/// Whether there is a tree for this call.
pub(super) fn serves(call: &Call) -> bool {
    match call.op {
        Op::Broadcast => true,
        Op::Reduce => call.bytes().is_some_and(|b| b <= LARGEST / 8 * 8 * MOST),
        _ => false,
    }
}

pub(super) fn build(b: &mut Builder<'_>) {
    let v = (b.rank + b.n - b.call.root) % b.n;
    if b.call.op == Op::Broadcast { broadcast(b, v) } else { reduce(b, v) }
}

fn code(k: u64) -> u16 {
    (FIRST + k) as u16
}

/// Numbers of the children of `v`, rising.
fn children(v: usize, n: usize) -> impl Iterator<Item = usize> {
    let bits = if v == 0 { usize::BITS - 1 } else { v.trailing_zeros() };
    (0..bits).map(move |j| v + (1 << j)).take_while(move |c| *c < n)
}

/// Pieces of `total` bytes: (number, first byte, bytes).
fn pieces(total: u64, most: u64, size: u64) -> Vec<(u64, u64, u64)> {
    let piece =
        (total / PIECES).clamp(PIECE, most).max(total.div_ceil(MOST)).next_multiple_of(size).min(most / size * size);
    (0..total.div_ceil(piece)).map(|k| (k, k * piece, piece.min(total - k * piece))).collect()
}

fn broadcast(b: &mut Builder<'_>, v: usize) {
    let (n, root, bytes) = (b.n, b.call.root, b.bytes);
    let rank_of = |v: usize| ((v + root) % n) as u16;
    let all = pieces(bytes, u64::MAX, b.size);
    let last = all.len() as u64 - u64::from(!all.is_empty());
    if v == 0 {
        if !b.call.in_place {
            b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
        }
    } else {
        let up = v & (v - 1);
        let parent = rank_of(up);
        b.push(Step::Arrival(parent));
        let feeds = children(v, n).next().is_some();
        for (k, off, len) in &all {
            if up > 0 {
                b.push(Step::Wait { peer: parent, step: code(*k) });
            }
            let from = if up > 0 { Place::PeerOut(parent) } else { Place::PeerIn(parent) };
            b.copy(At(Place::Out, *off), At(from, *off), *len);
            if feeds || *k == last {
                b.push(Step::Signal(code(*k)));
            }
        }
    }
    for c in children(v, n) {
        b.push(Step::Arrival(rank_of(c)));
        if !all.is_empty() {
            b.push(Step::Wait { peer: rank_of(c), step: code(last) });
        }
    }
}

fn reduce(b: &mut Builder<'_>, v: usize) {
    let (rank, n, root, size) = (b.rank, b.n, b.call.root, b.size);
    let rank_of = |v: usize| ((v + root) % n) as u16;
    let all = pieces(b.bytes, LARGEST, size);
    let last = all.len() as u64 - u64::from(!all.is_empty());
    // A child and whether it has children itself.
    let below: Vec<(u16, bool)> = children(v, n).map(|c| (rank_of(c), children(c, n).next().is_some())).collect();
    let parent = (v > 0).then(|| rank_of(v & (v.wrapping_sub(1))));
    for p in parent.iter().chain(below.iter().map(|(c, _)| c)) {
        b.push(Step::Arrival(*p));
    }
    if !below.is_empty() {
        let stages = below.iter().any(|(_, inner)| *inner);
        // All ranks say so, or a rank whose staging memory is missing would be noticed in the middle.
        let avg = b.call.redop == ReduceOp::Avg;
        let op = if avg { ReduceOp::Sum } else { b.call.redop };
        for (k, off, len) in &all {
            let half = (k % 2) as u8;
            for (c, _) in below.iter().filter(|(_, inner)| *inner) {
                b.push(Step::Wait { peer: *c, step: code(*k) });
            }
            let from = |(c, inner): &(u16, bool)| {
                if *inner { At(Place::Stage(*c, half), 0) } else { At(Place::PeerIn(*c), *off) }
            };
            let sources: Vec<At> = std::iter::once(At(Place::In, *off)).chain(below.iter().map(from)).collect();
            if let Some(parent) = parent {
                if *k >= 2 {
                    b.push(Step::Wait { peer: parent, step: code(k - 2) });
                }
                b.reduce(At(Place::Stage(rank as u16, half), 0), sources, len / size, op);
                b.push(Step::Signal(code(*k)));
                continue;
            }
            b.reduce(At(Place::Out, *off), sources, len / size, op);
            if avg {
                b.push(Step::Average { dst: At(Place::Out, *off), count: len / size, n: n as u32 });
            }
            // Heard by children that want to fill a half again, and by all at the end.
            if *k == last || stages && k + 2 <= last {
                b.push(Step::Signal(code(*k)));
            }
        }
    }
    if let (Some(parent), false) = (parent, all.is_empty()) {
        b.push(Step::Wait { peer: parent, step: code(last) });
    }
    b.schedule.staged = true;
}
