//! Direct mesh: tensors in device memory that every local rank maps. No staging copy, no intermediate buffer.

use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{At, Place, Step};

use super::Builder;

/// Bytes reduced and pushed out before the next piece: small enough that a piece is still in the cache when it is
/// copied to the peers.
pub(super) const PUSH_BYTES: u64 = 64 * 1024;
/// "I have read and written all I wanted of others' buffers."
const FINISHED: u16 = 2;

pub(super) fn build(b: &mut Builder<'_>) {
    let (rank, n, bytes, count) = (b.rank, b.n, b.bytes, b.call.count);
    let peer_in = |p: usize, at: u64| if p == rank { At(Place::In, at) } else { At(Place::PeerIn(p as u16), at) };
    match b.call.op {
        Op::AllReduce => {
            b.arrivals();
            let (mine, first) = Builder::part(count, n, rank);
            let others: Vec<u16> = b.others().map(|p| p as u16).collect();
            push_reduced(b, first, mine, &others);
        }
        Op::Reduce => {
            b.arrivals();
            let (mine, first) = Builder::part(count, n, rank);
            reduce_to_root(b, first, mine);
        }
        Op::ReduceScatter => {
            b.arrivals();
            let at = rank as u64 * bytes;
            b.reduce(At(Place::Out, 0), (0..n).map(|p| peer_in(p, at)), count, b.call.redop);
        }
        Op::AllGather => {
            b.arrivals();
            for p in b.others() {
                b.copy(At(Place::Out, p as u64 * bytes), At(Place::PeerIn(p as u16), 0), bytes);
            }
            if !b.call.in_place {
                b.copy(At(Place::Out, rank as u64 * bytes), At(Place::In, 0), bytes);
            }
        }
        Op::AllToAll if b.call.in_place => {
            b.arrivals();
            for p in b.others().filter(|p| rank < *p) {
                let mine = At(Place::Out, p as u64 * bytes);
                let theirs = At(Place::PeerOut(p as u16), rank as u64 * bytes);
                if bytes > 0 {
                    b.push(Step::Swap { a: mine, b: theirs, len: bytes });
                }
            }
        }
        Op::AllToAll => {
            b.arrivals();
            for p in b.others() {
                b.copy(At(Place::Out, p as u64 * bytes), At(Place::PeerIn(p as u16), rank as u64 * bytes), bytes);
            }
            b.copy(At(Place::Out, rank as u64 * bytes), At(Place::In, rank as u64 * bytes), bytes);
        }
        Op::Broadcast => {
            let root = b.call.root;
            if rank == root {
                b.arrivals();
                if !b.call.in_place {
                    b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
                }
                b.wait_all(FINISHED);
            } else {
                b.push(Step::Arrival(root as u16));
                b.copy(At(Place::Out, 0), At(Place::PeerIn(root as u16), 0), bytes);
                b.push(Step::Signal(FINISHED));
            }
            return;
        }
        Op::ReduceScatterV => {
            b.arrivals();
            let super::Sizes { output, at, .. } = super::sizes(b.call, b.lists, rank, n);
            b.reduce(At(Place::Out, 0), (0..n).map(|p| peer_in(p, at)), output / b.size, b.call.redop);
            // Who has no part reads nothing.
            if output > 0 {
                b.push(Step::Signal(FINISHED));
            }
            let (call, lists) = (b.call, b.lists);
            for p in b.others().filter(|p| super::sizes(call, lists, *p, n).output > 0) {
                b.push(Step::Wait { peer: p as u16, step: FINISHED });
            }
            return;
        }
        Op::SendRecv => return send_recv(b),
        // The forms that are lists of moves are built in `moves`.
        Op::Barrier | Op::Gather | Op::Scatter | Op::Permute | Op::AllGatherV | Op::AllToAllV | Op::Group => {
            b.arrivals();
        }
    }
    b.push(Step::Signal(FINISHED));
    b.wait_all(FINISHED);
}

/// Reduces this rank's part piece by piece into its own output and copies each piece to the others' outputs.
fn push_reduced(b: &mut Builder<'_>, first: u64, mine: u64, others: &[u16]) {
    let (rank, n, size) = (b.rank, b.n, b.size);
    let piece = (PUSH_BYTES / size).max(mine.div_ceil(4096));
    let mut done = 0;
    while done < mine {
        let count = piece.min(mine - done);
        let at = (first + done) * size;
        let sources = (0..n).map(|p| if p == rank { At(Place::In, at) } else { At(Place::PeerIn(p as u16), at) });
        b.reduce(At(Place::Out, at), sources, count, b.call.redop);
        for p in others {
            b.copy(At(Place::PeerOut(*p), at), At(Place::Out, at), count * size);
        }
        done += count;
    }
}

/// Reduces this rank's part straight into the root's output.
fn reduce_to_root(b: &mut Builder<'_>, first: u64, mine: u64) {
    let (rank, n, size, root) = (b.rank, b.n, b.size, b.call.root);
    let at = first * size;
    let sources = (0..n).map(|p| if p == rank { At(Place::In, at) } else { At(Place::PeerIn(p as u16), at) });
    let dst = if rank == root { Place::Out } else { Place::PeerOut(root as u16) };
    b.reduce(At(dst, at), sources, mine, b.call.redop);
}

fn send_recv(b: &mut Builder<'_>) {
    let (rank, bytes) = (b.rank, b.bytes);
    if let Some(dst) = b.call.dst.filter(|d| *d != rank) {
        b.push(Step::Arrival(dst as u16));
        b.push(Step::ReceivesFromMe(dst as u16));
    }
    if let Some(src) = b.call.src {
        if src == rank {
            b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
        } else {
            b.push(Step::Arrival(src as u16));
            b.push(Step::SendsToMe(src as u16));
            b.copy(At(Place::Out, 0), At(Place::PeerIn(src as u16), 0), bytes);
            b.push(Step::Signal(FINISHED));
        }
    }
    if let Some(dst) = b.call.dst.filter(|d| *d != rank) {
        b.push(Step::Wait { peer: dst as u16, step: FINISHED });
    }
}
