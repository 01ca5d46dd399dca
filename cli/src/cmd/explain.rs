//! `wccl bench --explain`: what the runtime would do for a collective and size, instead of doing it.
//!
//! The ranks join, so that the rings are the library's and settings are what the ranks see; then rank 0 asks the engine for
//! its choice and compiles the schedules of all ranks, which are pure functions of what all ranks know. Numbers of steps
//! and bytes are counted from the schedules themselves, so they hold for every algorithm there is.

use std::process::ExitCode;

use enc::table::{Choice, Criteria, Why};
use enc::{Algorithm, Call};
use hw_bridge::call::Op;
use hw_bridge::exec::sequencer::{At, Place, Schedule, Step};
use serde::{Deserialize, Serialize};

use crate::cmd::sweep::Sweep;
use crate::rank::collective::{BufferMemory, Case};
use crate::rank::member;
use crate::size;
use crate::term::ProgressLine;

/// What a rank needs to know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// What is explained.
    pub sweep: Sweep,
    /// Where the buffers lie.
    pub memory: BufferMemory,
}

/// What one rank's schedule does; bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Steps.
    pub steps: u64,
    /// Steps that wait for a peer.
    pub waits: u64,
    /// Longest piece that one step moves or reduces to.
    pub piece: u64,
    /// Read from peers' memory or segments.
    pub from_peers: u64,
    /// Written to peers' memory.
    pub to_peers: u64,
    /// Read or written in all, this rank's own memory included.
    pub moved: u64,
}

impl Cost {
    /// Counts a schedule of `rank`.
    pub fn of(s: &Schedule, rank: usize) -> Cost {
        let size = s.header.dtype.size() as u64;
        let mut c = Cost { steps: s.steps.len() as u64, ..Cost::default() };
        // The payload is copied from the input beside the record before the steps begin.
        c.moved += 2 * s.payload;
        c.piece = c.piece.max(s.payload);
        for step in &s.steps {
            match *step {
                Step::Arrival(_) | Step::Wait { .. } => c.waits += 1,
                Step::Copy { dst, src, len } => {
                    c.read(src, rank, len);
                    c.write(dst, rank, len);
                }
                Step::Reduce { dst, first, n, count, .. } => {
                    let sources = s.sources.iter().skip(first as usize).take(n as usize);
                    sources.for_each(|at| c.read(*at, rank, count * size));
                    c.write(dst, rank, count * size);
                }
                Step::Average { dst, count, .. } => {
                    c.read(dst, rank, count * size);
                    c.write(dst, rank, count * size);
                }
                Step::Swap { a, b, len } => {
                    for at in [a, b] {
                        c.read(at, rank, len);
                        c.write(at, rank, len);
                    }
                }
                _ => {}
            }
        }
        c
    }

    fn read(&mut self, at: At, rank: usize, len: u64) {
        self.moved += len;
        if foreign(at, rank) {
            self.from_peers += len;
        }
    }

    fn write(&mut self, at: At, rank: usize, len: u64) {
        self.moved += len;
        self.piece = self.piece.max(len);
        if foreign(at, rank) {
            self.to_peers += len;
        }
    }

    /// The larger of each number: the busiest rank.
    fn max(self, o: Cost) -> Cost {
        Cost {
            steps: self.steps.max(o.steps),
            waits: self.waits.max(o.waits),
            piece: self.piece.max(o.piece),
            from_peers: self.from_peers.max(o.from_peers),
            to_peers: self.to_peers.max(o.to_peers),
            moved: self.moved.max(o.moved),
        }
    }
}

/// Whether the place is a peer's.
fn foreign(at: At, rank: usize) -> bool {
    match at.0 {
        Place::PeerIn(p) | Place::PeerOut(p) | Place::Slot(p) | Place::Stage(p, _) | Place::Result(p, _) => {
            usize::from(p) != rank
        }
        _ => false,
    }
}

/// The engine's view of a case on one rank.
pub fn call(case: &Case, memory: BufferMemory, rank: usize, n: usize) -> Call {
    let peers = (case.op == Op::SendRecv).then(|| case.peers(rank, n));
    Call {
        op: case.op,
        dtype: case.dtype,
        redop: case.redop,
        count: case.count,
        root: case.root,
        dst: peers.and_then(|p| p.dst),
        src: peers.and_then(|p| p.src),
        private: memory == BufferMemory::Host && case.op != Op::Barrier,
        in_place: case.in_place,
    }
}

/// The reason in words.
fn reason(d: &Choice, criteria: &Criteria<'_>) -> String {
    let row = |i: u32| {
        let row = criteria.table.and_then(|t| t.rows().get(i as usize)).map_or(String::new(), |r| r.to_string());
        format!("row {} of the table ({})", i + 1, row.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    let why = match d.why {
        Why::NothingMoves => "nothing moves".into(),
        Why::Forced => "forced by --algo or WCCL_ALGO".into(),
        Why::OneHopMax => format!("within WCCL_ONE_HOP_MAX={}", criteria.one_hop_max.unwrap_or(0)),
        Why::Row(i) => row(i),
        Why::Builtin => "built-in rule".into(),
    };
    match d.passed_over {
        Some(Why::Forced) => {
            let name = criteria.forced.map_or("?", Algorithm::name);
            format!("{why}; {name}, which is forced, does not serve this call")
        }
        Some(Why::Row(i)) if criteria.one_hop_max.is_some() => {
            format!("{why}; {} does not serve this call or is beyond WCCL_ONE_HOP_MAX", row(i))
        }
        Some(Why::Row(i)) => format!("{why}; {} does not serve this call", row(i)),
        _ => why,
    }
}

/// The rings in words; neighbours that are alike share a line.
fn listed(rings: &[Vec<usize>]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut from = 0;
    for same in rings.chunk_by(|a, b| a == b) {
        let to = from + same.len() - 1;
        let which = if from == to { format!("ring {from}") } else { format!("rings {from} to {to}") };
        let order: Vec<String> = same[0].iter().map(usize::to_string).collect();
        lines.push(format!("# {which}: {}", order.join(" ")));
        from = to + 1;
    }
    lines
}

/// One rank.
///
/// # Errors
/// Joining failed, or a schedule does not compile.
pub fn work(job: &Job, rank: usize, n: usize) -> anyhow::Result<ExitCode> {
    let first = rank == 0;
    let progress = ProgressLine::start(first, "loading the plugin and joining the group");
    let mut m = member::join(rank, n)?;
    // All are linked now, and have agreed on what the choice goes by.
    m.comm.barrier()?;
    if !first {
        // Nobody leaves before rank 0 is done: it would be reported as a rank that went.
        m.comm.barrier()?;
        return Ok(ExitCode::SUCCESS);
    }
    let criteria = m.comm.criteria();
    let rings = &*m.comm.rings();
    progress.print(&format!(
        "# {}; numbers are of the busiest rank; bytes are counted once read and once written",
        job.sweep.about(n, job.memory)
    ))?;
    for line in listed(rings) {
        progress.print(&line)?;
    }
    match criteria.table {
        Some(t) => progress.print(&format!(
            "# table: {} rows, digest {:08x}, from WCCL_TUNE_FILE",
            t.rows().len(),
            t.digest()
        ))?,
        None => progress.print("# table: none, the built-in rule decides")?,
    }
    if job.memory == BufferMemory::Host && n > 1 {
        progress.print(match criteria.direct {
            true => "# private memory: all ranks can read one another's",
            false => "# private memory: some rank cannot read another's, or has WCCL_DIRECT=0: nothing goes directly",
        })?;
    }
    for (op, cases) in job.sweep.cases(n)? {
        progress.print(&format!("#\n# {}", op.name()))?;
        progress.print(&format!(
            "#{:>12}{:>13} {:<10}{:>6}{:>9}{:>7}{:>7}{:>13}{:>13}{:>13}  why",
            "size", "count", "algorithm", "rings", "piece", "steps", "waits", "from peers", "to peers", "moved"
        ))?;
        for case in &cases {
            let choice = criteria.decide(&call(case, job.memory, 0, n), n);
            let mut cost = Cost::default();
            for r in 0..n {
                let schedule = enc::compile(&call(case, job.memory, r, n), r, n, choice.algorithm, rings)?;
                cost = cost.max(Cost::of(&schedule, r));
            }
            let used = enc::rings_used(choice.algorithm, rings);
            progress.print(&format!(
                " {:>12}{:>13} {:<10}{:>6}{:>9}{:>7}{:>7}{:>13}{:>13}{:>13}  {}",
                case.bytes(n),
                case.count,
                choice.algorithm.name(),
                if used == 0 { "-".into() } else { used.to_string() },
                size::short(cost.piece),
                cost.steps,
                cost.waits,
                cost.from_peers,
                cost.to_peers,
                cost.moved,
                reason(&choice, &criteria)
            ))?;
        }
    }
    m.comm.barrier()?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use wccl::{DataType, ReduceOp};

    use super::*;

    fn cost(op: Op, bytes: u64, algorithm: Algorithm, memory: BufferMemory, rank: usize, n: usize) -> Cost {
        let case = Case::of_bytes(op, DataType::Fp32, ReduceOp::Sum, bytes, n);
        let rings = vec![(0..n).collect::<Vec<_>>()];
        let s = enc::compile(&call(&case, memory, rank, n), rank, n, algorithm, &rings).unwrap();
        Cost::of(&s, rank)
    }

    #[test]
    fn rings_that_are_alike_share_a_line() {
        let (a, b) = (vec![0, 1, 2], vec![0, 2, 1]);
        assert_eq!(
            listed(&[a.clone(), a.clone(), b.clone(), a]),
            ["# rings 0 to 1: 0 1 2", "# ring 2: 0 2 1", "# ring 3: 0 1 2"]
        );
        assert!(listed(&[]).is_empty());
    }

    /// Theory: the mesh reads 1/n of the vector from each of n-1 peers and writes as much to each; the ring pulls 2(n-1)
    /// parts; one hop reads all vectors.
    #[test]
    fn bytes_are_those_of_theory() {
        let (n, b) = (4usize, 1u64 << 20);
        for rank in 0..n {
            let mesh = cost(Op::AllReduce, b, Algorithm::Mesh, BufferMemory::Hbm, rank, n);
            assert_eq!((mesh.from_peers, mesh.to_peers), (3 * b / 4, 3 * b / 4));
            let ring = cost(Op::AllReduce, b, Algorithm::Ring, BufferMemory::Hbm, rank, n);
            assert_eq!((ring.from_peers, ring.to_peers), (6 * b / 4, 0));
            let hop = cost(Op::AllReduce, 4096, Algorithm::OneHop, BufferMemory::Hbm, rank, n);
            assert_eq!((hop.from_peers, hop.to_peers, hop.waits), (3 * 4096, 0, 3));
            // The payload once in and once out of the input, n sources, one result.
            assert_eq!(hop.moved, (2 + 4 + 1) * 4096);
            let staged = cost(Op::AllReduce, b, Algorithm::Staged, BufferMemory::Host, rank, n);
            assert_eq!(staged.from_peers, 3 * b / 4 + 3 * b / 4);
            // Of a piece of 256 KiB the rank's own quarter is not staged: what lies before it and behind it is.
            assert_eq!(staged.piece, if rank == 0 || rank == n - 1 { 192 * 1024 } else { 128 * 1024 });
        }
    }
}
