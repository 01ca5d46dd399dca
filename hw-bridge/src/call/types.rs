//! NRT data types, reduction operations, and the conversions of the 8-bit floats.
//!
//! This module owns the numbers and names that users and plugins write down (spec: reverse-abi.md §5.3) and the exact
//! meaning of every bit of an fp8 value (docs/decisions/0003-fp8-and-fp32r.md). Arithmetic over buffers is in
//! [`reduce`](crate::exec::reduce).
//!
//! Invariants:
//! * [`DataType`] carries the NRT numbers; 0 (INVALID) and everything above 0xF are unrepresentable.
//! * All three fp8 kinds are IEEE 754 formats with infinities, NaNs, subnormals and signed zeros. A narrowing rounds
//!   once, to nearest, ties to even; what rounds beyond the largest finite value becomes an infinity (no saturation);
//!   every NaN becomes the one canonical quiet NaN.
//! * Conversions are pure integer and f32 arithmetic without branches on data, so that the reduction kernels can
//!   inline and vectorise the very same functions.

use std::fmt;
use std::str::FromStr;

/// An element type of a collective, by its NRT number (spec: reverse-abi.md §5.3, `nec_data_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DataType {
    /// Unsigned 64-bit integer.
    Uint64 = 1,
    /// Signed 8-bit integer.
    Int8 = 2,
    /// Unsigned 8-bit integer.
    Uint8 = 3,
    /// Signed 16-bit integer.
    Int16 = 4,
    /// Unsigned 16-bit integer.
    Uint16 = 5,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16 = 6,
    /// IEEE 754 half: 5 exponent bits, 10 mantissa bits.
    Fp16 = 7,
    /// Signed 32-bit integer.
    Int32 = 8,
    /// Unsigned 32-bit integer.
    Uint32 = 9,
    /// IEEE 754 single.
    Fp32 = 0xA,
    /// "Round fp32": an fp32 that the matrix unit may read with fewer mantissa bits. Stored, moved and reduced exactly
    /// as [`DataType::Fp32`]; nothing is rounded here.
    Fp32r = 0xB,
    /// Signed 64-bit integer.
    Int64 = 0xC,
    /// 8-bit float, 1-3-4: see [`Fp8::E3`].
    Fp8E3 = 0xD,
    /// 8-bit float, 1-4-3: see [`Fp8::E4`].
    Fp8E4 = 0xE,
    /// 8-bit float, 1-5-2: see [`Fp8::E5`].
    Fp8E5 = 0xF,
}

impl DataType {
    /// Every data type, in the order of the NRT numbers.
    pub const ALL: [DataType; 15] = [
        DataType::Uint64,
        DataType::Int8,
        DataType::Uint8,
        DataType::Int16,
        DataType::Uint16,
        DataType::Bf16,
        DataType::Fp16,
        DataType::Int32,
        DataType::Uint32,
        DataType::Fp32,
        DataType::Fp32r,
        DataType::Int64,
        DataType::Fp8E3,
        DataType::Fp8E4,
        DataType::Fp8E5,
    ];

    /// Size of one element, in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DataType::Int8 | DataType::Uint8 | DataType::Fp8E3 | DataType::Fp8E4 | DataType::Fp8E5 => 1,
            DataType::Int16 | DataType::Uint16 | DataType::Bf16 | DataType::Fp16 => 2,
            DataType::Int32 | DataType::Uint32 | DataType::Fp32 | DataType::Fp32r => 4,
            DataType::Uint64 | DataType::Int64 => 8,
        }
    }

    /// The type with this NRT number; `None` for INVALID (0) and for numbers NRT does not define.
    #[must_use]
    pub const fn from_nrt(number: u32) -> Option<DataType> {
        if number == 0 || number as usize > Self::ALL.len() {
            return None;
        }
        // The NRT numbers are 1..=15 without a gap and ALL is in their order; a test holds both to it.
        Some(Self::ALL[number as usize - 1])
    }

    /// The NRT number of this type.
    #[must_use]
    pub const fn nrt(self) -> u32 {
        self as u32
    }

    /// Whether the elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            DataType::Bf16
                | DataType::Fp16
                | DataType::Fp32
                | DataType::Fp32r
                | DataType::Fp8E3
                | DataType::Fp8E4
                | DataType::Fp8E5
        )
    }

    /// The name that [`Display`](fmt::Display) prints and [`FromStr`] accepts (nccom-test's spelling).
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            DataType::Uint64 => "uint64",
            DataType::Int8 => "int8",
            DataType::Uint8 => "uint8",
            DataType::Int16 => "int16",
            DataType::Uint16 => "uint16",
            DataType::Bf16 => "bf16",
            DataType::Fp16 => "fp16",
            DataType::Int32 => "int32",
            DataType::Uint32 => "uint32",
            DataType::Fp32 => "fp32",
            DataType::Fp32r => "fp32r",
            DataType::Int64 => "int64",
            DataType::Fp8E3 => "fp8_e3",
            DataType::Fp8E4 => "fp8_e4",
            DataType::Fp8E5 => "fp8_e5",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DataType {
    type Err = ParseError;

    /// Reads a name as users of nccom-test and nccl-tests type it. Upper and lower case, `-` and `_` do not matter.
    ///
    /// # Errors
    /// [`ParseError::DataType`] if no type has this name. `e4m3fn` is refused on purpose: it is another format than
    /// NRT's E4 (no infinity, 448 instead of 240 as the largest value).
    fn from_str(given: &str) -> Result<Self, ParseError> {
        Ok(match normalise(given).as_str() {
            "uint64" | "u64" => DataType::Uint64,
            "int8" | "i8" | "char" => DataType::Int8,
            "uint8" | "u8" | "byte" => DataType::Uint8,
            "int16" | "i16" => DataType::Int16,
            "uint16" | "u16" => DataType::Uint16,
            "bf16" | "bfloat16" => DataType::Bf16,
            "fp16" | "f16" | "float16" | "half" => DataType::Fp16,
            "int32" | "i32" | "int" => DataType::Int32,
            "uint32" | "u32" => DataType::Uint32,
            "fp32" | "f32" | "float32" | "float" => DataType::Fp32,
            "fp32r" | "f32r" | "float32r" => DataType::Fp32r,
            "int64" | "i64" => DataType::Int64,
            "fp8e3" | "f8e3" | "fp8e3m4" | "f8e3m4" | "float8e3m4" | "e3m4" => DataType::Fp8E3,
            "fp8e4" | "f8e4" | "fp8e4m3" | "f8e4m3" | "float8e4m3" | "e4m3" => DataType::Fp8E4,
            "fp8e5" | "f8e5" | "fp8e5m2" | "f8e5m2" | "float8e5m2" | "e5m2" => DataType::Fp8E5,
            _ => {
                return Err(ParseError::DataType { given: given.to_owned() });
            }
        })
    }
}

/// What a reducing collective does with the elements of several ranks.
///
/// The originals know ADD, FMA, MAX and MIN (spec: reverse-abi.md §5.3, `nec_op_type`); PROD and AVG are what users of
/// NCCL expect beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum. Integers wrap.
    Sum,
    /// Product. Integers wrap.
    Prod,
    /// The largest; for floats IEEE 754-2019 `maximum`: a NaN wins, and −0 is less than +0.
    Max,
    /// The smallest; for floats IEEE 754-2019 `minimum`: a NaN wins, and −0 is less than +0.
    Min,
    /// The sum divided by the number of sources; integers truncate toward zero (the sum wraps first). A mean of finite floats is
    /// finite.
    Avg,
    /// The sum of every rank's elements times that rank's own f32 scale (NCCL's PreMulSum, the originals' FMA); floats
    /// only. Products and sums are rounded in f32, one after the other, nothing is fused; see
    /// [`reduce_scaled`](crate::exec::reduce::reduce_scaled).
    PreMulSum,
}

impl ReduceOp {
    /// Every operation that takes the elements as they are: all but [`ReduceOp::PreMulSum`], which needs a scale of each
    /// rank and is asked for by calls of its own.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg];

    /// The name that [`Display`](fmt::Display) prints and [`FromStr`] accepts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Prod => "prod",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
            ReduceOp::Avg => "avg",
            ReduceOp::PreMulSum => "pre_mul_sum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = ParseError;

    /// Reads a name as users of nccl-tests and nccom-test type it. Upper and lower case do not matter. The pre-scaled sum
    /// is not among them, because a name brings no scale along.
    ///
    /// # Errors
    /// [`ParseError::ReduceOp`] if no operation has this name.
    fn from_str(given: &str) -> Result<Self, ParseError> {
        Ok(match normalise(given).as_str() {
            "sum" | "add" => ReduceOp::Sum,
            "prod" | "product" | "mul" => ReduceOp::Prod,
            "max" | "maximum" => ReduceOp::Max,
            "min" | "minimum" => ReduceOp::Min,
            "avg" | "average" | "mean" => ReduceOp::Avg,
            _ => {
                return Err(ParseError::ReduceOp { given: given.to_owned() });
            }
        })
    }
}

/// A name that is none of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Not the name of a data type.
    #[error(
        "`{given}` is not a data type: use one of uint64, int64, uint32, int32, uint16, int16, uint8, int8, fp32, \
         fp32r, bf16, fp16, fp8_e3, fp8_e4, fp8_e5 (NRT has no 64-bit float, and its fp8_e4 is not e4m3fn)"
    )]
    DataType {
        /// The text that was given.
        given: String,
    },
    /// Not the name of a reduction.
    #[error("`{given}` is not a reduction: use one of sum, prod, max, min, avg")]
    ReduceOp {
        /// The text that was given.
        given: String,
    },
}

fn normalise(name: &str) -> String {
    name.trim().chars().filter(|c| !matches!(c, '_' | '-')).map(|c| c.to_ascii_lowercase()).collect()
}

/// The three 8-bit floats of NRT: IEEE 754 formats that differ in where the exponent ends.
///
/// | kind | layout | bias | largest | smallest normal | smallest | ∞ | canonical NaN |
/// |---|---|---|---|---|---|---|---|
/// | E3 | 1-3-4 | 3 | 15.5 | 2^-2 | 2^-6 | 0x70 | 0x78 |
/// | E4 | 1-4-3 | 7 | 240 | 2^-6 | 2^-9 | 0x78 | 0x7C |
/// | E5 | 1-5-2 | 15 | 57344 | 2^-14 | 2^-16 | 0x7C | 0x7E |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 3 exponent bits, 4 mantissa bits (`f8E3M4`).
    E3,
    /// 4 exponent bits, 3 mantissa bits (`f8E4M3`, not the `fn` variant of OCP).
    E4,
    /// 5 exponent bits, 2 mantissa bits (`f8E5M2`, the same as OCP's).
    E5,
}

impl Fp8 {
    /// Every kind.
    pub const ALL: [Fp8; 3] = [Fp8::E3, Fp8::E4, Fp8::E5];

    /// The value of a code, exactly. The sign and payload of a NaN are kept in the upper bits.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Fp8::E3 => decode_small::<3, 4>(u32::from(code)),
            Fp8::E4 => decode_small::<4, 3>(u32::from(code)),
            Fp8::E5 => decode_small::<5, 2>(u32::from(code)),
        }
    }

    /// The code nearest to a value, ties to even. Overflow gives an infinity; a NaN gives the canonical NaN.
    #[must_use]
    pub fn encode(self, value: f32) -> u8 {
        // The result of encode_small has 1 + E + M = 8 significant bits.
        (match self {
            Fp8::E3 => encode_small::<3, 4>(value),
            Fp8::E4 => encode_small::<4, 3>(value),
            Fp8::E5 => encode_small::<5, 2>(value),
        }) as u8
    }
}

/// The bits of an f32 without its sign, for infinity: anything above is a NaN.
pub(crate) const F32_INF: u32 = 0x7F80_0000;
/// The canonical NaN of f32: quiet, positive, no payload.
pub(crate) const F32_NAN: u32 = 0x7FC0_0000;

/// Widens an IEEE 754 number of `E` exponent and `M` mantissa bits to f32; exact.
///
/// `E` is at most 5, so that every subnormal of the small format is a normal number of f32.
#[inline(always)]
pub(crate) fn decode_small<const E: u32, const M: u32>(code: u32) -> f32 {
    let rebias = (127 - bias(E)) << 23;
    let sign = (code >> (E + M)) << 31;
    let magnitude = code & ((1 << (E + M)) - 1);
    let normal = (magnitude << (23 - M)).wrapping_add(rebias);
    // A subnormal is its mantissa times the weight of the lowest bit. Both factors are exact in f32, and no f32
    // subnormal appears on the way (it would cost a microcode assist on many processors). The magnitude is below 2^15,
    // so that the signed conversion, which has an instruction, is the same.
    let subnormal = (magnitude as i32 as f32 * f32::from_bits((128 - bias(E) - M) << 23)).to_bits();
    let special = F32_INF | (magnitude << (23 - M));
    let finite = if magnitude < (1 << M) { subnormal } else { normal };
    let bits = if magnitude >= infinity(E, M) { special } else { finite };
    f32::from_bits(sign | bits)
}

/// Narrows an f32 to an IEEE 754 number of `E` exponent and `M` mantissa bits: nearest, ties to even, overflow to
/// infinity, every NaN to the canonical one.
#[inline(always)]
pub(crate) fn encode_small<const E: u32, const M: u32>(value: f32) -> u32 {
    let rebias = (127 - bias(E)) << 23;
    let drop = 23 - M;
    let bits = value.to_bits();
    let sign = (bits >> 31) << (E + M);
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal: add half a unit less one, and the lowest kept bit; the carry walks into the exponent as it should.
    // Wrapping only matters for values that the selections below discard.
    let rounded = magnitude.wrapping_add((1 << (drop - 1)) - 1).wrapping_add((magnitude >> drop) & 1);
    let normal = rounded.wrapping_sub(rebias) >> drop;
    // Subnormal: next to this power of two the unit of f32 is the unit of our subnormals, so the addition itself
    // rounds.
    let unit = (151 - bias(E) - M) << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(unit)).to_bits().wrapping_sub(unit);
    let finite = if magnitude < rebias + (1 << 23) { subnormal } else { normal };
    // Taking the bias off keeps the order, so that everything too large, infinity included, is above the limit.
    let clamped = if finite < infinity(E, M) { finite } else { infinity(E, M) };
    let code = sign | clamped;
    if magnitude > F32_INF { infinity(E, M) | (1 << (M - 1)) } else { code }
}

/// Exponent bias of a format with `exponent_bits`.
const fn bias(exponent_bits: u32) -> u32 {
    (1 << (exponent_bits - 1)) - 1
}

/// The code of +∞: all exponent bits set, mantissa zero.
const fn infinity(exponent_bits: u32, mantissa_bits: u32) -> u32 {
    ((1 << exponent_bits) - 1) << mantissa_bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// (kind, exponent bits, mantissa bits, bias, largest finite value), written down from the decision record.
    const KINDS: [(Fp8, u32, u32, i32, f64); 3] =
        [(Fp8::E3, 3, 4, 3, 15.5), (Fp8::E4, 4, 3, 7, 240.0), (Fp8::E5, 5, 2, 15, 57344.0)];

    /// The value of a code by the textbook formula; `None` for a NaN.
    fn by_formula(exponent_bits: u32, mantissa_bits: u32, bias: i32, code: u8) -> Option<f64> {
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
        let exponent = (i32::from(code) >> mantissa_bits) & ((1 << exponent_bits) - 1);
        let sign = if code >= 0x80 { -1.0 } else { 1.0 };
        Some(if exponent == 0 {
            sign * mantissa * 2f64.powi(1 - bias)
        } else if exponent < (1 << exponent_bits) - 1 {
            sign * (1.0 + mantissa) * 2f64.powi(exponent - bias)
        } else if mantissa == 0.0 {
            sign * f64::INFINITY
        } else {
            return None;
        })
    }

    #[test]
    fn numbers_are_the_nrt_numbers() {
        let table = [
            ("uint64", 1, 8),
            ("int8", 2, 1),
            ("uint8", 3, 1),
            ("int16", 4, 2),
            ("uint16", 5, 2),
            ("bf16", 6, 2),
            ("fp16", 7, 2),
            ("int32", 8, 4),
            ("uint32", 9, 4),
            ("fp32", 0xA, 4),
            ("fp32r", 0xB, 4),
            ("int64", 0xC, 8),
            ("fp8_e3", 0xD, 1),
            ("fp8_e4", 0xE, 1),
            ("fp8_e5", 0xF, 1),
        ];
        assert_eq!(table.len(), DataType::ALL.len());
        for (name, number, size) in table {
            let dtype = DataType::from_nrt(number).expect("a number of the table");
            assert_eq!((dtype.nrt(), dtype.size(), dtype.to_string().as_str()), (number, size, name));
        }
        for number in [0, 16, 17, u32::MAX] {
            assert_eq!(DataType::from_nrt(number), None, "number {number}");
        }
    }

    #[test]
    fn names_are_read_back_and_strangers_refused() {
        for dtype in DataType::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
            assert_eq!(dtype.to_string().to_uppercase().replace('_', "-").parse(), Ok(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        let aliases = [
            ("float", DataType::Fp32),
            ("half", DataType::Fp16),
            ("bfloat16", DataType::Bf16),
            ("fp8_e4m3", DataType::Fp8E4),
            ("FP8-E5M2", DataType::Fp8E5),
            ("float8_e3m4", DataType::Fp8E3),
            (" u8 ", DataType::Uint8),
            ("int", DataType::Int32),
        ];
        for (name, dtype) in aliases {
            assert_eq!(name.parse(), Ok(dtype), "{name}");
        }
        for stranger in ["", "double", "fp64", "float8_e4m3fn", "fp8", "int128"] {
            let error = stranger.parse::<DataType>().expect_err(stranger);
            assert!(error.to_string().starts_with(&format!("`{stranger}` is not a data type")), "{error}");
            // The advice must name every type that exists.
            assert!(DataType::ALL.iter().all(|dtype| error.to_string().contains(dtype.name())), "{error}");
        }
        assert_eq!("xor".parse::<ReduceOp>(), Err(ParseError::ReduceOp { given: "xor".to_owned() }));
    }

    #[test]
    fn every_code_decodes_by_the_formula_and_encodes_back() {
        for (kind, e, m, bias, largest) in KINDS {
            let mut seen_largest = 0f64;
            for code in 0..=255u8 {
                let value = kind.decode(code);
                match by_formula(e, m, bias, code) {
                    Some(expected) => {
                        assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{kind:?} {code:#x}");
                        assert_eq!(kind.encode(value), code, "{kind:?} {code:#x}");
                        if expected.is_finite() {
                            seen_largest = seen_largest.max(expected);
                        }
                    }
                    None => {
                        assert!(value.is_nan(), "{kind:?} {code:#x}");
                        let canonical = (((1u32 << e) - 1) << m | 1 << (m - 1)) as u8;
                        assert_eq!(kind.encode(value), canonical, "{kind:?} {code:#x}");
                    }
                }
            }
            assert_eq!(seen_largest, largest, "{kind:?}");
        }
    }

    /// A half has the exponent of E5, so an E5 is the upper byte of a half: a second, independent witness.
    #[test]
    fn e5_is_the_upper_byte_of_a_half() {
        for code in 0..=255u8 {
            let half = half::f16::from_bits(u16::from(code) << 8).to_f32();
            let ours = Fp8::E5.decode(code);
            assert!(half.to_bits() == ours.to_bits() || half.is_nan() && ours.is_nan(), "{code:#x}");
        }
    }

    #[test]
    fn every_midpoint_rounds_to_even_and_its_neighbours_to_the_nearest() {
        for (kind, e, m, bias, largest) in KINDS {
            let infinity = (((1u32 << e) - 1) << m) as u8;
            for low in 0..infinity {
                let high = low + 1;
                let a = by_formula(e, m, bias, low).expect("finite");
                // Above the largest value stands the one that the next exponent would have had.
                let b = if high == infinity {
                    2.0 * 2f64.powi((1 << e) - 2 - bias)
                } else {
                    by_formula(e, m, bias, high).expect("finite")
                };
                let middle = ((a + b) / 2.0) as f32;
                assert_eq!(f64::from(middle), (a + b) / 2.0, "the midpoint is exact in f32");
                let even = if low % 2 == 0 { low } else { high };
                for (value, expected) in [(middle, even), (middle.next_up(), high), (middle.next_down(), low)] {
                    assert_eq!(kind.encode(value), expected, "{kind:?} {value:e}");
                    assert_eq!(kind.encode(-value), expected | 0x80, "{kind:?} {:e}", -value);
                }
            }
            // Overflow: the midpoint above the largest value is the first to become an infinity.
            for value in [largest as f32 * 2.0, f32::MAX, f32::INFINITY] {
                assert_eq!(
                    (kind.encode(value), kind.encode(-value)),
                    (infinity, infinity | 0x80),
                    "{kind:?} {value:e}"
                );
            }
            // Underflow keeps the sign of zero.
            for value in [0.0, f32::from_bits(1), f32::MIN_POSITIVE] {
                assert_eq!((kind.encode(value), kind.encode(-value)), (0, 0x80), "{kind:?} {value:e}");
            }
        }
    }

    #[test]
    fn every_half_converts_as_in_the_half_crate() {
        for code in 0..=0xFFFFu16 {
            let ours = decode_small::<5, 10>(u32::from(code));
            let theirs = half::f16::from_bits(code).to_f32();
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{code:#x}");
            let back = if theirs.is_nan() { 0x7E00 } else { u32::from(code) };
            assert_eq!(encode_small::<5, 10>(theirs), back, "{code:#x}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        /// Whatever f32 is narrowed, no other code lies nearer, and of two equally near the even one was taken.
        #[test]
        fn encoding_finds_the_nearest_code(bits: u32, scale in 0u32..4) {
            // Three of four cases are moved into the range of the small formats, where the interesting roundings are.
            let value = f32::from_bits(if scale == 0 { bits } else { (bits & 0x87FF_FFFF) | 0x3800_0000 });
            prop_assume!(!value.is_nan());
            for (kind, e, m, bias, largest) in KINDS {
                let limit = largest + (largest - by_formula(e, m, bias, kind.encode(largest as f32) - 1).unwrap()) / 2.0;
                let code = kind.encode(value);
                prop_assert_eq!(code >= 0x80, value.is_sign_negative());
                let result = by_formula(e, m, bias, code).expect("not a NaN");
                let value = f64::from(value);
                if value.abs() >= limit {
                    prop_assert!(result.is_infinite());
                    continue;
                }
                let error = (result - value).abs();
                for other in 0..=255u8 {
                    if let Some(candidate) = by_formula(e, m, bias, other).filter(|v| v.is_finite() && *v != result) {
                        let distance = (candidate - value).abs();
                        prop_assert!(error < distance || error == distance && code % 2 == 0, "{:?} {:e}", kind, value);
                    }
                }
            }
        }

        #[test]
        fn halves_round_as_in_the_half_crate(bits: u32, scale in 0u32..4) {
            let value = f32::from_bits(if scale == 0 { bits } else { (bits & 0x87FF_FFFF) | 0x3800_0000 });
            prop_assume!(!value.is_nan());
            prop_assert_eq!(encode_small::<5, 10>(value), u32::from(half::f16::from_f32(value).to_bits()));
        }
    }
}
