//! `wccl bench --peer`: one JSON line for each collective and size, for comparisons with other libraries.
//!
//! For each point: the result is checked once, a tenth of the budget warms up, then between the least and the most calls are
//! timed, as many as fit the budget, back to back on the same buffers without a barrier between. The slowest rank's median
//! and minimum are reported. fp32, sum; all_reduce in place, the others out of place.

use std::process::ExitCode;
use std::time::Instant;

use hw_bridge::call::Op;
use serde::{Deserialize, Serialize};
use wccl::{Communicator, DataType, ReduceOp};

use crate::rank::collective::{self, BufferMemory, Case, RankBuffers};
use crate::rank::{measure, member};
use crate::size;
use crate::term::ProgressLine;
use crate::usage::UsageError;

/// The collectives of a comparison, and the names they have in its lines.
const NAMES: [(Op, &str); 6] = [
    (Op::AllReduce, "allreduce"),
    (Op::AllGather, "allgather"),
    (Op::ReduceScatter, "reduce_scatter"),
    (Op::Broadcast, "broadcast"),
    (Op::AllToAll, "all_to_all"),
    (Op::SendRecv, "sendrecv"),
];

/// Options of the comparison form.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "One JSON line a point, for comparisons")]
pub struct Args {
    /// Print JSON lines instead of a table; with --ranks, --buffers and the options below
    #[arg(long, conflicts_with_all = ["minbytes", "maxbytes", "stepfactor", "stepbytes", "collectives", "iters", "warmup", "check", "datatype", "op", "in_place", "root", "report_to_json_file"])]
    peer: bool,
    /// Collectives: allreduce, allgather, reduce_scatter, broadcast, all_to_all, sendrecv
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = collective::parse, default_value = "allreduce", requires = "peer")]
    colls: Vec<Op>,
    /// Sizes in bytes
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = size::parse, default_value = "8,1024", requires = "peer")]
    sizes: Vec<u64>,
    /// Time for each collective and size, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100.0, requires = "peer")]
    budget_ms: f64,
    /// Least timed calls
    #[arg(long, value_name = "N", default_value_t = 3, requires = "peer")]
    min_iters: u64,
    /// Most timed calls
    #[arg(long, value_name = "N", default_value_t = 2000, requires = "peer")]
    max_iters: u64,
}

/// What a rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    colls: Vec<String>,
    sizes: Vec<u64>,
    budget_ms: f64,
    min_iters: u64,
    max_iters: u64,
    memory: BufferMemory,
}

#[derive(Serialize)]
struct Line {
    coll: &'static str,
    ranks: usize,
    bytes: u64,
    moved: u64,
    iters: u64,
    lat_us_p50: f64,
    lat_us_min: f64,
    lat_us_p99: f64,
}

impl Args {
    /// Whether this form was asked for.
    pub fn is_wanted(&self) -> bool {
        self.peer
    }

    /// The largest size that was asked for.
    pub fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// The job of the ranks.
    ///
    /// # Errors
    /// [`UsageError`] for values that make no sense.
    pub fn job(&self, memory: BufferMemory) -> Result<Job, UsageError> {
        if !(self.budget_ms.is_finite() && self.budget_ms >= 0.0) {
            return Err(UsageError(format!("--budget-ms {} is not a time", self.budget_ms)));
        }
        if self.min_iters == 0 || self.max_iters < self.min_iters || self.max_iters > 100_000_000 {
            let (least, most) = (self.min_iters, self.max_iters);
            return Err(UsageError(format!(
                "--min-iters {least} --max-iters {most}: 1 <= min <= max <= 100000000 is expected"
            )));
        }
        if let Some(op) = self.colls.iter().find(|op| name(**op).is_none()) {
            return Err(UsageError(format!("--colls: {} is not one that is compared", op.name())));
        }
        Ok(Job {
            colls: self.colls.iter().map(|c| c.name().to_string()).collect(),
            sizes: self.sizes.clone(),
            budget_ms: self.budget_ms,
            min_iters: self.min_iters,
            max_iters: self.max_iters,
            memory,
        })
    }
}

fn name(op: Op) -> Option<&'static str> {
    NAMES.iter().find(|(o, _)| *o == op).map(|(_, n)| *n)
}

/// One rank.
///
/// # Errors
/// Joining or a collective failed, or a result was wrong.
pub fn work(job: &Job, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let first = rank == 0;
    let progress = ProgressLine::start(first, "loading the plugin and joining the group");
    let mut m = member::join(rank, n)?;
    let case = |op, bytes: u64| {
        // Every rank moves one float at least.
        let mut case = Case::of_bytes(op, DataType::Fp32, ReduceOp::Sum, bytes.max(1), n);
        // As the peers' calls are.
        case.in_place = matches!(op, Op::AllReduce | Op::Broadcast);
        case
    };
    let ops =
        job.colls.iter().map(|c| collective::parse(c).map_err(anyhow::Error::msg)).collect::<Result<Vec<_>, _>>()?;
    let points: Vec<(Op, u64)> = ops.iter().flat_map(|op| job.sizes.iter().map(|s| (*op, *s))).collect();
    let largest = points.iter().map(|(op, bytes)| case(*op, *bytes).bytes(n)).max().unwrap_or(0);
    let mut buffers = RankBuffers::new(&m.comm, job.memory, largest)?;
    for (op, bytes) in points {
        let coll = name(op).unwrap_or(op.name());
        progress.phase(&format!("{coll} of {}", size::short(bytes)));
        let mut line = point(&mut m.comm, &mut buffers, &case(op, bytes), job)?;
        (line.coll, line.bytes) = (coll, bytes);
        if first {
            progress.print(&serde_json::to_string(&line)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks, warms up and times one point.
fn point(comm: &mut Communicator, buffers: &mut RankBuffers, case: &Case, job: &Job) -> anyhow::Result<Line> {
    let n = comm.nranks();
    let moved = case.bytes(n);
    let mine = case.check(comm, buffers)?;
    let [wrong] = member::sums(comm, [mine])?;
    anyhow::ensure!(wrong == 0, "{} of {moved} bytes: {wrong} elements are wrong, {mine} of them here", case.op.name());
    // From zeros on, a sum in place stays finite.
    buffers.zero(moved)?;
    comm.barrier()?;

    // At least one call, then twice as many each time, until rank 0 sees a tenth of the budget gone.
    let budget = job.budget_ms / 1e3;
    let begin = Instant::now();
    let mut done = 0u64;
    let spent = loop {
        for _ in 0..done.max(1) {
            case.issue(comm, buffers)?;
            done += 1;
        }
        let spent = begin.elapsed().as_secs_f64();
        let more = spent < budget / 10.0 && done < job.max_iters / 4;
        if member::decided(comm, u64::from(more))? == 0 {
            break spent;
        }
    };
    let fitting = if spent > 0.0 { budget / (spent / done as f64) } else { job.max_iters as f64 };
    let iters = member::decided(comm, (fitting as u64).clamp(job.min_iters, job.max_iters))?;
    let times = measure::calls(comm, buffers, case, iters as usize)?;
    let round = |us: f64| (us * 1e3).round() / 1e3;
    Ok(Line {
        coll: case.op.name(),
        ranks: n,
        bytes: moved,
        moved,
        iters,
        lat_us_p50: round(times.p50),
        lat_us_min: round(times.min),
        lat_us_p99: round(times.p99),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_compared_name_is_read_back() {
        for (op, n) in NAMES {
            assert_eq!(collective::parse(n), Ok(op));
        }
        assert_eq!(name(Op::Barrier), None);
    }
}
