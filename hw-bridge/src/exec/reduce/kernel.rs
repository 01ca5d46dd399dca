//! The loops, compiled once per instruction set.
//!
//! One generic body ([`run`]) does all the work in blocks of a fixed number of elements: a block of every source is
//! loaded into a local array, folded, and stored, so each source is read once and `dst` is written once. Because a
//! block is loaded whole before it is stored, `dst` may be one of the sources, and the compiler needs no overlap check
//! to vectorise. The body is inlined into one function per instruction set, where the compiler has those instructions
//! at its disposal; the only intrinsics are the conversions of halves and of 8-bit floats.
//!
//! What remains after the last whole block is done in smaller blocks by the same code, so the result for an element
//! does not depend on where it stands.

use super::element::{Accumulator, Avg, Bf16, Element, Float8, Fp16, Fp32, Max, Min, Operation, Prod, Sum};
use crate::call::{DataType, ReduceOp, decode_small, encode_small};

/// Folds `count` elements of every source into `dst`; the last argument is the divisor of an average.
///
/// # Safety
/// The contract of [`reduce`](super::reduce), and the processor has the instructions the kernel was compiled for.
pub(super) type Kernel = unsafe fn(*mut u8, &[*const u8], usize, usize);

/// Sums `count` elements of every source into `dst`, each source times its scale.
///
/// # Safety
/// The contract of [`reduce_scaled`](super::reduce_scaled), and the processor has the instructions the kernel was
/// compiled for.
pub(super) type ScaledKernel = unsafe fn(*mut u8, &[*const u8], &[f32], usize);

/// Numbers of operations, and of types, are below these.
const OPERATIONS: usize = ReduceOp::PreMulSum as usize + 1;
const TYPES: usize = DataType::Fp8E5 as usize + 1;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Whatever the target of this build has: always available, on every architecture.
    Portable,
    /// AVX2 and F16C: every server of the last ten years.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// Every level, slowest first; not all of them run on this machine.
    pub(super) const ALL: &'static [Level] = &[
        Level::Portable,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
    ];

    /// Whether this processor, and the operating system on it, can run the level.
    pub(super) fn is_supported(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// The fastest level this machine supports.
    pub(super) fn best() -> Level {
        Level::ALL.iter().rev().copied().find(|level| level.is_supported()).unwrap_or(Level::Portable)
    }

    /// The kernel of one operation on one type. Only a supported level's kernel may be called.
    #[inline]
    pub(super) fn kernel(self, op: ReduceOp, dtype: DataType) -> Kernel {
        match self {
            Level::Portable => portable::kernel(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::kernel(op, dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::kernel(op, dtype),
        }
    }

    /// The kernel of the pre-scaled sum of one type; `None` for integers. Only a supported level's kernel may be called.
    #[inline]
    pub(super) fn scaled_kernel(self, dtype: DataType) -> Option<ScaledKernel> {
        match self {
            Level::Portable => portable::scaled_kernel(dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::scaled_kernel(dtype),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::scaled_kernel(dtype),
        }
    }
}

/// What becomes of a source's elements before they are folded.
trait Terms<A>: Copy {
    /// Applied to a block of source number `source`.
    fn apply<const B: usize>(self, source: usize, values: &mut [A; B]);
}

/// Elements as they are.
#[derive(Clone, Copy)]
struct Plain;

impl<A> Terms<A> for Plain {
    #[inline(always)]
    fn apply<const B: usize>(self, _: usize, _: &mut [A; B]) {}
}

/// Source i times scale i; a source without a scale stays as it is.
#[derive(Clone, Copy)]
struct Scaled<'a>(&'a [f32]);

impl Terms<f32> for Scaled<'_> {
    #[inline(always)]
    fn apply<const B: usize>(self, source: usize, values: &mut [f32; B]) {
        if let Some(scale) = self.0.get(source).copied() {
            for value in values {
                *value *= scale;
            }
        }
    }
}

/// What differs between instruction sets beyond what the compiler does by itself.
pub(super) trait Isa {
    /// Whether two sources, the common case, get a loop of their own.
    const PAIRS: bool = true;

    /// Converts halves to f32, exactly.
    ///
    /// # Safety
    /// The processor has the instructions of this set.
    #[inline(always)]
    unsafe fn widen_halves<const B: usize>(raw: &[u16; B]) -> [f32; B] {
        let mut values = [0.0; B];
        for i in 0..B {
            values[i] = decode_small::<5, 10>(u32::from(raw[i]));
        }
        values
    }

    /// Converts f32 to halves: to nearest even, NaNs to the canonical NaN.
    ///
    /// # Safety
    /// The processor has the instructions of this set.
    #[inline(always)]
    unsafe fn narrow_halves<const B: usize>(values: &[f32; B]) -> [u16; B] {
        let mut raw = [0; B];
        for i in 0..B {
            raw[i] = encode_small::<5, 10>(values[i]) as u16;
        }
        raw
    }

    /// Converts 8-bit floats of `E` exponent and `M` mantissa bits to f32, exactly.
    ///
    /// # Safety
    /// The processor has the instructions of this set.
    #[inline(always)]
    unsafe fn widen_fp8<const E: u32, const M: u32, const B: usize>(raw: &[u8; B]) -> [f32; B] {
        let mut values = [0.0; B];
        for i in 0..B {
            values[i] = decode_small::<E, M>(u32::from(raw[i]));
        }
        values
    }

    /// Converts f32 to 8-bit floats: to nearest even, NaNs to the canonical NaN.
    ///
    /// # Safety
    /// The processor has the instructions of this set.
    #[inline(always)]
    unsafe fn narrow_fp8<const E: u32, const M: u32, const B: usize>(values: &[f32; B]) -> [u8; B] {
        let mut raw = [0; B];
        for i in 0..B {
            raw[i] = encode_small::<E, M>(values[i]) as u8;
        }
        raw
    }
}

/// Elements of a large block: for f32, four registers of AVX-512 or eight of AVX2.
const LARGE: usize = 64;
/// Elements of a small block: for f32, one register of AVX2.
const SMALL: usize = 8;

/// # Safety
/// The contract of [`reduce`](super::reduce), and the processor has the instructions of `I`.
#[inline(always)]
unsafe fn run<T: Element, O: Operation, I: Isa, S: Terms<T::Acc>>(
    dst: *mut u8,
    sources: &[*const u8],
    terms: S,
    count: usize,
    divisor: usize,
) {
    let divisor = T::Acc::divisor(divisor);
    let size = size_of::<T::Raw>();
    let mut done = 0;
    // SAFETY: `done + block <= count` before each block, so a block lies inside `dst` and every source.
    unsafe {
        match *sources {
            // The copy of the two pointers is what lets the compiler unroll the loop over the sources and keep a block
            // in registers. With more sources the local array, in the first-level cache, keeps up with memory.
            [a, b] if I::PAIRS => {
                let pair = [a, b];
                while count - done >= LARGE {
                    block::<T, O, I, S, LARGE>(dst, &pair, terms, done * size, LARGE, divisor);
                    done += LARGE;
                }
            }
            _ => {
                while count - done >= LARGE {
                    block::<T, O, I, S, LARGE>(dst, sources, terms, done * size, LARGE, divisor);
                    done += LARGE;
                }
            }
        }
        if T::COSTLY {
            if done < count {
                block::<T, O, I, S, LARGE>(dst, sources, terms, done * size, count - done, divisor);
            }
            return;
        }
        while count - done >= SMALL {
            block::<T, O, I, S, SMALL>(dst, sources, terms, done * size, SMALL, divisor);
            done += SMALL;
        }
        while count - done >= 1 {
            block::<T, O, I, S, 1>(dst, sources, terms, done * size, 1, divisor);
            done += 1;
        }
    }
}

/// One block of `B` elements, `offset` bytes into `dst` and every source, of which only the first `valid` exist.
///
/// # Safety
/// As [`run`], and `valid`, at most `B`, elements lie inside `dst` and every source.
#[inline(always)]
unsafe fn block<T: Element, O: Operation, I: Isa, S: Terms<T::Acc>, const B: usize>(
    dst: *mut u8,
    sources: &[*const u8],
    terms: S,
    offset: usize,
    valid: usize,
    divisor: <T::Acc as Accumulator>::Divisor,
) {
    let Some((&first, others)) = sources.split_first() else {
        return;
    };
    // SAFETY: the caller vouches that `valid` elements at `offset` lie inside each buffer and for the instructions of
    // `I`; every load of the block comes before its store, so that `dst` may be a source.
    unsafe {
        let mut acc = T::decode_block::<I, B>(&load(first.add(offset), valid));
        terms.apply(0, &mut acc);
        for (i, source) in others.iter().enumerate() {
            let mut next = T::decode_block::<I, B>(&load(source.add(offset), valid));
            terms.apply(i + 1, &mut next);
            for i in 0..B {
                acc[i] = O::fold(acc[i], next[i]);
            }
        }
        for value in &mut acc {
            *value = O::finish(*value, divisor);
        }
        let mut raw = T::encode_block::<I, B>(&acc);
        if O::MEAN && acc.iter().fold(false, |any, value| any | value.is_lost()) {
            means::<T, B>(&mut raw, sources, offset, valid, divisor);
        }
        store(dst.add(offset), &raw, valid);
    }
}

/// Computes those means of a block anew whose sums were too large. (Or held an infinity or a NaN, which they still do then.)
///
/// # Safety
/// As [`block`], and nothing of the block was stored yet.
#[cold]
#[inline(never)]
unsafe fn means<T: Element, const B: usize>(
    raw: &mut [T::Raw; B],
    sources: &[*const u8],
    offset: usize,
    valid: usize,
    divisor: <T::Acc as Accumulator>::Divisor,
) {
    for (i, raw) in raw[..valid].iter_mut().enumerate() {
        if T::decode(*raw).is_lost() {
            let at = offset + i * size_of::<T::Raw>();
            // SAFETY: the caller vouches that `valid` elements at `offset` lie inside each source; no alignment is asked for.
            let values =
                sources.iter().map(|source| T::decode(unsafe { source.add(at).cast::<T::Raw>().read_unaligned() }));
            if let Some(mean) = T::Acc::mean(values, divisor) {
                *raw = T::encode(mean);
            }
        }
    }
}

/// Reads the first `valid` elements of a block; the others are zero.
///
/// # Safety
/// `valid` is at most `B`, and as many elements can be read at `from`, which may have any alignment.
#[inline(always)]
unsafe fn load<R: Copy + Default, const B: usize>(from: *const u8, valid: usize) -> [R; B] {
    // SAFETY: the caller's contract; the array holds `B >= valid` elements.
    unsafe {
        if valid == B {
            return from.cast::<[R; B]>().read_unaligned();
        }
        let mut block = [R::default(); B];
        std::ptr::copy_nonoverlapping(from, block.as_mut_ptr().cast(), valid * size_of::<R>());
        block
    }
}

/// Writes the first `valid` elements of a block.
///
/// # Safety
/// `valid` is at most `B`, and as many elements can be written at `to`, which may have any alignment.
#[inline(always)]
unsafe fn store<R: Copy, const B: usize>(to: *mut u8, block: &[R; B], valid: usize) {
    // SAFETY: the caller's contract; the array holds `B >= valid` elements.
    unsafe {
        if valid == B {
            to.cast::<[R; B]>().write_unaligned(*block);
        } else {
            std::ptr::copy_nonoverlapping(block.as_ptr().cast(), to, valid * size_of::<R>());
        }
    }
}

/// The module of one instruction set: its [`Isa`], the function that [`run`] is inlined into, and the choice of a
/// kernel.
macro_rules! level {
    ($module:ident, $isa:ident, $(#[$features:meta])?) => {
        mod $module {
            use super::*;

            $(#[$features])?
            unsafe fn compiled<T: Element, O: Operation>(
                dst: *mut u8,
                sources: &[*const u8],
                count: usize,
                divisor: usize,
            ) {
                // SAFETY: the caller's contract, passed on; the features named above are those of the Isa.
                unsafe { run::<T, O, super::$isa, Plain>(dst, sources, Plain, count, divisor) }
            }

            $(#[$features])?
            unsafe fn scaled<T: Element<Acc = f32>>(
                dst: *mut u8,
                sources: &[*const u8],
                scales: &[f32],
                count: usize,
            ) {
                // SAFETY: the caller's contract, passed on; the features named above are those of the Isa.
                unsafe { run::<T, Sum, super::$isa, Scaled<'_>>(dst, sources, Scaled(scales), count, 1) }
            }

            const fn of<T: Element>(op: ReduceOp) -> Kernel {
                match op {
                    // Without scales all of them are one.
                    ReduceOp::Sum | ReduceOp::PreMulSum => compiled::<T, Sum>,
                    ReduceOp::Prod => compiled::<T, Prod>,
                    ReduceOp::Max => compiled::<T, Max>,
                    ReduceOp::Min => compiled::<T, Min>,
                    ReduceOp::Avg => compiled::<T, Avg>,
                }
            }

            const fn choose(op: ReduceOp, dtype: DataType) -> Kernel {
                match dtype {
                    DataType::Uint64 => of::<u64>(op),
                    DataType::Int64 => of::<i64>(op),
                    DataType::Uint32 => of::<u32>(op),
                    DataType::Int32 => of::<i32>(op),
                    DataType::Uint16 => of::<u16>(op),
                    DataType::Int16 => of::<i16>(op),
                    DataType::Uint8 => of::<u8>(op),
                    DataType::Int8 => of::<i8>(op),
                    DataType::Fp32 | DataType::Fp32r => of::<Fp32>(op),
                    DataType::Bf16 => of::<Bf16>(op),
                    DataType::Fp16 => of::<Fp16>(op),
                    DataType::Fp8E3 => of::<Float8<3, 4>>(op),
                    DataType::Fp8E4 => of::<Float8<4, 3>>(op),
                    DataType::Fp8E5 => of::<Float8<5, 2>>(op),
                }
            }

            /// By the numbers of type and operation, so that small calls need not choose anew.
            static CHOSEN: [[Kernel; OPERATIONS]; TYPES] = {
                let mut all = [[choose(ReduceOp::Sum, DataType::Uint8); OPERATIONS]; TYPES];
                let mut t = 0;
                while t < DataType::ALL.len() {
                    let dtype = DataType::ALL[t];
                    all[dtype as usize][ReduceOp::PreMulSum as usize] = choose(ReduceOp::PreMulSum, dtype);
                    let mut o = 0;
                    while o < ReduceOp::ALL.len() {
                        let op = ReduceOp::ALL[o];
                        all[dtype as usize][op as usize] = choose(op, dtype);
                        o += 1;
                    }
                    t += 1;
                }
                all
            };

            #[inline]
            pub(super) fn kernel(op: ReduceOp, dtype: DataType) -> Kernel {
                CHOSEN[dtype as usize][op as usize]
            }

            pub(super) fn scaled_kernel(dtype: DataType) -> Option<ScaledKernel> {
                let kernel: ScaledKernel = match dtype {
                    DataType::Fp32 | DataType::Fp32r => scaled::<Fp32>,
                    DataType::Bf16 => scaled::<Bf16>,
                    DataType::Fp16 => scaled::<Fp16>,
                    DataType::Fp8E3 => scaled::<Float8<3, 4>>,
                    DataType::Fp8E4 => scaled::<Float8<4, 3>>,
                    DataType::Fp8E5 => scaled::<Float8<5, 2>>,
                    _ => return None,
                };
                Some(kernel)
            }
        }
    };
}

struct Portable;

impl Isa for Portable {
    // Where another level does the work, this one need not be fast, only small.
    const PAIRS: bool = !cfg!(target_arch = "x86_64");
}

level!(portable, Portable,);

#[cfg(target_arch = "x86_64")]
struct Avx2;

#[cfg(target_arch = "x86_64")]
impl Isa for Avx2 {
    #[inline(always)]
    unsafe fn widen_halves<const B: usize>(raw: &[u16; B]) -> [f32; B] {
        // SAFETY: the caller has AVX2 and F16C, which is what this Isa stands for.
        unsafe { halves::widen_by_8(raw) }
    }

    #[inline(always)]
    unsafe fn narrow_halves<const B: usize>(values: &[f32; B]) -> [u16; B] {
        // SAFETY: the caller has AVX2 and F16C, which is what this Isa stands for.
        unsafe { halves::narrow_by_8(values) }
    }
}

#[cfg(target_arch = "x86_64")]
level!(avx2, Avx2, #[target_feature(enable = "avx2,f16c")]);

#[cfg(target_arch = "x86_64")]
struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Isa for Avx512 {
    #[inline(always)]
    unsafe fn widen_halves<const B: usize>(raw: &[u16; B]) -> [f32; B] {
        // SAFETY: the caller has AVX-512F, AVX2 and F16C, which is what this Isa stands for.
        unsafe { if B.is_multiple_of(16) { halves::widen_by_16(raw) } else { halves::widen_by_8(raw) } }
    }

    #[inline(always)]
    unsafe fn narrow_halves<const B: usize>(values: &[f32; B]) -> [u16; B] {
        // SAFETY: the caller has AVX-512F, AVX2 and F16C, which is what this Isa stands for.
        unsafe { if B.is_multiple_of(16) { halves::narrow_by_16(values) } else { halves::narrow_by_8(values) } }
    }

    #[inline(always)]
    unsafe fn widen_fp8<const E: u32, const M: u32, const B: usize>(raw: &[u8; B]) -> [f32; B] {
        // SAFETY: the caller has AVX-512 F and BW, which is part of what this Isa stands for.
        unsafe { halves::widen_fp8_by_32::<E, M, B>(raw) }
    }

    #[inline(always)]
    unsafe fn narrow_fp8<const E: u32, const M: u32, const B: usize>(values: &[f32; B]) -> [u8; B] {
        // SAFETY: the caller has AVX-512 F and BW, which is part of what this Isa stands for.
        unsafe { halves::narrow_fp8_by_32::<E, M, B>(values) }
    }
}

#[cfg(target_arch = "x86_64")]
level!(avx512, Avx512, #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]);

/// The conversion instructions for halves, and 8-bit floats by way of them. They honour subnormals whatever the control register says, and round to
/// nearest even as asked in the instruction itself. Blocks that are no multiple of a register fall back to arithmetic.
#[cfg(target_arch = "x86_64")]
mod halves {
    use std::arch::x86_64::*;

    use super::{Isa, Portable};
    use crate::call::F32_NAN;

    /// # Safety
    /// The processor has AVX2 and F16C.
    #[inline(always)]
    pub(super) unsafe fn widen_by_8<const B: usize>(raw: &[u16; B]) -> [f32; B] {
        // SAFETY: every access is at `i < B` with 8 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            if !B.is_multiple_of(8) {
                return Portable::widen_halves(raw);
            }
            let mut values = [0.0f32; B];
            for i in (0..B).step_by(8) {
                let halves = _mm_loadu_si128(raw.as_ptr().add(i).cast());
                _mm256_storeu_ps(values.as_mut_ptr().add(i), _mm256_cvtph_ps(halves));
            }
            values
        }
    }

    /// # Safety
    /// The processor has AVX2 and F16C.
    #[inline(always)]
    pub(super) unsafe fn narrow_by_8<const B: usize>(values: &[f32; B]) -> [u16; B] {
        // SAFETY: every access is at `i < B` with 8 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            if !B.is_multiple_of(8) {
                return Portable::narrow_halves(values);
            }
            let mut raw = [0u16; B];
            let nan = _mm256_castsi256_ps(_mm256_set1_epi32(F32_NAN.cast_signed()));
            for i in (0..B).step_by(8) {
                let v = _mm256_loadu_ps(values.as_ptr().add(i));
                let v = _mm256_blendv_ps(v, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
                _mm_storeu_si128(raw.as_mut_ptr().add(i).cast(), halves);
            }
            raw
        }
    }

    /// # Safety
    /// The processor has AVX-512F.
    #[inline(always)]
    pub(super) unsafe fn widen_by_16<const B: usize>(raw: &[u16; B]) -> [f32; B] {
        // SAFETY: every access is at `i < B` with 16 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            let mut values = [0.0f32; B];
            for i in (0..B).step_by(16) {
                let halves = _mm256_loadu_si256(raw.as_ptr().add(i).cast());
                _mm512_storeu_ps(values.as_mut_ptr().add(i), _mm512_cvtph_ps(halves));
            }
            values
        }
    }

    /// # Safety
    /// The processor has AVX-512F.
    #[inline(always)]
    pub(super) unsafe fn narrow_by_16<const B: usize>(values: &[f32; B]) -> [u16; B] {
        // SAFETY: every access is at `i < B` with 16 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            let mut raw = [0u16; B];
            let nan = _mm512_castsi512_ps(_mm512_set1_epi32(F32_NAN.cast_signed()));
            for i in (0..B).step_by(16) {
                let v = _mm512_loadu_ps(values.as_ptr().add(i));
                let v = _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), nan);
                let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
                _mm256_storeu_si256(raw.as_mut_ptr().add(i).cast(), halves);
            }
            raw
        }
    }

    // An 8-bit float is a half with fewer bits: shifted into place it has its value times a power of two that makes up for
    // the smaller bias, subnormals included. Only infinity and NaN must be told to the half.

    /// What an 8-bit float's value is multiplied by when it is read as a half: 2^(bias − 15).
    const fn shrink(exponent_bits: u32) -> f32 {
        f32::from_bits((127 + (1 << (exponent_bits - 1)) - 1 - 15) << 23)
    }

    /// The code of +∞ of an 8-bit float.
    const fn infinity(exponent_bits: u32, mantissa_bits: u32) -> i16 {
        ((1 << exponent_bits) - 1) << mantissa_bits
    }

    /// # Safety
    /// The processor has AVX-512 F and BW.
    #[inline(always)]
    pub(super) unsafe fn widen_fp8_by_32<const E: u32, const M: u32, const B: usize>(raw: &[u8; B]) -> [f32; B] {
        // SAFETY: every access is at `i < B` with 32 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            if !B.is_multiple_of(32) {
                return Portable::widen_fp8::<E, M, B>(raw);
            }
            let mut values = [0.0f32; B];
            for i in (0..B).step_by(32) {
                let code = _mm512_cvtepu8_epi16(_mm256_loadu_si256(raw.as_ptr().add(i).cast()));
                let magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7F));
                let sign = _mm512_slli_epi16::<8>(_mm512_xor_si512(code, magnitude));
                let special = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(infinity(E, M)));
                let bits = _mm512_sllv_epi16(magnitude, _mm512_set1_epi16(10 - M as i16));
                let bits = _mm512_or_si512(bits, _mm512_maskz_set1_epi16(special, 0x7C00));
                let bits = _mm512_or_si512(bits, sign);
                let mut low = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
                let mut high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(bits));
                if E < 5 {
                    low = _mm512_mul_ps(low, _mm512_set1_ps(1.0 / shrink(E)));
                    high = _mm512_mul_ps(high, _mm512_set1_ps(1.0 / shrink(E)));
                }
                _mm512_storeu_ps(values.as_mut_ptr().add(i), low);
                _mm512_storeu_ps(values.as_mut_ptr().add(i + 16), high);
            }
            values
        }
    }

    /// By way of a half that is rounded to odd: what is not exact gets an odd last bit. The half has so many bits more
    /// than the 8-bit float that rounding it to nearest even gives what rounding the f32 at once would.
    ///
    /// # Safety
    /// The processor has AVX-512 F and BW.
    #[inline(always)]
    pub(super) unsafe fn narrow_fp8_by_32<const E: u32, const M: u32, const B: usize>(values: &[f32; B]) -> [u8; B] {
        // SAFETY: every access is at `i < B` with 32 elements to go, in arrays of `B`; the caller has the instructions.
        unsafe {
            if !B.is_multiple_of(32) {
                return Portable::narrow_fp8::<E, M, B>(values);
            }
            let drop = 10 - M as i16;
            let mut raw = [0u8; B];
            for i in (0..B).step_by(32) {
                let mut low = _mm512_loadu_ps(values.as_ptr().add(i));
                let mut high = _mm512_loadu_ps(values.as_ptr().add(i + 16));
                if E < 5 {
                    low = _mm512_mul_ps(low, _mm512_set1_ps(shrink(E)));
                    high = _mm512_mul_ps(high, _mm512_set1_ps(shrink(E)));
                }
                let low_half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(low);
                let high_half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(high);
                let inexact = u32::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(low, _mm512_cvtph_ps(low_half)))
                    | u32::from(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(high, _mm512_cvtph_ps(high_half))) << 16;
                let halves = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low_half), high_half);
                let halves = _mm512_or_si512(halves, _mm512_maskz_set1_epi16(inexact, 1));
                // To nearest even; a carry walks into the exponent as it should, and what is too large becomes infinite.
                let magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x7FFF));
                let even =
                    _mm512_and_si512(_mm512_srlv_epi16(magnitude, _mm512_set1_epi16(drop)), _mm512_set1_epi16(1));
                let half_unit = _mm512_set1_epi16((1 << (drop - 1)) - 1);
                let rounded = _mm512_add_epi16(_mm512_add_epi16(magnitude, half_unit), even);
                let rounded = _mm512_srlv_epi16(rounded, _mm512_set1_epi16(drop));
                let finite = _mm512_min_epu16(rounded, _mm512_set1_epi16(infinity(E, M)));
                let sign = _mm512_and_si512(_mm512_srli_epi16::<8>(halves), _mm512_set1_epi16(0x80));
                let nan = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7C00));
                let canonical = _mm512_set1_epi16(infinity(E, M) | 1 << (M - 1));
                let code = _mm512_mask_mov_epi16(_mm512_or_si512(finite, sign), nan, canonical);
                _mm256_storeu_si256(raw.as_mut_ptr().add(i).cast(), _mm512_cvtepi16_epi8(code));
            }
            raw
        }
    }
}
