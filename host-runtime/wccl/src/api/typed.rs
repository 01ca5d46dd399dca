//! The collectives of a program: typed buffers, counts from their lengths.
//!
//! Each call that has an output beside its input comes twice: `x_into` fills a buffer, `x` answers a new one of the input's kind, which
//! it allocates. Both make the call of the dynamic form ([`crate::api::raw`]), with nothing in between.

use hw_bridge::call::{Op, ReduceOp};

use crate::api::buffer::{Buffer, BufferMut, ViewMut, from, from_to, in_place, to};
use crate::api::collectives::{Engine, Peers, ReductionOf, call};
use crate::api::communicator::Communicator;
use crate::api::element::Element;
use crate::api::memory::DeviceMemory;
use crate::api::raw::Raw;
use crate::api::tensor::Tensor;
use crate::error::Error;
use crate::plane::host::bad;
use enc::Call;

/// The input and output of one call, which need not be of one type.
pub(super) trait Like<A: Buffer + ?Sized>: BufferMut<Element = A::Element, Side = A::Side> {}
impl<A, B> Like<A> for B
where
    A: Buffer + ?Sized,
    B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
{
}

/// The call of `op` over `count` elements of a buffer's type.
#[inline]
pub(super) fn of<B: Buffer + ?Sized>(op: Op, count: usize) -> Call {
    call(op, <B::Element as Element>::TYPE, count as u64)
}

/// `whole` in as many blocks as there are ranks.
pub(super) fn blocks(op: Op, which: &str, whole: usize, n: usize) -> Result<usize, Error> {
    if whole.is_multiple_of(n) {
        return Ok(whole / n);
    }
    Err(bad(format!(
        "the {which} of {} has {whole} elements, which is no whole block for each of {n} ranks",
        op.name()
    )))
}

/// `block` elements of each of `n` ranks.
pub(super) fn all(op: Op, block: usize, n: usize) -> Result<usize, Error> {
    block.checked_mul(n).ok_or_else(|| {
        bad(format!("{}: {block} elements of each of {n} ranks are more than memory can hold", op.name()))
    })
}

/// Whether a buffer is as long as the other one asks for.
pub(super) fn fits(op: Op, rank: usize, (name, has): (&str, usize), (other, asks): (&str, usize)) -> Result<(), Error> {
    if has == asks {
        return Ok(());
    }
    Err(bad(format!(
        "the {name} of {} on rank {rank} has {has} elements, {asks} are needed: the {other} says so",
        op.name()
    )))
}

/// The sum of some counts.
pub(super) fn sum(op: Op, counts: &[u64]) -> Result<usize, Error> {
    let sum = counts.iter().try_fold(0u64, |sum, c| sum.checked_add(*c)).and_then(|sum| usize::try_from(sum).ok());
    sum.ok_or_else(|| bad(format!("{}: the sum of the counts is larger than memory can be", op.name())))
}

impl Engine {
    /// Rank and ranks.
    pub(super) fn who(&self) -> (usize, usize) {
        (self.plane.core.rank, self.plane.core.nranks)
    }

    #[inline]
    pub(super) fn reduce_all<B: BufferMut + ?Sized>(
        &mut self,
        x: &mut B,
        op: ReduceOp,
        scale: Option<f32>,
    ) -> Result<(), Error> {
        let call = Call { redop: op, ..of::<B>(Op::AllReduce, x.elements()) };
        self.collective(in_place(x), scale, call)
    }

    pub(super) fn reduce_all_into<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        op: ReduceOp,
    ) -> Result<(), Error> {
        fits(Op::AllReduce, self.who().0, ("output", y.elements()), ("input", x.elements()))?;
        let call = Call { redop: op, ..of::<A>(Op::AllReduce, x.elements()) };
        self.collective(from_to(x, y)?, None, call)
    }

    pub(super) fn scatter_reduced<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        op: ReduceOp,
        scale: Option<f32>,
    ) -> Result<(), Error> {
        let (rank, n) = self.who();
        let block = blocks(Op::ReduceScatter, "input", x.elements(), n)?;
        fits(Op::ReduceScatter, rank, ("output", y.elements()), ("input", block))?;
        let call = Call { redop: op, ..of::<A>(Op::ReduceScatter, block) };
        self.collective(from_to(x, y)?, scale, call)
    }

    pub(super) fn gather_all<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
    ) -> Result<(), Error> {
        let (rank, n) = self.who();
        fits(Op::AllGather, rank, ("output", y.elements()), ("input", all(Op::AllGather, x.elements(), n)?))?;
        self.collective(from_to(x, y)?, None, of::<A>(Op::AllGather, x.elements()))
    }

    #[inline]
    pub(super) fn rooted<B: BufferMut + ?Sized>(
        &mut self,
        x: &mut B,
        op: Op,
        root: usize,
        (redop, scale): (ReduceOp, Option<f32>),
    ) -> Result<(), Error> {
        let call = Call { root, redop, ..of::<B>(op, x.elements()) };
        self.collective(in_place(x), scale, call)
    }

    pub(super) fn gather_at<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: Option<&mut B>,
        root: usize,
    ) -> Result<(), Error> {
        let (rank, n) = self.who();
        let call = Call { root, ..of::<A>(Op::Gather, x.elements()) };
        match y {
            Some(y) if rank == root => {
                fits(Op::Gather, rank, ("output", y.elements()), ("input", all(Op::Gather, x.elements(), n)?))?;
                self.collective(from_to(x, y)?, None, call)
            }
            None if rank == root => Err(bad(format!("gather: rank {root} is the root and has no output"))),
            _ => self.collective(from(x.view()), None, call),
        }
    }

    pub(super) fn scatter_from<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: Option<&A>,
        y: &mut B,
        root: usize,
    ) -> Result<(), Error> {
        let (rank, n) = self.who();
        let call = Call { root, ..of::<A>(Op::Scatter, y.elements()) };
        match x {
            Some(x) if rank == root => {
                fits(Op::Scatter, rank, ("input", x.elements()), ("output", all(Op::Scatter, y.elements(), n)?))?;
                self.collective(from_to(x, y)?, None, call)
            }
            None if rank == root => Err(bad(format!("scatter: rank {root} is the root and has no input"))),
            _ => self.collective(to(y.view_mut()), None, call),
        }
    }

    pub(super) fn all_to_all_typed<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
    ) -> Result<(), Error> {
        let (rank, n) = self.who();
        let block = blocks(Op::AllToAll, "input", x.elements(), n)?;
        fits(Op::AllToAll, rank, ("output", y.elements()), ("input", x.elements()))?;
        self.collective(from_to(x, y)?, None, of::<A>(Op::AllToAll, block))
    }

    pub(super) fn send_recv_typed<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        peers: Peers,
    ) -> Result<(), Error> {
        fits(Op::SendRecv, self.who().0, ("output", y.elements()), ("input", x.elements()))?;
        let call = Call { dst: peers.dst, src: peers.src, ..of::<A>(Op::SendRecv, x.elements()) };
        self.collective(from_to(x, y)?, None, call)
    }

    pub(super) fn permute_typed<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        pairs: &[(usize, usize)],
    ) -> Result<(), Error> {
        fits(Op::Permute, self.who().0, ("output", y.elements()), ("input", x.elements()))?;
        self.permute(from_to(x, y)?, of::<A>(Op::Permute, x.elements()), pairs)
    }

    pub(super) fn all_gather_counted<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        counts: &[u64],
    ) -> Result<(), Error> {
        let rank = self.who().0;
        let mine = counts.get(rank).map_or(x.elements(), |c| *c as usize);
        fits(Op::AllGatherV, rank, ("input", x.elements()), ("list of counts", mine))?;
        fits(Op::AllGatherV, rank, ("output", y.elements()), ("list of counts", sum(Op::AllGatherV, counts)?))?;
        self.counted(from_to(x, y)?, of::<A>(Op::AllGatherV, 0), counts)
    }

    pub(super) fn reduce_scatter_counted<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        counts: &[u64],
        op: ReduceOp,
    ) -> Result<(), Error> {
        let rank = self.who().0;
        let mine = counts.get(rank).map_or(y.elements(), |c| *c as usize);
        fits(Op::ReduceScatterV, rank, ("output", y.elements()), ("list of counts", mine))?;
        fits(Op::ReduceScatterV, rank, ("input", x.elements()), ("list of counts", sum(Op::ReduceScatterV, counts)?))?;
        self.counted(from_to(x, y)?, Call { redop: op, ..of::<A>(Op::ReduceScatterV, 0) }, counts)
    }

    pub(super) fn all_to_all_counted<A: Buffer + ?Sized, B: Like<A> + ?Sized>(
        &mut self,
        x: &A,
        y: &mut B,
        (send, recv): (&[u64], &[u64]),
    ) -> Result<(), Error> {
        let rank = self.who().0;
        fits(Op::AllToAllV, rank, ("input", x.elements()), ("list of sends", sum(Op::AllToAllV, send)?))?;
        fits(Op::AllToAllV, rank, ("output", y.elements()), ("list of receives", sum(Op::AllToAllV, recv)?))?;
        self.all_to_all_v(from_to(x, y)?, send, recv, <A::Element as Element>::TYPE)
    }

    /// Several buffers of one kind; see [`Communicator::all_reduce_many`].
    pub(super) fn reduce_many<B: BufferMut>(&mut self, items: &mut [B], op: ReduceOp) -> Result<(), Error> {
        let mut all: Vec<ReductionOf<&DeviceMemory, &mut [u8]>> = Vec::with_capacity(items.len());
        for item in items {
            let count = item.elements() as u64;
            all.push(match item.view_mut() {
                ViewMut::Device(tensor) => ReductionOf::Device { tensor, offset: 0, count },
                ViewMut::Private(bytes) => ReductionOf::Host(bytes),
            });
        }
        self.all_reduce_many(&mut all, <B::Element as Element>::TYPE, op)
    }
}

impl Communicator {
    /// A tensor of `elements`, zeroed, in this core's device memory.
    ///
    /// # Errors
    /// [`Error::Memory`]; [`Error::Limit`] for more than the tenant's policy grants.
    pub fn tensor<T: Element>(&self, elements: usize) -> Result<Tensor<T>, Error> {
        let bytes = (elements as u64).checked_mul(size_of::<T>() as u64);
        let bytes =
            bytes.ok_or_else(|| bad(format!("a tensor of {elements} elements is larger than memory can be")))?;
        self.allocate(bytes).map(|memory| Tensor::new(memory, elements))
    }

    /// A tensor with these elements.
    ///
    /// # Errors
    /// As [`Communicator::tensor`].
    pub fn tensor_from<T: Element>(&self, elements: &[T]) -> Result<Tensor<T>, Error> {
        let made = self.tensor(elements.len())?;
        made.write(0, elements)?;
        Ok(made)
    }

    /// The same collectives in the dynamic form: a data type, a count, bytes.
    pub fn raw(&mut self) -> Raw<'_> {
        Raw(&mut self.engine)
    }

    /// Every rank gets the reduction of all ranks' `x`, in `x`.
    ///
    /// # Errors
    /// [`Error::Usage`] for buffers that do not fit, [`Error::Op`] if the operation fails (the communicator is then
    /// broken); if connections must be made, [`Error::Connecting`] when not all ranks come to that and [`Error::Plugin`]
    /// when the control plane is gone. All collectives alike.
    #[inline]
    pub fn all_reduce<B: BufferMut + ?Sized>(&mut self, x: &mut B, op: ReduceOp) -> Result<(), Error> {
        self.engine.reduce_all(x, op, None)
    }

    /// The same in another buffer of that length.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_into<A, B>(&mut self, x: &A, y: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.reduce_all_into(x, y, op)
    }

    /// [`Communicator::all_reduce`] of each rank's elements times its own `scale`, by [`ReduceOp::PreMulSum`]; float types only.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], and [`Error::Usage`] for an integer type.
    pub fn all_reduce_scaled<B: BufferMut + ?Sized>(&mut self, x: &mut B, scale: f32) -> Result<(), Error> {
        self.engine.reduce_all(x, ReduceOp::PreMulSum, Some(scale))
    }

    /// Reduces many small buffers in place as if one after the other, packed into few operations. The same lengths in the same order
    /// on all ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]. After an error some of the buffers hold their results and some do not.
    pub fn all_reduce_many<B: BufferMut>(&mut self, items: &mut [B], op: ReduceOp) -> Result<(), Error> {
        self.engine.reduce_many(items, op)
    }

    /// Rank r gets block r of the reduction of all ranks' `x`, which has a block for each.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter<A: Buffer + ?Sized>(&mut self, x: &A, op: ReduceOp) -> Result<A::Owned, Error> {
        let mut y = A::owned(self, blocks(Op::ReduceScatter, "input", x.elements(), self.nranks())?)?;
        self.engine.scatter_reduced(x, &mut y, op, None)?;
        Ok(y)
    }

    /// The same in a buffer of one block.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter_into<A, B>(&mut self, x: &A, y: &mut B, op: ReduceOp) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.scatter_reduced(x, y, op, None)
    }

    /// [`Communicator::reduce_scatter_into`] of each rank's elements times its own `scale`; float types only.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_scaled`].
    pub fn reduce_scatter_scaled<A, B>(&mut self, x: &A, y: &mut B, scale: f32) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.scatter_reduced(x, y, ReduceOp::PreMulSum, Some(scale))
    }

    /// [`Communicator::reduce_scatter`] with parts of different lengths: `counts[r]` elements for rank r (0 is fine), the same
    /// list on all ranks; `x` has all of them in rank order.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_v`].
    pub fn reduce_scatter_v<A>(&mut self, x: &A, counts: &[u64], op: ReduceOp) -> Result<A::Owned, Error>
    where
        A: Buffer + ?Sized,
    {
        let mine = counts.get(self.rank()).copied().unwrap_or(0);
        let mut y = A::owned(self, sum(Op::ReduceScatterV, &[mine])?)?;
        self.engine.reduce_scatter_counted(x, &mut y, counts, op)?;
        Ok(y)
    }

    /// The same in a buffer of this rank's part.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_v`].
    pub fn reduce_scatter_v_into<A, B>(&mut self, x: &A, y: &mut B, counts: &[u64], op: ReduceOp) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.reduce_scatter_counted(x, y, counts, op)
    }

    /// Every rank gets all ranks' `x`, in rank order.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather<A: Buffer + ?Sized>(&mut self, x: &A) -> Result<A::Owned, Error> {
        let mut y = A::owned(self, all(Op::AllGather, x.elements(), self.nranks())?)?;
        self.engine.gather_all(x, &mut y)?;
        Ok(y)
    }

    /// The same in a buffer with room for all.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather_into<A, B>(&mut self, x: &A, y: &mut B) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.gather_all(x, y)
    }

    /// [`Communicator::all_gather`] of different lengths: `counts[r]` elements of rank r (0 is fine); the same list on all ranks.
    ///
    /// The first call with a list compiles its schedule; some dozens are kept, found by the list, whose comparison is what a
    /// repeated call pays. The same for the other forms with lists.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; another list on another rank is a mismatch.
    pub fn all_gather_v<A: Buffer + ?Sized>(&mut self, x: &A, counts: &[u64]) -> Result<A::Owned, Error> {
        let mut y = A::owned(self, sum(Op::AllGatherV, counts)?)?;
        self.engine.all_gather_counted(x, &mut y, counts)?;
        Ok(y)
    }

    /// The same in a buffer with room for all.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_v`].
    pub fn all_gather_v_into<A, B>(&mut self, x: &A, y: &mut B, counts: &[u64]) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.all_gather_counted(x, y, counts)
    }

    /// Every rank gets the root's `x`, in its own.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    #[inline]
    pub fn broadcast<B: BufferMut + ?Sized>(&mut self, x: &mut B, root: usize) -> Result<(), Error> {
        self.engine.rooted(x, Op::Broadcast, root, (ReduceOp::Sum, None))
    }

    /// The root gets the reduction of all ranks' `x`, in its own; the others' stays as it is.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    #[inline]
    pub fn reduce<B: BufferMut + ?Sized>(&mut self, x: &mut B, op: ReduceOp, root: usize) -> Result<(), Error> {
        self.engine.rooted(x, Op::Reduce, root, (op, None))
    }

    /// [`Communicator::reduce`] of each rank's elements times its own `scale`; float types only.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_scaled`].
    pub fn reduce_scaled<B: BufferMut + ?Sized>(&mut self, x: &mut B, root: usize, scale: f32) -> Result<(), Error> {
        self.engine.rooted(x, Op::Reduce, root, (ReduceOp::PreMulSum, Some(scale)))
    }

    /// The root gets all ranks' `x`, in rank order; the others get nothing.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn gather<A: Buffer + ?Sized>(&mut self, x: &A, root: usize) -> Result<Option<A::Owned>, Error> {
        if self.rank() != root {
            return self.engine.gather_at::<A, A::Owned>(x, None, root).map(|()| None);
        }
        let mut y = A::owned(self, all(Op::Gather, x.elements(), self.nranks())?)?;
        self.engine.gather_at(x, Some(&mut y), root)?;
        Ok(Some(y))
    }

    /// The same in a buffer with room for all, which only the root needs.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn gather_into<A, B>(&mut self, x: &A, y: Option<&mut B>, root: usize) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.gather_at(x, y, root)
    }

    /// Rank r gets block r of the root's `x`, which only the root needs, in `y`, whose length is a block's.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn scatter<A, B>(&mut self, x: Option<&A>, y: &mut B, root: usize) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.scatter_from(x, y, root)
    }

    /// Rank r gets block r of every rank's `x`, in rank order.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all<A: Buffer + ?Sized>(&mut self, x: &A) -> Result<A::Owned, Error> {
        let mut y = A::owned(self, x.elements())?;
        self.engine.all_to_all_typed(x, &mut y)?;
        Ok(y)
    }

    /// The same in another buffer of that length.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all_into<A, B>(&mut self, x: &A, y: &mut B) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.all_to_all_typed(x, y)
    }

    /// Sends `send[r]` elements to rank r and receives `recv[r]` elements from it; blocks lie in rank order without gaps, and
    /// may be empty.
    ///
    /// Ranks know only their own counts, so the call begins with a small exchange of all counts, after which a schedule is looked up
    /// by them.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]. Counts that do not fit are an [`Error::Usage`] on all ranks that names both sides;
    /// nothing has moved, and the communicator goes on.
    pub fn all_to_all_v<A: Buffer + ?Sized>(&mut self, x: &A, send: &[u64], recv: &[u64]) -> Result<A::Owned, Error> {
        let mut y = A::owned(self, sum(Op::AllToAllV, recv)?)?;
        self.engine.all_to_all_counted(x, &mut y, (send, recv))?;
        Ok(y)
    }

    /// The same in a buffer with room for all that is received.
    ///
    /// # Errors
    /// As [`Communicator::all_to_all_v`].
    pub fn all_to_all_v_into<A, B>(&mut self, x: &A, y: &mut B, send: &[u64], recv: &[u64]) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.all_to_all_counted(x, y, (send, recv))
    }

    /// Sends `x` to one rank and receives `y` from one. All ranks call it, whether or not they send or receive.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_recv<A, B>(&mut self, x: &A, y: &mut B, peers: Peers) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.send_recv_typed(x, y, peers)
    }

    /// Sends `x` from rank a to rank b's `y` for every pair (a, b), the same pairs on all ranks; a rank sends once at most and receives
    /// once at most. Ranks in no pair pass without waiting.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_v`].
    pub fn permute<A, B>(&mut self, x: &A, y: &mut B, pairs: &[(usize, usize)]) -> Result<(), Error>
    where
        A: Buffer + ?Sized,
        B: BufferMut<Element = A::Element, Side = A::Side> + ?Sized,
    {
        self.engine.permute_typed(x, y, pairs)
    }

    /// Nobody leaves before all have come.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.raw().barrier()
    }
}
