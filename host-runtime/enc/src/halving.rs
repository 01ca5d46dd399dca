//! Recursive halving and doubling, for any number of ranks: log2(n) partners instead of all peers.
//!
//! all_reduce (Rabenseifner): partners at distance p/2, p/4, ... each keep half of what they have and add the other's half
//! to it; then the way back, pulling finished halves. all_gather: the way back alone. p is the largest power of two that
//! is not above n; of the first 2(n-p) ranks every odd one is an *extra*, whose input its left neighbour takes along and
//! who copies the result from it at the end. The p others hold *seats*.
//!
//! Every element is reduced along one tree of operands and its result copied, so all ranks get the same bits. A part of
//! a rank's output is overwritten only after its reader has signalled a later step.

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Step};

use super::Builder;

/// An extra's "I have my result", and a seat's "my extra's input, or my own block, is in my output".
const READY: u16 = 2;

/// Whether there is such a schedule for this collective.
pub(super) fn serves(op: Op) -> bool {
    matches!(op, Op::AllReduce | Op::AllGather)
}

/// Who sits where.
#[derive(Debug, Clone, Copy)]
struct Seats {
    /// Seats, a power of two.
    p: usize,
    /// Extras.
    extras: usize,
}

impl Seats {
    fn of(n: usize) -> Seats {
        let p = 1 << n.ilog2();
        Seats { p, extras: n - p }
    }

    /// The rank on a seat; for the seat behind the last, the number of ranks.
    fn rank(self, seat: usize) -> usize {
        if seat < self.extras { 2 * seat } else { seat + self.extras }
    }

    /// The extra of a seat.
    fn extra(self, seat: usize) -> Option<usize> {
        (seat < self.extras).then_some(2 * seat + 1)
    }

    /// The seat of a rank; an extra has none.
    fn seat(self, rank: usize) -> Option<usize> {
        match rank {
            r if r >= 2 * self.extras => Some(r - self.extras),
            r if r % 2 == 0 => Some(r / 2),
            _ => None,
        }
    }

    fn levels(self) -> u16 {
        self.p.ilog2() as u16
    }
}

pub(super) fn build(b: &mut Builder<'_>) {
    let seats = Seats::of(b.n);
    match (seats.seat(b.rank), b.call.op) {
        (Some(seat), Op::AllReduce) => all_reduce(b, seats, seat),
        (Some(seat), _) => all_gather(b, seats, seat),
        (None, _) => extra(b, seats),
    }
}

/// Meets the extra and all partners.
fn meet(b: &mut Builder<'_>, seats: Seats, seat: usize) {
    for p in seats.extra(seat).into_iter().chain((0..seats.levels()).map(|s| seats.rank(seat ^ 1 << s))) {
        b.push(Step::Arrival(p as u16));
    }
}

fn all_reduce(b: &mut Builder<'_>, seats: Seats, seat: usize) {
    let (levels, size, count) = (seats.levels(), b.size, b.call.count);
    // Bytes of a stretch of parts, there is one a seat.
    let bytes = |parts: (usize, usize)| {
        let at = |i| Builder::part(count, seats.p, i).1 * size;
        (at(parts.0), at(parts.1) - at(parts.0))
    };
    let code = |step: u16| READY + 1 + step;
    let op = if b.call.redop == ReduceOp::Avg { ReduceOp::Sum } else { b.call.redop };
    meet(b, seats, seat);
    if let Some(extra) = seats.extra(seat) {
        b.reduce(At(Place::Out, 0), [At(Place::In, 0), At(Place::PeerIn(extra as u16), 0)], count, op);
        b.push(Step::Signal(READY));
    }
    let mut mine = (0, seats.p);
    let mut ways = Vec::with_capacity(usize::from(levels));
    for s in 0..levels {
        let far = seats.p >> (s + 1);
        let other = seat ^ far;
        let partner = seats.rank(other) as u16;
        let middle = mine.0 + far;
        let (keep, give) =
            if seat & far == 0 { ((mine.0, middle), (middle, mine.1)) } else { ((middle, mine.1), (mine.0, middle)) };
        let has_extra = |seat| seats.extra(seat).is_some();
        if s > 0 {
            b.push(Step::Wait { peer: partner, step: code(s - 1) });
        } else if has_extra(other) {
            b.push(Step::Wait { peer: partner, step: READY });
        }
        let (at, len) = bytes(keep);
        let ours = At(if s == 0 && !has_extra(seat) { Place::In } else { Place::Out }, at);
        let theirs = At(if s == 0 && !has_extra(other) { Place::PeerIn(partner) } else { Place::PeerOut(partner) }, at);
        let both = if seat < other { [ours, theirs] } else { [theirs, ours] };
        b.reduce(At(Place::Out, at), both, len / size, op);
        if s + 1 == levels && b.call.redop == ReduceOp::Avg && len > 0 {
            b.push(Step::Average { dst: At(Place::Out, at), count: len / size, n: b.n as u32 });
        }
        b.push(Step::Signal(code(s)));
        mine = keep;
        ways.push((partner, give));
    }
    for (t, (partner, theirs)) in ways.iter().rev().enumerate() {
        let step = levels + t as u16;
        let (at, len) = bytes(*theirs);
        b.push(Step::Wait { peer: *partner, step: code(step - 1) });
        b.copy(At(Place::Out, at), At(Place::PeerOut(*partner), at), len);
        b.push(Step::Signal(code(step)));
    }
    for (t, (partner, _)) in ways.iter().rev().enumerate() {
        b.push(Step::Wait { peer: *partner, step: code(levels + t as u16) });
    }
    if let Some(extra) = seats.extra(seat) {
        b.push(Step::Wait { peer: extra as u16, step: READY });
    }
}

/// After step t a rank has the blocks of the 2^(t+1) seats around its own; blocks of neighbouring seats are neighbours.
fn all_gather(b: &mut Builder<'_>, seats: Seats, seat: usize) {
    let bytes = b.bytes;
    let code = |step: u16| READY + 1 + step;
    meet(b, seats, seat);
    if !b.call.in_place {
        b.copy(At(Place::Out, b.rank as u64 * bytes), At(Place::In, 0), bytes);
    }
    if let Some(extra) = seats.extra(seat) {
        b.copy(At(Place::Out, extra as u64 * bytes), At(Place::PeerIn(extra as u16), 0), bytes);
    }
    b.push(Step::Signal(READY));
    for t in 0..seats.levels() {
        let (other, width) = (seat ^ 1 << t, 1 << t);
        let partner = seats.rank(other) as u16;
        let first = other & !(width - 1);
        let (from, to) = (seats.rank(first) as u64 * bytes, seats.rank(first + width) as u64 * bytes);
        b.push(Step::Wait { peer: partner, step: if t == 0 { READY } else { code(t - 1) } });
        b.copy(At(Place::Out, from), At(Place::PeerOut(partner), from), to - from);
        b.push(Step::Signal(code(t)));
    }
    for t in 0..seats.levels() {
        b.push(Step::Wait { peer: seats.rank(seat ^ 1 << t) as u16, step: code(t) });
    }
    if let Some(extra) = seats.extra(seat) {
        b.push(Step::Wait { peer: extra as u16, step: READY });
    }
}

/// Copies the result from the left neighbour when that one is through.
fn extra(b: &mut Builder<'_>, seats: Seats) {
    let (rank, bytes) = (b.rank, b.bytes);
    let left = (rank - 1) as u16;
    b.push(Step::Arrival(left));
    let gather = b.call.op == Op::AllGather;
    if gather && !b.call.in_place {
        b.copy(At(Place::Out, rank as u64 * bytes), At(Place::In, 0), bytes);
    }
    let rounds = if gather { seats.levels() } else { 2 * seats.levels() };
    b.push(Step::Wait { peer: left, step: READY + rounds });
    if gather {
        let behind = (rank as u64 + 1) * bytes;
        b.copy(At(Place::Out, 0), At(Place::PeerOut(left), 0), rank as u64 * bytes);
        let rest = b.schedule.out_bytes - behind;
        b.copy(At(Place::Out, behind), At(Place::PeerOut(left), behind), rest);
    } else {
        b.copy(At(Place::Out, 0), At(Place::PeerOut(left), 0), bytes);
    }
    b.push(Step::Signal(READY));
}
