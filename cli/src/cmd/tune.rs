//! `wccl bench --tune`: measures which algorithm is fastest where, and writes the table that `WCCL_TUNE_FILE` names.
//!
//! For each number of ranks a group is started; its ranks measure, for each memory, collective and size, every algorithm
//! that serves, in turns and several times, so that what else the machine does falls on all alike. All ranks know the same
//! times (the slowest rank's), rank 0 picks and writes the rows of its group, and the launcher puts them together.
//!
//! The pick goes from small to large and changes the algorithm only for a gain above [`GAIN`]: noise does not make it go to
//! and fro.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use enc::Algorithm;
use enc::table::{Criteria, Memory, Row, Table};
use hw_bridge::call::Op;
use hw_bridge::limits::MAX_LOCAL_RANKS;
use serde::{Deserialize, Serialize};
use wccl::RuntimeConfig;

use crate::cmd::explain;
use crate::cmd::sweep::Sweep;
use crate::cmd::worker::{self, Ranks};
use crate::page::plot;
use crate::rank::collective::{BufferMemory, Case, RankBuffers};
use crate::rank::measure::{self, number};
use crate::rank::member;
use crate::size;
use crate::term::{self, ProgressLine};
use crate::usage::UsageError;

/// Share of the time that another algorithm must save before it is taken.
const GAIN: f64 = 0.03;
/// Turns of each algorithm at each size; the median of their medians counts.
const TURNS: usize = 3;

/// Options of tuning.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Choice of algorithms")]
pub struct Args {
    /// Measure which algorithm is fastest for the collectives and sizes given, and write the table (for WCCL_TUNE_FILE)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["peer", "algo", "report_to_json_file"])]
    tune: Option<PathBuf>,
    /// Numbers of ranks to tune for; default: --ranks
    #[arg(long, value_name = "N,N", value_delimiter = ',', requires = "tune")]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=MAX_LOCAL_RANKS as u64))]
    tune_ranks: Vec<u64>,
    /// Memories to tune for
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_enum, default_value = "hbm,host", requires = "tune")]
    tune_buffers: Vec<BufferMemory>,
}

/// What a rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// What is measured.
    pub sweep: Sweep,
    /// Timed calls of a turn.
    pub iters: u32,
    /// Calls before them.
    pub warmup: u32,
    /// Check every element first.
    pub check: bool,
    /// Where the buffers lie; set by [`Args::start`].
    pub memories: Vec<BufferMemory>,
    /// Where rank 0 writes its rows; set by [`Args::start`].
    pub out: PathBuf,
}

impl Args {
    /// The table to write, if tuning was asked for.
    pub fn file(&self) -> Option<&Path> {
        self.tune.as_deref()
    }

    /// Where buffers will lie.
    pub fn memories(&self) -> &[BufferMemory] {
        &self.tune_buffers
    }

    /// The largest number of ranks that was asked for.
    pub fn most_ranks(&self) -> Option<u64> {
        self.tune_ranks.iter().copied().max()
    }

    /// Tunes for all numbers of ranks and writes the table to `file`.
    ///
    /// # Errors
    /// [`UsageError`] for nothing to choose; a rank failed; the table cannot be written.
    pub fn start(&self, file: &Path, ranks: &Ranks, mut job: Job, log: Option<&str>) -> anyhow::Result<ExitCode> {
        if job.sweep.collectives.iter().all(|name| !has_choice(name)) {
            return Err(UsageError("--tune: a barrier and a group have no algorithms to choose from".into()).into());
        }
        // Before anything is measured: a place that cannot be written is said now.
        let name =
            file.file_name().ok_or_else(|| UsageError(format!("--tune {}: a file is expected", file.display())))?;
        let mut groups = if self.tune_ranks.is_empty() { vec![ranks.ranks] } else { self.tune_ranks.clone() };
        groups.sort_unstable();
        groups.dedup();
        if groups[0] < 2 {
            return Err(UsageError("--tune: one rank alone has nothing to choose; use --ranks 2 or more".into()).into());
        }
        if let Some(n) = groups.iter().find(|n| job.sweep.root as u64 >= **n) {
            return Err(UsageError(format!("--root {} is not one of {n} ranks", job.sweep.root)).into());
        }
        job.memories = self.tune_buffers.clone();
        job.memories.dedup();
        let part = file.with_file_name(format!(".{}.{}.rows", name.to_string_lossy(), std::process::id()));
        plot::can_write(file)?;
        plot::write_whole(&part, "")?;
        let _cleaned = Cleaned(&part);
        job.out = std::path::absolute(&part).with_context(|| format!("finding {}", part.display()))?;
        let mut rows = Vec::new();
        for n in groups {
            let ranks = Ranks { ranks: n, ..ranks.clone() };
            worker::launch(&ranks, &worker::Job::Tune(job.clone()), log)?;
            rows.extend_from_slice(Table::read(&part)?.rows());
        }
        let table = Table::new(rows)?;
        plot::write_whole(file, &table.to_string())?;
        let said = format!("#\n# written to {}; use it by WCCL_TUNE_FILE\n{table}", file.display());
        term::print(said.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Whether there is something to tune.
fn has_choice(collective: &str) -> bool {
    collective != Op::Barrier.name() && collective != Op::Group.name()
}

/// Removes a file at the end.
struct Cleaned<'a>(&'a Path);

impl Drop for Cleaned<'_> {
    fn drop(&mut self) {
        // If it cannot be removed it is only in the way of eyes.
        let _ = std::fs::remove_file(self.0);
    }
}

/// Times at one size: bytes of a rank's contribution, and microseconds of each algorithm that serves.
#[derive(Debug, Clone)]
struct Point {
    contribution: u64,
    times: Vec<(Algorithm, f64)>,
}

/// The best algorithm up to each size, beginning with `first` where it serves. The last goes on for ever.
fn pick(points: &[Point], first: Algorithm) -> Vec<(u64, Algorithm)> {
    let mut picked: Vec<(u64, Algorithm)> = Vec::new();
    let mut now = first;
    for p in points {
        let Some((best, least)) = p.times.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)) else { continue };
        let mine = p.times.iter().find(|t| t.0 == now);
        if mine.is_none_or(|(_, t)| least < t * (1.0 - GAIN)) {
            now = best;
        }
        match picked.last_mut() {
            Some(last) if last.1 == now => last.0 = p.contribution,
            _ => picked.push((p.contribution, now)),
        }
    }
    if let Some(last) = picked.last_mut() {
        last.0 = u64::MAX;
    }
    picked
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::INFINITY)
}

/// One rank.
///
/// # Errors
/// Joining or a collective failed, a result was wrong, or the rows cannot be written.
pub fn work(job: &Job, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let first = rank == 0;
    let progress = ProgressLine::start(first, "loading the plugin and joining the group");
    let say = |text: &str| if first { progress.print(text) } else { Ok(()) };
    // What is measured is all algorithms, whatever the environment prefers.
    let config = RuntimeConfig { algorithm: None, one_hop_max: None, table: None, ..RuntimeConfig::from_env()? };
    let mut m = member::join_by(config, rank, n)?;
    // All are linked then, and have agreed on what serves.
    m.comm.barrier()?;
    let mut rows = Vec::new();
    for memory in &job.memories {
        for (op, cases) in job.sweep.cases(n)?.into_iter().filter(|(op, _)| has_choice(op.name())) {
            say(&format!("#\n# {} of {n} ranks, {} buffers; microseconds, the best marked", op.name(), memory.name()))?;
            let cases: Vec<Case> = cases.into_iter().filter(|c| c.count > 0).collect();
            let largest = cases.iter().map(|c| c.bytes(n)).max().unwrap_or(0);
            let mut buffers = RankBuffers::new(&m.comm, *memory, largest)?;
            let mut points: Vec<Point> = Vec::new();
            for case in &cases {
                let call = explain::call(case, *memory, rank, n);
                let contribution = call.contribution(n).unwrap_or(u64::MAX);
                // Small sizes are rounded to whole elements a rank, so two may be the same.
                if points.last().is_some_and(|p| p.contribution >= contribution) {
                    continue;
                }
                progress.phase(&format!("{} of {}", op.name(), size::short(case.bytes(n))));
                let serving: Vec<Algorithm> = m.comm.criteria().candidates(&call, n).collect();
                let mut turns = vec![Vec::with_capacity(TURNS); serving.len()];
                for turn in 0..TURNS {
                    for (algorithm, times) in serving.iter().zip(&mut turns) {
                        m.comm.set_algorithm(Some(*algorithm));
                        if job.check && turn == 0 {
                            let mine = case.check(&mut m.comm, &mut buffers)?;
                            let [wrong] = member::sums(&mut m.comm, [mine])?;
                            anyhow::ensure!(
                                wrong == 0,
                                "{} of {} bytes by {}: {wrong} elements are wrong",
                                op.name(),
                                case.bytes(n),
                                algorithm.name()
                            );
                            buffers.zero(case.bytes(n))?;
                        }
                        for _ in 0..job.warmup {
                            case.issue(&mut m.comm, &mut buffers)?;
                        }
                        times.push(measure::calls(&mut m.comm, &mut buffers, case, job.iters as usize)?.p50);
                    }
                }
                let times: Vec<f64> = turns.iter_mut().map(|t| median(t)).collect();
                let least = times.iter().copied().fold(f64::INFINITY, f64::min);
                let shown: Vec<String> = serving
                    .iter()
                    .zip(&times)
                    .map(|(a, t)| format!("{} {}{}", a.name(), number(*t), if *t == least { "*" } else { "" }))
                    .collect();
                say(&format!(" {:>12}  {}", case.bytes(n), shown.join("  ")))?;
                points.push(Point { contribution, times: serving.into_iter().zip(times).collect() });
            }
            let smallest = cases.first().map(|c| explain::call(c, *memory, rank, n));
            let start = smallest.map(|c| Criteria::default().decide(&c, n).algorithm);
            let place = match memory {
                BufferMemory::Hbm => Memory::Hbm,
                BufferMemory::Host => Memory::Host,
            };
            for (up_to, algorithm) in start.map(|s| pick(&points, s)).unwrap_or_default() {
                let ranks = (n as u32, n as u32);
                rows.push(Row { op: Some(op), memory: Some(place), ranks, up_to, algorithm });
            }
        }
    }
    if first {
        plot::write_whole(&job.out, &Table::new(rows)?.to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Algorithm::{Mesh, OneHop, Ring};

    fn points(times: &[(u64, &[(Algorithm, f64)])]) -> Vec<Point> {
        times.iter().map(|(b, t)| Point { contribution: *b, times: t.to_vec() }).collect()
    }

    #[test]
    fn the_fastest_up_to_each_size() {
        let p = points(&[
            (8, &[(OneHop, 1.0), (Mesh, 3.0)]),
            (64, &[(OneHop, 2.0), (Mesh, 3.0)]),
            (512, &[(OneHop, 9.0), (Mesh, 4.0)]),
            (4096, &[(Mesh, 5.0), (Ring, 4.0)]),
        ]);
        assert_eq!(pick(&p, OneHop), [(64, OneHop), (512, Mesh), (u64::MAX, Ring)]);
    }

    #[test]
    fn less_than_three_percent_changes_nothing() {
        let near = |a: f64| -> Vec<(Algorithm, f64)> { vec![(Mesh, 100.0), (Ring, a)] };
        let p: Vec<Point> = [98.0, 97.5, 102.0, 99.0, 97.1]
            .iter()
            .enumerate()
            .map(|(i, a)| Point { contribution: 8 << i, times: near(*a) })
            .collect();
        assert_eq!(pick(&p, Mesh), [(u64::MAX, Mesh)]);
        assert_eq!(pick(&p, Ring), [(u64::MAX, Ring)]);
        let p = points(&[(8, &near(98.0)), (16, &near(96.9)), (32, &near(102.0)), (64, &near(104.0))]);
        assert_eq!(pick(&p, Mesh), [(8, Mesh), (32, Ring), (u64::MAX, Mesh)]);
        // An algorithm that no longer serves is left whatever the gain.
        let p = points(&[(8, &[(OneHop, 1.0)]), (16, &[(Mesh, 2.0)])]);
        assert_eq!(pick(&p, Ring), [(8, OneHop), (u64::MAX, Mesh)]);
        assert_eq!(pick(&[], Ring), []);
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
    }
}
