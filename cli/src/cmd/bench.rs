//! `wccl bench`: measures collectives, with the options of nccom-test and nccl-tests, and checks what it measures.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::ArgAction;
use hw_bridge::call::Op;
use serde::{Deserialize, Serialize};
use wccl::{DataType, ReduceOp};

use crate::cmd::sweep::Sweep;
use crate::cmd::worker::{self, Ranks};
use crate::cmd::{explain, peer, pingpong, tune};
use crate::page::plot;
use crate::rank::collective::{self, BufferMemory, RankBuffers};
use crate::rank::measure::{self, Times, number};
use crate::rank::member;
use crate::size;
use crate::term::{Paint, ProgressLine};
use crate::usage::UsageError;

const EXAMPLES: &str = "\
Examples:
  wccl bench                                       all_reduce from 8 B to 32 MiB with four ranks
  wccl bench -r 2 -b 1K -e 64M -f 4 allreduce allgather redsct
  wccl bench -r 8 -b 1M -e 1M -n 100 -w 20 -d bf16 -o max allr
  wccl bench --buffers host --in-place allgather
  wccl bench --report-to-json-file report.json alltoall
  wccl bench -r 2 --plot plot.html --peer-results peers.json allreduce
  wccl bench --tune wccl.table --tune-ranks 2,4 -b 8 -e 64M -f 4 allreduce allgather
  wccl bench --explain -b 8 -e 64M -f 8 allreduce
  wccl bench --pingpong -r 2 -b 8 -e 1M -f 8 --buffers host

Sizes are bytes of the larger of one rank's buffers, as in nccl-tests; K, M, G and T are powers of 1024; in the table, GB is 10^9 bytes. \
Times are the slowest rank's mean over the timed calls, which follow one another without a barrier.
Exit code: 0 if every element was right (or -c 0), else 1.";

/// Arguments of `wccl bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Collectives: allreduce, allgather, reduce_scatter, broadcast, reduce, alltoall, sendrecv, barrier, allgatherv,
    /// reduce_scatter_v, alltoallv, gather, scatter, permute, group; and the short names of nccom-test (allr, allg, redsct,
    /// ...)
    #[arg(value_name = "COLLECTIVE", default_value = "allreduce", value_parser = collective::parse)]
    collectives: Vec<Op>,
    #[command(flatten)]
    ranks: Ranks,
    /// Smallest size
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "8", value_parser = size::parse)]
    minbytes: u64,
    /// Largest size
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "32M", value_parser = size::parse)]
    maxbytes: u64,
    /// Factor from one size to the next
    #[arg(short = 'f', long, value_name = "N", default_value_t = 2, conflicts_with = "stepbytes")]
    stepfactor: u64,
    /// Bytes from one size to the next, instead of a factor
    #[arg(short = 'i', long, value_name = "SIZE", value_parser = size::parse)]
    stepbytes: Option<u64>,
    /// Element type: fp32, bf16, fp16, fp8_e3, fp8_e4, fp8_e5, int8 ... int64, uint8 ... uint64
    #[arg(short, long, value_name = "TYPE", default_value = "fp32")]
    datatype: DataType,
    /// Reduction: sum, prod, max, min, avg
    #[arg(short = 'o', long = "op", value_name = "REDOP", default_value = "sum")]
    op: ReduceOp,
    /// Timed calls of each size
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    iters: u32,
    /// Calls before the timed ones
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=10_000_000))]
    warmup: u32,
    /// Check every element of one call of each size: 1 or 0
    #[arg(short, long, value_name = "0|1", default_value = "1", action = ArgAction::Set)]
    #[arg(value_parser = clap::builder::BoolishValueParser::new(), hide_possible_values = true)]
    check: bool,
    /// Root of broadcast, reduce, gather and scatter
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    root: u64,
    /// Input and output in the same memory (sendrecv, permute, alltoallv, group and barrier have no such form)
    #[arg(long)]
    in_place: bool,
    /// Where the buffers lie
    #[arg(long, value_enum, default_value = "hbm")]
    buffers: BufferMemory,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    report_to_json_file: Option<PathBuf>,
    /// Draw bus bandwidth against size into this file, one HTML page
    #[arg(long, value_name = "FILE", conflicts_with_all = ["peer", "tune", "explain"])]
    plot: Option<PathBuf>,
    /// Results to draw beside: of a comparison with other libraries, or a report of this program; may be repeated
    #[arg(long, value_name = "FILE", requires = "plot")]
    peer_results: Vec<PathBuf>,
    /// Print which algorithm would be used, what it would do and why, instead of measuring: -n, -w and -c may stay and
    /// mean nothing
    #[arg(long, conflicts_with_all = ["peer", "tune", "report_to_json_file"])]
    explain: bool,
    /// Send a message from rank 0 to rank 1 and back, and print half of the round, instead of a collective
    #[arg(long, conflicts_with_all = ["peer", "tune", "explain", "report_to_json_file", "plot"])]
    pingpong: bool,
    #[command(flatten)]
    tune: tune::Args,
    #[command(flatten)]
    peer: peer::Args,
}

/// What a rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    sweep: Sweep,
    iters: u32,
    warmup: u32,
    check: bool,
    memory: BufferMemory,
    report: Option<PathBuf>,
    plot: Option<PathBuf>,
    peer_results: Vec<PathBuf>,
}

/// One line of the table, as it goes into the report.
#[derive(Debug, Serialize)]
struct Row {
    collective: &'static str,
    bytes: u64,
    count: u64,
    datatype: &'static str,
    redop: &'static str,
    root: i64,
    in_place: bool,
    time_us: Times,
    algbw_gbps: f64,
    busbw_gbps: f64,
    wrong: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    program: &'static str,
    version: &'static str,
    ranks: usize,
    buffers: BufferMemory,
    iters: u32,
    warmup: u32,
    unit: &'static str,
    results: &'a [Row],
}

/// Starts the ranks.
///
/// # Errors
/// [`UsageError`] for options that do not fit together; a rank failed, or found wrong elements.
pub fn start(args: &Args, log: Option<&str>) -> anyhow::Result<ExitCode> {
    if let Some(op) = args.collectives.iter().find(|op| args.in_place && !op.facts().has_in_place) {
        let with: Vec<&str> = Op::ALL.into_iter().filter(|op| op.facts().has_in_place).map(Op::name).collect();
        let (name, with) = (op.name(), with.join(", "));
        return Err(UsageError(format!("--in-place: {name} has no in-place form; those that have one: {with}")).into());
    }
    if args.buffers == BufferMemory::Host && args.collectives.contains(&Op::Group) {
        return Err(
            UsageError("--buffers host: group moves device memory only; leave it out, or use alltoall".into()).into()
        );
    }
    if args.root >= args.ranks.ranks {
        let (root, n) = (args.root, args.ranks.ranks);
        return Err(UsageError(format!("--root {root} is not one of the {n} ranks; use 0 to {}", n - 1)).into());
    }
    // A file that cannot be used is said before anything is measured.
    plot::Others::read(&args.peer_results, args.ranks.ranks as usize)?;
    args.report_to_json_file.iter().chain(&args.plot).try_for_each(|file| plot::can_write(file))?;
    let factor = args.stepbytes.is_none().then_some(args.stepfactor);
    let sweep = Sweep {
        collectives: args.collectives.iter().map(|c| c.name().to_string()).collect(),
        sizes: size::sweep(args.minbytes, args.maxbytes, factor, args.stepbytes).map_err(UsageError)?,
        dtype: args.datatype.name().into(),
        redop: args.op.name().into(),
        root: args.root as usize,
        in_place: args.in_place,
    };
    let memories: Vec<BufferMemory> = match args.tune.file() {
        Some(_) => args.tune.memories().to_vec(),
        None if args.explain => Vec::new(),
        None => vec![args.buffers],
    };
    let largest = if args.peer.is_wanted() { args.peer.largest() } else { args.maxbytes };
    let most = args.tune.most_ranks().unwrap_or(args.ranks.ranks);
    room(largest, most, &memories).map_err(anyhow::Error::msg)?;
    if let Some(file) = args.tune.file() {
        let job = tune::Job {
            sweep,
            iters: args.iters,
            warmup: args.warmup,
            check: args.check,
            memories: Vec::new(),
            out: PathBuf::new(),
        };
        return args.tune.start(file, &args.ranks, job, log);
    }
    let job = if args.pingpong {
        if args.ranks.ranks < 2 {
            return Err(UsageError("--pingpong: a message needs two ranks; use -r 2".into()).into());
        }
        let (iters, warmup, memory) = (args.iters, args.warmup, args.buffers);
        worker::Job::PingPong(pingpong::PingJob { sizes: sweep.sizes, iters, warmup, memory })
    } else if args.peer.is_wanted() {
        worker::Job::Peer(args.peer.job(args.buffers)?)
    } else if args.explain {
        if let Some(op) = args.collectives.iter().find(|op| op.facts().by_lists) {
            let name = op.name();
            return Err(UsageError(format!(
                "--explain: {name} is scheduled by the lists of a call, which are not known here"
            ))
            .into());
        }
        worker::Job::Explain(explain::Job { sweep, memory: args.buffers })
    } else {
        worker::Job::Bench(Job {
            sweep,
            iters: args.iters,
            warmup: args.warmup,
            check: args.check,
            memory: args.buffers,
            report: args.report_to_json_file.clone(),
            plot: args.plot.clone(),
            peer_results: args.peer_results.clone(),
        })
    };
    worker::launch(&args.ranks, &job, log)?;
    Ok(ExitCode::SUCCESS)
}

/// Whether `n` ranks can have their buffers for cases of up to `bytes`: what all of them count fits in 63 bits, and what lies in
/// private memory is there to be had.
///
/// # Errors
/// A sentence that says what is needed and what there is.
fn room(bytes: u64, n: u64, memories: &[BufferMemory]) -> Result<(), String> {
    let of = |b: u64| format!("{} for each of {n} rank{}", size::short(b), if n == 1 { "" } else { "s" });
    let all = bytes.checked_add(collective::RIM).and_then(|b| b.checked_mul(2 * n)).filter(|b| *b <= i64::MAX as u64);
    let all = all.ok_or_else(|| format!("{} is more than 2^63 bytes in all; ask for less", of(bytes)))?;
    match hw_bridge::os::exhausted::memory_left() {
        Some((left, who)) if memories.contains(&BufferMemory::Host) && all > left => Err(format!(
            "{} in host memory, an input and an output, are {all} bytes in all, and {left} {who}; ask for less by -e or -r",
            of(bytes)
        )),
        _ => Ok(()),
    }
}

/// One rank.
///
/// # Errors
/// Joining or a collective failed, or the report cannot be written.
pub fn work(job: &Job, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let first = rank == 0;
    let paint = Paint::stdout();
    let progress = ProgressLine::start(first, "loading the plugin and joining the group");
    let say = |text: &str| if first { progress.print(text) } else { Ok(()) };
    let mut m = member::join(rank, n)?;

    say(&format!(
        "# {}; {} warm-up and {} timed calls a size; GB is 10^9 bytes",
        job.sweep.about(n, job.memory),
        job.warmup,
        job.iters
    ))?;
    let mut rows: Vec<Row> = Vec::new();
    let mut wrong = 0;
    for (op, cases) in job.sweep.cases(n)? {
        say("#")?;
        say(&paint.bold(&format!("# {}", op.name())))?;
        say(&paint.bold(&format!(
            "#{:>12}{:>13}{:>8}{:>7}{:>6}{:>11}{:>9}{:>9}{:>8}",
            "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"
        )))?;
        say(&paint.dim(&format!(
            "#{:>12}{:>13}{:>8}{:>7}{:>6}{:>11}{:>9}{:>9}",
            "(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)"
        )))?;
        let largest = cases.iter().map(|c| c.bytes(n)).max().unwrap_or(0);
        progress.phase(&format!("{}: getting memory", op.name()));
        let mut buffers = RankBuffers::new(&m.comm, job.memory, largest)?;
        for case in &cases {
            let bytes = case.bytes(n);
            progress.phase(&format!("{} of {}", op.name(), size::short(bytes)));
            let mut bad = None;
            if job.check {
                let mine = case.check(&mut m.comm, &mut buffers)?;
                let [all] = member::sums(&mut m.comm, [mine])?;
                wrong += all;
                bad = Some(all);
            }
            // From zeros on, a sum in place stays finite.
            buffers.zero(bytes)?;
            for _ in 0..job.warmup {
                case.issue(&mut m.comm, &mut buffers)?;
            }
            let times = measure::calls(&mut m.comm, &mut buffers, case, job.iters as usize)?;
            let (alg, bus) = collective::bandwidth(op, bytes, n, times.mean);
            let shown = bad.map_or("N/A".into(), |b| b.to_string());
            let pad = " ".repeat(8usize.saturating_sub(shown.len()));
            let shown = if bad.is_some_and(|b| b > 0) { paint.bad(&shown) } else { shown };
            say(&format!(
                " {:>12}{:>13}{:>8}{:>7}{:>6}{:>11}{:>9}{:>9}{pad}{shown}",
                bytes,
                case.count,
                case.dtype.name(),
                case.redop_name(),
                case.root_number(),
                number(times.mean),
                number(alg),
                number(bus)
            ))?;
            rows.push(Row {
                collective: op.name(),
                bytes,
                count: case.count,
                datatype: case.dtype.name(),
                redop: case.redop_name(),
                root: case.root_number(),
                in_place: case.in_place,
                time_us: times,
                algbw_gbps: alg,
                busbw_gbps: bus,
                wrong: bad,
            });
        }
    }
    if first && let Some(path) = &job.report {
        let report = Report {
            program: "wccl",
            version: env!("CARGO_PKG_VERSION"),
            ranks: n,
            buffers: job.memory,
            iters: job.iters,
            warmup: job.warmup,
            unit: "time_us in microseconds of the slowest rank; bandwidths in 10^9 bytes per second, from the mean",
            results: &rows,
        };
        let text = serde_json::to_string_pretty(&report).context("writing the report")?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing the report to {}", path.display()))?;
    }
    if first && let Some(path) = &job.plot {
        draw(path, job, n, &rows)?;
    }
    say("#")?;
    match (job.check, wrong) {
        (false, _) => say("# not checked (-c 0)")?,
        (true, 0) => say(&format!("# {}", paint.good("OK: 0 elements wrong")))?,
        (true, w) => say(&format!("# {}", paint.bad(&format!("FAILED: {w} elements wrong"))))?,
    }
    // One rank fails for all, so that it is said once.
    Ok(if wrong > 0 && first { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Draws what was measured beside what others reach.
fn draw(path: &Path, job: &Job, n: usize, rows: &[Row]) -> anyhow::Result<()> {
    let others = plot::Others::read(&job.peer_results, n)?;
    let mut measured: Vec<(Op, Vec<(u64, f64)>)> = Vec::new();
    for row in rows {
        let op = collective::parse(row.collective).map_err(anyhow::Error::msg)?;
        if measured.last().is_none_or(|m| m.0 != op) {
            measured.push((op, Vec::new()));
        }
        if let Some((_, points)) = measured.last_mut() {
            // The median, as comparisons take it.
            points.push((row.bytes, collective::bandwidth(op, row.bytes, n, row.time_us.p50).1));
        }
    }
    let about = format!(
        "{}; {} timed calls a size, the slowest rank's median. GB is 10^9 bytes.{}",
        job.sweep.about(n, job.memory),
        job.iters,
        if job.peer_results.is_empty() {
            ""
        } else {
            " Others and limits: the best of their launches, from the files given."
        }
    );
    let panels = plot::panels(&format!("this run, {}", job.memory.name()), measured, &others);
    plot::write_whole(path, &plot::page(&format!("wccl: bus bandwidth on {n} ranks"), &about, &panels))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_what_all_ranks_need_together() {
        assert_eq!(room(32 << 20, 1, &[BufferMemory::Hbm, BufferMemory::Host]), Ok(()));
        // Address space of the device is the runtime's to refuse.
        assert_eq!(room(10 << 40, 4, &[BufferMemory::Hbm]), Ok(()));
        let e = room(10 << 40, 4, &[BufferMemory::Host]).unwrap_err();
        assert!(
            e.starts_with("10T for each of 4 ranks in host memory") && e.contains("are 87960930222592 bytes"),
            "{e}"
        );
        for (bytes, n) in [(u64::MAX, 1), (u64::MAX / 2, 2), (1 << 58, 64)] {
            assert!(room(bytes, n, &[]).unwrap_err().contains("more than 2^63 bytes in all"), "{bytes} on {n}");
        }
    }
}
