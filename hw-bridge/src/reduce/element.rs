//! What an element is and what an operation does to two of them.
//!
//! Every function here is a pure function of its arguments, bit for bit, whoever compiles it for whichever instruction
//! set: integers wrap, f32 arithmetic is IEEE 754 to nearest without contraction, and the one thing IEEE leaves open
//! (the bits of a NaN) is closed by [`Element::encode`], which writes the canonical NaN. That is what makes all code
//! paths of [`reduce`](super::reduce) agree.

use crate::dtype::{F32_NAN, decode_small, encode_small};

use super::kernel::Isa;

/// An element as it lies in memory, and the type it is computed in.
pub(super) trait Element {
    /// The bits in memory.
    type Raw: Copy + Default;
    /// The type of the accumulator: the integer itself, or f32 for every float.
    type Acc: Accumulator;
    /// Whether a conversion is so long that it decides the speed. Then a part of a block is better padded to a whole
    /// one, and a loop of its own for two sources gains nothing.
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
    /// Divides by a count of sources, 0 counting as 1; integers truncate toward zero.
    fn div(self, count: usize) -> Self;
}

/// One reduction as the kernels see it.
pub(super) trait Operation {
    fn fold<A: Accumulator>(a: A, b: A) -> A;

    /// Applied once to the folded value; `divisor` matters to [`Avg`] alone.
    #[inline(always)]
    fn finish<A: Accumulator>(a: A, divisor: usize) -> A {
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
    #[inline(always)]
    fn fold<A: Accumulator>(a: A, b: A) -> A {
        a.add(b)
    }

    #[inline(always)]
    fn finish<A: Accumulator>(a: A, divisor: usize) -> A {
        a.div(divisor)
    }
}

/// Integers: the accumulator is the element. `$div` divides `self` by `count` with truncation toward zero.
macro_rules! integer {
    ($($type:ty: |$value:ident, $count:ident| $div:expr;)*) => {$(
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
            #[inline(always)]
            fn div(self, count: usize) -> Self {
                let ($value, $count) = (self, count.max(1));
                $div
            }
        }
    )*};
}

// No processor divides vectors of integers, so the short types divide as floats, which is exact: the true quotient of
// an a-bit number by n is at least 1/n away from the next whole number it does not reach, and the rounding error of the
// quotient is at most 2^-24 (f32, a ≤ 16) or 2^-53 (f64, a ≤ 32) of it, which is less than 1/n of a unit. A count too
// large for the float to hold exactly exceeds every element, and the quotient truncates to zero as it should. The count
// is at least 1, so the quotient is finite and no larger in magnitude than the element: it is in the range of the
// element's type.
integer! {
    // SAFETY: finite and in range, as said above.
    u8: |value, count| unsafe { (f32::from(value) / count as f32).to_int_unchecked::<i32>() as u8 };
    // SAFETY: finite and in range, as said above.
    i8: |value, count| unsafe { (f32::from(value) / count as f32).to_int_unchecked::<i32>() as i8 };
    // SAFETY: finite and in range, as said above.
    u16: |value, count| unsafe { (f32::from(value) / count as f32).to_int_unchecked::<i32>() as u16 };
    // SAFETY: finite and in range, as said above.
    i16: |value, count| unsafe { (f32::from(value) / count as f32).to_int_unchecked::<i32>() as i16 };
    // SAFETY: finite and in range, as said above.
    u32: |value, count| unsafe { (f64::from(value) / count as f64).to_int_unchecked::<u32>() };
    // SAFETY: finite and in range, as said above.
    i32: |value, count| unsafe { (f64::from(value) / count as f64).to_int_unchecked::<i32>() };
    u64: |value, count| value / count as u64;
    i64: |value, count| {
        // By magnitude, because a count above i64::MAX has no signed form.
        let quotient = (value.unsigned_abs() / count as u64).cast_signed();
        if value < 0 { quotient.wrapping_neg() } else { quotient }
    };
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

    #[inline(always)]
    fn div(self, count: usize) -> Self {
        self / count.max(1) as f32
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

/// An 8-bit float with `E` exponent and `M` mantissa bits.
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
}
