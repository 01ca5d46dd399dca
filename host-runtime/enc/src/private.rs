//! Staged: private memory of each process passes in pieces through the communicator's segments.
//!
//! Only what others read is staged; a rank reads its own input and writes its own output directly. There are two halves,
//! so a piece is filled while peers still read the one before. Signals count up in program order, the same on all
//! ranks that make them.

use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{At, Place, Step};
use hw_bridge::limits::{MAX_STEPS, STAGE_BYTES};

use super::moves::{Lane, lanes};
use super::{Builder, Call, Lists};

const STAGE: u64 = STAGE_BYTES as u64;
/// A piece where more than two ranks reduce parts of it: half as much keeps what all of them touch closer.
const MANY: u64 = STAGE / 2;
/// First step number after "arrived".
const FIRST: u64 = 2;

/// Largest block of one call on `n` ranks, in bytes: pieces are numbered in a 16-bit word.
pub fn max_private_bytes(op: Op, n: usize) -> u64 {
    let pieces = (MAX_STEPS - FIRST) / 2 - 1;
    match op {
        // A lane of whole elements is at least this long whatever their size.
        Op::ReduceScatter | Op::AllToAll | Op::Scatter => pieces * (STAGE / n as u64 / 8 * 8),
        // An all_reduce makes two steps a piece.
        _ => pieces * (MANY - 8),
    }
}

pub(super) fn build(b: &mut Builder<'_>) {
    b.schedule.staged = true;
    match b.call.op {
        Op::AllReduce if b.n == 2 => all_reduce_of_two(b),
        Op::AllReduce => all_reduce(b),
        Op::AllGather => all_gather(b),
        Op::ReduceScatter | Op::AllToAll => scattering(b),
        Op::Broadcast => broadcast(b),
        Op::Reduce => reduce(b),
        Op::SendRecv => send_recv(b),
        Op::ReduceScatterV => reduce_scatter_v(b),
        // The forms that are lists of moves are built in `moves`.
        Op::Barrier | Op::Gather | Op::Scatter | Op::Permute | Op::AllGatherV | Op::AllToAllV | Op::Group => {
            b.arrivals();
        }
    }
}

fn stage(r: usize, k: u64, at: u64) -> At {
    At(Place::Stage(r as u16, (k % 2) as u8), at)
}

fn result(r: usize, k: u64, at: u64) -> At {
    At(Place::Result(r as u16, (k % 2) as u8), at)
}

/// Pieces of `total` bytes, each at most `most` and whole elements: (number, first byte, bytes).
fn pieces(total: u64, most: u64, size: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    let most = most / size * size;
    (0..total.div_ceil(most)).map(move |k| (k, k * most, most.min(total - k * most)))
}

/// Signals `step`, then waits for all peers to have signalled it; the first piece also checks the headers.
fn meet(b: &mut Builder<'_>, k: u64, step: u64) {
    b.push(Step::Signal(step as u16));
    if k == 0 {
        b.arrivals();
    }
    b.wait_all(step as u16);
}

/// Two ranks: each reduces everything itself, which moves fewer bytes than exchanging halves, and syncs once a piece.
fn all_reduce_of_two(b: &mut Builder<'_>) {
    let (rank, size, peer) = (b.rank, b.size, 1 - b.rank);
    for (k, off, len) in pieces(b.bytes, STAGE, size) {
        b.copy(stage(rank, k, 0), At(Place::In, off), len);
        meet(b, k, FIRST + k);
        let mut sources = [At(Place::In, off), stage(peer, k, 0)];
        if rank == 1 {
            sources.reverse();
        }
        b.reduce(At(Place::Out, off), sources, len / size, b.call.redop);
    }
    // Peers may still read our last pieces; the slots' flow control keeps the halves, see `last_reads`.
    last_reads(b, FIRST + b.bytes.div_ceil(STAGE / size * size));
}

/// Each rank reduces its part of a piece, straight from its own input and from what the others staged of it, and stages the
/// result for them. While the parts of piece k are reduced, piece k+1 is already staged.
fn all_reduce(b: &mut Builder<'_>) {
    let (rank, n, size) = (b.rank, b.n, b.size);
    let all: Vec<(u64, u64, u64)> = pieces(b.bytes, MANY, size).collect();
    let mut step = FIRST;
    let mut staged_at = Vec::with_capacity(all.len());
    let stage_in = |b: &mut Builder<'_>, (k, off, len): (u64, u64, u64), step: &mut u64| {
        // All but this rank's own part, which nobody else reads: what lies before it and what lies behind.
        let (part, at) = Builder::part(len / size, n, rank);
        let (before, behind) = (at * size, (at + part) * size);
        b.copy(stage(rank, k, 0), At(Place::In, off), before);
        b.copy(stage(rank, k, behind), At(Place::In, off + behind), len - behind);
        b.push(Step::Signal(*step as u16));
        *step += 1;
        *step - 1
    };
    let copy_out = |b: &mut Builder<'_>, (k, off, len): (u64, u64, u64), reduced: u64| {
        for p in b.others() {
            let (part, at) = Builder::part(len / size, n, p);
            b.push(Step::Wait { peer: p as u16, step: reduced as u16 });
            b.copy(At(Place::Out, off + at * size), result(p, k, at * size), part * size);
        }
    };
    let mut reduced_at = 0;
    staged_at.extend(all.first().map(|piece| stage_in(b, *piece, &mut step)));
    for (i, piece) in all.iter().enumerate() {
        let (k, off, len) = *piece;
        if i > 0 {
            copy_out(b, all[i - 1], reduced_at);
        }
        if let Some(next) = all.get(i + 1) {
            staged_at.push(stage_in(b, *next, &mut step));
        }
        if k == 0 {
            b.arrivals();
        }
        b.wait_all(staged_at[i] as u16);
        let (part, at) = Builder::part(len / size, n, rank);
        let at = at * size;
        let sources = (0..n).map(|p| if p == rank { At(Place::In, off + at) } else { stage(p, k, at) });
        b.reduce(At(Place::Out, off + at), sources, part, b.call.redop);
        b.copy(result(rank, k, at), At(Place::Out, off + at), part * size);
        b.push(Step::Signal(step as u16));
        reduced_at = step;
        step += 1;
    }
    if let Some(last) = all.last() {
        copy_out(b, *last, reduced_at);
    }
    last_reads(b, step);
}

fn all_gather(b: &mut Builder<'_>) {
    let (rank, bytes) = (b.rank, b.bytes);
    let mut last = FIRST;
    for (k, off, len) in pieces(bytes, STAGE, b.size) {
        b.copy(stage(rank, k, 0), At(Place::In, off), len);
        meet(b, k, FIRST + k);
        for p in b.others() {
            b.copy(At(Place::Out, p as u64 * bytes + off), stage(p, k, 0), len);
        }
        last = FIRST + k + 1;
    }
    if !b.call.in_place {
        b.copy(At(Place::Out, rank as u64 * bytes), At(Place::In, 0), bytes);
    }
    last_reads(b, last);
}

/// reduce_scatter and all_to_all: a piece of every block is staged; each rank reads its block from all.
fn scattering(b: &mut Builder<'_>) {
    let (rank, n, bytes, size) = (b.rank, b.n, b.bytes, b.size);
    let lane = STAGE / n as u64 / size * size;
    let mut last = FIRST;
    for (k, off, len) in pieces(bytes, lane, size) {
        for p in 0..n as u64 {
            b.copy(stage(rank, k, p * lane), At(Place::In, p * bytes + off), len);
        }
        meet(b, k, FIRST + k);
        let mine = rank as u64 * lane;
        if b.call.op == Op::ReduceScatter {
            b.reduce(At(Place::Out, off), (0..n).map(|p| stage(p, k, mine)), len / size, b.call.redop);
        } else {
            for p in 0..n {
                b.copy(At(Place::Out, p as u64 * bytes + off), stage(p, k, mine), len);
            }
        }
        last = FIRST + k + 1;
    }
    last_reads(b, last);
}

/// Lanes of the parts of reduce_scatter_v in a half: whole elements, wide in proportion.
fn parts(call: &Call, lists: Lists<'_>) -> Vec<Lane> {
    let Lists::Counts(counts) = lists else { return Vec::new() };
    let size = call.dtype.size() as u64;
    let mut at = 0;
    let mut stretches = Vec::with_capacity(counts.len());
    for count in counts {
        stretches.push((at, count * size));
        at += count * size;
    }
    lanes(&stretches, size)
}

fn rounds(lanes: &[Lane]) -> u64 {
    lanes.iter().map(|l| l.bytes.div_ceil(l.piece.max(1))).max().unwrap_or(0)
}

/// Whether the pieces of reduce_scatter_v can be numbered.
pub(super) fn fits_reduce_scatter_v(call: &Call, lists: Lists<'_>) -> bool {
    rounds(&parts(call, lists)) < MAX_STEPS - FIRST - 1
}

/// As `scattering`, with lanes as wide as the parts are long.
fn reduce_scatter_v(b: &mut Builder<'_>) {
    let (rank, n, size) = (b.rank, b.n, b.size);
    let lanes = parts(b.call, b.lists);
    let rounds = rounds(&lanes);
    for k in 0..rounds {
        for l in &lanes {
            let (off, len) = l.piece_of(k);
            b.copy(stage(rank, k, l.lane), At(Place::In, l.at + off), len);
        }
        meet(b, k, FIRST + k);
        let mine = lanes[rank];
        let (off, len) = mine.piece_of(k);
        b.reduce(At(Place::Out, off), (0..n).map(|p| stage(p, k, mine.lane)), len / size, b.call.redop);
    }
    last_reads(b, FIRST + rounds);
}

/// The root stages; a half is filled again when all have read it.
fn broadcast(b: &mut Builder<'_>) {
    let (rank, root, bytes) = (b.rank, b.call.root, b.bytes);
    if rank != root {
        b.push(Step::Arrival(root as u16));
        for (k, off, len) in pieces(bytes, STAGE, b.size) {
            let step = (FIRST + k) as u16;
            b.push(Step::Wait { peer: root as u16, step });
            b.copy(At(Place::Out, off), stage(root, k, 0), len);
            b.push(Step::Signal(step));
        }
        return;
    }
    b.arrivals();
    if !b.call.in_place {
        b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
    }
    let mut last = None;
    for (k, off, len) in pieces(bytes, STAGE, b.size) {
        if k >= 2 {
            b.wait_all((FIRST + k - 2) as u16);
        }
        b.copy(stage(rank, k, 0), At(Place::In, off), len);
        b.push(Step::Signal((FIRST + k) as u16));
        last = Some(FIRST + k);
    }
    if let Some(last) = last {
        b.wait_all(last as u16);
    }
}

/// The others stage, the root reduces; a half is filled again when the root has read it.
fn reduce(b: &mut Builder<'_>) {
    let (rank, n, root, size) = (b.rank, b.n, b.call.root, b.size);
    if rank == root {
        b.arrivals();
        for (k, off, len) in pieces(b.bytes, STAGE, size) {
            let step = (FIRST + k) as u16;
            b.wait_all(step);
            let sources = (0..n).map(|p| if p == rank { At(Place::In, off) } else { stage(p, k, 0) });
            b.reduce(At(Place::Out, off), sources, len / size, b.call.redop);
            b.push(Step::Signal(step));
        }
        return;
    }
    b.push(Step::Arrival(root as u16));
    let mut last = None;
    for (k, off, len) in pieces(b.bytes, STAGE, size) {
        if k >= 2 {
            b.push(Step::Wait { peer: root as u16, step: (FIRST + k - 2) as u16 });
        }
        b.copy(stage(rank, k, 0), At(Place::In, off), len);
        b.push(Step::Signal((FIRST + k) as u16));
        last = Some(FIRST + k);
    }
    if let Some(last) = last {
        b.push(Step::Wait { peer: root as u16, step: last as u16 });
    }
}

/// Even steps: "piece staged"; odd steps: "piece read". A rank that only sends or only receives makes both signals, so
/// that numbers mean the same everywhere.
fn send_recv(b: &mut Builder<'_>) {
    let (rank, bytes) = (b.rank, b.bytes);
    let dst = b.call.dst.filter(|d| *d != rank);
    let src = b.call.src.filter(|s| *s != rank);
    for p in [dst, src].into_iter().flatten() {
        b.push(Step::Arrival(p as u16));
    }
    if let Some(dst) = dst {
        b.push(Step::ReceivesFromMe(dst as u16));
    }
    if let Some(src) = src {
        b.push(Step::SendsToMe(src as u16));
    }
    if b.call.src == Some(rank) {
        b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
    }
    let mut last = None;
    for (k, off, len) in pieces(bytes, STAGE, b.size) {
        let (staged, read) = (FIRST + 2 * k, FIRST + 2 * k + 1);
        if let Some(dst) = dst {
            if k >= 2 {
                b.push(Step::Wait { peer: dst as u16, step: (read - 4) as u16 });
            }
            b.copy(stage(rank, k, 0), At(Place::In, off), len);
        }
        b.push(Step::Signal(staged as u16));
        if let Some(src) = src {
            b.push(Step::Wait { peer: src as u16, step: staged as u16 });
            b.copy(At(Place::Out, off), stage(src, k, 0), len);
        }
        b.push(Step::Signal(read as u16));
        last = Some(read);
    }
    if let (Some(dst), Some(last)) = (dst, last) {
        b.push(Step::Wait { peer: dst as u16, step: last as u16 });
    }
}

/// Nobody leaves while a peer may still read its staging halves: the next operation fills them again.
fn last_reads(b: &mut Builder<'_>, step: u64) {
    b.push(Step::Signal(step as u16));
    b.wait_all(step as u16);
}
