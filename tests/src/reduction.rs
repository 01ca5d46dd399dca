//! The numbers of an all-reduce that ranks repeat and check in every element, whatever becomes of the plugin meanwhile.
//!
//! The first element says whether rank 0 has enough: so all ranks stop after the same operation.

use anyhow::{Result, ensure};

/// What `rank` puts into operation `op`: `count` 32-bit numbers.
pub fn filled(rank: usize, count: usize, op: u32, enough: bool) -> Vec<u8> {
    let value = |i: usize| match i {
        0 => u32::from(enough && rank == 0),
        _ => (i as u32 + op).wrapping_mul(rank as u32 + 1),
    };
    (0..count).flat_map(|i| value(i).to_le_bytes()).collect()
}

/// Checks the sums of operation `op` over `n` ranks; answers whether rank 0 has enough.
///
/// # Errors
/// The first element that is wrong.
pub fn checked(sums: &[u8], n: usize, op: u32) -> Result<bool> {
    let ranks: u32 = (1..=n as u32).sum();
    let mut sums = sums.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let enough = sums.next().is_some_and(|v| v != 0);
    for (i, v) in sums.enumerate() {
        let expected = (i as u32 + 1 + op).wrapping_mul(ranks);
        ensure!(v == expected, "operation {op}: element {} is {v}, {expected} was expected", i + 1);
    }
    Ok(enough)
}
