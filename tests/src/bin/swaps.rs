//! Swaps under load: four ranks run all-reduce without a pause and check every element, while their transport is swapped
//! back and forth between two releases. `swaps [N]`, 1,000 by default. Prints what the swaps cost; exit code 1 if an
//! operation was lost or an element wrong.
//!
//! busbw before and after is compared by a second group, which is never swapped: one rests while the other runs, in turns, and
//! what counts is the median of the pairs' ratios. Ranks of both are bound to cores in the same way: which ones share a core
//! is worth a factor of two. So neither the machine nor its scheduler counts as the swaps' doing.

use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use wccl::RuntimeConfig;
use wccl_cli::rank::load;

const RANKS: usize = 4;
/// 64 KiB a message.
const COUNT: usize = 16 << 10;
/// Rounds between two swaps.
const ROUNDS: u64 = 3;
/// Pairs of windows that busbw is measured in.
const PAIRS: usize = 41;
/// Rounds of a window, and those before it after a rest.
const MEASURED: u64 = 200;
const WAKING: u64 = 20;
/// Swaps until memory is counted as grown.
const WARM: usize = 20;

fn main() -> Result<ExitCode> {
    let swaps: usize = match std::env::args().nth(1) {
        Some(n) => n.parse().with_context(|| format!("{n}: a number of swaps was expected"))?,
        None => 1000,
    };
    // A tenant of its own: whoever else runs on this machine is left alone.
    let tenant = format!("swaps.{}", std::process::id());
    let config = RuntimeConfig { tenant, ..RuntimeConfig::from_env()? };
    let first = config.plugin.clone().context("there is no plugin: run `cargo xtask guests`")?;
    let releases = [first.clone(), first.with_file_name("nccom-next.wasm")];
    let group = load::Load::start(&config, RANKS, COUNT)?;
    let unswapped = RuntimeConfig { tenant: format!("kept.{}", std::process::id()), ..config };
    let beside = load::Load::start(&unswapped, RANKS, COUNT)?;
    let ran = (|| -> Result<_> {
        group.go_on(MEASURED)?;
        beside.go_on(MEASURED)?;
        bind()?;
        beside.rest()?;
        let before = compare(&group, &beside)?;
        let mut memory = [0; 2];
        let mut pauses = Vec::with_capacity(swaps);
        for i in 0..swaps {
            if i == WARM.min(swaps / 2) {
                memory[0] = resident()?;
            }
            pauses.push(group.swap(&releases[(i + 1) % 2])?);
            group.go_on(ROUNDS)?;
        }
        memory[1] = resident()?;
        if swaps % 2 == 1 {
            group.swap(&releases[0])?;
        }
        Ok((before, compare(&group, &beside)?, memory, pauses))
    })();
    // A rank that failed says why, which is more than that it did not come.
    let all = group.stop()?;
    beside.stop()?;
    let (before, after, memory, mut pauses) = ran?;
    let (lost, wrong) = load::lost_and_wrong(&all);
    println!(
        "pause    p50 {:.2} ms, p99 {:.2} ms",
        load::percentile_ms(&mut pauses, 50),
        load::percentile_ms(&mut pauses, 99)
    );
    println!("memory   resident {} KiB after {} swaps, {} KiB at the end", memory[0], WARM.min(swaps / 2), memory[1]);
    let told = |(busbw, beside): (f64, f64)| format!("{busbw:.3} GB/s, {beside:.3} x a group that is not swapped");
    println!("busbw    before {}; after {} ({:.3} x)", told(before), told(after), after.1 / before.1);
    println!("swaps: {swaps} swaps, {} operations, {lost} lost, {wrong} wrong", all[0].done);
    Ok(if lost + wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Binds each rank of both groups to a core, in turn. Their threads are named after them: `swaps.PID-RANK`.
fn bind() -> Result<()> {
    let may = sched_getaffinity(None).context("asking for the cores of this process")?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|c| may.is_set(*c)).collect();
    let mut bound = 0;
    for task in std::fs::read_dir("/proc/self/task").context("listing the threads")? {
        let path = task?.path();
        // One that has ended meanwhile is no rank.
        let name = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        let rank = name.trim().rsplit_once('-').filter(|(of, _)| of.starts_with("swaps.") || of.starts_with("kept."));
        let Some(rank) = rank.and_then(|(_, rank)| rank.parse::<usize>().ok()) else { continue };
        let thread = path.file_name().and_then(|n| n.to_str()?.parse().ok()).and_then(Pid::from_raw);
        let mut core = CpuSet::new();
        core.set(cores[rank % cores.len()]);
        sched_setaffinity(thread, &core).context("binding a rank to a core")?;
        bound += 1;
    }
    ensure!(bound == 2 * RANKS, "{bound} threads of ranks were found, {} were expected", 2 * RANKS);
    Ok(())
}

/// Medians of `group`'s busbw, GB/s, and of its ratio to that of `beside`, which rests before and after.
fn compare(group: &load::Load, beside: &load::Load) -> Result<(f64, f64)> {
    let bytes = (COUNT * 4 * 2 * (RANKS - 1) / RANKS) as f64;
    let busbw = |of: &load::Load| -> Result<f64> {
        of.go_on(WAKING)?;
        let begin = of.mark();
        of.go_on(MEASURED)?;
        Ok(bytes / begin.until(of.mark()).seconds / 1e9)
    };
    let (mut all, mut ratios) = (Vec::with_capacity(PAIRS), Vec::with_capacity(PAIRS));
    for _ in 0..PAIRS {
        let mine = busbw(group)?;
        group.rest()?;
        beside.wake();
        let theirs = busbw(beside)?;
        beside.rest()?;
        group.wake();
        all.push(mine);
        ratios.push(mine / theirs);
    }
    let median = |v: &mut Vec<f64>| {
        v.sort_by(f64::total_cmp);
        v[PAIRS / 2]
    };
    Ok((median(&mut all), median(&mut ratios)))
}

/// Resident memory of this process, KiB.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading this process's memory")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS in this process's status")?;
    line.trim().trim_end_matches(" kB").parse().context("reading VmRSS")
}
