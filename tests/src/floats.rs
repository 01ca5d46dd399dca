//! The calls of the tests of floating-point state, which ranks make and tests compute.

use std::fmt;

use wccl::{DataType, ReduceOp};

/// Elements of an input: several blocks of every kernel, and a rest.
pub const COUNT: usize = 1031;

/// Types and operations, in the order of the calls.
pub fn calls() -> impl Iterator<Item = (DataType, ReduceOp)> {
    let ops = || ReduceOp::ALL.into_iter().chain([ReduceOp::PreMulSum]);
    DataType::ALL.into_iter().filter(|d| d.is_float()).flat_map(move |d| ops().map(move |op| (d, op)))
}

/// The scale of a rank in a pre-scaled sum: its products round.
pub fn scale(rank: usize) -> f32 {
    [0.1, -3.3][rank % 2]
}

/// What a rank puts in: any bits, of which every other number is subnormal.
pub fn input(rank: usize, dtype: DataType) -> Vec<u8> {
    let mantissa = match dtype {
        DataType::Fp8E5 => 2,
        DataType::Fp8E4 => 3,
        DataType::Fp8E3 => 4,
        DataType::Bf16 => 7,
        DataType::Fp16 => 10,
        _ => 23,
    };
    let (mut state, sign) = (rank as u64 + 1, 1u64 << (8 * dtype.size() - 1));
    let mut element = |i: usize| {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let bits = state >> 24;
        if i % 2 == 0 { bits & (sign | ((1 << mantissa) - 1)) } else { bits }
    };
    (0..COUNT).flat_map(|i| element(i).to_le_bytes()[..dtype.size()].to_vec()).collect()
}

/// FNV-1a of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Digest {
        Digest(0xCBF2_9CE4_8422_2325)
    }
}

impl Digest {
    /// Takes in more bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |d, b| (d ^ u64::from(*b)).wrapping_mul(0x100_0000_01B3));
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
