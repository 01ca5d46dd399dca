//! Hierarchical all_reduce: reduce-scatter inside groups, all-reduce across them, all-gather inside.
//!
//! Groups are g consecutive ranks, g the largest divisor of n that is not above its root; m = n/g. Rank (j, i) is the i-th
//! of group j. It reduces part i of its group, then, with the i-th ranks of all groups, its share of part i, which it puts
//! into their outputs; at last it pulls the other parts from its group. A rank meets g-1 + m-1 others instead of n-1.
//!
//! | signal | means |
//! |---|---|
//! | 2 | the group's sum of my part is in my output |
//! | 3 | my share of it is in the outputs of my counterparts |
//! | 4 | my part is complete |
//! | 5 | I have read all parts of my group |

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Step};

use super::Builder;
use super::device::PUSH_BYTES;

const SUMMED: u16 = 2;
const PUSHED: u16 = 3;
const COMPLETE: u16 = 4;
const FINISHED: u16 = 5;

/// Whether there is such a schedule: a prime number of ranks has no groups.
pub(super) fn serves(op: Op, n: usize) -> bool {
    op == Op::AllReduce && group(n) > 1
}

/// Ranks of a group.
fn group(n: usize) -> usize {
    (1..=n.isqrt()).rev().find(|g| n.is_multiple_of(*g)).unwrap_or(1)
}

pub(super) fn build(b: &mut Builder<'_>) {
    let (rank, n, size, count) = (b.rank, b.n, b.size, b.call.count);
    let g = group(n);
    let m = n / g;
    let (j, i) = (rank / g, rank % g);
    let inside: Vec<usize> = (0..g).map(|x| j * g + x).collect();
    let across: Vec<usize> = (0..m).map(|x| x * g + i).collect();
    // Everyone begins behind itself, so that not all turn to the same rank first.
    let behind =
        |all: &[usize], me: usize| -> Vec<u16> { (1..all.len()).map(|x| all[(me + x) % all.len()] as u16).collect() };
    let (mates, counterparts) = (behind(&inside, i), behind(&across, j));
    let avg = b.call.redop == ReduceOp::Avg;
    let op = if avg { ReduceOp::Sum } else { b.call.redop };
    let (part, first) = Builder::part(count, g, i);

    for p in mates.iter().chain(&counterparts) {
        b.push(Step::Arrival(*p));
    }
    let at = first * size;
    let input = |p: &usize| At(if *p == rank { Place::In } else { Place::PeerIn(*p as u16) }, at);
    b.reduce(At(Place::Out, at), inside.iter().map(input), part, op);
    b.push(Step::Signal(SUMMED));

    for p in &counterparts {
        b.push(Step::Wait { peer: *p, step: SUMMED });
    }
    let (share, shift) = Builder::part(part, m, j);
    let piece = (PUSH_BYTES / size).max(share.div_ceil(4096));
    let mut done = 0;
    while done < share {
        let count = piece.min(share - done);
        let at = (first + shift + done) * size;
        let sum = |p: &usize| At(if *p == rank { Place::Out } else { Place::PeerOut(*p as u16) }, at);
        b.reduce(At(Place::Out, at), across.iter().map(sum), count, op);
        if avg {
            b.push(Step::Average { dst: At(Place::Out, at), count, n: n as u32 });
        }
        for p in &counterparts {
            b.copy(At(Place::PeerOut(*p), at), At(Place::Out, at), count * size);
        }
        done += count;
    }
    b.push(Step::Signal(PUSHED));
    for p in &counterparts {
        b.push(Step::Wait { peer: *p, step: PUSHED });
    }
    b.push(Step::Signal(COMPLETE));

    for p in &mates {
        b.push(Step::Wait { peer: *p, step: COMPLETE });
        let (count, first) = Builder::part(count, g, usize::from(*p) % g);
        b.copy(At(Place::Out, first * size), At(Place::PeerOut(*p), first * size), count * size);
    }
    b.push(Step::Signal(FINISHED));
    for p in &mates {
        b.push(Step::Wait { peer: *p, step: FINISHED });
    }
}
