//! One rank's seat in its group: how it joins, where it runs, what ranks agree on.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use wccl::error::Error;
use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig, vars};

use super::cores::{self, Core};

/// A rank that has joined its group.
pub struct JoinedRank {
    /// The runtime.
    pub runtime: Runtime,
    /// The communicator.
    pub comm: Communicator,
    /// How long joining took.
    pub init: Duration,
    /// What it is bound to.
    _core: Option<Core>,
}

/// Opens the runtime and joins the group that the environment describes.
///
/// # Errors
/// No plugin, one that does not load, or a bootstrap that fails.
pub fn join(rank: usize, n: usize) -> anyhow::Result<JoinedRank> {
    join_by(RuntimeConfig::from_env()?, rank, n)
}

/// The same with a configuration of one's own.
///
/// # Errors
/// Those of [`join`].
pub fn join_by(config: RuntimeConfig, rank: usize, n: usize) -> anyhow::Result<JoinedRank> {
    let root = vars::variable("NEURON_RT_ROOT_COMM_ID")?.context("NEURON_RT_ROOT_COMM_ID is not set")?;
    if config.plugin.is_none() && config.service.is_none() {
        bail!(
            "there is no collectives plugin: build it by `cargo xtask guests`, or name one with --plugin or WCCL_PLUGIN"
        );
    }
    let begin = Instant::now();
    let runtime = Runtime::open(config)?;
    if let Some(e) = runtime.load_error() {
        bail!("{}", e.sentinel);
    }
    let comm = runtime.init_comm(CommOptions::with_root(root, rank, n))?;
    let init = begin.elapsed();
    Ok(JoinedRank { runtime, comm, init, _core: bind(rank, n) })
}

/// Binds this thread to a core of its own, if there is one for each rank, as launchers of MPI do. Two ranks that the kernel
/// happens to place on one core would wait for each other by time slices, and it may take long to move one of them. A core that
/// another job's rank is bound to is none; without a free one, or if that cannot be known, the kernel decides.
fn bind(rank: usize, n: usize) -> Option<Core> {
    let allowed = sched_getaffinity(None).ok()?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|c| allowed.is_set(*c)).collect();
    if n > cpus.len() {
        return None;
    }
    let core = match cores::take(&cpus, rank) {
        Ok(core) => core?,
        Err(e) => {
            tracing::info!(rank, "not bound to a core, as it is not known which are free: {e:#}");
            return None;
        }
    };
    let mut mine = CpuSet::new();
    mine.set(core.number);
    if let Err(e) = sched_setaffinity(None, &mine) {
        tracing::info!(rank, "not bound to a core: {e}");
        return None;
    }
    Some(core)
}

fn agree<const N: usize>(comm: &mut Communicator, words: [u64; N], op: ReduceOp) -> Result<[u64; N], Error> {
    let mut bytes = words.map(u64::to_le_bytes);
    comm.raw().all_reduce(Io::HostInPlace(bytes.as_flattened_mut()), N as u64, DataType::Uint64, op)?;
    Ok(bytes.map(u64::from_le_bytes))
}

/// The largest of all ranks, for each of some numbers that are not negative.
///
/// # Errors
/// The runtime's.
pub fn largest<const N: usize>(comm: &mut Communicator, x: [f64; N]) -> Result<[f64; N], Error> {
    // The bits of floats that are not negative are in the order of the floats; there is no 64-bit float in NRT.
    Ok(agree(comm, x.map(|x| x.max(0.0).to_bits()), ReduceOp::Max)?.map(f64::from_bits))
}

/// The sums over all ranks.
///
/// # Errors
/// The runtime's.
pub fn sums<const N: usize>(comm: &mut Communicator, x: [u64; N]) -> Result<[u64; N], Error> {
    agree(comm, x, ReduceOp::Sum)
}

/// What rank 0 decided.
///
/// # Errors
/// The runtime's.
pub fn decided(comm: &mut Communicator, x: u64) -> Result<u64, Error> {
    let mine = if comm.rank() == 0 { x } else { 0 };
    Ok(agree(comm, [mine], ReduceOp::Max)?[0])
}
