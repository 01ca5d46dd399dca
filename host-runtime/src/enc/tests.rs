//! Every schedule that can be asked for compiles and passes the sealing checks, which are what memory safety rests on.

use super::*;
use hw_bridge::limits::{INLINE_BYTES, STAGE_BYTES};

fn call(op: Op, count: u64, private: bool, in_place: bool) -> Call {
    Call { op, dtype: DataType::Fp32, redop: ReduceOp::Avg, count, root: 0, dst: None, src: None, private, in_place }
}

/// Calls of all collectives for rank `rank` of `n`.
fn calls(rank: usize, n: usize, count: u64, private: bool, in_place: bool) -> Vec<Call> {
    let mut all: Vec<Call> = Op::ALL.into_iter().map(|op| call(op, count, private, in_place)).collect();
    for c in &mut all {
        c.root = n / 2;
        if c.op == Op::SendRecv {
            (c.dst, c.src) = (Some((rank + 1) % n), Some((rank + n - 1) % n));
        }
    }
    all
}

#[test]
fn every_schedule_seals() {
    let rings = |n: usize| vec![(0..n).collect::<Vec<_>>(), (0..n).rev().collect()];
    let counts = [0, 1, 5, 4099, 3 * STAGE_BYTES as u64 / 4 + 1];
    for n in 1..=16 {
        for rank in 0..n {
            for count in counts {
                for (private, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
                    for c in calls(rank, n, count, private, in_place) {
                        for forced in [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Ring, Algorithm::Staged] {
                            let algorithm = choose(&c, n, Some(forced), Some(8192));
                            compile(&c, rank, n, algorithm, &rings(n))
                                .unwrap_or_else(|e| panic!("{c:?} {algorithm:?}: {e}"));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn the_choice_depends_on_what_all_ranks_know() {
    for n in [2usize, 4, 7] {
        for count in [0, 1, 2000, 1 << 20] {
            for private in [false, true] {
                let one = |rank: usize| -> Vec<Algorithm> {
                    calls(rank, n, count, private, false).iter().map(|c| choose(c, n, None, Some(8192))).collect()
                };
                assert!((1..n).all(|rank| one(rank) == one(0)));
            }
        }
    }
}

#[test]
fn a_forced_algorithm_that_does_not_serve_is_not_taken() {
    let big = call(Op::AllToAll, 1 << 20, false, false);
    assert_eq!(choose(&big, 4, Some(Algorithm::Ring), Some(8192)), Algorithm::Mesh);
    assert_eq!(choose(&big, 4, Some(Algorithm::OneHop), Some(8192)), Algorithm::Mesh);
    assert_eq!(choose(&Call { private: true, ..big }, 4, Some(Algorithm::Mesh), Some(8192)), Algorithm::Staged);
}

#[test]
fn parts_cover_the_whole_without_overlap() {
    for count in [0u64, 1, 3, 7, 100] {
        for parts in 1..=9usize {
            let mut at = 0;
            for i in 0..parts {
                let (len, first) = Builder::part(count, parts, i);
                assert_eq!(first, at);
                at += len;
            }
            assert_eq!(at, count);
        }
    }
}

/// The scale of a pre-scaled sum lies in the record, where a tiny payload would. Inputs are only read by steps that scale.
#[test]
fn pre_scaled_schedules_seal_and_leave_room_for_the_scale() {
    let rings = |n: usize| vec![(0..n).collect::<Vec<_>>()];
    for n in 1..=8 {
        for (rank, count) in (0..n).flat_map(|rank| [0, 1, 2, 7, 8, 9, 4099, 600_001].map(|count| (rank, count))) {
            for (private, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
                for op in [Op::AllReduce, Op::ReduceScatter, Op::Reduce] {
                    let c = Call { redop: ReduceOp::PreMulSum, root: n - 1, ..call(op, count, private, in_place) };
                    for forced in [Algorithm::OneHop, Algorithm::Mesh, Algorithm::Ring, Algorithm::Staged] {
                        let algorithm = choose(&c, n, Some(forced), Some(8192));
                        let s = compile(&c, rank, n, algorithm, &rings(n))
                            .unwrap_or_else(|e| panic!("{c:?} {algorithm:?}: {e}"));
                        assert!(s.slot_len == 0 || s.slot_len > INLINE_BYTES as u64, "{c:?} {algorithm:?}");
                        let scaled = s.steps.iter().all(|step| match step {
                            Step::Reduce { op, .. } => *op == ReduceOp::PreMulSum,
                            Step::Average { .. } => false,
                            _ => true,
                        });
                        assert!(scaled, "{c:?} {algorithm:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_pre_scaled_sum_that_cannot_be_right_is_not_sealed() {
    let c = Call { redop: ReduceOp::PreMulSum, ..call(Op::AllReduce, 2, false, false) };
    let sealed = compile(&c, 0, 2, Algorithm::OneHop, &[]).unwrap();
    let refused = |change: &dyn Fn(&mut Schedule)| {
        let mut schedule = (*sealed).clone();
        change(&mut schedule);
        schedule.seal(0, 2).unwrap_err().to_string()
    };
    let tiny = refused(&|s| s.slot_len = 8);
    assert!(tiny.contains("no room for the scale"), "{tiny}");
    let integers = refused(&|s| s.header.dtype = DataType::Int32);
    assert!(integers.contains("a pre-scaled sum of int32"), "{integers}");
    let mixed = refused(&|s| s.header.redop = Some(ReduceOp::Sum));
    assert!(mixed.contains("a pre-scaled sum in another operation"), "{mixed}");
}
