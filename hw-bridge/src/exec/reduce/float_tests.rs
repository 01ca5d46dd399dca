//! Whatever floating-point state the calling thread is in, the bits are the same and the state is left alone.

use std::arch::asm;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::tests::{Random, every_type_and_op, levels};
use super::*;

const DEFAULT: u32 = 0x1F80;
/// Subnormal results become zero.
const ZERO_RESULTS: u32 = 1 << 15;
/// Subnormal operands count as zero.
const ZERO_OPERANDS: u32 = 1 << 6;
/// Flags of exceptions that have been; their masks are seven bits further up.
const FLAGS: u32 = 0x3F;
const MASKS: u32 = FLAGS << 7;

/// States that a program may leave a thread in: each rounding, zeros for subnormals, exceptions unmasked, flags up.
fn states() -> impl Iterator<Item = u32> {
    let fast = ZERO_RESULTS | ZERO_OPERANDS;
    let roundings = (0..4).map(|mode| DEFAULT | mode << 13);
    let trapping = [0, FLAGS, FLAGS | fast, 0b10_0000, 3 << 13].map(|bits| DEFAULT & !MASKS | bits);
    let zeroing = [ZERO_RESULTS, ZERO_OPERANDS, fast, fast | 0b1_0101].map(|bits| DEFAULT | bits);
    roundings.chain(zeroing).chain(trapping)
}

/// What calls a closure.
type Call = fn(&mut dyn FnMut());

/// Calls `f` in a state; answers what it is afterwards. `f` is behind a pointer that assembly has touched, so that nothing
/// of it is computed outside.
fn in_state(state: u32, f: &mut dyn FnMut()) -> u32 {
    fn call(f: &mut dyn FnMut()) {
        f();
    }
    let (mut inside, mut after): (Call, u32) = (call, 0);
    // SAFETY: four bytes are read; the state is the default again at the end of this function, and `f` only calls what is to
    // be tested.
    unsafe { asm!("ldmxcsr [{}]", "/* {} */", in(reg) &raw const state, inout(reg) inside) };
    inside(f);
    let default = DEFAULT;
    // SAFETY: four bytes are written, four read.
    unsafe { asm!("stmxcsr [{}]", "ldmxcsr [{}]", in(reg) &raw mut after, in(reg) &raw const default) };
    after
}

#[test]
fn every_state_gives_the_same_bits_and_is_left_as_it_was() {
    let mut random = Random(11);
    let count = 143;
    for (dtype, op) in every_type_and_op() {
        let sources: Vec<_> = (0..3).map(|_| random.elements(dtype, count)).collect();
        let pointers: Vec<_> = sources.iter().map(|s| s.as_ptr()).collect();
        for (level, n) in levels().into_iter().flat_map(|level| [2, 3].map(|n| (level, n))) {
            let run = |dst: &mut [Vec<u8>; 3]| {
                // SAFETY: buffers of `count` elements, all apart; the level is supported.
                unsafe {
                    reduce_at(level, op, dtype, dst[0].as_mut_ptr(), &pointers[..n], count);
                    if dtype.is_float() {
                        reduce_scaled_at(
                            level,
                            dtype,
                            dst[1].as_mut_ptr(),
                            &pointers[..n],
                            &[0.1, -3.0, 1e-30][..n],
                            count,
                        );
                    }
                    scale_avg_at(level, dtype, dst[2].as_mut_ptr(), count, 3);
                }
            };
            let fresh = || [(); 3].map(|()| sources[0].clone());
            let mut expected = fresh();
            run(&mut expected);
            for state in states() {
                let mut got = fresh();
                let after = in_state(state, &mut || run(&mut got));
                assert!(got == expected, "{level:?} {op} {dtype} n={n} in state {state:#x}");
                // In a state that differs from the default in flags alone, flags may rise.
                let rose = if state & !FLAGS == DEFAULT { after & FLAGS } else { 0 };
                assert_eq!(after, state | rose, "{level:?} {op} {dtype} n={n}");
            }
        }
    }
}

/// The report that began it: subnormal sums, with flush-to-zero switched on.
#[test]
fn subnormal_sums_survive_flush_to_zero() {
    let tiny = f32::from_bits(0x0001_16c2).to_le_bytes();
    let mut sum = [0u8; 4];
    in_state(DEFAULT | ZERO_RESULTS | ZERO_OPERANDS, &mut || {
        reduce_slices(ReduceOp::Sum, DataType::Fp32, &mut sum, &[&tiny, &tiny]).expect("well-formed");
    });
    assert_eq!(u32::from_le_bytes(sum), 0x0002_2d84);
}

#[test]
fn the_state_is_put_back_behind_a_panic_and_inside_of_one_another() {
    let state = DEFAULT & !MASKS | ZERO_RESULTS | 0b100;
    let mut seen = Vec::new();
    let after = in_state(state, &mut || {
        let result =
            catch_unwind(AssertUnwindSafe(|| in_default_float_state(|| std::panic::resume_unwind(Box::new(7)))));
        assert!(result.is_err_and(|e| e.is::<i32>()));
        let kept = in_default_float_state(|| in_default_float_state(|| String::from("moved out")));
        seen.push(kept);
    });
    assert_eq!((after, seen.as_slice()), (state, &["moved out".to_owned()][..]));
}
