//! Vectorised reductions over raw memory, for every NRT data type.
//!
//! This module owns the arithmetic of the data path. A call folds one buffer per rank into a destination, element by
//! element, in the order of the sources: `((s0 op s1) op s2) …`. It allocates nothing, locks nothing and fails never.
//!
//! What the result is, bit for bit:
//!
//! * **Integers** wrap in sums and products. An average is the wrapped sum divided by the number of sources, truncated
//!   toward zero.
//! * **fp32** (and fp32r, the same 32 bits) is rounded after every step, as IEEE 754 says; nothing is fused or
//!   reordered.
//! * **bf16, fp16, fp8** are widened to f32, folded there over all sources, and rounded once at the end, to nearest
//!   even. What is too large becomes an infinity. So one call with n sources is more exact than n − 1 calls with two.
//! * **max and min** of floats are IEEE 754-2019 `maximum` and `minimum`: a NaN wins, and −0 is less than +0.
//! * **An average** of floats divides the f32 sum by the number of sources (a division, not a product with 1/n), before
//!   the one rounding. Where that sum is no finite number, the elements are summed and divided in f64 instead, which holds
//!   any such sum: a mean of finite numbers is finite.
//! * **A pre-scaled sum** multiplies each element by its source's f32 scale (a product rounded to f32), then sums as
//!   above. There is none for integers.
//! * **A NaN** in a result is the canonical one: positive, quiet, no payload (docs/decisions/0003-fp8-and-fp32r.md).
//! * **One source** is a copy, whatever the operation: its bits are kept, NaN payloads included. Not so in a pre-scaled
//!   sum, which multiplies and rounds it.
//!
//! Invariants:
//! * The result of an element depends on the elements at its position only: not on the processor, the alignment, the
//!   count, the floating-point state of the thread, or which of the functions below was called.
//! * No byte outside the `count` elements of `dst` is written, none outside those of a source is read.
//!
//! Any thread may call anything here. The processor is asked once what it can do (AVX-512, AVX2 with F16C, or what the
//! build assumes), and every call then goes through one table.
//!
//! | room | owns |
//! |---|---|
//! | `element` | decoding, encoding and arithmetic of one element |
//! | `kernel` | the loops, compiled per instruction set |
//! | `float_state` | whatever the program did to its threads, arithmetic is done in the default state |

#[cfg(test)]
mod bounds;
mod element;
mod float_state;
#[cfg(all(test, target_arch = "x86_64"))]
mod float_tests;
mod kernel;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

pub use float_state::in_default_float_state;

use crate::call::{DataType, ReduceOp};
use crate::limits::MAX_LOCAL_RANKS;
use crate::memory::copy::copy;
use kernel::Level;

/// Most sources of one reduction: one per rank of a server.
pub const MAX_SOURCES: usize = MAX_LOCAL_RANKS;

/// Folds `count` elements of every source into `dst`, in the order of the sources (see the module's header for the
/// meaning of each operation).
///
/// # Safety
/// * `srcs` holds 1 to [`MAX_SOURCES`] pointers. (None is tolerated: nothing happens.)
/// * Each source is valid for reads, and `dst` for reads and writes, of `count * dtype.size()` bytes. No alignment is
///   asked for.
/// * `dst` may be equal to any number of the sources; a source that is not equal to `dst` does not overlap it. The
///   sources may overlap each other.
/// * Nobody else writes the sources or touches `dst` during the call.
#[inline(always)]
pub unsafe fn reduce(op: ReduceOp, dtype: DataType, dst: *mut u8, srcs: &[*const u8], count: usize) {
    // SAFETY: the caller's contract, and `level` is supported by this processor.
    unsafe { reduce_at(level(), op, dtype, dst, srcs, count) }
}

/// The sum over the sources, in their order, of source i times `scales[i]`, for the float types; a source without a scale
/// is taken as it is. Everything is computed in f32, each product and each sum rounded, and the result rounded once to the
/// type. An integer type has no such sum: `dst` is left alone (a sealed schedule never asks for it).
///
/// # Safety
/// As [`reduce`].
pub unsafe fn reduce_scaled(dtype: DataType, dst: *mut u8, srcs: &[*const u8], scales: &[f32], count: usize) {
    debug_assert!(dtype.is_float());
    // SAFETY: the caller's contract, and `level` is supported by this processor.
    unsafe { reduce_scaled_at(level(), dtype, dst, srcs, scales, count) }
}

/// Divides `count` elements in place by `n`: the end of an average that was summed pairwise around a ring. Integers
/// truncate toward zero; floats divide in f32 and round once. With `n` 0 or 1 nothing is touched.
///
/// For floats this is not the same as [`ReduceOp::Avg`] over all sources at once: the pairwise sums were each rounded, and
/// may have overflowed, which cannot be made good here. No schedule averages floats so.
///
/// # Safety
/// `dst` is valid for reads and writes of `count * dtype.size()` bytes, and nobody else touches it during the call. No
/// alignment is asked for.
pub unsafe fn scale_avg(dtype: DataType, dst: *mut u8, count: usize, n: usize) {
    // SAFETY: the caller's contract, and `level` is supported by this processor.
    unsafe { scale_avg_at(level(), dtype, dst, count, n) }
}

/// [`reduce`] over byte slices, for tests and references.
///
/// # Errors
/// [`ReduceError`] if there is no source or too many, if a source is not as long as `dst`, or if `dst` is not a whole
/// number of elements. Nothing was written then.
pub fn reduce_slices(op: ReduceOp, dtype: DataType, dst: &mut [u8], srcs: &[&[u8]]) -> Result<(), ReduceError> {
    let count = whole_elements(dtype, dst.len())?;
    let pointers = pointers_of(srcs, dst.len())?;
    // SAFETY: 1 to MAX_SOURCES slices, each of `count` elements; `dst` is borrowed mutably, so that it overlaps none of
    // them and nobody else touches it, and shared borrows are not written meanwhile.
    unsafe { reduce(op, dtype, dst.as_mut_ptr(), &pointers[..srcs.len()], count) };
    Ok(())
}

/// [`reduce_scaled`] over byte slices, for tests and references; one scale for each source.
///
/// # Errors
/// As [`reduce_slices`], and [`ReduceError`] for an integer type or another number of scales. Nothing was written then.
pub fn reduce_scaled_slices(
    dtype: DataType,
    dst: &mut [u8],
    srcs: &[&[u8]],
    scales: &[f32],
) -> Result<(), ReduceError> {
    let count = whole_elements(dtype, dst.len())?;
    let pointers = pointers_of(srcs, dst.len())?;
    if !dtype.is_float() {
        return Err(ReduceError::ScaledIntegers { dtype });
    }
    if scales.len() != srcs.len() {
        return Err(ReduceError::ScalesMismatch { given: scales.len(), expected: srcs.len() });
    }
    // SAFETY: as in `reduce_slices`.
    unsafe { reduce_scaled(dtype, dst.as_mut_ptr(), &pointers[..srcs.len()], scales, count) };
    Ok(())
}

/// [`scale_avg`] over a byte slice.
///
/// # Errors
/// [`ReduceError`] if `n` is 0 or `dst` is not a whole number of elements. Nothing was written then.
pub fn scale_avg_slice(dtype: DataType, dst: &mut [u8], n: usize) -> Result<(), ReduceError> {
    let count = whole_elements(dtype, dst.len())?;
    if n == 0 {
        return Err(ReduceError::NoSources);
    }
    // SAFETY: the slice holds `count` elements and is borrowed mutably.
    unsafe { scale_avg(dtype, dst.as_mut_ptr(), count, n) };
    Ok(())
}

/// A request for a reduction that makes no sense; all of them are the caller's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReduceError {
    /// Nothing to reduce from, or an average over no sources.
    #[error("a reduction was asked for over no sources: pass at least one")]
    NoSources,
    /// More sources than one call takes.
    #[error(
        "a reduction over {given} sources was asked for, but one call takes at most {MAX_SOURCES}: reduce in several calls"
    )]
    TooManySources {
        /// How many sources were given.
        given: usize,
    },
    /// A source and the destination differ in length.
    #[error(
        "source {index} of a reduction is {given} bytes long, but the destination is {expected}: pass buffers of one length"
    )]
    LengthMismatch {
        /// Which source, from 0.
        index: usize,
        /// Its length in bytes.
        given: usize,
        /// The length of the destination in bytes.
        expected: usize,
    },
    /// A pre-scaled sum of integers.
    #[error("a pre-scaled sum of {dtype} was asked for, but scales are f32: use a float type, or scale beforehand")]
    ScaledIntegers {
        /// The type of the elements.
        dtype: DataType,
    },
    /// Not one scale for each source.
    #[error("{given} scales were given for {expected} sources of a pre-scaled sum: pass one for each")]
    ScalesMismatch {
        /// How many scales were given.
        given: usize,
        /// How many sources there are.
        expected: usize,
    },
    /// The destination ends inside an element.
    #[error(
        "the destination of a reduction is {bytes} bytes long, which is no whole number of {dtype} elements: \
         pass a multiple of {}", dtype.size()
    )]
    PartialElement {
        /// The length in bytes.
        bytes: usize,
        /// The type of the elements.
        dtype: DataType,
    },
}

/// The sources as pointers: 1 to [`MAX_SOURCES`], each of `len` bytes.
fn pointers_of(srcs: &[&[u8]], len: usize) -> Result<[*const u8; MAX_SOURCES], ReduceError> {
    if srcs.is_empty() {
        return Err(ReduceError::NoSources);
    }
    if srcs.len() > MAX_SOURCES {
        return Err(ReduceError::TooManySources { given: srcs.len() });
    }
    let mut pointers = [std::ptr::null(); MAX_SOURCES];
    for (index, source) in srcs.iter().enumerate() {
        if source.len() != len {
            return Err(ReduceError::LengthMismatch { index, given: source.len(), expected: len });
        }
        pointers[index] = source.as_ptr();
    }
    Ok(pointers)
}

fn whole_elements(dtype: DataType, bytes: usize) -> Result<usize, ReduceError> {
    if bytes.is_multiple_of(dtype.size()) {
        Ok(bytes / dtype.size())
    } else {
        Err(ReduceError::PartialElement { bytes, dtype })
    }
}

/// What this processor can do; asked once.
#[inline]
fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(Level::best)
}

/// # Safety
/// As [`reduce`], and the processor supports `level`.
#[inline(always)]
unsafe fn reduce_at(level: Level, op: ReduceOp, dtype: DataType, dst: *mut u8, srcs: &[*const u8], count: usize) {
    match *srcs {
        [] => {}
        // SAFETY: the caller's contract: the two are equal, or do not overlap.
        [only] => unsafe { copy(dst, only, count * dtype.size()) },
        _ => {
            let kernel = level.kernel(op, dtype);
            // SAFETY: the caller's contract.
            in_default_float_state(move || unsafe { kernel(dst, srcs, count, srcs.len()) });
        }
    }
}

/// # Safety
/// As [`reduce_scaled`], and the processor supports `level`.
#[inline]
unsafe fn reduce_scaled_at(
    level: Level,
    dtype: DataType,
    dst: *mut u8,
    srcs: &[*const u8],
    scales: &[f32],
    count: usize,
) {
    if let Some(kernel) = level.scaled_kernel(dtype).filter(|_| !srcs.is_empty()) {
        // SAFETY: the caller's contract.
        in_default_float_state(|| unsafe { kernel(dst, srcs, scales, count) });
    }
}

/// # Safety
/// As [`scale_avg`], and the processor supports `level`.
unsafe fn scale_avg_at(level: Level, dtype: DataType, dst: *mut u8, count: usize, n: usize) {
    if n > 1 {
        in_default_float_state(|| {
            // SAFETY: the caller's contract; `dst` is its own only source.
            unsafe { level.kernel(ReduceOp::Avg, dtype)(dst, &[dst.cast_const()], count, n) }
        });
    }
}
