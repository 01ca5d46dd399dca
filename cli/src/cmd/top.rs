//! `wccl top`: what the ranks on this machine are doing, read from their control segments.
//!
//! A control segment is a memfd, so it has no name in a file system; its descriptor has, under `/proc/PID/fd` of its owner.
//! Segments are mapped read-only: looking disturbs nobody.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use hw_bridge::group::flight::{Counters, Record, State};
use hw_bridge::group::{CONTROL_NAME, Control};
use hw_bridge::memory::segment::Segment;
use hw_bridge::os::process::is_stopped;
use rustix::fs::{Mode, OFlags};

use crate::term::Paint;
use crate::usage::UsageError;

const EXAMPLES: &str = "\
Examples:
  wccl top                     Every second, until interrupted
  wccl top --once              One look
  wccl top --once --flight     With the last operations of every rank: the flight recorder
  wccl top --once --json       For programs

Columns:
  comm      number of the communicator in its process
  ops       operations completed, in all and a second
  copied    GB/s that the rank itself copies; reduced: that it reads to reduce
  waits/s   waits that did not find their condition at once
  calls     component calls of the rank's runtime: flat in the steady state
  doing     the operation under way and since when, or the last one

Exit code: 0, or 1 with --once if there is no rank to look at.";

/// Arguments of `wccl top`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Look once and end
    #[arg(long)]
    once: bool,
    /// Seconds between two looks
    #[arg(short, long, value_name = "S", default_value_t = 1.0, allow_negative_numbers = true)]
    interval: f64,
    /// Ranks of this process only
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// The last operations of every rank too
    #[arg(long)]
    flight: bool,
    /// One JSON object a rank and look
    #[arg(long)]
    json: bool,
}

/// One rank's segment.
struct Seen {
    control: Control,
    /// The process that holds it, as this namespace numbers it.
    pid: u32,
    /// Whether that process is stopped (SIGSTOP, a debugger).
    stopped: bool,
}

/// All control segments that this user may look at.
fn find(pid: Option<u32>) -> BTreeMap<u64, Seen> {
    let mut found: BTreeMap<u64, Seen> = BTreeMap::new();
    let wanted = format!("/memfd:{CONTROL_NAME} (deleted)");
    // Processes end and descriptors close while one looks, and some are other users': all that is passed over.
    let Ok(processes) = std::fs::read_dir("/proc") else { return found };
    for process in processes.flatten() {
        let Ok(number) = process.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(fds) = std::fs::read_dir(process.path().join("fd")) else { continue };
        for fd in fds.flatten() {
            let path = fd.path();
            if !std::fs::read_link(&path).is_ok_and(|l| l.as_os_str() == wanted.as_str()) {
                continue;
            }
            let Ok(file) = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else { continue };
            let Ok(inode) = rustix::fs::fstat(&file).map(|s| s.st_ino) else { continue };
            // A forked child holds its parent's as well; the parent has the lower number, but for a wrap. A service holds
            // those of its clients.
            if pid.is_none_or(|p| p == number)
                && let Some(seen) = view(file, number)
                && (!found.contains_key(&inode) || seen.control.pid() == number)
            {
                found.insert(inode, seen);
            }
        }
    }
    found
}

fn view(file: OwnedFd, pid: u32) -> Option<Seen> {
    let control = Segment::watch(file).and_then(Control::of_anyone).ok()?;
    let stopped = is_stopped(pid);
    Some(Seen { control, pid, stopped })
}

impl Seen {
    fn state(&self) -> String {
        if self.stopped && self.control.alive() { "process stopped".into() } else { self.control.standing() }
    }

    /// What it is doing, or did last.
    fn doing(&self, records: &[(usize, Record)]) -> String {
        let running: Vec<String> = records
            .iter()
            .filter(|(_, r)| r.state == State::Running)
            .map(|(l, r)| format!("{}#{} {} for {:.1?}", stream(*l), r.seq, r.what, r.took))
            .collect();
        if !running.is_empty() {
            return running.join("; ");
        }
        let last = records.iter().max_by_key(|(_, r)| r.start_ns);
        last.map_or("nothing yet".into(), |(l, r)| format!("idle after {}#{} {}", stream(*l), r.seq, r.what))
    }
}

fn stream(lane: usize) -> String {
    if lane == 0 { String::new() } else { format!("stream {} ", lane - 1) }
}

/// Counters of the look before, by memfd.
type Before = BTreeMap<u64, Counters>;

fn rate(now: u64, before: u64, seconds: f64) -> f64 {
    now.saturating_sub(before) as f64 / seconds.max(1e-9)
}

fn table(seen: &BTreeMap<u64, Seen>, before: &Before, seconds: f64, args: &Args, paint: Paint) -> Vec<String> {
    let mut rows: Vec<(&u64, &Seen)> = seen.iter().collect();
    rows.sort_by_key(|(_, s)| (s.control.who().0, s.pid, s.control.comm()));
    let mut lines = vec![paint.bold(&format!(
        "{:>8} {:>5} {:>9} {:>11} {:>10} {:>8} {:>8} {:>9} {:>7}  {}",
        "pid", "comm", "rank", "ops", "ops/s", "copied", "reduced", "waits/s", "calls", "doing"
    ))];
    for (inode, s) in rows {
        let (now, records) = (s.control.counters(), s.control.records());
        let was = before.get(inode).copied().unwrap_or(now);
        let (rank, n) = s.control.who();
        let gb = |now, was| rate(now, was, seconds) / 1e9;
        let alive = !s.stopped && s.control.alive();
        let doing = if alive { s.doing(&records) } else { format!("{}; {}", s.state(), s.doing(&records)) };
        let line = format!(
            "{:>8} {:>5} {:>9} {:>11} {:>10.0} {:>8.2} {:>8.2} {:>9.0} {:>7}  {doing}",
            s.pid,
            s.control.comm(),
            format!("{rank} of {n}"),
            now.ops,
            rate(now.ops, was.ops, seconds),
            gb(now.copied, was.copied),
            gb(now.reduced, was.reduced),
            rate(now.waits, was.waits, seconds),
            s.control.component_calls(),
        );
        lines.push(if alive { line } else { paint.bad(&line) });
        if args.flight {
            lines.extend(records.iter().map(|(l, r)| format!("{:>9}{}{r}", "", stream(*l))));
        }
    }
    lines
}

#[derive(serde::Serialize)]
struct Json {
    pid: u32,
    comm: u64,
    rank: u32,
    ranks: u32,
    state: String,
    doing: String,
    ops: u64,
    ops_per_s: f64,
    copied_bytes: u64,
    reduced_bytes: u64,
    waits: u64,
    naps: u64,
    failures: u64,
    component_calls: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flight: Vec<JsonRecord>,
}

#[derive(serde::Serialize)]
struct JsonRecord {
    lane: usize,
    seq: u64,
    what: String,
    algorithm: &'static str,
    bytes: u64,
    start_ns: u64,
    took_ns: u64,
    state: String,
}

fn json(seen: &BTreeMap<u64, Seen>, before: &Before, seconds: f64, with_flight: bool) -> anyhow::Result<Vec<String>> {
    let line = |(inode, s): (&u64, &Seen)| -> anyhow::Result<String> {
        let (now, records) = (s.control.counters(), s.control.records());
        let was = before.get(inode).copied().unwrap_or(now);
        let (rank, ranks) = s.control.who();
        let record = |(lane, r): &(usize, Record)| JsonRecord {
            lane: *lane,
            seq: r.seq,
            what: r.what.clone(),
            algorithm: hw_bridge::call::ALGORITHMS.get(usize::from(r.algorithm)).copied().unwrap_or("unknown"),
            bytes: r.bytes,
            start_ns: r.start_ns,
            took_ns: r.took.as_nanos() as u64,
            state: format!("{:?}", r.state).to_lowercase(),
        };
        let j = Json {
            pid: s.pid,
            comm: s.control.comm(),
            rank,
            ranks,
            state: s.state(),
            doing: s.doing(&records),
            ops: now.ops,
            ops_per_s: rate(now.ops, was.ops, seconds),
            copied_bytes: now.copied,
            reduced_bytes: now.reduced,
            waits: now.waits,
            naps: now.naps,
            failures: now.failures,
            component_calls: s.control.component_calls(),
            flight: if with_flight { records.iter().map(record).collect() } else { Vec::new() },
        };
        serde_json::to_string(&j).context("writing a rank as JSON")
    };
    seen.iter().map(line).collect()
}

/// Looks, once or until interrupted.
///
/// # Errors
/// [`UsageError`] for an interval that is none; output that nobody reads.
pub fn start(args: &Args) -> anyhow::Result<ExitCode> {
    let interval = Duration::try_from_secs_f64(args.interval).ok().filter(|d| *d >= Duration::from_millis(50));
    let interval = interval
        .ok_or_else(|| UsageError(format!("--interval {}: at least 0.05 seconds are expected", args.interval)))?;
    let paint = Paint::stdout();
    // Rates need two looks; a single look takes its first one a moment before.
    let mut before: Before = find(args.pid).iter().map(|(i, s)| (*i, s.control.counters())).collect();
    let mut since = Instant::now();
    loop {
        std::thread::sleep(if args.once { Duration::from_millis(200) } else { interval });
        let seen = find(args.pid);
        let seconds = since.elapsed().as_secs_f64();
        since = Instant::now();
        let lines = match (seen.is_empty(), args.json) {
            (true, true) => Vec::new(),
            (true, false) => vec![match args.pid {
                Some(pid) => format!("process {pid} is no rank of wccl, or none that this user may look at"),
                None => "no rank of wccl runs on this machine, or none that this user may look at".into(),
            }],
            (false, true) => json(&seen, &before, seconds, args.flight)?,
            (false, false) => table(&seen, &before, seconds, args, paint),
        };
        let mut out = std::io::stdout().lock();
        use std::io::{IsTerminal, Write};
        if !args.once && !args.json && std::io::stdout().is_terminal() {
            write!(out, "\x1b[H\x1b[2J")?;
        }
        for line in &lines {
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        if args.once {
            return Ok(if seen.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        before = seen.iter().map(|(i, s)| (*i, s.control.counters())).collect();
    }
}
