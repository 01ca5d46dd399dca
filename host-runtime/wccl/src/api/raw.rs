//! The dynamic form of the collectives, for bindings and for who knows an element type only when the program runs: a
//! [`DataType`], a count, and bytes ([`Io`], [`Buffers`]).

use crate::api::collectives::{Engine, OwnedReduction, Peers, Reduction, call};
use crate::api::memory::Io;
use crate::api::streams::{Buffers, Pending, Stream};
use crate::error::Error;
use enc::Call;
use hw_bridge::call::{DataType, Op, ReduceOp};

/// The collectives of a [`Communicator`](crate::Communicator) in the dynamic form; made by
/// [`Communicator::raw`](crate::Communicator::raw).
#[derive(Debug)]
pub struct Raw<'a>(pub(super) &'a mut Engine);

/// The collectives of a [`Stream`] in the dynamic form; made by [`Stream::raw`].
#[derive(Debug)]
pub struct RawStream<'a>(pub(super) &'a mut Stream);

impl Raw<'_> {
    /// Every rank gets the reduction of all inputs. `count` elements each.
    ///
    /// # Errors
    /// [`Error::Usage`] for buffers that do not fit, [`Error::Op`] if the operation fails (the communicator is then
    /// broken); if connections must be made, [`Error::Connecting`] when not all ranks come to that and [`Error::Plugin`]
    /// when the control plane is gone. All collectives alike.
    pub fn all_reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.0.collective(io, None, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// Every rank gets all inputs, in rank order. `count` elements of each rank.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn all_gather(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.0.collective(io, None, call(Op::AllGather, dtype, count))
    }

    /// Rank r gets block r of the reduction. `count` elements of output; the input has that times the ranks.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn reduce_scatter(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.0.collective(io, None, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// Every rank gets the root's input. `count` elements.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn broadcast(&mut self, io: Io<'_>, count: u64, dtype: DataType, root: usize) -> Result<(), Error> {
        self.0.collective(io, None, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// The root gets the reduction of all inputs. `count` elements.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp, root: usize) -> Result<(), Error> {
        self.0.collective(io, None, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// Rank r gets block r of every rank, in rank order. `count` elements a block. In place on all ranks or on none.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn all_to_all(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.0.collective(io, None, call(Op::AllToAll, dtype, count))
    }

    /// Sends the input to one rank and receives the output from one. All ranks call it, whether or not they send or
    /// receive; `count` elements either way.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn send_recv(&mut self, io: Io<'_>, count: u64, dtype: DataType, peers: Peers) -> Result<(), Error> {
        self.0.collective(io, None, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// Nobody leaves before all have come.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.0.barrier()
    }

    /// The root gets all inputs, in rank order. `count` elements of each rank; in place on the root, its input is its block
    /// of the output.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn gather(&mut self, io: Io<'_>, count: u64, dtype: DataType, root: usize) -> Result<(), Error> {
        self.0.collective(io, None, Call { root, ..call(Op::Gather, dtype, count) })
    }

    /// Rank r gets block r of the root's input. `count` elements a block; in place on the root, its output is its block of
    /// the input.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`].
    pub fn scatter(&mut self, io: Io<'_>, count: u64, dtype: DataType, root: usize) -> Result<(), Error> {
        self.0.collective(io, None, Call { root, ..call(Op::Scatter, dtype, count) })
    }

    /// Every rank gets all inputs, in rank order. `counts[r]` elements of rank r (0 is fine); the same list on all ranks.
    ///
    /// The first call with a list compiles its schedule; some dozens are kept, found by the list, whose comparison is what a
    /// repeated call pays. The same for the other forms with lists.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`]; another list on another rank is a mismatch.
    pub fn all_gather_v(&mut self, io: Io<'_>, counts: &[u64], dtype: DataType) -> Result<(), Error> {
        self.0.counted(io, call(Op::AllGatherV, dtype, 0), counts)
    }

    /// Rank r gets part r of the reduction. `counts[r]` elements of output on rank r (0 is fine); the input has all parts in
    /// rank order; the same list on all ranks.
    ///
    /// # Errors
    /// As [`Raw::all_gather_v`].
    pub fn reduce_scatter_v(&mut self, io: Io<'_>, counts: &[u64], dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.0.counted(io, Call { redop: op, ..call(Op::ReduceScatterV, dtype, 0) }, counts)
    }

    /// Sends `send[r]` elements to rank r and receives `recv[r]` elements from it; blocks lie in rank order without gaps, and
    /// may be empty. Not in place.
    ///
    /// A buffer that is too short on this rank is refused here alone, before anything is exchanged.
    ///
    /// Ranks know only their own counts, so the call begins with a small exchange of all counts (16 bytes a rank and peer,
    /// one hop, one operation of its own in the counters), after which a schedule is looked up by them.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`]. Counts that do not fit are an [`Error::Usage`] on all ranks that names both sides;
    /// nothing has moved, and the communicator goes on.
    pub fn all_to_all_v(&mut self, io: Io<'_>, send: &[u64], recv: &[u64], dtype: DataType) -> Result<(), Error> {
        self.0.all_to_all_v(io, send, recv, dtype)
    }

    /// Sends the input from rank a to rank b for every pair (a, b), the same pairs on all ranks; a rank sends once at most and
    /// receives once at most. `count` elements a pair. Not in place. Ranks in no pair pass without waiting.
    ///
    /// # Errors
    /// As [`Raw::all_gather_v`].
    pub fn permute(&mut self, io: Io<'_>, count: u64, dtype: DataType, pairs: &[(usize, usize)]) -> Result<(), Error> {
        self.0.permute(io, call(Op::Permute, dtype, count), pairs)
    }

    /// Reduces many small buffers in place as if one after the other, packed into few operations: those of up to 64 KiB share
    /// them, in private memory; larger ones go by themselves. The same sizes in the same order on all ranks.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`]. After an error some of the buffers hold their results and some do not.
    pub fn all_reduce_many(&mut self, items: &mut [Reduction<'_>], dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.0.all_reduce_many(items, dtype, op)
    }
}

/// Pre-scaled sums (NCCL's PreMulSum): the result is the sum over the ranks, in rank order, of each rank's `scale` times
/// its elements, computed in f32 and rounded once (along a ring: in ring order, each partial sum rounded). Each rank passes a
/// scale of its own; different ones are no mismatch.
/// Float types only.
impl Raw<'_> {
    /// [`Raw::all_reduce`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Raw::all_reduce`], and [`Error::Usage`] for an integer type.
    pub fn all_reduce_scaled(&mut self, io: Io<'_>, count: u64, dtype: DataType, scale: f32) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.0.collective(io, Some(scale), Call { redop, ..call(Op::AllReduce, dtype, count) })
    }

    /// [`Raw::reduce_scatter`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Raw::all_reduce_scaled`].
    pub fn reduce_scatter_scaled(&mut self, io: Io<'_>, count: u64, dtype: DataType, scale: f32) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.0.collective(io, Some(scale), Call { redop, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// [`Raw::reduce`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Raw::all_reduce_scaled`].
    pub fn reduce_scaled(
        &mut self,
        io: Io<'_>,
        count: u64,
        dtype: DataType,
        root: usize,
        scale: f32,
    ) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.0.collective(io, Some(scale), Call { root, redop, ..call(Op::Reduce, dtype, count) })
    }
}

impl RawStream<'_> {
    /// `scale` is this rank's of a pre-scaled sum, `None` in all other calls.
    fn collective(&mut self, b: Buffers, scale: Option<f32>, call: Call) -> Pending {
        self.0.issue(call.op, b, move |engine, b| engine.collective(b.io(), scale, call))
    }

    /// As [`Raw::all_reduce`], in the background.
    pub fn all_reduce(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Pending {
        self.collective(b, None, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// As [`Raw::all_gather`], in the background.
    pub fn all_gather(&mut self, b: Buffers, count: u64, dtype: DataType) -> Pending {
        self.collective(b, None, call(Op::AllGather, dtype, count))
    }

    /// As [`Raw::reduce_scatter`], in the background.
    pub fn reduce_scatter(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Pending {
        self.collective(b, None, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// As [`Raw::broadcast`], in the background.
    pub fn broadcast(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Pending {
        self.collective(b, None, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// As [`Raw::reduce`], in the background.
    pub fn reduce(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp, root: usize) -> Pending {
        self.collective(b, None, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// As [`Raw::all_to_all`], in the background.
    pub fn all_to_all(&mut self, b: Buffers, count: u64, dtype: DataType) -> Pending {
        self.collective(b, None, call(Op::AllToAll, dtype, count))
    }

    /// As [`Raw::send_recv`], in the background.
    pub fn send_recv(&mut self, b: Buffers, count: u64, dtype: DataType, peers: Peers) -> Pending {
        self.collective(b, None, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// As [`Raw::barrier`], in the background: done when all ranks' streams have come to it.
    pub fn barrier(&mut self) -> Pending {
        self.collective(Buffers::none(), None, call(Op::Barrier, DataType::Uint8, 0))
    }

    /// As [`Raw::gather`], in the background.
    pub fn gather(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Pending {
        self.collective(b, None, Call { root, ..call(Op::Gather, dtype, count) })
    }

    /// As [`Raw::scatter`], in the background.
    pub fn scatter(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Pending {
        self.collective(b, None, Call { root, ..call(Op::Scatter, dtype, count) })
    }

    /// As [`Raw::all_gather_v`], in the background.
    pub fn all_gather_v(&mut self, b: Buffers, counts: &[u64], dtype: DataType) -> Pending {
        self.counted(b, counts, call(Op::AllGatherV, dtype, 0))
    }

    /// As [`Raw::reduce_scatter_v`], in the background.
    pub fn reduce_scatter_v(&mut self, b: Buffers, counts: &[u64], dtype: DataType, op: ReduceOp) -> Pending {
        self.counted(b, counts, Call { redop: op, ..call(Op::ReduceScatterV, dtype, 0) })
    }

    fn counted(&mut self, b: Buffers, counts: &[u64], call: Call) -> Pending {
        let counts = counts.to_vec();
        self.0.issue(call.op, b, move |engine, b| engine.counted(b.io(), call, &counts))
    }

    /// As [`Raw::all_to_all_v`], in the background.
    pub fn all_to_all_v(&mut self, b: Buffers, send: &[u64], recv: &[u64], dtype: DataType) -> Pending {
        let (send, recv) = (send.to_vec(), recv.to_vec());
        self.0.issue(Op::AllToAllV, b, move |engine, b| engine.all_to_all_v(b.io(), &send, &recv, dtype))
    }

    /// As [`Raw::permute`], in the background.
    pub fn permute(&mut self, b: Buffers, count: u64, dtype: DataType, pairs: &[(usize, usize)]) -> Pending {
        let (pairs, call) = (pairs.to_vec(), call(Op::Permute, dtype, count));
        self.0.issue(call.op, b, move |engine, b| engine.permute(b.io(), call, &pairs))
    }

    /// As [`Raw::all_reduce_many`], in the background.
    pub fn all_reduce_many(
        &mut self,
        items: Vec<OwnedReduction>,
        dtype: DataType,
        op: ReduceOp,
    ) -> Pending<Vec<OwnedReduction>> {
        self.0.issue(Op::AllReduce, items, move |engine, items| engine.all_reduce_many(items, dtype, op))
    }

    /// As [`Raw::all_reduce_scaled`], in the background.
    pub fn all_reduce_scaled(&mut self, b: Buffers, count: u64, dtype: DataType, scale: f32) -> Pending {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { redop, ..call(Op::AllReduce, dtype, count) })
    }

    /// As [`Raw::reduce_scatter_scaled`], in the background.
    pub fn reduce_scatter_scaled(&mut self, b: Buffers, count: u64, dtype: DataType, scale: f32) -> Pending {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { redop, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// As [`Raw::reduce_scaled`], in the background.
    pub fn reduce_scaled(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize, scale: f32) -> Pending {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { root, redop, ..call(Op::Reduce, dtype, count) })
    }
}
