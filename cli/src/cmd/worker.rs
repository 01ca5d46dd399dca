//! One rank of a demo or a bench: the hidden subcommand, how it joins, and what ranks agree on.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use enc::Algorithm;
use hw_bridge::limits::MAX_LOCAL_RANKS;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sandbox::error::Error;
use sandbox::vars;
use serde::{Deserialize, Serialize};
use wccl::nrt::{CommOptions, Communicator, Io, Runtime, RuntimeConfig};
use wccl::{DataType, ReduceOp};

use crate::cores::{self, Core};
use crate::launcher::{self, GRACE, Group};
use crate::{bench, demo, explain, peer, tune};

/// Options of every subcommand that starts ranks of its own.
#[derive(Debug, Clone, clap::Args)]
pub struct Ranks {
    /// Ranks to start on this machine, each a process; more than there are cores works
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_LOCAL_RANKS as u64))]
    #[arg(default_value = "4")]
    pub ranks: u64,
    /// The collectives plugin, if not the one built by `cargo xtask guests`
    #[arg(long, value_name = "FILE", env = "WCCL_PLUGIN")]
    pub plugin: Option<PathBuf>,
    /// Socket of the service that has the devices and plugins (`wccl serve`); without, each rank has its own
    #[arg(long, value_name = "SOCKET", env = "WCCL_SERVICE")]
    pub service: Option<PathBuf>,
    /// Algorithm to use wherever it serves, as WCCL_ALGO: one-hop, mesh, ring, staged, halving, tree, two-level;
    /// default: by size
    #[arg(long, value_name = "NAME")]
    pub algo: Option<Algorithm>,
}

/// What a rank is to do. The launcher hands it to all ranks alike.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Job {
    /// The demo.
    Demo(demo::Job),
    /// The table of `bench`.
    Bench(bench::Job),
    /// The lines of `bench --peer`.
    Peer(peer::Job),
    /// `bench --tune`.
    Tune(tune::Job),
    /// `bench --explain`.
    Explain(explain::Job),
}

/// Arguments of the hidden subcommand.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job, as JSON.
    job: String,
}

/// A rank that has joined its group.
pub struct Member {
    /// The runtime.
    pub runtime: Runtime,
    /// The communicator.
    pub comm: Communicator,
    /// How long joining took.
    pub init: Duration,
    /// What it is bound to.
    _core: Option<Core>,
}

/// Starts one process a rank for `job` and waits for all.
///
/// # Errors
/// A rank failed; the sentence names it.
pub fn launch(ranks: &Ranks, job: &Job, log: Option<&str>) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("finding this program's file")?.into_os_string();
    let json = serde_json::to_string(job).context("writing the job of the ranks")?;
    let mut vars = Vec::new();
    if let Some(log) = log {
        vars.push(("WCCL_LOG", OsString::from(log)));
    }
    if crate::LOG_FORMAT.get() == Some(&crate::LogFormat::Json) {
        vars.push(("WCCL_LOG_FORMAT", "json".into()));
    }
    if let Some(plugin) = &ranks.plugin {
        vars.push(("WCCL_PLUGIN", plugin.clone().into_os_string()));
    }
    if let Some(service) = &ranks.service {
        vars.extend(launcher::served(service));
    }
    if let Some(algorithm) = ranks.algo {
        vars.push(("WCCL_ALGO", algorithm.name().into()));
    }
    let args = vec!["__worker".into(), json.into()];
    Group { ranks: ranks.ranks as usize, program, args, vars, tag: false, stdin: false, grace: GRACE }.run()
}

/// The hidden subcommand.
///
/// # Errors
/// Whatever stops this rank.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    let job: Job = serde_json::from_str(&args.job).context("reading this rank's job")?;
    let rank: usize = variable("RANK")?;
    let n: usize = variable("WORLD_SIZE")?;
    let done = match job {
        Job::Demo(j) => demo::work(&j, rank, n),
        Job::Bench(j) => bench::work(&j, rank, n),
        Job::Peer(j) => peer::work(&j, rank, n),
        Job::Tune(j) => tune::work(&j, rank, n),
        Job::Explain(j) => explain::work(&j, rank, n),
    };
    done.with_context(|| format!("rank {rank}"))
}

fn variable(name: &str) -> anyhow::Result<usize> {
    let text = vars::variable(name)?
        .with_context(|| format!("{name} is not set; ranks are started by `wccl demo` or `wccl bench`"))?;
    text.parse().with_context(|| format!("{name}={text}: a whole number was expected"))
}

/// Opens the runtime and joins the group that the environment describes.
///
/// # Errors
/// No plugin, one that does not load, or a bootstrap that fails.
pub fn join(rank: usize, n: usize) -> anyhow::Result<Member> {
    join_by(RuntimeConfig::from_env()?, rank, n)
}

/// The same with a configuration of one's own.
///
/// # Errors
/// Those of [`join`].
pub fn join_by(config: RuntimeConfig, rank: usize, n: usize) -> anyhow::Result<Member> {
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
    Ok(Member { runtime, comm, init, _core: bind(rank, n) })
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
    comm.all_reduce(Io::HostInPlace(bytes.as_flattened_mut()), N as u64, DataType::Uint64, op)?;
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
