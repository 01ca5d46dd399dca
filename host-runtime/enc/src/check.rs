//! Proves the schedules of all ranks of one call: right results, no race, no deadlock, in every interleaving.
//!
//! *Order.* A wait is over, at the earliest, at one certain event of its peer: the first signal that is high enough. So
//! the happens-before relation does not depend on how a run goes: program order, publish to arrival, signal to wait, and the
//! end of an operation to the reuse of a slot. The checker executes the steps symbolically in one order that respects it,
//! with vector clocks; two accesses of the same bytes by different ranks, one of them a write, must be ordered by the
//! clocks. If all are, every interleaving computes the same, and what the one execution computed is proved for all. If the
//! symbolic execution gets stuck, the waits form a circle.
//!
//! *Values.* What a range of a buffer holds is an expression: bytes of a rank's input, or a reduction of expressions in
//! their order. A pre-scaled sum scales each input once, by its own rank's scale, and no sum again. Buffers are split only where a step begins or ends, so a large count costs what a small one does. A reduced
//! element must hold every rank once, and ranks that hold the same element must hold the same expression: that is what
//! makes results bitwise equal everywhere.
//!
//! *Between operations.* The call is made several times in a row. Before each one, the user of every rank fills its input
//! anew and scribbles over its output, and its staging halves are taken to be scribbled over as well: all that a peer does
//! with a rank's buffers must happen before that rank is done. Slots outlive an operation, so calls that use them are made
//! more often than there are slots.
//!
//! The record words themselves (header, offsets) are atomics that follow the flow control of the slots; the checker takes
//! them for granted. It owns nothing, has no threads, and is meant for tests and tools: it allocates as it likes.

use std::collections::{BTreeMap, HashMap};

use hw_bridge::call::{DataType, Op, ReduceOp};
use hw_bridge::exec::sequencer::{At, Place, Schedule, Step};
use hw_bridge::limits::{SLOTS, STAGE_BYTES};

use super::{Call, Lists, explain};

/// One rank of the call.
#[derive(Debug, Clone, Copy)]
pub struct CallRank<'a> {
    /// Its call; ranks differ in whom they send to and whether they work in place.
    pub call: Call,
    /// Its schedule.
    pub schedule: &'a Schedule,
}

/// What was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Proof {
    /// Events of all ranks in all repetitions.
    pub events: usize,
    /// Reads and writes of buffers.
    pub accesses: usize,
}

/// Why the schedules are wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Flaw {
    /// The schedules do not belong together, or a step cannot be.
    #[error("the schedules do not fit: {0}")]
    Shape(String),
    /// A wait that nothing ends.
    #[error("rank {rank} waits at step {step} ({what}) for a signal that rank {peer} never gives")]
    Unsignalled {
        /// Who waits.
        rank: usize,
        /// Its step.
        step: usize,
        /// The step in words.
        what: String,
        /// Who should signal.
        peer: usize,
    },
    /// Ranks wait for one another.
    #[error("no rank can go on: {0}")]
    Deadlock(String),
    /// Two accesses that nothing orders.
    #[error("race on bytes {from}..{to} of {place}: {one} and {other}")]
    Race {
        /// The buffer.
        place: String,
        /// First byte.
        from: u64,
        /// Byte after the last.
        to: u64,
        /// The access that came first in the checker's order.
        one: String,
        /// The other.
        other: String,
    },
    /// A barrier that somebody leaves too soon.
    #[error("rank {rank} may leave the barrier before rank {peer} has come")]
    Early {
        /// Who leaves.
        rank: usize,
        /// Who has not come.
        peer: usize,
    },
    /// A result that is not what the collective promises.
    #[error("rank {rank} ends with a wrong byte {at} of {place}: {why}")]
    Wrong {
        /// Whose result.
        rank: usize,
        /// The buffer.
        place: &'static str,
        /// The byte.
        at: u64,
        /// What is there and what should be.
        why: String,
    },
}

/// An expression, and how far position 0 of the buffer that holds it lies from position 0 of the inputs it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Val {
    expr: u32,
    base: i64,
}

const JUNK: Val = Val { expr: 0, base: 0 };

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Node {
    /// Bytes that nobody wrote for this operation.
    Junk,
    /// Input of a rank in a repetition.
    Input(u16, u16),
    /// Reduction of these, in this order, with this operation (as a number: it is the key of a table).
    Reduced(u8, Vec<u32>),
    /// Division by so many.
    Divided(u32, u32),
}

/// What a node is made of.
#[derive(Debug, Clone, Copy)]
struct Fact {
    /// Ranks in it, a bit each.
    ranks: u64,
    /// Repetition its inputs are of.
    repetition: u16,
    /// The operation of all its reductions.
    op: Option<ReduceOp>,
    /// An average was taken: nothing may be added any more.
    closed: bool,
}

#[derive(Debug)]
struct Exprs {
    ids: HashMap<Node, u32>,
    facts: Vec<Fact>,
}

impl Exprs {
    fn new() -> Exprs {
        let junk = Fact { ranks: 0, repetition: u16::MAX, op: None, closed: true };
        Exprs { ids: HashMap::from([(Node::Junk, 0)]), facts: vec![junk] }
    }

    fn intern(&mut self, node: Node, fact: Fact) -> u32 {
        let next = self.facts.len() as u32;
        let id = *self.ids.entry(node).or_insert(next);
        if id == next {
            self.facts.push(fact);
        }
        id
    }

    fn input(&mut self, rank: u16, repetition: u16) -> u32 {
        let fact = Fact { ranks: 1 << rank, repetition, op: None, closed: false };
        self.intern(Node::Input(rank, repetition), fact)
    }

    /// Reduces values that lie at the same place of their buffers after shifting. `scaled` tells by which rank's scale each
    /// is multiplied if this is a pre-scaled sum: an input by its own rank's, once; a sum of such not again.
    fn reduce(&mut self, op: ReduceOp, vals: &[Val], scaled: &[Option<usize>]) -> Result<Val, String> {
        let first = vals[0];
        let mut all = self.facts[first.expr as usize];
        for (i, v) in vals.iter().enumerate() {
            let f = self.facts[v.expr as usize];
            if f.ranks == 0 {
                return Err(format!("operand {i} was never written in this operation"));
            }
            if f.closed {
                return Err(format!("operand {i} is an average already"));
            }
            if f.op.is_some_and(|o| o != op) {
                return Err(format!("operand {i} was reduced with {} before", f.op.map_or("", ReduceOp::name)));
            }
            if op == ReduceOp::PreMulSum {
                match (f.op, scaled[i]) {
                    (None, Some(rank)) if f.ranks == 1 << rank => {}
                    (None, Some(rank)) => {
                        return Err(format!("operand {i} gets the scale of rank {rank}, not its own"));
                    }
                    (None, None) => return Err(format!("operand {i} is an input that nobody scales")),
                    (Some(_), Some(_)) => return Err(format!("operand {i} is a sum and would be scaled again")),
                    (Some(_), None) => {}
                }
            }
            if v.base != first.base {
                return Err(format!("operand {i} is another element than operand 0"));
            }
            if f.repetition != all.repetition {
                return Err(format!("operand {i} is of another operation"));
            }
            if i > 0 && f.ranks & all.ranks != 0 {
                return Err(format!("operand {i} brings a rank that is in already"));
            }
            all.ranks |= f.ranks;
        }
        let fact = Fact { op: Some(op), closed: op == ReduceOp::Avg, ..all };
        let node = Node::Reduced(op as u8, vals.iter().map(|v| v.expr).collect());
        Ok(Val { expr: self.intern(node, fact), base: first.base })
    }

    fn divide(&mut self, v: Val, n: u32, dtype: DataType) -> Result<Val, String> {
        let f = self.facts[v.expr as usize];
        if dtype.is_float() {
            return Err(format!("divides sums of {dtype}, which may be infinite where the average is not"));
        }
        if f.closed || f.op != Some(ReduceOp::Sum) || f.ranks.count_ones() != n {
            return Err(format!("divides by {n} what is not the sum of {n}"));
        }
        let fact = Fact { op: Some(ReduceOp::Avg), closed: true, ..f };
        Ok(Val { expr: self.intern(Node::Divided(v.expr, n), fact), base: v.base })
    }

    fn tell(&self, v: Val, at: u64) -> String {
        let f = self.facts[v.expr as usize];
        if f.ranks == 0 {
            return "it was never written in this operation".into();
        }
        let byte = at.wrapping_add_signed(v.base);
        let ranks: Vec<String> = (0..64).filter(|r| f.ranks >> r & 1 == 1).map(|r| r.to_string()).collect();
        let how = f.op.map_or("the input", ReduceOp::name);
        format!("it holds {how} of ranks {} at byte {byte}", ranks.join(" "))
    }
}

type Clock = u32;

/// A stretch of a buffer.
#[derive(Debug, Clone)]
struct Seg {
    end: u64,
    val: Val,
    /// Who wrote it last.
    written: (u16, Clock),
    /// Who read it since, and when last.
    read: Vec<(u16, Clock)>,
}

/// A buffer: stretches by their first byte, without gaps.
#[derive(Debug)]
struct Region {
    segs: BTreeMap<u64, Seg>,
}

impl Region {
    fn new(owner: u16, len: u64) -> Region {
        let mut segs = BTreeMap::new();
        if len > 0 {
            segs.insert(0, Seg { end: len, val: JUNK, written: (owner, 0), read: Vec::new() });
        }
        Region { segs }
    }

    fn split(&mut self, at: u64) {
        let Some((&start, seg)) = self.segs.range_mut(..at).next_back() else { return };
        if start < at && at < seg.end {
            let right = seg.clone();
            seg.end = at;
            self.segs.insert(at, right);
        }
    }

    /// Puts one stretch in the place of all between two bytes.
    fn replace(&mut self, from: u64, to: u64, val: Val, written: (u16, Clock)) {
        let old: Vec<u64> = self.segs.range(from..to).map(|(at, _)| *at).collect();
        for at in old {
            self.segs.remove(&at);
        }
        self.segs.insert(from, Seg { end: to, val, written, read: Vec::new() });
    }
}

// Regions of a rank.
const FIRST: usize = 0;
const SECOND: usize = 1;
const SLOT: usize = 2;
const STAGE: usize = SLOT + SLOTS;
const RESULT: usize = STAGE + 2;
const REGIONS: usize = RESULT + 2;

/// Where a rank's input and output lie: region and first byte.
#[derive(Debug, Clone, Copy)]
struct Home {
    input: (usize, u64),
    output: (usize, u64),
}

impl Home {
    fn of(call: &Call, lists: Lists<'_>, rank: usize) -> Home {
        let size = call.dtype.size() as u64;
        let at = rank as u64 * call.bytes().unwrap_or(0);
        let before = |counts: &[u64]| counts[..rank].iter().sum::<u64>() * size;
        let (input, output) = match (call.op, lists) {
            // Offsets are those of the whole device memory.
            (Op::Group, _) => ((FIRST, 0), (FIRST, 0)),
            _ if !call.in_place => ((FIRST, 0), (SECOND, 0)),
            (Op::AllGather | Op::Gather, _) => ((FIRST, at), (FIRST, 0)),
            (Op::ReduceScatter | Op::Scatter, _) => ((FIRST, 0), (FIRST, at)),
            (Op::AllGatherV, Lists::Counts(c)) => ((FIRST, before(c)), (FIRST, 0)),
            (Op::ReduceScatterV, Lists::Counts(c)) => ((FIRST, 0), (FIRST, before(c))),
            _ => ((FIRST, 0), (FIRST, 0)),
        };
        Home { input, output }
    }
}

/// What a stretch of an output must be.
#[derive(Debug, Clone, Copy)]
enum Want {
    /// Bytes of a rank's input from here on.
    Moved(usize, u64),
    /// The reduction of all inputs from this byte on.
    Reduced(u64),
}

/// What must be in `rank`'s output: first byte, bytes, what. From the meaning of the collective, not from what built the
/// schedules.
fn wanted(members: &[CallRank<'_>], lists: Lists<'_>, rank: usize) -> Vec<(u64, u64, Want)> {
    let call = &members[rank].call;
    let (n, block) = (members.len(), call.bytes().unwrap_or(u64::MAX));
    let size = call.dtype.size() as u64;
    let mine = rank as u64 * block;
    match (call.op, lists) {
        (Op::AllReduce, _) => vec![(0, block, Want::Reduced(0))],
        (Op::Reduce, _) if rank == call.root => vec![(0, block, Want::Reduced(0))],
        (Op::ReduceScatter, _) => vec![(0, block, Want::Reduced(mine))],
        (Op::Broadcast, _) => vec![(0, block, Want::Moved(call.root, 0))],
        (Op::AllGather, _) => (0..n).map(|p| (p as u64 * block, block, Want::Moved(p, 0))).collect(),
        (Op::Gather, _) if rank == call.root => (0..n).map(|p| (p as u64 * block, block, Want::Moved(p, 0))).collect(),
        (Op::Scatter, _) => vec![(0, block, Want::Moved(call.root, mine))],
        (Op::AllToAll, _) => (0..n).map(|p| (p as u64 * block, block, Want::Moved(p, mine))).collect(),
        (Op::SendRecv, _) => call.src.map(|p| (0, block, Want::Moved(p, 0))).into_iter().collect(),
        (Op::AllGatherV, Lists::Counts(counts)) => {
            let mut at = 0;
            let mut all = Vec::new();
            for (p, count) in counts.iter().enumerate() {
                all.push((at, count * size, Want::Moved(p, 0)));
                at += count * size;
            }
            all
        }
        (Op::ReduceScatterV, Lists::Counts(counts)) => {
            vec![(0, counts[rank] * size, Want::Reduced(counts[..rank].iter().sum::<u64>() * size))]
        }
        (Op::AllToAllV, Lists::Matrix(m)) => {
            let mut at = 0;
            let mut all = Vec::new();
            for p in 0..n {
                let row = &m[p * n..(p + 1) * n];
                let src = row[..rank].iter().sum::<u64>() * size;
                all.push((at, row[rank] * size, Want::Moved(p, src)));
                at += row[rank] * size;
            }
            all
        }
        (Op::Permute, Lists::Pairs(pairs)) => {
            pairs.iter().filter(|p| p.1 == rank).map(|p| (0, block, Want::Moved(p.0, 0))).collect()
        }
        (Op::Group, Lists::Moves(moves)) => {
            moves.iter().filter(|m| m.dst == rank).map(|m| (m.dst_at, m.bytes, Want::Moved(m.src, m.src_at))).collect()
        }
        _ => Vec::new(),
    }
}

/// Bytes of `rank`'s input.
fn input_bytes(members: &[CallRank<'_>], lists: Lists<'_>, rank: usize) -> u64 {
    let call = &members[rank].call;
    let n = members.len();
    let (block, size) = (call.bytes().unwrap_or(u64::MAX), call.dtype.size() as u64);
    match (call.op, lists) {
        (Op::AllReduce | Op::AllGather | Op::Reduce | Op::Gather, _) => block,
        (Op::ReduceScatter | Op::AllToAll, _) => block.saturating_mul(n as u64),
        (Op::Broadcast, _) if rank == call.root => block,
        (Op::Scatter, _) if rank == call.root => block.saturating_mul(n as u64),
        (Op::SendRecv, _) if call.dst.is_some() => block,
        (Op::AllGatherV, Lists::Counts(counts)) => counts[rank] * size,
        (Op::ReduceScatterV, Lists::Counts(counts)) => counts.iter().sum::<u64>() * size,
        (Op::AllToAllV, Lists::Matrix(m)) => m[rank * n..(rank + 1) * n].iter().sum::<u64>() * size,
        (Op::Permute, Lists::Pairs(pairs)) if pairs.iter().any(|p| p.0 == rank) => block,
        (Op::Group, Lists::Moves(moves)) => {
            moves.iter().filter(|m| m.src == rank).map(|m| m.src_at + m.bytes).max().unwrap_or(0)
        }
        _ => 0,
    }
}

/// One event of a rank's program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The user reads and writes all that is the rank's own.
    User,
    /// The slot is free.
    Drain,
    /// Payload and record are there.
    Publish,
    Step(usize),
    Done,
}

struct Machine<'a> {
    members: &'a [CallRank<'a>],
    lists: Lists<'a>,
    n: usize,
    repetitions: usize,
    /// Repetitions that a rank may be ahead: its slots are reused after so many.
    ahead: usize,
    homes: Vec<Home>,
    /// Ranks that a rank is linked to, seen from both ends.
    linked: Vec<Vec<usize>>,
    /// Signals of a rank: number and step.
    signals: Vec<Vec<(u16, usize)>>,
    exprs: Exprs,
    regions: Vec<Region>,
    /// Clocks of a rank at its present event.
    now: Vec<Vec<Clock>>,
    /// Clocks of a rank at the events that others wait for.
    then: Vec<HashMap<usize, Vec<Clock>>>,
    /// Next event of a rank.
    next: Vec<usize>,
    /// Results of reductions, to be compared between ranks: by repetition and first byte of the input.
    results: HashMap<usize, BTreeMap<u64, (u64, u32, usize)>>,
    proof: Proof,
}

/// Proves `members` (one a rank, in rank order) of one call with these lists, or tells what is wrong with them.
///
/// # Errors
/// The first [`Flaw`] found.
pub fn check(members: &[CallRank<'_>], lists: Lists<'_>) -> Result<Proof, Flaw> {
    let n = members.len();
    let shape = |why: String| Err(Flaw::Shape(why));
    if n == 0 || n > 64 {
        return shape(format!("{n} ranks"));
    }
    let first = members[0].schedule;
    // Positions are signed numbers here; sizes that overflow are the largest there is.
    let most = i64::MAX as u64;
    for (rank, m) in members.iter().enumerate() {
        let sizes = super::sizes(&m.call, lists, rank, n);
        let blocks = m.call.bytes().and_then(|b| b.checked_mul(n as u64));
        if sizes.input > most || sizes.output > most || blocks.is_none_or(|b| b > most) {
            return shape(format!("the buffers of rank {rank} are beyond what can be checked"));
        }
    }
    for (rank, m) in members.iter().enumerate() {
        let s = m.schedule;
        if s.header != first.header || s.table != first.table || s.slot_len != first.slot_len {
            return shape(format!("rank {rank} has {}, rank 0 has {}", s.header, first.header));
        }
        let need = wanted(members, lists, rank).iter().map(|w| w.0.saturating_add(w.1)).max().unwrap_or(0);
        if s.in_bytes != input_bytes(members, lists, rank) || s.out_bytes != need {
            return shape(format!("rank {rank} wants {} bytes in and {} out", s.in_bytes, s.out_bytes));
        }
        if s.payload > s.slot_len || s.payload > s.in_bytes {
            return shape(format!("rank {rank} has a payload of {}", s.payload));
        }
    }
    let mut m = Machine::new(members, lists);
    for rank in 0..n {
        m.check_signals(rank)?;
    }
    m.run()?;
    Ok(m.proof)
}

impl<'a> Machine<'a> {
    fn new(members: &'a [CallRank<'a>], lists: Lists<'a>) -> Machine<'a> {
        let (n, first) = (members.len(), members[0].schedule);
        let homes: Vec<Home> = members.iter().enumerate().map(|(r, m)| Home::of(&m.call, lists, r)).collect();
        let mut linked = vec![vec![false; n]; n];
        for (r, m) in members.iter().enumerate() {
            for p in super::needs(m.schedule).filter(|p| *p < n) {
                linked[r][p] = true;
                linked[p][r] = true;
            }
        }
        let listed = |row: &Vec<bool>| row.iter().enumerate().filter(|(_, l)| **l).map(|(p, _)| p).collect();
        let signals = members.iter().map(|m| {
            let steps = m.schedule.steps.iter().enumerate();
            steps.filter_map(|(i, s)| if let Step::Signal(x) = s { Some((*x, i)) } else { None }).collect()
        });
        let mut regions = Vec::with_capacity(n * REGIONS);
        for (r, m) in members.iter().enumerate() {
            let (s, home) = (m.schedule, homes[r]);
            let mut user = [0u64; 2];
            for ((region, at), len) in [(home.input, s.in_bytes), (home.output, s.out_bytes)] {
                user[region] = user[region].max(at + len);
            }
            let stage = if s.staged { STAGE_BYTES as u64 } else { 0 };
            regions.extend((FIRST..REGIONS).map(|kind| {
                let len = match kind {
                    FIRST | SECOND => user[kind],
                    SLOT..STAGE => s.slot_len,
                    _ => stage,
                };
                Region::new(r as u16, len)
            }));
        }
        Machine {
            members,
            lists,
            n,
            repetitions: if first.slot_len > 0 { first.ahead() as usize + 2 } else { 2 },
            ahead: first.ahead() as usize,
            homes,
            linked: linked.iter().map(listed).collect(),
            signals: signals.collect(),
            exprs: Exprs::new(),
            regions,
            now: vec![vec![0; n]; n],
            then: vec![HashMap::new(); n],
            next: vec![0; n],
            results: HashMap::new(),
            proof: Proof::default(),
        }
    }

    /// Events of one repetition of a rank: user, drain, publish, its steps, done.
    fn per_repetition(&self, rank: usize) -> usize {
        self.members[rank].schedule.steps.len() + 4
    }

    /// Events of a rank: the user looks once more at the end.
    fn events(&self, rank: usize) -> usize {
        self.repetitions * self.per_repetition(rank) + 1
    }

    fn event(&self, rank: usize, index: usize) -> (usize, Event) {
        let each = self.per_repetition(rank);
        let event = match index % each {
            0 => Event::User,
            1 => Event::Drain,
            2 => Event::Publish,
            i if i + 1 == each => Event::Done,
            i => Event::Step(i - 3),
        };
        (index / each, event)
    }

    /// The event of `peer` in repetition `k` that ends a wait for `step`. A later signal would end it too; that there is
    /// none of this very number is taken for an error, although the wait would end.
    fn ends_wait(&self, peer: usize, k: usize, step: u16) -> Option<usize> {
        let begin = k * self.per_repetition(peer);
        if step <= 1 {
            return Some(begin + 2);
        }
        let at = self.signals[peer].binary_search_by_key(&step, |(s, _)| *s).ok()?;
        Some(begin + 3 + self.signals[peer][at].1)
    }

    fn check_signals(&self, rank: usize) -> Result<(), Flaw> {
        for (i, step) in self.members[rank].schedule.steps.iter().enumerate() {
            let (Step::Arrival(p) | Step::SendsToMe(p) | Step::ReceivesFromMe(p) | Step::Wait { peer: p, .. }) = *step
            else {
                continue;
            };
            let peer = usize::from(p);
            if peer >= self.n || peer == rank {
                return Err(Flaw::Shape(format!("rank {rank} waits for rank {peer} at step {i}")));
            }
            let call = &self.members[peer].call;
            let meant = match step {
                Step::SendsToMe(_) => call.dst == Some(rank),
                Step::ReceivesFromMe(_) => call.src == Some(rank),
                _ => true,
            };
            if !meant {
                return Err(Flaw::Shape(format!("rank {rank} at step {i} finds that rank {peer} means another")));
            }
            if let Step::Wait { step: number, .. } = *step
                && self.ends_wait(peer, 0, number).is_none()
            {
                return Err(Flaw::Unsignalled { rank, step: i, what: explain::step(step).to_string(), peer });
            }
        }
        Ok(())
    }

    /// Events of others that must have been before this one.
    fn before(&self, rank: usize, k: usize, event: Event, out: &mut Vec<(usize, usize)>) {
        out.clear();
        match event {
            Event::Drain if k >= self.ahead => {
                let need = k - self.ahead;
                out.extend(self.linked[rank].iter().map(|p| (*p, (need + 1) * self.per_repetition(*p) - 1)));
            }
            Event::Step(i) => match self.members[rank].schedule.steps[i] {
                Step::Arrival(p) => out.extend(self.ends_wait(usize::from(p), k, 1).map(|e| (usize::from(p), e))),
                Step::Wait { peer, step } => {
                    out.extend(self.ends_wait(usize::from(peer), k, step).map(|e| (usize::from(peer), e)));
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn run(&mut self) -> Result<(), Flaw> {
        let mut before = Vec::new();
        loop {
            let mut moved = false;
            for rank in 0..self.n {
                while self.next[rank] < self.events(rank) {
                    let index = self.next[rank];
                    let (k, event) = self.event(rank, index);
                    self.before(rank, k, event, &mut before);
                    if before.iter().any(|(p, e)| self.next[*p] <= *e) {
                        break;
                    }
                    for (p, e) in &before {
                        if let Some(then) = self.then[*p].get(e) {
                            for (mine, theirs) in self.now[rank].iter_mut().zip(then) {
                                *mine = (*mine).max(*theirs);
                            }
                        }
                    }
                    self.now[rank][rank] = index as Clock + 1;
                    self.execute(rank, k, event)?;
                    let signals = match event {
                        Event::Publish | Event::Done => true,
                        Event::Step(i) => matches!(self.members[rank].schedule.steps[i], Step::Signal(_)),
                        _ => false,
                    };
                    if signals {
                        let now = self.now[rank].clone();
                        self.then[rank].insert(index, now);
                    }
                    self.proof.events += 1;
                    self.next[rank] += 1;
                    moved = true;
                }
            }
            if (0..self.n).all(|r| self.next[r] == self.events(r)) {
                return Ok(());
            }
            if !moved {
                let stuck = (0..self.n).filter(|r| self.next[*r] < self.events(*r));
                let each = stuck.map(|r| self.tell(r, self.next[r])).collect::<Vec<_>>();
                return Err(Flaw::Deadlock(each.join("; ")));
            }
        }
    }

    /// An event in words.
    fn tell(&self, rank: usize, index: usize) -> String {
        let (k, event) = self.event(rank, index);
        let what = match event {
            Event::User => "between operations".to_string(),
            Event::Drain => "before it reuses its slot".to_string(),
            Event::Publish => "publishing".to_string(),
            Event::Done => "at its end".to_string(),
            Event::Step(i) => format!("step {i} ({})", explain::step(&self.members[rank].schedule.steps[i])),
        };
        format!("rank {rank} in operation {k}, {what}")
    }

    fn execute(&mut self, rank: usize, k: usize, event: Event) -> Result<(), Flaw> {
        let s = self.members[rank].schedule;
        match event {
            Event::User => self.user(rank, k),
            Event::Drain => Ok(()),
            Event::Publish if s.payload > 0 => {
                let from = At(Place::In, 0);
                let got = self.read(rank, k, from, s.payload)?;
                self.write(rank, k, At(Place::Slot(rank as u16), 0), s.payload, &got)
            }
            Event::Publish => Ok(()),
            Event::Done => self.verify(rank, k),
            Event::Step(i) => match s.steps[i] {
                Step::Copy { dst, src, len } => {
                    if self.overlap(rank, k, dst, src, len)? {
                        return Err(Flaw::Shape(format!("{}: copies onto itself", self.tell(rank, self.next[rank]))));
                    }
                    let got = self.read(rank, k, src, len)?;
                    self.write(rank, k, dst, len, &got)
                }
                Step::Swap { a, b, len } => {
                    if self.overlap(rank, k, a, b, len)? {
                        return Err(Flaw::Shape(format!("{}: swaps with itself", self.tell(rank, self.next[rank]))));
                    }
                    let (x, y) = (self.read(rank, k, a, len)?, self.read(rank, k, b, len)?);
                    self.write(rank, k, a, len, &y)?;
                    self.write(rank, k, b, len, &x)
                }
                Step::Reduce { dst, first, n, count, op } => {
                    let sources = &s.sources[first as usize..(first + n) as usize];
                    self.reduce(rank, k, dst, sources, count, op)
                }
                Step::Average { dst, count, n } => {
                    let len = count * s.header.dtype.size() as u64;
                    let got = self.read(rank, k, dst, len)?;
                    let mut out = Vec::with_capacity(got.len());
                    for (at, len, v) in got {
                        let v = self.exprs.divide(v, n, s.header.dtype).map_err(|e| self.at_step(rank, &e))?;
                        out.push((at, len, v));
                    }
                    self.write(rank, k, dst, len, &out)
                }
                Step::Arrival(_)
                | Step::Wait { .. }
                | Step::Signal(_)
                | Step::SendsToMe(_)
                | Step::ReceivesFromMe(_) => Ok(()),
            },
        }
    }

    fn at_step(&self, rank: usize, why: &str) -> Flaw {
        Flaw::Shape(format!("{}: {why}", self.tell(rank, self.next[rank])))
    }

    /// Region and byte of a position that `rank` names in repetition `k`.
    fn place(&self, rank: usize, k: usize, at: At) -> Result<(usize, u64), Flaw> {
        let (owner, (kind, base)) = match at.0 {
            Place::In => (rank, self.homes[rank].input),
            Place::Out => (rank, self.homes[rank].output),
            Place::PeerIn(p) => (usize::from(p), self.home(p)?.input),
            Place::PeerOut(p) => (usize::from(p), self.home(p)?.output),
            Place::Slot(p) => (usize::from(p), (SLOT + k % self.ahead, 0)),
            Place::Stage(p, half) => (usize::from(p), (STAGE + usize::from(half % 2), 0)),
            Place::Result(p, half) => (usize::from(p), (RESULT + usize::from(half % 2), 0)),
        };
        if owner >= self.n {
            return Err(Flaw::Shape(format!("{at:?} is of no rank")));
        }
        let byte = base.checked_add(at.1).ok_or_else(|| Flaw::Shape(format!("{at:?} is beyond 2^64")))?;
        Ok((owner * REGIONS + kind, byte))
    }

    fn home(&self, p: u16) -> Result<&Home, Flaw> {
        self.homes.get(usize::from(p)).ok_or_else(|| Flaw::Shape(format!("rank {p} is none of {}", self.n)))
    }

    fn overlap(&self, rank: usize, k: usize, a: At, b: At, len: u64) -> Result<bool, Flaw> {
        let (a, b) = (self.place(rank, k, a)?, self.place(rank, k, b)?);
        Ok(a.0 == b.0 && len > 0 && a.1 < b.1.saturating_add(len) && b.1 < a.1.saturating_add(len))
    }

    fn names(region: usize) -> String {
        let owner = region / REGIONS;
        match region % REGIONS {
            FIRST => format!("the input of rank {owner}"),
            SECOND => format!("the output of rank {owner}"),
            i @ SLOT..STAGE => format!("slot {} of rank {owner}", i - SLOT),
            i @ STAGE..RESULT => format!("staging half {} of rank {owner}", i - STAGE),
            i => format!("result half {} of rank {owner}", i - RESULT),
        }
    }

    /// Fails unless `rank` at its present event is ordered behind what was done with a region.
    fn ordered(&self, rank: usize, region: usize, from: u64, to: u64, writes: bool) -> Result<(), Flaw> {
        let now = &self.now[rank];
        for (_, seg) in self.regions[region].segs.range(from..to) {
            let late = |who: &(u16, Clock)| now[usize::from(who.0)] < who.1;
            let reader = seg.read.iter().find(|r| writes && late(r));
            if let Some((who, when)) = reader.or(Some(&seg.written).filter(|w| late(w))) {
                let did = if reader.is_some() { "reads it" } else { "writes it" };
                let one = format!("{} {did}", self.tell(usize::from(*who), *when as usize - 1));
                let does = if writes { "writes it" } else { "reads it" };
                let other = format!("{} {does}", self.tell(rank, self.next[rank]));
                return Err(Flaw::Race { place: Self::names(region), from, to, one, other });
            }
        }
        Ok(())
    }

    fn bounds(&self, rank: usize, region: usize, at: u64, len: u64) -> Result<u64, Flaw> {
        let end = self.regions[region].segs.values().next_back().map_or(0, |s| s.end);
        match at.checked_add(len) {
            Some(to) if to <= end => Ok(to),
            _ => Err(self.at_step(rank, &format!("{len} bytes at {at} of {}, which has {end}", Self::names(region)))),
        }
    }

    /// Reads a range: (offset in it, bytes, value as if the range began at byte 0).
    fn read(&mut self, rank: usize, k: usize, at: At, len: u64) -> Result<Vec<(u64, u64, Val)>, Flaw> {
        if len == 0 {
            return Ok(Vec::new());
        }
        let (region, from) = self.place(rank, k, at)?;
        let to = self.bounds(rank, region, from, len)?;
        self.proof.accesses += 1;
        self.regions[region].split(from);
        self.regions[region].split(to);
        self.ordered(rank, region, from, to, false)?;
        let clock = self.now[rank][rank];
        let mut out = Vec::new();
        for (start, seg) in self.regions[region].segs.range_mut(from..to) {
            match seg.read.iter_mut().find(|r| usize::from(r.0) == rank) {
                Some(r) => r.1 = clock,
                None => seg.read.push((rank as u16, clock)),
            }
            let val = if seg.val.expr == 0 { JUNK } else { Val { base: seg.val.base + from as i64, ..seg.val } };
            out.push((start - from, seg.end - start, val));
        }
        Ok(out)
    }

    fn write(&mut self, rank: usize, k: usize, at: At, len: u64, what: &[(u64, u64, Val)]) -> Result<(), Flaw> {
        if len == 0 {
            return Ok(());
        }
        let (region, from) = self.place(rank, k, at)?;
        let to = self.bounds(rank, region, from, len)?;
        self.proof.accesses += 1;
        self.regions[region].split(from);
        self.regions[region].split(to);
        self.ordered(rank, region, from, to, true)?;
        let clock = self.now[rank][rank];
        for (off, len, v) in what {
            let val = if v.expr == 0 { JUNK } else { Val { base: v.base - from as i64, ..*v } };
            self.regions[region].replace(from + off, from + off + len, val, (rank as u16, clock));
        }
        Ok(())
    }

    fn reduce(&mut self, rank: usize, k: usize, dst: At, sources: &[At], count: u64, op: ReduceOp) -> Result<(), Flaw> {
        let size = self.members[rank].schedule.header.dtype.size() as u64;
        let len = count * size;
        let (to, to_at) = self.place(rank, k, dst)?;
        let mut all = Vec::with_capacity(sources.len());
        for src in sources {
            let (from, from_at) = self.place(rank, k, *src)?;
            if (from, from_at) != (to, to_at) && self.overlap(rank, k, dst, *src, len)? {
                return Err(self.at_step(rank, "a source overlaps the result and is not the same range"));
            }
            all.push(self.read(rank, k, *src, len)?);
        }
        let mut cuts: Vec<u64> = all.iter().flatten().map(|(off, _, _)| *off).chain([len]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let scaled: Vec<Option<usize>> = sources.iter().map(|src| src.0.scaled_by(rank)).collect();
        let mut at = vec![0usize; all.len()];
        let mut out = Vec::with_capacity(cuts.len());
        let mut vals = Vec::with_capacity(all.len());
        for cut in cuts.windows(2) {
            vals.clear();
            for (list, i) in all.iter().zip(&mut at) {
                while list[*i].0 + list[*i].1 <= cut[0] {
                    *i += 1;
                }
                vals.push(list[*i].2);
            }
            let v = self.exprs.reduce(op, &vals, &scaled).map_err(|e| self.at_step(rank, &e))?;
            if !cut[0].is_multiple_of(size) || v.base.rem_euclid(size as i64) != 0 {
                return Err(self.at_step(rank, "an element is torn apart"));
            }
            out.push((cut[0], cut[1] - cut[0], v));
        }
        self.write(rank, k, dst, len, &out)
    }

    /// The user of `rank` fills its input and scribbles over everything else that is its own.
    fn user(&mut self, rank: usize, k: usize) -> Result<(), Flaw> {
        let me = rank as u16;
        let clock = self.now[rank][rank];
        for kind in [FIRST, SECOND, STAGE, STAGE + 1, RESULT, RESULT + 1] {
            let region = rank * REGIONS + kind;
            let Some(end) = self.regions[region].segs.values().next_back().map(|s| s.end) else { continue };
            self.ordered(rank, region, 0, end, true)?;
            self.regions[region].replace(0, end, JUNK, (me, clock));
        }
        let (kind, at) = self.homes[rank].input;
        let len = self.members[rank].schedule.in_bytes;
        if len > 0 {
            let val = Val { expr: self.exprs.input(me, k as u16), base: -(at as i64) };
            let region = &mut self.regions[rank * REGIONS + kind];
            region.split(at);
            region.split(at + len);
            region.replace(at, at + len, val, (me, clock));
        }
        Ok(())
    }

    /// What `rank` has when it is done must be what the collective promises.
    fn verify(&mut self, rank: usize, k: usize) -> Result<(), Flaw> {
        let call = self.members[rank].call;
        let s = self.members[rank].schedule;
        if call.op == Op::Barrier {
            let late = |p: &usize| (self.now[rank][*p] as usize) < k * self.per_repetition(*p) + 3;
            if let Some(peer) = (0..self.n).find(late) {
                return Err(Flaw::Early { rank, peer });
            }
        }
        if !call.in_place {
            // The input is the caller's and stays, but for what a group receives elsewhere in the same memory.
            let got: Vec<(u64, u64)> = match (call.op, self.lists) {
                (Op::Group, Lists::Moves(moves)) => {
                    moves.iter().filter(|m| m.dst == rank).map(|m| (m.dst_at, m.dst_at + m.bytes)).collect()
                }
                _ => Vec::new(),
            };
            let own = self.exprs.input(rank as u16, k as u16);
            for (off, _, v) in self.read(rank, k, At(Place::In, 0), s.in_bytes)? {
                if v != (Val { expr: own, base: 0 }) && !got.iter().any(|g| g.0 <= off && off < g.1) {
                    let why = format!("it should not change, but {}", self.exprs.tell(v, off));
                    return Err(Flaw::Wrong { rank, place: "the input", at: off, why });
                }
            }
        }
        for (at, len, want) in wanted(self.members, self.lists, rank) {
            for (off, len, v) in self.read(rank, k, At(Place::Out, at), len)? {
                let wrong = |why: String| Flaw::Wrong { rank, place: "the output", at: at + off, why };
                let fact = self.exprs.facts[v.expr as usize];
                match want {
                    Want::Moved(from, src) => {
                        let expr = self.exprs.input(from as u16, k as u16);
                        if v != (Val { expr, base: src as i64 }) {
                            let has = self.exprs.tell(v, off);
                            return Err(wrong(format!("{has}, expected byte {} of rank {from}", src + off)));
                        }
                    }
                    Want::Reduced(src) => {
                        let everyone = u64::MAX >> (64 - self.n);
                        // Nothing need be done with the one input of a single rank, but to scale it.
                        let alone = self.n == 1 && call.redop != ReduceOp::PreMulSum;
                        let op = if alone { fact.op } else { Some(call.redop) };
                        if v.base != src as i64
                            || fact.ranks != everyone
                            || fact.op != op
                            || fact.repetition != k as u16
                        {
                            let has = self.exprs.tell(v, off);
                            return Err(wrong(format!(
                                "{has}, expected {} of all at byte {}",
                                call.redop.name(),
                                src + off
                            )));
                        }
                        self.same_everywhere(rank, k, (src + off, src + off + len), v.expr).map_err(wrong)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the expression of input bytes with what other ranks made of the same bytes.
    fn same_everywhere(&mut self, rank: usize, k: usize, bytes: (u64, u64), expr: u32) -> Result<(), String> {
        let known = self.results.entry(k).or_default();
        let (mut from, to) = bytes;
        while from < to {
            let before = known.range(..=from).next_back().map(|(_, v)| *v).filter(|v| v.0 > from);
            if let Some((end, theirs, who)) = before {
                if theirs != expr {
                    return Err(format!("rank {who} reduced the same element in another order than rank {rank}"));
                }
                from = end.min(to);
            } else {
                let until = known.range(from..).next().map_or(to, |(at, _)| (*at).min(to));
                known.insert(from, (until, expr, rank));
                from = until;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a pre-scaled sum may be made of: inputs by their own scale, sums of such as they are.
    #[test]
    fn an_input_is_scaled_once_and_a_sum_not_again() {
        let mut e = Exprs::new();
        let input = |e: &mut Exprs, rank| Val { expr: e.input(rank, 0), base: 0 };
        let (a, b, c) = (input(&mut e, 0), input(&mut e, 1), input(&mut e, 2));
        let mut sum = |vals: &[Val], scaled: &[Option<usize>]| e.reduce(ReduceOp::PreMulSum, vals, scaled);
        let two = sum(&[a, b], &[Some(0), Some(1)]).unwrap();
        assert!(sum(&[two, c], &[None, Some(2)]).is_ok());
        for (vals, scaled, why) in [
            ([a, b], [Some(0), None], "operand 1 is an input that nobody scales"),
            ([a, b], [Some(1), Some(1)], "operand 0 gets the scale of rank 1"),
            ([c, two], [Some(2), Some(0)], "operand 1 is a sum and would be scaled again"),
        ] {
            assert!(sum(&vals, &scaled).unwrap_err().contains(why), "{why}");
        }
        assert!(e.reduce(ReduceOp::Sum, &[two, c], &[None, None]).unwrap_err().contains("was reduced with"));
    }
}
