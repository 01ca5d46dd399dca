//! Operations in the background: several in flight, each stream in order.
//!
//! A [`Stream`] has a lane of the communicator and a thread, which sleeps while there is nothing to do. A call hands its
//! buffers over and answers a [`Request`] at once; the buffers come back with the result. Nothing calls back.
//!
//! Every call goes through [`Stream::issue`], which takes whatever the blocking form does with its [`Engine`].
//!
//! A request that is dropped lets its operation run on; the buffers are freed when it has ended. A stream that is dropped
//! ends what was issued first; to end it sooner, abort the communicator.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use hw_bridge::call::{DataType, Op, ReduceOp};

use crate::api::collectives::{Engine, OwnedReduction, Peers, call};
use crate::api::communicator::Within;
use crate::api::tensor::{Io, Tensor};
use crate::plane::host::bad;
use enc::Call;
use sandbox::error::Error;
use sandbox::objects::CommCore;

/// Buffers of an operation in the background, which it owns meanwhile.
#[derive(Debug)]
pub enum Buffers {
    /// Two places in device memory; they may be the same, as the in-place rules say.
    Device {
        /// Input and its first byte.
        src: (Arc<Tensor>, u64),
        /// Output and its first byte.
        dst: (Arc<Tensor>, u64),
    },
    /// Private memory of the process.
    Host {
        /// Input.
        src: Vec<u8>,
        /// Output.
        dst: Vec<u8>,
    },
    /// Private memory that is both.
    HostInPlace(Vec<u8>),
}

impl Buffers {
    /// Two tensors.
    pub fn device(src: &Arc<Tensor>, dst: &Arc<Tensor>) -> Buffers {
        Buffers::Device { src: (src.clone(), 0), dst: (dst.clone(), 0) }
    }

    /// One tensor that is both.
    pub fn in_place(t: &Arc<Tensor>) -> Buffers {
        Buffers::device(t, t)
    }

    fn none() -> Buffers {
        Buffers::HostInPlace(Vec::new())
    }

    fn io(&mut self) -> Io<'_> {
        match self {
            Buffers::Device { src, dst } => Io::Device { src: (&src.0, src.1), dst: (&dst.0, dst.1) },
            Buffers::Host { src, dst } => Io::Host { src, dst },
            Buffers::HostInPlace(both) => Io::HostInPlace(both),
        }
    }
}

/// How an operation ended: its buffers, and the error if it failed.
#[derive(Debug)]
pub struct Finished<B = Buffers> {
    /// The buffers that were handed over.
    pub buffers: B,
    /// The result.
    pub result: Result<(), Error>,
}

/// An operation in the background, which has the buffers `B` meanwhile.
#[derive(Debug)]
pub struct Request<B = Buffers> {
    what: &'static str,
    stream: usize,
    rank: usize,
    answer: Receiver<Finished<B>>,
}

impl<B> Request<B> {
    fn lost(&self) -> Error {
        Error::Bug(format!("stream {} of rank {} ended without an answer to {}", self.stream, self.rank, self.what))
    }

    /// Whether it has ended: the buffers and the result then, the request itself while it runs.
    ///
    /// # Errors
    /// [`Error::Bug`] only; how the operation ended is in [`Finished`].
    pub fn test(self) -> Result<Result<Finished<B>, Request<B>>, Error> {
        match self.answer.try_recv() {
            Ok(finished) => Ok(Ok(finished)),
            Err(TryRecvError::Empty) => Ok(Err(self)),
            Err(TryRecvError::Disconnected) => Err(self.lost()),
        }
    }

    /// Waits until it has ended. It ends by itself: it and those issued on the stream before it have deadlines. The buffers
    /// come back if it succeeded.
    ///
    /// # Errors
    /// The operation's, as the blocking call's.
    pub fn wait(self) -> Result<B, Error> {
        let finished = self.answer.recv().map_err(|_| self.lost())?;
        finished.result.map(|()| finished.buffers)
    }

    /// Waits at most `patience`; the request comes back if it still runs.
    ///
    /// # Errors
    /// [`Error::Bug`] only; how the operation ended is in [`Finished`].
    pub fn wait_for(self, patience: Duration) -> Result<Result<Finished<B>, Request<B>>, Error> {
        match self.answer.recv_timeout(patience) {
            Ok(finished) => Ok(Ok(finished)),
            Err(RecvTimeoutError::Timeout) => Ok(Err(self)),
            Err(RecvTimeoutError::Disconnected) => Err(self.lost()),
        }
    }
}

/// Does an operation and answers its request.
type Order = Box<dyn FnOnce(&mut Engine) + Send>;

/// A sequence of operations in the background.
#[derive(Debug)]
pub struct Stream {
    index: usize,
    core: Arc<CommCore>,
    timeout: Duration,
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    pub(super) fn start(index: usize, mut engine: Engine) -> Result<Stream, Error> {
        let (core, timeout) = (engine.plane.core.clone(), engine.timeout);
        let (orders, queue) = channel::<Order>();
        let thread = std::thread::Builder::new()
            .name(format!("wccl-stream-{index}"))
            .spawn(move || queue.iter().for_each(|order| order(&mut engine)))
            .map_err(|source| Error::System {
                what: format!("starting the thread of stream {index} of rank {} ", core.rank),
                source,
            })?;
        Ok(Stream { index, core, timeout, orders: Some(orders), thread: Some(thread) })
    }

    pub(super) fn core(&self) -> &Arc<CommCore> {
        &self.core
    }

    /// Deadline of the operations issued from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The stream with another deadline, for one call: `stream.within(deadline).barrier()`. As
    /// [`crate::Communicator::within`].
    pub fn within(&mut self, timeout: Duration) -> Within<'_, Stream> {
        Within::new(self, self.timeout, timeout, Stream::set_timeout)
    }

    /// Has the stream's thread do `work`, with the deadline of now, when what was issued before it has ended.
    pub(super) fn issue<B: Send + 'static>(
        &mut self,
        op: Op,
        mut buffers: B,
        work: impl FnOnce(&mut Engine, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Result<Request<B>, Error> {
        let (stream, rank, timeout) = (self.index, self.core.rank, self.timeout);
        if hw_bridge::os::fork::in_child() {
            return Err(Error::Forked { what: format!("stream {stream} of rank {rank}") });
        }
        let (sender, answer) = channel();
        let order: Order = Box::new(move |engine| {
            engine.timeout = timeout;
            let result = work(engine, &mut buffers);
            // Nobody may be interested.
            let _ = sender.send(Finished { buffers, result });
        });
        let gone = || bad(format!("stream {stream} of rank {rank} has ended"));
        self.orders.as_ref().ok_or_else(gone)?.send(order).map_err(|_| gone())?;
        Ok(Request { what: op.name(), stream, rank, answer })
    }

    /// `scale` is this rank's of a pre-scaled sum, `None` in all other calls.
    fn collective(&mut self, b: Buffers, scale: Option<f32>, call: Call) -> Result<Request, Error> {
        self.issue(call.op, b, move |engine, b| engine.collective(b.io(), scale, call))
    }

    /// As [`crate::Communicator::all_reduce`], in the background.
    ///
    /// # Errors
    /// [`Error::Usage`] if the stream has ended, [`Error::Forked`]; whatever else is wrong comes with the request.
    pub fn all_reduce(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Result<Request, Error> {
        self.collective(b, None, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// As [`crate::Communicator::all_gather`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_gather(&mut self, b: Buffers, count: u64, dtype: DataType) -> Result<Request, Error> {
        self.collective(b, None, call(Op::AllGather, dtype, count))
    }

    /// As [`crate::Communicator::reduce_scatter`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce_scatter(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Result<Request, Error> {
        self.collective(b, None, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// As [`crate::Communicator::broadcast`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn broadcast(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Result<Request, Error> {
        self.collective(b, None, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// As [`crate::Communicator::reduce`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce(
        &mut self,
        b: Buffers,
        count: u64,
        dtype: DataType,
        op: ReduceOp,
        root: usize,
    ) -> Result<Request, Error> {
        self.collective(b, None, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// As [`crate::Communicator::all_to_all`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_to_all(&mut self, b: Buffers, count: u64, dtype: DataType) -> Result<Request, Error> {
        self.collective(b, None, call(Op::AllToAll, dtype, count))
    }

    /// As [`crate::Communicator::send_recv`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn send_recv(&mut self, b: Buffers, count: u64, dtype: DataType, peers: Peers) -> Result<Request, Error> {
        self.collective(b, None, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// As [`crate::Communicator::barrier`], in the background: done when all ranks' streams have come to it.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn barrier(&mut self) -> Result<Request, Error> {
        self.collective(Buffers::none(), None, call(Op::Barrier, DataType::Uint8, 0))
    }

    /// As [`crate::Communicator::gather`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn gather(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Result<Request, Error> {
        self.collective(b, None, Call { root, ..call(Op::Gather, dtype, count) })
    }

    /// As [`crate::Communicator::scatter`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn scatter(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Result<Request, Error> {
        self.collective(b, None, Call { root, ..call(Op::Scatter, dtype, count) })
    }

    /// As [`crate::Communicator::all_gather_v`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_gather_v(&mut self, b: Buffers, counts: &[u64], dtype: DataType) -> Result<Request, Error> {
        self.counted(b, counts, call(Op::AllGatherV, dtype, 0))
    }

    /// As [`crate::Communicator::reduce_scatter_v`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce_scatter_v(
        &mut self,
        b: Buffers,
        counts: &[u64],
        dtype: DataType,
        op: ReduceOp,
    ) -> Result<Request, Error> {
        self.counted(b, counts, Call { redop: op, ..call(Op::ReduceScatterV, dtype, 0) })
    }

    fn counted(&mut self, b: Buffers, counts: &[u64], call: Call) -> Result<Request, Error> {
        let counts = counts.to_vec();
        self.issue(call.op, b, move |engine, b| engine.counted(b.io(), call, &counts))
    }

    /// As [`crate::Communicator::all_to_all_v`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_to_all_v(&mut self, b: Buffers, send: &[u64], recv: &[u64], dtype: DataType) -> Result<Request, Error> {
        let (send, recv) = (send.to_vec(), recv.to_vec());
        self.issue(Op::AllToAllV, b, move |engine, b| engine.all_to_all_v(b.io(), &send, &recv, dtype))
    }

    /// As [`crate::Communicator::permute`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn permute(
        &mut self,
        b: Buffers,
        count: u64,
        dtype: DataType,
        pairs: &[(usize, usize)],
    ) -> Result<Request, Error> {
        let (pairs, call) = (pairs.to_vec(), call(Op::Permute, dtype, count));
        self.issue(call.op, b, move |engine, b| engine.permute(b.io(), call, &pairs))
    }

    /// As [`crate::Communicator::all_reduce_many`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_reduce_many(
        &mut self,
        items: Vec<OwnedReduction>,
        dtype: DataType,
        op: ReduceOp,
    ) -> Result<Request<Vec<OwnedReduction>>, Error> {
        self.issue(Op::AllReduce, items, move |engine, items| engine.all_reduce_many(items, dtype, op))
    }

    /// As [`crate::Communicator::all_reduce_scaled`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_reduce_scaled(&mut self, b: Buffers, count: u64, dtype: DataType, scale: f32) -> Result<Request, Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { redop, ..call(Op::AllReduce, dtype, count) })
    }

    /// As [`crate::Communicator::reduce_scatter_scaled`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce_scatter_scaled(
        &mut self,
        b: Buffers,
        count: u64,
        dtype: DataType,
        scale: f32,
    ) -> Result<Request, Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { redop, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// As [`crate::Communicator::reduce_scaled`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce_scaled(
        &mut self,
        b: Buffers,
        count: u64,
        dtype: DataType,
        root: usize,
        scale: f32,
    ) -> Result<Request, Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(b, Some(scale), Call { root, redop, ..call(Op::Reduce, dtype, count) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (orders, thread) = (self.orders.take(), self.thread.take());
        if hw_bridge::os::fork::in_child() {
            // The thread and what it waits on are the parent's.
            std::mem::forget((orders, thread));
            return;
        }
        drop(orders);
        if let Some(thread) = thread {
            // It ends after what was issued, each of which has a deadline.
            let _ = thread.join();
        }
    }
}
