//! Operations in the background: several in flight, each stream in order.
//!
//! A [`Stream`] has a lane of the communicator and a thread, which sleeps while there is nothing to do. A call hands its
//! buffers over and answers a [`Pending`] at once, whatever is wrong with it; the buffers come back with the result. Nothing calls
//! back.
//!
//! Every call goes through [`Stream::issue`], which takes whatever the blocking form does with its [`Engine`].
//!
//! A [`Pending`] that is dropped lets its operation run on; the buffers are freed when it has ended. A stream that is dropped
//! ends what was issued first; to end it sooner, abort the communicator.

use std::fmt::{Debug, Display, Formatter};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hw_bridge::call::{Op, ReduceOp};
use hw_bridge::limits::WAIT_STEP;
use hw_bridge::os::lock::lock;

use crate::api::buffer::{Buffer, BufferMut};
use crate::api::collectives::{Engine, Peers};
use crate::api::communicator::Within;
use crate::api::memory::{DeviceMemory, Io};
use crate::api::raw::RawStream;
use crate::error::Error;
use crate::plane::host::bad;
use sandbox::objects::CommCore;

/// Buffers of an operation in the background, which it owns meanwhile.
#[derive(Debug)]
pub enum Buffers {
    /// Two places in device memory; they may be the same, as the in-place rules say.
    Device {
        /// Input and its first byte.
        src: (Arc<DeviceMemory>, u64),
        /// Output and its first byte.
        dst: (Arc<DeviceMemory>, u64),
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
    /// Two places.
    pub fn device(src: &Arc<DeviceMemory>, dst: &Arc<DeviceMemory>) -> Buffers {
        Buffers::Device { src: (src.clone(), 0), dst: (dst.clone(), 0) }
    }

    /// One place that is both.
    pub fn in_place(t: &Arc<DeviceMemory>) -> Buffers {
        Buffers::device(t, t)
    }

    pub(super) fn none() -> Buffers {
        Buffers::HostInPlace(Vec::new())
    }

    pub(super) fn io(&mut self) -> Io<'_> {
        match self {
            Buffers::Device { src, dst } => Io::Device { src: (&src.0, src.1), dst: (&dst.0, dst.1) },
            Buffers::Host { src, dst } => Io::Host { src, dst },
            Buffers::HostInPlace(both) => Io::HostInPlace(both),
        }
    }
}

/// An operation that failed, and its buffers.
pub struct Failed<B = Buffers> {
    /// The buffers that were handed over, as the operation left them.
    pub buffers: B,
    /// Why it failed.
    pub error: Error,
}

/// Without the buffers, which may be large.
impl<B> Debug for Failed<B> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Failed").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> Display for Failed<B> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        Display::fmt(&self.error, f)
    }
}

impl<B> std::error::Error for Failed<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<Failed<B>> for Error {
    fn from(failed: Failed<B>) -> Error {
        failed.error
    }
}

/// How an operation in the background stands.
#[derive(Debug)]
pub enum Progress<B = Buffers> {
    /// It is done; its buffers.
    Done(B),
    /// It has failed.
    Failed(Failed<B>),
    /// It runs, or has not begun.
    Running(Pending<B>),
}

/// An operation in the background, which has the buffers `B` meanwhile.
#[derive(Debug)]
#[must_use = "its buffers come back with it"]
pub struct Pending<B = Buffers>(Arc<Slot<B>>);

/// Where an operation leaves what it was given.
struct Slot<B> {
    state: Mutex<State<B>>,
    ended: Condvar,
}

enum State<B> {
    /// The operation has the buffers.
    Out,
    Ended(Result<B, Failed<B>>),
}

impl<B> Debug for Slot<B> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("out", &matches!(*lock(&self.state), State::Out)).finish()
    }
}

impl<B> Pending<B> {
    /// Takes what came back, waiting until `until` for it; `None` waits until it has ended.
    fn take(&self, until: Option<Instant>) -> Option<Result<B, Failed<B>>> {
        let Slot { state, ended } = &*self.0;
        let mut state = lock(state);
        loop {
            if let State::Ended(result) = std::mem::replace(&mut *state, State::Out) {
                return Some(result);
            }
            let left = until.map_or(WAIT_STEP, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            state = ended.wait_timeout(state, left).unwrap_or_else(|p| p.into_inner()).0;
        }
    }

    fn progress(self, until: Instant) -> Progress<B> {
        match self.take(Some(until)) {
            Some(Ok(buffers)) => Progress::Done(buffers),
            Some(Err(failed)) => Progress::Failed(failed),
            None => Progress::Running(self),
        }
    }

    /// Looks whether it has ended.
    pub fn test(self) -> Progress<B> {
        self.progress(Instant::now())
    }

    /// Waits at most `patience`.
    pub fn wait_for(self, patience: Duration) -> Progress<B> {
        match Instant::now().checked_add(patience) {
            Some(until) => self.progress(until),
            // Beyond what the clock can say.
            None => match self.wait() {
                Ok(buffers) => Progress::Done(buffers),
                Err(failed) => Progress::Failed(failed),
            },
        }
    }

    /// Waits until it has ended. It ends by itself: it and those issued on the stream before it have deadlines. The buffers
    /// come back in any case.
    ///
    /// # Errors
    /// The operation's, as the blocking call's; with the buffers.
    pub fn wait(self) -> Result<B, Failed<B>> {
        loop {
            if let Some(result) = self.take(None) {
                return result;
            }
        }
    }
}

/// The buffers on their way: wherever an operation ends, a panic or a stream that is gone among them, they go back.
struct Handed<B> {
    slot: Arc<Slot<B>>,
    buffers: Option<B>,
    what: &'static str,
    stream: usize,
    rank: usize,
}

impl<B> Handed<B> {
    fn back(&mut self, result: Result<(), Error>) {
        let Some(buffers) = self.buffers.take() else { return };
        let result = match result {
            Ok(()) => Ok(buffers),
            Err(error) => Err(Failed { buffers, error }),
        };
        *lock(&self.slot.state) = State::Ended(result);
        self.slot.ended.notify_all();
    }
}

impl<B> Drop for Handed<B> {
    fn drop(&mut self) {
        let Handed { stream, rank, what, .. } = *self;
        let lost = || Error::Bug(format!("stream {stream} of rank {rank} ended without an answer to {what}"));
        if self.buffers.is_some() {
            self.back(Err(lost()));
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

    /// As [`crate::Communicator::all_reduce`], in the background. Issuing never fails: what is wrong comes with the result.
    /// All others alike.
    pub fn all_reduce<B: BufferMut + Send + 'static>(&mut self, x: B, op: ReduceOp) -> Pending<B> {
        self.issue(Op::AllReduce, x, move |engine, x| engine.reduce_all(x, op, None))
    }

    /// As [`crate::Communicator::all_reduce_scaled`], in the background.
    pub fn all_reduce_scaled<B: BufferMut + Send + 'static>(&mut self, x: B, scale: f32) -> Pending<B> {
        self.issue(Op::AllReduce, x, move |engine, x| engine.reduce_all(x, ReduceOp::PreMulSum, Some(scale)))
    }

    /// As [`crate::Communicator::all_reduce_into`], in the background.
    pub fn all_reduce_into<A, B>(&mut self, x: A, y: B, op: ReduceOp) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::AllReduce, (x, y), move |engine, (x, y)| engine.reduce_all_into(x, y, op))
    }

    /// As [`crate::Communicator::all_reduce_many`], in the background.
    pub fn all_reduce_many<B: BufferMut + Send + 'static>(&mut self, items: Vec<B>, op: ReduceOp) -> Pending<Vec<B>> {
        self.issue(Op::AllReduce, items, move |engine, items| engine.reduce_many(items, op))
    }

    /// As [`crate::Communicator::reduce_scatter_into`], in the background.
    pub fn reduce_scatter<A, B>(&mut self, x: A, y: B, op: ReduceOp) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::ReduceScatter, (x, y), move |engine, (x, y)| engine.scatter_reduced(x, y, op, None))
    }

    /// As [`crate::Communicator::reduce_scatter_scaled`], in the background.
    pub fn reduce_scatter_scaled<A, B>(&mut self, x: A, y: B, scale: f32) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::ReduceScatter, (x, y), move |engine, (x, y)| {
            engine.scatter_reduced(x, y, ReduceOp::PreMulSum, Some(scale))
        })
    }

    /// As [`crate::Communicator::all_gather_into`], in the background.
    pub fn all_gather<A, B>(&mut self, x: A, y: B) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::AllGather, (x, y), move |engine, (x, y)| engine.gather_all(x, y))
    }

    /// As [`crate::Communicator::broadcast`], in the background.
    pub fn broadcast<B: BufferMut + Send + 'static>(&mut self, x: B, root: usize) -> Pending<B> {
        self.issue(Op::Broadcast, x, move |engine, x| engine.rooted(x, Op::Broadcast, root, (ReduceOp::Sum, None)))
    }

    /// As [`crate::Communicator::reduce`], in the background.
    pub fn reduce<B: BufferMut + Send + 'static>(&mut self, x: B, op: ReduceOp, root: usize) -> Pending<B> {
        self.issue(Op::Reduce, x, move |engine, x| engine.rooted(x, Op::Reduce, root, (op, None)))
    }

    /// As [`crate::Communicator::reduce_scaled`], in the background.
    pub fn reduce_scaled<B: BufferMut + Send + 'static>(&mut self, x: B, root: usize, scale: f32) -> Pending<B> {
        self.issue(Op::Reduce, x, move |engine, x| {
            engine.rooted(x, Op::Reduce, root, (ReduceOp::PreMulSum, Some(scale)))
        })
    }

    /// As [`crate::Communicator::all_to_all_into`], in the background.
    pub fn all_to_all<A, B>(&mut self, x: A, y: B) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::AllToAll, (x, y), move |engine, (x, y)| engine.all_to_all_typed(x, y))
    }

    /// As [`crate::Communicator::send_recv`], in the background.
    pub fn send_recv<A, B>(&mut self, x: A, y: B, peers: Peers) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::SendRecv, (x, y), move |engine, (x, y)| engine.send_recv_typed(x, y, peers))
    }

    /// As [`crate::Communicator::all_gather_v_into`], in the background; lists are copied.
    pub fn all_gather_v<A, B>(&mut self, x: A, y: B, counts: &[u64]) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        let counts = counts.to_vec();
        self.issue(Op::AllGatherV, (x, y), move |engine, (x, y)| engine.all_gather_counted(x, y, &counts))
    }

    /// As [`crate::Communicator::reduce_scatter_v_into`], in the background; lists are copied.
    pub fn reduce_scatter_v<A, B>(&mut self, x: A, y: B, counts: &[u64], op: ReduceOp) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        let counts = counts.to_vec();
        self.issue(Op::ReduceScatterV, (x, y), move |engine, (x, y)| engine.reduce_scatter_counted(x, y, &counts, op))
    }

    /// As [`crate::Communicator::all_to_all_v_into`], in the background; lists are copied.
    pub fn all_to_all_v<A, B>(&mut self, x: A, y: B, send: &[u64], recv: &[u64]) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        let (send, recv) = (send.to_vec(), recv.to_vec());
        self.issue(Op::AllToAllV, (x, y), move |engine, (x, y)| engine.all_to_all_counted(x, y, (&send, &recv)))
    }

    /// As [`crate::Communicator::permute`], in the background; lists are copied.
    pub fn permute<A, B>(&mut self, x: A, y: B, pairs: &[(usize, usize)]) -> Pending<(A, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        let pairs = pairs.to_vec();
        self.issue(Op::Permute, (x, y), move |engine, (x, y)| engine.permute_typed(x, y, &pairs))
    }

    /// As [`crate::Communicator::gather_into`], in the background: `y` is the root's alone.
    pub fn gather<A, B>(&mut self, x: A, y: Option<B>, root: usize) -> Pending<(A, Option<B>)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::Gather, (x, y), move |engine, (x, y)| engine.gather_at(x, y.as_mut(), root))
    }

    /// As [`crate::Communicator::scatter`], in the background: `x` is the root's alone.
    pub fn scatter<A, B>(&mut self, x: Option<A>, y: B, root: usize) -> Pending<(Option<A>, B)>
    where
        A: Buffer + Send + 'static,
        B: BufferMut<Element = A::Element, Side = A::Side> + Send + 'static,
    {
        self.issue(Op::Scatter, (x, y), move |engine, (x, y)| engine.scatter_from(x.as_ref(), y, root))
    }

    /// As [`crate::Communicator::barrier`], in the background: done when all ranks' streams have come to it.
    pub fn barrier(&mut self) -> Pending<()> {
        self.issue(Op::Barrier, (), |engine, ()| engine.barrier())
    }

    /// The same operations in the dynamic form: a data type, a count, bytes.
    pub fn raw(&mut self) -> RawStream<'_> {
        RawStream(self)
    }

    /// Has the stream's thread do `work`, with the deadline of now, when what was issued before it has ended.
    pub(super) fn issue<B: Send + 'static>(
        &mut self,
        op: Op,
        buffers: B,
        work: impl FnOnce(&mut Engine, &mut B) -> Result<(), Error> + Send + 'static,
    ) -> Pending<B> {
        let (stream, rank, timeout) = (self.index, self.core.rank, self.timeout);
        let slot = Arc::new(Slot { state: Mutex::new(State::Out), ended: Condvar::new() });
        let pending = Pending(slot.clone());
        let mut handed = Handed { slot, buffers: Some(buffers), what: op.name(), stream, rank };
        if hw_bridge::os::fork::in_child() {
            handed.back(Err(Error::Forked { what: format!("stream {stream} of rank {rank}") }));
            return pending;
        }
        let Some(orders) = &self.orders else {
            handed.back(Err(bad(format!("stream {stream} of rank {rank} has ended"))));
            return pending;
        };
        // One that cannot be sent gives the buffers back as it is dropped.
        let _ = orders.send(Box::new(move |engine| {
            engine.timeout = timeout;
            if let Some(buffers) = &mut handed.buffers {
                let result = work(engine, buffers);
                handed.back(result);
            }
        }));
        pending
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
