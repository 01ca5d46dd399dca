//! Reductions one element at a time, in textbook arithmetic. Shares no code with the runtime: conversions search a table
//! of values, integers are computed in 128 bits.

use wccl::{DataType, ReduceOp};

/// Exponent and mantissa bits of a float type.
pub fn layout(dtype: DataType) -> (i32, i32) {
    match dtype {
        DataType::Fp32 | DataType::Fp32r => (8, 23),
        DataType::Bf16 => (8, 7),
        DataType::Fp16 => (5, 10),
        DataType::Fp8E3 => (3, 4),
        DataType::Fp8E4 => (4, 3),
        DataType::Fp8E5 => (5, 2),
        _ => panic!("{dtype} is no float"),
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

/// Reads and writes elements of one float type.
pub struct Codec {
    dtype: DataType,
    /// Values of the codes from +0 to +∞, for all but the 32-bit types; ∞ has the value that its code would have if it
    /// were a number.
    values: Vec<f64>,
}

impl Codec {
    pub fn new(dtype: DataType) -> Codec {
        let (e, m) = layout(dtype);
        let bias = (1 << (e - 1)) - 1;
        let value = |code: u32| {
            let fraction = f64::from(code % (1 << m)) / f64::from(1u32 << m);
            match (code >> m) as i32 {
                0 => fraction * 2f64.powi(1 - bias),
                exponent => (1.0 + fraction) * 2f64.powi(exponent - bias),
            }
        };
        let infinity = ((1u32 << e) - 1) << m;
        Codec { dtype, values: if m == 23 { Vec::new() } else { (0..=infinity).map(value).collect() } }
    }

    /// The smallest number above zero.
    pub fn smallest(&self) -> f64 {
        self.values.get(1).copied().unwrap_or(2f64.powi(-149))
    }

    pub fn decode(&self, bytes: &[u8]) -> f32 {
        let bits = word(bytes);
        let Some(infinity) = self.values.len().checked_sub(1) else { return f32::from_bits(bits as u32) };
        let sign = 1u64 << (8 * bytes.len() - 1);
        let magnitude = match (bits & !sign) as usize {
            code if code < infinity => self.values[code] as f32,
            code if code == infinity => f32::INFINITY,
            _ => f32::NAN,
        };
        if bits & sign == 0 { magnitude } else { -magnitude }
    }

    /// To nearest, ties to even; what is too large is infinite; every NaN is the positive quiet one.
    pub fn encode(&self, value: f32) -> Vec<u8> {
        let size = self.dtype.size();
        let sign = if value.is_sign_negative() { 1u64 << (8 * size - 1) } else { 0 };
        let bits = if value.is_nan() {
            let (e, m) = layout(self.dtype);
            ((2u64 << e) - 1) << (m - 1)
        } else if self.values.is_empty() {
            u64::from(value.to_bits())
        } else {
            let (magnitude, infinity) = (f64::from(value.abs()), self.values.len() - 1);
            let above = self.values.partition_point(|known| *known < magnitude).min(infinity);
            let below = above.saturating_sub(1);
            let distance = |code: usize| (self.values[code] - magnitude).abs();
            let nearer = (distance(above), above % 2) < (distance(below), below % 2) || above == below;
            let beyond = magnitude > self.values[infinity];
            let code = if nearer || beyond { above } else { below };
            code as u64 | sign
        };
        bits.to_le_bytes()[..size].to_vec()
    }
}

fn extremum(op: ReduceOp, a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() {
        return f32::NAN;
    }
    // total_cmp puts −0 before +0, as IEEE's minimum and maximum do.
    let a_first = a.total_cmp(&b).is_le();
    if a_first == (op == ReduceOp::Min) { a } else { b }
}

/// The reduction of all ranks' elements in rank order. `scales` is one for each rank of a pre-scaled sum, else empty.
pub fn reduced(dtype: DataType, op: ReduceOp, inputs: &[Vec<u8>], scales: &[f32]) -> Vec<u8> {
    let n = inputs.len();
    if n == 1 && scales.is_empty() {
        return inputs[0].clone();
    }
    let size = dtype.size();
    let elements = (0..inputs[0].len()).step_by(size).map(|at| inputs.iter().map(move |i| &i[at..at + size]));
    if dtype.is_float() {
        let codec = Codec::new(dtype);
        let mut out = Vec::with_capacity(inputs[0].len());
        for element in elements {
            let terms = element.enumerate().map(|(rank, bytes)| match scales.get(rank) {
                Some(scale) => codec.decode(bytes) * scale,
                None => codec.decode(bytes),
            });
            let terms: Vec<f32> = terms.collect();
            let folded = terms.iter().copied().reduce(|a, b| match op {
                ReduceOp::Prod => a * b,
                ReduceOp::Max | ReduceOp::Min => extremum(op, a, b),
                _ => a + b,
            });
            let folded = folded.unwrap();
            out.extend(codec.encode(match op {
                // What is too large for a sum of f32 is not too large for an average.
                ReduceOp::Avg if !folded.is_finite() => {
                    (terms.iter().map(|t| f64::from(*t)).sum::<f64>() / n as f64) as f32
                }
                ReduceOp::Avg => folded / n as f32,
                _ => folded,
            }));
        }
        return out;
    }
    let signed = matches!(dtype, DataType::Int8 | DataType::Int16 | DataType::Int32 | DataType::Int64);
    let modulus = 1i128 << (8 * size);
    let wrap = |value: i128| {
        let value = value.rem_euclid(modulus);
        if signed && value >= modulus / 2 { value - modulus } else { value }
    };
    let mut out = Vec::with_capacity(inputs[0].len());
    for element in elements {
        let folded = element.map(|bytes| wrap(i128::from(word(bytes)))).reduce(|a, b| match op {
            // Two unsigned 64-bit factors make 128 bits, so the product wraps in the unsigned type before it is cut.
            ReduceOp::Prod => wrap(((a as u128).wrapping_mul(b as u128) % (1u128 << (8 * size))) as i128),
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
            _ => wrap(a + b),
        });
        let folded = folded.unwrap();
        let result = if op == ReduceOp::Avg { folded / n as i128 } else { folded };
        out.extend_from_slice(&(result as u64).to_le_bytes()[..size]);
    }
    out
}
