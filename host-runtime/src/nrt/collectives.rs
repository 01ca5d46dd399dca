//! The collectives of a communicator: checks of a call, its schedule (compiled once, then cached), the run.

use std::collections::HashMap;
use std::sync::Arc;

use hw_bridge::dtype::{DataType, ReduceOp};
use hw_bridge::peers::Op;
use hw_bridge::sequencer::{LocalMem, OpError, Sealed};

use super::communicator::{Communicator, bad};
use super::tensor::{Io, Shape, resolve};
use crate::enc::table::Policy;
use crate::enc::{self, Algorithm, Call};
use crate::error::Error;
use crate::limits::MAX_SCHEDULES;
use crate::tenant::lock;

/// Whom send_recv sends to and receives from; `None` for nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peers {
    /// Receives this rank's input.
    pub dst: Option<usize>,
    /// Sends this rank's output.
    pub src: Option<usize>,
}

#[derive(Debug, Default)]
pub(super) struct Schedules {
    last: Option<(Call, Algorithm, Arc<Sealed>)>,
    all: HashMap<(Call, Algorithm), Arc<Sealed>>,
}

fn call(op: Op, dtype: DataType, count: u64) -> Call {
    Call { op, dtype, redop: ReduceOp::Sum, count, root: 0, dst: None, src: None, private: false, in_place: false }
}

impl Communicator {
    /// Every rank gets the reduction of all inputs. `count` elements each.
    ///
    /// # Errors
    /// [`Error::Usage`] for buffers that do not fit, [`Error::Op`] if the operation fails (the communicator is then
    /// broken), [`Error::Stopped`] if connections must be made and the control plane is gone. All collectives alike.
    pub fn all_reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.collective(io, Call { redop: op, ..call(Op::AllReduce, dtype, count) })
    }

    /// Every rank gets all inputs, in rank order. `count` elements of each rank.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_gather(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.collective(io, call(Op::AllGather, dtype, count))
    }

    /// Rank r gets block r of the reduction. `count` elements of output; the input has that times the ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce_scatter(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp) -> Result<(), Error> {
        self.collective(io, Call { redop: op, ..call(Op::ReduceScatter, dtype, count) })
    }

    /// Every rank gets the root's input. `count` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn broadcast(&mut self, io: Io<'_>, count: u64, dtype: DataType, root: usize) -> Result<(), Error> {
        self.collective(io, Call { root, ..call(Op::Broadcast, dtype, count) })
    }

    /// The root gets the reduction of all inputs. `count` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn reduce(&mut self, io: Io<'_>, count: u64, dtype: DataType, op: ReduceOp, root: usize) -> Result<(), Error> {
        self.collective(io, Call { root, redop: op, ..call(Op::Reduce, dtype, count) })
    }

    /// Rank r gets block r of every rank, in rank order. `count` elements a block.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_to_all(&mut self, io: Io<'_>, count: u64, dtype: DataType) -> Result<(), Error> {
        self.collective(io, call(Op::AllToAll, dtype, count))
    }

    /// Sends the input to one rank and receives the output from one. All ranks call it, whether or not they send or
    /// receive; `count` elements either way.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn send_recv(&mut self, io: Io<'_>, count: u64, dtype: DataType, peers: Peers) -> Result<(), Error> {
        self.collective(io, Call { dst: peers.dst, src: peers.src, ..call(Op::SendRecv, dtype, count) })
    }

    /// Nobody leaves before all have come.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.collective(Io::Host { src: &[], dst: &mut [] }, call(Op::Barrier, DataType::Uint8, 0))
    }

    /// Uses `algorithm` from the next call on wherever it serves, as `WCCL_ALGO` does; `None` leaves the choice to table and
    /// rule. All ranks set the same at the same point: a difference is an error of the call.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.algorithm = algorithm;
    }

    fn collective(&mut self, io: Io<'_>, mut call: Call) -> Result<(), Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
        self.check_call(&call)?;
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
        self.run(&call, input, output)
    }

    fn check_call(&self, call: &Call) -> Result<(), Error> {
        let (rank, n) = (self.core.rank, self.core.nranks);
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

    fn run(&mut self, call: &Call, input: LocalMem<'_>, output: LocalMem<'_>) -> Result<(), Error> {
        let n = self.core.nranks;
        let policy = Policy { forced: self.algorithm, ..self.runtime.0.config.policy() };
        let algorithm = policy.decide(call, n).algorithm;
        let schedule = self.schedule(call, algorithm)?;
        lock(&self.core.endpoint).run(&schedule, input, output, call.dst, call.src, self.timeout)?;
        Ok(())
    }

    /// The schedule of a call: compiled once, then cached. The first one that needs more than ring neighbours makes the
    /// library connect the rest, once (INV-81).
    fn schedule(&self, call: &Call, algorithm: Algorithm) -> Result<Arc<Sealed>, Error> {
        let mut cache = lock(&self.schedules);
        if let Some((c, a, s)) = &cache.last
            && c == call
            && *a == algorithm
        {
            return Ok(s.clone());
        }
        let (rank, n) = (self.core.rank, self.core.nranks);
        let found = cache.all.get(&(*call, algorithm)).cloned();
        let schedule = match found {
            Some(s) => s,
            None => {
                let most = enc::max_private_bytes(call.op, n);
                if call.private && n > 1 && call.bytes().is_some_and(|b| b > most) {
                    return Err(bad(format!(
                        "{}: one call moves at most {most} bytes a block of private memory; split it, or use tensors",
                        call.op.name()
                    )));
                }
                if algorithm != Algorithm::Ring {
                    // The others go on to an operation that this rank cannot join: they learn why.
                    self.connect_all().inspect_err(|e| lock(&self.core.endpoint).fail(&e.to_string()))?;
                }
                let s = enc::compile(call, rank, n, algorithm, &self.rings).map_err(|e| Error::Bug(e.to_string()))?;
                let mut endpoint = lock(&self.core.endpoint);
                if let Some(peer) = enc::needs(&s).find(|p| !endpoint.linked(*p)) {
                    let e = OpError::NotLinked { rank, peer };
                    endpoint.fail(&e.to_string());
                    return Err(e.into());
                }
                drop(endpoint);
                if cache.all.len() >= MAX_SCHEDULES {
                    cache.all.clear();
                }
                let s = Arc::new(s);
                cache.all.insert((*call, algorithm), s.clone());
                s
            }
        };
        cache.last = Some((*call, algorithm, schedule.clone()));
        Ok(schedule)
    }
}
