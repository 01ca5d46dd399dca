//! `wccl demo`: what a newcomer sees. Ranks load the plugin, bootstrap, build rings, run every collective; every element of
//! every result is compared with a reference that was computed without the runtime. Then the second act ([`act_two`]).

use std::process::ExitCode;
use std::time::{Duration, Instant};

use hw_bridge::call::Op;
use serde::{Deserialize, Serialize};
use wccl::{Communicator, DataType, ReduceOp};

use crate::cmd::act_two;
use crate::cmd::worker::{self, Ranks};
use crate::rank::collective::{self, BufferMemory, Case, RankBuffers};
use crate::rank::measure::{self, number};
use crate::rank::member;
use crate::rank::member::JoinedRank;
use crate::term::{self, Paint, ProgressLine};

/// Time of the timed calls of one row.
const ROW: Duration = Duration::from_millis(60);
/// Most timed calls of one row.
const MOST_CALLS: u64 = 1000;
/// Elements of the calls that are only checked: none, one, odd ones, and more than a piece of staging.
const COUNTS: [u64; 7] = [0, 1, 3, 127, 1000, 4099, 150_001];
/// Pairs of type and reduction for each place, memory and count.
const PAIRS: usize = 4;
/// Bytes of the rows, and what they hold.
const ROWS: [(u64, DataType, ReduceOp, BufferMemory, bool); 5] = [
    (1 << 10, DataType::Fp32, ReduceOp::Sum, BufferMemory::Hbm, false),
    (64 << 10, DataType::Bf16, ReduceOp::Max, BufferMemory::Hbm, true),
    (4 << 20, DataType::Fp32, ReduceOp::Sum, BufferMemory::Hbm, false),
    (1 << 10, DataType::Int64, ReduceOp::Prod, BufferMemory::Host, false),
    (1 << 20, DataType::Fp16, ReduceOp::Avg, BufferMemory::Host, true),
];
/// Room for the largest row.
const LARGEST: u64 = 4 << 20;

const EXAMPLES: &str = "\
Examples:
  wccl demo                 Four ranks
  wccl demo --ranks 16      More ranks than cores work as well
  wccl demo --algo ring     Every collective that can, on the rings the plugin planned

Exit code: 0 if every element was right, else 1.";

/// Arguments of `wccl demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    ranks: Ranks,
}

/// What a rank of the demo needs to know.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Job {}

/// Starts the ranks.
///
/// # Errors
/// A rank failed, or found wrong elements.
pub fn start(args: &Args, log: Option<&str>) -> anyhow::Result<ExitCode> {
    worker::launch(&args.ranks, &worker::Job::Demo(Job {}), log)?;
    let right = act_two::run(args.ranks.plugin.as_deref())?;
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One rank.
///
/// # Errors
/// Joining or a collective failed.
pub fn work(_: &Job, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let first = rank == 0;
    let paint = Paint::stdout();
    let progress = ProgressLine::start(first, "loading the plugin and joining the group");
    let say = |text: &str| if first { progress.print(text) } else { Ok(()) };
    let mut m = member::join(rank, n)?;
    if first {
        for line in introduction(&m)? {
            progress.print(&line)?;
        }
    }

    let planned = m.runtime.component_calls();

    // The first call compiles the first schedule, and with more than three ranks the plugin connects those that are no
    // ring neighbours, once.
    progress.phase("first call");
    m.comm.barrier()?;
    member::sums(&mut m.comm, [0])?;
    let warm = m.runtime.component_calls();
    let mut hbm = RankBuffers::new(&m.comm, BufferMemory::Hbm, LARGEST)?;
    let mut host = RankBuffers::new(&m.comm, BufferMemory::Host, LARGEST)?;
    let mut wrong = 0;

    say("")?;
    say(&paint.bold(&format!(
        "{:<17}{:>9}{:>9}  {:<7}{:>5}{:>5}  {:<5}{:<4}{:>10}{:>9}{:>9}{:>8}",
        "collective", "size", "count", "type", "redop", "root", "mem", "io", "time", "algbw", "busbw", "#wrong"
    )))?;
    let units = ["(B)", "(elem)", "(us)", "(GB/s)", "(GB/s)"];
    say(&paint.dim(&format!(
        "{:<17}{:>9}{:>9}{:>40}{:>9}{:>9}    GB is 10^9 bytes",
        "", units[0], units[1], units[2], units[3], units[4]
    )))?;
    for op in Op::ALL {
        progress.phase(&format!("running {}", op.name()));
        for (i, (bytes, dtype, redop, memory, in_place)) in ROWS.into_iter().enumerate() {
            if op == Op::Barrier && i > 0 || op == Op::Group && memory == BufferMemory::Host {
                continue;
            }
            let mut case = Case::of_bytes(op, dtype, redop, bytes, n);
            case.root = if op.facts().has_root { i % n } else { 0 };
            case.in_place = in_place && op.facts().has_in_place;
            case.seed = i as u64;
            let buffers = if memory == BufferMemory::Hbm { &mut hbm } else { &mut host };
            let (line, bad) = row(&mut m.comm, buffers, &case, memory, paint)?;
            wrong += bad;
            say(&line)?;
        }
    }

    say("")?;
    say(&paint.bold("Checked besides, each element of each result:"))?;
    for op in Op::ALL {
        progress.phase(&format!("checking {}", op.name()));
        let cases = matrix(op, n);
        let mut bad = 0;
        for (memory, case) in &cases {
            let buffers = if *memory == BufferMemory::Hbm { &mut hbm } else { &mut host };
            let mine = case.check(&mut m.comm, buffers)?;
            if mine > 0 {
                tracing::error!(rank, memory = memory.name(), ?case, "{mine} elements are wrong");
            }
            bad += mine;
        }
        let [bad] = member::sums(&mut m.comm, [bad])?;
        wrong += bad;
        say(&format!(
            "  {:<17}{:>4} calls: {:<60} #wrong {}",
            op.name(),
            cases.len(),
            what(op, &cases),
            tell(bad, paint)
        ))?;
    }

    let end = m.runtime.component_calls();
    let ops = m.comm.counters().ops;
    let [init, once, during, ops] = member::sums(&mut m.comm, [planned, warm - planned, end - warm, ops])?;
    say("")?;
    let moved = if during == 0 { paint.good("0") } else { paint.bad(&during.to_string()) };
    say(&format!(
        "component calls (all ranks): {init} to load, bootstrap and plan; {once} in the first call; {moved} in the {ops} operations after"
    ))?;
    if wrong == 0 {
        say(&paint.good(&format!(
            "OK: every element of every result is right on {}",
            if n == 1 { "the one rank".into() } else { format!("all {n} ranks") }
        )))?;
        return Ok(ExitCode::SUCCESS);
    }
    say(&paint.bad(&format!("FAILED: {wrong} elements are wrong")))?;
    // One rank fails for all, so that it is said once.
    Ok(if first { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn tell(wrong: u64, paint: Paint) -> String {
    if wrong == 0 { paint.good("0") } else { paint.bad(&wrong.to_string()) }
}

/// What happened until all ranks had joined.
fn introduction(m: &JoinedRank) -> anyhow::Result<Vec<String>> {
    let device = &m.runtime.tenant().device;
    let n = m.comm.nranks();
    let ranks = if n == 1 { "one rank, a process".into() } else { format!("{n} ranks, each a process") };
    let mut lines = vec![format!(
        "server   modelled {}: {} devices, {} logical cores, {} NICs; {ranks} on a core of its own",
        term::instance_type(device),
        device.device_count(),
        device.total_vnc_count(),
        device.nics().len()
    )];
    if let Some(path) = &m.runtime.config().plugin {
        let bytes = sandbox::load::read(path).map_err(anyhow::Error::msg)?;
        let hash = sandbox::load::cache::content_hash(&bytes);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let v = m.runtime.forward().version_info()?;
        let [major, minor, patch, maintenance] = v.numbers;
        let entries = m.runtime.forward().slots().iter().filter(|s| **s).count();
        lines.push(format!(
            "plugin   {name} {major}.{minor}.{patch}.{maintenance}, a sandboxed component of {} bytes, sha256 {}",
            bytes.len(),
            &hash[..16]
        ));
        lines.push(format!("         {entries}/37 entries, compatibility {}", v.compatibility));
    }
    lines.push(format!("group    joined in {:.0} ms on rank 0, plugin load included", m.init.as_secs_f64() * 1e3));
    let rings = m.comm.rings();
    lines.push(match rings.first() {
        None => "rings    none planned".into(),
        Some(first) => {
            let order: Vec<String> = first.iter().map(usize::to_string).collect();
            format!("rings    {} planned by the plugin, the first is {}", rings.len(), order.join(" > "))
        }
    });
    Ok(lines)
}

/// Checks a case, times it, and answers its line of the table and the wrong elements of all ranks.
fn row(
    comm: &mut Communicator,
    buffers: &mut RankBuffers,
    case: &Case,
    memory: BufferMemory,
    paint: Paint,
) -> anyhow::Result<(String, u64)> {
    let n = comm.nranks();
    let bad = case.check(comm, buffers)?;
    let [bad] = member::sums(comm, [bad])?;
    buffers.zero(case.bytes(n))?;
    let begin = Instant::now();
    let warm = 3;
    for _ in 0..warm {
        case.issue(comm, buffers)?;
    }
    let fitting = ROW.as_nanos() / (begin.elapsed().as_nanos() / warm).max(1);
    let iters = member::decided(comm, (fitting as u64).clamp(3, MOST_CALLS))?;
    let times = measure::calls(comm, buffers, case, iters as usize)?;
    let bytes = case.bytes(n);
    let (alg, bus) = collective::bandwidth(case.op, bytes, n, times.mean);
    let barrier = case.op == Op::Barrier;
    let dash = |s: String| if barrier { "-".to_string() } else { s };
    let line = format!(
        "{:<17}{:>9}{:>9}  {:<7}{:>5}{:>5}  {:<5}{:<4}{:>10}{:>9}{:>9}{}{}",
        case.op.name(),
        dash(bytes.to_string()),
        dash(case.count.to_string()),
        dash(case.dtype.to_string()),
        case.redop_name(),
        if case.op.facts().has_root { case.root.to_string() } else { "-".into() },
        dash(memory.name().into()),
        dash(if case.in_place { "in".into() } else { "out".into() }),
        number(times.mean),
        dash(number(alg)),
        dash(number(bus)),
        " ".repeat(8usize.saturating_sub(bad.to_string().len())),
        tell(bad, paint)
    );
    Ok((line, bad))
}

/// The calls that are only checked: both memories, out of place and in place, every count, and in turn every type, every
/// reduction and every root.
fn matrix(op: Op, n: usize) -> Vec<(BufferMemory, Case)> {
    if op == Op::Barrier {
        let case = Case::of_bytes(op, DataType::Uint8, ReduceOp::Sum, 0, n);
        return vec![(BufferMemory::Hbm, case); 8];
    }
    let places: &[bool] = if op.facts().has_in_place { &[false, true] } else { &[false] };
    let mut cases = Vec::new();
    for memory in memories(op) {
        for in_place in places {
            for count in COUNTS {
                for _ in 0..PAIRS {
                    let turn = cases.len();
                    // 15 types and 5 reductions: taken from the quotient, every pair gets its turn.
                    let dtype = DataType::ALL[turn % 15];
                    let redop = ReduceOp::ALL[(turn / 15 + turn) % 5];
                    let mut case = Case::of_bytes(op, dtype, redop, 0, n);
                    // Large ones are kept within the buffers, and odd.
                    let most = LARGEST / dtype.size() as u64 / n as u64 / 2;
                    case.count = if count > most { most | 1 } else { count };
                    case.root = if op.facts().has_root { turn % n } else { 0 };
                    case.in_place = *in_place;
                    case.seed = 1000 + turn as u64;
                    cases.push((*memory, case));
                }
            }
        }
    }
    cases
}

/// Kinds of memory a collective takes.
fn memories(op: Op) -> &'static [BufferMemory] {
    if op == Op::Group { &[BufferMemory::Hbm] } else { &[BufferMemory::Hbm, BufferMemory::Host] }
}

/// What a matrix covers, in words.
fn what(op: Op, cases: &[(BufferMemory, Case)]) -> String {
    if op == Op::Barrier {
        return String::new();
    }
    let different = |key: fn(&Case) -> u64| {
        let mut seen: Vec<u64> = cases.iter().map(|(_, c)| key(c)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    let types = different(|c| u64::from(c.dtype.nrt())).len();
    let pairs = different(|c| u64::from(c.dtype.nrt()) << 8 | c.redop as u64).len();
    let most = different(|c| c.count).last().copied().unwrap_or(0);
    let kinds = if op.facts().reduces { format!("{pairs} type x redop pairs") } else { format!("{types} types") };
    let places = if op.facts().has_in_place { ", in and out of place" } else { "" };
    let host = if op == Op::Group { "" } else { " and host" };
    format!("{kinds}, 0 to {most} elements, hbm{host}{places}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_covers_every_pair_place_memory_and_count_and_fits() {
        for n in [1, 2, 3, 4, 16, 64] {
            for op in Op::ALL {
                let cases = matrix(op, n);
                for (_, c) in &cases {
                    assert!(c.bytes(n) <= LARGEST, "{c:?}");
                }
                if op == Op::Barrier {
                    continue;
                }
                for memory in memories(op) {
                    assert!(cases.iter().any(|(m, c)| m == memory && c.count == 0));
                    assert!(cases.iter().any(|(m, c)| m == memory && c.count % 2 == 1 && c.count > 4000));
                    assert!(!op.facts().has_in_place || cases.iter().any(|(m, c)| m == memory && c.in_place));
                }
                for d in DataType::ALL {
                    assert!(cases.iter().any(|(_, c)| c.dtype == d && c.count > 0));
                    for r in ReduceOp::ALL {
                        assert!(
                            !op.facts().reduces || cases.iter().any(|(_, c)| c.dtype == d && c.redop == r),
                            "{op:?} {d} {r}"
                        );
                    }
                }
            }
        }
    }
}
