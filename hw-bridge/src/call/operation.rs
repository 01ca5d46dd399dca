//! The operations that ranks do together, and what each rank says it is about to do.

use super::types::{DataType, ReduceOp};

/// Collective operations, as numbers in op headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Every rank gets the reduction of all inputs.
    AllReduce = 1,
    /// Every rank gets the concatenation of all inputs.
    AllGather = 2,
    /// Rank r gets block r of the reduction.
    ReduceScatter = 3,
    /// Every rank gets the root's input.
    Broadcast = 4,
    /// The root gets the reduction.
    Reduce = 5,
    /// Rank r gets block r of every rank.
    AllToAll = 6,
    /// Every rank sends to one and receives from one.
    SendRecv = 7,
    /// Nothing moves; nobody leaves before all have come.
    Barrier = 8,
    /// All-gather of blocks of different sizes.
    AllGatherV = 9,
    /// Reduce-scatter of blocks of different sizes.
    ReduceScatterV = 10,
    /// All-to-all of blocks of different sizes.
    AllToAllV = 11,
    /// The root gets the concatenation of all inputs.
    Gather = 12,
    /// Rank r gets block r of the root's input.
    Scatter = 13,
    /// Some pairs: each rank sends to one at most and receives from one at most, and all know the pairs.
    Permute = 14,
    /// Sends and receives issued as one.
    Group = 15,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 15] = [
        Op::AllReduce,
        Op::AllGather,
        Op::ReduceScatter,
        Op::Broadcast,
        Op::Reduce,
        Op::AllToAll,
        Op::SendRecv,
        Op::Barrier,
        Op::AllGatherV,
        Op::ReduceScatterV,
        Op::AllToAllV,
        Op::Gather,
        Op::Scatter,
        Op::Permute,
        Op::Group,
    ];

    /// What is known of it.
    pub fn facts(self) -> &'static Facts {
        &FACTS[self as usize - 1]
    }

    /// The name users know.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    fn from_u8(v: u8) -> Option<Op> {
        Op::ALL.into_iter().find(|o| *o as u8 == v)
    }
}

/// What is known of an operation, whoever asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The name users know.
    pub name: &'static str,
    /// Whether it computes.
    pub reduces: bool,
    /// Whether it has a root.
    pub has_root: bool,
    /// Whether input and output can be the same memory.
    pub has_in_place: bool,
    /// Whether each call brings lists: counts of each rank, pairs, moves.
    pub by_lists: bool,
}

const fn fact(name: &'static str, [reduces, has_root, has_in_place, by_lists]: [bool; 4]) -> Facts {
    Facts { name, reduces, has_root, has_in_place, by_lists }
}

/// In the order of the numbers; each: reduces, has a root, has an in-place form, comes with lists.
#[rustfmt::skip]
const FACTS: [Facts; Op::ALL.len()] = [
    fact("all_reduce", [true, false, true, false]),
    fact("all_gather", [false, false, true, false]),
    fact("reduce_scatter", [true, false, true, false]),
    fact("broadcast", [false, true, true, false]),
    fact("reduce", [true, true, true, false]),
    fact("all_to_all", [false, false, true, false]),
    fact("send_recv", [false, false, false, false]),
    fact("barrier", [false, false, false, false]),
    fact("all_gather_v", [false, false, true, true]),
    fact("reduce_scatter_v", [true, false, true, true]),
    fact("all_to_all_v", [false, false, false, true]),
    fact("gather", [false, true, true, false]),
    fact("scatter", [false, true, true, false]),
    fact("permute", [false, false, false, true]),
    fact("group", [false, false, false, true]),
];

/// What a rank says it is about to do. Ranks whose headers differ are in different calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpHeader {
    /// The collective.
    pub op: Op,
    /// Element type.
    pub dtype: DataType,
    /// Reduction, for those that reduce.
    pub redop: Option<ReduceOp>,
    /// Root, for those that have one, else 0.
    pub root: u16,
    /// Algorithm number; ranks that chose differently cannot work together.
    pub algorithm: u8,
    /// Whether buffers are private memory (staged) rather than device memory, and whether in place where it matters.
    pub flags: u8,
    /// Elements, as the caller counted them.
    pub count: u64,
}

impl OpHeader {
    /// As the two words of a record, which ranks compare.
    pub(crate) fn words(&self) -> [u64; 2] {
        let redop = self.redop.map_or(0xFF, |r| r as u8);
        let what = u64::from(self.op as u8)
            | (self.dtype as u64 & 0xFF) << 8
            | u64::from(redop) << 16
            | u64::from(self.flags) << 24
            | u64::from(self.root) << 32
            | u64::from(self.algorithm) << 48;
        [what, self.count]
    }
}

/// A header for people, from its words.
pub(crate) fn describe([what, count]: [u64; 2]) -> String {
    let byte = |at: u32| (what >> at) as u8;
    let op = Op::from_u8(byte(0)).map_or("unknown operation", Op::name);
    let mut s = op.to_string();
    if op == "barrier" {
        return s;
    }
    if let Some(d) = DataType::from_nrt(u32::from(byte(8))) {
        s += &format!(" {d}");
    }
    if let Some(r) = ReduceOp::ALL.into_iter().chain([ReduceOp::PreMulSum]).find(|r| *r as u8 == byte(16)) {
        s += &format!(" {r}");
    }
    s += &format!(" count {count}");
    if Op::from_u8(byte(0)).is_some_and(|op| op.facts().has_root) {
        s += &format!(" root {}", (what >> 32) as u16);
    }
    let flags = byte(24);
    if flags & FLAG_PRIVATE != 0 {
        s += " private memory";
    }
    if flags & FLAG_IN_PLACE != 0 {
        s += " in place";
    }
    s + " by " + ALGORITHMS.get(usize::from(byte(48))).unwrap_or(&"an unknown algorithm")
}

/// Names of the numbers that [`OpHeader::algorithm`] holds; the algorithms themselves are the runtime's.
pub const ALGORITHMS: [&str; 9] =
    ["no algorithm", "one-hop", "mesh", "ring", "staged", "halving", "tree", "two-level", "direct"];

impl std::fmt::Display for OpHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&describe(self.words()))
    }
}

/// Flag of [`OpHeader`]: the buffers are private memory of each process.
pub const FLAG_PRIVATE: u8 = 1;
/// Flag of [`OpHeader`]: input and output are the same memory, where that changes the schedule.
pub const FLAG_IN_PLACE: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_stand_at_their_operations_numbers() {
        for (i, op) in Op::ALL.into_iter().enumerate() {
            assert_eq!(op as usize, i + 1);
            // `AllToAllV` is `all_to_all_v`.
            let mut name = String::new();
            for c in format!("{op:?}").chars() {
                name.extend(c.is_uppercase().then_some('_').filter(|_| !name.is_empty()));
                name.extend(c.to_lowercase());
            }
            assert_eq!(op.name(), name);
        }
    }
}
