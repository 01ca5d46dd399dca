//! Every (collective, algorithm, ranks, count) through the checker, and schedules broken on purpose, which it must refuse.

use super::check::{CallRank, Flaw, Proof, check};
use super::*;
use hw_bridge::limits::{LARGE_SLOT_BYTES, STAGE_BYTES};
use proptest::prelude::*;

const ALL: [Algorithm; 8] = Algorithm::ALL;

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
    list: List,
}

/// A list that is owned.
#[derive(Debug, Clone)]
enum List {
    None,
    Counts(Vec<u64>),
    Matrix(Vec<u64>),
    Pairs(Vec<(usize, usize)>),
    Moves(Vec<Move>),
}

impl List {
    fn view(&self) -> Lists<'_> {
        match self {
            List::None => Lists::None,
            List::Counts(x) => Lists::Counts(x),
            List::Matrix(x) => Lists::Matrix(x),
            List::Pairs(x) => Lists::Pairs(x),
            List::Moves(x) => Lists::Moves(x),
        }
    }

    /// Lists for `n` ranks whose blocks are `count` elements in the mean, and the count that then goes in the call. Some
    /// blocks are empty, and with `turn` so are other rows, columns and ranks.
    fn of(op: Op, n: usize, count: u64, turn: usize) -> (List, u64) {
        let uneven = |i: usize| match (i + turn) % 4 {
            0 => 0,
            1 => count,
            2 => count * 2 + 1,
            _ => count / 2,
        };
        match op {
            Op::AllGatherV | Op::ReduceScatterV => {
                let counts: Vec<u64> = (0..n).map(uneven).collect();
                let total = counts.iter().sum();
                (List::Counts(counts), total)
            }
            Op::AllToAllV => {
                let empty = |p: usize, q: usize| turn % 3 == 1 && p == n / 2 || turn % 3 == 2 && q == n / 2;
                let one = |i: usize| if empty(i / n, i % n) { 0 } else { uneven(i / n * 3 + i % n) };
                let matrix: Vec<u64> = (0..n * n).map(one).collect();
                let total = matrix.iter().sum();
                (List::Matrix(matrix), total)
            }
            Op::Permute => {
                // A shift, of which some pairs are left out.
                let pairs = (0..n).filter(|r| turn == 0 || r % (turn + 1) != 1).map(|r| (r, (r + turn) % n)).collect();
                (List::Pairs(pairs), count)
            }
            Op::Group => {
                // Everybody sends to several, some twice, some to themselves; the upper half of the memory receives.
                let mut moves = Vec::new();
                let mut filled = vec![10 * n as u64 * (count * 4 + 8); n];
                for src in 0..n {
                    for (i, far) in [0, 1, 1, turn].into_iter().enumerate() {
                        let (dst, bytes) = ((src + far) % n, count * 4 + i as u64);
                        moves.push(Move { src, src_at: i as u64 * 3, dst, dst_at: filled[dst] + 1, bytes });
                        filled[dst] += bytes + 1;
                    }
                }
                let total = moves.iter().map(|m| m.bytes).sum();
                (List::Moves(moves), total)
            }
            _ => (List::None, count),
        }
    }
}

fn rings(n: usize) -> Vec<Vec<usize>> {
    vec![(0..n).collect(), (0..n).rev().collect()]
}

impl Group {
    fn new(op: Op, n: usize, count: u64) -> Group {
        let (dtype, redop) = (DataType::Fp32, ReduceOp::Sum);
        let algorithm = Algorithm::OneHop;
        let (list, count) = List::of(op, n, count, 0);
        let (root, private, rings) = (0, false, rings(n));
        let g = Group { op, n, count, dtype, redop, root, private, in_place: |_| false, algorithm, rings, list };
        if op == Op::Group { Group { dtype: DataType::Uint8, ..g } } else { g }
    }

    fn turned(self, count: u64, turn: usize) -> Group {
        let (list, count) = List::of(self.op, self.n, count, turn);
        Group { list, count, ..self }
    }

    fn choice(&self, forced: Option<Algorithm>, one_hop_max: u64) -> Algorithm {
        choose_with(&self.call(0), self.list.view(), self.n, forced, Some(one_hop_max), true)
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
            let s = compile_with(&call, self.list.view(), rank, self.n, self.algorithm, &self.rings);
            let s = s.unwrap_or_else(|e| panic!("{self:?} rank {rank}: {e}"));
            (call, Schedule::clone(&s))
        };
        (0..self.n).map(one).collect()
    }

    fn prove(&self) -> Proof {
        let all = self.schedules();
        prove(&all, self.list.view()).unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }
}

fn prove(all: &[(Call, Schedule)], lists: Lists<'_>) -> Result<Proof, Flaw> {
    let members: Vec<CallRank<'_>> = all.iter().map(|(call, schedule)| CallRank { call: *call, schedule }).collect();
    check(&members, lists)
}

/// Whether a rank's input and output can be the same memory.
fn in_place_exists(op: Op, rank: usize, root: usize) -> bool {
    match op {
        Op::SendRecv | Op::Barrier | Op::Permute | Op::AllToAllV | Op::Group => false,
        _ if op.facts().has_root => rank == root,
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
                let rooted = op.facts().has_root || op == Op::SendRecv;
                let listed = !matches!(List::of(op, n, count, 0).0, List::None);
                let mut roots = vec![0, n - 1];
                roots.truncate(if rooted { n } else { 1 });
                roots.dedup();
                let turns = if listed { 0..4 } else { 0..1 };
                for (root, turn) in roots.iter().flat_map(|r| turns.clone().map(|t| (*r, t))) {
                    if op == Op::Group && private {
                        continue;
                    }
                    for in_place in [|_| false, |_| true, |r| r % 2 == 0] as [fn(usize) -> bool; 3] {
                        // All-to-all exchanges in place only if all do.
                        if op == Op::AllToAll && in_place(0) != in_place(1) {
                            continue;
                        }
                        let g = Group { root, private, in_place, algorithm, ..Group::new(op, n, count) };
                        let g = g.turned(count, turn);
                        if g.choice(Some(algorithm), LARGE_SLOT_BYTES as u64) == algorithm {
                            f(g);
                        }
                        // Without a form in place the three are one.
                        if !in_place_exists(op, root, root) {
                            break;
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
            // The scale changes which sums lie where, so it is proved beside.
            let scaled = Group { redop: ReduceOp::PreMulSum, ..g };
            if scaled.call(0).op.facts().reduces && scaled.choice(Some(algorithm), 8192) == algorithm {
                scaled.prove();
            }
            // An average ends in a step of its own where sums travel, and none of floats does.
            for dtype in [DataType::Int32, DataType::Fp32] {
                let mut mean = Group { redop: ReduceOp::Avg, dtype, ..scaled.clone() };
                if mean.call(0).op.facts().reduces {
                    mean.algorithm = mean.choice(Some(algorithm), 8192);
                    mean.prove();
                }
            }
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
fn halving_is_right_for_every_rank_count() {
    all_counts(Algorithm::Halving);
}

#[test]
fn trees_are_right_for_every_rank_count() {
    all_counts(Algorithm::Tree);
}

#[test]
fn two_levels_are_right_for_every_rank_count() {
    all_counts(Algorithm::TwoLevel);
}

#[test]
fn direct_reads_are_right_for_every_collective_and_rank_count() {
    all_counts(Algorithm::Direct);
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
            g.dtype = if op == Op::Group { DataType::Uint8 } else { DataType::ALL[d] };
            g.redop = if seed % 5 == 4 && g.dtype.is_float() { ReduceOp::PreMulSum } else { ReduceOp::ALL[r] };
            g.root = seed as usize % n;
            g.private = private;
            g.in_place = in_place[if op == Op::AllToAll { place % 2 } else { place }];
            let turn = seed as usize % 5;
            let shuffled = |k: usize| (0..n).map(|i| (i * k + turn) % n).collect::<Vec<_>>();
            g.rings = (1..n.max(2)).filter(|k| gcd(*k, n) == 1).take(1 + turn).map(shuffled).collect();
            g.algorithm = g.choice(Some(ALL[a]), [0, 8192, LARGE_SLOT_BYTES as u64][turn % 3]);
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
fn noticed(all: &[(Call, Schedule)], lists: Lists<'_>, rank: usize, broken: Schedule) -> bool {
    let Ok(sealed) = broken.seal(rank, all.len()) else { return true };
    let mut all = all.to_vec();
    all[rank].1 = Schedule::clone(&sealed);
    prove(&all, lists).is_err()
}

/// A float average that is made of sums in the element type is noticed.
#[test]
fn an_average_of_rounded_sums_is_noticed() {
    let mut tried = 0;
    for g in samples() {
        let mean = Group { redop: ReduceOp::Avg, dtype: DataType::Int32, ..g };
        let all = mean.schedules();
        let divides = |s: &Schedule| s.steps.iter().any(|step| matches!(step, Step::Average { .. }));
        if !all.iter().any(|(_, s)| divides(s)) {
            continue;
        }
        let mut floats = all;
        for (call, schedule) in &mut floats {
            (call.dtype, schedule.header.dtype) = (DataType::Fp32, DataType::Fp32);
        }
        let e = prove(&floats, mean.list.view()).unwrap_err().to_string();
        assert!(e.contains("divides sums of fp32, which may be infinite where the average is not"), "{e}");
        tried += 1;
    }
    assert!(tried > 10, "{tried}");
}

/// A scale that is forgotten is noticed, in every algorithm that has one.
#[test]
fn a_forgotten_scale_is_noticed() {
    let mut tried = 0;
    for g in samples() {
        let g = Group { redop: ReduceOp::PreMulSum, ..g };
        if !g.call(0).op.facts().reduces || g.choice(Some(g.algorithm), 8192) != g.algorithm {
            continue;
        }
        let all = g.schedules();
        for (rank, (_, schedule)) in all.iter().enumerate() {
            for (i, step) in schedule.steps.iter().enumerate() {
                let Step::Reduce { dst, first, n, count, op: ReduceOp::PreMulSum } = *step else { continue };
                let mut plain = schedule.clone();
                plain.steps[i] = Step::Reduce { dst, first, n, count, op: ReduceOp::Sum };
                assert!(noticed(&all, g.list.view(), rank, plain), "{g:?} rank {rank} step {i}");
                tried += 1;
            }
        }
    }
    assert!(tried > 50, "{tried}");
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
                assert!(
                    noticed(&all, g.list.view(), rank, shifted),
                    "{g:?} rank {rank} step {i} shifted: {}",
                    explain(s)
                );
                let mut dropped = s.clone();
                dropped.steps.remove(i);
                assert!(
                    noticed(&all, g.list.view(), rank, dropped),
                    "{g:?} rank {rank} step {i} dropped: {}",
                    explain(s)
                );
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
    ("mesh gather arrival", COMPARES),
    ("mesh scatter arrival", COMPARES),
    ("mesh permute arrival", COMPARES),
    ("mesh group arrival", COMPARES),
    ("mesh all_gather_v arrival", COMPARES),
    ("mesh all_to_all_v arrival", COMPARES),
    ("mesh reduce_scatter_v arrival", COMPARES),
    ("one-hop reduce_scatter_v arrival", COMPARES),
    ("staged gather arrival", COMPARES),
    ("staged scatter arrival", COMPARES),
    ("staged permute arrival", COMPARES),
    ("staged all_gather_v arrival", COMPARES),
    ("staged all_to_all_v arrival", COMPARES),
    ("staged reduce_scatter_v arrival", COMPARES),
    ("direct broadcast arrival", COMPARES),
    ("direct send_recv arrival", COMPARES),
    ("direct gather arrival", COMPARES),
    ("direct scatter arrival", COMPARES),
    ("direct permute arrival", COMPARES),
    ("direct all_gather_v arrival", COMPARES),
    ("direct all_to_all_v arrival", COMPARES),
    ("tree broadcast arrival", COMPARES),
    ("tree reduce arrival", COMPARES),
    ("halving all_gather wait", "a partner in place has its own block in its output from the start"),
    ("staged reduce_scatter_v wait", "a rank without a part reads nothing and is waited for like the others"),
    ("staged all_gather_v wait", IMPLIED),
    ("staged all_to_all_v wait", IMPLIED),
    ("staged permute wait", IMPLIED),
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
                if !noticed(&all, g.list.view(), rank, s) {
                    let key = format!("{} {} {kind}", g.algorithm.name(), g.op.name());
                    let text = format!("{g:?}\nrank {rank} step {i} of {}", explain(&all[rank].1));
                    harmless.entry(key).or_insert(text);
                }
            }
        }
    }
    let listed = |key: &str| HARMLESS.iter().any(|(k, _)| *k == key);
    let unlisted: Vec<String> =
        harmless.iter().filter(|(k, _)| !listed(k)).map(|(k, text)| format!("{k}\n{text}")).collect();
    assert!(unlisted.is_empty(), "not noticed:\n{}", unlisted.join("\n"));
    for (key, why) in HARMLESS {
        assert!(harmless.contains_key(*key), "{key} ({why}) is noticed after all: take it off the list");
    }
    assert!(tried > 1000, "{tried}");
}
