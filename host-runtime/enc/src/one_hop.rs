//! One hop: every contributor writes its input beside its arrival record; whoever needs it reads it there.
//!
//! The record's flow control (a slot is reused only when its readers are done) makes this one-way: a broadcast's root
//! does not wait for anybody.

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Step};
use hw_bridge::limits::INLINE_BYTES;

use super::Builder;

pub(super) fn build(b: &mut Builder<'_>) {
    let (rank, n, bytes) = (b.rank, b.n, b.bytes);
    let slot = |r: usize, at: u64| At(Place::Slot(r as u16), at);
    let contributes = match b.call.op {
        Op::Broadcast => rank == b.call.root,
        Op::Reduce => rank != b.call.root,
        Op::SendRecv => b.call.dst.is_some(),
        Op::Barrier => false,
        _ => true,
    };
    let contribution =
        if b.call.op == Op::Barrier { 0 } else { b.call.slot_bytes_with(b.lists, n).unwrap_or(u64::MAX) };
    b.schedule.payload = if contributes { contribution } else { 0 };
    // The scale of a pre-scaled sum lies where a tiny payload would.
    let least = if b.call.redop == ReduceOp::PreMulSum && contribution > 0 { INLINE_BYTES as u64 + 1 } else { 0 };
    b.schedule.slot_len = contribution.max(least);
    let in_place = b.call.in_place;
    let own_is_there = move |r: usize| in_place && r == rank;
    let all = |at: u64| (0..n).map(move |r| At(Place::Slot(r as u16), at));
    match b.call.op {
        Op::Barrier => b.arrivals(),
        Op::AllReduce => {
            b.arrivals();
            b.reduce(At(Place::Out, 0), all(0), b.call.count, b.call.redop);
        }
        Op::ReduceScatter => {
            b.arrivals();
            b.reduce(At(Place::Out, 0), all(rank as u64 * bytes), b.call.count, b.call.redop);
        }
        Op::ReduceScatterV => {
            // A record with a digest in its words has its payload behind them, however small that is.
            if b.schedule.slot_len > 0 {
                b.schedule.slot_len = b.schedule.slot_len.max(INLINE_BYTES as u64 + 1);
            }
            b.arrivals();
            let super::Sizes { output, at, .. } = super::sizes(b.call, b.lists, rank, n);
            b.reduce(At(Place::Out, 0), all(at), output / b.size, b.call.redop);
        }
        Op::AllGather => {
            b.arrivals();
            for r in (0..n).filter(|r| !own_is_there(*r)) {
                b.copy(At(Place::Out, r as u64 * bytes), slot(r, 0), bytes);
            }
        }
        Op::AllToAll => {
            b.arrivals();
            for r in (0..n).filter(|r| !own_is_there(*r)) {
                b.copy(At(Place::Out, r as u64 * bytes), slot(r, rank as u64 * bytes), bytes);
            }
        }
        Op::Broadcast if rank == b.call.root => {
            if !b.call.in_place {
                b.copy(At(Place::Out, 0), At(Place::In, 0), bytes);
            }
        }
        Op::Broadcast => {
            let root = b.call.root;
            b.push(Step::Arrival(root as u16));
            b.copy(At(Place::Out, 0), slot(root, 0), bytes);
        }
        Op::Reduce if rank == b.call.root => {
            b.arrivals();
            let sources = (0..n).map(|r| if r == rank { At(Place::In, 0) } else { slot(r, 0) });
            b.reduce(At(Place::Out, 0), sources, b.call.count, b.call.redop);
        }
        // The forms that are lists of moves are built in `moves`.
        Op::Reduce | Op::Gather | Op::Scatter | Op::Permute | Op::AllGatherV | Op::AllToAllV | Op::Group => {}
        Op::SendRecv => {
            if let Some(src) = b.call.src {
                if src != rank {
                    b.push(Step::Arrival(src as u16));
                    b.push(Step::SendsToMe(src as u16));
                }
                b.copy(At(Place::Out, 0), slot(src, 0), bytes);
            }
        }
    }
}
