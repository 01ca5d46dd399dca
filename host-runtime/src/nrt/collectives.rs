//! The collectives of a communicator: checks of a call, its schedule (compiled once, then cached), the run.
//!
//! An [`Engine`] does that for one lane, on one thread: the communicator owns the one for blocking calls, each stream its
//! own. In the steady state (the same call as before) it takes no lock and allocates nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hw_bridge::dtype::{DataType, ReduceOp};
use hw_bridge::peers::Op;
use hw_bridge::sequencer::{CallArgs, Lane, LocalMem, OpError, Sealed};

use super::communicator::{Communicator, bad};
use super::plane::Plane;
use super::tensor::{Io, Shape, resolve};
use crate::enc::table::Policy;
use crate::enc::{self, Algorithm, Call};
use crate::error::Error;
use crate::limits::MAX_SCHEDULES;

/// Whom send_recv sends to and receives from; `None` for nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peers {
    /// Receives this rank's input.
    pub dst: Option<usize>,
    /// Sends this rank's output.
    pub src: Option<usize>,
}

#[derive(Debug, Default)]
struct Schedules {
    last: Option<(Call, Algorithm, Arc<Sealed>)>,
    all: HashMap<(Call, Algorithm), Arc<Sealed>>,
}

/// What executes the calls of one lane.
#[derive(Debug)]
pub(super) struct Engine {
    plane: Arc<Plane>,
    lane: Lane,
    rings: Arc<Vec<Vec<usize>>>,
    /// Used wherever it serves; the configuration's until the user sets another.
    forced: Option<Algorithm>,
    schedules: Schedules,
}

pub(super) fn call(op: Op, dtype: DataType, count: u64) -> Call {
    Call { op, dtype, redop: ReduceOp::Sum, count, root: 0, dst: None, src: None, private: false, in_place: false }
}

impl Communicator {
    /// Every rank gets the reduction of all inputs. `count` elements each.
    ///
    /// # Errors
    /// [`Error::Usage`] for buffers that do not fit, [`Error::Op`] if the operation fails (the communicator is then
    /// broken), [`Error::Stopped`] if connections must be made and the control plane is gone. All collectives alike.
    pub fn all_reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.collective(io, None, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// Every rank gets all inputs, in rank order. `count` elements of each rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.collective(io, None, call(Op::AllGather, dtype, count))
    }

    /// Rank r gets block r of the reduction. `count` elements of output; the input has that times the ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.collective(io, None, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// Every rank gets the root's input. `count` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast(&mut self, io: Io<'_>, count: u64, dtype: DataType, root: usize) -> Result<(), Error> {
        self.collective(io, None, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// The root gets the reduction of all inputs. `count` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp, root: usize) -> Result<(), Error> {
        self.collective(io, None, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// Rank r gets block r of every rank, in rank order. `count` elements a block.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.collective(io, None, call(Op::AllToAll, dtype, count))
    }

    /// Sends the input to one rank and receives the output from one. All ranks call it, whether or not they send or
    /// receive; `count` elements either way.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_recv(&mut self, io: Io<'_>, count: u64, dtype: DataType, peers: Peers) -> Result<(), Error> {
        self.collective(io, None, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// Nobody leaves before all have come.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.collective(Io::Host { src: &[], dst: &mut [] }, None, call(Op::Barrier, DataType::Uint8, 0))
    }

    /// Uses `algorithm` from the next call on wherever it serves, as `WCCL_ALGO` does; `None` leaves the choice to table and
    /// rule. All ranks set the same at the same point: a difference is an error of the call.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.engine.set_algorithm(algorithm);
    }

    /// `scale` is this rank's of a pre-scaled sum, `None` in all other calls.
    fn collective(&mut self, io: Io<'_>, scale: Option<f32>, call: Call) -> Result<(), Error> {
        self.engine.collective(io, scale, call, self.timeout)
    }
}

impl Engine {
    pub(super) fn new(plane: Arc<Plane>, lane: Lane, rings: Arc<Vec<Vec<usize>>>) -> Engine {
        let forced = plane.runtime.0.config.algorithm;
        Engine { plane, lane, rings, forced, schedules: Schedules::default() }
    }

    pub(super) fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.forced = algorithm;
    }

    /// The rings changed: schedules made of the old ones go.
    pub(super) fn set_rings(&mut self, rings: Arc<Vec<Vec<usize>>>) {
        self.rings = rings;
        self.schedules = Schedules::default();
    }

    pub(super) fn collective(
        &mut self,
        io: Io<'_>,
        scale: Option<f32>,
        mut call: Call,
        timeout: Duration,
    ) -> Result<(), Error> {
        let (rank, n) = (self.plane.core.rank, self.plane.core.nranks);
        self.check_call(&call)?;
        check_scale(&call, scale)?;
        if n > 1 && self.rings.is_empty() {
            let name = call.op.name();
            return Err(bad(format!(
                "{name} on rank {rank}: the communicator has no rings; call build_graph on all ranks first"
            )));
        }
        let too_large = || {
            bad(format!("{} of {} {} elements is larger than memory can be", call.op.name(), call.count, call.dtype))
        };
        let block = call.bytes().ok_or_else(too_large)?;
        let all = block.checked_mul(n as u64).ok_or_else(too_large)?;
        let only = |yes: bool| if yes { block } else { 0 };
        let (in_bytes, out_bytes) = match call.op {
            Op::AllReduce => (block, block),
            Op::AllGather => (block, all),
            Op::ReduceScatter => (all, block),
            Op::AllToAll => (all, all),
            Op::Broadcast => (only(rank == call.root), block),
            Op::Reduce => (block, only(rank == call.root)),
            Op::SendRecv => (only(call.dst.is_some()), only(call.src.is_some())),
            Op::Barrier => (0, 0),
        };
        call.private = !io.is_device() && call.op != Op::Barrier;
        let (input, output, in_place) = resolve(io, Shape { op: call.op, rank, in_bytes, out_bytes, block })?;
        call.in_place = in_place;
        self.run(&call, input, output, scale.unwrap_or(1.0), timeout)
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

    fn run(
        &mut self,
        call: &Call,
        input: LocalMem<'_>,
        output: LocalMem<'_>,
        scale: f32,
        timeout: Duration,
    ) -> Result<(), Error> {
        let policy = Policy { forced: self.forced, ..self.plane.runtime.0.config.policy() };
        let algorithm = policy.decide(call, self.plane.core.nranks).algorithm;
        let again = matches!(&self.schedules.last, Some((c, a, _)) if c == call && *a == algorithm);
        if !again {
            let schedule = self.schedule(call, algorithm)?;
            self.schedules.last = Some((*call, algorithm, schedule));
        }
        let Some((_, _, schedule)) = &self.schedules.last else {
            return Err(Error::Bug("a schedule that was just compiled is not there".into()));
        };
        let args = CallArgs { dst: call.dst, src: call.src, scale, timeout };
        match self.lane.run(schedule, input, output, &args) {
            Ok(()) => Ok(()),
            Err(e) => {
                self.plane.dump_once(&e);
                Err(e.into())
            }
        }
    }

    /// The schedule of a call: compiled once, then cached. The first one that needs more than ring neighbours makes the
    /// library connect the rest, once (INV-81).
    fn schedule(&mut self, call: &Call, algorithm: Algorithm) -> Result<Arc<Sealed>, Error> {
        let core = &self.plane.core;
        let (rank, n) = (core.rank, core.nranks);
        let cache = &mut self.schedules;
        if let Some(found) = cache.all.get(&(*call, algorithm)) {
            return Ok(found.clone());
        }
        let most = enc::max_private_bytes(call.op, n);
        if call.private && n > 1 && call.bytes().is_some_and(|b| b > most) {
            return Err(bad(format!(
                "{}: one call moves at most {most} bytes a block of private memory; split it, or use tensors",
                call.op.name()
            )));
        }
        if algorithm != Algorithm::Ring {
            // The others go on to an operation that this rank cannot join: they learn why.
            self.plane.connect_all().inspect_err(|e| core.endpoint.fail(&e.to_string()))?;
        }
        let s = enc::compile(call, rank, n, algorithm, &self.rings).map_err(|e| Error::Bug(e.to_string()))?;
        if let Some(peer) = enc::needs(&s).find(|p| !core.endpoint.linked(*p)) {
            let e = OpError::NotLinked { rank, peer };
            core.endpoint.fail(&e.to_string());
            return Err(e.into());
        }
        if cache.all.len() >= MAX_SCHEDULES {
            cache.all.clear();
        }
        let s = Arc::new(s);
        cache.all.insert((*call, algorithm), s.clone());
        Ok(s)
    }
}

/// A pre-scaled sum has a scale and a float type; nothing else has a scale.
fn check_scale(call: &Call, scale: Option<f32>) -> Result<(), Error> {
    let name = call.op.name();
    match scale {
        None if call.redop == ReduceOp::PreMulSum => {
            Err(bad(format!("{name}: {} needs this rank's scale; call {name}_scaled instead", ReduceOp::PreMulSum)))
        }
        Some(_) if !call.dtype.is_float() => Err(bad(format!(
            "{name}_scaled: elements of type {} cannot be scaled, because scales are f32; use a float type, or scale \
             them before a plain {name}",
            call.dtype
        ))),
        _ => Ok(()),
    }
}

/// Pre-scaled sums (NCCL's PreMulSum): the result is the sum over the ranks, in rank order, of each rank's `scale` times
/// its elements, computed in f32 and rounded once. Each rank passes a scale of its own; different ones are no mismatch.
/// Float types only.
impl Communicator {
    /// [`Communicator::all_reduce`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], and [`Error::Usage`] for an integer type.
    pub fn all_reduce_scaled(&mut self, io: Io<'_>, count: u64, dtype: DataType, scale: f32) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(io, Some(scale), Call { redop, ..call(Op::AllReduce, dtype, count) })
    }

    /// [`Communicator::reduce_scatter`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_scaled`].
    pub fn reduce_scatter_scaled(&mut self, io: Io<'_>, count: u64, dtype: DataType, scale: f32) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(io, Some(scale), Call { redop, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// [`Communicator::reduce`] with a scale of this rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce_scaled`].
    pub fn reduce_scaled(
        &mut self,
        io: Io<'_>,
        count: u64,
        dtype: DataType,
        root: usize,
        scale: f32,
    ) -> Result<(), Error> {
        let redop = ReduceOp::PreMulSum;
        self.collective(io, Some(scale), Call { root, redop, ..call(Op::Reduce, dtype, count) })
    }
}
