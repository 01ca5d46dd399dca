//! Every (collective, algorithm, ranks, count) through the checker, and schedules broken on purpose, which it must refuse.

use super::check::{Flaw, Member, Proof, check};
use super::*;
use hw_bridge::limits::STAGE_BYTES;
use proptest::prelude::*;

const ALL: [Algorithm; 4] = [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Ring, Algorithm::Staged];

/// One call of a group, before it is each rank's own.
#[derive(Debug, Clone)]
struct Group {
    op: Op,
    n: usize,
    count: u64,
    dtype: DataType,
    redop: ReduceOp,
    root: usize,
    private: bool,
    /// Which ranks work in place.
    in_place: fn(usize) -> bool,
    algorithm: Algorithm,
    rings: Vec<Vec<usize>>,
}

fn rings(n: usize) -> Vec<Vec<usize>> {
    vec![(0..n).collect(), (0..n).rev().collect()]
}

impl Group {
    fn new(op: Op, n: usize, count: u64) -> Group {
        let (dtype, redop) = (DataType::Fp32, ReduceOp::Sum);
        let algorithm = Algorithm::OneHop;
        Group { op, n, count, dtype, redop, root: 0, private: false, in_place: |_| false, algorithm, rings: rings(n) }
    }

    fn call(&self, rank: usize) -> Call {
        let n = self.n;
        let mut c = Call {
            op: self.op,
            dtype: self.dtype,
            redop: self.redop,
            count: self.count,
            root: self.root,
            dst: None,
            src: None,
            private: self.private,
            in_place: (self.in_place)(rank) && in_place_exists(self.op, rank, self.root),
        };
        if self.op == Op::SendRecv {
            // A circle, or, for an odd root, one pair: the root sends to the next.
            let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
            (c.dst, c.src) = if self.root % 2 == 0 {
                (Some(to), Some(from))
            } else {
                ((rank == self.root && to != rank).then_some(to), (from == self.root && to != rank).then_some(from))
            };
        }
        c
    }

    fn schedules(&self) -> Vec<(Call, Schedule)> {
        let one = |rank| {
            let call = self.call(rank);
            let s = compile(&call, rank, self.n, self.algorithm, &self.rings);
            let s = s.unwrap_or_else(|e| panic!("{self:?} rank {rank}: {e}"));
            (call, Schedule::clone(&s))
        };
        (0..self.n).map(one).collect()
    }

    fn prove(&self) -> Proof {
        let all = self.schedules();
        prove(&all).unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

fn prove(all: &[(Call, Schedule)]) -> Result<Proof, Flaw> {
    let members: Vec<Member<'_>> = all.iter().map(|(call, schedule)| Member { call: *call, schedule }).collect();
    check(&members)
}

/// Whether a rank's input and output can be the same memory.
fn in_place_exists(op: Op, rank: usize, root: usize) -> bool {
    match op {
        Op::SendRecv | Op::Barrier => false,
        Op::Broadcast | Op::Reduce => rank == root,
        _ => true,
    }
}

/// Counts that are awkward for `n` ranks.
fn counts(n: u64) -> Vec<u64> {
    let mut all = vec![0, 1, n - 1, n, n + 1, 4099];
    all.sort_unstable();
    all.dedup();
    all
}

/// Runs `f` on every group of the matrix with `n` ranks and this algorithm.
fn matrix(algorithm: Algorithm, n: usize, counts: &[u64], mut f: impl FnMut(Group)) {
    for op in Op::ALL {
        for private in [false, true] {
            for &count in counts {
                let mut roots = vec![0, n - 1];
                roots.truncate(if matches!(op, Op::Broadcast | Op::Reduce | Op::SendRecv) { n } else { 1 });
                roots.dedup();
                for root in roots {
                    for in_place in [|_| false, |_| true, |r| r % 2 == 0] as [fn(usize) -> bool; 3] {
                        // All-to-all exchanges in place only if all do.
                        if op == Op::AllToAll && in_place(0) != in_place(1) {
                            continue;
                        }
                        let g = Group { root, private, in_place, algorithm, ..Group::new(op, n, count) };
                        if choose(&g.call(0), n, Some(algorithm), 8192) == algorithm {
                            f(g);
                        }
                    }
                }
            }
        }
    }
}

fn all_counts(algorithm: Algorithm) {
    let mut proved = 0;
    for n in 1..=16 {
        matrix(algorithm, n, &counts(n as u64), |g| {
            g.prove();
            proved += 1;
        });
    }
    assert!(proved > 0, "{algorithm:?} serves nothing");
}

#[test]
fn one_hop_is_right_for_every_collective_and_rank_count() {
    all_counts(Algorithm::OneHop);
}

#[test]
fn mesh_is_right_for_every_collective_and_rank_count() {
    all_counts(Algorithm::Mesh);
}

#[test]
fn rings_are_right_for_every_collective_and_rank_count() {
    all_counts(Algorithm::Ring);
}

#[test]
fn staging_is_right_for_every_collective_and_rank_count() {
    all_counts(Algorithm::Staged);
}

#[test]
fn messages_of_many_pieces_are_right() {
    let stage = STAGE_BYTES as u64 / 4;
    for n in [2, 3, 4, 7, 16] {
        for algorithm in ALL {
            matrix(algorithm, n, &[3 * stage + 17, 5 * stage], |g| {
                g.prove();
            });
        }
    }
}

fn any_group() -> impl Strategy<Value = Group> {
    let what = (0..Op::ALL.len(), 0..DataType::ALL.len(), 0..ReduceOp::ALL.len(), 0..ALL.len());
    let size = (1usize..=16, prop_oneof![0u64..40, 0u64..10_000, 0u64..700_000]);
    (what, size, any::<u64>(), any::<bool>(), 0usize..3).prop_map(
        |((op, d, r, a), (n, count), seed, private, place)| {
            let in_place = [|_| false, |_| true, |r| r % 3 == 1] as [fn(usize) -> bool; 3];
            let op = Op::ALL[op];
            let mut g = Group::new(op, n, count);
            g.dtype = DataType::ALL[d];
            g.redop = ReduceOp::ALL[r];
            g.root = seed as usize % n;
            g.private = private;
            g.in_place = in_place[if op == Op::AllToAll { place % 2 } else { place }];
            let turn = seed as usize % 5;
            let shuffled = |k: usize| (0..n).map(|i| (i * k + turn) % n).collect::<Vec<_>>();
            g.rings = (1..n.max(2)).filter(|k| gcd(*k, n) == 1).take(1 + turn).map(shuffled).collect();
            g.algorithm = choose(&g.call(0), n, Some(ALL[a]), [0, 8192, 32768][turn % 3]);
            g
        },
    )
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_calls_are_right(g in any_group()) {
        g.prove();
    }
}

/// Whether the broken schedule of `rank` is noticed: when it is sealed, or by the checker.
fn noticed(all: &[(Call, Schedule)], rank: usize, broken: Schedule) -> bool {
    let Ok(sealed) = broken.seal(rank, all.len()) else { return true };
    let mut all = all.to_vec();
    all[rank].1 = Schedule::clone(&sealed);
    prove(&all).is_err()
}

/// Groups of moderate size that between them use every kind of step of every algorithm.
fn samples() -> Vec<Group> {
    let mut all = Vec::new();
    for algorithm in ALL {
        for n in [2, 3, 4, 5] {
            let big = STAGE_BYTES as u64 / 4 * 3 + 5;
            let count = if algorithm == Algorithm::Staged { big } else { 1000 };
            matrix(algorithm, n, &[count], |g| {
                if !(g.in_place)(1) {
                    all.push(g);
                }
            });
        }
    }
    all
}

#[test]
fn a_dropped_copy_or_reduction_and_a_shifted_one_are_noticed() {
    let mut tried = 0;
    for g in samples() {
        let all = g.schedules();
        let size = g.dtype.size() as u64;
        for rank in 0..g.n {
            for i in 0..all[rank].1.steps.len() {
                let s = &all[rank].1;
                let mut shifted = s.clone();
                match &mut shifted.steps[i] {
                    Step::Copy { src, .. } => src.1 = if src.1 >= size { src.1 - size } else { src.1 + size },
                    Step::Swap { a, .. } => a.1 = if a.1 >= size { a.1 - size } else { a.1 + size },
                    Step::Reduce { dst, .. } => dst.1 = if dst.1 >= size { dst.1 - size } else { dst.1 + size },
                    Step::Average { n, .. } => *n += 1,
                    _ => continue,
                }
                assert!(noticed(&all, rank, shifted), "{g:?} rank {rank} step {i} shifted: {}", explain(s));
                let mut dropped = s.clone();
                dropped.steps.remove(i);
                assert!(noticed(&all, rank, dropped), "{g:?} rank {rank} step {i} dropped: {}", explain(s));
                tried += 1;
            }
        }
    }
    assert!(tried > 1000, "{tried}");
}

/// Steps that can be dropped without a race or a wrong result, and why they are there all the same.
const HARMLESS: &[(&str, &str)] = &[
    ("mesh broadcast arrival", COMPARES),
    ("mesh send_recv arrival", COMPARES),
    ("staged broadcast arrival", COMPARES),
    ("staged reduce arrival", COMPARES),
    ("staged send_recv arrival", COMPARES),
    ("ring all_gather wait", IMPLIED),
    ("ring all_reduce wait", IMPLIED),
    ("staged all_reduce wait", IMPLIED),
    ("staged send_recv wait", IMPLIED),
    ("staged broadcast signal", UNHEARD),
    ("staged reduce signal", UNHEARD),
    ("staged send_recv signal", UNHEARD),
];
const COMPARES: &str = "the sender meets its receivers only to compare the calls before it goes on";
const IMPLIED: &str =
    "two waits for one peer, of which the other, or a later one, implies this; it finds its condition met";
const UNHEARD: &str = "the numbers are the same on all ranks; nobody waits for those of the last pieces but one";

/// Every wait, arrival and signal is there for a reason; the exceptions are listed.
#[test]
fn a_dropped_wait_arrival_or_signal_is_noticed() {
    let mut harmless = std::collections::BTreeMap::<String, String>::new();
    let mut tried = 0;
    for g in samples() {
        let all = g.schedules();
        for rank in 0..g.n {
            for i in 0..all[rank].1.steps.len() {
                let kind = match all[rank].1.steps[i] {
                    Step::Wait { .. } => "wait",
                    Step::Arrival(_) => "arrival",
                    Step::Signal(_) => "signal",
                    _ => continue,
                };
                let mut s = all[rank].1.clone();
                s.steps.remove(i);
                tried += 1;
                if !noticed(&all, rank, s) {
                    let key = format!("{} {} {kind}", g.algorithm.name(), g.op.name());
                    let text = format!("{g:?}\nrank {rank} step {i} of {}", explain(&all[rank].1));
                    harmless.entry(key).or_insert(text);
                }
            }
        }
    }
    for (key, text) in &harmless {
        assert!(HARMLESS.iter().any(|(k, _)| k == key), "not noticed: {key}\n{text}");
    }
    for (key, why) in HARMLESS {
        assert!(harmless.contains_key(*key), "{key} ({why}) is noticed after all: take it off the list");
    }
    assert!(tried > 1000, "{tried}");
}
