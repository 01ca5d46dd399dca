//! Operations in the background: several in flight, each stream in order.
//!
//! A [`Stream`] has a lane of the communicator and a thread, which sleeps while there is nothing to do. A call hands its
//! buffers over and answers a [`Request`] at once; the buffers come back with the result. Nothing calls back.
//!
//! A request that is dropped lets its operation run on; the buffers are freed when it has ended. A stream that is dropped
//! ends what was issued first; to end it sooner, abort the communicator.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use hw_bridge::dtype::{DataType, ReduceOp};
use hw_bridge::peers::Op;

use super::collectives::{Engine, Peers, call};
use super::communicator::bad;
use super::tensor::{Io, Tensor};
use crate::enc::Call;
use crate::error::Error;

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
pub struct Finished {
    /// The buffers that were handed over.
    pub buffers: Buffers,
    /// The result.
    pub result: Result<(), Error>,
}

/// An operation in the background.
#[derive(Debug)]
pub struct Request {
    what: &'static str,
    stream: usize,
    rank: usize,
    answer: Receiver<Finished>,
}

impl Request {
    fn lost(&self) -> Error {
        Error::Bug(format!("stream {} of rank {} ended without an answer to {}", self.stream, self.rank, self.what))
    }

    /// Whether it has ended: the buffers and the result then, the request itself while it runs.
    ///
    /// # Errors
    /// [`Error::Bug`] only; how the operation ended is in [`Finished`].
    pub fn test(self) -> Result<Result<Finished, Request>, Error> {
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
    pub fn wait(self) -> Result<Buffers, Error> {
        let finished = self.answer.recv().map_err(|_| self.lost())?;
        finished.result.map(|()| finished.buffers)
    }

    /// Waits at most `patience`; the request comes back if it still runs.
    ///
    /// # Errors
    /// [`Error::Bug`] only; how the operation ended is in [`Finished`].
    pub fn wait_for(self, patience: Duration) -> Result<Result<Finished, Request>, Error> {
        match self.answer.recv_timeout(patience) {
            Ok(finished) => Ok(Ok(finished)),
            Err(RecvTimeoutError::Timeout) => Ok(Err(self)),
            Err(RecvTimeoutError::Disconnected) => Err(self.lost()),
        }
    }
}

struct Order {
    call: Call,
    buffers: Buffers,
    timeout: Duration,
    answer: Sender<Finished>,
}

/// A sequence of operations in the background.
#[derive(Debug)]
pub struct Stream {
    index: usize,
    rank: usize,
    timeout: Duration,
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

fn work(mut engine: Engine, orders: &Receiver<Order>) {
    while let Ok(mut order) = orders.recv() {
        engine.timeout = order.timeout;
        let result = engine.collective(order.buffers.io(), None, order.call);
        // Nobody may be interested.
        let _ = order.answer.send(Finished { buffers: order.buffers, result });
    }
}

impl Stream {
    pub(super) fn start(index: usize, engine: Engine, rank: usize) -> Result<Stream, Error> {
        let timeout = engine.timeout;
        let (orders, queue) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("wccl-stream-{index}"))
            .spawn(move || work(engine, &queue))
            .map_err(|source| Error::System {
                what: format!("starting the thread of stream {index} of rank {rank} "),
                source,
            })?;
        Ok(Stream { index, rank, timeout, orders: Some(orders), thread: Some(thread) })
    }

    /// Deadline of the operations issued from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    fn issue(&mut self, buffers: Buffers, call: Call) -> Result<Request, Error> {
        if hw_bridge::fork::in_child() {
            return Err(Error::Forked { what: format!("stream {} of rank {}", self.index, self.rank) });
        }
        let (answer, receiver) = channel();
        let what = call.op.name();
        let gone = || bad(format!("stream {} of rank {} has ended", self.index, self.rank));
        let orders = self.orders.as_ref().ok_or_else(gone)?;
        orders.send(Order { call, buffers, timeout: self.timeout, answer }).map_err(|_| gone())?;
        Ok(Request { what, stream: self.index, rank: self.rank, answer: receiver })
    }

    /// As [`super::Communicator::all_reduce`], in the background.
    ///
    /// # Errors
    /// [`Error::Usage`] if the stream has ended, [`Error::Forked`]; whatever else is wrong comes with the request.
    pub fn all_reduce(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Result<Request, Error> {
        self.issue(b, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// As [`super::Communicator::all_gather`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_gather(&mut self, b: Buffers, count: u64, dtype: DataType) -> Result<Request, Error> {
        self.issue(b, call(Op::AllGather, dtype, count))
    }

    /// As [`super::Communicator::reduce_scatter`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn reduce_scatter(&mut self, b: Buffers, count: u64, dtype: DataType, op: ReduceOp) -> Result<Request, Error> {
        self.issue(b, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// As [`super::Communicator::broadcast`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn broadcast(&mut self, b: Buffers, count: u64, dtype: DataType, root: usize) -> Result<Request, Error> {
        self.issue(b, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// As [`super::Communicator::reduce`], in the background.
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
        self.issue(b, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// As [`super::Communicator::all_to_all`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn all_to_all(&mut self, b: Buffers, count: u64, dtype: DataType) -> Result<Request, Error> {
        self.issue(b, call(Op::AllToAll, dtype, count))
    }

    /// As [`super::Communicator::send_recv`], in the background.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn send_recv(&mut self, b: Buffers, count: u64, dtype: DataType, peers: Peers) -> Result<Request, Error> {
        self.issue(b, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// As [`super::Communicator::barrier`], in the background: done when all ranks' streams have come to it.
    ///
    /// # Errors
    /// As [`Stream::all_reduce`].
    pub fn barrier(&mut self) -> Result<Request, Error> {
        self.issue(Buffers::none(), call(Op::Barrier, DataType::Uint8, 0))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let (orders, thread) = (self.orders.take(), self.thread.take());
        if hw_bridge::fork::in_child() {
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
