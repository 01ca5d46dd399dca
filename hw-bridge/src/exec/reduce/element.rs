//! What an element is and what an operation does to two of them.
//!
//! Every function here is a pure function of its arguments, bit for bit, whoever compiles it for whichever instruction
//! set: integers wrap, f32 arithmetic is IEEE 754 to nearest without contraction, and the one thing IEEE leaves open
//! (the bits of a NaN) is closed by [`Element::encode`], which writes the canonical NaN. That is what makes all code
//! paths of [`reduce`](super::reduce) agree.

use crate::call::{F32_NAN, decode_small, encode_small};

use super::kernel::Isa;

/// An element as it lies in memory, and the type it is computed in.
pub(super) trait Element {
    /// The bits in memory.
    type Raw: Copy + Default;
    /// The type of the accumulator: the integer itself, or f32 for every float.
    type Acc: Accumulator;
    /// Whether a conversion is so long that it decides the speed. Then a part of a block is better padded to a whole
    /// one.
    const COSTLY: bool = false;

    fn decode(raw: Self::Raw) -> Self::Acc;

    /// Rounds once, to nearest even; a NaN becomes the canonical NaN.
    fn encode(acc: Self::Acc) -> Self::Raw;

    /// [`Element::decode`] of a whole block, in any order that [`Element::encode_block`] undoes.
    ///
    /// # Safety
    /// The processor has the instructions of `I`.
    #[inline(always)]
    unsafe fn decode_block<I: Isa, const B: usize>(raw: &[Self::Raw; B]) -> [Self::Acc; B] {
        let mut acc = [Self::Acc::default(); B];
        for i in 0..B {
            acc[i] = Self::decode(raw[i]);
        }
        acc
    }

    /// [`Element::encode`] of a whole block.
    ///
    /// # Safety
    /// The processor has the instructions of `I`.
    #[inline(always)]
    unsafe fn encode_block<I: Isa, const B: usize>(acc: &[Self::Acc; B]) -> [Self::Raw; B] {
        let mut raw = [Self::Raw::default(); B];
        for i in 0..B {
            raw[i] = Self::encode(acc[i]);
        }
        raw
    }
}

/// The arithmetic of one accumulator type.
pub(super) trait Accumulator: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    /// What dividing by a count of sources needs, worked out once for a whole call.
    type Divisor: Copy;
    /// For a count of sources, 0 counting as 1.
    fn divisor(count: usize) -> Self::Divisor;
    /// Divides by the count; integers truncate toward zero.
    fn div(self, by: Self::Divisor) -> Self;
    /// Whether this may be what is left of a sum that was too large. Sums of integers wrap: never.
    #[inline(always)]
    fn is_lost(self) -> bool {
        false
    }
    /// The mean of values whose sum [is lost](Accumulator::is_lost); `None` for a type whose sums are not.
    fn mean(values: impl Iterator<Item = Self>, by: Self::Divisor) -> Option<Self> {
        let _ = (values, by);
        None
    }
}

/// One reduction as the kernels see it.
pub(super) trait Operation {
    /// Whether a sum that is lost is no loss: the result is finite if all elements are.
    const MEAN: bool = false;

    fn fold<A: Accumulator>(a: A, b: A) -> A;

    /// Applied once to the folded value; `divisor` matters to [`Avg`] alone.
    #[inline(always)]
    fn finish<A: Accumulator>(a: A, divisor: A::Divisor) -> A {
        let _ = divisor;
        a
    }
}

pub(super) struct Sum;
pub(super) struct Prod;
pub(super) struct Max;
pub(super) struct Min;
pub(super) struct Avg;

impl Operation for Sum {
    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.add(b)
    }
}

impl Operation for Prod {
    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.mul(b)
    }
}

impl Operation for Max {
    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.max(b)
    }
}

impl Operation for Min {
    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.min(b)
    }
}

impl Operation for Avg {
    const MEAN: bool = true;

    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.add(b)
    }

    #[inline(always)]
    fn finish<A: Accumulator>(a: A, divisor: A::Divisor) -> A {
        a.div(divisor)
    }
}

/// Integers: the accumulator is the element. `$prepare` makes the divisor of a count, which is at least 1; `$div` divides
/// with truncation toward zero.
macro_rules! integer {
    ($($type:ty, $divisor:ty: |$count:ident| $prepare:expr, |$value:ident, $by:ident| $div:expr;)*) => {$(
        impl Element for $type {
            type Raw = $type;
            type Acc = $type;
            #[inline(always)]
            fn decode(raw: $type) -> $type {
                raw
            }
            #[inline(always)]
            fn encode(acc: $type) -> $type {
                acc
            }
        }

        impl Accumulator for $type {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                if self > other { self } else { other }
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                if self < other { self } else { other }
            }
            type Divisor = $divisor;
            #[inline(always)]
            fn divisor(count: usize) -> $divisor {
                let $count = Ord::max(count, 1);
                $prepare
            }
            #[inline(always)]
            fn div(self, by: $divisor) -> Self {
                let ($value, $by) = (self, by);
                $div
            }
        }
    )*};
}

// No processor divides vectors of integers, so the short types multiply with the reciprocal as floats, which is exact if
// the reciprocal is rounded up: the product is then at least the true quotient v/n, and above it by less than a 2^-22nd of
// it (f32; f64: a 2^-51st), while the next whole number is at least 1/n away; v < 2^16 (f64: v < 2^32) keeps the one below
// the other. A whole quotient is not missed from below, because rounding to nearest does not cross a number that the
// float can hold. A count too large for the float to hold exactly exceeds every element, and the product truncates to
// zero as it should. The quotient is finite and no larger in magnitude than the element: it is in the range of the
// element's type.
integer! {
    // SAFETY: finite and in range, as said above.
    u8, f32: |count| reciprocal_f32(count), |v, by| unsafe { (f32::from(v) * by).to_int_unchecked::<i32>() as u8 };
    // SAFETY: finite and in range, as said above.
    i8, f32: |count| reciprocal_f32(count), |v, by| unsafe { (f32::from(v) * by).to_int_unchecked::<i32>() as i8 };
    // SAFETY: finite and in range, as said above.
    u16, f32: |count| reciprocal_f32(count), |v, by| unsafe { (f32::from(v) * by).to_int_unchecked::<i32>() as u16 };
    // SAFETY: finite and in range, as said above.
    i16, f32: |count| reciprocal_f32(count), |v, by| unsafe { (f32::from(v) * by).to_int_unchecked::<i32>() as i16 };
    // SAFETY: finite and in range, as said above.
    u32, f64: |count| reciprocal_f64(count), |v, by| unsafe { (f64::from(v) * by).to_int_unchecked::<u32>() };
    // SAFETY: finite and in range, as said above.
    i32, f64: |count| reciprocal_f64(count), |v, by| unsafe { (f64::from(v) * by).to_int_unchecked::<i32>() };
    u64, Magic: |count| Magic::new(count as u64), |v, by| by.divide(v);
    i64, Magic: |count| Magic::new(count as u64), |v, by| {
        // By magnitude, because a count above i64::MAX has no signed form.
        let quotient = by.divide(v.unsigned_abs()).cast_signed();
        if v < 0 { quotient.wrapping_neg() } else { quotient }
    };
}

/// The reciprocal, or at most two units of the last place more, never less.
#[inline(always)]
fn reciprocal_f32(count: usize) -> f32 {
    f32::from_bits((1.0 / count as f32).to_bits() + 1)
}

/// As [`reciprocal_f32`].
#[inline(always)]
fn reciprocal_f64(count: usize) -> f64 {
    f64::from_bits((1.0 / count as f64).to_bits() + 1)
}

/// Division of 64-bit numbers by multiplication.
#[derive(Clone, Copy)]
pub(super) struct Magic {
    count: u64,
    /// (2^64 − 1) / count, truncated.
    reciprocal: u64,
}

impl Magic {
    /// For a count of at least 1.
    #[inline(always)]
    fn new(count: u64) -> Magic {
        let count = Ord::max(count, 1);
        Magic { count, reciprocal: u64::MAX / count }
    }

    #[inline(always)]
    fn divide(self, value: u64) -> u64 {
        // The reciprocal is at most 2^64 / count and more than 1 below that at no time, so that the estimate is the
        // quotient or one less; the remainder tells.
        let estimate = ((u128::from(value) * u128::from(self.reciprocal)) >> 64) as u64;
        let rest = value.wrapping_sub(estimate.wrapping_mul(self.count));
        estimate + u64::from(rest >= self.count)
    }
}

impl Accumulator for f32 {
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self + other
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self * other
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // Equal numbers have equal bits, except for the two zeros: the `and` of those is +0.
        let equal = f32::from_bits(self.to_bits() & other.to_bits());
        let larger = if self > other { self } else { other };
        nan_or(self, if self == other { equal } else { larger })
    }

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // As above; the `or` of the two zeros is −0.
        let equal = f32::from_bits(self.to_bits() | other.to_bits());
        let smaller = if self < other { self } else { other };
        nan_or(self, if self == other { equal } else { smaller })
    }

    type Divisor = f32;

    #[inline(always)]
    fn divisor(count: usize) -> f32 {
        count.max(1) as f32
    }

    #[inline(always)]
    fn div(self, by: f32) -> Self {
        self / by
    }

    #[inline(always)]
    fn is_lost(self) -> bool {
        !self.is_finite()
    }

    /// No sum of f32 is too large for f64, and no mean of them for f32: what is infinite here was so before.
    fn mean(values: impl Iterator<Item = Self>, by: f32) -> Option<Self> {
        let sum: f64 = values.map(f64::from).sum();
        Some((sum / f64::from(by)) as f32)
    }
}

/// `a` if it is a NaN. A NaN on the other side has already won, since every comparison with it is false.
#[inline(always)]
fn nan_or(a: f32, otherwise: f32) -> f32 {
    if a.is_nan() { a } else { otherwise }
}

/// The bits of a value, with the canonical NaN for any NaN. (As bits, because that is where a NaN has an identity.)
#[inline(always)]
fn canonical(value: f32) -> u32 {
    if value.is_nan() { F32_NAN } else { value.to_bits() }
}

/// fp32, and fp32r, which is the same 32 bits.
pub(super) struct Fp32;

impl Element for Fp32 {
    type Raw = u32;
    type Acc = f32;

    #[inline(always)]
    fn decode(raw: u32) -> f32 {
        f32::from_bits(raw)
    }

    #[inline(always)]
    fn encode(acc: f32) -> u32 {
        canonical(acc)
    }
}

/// bfloat16: the upper half of an f32.
pub(super) struct Bf16;

impl Element for Bf16 {
    type Raw = u16;
    type Acc = f32;

    #[inline(always)]
    fn decode(raw: u16) -> f32 {
        f32::from_bits(u32::from(raw) << 16)
    }

    #[inline(always)]
    fn encode(acc: f32) -> u16 {
        (bf16_rounded(acc) >> 16) as u16
    }

    // Two elements to a word: the accumulators of the lower halves, then those of the upper. That spares the processor
    // the widening and narrowing of vectors, which is most of the work.
    #[inline(always)]
    unsafe fn decode_block<I: Isa, const B: usize>(raw: &[u16; B]) -> [f32; B] {
        let mut acc = [0.0; B];
        if !B.is_multiple_of(2) {
            for i in 0..B {
                acc[i] = Self::decode(raw[i]);
            }
            return acc;
        }
        let (low, high) = acc.split_at_mut(B / 2);
        for i in 0..B / 2 {
            // SAFETY: word `i < B / 2` lies inside the `B` halves; no alignment is asked for.
            let word = unsafe { raw.as_ptr().cast::<u32>().add(i).read_unaligned() };
            low[i] = f32::from_bits(word << 16);
            high[i] = f32::from_bits(word & 0xFFFF_0000);
        }
        acc
    }

    #[inline(always)]
    unsafe fn encode_block<I: Isa, const B: usize>(acc: &[f32; B]) -> [u16; B] {
        let mut raw = [0; B];
        if !B.is_multiple_of(2) {
            for i in 0..B {
                raw[i] = Self::encode(acc[i]);
            }
            return raw;
        }
        let (low, high) = acc.split_at(B / 2);
        for i in 0..B / 2 {
            let word = (bf16_rounded(low[i]) >> 16) | (bf16_rounded(high[i]) & 0xFFFF_0000);
            // SAFETY: word `i < B / 2` lies inside the `B` halves; no alignment is asked for.
            unsafe { raw.as_mut_ptr().cast::<u32>().add(i).write_unaligned(word) };
        }
        raw
    }
}

/// The bits of a value, rounded so that the upper half of them is the nearest bf16 (the lower half is noise).
#[inline(always)]
fn bf16_rounded(value: f32) -> u32 {
    // The canonical NaN has a zero lower half: rounding does not carry it into the sign.
    let bits = canonical(value);
    bits.wrapping_add(0x7FFF + ((bits >> 16) & 1))
}

/// IEEE half. The blocks use the conversion instructions where there are any.
pub(super) struct Fp16;

impl Element for Fp16 {
    type Raw = u16;
    type Acc = f32;

    #[inline(always)]
    fn decode(raw: u16) -> f32 {
        decode_small::<5, 10>(u32::from(raw))
    }

    #[inline(always)]
    fn encode(acc: f32) -> u16 {
        encode_small::<5, 10>(acc) as u16
    }

    #[inline(always)]
    unsafe fn decode_block<I: Isa, const B: usize>(raw: &[u16; B]) -> [f32; B] {
        // SAFETY: the caller vouches for the instructions of `I`.
        unsafe { I::widen_halves(raw) }
    }

    #[inline(always)]
    unsafe fn encode_block<I: Isa, const B: usize>(acc: &[f32; B]) -> [u16; B] {
        // SAFETY: the caller vouches for the instructions of `I`.
        unsafe { I::narrow_halves(acc) }
    }
}

/// An 8-bit float with `E` exponent and `M` mantissa bits. A set of instructions may have a shorter way for a
/// block.
pub(super) struct Float8<const E: u32, const M: u32>;

impl<const E: u32, const M: u32> Element for Float8<E, M> {
    type Raw = u8;
    type Acc = f32;
    const COSTLY: bool = true;

    #[inline(always)]
    fn decode(raw: u8) -> f32 {
        decode_small::<E, M>(u32::from(raw))
    }

    #[inline(always)]
    fn encode(acc: f32) -> u8 {
        encode_small::<E, M>(acc) as u8
    }

    #[inline(always)]
    unsafe fn decode_block<I: Isa, const B: usize>(raw: &[u8; B]) -> [f32; B] {
        // SAFETY: the caller vouches for the instructions of `I`.
        unsafe { I::widen_fp8::<E, M, B>(raw) }
    }

    #[inline(always)]
    unsafe fn encode_block<I: Isa, const B: usize>(acc: &[f32; B]) -> [u8; B] {
        // SAFETY: the caller vouches for the instructions of `I`.
        unsafe { I::narrow_fp8::<E, M, B>(acc) }
    }
}
