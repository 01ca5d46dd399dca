//! Rings: every rank pulls from the previous one of each ring the library planned; one part of the vector a ring.
//!
//! all_reduce: n-1 steps that add this rank's input to what the previous rank has summed, then n-1 steps that pull the
//! finished parts. all_gather: the second half alone. Pulling makes a step one read of the peer's memory and one write of
//! our own. The last wait is for the next rank, which still reads our buffers.
//!
//! In place is safe: a part of our buffer is overwritten only when the chain of waits around the ring has made sure
//! that the next rank has read what was in it.

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Step};

use super::Builder;

/// Rings used at most; more only shorten the pieces.
pub(super) const MAX_RINGS: usize = 4;

/// Whether there is a ring schedule for this collective.
pub(super) fn serves(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::AllGather)
}

struct Lane {
    /// Ranks in ring order.
    order: Vec<usize>,
    /// This rank's place in it.
    pos: usize,
    /// First element and elements of the lane's share.
    first: u64,
    count: u64,
}

impl Lane {
    fn prev(&self) -> usize {
        self.order[(self.pos + self.order.len() - 1) % self.order.len()]
    }

    fn next(&self) -> usize {
        self.order[(self.pos + 1) % self.order.len()]
    }
}

pub(super) fn build(b: &mut Builder<'_>, rings: &[Vec<usize>]) {
    let n = b.n;
    // A library that planned no rings (or a wrong one: checked when its comm info is taken over) leaves rank order.
    let natural = [(0..n).collect::<Vec<usize>>()];
    let rings = if rings.is_empty() { &natural[..] } else { &rings[..rings.len().min(MAX_RINGS)] };
    let lanes: Vec<Lane> = rings
        .iter()
        .enumerate()
        .map(|(i, order)| {
            let (count, first) = Builder::part(b.call.count, rings.len(), i);
            let pos = order.iter().position(|r| *r == b.rank).unwrap_or(0);
            Lane { order: order.clone(), pos, first, count }
        })
        .collect();
    let mut neighbours: Vec<usize> = lanes.iter().flat_map(|l| [l.prev(), l.next()]).collect();
    neighbours.sort_unstable();
    neighbours.dedup();
    for p in neighbours {
        b.push(Step::Arrival(p as u16));
    }
    let gather_only = b.call.op == Op::AllGather;
    if gather_only && !b.call.in_place {
        b.copy(At(Place::Out, b.rank as u64 * b.bytes), At(Place::In, 0), b.bytes);
    }
    let rounds = if gather_only { n - 1 } else { 2 * (n - 1) };
    let code = |round: usize, lane: usize| (2 + round * lanes.len() + lane) as u16;
    for round in 0..rounds {
        for (i, lane) in lanes.iter().enumerate() {
            if round > 0 {
                b.push(Step::Wait { peer: lane.prev() as u16, step: code(round - 1, i) });
            }
            if gather_only {
                gather_step(b, lane, round);
            } else if round < n - 1 {
                reduce_step(b, lane, round);
            } else {
                pull_step(b, lane, round - (n - 1));
            }
            b.push(Step::Signal(code(round, i)));
        }
    }
    for (i, lane) in lanes.iter().enumerate() {
        b.push(Step::Wait { peer: lane.next() as u16, step: code(rounds - 1, i) });
    }
}

/// Pulls the partial sum of one part and adds our input; the part we complete last is divided for an average.
fn reduce_step(b: &mut Builder<'_>, lane: &Lane, round: usize) {
    let (n, size) = (b.n, b.size);
    let part = (lane.pos + 2 * n - 1 - round) % n;
    let (count, at) = Builder::part(lane.count, n, part);
    let at = (lane.first + at) * size;
    let prev = lane.prev() as u16;
    let theirs = if round == 0 { At(Place::PeerIn(prev), at) } else { At(Place::PeerOut(prev), at) };
    let op = if b.call.redop == ReduceOp::Avg { ReduceOp::Sum } else { b.call.redop };
    b.reduce(At(Place::Out, at), [theirs, At(Place::In, at)], count, op);
    if b.call.redop == ReduceOp::Avg && round == n - 2 && count > 0 {
        b.push(Step::Average { dst: At(Place::Out, at), count, n: n as u32 });
    }
}

fn pull_step(b: &mut Builder<'_>, lane: &Lane, round: usize) {
    let (n, size) = (b.n, b.size);
    let part = (lane.pos + n - round) % n;
    let (count, at) = Builder::part(lane.count, n, part);
    let at = (lane.first + at) * size;
    b.copy(At(Place::Out, at), At(Place::PeerOut(lane.prev() as u16), at), count * size);
}

/// all_gather: pulls one rank's block (the lane's share of it), from its owner's input or from the previous output.
fn gather_step(b: &mut Builder<'_>, lane: &Lane, round: usize) {
    let n = b.n;
    let owner = lane.order[(lane.pos + 2 * n - 1 - round) % n];
    let share = lane.first * b.size;
    let prev = lane.prev() as u16;
    let at = owner as u64 * b.bytes + share;
    let src = if round == 0 { At(Place::PeerIn(prev), share) } else { At(Place::PeerOut(prev), at) };
    b.copy(At(Place::Out, at), src, lane.count * b.size);
}
