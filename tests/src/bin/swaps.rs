//! Swaps under load: four ranks run all-reduce without a pause and check every element, while their transport is swapped
//! back and forth between two releases. `swaps [N]`, 1,000 by default. Prints what the swaps cost; exit code 1 if an
//! operation was lost or an element wrong.

use std::process::ExitCode;

use anyhow::{Context, Result};
use host_runtime::nrt::RuntimeConfig;

// What the demo uses, as it is.
#[allow(dead_code)]
#[path = "../../../cli/src/load.rs"]
mod load;

const RANKS: usize = 4;
/// 64 KiB a message.
const COUNT: usize = 16 << 10;
/// Rounds between two swaps.
const ROUNDS: u64 = 3;
/// Windows that busbw is measured in, of which the median counts: ranks share cores, and some windows are the scheduler's.
const WINDOWS: usize = 21;
/// Rounds of a window.
const MEASURED: u64 = 300;
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
    let busbw = || -> Result<f64> {
        let bytes = (COUNT * 4 * 2 * (RANKS - 1) / RANKS) as f64;
        let mut windows = Vec::with_capacity(WINDOWS);
        for _ in 0..WINDOWS {
            let begin = group.mark();
            group.go_on(MEASURED)?;
            windows.push(bytes / begin.until(group.mark()).seconds / 1e9);
        }
        windows.sort_by(f64::total_cmp);
        Ok(windows[WINDOWS / 2])
    };
    let ran = (|| -> Result<_> {
        group.go_on(5 * MEASURED)?;
        let before = busbw()?;
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
        Ok((before, busbw()?, memory, pauses))
    })();
    // A rank that failed says why, which is more than that it did not come.
    let all = group.stop()?;
    let (before, after, memory, mut pauses) = ran?;
    let (lost, wrong) = load::lost_and_wrong(&all);
    println!(
        "pause    p50 {:.2} ms, p99 {:.2} ms",
        load::percentile_ms(&mut pauses, 50),
        load::percentile_ms(&mut pauses, 99)
    );
    println!("memory   resident {} KiB after {} swaps, {} KiB at the end", memory[0], WARM.min(swaps / 2), memory[1]);
    println!("busbw    {before:.3} GB/s before, {after:.3} after ({:.3} x)", after / before);
    println!("swaps: {swaps} swaps, {} operations, {lost} lost, {wrong} wrong", all[0].done);
    Ok(if lost + wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Resident memory of this process, KiB.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading this process's memory")?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS in this process's status")?;
    line.trim().trim_end_matches(" kB").parse().context("reading VmRSS")
}
