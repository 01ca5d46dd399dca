//! What happens in a round, as a pure function of the seed and the round's number; and the operations of a list.

use hw_bridge::call::Op;
use wccl::{DataType, ReduceOp};

// The same buffers, calls and reference as the program's, so that a collective added there is soaked here.
use wccl_cli::rank::collective::{BufferMemory, Case};

/// Numbers from a seed: splitmix64.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// From a seed and what it is for.
    pub fn new(seed: u64, what: u64) -> Rng {
        let mut r = Rng(seed ^ what.wrapping_mul(0xD6E8_FEB8_6659_FD93));
        r.draw();
        r
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.draw() % n.max(1) as u64) as usize
    }

    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// `k` of `0..n`, in random order: ranks of a group need not be in the order of the processes.
    fn some(&mut self, n: usize, k: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        for i in 0..k {
            let j = i + self.below(n - i);
            all.swap(i, j);
        }
        all.truncate(k);
        all
    }
}

/// What a round is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Operations in several groups.
    Ops,
    /// The same, and one rank comes late, within the deadline.
    LateWithin,
    /// One rank is killed.
    Death,
    /// One rank comes after the deadline.
    LateBeyond,
}

/// A group of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Processes, in the order of their ranks in the group.
    pub members: Vec<usize>,
    /// Who makes the id.
    pub maker: usize,
}

/// Operations in one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct List {
    /// The group; `None` for that of all ranks.
    pub group: Option<usize>,
    /// What they are made from.
    pub seed: u64,
    /// How many.
    pub count: u64,
}

/// One round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// What it is about.
    pub kind: Kind,
    /// Groups beside that of all ranks.
    pub groups: Vec<Group>,
    /// What runs, in this order on all ranks.
    pub lists: Vec<List>,
    /// The group that is to fail.
    pub members: Vec<usize>,
    /// Who makes its id, or that of the group of all ranks.
    pub maker: usize,
    /// The process that dies or is late; never process 0.
    pub victim: usize,
    /// When it dies, or how late it is.
    pub ms: u64,
}

/// Round `i` of a run over `n` processes. Every eighth round kills, every eighth is too late, every eighth is late.
pub fn round(seed: u64, i: u64, n: usize) -> Round {
    let mut rng = Rng::new(seed, i);
    let kind = match i % 8 {
        2 => Kind::LateWithin,
        4 => Kind::Death,
        6 => Kind::LateBeyond,
        _ => Kind::Ops,
    };
    let victim = 1 + rng.below(n - 1);
    // A group of two or more with the victim in it.
    let k = 2 + rng.below(n - 1);
    let mut members = rng.some(n, k);
    if !members.contains(&victim) {
        let at = rng.below(members.len());
        members[at] = victim;
    }
    let breaks = matches!(kind, Kind::Death | Kind::LateBeyond);
    let maker = if breaks { rng.pick(&members) } else { rng.below(n) };
    let groups: Vec<Group> = (0..if breaks { 0 } else { rng.below(4) })
        .map(|_| {
            let k = 1 + rng.below(n);
            let members = rng.some(n, k);
            let maker = rng.pick(&members);
            Group { members, maker }
        })
        .collect();
    let mut lists: Vec<List> = (0..2 + rng.below(4))
        .map(|_| {
            let group = rng.below(groups.len() + 1);
            let group = (group < groups.len()).then_some(group);
            List { group, seed: rng.draw(), count: 1 + rng.below(16) as u64 }
        })
        .collect();
    // The group of all ranks takes part in every round; a late rank is late there.
    lists[0].group = None;
    let ms = 20 + rng.below(300) as u64;
    Round { kind, groups, lists, members, maker, victim, ms }
}

/// One operation and where its buffers lie.
#[derive(Debug, Clone, Copy)]
pub struct Operation {
    /// The call.
    pub case: Case,
    /// The memory.
    pub memory: BufferMemory,
}

/// The next operation of a list in a group of `n`. `meeting`: one in which every rank waits for every other directly. Elsewhere
/// a rank may wait for one that itself waits for the late one, and names that one first.
pub fn operation(rng: &mut Rng, n: usize, meeting: bool) -> Operation {
    let op = if meeting { rng.pick(&[Op::AllReduce, Op::Barrier]) } else { rng.pick(&Op::ALL) };
    let dtype = rng.pick(&DataType::ALL);
    let redop = rng.pick(&[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg]);
    // As many small as large ones; odd lengths; nothing at times; seldom more than a few pieces of staging.
    let most = if rng.below(16) == 0 { 22 } else { 18 };
    let power = rng.below(most) as u32;
    let bytes = if rng.below(20) == 0 { 0 } else { (1u64 << power) + rng.draw() % (1 << power) };
    let mut case = Case::of_bytes(op, dtype, redop, bytes, n);
    case.root = rng.below(n);
    case.in_place = rng.below(2) == 0 && op.facts().has_in_place;
    case.seed = rng.draw();
    // A group moves tensors only.
    let memory = rng.pick(&[BufferMemory::Hbm, if op == Op::Group { BufferMemory::Hbm } else { BufferMemory::Host }]);
    Operation { case, memory }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_rounds_and_another_gives_others() {
        for i in 0..50 {
            assert_eq!(round(7, i, 8), round(7, i, 8));
        }
        assert!((0..50).any(|i| round(7, i, 8) != round(8, i, 8)));
    }

    #[test]
    fn rounds_make_sense() {
        let mut victims = std::collections::HashSet::new();
        for n in [2usize, 3, 8] {
            for i in 0..2000 {
                let r = round(11, i, n);
                assert!(r.victim > 0 && r.members.contains(&r.victim) && r.members.len() >= 2, "{r:?}");
                let mut sorted = r.members.clone();
                sorted.sort_unstable();
                sorted.dedup();
                assert_eq!(sorted.len(), r.members.len(), "{r:?}");
                assert!(r.groups.iter().all(|g| g.members.contains(&g.maker)), "{r:?}");
                assert!(r.lists.iter().all(|l| l.group.is_none_or(|g| g < r.groups.len())), "{r:?}");
                if n == 8 {
                    victims.insert(r.victim);
                }
            }
        }
        assert_eq!(victims.len(), 7, "everybody but process 0 dies some time");
    }
}
