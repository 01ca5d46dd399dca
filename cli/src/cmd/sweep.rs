//! What the table of `bench`, `--tune` and `--explain` go through alike: collectives, sizes, and how each call is made.

use hw_bridge::call::Op;
use serde::{Deserialize, Serialize};
use wccl::{DataType, ReduceOp};

use crate::rank::collective::{self, BufferMemory, Case};

/// A part of a rank's job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sweep {
    /// Names of collectives.
    pub collectives: Vec<String>,
    /// Sizes, bytes of the larger of a rank's buffers.
    pub sizes: Vec<u64>,
    /// Element type.
    pub dtype: String,
    /// Reduction.
    pub redop: String,
    /// Root.
    pub root: usize,
    /// Input and output in the same memory.
    pub in_place: bool,
}

impl Sweep {
    /// The calls of each collective on `n` ranks, by size; a barrier has one, of no bytes.
    ///
    /// # Errors
    /// A name that the command line did not check.
    pub fn cases(&self, n: usize) -> anyhow::Result<Vec<(Op, Vec<Case>)>> {
        let (dtype, redop): (DataType, ReduceOp) = (self.dtype.parse()?, self.redop.parse()?);
        let of = |name: &String| {
            let op = collective::parse(name).map_err(anyhow::Error::msg)?;
            let sizes = if op == Op::Barrier { &[0][..] } else { &self.sizes[..] };
            let case = |bytes: &u64| {
                let (root, in_place, seed) = (self.root, self.in_place, *bytes);
                Case { root, in_place, seed, ..Case::of_bytes(op, dtype, redop, *bytes, n) }
            };
            Ok((op, sizes.iter().map(case).collect()))
        };
        self.collectives.iter().map(of).collect()
    }

    /// What runs, on what: the first words of a table.
    pub fn about(&self, n: usize, memory: BufferMemory) -> String {
        format!(
            "wccl {}: {} on one server, {} buffers, {}, {}",
            env!("CARGO_PKG_VERSION"),
            if n == 1 { "one rank".into() } else { format!("{n} ranks") },
            memory.name(),
            self.dtype,
            if self.in_place { "in place" } else { "out of place" },
        )
    }
}
