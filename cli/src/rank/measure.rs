//! Timing of back-to-back calls.
//!
//! Calls follow one another on the same buffers without a barrier between; each is timed by itself with the monotonic
//! clock. What is reported is the slowest rank's, agreed by one small all_reduce after the timed region.

use std::time::Instant;

use wccl::{Communicator, Error};

use crate::rank::collective::{Case, RankBuffers};
use crate::rank::member;

/// Times of one call in microseconds, each the slowest rank's.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Times {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The shortest.
    pub min: f64,
}

/// Times of one rank from nanoseconds of each call; sorts them.
fn summary(ns: &mut [u64]) -> Times {
    ns.sort_unstable();
    let Some(last) = ns.len().checked_sub(1) else { return Times { mean: 0.0, p50: 0.0, p99: 0.0, min: 0.0 } };
    let us = |i: usize| ns[i.min(last)] as f64 / 1e3;
    let mean = ns.iter().sum::<u64>() as f64 / ns.len() as f64 / 1e3;
    Times { mean, p50: us(ns.len() / 2), p99: us(ns.len() * 99 / 100), min: us(0) }
}

/// Calls `case` `iters` times and answers the slowest rank's times.
///
/// # Errors
/// The runtime's.
pub fn calls(comm: &mut Communicator, buffers: &mut RankBuffers, case: &Case, iters: usize) -> Result<Times, Error> {
    let mut ns = vec![0u64; iters];
    comm.barrier()?;
    for t in &mut ns {
        let start = Instant::now();
        case.issue(comm, buffers)?;
        *t = start.elapsed().as_nanos() as u64;
    }
    let mine = summary(&mut ns);
    let [mean, p50, p99, min] = member::largest(comm, [mine.mean, mine.p50, mine.p99, mine.min])?;
    Ok(Times { mean, p50, p99, min })
}

/// Three significant digits in eight columns.
pub fn number(x: f64) -> String {
    match x {
        x if x >= 10_000.0 => format!("{x:.0}"),
        x if x >= 100.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_is_by_rank_order() {
        let mut ns: Vec<u64> = (1..=100).rev().map(|i| i * 1000).collect();
        assert_eq!(summary(&mut ns), Times { mean: 50.5, p50: 51.0, p99: 100.0, min: 1.0 });
        assert_eq!(summary(&mut [5000]), Times { mean: 5.0, p50: 5.0, p99: 5.0, min: 5.0 });
        assert_eq!(summary(&mut []).mean, 0.0);
    }
}
