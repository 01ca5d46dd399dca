//! What a neighbour does to a tenant's latency: `cargo xtask isolation`.
//!
//! The victim is a tenant of two ranks that calls `all_reduce` again and again; each call is timed. It is measured alone, then
//! beside one neighbour after another: a tenant of two ranks in the same process, or one whose plugin is hostile. A neighbour is
//! a line in [`NEIGHBOURS`]. Nothing is asserted here: times are printed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sandbox::policy::{Policy, Rate, SharePolicy};
use tests::zoo::Plugin;
use wccl::{CommOptions, Communicator, DataType, Io, ReduceOp, Runtime, RuntimeConfig};

const RANKS: usize = 2;
/// Tenant numbers.
const VICTIM: u64 = 1;
const NEIGHBOUR: u64 = 2;
/// Bytes of the victim's calls: two whose latency matters, and one that wants all the bandwidth it can get.
const CALLS: [usize; 3] = [1 << 10, 64 << 10, 16 << 20];
/// Calls kept of one measurement.
const MOST_CALLS: usize = 1 << 23;

/// Who works beside the victim.
struct Neighbour {
    name: &'static str,
    what: &'static str,
    weight: u32,
    bandwidth: Option<u64>,
    /// Its number; the victim's own puts both into one account, which switches sharing off between them.
    tenant: u64,
    work: Work,
}

enum Work {
    /// What its ranks do until they are aborted; bytes done are added up in the second argument.
    Ranks(fn(Communicator, &AtomicU64) -> Result<()>),
    /// What its plugin does, core WebAssembly text, each time it is asked for an id, which two programs do all the time. It is under
    /// a policy that grants its control plane a part of a core.
    Plugin(&'static str),
}

const FLOOD: Neighbour = Neighbour {
    name: "flood",
    what: "all_reduce of 64 MiB back to back, weight 100 as the victim",
    weight: 100,
    bandwidth: None,
    tenant: NEIGHBOUR,
    work: Work::Ranks(|comm, done| flood(comm, 64 << 20, done)),
};

const NEIGHBOURS: &[Neighbour] = &[
    FLOOD,
    Neighbour {
        name: "flood-16m",
        what: "the same of 16 MiB",
        work: Work::Ranks(|comm, done| flood(comm, 16 << 20, done)),
        ..FLOOD
    },
    Neighbour { name: "flood-light", what: "the flood with weight 25", weight: 25, ..FLOOD },
    Neighbour { name: "flood-heavy", what: "the flood with weight 400", weight: 400, ..FLOOD },
    Neighbour { name: "flood-capped", what: "the flood with a cap of 256 MiB/s", bandwidth: Some(256 << 20), ..FLOOD },
    Neighbour { name: "flood-unshared", what: "the flood with sharing switched off", tenant: VICTIM, ..FLOOD },
    Neighbour {
        name: "hostile-loop",
        what: "a plugin that never comes back from a call",
        work: Work::Plugin("(loop $again (br $again))"),
        ..FLOOD
    },
    Neighbour {
        name: "hostile-trap",
        what: "a plugin that traps at once, and is started again",
        work: Work::Plugin("unreachable"),
        ..FLOOD
    },
    Neighbour {
        name: "hostile-log",
        what: "a plugin that logs without end",
        work: Work::Plugin(
            "(loop $again (call $log.write (i32.const 3) (i32.const 65536) (i32.const 100)) (br $again))",
        ),
        ..FLOOD
    },
    Neighbour {
        name: "hostile-memory",
        what: "a plugin that takes all the memory it may have, and touches it",
        work: Work::Plugin(
            "(loop $more (br_if $more (i32.ne (memory.grow (i32.const 64)) (i32.const -1))))
             (memory.fill (i32.const 65536) (i32.const 1) (i32.const 60000000))",
        ),
        ..FLOOD
    },
    Neighbour {
        name: "hostile-clock",
        what: "a plugin that asks the host for the time without end",
        work: Work::Plugin("(loop $again (drop (call $clock.monotonic-ns)) (br $again))"),
        ..FLOOD
    },
];

/// Latency of a tenant's operations, alone and beside others.
#[derive(Debug, Parser)]
#[command(name = "isolation", max_term_width = 110)]
struct Args {
    /// Only beside this neighbour; may be given again
    #[arg(long, value_name = "NAME")]
    beside: Vec<String>,
    /// How long each measurement takes, seconds
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    seconds: f64,
    /// How long the victim computes between two calls, microseconds
    #[arg(long, value_name = "US", default_value_t = 0)]
    gap: u64,
    /// What a hostile tenant's plugins may use of a core, per cent
    #[arg(long, value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    control_cpu: u32,
    /// Leave it to the kernel where the victim's ranks run, instead of a core for each
    #[arg(long)]
    unbound: bool,
    /// Print the neighbours and end
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        NEIGHBOURS.iter().for_each(|n| println!("{:<16} {}", n.name, n.what));
        return ExitCode::SUCCESS;
    }
    let unknown = args.beside.iter().find(|name| NEIGHBOURS.iter().all(|n| n.name != **name));
    if let Some(name) = unknown {
        eprintln!("isolation: there is no neighbour {name}; --list prints those there are");
        return ExitCode::from(2);
    }
    if !(args.seconds.is_finite() && (0.01..=3600.0).contains(&args.seconds)) {
        eprintln!("isolation: a time from 0.01 to 3600 seconds is expected, not {}", args.seconds);
        return ExitCode::from(2);
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("isolation: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let wanted = |n: &&Neighbour| args.beside.is_empty() || args.beside.iter().any(|name| name == n.name);
    println!("# victim: all_reduce on {RANKS} ranks, weight 100, {} us between calls; times in microseconds", args.gap);
    println!("# x: times the victim alone. GB/s: bytes of the vectors reduced in a second. part: victim / both");
    println!(
        "{:<16} {:>9} {:>8} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7} {:>7} {:>7} {:>5}",
        "beside", "bytes", "calls", "p50", "p99", "p99.9", "x", "x", "x", "GB/s", "its", "part"
    );
    let alone = CALLS.map(|bytes| victim(args, bytes));
    let alone = alone.into_iter().collect::<Result<Vec<_>>>()?;
    for (bytes, times) in CALLS.iter().zip(&alone) {
        row("alone", *bytes, times, times, args.seconds, None);
    }
    for n in NEIGHBOURS.iter().filter(wanted) {
        let done = Arc::new(AtomicU64::new(0));
        if let Work::Plugin(body) = n.work {
            let programs = Hostile::start(n.name, body, args.control_cpu)?;
            for (bytes, alone) in CALLS.iter().zip(&alone) {
                row(n.name, *bytes, &victim(args, *bytes)?, alone, args.seconds, None);
            }
            println!("#   {} calls of it were stopped or failed", programs.end()?);
            continue;
        }
        let Work::Ranks(work) = n.work else { continue };
        let share = SharePolicy { weight: n.weight, bandwidth: n.bandwidth.map(Rate), ..SharePolicy::default() };
        let counted = done.clone();
        let (ready, started) = std::sync::mpsc::channel();
        let ended = Arc::new(AtomicBool::new(false));
        let over = ended.clone();
        let ranks = group(n.name, n.tenant, share, move |comm| {
            let _ = ready.send(comm.abort_token().clone());
            match work(comm, &counted) {
                // It was told to end.
                Err(_) if over.load(Ordering::Acquire) => Ok(()),
                other => other,
            }
        })?;
        let aborts: Vec<_> = (0..RANKS).map_while(|_| started.recv().ok()).collect();
        for (bytes, alone) in CALLS.iter().zip(&alone) {
            let before = done.load(Ordering::Relaxed);
            let times = victim(args, *bytes)?;
            row(n.name, *bytes, &times, alone, args.seconds, Some(done.load(Ordering::Relaxed) - before));
        }
        ended.store(true, Ordering::Release);
        aborts.iter().for_each(|a| a.abort("the measurement is over"));
        join(ranks).with_context(|| format!("the neighbour {}", n.name))?;
    }
    Ok(())
}

/// Programs of a tenant whose plugin is hostile.
struct Hostile {
    ended: Arc<AtomicBool>,
    programs: Vec<JoinHandle<Result<u64>>>,
    folder: PathBuf,
}

impl Hostile {
    fn start(name: &str, body: &str, control_cpu: u32) -> Result<Hostile> {
        let mut plugin = Plugin::lone_rank()?;
        plugin.body("neuron-get-unique-id", format!("{body} unreachable"));
        let folder = std::env::temp_dir().join(format!("wccl-isolation-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join("plugin.wasm"), plugin.build()?)?;
        let text = format!(
            "tenant = \"{name}\"\n[plugins]\ndirectory = {folder:?}\nallow = [{{ file = \"plugin.wasm\" }}]\n\
             [limits]\ncall = \"200 ms\"\nrestarts = 4000000000\nrestart-pause = \"1 ms\"\n[share]\ncontrol-cpu = {control_cpu}\n"
        );
        let policy = Some(Arc::new(Policy::parse(Path::new("hostile.toml"), &text)?));
        let ended = Arc::new(AtomicBool::new(false));
        let programs = (0..RANKS).map(|_| {
            let (policy, ended) = (policy.clone(), ended.clone());
            std::thread::spawn(move || {
                let config = RuntimeConfig { plugin: Some("plugin.wasm".into()), policy, ..RuntimeConfig::default() };
                let runtime = Runtime::open(config)?;
                if let Some(e) = runtime.load_error() {
                    return Err(anyhow!("{}", e.sentinel));
                }
                let mut stopped = 0;
                while !ended.load(Ordering::Acquire) {
                    // It is the plugin that is hostile, not the program: told to wait, it does.
                    if runtime.unique_id(1).is_err() {
                        stopped += 1;
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                Ok(stopped)
            })
        });
        Ok(Hostile { programs: programs.collect(), ended, folder })
    }

    /// Answers how many calls did not come back in good order.
    fn end(self) -> Result<u64> {
        self.ended.store(true, Ordering::Release);
        let stopped = join(self.programs)?.iter().sum();
        std::fs::remove_dir_all(&self.folder)?;
        Ok(stopped)
    }
}

/// One tenant of [`RANKS`] threads.
fn group<R: Send + 'static>(
    name: &str,
    tenant_id: u64,
    share: SharePolicy,
    body: impl Fn(Communicator) -> Result<R> + Clone + Send + 'static,
) -> Result<Vec<JoinHandle<Result<R>>>> {
    let mut config =
        RuntimeConfig { tenant: name.into(), tenant_id, share, hbm_bytes: 1 << 30, ..RuntimeConfig::default() };
    config.vars.insert("CCOM_SOCKET_IFNAME".into(), "lo".into());
    let open = move || {
        let runtime = Runtime::open(config.clone())?;
        match runtime.load_error() {
            Some(e) => Err(anyhow!("{}", e.sentinel)),
            None => Ok(runtime),
        }
    };
    let first = open()?;
    let id = first.unique_id(RANKS)?;
    let mut first = Some(first);
    let ranks = (0..RANKS).map(|rank| {
        let (body, open, mine) = (body.clone(), open.clone(), first.take());
        std::thread::spawn(move || {
            let runtime = mine.map_or_else(open, Ok)?;
            body(runtime.init_comm(CommOptions::with_id(id, rank, RANKS))?)
        })
    });
    Ok(ranks.collect())
}

fn join<R>(ranks: Vec<JoinHandle<Result<R>>>) -> Result<Vec<R>> {
    ranks.into_iter().map(|r| r.join().map_err(|_| anyhow!("a rank panicked"))?).collect()
}

/// Rank 0's times of calls of `bytes`, in nanoseconds, sorted.
fn victim(args: &Args, bytes: usize) -> Result<Vec<u32>> {
    let (gap, length) = (Duration::from_micros(args.gap), Duration::from_secs_f64(args.seconds));
    // The number of the last call. Rank 0 sets it before it enters that call, so that the others know it when they leave it.
    let last = Arc::new(AtomicU64::new(u64::MAX));
    let bound = !args.unbound;
    let ranks = group("victim", VICTIM, SharePolicy::default(), move |mut comm| {
        if bound {
            bind(comm.rank())?;
        }
        let data = comm.allocate(bytes as u64)?;
        let warm_up = if bytes > 1 << 20 { 10 } else { 1000 };
        for _ in 0..warm_up {
            comm.raw().all_reduce(Io::in_place(&data), bytes as u64 / 4, DataType::Fp32, ReduceOp::Sum)?;
        }
        let mut times = Vec::with_capacity(MOST_CALLS);
        let begun = Instant::now();
        for call in 0.. {
            let now = Instant::now();
            if comm.rank() == 0 && (now - begun >= length || times.len() + 1 == MOST_CALLS) {
                last.store(call, Ordering::Release);
            }
            comm.raw().all_reduce(Io::in_place(&data), bytes as u64 / 4, DataType::Fp32, ReduceOp::Sum)?;
            times.push(now.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
            if last.load(Ordering::Acquire) == call {
                break;
            }
            let resume = Instant::now() + gap;
            while Instant::now() < resume {
                std::hint::spin_loop();
            }
        }
        Ok(times)
    })?;
    let mut times = join(ranks).context("the victim")?.swap_remove(0);
    times.sort_unstable();
    Ok(times)
}

/// Binds this thread to the core of its rank, as the launcher binds processes: the kernel leaves two ranks on one core for
/// many milliseconds after a third thread has pushed one off.
fn bind(rank: usize) -> Result<()> {
    let allowed = sched_getaffinity(None)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|c| allowed.is_set(*c)).collect();
    let mut mine = CpuSet::new();
    mine.set(cores[rank % cores.len()]);
    Ok(sched_setaffinity(None, &mine)?)
}

/// Reduces `bytes` again and again.
fn flood(mut comm: Communicator, bytes: u64, done: &AtomicU64) -> Result<()> {
    let data = comm.allocate(bytes)?;
    loop {
        comm.raw().all_reduce(Io::in_place(&data), bytes / 4, DataType::Fp32, ReduceOp::Sum)?;
        if comm.rank() == 0 {
            done.fetch_add(bytes, Ordering::Relaxed);
        }
    }
}

fn row(name: &str, bytes: usize, times: &[u32], alone: &[u32], seconds: f64, neighbour: Option<u64>) {
    let at = |times: &[u32], part: f64| {
        let i = (times.len() as f64 * part) as usize;
        f64::from(times[i.min(times.len() - 1)]) / 1000.0
    };
    let parts = [0.5, 0.99, 0.999];
    let us = parts.map(|p| at(times, p));
    let ratio = parts.map(|p| at(times, p) / at(alone, p));
    let moved = (times.len() * bytes) as f64;
    let (its, part) = neighbour.map_or(("-".into(), "-".into()), |n| {
        (format!("{:.2}", n as f64 / seconds / 1e9), format!("{:.2}", moved / (moved + n as f64)))
    });
    println!(
        "{name:<16} {bytes:>9} {:>8} {:>9.1} {:>9.1} {:>9.1} {:>7.1} {:>7.1} {:>7.1} {:>7.2} {its:>7} {part:>5}",
        times.len(),
        us[0],
        us[1],
        us[2],
        ratio[0],
        ratio[1],
        ratio[2],
        moved / seconds / 1e9
    );
}
