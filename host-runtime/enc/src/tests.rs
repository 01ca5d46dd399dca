//! Every schedule that can be asked for compiles and passes the sealing checks, which are what memory safety rests on.

use super::*;
use hw_bridge::limits::{INLINE_BYTES, STAGE_BYTES};

fn call(op: Op, count: u64, private: bool, in_place: bool) -> Call {
    Call { op, dtype: DataType::Fp32, redop: ReduceOp::Avg, count, root: 0, dst: None, src: None, private, in_place }
}

/// Calls of all collectives for rank `rank` of `n`.
fn calls(rank: usize, n: usize, count: u64, private: bool, in_place: bool) -> Vec<Call> {
    // Those with lists are compiled in `proofs`.
    let plain = Op::ALL.into_iter().filter(|op| !op.facts().by_lists);
    let mut all: Vec<Call> = plain.map(|op| call(op, count, private, in_place)).collect();
    for c in &mut all {
        c.root = n / 2;
        // Averages of integers exist in every algorithm.
        c.dtype = DataType::Int32;
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
                        for forced in Algorithm::ALL {
                            let algorithm = choose(&c, n, Some(forced), Some(8192), true);
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
                    calls(rank, n, count, private, false)
                        .iter()
                        .map(|c| choose(c, n, None, Some(8192), private))
                        .collect()
                };
                assert!((1..n).all(|rank| one(rank) == one(0)));
            }
        }
    }
}

#[test]
fn a_forced_algorithm_that_does_not_serve_is_not_taken() {
    let big = call(Op::AllToAll, 1 << 20, false, false);
    let with = |c: &Call, forced, direct| choose(c, 4, Some(forced), Some(8192), direct);
    assert_eq!(with(&big, Algorithm::Ring, true), Algorithm::Mesh);
    assert_eq!(with(&big, Algorithm::OneHop, true), Algorithm::Mesh);
    assert_eq!(with(&big, Algorithm::Direct, true), Algorithm::Mesh);
    let private = Call { private: true, ..big };
    assert_eq!(with(&private, Algorithm::Mesh, false), Algorithm::Staged);
    assert_eq!(with(&private, Algorithm::Mesh, true), Algorithm::Direct);
    assert_eq!(with(&private, Algorithm::Direct, false), Algorithm::Staged);
    // Where both ranks of a pair would have to read first, and where elements are computed with.
    assert_eq!(with(&Call { in_place: true, ..private }, Algorithm::Direct, true), Algorithm::Staged);
    assert_eq!(with(&Call { op: Op::AllReduce, ..private }, Algorithm::Direct, true), Algorithm::Staged);
}

/// Where partial sums travel in the element type, one that is too large for it would be lost.
#[test]
fn averages_of_floats_go_where_no_partial_sum_travels() {
    let pairwise = [Algorithm::Ring, Algorithm::Halving, Algorithm::Tree, Algorithm::TwoLevel];
    for (op, forced) in [Op::AllReduce, Op::Reduce].into_iter().flat_map(|op| pairwise.map(|a| (op, a))) {
        for dtype in DataType::ALL {
            let average = Call { dtype, ..call(op, 1 << 20, false, false) };
            let with = |redop| choose(&Call { redop, ..average }, 4, Some(forced), Some(8192), true);
            let (sum, avg) = (with(ReduceOp::Sum), with(ReduceOp::Avg));
            assert_eq!(avg, if dtype.is_float() { Algorithm::Mesh } else { sum }, "{op:?} {dtype} {forced:?}");
        }
    }
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
                        let algorithm = choose(&c, n, Some(forced), Some(8192), true);
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

/// In place at any distance: a step that copies between overlapping parts of the one memory is refused when sealed.
#[test]
fn steps_that_overlap_in_place_are_refused() {
    let c = Call { count: 30, ..call(Op::AllGatherV, 30, false, true) };
    let counts = [10, 5, 15];
    let made = |rank| compile_with(&c, Lists::Counts(&counts), rank, 3, Algorithm::Mesh, &[]).unwrap();
    let s = Schedule::clone(&made(1));
    assert_eq!(s.in_place, Some(40));
    let with = |step: Step| {
        let mut s = s.clone();
        s.steps.push(step);
        s.seal(1, 3).map(|_| ()).map_err(|e| e.to_string())
    };
    let copy = |to: u64| with(Step::Copy { dst: At(Place::Out, to), src: At(Place::In, 0), len: 20 });
    for to in [21, 40, 59] {
        assert!(copy(to).unwrap_err().contains("copies onto itself"), "{to}");
    }
    for to in [20, 60] {
        assert_eq!(copy(to), Ok(()));
    }
}

/// A step that writes an input, which may be lent for reading, or what only a peer may write is refused when sealed; so is one
/// that reads and writes a part of the same buffer.
#[test]
fn steps_that_write_what_is_not_theirs_are_refused() {
    let c = call(Op::AllReduce, 1 << 20, true, false);
    let s = Schedule::clone(&compile(&c, 1, 2, Algorithm::Staged, &[]).unwrap());
    let with = |step: Step| {
        let mut s = s.clone();
        s.steps.push(step);
        s.seal(1, 2).map(|_| ()).map_err(|e| e.to_string())
    };
    let copy = |dst: At, src: At| with(Step::Copy { dst, src, len: 16 });
    let (input, output) = (At(Place::In, 0), At(Place::Out, 0));
    assert_eq!(copy(output, input), Ok(()));
    assert_eq!(copy(At(Place::Stage(1, 0), 0), input), Ok(()));
    for dst in [input, At(Place::Stage(0, 0), 0), At(Place::Result(0, 1), 0), At(Place::Slot(0), 0)] {
        assert!(copy(dst, output).unwrap_err().contains("not rank 1's to write"), "{dst:?}");
        let reduce = with(Step::Reduce { dst, first: 0, n: 1, count: 4, op: ReduceOp::Avg });
        assert!(reduce.unwrap_err().contains("not rank 1's to write"), "{dst:?}");
        let swap = with(Step::Swap { a: output, b: dst, len: 16 });
        assert!(swap.unwrap_err().contains("not rank 1's to write"), "{dst:?}");
    }
    assert!(copy(At(Place::Stage(1, 2), 0), input).unwrap_err().contains("half 2 of two"));
    assert_eq!(copy(output, At(Place::Out, 16)), Ok(()));
    assert!(copy(output, At(Place::Out, 15)).unwrap_err().contains("copies onto itself"));
    let nobody = with(Step::ReceivesFromMe(2)).unwrap_err();
    assert!(nobody.contains("rank 2 of 2"), "{nobody}");
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

/// A peer's private memory is copied from and nothing else: no step may write there, compute from there, or touch an output.
#[test]
fn a_direct_schedule_does_nothing_but_read_inputs() {
    let c = call(Op::AllGather, 100, true, false);
    let direct = compile(&c, 0, 2, Algorithm::Direct, &[]).unwrap();
    assert!(direct.direct && !direct.staged && direct.slot_len == 0);
    let refused = |change: &dyn Fn(&mut Schedule)| {
        let mut schedule = (*direct).clone();
        change(&mut schedule);
        schedule.seal(0, 2).unwrap_err().to_string()
    };
    let (theirs, mine) = (At(Place::PeerIn(1), 0), At(Place::Out, 0));
    let out = At(Place::PeerOut(1), 0);
    let sum = |dst| Step::Reduce { dst, first: 0, n: 1, count: 1, op: ReduceOp::Sum };
    for (step, source) in [
        (Step::Copy { dst: theirs, src: mine, len: 4 }, mine),
        (Step::Copy { dst: out, src: mine, len: 4 }, mine),
        (Step::Copy { dst: mine, src: out, len: 4 }, mine),
        (Step::Swap { a: mine, b: theirs, len: 4 }, mine),
        (Step::Swap { a: out, b: mine, len: 4 }, mine),
        (Step::Average { dst: theirs, count: 1, n: 2 }, mine),
        (sum(theirs), mine),
        (sum(mine), theirs),
    ] {
        let e = refused(&|s| {
            s.sources.push(source);
            s.steps.push(step);
        });
        assert!(e.contains("can be copied from and nothing else"), "{step:?}: {e}");
    }
    assert!(refused(&|s| s.header.flags = 0).contains("only a schedule for private memory"));
    assert!(refused(&|s| s.slot_len = 64).contains("only a schedule for private memory"));
    let e = refused(&|s| s.direct = false);
    assert!(e.contains("not memory of a peer that this schedule reaches"), "{e}");
    let e = refused(&|s| s.steps.push(Step::Copy { dst: mine, src: At(Place::PeerIn(1), 397), len: 4 }));
    assert!(e.contains("limit 400"), "{e}");
}

#[test]
fn a_view_of_the_whole_arena_has_its_offsets() {
    use hw_bridge::exec::sequencer::{Arena, CallBuffers, LocalMem};
    use hw_bridge::memory::hbm::Hbm;
    let hbm = Hbm::new(1 << 20).unwrap();
    let (a, b) = (hbm.alloc(100).unwrap(), hbm.alloc(100).unwrap());
    let parts = [&a, &b];
    let arena = Arena { hbm: &hbm, parts: &parts };
    let all = LocalMem::arena(&arena);
    assert_eq!(all.len(), 1 << 20);
    let second = LocalMem::hbm(&b, 3, 10).unwrap();
    assert_eq!(CallBuffers::new(second, all).overlap(), Some(b.offset() as i64 + 3));
}

#[test]
fn lists_have_digests_of_their_own() {
    let all = [
        Lists::Counts(&[1, 2]).digest(),
        Lists::Counts(&[2, 1]).digest(),
        Lists::Counts(&[1, 2, 0]).digest(),
        Lists::Pairs(&[(0, 1)]).digest(),
        Lists::Pairs(&[]).digest(),
    ];
    assert!(all.iter().all(|d| *d != 0));
    assert!((0..all.len()).all(|i| (0..i).all(|j| all[i] != all[j])));
    assert_eq!(Lists::None.digest(), 0);
}

#[test]
fn a_schedule_in_words_has_a_line_for_each_step() {
    let s = compile(&call(Op::AllReduce, 2, false, false), 0, 2, Algorithm::Mesh, &[]).unwrap();
    let text = explain(&s).to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 1 + s.steps.len());
    assert_eq!(lines[0], "all_reduce fp32 avg count 2 by mesh: 8 bytes in, 8 bytes out");
    assert_eq!(lines[1], "   0 wait for rank 1 to arrive");
    assert_eq!(lines[2], "   1 avg of 2, 1 elements, to out+0: in+0, in of rank 1+0");
    assert_eq!(lines[3], "   2 copy 4 bytes: out+0 to out of rank 1+0");
    assert_eq!(lines[4], "   3 signal 2");
}

/// Sizes that no memory has are refused by the checker and not computed with.
#[test]
fn sizes_beyond_what_can_be_checked_are_refused() {
    use check::{CallRank, Flaw, check};
    for (op, count) in [(Op::AllGather, u64::MAX / 4), (Op::AllReduce, u64::MAX / 8), (Op::Gather, u64::MAX)] {
        let call = call(op, count, false, false);
        let s = Schedule::clone(&compile(&Call { count: 4, ..call }, 0, 2, Algorithm::Mesh, &[]).unwrap());
        let m = CallRank { call, schedule: &s };
        let e = check(&[m, m], Lists::None).unwrap_err();
        assert!(matches!(&e, Flaw::Shape(why) if why.contains("beyond what can be checked")), "{e}");
    }
}

/// A wait for a signal that comes only after the other waits as well.
#[test]
fn a_circle_of_waits_is_a_deadlock() {
    use check::{CallRank, Flaw, check};
    let c = call(Op::Barrier, 0, false, false);
    let ring = |rank: usize, first_signals: bool| {
        let mut s = Schedule::clone(&compile(&c, rank, 2, Algorithm::OneHop, &[]).unwrap());
        let wait = Step::Wait { peer: 1 - rank as u16, step: 2 };
        s.steps.extend(if first_signals { [Step::Signal(2), wait] } else { [wait, Step::Signal(2)] });
        s
    };
    let check_of = |a: &Schedule, b: &Schedule| {
        let m = |schedule| CallRank { call: c, schedule };
        check(&[m(a), m(b)], Lists::None)
    };
    assert!(check_of(&ring(0, true), &ring(1, false)).is_ok());
    let e = check_of(&ring(0, false), &ring(1, false)).unwrap_err();
    assert!(matches!(e, Flaw::Deadlock(_)), "{e}");
    let text = e.to_string();
    assert!(text.contains("rank 0 in operation 0, step 1 (wait for signal 2 of rank 1)"), "{text}");
}

#[test]
fn a_schedule_runs_where_it_was_checked_for_and_nowhere_else() {
    use hw_bridge::exec::sequencer::{CallArgs, CallBuffers, Endpoint, LocalMem, OpError};
    use hw_bridge::exec::share::{Market, Share, Terms};
    use hw_bridge::group::NO_RANK;
    use hw_bridge::memory::hbm::Hbm;
    use hw_bridge::os::bell::WaitPolicy;
    use std::sync::Arc;
    let share = Share::new(Arc::new(Market::create().unwrap()), 0, Terms::default()).unwrap();
    let hbm = Hbm::new(1 << 20).unwrap();
    let endpoint = Endpoint::new(0, 1, hbm, WaitPolicy::for_ranks(1, 1), Arc::new(share)).unwrap();
    let mut lane = Arc::new(endpoint).lane(0).unwrap().unwrap();
    let args = CallArgs { dst: NO_RANK, src: NO_RANK, scale: 1.0, timeout: std::time::Duration::from_secs(60) };
    let barrier = Call { op: Op::Barrier, ..call(Op::Barrier, 0, true, false) };
    let mut run = |rank: usize, n: usize| {
        let sealed = compile(&barrier, rank, n, Algorithm::OneHop, &[]).unwrap();
        lane.run(&sealed, &CallBuffers::new(LocalMem::none(), LocalMem::none()), &args)
    };
    for (rank, n) in [(0, 2), (1, 2)] {
        let e = run(rank, n).unwrap_err();
        assert!(matches!(&e, OpError::Seat { rank: 0, nranks: 1, sealed, .. } if *sealed == (rank, n)), "{e}");
    }
    // Which is no end of the communicator.
    run(0, 1).unwrap();
}
