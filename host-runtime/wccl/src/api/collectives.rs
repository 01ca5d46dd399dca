//! The collectives of a communicator: checks of a call, its schedule (compiled once, then cached), the run.
//!
//! An [`Engine`] does that for one lane, on one thread: the communicator owns the one for blocking calls, each stream its
//! own. In the steady state (the same call as before) it takes no lock and allocates nothing.
//!
//! The straight line of such a call, from the user to the first byte that is written for the peers:
//!
//! ```text
//! all_reduce                      here
//!   Engine::collective            here                  the call before? then its sizes and its schedule
//!     resolve                     tensor                the buffers, and how they overlap
//!     Lane::begin                 sequencer::gate       the gate of swaps
//!     Lane::run                   sequencer::run        aborted, forked, do the buffers fit; the flight record
//!       Running::run              sequencer::run        the tenant's turn, the slot, the payload: the first byte
//! ```
//!
//! What was said of the call when its schedule was sealed (its words and digest, where its payload lies, how long it may be
//! ahead) is not worked out again. The line was ten calls in six files, and passed the gate's function twice:
//!
//! ```text
//! all_reduce > Engine::collective > check_scale
//!                                 > Engine::resolve > tensor::resolve > LocalMem::hbm, LocalMem::overlap
//!                                 > Engine::begin > Lane::begin
//!                                 > run > Lane::run > check_buffers > LocalMem::overlap
//!                                                   > Lane::begin
//!                                                   > Lane::run_steps > Lane::drain, copy
//! ```
//!
//! How many instructions each operation takes is counted and bounded in the package of whole-system tests (`counts`).

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use hw_bridge::call::{DataType, Op, ReduceOp};
use hw_bridge::exec::sequencer::{CallArgs, CallBuffers, Lane, LocalMem, OpError, Sealed};
use hw_bridge::group::NO_RANK;
use hw_bridge::limits::MAX_LOCAL_RANKS;

use crate::api::communicator::Communicator;
use crate::api::memory::{DeviceMemory, Io, Shape, resolve};
use crate::api::runtime::Runtime;
use crate::error::Error;
use crate::plane::host::bad;
use crate::plane::{Plane, Seat};
use enc::table::{Criteria, Why};
use enc::{Algorithm, Call, Lists};
use sandbox::limits::{MAX_LISTED, MAX_LISTED_BYTES, MAX_SCHEDULES, PACK_BYTES};

/// Whom send_recv sends to and receives from; `None` for nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peers {
    /// Receives this rank's input.
    pub dst: Option<usize>,
    /// Sends this rank's output.
    pub src: Option<usize>,
}

/// One of the reductions of [`Communicator::all_reduce_many`].
pub type Reduction<'a> = ReductionOf<&'a DeviceMemory, &'a mut [u8]>;

/// One of the reductions of [`crate::Stream::all_reduce_many`], which owns them meanwhile.
pub type OwnedReduction = ReductionOf<Arc<DeviceMemory>, Vec<u8>>;

/// A reduction among many: what it holds, a tensor `T` or private memory `B`, is the input, and becomes the result.
#[derive(Debug)]
pub enum ReductionOf<T, B> {
    /// A stretch of device memory.
    Device {
        /// The tensor.
        tensor: T,
        /// First byte.
        offset: u64,
        /// Elements.
        count: u64,
    },
    /// Private memory, all of it; whole elements.
    Host(B),
}

impl<T: Deref<Target = DeviceMemory>, B: Deref<Target = [u8]>> ReductionOf<T, B> {
    /// Whether it is whole elements, and inside its tensor.
    fn fits(&self, dtype: DataType) -> bool {
        match self {
            ReductionOf::Host(bytes) => bytes.len().is_multiple_of(dtype.size()),
            ReductionOf::Device { tensor, offset, count } => {
                let end = count.checked_mul(dtype.size() as u64).and_then(|b| b.checked_add(*offset));
                end.is_some_and(|end| end <= tensor.len())
            }
        }
    }

    /// Bytes of one that fits.
    fn bytes(&self, dtype: DataType) -> usize {
        match self {
            ReductionOf::Host(bytes) => bytes.len(),
            ReductionOf::Device { count, .. } => *count as usize * dtype.size(),
        }
    }
}

#[derive(Debug, Default)]
struct Schedules {
    last: Option<Last>,
    all: HashMap<(Call, Algorithm), Arc<Sealed>>,
    listed: Listed,
    exchanges: HashMap<(Op, DataType, u64), Arc<Sealed>>,
    /// Kept between calls, so that a repeated call allocates nothing: words of this rank, words of all.
    scratch: (Vec<u8>, Vec<u8>),
}

/// The call before: most programs repeat themselves.
#[derive(Debug)]
struct Last {
    /// As the user asked.
    asked: Call,
    sizes: enc::Sizes,
    /// The kind of memory, and whether in place.
    private: bool,
    in_place: bool,
    /// As records have them.
    dst: u16,
    src: u16,
    schedule: Arc<Sealed>,
}

/// A call, the bytes of its lists, its schedule.
type Known = (Call, Box<[u8]>, Arc<Sealed>);

/// Schedules of calls with lists, found by the bytes of the lists.
#[derive(Debug, Default)]
struct Listed {
    by_digest: HashMap<u64, Known>,
    bytes: usize,
}

impl Listed {
    fn find(&self, call: &Call, lists: &[u8]) -> Option<Arc<Sealed>> {
        let (c, bytes, s) = self.by_digest.get(&digest(call, lists))?;
        (c == call && **bytes == *lists).then(|| s.clone())
    }

    fn keep(&mut self, call: Call, lists: &[u8], s: Arc<Sealed>) {
        if self.by_digest.len() >= MAX_LISTED || self.bytes + lists.len() > MAX_LISTED_BYTES {
            *self = Listed::default();
        }
        self.bytes += lists.len();
        if let Some((_, old, _)) = self.by_digest.insert(digest(&call, lists), (call, lists.into(), s)) {
            self.bytes -= old.len();
        }
    }
}

fn digest(call: &Call, lists: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut h = DefaultHasher::new();
    (call, lists).hash(&mut h);
    h.finish()
}

/// The sum of some counts; `None` if it, in bytes, is more than memory can be.
fn total(counts: &[u64], dtype: DataType) -> Option<u64> {
    let sum = counts.iter().try_fold(0u64, |sum, c| sum.checked_add(*c))?;
    sum.checked_mul(dtype.size() as u64).filter(|bytes| *bytes <= i64::MAX as u64).map(|_| sum)
}

/// What executes the calls of one lane.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) plane: Arc<Seat>,
    lane: Lane,
    rings: Arc<Vec<Vec<usize>>>,
    /// Used wherever it serves; the configuration's until the user sets another.
    forced: Option<Algorithm>,
    /// Deadline of an operation.
    pub(super) timeout: Duration,
    schedules: Schedules,
    /// Which lives as long as one of these does; the last to go.
    runtime: Runtime,
}

pub(super) fn call(op: Op, dtype: DataType, count: u64) -> Call {
    Call { op, dtype, redop: ReduceOp::Sum, count, root: 0, dst: None, src: None, private: false, in_place: false }
}

impl Communicator {
    /// Uses `algorithm` from the next call on wherever it serves, as `WCCL_ALGO` does; `None` leaves the choice to table and
    /// rule. All ranks set the same at the same point: a difference is an error of the call.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.engine.forced = algorithm;
        self.engine.schedules.last = None;
        self.engine.schedules.listed = Listed::default();
    }
}

impl Engine {
    pub(super) fn new(plane: Arc<Seat>, lane: Lane, timeout: Duration, runtime: Runtime) -> Engine {
        let forced = runtime.config().algorithm;
        let (rings, schedules) = Default::default();
        let mut engine = Engine { plane, lane, rings, forced, timeout, schedules, runtime };
        engine.refresh();
        engine
    }

    pub(super) fn criteria(&self) -> Criteria<'_> {
        Criteria { forced: self.forced, ..self.plane.criteria() }
    }

    /// Another one for a further lane, with this one's deadline and algorithm.
    pub(super) fn beside(&self, lane: Lane) -> Engine {
        let forced = self.forced;
        Engine { forced, ..Engine::new(self.plane.clone(), lane, self.timeout, self.runtime.clone()) }
    }

    pub(super) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(super) fn rings(&self) -> &Arc<Vec<Vec<usize>>> {
        &self.rings
    }

    /// Takes over the rings that the plan has now; schedules made of other ones go.
    pub(super) fn refresh(&mut self) {
        let plan = self.plane.plan();
        self.lane.set_plan(self.plane.digest(&plan));
        if plan.rings != self.rings {
            self.rings = plan.rings.clone();
            self.schedules = Schedules::default();
        }
    }

    pub(super) fn barrier(&mut self) -> Result<(), Error> {
        self.collective(Io::Host { src: &[], dst: &mut [] }, None, call(Op::Barrier, DataType::Uint8, 0))
    }

    /// A call with a count for each rank.
    pub(super) fn counted(&mut self, io: Io<'_>, call: Call, counts: &[u64]) -> Result<(), Error> {
        let count = self.check_counts(call.op, counts, call.dtype)?;
        self.listed(io, Call { count, ..call }, Lists::Counts(counts))
    }

    pub(super) fn permute(&mut self, io: Io<'_>, call: Call, pairs: &[(usize, usize)]) -> Result<(), Error> {
        let n = self.plane.core.nranks;
        let (mut sends, mut gets) = ([false; MAX_LOCAL_RANKS], [false; MAX_LOCAL_RANKS]);
        for (a, b) in pairs {
            if *a >= n || *b >= n {
                return Err(bad(format!("permute: pair ({a}, {b}) is not of the {n} ranks")));
            }
            let twice = std::mem::replace(&mut sends[*a], true) || std::mem::replace(&mut gets[*b], true);
            if twice {
                return Err(bad(format!("permute: pair ({a}, {b}) sends from or to a rank a second time")));
            }
        }
        self.listed(io, call, Lists::Pairs(pairs))
    }

    pub(super) fn all_reduce_many<T, B>(
        &mut self,
        items: &mut [ReductionOf<T, B>],
        dtype: DataType,
        op: ReduceOp,
    ) -> Result<(), Error>
    where
        T: Deref<Target = DeviceMemory>,
        B: DerefMut<Target = [u8]>,
    {
        // All are looked at before the first one moves.
        if let Some(i) = items.iter().position(|item| !item.fits(dtype)) {
            return Err(bad(format!(
                "all_reduce_many on rank {}: buffer {i} is not whole {dtype} elements, or not inside its tensor",
                self.plane.core.rank
            )));
        }
        let call = Call { redop: op, ..call(Op::AllReduce, dtype, 0) };
        let mut pack = std::mem::take(&mut self.schedules.scratch.0);
        let mut at = 0;
        let mut done = Ok(());
        while at < items.len() && done.is_ok() {
            let mut end = at;
            let mut bytes = 0;
            while end < items.len() && bytes + items[end].bytes(dtype) <= PACK_BYTES {
                bytes += items[end].bytes(dtype);
                end += 1;
            }
            done = if end > at + 1 {
                pack.clear();
                pack.resize(bytes, 0);
                self.reduce_packed(&mut items[at..end], &mut pack, call)
            } else {
                end = at + 1;
                let count = (items[at].bytes(dtype) / dtype.size()) as u64;
                let io = match &mut items[at] {
                    ReductionOf::Host(bytes) => Io::HostInPlace(bytes),
                    ReductionOf::Device { tensor, offset, .. } => {
                        Io::Device { src: (tensor, *offset), dst: (tensor, *offset) }
                    }
                };
                self.collective(io, None, Call { count, ..call })
            };
            at = end;
        }
        pack.clear();
        self.schedules.scratch.0 = pack;
        done
    }

    /// Reduces items as one, in `pack`, which has room for just these.
    fn reduce_packed<T, B>(&mut self, items: &mut [ReductionOf<T, B>], pack: &mut [u8], call: Call) -> Result<(), Error>
    where
        T: Deref<Target = DeviceMemory>,
        B: DerefMut<Target = [u8]>,
    {
        let mut rest = &mut *pack;
        for item in items.iter() {
            let (piece, behind) = rest.split_at_mut(item.bytes(call.dtype));
            match item {
                ReductionOf::Host(bytes) => piece.copy_from_slice(bytes),
                ReductionOf::Device { tensor, offset, .. } => tensor.read(*offset, piece)?,
            }
            rest = behind;
        }
        let count = (pack.len() / call.dtype.size()) as u64;
        self.collective(Io::HostInPlace(pack), None, Call { count, ..call })?;
        let mut rest = &*pack;
        for item in items.iter_mut() {
            let (piece, behind) = rest.split_at(item.bytes(call.dtype));
            match item {
                ReductionOf::Host(bytes) => bytes.copy_from_slice(piece),
                ReductionOf::Device { tensor, offset, .. } => tensor.write(*offset, piece)?,
            }
            rest = behind;
        }
        Ok(())
    }

    pub(super) fn all_to_all_v(
        &mut self,
        io: Io<'_>,
        send: &[u64],
        recv: &[u64],
        dtype: DataType,
    ) -> Result<(), Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        let op = Op::AllToAllV;
        let size = dtype.size() as u64;
        let sends = self.check_counts(op, send, dtype)?;
        let gets = self.check_counts(op, recv, dtype)?;
        let mut call = call(op, dtype, 0);
        self.check_ready(op)?;
        call.private = !io.is_device();
        let shape = Shape { op, rank, in_bytes: sends * size, out_bytes: gets * size, at: 0 };
        let (buffers, _) = resolve(io, shape)?;
        let (mut mine, mut all) = self.take_scratch();
        mine.extend(send.iter().chain(recv).flat_map(|c| c.to_le_bytes()));
        let found = self.exchange(op, dtype, &mine, &mut all).and_then(|()| {
            self.listed_schedule(call, &all, |engine| {
                let matrix = matrix_of(&all, n, dtype)?;
                let count = matrix.iter().sum();
                engine.compile_listed(&Call { count, ..call }, Lists::Matrix(&matrix))
            })
        });
        self.give_scratch(mine, all);
        self.execute(&*found?, &buffers)
    }

    /// The schedule of a call with lists, found by their bytes, or made and kept.
    pub(super) fn listed_schedule(
        &mut self,
        key: Call,
        lists: &[u8],
        make: impl FnOnce(&mut Engine) -> Result<Arc<Sealed>, Error>,
    ) -> Result<Arc<Sealed>, Error> {
        if self.lane.begin()? {
            self.refresh();
        }
        if let Some(s) = self.schedules.listed.find(&key, lists) {
            return Ok(s);
        }
        let s = make(self).inspect_err(|_| self.lane.retract())?;
        self.schedules.listed.keep(key, lists, s.clone());
        Ok(s)
    }

    /// Runs the schedule of a call that names no peers and scales nothing.
    pub(super) fn execute(&mut self, schedule: &Sealed, buffers: &CallBuffers<'_>) -> Result<(), Error> {
        let args = CallArgs { dst: NO_RANK, src: NO_RANK, scale: 1.0, timeout: self.timeout };
        self.lane.run(schedule, buffers, &args).map_err(|e| failed(&self.plane, e))
    }

    fn check_counts(&self, op: Op, counts: &[u64], dtype: DataType) -> Result<u64, Error> {
        let n = self.plane.core.nranks;
        if counts.len() != n {
            let have = counts.len();
            return Err(bad(format!("{}: {have} counts were passed, {n} ranks need one each", op.name())));
        }
        let sum = total(counts, dtype);
        sum.ok_or_else(|| bad(format!("{}: the sum of the {dtype} counts is larger than memory can be", op.name())))
    }

    pub(super) fn check_ready(&self, op: Op) -> Result<(), Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        if n > 1 && self.rings.is_empty() {
            let name = op.name();
            return Err(bad(format!(
                "{name} on rank {rank}: the communicator has no rings; call build_graph on all ranks first"
            )));
        }
        Ok(())
    }

    /// `scale` is this rank's of a pre-scaled sum, `None` in all other calls.
    pub(super) fn collective(&mut self, io: Io<'_>, scale: Option<f32>, call: Call) -> Result<(), Error> {
        check_scale(&call, scale)?;
        let again = self.schedules.last.as_ref().filter(|last| last.asked == call).map(|last| last.sizes);
        let sizes = match again {
            Some(sizes) => sizes,
            None => self.check_and_size(&call, Lists::None)?,
        };
        let private = !io.is_device() && call.op != Op::Barrier;
        let (buffers, in_place) = resolve(io, self.shape(call.op, sizes))?;
        // Before the schedule is chosen: a swap may have changed the rings, and the last schedule has gone then.
        if self.lane.begin()? {
            self.refresh();
        }
        let last = match &self.schedules.last {
            Some(last) if again.is_some() && (last.private, last.in_place) == (private, in_place) => last,
            _ => {
                let schedule = self.choose(&Call { private, in_place, ..call }).inspect_err(|_| self.lane.retract())?;
                let [dst, src] = [call.dst, call.src].map(|r| r.map_or(NO_RANK, |r| r as u16));
                self.schedules.last.insert(Last { asked: call, sizes, private, in_place, dst, src, schedule })
            }
        };
        let args = CallArgs { dst: last.dst, src: last.src, scale: scale.unwrap_or(1.0), timeout: self.timeout };
        self.lane.run(&last.schedule, &buffers, &args).map_err(|e| failed(&self.plane, e))
    }

    /// The schedule of a call, by the algorithm that its criteria say.
    fn choose(&mut self, call: &Call) -> Result<Arc<Sealed>, Error> {
        if call.private {
            // The choice goes by what all agree on when they are linked.
            self.reach_all(call.op)?;
        }
        let algorithm = self.criteria().decide(call, self.plane.core.nranks).algorithm;
        self.schedule(call, algorithm)
    }

    /// A call whose lists this rank has whole.
    fn listed(&mut self, io: Io<'_>, call: Call, lists: Lists<'_>) -> Result<(), Error> {
        if call.redop == ReduceOp::PreMulSum {
            check_scale(&call, None)?;
        }
        let sizes = self.check_and_size(&call, lists)?;
        let private = !io.is_device() && call.op != Op::Barrier;
        let (buffers, in_place) = resolve(io, self.shape(call.op, sizes))?;
        let call = Call { private, in_place, ..call };
        let (mut key, other) = self.take_scratch();
        lists.bytes(&mut key);
        let schedule = self.listed_schedule(call, &key, |engine| engine.compile_listed(&call, lists));
        self.give_scratch(key, other);
        self.execute(&*schedule?, &buffers)
    }

    /// Checks a call; answers what buffers it needs.
    fn check_and_size(&self, call: &Call, lists: Lists<'_>) -> Result<enc::Sizes, Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        self.check_call(call)?;
        self.check_ready(call.op)?;
        let too_large = || {
            bad(format!("{} of {} {} elements is larger than memory can be", call.op.name(), call.count, call.dtype))
        };
        call.bytes().and_then(|block| block.checked_mul(n as u64)).ok_or_else(too_large)?;
        Ok(enc::sizes(call, lists, rank, n))
    }

    #[inline]
    fn shape(&self, op: Op, sizes: enc::Sizes) -> Shape {
        Shape { op, rank: self.plane.core.rank, in_bytes: sizes.input, out_bytes: sizes.output, at: sizes.at }
    }

    pub(super) fn take_scratch(&mut self) -> (Vec<u8>, Vec<u8>) {
        std::mem::take(&mut self.schedules.scratch)
    }

    pub(super) fn give_scratch(&mut self, mut mine: Vec<u8>, mut all: Vec<u8>) {
        mine.clear();
        all.clear();
        self.schedules.scratch = (mine, all);
    }

    /// Gives every rank the words of all, in rank order, in `all`: the same number on each rank, which fits in one hop.
    pub(super) fn exchange(&mut self, op: Op, dtype: DataType, mine: &[u8], all: &mut Vec<u8>) -> Result<(), Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        let words = (mine.len() / 8) as u64;
        if self.lane.begin()? {
            self.refresh();
        }
        let schedule = match self.schedules.exchanges.get(&(op, dtype, words)).cloned() {
            Some(s) => s,
            None => {
                let made = self.reach_all(op).and_then(|()| {
                    let s = enc::compile_exchange(op, dtype, words, rank, n);
                    self.linked(s.map_err(|e| Error::Bug(e.to_string()))?)
                });
                let s = Arc::new(made.inspect_err(|_| self.lane.retract())?);
                if self.schedules.exchanges.len() >= MAX_SCHEDULES {
                    self.schedules.exchanges.clear();
                }
                self.schedules.exchanges.insert((op, dtype, words), s.clone());
                s
            }
        };
        all.clear();
        all.resize(mine.len() * n, 0);
        self.execute(&schedule, &CallBuffers::new(LocalMem::input(mine), LocalMem::output(all)))
    }

    /// The schedule of a call with lists, not looked up.
    pub(super) fn compile_listed(&self, call: &Call, lists: Lists<'_>) -> Result<Arc<Sealed>, Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        self.reach_all(call.op)?;
        let criteria = self.criteria();
        // What the user or a row of the table says is taken where the lists let it serve.
        let said = criteria.decide(call, n);
        let said = if matches!(said.why, Why::Forced | Why::Row(_)) { Some(said.algorithm) } else { self.forced };
        let algorithm = enc::choose_with(call, lists, n, said, criteria.one_hop_max, criteria.direct);
        if n > 1 && algorithm == Algorithm::Staged && !enc::fits_private(call, lists, n) {
            return Err(too_long(call.op));
        }
        let s = enc::compile_with(call, lists, rank, n, algorithm, &self.rings);
        Ok(Arc::new(self.linked(s.map_err(|e| Error::Bug(e.to_string()))?)?))
    }

    /// Makes sure that every pair is connected.
    fn reach_all(&self, op: Op) -> Result<(), Error> {
        self.plane.core.endpoint.usable()?;
        // The others go on to an operation that this rank cannot join: they learn why.
        let connected = self.plane.connect_all(op.name(), self.timeout);
        connected.inspect_err(|e| self.plane.core.endpoint.fail(&e.to_string(), e.dead_rank()))
    }

    /// Fails if a schedule needs a peer that was never linked.
    fn linked(&self, s: Sealed) -> Result<Sealed, Error> {
        let endpoint = &self.plane.core.endpoint;
        if let Some(peer) = enc::needs(&s).find(|p| !endpoint.linked(*p)) {
            let e = OpError::NotLinked { rank: self.plane.core.rank, peer };
            endpoint.fail(&e.to_string(), None);
            return Err(e.into());
        }
        Ok(s)
    }

    fn check_call(&self, call: &Call) -> Result<(), Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        let name = call.op.name();
        if call.root >= n {
            return Err(bad(format!("{name}: root {} is not one of the {n} ranks", call.root)));
        }
        for p in [call.dst, call.src].into_iter().flatten() {
            if p >= n {
                return Err(bad(format!("{name}: peer {p} is not one of the {n} ranks")));
            }
        }
        if (call.dst == Some(rank)) != (call.src == Some(rank)) {
            return Err(bad(format!(
                "{name}: rank {rank} sends to itself but receives from another, or the other way round"
            )));
        }
        Ok(())
    }

    /// The schedule of a call: compiled once, then cached. The first one that needs more than ring neighbours makes the
    /// library connect the rest, once (INV-81).
    fn schedule(&mut self, call: &Call, algorithm: Algorithm) -> Result<Arc<Sealed>, Error> {
        if let Some(found) = self.schedules.all.get(&(*call, algorithm)) {
            return Ok(found.clone());
        }
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        let staged = n > 1 && algorithm == Algorithm::Staged;
        if staged && matches!(call.op, Op::Gather | Op::Scatter) && !enc::fits_private(call, Lists::None, n) {
            return Err(too_long(call.op));
        }
        let most = enc::max_private_bytes(call.op, n);
        if staged && call.bytes().is_some_and(|b| b > most) {
            return Err(bad(format!(
                "{}: one call stages at most {most} bytes a block of private memory; split it, or use tensors",
                call.op.name()
            )));
        }
        if algorithm != Algorithm::Ring {
            self.reach_all(call.op)?;
        }
        let s = enc::compile(call, rank, n, algorithm, &self.rings).map_err(|e| Error::Bug(e.to_string()))?;
        let s = Arc::new(self.linked(s)?);
        if self.schedules.all.len() >= MAX_SCHEDULES {
            self.schedules.all.clear();
        }
        self.schedules.all.insert((*call, algorithm), s.clone());
        Ok(s)
    }
}

/// A failure that breaks the communicator leaves its flight records.
#[cold]
fn failed(plane: &Plane, e: OpError) -> Error {
    plane.dump_once(&e);
    e.into()
}

fn too_long(op: Op) -> Error {
    bad(format!("{}: the blocks are too long for one call in private memory; split it, or use tensors", op.name()))
}

/// The counts of all ranks from what they exchanged (each its n sends, then its n receives), if they fit together. All
/// ranks look at all of it, so all answer alike.
fn matrix_of(all: &[u8], n: usize, dtype: DataType) -> Result<Vec<u64>, Error> {
    let words: Vec<u64> = all.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    let mut matrix = Vec::with_capacity(n * n);
    for p in 0..n {
        for q in 0..n {
            let (sends, expects) = (words[p * 2 * n + q], words[q * 2 * n + n + p]);
            if sends != expects {
                return Err(bad(format!(
                    "all_to_all_v: rank {p} sends {sends} elements to rank {q}, which expects {expects} from it; nothing was \
                     moved; make send[{q}] of rank {p} and recv[{p}] of rank {q} the same"
                )));
            }
            matrix.push(sends);
        }
    }
    if total(&matrix, dtype).is_none() {
        return Err(bad(format!(
            "all_to_all_v: the sum of the {dtype} counts of all ranks is larger than memory can be"
        )));
    }
    Ok(matrix)
}

/// A pre-scaled sum has a scale and a float type; nothing else has a scale.
#[inline]
fn check_scale(call: &Call, scale: Option<f32>) -> Result<(), Error> {
    match scale {
        None if call.redop == ReduceOp::PreMulSum => Err(no_scale(call.op)),
        Some(_) if !call.dtype.is_float() => Err(not_scaled(call)),
        _ => Ok(()),
    }
}

#[cold]
fn no_scale(op: Op) -> Error {
    let name = op.name();
    bad(format!("{name}: {} needs this rank's scale; call {name}_scaled instead", ReduceOp::PreMulSum))
}

#[cold]
fn not_scaled(call: &Call) -> Error {
    let (name, dtype) = (call.op.name(), call.dtype);
    bad(format!(
        "{name}_scaled: elements of type {dtype} cannot be scaled, because scales are f32; use a float type, or scale them \
         before a plain {name}"
    ))
}
