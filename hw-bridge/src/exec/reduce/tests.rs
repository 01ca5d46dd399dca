//! The reductions against a reference that shares nothing with them: integers in 128 bits, conversions by the `half`
//! crate and by searching a table of values, one element at a time.

use half::{bf16, f16};
use proptest::prelude::*;

use super::kernel::Level;
use super::*;
use crate::call::Fp8;
use crate::memory::copy::copy_nt;

/// Every level this machine can run; the portable one is always there.
pub(super) fn levels() -> Vec<Level> {
    Level::ALL.iter().copied().filter(|level| level.is_supported()).collect()
}

// ---------------------------------------------------------------------------------------------------------------------
// The reference

fn is_signed(dtype: DataType) -> bool {
    matches!(dtype, DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64)
}

fn read_bits(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// The non-negative finite values of an fp8 kind, by code, in the arithmetic of the textbook.
fn fp8_values(dtype: DataType) -> (Vec<f64>, u8) {
    let (exponent_bits, mantissa_bits) = match dtype {
        DataType::Fp8E3 => (3, 4),
        DataType::Fp8E4 => (4, 3),
        _ => (5, 2),
    };
    let infinity = ((1u32 << exponent_bits) - 1) << mantissa_bits;
    let bias = (1 << (exponent_bits - 1)) - 1;
    let values = (0..=infinity)
        .map(|code| {
            let mantissa = f64::from(code % (1 << mantissa_bits)) / f64::from(1u32 << mantissa_bits);
            match (code >> mantissa_bits) as i32 {
                0 => mantissa * 2f64.powi(1 - bias),
                exponent => (1.0 + mantissa) * 2f64.powi(exponent - bias),
            }
        })
        .collect();
    (values, infinity as u8)
}

/// Decodes and encodes one element of a float type.
struct Codec {
    dtype: DataType,
    fp8: Vec<f64>,
    infinity: u8,
}

impl Codec {
    fn new(dtype: DataType) -> Codec {
        let (fp8, infinity) = fp8_values(dtype);
        Codec { dtype, fp8, infinity }
    }

    fn decode(&self, bits: u64) -> f32 {
        match self.dtype {
            DataType::Fp32 | DataType::Fp32r => f32::from_bits(bits as u32),
            DataType::Bf16 => bf16::from_bits(bits as u16).to_f32(),
            DataType::Fp16 => f16::from_bits(bits as u16).to_f32(),
            _ => {
                let magnitude = bits as u8 & 0x7F;
                let value = match magnitude.cmp(&self.infinity) {
                    std::cmp::Ordering::Less => self.fp8[usize::from(magnitude)] as f32,
                    std::cmp::Ordering::Equal => f32::INFINITY,
                    std::cmp::Ordering::Greater => f32::NAN,
                };
                if bits & 0x80 == 0 { value } else { -value }
            }
        }
    }

    fn encode(&self, value: f32) -> u64 {
        if value.is_nan() {
            return match self.dtype {
                DataType::Fp32 | DataType::Fp32r => 0x7FC0_0000,
                DataType::Bf16 => 0x7FC0,
                DataType::Fp16 => 0x7E00,
                DataType::Fp8E3 => 0x78,
                DataType::Fp8E4 => 0x7C,
                _ => 0x7E,
            };
        }
        match self.dtype {
            DataType::Fp32 | DataType::Fp32r => u64::from(value.to_bits()),
            DataType::Bf16 => u64::from(bf16::from_f32(value).to_bits()),
            DataType::Fp16 => u64::from(f16::from_f32(value).to_bits()),
            _ => {
                let magnitude = f64::from(value.abs());
                let infinity = usize::from(self.infinity);
                // Of the two neighbours the nearer, of two equally near the even one. The table's last value is the one
                // that the exponent of infinity would have had.
                let above = self.fp8.partition_point(|known| *known < magnitude);
                let code = if above > infinity {
                    infinity
                } else {
                    let distance = |code: usize| (self.fp8[code] - magnitude).abs();
                    let below = above.saturating_sub(1);
                    if (distance(above), above % 2) < (distance(below), below % 2) { above } else { below }
                };
                code as u64 | if value.is_sign_negative() { 0x80 } else { 0 }
            }
        }
    }
}

/// IEEE 754-2019 maximum or minimum, by cases.
fn extremum(op: ReduceOp, a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return f32::NAN;
    }
    // The total order of numbers that are not NaN is theirs, with −0 before +0.
    let mut pair = [a, b];
    pair.sort_by(f32::total_cmp);
    if op == ReduceOp::Max { pair[1] } else { pair[0] }
}

/// What a reduction of the sources must give, averages being divided by `divisor`.
pub(super) fn reference(op: ReduceOp, dtype: DataType, sources: &[&[u8]], divisor: usize) -> Vec<u8> {
    let size = dtype.size();
    let codec = Codec::new(dtype);
    let modulus = 1i128 << (8 * size);
    let wrap = |value: i128| {
        let value = value.rem_euclid(modulus);
        if is_signed(dtype) && value >= modulus / 2 { value - modulus } else { value }
    };
    let mut result = Vec::new();
    for at in (0..sources[0].len()).step_by(size) {
        let bits = sources.iter().map(|source| read_bits(&source[at..at + size]));
        let bits = if dtype.is_float() {
            let values: Vec<f32> = bits.map(|bits| codec.decode(bits)).collect();
            let value = values
                .iter()
                .copied()
                .reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Max | ReduceOp::Min => extremum(op, a, b),
                })
                .expect("a source");
            codec.encode(match op {
                // A sum too large for f32 is not too large for f64.
                ReduceOp::Avg if !value.is_finite() => {
                    (values.iter().map(|v| f64::from(*v)).sum::<f64>() / divisor as f32 as f64) as f32
                }
                ReduceOp::Avg => value / divisor as f32,
                _ => value,
            })
        } else {
            let value = bits
                .map(|bits| wrap(i128::from(bits)))
                .reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum => a + b,
                    // Wrapped at every step, so that the product of 64-bit numbers stays below 2^127.
                    ReduceOp::Prod => {
                        wrap(((a.rem_euclid(modulus)) as u128).wrapping_mul(b.rem_euclid(modulus) as u128) as i128)
                    }
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                })
                .map(wrap)
                .expect("a source");
            // Truncates toward zero.
            (if op == ReduceOp::Avg { value / divisor as i128 } else { value }) as u64
        };
        result.extend_from_slice(&bits.to_le_bytes()[..size]);
    }
    result
}

/// What a pre-scaled sum must give: every product and every sum is one rounded f32.
pub(super) fn scaled_reference(dtype: DataType, sources: &[&[u8]], scales: &[f32]) -> Vec<u8> {
    let size = dtype.size();
    let codec = Codec::new(dtype);
    let mut result = Vec::new();
    for at in (0..sources[0].len()).step_by(size) {
        let products = sources.iter().zip(scales).map(|(source, scale)| {
            let exact = f64::from(codec.decode(read_bits(&source[at..at + size]))) * f64::from(*scale);
            // The product of two f32 is exact in f64; this is its one rounding.
            exact as f32
        });
        let sum = products.reduce(|a, b| a + b).expect("a source");
        result.extend_from_slice(&codec.encode(sum).to_le_bytes()[..size]);
    }
    result
}

fn float_types() -> impl Iterator<Item = DataType> {
    DataType::ALL.into_iter().filter(|dtype| dtype.is_float())
}

// ---------------------------------------------------------------------------------------------------------------------
// Inputs and buffers

/// A small generator (xorshift64*), so that a failure can be repeated.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// `count` elements: a third any bits, a third numbers of similar size, a third special values.
    pub(super) fn elements(&mut self, dtype: DataType, count: usize) -> Vec<u8> {
        // One, and the smallest infinity, of each float.
        let (one, infinity) = match dtype {
            DataType::Fp32 | DataType::Fp32r => (0x3F80_0000, 0x7F80_0000),
            DataType::Bf16 => (0x3F80, 0x7F80),
            DataType::Fp16 => (0x3C00, 0x7C00),
            DataType::Fp8E3 => (0x30, 0x70),
            DataType::Fp8E4 => (0x38, 0x78),
            DataType::Fp8E5 => (0x3C, 0x7C),
            _ => (1, u64::MAX >> 1 >> (64 - 8 * dtype.size())),
        };
        let sign = 1u64 << (8 * dtype.size() - 1);
        let specials = [0, sign, infinity, infinity | sign, infinity - 1, infinity + 1, u64::MAX, 1, 1 | sign, one];
        let mut bytes = Vec::new();
        for _ in 0..count {
            let random = self.next();
            let bits = match self.next() % 3 {
                0 => random,
                1 => one.wrapping_add(random % (one / 16 + 8)) ^ if random >> 63 == 0 { 0 } else { sign },
                _ => specials[(random % specials.len() as u64) as usize],
            };
            bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.size()]);
        }
        bytes
    }
}

const GUARD: u8 = 0xA5;

/// Bytes at a chosen distance from a line's start, between guards.
struct Guarded {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Guarded {
    const MARGIN: usize = 192;

    fn new(content: &[u8], misalignment: usize) -> Guarded {
        let mut bytes = vec![GUARD; content.len() + 3 * Self::MARGIN];
        let start = Self::MARGIN + bytes.as_ptr().addr().wrapping_neg() % 64 + misalignment;
        bytes[start..start + content.len()].copy_from_slice(content);
        Guarded { bytes, start, len: content.len() }
    }

    fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes[self.start..].as_mut_ptr()
    }

    fn as_ptr(&self) -> *const u8 {
        self.bytes[self.start..].as_ptr()
    }

    /// The content, after a look at the guards.
    fn content(&self) -> &[u8] {
        let (before, rest) = self.bytes.split_at(self.start);
        let (content, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "a byte outside dst was written");
        content
    }
}

pub(super) fn slices(buffers: &[Vec<u8>]) -> Vec<&[u8]> {
    buffers.iter().map(Vec::as_slice).collect()
}

fn pointers(buffers: &[Vec<u8>]) -> Vec<*const u8> {
    buffers.iter().map(|buffer| buffer.as_ptr()).collect()
}

/// A single source is a copy; the reference computes.
fn expected(op: ReduceOp, dtype: DataType, sources: &[Vec<u8>]) -> Vec<u8> {
    if let [only] = sources { only.clone() } else { reference(op, dtype, &slices(sources), sources.len()) }
}

pub(super) fn every_type_and_op() -> impl Iterator<Item = (DataType, ReduceOp)> {
    DataType::ALL.into_iter().flat_map(|dtype| ReduceOp::ALL.into_iter().map(move |op| (dtype, op)))
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests

/// Each type, operation and level; 1 to 16 sources and 64; each count from 0 to 200; nothing written beside `dst`.
#[test]
fn all_types_ops_counts_and_sources_match_the_reference() {
    let mut random = Random(1);
    for (dtype, op) in every_type_and_op() {
        for n in (1..=16).chain([MAX_SOURCES]) {
            let sources: Vec<_> = (0..n).map(|_| random.elements(dtype, 200)).collect();
            let expected = expected(op, dtype, &sources);
            let pointers = pointers(&sources);
            for level in levels() {
                // Beyond a few sources the counts add nothing new; a stride keeps all residues of a block in turn.
                for count in (0..=200).step_by(if n <= 5 { 1 } else { 7 }) {
                    let len = count * dtype.size();
                    let mut dst = Guarded::new(&vec![0; len], 0);
                    // SAFETY: `n` sources of 200 elements, a destination of `count`, all apart; the level is supported.
                    unsafe { reduce_at(level, op, dtype, dst.as_mut_ptr(), &pointers, count) };
                    assert_eq!(dst.content(), &expected[..len], "{level:?} {op} {dtype} n={n} count={count}");
                }
            }
        }
    }
}

/// No alignment is asked for, and none changes a bit: each distance of `dst` from a line, sources at others.
#[test]
fn alignment_does_not_matter() {
    let mut random = Random(2);
    for (dtype, op) in every_type_and_op() {
        let count = 147;
        let sources: Vec<_> = (0..3).map(|_| random.elements(dtype, count)).collect();
        for n in [2, 3] {
            let expected = expected(op, dtype, &sources[..n]);
            for level in levels() {
                for (shift, other) in (0..16).flat_map(|shift| [0, 1, 7, 15].map(|other| (shift, other))) {
                    let placed: Vec<_> = sources[..n]
                        .iter()
                        .enumerate()
                        .map(|(i, source)| Guarded::new(source, (shift * (i + 1) + other) % 16))
                        .collect();
                    let pointers: Vec<_> = placed.iter().map(Guarded::as_ptr).collect();
                    let mut dst = Guarded::new(&vec![0; count * dtype.size()], shift);
                    // SAFETY: buffers of `count` elements, all apart; the level is supported.
                    unsafe { reduce_at(level, op, dtype, dst.as_mut_ptr(), &pointers, count) };
                    assert_eq!(dst.content(), expected, "{level:?} {op} {dtype} n={n} shift={shift} other={other}");
                }
            }
        }
    }
}

/// `dst` may be each of the sources, and several of them at once; streaming or not.
#[test]
fn in_place_with_any_source() {
    let mut random = Random(3);
    for (dtype, op) in every_type_and_op() {
        let count = 203;
        for n in 1..=16usize {
            let mut sources: Vec<_> = (0..n).map(|_| random.elements(dtype, count)).collect();
            for at in 0..n {
                // Every other time the next source is the same buffer too.
                let also = if at % 2 == 1 { (at + 1) % n } else { at };
                sources[also] = sources[at].clone();
                let expected = expected(op, dtype, &sources);
                for level in levels() {
                    let mut dst = Guarded::new(&sources[at], at);
                    let to = dst.as_mut_ptr();
                    let mut pointers = pointers(&sources);
                    pointers[at] = to;
                    pointers[also] = to;
                    // SAFETY: buffers of `count` elements; `dst` is equal to one or two of the sources and apart from
                    // the others; the level is supported.
                    unsafe { reduce_at(level, op, dtype, to, &pointers, count) };
                    assert_eq!(dst.content(), expected, "{level:?} {op} {dtype} n={n} at={at}");
                }
            }
        }
    }
}

/// Every pair of codes of every 8-bit type, and big odd counts of the others; `dst` on and off a line.
#[test]
fn big_buffers_match_the_reference() {
    let mut random = Random(4);
    for dtype in DataType::ALL {
        let sources: Vec<Vec<u8>> = if dtype.size() == 1 {
            vec![(0..=0xFFFFu32).map(|i| i as u8).collect(), (0..=0xFFFFu32).map(|i| (i >> 8) as u8).collect()]
        } else {
            (0..2).map(|_| random.elements(dtype, 20_011)).collect()
        };
        let len = sources[0].len();
        for op in ReduceOp::ALL {
            let expected = expected(op, dtype, &sources);
            for level in levels() {
                for shift in [0, 1, 8, 40] {
                    let mut plain = Guarded::new(&vec![0; len], shift);
                    let pointers = pointers(&sources);
                    // SAFETY: all buffers are `len` bytes and apart; the level is supported.
                    unsafe { reduce_at(level, op, dtype, plain.as_mut_ptr(), &pointers, len / dtype.size()) };
                    assert!(plain.content() == expected, "{level:?} {op} {dtype} shift={shift}");
                }
            }
        }
    }
}

/// Every value of the short types, divided by every small count; samples of the others, by counts of every size.
#[test]
fn scaling_an_average_matches_the_reference() {
    let mut random = Random(6);
    let big = [100, 255, 256, 257, 32_767, 32_768, 65_535, 65_536, 1 << 24, (1 << 24) + 1, (1 << 31) - 1, 1 << 31];
    let huge = [u32::MAX as usize, 1 << 32, (1 << 53) + 1, i64::MAX as usize, 1 << 63, usize::MAX];
    for dtype in DataType::ALL {
        let mut values = match dtype.size() {
            1 => (0..=0xFFu8).collect(),
            2 => (0..=0xFFFFu16).flat_map(u16::to_le_bytes).collect(),
            _ => random.elements(dtype, 3_001),
        };
        for limit in [i64::MIN, i64::MAX, i64::from(i32::MIN), i64::from(i32::MAX), i64::from(u32::MAX)] {
            values.extend_from_slice(&limit.to_le_bytes());
        }
        for n in (2..=MAX_SOURCES).step_by(if dtype.size() == 2 { 5 } else { 1 }).chain(big).chain(huge) {
            let expected = reference(ReduceOp::Avg, dtype, &[&values], n);
            for level in levels() {
                let mut dst = Guarded::new(&values, 3);
                // SAFETY: the buffer is as long as said; the level is supported.
                unsafe { scale_avg_at(level, dtype, dst.as_mut_ptr(), values.len() / dtype.size(), n) };
                assert!(dst.content() == expected, "{level:?} {dtype} n={n}");
            }
        }
        for n in [0, 1] {
            let mut dst = Guarded::new(&values, 3);
            // SAFETY: the buffer is as long as said.
            unsafe { scale_avg(dtype, dst.as_mut_ptr(), values.len() / dtype.size(), n) };
            assert_eq!(dst.content(), values, "{dtype} n={n} must not touch a bit");
        }
    }
}

/// Literal values, written down without any reference.
#[test]
fn the_documented_semantics_by_example() {
    fn run<const N: usize, const S: usize>(op: ReduceOp, dtype: DataType, sources: [[u8; S]; N]) -> [u8; S] {
        let mut dst = [0; S];
        reduce_slices(op, dtype, &mut dst, &sources.each_ref().map(|source| source.as_slice())).expect("well-formed");
        dst
    }
    let fp32 = |op, values: [f32; 2]| f32::from_le_bytes(run(op, DataType::Fp32, values.map(f32::to_le_bytes)));
    // A NaN wins on either side, whatever its payload, and comes out canonical.
    for op in ReduceOp::ALL {
        for nan in [0x7F80_0001, 0xFFC0_1234, 0x7FFF_FFFF] {
            for values in [[f32::from_bits(nan), 1.0], [1.0, f32::from_bits(nan)]] {
                assert_eq!(fp32(op, values).to_bits(), 0x7FC0_0000, "{op} {nan:#x}");
            }
        }
    }
    assert_eq!(fp32(ReduceOp::Sum, [f32::INFINITY, f32::NEG_INFINITY]).to_bits(), 0x7FC0_0000);
    // −0 is less than +0, whichever comes first; sums of zeros follow IEEE.
    for values in [[0.0, -0.0], [-0.0, 0.0]] {
        assert_eq!(fp32(ReduceOp::Max, values).to_bits(), 0);
        assert_eq!(fp32(ReduceOp::Min, values).to_bits(), 0x8000_0000);
        assert_eq!(fp32(ReduceOp::Sum, values).to_bits(), 0);
    }
    assert_eq!(fp32(ReduceOp::Sum, [-0.0, -0.0]).to_bits(), 0x8000_0000);
    // fp32r keeps every bit of the mantissa.
    let r = run(ReduceOp::Sum, DataType::Fp32r, [1.0f32.to_le_bytes(), f32::EPSILON.to_le_bytes()]);
    assert_eq!(f32::from_le_bytes(r), 1.0 + f32::EPSILON);
    // The order is fixed: what is added to 2^25 before it is taken away again is lost.
    let (one, far) = (1.0f32.to_le_bytes(), 33_554_432.0f32);
    let (plus, minus) = (far.to_le_bytes(), (-far).to_le_bytes());
    assert_eq!(f32::from_le_bytes(run(ReduceOp::Sum, DataType::Fp32, [plus, minus, one])), 1.0);
    assert_eq!(f32::from_le_bytes(run(ReduceOp::Sum, DataType::Fp32, [plus, one, minus])), 0.0);
    // bf16 rounds once at the end: 256 + 1 + 1 is 258, although 256 + 1 would round back to 256.
    let bf = |value: f32| bf16::from_f32(value).to_le_bytes();
    assert_eq!(run(ReduceOp::Sum, DataType::Bf16, [bf(256.0), bf(1.0), bf(1.0)]), bf(258.0));
    assert_eq!(run(ReduceOp::Sum, DataType::Bf16, [bf(256.0), bf(1.0)]), bf(256.0));
    // An fp8 may pass its range on the way, and becomes an infinity only if it ends outside.
    let (e4, sixteen) = (|value: f32| [Fp8::E4.encode(value)], [Fp8::E4.encode(16.0)]);
    assert_eq!(run(ReduceOp::Sum, DataType::Fp8E4, [e4(240.0), e4(240.0), e4(-240.0)]), e4(240.0));
    assert_eq!(run(ReduceOp::Prod, DataType::Fp8E4, [sixteen, sixteen]), [0x78]);
    assert_eq!(run(ReduceOp::Avg, DataType::Fp8E4, [e4(240.0), e4(240.0)]), e4(240.0));
    // Integers wrap; averages wrap first, then truncate toward zero.
    assert_eq!(run(ReduceOp::Sum, DataType::Uint8, [[200], [100]]), [44]);
    assert_eq!(run(ReduceOp::Prod, DataType::Int8, [[100u8], [3]]), [44]);
    assert_eq!(run(ReduceOp::Avg, DataType::Int8, [[-3i8 as u8], [0]]), [-1i8 as u8]);
    assert_eq!(run(ReduceOp::Avg, DataType::Uint8, [[200], [100]]), [22]);
    assert_eq!(run(ReduceOp::Max, DataType::Int8, [[0xFF], [1]]), [1]);
    assert_eq!(run(ReduceOp::Max, DataType::Uint8, [[0xFF], [1]]), [0xFF]);
    // One source is a copy, payload and all.
    let payload = 0xFF80_0001u32.to_le_bytes();
    assert_eq!(run(ReduceOp::Avg, DataType::Fp32, [payload]), payload);
}

/// Scales that round, vanish, overflow, change signs, and are no numbers.
const SCALES: [f32; 16] = [
    0.1,
    -3.0,
    1.0,
    1.0 / 3.0,
    0.0,
    -0.0,
    65504.0,
    1e-30,
    f32::MAX,
    -1.0,
    f32::INFINITY,
    f32::NAN,
    0.5,
    f32::MIN_POSITIVE,
    f32::from_bits(1),
    -7.25,
];

/// Each float type and level; 1 to 16 sources and 64; each count from 0 to 200; nothing written beside `dst`.
#[test]
fn pre_scaled_sums_match_the_reference() {
    let mut random = Random(8);
    for dtype in float_types() {
        for n in (1..=16).chain([MAX_SOURCES]) {
            let sources: Vec<_> = (0..n).map(|_| random.elements(dtype, 200)).collect();
            // Rotated, and without the ones that spoil everything in two of three cases.
            let tame = |at: usize| SCALES[[0, 1, 3, 12, 15, 2, 9][at % 7]];
            let wild = |at: usize| SCALES[at % SCALES.len()];
            let scales: Vec<f32> = (0..n).map(|i| if n % 3 == 0 { wild(i + n) } else { tame(i + n) }).collect();
            let expected = scaled_reference(dtype, &slices(&sources), &scales);
            let pointers = pointers(&sources);
            for level in levels() {
                for count in (0..=200).step_by(if n <= 5 { 1 } else { 7 }) {
                    let len = count * dtype.size();
                    let mut dst = Guarded::new(&vec![0; len], n % 16);
                    // SAFETY: `n` sources of 200 elements, a destination of `count`, all apart; the level is supported.
                    unsafe { reduce_scaled_at(level, dtype, dst.as_mut_ptr(), &pointers, &scales, count) };
                    assert_eq!(dst.content(), &expected[..len], "{level:?} {dtype} n={n} count={count} {scales:?}");
                }
            }
        }
    }
}

#[test]
fn a_pre_scaled_sum_may_be_in_place_with_any_source() {
    let mut random = Random(9);
    for dtype in float_types() {
        for n in 1..=5usize {
            let sources: Vec<_> = (0..n).map(|_| random.elements(dtype, 203)).collect();
            let scales = [0.3f32, -2.0, 5.5, 1.0, 0.7];
            let expected = scaled_reference(dtype, &slices(&sources), &scales[..n]);
            for (level, at) in levels().into_iter().flat_map(|level| (0..n).map(move |at| (level, at))) {
                let mut dst = Guarded::new(&sources[at], at);
                let mut pointers = pointers(&sources);
                pointers[at] = dst.as_mut_ptr();
                // SAFETY: buffers of 203 elements; `dst` is equal to one of them and apart from the others.
                unsafe { reduce_scaled_at(level, dtype, dst.as_mut_ptr(), &pointers, &scales[..n], 203) };
                assert_eq!(dst.content(), expected, "{level:?} {dtype} n={n} at={at}");
            }
        }
    }
}

#[test]
fn pre_scaled_sums_by_example() {
    fn sum<const N: usize>(dtype: DataType, sources: [&[u8]; N], scales: [f32; N]) -> Vec<u8> {
        let mut dst = vec![0; sources[0].len()];
        reduce_scaled_slices(dtype, &mut dst, &sources, &scales).expect("well-formed");
        dst
    }
    let fp32 = |a: f32, b: f32, scales| {
        let sum = sum(DataType::Fp32, [&a.to_le_bytes(), &b.to_le_bytes()], scales);
        f32::from_le_bytes(sum.try_into().expect("four bytes"))
    };
    assert_eq!(fp32(3.0, 5.0, [0.5, -2.0]), -8.5);
    // Not fused: the product of (1 + e)(1 - e) rounds to 1 before 1 is taken away.
    let e = 2f32.powi(-13);
    assert_eq!(fp32(1.0 + e, -1.0, [1.0 - e, 1.0]), 0.0);
    // The product is one of f32, so it overflows even if the sum would not.
    assert_eq!(fp32(f32::MAX, f32::MAX, [2.0, -1.0]), f32::INFINITY);
    // Nothing times infinity is no number, and that is the canonical one.
    assert_eq!(fp32(0.0, 1.0, [f32::INFINITY, 1.0]).to_bits(), 0x7FC0_0000);
    // One source is multiplied, rounded once, and its NaN made canonical; it is no copy.
    let bf = |value: f32| bf16::from_f32(value).to_le_bytes();
    assert_eq!(sum(DataType::Bf16, [&bf(3.0)], [1.0 / 3.0]), bf(1.0));
    assert_eq!(sum(DataType::Fp32, [&0xFF80_0001u32.to_le_bytes()], [1.0]), 0x7FC0_0000u32.to_le_bytes());
    // Rounded once at the end: 256 + 0.5 · 2 + 0.5 · 2 is 258 in bf16.
    assert_eq!(sum(DataType::Bf16, [&bf(256.0), &bf(2.0), &bf(2.0)], [1.0, 0.5, 0.5]), bf(258.0));
    // The fp8 passes its range on the way.
    let e4 = |value: f32| [Fp8::E4.encode(value)];
    assert_eq!(sum(DataType::Fp8E4, [&e4(240.0), &e4(240.0)], [3.0, -2.5]), e4(120.0));

    let mut dst = [7u8; 8];
    let eight = [1u8; 8];
    let integers = ReduceError::ScaledIntegers { dtype: DataType::Int32 };
    assert_eq!(reduce_scaled_slices(DataType::Int32, &mut dst, &[&eight], &[1.0]), Err(integers));
    let scales = ReduceError::ScalesMismatch { given: 1, expected: 2 };
    assert_eq!(reduce_scaled_slices(DataType::Fp32, &mut dst, &[&eight, &eight], &[1.0]), Err(scales));
    assert_eq!(reduce_scaled_slices(DataType::Fp32, &mut dst, &[], &[]), Err(ReduceError::NoSources));
    assert!(integers.to_string().contains("int32"), "{integers}");
    assert_eq!(dst, [7; 8]);
    // SAFETY: no source is tolerated.
    unsafe { reduce_scaled(DataType::Fp32, dst.as_mut_ptr(), &[], &[], 2) };
    assert_eq!(dst, [7; 8]);
}

#[test]
fn slices_that_make_no_sense_are_refused_and_dst_is_left_alone() {
    let mut dst = [7u8; 8];
    let eight = [1u8; 8];
    let too_many = vec![eight.as_slice(); MAX_SOURCES + 1];
    let cases: [(&[&[u8]], ReduceError); 3] = [
        (&[], ReduceError::NoSources),
        (&too_many, ReduceError::TooManySources { given: MAX_SOURCES + 1 }),
        (&[&eight, &eight[..4]], ReduceError::LengthMismatch { index: 1, given: 4, expected: 8 }),
    ];
    for (sources, error) in cases {
        assert_eq!(reduce_slices(ReduceOp::Sum, DataType::Fp32, &mut dst, sources), Err(error));
    }
    let partial = ReduceError::PartialElement { bytes: 6, dtype: DataType::Fp32 };
    assert_eq!(reduce_slices(ReduceOp::Sum, DataType::Fp32, &mut dst[..6], &[&eight[..6]]), Err(partial));
    assert_eq!(scale_avg_slice(DataType::Fp32, &mut dst[..6], 2), Err(partial));
    assert_eq!(scale_avg_slice(DataType::Fp32, &mut dst, 0), Err(ReduceError::NoSources));
    assert_eq!(dst, [7; 8]);
    assert!(partial.to_string().ends_with("no whole number of fp32 elements: pass a multiple of 4"), "{partial}");
    // None of the unsafe entries does anything without a source.
    // SAFETY: no source is tolerated.
    unsafe {
        reduce(ReduceOp::Sum, DataType::Fp32, dst.as_mut_ptr(), &[], 2);
    }
    assert_eq!(dst, [7; 8]);
    assert_eq!(scale_avg_slice(DataType::Uint8, &mut dst, 2), Ok(()));
    assert_eq!(dst, [3; 8]);
}

#[test]
fn copies_move_exactly_what_they_should() {
    let mut random = Random(7);
    let source = random.elements(DataType::Uint8, 5000);
    for len in (0..=200).chain([4095, 4096, 4097, 4900]) {
        for (to, from) in (0..64).step_by(if len <= 200 { 1 } else { 9 }).flat_map(|to| [(to, 0), (to, to), (to, 13)]) {
            for streaming in [false, true] {
                let mut dst = Guarded::new(&vec![0; len], to);
                // SAFETY: `from + len` is within the source, and the two are apart.
                unsafe {
                    let (to, from) = (dst.as_mut_ptr(), source.as_ptr().add(from));
                    if streaming {
                        copy_nt(to, from, len)
                    } else {
                        copy(to, from, len)
                    }
                    // Onto itself: nothing happens.
                    if streaming { copy_nt(to, to, len) } else { copy(to, to, len) }
                }
                assert_eq!(dst.content(), &source[from..from + len], "len={len} to={to} streaming={streaming}");
            }
        }
    }
}

#[test]
fn the_best_level_is_a_supported_one() {
    assert!(level().is_supported());
    assert_eq!(level(), *levels().last().expect("the portable level"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// Whatever the bits, NaN payloads and subnormals included: all levels agree with the portable one, which agrees
    /// with the reference; the public entry is one of them.
    #[test]
    fn all_levels_agree_bit_for_bit(
        words in prop::collection::vec(any::<[u64; 4]>(), 1..70),
        n in 2usize..=4,
        cut in 0usize..8,
        exponents in 0u8..3,
    ) {
        let mut sources: Vec<Vec<u8>> =
            (0..n).map(|i| words.iter().flat_map(|word| word[i].to_le_bytes()).collect()).collect();
        // Sometimes clear or set the exponents, so that subnormals and NaNs abound in the wider types.
        for byte in sources.iter_mut().flatten() {
            match exponents {
                1 if *byte & 0x70 == 0x70 => *byte |= 0x7F,
                2 if *byte & 0x70 != 0 => *byte &= 0x83,
                _ => {}
            }
        }
        for (dtype, op) in every_type_and_op() {
            let count = words.len() * 8 / dtype.size() - cut / dtype.size();
            let len = count * dtype.size();
            let sources: Vec<Vec<u8>> = sources.iter().map(|source| source[..len].to_vec()).collect();
            let pointers = pointers(&sources);
            let expected = reference(op, dtype, &slices(&sources), n);
            let mut dst = vec![0; len];
            for level in levels() {
                // SAFETY: buffers of `count` elements, all apart; the level is supported.
                unsafe { reduce_at(level, op, dtype, dst.as_mut_ptr(), &pointers, count) };
                prop_assert_eq!(&dst, &expected, "{:?} {} {}", level, op, dtype);
            }
            // SAFETY: as above.
            unsafe { reduce(op, dtype, dst.as_mut_ptr(), &pointers, count) };
            prop_assert_eq!(&dst, &expected, "dispatched {} {}", op, dtype);
        }
    }

    /// The same of pre-scaled sums; with scales of one they are plain sums.
    #[test]
    fn all_levels_agree_on_pre_scaled_sums(
        words in prop::collection::vec(any::<[u64; 4]>(), 1..70),
        scales in any::<[u32; 4]>(),
        small: bool,
        n in 1usize..=4,
    ) {
        let sources: Vec<Vec<u8>> =
            (0..n).map(|i| words.iter().flat_map(|word| word[i].to_le_bytes()).collect()).collect();
        // Any bits, or numbers of moderate size.
        let scales = scales.map(|bits| f32::from_bits(if small { bits & 0x80FF_FFFF | 0x3F00_0000 } else { bits }));
        for dtype in float_types() {
            let (count, pointers) = (words.len() * 8 / dtype.size(), pointers(&sources));
            let expected = scaled_reference(dtype, &slices(&sources), &scales[..n]);
            let mut dst = vec![0; words.len() * 8];
            for level in levels() {
                // SAFETY: buffers of `count` elements, all apart; the level is supported.
                unsafe { reduce_scaled_at(level, dtype, dst.as_mut_ptr(), &pointers, &scales[..n], count) };
                prop_assert_eq!(&dst, &expected, "{:?} {} {:?}", level, dtype, scales);
            }
            if n > 1 {
                // SAFETY: as above.
                unsafe { reduce_scaled(dtype, dst.as_mut_ptr(), &pointers, &[1.0; 4][..n], count) };
                prop_assert_eq!(&dst, &reference(ReduceOp::Sum, dtype, &slices(&sources), n), "{}", dtype);
            }
        }
    }
}
